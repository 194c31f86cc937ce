// interface.h - types and prototypes of the operations: all that the program asks of a device.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "elements.h"
#include "host/files.h"
#include "host/ranks.h"
#include "random.h"

#ifdef __CUDACC__
constexpr int STEPS_AHEAD = 64;    // how many steps the host may start before it reads their results for the log
constexpr int STEPS_AGREED = 16;   // after how many steps the ranks agree again on whether to stop
constexpr int MOST_IMAGES = 65535; // at a time: some grids count images in y or z, and CUDA limits y and z to this
constexpr int MOST_PIXELS = (1 << 28) - 1; // at a time: halo_source has 28 bits for a pixel's number
#else
constexpr int STEPS_AHEAD = 1;
constexpr int STEPS_AGREED = 1;
constexpr int MOST_IMAGES = INT_MAX;
constexpr int MOST_PIXELS = INT_MAX;
#endif

// =====================================================================================================================
// Types at the interface: what operations are called with

// Where an operation writes a copy of its result in FP8. Each value is multiplied by *factor and then rounded. If bytes
// is null, there is no copy.
struct Fp8Copy {
    uint8_t* bytes = nullptr;
    const float* factor = nullptr;
};

// --precision fp8, in training: a convolution's input and its weights are multiplied by these factors before they are
// rounded to FP8 (e4m3). They are powers of 2, so multiplying rounds nothing. e4m3's largest number is 448. So inputs
// are limited to 28 = 448 / 16, and weights to 3.5 = 448 / 128.
constexpr float FP8_X_FACTOR = 16;
constexpr float FP8_WEIGHT_FACTOR = 128;

// A convolution whose weights (Cout, 9, Cin) are rounded to FP8 in training. They begin at `offset` in a flat array.
struct WeightRounding {
    size_t offset;
    int Cout, Cin;
    bool turned_alone = false; // only the input gradient is computed in FP8
};

// A convolution is 1x1 or 3x3 (padding kernel / 2), with stride 1 or 2. Its input is (B, H, W, C1 + C2). Only for a 1x1
// convolution, this may be two arrays of C1 and C2 channels. With upsample = 1 the convolution is 3x3 with stride 1,
// and reads its input enlarged to 2H x 2W.
struct ConvShape {
    int B, H, W, C1, C2, Cout, kernel, stride, upsample;
    // types of the input's and output's elements; the network's own input and output are always FP32
    Element in = act_element, out = act_element;
    HD int out_H() const { return ((H << upsample) + stride - 1) >> (stride - 1); }
    HD int out_W() const { return ((W << upsample) + stride - 1) >> (stride - 1); }
};

// A group norm of x (B, HW, C1 + C2), which is one array, or two of C1 and C2 channels.
struct NormShape {
    int B, HW, C1, C2, groups;
    Nonlinearity nonlinearity;
    float eps; // is added to the variance
};

// What a convolution's weight gradient is computed from. Several layers' weight gradients are computed together, so
// that the GPU has more to do at a time.
struct WeightWork {
    float *dweight, *dbias;
    float* demb; // (B, emb_stride), or null: the embedding's gradient, the sum of dout over an image's pixels
    int emb_stride;
    const act *dout, *x1, *x2;
    ConvShape shape;
    // If shape.in is FP8 and shape.out is FP8_GRADIENT, x1 and dout are bytes. Before they were rounded, x1 was
    // multiplied by FP8_X_FACTOR, and dout by *dout_factor.
    const float* dout_factor = nullptr;
};

// The gradient of an input: dx = gradient + add1 + add2. The addends are gradients from other readers of the same
// tensor. An addend may be null, or dx itself. If dx is null, the gradient is not written.
template <class T> struct GradOf {
    T* dx = nullptr;
    const T *add1 = nullptr, *add2 = nullptr;
};
typedef GradOf<act> Grad;

// What a group norm needs of its input: for each channel of an image, the sum of its values, and the sum of their
// squares. The pixels may be divided into parts with sums of their own, which the norm adds up. sums: (B, parts, C, 2).
struct Stats {
    double* sums;
    int parts;
};

// What attention keeps of each row of scores, so that the backward pass can compute the row's softmax P again. A row
// holds the scores s = q . k of one query q with all keys k (vectors of d numbers):
//   P = 2^((s - top) log2(e) / sqrt(d) - log_sum)
// top is the highest score of the row (in Hopper's kernels, of a part of the row). log_sum is the log2 of the row's sum
// of e^((s - top) / sqrt(d)). One number, the log of the sum of e^(s / sqrt(d)), is not enough: if scores are large, it
// is large, too, and rounding it to fp32 could change P by more than a factor of 2.
struct SoftmaxRow {
    float top, log_sum;
};

// A random draw is a function of these values, of the sample's place in the batch, and of the quartet (random.h).
struct RandomKey {
    uint64_t seed;
    uint32_t purpose;    // what is drawn: RANDOM_NOISE or another RandomPurpose
    const int64_t* step; // in device memory; read at each draw, so a recorded CUDA graph draws anew in each step
    int64_t sample0;     // the number of the first sample; no two microbatches of a step have samples of equal numbers
};

HD static inline RandomKey of_purpose(RandomKey key, uint32_t purpose) {
    key.purpose = purpose;
    return key;
}

