// model_file.h - model files: weights and checkpoints, initial weights.
#pragma once
#include "../trainer.h"

// =====================================================================================================================
// Model files: weights and checkpoints, initial weights
// A model file is a header and then arrays in fp32, each with one number for every parameter: the weights (in a
// snapshot, ema_STEP.bin, an average of them); with the bit HAS_EMA an average; with HAS_TRAINING AdamW's two moments
// and further averages. The checkpoint of a run with --schedule_sampler loss-second-moment ends with the latest losses
// at each timestep. In each array the tensors are in the order and the layout of PyTorch's state_dict
// (docs/FORMATS.md).

constexpr int MODEL_MAGIC = 20261121;
constexpr int UNET_CU_MODEL_MAGIC = 12345678; // of unet.cu's own model files, which Python converts

// The bits of SLOT_CONTENTS: what the file holds besides the weights.
constexpr int HAS_EMA = 1;
constexpr int HAS_TRAINING = 2;

// Slots of a header; those of flags are in unet/flags.h, and have a name here if code uses them. If a value fills
// several slots, this is the first.
constexpr int SLOT_CONTENTS = 2;
constexpr int SLOT_CRC = 3;    // the checksum of the whole file, computed with 0 in this slot
constexpr int SLOT_PARAMS = 4; // 8 bytes: the number of parameters
constexpr int SLOT_HEIGHT = 6; // the height of image_size
constexpr int SLOT_WIDTH = 7;  // the width of image_size
constexpr int SLOT_IN_CHANNELS = 8;
constexpr int SLOT_CLASS_COND = 14;
constexpr int SLOT_NUM_CLASSES = 15;
constexpr int SLOT_LEARN_SIGMA = 16;
constexpr int SLOT_LEVELS = 22;      // how many numbers channel_mult has
constexpr int SLOT_MULT = 23;        // channel_mult, MOST_LEVELS floats
constexpr int SLOT_RESOLUTIONS = 31; // how many numbers attention_resolutions has
constexpr int SLOT_ATTENTION = 32;   // attention_resolutions, MOST_LEVELS numbers
constexpr int SLOT_MAX_PERIOD = 40;
// diffusion_steps. The slots from here to SLOT_PATCH_SIZE - 1 are about the diffusion and its loss, except
// SLOT_CLASS_DROPOUT.
constexpr int SLOT_DIFFUSION = 41;
constexpr int SLOT_OBJECTIVE = 43;
constexpr int SLOT_VLB_WEIGHT = 47;
constexpr int SLOT_SIGMA_SMALL = 49;
constexpr int SLOT_CLASS_DROPOUT = 50;
constexpr int SLOT_P_MEAN = 52;
constexpr int SLOT_P_STD = 53;
constexpr int SLOT_PATCH_SIZE = 56;
constexpr int SLOT_COND_DIM = 58;
constexpr int SLOT_COND_CHANNELS = 60;
constexpr int SLOT_COND = 62; // the number of a PictureKind; the next slot holds picture_factor
// The slots from here on are about a run. The step and the seed are in every model file, the others only with
// HAS_TRAINING.
constexpr int SLOT_STEP = 64; // 8 bytes; in a snapshot, the number of updates instead (save_snapshot)
constexpr int SLOT_SEED = 66; // 8 bytes
constexpr int SLOT_BATCH_SIZE = 68;
constexpr int SLOT_MAX_STEPS = 70;
constexpr int SLOT_EMA_RATE = 79; // the rate of the first average
constexpr int SLOT_UPDATES = 81;
constexpr int SLOT_BAD_TOTAL = 82;
constexpr int SLOT_BAD_IN_ROW = 83;
constexpr int SLOT_IMAGES = 84;     // 8 bytes: how many images the data file has
constexpr int SLOT_DATA_CRC = 86;   // the data file's header_crc
constexpr int SLOT_GUARD_KIND = 87; // 1; 0: the guard is an older program's, without logarithms, and is not used
constexpr int SLOT_GUARD = 88;      // 40 bytes: the run's Guard
constexpr int SLOT_EMAS = 98;       // how many averages there are besides the first; the next slots hold their rates
constexpr int SLOT_SAMPLER = 106;   // schedule_sampler
constexpr int SLOT_ECT = 107;       // ect_q; the other flags whose names begin with ect_ follow, except ect_frame
constexpr int SLOT_ECT_D = 110;
constexpr int SLOT_ECT_END = 113;  // the first slot after the slots of these ect_ flags
constexpr int SLOT_COND_CRC = 113; // with cond_channels: the header_crc of --cond_file
constexpr int SLOT_COND_NOISE = 114;
constexpr int SLOT_PRECISION = 115;     // the run's --precision
constexpr int SLOT_OPTIMIZER = 116;     // the run's --optimizer
constexpr int SLOT_PRESET = 117;        // the run's preset (preset_checksum)
constexpr int SLOT_VAL_CRC = 118;       // validation_crc
constexpr int SLOT_CLASS_NAMES = 119;   // bytes of the classes' names (class_names_block), at the end of the file
constexpr int SLOT_SAVE_INTERVAL = 120; // then sample_interval, num_samples; 0: an older file has none of these
constexpr int SLOT_INTERVALS_END = 123;
constexpr int SLOT_VAL_FRACTION = 123; // the slots behind it, to SLOT_PATH, are unused
constexpr int SLOT_PATH = 128;         // 512 bytes: the path of --data_file, a zero byte, the path of --cond_file
constexpr int MOST_LEVELS = 8;         // how many numbers channel_mult may have, and how many attention_resolutions

