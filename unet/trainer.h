// trainer.h - the data, the trainer, and what pages of unet/ call of train_unet.cu.
#pragma once
#include "network.h"

// The first number of a file: of one of our data files, or of one of unet.cu (data_header).
constexpr int DATA_MAGIC = 20261120;
constexpr int UNET_CU_DATA_MAGIC = 20240620;
constexpr size_t READ_AT_START = (size_t)4 << 30; // a file of up to this many bytes is wholly read when it is opened
constexpr int BATCHES_AHEAD = 8;                  // how many batches in advance the system is asked to read
constexpr int MOST_VALUES = 4096;                 // the most numbers per image, the limit of --cond_dim
constexpr int MOST_NAME_BYTES = 1 << 20;          // the most bytes of all the numbers' names together

// Data files and model files begin with a header of 256 slots of 4 bytes. In both, the first two slots are:
constexpr int SLOT_MAGIC = 0;
constexpr int SLOT_VERSION = 1; // the version of the format
// The others of a data file:
constexpr int DATA_SLOT_COUNT = 2;
constexpr int DATA_SLOT_CHANNELS = 3;
constexpr int DATA_SLOT_HEIGHT = 4;
constexpr int DATA_SLOT_WIDTH = 5;
constexpr int DATA_SLOT_CLASSES = 6;
constexpr int DATA_SLOT_BYTES = 7;      // the size of a value of an image: 1 or 4
constexpr int DATA_SLOT_HEADER_CRC = 8; // the checksum of the header, computed with 0 in this slot
// the checksum of all that follows the header (version 1), or of all that follows the images (version 2)
constexpr int DATA_SLOT_BODY_CRC = 9;
constexpr int DATA_SLOT_VALUES = 10; // K, the numbers of each image
constexpr int DATA_SLOT_NAMES = 11;  // bytes of the numbers' names
constexpr int DATA_SLOT_UNUSED = 12; // from this slot on, all slots are 0

struct Dataset : InputFile {
    // 1: one checksum covers all images. 2: each image has a checksum. 0: a file of unet.cu, without checksums.
    int version = 0;
    int64_t count = 0; // N
    int C = 0, H = 0, W = 0;
    int classes = 0;    // 0: images have no labels
    int bytes = 1;      // the size of a value of an image: 1 (uint8) or 4 (float32)
    int K = 0;          // numbers of each image
    int name_bytes = 0; // bytes of the numbers' names
    // The header's checksum (unet.cu's files: 0). It identifies the whole file, because the header holds a checksum of
    // the rest.
    uint32_t header_crc = 0;
    std::vector<int32_t> labels;     // (N), or empty
    std::vector<float> values;       // (N, K): the numbers
    std::string value_names;         // a line for each of the K numbers; or empty
    std::vector<uint32_t> image_crc; // (N), the checksum of each image; empty: not known
    int64_t asked = 0;               // load_batch has asked the system to fetch the images before this stream position
    std::string error;               // why an image could not be used
    std::shared_ptr<Dataset> cond;   // --cond_file: a picture for each image; null: there are none

    size_t image_bytes() const { return (size_t)C * H * W * bytes; }
    size_t image_at(int64_t i) const { return 1024 + i * image_bytes(); } // the byte of the file where image i begins
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
        return label_words() + value_words() + name_bytes / 4 + checksums;
    }
};

static bool all_finite(const float* v, size_t n) {
    return std::all_of(v, v + n, [](float f) { return std::isfinite(f); });
}

// All data that change from step to step lie in device memory, at addresses that stay the same. So the launches of a
// step can be recorded once, and repeated for later steps (Graph). There are two batches, because one is copied to the
// device while the model is trained on the other. So there are two recordings, too.
// In the shapes below, B is the batch size, micro is a microbatch (but at least 2 if grids are guided, where the
// network computes each image twice), T is diffusion_steps, K is cond_channels, and factor is picture_factor.
struct Trainer {
    UNet net;
    Dataset data;
    Objective objective;
    AdamW adamw;
    Slice own; // where in the flat arrays this rank's slice lies