// What is random about the pictures that a batch is conditioned on. Outside of training only the key is not 0.
struct PictureDraws {
    RandomKey key;            // the seed, the step and the first sample; each draw sets the purpose
    bool random_flip = false; // whether an image and its picture are mirrored with probability 1/2
    float dropout = 0;        // the probability of leaving a picture out
    float noise = 0;          // the largest standard deviation of the noise on a small picture
};

// How the picture of an image is made (--cond). FILE: it is read from --cond_file, or there is none.
enum class PictureKind : uint8_t { FILE, LOWRES, GRAY, MASK };
struct PictureWord {
    PictureKind kind;
    const char* word; // as the user writes it after --cond
};
constexpr PictureWord PICTURE_WORDS[] = {
    {PictureKind::FILE, ""},
    {PictureKind::LOWRES, "lowres"},
    {PictureKind::GRAY, "gray"},
    {PictureKind::MASK, "mask"},
};
constexpr bool picture_words_are_in_order() {
    for (size_t i = 0; i < std::size(PICTURE_WORDS); i++)
        if (PICTURE_WORDS[i].kind != PictureKind(i)) return false;
    return true;
}
static_assert(picture_words_are_in_order(),
              "PICTURE_WORDS[kind] must be the row of that kind: model files keep its number");

// Dropout with probability p. Its random draws depend on the other members.
struct Dropout {
    float p = 0;
    uint64_t seed = 0;
    const int64_t* step = nullptr; // in device memory: the number of the step
    int64_t sample0 = 0;           // the number of the batch's first sample
    uint32_t layer = 0;            // index of the residual block
};

// A noise level: what the network is shown and told of a sample, what it should answer, and what its answer means.
struct NoiseLevel {
    float t;                       // what the network is told about the level
    float signal, sigma;           // the network's input x = signal x0 + sigma noise
    float target_x0, target_noise; // the network's target = target_x0 x0 + target_noise noise
    float x0_x, x0_out;            // the estimate of x0 that follows from the network's output: x0_x x + x0_out output
    float weight;                  // the weight of the squared error; ect: of the distance (see tuning_loss)
    float kl = 0;                  // kl, log_var, log_ratio and range are for the variational bound: see bound_term
    float log_var = 0;
    float log_ratio = 0;
    float range = 0;
    int t_is_0 = 0;  // 1: this is the level of t = 0, where the bound has another formula
    int quarter = 0; // the quarter of all levels that this level lies in: 0 (least noise) to 3; for the log
    int index = 0;   // ddpm: the timestep t, from 0 to diffusion_steps - 1
    // ddpm: 1 / (diffusion_steps times the probability of drawing t), a factor of `weight` and of the bound's weight
    float importance = 0;
    float target_teacher = 0; // ect: the teacher's answer (see TuningWeight) times this is added to the target
};

// Whose formulas compute a NoiseLevel: those of ddpm_level, edm_question or flow_question.
enum class Frame : uint8_t { DDPM, EDM, FLOW };

// --objective ect: the weight of a sample's loss. t is the student's sigma, and r the teacher's.
enum class TuningWeight : uint8_t { GAP, SNR }; // GAP: 1 / (t - r). SNR: 1 / t^2 + 1 / sigma_data^2

// --objective ect, consistency tuning (Geng et al. 2024). teacher_sigma and tuning_loss contain the paper's letters.
struct Tuning {
    float q = 0, k = 0, b = 0, c = 0; // q = 0: there is no consistency tuning
    int64_t d = 1;                    // steps of a stage; the stage's number, from 1 on, is the paper's `a`
    TuningWeight weight = TuningWeight::GAP;
    // device: the step from which `a` is computed; in validation, the run's last step
    const int64_t* step = nullptr;
    HD bool on() const { return q > 0; }
};

// A change to an image (--augment), and the numbers that the network is told of it. First the image is mirrored: flip_x
// exchanges left and right, flip_y top and bottom. Then pixel (x, y) of the changed image is this pixel of the mirrored
// one:
//   (x_x x + x_y y + x_1, y_x x + y_y y + y_1)
// Coordinates are in pixels, from the centre.
constexpr int AUGMENT_NUMBERS = 9;
struct Augmentation {
    float told[AUGMENT_NUMBERS];
    bool flip_x, flip_y;
    double x_x, x_y, x_1;
    double y_x, y_y, y_1;
};

// How the sigma of a sample is drawn (draw_level), if Objective::levels is null.
struct SigmaDraws {
    float P_mean, P_std; // ln(sigma) is normally distributed; its mean and standard deviation
    bool uniform_t;      // instead, t = sigma / (1 + sigma) is uniform between 0 and 1
};

// What a model is trained on: how noise levels are drawn, and the loss of a sample:
//   mse * weight * squared error + bound * importance * term
// `term` is the variational bound's term of the drawn timestep, in nats (bound_term). If mse is above 0, the bound
// trains only the predicted variance. If mse is 0, it also trains the predicted mean. If tuning.on(), the loss is that
// of tuning_loss instead.
struct Objective {
    const NoiseLevel* levels; // device: (steps), the level of each t; null: sigma is drawn, see SigmaDraws
    int steps;                // how many timesteps t there are
    SigmaDraws draws;
    float sigma_data; // of edm and ect: the standard deviation of the data
    float mse, bound;
    // device: (steps), the root mean square of the latest losses of each t. The larger it is, the more often this t is
    // drawn. Null: all t have the same probability.
    const double* rms_losses = nullptr;
    Frame frame = Frame::DDPM;
    Tuning tuning{};
};

