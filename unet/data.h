// data.h - a data file: its header, its images, and how it is checked when it is opened.
#pragma once
#include "config.h"

// A value of an image is a uint8_t (1 byte) or a float in [-1, 1] (4 bytes). image_value returns value i, in [-1, 1].
static bool knows_image_values(int bytes) { return bytes == 1 || bytes == 4; }
HD static inline float image_value(const void* images, int bytes, size_t i) {
    if (bytes == 1) return ((const uint8_t*)images)[i] / 127.5f - 1.0f;
    return ((const float*)images)[i];
}

// The first number of a file: of one of our data files, or of one of unet.cu (data_header).
constexpr int DATA_MAGIC = 20261120;
constexpr int UNET_CU_DATA_MAGIC = 20240620;
constexpr size_t READ_AT_START = (size_t)4 << 30; // a file of up to this many bytes is wholly read when it is opened
constexpr int VAL_IMAGES = 512;                   // the most images that a validation loss is the mean of
constexpr int BATCHES_AHEAD = 8;                  // how many batches in advance the system is asked to read
constexpr int MOST_VALUES = 4096;                 // the most numbers per image, the limit of --cond_dim
constexpr int MOST_NAME_BYTES = 1 << 20;          // the most bytes of the names of all numbers, and of all classes

// Data files and model files begin with a header of 256 slots of 4 bytes. In both, the first two slots are:
constexpr int SLOT_MAGIC = 0;
constexpr int SLOT_VERSION = 1; // the version of the format
// The others of a data file:
constexpr int DATA_SLOT_COUNT = 2;
constexpr int DATA_SLOT_CHANNELS = 3;
constexpr int DATA_SLOT_HEIGHT = 4;
constexpr int DATA_SLOT_WIDTH = 5;
constexpr int DATA_SLOT_CLASSES = 6;
constexpr int DATA_SLOT_BYTES = 7; // the size of a value of an image: 1 or 4
// the checksum of the header, computed with 0 in this slot and in DATA_SLOT_FOLDER
constexpr int DATA_SLOT_HEADER_CRC = 8;
// the checksum of all that follows the header (version 1), or of all that follows the images (version 2)
constexpr int DATA_SLOT_BODY_CRC = 9;
constexpr int DATA_SLOT_VALUES = 10;      // K, the numbers of each image
constexpr int DATA_SLOT_NAMES = 11;       // bytes of the numbers' names
constexpr int DATA_SLOT_CLASS_NAMES = 12; // bytes of the classes' names
constexpr int DATA_SLOT_FOLDER = 13;      // made by --data_dir: checksum_of_folder; 0: made in another way
constexpr int DATA_SLOT_KIND = 14;        // SAMPLES: written by --sample, which may replace the file; 0: other data
constexpr int DATA_SLOT_UNUSED = 15;      // from this slot on, all slots are 0
constexpr int SAMPLES = 1;

struct Dataset : InputFile {
    // 1: one checksum covers all images. 2: each image has a checksum. 0: a file of unet.cu, without checksums.
    int version = 0;
    int64_t count = 0; // N
    // Of a part of a file's images (part_of): their numbers in the file. Empty: count is all of them.
    std::vector<int32_t> numbers;
    int64_t file_count = 0; // how many images the file holds
    int C = 0, H = 0, W = 0;
    int classes = 0;    // 0: images have no labels
    int bytes = 1;      // the size of a value of an image: 1 (uint8) or 4 (float32)
    int K = 0;          // numbers of each image
    int name_bytes = 0; // bytes of the numbers' names
    int class_name_bytes = 0;
    // The header's checksum (unet.cu's files: 0). It identifies the whole file, because the header holds a checksum of
    // the rest.
    uint32_t header_crc = 0;
    std::vector<int32_t> labels; // (N), or empty
    std::vector<float> values;   // (N, K): the numbers
    std::string value_names;     // a line for each of the K numbers; or empty
    // by the classes' numbers; or empty. In a run: those of the model (take_class_names)
    std::vector<std::string> class_names;
    std::vector<uint32_t> image_crc; // (N), the checksum of each image; empty: not known
    int64_t asked = 0;               // load_batch has asked the system to fetch the images before this stream position
    std::string error;               // why an image could not be used
    std::shared_ptr<Dataset> cond;   // --cond_file: a picture for each image; null: there are none

