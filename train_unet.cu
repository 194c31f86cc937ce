// train_unet.cu - trains and samples diffusion UNets (guided-diffusion's models) in plain C++/CUDA.
//
//   make train_unet && ./train_unet          trains on data/, writes pictures, a log and checkpoints into out/
//   ./train_unet --help                      every flag, with units and defaults
//
// This file is the whole trainer, for any GPU, to be read from top to bottom:
//
//   The program    data loader; the network, a list of layers; the memory plan; forward and backward, two walks over
//                  the list; DDPM's noise levels; a training step; the loop over the steps; main
//   The kernels    small operations, group norm, attention, the tiled 3x3 convolution, AdamW; which kernel runs when;
//                  the GPU's memory, streams and graphs
//
// What stands between the two is an interface of some eighty operations (unet/interface.h), such as conv_forward and
// groupnorm_backward. nvcc compiles the kernels below; g++ takes the same operations from dev/reference.h, as plain
// loops, which are also the oracle of the tests. Read those loops first if you want to know what an operation computes.
//
// Headers in unet/ are pages that one opens when one wants them. None of them is needed to follow this file:
//
//   unet/          interface.h (operations), network.h and trainer.h (structs), config.h and flags.h, elements.h,
//                  random.h; fp8.h and muon.h, a feature each; cpu.h
//   diffusion/     objectives beside DDPM, samplers, conditions: a formula and its code side by side
//   run/           a run and its folder: settings, model files, log, checkpoints, the page
//   gpu/           what kernels share, and kernels for special shapes; hopper/: sm_90a (TMA, wgmma, clusters, FP8)
//   host/          files, PNG, processes: what any program needs
//
// make one writes the program as one file. docs/READING.md is a route for an evening, and says how to add things.
//
// Words. B, C, H, W as in PyTorch; T = H W, attention's tokens; a d in front of a name: the gradient of it.
//   activation          a tensor between two layers, or its gradient
//   element             a number of a tensor as it lies in memory: fp32, bf16 or FP8; kernels know it as a type T
//   piece               16 bytes: 8 neighbouring channels in bf16, 4 in fp32
//   level               of noise: how noisy a sample is (NoiseLevel); of resolution: the layers between two changes of it
//   picture             what a model is conditioned on (--cond_file, --cond). What it learns to make is an image
//   skip connection     the 1x1 convolution on a residual block's way past its 3x3 convolutions (ConvSkip)
//   skipped step        a training step that changes nothing, because its loss or gradient looked wrong
//   rank                a process of a run, which has one GPU
//   flat array          all parameters one after the other, or their gradients, moments or averages, at the same places
//   arena, buffer       the memory of all activations; a part of it that lives as long as a tensor is in use
//   workspace           an operation's own memory, which the next operation may overwrite
//   stream              a queue of a GPU's operations
//   statistics          of each image and channel, the sums over pixels of x and x^2, of which a group norm makes its
//                       mean and variance
//   addend              a gradient from another reader of the same tensor, added to the gradient that a kernel stores
//   tile                the part of a result that a block or a warp computes at a time
//   tap, halo, slice    of a convolution: one of a filter's nine positions; a tile's pixels with a border around them;
//                       64 channels. (A rank's slice is the part of the weights that it updates: Slice)
//   stage, ring         a part of shared memory that is filled while others are read; several of them in turn
//   epilogue            what a kernel does with a tile's sums before it stores them: bias, embedding, addend, statistics
//   partial             a sum over a part of the pixels or keys; a second kernel adds partials up in a fixed order
//   fragment            the part of a tensor-core operand or result that lies in one thread's registers
//   swizzle             an order of a row's pieces in shared memory that brings a column of 8 rows into different banks
//
// Layouts: activations (B, H, W, C); convolution weights (Cout, kh, kw, Cin); files hold PyTorch's layouts.
// An empty // at the end of a line of code keeps clang-format from joining it with the next line.

// The program: what the story needs to know, and what a paper or a feature adds.
// structs of the data and the trainer; includes network.h (the list of layers), config.h (flags), interface.h (operations)
#include "unet/trainer.h"
// the learning rate, the verdict on a step, averages of the weights
#include "unet/diffusion/verdict.h"
// objectives beside DDPM: EDM, flow, consistency; the bound; losses by noise level
#include "unet/diffusion/objectives.h"
// pictures and numbers that a model is conditioned on; augmentation
#include "unet/diffusion/conditions.h"
#include "unet/diffusion/pictures.h"
// from noise to images: ddpm, ddim, euler, heun, dpmpp_2m, consistency
#include "unet/diffusion/samplers.h"
// --precision fp8
#include "unet/fp8.h"
// A run and its folder: flags that are left open, model files, the log, checkpoints, grids, the page, begin and end.
#include "unet/run/begin_end.h"
#include "unet/run/prepare.h"
#include "unet/run/samples.h"
#include "unet/run/settings.h"

// The device. The CPU's operations are dev/reference.h; what follows is for GPUs.
#include "unet/cpu.h"
// what kernels share: single instructions, pieces of 16 bytes, sums, tensor cores
#include "unet/gpu/shared.h"
// Hopper's kernels (sm_90a: TMA, wgmma, clusters, FP8), which main's kernels ask first: if (hopper_conv<BACKWARD>(c)) return;
#ifndef NO_HOPPER
#include "unet/gpu/hopper/attention_wgmma.h"
#include "unet/gpu/hopper/weights.h"
#else
#include "unet/gpu/no_hopper.h"
#endif
// what norms, attention and convolutions share, and kernels for special shapes
#include "unet/gpu/attention_general.h"
#include "unet/gpu/conv_any.h"
#include "unet/gpu/conv_weight_plan.h"
#include "unet/gpu/groupnorm_whole.h"
// between GPUs or processes
#include "unet/gpu/ranks.h"
// --optimizer muon, and its kernels
#include "unet/muon.h"

// =====================================================================================================================
// Part I. The program

// =====================================================================================================================
// Data: .bin files that may be larger than memory, the order of their images
// A data file begins with a header and images (N, C, H, W) of uint8 or float32. After them, a file may have labels (N),
// K numbers for each image (N, K) that a model may be conditioned on (--cond_dim), the names of these numbers, and
// checksums of the images (docs/FORMATS.md). The images stay on the disk: a step reads only its own images. The
// operating system is asked to fetch them into memory a few batches before the step. Labels and numbers are kept in
// memory. The program also reads data files of unet.cu, another program that trains UNets.
//
// The functions, in the order in which they run: if --data_dir names a folder of pictures, take_data_dir makes a data
// file of them. open_dataset checks the file, once. For each step, load_batch sends the images to the device; it calls
// image_at_position and read_image for each image.

// Reads image i into memory at `to`. Returns true if it could be read and its checksum is right (or not known).
// Otherwise d->error is the reason. With one rank, this function does not end the program, because a run first saves
// what it has trained (finish_stopped).
static bool read_image(Dataset* d, int64_t i, uint8_t* to) {
    const size_t n = d->image_bytes();
    // A file that was intact when it was opened may be changed, cut or damaged later.
    const char* why = d->try_read(to, n, d->image_at(i));
    const bool has_crc = !d->image_crc.empty();
    if (!why && has_crc && crc32(0, to, n) != d->image_crc[i]) why = "its checksum is wrong";
    if (!why) return true;
    d->error = d->path + text(": image %ld can't be used (%s): the file was changed or damaged; make it again", i, why);
    if (world.size > 1) refuse(d->error); // the other ranks can't do this step without this rank
    return false;
}

// Reads all images once. If their checksums are known, each image is compared with its checksum, and the result is 0.
// If not, the checksum of each image is stored in image_crc, and the result is the checksum of all images together.
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

// Returns the header of a data file. Files of unet.cu, another program, have another header: there is no version, so
// every field lies one slot before its place in our header, and some fields are missing. Such a header is turned into
// a header of our format, with version 0.
static Header data_header(const Dataset& d, const char* hint) {
    const int* s = d.header.slot;
    const int magic = s[SLOT_MAGIC];
    const int version = s[SLOT_VERSION];
    // s[1] to s[4] are the number of images, channels, height and width. There are no classes (0), and values are
    // floats (4 bytes).
    if (magic == UNET_CU_DATA_MAGIC) return Header{{DATA_MAGIC, 0, s[1], s[2], s[3], s[4], 0, 4}};
    must(magic == DATA_MAGIC, d.path,
         text("is not a data file (it starts with %d, not %d); %s", magic, DATA_MAGIC, hint));
    must(version == 1 || version == 2, d.path,
         text("is a data file of version %d and this program reads 1 and 2; make it again with prepare_data.py",
              version));
    return d.header;
}

// Copies the fields of a header that describe the images, and checks them. This comes before any memory is requested
// for labels or images. Otherwise a damaged number could make the program ask for any amount of memory.
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
    d->C = field(DATA_SLOT_CHANNELS, "channels", 1, 64);
    d->H = field(DATA_SLOT_HEIGHT, "height", 1, 4096);
    d->W = field(DATA_SLOT_WIDTH, "width", 1, 4096);
    d->classes = field(DATA_SLOT_CLASSES, "classes", 0, INT_MAX);
    d->bytes = h.slot[DATA_SLOT_BYTES];
    if (!knows_image_values(d->bytes))
        die("%s: its header is damaged (bytes a value: %d, where 1 or 4 is possible); %s", d->path.c_str(), d->bytes,
            hint);
    d->K = field(DATA_SLOT_VALUES, "numbers an image", 0, MOST_VALUES);
    d->name_bytes = field(DATA_SLOT_NAMES, "bytes of names", 0, d->K > 0 ? MOST_NAME_BYTES : 0);
    if (d->name_bytes % 4)
        die("%s: its header is damaged (bytes of names: %d, where a multiple of 4 is possible); %s", d->path.c_str(),
            d->name_bytes, hint);
}

// Copies the images' numbers and the names of these numbers into d. behind: all words that follow the images in the
// file.
static void take_values(Dataset* d, const std::vector<int32_t>& behind) {
    const float* const numbers = (const float*)(behind.data() + d->label_words());
    const char* const names = (const char*)(numbers + d->value_words());
    d->values.assign(numbers, numbers + d->value_words());
    d->value_names.assign(names, d->name_bytes);
    while (d->value_names.ends_with('\0')) d->value_names.pop_back(); // zeros that fill up the last word of 4 bytes
    for (size_t i = 0; i < d->values.size(); i++)
        if (!std::isfinite(d->values[i]))
            refuse(d->path + text(": image %zu has a number that is not finite; make the file again", i / d->K));
}

// Reads what follows the images in the file: labels if there are classes, the images' numbers and their names if there
// are numbers, and in version 2 each image's checksum.
// body_crc: a checksum from the header. It covers all that follows the images; in version 1 it also covers the images.
static void read_behind_images(Dataset* d, uint32_t body_crc) {
    std::vector<int32_t> behind(d->words_behind());
    const size_t bytes = behind.size() * sizeof(int32_t);
    d->read(behind.data(), bytes, d->image_at(d->count));
    if (d->version == 2) d->image_crc.assign(behind.end() - d->count, behind.end());
    // In version 1, body_crc covers the images and then `behind`, so it can only be checked if all images are read. In
    // version 2, check_images compares each image with its own checksum and returns 0, and body_crc covers only
    // `behind`. So images_crc is 0, the value that the checksum of `behind` alone starts from.
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

// Opens a data file and checks it. If the file is longer than READ_AT_START, its images are not read here. read_image
// checks an image's checksum each time that a step reads the image. But a long file of version 1 or of unet.cu has no
// checksums of single images, so its images are not checked.
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
    const bool right = d.version == 0 || crc32(0, h.slot, 1024) == d.header_crc;
    must(right, path, "its header's checksum is wrong, so it was damaged; make it again");

    read_behind_images(&d, (uint32_t)h.slot[DATA_SLOT_BODY_CRC]);
    // From here on images are read in a random order. So the system should not read what follows an image in advance.
    posix_fadvise(d.file, 0, 0, POSIX_FADV_RANDOM);
    return d;
}

// Opens the file of the pictures that the images of d are conditioned on. flag: the flag that names the file. path: its
// path; "" if there are no pictures.
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

// Returns the number of the first sample of this rank's k-th microbatch. micro: how many samples a microbatch has.
// Counted over all ranks, this microbatch is number k * ranks + rank of the step; step_gradients explains why.
static int64_t first_sample(int k, int micro) { return ((int64_t)k * world.size + world.rank) * micro; }

// Images come from an endless stream. Returns which image of the file is at a position of the stream. In training the
// stream consists of epochs: an epoch is all images of the file, in a new random order. Otherwise the stream is the
// file's images in the order of the file, again and again.
static int64_t image_at_position(const Dataset& d, const Config& c, bool training, int64_t position) {
    const int64_t epoch = position / d.count;
    const int64_t in_epoch = position % d.count;
    return training ? permuted_index(c.seed, in_epoch, epoch, d.count) : in_epoch;
}

// Reads the picture that belongs to image i (its condition), and writes it to memory at `to`. Returns whether it could
// be read and all its values are finite. If not, d->error says why.
static bool read_picture(Dataset* d, int64_t i, uint8_t* to) {
    Dataset* const cond = d->cond.get();
    if (!read_image(cond, i, to)) {
        d->error = cond->error;
        return false;
    }
    bool finite = true;
    const size_t values = cond->image_bytes() / cond->bytes;
    for (size_t k = 0; k < values; k++) finite = finite && std::isfinite(image_value(to, cond->bytes, k));
    if (finite) return true;
    d->error = cond->path + text(": image %ld holds a value that is not finite; make the file again", i);
    if (world.size > 1) refuse(d->error); // as in read_image: the other ranks can't do this step without this rank
    return false;
}

// Sends n samples of a batch to the device: images (n, C, H, W), labels (n), numbers (n, num_values) and, with
// --cond_file, the pictures (n, cond_channels, H, W) that the images are conditioned on. Images and pictures are sent
// as their files hold them, as bytes or floats. The device turns bytes into floats where it reads them (image_value,
// canvas_value). With --augment, a row of the numbers ends with the numbers that describe the image's augmentation.
// They are zeros here. In training, the device then overwrites them (augment_if_asked). Validation keeps the zeros,
// because it does not change its images.
// The batch is the B samples from position `first` of the stream on. This rank sends n = own_images of them.
// In training, these are the rank's microbatches, one after the other, and some images lose their class and their
// numbers (--class_dropout). Outside of training the rank sends all B samples.
// Returns whether all images could be used. If not, nothing was sent.
static bool load_batch(Upload* batch, Dataset* d, const Config& c, bool training, int64_t first, int B) {
    const int micro = c.micro();
    const int own_images = training ? B / world.size : B;
    // Returns which sample of the batch this rank's k-th sample is.
    auto sample = [&](int k) { return training ? first_sample(k / micro, micro) + k % micro : k; };
    auto image = [&](int64_t position) { return image_at_position(*d, c, training, position); };

    // Ask the operating system to fetch the images of later batches, unless it was asked before. The first call asks
    // for the images of this batch and of the next BATCHES_AHEAD batches. In training, later calls ask for one more
    // batch each.
    const int64_t ahead = first + (BATCHES_AHEAD + 1) * (int64_t)B;
    for (d->asked = std::max(d->asked, first); d->asked < ahead; d->asked += B)
        for (int k = 0; k < own_images; k++) {
            const int64_t i = image(d->asked + sample(k));
            for (const Dataset* file : {d, d->cond.get()})
                if (file) posix_fadvise(file->file, file->image_at(i), file->image_bytes(), POSIX_FADV_WILLNEED);
        }

    // Wait until the batch that the host's buffer held before has been sent, because this call fills the buffer again.
    wait_for_host_side(batch);
    int* labels = (int*)(batch->host + d->labels_at(own_images));
    float* values = (float*)(batch->host + d->values_at(own_images));
    uint8_t* pictures = batch->host + d->pictures_at(own_images, c);
    // An image loses its class and its numbers if the image's random word is smaller than this.
    const uint32_t classless = dropout_threshold(training ? c.class_dropout : 0);
    // In training, the argument `first` is the step's number times B (train_step). So this quotient is the step's
    // number.
    const uint32_t step = (uint32_t)(first / B);
    for (int k = 0; k < own_images; k++) {
        const int64_t b = sample(k);
        const int64_t i = image(first + b);
        // Reads the image from the file, and checks it, if its checksum is known (Dataset::image_crc).
        if (!read_image(d, i, batch->host + k * d->image_bytes())) return false;
        if (d->cond && !read_picture(d, i, pictures + k * d->cond->image_bytes())) return false;
        labels[k] = d->labels.empty() ? 0 : d->labels[i];
        const Words random = philox(c.seed, 0, (uint32_t)b, step, RANDOM_CLASS_DROPOUT);
        const bool left_out = random.w[0] < classless;
        if (left_out) labels[k] = c.num_classes; // this label stands for no class
        for (int j = 0; j < c.num_values(); j++) {
            const bool is_known = j < c.cond_dim && !left_out;
            values[k * c.num_values() + j] = is_known ? d->values[i * c.cond_dim + j] : 0;
        }
    }
    send(batch); // on a GPU, the copy stream copies the batch to it, while the GPU computes the step before
    return true;
}

// =====================================================================================================================
// The network: a list of layers, made of guided-diffusion's flags
// build_unet goes through the architecture once, as guided-diffusion's UNetModel does. It appends to two lists:
// parameters (in state_dict order) and layers (in the order of the forward pass). Different configurations
// have different lists.
//
//   t, labels, values -> sinusoids, linear, SiLU, linear [+ label] [+ linear of the values], SiLU, linear:
//                        the embedding (B, columns): each residual block reads columns of its own
//
//   x -> conv --------------------------------- skip --------------------------------> [ | ] -> norm, SiLU, conv -> out
//          | residual block [+ attention] ------ skip -------> [ | ] residual block [+ attention]  ^
//          v half the resolution                                                      double it | 64 x 64
//          | residual block [+ attention] -- skip --> [ | ] residual block [+ attention]
//          v half                                                           double ^ | 32 x 32
//          +-----> middle: residual block, attention, residual block --------------+
//
//   residual block   [x1 | x2] -> norm, SiLU -> [half or double] -> conv 3x3 + embedding
//                              -> norm, SiLU, dropout -> conv 3x3 + shortcut
//   attention block  x -> norm -> qkv (conv 1x1) -> attention -> conv 1x1 + x
//
// [ | ] stands for the channels of the layer before, followed by those of the skip. The other brackets, except
// [x1 | x2], enclose what only some networks or blocks have. The numbers are the resolutions for images of 64 x 64.
// With --use_scale_shift_norm the embedding is not added after the first convolution: it scales and shifts the result
// of the second norm instead.
// The shortcut is the block's input, at half or double its resolution if the block changes the resolution. If the
// number of channels changes, the shortcut is a 1x1 convolution of that input (a skip connection, see Words).
// The drawing of the network is simplified. At the resolution of `middle` there are also residual blocks with skips.
// The output of each `half` is also a skip. In the drawing, the uppermost skip seems to end behind the residual blocks.
// But every skip ends in a residual block: in the second half of the network, a level has one residual block more than
// in the first half (add_output_blocks). With --resblock_updown, `half` and `double` are residual blocks, too, but
// these have no skip as an input.
//
// A layer has a kind (LayerKind): what it computes. It also has indices of tensors, parameters and buffers. An index is
// -1 if the layer has no such tensor, parameter or buffer.
//
// The functions run in this order: build_unet calls add_embedding, add_input_blocks, add_resblock and
// add_attention_block (for `middle`), add_output_blocks, choose_fp8 (with --precision fp8) and place_params; "The plan"
// plans the memory; then "Forward and backward" walks over the list, and calls a function of each layer's kind (its forward or its
// backward function) with what layer_args returns for the layer.

// Looks up all that a layer's functions need. If the network has no memory yet (plan_memory), the pointers to tensors
// and gradients are null. If the walk has no weights, the pointers to weights are null. The shapes are right even then:
// build_unet calls this function for the shapes alone.
static LayerArgs layer_args(const Walk& walk, const Layer& layer) {
    UNet* const net = walk.net;
    const Tensor x = net->tensor(layer.x1), out = net->tensor(layer.out);
    LayerArgs a{};
    a.net = net;
    a.layer = &layer;
    a.stream = walk.stream;
    // Shapes.
    a.B = walk.B;
    a.H = x.H;
    a.W = x.W;
    a.Cin = x.C;
    a.C2 = net->tensor(layer.x2).C;
    a.Hout = out.H;
    a.Wout = out.W;
    a.Cout = out.C;

    auto tensor = [&](int t) { return memory_of(walk, net->tensor(t).buffer); };
    auto stats = [&](int t) { return Stats{(double*)memory_of(walk, net->tensor(t).stats), net->tensor(t).parts}; };
    a.x1 = tensor(layer.x1);
    a.x2 = tensor(layer.x2);
    a.residual = tensor(layer.residual);
    a.out = tensor(layer.out);
    a.stats1 = stats(layer.x1);
    a.stats2 = stats(layer.x2);
    a.out_stats = stats(layer.out);

    // A parameter begins at the same index in all flat arrays. The elements of the copy may be smaller than floats, so
    // the weight's address in the copy is computed in bytes.
    if (layer.weight >= 0) {
        const size_t weight = net->params[layer.weight].offset;
        const bool last = layer.weight + 1 == (int)net->params.size(); // no parameter follows, so there is no bias
        const size_t bias = last ? weight : net->params[layer.weight + 1].offset;
        if (walk.weights.fp32) {
            a.weight = walk.weights.fp32 + weight;
            a.bias = walk.weights.fp32 + bias;
        }
        if (walk.weights.copy) a.copy = (const act*)((const char*)walk.weights.copy + weight * act_bytes());
        if (walk.grads) {
            a.dweight = walk.grads + weight;
            a.dbias = walk.grads + bias;
        }
    }

    // The embedding's projections for all residual blocks lie side by side in one tensor. This layer's columns begin at
    // emb_byte.
    const size_t emb_byte = layer.emb_offset * sizeof(float);
    a.emb = buffer_data<float>(net, net->tensor(layer.emb).buffer, emb_byte);
    a.emb_stride = net->tensor(net->emb).C; // how many columns all blocks have together
    a.demb = buffer_data<float>(net, layer.demb, emb_byte);
    a.saved = buffer_data<float>(net, layer.saved);
    a.dropout = walk.dropout;
    a.dropout.layer = (uint32_t)layer.dropout_block;
    if (layer.dropout_block < 0) a.dropout.p = 0; // no dropout follows this layer
    if (layer.skip >= 0) {
        const LayerArgs skip = layer_args(walk, net->layers[layer.skip]);
        a.skip = {skip.x1, skip.x2, skip.copy, skip.bias, skip.Cin, skip.C2};
    }

    // The backward pass: where the gradients of the output and of the inputs lie.
    auto grad = [&](const GradPlan& g) {
        return Grad{buffer_data(net, g.d), buffer_data(net, g.add1), buffer_data(net, g.add2)};
    };
    a.dout = buffer_data(net, layer.dout);
    a.d1 = grad(layer.d1);
    a.d2 = grad(layer.d2);
    if (walk.weights.fp8.weights) add_fp8_args(&a, walk, layer);
    return a;
}

// The layers of the embedding. Their tensors are in fp32 and have B rows.

// Makes sinusoids of t. This is the first layer of the embedding.
static void forward_timestep(LayerArgs& a) {
    const int max_period = a.net->config.max_period;
    timestep_embedding_forward(a.out_fp32(), a.net->t, a.B, a.Cout, max_period, a.stream);
}
constexpr LayerKind TIMESTEP{
    .name = "timestep embedding",
    .forward = forward_timestep,
    .embedding = true,
};

// A linear layer.
static void forward_linear(LayerArgs& a) {
    linear_forward(a.out_fp32(), a.x_fp32(), a.weight, a.bias, // out, x, weight, bias
                   a.B, a.Cin, a.Cout, a.stream);
}
static void backward_linear(LayerArgs& a) {
    linear_backward(a.d1_fp32(), a.dweight, a.dbias,     // gradients of x, weight, bias
                    a.dout_fp32(), a.x_fp32(), a.weight, // dout, x, weight
                    a.B, a.Cin, a.Cout);
}
static double linear_flops(const LayerArgs& a) { return 2.0 * a.B * a.Cin * a.Cout; }
static Workspace linear_workspace(const LayerArgs& a) {
    return {.main = linear_backward_workspace(a.B, a.Cin, a.Cout)};
}
constexpr LayerKind LINEAR{
    .name = "linear",
    .forward = forward_linear,
    .backward = backward_linear,
    .backward_reads = LayerKind::INPUT,
    .embedding = true,
    .flops = linear_flops,
    .workspace = linear_workspace,
};

// The nonlinearity between linear layers. (Where a nonlinearity follows a group norm, the norm computes it.)
static void forward_silu(LayerArgs& a) {
    const size_t n = (size_t)a.B * a.Cin;
    silu_forward(a.out_fp32(), a.x_fp32(), n, a.stream);
}
static void backward_silu(LayerArgs& a) {
    const size_t n = (size_t)a.B * a.Cin;
    silu_backward(a.d1_fp32(), a.dout_fp32(), a.x_fp32(), n);
}
constexpr LayerKind SILU{
    .name = "silu",
    .forward = forward_silu,
    .backward = backward_silu,
    .backward_reads = LayerKind::INPUT,
    .embedding = true,
};

// Adds a row of a table to the embedding: the row of the image's class.
static void forward_label(LayerArgs& a) {
    const float* const table = a.weight;
    label_embedding_forward(a.out_fp32(), a.x_fp32(), table, a.net->labels, a.B, a.Cin, a.stream);
}
static void backward_label(LayerArgs& a) {
    const int rows = a.net->params[a.layer->weight].shape[0];
    float* const dtable = a.dweight;
    label_embedding_backward(a.d1_fp32(), dtable, a.dout_fp32(), a.net->labels, a.B, rows, a.Cin);
}
constexpr LayerKind LABEL{
    .name = "label embedding",
    .forward = forward_label,
    .backward = backward_label,
    .embedding = true,
};

// Adds a projection of the image's numbers (--cond_dim) to the embedding.
static void forward_values(LayerArgs& a) {
    const int K = a.net->config.num_values();
    values_embedding_forward(a.out_fp32(), a.x_fp32(), a.weight, a.net->values, a.B, K, a.Cin, a.stream);
}
static void backward_values(LayerArgs& a) {
    const int K = a.net->config.num_values();
    values_embedding_backward(a.d1_fp32(), a.dweight, a.dout_fp32(), a.net->values, a.B, K, a.Cin);
}
static double values_flops(const LayerArgs& a) { return 2.0 * a.B * a.net->config.num_values() * a.Cin; }
constexpr LayerKind VALUES{
    .name = "values embedding",
    .forward = forward_values,
    .backward = backward_values,
    .embedding = true,
    .flops = values_flops,
};

// The layers between the images and the network's output.

// A convolution, 3x3 or 1x1, with all that is added to its result: bias, embedding, and residual or skip connection.
// Its backward function only computes the input's gradient: the weight gradients of several layers are computed
// together (see unet_backward).
static void forward_conv(LayerArgs& a) {
    ConvShape s = a.conv();
    if (a.weight_fp8) s.in = Element::FP8;
    conv_forward(a.out, a.stats(), // what it writes
                 a.x1, a.x2, a.weight_fp8 ? a.weight_fp8 : a.copy, a.bias, a.emb, a.emb_stride, a.residual, s, a.skip,
                 a.factors_fp8);
}
static void backward_conv(LayerArgs& a) {
    ConvShape s = a.conv();
    if (!a.turned_fp8) return conv_backward_input(a.d1, a.d2, a.dout, a.copy, s);
    s.out = Element::FP8_GRADIENT;
    conv_backward_input(a.d1, a.d2, (const act*)a.dout_fp8.bytes, a.turned_fp8, s, a.dx_factors_fp8);
}
static double conv_flops(const LayerArgs& a) {
    const double weights = (double)a.net->params[a.layer->weight].size;
    return 2.0 * a.B * a.Hout * a.Wout * weights; // every weight is used once for every pixel of the output
}
static Workspace conv_layer_workspace(const LayerArgs& a) {
    ConvShape s = a.conv();
    size_t side = conv_workspace(s);
    // In training, the weight gradient may be in FP8 (LayerArgs::weight_work). Then the pixels are divided among blocks
    // in another way, so it may need a larger workspace.
    if (a.layer->fp8) {
        s.in = Element::FP8;
        s.out = Element::FP8_GRADIENT;
        side = std::max(side, conv_workspace(s));
    }
    return {.main = conv_detour_bytes(a.conv()), .side = side};
}
constexpr LayerKind CONV{
    .name = "conv",
    .forward = forward_conv,
    .backward = backward_conv,
    .backward_reads = LayerKind::INPUT,
    .sums = true,
    .flops = conv_flops,
    .workspace = conv_layer_workspace,
};

// A group norm, with the nonlinearity and the dropout that follow it.
static void forward_norm(LayerArgs& a) {
    float* const mean = a.saved;
    // If a convolution reads the result in FP8, the norm writes it in FP8 alone (plan_fp8).
    groupnorm_forward(a.out_fp8.bytes ? nullptr : a.out, mean, a.rstd(), // what it writes, besides a.out_fp8
                      a.x1, a.stats1, a.x2, a.stats2,                    // its inputs and the sums of their channels
                      a.weight, a.bias, a.emb, a.emb_stride, a.dropout, a.norm(), a.out_fp8);
}
static void backward_norm(LayerArgs& a) {
    const float* const mean = a.saved;
    groupnorm_backward(a.d1, a.d2, a.dweight, a.dbias, a.demb, // what it writes, besides d1_fp8, d2_fp8
                       a.dout, a.x1, a.x2, mean, a.rstd(),     // dout, the inputs, and what the forward pass has saved
                       a.weight, a.bias, a.emb, a.emb_stride, a.dropout, a.norm(), a.d1_fp8, a.d2_fp8);
}
static Workspace norm_workspace(const LayerArgs& a) {
    return {.main = groupnorm_backward_workspace(a.norm()), .sums = norm_sums_bytes(a.norm())};
}
constexpr LayerKind GROUPNORM{
    .name = "group norm",
    .forward = forward_norm,
    .backward = backward_norm,
    .backward_reads = LayerKind::INPUT | LayerKind::EMB,
    .workspace = norm_workspace,
};

// Attention between the pixels of an image.
static void forward_attention(LayerArgs& a) {
    SoftmaxRow* const rows = (SoftmaxRow*)a.saved;
    attention_forward(a.out, rows, a.x1, a.B, a.tokens(), a.Cout, a.layer->heads);
}
static void backward_attention(LayerArgs& a) {
    const SoftmaxRow* const rows = (SoftmaxRow*)a.saved;
    act* const dqkv = a.d1.dx;
    attention_backward(dqkv, a.dout, a.x1, a.out, rows, // what it writes, then what it reads
                       a.B, a.tokens(), a.Cout, a.layer->heads);
}
static double attention_flops(const LayerArgs& a) {
    // For each of the T x T pairs of tokens and each channel there are two products: q k^T and P v.
    const double products = 2;
    return products * 2 * a.B * a.tokens() * a.tokens() * a.Cout;
}
static Workspace attention_workspace(const LayerArgs& a) {
    return {.main = attention_backward_workspace(a.B, a.tokens(), a.Cout, a.layer->heads)};
}
constexpr LayerKind ATTENTION{
    .name = "attention",
    .forward = forward_attention,
    .backward = backward_attention,
    .backward_reads = LayerKind::INPUT | LayerKind::OUTPUT,
    .flops = attention_flops,
    .workspace = attention_workspace,
};

// Halves the resolution: each new pixel is the average of 2 x 2 pixels.
static void forward_downsample(LayerArgs& a) { downsample_forward(a.out, a.stats(), a.x1, a.B, a.H, a.W, a.Cin); }
static void backward_downsample(LayerArgs& a) { downsample_backward(a.d1, a.dout, a.B, a.H, a.W, a.Cin); }
constexpr LayerKind DOWNSAMPLE{
    .name = "downsample",
    .forward = forward_downsample,
    .backward = backward_downsample,
    .sums = true,
};

// Doubles the resolution: each pixel becomes 2 x 2 equal pixels.
static void forward_upsample(LayerArgs& a) { upsample_forward(a.out, a.stats(), a.x1, a.B, a.H, a.W, a.Cin); }
static void backward_upsample(LayerArgs& a) { upsample_backward(a.d1, a.dout, a.B, a.H, a.W, a.Cin); }
constexpr LayerKind UPSAMPLE{
    .name = "upsample",
    .forward = forward_upsample,
    .backward = backward_upsample,
    .sums = true,
};

// Puts a picture's channels (--cond_channels) after the channels of the image.
static void forward_join(LayerArgs& a) {
    join_channels(a.out_fp32(), a.x_fp32(), a.net->cond, a.B, a.H * a.W, a.Cin, a.net->config.cond_channels);
}
constexpr LayerKind JOIN{
    .name = "condition",
    .forward = forward_join,
    .fp32 = true,
};

// --patch_size: squares of pixels become channels (PATCHES), and at the end channels become squares of pixels (PIXELS).
// The backward pass of PIXELS turns the output's gradient into patches. It passes Hout and Wout to to_patches, which
// needs the size in pixels.
static void forward_patches(LayerArgs& a) {
    const int p = a.net->config.patch();
    to_patches(a.out_fp32(), a.x_fp32(), a.B, a.H, a.W, a.Cin, p);
}
static void forward_pixels(LayerArgs& a) {
    const int p = a.net->config.patch();
    from_patches(a.out_fp32(), a.x_fp32(), a.B, a.Hout, a.Wout, a.Cout, p);
}
static void backward_pixels(LayerArgs& a) {
    const int p = a.net->config.patch();
    to_patches(a.d1_fp32().dx, a.dout_fp32(), a.B, a.Hout, a.Wout, a.Cout, p);
}
constexpr LayerKind PATCHES{
    .name = "patches",
    .forward = forward_patches,
    .fp32 = true,
};
constexpr LayerKind PIXELS{
    .name = "pixels",
    .forward = forward_pixels,
    .backward = backward_pixels,
    .fp32 = true,
};

static int add_tensor(UNet* net, int H, int W, int C, Element element) {
    const size_t values = (size_t)H * W * C;
    Tensor tensor{.H = H, .W = W, .C = C, .element = element};
    tensor.buffer = add_buffer(net, values * bytes_of(element));
    net->tensors.push_back(tensor);
    return (int)net->tensors.size() - 1;
}

typedef std::vector<int> Shape;
// Adds a parameter, and returns its index in net->params. Its place in the flat arrays is chosen later (place_params).
static int add_param(UNet* net, const std::string& name, Shape shape, ParamInit init, int heads = 0) {
    size_t size = 1;
    for (int n : shape) size *= n;
    net->params.push_back(Param{name, shape, size, 0, init, heads});
    net->num_params += size;
    return (int)net->params.size() - 1;
}

// Adds the parameters NAME.weight and NAME.bias. Returns the weight's index; the bias has the next index. shape: the
// weight's shape, (outputs, inputs ...).
static int add_params(UNet* net, const std::string& name, Shape shape, ParamInit init = INIT_UNIFORM, int heads = 0) {
    const ParamInit bias_init = init == INIT_ONE ? INIT_ZERO : init;
    const int weight = add_param(net, name + ".weight", shape, init, heads);
    add_param(net, name + ".bias", {shape[0]}, bias_init, heads);
    return weight;
}

// Adds the weight and the bias of a layer of kind CONV. The weight is special in three ways. Unless activations are
// fp32, kernels read a copy of it in the activations' type (param_group). Its gradient is not computed by the layer's
// backward function, but together with those of other convolutions (WeightGradients). Files hold its elements in
// another order (permute_param).
static int add_conv_params(UNet* net, const std::string& name, Shape shape, ParamInit init, int heads = 0) {
    const int weight = add_params(net, name, shape, init, heads);
    net->params[weight].of_conv = true;
    return weight;
}

// Ends the program if a convolution's weight was not added by add_conv_params, or if add_conv_params has added a weight
// that no convolution reads.
static void check_conv_params(const UNet& net) {
    for (size_t i = 0; i < net.params.size(); i++) {
        auto reads_it = [&](const Layer& l) { return l.kind == &CONV && l.weight == (int)i; };
        const bool is_read_by_conv = std::ranges::any_of(net.layers, reads_it);
        if (net.params[i].of_conv != is_read_by_conv)
            die("internal error: %s must come from add_conv_params if a layer of kind CONV has it, and else must not",
                net.params[i].name.c_str());
    }
}

// Appends a layer and the new tensor (H, W, C) that the layer writes. Returns the tensor's index.
static int add_layer(UNet* net, Layer l, int C, int H = 1, int W = 1, Element element = act_element) {
    const LayerKind& kind = *l.kind;
    if (l.weight >= 0 && !kind.backward) die("internal error: %s has weights but no backward pass", l.name.c_str());
    l.out = add_tensor(net, H, W, C, kind.fp32 ? Element::FP32 : element);
    net->tensors[l.out].needs_grad = kind.backward;
    net->layers.push_back(l);
    return l.out;
}

// Adds a convolution. l: a layer with its name, its input, and all that differs from a plain 1x1 convolution. If
// l.weight is not -1, the parameters have been added already.
static int add_conv(UNet* net, Layer l, int Cout, ParamInit init = INIT_UNIFORM, Element element = act_element) {
    l.kind = &CONV;
    const ConvShape s = layer_args(Walk{.net = net, .B = 1}, l).conv();
    const Shape shape{Cout, s.C1 + s.C2, l.kernel, l.kernel};
    if (l.weight < 0) l.weight = add_conv_params(net, l.name, shape, init, l.heads);
    return add_layer(net, l, Cout, s.out_H(), s.out_W(), element);
}

// The nonlinearity after the norms of residual blocks, and after the norm before the last convolution.
constexpr Nonlinearity BEHIND_NORMS = Nonlinearity::SILU;

// Adds a group norm over [x1 | x2]. The norm needs sums of its inputs' channels (Stats). The layers that write these
// inputs also compute the sums, so each input gets a buffer for its sums.
static int add_norm(UNet* net, Layer l) {
    for (int input : {l.x1, l.x2}) {
        if (input < 0 || net->tensors[input].stats >= 0) continue; // no input, or its sums have a buffer already
        const auto writer = std::ranges::find(net->layers, input, &Layer::out);
        if (writer == net->layers.end() || !writer->kind->sums)
            die("internal error: %s reads a tensor whose layer leaves no sums of its channels", l.name.c_str());
        const Tensor x = net->tensors[input];
        const size_t sums = (size_t)x.C * 2 * max_stat_parts(x.H, x.W);
        net->tensors[input].stats = add_buffer(net, sums * sizeof(double));
    }
    const Tensor x = net->tensors[l.x1];
    const int C = x.C + net->tensor(l.x2).C;
    l.kind = &GROUPNORM;
    l.weight = add_params(net, l.name, {C}, INIT_ONE);
    l.saved = add_buffer(net, 2 * 32 * sizeof(float)); // mean and rstd of 32 groups
    return add_layer(net, l, C, x.H, x.W);
}

enum Resample { SAME, UP, DOWN };

// DOWN: adds an average pool. UP: adds a nearest neighbour upsampling. SAME: adds nothing, and returns x. None of these
// has parameters.
static int add_resample(UNet* net, Resample resample, const std::string& name, int x) {
    const Tensor t = net->tensors[x];
    switch (resample) {
    case SAME: return x;
    case UP: return add_layer(net, {.kind = &UPSAMPLE, .name = name, .x1 = x}, t.C, 2 * t.H, 2 * t.W);
    case DOWN: return add_layer(net, {.kind = &DOWNSAMPLE, .name = name, .x1 = x}, t.C, t.H / 2, t.W / 2);
    }
    ALL_CASES_RETURN
}

// Ends a residual block or an attention block. The block consists of the layers from `first` on. Returns its output.
// With --use_checkpoint (Chen et al. 2016, arXiv:1604.06174) only the input tensors and the output tensor of such a
// block are kept. Before the block's backward pass its layers are computed again, except for two layers, whose results
// the backward passes of the block's layers do not read. One is the last layer. The other is the layer of the block
// whose result the last layer adds to its own, if there is such a layer: the 1x1 convolution of the shortcut or,
// without it, the layer that changes the resolution of the block's input (see add_resblock).
static int end_block(UNet* net, size_t first) {
    const Layer last = net->layers.back();
    const int end = (int)net->layers.size() - 1;
    for (Layer& l : std::span(net->layers).subspan(first)) {
        const bool is_read = l.out != last.out && l.out != last.residual; // the block's backward pass needs l.out
        if (net->config.use_checkpoint && is_read) l.block_end = end;
    }
    return last.out;
}

// Adds a residual block: group norm, SiLU, convolution, embedding; then group norm, SiLU, dropout, convolution, plus
// the block's input. If the number of channels changes, the input goes through a 1x1 convolution before it is added.
// The embedding is added after the first convolution. With --use_scale_shift_norm it scales and shifts the result of
// the second norm instead. With UP or DOWN, the resolution changes after the first SiLU. The resolution of the input
// that is added at the end changes, too.
static int add_resblock(UNet* net, const std::string& name, int x1, int x2, int Cout, Resample resample = SAME) {
    const Config& c = net->config;
    const int Cin = net->tensor(x1).C + net->tensor(x2).C;
    const size_t first = net->layers.size();

    // The first norm and the change of resolution. With UP, the first convolution enlarges its input as it reads it.
    Layer norm1{.name = name + ".in_layers.0", .x1 = x1, .x2 = x2};
    norm1.nonlinearity = BEHIND_NORMS;
    int h = add_norm(net, norm1);
    if (resample == DOWN) h = add_resample(net, DOWN, name + ".h_upd", h);
    x1 = add_resample(net, resample, name + ".x_upd", x1);

    // The first convolution and the second norm. One of these two reads the projection of the embedding. A single
    // linear layer makes the projections for all residual blocks, side by side. Here this block's columns are added to
    // that layer, and the parameters for these columns are added to the network.
    Layer conv1{.name = name + ".in_layers.2", .x1 = h, .kernel = 3};
    conv1.upsample = resample == UP;
    Layer norm2{.name = name + ".out_layers.0"};
    norm2.nonlinearity = BEHIND_NORMS;
    norm2.dropout_block = net->residual_blocks;
    net->residual_blocks++;
    const int columns = c.use_scale_shift_norm ? 2 * Cout : Cout; // a channel has scale and shift, or one addend
    Layer& reader = c.use_scale_shift_norm ? norm2 : conv1;
    reader.emb = net->emb;
    reader.emb_offset = net->tensor(net->emb).C;
    net->tensors[net->emb].C += columns;
    norm2.x1 = add_conv(net, conv1, Cout);
    add_params(net, name + ".emb_layers.1", {columns, 4 * c.num_channels});
    h = add_norm(net, norm2);

    // The second convolution adds the block's input to its result. In the state_dict its parameters come before those
    // of the shortcut's 1x1 convolution. So they are added first here, although its layer is the last one of the block.
    Layer conv2{.name = name + ".out_layers.3", .x1 = h, .kernel = 3};
    conv2.weight = add_conv_params(net, conv2.name, {Cout, Cout, 3, 3}, INIT_ZERO);
    const Layer shortcut{.name = name + ".skip_connection", .x1 = x1, .x2 = x2};
    conv2.residual = Cin == Cout ? x1 : add_conv(net, shortcut, Cout);
    add_conv(net, conv2, Cout);
    return end_block(net, first);
}

// Adds an attention block: group norm, a 1x1 convolution that makes q, k and v, attention, and another 1x1 convolution.
// The block's input is added to the result.
static int add_attention_block(UNet* net, const std::string& name, int x, int num_heads) {
    const Config& c = net->config;
    const Tensor t = net->tensors[x];
    const int heads = c.num_head_channels > 0 ? t.C / c.num_head_channels : num_heads;
    const size_t first = net->layers.size();
    const int normed = add_norm(net, {.name = name + ".norm", .x1 = x});
    const Layer qkv{.name = name + ".qkv", .x1 = normed, .heads = heads};
    Layer attention{.kind = &ATTENTION, .name = name + ".attention", .heads = heads};
    attention.x1 = add_conv(net, qkv, 3 * t.C);
    attention.saved = add_buffer(net, (size_t)heads * t.H * t.W * sizeof(SoftmaxRow));
    const int out = add_layer(net, attention, t.C, t.H, t.W);
    add_conv(net, {.name = name + ".proj_out", .x1 = out, .residual = x}, t.C, INIT_ZERO);
    return end_block(net, first);
}

// Adds the embedding's layers. The last one projects the embedding for all residual blocks at once. Each residual block
// later adds its own columns to that layer.
static void add_embedding(UNet* net) {
    const Config& c = net->config;
    const int F = c.num_channels; // how many sinusoids there are
    const int E = 4 * F;          // how many numbers the embedding has
    int h = add_layer(net, {.kind = &TIMESTEP, .name = "timestep_embedding"}, F);
    auto add = [&](const LayerKind& kind, const char* name, int weight = -1) {
        h = add_layer(net, {.kind = &kind, .name = name, .x1 = h, .weight = weight}, E);
    };
    add(LINEAR, "time_embed.0", add_params(net, "time_embed.0", {E, F}));
    add(SILU, "time_embed.1");
    add(LINEAR, "time_embed.2", add_params(net, "time_embed.2", {E, E}));
    if (c.class_cond) {
        const int classes = c.num_classes + c.null_class();
        add(LABEL, "label_emb", add_param(net, "label_emb.weight", {classes, E}, INIT_NORMAL));
    }
    const int K = c.num_values();
    if (K > 0) add(VALUES, "cond_emb", add_param(net, "cond_emb.weight", {E, K}, INIT_UNIFORM));
    add(SILU, "emb_layers.0");
    net->emb = add_layer(net, {.kind = &LINEAR, .name = "emb_layers.1", .x1 = h}, 0); // it has no columns yet
}

// Halves the resolution: by a residual block, a convolution or an average pool, as the flags choose.
static int add_downsample(UNet* net, const std::string& name, int x, int ch) {
    const Config& c = net->config;
    if (c.resblock_updown) return add_resblock(net, name + ".0", x, -1, ch, DOWN);
    const std::string op = name + ".0.op";
    if (c.conv_resample) return add_conv(net, {.name = op, .x1 = x, .kernel = 3, .stride = 2}, ch);
    return add_resample(net, DOWN, op, x);
}

// Doubles the resolution: by a residual block, by a convolution of the enlarged input, or without any parameters.
static int add_upsample(UNet* net, const std::string& name, int x, int ch) {
    const Config& c = net->config;
    if (c.resblock_updown) return add_resblock(net, name, x, -1, ch, UP);
    if (c.conv_resample) return add_conv(net, {.name = name + ".conv", .x1 = x, .kernel = 3, .upsample = 1}, ch);
    return add_resample(net, UP, name, x);
}

// Adds the encoder: the first convolution, and at each level residual blocks (at some levels with attention). After
// each level except the lowest one, a layer or block halves the resolution. Returns the tensors that the decoder reads.
// guided-diffusion numbers the blocks of all levels, beginning with input_blocks.0, which is the first convolution.
// After this number, .0 stands for the convolution, the residual block, or what halves the resolution, and .1 stands
// for attention.
static std::vector<int> add_input_blocks(UNet* net, int x) {
    const Config& c = net->config;
    int input_block = 0;
    auto next_name = [&] { return "input_blocks." + std::to_string(++input_block); };
    const int first = add_conv(net, {.name = "input_blocks.0.0", .x1 = x, .kernel = 3}, c.channels(0));
    std::vector<int> encoder_outputs{first}; // the outputs of all input_blocks, which the decoder reads
    const size_t lowest = c.mult.size() - 1;
    for (size_t level = 0; level <= lowest; level++) {
        const int ch = c.channels(level);
        for (int i = 0; i < c.num_res_blocks; i++) {
            const std::string name = next_name();
            int h = add_resblock(net, name + ".0", encoder_outputs.back(), -1, ch);
            if (c.has_attention(level)) h = add_attention_block(net, name + ".1", h, c.num_heads);
            encoder_outputs.push_back(h);
        }
        if (level < lowest) encoder_outputs.push_back(add_downsample(net, next_name(), encoder_outputs.back(), ch));
    }
    return encoder_outputs;
}

// Adds the decoder. Each of its residual blocks reads [h | a tensor of the encoder], where h is the output of the
// previous block. (With --resblock_updown, add_upsample adds residual blocks, too. They read h alone, and are not
// counted here.) The decoder reads the encoder's tensors in reverse order. A level of the decoder has one residual
// block more than the same level of the encoder. The encoder's tensor that this additional block reads is the output of
// the encoder's first convolution, or of the layer or block that halved the resolution before this level.
static int add_output_blocks(UNet* net, int h, std::vector<int> encoder_outputs) {
    const Config& c = net->config;
    const int heads = c.num_heads_upsample == -1 ? c.num_heads : c.num_heads_upsample;
    int output_block = 0;
    for (int level = (int)c.mult.size() - 1; level >= 0; level--) {
        const int ch = c.channels(level);
        const bool attention = c.has_attention(level);
        for (int i = 0; i <= c.num_res_blocks; i++) {
            // A residual block reads [h | the encoder's tensor], and attention may follow. After the last residual
            // block of each level except level 0, add_upsample doubles the resolution.
            const std::string name = "output_blocks." + std::to_string(output_block++);
            h = add_resblock(net, name + ".0", h, encoder_outputs.back(), ch);
            encoder_outputs.pop_back();
            if (attention) h = add_attention_block(net, name + ".1", h, heads);
            const bool level_ends = i == c.num_res_blocks && level > 0;
            if (level_ends) h = add_upsample(net, name + (attention ? ".2" : ".1"), h, ch);
        }
    }
    return h;
}

// Returns which of four groups a parameter belongs to. In the flat arrays the groups follow each other:
//   0, 1  the projections of the embedding for all blocks. 0: the weights, which together are one matrix. 1: the biases
//   2     all other parameters that kernels read in fp32
//   3     convolutions' weights, if the kernels read a copy of them
static int param_group(const Param& p) {
    if (p.name.ends_with(".emb_layers.1.weight")) return 0;
    if (p.name.ends_with(".emb_layers.1.bias")) return 1;
    return p.of_conv && weights_have_copy() ? 3 : 2;
}

// Chooses where in the flat arrays each parameter lies. Each parameter of groups 2 and 3 begins at a multiple of 64
// elements. So kernels can read it in pieces of 16 bytes, whatever its element is. make_muon needs this, too, because
// is_matrix has one byte for 64 elements. (The weights of group 0 also begin at multiples of 64, because their sizes
// are such multiples.)
static void place_params(UNet* net) {
    auto round_to_64 = [](size_t floats) { return (floats + 63) / 64 * 64; };
    size_t end = 0;
    for (int group = 0; group < 4; group++) {
        // Within a group the parameters follow each other in the order of net->params.
        for (Param& p : net->params) {
            if (param_group(p) != group) continue;
            p.offset = end;
            end += group < 2 ? p.size : round_to_64(p.size);
        }
        end = round_to_64(end);
        if (group == 2) net->plain_size = end;
    }
    net->flat_size = end;
}

// Makes the network of a configuration that check_model accepts. It has no memory yet (plan_memory).
static UNet build_unet(const Config& c) {
    UNet net;
    net.config = c;
    add_embedding(&net);

    // From the images to the network's output. With --patch_size the layers between PATCHES and PIXELS work on patches
    // in place of pixels.
    const int H = c.H, W = c.W;
    const int p = c.patch();
    net.input = add_tensor(&net, H, W, c.in_channels, Element::FP32);
    int h = net.input;
    const int seen = c.seen_channels();
    if (c.cond_channels) h = add_layer(&net, {.kind = &JOIN, .name = "condition", .x1 = h}, seen, H, W);
    if (p > 1) h = add_layer(&net, {.kind = &PATCHES, .name = "patches", .x1 = h}, seen * p * p, H / p, W / p);
    const std::vector<int> encoder_outputs = add_input_blocks(&net, h);
    h = encoder_outputs.back();
    const int middle = net.tensor(h).C; // the lowest level's channels
    h = add_resblock(&net, "middle_block.0", h, -1, middle);
    h = add_attention_block(&net, "middle_block.1", h, c.num_heads);
    h = add_resblock(&net, "middle_block.2", h, -1, middle);
    h = add_output_blocks(&net, h, encoder_outputs);
    h = add_norm(&net, {.name = "out.0", .x1 = h, .nonlinearity = BEHIND_NORMS});
    h = add_conv(&net, {.name = "out.2", .x1 = h, .kernel = 3}, c.out_channels() * p * p, INIT_ZERO, Element::FP32);
    if (p > 1) h = add_layer(&net, {.kind = &PIXELS, .name = "pixels", .x1 = h}, c.out_channels(), H, W);
    net.output = h;

    // All blocks have been added now, so the width of the layer that projects the embedding for all blocks is known: it
    // is emb.C floats a sample. The layer's weight consists of the projection weights of all blocks, one after the
    // other. The flat array begins with these weights (param_group).
    const Tensor& emb = net.tensors[net.emb];
    net.buffers[emb.buffer].bytes = emb.C * sizeof(float);
    check_conv_params(net);
    if (c.precision == "fp8") choose_fp8(&net);
    place_params(&net);
    // All blocks' projections of the embedding are one matrix, which lies at offset 0 (group 0, see param_group).
    Layer& projection = *std::ranges::find(net.layers, net.emb, &Layer::out);
    const auto first_param = std::ranges::find(net.params, 0u, &Param::offset);
    projection.weight = (int)(first_param - net.params.begin());

    for (const Layer& l : net.layers) net.flops += l.kind->flops(layer_args(Walk{.net = &net, .B = 1}, l));
    return net;
}

// =====================================================================================================================
// The plan: what the backward pass adds where, and where in memory each buffer lies
// All of a network's activations, and the gradients of activations, lie in one allocation, the arena. Two buffers may
// share a place if they are never in use at the same time. Time is counted in layers. L is the number of layers. Time 0
// is when the batch is drawn, time 1 + i is the forward pass of layer i, L + 1 is the loss, and 2 L + 1 - i is the
// backward pass of layer i.
//
// The functions run in this order: plan_memory calls plan_fp8; for training plan_gradients, plan_fp8_gradients and
// plan_waits; then plan_fusions, plan_lifetimes, place_buffers and check_memory.

// ---------------------------------------------------------------------------------------------------------------------
// --- gradients, and buffers
// A tensor's gradient is the sum of what its readers contribute. The last reader in the list contributes first. Each
// reader writes a buffer of its own: its contribution plus the buffers of later readers that wait to be added. If a
// layer adds the tensor as its residual, the layer's contribution is the gradient of the layer's output, unchanged.
// That gradient already lies in a buffer. So it is not copied: this buffer itself waits to be added.
static void plan_gradients(UNet* net) {
    // For each tensor: the buffers that the next contribution has to add.
    std::vector<std::vector<int>> waiting(net->tensors.size());
    // Plans a contribution to the gradient of tensor x, in a new buffer. The contribution is not added in place to a
    // buffer that waits, because weight gradients may still have to read that buffer.
    auto contribute = [&](int x) {
        if (!net->tensor(x).needs_grad) return GradPlan{};
        const Buffer& values = net->buffers[net->tensors[x].buffer];
        const int d = add_buffer(net, values.bytes);
        std::vector<int> adds = waiting[x];
        waiting[x] = {d};
        if (adds.size() > 2) die("internal error: %zu gradients wait for one tensor", adds.size());
        adds.resize(2, -1);
        return GradPlan{d, adds[0], adds[1]};
    };
    // The loss writes the gradient of the network's output. When the loop comes to a layer, the gradient of this
    // layer's output is complete, because all layers that read the output come later in the list.
    contribute(net->output);
    for (int i = (int)net->layers.size() - 1; i >= 0; i--) {
        Layer& l = net->layers[i];
        if (waiting[l.out].empty()) continue; // no gradient of l.out is planned, because l has no backward pass
        if (waiting[l.out].size() != 1) die("internal error: the gradient of %s is not complete", l.name.c_str());
        l.dout = waiting[l.out][0];
        if (l.residual >= 0) waiting[l.residual].push_back(l.dout);
        // The embedding's projections for all residual blocks are the columns of one tensor. So their gradient is one
        // buffer. Each layer that reads columns of the tensor writes the same columns of this buffer.
        if (l.emb >= 0) {
            if (waiting[l.emb].empty()) contribute(l.emb);
            l.demb = waiting[l.emb][0];
        }
        l.d1 = contribute(l.x1);
        l.d2 = contribute(l.x2);
    }
    // --use_checkpoint: the backward pass computes some tensors again. It writes them to new buffers.
    for (const Layer& l : net->layers) {
        if (l.block_end < 0) continue;
        const Tensor& out = net->tensors[l.out];
        for (int b : {out.buffer, out.stats}) {
            if (b < 0) continue;
            // Two statements, because add_buffer may move net->buffers to other memory.
            const int again = add_buffer(net, net->buffers[b].bytes);
            net->buffers[b].again = again;
        }
    }
}

// A convolution's weight gradient runs at the same time as the layers that follow in the backward pass, in one launch
// with the weight gradients of other convolutions. So the tensors that the weight gradient reads must stay in memory
// for some time, which is counted in layers (see the head of this section). When that time is over, the backward pass
// waits until the weight gradient is complete. Tensors of low resolution (up to 16 x 16 pixels) need little memory. So
// they may stay longer, and more weight gradients share a launch.
// Returns how many layers after the backward pass of convolution l its weight gradient is complete at the latest.
static int weights_lag(const UNet* net, const Layer& l) {
    const Tensor& x = net->tensors[l.x1];
    if (x.H * x.W <= 16 * 16) return 20;
    return net->config.use_checkpoint ? 2 : 6;
}

// Returns the index of the first layer that reads the embedding's projections.
static int first_emb_reader(const UNet* net) {
    int i = 0;
    while (net->layers[i].emb < 0) i++;
    return i;
}

// Plans which weight gradients each layer waits for in the backward pass. A layer that waits for the weight gradient of
// layer k also waits for the weight gradients of all layers after k in the list, because the side stream computes these
// earlier, or in the same launch.
static void plan_waits(UNet* net) {
    const int L = (int)net->layers.size();
    int done = L; // some layer already waits for the weight gradients of all layers from index `done` on
    for (int i = L - 1; i >= 0; i--) {
        Layer& l = net->layers[i];
        if (l.dout < 0) continue; // it has no backward pass
        for (int k = i + 1; k < done; k++) {
            const Layer& conv = net->layers[k];
            if (conv.kind != &CONV) continue;
            const bool too_old = k > i + weights_lag(net, conv);
            // If l makes the embedding's projections, its dout is the gradient of all projections. When l's backward
            // pass begins, dout must be complete. The columns of dout that belong to conv (demb) are computed together
            // with conv's weight gradient. So l waits for this weight gradient.
            const bool has_demb = l.out == net->emb && conv.demb >= 0;
            if (!too_old && !has_demb) continue;
            l.after = k;
            done = k;
            break;
        }
    }
}

// Plans which convolutions also compute the skip connection whose result they add. (The convolution and the skip
// connection belong to the same residual block.)
static void plan_fusions(UNet* net) {
    const Walk walk{.net = net, .B = net->B};
    for (size_t i = 1; i < net->layers.size(); i++) {
        Layer& l = net->layers[i];
        Layer& skip = net->layers[i - 1];
        // In the list, a skip connection comes directly before the convolution that adds its result.
        const bool adds_it = l.kind == &CONV && skip.kind == &CONV && l.residual == skip.out;
        if (!adds_it) continue;
        const ConvShape shape = layer_args(walk, l).conv();
        const ConvShape skip_shape = layer_args(walk, skip).conv();
        if (!conv_takes_skip(shape, skip_shape)) continue;
        skip.fused = true;
        l.skip = (int)i - 1;
        l.residual = -1;
    }
}

// Finds out when each buffer is in use: from the first to the last time at which a layer reads or writes it.
static void plan_lifetimes(UNet* net) {
    const int L = (int)net->layers.size();
    auto use = [&](int time, std::initializer_list<int> buffers) {
        for (int buffer : buffers) {
            if (buffer < 0) continue;
            // Time L + 1 is the loss, and later times are the backward pass. With --use_checkpoint, the backward pass
            // computes some tensors again, writes them to new buffers, and reads these buffers. `again` is the number
            // of the new buffer. For all other tensors, `again` is the number of the buffer itself.
            const bool after_loss = time > L + 1;
            Buffer& b = net->buffers[after_loss ? net->buffers[buffer].again : buffer];
            b.first_use = std::min(b.first_use, time);
            b.last_use = std::max(b.last_use, time);
        }
    };
    auto data = [&](int tensor) { return net->tensor(tensor).buffer; };
    auto stats = [&](int tensor) { return net->tensor(tensor).stats; };
    // Notes that all buffers which the forward pass of a layer reads or writes are in use at `time`. A fused layer
    // writes no result to memory.
    auto use_forward = [&](const Layer& l, int time) {
        use(time, {data(l.x1), data(l.x2), data(l.residual), data(l.emb), l.saved});
        if (l.kind == &GROUPNORM) use(time, {stats(l.x1), stats(l.x2)});
        if (!l.fused) use(time, {data(l.out), stats(l.out)});
    };
    // The network's input is written before the first layer runs. After the last layer, the sampler or the loss uses
    // the input and the output.
    use(0, {data(net->input)});
    use(L + 1, {data(net->input), data(net->output)});
    for (int i = 0; i < L; i++) {
        const Layer& l = net->layers[i];
        const LayerKind& kind = *l.kind;
        use_forward(l, 1 + i + l.fused); // a fused layer is computed by the next layer, so at the next layer's time
        // The embedding's layers run at the same time as the layers that follow them. They may still be running just
        // before the first layer that reads the embedding. So their buffers are in use until then.
        if (kind.embedding) use_forward(l, 1 + first_emb_reader(net));

        // `back` is the time of the layer's backward pass. `done` is the latest time at which a convolution's weight
        // gradient may run. (For all other layers, `done` is the same as `back`.)
        if (l.dout < 0) continue; // not in training, or it has no backward pass
        const int back = 2 * L + 1 - i;
        const int done = l.kind == &CONV ? back + weights_lag(net, l) : back;
        use(back, {l.dout, l.dout_fp8});
        for (int time : {back, done}) {
            if (kind.backward_reads & LayerKind::INPUT) use(time, {data(l.x1), data(l.x2)});
            use(time, {l.fp8 ? l.dout_fp8 : l.dout}); // the weight gradient reads dout in FP8 if l.fp8
        }
        if (kind.backward_reads & LayerKind::EMB) use(back, {data(l.emb)});
        if (kind.backward_reads & LayerKind::OUTPUT) use(back, {data(l.out)});
        use(back, {l.saved, l.demb});
        use(back, {l.d1.d, l.d1.add1, l.d1.add2, l.d1.fp8});
        use(back, {l.d2.d, l.d2.add1, l.d2.add2, l.d2.fp8});
        if (l.out == net->output) use(L + 1, {l.dout}); // the loss writes the gradient of the network's output
        const bool again = l.block_end >= 0;
        // The layer is computed again just before the backward pass of its block's last layer (block_end).
        if (again) use_forward(l, 2 * L + 1 - l.block_end);
    }
}

// Chooses the offsets of all buffers for batches of B samples. The buffers are placed one after the other, from the
// largest to the smallest. Each buffer gets the lowest place that is free at all times at which the buffer is in use.
// Sizes are rounded up, so that each buffer begins at a multiple of 256 bytes.
static void place_buffers(UNet* net, int B) {
    auto bytes = [&](const Buffer* b) { return (b->bytes * B + 255) / 256 * 256; };
    std::vector<Buffer*> order;
    for (Buffer& b : net->buffers)
        if (b.last_use >= 0) order.push_back(&b); // it is in use at some time
    // A stable sort, so that buffers of equal size have the same order, and the same places, on every machine.
    std::ranges::stable_sort(order, std::greater{}, bytes);

    std::multimap<size_t, const Buffer*> placed; // the buffers that have a place, sorted by offset
    net->arena_bytes = 0;
    for (Buffer* b : order) {
        b->offset = 0;
        for (const auto& [offset, other] : placed) {
            // Are b and the other buffer in use at the same time?
            const bool overlap = other->first_use <= b->last_use && b->first_use <= other->last_use;
            if (!overlap) continue;
            if (b->offset + bytes(b) <= offset) break; // b fits into the gap before the other buffer
            b->offset = std::max(b->offset, offset + bytes(other));
        }
        placed.insert({b->offset, b});
        net->arena_bytes = std::max(net->arena_bytes, b->offset + bytes(b));
        if (net->arena_bytes > (size_t)1 << 46)
            die("more than 64 TiB of memory would be needed; a smaller --batch_size or a --microbatch needs less");
    }
}

// Ends the program if the arena, the weights and, in training, the other arrays of the same length (gradients, moments,
// averages, copies) need more than the device's free memory. The message says which batch would fit.
static void check_memory(UNet* net, bool training) {
    const double GIB = 0x1p30;
    const Config& c = net->config;
    const double fp8_bytes = c.precision == "fp8" ? bytes_of(Element::FP8) : 0;
    const double muon_bytes = c.muon() ? 3 * act_bytes() : 0;
    const double copy_bytes = weights_have_copy() ? act_bytes() : 0;
    // Returns how many GiB the weights need, together with the other arrays of the same length. images: how many images
    // are computed at a time. For sampling, a parameter needs at most a weight, its copy in bf16, and a copy in FP8.
    // For training it needs at most a weight, a gradient, two moments, its averages, copies of the weight and of the
    // first average in bf16, and two copies in FP8. If gradients of several microbatches or ranks are added up, there
    // is a second array of gradients. Ranks share the moments and averages. Muon also needs a copy of the momentum and,
    // for each matrix, two squares (MuonMatrix), of which each is at most as large as its matrix. Workspaces are not
    // counted.
    auto weights_of = [&](int images) {
        const bool adds_up = world.size > 1 || c.batch_size > images;
        const double shared_arrays = (2.0 + (double)c.emas.size()) / world.size;
        const double arrays = 1 + (adds_up ? 2 : 1) + shared_arrays;
        const double sampling_bytes = sizeof(float) + copy_bytes + fp8_bytes;
        const double training_bytes = arrays * sizeof(float) + 2 * copy_bytes + 2 * fp8_bytes + muon_bytes;
        return net->flat_size * (training ? training_bytes : sampling_bytes) / GIB;
    };
    const int B = net->B;
    const double available = device_available() / GIB;
    const double needed = weights_of(B) + net->arena_bytes / GIB;
    int fits = B; // the largest of B, B / 2, B / 4, ... that fits; 0: not even one sample fits
    while (fits && weights_of(fits) + net->arena_bytes / GIB > available) {
        fits /= 2;
        place_buffers(net, fits);
    }
    const std::string both = text("%.2f GiB of GPU memory and %.2f GiB are free", needed, available);
    if (!fits) die("this model needs %s: it does not fit, whatever the batch", both.c_str());
    if (fits < B)
        die("a batch of %d needs %s; %s %d fits", B, both.c_str(), training ? "--microbatch" : "--batch_size", fits);
}

// Gives the network its device memory for batches of up to B samples. If there is too little memory, the program ends
// with a message that says which batch would fit.
static void plan_memory(UNet* net, int B, bool training) {
    const double pixels = (double)B * net->config.H * net->config.W;
    const char* const flag = training && net->config.given("microbatch") ? "microbatch" : "batch_size";
    if (pixels > MOST_PIXELS)
        die("--%s %d: so many images of %s at a time are more than %d pixels; "
            "a smaller --microbatch (or --batch_size) works",
            flag, B, net->config.image_size.c_str(), MOST_PIXELS);
    if (B > MOST_IMAGES)
        die("--%s %d: a GPU computes at most %d images at a time; "
            "a smaller --microbatch (or --batch_size) works",
            flag, B, MOST_IMAGES);
    // The order matters. For example, plan_gradients reads the `residual` that plan_fusions removes, and plan_lifetimes
    // must know all buffers and all fused layers.
    net->B = B;
    plan_fp8(net, training);
    if (training) {
        plan_gradients(net);
        plan_fp8_gradients(net);
        plan_waits(net);
    }
    plan_fusions(net);
    plan_lifetimes(net);
    place_buffers(net, B);
    check_memory(net, training);
    net->arena = device_alloc<char>(net->arena_bytes);

    // The operations of a stream use its workspace one after the other, so the workspace is as large as the largest
    // operation needs. But what an operation leaves for finish_gradients (Workspace::sums) must be kept until
    // finish_gradients runs at the end of the backward pass. So the sizes of all operations' sums are added up.
    Workspace most{loss_workspace(B)};
    const Walk walk{.net = net, .B = B};
    for (const Layer& l : net->layers) {
        const Workspace w = l.kind->workspace(layer_args(walk, l));
        most.main = std::max(most.main, w.main);
        most.side = std::max(most.side, w.side);
        most.sums += w.sums;
    }
    reserve(most, training);
}

// =====================================================================================================================
// Forward and backward: two walks over the list
// A training step calls unet_forward, which calls forward_layer for each layer. Then it calls unet_backward, which goes
// from the last layer to the first. unet_backward does not compute the weight gradient of each convolution at once: it
// collects several of them, and computes these together on the side stream (WeightGradients). Samplers and validation
// call unet_forward alone.

static void forward_layer(const Walk& walk, const Layer& l) {
    if (l.fused) return; // the next layer also computes this one
    mark({.layer = &l});
    // The shapes, and the addresses of the layer's tensors and weights. (Convolutions read the copy of their weights,
    // which is bf16 if activations are. Those that multiply in FP8 read another copy, in FP8. All other layers read
    // weights in fp32.)
    LayerArgs a = layer_args(walk, l);
    l.kind->forward(a); // for example forward_conv ("The network")
    // If a norm reads the output, l.kind->forward has also summed the output and its square over the pixels, in one or
    // more parts (Stats). It has set a.out_stats.parts to the number of these parts. The number is kept in the tensor,
    // where layer_args finds it when the norm is computed.
    walk.net->tensors[l.out].parts = a.out_stats.parts;
}

// The forward pass. It computes net's output (B, H, W, out_channels) from its input, net->t (B) and, if the model uses
// them, net->labels (B), net->values (B, num_values) and net->cond (B, H, W, cond_channels). The embedding's layers
// come first in the list. They run on the side stream, at the same time as the layers after them on the main stream.
// Before the first layer that reads the embedding, the main stream waits for the embedding's layers.
static void unet_forward(UNet* net, Weights weights, Dropout dropout, int B) {
    const int L = (int)net->layers.size();
    const int reader = first_emb_reader(net);
    Walk walk{net, weights, dropout, B};
    int i = 0;
    // 0 is a ticket: wait_for_side(0) waits for this work. For its tickets, WeightGradients uses the indices of
    // convolutions. Layer 0 is not a convolution, so 0 is free.
    run_beside(0, [&](Stream* stream) {
        walk.stream = stream;
        for (; net->layers[i].kind->embedding; i++) forward_layer(walk, net->layers[i]);
    });
    walk.stream = MAIN_STREAM;
    for (; i < L; i++) {
        if (i == reader) wait_for_side(0);
        forward_layer(walk, net->layers[i]);
    }
}

// Returns the buffer that the loss writes: the gradient with respect to the network's output.
static float* output_gradient(UNet* net) { return buffer_data<float>(net, net->layers.back().dout); }

// Collects the weight gradients of convolutions during the backward pass. They wait until they fill the GPU together,
// or until some layer needs one of them to be complete (plan_waits), or until the backward pass reaches the network's
// first convolution or its own end (unet_backward). Then all that wait are computed together, on the side stream. (If
// allowed.batches is false, each is computed alone, without waiting.)
struct WeightGradients {
    UNet* net;
    const std::function<void(size_t, Stream*)>& done; // see unet_backward
    std::vector<WeightWork> waiting{};
    double load = 0; // how much of the device the waiting weight gradients would fill together; 1: all of it
    int last = -1;   // the layer whose weight gradient was added last
    // For each layer: the ticket with which wait_for_side waits for the layer's weight gradient. -1: this weight
    // gradient was not launched yet.
    std::vector<int> ticket{};

    // Launches the weight gradients that wait. After that, the weight gradients of all layers from `last` on have been
    // launched.
    void launch_waiting() {
        // When this launch's work is finished, the flat array of the gradients is complete from index complete_from on.
        // So complete_from must lie after the weights of every convolution whose weight gradient is not launched yet.
        // These are the convolutions before `last` in the list, because the backward pass goes from the last layer to
        // the first. From plain_size on, the flat array holds nothing but convolutions' weights, in the order of
        // net->params. This is not always the order of the list, so the loop looks for the last of these weights. Of
        // the gradients before plain_size, some are only complete at the end of the backward pass (finish_gradients).
        size_t complete_from = net->plain_size;
        for (int i = 0; i < last; i++) {
            const Layer& l = net->layers[i];
            if (l.kind != &CONV) continue;
            const Param& weight = net->params[l.weight];
            complete_from = std::max(complete_from, weight.offset + weight.size);
        }
        run_beside(last, [&](Stream* stream) {
            conv_backward_weights(waiting, stream);
            if (done) done(complete_from, stream);
        });
        std::replace(ticket.begin() + last, ticket.end(), -1, last);
        waiting.clear();
        load = 0;
    }
    // Adds a layer's weight gradient to those that wait.
    void add(int layer, const LayerArgs& a) {
        waiting.push_back(a.weight_work());
        last = layer;
        load += conv_weight_load(waiting.back().shape);
        if (load >= 1 || !allowed.batches) launch_waiting();
    }
    // Makes the operations that follow on the main stream wait for this layer's weight gradient.
    void wait_for(int layer) {
        if (ticket[layer] < 0) launch_waiting();
        wait_for_side(ticket[layer]);
    }
};

// The backward pass. It computes grads, the gradients of the parameters, from output_gradient and from what the forward
// pass of these B samples left in memory. If `done` is given, done(n, stream) is called each time that weight gradients
// have been launched on `stream`. When these are finished, the gradients from grads[n] on are complete. So with several
// ranks, `done` can begin to send these gradients while the backward pass computes the others (step_gradients).
static void unet_backward(UNet* net, Weights weights, float* grads, Dropout dropout, int B,
                          const std::function<void(size_t, Stream*)>& done = nullptr) {
    const Walk walk{net, weights, dropout, B, grads};
    WeightGradients weight_gradients{net, done};
    weight_gradients.ticket.assign(net->layers.size(), -1);
    for (int i = (int)net->layers.size() - 1; i >= 0; i--) {
        const Layer& l = net->layers[i];
        if (l.dout < 0) continue; // this layer has no backward pass
        if (l.after >= 0) weight_gradients.wait_for(l.after);
        // With --use_checkpoint: if l is the last layer of a block, the backward pass of this block needs results that
        // were not kept. The layers that make these results are computed again now (end_block).
        for (const Layer& before : net->layers)
            if (before.block_end == i) forward_layer(walk, before);
        LayerArgs a = layer_args(walk, l);
        if (l.kind == &CONV) {
            // Without --use_scale_shift_norm, convolutions read the embedding. Then the embedding's gradient (demb) is
            // computed together with their weight gradients. If l is the network's first convolution (it reads
            // net->input), only the backward passes of the embedding's layers come after that of l. They need demb. So
            // the weight gradients that wait are launched now. If the weight gradient of l were in the same launch,
            // demb would be complete later. (With --cond_channels or --patch_size, the first convolution reads another
            // tensor than net->input. Then this launch is not made.)
            if (l.x1 == net->input && !weight_gradients.waiting.empty()) weight_gradients.launch_waiting();
            mark({.layer = &l, .pass = BACKWARD_WEIGHT});
            if (l.rounds_dout) round_gradient(a.dout_fp8, a.dout, (size_t)B * a.Hout * a.Wout * a.Cout);
            weight_gradients.add(i, a);
            if (!a.d1.dx && !a.d2.dx) continue; // the network's first convolution: its input needs no gradient
        }
        mark({.layer = &l, .pass = BACKWARD});
        l.kind->backward(a); // for example backward_conv: the input's gradient, which is a convolution of dout
    }
    mark({"finish gradients"});
    finish_gradients(); // on a GPU, adds up the terms of the norms' dweight and dbias
    weight_gradients.wait_for(weight_gradients.last);
}

// =====================================================================================================================
// DDPM: noise levels and the loss
// A training sample is an image x_0 with noise: x_t = signal x_0 + sigma noise (q_sample_forward). For DDPM (Ho et al.
// 2020) signal = sqrt(alpha_bar[t]) and sigma = sqrt(1 - alpha_bar[t]), and t is drawn uniformly. The network's target
// is the noise, x_0 or v (--predict), and the loss is the mean of weight * (answer - target)^2
// (loss_forward_backward). All that depends on t is a NoiseLevel (unet/interface.h), so kernels know no objective.
// unet/diffusion/objectives.h holds the objectives beside DDPM: EDM, flow, consistency.

HD static inline NoiseLevel make_level(const Question& q) {
    return NoiseLevel{.t = (float)q.t,
                      .signal = (float)q.signal,
                      .sigma = (float)q.sigma,
                      .target_x0 = (float)q.target_x0,
                      .target_noise = (float)q.target_noise,
                      .x0_x = (float)q.x0_x,
                      .x0_out = (float)q.x0_out,
                      .weight = 1};
}

// Returns alpha_bar (T), where T is --diffusion_steps. alpha_bar[t] is the product of 1 - beta over all timesteps from
// 0 to t.
//   linear: beta rises from 0.0001 to 0.02 (Ho et al. 2020, section 4); both limits are multiplied by 1000 / T
//   cosine: 1 - beta = f(t + 1) / f(t), where f(t) = cos^2((t / T + 0.008) / 1.008 pi / 2); beta is at most 0.999
//           (Nichol & Dhariwal 2021, eq. 17). In the code, `cosine` is f as a function of t / T
static std::vector<double> alpha_bars(const Config& c) {
    const int T = c.diffusion_steps;
    const double scale = 1000.0 / T, beta_start = 1e-4 * scale, beta_end = 0.02 * scale;
    const bool is_cosine = meaning<bool>("noise_schedule", c.noise_schedule, {{"linear", false}, {"cosine", true}});
    auto cosine = [](double t) { return std::pow(std::cos((t + 0.008) / 1.008 * M_PI / 2), 2); };
    std::vector<double> result;
    double product = 1;
    for (int t = 0; t < T; t++) {
        double beta = beta_start + (beta_end - beta_start) * t / (T - 1);
        if (is_cosine) beta = std::min(1 - cosine((t + 1.0) / T) / cosine((double)t / T), 0.999);
        product *= 1 - beta;
        result.push_back(product);
    }
    return result;
}

// What --predict decides: four members of a NoiseLevel, and `error`, which ddpm_level needs for the weight of the loss.
// If the network's answer is wrong by e, the x_0 that is computed from it is wrong by some d. `error` is e^2 / d^2.
struct Prediction {
    double target_x0, target_noise; // as in NoiseLevel
    double x0_x, x0_out;            // as in NoiseLevel
    double error;                   // e^2 / d^2
};

// Makes the level where x_t = sqrt(alpha_bar) x_0 + sqrt(1 - alpha_bar) noise. The network is told t, or 1000 t / T
// with --rescale_timesteps.
static NoiseLevel ddpm_level(const Config& c, double alpha_bar, double t) {
    const double signal = std::sqrt(alpha_bar), sigma = std::sqrt(1 - alpha_bar);
    const double snr = alpha_bar / (1 - alpha_bar);
    const Prediction eps{0, 1, 1 / signal, -sigma / signal, snr};
    const Prediction x0{1, 0, 0, 1, 1};
    const Prediction v{-sigma, signal, signal, -sigma, snr + 1}; // Salimans & Ho 2022, appendix D
    const Prediction p = meaning<Prediction>("predict", c.predict, {{"eps", eps}, {"x0", x0}, {"v", v}});
    NoiseLevel level{};
    level.t = (float)(c.rescale_timesteps ? t * 1000 / c.diffusion_steps : t);
    level.signal = (float)signal;
    level.sigma = (float)sigma;
    level.target_x0 = (float)p.target_x0;
    level.target_noise = (float)p.target_noise;
    level.x0_x = (float)p.x0_x;
    level.x0_out = (float)p.x0_out;
    // Min-SNR (Hang et al. 2023): the squared error of x_0 should have the weight min(snr, gamma). But the loss is the
    // squared error of the answer, which is p.error times the squared error of x_0. So the weight is divided by
    // p.error.
    level.weight = c.min_snr_gamma > 0 ? (float)(std::min(snr, (double)c.min_snr_gamma) / p.error) : 1;
    return level;
}

// Makes the levels of all t, for training.
static std::vector<NoiseLevel> ddpm_levels(const Config& c) {
    const int T = c.diffusion_steps;
    const std::vector<double> alpha_bar = alpha_bars(c);
    std::vector<NoiseLevel> levels;
    for (int t = 0; t < T; t++) {
        NoiseLevel level = ddpm_level(c, alpha_bar[t], t);
        level.t_is_0 = t == 0;
        level.index = t;
        level.importance = 1;
        level.quarter = 4 * t / T;
        // The variational bound compares q(x_s | x_t, x_0), where s = t - 1, with the network's normal distribution.
        // `small` is the variance of q (Ho et al. 2020, eq. 7). At t = 0 this variance is 0, so the variance at t = 1
        // replaces it.
        const double a = alpha_bar[t], b = t ? alpha_bar[t - 1] : 1;
        const double beta = 1 - a / b, next = alpha_bar[1];
        double small = beta * (1 - b) / (1 - a);
        if (t == 0) small = (1 - next / a) * (1 - a) / (1 - next);
        const double mean_x0 = beta * std::sqrt(b) / (1 - a); // the coefficient of x_0 in q's mean
        const double log_ratio = std::log(beta / small);
        level.kl = (float)(std::pow(mean_x0 * level.x0_out, 2) / small);
        level.log_var = (float)std::log(small);
        if (c.learned_variance()) level.range = (float)log_ratio;
        else if (!c.sigma_small && t > 0) level.log_ratio = (float)log_ratio;
        levels.push_back(level);
    }
    return levels;
}

// Draws the noise level of a sample of training or validation. With --objective ect, it is the student's level. words:
// the sample's random words.
HD static inline NoiseLevel draw_level(const Objective& o, const Words& words) {
    if (o.rms_losses) return draw_weighted_level(o, words.w[0] * 0x1p-32);
    if (o.levels) return o.levels[((uint64_t)words.w[0] * o.steps) >> 32]; // all t have the same probability
    if (o.draws.uniform_t) {
        const double t = (words.w[0] + 0.5) * 0x1p-32;
        NoiseLevel level = make_level(ask(o.frame, t / (1 - t), o.sigma_data));
        level.quarter = (int)(4 * t);
        return level;
    }
    float z;
    const double sigma = draw_sigma(o, words, &z);
    NoiseLevel level;
    if (o.tuning.on()) level = student_level(o, sigma);
    else level = make_level(ask(o.frame, sigma, o.sigma_data));
    level.quarter = quarter_of_normal(z);
    return level;
}

// =====================================================================================================================
// The trainer: the network, and all arrays of a run

static AdamW optimiser_settings(const Config& c) {
    AdamW h{};
    h.lr = c.lr;
    h.weight_decay = c.weight_decay;
    h.beta1 = c.adam_beta1;
    h.beta2 = c.adam_beta2;
    h.eps = c.adam_eps;
    h.grad_clip = c.grad_clip;
    h.ema_rate = c.emas[0];
    h.lr_schedule = meaning<LrSchedule>(
        "lr_schedule", c.lr_schedule,
        {{"constant", LrSchedule::CONSTANT}, {"linear", LrSchedule::LINEAR}, {"cosine", LrSchedule::COSINE}});
    h.warmup_steps = c.warmup_steps;
    h.max_steps = c.max_steps;
    return h;
}

// Makes the network and all arrays of a trainer. The weights, averages and moments are zero here. start_weights or
// restore fills them, but the moments of a new run stay zero.
static Trainer make_trainer(const Config& c, const Dataset& data) {
    Trainer tr{};
    tr.net = build_unet(c);
    tr.data = data;
    const int copies = c.guided() ? 2 : 1; // with guidance, the network computes each image of a grid twice
    plan_memory(&tr.net, std::max(c.micro(), copies), true);
    tr.objective = make_objective(c);
    tr.adamw = optimiser_settings(c);
    const int N = world.size;
    // t, levels, quarters and loss have room for this many samples: those of a step, or of one validation batch of each
    // rank.
    const int samples = std::max(c.batch_size, N * tr.net.B);
    tr.own = slice_of(tr.net.flat_size, world.rank, N);
    const size_t whole = tr.own.whole(), stretches = whole / STRETCH;
    tr.grads = device_alloc<float>(whole);
    // open_alloc is for arrays to which other ranks write: params, squares, loss, copy and received. The first three
    // share one allocation.
    tr.params = (float*)open_alloc(whole * sizeof(float) + (stretches + samples) * sizeof(double));
    tr.squares = (double*)(tr.params + whole);
    tr.loss = tr.squares + stretches;
    tr.copy = weights_have_copy() ? (act*)open_alloc(whole * act_bytes()) : (act*)tr.params;
    tr.fp8 = make_fp8_training(tr.net);
    tr.fp8_works = weights_to_round(tr.net);
    tr.received = N > 1 ? (float*)open_alloc(whole * sizeof(float)) : nullptr;
    if (N > 1) tr.sum = tr.received;
    else if (c.batch_size > c.micro()) tr.sum = device_alloc<float>(whole);
    else tr.sum = tr.grads; // the gradients of the only microbatch are the sum
    while (tr.emas.size() < c.emas.size()) tr.emas.push_back(device_alloc<float>(tr.own.owned()));
    tr.m = device_alloc<float>(tr.own.owned());
    tr.v = device_alloc<float>(tr.own.owned());
    if (c.muon()) make_muon(&tr);
    // To draw samples, the network reads the first average from ema_copy. If activations are fp32, there is no copy,
    // and make_copy returns its argument. So the argument is the array in which save_grid finds the whole average in
    // fp32: with one rank this is emas[0], and with several ranks it is grads, in which whole_array gathers the
    // average.
    tr.ema_copy = make_copy(N > 1 ? tr.grads : tr.emas[0], whole);
    tr.state = device_alloc<StepState>(1);
    tr.records = device_alloc<StepState>(RECORDS);
    for (Upload& batch : tr.batch) batch = make_upload(data.batch_bytes(c.batch_size / N, c));
    tr.target = device_alloc<float>((size_t)tr.net.B * c.H * c.W * c.in_channels);
    tr.levels = device_alloc<NoiseLevel>(samples);
    tr.t = device_alloc<float>(samples);
    tr.quarters = device_alloc<int>(samples);
    if (c.augment > 0) {
        const size_t pixels = (size_t)tr.net.B * c.H * c.W;
        // The canvas is used first for the images and then for the pictures.
        const size_t planes = (size_t)tr.net.B * std::max(c.in_channels, c.cond_channels);
        tr.augmentations = device_alloc<Augmentation>(tr.net.B);
        tr.canvas = device_alloc<float>(planes * fine_size(c.H) * fine_size(c.W));
        tr.augmented = device_alloc<float>(pixels * c.in_channels);
        if (c.cond_channels) tr.augmented_cond = device_alloc<float>(pixels * c.cond_channels);
    }
    const size_t all_pixels = (size_t)tr.net.B * c.H * c.W;
    if (c.cond_channels) tr.cond = device_alloc<float>(all_pixels * c.cond_channels);
    const int factor = c.picture_factor;
    if (factor) tr.small = device_alloc<float>(all_pixels / factor / factor * c.in_channels);
    if (tr.objective.tuning.on()) {
        tr.objective.tuning.step = &tr.state->step;
        tr.teachers = device_alloc<NoiseLevel>(tr.net.B);
        tr.teacher_t = device_alloc<float>(tr.net.B);
        tr.last_step = device_copy(std::vector<int64_t>{c.max_steps - 1});
    }
    const bool by_losses =
        meaning<bool>("schedule_sampler", c.schedule_sampler, {{"uniform", false}, {"loss-second-moment", true}});
    if (!by_losses) return tr;
    tr.history = device_alloc<float>((size_t)c.diffusion_steps * (HISTORY + 1));
    tr.rms_losses = device_alloc<double>(c.diffusion_steps); // while they are zeros, all t have the same probability
    tr.objective.rms_losses = tr.rms_losses;
    return tr;
}

// Returns a whole flat array, of which each rank holds a slice. The slices are gathered in tr.grads, where they stay
// until the next call or the next step. The weights are an exception: they are gathered in tr.params itself. (With one
// rank, the slice is the whole array, and is returned as it is.)
static float* whole_array(const Trainer& tr, float* array) {
    if (world.size == 1) return array;
    float* const flat = array == tr.params ? array : tr.grads;
    come_to("gathering weights, averages or moments");
    gather(flat, array == flat ? nullptr : array, STRETCH * sizeof(float), tr.own, tr.own.n);
    return flat;
}

// =====================================================================================================================
// A training step, the loop over the steps, and main
// Functions stand above those that call them. So read this section from its end upwards: main, run_program, train,
// run_step, train_step, step_gradients, forward_and_loss. A training step runs like this:
//
//   copy stream   images of the next batch -> device
//   main stream   t | noise; q_sample | first ... last layer | loss | last ... first layer back | sum | judge | AdamW
//                   |                 |  ^ waits: embedding         |  ^ waits, before memory is reused
//   side stream     |                 +-> embedding                 +-> weight gradients of convolutions -+
//   other ranks     |                                                     these are sent when complete    |   weights
//                   \___ one microbatch; then the next one, whose gradients are added to the sum _________/
//                 (t is drawn once in a step, for the whole batch. judge and AdamW also come once in a step)
//   host          reads images; launches all of this, except the copies, as one graph (replay). The host may start up
//                 to STEPS_AHEAD steps before it reads the results of these steps for the log
//
// Time goes from left to right. Each ^ is a place where the main stream waits for the side stream: first for the
// embedding, and later for weight gradients, before the memory that they read is used for something else (plan_waits).
// Gradients are sent during the backward pass only if the GPUs write into each other's memory. With NCCL and MPI they
// are sent after it (step_gradients). In the CPU build there are no streams: all of this runs one after the other.
//
// The functions, in the order in which they run: train calls make_trainer once. Then run_step calls train_step for each
// step. The main calls of train_step are load_batch, step_gradients (which calls take_microbatch, forward_and_loss and
// unet_backward), judge_step, update_slice and record_step. From time to time validation_loss is called.

// ---------------------------------------------------------------------------------------------------------------------
// --- a step

// Images of a batch, or the pictures that these images are conditioned on, in device memory.
struct Pixels {
    const void* data; // (B, channels, H, W)
    int bytes;        // the size of a value, 1 or 4
};

// --augment: changes B images, each of `channels` channels, and returns the result, which is written to `out`. The
// changes depend only on the key, so an image and its picture are changed in the same way. told: where the numbers that
// describe the first image's change are written, for the network to read (UNet::values). Those of each next image are
// written num_values() floats later. Without --augment, the images are returned as they are.
static Pixels augment_if_asked(Trainer* tr, float* out, Pixels images, float* told, int channels, int B,
                               RandomKey key) {
    const Config& c = tr->net.config;
    if (!c.augment) return images;
    key.purpose = RANDOM_AUGMENT;
    augment_images(out, tr->augmentations, tr->canvas, told, c.num_values(), images.data, c.augment, key, B, channels,
                   c.H, c.W, images.bytes);
    return Pixels{out, sizeof(float)};
}

// Puts B pictures where the network reads them (net->cond). With --cond they are made of the images; otherwise they are
// copied from `pictures`. In training, a picture is mirrored if its image is mirrored, some pictures are left out
// (--cond_dropout), and the small pictures of --cond lowres get noise (--cond_noise).
static void put_pictures(Trainer* tr, Pixels images, Pixels pictures, int B, RandomKey key, bool training) {
    const Config& c = tr->net.config;
    const int C = c.in_channels;
    PictureDraws draws{.key = key};
    if (training) draws = {key, c.random_flip, c.cond_dropout, c.cond_noise};
    tr->net.cond = tr->cond;
    switch (c.picture_kind) {
    case PictureKind::FILE:
        take_pictures(tr->cond, pictures.data, draws, B, c.cond_channels, c.H, c.W, pictures.bytes);
        break;
    case PictureKind::LOWRES:
        shrink_images(tr->small, images.data, c.picture_factor, draws, B, C, c.H, c.W, images.bytes);
        enlarge_pictures(tr->cond, tr->small, c.picture_factor, draws, B, C, c.H, c.W);
        break;
    case PictureKind::GRAY: grey_images(tr->cond, images.data, draws, B, c.H, c.W, images.bytes); break;
    case PictureKind::MASK: mask_images(tr->cond, images.data, draws, B, C, c.H, c.W, images.bytes); break;
    }
}

// Prepares microbatch k of this rank's images for a training step. Sets what the network is told about these images
// (labels, values, cond), and returns the images. With --augment, the images and their pictures are changed.
static Pixels take_microbatch(Trainer* tr, const Upload& batch, int k, RandomKey key) {
    const Config& c = tr->net.config;
    const Dataset& data = tr->data;
    const int B = c.micro();
    const int images = c.batch_size / world.size; // the number of this rank's images
    tr->net.labels = (int*)(batch.device + data.labels_at(images)) + k * B;
    tr->net.values = (float*)(batch.device + data.values_at(images)) + (size_t)k * B * c.num_values();
    float* const told = tr->net.values + c.cond_dim;
    const Pixels stored{batch.device + k * B * data.image_bytes(), data.bytes};
    const Pixels x0 = augment_if_asked(tr, tr->augmented, stored, told, c.in_channels, B, key);
    Pixels pictures{};
    if (const Dataset* const cond = data.cond.get()) {
        const uint8_t* const first_picture = batch.device + data.pictures_at(images, c);
        pictures = {first_picture + k * B * cond->image_bytes(), cond->bytes};
        pictures = augment_if_asked(tr, tr->augmented_cond, pictures, told, c.cond_channels, B, key);
    }
    if (c.cond_channels) put_pictures(tr, x0, pictures, B, key, true);
    return x0;
}

// Computes the loss of samples first .. first + B - 1 of a step, or of a round of validation. images: the images of
// these samples. bytes: the size of a value of an image. Before the call, the samples' noise levels have been drawn,
// and what the network is told about the samples has been set in tr->net (labels, values, cond). Writes the losses to
// tr->loss + first, and the gradient of the loss to output_gradient(net). In training, this is the gradient of the mean
// loss of the step's whole batch. Validation does not use the gradient. It uses other random draws, and neither dropout
// nor flips nor FP8. With --objective ect, the teacher's answer is computed first, with the same draws.
static void forward_and_loss(Trainer* tr, const Objective& o, const void* images, int bytes, int first, int B,
                             RandomKey key, Dropout dropout, bool training) {
    const Config& c = tr->net.config;
    UNet* net = &tr->net;
    RandomKey level_key = key;
    RandomKey noise_key = key;
    RandomKey flip_key = key;
    // level_key is only for --objective ect. A teacher's level depends on the level of its sample. So draw_teachers
    // draws the level of the sample once more: with level_key it gets the same random words as draw_levels.
    level_key.purpose = training ? RANDOM_TIMESTEP : RANDOM_VAL_TIMESTEP;
    noise_key.purpose = training ? RANDOM_NOISE : RANDOM_VAL_NOISE;
    flip_key.purpose = RANDOM_FLIP;
    const bool flips = training && c.random_flip;
    float* const x = tensor_data<float>(net, net->input);
    float* const out = tensor_data<float>(net, net->output);
    // Adds noise to the images, as `levels` defines it, and computes the network's answer. t: what the network is told
    // about the noise. teacher: the teacher's answer, which is a part of the target. It is null if there is no teacher,
    // and also while the teacher's own answer is computed. The teacher's answer lies in `out`. q_sample_forward reads
    // it there, before unet_forward writes the new answer to the same place.
    auto forward = [&](float* t, const NoiseLevel* levels, const float* teacher) {
        q_sample_forward(x, tr->target, levels, teacher, images, flips, noise_key, flip_key, B, c.in_channels, c.H, c.W,
                         bytes);
        net->t = t;
        unet_forward(net, Weights{tr->params, tr->copy, training ? tr->fp8 : Fp8Weights{}}, dropout, B);
    };
    const bool tunes = o.tuning.on();
    if (tunes) {
        draw_teachers(tr->teachers, tr->teacher_t, B, o, level_key);
        forward(tr->teacher_t, tr->teachers, nullptr);
        mark({"draw t, noise; q_sample"});
    }
    const NoiseLevel* const levels = tr->levels + first;
    forward(tr->t + first, levels, tunes ? out : nullptr);

    mark({"loss and its gradient"});
    const float factor = training ? 1.0f / c.batch_size : 1;
    double* const loss = tr->loss + first;
    float* const dout = output_gradient(net);
    const int HW = c.H * c.W;
    const int C = c.in_channels;
    if (tunes) tuning_loss_forward_backward(loss, dout, out, tr->target, levels, o.tuning.c, factor, B, HW * C);
    else loss_forward_backward(loss, dout, out, tr->target, x, levels, o, factor, B, HW, C, c.out_channels());
}

// Returns the mean loss of a data set's first 512 images (or of all, if there are fewer). Returns NaN if an image can't
// be read (with several ranks, load_batch ends the program instead). t and noise are the same in every call, so that
// the losses of different calls can be compared. With --objective ect, the gap between the noise levels of student and
// teacher shrinks from stage to stage of the training. Here the gap is always that of the last stage, for the same
// reason.
static double validation_loss(Trainer* tr, Dataset* val) {
    const Config& c = tr->net.config;
    const int count = (int)std::min<int64_t>(val->count, 512);
    const int most = tr->net.B; // the largest number of images in a rank's batch
    const int N = world.size;
    std::vector<double> losses(count);
    // zero points to the number 0. All random draws here take it as the step's number, so every call draws the same.
    // zero and batch are allocated once, at the first call.
    static int64_t* const zero = device_alloc<int64_t>(1);
    static Upload batch = make_upload(val->batch_bytes(most, c));
    val->asked = 0; // ask for the images again: the system may have dropped them from memory since the last call
    Objective objective = tr->objective;
    objective.rms_losses = nullptr; // draw t uniformly, also with --schedule_sampler loss-second-moment
    objective.tuning.step = tr->last_step;
    for (int i = 0; i < count; i += N * most) { // in each round, every rank computes one batch
        come_to("a batch of validation");
        const int first = world.rank * most;
        const int B = std::min(most, count - i - first); // below 1 if no image is left for this rank
        if (B > 0) {
            if (!load_batch(&batch, val, c, false, i + first, B)) return NAN;
            const RandomKey key{(uint64_t)c.seed, RANDOM_VAL_TIMESTEP, zero, i + first};
            draw_levels(tr->levels + first, tr->t + first, tr->quarters + first, B, objective, key);
            tr->net.labels = (int*)(batch.device + val->labels_at(B));
            tr->net.values = (float*)(batch.device + val->values_at(B));
            const Pixels images{batch.device, val->bytes};
            const Pixels pictures{batch.device + val->pictures_at(B, c), val->cond ? val->cond->bytes : 0};
            if (c.cond_channels) put_pictures(tr, images, pictures, B, key, false);
            forward_and_loss(tr, objective, batch.device, val->bytes, first, B, key, Dropout{}, false);
            release(&batch);
        }
        if (N > 1) {
            meet();
            begin_exchange();
            all_gather(tr->loss, tr->loss + first, most * sizeof(double), MAIN_STREAM);
            end_exchange();
        }
        copy_to_host(&losses[i], tr->loss, std::min(N * most, count - i) * sizeof(double));
    }
    // With direct copies (world.direct), wait until all ranks have read tr->loss, because in the next step every rank
    // writes to tr->loss of all ranks.
    meet();
    return std::accumulate(losses.begin(), losses.end(), 0.0) / count;
}

// Computes this rank's slice of the gradient of a step. The result is in tr->sum.
//
// Why do N ranks compute the same bits as one rank? Sums of floats depend on their order, so the results of a run on N
// ranks could be rounded differently from those of a run on one rank. But they are rounded in the same way, because all
// that is computed depends only on the batch and the microbatch, and not on which rank computes it. So the runs must
// have the same microbatch. Without --microbatch, the microbatch is a rank's share of the batch, which depends on N.
// Then the runs do not compute the same bits. (All ranks begin with the same weights: each rank makes or reads all of
// them, in start_weights or restore.)
//
// 1. The same draws. Each random draw (for noise, noise levels, flips, dropout, the choice of a sample's image, and so
//    on) is a function of the seed, the step and the sample's index in the step. No draw depends on the rank that draws
//    it, or on earlier draws. (Only with --schedule_sampler loss-second-moment, the noise levels also depend on the
//    losses of earlier steps. All ranks have these losses: see 5.)
// 2. The same parts. A microbatch is the smallest unit of work. One rank computes it as a whole, by the same kernels on
//    the same number of images. Each of these kernels adds floats in a fixed order. (Atomic additions come in no fixed
//    order. So they are used only to count, in integers.) So the gradient of a microbatch is the same whichever rank
//    computes it. (WeightGradients launches some weight gradients together. Only the network, the microbatch and the
//    kind of device decide which ones these are, and how large their workspace is. So they are the same on all ranks,
//    too.) The loss's gradient is divided by the size of the whole batch before the backward pass, and no later factor
//    depends on N. (With --precision fp8, numbers are multiplied by factors before they are rounded. These factors are
//    constants, or depend on the configuration alone: choose_gradient_factor.)
// 3. The same order of the sum. Let g0, g1, g2, ... be the gradients of the step's microbatches, in the order of the
//    samples. The step's gradient is ((g0 + g1) + g2) + ..., rounded to fp32 after each addition. A single rank
//    computes the gradients one after the other, and adds each to the sum (the first one becomes the sum). With N
//    ranks, rank r computes g(r), g(N + r), g(2 N + r), ... (first_sample). So in round k of the loop below, the ranks
//    hold g(k N) to g(k N + N - 1), which are the next terms of the sum. Every rank sends each part of its gradient to
//    the rank that owns this part. The owner adds its own part and the received parts to its sum, in the order of the
//    ranks (sum_gradients). So each float is summed by one rank, in the order in which a single rank would sum it. The
//    kernels that compute a microbatch's gradient never add it to the sum. If they did, they would add the old sum and
//    their own partial sums in another order.
// 4. The same norm. The squares are summed by stretches of STRETCH floats at fixed places of the flat array. A stretch
//    belongs to one rank. The order in which the rank adds up the squares of a stretch does not depend on its other
//    stretches. All ranks receive the sums of all stretches and add them up in the same fixed order (judge_step). A
//    flat array has padding at its end, whose length depends on N. So more ranks may have more stretches. But the
//    additional stretches come last, and their sums are zero; and x + 0 = x.
// 5. The same decision. Every rank has received the loss of every sample, in the order of the samples, and the sums
//    that the norm is made of. So all ranks compute the same norm, the same verdict on the step, the same clipping and
//    the same statistics. They need not send each other more for this.
// 6. The same update. AdamW and the averages treat each parameter separately, so it does not matter which rank owns it.
//    The owner sends the new weight to all ranks. Muon does not treat parameters separately: it multiplies whole
//    matrices. So every rank receives the momentum of all matrices and computes the directions of all matrices, by the
//    same kernels in the same order (update_by_muon). Of these directions, a rank uses those of its slice.
//
// This holds under two conditions: the same microbatch and batch, and the same kind of device and build. A run that is
// resumed on another number of ranks keeps its microbatch if it divides a rank's share of the batch. Otherwise the
// program prints that the microbatch is another one or, if the user has given --microbatch, ends (check_microbatch).
static void step_gradients(Trainer* tr, const Upload& batch) {
    const Config& c = tr->net.config;
    const int B = c.micro(); // the images of a microbatch
    const int N = world.size;
    const int rounds = c.batch_size / N / B; // the number of this rank's microbatches
    const uint64_t seed = (uint64_t)c.seed;
    const Slice& own = tr->own;
    mark({"draw t, noise; q_sample"});
    const int64_t* const step = &tr->state->step;
    // Draw the noise level of each sample of the whole batch, also of the samples of other ranks. (In the default
    // objective, this is a timestep t, and all t are equally likely: see draw_level.) judge_step reads in which quarter
    // each of these levels lies (tr->quarters), and update_rms_losses reads the levels.
    const RandomKey level_key{.seed = seed, .purpose = RANDOM_TIMESTEP, .step = step, .sample0 = 0};
    draw_levels(tr->levels, tr->t, tr->quarters, c.batch_size, tr->objective, level_key);
    if (!tr->fp8_works.empty()) {
        mark({"weights to FP8"});
        round_weights((uint8_t*)tr->fp8.weights, (uint8_t*)tr->fp8.turned, tr->copy, tr->fp8_works);
        mark({"draw t, noise; q_sample"});
    }
    for (int k = 0; k < rounds; k++) {
        const int first = (int)first_sample(k, B);
        const Dropout dropout{c.dropout, seed, step, first};
        const RandomKey key{.seed = seed, .purpose = 0, .step = step, .sample0 = first}; // each draw sets the purpose
        // On a single rank, the gradients of the first microbatch are written to the sum directly.
        float* const grads = N == 1 && k == 0 ? tr->sum : tr->grads;
        if (k > 0) {
            mark({"draw t, noise; q_sample"});
            // With several ranks, this round overwrites `received` of all ranks. So with direct copies (world.direct),
            // wait until all ranks have read what the round before has written there. With NCCL and MPI, meet does
            // nothing: there a rank receives only when it is ready to.
            meet();
        }
        // The images of this microbatch. What the network is told about them (classes, numbers, pictures) is set, too.
        const Pixels x0 = take_microbatch(tr, batch, k, key);
        forward_and_loss(tr, tr->objective, x0.data, x0.bytes, first, B, key, dropout, true);

        // The backward pass goes from the last layer to the first, and completes gradients in this order. So the last
        // segment of the flat array is sent first. (A segment has a part for each rank: see Slice.) complete_from: from
        // this place of the flat array on, all gradients are complete.
        int unsent = own.segments; // segments 0 to unsent - 1 are not sent yet
        const std::function<void(size_t, Stream*)> send_gradients = [&](size_t complete_from, Stream* stream) {
            while (unsent && own.at(unsent - 1, 0) >= complete_from) {
                unsent--;
                const size_t begin = own.at(unsent, 0);
                if (begin >= own.n) continue; // this segment is padding
                all_to_all(tr->received + begin, grads + begin, own.each() * sizeof(float), stream);
            }
        };
        // Only direct copies between GPUs (world.direct) run during the backward pass. NCCL would take multiprocessors
        // from the kernels of that pass, and a call of MPI (in the CPU build) would stop the pass until it returns. So
        // with NCCL and MPI the gradients are sent after the pass.
        unet_backward(&tr->net, Weights{tr->params, tr->copy, tr->fp8}, grads, dropout, B,
                      world.direct ? send_gradients : nullptr);
        if (N > 1) {
            mark({"gradients to their ranks"});
            begin_exchange();
            all_gather(tr->loss + k * N * B, tr->loss + first, B * sizeof(double), MAIN_STREAM);
            send_gradients(0, MAIN_STREAM);
            end_exchange();
        }
        // sum_gradients adds the gradients of this round to tr->sum. In the first round (k = 0) it replaces the old
        // content of tr->sum. (On a single rank, the first gradients are there already.) Then it adds up the squares
        // of tr->sum, of which judge_step makes the norm after the last round.
        mark({"gradient norm"});
        sum_gradients(tr->sum, everywhere(tr->squares), RankGradients{grads, tr->received, own}, k > 0);
    }
    // judge_step needs the squares of all ranks. With world.direct, sum_gradients of each rank writes them to all
    // ranks, and meet waits until all ranks have done this. Otherwise gather sends them.
    if (world.direct) meet();
    else if (N > 1) gather(tr->squares, nullptr, sizeof(double), own, own.n);
}

// Does the optimiser's part of a step, for this rank's slice. All ranks get the new weights in the form that kernels
// read: the first plain_size weights in fp32, and the other weights in the copy. With world.direct, adamw_update itself
// writes the new weights to all ranks. Without world.direct, several ranks gather the new weights after adamw_update.
static void update_slice(Trainer* tr) {
    const Config& c = tr->net.config;
    const Slice& own = tr->own;
    const size_t plain = tr->net.plain_size;
    Update update{};
    update.params = everywhere(tr->params);
    update.copy = everywhere(tr->copy);
    update.plain = plain;
    update.ema = tr->emas[0];
    update.m = tr->m;
    update.v = tr->v;
    update.sum = tr->sum;
    update.is_matrix = tr->is_matrix;
    if (c.muon()) update_by_muon(tr, update);
    adamw_update(update, tr->state, tr->adamw, own);
    for (size_t k = 1; k < tr->emas.size(); k++) ema_update(tr->emas[k], tr->params, tr->state, c.emas[k], own);
    if (world.size == 1) return;
    mark({"weights to all ranks"});
    if (world.direct) return meet(); // waits for adamw_update of all ranks, which writes new weights to all ranks
    begin_exchange();
    if (weights_have_copy()) gather(tr->copy, nullptr, STRETCH * act_bytes(), own, own.n);
    gather(tr->params, nullptr, STRETCH * sizeof(float), own, plain);
    end_exchange();
}

// Starts a training step. step: the number of steps that were started before. Returns false if an image of the step
// can't be read (with several ranks, load_batch ends the program instead).
static bool train_step(Trainer* tr, int64_t step) {
    const Config& c = tr->net.config;
    const size_t stretches = tr->own.whole() / STRETCH; // the number of stretches of a whole flat array
    const int B = c.batch_size;
    const int T = c.diffusion_steps;
    Upload* batch = &tr->batch[step % 2];
    come_to("a training step"); // with several ranks: notes that this rank has come here (unet/host/ranks.h)
    if (!load_batch(batch, &tr->data, c, true, step * B, B)) return false;
    // In the CPU build, replay just calls this lambda. On a GPU, replay records the lambda's launches as a graph, and
    // then launches the graph. It records only twice in a run, once for each of the two batches.
    // (`mark` is for dev/bench, which measures how long each part of a step takes.)
    replay(&tr->graph[step % 2], [&] {
        step_gradients(tr, *batch);
        // Computes the gradient's norm, the step's loss and learning rate, and decides whether the step is good:
        // whether its loss and its norm are finite, and not far larger than usual (judge_batch).
        mark({"judge the step"});
        judge_step(tr->state, tr->squares, stretches, tr->loss, tr->quarters, tr->adamw, B);
        if (tr->history) update_rms_losses(tr->rms_losses, tr->history, tr->levels, tr->loss, tr->state, T, B);
        // Clips the gradient, and updates the weights and their averages.
        mark({c.muon() ? "Muon" : "AdamW, EMA"});
        update_slice(tr);
        mark({"record the step"});
        next_step(&tr->state->step);
        record_step(tr->records, tr->state, RECORDS);
        mark({""});
    });
    release(batch);
    return true;
}

// ---------------------------------------------------------------------------------------------------------------------
// --- the loop over the steps

// Waits until all issued steps are done, and logs those that are not logged yet. validate: the validation loss is
// measured after the last of these steps. show: the status line is printed for the last of these steps. Then log.csv is
// written and, when it is due, the page.
static void collect_steps(Run* run, bool validate, bool show) {
    StepState records[RECORDS]; // the results of the latest steps, which the device has stored (record_step)
    const int64_t logged = run->state.step;
    copy_to_host(records, run->trainer.records, sizeof records); // this waits for the steps
    const double ended = now();
    const double elapsed = ended - run->steps_began;
    const double val = validate ? validation_loss(&run->trainer, &run->val) : NAN;
    // The validation loss is rounded as in log.csv, from which a resumed run reads it (take_best_loss). So a resumed
    // run makes the same decision about best.bin as a run without a pause.
    run->val_loss = atof(text("%.9g", val).c_str());

    const double count = (double)(run->issued - logged);
    // per_step is a mean over recent steps. Each new step has a weight of 0.1 in it, and the mean so far has a weight
    // of 0.9. So if ten steps are logged together, the mean so far keeps a weight of 0.9^10 = 0.35. The first three
    // steps are slower than the others. So if fewer than three steps were logged before this call, the mean so far is
    // dropped.
    const double kept = logged < run->first_step + 3 ? 0 : std::pow(0.9, count);
    run->per_step = kept * run->per_step + (1 - kept) * elapsed / count;
    run->seconds += elapsed;

    const std::lock_guard<PageTurn> turn(page_turn); // the page must not be written while the log changes
    for (int64_t step = logged; step < run->issued; step++) {
        run->state = records[step % RECORDS];
        const bool is_last = step + 1 == run->issued;
        const double steps_later = (double)(run->issued - 1 - step);
        const double done = ended - elapsed * steps_later / count; // assumes that all steps took the same time
        log_step(run, elapsed * 1e3 / count, is_last ? val : NAN, done - run->began);
        if (!run->state.ok) report_bad_step(run);
        else if (run->proven != run->saved) prove_checkpoint(run);
    }
    write_log(run);
    if (show) print_step(run, val);
    if (now() >= run->page.due) write_page(run, "running");
    run->steps_began = now();
}

// Finds out whether the last checkpoint of a finished run is good, if that is needed. Old checkpoints are removed only
// when a good step has followed the newest checkpoint. So if there are too many checkpoints now, one more step is done.
// The weights after this step are not saved.
static void prove_last_checkpoint(Run* run) {
    const int keep = run->config.keep_checkpoints;
    const bool too_many = !world.rank && keep && (int)run->folder.list().size() > keep;
    // Only rank 0 has opened the folder. But all ranks must do the step together, because they exchange gradients. So
    // rank 0 tells the other ranks whether the step is needed.
    if (!any_rank("the question whether a checkpoint is to spare", too_many)) return;
    if (!train_step(&run->trainer, run->issued)) return;
    StepState after;
    copy_to_host(&after, run->trainer.records + run->issued % RECORDS, sizeof after);
    if (after.ok) prove_checkpoint(run);
}

// Returns whether a signal ends the run. Several ranks must stop after the same step. So they exchange messages to
// agree on this step. The messages take time, so they are sent only every STEPS_AGREED steps.
static bool is_stopped(Run* run) {
    const bool is_due = world.size == 1 || run->issued % STEPS_AGREED == 0;
    if (is_due) run->stop = any_rank("the question whether to stop", stop_signal);
    return run->stop;
}

// Does one turn of the loop: issues a step, and then does all that is due, such as a checkpoint. If nothing is due, the
// host does not wait until the step is done.
static void run_step(Run* run) {
    const Config& c = run->config;
    if (!train_step(&run->trainer, run->issued)) return; // unreadable images end the run (data_error, in train)
    run->issued++;
    const int64_t step = run->issued;
    const bool last = step >= c.max_steps;
    // A new status line shall appear every ten seconds or so. So if the last line would be more than ten seconds old
    // when four more steps have ended, a new line is printed now, even if --log_interval asks for fewer lines. The four
    // steps are a margin: a line is printed only when its step has ended.
    const bool slow = now() - run->status_shown + 4 * run->per_step > 10;
    // Returns whether something is due that happens after every `interval` steps, and after the last step. If interval
    // is 0, it never happens.
    auto due = [&](int interval) { return interval && (step % interval == 0 || last); };
    // Returns whether a file is due that is written after every `interval` steps, and after the last step. After a
    // skipped step the file is not written. Then it stays due until it is written. written: the step of the newest
    // file of this kind. The divisions round down: they differ if a multiple of `interval` lies in written + 1 .. step.
    auto file_due = [&](int interval, int64_t written) {
        return interval && (last || step / interval > written / interval);
    };
    const bool save = file_due(c.save_interval, run->saved_step);
    const bool snapshot = file_due(c.ema_snapshots, run->snapshot_step);
    const bool show = slow || due(c.log_interval);
    const bool draw = due(c.sample_interval) && !last; // finish_complete draws the last grid
    const bool wants_val_loss = due(c.val_interval) || (c.keep_best && save);
    const bool validate = run->val.count && wants_val_loss;
    const bool records_full = step - run->state.step >= STEPS_AHEAD;
    if (!show && !save && !validate && !draw && !snapshot && !records_full) return;

    collect_steps(run, validate, show || validate);
    // If the newest step was skipped, the weights may be broken, so they are not saved. Files stay due (file_due), but
    // the grid of this step is left out.
    if (run->state.bad_in_row) return;
    // The snapshot comes first. If the process is killed between the two files, the resumed run goes on from an earlier
    // checkpoint, comes to this step again, and writes the snapshot again.
    if (snapshot) save_snapshot(run);
    if (save) save_checkpoint(run);
    if (draw) save_grid(run);
    if (save || draw) write_page(run, "running");
    run->steps_began = now(); // so the time that writing took is not part of a step's time
}

// ---------------------------------------------------------------------------------------------------------------------
// --- train and main: a whole run, from the command line to the exit code

// Does a whole run. data: the training data. output: the folder of --output_dir, if it exists. resume: the path of the
// checkpoint to go on from; "": the run is new. start: that checkpoint. In a new run, start is the file of --init;
// without --init its size is 0.
// Returns the program's exit code. After a signal the exit code is 128 + the number of the signal, as in a shell. So
// the command "./train_unet && next" does not start `next` with a model that is half trained.
static int train(const Config& c, const Dataset& data, Folder output, const std::string& resume,
                 const ModelFile& start) {
    // First find errors in the settings, before the program allocates memory or writes a file.
    if (!world.rank) check_output_dir(c, output, resume, start.state().step);
    const Dataset val = open_validation_data(c);
    if (start.size) check_size(start, build_unet(c));
    Run run{c, make_trainer(c, data), val, output};
    if (!begin_run(&run, data, resume, start)) return 0; // all steps are done already

    // The loop over the steps.
    run.steps_began = now();
    while (run.issued < c.max_steps && !is_stopped(&run) && data_error(run).empty()) run_step(&run);
    // A signal may have come after the last step was issued. Then the run ends without its last grid. The signal is
    // noted; the next one ends a wait for a full disk (while_full).
    if (!run.stop) run.stop = any_rank("the end of the steps", stop_signal);
    if (run.stop) stop_signal = 0;
    // Some steps may not be logged yet, for example after a signal.
    const bool validate = c.keep_best && data_error(run).empty();
    if (run.state.step < run.issued) collect_steps(&run, validate, validate);
    save_at_the_end(&run);
    end_line();
    if (run.stop || !data_error(run).empty()) finish_stopped(&run); // after an error of the data, this does not return
    else finish_complete(&run);
    if (!run.stop) {
        prove_last_checkpoint(&run); // may remove a checkpoint, so the page is written after it
        write_page(&run, "done");
    }
    if (!world.rank && fsync(run.log_file))
        die("%s/log.csv: writing failed (%s)", c.output_dir.c_str(), strerror(errno));
    end_page();
    return run.stop ? 128 + run.stop : 0;
}

// Does all that the program does, and returns its exit code.
static int run_program(int argc, char** argv) {
    // Read the command line, and find out how many processes there are.
    start_process(argv);
    find_ranks();
    Config c;
    parse_command_line(&c, argc, argv);
    if (!c.compare_runs.empty()) {
        compare_runs(c);
        return 0;
    }
    take_aliases(&c);
    take_num_gpus(c.num_gpus, c.rank_timeout, argv); // if this starts a process for each GPU, it does not return
    check_contradictions(c);

    // Rank 0 opens the folders that it writes to, and chooses the checkpoint for all ranks.
    Folder output;  // the folder of --output_dir
    Folder samples; // the folder of --output
    std::string resume;
    if (!world.rank) {
        output = open_folder(c.output_dir);
        // This ends the program at once if another run trains in the folder. A new folder is made and locked later
        // (take_folder).
        if (!c.sample) lock_folder(output, false);
        resume = resume_path(c, output);
    }
    resume = broadcast_host("the choice of a checkpoint", resume);
    if (!world.rank && c.sample) samples = open_output(c, resume);

    // The model file, the preset and the data file fill in what the command line leaves open.
    const bool resumes = !resume.empty();
    ModelFile model;
    if (resumes || !c.init.empty()) model = open_model(resumes ? resume : c.init);
    Dataset data;
    const std::string where = model.size ? model.path + ": " : ""; // error messages about a setting begin with it
    complete_config(&c, model, resumes, where, &data);
    start_device(c.precision, c.device);
    // --exchange auto: GPUs write into each other's memory directly if they can. nccl: they send by NCCL.
    const bool directly = meaning<bool>("exchange", c.exchange, {{"auto", true}, {"nccl", false}});

    // Samples, without a run.
    if (c.sample) {
        if (!model.size) die("--sample %d: needs --init FILE, a model to sample from", c.sample);
        const std::string error = check_model(&c);
        if (!error.empty()) refuse(where + error);
        // Ranks are compared before their devices are joined: the comparison needs only the hosts' connections
        // (unet/host/ranks.h).
        compare_ranks(c, model.path);
        join_devices(directly);
        sample_and_stop(c, samples, model);
        return 0;
    }

    // A run: its data, all checks, and then the training.
    check_run(&c, where);
    // If the data decided which preset is used, complete_config has opened the data file already. (The images of a
    // training step are read later, in load_batch.)
    if (!data.size) data = open_dataset(c.data_file);
    open_pictures(&data, "cond_file", c.cond_file);
    take_data_shape(&c, data, where);
    if (resumes) check_resume(c, model, data);
    compare_ranks(c, model.path);
    join_devices(directly);
    return train(c, data, output, resume, model);
}
#ifndef TRAIN_UNET_NO_MAIN
int main(int argc, char** argv) { return run_program(argc, argv); }
#endif

// =====================================================================================================================
// Part II. The device

#ifdef __CUDACC__ // the GPU

// =====================================================================================================================
// Small operations: resampling, embeddings, diffusion

// ---------------------------------------------------------------------------------------------------------------------
// --- resample: statistics for group norm; average pool 2x2, nearest neighbour 2x, the even pixels
// Used when: a tensor changes its size without a convolution. Two kinds of convolutions also call these functions. A
//   convolution with stride 2 may be computed with stride 1. Then PICK keeps the pixels in even rows and columns of the
//   result. In the backward pass, spread (the reverse of PICK) enlarges the gradient of the output. A convolution that
//   upsamples its input calls REPEAT, if it first writes the whole upsampled input to memory, and upsample_backward,
//   for the input's gradient.
// How: a block loops over pixels of an image for a few pieces of channels. If statistics of the result are wanted, the
//   block also sums what it writes. In the backward pass, a block computes one row of an image.
// Costs: memory traffic. No element is read or written twice, with one exception: the backward pass of POOL reads each
//   gradient four times, because four pixels of dx need it. (Most of these reads find it in a cache.)
//
// Statistics (Stats) are two numbers of each image and channel: the sums, over all pixels, of the result's elements and
// of their squares. The group norm that reads the result computes mean and variance from them, and so needs no pass of
// its own over this tensor.

// POOL writes the average of 2x2 pixels. REPEAT writes each pixel 2x2 times. PICK keeps the pixels of even rows and
// columns: a convolution with stride 2 gives the same values as one with stride 1 followed by PICK.
enum Resampling { POOL, REPEAT, PICK };

// Returns where pixel k (0 to 3) of a 2x2 square begins, in elements from the square's first pixel. W is the number of
// pixels in a row of the image that contains the square.
INLINE size_t in_square(int k, int W, int C) { return ((size_t)(k / 2) * W + k % 2) * C; }

// Adds to sum one piece (16 bytes) of each of the four pixels of a 2x2 square. x is the address of the first pixel's
// piece.
template <class T> INLINE void add_square(float (&sum)[VEC<T>], const T* x, int W, int C) {
    UNROLL_FOR (int k = 0; k < 4; k++) {
        add_piece<T>(sum, load16(x + in_square(k, W, C)));
    }
}

// The grid is (blocks that share the pixels, slabs of channels, images). A block works on a slab of `columns` pieces
// of channels. Its threads form THREADS / columns rows. Neighbouring rows work on neighbouring pixels. If one block
// has all pixels of the slab, a thread's next pixel is THREADS / columns pixels further on. (If several blocks share
// the pixels, they take turns, so the distance is gridDim.x times larger.)
//
//                  columns
//   pixel 0       [ thread 0     1     2     3 ]
//   pixel 1       [        4     5     6     7 ]      then all go on to the next THREADS / columns pixels
//
// A "pixel" p belongs to the smaller image, which is x for REPEAT, and `out` for POOL and PICK. In the larger image, p
// is a square of 2x2 pixels. With stats, one block computes all pixels of its slab, and the sums of what it writes.
// Each thread sums its pixels in fp32, and the threads' sums are added up in double. Shared memory is used only for
// these sums, at the end.
template <class T, Resampling R>
static __global__ void __launch_bounds__(512) resample_kernel(T* out,        // (B, new H, new W, C)
                                                              double* stats, // (B, C, 2), or null
                                                              const T* x,    // (B, H, W, C)
                                                              int H, int W, int C, int columns) {
    static_assert(R == POOL || R == REPEAT || R == PICK, "another one needs its sizes and places here");
    constexpr int V = VEC<T>;
    constexpr int THREADS = 512;
    constexpr int COPIES = R == REPEAT ? 4 : 1; // how often each pixel is written
    __shared__ float sums[2 * V * (THREADS + 8)];
    const int b = blockIdx.z;
    const int c = (blockIdx.y * columns + threadIdx.x % columns) * V; // this thread's first channel
    const int rows = THREADS / columns;
    const int odd = R == PICK; // is added to H and W before they are halved: PICK rounds up, POOL down
    const int small_H = R == REPEAT ? H : (H + odd) / 2;
    const int small_W = R == REPEAT ? W : (W + odd) / 2;
    const int large_W = R == REPEAT ? 2 * W : W;
    const int pixels = small_H * small_W;
    float sum[V] = {};
    float square[V] = {};
    x += (size_t)b * H * W * C + c;
    out += (size_t)b * pixels * COPIES * C + c;
    await_previous_kernel();
    UNROLL_4_FOR (int p = blockIdx.x * rows + threadIdx.x / columns; p < pixels; p += gridDim.x * rows) {
        const size_t in_small = p;
        const size_t in_large = (size_t)(p / small_W) * 2 * large_W + p % small_W * 2; // the square's first pixel
        const T* from = x + (R == REPEAT ? in_small : in_large) * C;
        T* to = out + (R == REPEAT ? in_large : in_small) * C;
        uint4 piece;
        float v[V] = {};
        if (R == POOL) {
            add_square(v, from, W, C);
            UNROLL_FOR (float& average : v) {
                average *= 0.25f;
            }
            piece = pack<T>(v);
        } else piece = load16(from);
        unpack<T>(v, piece); // the sums below must be those of the rounded values, which the group norm will read
        UNROLL_FOR (int k = 0; k < COPIES; k++) {
            *(uint4*)(to + in_square(k, 2 * W, C)) = piece;
        }
        UNROLL_FOR (int i = 0; i < V; i++) {
            sum[i] += v[i];
            square[i] += v[i] * v[i];
        }
    }
    if (!stats) return;
    fold_columns<THREADS>(sums, columns, sum, square, [&](int k, int column, double total) {
        const int channel = (blockIdx.y * columns + column) * V + k / 2;
        stats[((size_t)b * C + channel) * 2 + k % 2] = COPIES * total;
    });
}

template <class T, Resampling R>
static void launch_resample(act* out, Stats* stats, const act* x, int B, int H, int W, int C,
                            Stream* stream = MAIN_STREAM) {
    if (stats) stats->parts = 1;
    const int pieces = C / VEC<T>;
    const int pixels = R == REPEAT ? H * W : ((H + 1) / 2) * ((W + 1) / 2);
    // Narrow slabs give more blocks, and wide slabs read longer contiguous parts of memory. Without stats, several
    // blocks share a slab, so slabs are as wide as possible (up to 8 pieces). With stats, there is only one block for
    // each slab of an image. So slabs are widened only as long as there are blocks for at least 3/4 of the
    // multiprocessors.
    int columns = 2;
    while (columns < 8 && pieces % (2 * columns) == 0) {
        const int blocks = B * pieces / (2 * columns);
        if (stats && blocks < gpu.sms * 3 / 4) break;
        columns *= 2;
    }
    const int pixels_at_once = 512 / columns;
    const dim3 grid(stats ? 1 : ceil_div(pixels, pixels_at_once * 4), pieces / columns, B);
    double* const sums = stats ? stats->sums : nullptr;
    launch_on(stream, 1, resample_kernel<T, R>, grid, 512, 0, out, sums, x, H, W, C, columns);
}

static void downsample_forward(act* out, Stats* stats, const act* x, int B, int H, int W, int C) {
    with_act([&]<class T>(T) { launch_resample<T, POOL>(out, stats, x, B, H, W, C); });
}
static void upsample_forward(act* out, Stats* stats, const act* x, int B, int H, int W, int C) {
    with_act([&]<class T>(T) { launch_resample<T, REPEAT>(out, stats, x, B, H, W, C); });
}

// Computes the gradient of POOL or REPEAT. grid (B H): a block computes one row of an image. Each thread computes one
// piece of a pixel at a time.
//   POOL      dx is a quarter of the pooled pixel's gradient. In an odd last row or column, which was not pooled, dx
//             is 0.
//   REPEAT    dx is the sum of the four copies' gradients.
// In both cases store_gradient adds the addends.
template <class T, Resampling R>
static __global__ void __launch_bounds__(256)
    resample_backward_kernel(GradOf<T> dx,  // (B, H, W, C)
                             const T* dout, // POOL: (B, H / 2, W / 2, C); REPEAT: (B, 2 H, 2 W, C)
                             int H, int W, int C) {
    static_assert(R == POOL || R == REPEAT, "another one needs its formula here; the gradient of PICK is spread");
    constexpr int V = VEC<T>;
    const int pieces = C / V; // how many pieces a pixel has
    const int b = blockIdx.x / H;
    const int h = blockIdx.x % H;
    const int Ho = H / 2;
    const int Wo = W / 2;
    await_previous_kernel();
    for (int i = threadIdx.x; i < W * pieces; i += 256) {
        const int w = i / pieces;
        const int c = (i - w * pieces) * V;
        float v[V] = {};
        if (R == POOL) {
            const size_t pooled = ((size_t)b * Ho + h / 2) * Wo + w / 2;
            if (h / 2 < Ho && w / 2 < Wo) unpack<T>(v, load16(dout + pooled * C + c));
            UNROLL_FOR (float& quarter : v) {
                quarter *= 0.25f;
            }
        } else {
            const size_t first_copy = ((size_t)b * 2 * H + 2 * h) * 2 * W + 2 * w;
            add_square(v, dout + first_copy * C + c, 2 * W, C);
        }
        const size_t pixel = (size_t)blockIdx.x * W + w;
        store_gradient(dx, pixel * C + c, v);
    }
}

template <Resampling R> static void launch_resample_backward(Grad dx, const act* dout, int B, int H, int W, int C) {
    with_act([&]<class T>(T) {
        auto kernel = resample_backward_kernel<T, R>;
        launch(kernel, B * H, 256, 0, typed<T>(dx), dout, H, W, C);
    });
}
static void downsample_backward(Grad dx, const act* dout, int B, int H, int W, int C) {
    launch_resample_backward<POOL>(dx, dout, B, H, W, C);
}
static void upsample_backward(Grad dx, const act* dout, int B, int H, int W, int C) {
    launch_resample_backward<REPEAT>(dx, dout, B, H, W, C);
}

// to_patches is PyTorch's F.pixel_unshuffle, and from_patches is the reverse. Each thread moves one element.
static void to_patches(float* out, const float* x, int B, int H, int W, int C, int p) {
    const size_t n = (size_t)B * H * W * C;
    each(n, [=] __device__(size_t i) { out[place_in_patches(i, H, W, C, p)] = x[i]; });
}
static void from_patches(float* out, const float* x, int B, int H, int W, int C, int p) {
    const size_t n = (size_t)B * H * W * C;
    each(n, [=] __device__(size_t i) { out[i] = x[place_in_patches(i, H, W, C, p)]; });
}

// out = [x | cond]: each pixel has the C channels of x and then the K channels of cond. Each thread writes one element.
static void join_channels(float* out, const float* x, const float* cond, int B, int HW, int C, int K) {
    each((size_t)B * HW * (C + K), [=] __device__(size_t i) {
        const size_t pixel = i / (C + K);
        const int channel = (int)(i % (C + K));
        out[i] = channel < C ? x[pixel * C + channel] : cond[pixel * K + channel - C];
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// --- linear, silu, timestep and label embedding: fp32 (B, C) throughout
// Used when: the embedding is computed (of t, and of the class and the numbers that the network is conditioned on), and
//   projected for every residual block.
// How: a warp computes partial sums for 32 images. In the forward pass, they are parts of 8 or 16 outputs of each
//   image. In the backward pass, they are parts of the gradients of 64 inputs of each image. The partial sums are added
//   in a fixed order. In the backward pass, the same warp computes weight gradients, too.
// Costs: mostly latencies. Each weight is read once for every 32 images, and there are too few images to keep the GPU
//   busy.

// Returns what is stored as dx: the gradient d of element i plus the addends.
INLINE float with_addends(const GradOf<float>& g, size_t i, float d) {
    d += g.add1 ? g.add1[i] : 0.0f;
    return d + (g.add2 ? g.add2[i] : 0.0f);
}

// How many images a block works on at a time. The kernels below need a Cin that is a multiple of 4, and x, weight and
// dweight that are aligned to 16 bytes.
constexpr int LINEAR_ROWS = 32;

// out (B, Cout) = x (B, Cin) weight^T + bias. grid (Cout / OUTPUTS, B / 32), both rounded up: a block computes OUTPUTS
// outputs of 32 images.
//   lane    works on one image
//   warp    multiplies every eighth quad of an image's inputs. (A quad is 4 neighbouring inputs.)
// Shared memory holds 64 quads of the weights of each of the block's outputs, and the same 64 quads of the inputs of
// each of the block's images.
//   1. All threads copy the next 64 quads of these weights and inputs to shared memory.
//   2. Each warp multiplies its share of the quads: acc += x w. Steps 1 and 2 are repeated while inputs are left.
//   3. The partial sums of the 8 warps are added, in the order of the warps, and stored.
// All lanes read the same weight at once, and shared memory sends it to all of them in one access. The previous kernel
// does not write weights. So the first copies of weights begin before that kernel has ended.
template <int OUTPUTS>
static __global__ void __launch_bounds__(256) linear_forward_kernel(float* out,          // (B, Cout)
                                                                    const float* x,      // (B, Cin)
                                                                    const float* weight, // (Cout, Cin)
                                                                    const float* bias,   // (Cout)
                                                                    int B, int Cin, int Cout) {
    constexpr int WARPS = 8;
    constexpr int QUADS = 64; // how many quads of a row are in shared memory at a time
    __shared__ float4 weights[OUTPUTS][QUADS], rows[LINEAR_ROWS][QUADS];
    const int row = threadIdx.x % 32; // the number of this lane's image among the block's 32
    const int warp = threadIdx.x / 32;
    const int n0 = blockIdx.x * OUTPUTS;           // the block's first output
    const int b0 = blockIdx.y * LINEAR_ROWS;       // the block's first image
    const int column = n0 + threadIdx.x % OUTPUTS; // the output that this thread adds up and stores in the end
    const float shift = column < Cout ? bias[column] : 0;
    // Copies a part of the array `from` (`end` rows, Cin columns) to the array `to` in shared memory. The part consists
    // of rows `first`, `first + 1`, ... (as many as `to` has), and of 64 quads of each row, beginning with column k0.
    // What lies beyond the array `from` becomes 0. Quad i of row r is stored at place i ^ (r & swap). For x, swap is 7:
    // then lanes that read the same quad of different rows use different banks. For weights, swap is 0, because all
    // lanes read the same quad.
    auto load = [&](auto& to, const float* from, int first, int end, int k0, int swap) {
        UNROLL_FOR (int i = threadIdx.x; i < (int)(sizeof(to) / sizeof(float4)); i += 256) {
            const int r = i / QUADS; // the row
            const int quad = i % QUADS;
            const int k = k0 + quad * 4; // the first of the quad's four inputs
            const bool inside = first + r < end && k < Cin;
            const size_t place = inside ? (size_t)(first + r) * Cin + k : 0;
            copy_async_16(&to[r][quad ^ (r & swap)], from + place, inside);
        }
    };
    float acc[OUTPUTS] = {}; // the part that this warp has summed of each output of this thread's image
    for (int k0 = 0; k0 < Cin; k0 += 4 * QUADS) {
        load(weights, weight, n0, Cout, k0, 0);
        if (k0 == 0) await_previous_kernel();
        load(rows, x, b0, B, k0, 7);
        copies_committed();
        copies_arrived<0>();
        __syncthreads(); // the copies of all threads have arrived
        UNROLL_FOR (int quad = warp; quad < QUADS; quad += WARPS) {
            if (k0 + (quad - warp) * 4 >= Cin) break;
            const float4 v = rows[row][quad ^ (row & 7)];
            UNROLL_FOR (int n = 0; n < OUTPUTS; n++) {
                const float4 w = weights[n][quad];
                acc[n] += v.x * w.x;
                acc[n] += v.y * w.y;
                acc[n] += v.z * w.z;
                acc[n] += v.w * w.w;
            }
        }
        __syncthreads(); // all threads have read these quads, so the next ones may be copied
    }
    // The warps' partial sums are written over the array `rows`, which nobody reads any more. Then each thread adds up
    // and stores one output of some of the images.
    typedef float PartialSums[WARPS][OUTPUTS][LINEAR_ROWS + 1];
    PartialSums& sums = *(PartialSums*)rows;
    UNROLL_FOR (int n = 0; n < OUTPUTS; n++) {
        sums[warp][n][row] = acc[n];
    }
    __syncthreads();
    for (int r = threadIdx.x / OUTPUTS; r < min(LINEAR_ROWS, B - b0) && column < Cout; r += 256 / OUTPUTS) {
        float sum = shift;
        UNROLL_FOR (int k = 0; k < WARPS; k++) {
            sum += sums[k][column - n0][r];
        }
        out[(size_t)(b0 + r) * Cout + column] = sum;
    }
}

// Backward. For every 32 images, the weights are read once:
//   dweight = dout^T x      dbias = the sum of dout over images      dx = dout weight
//
//   warp    works on 64 inputs of 32 images, and on some groups of eight outputs
//   lane    works on two of the inputs. For each of the 32 images, its registers hold x at these two inputs (64 numbers
//           in all) and dx at these two inputs (64 numbers).
//
// A warp works on 8 outputs at a time. Their weights, their dout and their dweight (as summed over earlier images) are
// copied to one of the warp's two stages in shared memory. For each output, a lane reads the weights of its two inputs
// once. It also reads the dout of 32 images. All lanes read the same dout at the same time. A lane multiplies each dout
// four times: by x at its two inputs (for dweight) and by its two weights (for dx). The 4 warps of a block work on the
// same inputs and on different outputs. At the end the block adds up the dx of its warps. The outputs are also divided
// into splits, and blocks of different splits work on different outputs. The dx of a split is stored as one of the
// `parts` (splits, B, Cin). A second kernel adds up the parts.
constexpr int LINEAR_OUTS = 8;
constexpr int LINEAR_WARPS = 4;
// What a warp reads for 8 outputs, 64 inputs and 32 images. `before` is the dweight summed over the images before these
// 32. It is zero for the first 32 images.
struct LinearStage {
    float weight[LINEAR_OUTS][64];
    float before[LINEAR_OUTS][64];
    float dout[LINEAR_OUTS][LINEAR_ROWS + 4]; // padded, so that a warp copies to 32 different banks
};
struct LinearShared { // a block's shared memory
    LinearStage stages[LINEAR_WARPS][2];
    float2 sums[LINEAR_WARPS][LINEAR_ROWS][32]; // the part of dx that each warp has summed over its outputs
};
struct LinearBackward {
    float *dweight, *dbias;
    float* parts; // (splits, B, Cin): partial sums of dx; null: dx is not wanted
    const float *dout, *x, *weight;
    int B, Cin, Cout;
    int tiles;  // how many tiles of 64 inputs there are
    int splits; // into how many splits the outputs are divided; different blocks work on different splits
};

// Starts to copy into a stage what belongs to outputs o0 ... o0 + 7 and images b0 ... b0 + 31. For every second output,
// a lane copies 16 bytes of the weights and 16 bytes of the earlier dweight. It also copies dout (4 bytes) of one
// output for every fourth image. If such an image or output does not exist, dout becomes 0.
INLINE void load_linear_stage(LinearStage& to, const LinearBackward& p, int o0, int b0, int tile) {
    const int lane = threadIdx.x % 32;
    const int w_row = lane / 16;
    const int w_column = min(tile * 64 + lane % 16 * 4, p.Cin - 4);
    const int d_output = lane % LINEAR_OUTS;
    const int d_row = lane / LINEAR_OUTS; // the first image that this lane copies
    const int rows = min(LINEAR_ROWS, p.B - b0);
    const int left = p.Cout - o0;
    if (left <= 0) return;
    UNROLL_FOR (int k = 0; k < LINEAR_OUTS; k += 2) {
        const int output = o0 + min(k + w_row, left - 1);
        const size_t i = (size_t)output * p.Cin + w_column;
        copy_async_row_if(true, shared_address(&to.weight[k + w_row][lane % 16 * 4]), p.weight + i, true);
        copy_async_row_if(true, shared_address(&to.before[k + w_row][lane % 16 * 4]), p.dweight + i, b0 > 0);
    }
    UNROLL_FOR (int k = 0; k < LINEAR_ROWS; k += 4) {
        const size_t b = b0 + min(k + d_row, rows - 1);
        const float* from = p.dout + b * p.Cout + o0 + min(d_output, left - 1);
        copy_async<4>(&to.dout[d_output][k + d_row], from, k + d_row < rows && d_output < left);
    }
    copies_committed();
}

// grid (tiles * splits): a block works on one tile of 64 inputs and on one split of the outputs. For 32 images at a
// time:
//   1. Each lane loads its inputs x.
//   2. Each warp goes through its outputs, 8 at a time. To dweight and, in the blocks of the first tile, to dbias of
//      these outputs, it adds what the 32 images contribute. To its own dx of the 32 images, it adds what these outputs
//      contribute.
//   3. If dx is wanted, the block adds up the dx of its warps.
static __global__ void __launch_bounds__(LINEAR_WARPS * 32, 2) linear_backward_kernel(const LinearBackward p) {
    extern __shared__ __align__(16) unsigned char memory[];
    LinearShared& shared = *(LinearShared*)memory;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int tile = blockIdx.x % p.tiles;
    const int split = blockIdx.x / p.tiles;
    const int i = tile * 64 + lane * 2;                            // this lane's first input
    const int first = (split * LINEAR_WARPS + warp) * LINEAR_OUTS; // this warp's first output
    const int stride = p.splits * LINEAR_WARPS * LINEAR_OUTS;      // distance to the warp's next eight outputs
    // For dbias, this lane sums dout of output o0 + bias_output over images 8 bias_row ... 8 bias_row + 7 of the 32.
    const int bias_output = lane % LINEAR_OUTS;
    const int bias_row = lane / LINEAR_OUTS;
    const bool inside = i < p.Cin;
    await_previous_kernel();
    for (int b0 = 0; b0 < p.B; b0 += LINEAR_ROWS) {
        float2 x[LINEAR_ROWS], dx[LINEAR_ROWS]; // values and gradients of this lane's two inputs, for each image
        const int rows = min(LINEAR_ROWS, p.B - b0);
        load_linear_stage(shared.stages[warp][0], p, first, b0, tile);
        UNROLL_FOR (int b = 0; b < LINEAR_ROWS; b++) {
            const float* from = p.x + (size_t)(b0 + b) * p.Cin + i;
            x[b] = inside && b < rows ? *(const float2*)from : float2{};
            dx[b] = float2{};
        }
        // There are two stages. While the warp reads one stage, the other stage is filled with what belongs to the
        // warp's next eight outputs: their weights, their dout, and their dweight as summed over earlier images.
        int place = 0; // the stage that is read
        for (int o0 = first; o0 < p.Cout; o0 += stride, place ^= 1) {
            copies_arrived<0>();
            __syncwarp();
            load_linear_stage(shared.stages[warp][place ^ 1], p, o0 + stride, b0, tile);
            const LinearStage& now = shared.stages[warp][place];
            // dbias does not depend on the inputs, so only the blocks of the first tile of inputs compute it.
            if (tile == 0) { // a lane adds up dout of 8 images for one output, then 4 lanes add up their sums
                const float4* const d = (const float4*)&now.dout[bias_output][bias_row * 8];
                const float4 u = d[0];
                const float4 v = d[1];
                const float eight = ((u.x + u.y) + (u.z + u.w)) + ((v.x + v.y) + (v.z + v.w));
                const float sum = lane_sum<8, 16>(eight);
                float* const bias = p.dbias + o0 + bias_output;
                if (bias_row == 0 && o0 + bias_output < p.Cout) *bias = b0 ? *bias + sum : sum;
            }
            // Each turn of this loop is for one output. It adds the output's share to the dx of the 32 images. It also
            // adds the share of these images to the output's row of dweight, and stores this row.
            float* to = p.dweight + (size_t)o0 * p.Cin + i;
            const int outs = inside ? min(LINEAR_OUTS, p.Cout - o0) : 0;
            NO_UNROLL_FOR (int o = 0; o < LINEAR_OUTS; o++, to += p.Cin) {
                const float2 w = *(const float2*)&now.weight[o][lane * 2];
                float2 dw = *(const float2*)&now.before[o][lane * 2];
                // dw += dout^T x,   dx += dout w: four images at a time
                UNROLL_FOR (int b = 0; b < LINEAR_ROWS; b += 4) {
                    const float4 four = *(const float4*)&now.dout[o][b];
                    const float d[4] = {four.x, four.y, four.z, four.w};
                    UNROLL_FOR (int k = 0; k < 4; k++) {
                        dw.x += d[k] * x[b + k].x;
                        dw.y += d[k] * x[b + k].y;
                        dx[b + k].x += d[k] * w.x;
                        dx[b + k].y += d[k] * w.y;
                    }
                }
                if (o < outs) *(float2*)to = dw;
            }
        }
        // The warps' dx of these images are added up through shared memory.
        copies_arrived<0>();
        // After this barrier, all warps have read their stages, and what shared.sums holds of the previous 32 images.
        // So the stages and shared.sums may be overwritten.
        __syncthreads();
        if (!p.parts) continue;
        UNROLL_FOR (int b = 0; b < LINEAR_ROWS; b++) {
            shared.sums[warp][b][lane] = dx[b];
        }
        __syncthreads();
        for (int b = warp; b < rows && inside; b += LINEAR_WARPS) {
            float2 sum = shared.sums[0][b][lane];
            for (int k = 1; k < LINEAR_WARPS; k++) {
                sum.x += shared.sums[k][b][lane].x;
                sum.y += shared.sums[k][b][lane].y;
            }
            float* to = p.parts + ((size_t)split * p.B + b0 + b) * p.Cin + i;
            *(float2*)to = sum;
        }
    }
}

static void linear_forward(float* out, const float* x, const float* weight, const float* bias, int B, int Cin, int Cout,
                           Stream* stream = MAIN_STREAM) {
    // How many outputs a block computes. With more outputs, x is read less often. With fewer outputs, there are more
    // blocks.
    const int outputs = Cout <= 1024 ? 8 : 16;
    const dim3 grid(ceil_div(Cout, outputs), ceil_div(B, LINEAR_ROWS));
    auto kernel = outputs == 8 ? linear_forward_kernel<8> : linear_forward_kernel<16>;
    launch_on(stream, 1, kernel, grid, 256, 0, out, x, weight, bias, B, Cin, Cout);
}

// Returns the number of splits. There should be about two blocks for each multiprocessor, but not so many blocks that
// some warps have no outputs.
static int linear_splits(int Cin, int Cout) {
    const int two_blocks_an_sm = 2 * gpu.sms / ceil_div(Cin, 64);
    const int all_warps_busy = ceil_div(Cout, LINEAR_WARPS * LINEAR_OUTS);
    return std::max(1, std::min(two_blocks_an_sm, all_warps_busy));
}
static size_t linear_backward_workspace(int B, int Cin, int Cout) { // bytes of the parts of dx
    return (size_t)linear_splits(Cin, Cout) * B * Cin * sizeof(float);
}

static void linear_backward(GradOf<float> dx, float* dweight, float* dbias, const float* dout, const float* x,
                            const float* weight, int B, int Cin, int Cout) {
    const int tiles = ceil_div(Cin, 64);
    const int splits = linear_splits(Cin, Cout);
    const size_t n = (size_t)B * Cin;
    float* const parts = dx.dx ? (float*)device.workspace : nullptr;
    const LinearBackward call{dweight, dbias, parts, dout, x, weight, B, Cin, Cout, tiles, splits};
    launch(linear_backward_kernel, tiles * splits, LINEAR_WARPS * 32, sizeof(LinearShared), call);
    if (!dx.dx) return;
    // dx = the sum of the parts, in the order of the splits, + the addends
    each(n, [=] __device__(size_t i) {
        float sum = 0;
        _Pragma("unroll 12") for (int k = 0; k < splits; k++) sum += parts[k * n + i];
        dx.dx[i] = with_addends(dx, i, sum);
    });
}

// struct Silu (elements.h) holds the formulas of the function (f) and of its derivative (df). The argument of df is
// Z_FACTOR<T> times x. Here this is x itself, because Z_FACTOR<float> is 1. Each thread computes one element.
static void silu_forward(float* out, const float* x, size_t n, Stream* stream = MAIN_STREAM) {
    each_on(stream, n, [=] __device__(size_t i) { out[i] = Silu<float>::f(x[i]); });
}
static void silu_backward(GradOf<float> dx, const float* dout, const float* x, size_t n) {
    each(n, [=] __device__(size_t i) {
        const float d = dout[i] * Silu<float>::df(x[i]);
        dx.dx[i] = with_addends(dx, i, d);
    });
}

// out (B, dim) = [cos(t f_k), sin(t f_k)], where f_k = max_period^(-k / half) for k < half = dim / 2. Each thread
// computes the cosine and the sine for one k. f_k is rounded to fp32, as in PyTorch. The angle t f_k is a double,
// because a large angle in fp32 would have a large rounding error.
static void timestep_embedding_forward(float* out, const float* t, int B, int dim, int max_period,
                                       Stream* stream = MAIN_STREAM) {
    const int half = dim / 2;
    const double log_period = std::log((double)max_period);
    each_on(stream, (size_t)B * half, [=] __device__(size_t i) {
        const int b = (int)i / half;
        const int k = (int)i % half;
        const float f_k = (float)exp(-log_period * k / half);
        double sine, cosine;
        sincos((double)t[b] * f_k, &sine, &cosine);
        out[(size_t)b * dim + k] = (float)cosine;
        out[(size_t)b * dim + half + k] = (float)sine;
    });
}

// out (B, C) = x + one row of table (rows, C) for each sample: the row with the number labels[sample]
static void label_embedding_forward(float* out, const float* x, const float* table, const int* labels, int B, int C,
                                    Stream* stream = MAIN_STREAM) {
    each_on(stream, (size_t)B * C, [=] __device__(size_t i) {
        const int label = labels[i / C];
        out[i] = x[i] + table[(size_t)label * C + i % C];
    });
}
// dx = dout + the addends. dtable (rows, C): row r is the sum of dout over the samples whose label is r. A thread
// computes one element of dx, and the element of dtable in the same place. For the element of dtable, the thread looks
// through the labels of all samples. So there are no atomics, and the order of the sum is fixed.
static void label_embedding_backward(GradOf<float> dx, float* dtable, const float* dout, const int* labels, int B,
                                     int rows, int C) {
    const size_t n = (size_t)std::max(B, rows) * C;
    each(n, [=] __device__(size_t i) {
        const int row = (int)(i / C);
        const int c = (int)(i % C);
        if (row < B) dx.dx[i] = with_addends(dx, i, dout[i]);
        if (row >= rows) return;
        float sum = 0;
        for (int b = 0; b < B; b++)
            if (labels[b] == row) sum += dout[(size_t)b * C + c];
        dtable[i] = sum;
    });
}

// out (B, C) = x + values (B, K) weight (C, K)^T. The network is conditioned on K numbers for each image (--cond_dim).
// `values` holds these numbers. Each thread computes one element of out. Its loop over K is short, because K is usually
// small.
static void values_embedding_forward(float* out, const float* x, const float* weight, const float* values, int B, int K,
                                     int C, Stream* stream = MAIN_STREAM) {
    each_on(stream, (size_t)B * C, [=] __device__(size_t i) {
        const float* const row = values + i / C * K;
        const float* const of_channel = weight + i % C * K;
        float sum = 0;
        for (int k = 0; k < K; k++) sum += row[k] * of_channel[k];
        out[i] = x[i] + sum;
    });
}
// Thread i computes element i of dx and element i of dweight. For dweight the thread sums over the samples, in their
// order.
static void values_embedding_backward(GradOf<float> dx, float* dweight, const float* dout, const float* values, int B,
                                      int K, int C) {
    each((size_t)std::max(B, K) * C, [=] __device__(size_t i) {
        if (i < (size_t)B * C) dx.dx[i] = with_addends(dx, i, dout[i]);
        if (i >= (size_t)K * C) return;
        const int c = (int)(i / K), k = (int)(i % K); // dweight is (C, K)
        float sum = 0;
        for (int b = 0; b < B; b++) sum += dout[(size_t)b * C + c] * values[(size_t)b * K + k];
        dweight[i] = sum;
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// --- Diffusion: q_sample, losses, a sampler's step; images, noise, the network's input and output are fp32
// Used when: most of these operations run once for each microbatch of a training step, or once in each step of a
//   sampler. draw_levels runs once in each training step.
// How: each(n, f) runs f(i) for every i < n, each in a thread of its own (gpu/shared.h). In q_sample and in a sampler's
//   step, each thread works on four values, because one quartet of Philox gives four random numbers (each_quad). Losses
//   are summed in double, in a fixed order. The formulas are in diffusion/ ("Diffusion") and in dev/reference.h. Only
//   the images and pictures of a data file may be bytes instead of fp32 (image_value).
// Costs: memory traffic. It is small, because images are much smaller than activations.

// draw_levels draws a noise level for each sample. t is what the network is told of the level. The log shows a mean
// loss for each quarter of all noise levels, and `quarters` holds the quarter that the sample's level lies in. With
// --objective ect, draw_teachers draws the noise level of each sample's teacher. Each thread works on one sample.
static void draw_levels(NoiseLevel* levels, float* t, int* quarters, int B, const Objective& o, RandomKey key) {
    each(B, [=] __device__(size_t b) {
        const NoiseLevel l = draw_level(o, random_words(key, 0, (int)b));
        levels[b] = l;
        t[b] = l.t;
        quarters[b] = l.quarter;
    });
}

// For each sample, draw_teachers uses the same random words as draw_levels. So it draws again the sigma that
// draw_levels has drawn for the student. From this sigma it computes the teacher's smaller sigma.
static void draw_teachers(NoiseLevel* teachers, float* t, int B, const Objective& o, RandomKey key) {
    each(B, [=] __device__(size_t b) {
        const NoiseLevel l = draw_teacher(o, random_words(key, 0, (int)b));
        teachers[b] = l;
        t[b] = l.t;
    });
}

// Used with --schedule_sampler loss-second-moment, which draws those t more often whose latest losses were large. Each
// thread works on one t, and looks through the batch for samples with this t. So only one thread writes the row of
// `history` that holds the losses of this t. The thread stores these losses in the order of the batch, each divided by
// its sample's `importance` (remember_losses). rms_losses[t] is then the root mean square of the row's losses, or -1
// while the row has fewer than HISTORY losses.
// Every rank holds the losses of the whole batch, so all ranks compute the same rows.
static void update_rms_losses(double* rms_losses, float* history, const NoiseLevel* levels, const double* loss,
                              const StepState* state, int T, int B) {
    each(T, [=] __device__(size_t t) {
        float* const of_t = history + t * (HISTORY + 1);
        const int samples = state->ok ? B : 0; // the losses of a skipped step are not remembered
        rms_losses[t] = remember_losses(of_t, (int)t, levels, loss, samples);
    });
}

// out (B, per_sample) = scale * z or, with add, out += scale * z. z is standard normal.
static void draw_normals(float* out, int B, int per_sample, RandomKey key, float scale = 1, bool add = false) {
    each_quad(B, per_sample, [=] __device__(int b, int e) {
        float z[4];
        normals(z, random_words(key, e / 4, b));
        // At the end of a sample there may be fewer than four elements.
        for (int k = 0; k < 4 && e + k < per_sample; k++) {
            float& v = out[(size_t)b * per_sample + e + k];
            v = scale * z[k] + (add ? v : 0.0f);
        }
    });
}

// x_t = signal x_0 + sigma z,   target = target_x0 x_0 + target_noise z [+ target_teacher teacher]
// `teacher` is null, except with --objective ect in the call for the student: there it is the teacher's answer. The
// summand in brackets exists only then.
// A thread computes four consecutive elements of x_t and target, which are (B, H, W, C). In `images`, which is
// (B, C, H, W), these four elements are not consecutive. bytes: the size of an element of `images` (1: uint8_t, 4:
// float).
static void q_sample_forward(float* x_t, float* target, const NoiseLevel* levels, const float* teacher,
                             const void* images, bool random_flip, RandomKey noise_key, RandomKey flip_key, int B,
                             int C, int H, int W, int bytes) {
    const int n = H * W * C;
    each_quad(B, n, [=] __device__(int b, int e) {
        const bool flip = random_flip && (random_words(flip_key, 0, b).w[0] & 1);
        const NoiseLevel l = levels[b];
        float z[4]; // the noise; later the target
        float x[4];
        normals(z, random_words(noise_key, e / 4, b));
        // Element e is channel c of the pixel in row h and column w.
        int p = e / C;
        int c = e - p * C;
        int h = p / W;
        int w = p - h * W;
        UNROLL_FOR (int k = 0; k < 4; k++) {
            const int column = flip ? W - 1 - w : w;
            const size_t place = (((size_t)b * C + c) * H + h) * W + column;
            float x0 = 0;
            // The last quad of an image may go beyond its end, where nothing may be read.
            if (e + k < n) x0 = image_value(images, bytes, place); // turns a byte v into v / 127.5 - 1
            x[k] = l.signal * x0 + l.sigma * z[k];
            z[k] = l.target_x0 * x0 + l.target_noise * z[k];
            // Moves c, w and h on to the next element.
            if (++c == C) {
                c = 0;
                w++;
            }
            if (w == W) {
                w = 0;
                h++;
            }
        }
        const size_t i = (size_t)b * n + e;
        for (int k = 0; k < 4 && teacher && e + k < n; k++) {
            z[k] += l.target_teacher * teacher[i + k];
        }
        // Both results are stored in pieces of 16 bytes if every image begins at a multiple of 16 bytes.
        if (n % 4 == 0) {
            *(float4*)(target + i) = make_float4(z[0], z[1], z[2], z[3]);
            *(float4*)(x_t + i) = make_float4(x[0], x[1], x[2], x[3]);
        } else
            for (int k = 0; k < 4 && e + k < n; k++) {
                target[i + k] = z[k];
                x_t[i + k] = x[k];
            }
    });
}

// Computes the loss of an image, and its gradient. Let d = out - target, element by element. Then:
//   loss = the mean over all elements of (mse * d^2 + bound * term)
//   dout = factor * (the derivative of loss with respect to out), with one exception: see d_bound
// mse and bound are the weights of the two summands at this noise level. `term` is BoundTerm::value, the element's part
// of the variational bound (only with BOUND; otherwise 0).
// In training, factor is 1 / (the batch size). If Cout > C, the second half of out's channels is the predicted
// variance, which only the bound uses.
// grid (LOSS_PARTS, B): LOSS_PARTS blocks share an image, and each writes its part of the loss.
template <bool BOUND>
static __global__ void __launch_bounds__(1024, BOUND ? 1 : SUM_BLOCKS)
    loss_kernel(double* sums,        // (B, LOSS_PARTS)
                float* dout,         // (B, HW, Cout)
                const float* out,    // (B, HW, Cout)
                const float* target, // (B, HW, C)
                const float* x,      // (B, HW, C): the network's input
                const NoiseLevel* levels, Objective o, float factor, int HW, int C, int Cout) {
    const size_t first = (size_t)blockIdx.y * HW * Cout;     // this image's first element in out and dout
    const size_t first_target = (size_t)blockIdx.y * HW * C; // this image's first element in target and x
    const NoiseLevel l = levels[blockIdx.y];
    const float mse = o.mse * l.weight; // mse and bound: the weights of the two summands at this noise level
    const float bound = o.bound * l.importance;
    const float slope = factor / ((float)HW * C);
    double sum = 0;
    NO_UNROLL_FOR (int i = blockIdx.x * 1024 + threadIdx.x; i < HW * C; i += LOSS_PARTS * 1024) {
        const int p = i / C; // the pixel of element i; c is its channel
        const int c = i - p * C;
        const size_t at_mean = first + (size_t)p * Cout + c; // where `out` holds the network's answer for element i
        const size_t at_variance = at_mean + C;
        const float wanted = target[first_target + i];
        const float d = out[at_mean] - wanted;
        BoundTerm term{};
        if (BOUND) { // the bound's term needs v, the answer for the variance (0 if it is not learned), and the true x0
            const float v = Cout > C ? out[at_variance] : 0.0f;
            // The formula that computes x0 from an answer returns the true x0 if the answer equals the target. So here
            // the formula is given the target in place of the answer.
            const float x0 = l.x0_x * x[first_target + i] + l.x0_out * wanted;
            term = bound_term(l, d, v, x0);
        }
        sum += (double)mse * d * d + (double)bound * term.value;
        // If the loss has an mse term, the bound trains only the variance. So the bound adds nothing to the gradient of
        // the mean.
        const float d_bound = o.mse > 0 ? 0.0f : bound * term.d_mean;
        dout[at_mean] = slope * (2 * mse * d + d_bound);
        if (Cout > C) dout[at_variance] = slope * bound * term.d_variance;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.y * LOSS_PARTS + blockIdx.x] = sum;
}
// The workspace holds LOSS_PARTS sums for each image. For the tuning loss it also holds one slope for each image.
static size_t loss_workspace(int B) { return (size_t)B * (LOSS_PARTS + 1) * sizeof(double); }

static void loss_forward_backward(double* loss, float* dout, const float* out, const float* target, const float* x,
                                  const NoiseLevel* levels, const Objective& o, float factor, int B, int HW, int C,
                                  int Cout) {
    double* sums = (double*)device.workspace;
    auto kernel = o.bound > 0 ? loss_kernel<true> : loss_kernel<false>;
    const dim3 grid(LOSS_PARTS, B);
    launch_behind(kernel, grid, 1024, 0, sums, dout, out, target, x, levels, o, factor, HW, C, Cout);
    // A second launch adds up each image's LOSS_PARTS sums, in their order.
    each(B, [=] __device__(size_t b) {
        double sum = 0;
        for (int k = 0; k < LOSS_PARTS; k++) sum += sums[b * LOSS_PARTS + k];
        loss[b] = sum / ((double)HW * C);
    });
}

// The loss of consistency tuning is a function of an image's squared distance |x0_out (out - target)|^2. (x0_out is a
// member of the image's NoiseLevel: if the network's answer grows by 1, the x0 that follows from it grows by x0_out.)
// So the gradient of the loss is slope * (out - target). The slope is one number for each image, and depends on the
// squared distance of the whole image (tuning_loss). So there are three launches. This kernel computes the squared
// distances, the second launch computes the losses and the slopes, and the third launch computes the gradients.
// grid (LOSS_PARTS, B). sums (B, LOSS_PARTS): each block's part of an image's squared distance
static __global__ void __launch_bounds__(1024, SUM_BLOCKS)
    tuning_distance_kernel(double* sums, const float* out, const float* target, const NoiseLevel* levels, int n) {
    const size_t first = (size_t)blockIdx.y * n;
    const float x0_out = levels[blockIdx.y].x0_out;
    double sum = 0;
    for (int i = blockIdx.x * 1024 + threadIdx.x; i < n; i += LOSS_PARTS * 1024) {
        // d is the difference between the x0 that the student predicts and the x0 that the teacher predicts.
        const float d = x0_out * (out[first + i] - target[first + i]);
        sum += (double)d * d;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.y * LOSS_PARTS + blockIdx.x] = sum;
}

static void tuning_loss_forward_backward(double* loss, float* dout, const float* out, const float* target,
                                         const NoiseLevel* levels, float c, float factor, int B, int n) {
    double* const sums = (double*)device.workspace;
    double* const slopes = sums + (size_t)B * LOSS_PARTS;
    launch_behind(tuning_distance_kernel, dim3(LOSS_PARTS, B), 1024, 0, sums, out, target, levels, n);
    each(B, [=] __device__(size_t b) {
        double distance = 0;
        for (int k = 0; k < LOSS_PARTS; k++) distance += sums[b * LOSS_PARTS + k];
        const TuningLoss l = tuning_loss(levels[b], distance, c);
        loss[b] = l.value;
        slopes[b] = factor * l.slope;
    });
    each((size_t)B * n, [=] __device__(size_t i) {
        const float slope = (float)slopes[i / n];
        dout[i] = slope * (out[i] - target[i]);
    });
}

// =====================================================================================================================
// Group norm

// ---------------------------------------------------------------------------------------------------------------------
// --- groupnorm_forward, groupnorm_sums and groupnorm_backward: any size, any GPU
// Group norm (Wu & He 2018) over [x1 | x2], for each image and each group of Cg channels:
//
//   mean = E[x]      rstd = 1 / sqrt(E[x^2] - mean^2 + eps)         E: over the group's channels and all pixels
//   xhat = (x - mean) rstd
//   z    = (xhat weight + bias) (1 + film scale) + film shift
//   out  = dropout(nonlinearity(z))
//
// ("Film" is the scale and shift that are computed from the embedding, with --use_scale_shift_norm.) The forward kernel
// needs no pass over x for mean and rstd: the kernel that wrote x also summed x and x^2 for each channel, and wrote
// these sums to an array (struct Stats). The forward kernel reads the sums there.
// To compute z, one multiplication and one addition are left for each element: z = x scale + shift. These two
// coefficients follow from mean, rstd, weight, bias and film. They are the same for all pixels of a channel of an
// image, so they are computed before the loop over the pixels.
//
// Backward. dz is the gradient of z: dout, multiplied by dropout's factors and by the nonlinearity's derivative.
//
//   dxhat = w dz                     w = weight (1 + film scale)
//   dx    = rstd (dxhat - E[dxhat] - xhat E[dxhat xhat])
//         = scale dz - (x_factor x + offset)                        scale = rstd w, as in the forward pass
//   x_factor = rstd^2 E[dxhat xhat]    offset = rstd E[dxhat] - x_factor mean
//
// So each group has two more coefficients, x_factor and offset. They are computed from each channel's sums of dz and of
// dz x (group_terms). The gradients of the parameters are computed from the same sums (put_gradients).
//
// Used when: forward always; backward where groupnorm_backward_whole (below) does not fit or is slower.
// How: A block works on a chunk of one image's pixels, and there on a slab of 64 (or 32) channels. A thread works on
//   VEC neighbouring channels (16 bytes) of one pixel after another. It loads PIXELS pixels in advance, by cp.async,
//   into its own part of shared memory, so that these loads need no registers. The first loads begin before the
//   coefficients are computed. The backward pass is two kernels. The first kernel computes the sums of dz and dz x over
//   each chunk, and the second kernel computes dx. Each block of the second kernel adds up the chunks' sums for the
//   groups of its slab. For each slab of an image, one block also computes the image's part of the parameters'
//   gradients.
// Costs: Memory traffic. Forward: x is read and out is written. Backward: x and dout are read twice, addends are read
//   once, and dx is written. norm_grid limits the number of chunks so that all blocks can run at the same time. Then no
//   block has to wait until another one has ended. (In a very large batch there are too many blocks even if each image
//   is only one chunk. So some of them wait.)
constexpr int MAX_GROUPS = 64;

// What a thread works on: channels c ... c + VEC - 1 of image b, at the pixels `first`, `first + rows`, ... below
// `end`. The threads of a block work on `rows` pixels of the slab at a time. Neighbouring threads work on neighbouring
// pieces. For 64 bf16 channels:
//
//                       channels 0 - 7    8 - 15   ...   56 - 63
//   pixel 0            [ thread 0         1        ...   7  ]
//   pixel 1            [ thread 8         9        ...   15 ]        ...   up to pixel rows - 1 = 31
//
// x and dx lie in two tensors of C1 and C2 channels. out and dout lie in one tensor of C channels.
template <class T, int PIXELS> struct NormColumn {
    const NormArgs& a;
    int b;
    int slab0 = blockIdx.y * a.slab; // the slab's first channel
    // The block works on `rows` pixels at a time. The slab's elements in these pixels are numbered 0, 1, 2, ..., pixel
    // after pixel. `place` is the number of this thread's first element.
    int place = threadIdx.x * VEC<T>;
    int c = slab0 + (place & (a.slab - 1));                   // this thread's first channel
    int rows = NORM_THREADS * VEC<T> >> a.log_slab;           // how many pixels the block works on at a time
    int first = blockIdx.x * a.chunk + (place >> a.log_slab); // this thread's first pixel
    int end = min(a.s.HW, ((int)blockIdx.x + 1) * a.chunk);
    bool in_x1 = c < a.s.C1;                              // false: the channels belong to x2
    int pitch = in_x1 ? a.s.C1 : a.s.C2;                  // how many elements a pixel of x1 (or x2) has
    int stride = rows * pitch;                            // from a thread's pixel to its next pixel, in x and dx
    int stride_out = rows * a.C;                          // the same distance in out and dout
    size_t pixel = (size_t)b * a.s.HW + first;            // this thread's first pixel, counted over all images
    size_t at = pixel * pitch + (in_x1 ? c : c - a.s.C1); // index of the thread's first element in x and dx
    size_t at_out = pixel * a.C + c;                      // index of the same element in out and dout
    const T* x = (const T*)(in_x1 ? a.x1 : a.x2) + at;

    // begin and walk use a ring of PIXELS slots. A slot holds what has been loaded of one pixel.
    // begin calls fetch(slot, inside) for this thread's first PIXELS pixels. `inside` says whether the pixel lies in
    // the block's chunk, so that it has to be loaded.
    // walk calls work(slot, p, more) for each pixel p, as soon as its loads have arrived. `more` says whether work has
    // to load a later pixel into this slot. For each pixel, fetch or work must close exactly one group of copies
    // (copies_committed), even if nothing is loaded. walk relies on this: before it calls work, it waits until all
    // groups except the latest PIXELS - 1 have arrived.
    template <class F> INLINE void begin(F fetch) const {
        UNROLL_FOR (int i = 0; i < PIXELS; i++) {
            fetch(i, first + i * rows < end);
        }
    }
    template <class F> INLINE void walk(F work) const {
        for (int p = first; p < end;)
            UNROLL_FOR (int slot = 0; slot < PIXELS; slot++, p += rows) {
                if (p >= end) break;
                copies_arrived<PIXELS - 1>();
                work(slot, p, p + PIXELS * rows < end);
            }
    }
};

// Eight lanes together add up a table whose rows have n entries. (In groupnorm_forward_kernel, the table holds a
// group's statistics: a row for each part of Stats, and in each row an entry for each of n channels.) Lane i reads
// entries i, i + 8, i + 16, ..., counted row by row. This struct holds where the lane's first entry is (row, column),
// and how far the lane goes from an entry to its next one: `rows` rows down and `columns` columns to the right. (If
// this leads to column n or beyond, the lane goes n columns back and one more row down.) The divisions take time. So
// groupnorm_forward_kernel makes the struct for x1's channels before it calls await_previous_kernel. There the
// divisions overlap the previous kernel, and a norm of 8x8 pixels takes 2.33 us. With the divisions after the call it
// took 2.48 us (docs/LEARNT.md).
struct LaneShare {
    int n;
    int row = threadIdx.x % 8 / n;
    int column = threadIdx.x % 8 % n;
    int rows = 8 / n;
    int columns = 8 % n;
};

// The argument `out` of groupnorm_forward_kernel says where the kernel writes its output. It is a T* (the output is
// written in type T) or an Fp8Copy (the output is written in FP8). place_of and store_out serve both types.
// Returns where element i is written.
template <class T> INLINE T* place_of(T* out, size_t i) { return out + i; }
INLINE uint8_t* place_of(const Fp8Copy& out, size_t i) { return out.bytes + i; }
// Stores the VEC<T> elements of a piece, rounded to T or to FP8. For FP8, they are first multiplied by `factor`.
template <class T> INLINE void store_out(T* to, const float (&v)[VEC<T>], float) { store_whole(to, pack<T>(v)); }
INLINE void store_out(uint8_t* to, const float (&v)[8], float factor) { store_whole(to, scaled_to_fp8(v, factor)); }

// grid (chunks of pixels, slabs of channels, images). Each thread works on the channels and pixels of its NormColumn.
// OUT: T* or Fp8Copy.
// Shared memory: each thread's next PIXELS pieces of x; mean and rstd of the slab's groups.
//   1. Every thread starts the loads of its first pixels.
//   2. For each group of the slab, eight threads add up the sums of the group's channels, over all parts of Stats. Mean
//      and rstd follow from these sums.
//   3. Each thread computes scale and shift of its channels.
//   4. Each thread walks down its pixels: out = dropout(nonlinearity(x scale + shift)).
template <class T, bool DROPOUT, class OUT>
static __global__ void __launch_bounds__(NORM_THREADS, norm_forward_blocks(DROPOUT))
    groupnorm_forward_kernel(OUT out,            // (B, HW, C)
                             float* mean,        // (B, groups); the backward pass needs mean and rstd
                             float* rstd,        // (B, groups)
                             const Stats stats1, // the sums of x1's channels
                             const Stats stats2, // the sums of x2's channels
                             NormArgs a) {
    constexpr int V = VEC<T>;
    constexpr int PIXELS = 4;
    __shared__ uint4 loads[PIXELS][NORM_THREADS];
    __shared__ float group_mean[MAX_GROUPS], group_rstd[MAX_GROUPS];
    // Images are processed in reverse order: the last images of x were written last, so they may still be in the L2
    // cache.
    const NormColumn<T, PIXELS> t{a, (int)(gridDim.z - 1 - blockIdx.z)};
    const T* x = t.x;
    auto fetch = [&](int slot, bool inside) {
        if (inside) copy_async_16(&loads[slot][threadIdx.x], x);
        x += t.stride;
        copies_committed();
    };
    const NormParameters<V> parameters(a, t.b, t.c);
    float factor = 1; // an FP8 output is multiplied by this before it is rounded
    if constexpr (!std::is_same_v<OUT, T*>) factor = *out.factor;
    const uint32_t step = DROPOUT ? (uint32_t)*a.dropout.step : 0;
    const int g = a.group_of(t.slab0) + threadIdx.x / 8; // the group whose sums this thread and its neighbours add up
    const int c0 = g * a.Cg;                             // the group's first channel
    const int of_x1 = min(a.Cg, a.s.C1 - c0);            // how many of the group's channels belong to x1; < 1: none
    const LaneShare share{max(of_x1, 1)};
    await_previous_kernel();
    t.begin(fetch);

    if (g <= a.group_of(t.slab0 + a.slab - 1)) {
        double sum = 0;    // the sum of x
        double square = 0; // the sum of x^2
        // Adds this lane's share of the group's statistics in one tensor (x1 or x2) to `sum` and `square`. The table
        // that eight lanes share (LaneShare) has a row for each part of Stats. A row has an entry for each of the
        // group's channels in this tensor, of which `from` is the first.
        auto add = [&](const Stats& stats, int C, int from, const LaneShare& of) {
            const double2* const sums = (const double2*)stats.sums + (size_t)t.b * stats.parts * C + from;
            for (int part = of.row, c = of.column; part < stats.parts;) {
                const double2 q = sums[part * C + c];
                sum += q.x;
                square += q.y;
                part += of.rows;
                c += of.columns;
                if (c < of.n) continue;
                c -= of.n;
                part++;
            }
        };
        if (of_x1 > 0) add(stats1, a.s.C1, c0, share);
        if (of_x1 < a.Cg) add(stats2, a.s.C2, max(c0 - a.s.C1, 0), LaneShare{min(a.Cg, a.Cg - of_x1)});
        sum = group_sum(sum);
        square = group_sum(square);
        if (threadIdx.x % 8 == 0) {
            const double m = sum * a.weight_of_one;
            const double variance = fmax(square * a.weight_of_one - m * m, 0.0);
            const float group_r = 1 / sqrtf((float)(variance + a.s.eps));
            group_mean[g] = (float)m;
            group_rstd[g] = group_r;
            // mean and rstd are kept for the backward pass. Several blocks have computed them, but only one block
            // writes them: a block of the first chunk of pixels. If the group lies in several slabs, this is the block
            // of the slab in which the group begins.
            if (blockIdx.x == 0 && c0 >= t.slab0) {
                mean[t.b * a.s.groups + g] = (float)m;
                rstd[t.b * a.s.groups + g] = group_r;
            }
        }
    }
    __syncthreads();

    // Computes scale and shift of the thread's V channels. These channels may belong to several groups, each of which
    // has its own mean and rstd.
    float scale[V], shift[V];
    int group = a.group_of(t.c);         // the group that channel i belongs to
    int next = (group + 1) * a.Cg - t.c; // the i where the next group begins
    UNROLL_FOR (int i = 0; i < V; i++) {
        if (i == next) {
            group++;
            next += a.Cg;
        }
        const float2 q = parameters.coefficients(i, group_mean[group], group_rstd[group]);
        scale[i] = q.x;
        shift[i] = q.y;
    }
    auto to = place_of(out, t.at_out);
    t.walk([&](int slot, int p, bool more) {
        float v[V];
        unpack<T>(v, loads[slot][threadIdx.x]);
        fetch(slot, more);
        UNROLL_FOR (int i = 0; i < V; i++) {
            v[i] = v[i] * scale[i] + shift[i];
        }
        with_nonlinearity<T>(a.s.nonlinearity, [&](auto nonlinearity) {
            UNROLL_FOR (int i = 0; i < V; i++) {
                v[i] = nonlinearity.f(v[i]);
            }
        });
        if (DROPOUT) apply_dropout(v, a, step, t.b, (size_t)p * a.C + t.c);
        store_out(to, v, factor);
        to += t.stride_out;
    });
}

// Backward, first pass: computes, for each channel, the sums of dz and of dz x over a block's chunk of pixels.
// grid (chunks of pixels, slabs of channels, images). Each thread works on the channels and pixels of its NormColumn.
// Shared memory: each thread's next PIXELS pieces of x and dout; scale and shift of the slab's channels.
//   1. Every thread starts the loads of its first pixels. Thread i computes the coefficients of the slab's i-th
//      channel.
//   2. Each thread walks down its pixels, and adds up dz and dz x in fp32.
//   3. The threads' sums are added up in double.
template <class T, bool DROPOUT>
static __global__ void __launch_bounds__(NORM_THREADS, norm_backward_blocks(DROPOUT))
    groupnorm_sums_kernel(float2* partial, // (B, chunks, C)
                          const T* dout,   // (B, HW, C)
                          NormArgs a) {
    constexpr int V = VEC<T>;
    constexpr int PIXELS = 4;
    __shared__ uint4 loads[PIXELS][2][NORM_THREADS]; // pieces of x and of dout; at the end, each thread's sums
    __shared__ __align__(16) float2 coefficients[NORM_SLAB];
    const NormColumn<T, PIXELS> t{a, (int)blockIdx.z};
    const T* next_x = t.x;
    const T* next_d = dout + t.at_out;
    auto fetch_x = [&](int slot, bool inside) {
        if (inside) copy_async_16(&loads[slot][0][threadIdx.x], next_x);
        next_x += t.stride;
    };
    auto fetch_d = [&](int slot, bool inside) {
        if (inside) copy_async_16(&loads[slot][1][threadIdx.x], next_d);
        next_d += t.stride_out;
        copies_committed();
    };
    // The previous kernel has written neither x nor anything that `channel` loads. These are parameters, and results of
    // the forward pass or, with --use_checkpoint, of layers that were computed again. So they can be read before
    // await_previous_kernel (see launch_on).
    const NormChannel channel(a, t.b, t.slab0 + min(threadIdx.x, a.slab - 1));
    t.begin(fetch_x);
    const uint32_t step = DROPOUT ? (uint32_t)*a.dropout.step : 0;
    await_previous_kernel();
    t.begin(fetch_d);
    if ((int)threadIdx.x < a.slab) coefficients[threadIdx.x] = channel.coefficients(Z_FACTOR<T>);
    __syncthreads();
    float scale[V], shift[V];
    float sum[V] = {};     // of each of the thread's channels, the sum of dz
    float product[V] = {}; // of each of the thread's channels, the sum of dz x
    load_pairs(scale, shift, coefficients + (t.c - t.slab0));
    t.walk([&](int slot, int p, bool more) {
        float x[V], dz[V];
        unpack<T>(x, loads[slot][0][threadIdx.x]);
        unpack<T>(dz, loads[slot][1][threadIdx.x]);
        fetch_x(slot, more);
        fetch_d(slot, more);
        norm_dz<T, DROPOUT>(dz, x, scale, shift, a, step, t.b, (size_t)p * a.C + t.c);
        UNROLL_FOR (int i = 0; i < V; i++) {
            sum[i] += dz[i];
            product[i] += dz[i] * x[i];
        }
    });
    copies_arrived<0>();
    __syncthreads();
    float* const to = (float*)(partial + (size_t)(t.b * gridDim.x + blockIdx.x) * a.C + t.slab0);
    fold_columns<NORM_THREADS>((float*)loads, a.slab / V, sum, product,
                               [&](int k, int column, double total) { to[column * 2 * V + k] = (float)total; });
}

// Backward, second pass: dx = scale dz - (x_factor x + offset) [+ addends, if ADD]. GRAD is GradOf<T>, or, if dx1 or
// dx2 is also written in FP8, Fp8GradOf<T>.
// grid (chunks of pixels, slabs of channels, images). Each thread works on the channels and pixels of its NormColumn.
// `chunks` is the number of chunks in the first pass; this pass may divide the pixels into another number of chunks.
// Shared memory: each thread's next PIXELS pieces of x, dout and, if ADD, the first addend (add1); the coefficients of
// the slab's channels (scale, shift) and of their groups (x_factor, offset).
//   1. Every thread starts the loads of its first pixels.
//   2. For each group of the slab, eight threads add up the chunks' sums. x_factor and offset follow from these sums.
//   3. The blocks of the first chunk also compute this image's part of the parameters' gradients.
//   4. Each thread walks down its pixels. For each pixel it computes dz again, and then dx.
template <class T, bool DROPOUT, bool ADD, class GRAD>
static __global__ void __launch_bounds__(NORM_THREADS, norm_backward_blocks(DROPOUT || ADD))
    groupnorm_backward_kernel(GRAD dx1, GRAD dx2,
                              const float2* partial, // (B, chunks, C): the first pass's sums
                              int chunks,            // into how many chunks the first pass divides an image
                              const T* dout,         // (B, HW, C)
                              NormArgs a) {
    constexpr int V = VEC<T>;
    constexpr int PIXELS = 3;
    constexpr int SOURCES = ADD ? 3 : 2;
    __shared__ uint4 loads[PIXELS][SOURCES][NORM_THREADS];
    __shared__ __align__(16) float2 coefficients[NORM_SLAB], terms[NORM_SLAB];
    // Images are processed in reverse order: the first pass has read x and dout of the last images last, so they may
    // still be in the L2 cache.
    NormColumn<T, PIXELS> t{a, (int)(gridDim.z - 1 - blockIdx.z)};
    const GRAD to = t.in_x1 ? dx1 : dx2;
    if (!to.dx) t.end = 0; // no pixels: nothing needs the gradient of this tensor
    const uint64_t policy = last_read();
    const T* next_x = t.x;
    const T* next_d = dout + t.at_out;
    // add1 may be the same array as dx. This works, because each thread loads a piece of add1 before it writes the
    // piece of dx at the same place.
    const T* next_add = ADD && to.add1 ? to.add1 + t.at : nullptr;
    auto fetch = [&](int slot, bool inside) {
        if (inside) {
            copy_async_16(&loads[slot][0][threadIdx.x], next_x, policy);
            copy_async_16(&loads[slot][1][threadIdx.x], next_d, policy);
            if (ADD && to.add1) copy_async_16(&loads[slot][SOURCES - 1][threadIdx.x], next_add);
        }
        next_x += t.stride;
        next_d += t.stride_out;
        next_add += t.stride;
        copies_committed();
    };
    const NormChannel channel(a, t.b, t.slab0 + min(threadIdx.x, a.slab - 1));
    t.begin(fetch);
    const uint32_t step = DROPOUT ? (uint32_t)*a.dropout.step : 0;
    // The previous kernel, the first pass, writes only `partial`. So the loads above did not have to wait for it.
    await_previous_kernel();
    if ((int)threadIdx.x < a.slab) coefficients[threadIdx.x] = channel.coefficients(Z_FACTOR<T>);

    partial += (size_t)t.b * chunks * a.C;
    const int first_group = a.group_of(t.slab0);
    const int last_group = a.group_of(t.slab0 + a.slab - 1);
    for (int g = first_group + threadIdx.x / 8; g <= last_group; g += NORM_THREADS / 8) {
        double sum = 0;     // the sum of dxhat
        double product = 0; // the sum of dxhat x
        UNROLL_4_FOR (int i = threadIdx.x % 8; i < a.Cg * chunks; i += 8) {
            const int chunk = a.group_of(i); // i / Cg: i counts Cg channels of chunk 0, then Cg of chunk 1, ...
            const int c = g * a.Cg + i - chunk * a.Cg;
            const float2 q = partial[(size_t)chunk * a.C + c];
            const double w = NormChannel(a, t.b, c).dxhat_factor();
            sum += w * q.x;
            product += w * q.y;
        }
        const int group = t.b * a.s.groups + g;
        const float2 term = group_terms(sum, product, a.mean[group], a.rstd[group], a);
        // Writes the group's x_factor and offset for each of its channels in the slab.
        const int begin = max(g * a.Cg - t.slab0, 0);
        const int end = min((g + 1) * a.Cg - t.slab0, a.slab);
        for (int c = begin + threadIdx.x % 8; c < end; c += 8) {
            terms[c] = term;
        }
    }
    if (blockIdx.x == 0 && (int)threadIdx.x < a.slab) {
        const double2 sum = sum_pairs<8>(partial + channel.c, chunks, a.C);
        channel.put_gradients(a, sum);
    }
    __syncthreads();

    float scale[V], shift[V], x_factor[V], offset[V];
    load_pairs(scale, shift, coefficients + (t.c - t.slab0));
    load_pairs(x_factor, offset, terms + (t.c - t.slab0));
    float factor = 0; // dx is multiplied by this before it is rounded to FP8
    if constexpr (std::is_same_v<GRAD, Fp8GradOf<T>>) factor = to.fp8.bytes ? *to.fp8.factor : 0;
    size_t at = t.at;
    t.walk([&](int slot, int p, bool more) {
        float x[V], dz[V];
        unpack<T>(x, loads[slot][0][threadIdx.x]);
        unpack<T>(dz, loads[slot][1][threadIdx.x]);
        const uint4 add1 = ADD && to.add1 ? loads[slot][SOURCES - 1][threadIdx.x] : make_uint4(0, 0, 0, 0);
        fetch(slot, more);
        norm_dz<T, DROPOUT>(dz, x, scale, shift, a, step, t.b, (size_t)p * a.C + t.c);
        UNROLL_FOR (int i = 0; i < V; i++) {
            const float dx_scale = scale[i] * (1 / Z_FACTOR<T>); // scale without Z_FACTOR, which only norm_dz needs
            dz[i] = dx_scale * dz[i] - x_factor[i] * x[i] - offset[i];
        }
        if (ADD) add_piece<T>(dz, add1);
        store_gradient(GradOf<T>{to.dx, nullptr, ADD ? to.add2 : nullptr}, at, dz);
        if constexpr (std::is_same_v<GRAD, Fp8GradOf<T>>) store_gradient_fp8<T>(to, at, dz, factor);
        at += t.stride;
    });
}

// the norms whose gradients finish_gradients has to sum up
static struct NormSumsList { NormSums norms[MAX_NORM_SUMS]; } norm_sums_list;

// grid (channels of the widest norm / 32, norms). A block has 32 x 8 threads. It works on 32 channels of one norm, and
// its 8 rows of threads share the images among them.
static __global__ void __launch_bounds__(256) norm_sums_kernel(NormSumsList list) {
    __shared__ double2 parts[8][32];
    const NormSums n = list.norms[blockIdx.y];
    const int x = threadIdx.x; // the channel, counted within the block
    const int y = threadIdx.y; // this thread adds up images y, y + 8, ...
    const int c = blockIdx.x * 32 + x;
    if ((int)blockIdx.x * 32 >= n.C) return;
    await_previous_kernel();
    const int images = ceil_div(n.B - y, 8);
    double2 total = sum_pairs<4>(n.sums + y * n.C + c, images, 8 * n.C);
    parts[y][x] = total;
    __syncthreads();
    if (y) return;
    for (int i = 1; i < 8; i++) {
        total.x += parts[i][x].x;
        total.y += parts[i][x].y;
    }
    n.dbias[c] = (float)total.x;
    n.dweight[c] = (float)total.y;
}

static void finish_gradients() {
    int C = 0;
    for (int i = 0; i < norm_sums_count; i++) {
        C = std::max(C, norm_sums_list.norms[i].C);
    }
    if (C) launch(norm_sums_kernel, dim3(C / 32, norm_sums_count), dim3(32, 8), 0, norm_sums_list);
    norm_sums_count = 0;
    norm_sums_used = 0;
}
static size_t norm_sums_bytes(const NormShape& s) { return (size_t)s.B * (s.C1 + s.C2) * sizeof(float2); }

// Returns how many bytes the chunks' sums need at most, for any batch of up to s.B images. A block writes a pair of
// sums (of dz and of dz x) for each of its channels, at most NORM_SLAB pairs. norm_grid divides an image into
// several chunks only if all blocks fit on the GPU at the same time. Then all blocks together write at most on_chip
// pairs. Otherwise an image is one chunk, and there are of_batch pairs: one for each image and channel.
static size_t groupnorm_backward_workspace(const NormShape& s) {
    const int on_chip = norm_backward_blocks(false) * gpu.sms * NORM_SLAB;
    const int of_batch = s.B * (s.C1 + s.C2);
    return std::max(on_chip, of_batch) * sizeof(float2);
}

static void groupnorm_forward(act* out, float* mean, float* rstd, const act* x1, Stats stats1, const act* x2,
                              Stats stats2, const float* weight, const float* bias, const float* scale_shift,
                              int ss_stride, Dropout dropout, NormShape s, Fp8Copy fp8) {
    const bool drop = dropout.p > 0;
    NormArgs a{x1, x2, weight, bias, scale_shift, ss_stride, dropout, s};
    const dim3 grid = norm_grid(a, norm_forward_blocks(drop), s.HW);
    auto run = [&](auto kernel, auto to) { launch(kernel, grid, NORM_THREADS, 0, to, mean, rstd, stats1, stats2, a); };
    if (fp8.bytes) {
        if (!act_has_wgmma()) die("internal error: FP8 is for Hopper");
        if (drop) return run(groupnorm_forward_kernel<bf16, true, Fp8Copy>, fp8);
        return run(groupnorm_forward_kernel<bf16, false, Fp8Copy>, fp8);
    }
    with_act([&]<class T>(T) {
        run(drop ? groupnorm_forward_kernel<T, true, T*> : groupnorm_forward_kernel<T, false, T*>, (T*)out);
    });
}

// =====================================================================================================================
// Attention
// Attention over T = H * W pixels. It reads the buffer qkv (B, T, 3C) as the convolution wrote it. qkv holds q, k and
// v, each of which has C = heads * d channels. The formulas are for one image and one head. In them, q, k, v, out
// and their gradients are matrices (T, d), and S, P, dP and dS are matrices (T, T). D has one number for each row of S.
// The products dout * out and P (dP - D) are computed element by element:
//
//   forward    S = q k^T / sqrt(d)      P = softmax(S), by rows      out = P v
//   backward   D = rowsum(dout * out)   dP = dout v^T                dS = P (dP - D)
//              dv = P^T dout            dq = dS k / sqrt(d)          dk = dS^T q / sqrt(d)
//
// The forward pass stores two numbers for each row of S (SoftmaxRow), from which the backward pass computes P again.
// S and P are never written to the GPU's memory (FlashAttention, Dao et al. 2022). A block owns some rows of one head,
// such as some of the queries: it computes the results of these rows. It reads the rows that its own rows are combined
// with, such as all keys and values, tile by tile. We say that these rows "stream past" the block's own rows. Hopper's
// kernels compute bf16 heads of 32 and 64 channels, if T is suitable ("Used when", at attention_forward_wgmma). Two
// portable versions compute all other heads. In the backward pass of the portable versions, half of the blocks own
// queries (and write dq). The other half own keys (and write dk and dv). So every sum is computed by one block, in one
// order. Both halves run the same code, with own rows A1, A2 and streamed rows B1, B2:
//
//   own     A1   A2     B1   B2        S = A1 B1^T        dP = A2 B2^T
//   queries q    dout   k    v         dq = dS B1
//   keys    k    v      q    dout      dk = dS B1         dv = P B2        (S, P, dP, dS are transposed here)
//
// The hardware computes powers of 2, so e^x is computed as 2^(x log2(e)). In the kernels, scores are q k^T without the
// division by sqrt(d). In the exponent the scores are multiplied by log2(e) / sqrt(d). dq and dk are multiplied by
// 1 / sqrt(d) at the end, when they are stored.

// Copies the rows row0 ... row0 + ROWS - 1 of one head to shared memory (ROWS, PITCH). It writes zeros for elements
// beyond T rows or d columns. Each thread copies a piece (16 bytes) of every ROWS_AT_ONCE-th row, by cp.async if
// possible.
template <class Tile, int ROWS, class T>
INLINE void load_rows(T* to, const HeadRows<const T>& from, int row0, const AttentionCall& a) {
    constexpr int PIECES = Tile::DIM / VEC<T>; // how many pieces a row has
    constexpr int ROWS_AT_ONCE = Tile::THREADS / PIECES;
    const int r = threadIdx.x / PIECES;          // this thread's first row
    const int c = threadIdx.x % PIECES * VEC<T>; // this thread's first column
    const T* piece = from.p + (size_t)(row0 + r) * from.pitch + c;
    to += r * Tile::PITCH + c; // where this thread's first piece is written
    if (a.d % VEC<T> == 0) {
        const int rows_left = c < a.d ? a.T - row0 - r : 0;
        UNROLL_FOR (int i = 0; i < ROWS; i += ROWS_AT_ONCE) {
            copy_async_16(to + i * Tile::PITCH, piece, i < rows_left);
            piece += ROWS_AT_ONCE * from.pitch;
        }
    } else { // Heads of such a d do not begin at multiples of 16 bytes, so elements are copied one by one.
        NO_UNROLL_FOR (int i = 0; i < ROWS; i += ROWS_AT_ONCE) {
            NO_UNROLL_FOR (int k = 0; k < VEC<T>; k++) {
                const bool inside = row0 + r + i < a.T && c + k < a.d;
                to[i * Tile::PITCH + k] = inside ? piece[k] : (T)0.0f;
            }
            piece += ROWS_AT_ONCE * from.pitch;
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// --- attention_forward and attention_backward: heads of up to 256 channels, in fp32 128, any GPU
// Used when: d <= 256 (in fp32 d <= 128), and Hopper's kernels, attention_forward_wgmma and attention_backward_wgmma,
//   can't be used: in fp32, on other GPUs, or if they do not support d or T. (Backward: also if the GPU can't run the
//   cluster of blocks that Hopper's kernel needs.)
// How: Each warp of a block owns 16 MT rows (queries; backward: queries or keys), so a block owns M = 16 MT x warps. MT
//   is 1 or 2. The rows that they are combined with stream past through two stages of shared memory, N at a time: while
//   one stage is multiplied, the other is loaded. SUB (at most 32) of a stage's N rows are multiplied at a time.
//
//     S (M, SUB)  =  own rows (M, d) x streamed rows (SUB, d)^T       in registers: 16 MT rows of S for each warp
//     out (M, d) +=  P (M, SUB) x streamed rows (SUB, d)              P: the registers of S (see load_score_fragments)
//
//   In mma.sync, two neighbouring tiles of a result lie in the registers just as a fragment of a first operand does. So
//   P, which replaces S in its registers, need not go through shared memory before it is multiplied. In the forward
//   pass, the softmax is computed while keys and values stream past. For each own query, the warp keeps the highest
//   score so far and the sum of the exponentials. When a higher score comes, the earlier sums are multiplied by a
//   factor below 1. (The backward pass computes P from the SoftmaxRows that the forward pass has stored.) In shared
//   memory rows are padded by 16 bytes, so that the eight rows that ldmatrix reads at once lie in different banks.
// Costs: For each head, the forward pass has 2 products of T x T x d, and the backward pass has 7. Five of these 7 are
//   necessary. The other two are S and dP again: both the blocks that own queries and the blocks that own keys compute
//   them. (If d > 128, the backward pass has 11 products: the columns of the gradients are divided into two chunks, and
//   S and dP are computed for each chunk.)

// Returns N, the number of streamed rows in a stage. The longer the rows are, the fewer fit into shared memory.
// row_bytes: the bytes of a row in shared memory, without padding
constexpr int attention_streamed_rows(int row_bytes, int MT) {
    if (row_bytes > 256) return 16;
    if (row_bytes > 128) return 32;
    if (row_bytes > 64 || MT == 1) return 64;
    return 128;
}
// These two functions return how many blocks of the forward and of the backward kernel a multiprocessor has room for.
// This depends on the registers that a thread needs for the 16 MT rows of its warp, each of which has row_bytes bytes.
constexpr int attention_forward_blocks(int row_bytes, int MT) {
    if (row_bytes > 128) return 1;
    if (row_bytes * MT <= 64) return 6;
    return MT == 1 ? 4 : 3;
}
constexpr int attention_backward_blocks(int row_bytes, int MT) {
    if (row_bytes > 128) return 1;
    if (row_bytes * MT <= 64) return 4;
    return row_bytes * MT <= 128 ? 3 : 2;
}

// The sizes of what a block of the portable kernels works on.
template <class T_, int DIM_, int MT_, bool KEEP_> struct AttentionTile {
    typedef T_ T;
    static constexpr int DIM = DIM_; // columns of a row in shared memory: at least d; those beyond d hold zeros
    static constexpr int ROW_BYTES = DIM * sizeof(T);
    static constexpr int V = VEC<T>;
    static constexpr int PARTS = ::PARTS<T>; // bf16: 1; fp32: 2, since each float is multiplied as two fp16 numbers
    // true: the fragments of own rows stay in registers; false: they are read again for each product
    static constexpr bool KEEP = KEEP_;
    // Own rows. A warp owns 16 MT of them, and a block owns M of them. With MT = 2, the warp multiplies each streamed
    // row that it has read by two tiles of 16 own rows. So a warp reads shared memory half as often for each product.
    static constexpr int MT = MT_;
    static constexpr int WARP_ROWS = 16 * MT;
    static constexpr int WARPS = ROW_BYTES > 256 ? 2 : 4;
    static constexpr int THREADS = 32 * WARPS;
    static constexpr int M = WARPS * WARP_ROWS;
    // Streamed rows are loaded N at a time. They are multiplied SUB at a time. This gives SUB columns of S: NT tiles of
    // 8 columns.
    static constexpr int N = attention_streamed_rows(ROW_BYTES, MT);
    static constexpr int SUB = std::min(N, 32);
    static constexpr int NT = SUB / 8;
    // Sizes of what lies in shared memory. PITCH, OWN and STREAMED are in elements.
    // Forward: the own rows, and two stages of k and v.
    // Backward: the own rows of two operands, and two stages of B1 and B2. If queries stream, a stage also holds their
    // SoftmaxRow and D.
    static constexpr int PITCH = DIM + V; // elements from one row to the next
    static constexpr int OWN = M * PITCH;
    static constexpr int STREAMED = N * PITCH;
    static constexpr int FORWARD_BYTES = (OWN + 4 * STREAMED) * sizeof(T);
    static constexpr int QUERY_VALUES = 3 * N; // floats of a stage: top, log_sum and D of each query
    static constexpr int QUERY_BYTES = 2 * QUERY_VALUES * sizeof(float);
    static constexpr int BACKWARD_BYTES = (2 * OWN + 4 * STREAMED) * sizeof(T) + QUERY_BYTES;
    static constexpr int FORWARD_BLOCKS = attention_forward_blocks(ROW_BYTES, MT);
    static constexpr int BACKWARD_BLOCKS = attention_backward_blocks(ROW_BYTES, MT);
};

// What a block's shared memory and a warp's registers hold in the forward kernel. Here MT = 1, and there are four
// warps:
//
//     own rows (M, PITCH)        stage 0         stage 1              registers of warp 1
//   [ q of warp 0: 16 rows ]   [ k: N rows ]   [ k: N rows ]        q      16 x d     OwnRows (KEEP)
//   [ q of warp 1          ]   [ v: N rows ]   [ v: N rows ]        S, P   16 x SUB   Scores
//   [ q of warp 2          ]    multiplied      being loaded        out    16 x d     RowSums
//   [ q of warp 3          ]                                        top, sum of 16 rows

// A warp's own rows of one operand, as A fragments: kept[k][m] holds columns 16 k ... 16 k + 15 of the rows 16 m ... 16
// m + 15. Without KEEP there is only one slot, kept[0]. Then each product reads the rows again, 16 columns at a time.
template <class Tile> struct OwnRows {
    static constexpr int SLOTS = Tile::KEEP ? Tile::DIM / 16 : 1;
    const typename Tile::T* rows; // the address that this lane gives to ldmatrix to read the first columns
    uint32_t kept[SLOTS][Tile::MT][4 * Tile::PARTS];
    // take_apart_fragments scales the floats of a slot before it splits them. To undo this, the products of the slot
    // are multiplied by scale[slot]. (For bf16, nothing is scaled, and scale[slot] is 1.)
    float scale[SLOTS];

    // own: the block's rows in shared memory
    __device__ void load(const typename Tile::T* own) {
        const int lane = threadIdx.x % 32;
        const int row = warp_row<Tile>() + lane % 16;
        rows = own + row * Tile::PITCH + lane / 16 * Tile::V;
        if constexpr (Tile::KEEP) {
            UNROLL_FOR (int k = 0; k < SLOTS; k++) read(k);
        }
    }
    // Reads the columns 16 k ... 16 k + 15 into their slot.
    __device__ void read(int k) {
        const int slot = Tile::KEEP ? k : 0;
        UNROLL_FOR (int m = 0; m < Tile::MT; m++)
            UNROLL_FOR (int h = 0; h < Tile::PARTS; h++) { // one ldmatrix reads 32 bytes of each of 16 rows
                uint32_t* const a = kept[slot][m] + 4 * h;
                const auto* from = rows + 16 * m * Tile::PITCH + 16 * k + 8 * h;
                ldmatrix(a, a + 2, shared_address(from));
                // A float's fragment is read in two halves. After the swap, the registers of each pair belong to the
                // same row, as take_apart_fragments expects.
                if (Tile::PARTS == 2) std::swap(a[1], a[2]);
            }
        scale[slot] = take_apart_fragments<typename Tile::T>(kept[slot]);
    }
};

// A warp's results, in mma.sync's layout: tiles of 16 rows x 8 columns. With g = lane / 4 and q = lane % 4, a thread
// holds four numbers of tile [m][n]: columns 2q and 2q + 1 of row g ([0], [1]) and of row g + 8 ([2], [3]).
// Scores: S, P, dP or dS of the warp's own rows and SUB streamed rows.
// RowSums: a result such as out or dq, for the warp's own rows: 8 CT of the result's d columns.
template <class Tile> using Scores = float[Tile::MT][Tile::NT][4];
template <class Tile, int CT> using RowSums = float[Tile::MT][CT][4];

// scores += own rows x (streamed rows n0 ... n0 + SUB - 1)^T, as in S = q k^T
template <class Tile, class T>
INLINE void multiply_transposed(Scores<Tile>& scores, OwnRows<Tile>& own, const T* streamed, int n0) {
    const int lane = threadIdx.x % 32;
    const int row = n0 + lane / 16 * 8 + lane % 8; // the row whose address this lane gives to ldmatrix
    streamed += row * Tile::PITCH + lane / 8 % 2 * Tile::V;
    UNROLL_FOR (int k = 0; k < Tile::DIM / 16; k++) {
        const int slot = Tile::KEEP ? k : 0;
        if (!Tile::KEEP) own.read(k);
        uint32_t b[Tile::NT][2 * Tile::PARTS];
        // Each ldmatrix loads four matrices of 8 rows x 16 bytes: two neighbouring matrices from 8 rows, and two from
        // the next 8 rows.
        UNROLL_FOR (int n = 0; n < Tile::NT; n += 2)
            UNROLL_FOR (int h = 0; h < Tile::PARTS; h++) {
                const T* from = streamed + 8 * n * Tile::PITCH + 16 * k + 8 * h;
                ldmatrix(b[n] + 2 * h, b[n + 1] + 2 * h, shared_address(from));
            }
        const float scale = own.scale[slot] * take_apart_fragments<T>(b); // for bf16 it is 1
        multiply<T, Tile::MT, Tile::NT>(scores[0], Tile::NT, 1, own.kept[slot], b, scale);
    }
}

// Sets a to the columns 16 k ... 16 k + 15 of p, as fragments of a product's first operand. Each lane already holds the
// numbers of its fragments, so lanes exchange nothing. For bf16 the numbers are rounded. Floats stay as they are, in
// the order that take_apart_fragments expects.
template <class Tile, int REGISTERS>
INLINE void load_score_fragments(uint32_t (&a)[Tile::MT][REGISTERS], const Scores<Tile>& p, int k) {
    UNROLL_FOR (int m = 0; m < Tile::MT; m++)
        UNROLL_FOR (int i = 0; i < 4; i++) { // i = 0, 1: rows g, g + 8 of the first 8 columns; i = 2, 3: of the next 8
            const float* const two = p[m][2 * k + i / 2] + i % 2 * 2;
            if constexpr (Tile::PARTS == 1) {
                a[m][i] = pack_pair<typename Tile::T>(two[0], two[1]);
            } else {
                a[m][2 * i] = __float_as_uint(two[0]);
                a[m][2 * i + 1] = __float_as_uint(two[1]);
            }
        }
}

// sums += p * (columns c0 ... c0 + 8 CT - 1 of the streamed rows n0 ... n0 + SUB - 1), as in out += P v. For bf16, p is
// rounded before it is multiplied (load_score_fragments).
template <class Tile, int CT, class T>
INLINE void multiply_add(RowSums<Tile, CT>& sums, const Scores<Tile>& p, const T* streamed, int n0, int c0) {
    constexpr int PARTS = Tile::PARTS;
    constexpr int AT_ONCE = 4; // this many tiles of 8 columns are multiplied at a time
    const int lane = threadIdx.x % 32;
    const T* lane_rows; // floats: the first element that this lane loads; bf16: the address that it gives to ldmatrix
    if (PARTS == 1) lane_rows = streamed + (n0 + lane % 16) * Tile::PITCH + c0 + lane / 16 * 8;
    else lane_rows = streamed + (n0 + lane % 4 * 2) * Tile::PITCH + c0 + lane / 4;
    const uint32_t lane_address = shared_address(lane_rows);
    UNROLL_FOR (int k = 0; k < Tile::NT / 2; k++) {
        uint32_t a[Tile::MT][4 * PARTS];
        load_score_fragments<Tile>(a, p, k);
        const float a_scale = take_apart_fragments<T>(a);
        UNROLL_FOR (int n = 0; n < CT; n += AT_ONCE) {
            // Loads the streamed rows n0 + 16 k ... n0 + 16 k + 15 as B fragments. For bf16 one ldmatrix loads two
            // fragments.
            uint32_t b[AT_ONCE][2 * PARTS];
            UNROLL_FOR (int i = 0; i < AT_ONCE; i++) {
                const int offset = 16 * k * Tile::PITCH + 8 * (n + i);
                const uint32_t from = lane_address + offset * sizeof(T);
                if constexpr (PARTS == 1) {
                    if (i % 2 == 0) ldmatrix_trans(b[i], b[i + 1], from);
                } else {
                    UNROLL_FOR (int r = 0; r < 4; r++) { // rows 2q, 2q + 1, 2q + 8, 2q + 9 (q = lane % 4)
                        const int row = r / 2 * 8 + r % 2;
                        const float v = load_float(from + row * Tile::PITCH * 4);
                        b[i][r] = __float_as_uint(v);
                    }
                }
            }
            const float scale = a_scale * take_apart_fragments<T>(b);
            multiply<T, Tile::MT, AT_ONCE>(sums[0] + n, CT, 1, a, b, scale);
        }
    }
}

// Writes factor * sums to columns c0 ... c0 + 8 CT - 1 of a warp's rows in global memory. The results are first written
// to shared memory, over the warp's own rows, which no other warp reads. From there they are stored in pieces of 16
// bytes.
template <class Tile, int CT, class T>
INLINE void store_rows(const HeadRows<T>& to, T* own, const RowSums<Tile, CT>& sums, const HeadTile& tile, int c0,
                       float factor = 1) {
    constexpr int V = Tile::V;
    constexpr int PIECES = 8 * CT / V; // how many pieces a row has
    const int lane = threadIdx.x % 32;
    const int first = warp_row<Tile>();
    T* warp_rows = own + first * Tile::PITCH;
    // 1. Each lane rounds its results and writes them to shared memory, in pairs. They replace the old contents of the
    //    warp's own rows.
    __syncwarp();
    UNROLL_FOR (int m = 0; m < Tile::MT; m++)
        UNROLL_FOR (int n = 0; n < CT; n++)
            UNROLL_FOR (int r = 0; r < 2; r++) {
                const int row = 16 * m + 8 * r + lane / 4;
                const int column = 8 * n + lane % 4 * 2;
                const float* const two = sums[m][n] + 2 * r;
                store_two(warp_rows + row * Tile::PITCH + column, factor * two[0], factor * two[1]);
            }
    // 2. Each lane stores whole pieces. If d is not a multiple of V, the lane stores the elements of its pieces one by
    //    one.
    __syncwarp();
    for (int i = lane; i < Tile::WARP_ROWS * PIECES; i += 32) {
        const int r = i / PIECES;
        const int c = i % PIECES * V;
        const int t = tile.row0 + first + r;
        if (t >= tile.a.T || c0 + c >= tile.a.d) continue;
        const T* piece = warp_rows + r * Tile::PITCH + c;
        T* place = to.row(t) + c0 + c;
        if (tile.a.d % V == 0) *(uint4*)place = *(const uint4*)piece;
        else
            for (int k = 0; k < V && c0 + c + k < tile.a.d; k++) {
                place[k] = piece[k];
            }
    }
}

// Only the first `valid` columns of the scores belong to streamed rows that exist (rows below T). Sets the scores of
// all other columns to -infinity, so that P is 0 there.
template <class Tile> INLINE void mask_columns(Scores<Tile>& scores, int valid) {
    if (valid >= Tile::SUB) return;
    UNROLL_FOR (int m = 0; m < Tile::MT; m++)
        UNROLL_FOR (int n = 0; n < Tile::NT; n++)
            UNROLL_FOR (int i = 0; i < 4; i++) {
                const int column = 8 * n + (int)threadIdx.x % 4 * 2 + i % 2;
                if (column >= valid) scores[m][n][i] = -INFINITY;
            }
}

// The softmax over all scores that have been computed so far for a thread's rows (FlashAttention, algorithm 1). top is
// the highest score of a row so far, and sum is the sum of the row's P so far. New scores S change top, sum and out:
//   top' = max(top, max S)    shrink = e^((top - top') / sqrt(d))    P = e^((S - top') / sqrt(d))
//   sum' = shrink sum + rowsum(P)                                    out' = shrink out + P v (by multiply_add)
// scale: log2(e) / sqrt(d). In top and in sum, [m][0] belongs to row g = lane / 4 of tile m, and [m][1] to row g + 8.
template <class Tile> struct RunningSoftmax {
    float top[Tile::MT][2];
    float sum[Tile::MT][2] = {}; // the sum of P over this thread's columns

    INLINE RunningSoftmax() {
        for (auto& rows : top) { // every score will be higher than this
            rows[0] = -INFINITY;
            rows[1] = -INFINITY;
        }
    }
    template <int CT> INLINE void add(Scores<Tile>& p, RowSums<Tile, CT>& out, float scale) {
        constexpr int NT = Tile::NT;
        UNROLL_FOR (int m = 0; m < Tile::MT; m++)
            UNROLL_FOR (int r = 0; r < 2; r++) {
                float lane_top = top[m][r];
                UNROLL_FOR (int n = 0; n < NT; n++) {
                    const float higher = fmaxf(p[m][n][2 * r], p[m][n][2 * r + 1]);
                    lane_top = fmaxf(lane_top, higher);
                }
                const float highest = lane_max<1, 2>(lane_top); // over the four lanes that share the row
                const float shrink = exp2_fast((top[m][r] - highest) * scale);
                top[m][r] = highest;
                sum[m][r] *= shrink;
                UNROLL_FOR (int n = 0; n < CT; n++) {
                    out[m][n][2 * r] *= shrink;
                    out[m][n][2 * r + 1] *= shrink;
                }
                // The difference is computed first, and then multiplied by scale. If the scores themselves were
                // multiplied by scale before the subtraction, the rounding errors of large scores would be larger.
                UNROLL_FOR (int n = 0; n < NT; n++)
                    UNROLL_FOR (int i = 2 * r; i < 2 * r + 2; i++) {
                        p[m][n][i] = exp2_fast((p[m][n][i] - highest) * scale);
                        sum[m][r] += p[m][n][i];
                    }
            }
    }
};

// grid (B * heads * tiles of T): a block works on M queries of one head. Each of its warps works on 16 MT of these
// queries.
// Shared memory: the block's queries; two stages, each with N keys and N values. For each stage:
//   1. Start the copies for the next stage.
//   2. S = q k^T, for SUB keys at a time
//   3. P = e^((S - top) / sqrt(d)), as in RunningSoftmax
//   4. out += P v
// At the end each row of out is divided by the sum of its P.
template <class Tile, class T = typename Tile::T>
static __global__ void __launch_bounds__(Tile::THREADS, Tile::FORWARD_BLOCKS)
    attention_forward_kernel(AttentionCall a) {
    constexpr int N = Tile::N, MT = Tile::MT;
    constexpr int CT = Tile::DIM / 8; // tiles of 8 columns of out
    extern __shared__ __align__(128) uint4 shared_memory[];
    T* own = (T*)shared_memory;
    // Stage i: its keys begin at element 2 * i * STREAMED, and its values at element (2 * i + 1) * STREAMED.
    T* streamed = own + Tile::OWN;
    const HeadTile tile{a, Tile::M};
    const int lane = threadIdx.x % 32;
    const auto k = tile.of_qkv<const T>(a.qkv, K_PART);
    const auto v = tile.of_qkv<const T>(a.qkv, V_PART);
    const float scale = LOG2E * rsqrtf((float)a.d);
    // Starts the copies of N keys and N values into a stage. The first of them is row `first` of the head.
    auto load_stage = [&](int stage, int first) {
        load_rows<Tile, N>(streamed + stage * 2 * Tile::STREAMED, k, first, a);
        load_rows<Tile, N>(streamed + (stage * 2 + 1) * Tile::STREAMED, v, first, a);
    };
    await_previous_kernel();
    load_rows<Tile, Tile::M>(own, tile.of_qkv<const T>(a.qkv, Q_PART), tile.row0, a);
    load_stage(0, 0);
    OwnRows<Tile> q;
    RowSums<Tile, CT> out = {};
    RunningSoftmax<Tile> softmax;
    // first: the first of the N keys that lie in `stage`. The copies into a stage are started one round before the
    // stage is read.
    for (int first = 0, stage = 0; first < a.T; first += N, stage ^= 1) {
        copies_committed();
        copies_arrived<0>();
        __syncthreads(); // all threads' copies have arrived, and no thread reads the other stage any more
        if (first == 0) q.load(own);
        if (first + N < a.T) load_stage(stage ^ 1, first + N);
        const T* keys = streamed + stage * 2 * Tile::STREAMED;
        const T* values = keys + Tile::STREAMED;
        // SUB keys are multiplied at a time, because a thread's registers have no room for the scores of N keys.
        NO_UNROLL_FOR (int sub = 0; sub < N && first + sub < a.T; sub += Tile::SUB) {
            Scores<Tile> p = {}; // S, and then P
            multiply_transposed<Tile>(p, q, keys, sub);
            mask_columns<Tile>(p, a.T - first - sub);
            softmax.add(p, out, scale);
            multiply_add<Tile, CT>(out, p, values, sub, 0);
        }
    }
    // Divides out by sum, and stores the SoftmaxRow of each row for the backward pass. Four lanes share a row: each
    // lane holds some of the row's columns of out, and a part of the row's sum.
    UNROLL_FOR (int m = 0; m < MT; m++)
        UNROLL_FOR (int r = 0; r < 2; r++) {
            const float total = lane_sum<1, 2>(softmax.sum[m][r]);
            const float factor = 1 / total;
            const int t = tile.row0 + warp_row<Tile>() + 16 * m + 8 * r + lane / 4;
            if (lane % 4 == 0 && t < a.T) a.rows[tile.row_index(t)] = SoftmaxRow{softmax.top[m][r], log2f(total)};
            UNROLL_FOR (int n = 0; n < CT; n++) {
                out[m][n][2 * r] *= factor;
                out[m][n][2 * r + 1] *= factor;
            }
        }
    store_rows<Tile, CT>(tile.of_out<T>(a.to), own, out, tile, 0);
}

// If T is at most SHORT_T, each block of attention_backward_kernel computes D of all queries of its head itself, by
// compute_dots, into shared memory. This saves a launch. For a larger T, attention_dots_kernel computes D before these
// blocks run. In compute_dots, rows beyond T get the last row's D.
constexpr int SHORT_T = 64;
template <class T, int THREADS> INLINE void compute_dots(float* D, const HeadTile& tile, const AttentionCall& a) {
    const auto dout = tile.of_out<const T>(a.dout);
    const auto out = tile.of_out<const T>(a.out);
    NO_UNROLL_FOR (int i = threadIdx.x / 4; i < SHORT_T; i += THREADS / 4) { // four threads work on each row
        const int row = min(i, a.T - 1);
        const float dot = row_dot(dout.row(row), out.row(row), a.d);
        if (threadIdx.x % 4 == 0) D[i] = dot;
    }
    __syncthreads();
}

// The numbers from which a query's row of P and dS is computed: its SoftmaxRow and D.
struct Query {
    float top, log_sum, D;
};

// On entry p holds the scores S, and ds holds dP. On return p holds P, and ds holds dS:
//   P = e^((S - top) / sqrt(d)) / sum = 2^((S - top) scale2 - log_sum)      scale2 = log2(e) / sqrt(d)
//   dS = P (dP - D)
// If the block owns queries, each row belongs to a query: own_queries[m][0] is the Query of row g of tile m, and
// own_queries[m][1] is the Query of row g + 8 (g = lane / 4). If the block owns keys (OWNS_KEYS), each column belongs
// to a streamed query. The values of these queries lie in shared memory: rows (SUB, 2) holds their top and log_sum, and
// dots (SUB) holds their D.
template <class Tile, bool OWNS_KEYS>
INLINE void softmax_gradient(Scores<Tile>& p, Scores<Tile>& ds, const Query (&own_queries)[Tile::MT][2],
                             const float* rows, const float* dots, float scale2) {
    UNROLL_FOR (int n = 0; n < Tile::NT; n++) {
        Query columns[2]; // the Query of each of this thread's two columns
        const int c = 8 * n + threadIdx.x % 4 * 2;
        if (OWNS_KEYS) {
            const float4 two = *(const float4*)(rows + 2 * c);
            const float2 dot = *(const float2*)(dots + c);
            columns[0] = {two.x, two.y, dot.x};
            columns[1] = {two.z, two.w, dot.y};
        }
        UNROLL_FOR (int m = 0; m < Tile::MT; m++)
            UNROLL_FOR (int i = 0; i < 4; i++) {
                const Query& query = OWNS_KEYS ? columns[i % 2] : own_queries[m][i / 2];
                const float P = exp2_fast((p[m][n][i] - query.top) * scale2 - query.log_sum);
                p[m][n][i] = P;
                ds[m][n][i] = P * (ds[m][n][i] - query.D);
            }
    }
}

// What a block of the backward pass does. The block owns keys (OWNS_KEYS) or queries. It computes the gradients of its
// own rows in the DC columns that begin with column chunk * DC. (If heads have more than 128 channels, the registers
// have no room for all columns.)
// Shared memory: the block's own rows A1 and A2; two stages, each with N streamed rows B1 and B2. If the streamed rows
// are queries, a stage also holds their SoftmaxRow and, if T > SHORT_T, their D. If T <= SHORT_T, the block computes D
// of all queries itself, into short_D, and does not read the argument D. For each stage:
//   1. Start the copies for the next stage.
//   2. S = A1 B1^T and dP = A2 B2^T, for SUB streamed rows at a time
//   3. Compute P from S, and dS from P and dP.
//   4. Add to the gradients of own rows: sum1 += dS B1 (the gradient of q or k). With OWNS_KEYS also sum2 += P B2 (the
//      gradient of v).
template <class Tile, bool OWNS_KEYS, class T = typename Tile::T>
INLINE void attention_backward_rows(const AttentionCall& a, const float* D, int chunk, float* short_D) {
    constexpr int N = Tile::N, MT = Tile::MT;
    constexpr int DC = std::min(Tile::DIM, 128);
    constexpr int CT = DC / 8; // tiles of 8 columns
    extern __shared__ __align__(128) uint4 shared_memory[];
    T* own1 = (T*)shared_memory;
    T* own2 = own1 + Tile::OWN;
    // Stage i: B1 begins at element 2 * i * STREAMED, and B2 at element (2 * i + 1) * STREAMED.
    T* streamed = own2 + Tile::OWN;
    float* query_values = (float*)(streamed + 4 * Tile::STREAMED); // each stage: SoftmaxRow[N], then D[N]
    const HeadTile tile{a, Tile::M};
    const int lane = threadIdx.x % 32;
    const bool short_rows = a.T <= SHORT_T;
    const BackwardOperands<T> operands(tile, a, OWNS_KEYS);
    const SoftmaxRow* const rows = a.rows + tile.row_index(0);
    D += tile.row_index(0);
    auto load_stage = [&](int stage, int first) {
        load_rows<Tile, N>(streamed + stage * 2 * Tile::STREAMED, operands.B1, first, a);
        load_rows<Tile, N>(streamed + (stage * 2 + 1) * Tile::STREAMED, operands.B2, first, a);
        if (!OWNS_KEYS) return;
        // The streamed rows are queries. Load their top, log_sum and D. Rows beyond T get the values of the last row:
        // these are finite, so P and dS of rows beyond T, whose scores are -infinity (mask_columns), become 0.
        float* values = query_values + stage * Tile::QUERY_VALUES;
        for (int i = threadIdx.x; i < N; i += Tile::THREADS) {
            const int t = min(first + i, a.T - 1);
            copy_async<8>(values + 2 * i, rows + t);
            if (!short_rows) copy_async<4>(values + 2 * N + i, D + t);
        }
    };
    await_previous_kernel();
    load_rows<Tile, Tile::M>(own1, operands.A1, tile.row0, a);
    load_rows<Tile, Tile::M>(own2, operands.A2, tile.row0, a);
    load_stage(0, 0);
    if (short_rows) compute_dots<T, Tile::THREADS>(short_D, tile, a);
    // If the block owns queries: [m] holds the Query of rows lane / 4 and lane / 4 + 8 of the warp's m-th 16 rows.
    Query own_queries[MT][2];
    UNROLL_FOR (int m = 0; m < MT; m++)
        UNROLL_FOR (int r = 0; r < 2 && !OWNS_KEYS; r++) {
            const int row = tile.row0 + (warp_row<Tile>() + 16 * m + 8 * r + lane / 4);
            const int t = min(row, a.T - 1);
            own_queries[m][r] = {rows[t].top, rows[t].log_sum, short_rows ? short_D[t] : D[t]};
        }

    const float scale = rsqrtf((float)a.d);
    const float scale2 = scale * LOG2E; // the factor of scores in the exponent of 2
    OwnRows<Tile> a1, a2;
    RowSums<Tile, CT> sum1 = {};                // dq or dk, before the division by sqrt(d)
    float sum2[OWNS_KEYS ? MT : 1][CT][4] = {}; // dv; not used if the block owns queries
    for (int first = 0, stage = 0; first < a.T; first += N, stage ^= 1) {
        copies_committed();
        copies_arrived<0>();
        __syncthreads(); // all threads' copies have arrived, and no thread reads the other stage any more
        if (first == 0) {
            a1.load(own1);
            a2.load(own2);
        }
        if (first + N < a.T) load_stage(stage ^ 1, first + N);
        // b1, b2: this stage's rows. If these are queries, stage_rows holds their SoftmaxRows, and dots holds their D.
        const T* b1 = streamed + stage * 2 * Tile::STREAMED;
        const T* b2 = b1 + Tile::STREAMED;
        const float* stage_rows = query_values + stage * Tile::QUERY_VALUES;
        const float* dots = short_rows ? short_D + first : stage_rows + 2 * N;
        NO_UNROLL_FOR (int sub = 0; sub < N && first + sub < a.T; sub += Tile::SUB) {
            Scores<Tile> p = {};  // S, and then P
            Scores<Tile> ds = {}; // dP, and then dS
            multiply_transposed<Tile>(p, a1, b1, sub);
            mask_columns<Tile>(p, a.T - first - sub);
            multiply_transposed<Tile>(ds, a2, b2, sub);
            softmax_gradient<Tile, OWNS_KEYS>(p, ds, own_queries, stage_rows + 2 * sub, dots + sub, scale2);
            if constexpr (OWNS_KEYS) multiply_add<Tile, CT>(sum2, p, b2, sub, chunk * DC);
            multiply_add<Tile, CT>(sum1, ds, b1, sub, chunk * DC);
        }
    }
    // dq or dk is multiplied by 1 / sqrt(d) only here, at the end. dv has no such factor.
    const auto d_own = tile.of_qkv<T>(a.to, OWNS_KEYS ? K_PART : Q_PART);
    store_rows<Tile, CT>(d_own, own1, sum1, tile, chunk * DC, scale);
    if constexpr (OWNS_KEYS) store_rows<Tile, CT>(tile.of_qkv<T>(a.to, V_PART), own2, sum2, tile, chunk * DC);
}

// grid (B * heads * tiles of T, 1, 2 * chunks): a chunk is up to 128 of the d columns. Blocks that own keys have more
// work than blocks that own queries. So, for each chunk, the blocks that own keys are started first. The blocks that
// start last then have less work, and the GPU waits a shorter time for them at the end.
template <class Tile>
static __global__ void __launch_bounds__(Tile::THREADS, Tile::BACKWARD_BLOCKS)
    attention_backward_kernel(AttentionCall a, const float* D) {
    __shared__ float short_D[SHORT_T];
    const bool owns_keys = blockIdx.z % 2 == 0;
    const int chunk = blockIdx.z / 2;
    if (owns_keys) attention_backward_rows<Tile, true>(a, D, chunk, short_D);
    else attention_backward_rows<Tile, false>(a, D, chunk, short_D);
}

// Launches the backward pass if a.dout is not null, and otherwise the forward pass, for heads of up to DIM channels. A
// warp owns 32 rows (MT = 2) if a row has at most 128 bytes and a head has enough rows. Otherwise it owns 16 rows.
template <class T, int DIM, int MT = DIM * sizeof(T) <= 128 ? 2 : 1>
static void launch_attention(const AttentionCall& a) {
    // Small images have few tokens, and so few rows. With MT = 2 there would be too few blocks to fill the GPU, so MT
    // is 1 there.
    const int few_rows = a.dout ? 64 : 256;
    if (MT == 2 && a.T <= few_rows) {
        launch_attention<T, DIM, 1>(a);
        return;
    }
    constexpr int ROW_BYTES = DIM * sizeof(T);
    // AttentionTile's last argument is KEEP: true if own rows are so short that their fragments stay in registers
    using Forward = AttentionTile<T, DIM, MT, (ROW_BYTES <= 128)>;
    using Backward = AttentionTile<T, DIM, MT, (ROW_BYTES * MT <= 128)>;
    const int tiles = a.all_heads * ceil_div(a.T, Forward::M);
    if (!a.dout) return launch(attention_forward_kernel<Forward>, tiles, Forward::THREADS, Forward::FORWARD_BYTES, a);
    const dim3 grid(tiles, 1, 2 * ceil_div(a.d, 128));
    const float* D = a.T > SHORT_T ? launch_attention_dots<T>(a) : nullptr;
    launch(attention_backward_kernel<Backward>, grid, Backward::THREADS, Backward::BACKWARD_BYTES, a, D);
}

// =====================================================================================================================
// Convolution
// 1x1 and 3x3 convolutions, computed as products of matrices (implicit GEMM):
//
//   out[pixel, co] = sum over taps and input channels ci of   weight[co, tap, ci] * x[source(pixel, tap), ci]
//
// source(pixel, tap) is the input pixel that output pixel `pixel` reads under this tap. As matrices:
//
//   weights (Cout, taps x Cin)   times   patches (taps x Cin, pixels)   =   out (Cout, pixels)
//
// Column p of the patches holds the inputs that the filter reads for output pixel p. The patches do not exist in global
// memory (except those that conv_few_rows writes). A block copies the pixels that it needs to shared memory, with zeros
// for the padding. The tensor cores' operands are read from there.
//
// Words of this section (tile, stage, ring, fragment and swizzle are explained at the head of this file):
//   tap     a position (kh, kw) of the filter, which has 1 or 9 positions; a tap's number is kh * kernel + kw, where
//           `kernel` (1 or 3) is the filter's width
//   halo    the pixels of a tile and a border of one pixel around them: all that the nine taps read (see the drawing at
//           conv_halo)
//   slice   a part of the input channels (16 to 64 channels; in FP8 128). A stage of shared memory holds some pixels,
//           and of each pixel one slice. Hopper's kernels divide the output channels into slices, too, of 64 channels.
//   chunk   8 neighbouring channels of one pixel, or the weights of 8 neighbouring channels. In the kernels with
//           mma.sync, a thread copies one chunk at a time. (In Hopper's kernels TMA copies whole boxes.)
//   k       the index over which a product sums: for weight gradients it counts pixels, in all other kernels input
//           channels. An instruction of the tensor cores sums over 16 values of k (in FP8 over 32).
//
// The kernels are listed here. Section 22 chooses between them: conv_product (in FP8 conv_product_fp8), and for weight
// gradients conv_weight_batch. A table above conv_product shows the whole road from a layer to an instruction of the
// tensor cores.
//   mma.sync (sm_80 and later)   conv_halo, conv_gather; for weight gradients conv_weight_halo, conv_weight_gather.
//                                Elements are bf16 or floats. A float is split into two fp16 numbers. Then a product
//                                of two floats takes three products of fp16 numbers (take_apart_places).
//   wgmma and TMA (Hopper)       conv_tiles, conv_small; for weight gradients conv_weight_tma and, in FP8,
//                                conv_weight_fp8. Elements are bf16 or, in a 3x3 convolution, FP8. The stride is 1, and
//                                the input is not upsampled.
//   conv_few_rows,               serve the network's first layer, and the gradients of its last layer: the images and
//   conv_few_gradient            the network's output have few channels. conv_few_rows writes each pixel's patch to
//                                global memory. So the product becomes a 1x1 convolution, and one of the kernels above
//                                can compute it. conv_few_gradient turns the weight gradient of the 1x1 convolution
//                                into that of the layer.
//
// conv_halo, conv_gather, conv_tiles and conv_small also compute an input's gradient, if their template parameter
// BACKWARD is true. This gradient is a convolution, too. Its input is dout, Cout and Cin change places, and the taps
// have the reverse order. The weights need not be copied to another layout: ldmatrix.trans or wgmma transposes them on
// their way to the tensor cores. (FP8 does not use BACKWARD. It has a second, transposed copy of the weights, see
// conv_backward_input_fp8.)
//
// All kernels for outputs and for input gradients end in a similar way. Addends and, in the forward pass, bias and
// embedding are added to the fp32 sums of a tile. (In FP8 the sums are first multiplied by ConvCall::factors.) Then the
// result is rounded, once, unless it is stored in fp32. On its way to global memory, a tile goes through shared memory,
// where its values are put into the order pixels x channels. The statistics for the next group norm (forward pass only)
// are sums of the rounded values, because the norm will read the rounded values.

// ---------------------------------------------------------------------------------------------------------------------
// --- conv_halo: 3x3, stride 1, any GPU
// Used when: Hopper's kernels, conv_tiles and conv_small, do not support the type (fp32), the shape, the GPU, or how
//   results are to be stored (see conv_product). conv_halo can also read its input through a nearest-neighbour
//   upsampling.
// How: A block computes 16 x 16 pixels of one image, or 8 x 8 pixels of each of two images, for CHANNELS channels. It
//   goes through the input channels slice by slice. Per slice it copies the tile's pixels with a border of one pixel
//   (the halo) to shared memory, once for all nine taps.
//
//     the part of the halo that a warp reads for its 8 x 8 pixels
//       column 0 1 2 ...    9
//     row 0    . . . . . . . . . .    .  pixels around them, of another warp or tile, or zeros outside the image
//     row 1    . x x x x x x x x .    x  the warp's own pixels
//      ...     . x x x x x x x x .
//     row 8    . x x x x x x x x .    tap (kh, kw) reads rows kh .. kh + 7 and columns kw .. kw + 7
//     row 9    . . . . . . . . . .
//
//     shared memory: two halos (a pixel is a row of SLICE channels), a ring of weights, the halo_source of each pixel
//     +-----------+---------------+------------------+------------------+------------------+---------+
//     | halo of   | halo of       | weights of the   | weights of the   | weights of the   | sources |
//     | slice s   | slice s + 1   | taps with kw = 0 | taps with kw = 1 | taps with kw = 2 |         |
//     +-----------+---------------+------------------+------------------+------------------+---------+
//
//   A slice takes three steps, one for each kw. At the same time cp.async copies what later steps need:
//
//     step of slice s    kw = 0                   kw = 1                   kw = 2
//     multiplies         kh = 0, 1, 2             kh = 0, 1, 2             kh = 0, 1, 2
//     copies             weights kw = 2 of s      weights kw = 0 of s + 1  weights kw = 1 of s + 1
//                        half of halo s + 1       the rest of halo s + 1
//
//   A warp computes 8 x 8 pixels x WARP_CHANNELS channels. Its products are weights (A) x pixels (B). One fragment B
//   holds 16 input channels of 8 neighbouring pixels of an image row. In a step the warp loads the 10 rows of the halo
//   that its pixels need under this kw. It uses most of these rows for all three taps of the step. (If pixels were A,
//   one fragment would hold two image rows. Each kh would need other pairs of rows, so fragments could not be reused.)
//   In the code, the instructions that copy stand between the products and have no branches. So the tensor cores do not
//   wait for them.
//   A pixel's row in shared memory is swizzled with a key that depends only on the pixel's COLUMN in the halo. So any 8
//   neighbouring pixels of an image row can be read without bank conflicts, whatever kw is. And the distance in bytes
//   from a pixel's chunk to the same chunk of the pixel below is always the same. So the code computes one address for
//   each kw, and adds constants to it for the other rows.
//   From the top down: conv_halo launches conv_halo_kernel. The kernel's main loop calls multiply_step for each step.
//   multiply_step calls multiply_tap for each tap and each group of 16 output channels. multiply_tap has eight
//   mma_bf16, one for each image row. (With floats it has 24 mma_fp16, three for each image row.)
// Costs: a tile of 16 x 16 pixels reads (18 / 16)^2 times as many pixels as it has, once for all nine taps.
//   Every tile reads all weights of its output channels again.

// A K group is a set of warps that sum over the same input channels (ProductTile). If IMAGES is 1, it is 2 x 2 warps,
// each with 8 x 8 pixels of the tile. If IMAGES is 2, a K group has one warp for each of two images. Every warp
// computes all CHANNELS. PER_SM: the compiler gives a thread no more registers than allow PER_SM blocks on a
// multiprocessor. (On some GPUs shared memory has room for fewer blocks.)
template <class T_, int IMAGES_, int CHANNELS_, int K_GROUPS_, int PER_SM_>
struct HaloTile : ProductTile<IMAGES_, IMAGES_ == 1 ? 4 : 2, CHANNELS_, CHANNELS_, K_GROUPS_> {
    typedef ProductTile<IMAGES_, IMAGES_ == 1 ? 4 : 2, CHANNELS_, CHANNELS_, K_GROUPS_> Base;
    typedef T_ T;
    static constexpr int IMAGES = IMAGES_;
    static constexpr int CHANNELS = CHANNELS_;
    static constexpr int PER_SM = PER_SM_;
    static constexpr int WARPS_DOWN = IMAGES == 1 ? 2 : 1; // warps of an image, one below the other
    static constexpr int WARPS_ACROSS = WARPS_DOWN;
    static constexpr int TILE_H = WARPS_DOWN * 8; // how many rows of pixels a tile has
    static constexpr int TILE_W = WARPS_ACROSS * 8;
    // A slice is 64 bytes of a pixel. It has more bytes if a K group would otherwise have fewer than 16 channels.
    static constexpr int PIXEL_BYTES = std::max(64, 16 * (int)sizeof(T) * K_GROUPS_);
    static constexpr int SLICE = PIXEL_BYTES / sizeof(T);
    static constexpr int K16 = SLICE / 16 / K_GROUPS_; // a K group has 16 * K16 input channels of a slice
    // The halo's sizes, in pixels.
    static constexpr int H = TILE_H + 2;
    static constexpr int W = TILE_W + 2;
    static constexpr int PIXELS = IMAGES * H * W;
    // Shared memory: the sizes of its parts, and where they begin (_AT), in bytes.
    static constexpr int HALO_BYTES = PIXELS * PIXEL_BYTES;
    static constexpr int WEIGHT_BYTES = 3 * CHANNELS * PIXEL_BYTES; // bytes of the weights of the three taps of one kw
    static constexpr int WEIGHTS_AT = 2 * HALO_BYTES;
    static constexpr int SOURCES_AT = WEIGHTS_AT + 3 * WEIGHT_BYTES;
    // `sources` has 4 bytes for each pixel. + 64: for the last values of i, HaloCopies::copy reads `sources` beyond
    // PIXELS, but then it copies nothing.
    static constexpr int MAIN_BYTES = SOURCES_AT + (PIXELS + 64) * 4;
    // At the end the results are written to the same memory. If it is too small for all results, there are two rounds.
    static constexpr int ROUNDS = Base::STAGED_BYTES > MAIN_BYTES ? 2 : 1;
    static constexpr int SHARED_BYTES = std::max(MAIN_BYTES, Base::STAGED_BYTES / ROUNDS);
    static_assert(HALO_BYTES % 128 == 0 && WEIGHT_BYTES % 128 == 0, "swizzled rows begin at multiples of 128 bytes");
    static_assert(SHARED_BYTES <= RTX_30.shared_per_block, "the least that a GPU of sm_80 or later has");
    static_assert(IMAGES * Base::STAT_ROWS * CHANNELS * 8 <= SHARED_BYTES,
                  "at the end, the statistics are summed in shared memory");
};

// Returns one number, which holds both the place of a halo's pixel in the input and the swizzle key of the pixel's row
// in shared memory: the pixel's index in the input * 8 + the key, which depends on `column`. The number is negative if
// the pixel lies outside the image, or if there is no image n. h is the pixel's row in the image. `column` is the
// pixel's column in the halo, and w0 is the image column of the halo's column 0.
template <class Tile> INLINE int halo_source(const ConvCall& p, int n, int h, int w0, int column) {
    const int w = w0 + column;
    const int up = p.s.upsample; // 1: the input has half of the output's rows and columns
    const int index = (n * (p.H >> up) + (h >> up)) * (p.W >> up) + (w >> up);
    const bool inside = n < p.B && h >= 0 && h < p.H && w >= 0 && w < p.W;
    return (inside ? index << 3 : (int)0x80000000) | swizzle_key<Tile::PIXEL_BYTES / 16>(column);
}

// The halos in shared memory, and the part of the halos that one thread copies: the same chunk (8 channels) of every
// PIXELS_AT_ONCE-th pixel.
template <class Tile> struct HaloCopies {
    typedef typename Tile::T T;
    static constexpr int CHUNKS = Tile::SLICE / 8;                // chunks of a pixel
    static constexpr int PIXELS_AT_ONCE = Tile::THREADS / CHUNKS; // pixels that all threads together copy at a time
    // How many chunks each thread copies for half a halo.
    static constexpr int HALF_COPIES = ceil_div(Tile::PIXELS / 2, PIXELS_AT_ONCE);
    const ConvCall& p;
    const uint32_t halos; // the address in shared memory where the two halos begin
    int* const sources;   // in shared memory: the halo_source of each pixel
    const int chunk = (int)threadIdx.x % CHUNKS;
    const int first_pixel = (int)threadIdx.x / CHUNKS;

    INLINE HaloCopies(const ConvCall& p, unsigned char* shared)
        : p(p), halos(shared_address(shared)), sources((int*)(shared + Tile::SOURCES_AT)) {}

    // Fills `sources` for the tile that begins at image n0, row h0, column w0. The caller has to call __syncthreads
    // before the first copy.
    INLINE void find_sources(int n0, int h0, int w0) const {
        for (int i = threadIdx.x; i < Tile::PIXELS; i += Tile::THREADS) {
            const int n = n0 + i / Tile::W / Tile::H;
            const int h = h0 + i / Tile::W % Tile::H - 1;
            sources[i] = halo_source<Tile>(p, n, h, w0 - 1, i % Tile::W);
        }
    }
    // Returns the address in shared memory that this thread's i-th chunk of the slice's halo is written to,
    // i < 2 HALF_COPIES.
    INLINE uint32_t place(int slice, int i) const {
        uint32_t first_place = halos + first_pixel * Tile::PIXEL_BYTES;
        asm volatile("" : "+r"(first_place)); // otherwise the compiler would keep an address in a register for every i
        const int key = sources[first_pixel + i * PIXELS_AT_ONCE] & 7;
        const uint32_t halo = first_place + slice % 2 * Tile::HALO_BYTES;
        return halo + chunk_place<T>(chunk, key) + i * PIXELS_AT_ONCE * Tile::PIXEL_BYTES;
    }
    INLINE void copy(int slice, int i) const {
        const int c = slice * Tile::SLICE + chunk * 8;
        const int pixel = first_pixel + i * PIXELS_AT_ONCE;
        const int source = sources[pixel];
        const bool channel_inside = c < p.Cin1;
        const bool valid = channel_inside && source >= 0; // if false, the copy writes zeros
        const T* const x = (const T*)p.x1 + (channel_inside ? c : 0);
        const T* const from = pixel_of(x, valid ? (uint32_t)source >> 3 : 0, p.Cin1);
        copy_channels(place(slice, i), 0, from, valid, pixel < Tile::PIXELS);
    }
    // Returns the place in a halo, in bytes, of the row that this lane gives to ldmatrix: 8 channels of one pixel.
    // ldmatrix loads two fragments B: 8 neighbouring pixels of row r of the halo, and the 8 pixels below them.
    // row_begin: the index, in the halo, of the pixel in column 0 of row r. first_column: the halo's column of the
    // first of the 8 pixels. first_k: the first of the fragments' 16 channels, within the slice. The matrices are (row
    // r, k 0-7), (r, k 8-15), (r + 1, k 0-7), (r + 1, k 8-15), where k is counted from first_k.
    static INLINE uint32_t lane_place(int row_begin, int first_column, int first_k) {
        const int lane = threadIdx.x & 31;
        const int row_of_matrix = lane & 7;
        const int upper_k = lane >> 3 & 1;
        const int next_row = lane >> 4;
        const int column = first_column + row_of_matrix;
        const int pixel = row_begin + next_row * Tile::W + column;
        const int key = swizzle_key<Tile::PIXEL_BYTES / 16>(column);
        return channels_on<T>(pixel * Tile::PIXEL_BYTES + chunk_place<T>(upper_k, key), first_k);
    }
    // Returns a function for take_apart_copies. That function calls f(address) for each chunk of the slice's halo that
    // this thread copies.
    INLINE auto places(int slice) const {
        return [this, slice](auto f) {
            UNROLL_FOR (int i = 0; i < 2 * HALF_COPIES; i++)
                if (first_pixel + i * PIXELS_AT_ONCE < Tile::PIXELS) f(place(slice, i));
        };
    }
};

// The ring of weights in shared memory, with a stage for each kw, and the part of a stage that one thread copies: the
// same chunk of every ROWS_AT_ONCE-th row. A stage holds three matrices, for the taps kh = 0, 1, 2:
//   forward    weight is (Cout, taps, Cin1) in global memory. A row is an output channel; its chunks are the channels
//              of the slice.
//   BACKWARD   weight is (Cin1, taps, Cout) in global memory. As in ConvCall, Cin1 is the number of channels of dout,
//              and Cout that of the input's gradient. The taps have the reverse order: tap t of the stages is tap 8 - t
//              in global memory. A row is a channel of dout, in the slice; its chunks are the channels of the input's
//              gradient that the block computes.
template <class Tile, bool BACKWARD> struct HaloWeights {
    typedef typename Tile::T T;
    static constexpr int ROWS = BACKWARD ? Tile::SLICE : Tile::CHANNELS;
    static constexpr int CHUNKS = (BACKWARD ? Tile::CHANNELS : Tile::SLICE) / 8;
    static constexpr int ROW_BYTES = CHUNKS * 8 * sizeof(T);
    static constexpr int TAP_BYTES = ROWS * ROW_BYTES;
    static constexpr int ROWS_AT_ONCE = Tile::THREADS / CHUNKS;     // rows that all threads together copy at a time
    static constexpr int TAP_COPIES = ceil_div(ROWS, ROWS_AT_ONCE); // how many chunks a thread copies for one tap
    static constexpr int COPIES = 3 * TAP_COPIES;                   // how many chunks a thread copies for a stage
    static constexpr bool NO_THREAD_LEFT_OVER = Tile::THREADS % CHUNKS == 0 && ROWS % ROWS_AT_ONCE == 0;
    const ConvCall& p;
    const int c0; // the block's first output channel
    const int chunk = (int)threadIdx.x % CHUNKS;
    const int first_row = (int)threadIdx.x / CHUNKS;
    const uint32_t first_place; // the address that this thread's first copy is written to
    const int first_weight;     // the index in p.weight of the weights of this thread's first chunk, for slice 0, tap 0

    INLINE HaloWeights(const ConvCall& p, uint32_t ring, int c0)
        : p(p),
          c0(c0),
          first_place(ring + first_row * ROW_BYTES + chunk_place<T>(chunk, key(first_row))),
          first_weight(BACKWARD //
                           ? first_row * 9 * p.Cout + c0 + chunk * 8
                           : (c0 + first_row) * 9 * p.Cin1 + chunk * 8) {}
    static INLINE int key(int row) { return swizzle_key<ROW_BYTES / 16>(row); }

    // A thread's i-th chunk of a stage (i < COPIES) belongs to row `first_row + row(i)` of tap kh(i).
    static constexpr int kh(int i) { return i / TAP_COPIES; }
    static constexpr int row(int i) { return i % TAP_COPIES * ROWS_AT_ONCE; }
    INLINE bool owns(int i) const {
        return NO_THREAD_LEFT_OVER || (first_row < ROWS_AT_ONCE && row(i) + first_row < ROWS);
    }
    INLINE uint32_t place(int kw, int i) const {
        // If the block copies a multiple of 8 rows at once, all rows that this thread copies have the same key, because
        // the keys repeat after 8 rows. Otherwise the XOR with `toggled` replaces the key of first_row by that of the
        // i-th chunk's row.
        const bool same_key = ROWS_AT_ONCE % 8 == 0;
        const uint32_t toggled = same_key ? 0 : (key(first_row) ^ key(row(i) + first_row)) << 4;
        return (first_place ^ toggled) + kw * Tile::WEIGHT_BYTES + kh(i) * TAP_BYTES + row(i) * ROW_BYTES;
    }
    INLINE void copy(int slice, int kw, int i) const {
        const int k0 = slice * Tile::SLICE;
        const int place_of_tap = kh(i) * 3 + kw;
        const int tap = BACKWARD ? 8 - place_of_tap : place_of_tap;
        const int k = k0 + (BACKWARD ? row(i) + first_row : chunk * 8); // channel of the input (BACKWARD: of dout)
        const int c = c0 + (BACKWARD ? chunk * 8 : row(i) + first_row); // channel of the output (BACKWARD: of dx)
        const bool valid = k < p.Cin1 && c < p.Cout;                    // if false, the copy writes zeros
        int C = BACKWARD ? p.Cout : p.Cin1;                             // the distance from tap to tap in p.weight
        asm volatile("" : "+r"(C)); // otherwise the compiler would keep many multiples of C in registers
        const int further = BACKWARD ? ((k0 + row(i)) * 9 + tap) * C : (row(i) * 9 + tap) * C + k0;
        const T* const weight = (const T*)p.weight;
        const uint32_t index = valid ? first_weight + further : 0;
        copy_channels(place(kw, i), 0, weight + index, valid, owns(i));
    }
    // Returns the place in a tap's weights, in bytes, of the row that this lane gives to ldmatrix. first_k: the first
    // channel, within the slice, of the K group's part of the slice. The matrices of a fragment are (channels 0-7, k
    // 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15), where k is counted from first_k.
    static INLINE uint32_t lane_place(int first_k) {
        const int lane = threadIdx.x & 31;
        const int row_of_matrix = lane & 7;
        const int upper_c = lane >> 3 & 1;
        const int upper_k = lane >> 4;
        if (BACKWARD) {
            const int k = first_k + row_of_matrix + upper_k * 8;
            return k * ROW_BYTES + chunk_place<T>(upper_c, key(k));
        }
        const int c = row_of_matrix + upper_c * 8;
        return channels_on<T>(c * ROW_BYTES + chunk_place<T>(upper_k, key(c)), first_k);
    }
    // Loads one fragment: the weights of tap (kh, kw), for 16 output channels (BACKWARD: of dx) from m * 16 on, and for
    // 16 input channels (BACKWARD: of dout). The first of these input channels is channel k * 16 of the K group's part
    // of the slice. lane: the address of the row that this lane would give to ldmatrix if kw, kh, m and k were 0.
    static INLINE void load(FragmentA<T>& a, uint32_t lane, int kw, int kh, int m, int k) {
        const int tap = kw * Tile::WEIGHT_BYTES + kh * TAP_BYTES;
        if (!BACKWARD) {
            load_fragment<T, false>(a, channels_on<T>(lane, 16 * k), tap + m * 16 * ROW_BYTES);
            return;
        }
        // The fragment begins m * 16 channels after `lane` in the same row. 16 channels are two chunks. If a row has 2
        // or 6 chunks, the swizzle moves nothing out of its pair of chunks. So the bytes of m * 16 channels can simply
        // be added. If the number of chunks is a multiple of 4, the swizzle moves pieces within 128 bytes (or within
        // the row, if the row is shorter). So whole multiples of 128 bytes are added, and the remaining bytes are
        // XORed, as in channels_on.
        const int channel_bytes = m * 16 * sizeof(T);
        uint32_t columns;
        if (CHUNKS % 4) columns = lane + channel_bytes;
        else columns = (lane ^ channel_bytes % 128) + channel_bytes / 128 * 128;
        load_fragment<T, true>(a, columns, tap + k * 16 * ROW_BYTES);
    }
    // Returns a function for take_apart_copies. That function calls f(address) for each chunk that this thread copies
    // to the stage of kw.
    INLINE auto places(int kw) const {
        return [this, kw](auto f) {
            UNROLL_FOR (int i = 0; i < COPIES; i++)
                if (owns(i)) f(place(kw, i));
        };
    }
};

// Computes acc[r][m] += a x b[r + kh] for the warp's image rows r = 0 .. 7. a: weights of tap kh. b[i]: pixels of row i
// of the warp's halo.
// With floats, the tensor cores first add up the products of all three taps in `sum`. Then the fp32 units multiply
// `sum` by `scale`, which undoes the scales of both operands, and add the result to acc (see `multiply`). So this
// function must be called for kh = 0, 1, 2 in this order, with the same `sum`.
template <class T, int M>
INLINE void multiply_tap(float (&acc)[8][M][4], float (&sum)[8][4], int m, int kh, const FragmentA<T>& a,
                         const FragmentB<T> (&b)[10], float scale) {
    if constexpr (PARTS<T> == 1) {
        UNROLL_FOR (int r = 0; r < 8; r++) {
            mma<T>(acc[r][m], a, b[r + kh]);
        }
    } else
        UNROLL_FOR (int first = 0; first < 8; first += 4) { // four sums take turns, which hides an mma's latency
            UNROLL_FOR (int i = 0; i < 16 && kh == 0; i++) {
                sum[first + i / 4][i % 4] = 0;
            }
            UNROLL_FOR (int product = 0; product < 3; product++) // low x high', high x low', high x high'
                UNROLL_FOR (int r = first; r < first + 4; r++)
                    mma_fp16(sum[r], a + 4 * (product == 0), b[r + kh] + 2 * (product == 1));
            UNROLL_FOR (int i = 0; i < 16 && kh == 2; i++) {
                const int r = first + i / 4;
                acc[r][m][i % 4] += sum[r][i % 4] * scale;
            }
        }
}

// Computes a warp's products of one step: the weights of the three taps of one kw, times the pixels of one slice.
// Between the products the function calls copy_in_gap(0), copy_in_gap(1) and so on, which copy for later steps. x: the
// address of the pixel that this lane gives to ldmatrix for rows 0 and 1 of the warp's halo, under this kw. weights:
// the argument `lane` of HaloWeights::load.
template <class Tile, bool BACKWARD, int M, class Copy>
INLINE void multiply_step(float (&acc)[8][M][4], uint32_t x, uint32_t weights, int kw, float scale, Copy copy_in_gap) {
    typedef typename Tile::T T;
    typedef HaloWeights<Tile, BACKWARD> Weights;
    // Product i is that of tap kh_of(i) and the m_of(i)-th group of 16 output channels. With bf16, the loop over output
    // channels is the inner one. With floats, the loop over taps is the inner one, because the three taps are summed
    // before the sum is added to acc.
    auto kh_of = [](int i) { return PARTS<T> == 1 ? i / M : i % 3; };
    auto m_of = [](int i) { return PARTS<T> == 1 ? i % M : i / 3; };
    UNROLL_FOR (int k = 0; k < Tile::K16; k++) {
        FragmentA<T> a[2];
        FragmentB<T> b[10]; // the rows 0 .. 9 of the halo under this kw
        Weights::load(a[0], weights, kw, kh_of(0), m_of(0), k);
        UNROLL_FOR (int r = 0; r < 10; r += 2) {
            const int row = r * Tile::W * Tile::PIXEL_BYTES;
            load_fragments<T, false>(b[r], b[r + 1], channels_on<T>(x, 16 * k), row);
        }
        float sum[8][4];
        UNROLL_FOR (int i = 0; i < 3 * M; i++) {
            const int next = i + 1; // the weights of product `next` are loaded during product i
            if (next < 3 * M) Weights::load(a[next % 2], weights, kw, kh_of(next), m_of(next), k);
            multiply_tap<T, M>(acc, sum, m_of(i), kh_of(i), a[i % 2], b, scale);
            if (next % M == 0) copy_in_gap(k * 3 + i / M);
        }
    }
}

// A block computes a tile of pixels x CHANNELS channels. A warp computes 8 x 8 of these pixels. If there are several K
// groups, a warp multiplies only its K group's part of each slice. Phases:
//   1. The first copies are started.
//   2. Each slice has three steps, one for each kw. In each step the block waits for the operands. Then it multiplies,
//      and at the same time copies for later steps.
//   3. store_product makes results of the sums, and stores them.
// TO: the type of the output.
template <class Tile, bool BACKWARD, class TO>
static __global__ void __launch_bounds__(Tile::THREADS, Tile::PER_SM) conv_halo_kernel(const ConvCall p) {
    typedef typename Tile::T T;
    typedef HaloCopies<Tile> Copies;
    typedef HaloWeights<Tile, BACKWARD> Weights;
    extern __shared__ __align__(128) unsigned char shared[];
    const uint32_t base = shared_address(shared);

    // The block's tile: channels from c0 on, pixels from (h0, w0) on, images from n0 on.
    const int c0 = blockIdx.x % p.channel_blocks * Tile::CHANNELS;
    const int tile = blockIdx.x / p.channel_blocks;
    const auto [n0, h0, w0] = tile_origin(tile, p.tiles_h, p.tiles_w, Tile::TILE_H, Tile::TILE_W, Tile::IMAGES);

    // The first copies: the halo of slice 0, and the weights of slice 0 for kw = 0 and 1.
    const Copies halo(p, shared);
    const Weights weights(p, base + Tile::WEIGHTS_AT, c0);
    NO_UNROLL_FOR (int i = 0; i < Weights::COPIES; i++) {
        weights.copy(0, 0, i);
    }
    halo.find_sources(n0, h0, w0);
    __syncthreads();
    NO_UNROLL_FOR (int i = 0; i < 2 * Copies::HALF_COPIES; i++) {
        halo.copy(0, i);
    }
    copies_committed();
    NO_UNROLL_FOR (int i = 0; i < Weights::COPIES; i++) {
        weights.copy(0, 1, i);
    }
    copies_committed();

    // Which pixels of the tile this warp computes, and the first channel of its K group's part of a slice. Then the
    // addresses of the rows that this lane gives to ldmatrix.
    constexpr int M = Tile::WARP_CHANNELS / 16;
    const int warp = (int)threadIdx.x >> 5;
    const int pixel_warp = Tile::pixel_warp(warp);
    const int image = pixel_warp / (Tile::WARPS_DOWN * Tile::WARPS_ACROSS);
    const int warp_h = pixel_warp / Tile::WARPS_ACROSS % Tile::WARPS_DOWN * 8;
    const int warp_w = pixel_warp % Tile::WARPS_ACROSS * 8;
    const int first_k = Tile::k_group(warp) * Tile::K16 * 16;
    uint32_t lane_pixels[3]; // one address for each kw
    UNROLL_FOR (int kw = 0; kw < 3; kw++)
        lane_pixels[kw] = base + Copies::lane_place((image * Tile::H + warp_h) * Tile::W, warp_w + kw, first_k);
    const uint32_t lane_weights = base + Tile::WEIGHTS_AT + Weights::lane_place(first_k);

    float acc[8][M][4] = {}; // acc[r][m]: the sums of the warp's m-th 16 output channels x 8 pixels of image row r
    float pixel_scale = 1, weight_scale = 1;
    for (int slice = 0; slice < p.slices; slice++) {
        UNROLL_FOR (int kw = 0; kw < 3; kw++) {
            copies_arrived<1>();
            take_apart_copies<T, Tile::THREADS / 32>(pixel_scale, halo.places(slice), weight_scale, weights.places(kw),
                                                     kw == 0);
            __syncthreads(); // all threads' copies for this step have arrived, and all have finished the previous step

            // A step has GAPS gaps between its products. In these gaps it copies the weights of the step after the next
            // one. The steps kw = 0 and kw = 1 each also copy half of the next slice's halo.
            auto copy_in_gap = [&](int gap) {
                constexpr int GAPS = 3 * Tile::K16;
                UNROLL_FOR (int i = 0; i < Weights::COPIES; i++)
                    if (i * GAPS / Weights::COPIES == gap) weights.copy(kw ? slice + 1 : slice, (kw + 2) % 3, i);
                UNROLL_FOR (int i = 0; i < Copies::HALF_COPIES; i++)
                    if (kw < 2 && i * GAPS / Copies::HALF_COPIES == gap)
                        halo.copy(slice + 1, kw * Copies::HALF_COPIES + i);
            };
            const uint32_t x = lane_pixels[kw] + slice % 2 * Tile::HALO_BYTES;
            multiply_step<Tile, BACKWARD>(acc, x, lane_weights, kw, pixel_scale * weight_scale, copy_in_gap);
            copies_committed();
        }
    }

    const int n = n0 + image;
    const int tiles = p.tiles_h * p.tiles_w;
    auto output_pixel = [&](int k) { // index of the warp's k-th pixel in the output; -1: outside the image
        const int h = h0 + warp_h + k / 8;
        const int w = w0 + warp_w + k % 8;
        return h < p.H && w < p.W ? (n * p.H + h) * p.W + w : -1;
    };
    store_product<Tile, TO, Tile::ROUNDS, BACKWARD>(acc, shared, p.out, n0, c0, tile % tiles, tiles, output_pixel);
}

template <class Tile, bool BACKWARD, class TO = typename Tile::T> static void conv_halo(const ConvCall& c) {
    ConvCall p = c;
    p.tiles_h = ceil_div(p.H, Tile::TILE_H);
    p.tiles_w = ceil_div(p.W, Tile::TILE_W);
    p.channel_blocks = ceil_div(p.Cout, Tile::CHANNELS);
    p.slices = ceil_div(p.Cin1, Tile::SLICE);
    const int tiles = p.tiles_h * p.tiles_w;
    const int blocks = ceil_div(p.B, Tile::IMAGES) * tiles * p.channel_blocks;
    if (p.out.parts) *p.out.parts = tiles;
    launch_behind(conv_halo_kernel<Tile, BACKWARD, TO>, blocks, Tile::THREADS, Tile::SHARED_BYTES, p);
}

// ---------------------------------------------------------------------------------------------------------------------
// --- conv_weight_halo, conv_weight_gather: weight gradients, any GPU
// dweight[co, tap, ci] = sum over the output's pixels p of dout[p, co] * x[source(p, tap), ci]
//
// Used when: conv_weight_tma can't be used for the type (fp32), the shape or the GPU. conv_weight_halo computes 3x3
//   with stride 1, and conv_weight_gather computes everything else.
// How: This is a product of matrices that sums over many pixels. Its result has few tiles. With only one block for each
//   tile, most of the GPU would be idle. So the pixels are divided into ranges, and each block sums over one range. It
//   goes through the range in pixel tiles of 64 pixels. A block of conv_weight_halo computes a tile of 64 x 64 weights
//   (output x input channels) of all nine taps. A block of conv_weight_gather computes one tap of one such tile or, for
//   large layers in bf16, of 2 x 2 tiles (plan_weight). The weights of a tap are divided among four warps. If a block
//   has one tile, each of these warps computes 32 x 32 weights, which are 2 x 4 fragments of mma.
//
//     dout (pixels, 64 co) ^T      x (pixels, 64 ci)         partial sums of 64 x 64 weights
//     +----+----+----+             +----+----+----+          range 0   range 1   range 2
//     | a range of    |     x      | the same     |    ->    [     ] + [     ] + [     ]  -> dweight (conv_weight_sum)
//     | pixel tiles   |            | pixel tiles  |
//     +----+----+----+             +----+----+----+
//
//   If there is more than one range, the blocks write partial sums to the workspace, and conv_weight_sum adds them up
//   in a fixed order. The bias gradient is the sum of dout over all pixels. It is computed as dout^T times a matrix of
//   ones. Several warps read the same part of dout, but only one of them computes this product. There is one partial
//   of the bias for each pair of a range and an image that have common pixels, because the sum over one image is
//   wanted, too: it is the gradient of the image's embedding (demb). Small layers share a launch (WeightBatch), because
//   one of them alone would not keep the GPU busy.
// Costs: Each block reads its channels of x and of dout. So conv_weight_halo reads x once for every 64 output channels,
//   and dout once for every 64 input channels. conv_weight_gather does the same for every tap (with 2 x 2 tiles, for
//   every 128 channels). The partials are written and read once.

// conv_weight_halo: 3x3, stride 1. A block computes 64 x 64 weights of all nine taps. It has 12 warps: four for each
// kw. Each of these four warps computes a quarter of the 64 x 64 weights, for all three kh. A pixel tile is 8 x 8
// pixels of dout, and the 10 x 10 pixels of x that the taps read for them. An instruction mma sums over 16 pixels,
// which are two image rows of 8 pixels. Pixel tiles pass through a ring of STAGES stages in shared memory:
//
//     a stage:   | x: 10 x 10 pixels of 64 channels | dout: 8 x 8 pixels of 64 channels |
constexpr int WEIGHT_HALO_BYTES = 4 * 164 * 128; // bytes of 4 stages in bf16, 2 in fp32, each of 100 + 64 pixels

// The part of each pixel tile that one thread copies: one chunk of one column, in every X_ROWS-th row of x and in every
// DOUT_ROWS-th row of dout. There are no branches around the copies: a thread that has nothing to copy passes false to
// copy_channels. So the compiler can place the copies between products.
template <class T> struct WeightHaloCopies {
    static constexpr int CHUNKS = 8;                   // chunks of a pixel, which has 64 channels here
    static constexpr int PIXEL_BYTES = 64 * sizeof(T); // bytes of a pixel
    static constexpr int STAGES = 4 / PARTS<T>;
    static constexpr int X_BYTES = 100 * PIXEL_BYTES;
    static constexpr int STAGE_BYTES = X_BYTES + 64 * PIXEL_BYTES;
    static constexpr int X_ROWS = 384 / CHUNKS / 10; // rows of x that all 384 threads together copy at a time
    static constexpr int X_COPIES = ceil_div(10, X_ROWS);
    static constexpr int DOUT_ROWS = 384 / CHUNKS / 8;
    static constexpr int DOUT_COPIES = ceil_div(8, DOUT_ROWS);
    const ConvWeight& p;
    const uint32_t base;             // the address where shared memory begins
    const int co0, ci0;              // the block's first output channel and first input channel
    const int first, end;            // the block's pixel tiles: first .. end - 1
    const int up = p.shape.upsample; // 1: x is read through upsampling, and has half of dout's rows and columns
    const int H = p.shape.H << up;   // rows of dout
    const int W = p.shape.W << up;   // columns of dout
    const int chunk = (int)threadIdx.x % CHUNKS;
    const int pixel = (int)threadIdx.x / CHUNKS; // the first pixel of a tile that this thread copies, of x and of dout
    const int x_col = pixel % 10;
    const int x_row = pixel / 10;
    const int dout_col = pixel % 8;
    const int dout_row = pixel / 8;
    const bool x_in = ci0 + chunk * 8 < p.shape.C1;
    const bool dout_in = co0 + chunk * 8 < p.shape.Cout;
    const T* const x = (const T*)p.x1 + (x_in ? ci0 + chunk * 8 : 0);
    const T* const dout = (const T*)p.dout + (dout_in ? co0 + chunk * 8 : 0);
    const uint32_t x_place = base + pixel * PIXEL_BYTES + chunk_place<T>(chunk, x_col & 7);
    const uint32_t dout_place = base + X_BYTES + pixel * PIXEL_BYTES + chunk_place<T>(chunk, dout_col & 7);
    Origin next = tile_origin(first, p.tiles_h, p.tiles_w, 8, 8); // where the next pixel tile to copy begins

    INLINE bool owns_x(int k) const { return x_row < min(X_ROWS, 10 - k * X_ROWS); }
    INLINE bool owns_dout(int k) const { return dout_row < min(DOUT_ROWS, 8 - k * DOUT_ROWS); }
    INLINE uint32_t stage(int pixel_tile) const { return (uint32_t)(pixel_tile - first) % STAGES * STAGE_BYTES; }

    // The caller must pass the pixel tiles `first`, `first` + 1, ... in this order, because each call moves `next` on.
    // For tiles from `end` on, the function writes zeros.
    INLINE void copy_tile(int pixel_tile) {
        const uint32_t stage = this->stage(pixel_tile);
        UNROLL_FOR (int k = 0; k < X_COPIES; k++) {
            const int h = next.h + x_row + k * X_ROWS - 1;
            const int w = next.w + x_col - 1;
            const bool valid = pixel_tile < end && x_in && (unsigned)h < (unsigned)H && (unsigned)w < (unsigned)W;
            const uint32_t source = valid ? (next.n * p.shape.H + (h >> up)) * p.shape.W + (w >> up) : 0;
            const int offset = stage + k * X_ROWS * 10 * PIXEL_BYTES;
            copy_channels(x_place, offset, pixel_of(x, source, p.shape.C1), valid, owns_x(k));
        }
        UNROLL_FOR (int k = 0; k < DOUT_COPIES; k++) {
            const int h = next.h + dout_row + k * DOUT_ROWS;
            const int w = next.w + dout_col;
            const bool valid = pixel_tile < end && dout_in && h < H && w < W;
            const uint32_t source = valid ? (next.n * H + h) * W + w : 0;
            const int offset = stage + k * DOUT_ROWS * 8 * PIXEL_BYTES;
            copy_channels(dout_place, offset, pixel_of(dout, source, p.shape.Cout), valid, owns_dout(k));
        }
        copies_committed();
        // Go on to the next pixel tile: to the right, or first in the next row of tiles, or first in the next image.
        next.w += 8;
        if (next.w < W) return;
        next.w = 0;
        next.h += 8;
        if (next.h < H) return;
        next.h = 0;
        next.n++;
    }
    // x_places and dout_places each return a function for take_apart_copies. That function calls f(address) for each
    // chunk of x, or of dout, that this thread copies.
    INLINE auto x_places(uint32_t stage) const {
        return [this, stage](auto f) {
            UNROLL_FOR (int k = 0; k < X_COPIES; k++)
                if (owns_x(k)) f(x_place + stage + k * X_ROWS * 10 * PIXEL_BYTES);
        };
    }
    INLINE auto dout_places(uint32_t stage) const {
        return [this, stage](auto f) {
            UNROLL_FOR (int k = 0; k < DOUT_COPIES; k++)
                if (owns_dout(k)) f(dout_place + stage + k * DOUT_ROWS * 8 * PIXEL_BYTES);
        };
    }
};

// A block of conv_weight_halo_kernel has these phases:
//   1. The copies of the first STAGES - 1 pixel tiles are started.
//   2. For each pixel tile: wait for it, start the copies of a later pixel tile, multiply.
//   3. The sums are stored in dweight or in the partials.
template <class T, int WORKS>
static __global__ void __launch_bounds__(384, 1)
    conv_weight_halo_kernel(const __grid_constant__ WeightBatch<ConvWeight, WORKS> batch) {
    using Copies = WeightHaloCopies<T>;
    constexpr int PIXEL_BYTES = Copies::PIXEL_BYTES;
    constexpr int STAGES = Copies::STAGES;
    extern __shared__ __align__(128) unsigned char shared[];
    const uint32_t base = shared_address(shared);
    const int lane = threadIdx.x & 31;
    const int warp = (int)threadIdx.x >> 5;
    const int co_warp = warp & 1;
    const int ci_warp = warp >> 1 & 1;
    const int kw = warp >> 2;

    // Which tile of weights the block computes, and over which range of pixel tiles it sums: first .. end - 1.
    const auto [p, block] = batch.work_of_this_block();
    const int tile = block % p.tiles;
    const int split = block / p.tiles;
    const int ci_tile = tile % p.channel_tiles;
    const int first = first_pixel_tile(p, split);
    const int end = first_pixel_tile(p, split + 1);
    const int co0 = tile / p.channel_tiles * 64;
    Copies copies{p, base, co0, ci_tile * 64, first, end};
    for (int i = 0; i < STAGES - 1; i++) copies.copy_tile(first + i);

    // ldmatrix loads four matrices at once. Each matrix has 8 channels of 8 pixels of one image row. Each lane gives
    // ldmatrix the address of one pixel of one matrix. The four matrices are (image row, channels):
    // Of x:    (row, ci 0-7), (row + 1, ci 0-7), (row, ci 8-15), (row + 1, ci 8-15).
    // Of dout: (row, co 0-7), (row, co 8-15), (row + 1, co 0-7), (row + 1, co 8-15).
    const int row_of_matrix = lane & 7;
    const int low = lane >> 3 & 1;
    const int high = lane >> 4;
    const int column = row_of_matrix + kw; // the column of x in the 10 x 10 pixels
    uint32_t lane_x = base + (low * 10 + column) * PIXEL_BYTES + chunk_place<T>(ci_warp * 4 + high, column & 7);
    uint32_t lane_dout = base + Copies::X_BYTES + (high * 8 + row_of_matrix) * PIXEL_BYTES +
                         chunk_place<T>(co_warp * 4 + low, row_of_matrix);
    // Without this line the compiler would compute lane_x and lane_dout again for every tile.
    asm volatile("" : "+r"(lane_x), "+r"(lane_dout));

    // acc[kh][i][j]: a fragment of sums, for tap (kh, kw), the warp's i-th group of 16 output channels, and its j-th
    // group of 8 input channels.
    float acc[3][2][4][4] = {};
    float x_scale = 1, dout_scale = 1;
    BiasSum<T, 2> bias{p, ci_tile == 0 && ci_warp == 0 && kw == 0, split, co0 + co_warp * 32, first};
    for (int pixel_tile = first; pixel_tile < end; pixel_tile++) {
        copies_arrived<STAGES - 2>();
        const uint32_t stage = copies.stage(pixel_tile);
        take_apart_copies<T, 12>(x_scale, copies.x_places(stage), dout_scale, copies.dout_places(stage));
        __syncthreads(); // all threads' copies for this tile have arrived, and all have finished the previous tile
        copies.copy_tile(pixel_tile + STAGES - 1);
        bias.next_tile();

        // The rows of x that are needed for kh = 2 are needed again for kh = 0, in the next round (two image rows
        // further down). With bf16 they stay in registers (`below`). With floats this would take too many registers.
        constexpr bool KEEP_ROWS = PARTS<T> == 1;
        FragmentB<T> below[4];
        UNROLL_FOR (int r = 0; r < 4; r++) { // each round has two image rows of dout
            FragmentA<T> a[2];
            load_dout<T>(a, lane_dout + stage + r * 16 * PIXEL_BYTES);
            bias.add(a, dout_scale);
            UNROLL_FOR (int kh = 0; kh < 3; kh++) {
                FragmentB<T> b[4];
                if (KEEP_ROWS && r && kh == 0) memcpy(b, below, sizeof b);
                else load_x<T>(b, lane_x + stage + (2 * r + kh) * 10 * PIXEL_BYTES);
                if (KEEP_ROWS && kh == 2) memcpy(below, b, sizeof b);
                multiply<T, 2, 4>(acc[kh][0], 4, 1, a, b, x_scale * dout_scale);
            }
        }
    }
    copies_arrived<0>();
    bias.put();
    put_weights(p, split, [&](auto put) {
        UNROLL_FOR (int f = 0; f < 24; f++) {
            const int kh = f / 8;
            const int fragment = f % 8;
            const float* v = acc[kh][fragment / 4][fragment % 4];
            const int i = (warp % 4 * 8 + fragment) * 32 + lane;
            put(tile, kh * 3 + kw, i, make_float4(v[0], v[1], v[2], v[3]));
        }
    });
}

// =====================================================================================================================
// The optimiser

// ---------------------------------------------------------------------------------------------------------------------
// --- adamw: norm of the gradient, the step's verdict, AdamW, averages
// Used when: after every microbatch (sum_gradients), and at the end of every training step.
// How: The squares of the gradient are summed in stretches of a fixed size. So the norm has the same bits for any
//   number of GPUs (see the comments above step_gradients). The GPU itself decides whether and how to update the
//   weights (judge_step), so the host need not wait for the norm.
// Costs: memory traffic. adamw_kernel reads sum, params, ema, m and v. It writes params, ema, m and v and, if
//   activations are not fp32, the copy. With --optimizer muon the kernels of `muon` run before it.

// Adds up the gradients of all ranks, in the order of the ranks, and writes the result to `sum`. If `add` is true, the
// old content of `sum` is the first term: the sum over the earlier microbatches of this step. The kernel also writes
// |sum|^2 of each stretch to the array `squares` of this rank, and to the same array of every rank whose memory this
// rank can write to. This rank's slice is the part of the flat arrays that this rank updates (Slice). There is one
// block for each stretch of this slice. A stretch has STRETCH floats. A quad is 4 neighbouring floats. A thread works
// on QUADS quads of the stretch, which are 1024 quads apart: for each of them, it adds up the ranks' gradients.
static __global__ void __launch_bounds__(1024, SUM_BLOCKS)
    sum_gradients_kernel(float* sum,                                         // a flat array
                         const __grid_constant__ Everywhere<double> squares, // one number for each stretch
                         RankGradients grads,
                         bool add,     // whether the old sum is added
                         bool write) { // false: the only term is `sum` itself, so it need not be written
    await_previous_kernel();
    constexpr int QUADS = STRETCH / 4 / 1024;
    const size_t n = grads.slice.n;
    const size_t at = grads.slice.flat(blockIdx.x * STRETCH); // the stretch's place in the flat arrays
    const size_t first = at / 4 + threadIdx.x;                // this thread's first quad
    // How many quads the stretch has from this thread's first quad on. Quads after the array's n floats must not be
    // read, so they are not counted.
    const int quads_left = (int)(min(at + STRETCH, n) / 4 - min(at, n) / 4) - (int)threadIdx.x;
    const int first_source = -(int)add; // source -1 is the old sum; source r >= 0 is rank r
    float4 g[QUADS];
    for (int r = first_source; r < grads.slice.ranks; r++) {
        const float* source = r < 0 ? sum : grads.of(r);
        const float4* from = (const float4*)source + first;
        UNROLL_FOR (int k = 0; k < QUADS; k++) {
            const float4 v = k * 1024 < quads_left ? from[k * 1024] : make_float4(0, 0, 0, 0);
            g[k] = r == first_source ? v : g[k] + v;
        }
    }
    // Squares are added up in double, in a fixed order: first each thread's squares, then the sums of all threads.
    double total = 0;
    UNROLL_FOR (int k = 0; k < QUADS; k++) {
        if (write && k * 1024 < quads_left) ((float4*)sum)[first + k * 1024] = g[k];
        const double x = g[k].x;
        const double y = g[k].y;
        const double z = g[k].z;
        const double w = g[k].w;
        total += (x * x + y * y) + (z * z + w * w);
    }
    total = block_sum(total);
    if (threadIdx.x < squares.ranks) squares.at[threadIdx.x][at / STRETCH] = total; // thread k writes to array k
}

static void sum_gradients(float* sum, const Everywhere<double>& squares, const RankGradients& grads, bool add) {
    const Slice& s = grads.slice;
    const bool write = add || s.ranks > 1 || grads.own != sum;
    const int blocks = s.segments * s.stretches;
    launch(sum_gradients_kernel, blocks, 1024, 0, sum, squares, grads, add, write);
}

// Computes the gradient's norm and the batch's losses, both over all ranks, and decides whether this step is good or is
// skipped. There is one block. It adds up in a fixed order: first each thread adds up its numbers, then each warp adds
// up the sums of its threads, and then thread 0 adds up the sums of the 8 warps. At the end thread 0 calls judge_batch,
// which decides, and sets the learning rate and the counters.
static __global__ void __launch_bounds__(256)
    judge_step_kernel(StepState* state,      // the norm, the losses and the decision are written to it
                      const double* squares, // (stretches): |gradient|^2 of each stretch
                      size_t stretches,
                      const double* loss,  // (B): losses of all ranks' samples
                      const int* quarters, // (B): in which quarter of the noise levels a sample's level lies
                      AdamW h, int B) {
    await_previous_kernel();
    __shared__ LossSums warps[8];
    __shared__ double warp_squares[8];
    LossSums mine{};
    double square = 0; // first this thread's part of |gradient|^2; in thread 0, at the end, the whole
    UNROLL_8_FOR (size_t i = threadIdx.x; i < stretches; i += 256) {
        square += squares[i];
    }
    for (int b = threadIdx.x; b < B; b += 256) {
        add_loss(&mine, loss[b], quarters[b]);
    }
    square = warp_sum(square);
    for (double& sum : mine.sum) sum = warp_sum(sum);
    for (int& count : mine.count) count = warp_sum(count);
    if (threadIdx.x % 32 == 0) {
        warps[threadIdx.x / 32] = mine;
        warp_squares[threadIdx.x / 32] = square;
    }
    __syncthreads();
    if (threadIdx.x) return;
    for (int w = 1; w < 8; w++) {
        square += warp_squares[w];
        for (int q = 0; q < 4; q++) {
            mine.sum[q] += warps[w].sum[q];
            mine.count[q] += warps[w].count[q];
        }
    }
    state->grad_norm = sqrt(square);
    judge_batch(state, mine, h, B);
}
static void judge_step(StepState* state, const double* squares, size_t stretches, //
                       const double* loss, const int* quarters, AdamW h, int B) {
    launch(judge_step_kernel, 1, 256, 0, state, squares, stretches, loss, quarters, h, B);
}

// Adds 1 to *step. It is called after all kernels that draw random numbers for this step, because they read *step.
static void next_step(int64_t* step) {
    each(1, [=] __device__(size_t) { ++*step; });
}

// Copies the state of this step to records, a ring of `count` states. Some steps later the host reads from the ring
// what the log needs. next_step has already added 1 to state->step, so this step's number is state->step - 1.
static void record_step(StepState* records, const StepState* state, int count) {
    each(1, [=] __device__(size_t) { records[(state->step - 1) % count] = *state; });
}

// to = params, rounded to the type of `to`. A thread rounds 4 weights.
template <class T> static void round_params(T* to, const float* params, size_t n) {
    each(n / 4, [=] __device__(size_t quad) { ((Four<T>*)to)[quad] = from_floats<T>(((const float4*)params)[quad]); });
}
static void cast_params(act* copy, const float* params, size_t n) {
    if (weights_have_copy()) with_act([&]<class T>(T) { round_params((T*)copy, params, n); });
}

// AdamW (Loshchilov & Hutter 2019) and the average of the parameters, for one rank's slice:
//
//   g   = clip sum                                            sum: the gradient of the step's whole batch
//   m   = beta1 m + (1 - beta1) g
//   v   = beta2 v + (1 - beta2) g^2
//   p   = decay p - step_size m / (sqrt(v) / root + eps)      p: the parameter
//   ema = ema + share (p - ema)                               share: average_share
//
// A thread updates four neighbouring weights at a time. They are elements 4 i ... 4 i + 3 of the slice's arrays (ema, m
// and v), and elements 4 k ... 4 k + 3 of the flat arrays (params, copy, sum).
// With MUON, the elements of Muon's matrices have another update: p = decay p - lr direction. Their directions are in
// `sum`, their m has been updated by muon_momentum_kernel, and their v is not used.
// u is a __grid_constant__, so it stays in constant memory. Without this the compiler would copy u to local memory,
// because the index r in u.params.at[r] is only known at run time.
// T is the activations' type, in which convolutions read the weights. If it is float, there is no copy: u.copy is the
// same array as u.params.
template <class T, bool MUON>
static __global__ void __launch_bounds__(256)
    adamw_kernel(const __grid_constant__ Update u, const StepState* state, AdamW h, Slice own) {
    await_previous_kernel();
    __shared__ AdamWFactors shared;
    if (!state->ok) return;
    if (threadIdx.x == 0) shared = adamw_factors(state, h); // slow (in double): only one thread computes them
    __syncthreads();
    const AdamWFactors f = shared;
    constexpr bool has_copy = !std::is_same_v<T, float>;
    float4* const ema = (float4*)u.ema;
    float4* const ms = (float4*)u.m;
    float4* const vs = (float4*)u.v;
    const size_t stride = (size_t)gridDim.x * 256;
    for (size_t i = (size_t)blockIdx.x * 256 + threadIdx.x; i < own.owned() / 4; i += stride) {
        const size_t k = own.flat(4 * i) / 4;
        if (4 * k >= own.n) break; // only padding follows after the last parameter
        const float4 sum = ((const float4*)u.sum)[k];
        float4 p = ((float4*)u.params.at[0])[k];
        float4 e = ema[i];
        float4 m = ms[i];
        float4 v = vs[i];
        auto update = [&](float& p, float& e, float& m, float& v, float sum) {
            const float g = sum * f.clip;
            m = h.beta1 * m + (1 - h.beta1) * g;
            v = h.beta2 * v + (1 - h.beta2) * g * g;
            p = p * f.decay - f.step_size * m / (sqrtf(v) / f.root + h.eps);
            e += f.share * (p - e);
        };
        auto move = [&](float& p, float& e, float direction) {
            p = p * f.decay - f.lr * direction;
            e += f.share * (p - e);
        };
        if (MUON && u.is_matrix[k / 16]) { // is_matrix has a byte for each 64 floats, which are 16 quads
            move(p.x, e.x, sum.x);
            move(p.y, e.y, sum.y);
            move(p.z, e.z, sum.z);
            move(p.w, e.w, sum.w);
        } else {
            update(p.x, e.x, m.x, v.x, sum.x);
            update(p.y, e.y, m.y, v.y, sum.y);
            update(p.z, e.z, m.z, v.z, sum.z);
            update(p.w, e.w, m.w, v.w, sum.w);
        }
        ema[i] = e;
        ms[i] = m;
        vs[i] = v;
        // The new weights go to this rank and to all ranks whose memory this rank can write to. The network reads the
        // first `plain` weights (all except the weights of convolutions) in fp32, and all other weights from the copy.
        // So the other ranks need only the first `plain` weights in fp32. (If there is no copy, `plain` includes all
        // weights.)
        const Four<T> rounded = from_floats<T>(p);
        for (int r = 0; r < u.params.ranks; r++) {
            if (r == 0 || 4 * k < u.plain) ((float4*)u.params.at[r])[k] = p;
            if (has_copy) ((Four<T>*)u.copy.at[r])[k] = rounded;
        }
    }
}
static void adamw_update(const Update& u, const StepState* state, AdamW h, Slice own) {
    const size_t quads = own.owned() / 4;
    const int blocks = (int)std::min<size_t>(blocks_for(quads), 8 * gpu.sms);
    with_act([&]<class T>(T) {
        auto* const kernel = u.is_matrix ? adamw_kernel<T, true> : adamw_kernel<T, false>;
        launch(kernel, blocks, 256, 0, u, state, h, own);
    });
}

// adamw_kernel updates the first average of the parameters. This kernel updates one of the other averages, by the
// same formula. Each thread updates one element.
static __global__ void __launch_bounds__(256)
    ema_kernel(float* ema, const float* params, const StepState* state, float rate, Slice own) {
    __shared__ float share;
    await_previous_kernel();
    if (threadIdx.x == 0) share = average_share(rate, state->updates);
    __syncthreads();
    const size_t i = (size_t)blockIdx.x * 256 + threadIdx.x; // index in the slice
    const size_t k = own.flat(i);                            // index in the flat array
    if (k < own.n && state->ok) ema[i] += share * (params[k] - ema[i]);
}
static void ema_update(float* ema, const float* params, const StepState* state, float rate, Slice own) {
    launch(ema_kernel, blocks_for(own.owned()), 256, 0, ema, params, state, rate, own);
}
#endif

#ifdef __CUDACC__ // the GPU

// =====================================================================================================================
// Which kernel runs: costs as measured, tables of decisions, and the operations that have several kernels
template <class T> static auto norm_first_pass(bool drop) {
    if (drop) return groupnorm_sums_kernel<T, true>;
    return groupnorm_sums_kernel<T, false>;
}
template <class T, class GRAD> static auto norm_second_pass(bool drop, bool addends) {
    if (addends && drop) return groupnorm_backward_kernel<T, true, true, GRAD>;
    if (addends) return groupnorm_backward_kernel<T, false, true, GRAD>;
    if (drop) return groupnorm_backward_kernel<T, true, false, GRAD>;
    return groupnorm_backward_kernel<T, false, false, GRAD>;
}

static void groupnorm_backward(Grad dx1, Grad dx2,                   // like x1 and x2
                               float* dweight, float* dbias,         // (C1 + C2)
                               float* dscale_shift,                  // (B, ss_stride) or null
                               const act* dout,                      // (B, HW, C1 + C2)
                               const act* x1, const act* x2,         // (B, HW, C1), (B, HW, C2)
                               const float* mean, const float* rstd, // (B, groups)
                               const float* weight, const float* bias, const float* scale_shift, int ss_stride,
                               Dropout dropout, NormShape s, Fp8Copy dx1_fp8, Fp8Copy dx2_fp8) {
    const bool drop = dropout.p > 0;
    const bool addends = dx1.add1 || dx1.add2 || dx2.add1 || dx2.add2;

    // The gradients of weight and bias are sums over the images. Each image's term stays in memory until
    // finish_gradients adds up the terms. In general this happens later, for many group norms together. But if there is
    // no room for one more group norm, finish_gradients is called here. After that the memory can be used again.
    const size_t bytes = norm_sums_bytes(s);
    if (norm_sums_count == MAX_NORM_SUMS || norm_sums_used + bytes > device.norm_sums_bytes) finish_gradients();
    float2* const sums = (float2*)(device.norm_sums + norm_sums_used);
    norm_sums_list.norms[norm_sums_count++] = NormSums{sums, dweight, dbias, s.B, s.C1 + s.C2};
    norm_sums_used += bytes;

    NormArgs a{x1, x2, weight, bias, scale_shift, ss_stride, dropout, s, mean, rstd, dscale_shift, sums};
    const NormWhole w = plan_norm_whole(s, addends);
    auto run = [&]<class T, class GRAD>(T, GRAD to1, GRAD to2) {
        if (w.chunks) {
            auto kernel = norm_whole_kernel<T, GRAD>(drop);
            const dim3 grid(w.chunks, a.C / w.slab, s.B);
            return launch_on(MAIN_STREAM, w.chunks, kernel, grid, w.threads, w.bytes(), to1, to2, dout, a, w);
        }
        // Two passes: the first computes sums over chunks of an image's pixels, the second computes the gradient. Each
        // block of the second pass reads the sums of all chunks of its image. To keep these sums few, the first pass
        // has at most 64 chunks. With addends, the second pass divides the pixels into other chunks than the first
        // pass, since a multiprocessor may have registers for fewer blocks of the second pass (norm_backward_blocks).
        auto first_pass = norm_first_pass<T>(drop);
        auto second_pass = norm_second_pass<T, GRAD>(drop, addends);
        float2* const partial = (float2*)device.workspace;
        dim3 grid = norm_grid(a, norm_backward_blocks(drop), 64);
        const int chunks = grid.x;
        launch(first_pass, grid, NORM_THREADS, 0, partial, dout, a);
        if (addends) grid = norm_grid(a, norm_backward_blocks(true), s.HW);
        launch(second_pass, grid, NORM_THREADS, 0, to1, to2, partial, chunks, dout, a);
    };
    if (dx1_fp8.bytes || dx2_fp8.bytes) {
        if (!act_has_wgmma()) die("internal error: FP8 is for Hopper");
        using GradFp8 = Fp8GradOf<bf16>;
        const GradFp8 to1{typed<bf16>(dx1), dx1_fp8};
        const GradFp8 to2{typed<bf16>(dx2), dx2_fp8};
        return run(bf16(), to1, to2);
    }
    with_act([&]<class T>(T) { run(T(), typed<T>(dx1), typed<T>(dx2)); });
}

// ---------------------------------------------------------------------------------------------------------------------
// --- attention: forward and, where a has dout, backward
// Picks the kernel for heads of a.d channels. If Hopper's kernels can't be used, it picks the smallest kernel that has
// room for a.d channels.
template <class T> static void attention(const AttentionCall& a) {
    if (hopper_attention(a)) return;
    constexpr int LARGEST = 32 * VEC<T>; // channels of the largest head that launch_attention can compute: 512 bytes
    const Way<AttentionCall> ways[] = {
        {a.d <= 32, launch_attention<T, 32>}, // d is padded to the kernel's number of channels
        {a.d <= 64, launch_attention<T, 64>},           {a.d <= 128, launch_attention<T, 128>},
        {a.d <= LARGEST, launch_attention<T, LARGEST>}, {true, launch_attention_general<T>}, // heads of any size
    };
    decide(a, ways);
}

// Both passes fill an AttentionCall and call attention(). A call that has dout is a backward pass.
static void attention_forward(act* out, SoftmaxRow* rows, const act* qkv, int B, int T, int C, int heads) {
    const AttentionCall call{out, rows, qkv, nullptr, nullptr, B, T, C, heads};
    with_act([&]<class A>(A) { attention<A>(call); });
}
static void attention_backward(act* dqkv,              // (B, T, 3C)
                               const act* dout,        // (B, T, C)
                               const act* qkv,         // (B, T, 3C)
                               const act* out,         // (B, T, C)
                               const SoftmaxRow* rows, // (B, heads, T)
                               int B, int T, int C, int heads) {
    const AttentionCall call{dqkv, (SoftmaxRow*)rows, qkv, dout, out, B, T, C, heads};
    with_act([&]<class A>(A) { attention<A>(call); });
}

// ---------------------------------------------------------------------------------------------------------------------
// --- convolution: forward and input gradient

// Hopper's kernels can compute neither stride 2 nor upsampling. So such a 3x3 convolution takes a detour: it is
// replaced by a convolution with stride 1, whose output has the size of its input. For upsampling, the forward pass and
// the weight gradient first write the upsampled input to the workspace. The input gradient first writes the gradient of
// the upsampled input there, and then sums it over 2 x 2 pixels. For stride 2, both gradients first write the gradient
// of the output to the workspace, with zeros between its pixels. (A forward pass of stride 2 has a detour of another
// kind, see conv_forward.) The detour moves more bytes. But it can use wgmma, so it is two to four times as fast.
// Without wgmma (with mma.sync) only the gradient of an upsampled input takes the detour, which saves 17 to 45 % of the
// time.
static ConvShape conv_without_detour(ConvShape s) { // returns the convolution that replaces s
    s.H <<= s.upsample;
    s.W <<= s.upsample;
    s.upsample = 0;
    s.stride = 1;
    return s;
}
static bool conv_takes_detour(const ConvShape& s) {
    const bool one_of_both = (s.stride == 2) != (s.upsample == 1);
    return s.kernel == 3 && one_of_both && conv_is_wgmma(conv_without_detour(s));
}
static size_t conv_detour_bytes(const ConvShape& s) {
    if (conv_is_few(s)) return few_bytes(s);
    if (!s.upsample && !conv_takes_detour(s)) return 0;
    const ConvShape one = conv_without_detour(s);
    // What the workspace holds: with upsampling, the upsampled input or its gradient, which have the channels of the
    // input. With stride 2, the output of the convolution with stride 1 (forward), or the output's gradient with zeros
    // put in (backward), which have the channels of the output.
    const int channels = s.upsample ? s.C1 : s.Cout;
    const size_t bytes = (size_t)one.B * one.H * one.W * channels * act_bytes();
    return (bytes + 255) / 256 * 256;
}

// Must this layer's weight gradient be computed alone, without sharing a launch with those of other layers? Such a
// layer is first replaced by another convolution, whose shape conv_weight_shape returns.
static bool conv_weight_alone(const ConvShape& s) { return conv_is_few(s) || conv_takes_detour(s); }
static ConvShape conv_weight_shape(const ConvShape& s) {
    return conv_is_few(s) ? few_shape(s, true) : conv_without_detour(s);
}

// Returns a measure of conv_halo's time with this tile: the number of rounds of blocks times a block's channels. In a
// round as many blocks run as fit on the GPU at once. The last round may have fewer blocks, but takes as long.
template <class Tile> static int halo_rounds(const ConvCall& c) {
    const int tiles = count_tiles(c, Tile::IMAGES, Tile::TILE_H, Tile::TILE_W);
    const int blocks = tiles * ceil_div(c.Cout, Tile::CHANNELS);
    const int fit = std::clamp(gpu.blocks_of(Tile::SHARED_BYTES), 1, Tile::PER_SM); // blocks that a multiprocessor runs
    const int rounds = ceil_div(blocks, fit * gpu.sms);
    return rounds * Tile::CHANNELS;
}
// Does Tile take at least 10 % less time than Other?
template <class Tile, class Other> static bool halo_is_faster(const ConvCall& c) {
    return halo_rounds<Tile>(c) * 10 <= halo_rounds<Other>(c) * 9;
}
// The choice of conv_halo's tile depends on three questions. Is this the network's last convolution, which has few
// channels? Are the images at most 8 pixels high or wide? Do tiles of 16 x 16 pixels x 64 channels fill the GPU? (In
// bf16 the choice also depends on Cout: see pick_conv_halo_bf16.)
static bool halo_is_last(const ConvCall& c) { return c.s.out == Element::FP32 && conv_is_last(c.s); }
static bool halo_is_small(const ConvCall& c) { return c.H <= 8 || c.W <= 8; }
static bool halo_fills_gpu(const ConvCall& c) {
    const int tiles = count_tiles(c, 1, 16, 16) * ceil_div(c.Cout, 64);
    const int enough = c.Cout % 64 ? 2 : 1; // the GPU is full if there are more tiles for each multiprocessor than this
    return tiles > enough * gpu.sms;
}

// Picks the tile of conv_halo, for 3x3, stride 1, bf16 on any GPU.
template <bool BACKWARD> static void pick_conv_halo_bf16(const ConvCall& c) {
    // HaloTile<type, images, channels, K groups, blocks per multiprocessor>
    using Last = HaloTile<bf16, 1, 16, 1, 4>;
    using Small48 = HaloTile<bf16, 2, 48, 2, 3>;
    using Small32 = HaloTile<bf16, 2, 32, 4, 2>;
    using Large48 = HaloTile<bf16, 1, 48, 1, 2>;
    using Large64 = HaloTile<bf16, 1, 64, 1, 2>;
    using Few32 = HaloTile<bf16, 1, 32, 2, 2>;
    using Few48 = HaloTile<bf16, 1, 48, 2, 1>;
    const bool small = halo_is_small(c);
    const bool many = halo_fills_gpu(c);
    // Tiles of 48 channels are faster for some Cout, because fewer of their channels lie beyond the last channel.
    const bool small_48 = small && halo_is_faster<Small48, Small32>(c);
    const bool large_48 = many && halo_is_faster<Large48, Large64>(c);
    const Way<ConvCall> ways[] = {
        // the network's last convolution has few channels
        {halo_is_last(c), conv_halo<Last, false, float>},
        // images at most 8 pixels high or wide: a block has two images, and K groups give the block more warps. (Each K
        // group, which ProductTile explains, is a set of warps that sums over a part of the input channels.)
        {small_48, conv_halo<Small48, BACKWARD>},
        {small, conv_halo<Small32, BACKWARD>},
        // the largest tiles: there are enough of them to fill the GPU
        {large_48, conv_halo<Large48, BACKWARD>},
        {many, conv_halo<Large64, BACKWARD>},
        // few tiles: a block has fewer channels, and two sets of warps (K groups, see ProductTile) share a tile
        {c.Cout <= 128, conv_halo<Few32, BACKWARD>},
        {true, conv_halo<Few48, BACKWARD>},
    };
    decide(c, ways);
}
// Picks the tile of conv_halo in fp32. It asks the same three questions as in bf16.
template <bool BACKWARD> static void pick_conv_halo_fp32(const ConvCall& c) {
    using Last = HaloTile<float, 1, 16, 1, 2>;
    using Small = HaloTile<float, 2, 32, 2, 2>;
    using Large = HaloTile<float, 1, 64, 1, 2>;
    using Few = HaloTile<float, 1, 32, 1, 3>;
    const Way<ConvCall> ways[] = {
        {halo_is_last(c), conv_halo<Last, false>},
        {halo_is_small(c), conv_halo<Small, BACKWARD>},
        {halo_fills_gpu(c), conv_halo<Large, BACKWARD>},
        {true, conv_halo<Few, BACKWARD>},
    };
    decide(c, ways);
}

// Picks the tile of conv_gather, which computes all convolutions that no other kernel can compute. A tile has 64 or 128
// pixels x 64 channels or, for elements of 2 bytes, 128 pixels x 128 channels.
template <class T, bool BACKWARD> static void pick_conv_gather(const ConvCall& c) {
    const int HW = c.H * c.W;
    const int tiles_of_128 = c.B * ceil_div(HW, 128); // how many tiles of 128 pixels there are
    const bool many_128 = HW > 64 && tiles_of_128 * ceil_div(c.Cout, 64) >= gpu.sms;
    // GatherTile<type, pixels / 64, channels, channels of a warp, stages>
    using Pixels64 = GatherTile<T, 1, 64, 32, 3>;
    using Pixels128 = GatherTile<T, 2, 64, 32, 3>;
    if constexpr (sizeof(T) == 2) { // tiles of 128 x 128 read the fewest bytes
        using Wide = GatherTile<T, 2, 128, 64, 2>;
        const int blocks_of_128 = ceil_div(c.Cout, 128);
        // at most a fifth of the tiles' channels lie beyond the last channel
        const bool little_wasted = blocks_of_128 * 512 <= c.Cout * 5;
        const bool wide = HW > 64 && little_wasted && tiles_of_128 * blocks_of_128 >= 4 * gpu.sms;
        if (wide) return conv_gather<Wide, BACKWARD>(c);
    }
    if (many_128) conv_gather<Pixels128, BACKWARD>(c);
    else conv_gather<Pixels64, BACKWARD>(c);
}

// Decides which kernel computes a convolution. A pick_ function, above, chooses the kernel's tile, by measured costs or
// by a table of its own. Such a table in general chooses the largest tile with which every multiprocessor still has a
// block. On small images pick_conv_small may choose conv_tiles in place of conv_small. The table below shows how a
// layer of the network's list leads to an instruction of the tensor cores. Each function calls the next one below it.
// Brackets hold another name, or another end of the name:
//   in the first two columns it is for FP8, except _1x1, which is for 1x1 convolutions
//   in the last two columns it is for fp32
// In FP8, conv_product_fp8 stands in place of conv_product.
//
//   forward_conv ("The network")     what a layer of kind CONV calls
//   conv_forward                 fills a ConvCall. For upsampling, stride 2 or few channels it may first replace the
//                                convolution by another one
//   conv_product                 chooses the kernel, by the first row of its table whose condition holds
//
//   Hopper, bf16, 3x3 and 1x1;   Hopper, bf16, small images;  any GPU, 3x3, stride 1       any GPU, all others
//   FP8, 3x3                     FP8
//   pick_conv_tiles_3x3 (_1x1)   pick_conv_small              pick_conv_halo_bf16 (_fp32)  pick_conv_gather
//   conv_tiles                   conv_small                   conv_halo                    conv_gather
//   conv_tiles_kernel            conv_small_kernel            conv_halo_kernel             conv_gather_kernel
//                                multiply_small               multiply_step, multiply_tap  multiply
//   Accumulators::multiply (_fp8)                             mma                          mma
//   Wgmma<N>::add (WgmmaFp8)     Wgmma<N>::add (WgmmaFp8)     mma_bf16 (mma_fp16)          mma_bf16 (mma_fp16)
//   wgmma m64nNk16 (k32)         wgmma m64nNk16 (k32)         mma.sync m16n8k16            mma.sync m16n8k16
//
// In conv_tiles N is the number of pixels of a tile (8 for each of its rows), in conv_small it is SmallTile::N. In fp32
// there is no `mma` between multiply_tap, or multiply, and mma_fp16.
//
// For an input's gradient, conv_backward_input calls conv_product, and the functions below it have BACKWARD = true. In
// FP8 conv_backward_input_fp8 calls conv_product_fp8, with BACKWARD = false. (The network's last convolution has few
// channels. Its input gradient is computed by conv_forward, as a 1x1 convolution of rows: see ConvFew.)
template <bool BACKWARD> static void conv_product(const ConvCall& c) {
    const ConvShape& s = c.s;
    if (hopper_conv<BACKWARD>(c)) return;
    const bool halo = conv_is_halo(s);
    if (s.upsample && !halo) die("internal error: upsampled, a convolution must be 3x3 with stride 1");
    // Of the kernels for any GPU, only conv_halo can upsample, and store the last layer's fp32.
    const bool needs_halo = s.upsample || s.out != act_element;

    const bool bf16_is_it = act_element == Element::BF16;
    const bool fp32_is_it = act_element == Element::FP32;
    const Way<ConvCall> ways[] = {
        {halo && bf16_is_it, pick_conv_halo_bf16<BACKWARD>},
        {halo && fp32_is_it, pick_conv_halo_fp32<BACKWARD>},
        {bf16_is_it && !needs_halo, pick_conv_gather<bf16, BACKWARD>},
        {fp32_is_it && !needs_halo, pick_conv_gather<float, BACKWARD>},
    };
    decide(c, ways);
}

static void conv_forward(act* out, Stats* stats, const act* x1, const act* x2, const act* weight, // x2: only if 1x1
                         const float* bias, const float* emb, int emb_stride, const act* residual, ConvShape s,
                         const ConvSkip& skip, const float* factors) {
    if (s.kernel == 3 && s.C2) die("internal error: a 3x3 convolution of two inputs: only skip connections have them");
    const bool detour = conv_takes_detour(s);
    char* const workspace = device.workspace;
    if (detour && s.upsample) {
        upsample_forward(workspace, nullptr, x1, s.B, s.H, s.W, s.C1);
        const ConvShape one = conv_without_detour(s);
        return conv_forward(out, stats, workspace, nullptr, weight, bias, emb, emb_stride, residual, one);
    }
    // Stride 2: one way is to compute all pixels with stride 1, and to keep one of every 2 x 2 pixels. This takes four
    // times as many products, but by the faster kernels, which use wgmma (so the activations are bf16). If there are
    // few pixels, these products take so little time that this way is faster. It can't add a residual. The other way is
    // conv_gather, which computes only the pixels that are kept (conv_product).
    const bool few_pixels = s.B * s.H * s.W <= 1 << 16;
    if (detour && !residual && few_pixels) {
        const ConvShape one = conv_without_detour(s);
        conv_forward(workspace, nullptr, x1, nullptr, weight, bias, emb, emb_stride, nullptr, one);
        return launch_resample<bf16, PICK>(out, stats, workspace, s.B, s.H, s.W, s.Cout);
    }
    if (conv_is_first(s)) {
        const ConvFew p = make_few_rows(s, x1, weight, workspace);
        const ConvShape rows = few_shape(s);
        return conv_forward(out, stats, p.rows, nullptr, p.weight_rows, bias, emb, emb_stride, residual, rows);
    }
    ConvOut o{.part1 = {out, residual}, .Cout1 = s.Cout, .B = s.B};
    o.bias = bias;
    o.emb = emb;
    o.emb_stride = emb_stride;
    o.skip = skip;
    if (stats) {
        o.stats = stats->sums;
        o.parts = &stats->parts;
    }
    ConvCall call{.s = s, .B = s.B, .H = s.out_H(), .W = s.out_W()};
    call.Cin1 = s.C1;
    call.Cin2 = s.C2;
    call.Cout = s.Cout;
    call.x1 = x1;
    call.x2 = x2;
    call.weight = weight;
    call.out = o;
    call.factors = factors;
    conv_product<false>(call);
}

static void conv_backward_input(Grad dx1, Grad dx2, const act* dout, const act* weight, ConvShape s,
                                const float* factors) {
    if (s.out == Element::FP8_GRADIENT) return conv_backward_input_fp8(dx1, dout, weight, s, factors);
    act* const workspace = device.workspace;
    if (s.upsample) { // on any GPU: first the upsampled input's gradient, then sums of 2 x 2 pixels
        conv_backward_input(Grad{workspace}, Grad{}, dout, weight, conv_without_detour(s));
        return upsample_backward(dx1, workspace, s.B, s.H, s.W, s.C1);
    }
    if (conv_takes_detour(s)) { // stride 2
        spread(workspace, dout, s.B, s.H, s.W, s.Cout);
        return conv_backward_input(dx1, Grad{}, workspace, weight, conv_without_detour(s));
    }
    // unet_backward computes the gradient of a tensor only if needs_grad is set (add_layer). It is not set for the
    // first convolution's input: the images, or what layers without a backward pass make of them (JOIN, PATCHES). So
    // the next line ends the program only if somebody adds a layer with a backward pass before the first convolution.
    if (conv_is_first(s)) die("internal error: the gradient of the images, which nobody needs");
    if (conv_is_last(s)) {
        if (dx1.add2) die("a convolution to %d channels has one addend to its input's gradient at most", s.Cout);
        const ConvFew p = make_few_rows(s, dout, weight, device.workspace);
        const ConvShape rows = few_shape(s);
        return conv_forward(dx1.dx, nullptr, p.rows, nullptr, p.weight_rows, nullptr, nullptr, 0, dx1.add1, rows);
    }
    // The kernel's input is dout. The kernel's output has the channels of both inputs of the layer.
    ConvCall call{.s = s, .B = s.B, .H = s.H, .W = s.W};
    call.Cin1 = s.Cout;
    call.Cin2 = 0;
    call.Cout = s.C1 + s.C2;
    call.x1 = dout;
    call.x2 = nullptr;
    call.weight = weight;
    call.out = ConvOut{.part1 = dx1, .part2 = dx2, .Cout1 = s.C1, .Cout2 = s.C2, .B = s.B};
    conv_product<true>(call);
}

// ---------------------------------------------------------------------------------------------------------------------
// --- convolution: weight gradients
// conv_backward_weights is called with several layers at once, so that small layers share a launch:
//
//   conv_backward_weights
//     conv_weight_batch       plans each layer (plan_weight), sorts the layers by kind (weight_kind), plans each kind
//                             as a whole (plan_weights), gives out the workspace (put_partials), and launches:
//       conv_weight_tma, conv_weight_fp8, conv_weight_halo or conv_weight_gather     once for each kind
//       conv_weight_sum                                             once, for the partials of all kinds
//     conv_weight_one         a layer that is first replaced by another one: few channels or, if the new one can use
//                             wgmma, stride 2 or upsampling (conv_takes_detour)
//
// A plan is the number of ranges (splits) into which the pixels are divided and, for conv_weight_tma, the number of
// warpgroups of a block (conv_weight_fp8's always have three). More ranges keep more multiprocessors busy, but each
// range writes partial sums, which a second kernel has to add up.
// Returns how many bytes of the side stream's workspace conv_backward_weights needs for this layer. (conv_detour_bytes
// returns how many bytes of the main stream's workspace conv_forward and conv_backward_input need.)
static size_t conv_workspace(ConvShape s) {
    if (conv_weight_alone(s)) return conv_detour_bytes(s) + conv_workspace(conv_weight_shape(s));
    ConvWeight p = plan_weight(s);
    return put_partials(&p, nullptr);
}

// Launches a portable kernel, which has two versions: `alone` for a single layer, `together` for several. In `alone`
// the compiler knows that the layer is entry 0 of the batch. So a block need not search for its layer, and reads the
// layer's arguments at fixed places among the kernel's parameters.
static void launch_portable(auto* alone, auto* together, const WeightPlans& works, Stream* stream, int threads,
                            int bytes) {
    stream->joined = true; // the kernel must not overlap the work before it: it does not call await_previous_kernel
    if (works.size() == 1) launch_weights(alone, works, stream, threads, bytes, std::identity(), all_blocks);
    else launch_weights(together, works, stream, threads, bytes, std::identity(), all_blocks);
}
template <class T> static void conv_weight_halo(const WeightPlans& works, Stream* stream) {
    launch_portable(conv_weight_halo_kernel<T, 1>, conv_weight_halo_kernel<T, WEIGHT_BATCH>, works, stream, 384,
                    WEIGHT_HALO_BYTES);
}
template <class T, int N> static void conv_weight_gather(const WeightPlans& works, Stream* stream) {
    launch_portable(conv_weight_gather_kernel<T, N, 1>, conv_weight_gather_kernel<T, N, WEIGHT_BATCH>, works, stream,
                    128, WEIGHT_GATHER_STAGES<T, N> * WEIGHT_GATHER_STAGE<T, N>);
}

static WeightKind weight_kind(const ConvWeight& p) {
    const ConvShape& s = p.shape;
    if (is_fp8(s.in)) return s.out_W() > 8 ? FP8_3X3 : FP8_3X3_NARROW;
    if (conv_is_wgmma(s)) {
        if (s.kernel == 1) return TMA_1X1;
        return s.out_W() > 8 ? TMA_3X3 : TMA_3X3_NARROW;
    }
    if (conv_is_halo(s)) return HALO_3X3;
    return p.block_co == 2 ? GATHER_WIDE : GATHER;
}

// Launches the kernel of a kind.
static void launch_weight_kind(WeightKind kind, const WeightPlans& works, Stream* stream) {
    switch (kind) {
    case TMA_1X1:
    case TMA_3X3:
    case TMA_3X3_NARROW:
    case FP8_3X3:
    case FP8_3X3_NARROW: return hopper_weights(kind, works, stream);
    case HALO_3X3: return with_act([&]<class T>(T) { conv_weight_halo<T>(works, stream); });
    case GATHER: return with_act([&]<class T>(T) { conv_weight_gather<T, 1>(works, stream); });
    case GATHER_WIDE:
        return with_act([&]<class T>(T) {
            constexpr int TILES = PARTS<T> == 1 ? 2 : 1; // weight_kind never returns GATHER_WIDE for floats
            conv_weight_gather<T, TILES>(works, stream);
        });
    }
}

// A launch for weight gradients should have a certain amount of work (WEIGHT_LAUNCH_CYCLES). Returns what fraction of
// this amount the layer's weight gradient is. If the fraction is 1 or more, the launch needs no other layers. The
// fraction is at least 1 / WEIGHT_BATCH, because a launch can't compute more than WEIGHT_BATCH layers.
static double conv_weight_load(const ConvShape& s) {
    if (conv_weight_alone(s)) return 1;
    ConvWeight p = plan_weight(s);
    WeightCosts cost = weight_costs(p);
    const bool tma = conv_is_wgmma(s);
    if (tma && !is_fp8(s.in)) {
        set_warpgroups(&p, 1);
        if (s.kernel == 1) cost.tile = 160 + 180 * std::min(3, p.channel_tiles);
        else cost.tile = s.out_W() > 8 ? 830 : 430;
    }
    // A block of a portable kernel takes longer. So a launch of such a kernel must be larger. Otherwise the last round
    // of blocks, which does not fill the GPU, costs too much.
    const double enough = WEIGHT_LAUNCH_CYCLES * (tma ? 1 : 6);
    const double cycles = (double)(range_blocks(p) * cost.tile) * p.pixel_tiles / cost.slots;
    return std::max(1.0 / WEIGHT_BATCH, cycles / enough);
}

// Computes the weight gradients of at most WEIGHT_BATCH layers: with one launch for each kind, and one launch that adds
// up all partials. It leaves out the layers that conv_weight_one computes (conv_weight_alone). If the workspace has no
// room for the partials of all layers, this function computes the layers in two halves.
static void conv_weight_batch(const std::vector<WeightWork>& works, Stream* stream) {
    std::map<WeightKind, WeightPlans> kinds; // the works of each kind
    WeightPlans sums;                        // the works whose partials have to be added up
    for (const WeightWork& w : works) {
        if (conv_weight_alone(w.shape)) continue;
        ConvWeight p = plan_weight(w.shape);
        (WeightWork&)p = w;
        p.bias_images = conv_is_wgmma(w.shape) && !w.demb ? 1 : w.shape.B;
        kinds[weight_kind(p)].push_back(p);
    }
    // Each kind is planned as a whole, and the partials of each work are given a place in the workspace.
    size_t workspace_used = 0;
    for (auto& [kind, plans] : kinds) {
        if (plans.size() > 1) plan_weights(plans);
        for (ConvWeight& p : plans) {
            const size_t bytes = put_partials(&p, stream->workspace + workspace_used);
            if (p.splits == 1 && conv_is_wgmma(p.shape)) continue; // p has no partials
            sums.push_back(p);
            workspace_used += bytes;
        }
    }
    if (works.size() > 1 && workspace_used > stream->workspace_bytes) {
        const auto middle = works.begin() + works.size() / 2;
        conv_weight_batch({works.begin(), middle}, stream);
        return conv_weight_batch({middle, works.end()}, stream);
    }
    for (const auto& [kind, plans] : kinds) launch_weight_kind(kind, plans, stream);
    launch_weights(conv_weight_sum, sums, stream, dim3(32, 8), 0, std::identity(), [](const ConvWeight& p) {
        const int weights = p.splits > 1 ? p.tiles * p.taps * 32 * weight_sum_groups(p.splits) / 8 : 0;
        return bias_sum_blocks(p.shape.Cout) + weights;
    });
}

// Computes the weight gradient of a layer that is first replaced by another one (conv_weight_alone). Layers with
// upsampling or stride 2 come here only if the new layer can use wgmma (conv_takes_detour):
//   few channels   The layer becomes a 1x1 convolution of rows (see the comments above ConvFew). The weight gradient of
//                  that convolution is computed first. From it, conv_few_gradient computes the layer's own gradient.
//   upsampling     x is first upsampled. Then the layer is a convolution without upsampling.
//   stride 2       dout is first spread out: zeros are put between its pixels. Then the layer is a convolution with
//                  stride 1.
static void conv_weight_one(WeightWork w, Stream* stream) {
    const ConvShape s = std::exchange(w.shape, conv_weight_shape(w.shape));
    char* const detour = stream->workspace + conv_workspace(w.shape); // after the workspace of the new convolution
    if (conv_is_few(s)) {
        const act*& few = conv_is_last(s) ? w.dout : w.x1;
        ConvFew p = make_few_rows(s, few, nullptr, detour, stream);
        p.dweight = std::exchange(w.dweight, p.product);
        if (p.is_last_layer) p.dbias = std::exchange(w.dbias, p.bias);
        few = p.rows;
        conv_weight_batch({w}, stream);
        return launch_on(stream, 1, conv_few_gradient, ceil_div(9 * p.F * p.C, 256), 256, 0, p);
    }
    if (s.upsample) {
        launch_resample<bf16, REPEAT>(detour, nullptr, w.x1, s.B, s.H, s.W, s.C1, stream);
        w.x1 = detour;
    } else {
        spread(detour, w.dout, s.B, s.H, s.W, s.Cout, stream);
        w.dout = detour;
    }
    conv_weight_batch({w}, stream);
}

// The operation of the interface: computes weight gradients. First come all layers that can share launches: one launch
// for each kind of kernel, and one that adds up partial sums in a fixed order. Then come the other layers, one by one.
static void conv_backward_weights(const std::vector<WeightWork>& works, Stream* stream) {
    conv_weight_batch(works, stream);
    for (const WeightWork& w : works)
        if (conv_weight_alone(w.shape)) conv_weight_one(w, stream);
}

// =====================================================================================================================
// The GPU: memory, copies, repeated work
//
// There are three streams. The main stream has a high priority and runs nearly everything. The side stream has a low
// priority: its kernels fill multiprocessors that the main stream leaves free. The copy stream copies the next batch to
// the GPU while the current batch is computed. (With several GPUs there is a fourth stream, `sender` in section 24.)
// CUDA events order the work of different streams: a stream waits for an event of another stream, while the host goes
// on.

// Returns the largest number of parts that a tensor's Stats can have for an image of H x W pixels. How large a part is
// depends on the kernel that writes the tensor: the pixels of a part may be those of a tile, only some of these, or all
// pixels of the image. The smallest parts are squares of 8 x 8 pixels, or 64 consecutive pixels (conv_gather).
static int max_stat_parts(int H, int W) { return ceil_div(H, 8) * ceil_div(W, 8); }

// A kernel that does nothing. code_version asks the runtime for which architecture this kernel was compiled. All
// kernels of this binary were compiled for the same architecture.
static __global__ void nothing_kernel() { await_previous_kernel(); }

static cudaDeviceProp properties; // the properties of this process's GPU, as CUDA reports them
static cudaStream_t side_queue;   // the queue of low priority, which the side stream uses if allowed.beside is true

// Returns how many GPUs the program can use. Without a driver this is 0.
static int count_gpus() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

// Returns the number of the GPU that this process uses. If there is only one process, this is the argument `number`
// (--device). If the process can't use this GPU, the function ends the program with a message that tells the reason.
static int choose_device(int number) {
    int count = 0, driver = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    CUDA_CHECK(cudaDriverGetVersion(&driver)); // sets driver to 0 if no driver is installed
    if (error == cudaErrorInsufficientDriver && driver)
        die("this GPU's driver is too old for the program: it knows CUDA %d.%d, and the program was built with %d.%d; "
            "update the driver, or build with a CUDA toolkit that is no newer than it (make -B train_unet "
            "NVCC=/path/to/nvcc); make train_unet_cpu needs neither",
            driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    if (error != cudaSuccess || !count)
        die("this is the GPU build and there is no GPU that it can use (%s); make train_unet_cpu needs none",
            cudaGetErrorString(error));
    // If several processes run on a machine, each of them uses a different GPU.
    if (world.size > 1 && count == 1) number = 0; // some launchers show each process only its own GPU
    else if (world.size > 1) number += world.local_rank;
    if (world.size > 1 && number >= count)
        die("process %d of this machine finds %d GPUs; start one for each", world.local_rank + 1, count);
    if (number >= count)
        die("--device %d: the program can use %d GPUs, from 0 on (CUDA_VISIBLE_DEVICES, if set, says which)", number,
            count);
    return number;
}

// Returns the architecture of the code that GPU `number` runs: 80 if the code was compiled for compute capability 8.0,
// and so on. On a newer GPU the driver may translate this code, but the result is still 80.
static int code_version(int number) {
    cudaFuncAttributes code;
    const cudaError_t found = cudaFuncGetAttributes(&code, nothing_kernel);
    if (found != cudaSuccess && properties.major < 8)
        die("GPU %d has compute capability %d.%d, and the GPU build needs 8.0 or later (A100, RTX 30); make "
            "train_unet_cpu builds the program for the processor",
            number, properties.major, properties.minor);
    if (found != cudaSuccess)
        die("this binary holds no code for GPU %d, of compute capability %d.%d (%s); make -B train_unet builds it for "
            "the GPUs of this machine",
            number, properties.major, properties.minor, cudaGetErrorString(found));
    return code.ptxVersion;
}

// Chooses the GPU, fills in `gpu` (the properties that the choice of kernels depends on), sets act_element, and makes
// the streams.
static void start_device(const std::string& precision, int number) {
    number = choose_device(number);
    CUDA_CHECK(cudaSetDevice(number));
    CUDA_CHECK(cudaGetDeviceProperties(&properties, number));
    const int version = code_version(number);
    gpu = {.sms = properties.multiProcessorCount,
           .shared_per_sm = (int)properties.sharedMemPerMultiprocessor,
           .shared_per_block = (int)properties.sharedMemPerBlockOptin,
           .overlap = version >= 90,
           .clusters = version >= 90 && allowed.clusters,
           // Code for compute capability 9.0 is always compiled for sm_90a, which has wgmma. The #error at the head of
           // gpu/shared.h makes sure of that.
           .wgmma = version == 90 && allowed.hopper && BUILT_WITH_HOPPER};
    act_element = element_named(precision, Element::BF16);
    if (precision == "fp8" && !gpu.wgmma)
        die("--precision fp8: needs an H100 or H200 (compute capability 9.0), and GPU %d has %d.%d; use bf16", number,
            properties.major, properties.minor);
    int low, high; // the lowest and the highest priority of a stream
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&low, &high));
    CUDA_CHECK(cudaStreamCreateWithPriority(&device.queue, cudaStreamDefault, high));
    CUDA_CHECK(cudaStreamCreateWithPriority(&side_queue, cudaStreamNonBlocking, low));
    device.side.queue = allowed.beside ? side_queue : device.queue;
    CUDA_CHECK(cudaStreamCreateWithFlags(&device.copy_stream, cudaStreamNonBlocking));
}

static std::string device_name() { return properties.name; }

// Returns memory that the main stream fills with zeros.
static void* device_alloc_bytes(size_t bytes) {
    void* p = nullptr;
    const cudaError_t error = cudaMalloc(&p, bytes);
    if (error != cudaSuccess && error != cudaErrorMemoryAllocation)
        die("CUDA: %s (cudaMalloc of %zu bytes)", cudaGetErrorString(error), bytes);
    if (error != cudaSuccess)
        die("%.2f GiB of GPU memory could not be had (%.2f of %.2f GiB are free); a smaller --batch_size or a "
            "--microbatch needs less",
            bytes / 0x1p30, device_available() / 0x1p30, properties.totalGlobalMem / 0x1p30);
    CUDA_CHECK(cudaMemsetAsync(p, 0, bytes, device.queue));
    device_bytes += bytes;
    return p;
}

static void device_free(void* p) { CUDA_CHECK(cudaFree(p)); }

static size_t device_available() {
    size_t available = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&available, &total));
    return available;
}

// copy_to_device and copy_to_host wait until the main stream has done all its work so far and the copy is complete.
static void copy_to_device(void* to, const void* host, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, device.queue));
    CUDA_CHECK(cudaStreamSynchronize(device.queue));
}
static void copy_to_host(void* host, const void* from, size_t bytes) {
    CUDA_CHECK(cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, device.queue));
    CUDA_CHECK(cudaStreamSynchronize(device.queue));
}

// Runs work() as a CUDA graph. The first call for a graph g calls work() and records its launches, without running
// them. Every call, including the first, then launches the whole recording at once. This saves time: a training step
// has hundreds of launches, and each launch costs the host microseconds. The arguments of a launch (pointers, sizes)
// stay as they were recorded. So everything that changes from step to step lies in device memory. If allowed.graphs is
// false, replay only calls work().
template <class F> static void replay(Graph* g, F work) {
    if (!allowed.graphs) return work();
    if (!g->exec) {
        cudaGraph_t graph;
        CUDA_CHECK(cudaStreamBeginCapture(device.queue, cudaStreamCaptureModeRelaxed));
        work();
        CUDA_CHECK(cudaStreamEndCapture(device.queue, &graph));
        CUDA_CHECK(cudaGraphInstantiate((cudaGraphExec_t*)&g->exec, graph, 0));
        CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &g->nodes));
        CUDA_CHECK(cudaGraphDestroy(graph));
    }
    CUDA_CHECK(cudaGraphLaunch((cudaGraphExec_t)g->exec, device.queue));
}

// Destroys a graph. First waits for the main stream, because a graph must not be destroyed while it runs.
static void free_graph(Graph* g) {
    CUDA_CHECK(cudaStreamSynchronize(device.queue));
    if (g->exec) CUDA_CHECK(cudaGraphExecDestroy((cudaGraphExec_t)g->exec));
    g->exec = nullptr;
}

// Calls work(side stream), which launches kernels on the side stream. These kernels begin after the main stream has
// done all its work so far. Later, wait_for_side(ticket) makes the main stream wait until these kernels have ended. The
// ticket is a number that the caller chooses. It tells wait_for_side which call of run_beside is meant.
static std::map<int, cudaEvent_t> side_events; // for each ticket: the event that its kernels have ended
template <class F> static void run_beside(int ticket, F work) {
    follow(&device.side, device);
    work(&device.side);
    record(&side_events[ticket], device.side.queue);
}
static void wait_for_side(int ticket) { follow(MAIN_STREAM, side_events[ticket]); }

// An Upload u is used again and again, in three steps:
//   1. The host fills u->host.
//   2. send copies u->host to u->device, in the copy stream. The copy begins when the main stream has done all the work
//      before the latest call of release, because this work still reads the old content of u->device.
//   3. The main stream waits for the copy and reads u->device. When the host has launched all kernels that read
//      u->device, it calls release.
//
//   host           fill        fill (waits until `sent`)
//   copy stream        copy         copy (waits until `released`)
//   main stream            compute      compute (waits until `sent`)
static void release(Upload* u) { record((cudaEvent_t*)&u->released, device.queue); }
static Upload make_upload(size_t bytes) {
    Upload u{nullptr, (uint8_t*)device_alloc_bytes(bytes), bytes, nullptr, nullptr};
    CUDA_CHECK(cudaMallocHost(&u.host, bytes));
    record((cudaEvent_t*)&u.sent, device.copy_stream);
    release(&u); // the first copy has to wait until the main stream has filled u.device with zeros
    return u;
}
static void wait_for_host_side(Upload* u) { CUDA_CHECK(cudaEventSynchronize((cudaEvent_t)u->sent)); }
static void send(Upload* u) {
    CUDA_CHECK(cudaStreamWaitEvent(device.copy_stream, (cudaEvent_t)u->released));
    CUDA_CHECK(cudaMemcpyAsync(u->device, u->host, u->bytes, cudaMemcpyHostToDevice, device.copy_stream));
    record((cudaEvent_t*)&u->sent, device.copy_stream);
    CUDA_CHECK(cudaStreamWaitEvent(device.queue, (cudaEvent_t)u->sent));
}

// If *memory has fewer than `wanted` bytes, replaces it by an allocation of `wanted` bytes. The old content is lost.
static void grow(char** memory, size_t* bytes, size_t wanted) {
    if (wanted <= *bytes) return;
    if (*memory) device_free(*memory);
    *bytes = wanted;
    *memory = device_alloc<char>(wanted);
}
// Allocates memory that operations need: a workspace for the main stream, which all its operations share, and for
// training also a workspace for the side stream, and memory for the sums of group norms.
static void reserve(const Workspace& most, bool training) {
    // Here a batch is up to WEIGHT_BATCH layers whose weight gradients are computed together. The side stream's
    // workspace has room for the partials of most batches. A partial has 16384 bytes. If the partials of a batch need
    // more room, conv_weight_batch computes first one half of the batch's layers, and then the other half.
    const size_t for_most_batches = (size_t)2 * MAX_WEIGHT_PARTIALS * 16384;
    if (training) {
        grow(&device.norm_sums, &device.norm_sums_bytes, most.sums);
        grow(&device.side.workspace, &device.side.workspace_bytes, std::max(most.side, for_most_batches));
    }
    grow(&device.workspace, &device.workspace_bytes, most.main);
}
#endif