// A sampler's step from x, the network's input, to x', its input in the next step. m is what the sampler remembers, z
// is new noise, and out is the network's answer. limit: see Denoising.
//   x0 = limit(x0_x x + x0_out out)
//   x' = next_x x + next_x0 x0 + next_m m + sigma z
//   m' = m_x x + m_x0 x0
// With range > 0 the network has learned sigma: sigma = exp(log_sigma + range (v + 1) / 2). v is the second half of the
// answer's channels. Guidance does not change v.
struct SamplerStep {
    float t;        // what the network is told
    float guidance; // see Denoising; 1: this step is not guided
    float x0_x, x0_out;
    float next_x, next_x0, next_m;
    float m_x, m_x0;
    float sigma, log_sigma, range;
    float known_x, known_sigma, back_x, back_sigma; // see keep_known
};

// Settings that are the same in all steps of a sampler. With guidance, the second half of the batch is a copy of the
// first half, of which the network is not told the conditions. `unconditional` is its answer for the copies, and `out`
// its answer for the first half. The sampler uses unconditional + guidance * (out - unconditional). In a step whose
// guidance is 1, only the first half is computed.
// If limit is true, x0 is limited to [-s, s] and divided by s. With rank < 0, s is 1. With rank >= 0, s is the rank-th
// smallest |x0| of the image (counted from 0), but at least 1.
struct Denoising {
    bool limit, guided;
    int rank;
    float* threshold; // device: (B), memory for s of each image
    float* m;         // device: (B, HW, C), what the sampler remembers; null: nothing
};

enum class LrSchedule { CONSTANT, LINEAR, COSINE }; // after the warm-up: see lr_factor

struct AdamW {
    float lr, weight_decay, beta1, beta2, eps, grad_clip, ema_rate;
    LrSchedule lr_schedule;
    int64_t warmup_steps, max_steps;
    bool skip_outliers; // see `healthy`; false: --max_bad_steps 0
};

// Ranks share the work of the optimiser. Weights and gradients are flat arrays of n floats (n is a multiple of 4) and
// padding. An array is cut into segments. Each segment is cut into one part for every rank, and each part into
// `stretches` stretches of STRETCH floats. With two ranks and three segments:
//
//   | rank 0 | rank 1 | rank 0 | rank 1 | rank 0 | rank 1 |
//   |    segment 0    |    segment 1    |    segment 2    |
//
// A rank owns its parts of all segments, which together are its slice. Of the moments and averages, a rank stores only
// its slice, in which its parts follow each other directly. Each segment has parts of all ranks. So the gradients of
// one segment can be sent to their owners while those of another segment are still computed.
constexpr size_t STRETCH = 1 << 14; // floats of a stretch; sum_gradients makes one sum of squares for each
struct Slice {
    size_t n;
    int segments, stretches, rank, ranks;
    HD size_t each() const { return stretches * STRETCH; } // floats of a segment that a rank owns
    HD size_t owned() const { return segments * each(); }  // floats that a rank owns in all segments
    HD size_t whole() const { return ranks * owned(); }    // floats of a flat array with its padding
    // where in a flat array rank r's part of a segment begins
    HD size_t at(int segment, int r) const { return ((size_t)segment * ranks + r) * each(); }
    // where in a flat array the i-th float of this rank's slice lies
    HD size_t flat(size_t i) const {
        const unsigned segment = (unsigned)(i / STRETCH) / stretches;
        return i + ((size_t)segment * (ranks - 1) + rank) * each();
    }
};

// The gradients of this rank's slice, as each rank has computed them. `own` is a flat array of this rank's gradients.
// `received` is another one, or null with one rank. At the place of rank r's part of a segment, it holds the gradients
// that rank r has computed for this rank's part. At the places of this rank's own parts, it holds the sum over all
// ranks (Trainer::sum is the same array).
struct RankGradients {
    const float *own, *received;
    Slice slice;
    // The pointer is shifted: a float of this rank's slice has the same index here as in a flat array.
    HD const float* of(int r) const {
        return r == slice.rank ? own : received + (r - slice.rank) * (ptrdiff_t)slice.each();
    }
};

// This rank's array, and the same array of the other ranks whose memory it can write to. Kernels write to all of them.
constexpr int NEAR = 8; // the largest number of ranks that write to each other's memory
template <class T> struct Everywhere {
    T* at[NEAR]; // this rank's array is the first
    int ranks = 1;
};

// The arrays of adamw_update. params, copy and sum are flat arrays. ema, m and v hold only this rank's slice. The
// network reads the first `plain` weights from params, in fp32, and all others from copy. If activations are fp32,
// `plain` includes all weights, and copy is the same array as params.
struct Update {
    Everywhere<float> params;
    Everywhere<act> copy;
    size_t plain;
    float *ema, *m, *v;
    const float* sum; // the sum of the ranks' gradients
    // For each 64 floats of a flat array: 1 if they belong to a matrix that Muon updates. For such a matrix, `sum`
    // holds directions (update_by_muon), and the update subtracts lr times the direction. Null: no --optimizer muon.
    const uint8_t* is_matrix;
};