    // Flat arrays (up to `sum`). Each holds one number for each parameter.
    // The weights in fp32. With several ranks, only the first plain_size weights, which the network reads in fp32, and
    // this rank's slice are kept up to date.
    float* params;
    float* grads;         // the current microbatch's gradients (with one rank, `sum` holds the first microbatch's)
    act *copy, *ema_copy; // the weights, and their first average, in the activations' type (Weights::copy)
    Fp8Weights fp8;       // --precision fp8: the FP8 copies of weights, which training steps read
    std::vector<WeightRounding> fp8_works; // the convolutions whose weights fp8 holds
    float* received; // gradients of this rank's slice, from the other ranks (RankGradients); null: one rank
    // The sum of the step's microbatches, at the places of this rank's slice. With several ranks, `received` is the
    // same array, used at other places. With one rank and one microbatch, `grads` is the same array. Of Muon's
    // matrices, update_by_muon replaces the sums by directions.
    float* sum;
    // Slices: this rank's part.
    float *m, *v;             // AdamW's moments. Where Muon updates a matrix, m is its momentum, and v is not used
    std::vector<float*> emas; // the averages of the weights, one for each rate in Config::emas

    // --optimizer muon
    MuonWork muon;
    uint8_t* is_matrix; // see Update

    double* squares;            // for each stretch, the sum of the squares of the step's gradient
    StepState *state, *records; // the state after the newest step, and the states after the latest RECORDS steps
    Upload batch[2];            // this rank's part of a batch (load_batch)
    Graph graph[2];             // graph[i]: a training step on batch[i]
    float* target;              // (micro, H, W, C): the answer that the network should give
    float* t;                   // (B): what the network is told about the noise level of each sample
    NoiseLevel* levels;         // (B): the noise level of each sample
    int* quarters;              // (B): in which quarter of all noise levels each sample's level lies (LossSums)
    double* loss;               // (B): the loss of each sample
    // --augment
    Augmentation* augmentations; // (micro): how each image is changed; null: images are not changed
    float* canvas;               // (micro, max(C, K), fine_size(H), fine_size(W)): working memory of augment_images
    float* augmented;            // (micro, C, H, W): the changed images
    // --cond_channels
    float* cond;           // (micro, H, W, K): the pictures as the network reads them; null: there are none
    float* augmented_cond; // (micro, K, H, W): with --augment, the changed pictures
    float* small;          // (micro, H / factor, W / factor, C): with --cond lowres, the images at low resolution
    // --objective ect
    NoiseLevel* teachers; // (micro): noise levels of the teacher's inputs; null: no --objective ect
    float* teacher_t;     // (micro): what the teacher is told about these levels
    int64_t* last_step;   // (1): --max_steps - 1, for the teachers' levels in validation
    // --schedule_sampler loss-second-moment
    float* history;     // (T, HISTORY + 1): the latest losses at each t (remember_losses); null: none are kept
    double* rms_losses; // (T): their root mean square, or -1 if there are fewer than HISTORY
};
constexpr int RECORDS = 128;
static_assert(RECORDS >= 2 * STEPS_AHEAD);

// With several ranks: every rank sends its parts of a flat array to all other ranks. Only segments that hold some of
// the first n parameters are sent. bytes: the size of a stretch in this array. slice: this rank's parts, one after the
// other; null: they are already in their places in the flat array.
static void gather(void* flat, const void* slice, size_t bytes, const Slice& own, size_t n) {
    begin_exchange();
    for (int s = 0; s < own.segments && own.at(s, 0) < n; s++) {
        char* const segment = (char*)flat + own.at(s, 0) / STRETCH * bytes;
        const size_t slice_bytes = own.stretches * bytes;
        const char* const mine = slice ? (const char*)slice + s * slice_bytes : segment + own.rank * slice_bytes;
        all_gather(segment, mine, slice_bytes, MAIN_STREAM);
    }
    end_exchange();
}

// Defined in train_unet.cu, and called by headers.
struct Question;
extern const LayerKind CONV, GROUPNORM;
static UNet build_unet(const Config& c);
static void plan_memory(UNet* net, int B, bool training);
static void unet_forward(UNet* net, Weights weights, Dropout dropout, int B);
HD static inline NoiseLevel make_level(const Question& q);
static std::vector<double> alpha_bars(const Config& c);
static NoiseLevel ddpm_level(const Config& c, double alpha_bar, double t);
static std::vector<NoiseLevel> ddpm_levels(const Config& c);
HD static inline NoiseLevel draw_level(const Objective& o, const Words& words);
static bool read_image(Dataset* d, int64_t i, uint8_t* to);
static Dataset open_dataset(const std::string& path);
static void open_pictures(Dataset* d, const char* flag, const std::string& path);
static float* whole_array(const Trainer& tr, float* array);