// Returns the objective's name, or "" if there is no objective of the header's number: then the file is damaged.
static std::string objective_of(const Header& h) {
    const std::vector<std::string> words = choices(*find_flag("objective"));
    const size_t number = h.slot[SLOT_OBJECTIVE];
    return number < words.size() ? words[number] : "";
}

static bool is_ect(const Header& h) { return objective_of(h) == "ect"; }

// Returns whether a model with this header uses a flag. If it does not, the flag's slot is 0.
static bool slot_is_used(const Header& h, const Flag& f) {
    const bool classes = h.slot[SLOT_CLASS_COND] == 1;
    if (f.slot == SLOT_NUM_CLASSES) return classes;
    if (f.slot == SLOT_CLASS_DROPOUT) return classes || h.slot[SLOT_COND_DIM] > 0;
    if (f.slot == SLOT_VLB_WEIGHT) return h.slot[SLOT_LEARN_SIGMA] == 1;
    const bool is_interval = f.slot >= SLOT_SAVE_INTERVAL && f.slot < SLOT_INTERVALS_END;
    if (is_interval) return h.slot[SLOT_SAVE_INTERVAL] != 0;
    const std::string objectives = f.objectives;
    if (objectives.empty()) return true;
    return ("|" + objectives + "|").find("|" + objective_of(h) + "|") != std::string::npos;
}

// Returns a checksum of a preset's name, for which a header has no room. is_default: the program has chosen the preset.
static uint32_t preset_checksum(const std::string& preset, bool is_default) {
    const std::string told = preset + (is_default ? ", by default" : "");
    return crc32(0, told.data(), told.size());
}