// --optimizer muon: a matrix of weights (rows, columns). A convolution's matrix has a row for each output channel.
struct MuonMatrix {
    size_t offset;        // where its elements begin in a flat array
    int rows, columns;    // multiples of 32
    size_t square_offset; // where its square matrices (short_side, short_side) begin in MuonWork::A and MuonWork::B
    HD int short_side() const { return rows < columns ? rows : columns; }
    HD int long_side() const { return rows < columns ? columns : rows; }
};
// A tile of a product of matrices: which matrix, and the tile's first row and column in the result.
struct MuonTile {
    int matrix, row, column;
};
struct MuonTiles { // the tiles of the results of all matrices
    const MuonTile* list = nullptr;
    int count = 0;
    int tile_size = 0; // rows of a tile, which has as many columns
};
// All matrices that Muon updates, and what a GPU needs to compute with them (prepare_muon).
struct MuonWork {
    std::vector<MuonMatrix> matrices;
    size_t squares_size = 0; // numbers of all square matrices (short_side, short_side)
    // In the GPU's memory:
    const MuonMatrix* on_device = nullptr; // the same list of matrices
    MuonTiles square_tiles;                // of results (short_side, short_side)
    MuonTiles tiles;                       // of results (rows, columns)
    act* X = nullptr;                      // flat, in the activations' type: at first a copy of Nesterov's momentum
    // square matrices (short_side, short_side), one for each X: A = X X^T (X^T X, if X has more rows than columns), and
    // B = b A + c A A with b = MUON_B, c = MUON_C
    act *A = nullptr, *B = nullptr;
    struct HopperMuon* hopper = nullptr; // what Hopper's kernels have in place of all these (gpu/hopper/muon_wgmma.h)
};
// Jordan et al. 2024: the decay of the momentum, and the polynomial that is applied five times (update_by_muon).
constexpr float MUON_MOMENTUM = 0.95f;
constexpr int MUON_ITERATIONS = 5;
constexpr float MUON_A = 3.4445f, MUON_B = -4.7750f, MUON_C = 2.0315f;
// A matrix's Nesterov momentum X is only what rounding has left of a gradient of 0, if the sum of its squares is below
// this. Then the direction is 0, and only the weight decay changes the matrix.
constexpr double MUON_SMALLEST = 1e-28;
// Makes Muon's updates about as large as AdamW's (Liu et al. 2025, eq. 4).
HD static inline float muon_scale(const MuonMatrix& m) { return 0.2f * sqrtf((float)m.long_side()); }

// The running mean and variance of the logarithms of the loss and of the gradient's norm, over healthy steps
// (see `healthy`).
struct Guard {
    double n; // healthy steps; a resumed run may begin again at 0 (compare_with_checkpoint)
    double mean_loss, var_loss, mean_norm, var_norm;
};

// The state that changes from step to step, in device memory.
struct StepState {
    int64_t step, updates;         // steps that have ended, and those that have changed the weights
    int64_t bad_total, bad_in_row; // steps that were skipped: in all, and since the last good step
    double loss, grad_norm;
    double loss_q[4]; // the mean loss of each quarter of the noise levels
    int count_q[4];   // how many samples fell into each quarter
    int ok;           // 1: the step was good
    float lr;
    Guard guard;
};

// For the log: all noise levels are divided into four quarters, from the least noise (0) to the most (3). This holds
// the sum of the losses of a step's samples in each quarter.
struct LossSums {
    double sum[4];
    int count[4];
};
HD static inline void add_loss(LossSums* s, double loss, int quarter) {
    // Constant indices keep s in registers. For s->sum[quarter], a kernel would have to keep s in memory.
    for (int q = 0; q < 4; q++) {
        if (q != quarter) continue;
        s->sum[q] += loss;
        s->count[q]++;
    }
}

// A residual block's skip connection: a 1x1 convolution of [x1 | x2]. If conv_takes_skip, the convolution that adds its
// result also computes it. weight: (Cout, C1 + C2).
struct ConvSkip {
    const act *x1, *x2, *weight;
    const float* bias;
    int C1, C2;
};

// =====================================================================================================================
// The interface: all that the program asks of a device. dev/reference.h implements it with loops, for the CPU build. A
// function's outputs come first, then its inputs, then sizes. A function overwrites its outputs, if its comment does
// not say otherwise. This is also true of gradients: a backward function does not add to the old values. The comment
// after an argument gives its shape. "as x": it has the shape of x. [Brackets] enclose what may be null, but [x1 | x2]
// are the channels of x1, followed by those of x2.

// A queue of a GPU's operations, which run one after the other. Different streams can run at the same time.
struct Stream;
extern Stream* const MAIN_STREAM; // the stream of all operations that are not given another one
constexpr int HISTORY = 10;       // how many losses of each t --schedule_sampler loss-second-moment remembers

