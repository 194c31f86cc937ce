// interface.h - types and prototypes of the operations: all that the program asks of a device.
#pragma once

#ifdef __CUDACC__
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#ifdef USE_NCCL
#include <nccl.h>
#endif
#elif defined(USE_MPI)
#define OMPI_SKIP_MPICXX 1
#include <mpi.h>
#endif

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

// unet/host/ holds code that is not about diffusion: files, PNG pictures, the processes of a run. (unet/run/page.h is included
// later, in section 12, because it uses the struct Run of that section.)
// defines: text, die, refuse, must, now, duration, terminal_columns, STOP_SIGNALS, stop_signal, stdout_takes_a_line,
//          show_status, start_process, run_child, crc32, exists, Folder, open_folder, make_folder, last_change,
//          AtomicFile, try_write_file, try_link_file, Header, InputFile, check_unused, read_text, lock_folder
#include "host/files.h"
// defines: grid_png
#include "host/png.h"
// defines: world, ranks, find_ranks, start_ranks, come_to, broadcast_host, gather_host, any_rank, must_agree,
//          on_one_machine
#include "host/ranks.h"

// =====================================================================================================================
// 1. Types at the interface: what operations are called with
#ifdef __CUDACC__
#define HD __host__ __device__ // marks functions that both the host and the device call
#define INLINE __device__ __forceinline__
typedef void act;                  // an element of an activation; void, because act_element holds its type at run time
constexpr int STEPS_AHEAD = 64;    // how many steps the host may start before it reads their results for the log
constexpr int STEPS_AGREED = 16;   // after how many steps the ranks agree again on whether to stop
constexpr int MOST_IMAGES = 65535; // at a time: some grids count images in y or z, and CUDA limits y and z to this
constexpr int MOST_PIXELS = (1 << 28) - 1; // at a time: halo_source has 28 bits for a pixel's number
// The presets that are used if the command line has no --preset (see apply_default_preset).
static const char* const DEFAULT_PRESET = "quick64"; // without a data file
static const char* const PRESET_32 = "photos32";     // for images of 32x32
static const char* const PRESET_FROM_32 = "quick64"; // for larger images, if their sides can be halved often enough
static const char* const PRESET_ELSE = "unet64";     // for all others
#else
#define HD
#define INLINE inline
typedef float act;
constexpr int STEPS_AHEAD = 1;
constexpr int STEPS_AGREED = 1;
constexpr int MOST_IMAGES = INT_MAX;
constexpr int MOST_PIXELS = INT_MAX;
static const char* const DEFAULT_PRESET = "quick32";
static const char* const PRESET_32 = "quick32";
static const char* const PRESET_FROM_32 = "emoji64";
static const char* const PRESET_ELSE = "fashion32";
#endif

// Enumerations. Code that needs a case for every enumerator is a switch without a default, or has a static_assert. So
// the compiler names all such places if an enumerator is added (-Werror=switch).
// ALL_CASES_RETURN stands after such a switch if all of its cases return. Without it the compiler would warn that the
// function might end without a return.
#define ALL_CASES_RETURN __builtin_unreachable();

// The format in which a number of a tensor is stored. Sums are computed in fp32 or double, whatever the format. With
// --precision fp8 some tensors are FP8, or have a copy in FP8: see choose_fp8. The FP8 copy of a gradient is
// FP8_GRADIENT.
//
// To store activations as a new element type, change these places. (The CPU build knows fp32 alone.)
//
// The program does not compile until these are done. The compiler names them, once the type is in this enumeration:
//   facts_of                   its name and its bytes (below)
//   with_act                   a case for the type (section 16). with_act turns act_element into a C++ type T.
//                              (conv_product does so, too, see below.) Once the case is there, the compiler names all
//                              that kernels need for T:
//   ElementOf                  its constants (section 14)
//   unpack, pack, FourOf,      how a piece of 16 bytes becomes floats, and the reverse. Then the same for four of its
//   to_floats, from_floats,    numbers, and for two (section 16, side by side)
//   store_two, load_two
//   mma, pack_pair             its instruction on the tensor cores, and how two numbers are packed into one register
//                              (section 16). A type that is split into several fp16 numbers (ElementOf::PARTS is above
//                              1) does not need them. Fragments are made for numbers of 2 bytes, where an instruction
//                              adds up 16 products for each sum. With numbers of 1 byte it adds up 32, so
//                              load_fragment, load_fragments and their callers change, too
//
// Until these are done, a run ends with an error message:
//   ACTIVATION_ELEMENTS        the types that activations may have (below)
//   `precision`                its name as a word, in the flag's row of unet/flags.h. There it comes after all other
//                              words, because model files hold a word's place in the row. (--use_fp16 chooses bf16. If
//                              the new type is fp16, change precision_of_use_fp16, in section 4)
//   conv_product               its rows in the table (section 22): one for pick_conv_gather, and one for a function
//                              like pick_conv_halo_bf16. Both are needed: conv_gather computes stride 2 and 1x1, and
//                              of the kernels for any GPU, only conv_halo can upsample and can store the last
//                              convolution's result, which is fp32
//
// No error reminds you of these:
//   act_has_wgmma              It is false for the new type, so a Hopper GPU, too, uses the kernels for any GPU. It may
//                              become true when Hopper's kernels support the type. These kernels are written for one
//                              type: conv_weight_fp8 for FP8, and the others for bf16. (conv_tiles and conv_small have
//                              the element as a template parameter, but it only says whether the operands are bf16 or
//                              FP8. Their results are always bf16.) If only some of these kernels support the new type,
//                              first split act_has_wgmma into two functions. Two calls of launch_resample and one of
//                              launch_attention (section 22) are reached only where act_has_wgmma is true. They name
//                              bf16 as their type, so change them, too
// Only for a type whose smallest numbers are larger than bf16's, such as fp16, which loses small gradients:
//   forward_and_loss           `factor` has to be larger: it becomes a loss scale (section 13)
//   sum_gradients              divides each rank's gradient by the loss scale, but not the old sum, which is divided
//                              already. It must always write the sum: so far, its `write` may be false (section 21)
//   orthogonalise              rounds the momentum and products of it to the type (--optimizer muon). Small numbers
//                              would become 0, and then the weights would not move. So orthogonalise has to multiply
//                              the momentum by a factor first (section 21)
//   take_aliases               says that there is no loss scale, and so does the help of fp16_scale_growth
enum class Element : uint8_t { FP32, BF16, FP8, FP8_GRADIENT };
struct ElementFacts {
    const char* name; // its word for --precision, if it has one
    size_t bytes;
};
constexpr ElementFacts facts_of(Element e) {
    switch (e) {
    case Element::FP32: return {"fp32", 4};
    case Element::BF16: return {"bf16", 2};
    case Element::FP8: return {"fp8", 1};
    case Element::FP8_GRADIENT: return {"fp8 of a gradient", 1};
    }
    ALL_CASES_RETURN
}
constexpr Element ACTIVATION_ELEMENTS[] = {Element::FP32, Element::BF16};
constexpr const char* name_of(Element e) { return facts_of(e).name; }
constexpr size_t bytes_of(Element e) { return facts_of(e).bytes; }
constexpr bool is_fp8(Element e) { return e == Element::FP8 || e == Element::FP8_GRADIENT; }

// The type of the elements of activations, and of the elements of the copy of the convolutions' weights that kernels
// read. start_device sets it. It is never FP8. All other weights, and all gradients of weights, are in fp32.
static Element act_element = Element::FP32;
static size_t act_bytes() { return bytes_of(act_element); }
// If activations are fp32, there is no copy: kernels read the convolutions' weights themselves.
static bool weights_have_copy() { return act_element != Element::FP32; }

// FP8 has two formats (Micikevicius et al. 2022, arXiv:2209.05433). Both have a sign, an exponent and a mantissa. A
// bias is added to the exponent before the exponent is stored.
//   Element::FP8            e4m3: four bits of exponent, three of mantissa. For values: activations and weights.
//   Element::FP8_GRADIENT   e5m2: five bits of exponent, two of mantissa. For gradients of activations, whose sizes
//                           differ more.
struct Fp8Format {
    int mantissa;         // bits of the mantissa
    int bias;             // is added to the exponent before the exponent is stored
    float largest;        // the largest number
    uint8_t largest_bits; // the bits of the largest number
};
constexpr Fp8Format E4M3{.mantissa = 3, .bias = 7, .largest = 448, .largest_bits = 0x7E};
// Only the CPU build uses E5M2. The GPU has an instruction that rounds to e5m2.
[[maybe_unused]] constexpr Fp8Format E5M2{.mantissa = 2, .bias = 15, .largest = 57344, .largest_bits = 0x7B};
constexpr uint8_t FP8_NAN = 0x7F; // these bits mean NaN in both formats
// Rounds v to the nearest FP8 number. Halfway between two FP8 numbers, the result is the one whose last bit is 0. If
// |v| is larger than the largest FP8 number, the result is that number, with v's sign. Kernels round in the same way
// (pack_fp8).
static inline uint8_t fp8_bits(float v, const Fp8Format& f = E4M3) {
    const uint8_t sign = std::signbit(v) ? 0x80 : 0;
    const float size = std::fabs(v);
    if (std::isnan(v)) return FP8_NAN;
    if (size >= f.largest) return sign | f.largest_bits;
    uint32_t bits; // the float's bits: 8 of exponent and 23 of mantissa
    memcpy(&bits, &size, sizeof bits);
    // The exponent of FP8's smallest normal number, as fp32 stores it (plus 127). FP8 numbers below that number are
    // subnormal: they are multiples of the smallest FP8 number above 0. The bits of a subnormal number, read as an
    // integer, say which multiple it is. So if |v| is that small, it is divided by the smallest FP8 number above 0, and
    // rounded to an integer.
    const int smallest_normal = 127 + 1 - f.bias;
    if ((int)(bits >> 23) < smallest_normal)
        return sign | (uint8_t)std::lrintf(std::ldexp(size, f.bias - 1 + f.mantissa));
    const int dropped = 23 - f.mantissa; // how many bits of the float's mantissa FP8 does not keep
    // Rounds the mantissa. First, half of what the last kept bit is worth is added, or a little less if that bit is 0.
    // So a value halfway becomes the number whose last bit is 0. (If the mantissa overflows, the exponent grows by 1.)
    // The last line then drops the other bits, and exchanges fp32's bias of 127 for FP8's bias.
    bits += (1u << (dropped - 1)) - 1 + (bits >> dropped & 1);
    return sign | (uint8_t)((bits >> dropped) - ((127 - f.bias) << f.mantissa));
}
// Returns the value of an FP8 number. e5m2 also has infinities, which fp8_bits never makes: here they become NaN.
[[maybe_unused]] static inline float fp8_value(uint8_t bits, const Fp8Format& f = E4M3) {
    const int exponent = (bits & 0x7F) >> f.mantissa;
    const int mantissa = bits & ((1 << f.mantissa) - 1);
    if ((bits & 0x7F) > f.largest_bits) return NAN;
    const int of_step = std::max(exponent, 1) - f.bias - f.mantissa; // the last bit of the mantissa is worth 2^of_step
    const float size = std::ldexp((float)(mantissa + (exponent ? 1 << f.mantissa : 0)), of_step);
    return bits & 0x80 ? -size : size;
}

// Where an operation writes its result, or a copy of it, in FP8. Each value is multiplied by *factor and then rounded.
// If bytes is null, the operation writes nothing in FP8.
struct Fp8Copy {
    uint8_t* bytes = nullptr;
    const float* factor = nullptr;
};

// --precision fp8, in training: a convolution's input x and its weights are multiplied by these factors before they are
// rounded to FP8 (e4m3). The factors are powers of 2, so multiplying by them rounds nothing. 448 is the largest number
// of e4m3. So the largest |x| that FP8 can hold is 28 = 448 / 16, and the largest |weight| is 3.5 = 448 / 128. Larger
// numbers are rounded to these. choose_gradient_factor returns the factor of gradients.
constexpr float FP8_X_FACTOR = 16;
constexpr float FP8_WEIGHT_FACTOR = 128;