// Makes a header that holds the configuration (docs/FORMATS.md lists the slots). If a flag's value is a word, its
// number in the flag's list is stored.
static Header model_header(const Config& config, int contents, int64_t step) {
    Header h{{MODEL_MAGIC, 1, contents}}; // 1: the version of the format
    h.set(SLOT_STEP, step);
    h.set(SLOT_SEED, config.seed);
    h.slot[SLOT_HEIGHT] = config.H;
    h.slot[SLOT_WIDTH] = config.W;
    if (contents & HAS_TRAINING) h.slot[SLOT_SAVE_INTERVAL] = config.save_interval; // so slot_is_used is true
    // This loop must go in the order of FLAGS, because slot_is_used reads slots that earlier flags have filled.
    for (const Flag& f : FLAGS) {
        const bool is_of_run = f.slot > SLOT_STEP;
        if (!f.slot || (is_of_run && !(contents & HAS_TRAINING)) || !slot_is_used(h, f)) continue;
        const std::string value = flag_value(config, f);
        const std::vector<std::string> words = choices(f);
        if (const float* real = f.at<float>(config)) h.set(f.slot, *real);
        else if (words.empty()) h.slot[f.slot] = std::stoi(value);
        else h.slot[f.slot] = (int)(std::ranges::find(words, value) - words.begin());
    }
    const int levels = (int)config.mult.size();
    h.slot[SLOT_LEVELS] = levels;
    for (int i = 0; i < levels; i++) h.set(SLOT_MULT + i, config.mult[i]);
    h.slot[SLOT_RESOLUTIONS] = (int)config.attention_heights.size();
    std::ranges::copy(config.attention_heights, h.slot + SLOT_ATTENTION);
    h.slot[SLOT_COND] = (int)config.picture_kind;
    h.slot[SLOT_COND + 1] = config.picture_factor;
    return h;
}

// Returns the value that a header holds for a flag with a slot, as a user would type it.
static std::string header_value(const Config& c, const Header& h, const Flag& f) {
    if (f.at<float>(c)) return text("%.9g", h.get<float>(f.slot));
    const std::vector<std::string> words = choices(f);
    const size_t number = h.slot[f.slot];
    return number < words.size() ? words[number] : std::to_string(h.slot[f.slot]);
}

// Returns whether two values of a flag mean the same, as --image_size 64 and 64x64, or --attention_resolutions 8,16 and
// 16,8.
static bool same_value(const std::string& name, const std::string& a, const std::string& b) {
    auto parsed = [&](std::string list) {
        std::vector<float> v;
        std::ranges::replace(list, 'x', ',');
        if (!parse_list(list, &v)) v.clear();
        if (name == "image_size" && v.size() == 1) v.push_back(v[0]);
        if (name == "attention_resolutions") std::ranges::sort(v);
        return v;
    };
    return a == b || (!parsed(a).empty() && parsed(a) == parsed(b));
}

// A model file that was checked. Its arrays are read later, when the network has been built. Array 0 is the weights, 1
// the first average, 2 and 3 are AdamW's moments (2: of Muon's matrices, its momentum), from 4 on there are further
// averages. Without HAS_TRAINING there are at most arrays 0 and 1.
struct ModelFile : InputFile {
    std::vector<std::string> class_names; // by the classes' numbers; or empty

    // Returns whether the file holds everything that these bits stand for (HAS_EMA, HAS_TRAINING).
    bool has(int bits) const { return (header.slot[SLOT_CONTENTS] & bits) == bits; }

    // How many averages the file holds; the rate of the k-th, and the number of its array.
    int emas() const {
        if (has(HAS_EMA | HAS_TRAINING)) return 1 + header.slot[SLOT_EMAS];
        return has(HAS_EMA);
    }
    float ema_rate(int k) const { return header.get<float>(k ? SLOT_EMAS + k : SLOT_EMA_RATE); }
    static int ema_array(int k) { return k ? 3 + k : 1; }

    // Returns how many floats follow the arrays: for --schedule_sampler loss-second-moment, HISTORY losses for each
    // timestep and how many of them are stored (remember_losses).
    size_t history() const {
        const bool keeps_losses = has(HAS_TRAINING) && header.slot[SLOT_SAMPLER];
        return keeps_losses ? (size_t)header.slot[SLOT_DIFFUSION] * (HISTORY + 1) : 0;
    }

    // Returns the run's counters and its guard.
    StepState state() const {
        StepState s{};
        s.step = header.get<int64_t>(SLOT_STEP);
        s.updates = header.slot[SLOT_UPDATES];
        s.bad_total = header.slot[SLOT_BAD_TOTAL];
        s.bad_in_row = header.slot[SLOT_BAD_IN_ROW];
        if (header.slot[SLOT_GUARD_KIND]) s.guard = header.get<Guard>(SLOT_GUARD);
        return s;
    }
};