HD static inline int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// Convolution: out = conv([x1 | x2], weight) + bias [+ emb] [+ residual]. The sums that a later group norm needs are
// written to stats. With a skip (if conv_takes_skip), the convolution also computes a skip connection and adds its
// result. Then there is no emb and no residual. If s.in is FP8, x1 and weight are FP8, and the sums of products are
// multiplied by `factors`. This undoes the factors of rounding.
// conv_backward_input: s.out is the type of dout's elements. If it is FP8_GRADIENT, dout is in e5m2, weight is the
// array `turned` of round_weights, and dx1 = factors * (the sums of products). Then there is no x2, and no addend.
static bool conv_takes_skip(const ConvShape& s, const ConvShape& skip);
static void conv_forward(act* out,                            // (B, Ho, Wo, Cout)
                         Stats* stats,                        // [the sums of out]
                         const act* x1, const act* x2,        // (B, H, W, C1), [(B, H, W, C2)]
                         const act* weight,                   // (Cout, kernel, kernel, C1 + C2)
                         const float* bias,                   // (Cout)
                         const float* emb,                    // [(B, emb_stride)], of which Cout columns are read
                         int emb_stride, const act* residual, // [as out]
                         ConvShape s, const ConvSkip& skip = {},
                         const float* factors = nullptr); // [(Cout)]: only with FP8
static void conv_backward_input(Grad dx1, Grad dx2,       // as x1 and x2
                                const act* dout,          // as out
                                const act* weight, ConvShape s,
                                const float* factors = nullptr); // [(C1)]: only with FP8
// The weight gradients of several layers are computed together, so that a launch has enough work. conv_weight_load is
// the work of one layer, as a fraction of what is enough. The caller collects layers until the sum of these is 1.
static void conv_backward_weights(const std::vector<WeightWork>& works, Stream* stream);
static double conv_weight_load(const ConvShape& s);

// Group norm [and nonlinearity f] [and dropout] of [x1 | x2] over C = C1 + C2 channels: out = f(xhat weight + bias),
// with xhat = (x - mean) rstd and rstd = 1 / sqrt(variance + eps). The mean and the variance are those of a group's
// channels in one image. With scale_shift, out = f((xhat weight + bias) (1 + scale) + shift). Its first C columns are
// scale, and the next C are shift. groupnorm_forward writes `fp8` if that is given, and else `out`. groupnorm_backward
// writes dx1 and dx2, with their addends, also in FP8 (e5m2), if dx1_fp8 and dx2_fp8 are given.
static void groupnorm_forward(act* out,                    // [(B, HW, C)]
                              float* mean, float* rstd,    // (B, groups): kept for the backward pass
                              const act* x1, Stats stats1, // (B, HW, C1), and its sums
                              const act* x2, Stats stats2, // [(B, HW, C2)], and its sums
                              const float* weight,         // (C)
                              const float* bias,           // (C)
                              const float* scale_shift,    // [(B, ss_stride)]
                              int ss_stride, Dropout dropout, NormShape s, Fp8Copy fp8 = {});
static void groupnorm_backward(Grad dx1, Grad dx2,           // as x1 and x2
                               float* dweight, float* dbias, // (C): may be incomplete until finish_gradients is called
                               float* dscale_shift,          // [as scale_shift]
                               const act* dout,              // as out
                               const act* x1, const act* x2, const float* mean, const float* rstd, const float* weight,
                               const float* bias, const float* scale_shift, int ss_stride, Dropout dropout, NormShape s,
                               Fp8Copy dx1_fp8 = {}, Fp8Copy dx2_fp8 = {});

// --precision fp8, in training. round_weights multiplies the weights of convolutions by FP8_WEIGHT_FACTOR and rounds
// them to e4m3. A convolution's weights begin at the same place in all three arrays. In `turned`, each 3x3 filter is
// turned by 180 degrees, as input gradients read it. round_gradient rounds n gradients (a multiple of 16) to e5m2.
static void round_weights(uint8_t* weights, // flat: (Cout, tap, Cin) of each convolution that has Layer::fp8
                          uint8_t* turned,  // flat: (Cin, 8 - tap, Cout) of each convolution in `works`
                          const act* copy,  // flat: the weights in bf16
                          const std::vector<WeightRounding>& works);
static void round_gradient(Fp8Copy fp8, const act* dout, size_t n);

// Attention of T pixels to each other: out = softmax(q k^T / sqrt(d)) v, with C = heads * d channels.
static void attention_forward(act* out,         // (B, T, C)
                              SoftmaxRow* rows, // (B, heads, T): kept for the backward pass
                              const act* qkv,   // (B, T, 3C): C channels of q (all heads), then C of k, then C of v
                              int B, int T, int C, int heads);
static void attention_backward(act* dqkv,       // as qkv
                               const act* dout, // as out
                               const act* qkv, const act* out, const SoftmaxRow* rows, int B, int T, int C, int heads);

// downsample: the average of 2 x 2 pixels (an odd last row or column is not read). upsample: each pixel becomes 2 x 2
// equal pixels. H and W are the size of the forward function's input, also in the backward functions.
static void downsample_forward(act* out, Stats* stats, const act* x, int B, int H, int W, int C);
static void downsample_backward(Grad dx, const act* dout, int B, int H, int W, int C);
static void upsample_forward(act* out, Stats* stats, const act* x, int B, int H, int W, int C);
static void upsample_backward(Grad dx, const act* dout, int B, int H, int W, int C);

// to_patches turns squares of p x p pixels into channels (c, row, column), as PyTorch's pixel_unshuffle: x (B, H, W, C)
// becomes out (B, H / p, W / p, C p p), in fp32. from_patches is the reverse. H and W are multiples of p.
static void to_patches(float* out, const float* x, int B, int H, int W, int C, int p);
static void from_patches(float* out, const float* x, int B, int H, int W, int C, int p);