// A convolution whose weights are rounded to FP8 in training. round_weights makes two FP8 copies of the weights. The
// forward pass reads the copy `weights`. The input gradient reads the copy `turned`, in which each 3x3 filter is turned
// by 180 degrees. offset: where the weights (Cout, 9, Cin) begin in a flat array (see Slice). turned_alone: only the
// convolution's input gradient is computed in FP8, so only `turned` is made.
struct WeightRounding {
    size_t offset;
    int Cout, Cin;
    bool turned_alone = false;
};

// A convolution is 1x1 or 3x3 (padding kernel / 2). Its input (B, H, W, C1 + C2) is one array. Only a 1x1 convolution
// may also have an input of two arrays, with C1 and C2 channels. With upsample = 1 the convolution is 3x3, its stride
// is 1, and it reads its input enlarged to 2H x 2W: each pixel becomes 2 x 2 equal pixels.
struct ConvShape {
    int B, H, W, C1, C2, Cout, kernel, stride, upsample;
    // The types of the input's and of the output's elements. The network's own input and output are always FP32.
    Element in = act_element, out = act_element;
    HD int out_H() const { return ((H << upsample) + stride - 1) >> (stride - 1); } // stride is 1 or 2
    HD int out_W() const { return ((W << upsample) + stride - 1) >> (stride - 1); }
};

enum class Nonlinearity : uint8_t { NONE, SILU }; // the function that a group norm applies to its result

// A group norm of x (B, HW, C1 + C2), which is one array, or two arrays of C1 and C2 channels.
struct NormShape {
    int B, HW, C1, C2, groups;
    Nonlinearity nonlinearity;
    float eps; // is added to the variance
};

// What the computation of a convolution's weight gradient needs: the arrays that it writes (dweight, dbias, demb), the
// arrays that it reads (dout, x1, x2), and the shape. The backward pass keeps the WeightWorks of several layers and
// then computes their weight gradients together, so that the GPU has more to do at a time.
struct WeightWork {
    float *dweight, *dbias;
    float* demb; // (B, emb_stride), or null: the embedding's gradient, which is the sum of dout over an image's pixels
    int emb_stride;
    const act *dout, *x1, *x2;
    ConvShape shape;
    // A weight gradient is computed from FP8 numbers if shape.in is FP8 and shape.out is FP8_GRADIENT. Then x1 and dout
    // are arrays of bytes. Before they were rounded, x1 was multiplied by FP8_X_FACTOR, and dout by *dout_factor. (The
    // results dweight, dbias and demb are always fp32.)
    const float* dout_factor = nullptr;
};

// Where the gradient of an input is written, and what is added to it: dx = gradient + add1 + add2. The addends are
// gradients from other readers of the same tensor. An addend may be null, or dx itself. If dx is null, the gradient is
// not written, because no layer reads it.
template <class T> struct GradOf {
    T* dx = nullptr;
    const T *add1 = nullptr, *add2 = nullptr;
};
typedef GradOf<act> Grad;

// A group norm needs two sums for each channel of the tensor that it reads: over an image's pixels, the sum of the
// channel's values, and the sum of their squares. The pixels may be divided into several parts, each with sums of its
// own. The norm then adds up the sums of all parts. sums: (B, parts, C, 2).
struct Stats {
    double* sums;
    int parts;
};

// What attention keeps of each row of scores, so that the backward pass can compute the row's softmax P again. A row
// holds the scores s = q . k of one query q with all keys k (q and k are vectors of d numbers):
// P = 2^((s - top) log2(e) / sqrt(d) - log_sum). top is the highest score of the row, or (in Hopper's kernels) the
// highest score of a part of the row. log_sum is the log2 of the row's sum of e^((s - top) / sqrt(d)). Most programs
// keep only one number, the log of the sum of e^(s / sqrt(d)). But if scores are large, that number is large, too.
// Rounding it to fp32 could change it by more than 1, and so change P by more than a factor of 2.
struct SoftmaxRow {
    float top, log_sum;
};

// A random draw depends on these values, on the sample's place in the batch, and on the draw's own number within the
// sample (the quartet: see section 3).
struct RandomKey {
    uint64_t seed;
    uint32_t purpose;    // what is drawn: RANDOM_NOISE or another RandomPurpose
    const int64_t* step; // in device memory; read at each draw, so a recorded CUDA graph draws anew in each step
    int64_t sample0;     // the number of the first sample; no two microbatches of a step have samples of equal numbers
};

// Returns the same key with another purpose.
HD static inline RandomKey of_purpose(RandomKey key, uint32_t purpose) {
    key.purpose = purpose;
    return key;
}

// What is random about the pictures that a batch is conditioned on. Outside of training all members except the key are
// 0, so only the holes of --cond mask are random.
struct PictureDraws {
    RandomKey key;            // the seed, the step and the first sample; each draw sets the purpose
    bool random_flip = false; // whether an image and its picture are mirrored with probability 1/2
    float dropout = 0;        // the probability of leaving a picture out
    float noise = 0;          // the largest standard deviation of the noise on a small picture
};

// How the picture that the network is conditioned on is made of an image (--cond). FILE: it is not made of the image,
// but comes from --cond_file, or there is no picture.
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

// Dropout with probability p; p = 0: there is none. Its random draws depend on the other members.
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
    int index = 0;   // ddpm: the timestep t, from 0 to diffusion_steps - 1; for remember_losses
    // ddpm: 1 / (diffusion_steps times the probability of drawing t). It is a factor of `weight`, and of the bound's
    // weight, too.
    float importance = 0;
    float target_teacher = 0; // ect: the teacher's answer (see TuningWeight) times this is added to the target
};

// A Frame says which formulas compute the members of a NoiseLevel, such as the network's input and its target: those of
// ddpm_level, edm_question or flow_question.
enum class Frame : uint8_t { DDPM, EDM, FLOW };

// The weight of a sample's loss with --objective ect. The loss is the distance between two images: the one that the
// network (the student) makes of an input with noise of sigma = t, and the one that the same network (the teacher)
// makes of an input with less noise, sigma = r. GAP: the weight is 1 / (t - r). SNR: it is 1 / t^2 + 1 / sigma_data^2.
enum class TuningWeight : uint8_t { GAP, SNR };

// --objective ect, consistency tuning (Geng et al. 2024). The letters are the paper's. The comments above teacher_sigma
// explain q, k, b and d, and the formula above tuning_loss contains c.
struct Tuning {
    float q = 0, k = 0, b = 0, c = 0; // q = 0: there is no consistency tuning
    int64_t d = 1;                    // how many steps a stage has. The stage's number, from 1 on, is the paper's `a`
    TuningWeight weight = TuningWeight::GAP;
    // Device: the number of the step, from which `a` is computed. In training this is the current step, and in
    // validation it is the run's last step.
    const int64_t* step = nullptr;
    HD bool on() const { return q > 0; }
};

// A change to an image (--augment), and the numbers that the network is told of the change (`told`; a list above
// Matrix2 explains them). First the image is mirrored: with flip_x its left and right are exchanged, with flip_y its
// top and bottom. Pixel (x, y) of the changed image is then pixel (x_x x + x_y y + x_1, y_x x + y_y y + y_1) of the
// mirrored image. Coordinates are measured in pixels, from the centre.
constexpr int AUGMENT_NUMBERS = 9;
struct Augmentation {
    float told[AUGMENT_NUMBERS];
    bool flip_x, flip_y;
    double x_x, x_y, x_1;
    double y_x, y_y, y_1;
};

// How the sigma of a sample of training or validation is drawn (draw_level), if Objective::levels is null.
struct SigmaDraws {
    float P_mean, P_std; // ln(sigma) is normally distributed; its mean and standard deviation
    bool uniform_t;      // true: instead, t = sigma / (1 + sigma) is uniformly distributed between 0 and 1
};

// What a model is trained on: how noise levels are drawn, and what the loss is. The loss is
// mse * weight * squared error + bound * importance * term. `weight` and `importance` are members of the drawn
// NoiseLevel. `term` is the part of the variational bound, in nats, that belongs to the drawn timestep (bound_term). If
// mse is above 0, the bound trains only the variance that the network predicts. If mse is 0, the bound also trains the
// predicted mean. If tuning.on(), the loss is that of tuning_loss instead.
struct Objective {
    const NoiseLevel* levels; // device: (steps), the level of each t; null: sigma is drawn, see SigmaDraws
    int steps;                // how many timesteps t there are
    SigmaDraws draws;
    float sigma_data; // of edm and ect: the standard deviation of the data
    float mse, bound;
    // Device: (steps), the root mean square of the latest losses of each t, see remember_losses. The larger it is, the
    // more often this t is drawn (draw_weighted_level). Null: all t have the same probability.
    const double* rms_losses = nullptr;
    Frame frame = Frame::DDPM;
    Tuning tuning{};
};

// A sampler's step from x to x'. Here x is the network's input, and x' is its input in the next step. (device_step, in
// section 8, calls them u and u'.) The array m is what the sampler remembers from one step to the next, z is new noise,
// and out is the network's answer. limit leaves its argument as it is, or limits it (see Denoising):
//   x0 = limit(x0_x x + x0_out out)
//   x' = next_x x + next_x0 x0 + next_m m + sigma z
//   m' = m_x x + m_x0 x0
// With range > 0 the network has learned sigma: sigma = exp(log_sigma + range (v + 1) / 2), where v is the second half
// of the channels of the network's answer. (Guidance does not change v: also in a guided step, v is read from the
// answers for the first half of the batch.)
struct SamplerStep {
    float t;        // what the network is told
    float guidance; // see Denoising; 1: this step is not guided
    float x0_x, x0_out;
    float next_x, next_x0, next_m;
    float m_x, m_x0;
    float sigma, log_sigma, range;
    float known_x, known_sigma, back_x, back_sigma; // see keep_known
};

// Settings that are the same in all steps of a sampler.
// With guidance, the second half of the batch is a copy of the first half. For the copies the network is not told the
// class, the numbers (--cond_dim) or the picture, if training has also left these out sometimes. The network's answers
// for the copies are called `unconditional`, and its answers for the first half are called `out`. The sampler uses the
// answer unconditional + guidance * (out - unconditional), where guidance is SamplerStep::guidance. In a step whose
// guidance is 1, the network computes only the first half.
// If limit is true, x0 is limited to [-s, s] and divided by s. With rank < 0, s is 1. With rank >= 0, s is the rank-th
// smallest |x0| of the image (counted from 0), or 1 if that |x0| is smaller than 1.
struct Denoising {
    bool limit, guided;
    int rank;
    float* threshold; // device: (B), memory for s of each image
    float* m;         // device: (B, HW, C), what the sampler remembers; null: this sampler remembers nothing
};

// How the learning rate changes after the warm-up: see lr_factor.
enum class LrSchedule { CONSTANT, LINEAR, COSINE };

// Optimiser settings of a whole run.
struct AdamW {
    float lr, weight_decay, beta1, beta2, eps, grad_clip, ema_rate;
    LrSchedule lr_schedule;
    int64_t warmup_steps, max_steps;
};