// Ends the program if the value of a header's field does not lie between low and high.
static void check_field(const std::string& path, const char* field, int64_t value, int64_t low, int64_t high) {
    if (value < low || value > high)
        die("%s: its header is damaged (%s: %ld, where %ld to %ld is possible): "
            "move it away and use an earlier checkpoint",
            path.c_str(), field, value, low, high);
}

// Checks the lengths of the header's lists, and that slots that have no meaning in this file are 0.
static void check_lists(const ModelFile& m) {
    const int* s = m.header.slot;
    check_field(m.path, "levels", s[SLOT_LEVELS], 1, MOST_LEVELS);
    check_field(m.path, "attention resolutions", s[SLOT_RESOLUTIONS], 0, MOST_LEVELS);
    // If a list has fewer numbers than it has slots, it uses only its first slots. The other slots must be 0.
    const bool training = s[SLOT_CONTENTS] & HAS_TRAINING;
    auto unused = [&](int first, int end) {
        check_unused(m.header, first, end, m.path, ": use an earlier checkpoint");
    };
    unused(SLOT_MULT + s[SLOT_LEVELS], SLOT_RESOLUTIONS);
    unused(SLOT_ATTENTION + s[SLOT_RESOLUTIONS], SLOT_MAX_PERIOD);
    if (training) check_field(m.path, "guard", s[SLOT_GUARD_KIND], 0, 1);
    else unused(SLOT_BATCH_SIZE, SLOT_CLASS_NAMES);
    unused(SLOT_EMAS + m.emas(), SLOT_SAMPLER);
    unused(is_ect(m.header) ? SLOT_ECT_END : SLOT_ECT, SLOT_COND_CRC);
    if (!s[SLOT_COND_CHANNELS]) unused(SLOT_COND_CRC, SLOT_PRECISION);
    unused(training ? SLOT_VAL_FRACTION + 1 : SLOT_CLASS_NAMES + 1, training ? SLOT_PATH : 256);
}

// Opens a model file and checks all that can be checked without its network.
static ModelFile open_model(const std::string& path) {
    ModelFile m;
    m.open(path, "checkpoints are called model_STEP.bin");
    const int* s = m.header.slot;
    const int magic = s[SLOT_MAGIC];
    const int version = s[SLOT_VERSION];
    if (magic == UNET_CU_MODEL_MAGIC)
        die("%s: is a model of unet.cu; `python train_unet.py --convert %s model.bin` makes one of it that this "
            "program reads",
            path.c_str(), path.c_str());
    const char* hint = "python train_unet.py --convert makes one from .pt and .safetensors";
    must(magic == MODEL_MAGIC, path,
         text("is not a model file (it starts with %d, not %d); %s", magic, MODEL_MAGIC, hint));
    must(version == 1, path, text("is a model file of version %d and this program reads version 1", version));

    // The numbers that the size of the arrays depends on. The checksum has not been compared yet.
    const int64_t n = m.header.get<int64_t>(SLOT_PARAMS);
    const int contents = s[SLOT_CONTENTS];
    const bool training = contents & HAS_TRAINING;
    check_field(path, "contents", contents, 0, HAS_EMA | HAS_TRAINING);
    check_field(path, "parameters", n, 1, (int64_t)1 << 40);
    if (training) check_field(path, "further averages", s[SLOT_EMAS], 0, MORE_EMAS);
    const int name_bytes = s[SLOT_CLASS_NAMES];
    check_field(path, "bytes of the classes' names", name_bytes, 0, s[SLOT_CLASS_COND] == 1 ? MOST_NAME_BYTES : 0);

    // Check the size, and the checksum of the whole file.
    const std::string earlier = ": move it away and use an earlier checkpoint";
    const int arrays = 1 + m.emas() + (training ? 2 : 0);
    const size_t size = 1024 + (arrays * n + m.history()) * sizeof(float) + name_bytes;
    must(m.size == size, path,
         text("is %zu bytes long, but its header speaks of %zu; it was cut short or damaged", m.size, size) + earlier);
    Header zeroed = m.header;
    zeroed.slot[SLOT_CRC] = 0;
    const uint32_t crc = m.crc(crc32(0, zeroed.slot, 1024), 1024);
    must(crc == (uint32_t)s[SLOT_CRC], path, "its checksum is wrong, so it was damaged" + earlier);
    // The checksum was right. If a list is wrong all the same, the program that wrote the file made a mistake.
    check_lists(m);
    std::string names(name_bytes, '\0');
    m.read(names.data(), name_bytes, m.size - name_bytes);
    m.class_names = read_class_names(path, names, s[SLOT_NUM_CLASSES]);
    return m;
}