// Adds a picture as a condition: out (B, HW, C + K) = [x | cond], in fp32, from x (B, HW, C) and cond (B, HW, K).
static void join_channels(float* out, const float* x, const float* cond, int B, int HW, int C, int K);
// The pictures of a batch, as the network reads them: given ones (take_pictures), or pictures made of the images. A
// picture is mirrored if its image is mirrored. A picture that is left out is all zeros.
static void take_pictures(float* cond,          // (B, H, W, K)
                          const void* pictures, // (B, K, H, W), of 1 or 4 bytes a value
                          PictureDraws draws, int B, int K, int H, int W, int bytes);
// --cond lowres. A pixel of a small picture is the mean of factor x factor pixels of the image, with noise if
// draws.noise is above 0.
static void shrink_images(float* small,       // (B, H / factor, W / factor, C)
                          const void* images, // (B, C, H, W)
                          int factor, PictureDraws draws, int B, int C, int H, int W, int bytes);
static void enlarge_pictures(float* cond,        // (B, H, W, C)
                             const float* small, // (B, H / factor, W / factor, C)
                             int factor, PictureDraws draws, int B, int C, int H, int W);
// --cond gray, and --cond mask: copies of the images with holes. The last channel is 1 in the holes, and else -1.
static void grey_images(float* cond,        // (B, H, W, 1)
                        const void* images, // (B, 3, H, W)
                        PictureDraws draws, int B, int H, int W, int bytes);
static void mask_images(float* cond,        // (B, H, W, C + 1)
                        const void* images, // (B, C, H, W)
                        PictureDraws draws, int B, int C, int H, int W, int bytes);

// The embedding's layers, always in fp32. linear: out = x weight^T + bias
static void linear_forward(float* out,          // (B, Cout)
                           const float* x,      // (B, Cin)
                           const float* weight, // (Cout, Cin)
                           const float* bias,   // (Cout)
                           int B, int Cin, int Cout, Stream* stream);
static void linear_backward(GradOf<float> dx,             // as x
                            float* dweight, float* dbias, // as weight and bias
                            const float* dout,            // as out
                            const float* x, const float* weight, int B, int Cin, int Cout);
static void silu_forward(float* out, const float* x, size_t n, Stream* stream);
static void silu_backward(GradOf<float> dx, const float* dout, const float* x, size_t n);
// The number t of each sample becomes sinusoids of frequencies f_i:
// out (B, dim) = [cos(t f_i), sin(t f_i)], f_i = max_period^(-i / (dim / 2)); dim is even
static void timestep_embedding_forward(float* out, const float* t, int B, int dim, int max_period, Stream* stream);
// Adds a row of a table to the embedding x of each sample: out = x + table[label].
static void label_embedding_forward(float* out,         // (B, C)
                                    const float* x,     // (B, C)
                                    const float* table, // (rows, C)
                                    const int* labels,  // (B)
                                    int B, int C, Stream* stream);
static void label_embedding_backward(GradOf<float> dx,  // as x
                                     float* dtable,     // as table
                                     const float* dout, // as out
                                     const int* labels, int B, int rows, int C);
// Adds a projection of each sample's K numbers to its embedding x: out = x + values weight^T.
static void values_embedding_forward(float* out,          // (B, C)
                                     const float* x,      // (B, C)
                                     const float* weight, // (C, K)
                                     const float* values, // (B, K)
                                     int B, int K, int C, Stream* stream);
static void values_embedding_backward(GradOf<float> dx,    // as x
                                      float* dweight,      // as weight
                                      const float* dout,   // as out
                                      const float* values, // (B, K)
                                      int B, int K, int C);
// groupnorm_backward may leave the terms of dweight and dbias in memory. This function adds them up, for many norms at
// once, at the end of the backward pass.
static void finish_gradients();

// Diffusion. Draws each sample's noise level. Writes it, what the network is told of it (t), and its quarter of all
// levels.
static void draw_levels(NoiseLevel* levels, float* t, int* quarters, int B, const Objective& o, RandomKey key);
// --objective ect: each sample's second, lower noise level. The network's answer at this level (the teacher's answer)
// becomes a part of the sample's target.
static void draw_teachers(NoiseLevel* teachers, float* t, int B, const Objective& o, RandomKey key);
// Mixes noise into images: x_t = signal x_0 + sigma noise (Ho et al. 2020, eq. 4), and writes the answer that the
// network should give: target = target_x0 x_0 + target_noise noise [+ target_teacher teacher].
static void q_sample_forward(float* x_t, float* target, // (B, H, W, C)
                             const NoiseLevel* levels,  // (B)
                             const float* teacher,      // [as target]: the teacher's answer
                             const void* images,        // x_0 (B, C, H, W): uint8 if bytes is 1, float32 if bytes is 4
                             bool random_flip,          // whether to mirror each image with probability 1/2
                             RandomKey noise_key, RandomKey flip_key, int B, int C, int H, int W, int bytes);
// The loss of objective o, a mean over a sample's values. dout is the gradient of factor * (the sum of the samples'
// losses). If o.mse is above 0, the bound adds nothing to the gradient of the first C channels (see Objective). Without
// a bound, the gradient of channels C to Cout - 1 is 0.
static void loss_forward_backward(double* loss,             // (B)
                                  float* dout,              // as out
                                  const float* out,         // (B, HW, Cout)
                                  const float* target,      // (B, HW, C)
                                  const float* x,           // (B, HW, C): the network's input
                                  const NoiseLevel* levels, // (B)
                                  const Objective& o, float factor, int B, int HW, int C, int Cout);