    size_t image_bytes() const { return (size_t)C * H * W * bytes; }
    int64_t in_file(int64_t i) const { return numbers.empty() ? i : numbers[i]; }  // the number of image i in the file
    size_t image_at(int64_t i) const { return 1024 + in_file(i) * image_bytes(); } // the file's byte where it begins
    // A batch of B images is sent to the device in one buffer: images, labels (at a multiple of 4 bytes), numbers,
    // pictures. These functions return at which byte each begins.
    size_t labels_at(int B) const { return (B * image_bytes() + 3) / 4 * 4; }
    size_t values_at(int B) const { return labels_at(B) + B * sizeof(int); }
    size_t pictures_at(int B, const Config& c) const {
        return values_at(B) + (size_t)B * c.num_values() * sizeof(float);
    }
    size_t batch_bytes(int B, const Config& c) const {
        return pictures_at(B, c) + (cond ? B * cond->image_bytes() : 0);
    }
    // In the file, the images are followed by labels, numbers, names and checksums, all in words of 4 bytes.
    size_t label_words() const { return classes > 0 ? count : 0; }
    size_t value_words() const { return count * K; }
    size_t words_behind() const {
        const size_t checksums = version == 2 ? count : 0;
        return label_words() + value_words() + name_bytes / 4 + class_name_bytes / 4 + checksums;
    }
};

// Reads image i to memory at `to`. Returns whether it could be read and its checksum, if known, is right. If not,
// d->error says why. With one rank the program goes on then, to save what it has trained.
static bool read_image(Dataset* d, int64_t i, uint8_t* to) {
    const size_t n = d->image_bytes();
    const char* why = d->try_read(to, n, d->image_at(i));
    const bool has_crc = !d->image_crc.empty();
    if (!why && has_crc && crc32(0, to, n) != d->image_crc[i]) why = "its checksum is wrong";
    if (!why) return true;
    d->error = d->path + text(": image %ld can't be used (%s): the file was changed or damaged; make it again",
                              d->in_file(i), why);
    if (world.size > 1) refuse(d->error); // the other ranks can't do this step without this rank
    return false;
}

// Reads all images once. If their checksums are known, compares them and returns 0. Otherwise stores them, and returns
// the checksum of all images together.
static uint32_t check_images(Dataset* d) {
    std::vector<uint8_t> image(d->image_bytes());
    std::vector<uint32_t> found;
    uint32_t all = 0;
    for (int64_t i = 0; i < d->count; i++) {
        if (!read_image(d, i, image.data())) refuse(d->error);
        if (!d->image_crc.empty()) continue;
        found.push_back(crc32(0, image.data(), image.size()));
        all = crc32(all, image.data(), image.size());
    }
    if (d->image_crc.empty()) d->image_crc = found;
    return all;
}

// A header of unet.cu, another program, has no version: its fields lie one slot earlier. It becomes one of ours.
static Header data_header(const Dataset& d, const char* hint) {
    const int* s = d.header.slot;
    const int magic = s[SLOT_MAGIC];
    const int version = s[SLOT_VERSION];
    // s[1] to s[4]: images, channels, height, width. There are no classes, and values are floats.
    if (magic == UNET_CU_DATA_MAGIC) return Header{{DATA_MAGIC, 0, s[1], s[2], s[3], s[4], 0, 4}};
    must(magic == DATA_MAGIC, d.path,
         text("is not a data file (it starts with %d, not %d); %s", magic, DATA_MAGIC, hint));
    must(version == 1 || version == 2, d.path,
         text("is a data file of version %d and this program reads 1 and 2; make it again with prepare_data.py",
              version));
    return d.header;
}

// Checks the fields before any memory is requested: a damaged number could ask for any amount of it.
static void take_data_fields(Dataset* d, const Header& h, const char* hint) {
    auto field = [&](int slot, const char* name, int low, int high) {
        const int value = h.slot[slot];
        if (value < low || value > high)
            die("%s: its header is damaged (%s: %d, where %d to %d is possible); %s", d->path.c_str(), name, value, low,
                high, hint);
        return value;
    };
    d->version = h.slot[SLOT_VERSION];
    d->header_crc = h.slot[DATA_SLOT_HEADER_CRC];
    d->count = field(DATA_SLOT_COUNT, "images", 1, INT_MAX);
    d->file_count = d->count;
    d->C = field(DATA_SLOT_CHANNELS, "channels", 1, 64);
    d->H = field(DATA_SLOT_HEIGHT, "height", 1, 4096);
    d->W = field(DATA_SLOT_WIDTH, "width", 1, 4096);
    d->classes = field(DATA_SLOT_CLASSES, "classes", 0, INT_MAX);
    d->bytes = h.slot[DATA_SLOT_BYTES];
    if (!knows_image_values(d->bytes))
        die("%s: its header is damaged (bytes a value: %d, where 1 or 4 is possible); %s", d->path.c_str(), d->bytes,
            hint);
    d->K = field(DATA_SLOT_VALUES, "numbers an image", 0, MOST_VALUES);
    field(DATA_SLOT_KIND, "kind", 0, SAMPLES);
    d->name_bytes = field(DATA_SLOT_NAMES, "bytes of names", 0, d->K > 0 ? MOST_NAME_BYTES : 0);
    d->class_name_bytes = field(DATA_SLOT_CLASS_NAMES, "bytes of classes", 0, d->classes > 0 ? MOST_NAME_BYTES : 0);
    if (d->name_bytes % 4 || d->class_name_bytes % 4)
        die("%s: its header is damaged (bytes of names: %d and %d, where multiples of 4 are possible); %s",
            d->path.c_str(), d->name_bytes, d->class_name_bytes, hint);
}