// Returns, for each of `count` classes of a run that starts from a model file (--init), its row in the file's table of
// classes, or -1: the file does not know it. Classes are the same if their names are. Without names, the file knows
// data of no more classes than its own, by their numbers.
static std::vector<int> class_rows(const ModelFile& m, const Dataset& d, int count) {
    const int classes = m.header.slot[SLOT_NUM_CLASSES];
    const bool has_names = !m.class_names.empty() && !d.class_names.empty();
    std::vector<int> rows(count, -1);
    for (int k = 0; k < count; k++) {
        if (!has_names && k < classes && d.classes <= classes) rows[k] = k;
        if (!has_names || k >= std::ssize(d.class_names)) continue;
        const auto found = std::ranges::find(m.class_names, d.class_names[k]);
        if (found != m.class_names.end()) rows[k] = (int)(found - m.class_names.begin());
    }
    return rows;
}

// Copies one parameter between our layout and PyTorch's. Our layout is (N, I, J, contiguous), and PyTorch's layout is
// (N, J, I, contiguous). The last dimension, `contiguous`, is how many floats lie side by side in both layouts. The two
// layouts differ only for these parameters:
//   convolutions                   ours: (Cout, kh kw, Cin), theirs: (Cout, Cin, kh kw)
//   qkv, in guided-diffusion's     ours: [q k v][head], theirs: [head][q k v]
//   old order of attention
// to_file: true: from our layout to PyTorch's; false: from PyTorch's to ours.
static void permute_param(const Config& c, const Param& p, float* to, const float* from, bool to_file) {
    size_t N = 1, I = 1, J = 1; // with these values both layouts are the same
    if (p.heads && !c.use_new_attention_order) {
        I = 3;
        J = p.heads;
    } else if (p.of_conv) {
        N = p.shape[0];
        I = p.shape[2] * p.shape[3];
        J = p.shape[1];
    }
    const size_t contiguous = p.size / (N * I * J);
    for (size_t n = 0; n < N; n++)
        for (size_t i = 0; i < I; i++)
            for (size_t j = 0; j < J; j++) {
                const size_t ours = ((n * I + i) * J + j) * contiguous;
                const size_t theirs = ((n * J + j) * I + i) * contiguous;
                float* const written = to + (to_file ? theirs : ours);
                memcpy(written, from + (to_file ? ours : theirs), contiguous * sizeof(float));
            }
}

// Ends the program unless a model file holds as many parameters as this network has.
static void check_size(const ModelFile& m, const UNet& net) {
    const size_t n = net.num_params;
    const bool holds = m.header.get<size_t>(SLOT_PARAMS) == n;
    if (!holds) die("%s: does not hold the %zu parameters of its model", m.path.c_str(), n);
}