// Ranks share the work of the optimiser. Weights and gradients are flat arrays of n floats (n is a multiple of 4), with
// padding after them. An array is cut into segments. Each segment is cut into one part for every rank. Each part is cut
// into `stretches` stretches of STRETCH floats. With two ranks and three segments:
//
//   | rank 0 | rank 1 | rank 0 | rank 1 | rank 0 | rank 1 |
//   |    segment 0    |    segment 1    |    segment 2    |
//
// A rank owns its parts of all segments. These parts together are called its slice. Of the moments and averages, a rank
// stores only its slice, in which its parts follow each other directly. Each segment has parts of all ranks. So the
// gradients of one segment can be sent to their owners while those of another segment are still computed.
// The weights that the network reads in fp32, not from a copy, lie at the beginning of the array (Update::plain).
//
// How many floats a stretch has. For the norm of the gradient, sum_gradients makes one sum of squares for each stretch.
constexpr size_t STRETCH = 1 << 14;
struct Slice {
    size_t n;
    int segments, stretches, rank, ranks;
    HD size_t each() const { return stretches * STRETCH; } // how many floats of a segment a rank owns
    HD size_t owned() const { return segments * each(); }  // how many floats a rank owns in all segments
    HD size_t whole() const { return ranks * owned(); }    // how many floats a flat array has with its padding
    // Returns where in a flat array rank r's part of a segment begins.
    HD size_t at(int segment, int r) const { return ((size_t)segment * ranks + r) * each(); }
    // Returns where in a flat array the i-th float of this rank's slice lies.
    HD size_t flat(size_t i) const {
        const unsigned segment = (unsigned)(i / STRETCH) / stretches;
        return i + ((size_t)segment * (ranks - 1) + rank) * each();
    }
};

// The gradients of this rank's slice, as each rank has computed them. own: a flat array of the gradients that this rank
// has computed. received: another flat array. At the place of rank r's part of a segment, it holds the gradients that
// rank r has computed for this rank's part of that segment. Nothing is received at the places of this rank's own parts.
// At those places, the array holds the sum over all ranks (Trainer::sum is the same array). With one rank, received is
// null.
struct RankGradients {
    const float *own, *received;
    Slice slice;
    // Returns the gradients that rank r has computed. The pointer is shifted, so that a float of this rank's slice has
    // the same index in the result as in a flat array.
    HD const float* of(int r) const {
        return r == slice.rank ? own : received + (r - slice.rank) * (ptrdiff_t)slice.each();
    }
};

// An array of this rank, and the same array of the other ranks whose memory this rank can write to. A kernel writes
// its result to all of these arrays.
constexpr int NEAR = 8; // the largest number of ranks that write to each other's memory
template <class T> struct Everywhere {
    T* at[NEAR]; // this rank's array is the first
    int ranks = 1;
};

// adamw_update works on these arrays. params, copy (the weights in the activations' type) and sum are flat arrays. ema,
// m and v hold only this rank's slice. New weights are written to this rank and to all ranks whose memory this rank can
// write to. The network reads the first `plain` weights from params, in fp32, and all other weights from copy. (If
// activations are fp32, `plain` includes all weights, and copy is the same array as params. With --precision fp8,
// round_weights makes FP8 copies of some of the weights in copy.)
struct Update {
    Everywhere<float> params;
    Everywhere<act> copy;
    size_t plain;
    float *ema, *m, *v;
    const float* sum; // the sum of the ranks' gradients
    // For each 64 floats of a flat array: 1 if they belong to a matrix that Muon updates, else 0. For the elements of
    // these matrices, `sum` no longer holds gradients when adamw_update reads it, but directions (update_by_muon). The
    // update subtracts lr times the direction. Without --optimizer muon, is_matrix is null.
    const uint8_t* is_matrix;
};

// --optimizer muon. A matrix of weights (rows, columns) that Muon updates. A convolution's matrix has a row for each
// output channel.
struct MuonMatrix {
    size_t offset;        // where its elements begin in a flat array
    int rows, columns;    // multiples of 32
    size_t square_offset; // where its square matrices (short_side, short_side) begin in MuonWork::A and MuonWork::B
    HD int short_side() const { return rows < columns ? rows : columns; }
    HD int long_side() const { return rows < columns ? columns : rows; }
};
// A GPU computes a product of matrices in tiles. A MuonTile says which part of which result a tile is.
struct MuonTile {
    int matrix, row, column; // the tile's matrix, and its first row and column in the result
};
struct MuonTiles { // the tiles of the results of all matrices
    const MuonTile* list = nullptr;
    int count = 0;
    int tile_size = 0; // how many rows a tile has; it has as many columns
};
// All matrices that Muon updates, and what a GPU needs to compute with them (prepare_muon).
struct MuonWork {
    std::vector<MuonMatrix> matrices;
    size_t squares_size = 0; // how many numbers the square matrices (short_side, short_side) have together
    // The arrays that these members point to are in the GPU's memory:
    const MuonMatrix* on_device = nullptr; // the same list of matrices
    MuonTiles square_tiles;                // of results (short_side, short_side)
    MuonTiles tiles;                       // of results (rows, columns)
    act* X = nullptr;                      // flat, in the activations' type: at first a copy of Nesterov's momentum
    // For each matrix X, A and B hold a square matrix (short_side, short_side): A = X X^T (or X^T X, if X has more rows
    // than columns), and B = b A + c A A, where b is MUON_B and c is MUON_C.
    act *A = nullptr, *B = nullptr;
};
// Muon's constants (Jordan et al. 2024): the decay of the momentum, and the coefficients a, b and c of the polynomial
// that is applied five times (see the comments above update_by_muon).
constexpr float MUON_MOMENTUM = 0.95f;
constexpr int MUON_ITERATIONS = 5;
constexpr float MUON_A = 3.4445f, MUON_B = -4.7750f, MUON_C = 2.0315f;
// X is a matrix's Nesterov momentum (update_by_muon), and |X|^2 is the sum of the squares of the elements of X. If
// |X|^2 is below this number, X is only what rounding has left of a gradient of 0. Then the direction is 0, and only
// the weight decay changes the matrix.
constexpr double MUON_SMALLEST = 1e-28;
// Returns the factor that makes Muon's updates about as large as AdamW's (Liu et al. 2025, eq. 4).
HD static inline float muon_scale(const MuonMatrix& m) { return 0.2f * sqrtf((float)m.long_side()); }

// The running mean and variance of the loss, and those of the gradient's norm. The function `healthy` compares each new
// step with these numbers. Only healthy steps change the numbers.
struct Guard {
    double n; // how many healthy steps there were; a resumed run may begin again at 0 (compare_with_checkpoint)
    double mean_loss, var_loss, mean_norm, var_norm;
};

// The state that changes from step to step, in device memory.
struct StepState {
    int64_t step, updates;         // how many steps have ended, and how many of them have changed the weights
    int64_t bad_total, bad_in_row; // how many steps were skipped: in all, and since the last good step
    double loss, grad_norm;
    double loss_q[4]; // the mean loss of each quarter of the noise levels
    int count_q[4];   // how many samples fell into each quarter
    int ok;           // 1: the step was good
    float lr;
    Guard guard;
};

// A residual block's skip connection: a 1x1 convolution of [x1 | x2]. If conv_takes_skip returns true, the convolution
// that adds the skip connection's result computes the skip connection, too, and reads this struct. Otherwise the skip
// connection is computed as a convolution of its own. weight: (Cout, C1 + C2).
struct ConvSkip {
    const act *x1, *x2, *weight;
    const float* bias;
    int C1, C2;
};

// =====================================================================================================================
// 2. The interface: all that the program asks of a device
// dev/reference.h implements it with loops (the CPU build), and Part II with kernels. Another kind of device would need
// these functions. A function's first arguments are its outputs. Its inputs follow, and then sizes. A function
// overwrites its outputs, if its comment does not say otherwise. This is also true of gradients in backward functions:
// they do not add to the old values.
// A comment after an argument gives its shape, or says what it is. "as x" means: it has the shape of x. [Brackets]
// enclose what may be null, but [x1 | x2] means the channels of x1, followed by those of x2.

// A queue of a GPU's operations, which run one after the other. Different streams can run at the same time.
struct Stream;
extern Stream* const MAIN_STREAM; // the stream of all operations that are not given another stream
constexpr int HISTORY = 10;       // how many losses of each t --schedule_sampler loss-second-moment remembers

HD static inline int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// Convolution: out = conv([x1 | x2], weight) + bias [+ emb] [+ residual]. The sums that a later group norm
// needs are written to stats. With a skip, the convolution also computes a skip connection and adds its result.
// conv_takes_skip returns whether this is possible. With a skip there is no emb and no residual. If s.in is FP8, x1 and
// weight are FP8, and out = factors * conv(x1, weight) + the same addends (bias and so on). x1 and weight were
// multiplied by other factors before they were rounded to FP8, and `factors` undoes this.
// conv_backward_input computes the gradients of x1 and x2. Here s.out is the type of dout's elements. If s.out is
// FP8_GRADIENT, dout is in e5m2, weight is the array `turned` of round_weights, in e4m3, and dx1 = factors * (the sums
// of products). In this case there is only the input x1, and nothing is added to its gradient.
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
// conv_backward_weights computes the weight gradients of several layers together, because a launch should have enough
// work to keep the device busy. conv_weight_load returns the work of one layer's weight gradient, as a fraction of the
// work that is enough for a launch (1 or more: this layer is enough alone). The caller collects layers until the sum of
// these fractions reaches 1.
static void conv_backward_weights(const std::vector<WeightWork>& works, Stream* stream);
static double conv_weight_load(const ConvShape& s);

// Group norm [and nonlinearity f] [and dropout] of [x1 | x2] over C = C1 + C2 channels: out = f(xhat weight + bias),
// with xhat = (x - mean) rstd and rstd = 1 / sqrt(variance + eps). The mean and the variance are those of a group's
// channels in one image. With scale_shift, out = f((xhat weight + bias) (1 + scale) + shift). The columns [0, C) of
// scale_shift are scale, and the columns [C, 2C) are shift. groupnorm_forward writes its result to `fp8` if that is
// given, and else to `out`. groupnorm_backward writes dx1 and dx2, with their addends, also in FP8 (e5m2), if dx1_fp8
// and dx2_fp8 are given.
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