// Returns the bytes that data and model files hold of the names of their classes: a line for each, filled up with zeros
// to a multiple of 4 bytes.
static std::string class_names_block(const std::vector<std::string>& names) {
    std::string block;
    for (const std::string& name : names) block += (block.empty() ? "" : "\n") + name;
    return block.append((4 - block.size() % 4) % 4, '\0');
}

// Returns the names of such a block. Ends the program if they are not as many as classes, all different, none empty.
static std::vector<std::string> read_class_names(const std::string& path, const std::string& block, int classes) {
    std::vector<std::string> names;
    std::istringstream lines(block.substr(0, block.find('\0')));
    for (std::string line; std::getline(lines, line);) names.push_back(line);
    const std::set<std::string> different(names.begin(), names.end());
    const bool as_many = block.empty() || std::ssize(different) == classes;
    const bool right = as_many && !different.contains("") && class_names_block(names) == block;
    must(right, path,
         text("its names of %d classes are damaged; make it again, or use an earlier checkpoint", classes));
    return names;
}

// Gives the labels the numbers that the classes of the same names have in a model. known: the names of the model's
// classes by their numbers. of: the file that knows them. If the images or the model have no names, the numbers stay.
static void take_class_names(Dataset* d, const std::vector<std::string>& known, const std::string& of) {
    if (d->class_names.empty() && !known.empty())
        print_line(d->path + ": has no names of classes, so they are compared by number with those of " + of);
    if (d->class_names.empty()) d->class_names = known;
    if (known.empty() || d->class_names == known) return;
    std::vector<int32_t> number; // in the model, by the number in this file
    for (const std::string& name : d->class_names) {
        const auto found = std::ranges::find(known, name);
        must(found != known.end(), d->path,
             "its class " + name + " is none of those of " + of + "; rename its folder, or start a new model");
        number.push_back((int32_t)(found - known.begin()));
    }
    for (int32_t& label : d->labels) label = number[label];
    d->classes = (int)known.size();
    d->class_names = known;
}

static void take_values(Dataset* d, const std::vector<int32_t>& behind) {
    const float* const numbers = (const float*)(behind.data() + d->label_words());
    const char* const names = (const char*)(numbers + d->value_words());
    d->values.assign(numbers, numbers + d->value_words());
    d->value_names.assign(names, d->name_bytes);
    while (d->value_names.ends_with('\0')) d->value_names.pop_back(); // zeros that fill up the last word of 4 bytes
    d->class_names = read_class_names(d->path, std::string(names + d->name_bytes, d->class_name_bytes), d->classes);
    for (size_t i = 0; i < d->values.size(); i++)
        if (!std::isfinite(d->values[i]))
            refuse(d->path + text(": image %zu has a number that is not finite; make the file again", i / d->K));
}

// body_crc: the header's checksum of all that follows the images. In version 1 it also covers the images.
static void read_behind_images(Dataset* d, uint32_t body_crc) {
    std::vector<int32_t> behind(d->words_behind());
    const size_t bytes = behind.size() * sizeof(int32_t);
    d->read(behind.data(), bytes, d->image_at(d->count));
    if (d->version == 2) d->image_crc.assign(behind.end() - d->count, behind.end());
    // In version 2, check_images returns 0, the value that the checksum of `behind` alone starts from.
    const bool reads_all = d->size <= READ_AT_START;
    const uint32_t images_crc = reads_all ? check_images(d) : 0;
    const bool can_check = d->version == 2 || (d->version == 1 && reads_all);
    const bool right = !can_check || crc32(images_crc, behind.data(), bytes) == body_crc;
    must(right, d->path, "its checksum is wrong, so it was damaged; make it again");

    if (d->classes) d->labels.assign(behind.begin(), behind.begin() + d->count);
    for (int64_t i = 0; i < std::ssize(d->labels); i++) {
        const int label = d->labels[i];
        if (label >= 0 && label < d->classes) continue;
        refuse(d->path + text(": image %ld has label %d of %d classes; make the file again", i, label, d->classes));
    }
    take_values(d, behind);
}