// The loss if o.tuning.on(): weight (sqrt(D + c^2) - c), the weighted pseudo-Huber distance between the student's image
// and the teacher's. D is the sum of (x0_out (out - target))^2 over the sample's n values.
static void tuning_loss_forward_backward(double* loss,             // (B)
                                         float* dout,              // as out
                                         const float* out,         // (B, n)
                                         const float* target,      // (B, n)
                                         const NoiseLevel* levels, // (B)
                                         float c, float factor, int B, int n);
// --augment: draws a change for each image, and applies it. p: the probability of each kind of change
// (draw_augmentation).
static void augment_images(float* out,          // (B, C, H, W)
                           Augmentation* drawn, // (B)
                           float* canvas,       // (B, C, fine_size(H), fine_size(W)): working memory
                           float* told,         // (B, stride), of which AUGMENT_NUMBERS columns are written
                           int stride,
                           const void* images, // (B, C, H, W), of 1 or 4 bytes a value
                           float p, RandomKey key, int B, int C, int H, int W, int bytes);
// --schedule_sampler loss-second-moment: calls remember_losses for each of the T timesteps.
static void update_rms_losses(double* rms_losses,       // (T)
                              float* history,           // (T, HISTORY + 1)
                              const NoiseLevel* levels, // (B)
                              const double* loss,       // (B)
                              const StepState* state, int T, int B);

// Sampling. out (B, per_sample) = scale * standard normal numbers; with `add`, they are added to out.
static void draw_normals(float* out, int B, int per_sample, RandomKey key, float scale, bool add);
// Sets each element of t (B) to what the network is told in the sampler's step number *k.
static void sampler_timesteps(float* t, const SamplerStep* steps, const int64_t* k, int B);
// Makes step number *key.step of the sampler, and overwrites x. With guidance, x and out hold 2 B samples: B samples
// with conditions, then the same B samples without. In a step that is not guided, the second half of out is old, and
// not read.
static void sampler_step(float* x,         // (B or 2 B, HW, C)
                         const float* out, // (B or 2 B, HW, Cout): the network's answer
                         const SamplerStep* steps, const Denoising& d, RandomKey key, int B, int HW, int C, int Cout);
// Inpainting, after each step of the sampler whose known_x is not 0. Where the mask is not above 0, the image is known,
// and x becomes known_x image + known_sigma z. Then at all pixels x' = back_x x + back_sigma z'. This adds noise if the
// sampler goes back to an earlier step.
static void keep_known(float* x,           // (B or 2 B, n)
                       const float* image, // (B, n)
                       const float* mask,  // (B, n)
                       const SamplerStep* steps, RandomKey key, bool guided, int B, int n);

// Optimiser, for a slice of the flat arrays. Adds up the ranks' gradients in the order of the ranks, and writes the
// result to sum (flat). If add is true, the old content of sum is the first term. For each stretch of the slice,
// squares gets the sum of its squares.
static void sum_gradients(float* sum, const Everywhere<double>& squares, const RankGradients& grads, bool add);
// Computes the step's loss, gradient norm and learning rate, and decides whether it is good or is skipped
// (judge_batch).
static void judge_step(StepState* state, const double* squares, // (stretches)
                       size_t stretches, const double* loss,    // (B)
                       const int* quarters,                     // (B)
                       AdamW h, int B);
// Updates this rank's slice of the weights by AdamW (Loshchilov & Hutter 2019) with clipping, and the first average of
// the weights. Muon's matrices move along the directions in u.sum. If state->ok is 0 (the step is skipped), nothing
// changes.
static void adamw_update(const Update& u, const StepState* state, AdamW h, Slice own);
// --optimizer muon, before adamw_update. muon_momentum updates u.m of this rank's part of Muon's matrices. It writes
// the Nesterov momentum to X, a flat array, which may be u.sum. orthogonalise replaces the momentum by the direction of
// each matrix's update. In a skipped step both do nothing.
static void muon_momentum(float* X, const Update& u, const StepState* state, AdamW h, Slice own);
static void orthogonalise(float* X, const MuonWork& muon, const StepState* state);
static void prepare_muon(MuonWork* muon, size_t flat_size); // flat_size: the length of a flat array
static void ema_update(float* ema, const float* params, const StepState* state, float rate, Slice own); // not the first
// Writes n weights (a multiple of 4) in the activations' type. If activations are fp32, nothing is written.
static void cast_params(act* copy, const float* params, size_t n);
static void next_step(int64_t* step); // adds 1 to *step, after all draws of the step
// Copies *state to records[i % count] for the host's log. i is the step that has just ended, state->step - 1.
static void record_step(StepState* records, const StepState* state, int count);

// How many bytes of memory an operation needs in addition to its arrays. On a CPU: 0.
static size_t conv_workspace(ConvShape s);           // for the weight gradient
static size_t conv_detour_bytes(const ConvShape& s); // for intermediate arrays, if another convolution replaces s
static size_t groupnorm_backward_workspace(const NormShape& s);
static size_t norm_sums_bytes(const NormShape& s); // for sums that are kept until finish_gradients
static size_t attention_backward_workspace(int B, int T, int C, int heads);
static size_t linear_backward_workspace(int B, int Cin, int Cout);
static size_t loss_workspace(int B);
struct Workspace {
    size_t main = 0; // bytes on the main stream
    size_t side = 0; // bytes on the side stream, where weight gradients are computed
    size_t sums = 0; // bytes for sums that are kept until finish_gradients, at the end of the backward pass
};
// Without training, only `main` is needed.
static void reserve(const Workspace& most, bool training);