// --precision fp8, in training. round_weights makes two copies of convolutions' weights, in e4m3. In both copies a
// convolution's weights begin at the same place as in the flat array `copy`. Each weight is multiplied by
// FP8_WEIGHT_FACTOR before it is rounded. In `turned`, the weights are in the order in which input gradients read them.
// round_gradient writes a copy of dout, an array of n gradients (n is a multiple of 16), in e5m2.
static void round_weights(uint8_t* weights, // flat: (Cout, tap, Cin) of each convolution that has Layer::fp8
                          uint8_t* turned,  // flat: (Cin, 8 - tap, Cout) of each convolution in `works`
                          const act* copy,  // flat: the weights in bf16; both outputs are made from it
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
// equal pixels. In the forward and the backward functions, H and W are the size of x, which is the input of the forward
// function.
static void downsample_forward(act* out, Stats* stats, const act* x, int B, int H, int W, int C);
static void downsample_backward(Grad dx, const act* dout, int B, int H, int W, int C);
static void upsample_forward(act* out, Stats* stats, const act* x, int B, int H, int W, int C);
static void upsample_backward(Grad dx, const act* dout, int B, int H, int W, int C);

// to_patches turns squares of p x p pixels into channels (c, row, column), as PyTorch's pixel_unshuffle: x (B, H, W, C)
// becomes out (B, H / p, W / p, C p p), in fp32. from_patches is the reverse, pixel_shuffle, with out (B, H, W, C). H
// and W are multiples of p.
static void to_patches(float* out, const float* x, int B, int H, int W, int C, int p);
static void from_patches(float* out, const float* x, int B, int H, int W, int C, int p);

// Adds a picture as a condition: out (B, HW, C + K) = [x | cond], in fp32, from x (B, HW, C) and cond (B, HW, K).
static void join_channels(float* out, const float* x, const float* cond, int B, int HW, int C, int K);
// These functions write the pictures of a batch as the network reads them. take_pictures copies given pictures; the
// functions after it make pictures of the images (for --cond lowres in two steps). A picture is mirrored if its image
// is mirrored. A picture that is left out is all zeros.
static void take_pictures(float* cond,          // (B, H, W, K)
                          const void* pictures, // (B, K, H, W), of 1 or 4 bytes a value
                          PictureDraws draws, int B, int K, int H, int W, int bytes);
// --cond lowres. shrink_images makes small pictures. Each of their pixels is the mean of a square of factor x factor
// pixels of the image. If draws.noise is above 0, noise is added. enlarge_pictures enlarges the small pictures to the
// size of the images.
static void shrink_images(float* small,       // (B, H / factor, W / factor, C)
                          const void* images, // (B, C, H, W)
                          int factor, PictureDraws draws, int B, int C, int H, int W, int bytes);
static void enlarge_pictures(float* cond,        // (B, H, W, C)
                             const float* small, // (B, H / factor, W / factor, C)
                             int factor, PictureDraws draws, int B, int C, int H, int W);
// --cond gray: grey_images makes grey pictures of the images. --cond mask: mask_images makes copies of the images, with
// holes. One more channel is 1 in the holes and -1 elsewhere.
static void grey_images(float* cond,        // (B, H, W, 1)
                        const void* images, // (B, 3, H, W)
                        PictureDraws draws, int B, int H, int W, int bytes);
static void mask_images(float* cond,        // (B, H, W, C + 1)
                        const void* images, // (B, C, H, W)
                        PictureDraws draws, int B, int C, int H, int W, int bytes);

// All arrays of the embedding's layers are fp32, with any --precision. linear: out = x weight^T + bias
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
// Turns the number t of each sample into sinusoids of different frequencies f_i:
// out (B, dim) = [cos(t f_i), sin(t f_i)], f_i = max_period^(-i / (dim / 2)); dim is even
static void timestep_embedding_forward(float* out, const float* t, int B, int dim, int max_period, Stream* stream);
// Adds a row of a table to the embedding x of each sample: out = x + table[label]. In the backward pass dx is dout
// (plus addends), and the row of a label in dtable is the sum of dout over the samples with this label.
static void label_embedding_forward(float* out,         // (B, C)
                                    const float* x,     // (B, C)
                                    const float* table, // (rows, C)
                                    const int* labels,  // (B)
                                    int B, int C, Stream* stream);
static void label_embedding_backward(GradOf<float> dx,  // as x
                                     float* dtable,     // as table
                                     const float* dout, // as out
                                     const int* labels, int B, int rows, int C);
// Adds a projection of each sample's K numbers to its embedding x: out = x + values weight^T. The backward function
// computes dx = dout (plus addends) and dweight = dout^T values.
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
// The gradients dweight and dbias of a group norm are sums over the images. groupnorm_backward may leave the terms of
// these sums in memory. finish_gradients, called at the end of the backward pass, adds the terms up for many norms at
// once.
static void finish_gradients();

// Diffusion. Draws each sample's noise level. Writes the level, t (what the network is told of the level), and in which
// quarter of all levels it lies.
static void draw_levels(NoiseLevel* levels, float* t, int* quarters, int B, const Objective& o, RandomKey key);
// For consistency tuning (--objective ect). draw_levels draws a noise level for each sample. Each sample also has a
// second, lower noise level. The network's answer at the second level is called the teacher's answer. It becomes a part
// of the sample's target. This function writes the second level of each sample (teachers), and what the network is told
// of this level (t).
static void draw_teachers(NoiseLevel* teachers, float* t, int B, const Objective& o, RandomKey key);
// Mixes noise into images: x_t = signal x_0 + sigma noise (Ho et al. 2020, eq. 4). It also writes target, which
// is what the network should answer: target_x0 x_0 + target_noise noise [+ target_teacher teacher].
static void q_sample_forward(float* x_t, float* target, // (B, H, W, C)
                             const NoiseLevel* levels,  // (B)
                             const float* teacher,      // [as target]: the teacher's answer
                             const void* images,        // x_0 (B, C, H, W): uint8 if bytes is 1, float32 if bytes is 4
                             bool random_flip,          // whether to mirror each image with probability 1/2
                             RandomKey noise_key, RandomKey flip_key, int B, int C, int H, int W, int bytes);
// Computes the loss that objective o chooses. The loss of a sample is a mean over its values. dout is the gradient of
// factor * (the sum of the samples' losses) with respect to out, the network's answer, with one exception: if o.mse is
// above 0, the variational bound adds nothing to the gradient of the first C channels (see Objective). If Cout is
// larger than C, but there is no bound (o.bound = 0), the gradient of channels C to Cout - 1 is 0.
static void loss_forward_backward(double* loss,             // (B)
                                  float* dout,              // as out
                                  const float* out,         // (B, HW, Cout)
                                  const float* target,      // (B, HW, C)
                                  const float* x,           // (B, HW, C): the network's input
                                  const NoiseLevel* levels, // (B)
                                  const Objective& o, float factor, int B, int HW, int C, int Cout);
// This function is called in place of loss_forward_backward if o.tuning.on(), where o is the Objective. The loss of a
// sample is weight (sqrt(D + c^2) - c): its weight times the pseudo-Huber distance between the student's image and the
// teacher's image. D is the sum of (x0_out (out - target))^2 over the sample's n values. weight and x0_out are members
// of its NoiseLevel. dout is the gradient of factor * (the sum of the samples' losses).
static void tuning_loss_forward_backward(double* loss,             // (B)
                                         float* dout,              // as out
                                         const float* out,         // (B, n)
                                         const float* target,      // (B, n)
                                         const NoiseLevel* levels, // (B)
                                         float c, float factor, int B, int n);
// --augment: draws a change for each image (draw_augmentation), and applies the change. A change consists of changes of
// several kinds, which are drawn separately. The probability of each kind is p, with two exceptions: it is p/2 for
// upside down, and 1/2 for mirroring.
static void augment_images(float* out,          // (B, C, H, W)
                           Augmentation* drawn, // (B)
                           float* canvas,       // (B, C, fine_size(H), fine_size(W)): working memory
                           float* told,         // (B, stride), of which AUGMENT_NUMBERS columns are written
                           int stride,
                           const void* images, // (B, C, H, W), of 1 or 4 bytes a value
                           float p, RandomKey key, int B, int C, int H, int W, int bytes);
// With --schedule_sampler loss-second-moment: writes the losses of the step's samples to history, and computes
// rms_losses from history (remember_losses). T: the number of timesteps (--diffusion_steps).
static void update_rms_losses(double* rms_losses,       // (T)
                              float* history,           // (T, HISTORY + 1)
                              const NoiseLevel* levels, // (B)
                              const double* loss,       // (B)
                              const StepState* state, int T, int B);

// Sampling. Draws standard normal numbers, and multiplies them by scale. The results overwrite out (B, per_sample) or,
// if add is true, are added to what out holds.
static void draw_normals(float* out, int B, int per_sample, RandomKey key, float scale, bool add);
// Sets each element of t (B) to what the network is told in the sampler's step number *k.
static void sampler_timesteps(float* t, const SamplerStep* steps, const int64_t* k, int B);
// Makes step number *key.step of the sampler, and overwrites x by the result. With guidance, x and out hold 2 B
// samples: B samples with class, numbers and picture, then the same B samples without. (In a step that is not guided,
// the second half of out is old, and not read.)
static void sampler_step(float* x,         // (B or 2 B, HW, C)
                         const float* out, // (B or 2 B, HW, Cout): the network's answer
                         const SamplerStep* steps, const Denoising& d, RandomKey key, int B, int HW, int C, int Cout);
// Inpainting. keep_known runs after each step of the sampler, and does nothing if the step's known_x is 0. A pixel of
// the image is known if the mask is not above 0 there. At the known pixels, x becomes known_x image + known_sigma z,
// where z is standard normal. Then at all pixels x' = back_x x + back_sigma z', where z' is drawn separately. If the
// sampler goes back to an earlier step after this one, this second formula adds noise, so that x has as much noise as
// that step needs. (Otherwise back_x is 1 and back_sigma is 0.)
static void keep_known(float* x,           // (B or 2 B, n)
                       const float* image, // (B, n)
                       const float* mask,  // (B, n)
                       const SamplerStep* steps, RandomKey key, bool guided, int B, int n);

// Optimiser, for a slice of the flat arrays. Adds up the ranks' gradients in the order of the ranks, and writes the
// result to sum (flat). If add is true, the old content of sum is the first term. Then, for each stretch of this slice,
// the squares of its numbers in sum are added up. This total is written to squares. As with new weights, each total is
// written to all ranks whose memory this rank can write to (Everywhere). The comments above step_gradients explain the
// order, and why there are stretches.
static void sum_gradients(float* sum, const Everywhere<double>& squares, const RankGradients& grads, bool add);
// Computes the step's loss, the norm of its gradient and its learning rate, and decides whether the step is good or is
// skipped (judge_batch).
static void judge_step(StepState* state, const double* squares, // (stretches)
                       size_t stretches, const double* loss,    // (B)
                       const int* quarters,                     // (B)
                       AdamW h, int B);
// Updates this rank's slice of the weights by AdamW (Loshchilov & Hutter 2019) with clipping. But Muon's matrices are
// updated along the directions that u.sum holds (see Update::is_matrix). Then updates the first average of the weights.
// If state->ok is 0 (the step is skipped), nothing changes.
static void adamw_update(const Update& u, const StepState* state, AdamW h, Slice own);
// --optimizer muon: what is done before adamw_update (see the comments above update_by_muon). In a skipped step
// (state->ok is 0), muon_momentum and orthogonalise do nothing.
// muon_momentum updates the momentum, u.m, of this rank's part of Muon's matrices. Then it writes the Nesterov momentum
// to X, a flat array, which may be u.sum.
static void muon_momentum(float* X, const Update& u, const StepState* state, AdamW h, Slice own);
// For each of Muon's matrices, replaces the momentum X by the direction of the matrix's update. X is a flat array.
static void orthogonalise(float* X, const MuonWork& muon, const StepState* state);
// Allocates what `orthogonalise` needs on a GPU. flat_size: the length of a flat array.
static void prepare_muon(MuonWork* muon, size_t flat_size);
// Updates one of the other averages of the weights (average_share). adamw_update updates the first one.
static void ema_update(float* ema, const float* params, const StepState* state, float rate, Slice own);
// Writes n weights to copy, in the activations' type. n is a multiple of 4. If activations are fp32, there is no copy,
// so nothing is written.
static void cast_params(act* copy, const float* params, size_t n);
static void next_step(int64_t* step); // adds 1 to *step, after all draws of the step
// Copies *state to records[i % count], where i is the number of the step that has just ended (state->step - 1). From
// there the host reads it later, for the log.
static void record_step(StepState* records, const StepState* state, int count);

// These functions return how many bytes of memory an operation needs in addition to the arrays that it is called with.
// On a CPU, they return 0.
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
// Allocates the workspaces. Without training, only `main` is needed.
static void reserve(const Workspace& most, bool training);

// These functions send data from device to device between ranks (unet/host/ranks.h). They work on a stream, in multiples of
// 4 bytes, and may be recorded in a Graph. A single rank does not call them. If NCCL sends the data, the calls between
// begin_exchange and end_exchange become one launch. If the ranks write to each other's memory (world.direct),
// end_exchange makes the main stream wait until the data of all ranks has arrived.
//   all_to_all   rank r receives part r of the sendbuf of every other rank s, as part s of its recvbuf
//   all_gather   copies the arrays `own` of all ranks to `all`, in the ranks' order. `own` may point to the place in
//                `all` where this rank's array belongs. If other ranks write to `all` directly (see open_alloc), it
//                must point there, because then a rank copies its array only to the other ranks
static void all_to_all(void* recvbuf, const void* sendbuf, size_t bytes, Stream* stream); // bytes: the size of a part
static void all_gather(void* all, const void* own, size_t bytes, Stream* stream);
static void begin_exchange();
static void end_exchange();

// open_alloc returns device memory. If world.direct is true, other ranks may write to it, and all_to_all and all_gather
// write to it directly. at_rank returns the address in rank r's memory that corresponds to p, or null if p is not in
// memory of open_alloc that other ranks may write to. If world.direct is true, meet makes each device wait until all
// devices have called it. Otherwise meet does nothing, because only direct writes need it.
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
// Connects this rank's device with the devices of the other ranks. direct: whether devices may write to each other's
// memory. world.direct becomes true if they may and can: there are at most NEAR ranks, all on one machine, and each
// GPU can open the memory of the others (open_alloc).
static void join_devices(bool direct);

// The device: memory, and copies to and from it. New memory is filled with zeros. start_device chooses the device
// (number: --device), and sets act_element, as --precision asks.
static void start_device(const std::string& precision, int number);
static std::string device_name();
static int count_gpus();        // how many GPUs this process could use; in the CPU build it ends the program
static size_t device_bytes = 0; // how many bytes of device memory are allocated
static void* device_alloc_bytes(size_t bytes);
static size_t device_available();
static void copy_to_device(void* to, const void* host, size_t bytes);
static void copy_to_host(void* host, const void* from, size_t bytes);
static int max_stat_parts(int H, int W); // the largest Stats::parts of a tensor of this size

// A list of launches that is repeated with the same pointers. On a GPU, the first call of replay(g, work) calls work()
// and records its launches, without running them. Then this call and all later calls run the recorded launches, as one
// launch. On a CPU, or if allowed.graphs is false, each call of replay calls work().
struct Graph {
    void* exec = nullptr;
    size_t nodes = 0; // how many launches the graph contains
};
template <class F> static void replay(Graph* g, F work);
static void free_graph(Graph* g);

// run_beside runs work on the side stream, at the same time as later work on the main stream. ticket: a number that the
// caller chooses for this work. wait_for_side(ticket) makes the main stream wait until two things have ended: the work
// with this ticket, and all earlier work of the side stream. (On a CPU, run_beside returns when the work has ended.)
template <class F> static void run_beside(int ticket, F work); // work takes a Stream*: the side stream
static void wait_for_side(int ticket);
// Each of these switches allows something that makes the program faster. dev/bench turns them off, for its profile and
// for tests. early, beside and graphs do not change any bit of the results. The other switches change bits, because
// they decide in which order numbers are summed.
static struct Allowed {
    bool early = true;   // a kernel may begin while the previous kernel still runs
    bool beside = true;  // run_beside has a stream of its own; false: it uses the main stream
    bool batches = true; // one launch computes the weight gradients of several layers
    bool graphs = true;  // repeated work is one launch
    // start_device reads `beside`, `clusters` and `hopper`. So these three must be set before start_device is called.
    bool clusters = true; // kernels may use clusters: blocks that access each other's shared memory
    bool hopper = true;   // kernels with instructions that only Hopper has, in place of kernels for any GPU
} allowed;

// A buffer that the host fills for the device. A trainer has two buffers: the host fills one, while the device still
// works on the other.
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
// Returns the array from which kernels read the convolutions' weights. Usually it is new memory for a copy of the n
// parameters. If activations are fp32, there is no copy (weights_have_copy), and the array is params.
static act* make_copy(float* params, size_t n) {
    return weights_have_copy() ? (act*)device_alloc_bytes(n * act_bytes()) : (act*)params;
}

// =====================================================================================================================
// 3. Random numbers: every draw is a pure function of (seed, purpose, step, sample)
// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), key = seed,
// counter = (quartet, sample, step, purpose). A quartet is a group of four random words that are drawn together; the
// counter holds its number within the sample. Philox has no state, so any step of any run can be reproduced alone, on
// any machine.

// The last word of the counter is the purpose: what is drawn. Each purpose has its own number. Dropout must draw
// different numbers in each residual block. So for dropout this word also contains the residual block's index, from
// bit 8 on.
// All that is drawn depends on these numbers, and common/random_numbers.py has the same numbers. So the number of a
// purpose must not change: append new purposes at the end.
enum RandomPurpose : uint32_t {
    RANDOM_INIT = 0,
    RANDOM_TIMESTEP,
    RANDOM_NOISE,
    RANDOM_FLIP,
    RANDOM_ORDER, // the order of the images
    RANDOM_DROPOUT,
    RANDOM_SAMPLE_START, // the noise that a sampler begins with
    RANDOM_SAMPLE_NOISE, // the noise that a sampler adds in its steps
    RANDOM_VAL_TIMESTEP,
    RANDOM_VAL_NOISE,
    RANDOM_CLASS_DROPOUT,
    RANDOM_KNOWN_NOISE, // --inpaint: the noise on the part of the image that is known
    RANDOM_BACK_NOISE,  // --inpaint: the noise that leads back to an earlier step
    RANDOM_AUGMENT,
    RANDOM_COND_DROPOUT,
    RANDOM_COND_NOISE, // the noise on a small picture (--cond lowres)
    RANDOM_MASK,       // the holes of --cond mask
};

struct Words {
    uint32_t w[4];
};

// Returns four random words of 32 bits. Each round multiplies words 0 and 2 by constants. The upper halves of the two
// products are combined by XOR with words 3 and 1 and with the key: the results are the new words 2 and 0. The lower
// halves are the new words 3 and 1. The key changes by a constant from round to round.
HD static inline Words philox(uint64_t seed, uint32_t quartet, uint32_t sample, uint32_t step, uint32_t purpose) {
    Words c{{quartet, sample, step, purpose}};
    uint32_t key0 = (uint32_t)seed;
    uint32_t key1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t product0 = 0xD2511F53ull * c.w[0];
        const uint64_t product1 = 0xCD9E8D57ull * c.w[2];
        const uint32_t high0 = (uint32_t)(product0 >> 32);
        const uint32_t high1 = (uint32_t)(product1 >> 32);
        c = {{high1 ^ c.w[1] ^ key0, (uint32_t)product1, high0 ^ c.w[3] ^ key1, (uint32_t)product0}};
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return c;
}

// Makes four standard normal numbers of four random words (Box & Muller 1958). Each pair u, v in (0, 1) gives the two
// numbers sqrt(-2 ln u) cos(2 pi v) and sqrt(-2 ln u) sin(2 pi v). u and v are multiples of 2^-24, which fp32 holds
// without rounding, and are never 0 or 1. So a GPU and a CPU compute with the same u and v. The GPU computes the
// formulas in fp32, and the CPU in double. Their results agree to 1e-6.
HD static inline void normals(float z[4], const Words& r) {
    for (int k = 0; k < 4; k += 2) {
        const float u = ((r.w[k] >> 9) + 0.5f) * 0x1p-23f;
        const float v = ((r.w[k + 1] >> 9) + 0.5f) * 0x1p-23f;
#ifdef __CUDA_ARCH__
        float sine, cosine;
        const float radius = sqrtf(-2 * logf(u));
        sincospif(2 * v, &sine, &cosine);
#else
        const double radius = std::sqrt(-2 * std::log((double)u));
        const double angle = 2 * M_PI * v;
        const double sine = std::sin(angle);
        const double cosine = std::cos(angle);
#endif
        z[k] = (float)(radius * cosine);
        z[k + 1] = (float)(radius * sine);
    }
}

// An element (by dropout), an image's class and numbers, or an image's picture may be left out, with probability p.
// This happens if its random word is below this threshold.
HD static inline uint32_t dropout_threshold(float p) { return (uint32_t)((double)p * 4294967296.0); }

// In each epoch the images 0 to n - 1 are in another order. Returns the number of the image at position pos. A Feistel
// network of four rounds permutes the numbers of 2 * half_bits bits: it splits a number into a left and a right half,
// mixes the left half with a random function of the right half, and exchanges the halves. There are 4^half_bits such
// numbers, in general more than n. So if the result is not below n, it is permuted again, until it is below n.
static inline int64_t permuted_index(uint64_t seed, int64_t pos, int64_t epoch, int64_t n) {
    int half_bits = 1; // how many bits a half has: two halves must be able to hold all numbers below n
    while ((int64_t)1 << 2 * half_bits < n) half_bits++;
    const uint32_t mask = (1u << half_bits) - 1;
    int64_t x = pos;
    do {
        uint32_t left = (uint32_t)(x >> half_bits);
        uint32_t right = (uint32_t)x & mask;
        for (uint32_t round = 0; round < 4; round++) {
            const Words random = philox(seed, right, round, (uint32_t)epoch, RANDOM_ORDER);
            const uint32_t mixed = left ^ (random.w[0] & mask);
            left = right;
            right = mixed;
        }
        x = (int64_t)left << half_bits | right;
    } while (x >= n);
    return x;
}

// =====================================================================================================================
// 4. Configuration: flags, presets, help, what can work and what cannot
// Flags have guided-diffusion's names. A preset is a list of flags. The command line has priority over a preset. The
// flags and presets themselves are in unet/flags.h, which the Python programs read, too.
//
// The main functions run in this order: parse_command_line, take_aliases, apply_preset, and then, if there is a model
// file, take_model_file (section 11). The values of a model file replace those of the preset, but not those of the
// command line. In a run, check_run is next, and then take_data_shape (section 11). If there is no model file,
// take_data_shape takes the images' size, channels and classes from the data, where the command line does not give
// them. Then, with or without a model file, take_data_shape calls check_model. With --sample there is no training data,
// and run_program calls check_model itself. The checks find flags that cannot work, alone or together.

constexpr double BIG = 1e9;
struct Config;

// One flag: the member of Config that holds its value, its text in --help, and its allowed values (low..high for
// numbers, "a|b" for words). A flag whose `slot` is not 0 is kept in model files. A few flags whose `slot` is 0 are
// kept there, too, but in another form than as one value: see take_parsed_flags and take_run_of_file.
struct Flag {
    const char* name;
    std::variant<int Config::*, int64_t Config::*, float Config::*, bool Config::*, std::string Config::*> member;
    int slot;               // the value's place in the header of a model file (section 10); 0: no such place
    bool free;              // for flags of the model: the command line may change a model file's value (take_from_file)
    const char* objectives; // the only objectives that use the flag, "a|b"; "": all objectives use it
    const char* heading;    // the heading above the flag in --help
    const char* help;
    double low = 0, high = 0;
    const char* choices = "";

    // Returns a pointer to the flag's value in this configuration, or null if the flag's type is not T.
    template <class T, class C> auto* at(C& config) const {
        const auto* m = std::get_if<T Config::*>(&member);
        return m ? &(config.**m) : nullptr;
    }
};

// unet/flags.h fills these variables before main runs: each row of that file becomes the initialiser of a static
// member of Config.
inline std::vector<Flag> FLAGS;
inline std::map<std::string, std::string> PRESETS; // the flags that each preset sets
inline const char* heading = "";                   // the heading of the rows that follow
inline const char* objectives = "";                // the objectives that use the rows that follow

// These macros turn the rows of unet/flags.h into members of Config, which includes that file. The comment at the
// head of unet/flags.h explains its rows. FLAG(int, sample, 0, "draw ...") makes
//   int sample = 0;                                 a member of Config
//   static inline const bool sample_row = (...);    another member, whose initialiser adds the row to FLAGS
// Static members are initialised in the order of the file. So when a row is added, heading and objectives have been set
// by the rows above it.
#define FLAG_ROW(slot, free, type, name, value, ...) \
    type name = value;                               \
    static inline const bool name##_row =            \
        (FLAGS.push_back({#name, &Config::name, slot, free, objectives, heading, __VA_ARGS__}), true)
#define FLAG(...) FLAG_ROW(0, false, __VA_ARGS__)
#define SAVED(slot, ...) FLAG_ROW(slot, false, __VA_ARGS__)
#define FREE(slot, ...) FLAG_ROW(slot, true, __VA_ARGS__)
#define WORDS(choices) 0, 0, choices
#define HEADING(name, title) static inline const char* const name##_flags = heading = title
#define OBJECTIVES(name, words) static inline const char* const name = objectives = words
#define PRESET_TEXT(flags, ...) std::string(flags) __VA_OPT__(+" " + __VA_ARGS__)
#define PRESETS_SHARE(name, ...) static inline const std::string name = PRESET_TEXT(__VA_ARGS__)
#define PRESET(name, ...) \
    static inline const bool name##_preset = PRESETS.emplace(#name, PRESET_TEXT(__VA_ARGS__)).second

// The values of all flags, in members with the flags' names, and what is computed from these values.
struct Config {
    using string = std::string;
    using pixels = string; // the size of an image: 64, or 48x64 (height x width)
    using ints = string;   // numbers with commas between them
    using floats = string;
#include "flags.h"

    // parse_model, check_model and check_run compute these from flags that are text. The comment after each one names
    // its flag.
    int H = 64, W = 64;                           // image_size
    std::vector<float> mult;                      // channel_mult
    std::vector<float> attention_heights;         // attention_resolutions
    std::vector<float> emas;                      // ema_rate
    std::vector<float> class_list;                // classes
    std::vector<float> value_rows;                // values: rows of cond_dim numbers
    PictureKind picture_kind = PictureKind::FILE; // cond
    int picture_factor = 0;                       // cond: the K of lowres:K, which shrinks images to height / K

    // The names of the flags that the command line or the preset has set.
    std::set<string> on_command_line, by_preset;
    bool default_preset = false; // true: the program has chosen the preset. false: the user has
    bool given(const string& flag) const { return on_command_line.contains(flag); }
    bool chosen(const string& flag) const { return given(flag) || by_preset.contains(flag); }

    // Returns how many channels a level has. A factor such as 1.6666666 stands for 5/3, so 1.6666666 * 96 is slightly
    // less than the 160 that it should be. So the product is rounded to the nearest whole number.
    int channels(size_t level) const { return (int)std::lround((double)mult[level] * num_channels); }
    int out_channels() const { return learn_sigma ? 2 * in_channels : in_channels; }
    int patch() const { return std::max(patch_size, 1); }
    int height(size_t level) const { return H / patch() >> level; } // each level after the first halves the height
    bool has_attention(size_t level) const { return std::ranges::count(attention_heights, height(level)) > 0; }

    // Returns how many images a process computes at a time in training: the size of a microbatch.
    int micro() const { return microbatch > 0 ? microbatch : batch_size / world.size; }
    bool null_class() const { return class_cond && class_dropout > 0; } // the class table's last row means "no class"
    bool learned_variance() const { return learn_sigma && (vlb_weight > 0 || use_kl); }
    bool guided() const { return guidance_scale != 1; } // some of the sampler's steps may be guided (device_step)
    bool muon() const { return optimizer == "muon"; }
    // Returns how many numbers the network is told of an image: its own numbers, and those of its augmentation.
    int num_values() const { return cond_dim + (augment > 0 ? AUGMENT_NUMBERS : 0); }
    bool can_be_guided() const { return (class_dropout > 0 && (class_cond || cond_dim > 0)) || cond_dropout > 0; }
    // Returns whether the sampler's steps lie at timesteps of the model. (The other samplers choose sigmas themselves.)
    bool goes_by_timesteps() const { return sampler == "ddpm" || sampler == "ddim"; }
    bool can_churn() const { return sampler == "euler" || sampler == "heun"; } // whether the sampler knows --S_churn
    int seen_channels() const { return in_channels + cond_channels; }          // channels of an image and its picture
    // Returns the objective whose formulas the noise levels follow (see Frame).
    const string& frame() const { return objective == "ect" ? ect_frame : objective; }
    int64_t ect_stage() const { return ect_d > 0 ? ect_d : (max_steps + 7) / 8; } // how many steps a stage of ect has
    int64_t last_ect_stage() const { return (max_steps - 1) / ect_stage(); } // the stage of the last step, from 0 on
    bool changes_images() const { return !start_from.empty() || !inpaint.empty(); }
};

// Without --preset, if the data has at least this many images, and the chosen preset sets --min_snr_gamma, the flag
// becomes 5 instead (take_number_of_images says why). In tests with 2,026 images, the value 0.5 of some presets gave
// better samples than 5. With 10,000 images both values were about as good, and with 50,000 images 5 was better. Where
// the best limit lies is not known.
constexpr int64_t MANY_IMAGES = 5000;
constexpr int MORE_EMAS = 7; // how many averages of the weights there may be at most, besides the first one
// --objective ect: the largest q^a that is allowed (q and a: see Tuning). The gap between the sigmas of student and
// teacher is divided by q^a. If q^a were much larger than this limit, the two sigmas would be equal when they are
// rounded to fp32.
constexpr double LARGEST_GAP_DIVISOR = 1e6;

// How a parameter is initialised: see init_params.
enum ParamInit { INIT_UNIFORM, INIT_NORMAL, INIT_ONE, INIT_ZERO };

// A parameter. Its offset, counted in elements, is the same in all flat arrays, such as those of the weights, of their
// copies and of the gradients. (Moments and averages are slices of flat arrays: see Slice.)
struct Param {
    std::string name;
    std::vector<int> shape; // as in PyTorch
    size_t size, offset;
    ParamInit init;
    int heads;            // for the weight and bias of a qkv convolution: the number of attention heads; else 0
    bool of_conv = false; // whether it is the weight of a layer of kind CONV: see add_conv_params
};

// An activation (B, H, W, C).
struct Tensor {
    int H = 0, W = 0, C = 0;
    Element element = Element::FP32; // act_element; FP32 if the kind of the layer that writes it has fp32 (LayerKind),
                                     // and for the network's input and the last convolution's output; FP8: see plan_fp8
    int buffer = -1;                 // the buffer of its values
    int stats = -1;                  // if a group norm reads this tensor: the buffer of Stats::sums
    bool fp8 = false;                // a convolution reads this tensor in FP8, if the Walk has weights in FP8
    int parts = 1;                   // Stats::parts, as the forward pass has last set it
    bool needs_grad = false;         // whether the layer that writes this tensor has a backward pass. If so, this
                                     // backward pass reads the tensor's gradient
};

// The buffers for the gradient of one input of a layer: d = this layer's part of the gradient + add1 + add2. fp8: the
// buffer for a copy of d in FP8. -1: there is no such buffer.
struct GradPlan {
    int d = -1, add1 = -1, add2 = -1, fp8 = -1;
};

struct LayerKind; // what a layer computes: CONV, GROUPNORM, ...: see "The kinds of layers" below
// A layer of the list. If the comment after a member begins with a kind (such as CONV), only layers of this kind use
// the member.
struct Layer {
    const LayerKind* kind = nullptr;
    std::string name;
    int x1 = -1, x2 = -1, out = -1;                 // tensors: the layer reads [x1 | x2] and writes out
    int weight = -1;                                // a parameter; the bias, if there is one, is the next parameter
    int residual = -1;                              // CONV: a tensor that is added to the result; -1: none (see skip)
    int emb = -1, emb_offset = 0;                   // the tensor UNet::emb or -1, and this layer's first column in it
    int kernel = 1, stride = 1, upsample = 0;       // CONV
    bool fp8 = false;                               // CONV: forward product and weight gradient are in FP8 (choose_fp8)
    bool fp8_gradient = false;                      // CONV: the input gradient is computed in FP8 (choose_fp8)
    Nonlinearity nonlinearity = Nonlinearity::NONE; // GROUPNORM
    int dropout_block = -1;                         // GROUPNORM: if dropout follows, index of the residual block
    int heads = 0;                                  // ATTENTION, and the CONV that makes its qkv: the number of heads
    int saved = -1;     // the buffer of what the forward pass keeps: GROUPNORM mean and rstd, ATTENTION SoftmaxRows
    int block_end = -1; // --use_checkpoint: this layer is computed again before the backward pass of layer block_end

    // The plan (see plan_gradients, plan_fp8_gradients, plan_waits, plan_fusions).
    GradPlan d1{}, d2{};      // the buffers of the gradients of x1 and x2
    int dout = -1, demb = -1; // the buffers of the gradients of out, and of UNet::emb (with the columns of all layers)
    int dout_fp8 = -1;        // CONV with fp8_gradient: the buffer of dout in FP8
    bool rounds_dout = false; // CONV with fp8_gradient: unet_backward makes dout_fp8 from dout; false: a norm writes it
    int after = -1;           // backward: this layer waits until the weight gradient of layer `after` is complete
    int skip = -1;            // CONV: index of a skip connection, if this layer's forward function also computes it
    bool fused = false;       // this is a skip connection that the next layer's forward function computes
};

// A part of the arena: the memory of a tensor, a gradient, or something else that a layer keeps.
struct Buffer {
    size_t bytes; // how many bytes the buffer has for one sample
    // The first and the last time at which the buffer is in use (plan_lifetimes). The head of section 6 says how time
    // is counted.
    int first_use = INT_MAX, last_use = -1;
    size_t offset = 0; // the buffer's first byte in the arena
    // If the tensor in this buffer is computed again (--use_checkpoint), the index of the buffer for the new result. If
    // not, this buffer's own index.
    int again;
};

struct UNet {
    Config config;
    std::vector<Param> params;
    std::vector<Tensor> tensors;
    std::vector<Layer> layers;
    std::vector<Buffer> buffers;
    size_t num_params = 0;                 // how many numbers all parameters have together, without gaps
    size_t flat_size = 0;                  // how many floats a flat array has before the padding at its end (Slice::n)
    size_t plain_size = 0;                 // kernels read the first plain_size weights in fp32, not from a copy
    int input = -1, emb = -1, output = -1; // indices of tensors; emb: the embedding's projections for all blocks
    int residual_blocks = 0;
    double flops = 0; // floating-point operations of one image's forward pass; a multiply-add is 2 of them
    // Set by plan_memory. B is the largest batch that the arena has room for.
    int B = 0;
    size_t arena_bytes = 0;
    char* arena = nullptr;
    // Set by the caller before a forward pass, in device memory:
    float* t = nullptr;      // (B): what the network is told of each sample's noise level
    int* labels = nullptr;   // (B): the classes of the samples
    float* values = nullptr; // (B, num_values): an image's own numbers, then those that describe its augmentation
    float* cond = nullptr;   // (B, H, W, cond_channels): the pictures that the images are conditioned on

    Tensor tensor(int i) const { return i < 0 ? Tensor{.parts = 0} : tensors[i]; } // i < 0: a tensor with C = 0
};

// Returns the address of a buffer, or null if the index is -1 or the network has no memory yet.
template <class T = act> static T* buffer_data(const UNet* net, int buffer, size_t first_byte = 0) {
    if (buffer < 0 || !net->arena) return nullptr;
    return (T*)(net->arena + net->buffers[buffer].offset + first_byte);
}

template <class T> static T* tensor_data(const UNet* net, int t) { return buffer_data<T>(net, net->tensors[t].buffer); }

// With --precision fp8: weights in FP8, and the factors that belong to them (make_fp8_weights, make_fp8_training).
// If `weights` is null, the walk uses no FP8. If `weights` is not null and `turned` is null, the walk is for
// sampling.
struct Fp8Weights {
    const uint8_t* weights = nullptr;
    const float* factors = nullptr; // the factors of norms' results and of convolutions' sums: see make_fp8_weights
    // Training:
    const uint8_t* turned = nullptr;        // the weights of all convolutions with Layer::fp8_gradient, in the order in
                                            // which input gradients read them
    const float* gradient_factor = nullptr; // (1): gradients are multiplied by this before they are rounded
    const float* dx_factors = nullptr;      // the sums of an input gradient are multiplied by these. There is one for
                                            // each channel of the widest input, and all are equal
};
// The parameters of a network. fp32: all of them. copy: the convolutions' weights once more, in the activations' type.
// (If activations are fp32, fp32 and copy are the same array.)
struct Weights {
    const float* fp32 = nullptr;
    const act* copy = nullptr;
    Fp8Weights fp8{};
};

// A walk over the list of layers. If grads is null, the walk is a forward pass. Otherwise it is a backward pass; then
// the layers that are computed again (--use_checkpoint) are a part of the walk.
struct Walk {
    UNet* net;
    Weights weights{};
    Dropout dropout{}; // the dropout of all residual blocks
    int B;
    float* grads = nullptr;
    Stream* stream = MAIN_STREAM;
};

// The argument of all functions of a LayerKind: what they need to know about a layer. Where a Layer has an index, there
// is a pointer here, which is null if the index is -1. layer_args fills all members.
struct LayerArgs {
    UNet* net;
    const Layer* layer;
    Stream* stream;

    // The shapes of x1 (B, H, W, Cin), of x2 (B, H, W, C2) and of out (B, Hout, Wout, Cout).
    int B, H, W, Cin, C2;
    int Hout, Wout, Cout;

    // What the forward pass reads and writes.
    const act *x1, *x2, *residual;
    act* out;
    Stats stats1, stats2, out_stats;
    const float *weight, *bias;
    const act* copy;  // the weight in the activations' type
    const float* emb; // (B, emb_stride), from this layer's first column on
    int emb_stride;
    float* saved;
    Dropout dropout; // the dropout that follows this layer
    ConvSkip skip;   // CONV: the skip connection that this layer also computes

    // The backward pass.
    const act* dout;
    Grad d1, d2;
    float *dweight, *dbias, *demb;

    // For FP8. If the walk or the layer does not use FP8, these pointers are null, and so is `bytes` of each Fp8Copy.
    const act *weight_fp8, *turned_fp8;        // CONV: its weights in Fp8Weights::weights, and those in
                                               // Fp8Weights::turned. If weight_fp8 is not null, x1 is FP8, too
    const float *factors_fp8, *dx_factors_fp8; // CONV: factors of the sums of products (see conv_forward)
    Fp8Copy out_fp8;                           // GROUPNORM: its result, which is then written only in FP8
    Fp8Copy dout_fp8;                          // CONV: dout in FP8
    Fp8Copy d1_fp8, d2_fp8;                    // GROUPNORM: the gradients of x1 and x2 in FP8

    int tokens() const { return H * W; } // attention's T
    Stats* stats() { return out_stats.sums ? &out_stats : nullptr; }
    float* rstd() const { return saved + B * 32; } // of a norm: `saved` holds the means (B, 32), and then rstd
    ConvShape conv() const {
        const Element in = net->tensor(layer->x1).element, to = net->tensor(layer->out).element;
        return {B, H, W, Cin, C2, Cout, layer->kernel, layer->stride, layer->upsample, in, to};
    }
    // CONV: what is needed to compute the weight gradient. The weight gradient is computed from FP8 numbers if the
    // layer's forward product was (choose_fp8).
    WeightWork weight_work() const {
        WeightWork w{dweight, dbias, demb, emb_stride, dout, x1, x2, conv()};
        if (!weight_fp8) return w;
        w.dout = (const act*)dout_fp8.bytes;
        w.dout_factor = dout_fp8.factor;
        w.shape.in = Element::FP8;
        w.shape.out = Element::FP8_GRADIENT;
        return w;
    }
    NormShape norm() const { return {B, H * W, Cin, C2, 32, layer->nonlinearity, 1e-5f}; }

    // These functions return x1, out, dout and d1 as arrays of floats. They are for the layers whose tensors are always
    // fp32: those of the embedding, JOIN, PATCHES and PIXELS.
    const float* x_fp32() const { return (const float*)x1; }
    float* out_fp32() const { return (float*)out; }
    const float* dout_fp32() const { return (const float*)dout; }
    GradOf<float> d1_fp32() const { return {(float*)d1.dx, (const float*)d1.add1, (const float*)d1.add2}; }
};

// Returns the address of a tensor's buffer. If this is a backward walk and the tensor was computed again
// (--use_checkpoint), returns the address of the buffer that holds the new result.
static act* memory_of(const Walk& walk, int buffer) {
    const bool again = walk.grads && buffer >= 0;
    return buffer_data(walk.net, again ? walk.net->buffers[buffer].again : buffer);
}

// The kinds of layers. All that is special about a kind stands together here: first its functions, which call the
// kind's operation with members of LayerArgs, and then the kind itself (a LayerKind). The list, its plan and the walks
// (sections 5 to 7) only use the members of a LayerKind, so they need no change for a new kind. A few functions are
// exceptions, because what they do is for a convolution or a norm alone. They test the kind itself, as in
// `kind == &CONV`: check_conv_params, choose_fp8, plan_fp8_gradients, plan_waits, plan_fusions, plan_lifetimes,
// unet_backward and a member of WeightGradients.
//
// A new kind must keep these promises:
//   Its backward_reads names every tensor that its backward function reads. Otherwise the memory of such a tensor would
//   be used for something else too early.
//   Its backward function overwrites each gradient: it does not add to the old content. To the new gradient of an input
//   it adds the addends (add1, add2). It may leave them out for an input that no other layer ever reads, because then
//   there are none. If the dx of an input is null, there is nothing to write.
//   If its layers read the embedding (Layer::emb), its backward function writes their columns of the embedding's
//   gradient (LayerArgs::demb), as backward_norm does.
//   Its kernels add floats in a fixed order, without atomics. Several ranks compute the bits of one rank only because
//   all kernels do so (step_gradients).
//   Its functions read its weights in fp32, because only the weights of convolutions have a copy.
//   It does not read a tensor that a 3x3 convolution reads. With --precision fp8, such a tensor may hold numbers of 8
//   bits alone, if a norm writes it (plan_fp8). And if the convolution computes its input gradient in FP8, this
//   gradient can't have addends (conv_backward_input_fp8).
//   It does not read the output of a skip connection, which the next convolution may compute itself (plan_fusions).
//   If its layers belong to the embedding (.embedding = true), they stand before all other layers in the list. Their
//   forward function launches on a.stream and uses no workspace. The reason is that this function runs at the same time
//   as layers on the main stream (unet_forward), and those layers use the workspace.
//
// To add a kind, change these places:
//
//   1. here: its functions and its LayerKind. If a group norm may read its output, its LayerKind has .sums = true. Then
//      its forward function also writes the sums that the norm needs, and sets the number of their parts
//      (a.out_stats.parts; see forward_layer), which is at most max_stat_parts. If the kind needs a setting, add a
//      member to Layer. The functions can read it as they read a.layer->heads
//   2. a line that adds such a layer to the list: add_layer(net, {.kind = &...}, ...) in a function like add_resblock.
//      If the layer has weights, add_params before it (add_embedding shows both); its argument `init` says how they
//      begin. With INIT_UNIFORM, a weight of one dimension gets the bound of the matrix before it (init_params), so a
//      weight without such a matrix needs another ParamInit. Without a bias, add_param. If a weight does not lie in
//      memory as PyTorch's does, also permute_param (section 10)
//   3. its operation: a prototype in section 2, a kernel in Part II, loops in dev/reference.h. If its kernel needs a
//      workspace, a function returns the workspace's size. This function also needs a prototype in section 2, and it
//      returns 0 in section 15 (the CPU)
//   4. muon_updates, if AdamW should update its weights also with --optimizer muon. Without this change, Muon updates
//      all its weights of two or more dimensions. make_muon makes a matrix of such a weight. If the number of its rows
//      or of its columns is not a multiple of 32, make_muon ends the program, because Muon's kernels can't update it
//   5. the same layer in common/model.py, the network of the PyTorch twin
//   6. if a flag chooses the kind: a row SAVED(slot, ...) for it in unet/flags.h. From this row Config gets its
//      member. Take a slot as 1b of the list in section 8 says. Files of weights alone must keep the flag, too, so make
//      its slot an exception at the three places that 1b names. A model file does not name its layers. If a file was
//      made with other layers, check_size notices this only if the total number of parameters differs
static double no_flops(const LayerArgs&) { return 0; }
static Workspace no_workspace(const LayerArgs&) { return {}; }
struct LayerKind {
    const char* name;
    void (*forward)(LayerArgs&);
    void (*backward)(LayerArgs&) = nullptr; // null: it has no weights, and its input needs no gradient
    enum Reads { INPUT = 1, OUTPUT = 2, EMB = 4 };
    int backward_reads = 0; // which tensors of the forward pass the backward pass reads
    bool embedding = false; // its layers make the embedding, while other layers run (unet_forward)
    bool fp32 = embedding;  // its tensors are FP32, whatever act_element is
    bool sums = false;      // it writes out_stats, so a group norm may read its output (see add_norm)

    double (*flops)(const LayerArgs&) = no_flops;            // operations of a forward pass; a multiply-add is 2
    Workspace (*workspace)(const LayerArgs&) = no_workspace; // the workspaces that its functions need
};

// The functions that follow make the list of layers. Most of them append something to the network and return its index.

// Adds a buffer. bytes: its size for one sample.
static int add_buffer(UNet* net, size_t bytes) {
    const int buffer = (int)net->buffers.size();
    net->buffers.push_back(Buffer{.bytes = bytes, .again = buffer});
    return buffer;
}

// `mark` is called before each operation is started. In this program it does nothing. dev/benchmarks/bench.cu (from
// which dev/bench is made) replaces it by a function that takes time stamps.
enum Pass { FORWARD, BACKWARD, BACKWARD_WEIGHT }; // BACKWARD: all gradients except a convolution's weight gradient
struct Operation {
    const char* name = nullptr; // the operation's name, or null if the operation belongs to `layer`
    const Layer* layer = nullptr;
    Pass pass = FORWARD;
};
static void (*mark)(const Operation&) = [](const Operation&) {};

// The first number of a file tells what the file is: one of our data files, or one of unet.cu (data_header).
constexpr int DATA_MAGIC = 20261120;
constexpr int UNET_CU_DATA_MAGIC = 20240620;
constexpr size_t READ_AT_START = (size_t)4 << 30; // a file of up to this many bytes is wholly read when it is opened
constexpr int BATCHES_AHEAD = 8;                  // how many batches in advance the system is asked to read
constexpr int MOST_VALUES = 4096;                 // the most numbers per image, the limit of --cond_dim
constexpr int MOST_NAME_BYTES = 1 << 20;          // the most bytes of all the numbers' names together

// Data files and model files begin with a header of 256 slots of 4 bytes. The first two slots have the same meaning in
// both kinds of file:
constexpr int SLOT_MAGIC = 0;
constexpr int SLOT_VERSION = 1; // the version of the format
// The other slots of a data file's header:
constexpr int DATA_SLOT_COUNT = 2;
constexpr int DATA_SLOT_CHANNELS = 3;
constexpr int DATA_SLOT_HEIGHT = 4;
constexpr int DATA_SLOT_WIDTH = 5;
constexpr int DATA_SLOT_CLASSES = 6;
constexpr int DATA_SLOT_BYTES = 7;      // how many bytes a value of an image has: 1 or 4
constexpr int DATA_SLOT_HEADER_CRC = 8; // the checksum of the header, computed with 0 in this slot
// the checksum of all that follows the header (version 1), or of all that follows the images (version 2)
constexpr int DATA_SLOT_BODY_CRC = 9;
constexpr int DATA_SLOT_VALUES = 10; // K, how many numbers each image has
constexpr int DATA_SLOT_NAMES = 11;  // the number of bytes of the numbers' names
constexpr int DATA_SLOT_UNUSED = 12; // from this slot on, all slots are 0

struct Dataset : InputFile {
    // The version of the file's format. 1: one checksum covers all images. 2: each image has a checksum. 0: a file of
    // unet.cu, without checksums.
    int version = 0;
    int64_t count = 0; // N
    int C = 0, H = 0, W = 0;
    int classes = 0;    // 0: images have no labels
    int bytes = 1;      // the size of a value of an image: 1 (uint8) or 4 (float32)
    int K = 0;          // how many numbers each image has
    int name_bytes = 0; // the number of bytes of the numbers' names
    // The header's checksum. The header itself holds a checksum of all that follows it (in version 2: of all that
    // follows the images, which includes the images' checksums). So header_crc identifies the whole file. For a file of
    // unet.cu it is 0.
    uint32_t header_crc = 0;
    std::vector<int32_t> labels;     // (N), or empty
    std::vector<float> values;       // (N, K): the numbers
    std::string value_names;         // the names of the K numbers, a line for each; or empty
    std::vector<uint32_t> image_crc; // (N), the checksum of each image; empty: the checksums are not known
    int64_t asked = 0;               // load_batch has asked the system to fetch the images before this stream position
    std::string error;               // why an image could not be used
    std::shared_ptr<Dataset> cond;   // --cond_file: a picture for each image, in the same order; null: there are none

    size_t image_bytes() const { return (size_t)C * H * W * bytes; }
    // The images follow the header, which has 1024 bytes.
    size_t image_at(int64_t i) const { return 1024 + i * image_bytes(); } // the byte of the file where image i begins
    // A batch of B images is sent to the device in one buffer, which begins with the images. These functions return at
    // which byte of this buffer the labels, numbers and pictures begin. The labels follow the images, at a multiple of
    // 4 bytes.
    size_t labels_at(int B) const { return (B * image_bytes() + 3) / 4 * 4; }
    size_t values_at(int B) const { return labels_at(B) + B * sizeof(int); } // numbers follow the labels
    size_t pictures_at(int B, const Config& c) const {                       // pictures follow the numbers
        return values_at(B) + (size_t)B * c.num_values() * sizeof(float);
    }
    size_t batch_bytes(int B, const Config& c) const {
        return pictures_at(B, c) + (cond ? B * cond->image_bytes() : 0);
    }
    // In the file, the images are followed by labels, numbers, names and checksums, all in words of 4 bytes. These
    // functions return how many words the labels, the numbers, and all four together have.
    size_t label_words() const { return classes > 0 ? count : 0; }
    size_t value_words() const { return count * K; }
    size_t words_behind() const {
        const size_t checksums = version == 2 ? count : 0;
        return label_words() + value_words() + name_bytes / 4 + checksums;
    }
};

// Returns whether no value is infinite or NaN.
static bool all_finite(const float* v, size_t n) {
    return std::all_of(v, v + n, [](float f) { return std::isfinite(f); });
}

// All noise levels are divided into four quarters, from the least noise (0) to the most (3). For each quarter, this
// struct holds the sum of the losses of a step's samples whose level lies in the quarter, and the number of these
// samples. The log shows the mean loss of each quarter.
struct LossSums {
    double sum[4];
    int count[4];
};
HD static inline void add_loss(LossSums* s, double loss, int quarter) {
    // This loop has constant indices, so that a kernel can keep s in registers. For s->sum[quarter] the kernel would
    // have to keep s in memory, because registers can't be indexed by a variable.
    for (int q = 0; q < 4; q++) {
        if (q != quarter) continue;
        s->sum[q] += loss;
        s->count[q]++;
    }
}
// All data that change from step to step lie in device memory, at addresses that stay the same. So the launches of a
// step can be recorded once, and repeated for later steps (Graph). There is memory for two batches: one batch is copied
// to the device while the model is trained on the other batch. So there are two recordings: graph[0] and graph[1].
// A slice is this rank's part of a flat array of all parameters. If there is one rank, the slice is the whole array. In
// the shapes below, B is the batch size, micro is the number of samples for which the network has room: a
// microbatch, but at least 2 if grids are guided, because then the network computes each image of a grid twice. T is
// diffusion_steps, K is cond_channels, and factor is picture_factor.
struct Trainer {
    UNet net;
    Dataset data;
    Objective objective;
    AdamW adamw;
    Slice own; // where in the flat arrays this rank's slice lies

    // Flat arrays (all members up to `sum`, except fp8 and fp8_works). Each holds one number for each parameter.
    // The weights in fp32. With several ranks, only two parts of this array are kept up to date: the first plain_size
    // weights, which are all that the network reads in fp32, and this rank's slice, which its optimiser updates. The
    // weights after the first plain_size are those of convolutions. The network reads them from `copy`. (If activations
    // are fp32, plain_size includes all weights, and `copy` is this same array.)
    float* params;
    float* grads;         // the current microbatch's gradients. (With one rank, `sum` holds the first microbatch's.)
    act *copy, *ema_copy; // the weights, and their first average, in the type that convolutions read (Weights::copy)
    Fp8Weights fp8;       // --precision fp8: the FP8 copies of weights, which training steps read
    std::vector<WeightRounding> fp8_works; // the convolutions whose weights fp8 holds
    float* received; // gradients of this rank's slice, from the other ranks (RankGradients); null: there is one rank
    // At the places of this rank's slice, `sum` holds the sum of the gradients of all microbatches of the
    // step. With several ranks, `sum` and `received` are the same array. They use different places in it: what another
    // rank sends is received at the places of that rank's slice. With one rank and one microbatch, `sum` and `grads`
    // are the same array. With one rank and several microbatches, `sum` is a separate array. (With --optimizer muon,
    // update_by_muon replaces the sums of Muon's matrices by directions.)
    float* sum;
    // Each of these arrays is a slice: it holds this rank's part.
    float *m, *v;             // AdamW's moments. Where Muon updates a matrix, m is its momentum, and v is not used
    std::vector<float*> emas; // the averages of the weights, one for each rate in Config::emas

    // --optimizer muon
    MuonWork muon;      // the matrices that Muon updates
    uint8_t* is_matrix; // see Update; null: AdamW updates all parameters

    double* squares;            // for each stretch (see Slice), the sum of the squares of the step's gradient
    StepState *state, *records; // the state after the newest step, and the states after the latest RECORDS steps
    Upload batch[2];            // this rank's images of a batch, with their labels, numbers and pictures (load_batch)
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
    NoiseLevel* teachers; // (micro): noise levels of the teacher's inputs (less noise); null: no --objective ect
    float* teacher_t;     // (micro): what the teacher is told about these levels
    int64_t* last_step;   // (1): --max_steps - 1, the final step; validation computes teachers' levels as in that step
    // --schedule_sampler loss-second-moment
    float* history;     // (T, HISTORY + 1): the latest losses at each t (remember_losses); null: none are kept
    double* rms_losses; // (T): for each t, the root mean square of these losses, or -1 if there are fewer than HISTORY
};
// At most STEPS_AHEAD steps wait to be logged, so twice as many records are more than enough.
constexpr int RECORDS = 128;
static_assert(RECORDS >= 2 * STEPS_AHEAD);

// With several ranks: every rank sends its parts of a flat array to all other ranks. Only segments that hold some of
// the first n parameters are sent. bytes: the size of a stretch in this array, in bytes. In most arrays a stretch has
// STRETCH elements, but Trainer::squares has only one double for each stretch. slice: an array of this rank's parts,
// one after the other; null: the parts are already in their places in the flat array.
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

// =====================================================================================================================
// 14. What all devices share: elements, nonlinearities, patches of pixels

// Kernels are compiled for a type T of elements: float or, on a GPU, bf16. ElementOf<T> holds the constants that depend
// on the type, except those that follow from the type's size. (Enum Element, in section 1, lists what else a new type
// needs.)
template <class T> struct ElementOf;
// False for every T. static_assert(IS_MISSING<T>) stops the compilation if a type has no specialisation of a function.
// (static_assert(false) could stop every compilation, because false does not depend on T.)
template <class T> constexpr bool IS_MISSING = false;
template <> struct ElementOf<float> {
    static constexpr Element ELEMENT = Element::FP32;
    static constexpr bool FAST_EXP = false; // whether the hardware's approximate e^x is exact enough for this type
    static constexpr int PARTS = 2;         // for the tensor cores, a float is split into this many fp16 numbers
    static constexpr uint32_t TWO_ONES = 0x3C003C00; // two ones in fp16. (A product with ones computes sums.)
    static constexpr int FEW_PARTS = 1; // conv_few (section 20) stores a float as the sum of this many values of type T
};
#ifdef __CUDACC__
typedef __nv_bfloat16 bf16;
template <> struct ElementOf<bf16> {
    static constexpr Element ELEMENT = Element::BF16;
    static constexpr bool FAST_EXP = true;
    static constexpr int PARTS = 1;                  // tensor cores multiply bf16 as it is
    static constexpr uint32_t TWO_ONES = 0x3F803F80; // the ones are in bf16
    static constexpr int FEW_PARTS = 2;
};
#endif

// To add a nonlinearity, write a struct like Silu below, with two functions. f(z) returns the value at z. df(u) returns
// the derivative at z, but its argument is u = Z_FACTOR<T> z, for a reason that is given below. (If df needs z itself,
// it begins with z = u / Z_FACTOR<T>.) Then add a value to enum Nonlinearity, and its case to with_nonlinearity. To use
// it, set BEHIND_NORMS (section 5) to this value. The PyTorch twin has its nonlinearities in common/model.py.
//
// The group norms of the CPU build and of the GPU build call f and df. They contain no formula of a nonlinearity. In
// the embedding, SiLU is a layer (its kind is SILU), so BEHIND_NORMS does not change it. A model file does not record
// which nonlinearity the model was trained with.
//
// Why is df given u, not z? The sigmoid is computed fastest from u. For bf16, u = -z log2(e), because the hardware
// computes 2^u, and this is e^-z. For fp32, u is z. The factor costs nothing: a norm's z is x * scale + shift, and the
// norm multiplies scale and shift by the factor, once for each image and channel.
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
template <class T> constexpr float Z_FACTOR = ElementOf<T>::FAST_EXP ? -LOG2E : 1;

// Returns sigmoid(z) = 1 / (1 + e^-z), as exactly as tensors of type T need it. The argument u is Z_FACTOR<T> z. (It is
// defined in dev/reference.h for a CPU, and in section 16 for a GPU.)
template <class T> INLINE float sigmoid(float u);

// SiLU, with s = sigmoid(z):   f(z) = z s,   f'(z) = s + z s (1 - s)
template <class T> struct Silu {
    static INLINE float f(float z) { return z * sigmoid<T>(Z_FACTOR<T> * z); }
    static INLINE float df(float u) {
        const float s = sigmoid<T>(u);
        if (!ElementOf<T>::FAST_EXP) return s * (1 + u * (1 - s));
        return fmaf(u, s * fmaf(s, LN2, -LN2), s); // z = -ln(2) u
    }
};

// Calls `work` with an object of the struct that computes nonlinearity n: work(Silu<T>{}) if n is SILU. Does nothing if
// n is NONE.
template <class T, class F> HD INLINE void with_nonlinearity(Nonlinearity n, F work) {
    switch (n) {
    case Nonlinearity::NONE: return;
    case Nonlinearity::SILU: return work(Silu<T>{});
    }
    ALL_CASES_RETURN
}
// nvcc's compilers look for a missing case of a switch only in code for the host. So the last line below, with NoWork,
// compiles with_nonlinearity for the host, too.
struct NoWork {
    template <class N> HD void operator()(N) const {}
};
template void with_nonlinearity<float>(Nonlinearity, NoWork);

// Pixels (B, H, W, C) become patches of p x p pixels, (B, H / p, W / p, C p p), as in PyTorch's F.pixel_unshuffle, but
// with the channels last. This function is given the index i of an element in the pixels. It returns the index of the
// same element in the patches.
HD static inline size_t place_in_patches(size_t i, int H, int W, int C, int p) {
    const int c = i % C;
    const int w = i / C % W;
    const int h = i / C / W % H;
    const size_t b = i / C / W / H;
    const size_t patch = (b * (H / p) + h / p) * (W / p) + w / p;
    return ((patch * C + c) * p + h % p) * p + w % p;
}

// Calls upwards: these are defined in train_unet.cu, and files above call them.
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
static bool load_batch(Upload* batch, Dataset* d, const Config& c, bool training, int64_t first, int B);
static void make_muon(Trainer* tr);
static Trainer make_trainer(const Config& c, const Dataset& data);
static float* whole_array(const Trainer& tr, float* array);
static double validation_loss(Trainer* tr, Dataset* val);
static void update_by_muon(Trainer* tr, const Update& update);
static bool train_step(Trainer* tr, int64_t step);