// The images of a file longer than READ_AT_START are not read here. In version 2, read_image checks them later.
static Dataset open_dataset(const std::string& path) {
    const char* hint = "prepare_data.py makes such files; make unpacks data/fashion32.bin and data/emoji64.bin";
    Dataset d;
    d.open(path, hint);
    Header h = data_header(d, hint);
    take_data_fields(&d, h, hint);

    const size_t size = d.image_at(d.count) + d.words_behind() * sizeof(int32_t);
    must(size == d.size, path,
         text("is %zu bytes long, but its header speaks of %zu; it was cut or damaged: make it again", d.size, size));
    check_unused(h, DATA_SLOT_UNUSED, 256, path, std::string("; ") + hint);
    h.slot[DATA_SLOT_HEADER_CRC] = 0;
    h.slot[DATA_SLOT_FOLDER] = 0;
    const bool right = d.version == 0 || crc32(0, h.slot, 1024) == d.header_crc;
    must(right, path, "its header's checksum is wrong, so it was damaged; make it again");

    read_behind_images(&d, (uint32_t)h.slot[DATA_SLOT_BODY_CRC]);
    posix_fadvise(d.file, 0, 0, POSIX_FADV_RANDOM);
    return d;
}

static void open_pictures(Dataset* d, const char* flag, const std::string& path) {
    if (path.empty()) return;
    d->cond = std::make_shared<Dataset>(open_dataset(path));
    const Dataset& cond = *d->cond;
    must(cond.count == d->count, text("--%s %s", flag, path.c_str()),
         text("has %ld pictures, and %s has %ld images; each image needs its own, in the same order", cond.count,
              d->path.c_str(), d->count));
    must(cond.H == d->H && cond.W == d->W, text("--%s %s", flag, path.c_str()),
         text("its pictures are %dx%d, and the images of %s %dx%d; prepare_data.py --image_size makes them fit", cond.H,
              cond.W, d->path.c_str(), d->H, d->W));
}

// Returns the images of a data set that have these numbers.
static Dataset part_of(const Dataset& d, const std::vector<int32_t>& numbers) {
    Dataset part = d;
    part.count = std::ssize(numbers);
    part.numbers = numbers;
    part.labels.clear();
    part.values.clear();
    part.image_crc.clear();
    for (const int32_t i : numbers) {
        if (!d.labels.empty()) part.labels.push_back(d.labels[i]);
        if (!d.image_crc.empty()) part.image_crc.push_back(d.image_crc[i]);
        const auto row = d.values.begin() + (int64_t)i * d.K;
        part.values.insert(part.values.end(), row, row + d.K);
    }
    if (d.cond) part.cond = std::make_shared<Dataset>(part_of(*d.cond, numbers));
    return part;
}

// --val_fraction: returns the images to train on, and those that are held out. The draw does not depend on --seed: all
// runs on a file hold out the same images, and a larger fraction holds out those of a smaller one, too.
static std::pair<Dataset, Dataset> hold_out(const Dataset& d, float fraction) {
    const int64_t count = (int64_t)std::floor((double)fraction * (double)d.count + 0.5);
    must(count > 0 && count < d.count, text("--val_fraction %g", fraction),
         text("holds out %ld of the %ld images of %s; another fraction must hold out one at least, and leave one",
              count, d.count, d.path.c_str()));
    std::vector<bool> is_held_out(d.count);
    for (int64_t k = 0; k < count; k++) is_held_out[permuted_index(0, k, 0, d.count, RANDOM_HELD_OUT)] = true;
    std::vector<int32_t> held_out, others;
    for (int32_t i = 0; i < d.count; i++) (is_held_out[i] ? held_out : others).push_back(i);
    return {part_of(d, others), part_of(d, held_out)};
}

// Continues a sentence that names the images to train on; "": no images of the file are held out.
static std::string held_out_words(const Dataset& d) {
    const int64_t held_out = d.file_count - d.count;
    return held_out ? text(", %ld others are held out", held_out) : "";
}