// Returns how n floats are divided among ranks, and the slice of one rank. A single rank owns all, in one segment.
static Slice slice_of(size_t n, int rank = 0, int ranks = 1) {
    int segments = 1;
    if (ranks > 1) segments = world.direct ? 16 : 8; // fewer with NCCL and MPI: they need a call for each segment
    const size_t row = STRETCH * segments * ranks;   // how many floats all segments have if each part is one stretch
    const size_t stretches = (n + row - 1) / row;    // how many stretches each part needs for n floats; rounded up
    return Slice{n, segments, (int)stretches, rank, ranks};
}

// Copies a rank's slice of a flat array from the host to the device. device: where the slice begins in device memory.
static void copy_slice(float* device, const std::vector<float>& flat, const Slice& own) {
    for (int s = 0; s < own.segments; s++) {
        const size_t first = own.at(s, own.rank);
        if (first >= own.n) continue; // this part holds only padding
        const size_t count = std::min(own.each(), own.n - first);
        copy_to_device(device + s * own.each(), flat.data() + first, count * sizeof(float));
    }
}

// Reads the k-th array of a model file, as a flat array.
static std::vector<float> read_array(const ModelFile& m, const UNet& net, int k) {
    std::vector<float> flat(net.flat_size); // an array in our layout
    std::vector<float> tensor;              // one parameter of the array, in PyTorch's layout
    // In the file, a tensor begins where the tensor before it ends. In our flat arrays there are gaps (place_params).
    size_t byte = 1024 + k * net.num_params * sizeof(float);
    for (const Param& p : net.params) {
        tensor.resize(p.size);
        m.read(tensor.data(), p.size * sizeof(float), byte);
        must(all_finite(tensor.data(), p.size), m.path,
             "its weights, their average or moments are not finite; move it away and use an earlier checkpoint");
        permute_param(net.config, p, &flat[p.offset], tensor.data(), false);
        byte += p.size * sizeof(float);
    }
    return flat;
}

// Returns the initial values of elements 4 n to 4 n + 3 of a parameter, counted in PyTorch's layout, so that
// train_unet.py can draw the same. bound: uniform values are from -bound to bound.
static std::array<float, 4> initial_values(const UNet& net, size_t param, size_t n, float bound) {
    const Words words = philox((uint64_t)net.config.seed, (uint32_t)n, (uint32_t)param, 0, RANDOM_INIT);
    std::array<float, 4> v = {};
    switch (net.params[param].init) {
    case INIT_ZERO: break;
    case INIT_ONE: v.fill(1); break;
    case INIT_NORMAL: normals(v.data(), words); break;
    case INIT_UNIFORM:
        for (int i = 0; i < 4; i++) {
            const float uniform = (words.w[i] >> 8) * 0x1p-24f; // in [0, 1), exact in fp32
            v[i] = (2 * uniform - 1) * bound;
        }
    }
    return v;
}

// Returns initial weights. They are drawn from the same distributions as in guided-diffusion:
//   convolutions, linear layers   weights and biases are uniform between -1 / sqrt(fan_in) and 1 / sqrt(fan_in). The
//                                 projection of an image's numbers (VALUES) is a linear layer without a bias
//   class embeddings              weights are standard normal
//   norms                         weights are 1, biases are 0
//   last layers                   weights and biases are 0 in the last layer of each residual block, of each attention
//                                 block, and of the network
static std::vector<float> init_params(const UNet& net) {
    std::vector<float> flat(net.flat_size), value;
    float bound = 0; // 1 / sqrt(fan_in) of the latest weight; the bias that follows this weight has the same bound
    for (size_t k = 0; k < net.params.size(); k++) {
        const Param& p = net.params[k];
        const double fan_in = (double)p.size / p.shape[0];
        if (p.shape.size() > 1) bound = (float)(1 / std::sqrt(fan_in));
        value.resize(p.size);
        for (size_t e = 0; e < p.size; e += 4) {
            const std::array<float, 4> four = initial_values(net, k, e / 4, bound);
            const size_t count = std::min<size_t>(4, p.size - e);
            std::copy_n(four.begin(), count, value.begin() + e);
        }
        permute_param(net.config, p, &flat[p.offset], value.data(), false);
    }
    return flat;
}