// These functions send data from device to device between ranks (host/ranks.h), in multiples of 4 bytes. They may be
// recorded in a Graph. With NCCL, the calls between begin_exchange and end_exchange become one launch. With
// world.direct the ranks write to each other's memory, and end_exchange makes the main stream wait until all data has
// arrived.
//   all_to_all   rank r receives part r of the sendbuf of every other rank s, as part s of its recvbuf
//   all_gather   copies the arrays `own` of all ranks to `all`, in the ranks' order. `own` may point to this rank's
//                place in `all`. With world.direct it must, because a rank copies its array only to the other ranks
static void all_to_all(void* recvbuf, const void* sendbuf, size_t bytes, Stream* stream); // bytes: the size of a part
static void all_gather(void* all, const void* own, size_t bytes, Stream* stream);
static void begin_exchange();
static void end_exchange();

// open_alloc returns device memory that other ranks may write to if world.direct is true. at_rank returns the address
// in rank r's memory that corresponds to p, or null if p is in no such memory. With world.direct, meet makes each
// device wait until all devices have called it.
static void* open_alloc(size_t bytes);
[[maybe_unused]] static void* at_rank(void* p, int r);
static void meet();
template <class T> static Everywhere<T> everywhere(T* p) {
    Everywhere<T> all{{p}};
    for (int r = 0; r < world.size && world.direct; r++) {
        if (r == world.rank) continue; // at[0] is this rank's array already
        all.at[all.ranks] = (T*)at_rank(p, r);
        all.ranks++;
    }
    return all;
}
// Connects the ranks' devices. world.direct becomes true if `direct` allows it and they can: at most NEAR ranks, all on
// one machine, and each GPU can open the memory of the others (open_alloc).
static void join_devices(bool direct);

// The device. start_device chooses it (number: --device) and sets act_element (--precision). New memory is all zeros.
static void start_device(const std::string& precision, int number);
static std::string device_name();
static int count_gpus();        // GPUs that this process could use; the CPU build ends the program
static size_t device_bytes = 0; // bytes of device memory that are allocated
static void* device_alloc_bytes(size_t bytes);
static size_t device_available();
static void copy_to_device(void* to, const void* host, size_t bytes);
static void copy_to_host(void* host, const void* from, size_t bytes);
static int max_stat_parts(int H, int W); // the largest Stats::parts of a tensor of this size

// A list of launches that is repeated with the same pointers. On a GPU, the first call of replay(g, work) calls work()
// and records its launches. This call and all later ones run the recorded launches as one launch. On a CPU, or if
// allowed.graphs is false, each call of replay calls work().
struct Graph {
    void* exec = nullptr;
    size_t nodes = 0; // how many launches the graph contains
};
template <class F> static void replay(Graph* g, F work);
static void free_graph(Graph* g);

// run_beside runs work on the side stream, at the same time as later work on the main stream. wait_for_side(ticket)
// makes the main stream wait for the work with this ticket, and for all earlier work of the side stream.
template <class F> static void run_beside(int ticket, F work); // work takes a Stream*: the side stream
static void wait_for_side(int ticket);
// Each switch allows something that makes the program faster. dev/bench turns them off. early, beside and graphs change
// no bit of the results. The others do, because they decide in which order numbers are summed.
static struct Allowed {
    bool early = true;   // a kernel may begin while the previous kernel still runs
    bool beside = true;  // run_beside has a stream of its own; false: it uses the main stream
    bool batches = true; // one launch computes the weight gradients of several layers
    bool graphs = true;  // repeated work is one launch
    // start_device reads `beside`, `clusters` and `hopper`, so they must be set before it is called.
    bool clusters = true; // kernels may use clusters: blocks that access each other's shared memory
    bool hopper = true;   // kernels with instructions that only Hopper has, in place of kernels for any GPU
} allowed;

// A buffer that the host fills for the device. A trainer has two: one is filled while the device works on the other.
struct Upload {
    uint8_t *host, *device;
    size_t bytes;
    void *sent, *released; // on a GPU, two events: the copy has ended; the work that reads `device` has ended
};
static Upload make_upload(size_t bytes);
static void wait_for_host_side(Upload* u); // waits until u->host may be written
static void send(Upload* u);               // copies u->host to u->device
static void release(Upload* u);            // the next send(u) waits for all work that was started before this call

template <class T> static T* device_alloc(size_t n) { return (T*)device_alloc_bytes((n ? n : 1) * sizeof(T)); }
template <class T> static T* device_copy(const std::vector<T>& v) {
    T* p = device_alloc<T>(v.size());
    copy_to_device(p, v.data(), v.size() * sizeof(T));
    return p;
}
// The array from which kernels read the convolutions' weights (weights_have_copy).
static act* make_copy(float* params, size_t n) {
    return weights_have_copy() ? (act*)device_alloc_bytes(n * act_bytes()) : (act*)params;
}
