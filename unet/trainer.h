// trainer.h - the data, the trainer, and what pages of unet/ call of train_unet.cu.
#pragma once
#include "data.h"
#include "network.h"

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
static float* whole_array(const Trainer& tr, float* array);
