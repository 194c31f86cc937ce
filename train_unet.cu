// train_unet.cu - trains and samples diffusion UNets (guided-diffusion's models) in plain C++/CUDA.
//
//   make train_unet && ./train_unet          trains on data/, writes pictures, a log and checkpoints into out/
//   ./train_unet --help                      every flag, with units and defaults
//
// Map (make map renews the line numbers)
//    221  Part I. The program
//    224     1. Types at the interface: what operations are called with
//    673     2. The interface: all that the program asks of a device
//   1011     3. Random numbers: every draw is a pure function of (seed, purpose, step, sample)
//   1110     4. Configuration: flags, presets, help, what can work and what cannot
//   1851     5. The network: a list of layers, made of guided-diffusion's flags
//   2812     6. The plan: what the backward pass adds where, and where in memory each buffer lies
//   2822         FP8: buffers, factors, weights for samples
//   2955         gradients, and buffers
//   3204     7. Forward and backward: two walks over the list
//   3326     8. Diffusion: noise schedules, objectives, samplers
//   3609         the level of a training sample, drawn, and its share of the loss
//   4066         samplers
//   4618     9. Data: .bin files that may be larger than memory, the order of their images
//   5145    10. Model files: weights and checkpoints, initial weights
//   5493    11. A training step: draw, diffuse, forward, loss, backward, judge, update
//   5508         the learning rate, the verdict on a step, averages of the weights
//   5595         what a trainer holds
//   5734         a step
//   6039    12. A run: log, guard, checkpoints, resume, samples
//   6064         the log in memory, as the page shows it
//   6176         what a run holds
//   6244         the log and the status line
//   6434         checkpoints, snapshots and grids
//   6700         the start of a run: new, from a file's weights, or resumed
//   6926         the loop over the steps
//   7042         a run from its first to its last line
//   7212         samples, without a run
//   7371    13. main: the command line, then a run or samples
//   7652         what ranks must have in common
//   7723         main
//   7846  Part II. The device
//   7849    14. What all devices share: elements, nonlinearities, patches of pixels
//   7929    15. The CPU: the device is the host; operations are in dev/reference.h
//   7999    16. The GPU: what all kernels share
//   8064         Launches, which may overlap
//   8108         Decisions: what kernels are chosen with
//   8157         Single instructions: shared memory, mbarriers, clusters
//   8242         Activations: pieces of 16 bytes
//   8562         each_kernel: a thread for an element
//   8576         Tensor cores by mma.sync (sm_80 and later): ldmatrix, mma_bf16; floats as two fp16 numbers
//   8739         Swizzle: how rows lie in shared memory
//   8757         Hopper (sm_90a): TMA, wgmma and what goes with them
//   9008         building blocks of Hopper's kernels (sm_90a)
//   9307    17. Small operations: resampling, embeddings, diffusion
//   9310         resample: statistics for group norm; average pool 2x2, nearest neighbour 2x, the even pixels
//   9511         linear, silu, timestep and label embedding: fp32 (B, C) throughout
//   9868         Diffusion: q_sample, losses, a sampler's step; images, noise, the network's input and output are fp32
//  10377    18. Group norm
//  10380         groupnorm_forward, groupnorm_sums and groupnorm_backward: any size, any GPU
//  10931         groupnorm_backward_whole: an image's slab in shared memory
//  11316    19. Attention
//  11422         attention_forward and attention_backward: heads of up to 256 channels, in fp32 128, any GPU
//  11967         attention_forward_general and attention_backward_general: heads of any size, any GPU
//  12105         attention_forward_wgmma and attention_backward_wgmma (sm_90a)
//  12786    20. Convolution
//  12828         ConvOut: results, 4 channels of a pixel at a time
//  13066         operands of the portable kernels: bf16, or floats as two fp16 parts
//  13129         conv_halo: 3x3, stride 1, any GPU
//  13535         conv_gather: any kernel size and stride, any GPU
//  13798         conv_few: the first and the last layer
//  13970         conv_weight_halo, conv_weight_gather: weight gradients, any GPU
//  14550         Hopper's convolutions (sm_90a, bf16; 3x3 also FP8): what they share: TMA, mbarriers, wgmma
//  14672         conv_tiles: 3x3 on large images, and 1x1 (sm_90a)
//  15144         conv_small: 3x3 on images of up to 32 x 32 (sm_90a)
//  15590         conv_weight_tma: weight gradients (sm_90a)
//  15881         FP8 in training: weights and gradients are rounded
//  15981    21. The optimiser
//  15984         adamw: norm of the gradient, the step's verdict, AdamW, averages
//  16218    22. Which kernel runs: costs as measured, tables of decisions, and the operations that have several kernels
//  16221         groupnorm_backward
//  16376         attention: forward and, where a has dout, backward
//  16438         convolution: forward and input gradient
//  16935         convolution: weight gradients
//  17284    23. The GPU: memory, copies, repeated work
//  17507    24. Between ranks: from device to device
//
// Roads (make map renews the line numbers)
//   a step, from the images to the weights:
//     main 7842, run_program 7782, train 7168, run_step 6976, train_step 5973, load_batch 5102 (read_image 4698);
//     the rest is recorded as a graph at the first two steps and repeated later (replay 17415):
//     step_gradients 5867: draw_levels 9882 (the formulas: draw_level 3677), forward_and_loss 5780,
//     q_sample_forward 10073, unet_forward 3231, forward_layer 3217 (a function of the layer's kind),
//     loss_forward_backward 10184, unet_backward 3297, conv_backward_weights 17277 (weight gradients, on the side
//     stream), finish_gradients 11264 (those of norms); with several ranks send_gradients (in step_gradients) and
//     all_to_all (in the last section); sum_gradients 16031;
//     judge_step 16078 (the verdict: judge_batch 5568), update_slice 5938, adamw_update 16190 (adamw_kernel 16148),
//     next_step 16084, record_step 16090; later collect_steps 6930
//   pictures, from noise: sample_batch 4533, plan_route 4298, device_step 4342, euler_step 4096 and those beside it
//   a convolution, to the tensor cores (a table above conv_product 16789 draws all of its roads):
//     forward_conv 2283; conv_forward 16825, with conv_product above it, which asks conv_is_wgmma 16445;
//     on Hopper, large images: pick_conv_tiles_3x3 16739; conv_tiles 15129, with conv_tiles_kernel above it;
//     Accumulators 9228 (its function multiply); Wgmma 8821;
//     on Hopper, small images: pick_conv_small 16596; conv_small 15576, with conv_small_kernel and multiply_small above
//     it; Wgmma 8821;
//     on any other GPU pick_conv_halo_bf16 16512; conv_halo 13522, with conv_halo_kernel, multiply_step, multiply_tap
//     above it; mma 8627
//   why several GPUs compute the bits of one: step_gradients 5867
//   a nonlinearity beside SiLU, behind the norms: Nonlinearity 385, Silu 7892, with_nonlinearity 7902 (a case);
//     BEHIND_NORMS, in front of add_norm 2510, chooses it. The embedding has SiLU as a layer: silu_forward 9788
//   a quantity that the network predicts (--predict): its row in common/flags.h, ddpm_level 3538
//   an objective, as edm and flow are: its row in common/flags.h, Frame 500, and beside each other edm_question 3381,
//     ask 3416, frame_of 3426, sigma_draws 3432, has_steps_of_t 3438; the head of their section lists the changes
//   a kind of layer: forward_linear 2203 and what stands beside it, with a list of all places in front of
//     LayerKind 2175; add_resblock 2561 or its like; its operation: a prototype in the interface, a kernel, loops in
//     dev/reference.h
//   an element type beside bf16: Element 288, with a list of all places in front of it
//   FP8 (--precision fp8): choose_fp8 2753 chooses the convolutions, and above it stands a table of what is rounded,
//     by which factor, and where. plan_fp8 2825 and plan_fp8_gradients 2842 plan what is read. The factors and weights
//     are made below them: make_fp8_weights 2883 for samples, make_fp8_training 2922 for training; add_fp8_args 2059
//     hands them to the layers. forward_conv 2283 and backward_conv 2294 choose between bf16 and FP8;
//     conv_backward_input_fp8 16886 makes an input gradient a forward convolution; conv_product_fp8 16818 picks the
//     kernel, multiply_fp8 9259 and WgmmaFp8 8857 multiply; print_fp8 6876 says whether it pays
//   an error message, to its cause: search for its first words. They stand where the error is found: in a call of die,
//     refuse or must (host/files.h), of wrong 1324 (a flag's value), or of a function beside it whose name ends in
//     _unless. For a damaged header they stand in check_field 5306 and check_unused (host/files.h): look at their
//     callers.
//     unknown_word 1238 prints the message for a word of a flag that some place does not know. Such a place calls it
//     itself or through meaning 1244.
//     Two functions print a message while the run goes on: report_bad_step 6688 says that a step was skipped (after
//     --max_bad_steps such steps in a row it ends the run), is_written 6478 that a file could not be written yet.
//     stop_run 6452 ends a run whose weights are broken. It saves nothing, and names the checkpoint to go on from
//
// Words. B, C, H, W as in PyTorch; T = H W, attention's tokens; d in front of a name: the gradient of it.
//   interface           the operations' prototypes, which dev/reference.h (CPU) and Part II (GPU) both fulfil
//   activation          a tensor between two layers, or its gradient. (What SiLU is, is called a nonlinearity.)
//   element             a number of a tensor as it lies in memory: fp32 or bf16; kernels know it as a type T
//   piece               16 bytes: 8 neighbouring channels in bf16, 4 in fp32 (section 16)
//   level               of noise: how noisy a sample is (NoiseLevel); of resolution: a network's layers between two
//                       changes of the resolution (--channel_mult has a number for each level)
//   picture             what a model is conditioned on (--cond_file, --cond). Also, what a run shows: a PNG file, in
//                       general a grid of samples. What a model learns to make is called an image
//   skip connection     the 1x1 convolution on a residual block's way past its 3x3 convolutions (ConvSkip). In the
//                       drawing of section 5, `skip` is a U-Net's long way from its first half to its second half
//   skipped step        a training step that changes nothing, because its loss or gradient looked wrong
//   rank                a process of a run, which has one GPU. A block's number in its cluster is cluster_rank. (In
//                       Denoising, a number's rank is its place in the sorted order.)
//   arena, buffer       the memory of all activations; a part of it that lives as long as a tensor is in use
//   workspace           an operation's own memory, which the next one may overwrite
//   stream              a queue of a GPU's operations. (In section 9, the endless sequence of images.)
//   statistics          of each image and channel, the sums over pixels of x and of x^2: a group norm makes its mean
//                       and variance of them
//   addend              a gradient from another reader of the same tensor, added as this one's is stored
//   fuse                to compute one operation inside another one's kernel, such as a skip connection
//   materialise         to write to memory what a kernel could also make as it reads, such as an upsampled input
//   block, cluster      threads with one shared memory; up to 8 blocks that reach each other's (sm_90)
//   warp, lane          32 threads; one of them
//   warpgroup           four warps that multiply together by wgmma
//   tile                the part of a result that a block, a warpgroup or a warp computes at a time
//   tap, halo, slice    words of the convolutions, which section 20 defines and draws
//   stage, ring         a part of shared memory that is filled while others are read; stages that take turns
//   producer, consumer  warps that fill stages, and warps that multiply what is there
//   epilogue            what becomes of a tile's sums: bias, embedding, addend, rounding, statistics
//   partial             a sum over a part of the pixels or keys; a second kernel adds partials up in a fixed order
//   persistent          blocks that stay for a whole launch and take one tile after another
//   fragment            a thread's registers of an operand or result on the tensor cores (mma.sync, wgmma)
//   swizzle             where 16-byte pieces of a row lie, so that 8 rows are read from different banks
//
// Layouts: activations (B, H, W, C); convolution weights (Cout, kh, kw, Cin); files hold PyTorch's layouts.
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
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <variant>
#include <vector>

// What would be the same in any program lies in host/. (host/page.h comes behind what it shows, in "A run".)
// defines: text, die, refuse, must, now, duration, terminal_columns, show_status, start_process, STOP_SIGNALS,
//          stop_signal, run_child, crc32, exists, Folder, open_folder, make_folder, last_change, AtomicFile,
//          try_write_file, try_link_file, Header, InputFile, check_unused, read_text, lock_folder
#include "host/files.h"
// defines: grid_png
#include "host/png.h"
// defines: world, ranks, find_ranks, start_ranks, come_to, broadcast_host, gather_host, any_rank, must_agree,
//          on_one_machine
#include "host/ranks.h"

// =====================================================================================================================
// Part I. The program

// =====================================================================================================================
// 1. Types at the interface: what operations are called with

#ifdef __CUDACC__
#define HD __host__ __device__ // marks functions that both the host and the device call
#define INLINE __device__ __forceinline__
typedef void act;                // an element of an activation; its type is known at run time (act_element)
constexpr int STEPS_AHEAD = 64;  // how many steps the host may start before it reads their results for the log
constexpr int STEPS_AGREED = 16; // every so many steps the ranks agree on whether to stop
// The presets that are used if the command line has no --preset (see default_preset).
static const char* const DEFAULT_PRESET = "quick64"; // without a data file
static const char* const PRESET_32 = "unet64";       // for images of 32x32
static const char* const PRESET_64 = "quick64";      // for images of 64x64
static const char* const PRESET_ELSE = "unet64";     // for images of other sizes
#else
#define HD
#define INLINE inline
typedef float act;
constexpr int STEPS_AHEAD = 1;
constexpr int STEPS_AGREED = 1;
static const char* const DEFAULT_PRESET = "quick32";
static const char* const PRESET_32 = "quick32";
static const char* const PRESET_64 = "emoji64";
static const char* const PRESET_ELSE = "fashion32";
#endif

// Enumerations. Where code depends on an enumerator, there is a switch without a default, or a static_assert. So the
// compiler names every place that has to be changed for a new enumerator (-Werror=switch).
#define ALL_CASES_RETURN __builtin_unreachable(); // stands after such a switch

// What a number of a tensor is stored as. Arithmetic is in fp32, whatever a tensor's element is. With --precision fp8
// some tensors are FP8, or have a copy in FP8: see choose_fp8. The copies of gradients are FP8_GRADIENT.
//
// To store activations as a new element type, change these places. (The CPU build knows fp32 alone.)
//
// The program does not compile until these are done. The compiler names them, once the word stands in this enumeration:
//   facts_of                   its name and its bytes (below)
//   with_act                   its case (section 16). This function alone leads from an Element to a type T of C++, so
//                              its case makes the compiler ask for whatever kernels need of T:
//   ElementOf                  its constants (section 14)
//   unpack, pack               a piece of 16 bytes (section 16)
//   FourOf, to_floats,         four of its numbers (section 16)
//   from_floats
//   store_two                  two of its numbers (section 16)
//   mma, pack_pair             its instruction, and a register of a fragment (section 16). Only a type with PARTS = 1
//                              needs them. Fragments are made for 2 bytes a number: with 1 byte an instruction takes
//                              32 k in place of 16, so load_fragment, load_fragments and their callers change, too
//   tma_type                   its case: what TMA calls it (section 16)
//   cast_params, adamw_update  their cases (section 21)
//
// A run ends with a sentence until these are done:
//   `precision`                its word, in the flag's row of common/flags.h and in element_named (section 4)
//   conv_product               its rows in the table (section 22): one for pick_conv_gather and, for speed, one for a
//                              function like pick_conv_halo_bf16
//
// Nothing asks for these:
//   cast_params, adamw_kernel  They round the weights' copy, which convolutions read, to bf16. If the new case leads to
//                              them as they are, convolutions read wrong weights. Make the type a template parameter
//   act_has_wgmma              It is false for the new type, so Hopper, too, uses the kernels for any GPU. It may be
//                              true once Hopper's kernels know the type: conv_tiles and conv_small have the element as
//                              a template parameter, and all others are written for bf16
//   pick_conv_gather           Only bf16 has its widest tile
//   forward_and_loss           A type whose smallest numbers are larger than bf16's (fp16) loses small gradients. Then
//                              `factor` there has to be larger (a loss scale), and sum_gradients has to undo it
//   take_aliases               --use_fp16 means bf16 today
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
constexpr const char* name_of(Element e) { return facts_of(e).name; }
constexpr size_t bytes_of(Element e) { return facts_of(e).bytes; }
constexpr bool is_fp8(Element e) { return e == Element::FP8 || e == Element::FP8_GRADIENT; }

// The element of activations, and of the copy of the convolutions' weights that kernels read. start_device sets it. It
// is never FP8. All other weights, and all gradients of weights, are in fp32.
static Element act_element = Element::FP32;
static size_t act_bytes() { return bytes_of(act_element); }
// If activations are fp32, there is no copy: kernels read the convolutions' weights themselves.
static bool weights_have_copy() { return act_element != Element::FP32; }

// FP8 has two formats (Micikevicius et al. 2022, arXiv:2209.05433). Both have a sign, an exponent and a mantissa, and
// the exponent is stored plus a bias:
//   Element::FP8            e4m3: four bits of exponent, three of mantissa. For values: activations and weights.
//   Element::FP8_GRADIENT   e5m2: five bits of exponent, two of mantissa. For gradients of activations, whose sizes
//                           differ more.
struct Fp8Format {
    int mantissa;         // bits of the mantissa
    int bias;             // of the exponent
    float largest;        // the largest number
    uint8_t largest_bits; // its bits
};
constexpr Fp8Format E4M3{.mantissa = 3, .bias = 7, .largest = 448, .largest_bits = 0x7E};
// Only the CPU build uses E5M2. The GPU has an instruction.
[[maybe_unused]] constexpr Fp8Format E5M2{.mantissa = 2, .bias = 15, .largest = 57344, .largest_bits = 0x7B};
constexpr uint8_t FP8_NAN = 0x7F; // in both formats
// Rounds to the nearest FP8 number, ties to even. If |v| is larger than the largest number, it is rounded to that.
// Kernels round in the same way (pack_fp8).
static inline uint8_t fp8_bits(float v, const Fp8Format& f = E4M3) {
    const uint8_t sign = std::signbit(v) ? 0x80 : 0;
    const float size = std::fabs(v);
    if (std::isnan(v)) return FP8_NAN;
    if (size >= f.largest) return sign | f.largest_bits;
    uint32_t bits; // the float's bits: 8 of exponent and 23 of mantissa
    memcpy(&bits, &size, sizeof bits);
    // fp32 stores its exponent plus 127. Below the smallest normal number, FP8 numbers are multiples of one step.
    const int smallest_normal = 127 + 1 - f.bias; // its exponent, as fp32 stores it
    if ((int)(bits >> 23) < smallest_normal)
        return sign | (uint8_t)std::lrintf(std::ldexp(size, f.bias - 1 + f.mantissa));
    const int dropped = 23 - f.mantissa; // the FP8 number keeps the other bits of the mantissa
    bits += (1u << (dropped - 1)) - 1 + (bits >> dropped & 1);
    return sign | (uint8_t)((bits >> dropped) - ((127 - f.bias) << f.mantissa));
}
// e5m2 has infinities, too. fp8_bits does not make them.
[[maybe_unused]] static inline float fp8_value(uint8_t bits, const Fp8Format& f = E4M3) {
    const int exponent = (bits & 0x7F) >> f.mantissa;
    const int mantissa = bits & ((1 << f.mantissa) - 1);
    if ((bits & 0x7F) > f.largest_bits) return NAN;
    const int of_step = std::max(exponent, 1) - f.bias - f.mantissa; // the last bit of the mantissa is worth 2^of_step
    const float size = std::ldexp((float)(mantissa + (exponent ? 1 << f.mantissa : 0)), of_step);
    return bits & 0x80 ? -size : size;
}

// Where an operation also writes its result in FP8: each value is multiplied by *factor and then rounded. If bytes is
// null, there is no such copy.
struct Fp8Copy {
    uint8_t* bytes = nullptr;
    const float* factor = nullptr;
};

// --precision fp8, in training: the factors of values and weights, before they are rounded to FP8 (e4m3). They are
// powers of 2, so multiplying by them rounds nothing. A value larger than 28, and a weight larger than 3.5, becomes the
// largest number of FP8. choose_gradient_factor returns the factor of gradients.
constexpr float FP8_X_FACTOR = 16;
constexpr float FP8_WEIGHT_FACTOR = 128;

// A convolution whose weights are rounded to FP8 in training (round_weights). offset: where the weights (Cout, 9, Cin)
// lie in a flat array. turned_alone: only the input gradient is in FP8, so only the turned order is made.
struct WeightRounding {
    size_t offset;
    int Cout, Cin;
    bool turned_alone = false;
};

// A convolution is 1x1 or 3x3 (padding kernel / 2). Its input (B, H, W, C1 + C2) is one array, or two arrays of C1 and
// C2 channels. With upsample = 1 the convolution is 3x3, its stride is 1, and it reads its input enlarged to 2H x 2W.
struct ConvShape {
    int B, H, W, C1, C2, Cout, kernel, stride, upsample;
    Element in = act_element, out = act_element; // the network's own input and output are FP32
    HD int out_H() const { return ((H << upsample) + stride - 1) >> (stride - 1); } // stride is 1 or 2
    HD int out_W() const { return ((W << upsample) + stride - 1) >> (stride - 1); }
};

enum class Nonlinearity : uint8_t { NONE, SILU }; // what a group norm applies to its result (struct Silu)

// A group norm of x (B, HW, C1 + C2), which is one array, or two arrays of C1 and C2 channels.
struct NormShape {
    int B, HW, C1, C2, groups;
    Nonlinearity nonlinearity;
    float eps; // is added to the variance
};

// The weight gradient of a convolution, as work that is computed later, together with others.
struct WeightWork {
    float *dweight, *dbias;
    float* demb; // (B, emb_stride): gradient of the embedding that was added to all pixels of an image; null: none
    int emb_stride;
    const act *dout, *x1, *x2;
    ConvShape shape;
};

// Where the gradient of an input is written, and what is added to it: dx = gradient + add1 + add2. The addends are
// gradients from other readers of the same tensor. An addend may be null, or dx itself. If dx is null, nobody needs the
// gradient.
template <class T> struct GradOf {
    T* dx = nullptr;
    const T *add1 = nullptr, *add2 = nullptr;
};
typedef GradOf<act> Grad;

// The group norm that reads a tensor needs two sums: the sum of each channel over an image's pixels, and the sum of its
// squares. The pixels may be summed in several parts, which the norm adds up: sums is (B, parts, C, 2).
struct Stats {
    double* sums;
    int parts;
};

// What attention keeps of each row of scores s = q . k, so that the backward pass can compute the softmax again:
// P = 2^((s - top) log2(e) / sqrt(d) - log_sum), where top is one of the highest scores of the row. Most programs keep
// only one number, the log of the sum of exponentials. But if scores are large, the rounding of that number would
// change it by more than 1.
struct SoftmaxRow {
    float top, log_sum;
};

// A random draw depends on these members, and on the number of the sample within the batch.
struct RandomKey {
    uint64_t seed;
    uint32_t purpose;    // what is drawn: RANDOM_NOISE or another RandomPurpose
    const int64_t* step; // device; read at each draw, so that a recorded graph draws new numbers in each step
    int64_t sample0;     // the batch's first sample
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
    int64_t sample0 = 0;           // the batch's first sample
    uint32_t layer = 0;            // index of the residual block
};

// A noise level: what the network is shown and told of a sample, what it should answer, and what its answer means.
struct NoiseLevel {
    float t;                       // what the network is told
    float signal, sigma;           // the network's input x = signal x0 + sigma noise
    float target_x0, target_noise; // the network's target = target_x0 x0 + target_noise noise
    float x0_x, x0_out;            // the x0 that the network's output means: x0_x x + x0_out output
    float weight;                  // the weight of the squared error
    float kl = 0;                  // kl, log_var, log_ratio and range are for the variational bound: see bound_term
    float log_var = 0;
    float log_ratio = 0;
    float range = 0;
    int t_is_0 = 0;           // 1: this is the level of t = 0
    int quarter = 0;          // the quarter of all levels that this level lies in: 0 (least noise) to 3
    int index = 0;            // ddpm: t
    float importance = 0;     // ddpm: 1 / (T times the probability of drawing t)
    float target_teacher = 0; // ect: the factor of the teacher's answer in the target
};

// The formulas for what a network is shown, told and asked at a noise level: those of ddpm_level, edm_question or
// flow_question.
enum class Frame : uint8_t { DDPM, EDM, FLOW };

// How --objective ect weighs the distance between a student at sigma = t and its teacher at r: 1 / (t - r), or
// 1 / t^2 + 1 / sigma_data^2.
enum class TuningWeight : uint8_t { GAP, SNR };

// --objective ect, consistency tuning (Geng et al. 2024). The letters are the paper's: see teacher_sigma and
// student_level.
struct Tuning {
    float q = 0, k = 0, b = 0, c = 0; // q = 0: there is no consistency tuning
    int64_t d = 1;                    // steps of a stage; the paper's `a`, the stage's number, grows by 1 every d steps
    TuningWeight weight = TuningWeight::GAP;
    const int64_t* step = nullptr; // device: the run's step, from which `a` is computed
    HD bool on() const { return q > 0; }
};

// A change to an image (--augment), and what the network is told of it. First the image is mirrored. Pixel (x, y)
// of the changed image is then pixel (x_x x + x_y y + x_1, y_x x + y_y y + y_1) of the mirrored image. Coordinates are
// measured from the centre.
constexpr int AUGMENT_NUMBERS = 9;
struct Augmentation {
    float told[AUGMENT_NUMBERS];
    bool flip_x, flip_y;
    double x_x, x_y, x_1;
    double y_x, y_y, y_1;
};

// How the sigma of a training sample is drawn (draw_level), if Objective::levels is null.
struct SigmaDraws {
    float P_mean, P_std; // mean and standard deviation of ln(sigma), which is normal
    bool uniform_t;      // true: instead, t = sigma / (1 + sigma) is uniform between 0 and 1
};

// What a model is trained on: how noise levels are drawn, and what the loss is. The loss is
// mse * squared error + bound * variational bound in nats. If mse is 0, the bound also trains the mean. If tuning.on(),
// the loss is that of tuning_loss instead.
struct Objective {
    const NoiseLevel* levels; // device: (steps), the level of each t; null: sigma is drawn from a distribution
    int steps;
    SigmaDraws draws;
    float sigma_data; // of edm: the standard deviation of the data
    float mse, bound;
    // Device: (steps), the root mean square of the latest losses of each t, see remember_losses. t is drawn in
    // proportion to it (draw_weighted_level). Null: all t have the same probability.
    const double* rms_losses = nullptr;
    Frame frame = Frame::DDPM;
    Tuning tuning{};
};

// A sampler's step from x to x', where m is what the sampler remembers, z is new noise, and out the network's answer:
//   x0 = limit(x0_x x + x0_out out)
//   x' = next_x x + next_x0 x0 + next_m m + sigma z
//   m' = m_x x + m_x0 x0
// With range > 0 sigma is learned: exp(log_sigma + range (v + 1) / 2), where v is the second half of the answer.
struct SamplerStep {
    float t; // what the network is told
    float x0_x, x0_out;
    float next_x, next_x0, next_m;
    float m_x, m_x0;
    float sigma, log_sigma, range;
    float known_x, known_sigma, back_x, back_sigma; // see keep_known
};

// Settings that are the same in all steps of a sampler.
// With guidance, the second half of the batch is a copy of the first half. For the copies the network is not told the
// class, numbers or picture, if training has also left these out sometimes. The network's answers for the copies are
// called `unconditional`. The sampler uses the answer unconditional + guidance * (out - unconditional).
// With a limit, x0 is limited to [-s, s] and divided by s. With rank < 0, s is 1. With rank >= 0, s is the rank-th
// smallest |x0| of the image (counted from 0), or 1 if that |x0| is smaller than 1.
struct Denoising {
    bool limit, guided;
    float guidance;
    int rank;
    float* threshold; // device: (B), memory for s of each image
    float* m;         // device: (B, HW, C), what the sampler remembers
};

// How the learning rate goes on after the warm-up: see lr_factor.
enum class LrSchedule { CONSTANT, LINEAR, COSINE };

// Optimiser settings of a whole run.
struct AdamW {
    float lr, weight_decay, beta1, beta2, eps, grad_clip, ema_rate;
    LrSchedule lr_schedule;
    int64_t warmup_steps, max_steps;
};

// Ranks share the work of the optimiser. Weights, gradients, moments and averages are flat arrays of n floats (n is a
// multiple of 4), with padding after them. An array is cut into segments. Each segment is cut into one part for every
// rank, and each part has `stretches` stretches. With two ranks and three segments:
//
//   | rank 0 | rank 1 | rank 0 | rank 1 | rank 0 | rank 1 |
//   |    segment 0    |    segment 1    |    segment 2    |
//
// A rank owns its parts of all segments. These parts together are called its slice. Each segment has parts of all
// ranks. So the gradients of one segment can be sent to their owners while those of another segment are still computed.
// The first weights of an array, which are read in fp32, are also shared evenly in this way.
constexpr size_t STRETCH = 1 << 14; // floats; squares of gradients are summed by such stretches (step_gradients)
struct Slice {
    size_t n;
    int segments, stretches, rank, ranks;
    HD size_t each() const { return stretches * STRETCH; } // floats of a segment that a rank owns
    HD size_t owned() const { return segments * each(); }  // floats of all segments that a rank owns
    HD size_t whole() const { return ranks * owned(); }    // floats of a flat array with its padding
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
// rank r has computed for this rank's part of that segment. At the place of this rank's own part nothing is received:
// there the same array holds the sum over all ranks (Trainer::sum).
struct RankGradients {
    const float *own, *received;
    Slice slice;
    // Returns the gradients that rank r has computed. The pointer is shifted, so that a float of this rank's slice has
    // the same index in the result as in a flat array.
    HD const float* of(int r) const {
        return r == slice.rank ? own : received + (r - slice.rank) * (ptrdiff_t)slice.each();
    }
};

// An array of this rank, and the same array of the other ranks whose memory this rank can write to. A kernel that has a
// result writes it to all of these arrays.
constexpr int NEAR = 8; // the largest number of ranks that write to each other's memory
template <class T> struct Everywhere {
    T* at[NEAR]; // this rank's array is the first
    int ranks = 1;
};

// adamw_update works on these arrays. params, copy (the weights in the activations' type) and sum are flat arrays. ema,
// m and v hold only this rank's slice. New weights are written to this rank and to all ranks whose memory this rank can
// write to. The network reads the first `plain` weights in fp32 (params) and the others from copy.
struct Update {
    Everywhere<float> params;
    Everywhere<act> copy;
    size_t plain;
    float *ema, *m, *v;
    const float* sum; // the sum of the ranks' gradients
};

// The running mean and variance of the loss, and those of the gradient's norm, over healthy steps.
struct Guard {
    double n; // how many healthy steps there were
    double mean_loss, var_loss, mean_norm, var_norm;
};

// The state that changes from step to step, in device memory.
struct StepState {
    int64_t step, updates;         // finished steps, and those of them that have changed the weights
    int64_t bad_total, bad_in_row; // skipped steps: all of them, and those since the last good step
    double loss, grad_norm;
    double loss_q[4]; // the mean loss of each quarter of the noise levels
    int count_q[4];   // how many samples fell into each quarter
    int ok;           // 1: the step was good
    float lr;
    Guard guard;
};

// A residual block's skip connection: a 1x1 convolution of [x1 | x2]. The convolution that adds the result of the skip
// connection also computes it. weight: (Cout, C1 + C2).
struct ConvSkip {
    const act *x1, *x2, *weight;
    const float* bias;
    int C1, C2;
};

// =====================================================================================================================
// 2. The interface: all that the program asks of a device
// dev/reference.h implements it in plain loops (the CPU build), and Part II in kernels. Another kind of device would
// need these functions. Outputs come first, then inputs, then sizes. Functions overwrite their outputs; backward
// functions do not add to them either.
// A comment after an argument gives its shape, or says what it is. [Brackets] enclose what may be null.

// A queue of a GPU's operations, which run one after the other. Different streams can run at the same time.
struct Stream;
extern Stream* const MAIN_STREAM; // the stream of all operations that are not given another stream
constexpr int HISTORY = 10;       // how many losses of each t --schedule_sampler loss-second-moment remembers

HD static inline int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// Convolution: out = conv([x1 | x2], weight) + bias [+ emb] [+ residual]. The sums of out are written to stats. With a
// skip, the convolution also computes a skip connection and adds its result; conv_takes_skip returns whether this is
// possible. With a skip there is no emb and no residual. If s.in is FP8, x1 and weight are FP8, and
// out = factors * conv(x1, weight) + the same addends (bias and so on).
// For an input gradient, s.out is the element of dout, which it reads. If that is FP8_GRADIENT, dout is in e5m2, weight
// is `turned` of round_weights, in e4m3, and dx1 = factors * (the sums of products). Then there is one input, without
// addends.
static bool conv_takes_skip(const ConvShape& s, const ConvShape& skip);
static void conv_forward(act* out,                            // (B, Ho, Wo, Cout)
                         Stats* stats,                        // [of out]
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
// Computes the weight gradients of several layers together. conv_weight_load returns what fraction of the device the
// weight gradient of one layer keeps busy; 1 or more: it needs no other layer beside it.
static void conv_backward_weights(const std::vector<WeightWork>& works, Stream* stream);
static double conv_weight_load(const ConvShape& s);

// Group norm [and nonlinearity f] [and dropout] of [x1 | x2] over C = C1 + C2 channels: out = f(xhat weight + bias),
// with xhat = (x - mean) rstd. With scale_shift, out = f((xhat weight + bias) (1 + scale) + shift). The columns [0, C)
// of scale_shift are scale, and the columns [C, 2C) are shift. The result is written to out, to fp8, or to both.
// groupnorm_backward also writes dx1 and dx2, with their addends, in FP8 (e5m2), if dx1_fp8 and dx2_fp8 are given.
static void groupnorm_forward(act* out,                    // [(B, HW, C)]
                              float* mean, float* rstd,    // (B, groups): kept for the backward pass
                              const act* x1, Stats stats1, // (B, HW, C1), and its sums
                              const act* x2, Stats stats2, // [(B, HW, C2)], and its sums
                              const float* weight,         // (C)
                              const float* bias,           // (C)
                              const float* scale_shift,    // [(B, ss_stride)]
                              int ss_stride, Dropout dropout, NormShape s, Fp8Copy fp8 = {});
static void groupnorm_backward(Grad dx1, Grad dx2,           // as x1 and x2
                               float* dweight, float* dbias, // (C): they may be incomplete until finish_gradients
                               float* dscale_shift,          // [as scale_shift]
                               const act* dout,              // as out
                               const act* x1, const act* x2, const float* mean, const float* rstd, const float* weight,
                               const float* bias, const float* scale_shift, int ss_stride, Dropout dropout, NormShape s,
                               Fp8Copy dx1_fp8 = {}, Fp8Copy dx2_fp8 = {});

// --precision fp8, in training. round_weights makes two copies of convolutions' weights, in e4m3. They have the same
// places as in a flat array, and each weight is multiplied by FP8_WEIGHT_FACTOR. `turned` has the order that input
// gradients read. round_gradient writes n numbers in e5m2.
static void round_weights(uint8_t* weights, // flat: (Cout, tap, Cin) of each convolution without turned_alone
                          uint8_t* turned,  // flat: (Cin, 8 - tap, Cout) of each convolution
                          const act* copy,  // flat: the weights as other convolutions read them
                          const std::vector<WeightRounding>& works);
static void round_gradient(Fp8Copy fp8, const act* dout, size_t n);

// Attention of T pixels to each other: out = softmax(q k^T / sqrt(d)) v, with C = heads * d channels.
static void attention_forward(act* out,         // (B, T, C)
                              SoftmaxRow* rows, // (B, heads, T): kept for the backward pass
                              const act* qkv,   // (B, T, 3C): q, k, v
                              int B, int T, int C, int heads);
static void attention_backward(act* dqkv,       // as qkv
                               const act* dout, // as out
                               const act* qkv, const act* out, const SoftmaxRow* rows, int B, int T, int C, int heads);

// downsample: the average of 2 x 2 pixels (an odd last row or column is not read). upsample: each pixel becomes 2 x 2
// equal pixels. H and W are those of the input x.
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
// functions after it make pictures of the images. A picture is mirrored if its image is mirrored. A picture that is
// left out is all zeros.
static void take_pictures(float* cond,          // (B, H, W, K)
                          const void* pictures, // (B, K, H, W), of 1 or 4 bytes a value
                          PictureDraws draws, int B, int K, int H, int W, int bytes);
// --cond lowres. shrink_images makes small pictures. Each of their pixels is the mean of a square of factor x factor
// pixels of the image, plus noise. enlarge_pictures enlarges the small pictures to the size of the images.
static void shrink_images(float* small,       // (B, H / factor, W / factor, C)
                          const void* images, // (B, C, H, W)
                          int factor, PictureDraws draws, int B, int C, int H, int W, int bytes);
static void enlarge_pictures(float* cond,        // (B, H, W, C)
                             const float* small, // (B, H / factor, W / factor, C)
                             int factor, PictureDraws draws, int B, int C, int H, int W);
// --cond gray: grey_images makes grey pictures of the images. --cond mask: mask_images makes copies of the images, with
// holes and with one more channel that says where the holes are.
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
// out (B, dim) = [cos(t f_i), sin(t f_i)], f_i = max_period^(-i / (dim / 2)); dim is even
static void timestep_embedding_forward(float* out, const float* t, int B, int dim, int max_period, Stream* stream);
// out = x + table[label]; a row of dtable is the sum of dout over the samples with this label
static void label_embedding_forward(float* out,         // (B, C)
                                    const float* x,     // (B, C)
                                    const float* table, // (rows, C)
                                    const int* labels,  // (B)
                                    int B, int C, Stream* stream);
static void label_embedding_backward(GradOf<float> dx,  // as x
                                     float* dtable,     // as table
                                     const float* dout, // as out
                                     const int* labels, int B, int rows, int C);
// out = x + values weight^T: a linear layer without a bias; dweight = dout^T values
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
static void finish_gradients(); // does the work that backward functions have left to be done for all layers together

// Diffusion. Draws each sample's noise level. Writes the level, t (what the network is told of the level), and in which
// quarter of all levels it lies.
static void draw_levels(NoiseLevel* levels, float* t, int* quarters, int B, const Objective& o, RandomKey key);
// If o.tuning.on(): writes the levels of the same samples' teachers, and what the network is told of each level.
static void draw_teachers(NoiseLevel* teachers, float* t, int B, const Objective& o, RandomKey key);
// Mixes noise into images: x_t = signal x_0 + sigma noise (Ho et al. 2020, eq. 4). It also writes what the network
// should answer, the target [+ target_teacher teacher].
static void q_sample_forward(float* x_t, float* target, // (B, H, W, C)
                             const NoiseLevel* levels,  // (B)
                             const float* teacher,      // [as target]: the teacher's answer
                             const void* images, // x_0 (B, C, H, W): uint8 if bytes is 1, float32 in [-1, 1] if it is 4
                             bool random_flip,   // whether to mirror each image with probability 1/2
                             RandomKey noise_key, RandomKey flip_key, int B, int C, int H, int W, int bytes);
// Computes the loss that objective o chooses. The loss of a sample is a mean over its values. dout = the gradient of
// factor * sum(loss). If the objective has no variational bound (o.bound = 0), the gradient of the output channels
// after the first C is 0.
static void loss_forward_backward(double* loss,             // (B)
                                  float* dout,              // as out
                                  const float* out,         // (B, HW, Cout)
                                  const float* target,      // (B, HW, C)
                                  const float* x,           // (B, HW, C): the network's input
                                  const NoiseLevel* levels, // (B)
                                  const Objective& o, float factor, int B, int HW, int C, int Cout);
// This function is called instead if o.tuning.on(): loss = weight (sqrt(D + c^2) - c), the pseudo-Huber distance to the
// teacher's image, with D = the sum of (x0_out (out - target))^2 over a sample's n values.
static void tuning_loss_forward_backward(double* loss,             // (B)
                                         float* dout,              // as out
                                         const float* out,         // (B, n)
                                         const float* target,      // (B, n)
                                         const NoiseLevel* levels, // (B)
                                         float c, float factor, int B, int n);
// --augment: draws a change for each image, with probability p for each kind of change (draw_augmentation), and applies
// it.
static void augment_images(float* out,          // (B, C, H, W)
                           Augmentation* drawn, // (B)
                           float* canvas,       // (B, C, fine_size(H), fine_size(W)): working memory
                           float* told,         // (B, stride): the first AUGMENT_NUMBERS of each row
                           int stride,
                           const void* images, // (B, C, H, W), of 1 or 4 bytes a value
                           float p, RandomKey key, int B, int C, int H, int W, int bytes);
// With --schedule_sampler loss-second-moment: writes the losses of the step's samples to history, and computes
// rms_losses from history (remember_losses).
static void update_rms_losses(double* rms_losses,       // (T)
                              float* history,           // (T, HISTORY + 1)
                              const NoiseLevel* levels, // (B)
                              const double* loss,       // (B)
                              const StepState* state, int T, int B);

// Sampling. out (B, per_sample) = scale * standard normals [+ out]
static void draw_normals(float* out, int B, int per_sample, RandomKey key, float scale, bool add);
// t (B) = what the network is told in step *k
static void sampler_timesteps(float* t, const SamplerStep* steps, const int64_t* k, int B);
// Makes step number *key.step of the sampler, and overwrites x by the result. With guidance, x and out hold 2 B
// samples: B samples with class, numbers and picture, then the same B samples without.
static void sampler_step(float* x,         // (B or 2 B, HW, C)
                         const float* out, // (B or 2 B, HW, Cout): the network's answer
                         const SamplerStep* steps, const Denoising& d, RandomKey key, int B, int HW, int C, int Cout);
// Inpainting. It runs after each step, and does nothing if the step's known_x is 0. Where mask is not above 0,
// x = known_x image + known_sigma z. Then at all pixels x' = back_x x + back_sigma z', with other normals z'.
static void keep_known(float* x,           // (B or 2 B, n)
                       const float* image, // (B, n)
                       const float* mask,  // (B, n)
                       const SamplerStep* steps, RandomKey key, bool guided, int B, int n);

// Optimiser, for a slice of the flat arrays. sum (flat) = [old sum +] the ranks' gradients, in the ranks' order.
// squares: the sum of squares of each stretch of sum, written to the same ranks as new weights (Everywhere).
// step_gradients explains this order, and why there are stretches.
static void sum_gradients(float* sum, const Everywhere<double>& squares, const RankGradients& grads, bool add);
// Decides whether a step is good or is skipped (judge_batch).
static void judge_step(StepState* state, const double* squares, // (stretches)
                       size_t stretches, const double* loss,    // (B)
                       const int* quarters,                     // (B)
                       AdamW h, int B);
// Updates the weights by AdamW (Loshchilov & Hutter 2019) with clipping, and then the first average of the weights. If
// the step is not ok, nothing changes.
static void adamw_update(const Update& u, const StepState* state, AdamW h, Slice own);
// Updates a further average (ema_step).
static void ema_update(float* ema, const float* params, const StepState* state, float rate, Slice own);
static void cast_params(act* copy, const float* params, size_t n);
static void next_step(int64_t* step);                                           // ++*step, after all the step's draws
static void record_step(StepState* records, const StepState* state, int count); // records[i % count]: after step i

// How many bytes of memory operations need beside their arrays (0 on a CPU).
static size_t conv_workspace(ConvShape s);           // for the weight gradient
static size_t conv_detour_bytes(const ConvShape& s); // for the forward pass and the input gradient
static size_t groupnorm_backward_workspace(const NormShape& s);
static size_t norm_sums_bytes(const NormShape& s); // kept until finish_gradients
static size_t attention_backward_workspace(int B, int T, int C, int heads);
static size_t linear_backward_workspace(int B, int Cin, int Cout);
static size_t loss_workspace(int B);
struct Workspace {
    size_t main = 0; // on the main stream
    size_t side = 0; // on the side stream, where weight gradients are computed
    size_t sums = 0; // kept until finish_gradients, at the end of the backward pass
};
static void reserve(const Workspace& most, bool training);

// These functions send data from device to device between ranks (host/ranks.h). They work on a stream, in multiples of
// 4 bytes, and may be recorded in a Graph. A single rank does not call them. Calls between begin_exchange and
// end_exchange become one launch.
//   all_to_all   rank r receives part r of the sendbuf of every other rank s, as part s of its recvbuf
//   all_gather   copies the arrays `own` of all ranks to `all`, in the ranks' order; own may lie in `all` already
static void all_to_all(void* recvbuf, const void* sendbuf, size_t bytes, Stream* stream); // bytes: the size of a part
static void all_gather(void* all, const void* own, size_t bytes, Stream* stream);
static void begin_exchange();
static void end_exchange();

// open_alloc returns device memory. If world.direct is true, other ranks may write to it, and all_to_all and all_gather
// write to it directly. at_rank returns the address of the same place in rank r's memory. meet makes each device wait
// until all devices have called it.
static void* open_alloc(size_t bytes);
[[maybe_unused]] static void* at_rank(void* p, int r);
static void meet();
template <class T> static Everywhere<T> everywhere(T* p) {
    Everywhere<T> all{{p}};
    for (int r = 0; r < world.size && world.direct; r++) {
        if (r == world.rank) continue; // this rank's array is the first already
        all.at[all.ranks] = (T*)at_rank(p, r);
        all.ranks++;
    }
    return all;
}
static void join_devices(bool direct); // direct: they may write to each other's memory, if they can

// The device: memory, and copies to and from it. New memory is filled with zeros. start_device also sets act_element,
// as --precision asks.
static void start_device(const std::string& precision, int number);
static std::string device_name();
static int count_gpus();        // how many GPUs this process could use; in the CPU build it ends the program
static size_t device_bytes = 0; // allocated so far
static void* device_alloc_bytes(size_t bytes);
static size_t device_available();
static void copy_to_device(void* to, const void* host, size_t bytes);
static void copy_to_host(void* host, const void* from, size_t bytes);
static int max_stat_parts(int H, int W); // the largest number of parts in which a tensor's Stats come

// Work that is repeated with the same pointers. On a GPU it is recorded once, and then repeated as one launch.
struct Graph {
    void* exec = nullptr;
    size_t nodes = 0; // how many launches the graph contains
};
template <class F> static void replay(Graph* g, F work);
static void free_graph(Graph* g);

// run_beside runs work on the side stream, at the same time as work on the main stream. wait_for_side(ticket) makes the
// main stream wait until two things have ended: the work with this ticket, and all earlier work of the side stream.
template <class F> static void run_beside(int ticket, F work); // work(Stream*)
static void wait_for_side(int ticket);
// These switches allow what makes the program fast. dev/bench turns them off, for its profile and for tests. early,
// beside and graphs do not change any bit of the results. The other switches decide in which order numbers are summed,
// so they change bits.
static struct Allowed {
    bool early = true;   // a kernel may begin while the previous kernel still runs
    bool beside = true;  // run_beside has a stream of its own; false: it uses the main stream
    bool batches = true; // one launch computes the weight gradients of several layers
    bool graphs = true;  // repeated work is one launch
    // start_device reads these two (and beside):
    bool clusters = true; // clusters: blocks that access each other's shared memory
    bool hopper = true;   // kernels with instructions that only Hopper has, in place of kernels for any GPU
} allowed;

// A buffer that the host fills for the device. A trainer has two buffers: the host fills one, while the device still
// works on the other.
struct Upload {
    uint8_t *host, *device;
    size_t bytes;
    void *sent, *released; // on a GPU: events, see release
};
static Upload make_upload(size_t bytes);
static void wait_for_host_side(Upload* u); // waits until u->host may be written
static void send(Upload* u);               // copies u->host to u->device
static void release(Upload* u);            // the host calls it after it has started the work that reads u->device

template <class T> static T* device_alloc(size_t n) { return (T*)device_alloc_bytes((n ? n : 1) * sizeof(T)); }
template <class T> static T* device_copy(const std::vector<T>& v) {
    T* p = device_alloc<T>(v.size());
    copy_to_device(p, v.data(), v.size() * sizeof(T));
    return p;
}
// Allocates memory for a copy of n parameters, from which kernels read the convolutions' weights. If they need no copy,
// it returns params itself.
static act* make_copy(float* params, size_t n) {
    return weights_have_copy() ? (act*)device_alloc_bytes(n * act_bytes()) : (act*)params;
}

// =====================================================================================================================
// 3. Random numbers: every draw is a pure function of (seed, purpose, step, sample)
// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), key = seed,
// counter = (quartet, sample, step, purpose). A quartet is four random words, which are drawn together; a sample's
// quartets are numbered. Philox has no state, so any step of any run can be reproduced alone, on any machine.

// The last word of the counter says what is drawn. Two purposes never share a number. Dropout draws other numbers in
// each residual block, so its word also contains the residual block's index, in the bits from 8 on.
enum RandomPurpose : uint32_t { // files and the PyTorch twin use these numbers: append new ones at the end
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
    RANDOM_COND_NOISE, // the noise on a coarse picture
    RANDOM_MASK,       // the holes of --cond mask
};

struct Words {
    uint32_t w[4];
};

// Returns four random words of 32 bits. Each round multiplies words 0 and 2 by constants. The upper halves of the two
// products are combined by XOR with words 3 and 1 and with the key. The lower halves become words as they are. The key
// changes by a constant from round to round.
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

// Makes four standard normals of four random words (Box & Muller 1958): each pair u, v in (0, 1) gives
// sqrt(-2 ln u) cos(2 pi v) and sqrt(-2 ln u) sin(2 pi v). u and v are exact in fp32 and never 0 or 1, so that fp32 on
// a GPU and double on a CPU agree to 1e-6.
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

// Dropout drops an element if its random word is below this threshold.
HD static inline uint32_t dropout_threshold(float p) { return (uint32_t)((double)p * 4294967296.0); }

// In each epoch the images 0 to n - 1 are in another order. Returns the number of the image at position pos. A Feistel
// network of four rounds permutes the numbers of 2 * half_bits bits: it splits a number into a left and a right half,
// and mixes the left half with a random function of the right half. In general n is not a power of 4. So if the result
// is not below n, it is permuted again, until it is.
static inline int64_t permuted_index(uint64_t seed, int64_t pos, int64_t epoch, int64_t n) {
    int half_bits = 1; // bits of a half: so many that two halves can hold all numbers below n
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
// flags and presets themselves are in common/flags.h, which the Python programs read, too.
//
// In the order in which they run: parse_command_line, take_aliases, apply_preset; then take_model_file and
// take_data_shape (section 13) set what is still not set; check_model and check_run say what cannot work.

constexpr double BIG = 1e9;
struct Config;

// One flag: the member of Config that holds its value, its text in --help, and its allowed values (low..high for
// numbers, "a|b" for words).
struct Flag {
    const char* name;
    std::variant<int Config::*, int64_t Config::*, float Config::*, bool Config::*, std::string Config::*> member;
    int slot;               // where the header of a model file keeps the value (see Model files); 0: nowhere
    bool free;              // true: the value may change from run to run
    const char* objectives; // the only objectives that use the flag, "a|b"; "": all objectives use it
    const char* heading;    // the heading above the flag in --help
    const char* help;
    double low = 0, high = 0;
    const char* choices = "";

    // Returns a pointer to the flag's value in this configuration; null: the flag is of another type than T.
    template <class T, class C> auto* at(C& config) const {
        const auto* m = std::get_if<T Config::*>(&member);
        return m ? &(config.**m) : nullptr;
    }
};

// common/flags.h fills these before main runs: each of its rows is the initialiser of a static member of Config.
inline std::vector<Flag> FLAGS;
inline std::map<std::string, std::string> PRESETS; // the flags that each preset sets
inline const char* heading = "";                   // the heading of the rows that follow
inline const char* objectives = "";                // the objectives that use the rows that follow

// Here common/flags.h becomes C++; its head says what its rows mean. FLAG(int, sample, 0, "draw ...") makes
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
    using pixels = string; // 64, or 48x64
    using ints = string;   // numbers with commas between them
    using floats = string;
#include "common/flags.h"

    // parse_model, check_model and check_run compute these from flags that are text. The comment after each one names
    // its flag.
    int H = 64, W = 64;                           // image_size
    std::vector<float> mult;                      // channel_mult
    std::vector<float> attention_heights;         // attention_resolutions
    std::vector<float> emas;                      // ema_rate
    std::vector<float> class_list;                // classes
    std::vector<float> value_rows;                // values: rows of cond_dim numbers
    PictureKind picture_kind = PictureKind::FILE; // cond
    int picture_factor = 0;                       // cond lowres:K

    // The names of the flags that the command line or the preset has set.
    std::set<string> on_command_line, by_preset;
    bool given(const string& flag) const { return on_command_line.contains(flag); }
    bool chosen(const string& flag) const { return given(flag) || by_preset.contains(flag); }

    // Returns how many channels a level has. The product is rounded to the nearest whole number, because
    // 1.6666666 * 96 should be 160. In double the product itself is exact.
    int channels(size_t level) const { return (int)std::lround((double)mult[level] * num_channels); }
    int out_channels() const { return learn_sigma ? 2 * in_channels : in_channels; }
    int patch() const { return std::max(patch_size, 1); }
    int height(size_t level) const { return H / patch() >> level; } // each level halves the height
    bool has_attention(size_t level) const { return std::ranges::count(attention_heights, height(level)) > 0; }

    // Returns how many images a process computes at a time.
    int micro() const { return microbatch > 0 ? microbatch : batch_size / world.size; }
    bool null_class() const { return class_cond && class_dropout > 0; } // the class table's last row means "no class"
    bool learned_variance() const { return learn_sigma && (vlb_weight > 0 || use_kl); }
    bool guided() const { return guidance_scale != 1; }
    int num_values() const { return cond_dim + (augment > 0 ? AUGMENT_NUMBERS : 0); } // numbers the network is told
    bool can_be_guided() const { return (class_dropout > 0 && (class_cond || cond_dim > 0)) || cond_dropout > 0; }
    bool goes_by_timesteps() const { return sampler == "ddpm" || sampler == "ddim"; } // steps are the model's timesteps
    bool can_churn() const { return sampler == "euler" || sampler == "heun"; }        // see S_churn
    int seen_channels() const { return in_channels + cond_channels; } // those of an image and its picture
    const string& frame() const { return objective == "ect" ? ect_frame : objective; } // see Frame
    int64_t ect_stage() const { return ect_d > 0 ? ect_d : (max_steps + 7) / 8; }      // how many steps a stage has
    bool changes_images() const { return !start_from.empty() || !inpaint.empty(); }
};

constexpr int MORE_EMAS = 7; // the most averages of the weights beside the first one
// --objective ect: the largest q^a that is allowed. The gap between student and teacher is divided by q^a, and a
// smaller gap would be lost in fp32's rounding.
constexpr double LARGEST_GAP_DIVISOR = 1e6;
// The averages of --ema_snapshots weight the parameters of each step by a power of the step's number (Karras et al.
// 2024, appendix C). These are the exponents. With --ema_snapshots the list of rates (Config::emas) contains them, too.
constexpr float POWER_EMAS[2] = {16.97f, 6.94f};

// Returns the row of a flag, or null if there is no such flag.
static const Flag* find_flag(const std::string& name) {
    const auto f = std::ranges::find(FLAGS, name, &Flag::name);
    return f == FLAGS.end() ? nullptr : &*f;
}

// Returns the words that a flag may be set to; the list is empty if the flag's value is not a word.
static std::vector<std::string> choices(const Flag& f) {
    const bool is_bool = std::holds_alternative<bool Config::*>(f.member);
    std::istringstream list(is_bool ? "False|True" : f.choices);
    std::vector<std::string> words;
    for (std::string word; std::getline(list, word, '|');) words.push_back(word);
    return words;
}

// Ends the program, because a flag is set to a word that some place of the program does not know. Whoever adds a word
// to common/flags.h finds all such places by this message: a new word is never silently taken for an old one.
[[noreturn]] static void unknown_word(const char* flag, const std::string& word) {
    die("--%s %s: a part of this program does not know that word yet; choose another one", flag, word.c_str());
}

// Returns what a flag's word means in one place of the program. pairs: (word, meaning).
template <class T>
static T meaning(const char* flag, const std::string& word, std::initializer_list<std::pair<const char*, T>> pairs) {
    for (const auto& [known, meant] : pairs)
        if (word == known) return meant;
    unknown_word(flag, word);
}

// Returns the element of activations that --precision names. With auto it returns `usual`, the element that this build
// prefers. With fp8 it also returns `usual`, because only some tensors are FP8.
static Element element_named(const std::string& precision, Element usual) {
    if (precision == "auto" || precision == "fp8") return usual;
    return meaning<Element>("precision", precision, {{"fp32", Element::FP32}, {"bf16", Element::BF16}});
}

// These functions set flags of different types from a text. They return "" or, if the text is wrong, a text that says
// what the value must be.
static std::string set_value(bool* flag, const Flag&, const std::string& value) {
    const bool yes = value == "True" || value == "true" || value == "1";
    const bool no =
        value == "False" || value == "false" || value == "0"; // guided-diffusion's commands use all of these
    *flag = yes;
    return yes || no ? "" : "True or False";
}

static std::string set_value(std::string* flag, const Flag& f, const std::string& value) {
    *flag = value;
    const bool any_text = !*f.choices;
    return any_text || std::ranges::count(choices(f), value) ? "" : text("one of %s", f.choices);
}

static std::string set_value(float* flag, const Flag& f, const std::string& value) {
    char* end = nullptr;
    errno = 0;
    *flag = (float)strtod(value.c_str(), &end);
    const bool is_number = !value.empty() && !*end && errno != ERANGE;
    // Files hold fp32, so the value is rounded to fp32, and so are the limits. NaN is not in range.
    const bool in_range = *flag >= (float)f.low && *flag <= (float)f.high;
    return is_number && in_range ? "" : text("a number from %g to %g", f.low, f.high);
}

template <class Int> static std::string set_value(Int* flag, const Flag& f, const std::string& value) {
    char* end = nullptr;
    errno = 0;
    const long long number = strtoll(value.c_str(), &end, 10);
    *flag = (Int)number;
    const bool is_number = !value.empty() && !*end && !errno;
    const bool in_range = number >= f.low && number <= f.high;
    return is_number && in_range ? "" : text("a whole number from %.0f to %.0f", f.low, f.high);
}

// Sets a flag from its text, or ends the program. where: "FILE: " if the text comes from that file; "": it comes from
// the command line.
static void set_flag(Config* c, const Flag& f, const std::string& value, const std::string& where = "") {
    auto set = [&](auto member) { return set_value(&(c->*member), f, value); };
    const std::string expected = std::visit(set, f.member);
    if (!expected.empty()) die("%s--%s %s: must be %s", where.c_str(), f.name, value.c_str(), expected.c_str());
}

// Returns a number as text. It has as few digits as possible, but so many that the same number is read from the text.
static std::string shortest(float number) {
    std::string value;
    for (int digits = 6; digits <= 9; digits++) {
        value = text("%.*g", digits, number);
        if (strtof(value.c_str(), nullptr) == number) break;
    }
    return value;
}

// Returns the size of an image in the form of --image_size: 64, or 48x64.
static std::string size_text(int H, int W) { return H == W ? std::to_string(H) : text("%dx%d", H, W); }

// Returns the value of a flag, as a user would type it.
static std::string flag_value(const Config& c, const Flag& f) {
    if (const int* n = f.at<int>(c)) return std::to_string(*n);
    if (const int64_t* n = f.at<int64_t>(c)) return std::to_string(*n);
    if (const float* real = f.at<float>(c)) return shortest(*real);
    if (const bool* yes = f.at<bool>(c)) return *yes ? "True" : "False";
    return *f.at<std::string>(c);
}

// Makes a sentence that says why a flag can't have its value: "--image_size 7: " and the reason.
static std::string wrong(Config* c, const char* name, const std::string& why) {
    return text("--%s %s: ", name, flag_value(*c, *find_flag(name)).c_str()) + why;
}

// Returns the flags of a preset that would undo or forbid what the command line asks for. A preset does not change
// these flags.
static std::set<std::string> left_out_of_preset(const Config& c) {
    std::set<std::string> names;
    if (c.given("num_heads")) names.insert("num_head_channels"); // it would have priority over num_heads
    if (c.objective != "ddpm") names.insert({"predict", "min_snr_gamma", "learn_sigma"});
    if (c.given("predict") || c.use_kl) names.insert("min_snr_gamma"); // the preset's value suits its own --predict
    if (c.given("sampler") || c.changes_images()) names.insert("S_churn");
    return names;
}

// Sets the flags of a preset, which is a text: --name value --name value. Flags that the command line has set stay as
// they are.
static void apply_preset(Config* c, const std::string& preset) {
    const std::set<std::string> without = left_out_of_preset(*c);
    std::istringstream words(PRESETS.at(preset)); // --name value --name value
    for (std::string flag, value; words >> flag >> value;) {
        const std::string name = flag.substr(2);
        if (c->given(name) || without.contains(name)) continue;
        set_flag(c, *find_flag(name), value);
        c->by_preset.insert(name);
    }
}

// Makes a flag's line of --help: its name, what it means, and in brackets its default and its value in the default
// preset.
static std::string help_line(const Flag& f, const Config& defaults, const Config& preset) {
    const std::string choices = *f.choices ? text(" (%s)", f.choices) : "";
    std::string value = flag_value(defaults, f);
    if (value.empty()) value = "\"\""; // so that the user sees that the value is empty
    if (preset.chosen(f.name)) value += text("; %s: ", DEFAULT_PRESET) + flag_value(preset, f);
    return text("  --%-25s %s%s [%s]\n", f.name, f.help, choices.c_str(), value.c_str());
}

static void print_help() {
    Config defaults, preset;
    apply_preset(&preset, DEFAULT_PRESET);
    printf("train_unet: trains a diffusion UNet, and samples from it.\n\n"
           "  ./train_unet                              train the default preset into out/\n"
           "  ./train_unet --data_dir PICTURES          on your own pictures (prepare_data.py makes PICTURES.bin)\n"
           "  ./train_unet --resume_checkpoint latest   continue the run in out/\n"
           "  ./train_unet --sample 36 --init out/model_0001000.bin --output samples.png\n\n"
           "In brackets: the default, and what preset %s has, which holds without --preset or data of your own.\n",
           DEFAULT_PRESET);
    const char* last_heading = ""; // the heading of the flags that were printed last
    for (const Flag& f : FLAGS) {
        if (f.heading != last_heading) printf("\n%s\n", f.heading); // here a new part begins
        last_heading = f.heading;
        printf("%s", help_line(f, defaults, preset).c_str());
    }
    // Which preset is used without --preset: see default_preset.
    printf("\nPresets: without --preset %s; for a --data_file of images of 32x32 %s, of 64x64 %s, of other sizes %s; "
           "for a --data_dir %s\n",
           DEFAULT_PRESET, PRESET_32, PRESET_64, PRESET_ELSE, PRESET_64);
    for (const auto& [name, settings] : PRESETS) printf("  %-10s %s\n", name.c_str(), settings.c_str());
}

// Returns how many letters must be inserted, left out or replaced to turn a into b (Levenshtein 1966). row[j] is this
// number for two beginnings: the letters of a that the loop has reached, and the first j letters of b.
static size_t edit_distance(const std::string& a, const std::string& b) {
    std::vector<size_t> row(b.size() + 1);
    std::iota(row.begin(), row.end(), 0);
    for (char letter : a) {
        // The shortest list of edits that makes a beginning of b ends with one of three edits, or with a letter that
        // stays as it is.
        size_t diagonal = row[0]; // row[j] as it was before this letter
        row[0]++;
        for (size_t j = 0; j < b.size(); j++) {
            const size_t replace = diagonal + (letter != b[j]);
            const size_t leave_out = row[j + 1] + 1;
            const size_t insert = row[j] + 1;
            diagonal = row[j + 1];
            row[j + 1] = std::min({replace, leave_out, insert});
        }
    }
    return row.back();
}

// Says what to do instead of using a flag that this program does not have.
static std::string instead_of(const std::string& name) {
    auto is = [&](std::initializer_list<const char*> names) { return std::ranges::count(names, name) > 0; };
    // These flags belong to guided-diffusion or to dev/bench. What they do is done in another way here, or not at all.
    if (is({"model_path", "use_ddim"}))
        return "python generate.py takes it; here it is --sample N --init FILE --sampler";
    if (is({"base_samples"})) return "here it is --sample N --cond_file, a data file of the small images";
    if (is({"iterations", "anneal_lr"}) || name.starts_with("classifier_"))
        return "there are no classifiers here; train with --class_dropout 0.1 and sample with --guidance_scale";
    if (is({"bench", "profile"})) return "make -C dev bench makes dev/bench, which takes it and times this program";

    // Otherwise it may be a typing error.
    std::string nearest;
    size_t distance = 2 + name.size() / 3; // the user hardly meant a flag that differs by so many letters
    for (const Flag& f : FLAGS) {
        const size_t d = edit_distance(name, f.name);
        if (d >= distance) continue;
        distance = d;
        nearest = text("; did you mean --%s?", f.name);
    }
    return "there is no such flag" + nearest + "; --help lists those there are";
}

// Reads the command line: --name value or --name=value. Presets and files set what it does not set.
static void parse_command_line(Config* c, int argc, char** argv) {
    for (int i = 1; i < argc; i++) {
        const std::string arg = argv[i];
        if (arg == "--help" || arg == "-h") {
            print_help();
            exit(0);
        }
        if (!arg.starts_with("--")) die("%s: is no flag; they look like --batch_size 16; --help lists them", argv[i]);
        const size_t equals = std::min(arg.find('='), arg.size()); // where the name ends
        const std::string name = arg.substr(2, equals - 2);        // without the two dashes
        const Flag* f = find_flag(name);
        if (!f) die("--%s: %s", name.c_str(), instead_of(name).c_str());
        if (c->given(name)) die("--%s: is given twice; once is enough", name.c_str());

        // Without an = the value is the next argument.
        const bool value_follows = equals == arg.size();
        if (value_follows) i++;
        if (i == argc) die("--%s: its value is missing", name.c_str());
        std::string value = value_follows ? argv[i] : arg.substr(equals + 1);
        if (name == "microbatch" && value == "-1") value = "0"; // guided-diffusion's word for "all at once"
        set_flag(c, *f, value);
        c->on_command_line.insert(name);
    }
}

// Some of guided-diffusion's flags are other names for values of our flags. If one is given, it sets our flag, which
// must not be given with another value.
static void take_aliases(Config* c) {
    // Sets a flag to the value that its alias stands for.
    auto take = [&](const char* alias, const char* name, const std::string& value) {
        const std::string before = flag_value(*c, *find_flag(name));
        const std::string alias_value = flag_value(*c, *find_flag(alias));
        if (c->given(name) && before != value)
            die("--%s %s: means --%s %s, and --%s is %s; leave one of them out", alias, alias_value.c_str(), name,
                value.c_str(), name, before.c_str());
        set_flag(c, *find_flag(name), value);
        c->on_command_line.insert(name);
    };
    // In guided-diffusion, the learning rate falls over lr_anneal_steps steps, without a warm-up, and then the run
    // stops. There 0 means that the rate stays as it is and that the run has no end. Here 0 leaves --max_steps as it
    // is.
    const int64_t steps = c->lr_anneal_steps;
    // An upsampler enlarges images from small_size to large_size.
    // If large_size is 512, the upsampler's channel_mult differs from that of a model of 512 x 512 that is not an
    // upsampler.
    const int large = c->large_size;
    const int small = c->small_size;
    if (!large != !small) die("--large_size %d, --small_size %d: an upsampler needs both", large, small);
    if (small && large % small) die("--small_size %d: must divide --large_size %d", small, large);
    if (large) take("large_size", "image_size", std::to_string(large));
    if (large == 512 && !c->given("channel_mult")) take("large_size", "channel_mult", "1,1,2,2,4,4");
    if (small) take("small_size", "cond", text("lowres:%d", large / small));
    if (c->predict_xstart) take("predict_xstart", "predict", "x0");
    if (c->given("use_fp16")) take("use_fp16", "precision", c->use_fp16 ? "bf16" : "fp32");
    if (c->given("lr_anneal_steps")) take("lr_anneal_steps", "lr_schedule", steps ? "linear" : "constant");
    if (steps) take("lr_anneal_steps", "max_steps", std::to_string(steps));
    if (steps && !c->given("warmup_steps")) take("lr_anneal_steps", "warmup_steps", "0");
    if (c->given("fp16_scale_growth")) printf("--fp16_scale_growth: bf16 has no loss scale that could grow\n");
}

// --rescale_learned_sigmas is guided-diffusion's name for two values of --vlb_weight. This function is called when the
// other flags are known, because one of these values depends on --diffusion_steps. from_file: a model file has set
// --vlb_weight, so a preset must not change it.
static void take_rescale_learned_sigmas(Config* c, bool from_file) {
    // The command line has priority over a preset. A preset may name either flag.
    const bool given = c->given("rescale_learned_sigmas");
    const bool weight_given = c->given("vlb_weight");
    if (given && weight_given)
        die("--rescale_learned_sigmas: sets --vlb_weight, which is given too; leave one of them out");
    const bool preset_asks = !weight_given && !from_file && c->chosen("rescale_learned_sigmas");
    if (given || preset_asks) c->vlb_weight = c->rescale_learned_sigmas ? 1e-3f : 1.0f / (float)c->diffusion_steps;
}

// Reads numbers with commas between them, such as "1,2,3,4". Returns false if there is anything else in the text.
static bool parse_list(const std::string& list, std::vector<float>* numbers) {
    numbers->clear();
    const char* p = list.c_str(); // where the next number begins
    while (*p) {
        char* end = nullptr;
        const float number = strtof(p, &end);
        numbers->push_back(number);
        if (end == p || !std::isfinite(number)) return false;
        const bool more_follows = *end == ',' && end[1]; // after a comma there must be another number
        if (*end && !more_follows) return false;
        p = end + more_follows;
    }
    return true;
}

// Each of the functions that follow, up to parse_model, parses a part of a model's flags. It returns "", or one
// sentence that says why the flags are wrong.

// --image_size: 64 means 64x64; in HxW the height comes first.
static std::string parse_image_size(Config* c) {
    int n = 0; // how many characters were read; 5 digits can't overflow
    const int sides = sscanf(c->image_size.c_str(), "%5d%nx%5d%n", &c->H, &n, &c->W, &n);
    if (sides == 1) c->W = c->H;
    const bool is_size = sides >= 1 && !c->image_size[n];
    const bool in_range = c->H >= 4 && c->W >= 4 && c->H <= 4096 && c->W <= 4096;
    if (is_size && in_range) return "";
    return wrong(c, "image_size", "must be a number of pixels from 4 to 4096, or HxW");
}

// --cond makes pictures of images. Returns how many channels these pictures have.
static int made_channels(const Config& c) {
    if (c.picture_kind == PictureKind::GRAY) return 1;
    return c.in_channels + (c.picture_kind == PictureKind::MASK);
}

// Parses --cond, which says what pictures are made of images: lowres:K, gray or mask.
static std::string parse_cond(Config* c) {
    c->picture_kind = PictureKind::FILE;
    c->picture_factor = 0;
    if (c->cond.empty()) return "";
    const size_t colon = std::min(c->cond.find(':'), c->cond.size());
    const std::string kind = c->cond.substr(0, colon);
    const std::string behind = c->cond.substr(colon);
    const auto row = std::ranges::find(PICTURE_WORDS, kind, &PictureWord::word);
    const bool is_word = row != std::end(PICTURE_WORDS) && !kind.empty();
    if (is_word) c->picture_kind = row->kind;
    // Only after lowres there is a number, of up to five digits.
    const bool is_lowres = c->picture_kind == PictureKind::LOWRES;
    const bool is_short = behind.size() >= 2 && behind.size() <= 6;
    const bool is_number = is_short && behind.find_first_not_of("0123456789", 1) == std::string::npos;
    if (!is_word || (is_lowres ? !is_number : !behind.empty()))
        return wrong(c, "cond", "must be lowres:4 (or another factor), gray or mask");
    const int K = is_lowres ? std::stoi(behind.substr(1)) : 0;
    if (is_lowres && (K < 2 || c->H % K || c->W % K))
        return wrong(c, "cond",
                     text("the factor must be at least 2 and divide the height and width of %dx%d", c->H, c->W));
    c->picture_factor = K;
    if (c->picture_kind == PictureKind::GRAY && c->in_channels != 3)
        return wrong(c, "cond", text("makes images of 3 channels grey, and these have %d", c->in_channels));
    if (!c->given("cond_channels")) c->cond_channels = made_channels(*c);
    if (c->cond_channels != made_channels(*c))
        return wrong(c, "cond_channels", text("--cond %s makes pictures of %d", c->cond.c_str(), made_channels(*c)));
    return "";
}

// Parses how many channels each level has. Without the flag, guided-diffusion's choice for images of this height is
// used.
static std::string parse_channel_mult(Config* c) {
    static const std::map<int, const char*> DEFAULTS = {
        {512, "0.5,1,1,2,2,4,4"}, {256, "1,1,2,2,4,4"}, {128, "1,1,2,3,4"}, {64, "1,2,3,4"}};
    if (c->channel_mult.empty() && DEFAULTS.contains(c->H)) c->channel_mult = DEFAULTS.at(c->H);
    const bool is_list = parse_list(c->channel_mult, &c->mult);
    const size_t levels = c->mult.size();
    if (!is_list || levels < 1 || levels > 8)
        return wrong(c, "channel_mult", "must be 1 to 8 numbers with commas, such as 1,2,2");
    // Group norm has 32 groups, so every level needs a multiple of 32 channels.
    const int F = c->num_channels;
    if (F % 32) return wrong(c, "num_channels", text("must be a multiple of 32 (group norm); %d is", round_up(F, 32)));
    for (size_t level = 0; level < levels; level++) {
        const float m = c->mult[level];
        const bool in_range = m > 0 && m <= 64; // false for NaN
        const bool works = in_range && c->channels(level) >= 32 && c->channels(level) % 32 == 0;
        if (!works)
            return wrong(c, "channel_mult", text("%g * num_channels %d is not a positive multiple of 32", m, F));
    }
    return "";
}

// Checks that the image can be divided into patches and levels: a patch becomes a pixel, and each further level halves
// the resolution.
static std::string check_divisions(Config* c) {
    const int p = c->patch();
    const int patch_channels = c->seen_channels() * p * p;
    if (patch_channels > 64)
        return wrong(c, "patch_size", text("makes %d channels of a patch, of at most 64", patch_channels));
    const int levels = (int)c->mult.size();
    const int depth = p << (levels - 1); // the side of a square that becomes one pixel of the lowest level
    if (c->H % depth == 0 && c->W % depth == 0) return "";
    // The message names the next smaller size that works, or the smallest one.
    const int H = std::max(c->H / depth, 1) * depth;
    const int W = std::max(c->W / depth, 1) * depth;
    return wrong(c, "image_size",
                 text("must be a multiple of %d, as %d levels halve it%s; use %dx%d or fewer channel_mult", depth,
                      levels, p > 1 ? " in patches" : "", H, W));
}

// Parses at which heights of the image there is attention. Each must be the height of a level. Without this check a
// typing error would silently give a model without attention.
static std::string parse_attention_resolutions(Config* c) {
    const bool is_list = parse_list(c->attention_resolutions, &c->attention_heights);
    if (!is_list || c->attention_heights.size() > 8)
        return wrong(c, "attention_resolutions", "must be up to 8 image heights with commas, such as 16,8");
    std::string heights;   // the heights of all levels, as text for the message
    std::set<float> occur; // the same heights as numbers
    for (size_t level = 0; level < c->mult.size(); level++) {
        heights += text("%s %d", level ? "," : "", c->height(level));
        occur.insert((float)c->height(level));
    }
    // (A height that is not a whole number is also not among these.)
    for (float height : c->attention_heights)
        if (!occur.contains(height))
            return wrong(c, "attention_resolutions",
                         text("%g never occurs; the heights of this model are", height) + heights);
    return "";
}

// Parses and checks image_size, cond, channel_mult, patch_size and attention_resolutions. Returns "", or a sentence
// that says what is wrong.
static std::string parse_model(Config* c) {
    for (auto parse :
         {parse_image_size, parse_cond, parse_channel_mult, check_divisions, parse_attention_resolutions}) {
        const std::string error = parse(c);
        if (!error.empty()) return error;
    }
    return "";
}

// Reads the rows of --values F.csv into c->value_rows. Two things are skipped, which a table for prepare_data.py may
// have: a first line with the columns' names, and a first column with the images' names.
// Returns why the file can't be used, or "".
static std::string read_value_table(Config* c) {
    const size_t K = c->cond_dim;
    std::ifstream file(c->values);
    if (!file) return text("can't be opened (%s)", strerror(errno));
    std::string line;
    for (int number = 1; std::getline(file, line); number++) {
        if (line.ends_with('\r')) line.pop_back();
        if (line.empty()) continue;
        const bool has_names = (size_t)std::ranges::count(line, ',') == K;
        if (has_names) line.erase(0, line.find(',') + 1);
        std::vector<float> row;
        const bool fits = parse_list(line, &row) && row.size() == K;
        if (!fits && number > 1) return text("line %d must hold %zu numbers with commas", number, K);
        if (fits) c->value_rows.insert(c->value_rows.end(), row.begin(), row.end());
    }
    return c->value_rows.empty() ? text("has no row of %zu numbers with commas", K) : "";
}

// Parses --values. Returns "", or a sentence that says what is wrong.
static std::string parse_values(Config* c) {
    c->value_rows.clear();
    const int K = c->cond_dim;
    if (K > 0 && c->sample && c->values.empty())
        return wrong(c, "values",
                     text("must be the %d numbers of the images, such as 0.3,1, or a .csv file of them", K));
    if (c->values.empty()) return "";
    if (K == 0) return wrong(c, "values", "this model is not conditioned on numbers (--cond_dim)");
    if (c->values.ends_with(".csv")) {
        const std::string error = read_value_table(c);
        return error.empty() ? "" : wrong(c, "values", error);
    }
    const bool fits = parse_list(c->values, &c->value_rows) && (int)c->value_rows.size() == K;
    return fits ? "" : wrong(c, "values", text("must be %d numbers with commas, or a .csv file of rows of them", K));
}

// Checks that the flags name pictures if the model is conditioned on pictures, and that they name no pictures if it is
// not. Returns "", or one sentence that says what is wrong. (take_data_shape compares a run's pictures with its data.)
static std::string check_pictures(Config* c) {
    const bool has_file = !c->cond_file.empty();
    if (has_file && !c->cond_channels)
        return wrong(c, "cond_file", "this model is not conditioned on pictures (--cond_channels)");
    if (c->cond_dropout > 0 && !c->cond_channels)
        return wrong(c, "cond_dropout", "has nothing to leave out without --cond_channels");
    if (c->cond_channels && c->sample && !has_file)
        return wrong(c, "cond_file",
                     text("must name the pictures of %d channels that the model is conditioned on", c->cond_channels));
    const bool makes_them = c->picture_kind != PictureKind::FILE;
    if (makes_them && has_file && !c->sample)
        return wrong(c, "cond_file", "is not read in training, where --cond makes the pictures of the images");
    if (c->cond_noise > 0 && c->picture_kind != PictureKind::LOWRES)
        return wrong(c, "cond_noise", "is for --cond lowres, whose coarse pictures it is added to");
    if (!c->val_cond_file.empty() && c->val_data_file.empty())
        return wrong(c, "val_cond_file", "needs --val_data_file, the images that these pictures belong to");
    return "";
}

// Checks a model and its samples. Returns "", or a sentence about what cannot work and what would work.
static std::string check_model(Config* c) {
    std::string error = parse_model(c);
    if (error.empty()) error = parse_values(c);
    if (error.empty()) error = check_pictures(c);
    if (!error.empty()) return error;
    // Remembers the first thing that is wrong.
    auto note_unless = [&](bool ok, const char* name, const std::string& why) {
        if (!ok && error.empty()) error = wrong(c, name, why);
    };

    // Attention's heads must divide the channels. The number of heads follows from --num_head_channels, or is
    // --num_heads if that flag is -1.
    const int per_head = c->num_head_channels;
    const int up = c->num_heads_upsample;
    const size_t lowest = c->mult.size() - 1; // the middle has the same channels, and always attention
    for (size_t level = 0; level <= lowest; level++) {
        if (!c->has_attention(level) && level < lowest) continue;
        const int ch = c->channels(level);
        const std::string divide = text("divide the %d channels where there is attention", ch);
        const bool counts_heads = per_head < 0;
        const bool head_fits = per_head && ch % per_head == 0;
        const bool up_fits = up == -1 || (up > 0 && ch % up == 0);
        note_unless(counts_heads || head_fits, "num_head_channels", "must " + divide + "; 32 does");
        note_unless(!counts_heads || ch % c->num_heads == 0, "num_heads", "must " + divide);
        note_unless(!counts_heads || up_fits, "num_heads_upsample", "must be -1 or " + divide);
    }

    // Diffusion and classes. With T steps the linear schedule's last beta is 20 / T.
    note_unless(c->noise_schedule != "linear" || c->diffusion_steps > 20, "diffusion_steps",
                "must be above 20 with --noise_schedule linear, whose last beta would reach 1");
    note_unless(!c->class_cond || c->num_classes > 0, "num_classes",
                "must be given for --class_cond True: the data has none");
    note_unless(c->class_cond || c->cond_dim || !c->class_dropout, "class_dropout",
                "has nothing to leave out without --class_cond True or --cond_dim");
    // With other objectives, flags that only --objective ddpm uses must keep their defaults.
    Config plain;
    for (auto name : {"predict", "learn_sigma", "schedule_sampler", "use_kl", "min_snr_gamma", "rescale_timesteps"}) {
        const Flag& f = *find_flag(name);
        const bool is_default = flag_value(*c, f) == flag_value(plain, f);
        note_unless(
            c->objective == "ddpm" || is_default, name,
            "is for --objective ddpm; " + c->objective + " has a prediction, a weighting and noise levels of its own");
    }
    note_unless(!c->augment || !c->random_flip, "random_flip", "is a part of --augment, which tells the network of it");
    note_unless(!c->use_kl || !c->min_snr_gamma, "min_snr_gamma", "weighs an error that --use_kl True leaves out");

    // The flags of samples: classes, the noise levels of the sampler's steps, and images that sampling begins with.
    note_unless(parse_list(c->classes, &c->class_list), "classes", "must be numbers with commas, such as 3,5");
    note_unless(c->class_list.empty() || c->class_cond, "classes", "this model is not conditioned on classes");
    for (float k : c->class_list) {
        const bool is_class = k == std::floor(k) && k >= 0 && k < c->num_classes;
        note_unless(is_class, "classes", text("%g is not one of the classes 0 to %d", k, c->num_classes - 1));
    }
    note_unless(!c->guided() || c->can_be_guided(), "guidance_scale",
                "needs a model of --class_cond True (or --cond_dim) and --class_dropout 0.1, or of --cond_dropout 0.1");
    note_unless(c->sigma_min < c->sigma_max, "sigma_min", text("must be below --sigma_max %g", c->sigma_max));
    note_unless(c->sampler != "consistency" || c->mid_t < c->sigma_max, "mid_t",
                text("must be below --sigma_max %g", c->sigma_max));
    // --start_from and --inpaint begin with images; S_churn is noise that euler and heun add between their steps.
    const bool changes_images = c->changes_images();
    const bool inpaints = !c->inpaint.empty();
    note_unless(c->start_from.empty() || !inpaints, "start_from", "can't be done beside --inpaint");
    const bool takes_mask = c->sample && c->picture_kind == PictureKind::MASK;
    note_unless(!inpaints || !c->mask.empty(), "mask", "is needed by --inpaint: where to paint anew");
    note_unless(inpaints || takes_mask || c->mask.empty(), "mask",
                "needs --inpaint, or a model of --cond mask: where to paint anew");
    note_unless(!changes_images || c->sample, inpaints ? "inpaint" : "start_from", "is for --sample");
    note_unless(!changes_images || !c->S_churn, "S_churn", "is for images that are made of noise alone");
    note_unless(!c->S_churn || c->can_churn(), "S_churn", "is for --sampler euler and heun");
    return error;
}

// Parses --ema_rate, and adds the averages that --ema_snapshots needs. where: "FILE: " if the rates come from a file.
static void parse_ema_rate(Config* c, const std::string& where) {
    // A rate is from 0 to 1. A number above 1 is the exponent of a power function. A user does not write such a number:
    // it comes from a checkpoint, and is never the first in the list.
    bool works = parse_list(c->ema_rate, &c->emas) && !c->emas.empty();
    for (size_t k = 0; k < c->emas.size(); k++) {
        const float rate = c->emas[k];
        const bool is_power = k > 0 && std::ranges::count(POWER_EMAS, rate); // from a checkpoint with --ema_snapshots
        works = works && rate >= 0 && (rate <= 1 || is_power);
    }
    for (float power : POWER_EMAS) {
        const bool is_there = std::ranges::count(c->emas, power);
        if (c->ema_snapshots && !is_there) c->emas.push_back(power);
    }
    if (!works || c->emas.size() > 1 + MORE_EMAS)
        refuse(where + wrong(c, "ema_rate", "must be a number from 0 to 1, or up to 8 of them with commas"));
}

// --objective ect: checks that q^a stays in range until the run ends. a grows by 1 with each stage of --ect_d steps.
static void check_ect_stages(Config* c, const std::string& where) {
    if (c->objective != "ect") return;
    // q^a < LARGEST_GAP_DIVISOR holds up to a = log(LARGEST_GAP_DIVISOR) / log(q), which is 19 for q = 2.
    const int64_t most = (int64_t)(std::log(LARGEST_GAP_DIVISOR) / std::log((double)c->ect_q));
    const int64_t stages = (c->max_steps + c->ect_stage() - 1) / c->ect_stage(); // rounded up
    if (stages <= most) return;
    const int64_t enough = (c->max_steps + most - 1) / std::max<int64_t>(most, 1);
    refuse(where + wrong(c, "ect_d",
                         text("makes a grow to %ld, and --ect_q %g^a must stay below %g; %ld is enough", stages,
                              c->ect_q, LARGEST_GAP_DIVISOR, enough)));
}

// The ranks share a batch, and each rank computes its share in microbatches. If a file or preset has a microbatch that
// does not divide the share, each rank computes its share at once.
static void check_microbatch(Config* c, const std::string& where) {
    const int B = c->batch_size;
    const int N = world.size;
    if (B % N) {
        const int nearest = std::max(1, (B + (N - 1) / 2) / N) * N; // rounded, and at least N
        die("%s--batch_size %d: is shared by %d processes, so it must be a multiple of that; %d is one", where.c_str(),
            B, N, nearest);
    }
    // A microbatch must divide the share.
    const int share = B / N;
    const int before = c->microbatch;
    const bool works = before <= share && share % c->micro() == 0;
    if (works) {
        if (N > 1) c->microbatch = c->micro();
        return;
    }
    // If the user has set a microbatch that does not work, or if there is only one process, it is an error. Otherwise
    // the microbatch is changed, with a message.
    if (c->given("microbatch") || N == 1) {
        int nearest = std::min(before, share);
        while (share % nearest) nearest--;
        die("%s--microbatch %d: must divide the %d images of a process, of --batch_size %d; %d does", where.c_str(),
            before, share, B, nearest);
    }
    printf("--microbatch %d: was %d before; %d processes sum up in another order\n", share, before, N);
    c->microbatch = share;
}

// Ends the program if settings of the run cannot work together. where: "FILE: " if some of them come from a file.
static void check_run(Config* c, const std::string& where) {
    parse_ema_rate(c, where);
    check_ect_stages(c, where);
    check_microbatch(c, where);
    if (c->output_dir.empty()) die("--output_dir: must name a folder");
    if (c->keep_best && c->val_data_file.empty())
        refuse(wrong(c, "keep_best", "needs --val_data_file, the images whose loss says which checkpoint is the best"));
    // A checkpoint keeps two paths in 512 bytes: that of --data_file and that of --cond_file, each with a 0 at its end.
    if (c->data_file.size() > 511)
        refuse(wrong(c, "data_file", "is longer than the 511 bytes that a checkpoint keeps; use a shorter path"));
    if (c->data_file.size() + c->cond_file.size() > 510)
        refuse(wrong(c, "cond_file",
                     "and --data_file are longer than the 510 bytes that a checkpoint keeps; use shorter paths"));
}

// =====================================================================================================================
// 5. The network: a list of layers, made of guided-diffusion's flags
// build_unet walks the architecture once, as guided-diffusion's UNetModel does, and appends parameters (in state_dict
// order) and layers (in the order of the forward pass). For another configuration, the same code makes another list.
//
//   t, labels, values -> sinusoids, linear, SiLU, linear [+ label] [+ linear of the values], SiLU, linear:
//                        the embedding, some columns a block
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
// A layer has a kind (LayerKind), which says what the layer computes. It also has indices of tensors, parameters and
// buffers. An index is -1 if the layer has no such tensor, parameter or buffer.
//
// In the order in which they run: build_unet calls add_embedding, add_input_blocks, add_output_blocks and place_params;
// section 6 plans the memory; then section 7 walks over the list, and calls each layer's kind with its layer_args.

// How a parameter is initialised: see init_params.
enum ParamInit { INIT_UNIFORM, INIT_NORMAL, INIT_ONE, INIT_ZERO };

// A parameter. Its offset, in floats, is the same in all flat arrays: weights, gradients, moments, averages.
struct Param {
    std::string name;
    std::vector<int> shape; // as in PyTorch
    size_t size, offset;
    ParamInit init;
    int heads;            // the number of attention heads, in the weight and bias of a qkv; 0 elsewhere
    bool of_conv = false; // a convolution's weight: see add_conv_params
};

// An activation (B, H, W, C).
struct Tensor {
    int H = 0, W = 0, C = 0;
    Element element = Element::FP32; // act_element; or FP32: input, output, embeddings, patches; or FP8: see choose_fp8
    int buffer = -1;                 // the buffer of its values
    int stats = -1;                  // if a group norm reads it: the buffer of Stats::sums
    int fp8 = -1;                    // if a convolution reads it in FP8: the buffer of the FP8 numbers (plan_fp8)
    int parts = 1;                   // Stats::parts, as the forward pass has last set it
    bool needs_grad = false;         // the layer that writes it has a backward pass
};

// The buffers for the gradient of one input of a layer: d = gradient + add1 + add2. fp8: d in FP8, if it is written.
struct GradPlan {
    int d = -1, add1 = -1, add2 = -1, fp8 = -1;
};

struct LayerKind; // what a layer computes: CONV, GROUPNORM, ...: see "The kinds of layers" below
struct Layer {
    const LayerKind* kind = nullptr;
    std::string name;
    int x1 = -1, x2 = -1, out = -1; // tensors: the layer reads [x1 | x2] and writes out
    int weight = -1;                // a parameter; the bias, if there is one, is the next parameter
    int residual = -1;              // CONV: a tensor that is added to the result, unless there is a skip
    int emb = -1, emb_offset = 0;   // the tensor of embedding projections, and this layer's first column in it
    int kernel = 1, stride = 1, upsample = 0;       // CONV
    bool fp8 = false;                               // CONV: multiplies in FP8 in the forward pass (choose_fp8)
    bool fp8_gradient = false;                      // CONV: the input gradient is computed in FP8 (choose_fp8)
    Nonlinearity nonlinearity = Nonlinearity::NONE; // GROUPNORM
    int dropout_block = -1;                         // GROUPNORM: index of the residual block whose dropout follows
    int heads = 0;                                  // ATTENTION, and the CONV that makes its qkv: the number of heads
    int saved = -1;     // the buffer that is kept for the backward pass: mean and rstd, or SoftmaxRows
    int block_end = -1; // --use_checkpoint: this layer is computed again before the backward pass of layer block_end

    // The plan (see plan_gradients, plan_waits, plan_fusions).
    GradPlan d1{}, d2{};      // the gradients of x1 and x2
    int dout = -1, demb = -1; // the buffers of the gradients of out, and of the layer's columns of the embedding
    int dout_fp8 = -1;        // CONV with fp8_gradient: the buffer of dout in FP8
    bool rounds_dout = false; // CONV with fp8_gradient: it writes dout_fp8 itself, since the writer of dout does not
    int after = -1;           // backward: this layer waits until the weight gradient of layer `after` is complete
    int skip = -1;            // CONV, forward: the layer of the skip connection that this layer also computes, and adds
    bool fused = false;       // forward: the next layer's operation also computes this layer
};

// A part of the arena: the memory of a tensor, a gradient, or something else that a layer keeps.
struct Buffer {
    size_t bytes;                           // for one sample
    int first_use = INT_MAX, last_use = -1; // the first and the last time at which it is in use (see plan_lifetimes)
    size_t offset = 0;                      // in the arena
    int again; // if the tensor is computed again (--use_checkpoint): the buffer for the result; else this buffer
};

struct UNet {
    Config config;
    std::vector<Param> params;
    std::vector<Tensor> tensors;
    std::vector<Layer> layers;
    std::vector<Buffer> buffers;
    size_t num_params = 0;                 // how many parameters there are, without padding
    size_t flat_size = 0;                  // floats in a flat array, with padding
    size_t plain_size = 0;                 // length of a flat array's beginning, which is read in fp32, not from a copy
    int input = -1, emb = -1, output = -1; // tensors
    int residual_blocks = 0;
    double flops = 0; // floating-point operations of one image's forward pass; a multiply-add is 2 of them
    // Set by plan_memory:
    int B = 0;
    size_t arena_bytes = 0;
    char* arena = nullptr;
    // Set by the caller before a forward pass, in device memory:
    float* t = nullptr;      // (B)
    int* labels = nullptr;   // (B)
    float* values = nullptr; // (B, num_values): an image's own numbers, then those of its augmentation
    float* cond = nullptr;   // (B, H, W, cond_channels): the pictures that the images are conditioned on

    Tensor tensor(int i) const { return i < 0 ? Tensor{.parts = 0} : tensors[i]; } // i < 0: a tensor with C = 0
};

// Returns where a buffer lies; null if there is no buffer, or if the network has no memory yet.
template <class T = act> static T* buffer_data(const UNet* net, int buffer, size_t first_byte = 0) {
    if (buffer < 0 || !net->arena) return nullptr;
    return (T*)(net->arena + net->buffers[buffer].offset + first_byte);
}

template <class T> static T* tensor_data(const UNet* net, int t) { return buffer_data<T>(net, net->tensors[t].buffer); }

// With --precision fp8: weights in FP8, and the factors that belong to them (make_fp8_weights, make_fp8_training).
// Without `weights`, a walk has no FP8. Without `turned`, it is a walk of sampling.
struct Fp8Weights {
    const uint8_t* weights = nullptr;
    const float* factors = nullptr;
    // Training:
    const uint8_t* turned = nullptr;
    const float* gradient_factor = nullptr; // (1): what gradients are multiplied by before they are rounded
    const float* dx_factors = nullptr;      // (C), all the same: what turns the sums of an input gradient into values
};
// The parameters of a network: in fp32, and the convolutions' weights once more in the type of the activations.
struct Weights {
    const float* fp32 = nullptr;
    const act* copy = nullptr;
    Fp8Weights fp8{};
};

// A walk over the list. If grads is null, it is a forward pass. Otherwise it is a backward pass, and the layers that
// are computed again for it (--use_checkpoint) are a part of it.
struct Walk {
    UNet* net;
    Weights weights{};
    Dropout dropout{}; // the dropout of all residual blocks
    int B;
    float* grads = nullptr;
    Stream* stream = MAIN_STREAM;
};

// The arguments of a kind's functions: all that they need of a layer. For each index of the layer there is a pointer.
// It is null if the index is -1. layer_args fills this.
struct LayerArgs {
    UNet* net;
    const Layer* layer;
    Stream* stream;

    // Shapes: of x1 (B, H, W, Cin), of x2 beside it (C2 channels), of out (B, Hout, Wout, Cout).
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

    // FP8; null if this walk or this layer has none.
    const act *x_fp8, *weight_fp8, *turned_fp8; // CONV: its input, and its weights in both orders
    const float *factors_fp8, *dx_factors_fp8;  // CONV: factors of out and of the input gradient
    Fp8Copy out_fp8;                            // GROUPNORM
    Fp8Copy dout_fp8;                           // CONV
    Fp8Copy d1_fp8, d2_fp8;                     // GROUPNORM

    int tokens() const { return H * W; } // attention's T
    Stats* stats() { return out_stats.sums ? &out_stats : nullptr; }
    float* rstd() const { return saved + B * 32; } // of a norm; rstd lies after the means of 32 groups
    ConvShape conv() const {
        const Element in = net->tensor(layer->x1).element, to = net->tensor(layer->out).element;
        return {B, H, W, Cin, C2, Cout, layer->kernel, layer->stride, layer->upsample, in, to};
    }
    NormShape norm() const { return {B, H * W, Cin, C2, 32, layer->nonlinearity, 1e-5f}; }

    // x1, out, dout and d1 of a layer whose tensors are fp32: the layers of the embedding, JOIN, PATCHES and PIXELS.
    const float* x_fp32() const { return (const float*)x1; }
    float* out_fp32() const { return (float*)out; }
    const float* dout_fp32() const { return (const float*)dout; }
    GradOf<float> d1_fp32() const { return {(float*)d1.dx, (const float*)d1.add1, (const float*)d1.add2}; }
};

// Returns where a tensor's buffer lies. If the tensor was computed again (--use_checkpoint), a backward walk reads the
// new copy.
static act* memory_of(const Walk& walk, int buffer) {
    const bool again = walk.grads && buffer >= 0;
    return buffer_data(walk.net, again ? walk.net->buffers[buffer].again : buffer);
}

// Looks up what the functions of a convolution or a norm need of FP8.
static void add_fp8_args(LayerArgs* a, const Walk& walk, const Layer& layer) {
    const UNet* const net = walk.net;
    const Fp8Weights& fp8 = walk.weights.fp8;
    const Tensor out = net->tensor(layer.out);
    if (layer.fp8) {
        const size_t bias = net->params[layer.weight + 1].offset;
        a->x_fp8 = memory_of(walk, net->tensor(layer.x1).fp8);
        a->weight_fp8 = (const act*)(fp8.weights + net->params[layer.weight].offset);
        a->factors_fp8 = fp8.factors + bias;
    }
    if (layer.fp8_gradient && fp8.turned) {
        a->turned_fp8 = (const act*)(fp8.turned + net->params[layer.weight].offset);
        a->dx_factors_fp8 = fp8.dx_factors;
    }
    if (out.fp8 >= 0) { // the layer is a norm; the place of its weight holds its factor
        const float* const factor = fp8.factors + net->params[layer.weight].offset;
        a->out_fp8 = {(uint8_t*)memory_of(walk, out.fp8), factor};
    }
    auto gradient = [&](int buffer) { return Fp8Copy{buffer_data<uint8_t>(net, buffer), fp8.gradient_factor}; };
    a->dout_fp8 = gradient(layer.dout_fp8);
    a->d1_fp8 = gradient(layer.d1.fp8);
    a->d2_fp8 = gradient(layer.d2.fp8);
}

// Looks up all that a layer's functions need. If the network has no memory yet (plan_memory), the pointers to tensors
// and gradients are null. If the walk has no weights, the pointers to weights are null. The shapes are right even then.
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

    // A weight has the same place in all flat arrays, and so has its bias. The elements of the copy may be smaller than
    // floats.
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
    a.emb_stride = net->tensor(net->emb).C; // columns of all blocks together
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

// The kinds of layers. All that is special about a kind stands together here: first its functions, which call the
// kind's operation with members of LayerArgs, and then the kind itself (a LayerKind). The list, its plan and the walks
// (sections 5 to 7) only use the members of a LayerKind, so they need no change for a new kind. There are a few
// exceptions, for what only a convolution or a norm needs. There the code asks for the kind itself, as in
// `kind == &CONV` (check_conv_params, choose_fp8, plan_fp8_gradients, plan_waits, plan_fusions, plan_lifetimes,
// WeightGradients, unet_backward).
//
// A new kind must keep three promises. Its backward_reads names every tensor that its backward function reads, or their
// memory is used again too early. Its backward function adds the addends (add1, add2) to each gradient that it writes,
// except where its input always has a single reader. Its weights are in fp32, since only convolutions have a copy.
//
// To add a kind, change these places:
//
//   1. here: its functions and its LayerKind. If a group norm may read its output, its forward function also writes
//      the sums that the norm needs, and sets the number of their parts (a.out_stats.parts; see forward_layer). A
//      parameter of its own is a member of Layer, and one of LayerArgs, which layer_args fills
//   2. a line that adds such a layer to the list: add_layer(net, {.kind = &...}, ...) in add_resblock or its like
//   3. its operation: a prototype in section 2, a kernel in Part II, loops in dev/reference.h
static double no_flops(const LayerArgs&) { return 0; }
static Workspace no_workspace(const LayerArgs&) { return {}; }
struct LayerKind {
    const char* name;
    void (*forward)(LayerArgs&);
    void (*backward)(LayerArgs&) = nullptr; // null: its input needs no gradient
    enum Reads { INPUT = 1, OUTPUT = 2, EMB = 4 };
    int backward_reads = 0; // which tensors of the forward pass the backward pass reads
    bool embedding = false; // a layer of the embedding; these layers run at the same time as the first others
    bool fp32 = embedding;  // its tensors are FP32, whatever act_element is
    bool sums = false;      // it writes out_stats, so a group norm may read its output (see add_norm)

    double (*flops)(const LayerArgs&) = no_flops;            // operations of a forward pass; a multiply-add is 2
    Workspace (*workspace)(const LayerArgs&) = no_workspace; // memory that its functions need beside their arrays
};

// The layers of the embedding. Their tensors are in fp32 and have B rows.

// The sinusoids of t: the first layer of the embedding.
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
    const act *x1 = a.x1, *weight = a.copy;
    if (a.weight_fp8) {
        x1 = a.x_fp8;
        weight = a.weight_fp8;
        s.in = Element::FP8;
    }
    conv_forward(a.out, a.stats(), // what it writes
                 x1, a.x2, weight, a.bias, a.emb, a.emb_stride, a.residual, s, a.skip, a.factors_fp8);
}
static void backward_conv(LayerArgs& a) {
    ConvShape s = a.conv();
    if (!a.turned_fp8) return conv_backward_input(a.d1, a.d2, a.dout, a.copy, s);
    if (a.layer->rounds_dout) round_gradient(a.dout_fp8, a.dout, (size_t)a.B * a.Hout * a.Wout * a.Cout);
    s.out = Element::FP8_GRADIENT;
    conv_backward_input(a.d1, a.d2, (const act*)a.dout_fp8.bytes, a.turned_fp8, s, a.dx_factors_fp8);
}
static double conv_flops(const LayerArgs& a) {
    const double weights = (double)a.net->params[a.layer->weight].size;
    return 2.0 * a.B * a.Hout * a.Wout * weights; // every weight is used once for every pixel of the output
}
static Workspace conv_layer_workspace(const LayerArgs& a) {
    return {.main = conv_detour_bytes(a.conv()), .side = conv_workspace(a.conv())};
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
    const bool fp8_alone = a.net->tensor(a.layer->out).element == Element::FP8; // when sampling
    groupnorm_forward(fp8_alone ? nullptr : a.out, mean, a.rstd(),              // what it writes
                      a.x1, a.stats1, a.x2, a.stats2,                           // its input and the sums of it
                      a.weight, a.bias, a.emb, a.emb_stride, a.dropout, a.norm(), a.out_fp8);
}
static void backward_norm(LayerArgs& a) {
    const float* const mean = a.saved;
    groupnorm_backward(a.d1, a.d2, a.dweight, a.dbias, a.demb, // what it writes
                       a.dout, a.x1, a.x2, mean, a.rstd(),     // dout, and what the forward pass read and left
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

// Halves the resolution: the average of 2 x 2 pixels.
static void forward_downsample(LayerArgs& a) { downsample_forward(a.out, a.stats(), a.x1, a.B, a.H, a.W, a.Cin); }
static void backward_downsample(LayerArgs& a) { downsample_backward(a.d1, a.dout, a.B, a.H, a.W, a.Cin); }
constexpr LayerKind DOWNSAMPLE{
    .name = "downsample",
    .forward = forward_downsample,
    .backward = backward_downsample,
    .sums = true,
};

// Doubles the resolution: the nearest neighbour.
static void forward_upsample(LayerArgs& a) { upsample_forward(a.out, a.stats(), a.x1, a.B, a.H, a.W, a.Cin); }
static void backward_upsample(LayerArgs& a) { upsample_backward(a.d1, a.dout, a.B, a.H, a.W, a.Cin); }
constexpr LayerKind UPSAMPLE{
    .name = "upsample",
    .forward = forward_upsample,
    .backward = backward_upsample,
    .sums = true,
};

// Puts a picture's channels (--cond_channels) after those of the image.
static void forward_join(LayerArgs& a) {
    join_channels(a.out_fp32(), a.x_fp32(), a.net->cond, a.B, a.H * a.W, a.Cin, a.net->config.cond_channels);
}
constexpr LayerKind JOIN{
    .name = "condition",
    .forward = forward_join,
    .fp32 = true,
};

// --patch_size: squares of pixels become channels (PATCHES), and at the end channels become squares of pixels (PIXELS).
// The backward pass of PIXELS turns the gradient back into patches. The H and W that it passes to to_patches are the
// size in pixels, which is that of the layer's output.
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

// The functions that follow make the list. Most of them append something to the network and return its index.

// Adds a buffer. bytes: its size for one sample.
static int add_buffer(UNet* net, size_t bytes) {
    const int buffer = (int)net->buffers.size();
    net->buffers.push_back(Buffer{.bytes = bytes, .again = buffer});
    return buffer;
}

static int add_tensor(UNet* net, int H, int W, int C, Element element) {
    const size_t values = (size_t)H * W * C;
    Tensor tensor{.H = H, .W = W, .C = C, .element = element};
    tensor.buffer = add_buffer(net, values * bytes_of(element));
    net->tensors.push_back(tensor);
    return (int)net->tensors.size() - 1;
}

// Adds a parameter. Its place in the flat arrays is chosen later (place_params).
typedef std::vector<int> Shape;
static int add_param(UNet* net, const std::string& name, Shape shape, ParamInit init, int heads = 0) {
    size_t size = 1;
    for (int n : shape) size *= n;
    net->params.push_back(Param{name, shape, size, 0, init, heads});
    net->num_params += size;
    return (int)net->params.size() - 1;
}

// Adds NAME.weight and NAME.bias. Returns the weight's index; the bias has the next index. shape:
// (outputs, inputs ...).
static int add_params(UNet* net, const std::string& name, Shape shape, ParamInit init = INIT_UNIFORM, int heads = 0) {
    const ParamInit bias_init = init == INIT_ONE ? INIT_ZERO : init;
    const int weight = add_param(net, name + ".weight", shape, init, heads);
    add_param(net, name + ".bias", {shape[0]}, bias_init, heads);
    return weight;
}

// Adds the weight and the bias of a layer of kind CONV. The weight is special in three ways: kernels read a copy of it
// in bf16 (param_group), its gradient comes later than others (WeightGradients), and files hold its elements in another
// order (permute_param).
static int add_conv_params(UNet* net, const std::string& name, Shape shape, ParamInit init, int heads = 0) {
    const int weight = add_params(net, name, shape, init, heads);
    net->params[weight].of_conv = true;
    return weight;
}

// Ends the program if a convolution's weight was not added by add_conv_params, or if add_conv_params has added another
// parameter.
static void check_conv_params(const UNet& net) {
    for (size_t i = 0; i < net.params.size(); i++) {
        auto reads_it = [&](const Layer& l) { return l.kind == &CONV && l.weight == (int)i; };
        const bool is_read_by_conv = std::ranges::any_of(net.layers, reads_it);
        if (net.params[i].of_conv != is_read_by_conv)
            die("internal error: %s must come from add_conv_params if a layer of kind CONV has it, and else must not",
                net.params[i].name.c_str());
    }
}

// Appends a layer and the new tensor (H, W, C) that it writes. Returns this tensor.
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

// Adds a group norm over [x1 | x2]. It needs sums of its inputs' channels (Stats). The layers that write these inputs
// also compute the sums, so each input gets a buffer for its sums.
static int add_norm(UNet* net, Layer l) {
    for (int input : {l.x1, l.x2}) {
        if (input < 0 || net->tensors[input].stats >= 0) continue; // no input, or it has a buffer already
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
// With --use_checkpoint (Chen et al. 2016, arXiv:1604.06174) only the inputs and the output of such a block are kept.
// Before the block's backward pass its layers are computed again. Two layers are not computed again: the last one and
// the skip connection, because no other layer of the block reads their results.
static int end_block(UNet* net, size_t first) {
    const Layer last = net->layers.back();
    const int end = (int)net->layers.size() - 1;
    for (Layer& l : std::span(net->layers).subspan(first)) {
        const bool is_read = l.out != last.out && l.out != last.residual; // another layer of the block reads it
        if (net->config.use_checkpoint && is_read) l.block_end = end;
    }
    return last.out;
}

// Adds a residual block: group norm, SiLU, convolution, embedding; then group norm, SiLU, dropout, convolution, plus
// the block's input. If the number of channels changes, the input goes through a 1x1 convolution (the shortcut) before
// it is added. The embedding is added after the first convolution. With --use_scale_shift_norm it scales and shifts the
// result of the second norm instead. With UP or DOWN, the resolution changes after the first SiLU. The resolution of
// the input that is added at the end changes, too.
static int add_resblock(UNet* net, const std::string& name, int x1, int x2, int Cout, Resample resample = SAME) {
    const Config& c = net->config;
    const int Cin = net->tensor(x1).C + net->tensor(x2).C;
    const size_t first = net->layers.size();

    // The first norm and the resample. For UP, the convolution reads its input enlarged.
    Layer norm1{.name = name + ".in_layers.0", .x1 = x1, .x2 = x2};
    norm1.nonlinearity = BEHIND_NORMS;
    int h = add_norm(net, norm1);
    if (resample == DOWN) h = add_resample(net, DOWN, name + ".h_upd", h);
    x1 = add_resample(net, resample, name + ".x_upd", x1);

    // The first convolution and the second norm. One of them reads the embedding's projection. One linear layer makes
    // the projections for all blocks, side by side; here its parameters for this block's columns are added.
    Layer conv1{.name = name + ".in_layers.2", .x1 = h, .kernel = 3};
    conv1.upsample = resample == UP;
    Layer norm2{.name = name + ".out_layers.0"};
    norm2.nonlinearity = BEHIND_NORMS;
    norm2.dropout_block = net->residual_blocks;
    net->residual_blocks++;
    const int columns = c.use_scale_shift_norm ? 2 * Cout : Cout; // for each channel: scale and shift, or an addend
    Layer& reader = c.use_scale_shift_norm ? norm2 : conv1;
    reader.emb = net->emb;
    reader.emb_offset = net->tensor(net->emb).C;
    net->tensors[net->emb].C += columns;
    norm2.x1 = add_conv(net, conv1, Cout);
    add_params(net, name + ".emb_layers.1", {columns, 4 * c.num_channels});
    h = add_norm(net, norm2);

    // The second convolution adds the input. Its parameters come before those of the shortcut in the state_dict.
    Layer conv2{.name = name + ".out_layers.3", .x1 = h, .kernel = 3};
    conv2.weight = add_conv_params(net, conv2.name, {Cout, Cout, 3, 3}, INIT_ZERO);
    const Layer shortcut{.name = name + ".skip_connection", .x1 = x1, .x2 = x2};
    conv2.residual = Cin == Cout ? x1 : add_conv(net, shortcut, Cout);
    add_conv(net, conv2, Cout);
    return end_block(net, first);
}

// Adds an attention block: group norm, a 1x1 convolution that makes q, k and v, attention, and another 1x1 convolution,
// plus the block's input.
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

// Halves the resolution, in one of three ways.
static int add_downsample(UNet* net, const std::string& name, int x, int ch) {
    const Config& c = net->config;
    if (c.resblock_updown) return add_resblock(net, name + ".0", x, -1, ch, DOWN);
    const std::string op = name + ".0.op";
    if (c.conv_resample) return add_conv(net, {.name = op, .x1 = x, .kernel = 3, .stride = 2}, ch);
    return add_resample(net, DOWN, op, x);
}

// Doubles the resolution, in one of three ways.
static int add_upsample(UNet* net, const std::string& name, int x, int ch) {
    const Config& c = net->config;
    if (c.resblock_updown) return add_resblock(net, name, x, -1, ch, UP);
    if (c.conv_resample) return add_conv(net, {.name = name + ".conv", .x1 = x, .kernel = 3, .upsample = 1}, ch);
    return add_resample(net, UP, name, x);
}

// Adds the encoder: at each level residual blocks (and attention), then a layer or block that halves the resolution.
// Returns the tensors that the decoder reads. guided-diffusion numbers the blocks of all levels, beginning with
// input_blocks.0, which is the first convolution. In a block's name .0 is the residual block, or what halves the
// resolution, and .1 is attention.
static std::vector<int> add_input_blocks(UNet* net, int x) {
    const Config& c = net->config;
    int input_block = 0;
    auto next_name = [&] { return "input_blocks." + std::to_string(++input_block); };
    const int first = add_conv(net, {.name = "input_blocks.0.0", .x1 = x, .kernel = 3}, c.channels(0));
    std::vector<int> skips{first}; // the output of every block
    const size_t lowest = c.mult.size() - 1;
    for (size_t level = 0; level <= lowest; level++) {
        const int ch = c.channels(level);
        for (int i = 0; i < c.num_res_blocks; i++) {
            const std::string name = next_name();
            int h = add_resblock(net, name + ".0", skips.back(), -1, ch);
            if (c.has_attention(level)) h = add_attention_block(net, name + ".1", h, c.num_heads);
            skips.push_back(h);
        }
        if (level < lowest) skips.push_back(add_downsample(net, next_name(), skips.back(), ch));
    }
    return skips;
}

// Adds the decoder. Each of its residual blocks reads [h | a tensor of the encoder], where h is the output of the block
// before. The decoder reads the encoder's tensors in reverse order. A level has one residual block more than in the
// encoder. The additional block reads the result of the first convolution, or of the layer or block that halved the
// resolution.
static int add_output_blocks(UNet* net, int h, std::vector<int> skips) {
    const Config& c = net->config;
    const int heads = c.num_heads_upsample == -1 ? c.num_heads : c.num_heads_upsample;
    int output_block = 0;
    for (int level = (int)c.mult.size() - 1; level >= 0; level--) {
        const int ch = c.channels(level);
        const bool attention = c.has_attention(level);
        for (int i = 0; i <= c.num_res_blocks; i++) {
            // a residual block of [h | the encoder's tensor], then attention; at the level's end the resolution doubles
            const std::string name = "output_blocks." + std::to_string(output_block++);
            h = add_resblock(net, name + ".0", h, skips.back(), ch);
            skips.pop_back();
            if (attention) h = add_attention_block(net, name + ".1", h, heads);
            const bool level_ends = i == c.num_res_blocks && level > 0;
            if (level_ends) h = add_upsample(net, name + (attention ? ".2" : ".1"), h, ch);
        }
    }
    return h;
}

// Returns which of four groups a parameter belongs to. In the flat arrays the groups follow each other:
//   0, 1  the embedding projections of all blocks: first all weights, so that they are one matrix, then all biases
//   2     all other parameters that kernels read in fp32
//   3     convolutions' weights, if the kernels read a copy of them
static int param_group(const Param& p) {
    if (p.name.ends_with(".emb_layers.1.weight")) return 0;
    if (p.name.ends_with(".emb_layers.1.bias")) return 1;
    return p.of_conv && weights_have_copy() ? 3 : 2;
}

// Chooses where each parameter lies. From group 2 on, each parameter begins at a multiple of 64 floats.
static void place_params(UNet* net) {
    auto round_to_64 = [](size_t floats) { return (floats + 63) / 64 * 64; };
    size_t end = 0;
    for (int group = 0; group < 4; group++) {
        // Within a group the parameters follow each other as in the list.
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

// --precision fp8: at each end of the network, so many 3x3 convolutions do not multiply in FP8 in the forward pass.
// Rounding their operands to FP8 would do the most damage (docs/LEARNT.md).
constexpr int FP8_SPARED = 4;

// --precision fp8: chooses the 3x3 convolutions that multiply in FP8, which have stride 1 and no upsampling
// (conv_product_fp8 needs both). Weight gradients are never in FP8. There are two choices:
//   fp8            The forward product is in FP8. The convolution reads what a group norm has written. A norm's values
//                  are of size 1, about, so one factor is right for them, and the norm itself can write FP8.
//                  (make_fp8_weights and make_fp8_training look for that norm.)
//   fp8_gradient   In training, the input gradient is in FP8. It reads the gradient of the output, and one factor is
//                  right for the gradients of all layers (choose_gradient_factor). At the ends of the network, too,
//                  this did no damage (docs/LEARNT.md). But the first convolution has no input gradient, and the last
//                  one has few output channels, whose gradient is fp32.
// All other tensors keep their element, and so do the convolutions' results. What is rounded in training:
//
//   what                  format   its factor               rounded by                         undone by
//   output of a norm: x   e4m3     FP8_X_FACTOR             store_out, in the norm's kernel    factors
//   weights               e4m3     FP8_WEIGHT_FACTOR        round_weights, once a step         factors, dx_factors
//   gradients: dout       e5m2     choose_gradient_factor   store_gradient_fp8, in the norm's  dx_factors
//                                                           kernels; else round_gradient
//
// The sums of the products are multiplied by factors (in the forward pass) or by dx_factors (make_fp8_training).
static void choose_fp8(UNet* net) {
    std::vector<Layer*> convs; // all 3x3 ones, from the first to the last
    for (Layer& l : net->layers)
        if (l.kind == &CONV && l.kernel == 3) convs.push_back(&l);
    const int last = (int)convs.size() - FP8_SPARED;
    for (int i = 1; i + 1 < (int)convs.size(); i++) {
        Layer& conv = *convs[i];
        const auto writer = std::ranges::find(net->layers, conv.x1, &Layer::out);
        const bool reads_norm = writer != net->layers.end() && writer->kind == &GROUPNORM;
        const bool is_spared = i < FP8_SPARED || i >= last; // convs has at least 12: 3 of middle_block are not spared
        conv.fp8_gradient = conv.stride == 1 && !conv.upsample;
        conv.fp8 = conv.fp8_gradient && reads_norm && !is_spared;
    }
}

// Makes the network of a configuration that check_model accepts. It has no memory yet (plan_memory).
static UNet build_unet(const Config& c) {
    UNet net;
    net.config = c;
    add_embedding(&net);

    // From the images to the network's output. With --patch_size the layers between these two work on patches in place
    // of pixels.
    const int H = c.H, W = c.W;
    const int p = c.patch();
    net.input = add_tensor(&net, H, W, c.in_channels, Element::FP32);
    int h = net.input;
    const int seen = c.seen_channels();
    if (c.cond_channels) h = add_layer(&net, {.kind = &JOIN, .name = "condition", .x1 = h}, seen, H, W);
    if (p > 1) h = add_layer(&net, {.kind = &PATCHES, .name = "patches", .x1 = h}, seen * p * p, H / p, W / p);
    const std::vector<int> skips = add_input_blocks(&net, h);
    h = skips.back();
    const int middle = net.tensor(h).C; // the lowest level's channels
    h = add_resblock(&net, "middle_block.0", h, -1, middle);
    h = add_attention_block(&net, "middle_block.1", h, c.num_heads);
    h = add_resblock(&net, "middle_block.2", h, -1, middle);
    h = add_output_blocks(&net, h, skips);
    h = add_norm(&net, {.name = "out.0", .x1 = h, .nonlinearity = BEHIND_NORMS});
    h = add_conv(&net, {.name = "out.2", .x1 = h, .kernel = 3}, c.out_channels() * p * p, INIT_ZERO, Element::FP32);
    if (p > 1) h = add_layer(&net, {.kind = &PIXELS, .name = "pixels", .x1 = h}, c.out_channels(), H, W);
    net.output = h;

    // All blocks have been added now. So the width of the layer that projects the embedding for all of them is known:
    // emb.C floats a sample. The layer's weights are those of all blocks, side by side. The flat array begins with them
    // (param_group).
    const Tensor& emb = net.tensors[net.emb];
    net.buffers[emb.buffer].bytes = emb.C * sizeof(float);
    check_conv_params(net);
    if (c.precision == "fp8") choose_fp8(&net);
    place_params(&net);
    Layer& projection = *std::ranges::find(net.layers, net.emb, &Layer::out);
    const auto first_param = std::ranges::find(net.params, 0u, &Param::offset);
    projection.weight = (int)(first_param - net.params.begin()); // group 0 comes first (param_group)

    for (const Layer& l : net.layers) net.flops += l.kind->flops(layer_args(Walk{.net = &net, .B = 1}, l));
    return net;
}

// =====================================================================================================================
// 6. The plan: what the backward pass adds where, and where in memory each buffer lies
// All of a network's activations and gradients lie in one allocation, the arena. Two buffers may share a place if
// they are never in use at the same time. Time is counted in layers. L is the number of layers. Time 0 is when the
// batch is drawn, time 1 + i is the forward pass of layer i, L + 1 is the loss, and 2 L + 1 - i is the backward pass of
// layer i.
//
// In the order in which they run: plan_memory calls plan_fp8, plan_gradients, plan_fp8_gradients, plan_waits,
// plan_fusions, plan_lifetimes and place_buffers.

// ---------------------------------------------------------------------------------------------------------------------
// --- FP8: buffers, factors, weights for samples
// --precision fp8: plans the inputs of the convolutions that read FP8. When sampling, the norm writes nothing but FP8.
// In training it writes both forms, because the weight gradient reads the usual one.
static void plan_fp8(UNet* net, bool training) {
    for (const Layer& conv : net->layers) {
        if (!conv.fp8) continue;
        Tensor& x = net->tensors[conv.x1];
        const size_t bytes = (size_t)x.H * x.W * x.C * bytes_of(Element::FP8);
        if (training) {
            x.fp8 = add_buffer(net, bytes);
        } else {
            x.element = Element::FP8;
            x.fp8 = x.buffer;
            net->buffers[x.buffer].bytes = bytes;
        }
    }
}

// --precision fp8, in training: plans the gradients that input gradients read in FP8. If a group norm writes the
// gradient of the convolution's output, it also writes the FP8 form. Otherwise the convolution makes it.
static void plan_fp8_gradients(UNet* net) {
    for (Layer& conv : net->layers) {
        if (!conv.fp8_gradient || conv.dout < 0) continue;
        const Tensor& out = net->tensors[conv.out];
        conv.dout_fp8 = add_buffer(net, (size_t)out.H * out.W * out.C * bytes_of(Element::FP8_GRADIENT));
        conv.rounds_dout = true;
        for (Layer& l : net->layers) {
            if (l.kind != &GROUPNORM) continue;
            for (GradPlan* g : {&l.d1, &l.d2}) {
                if (g->d != conv.dout) continue;
                if (g->fp8 >= 0) die("internal error: two convolutions read one gradient in FP8");
                g->fp8 = conv.dout_fp8;
                conv.rounds_dout = false;
            }
        }
    }
}

// --sample with --precision fp8: returns the factor that a group norm's output is multiplied by before it is rounded to
// FP8. weight, bias: the parameters of the norm, which has n channels. Before they are applied, values have a standard
// deviation of 1, so |weight| + |bias| estimates the size of a channel's values. The factor is chosen such that 32
// times the largest of these estimates still fits in FP8. Larger values become e4m3's largest number, 448. (The 32 also
// leaves room for the embedding's scale, which is not known here.) Small values keep their precision, because FP8 is a
// floating-point format: its largest number is almost 2^15 times its smallest normal number. The factor is a power of
// 2, so multiplying by it rounds nothing.
static float fp8_factor(const float* weight, const float* bias, int n) {
    float size = 0;
    for (int c = 0; c < n; c++) size = std::max(size, std::fabs(weight[c]) + std::fabs(bias[c]));
    if (size == 0) return 1;
    int exponent;
    std::frexp(E4M3.largest / 32.0 / size, &exponent); // this quotient lies between 2^(exponent - 1) and 2^exponent
    return (float)std::ldexp(1.0, exponent - 1);
}

// --sample with --precision fp8: rounds the weights of the convolutions that read FP8. The result is two arrays, in
// which parameters have the same places as in a flat array:
//   weights   the rounded weights. The weights of an output channel are first divided by a scale, so that the largest
//             |weight| of the channel becomes FP8's largest number
//   factors   only the part of a flat array that is read in fp32. The place of a norm's first weight holds the norm's
//             factor (fp8_factor). The place of a bias of a convolution holds scale / factor, which turns the sums of
//             that output channel into values
static Fp8Weights make_fp8_weights(const UNet& net, const std::vector<float>& flat) {
    if (net.config.precision != "fp8") return {};
    std::vector<uint8_t> weights(net.flat_size);
    std::vector<float> factors(net.plain_size);
    for (const Layer& conv : net.layers) {
        if (!conv.fp8) continue;
        const Layer& norm = *std::ranges::find(net.layers, conv.x1, &Layer::out);
        const Param* const norm_params = &net.params[norm.weight]; // [0]: the norm's weight, [1]: its bias
        const Param* const conv_params = &net.params[conv.weight]; // [0]: the weight, [1]: the bias
        const int channels = norm_params->shape[0];
        const float factor = fp8_factor(&flat[norm_params[0].offset], &flat[norm_params[1].offset], channels);
        factors[norm_params->offset] = factor;

        const int outputs = conv_params->shape[0];
        const size_t inputs = conv_params->size / outputs; // the number of weights of an output channel, over all taps
        for (int c = 0; c < outputs; c++) {
            const size_t row = conv_params->offset + c * inputs;
            float largest = 0;
            for (size_t i = row; i < row + inputs; i++) largest = std::max(largest, std::fabs(flat[i]));
            const float scale = largest > 0 ? largest / E4M3.largest : 1;
            for (size_t i = row; i < row + inputs; i++) weights[i] = fp8_bits(flat[i] / scale);
            factors[conv_params[1].offset + c] = scale / factor;
        }
    }
    return {device_copy(weights), device_copy(factors)};
}

// Training with --precision fp8: returns the factor that gradients are multiplied by before they are rounded to FP8.
// The loss is a mean over the n numbers of a batch, so gradients are proportional to 1 / n. The factor is the power
// of 2 from 128 n to 256 n. (With it, e5m2's largest number, 57344, stands for a gradient of 224 / n or more.) It
// depends only on the configuration. So it is the same on all ranks, in all microbatches, and after a run is resumed.
// Nothing is measured in one step and used in the next, so a checkpoint need not keep anything for FP8.
static float choose_gradient_factor(const Config& c) {
    const double n = (double)c.batch_size * c.H * c.W * c.in_channels;
    return (float)std::ldexp(1.0, 8 + std::ilogb(n));
}

// Training with --precision fp8: returns memory for the convolutions' weights in FP8, and their factors. Each step
// fills the memory (round_weights). The factors have the places that make_fp8_weights describes.
static Fp8Weights make_fp8_training(const UNet& net) {
    if (net.config.precision != "fp8") return {};
    std::vector<float> factors(net.plain_size);
    int most = 0; // the largest number of input channels
    for (const Layer& conv : net.layers) {
        if (conv.fp8_gradient) most = std::max(most, net.tensors[conv.x1].C);
        if (!conv.fp8) continue;
        const Layer& norm = *std::ranges::find(net.layers, conv.x1, &Layer::out);
        factors[net.params[norm.weight].offset] = FP8_X_FACTOR;
        const Param& bias = net.params[conv.weight + 1];
        std::fill_n(&factors[bias.offset], bias.size, 1 / (FP8_X_FACTOR * FP8_WEIGHT_FACTOR));
    }
    const float factor = choose_gradient_factor(net.config);
    const std::vector<float> dx_factors(most, 1 / (factor * FP8_WEIGHT_FACTOR));
    return {.weights = device_alloc<uint8_t>(net.flat_size),
            .factors = device_copy(factors),
            .turned = device_alloc<uint8_t>(net.flat_size),
            .gradient_factor = device_copy(std::vector<float>{factor}),
            .dx_factors = device_copy(dx_factors)};
}

// Returns the works of round_weights. (Each convolution that multiplies in FP8 also has its input gradient in FP8.)
static std::vector<WeightRounding> weights_to_round(const UNet& net) {
    std::vector<WeightRounding> works;
    for (const Layer& conv : net.layers) {
        if (!conv.fp8_gradient) continue;
        const size_t offset = net.params[conv.weight].offset;
        works.push_back({offset, net.tensors[conv.out].C, net.tensors[conv.x1].C, !conv.fp8});
    }
    return works;
}

// ---------------------------------------------------------------------------------------------------------------------
// --- gradients, and buffers
// A tensor's gradient is the sum of what its readers contribute. The last reader in the list contributes first. Each
// reader writes a buffer of its own: its contribution plus the buffers of later readers that wait to be added. If a
// layer adds the tensor as its residual, that layer contributes the gradient of its output. This gradient is unchanged,
// so no copy of it is made.
static void plan_gradients(UNet* net) {
    // For each tensor: the buffers that the next contribution has to add.
    std::vector<std::vector<int>> waiting(net->tensors.size());
    // Plans a contribution to the gradient of tensor x, in a new buffer. It is not added in place to a buffer that
    // waits, because weight gradients may still have to read that buffer.
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
    // The loss writes the gradient of the output. When the loop comes to a layer, the gradient of its output is
    // complete, because all layers that read this output come later in the list.
    contribute(net->output);
    for (int i = (int)net->layers.size() - 1; i >= 0; i--) {
        Layer& l = net->layers[i];
        if (waiting[l.out].empty()) continue; // nobody needs this gradient: the layer has no backward pass
        if (waiting[l.out].size() != 1) die("internal error: the gradient of %s is not complete", l.name.c_str());
        l.dout = waiting[l.out][0];
        if (l.residual >= 0) waiting[l.residual].push_back(l.dout);
        if (l.emb >= 0) { // each reader of the embedding projections fills its own columns of their gradient
            if (waiting[l.emb].empty()) contribute(l.emb);
            l.demb = waiting[l.emb][0];
        }
        l.d1 = contribute(l.x1);
        l.d2 = contribute(l.x2);
    }
    // --use_checkpoint: tensors that are computed again get new buffers.
    for (const Layer& l : net->layers) {
        if (l.block_end < 0) continue;
        const Tensor& out = net->tensors[l.out];
        for (int b : {out.buffer, out.stats, out.fp8}) {
            if (b < 0) continue;
            const int again = add_buffer(net, net->buffers[b].bytes); // this may move net->buffers
            net->buffers[b].again = again;
        }
    }
}

// A convolution's weight gradient is computed beside the layers that follow in the backward pass, in one launch with
// those of other convolutions. So the tensors that the weight gradient reads must stay in memory for some time, which
// is counted in layers (see the head of this section). When that time is over, the backward pass waits until the weight
// gradient is complete. Tensors of small images need little memory. So they may stay longer, and more weight gradients
// share a launch.
// Returns how long the tensors that layer l reads stay in memory.
static int weights_lag(const UNet* net, const Layer& l) {
    const Tensor& x = net->tensors[l.x1];
    if (x.H * x.W <= 16 * 16) return 20;
    return net->config.use_checkpoint ? 2 : 6;
}

// Returns the first layer that reads the embedding's projections.
static int first_emb_reader(const UNet* net) {
    int i = 0;
    while (net->layers[i].emb < 0) i++;
    return i;
}

// Says which weight gradients each layer waits for in the backward pass. A layer that waits for the weight gradient of
// layer k also waits for the weight gradients of all layers after k in the list.
static void plan_waits(UNet* net) {
    const int L = (int)net->layers.size();
    int done = L; // some layer waits already for the weight gradients of this layer and of all later ones
    for (int i = L - 1; i >= 0; i--) {
        Layer& l = net->layers[i];
        if (l.dout < 0) continue; // it has no backward pass
        for (int k = i + 1; k < done; k++) {
            const Layer& conv = net->layers[k];
            if (conv.kind != &CONV) continue;
            const bool too_old = k > i + weights_lag(net, conv);
            // the launch of conv's weight gradient writes a part of l's dout
            const bool has_demb = l.out == net->emb && conv.demb >= 0;
            if (!too_old && !has_demb) continue;
            l.after = k;
            done = k;
            break;
        }
    }
}

// The convolution that adds a residual block's skip connection may also compute this skip connection.
static void plan_fusions(UNet* net) {
    const Walk walk{.net = net, .B = net->B};
    for (size_t i = 1; i < net->layers.size(); i++) {
        Layer& l = net->layers[i];
        Layer& skip = net->layers[i - 1];
        // skip comes directly before the convolution that adds its result.
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

// Says when each buffer is in use: from the first to the last time at which a layer reads or writes it.
static void plan_lifetimes(UNet* net) {
    const int L = (int)net->layers.size();
    auto use = [&](int time, std::initializer_list<int> buffers) {
        for (int buffer : buffers) {
            if (buffer < 0) continue;
            // After the loss, the backward pass reads the new copy of a tensor that was computed again.
            const bool after_loss = time > L + 1;
            Buffer& b = net->buffers[after_loss ? net->buffers[buffer].again : buffer];
            b.first_use = std::min(b.first_use, time);
            b.last_use = std::max(b.last_use, time);
        }
    };
    auto data = [&](int tensor) { return net->tensor(tensor).buffer; };
    auto stats = [&](int tensor) { return net->tensor(tensor).stats; };
    auto fp8 = [&](int tensor) { return net->tensor(tensor).fp8; };
    // What the forward pass of a layer reads and writes. A fused layer leaves nothing in memory.
    auto use_forward = [&](const Layer& l, int time) {
        use(time, {data(l.x1), data(l.x2), data(l.residual), data(l.emb), l.saved});
        if (l.kind == &GROUPNORM) use(time, {stats(l.x1), stats(l.x2)});
        if (!l.fused) use(time, {data(l.out), stats(l.out), fp8(l.out)});
        if (l.fp8) use(time, {fp8(l.x1)});
    };
    // The sampler and the loss also use the network's input and output, before the first layer and after the last one.
    use(0, {data(net->input)});
    use(L + 1, {data(net->input), data(net->output)});
    for (int i = 0; i < L; i++) {
        const Layer& l = net->layers[i];
        const LayerKind& kind = *l.kind;
        use_forward(l, 1 + i + l.fused); // a fused layer is computed by the next one
        // The embedding's layers run at the same time as other layers, until the first layer that reads the embedding.
        if (kind.embedding) use_forward(l, 1 + first_emb_reader(net));

        // The backward pass, and a convolution's weight gradient, which may be computed up to weights_lag later.
        if (l.dout < 0) continue; // not in training, or it has no backward pass
        const int back = 2 * L + 1 - i;
        const int done = l.kind == &CONV ? back + weights_lag(net, l) : back;
        for (int time : {back, done}) {
            if (kind.backward_reads & LayerKind::INPUT) use(time, {data(l.x1), data(l.x2)});
            use(time, {l.dout});
        }
        if (kind.backward_reads & LayerKind::EMB) use(back, {data(l.emb)});
        if (kind.backward_reads & LayerKind::OUTPUT) use(back, {data(l.out)});
        use(back, {l.saved, l.demb});
        use(back, {l.d1.d, l.d1.add1, l.d1.add2, l.d1.fp8});
        use(back, {l.d2.d, l.d2.add1, l.d2.add2, l.d2.fp8});
        use(back, {l.dout_fp8});
        if (l.out == net->output) use(L + 1, {l.dout}); // the loss writes it
        const bool again = l.block_end >= 0;
        if (again) use_forward(l, 2 * L + 1 - l.block_end); // just before the backward pass of its block
    }
}

// Chooses the offsets of all buffers for batches of B. The largest buffer is placed first. Each buffer gets the lowest
// place that is free as long as the buffer is in use. Sizes are rounded up, so that each buffer begins at a multiple of
// 256 bytes.
static void place_buffers(UNet* net, int B) {
    auto bytes = [&](const Buffer* b) { return (b->bytes * B + 255) / 256 * 256; };
    std::vector<Buffer*> order;
    for (Buffer& b : net->buffers)
        if (b.last_use >= 0) order.push_back(&b);           // it is in use at some time
    std::ranges::stable_sort(order, std::greater{}, bytes); // stable: the same places on every machine

    std::multimap<size_t, const Buffer*> placed; // by offset
    net->arena_bytes = 0;
    for (Buffer* b : order) {
        b->offset = 0;
        for (const auto& [offset, other] : placed) {
            // Are they in use at the same time?
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

// Ends the program if the weights and the arena are larger than the device's free memory. The message says which batch
// would fit.
static void check_memory(UNet* net, bool training) {
    const double GIB = 0x1p30;
    // For sampling, a parameter needs at most a weight, its copy, and a copy in FP8. For training it needs a weight, a
    // gradient, two moments, an average, copies of the weight and of the average, and two copies in FP8.
    const size_t fp8_bytes = net->config.precision == "fp8" ? bytes_of(Element::FP8) : 0;
    const size_t sampling_bytes = sizeof(float) + act_bytes() + fp8_bytes;
    const size_t param_bytes = training ? 5 * sizeof(float) + 2 * act_bytes() + 2 * fp8_bytes : sampling_bytes;
    const double weights = net->flat_size * param_bytes / GIB;
    const double available = device_available() / GIB;
    const double needed = weights + net->arena_bytes / GIB;
    const int B = net->B;
    int fits = B; // the largest of B, B / 2, B / 4, ... that fits; 0: none does
    while (fits && weights + net->arena_bytes / GIB > available) {
        fits /= 2;
        place_buffers(net, fits);
    }
    const std::string both = text("%.2f GiB of GPU memory and %.2f GiB are free", needed, available);
    if (!fits) die("this model needs %s: it does not fit, whatever the batch", both.c_str());
    if (fits < B)
        die("a batch of %d needs %s; %s %d fits", B, both.c_str(), training ? "--microbatch" : "--batch_size", fits);
}

// Gives the network its device memory for batches of up to B. If there is too little memory, the program ends with a
// message that says which batch would fit.
static void plan_memory(UNet* net, int B, bool training) {
    const double pixels = (double)B * net->config.H * net->config.W;
    if (pixels > INT_MAX)
        die("--batch_size %d: so many images of %s at a time are more than 2^31 pixels; "
            "a smaller --microbatch (or --batch_size) works",
            B, net->config.image_size.c_str());
    // Each step of the plan needs the ones before it.
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
    // operation needs. But what each operation leaves for finish_gradients (Workspace::sums) is kept until then, so
    // these sizes are added up.
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
// 7. Forward and backward: two walks over the list
// A step calls unet_forward, which calls forward_layer for each layer, and then unet_backward, which goes from the last
// layer to the first and collects the convolutions' weight gradients on the way (WeightGradients).

// A hook that is called before each operation is started. dev/benchmarks/bench.cu takes time stamps there.
enum Pass { FORWARD, BACKWARD, BACKWARD_WEIGHT }; // BACKWARD: all gradients except that of a convolution's weights
struct Operation {
    const char* name = nullptr; // the operation's name, if it is not a layer's
    const Layer* layer = nullptr;
    Pass pass = FORWARD;
};
static void (*mark)(const Operation&) = [](const Operation&) {};

static void forward_layer(const Walk& walk, const Layer& l) {
    if (l.fused) return; // the next layer also computes this one
    mark({.layer = &l});
    LayerArgs a = layer_args(walk, l);
    l.kind->forward(a);
    // The operation has written to a.out_stats in how many parts the output's sums lie. The norm that reads the output
    // needs this number.
    walk.net->tensors[l.out].parts = a.out_stats.parts;
}

// The forward pass. It computes net's output (B, H, W, out_channels) from its input, net->t (B) and, if the model uses
// them, net->labels (B), net->values (B, num_values) and net->cond (B, H, W, cond_channels). The embedding's layers
// come first in the list. They are computed beside the layers that follow, up to the first one that reads the
// embedding.
static void unet_forward(UNet* net, Weights weights, Dropout dropout, int B) {
    const int L = (int)net->layers.size();
    const int reader = first_emb_reader(net);
    Walk walk{net, weights, dropout, B};
    int i = 0;
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

// Returns the buffer in which the loss leaves its gradient with respect to the output.
static float* output_gradient(UNet* net) { return buffer_data<float>(net, net->layers.back().dout); }

// The weight gradients of convolutions during the backward pass. They wait until they fill the GPU together, or until
// some layer needs one of them. Then they are all computed together, on the side stream.
struct WeightGradients {
    UNet* net;
    const std::function<void(size_t, Stream*)>& done; // see unet_backward
    std::vector<WeightWork> waiting{};
    double load = 0; // how much of the device the waiting weight gradients would fill together; 1: all of it
    int last = -1;   // the layer whose weight gradient was added last
    std::vector<int>
        ticket{}; // for each layer: the ticket for wait_for_side; -1: its weight gradient was not launched yet

    // Launches the weight gradients that wait. After that, those of all layers from `last` on have been launched.
    void launch_waiting() {
        // In the flat arrays, gradients from complete_from on are then complete. All convolutions' weights without a
        // complete gradient lie before complete_from.
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
        waiting.push_back(WeightWork{a.dweight, a.dbias, a.demb, a.emb_stride, a.dout, a.x1, a.x2, a.conv()});
        last = layer;
        load += conv_weight_load(a.conv());
        if (load >= 1 || !allowed.batches) launch_waiting();
    }
    // Makes the operations that follow on the main stream wait for this layer's weight gradient.
    void wait_for(int layer) {
        if (ticket[layer] < 0) launch_waiting();
        wait_for_side(ticket[layer]);
    }
};

// The backward pass. It computes grads, the gradients of the parameters, from output_gradient and from what the forward
// pass of these B samples left in memory. done(n, stream) is called after this stream has been given the work that
// completes the gradients from the n-th float on.
static void unet_backward(UNet* net, Weights weights, float* grads, Dropout dropout, int B,
                          const std::function<void(size_t, Stream*)>& done = nullptr) {
    const Walk walk{net, weights, dropout, B, grads};
    WeightGradients weight_gradients{net, done};
    weight_gradients.ticket.assign(net->layers.size(), -1);
    for (int i = (int)net->layers.size() - 1; i >= 0; i--) {
        const Layer& l = net->layers[i];
        if (l.dout < 0) continue; // it has no backward pass
        if (l.after >= 0) weight_gradients.wait_for(l.after);
        for (const Layer& before : net->layers) // with --use_checkpoint: computes again what this block's layers read
            if (before.block_end == i) forward_layer(walk, before);
        LayerArgs a = layer_args(walk, l);
        if (l.kind == &CONV) {
            // The weight gradients that wait are launched without that of the first convolution, because the
            // embedding's layers wait for them.
            if (l.x1 == net->input && !weight_gradients.waiting.empty()) weight_gradients.launch_waiting();
            mark({.layer = &l, .pass = BACKWARD_WEIGHT});
            weight_gradients.add(i, a);
            if (!a.d1.dx && !a.d2.dx) continue; // its input is the images, whose gradient nobody needs
        }
        mark({.layer = &l, .pass = BACKWARD});
        l.kind->backward(a);
    }
    mark({"finish gradients"});
    finish_gradients();
    weight_gradients.wait_for(weight_gradients.last);
}

// =====================================================================================================================
// 8. Diffusion: noise schedules, objectives, samplers
// docs/DIFFUSION.md derives every formula of this section. Tables are computed in double, as in guided-diffusion, and
// used in fp32.
//
// For a sample with a given amount of noise, an objective defines four things, and a NoiseLevel holds their numbers:
//   what the network is shown       signal x_0 + sigma noise
//   what it is told                 t
//   what it should answer           target_x0 x_0 + target_noise noise
//   what its answer says about x_0  x0_x input + x0_out answer
// If the loss of a new objective is a weighted square of the answer's error, the objective is only a new way to fill
// NoiseLevels. Then the kernels and the samplers' steps need no change.
//
// To add an objective, as edm and flow are, change these places:
//
//   1. common/flags.h:
//      its word, the last in the row of `objective`, since model files hold a word's number;
//      rows for its parameters, if it has any. A parameter that a model file has to keep is a row SAVED(slot, ...),
//      and check_lists must no longer list its slot as unused;
//      the rows OBJECTIVES(...). Such a row names the objectives for which the flags below it exist. Parameters of its
//      own need a row of their own. If it shares parameters of edm (sigma_data, P_mean, P_std), add its word to
//      OBJECTIVES(of_edm, "edm|ect"). Nothing warns whoever forgets this: slot_is_used is then false, model files do
//      not get the value, and samples are drawn with the flag's default
//      if --objective ect may tune its models: its word in the row of `ect_frame`, and in take_model_file's message
//   2. Frame (section 1): its word
//   3. here, below each other: its formulas, beside edm_question; its case in ask; its word in frame_of; whether
//      log(sigma) or t is drawn in training, and how (sigma_draws; for another distribution also SigmaDraws and
//      draw_level); which sigmas its samplers use (has_steps_of_t); a weight of the loss that is not 1 (make_level)
//
// To let the network predict another quantity, with the levels of ddpm, change two places: the row of `predict` in
// common/flags.h, and ddpm_level.
//
// For a loss that is not the weighted square, follow the example of ect, whose loss also needs the network's answer at
// a second noise level. Change common/flags.h, Objective and make_objective (a parameter), and forward_and_loss
// (section 11; a branch that calls a new operation). Write the formula once for both builds, beside tuning_loss.
// Add the operation's prototype to section 2, its loops to dev/reference.h, and its kernel beside loss_forward_backward
// (section 17).
//
// The functions, in the order in which they run: make_objective runs once. Then draw_level runs for each sample. It
// returns one of the ddpm_levels, or calls ask or student_level. Samplers call level_at for the level of a sigma.

// What the network is asked at a given ratio: the coefficient of the noise divided by the coefficient of x_0. The sigma
// that draw_level draws, and the sigmas between --sigma_max and --sigma_min, are such ratios. But the member `sigma` is
// the coefficient of the noise alone, so the ratio is sigma / signal. All members have the meaning of those of
// NoiseLevel. They are double, because ect subtracts such numbers from each other.
struct Question {
    double t;
    double signal, sigma;
    double x0_x, x0_out;
    double target_x0, target_noise;
};

// EDM (Karras et al. 2022, table 1): the network F sees c_in (x_0 + sigma noise) and is told log(sigma) / 4. The image
// is then D = c_skip (x_0 + sigma noise) + c_out F. The network's input is already multiplied by c_in, so
// x0_x = c_skip / c_in. The loss is lambda (D - x_0)^2 with lambda = 1 / c_out^2. That equals the squared error of the
// network's answer F, whose target is (x_0 - c_skip (x_0 + sigma noise)) / c_out. The paper's sigma is the ratio.
HD static inline Question edm_question(double ratio, double sigma_data) {
    const double total = sqrt(ratio * ratio + sigma_data * sigma_data);
    const double c_in = 1 / total;
    const double c_skip_over_c_in = sigma_data * sigma_data / total;
    const double c_out = ratio * sigma_data / total;
    const double target_x0 = ratio / (sigma_data * total); // (1 - c_skip) / c_out
    const double target_noise = -sigma_data / total;       // -c_skip sigma / c_out
    return Question{
        .t = log(ratio) / 4,
        .signal = c_in,
        .sigma = c_in * ratio,
        .x0_x = c_skip_over_c_in,
        .x0_out = c_out,
        .target_x0 = target_x0,
        .target_noise = target_noise,
    };
}

// Rectified flow (Liu et al. 2022): x_t = (1 - t) x_0 + t noise. The answer should be noise - x_0, and so
// x_0 = x_t - t answer. The coefficient of the noise is t, so the ratio is t / (1 - t). The network is told 1000 t.
HD static inline Question flow_question(double ratio) {
    const double t = ratio / (1 + ratio);
    return Question{
        .t = 1000 * t,
        .signal = 1 - t,
        .sigma = t,
        .x0_x = 1,
        .x0_out = -t,
        .target_x0 = -1,
        .target_noise = 1,
    };
}

// Returns the Question of a frame at any ratio. It is never called for ddpm, whose levels are a table (ddpm_levels,
// level_at).
HD static inline Question ask(Frame frame, double ratio, double sigma_data) {
    switch (frame) {
    case Frame::DDPM: break;
    case Frame::EDM: return edm_question(ratio, sigma_data);
    case Frame::FLOW: return flow_question(ratio);
    }
    return Question{NAN, NAN, NAN, NAN, NAN, NAN, NAN}; // so a training step would see that its loss is not finite
}

// Returns the frame of a model, as its flags define it.
static Frame frame_of(const Config& c) {
    const char* flag = c.objective == "ect" ? "ect_frame" : "objective";
    return meaning<Frame>(flag, c.frame(), {{"ddpm", Frame::DDPM}, {"edm", Frame::EDM}, {"flow", Frame::FLOW}});
}

// Returns how sigma is drawn in training.
static SigmaDraws sigma_draws(const Config& c) {
    const SigmaDraws table{}, edm{c.P_mean, c.P_std, false}, flow{c.t_mean, c.t_std, c.t_std == 0};
    return meaning<SigmaDraws>("objective", c.objective, {{"ddpm", table}, {"edm", edm}, {"flow", flow}, {"ect", edm}});
}

// Returns whether a sampler takes equal steps of t = sigma / (1 + sigma). Otherwise its sigmas are Karras's schedule.
static bool has_steps_of_t(Frame frame) {
    switch (frame) {
    case Frame::DDPM: return false;
    case Frame::EDM: return false;
    case Frame::FLOW: return true;
    }
    ALL_CASES_RETURN
}

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

// Consistency tuning (Geng et al. 2024, "Consistency Models Made Easy"). A student and a teacher, which are the same
// network, see the same image with the same noise: the student at sigma = t, the teacher at a smaller sigma r. The
// answer of each is turned into an image:
//   x0_x input + x0_out answer = (x0_x signal) x_0 + (x0_x sigma) noise + x0_out answer
// The student's image should equal the teacher's image. So the target of the student's answer is a weighted sum of x_0,
// noise and the teacher's answer. At r = 0 the teacher's image is x_0 itself, and the target is that of edm or flow.

// Returns the teacher's sigma r for a student's t (Geng et al. 2024, section 3): r / t = 1 - n(t) / q^a, where
// n(t) = 1 + k sigmoid(-b t). If that is negative, r is 0. a begins at 1 and grows by 1 every d steps, so r approaches
// t.
HD static inline double teacher_sigma(const Tuning& tuning, double t) {
    const double a = 1 + (double)(*tuning.step / tuning.d);
    const double n = 1 + tuning.k / (1 + exp(tuning.b * t));
    return fmax(t * (1 - n / pow((double)tuning.q, a)), 0.0);
}

// Returns the weight in the loss of the distance between a student at t and its teacher at r.
HD static inline double tuning_weight(const Objective& o, double t, double r) {
    switch (o.tuning.weight) {
    case TuningWeight::GAP: return 1 / (t - r);
    case TuningWeight::SNR: return 1 / (t * t) + 1 / ((double)o.sigma_data * o.sigma_data);
    }
    ALL_CASES_RETURN
}

HD static inline NoiseLevel student_level(const Objective& o, double t) {
    const double r = teacher_sigma(o.tuning, t);
    const Question nobody{.t = 0, .signal = 1, .sigma = 0, .x0_x = 1, .x0_out = 0, .target_x0 = 0, .target_noise = 0};
    // At r = 0 there is no teacher. `nobody` stands for a teacher whose image is x_0 itself.
    const Question teacher = r > 0 ? ask(o.frame, r, o.sigma_data) : nobody;
    Question student = ask(o.frame, t, o.sigma_data);
    const double x0 = teacher.x0_x * teacher.signal - student.x0_x * student.signal;
    const double noise = teacher.x0_x * teacher.sigma - student.x0_x * student.sigma;
    student.target_x0 = x0 / student.x0_out;
    student.target_noise = noise / student.x0_out;
    NoiseLevel level = make_level(student);
    level.target_teacher = (float)(teacher.x0_out / student.x0_out);
    level.weight = (float)tuning_weight(o, t, r);
    return level;
}

// If a sample's r is 0, its teacher's answer is not used. But the network computes all samples of a batch, so for that
// sample the network is shown the student's input.
HD static inline NoiseLevel teacher_level(const Objective& o, double t) {
    const double r = teacher_sigma(o.tuning, t);
    Question teacher = ask(o.frame, r > 0 ? r : t, o.sigma_data);
    teacher.target_x0 = 0; // a teacher is not trained, so it has no target
    teacher.target_noise = 0;
    return make_level(teacher);
}

// Returns alpha_bar (T): alpha_bar[t] is the product of 1 - beta over all timesteps from 0 to t.
//   linear: beta rises from 0.0001 to 0.02 (Ho et al. 2020, section 4), scaled for a T other than 1000
//   cosine: alpha_bar(t) = cos^2((t / T + 0.008) / 1.008 pi / 2), with beta below 0.999 (Nichol & Dhariwal
//           2021, eq. 17)
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

// The numbers of a NoiseLevel that depend on --predict.
struct Prediction {
    double target_x0, target_noise; // as in NoiseLevel
    double x0_x, x0_out;            // as in NoiseLevel
    double error;                   // the square of the answer's error if the x_0 that it means is wrong by 1
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
    // Min-SNR (Hang et al. 2023): the squared error of x_0 has the weight min(snr, gamma).
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

// Makes the objective that the model is trained on. The variational bound is a sum over all T timesteps. Only one
// timestep is drawn for a sample, so the sample's term is multiplied by T. In guided-diffusion the unit of the bound is
// the bit, so the bound is divided by log 2.
static Objective make_objective(const Config& c) {
    const float bits = (float)(c.diffusion_steps / std::log(2.0));
    Objective o{};
    o.frame = frame_of(c);
    o.levels = o.frame == Frame::DDPM ? device_copy(ddpm_levels(c)) : nullptr;
    o.steps = c.diffusion_steps;
    o.draws = sigma_draws(c);
    o.sigma_data = c.sigma_data;
    o.mse = c.use_kl ? 0 : 1;
    if (c.use_kl) o.bound = bits;
    else if (c.learned_variance()) o.bound = bits * c.vlb_weight;
    if (c.objective != "ect") return o;
    const TuningWeight weight =
        meaning<TuningWeight>("ect_weight", c.ect_weight, {{"gap", TuningWeight::GAP}, {"snr", TuningWeight::SNR}});
    o.tuning = Tuning{c.ect_q, c.ect_k, c.ect_b, c.ect_c, c.ect_stage(), weight};
    return o;
}

// ---------------------------------------------------------------------------------------------------------------------
// --- the level of a training sample, drawn, and its share of the loss
// These functions compute how noisy a sample of a training step is, and what its loss consists of. Each works on one
// sample or one value. dev/reference.h calls them in loops, and kernels call them in threads.

// --schedule_sampler loss-second-moment (Nichol & Dhariwal 2021, section 3.3): t is drawn in proportion to the root
// mean square of its latest HISTORY losses. A sample's loss is then multiplied by `importance`, which is 1 / (T times
// the probability of its t). So the expected loss is the same as with uniform t.
constexpr double EVEN_SHARE = 0.001; // this part of the probability is divided equally among all t

// Stores the losses of a batch's samples at timestep t in the row of t. Each loss is first divided by its sample's
// `importance`. A row is HISTORY + 1 floats: the latest losses, oldest first, and then the number of losses. Returns
// the root mean square of the row's losses, or -1 while the row has fewer than HISTORY losses.
HD static inline double remember_losses(float* row, int t, const NoiseLevel* levels, const double* loss, int B) {
    for (int b = 0; b < B; b++) {
        if (levels[b].index != t) continue;
        const int n = (int)row[HISTORY];
        for (int k = 1; k < HISTORY && n == HISTORY; k++) row[k - 1] = row[k]; // drops the oldest loss
        row[n < HISTORY ? n : HISTORY - 1] = (float)fmin(loss[b] / levels[b].importance, FLT_MAX);
        row[HISTORY] = (float)(n < HISTORY ? n + 1 : n);
    }
    double sum = 0;
    for (int k = 0; k < HISTORY; k++) sum += (double)row[k] * row[k];
    return row[HISTORY] < HISTORY ? -1 : sqrt(sum / HISTORY);
}

// Divides [0, 1) into one part for each t. The length of a part is the probability of its t. Returns the level of the t
// whose part contains u. While some t has fewer than HISTORY losses (its number in rms_losses is -1), all t have the
// same probability.
HD static inline NoiseLevel draw_weighted_level(const Objective& o, double u) {
    double sum = 0, least = 0;
    for (int t = 0; t < o.steps; t++) {
        sum += o.rms_losses[t];
        least = fmin(least, o.rms_losses[t]);
    }
    if (least < 0 || !(sum > 0)) return o.levels[(int)(u * o.steps)];
    const double even = EVEN_SHARE / o.steps, rest = (1 - EVEN_SHARE) / sum;
    int t = -1;
    double p = 0;     // the probability of t
    double below = 0; // the sum of the probabilities of all timesteps up to t
    do {
        t++;
        p = o.rms_losses[t] * rest + even;
        below += p;
    } while (below <= u && t + 1 < o.steps);
    NoiseLevel level = o.levels[t];
    level.importance = (float)(1 / (o.steps * p));
    level.weight *= level.importance;
    return level;
}

// Draws sigma from a log-normal distribution. This is for edm, for ect, and for flow if --t_std is not 0. Writes to
// *normal the standard normal number that sigma is computed from, which tells in which quarter of the levels sigma
// lies.
HD static inline double draw_sigma(const Objective& o, const Words& words, float* normal) {
    float z[4];
    normals(z, words);
    *normal = z[0];
    return exp(o.draws.P_mean + (double)o.draws.P_std * z[0]);
}

// Returns in which quarter of the standard normal distribution z lies: 0 to 3.
HD static inline int quarter_of_normal(float z) {
    constexpr float UPPER = 0.67448975f; // a quarter of the distribution lies above it
    if (z < 0) return z >= -UPPER;
    return 2 + (z >= UPPER);
}

// Draws the noise level of a sample. words: the sample's random words.
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

// Returns the level of a sample's teacher. words: the random words that the student's level was drawn from.
HD static inline NoiseLevel draw_teacher(const Objective& o, const Words& words) {
    float z;
    return teacher_level(o, draw_sigma(o, words, &z));
}

// A data file stores a value of an image as uint8_t (1 byte) or as a float in [-1, 1] (4 bytes). image_value returns
// value i of images, in [-1, 1]. canvas_value reads such values itself, without image_value. So a third type of values
// would have to be added to knows_image_values, image_value and canvas_value.
static bool knows_image_values(int bytes) { return bytes == 1 || bytes == 4; }
HD static inline float image_value(const void* images, int bytes, size_t i) {
    if (bytes == 1) return ((const uint8_t*)images)[i] / 127.5f - 1.0f;
    return ((const float*)images)[i];
}

// --augment (Karras et al. 2022, appendix F.2; Karras et al. 2020, "Training Generative Adversarial Networks with
// Limited Data", appendix B): a training image is changed in up to six ways. Each change is drawn independently of the
// others. Its probability is p, with two exceptions: an image is turned upside down with probability p / 2, and
// mirrored with probability 1 / 2, whatever p is. The network is told which changes were made. So it learns that
// changed images are of another kind, and does not draw such images when it is told that there is no change. These are
// the changes, and after each semicolon the numbers that the network is told (0 if there is no such change). z and z'
// are standard normal numbers, drawn for each change:
//   mirrored, upside down   in columns, in rows; 1 for each
//   scaled                  by 2^(0.2 z); z
//   turned                  by an angle; the angle's cosine - 1, its sine
//   stretched               by 2^(0.2 z) along an axis and by the inverse across it; z times the axis's cosine and sine
//   shifted                 by an eighth of the image times (z, z'); z, z'

// A 2 x 2 matrix. It maps (x, y) to (xx x + xy y, yx x + yy y).
struct Matrix2 {
    double xx, xy, yx, yy;
};
HD static inline Matrix2 product(const Matrix2& a, const Matrix2& b) {
    return Matrix2{a.xx * b.xx + a.xy * b.yx, a.xx * b.xy + a.xy * b.yy, //
                   a.yx * b.xx + a.yy * b.yx, a.yx * b.xy + a.yy * b.yy};
}
HD static inline Matrix2 rotation(double angle) { return Matrix2{cos(angle), -sin(angle), sin(angle), cos(angle)}; }

// These two functions turn a random word into a number in [0, 1), and into an angle in [-pi, pi).
HD static inline double random_fraction(uint32_t word) { return word * 0x1p-32; }
HD static inline double random_angle(uint32_t word) { return (2 * random_fraction(word) - 1) * M_PI; }

// Draws the change of a sample's image, H x W. words: the sample's 16 random words.
HD static inline Augmentation draw_augmentation(double p, const Words words[4], int H, int W) {
    const uint32_t *const first = words[0].w, *const second = words[1].w, *const third = words[2].w;
    float z[4];
    normals(z, words[3]);
    const bool flip_x = first[0] & 1;
    const bool flip_y = (first[1] & 1) && random_fraction(first[2]) < p;
    const double size = random_fraction(first[3]) < p ? z[0] : 0;
    const double angle = random_fraction(second[0]) < p ? random_angle(second[1]) : 0;
    const double stretch = random_fraction(second[2]) < p ? z[1] : 0;
    const double axis = random_fraction(third[0]) < 0.5 ? random_angle(second[3]) : 0;
    const bool shifts = random_fraction(third[1]) < p;
    const double shift_x = shifts ? z[2] : 0;
    const double shift_y = shifts ? z[3] : 0;

    // m maps a pixel of the changed image to the place in the original image that this pixel shows. These steps are
    // done in this order: shift back, stretch back, turn, scale back.
    const double longer = exp2(0.2 * stretch);
    const Matrix2 along_axis{1 / longer, 0, 0, longer};
    const Matrix2 stretched = product(rotation(-axis), product(along_axis, rotation(axis)));
    const Matrix2 turned = product(rotation(angle), stretched);
    const double smaller = exp2(-0.2 * size);
    const Matrix2 m{smaller * turned.xx, smaller * turned.xy, smaller * turned.yx, smaller * turned.yy};
    const double right = shift_x * W / 8;
    const double down = shift_y * H / 8;
    return Augmentation{.told = {(float)flip_x, (float)flip_y, (float)size, //
                                 (float)(cos(angle) - 1), (float)sin(angle), (float)(stretch * cos(axis)),
                                 (float)(stretch * sin(axis)), (float)shift_x, (float)shift_y},
                        .flip_x = flip_x,
                        .flip_y = flip_y,
                        .x_x = m.xx,
                        .x_y = m.xy,
                        .x_1 = -(m.xx * right + m.xy * down),
                        .y_x = m.yx,
                        .y_y = m.yy,
                        .y_1 = -(m.yx * right + m.yy * down)};
}

// The changed image is made at twice the resolution, so that turning the image neither blurs it nor makes its edges
// jagged. There are three steps:
//   1. The wavelet filter sym6 doubles the size of the image.
//   2. The doubled image is read at the places that the change maps the new pixels to. Between pixels it is
//      interpolated linearly. The result is the canvas.
//   3. The same filter halves the canvas.
// Without a change, the result is the image itself. Steps 1 and 2 together are one sum over the pixels around a place,
// so the doubled image is never stored. The canvas is stored. At each edge it has a margin of 6 of its own pixels,
// which the filter needs. Outside its border, the image is continued by its mirror image.
constexpr int FILTER = 12; // taps of sym6
// A value of the doubled image, interpolated along a row, depends on this number of pixels of the image's row.
constexpr int AROUND = 7;
HD static inline int fine_size(int size) { return 2 * (size + FILTER / 2); } // rows or columns of the canvas

// Returns tap k of sym6 (Daubechies 1992, table 6.2); 0 if k is not one of the 12. The squares of the taps add up to 1.
HD static inline float sym6(int k) {
    const float taps[FILTER] = {0.015404109327027373f, 0.0034907120842174702f, -0.11799011114819057f,
                                -0.048311742585633f,   0.4910559419267466f,    0.787641141030194f,
                                0.3379294217276218f,   -0.07263752278646252f,  -0.021060292512300564f,
                                0.04472490177066578f,  0.0017677118642428036f, -0.007800708325034148f};
    return k >= 0 && k < FILTER ? taps[k] : 0.0f;
}

// Returns which of a row's `size` pixels lies at place n, if mirror images continue the row at both ends. flip: the row
// itself is mirrored, too.
HD static inline int mirrored(int n, int size, bool flip) {
    if (n < 0 || n >= size) {
        const int period = 2 * size - 2;
        n %= period;
        if (n < 0) n += period;
        if (n >= size) n = period - n;
    }
    return flip ? size - 1 - n : n;
}

// The value of a doubled row (or column) at place u is a weighted sum of these pixels of the image.
struct Around {
    int pixel[AROUND];
    float weight[AROUND];
};
HD static inline Around pixels_around(double u, int size, bool flip) {
    const double below = floor(u);
    const int i = (int)below;
    const float fraction = (float)(u - below);
    const int first = (i - 5) >> 1; // (i - 5) / 2, rounded down even if it is negative
    const bool odd = (i - 5) & 1;
    Around a;
    for (int j = 0; j < AROUND; j++) {
        // This pixel is multiplied by the tap `here` in value i of the doubled row, and by `next` in value i + 1.
        const float here = odd ? sym6(11 - 2 * j) : sym6(10 - 2 * j);
        const float next = odd ? sym6(12 - 2 * j) : sym6(11 - 2 * j);
        a.weight[j] = (1 - fraction) * here + fraction * next;
        a.pixel[j] = mirrored(first + j, size, flip);
    }
    return a;
}

// The pixels of the image that the canvas's value at row `fine_y` and column `fine_x` is made of, and their weights.
// They are the same in all channels.
struct CanvasPlace {
    Around rows, columns;
};
HD static inline CanvasPlace canvas_place(const Augmentation& a, int fine_y, int fine_x, int H, int W) {
    // (x, y): the place in the changed image, in pixels from the centre. (from_x, from_y): the place in the original
    // image that is shown there. The last two lines convert that place to rows and columns of the doubled image.
    const double x = (fine_x - W - 5) / 2.0;
    const double y = (fine_y - H - 5) / 2.0;
    const double from_x = a.x_x * x + a.x_y * y + a.x_1;
    const double from_y = a.y_x * x + a.y_y * y + a.y_1;
    return CanvasPlace{.rows = pixels_around(2 * from_y + H - 1, H, a.flip_y),
                       .columns = pixels_around(2 * from_x + W - 1, W, a.flip_x)};
}

// Returns the canvas's value at a place. channel: one channel of the image, (H, W); bytes: the size of a value, 1 or 4.
HD static inline float canvas_value(const CanvasPlace& place, const void* channel, int bytes, int W) {
    float sum = 0;
    for (int i = 0; i < AROUND; i++) {
        const size_t row = (size_t)place.rows.pixel[i] * W;
        float of_row = 0;
        for (int j = 0; j < AROUND; j++) {
            const size_t at = row + place.columns.pixel[j];
            const float value = bytes == 1 ? ((const uint8_t*)channel)[at] : ((const float*)channel)[at];
            of_row += place.columns.weight[j] * value;
        }
        sum += place.rows.weight[i] * of_row;
    }
    // A byte stands for byte / 127.5 - 1. The 49 products of weights add up to 1 / 2 here, so the -1 becomes -0.5. (The
    // 144 products of taps in `halved` add up to 2.)
    return bytes == 1 ? sum / 127.5f - 0.5f : sum;
}

// Returns the changed image's pixel (y, x), from its channel of the canvas.
HD static inline float halved(const float* canvas, int y, int x, int W) {
    float sum = 0;
    for (int i = 0; i < FILTER; i++) {
        const float* const row = canvas + (size_t)(2 * y + 1 + i) * fine_size(W) + 2 * x + 1;
        float of_row = 0;
        for (int j = 0; j < FILTER; j++) of_row += sym6(j) * row[j];
        sum += sym6(i) * of_row;
    }
    return sum;
}

// --- pictures that are made of images (--cond)

// A channel that is W wide is divided into squares of factor x factor pixels. Returns the mean of square (y, x). flip:
// x is counted from the right edge.
HD static inline float square_mean(const void* channel, int bytes, int y, int x, int factor, int W, bool flip) {
    float sum = 0;
    for (int i = 0; i < factor; i++)
        for (int j = 0; j < factor; j++) {
            const int column = x * factor + j;
            const size_t row = (size_t)(y * factor + i) * W;
            sum += image_value(channel, bytes, row + (flip ? W - 1 - column : column));
        }
    return sum / (float)(factor * factor);
}

// The standard deviation of the noise on a picture is --cond_noise times a factor, which is drawn uniformly from
// [0, 1). (Ho et al. 2021, "Cascaded Diffusion Models": a network that was trained on coarse pictures with different
// amounts of noise is not disturbed by the errors of a sampled coarse picture.)
constexpr uint32_t NOISE_STRENGTH = 0xFFFFFFFF; // the quartet that the factor is drawn from; the noise uses lower ones
HD static inline float noise_strength(const Words& words) { return (words.w[0] >> 8) * 0x1p-24f; }

// Number i of an enlarged row (or column) lies between the numbers `first` and `second` of the small row. As in
// PyTorch's F.interpolate(mode="bilinear", align_corners=False), a pixel's place is that of its centre.
struct Between {
    int first, second;
    float fraction; // the weight of the second number; the weight of the first is 1 - fraction
};
HD static inline Between place_in_small(int i, int factor, int size) {
    const float centre = ((float)i + 0.5f) / (float)factor - 0.5f;
    const float place = centre < 0 ? 0 : centre;
    const int first = (int)place;
    const int second = first + 1 < size ? first + 1 : first;
    return Between{first, second, place - (float)first};
}

// A small picture (h, w, C) is enlarged by a factor. Returns the value of its channel c at (y, x).
HD static inline float enlarged(const float* small, int y, int x, int c, int factor, int C, int h, int w) {
    const Between row = place_in_small(y, factor, h);
    const Between column = place_in_small(x, factor, w);
    const float* const upper = small + (size_t)row.first * w * C + c;
    const float* const lower = small + (size_t)row.second * w * C + c;
    const float above = (1 - column.fraction) * upper[column.first * C] + column.fraction * upper[column.second * C];
    const float below = (1 - column.fraction) * lower[column.first * C] + column.fraction * lower[column.second * C];
    return (1 - row.fraction) * above + row.fraction * below;
}

// Returns the grey value of pixel i (ITU-R BT.601). The pixel's three channels lie HW numbers apart.
HD static inline float grey_value(const void* images, int bytes, size_t i, int HW) {
    const float red = image_value(images, bytes, i);
    const float green = image_value(images, bytes, i + HW);
    const float blue = image_value(images, bytes, i + 2 * (size_t)HW);
    return 0.299f * red + 0.587f * green + 0.114f * blue;
}

// What --cond mask leaves out: up to four holes. A hole is a rectangle, or a stroke between two points. All is computed
// in integers, so that every device leaves out the same pixels.
constexpr int HOLES = 4;
struct Hole {
    bool is_there, is_stroke;
    int y0, x0, y1, x1; // the two points, which are corners of a rectangle
    int radius;         // the radius of a stroke, in pixels
};
struct Holes {
    Hole hole[HOLES];
};

// Turns a random word into an integer from 0 to size - 1.
HD static inline int random_below(uint32_t word, int size) { return (int)((uint64_t)word * size >> 32); }

// Draws the holes of a sample. words: the sample's random words, eight for each hole. The first hole is always there.
HD static inline Holes draw_holes(const Words words[2 * HOLES], int H, int W) {
    Holes holes;
    for (int k = 0; k < HOLES; k++) {
        const uint32_t* const how = words[2 * k].w;
        const uint32_t* const where = words[2 * k + 1].w;
        Hole& hole = holes.hole[k];
        hole.is_there = k == 0 || (how[0] & 1);
        hole.is_stroke = how[1] & 1;
        hole.y0 = random_below(where[0], H);
        hole.x0 = random_below(where[1], W);
        hole.y1 = random_below(where[2], H);
        hole.x1 = random_below(where[3], W);
        hole.radius = 1 + random_below(how[2], (H < W ? H : W) / 8 + 1);
    }
    return holes;
}

// Returns whether the distance of (y, x) from a stroke's line is at most the stroke's radius.
HD static inline bool is_in_stroke(const Hole& s, int y, int x) {
    const int64_t along_y = s.y1 - s.y0, along_x = s.x1 - s.x0;
    const int64_t from_y = y - s.y0, from_x = x - s.x0;
    const int64_t length2 = along_y * along_y + along_x * along_x;
    const int64_t radius2 = (int64_t)s.radius * s.radius;
    const int64_t ahead = from_y * along_y + from_x * along_x; // distance along the line, times the line's length
    if (ahead <= 0) return from_y * from_y + from_x * from_x <= radius2;
    if (ahead < length2) {
        const int64_t beside = from_y * along_x - from_x * along_y; // distance from the line, times its length
        return beside * beside <= radius2 * length2;
    }
    const int64_t behind_y = y - s.y1, behind_x = x - s.x1;
    return behind_y * behind_y + behind_x * behind_x <= radius2;
}

HD static inline bool is_in_hole(const Holes& holes, int y, int x) {
    bool inside = false;
    for (const Hole& hole : holes.hole) {
        const bool between_y = (y >= hole.y0 && y <= hole.y1) || (y >= hole.y1 && y <= hole.y0);
        const bool between_x = (x >= hole.x0 && x <= hole.x1) || (x >= hole.x1 && x <= hole.x0);
        const bool in_this = hole.is_stroke ? is_in_stroke(hole, y, x) : between_y && between_x;
        inside = inside || (hole.is_there && in_this);
    }
    return inside;
}

// Returns the value of a pixel in the mask's channel. As in a mask's file, the mask is white where the network has to
// paint.
HD static inline float mask_value(bool hidden) { return hidden ? 1.0f : -1.0f; }

// The loss of a sample with --objective ect (Geng et al. 2024) is weight (sqrt(D + c^2) - c), the pseudo-Huber distance
// between the student's image and the teacher's image. D is the sum of the squares of their differences, which are
// x0_out (out - target). The derivative of the loss by a value of out is slope (out - target).
struct TuningLoss {
    double value, slope;
};
HD static inline TuningLoss tuning_loss(const NoiseLevel& level, double D, double c) {
    if (D == 0) return TuningLoss{0, 0};
    const double root = sqrt(D + c * c);
    const double value = level.weight * D / (root + c); // = weight (root - c), without cancellation
    return TuningLoss{value, level.weight * level.x0_out * (double)level.x0_out / root};
}

// The term of one value in the variational bound, in nats, and its derivatives by d and by v. d = output - target is
// the error of the answer's first half, which predicts the mean. v is the answer's second half, for the variance. The
// network's variance is exp(log_var + u) with u = log_ratio + range (v + 1) / 2. With v from -1 to 1, it lies between
// the two fixed variances (Nichol & Dhariwal 2021, eq. 15). The term is:
//   t > 0   the KL divergence of two normal distributions, whose means differ by sqrt(kl exp(log_var)) d
//   t = 0   minus the log of the probability of the true value among the 256 values of a byte
struct BoundTerm {
    float value, d_mean, d_variance;
};

// Returns guided-diffusion's approximation of the normal distribution function. Writes its derivative to *density.
HD static inline double normal_cdf(double z, double* density) {
    constexpr double ROOT_2_OVER_PI = 0.7978845608028654;
    const double t = tanh(ROOT_2_OVER_PI * (z + 0.044715 * z * z * z));
    *density = 0.5 * (1 - t * t) * ROOT_2_OVER_PI * (1 + 3 * 0.044715 * z * z);
    return 0.5 * (1 + t);
}

HD static inline BoundTerm bound_term(const NoiseLevel& level, float d, float v, float x0) {
    const float slope = 0.5f * level.range; // du / dv
    const float u = level.log_ratio + slope * (v + 1);
    if (!level.t_is_0) {
        // The term is (exp(-u) - 1 + u + exp(-u) kl d^2) / 2. It is computed in double: for high t, u is so small that
        // exp(-u) - 1 + u is almost u^2 / 2.
        const double less = expm1(-(double)u); // exp(-u) - 1
        const double pull = (1 + less) * level.kl * d;
        const double value = 0.5 * (less + u + pull * d);
        const double d_variance = 0.5 * slope * (-less - pull * d);
        return BoundTerm{(float)value, (float)pull, (float)d_variance};
    }
    // A value of x_0 stands for the interval from x_0 - 1 / 255 to x_0 + 1 / 255, and x_0 - mean = -x0_out d. The
    // probability is the distribution function at the interval's upper end minus that function at its lower end. Both
    // ends are measured from the mean, in units of the standard deviation.
    const double centered = -(double)level.x0_out * d;
    const double inverse = exp(-0.5 * ((double)level.log_var + u)); // 1 / the standard deviation
    const double high = inverse * (centered + 1.0 / 255);
    const double low = inverse * (centered - 1.0 / 255);
    double dense_high, dense_low; // the density at the two ends
    const double below_high = normal_cdf(high, &dense_high);
    const double below_low = normal_cdf(low, &dense_low);
    double p = below_high - below_low;
    if (x0 > 0.999f) { // the value 255 also stands for all that is larger
        p = 1 - below_low;
        dense_high = 0;
    }
    if (x0 < -0.999f) { // the value 0 also stands for all that is smaller
        p = below_high;
        dense_low = 0;
    }
    if (p < 1e-12) return BoundTerm{27.631021f, 0, 0}; // -log(1e-12), as guided-diffusion limits it
    // The derivative by u of each end of the interval (high, low) is -1 / 2 times that end.
    const double d_mean = (dense_high - dense_low) * inverse * level.x0_out / p;
    const double d_variance = (dense_high * high - dense_low * low) * 0.5 * slope / p;
    return BoundTerm{(float)-log(p), (float)d_mean, (float)d_variance};
}

// ---------------------------------------------------------------------------------------------------------------------
// --- samplers
// A sampler makes an image out of noise in steps. All samplers work on x = x_0 + sigma noise, whatever the model was
// trained on. (A model of T timesteps is shown x_t = signal x; then sigma^2 = (1 - alpha_bar) / alpha_bar.) From step
// to step sigma falls, and at the end it is 0. In each step the network's answer is computed and turned into x0, its
// estimate of x_0. Papers write D(x; sigma) for x0. The slope of the ODE that takes noise away is then
//
//   dx / dsigma = (x - x0) / sigma                                     (Karras et al. 2022, eq. 1 and 3)
//
// Below, each sampler is a function that makes one of its steps. In it, s is the sigma of x, n is the sigma of the next
// x, which is x', and z is new noise. Every step is linear in these images and in m, one image that the sampler
// remembers:
//
//   x' = (.x) x + (.x0) x0 + (.m) m + (.noise) z           m' = (.m_x) x + (.m_x0) x0
//
// So such a function returns a few coefficients, a Move. One kernel (sampler_step) computes the steps of all samplers.
//
// The functions, in the order in which they run: make_sampler calls plan_sampler, which calls sampler_sigmas,
// plan_route and, for each move, device_step; then sample_images calls sample_batch.
struct Move {
    double sigma;             // s
    double x, x0;             // coefficients of x'
    double m = 0, noise = 0;  // coefficients of x', too
    double m_x = 0, m_x0 = 0; // coefficients of m'
    double learned_low = 0;   // if the network chooses the noise's standard deviation: the least one
    double learned_high = 0;  // the largest one; learned_low = 0: the standard deviation is .noise
    double known_until = -1;  // with --inpaint: if this move is the last of its step, the step's n (see keep_known)
};

// Euler's method: x' = x + (n - s) (x - x0) / s. The code writes x' as a weighted mean of x and x0 instead: if s is
// much larger than n, the two terms of the formula are large numbers that nearly cancel.
static Move euler_step(double s, double n) { return Move{.sigma = s, .x = n / s, .x0 = 1 - n / s}; }

// Returns the standard deviation of q(x_n | x_s, x_0) (Ho et al. 2020, eq. 7). As above, x = x_0 + sigma noise.
static double posterior_deviation(double s, double n) { return n * std::sqrt(s * s - n * n) / s; }

// DDIM (Song et al. 2021, eq. 12 and 16). With eta = 0 it is Euler's method. With eta > 0 a step goes to a sigma below
// n, and new noise raises the sigma to n again.
static Move ddim_step(double s, double n, double eta) {
    const double noise = eta * posterior_deviation(s, n);
    Move move = euler_step(s, std::sqrt(n * n - noise * noise));
    move.noise = noise;
    return move;
}

// Ho et al. 2020, eq. 6 and 7: x' is the mean of q(x_n | x_s, x_0) plus noise. The variance of the noise is one of two
// fixed values (section 3.2 of that paper), or the network chooses a variance between these two (Nichol & Dhariwal
// 2021, eq. 15). The last step adds no noise.
static Move ddpm_step(const Config& c, double s, double n) {
    const double small = posterior_deviation(s, n);
    double large = 0;
    if (n > 0) large = std::sqrt((s * s - n * n) * (1 + n * n) / (1 + s * s));
    Move move = euler_step(s, n * n / s);
    move.noise = c.sigma_small ? small : large;
    if (c.learned_variance() && n > 0) {
        move.learned_low = small;
        move.learned_high = large;
    }
    return move;
}

// Heun's method (Karras et al. 2022, algorithm 1) uses the mean of the slopes at both ends of the step. So a step is
// two moves. The first move is Euler's step from x to y, and x0 is remembered. In the second move the network is asked
// about y, and y0 is its estimate of x_0:
//   x' = x + (n - s) ((x - x0) / s + (y - y0) / n) / 2 = y + (n - s) / (2 n) (x0 - y0)
// The two formulas are equal because (x - x0) / s = (y - x0) / n: y lies on the line from x to x0. A step to n = 0 is
// Euler's step alone.
static void add_heun_step(std::vector<Move>* moves, double s, double n) {
    Move to_y = euler_step(s, n);
    if (n > 0) to_y.m_x0 = 1;
    moves->push_back(to_y);
    if (n == 0) return;
    const double half_step = (n - s) / (2 * n);
    moves->push_back(Move{.sigma = n, .x = 1, .x0 = -half_step, .m = half_step});
}

// DPM-Solver++(2M) (Lu et al. 2022, algorithm 2; the paper's lambda is -log(sigma)): Euler's step with an x0 that is
// extrapolated from this step's x0 and the x0 of the step before. sigma_before: the sigma at which the step before
// began; 0: there is no step before.
static Move dpmpp_2m_step(double sigma_before, double s, double n) {
    Move move = euler_step(s, n);
    if (n == 0) return move;
    move.m_x0 = 1;
    if (sigma_before == 0) return move;
    const double r = std::log(sigma_before / s) / std::log(s / n);
    const double of_x0 = move.x0;
    move.x0 = of_x0 * (1 + 1 / (2 * r));
    move.m = -of_x0 / (2 * r);
    return move;
}

// Song et al. 2023, "Consistency Models", algorithm 1: the next x is x0 plus new noise.
static Move consistency_step(double s, double n) { return Move{.sigma = s, .x = 0, .x0 = 1, .noise = n}; }

// Karras et al. 2022, algorithm 2: before a step of euler or heun, noise is added, which multiplies sigma by 1 + gamma.
// Returns gamma.
static double churn_gamma(const Config& c, double sigma, int N) {
    const bool churns = sigma >= c.S_min && sigma <= c.S_max;
    return churns ? std::min((double)c.S_churn / N, std::sqrt(2.0) - 1) : 0;
}

// For --timestep_respacing ddimN: returns N timesteps, every k-th from 0 on. k is chosen so that there are N timesteps.
static std::vector<int> strided_timesteps(int T, const std::string& respacing) {
    const int wanted = std::clamp(atoi(&respacing[strlen("ddim")]), 2, T);
    const int stride = (T + wanted - 1) / wanted;
    std::vector<int> steps;
    for (int t = 0; t < T; t += stride) steps.push_back(t);
    must(respacing == "ddim" + std::to_string(steps.size()), "--timestep_respacing " + respacing,
         text("no whole stride makes so many of the %d steps; ddim25 or 25 may", T));
    return steps;
}

// Returns the timesteps of a sampler in ascending order, as guided-diffusion's space_timesteps does. respacing:
//   ""            all timesteps
//   "ddimN"       N timesteps at equal distances, from 0 on
//   "n1,n2,..."   [0, T) is divided into equal parts; n1 timesteps of the first part, n2 of the second, and so on
static std::vector<int> space_timesteps(int T, const std::string& respacing) {
    if (respacing.starts_with("ddim")) return strided_timesteps(T, respacing);
    const std::string flag = "--timestep_respacing " + respacing;
    std::vector<float> counts{(float)T};
    const bool is_list = respacing.empty() || parse_list(respacing, &counts);
    must(is_list && counts.size() <= (size_t)T, flag,
         "must be a number of steps, ddim and a number, or numbers with commas");

    const int parts = (int)counts.size();
    const int least = parts == 1; // the smallest count that is allowed: 1, or 0 if there are several parts
    std::vector<int> steps;
    int start = 0; // where the part begins
    for (int i = 0; i < parts; i++) {
        const bool one_more = i < T % parts; // if the parts don't divide T, the first ones are longer
        const int size = T / parts + one_more;
        const float count = counts[i];
        must(count >= least && count <= size && count == std::floor(count), flag,
             text("can't take %.9g of %d steps; use %d to %d", count, size, least, size));
        // The kept steps are spread evenly, from the first step of this part to its last one.
        const double stride = count <= 1 ? 1 : (size - 1) / (count - 1.0);
        double position = 0;
        for (int k = 0; k < count; k++) {
            steps.push_back(start + (int)std::nearbyint(position));
            position += stride;
        }
        start += size;
    }
    must(!steps.empty(), flag, "keeps no step");
    return steps;
}

// Returns sigma number i of the N sigmas of Karras's schedule (Karras et al. 2022, eq. 5), which fall from high to low.
static double karras_sigma(const Config& c, double high, double low, int i, int N) {
    const double start = std::pow(high, 1.0 / c.rho);
    const double end = std::pow(low, 1.0 / c.rho);
    const double fraction = N > 1 ? (double)i / (N - 1) : 0;
    return std::pow(start + fraction * (end - start), c.rho);
}

// Returns the sigmas of a sampler: the sigma before each of its N steps, and 0 at the end. known: the sigmas of the T
// timesteps. The samplers' sigmas are:
//   ddpm, ddim    those of the timesteps that --timestep_respacing keeps
//   consistency   Karras's schedule from sigma_max to mid_t: Geng et al. 2024 take two steps, at 80 and 0.821
//   others        Karras's schedule. For a model of flow instead: equal steps of t = sigma / (1 + sigma)
static std::vector<double> sampler_sigmas(const Config& c, const std::vector<double>& known) {
    const std::vector<int> kept = space_timesteps(c.diffusion_steps, c.timestep_respacing);
    const int N = (int)kept.size();
    std::vector<double> sigmas;
    if (c.goes_by_timesteps()) {
        for (int i = N - 1; i >= 0; i--) sigmas.push_back(known[kept[i]]);
        sigmas.push_back(0);
        return sigmas;
    }
    const Frame frame = frame_of(c);
    const bool consistency = c.sampler == "consistency";
    const bool steps_of_t = has_steps_of_t(frame) && !consistency;
    double high = c.sigma_max;
    double low = consistency ? c.mid_t : c.sigma_min;
    if (frame == Frame::DDPM) { // such a model is only trained on sigmas between those of its first and last timestep
        high = std::min(high, known.back());
        low = std::max(low, known.front());
    }
    for (int i = 0; i < N; i++) {
        const double t = high / (1 + high) * (1 - (double)i / N);
        sigmas.push_back(steps_of_t ? t / (1 - t) : karras_sigma(c, high, low, i, N));
    }
    sigmas.push_back(0);
    return sigmas;
}

// Returns the order in which a sampler takes its N steps, as a list of the steps' numbers. With --inpaint some steps
// are taken again (Lugmayr et al. 2022, "RePaint"): after every --jump_length steps the sampler goes back by so many
// steps, until it has taken these steps --jump_n_sample times. Then it goes on with the next steps. The last step is
// taken once. The first (N - 1) % jump_length steps are taken once, too.
static std::vector<int> step_order(const Config& c, int N) {
    std::map<int, int> again; // how often to go back from each level of noise; 0: the least noise; -1: none
    if (!c.inpaint.empty())
        for (int level = 0; level < N - c.jump_length; level += c.jump_length) again[level] = c.jump_n_sample - 1;
    std::vector<int> order;
    for (int level = N - 1; level >= 0; level--) {
        order.push_back(N - 1 - level);
        int& left = again[level - 1]; // the step from `level` ends at the next lower level
        if (left > 0) level += c.jump_length;
        left--;
    }
    return order;
}

// With --start_from only the last steps of the N are taken (Meng et al. 2022, "SDEdit"). Returns the number of the
// first step that is taken.
static int first_step(const Config& c, int N) {
    if (c.start_from.empty()) return 0;
    const int steps = (int)std::lround((double)c.strength * N);
    return N - std::max(1, steps);
}

// All moves of a sampler.
struct Route {
    double start = 0; // the first x is start * normals + churn * other normals
    double churn = 0;
    std::vector<Move> moves;
    int64_t first_move = 0; // the move that sampling begins with: the first move of the step that first_step returns
};

// Adds the moves of a step from sigma s to sigma n. before: the sigma at which the step before this one began; 0: no
// step before this one may be used.
static void add_step(std::vector<Move>* moves, const Config& c, double before, double s, double n) {
    if (c.sampler == "ddpm") moves->push_back(ddpm_step(c, s, n));
    else if (c.sampler == "ddim") moves->push_back(ddim_step(s, n, c.eta));
    else if (c.sampler == "euler") moves->push_back(euler_step(s, n));
    else if (c.sampler == "heun") add_heun_step(moves, s, n);
    else if (c.sampler == "dpmpp_2m") moves->push_back(dpmpp_2m_step(before, s, n));
    else if (c.sampler == "consistency") moves->push_back(consistency_step(s, n));
    else unknown_word("sampler", c.sampler);
    if (!c.inpaint.empty()) moves->back().known_until = n;
}

static Route plan_route(const Config& c, const std::vector<double>& sigmas) {
    const int N = (int)sigmas.size() - 1;
    const bool variance_1 = c.goes_by_timesteps(); // the first x_t has variance 1, as in guided-diffusion
    Route route;
    route.start = variance_1 ? std::sqrt(1 + sigmas[0] * sigmas[0]) : sigmas[0];
    const int first = first_step(c, N);
    int last = -1; // the step that was taken before this one; -1: none
    for (int i : step_order(c, N)) {
        double s = sigmas[i];
        if (i == first && i > last) route.first_move = (int64_t)route.moves.size();
        if (c.can_churn()) {
            const double gamma = churn_gamma(c, s, N);
            // This is S_noise sqrt(s'^2 - s^2) with s' = s (1 + gamma). Without churn it is exactly 0.
            const double noise = s * std::sqrt(gamma * (2 + gamma)) * c.S_noise;
            if (route.moves.empty()) route.churn = noise;
            else route.moves.back().noise = noise; // the noise is added at the end of the step before
            s *= 1 + gamma;
        }
        const bool follows = i == last + 1 && i > first;
        const double before = follows ? sigmas[i - 1] : 0;
        add_step(&route.moves, c, before, s, sigmas[i + 1]);
        last = i;
    }
    return route;
}

// Makes the level of any sigma: what the network sees, and what its answer means. A model of T timesteps (ddpm) is told
// a t between two of its timesteps. The t is interpolated linearly in log(sigma).
static NoiseLevel level_at(const Config& c, const std::vector<double>& known, double sigma) {
    const Frame frame = frame_of(c);
    if (frame != Frame::DDPM) return make_level(ask(frame, sigma, c.sigma_data));
    // i is such that known[i] <= sigma < known[i + 1]. If sigma is below or above all of known, known[i] and
    // known[i + 1] are the first two or the last two.
    const size_t last = known.size() - 1;
    const auto above = std::upper_bound(known.begin() + 1, known.begin() + last, sigma);
    const size_t i = (size_t)(above - known.begin()) - 1;
    const double fraction = std::log(sigma / known[i]) / std::log(known[i + 1] / known[i]);
    const double t = (double)i + fraction;
    const double alpha_bar = 1 / (1 + sigma * sigma);
    return ddpm_level(c, alpha_bar, std::min(std::max(t, 0.0), (double)last));
}

// Turns a move into a step of the device. A move computes x' from x. A step of the device works on the network's input
// u = signal x, and the signal depends on sigma. then: the sigma of the next move; 0 after the last move.
static SamplerStep device_step(const Config& c, const std::vector<double>& known, const Move& move, double then) {
    auto signal_at = [&](double sigma) { return sigma > 0 ? level_at(c, known, sigma).signal : 1.0; };
    const NoiseLevel level = level_at(c, known, move.sigma);
    const bool keeps_known = move.known_until >= 0;
    const double end = keeps_known ? move.known_until : then; // the sigma of x'
    const double next = signal_at(end);
    SamplerStep step{};
    step.t = level.t;
    step.x0_x = level.x0_x;
    step.x0_out = level.x0_out;
    // The coefficients of u' and m'. In the formulas of a Move, x is u / signal, and u' is next times x'.
    step.next_x = (float)(next * move.x / level.signal);
    step.next_x0 = (float)(next * move.x0);
    step.next_m = (float)(next * move.m);
    step.sigma = (float)(next * move.noise);
    step.m_x = (float)(move.m_x / level.signal);
    step.m_x0 = (float)move.m_x0;
    if (move.learned_low > 0) {
        step.log_sigma = (float)std::log(next * move.learned_low);
        step.range = (float)std::log(move.learned_high / move.learned_low);
    }
    // keep_known replaces the known part of x by the given image plus noise of sigma `end`. If an earlier step comes
    // next, it then adds noise to all of x, to go back to the sigma at which that step begins.
    if (keeps_known) {
        const double back = signal_at(then);
        const double added = std::sqrt(std::max(then * then - end * end, 0.0)); // noise, in the scale of x
        step.known_x = (float)next;
        step.known_sigma = (float)(next * end);
        step.back_x = (float)(back / next);
        step.back_sigma = (float)(back * added);
    }
    return step;
}

// A Route in the form that the device uses: the coefficients of the network's first input, and those of every step.
struct SamplerPlan {
    // The network's first input is image * x_0 + start * normals + churn * other normals.
    float image, start, churn;
    int64_t begin; // the step that sampling begins with
    std::vector<SamplerStep> steps;
};

static SamplerPlan plan_sampler(const Config& c) {
    std::vector<double> known;
    for (double alpha_bar : alpha_bars(c)) known.push_back(std::sqrt((1 - alpha_bar) / alpha_bar));
    const std::vector<double> sigmas = sampler_sigmas(c, known);
    const Route route = plan_route(c, sigmas);
    const std::vector<Move>& moves = route.moves;
    SamplerPlan plan{};
    plan.begin = route.first_move;

    // With --start_from the first x is the given image plus noise, whose sigma is that of the first move.
    const double from = moves[plan.begin].sigma;
    const double signal = level_at(c, known, from).signal;
    const bool changes_images = !c.start_from.empty();
    plan.image = changes_images ? (float)signal : 0;
    plan.start = (float)(signal * (changes_images ? from : route.start));
    plan.churn = (float)(signal * route.churn);
    for (size_t i = 0; i < moves.size(); i++) {
        const bool is_last = i + 1 == moves.size();
        const double then = is_last ? 0 : moves[i + 1].sigma;
        plan.steps.push_back(device_step(c, known, moves[i], then));
    }
    return plan;
}

// A sampler's memory. Members marked (device) point to device memory. Their sizes do not depend on how many images are
// sampled: B is the number of images in a batch.
struct Sampler {
    SamplerPlan plan;
    SamplerStep* steps; // (device) the plan's steps
    Denoising denoising;
    float* all;                    // (device) all ranks' images (ranks, B, H, W, C); null: there is one rank
    int64_t* k;                    // (device) the step that comes next
    int64_t *zero, *one;           // (device) the numbers 0 and 1, which random draws use as their step
    float* t;                      // (device) (B): what the network is told of the noise
    int* labels;                   // (device) (B): the classes
    float* values;                 // (device) (B, num_values); null: the network reads no numbers
    std::vector<float> value_rows; // rows of cond_dim numbers; when all are used, they are used again from the first on
    float* cond;                   // (device) a batch's pictures (B, H, W, cond_channels); null: there are none
    std::vector<float> pictures;   // on the host: (count, H, W, cond_channels); they are used again like value_rows
    std::vector<float> truth;      // on the host: the data's images that the pictures belong to, for a run's grids
    // With --start_from and --inpaint, on the host: images (count, H, W, C) and masks; they are used again, too.
    std::vector<float> images, masks;
    float *known, *mask; // (device) with --inpaint: the images and masks of a batch (B, H, W, C)
};

// B: the number of images in the network's batch. With guidance, the batch holds every image twice.
static Sampler make_sampler(const Config& c, int B) {
    Sampler s{};
    s.plan = plan_sampler(c);
    const size_t n = (size_t)c.H * c.W * c.in_channels; // the number of values of an image
    s.steps = device_copy(s.plan.steps);
    s.k = device_alloc<int64_t>(1);
    s.zero = device_alloc<int64_t>(1);
    s.one = device_copy(std::vector<int64_t>{1});
    s.t = device_alloc<float>(B);
    s.labels = device_alloc<int>(B);
    if (c.num_values() > 0) s.values = device_alloc<float>((size_t)B * c.num_values());
    s.value_rows = c.value_rows;
    if (c.cond_channels > 0) s.cond = device_alloc<float>((size_t)B * c.H * c.W * c.cond_channels);
    if (world.size > 1) s.all = device_alloc<float>(world.size * B * n);
    // --dynamic_threshold q: x0 is limited to the ceil(q n)-th smallest |x0| of an image's n values, or to 1 if 1 is
    // larger. denoising.rank is the number ceil(q n), but counted from 0.
    const int rank = (int)std::ceil(c.dynamic_threshold * (double)n) - 1;
    bool remembers = false; // whether some step writes m
    for (const SamplerStep& step : s.plan.steps) remembers = remembers || step.m_x != 0 || step.m_x0 != 0;
    s.denoising.limit = c.clip_denoised || rank >= 0;
    s.denoising.guided = c.guided();
    s.denoising.guidance = c.guidance_scale;
    s.denoising.rank = rank;
    s.denoising.threshold = device_alloc<float>(B);
    s.denoising.m = remembers ? device_alloc<float>(B * n) : nullptr;
    return s;
}

// Returns the class of image number i of a seed. The classes of --classes are used in turn; without --classes, all
// classes are used in turn.
static int class_of_image(const Config& c, int64_t i) {
    if (!c.class_cond) return 0;
    const size_t listed = c.class_list.size();
    return listed ? (int)c.class_list[i % listed] : (int)(i % c.num_classes);
}

// Returns the numbers of image number i of a seed. The rows of value_rows are used in turn.
static std::span<const float> values_of_image(const Config& c, const Sampler& s, int64_t i) {
    const size_t K = c.cond_dim;
    return std::span(s.value_rows).subspan(i * K % s.value_rows.size(), K);
}

// These three functions put the condition of images first .. first + B - 1 where the network reads it. With guidance
// the batch holds every image twice, and the condition is left out for the second copy: the class, the numbers and the
// picture, each of them only if it was sometimes left out in training.

static void put_labels(const Config& c, Sampler* s, int64_t first, int B, int copies) {
    std::vector<int> labels(B * copies);
    for (int i = 0; i < B * copies; i++) {
        const bool left_out = i >= B && c.null_class();
        labels[i] = left_out ? c.num_classes : class_of_image(c, first + i % B); // num_classes stands for no class
    }
    copy_to_device(s->labels, labels.data(), labels.size() * sizeof(int));
}

// A row holds cond_dim numbers, and then the numbers of an augmentation. The latter are zeros, because the image is not
// changed.
static void put_values(const Config& c, Sampler* s, int64_t first, int B, int copies) {
    const size_t row_size = c.num_values();
    std::vector<float> values(B * copies * row_size);
    for (int i = 0; i < B * copies && c.cond_dim > 0; i++) {
        const bool left_out = i >= B && c.class_dropout > 0; // then the image's numbers are zeros
        if (!left_out) std::ranges::copy(values_of_image(c, *s, first + i % B), values.begin() + i * row_size);
    }
    copy_to_device(s->values, values.data(), values.size() * sizeof(float));
}

static void put_pictures(const Config& c, Sampler* s, int64_t first, int B, int copies) {
    const size_t n = (size_t)c.H * c.W * c.cond_channels;
    const std::vector<float> nothing(n);
    for (int i = 0; i < B * copies; i++) {
        const bool left_out = i >= B && c.cond_dropout > 0;
        const float* const picture = &s->pictures[(first + i % B) * n % s->pictures.size()];
        copy_to_device(s->cond + i * n, left_out ? nothing.data() : picture, n * sizeof(float));
    }
}

// With --start_from or --inpaint: puts a batch's given images into the network's input x (copies B, n), times
// plan.image (which is 0 with --inpaint). With --inpaint it also puts the images and their masks where keep_known reads
// them.
static void put_given_images(float* x, Sampler* s, int64_t first, int B, int copies, int n) {
    const size_t bytes = n * sizeof(float);
    for (int b = 0; b < B; b++) {
        // When all images (or masks) are used, they are used again from the first on.
        const size_t position = (size_t)(first + b) * n;
        const float* const given = &s->images[position % s->images.size()];
        if (s->known) {
            const float* const mask = &s->masks[position % s->masks.size()];
            copy_to_device(s->known + (size_t)b * n, given, bytes);
            copy_to_device(s->mask + (size_t)b * n, mask, bytes);
        }
        std::vector<float> image(given, given + n);
        for (float& v : image) v *= s->plan.image;
        for (int copy = 0; copy < copies; copy++) {
            const size_t sample = (size_t)copy * B + b;
            copy_to_device(x + sample * n, image.data(), bytes);
        }
    }
}

// Draws images first .. first + B - 1 of a seed. An image does not depend on B. The images are left in net's input
// tensor. With guidance, this tensor first holds all images with their conditions, and then the same images without.
// tell is called after each step with the number of images done so far.
static void sample_batch(UNet* net, Weights weights, Sampler* s, int64_t first, int B, auto tell) {
    const Config& c = net->config;
    const int HW = c.H * c.W;
    const int n = HW * c.in_channels;
    const int copies = c.guided() ? 2 : 1;
    const uint64_t seed = (uint64_t)(c.noise_seed >= 0 ? c.noise_seed : c.seed);
    float* const x = tensor_data<float>(net, net->input);
    float* const out = tensor_data<float>(net, net->output);

    // Set what the network is told, and the images or the noise that sampling begins with.
    put_labels(c, s, first, B, copies);
    if (c.num_values() > 0) put_values(c, s, first, B, copies);
    if (c.cond_channels > 0) put_pictures(c, s, first, B, copies);
    net->t = s->t;
    net->labels = s->labels;
    net->values = s->values;
    net->cond = s->cond;
    if (!s->images.empty()) put_given_images(x, s, first, B, copies, n);
    auto key = [&](uint32_t purpose, const int64_t* step) { return RandomKey{seed, purpose, step, first}; };
    const bool adds = !s->images.empty(); // whether noise is added to the given images
    for (int copy = 0; copy < copies; copy++) {
        float* const images = x + (size_t)copy * B * n;
        draw_normals(images, B, n, key(RANDOM_SAMPLE_START, s->zero), s->plan.start, adds);
        if (s->plan.churn > 0) draw_normals(images, B, n, key(RANDOM_SAMPLE_START, s->one), s->plan.churn, true);
    }

    // The steps. The device counts them in s->k, so that one recorded graph can be repeated for all steps.
    copy_to_device(s->k, &s->plan.begin, sizeof(int64_t));
    Graph graph;
    const int64_t steps = (int64_t)s->plan.steps.size() - s->plan.begin;
    for (int64_t k = 0; k < steps; k++) {
        replay(&graph, [&] {
            sampler_timesteps(s->t, s->steps, s->k, B * copies);
            unet_forward(net, weights, Dropout{}, B * copies);
            const RandomKey noise = key(RANDOM_SAMPLE_NOISE, s->k);
            sampler_step(x, out, s->steps, s->denoising, noise, B, HW, c.in_channels, c.out_channels());
            const RandomKey known_noise = key(RANDOM_KNOWN_NOISE, s->k);
            if (s->known) keep_known(x, s->known, s->mask, s->steps, known_noise, c.guided(), B, n);
            next_step(s->k);
        });
        // The host only starts a GPU's work, and may be far ahead of the GPU. If progress is shown on a terminal, the
        // host waits for the GPU at every 16th step, so that the progress shown is true.
        int64_t reached;
        const bool waits = k % 16 == 15 && terminal_columns();
        if (waits) copy_to_host(&reached, s->k, sizeof reached);
        tell(B * (k + 1.0) / (double)steps);
    }
    free_graph(&graph);
}

// Draws n images and returns them on rank 0 (n, H, W, C), with values around [-1, 1]. Ranks take batches in turns. A
// batch is up to net->B images, with guidance up to half of that.
static std::vector<float> sample_images(UNet* net, Weights weights, Sampler* s, int n) {
    const Config& c = net->config;
    const size_t size = (size_t)c.H * c.W * c.in_channels; // the number of values of an image
    const int N = world.size;
    const int room = c.guided() ? net->B / 2 : net->B;
    const int share = (n + N - 1) / N;
    const int most = std::min(room, share); // the largest number of images in a rank's batch
    std::vector<float> images(world.rank ? 0 : n * size);
    float* const own = tensor_data<float>(net, net->input);
    const double start = now();
    double told = start;
    auto tell = [&](double done) { // shows the progress: on a terminal twice a second, elsewhere every ten seconds
        const double pause = terminal_columns() ? 0.5 : 10;
        if (now() - told < pause) return;
        told = now();
        const std::string left = duration((told - start) * (n / done - 1));
        show_status(text("sampling: %.0f %%, %s left", 100 * done / n, left.c_str()));
    };
    for (int i = 0; i < n; i += most * N) {
        come_to("a batch of samples");
        const int first = i + most * world.rank;
        const int B = std::min(most, n - first); // below 1 if no image is left for this rank
        if (B > 0) sample_batch(net, weights, s, first, B, [&](double done) { tell(i + done * N); });
        if (N > 1) all_gather(s->all, own, most * size * sizeof(float), MAIN_STREAM);
        const float* const made = N > 1 ? s->all : own;
        const int count = std::min(most * N, n - i);
        if (!world.rank) copy_to_host(&images[i * size], made, count * size * sizeof(float));
    }
    if (told > start) show_status(terminal_columns() ? "" : "sampling: 100 %, took " + duration(now() - start));
    return images;
}

// =====================================================================================================================
// 9. Data: .bin files that may be larger than memory, the order of their images
// A data file consists of a header, images (N, C, H, W) of uint8 or float32, labels (N), and K numbers of each image
// (N, K) (docs/FORMATS.md). The images stay on the disk: a step reads only its own images. The operating system is
// asked to fetch them into memory a few batches before the step. Labels and numbers are kept in memory. The program
// also reads data files of unet.cu.
//
// The functions, in the order in which they run: if --data_dir names a folder of pictures, take_data_dir makes a data
// file of them. open_dataset checks the file, once. For each step, load_batch sends the images to the device; it calls
// image_at_position and read_image for each image.

constexpr int DATA_MAGIC = 20261120;
constexpr int UNET_CU_DATA_MAGIC = 20240620;
constexpr size_t READ_AT_START = (size_t)4 << 30; // a file of up to this length is read and checked at the start
constexpr int BATCHES_AHEAD = 8;                  // how many batches in advance the system is asked to read
constexpr int MOST_VALUES = 4096;                 // the most numbers per image, the limit of --cond_dim
constexpr int MOST_NAME_BYTES = 1 << 20;          // the most bytes of all the numbers' names together

// All files of this program begin with these two slots. The slots of a data file follow.
constexpr int SLOT_MAGIC = 0;
constexpr int SLOT_VERSION = 1; // the version of the format
constexpr int DATA_SLOT_COUNT = 2;
constexpr int DATA_SLOT_CHANNELS = 3;
constexpr int DATA_SLOT_HEIGHT = 4;
constexpr int DATA_SLOT_WIDTH = 5;
constexpr int DATA_SLOT_CLASSES = 6;
constexpr int DATA_SLOT_BYTES = 7;      // the size of a value of an image
constexpr int DATA_SLOT_HEADER_CRC = 8; // the checksum of the header, computed with 0 in this slot
// the checksum of all that follows the header (version 1), or of all that follows the images (version 2)
constexpr int DATA_SLOT_BODY_CRC = 9;
constexpr int DATA_SLOT_VALUES = 10; // K, how many numbers each image has
constexpr int DATA_SLOT_NAMES = 11;  // the number of bytes of the numbers' names
constexpr int DATA_SLOT_UNUSED = 12; // the first of the slots that are 0

struct Dataset : InputFile {
    // 1: one checksum covers all images. 2: each image has a checksum. 0: a file of unet.cu, without checksums.
    int version = 0;
    int64_t count = 0; // N
    int C = 0, H = 0, W = 0;
    int classes = 0;                 // 0: images have no labels
    int bytes = 1;                   // the size of a value of an image: 1 (uint8) or 4 (float32)
    int K = 0;                       // how many numbers each image has
    int name_bytes = 0;              // the number of bytes of the numbers' names
    uint32_t header_crc = 0;         // the header holds a checksum of the rest, so this identifies the whole content
    std::vector<int32_t> labels;     // (N), or empty
    std::vector<float> values;       // (N, K): the numbers
    std::string value_names;         // the names of the K numbers, a line for each; or empty
    std::vector<uint32_t> image_crc; // (N), the checksum of each image; empty if they are not known
    int64_t asked = 0;               // the system was asked to fetch the images up to this position of the stream
    std::string error;               // why an image could not be used
    std::shared_ptr<Dataset> cond;   // --cond_file: a picture for each image, in the same order; null: there are none

    size_t image_bytes() const { return (size_t)C * H * W * bytes; }
    size_t image_at(int64_t i) const { return 1024 + i * image_bytes(); } // the byte of the file where image i begins
    // The bytes of a batch's buffer at which its labels, numbers and pictures begin. The images begin at 0. The labels
    // follow them, at a multiple of 4 bytes.
    size_t labels_at(int B) const { return (B * image_bytes() + 3) / 4 * 4; }
    size_t values_at(int B) const { return labels_at(B) + B * sizeof(int); } // numbers follow the labels
    size_t pictures_at(int B, const Config& c) const {                       // pictures follow the numbers
        return values_at(B) + (size_t)B * c.num_values() * sizeof(float);
    }
    size_t batch_bytes(int B, const Config& c) const {
        return pictures_at(B, c) + (cond ? B * cond->image_bytes() : 0);
    }
    // In the file, the images are followed by labels, numbers, names and checksums, all in words of 4 bytes. These are
    // the numbers of words:
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

// Reads image i into memory at `to`. Returns true if it could be read and its checksum is right (or not known).
// Otherwise d->error is the reason.
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

// Returns the header of a data file. If the file is one of unet.cu, its header has fewer fields, each one slot earlier.
// Then that header is turned into a header of our format, with version 0.
static Header data_header(const Dataset& d, const char* hint) {
    const int* s = d.header.slot;
    const int magic = s[SLOT_MAGIC];
    const int version = s[SLOT_VERSION];
    if (magic == UNET_CU_DATA_MAGIC) return Header{{DATA_MAGIC, 0, s[1], s[2], s[3], s[4], 0, 4}};
    must(magic == DATA_MAGIC, d.path,
         text("is not a data file (it starts with %d, not %d); %s", magic, DATA_MAGIC, hint));
    must(version == 1 || version == 2, d.path,
         text("is a data file of version %d and this program reads 1 and 2; make it again with prepare_data.py",
              version));
    return d.header;
}

// Copies the fields of a header that describe the images, and checks them.
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

// Takes the numbers and their names from `behind`, the words that follow the images in the file.
static void take_values(Dataset* d, const std::vector<int32_t>& behind) {
    const float* const numbers = (const float*)(behind.data() + d->label_words());
    const char* const names = (const char*)(numbers + d->value_words());
    d->values.assign(numbers, numbers + d->value_words());
    d->value_names.assign(names, d->name_bytes);
    while (d->value_names.ends_with('\0')) d->value_names.pop_back(); // the last word is filled with zeros
    for (size_t i = 0; i < d->values.size(); i++)
        if (!std::isfinite(d->values[i]))
            refuse(d->path + text(": image %zu has a number that is not finite; make the file again", i / d->K));
}

// Reads what follows the images in the file: labels if there are classes, the images' numbers and their names if there
// are numbers, and in version 2 each image's checksum.
// body_crc: the header's checksum of all this; in version 1 it covers the images, too.
static void read_behind_images(Dataset* d, uint32_t body_crc) {
    std::vector<int32_t> behind(d->words_behind());
    const size_t bytes = behind.size() * sizeof(int32_t);
    d->read(behind.data(), bytes, d->image_at(d->count));
    if (d->version == 2) d->image_crc.assign(behind.end() - d->count, behind.end());
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

// Opens a data file and checks it. If it is longer than READ_AT_START, the images are not checked here.
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
    posix_fadvise(d.file, 0, 0, POSIX_FADV_RANDOM); // from here on images are read in a random order
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

// --- a folder of pictures: its data file lies beside it, PICTURES.bin beside PICTURES

static std::string data_file_beside(const std::string& folder) {
    std::string path = folder;
    while (path.ends_with('/')) path.pop_back();
    const std::string name = std::filesystem::path(path).filename().string();
    // A folder such as "." has no name to which .bin could be added, so its real name is looked up.
    const bool is_relative = name.empty() || name == "." || name == "..";
    std::error_code none;
    if (is_relative) path = std::filesystem::canonical(folder, none).string();
    if (path.empty() || path == "/")
        die("--data_dir %s: has no folder in which its data file could lie; name another", folder.c_str());
    return path + ".bin";
}

// Returns whether a data file exists, has the size and the channels of the model's images, and is not older than the
// folder's last change.
static bool is_up_to_date(const std::string& path, const Config& c, int64_t changed) {
    if (!exists(path)) return false;
    InputFile file;
    file.open(path, "--data_dir would replace it: move it away");
    // A file that was not made by --data_dir is not replaced.
    const int* s = file.header.slot;
    const bool holds_pictures = s[SLOT_MAGIC] == DATA_MAGIC && s[DATA_SLOT_BYTES] == 1;
    struct stat st = {};
    must(holds_pictures && !fstat(file.file, &st), path,
         "is no file that --data_dir made, and it would be replaced: move it away, or name it as --data_file");
    close(file.file);
    const bool same_size = s[DATA_SLOT_HEIGHT] == c.H && s[DATA_SLOT_WIDTH] == c.W;
    const bool fits = same_size && s[DATA_SLOT_CHANNELS] == c.in_channels;
    return fits && changed <= nanoseconds(st.st_mtim);
}

// Returns the words of the command that makes a data file of the pictures in --data_dir.
static std::vector<std::string> prepare_command(const Config& c, const std::string& program, const std::string& file) {
    const std::string size = size_text(c.H, c.W);
    const std::string channels = std::to_string(c.in_channels);
    return {"python3",      program, "--data_dir", c.data_dir, "--output_name", file, //
            "--image_size", size,    "--channels", channels};
}

// Returns the command of prepare_command as one line that a user can type.
static std::string prepare_command_line(const Config& c, const std::string& file) {
    std::string line;
    for (const std::string& word : prepare_command(c, "prepare_data.py", file)) line += " " + word;
    return "`" + line.substr(1) + "`";
}

// Makes the data file of the pictures in --data_dir, unless the file is up to date.
static void prepare_folder(const Config& c, const std::string& file) {
    const std::string flag = "--data_dir " + c.data_dir;
    struct stat st;
    if (stat(c.data_dir.c_str(), &st)) die("%s: can't be read (%s)", flag.c_str(), strerror(errno));
    must(S_ISDIR(st.st_mode), flag, "is no folder; --data_file takes a file");
    must(c.in_channels == 1 || c.in_channels == 3, flag,
         text("pictures have 1 channel or 3, and the model takes %d", c.in_channels));
    const int64_t changed = last_change(c.data_dir);
    if (is_up_to_date(file, c, changed)) {
        printf("%s: is up to date with %s\n", file.c_str(), c.data_dir.c_str());
        return;
    }

    // prepare_data.py lies beside this program.
    std::error_code none;
    const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", none);
    const std::string program = (self.parent_path() / "prepare_data.py").string();
    const std::string by_hand = prepare_command_line(c, file);
    must(exists(program), flag, program + " is not there, which prepares it; run " + by_hand + " where it is");
    const int code = run_child(prepare_command(c, program, file));
    must(code != CANT_RUN, flag,
         "there is no python3 in PATH, which prepares it; run " + by_hand + " where there is one");
    must(code == 0, flag, "was not prepared, for the reason above; once that is mended, run this again, or " + by_hand);

    // The file's time is set to that of the folder's last change before the file was made. If a picture was changed
    // while the file was made, the file is then older than the folder, and will be made again.
    constexpr int64_t SECOND = 1000000000; // in nanoseconds
    const struct timespec times[2] = {{0, UTIME_OMIT}, {changed / SECOND, changed % SECOND}};
    utimensat(AT_FDCWD, file.c_str(), times, 0);
    printf("%s: prepared from %s\n", file.c_str(), c.data_dir.c_str());
}

// Sets --data_file to the file that is made of --data_dir. Rank 0 makes the file, and the other ranks wait.
static void take_data_dir(Config* c, const std::string& where) {
    const std::string error = parse_model(c);
    if (error.starts_with("--image_size")) refuse(where + error);
    const std::string file = data_file_beside(c->data_dir);
    if (!world.rank) prepare_folder(*c, file);
    broadcast_host("the preparation of --data_dir", "");
    c->data_file = file;
    c->on_command_line.insert("data_file");
    c->data_dir = "";
    c->on_command_line.erase("data_dir");
}

// Reads the first images of a data file, at most `most` of them. Returns them as (count, H, W, C) in [-1, 1]. If the
// file's images have only one channel, as masks have, this channel is repeated C times. flag: the flag that names the
// file.
static std::vector<float> first_images(Dataset d, const char* flag, int C, int most) {
    const int HW = d.H * d.W;
    const int count = (int)std::min<int64_t>(d.count, most);
    std::vector<uint8_t> image(d.image_bytes()); // (C, H, W), as the file has it
    std::vector<float> images;
    for (int i = 0; i < count; i++) {
        // From (C, H, W) to (H, W, C), and from 0 ... 255 to [-1, 1].
        if (!read_image(&d, i, image.data())) refuse(d.error);
        for (int element = 0; element < HW * C; element++) { // an element of the image as (H, W, C)
            const int pixel = element / C;
            const int channel = element % C % d.C; // a mask's only channel is repeated
            const int source = channel * HW + pixel;
            const float value = image_value(image.data(), d.bytes, source);
            images.push_back(value);
            if (!std::isfinite(value))
                die("--%s %s: image %d holds a value that is not finite; make the file again", flag, d.path.c_str(), i);
        }
    }
    return images;
}

// Opens a file, checks the size of its images, and returns what first_images reads of it. channels: how many channels
// the file must have.
static std::vector<float> read_images(const Config& c, const char* flag, const std::string& path, int channels, int C) {
    const Dataset d = open_dataset(path);
    const bool fits = d.C == channels && d.H == c.H && d.W == c.W;
    if (!fits)
        die("--%s %s: its images are %dx%dx%d and must be %dx%dx%d; prepare_data.py makes them fit", flag, path.c_str(),
            d.H, d.W, d.C, c.H, c.W, channels);
    return first_images(d, flag, C, c.sample);
}

// --- pictures that samples are conditioned on

// Enlarges a small picture (H / factor, W / factor, C) to (H, W, C).
static std::vector<float> enlarged_picture(const Config& c, const float* small) {
    const int C = c.in_channels;
    const int factor = c.picture_factor;
    std::vector<float> picture((size_t)c.H * c.W * C);
    for (int e = 0; e < c.H * c.W * C; e++)
        picture[e] = enlarged(small, e / C / c.W, e / C % c.W, e % C, factor, C, c.H / factor, c.W / factor);
    return picture;
}

// Makes the picture (H, W, K) that --cond asks for, as in training. It is made of the image (C, H, W) of sample
// `number`. mask (H, W): where the holes are; null: the holes are drawn.
static std::vector<float> made_picture(const Config& c, const uint8_t* image, int bytes, int64_t number,
                                       const float* mask) {
    const int HW = c.H * c.W;
    const int C = c.in_channels;
    std::vector<float> picture;
    if (c.picture_kind == PictureKind::LOWRES) {
        const int factor = c.picture_factor;
        const int w = c.W / factor;
        std::vector<float> small;
        for (int e = 0; e < HW / factor / factor * C; e++) {
            const uint8_t* const channel = image + (size_t)(e % C) * HW * bytes;
            small.push_back(square_mean(channel, bytes, e / C / w, e / C % w, factor, c.W, false));
        }
        return enlarged_picture(c, small.data());
    }
    if (c.picture_kind == PictureKind::GRAY) {
        for (int p = 0; p < HW; p++) picture.push_back(grey_value(image, bytes, p, HW));
        return picture;
    }
    Words words[2 * HOLES];
    for (int k = 0; k < 2 * HOLES; k++) words[k] = philox((uint64_t)c.seed, k, (uint32_t)number, 0, RANDOM_MASK);
    const Holes holes = draw_holes(words, c.H, c.W);
    for (int p = 0; p < HW; p++) {
        const bool hidden = mask ? mask[p] > 0 : is_in_hole(holes, p / c.W, p % c.W);
        for (int channel = 0; channel < C; channel++) {
            const float value = image_value(image, bytes, (size_t)channel * HW + p);
            picture.push_back(hidden ? 0 : value);
        }
        picture.push_back(mask_value(hidden));
    }
    return picture;
}

// Makes the pictures (count, H, W, K) that --cond asks for. They are made of the first images of a file. masks: (count,
// H, W), which are used in turn; empty: the holes are drawn.
static std::vector<float> made_pictures(const Config& c, Dataset d, int most, const std::vector<float>& masks) {
    std::vector<float> pictures;
    std::vector<float> image(d.image_bytes() / sizeof(float) + 1); // its values are bytes or floats
    uint8_t* const bytes = (uint8_t*)image.data();
    for (int i = 0; i < std::min<int64_t>(d.count, most); i++) {
        if (!read_image(&d, i, bytes)) refuse(d.error);
        const size_t position = (size_t)i * c.H * c.W;
        const float* const mask = masks.empty() ? nullptr : &masks[position % masks.size()];
        const std::vector<float> picture = made_picture(c, bytes, d.bytes, i, mask);
        if (!all_finite(picture.data(), picture.size()))
            refuse(d.path + text(": image %d holds a value that is not finite; make the file again", i));
        pictures.insert(pictures.end(), picture.begin(), picture.end());
    }
    return pictures;
}

// Returns the end of an error message: which pictures --cond accepts, apart from images of the model's size.
static std::string other_pictures(const Config& c) {
    const int factor = c.picture_factor;
    if (c.picture_kind == PictureKind::LOWRES)
        return text(", or small ones of %dx%dx%d", c.H / factor, c.W / factor, c.in_channels);
    return c.picture_kind == PictureKind::GRAY ? ", or grey ones" : "";
}

// Returns the pictures (count, H, W, K) for --sample, from --cond_file. With --cond they are made of the file's images.
// But if the file already holds small or grey pictures, small ones are only enlarged, and grey ones are not changed.
static std::vector<float> sample_pictures(const Config& c) {
    const int K = c.cond_channels;
    if (c.picture_kind == PictureKind::FILE) return read_images(c, "cond_file", c.cond_file, K, K);
    const Dataset d = open_dataset(c.cond_file);
    const bool full_size = d.H == c.H && d.W == c.W;
    if (full_size && d.C == c.in_channels) {
        const bool has_mask = c.picture_kind == PictureKind::MASK && !c.mask.empty();
        return made_pictures(c, d, c.sample, has_mask ? read_images(c, "mask", c.mask, 1, 1) : std::vector<float>());
    }
    if (c.picture_kind == PictureKind::GRAY && full_size && d.C == 1) return first_images(d, "cond_file", 1, c.sample);
    const int factor = std::max(c.picture_factor, 1);
    const bool is_small = d.H == c.H / factor && d.W == c.W / factor && d.C == c.in_channels;
    if (c.picture_kind != PictureKind::LOWRES || !is_small)
        die("--cond_file %s: its pictures are %dx%dx%d, and --cond %s takes images of %dx%dx%d%s", c.cond_file.c_str(),
            d.H, d.W, d.C, c.cond.c_str(), c.H, c.W, c.in_channels, other_pictures(c).c_str());
    const std::vector<float> small = first_images(d, "cond_file", d.C, c.sample);
    const size_t size = (size_t)d.H * d.W * d.C;
    std::vector<float> pictures;
    for (size_t at = 0; at < small.size(); at += size) {
        const std::vector<float> picture = enlarged_picture(c, &small[at]);
        pictures.insert(pictures.end(), picture.begin(), picture.end());
    }
    return pictures;
}

// Returns the first sample of this rank's k-th microbatch. That is microbatch number k * ranks + rank of the step;
// step_gradients explains why.
static int64_t first_sample(int k, int micro) { return ((int64_t)k * world.size + world.rank) * micro; }

// Images come from an endless stream. Returns which image of the file is at a position of the stream. In training the
// stream consists of epochs: an epoch is all images of the file, in a new random order. Otherwise the stream is the
// file's images in the order of the file, again and again.
static int64_t image_at_position(const Dataset& d, const Config& c, bool training, int64_t position) {
    const int64_t epoch = position / d.count;
    const int64_t in_epoch = position % d.count;
    return training ? permuted_index(c.seed, in_epoch, epoch, d.count) : in_epoch;
}

// Reads the picture that image i is conditioned on into memory at `to`. Returns what read_image returns.
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
    if (world.size > 1) refuse(d->error); // as read_image does
    return false;
}

// Sends n samples of a batch to the device: images (n, C, H, W), labels (n), numbers (n, num_values), and the pictures
// (n, K, H, W) that the images are conditioned on. The numbers of an augmentation are still zeros. The batch is the
// samples at positions first .. first + B - 1 of the stream; this rank sends n = own_images of them. In training, these
// are the rank's microbatches, one after the other, and some images lose their class and their numbers
// (--class_dropout). Outside of training the rank sends all B samples.
// Returns whether all images could be used. If not, nothing was sent.
static bool load_batch(Upload* batch, Dataset* d, const Config& c, bool training, int64_t first, int B) {
    const int micro = c.micro();
    const int own_images = training ? B / world.size : B;
    // Returns which sample of the batch this rank's k-th sample is.
    auto sample = [&](int k) { return training ? first_sample(k / micro, micro) + k % micro : k; };
    auto image = [&](int64_t position) { return image_at_position(*d, c, training, position); };

    // Ask the operating system to fetch the images of later batches, unless it was asked before.
    const int64_t ahead = first + (BATCHES_AHEAD + 1) * (int64_t)B;
    for (d->asked = std::max(d->asked, first); d->asked < ahead; d->asked += B)
        for (int k = 0; k < own_images; k++) {
            const int64_t i = image(d->asked + sample(k));
            for (const Dataset* file : {d, d->cond.get()})
                if (file) posix_fadvise(file->file, file->image_at(i), file->image_bytes(), POSIX_FADV_WILLNEED);
        }

    // The host's buffer may only be filled again after the batch that it held before has been sent.
    wait_for_host_side(batch);
    int* labels = (int*)(batch->host + d->labels_at(own_images));
    float* values = (float*)(batch->host + d->values_at(own_images));
    uint8_t* pictures = batch->host + d->pictures_at(own_images, c);
    // An image loses its class and numbers if its random word is below this.
    const uint32_t classless = dropout_threshold(training ? c.class_dropout : 0);
    const uint32_t step = (uint32_t)(first / B);
    for (int k = 0; k < own_images; k++) {
        const int64_t b = sample(k);
        const int64_t i = image(first + b);
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
    send(batch);
    return true;
}

// =====================================================================================================================
// 10. Model files: weights and checkpoints, initial weights
// A model file consists of a header and then arrays in fp32. Each array holds one number for every parameter. The first
// array is the weights. With HAS_EMA, an average of the weights follows. With HAS_TRAINING, AdamW's two moments and
// further averages follow, and after all arrays the losses of --schedule_sampler. In each array the tensors are in the
// order and the layout of PyTorch's state_dict (docs/FORMATS.md).
//
// The functions here: open_model checks a file, check_size compares it with a network, and read_array reads one of its
// arrays; model_header makes the header of a new file; init_params draws the weights of a new run. Section 12 writes
// model files (save_arrays), and section 13 reads flags from them (take_model_file).

constexpr int MODEL_MAGIC = 20261121;
constexpr int UNET_CU_MODEL_MAGIC = 12345678;

// The bits of SLOT_CONTENTS: what the file holds besides the weights.
constexpr int HAS_EMA = 1;
constexpr int HAS_TRAINING = 2;

// Slots of a header. The slots of flags are in common/flags.h. Some of those slots have a name here, too, because the
// code below uses them. If something needs several slots, its name is that of the first slot.
constexpr int SLOT_CONTENTS = 2;
constexpr int SLOT_CRC = 3;    // the checksum of the whole file, computed with 0 in this slot
constexpr int SLOT_PARAMS = 4; // 8 bytes: the number of parameters
constexpr int SLOT_HEIGHT = 6; // image_size
constexpr int SLOT_WIDTH = 7;  //
constexpr int SLOT_CLASS_COND = 14;
constexpr int SLOT_NUM_CLASSES = 15;
constexpr int SLOT_LEARN_SIGMA = 16;
constexpr int SLOT_LEVELS = 22;      // how many numbers channel_mult has
constexpr int SLOT_MULT = 23;        // channel_mult, MOST_LEVELS floats
constexpr int SLOT_RESOLUTIONS = 31; // how many numbers attention_resolutions has
constexpr int SLOT_ATTENTION = 32;   // attention_resolutions, MOST_LEVELS numbers
constexpr int SLOT_MAX_PERIOD = 40;
constexpr int SLOT_DIFFUSION = 41; // diffusion_steps; slots from here to SLOT_PATCH_SIZE are about the diffusion
constexpr int SLOT_OBJECTIVE = 43;
constexpr int SLOT_VLB_WEIGHT = 47;
constexpr int SLOT_CLASS_DROPOUT = 50;
constexpr int SLOT_P_MEAN = 52;
constexpr int SLOT_P_STD = 53;
constexpr int SLOT_PATCH_SIZE = 56;
constexpr int SLOT_COND_DIM = 58;
constexpr int SLOT_COND_CHANNELS = 60;
constexpr int SLOT_COND = 62; // the number of a PictureKind; the next slot is picture_factor
// The slots from here on are about a run. Except the first two, they are used only with HAS_TRAINING.
constexpr int SLOT_STEP = 64; // 8 bytes
constexpr int SLOT_SEED = 66; // 8 bytes
constexpr int SLOT_BATCH_SIZE = 68;
constexpr int SLOT_MAX_STEPS = 70;
constexpr int SLOT_EMA_RATE = 79; // the rate of the first average
constexpr int SLOT_UPDATES = 81;
constexpr int SLOT_BAD_TOTAL = 82;
constexpr int SLOT_BAD_IN_ROW = 83;
constexpr int SLOT_IMAGES = 84;     // 8 bytes: how many images the data file has
constexpr int SLOT_DATA_CRC = 86;   // the data file's header_crc
constexpr int SLOT_UNUSED_TOO = 87; // one slot
constexpr int SLOT_GUARD = 88;      // 40 bytes
constexpr int SLOT_EMAS = 98;       // how many averages there are besides the first; the next slots are their rates
constexpr int SLOT_SAMPLER = 106;   // schedule_sampler
constexpr int SLOT_ECT = 107;       // with --objective ect: the first slot of its flags
constexpr int SLOT_ECT_END = 113;   // the first slot after them
constexpr int SLOT_COND_CRC = 113;  // with cond_channels: the header_crc of --cond_file; the next slot is cond_noise
constexpr int SLOT_COND_END = 115;  // the first of the slots that are unused, up to SLOT_PATH
constexpr int SLOT_PATH = 128;      // 512 bytes: data_file, a 0, cond_file
constexpr int MOST_LEVELS = 8;      // the most levels of a model, and the most attention_resolutions

// Returns the objective whose number a header holds, or "" if the file is damaged.
static std::string objective_of(const Header& h) {
    const std::vector<std::string> words = choices(*find_flag("objective"));
    const size_t number = h.slot[SLOT_OBJECTIVE];
    return number < words.size() ? words[number] : "";
}

static bool is_ect(const Header& h) { return h.slot[SLOT_MAGIC] == MODEL_MAGIC && objective_of(h) == "ect"; }

// Returns whether a flag is in use with this header's settings. If it is not in use, its slot is 0.
static bool slot_is_used(const Header& h, const Flag& f) {
    const bool classes = h.slot[SLOT_CLASS_COND] == 1;
    if (f.slot == SLOT_NUM_CLASSES) return classes;
    if (f.slot == SLOT_CLASS_DROPOUT) return classes || h.slot[SLOT_COND_DIM] > 0;
    if (f.slot == SLOT_VLB_WEIGHT) return h.slot[SLOT_LEARN_SIGMA] == 1;
    const std::string objectives = f.objectives;
    if (objectives.empty()) return true;
    return ("|" + objectives + "|").find("|" + objective_of(h) + "|") != std::string::npos;
}

// Makes a header that holds the configuration (docs/FORMATS.md lists the slots). If a flag's value is a word, the
// word's number in the flag's list is stored. take_model_file reads the header.
static Header model_header(const Config& config, int contents, int64_t step) {
    Header h{{MODEL_MAGIC, 1, contents}}; // 1: the version of the format
    h.set(SLOT_STEP, step);
    h.set(SLOT_SEED, config.seed);
    h.slot[SLOT_HEIGHT] = config.H;
    h.slot[SLOT_WIDTH] = config.W;
    for (const Flag& f : FLAGS) { // slot_is_used reads the slots of earlier flags
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

// Returns whether two values of a flag mean the same, such as 64 and 64x64; "1,2" and "1,2.0"; "8,16" and "16,8".
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

// A model file that was checked. Its arrays are read later, when the network has been built. They are numbered in the
// file's order: 0 is the weights, 1 is the first average, 2 and 3 are AdamW's moments, and from 4 on there are further
// averages.
struct ModelFile : InputFile {
    // Returns whether the file holds everything that these bits stand for (HAS_EMA, HAS_TRAINING).
    bool has(int bits) const {
        const bool ours = header.slot[SLOT_MAGIC] == MODEL_MAGIC;
        return ours && (header.slot[SLOT_CONTENTS] & bits) == bits;
    }

    // These three return how many averages the file holds, the rate of the k-th average, and the number of its array.
    int emas() const {
        if (has(HAS_EMA | HAS_TRAINING)) return 1 + header.slot[SLOT_EMAS];
        return has(HAS_EMA);
    }
    float ema_rate(int k) const { return header.get<float>(k ? SLOT_EMAS + k : SLOT_EMA_RATE); }
    static int ema_array(int k) { return k ? 3 + k : 1; }

    // Returns how many floats follow the arrays: the losses of --schedule_sampler.
    size_t history() const {
        const bool keeps_losses = has(HAS_TRAINING) && header.slot[SLOT_SAMPLER];
        return keeps_losses ? (size_t)header.slot[SLOT_DIFFUSION] * (HISTORY + 1) : 0;
    }

    // Returns the run's counters and its guard, as they were when the file was written.
    StepState state() const {
        StepState s{};
        s.step = header.get<int64_t>(SLOT_STEP);
        s.updates = header.slot[SLOT_UPDATES];
        s.bad_total = header.slot[SLOT_BAD_TOTAL];
        s.bad_in_row = header.slot[SLOT_BAD_IN_ROW];
        s.guard = header.get<Guard>(SLOT_GUARD);
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

// Checks the lengths of the header's lists. Checks also that every slot that has no meaning in this file is 0.
static void check_lists(const ModelFile& m) {
    const int* s = m.header.slot;
    check_field(m.path, "levels", s[SLOT_LEVELS], 1, MOST_LEVELS);
    check_field(m.path, "attention resolutions", s[SLOT_RESOLUTIONS], 0, MOST_LEVELS);
    // A list with fewer numbers than slots uses only its first slots.
    const bool training = s[SLOT_CONTENTS] & HAS_TRAINING;
    auto unused = [&](int first, int end) {
        check_unused(m.header, first, end, m.path, ": use an earlier checkpoint");
    };
    unused(SLOT_MULT + s[SLOT_LEVELS], SLOT_RESOLUTIONS);
    unused(SLOT_ATTENTION + s[SLOT_RESOLUTIONS], SLOT_MAX_PERIOD);
    if (training) unused(SLOT_UNUSED_TOO, SLOT_GUARD);
    else unused(SLOT_BATCH_SIZE, 256);
    unused(SLOT_EMAS + m.emas(), SLOT_SAMPLER);
    unused(is_ect(m.header) ? SLOT_ECT_END : SLOT_ECT, SLOT_COND_CRC);
    unused(s[SLOT_COND_CHANNELS] ? SLOT_COND_END : SLOT_COND_CRC, SLOT_PATH);
}

// Opens a model file and checks all that can be checked without its network.
static ModelFile open_model(const std::string& path) {
    ModelFile m;
    m.open(path, "checkpoints are called model_STEP.bin");
    const int* s = m.header.slot;
    const int magic = s[SLOT_MAGIC];
    const int version = s[SLOT_VERSION];
    if (magic == UNET_CU_MODEL_MAGIC) return m; // a file of unet.cu has no checksum; check_size checks its size
    const char* hint = "python train_unet.py --convert makes one from .pt and .safetensors";
    must(magic == MODEL_MAGIC, path,
         text("is not a model file (it starts with %d, not %d); %s", magic, MODEL_MAGIC, hint));
    must(version == 1, path, text("is a model file of version %d and this program reads version 1", version));

    // Check the numbers that the file's size depends on. The checksum comes later, so if one of these numbers is wrong,
    // bytes of the file were damaged.
    const int64_t n = m.header.get<int64_t>(SLOT_PARAMS);
    const int contents = s[SLOT_CONTENTS];
    const bool training = contents & HAS_TRAINING;
    check_field(path, "contents", contents, 0, HAS_EMA | HAS_TRAINING);
    check_field(path, "parameters", n, 1, (int64_t)1 << 40);
    if (training) check_field(path, "further averages", s[SLOT_EMAS], 0, MORE_EMAS);

    // Check the size, and the checksum of the whole file.
    const std::string earlier = ": move it away and use an earlier checkpoint";
    const int arrays = 1 + m.emas() + (training ? 2 : 0);
    const size_t size = 1024 + (arrays * n + m.history()) * sizeof(float);
    must(m.size == size, path,
         text("is %zu bytes long, but its header speaks of %zu; it was cut short or damaged", m.size, size) + earlier);
    Header zeroed = m.header;
    zeroed.slot[SLOT_CRC] = 0;
    const uint32_t crc = m.crc(crc32(0, zeroed.slot, 1024), 1024);
    must(crc == (uint32_t)s[SLOT_CRC], path, "its checksum is wrong, so it was damaged" + earlier);
    // From here on, the file holds what was written. If a number is wrong, the program that wrote the file was wrong.
    check_lists(m);
    return m;
}

// Copies one parameter between our layout and PyTorch's. The layouts differ for two kinds of parameters: our layout is
// (N, I, J, contiguous) and PyTorch's is (N, J, I, contiguous): so many floats lie side by side in both layouts.
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

// Checks that the number of parameters in a model file is that of this network.
static void check_size(const ModelFile& m, const UNet& net) {
    const size_t n = net.num_params;
    const int* s = m.header.slot;
    bool holds = m.header.get<size_t>(SLOT_PARAMS) == n;
    if (s[SLOT_MAGIC] == UNET_CU_MODEL_MAGIC) {
        // A header of unet.cu does not hold the number of parameters, so the file's size is compared with the size of
        // all parameters. If slot 8 or 9 is not 0, moments may follow the weights. Slot 4 is the number of the output's
        // channels.
        const size_t bytes = 1024 + n * sizeof(float);
        const bool has_moments = s[8] || s[9];
        const bool size_fits = m.size == bytes || (has_moments && m.size > bytes);
        holds = size_fits && s[4] == net.config.out_channels();
    }
    if (!holds) die("%s: does not hold the %zu parameters of its model", m.path.c_str(), n);
}

// Returns how n floats are divided among ranks, and the slice of one rank (see Slice). A single rank owns all floats,
// in one segment.
static Slice slice_of(size_t n, int rank = 0, int ranks = 1) {
    int segments = 1;
    if (ranks > 1) segments = world.direct ? 16 : 8; // fewer with NCCL, which needs a call for each segment
    const size_t row = STRETCH * segments * ranks;   // the floats of one stretch for every rank in every segment
    const size_t stretches = (n + row - 1) / row;    // rounded up
    return Slice{n, segments, (int)stretches, rank, ranks};
}

// Copies a rank's slice of a flat array into device memory.
static void copy_slice(float* device, const std::vector<float>& flat, const Slice& own) {
    for (int s = 0; s < own.segments; s++) {
        const size_t first = own.at(s, own.rank);
        if (first >= own.n) continue; // this part is padding
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

// Returns four initial values of a parameter: elements 4 n to 4 n + 3 in the order of PyTorch's layout, so that
// train_unet.py can draw the same weights. bound: uniform values lie between -bound and bound.
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

// Returns initial weights. Their distribution is that of guided-diffusion:
//   convolutions, linear layers   weights and biases are uniform between -1 / sqrt(fan_in) and 1 / sqrt(fan_in)
//   class embeddings              weights are standard normal
//   norms                         weights are 1, biases are 0
//   last layers                   weights and biases are 0 in the last layer of each residual block, of each attention
//                                 block, and of the network
static std::vector<float> init_params(const UNet& net) {
    std::vector<float> flat(net.flat_size), value;
    float bound = 0; // 1 / sqrt(fan_in) of the latest weight; it is also used for the bias that follows the weight
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

// =====================================================================================================================
// 11. A training step: draw, diffuse, forward, loss, backward, judge, update
//
//   copy stream   images of the next batch -> device
//   main stream   t, noise; q_sample | first ... last layer | loss | last ... first layer back | norm | judge | AdamW
//                                    |  ^ waits: embedding         |  ^ waits, before memory is reused
//   side stream                      +-> embedding                +-> weight gradients of convolutions -+
//   to others                                                         these, as they are complete        | weights
//                 \___ a microbatch: again for the next one, whose gradients are added ________________/
//   host          reads images, replays all this as one graph, up to STEPS_AHEAD steps ahead of what the log has seen
//
// The functions, in the order in which they run: make_trainer runs once. Then train_step runs for each step. It calls
// load_batch, step_gradients (which calls forward_and_loss and unet_backward), judge_step and update_slice. From time
// to time validation_loss is called.

// ---------------------------------------------------------------------------------------------------------------------
// --- the learning rate, the verdict on a step, averages of the weights
// The functions of this part run on the device (a GPU, or the CPU), so that no step waits for the host.

// Returns the factor by which --lr is multiplied at a step (counted from 0). During warmup_steps it rises to 1. After
// that it stays 1, or it falls to 0 along a line or along half a cosine.
HD static inline double lr_factor(const AdamW& h, int64_t step) {
    double warm = 1; // the factor of the warm-up
    if (h.warmup_steps > 0) warm = fmin(1.0, (double)(step + 1) / h.warmup_steps);
    const double steps = fmax((double)(h.max_steps - h.warmup_steps), 1.0); // the number of steps after the warm-up
    const double progress = fmin(fmax((step - h.warmup_steps) / steps, 0.0), 1.0);
    switch (h.lr_schedule) {
    case LrSchedule::CONSTANT: return warm;
    case LrSchedule::LINEAR: return warm * (1 - progress);
    case LrSchedule::COSINE: return warm * 0.5 * (1 + cos(M_PI * progress));
    }
    ALL_CASES_RETURN
}

// A loss or a norm is suspicious if it is not finite. After 100 healthy steps it is also suspicious if it is larger
// than twice the running mean plus ten standard deviations. In healthy training, losses and norms do not become so
// large.
HD static inline bool suspicious(double x, double n, double mean, double var) {
    if (!(fabs(x) <= DBL_MAX)) return true;
    return n >= 100 && x > 2 * mean + 10 * sqrt(var);
}

// Updates a running mean and variance with the value x. They describe about the latest 1 / rate values.
HD static inline void running_moments(double* mean, double* var, double x, double rate) {
    const double d = x - *mean;
    *mean += rate * d;
    *var = (1 - rate) * (*var + rate * d * d);
}

// Returns whether a step is healthy: neither its loss nor its gradient's norm is suspicious. If it is healthy, the
// guard's means and variances are updated with this loss and this norm.
HD static inline bool healthy(Guard* g, double loss, double norm) {
    if (suspicious(loss, g->n, g->mean_loss, g->var_loss)) return false;
    if (suspicious(norm, g->n, g->mean_norm, g->var_norm)) return false;
    const double rate = fmax(1 / (g->n + 1), 0.01);
    running_moments(&g->mean_loss, &g->var_loss, loss, rate);
    running_moments(&g->mean_norm, &g->var_norm, norm, rate);
    g->n++;
    return true;
}

// The losses of samples, summed by quarter of the noise levels.
struct LossSums {
    double sum[4];
    int count[4];
};
HD static inline void add_loss(LossSums* s, double loss, int quarter) {
    for (int q = 0; q < 4; q++) { // a loop over constant indices, so that a kernel can keep s in registers
        if (q != quarter) continue;
        s->sum[q] += loss;
        s->count[q]++;
    }
}

// Completes the state of a step, whose grad_norm is already set. Sets the losses, the learning rate, the counters of
// steps, and `ok`: whether the weights may be changed.
HD static inline void judge_batch(StepState* state, const LossSums& losses, AdamW h, int B) {
    state->loss = (losses.sum[0] + losses.sum[1] + losses.sum[2] + losses.sum[3]) / B;
    for (int q = 0; q < 4; q++) {
        state->loss_q[q] = losses.count[q] ? losses.sum[q] / losses.count[q] : 0;
        state->count_q[q] = losses.count[q];
    }
    state->ok = healthy(&state->guard, state->loss, state->grad_norm);
    state->lr = (float)(h.lr * lr_factor(h, state->step));
    state->updates += state->ok;
    state->bad_total += !state->ok;
    state->bad_in_row = state->ok ? 0 : state->bad_in_row + 1;
}

// Returns a weight's new average over all updates. ema: its average before this update; p: the weight's newest value.
// With a rate of up to 1, the average is exponential. With a rate above 1, the value after update k has a weight about
// proportional to k^rate (Karras et al. 2024, eq. 2). step: what power_step returns.
HD static inline float ema_step(float ema, float p, float rate, float step) {
    return rate > 1 ? ema + step * (p - ema) : rate * ema + step * p;
}

// Returns the share of the newest weights in the average. It is 1 - rate or, for a power function,
// 1 - (1 - 1 / updates)^(rate + 1).
HD static inline float power_step(float rate, int64_t updates) {
    return rate > 1 ? (float)-expm1((rate + 1.0) * log1p(-1.0 / updates)) : 1 - rate;
}

// ---------------------------------------------------------------------------------------------------------------------
// --- what a trainer holds
// All that changes from step to step lies in device memory, so that a step can be recorded once and replayed. There is
// memory for two batches: one batch is copied to the device while the model is trained on the other batch.
// A slice is this rank's part of a flat array of all parameters. If there is one rank, the slice is the whole array. In
// the shapes below, B is the batch size, and micro is the number of samples in a microbatch.
struct Trainer {
    UNet net;
    Dataset data;
    Objective objective;
    AdamW adamw;
    Slice own; // this rank's part of the flat arrays

    // Flat arrays. Each holds one number for each parameter.
    // The weights in fp32. If there are several ranks and the copy is not params itself, only the first plain_size
    // weights and this rank's slice are valid.
    float* params;
    float* grads;         // the gradients of the current microbatch
    act *copy, *ema_copy; // copies of the weights and of their first average, which the network reads; see Weights
    Fp8Weights fp8;       // --precision fp8: copies of the weights that training steps read
    std::vector<WeightRounding> fp8_works; // the convolutions whose weights fp8 holds
    float* received; // the other ranks' gradients of this rank's slice (RankGradients); null: there is one rank
    // A flat array with the sum of all gradients of the step, at the places of this rank's slice. With several ranks
    // `sum` is the same array as `received`: the other ranks' gradients lie at the other ranks' places, where the sum
    // has nothing. With one rank it is an array of its own or, if the batch is one microbatch, `grads`.
    float* sum;
    // Each of these arrays is a slice: it holds this rank's part.
    float *m, *v;             // AdamW's moments
    std::vector<float*> emas; // the averages, one for each --ema_rate

    double* squares;            // for each stretch of the step's gradient, in all ranks' slices: the sum of its squares
    StepState *state, *records; // the state after the newest step, and the states after the latest RECORDS steps
    Upload batch[2];            // this rank's images, labels, numbers and pictures of a batch: see load_batch
    Graph graph[2];             // graph[i]: a training step on batch[i]
    float* target;              // (micro, H, W, C): what the network should answer
    float* t;                   // (B): what the network is told
    NoiseLevel* levels;         // (B)
    int* quarters;              // (B): in which quarter each noise level lies
    double* loss;               // (B): the loss of each sample
    // --augment
    Augmentation* augmentations; // (micro); null: images are not changed
    float* canvas;               // (micro, C, fine_size(H), fine_size(W)), see augment_images
    float* augmented;            // (micro, C, H, W)
    // --cond_channels
    float* cond;           // (micro, H, W, K): the pictures as the network reads them; null: there are none
    float* augmented_cond; // (micro, K, H, W), with --augment
    float* small;          // (micro, H / factor, W / factor, C), with --cond lowres
    // --objective ect
    NoiseLevel* teachers; // (micro): the teachers' levels; null: there is no tuning
    float* teacher_t;     // (micro): what the teacher is told
    int64_t* last_step;   // the run's last step. Validation uses that step's gap between student and teacher.
    // --schedule_sampler loss-second-moment
    float* history;     // (T, HISTORY + 1), see remember_losses; null: --schedule_sampler uniform
    double* rms_losses; // (T), see draw_weighted_level
};
constexpr int RECORDS = 128;

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

// Makes the network and all arrays of a trainer. The arrays are zero; start_weights or restore fills them.
static Trainer make_trainer(const Config& c, const Dataset& data) {
    Trainer tr{};
    tr.net = build_unet(c);
    tr.data = data;
    const int copies = c.guided() ? 2 : 1; // with guidance, the network computes each image of a grid twice
    plan_memory(&tr.net, std::max(c.micro(), copies), true);
    tr.objective = make_objective(c);
    tr.adamw = optimiser_settings(c);
    const int N = world.size;
    const int samples = std::max(c.batch_size, N * tr.net.B); // enough for a step, and for validation on all ranks
    tr.own = slice_of(tr.net.flat_size, world.rank, N);
    const size_t whole = tr.own.whole(), stretches = whole / STRETCH;
    tr.grads = device_alloc<float>(whole);
    // Ranks write to each other's params, squares, loss and copy. The first three are allocated together.
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
    // In fp32, make_copy makes no new array: ema_copy is then the array that whole_array returns for the average.
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

// ---------------------------------------------------------------------------------------------------------------------
// --- a step

// The images of a batch, or the pictures that they are conditioned on, on the device.
struct Pixels {
    const void* data; // (B, channels, H, W)
    int bytes;        // the size of a value, 1 or 4
};

// --augment: changes B images, each of `channels` channels, and returns the result, which is written to `out`. The
// changes depend only on the key, so an image and its picture are changed in the same way. told: where the numbers of
// the first image's change are written. Without --augment, the images are returned as they are.
static Pixels augmented(Trainer* tr, float* out, Pixels images, float* told, int channels, int B, RandomKey key) {
    const Config& c = tr->net.config;
    if (!c.augment) return images;
    key.purpose = RANDOM_AUGMENT;
    augment_images(out, tr->augmentations, tr->canvas, told, c.num_values(), images.data, c.augment, key, B, channels,
                   c.H, c.W, images.bytes);
    return Pixels{out, sizeof(float)};
}

// Puts B pictures where the network reads them (net->cond). With --cond they are made of the images; otherwise they are
// copied from `pictures`. In training, a picture is mirrored if its image is mirrored, and some pictures are left out.
static void show_pictures(Trainer* tr, Pixels images, Pixels pictures, int B, RandomKey key, bool training) {
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

// Computes the loss of samples first .. first + B - 1 of a step. images: their images; bytes: the size of a value.
// Before the call, their levels have been drawn, and their labels and numbers have been set in net. Writes the losses
// to tr->loss + first, and the gradient of the loss to output_gradient. In training, that is the gradient of the mean
// over the step's whole batch. Validation uses other random draws, and neither dropout nor flips nor FP8. With
// --objective ect, the teacher's answer is computed first, with the same draws.
static void forward_and_loss(Trainer* tr, const Objective& o, const void* images, int bytes, int first, int B,
                             RandomKey key, Dropout dropout, bool training) {
    const Config& c = tr->net.config;
    UNet* net = &tr->net;
    RandomKey level_key = key;
    RandomKey noise_key = key;
    RandomKey flip_key = key;
    level_key.purpose = training ? RANDOM_TIMESTEP : RANDOM_VAL_TIMESTEP;
    noise_key.purpose = training ? RANDOM_NOISE : RANDOM_VAL_NOISE;
    flip_key.purpose = RANDOM_FLIP;
    const bool flips = training && c.random_flip;
    float* const x = tensor_data<float>(net, net->input);
    float* const out = tensor_data<float>(net, net->output);
    // Adds noise to the images, as `levels` defines it, and computes the network's answer. teacher: the teacher's
    // answer, which is a part of the target; null: there is no teacher.
    auto forward = [&](float* t, const NoiseLevel* levels, const float* teacher) {
        q_sample_forward(x, tr->target, levels, teacher, images, // the next line begins with the random draws
                         flips, noise_key, flip_key, B, c.in_channels, c.H, c.W, bytes);
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

// With several ranks: every rank sends its parts of the first n elements of a flat array to all other ranks.
// bytes: the size of STRETCH elements of this array. slice: this rank's parts, one after the other; null: they are
// already in their places in the flat array.
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

// Computes this rank's slice of the gradient of a step. The result is in tr->sum.
//
// Why N ranks compute the same bits as one. Sums of floats depend on their order, so the results of a run on N ranks
// could be rounded differently from those of a run on one rank. But they are rounded in the same way, because all that
// is computed depends only on the batch and the microbatch, and not on which rank computes it. (So the runs must have
// the same microbatch. Without --microbatch, the microbatch is a rank's share of the batch, which depends on N.)
//
// 1. The same draws. Noise, noise levels, flips, dropout, and the choice of a sample's image: each is a function of the
//    seed, the step and the sample's index in the step. No draw depends on the rank that draws it, or on earlier draws.
// 2. The same parts. A microbatch is the smallest unit of work. One rank computes it as a whole, by the same kernels on
//    the same number of images. So its gradient is the same whichever rank computes it. The loss is divided by the size
//    of the whole batch before the backward pass, and no later factor depends on N. (With --precision fp8, numbers are
//    rounded with factors that are constants, or depend on the whole batch's size: choose_gradient_factor.)
// 3. The same order of the sum. Let g0, g1, g2, ... be the gradients of the step's microbatches, in the order of the
//    samples. The step's gradient is ((g0 + g1) + g2) + ..., rounded to fp32 after each addition. A single rank
//    computes the gradients one after the other, and adds each to the sum. With N ranks, rank r computes g(r),
//    g(N + r), g(2 N + r), ... (first_sample). So in round k of the loop below, the ranks hold g(k N) to
//    g(k N + N - 1), which are the next terms of the sum. Every rank sends each part of its gradient to the rank that
//    owns this part. The owner adds its own part and those that it receives to its sum, in the order of the ranks
//    (sum_gradients). So each float is summed by one rank, in the order in which a single rank would sum it. The
//    kernels that compute a microbatch's gradient never add it to the sum, because each of them would add in another
//    order.
// 4. The same norm. The squares are summed by stretches of STRETCH floats at fixed places of the flat array. A stretch
//    belongs to one rank. The order in which the rank sums it does not depend on the rank's other stretches. All ranks
//    receive the sums of all stretches and add them up in the order of the array (judge_step). The length of the padded
//    array depends on N, but the padding is zero, and x + 0 = x.
// 5. The same decision. Every rank holds the loss of every sample, in the order of the samples, and the norm. So all
//    ranks compute the same verdict on the step, the same clipping and the same statistics, without sending messages.
// 6. The same update. AdamW and the averages treat each parameter separately, so it does not matter which rank owns it.
//    The owner sends the new weight to all ranks.
//
// This holds under two conditions: the same microbatch and batch, and the same kind of device. A run that is resumed on
// another number of ranks keeps its microbatch (check_microbatch).
static void step_gradients(Trainer* tr, const Upload& batch) {
    const Config& c = tr->net.config;
    const int B = c.micro();
    const int N = world.size;
    const int images = c.batch_size / N; // the number of this rank's images
    const uint64_t seed = (uint64_t)c.seed;
    const Slice& own = tr->own;
    mark({"draw t, noise; q_sample"}); // only dev/bench listens to `mark`
    const int64_t* const step = &tr->state->step;
    draw_levels(tr->levels, tr->t, tr->quarters, c.batch_size, tr->objective, {seed, RANDOM_TIMESTEP, step, 0});
    int* const labels = (int*)(batch.device + tr->data.labels_at(images));
    float* const values = (float*)(batch.device + tr->data.values_at(images));
    if (!tr->fp8_works.empty()) {
        mark({"weights to FP8"});
        round_weights((uint8_t*)tr->fp8.weights, (uint8_t*)tr->fp8.turned, tr->copy, tr->fp8_works);
        mark({"draw t, noise; q_sample"});
    }
    for (int k = 0; k < images / B; k++) { // the microbatches
        const int first = (int)first_sample(k, B);
        const Dropout dropout{c.dropout, seed, step, first};
        const RandomKey key{seed, 0, step, first};
        // On a single rank, the gradients of the first microbatch are written to the sum directly.
        float* const grads = N == 1 && k == 0 ? tr->sum : tr->grads;
        if (k > 0) {
            mark({"draw t, noise; q_sample"});
            meet(); // all ranks have read `received`, so it may be overwritten
        }
        tr->net.labels = labels + k * B;
        tr->net.values = values + (size_t)k * B * c.num_values();
        float* const told = tr->net.values + c.cond_dim;
        const Pixels read{batch.device + k * B * tr->data.image_bytes(), tr->data.bytes};
        const Pixels shown = augmented(tr, tr->augmented, read, told, c.in_channels, B, key);
        Pixels pictures{};
        if (const Dataset* const cond = tr->data.cond.get()) {
            const uint8_t* const first_picture = batch.device + tr->data.pictures_at(images, c);
            pictures = {first_picture + k * B * cond->image_bytes(), cond->bytes};
            pictures = augmented(tr, tr->augmented_cond, pictures, told, c.cond_channels, B, key);
        }
        if (c.cond_channels) show_pictures(tr, shown, pictures, B, key, true);
        forward_and_loss(tr, tr->objective, shown.data, shown.bytes, first, B, key, dropout, true);

        // Gradients are complete from the last layer to the first, so segments are sent from the last to the first.
        int unsent = own.segments; // the segments from this one on have been sent to their owners
        const std::function<void(size_t, Stream*)> send_gradients = [&](size_t complete_from, Stream* stream) {
            while (unsent && own.at(unsent - 1, 0) >= complete_from) {
                unsent--;
                const size_t begin = own.at(unsent, 0);
                if (begin >= own.n) continue; // this segment is padding
                all_to_all(tr->received + begin, grads + begin, own.each() * sizeof(float), stream);
            }
        };
        // With NCCL the gradients are sent after the backward pass, because NCCL would take multiprocessors from the
        // kernels of that pass.
        unet_backward(&tr->net, Weights{tr->params, tr->copy, tr->fp8}, grads, dropout, B,
                      world.direct ? send_gradients : nullptr);
        if (N > 1) {
            mark({"gradients to their ranks"});
            begin_exchange();
            all_gather(tr->loss + k * N * B, tr->loss + first, B * sizeof(double), MAIN_STREAM);
            send_gradients(0, MAIN_STREAM);
            end_exchange();
        }
        mark({"gradient norm"});
        sum_gradients(tr->sum, everywhere(tr->squares), RankGradients{grads, tr->received, own}, k > 0);
    }
    if (world.direct) meet();
    else if (N > 1) gather(tr->squares, nullptr, sizeof(double), own, own.n);
}

// Does the optimiser's part of a step, for this rank's slice. Then all ranks exchange their new weights in the form
// that kernels read: the first plain_size weights in fp32, and the other weights in the copy.
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
    adamw_update(update, tr->state, tr->adamw, own);
    for (size_t k = 1; k < tr->emas.size(); k++) ema_update(tr->emas[k], tr->params, tr->state, c.emas[k], own);
    if (world.size == 1) return;
    mark({"weights to all ranks"});
    if (world.direct) return meet(); // adamw_update has written them to all ranks
    begin_exchange();
    if (weights_have_copy()) gather(tr->copy, nullptr, STRETCH * act_bytes(), own, own.n);
    gather(tr->params, nullptr, STRETCH * sizeof(float), own, plain);
    end_exchange();
}

// Returns a whole flat array, of which each rank holds a slice. The slices are gathered in tr.grads, where they stay
// until the next step. Only the slices of the weights (params) are gathered in their own array.
static float* whole_array(const Trainer& tr, float* array) {
    if (world.size == 1) return array;
    float* const flat = array == tr.params ? array : tr.grads;
    come_to("gathering weights, averages or moments");
    gather(flat, array == flat ? nullptr : array, STRETCH * sizeof(float), tr.own, tr.own.n);
    return flat;
}

// Starts a training step. step: the number of steps that were started before. Returns false if the step's images can't
// be read.
static bool train_step(Trainer* tr, int64_t step) {
    const Config& c = tr->net.config;
    const int B = c.batch_size;
    const int T = c.diffusion_steps;
    Upload* batch = &tr->batch[step % 2];
    come_to("a training step");
    if (!load_batch(batch, &tr->data, c, true, step * B, B)) return false;
    replay(&tr->graph[step % 2], [&] {
        step_gradients(tr, *batch);
        mark({"judge the step"});
        judge_step(tr->state, tr->squares, tr->own.whole() / STRETCH, tr->loss, tr->quarters, tr->adamw, B);
        if (tr->history) update_rms_losses(tr->rms_losses, tr->history, tr->levels, tr->loss, tr->state, T, B);
        mark({"AdamW, EMA"});
        update_slice(tr);
        mark({"record the step"});
        next_step(&tr->state->step);
        record_step(tr->records, tr->state, RECORDS);
        mark({""});
    });
    release(batch);
    return true;
}

// Returns the mean loss of a data set's first images, or NaN if they can't be read. t and noise are the same in every
// call, so that the losses of different calls can be compared. For the same reason, the gap between student and teacher
// (--objective ect) is always that of the run's last step.
static double validation_loss(Trainer* tr, Dataset* val) {
    const Config& c = tr->net.config;
    const int count = (int)std::min<int64_t>(val->count, 512);
    const int most = tr->net.B; // the largest number of images in a rank's batch
    const int N = world.size;
    std::vector<double> losses(count);
    static int64_t* const zero = device_alloc<int64_t>(1); // zero and batch are allocated once and used by all calls
    static Upload batch = make_upload(val->batch_bytes(most, c));
    val->asked = 0; // ask for the images again: the system may have dropped them from memory since the last call
    Objective objective = tr->objective;
    objective.rms_losses = nullptr;
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
            if (c.cond_channels) show_pictures(tr, images, pictures, B, key, false);
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
    return std::accumulate(losses.begin(), losses.end(), 0.0) / count;
}

// =====================================================================================================================
// 12. A run: log, guard, checkpoints, resume, samples
// A run writes these files into its output folder (--output_dir):
//   index.html        a page that shows the run in a browser (host/page.h)
//   log.csv           a row for each step
//   samples_STEP.png  a grid of samples, every --sample_interval steps
//   model_STEP.bin    a checkpoint, from which the run can be resumed, every --save_interval steps
//   ema_STEP.bin      two averages of the weights, every --ema_snapshots steps
//   best.bin          with --keep_best: the checkpoint that has the lowest validation loss
// If there are several ranks, only rank 0 writes. A full disk does not end a run at once: what could not be written is
// kept in memory and tried again.
//
// In the order in which they run: train makes the run; start_weights or restore fills its arrays; then run_step is
// called again and again. run_step calls train_step (section 11). When something is due, it also calls collect_steps,
// which logs the steps that the device has done, and then save_checkpoint, save_snapshot or save_grid. At the end
// finish_complete or finish_stopped is called. Without a run, sample_and_stop draws images.

// A checkpoint that can't be written is tried again every RETRY_AFTER seconds, for PATIENCE seconds at most, while
// training goes on. Ten minutes are enough for somebody who sees the message to make room. If nobody makes room, the
// run ends; then ten minutes of training are lost, not a night. At the end of a run there is nothing left to train
// during the wait, and somebody who has stopped a run may soon kill it. Therefore the wait is shorter there.
constexpr double PATIENCE = 600;
constexpr double PATIENCE_AT_THE_END = 15;
constexpr double RETRY_AFTER = 5;

// ---------------------------------------------------------------------------------------------------------------------
// --- the log in memory, as the page shows it

constexpr char LOG_COLUMNS[] = "step,loss,lr,grad_norm,ms,loss_q0,loss_q1,loss_q2,loss_q3,val_loss,seconds";

// The numbers of some of these columns.
enum LogColumn { COLUMN_STEP, COLUMN_LOSS, COLUMN_GRAD_NORM = 3, COLUMN_MS, COLUMN_VAL_LOSS = 9, COLUMN_SECONDS };
using LogValues = std::array<double, COLUMN_SECONDS + 1>; // a row's values; NaN: the row has no value in this column
static_assert(std::ranges::count(LOG_COLUMNS, ',') == COLUMN_SECONDS, "a column needs its place in LogColumn");

// Returns the values of a row of log.csv. A value that can't be read becomes 0, and a missing value becomes NaN.
static LogValues parse_row(const std::string& row) {
    std::istringstream fields(row); // with commas between them
    std::string field;
    LogValues values;
    for (double& value : values) {
        const bool there = std::getline(fields, field, ',') && !field.empty();
        value = there ? atof(field.c_str()) : NAN;
    }
    return values;
}

// Summarises a few neighbouring rows of log.csv for the page. While a run is short, each part summarises one row. The
// arrays hold one element for each of the nine columns from loss to val_loss.
struct LogPart {
    int64_t first;   // the first row's step
    int64_t last;    // the last row's step
    int64_t skipped; // how many of these steps were skipped, because the guard found them bad
    double low;      // the lowest loss
    double high;     // the highest loss
    double seconds;  // the length of the run when the last of these steps was done
    double sum[9];   // the sum of a column's values
    int n[9];        // how many rows have a value in this column

    // Adds the rows of `next`, which follow the rows of this part.
    void join(const LogPart& next) {
        last = next.last;
        skipped += next.skipped;
        low = std::min(low, next.low);
        high = std::max(high, next.high);
        seconds = next.seconds;
        for (int k = 0; k < 9; k++) {
            sum[k] += next.sum[k];
            n[k] += next.n[k];
        }
    }
};

// Summarises a log of any length in fewer than MAX_PARTS parts. Each part summarises the same number of rows; only the
// last part may summarise fewer. When the number of parts reaches MAX_PARTS, each pair of neighbouring parts is joined
// into one part.
struct LogSummary {
    static constexpr size_t MAX_PARTS = 4096;
    std::vector<LogPart> parts;
    int64_t rows = 1;   // how many rows a part summarises; this number is doubled when parts are joined
    Guard guard{};      // judges the rows again, because a row does not say whether its step was skipped
    double mean = 0;    // the mean loss of about the latest tenth of the steps, but of at most about 50 steps
    double seconds = 0; // the length of the run when the last row's step was done
    void add(const std::string& row);
};

// Returns the part of a log that consists of one row. seconds: the length of the run. skipped: the guard found the step
// bad.
static LogPart part_of_row(const LogValues& values, double seconds, bool skipped) {
    const int64_t step = (int64_t)values[COLUMN_STEP];
    LogPart part{step, step, skipped, INFINITY, -INFINITY, seconds, {}, {}};
    for (int k = 0; k < 9; k++) {
        const double value = values[COLUMN_LOSS + k];
        const bool is_counted = k > 0 || !skipped; // a skipped step's loss is left out
        if (!is_counted || !std::isfinite(value)) continue;
        part.sum[k] = value;
        part.n[k] = 1;
    }
    if (part.n[0]) {
        part.low = values[COLUMN_LOSS];
        part.high = values[COLUMN_LOSS];
    }
    return part;
}

// Adds a row, which must be the next row of the log.
void LogSummary::add(const std::string& row) {
    const LogValues values = parse_row(row);
    const double loss = values[COLUMN_LOSS];
    const double ms = values[COLUMN_MS];
    const double logged = values[COLUMN_SECONDS];
    // The length of the run. Older programs wrote no seconds into a row. For such a row, the time of its step is added.
    if (logged >= seconds && logged < BIG) seconds = logged;
    else if (ms > 0 && ms < BIG) seconds += ms / 1000;

    // The run's own guard has judged the step by the same rule.
    const bool skipped = !healthy(&guard, loss, values[COLUMN_GRAD_NORM]);
    const LogPart part = part_of_row(values, seconds, skipped);
    // The share of the newest of n losses in the mean is 10 / (n + 9). Then the weight of the k-th loss is about
    // proportional to k^9. From n = 491 on the share stays 0.02, so that the mean depends on about the last fifty
    // steps.
    const double share = std::max(10 / (guard.n + 9), 0.02);
    if (part.n[0] && std::fabs(loss) < 1e9) mean += (loss - mean) * share;

    // The row is added to the last LogPart if that part still has room. Otherwise the row becomes a new part.
    const bool fits = !parts.empty() && parts.back().last - parts.back().first + 1 < rows;
    if (fits) return parts.back().join(part);
    parts.push_back(part);
    if (parts.size() < MAX_PARTS) return;
    for (size_t i = 0; i < MAX_PARTS / 2; i++) {
        parts[i] = parts[2 * i];
        parts[i].join(parts[2 * i + 1]);
    }
    parts.resize(MAX_PARTS / 2);
    rows *= 2;
}

// ---------------------------------------------------------------------------------------------------------------------
// --- what a run holds

// What host/page.h needs, in addition to the other members of Run, to write index.html.
struct Page {
    std::string about{}; // the model, the machine, the data
    int64_t started = 0; // when this process began to train, in seconds since 1970
    double interval = 0; // the seconds from one writing of the page to the next
    double due = 0;      // when the page is to be written again
};

// Times are in seconds, as now() gives them. Steps are counted from 1: step 7 has been done when the counter is 7.
struct Run {
    // What is trained.
    Config config;
    Trainer trainer;
    Dataset val;       // the images of --val_data_file; without them val.count is 0
    Folder folder;     // the output folder; only rank 0 opens it
    Sampler sampler{}; // draws the grids

    // Progress. A step is issued when the host has given its work to the device. Up to STEPS_AHEAD steps later the host
    // fetches the results (collect_steps); then the step is logged.
    int64_t first_step = 0; // the step that this process went on from; 0: the run is new
    int64_t issued = 0;     // the newest issued step
    StepState state{};      // the results of the newest logged step
    double val_loss = NAN;  // the validation loss after that step; NaN: it was not measured
    int stop = 0;           // the signal that ends the run, as all ranks agreed; 0: none came

    // Checkpoints and snapshots of the averages. Updates are the steps that were not skipped.
    int64_t saved_step = 0;       // the step of the newest checkpoint; 0: there is none
    int64_t saved_updates = 0;    // how many updates had been done when that checkpoint was written
    int64_t proven_step = -1;     // the step of the newest checkpoint after which a good step was seen
    int64_t snapshot_step = 0;    // the step of the newest snapshot
    int64_t snapshot_updates = 0; // how many updates had been done when that snapshot was written
    double best_loss = INFINITY;  // the validation loss of best.bin, at rank 0; infinite: it is unknown

    // The log, the page and the line on the terminal.
    int log_file = -1;               // the descriptor of log.csv
    LogSummary summary{};            // the log, as the page shows it
    Page page{};                     // what else the page needs
    bool status_line_open = false;   // the cursor is in a status line, which the next one replaces
    double status_shown = -INFINITY; // when the latest status line was printed

    // What waits for the disk. Each flag said_... remembers that a message was printed, so that it is printed only
    // once.
    std::string unwritten_rows{};                          // rows that log.csv still lacks
    bool said_rows_wait = false;                           // the user knows that rows wait
    std::map<std::string, std::string> waiting_pictures{}; // the content of pictures to be written, by file name
    bool said_pictures_wait = false;                       // the user knows that pictures wait
    double pictures_tried = -INFINITY;                     // when pictures were last written or tried
    double no_room_since = 0; // when a checkpoint first could not be written; 0: the latest one was written
    int64_t retry_at = 0;     // the step after which a checkpoint is tried again
    bool said_moved = false;  // the user was told that the folder has moved
    bool said_length = false; // print_step has judged how long the run will take

    // The clock.
    double seconds = 0;     // the time that this process has spent in steps
    double steps_began = 0; // when the steps that are issued and not yet logged began
    double began = 0;       // when the run would have begun if it had never paused
    double per_step = 0;    // the seconds that a step takes: a mean over recent steps; 0: not known yet
};

// Ends a status line before anything else is printed.
static void end_line(Run* run) {
    if (run->status_line_open) printf("\n");
    run->status_line_open = false;
}

// ---------------------------------------------------------------------------------------------------------------------
// --- the log and the status line

// With --keep_best, this is a hard link to the checkpoint that has the lowest validation loss. So that checkpoint stays
// when its file model_STEP.bin is removed as an old one.
constexpr char BEST[] = "best.bin";

// Returns the step of a resumed run's best.bin, or -1 if there is no such file, or the run is new.
static int64_t best_step(const Run& run) {
    const bool resumed = run.first_step > 0;
    if (!run.config.keep_best || !resumed || !run.folder.has(BEST)) return -1;
    const int file = openat(run.folder.descriptor, BEST, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    Header h;
    const bool whole = read(file, h.slot, sizeof h.slot) == sizeof h.slot;
    if (file >= 0) close(file);
    const bool checkpoint =
        whole && h.slot[SLOT_MAGIC] == MODEL_MAGIC && h.slot[SLOT_CONTENTS] == (HAS_EMA | HAS_TRAINING);
    must(checkpoint, run.folder.name(BEST), "is no checkpoint; move it away, for --keep_best would replace it");
    return h.get<int64_t>(SLOT_STEP);
}

// Opens log.csv at rank 0. A resumed run does the steps after its checkpoint again, so the rows of these steps are
// removed. The rows that stay are added to the page's summary. The row of best.bin's step holds the validation loss of
// best.bin.
static void open_log(Run* run) {
    if (world.rank) return;
    const int64_t best = best_step(*run);
    std::string kept = std::string(LOG_COLUMNS) + "\n";
    const auto commas = std::ranges::count(kept, ',');
    std::istringstream old(read_text(run->folder, "log.csv"));
    std::string row;
    while (std::getline(old, row) && !old.eof()) { // a last row without a line break was cut short, and is ignored
        const LogValues values = parse_row(row);
        const double step = values[COLUMN_STEP];
        const bool belongs = step > 0 && step <= (double)run->first_step; // false for the line of column names (step 0)
        if (!belongs) continue;
        run->summary.add(row);
        const double val_loss = values[COLUMN_VAL_LOSS];
        if ((int64_t)step == best && std::isfinite(val_loss)) run->best_loss = val_loss;
        const bool lacks_seconds = std::ranges::count(row, ',') == commas - 1; // an older program wrote it
        kept += lacks_seconds ? row + ",\n" : row + "\n";
    }
    // The new log replaces the old one as a whole, so a crash at this moment loses nothing.
    const std::string path = run->folder.name("log.csv");
    const std::string failure = try_write_file(run->folder, "log.csv", kept);
    must(failure.empty(), path, failure);
    // Rows are appended. O_NOFOLLOW: a link that somebody put there meanwhile is not followed.
    run->log_file = openat(run->folder.descriptor, "log.csv", O_WRONLY | O_APPEND | O_CLOEXEC | O_NOFOLLOW);
    if (run->log_file < 0) die("%s: can't be opened (%s)", path.c_str(), strerror(errno));
    if (best >= 0 && std::isinf(run->best_loss))
        printf("%s: log.csv has no validation loss of its step %ld, so the next checkpoint becomes the best\n",
               run->folder.name(BEST).c_str(), best);
}

// If somebody removed the folder, the run has no place for its checkpoints, and ends. If somebody moved the folder, the
// run goes on in it: the run holds the folder by its descriptor, not by its name.
static void check_folder(Run* run) {
    if (world.rank) return;
    if (run->folder.is_removed())
        die("%s: was removed while the run wrote there; stopped after step %ld", run->folder.path.c_str(),
            run->state.step);
    if (run->said_moved || run->folder.has_its_name()) return; // all is well, or the user knows
    run->said_moved = true;
    end_line(run);
    printf("%s: was moved; the run goes on in it, wherever it is now\n", run->folder.path.c_str());
}

// Writes the rows that log.csv lacks. If the disk has no room for all of them, the rest waits; the run goes on.
static void write_log(Run* run) {
    // A call of write may write only a part of the rows.
    std::string& rows = run->unwritten_rows;
    while (!rows.empty()) {
        const ssize_t written = write(run->log_file, rows.data(), rows.size());
        if (written <= 0) break; // what is left waits
        rows.erase(0, (size_t)written);
    }
    const std::string why = strerror(errno);
    // The user is told once that rows wait, and once that they wait no longer.
    const bool wait = !rows.empty();
    if (wait == run->said_rows_wait) return;
    run->said_rows_wait = wait;
    end_line(run);
    const std::string name = run->folder.name("log.csv");
    if (wait) printf("%s: can't be written (%s); rows wait\n", name.c_str(), why.c_str());
    else printf("%s: is written again, and no row is missing\n", name.c_str());
}

// Writes the pictures that wait. If the disk has no room for a picture, this picture and those after it go on waiting;
// the run goes on.
static void write_waiting(Run* run) {
    if (run->waiting_pictures.empty()) return;
    run->pictures_tried = now();
    std::string failure;
    std::string name; // the latest picture that was tried
    // Stop at the first picture that can't be written.
    while (!run->waiting_pictures.empty() && failure.empty()) {
        const auto picture = run->waiting_pictures.begin();
        name = picture->first;
        failure = try_write_file(run->folder, name, picture->second);
        if (failure.empty()) run->waiting_pictures.erase(picture);
    }
    const bool wait = !run->waiting_pictures.empty();
    if (wait == run->said_pictures_wait) return;
    run->said_pictures_wait = wait;
    end_line(run);
    name = run->folder.name(name);
    if (wait) printf("%s: %s; pictures wait\n", name.c_str(), failure.c_str());
    else printf("%s: is written again, and no picture is missing\n", name.c_str());
}

// Writes a picture now. If other pictures already wait for the disk, this one waits with them.
static void write_or_wait(Run* run, const std::string& name, const std::string& content) {
    run->waiting_pictures[name] = content;
    if (!run->said_pictures_wait) write_waiting(run);
}

// Adds the step in run->state to the log. ms: how long the step took. val: its validation loss, or NaN. seconds: the
// length of the run when the step was done. Each of loss_q0 ... loss_q3 belongs to a quarter of the noise levels. If no
// sample of the step fell into a quarter, its field stays empty.
static void log_step(Run* run, double ms, double val, double seconds) {
    const StepState& s = run->state;
    // With nine digits, the same float can be read back. An empty field means that there is no value.
    std::string row = text("%ld,%.9g,%.9g,%.9g,%.3f", s.step, s.loss, s.lr, s.grad_norm, ms);
    for (int q = 0; q < 4; q++) row += s.count_q[q] ? text(",%.9g", s.loss_q[q]) : ",";
    row += std::isnan(val) ? "," : text(",%.9g", val);
    row += text(",%.3f", seconds);
    if (!world.rank) run->unwritten_rows += row + "\n";
    run->summary.add(row);
}

// Returns the whole status line; shorten_status makes it fit. val: a validation loss, or NaN. eta: the seconds until
// the run ends.
static std::string status_line(const Run& run, double val, double eta) {
    const Config& c = run.config;
    const StepState& s = run.state;
    // Speeds, from the mean time of recent steps.
    const double ms = run.per_step * 1e3;
    const double images_per_s = c.batch_size / run.per_step;
    // A backward pass costs about two forward passes.
    const double gflop_per_s = 3 * run.trainer.net.flops * c.batch_size / run.per_step / 1e9;
    std::string line = text("step %ld/%ld | loss %.4f (mean %.4f)", s.step, c.max_steps, s.loss, run.summary.mean);
    line += text(" | lr %.2e | norm %.3f | %.1f ms", s.lr, s.grad_norm, ms);
    line += text(" | %.1f images/s | %.0f GFLOP/s | ETA %s", images_per_s, gflop_per_s, duration(eta).c_str());
    if (!std::isnan(val)) line += text(" | val %.4f", val);
    if (s.bad_total) line += text(" | skipped %ld", s.bad_total);
    return line;
}

// Removes parts of a status line until the line fits into `columns` columns. 0: there is no terminal, so every line
// fits.
static std::string shorten_status(std::string line, size_t columns) {
    // A part is found by a word in it. It ends at the next " | ". The least important part is removed first.
    for (const char* word : {"GFLOP", "norm", "lr", "images", " ms", "skipped", "val", "ETA"}) {
        if (!columns || line.size() < columns) break;
        const size_t found = line.find(word);
        if (found == std::string::npos) continue;
        // The part is erased with the separator before it.
        const size_t begin = line.rfind(" | ", found);
        const size_t end = line.find(" | ", found);
        line.erase(begin, end - begin);
    }
    return line;
}

// Prints the status line. After the first three steps, this function also estimates how long the rest of the run will
// take. If this is more than three hours, it prints the estimate, but only once: a beginner may not have meant to start
// such a long run.
static void print_step(Run* run, double val) {
    const Config& c = run->config;
    const StepState& s = run->state;
    const double per_step = run->per_step;
    const double eta = per_step * (double)(c.max_steps - s.step);
    // The first three steps are slower than the others.
    const bool is_timed = s.step >= run->first_step + 3;
    if (is_timed && !run->said_length) {
        run->said_length = true;
        if (eta > 3 * 3600) {
            end_line(run);
            printf("this run will take %s: --max_steps %ld would end within an hour; a smaller --batch_size, "
                   "--num_channels, --num_res_blocks or --image_size makes a step, now %.3g s, shorter\n",
                   duration(eta).c_str(), (long)(s.step + 3600 / per_step), per_step);
        }
    }
    // On a terminal the next status line replaces this one. Elsewhere each status line is a line of its own.
    const size_t columns = (size_t)terminal_columns();
    show_status(shorten_status(status_line(*run, val, eta), columns));
    run->status_line_open = columns > 0;
    run->status_shown = now();
}

// ---------------------------------------------------------------------------------------------------------------------
// --- checkpoints, snapshots and grids

// Is called after a good step. The run came to this step from the newest checkpoint, so that checkpoint is good, too.
// Now the oldest checkpoints may be removed. --keep_checkpoints is the number of checkpoints that stay; 0: all of them
// stay.
static void prove_checkpoint(Run* run) {
    const size_t keep = run->config.keep_checkpoints;
    auto found = run->folder.list(); // sorted by step: the oldest checkpoint comes first
    // If best.bin is a link to a removed checkpoint, the content stays on the disk under the name best.bin.
    while (keep && found.size() > keep) {
        const auto oldest = found.begin();
        run->folder.remove(oldest->second);
        found.erase(oldest);
    }
    run->proven_step = run->saved_step;
}

// Ends a run whose weights are broken, and says which checkpoint the user can go on from.
static void stop_run(Run* run, const std::string& why) {
    const Folder folder = world.rank ? open_folder(run->config.output_dir) : run->folder;
    const auto found = folder.list();
    const auto newest = found.rbegin();
    // The newest checkpoint is good if a good step followed it. Otherwise its weights may have been broken already.
    std::string last = "no checkpoint was written yet";
    if (!found.empty() && newest->first == run->proven_step) {
        last = "the last good checkpoint is " + folder.name(newest->second);
    } else if (!found.empty()) {
        last = "no step was good from " + folder.name(newest->second) + ", so move it away and ";
        if (found.size() > 1) last += "go on from " + folder.name(std::next(newest)->second);
        else last += "start again";
    }
    refuse(text("stopped at step %ld: ", run->state.step) + why + "; " + last +
           "; a lower --lr or a --warmup_steps may help");
}

// Returns a text for the user: from which saved step a run can go on if this run ends now.
static std::string saved_so_far(const Run& run) {
    if (run.saved_step) return text("saved is step %ld; --resume_checkpoint latest goes on from there", run.saved_step);
    return run.state.updates ? "no checkpoint was written yet" : "no good step was there to save";
}

// All ranks call this after rank 0 has tried to write a model file. If the file could not be written, the ranks agree
// on the step after which rank 0 tries again. failure, error: these members of rank 0's AtomicFile; the other ranks
// pass "" and 0. Result: whether the file was written.
static bool is_written(Run* run, const std::string& name, const std::string& failure, int error) {
    if (!world.rank) check_folder(run);
    // Print a message at the first failure, and at the first success after failures. End the run when the patience is
    // over.
    if (error && !run->no_room_since) {
        run->no_room_since = now();
        end_line(run);
        printf("%s: %s; it is tried again for %.0f minutes\n", name.c_str(), failure.c_str(), PATIENCE / 60);
        fflush(stdout);
    }
    const bool hopeless = error == EFBIG; // a limit on the size of files (ulimit -f) does not go away
    if (error && (hopeless || now() - run->no_room_since > PATIENCE))
        die("%s: %s; stopped after step %ld; %s", name.c_str(), failure.c_str(), run->state.step,
            saved_so_far(*run).c_str());
    if (!error && run->no_room_since) {
        end_line(run);
        printf("%s: is written again\n", name.c_str());
        run->no_room_since = 0;
    }
    // Ranks measure the pause in steps, because their clocks differ. A step is assumed to last at least a millisecond.
    const int steps_of_pause = (int)(RETRY_AFTER / std::max(run->per_step, 1e-3));
    const int pause = error ? std::max(1, steps_of_pause) : 0;
    const int agreed = any_rank("the moment to try again", pause);
    run->retry_at = run->issued + agreed;
    return !agreed;
}

// Writes a model file: the header, the arrays in the order of the format, and the history of losses. Each rank holds
// a slice of each array. All ranks call this function, because they gather the slices together. Only rank 0 writes.
// Result: whether the file was written.
static bool save_arrays(Run* run, const std::string& name, Header header, const std::vector<float*>& slices,
                        const std::vector<float>& history = {}) {
    const UNet& net = run->trainer.net;
    if (world.rank) { // this rank sends its slices, and learns whether rank 0 could write them
        for (float* slice : slices) whole_array(run->trainer, slice);
        return is_written(run, name, "", 0);
    }
    AtomicFile file(run->folder, name); // the file appears under this name when it is complete (commit)
    uint32_t crc = 0;                   // the checksum of all bytes until now
    auto write = [&](const void* data, size_t n) {
        crc = crc32(crc, data, n);
        file.write(data, n);
    };
    header.set(SLOT_PARAMS, net.num_params);
    write(header.slot, 1024); // by definition the checksum is computed while its own slot is 0

    std::vector<float> flat(net.flat_size); // an array in our layout
    std::vector<float> tensor;              // one parameter of it in PyTorch's layout
    for (float* slice : slices) {
        // All ranks have to call whole_array, or the others wait for rank 0 for ever. So rank 0 calls it even after
        // writing the file has failed.
        const float* whole = whole_array(run->trainer, slice);
        if (file.error) continue;
        copy_to_host(flat.data(), whole, flat.size() * sizeof(float));
        for (const Param& p : net.params) {
            tensor.resize(p.size);
            permute_param(net.config, p, tensor.data(), &flat[p.offset], true);
            if (!all_finite(tensor.data(), p.size)) {
                file.discard();
                stop_run(run, "weights, their average or moments are not finite and were not saved");
            }
            write(tensor.data(), p.size * sizeof(float));
        }
    }
    if (!history.empty()) write(history.data(), history.size() * sizeof(float));
    file.write_at(SLOT_CRC * 4, &crc, 4); // a slot has 4 bytes
    file.commit();
    return is_written(run, run->folder.name(name), file.failure, file.error);
}

// With --keep_best: makes best.bin a link to this checkpoint, which was just written, if its validation loss is the
// lowest. If the run ended because data could not be read, the last step has no validation loss (NaN), and its
// checkpoint is not compared.
static void keep_best(Run* run, const std::string& checkpoint) {
    const bool is_better = run->val_loss < run->best_loss; // false for NaN
    if (world.rank || !run->config.keep_best || !is_better) return;
    // A link costs no room on the disk. If it can't be made, the run goes on.
    const std::string failure = try_link_file(run->folder, checkpoint, BEST);
    if (failure.empty()) {
        run->best_loss = run->val_loss;
        return;
    }
    end_line(run);
    printf("%s: %s; the run goes on, and %s is the best checkpoint until now\n", run->folder.name(BEST).c_str(),
           failure.c_str(), checkpoint.c_str());
}

// Writes all that the run needs to go on from here with the same bits (docs/FORMATS.md).
static void save_checkpoint(Run* run) {
    const Config& c = run->config;
    const StepState& s = run->state;
    const Trainer& tr = run->trainer;
    Header h = model_header(c, HAS_EMA | HAS_TRAINING, s.step);
    h.slot[SLOT_UPDATES] = (int)s.updates;
    h.slot[SLOT_BAD_TOTAL] = (int)s.bad_total;
    h.slot[SLOT_BAD_IN_ROW] = (int)s.bad_in_row;
    h.set(SLOT_GUARD, s.guard);
    // These slots identify the data that the run trains on.
    h.set(SLOT_IMAGES, tr.data.count);
    h.set(SLOT_DATA_CRC, tr.data.header_crc);
    if (tr.data.cond) h.set(SLOT_COND_CRC, tr.data.cond->header_crc);
    const std::string paths = c.data_file + '\0' + c.cond_file;
    memcpy(&h.slot[SLOT_PATH], paths.data(), paths.size());
    // The rates of the averages. The first rate has a slot of its own.
    h.set(SLOT_EMA_RATE, c.emas[0]);
    h.slot[SLOT_EMAS] = (int)c.emas.size() - 1;
    for (size_t k = 1; k < c.emas.size(); k++) h.set(SLOT_EMAS + (int)k, c.emas[k]);

    // The arrays in the order of the format, and the history of losses after them.
    std::vector<float> history(tr.history ? (size_t)c.diffusion_steps * (HISTORY + 1) : 0);
    if (tr.history) copy_to_host(history.data(), tr.history, history.size() * sizeof(float));
    std::vector<float*> arrays = {tr.params, tr.emas[0], tr.m, tr.v};
    arrays.insert(arrays.end(), tr.emas.begin() + 1, tr.emas.end());
    // The step has seven digits, so that a list of files that is sorted by name is also sorted by step.
    const std::string name = text("model_%07ld.bin", s.step);
    if (!save_arrays(run, name, h, arrays, history)) return;
    // The step is saved now. The next step shows whether the checkpoint is good (prove_checkpoint).
    run->saved_step = s.step;
    run->saved_updates = s.updates;
    keep_best(run, name);
}

// Writes the two averages by power functions (POWER_EMAS) into a model file. Its header holds the number of updates in
// the slot for the number of steps, because the averages depend on the number of updates.
static void save_snapshot(Run* run) {
    const Config& c = run->config;
    const Header h = model_header(c, HAS_EMA, run->state.updates);
    std::vector<float*> slices;
    // Both averages are among the run's averages.
    for (float power : POWER_EMAS) {
        const size_t k = std::ranges::find(c.emas, power) - c.emas.begin();
        slices.push_back(run->trainer.emas[k]);
    }
    if (!save_arrays(run, text("ema_%07ld.bin", run->state.step), h, slices)) return;
    run->snapshot_step = run->state.step;
    run->snapshot_updates = run->state.updates;
}

// Returns the texts below n images in a grid: the numbers that each image is conditioned on, if there are any.
static std::vector<std::string> value_captions(const Config& c, const Sampler& s, int n) {
    std::vector<std::string> captions(c.cond_dim ? n : 0);
    for (int i = 0; i < std::ssize(captions); i++)
        for (const float v : values_of_image(c, s, i)) captions[i] += text("%.2g ", v);
    return captions;
}

// Returns what a grid shows of images (n, H, W, C) that are conditioned on pictures. Three things lie side by side, so
// the result is (n, H, 3 W, C): the picture, the image, and the data's image that belongs to the picture. If a picture
// has fewer channels than an image, only the picture's first channel is shown.
static std::vector<float> beside_pictures(const Config& c, const Sampler& s, const std::vector<float>& images) {
    const int K = c.cond_channels;
    const int C = c.in_channels;
    const size_t row = (size_t)c.W * C;
    std::vector<float> shown;
    for (size_t at = 0; at < images.size(); at += row) {          // where a row of an image begins
        const size_t first_pixel = at / C % (s.truth.size() / C); // for more images, the pictures repeat
        for (int w = 0; w < c.W; w++)
            for (int channel = 0; channel < C; channel++)
                shown.push_back(s.pictures[(first_pixel + w) * K + (K >= C ? channel : 0)]);
        shown.insert(shown.end(), images.begin() + at, images.begin() + at + row);
        const auto truth = s.truth.begin() + at % s.truth.size();
        shown.insert(shown.end(), truth, truth + row);
    }
    return shown;
}

// Draws a grid of samples from the averaged weights. Every grid starts from the same noise, so that one sees how the
// pictures get better.
static void save_grid(Run* run) {
    const Config& c = run->config;
    Trainer& tr = run->trainer;
    end_line(run);
    // Every rank needs all weights, in the type that the network reads.
    const float* ema = whole_array(tr, tr.emas[0]);
    cast_params(tr.ema_copy, ema, tr.net.flat_size);
    const auto images = sample_images(&tr.net, Weights{ema, tr.ema_copy}, &run->sampler, c.num_samples);
    if (world.rank) return;
    const auto captions = value_captions(c, run->sampler, c.num_samples);
    const int parts = c.cond_channels ? 3 : 1;
    const std::vector<float> shown = c.cond_channels ? beside_pictures(c, run->sampler, images) : images;
    write_or_wait(run, text("samples_%07ld.png", run->state.step),
                  grid_png(shown, c.num_samples, c.H, parts * c.W, c.in_channels, captions, parts));
}

// Returns a line about a model: its size, and what it costs.
static std::string describe(const UNet& net) {
    const Config& c = net.config;
    return text("model: %dx%dx%d, %.2f M parameters, %zu layers, %.3f GFLOP forward an image", c.H, c.W, c.in_channels,
                net.num_params / 1e6, net.layers.size(), net.flops / 1e9);
}

// Says whether the folder holds a run, and whether this is a name for files of a run. Only the run itself may write
// files of such names into its folder. The run would replace any other file of this name, or read it as a file of its
// own.
static bool is_name_of_run(const Folder& folder, const std::string& name) {
    const bool holds_run = folder.has("log.csv") || !folder.list().empty();
    if (!holds_run) return false;
    for (const char* one_of_its : {"index.html", "log.csv", "loss.png", BEST, ".lock"}) // train_unet.py writes loss.png
        if (name == one_of_its) return true;
    const bool has_step = step_in_name(name, "model_", ".bin") >= 0 || step_in_name(name, "ema_", ".bin") >= 0 ||
                          step_in_name(name, "samples_", ".png") >= 0;
    return has_step;
}

constexpr char NAME_OF_RUN[] = "is a name for files of the run in that folder; choose another one";

// defines: begin_page, write_page, end_page, page_turn, compare_runs
#include "host/page.h"

// Prints that a step was skipped. Ends the run after --max_bad_steps skipped steps in a row.
static void report_bad_step(Run* run) {
    const StepState& s = run->state;
    end_line(run);
    printf("step %ld: loss %g (mean %g), gradient norm %g (mean %g): not finite or far outside its spread, "
           "so this step is skipped (%ld in a row, %ld in all)\n",
           s.step, s.loss, s.guard.mean_loss, s.grad_norm, s.guard.mean_norm, s.bad_in_row, s.bad_total);
    if (s.bad_in_row < run->config.max_bad_steps) return;
    write_log(run); // the last rows of log.csv show what happened
    stop_run(run, text("%ld steps in a row had to be skipped", s.bad_in_row));
}

// ---------------------------------------------------------------------------------------------------------------------
// --- the start of a run: new, from a file's weights, or resumed

// Gives a new run its weights: those of the --init file or, without one, random ones. If the file has an average of the
// weights, the run starts from the average, unless --use_ema is False. All averages start from the same weights.
static void start_weights(Trainer* tr, const ModelFile& m) {
    const UNet& net = tr->net;
    const bool takes_average = m.has(HAS_EMA) && net.config.use_ema;
    const int array = takes_average ? m.ema_array(0) : 0;
    const std::vector<float> flat = m.size ? read_array(m, net, array) : init_params(net);
    copy_slice(tr->params, flat, slice_of(flat.size())); // every rank has all weights
    for (float* ema : tr->emas) copy_slice(ema, flat, tr->own);
}

// Returns the number of the checkpoint's array from which the k-th average of a resumed run goes on. This array is the
// average of the same rate. If the checkpoint holds no average of this rate, it is the checkpoint's k-th average. If
// there is no k-th average either, it is the weights (array 0). An average by a power function (rate > 1) must be in
// the checkpoint.
static int array_for_average(const Config& c, const ModelFile& m, int k) {
    const float rate = c.emas[k];
    // The rates may have been given in another order than before.
    for (int i = 0; i < m.emas(); i++)
        if (m.ema_rate(i) == rate) return m.ema_array(i);
    const bool averages_whole_run = rate > 1; // a power function; see POWER_EMAS
    must(!averages_whole_run, text("--ema_snapshots %d", c.ema_snapshots),
         "averages the whole run, and " + m.path + " has kept no such average; leave it out");
    return k < m.emas() ? m.ema_array(k) : 0;
}

// Reads the losses that --schedule_sampler loss-second-moment remembers. They lie at the end of a checkpoint. For every
// t there are HISTORY + 1 numbers: up to HISTORY losses and, as the last number, how many losses there are.
static void restore_history(const Trainer& tr, const ModelFile& m) {
    std::vector<float> history(tr.history ? m.history() : 0); // empty if this run draws t in another way
    const size_t bytes = history.size() * sizeof(float);
    m.read(history.data(), bytes, m.size - bytes);
    for (size_t i = 0; i < history.size(); i++) {
        const float value = history[i];
        const bool is_count = i % (HISTORY + 1) == HISTORY;
        const bool in_range = !is_count || (value >= 0 && value <= HISTORY);
        if (!std::isfinite(value) || !in_range)
            die("%s: its history of losses is damaged: use an earlier checkpoint", m.path.c_str());
    }
    if (bytes) copy_to_device(tr.history, history.data(), bytes);
}

// Brings a resumed run into the state of its checkpoint: weights, moments, averages, counters, the guard, the losses.
static void restore(Run* run, const ModelFile& m) {
    const Config& c = run->config;
    Trainer& tr = run->trainer;
    run->state = m.state();
    const StepState& s = run->state;
    // Every rank gets all weights, and its own slices of AdamW's moments and of the averages.
    copy_slice(tr.params, read_array(m, tr.net, 0), slice_of(tr.net.flat_size));
    copy_slice(tr.m, read_array(m, tr.net, 2), tr.own);
    copy_slice(tr.v, read_array(m, tr.net, 3), tr.own);
    for (int k = 0; k < (int)c.emas.size(); k++) {
        const int array = array_for_average(c, m, k);
        copy_slice(tr.emas[k], read_array(m, tr.net, array), tr.own);
    }
    restore_history(tr, m);
    // The state that was just read is saved already, in the checkpoint.
    run->first_step = s.step;
    run->issued = s.step;
    run->saved_step = s.step;
    run->saved_updates = s.updates;
    run->snapshot_step = s.step;
    run->snapshot_updates = s.updates;
    copy_to_device(tr.state, &s, sizeof s);
    // The weight of each t, with which t is drawn, is computed from the history.
    if (tr.history) update_rms_losses(tr.rms_losses, tr.history, nullptr, nullptr, tr.state, c.diffusion_steps, 0);
    printf("resumed from %s: step %ld of %ld, %ld updates, seed %ld\n", m.path.c_str(), s.step, c.max_steps, s.updates,
           c.seed);
    // The images of a step begin at position step * B of the stream of images. So with another batch size, the run
    // continues with other images.
    const int B = c.batch_size;
    const int before = m.header.slot[SLOT_BATCH_SIZE];
    if (B != before)
        printf("--batch_size %d: was %d before; the order of the data goes by batches, "
               "so that image %ld of it comes next, not %ld\n",
               B, before, s.step * B, s.step * before);
}

// A folder holds one run. A new run needs a folder in which there is none. A resumed run needs its own folder, or an
// empty one. resume: the path of the checkpoint; "": the run is new.
static void check_output_dir(const Config& c, const Folder& output, const std::string& resume, int64_t resume_step) {
    // If there is a best.bin but no other checkpoint, it is another run's, and --keep_best would replace it. This is
    // allowed only if this run goes on from it.
    const auto found = output.list();
    const bool has_checkpoint = !found.empty();
    std::error_code error;
    const bool from_best = std::filesystem::equivalent(output.name(BEST), resume, error);
    must(!c.keep_best || has_checkpoint || from_best || !output.has(BEST), output.name(BEST),
         "is another run's; move it away, or choose another --output_dir");
    // A log without a checkpoint was left by a run that was killed early. --resume_checkpoint auto begins anew there.
    const bool holds_run = has_checkpoint || (output.has("log.csv") && c.resume_checkpoint != "auto");
    if (!holds_run) return;

    // The folder holds a run. So this run must be a resumed one.
    const int64_t newest_step = has_checkpoint ? found.rbegin()->first : 0;
    const std::string newest = has_checkpoint ? output.name(found.rbegin()->second) : "";
    std::string what = "'s log.csv, but no checkpoint to continue it from; move log.csv away to start again";
    if (has_checkpoint) what = text(" (up to step %ld); continue it with --resume_checkpoint latest", newest_step);
    must(!resume.empty(), c.output_dir, "already holds a run" + what + ", or choose another --output_dir");

    // The checkpoint that this run goes on from must lie in this folder.
    const std::filesystem::path folder = std::filesystem::path(resume).parent_path() / ".";
    must(std::filesystem::equivalent(folder, c.output_dir + "/.", error), c.output_dir,
         "already holds a run, but " + resume + " is not part of it; choose another --output_dir");
    // No checkpoint in the folder may be of a later step than `resume`: this run would come to that step, too, and
    // replace that checkpoint.
    const bool none_is_later = newest_step <= resume_step;
    const bool has_wrong_name = !none_is_later && std::filesystem::equivalent(newest, resume, error);
    must(!has_wrong_name, newest, text("holds step %ld; rename it to model_%07ld.bin", resume_step, resume_step));
    must(none_is_later, newest,
         text("is later (step %ld) than ", newest_step) + resume +
             "; resume that one (latest), move it away, or choose another --output_dir");
}

// A run that goes on from an early checkpoint does later steps again, maybe with other flags. The old snapshots of
// these steps must not become part of an average of this run. So they are renamed.
static void leave_later_snapshots(const Folder& folder, int64_t first_step) {
    int64_t count = 0;
    for (const auto& [step, name] : folder.list("ema_")) {
        if (step <= first_step) continue; // this snapshot is a part of this run
        const std::string new_name = name + ".left";
        if (renameat(folder.descriptor, name.c_str(), folder.descriptor, new_name.c_str()))
            die("%s: can't be renamed to %s (%s); move it away", folder.name(name).c_str(), new_name.c_str(),
                strerror(errno));
        count++;
    }
    if (count)
        printf("%s: snapshots ema_STEP.bin beyond step %ld, where this run goes on: %ld; "
               "they are called ema_STEP.bin.left now, and no average takes them\n",
               folder.path.c_str(), first_step, count);
}

// Prints how the memory of the device is used, in GiB.
static void print_memory(const Config& c, const UNet& net) {
    const double GIB = 0x1p30;
    const double array = net.flat_size * sizeof(float) / GIB; // all parameters in fp32
    const double slice = slice_of(net.flat_size, 0, world.size).owned() * sizeof(float) / GIB;
    // With bf16 there are copies of two arrays: of the weights, and of their first average. With FP8 there are two more
    // of the weights, with a byte for each.
    double copies = weights_have_copy() ? 2.0 * net.flat_size * act_bytes() / GIB : 0;
    if (c.precision == "fp8") copies += 2.0 * net.flat_size * bytes_of(Element::FP8) / GIB;

    // What the allocated memory is used for. `rest` is the memory that belongs to none of the other uses.
    const double all = device_bytes / GIB;
    const double weights = array + c.emas.size() * slice + copies;
    const double grads = world.size > 1 ? 2 * array : array; // a rank also receives gradients from other ranks
    const double moments = 2 * slice;
    const double arena = net.arena_bytes / GIB;
    const double rest = all - weights - grads - moments - arena;
    printf("memory: %.2f GiB: weights and EMA %.2f, gradients %.2f, moments %.2f, "
           "activations of %d images at a time %.2f, workspace and batches %.2f\n",
           all, weights, grads, moments, net.B, arena, rest);
}

// Returns the flags of the run's preset, with their values. A flag is left out if a model file or the data has replaced
// its value. (If the command line has replaced the value, the flag is kept: print_start prints the command line's flags
// after those of the preset.)
static std::string preset_in_force(const Config& c) {
    std::string kept;
    std::istringstream words(PRESETS.at(c.preset)); // --name value --name value
    for (std::string flag, value; words >> flag >> value;) {
        const std::string name = flag.substr(2);
        const Flag& f = *find_flag(name);
        Config preset;
        set_flag(&preset, f, value);
        const bool is_replaced = !same_value(name, flag_value(preset, f), flag_value(c, f));
        if (c.given(name) || !is_replaced) kept += " " + flag + " " + value;
    }
    return kept;
}

// --precision fp8: says how much of the work is in FP8, and whether that pays. Rounding takes time, too, which small
// convolutions do not save.
static void print_fp8(const Config& c, const UNet& net) {
    if (c.precision != "fp8") return;
    int convs = 0, gradients = 0;
    double flops = 0; // of one image
    for (const Layer& l : net.layers) {
        gradients += l.fp8_gradient;
        if (!l.fp8) continue;
        convs++;
        const Tensor& out = net.tensors[l.out];
        flops += 2.0 * out.H * out.W * (double)net.params[l.weight].size; // as conv_flops
    }
    const double gflops = flops * c.micro() / convs * 1e-9; // of one convolution, in a forward pass
    constexpr double LITTLE = 10; // GFLOP; with 8, a step takes 4 % less time; with 15, 7 % (docs/GUIDE.md)
    const char* const advice =
        gflops < LITTLE
            ? "; that is so little that FP8 hardly saves time: it pays with more channels, or more images at a time"
            : "";
    printf("fp8: %d convolutions, %.0f %% of a forward pass, %.3g GFLOP each, and the input gradients of %d%s\n", convs,
           100 * flops / net.flops, gflops, gradients, advice);
}

// Prints what is about to be trained, on which data, and in which folder.
static void print_start(const Config& c, const UNet& net, const Dataset& data) {
    printf("preset %s:%s\n", c.preset.c_str(), preset_in_force(c).c_str());
    std::string given; // the flags of the command line, so that the output tells how to repeat the run
    for (const Flag& f : FLAGS)
        if (c.given(f.name)) given += std::string(" --") + f.name + " " + flag_value(c, f);
    if (!given.empty()) printf("flags:%s\n", given.c_str());
    // The model, the memory, the ranks, the data.
    printf("%s\n", describe(net).c_str());
    print_memory(c, net);
    print_fp8(c, net);
    if (world.size > 1)
        printf("processes: %d, which share a step's batch of %d, %d images at a time; "
               "each keeps its part of the moments and averages\n",
               world.size, c.batch_size, c.micro());
    // The images can't be verified if their checksums are not known. This is so if the file is longer than
    // READ_AT_START and holds no checksum of each image.
    const bool verified = !data.image_crc.empty();
    const char* doubt = verified ? "" : " (not verified: more than 4 GiB, and no checksums of them)";
    const int64_t steps_an_epoch = (data.count + c.batch_size - 1) / c.batch_size;
    printf("data: %s, %ld images%s, %ld steps of %d an epoch; output: %s/\n", c.data_file.c_str(), data.count, doubt,
           steps_an_epoch, c.batch_size, c.output_dir.c_str());
    if (data.cond) printf("condition: %s, pictures of %d channels\n", c.cond_file.c_str(), c.cond_channels);
    const int C = c.in_channels;
    if (C != 1 && C != 3) printf("grids show the first of %d channels, in grey\n", C);
    fflush(stdout);
}

// ---------------------------------------------------------------------------------------------------------------------
// --- the loop over the steps

// Waits until all issued steps are done, and logs them. validate: the validation loss is measured after the last of
// these steps. show: the status line of the last of these steps is printed.
static void collect_steps(Run* run, bool validate, bool show) {
    StepState records[RECORDS]; // the results of each step, which the device has stored (record_step)
    const int64_t logged = run->state.step;
    copy_to_host(records, run->trainer.records, sizeof records); // this waits for the steps
    const double ended = now();
    const double elapsed = ended - run->steps_began;
    const double val = validate ? validation_loss(&run->trainer, &run->val) : NAN;
    // The loss is rounded as in log.csv, from which a resumed run reads it. So a resumed run makes the same decision
    // about best.bin as a run without a pause.
    run->val_loss = atof(text("%.9g", val).c_str());

    const double count = (double)(run->issued - logged);
    // The mean over recent steps: with each step, the weight of the steps before it falls by a tenth. The first three
    // steps are slower, so the mean of later steps leaves them out.
    const double kept = logged < run->first_step + 3 ? 0 : std::pow(0.9, count);
    run->per_step = kept * run->per_step + (1 - kept) * elapsed / count;
    run->seconds += elapsed;

    const std::lock_guard<PageTurn> turn(page_turn); // the page must not be written while the log changes
    for (int64_t step = logged; step < run->issued; step++) {
        run->state = records[step % RECORDS];
        const bool is_last = step + 1 == run->issued;
        const double steps_later = (double)(run->issued - 1 - step);
        const double done = ended - elapsed * steps_later / count; // as if all steps took the same time
        log_step(run, elapsed * 1e3 / count, is_last ? val : NAN, done - run->began);
        if (!run->state.ok) report_bad_step(run);
        else if (run->proven_step != run->saved_step) prove_checkpoint(run);
    }
    check_folder(run);
    write_log(run);
    if (now() - run->pictures_tried > 1) write_waiting(run);
    if (show) print_step(run, val);
    if (now() >= run->page.due) write_page(run, "running");
    run->steps_began = now();
}

// Says whether a signal ends the run. Several ranks must stop after the same step, so they agree on it. That takes
// time, and therefore they do it only every STEPS_AGREED steps.
static bool is_stopped(Run* run) {
    const bool ask = world.size == 1 || run->issued % STEPS_AGREED == 0;
    if (ask) run->stop = any_rank("the question whether to stop", stop_signal);
    return run->stop;
}

// Does one turn of the loop: issues a step, and does what is due after it. If nothing is due, the host does not wait
// until the step is done.
static void run_step(Run* run) {
    const Config& c = run->config;
    if (!train_step(&run->trainer, run->issued)) return;
    run->issued++;
    const int64_t step = run->issued;
    const bool last = is_stopped(run) || step >= c.max_steps;
    // If steps are slow, the status line is also printed before it would become older than ten seconds.
    const bool slow = now() - run->status_shown + 4 * run->per_step > 10;
    // Says whether something is due that happens after every `interval` steps and after the last one. 0: it never
    // happens.
    auto due = [&](int interval) { return interval && (step % interval == 0 || last); };
    // Says the same about a file that is written every `interval` steps. If a step was skipped or the disk is full, a
    // file can't be written when it is due. Then it is written as soon as possible. written: the step of the newest
    // file of this kind.
    auto file_due = [&](int interval, int64_t written) {
        const bool is_behind = interval && step / interval > written / interval;
        return interval && (last || (is_behind && step >= run->retry_at));
    };
    const bool save = file_due(c.save_interval, run->saved_step);
    const bool snapshot = file_due(c.ema_snapshots, run->snapshot_step);
    const bool show = slow || due(c.log_interval);
    const bool wants_val_loss = due(c.val_interval) || (c.keep_best && save);
    const bool validate = run->val.count && wants_val_loss;
    const bool draw = due(c.sample_interval) && !last; // train draws the last grid, when all else is done
    const bool records_full = step - run->state.step >= STEPS_AHEAD;
    if (!show && !save && !validate && !draw && !snapshot && !records_full) return;

    collect_steps(run, validate, show || validate);
    if (run->state.bad_in_row) return; // the weights may be broken and must not replace a good checkpoint
    if (save) save_checkpoint(run);
    if (snapshot) save_snapshot(run);
    if (draw) save_grid(run);
    if (save || draw) write_page(run, "running");
    run->steps_began = now(); // the time that was spent on writing is not part of a step's time
}

// Says whether one more step is needed before a stopped run can end. With --keep_best a checkpoint needs a validation
// loss. If the signal came after the latest step was logged without a validation loss, the run does one more step.
static bool lacks_validation(const Run& run) {
    const Config& c = run.config;
    const bool all_logged = run.state.step == run.issued;
    const bool unsaved = all_logged && run.saved_updates < run.state.updates;
    return c.keep_best && run.stop && unsaved && std::isnan(run.val_loss) && run.issued < c.max_steps;
}

// Saves the results of the last steps. If the disk is full, this function waits for room, but not for long, and only
// until a second signal comes.
static void save_at_the_end(Run* run) {
    const int64_t updates = run->state.updates;
    const bool takes_snapshots = run->config.ema_snapshots;
    const double began = now();
    stop_signal = 0;
    while (true) {
        if (run->saved_updates < updates) save_checkpoint(run);
        if (takes_snapshots && run->snapshot_updates < updates) save_snapshot(run);
        const bool snapshot_done = !takes_snapshots || run->snapshot_updates == updates;
        if (run->saved_updates == updates && snapshot_done) return;
        const bool give_up = stop_signal || now() - began > PATIENCE_AT_THE_END;
        if (any_rank("the end of a wait", give_up))
            die("%s: step %ld could not be saved; %s", run->config.output_dir.c_str(), run->state.step,
                saved_so_far(*run).c_str());
        sleep(1); // a signal ends the sleep early
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// --- a run from its first to its last line

// Opens --val_data_file, if there is one, and checks that its images are like those of the training data.
static Dataset open_validation_data(const Config& c, const Dataset& data) {
    if (c.val_data_file.empty()) return Dataset{};
    Dataset val = open_dataset(c.val_data_file);
    if (val.count && (val.C != data.C || val.H != data.H || val.W != data.W))
        die("--val_data_file %s: its images are %dx%dx%d, the training data's %dx%dx%d", val.path.c_str(), val.H, val.W,
            val.C, data.H, data.W, data.C);
    if (val.count && c.cond_dim && val.K != c.cond_dim)
        die("--val_data_file %s: has %d numbers an image and the model takes --cond_dim %d", val.path.c_str(), val.K,
            c.cond_dim);
    // A model with classes also needs labels of the validation images, and at most as many classes as --num_classes.
    const bool labels_fit = !val.labels.empty() && val.classes <= c.num_classes;
    if (val.count && c.class_cond && !labels_fit)
        die("--val_data_file %s: has %d classes and the model %d; it must be labelled as the training data is",
            val.path.c_str(), val.classes, c.num_classes);
    const bool makes_them = c.picture_kind != PictureKind::FILE;
    if (c.cond_channels && !makes_them && c.val_cond_file.empty())
        die("--val_data_file %s: needs --val_cond_file, the pictures that its images are conditioned on",
            val.path.c_str());
    if (!c.cond_channels && !c.val_cond_file.empty())
        die("--val_cond_file %s: this model is not conditioned on pictures (--cond_channels)", c.val_cond_file.c_str());
    if (makes_them && !c.val_cond_file.empty())
        die("--val_cond_file %s: is not read, since --cond makes the pictures of the images", c.val_cond_file.c_str());
    open_pictures(&val, "val_cond_file", c.val_cond_file);
    if (val.cond && val.cond->C != c.cond_channels)
        die("--val_cond_file %s: has pictures of %d channels and the model takes --cond_channels %d",
            c.val_cond_file.c_str(), val.cond->C, c.cond_channels);
    return val;
}

// Without --values, the images of a run's grids are conditioned on the numbers of the first images of d. d is the
// validation data if there are any, because the run does not train on them; otherwise it is the training data.
static void take_values_of_data(const Config& c, Sampler* s, const Dataset& d) {
    if (!s->value_rows.empty()) return;
    const int64_t rows = std::min<int64_t>(d.count, c.num_samples);
    s->value_rows.assign(d.values.begin(), d.values.begin() + rows * c.cond_dim);
}

// The images of a run's grids are conditioned on the first pictures of d. d is the validation data or, without it, the
// training data.
static void take_pictures_of_data(const Config& c, Sampler* s, const Dataset& d) {
    if (!c.cond_channels) return;
    const char* const flag = c.val_cond_file.empty() ? "cond_file" : "val_cond_file";
    s->truth = first_images(d, c.val_data_file.empty() ? "data_file" : "val_data_file", c.in_channels, c.num_samples);
    if (c.picture_kind != PictureKind::FILE) s->pictures = made_pictures(c, d, c.num_samples, {});
    else s->pictures = first_images(*d.cond, flag, c.cond_channels, c.num_samples);
}

// Prepares the output folder, at rank 0. From now on only this run may write there.
static void take_folder(Run* run, const std::string& resume) {
    const Config& c = run->config;
    // The lock is held until the program ends, so that no other run writes here.
    if (run->folder.descriptor < 0) run->folder = make_folder(c.output_dir);
    const Folder& folder = run->folder;
    lock_folder(folder, true);
    must(folder.has_its_name(), c.output_dir, "was moved or replaced while the run began; start it again");
    check_output_dir(c, folder, resume, run->first_step); // again, now that nobody else can change it
    // Remove the files that a killed process left unfinished.
    folder.remove_leftovers({"model_", "samples_", "log.csv.", "index.html.", "ema_", "best.bin."});
    leave_later_snapshots(folder, run->first_step);
}

// From now on, a signal makes the run save what was trained, and end.
static void listen_to_signals() {
    for (const auto& [number, name] : STOP_SIGNALS) {
        const auto before = signal(number, [](int s) { stop_signal = s; });
        const bool is_nohup = before == SIG_IGN && number == SIGHUP;
        if (is_nohup) signal(number, SIG_IGN); // the command nohup asks that programs go on when the terminal closes
    }
}

// Returns why an image could not be read, or "".
static std::string data_error(const Run& run) { return run.trainer.data.error + run.val.error; }

// Ends a run that was stopped by a signal, or by data that cannot be read.
static void finish_stopped(Run* run) {
    // Data that can't be read is an error, and a signal is not an error. In both cases the message says what was saved.
    const int64_t step = run->state.step;
    const std::string saved = saved_so_far(*run);
    const std::string error = data_error(*run);
    if (!error.empty()) die("%s; stopped after step %ld; %s", error.c_str(), step, saved.c_str());
    const std::string end = text("stopped by %s after step %ld; ", STOP_SIGNALS.at(run->stop), step) + saved;
    write_page(run, "stopped", end);
    printf("%s\n", end.c_str());
}

// Ends a run that has done all its steps.
static void finish_complete(Run* run) {
    const Config& c = run->config;
    const StepState& s = run->state;
    if (c.sample_interval) save_grid(run);
    write_page(run, "done");
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    const double ms = run->seconds / (double)(s.step - run->first_step) * 1e3;
    const double peak_mib = usage.ru_maxrss / 1024.0; // Linux gives it in KiB
    printf("done: %ld steps, %.1f ms a step, peak memory %.0f MiB; see %s/\n", s.step, ms, peak_mib,
           c.output_dir.c_str());
    // Old checkpoints are removed only when a good step has followed the newest checkpoint. So one more step is done,
    // only to find out whether the last checkpoint is good.
    const int keep = c.keep_checkpoints;
    const bool too_many = !world.rank && keep && (int)run->folder.list().size() > keep;
    if (!any_rank("the question whether a checkpoint is to spare", too_many)) return;
    if (!train_step(&run->trainer, run->issued)) return;
    copy_to_host(&run->state, run->trainer.records + run->issued % RECORDS, sizeof run->state);
    if (s.ok) prove_checkpoint(run);
}

// Writes what still waits for the disk. Nobody tries again after this, so an error ends the program.
static void write_the_rest(Run* run) {
    write_log(run);
    write_waiting(run);
    if (!world.rank && (!run->unwritten_rows.empty() || fsync(run->log_file)))
        die("%s: its last rows could not be written (%s)", run->folder.name("log.csv").c_str(), strerror(errno));
    const auto& waiting = run->waiting_pictures;
    if (!waiting.empty())
        die("%s: could not be written, and so %zu pictures are missing, for want of room; the rest is there",
            run->folder.name(waiting.begin()->first).c_str(), waiting.size());
}

// Does a whole run. data: the training data. output: the folder, if it exists. resume: the path of the checkpoint to go
// on from, or "". start: that checkpoint, or the file of --init.
// Result: the program's exit code. After a signal it is 128 + the number of the signal, as in a shell. So in
// "./train_unet && next" the next program does not go on with a model that is half trained.
static int train(const Config& c, const Dataset& data, Folder output, const std::string& resume,
                 const ModelFile& start) {
    // Find what is wrong first, before the program asks for memory or writes a file.
    if (!world.rank) check_output_dir(c, output, resume, start.state().step);
    const Dataset val = open_validation_data(c, data);
    if (start.size) check_size(start, build_unet(c));
    Run run{c, make_trainer(c, data), val, output};
    Trainer& tr = run.trainer;
    run.sampler = make_sampler(c, tr.net.B);
    take_values_of_data(c, &run.sampler, val.count ? val : data);
    take_pictures_of_data(c, &run.sampler, val.count ? val : data);
    print_start(c, tr.net, data);
    if (resume.empty()) start_weights(&tr, start);
    else restore(&run, start);
    cast_params(tr.copy, tr.params, tr.net.flat_size);
    if (run.state.step >= c.max_steps) {
        printf("nothing to do: step %ld of %ld is reached; a larger --max_steps goes on\n", run.state.step,
               c.max_steps);
        return 0;
    }
    // From here on the run writes into its folder.
    if (!world.rank) take_folder(&run, resume);
    open_log(&run);
    begin_page(&run);
    listen_to_signals();

    // The loop over the steps.
    run.steps_began = now();
    while (run.issued < c.max_steps && !is_stopped(&run) && data_error(run).empty()) run_step(&run);
    if (lacks_validation(run) && data_error(run).empty()) run_step(&run);
    // When a signal has come, some steps may not be logged yet.
    const bool validate = c.keep_best && data_error(run).empty();
    if (run.state.step < run.issued) collect_steps(&run, validate, validate);
    // The end: files, the last line on the screen, and what still waits for the disk.
    save_at_the_end(&run);
    end_line(&run);
    if (run.stop || !data_error(run).empty()) finish_stopped(&run);
    else finish_complete(&run);
    write_the_rest(&run);
    end_page();
    return run.stop ? 128 + run.stop : 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// --- samples, without a run

// Returns the number of the model file's array that --sample draws from: the average of the rate --ema_rate or, without
// this flag, the first average. If the file has no average, or with --use_ema False, it is the weights (array 0).
static int array_to_sample(const Config& c, const ModelFile& m) {
    if (!c.use_ema || !m.emas()) return 0;
    std::string rates; // the rates of the averages that do not match
    for (int k = 0; k < m.emas(); k++) {
        // The rates are compared in fp32, as files hold them.
        const float rate = m.ema_rate(k);
        if (!c.given("ema_rate") || rate == (float)atof(c.ema_rate.c_str())) return m.ema_array(k);
        rates += text(" %g", rate);
    }
    die("--ema_rate %s: %s holds averages of the rates%s", c.ema_rate.c_str(), m.path.c_str(), rates.c_str());
}

// Says whether a file must not be replaced by samples, because something would be lost: the file holds a model, or data
// that are no samples.
static bool holds_more_than_samples(const Folder& folder, const std::string& name) {
    // All model files and data files begin with a header of 1024 bytes. Its first slot tells the two kinds apart.
    const int file = openat(folder.descriptor, name.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    Header h;
    const bool long_enough = read(file, h.slot, sizeof h.slot) == sizeof h.slot;
    close(file);
    if (!long_enough) return false;
    const int magic = h.slot[SLOT_MAGIC];
    const bool is_model = magic == MODEL_MAGIC || magic == UNET_CU_MODEL_MAGIC;
    const bool is_data = magic == DATA_MAGIC;
    const bool has_labels = h.slot[DATA_SLOT_CLASSES] > 0;
    const bool are_floats = h.slot[DATA_SLOT_BYTES] == 4;
    const bool are_samples = is_data && !has_labels && are_floats;
    return is_model || (is_data && !are_samples);
}

// Opens the folder of --output. Drawing samples may take long. So what would make the writing fail is found before the
// samples are drawn: a name that can't be written, or a file that must not be replaced.
static Folder open_output(const Config& c, const std::string& resume) {
    // Every message begins with the flag.
    auto refuse_unless = [&](bool ok, const std::string& why) {
        if (!ok) refuse("--output " + c.output + ": " + why);
    };
    const bool has_ending = c.output.ends_with(".png") || c.output.ends_with(".bin");
    refuse_unless(has_ending && c.output.size() > 4, "must end in .png (one grid) or .bin (float images)");
    // The folder is opened now and used until the end, even if somebody renames it meanwhile.
    const std::filesystem::path path = c.output;
    const std::string name = path.filename().string();
    const Folder folder = open_folder(path.parent_path().string());
    refuse_unless(folder.descriptor >= 0,
                  text("its folder can't be opened (%s); name one that is there", strerror(folder.error)));

    refuse_unless(!is_name_of_run(folder, name), NAME_OF_RUN);

    // A file of this name is not replaced if it holds a model or data that are no samples, or if this program reads it.
    struct stat target;
    const bool is_there = !fstatat(folder.descriptor, name.c_str(), &target, 0);
    if (is_there) {
        refuse_unless(!S_ISDIR(target.st_mode), "is a folder; name a file");
        refuse_unless(S_ISREG(target.st_mode), "is there and is no usual file; choose another name");
        for (const std::string& file :
             {c.init, resume, c.data_file, c.start_from, c.inpaint, c.mask, c.values, c.cond_file}) {
            struct stat input;
            if (file.empty() || stat(file.c_str(), &input)) continue;
            // Two names may belong to the same file. A file is identified by its device and by its inode number on this
            // device.
            const bool same = input.st_dev == target.st_dev && input.st_ino == target.st_ino;
            refuse_unless(!same, "would replace " + file + ", which is read; choose another name");
        }
        refuse_unless(!holds_more_than_samples(folder, name),
                      "holds a model or data; choose another name, or move it away");
    }
    // The last check: can a file be made there? AtomicFile makes one under another name, and removes it again.
    AtomicFile probe(folder, name);
    refuse_unless(!probe.error, probe.failure);
    probe.discard();
    return folder;
}

// Returns the content of a data file of float images. images: (count, H, W, C); in the file they are (count, C, H, W).
static std::string samples_as_data_file(const std::vector<float>& images, int count, const Config& c) {
    const int HW = c.H * c.W;
    const int C = c.in_channels;
    std::string data;
    for (int i = 0; i < count; i++)
        for (int channel = 0; channel < C; channel++)
            for (int p = 0; p < HW; p++) {
                const size_t pixel = (size_t)i * HW + p; // the pixel's number among all images' pixels
                const float* const value = &images[pixel * C + channel];
                data.append((const char*)value, sizeof(float));
            }
    // The header, with a checksum of the images and one of itself. There are no classes.
    const int data_crc = (int)crc32(0, data.data(), data.size());
    Header h;
    h.slot[SLOT_MAGIC] = DATA_MAGIC;
    h.slot[SLOT_VERSION] = 1;
    h.slot[DATA_SLOT_COUNT] = count;
    h.slot[DATA_SLOT_CHANNELS] = C;
    h.slot[DATA_SLOT_HEIGHT] = c.H;
    h.slot[DATA_SLOT_WIDTH] = c.W;
    h.slot[DATA_SLOT_BYTES] = sizeof(float);
    h.slot[DATA_SLOT_BODY_CRC] = data_crc;
    h.slot[DATA_SLOT_HEADER_CRC] = (int)crc32(0, h.slot, 1024); // this slot is still 0 when the checksum is computed
    return std::string((const char*)h.slot, 1024) + data;
}

// --sample N: draws N images from a model file and writes them into --output, which lies in folder: a PNG that shows
// them in a grid, or a data file of float images.
static void sample_and_stop(const Config& c, const Folder& folder, const ModelFile& model) {
    UNet net = build_unet(c);
    check_size(model, net);
    // Ranks share the images. With guidance the network computes each image twice: with its class and without.
    const int share = (c.sample + world.size - 1) / world.size; // rounded up
    const int batch_images = std::min(share, c.batch_size);
    plan_memory(&net, batch_images * (c.guided() ? 2 : 1), false);
    const int array = array_to_sample(c, model);
    const std::vector<float> flat = read_array(model, net, array);
    float* params = device_copy(flat);
    const Fp8Weights fp8 = make_fp8_weights(net, flat);

    // Makes the sampler. Reads its pictures, if the samples are conditioned on pictures (--cond_channels). Reads its
    // images: those that sampling starts from (--start_from), or those whose known part stays (--inpaint).
    Sampler sampler = make_sampler(c, net.B);
    const int C = c.in_channels;
    if (c.cond_channels) sampler.pictures = sample_pictures(c);
    if (!c.start_from.empty()) sampler.images = read_images(c, "start_from", c.start_from, C, C);
    if (!c.inpaint.empty()) {
        // The device holds the images and masks of one batch at a time.
        sampler.images = read_images(c, "inpaint", c.inpaint, C, C);
        sampler.masks = read_images(c, "mask", c.mask, 1, C);
        const size_t batch_values = (size_t)net.B * c.H * c.W * C;
        sampler.known = device_alloc<float>(batch_values);
        sampler.mask = device_alloc<float>(batch_values);
    }

    // Only the lines up to `seconds` are timed. On a GPU with bf16 the network reads a copy of the weights.
    const double start = now();
    act* copy = make_copy(params, net.flat_size);
    cast_params(copy, params, net.flat_size);
    const std::vector<float> images = sample_images(&net, Weights{params, copy, fp8}, &sampler, c.sample);
    const double seconds = now() - start;

    // Rank 0 has all images and writes them.
    if (world.rank) return;
    must(all_finite(images.data(), images.size()), c.output,
         "not written, because the samples are not finite; the weights in " + model.path + " are broken");
    const bool as_png = c.output.ends_with(".png");
    std::string content;
    if (as_png) content = grid_png(images, c.sample, c.H, c.W, c.in_channels, value_captions(c, sampler, c.sample));
    else content = samples_as_data_file(images, c.sample, c);
    const std::string name = std::filesystem::path(c.output).filename().string();
    const std::string failure = try_write_file(folder, name, content);
    must(failure.empty(), c.output, failure);
    // An evaluation is one call of the network for an image. From plan.begin on, plan.steps contains one entry for each
    // evaluation. A step of heun is two entries, except a step to noise 0, which is one entry.
    const int evaluations = (int)(sampler.plan.steps.size() - sampler.plan.begin);
    printf("%d images with %s, %d evaluations each, in %.2f s (%.1f images/s): %s\n", c.sample, c.sampler.c_str(),
           evaluations, seconds, c.sample / seconds, c.output.c_str());
}

// =====================================================================================================================
// 13. main: the command line, then a run or samples
// Settings that the command line leaves open are taken from elsewhere. Each setting comes from the first of these that
// has a value for it:
//   1. the command line
//   2. a model file (--init, --resume_checkpoint)
//   3. the data file: size and channels of its images, and their classes if the preset does not name them
//   4. the preset; without --preset, the one that fits the images
//   5. the flag's default
// A setting on the command line must agree with the model file, unless it is one that may change from run to run.
//
// In the order in which they run: run_program calls parse_command_line, and then complete_config, which reads presets
// (apply_preset) and model files (take_model_file). With --sample, sample_and_stop follows. For a run, check_run,
// take_data_shape and train follow.

// Returns the settings of a model file of unet.cu. The file's header holds the shape of the network, but nothing about
// the diffusion. We assume the diffusion that unet.cu itself trains with: 1000 steps and the linear schedule. Flags may
// change this.
static Config unet_cu_config(const ModelFile& model) {
    const int* s = model.header.slot;
    const int channels = s[2];
    const int num_channels = s[3];
    const int out_channels = s[4];
    const int height = s[5];
    const int width = s[6];
    const int max_period = s[7];
    Config c;
    apply_preset(&c, "unet64");
    auto set = [&](const char* name, int value) {
        set_flag(&c, *find_flag(name), std::to_string(value), model.path + ": ");
    };
    set("in_channels", channels);
    set("num_channels", num_channels);
    set("max_period", max_period);
    // The network of unet.cu has attention at its third and fourth level.
    c.image_size = text("%dx%d", height, width);
    c.attention_resolutions = text("%d,%d", height / 4, height / 8);
    c.learn_sigma = out_channels == 2 * (int64_t)channels;
    c.vlb_weight = 0;
    c.noise_schedule = "linear";
    return c;
}

// Sets a flag to the value in a model file. If the command line gives the flag, too, the two values must be the same.
// But a flag that may change from run to run keeps the value of the command line.
static void take_from_file(Config* c, const std::string& path, const std::string& name, const std::string& value) {
    const Flag& f = *find_flag(name);
    const bool given = c->given(name);
    const bool may_change = f.slot > SLOT_STEP || f.free;
    if (given && may_change) return;
    const std::string wanted = flag_value(*c, f);
    set_flag(c, f, value, path + ": ");
    if (given && !same_value(name, flag_value(*c, f), wanted))
        die("--%s %s: %s was made with %s; leave the flag out, or start without that file", f.name, wanted.c_str(),
            path.c_str(), flag_value(*c, f).c_str());
}

// Says whether a flag's value is a text that parse_model reads. In a header, such a value is not one number in one
// slot, but a list of numbers, or two numbers in two slots.
static bool is_parsed(const std::string& name) {
    return name == "image_size" || name == "channel_mult" || name == "attention_resolutions" || name == "cond";
}

// Does the same as take_model_file, for a model file of unet.cu.
static void take_unet_cu_file(Config* c, const ModelFile& model) {
    const Config theirs = unet_cu_config(model);
    for (const Flag& f : FLAGS) {
        const bool is_in_header = f.slot && f.slot <= SLOT_STEP;
        if (!is_parsed(f.name) && !is_in_header) continue;
        // The file holds nothing about the diffusion, so the command line may set the diffusion's flags freely.
        const bool is_diffusion = f.slot >= SLOT_DIFFUSION && f.slot < SLOT_PATCH_SIZE;
        if (is_diffusion && c->given(f.name)) continue;
        take_from_file(c, model.path, f.name, flag_value(theirs, f));
    }
}

// Returns the paths of --data_file and --cond_file that a checkpoint holds; "": it holds no such path.
static std::pair<std::string, std::string> kept_paths(const ModelFile& model) {
    const std::string kept((const char*)&model.header.slot[SLOT_PATH], 512);
    const std::string data_file = kept.substr(0, kept.find('\0'));
    const std::string rest = kept.substr(std::min<size_t>(data_file.size() + 1, 512));
    return {data_file, rest.substr(0, rest.find('\0'))};
}

// Finds a data file whose path is kept in a checkpoint. The path may be relative to the folder in which the run was
// started. That folder may be one of the folders above the checkpoint. So the file is also looked for in all of these
// folders.
static std::string find_data(const ModelFile& model, const std::string& data_file) {
    std::filesystem::path found(data_file);
    std::filesystem::path folder = std::filesystem::absolute(model.path).parent_path();
    while (found.is_relative() && !exists(found.string()) && folder.has_relative_path()) { // up to the root
        const std::filesystem::path candidate = folder / data_file;
        if (exists(candidate.string())) found = candidate;
        folder = folder.parent_path();
    }
    return data_file.empty() ? "" : found.string();
}

// Sets flags that a resumed run takes from its checkpoint. Other model files do not set these flags.
static void take_run_of_file(Config* c, const ModelFile& model) {
    std::string rates;
    for (int k = 0; k < model.emas(); k++) {
        if (k) rates += ",";
        rates += text("%.9g", model.ema_rate(k));
    }
    if (!c->given("ema_rate")) take_from_file(c, model.path, "ema_rate", rates);
    // Random draws depend on the seed and the step. So the run goes on with the same draws as if it had never paused.
    const int64_t seed = model.header.get<int64_t>(SLOT_SEED);
    take_from_file(c, model.path, "seed", std::to_string(seed));
    const auto [data_file, cond_file] = kept_paths(model);
    const std::string data_path = find_data(model, data_file);
    const std::string cond_path = find_data(model, cond_file);
    if (!data_path.empty() && !c->given("data_file")) take_from_file(c, model.path, "data_file", data_path);
    if (!cond_path.empty() && !c->given("cond_file")) take_from_file(c, model.path, "cond_file", cond_path);
}

// Sets the flags that a header holds as lists or in two slots (is_parsed).
static void take_parsed_flags(Config* c, const ModelFile& model) {
    const Header& h = model.header;
    const int levels = h.slot[SLOT_LEVELS];
    const int resolutions = h.slot[SLOT_RESOLUTIONS];
    std::string mult;
    for (int i = 0; i < levels; i++) {
        if (i) mult += ",";
        mult += text("%.9g", h.get<float>(SLOT_MULT + i));
    }
    std::string heights;
    for (int i = 0; i < resolutions; i++) {
        if (i) heights += ",";
        heights += text("%d", h.slot[SLOT_ATTENTION + i]);
    }
    const int height = h.slot[SLOT_HEIGHT];
    const int width = h.slot[SLOT_WIDTH];
    take_from_file(c, model.path, "image_size", size_text(height, width));
    take_from_file(c, model.path, "channel_mult", mult);
    take_from_file(c, model.path, "attention_resolutions", heights);
    // --cond: how pictures are made.
    check_field(model.path, "cond", h.slot[SLOT_COND], 0, std::size(PICTURE_WORDS) - 1);
    const int factor = h.slot[SLOT_COND + 1];
    const std::string kind = PICTURE_WORDS[h.slot[SLOT_COND]].word;
    take_from_file(c, model.path, "cond", kind + (factor ? text(":%d", factor) : ""));
}

// Returns the value that a header holds for a flag with a slot, as a user would type it.
static std::string header_value(const Config& c, const Header& h, const Flag& f) {
    if (f.at<float>(c)) return text("%.9g", h.get<float>(f.slot));
    const std::vector<std::string> words = choices(f);
    const size_t number = h.slot[f.slot];
    return number < words.size() ? words[number] : std::to_string(h.slot[f.slot]);
}

// For each flag that the command line leaves open, takes the value in a model file. Compares the other flags with the
// file. resume: the file is a checkpoint whose run goes on. Then the settings of the run are taken, too, not only those
// of the model.
static void take_model_file(Config* c, const ModelFile& model, bool resume) {
    const std::string& path = model.path;
    const Header& h = model.header;
    if (resume && !model.has(HAS_EMA | HAS_TRAINING))
        die("%s: holds weights only, no moments to resume from; --init starts a new run from it", path.c_str());
    // --objective ect tunes a model that was trained with another objective.
    const bool is_tuned = !resume && c->given("objective") && c->objective == "ect" && !is_ect(h);
    const bool from_unet_cu = h.slot[SLOT_MAGIC] == UNET_CU_MODEL_MAGIC;
    if (is_tuned && (from_unet_cu || objective_of(h) == "ddpm"))
        die("--objective ect: tunes models of --objective edm and flow, and %s was made with ddpm", path.c_str());
    if (from_unet_cu) return take_unet_cu_file(c, model);

    take_parsed_flags(c, model);
    if (is_tuned) take_from_file(c, path, "ect_frame", header_value(*c, h, *find_flag("objective")));
    for (const Flag& f : FLAGS) {
        const bool is_of_run = f.slot > SLOT_STEP;
        if (!f.slot || (is_of_run && !resume)) continue;
        // Tuning has its own objective and noise levels, so it does not take them from the file.
        const bool tuning_has_it = f.slot == SLOT_OBJECTIVE || f.slot == SLOT_P_MEAN || f.slot == SLOT_P_STD;
        if (is_tuned && tuning_has_it) continue;
        if (slot_is_used(h, f)) take_from_file(c, path, f.name, header_value(*c, h, f));
        else check_unused(h, f.slot, f.slot + 1, path, "");
    }
    if (resume) take_run_of_file(c, model);
}

// Sets the defaults of --objective ect and --sampler consistency: the values with which Geng et al. 2024 tune.
// file_has_levels: a model file has set the noise levels (P_mean and P_std).
static void take_ect_defaults(Config* c, bool file_has_levels) {
    const bool ect = c->objective == "ect";
    if (ect && !c->given("sampler")) c->sampler = "consistency";
    if (c->sampler == "consistency") {
        if (!c->given("timestep_respacing")) c->timestep_respacing = "2";
        if (!c->given("S_churn")) c->S_churn = 0; // a preset's value is for another sampler
    }
    if (ect && !file_has_levels) {
        if (!c->given("P_mean")) c->P_mean = -1.1f;
        if (!c->given("P_std")) c->P_std = 2;
    }
}

// Takes the size, channels and classes of the images from the data file, if neither a flag nor a model file sets them.
// Then checks that the data fits the model. where: "FILE: " if a model file sets them; otherwise "".
static void take_data_shape(Config* c, const Dataset& d, const std::string& where) {
    if (where.empty()) {
        if (!c->given("image_size")) c->image_size = size_text(d.H, d.W);
        // The attention resolutions of the preset may be impossible for images of this size. Then there is attention at
        // the lowest level instead.
        if (!c->given("attention_resolutions") && !parse_model(c).empty() && !c->mult.empty())
            c->attention_resolutions = text("%d", c->height(c->mult.size() - 1));
        if (!c->given("in_channels")) c->in_channels = d.C;
        if (!c->given("cond_channels") && d.cond) c->cond_channels = d.cond->C;
        if (!c->chosen("num_classes")) c->num_classes = d.classes;
    }
    auto refuse_unless = [&](bool ok, const char* flag, const std::string& why) {
        if (!ok) refuse(where + wrong(c, flag, why));
    };
    // If the images and the model differ in size, this is said first, because it explains most other errors.
    const std::string error = check_model(c);
    const bool fits = d.H == c->H && d.W == c->W;
    if (!error.empty() && (fits || error.starts_with("--image_size"))) refuse(where + error);
    refuse_unless(fits, "data_file",
                  text("its images are %dx%d and the model's %dx%d; prepare_data.py --image_size makes them fit", d.H,
                       d.W, c->H, c->W));
    refuse_unless(d.C == c->in_channels, "data_file",
                  text("its images have %d channels and the model takes %d; prepare_data.py --channels makes them fit",
                       d.C, c->in_channels));
    refuse_unless(
        d.K == c->cond_dim || !c->cond_dim, "cond_dim",
        c->data_file + (d.K ? text(" has %d numbers an image", d.K)
                            : " has no numbers; prepare_data.py --values TABLE puts those of a table into it"));
    const bool makes_them = c->picture_kind != PictureKind::FILE;
    refuse_unless(d.cond || makes_them || !c->cond_channels, "cond_channels",
                  "needs --cond_file, a picture for each of the images");
    refuse_unless(!d.cond || d.cond->C == c->cond_channels, "cond_file",
                  text("its pictures have %d channels and the model takes --cond_channels %d", d.cond ? d.cond->C : 0,
                       c->cond_channels));
    if (!c->class_cond) return;
    refuse_unless(d.classes <= c->num_classes, "num_classes",
                  c->data_file + text(" has labels of %d classes", d.classes));
    refuse_unless(!d.labels.empty(), "class_cond",
                  c->data_file + " has no labels; make it from a folder with one sub-folder a class");
}

// Returns the path of the checkpoint that --resume_checkpoint means, or "" if the run is new.
static std::string resume_path(const Config& c, const Folder& output) {
    const std::string& wanted = c.resume_checkpoint;
    if (wanted != "latest" && wanted != "auto") return wanted;
    const auto found = output.list();
    if (!found.empty()) return output.name(found.rbegin()->second);
    if (wanted == "auto") return "";
    die("--resume_checkpoint latest: %s holds no checkpoint; leave the flag out to start a run there%s",
        c.output_dir.c_str(), output.has("log.csv") ? ", once its log.csv is moved away" : "");
}

// Checks that the counters of a checkpoint agree, and that the run goes on with the data that it began with. If the
// user gives --data_file, it may be other data.
static void check_resume(const Config& c, const ModelFile& m, const Dataset& d) {
    const StepState s = m.state();
    const Guard& g = s.guard;
    // Every step was either an update or skipped. The guard's n is the number of updates.
    const int most_steps = std::min(2000000000, m.header.slot[SLOT_MAX_STEPS]);
    const bool steps_add_up = s.step <= most_steps && s.updates >= 0 && s.updates + s.bad_total == s.step;
    const bool skips_fit = s.bad_in_row >= 0 && s.bad_in_row <= s.bad_total;
    const bool is_finite = std::isfinite(g.mean_loss + g.mean_norm + g.var_loss + g.var_norm);
    const bool guard_works = g.n == (double)s.updates && is_finite && g.var_loss >= 0 && g.var_norm >= 0;
    std::string why; // in what way the counters are wrong
    if (!steps_add_up)
        why = text("step %ld of at most %d, where %ld updates and %ld skipped steps must add up to it", s.step,
                   most_steps, s.updates, s.bad_total);
    else if (!skips_fit)
        why = text("%ld skipped steps in a row, where %ld were skipped in all", s.bad_in_row, s.bad_total);
    else if (!guard_works) why = text("running means of loss and gradient norm that %ld updates can't give", s.updates);
    if (!why.empty()) die("%s: its header is damaged (%s): use an earlier checkpoint", m.path.c_str(), why.c_str());
    // The data file's checksum depends on its whole content. It is 0 for a file of unet.cu, which holds no checksum.
    const bool same_count = m.header.get<int64_t>(SLOT_IMAGES) == d.count;
    const bool same_content = m.header.get<uint32_t>(SLOT_DATA_CRC) == d.header_crc;
    if (!(same_count && same_content) && !c.given("data_file"))
        die("%s: is not the data that %s was trained on; name it with --data_file, or name this one to go on with it",
            c.data_file.c_str(), m.path.c_str());
    const bool same_pictures = !d.cond || m.header.get<uint32_t>(SLOT_COND_CRC) == d.cond->header_crc;
    if (!same_pictures && !c.given("cond_file"))
        die("%s: does not hold the pictures that %s was trained with; name them with --cond_file, or name this file to "
            "go on with it",
            c.cond_file.c_str(), m.path.c_str());
}

// ---------------------------------------------------------------------------------------------------------------------
// --- what ranks must have in common

// Returns a checksum that tells two input files apart, in about a second. Our own files hold, in their first 1024
// bytes, a checksum of their whole content, which is verified when they are read. So the first 1024 bytes of these
// files would be enough. But files of unet.cu hold no checksum. Therefore up to 64 MiB of any file are read: the whole
// file or, if it is larger, 256 excerpts of it at equal distances, the first at its beginning and the last at its
// end. This notices other images or weights, and files that were cut short. It may miss only a difference in a few
// images of a large file of unet.cu.
static uint32_t sample_checksum(const InputFile& file) {
    constexpr size_t EXCERPTS = 256;
    constexpr size_t EXCERPT = 256 << 10; // bytes
    if (file.size <= EXCERPTS * EXCERPT) return file.crc(0, 0);
    std::vector<uint8_t> excerpt(EXCERPT);
    uint32_t crc = 0;
    const size_t last_begin = file.size - EXCERPT;
    for (size_t k = 0; k < EXCERPTS; k++) {
        file.read(excerpt.data(), EXCERPT, last_begin / (EXCERPTS - 1) * k);
        crc = crc32(crc, excerpt.data(), EXCERPT);
    }
    // The distance between excerpts was rounded down, so the loop's last one may begin before last_begin. Therefore the
    // excerpt at last_begin is read, too.
    file.read(excerpt.data(), EXCERPT, last_begin);
    return crc32(crc, excerpt.data(), EXCERPT);
}

// Returns a line about an input file. It is the same at all ranks that read the same content. The path is not in the
// line, because it may differ from machine to machine.
static std::string describe_input(const std::string& name, const std::string& path) {
    if (path.empty()) return "no " + name + "\n";
    InputFile file;
    file.open(path, "every rank reads it, at the same path unless its own command line names another");
    const uint32_t checksum = sample_checksum(file);
    close(file.file);
    return text("a %s of %zu bytes and checksum %08x\n", name.c_str(), file.size, checksum);
}

// Ends the program, before anything is written, if ranks run different programs, or read different inputs or flags.
// Such ranks would compute different things, or wait for each other for ever. Each rank describes its program, inputs
// and flags in lines of text, which are compared.
static void compare_ranks(const Config& c, const std::string& weights) {
    if (world.size < 2) return;
    std::ifstream self("/proc/self/exe", std::ios::binary);
    const std::string program{std::istreambuf_iterator<char>(self), {}};
    std::string mine = text("a program of checksum %08x\n", crc32(0, program.data(), program.size()));
    const bool training = !c.sample;
    mine += describe_input("file of weights (--init, --resume_checkpoint)", weights);
    mine += describe_input("--data_file", training ? c.data_file : "");
    mine += describe_input("--val_data_file", training ? c.val_data_file : "");
    mine += describe_input("--cond_file", c.cond_file);
    mine += describe_input("--val_cond_file", training ? c.val_cond_file : "");
    mine += describe_input("--start_from", c.start_from);
    mine += describe_input("--inpaint", c.inpaint);
    mine += describe_input("--mask", c.mask);
    // Flags that name inputs are left out below, because the content of these files is in the lines above. --device,
    // --output and --output_dir may differ: each machine has its own devices and folders, and only rank 0 writes.
    mine += text("--values of checksum %08x\n", crc32(0, c.value_rows.data(), c.value_rows.size() * sizeof(float)));
    const std::set<std::string> inputs = {"init",    "data_file", "val_data_file", "cond_file", "val_cond_file",
                                          "inpaint", "mask",      "values",        "start_from"};
    const std::set<std::string> may_differ = {"device", "output", "output_dir"};
    for (const Flag& f : FLAGS) {
        const std::string name = f.name;
        if (inputs.contains(name) || may_differ.contains(name)) continue;
        std::string value = flag_value(c, f);
        const bool names_file = !value.empty() && value != "latest" && value != "auto";
        if (name == "resume_checkpoint" && names_file) value = "FILE"; // its content is compared above
        mine += text("--%s %s\n", f.name, value.c_str());
    }
    must_agree("the comparison of flags and files", mine);
}

// ---------------------------------------------------------------------------------------------------------------------
// --- main

// Returns the preset that is used without --preset. It depends on the size of the images, if --data_file or --data_dir
// is given.
static const char* default_preset(const Config& c, const Dataset& data) {
    if (!c.data_dir.empty()) return PRESET_64; // prepare_data.py makes images of 64x64 out of a folder
    if (!data.size) return DEFAULT_PRESET;
    if (data.H == 64) return PRESET_64;
    return data.H == 32 ? PRESET_32 : PRESET_ELSE;
}

// --num_gpus: if several GPUs are to be used and no launcher has started a process for each of them, this process
// starts them and waits until they have ended. value: a number, or all. patience: --rank_timeout.
static void take_num_gpus(const std::string& value, int patience, char** argv) {
    ranks.patience = patience;
    // For "all", number is 0.
    const int number = atoi(value.c_str());
    const bool is_number = number >= 1 && std::to_string(number) == value;
    if (value != "all" && !is_number) die("--num_gpus %s: must be a number from 1 on, or all", value.c_str());
    if (world.size > 1 && number > 1 && number != world.size)
        die("--num_gpus %d: a launcher has started %d processes; leave the flag out", number, world.size);
    if (world.size > 1 || number == 1) return;
    // There is only this process. If it is to use more than one GPU, it becomes the launcher.
    const int gpus = count_gpus();
    const int count = value == "all" ? gpus : number;
    if (count > gpus) die("--num_gpus %d: the program can use %d here", count, gpus);
    if (count <= 1) return;
    if (ranks_need()) die("--num_gpus %d: %s", count, ranks_need());
    start_ranks(count, argv);
}

// Ends the program if two flags are given that contradict each other.
static void check_contradictions(const Config& c) {
    const bool names_checkpoint = !c.resume_checkpoint.empty() && c.resume_checkpoint != "auto";
    if (!c.init.empty() && names_checkpoint)
        die("--init and --resume_checkpoint: a run starts from one of them; leave the other out");
    if (c.given("data_file") && c.given("data_dir"))
        die("--data_file and --data_dir: a run trains on one of them; leave the other out");
}

// Sets what the command line leaves open, except what take_data_shape takes from the data. Opens the data file if the
// choice of a preset needs it. resume: the model file is a checkpoint whose run goes on.
static void complete_config(Config* c, const ModelFile& model, bool resume, Dataset* data) {
    // Without --preset, the preset is chosen by the size of the images. A preset sets flags that the command line
    // leaves open. If a model file holds another value for such a flag, the model file's value is used.
    if (c->preset.empty()) {
        if (c->given("data_file")) *data = open_dataset(c->data_file);
        c->preset = default_preset(*c, *data);
    }
    apply_preset(c, c->preset);
    if (model.size) take_model_file(c, model, resume);
    take_rescale_learned_sigmas(c, model.size);
    take_ect_defaults(c, model.size && is_ect(model.header));
    // A preset may ask for more sampling steps than the diffusion has. Then sampling takes all steps of the diffusion.
    const bool too_many = atoi(c->timestep_respacing.c_str()) > c->diffusion_steps;
    if (too_many && !c->given("timestep_respacing")) c->timestep_respacing = "";
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
    take_num_gpus(c.num_gpus, c.rank_timeout, argv);
    check_contradictions(c);

    // Rank 0 opens the folders that it writes to, and chooses the checkpoint for all ranks.
    Folder output;  // the folder of --output_dir
    Folder samples; // the folder of --output
    std::string resume;
    if (!world.rank) {
        output = open_folder(c.output_dir);
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
    complete_config(&c, model, resumes, &data);
    const std::string where = model.size ? model.path + ": " : ""; // in messages: which file the settings come from
    start_device(c.precision, c.device);
    const bool directly = meaning<bool>("exchange", c.exchange, {{"auto", true}, {"nccl", false}});

    // Samples, without a run.
    if (c.sample) {
        if (!model.size) die("--sample %d: needs --init FILE, a model to sample from", c.sample);
        const std::string error = check_model(&c);
        if (!error.empty()) refuse(where + error);
        compare_ranks(c, model.path);
        join_devices(directly);
        sample_and_stop(c, samples, model);
        return 0;
    }

    // A run: its data, all checks, and then the training.
    if (!c.data_dir.empty()) take_data_dir(&c, where);
    check_run(&c, where);
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

// =====================================================================================================================
// 14. What all devices share: elements, nonlinearities, patches of pixels

// Kernels are compiled for a type T of elements: float or, on a GPU, bf16. ElementOf<T> holds the constants that depend
// on the type, except those that follow from the type's size. (Enum Element, in section 1, lists what else a new type
// needs.)
template <class T> struct ElementOf;
template <class T> constexpr bool IS_MISSING = false; // for a static_assert where each type needs code of its own
template <> struct ElementOf<float> {
    static constexpr Element ELEMENT = Element::FP32;
    static constexpr bool FAST_EXP = false; // Is the hardware's approximation of e^x exact enough for such tensors?
    static constexpr int PARTS = 2;         // into how many fp16 numbers one number is split for the tensor cores
    static constexpr uint32_t TWO_ONES = 0x3C003C00; // two ones in the type that the tensor cores multiply: fp16
    static constexpr int FEW_PARTS = 1;              // how many numbers of this type add up to a float in conv_few
};
#ifdef __CUDACC__
typedef __nv_bfloat16 bf16;
template <> struct ElementOf<bf16> {
    static constexpr Element ELEMENT = Element::BF16;
    static constexpr bool FAST_EXP = true;
    static constexpr int PARTS = 1; // tensor cores multiply bf16 as it is
    static constexpr uint32_t TWO_ONES = 0x3F803F80;
    static constexpr int FEW_PARTS = 2;
};
#endif

// To add a nonlinearity, write a struct like Silu below, with two functions: f(z) returns the function's value, and
// df(u) returns its derivative at the same z, which it is given as u = Z_FACTOR<T> z. Then add a value to enum
// Nonlinearity, and its case to with_nonlinearity. A df that needs z itself begins with z = u / Z_FACTOR<T>.
//
// The group norms of both builds call f and df, and contain no formula of a nonlinearity themselves. The embedding's
// SiLU is another thing: a kind of layer (SILU), with kernels of its own. A model file does not say with which
// nonlinearity it was trained.
//
// Why df is given u: the sigmoid is computed fastest from u. For bf16, u = -z log2(e), since the hardware computes 2^u,
// which is then e^-z. For fp32, u is z. The factor costs nothing: a norm's z is x * scale + shift, and the norm
// multiplies scale and shift by the factor, once for each image and channel.
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
template <class T> constexpr float Z_FACTOR = ElementOf<T>::FAST_EXP ? -LOG2E : 1;

// Returns sigmoid(z) = 1 / (1 + e^-z), as exact as tensors of type T need it. u = Z_FACTOR<T> z
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

// Calls work(Silu<T>{}) if n is SILU, and nothing if n is NONE.
template <class T, class F> HD INLINE void with_nonlinearity(Nonlinearity n, F work) {
    switch (n) {
    case Nonlinearity::NONE: return;
    case Nonlinearity::SILU: return work(Silu<T>{});
    }
    ALL_CASES_RETURN
}
// nvcc's compilers look for a missing case only in code for the host. So the last line here compiles with_nonlinearity
// for the host, too.
struct NoWork {
    template <class N> HD void operator()(N) const {}
};
template void with_nonlinearity<float>(Nonlinearity, NoWork);

// PyTorch's F.pixel_unshuffle turns pixels (B, H, W, C) into patches (B, H / p, W / p, C p p). Returns where element i
// of the pixels lies in the patches.
HD static inline size_t place_in_patches(size_t i, int H, int W, int C, int p) {
    const int c = i % C;
    const int w = i / C % W;
    const int h = i / C / W % H;
    const size_t b = i / C / W / H;
    const size_t patch = (b * (H / p) + h / p) * (W / p) + w / p;
    return ((patch * C + c) * p + h % p) * p + w % p;
}

#ifndef __CUDACC__
// =====================================================================================================================
// 15. The CPU: the device is the host; operations are in dev/reference.h

#include "dev/reference.h"

// These are the functions of the interface that are no operations. Many of them do nothing: the device's memory is the
// host's, work is done when a function returns, and operations allocate the memory that they need (so they need no
// workspace).
// conv_takes_skip: on a CPU no convolution computes its skip connection itself.
static bool conv_takes_skip(const ConvShape&, const ConvShape&) { return false; }
static size_t conv_workspace(ConvShape) { return 0; }
static size_t conv_detour_bytes(const ConvShape&) { return 0; }
static size_t groupnorm_backward_workspace(const NormShape&) { return 0; }
static size_t norm_sums_bytes(const NormShape&) { return 0; }
static size_t attention_backward_workspace(int, int, int, int) { return 0; }
static size_t linear_backward_workspace(int, int, int) { return 0; }
static size_t loss_workspace(int) { return 0; }
static void reserve(const Workspace&, bool) {}
static int max_stat_parts(int, int) { return 1; }

Stream* const MAIN_STREAM = nullptr; // there is only one stream

// Returns memory that is filled with zeros. It begins at a multiple of 256 bytes, so that it is aligned to whole cache
// lines and vectors.
static void* device_alloc_bytes(size_t bytes) {
    void* p = nullptr;
    if (posix_memalign(&p, 256, bytes))
        die("%.2f GiB of memory could not be had; a smaller --batch_size or a --microbatch needs less", bytes / 0x1p30);
    memset(p, 0, bytes);
    device_bytes += bytes;
    return p;
}

static size_t device_available() { return SIZE_MAX; } // whether there is enough is found out when memory is requested
[[maybe_unused]] static void device_free(void* p) { free(p); }
static void copy_to_device(void* device, const void* host, size_t bytes) { memcpy(device, host, bytes); }
static void copy_to_host(void* host, const void* device, size_t bytes) { memcpy(host, device, bytes); }

// Operations run one after the other, so no stream waits for another.
template <class F> static void run_beside(int, F work) { work(MAIN_STREAM); }
static void wait_for_side(int) {}

static int count_gpus() {
    die("--num_gpus: this is the CPU build; for several processes, make train_unet_mpi; mpirun -n 2 ./train_unet_mpi");
}

static void start_device(const std::string& precision, int number) {
    if (number) die("--device %d: this is the CPU build; leave the flag out, or make train_unet_cuda", number);
    act_element = element_named(precision, Element::FP32);
    if (act_element != Element::FP32)
        die("--precision %s (--use_fp16 True): the CPU build computes in fp32; leave the flag out, or use fp32",
            name_of(act_element));
}

static std::string device_name() { return text("the CPU, %ld threads", sysconf(_SC_NPROCESSORS_ONLN)); }

// A CPU records no work: each call of replay calls work.
template <class F> static void replay(Graph*, F work) { work(); }
static void free_graph(Graph*) {}

// The two buffers of an Upload, the host's and the device's, are the same memory.
static Upload make_upload(size_t bytes) {
    uint8_t* p = (uint8_t*)device_alloc_bytes(bytes);
    return Upload{p, p, bytes, nullptr, nullptr};
}
static void wait_for_host_side(Upload*) {}
static void send(Upload*) {}
static void release(Upload*) {}

#else // the GPU
// =====================================================================================================================
// 16. The GPU: what all kernels share
//
// From top to bottom: the GPU and its streams, launches, decisions; then what kernels are built of: single PTX
// instructions, activations in registers, sums over threads, tensor cores (mma.sync on any GPU; TMA and wgmma on
// Hopper).

// Loops over registers must be unrolled: an array is in registers only if every index is known to the compiler.
#define UNROLL_FOR _Pragma("unroll") for
#define UNROLL_4_FOR _Pragma("unroll 4") for
#define UNROLL_8_FOR _Pragma("unroll 8") for
#define NO_UNROLL_FOR _Pragma("unroll 1") for // for loops that the compiler would unroll, so that registers would spill

#if __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "code for compute capability 9.0 is compiled for sm_90a, which has wgmma: -gencode arch=compute_90a,code=sm_90a"
#endif

// The properties of a GPU on which the choice of a kernel may depend. To give a new kind of GPU tiles of its own, add a
// member that tells this kind from the others.
struct Gpu {
    int sms;                             // multiprocessors
    int shared_per_sm, shared_per_block; // bytes of shared memory: of a multiprocessor, and the most for one block
    bool overlap;                        // this binary has code of sm_90 or later for this GPU, so launches may overlap
    bool clusters;                       // the binary has such code, and clusters of blocks are allowed
    bool wgmma;                          // the code is for sm_90a, and its wgmma and TMA are allowed

    // shared_for: the bytes of dynamic shared memory that each block can have if `blocks` of them have to fit on a
    // multiprocessor. blocks_of: how many blocks of `bytes` each fit. In addition, every block needs 1 KB for the
    // system, and `statics` bytes for the __shared__ variables that its kernel declares.
    constexpr int shared_for(int blocks, int statics = 0) const {
        return std::min(shared_per_sm / blocks - 1024, shared_per_block) - statics;
    }
    constexpr int blocks_of(int bytes, int statics = 0) const { return shared_per_sm / (bytes + statics + 1024); }
};
// The tiles of kernels are made for these GPUs. Kernels without wgmma run on any GPU. So their tiles must fit into the
// shared memory of an RTX 30, which has the least.
constexpr Gpu RTX_30{82, 100 * 1024, 99 * 1024, false, false, false};
constexpr Gpu H200{132, 228 * 1024, 227 * 1024, true, true, true};
static Gpu gpu; // the GPU of this process; tests put other GPUs here

// A Stream is a CUDA stream (queue) and its workspace. Kernels of a stream run one after the other, so each operation
// may overwrite the whole workspace. What an operation leaves in the workspace is lost when the next operation runs.
struct Stream {
    cudaStream_t queue = nullptr;
    char* workspace = nullptr;
    size_t workspace_bytes = 0;
    bool joined = false; // the next kernel is launched without overlap; for example, it waits for another stream, too
};

// The device itself is the main stream. It also holds a side stream, whose kernels run at the same time (run_beside).
struct Device : Stream {
    Stream side;
    cudaStream_t copy_stream = nullptr; // nothing that runs on it needs a workspace
    char* norm_sums = nullptr;          // sums that group norms' backward passes leave for finish_gradients
    size_t norm_sums_bytes = 0;
};
static Device device;
Stream* const MAIN_STREAM = &device;

#define CUDA_CHECK(call)                                                                                               \
    do {                                                                                                               \
        const cudaError_t error_ = (call);                                                                             \
        if (error_ != cudaSuccess) die("CUDA: %s (%s:%d: %s)", cudaGetErrorString(error_), __FILE__, __LINE__, #call); \
    } while (0)

// ---------------------------------------------------------------------------------------------------------------------
// --- Launches, which may overlap
// Launches a kernel that may overlap the kernel before it (programmatic dependent launch, sm_90 and later; CUDA C++
// Programming Guide, "Programmatic Dependent Launch and Synchronization"):
//
//   kernel A   |---- blocks run ----------|
//   kernel B        |-- prepares --|waits |---- blocks run ----|
//                                         ^ await_previous_kernel returns
//
// B's blocks start as soon as all blocks of A have called await_previous_kernel and there is room. So every kernel that
// is launched like this calls await_previous_kernel before it reads or writes anything that another kernel writes.
// Before this call, B may compute addresses, read its parameters, and read what kernels before A wrote, because those
// kernels have ended.
// cluster: how many neighbouring blocks can access each other's shared memory (1: no cluster).
template <class... Parameters, class... Arguments>
static void launch_on(Stream* stream, int cluster, void (*kernel)(Parameters...), dim3 grid, dim3 threads,
                      size_t shared_bytes, Arguments... arguments) {
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config{grid, threads, shared_bytes, stream->queue, attributes, 0};
    if (gpu.overlap && allowed.early && !stream->joined) {
        cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
        overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        overlap.val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        cudaLaunchAttribute& dimension = attributes[config.numAttrs++];
        dimension.id = cudaLaunchAttributeClusterDimension;
        dimension.val.clusterDim = {(unsigned)cluster, 1, 1};
    }
    stream->joined = false;
    if (shared_bytes)
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes));
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...));
}
// Does the same as launch_on, on the main stream and without a cluster: launch(kernel, grid, threads, shared bytes,
// arguments ...).
template <class... Rest> static void launch(Rest... rest) { launch_on(MAIN_STREAM, 1, rest...); }

// Launches a kernel that does not call await_previous_kernel. It starts when everything before it has ended.
template <class... Rest> static void launch_behind(Rest... rest) {
    device.joined = true;
    launch(rest...);
}

// ---------------------------------------------------------------------------------------------------------------------
// --- Decisions: what kernels are chosen with
// A Way is a row of a decision table: a condition, and the function that launches a kernel. decide calls the function
// of the first row whose condition holds.
template <class Call> struct Way {
    bool when;
    void (*launch)(const Call&);
};
template <class Call, int N> static void decide(const Call& call, const Way<Call> (&table)[N]) {
    const auto* const way = std::ranges::find(table, true, &Way<Call>::when);
    if (way == std::end(table)) die("internal error: no kernel for --precision %s here", name_of(act_element));
    way->launch(call);
}

// Returns f(T()), where T is the type of activations (act_element). The program passes activations as act*, from which
// the compiler does not know this type. f is a template, so within f the compiler knows the type.
template <class F> static auto with_act(F f) {
    switch (act_element) {
    case Element::FP32: return f(float());
    case Element::BF16: return f(bf16());
    case Element::FP8:
    case Element::FP8_GRADIENT: break; // act_element is never FP8
    }
    ALL_CASES_RETURN
}

// Hopper's kernels (those that multiply by wgmma) are written for bf16. conv_tiles and conv_small are also written for
// FP8.
static bool act_has_wgmma() { return gpu.wgmma && act_element == Element::BF16; }

// Holds the candidate with the least measured cost. If several candidates have this cost, it is the first of them.
template <class T> struct Cheapest {
    T best = {};
    double cost = INFINITY;
    void consider(double c, const T& candidate) {
        if (c < cost) {
            cost = c;
            best = candidate;
        }
    }
};

#ifdef __CUDA_ARCH__
constexpr int ARCH = __CUDA_ARCH__; // what this code is compiled for: 900 is compute capability 9.0
#else
constexpr int ARCH = 0; // the host
#endif
constexpr bool CLUSTERS = ARCH >= 900;

// ---------------------------------------------------------------------------------------------------------------------
// --- Single instructions: shared memory, mbarriers, clusters
// PTX ISA, "Instruction Set". Addresses of shared memory are 32 bits wide here (shared_address). INLINE functions are
// not static, so that the compiler does not warn about those that a build does not use.

// PTX(...) is an instruction without results. Because of volatile and "memory", the compiler moves no other memory
// access and no barrier past this instruction.
#define PTX(TEXT, ...) asm volatile(TEXT ::__VA_ARGS__ : "memory")

// Waits until the kernels before this one have ended and their writes can be seen (see launch_on). After that, it lets
// the next kernel start. With the opposite order, three kernels could overlap, although the third kernel waits only for
// the second one.
INLINE void await_previous_kernel() {
    if (CLUSTERS) PTX("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;");
}

INLINE uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
// Loads of 4, 8 and 16 bytes. They are volatile, so that the compiler does not move them past a barrier.
INLINE float load_float(uint32_t address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
    return v;
}
INLINE float2 load_shared_2(uint32_t address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
    return v;
}
INLINE uint4 load_shared(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}
INLINE void store_shared(uint32_t to, uint4 v) {
    PTX("st.shared.v4.b32 [%0], {%1,%2,%3,%4};", "r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}

// --- mbarriers (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier")
// An mbarrier is a counter of 8 bytes in shared memory. It goes through phases 0, 1, 2, ... A phase ends when two
// things have happened: `arrivals` threads (see mbarrier_init) have arrived, and TMA or st.async has written all bytes
// that were announced for the phase. A thread that waits for a phase gives only the phase's parity (0 for phases 0, 2,
// 4, ...), so no thread may be two phases late.
INLINE void mbarrier_init(uint32_t barrier, int arrivals) {
    PTX("mbarrier.init.shared::cta.b64 [%0], %1;", "r"(barrier), "r"(arrivals));
}
INLINE void mbarrier_expect(uint32_t barrier, int bytes) { // arrives, and announces that bytes will be written
    PTX("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;", "r"(barrier), "r"(bytes));
}
INLINE void mbarrier_arrive(uint32_t barrier) { PTX("mbarrier.arrive.shared::cta.b64 _, [%0];", "r"(barrier)); }
INLINE void mbarrier_wait(uint32_t barrier, uint32_t parity) { // waits until the phase of this parity has ended
    PTX("{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra done; bra again; done: }",
        "r"(barrier), "r"(parity));
}
// Is called after mbarrier_init: makes the barriers visible to TMA and to other blocks of the cluster.
INLINE void mbarriers_ready() { PTX("fence.mbarrier_init.release.cluster;"); }

// --- clusters of blocks (PTX ISA, "barrier.cluster", "mapa", "st.async"): a barrier for all threads of a cluster, and
// accesses to the shared memory of its other blocks
// The barrier has two halves, and a block can do something else between them. cluster_arrive makes only the initial
// state of mbarriers visible to the other blocks, and no other writes.
INLINE void cluster_arrive() { PTX("fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed.aligned;"); }
INLINE void cluster_wait() { PTX("barrier.cluster.wait.acquire.aligned;"); }
// cluster_sync is the whole barrier. Everything that was written before it is visible to all threads of the cluster.
INLINE void cluster_sync() { PTX("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"); }
// Returns the address, in the cluster's block `rank`, that corresponds to address p of this block.
INLINE uint32_t at_block(uint32_t p, int rank) {
    asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(p) : "r"(rank));
    return p;
}
// Writes 8 or 16 bytes, in the background, to an address that at_block returned. When the bytes are written, this is
// reported to `barrier`, an mbarrier in the shared memory of the block to which the address belongs.
INLINE void store_to_block(uint32_t p, uint32_t barrier, float2 v) {
    PTX("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];", //
        "r"(p), "f"(v.x), "f"(v.y), "r"(barrier));
}
INLINE void store_to_block(uint32_t p, uint32_t barrier, float4 v) {
    PTX("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];", //
        "r"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier));
}
// Arrives at another block's barrier. The arrival is relaxed, which means that it orders no writes. With release, the
// compiler would insert a fence for all of the GPU's memory.
INLINE void arrive_at_block(uint32_t barrier) {
    PTX("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];", "r"(barrier));
}

// ---------------------------------------------------------------------------------------------------------------------
// --- Activations: pieces of 16 bytes
// A piece is 16 bytes: VEC<T> neighbouring channels of a pixel, 8 bf16 or 4 floats. Threads load and store whole
// pieces, the widest access that there is. Channel counts are multiples of 32, so a pixel is a whole number of pieces.
// In registers a piece is unpacked to fp32; arithmetic is always fp32, and results are rounded once, in pack.
template <class T> constexpr int VEC = 16 / sizeof(T);
static int act_vec() { return 16 / (int)act_bytes(); }

INLINE uint4 load16(const void* p) { return *(const uint4*)p; }

// A bf16 is the upper half of a float: unpacking is a shift or a mask.
INLINE float2 unpack_bf16(uint32_t v) {
    return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}
INLINE void add_bf16(float* sum, uint32_t v) {
    sum[0] += unpack_bf16(v).x;
    sum[1] += unpack_bf16(v).y;
}
// Each type of elements has its own specialisations of these conversions. The compiler refuses a type that lacks one.
template <class T> INLINE void unpack(float (&v)[VEC<T>], uint4 r) { static_assert(IS_MISSING<T>, "another type"); }
template <> INLINE void unpack<float>(float (&v)[4], uint4 r) {
    v[0] = __uint_as_float(r.x);
    v[1] = __uint_as_float(r.y);
    v[2] = __uint_as_float(r.z);
    v[3] = __uint_as_float(r.w);
}
template <> INLINE void unpack<bf16>(float (&v)[8], uint4 r) {
    const uint32_t pairs[4] = {r.x, r.y, r.z, r.w};
    UNROLL_FOR (int i = 0; i < 4; i++) {
        v[2 * i] = unpack_bf16(pairs[i]).x;
        v[2 * i + 1] = unpack_bf16(pairs[i]).y;
    }
}
// Adds the values of a piece to sum.
template <class T> INLINE void add_piece(float (&sum)[VEC<T>], uint4 piece) {
    float v[VEC<T>];
    unpack<T>(v, piece);
    UNROLL_FOR (int i = 0; i < VEC<T>; i++) {
        sum[i] += v[i];
    }
}

// pack is the reverse of unpack: it packs floats into a piece. For bf16, floats are rounded to the nearest bf16, ties
// to even.
INLINE uint32_t pack_bf16(float low, float high) {
    const __nv_bfloat162 r = __floats2bfloat162_rn(low, high);
    return *(const uint32_t*)&r;
}
template <class T> INLINE uint4 pack(const float (&v)[VEC<T>]) { static_assert(IS_MISSING<T>, "another type"); }
template <> INLINE uint4 pack<float>(const float (&v)[4]) {
    uint4 r;
    r.x = __float_as_uint(v[0]);
    r.y = __float_as_uint(v[1]);
    r.z = __float_as_uint(v[2]);
    r.w = __float_as_uint(v[3]);
    return r;
}
template <> INLINE uint4 pack<bf16>(const float (&v)[8]) {
    uint4 r;
    r.x = pack_bf16(v[0], v[1]);
    r.y = pack_bf16(v[2], v[3]);
    r.z = pack_bf16(v[4], v[5]);
    r.w = pack_bf16(v[6], v[7]);
    return r;
}

// Converts 4 or 8 floats to FP8, with the same rounding as fp8_bits. TO: FP8 (e4m3) or FP8_GRADIENT (e5m2).
template <Element TO = Element::FP8> INLINE uint32_t pack_fp8(float a, float b, float c, float d) {
    static_assert(is_fp8(TO));
    uint32_t r = 0;
#if __CUDA_ARCH__ >= 900
    if constexpr (TO == Element::FP8) {
        asm("{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; "
            "mov.b32 %0, {low, high};}"
            : "=r"(r)
            : "f"(a), "f"(b), "f"(c), "f"(d));
    } else {
        asm("{.reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, %2, %1; cvt.rn.satfinite.e5m2x2.f32 high, %4, %3; "
            "mov.b32 %0, {low, high};}"
            : "=r"(r)
            : "f"(a), "f"(b), "f"(c), "f"(d));
    }
#endif
    return r;
}
template <Element TO = Element::FP8> INLINE uint2 pack_fp8(const float (&v)[8]) {
    return make_uint2(pack_fp8<TO>(v[0], v[1], v[2], v[3]), pack_fp8<TO>(v[4], v[5], v[6], v[7]));
}
// Multiplies 8 floats by a factor, and converts them.
template <Element TO = Element::FP8> INLINE uint2 scaled_to_fp8(const float (&v)[8], float factor) {
    float scaled[8];
    UNROLL_FOR (int i = 0; i < 8; i++) scaled[i] = v[i] * factor;
    return pack_fp8<TO>(scaled);
}

INLINE float4 operator+(float4 a, float4 b) {
    a.x += b.x;
    a.y += b.y;
    a.z += b.z;
    a.w += b.w;
    return a;
}
INLINE float4 operator*(float4 a, float4 b) {
    a.x *= b.x;
    a.y *= b.y;
    a.z *= b.z;
    a.w *= b.w;
    return a;
}

// Four<T> is four elements as they lie in memory (8 or 16 bytes). It is used in loops over four channels at a time.
// to_floats converts the elements to floats, and from_floats rounds floats to such elements.
template <class T> struct FourOf;
template <> struct FourOf<float> { typedef float4 Type; };
template <> struct FourOf<bf16> { typedef uint2 Type; };
template <class T> using Four = typename FourOf<T>::Type;

template <class T> INLINE float4 to_floats(Four<T> v) { static_assert(IS_MISSING<T>, "another type"); }
template <> INLINE float4 to_floats<float>(float4 v) { return v; }
template <> INLINE float4 to_floats<bf16>(uint2 v) {
    const float2 low = unpack_bf16(v.x);
    const float2 high = unpack_bf16(v.y);
    return make_float4(low.x, low.y, high.x, high.y);
}
template <class T> INLINE Four<T> from_floats(float4 v) { static_assert(IS_MISSING<T>, "another type"); }
template <> INLINE float4 from_floats<float>(float4 v) { return v; }
template <> INLINE uint2 from_floats<bf16>(float4 v) { return make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w)); }
// Stores two neighbouring elements, rounded to the type of `to`.
INLINE void store_two(bf16* to, float a, float b) { *(uint32_t*)to = pack_bf16(a, b); }
INLINE void store_two(float* to, float a, float b) { *(float2*)to = make_float2(a, b); }
template <class T> INLINE float4 load4(const T* p) { return to_floats<T>(*(const Four<T>*)p); }

// Writes 8 or 16 bytes by one instruction. An ordinary store may be split by the compiler. Then half of every 32-byte
// sector that is written to memory is wasted.
INLINE void store_whole(void* p, uint4 v) {
    PTX("st.global.v4.b32 [%0], {%1,%2,%3,%4};", "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w));
}
INLINE void store_whole(void* p, uint2 v) { PTX("st.global.v2.b32 [%0], {%1,%2};", "l"(p), "r"(v.x), "r"(v.y)); }
INLINE void store_whole(void* p, float4 v) {
    PTX("st.global.v4.f32 [%0], {%1,%2,%3,%4};", "l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w));
}
// Stores v, rounded to T. Returns the rounded values, because the statistics must be computed from the values that the
// group norm will read.
template <class T> INLINE float4 store4(T* p, float4 v) {
    const Four<T> four = from_floats<T>(v);
    store_whole(p, four);
    return to_floats<T>(four);
}

// Converts a Grad to a GradOf<T>. Kernels need this, because they must know the type of the gradient's elements.
template <class T> static GradOf<T> typed(const Grad& g) { return {(T*)g.dx, (const T*)g.add1, (const T*)g.add2}; }

// dx[i ...] = v + the addends, for the VEC<T> elements of a piece
template <class T> INLINE void store_gradient(const GradOf<T>& g, size_t i, float (&v)[VEC<T>]) {
    UNROLL_FOR (int k = 0; k < 2; k++) {
        const T* add = k ? g.add2 : g.add1;
        if (add) add_piece<T>(v, load16(add + i));
    }
    *(uint4*)(g.dx + i) = pack<T>(v);
}

// A gradient that is also written in FP8 (e5m2), unless fp8.bytes is null. The FP8 numbers are made from the values as
// T stores them, so it does not matter which kernel makes them.
template <class T> struct Fp8GradOf : GradOf<T> { Fp8Copy fp8; };
template <class T> INLINE void store_gradient_fp8(const Fp8GradOf<T>& g, size_t i, float (&v)[VEC<T>], float factor) {
    if (!g.fp8.bytes) return;
    unpack<T>(v, pack<T>(v));
    store_whole(g.fp8.bytes + i, scaled_to_fp8<Element::FP8_GRADIENT>(v, factor));
}

// These are the hardware's approximations of 2^x and 1 / x. Their errors are one or two units in the last place.
// Denormal numbers are treated as 0.
INLINE float exp2_fast(float x) {
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}
INLINE float reciprocal_fast(float x) {
    asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}

// Returns 1 / (1 + e^-z). u is Z_FACTOR<T> z (see Silu). For bf16, e^-z = 2^u is one instruction. The rounding of u
// causes a relative error of about 1e-6 at |z| = 10, far below bf16's 4e-3. For fp32, u is z, and e^-z is computed by
// the library's expf, which is more exact.
template <class T> INLINE float sigmoid(float u) {
    const float e_to_minus_z = ElementOf<T>::FAST_EXP ? exp2_fast(u) : expf(-u);
    return reciprocal_fast(1.0f + e_to_minus_z);
}

HD static constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Says where a tile begins: image n, row h, column w. An image is cut into tiles_h x tiles_w tiles of rows x columns
// pixels. If images are small, a tile covers the same place in each of `images` images.
struct Origin {
    int n, h, w;
};
INLINE Origin tile_origin(int tile, int tiles_h, int tiles_w, int rows, int columns, int images = 1) {
    Origin o;
    o.n = tile / tiles_w / tiles_h * images;
    o.h = tile / tiles_w % tiles_h * rows;
    o.w = tile % tiles_w * columns;
    return o;
}

// --- copies from global to shared memory in the background (cp.async, sm_80; PTX ISA, "Asynchronous Copy: non-bulk")
// A thread starts copies, and closes a group of them (copies_committed). Then it does something else. Later it waits
// until all groups except the latest PENDING have arrived (copies_arrived). Groups arrive in the order in which they
// were closed. A thread waits only for the copies that it has started itself; for the copies of other threads, a
// __syncthreads must follow. valid = false: the copy writes zeros (the padding of an image). Even then `from` must be
// an address that can be read.
INLINE void copies_committed() { PTX("cp.async.commit_group;"); }
template <int PENDING> INLINE void copies_arrived() { PTX("cp.async.wait_group %0;", "n"(PENDING)); }

INLINE void copy_async_16(void* to, const void* from, bool valid = true) {
    PTX("cp.async.cg.shared.global [%0], [%1], 16, %2;", "r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0));
}
// Copies a piece of a row. The neighbouring pieces will be read soon, so the L2 cache fetches 128 bytes at once. If
// wanted is false, nothing is copied. wanted becomes a predicate, not a branch, so the compiler can place such copies
// between the products of a loop.
INLINE void copy_async_row_if(bool wanted, uint32_t to, const void* from, bool valid) {
    PTX("{.reg .pred wanted; setp.ne.b32 wanted, %0, 0; "
        "@wanted cp.async.cg.shared.global.L2::128B [%1], [%2], 16, %3;}",
        "r"((int)wanted), "r"(to), "l"(from), "r"(valid ? 16 : 0));
}
// Copies 8 channels: one piece of bf16, or two pieces of floats. In the second piece's address bit 4 is toggled,
// because rows are swizzled (see Swizzle).
template <class T> INLINE void copy_channels(uint32_t to, int offset, const T* from, bool valid, bool wanted = true) {
    static_assert(VEC<T> <= 8, "8 channels must fill at least one piece");
    UNROLL_FOR (int j = 0; j < 8 / VEC<T>; j++) {
        const uint32_t piece = (to ^ (j * 16)) + offset;
        copy_async_row_if(wanted, piece, from + j * VEC<T>, valid);
    }
}
// Returns the address of a pixel of C channels. Written like this, the computation is one instruction: it multiplies
// two 32-bit numbers, and adds the product to a 64-bit address.
template <class T> INLINE const T* pixel_of(const T* x, uint32_t pixel, int C) {
    const uint32_t pixel_bytes = C * (int)sizeof(T);
    return (const T*)((const char*)x + (size_t)pixel * pixel_bytes);
}
// Copies BYTES bytes (4 or 8) in the same way as copy_async_16.
template <int BYTES> INLINE void copy_async(void* to, const void* from, bool valid = true) {
    PTX("cp.async.ca.shared.global [%0], [%1], %2, %3;", "r"(shared_address(to)), "l"(from), "n"(BYTES),
        "r"(valid ? BYTES : 0));
}
// Returns the cache policy for data that is read for the last time: the L2 cache drops it before all other data.
INLINE uint64_t last_read() {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
INLINE void copy_async_16(void* to, const void* from, uint64_t policy) {
    PTX("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;", "r"(shared_address(to)), "l"(from),
        "l"(policy));
}

// --- sums over threads, all in a fixed order, so that results are the same in every run

// Returns the sum over those lanes of a warp whose numbers differ only in the bits BITS. The sum is returned in each of
// these lanes. For example, lane_sum<1, 2> adds lanes 4i, 4i + 1, 4i + 2, 4i + 3. BITS are used in the order in which
// they are given. `lanes` is a mask of all lanes that call the function. lane_max returns the largest value instead of
// the sum. (The fold over `, ...` repeats the statement for each of BITS.)
template <int... BITS, class T> INLINE T lane_sum(T v, unsigned lanes = 0xFFFFFFFFu) {
    ((v += __shfl_xor_sync(lanes, v, BITS)), ...);
    return v;
}
template <class T> INLINE T warp_sum(T v) { return lane_sum<16, 8, 4, 2, 1>(v); }
template <int... BITS> INLINE float lane_max(float v) {
    ((v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFFu, v, BITS))), ...);
    return v;
}

// Adds the values of two lanes whose numbers differ by `offset`, and leaves half of the sums in each lane. Before, each
// lane holds 2 HALF values in v. Afterwards the first HALF elements of v are sums: in the lower lane those of the first
// HALF values, and in the upper lane those of the last HALF values. Returns whether this lane is the upper lane.
template <int HALF, int N> INLINE bool halve(float (&v)[N], int offset) {
    const bool upper = threadIdx.x & offset;
    UNROLL_FOR (int i = 0; i < HALF; i++) {
        const float keep = upper ? v[i + HALF] : v[i];
        const float give = upper ? v[i] : v[i + HALF];
        v[i] = keep + __shfl_xor_sync(0xFFFFFFFFu, give, offset);
    }
    return upper;
}

// Computes two sums for each channel, over a block's threads. For a group norm's statistics, the two are the sums of x
// and of x^2. In a group norm's backward pass, they are the sums of dz and of dz x. The threads are arranged in rows of
// `columns` threads. All threads of a column hold values of the same V neighbouring channels:
//
//                column 0        column 1
//   row 0    [   thread 0        thread 1   ]      a thread brings first[V] and second[V], in fp32
//   row 1    [   thread 2        thread 3   ]
//   ...
//   result(k, column, sum) is called once for every column, channel i of the V channels, and array:
//     k      2 i for first, 2 i + 1 for second
//     sum    the sum over the column's threads, in double
//
// THREADS, V and columns are powers of 2. shared has room for 2 V (THREADS + columns) floats.
template <int THREADS, int V, class F>
INLINE void fold_columns(float* shared, int columns, const float (&first)[V], const float (&second)[V], F result) {
    const int pitch = THREADS + columns; // padded, so that different k lie in different banks
    UNROLL_FOR (int i = 0; i < V; i++) {
        shared[2 * i * pitch + threadIdx.x] = first[i];
        shared[(2 * i + 1) * pitch + threadIdx.x] = second[i];
    }
    __syncthreads();
    const int lanes = THREADS / (2 * V * columns); // threads that add up one sum together
    const int i = threadIdx.x / lanes;             // the index of the sum that this thread helps to add up
    const int lane = threadIdx.x % lanes;
    const int k = i / columns;
    const int column = i % columns;
    double total = 0;
    UNROLL_8_FOR (int t = lane * columns + column; t < THREADS; t += lanes * columns) {
        total += shared[k * (THREADS + columns) + t];
    }
    for (int o = lanes / 2; o; o /= 2) {
        total += __shfl_xor_sync(0xFFFFFFFFu, total, o);
    }
    if (lane == 0) result(k, column, total);
}

// ---------------------------------------------------------------------------------------------------------------------
// --- each_kernel: a thread for an element
// Small operations are written as a lambda f(i), which each(n, f) runs for every i < n, in blocks of 256 threads.
static int blocks_for(size_t n) { return (int)std::max<size_t>((n + 255) / 256, 1); }

template <class F> static __global__ void __launch_bounds__(256) each_kernel(size_t n, F f) {
    await_previous_kernel();
    if (const size_t i = (size_t)blockIdx.x * 256 + threadIdx.x; i < n) f(i);
}
template <class F> static void each_on(Stream* stream, size_t n, F f) {
    launch_on(stream, 1, each_kernel<F>, blocks_for(n), 256, 0, n, f);
}
template <class F> static void each(size_t n, F f) { each_on(MAIN_STREAM, n, f); }

// ---------------------------------------------------------------------------------------------------------------------
// --- Tensor cores by mma.sync (sm_80 and later): ldmatrix, mma_bf16; floats as two fp16 numbers
// The 32 lanes of a warp multiply together: d (16, 8) += a (16, 16) * b (16, 8). The matrices lie in the registers of
// the lanes, as fragments (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type"). With g = lane / 4
// and q = lane % 4, a lane holds:
//
//             columns k                         n                              columns n
//             2q, 2q+1  2q+8, 2q+9          k   g                              2q, 2q+1
//   row g   [    a[0]      a[2]   ]   2q, 2q+1 [ b[0] ]             row g    [ d[0] d[1] ]
//   row g+8 [    a[1]      a[3]   ]   2q+8, +9 [ b[1] ]             row g+8  [ d[2] d[3] ]
//
// Each register of a and b holds two elements that are neighbours along k. So two neighbouring tiles of a result d,
// packed to bf16, can be used as a fragment a of another product. Attention does this with its probabilities, which
// therefore need not be written to shared memory.

// ldmatrix loads four 8x8 matrices of 16-bit elements from shared memory into v[0], v[1], w[0], w[1]. The four matrices
// are one fragment a or two fragments b. Lanes 8i ... 8i + 7 pass the addresses of matrix i's rows. Lane l receives two
// elements of each matrix: elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4. ldmatrix_trans transposes each matrix.
// Both functions use volatile asm, so that the compiler does not move the loads past a barrier.
#define LDMATRIX(NAME, TRANSPOSED)                                                                 \
    INLINE void NAME(uint32_t* v, uint32_t* w, uint32_t address) {                                 \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4" TRANSPOSED ".shared.b16 {%0,%1,%2,%3}, [%4];" \
                     : "=r"(v[0]), "=r"(v[1]), "=r"(w[0]), "=r"(w[1])                              \
                     : "r"(address));                                                              \
    }
LDMATRIX(ldmatrix, "")
LDMATRIX(ldmatrix_trans, ".trans")

#define MMA(NAME, TYPES)                                                                  \
    INLINE void NAME(float(&d)[4], const uint32_t* a, const uint32_t* b) {                \
        asm volatile("mma.sync.aligned.m16n8k16.row.col." TYPES                           \
                     " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"             \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                     \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1])); \
    }
MMA(mma_bf16, "f32.bf16.bf16.f32")
MMA(mma_fp16, "f32.f16.f16.f32")

// How floats are multiplied on the tensor cores. TF32 would keep only 11 bits of a float. Instead, a float is scaled by
// a power of two and then split into the sum of two fp16 numbers of 11 bits each, high + low. The relative error is at
// most 2^-22. A product of two floats is then three products of fp16: high high' + high low' + low high' (low low' is
// too small to matter). A fragment of floats has twice as many registers as one of bf16: all high parts, then all low
// parts. fp16 has a small range of exponents, so numbers that are split together share one scale, which depends on the
// largest of them. Numbers that are smaller than the largest by a factor of 2^17 or more lose bits.
// PARTS: how many numbers an element is split into. A fragment has PARTS times as many registers as one of bf16.
template <class T> constexpr int PARTS = ElementOf<T>::PARTS;
static int act_parts() {
    return with_act([]<class T>(T) { return PARTS<T>; });
}

// For types that are not split (PARTS = 1): mma computes d += a b. pack_pair packs two neighbours along k into one
// register of a fragment.
template <class T> INLINE void mma(float (&d)[4], const uint32_t* a, const uint32_t* b) {
    static_assert(ElementOf<T>::ELEMENT == Element::BF16, "another type needs its instruction here");
    mma_bf16(d, a, b);
}
template <class T> INLINE uint32_t pack_pair(float low, float high) {
    static_assert(ElementOf<T>::ELEMENT == Element::BF16, "another type needs its conversion here");
    return pack_bf16(low, high);
}
struct PartScale {
    uint32_t exponent; // the exponent of the largest magnitude, as a float stores it
    INLINE explicit PartScale(uint32_t top) : exponent(max(top >> 23, 15)) {}      // top: the largest magnitude's bits
    INLINE float apply() const { return __uint_as_float((268 - exponent) << 23); } // brings top to 2^14 ... 2^15
    INLINE float undo() const { return __uint_as_float((exponent - 14) << 23); }   // 1 / apply()
};
INLINE void take_apart_pair(float v, float w, float scale, uint32_t& high, uint32_t& low) {
    const __half2 h = __floats2half2_rn(v * scale, w * scale);
    const __half2 l = __floats2half2_rn(v * scale - __low2float(h), w * scale - __high2float(h));
    high = *(const uint32_t*)&h;
    low = *(const uint32_t*)&l;
}

// Splits N fragments, which are in a warp's registers. Before, each register holds a float, and each pair of registers
// holds two neighbours along k. Afterwards the first half of a fragment's registers holds high parts, and the second
// half holds low parts. Within 16 values of k, any order is right if it is the same order in a and in b. Returns the
// factor that undoes the scale. For bf16 the function does nothing and returns 1.
template <class T, int N, int R> INLINE float take_apart_fragments(uint32_t (&x)[N][R]) {
    if (PARTS<T> == 1) return 1;
    float top = 0;
    UNROLL_FOR (const auto& fragment : x)
        UNROLL_FOR (uint32_t v : fragment) top = fmaxf(top, fabsf(__uint_as_float(v)));
    const PartScale scale(__reduce_max_sync(0xFFFFFFFF, __float_as_uint(top)));
    UNROLL_FOR (auto& v : x) {
        uint32_t low[R / 2];
        UNROLL_FOR (int i = 0; i < R; i += 2)
            take_apart_pair(__uint_as_float(v[i]), __uint_as_float(v[i + 1]), scale.apply(), v[i / 2], low[i / 2]);
        UNROLL_FOR (int i = 0; i < R / 2; i++) {
            v[R / 2 + i] = low[i];
        }
    }
    return scale.undo();
}

// Convolutions split floats while they lie in shared memory, because each number is used in several fragments. A place
// holds 8 floats: one piece at an address, and one piece at this address with bit 4 toggled. After the split, the first
// piece holds the 8 high parts, in the layout of 8 bf16. The second piece holds the 8 low parts. Each thread splits the
// floats that it has copied itself, so no barrier is needed between copy and split. places(f) calls f(address) for all
// of a thread's places.
// There are two steps, with a __syncthreads between them. In find_top each warp writes its largest magnitude into
// `tops`. take_apart_places finds the largest magnitude of all warps, scales by a factor that depends on it, splits,
// and returns the factor that undoes the scale.
INLINE void load_place(float (&v)[8], uint32_t at) {
    UNROLL_FOR (int i = 0; i < 2; i++) {
        unpack<float>((float(&)[4])v[4 * i], load_shared(at ^ (i * 16)));
    }
}
template <int WARPS, class Places> INLINE void find_top(uint32_t (&tops)[WARPS], Places places) {
    float top = 0, v[8];
    places([&](uint32_t at) {
        load_place(v, at);
        UNROLL_FOR (float x : v) top = fmaxf(top, fabsf(x));
    });
    // Magnitudes are compared as whole numbers: floats that are not negative have the same order as their bits.
    const uint32_t warp_top = __reduce_max_sync(0xFFFFFFFF, __float_as_uint(top));
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = warp_top;
}
template <int WARPS, class Places> INLINE float take_apart_places(uint32_t (&tops)[WARPS], Places places) {
    uint32_t top = 0, parts[2][4];
    UNROLL_FOR (uint32_t t : tops) top = max(top, t);
    const PartScale scale(top);
    places([&](uint32_t at) {
        float v[8];
        load_place(v, at);
        UNROLL_FOR (int i = 0; i < 4; i++) {
            take_apart_pair(v[2 * i], v[2 * i + 1], scale.apply(), parts[0][i], parts[1][i]);
        }
        UNROLL_FOR (int i = 0; i < 2; i++) {
            store_shared(at ^ (i * 16), (const uint4&)parts[i]);
        }
    });
    return scale.undo();
}

// d[m * a_step + n * b_step] += a[m] * b[n] for NA x NB tiles of a result, over 16 columns k. scale: for floats, the
// factor that undoes the scales of both operands.
// For floats, each product is the sum of three products of fp16 parts: high * high, high * low and low * high. Tensor
// cores truncate when they add. So tensor cores add up only these three products over 16 columns. The fp32 units, which
// round, add this sum to d. Each of the three products has to wait for the product before it. So up to four tiles take
// turns, which hides the latency.
template <class T, int NA, int NB>
INLINE void multiply(float (*d)[4], int a_step, int b_step, const uint32_t (*a)[4 * PARTS<T>],
                     const uint32_t (*b)[2 * PARTS<T>], float scale) {
    constexpr int N = NA * NB; // tiles
    constexpr int AT_ONCE = PARTS<T> == 1 ? 1 : std::min(N, 4);
    auto at = [&](int i) -> float(&)[4] { return d[i % NA * a_step + i / NA * b_step]; };
    static_assert(N % AT_ONCE == 0, "the tiles take turns in whole groups");
    UNROLL_FOR (int first = 0; first < N; first += AT_ONCE) {
        if constexpr (PARTS<T> == 1) mma<T>(at(first), a[first % NA], b[first / NA]);
        else {
            float sum[AT_ONCE][4] = {};
            // low high', high low', high high': the smallest product first
            UNROLL_FOR (int product = 0; product < 3; product++)
                UNROLL_FOR (int i = 0; i < AT_ONCE; i++)
                    mma_fp16(sum[i], a[(first + i) % NA] + 4 * (product == 0),
                             b[(first + i) / NA] + 2 * (product == 1));
            UNROLL_FOR (int i = 0; i < 4 * AT_ONCE; i++) {
                at(first + i / 4)[i % 4] += sum[i / 4][i % 4] * scale;
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// --- Swizzle: how rows lie in shared memory
// ldmatrix reads 16 bytes (a chunk) of 8 neighbouring rows at once. Shared memory has 32 banks of 4 bytes, so 8 chunks
// can be read at once if they lie in 8 different groups of 4 banks. With rows of 128 bytes, chunk c of all rows would
// lie in the same group. So chunk c of row r lies at place c ^ swizzle_key(r). With 8 chunks to a row the key is r % 8:
//
//   place    0 1 2 3 4 5 6 7
//   row 0    0 1 2 3 4 5 6 7      the chunk that lies there. Chunk 0 of rows 0, 1, 2, ... lies at
//   row 1    1 0 3 2 5 4 7 6      places 0, 1, 2, ...: each in a group of banks of its own.
//   row 2    2 3 0 1 6 7 4 5
//
// With 4 chunks to a row (64 bytes), two rows share the 128 bytes, and the key is r / 2 % 4. With 2 chunks to a row it
// is r / 4 % 2. With an odd number of chunks no key is needed: the rows begin at different banks anyway.
template <int CHUNKS> INLINE int swizzle_key(int row) {
    constexpr int BITS = std::min(3, std::countr_zero((unsigned)CHUNKS)); // how often 2 divides CHUNKS
    return (row >> (3 - BITS)) & ((1 << BITS) - 1);
}

// ---------------------------------------------------------------------------------------------------------------------
// --- Hopper (sm_90a): TMA, wgmma and what goes with them

// TMA, the tensor memory accelerator (PTX ISA, "cp.async.bulk.tensor"), moves a box of a tensor between global and
// shared memory. One thread starts the move, and the hardware computes all addresses. A tensor map (made by tensor_map)
// describes the tensor and the size of the box. a, b, c, d are the coordinates of the box's first element; a belongs to
// the innermost dimension. For an activation, they are its channel, column, row and image. Where a box lies outside of
// the tensor, tma_load reads zeros, and tma_store writes nothing. A load reports its bytes to an mbarrier when they
// have arrived. Before, mbarrier_expect must tell this mbarrier how many bytes will come.
INLINE void tma_load(uint32_t to, const CUtensorMap* map, uint32_t barrier, int a, int b, int c, int d = 0) {
    PTX("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3,%4,%5,%6}], [%2];",
        "r"(to), "l"(map), "r"(barrier), "r"(a), "r"(b), "r"(c), "r"(d));
}
// Loads contiguous bytes in the same way, without a map. Addresses and sizes are multiples of 16 bytes.
INLINE void bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier) {
    PTX("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];", //
        "r"(to), "l"(from), "r"(bytes), "r"(barrier));
}
INLINE void tma_store(const CUtensorMap* map, uint32_t from, int a, int b, int c, int d = 0) {
    PTX("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2,%3,%4,%5}], [%1];", //
        "l"(map), "r"(from), "r"(a), "r"(b), "r"(c), "r"(d));
}
INLINE void prefetch_tensor_map(const CUtensorMap* map) { PTX("prefetch.tensormap [%0];", "l"(map)); }
// Waits until this thread's tma_stores have read shared memory. After that, this memory may be written again.
INLINE void tma_stores_read() { PTX("cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;"); }
// TMA and wgmma access shared memory by another path than ordinary instructions (PTX ISA, "Async proxy"). After this
// fence, TMA and wgmma see what the thread has written to shared memory with ordinary stores.
INLINE void fence_async() { PTX("fence.proxy.async.shared::cta;"); }

// Named barriers (PTX ISA, "bar"). A block has 16 of these barriers, with the numbers (id) 0 to 15. `threads` threads
// take part in a barrier. warps_sync arrives at the barrier and waits; warps_arrive only arrives.
INLINE void warps_sync(int id, int threads) { PTX("bar.sync %0, %1;", "r"(id), "r"(threads)); }
INLINE void warps_arrive(int id, int threads) { PTX("bar.arrive %0, %1;", "r"(id), "r"(threads)); }

// wgmma (PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate"): a warpgroup, 4 warps, computes
// D (64, N) += A (64, 16) * B (16, N) in the background. B is in shared memory. A is in shared memory, too, or in
// registers: then each warp holds 16 rows of A, as a fragment a of mma_bf16. D is in registers: float d[N / 2] of each
// thread.
//
//   thread t of the 128:   r = t / 32 * 16 + t % 32 / 4,   c = 8 j + t % 4 * 2          for j = 0 ... N / 8 - 1
//   d[4 j] = D(r, c)       d[4 j + 1] = D(r, c + 1)        d[4 j + 2] = D(r + 8, c)     d[4 j + 3] = D(r + 8, c + 1)
//
// So a thread holds elements of two rows, r and r + 8, and of two columns in each group of 8 columns.
// K_MAJOR: the operand's rows in memory run along k; MN_MAJOR: along m or n. ADD = 0: D = A * B, without +=.
// The order of calls:   wgmma_fence, add, add, ..., wgmma_commit   (a group, which now runs),   multiplied<PENDING>(d)
enum { K_MAJOR = 0, MN_MAJOR = 1 };
template <int N> struct Wgmma;
// An asm statement names every register, so each N needs a text of its own. The parameters of WGMMA are numbers of the
// asm's operands (%0, %1, ...), except the last:
//   D              D's registers
//   OP1 ... OP7    the operands that follow D's registers. What they are depends on where A is:
//
//                    A in shared memory   OP1 and OP2: the descriptors of A and B;
//                                         OP3 and OP4: their majors (K_MAJOR or MN_MAJOR)
//                    A in registers       OP1 to OP4: the four registers of A;
//                                         OP5: the descriptor of B; OP6: its major; OP7: ADD
//
//   ...            D's registers, as C++ operands of the asm
// In the instruction, "1, 1, 1" means: add to D, do not negate A, do not negate B.
#define PRODUCT_64(N) "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 "
#define IF_NOT_0(OP) "{.reg .pred p; setp.ne.b32 p, " OP ", 0; "
#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define WGMMA(N, D, OP1, OP2, OP3, OP4, OP5, OP6, OP7, ...)                                                       \
    template <> struct Wgmma<N> {                                                                                 \
        typedef float Sums[N / 2];                                                                                \
        template <int A_MAJOR, int B_MAJOR> INLINE static void add(Sums& d, uint64_t a, uint64_t b) {             \
            asm volatile(PRODUCT_64(N) "{" D "}, " OP1 ", " OP2 ", 1, 1, 1, " OP3 ", " OP4 ";"                    \
                         : __VA_ARGS__                                                                            \
                         : "l"(a), "l"(b), "n"(A_MAJOR), "n"(B_MAJOR));                                           \
        }                                                                                                         \
        template <int B_MAJOR, int ADD = 1> INLINE static void add(Sums& d, const uint32_t (&a)[4], uint64_t b) { \
            asm volatile(IF_NOT_0(OP7) PRODUCT_64(N) "{" D "}, {" OP1 "," OP2 "," OP3 "," OP4 "}, " OP5           \
                                                     ", p, 1, 1, " OP6 ";}"                                       \
                         : __VA_ARGS__                                                                            \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(B_MAJOR), "n"(ADD));           \
        }                                                                                                         \
    };
#define D16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define D32 D16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define D48 D32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define D64 D48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define D80 D64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define D96 D80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define D112 D96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define D128 D112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define SUMS_64 SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48)
#define SUMS_96 SUMS_64, SIXTEEN(64), SIXTEEN(80)
WGMMA(32, D16, "%16", "%17", "%18", "%19", "%20", "%21", "%22", SIXTEEN(0))
WGMMA(64, D32, "%32", "%33", "%34", "%35", "%36", "%37", "%38", SIXTEEN(0), SIXTEEN(16))
WGMMA(128, D64, "%64", "%65", "%66", "%67", "%68", "%69", "%70", SUMS_64)
WGMMA(192, D96, "%96", "%97", "%98", "%99", "%100", "%101", "%102", SUMS_96)
WGMMA(256, D128, "%128", "%129", "%130", "%131", "%132", "%133", "%134", SUMS_96, SIXTEEN(96), SIXTEEN(112))

// WgmmaFp8 does the same in FP8: D (64, N) += A (64, 32) * B (32, N). A and B are in shared memory and K_MAJOR; in FP8,
// wgmma does not accept MN_MAJOR operands. One of the two may hold gradients (e5m2): conv_tiles has the pixels as B
// (e4m3.e5m2), conv_small as A (e5m2.e4m3). In all FP8 products the tensor cores keep only 14 bits of a sum, which is
// enough here (docs/LEARNT.md).
template <int N, Element A, Element B> struct WgmmaFp8;
#define WGMMA_FP8_OF(N, A_ELEMENT, B_ELEMENT, TYPES, D, A, B, ...)                                                  \
    template <> struct WgmmaFp8<N, Element::A_ELEMENT, Element::B_ELEMENT> {                                        \
        INLINE static void add(float (&d)[N / 2], uint64_t a, uint64_t b) {                                         \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." TYPES " {" D "}, " A ", " B ", 1, 1, 1;" \
                         : __VA_ARGS__                                                                              \
                         : "l"(a), "l"(b));                                                                         \
        }                                                                                                           \
    };
#define WGMMA_FP8(N, D, A, B, ...)                                        \
    WGMMA_FP8_OF(N, FP8, FP8, "e4m3.e4m3", D, A, B, __VA_ARGS__)          \
    WGMMA_FP8_OF(N, FP8, FP8_GRADIENT, "e4m3.e5m2", D, A, B, __VA_ARGS__) \
    WGMMA_FP8_OF(N, FP8_GRADIENT, FP8, "e5m2.e4m3", D, A, B, __VA_ARGS__)
WGMMA_FP8(32, D16, "%16", "%17", SIXTEEN(0))
WGMMA_FP8(64, D32, "%32", "%33", SIXTEEN(0), SIXTEEN(16))
WGMMA_FP8(128, D64, "%64", "%65", SUMS_64)
WGMMA_FP8(192, D96, "%96", "%97", SUMS_96)
WGMMA_FP8(256, D128, "%128", "%129", SUMS_96, SIXTEEN(96), SIXTEEN(112))

INLINE void wgmma_fence() { PTX("wgmma.fence.sync.aligned;"); } // is called before the first product of a group
INLINE void wgmma_commit() { PTX("wgmma.commit_group.sync.aligned;"); }
template <int N> INLINE void wgmma_wait() { // waits until all groups except the latest N are done
    PTX("wgmma.wait_group.sync.aligned %0;", "n"(N));
}
// The compiler does not know which registers a wait is for, and might read accumulators before the wait. The empty asm
// statement here claims to change the accumulators. So the compiler reads them only after this statement.
template <int N> INLINE void accumulators_ready(float (&acc)[N]) {
    UNROLL_FOR (int i = 0; i < N; i++) {
        asm volatile("" : "+f"(acc[i])::"memory");
    }
}
// Waits for all groups except the latest PENDING. Afterwards the program may read the sums d, which earlier groups
// computed.
template <int PENDING, class... Sums> INLINE void multiplied(Sums&... d) {
    wgmma_wait<PENDING>();
    (accumulators_ready(d), ...);
}

// Sizes that Hopper's kernels have in common. TMA and wgmma swizzle rows of 128 bytes, in groups of 8 rows. Such a row
// holds one slice of a pixel or of a weight: 64 channels in bf16, 128 channels in FP8 (slice_channels). In both types,
// one wgmma instruction multiplies 32 bytes of each row, which are 16 bf16 or 32 FP8 along k.
constexpr int SLICE_CHANNELS = 64;
constexpr int SLICE_BYTES = SLICE_CHANNELS * (int)bytes_of(Element::BF16);
constexpr int slice_channels(Element e) { return SLICE_BYTES / (int)bytes_of(e); }
constexpr int SWIZZLE_BYTES = 8 * SLICE_BYTES; // the swizzle's period; a tile must begin at a multiple of this
static_assert(SLICE_BYTES == 128, "the widest row that TMA and wgmma swizzle");
constexpr int BYTES_OF_64_ROWS =
    SLICE_CHANNELS * SLICE_BYTES; // such as one tap's weights of a slice of output channels
constexpr int whole_swizzles(int bytes) { return (bytes + SWIZZLE_BYTES - 1) / SWIZZLE_BYTES * SWIZZLE_BYTES; }

// An operand in shared memory, in the form of wgmma's descriptors (PTX ISA, "Matrix descriptor"). It consists of rows
// of 128 bytes, 64 bf16 each, swizzled in groups of 8 rows (1 KB, at a multiple of 1 KB). The descriptor holds
// addresses and distances in units of 16 bytes:
//   low     start address | "leading" distance << 16
//   high    "stride" distance | 1 << 30 (swizzle of 128 bytes)
//   K_MAJOR    a row holds 64 values of k, for one m or n. stride: from a group of 8 rows to the next group. The next
//              16 values of k begin 32 bytes further on.
//   MN_MAJOR   a row holds 64 values of m or n, for one k. stride: from a group of 8 rows to the next group; leading:
//              from 64 values of m or n to the next 64.
// The arguments `pitch` (the "stride" distance) and `leading` of rows() are not in units of 16 bytes, but in rows of
// 128 bytes.
struct Operand {
    uint32_t low, high;
    // & 0x3FFFF: in a cluster the higher bits of an address are the block's rank. The descriptor has no room for them.
    static INLINE Operand rows(uint32_t address, int pitch, int leading = 0) {
        return {(address & 0x3FFFF) >> 4 | leading * 8 << 16, pitch * 8 | 1u << 30};
    }
    INLINE uint64_t at(int offset) const { return (uint64_t)high << 32 | (low + offset); } // offset: 16-byte units
};

// stmatrix and stmatrix_trans are the reverse of ldmatrix and ldmatrix_trans. They store four 8x8 matrices from
// registers to shared memory.
INLINE void stmatrix(uint32_t address, const uint32_t (&v)[4]) {
    PTX("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};", //
        "r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]));
}
INLINE void stmatrix_trans(uint32_t address, const uint32_t (&v)[4]) {
    PTX("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};", //
        "r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]));
}

// Returns the address of `shared`, rounded up to a multiple of 1024 bytes, because swizzled tiles must begin at such a
// multiple.
INLINE uint32_t kilobyte_aligned(const void* shared) {
    uint32_t base = (shared_address(shared) + SWIZZLE_BYTES - 1) & ~(SWIZZLE_BYTES - 1u);
    // This hides from the compiler how base is computed. Otherwise it would be computed again and again in the main
    // loops.
    asm volatile("mov.b32 %0, %0;" : "+r"(base));
    return base;
}
// Returns v, which must be the same in all lanes of a warp. The compiler knows that the result of this function is the
// same in all lanes. So descriptors that are computed from the result stay in uniform registers, where wgmma needs
// them.
INLINE uint32_t uniform(uint32_t v) { return __shfl_sync(0xFFFFFFFFu, v, 0); }

// The driver's function that makes tensor maps. It is looked up at run time, so that the program need not be linked
// with -lcuda.
typedef decltype(&cuTensorMapEncodeTiled) EncodeTensorMap;
static EncodeTensorMap find_encode_tensor_map() {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &result));
#else
    CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &f, cudaEnableDefault, &result));
#endif
    if (!f) die("this GPU's driver is too old for the program (it lacks cuTensorMapEncodeTiled); CUDA 12's has it");
    return (EncodeTensorMap)f;
}

static CUtensorMapDataType tma_type(Element element) {
    switch (element) {
    case Element::FP32: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case Element::BF16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case Element::FP8:
    case Element::FP8_GRADIENT: return CU_TENSOR_MAP_DATA_TYPE_UINT8; // TMA copies bytes
    }
    ALL_CASES_RETURN
}
// Returns the swizzle for rows of row_bytes bytes in shared memory.
static CUtensorMapSwizzle tma_swizzle(size_t row_bytes) {
    if (row_bytes == SLICE_BYTES) return CU_TENSOR_MAP_SWIZZLE_128B;
    if (row_bytes == SLICE_BYTES / 2) return CU_TENSOR_MAP_SWIZZLE_64B;
    die("internal error: a box of TMA has rows of 128 or 64 bytes, not %zu", row_bytes);
}

// Describes a dense tensor to TMA. dims: the sizes of the tensor, the innermost dimension first. box: the sizes of a
// box, which TMA moves at once. Dimensions that are left out are 1. The rows of a box are 128 or 64 bytes wide. In
// shared memory they are swizzled, in a way that depends on this width. Without a tensor (p is null) the map is empty.
static CUtensorMap tensor_map(const void* p, const int64_t (&dims)[4], const int (&box)[4],
                              Element element = Element::BF16) {
    static const EncodeTensorMap encode = find_encode_tensor_map();
    CUtensorMap map = {};
    if (!p) return map;
    cuuint64_t size[4];
    cuuint64_t pitch[4]; // bytes from an element to the next one along dimension i + 1; the driver reads three of them
    cuuint64_t bytes = bytes_of(element);
    cuuint32_t boxes[4], steps[4] = {1, 1, 1, 1};
    for (int i = 0; i < 4; i++) {
        size[i] = (cuuint64_t)std::max<int64_t>(1, dims[i]);
        boxes[i] = (cuuint32_t)std::max(1, box[i]);
        bytes *= size[i];
        pitch[i] = bytes;
    }
    const auto swizzle = tma_swizzle(box[0] * bytes_of(element));
    const auto outside = CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE; // zeros
    const CUresult error = encode(&map, tma_type(element), 4, (void*)p, size, pitch, boxes, steps,
                                  CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, outside);
    if (error != CUDA_SUCCESS) die("internal error: cuTensorMapEncodeTiled returned %d", (int)error);
    return map;
}

// ---------------------------------------------------------------------------------------------------------------------
// --- building blocks of Hopper's kernels (sm_90a)
// Such a kernel's threads have a few roles, each of which is a loop over tiles: one thread loads, one to three
// warpgroups multiply and finish their tiles, other warps store results or add up statistics. Roles exchange data
// through rings of stages in shared memory (Pipeline). The structs below hold only integers (addresses in shared
// memory, counters), and all their functions are inlined. So the compiler keeps them in registers; if some code took
// their address, they would lie in local memory.

// Returns how many bytes of dynamic shared memory each block can have if a multiprocessor runs `blocks` of them. Static
// variables take at most 128 bytes.
constexpr int hopper_shared(int blocks) { return H200.shared_for(blocks, 128); }
// Returns how many bytes of shared memory a kernel needs in addition to its tiles. They are for its mbarriers, and up
// to 1 KB is lost because the tiles begin at a whole kilobyte.
constexpr int shared_beside(int barriers) { return barriers * 8 + SWIZZLE_BYTES; }

// Divides a block's dynamic shared memory: first the room for `barriers` mbarriers, then tiles. Tiles are whole
// kilobytes and begin at whole kilobytes, because of their swizzle. The members are the addresses of the next free
// barrier and of the next free tile.
struct SharedMemory {
    uint32_t barriers_at, tiles_at;
    INLINE explicit SharedMemory(int barriers) {
        extern __shared__ __align__(16) unsigned char dynamic[];
        barriers_at = shared_address(dynamic);
        tiles_at = uniform(kilobyte_aligned(dynamic + barriers * 8));
    }
};

// A ring of stages in shared memory: some threads fill them, others read them.
//
//        acquire, tma_load                        arrived, read, release
//   the thread that loads  --->  stage 0  --->  readers
//                                stage 1
//                                stage 2            each stage has two mbarriers:
//                                ... and back         full:   its tile has arrived
//                                to stage 0           empty:  all readers have released it
//
//   phases of stage 0's barriers:
//     full    | loads | tile 0 is there ......... | loads | tile 3 is there ...
//     empty   | (free at first)  | readers | free         | readers | free
//
// Invariant: all roles use the stages in the same order, and a stage is filled again only after it has been released
// `readers` times. Each role has its own copy of the struct, with its own place in the ring; only the stages and their
// barriers are shared.
//   readers = 0     a stage is filled once and stays (kept), or the caller knows that the next stage is free (next)
//   writers > 1     several warps fill a stage with ordinary stores: acquire, store, warp_stored
//   BYTES = 0       the stages lie elsewhere; the ring only tells when they are full
//
// Two rules. Each of them was violated once, which was a bug. dev/test/test_pipelines.py models the roles of every
// kernel.
//
// 1. If two warpgroups take turns with a ring, each waits at a full barrier of its own (OWNERS = 2). A waiting thread
//    cannot distinguish phase 1 from phase 3, because it only sees the parity. So it must wait for every phase of its
//    barrier. If both used the same barrier, phases would end while the stage belongs to the other warpgroup. Then a
//    warpgroup would take the other's tile for its own:
//
//      stage 0 is filled for   warpgroup 0   warpgroup 1   warpgroup 0   when warpgroup 0's second wait (parity 1) ends
//      one barrier: phase      0             1             2             at warpgroup 1's tile: wrong
//      a barrier each: phase   0             0             1             at its own second tile
//
// 2. A thread that fills two rings must not load too far ahead in one of them. Suppose that the thread waits (in
//    acquire) for a stage of the first ring, and that this stage becomes free only after some product. Suppose also
//    that the thread has not yet loaded that product's other operand into the second ring. Then the thread waits for
//    itself, for ever. So it loads both operands in the order in which the products need them.
struct Stage {
    uint32_t address, full; // where the tile is written, and the barrier that is told when the tile has arrived
};
// All threads of a warp call this when they have filled a stage, or their part of it.
INLINE void warp_stored(uint32_t full) {
    fence_async();
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(full);
}
template <int BYTES, int OWNERS = 1> struct Pipeline {
    static_assert(BYTES % SWIZZLE_BYTES == 0, "a tile must begin at a whole kilobyte");
    uint32_t stages_at, full_at, empty_at; // addresses of stage 0 and its barriers; a stage has OWNERS full barriers
    int size, readers, writers;            // how many stages there are, how many arrivals free one, how many fill one
    int place = 0;                         // the next stage: the loading role fills it, a reader waits for it
    int done = 0;                          // the stage that this reader releases next
    uint32_t phase = 0;  // parity to wait for at `place`'s full barrier. At its empty barrier it is phase ^ 1. In the
                         // first round, phase ^ 1 is the parity of the phase before phase 0. For the hardware, that
                         // phase has ended, so nobody waits.
    uint32_t phases = 0; // OWNERS = 2: the parities of this warpgroup's own full barriers, a bit for each stage

    INLINE Pipeline(SharedMemory& shared, int n, int readers, int writers = 1) : readers(readers), writers(writers) {
        auto take = [](uint32_t& next, int n, int bytes) { // takes n times `bytes` bytes, returns their address
            next += n * bytes;
            return next - n * bytes;
        };
        size = n;
        stages_at = take(shared.tiles_at, n, BYTES);
        full_at = take(shared.barriers_at, n, 8 * OWNERS);
        empty_at = take(shared.barriers_at, readers ? n : 0, 8);
    }
    INLINE void init() const { // called by one thread
        for (int i = 0; i < size; i++) {
            UNROLL_FOR (int owner = 0; owner < OWNERS; owner++) {
                mbarrier_init(stage(i, owner).full, writers);
            }
            if (readers) mbarrier_init(empty(i), readers);
        }
    }
    INLINE Stage stage(int i, int owner = 0) const {
        const int of_owner = OWNERS == 2 ? 8 * owner : 0;
        return {stages_at + i * BYTES, full_at + 8 * OWNERS * i + of_owner};
    }
    INLINE uint32_t empty(int i) const { return empty_at + 8 * i; }

    // For the thread that loads: waits until the next stage is free.
    INLINE Stage acquire(int owner = 0) {
        mbarrier_wait(empty(place), phase ^ 1);
        return next(owner);
    }
    // Returns the next stage, which the caller knows to be free.
    INLINE Stage next(int owner = 0) {
        const Stage s = stage(place, owner);
        if (++place == size) {
            place = 0;
            phase ^= 1;
        }
        return s;
    }
    // For a reader: waits until the next stage is full, and returns its address.
    INLINE uint32_t arrived(int owner = 0) {
        const int i = place;
        mbarrier_wait(stage(i, owner).full, OWNERS == 2 ? phases >> i & 1 : phase);
        if (OWNERS == 2) phases ^= 1u << i;
        return next().address;
    }
    // Returns the address of stage i, which is filled only once. wait: whether to wait for its arrival, which is
    // necessary only the first time.
    INLINE uint32_t kept(int i, bool wait) const {
        if (wait) mbarrier_wait(stage(i).full, 0);
        return stage(i).address;
    }
    // For a reader: releases a stage. Stages are released in the order in which they arrived. If several threads read a
    // stage together, only one of them frees the stage: the thread whose argument `speaks` is true.
    INLINE void release(bool speaks = (threadIdx.x & 127) == 0) {
        const int i = hand_over();
        if (speaks) free(i);
    }
    // Used in place of release: returns the number of the stage, which another role frees later.
    INLINE int hand_over() {
        const int i = done;
        if (++done == size) done = 0;
        return i;
    }
    INLINE void free(int i) const { mbarrier_arrive(empty(i)); }
    // Skips n stages that belong to the other warpgroup.
    INLINE void pass_over(int n) {
        for (place += n; place >= size; place -= size) phase ^= 1;
        done = place;
    }
};
// The ring through which results leave a kernel. It has barriers, but no memory of its own. A warpgroup has read pixels
// in stages of another ring, and writes its results into these stages. It does not release such a stage itself.
// Instead, it calls warp_stored with the full barrier of the same stage number in Results. The storing warp waits at
// this barrier, stores the results, and frees the stage in the ring of pixels.
typedef Pipeline<0, 2> Results;

// init_barriers and ready both initialise the barriers of several pipelines. init_barriers is called by one thread.
// ready is called by all threads of the block, which may use the barriers after that.
template <class... Pipelines> INLINE void init_barriers(const Pipelines&... pipelines) {
    (pipelines.init(), ..., mbarriers_ready());
}
template <class... Pipelines> INLINE void ready(const Pipelines&... pipelines) {
    if (threadIdx.x == 0) init_barriers(pipelines...);
    __syncthreads();
}

// Walks over the tiles first, first + step, first + 2 step, ..., which are less than end. n is the tile's image, h and
// w are its row and column among the image's tiles. next() needs only additions: divisions would be most of the loading
// thread's work.
struct TileWalk : Origin {
    Origin d; // the length of a step: images, rows and columns of tiles
    int tiles_h, tiles_w, left;
    INLINE TileWalk(int tiles_h, int tiles_w, int first, int step, int end) : tiles_h(tiles_h), tiles_w(tiles_w) {
        (Origin&)* this = tile_origin(first, tiles_h, tiles_w, 1, 1);
        d = tile_origin(step, tiles_h, tiles_w, 1, 1);
        left = max(0, ceil_div(end - first, step));
    }
    INLINE explicit operator bool() const { return left > 0; }
    INLINE void next() {
        left--;
        n += d.n;
        h += d.h;
        w += d.w;
        if (w >= tiles_w) { // carry over into the next row, and from there into the next image
            w -= tiles_w;
            h++;
        }
        if (h >= tiles_h) {
            h -= tiles_h;
            n++;
        }
    }
};

// Says where chunk `chunk` (16 bytes) of row `row` lies in a box of CHANNELS bf16, as TMA swizzles it. TMA XORs some
// bits of an element's address with higher bits of the same address: bits 4-6 with bits 7-9 (rows of 128 bytes), or
// bits 4-5 with bits 7-8 (rows of 64 bytes).
template <int CHANNELS> INLINE uint32_t box_place(int row, int chunk) {
    if (CHANNELS == SLICE_CHANNELS) return row * SLICE_BYTES + ((chunk ^ (row & 7)) << 4);
    return row * 64 + ((chunk ^ (row >> 1 & 3)) << 4);
}

// The pixels of a tile in shared memory: one slice (128 bytes) of each pixel, in rows of PITCH pixels. They include the
// border that a 3x3 filter reads (section 20 draws a halo and its taps). The nine taps read the same memory: their
// operands only begin at different addresses. With PITCH = 8 there is one tap (1x1).
template <int PITCH> struct Halo {
    Operand tap0;
    INLINE explicit Halo(uint32_t address) : tap0(Operand::rows(address, PITCH)) {}
    // Tap (kh, kw) = (tap / 3, tap % 3) begins kh * PITCH + kw pixels after tap 0, which is kh * (PITCH - 3) + tap. A
    // pixel is 8 units of 16 bytes. tap * 11 >> 5 is tap / 3 for tap < 9.
    INLINE Operand shifted(int tap) const {
        const int pixels = PITCH == 8 ? 0 : (tap * 11 >> 5) * (PITCH - 3) + tap;
        return {tap0.low + pixels * 8, tap0.high};
    }
};

// A warpgroup's sums for N pixels (the columns of D) and for OUT_SLICES slices of 64 output channels (the rows of D).
// Invariant: nobody reads d between multiply and wait.
template <int OUT_SLICES, int N> struct Accumulators {
    float d[OUT_SLICES][N / 2];
    // The sums begin with the bias. A thread holds the sums of two channels of each slice b. d[b][k] belongs to channel
    // k >> 1 & 1 of these two.
    INLINE explicit Accumulators(const float (&bias)[OUT_SLICES][2]) {
        UNROLL_FOR (int b = 0; b < OUT_SLICES; b++)
            UNROLL_FOR (int k = 0; k < N / 2; k++) {
                d[b][k] = bias[b][k >> 1 & 1];
            }
    }
    // The sums begin with 0. This is used for FP8, where the sums are scaled before the bias is added.
    INLINE Accumulators() {
        UNROLL_FOR (int b = 0; b < OUT_SLICES; b++)
            UNROLL_FOR (int k = 0; k < N / 2; k++) {
                d[b][k] = 0;
            }
    }
    // Starts STEPS products over 16 input channels each, as one group. weights: the address of the weights; they are 64
    // rows of 128 bytes for each slice of output channels. TRANSPOSED: a row of the weights belongs to an input channel
    // of the product, not to an output channel. This is so for the input gradient.
    template <int STEPS, bool TRANSPOSED> INLINE void multiply(uint32_t weights, Operand pixels) {
        constexpr int A_MAJOR = TRANSPOSED ? MN_MAJOR : K_MAJOR;
        constexpr int A_STEP = TRANSPOSED ? 128 : 2; // from 16 k to the next 16, in units of 16 bytes
        const Operand a = Operand::rows(weights, 8);
        wgmma_fence();
        UNROLL_FOR (int k = 0; k < STEPS; k++)
            UNROLL_FOR (int b = 0; b < OUT_SLICES; b++)
                Wgmma<N>::template add<A_MAJOR, K_MAJOR>(d[b], a.at(k * A_STEP + b * 512), pixels.at(k * 2));
        wgmma_commit();
    }
    // Does the same as multiply in FP8. Here each product sums over 32 input channels, not 16. PIXELS: their element.
    template <int STEPS, Element PIXELS> INLINE void multiply_fp8(uint32_t weights, Operand pixels) {
        using Product = WgmmaFp8<N, Element::FP8, PIXELS>;
        const Operand a = Operand::rows(weights, 8);
        wgmma_fence();
        UNROLL_FOR (int k = 0; k < STEPS; k++)
            UNROLL_FOR (int b = 0; b < OUT_SLICES; b++) Product::add(d[b], a.at(k * 2 + b * 512), pixels.at(k * 2));
        wgmma_commit();
    }
    // Multiplies the sums of the thread's two channels of slice b by factors, and then adds v.
    INLINE void scale(int b, const float (&factors)[2], const float (&v)[2]) {
        UNROLL_FOR (int k = 0; k < N / 2; k++) {
            d[b][k] = fmaf(d[b][k], factors[k >> 1 & 1], v[k >> 1 & 1]);
        }
    }
    // Adds v to the sums of the thread's two channels of slice b, at all pixels.
    INLINE void add(int b, const float (&v)[2]) {
        UNROLL_FOR (int k = 0; k < N / 2; k++) {
            d[b][k] += v[k >> 1 & 1];
        }
    }
    INLINE void wait() {
        wgmma_wait<0>();
        UNROLL_FOR (int b = 0; b < OUT_SLICES; b++) accumulators_ready(d[b]);
    }
};

// Two warpgroups take turns with the tensor cores: one of them finishes its tile while the other one multiplies.
//
//   warpgroup 0    | multiply | pass, finish | wait | multiply | ...
//   warpgroup 1    | wait     | multiply     | pass, finish    | ...
//
// Warpgroup w waits at named barrier 4 + w. The wait ends when the other warpgroup calls pass. Invariant: each
// warpgroup waits once and passes once for each of its tiles, and the two get tiles in turns. So neither waits for a
// warpgroup that has no tile left.
template <bool TAKE_TURNS> struct Turn {
    int warpgroup;
    INLINE explicit Turn(int warpgroup) : warpgroup(warpgroup) {
        if (warpgroup == 1) pass(); // warpgroup 0 begins
    }
    INLINE void wait() const {
        if (TAKE_TURNS) warps_sync(4 + warpgroup, 256);
    }
    INLINE void pass() const {
        if (TAKE_TURNS) warps_arrive(4 + (warpgroup ^ 1), 256);
    }
};

// =====================================================================================================================
// 17. Small operations: resampling, embeddings, diffusion

// ---------------------------------------------------------------------------------------------------------------------
// --- resample: statistics for group norm; average pool 2x2, nearest neighbour 2x, the even pixels
// Used when: a tensor changes its size without a convolution, or only the even pixels of a convolution are kept (PICK).
// How: a block loops over pixels of an image for a few pieces of channels. It sums what it writes, if statistics of it
//   are wanted.
// Costs: memory traffic, every element once.
//
// Statistics (Stats) are two numbers of each image and channel: the sums, over all pixels, of x and of x^2. The group
// norm that reads the tensor computes mean and variance from them, and so needs no pass of its own over x.

// POOL writes the average of 2x2 pixels. REPEAT writes each pixel 2x2 times. PICK keeps the pixels of even rows and
// columns: a convolution with stride 2 gives the same values as one with stride 1 followed by PICK.
enum Resampling { POOL, REPEAT, PICK };

// Returns where pixel k = 0 ... 3 of a 2x2 square begins, in elements from its first pixel. W: pixels of a row
INLINE size_t in_square(int k, int W, int C) { return ((size_t)(k / 2) * W + k % 2) * C; }

// sum += the four pixels of the square that begins at x
template <class T> INLINE void add_square(float (&sum)[VEC<T>], const T* x, int W, int C) {
    UNROLL_FOR (int k = 0; k < 4; k++) {
        add_piece<T>(sum, load16(x + in_square(k, W, C)));
    }
}

// The grid is (blocks that share the pixels, slabs of channels, images). A block has a slab of `columns` pieces of
// channels. Its threads form THREADS / columns rows. Neighbouring rows work on neighbouring pixels. A thread's next
// pixel is THREADS / columns pixels further on:
//
//                  columns
//   pixel 0       [ thread 0     1     2     3 ]
//   pixel 1       [        4     5     6     7 ]      then all go on to the next THREADS / columns pixels
//
// A "pixel" p belongs to the smaller image, which is x for REPEAT and out otherwise. In the larger image, p is a square
// of 2x2. With stats, one block reads all pixels of its slab and computes their sums. Each thread sums its pixels in
// fp32, and the threads' sums are added up in double. Shared memory is used only for these sums, at the end.
template <class T, Resampling R>
static __global__ void __launch_bounds__(512) resample_kernel(T* out,        // (B, new H, new W, C)
                                                              double* stats, // (B, C, 2), or null
                                                              const T* x,    // (B, H, W, C)
                                                              int H, int W, int C, int columns) {
    static_assert(R == POOL || R == REPEAT || R == PICK, "another one needs its sizes and places here");
    constexpr int V = VEC<T>;
    constexpr int THREADS = 512;
    constexpr int COPIES = R == REPEAT ? 4 : 1; // how often a pixel is written
    __shared__ float sums[2 * V * (THREADS + 8)];
    const int b = blockIdx.z;
    const int c = (blockIdx.y * columns + threadIdx.x % columns) * V; // this thread's first channel
    const int rows = THREADS / columns;
    const int odd = R == PICK; // half of an odd size: PICK rounds it up, POOL down
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
        unpack<T>(v, piece); // the sums are of the rounded values that are written
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
    // Narrow slabs give more blocks, and wide slabs read longer contiguous parts of memory. With stats, slabs are
    // widened only as long as the GPU stays nearly full.
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

// The reverse of PICK. It writes x (B, ceil(H / 2), ceil(W / 2), C) to the even rows and columns of out (B, H, W, C),
// and zeros elsewhere. If x is the gradient of the output of a convolution with stride 2, out is the gradient of the
// output of the same convolution with stride 1. Each thread writes one piece.
static void spread(act* out, const act* x, int B, int H, int W, int C, Stream* stream = MAIN_STREAM) {
    const int pieces = C / act_vec();
    const uint4* from = (const uint4*)x;
    uint4* to = (uint4*)out;
    each_on(stream, (size_t)B * H * W * pieces, [=] __device__(size_t i) {
        const size_t pixel = i / pieces;
        const int w = pixel % W;
        const int h = pixel / W % H;
        const size_t b = pixel / W / H;
        const size_t p = (b * ((H + 1) / 2) + h / 2) * ((W + 1) / 2) + w / 2; // the pixel of x
        const bool odd = (h | w) & 1;
        to[i] = odd ? make_uint4(0, 0, 0, 0) : from[p * pieces + i % pieces];
    });
}

static void downsample_forward(act* out, Stats* stats, const act* x, int B, int H, int W, int C) {
    with_act([&]<class T>(T) { launch_resample<T, POOL>(out, stats, x, B, H, W, C); });
}
static void upsample_forward(act* out, Stats* stats, const act* x, int B, int H, int W, int C) {
    with_act([&]<class T>(T) { launch_resample<T, REPEAT>(out, stats, x, B, H, W, C); });
}

// The gradient of POOL or REPEAT. grid (B H): a block computes one row of an image. Each thread computes one piece of a
// pixel at a time.
// POOL: dx is a quarter of the pooled pixel's gradient. In an odd last row or column, which was not pooled, dx is 0.
// REPEAT: dx is the sum of the four copies' gradients.
template <class T, Resampling R>
static __global__ void __launch_bounds__(256)
    resample_backward_kernel(GradOf<T> dx,  // (B, H, W, C)
                             const T* dout, // (B, H / 2, W / 2, C) or (B, 2 H, 2 W, C)
                             int H, int W, int C) {
    static_assert(R == POOL || R == REPEAT, "another one needs its formula here; the gradient of PICK is spread");
    constexpr int V = VEC<T>;
    const int pieces = C / V; // of each pixel
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
// Used when: the embedding of t and of the class goes to every residual block.
// How: a warp computes a few outputs (forward) or input gradients (backward) of 32 images; partial sums are added in a
//   fixed order.
// Costs: mostly latencies. Each weight is read once, and there are too few images to keep the GPU busy.

// Returns what is stored as dx: the gradient d of element i plus the addends.
INLINE float with_addends(const GradOf<float>& g, size_t i, float d) {
    d += g.add1 ? g.add1[i] : 0.0f;
    return d + (g.add2 ? g.add2[i] : 0.0f);
}

// How many images a block works on at a time. The kernels below need a Cin that is a multiple of 4, and x, weight and
// dweight that are aligned to 16 bytes.
constexpr int LINEAR_ROWS = 32;

// out (B, Cout) = x (B, Cin) weight^T + bias. grid (Cout / OUTPUTS, B / 32): a block computes OUTPUTS outputs of 32
// images.
//   lane    works on one image
//   warp    multiplies every eighth quad of inputs. (A quad is 4 neighbouring inputs.)
// Shared memory holds 64 quads of the block's weights, and the same quads of its images' inputs.
//   1. All threads copy 64 quads of each row to shared memory.
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
    // Copies 64 quads of each of the rows first, first + 1, ... of an array that has `end` rows, beginning with input
    // k0. Quad i of row r lies at place i ^ (r & swap). With swap = 7, lanes that read the same quad of different rows
    // use different banks.
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
    float acc[OUTPUTS] = {}; // this thread's share of the sums of its image's outputs
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

// Backward, in one pass over the weights:
//   dweight = dout^T x      dbias = the sum of dout over images      dx = dout weight
//
//   warp    works on 64 inputs of 32 images, and on some groups of eight outputs
//   lane    works on two of the inputs. Its registers hold the two values of each image (64 numbers) and the gradients
//           of these values (64 numbers).
//
// A warp works on 8 outputs at a time. Their weights, their dout and their earlier dweight are copied to one of the
// warp's two stages in shared memory. For each output, a lane reads the weights of its two inputs once. It also reads
// the dout of 32 images. All lanes read the same dout at the same time. Each dout is multiplied four times: by two
// values (for dweight) and by two weights (for dx).
// The 4 warps of a block work on the same inputs and on different outputs. At the end they add up their dx. Blocks of
// different splits also work on different outputs. They store their dx as parts (splits, B, Cin), which a second kernel
// adds up.
constexpr int LINEAR_OUTS = 8;
constexpr int LINEAR_WARPS = 4;
// What a warp reads for 8 outputs. `before` is the dweight summed over the images before these 32, or zeros if there
// are none.
struct LinearStage {
    float weight[LINEAR_OUTS][64];
    float before[LINEAR_OUTS][64];
    float dout[LINEAR_OUTS][LINEAR_ROWS + 4];
};
struct LinearShared { // a block's shared memory
    LinearStage stages[LINEAR_WARPS][2];
    float2 sums[LINEAR_WARPS][LINEAR_ROWS][32]; // each warp's share of dx
};
struct LinearBackward {
    float *dweight, *dbias;
    float* parts; // (splits, B, Cin): partial sums of dx; null: dx is not wanted
    const float *dout, *x, *weight;
    int B, Cin, Cout;
    int tiles;  // how many tiles of 64 inputs there are
    int splits; // into how many parts the outputs are divided; different blocks work on different parts
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

// grid (tiles * splits): a block has one tile of 64 inputs and one split of the outputs. For 32 images at a time:
//   1. Each lane loads its inputs x.
//   2. For 8 outputs at a time, each warp adds what these images contribute to dbias, dweight and dx.
//   3. The block adds up the dx of its warps.
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
    // For dbias, this lane sums output o0 + bias_output over images 8 bias_row ... 8 bias_row + 7 of the 32.
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
        // There are two stages. While the warp reads one stage, the next eight outputs are copied to the other one.
        int place = 0; // the stage that is read
        for (int o0 = first; o0 < p.Cout; o0 += stride, place ^= 1) {
            copies_arrived<0>();
            __syncwarp();
            load_linear_stage(shared.stages[warp][place ^ 1], p, o0 + stride, b0, tile);
            const LinearStage& now = shared.stages[warp][place];
            if (tile == 0) { // dbias: a lane adds up 8 images of an output, then 4 lanes add up their sums
                const float4* const d = (const float4*)&now.dout[bias_output][bias_row * 8];
                const float4 u = d[0];
                const float4 v = d[1];
                const float eight = ((u.x + u.y) + (u.z + u.w)) + ((v.x + v.y) + (v.z + v.w));
                const float sum = lane_sum<8, 16>(eight);
                float* const bias = p.dbias + o0 + bias_output;
                if (bias_row == 0 && o0 + bias_output < p.Cout) *bias = b0 ? *bias + sum : sum;
            }
            // Each turn of this loop completes one output's dweight over these images, and adds the output's share to
            // dx.
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
        __syncthreads(); // all warps have read their stages, and the previous images' sums
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
    // How many outputs a block computes. With more outputs x is read less often; with fewer there are more blocks.
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
static size_t linear_backward_workspace(int B, int Cin, int Cout) { // room for the parts of dx
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

// struct Silu holds the formulas of the function (f) and of its derivative (df). Each thread computes one element.
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
// computes one pair. f_k is rounded to fp32, as in PyTorch. The angle t f_k is a double, since it may be large.
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
// dx = dout. dtable (rows, C): each row is the sum of dout over the samples whose label is this row. A thread computes
// one element of dx, and the element of dtable in the same place. For the element of dtable, the thread looks through
// the labels of all samples. So there are no atomics, and the order of the sum is fixed.
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

// out (B, C) = x + values (B, K) weight (C, K)^T. Each thread computes one element of out. K is small: an image has few
// values.
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
// A thread computes one element of dx and, in the same place, one element of dweight. For dweight it sums over the
// samples, in their order.
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
// Used when: once in a training step or in a step of a sampler.
// How: a thread has four values, for which one quartet of Philox gives the random numbers; losses are summed in
//   double, in a fixed order. "Diffusion" in Part I and dev/reference.h have the formulas.
// Costs: memory traffic. Images are small beside activations.

// Philox makes random words in quartets. This returns the four words of this quartet for sample b. They
// depend only on the key, which includes the step, and on these two numbers.
INLINE Words random_words(const RandomKey& key, uint32_t quartet, int b) {
    return philox(key.seed, quartet, (uint32_t)(key.sample0 + b), (uint32_t)*key.step, key.purpose);
}

// draw_levels draws a noise level for each sample. draw_teachers draws the levels of the same samples' teachers
// (--objective ect). Each thread works on one sample.
static void draw_levels(NoiseLevel* levels, float* t, int* quarters, int B, const Objective& o, RandomKey key) {
    each(B, [=] __device__(size_t b) {
        const NoiseLevel l = draw_level(o, random_words(key, 0, (int)b));
        levels[b] = l;
        t[b] = l.t;
        quarters[b] = l.quarter;
    });
}

static void draw_teachers(NoiseLevel* teachers, float* t, int B, const Objective& o, RandomKey key) {
    each(B, [=] __device__(size_t b) {
        const NoiseLevel l = draw_teacher(o, random_words(key, 0, (int)b));
        teachers[b] = l;
        t[b] = l.t;
    });
}

// Changes the images as --augment asks, in three launches. The canvas is the changed image at twice the resolution
// (canvas_value).
//   1. Each thread draws the change of one sample.
//   2. Each thread computes one place of the canvas, in all channels.
//   3. Each thread computes one value of the result from the canvas.
static void augment_images(float* out, Augmentation* drawn, float* canvas, float* told, int stride, const void* images,
                           float p, RandomKey key, int B, int C, int H, int W, int bytes) {
    each(B, [=] __device__(size_t b) {
        Words words[4];
        for (int k = 0; k < 4; k++) {
            words[k] = random_words(key, k, (int)b);
        }
        drawn[b] = draw_augmentation(p, words, H, W);
        // Copies the numbers that tell the network what the change was.
        for (int k = 0; k < AUGMENT_NUMBERS; k++) {
            told[b * stride + k] = drawn[b].told[k];
        }
    });
    const size_t fine = (size_t)fine_size(H) * fine_size(W);
    each((size_t)B * fine, [=] __device__(size_t i) {
        const size_t b = i / fine;
        const int at = (int)(i % fine);
        const CanvasPlace place = canvas_place(drawn[b], at / fine_size(W), at % fine_size(W), H, W);
        for (size_t plane = b * C; plane < (b + 1) * C; plane++) {
            const void* const channel = (const uint8_t*)images + plane * H * W * bytes;
            canvas[plane * fine + at] = canvas_value(place, channel, bytes, W);
        }
    });
    each((size_t)B * C * H * W, [=] __device__(size_t i) {
        const size_t plane = i / ((size_t)H * W);
        const int y = (int)(i / W % H);
        const int x = (int)(i % W);
        out[i] = halved(canvas + plane * fine, y, x, W);
    });
}

// Used with --schedule_sampler loss-second-moment. Each thread works on one t. It looks through the batch for samples
// with this t.
static void update_rms_losses(double* rms_losses, float* history, const NoiseLevel* levels, const double* loss,
                              const StepState* state, int T, int B) {
    each(T, [=] __device__(size_t t) {
        float* const of_t = history + t * (HISTORY + 1);
        const int samples = state->ok ? B : 0; // the losses of a skipped step are not remembered
        rms_losses[t] = remember_losses(of_t, (int)t, levels, loss, samples);
    });
}

// each_quad calls f(b, e) for elements e ... e + 3 of image b; an image has n elements. Each thread works on four
// elements, because one quartet of Philox gives four random words.
template <class F> struct Quads {
    F f;
    int n;
    __device__ void operator()(size_t i) const {
        const size_t quads = (n + 3) / 4; // how many quads of elements an image has
        const int b = (int)(i / quads);
        const int e = (int)(i % quads) * 4;
        f(b, e);
    }
};
template <class F> static void each_quad(int B, int n, F f) {
    const size_t quads = (size_t)B * ((n + 3) / 4);
    each(quads, Quads<F>{f, n});
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

// picture_is_mirrored returns whether the image of sample b is mirrored, and so also its picture. picture_is_left_out
// returns whether the picture of sample b is left out.
INLINE bool picture_is_mirrored(const PictureDraws& draws, int b) {
    return draws.random_flip && (random_words(of_purpose(draws.key, RANDOM_FLIP), 0, b).w[0] & 1);
}
INLINE bool picture_is_left_out(const PictureDraws& draws, int b) {
    const uint32_t threshold = dropout_threshold(draws.dropout);
    const RandomKey key = of_purpose(draws.key, RANDOM_COND_DROPOUT);
    return threshold > 0 && random_words(key, 0, b).w[0] < threshold;
}

// The functions from here to mask_images make a batch's pictures, which are the network's condition. Each thread writes
// one element of the result. In mask_images a thread writes all channels of a pixel.
static void take_pictures(float* cond, const void* pictures, PictureDraws draws, int B, int K, int H, int W,
                          int bytes) {
    each((size_t)B * H * W * K, [=] __device__(size_t i) {
        const int k = (int)(i % K);
        const int w = (int)(i / K % W);
        const int h = (int)(i / K / W % H);
        const int b = (int)(i / K / W / H);
        const int column = picture_is_mirrored(draws, b) ? W - 1 - w : w;
        const size_t place = (((size_t)b * K + k) * H + h) * W + column;
        cond[i] = picture_is_left_out(draws, b) ? 0.0f : image_value(pictures, bytes, place);
    });
}

static void shrink_images(float* small, const void* images, int factor, PictureDraws draws, int B, int C, int H, int W,
                          int bytes) {
    const int small_w = W / factor;
    const int n = H / factor * small_w * C;
    const RandomKey noise_key = of_purpose(draws.key, RANDOM_COND_NOISE);
    each((size_t)B * n, [=] __device__(size_t i) {
        const int b = (int)(i / n);
        const int e = (int)(i % n);
        const size_t plane = (size_t)b * C + e % C;
        const void* const channel = (const uint8_t*)images + plane * H * W * bytes;
        const bool flip = picture_is_mirrored(draws, b);
        float value = square_mean(channel, bytes, e / C / small_w, e / C % small_w, factor, W, flip);
        if (draws.noise > 0) {
            float z[4];
            normals(z, random_words(noise_key, e / 4, b));
            value += draws.noise * noise_strength(random_words(noise_key, NOISE_STRENGTH, b)) * z[e % 4];
        }
        small[i] = value;
    });
}

static void enlarge_pictures(float* cond, const float* small, int factor, PictureDraws draws, int B, int C, int H,
                             int W) {
    const int n = H * W * C;
    const int small_h = H / factor;
    const int small_w = W / factor;
    each((size_t)B * n, [=] __device__(size_t i) {
        const int b = (int)(i / n);
        const int e = (int)(i % n);
        const float* const picture = small + (size_t)b * small_h * small_w * C;
        const float value = enlarged(picture, e / C / W, e / C % W, e % C, factor, C, small_h, small_w);
        cond[i] = picture_is_left_out(draws, b) ? 0.0f : value;
    });
}

static void grey_images(float* cond, const void* images, PictureDraws draws, int B, int H, int W, int bytes) {
    const int HW = H * W;
    each((size_t)B * HW, [=] __device__(size_t i) {
        const int b = (int)(i / HW);
        const int p = (int)(i % HW);
        const int from = picture_is_mirrored(draws, b) ? p / W * W + W - 1 - p % W : p;
        const float value = grey_value(images, bytes, (size_t)b * 3 * HW + from, HW);
        cond[i] = picture_is_left_out(draws, b) ? 0.0f : value;
    });
}

static void mask_images(float* cond, const void* images, PictureDraws draws, int B, int C, int H, int W, int bytes) {
    const int HW = H * W;
    const RandomKey key = of_purpose(draws.key, RANDOM_MASK);
    each((size_t)B * HW, [=] __device__(size_t i) {
        const int b = (int)(i / HW);
        const int p = (int)(i % HW);
        const bool left_out = picture_is_left_out(draws, b);
        Words words[2 * HOLES];
        for (int k = 0; k < 2 * HOLES; k++) {
            words[k] = random_words(key, k, b);
        }
        const bool hidden = is_in_hole(draw_holes(words, H, W), p / W, p % W);
        const int from = picture_is_mirrored(draws, b) ? p / W * W + W - 1 - p % W : p;
        float* const pixel = cond + i * (C + 1);
        for (int c = 0; c < C; c++) {
            const size_t plane = (size_t)b * C + c;
            pixel[c] = hidden || left_out ? 0.0f : image_value(images, bytes, plane * HW + from);
        }
        pixel[C] = left_out ? 0.0f : mask_value(hidden);
    });
}

// x_t = signal x_0 + sigma z,   target = target_x0 x_0 + target_noise z [+ target_teacher teacher]
// A thread computes four consecutive elements of the (B, H, W, C) arrays. In images, which is (B, C, H, W), these four
// are not consecutive. bytes: the size of an element of images (1: uint8_t).
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
            if (e + k < n) x0 = image_value(images, bytes, place);
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

constexpr int LOSS_PARTS = 4; // how many blocks share an image

// How many blocks of 1,024 threads run on a multiprocessor. With only one block all threads would wait for memory at
// the same time. Two blocks fit if the multiprocessor can run 2,048 threads. On other GPUs it can run 1,536.
constexpr int SUM_BLOCKS = ARCH == 800 || ARCH == 900 || ARCH == 1000 ? 2 : 1;

// Adds up the v of a block's 1024 threads. Only the threads of the first warp may use the result. First each warp adds
// up its values, then the sums of the 32 warps are added. The order is fixed, so that a repeated run has the same
// losses and norms, bit by bit.
INLINE double block_sum(double v) {
    __shared__ double sums[32]; // one sum of each warp
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_sum(threadIdx.x < 32 ? sums[threadIdx.x] : 0);
}

// The loss of an image, and its gradient. With d = out - target, for each element:
//   loss = mean over elements of mse d^2 + bound * (the term of the variational bound; only with BOUND)
//   dout = factor * (the derivative of loss by out)
// factor is the sample's share of the batch. If Cout > C, the second half of out's channels is the predicted variance,
// which only the bound uses.
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
    const float mse = o.mse * l.weight; // the weight of each of the two terms at this noise level
    const float bound = o.bound * l.importance;
    const float slope = factor / ((float)HW * C);
    double sum = 0;
    NO_UNROLL_FOR (int i = blockIdx.x * 1024 + threadIdx.x; i < HW * C; i += LOSS_PARTS * 1024) {
        const int p = i / C; // the pixel of element i; c is its channel
        const int c = i - p * C;
        const size_t at_mean = first + (size_t)p * Cout + c; // the place in out of the network's answer for element i
        const size_t at_variance = at_mean + C;
        const float wanted = target[first_target + i];
        const float d = out[at_mean] - wanted;
        BoundTerm term{};
        if (BOUND) { // the bound's term needs the predicted variance and the true x0
            const float v = Cout > C ? out[at_variance] : 0.0f;
            const float x0 = l.x0_x * x[first_target + i] + l.x0_out * wanted;
            term = bound_term(l, d, v, x0);
        }
        sum += (double)mse * d * d + (double)bound * term.value;
        // if the loss has an mse term, the bound trains only the variance
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

// The loss of consistency tuning is a function of an image's squared distance |x0_out (out - target)|^2. So its
// gradient is slope (out - target). The slope is one number for the image, and depends on the whole distance
// (tuning_loss). So there are three launches. This kernel computes the distances, the second launch computes the
// slopes, and the third launch computes the gradients.
// grid (LOSS_PARTS, B). sums (B, LOSS_PARTS): each block's part of an image's distance
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

// t (B) = the time that the network is told in step *k. Since k lies on the device, a captured graph works for every
// step.
static void sampler_timesteps(float* t, const SamplerStep* steps, const int64_t* k, int B) {
    each(B, [=] __device__(size_t b) {
        const SamplerStep& s = steps[*k];
        t[b] = s.t;
    });
}

// What a sampler's step reads. x is (B, HW, C), with n elements for each image. out is the network's answer, whose
// pixels have Cout channels. With guidance, the second half of out's batch holds the answers without the condition.
struct SamplerView {
    const float *x, *out;
    int B, n, C, Cout;

    // Returns the index of element e of image b in out.
    INLINE size_t place(int b, int e) const {
        const int p = e / C;
        return ((size_t)b * (n / C) + p) * Cout + e - p * C;
    }
    // Returns the x0 that follows from the network's answer: x0_x x + x0_out answer.
    INLINE float predicted_x0(const SamplerStep& s, const Denoising& d, int b, int e) const {
        const size_t i = place(b, e);
        float answer = out[i];
        if (d.guided) {
            const float unconditional = out[i + (size_t)B * (n / C) * Cout];
            answer = unconditional + d.guidance * (answer - unconditional);
        }
        return s.x0_x * x[(size_t)b * n + e] + s.x0_out * answer;
    }
};

// d.threshold (B) holds one value for each image: the |x0| with rank d.rank among all |x0| of the image. Rank 0 is the
// smallest. A block works on one image. Floats that are not negative have the same order as their bits, read as
// integers. So the value is found 8 bits at a time, beginning with the highest bits. Each of four passes looks only at
// the numbers that begin with the bits found so far. The pass counts how often each of the 256 values of the next 8
// bits occurs. From these counts it finds the 8 bits of the number with the wanted rank.
static __global__ void __launch_bounds__(1024)
    sampler_threshold_kernel(SamplerView view, const SamplerStep* steps, Denoising d, const int64_t* k) {
    __shared__ int count[256];
    __shared__ int left;       // the rank among the numbers that begin with the bits found so far
    __shared__ uint32_t found; // the bits found so far
    const SamplerStep s = steps[*k];
    const int n = view.n;
    if (threadIdx.x == 0) {
        found = 0;
        left = d.rank;
    }
    for (int shift = 24; shift >= 0; shift -= 8) { // this pass finds bits shift ... shift + 7
        if (threadIdx.x < 256) count[threadIdx.x] = 0;
        __syncthreads();
        const uint32_t known = found;
        for (int e = threadIdx.x; e < n; e += 1024) {
            const float x0 = view.predicted_x0(s, d, blockIdx.x, e);
            const uint32_t bits = __float_as_uint(fabsf(x0));
            if (shift == 24 || bits >> (shift + 8) == known) atomicAdd(&count[bits >> shift & 255], 1);
        }
        __syncthreads();
        if (threadIdx.x == 0) { // finds the next 8 bits: subtracts the counts of smaller values from the rank
            int bin = 0;
            while (left >= count[bin]) {
                left -= count[bin];
                bin++;
            }
            found = known << 8 | bin;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) d.threshold[blockIdx.x] = __uint_as_float(found);
}

// Limits x0 to [-limit, limit], and scales it to [-1, 1]. NaN stays NaN.
INLINE float limited(float x0, float limit) {
    if (x0 < -limit) x0 = -limit;
    else if (x0 > limit) x0 = limit;
    return x0 / limit;
}

// A sampler's step, in place. If thresholds are wanted, they are computed first. Each thread computes four elements.
// The formulas have the step's coefficients (SamplerStep), the sampler's memory m, and z, which is standard normal:
//
//   x0 = limited(x0_x x + x0_out answer)
//   x' = next_x x + next_x0 x0 + next_m m + sigma z
//   m' = m_x x + m_x0 x0
//
// With guidance the batch has a second half. The new x is also written to this half, so that both halves stay equal.
static void sampler_step(float* x, const float* out, const SamplerStep* steps, const Denoising& denoising,
                         RandomKey key, int B, int HW, int C, int Cout) {
    const int n = HW * C;
    const SamplerView view{x, out, B, n, C, Cout};
    if (denoising.rank >= 0) launch_behind(sampler_threshold_kernel, B, 1024, 0, view, steps, denoising, key.step);
    each_quad(B, n, [=, d = denoising] __device__(int b, int e) {
        const SamplerStep s = steps[*key.step];
        // Dynamic thresholding (Imagen, Saharia et al. 2022) limits x0 less where the image has larger values.
        const float limit = d.rank < 0 ? 1.0f : fmaxf(d.threshold[b], 1.0f);
        float z[4] = {};
        if (s.sigma > 0) normals(z, random_words(key, e / 4, b));
        for (int k = 0; k < 4 && e + k < n; k++) {
            const size_t i = (size_t)b * n + e + k;
            const float v = x[i];
            float x0 = view.predicted_x0(s, d, b, e + k);
            if (d.limit) x0 = limited(x0, limit);
            float sigma = s.sigma;
            if (s.range > 0 && s.sigma > 0) { // sigma is learned: the second half of the channels holds it
                const float variance = out[view.place(b, e + k) + C];
                sigma = expf(s.log_sigma + s.range * 0.5f * (variance + 1));
            }
            float next = s.next_x * v + s.next_x0 * x0 + sigma * z[k];
            if (s.next_m != 0) next += s.next_m * d.m[i];
            if (s.m_x != 0 || s.m_x0 != 0) d.m[i] = s.m_x * v + s.m_x0 * x0;
            x[i] = next;
            if (d.guided) x[i + (size_t)B * n] = next;
        }
    });
}

// Inpainting. Where the mask is not above 0, the image is known. At those places x is replaced by the known image plus
// the noise that belongs to this step:
//   x = known_x image + known_sigma z
// Then noise is added to all of x, so that the next step can harmonise both parts (RePaint, Lugmayr et al. 2022):
//   x' = back_x x + back_sigma z'
static void keep_known(float* x, const float* image, const float* mask, const SamplerStep* steps, RandomKey key,
                       bool guided, int B, int n) {
    each_quad(B, n, [=] __device__(int b, int e) {
        const SamplerStep s = steps[*key.step];
        if (s.known_x == 0) return;
        const RandomKey back_key{key.seed, RANDOM_BACK_NOISE, key.step, key.sample0};
        float known[4], back[4];
        normals(known, random_words(key, e / 4, b));
        normals(back, random_words(back_key, e / 4, b));
        for (int k = 0; k < 4 && e + k < n; k++) {
            const size_t i = (size_t)b * n + e + k;
            const float noised = s.known_x * image[i] + s.known_sigma * known[k];
            const float now = mask[i] > 0 ? x[i] : noised;
            x[i] = s.back_x * now + s.back_sigma * back[k];
            if (guided) x[i + (size_t)B * n] = x[i];
        }
    });
}

// =====================================================================================================================
// 18. Group norm

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
// needs no pass over x for mean and rstd: the kernel that wrote x also wrote each channel's sums of x and x^2 to Stats.
// For each element, one multiplication and one addition are left: z = x scale + shift. A block computes the two
// coefficients of each of its channels once.
//
// Backward. dz is the gradient of z: dout, taken back through dropout and the nonlinearity.
//
//   dxhat = w dz                     w = weight (1 + film scale)
//   dx    = rstd (dxhat - E[dxhat] - xhat E[dxhat xhat])
//         = scale dz - (x_factor x + offset)                        scale = rstd w, the same as forward
//   x_factor = rstd^2 E[dxhat xhat]    offset = rstd E[dxhat] - x_factor mean
//
// So each group has two more coefficients, x_factor and offset. They are computed from each channel's sums of dz and of
// dz x (group_terms). The gradients of the parameters are computed from the same sums (put_gradients).
//
// Used when: forward always; backward where groupnorm_backward_whole (below) does not fit or is slower.
// How: A block has a slab of 64 (or 32) channels of one image, and a chunk of its pixels. A thread has VEC neighbouring
//   channels (16 bytes), and walks down the pixels. It loads PIXELS pixels in advance, by cp.async into its own part of
//   shared memory, so that these loads need no registers. The first loads begin before the coefficients are computed.
//   The backward pass is two kernels: 1. the sums of dz and dz x over each chunk; 2. dx. Each block of the second one
//   adds up the chunks' sums of its own groups, and some blocks also the image's part of the parameters' gradients.
//   Costs: Memory traffic. Forward: x is read and out is written. Backward: x and dout are read twice, and dx is
//   written. All blocks run at the same time, so the time to start a block is only spent once.

constexpr int NORM_THREADS = 256;
constexpr int NORM_SLAB = 64; // how many channels a block has at most
constexpr int MAX_GROUPS = 64;
// How many blocks a multiprocessor has registers for. heavy: with dropout or, in the second pass, with addends
constexpr int norm_forward_blocks(bool dropout) { return dropout ? 3 : 4; }
constexpr int norm_backward_blocks(bool heavy) { return heavy ? 2 : 3; }

// The arguments of the norm's kernels.
struct NormArgs {
    const void *x1, *x2;        // (B, HW, C1) and (B, HW, C2)
    const float *weight, *bias; // (C)
    const float* scale_shift;   // (B, ss_stride): film scale (C), then film shift (C); null: none
    int ss_stride;              // floats from one image's scales to the next image's; a multiple of 4, for float4 reads
    Dropout dropout;
    NormShape s;
    // Used only in the backward pass:
    const float *mean = nullptr, *rstd = nullptr; // (B, groups)
    float* dscale_shift = nullptr;                // its layout is that of scale_shift
    float2* sums = nullptr;                       // (B, C): each image's part of dbias and dweight

    // The members below are computed from those above, once, on the host.
    int C = s.C1 + s.C2;
    int Cg = C / s.groups; // how many channels a group has
    int log_slab = C % NORM_SLAB ? 5 : 6;
    int slab = 1 << log_slab;                              // how many channels a block has
    int chunk = 0;                                         // how many pixels a block has
    uint32_t threshold = dropout_threshold(dropout.p);     // random words below it are dropped
    uint32_t group_factor = (1u << 31) / (uint32_t)Cg + 1; // see group_of
    double weight_of_one = 1.0 / ((double)s.HW * Cg);      // the weight of one value in its group's mean

    // Returns c / Cg. A division takes some 20 instructions; this multiplication is exact for c * Cg < 2^31.
    __device__ int group_of(int c) const { return (int)((uint64_t)c * group_factor >> 31); }
};

// What a thread works on: channels c ... c + VEC - 1 of image b, at the pixels first, first + rows, ... below end. The
// threads of a block work on `rows` pixels of the slab at a time, in the order of memory. For 64 bf16 channels:
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
    // this thread's first element, counted within `rows` pixels of the slab
    int place = threadIdx.x * VEC<T>;
    int c = slab0 + (place & (a.slab - 1));                   // this thread's first channel
    int rows = NORM_THREADS * VEC<T> >> a.log_slab;           // how many pixels the block works on at a time
    int first = blockIdx.x * a.chunk + (place >> a.log_slab); // this thread's first pixel
    int end = min(a.s.HW, ((int)blockIdx.x + 1) * a.chunk);
    bool in_x1 = c < a.s.C1;                              // false: the channels belong to x2
    int pitch = in_x1 ? a.s.C1 : a.s.C2;                  // elements of a pixel of x1 or x2
    int stride = rows * pitch;                            // from this thread's pixel to its next pixel, in x and dx
    int stride_out = rows * a.C;                          // the same distance in out and dout
    size_t pixel = (size_t)b * a.s.HW + first;            // this thread's first pixel, counted over all images
    size_t at = pixel * pitch + (in_x1 ? c : c - a.s.C1); // where this pixel lies in x and dx
    size_t at_out = pixel * a.C + c;                      // where this pixel lies in out and dout
    const T* x = (const T*)(in_x1 ? a.x1 : a.x2) + at;

    // begin and walk use a ring of PIXELS slots.
    // begin calls fetch(slot, whether there is such a pixel) for this thread's first PIXELS pixels.
    // walk calls work(slot, p, more) for each pixel p, as soon as its loads have arrived. more: this slot is needed for
    // another pixel
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

// first[i], second[i] = the pair that the table holds for channel i
template <int V> INLINE void load_pairs(float (&first)[V], float (&second)[V], const float2* table) {
    UNROLL_FOR (int i = 0; i < V; i += 2) {
        const float4 q = *(const float4*)(table + i);
        first[i] = q.x;
        second[i] = q.y;
        first[i + 1] = q.z;
        second[i + 1] = q.w;
    }
}

template <int V> INLINE void load_floats(float (&v)[V], const float* p) {
    if constexpr (V == 1) {
        v[0] = *p;
    } else {
        UNROLL_FOR (int i = 0; i < V; i += 4) {
            (float4&)v[i] = *(const float4*)(p + i);
        }
    }
}

// The parameters from which the coefficients of V channels are computed: z = (xhat weight + bias) factor + shift,
// factor = 1 + scale, where scale and shift come from the embedding (FiLM, --use_scale_shift_norm). The previous kernel
// does not write these parameters, so they are loaded before that kernel has ended.
template <int V> struct NormParameters {
    float weight[V], bias[V];
    float scale[V] = {}, shift[V] = {}; // from the embedding

    INLINE NormParameters(const NormArgs& a, int b, int c) {
        load_floats(weight, a.weight + c);
        load_floats(bias, a.bias + c);
        if (!a.scale_shift) return;
        const float* film = a.scale_shift + (size_t)b * a.ss_stride + c;
        load_floats(scale, film);
        load_floats(shift, film + a.C);
    }
    INLINE float factor(int i) const { return 1 + scale[i]; }
    // Returns scale and shift of the i-th channel, so that x scale + shift is z times z_factor.
    INLINE float2 coefficients(int i, float mean, float rstd, float z_factor = 1) const {
        const float x_weight = rstd * weight[i]; // xhat weight = (x - mean) x_weight
        const float z_scale = x_weight * factor(i);
        const float z_shift = (bias[i] - mean * x_weight) * factor(i) + shift[i];
        return make_float2(z_scale * z_factor, z_shift * z_factor);
    }
};

// One channel of one image. The forward pass has stored mean and rstd of its group.
struct NormChannel : NormParameters<1> {
    int b, c;
    float mean, rstd;

    INLINE NormChannel(const NormArgs& a, int b, int c) : NormParameters(a, b, c), b(b), c(c) {
        const int group = b * a.s.groups + a.group_of(c);
        mean = a.mean[group];
        rstd = a.rstd[group];
    }
    INLINE float2 coefficients(float z_factor) const { return NormParameters::coefficients(0, mean, rstd, z_factor); }
    INLINE float dxhat_factor() const { return weight[0] * factor(0); } // w in dxhat = w dz
    // Writes this image's part of the gradients of the parameters and of the embedding. sum holds the sums of dz and of
    // dz x over the image's pixels.
    //   dbias = factor sum(dz)      dweight = factor sum(dz xhat)
    //   d film shift = sum(dz)      d film scale = sum(dz (xhat weight + bias))
    INLINE void put_gradients(const NormArgs& a, double2 sum) const {
        const float bias_sum = (float)sum.x;                             // the sum of dz
        const float weight_sum = (float)((sum.y - mean * sum.x) * rstd); // the sum of dz xhat
        a.sums[(size_t)b * a.C + c] = make_float2(factor(0) * bias_sum, factor(0) * weight_sum);
        if (!a.scale_shift) return;
        float* const film = a.dscale_shift + (size_t)b * a.ss_stride + c;
        film[0] = weight[0] * weight_sum + bias[0] * bias_sum;
        film[a.C] = bias_sum;
    }
};

// Multiplies v by dropout's factors for elements e, e + 1, ... of image b.
template <int V> INLINE void apply_dropout(float (&v)[V], const NormArgs& a, uint32_t step, int b, size_t e) {
    const float keep = 1.0f / (1.0f - a.dropout.p);
    UNROLL_FOR (int i = 0; i < V; i += 4) { // a quartet of Philox gives four words
        const uint32_t quartet = (uint32_t)((e + i) / 4);
        const uint32_t sample = (uint32_t)(a.dropout.sample0 + b);
        const uint32_t purpose = RANDOM_DROPOUT | a.dropout.layer << 8;
        const Words r = philox(a.dropout.seed, quartet, sample, step, purpose);
        UNROLL_FOR (int k = 0; k < 4; k++) {
            v[i + k] *= r.w[k] < a.threshold ? 0.0f : keep;
        }
    }
}

// Returns the sum over the 8 neighbouring lanes that work on one group.
INLINE double group_sum(double v) {
    const unsigned lanes = 0xFFu << (threadIdx.x & 24);
    return lane_sum<4, 2, 1>(v, lanes);
}

// Returns the sum of n pairs. Each pair lies `pitch` pairs after the one before. AT_ONCE pairs are loaded at a time.
template <int AT_ONCE> INLINE double2 sum_pairs(const float2* pairs, int n, int pitch) {
    double2 sum = make_double2(0, 0);
    _Pragma("unroll AT_ONCE") for (int i = 0; i < n; i++) {
        const float2 q = pairs[(size_t)i * pitch];
        sum.x += q.x;
        sum.y += q.y;
    }
    return sum;
}

// Eight lanes share a table whose rows have n entries. Lane i reads entries i, i + 8, i + 16, ..., counted row by row.
// This struct holds where the lane's first entry is, and how far it is to the next one. The divisions are done before
// await_previous_kernel. If they were done after it, they would take a tenth of the time of a norm of 8x8.
struct LaneShare {
    int n;
    int row = threadIdx.x % 8 / n;
    int column = threadIdx.x % 8 % n;
    int rows = 8 / n;    // the lane's next entry is 8 entries on: so many rows down,
    int columns = 8 % n; // and so many columns to the right
};

// Where a norm's output is written: T* (as T), Fp8Copy (in FP8), or BothOut<T> (in both forms).
template <class T> struct BothOut {
    T* p;
    Fp8Copy fp8;
};
// Returns where element i is written.
template <class T> INLINE T* place_of(T* out, size_t i) { return out + i; }
INLINE uint8_t* place_of(const Fp8Copy& out, size_t i) { return out.bytes + i; }
template <class T> INLINE BothOut<T> place_of(const BothOut<T>& out, size_t i) {
    return {out.p + i, {out.fp8.bytes + i, out.fp8.factor}};
}
template <class T> INLINE void operator+=(BothOut<T>& out, int n) {
    out.p += n;
    out.fp8.bytes += n;
}
INLINE float factor_of(const Fp8Copy& out) { return *out.factor; }
template <class T> INLINE float factor_of(const BothOut<T>& out) { return *out.fp8.factor; }
// Stores the VEC<T> elements of a piece.
template <class T> INLINE void store_out(T* to, const float (&v)[VEC<T>], float) { store_whole(to, pack<T>(v)); }
INLINE void store_out(uint8_t* to, const float (&v)[8], float factor) { store_whole(to, scaled_to_fp8(v, factor)); }
template <class T> INLINE void store_out(const BothOut<T>& to, const float (&v)[VEC<T>], float factor) {
    store_out(to.p, v, factor);
    store_out(to.fp8.bytes, v, factor);
}

// grid (chunks of pixels, slabs of channels, images). Each thread works on the channels and pixels of its NormColumn.
// OUT: T*, Fp8Copy, or BothOut<T>.
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
    // Images are processed in reverse order, because those that were written last may still be in the L2 cache.
    const NormColumn<T, PIXELS> t{a, (int)(gridDim.z - 1 - blockIdx.z)};
    const T* x = t.x;
    auto fetch = [&](int slot, bool inside) {
        if (inside) copy_async_16(&loads[slot][threadIdx.x], x);
        x += t.stride;
        copies_committed();
    };
    const NormParameters<V> parameters(a, t.b, t.c);
    float factor = 1; // the factor of FP8 outputs
    if constexpr (!std::is_same_v<OUT, T*>) factor = factor_of(out);
    const uint32_t step = DROPOUT ? (uint32_t)*a.dropout.step : 0;
    const int g = a.group_of(t.slab0) + threadIdx.x / 8; // the group whose sums this thread and its neighbours add up
    const int c0 = g * a.Cg;                             // the group's first channel
    const int of_x1 = min(a.Cg, a.s.C1 - c0);            // how many of the group's channels belong to x1
    const LaneShare share{max(of_x1, 1)};
    await_previous_kernel();
    t.begin(fetch);

    if (g <= a.group_of(t.slab0 + a.slab - 1)) {
        double sum = 0;    // of x
        double square = 0; // of x^2
        // Adds up the group's sums that belong to one tensor (x1 or x2): the sums of its channels from, from + 1, ...,
        // over all parts of Stats. These sums form a table, which eight lanes share. Each part is a row of the table.
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
            // mean and rstd are kept for the backward pass. A group may lie in several slabs. The slab in which the
            // group begins writes them.
            if (blockIdx.x == 0 && c0 >= t.slab0) {
                mean[t.b * a.s.groups + g] = (float)m;
                rstd[t.b * a.s.groups + g] = group_r;
            }
        }
    }
    __syncthreads();

    // The V channels of a thread may belong to several groups.
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

// Computes dz from dout: multiplies dout by the nonlinearity's derivative and by dropout's factors. x is the norm's
// input. scale and shift have been multiplied by Z_FACTOR, because Z_FACTOR z is the argument that the function for the
// derivative (df) expects.
template <class T, bool DROPOUT>
INLINE void norm_dz(float (&dz)[VEC<T>],          // holds dout at first, and dz afterwards
                    const float (&x)[VEC<T>],     //
                    const float (&scale)[VEC<T>], //
                    const float (&shift)[VEC<T>], //
                    const NormArgs& a,
                    uint32_t step, // the training step; dropout depends on step, b and e
                    int b,         // the image
                    size_t e) {    // the first element of the piece, counted within the image
    with_nonlinearity<T>(a.s.nonlinearity, [&](auto nonlinearity) {
        UNROLL_FOR (int i = 0; i < VEC<T>; i++) {
            dz[i] *= nonlinearity.df(x[i] * scale[i] + shift[i]);
        }
    });
    if (DROPOUT) apply_dropout(dz, a, step, b, e);
}

// Backward, first pass: for each channel, the sums of dz and of dz x over a block's chunk of pixels.
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
    __shared__ uint4 loads[PIXELS][2][NORM_THREADS]; // later: the sums of each thread
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
    // x and all that `channel` loads exist since the forward pass. So they can be read before await_previous_kernel.
    const NormChannel channel(a, t.b, t.slab0 + min(threadIdx.x, a.slab - 1));
    t.begin(fetch_x);
    const uint32_t step = DROPOUT ? (uint32_t)*a.dropout.step : 0;
    await_previous_kernel();
    t.begin(fetch_d);
    if ((int)threadIdx.x < a.slab) coefficients[threadIdx.x] = channel.coefficients(Z_FACTOR<T>);
    __syncthreads();
    float scale[V], shift[V];
    float sum[V] = {};     // of dz
    float product[V] = {}; // of dz x
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

// x_factor and offset of a group, in dx = scale dz - (x_factor x + offset):
//   x_factor = rstd^2 E[dxhat xhat]      offset = rstd E[dxhat] - x_factor mean
// sum, product: this lane's part of the group's sums of dxhat and of dxhat x. Eight lanes work on one group.
INLINE float2 group_terms(double sum, double product, float mean, float rstd, const NormArgs& a) {
    sum = group_sum(sum) * a.weight_of_one;                          // E[dxhat]
    product = group_sum(product) * a.weight_of_one;                  // E[dxhat x]
    const float dxhat_xhat = (float)((product - mean * sum) * rstd); // E[dxhat xhat]
    const float x_factor = dxhat_xhat * rstd * rstd;
    return make_float2(x_factor, (float)sum * rstd - x_factor * mean);
}

// Backward, second pass: dx = scale dz - (x_factor x + offset) [+ addends, if ADD]. GRAD: GradOf<T>, or Fp8GradOf<T>.
// The grid is that of groupnorm_forward_kernel. Each thread works on the channels and pixels of its NormColumn.
// `chunks` is the number of chunks in the first pass; this pass may divide the pixels into another number of chunks.
// Shared memory: each thread's next PIXELS pieces of x, dout and an addend; the coefficients of the slab's channels
// (scale, shift) and of their groups (x_factor, offset).
//   1. Every thread starts the loads of its first pixels.
//   2. For each group of the slab, eight threads add up the chunks' sums. x_factor and offset follow from these sums.
//   3. The blocks of the first chunk also compute this image's part of the parameters' gradients.
//   4. Each thread walks down its pixels. For each pixel it computes dz again, and then dx.
template <class T, bool DROPOUT, bool ADD, class GRAD>
static __global__ void __launch_bounds__(NORM_THREADS, norm_backward_blocks(DROPOUT || ADD))
    groupnorm_backward_kernel(GRAD dx1, GRAD dx2,
                              const float2* partial, // (B, chunks, C): the first pass's sums
                              int chunks,            //
                              const T* dout,         // (B, HW, C)
                              NormArgs a) {
    constexpr int V = VEC<T>;
    constexpr int PIXELS = 3;
    constexpr int SOURCES = ADD ? 3 : 2;
    __shared__ uint4 loads[PIXELS][SOURCES][NORM_THREADS];
    __shared__ __align__(16) float2 coefficients[NORM_SLAB], terms[NORM_SLAB];
    NormColumn<T, PIXELS> t{a, (int)(gridDim.z - 1 - blockIdx.z)}; // images in reverse order, as in the forward pass
    const GRAD to = t.in_x1 ? dx1 : dx2;
    if (!to.dx) t.end = 0; // then nobody needs the gradient of this tensor
    const uint64_t policy = last_read();
    const T* next_x = t.x;
    const T* next_d = dout + t.at_out;
    const T* next_add =
        ADD && to.add1 ? to.add1 + t.at : nullptr; // add1 may be dx itself; at this time dx has not been written there
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
    await_previous_kernel(); // the previous kernel wrote the sums, but neither x nor dout
    if ((int)threadIdx.x < a.slab) coefficients[threadIdx.x] = channel.coefficients(Z_FACTOR<T>);

    partial += (size_t)t.b * chunks * a.C;
    const int first_group = a.group_of(t.slab0);
    const int last_group = a.group_of(t.slab0 + a.slab - 1);
    for (int g = first_group + threadIdx.x / 8; g <= last_group; g += NORM_THREADS / 8) {
        double sum = 0;     // of dxhat
        double product = 0; // of dxhat x
        UNROLL_4_FOR (int i = threadIdx.x % 8; i < a.Cg * chunks; i += 8) {
            const int chunk = a.group_of(i); // i / Cg
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
    float factor = 0; // of FP8
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
            const float dx_scale = scale[i] * (1 / Z_FACTOR<T>); // scale was multiplied by Z_FACTOR
            dz[i] = dx_scale * dz[i] - x_factor[i] * x[i] - offset[i];
        }
        if (ADD) add_piece<T>(dz, add1);
        store_gradient(GradOf<T>{to.dx, nullptr, ADD ? to.add2 : nullptr}, at, dz);
        if constexpr (std::is_same_v<GRAD, Fp8GradOf<T>>) store_gradient_fp8<T>(to, at, dz, factor);
        at += t.stride;
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// --- groupnorm_backward_whole: an image's slab in shared memory
// Used when: x and dout of a slab fit into the shared memory of a block, or of a cluster of blocks (sm_90 and later),
//   and plan_norm_whole finds it faster than two passes.
// How: A slab is whole groups of channels of one image. Each block of a cluster has a chunk of its pixels:
//
//     1. x and dout of the chunk come to shared memory, where each thread loads and reads its own part
//     2. each thread sums dz and dz x of its pixels; dz stays where dout was
//     3. a warp adds up its threads' sums; if there are several blocks, each adds up its warps' sums and writes them to
//        all blocks
//     4. every block computes x_factor and offset of every group from all these sums
//     5. dx = scale dz - (x_factor x + offset), from x and dz in shared memory
//
// Costs: Everything is read once. At 8x8 the time consists of latencies: mainly of fetching code that runs only once,
//   and of work that waits for the loads of x. So loops are not unrolled, and the few values that other work waits for
//   are loaded first.

// Adds up v over those lanes of a warp whose numbers differ by multiples of `columns` (a power of 2). In each step two
// lanes exchange half of their values and add. After a step each lane works on half as many values as before. When only
// one pair of values is left, the lanes add whole pairs. At the end a lane has one or several pairs of sums, which
// begin at v[0]. (The more columns, the more pairs.) Returns the index that the lane's first sum had in v.
template <int HALF, int OFFSET, int N> INLINE int fold_rows(float (&v)[N], int columns) {
    int first = 0;
    if (OFFSET >= columns && halve<HALF>(v, OFFSET)) first = HALF;
    if constexpr (HALF > 2) {
        const int of_half = fold_rows<HALF / 2, OFFSET / 2>(v, columns);
        first += of_half;
    } else {
        for (int o = OFFSET / 2; o >= columns; o /= 2) { // one pair is left: each lane adds the other lane's pair
            v[0] += __shfl_xor_sync(0xFFFFFFFFu, v[0], o);
            v[1] += __shfl_xor_sync(0xFFFFFFFFu, v[1], o);
        }
    }
    return first;
}

// How groupnorm_backward_whole_kernel divides an image. A slab has whole groups and whole vectors of channels. Each
// block of a cluster has a chunk of the image's pixels. A warp works on 2^log_columns neighbouring vectors of each
// pixel; 2^log_warps warps work on the same vectors. A slab may have any number of vectors: the lanes for vectors
// beyond the slab are idle.
struct NormWhole {
    int threads; // threads of a block
    int slab;    // how many channels a slab has
    int log_columns, log_warps;
    int chunks; // how many blocks a cluster has
    int chunk;  // how many pixels a chunk has

    HD int rows() const { return 32 << log_warps >> log_columns; } // how many pixels a block works on at a time
    HD int slots() const { return (chunk + rows() - 1) / rows(); } // how many pixels a thread has at most
    // Returns the distance from one row of sums to the next. The distance is odd, so that the sums of one channel lie
    // in different banks.
    HD int pitch() const { return slab + 1; }
    // Returns the bytes of shared memory of a block. NormSlab divides them in the same order.
    int bytes() const {
        const int pieces = 2 * slots() * threads; // x and dout
        const int per_channel = sizeof(float2) + sizeof(float4);
        const int sums = (1 << log_warps) + (chunks > 1 ? chunks : 0); // rows: one for each row_warp and each block
        return pieces * 16 + slab * per_channel + sums * pitch() * (int)sizeof(float2);
    }
};

constexpr int MAX_WHOLE_THREADS = 384; // threads of a block; a multiprocessor has room for two such blocks

// What a block and a thread work on. A block has a chunk of the pixels and a slab of the channels of image b. Each
// thread works on V neighbouring channels of `count` pixels, each of which lies `rows` pixels after the one before.
template <class T, bool DROPOUT> struct NormSlab {
    static constexpr int V = VEC<T>;
    static constexpr int COPY_GROUPS = 4; // dout is copied in so many groups; sums begin when the first group is there
    static constexpr int BATCH = 2;       // the addends of so many pixels are loaded together
    const NormArgs& a;
    const NormWhole& w;
    uint4* const kept; // (slots, 2, threads): x and dout of each thread; later dz replaces dout

    // How threads are arranged. The first 2^log_columns lanes of a warp form one row, the next 2^log_columns lanes form
    // the next row, and so on. A row of lanes works on one pixel at a time.
    int tid = threadIdx.x;
    int threads = w.threads;
    int rows = w.rows();
    int row_warps = 1 << w.log_warps; // warps that work on the same channels
    int blocks = CLUSTERS ? gridDim.x : 1;
    int column_in_warp = tid & ((1 << w.log_columns) - 1);
    int column = (tid >> (5 + w.log_warps) << w.log_columns) + column_in_warp; // this thread's vector within the slab
    int row_warp = tid / 32 & (row_warps - 1);
    int row = (row_warp << 5 | tid % 32) >> w.log_columns;
    int slots = w.slots();
    int slots_in_group = ceil_div(slots, COPY_GROUPS); // how many slots a group of copies fills

    // Shared memory after `kept`:
    float2* coefficients = (float2*)(kept + 2 * slots * threads); // (slab): scale, shift; later x_factor, offset
    float4* channels = (float4*)(coefficients + w.slab);          // (slab): mean, rstd, w in dxhat = w dz
    float2* warp_sums = (float2*)(channels + w.slab);             // (warps, slab): sums of dz, dz x
    float2* block_sums = warp_sums + row_warps * w.pitch();       // (blocks of the cluster, slab), if there are several

    // Pixels and channels. Images are processed from the last to the first. One reason is that dout of the last images
    // may still be in the L2 cache. The other reason is that the next kernel, which reads dx, begins with the first
    // image.
    int b = gridDim.z - 1 - blockIdx.z;
    int slab0 = blockIdx.y * w.slab;         // the slab's first channel
    int first = blockIdx.x * w.chunk + row;  // this thread's first pixel
    bool busy = column * V < w.slab;         // the last vectors of a warp may lie beyond the slab
    int c = slab0 + (busy ? column * V : 0); // this thread's first channel
    int end = busy ? min(a.s.HW, ((int)blockIdx.x + 1) * w.chunk) : 0;
    int count = end > first ? ceil_div(end - first, rows) : 0;
    bool in_x1 = c < a.s.C1;                                                     // false: the channels belong to x2
    int pitch = in_x1 ? a.s.C1 : a.s.C2;                                         // elements of a pixel of x1 or x2
    int stride = rows * pitch;                                                   // distance to the thread's next pixel
    size_t at = ((size_t)b * a.s.HW + first) * pitch + (in_x1 ? c : c - a.s.C1); // where this pixel lies in x and dx

    // The addends of the next BATCH pixels. The addends of the first pixels are loaded before the sums are complete.
    // (An addend may be dx itself.)
    uint4 add1[BATCH] = {}, add2[BATCH] = {};

    INLINE void load_x() const {
        const T* x = (const T*)(in_x1 ? a.x1 : a.x2) + at;
        uint4* p = kept + tid;
        NO_UNROLL_FOR (int k = 0; k < count; k++, x += stride, p += 2 * threads) {
            copy_async_16(p, x);
        }
    }
    INLINE void load_dout(const T* dout) const { // in COPY_GROUPS groups of copies
        const T* d = dout + ((size_t)b * a.s.HW + first) * a.C + c;
        const int step = rows * a.C;
        uint4* p = kept + threads + tid;
        UNROLL_FOR (int i = 0; i < COPY_GROUPS; i++) {
            NO_UNROLL_FOR (int k = i * slots_in_group; k < min((i + 1) * slots_in_group, count); k++) {
                copy_async_16(p, d);
                d += step;
                p += 2 * threads;
            }
            copies_committed();
        }
    }
    // Adds dz and dz x of each channel to v, for all pixels of this thread. The pieces of dout are read in the order in
    // which they arrive. dz is written to the place of dout.
    INLINE void sum_pixels(float (&v)[2 * V], const float (&scale)[V], const float (&shift)[V], uint32_t step) const {
        uint4* p = kept + tid;
        NO_UNROLL_FOR (int i = 0; i < COPY_GROUPS; i++) {
            if (i == 0) copies_arrived<3>();
            else if (i == 1) copies_arrived<2>();
            else if (i == 2) copies_arrived<1>();
            else copies_arrived<0>();
            NO_UNROLL_FOR (int k = i * slots_in_group; k < min((i + 1) * slots_in_group, count); k++) {
                float x[V], dz[V];
                unpack<T>(x, p[0]);
                unpack<T>(dz, p[threads]);
                norm_dz<T, DROPOUT>(dz, x, scale, shift, a, step, b, (size_t)(first + k * rows) * a.C + c);
                UNROLL_FOR (int j = 0; j < V; j++) {
                    v[2 * j] += dz[j];
                    v[2 * j + 1] += dz[j] * x[j];
                }
                p[threads] = pack<T>(dz);
                p += 2 * threads;
            }
        }
    }
    // Loads the addends of this thread's pixels k ... k + BATCH - 1.
    INLINE void load_addends(const GradOf<T>& to, int k) {
        UNROLL_FOR (int j = 0; j < BATCH; j++) {
            if (to.add1 && k + j < count) add1[j] = load16(to.add1 + at + j * stride);
            if (to.add2 && k + j < count) add2[j] = load16(to.add2 + at + j * stride);
        }
    }
    INLINE void begin_addends(const GradOf<T>& to) {
        if (to.dx) load_addends(to, 0);
        if (to.add1) // the addends of later pixels are fetched into the L2 cache
            NO_UNROLL_FOR (int k = BATCH; k < count; k++) {
                asm volatile("prefetch.global.L2 [%0];" ::"l"(to.add1 + at + k * stride));
            }
    }
    // Adds up a warp's sums of each channel, and writes them to warp_sums.
    INLINE void fold(float (&v)[2 * V]) const {
        const int value = fold_rows<V, 16>(v, 1 << w.log_columns); // the index of the first sum that this lane has
        const int left = max(2 * V << w.log_columns >> 5, 2);      // how many sums this lane has
        float2* const to = warp_sums + row_warp * w.pitch() + column * V + value / 2;
        if (busy)
            UNROLL_FOR (int i = 0; i < V; i++)
                if (2 * i < left) to[i] = make_float2(v[2 * i], v[2 * i + 1]);
    }
    // Writes this block's sums into the shared memory of all blocks of the cluster, and waits until the sums of all
    // blocks have arrived in this block's shared memory. all_here: the barrier that counts the bytes of these sums
    INLINE void exchange(uint32_t all_here) const {
        cluster_wait(); // all blocks have begun, so their shared memory may be written to
        if (tid < w.slab) {
            const double2 sum = sum_pairs<4>(warp_sums + tid, row_warps, w.pitch());
            const uint32_t place = shared_address(block_sums + blockIdx.x * w.pitch() + tid);
            const float2 q = make_float2((float)sum.x, (float)sum.y);
            for (int r = 0; r < blocks; r++) {
                store_to_block(at_block(place, r), at_block(all_here, r), q);
            }
        }
        mbarrier_wait(all_here, 0);
    }
    // Computes x_factor and offset of each group from 2^log_items rows of sums, and writes them to coefficients. Eight
    // threads work on each group.
    INLINE void find_group_terms(const float2* sums, int log_items) const {
        NO_UNROLL_FOR (int g = tid / 8; g < a.group_of(w.slab); g += threads / 8) {
            double sum = 0;     // of dxhat
            double product = 0; // of dxhat x
            NO_UNROLL_FOR (int i = tid % 8; i < a.Cg << log_items; i += 8) {
                const int k = g * a.Cg + (i >> log_items); // the channel, counted within the slab
                const int item = i & ((1 << log_items) - 1);
                const float2 q = sums[item * w.pitch() + k];
                sum += channels[k].z * q.x;
                product += channels[k].z * q.y;
            }
            const float4 t = channels[g * a.Cg];
            const float2 terms = group_terms(sum, product, t.x, t.y, a);
            NO_UNROLL_FOR (int k = g * a.Cg + tid % 8; k < (g + 1) * a.Cg; k += 8) {
                coefficients[k] = terms;
            }
        }
    }
    // dx = scale dz - (x_factor x + offset) + addends, for all pixels of a thread
    template <class GRAD> INLINE void store_dx(const GRAD& to, float (&scale)[V]) {
        float factor = 0; // of FP8
        if constexpr (std::is_same_v<GRAD, Fp8GradOf<T>>) factor = to.fp8.bytes ? *to.fp8.factor : 0;
        float x_factor[V], offset[V];
        load_pairs(x_factor, offset, coefficients + (c - slab0));
        UNROLL_FOR (int i = 0; i < V; i++) { // scale was multiplied by Z_FACTOR
            scale[i] *= 1 / Z_FACTOR<T>;
        }
        uint4* p = kept + tid;
        NO_UNROLL_FOR (int k = 0; to.dx && k < count; k += BATCH) {
            if (k) load_addends(to, k);
            UNROLL_FOR (int j = 0; j < BATCH; j++, at += stride, p += 2 * threads) {
                if (k + j >= count) break;
                float x[V], dz[V];
                unpack<T>(x, p[0]);
                unpack<T>(dz, p[threads]);
                UNROLL_FOR (int i = 0; i < V; i++) {
                    dz[i] = scale[i] * dz[i] - (x_factor[i] * x[i] + offset[i]);
                }
                if (to.add1) add_piece<T>(dz, add1[j]);
                if (to.add2) add_piece<T>(dz, add2[j]);
                store_whole(to.dx + at, pack<T>(dz));
                if constexpr (std::is_same_v<GRAD, Fp8GradOf<T>>) store_gradient_fp8<T>(to, at, dz, factor);
            }
        }
    }
};

// grid (chunks of pixels, slabs of channels, images). The chunks of an image form a cluster. NormSlab describes what a
// thread works on and what lies in shared memory. The head of this section lists the phases. GRAD: GradOf<T>, or
// Fp8GradOf<T>.
template <class T, bool DROPOUT, class GRAD>
static __global__ void __launch_bounds__(MAX_WHOLE_THREADS, 2)
    groupnorm_backward_whole_kernel(GRAD dx1, GRAD dx2, const T* dout, NormArgs a, NormWhole w) {
    constexpr int V = VEC<T>;
    // `kept` is aligned to 128 bytes. Otherwise it would begin 16 bytes after `barrier`, and 128 bytes of a row would
    // lie in two rows of banks.
    extern __shared__ __align__(128) uint4 kept[];
    __shared__ uint64_t barrier;
    NormSlab<T, DROPOUT> slab{a, w, kept};
    const int tid = threadIdx.x;
    const int blocks = slab.blocks;

    // What the forward pass has stored can be read before the previous kernel has ended. The few values that other work
    // waits for are loaded first.
    const NormChannel channel(a, slab.b, slab.slab0 + min(tid, w.slab - 1));
    slab.load_x();
    const uint32_t step = DROPOUT ? (uint32_t)*a.dropout.step : 0;
    const uint32_t all_here = shared_address(&barrier); // the barrier that counts the bytes of all blocks' sums
    if (blocks > 1) {
        if (tid == 0) mbarrier_init(all_here, 1);
        cluster_arrive();
    }
    await_previous_kernel();
    slab.load_dout(dout);
    if (tid < w.slab) {
        slab.coefficients[tid] = channel.coefficients(Z_FACTOR<T>);
        slab.channels[tid] = make_float4(channel.mean, channel.rstd, channel.dxhat_factor(), 0);
    }
    __syncthreads();
    // The sums of other blocks may have arrived here already. The barrier's phase ends when this thread has arrived at
    // it and all announced bytes have arrived, in any order.
    if (blocks > 1 && tid == 0) mbarrier_expect(all_here, blocks * w.slab * (int)sizeof(float2));
    float scale[V], shift[V];
    float v[2 * V] = {}; // sums of dz and dz x of each channel
    load_pairs(scale, shift, slab.coefficients + (slab.c - slab.slab0));
    slab.sum_pixels(v, scale, shift, step);
    const GRAD to = slab.in_x1 ? dx1 : dx2;
    slab.begin_addends(to);
    slab.fold(v);
    __syncthreads();
    if (blocks > 1) slab.exchange(all_here);
    // For each channel, 2^log_items sums still have to be added up. If there are several blocks, there is one sum from
    // each block. Otherwise there is one sum from each warp of the block.
    const float2* const all_sums = blocks > 1 ? slab.block_sums : slab.warp_sums;
    const int log_items = blocks > 1 ? 31 - __clz(blocks) : w.log_warps;
    slab.find_group_terms(all_sums, log_items);
    __syncthreads();
    slab.store_dx(to, scale);

    // One block of the cluster writes the parameters' gradients of this image.
    if (blockIdx.x == 0 && tid < w.slab) {
        const double2 sum = sum_pairs<1>(all_sums + tid, 1 << log_items, w.pitch());
        channel.put_gradients(a, sum);
    }
}

// norm_sums_kernel sums the gradients of many group norms' parameters over the batch, in one launch.
struct NormSums {
    const float2* sums; // (B, C): each image's part of dbias and dweight
    float *dweight, *dbias;
    int B, C;
};
constexpr int MAX_NORM_SUMS = 64;
// the norms whose gradients finish_gradients has to sum up
static struct NormSumsList { NormSums norms[MAX_NORM_SUMS]; } norm_sums_list;
static int norm_sums_count = 0;
static size_t norm_sums_used = 0; // how many bytes of device.norm_sums are in use

// grid (channels / 32, norms). A block has 32 x 8 threads: 32 channels, and 8 parts of the batch.
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

// Divides images into chunks of pixels, so that there are about per_sm blocks for each multiprocessor. An image has at
// most max_chunks chunks. Returns the grid.
static dim3 norm_grid(NormArgs& a, int per_sm, int max_chunks) {
    const int slabs = a.C / a.slab;
    const int rows = NORM_THREADS * act_vec() / a.slab; // how many pixels a block works on at a time
    const int fill_gpu = std::max(per_sm * gpu.sms / (a.s.B * slabs), 1);
    const int chunks = std::min(fill_gpu, max_chunks);
    a.chunk = ceil_div(ceil_div(a.s.HW, chunks), rows) * rows;
    return dim3(ceil_div(a.s.HW, a.chunk), slabs, a.s.B);
}

// Returns how many bytes are enough for any batch of up to s.B images. norm_grid makes one chunk of each slab. It makes
// more chunks only if all blocks then still fit on the GPU at the same time.
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
        if (!act_has_wgmma() || (drop && !out)) die("internal error: FP8 is for Hopper, and alone for sampling");
        using Both = BothOut<bf16>;
        const Both both{(bf16*)out, fp8};
        if (!out) run(groupnorm_forward_kernel<bf16, false, Fp8Copy>, fp8);
        else if (drop) run(groupnorm_forward_kernel<bf16, true, Both>, both);
        else run(groupnorm_forward_kernel<bf16, false, Both>, both);
        return;
    }
    with_act([&]<class T>(T) {
        run(drop ? groupnorm_forward_kernel<T, true, T*> : groupnorm_forward_kernel<T, false, T*>, (T*)out);
    });
}

// =====================================================================================================================
// 19. Attention
// Attention over T = H * W pixels. It reads the buffer qkv (B, T, 3C) as the convolution wrote it. qkv holds q, k and
// v, each of which has C = heads * d channels. The formulas are for one image and one head; the matrices are (T, d) and
// (T, T):
//
//   forward    S = q k^T / sqrt(d)      P = softmax(S), by rows      out = P v
//   backward   D = rowsum(dout * out)   dP = dout v^T                dS = P (dP - D)
//              dv = P^T dout            dq = dS k / sqrt(d)          dk = dS^T q / sqrt(d)
//
// The forward pass stores two numbers for each row (SoftmaxRow), from which the backward pass computes P again.
// S and P never leave the chip (FlashAttention, Dao et al. 2022). A block owns some rows of one head, such as queries.
// It reads the rows that its own rows are combined with, such as all keys and values, tile by tile. These "stream past"
// the block's own rows. Hopper's kernels compute bf16 heads of 32 and 64 channels. Two portable versions compute all
// other heads. In the backward pass of the portable versions, half of the blocks own queries (and write dq). The other
// half own keys (and write dk and dv). So every sum is computed by one block, in one order. Both halves run the same
// code, with own rows A1, A2 and streamed rows B1, B2:
//
//   own     A1   A2     B1   B2        S = A1 B1^T        dP = A2 B2^T
//   queries q    dout   k    v         dq = dS B1
//   keys    k    v      q    dout      dk = dS B1         dv = P B2        (S, P, dP, dS are transposed here)
//
// The hardware computes powers of 2, so e^x is computed as 2^(x log2(e)). In the kernels, scores are q k^T without the
// division by sqrt(d). In the exponent the scores are multiplied by log2(e) / sqrt(d).

struct AttentionCall {
    act* to; // out, or dqkv in the backward pass
    SoftmaxRow* rows;
    const act *qkv, *dout, *out;
    int B, T, C, heads;
    int d = C / heads;         // how many channels a head has
    int all_heads = B * heads; // how many heads all images have together
};

// The rows of one head in a matrix. pitch: elements from a row to the next one
template <class T> struct HeadRows {
    T* p;
    int pitch;
    INLINE T* row(size_t t) const { return p + t * pitch; }
};

enum { Q_PART, K_PART, V_PART }; // the parts of a pixel's 3C channels in qkv and dqkv

// A block's tile of `rows` rows of one head. The blocks of a head run at the same time. So they find the head's rows in
// the L2 cache.
struct HeadTile {
    const AttentionCall& a;
    int rows;
    int tiles = ceil_div(a.T, rows);      // how many tiles a head has
    int index = blockIdx.x / tiles;       // the number of the head: b * heads + h
    int row0 = blockIdx.x % tiles * rows; // the tile's first row
    int b = index / a.heads;
    int h = index % a.heads;

    // Returns the index of the head's row t in the arrays of SoftmaxRows and of D, which are (B, heads, T).
    INLINE size_t row_index(int t) const { return (size_t)index * a.T + t; }
    // of_qkv returns the head's rows in one part of qkv or dqkv. of_out returns the head's rows in out or dout.
    template <class T> INLINE HeadRows<T> of_qkv(const act* qkv, int part) const {
        return {(T*)qkv + (size_t)b * a.T * 3 * a.C + part * a.C + h * a.d, 3 * a.C};
    }
    template <class T> INLINE HeadRows<T> of_out(const act* out) const {
        return {(T*)out + (size_t)b * a.T * a.C + h * a.d, a.C};
    }
};

// The operands of the portable backward kernels, as in the table above. keys: the block owns keys
template <class T> struct BackwardOperands {
    HeadRows<const T> A1, A2, B1, B2;
    INLINE BackwardOperands(const HeadTile& tile, const AttentionCall& a, bool owns_keys) {
        const auto v = tile.of_qkv<const T>(a.qkv, V_PART);
        const auto dout = tile.of_out<const T>(a.dout);
        A1 = tile.of_qkv<const T>(a.qkv, owns_keys ? K_PART : Q_PART);
        B1 = tile.of_qkv<const T>(a.qkv, owns_keys ? Q_PART : K_PART);
        A2 = owns_keys ? v : dout;
        B2 = owns_keys ? dout : v;
    }
};

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
// Used when: d <= 256 (in fp32 d <= 128), and Hopper's kernels (below) can't be used: in fp32, on other GPUs, for
// another d or T.
// How: Each warp of a block owns 16 MT rows (queries; backward: queries or keys). The other rows stream past through
//   two stages of shared memory, N at a time: while one stage is multiplied, the other one is loaded.
//
//     S (M, SUB)  =  own rows (M, d) x streamed rows (SUB, d)^T       in registers: 16 MT rows of S for each warp
//     out (M, d) +=  P (M, SUB) x streamed rows (SUB, d)              P: the registers of S, packed to bf16
//
//   mma.sync's result S has the layout of its A operand, so P need not go through shared memory. The softmax is
//   computed while rows stream past: each row keeps its highest score so far and the sum of its exponentials. When a
//   higher score comes, the earlier sums are made smaller by a factor. In shared memory rows are padded by 16 bytes, so
//   that the eight rows that ldmatrix reads at once lie in different banks.
// Costs: 2 products of T x T x d forward; 7 backward, since the blocks that own queries and those that own keys all
// compute S and dP.

// Returns how many rows stream past at a time. The longer the rows are, the fewer fit into shared memory.
constexpr int attention_streamed_rows(int row_bytes, int MT) {
    if (row_bytes > 256) return 16;
    if (row_bytes > 128) return 32;
    if (row_bytes > 64 || MT == 1) return 64;
    return 128;
}
// Returns how many blocks a multiprocessor has room for. This depends on the registers that a thread needs for the 16
// MT rows of its warp. Each row has row_bytes.
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

template <class T_, int DIM_, int MT_, bool KEEP_> struct AttentionTile {
    typedef T_ T;
    static constexpr int DIM = DIM_; // d, padded with zeros
    static constexpr int ROW_BYTES = DIM * sizeof(T);
    static constexpr int V = VEC<T>;
    static constexpr int PARTS = ::PARTS<T>; // 2: each float is multiplied as two fp16 numbers
    // true: the fragments of own rows stay in registers; false: they are read again for each product
    static constexpr bool KEEP = KEEP_;
    // Own rows. A warp owns 16 MT of them. With MT = 2, each streamed row that the warp has read is used twice.
    static constexpr int MT = MT_;
    static constexpr int WARP_ROWS = 16 * MT;
    static constexpr int WARPS = ROW_BYTES > 256 ? 2 : 4;
    static constexpr int THREADS = 32 * WARPS;
    static constexpr int M = WARPS * WARP_ROWS;
    // Streamed rows are loaded N at a time. They are multiplied SUB at a time, which gives NT tiles of 8 columns.
    static constexpr int N = attention_streamed_rows(ROW_BYTES, MT);
    static constexpr int SUB = std::min(N, 32);
    static constexpr int NT = SUB / 8;
    // Sizes in shared memory, in elements and in bytes.
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

// Returns the number of the warp's first own row, counted within the block's own rows.
template <class Tile> INLINE int warp_row() { return threadIdx.x / 32 * Tile::WARP_ROWS; }

// What a block's shared memory and a warp's registers hold in the forward kernel. Here MT = 1, and there are four
// warps:
//
//     own rows (M, PITCH)        stage 0         stage 1              registers of warp 1
//   [ q of warp 0: 16 rows ]   [ k: N rows ]   [ k: N rows ]        q      16 x d     OwnRows (KEEP)
//   [ q of warp 1          ]   [ v: N rows ]   [ v: N rows ]        S, P   16 x SUB   Scores
//   [ q of warp 2          ]    multiplied      being loaded        out    16 x d     Sums
//   [ q of warp 3          ]                                        top, sum of 16 rows

// A warp's own rows of one operand, as A fragments: kept[k][m] holds columns 16 k ... 16 k + 15 of the rows 16 m ... 16
// m + 15. Without KEEP there is only one slot: for each product, the columns of each k are read into it again.
template <class Tile> struct OwnRows {
    static constexpr int SLOTS = Tile::KEEP ? Tile::DIM / 16 : 1;
    const typename Tile::T* rows; // the address that this lane gives to ldmatrix to read the first columns
    uint32_t kept[SLOTS][Tile::MT][4 * Tile::PARTS];
    float scale[SLOTS]; // the factor that undoes the scale of floats' parts

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
            UNROLL_FOR (int h = 0; h < Tile::PARTS; h++) { // reads 16 bytes of rows 0 - 15, then their next 16 bytes
                uint32_t* const a = kept[slot][m] + 4 * h;
                const auto* from = rows + 16 * m * Tile::PITCH + 16 * k + 8 * h;
                ldmatrix(a, a + 2, shared_address(from));
                // A float's fragment is read in two halves. In each half, k has the order that take_apart_fragments
                // expects.
                if (Tile::PARTS == 2) std::swap(a[1], a[2]);
            }
        scale[slot] = take_apart_fragments<typename Tile::T>(kept[slot]);
    }
};

// A warp's results, in mma.sync's layout: tiles of 16 rows x 8 columns. With g = lane / 4 and q = lane % 4, a thread
// holds four numbers of tile [m][n]: columns 2q and 2q + 1 of row g ([0], [1]) and of row g + 8 ([2], [3]).
// Scores: S, P, dP or dS for SUB streamed rows.
// RowSums: results for a warp's own rows, in 8 CT columns of d.
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
        // Each ldmatrix loads four matrices of 8 rows x 16 bytes: two neighbouring ones from 8 rows, and two from the
        // next 8 rows.
        UNROLL_FOR (int n = 0; n < Tile::NT; n += 2)
            UNROLL_FOR (int h = 0; h < Tile::PARTS; h++) {
                const T* from = streamed + 8 * n * Tile::PITCH + 16 * k + 8 * h;
                ldmatrix(b[n] + 2 * h, b[n + 1] + 2 * h, shared_address(from));
            }
        const float scale = own.scale[slot] * take_apart_fragments<T>(b); // for bf16 it is 1
        multiply<T, Tile::MT, Tile::NT>(scores[0], Tile::NT, 1, own.kept[slot], b, scale);
    }
}

// a = the columns 16 k ... 16 k + 15 of p, as A fragments. Each lane already holds the numbers of its fragments, so
// lanes exchange nothing. For bf16 the numbers are rounded. Floats stay as they are, in the order that
// take_apart_fragments expects.
template <class Tile, int REGISTERS>
INLINE void load_fragments(uint32_t (&a)[Tile::MT][REGISTERS], const Scores<Tile>& p, int k) {
    UNROLL_FOR (int m = 0; m < Tile::MT; m++)
        UNROLL_FOR (int i = 0; i < 4; i++) { // rows g, g + 8 in the first 8 columns, then both in the next 8 columns
            const float* const two = p[m][2 * k + i / 2] + i % 2 * 2;
            if constexpr (Tile::PARTS == 1) {
                a[m][i] = pack_pair<typename Tile::T>(two[0], two[1]);
            } else {
                a[m][2 * i] = __float_as_uint(two[0]);
                a[m][2 * i + 1] = __float_as_uint(two[1]);
            }
        }
}

// sums += p (rounded to T) x columns c0 ... c0 + 8 CT - 1 of the streamed rows n0 ... n0 + SUB - 1, as in out += P v
template <class Tile, int CT, class T>
INLINE void multiply_add(RowSums<Tile, CT>& sums, const Scores<Tile>& p, const T* streamed, int n0, int c0) {
    constexpr int PARTS = Tile::PARTS;
    constexpr int AT_ONCE = 4; // so many tiles of 8 columns are multiplied at a time
    const int lane = threadIdx.x % 32;
    const T* lane_rows; // the first element that this lane reads; for bf16 the address for ldmatrix
    if (PARTS == 1) lane_rows = streamed + (n0 + lane % 16) * Tile::PITCH + c0 + lane / 16 * 8;
    else lane_rows = streamed + (n0 + lane % 4 * 2) * Tile::PITCH + c0 + lane / 4;
    const uint32_t lane_address = shared_address(lane_rows);
    UNROLL_FOR (int k = 0; k < Tile::NT / 2; k++) {
        uint32_t a[Tile::MT][4 * PARTS];
        load_fragments<Tile>(a, p, k);
        const float a_scale = take_apart_fragments<T>(a);
        UNROLL_FOR (int n = 0; n < CT; n += AT_ONCE) {
            // Loads the streamed rows 16 k ... 16 k + 15 as B fragments. For bf16 one ldmatrix loads two fragments.
            uint32_t b[AT_ONCE][2 * PARTS];
            UNROLL_FOR (int i = 0; i < AT_ONCE; i++) {
                const int offset = 16 * k * Tile::PITCH + 8 * (n + i);
                const uint32_t from = lane_address + offset * sizeof(T);
                if constexpr (PARTS == 1) {
                    if (i % 2 == 0) ldmatrix_trans(b[i], b[i + 1], from);
                } else {
                    UNROLL_FOR (int r = 0; r < 4; r++) { // rows 2q, 2q + 1, 2q + 8, 2q + 9
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

// Sets the scores of the columns valid, valid + 1, ... to -infinity, so that their P is 0. These columns belong to
// streamed rows beyond T.
template <class Tile> INLINE void mask_columns(Scores<Tile>& scores, int valid) {
    if (valid >= Tile::SUB) return;
    UNROLL_FOR (int m = 0; m < Tile::MT; m++)
        UNROLL_FOR (int n = 0; n < Tile::NT; n++)
            UNROLL_FOR (int i = 0; i < 4; i++) {
                const int column = 8 * n + (int)threadIdx.x % 4 * 2 + i % 2;
                if (column >= valid) scores[m][n][i] = -INFINITY;
            }
}

// The softmax over all scores that have been computed so far for a thread's rows (FlashAttention, algorithm 1). With
// new scores S:
//   top' = max(top, max S)    shrink = e^((top - top') / sqrt(d))    P = e^((S - top') / sqrt(d))
//   sum' = shrink sum + rowsum(P)                                    out' = shrink out + P v (by multiply_add)
// scale: log2(e) / sqrt(d). [m][0] and [m][1] belong to rows g and g + 8 of tile m.
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
                // The difference is computed first, and then multiplied by scale. If the large scores themselves were
                // multiplied by scale, the products would be rounded more.
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
//   3. P = their softmax
//   4. out += P v
// At the end each row of out is divided by the sum of its P.
template <class Tile, class T = typename Tile::T>
static __global__ void __launch_bounds__(Tile::THREADS, Tile::FORWARD_BLOCKS)
    attention_forward_kernel(AttentionCall a) {
    constexpr int N = Tile::N, MT = Tile::MT;
    constexpr int CT = Tile::DIM / 8; // tiles of 8 columns of out
    extern __shared__ __align__(128) uint4 shared_memory[];
    T* own = (T*)shared_memory;
    T* streamed = own + Tile::OWN; // stage i: keys at 2 i, values at 2 i + 1
    const HeadTile tile{a, Tile::M};
    const int lane = threadIdx.x % 32;
    const auto k = tile.of_qkv<const T>(a.qkv, K_PART);
    const auto v = tile.of_qkv<const T>(a.qkv, V_PART);
    const float scale = LOG2E * rsqrtf((float)a.d);
    // Starts the copies of N keys and N values into a stage. They begin with row `first`.
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
    // Divides out by sum, and stores the SoftmaxRow of each row for the backward pass. Four lanes share a row: each of
    // them holds some of its columns, and a part of its sum.
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

// Returns D of a row: rowsum(dout * out). Four lanes compute D together, and each of them returns it.
// d: how many elements each of the two rows has
template <class T> INLINE float row_dot(const T* dout, const T* out, int d) {
    float sum = 0;
    const int lane = threadIdx.x % 4;
    if (d % VEC<T> == 0) { // in pieces of 16 bytes
        NO_UNROLL_FOR (int c = lane * VEC<T>; c < d; c += 4 * VEC<T>) {
            float x[VEC<T>], y[VEC<T>];
            unpack<T>(x, load16(dout + c));
            unpack<T>(y, load16(out + c));
            UNROLL_FOR (int i = 0; i < VEC<T>; i++) {
                sum += x[i] * y[i];
            }
        }
    } else
        NO_UNROLL_FOR (int c = lane; c < d; c += 4) {
            sum += (float)dout[c] * (float)out[c];
        }
    return lane_sum<1, 2>(sum);
}

// D is (B, heads, T). grid (B * heads * T / 64): a block works on 64 rows of a head. Four threads work on each row.
template <class T> static __global__ void __launch_bounds__(256) attention_dots_kernel(float* D, AttentionCall a) {
    const HeadTile tile{a, 64};
    const int t = tile.row0 + threadIdx.x / 4;
    const int row = min(t, a.T - 1); // threads beyond T must take part in row_dot's lane_sum
    await_previous_kernel();
    const auto dout = tile.of_out<const T>(a.dout);
    const auto out = tile.of_out<const T>(a.out);
    const float dot = row_dot(dout.row(row), out.row(row), a.d);
    if (threadIdx.x % 4 == 0 && t < a.T) D[tile.row_index(t)] = dot;
}

// If T is at most SHORT_T, each block of the backward pass computes D of all queries itself, into shared memory. For a
// larger T, attention_dots_kernel computes D before these blocks run. In compute_dots, rows beyond T get the last row's
// D.
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

// Computes P from the scores p, and dS from dP in ds. Each result replaces its source:
//   P = e^((S - top) / sqrt(d)) / sum = 2^((S - top) scale2 - log_sum)
//   dS = P (dP - D)
// If the block owns queries, each row belongs to a query; own[m][0] and own[m][1] are the Query of rows g and g + 8 of
// tile m. If the block owns keys (OWNS_KEYS), each column belongs to a streamed query. The values of these queries lie
// in shared memory: rows (SUB, 2) and dots (SUB).
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

// What a block of the backward pass does. It owns keys (OWNS_KEYS) or queries. It computes the gradients of its own
// rows in the DC columns that begin with column chunk * DC. (If heads have more than 128 channels, the registers have
// no room for all columns.)
// Shared memory: the block's own rows A1 and A2; two stages, each with N streamed rows B1 and B2. If the streamed rows
// are queries, a stage also holds their SoftmaxRow and D. For each stage:
//   1. Start the copies for the next stage.
//   2. S = A1 B1^T and dP = A2 B2^T, for SUB streamed rows at a time
//   3. P and dS
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
    T* streamed = own2 + Tile::OWN;                                // stage i: B1 at 2 i, B2 at 2 i + 1
    float* query_values = (float*)(streamed + 4 * Tile::STREAMED); // of a stage: SoftmaxRow[N], D[N]
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
        // The streamed rows are queries. Load their top, log_sum and D. Rows beyond T get the values of the last row.
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
    Query own_queries[MT][2]; // the Query of rows g and g + 8 of each tile, if the block owns queries
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
    float sum2[OWNS_KEYS ? MT : 1][CT][4] = {}; // dv
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

// grid (B * heads * tiles of T, 1, 2 * chunks of d). Blocks that own keys have more work than blocks that own queries.
// So, for each chunk, the blocks that own keys are started first.
template <class Tile>
static __global__ void __launch_bounds__(Tile::THREADS, Tile::BACKWARD_BLOCKS)
    attention_backward_kernel(AttentionCall a, const float* D) {
    __shared__ float short_D[SHORT_T];
    const bool owns_keys = blockIdx.z % 2 == 0;
    const int chunk = blockIdx.z / 2;
    if (owns_keys) attention_backward_rows<Tile, true>(a, D, chunk, short_D);
    else attention_backward_rows<Tile, false>(a, D, chunk, short_D);
}

// Computes D into the workspace, and returns its address.
template <class T> static float* launch_attention_dots(const AttentionCall& a) {
    launch(attention_dots_kernel<T>, a.all_heads * ceil_div(a.T, 64), 256, 0, device.workspace, a);
    return (float*)device.workspace;
}

// ---------------------------------------------------------------------------------------------------------------------
// --- attention_forward_general and attention_backward_general: heads of any size, any GPU
// Used when: no other kernel can be used: d > 256 in bf16, d > 128 in fp32.
// How: a warp owns a row, and each of its lanes computes 8 columns of the row's result. Rows of more than 256 columns
//   are computed by several warps, each of which computes P again.
// Costs: the work of the fp32 units; every row reads all other rows, from the caches.

constexpr int GENERAL_WARPS = 8;   // warps of a block
constexpr int GENERAL_COLUMNS = 8; // a lane computes so many columns, which lie 32 apart; a warp computes 256

// Returns the dot product of a and b, which have d elements each. All lanes of a warp work on it together, and each
// lane returns the whole product.
template <class T> INLINE float warp_dot(const T* a, const T* b, int d) {
    float sum = 0;
    for (int c = threadIdx.x % 32; c < d; c += 32) {
        sum += (float)a[c] * (float)b[c];
    }
    return warp_sum(sum);
}

// Calls f(i, c) for i = 0, 1, ...: c is this lane's i-th column of the 256 columns of chunk blockIdx.y. Columns from d
// on are left out.
template <class F> INLINE void each_column(int d, F f) {
    UNROLL_FOR (int i = 0; i < GENERAL_COLUMNS; i++) {
        const int c = (blockIdx.y * GENERAL_COLUMNS + i) * 32 + threadIdx.x % 32;
        if (c < d) f(i, c);
    }
}

// grid (B * heads * tiles of T, chunks of d). A warp works on one query. It reads one key after the other, and computes
// the softmax as RunningSoftmax does.
template <class T>
static __global__ void __launch_bounds__(32 * GENERAL_WARPS) attention_forward_general_kernel(AttentionCall a) {
    await_previous_kernel();
    const HeadTile tile{a, GENERAL_WARPS};
    const int row = tile.row0 + threadIdx.x / 32; // this warp's query
    if (row >= a.T) return;
    const auto q = tile.of_qkv<const T>(a.qkv, Q_PART);
    const auto k = tile.of_qkv<const T>(a.qkv, K_PART);
    const auto v = tile.of_qkv<const T>(a.qkv, V_PART);
    const float scale = LOG2E * rsqrtf((float)a.d);
    float out[GENERAL_COLUMNS] = {}; // P v
    float top = -INFINITY;           // the highest score so far
    float sum = 0;                   // the sum of P so far
    for (int j = 0; j < a.T; j++) {
        const float S = warp_dot(q.row(row), k.row(j), a.d);
        const float highest = fmaxf(top, S);
        // If the score is higher than all earlier ones, the earlier sums are made smaller.
        const float shrink = exp2f((top - highest) * scale);
        const float P = exp2f((S - highest) * scale);
        top = highest;
        sum = sum * shrink + P;
        each_column(a.d, [&](int i, int c) { // out = shrink out + P v
            const float value = (float)v.row(j)[c];
            out[i] = out[i] * shrink + P * value;
        });
    }
    // P has not been divided by the sum of its row yet. It is enough to divide out by this sum.
    T* to = tile.of_out<T>(a.to).row(row);
    each_column(a.d, [&](int i, int c) { to[c] = (T)(out[i] / sum); });
    a.rows[tile.row_index(row)] = SoftmaxRow{top, log2f(sum)}; // all lanes write the same numbers
}

// grid (B * heads * tiles of T, chunks of d, 2): blocks with z = 0 own keys, blocks with z = 1 own queries. A warp owns
// one row, and reads the streamed rows one after the other. For each streamed row:
//   S = A1 B1^T,   P,   dP = A2 B2^T,   dS = P (dP - D),   sum1 += dS B1,   sum2 += P B2
template <class T>
static __global__ void __launch_bounds__(32 * GENERAL_WARPS)
    attention_backward_general_kernel(AttentionCall a, const float* D) {
    await_previous_kernel();
    const HeadTile tile{a, GENERAL_WARPS};
    const int row = tile.row0 + threadIdx.x / 32; // this warp's key or query
    const bool owns_keys = blockIdx.z == 0;
    if (row >= a.T) return;
    const BackwardOperands<T> operands(tile, a, owns_keys);
    const T* const a1 = operands.A1.row(row);
    const T* const a2 = operands.A2.row(row);
    const float scale = rsqrtf((float)a.d);
    const float scale2 = LOG2E * scale;
    float sum1[GENERAL_COLUMNS] = {}; // dq or dk, without its factor
    float sum2[GENERAL_COLUMNS] = {}; // dv
    for (int j = 0; j < a.T; j++) {   // the streamed rows: queries, if the warp owns a key
        const T* const b1 = operands.B1.row(j);
        const T* const b2 = operands.B2.row(j);
        const size_t query = tile.row_index(owns_keys ? j : row);
        const SoftmaxRow& r = a.rows[query]; // P is computed again from these two numbers
        const float S = warp_dot(a1, b1, a.d);
        const float dP = warp_dot(a2, b2, a.d);
        const float P = exp2f((S - r.top) * scale2 - r.log_sum);
        const float dS = P * (dP - D[query]);
        each_column(a.d, [&](int i, int c) {
            sum1[i] += dS * (float)b1[c];
            if (owns_keys) sum2[i] += P * (float)b2[c];
        });
    }
    // dq or dk is multiplied by its factor 1 / sqrt(d) only here, at the end.
    T* d_own = tile.of_qkv<T>(a.to, owns_keys ? K_PART : Q_PART).row(row);
    T* dv = tile.of_qkv<T>(a.to, V_PART).row(row);
    each_column(a.d, [&](int i, int c) {
        d_own[c] = (T)(sum1[i] * scale);
        if (owns_keys) dv[c] = (T)sum2[i];
    });
}

// Launches the backward pass if a.dout is not null, and otherwise the forward pass. So does launch_attention.
template <class T> static void launch_attention_general(const AttentionCall& a) {
    const int tiles = a.all_heads * ceil_div(a.T, GENERAL_WARPS);
    const int chunks = ceil_div(a.d, 32 * GENERAL_COLUMNS); // chunks of 256 columns; a warp computes one chunk
    const dim3 grid(tiles, chunks, a.dout ? 2 : 1);
    constexpr int threads = 32 * GENERAL_WARPS;
    if (!a.dout) return launch(attention_forward_general_kernel<T>, grid, threads, 0, a);
    launch(attention_backward_general_kernel<T>, grid, threads, 0, a, launch_attention_dots<T>(a));
}

// Launches forward or backward, for heads of up to DIM channels. A warp owns 32 rows (MT = 2) if the rows are short and
// there are enough of them. Otherwise a warp owns 16 rows.
template <class T, int DIM, int MT = DIM * sizeof(T) <= 128 ? 2 : 1>
static void launch_attention(const AttentionCall& a) {
    // Small images have too few rows for MT = 2: there would not be enough blocks.
    const int few_rows = a.dout ? 64 : 256;
    if (MT == 2 && a.T <= few_rows) {
        launch_attention<T, DIM, 1>(a);
        return;
    }
    constexpr int ROW_BYTES = DIM * sizeof(T);
    using Forward = AttentionTile<T, DIM, MT, (ROW_BYTES <= 128)>;
    using Backward = AttentionTile<T, DIM, MT, (ROW_BYTES * MT <= 128)>;
    const int tiles = a.all_heads * ceil_div(a.T, Forward::M);
    if (!a.dout) return launch(attention_forward_kernel<Forward>, tiles, Forward::THREADS, Forward::FORWARD_BYTES, a);
    const dim3 grid(tiles, 1, 2 * ceil_div(a.d, 128));
    const float* D = a.T > SHORT_T ? launch_attention_dots<T>(a) : nullptr;
    launch(attention_backward_kernel<Backward>, grid, Backward::THREADS, Backward::BACKWARD_BYTES, a, D);
}

static size_t attention_backward_workspace(int B, int T, int, int heads) { // room for D
    return (size_t)B * heads * T * sizeof(float);
}

// ---------------------------------------------------------------------------------------------------------------------
// --- attention_forward_wgmma and attention_backward_wgmma (sm_90a)
// Used when: bf16, heads of 32 or 64 channels, T a multiple of 64. Backward: T = 64, or a multiple of 128 from 256 to
//   1024; otherwise attention_backward_kernel computes the backward pass.
// How: A warpgroup owns 64 rows of a head. TMA brings tiles of the other rows to shared memory. wgmma multiplies them;
//   P or dS, which were just computed in registers, are its A operand.
//   Forward: warpgroups own queries, and keys and values stream past.
//   Backward: warpgroups own keys, and queries stream past in chunks of 64. A head lies in a cluster of blocks, each of
//   which has 128 of its keys in shared memory. A chunk visits one block after the other, and its sum of dq, in fp32,
//   is sent from block to block through their shared memory. Each block begins at another chunk, so all of them always
//   have work. A chunk's sum is always computed in the same order, so the bits of a run can be repeated:
//
//         block 0: keys 0 ..       block 1: keys 128 ..     block 2: keys 256 ..        the block's shared memory
//       +---------------------+  +---------------------+  +---------------------+    +---------------------------+
//       | chunk i             |->| chunk i - 2         |->| chunk i - 4         |-+  | keys: k, v of two heads   |
//       | dk, dv += own keys  |  | dk, dv              |  | dk, dv              | |  | chunks: q, dout, rows     |
//       +---------------------+  +---------------------+  +---------------------+ |  | ds: dS^T of all own keys  |
//                  ^                 dq of a chunk                                |  | sums: dq that arrived     |
//                  +--------------------------------------------------------------+  | dots: -D of two heads     |
//                                                                                    +---------------------------+
// Costs: backward takes five products of T x T x d instead of the portable kernels' seven, and reads everything once.

struct AttentionTma : AttentionCall {
    CUtensorMap qkv_rows, dout_rows; // boxes of 64 rows of a head
    CUtensorMap keys;                // forward: boxes of KEYS rows
};

// Returns how many blocks of the forward pass a multiprocessor has room for. Registers and shared memory limit this
// number.
constexpr int attention_wgmma_blocks(int warpgroups, int keys) {
    if (warpgroups == 1) return 4;
    return keys == 32 ? 3 : 2;
}

// A block of the forward pass. It has WARPGROUPS warpgroups, and each of them works on 64 queries of a head. Keys and
// values are loaded in chunks of KEYS rows.
template <int DIM_, int WARPGROUPS_, int KEYS_, int CHUNKS_> struct AttentionForward {
    static constexpr int DIM = DIM_; // channels of a head
    static constexpr int WARPGROUPS = WARPGROUPS_;
    static constexpr int KEYS = KEYS_;
    // how many chunks a head has, if all of them lie in shared memory at once; 0: the chunks pass through a ring
    static constexpr int CHUNKS = CHUNKS_;
    static constexpr int STAGES = CHUNKS ? CHUNKS : 4; // stages of keys; there are as many stages of values
    static constexpr int THREADS = 128 * WARPGROUPS;
    static constexpr int PER_SM = attention_wgmma_blocks(WARPGROUPS, KEYS); // blocks of a multiprocessor
    static constexpr int QUERY_BYTES = 64 * 2 * DIM;                        // a warpgroup's queries
    static constexpr int KEY_BYTES = KEYS * 2 * DIM;                        // one stage of keys or of values
    static constexpr int BARRIERS = WARPGROUPS + 4 * STAGES;
    static constexpr int TILES = WARPGROUPS * QUERY_BYTES + 2 * STAGES * KEY_BYTES;
    static constexpr int SHARED_BYTES = shared_beside(BARRIERS) + TILES;
};

// A block of the backward pass. It has WARPGROUPS warpgroups that own 64 keys each, and one more warpgroup, which
// computes the queries' gradients. With WARPGROUPS = 1, the 64 keys of a block are a whole head. Then the block needs
// no cluster (ALONE), and a multiprocessor has room for two such blocks.
template <int DIM_, int WARPGROUPS_> struct AttentionBackward {
    static constexpr int DIM = DIM_; // channels of a head
    static constexpr int WARPGROUPS = WARPGROUPS_;
    static constexpr bool ALONE = WARPGROUPS == 1;
    static constexpr int KEYS = 64 * WARPGROUPS; // how many keys a block owns
    static constexpr int THREADS = 128 * (WARPGROUPS + 1);
    static constexpr int PER_SM = ALONE ? 2 : 1; // blocks of a multiprocessor
    // Registers of a thread in the warpgroup that computes the queries' gradients, and in the warpgroups that own keys.
    static constexpr int DQ_REGISTERS = ALONE ? 80 : 136;
    static constexpr int KEY_REGISTERS = ALONE ? 176 : 184;
    // The number of stages of each ring in shared memory, and the bytes of a stage. A tile is 64 rows of a head.
    static constexpr int BARRIERS = 32;
    static constexpr int TILE_BYTES = 64 * 2 * DIM;
    static constexpr int ROWS_BYTES = 64 * sizeof(SoftmaxRow);
    static constexpr int KEYS_BYTES = 2 * WARPGROUPS * TILE_BYTES; // k and v of the block's keys; there are two stages
    static constexpr int CHUNK_STAGES = ALONE ? 3 : 4;
    static constexpr int CHUNK_BYTES = 2 * TILE_BYTES + ROWS_BYTES; // q, dout and SoftmaxRows of a chunk
    static constexpr int CHUNK_PLACE = 2 * TILE_BYTES + 1024;       // the room for them, in whole kilobytes
    static constexpr int DS_STAGES = 2;
    static constexpr int DS_BYTES = KEYS * SLICE_BYTES; // dS^T: KEYS rows of 64 queries
    static constexpr int SUM_STAGES = ALONE ? 0 : 3;
    static constexpr int SUM_BYTES = 64 * DIM * 4;        // dq of a chunk
    static constexpr int DOT_BYTES = ALONE ? 1024 : 4096; // -D of up to 1,024 queries; two stages
    static constexpr int TILES =
        2 * KEYS_BYTES + CHUNK_STAGES * CHUNK_PLACE + DS_STAGES * DS_BYTES + SUM_STAGES * SUM_BYTES + 2 * DOT_BYTES;
    static constexpr int SHARED_BYTES = shared_beside(BARRIERS) + TILES;
};

// Returns an operand of wgmma: rows of one head (DIM elements each), which TMA has written to shared memory. at(2) is
// the operand that begins 16 columns further on. at(2 DIM) is the operand that begins 16 rows further on.
template <int DIM> INLINE Operand head_rows(uint32_t address) {
    constexpr uint32_t SWIZZLE = DIM == 64 ? 1 : 2; // the descriptor's numbers for 128 and for 64 bytes
    return {Operand::rows(address, 8).low, DIM | SWIZZLE << 30};
}
// Each of these functions starts products, as one group of wgmma. b lies in shared memory.
//   multiply_abt   d += a b^T; a lies in shared memory
//   multiply_ab    d += a b, or with K_MAJOR d += a b^T; a lies in registers. With ADD = 0 the sum begins with 0.
//   multiply_atb   d += a^T b; a lies in shared memory, in rows of 64 elements
template <int DIM, int M> INLINE void multiply_abt(float (&d)[M], const Operand& a, const Operand& b) {
    using Product = Wgmma<2 * M>;
    wgmma_fence();
    UNROLL_FOR (int k = 0; k < DIM / 16; k++) {
        Product::template add<K_MAJOR, K_MAJOR>(d, a.at(2 * k), b.at(2 * k));
    }
    wgmma_commit();
}
template <int MAJOR = MN_MAJOR, int ADD = 1, int M, int K>
INLINE void multiply_ab(float (&d)[M], const uint32_t (&a)[K][4], const Operand& b) {
    using Product = Wgmma<2 * M>;
    constexpr int STEP = MAJOR == K_MAJOR ? 2 : 4 * M; // from 16 values of k to the next 16, in units of 16 bytes
    wgmma_fence();
    Product::template add<MAJOR, ADD>(d, a[0], b.at(0));
    UNROLL_FOR (int k = 1; k < K; k++) {
        Product::template add<MAJOR>(d, a[k], b.at(STEP * k));
    }
    wgmma_commit();
}
template <int K, int M> INLINE void multiply_atb(float (&d)[M], const Operand& a, const Operand& b) {
    using Product = Wgmma<2 * M>;
    wgmma_fence();
    UNROLL_FOR (int k = 0; k < K; k++) {
        Product::template add<MN_MAJOR, MN_MAJOR>(d, a.at(128 * k), b.at(4 * M * k));
    }
    wgmma_commit();
}
// Sets d to 0, before the first product is added to it.
template <int M> INLINE void clear(float (&d)[M]) {
    UNROLL_FOR (int i = 0; i < M; i++) {
        d[i] = 0;
    }
    accumulators_ready(d);
}
// Rounds 16 columns of a result to bf16. This gives the A fragment for one step of the next product, because both have
// the same layout.
INLINE void pack_fragment(uint32_t (&a)[4], const float* d) {
    UNROLL_FOR (int i = 0; i < 4; i++) {
        a[i] = pack_bf16(d[2 * i], d[2 * i + 1]);
    }
}
// Stores this warp's 16 rows of a result. Each row is multiplied by its factor. The rows are first written to shared
// memory (`rows`, with room for 64 rows of a head), so that each store to global memory has 16 bytes. pitch: elements
// from a row of `to` to the next one
template <int M>
INLINE void store_head(bf16* to, int pitch, uint32_t rows, const float (&d)[M], const float (&factor)[2]) {
    constexpr int CHANNELS = 2 * M;
    constexpr int PIECES = CHANNELS / 8; // how many pieces a row has
    const int lane = threadIdx.x % 32;
    const int first = threadIdx.x / 32 % 4 * 16; // this warp's first row
    __syncwarp();
    UNROLL_FOR (int j = 0; j < M / 8; j++) { // 16 columns at a time
        uint32_t v[4];
        UNROLL_FOR (int i = 0; i < 4; i++) { // factor[1] is the factor of rows 8 - 15
            const float low = d[8 * j + 2 * i] * factor[i % 2];
            const float high = d[8 * j + 2 * i + 1] * factor[i % 2];
            v[i] = pack_bf16(low, high);
        }
        stmatrix(rows + box_place<CHANNELS>(first + lane % 16, 2 * j + lane / 16), v);
    }
    __syncwarp();
    UNROLL_FOR (int i = 0; i < M / 8; i++) {
        const int r = first + (i * 32 + lane) / PIECES;
        const int piece = lane % PIECES;
        const uint32_t from = rows + box_place<CHANNELS>(r, piece);
        store_whole(to + (size_t)r * pitch + 8 * piece, load_shared(from));
    }
}
// Returns the number of this thread's warpgroup. uniform tells the compiler that a whole warp has the same number.
INLINE int this_warpgroup() { return uniform(threadIdx.x / 128); }

// The softmax of a thread's two rows (the second one is 8 rows below the first) over chunks of N scores:
//   P = e^((S - top) / sqrt(d))      sum += rowsum(P)
// FlashAttention raises `top` for each higher score. This is not needed here: P is rounded to bf16, which has fp32's
// range of exponents. So `top` is the highest score of the first chunk. Only when a sum grows beyond 2^60, `top` is
// raised and the sums are rescaled.
// Four neighbouring lanes share a row, and each of them holds two of every 8 columns. s[4 j] and s[4 j + 1] belong to
// the first row, s[4 j + 2] and s[4 j + 3] to the second one.
template <int N> struct Softmax {
    float scale;           // log2(e) / sqrt(d)
    float top[2];          // one value for each of the two rows
    float sum[2] = {0, 0}; // the sum of P over this thread's columns

    INLINE Softmax(const float (&s)[N / 2], float scale) : scale(scale) { highest(top, s); }

    // result = the highest score of each of the two rows
    INLINE static void highest(float (&result)[2], const float (&s)[N / 2]) {
        result[0] = s[0];
        result[1] = s[2];
        UNROLL_FOR (int i = 0; i < N / 2; i++) {
            const int row = i / 2 % 2;
            result[row] = fmaxf(result[row], s[i]);
        }
        UNROLL_FOR (float& v : result) {
            const float over_lanes = lane_max<1, 2>(v);
            v = over_lanes;
        }
    }
    // p = P, as A fragments; P is also added to sum
    INLINE void exponentials(uint32_t (&p)[N / 16][4], const float (&s)[N / 2]) {
        UNROLL_FOR (int j = 0; j < N / 4; j++) {
            const int row = j % 2;
            const float a = exp2_fast((s[2 * j] - top[row]) * scale);
            const float b = exp2_fast((s[2 * j + 1] - top[row]) * scale);
            sum[row] += a + b;
            p[j / 4][j % 4] = pack_bf16(a, b);
        }
    }
    // Computes P of a chunk from its scores s. o holds the sums of P v over the earlier chunks, which are rescaled if
    // `top` is raised.
    template <int M>
    INLINE void add(uint32_t (&p)[N / 16][4], const float (&s)[N / 2], float (&o)[M], bool is_first_chunk) {
        const float before[2] = {sum[0], sum[1]};
        exponentials(p, s);
        if (is_first_chunk || !__any_sync(0xFFFFFFFFu, !(fmaxf(sum[0], sum[1]) < 0x1p60f))) return;
        float new_top[2], shrink[2];
        highest(new_top, s);
        UNROLL_FOR (int r = 0; r < 2; r++) {
            new_top[r] = fmaxf(new_top[r], top[r]);
            shrink[r] = exp2_fast((top[r] - new_top[r]) * scale);
            top[r] = new_top[r];
            sum[r] = before[r] * shrink[r];
        }
        UNROLL_FOR (int i = 0; i < M; i++) {
            o[i] *= shrink[i / 2 % 2];
        }
        exponentials(p, s);
    }
};

// out = softmax(q k^T / sqrt(d)) v. grid (B * heads * T / (64 WARPGROUPS)): a block works on 64 WARPGROUPS queries of
// one head.
// Shared memory: the block's queries; a ring of keys and a ring of values. Each stage holds a chunk of KEYS rows.
//   1. The first thread starts the loads: queries, then as many chunks as there are stages.
//   2. Each warp reads its queries into registers. Each warpgroup computes S of chunk 0.
//   3. In turn i a warpgroup computes the softmax of chunk i. Then it computes two products at the same time: out += P
//      v of chunk i, and the scores of chunk i + 1. After that, with a ring, the first thread loads a chunk to the
//      place of chunk i - 1. If it loaded a chunk to the place of chunk i instead, it would have to wait for the other
//      warpgroup, which may still read chunk i.
//   4. out / sum is stored, and also SoftmaxRow, for the backward pass.
// The compiler overlaps products of wgmma only on two conditions. First, the wait for each product must be in the same
// turn of the loop as the product. Second, between fence and wait no other instruction may touch the product's
// registers. Otherwise no products overlap at all, and ptxas prints a warning (C7510 to C7520).
template <class T>
static __global__ void __launch_bounds__(T::THREADS, T::PER_SM) // T: an AttentionForward
    attention_forward_wgmma_kernel(const __grid_constant__ AttentionTma p) {
#if __CUDA_ARCH__ == 900
    constexpr int DIM = T::DIM;
    constexpr int KEYS = T::KEYS;
    SharedMemory shared(T::BARRIERS);
    Pipeline<T::QUERY_BYTES> queries(shared, T::WARPGROUPS, 0);
    const int readers = T::CHUNKS ? 0 : T::WARPGROUPS;
    Pipeline<T::KEY_BYTES> keys(shared, T::STAGES, readers), values(shared, T::STAGES, readers);
    if (threadIdx.x == 0) {
        prefetch_tensor_map(&p.qkv_rows);
        prefetch_tensor_map(&p.keys);
    }
    ready(queries, keys, values);
    const int warpgroup = T::WARPGROUPS == 1 ? 0 : this_warpgroup();
    const int lane = threadIdx.x % 32;
    const int chunks = T::CHUNKS ? T::CHUNKS : p.T / KEYS;
    const HeadTile tile{p, 64 * T::WARPGROUPS};
    await_previous_kernel();
    // The first thread needs a second position in both rings: the stage that it loads next.
    auto keys_to_load = keys;
    auto values_to_load = values;
    auto load = [&](Stage to, const CUtensorMap* map, int bytes, int part, int row) {
        mbarrier_expect(to.full, bytes);
        tma_load(to.address, map, to.full, part * p.C + tile.h * DIM, row, tile.b);
    };
    auto load_chunk = [&](int i) {
        const Stage key_stage = T::CHUNKS ? keys_to_load.next() : keys_to_load.acquire();
        load(key_stage, &p.keys, T::KEY_BYTES, K_PART, i * KEYS);
        const Stage value_stage = T::CHUNKS ? values_to_load.next() : values_to_load.acquire();
        load(value_stage, &p.keys, T::KEY_BYTES, V_PART, i * KEYS);
    };
    if (threadIdx.x == 0)
        NO_UNROLL_FOR (int i = 0; i < max(T::WARPGROUPS, min(T::STAGES, chunks)); i++) {
            if (i < T::WARPGROUPS) load(queries.stage(i), &p.qkv_rows, T::QUERY_BYTES, Q_PART, tile.row0 + 64 * i);
            if (i < chunks) load_chunk(i);
        }
    __syncwarp();

    uint32_t q[DIM / 16][4]; // this warp's 16 queries, as A fragments
    uint32_t probabilities[KEYS / 16][4];
    const uint32_t own_queries = queries.kept(warpgroup, true);
    const int query = threadIdx.x / 32 % 4 * 16 + lane % 16; // the row whose address this lane gives to ldmatrix
    UNROLL_FOR (int k = 0; k < DIM / 16; k++) {
        ldmatrix(q[k], q[k] + 2, own_queries + box_place<DIM>(query, 2 * k + lane / 16));
    }
    float s[KEYS / 2] = {}; // the scores of a chunk
    float o[DIM / 2] = {};  // the sums of P v
    uint32_t next = keys.arrived();
    accumulators_ready(s);
    multiply_ab<K_MAJOR, 0>(s, q, head_rows<DIM>(next));
    multiplied<0>(s);
    Softmax<KEYS> softmax(s, LOG2E * rsqrtf((float)DIM));
#pragma unroll(T::CHUNKS ? T::CHUNKS : 1)
    for (int i = 0; i < chunks; i++) {
        softmax.add(probabilities, s, o, i == 0);
        const Operand v = head_rows<DIM>(values.arrived());
        if (i + 1 < chunks) next = keys.arrived();
        accumulators_ready(o);
        accumulators_ready(s);
        multiply_ab(o, probabilities, v);
        // With a ring, the last turn computes scores that nobody uses. If a branch skipped them, the compiler would not
        // overlap the products.
        if (!T::CHUNKS || i + 1 < chunks) {
            multiply_ab<K_MAJOR, 0>(s, q, head_rows<DIM>(next));
        }
        multiplied<0>(o, s);
        if (T::CHUNKS) continue;
        keys.release();
        values.release();
        if (threadIdx.x == 0 && i > 0 && i - 1 + T::STAGES < chunks) load_chunk(i - 1 + T::STAGES);
        __syncwarp();
    }
    // Four lanes share a row. Each of them holds a part of the row's sum of P and a part of its out. The first of these
    // lanes stores the row's SoftmaxRow.
    const float total[2] = {lane_sum<1, 2>(softmax.sum[0]), lane_sum<1, 2>(softmax.sum[1])};
    const int row = tile.row0 + 64 * warpgroup;
    bf16* const to = (bf16*)p.to + ((size_t)tile.b * p.T + row) * p.C + tile.h * DIM;
    store_head(to, p.C, own_queries, o, {reciprocal_fast(total[0]), reciprocal_fast(total[1])});
    SoftmaxRow* const rows = p.rows + (size_t)tile.index * p.T + row + threadIdx.x / 32 % 4 * 16 + lane / 4;
    UNROLL_FOR (int r = 0; r < 2; r++)
        if (lane % 4 == 0) rows[8 * r] = SoftmaxRow{softmax.top[r], log2f(total[r])};
#endif
}

// A block of the backward pass. It owns KEYS keys of a head; each of its key_gradients warpgroups owns 64 of them. The
// blocks of a cluster work on one head after the other. For each head, a block does one step for each chunk of 64
// queries. A block works on a chunk WARPGROUPS steps later than the block before it in the cluster.
//
//   warpgroups 0 ... WARPGROUPS - 1   key_gradients(warpgroup): dk and dv of 64 keys
//   the last warpgroup                query_gradients: dq, and -D; its first thread loads keys and chunks
//
//   ring     filled by                                    read by
//   keys     TMA, a head at a time                        all warps
//   chunks   TMA, a chunk at a time                       key_gradients
//   ds       key_gradients: dS^T of a chunk               query_gradients
//   sums     the block before: a chunk's dq so far        query_gradients
//   dots     query_gradients of all blocks: -D            key_gradients
//
// Blocks send `sums` and `dots` to each other. For these two rings, the `full` barriers of the receiving block are used
// and the `empty` barriers of the sending block. A role that both fills a ring and frees its stages needs two positions
// in it. keys_to_load, sums_to_send and dots_to_send hold the positions for filling: they are second Pipeline objects
// that use the same stages and barriers.
template <class T> struct BackwardBlock {
    static constexpr int DIM = T::DIM;
    static constexpr int WARPGROUPS = T::WARPGROUPS;
    typedef uint4 Dots[2][DIM / 16]; // [0]: half a row of dout; [1]: half a row of out

    const AttentionTma& p;
    int blocks = T::ALONE ? 1 : p.T / T::KEYS;             // how many blocks the cluster has
    int cluster_rank = T::ALONE ? 0 : blockIdx.x % blocks; // this block's number in the cluster
    int first_head = blockIdx.x / blocks;                  // this cluster's first head
    int head_stride = gridDim.x / blocks; // the number of clusters: a cluster works on every so many-th head
    int steps = blocks * WARPGROUPS;      // how many steps a head takes
    int lane = threadIdx.x % 32;
    int thread = threadIdx.x % 128; // the number of the thread in its warpgroup
    float scale = rsqrtf((float)DIM);
    SharedMemory shared{T::BARRIERS};
    Pipeline<T::KEYS_BYTES> keys{shared, 2, 4 * WARPGROUPS + 4};
    Pipeline<T::KEYS_BYTES> keys_to_load = keys;
    Pipeline<T::CHUNK_PLACE> chunks{shared, T::CHUNK_STAGES, 0};
    Pipeline<T::DS_BYTES> ds{shared, T::DS_STAGES, 4, 4 * WARPGROUPS};
    Pipeline<T::SUM_BYTES> sums{shared, T::SUM_STAGES, 4};
    Pipeline<T::SUM_BYTES> sums_to_send = sums;
    Pipeline<T::DOT_BYTES> dots{shared, 2, blocks, T::ALONE ? 4 : 1};
    Pipeline<T::DOT_BYTES> dots_to_send = dots;
    int load_head = first_head; // the head and the step of the chunk that is loaded next
    int load_step = 0;

    INLINE explicit BackwardBlock(const AttentionTma& p) : p(p) {}
    INLINE void init() const { // is called by one thread
        prefetch_tensor_map(&p.qkv_rows);
        prefetch_tensor_map(&p.dout_rows);
        init_barriers(keys, chunks, ds, sums, dots);
        for (int i = 0; i < T::SUM_STAGES; i++) mbarrier_expect(sums.stage(i).full, T::SUM_BYTES);
        for (int i = 0; i < 2 && !T::ALONE; i++) mbarrier_expect(dots.stage(i).full, 4 * p.T);
    }
    // Returns the index of the element at which a row of a head begins in a matrix (B, T, parts C).
    INLINE size_t element(int head, int row, int parts) const {
        const size_t pixel = (size_t)(head / p.heads) * p.T + row;
        return pixel * parts * p.C + head % p.heads * DIM;
    }
    // Returns the first query of the chunk of a step. In each step, block r works on the chunk that lies WARPGROUPS
    // chunks before the chunk of block r - 1. (The chunk before the first chunk is the last one.) So block 0 begins
    // with the head's first chunk, and the other blocks begin with some of the head's last chunks.
    INLINE int chunk_row(int step) const {
        const int before = WARPGROUPS * cluster_rank;
        return (step - before + (step < before ? steps : 0)) * 64;
    }

    // Loads k and v of this block's keys for one head.
    INLINE void load_keys(int head) {
        if (head >= p.all_heads) return;
        const Stage to = keys_to_load.acquire();
        const int image = head / p.heads;
        const int c = head % p.heads * DIM;
        mbarrier_expect(to.full, T::KEYS_BYTES);
        for (int i = 0; i < 2 * WARPGROUPS; i++) {
            const int part = K_PART + i / WARPGROUPS;
            const int row = cluster_rank * T::KEYS + i % WARPGROUPS * 64;
            tma_load(to.address + i * T::TILE_BYTES, &p.qkv_rows, to.full, part * p.C + c, row, image);
        }
    }
    // Loads the next chunk into the next stage. Once all stages have been filled, the next stage holds an old chunk:
    // the chunk before the one whose dS has just arrived. Nobody reads this old chunk any more.
    INLINE void load_chunk() {
        if (load_head >= p.all_heads) return;
        const Stage to = chunks.next();
        const int image = load_head / p.heads;
        const int c = load_head % p.heads * DIM;
        const int row = chunk_row(load_step);
        mbarrier_expect(to.full, T::CHUNK_BYTES);
        tma_load(to.address, &p.qkv_rows, to.full, c, row, image);
        tma_load(to.address + T::TILE_BYTES, &p.dout_rows, to.full, c, row, image);
        const SoftmaxRow* const rows = p.rows + (size_t)load_head * p.T + row;
        bulk_load(to.address + 2 * T::TILE_BYTES, rows, T::ROWS_BYTES, to.full);
        load_step++;
        if (load_step == steps) {
            load_step = 0;
            load_head += head_stride;
        }
    }
    // load_dots and send_dots compute -D of 64 queries (a tile); D = rowsum(dout * out). Each block computes -D of its
    // share of a head's queries, and sends it to all blocks of the cluster. Two neighbouring threads work on each row.
    INLINE void load_dots(Dots& d, int head, int tile) const {
        const int row = cluster_rank * T::KEYS + tile * 64 + thread / 2;
        const size_t i = element(head, row, 1) + thread % 2 * (DIM / 2);
        UNROLL_FOR (int k = 0; k < DIM / 16; k++) {
            d[0][k] = load16((const bf16*)p.dout + i + 8 * k);
        }
        UNROLL_FOR (int k = 0; k < DIM / 16; k++) {
            d[1][k] = load16((const bf16*)p.out + i + 8 * k);
        }
    }
    INLINE void send_dots(const Dots& d, int tile) { // four lanes share two rows; each sends both -D to some blocks
        float sum = 0;
        UNROLL_FOR (int k = 0; k < DIM / 16; k++) {
            float x[8], y[8];
            unpack<bf16>(x, d[0][k]);
            unpack<bf16>(y, d[1][k]);
            UNROLL_FOR (int e = 0; e < 8; e++) {
                sum += x[e] * y[e];
            }
        }
        const float own = -lane_sum<1>(sum);
        const float other = __shfl_xor_sync(0xFFFFFFFFu, own, 2);
        const float2 two = lane & 2 ? make_float2(other, own) : make_float2(own, other);
        const int row = cluster_rank * T::KEYS + tile * 64 + thread / 4 * 2;
        if (tile == 0) dots_to_send.acquire();
        // -D lies at the same place in the shared memory of all blocks.
        const auto [stage, full] = dots.stage(dots_to_send.done);
        const uint32_t to = stage + 4 * row;
        if (T::ALONE && lane % 4 == 0) PTX("st.shared.v2.f32 [%0], {%1,%2};", "r"(to), "f"(two.x), "f"(two.y));
        if (T::ALONE) warp_stored(full); // st.async exists only in clusters
        for (int r = threadIdx.x % 4; !T::ALONE && r < blocks; r += 4) {
            store_to_block(at_block(to, r), at_block(full, r), two);
        }
        __syncwarp();
        if (tile + 1 == WARPGROUPS) dots_to_send.hand_over();
    }
    // Waits until other blocks have filled a stage, and returns its address. One thread (`speaks`) then announces to
    // the stage's barrier how many bytes the next round will bring.
    INLINE uint32_t received(auto& pipeline, int bytes, bool speaks) {
        const int i = pipeline.place;
        const uint32_t address = pipeline.arrived();
        if (speaks) mbarrier_expect(pipeline.stage(i).full, bytes);
        __syncwarp();
        return address;
    }

    // Role: the queries' gradients. One warpgroup has this role. Its first thread also starts the loads of keys and
    // chunks. In each step:
    //   1. If another block has begun dq of this chunk: dq = the sum that the block before has sent. Otherwise dq = 0.
    //   2. dq += dS k of this block's keys (dS^T arrives in `ds`). At the same time the next chunk is loaded.
    //   3. If this is the last block for this chunk, dq is stored to global memory. Otherwise it is sent to the next
    //      block.
    // In some of the steps, a part of -D of the next head is also computed.
    INLINE void query_gradients() {
        const int before = (cluster_rank ? cluster_rank : blocks) - 1;
        const int next = cluster_rank + 1 == blocks ? 0 : cluster_rank + 1;
        if (thread == 0)
            NO_UNROLL_FOR (int i = 0; i < T::CHUNK_STAGES - 1; i++) {
                load_chunk();
            }
        __syncwarp();
        NO_UNROLL_FOR (int tile = 0; tile < WARPGROUPS; tile++) {
            Dots dot;
            load_dots(dot, first_head, tile);
            send_dots(dot, tile);
        }
        NO_UNROLL_FOR (int head = first_head; head < p.all_heads; head += head_stride) {
            const uint32_t own_keys = keys.arrived();
            NO_UNROLL_FOR (int i = 0; i < steps; i++) {
                const bool begun = !T::ALONE && i >= WARPGROUPS;       // dq comes from the block before
                const bool ends = T::ALONE || i >= steps - WARPGROUPS; // this block is the chunk's last one
                const int tile = i - max(steps / 2 - 1, 0); // the 64 queries of the next head whose -D is computed
                const bool dots_now = tile >= 0 && tile < WARPGROUPS && head + head_stride < p.all_heads;
                Dots dot = {};
                // Loads for the next head are started before the products, so that nobody has to wait for them.
                if (dots_now) load_dots(dot, head + head_stride, tile);
                if (dots_now && T::ALONE) send_dots(dot, tile); // at once: ALONE has too few registers to keep dot
                float dq[DIM / 2] = {};
                if (begun) {
                    const uint32_t from = received(sums, T::SUM_BYTES, thread == 0) + thread * 16;
                    UNROLL_FOR (int j = 0; j < DIM / 8; j++) {
                        unpack<float>((float(&)[4])dq[4 * j], load_shared(from + j * 2048));
                    }
                }
                const uint32_t buffer = ds.arrived(); // dS^T: a row of 64 queries for each key
                __syncwarp();
                accumulators_ready(dq);
                multiply_atb<T::KEYS / 16>(dq, Operand::rows(uniform(buffer), 8), head_rows<DIM>(uniform(own_keys)));
                if (thread == 0) {
                    load_chunk();
                    if (i == 0) load_keys(head + head_stride);
                }
                __syncwarp();
                multiplied<0>(dq);
                if (begun) {
                    const int stage = sums.hand_over();
                    if (lane == 0) arrive_at_block(at_block(sums.empty(stage), before));
                }
                if (ends) {
                    warps_sync(1 + WARPGROUPS, 128); // all warps have read dS, and store_head writes over it
                    bf16* const to = (bf16*)p.to + element(head, chunk_row(i), 3);
                    store_head(to, 3 * p.C, buffer, dq, {scale, scale});
                    __syncwarp();
                }
                ds.release(lane == 0);
                if (!ends) {
                    const Stage outgoing = sums_to_send.acquire();
                    const uint32_t to = at_block(outgoing.address + thread * 16, next);
                    const uint32_t full = at_block(outgoing.full, next);
                    UNROLL_FOR (int j = 0; j < DIM / 2; j += 4) {
                        store_to_block(to + j * 512, full, (float4&)dq[j]);
                    }
                }
                if (dots_now && !T::ALONE) send_dots(dot, tile);
            }
            // All dS of this head have arrived. So key_gradients has read -D of this head, and the stage of `dots` is
            // free. The blocks that sent -D are told so.
            const int stage = dots.hand_over();
            if (thread < blocks) {
                if (T::ALONE) dots.free(stage);
                else arrive_at_block(at_block(dots.empty(stage), thread));
            }
            keys.release(lane == 0);
        }
    }

    // Role: dk and dv of a warpgroup's 64 keys. Here keys are rows and queries are columns. So P^T and dS^T, which are
    // computed in registers, can be A operands. In each step:
    //   1. dP^T = v dout^T - D. The sum begins with -D.
    //   2. P^T is computed while dP^T is multiplied. Then dv += P^T dout.
    //   3. dS^T = P^T times the result of step 1, element by element. dS^T is also written to `ds`.
    //   4. S^T = k q^T of the next chunk, and dk += dS^T q
    INLINE void key_gradients(int warpgroup) {
        float s[32], dp[32]; // s: S^T, then P^T; dp: dP^T - D, then dS^T. Each is 64 keys x 64 queries.
        float dk[DIM / 2], dv[DIM / 2];
        uint32_t p_fragments[4][4], ds_fragments[4][4];
        auto probability = [&](float s, const float* r) { return exp2_fast((s - r[0]) * (scale * LOG2E) - r[1]); };
        uint32_t own_keys = keys.arrived() + warpgroup * T::TILE_BYTES;
        uint32_t chunk = chunks.arrived();
        clear(s);
        multiply_abt<DIM>(s, head_rows<DIM>(own_keys), head_rows<DIM>(chunk));
        multiplied<0>(s);
        NO_UNROLL_FOR (int head = first_head; head < p.all_heads; head += head_stride) {
            const uint32_t own_values = own_keys + WARPGROUPS * T::TILE_BYTES;
            const uint32_t minus_D = received(dots, 4 * p.T, !T::ALONE && threadIdx.x == 0) + lane % 4 * 8;
            clear(dk);
            clear(dv);
            NO_UNROLL_FOR (int i = 0; i < steps; i++) {
                const Operand q = head_rows<DIM>(chunk);
                const Operand dout = head_rows<DIM>(chunk + T::TILE_BYTES);
                UNROLL_FOR (int j = 0; j < 8; j++) { // this thread has two of every 8 queries
                    const auto [even, odd] = load_shared_2(minus_D + chunk_row(i) * 4 + 32 * j);
                    dp[4 * j] = dp[4 * j + 2] = even;
                    dp[4 * j + 1] = dp[4 * j + 3] = odd;
                }
                accumulators_ready(dp);
                multiply_abt<DIM>(dp, head_rows<DIM>(own_values), dout);
                UNROLL_FOR (int j = 0; j < 8; j++) {
                    float rows[4]; // SoftmaxRow of two queries
                    unpack<float>(rows, load_shared(chunk + 2 * T::TILE_BYTES + lane % 4 * 16 + 64 * j));
                    UNROLL_FOR (int e = 4 * j; e < 4 * j + 4; e++) {
                        s[e] = probability(s[e], rows + e % 2 * 2);
                    }
                }
                UNROLL_FOR (int j = 0; j < 4; j++) {
                    pack_fragment(p_fragments[j], s + 8 * j);
                }
                multiply_ab(dv, p_fragments, dout);
                multiplied<1>(dp);
                const Stage kept = ds.acquire();
                UNROLL_FOR (int j = 0; j < 4; j++) {
                    UNROLL_FOR (int e = 8 * j; e < 8 * j + 8; e++) {
                        dp[e] *= s[e];
                    }
                    pack_fragment(ds_fragments[j], dp + 8 * j);
                    const uint32_t place = box_place<64>(threadIdx.x / 32 * 16 + lane % 16, 2 * j + lane / 16);
                    stmatrix(kept.address + place, ds_fragments[j]);
                }
                warp_stored(kept.full);
                const bool last = i + 1 == steps;                            // this is the head's last step
                const bool none = last && head + head_stride >= p.all_heads; // there is no next chunk
                if (last && !none) own_keys = keys.arrived() + warpgroup * T::TILE_BYTES;
                if (!none) chunk = chunks.arrived();
                clear(s);
                // After the last chunk nobody uses these scores. If a branch skipped them, the compiler would not
                // overlap the products.
                multiply_abt<DIM>(s, head_rows<DIM>(own_keys), head_rows<DIM>(chunk));
                multiply_ab(dk, ds_fragments, q);
                multiplied<0>(dk, dv, s);
            }
            // dk and dv are complete. Before they are stored to global memory, they are written over v in shared
            // memory. After this barrier no warp of this warpgroup reads v any more.
            warps_sync(1 + warpgroup, 128);
            bf16* const to = (bf16*)p.to + element(head, cluster_rank * T::KEYS + warpgroup * 64, 3);
            store_head(to + p.C, 3 * p.C, own_values, dk, {scale, scale});
            store_head(to + 2 * p.C, 3 * p.C, own_values, dv, {1, 1});
            fence_async();
            __syncwarp();
            keys.release(lane == 0);
        }
    }
};

// grid (clusters of T / KEYS blocks). There are as many clusters as can run on the GPU at the same time, but not more
// than there are heads.
template <class T>
static __global__ void __launch_bounds__(T::THREADS, T::PER_SM) // T: an AttentionBackward
    attention_backward_wgmma_kernel(const __grid_constant__ AttentionTma p) {
#if __CUDA_ARCH__ == 900
    BackwardBlock<T> block(p);
    if (threadIdx.x == 0) block.init();
    cluster_sync();
    const int role = block.first_head < p.all_heads ? this_warpgroup() : -1; // -1: this cluster has no head
    // The forward pass wrote the keys, so this load need not wait for the previous kernel.
    if (role == T::WARPGROUPS && block.thread == 0) block.load_keys(block.first_head);
    await_previous_kernel();
    if (role == T::WARPGROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(T::DQ_REGISTERS));
        block.query_gradients();
    } else if (role >= 0) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(T::KEY_REGISTERS));
        block.key_gradients(role);
    }
    cluster_sync(); // no block may end while another one still writes into its shared memory
#endif
}

static AttentionTma attention_tma(const AttentionCall& a, int keys) {
    // Makes a tensor map for boxes of n rows of one head of a matrix (B, T, parts C).
    auto rows = [&](const act* x, int parts, int n) {
        const int channels = parts * a.C;
        return tensor_map(x, {channels, a.T, a.B}, {a.d, n});
    };
    return {a, rows(a.qkv, 3, 64), rows(a.dout, 1, 64), rows(a.qkv, 3, keys)};
}
template <class Tile> static void launch_attention_forward_wgmma(const AttentionCall& a) {
    const int grid = a.all_heads * (a.T / 64 / Tile::WARPGROUPS);
    auto kernel = attention_forward_wgmma_kernel<Tile>;
    launch(kernel, grid, Tile::THREADS, Tile::SHARED_BYTES, attention_tma(a, Tile::KEYS));
}
// Returns how many clusters can run on the GPU at the same time. Each of them works on heads of T rows. The number may
// be 0 if MIG gives the program only a part of a GPU.
template <class Tile> static int attention_clusters(int T) {
    const unsigned blocks = T / Tile::KEYS;
    auto kernel = attention_backward_wgmma_kernel<Tile>;
    cudaLaunchAttribute size{cudaLaunchAttributeClusterDimension, {}, {.clusterDim = {blocks, 1, 1}}};
    const cudaLaunchConfig_t config{dim3(blocks), Tile::THREADS, Tile::SHARED_BYTES, device.queue, &size, 1};
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::SHARED_BYTES));
    int clusters = 0;
    CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
    return clusters;
}
template <class Tile> static void launch_attention_backward_wgmma(const AttentionCall& a) {
    const int cluster = a.T / Tile::KEYS; // how many blocks a cluster has
    const int clusters = std::min(a.all_heads, attention_clusters<Tile>(a.T));
    auto kernel = attention_backward_wgmma_kernel<Tile>;
    const AttentionTma tma = attention_tma(a, 64);
    launch_on(MAIN_STREAM, cluster, kernel, cluster * clusters, Tile::THREADS, Tile::SHARED_BYTES, tma);
}

// =====================================================================================================================
// 20. Convolution
// 1x1 and 3x3 convolutions, computed as products of matrices (implicit GEMM):
//
//   out[pixel, co] = sum over taps and input channels ci of   weight[co, tap, ci] * x[source(pixel, tap), ci]
//
//   weights (Cout, taps x Cin)   times   patches (taps x Cin, pixels)   =   out (Cout, pixels)
//
// Column p of the patches holds the inputs that the filter reads for output pixel p. The patches never exist in global
// memory. A block copies the pixels that it needs to shared memory, with zeros for the padding, and multiplies them
// there.
//
// Words of this section (tile, stage, ring, fragment and swizzle are explained at the head of this file):
//   tap     a position (kh, kw) of the filter, which has 1 or 9 positions; a tap's number is kh * kernel + kw
//   halo    the pixels of a tile and a border of one pixel around them: all that the nine taps read (see the drawing at
//           conv_halo)
//   slice   a part of the input channels (16 to 64 channels; in FP8 128). A stage of shared memory holds one slice of
//           each of its pixels. Hopper's kernels divide the output channels into slices, too, of 64 channels.
//   chunk   8 neighbouring channels of one pixel or weight, which one thread copies together
//   k       the index over which a product sums: input channels here, pixels for weight gradients. An instruction of
//           the tensor cores sums over 16 values of k (in FP8 over 32).
//
// The kernels are listed here. conv_product and conv_weight_batch in section 22 choose between them. A table above
// conv_product shows the whole road from a layer to an instruction of the tensor cores.
//   mma.sync (sm_80 and later)   conv_halo, conv_gather; for weight gradients conv_weight_halo, conv_weight_gather.
//                                Elements are bf16 or floats. A float is split into two fp16 numbers, and a product of
//                                two floats into three products (take_apart_places).
//   wgmma and TMA (Hopper)       conv_tiles, conv_small; for weight gradients conv_weight_tma. Elements are bf16, or
//                                FP8 in a 3x3 convolution or its input gradient. The stride is 1, and the input is not
//                                upsampled.
//   conv_few                     turns the network's first and last layers into 1x1 convolutions for these kernels
//
// An input's gradient is computed by the same kernels, with the template parameter BACKWARD. It is a convolution, too:
// its input is dout, Cout and Cin change places, and the taps have the reverse order. The weights stay in memory as
// they are, (Cout, taps, Cin): ldmatrix.trans or wgmma transposes them on their way to the tensor cores. (In FP8 there
// is another copy of the weights, and no BACKWARD.)
//
// All kernels end in a similar way. Bias, embedding, and the residual or addends are added to the fp32 sums of a tile.
// Then the result is rounded, once. Before a tile is written to global memory, it is written to shared memory: there
// its values are put into the order pixels x channels. The statistics for the next group norm are sums of the rounded
// values, because the norm will read the rounded values.

// ---------------------------------------------------------------------------------------------------------------------
// --- ConvOut: results, 4 channels of a pixel at a time
// A ConvOut holds the addresses that results are written to, and all that is added to results. Channels [0, Cout1)
// are written to part1, and the next Cout2 channels to part2. (There are two parts if the results are the gradients of
// two concatenated inputs.) In the forward pass the addend is the residual. In the backward pass bias, emb and stats
// are null.
struct ConvOut {
    Grad part1, part2 = {};
    int Cout1, Cout2 = 0;
    int B;                       // images
    const float* bias = nullptr; // (Cout1)
    const float* emb = nullptr;  // (B, Cout1), in rows of emb_stride: the embedding, added to all pixels of an image
    int emb_stride = 0;
    double* stats = nullptr; // sums and sums of squares of the stored values: for each image, one part for each tile
    int* parts = nullptr;    // on the host: the launch writes here how many parts the statistics of an image have
    ConvSkip skip = {};      // a skip connection that the same kernel computes and adds, instead of an addend
};

// The arguments of each function that launches a kernel for a convolution. If BACKWARD, the input is dout: then Cin1
// is the layer's Cout, and Cout is the layer's number of input channels.
struct ConvCall {
    ConvShape s;
    int B = 0, H = 0, W = 0;     // images, rows and columns of the output
    int Cin1 = 0, Cin2 = 0;      // channels of the inputs x1 and x2 (x2: 1x1 only)
    int Cout = 0;                // channels of the output
    const act* x1 = nullptr;     // (s.B, s.H, s.W, Cin1)
    const act* x2 = nullptr;     // (s.B, s.H, s.W, Cin2)
    const act* weight = nullptr; // the layer's weights: (s.Cout, taps, s.C1 + s.C2)
    ConvOut out = {};
    // conv_halo and conv_gather set these before they launch their kernels:
    int tiles_h = 1, tiles_w = 0; // tiles of an image, down and across
    int channel_blocks = 0;       // thread blocks among which the output channels are divided
    int slices = 0;               // slices of the Cin1 channels
    int taps = 0;                 // conv_gather: taps of the filter
    int source_pixels = 0;        // conv_gather: pixels of an image of the input
    // (Cout), used only if s.in is FP8 or FP8_GRADIENT (then weight is FP8). The sums of channel c are multiplied by
    // factors[c].
    const float* factors = nullptr;
};

// What one thread needs for storing channels c .. c + 3 of image n.
template <class T> struct OutputLane {
    int pitch;            // channels of a pixel in the tensor that is written (part1 or part2)
    int count;            // 4, or less if the tensor has fewer channels after c; 0: nothing is stored
    T* out;               // the address that channel c of pixel 0 is written to
    const T *add1, *add2; // the same place in the addends, or null
    float shift[4];       // bias + embedding, which is added to all pixels

    INLINE OutputLane(const ConvOut& o, int c, int n) {
        const bool second = c >= o.Cout1;
        const Grad& part = second ? o.part2 : o.part1;
        if (second) c -= o.Cout1;
        pitch = second ? o.Cout2 : o.Cout1;
        count = part.dx && n < o.B ? max(0, min(4, pitch - c)) : 0;
        out = (T*)part.dx + c;
        add1 = part.add1 ? (const T*)part.add1 + c : nullptr;
        add2 = part.add2 ? (const T*)part.add2 + c : nullptr;
        UNROLL_FOR (int k = 0; k < 4; k++) {
            shift[k] = o.bias && k < count ? o.bias[c + k] : 0;
            if (o.emb && k < count) shift[k] += o.emb[(size_t)n * o.emb_stride + c + k];
        }
    }
};

// How the work of a block is divided among its warps, in conv_halo and conv_gather. A block computes one tile: CHANNELS
// output channels for pixels of IMAGES images. A warp computes 64 pixels x WARP_CHANNELS channels. So a set of
// PIXEL_WARPS x (CHANNELS / WARP_CHANNELS) warps covers the tile. Small images have too few pixels for many warps.
// For them a block has K_GROUPS such sets. Each set (a K group) sums over its own part of the input channels, and the
// sums of all sets are added at the end.
//
//   warp of a block = pixel_warp + PIXEL_WARPS * (channel_warp + CHANNELS / WARP_CHANNELS * k_group)
template <int IMAGES_, int PIXEL_WARPS_, int CHANNELS_, int WARP_CHANNELS_, int K_GROUPS_> struct ProductTile {
    static constexpr int IMAGES = IMAGES_, PIXEL_WARPS = PIXEL_WARPS_, K_GROUPS = K_GROUPS_;
    static constexpr int CHANNELS = CHANNELS_, WARP_CHANNELS = WARP_CHANNELS_;
    static constexpr int POSITIONS = PIXEL_WARPS * (CHANNELS / WARP_CHANNELS); // warps of a K group
    static constexpr int THREADS = POSITIONS * K_GROUPS * 32;
    // How results are stored. LANES lanes of a warp store one pixel, 4 channels each. So a warp stores STEP pixels at
    // once. A pixel has PITCH floats in shared memory. 4 of them are unused, which avoids bank conflicts.
    static constexpr int LANES = WARP_CHANNELS / 4;
    static constexpr int STEP = 32 / LANES;
    static constexpr int PITCH = WARP_CHANNELS + 4;
    static constexpr int STAGED_BYTES = POSITIONS * K_GROUPS * 64 * PITCH * 4;
    static constexpr int STAT_ROWS = PIXEL_WARPS / IMAGES * K_GROUPS * STEP; // threads that sum one channel of an image
    // These functions return which part of the tile a warp computes.
    static constexpr int pixel_warp(int warp) { return warp % PIXEL_WARPS; }
    static constexpr int channel_warp(int warp) { return warp / PIXEL_WARPS % (CHANNELS / WARP_CHANNELS); }
    static constexpr int k_group(int warp) { return warp / POSITIONS; }
};

// Stores what a lane has to store in one round of store_product: 4 channels of N pixels. The lane's pixel i becomes
// pixel index_of(i) of the output. If index_of(i) is -1, pixel i is not stored.
//   staged        the address in shared memory of the first K group's fp32 sums of the lane's first pixel; the sums of
//                 K group g lie g * k_group_floats floats further on
//   addends       the values of l.add1 at these pixels; they were loaded much earlier, to hide the latency
//   sum, square   the stored (rounded) values and their squares are added to these, for the statistics
// An addend may be the output itself, so the compiler cannot move a load to a place before a store. Therefore all loads
// of a batch stand before the batch's first store.
template <class Tile, bool BACKWARD, class T, int N>
INLINE void store_pixels(float4& sum, float4& square, const float* staged, int k_group_floats, const OutputLane<T>& l,
                         bool stats, const Four<T> (&addends)[N], auto index_of) {
    constexpr int AT_MOST = N % 8 ? 4 : 8;
    constexpr int BATCH = N < AT_MOST ? N : AT_MOST;     // pixels whose loads are started together
    constexpr int NEXT_PIXEL = Tile::STEP * Tile::PITCH; // floats from a pixel of the lane to the lane's next pixel
    static_assert(N % BATCH == 0, "all batches have the same number of pixels");
    if (l.count == 0) return;

    // This is the network's output: the number of its channels is not a multiple of 4, and there are no addends.
    if (std::is_same_v<T, float> && l.pitch % 4) {
        for (int i = 0; i < N; i++)
            UNROLL_FOR (int k = 0; k < 4; k++) {
                float v = l.shift[k];
                for (int g = 0; g < Tile::K_GROUPS; g++) v += staged[g * k_group_floats + i * NEXT_PIXEL + k];
                if (k < l.count && index_of(i) >= 0) l.out[(size_t)index_of(i) * l.pitch + k] = (T)v;
            }
        return;
    }

    UNROLL_FOR (int first = 0; first < N; first += BATCH) {
        float4 v[BATCH]; // v[k] belongs to pixel first + k: the sums of all K groups + bias + embedding
        UNROLL_FOR (int k = 0; k < BATCH; k++) {
            v[k] = *(const float4*)(staged + (first + k) * NEXT_PIXEL);
            UNROLL_FOR (int g = 1; g < Tile::K_GROUPS; g++) {
                v[k] = v[k] + *(const float4*)(staged + g * k_group_floats + (first + k) * NEXT_PIXEL);
            }
            if (!BACKWARD) v[k] = v[k] + (const float4&)l.shift;
        }
        if (l.add1) // one branch for all pixels: the compiler does not group stores that stand in different branches
            UNROLL_FOR (int k = 0; k < BATCH; k++)
                if (index_of(first + k) >= 0) v[k] = v[k] + to_floats<T>(addends[first + k]);
        if (BACKWARD && l.add2)
            UNROLL_FOR (int k = 0; k < BATCH; k++)
                if (index_of(first + k) >= 0) v[k] = v[k] + load4(l.add2 + (size_t)index_of(first + k) * l.pitch);
        UNROLL_FOR (int k = 0; k < BATCH; k++) // from here on, v is the stored (rounded) value
            v[k] = index_of(first + k) >= 0 ? store4(l.out + (size_t)index_of(first + k) * l.pitch, v[k]) : float4{};
        if (!BACKWARD && stats)
            UNROLL_FOR (int k = 0; k < BATCH; k++) {
                sum = sum + v[k];
                square = square + v[k] * v[k];
            }
    }
}

// Computes the block's sums for the statistics. For each image and channel, STAT_ROWS threads have each summed some of
// the pixels. The threads have written their sums to shared memory, as (IMAGES, STAT_ROWS, CHANNELS, 2). This function
// adds up these sums in double, and writes the totals to o.stats.
template <class Tile>
INLINE void store_tile_stats(const float* shared, const ConvOut& o, int n0, int c0, int tile, int tiles) {
    constexpr int CHANNELS = Tile::CHANNELS;
    constexpr int ROWS = Tile::STAT_ROWS;
    for (int i = threadIdx.x; i < Tile::IMAGES * CHANNELS * 2; i += Tile::THREADS) {
        const int image = i / (CHANNELS * 2);
        const int n = n0 + image;
        const int c = c0 + i / 2 % CHANNELS;
        if (n >= o.B || c >= o.Cout1) continue;
        double total = 0;
        for (int r = 0; r < ROWS; r++) total += shared[(image * ROWS + r) * CHANNELS * 2 + i % (CHANNELS * 2)];
        o.stats[(((size_t)n * tiles + tile) * o.Cout1 + c) * 2 + i % 2] = total;
    }
}

// The end of conv_halo and conv_gather: stores the sums acc[8 pixels][16 channels] of each warp. A thread's registers
// of a fragment hold neighbouring pixels of one channel, but neighbouring channels are to be stored together. So the
// sums are written to shared memory and read again, in ROUNDS rounds. In each round the sums of the K groups are added.
//
//   acc of a thread: 2 pixels x channels c, c + 8    ->    staged: 64 / ROUNDS pixels    ->    a lane stores 4 channels
//   (g = lane / 4: c = g, pixels 2q, 2q + 1)               of PITCH floats each                of every STEP-th pixel
//
//   n0, c0        the tile's first image and first channel
//   tile, tiles   the number of the tile within its image, and how many tiles an image has; each tile writes a part of
//                 the statistics
//   pixel         pixel(k) returns the index in the output of the k-th of the warp's 64 pixels, or -1 if the pixel
//                 lies outside
template <class Tile, class TO, int ROUNDS, bool BACKWARD, int M>
INLINE void store_product(const float (&acc)[8][M][4], unsigned char* shared, const ConvOut& o, int n0, int c0,
                          int tile, int tiles, auto pixel) {
    constexpr int ROUND_PIXELS = 64 / ROUNDS;                                    // pixels of a warp in a round
    constexpr int N = ROUND_PIXELS / Tile::K_GROUPS / Tile::STEP;                // how many of them a lane stores
    constexpr int WARP_FLOATS = ROUND_PIXELS * Tile::PITCH;                      // a warp's part of shared memory
    constexpr int K_GROUP_FLOATS = Tile::POSITIONS * ROUND_PIXELS * Tile::PITCH; // a K group's part of shared memory
    constexpr int IMAGE_WARPS = Tile::PIXEL_WARPS / Tile::IMAGES;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int pixel_warp = Tile::pixel_warp(warp);
    const int k_group = Tile::k_group(warp);
    const int image = pixel_warp / IMAGE_WARPS;

    // In each round this lane stores channels channel .. channel + 3 of the tile, for the N pixels first, first + STEP,
    // ... of the round. The pixels of a round are divided among the K groups.
    const int row = lane / Tile::LANES;
    const int first = k_group * (N * Tile::STEP) + row;
    const int lane_channel = lane % Tile::LANES * 4;
    const int channel = Tile::channel_warp(warp) * Tile::WARP_CHANNELS + lane_channel;
    OutputLane<TO> l(o, c0 + channel, n0 + image);
    if (row >= Tile::STEP) l.count = 0; // if LANES does not divide 32, some lanes have no work

    float* const staged = (float*)shared + warp % Tile::POSITIONS * WARP_FLOATS;
    float4 sum = {};
    float4 square = {};
    copies_arrived<0>();
    __syncthreads(); // all threads have read the operands; now the sums are written to the same memory
    UNROLL_FOR (int round = 0; round < ROUNDS; round++) {
        auto index_of = [&](int i) { return pixel(round * ROUND_PIXELS + first + i * Tile::STEP); };
        Four<TO> addends[N];
        if (l.count && l.add1)
            UNROLL_FOR (int i = 0; i < N; i++)
                if (index_of(i) >= 0) addends[i] = *(const Four<TO>*)(l.add1 + (size_t)index_of(i) * l.pitch);

        // In a fragment, d[0] and d[1] are channel g of pixels 2q and 2q + 1, and d[2] and d[3] are channel g + 8 of
        // the same pixels (g = lane / 4, q = lane % 4).
        if (round) __syncthreads();
        float* const fragments = staged + k_group * K_GROUP_FLOATS + lane % 4 * 2 * Tile::PITCH + lane / 4;
        UNROLL_FOR (int r = 0; r < 8 / ROUNDS; r++)
            UNROLL_FOR (int m = 0; m < M; m++) {
                const float* d = acc[round * (8 / ROUNDS) + r][m];
                float* const place = fragments + r * 8 * Tile::PITCH + m * 16;
                place[0] = d[0];
                place[Tile::PITCH] = d[1];
                place[8] = d[2];
                place[Tile::PITCH + 8] = d[3];
            }
        if (Tile::K_GROUPS > 1) __syncthreads();
        else __syncwarp();
        store_pixels<Tile, BACKWARD>(sum, square, staged + first * Tile::PITCH + lane_channel, K_GROUP_FLOATS, l,
                                     o.stats, addends, index_of);
    }
    if (!o.stats) return;
    __syncthreads(); // all threads have read what was staged; now the threads' sums are written to the same memory
    if (row < Tile::STEP) {
        const int stat_row = (pixel_warp % IMAGE_WARPS * Tile::K_GROUPS + k_group) * Tile::STEP + row;
        const int pair = (image * Tile::STAT_ROWS + stat_row) * Tile::CHANNELS + channel;
        float4* const pairs = (float4*)shared + pair / 2;
        pairs[0] = make_float4(sum.x, square.x, sum.y, square.y);
        pairs[1] = make_float4(sum.z, square.z, sum.w, square.w);
    }
    __syncthreads();
    store_tile_stats<Tile>((const float*)shared, o, n0, c0, tile, tiles);
}

// ---------------------------------------------------------------------------------------------------------------------
// --- operands of the portable kernels: bf16, or floats as two fp16 parts
// conv_halo, conv_gather, conv_weight_halo and conv_weight_gather multiply with mma.sync. The same code serves bf16 and
// floats. Most differences between the types lie in the code below, in `multiply`, multiply_tap and copy_channels.
//
//                               bf16         float
//   a chunk of 8 channels       16 bytes     32 bytes: first two pieces of 4 floats, as they are copied; later a piece
//   in shared memory                         with 8 high parts and a piece with 8 low parts (take_apart_places)
//   registers of a fragment A   4            8: first the registers of the high parts, then those of the low parts
//   registers of a fragment B   2            4: in the same order
//   take_apart_copies           nothing      turns floats into high and low parts, all scaled by a power of two
//   multiply                    one mma      three: low x high', high x low', high x high'
template <class T> using FragmentA = uint32_t[4 * PARTS<T>]; // 16 rows x 16 k
template <class T> using FragmentB = uint32_t[2 * PARTS<T>]; // 16 k x 8 columns

// Returns where a chunk lies in a swizzled row of shared memory, in bytes from the row's beginning. key: the
// swizzle_key of the row.
template <class T> INLINE uint32_t chunk_place(int chunk, int key) { return (chunk * PARTS<T> ^ key) << 4; }

// Returns the place that lies `channels` channels after `place` in the same row. XOR finds it, whatever the key is: the
// place of a chunk is chunk ^ key, and (chunk ^ key) ^ step = (chunk ^ step) ^ key. Two conditions must hold. The row
// begins at a multiple of its length or of 128 bytes. And `channels` only sets bits that are 0 in the chunk of `place`.
template <class T> INLINE uint32_t channels_on(uint32_t place, int channels) {
    return place ^ channels * (int)sizeof(T);
}

// Loads a fragment A by ldmatrix, which loads four matrices of 8 x 8. place: the address of the row that this lane
// gives to ldmatrix. If TRANSPOSED, a row in shared memory holds neighbours along the fragment's rows instead of
// neighbours along k, and ldmatrix transposes each matrix.
template <class T, bool TRANSPOSED> INLINE void load_fragment(FragmentA<T>& a, uint32_t place, int offset = 0) {
    UNROLL_FOR (int part = 0; part < PARTS<T>; part++) {
        const uint32_t from = (place ^ part * 16) + offset;
        uint32_t* const registers = a + 4 * part;
        if (TRANSPOSED) ldmatrix_trans(registers, registers + 2, from);
        else ldmatrix(registers, registers + 2, from);
    }
}
// Loads two fragments B at once: two of the four matrices of an ldmatrix make one fragment B.
template <class T, bool TRANSPOSED>
INLINE void load_fragments(FragmentB<T>& b0, FragmentB<T>& b1, uint32_t place, int offset = 0) {
    UNROLL_FOR (int part = 0; part < PARTS<T>; part++) {
        const uint32_t from = (place ^ part * 16) + offset;
        if (TRANSPOSED) ldmatrix_trans(b0 + 2 * part, b1 + 2 * part, from);
        else ldmatrix(b0 + 2 * part, b1 + 2 * part, from);
    }
}

// Splits the floats of operands A and B that this thread has copied to shared memory (for bf16 it does nothing).
// each_a(f) and each_b(f) call f(address) for each chunk of A and of B that this thread has copied. All threads of the
// block's WARPS warps must call this function, because it contains a barrier. The function sets a_scale and b_scale to
// the factors that undo the scales. If a_is_new is false, A was split earlier, and a_scale stays as it is.
template <class T, int WARPS, class A, class B>
INLINE void take_apart_copies(float& a_scale, A each_a, float& b_scale, B each_b, bool a_is_new = true) {
    if constexpr (PARTS<T> == 2) {
        __shared__ uint32_t tops[2][WARPS]; // the largest magnitude that each warp has found, in A and in B
        if (a_is_new) find_top(tops[0], each_a);
        find_top(tops[1], each_b);
        __syncthreads();
        if (a_is_new) a_scale = take_apart_places(tops[0], each_a);
        b_scale = take_apart_places(tops[1], each_b);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// --- conv_halo: 3x3, stride 1, any GPU
// Used when: the type is fp32, or Hopper's kernels (below) do not take this shape. It also reads its input through a
//   nearest-neighbour upsampling.
// How: A block computes 16 x 16 pixels of one image, or 8 x 8 pixels of each of two images, for CHANNELS channels. It
//   goes through the input channels slice by slice. Per slice it copies the tile's pixels with a border of one pixel
//   (the halo) to shared memory, once for all nine taps.
//
//     a halo, for a warp of 8 x 8 pixels
//       column 0 1 2 ...    9
//     row 0    . . . . . . . . . .    .  the border: a neighbour's pixels, or zeros outside the image
//     row 1    . x x x x x x x x .    x  pixels of the output tile
//      ...     . x x x x x x x x .
//     row 8    . x x x x x x x x .    tap (kh, kw) reads rows kh .. kh + 7 and columns kw .. kw + 7
//     row 9    . . . . . . . . . .
//
//     shared memory: two halos (a pixel is a row of SLICE channels), a ring of weights, one number for each pixel
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
//   A warp computes 8 x 8 pixels x WARP_CHANNELS channels as products weights (A) x pixels (B): 8 neighbouring pixels
//   of an image row and 16 input channels are one fragment B, of two registers. In a step the warp loads the 10 rows of
//   the halo that its pixels need under this kw. It uses most of these rows for all three taps of the step. (If pixels
//   were A, one fragment would hold two image rows, and each kh would need other pairs of rows.)
//   In the code, the instructions that copy stand between the products and have no branches. So the tensor cores do not
//   wait for them.
//   A pixel's row in shared memory is swizzled with a key that depends only on the pixel's COLUMN in the halo. So any 8
//   neighbouring pixels of an image row can be read without bank conflicts, whatever kw is. And the distance in bytes
//   from a pixel to the pixel below it is always the same.
//   From the top down: conv_halo launches conv_halo_kernel. The kernel's main loop calls multiply_step for each step.
//   multiply_step calls multiply_tap for each tap and 16 output channels. multiply_tap has eight mma_bf16, one for each
//   image row (or 24 mma_fp16, three for each image row).
// Costs: a tile of 16 x 16 pixels reads (18 / 16)^2 times as many pixels as it has, once for all nine taps.
//   It reads all weights of its output channels.

// If IMAGES is 1, a K group is 2 x 2 warps, each with 8 x 8 pixels of the tile. If IMAGES is 2, a K group has one warp
// for each of two images. Every warp computes all CHANNELS. PER_SM blocks fit on a multiprocessor.
template <class T_, int IMAGES_, int CHANNELS_, int K_GROUPS_, int PER_SM_>
struct HaloTile : ProductTile<IMAGES_, IMAGES_ == 1 ? 4 : 2, CHANNELS_, CHANNELS_, K_GROUPS_> {
    typedef ProductTile<IMAGES_, IMAGES_ == 1 ? 4 : 2, CHANNELS_, CHANNELS_, K_GROUPS_> Base;
    typedef T_ T;
    static constexpr int IMAGES = IMAGES_;
    static constexpr int CHANNELS = CHANNELS_;
    static constexpr int PER_SM = PER_SM_;
    static constexpr int WARPS_DOWN = IMAGES == 1 ? 2 : 1; // warps of an image, one below the other
    static constexpr int WARPS_ACROSS = WARPS_DOWN;
    static constexpr int TILE_H = WARPS_DOWN * 8; // pixels
    static constexpr int TILE_W = WARPS_ACROSS * 8;
    // A slice is 64 bytes of a pixel. It has more bytes if a K group would otherwise have fewer than 16 channels.
    static constexpr int PIXEL_BYTES = std::max(64, 16 * (int)sizeof(T) * K_GROUPS_);
    static constexpr int SLICE = PIXEL_BYTES / sizeof(T);
    static constexpr int K16 = SLICE / 16 / K_GROUPS_; // a K group has 16 * K16 input channels of a slice
    // The halo.
    static constexpr int H = TILE_H + 2;
    static constexpr int W = TILE_W + 2;
    static constexpr int PIXELS = IMAGES * H * W;
    // Shared memory.
    static constexpr int HALO_BYTES = PIXELS * PIXEL_BYTES;
    static constexpr int WEIGHT_BYTES = 3 * CHANNELS * PIXEL_BYTES; // bytes of the weights of the three taps of one kw
    static constexpr int WEIGHTS_AT = 2 * HALO_BYTES;
    static constexpr int SOURCES_AT = WEIGHTS_AT + 3 * WEIGHT_BYTES;
    static constexpr int MAIN_BYTES = SOURCES_AT + (PIXELS + 64) * 4; // the last copies read sources beyond PIXELS
    // At the end the results are written to the same memory, in two rounds if it is too small for all of them.
    static constexpr int ROUNDS = Base::STAGED_BYTES > MAIN_BYTES ? 2 : 1;
    static constexpr int SHARED_BYTES = std::max(MAIN_BYTES, Base::STAGED_BYTES / ROUNDS);
    static_assert(HALO_BYTES % 128 == 0 && WEIGHT_BYTES % 128 == 0, "swizzled rows begin at multiples of 128 bytes");
    static_assert(SHARED_BYTES <= RTX_30.shared_per_block, "the least that a GPU of sm_80 or later has");
    static_assert(IMAGES * Base::STAT_ROWS * CHANNELS * 8 <= SHARED_BYTES, "the statistics are summed there at last");
};

// Returns where a pixel of the halo lies in the input, and how its row in shared memory is swizzled. One number holds
// both: the pixel's index * 8 + the swizzle key of its column. The number is negative if the pixel lies outside the
// image. h is the pixel's row in the image, and w0 is the image column of the halo's column 0.
template <class Tile> INLINE int halo_source(const ConvCall& p, int n, int h, int w0, int column) {
    const int w = w0 + column;
    const int up = p.s.upsample; // 1: the input has half of the output's rows and columns
    const int index = (n * (p.H >> up) + (h >> up)) * (p.W >> up) + (w >> up);
    const bool inside = n < p.B && h >= 0 && h < p.H && w >= 0 && w < p.W;
    return (inside ? index << 3 : (int)0x80000000) | swizzle_key<Tile::PIXEL_BYTES / 16>(column);
}

// The halos in shared memory, and the part of the halos that one thread copies: the same chunk of every
// PIXELS_AT_ONCE-th pixel.
template <class Tile> struct HaloCopies {
    typedef typename Tile::T T;
    static constexpr int CHUNKS = Tile::SLICE / 8;                // chunks of a pixel
    static constexpr int PIXELS_AT_ONCE = Tile::THREADS / CHUNKS; // pixels that all threads copy at a time
    static constexpr int HALF_COPIES = ceil_div(Tile::PIXELS / 2, PIXELS_AT_ONCE); // copies of a thread for half a halo
    const ConvCall& p;
    const uint32_t halos;
    int* const sources; // the halo_source of each pixel
    const int chunk = (int)threadIdx.x % CHUNKS;
    const int first_pixel = (int)threadIdx.x / CHUNKS;

    INLINE HaloCopies(const ConvCall& p, unsigned char* shared)
        : p(p), halos(shared_address(shared)), sources((int*)(shared + Tile::SOURCES_AT)) {}

    // Sets `sources`: where the pixels of the halo lie in the input, for the tile at (n0, h0, w0). The caller has to
    // call __syncthreads before the first copy.
    INLINE void find_sources(int n0, int h0, int w0) const {
        for (int i = threadIdx.x; i < Tile::PIXELS; i += Tile::THREADS) {
            const int n = n0 + i / Tile::W / Tile::H;
            const int h = h0 + i / Tile::W % Tile::H - 1;
            sources[i] = halo_source<Tile>(p, n, h, w0 - 1, i % Tile::W);
        }
    }
    // Returns the address in shared memory that copy i of this thread is written to, i < 2 HALF_COPIES.
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
    // Returns the place in a halo, in bytes, of the row that this lane gives to ldmatrix. ldmatrix loads two fragments
    // B: 8 neighbouring pixels of image row r, and the 8 pixels below them. row_begin: the index of the pixel in column
    // 0 of row r. The matrices are (row r, k 0-7), (r, k 8-15), (r + 1, k 0-7), (r + 1, k 8-15).
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
    // For take_apart_copies: returns a function that calls f(address) for each chunk that this thread copies.
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
//   BACKWARD   weight is (Cin1, taps, Cout), where Cin1 and Cout are those of ConvCall: the channels of dout and of the
//              input's gradient. The taps are in reverse order. A row is an input channel of the slice; its chunks are
//              the block's output channels.
template <class Tile, bool BACKWARD> struct HaloWeights {
    typedef typename Tile::T T;
    static constexpr int ROWS = BACKWARD ? Tile::SLICE : Tile::CHANNELS;
    static constexpr int CHUNKS = (BACKWARD ? Tile::CHANNELS : Tile::SLICE) / 8;
    static constexpr int ROW_BYTES = CHUNKS * 8 * sizeof(T);
    static constexpr int TAP_BYTES = ROWS * ROW_BYTES;
    static constexpr int ROWS_AT_ONCE = Tile::THREADS / CHUNKS;     // rows that all threads copy at a time
    static constexpr int TAP_COPIES = ceil_div(ROWS, ROWS_AT_ONCE); // copies of a thread for one tap
    static constexpr int COPIES = 3 * TAP_COPIES;
    static constexpr bool NO_THREAD_LEFT_OVER = Tile::THREADS % CHUNKS == 0 && ROWS % ROWS_AT_ONCE == 0;
    const ConvCall& p;
    const int c0; // the block's first output channel
    const int chunk = (int)threadIdx.x % CHUNKS;
    const int first_row = (int)threadIdx.x / CHUNKS;
    const uint32_t first_place; // the address that this thread's first copy is written to
    const int first_weight;     // the index in p.weight of the first weight that this thread copies

    INLINE HaloWeights(const ConvCall& p, uint32_t ring, int c0)
        : p(p),
          c0(c0),
          first_place(ring + first_row * ROW_BYTES + chunk_place<T>(chunk, key(first_row))),
          first_weight(BACKWARD //
                           ? first_row * 9 * p.Cout + c0 + chunk * 8
                           : (c0 + first_row) * 9 * p.Cin1 + chunk * 8) {}
    static INLINE int key(int row) { return swizzle_key<ROW_BYTES / 16>(row); }

    // Copy i < COPIES of a thread is row `first_row + row(i)` of tap kh(i).
    static constexpr int kh(int i) { return i / TAP_COPIES; }
    static constexpr int row(int i) { return i % TAP_COPIES * ROWS_AT_ONCE; }
    INLINE bool owns(int i) const {
        return NO_THREAD_LEFT_OVER || (first_row < ROWS_AT_ONCE && row(i) + first_row < ROWS);
    }
    INLINE uint32_t place(int kw, int i) const {
        // If the block copies a multiple of 8 rows at once, all rows of a thread have the same key.
        const bool same_key = ROWS_AT_ONCE % 8 == 0;
        const uint32_t toggled = same_key ? 0 : (key(first_row) ^ key(row(i) + first_row)) << 4;
        return (first_place ^ toggled) + kw * Tile::WEIGHT_BYTES + kh(i) * TAP_BYTES + row(i) * ROW_BYTES;
    }
    INLINE void copy(int slice, int kw, int i) const {
        const int k0 = slice * Tile::SLICE;
        const int place_of_tap = kh(i) * 3 + kw;
        const int tap = BACKWARD ? 8 - place_of_tap : place_of_tap;
        const int k = k0 + (BACKWARD ? row(i) + first_row : chunk * 8); // input channel
        const int c = c0 + (BACKWARD ? chunk * 8 : row(i) + first_row); // output channel
        const bool valid = k < p.Cin1 && c < p.Cout;                    // if false, the copy writes zeros
        int C = BACKWARD ? p.Cout : p.Cin1;                             // channels of a tap in global memory
        asm volatile("" : "+r"(C)); // otherwise the compiler would keep many multiples of C in registers
        const int further = BACKWARD ? ((k0 + row(i)) * 9 + tap) * C : (row(i) * 9 + tap) * C + k0;
        const T* const weight = (const T*)p.weight;
        const uint32_t index = valid ? first_weight + further : 0;
        copy_channels(place(kw, i), 0, weight + index, valid, owns(i));
    }
    // Returns the place in a tap's weights, in bytes, of the row that this lane gives to ldmatrix. The matrices of a
    // fragment are (channels 0-7, k 0-7), (8-15, 0-7), (0-7, 8-15), (8-15, 8-15).
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
    // Loads one fragment: the weights of tap (kh, kw), for 16 output channels from m * 16 on, and for 16 input channels
    // from k * 16 on of the K group's part. lane: the address of this lane's row, if kw, kh, m and k are 0.
    static INLINE void load(FragmentA<T>& a, uint32_t lane, int kw, int kh, int m, int k) {
        const int tap = kw * Tile::WEIGHT_BYTES + kh * TAP_BYTES;
        if (!BACKWARD) {
            load_fragment<T, false>(a, channels_on<T>(lane, 16 * k), tap + m * 16 * ROW_BYTES);
            return;
        }
        // Goes m * 16 channels further on in the same row. 16 channels are two chunks. If a row has 2 or 6 chunks, the
        // swizzle moves nothing out of its pair of chunks, so the bytes of m * 16 channels can simply be added. If the
        // number of chunks is a multiple of 4, whole multiples of 128 bytes are added, and the remaining bytes are
        // XORed, as in channels_on.
        const int channel_bytes = m * 16 * sizeof(T);
        uint32_t columns;
        if (CHUNKS % 4) columns = lane + channel_bytes;
        else columns = (lane ^ channel_bytes % 128) + channel_bytes / 128 * 128;
        load_fragment<T, true>(a, columns, tap + k * 16 * ROW_BYTES);
    }
    // For take_apart_copies: returns a function that calls f(address) for each chunk that this thread copies.
    INLINE auto places(int kw) const {
        return [this, kw](auto f) {
            UNROLL_FOR (int i = 0; i < COPIES; i++)
                if (owns(i)) f(place(kw, i));
        };
    }
};

// acc[r][m] += a (weights of tap kh) x b[r + kh] (pixels), for the warp's image rows r = 0 .. 7.
// With floats, the tensor cores sum over all three taps, and fp32 units add this sum to acc (see `multiply`). So the
// calls must have kh = 0, 1, 2 in this order.
template <class T, int M>
INLINE void multiply_tap(float (&acc)[8][M][4], float (&sum)[8][4], int m, int kh, const FragmentA<T>& a,
                         const FragmentB<T> (&b)[10], float scale) {
    if constexpr (PARTS<T> == 1) {
        UNROLL_FOR (int r = 0; r < 8; r++) {
            mma<T>(acc[r][m], a, b[r + kh]);
        }
    } else
        UNROLL_FOR (int first = 0; first < 8; first += 4) { // four sums take turns, as in `multiply`
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

// Computes a step: a warp's products of the weights of one kw with a slice. Between the products the function calls
// copy_in_gap(0), copy_in_gap(1) and so on. x, weights: the addresses of this lane's rows for ldmatrix.
template <class Tile, bool BACKWARD, int M, class Copy>
INLINE void multiply_step(float (&acc)[8][M][4], uint32_t x, uint32_t weights, int kw, float scale, Copy copy_in_gap) {
    typedef typename Tile::T T;
    typedef HaloWeights<Tile, BACKWARD> Weights;
    // Product i has tap kh_of(i) and the 16 output channels m_of(i). With bf16, the loop over output channels is the
    // inner one. With floats, the loop over taps is the inner one, because the three taps are summed before the sum is
    // added to acc.
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
//   2. Each slice has three steps: wait for the operands, then multiply and copy for later steps at the same time.
//   3. store_product: sums become results.
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

    // The warp's pixels within the tile, and the first channel of its part of a slice. Then the addresses of this
    // lane's rows for ldmatrix.
    constexpr int M = Tile::WARP_CHANNELS / 16;
    const int warp = (int)threadIdx.x >> 5;
    const int pixel_warp = Tile::pixel_warp(warp);
    const int image = pixel_warp / (Tile::WARPS_DOWN * Tile::WARPS_ACROSS);
    const int warp_h = pixel_warp / Tile::WARPS_ACROSS % Tile::WARPS_DOWN * 8;
    const int warp_w = pixel_warp % Tile::WARPS_ACROSS * 8;
    const int first_k = Tile::k_group(warp) * Tile::K16 * 16;
    uint32_t lane_pixels[3]; // for each kw
    UNROLL_FOR (int kw = 0; kw < 3; kw++)
        lane_pixels[kw] = base + Copies::lane_place((image * Tile::H + warp_h) * Tile::W, warp_w + kw, first_k);
    const uint32_t lane_weights = base + Tile::WEIGHTS_AT + Weights::lane_place(first_k);

    float acc[8][M][4] = {}; // acc[r][m]: the sums of 16 output channels x 8 pixels of image row r
    float pixel_scale = 1, weight_scale = 1;
    for (int slice = 0; slice < p.slices; slice++) {
        UNROLL_FOR (int kw = 0; kw < 3; kw++) {
            copies_arrived<1>();
            take_apart_copies<T, Tile::THREADS / 32>(pixel_scale, halo.places(slice), weight_scale, weights.places(kw),
                                                     kw == 0);
            __syncthreads(); // the copies of all threads for this step have arrived; all have finished the step before

            // A step has GAPS gaps between its products. In these gaps it copies the weights of the step after the next
            // one, and half of the next slice's halo.
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
    auto output_pixel = [&](int k) { // index of the warp's k-th pixel in the output; -1: outside
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
// --- conv_gather: any kernel size and stride, any GPU
// Used when: conv_halo and Hopper's kernels can't be used: for 1x1, and for stride 2.
// How: A block computes PIXELS neighbouring pixels of one image (counted row by row) for CHANNELS channels. It goes
//   through all taps, and for each tap through the input channels slice by slice. A step is one slice under one tap.
//   For a step the block copies (cp.async) the input pixels that its output pixels read under this tap, wherever these
//   lie in the image. It also copies the tap's weights for this slice:
//
//     a stage of shared memory; STAGES of them are a ring
//     +------------------------+----------------------+
//     | PIXELS rows            | weights of the tap   |    A slice is 128 bytes of a pixel: 64 channels of bf16, or 32
//     | of 128 bytes           | x CHANNELS x slice   |    of floats. A second input's slices come after the first's.
//     +------------------------+----------------------+
//
//   A warp computes 64 of the pixels x WARP_CHANNELS of the channels. For each 16 k it loads M fragments of weights (A)
//   and 8 fragments of pixels (B). `multiply` has one mma_bf16 (or three mma_fp16) for each pair of A and B.
// Costs: the input is read once for every tap. After the first time it usually comes from the L2 cache.

// The offset of a tap: output pixel (h, w) reads the input's pixel (h * stride + dy, w * stride + dx).
// BACKWARD reverses this: input pixel (h, w) is read by the output pixel (y, x) with (y, x) * stride =
// (h + dy, w + dx), if there is such an output pixel.
struct TapOffset {
    int dy, dx;
};
template <bool BACKWARD> INLINE TapOffset tap_offset(const ConvShape& s, int tap) {
    const int dy = tap / s.kernel - s.kernel / 2;
    const int dx = tap % s.kernel - s.kernel / 2;
    if (BACKWARD) return {-dy, -dx};
    return {dy, dx};
}
// To compute the result's pixel that comes i pixels after (h, w), counted row by row, a kernel reads one pixel of its
// input under this tap. Returns the index of that input pixel within its image, or -1 if there is none (for example,
// because it lies in the padding). The function multiplies by W_inverse instead of dividing by W. The result is exact,
// since the numbers are small.
template <bool BACKWARD>
INLINE int source_pixel(const ConvShape& s, float W_inverse, int h, int w, int i, TapOffset offset) {
    const int rows_down = (int)((w + i + 0.5f) * W_inverse);
    h += rows_down;
    w += i - rows_down * (BACKWARD ? s.W : s.out_W());
    const int y = (BACKWARD ? h : h * s.stride) + offset.dy;
    const int x = (BACKWARD ? w : w * s.stride) + offset.dx;
    // BACKWARD with stride 2: there is an output pixel only if y and x are even. It is (y / 2, x / 2).
    const int odd = s.stride - 1;
    const int halve = BACKWARD ? odd : 0;
    const int rows = BACKWARD ? s.out_H() : s.H;
    const int columns = BACKWARD ? s.out_W() : s.W;
    const bool inside = y >= 0 && x >= 0 && y < rows << halve && x < columns << halve;
    const bool is_pixel = inside && !(BACKWARD && (y | x) & odd);
    return is_pixel ? (y >> halve) * columns + (x >> halve) : -1;
}

// For take_apart_copies: returns a function that calls f(address) for N addresses, which are `PITCH` bytes apart.
template <int N, int PITCH> INLINE auto places(uint32_t first) {
    return [=](auto f) {
        UNROLL_FOR (int i = 0; i < N; i++) f(first + i * PITCH);
    };
}

template <class T_, int PIXEL_WARPS_, int CHANNELS_, int WARP_CHANNELS_, int STAGES_>
struct GatherTile : ProductTile<1, PIXEL_WARPS_, CHANNELS_, WARP_CHANNELS_, 1> {
    typedef T_ T;
    static constexpr int PIXELS = PIXEL_WARPS_ * 64;
    static constexpr int STAGES = STAGES_;
    static constexpr int PIXEL_BYTES = 128;               // bytes of a pixel in shared memory
    static constexpr int SLICE = PIXEL_BYTES / sizeof(T); // channels of a slice
    static constexpr int WEIGHTS_AT = PIXELS * PIXEL_BYTES;
    static constexpr int STAGE_BYTES = WEIGHTS_AT + CHANNELS_ * PIXEL_BYTES;
    // How many blocks shall fit on a multiprocessor. The compiler limits the registers of a thread accordingly.
    static constexpr int PER_SM_OF_64_CHANNELS = (PARTS<T> == 1 ? 6 : 4) / PIXEL_WARPS_;
    static constexpr int PER_SM = CHANNELS_ == 128 ? 2 : PER_SM_OF_64_CHANNELS;
};

// The weights of a stage, arranged as in HaloWeights. Forward: a row is an output channel, and its chunks are the
// channels of the slice. BACKWARD: a row is an input channel of the slice, and its chunks are the block's output
// channels.
template <class Tile, bool BACKWARD> struct GatherWeights {
    typedef typename Tile::T T;
    static constexpr int ROWS = BACKWARD ? Tile::SLICE : Tile::CHANNELS;
    static constexpr int ROW_BYTES = BACKWARD ? Tile::CHANNELS * sizeof(T) : Tile::PIXEL_BYTES;
    static constexpr int CHUNKS = ROW_BYTES / sizeof(T) / 8;
    static constexpr int ROWS_AT_ONCE = Tile::THREADS / CHUNKS; // rows that all threads copy at a time
    static constexpr int COPIES = ROWS / ROWS_AT_ONCE;          // copies of a thread
    static_assert(ROWS_AT_ONCE % 8 == 0, "all rows of a thread have the same swizzle key");

    // Copies this thread's rows of a stage; the first of these rows is written to place + stage. k0: the slice's first
    // channel, counted within its input, which has C channels. weight_k0: the same channel, counted over both inputs,
    // as in the weights.
    static INLINE void copy(const ConvCall& p, uint32_t place, uint32_t stage, int c0, int tap, int k0, int weight_k0,
                            int C) {
        const int chunk = (int)threadIdx.x % CHUNKS;
        const int row = (int)threadIdx.x / CHUNKS;
        const T* const weight = (const T*)p.weight;
        UNROLL_FOR (int i = 0; i < COPIES; i++) {
            const int r = row + i * ROWS_AT_ONCE;
            const int c = c0 + (BACKWARD ? chunk * 8 : r); // output channel
            const int k = BACKWARD ? r : chunk * 8;        // input channel, in the slice
            const bool valid = c < p.Cout && k0 + k < C;   // if false, the copy writes zeros
            const uint32_t index = BACKWARD ? ((weight_k0 + k) * p.taps + tap) * p.Cout + c
                                            : (c * p.taps + tap) * (p.Cin1 + p.Cin2) + weight_k0 + k;
            const int offset = stage + i * ROWS_AT_ONCE * ROW_BYTES;
            copy_channels(place, offset, weight + (valid ? index : 0), valid);
        }
    }
    // Returns the place in a stage's weights, in bytes, of the row that this lane gives to ldmatrix, for the fragment
    // of the warp's first 16 channels and the first 16 k. The fragment's matrices are (channels 0-7, k 0-7), (8-15,
    // 0-7), (0-7, 8-15), (8-15, 8-15).
    static INLINE uint32_t lane_place(int first_channel) {
        const int lane = threadIdx.x & 31;
        const int row_of_matrix = lane & 7;
        const int upper_c = lane >> 3 & 1;
        const int upper_k = lane >> 4;
        if (BACKWARD) {
            const int k = upper_k * 8 + row_of_matrix;
            return k * ROW_BYTES + chunk_place<T>(first_channel / 8 + upper_c, row_of_matrix);
        }
        const int c = first_channel + upper_c * 8 + row_of_matrix;
        return c * ROW_BYTES + chunk_place<T>(upper_k, row_of_matrix);
    }
    // Loads the fragment of the warp's m-th 16 output channels and the slice's k-th 16 input channels.
    static INLINE void load(FragmentA<T>& a, uint32_t lane, int m, int k) {
        if (BACKWARD) load_fragment<T, true>(a, channels_on<T>(lane, 16 * m), k * 16 * ROW_BYTES);
        else load_fragment<T, false>(a, channels_on<T>(lane, 16 * k), m * 16 * ROW_BYTES);
    }
};

// A block computes PIXELS pixels x CHANNELS channels. A warp computes 64 of these pixels x WARP_CHANNELS channels.
// Phases:
//   1. The copies for the first STAGES - 1 steps are started.
//   2. For each step: wait for its operands, start the copies for a later step, multiply.
//   3. store_product: sums become results.
template <class Tile, bool BACKWARD>
static __global__ void __launch_bounds__(Tile::THREADS, Tile::PER_SM) conv_gather_kernel(const ConvCall p) {
    typedef typename Tile::T T;
    typedef GatherWeights<Tile, BACKWARD> Weights;
    constexpr int PIXELS = Tile::PIXELS;
    constexpr int STAGES = Tile::STAGES;
    constexpr int SLICE = Tile::SLICE;
    constexpr int PIXEL_BYTES = Tile::PIXEL_BYTES;
    extern __shared__ __align__(128) unsigned char shared[];
    const uint32_t base = shared_address(shared);
    const int tid = threadIdx.x;

    // The block's tile: channels from c0 on, pixels from tile * PIXELS on, of image n.
    const int c0 = blockIdx.x % p.channel_blocks * Tile::CHANNELS;
    const int tile = blockIdx.x / p.channel_blocks % p.tiles_w;
    const int n = blockIdx.x / p.channel_blocks / p.tiles_w;
    const int slices1 = ceil_div(p.Cin1, SLICE);
    const int slices = slices1 + ceil_div(p.Cin2, SLICE);
    const int steps = slices * p.taps;

    // A thread copies the same chunk of every PIXELS_AT_ONCE-th pixel, and of every ROWS_AT_ONCE-th row of weights.
    // Both are multiples of 8. So all pixels, and all rows of weights, that a thread copies have the same swizzle key.
    constexpr int CHUNKS = SLICE / 8;
    constexpr int PIXELS_AT_ONCE = Tile::THREADS / CHUNKS;
    constexpr int COPIES = PIXELS / PIXELS_AT_ONCE;
    const int chunk = tid % CHUNKS;
    const int row = tid / CHUNKS;
    const int w_chunk = tid % Weights::CHUNKS;
    const int w_row = tid / Weights::CHUNKS;
    const uint32_t own_pixels = base + row * PIXEL_BYTES + chunk_place<T>(chunk, row & 7);
    const uint32_t own_weights =
        base + Tile::WEIGHTS_AT + w_row * Weights::ROW_BYTES + chunk_place<T>(w_chunk, w_row & 7);
    const bool direct = p.taps == 1 && p.s.stride == 1; // each output pixel reads the input pixel with the same index

    int source[COPIES]; // the pixels that this thread copies for this tap, as indices within the image; -1: zeros
    int tap = -1;
    int slice = 0;
    auto start_tap = [&] {
        tap++;
        const TapOffset offset = tap_offset<BACKWARD>(p.s, tap);
        const int h0 = tile * PIXELS / p.W;
        const int w0 = tile * PIXELS - h0 * p.W;
        UNROLL_FOR (int i = 0; i < COPIES; i++) {
            const int k = row + i * PIXELS_AT_ONCE; // pixel of the tile
            const int pixel = tile * PIXELS + k;    // pixel of the image
            source[i] = direct ? pixel : source_pixel<BACKWARD>(p.s, 1.0f / p.W, h0, w0, k, offset);
            if (pixel >= p.H * p.W) source[i] = -1;
        }
    };
    auto copy_step = [&](int step) { // called for 0, 1, 2, ...
        const uint32_t stage = (uint32_t)step % STAGES * Tile::STAGE_BYTES;
        if (slice == 0) start_tap();
        const bool second = slice >= slices1;                      // a slice of the second input
        const int k0 = (second ? slice - slices1 : slice) * SLICE; // the slice's first channel in its input
        const int weight_k0 = (second ? p.Cin1 : 0) + k0;          // the same channel in the weights
        const int C = second ? p.Cin2 : p.Cin1;

        const int c = k0 + chunk * 8;
        const bool chunk_inside = c < C;
        const T* const input = (const T*)(second ? p.x2 : p.x1);
        const T* const x = input + (chunk_inside ? c : 0);
        UNROLL_FOR (int i = 0; i < COPIES; i++) {
            const bool valid = chunk_inside && source[i] >= 0; // if false, the copy writes zeros
            const uint32_t pixel = valid ? n * p.source_pixels + source[i] : 0;
            copy_channels(own_pixels, stage + i * PIXELS_AT_ONCE * PIXEL_BYTES, pixel_of(x, pixel, C), valid);
        }
        Weights::copy(p, own_weights, stage, c0, tap, k0, weight_k0, C);
        if (++slice == slices) slice = 0;
    };
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps) copy_step(step);
        copies_committed();
    }

    // lane_pixels and lane_weights are the addresses in stage 0 of the rows that this lane gives to ldmatrix. Of pixels
    // it loads two fragments at once: (pixels 0-7, k 0-7), (0-7, 8-15), (8-15, 0-7), (8-15, 8-15).
    const int lane = tid & 31;
    const int warp = tid >> 5;
    const int pixel_warp = Tile::pixel_warp(warp);
    const int row_of_matrix = lane & 7;
    const int upper_k = lane >> 3 & 1;
    const int next_8 = lane >> 4;
    const int lane_pixel = pixel_warp * 64 + next_8 * 8 + row_of_matrix;
    uint32_t lane_pixels = base + lane_pixel * PIXEL_BYTES + chunk_place<T>(upper_k, row_of_matrix);
    const int first_channel = Tile::channel_warp(warp) * Tile::WARP_CHANNELS;
    uint32_t lane_weights = base + Tile::WEIGHTS_AT + Weights::lane_place(first_channel);
    // Without this line the compiler would compute lane_pixels and lane_weights again in every step.
    asm volatile("" : "+r"(lane_pixels), "+r"(lane_weights));

    constexpr int M = Tile::WARP_CHANNELS / 16;
    float acc[8][M][4] = {}; // acc[r][m]: the sums of pixels 8r .. 8r + 7 x channels 16m .. 16m + 15 of the warp
    float pixel_scale = 1, weight_scale = 1;
    for (int step = 0; step < steps; step++) {
        copies_arrived<STAGES - 2>();
        const uint32_t stage = (uint32_t)step % STAGES * Tile::STAGE_BYTES;
        take_apart_copies<T, Tile::THREADS / 32>(
            pixel_scale, places<COPIES, PIXELS_AT_ONCE * PIXEL_BYTES>(own_pixels + stage), weight_scale,
            places<Weights::COPIES, Weights::ROWS_AT_ONCE * Weights::ROW_BYTES>(own_weights + stage));
        __syncthreads(); // the copies of all threads for this step have arrived; all have finished the step before
        if (step + STAGES - 1 < steps) copy_step(step + STAGES - 1);
        copies_committed();
        UNROLL_FOR (int k = 0; k < SLICE / 16; k++) {
            FragmentA<T> a[M];
            FragmentB<T> b[8];
            UNROLL_FOR (int r = 0; r < 8; r += 2)
                load_fragments<T, false>(b[r], b[r + 1], channels_on<T>(lane_pixels + stage, 16 * k),
                                         r * 8 * PIXEL_BYTES);
            UNROLL_FOR (int m = 0; m < M; m++) Weights::load(a[m], lane_weights + stage, m, k);
            multiply<T, M, 8>(acc[0], 1, M, a, b, pixel_scale * weight_scale);
        }
    }

    // The sums are stored in two rounds if shared memory is too small for all of them.
    constexpr int ROUNDS = Tile::STAGED_BYTES > STAGES * Tile::STAGE_BYTES ? 2 : 1;
    auto output_pixel = [&](int k) { // index of the warp's k-th pixel in the output; -1: outside
        const int pixel = tile * PIXELS + pixel_warp * 64 + k;
        return pixel < p.H * p.W ? n * p.H * p.W + pixel : -1;
    };
    store_product<Tile, T, ROUNDS, BACKWARD>(acc, shared, p.out, n, c0, tile, p.tiles_w, output_pixel);
}

// A tile lies within one image, so that all its pixels have the same embedding and belong to the same statistics.
template <class Tile, bool BACKWARD> static void conv_gather(const ConvCall& c) {
    ConvCall p = c;
    p.tiles_w = ceil_div(p.H * p.W, Tile::PIXELS);
    p.channel_blocks = ceil_div(p.Cout, Tile::CHANNELS);
    p.source_pixels = BACKWARD ? p.s.out_H() * p.s.out_W() : p.s.H * p.s.W;
    p.taps = p.s.kernel * p.s.kernel;
    if (p.out.parts) *p.out.parts = p.tiles_w;
    launch_behind(conv_gather_kernel<Tile, BACKWARD>, p.B * p.tiles_w * p.channel_blocks, Tile::THREADS,
                  Tile::STAGES * Tile::STAGE_BYTES, p);
}

// ---------------------------------------------------------------------------------------------------------------------
// --- conv_few: the first and the last layer
// Used when: the convolution is 3x3 with stride 1, and its input or its output has only a few channels (F), which are
//   fp32 (conv_is_few): images, predictions, and their gradients.
// How: The F channels of a pixel are too few for a slice. So for each pixel a row is written that holds the 9 F values
//   under the filter's taps: rows (B, H, W, R), with R a multiple of 32. Then a 1x1 convolution remains:
//     first layer, forward             weights (C, 9 F) x rows of the input
//     last layer's input gradient      transposed weights (C, 9 F) x rows of the output's gradient
//     weight gradients of both         rows^T x the tensor of C channels
//   A bf16 has 8 bits of mantissa, and an fp32 value has more. So a value v becomes two bf16 numbers: upper = bf16(v)
//   and lower = bf16(v - upper). Their sum differs from v by a relative error of 2^-17 at most, which is less than that
//   of the result's rounding. A row of weights holds the same weights twice, once for each half of a pixel's row.
//
//     a row of a pixel, R values     bf16:  | 9 F upper parts, 0 ... | 9 F lower parts, 0 ... |
//                                    fp32:  | 9 F values, 0 ... |
//     value tap * F + f is channel f of the pixel under the tap; 0 outside the image
// Costs: the rows are written and read. For unet64 these are as many bytes as those of a tensor of 64 channels.

struct ConvFew {
    const float* x;     // (B, H, W, F)
    const void* weight; // first layer: (C, 9, F); last layer: (F, 9, C); or null
    void* rows;         // (B, H, W, R)
    void* weight_rows;  // (C, R)
    int B, H, W;
    int F;              // the number of channels of the first layer's input, or of the last layer's output
    int C;              // the number of channels of the layer's other side
    int R;              // the number of values of a row
    int parts;          // the number of parts that a value is split into: 1 (no split), or 2 in bf16
    bool is_last_layer; // true: the network's last layer; false: its first
    // The results of the product for a weight gradient. First layer: product (C, R). Last: product (R, C), bias (R).
    float *product, *bias;
    float *dweight, *dbias; // the gradients, as conv_few_gradient writes them
};

// Returns the index, in the layer's own weights, of weight k = tap * F + f of channel c. The last layer's rows are made
// from the gradient of its output, so the last layer's taps are counted from the end.
INLINE size_t few_weight_at(const ConvFew& p, int c, int k) {
    if (!p.is_last_layer) return (size_t)c * 9 * p.F + k;
    const size_t f = k % p.F;
    const size_t tap = k / p.F;
    return (f * 9 + 8 - tap) * p.C + c;
}

// Writes the rows of all pixels and, if there are weights, the rows of the weights. A thread writes V values of a row,
// for many pixels. If values have two parts, the thread writes the upper parts of the V values and their lower parts.
//   threadIdx.x   which V values of a half of the row (of the whole row, if values have one part)
//   threadIdx.y   which of the pixels that the block writes at once
template <class T> static __global__ void conv_few_rows(const ConvFew p) {
    constexpr int V = VEC<T>;
    const int first = threadIdx.x * V;
    const int part_width = p.R / p.parts;
    int tap[V];      // the tap of each of the V values; if it is 9 or more, 0 is written
    int distance[V]; // how many floats of x lie between the pixel's own first value and the value under the tap
    int t = first / p.F;
    int f = first % p.F;
    UNROLL_FOR (int j = 0; j < V; j++) {
        const int down = t / 3 - 1;
        tap[j] = t;
        distance[j] = (down * p.W + t % 3 - 1) * p.F + f;
        if (++f == p.F) {
            f = 0;
            t++;
        }
    }
    await_previous_kernel();
    for (int pixel = blockIdx.x * blockDim.y + threadIdx.y; pixel < p.B * p.H * p.W; pixel += gridDim.x * blockDim.y) {
        const uint32_t W = p.W;
        const uint32_t H = p.H;
        const uint32_t line = pixel / W;
        const uint32_t h = line % H;
        const uint32_t w = pixel - line * W;
        // `inside` holds one bit for each tap: 1 if the tap lies inside the image. columns: the three bits of one row
        // of the filter.
        const uint32_t columns = (w > 0) + 2 + 4 * (w + 1 < W);
        const uint32_t upper_row = h > 0 ? columns : 0;
        const uint32_t upper_and_middle = upper_row + (columns << 3);
        const uint32_t inside = upper_and_middle + (h + 1 < H ? columns << 6 : 0);
        float v[V];
        UNROLL_FOR (int j = 0; j < V; j++) {
            v[j] = inside >> tap[j] & 1 ? p.x[(uint32_t)pixel * p.F + distance[j]] : 0;
        }
        T* const row = (T*)p.rows + (size_t)pixel * p.R + first;
        *(uint4*)row = pack<T>(v);
        if constexpr (ElementOf<T>::FEW_PARTS == 2) {
            UNROLL_FOR (int j = 0; j < V; j++) v[j] -= (float)(T)v[j];
            *(uint4*)(row + part_width) = pack<T>(v);
        }
    }
    if (!p.weight) return;
    const int threads = gridDim.x * blockDim.x * blockDim.y;
    const int thread = (blockIdx.x * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    for (int i = thread; i < p.C * p.R; i += threads) {
        const int k = i % part_width;
        ((T*)p.weight_rows)[i] = k < 9 * p.F ? ((const T*)p.weight)[few_weight_at(p, i / p.R, k)] : (T)0.0f;
    }
}

// Makes the weight gradient from the product, by adding the results of the upper and of the lower parts. A thread
// computes the gradient of weight k of channel c. Neighbouring threads read neighbouring elements of the product.
static __global__ void conv_few_gradient(const ConvFew p) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const int K = 9 * p.F;
    const int c = p.is_last_layer ? i % p.C : i / K;
    const int k = p.is_last_layer ? i / p.C : i % K;
    const int part_width = p.R / 2; // the distance in a row between an upper part and its lower part
    await_previous_kernel();
    if (p.is_last_layer && i < p.F) {
        const float* const sum = p.bias + 4 * p.F + i; // tap 4 is the pixel itself
        p.dbias[i] = p.parts == 2 ? sum[0] + sum[part_width] : sum[0];
    }
    if (i >= p.C * K) return;
    const float* const sum = p.is_last_layer ? p.product + (size_t)k * p.C + c : p.product + (size_t)c * p.R + k;
    float gradient = sum[0];
    if (p.parts == 2) gradient += sum[p.is_last_layer ? (size_t)part_width * p.C : part_width];
    p.dweight[few_weight_at(p, c, k)] = gradient;
}

static bool conv_is_first(const ConvShape& s) { return (s.in != act_element && !is_fp8(s.in)) || s.C1 % 32; }
static bool conv_is_last(const ConvShape& s) { return s.out != act_element || s.Cout % 32; }
static bool conv_is_few(const ConvShape& s) { return conv_is_first(s) || conv_is_last(s); }

// Sets all members of a ConvFew except its inputs and gradients. The rows lie at the beginning of `memory`. After them
// lie either the rows of the weights, or the product and the bias.
static ConvFew plan_few(const ConvShape& s, char* memory) {
    if (s.kernel != 3 || s.stride != 1 || s.upsample || s.C2)
        die("a convolution of %d to %d channels must be 3x3, stride 1, of one input", s.C1, s.Cout);
    ConvFew p = {};
    p.B = s.B;
    p.H = s.H;
    p.W = s.W;
    p.is_last_layer = conv_is_last(s);
    p.F = p.is_last_layer ? s.Cout : s.C1;
    p.C = p.is_last_layer ? s.C1 : s.Cout;
    p.parts = with_act([]<class T>(T) { return ElementOf<T>::FEW_PARTS; });
    p.R = round_up(p.parts * 9 * p.F, 32);
    p.rows = memory;
    p.weight_rows = memory + (size_t)p.B * p.H * p.W * p.R * act_bytes();
    p.product = (float*)p.weight_rows; // at the address of weight_rows, since no call needs both
    p.bias = p.product + (size_t)p.C * p.R;
    return p;
}
// Returns the 1x1 convolution that replaces the layer. The rows are the input of this 1x1 convolution or, for the
// weight gradient of the last layer, its output.
static ConvShape few_shape(const ConvShape& s, bool weight_gradient = false) {
    const ConvFew p = plan_few(s, nullptr);
    const bool to_rows = p.is_last_layer && weight_gradient;
    const int Cin = to_rows ? p.C : p.R;
    const int Cout = to_rows ? p.R : p.C;
    return ConvShape{p.B, p.H, p.W, Cin, 0, Cout, 1, 1, 0};
}
static size_t few_bytes(const ConvShape& s) {
    const ConvFew p = plan_few(s, nullptr);
    const size_t floats = (size_t)(p.bias - (float*)nullptr) + p.R;
    return floats * sizeof(float) / 256 * 256 + 256;
}
// Writes the rows of x, and those of the weights if there are any.
static ConvFew make_few_rows(const ConvShape& s, const act* x, const act* weight, char* memory,
                             Stream* stream = MAIN_STREAM) {
    ConvFew p = plan_few(s, memory);
    p.x = (const float*)x;
    p.weight = weight;
    const int pieces = p.R / p.parts / act_vec(); // 16-byte pieces of one part of a row; a thread writes one piece
    const int pixels = std::max(1, 256 / pieces); // how many pixels a block writes at once
    const int blocks = std::min(ceil_div(p.B * p.H * p.W, pixels), 5 * gpu.sms); // at most 5 for each multiprocessor
    auto* const kernel = with_act([]<class T>(T) { return conv_few_rows<T>; });
    launch_on(stream, 1, kernel, blocks, dim3(pieces, pixels), 0, p);
    // The next kernel loads its weights before it waits for the end of the previous kernel. But this kernel writes
    // these weights. So the next kernel must not overlap this one.
    stream->joined |= weight != nullptr;
    return p;
}

// ---------------------------------------------------------------------------------------------------------------------
// --- conv_weight_halo, conv_weight_gather: weight gradients, any GPU
// dweight[co, tap, ci] = sum over the output's pixels p of dout[p, co] * x[source(p, tap), ci]
//
// Used when: conv_weight_tma (below) can't be used for the shape. conv_weight_halo: 3x3 with stride 1;
//   conv_weight_gather: everything else.
// How: This is a product of matrices that sums over many pixels and whose result is small. A block owns a tile of 64 x
//   64 weights (output x input channels), of one tap or of all nine. It also owns a RANGE of the pixels, and goes
//   through this range in pixel tiles of 64 pixels. The 64 x 64 weights of a tap are divided among four warps, 32 x 32
//   each: 2 x 4 fragments of mma.
//
//     dout (pixels, 64 co) ^T      x (pixels, 64 ci)         partial sums of 64 x 64 weights
//     +----+----+----+             +----+----+----+          range 0   range 1   range 2
//     | a range of    |     x      | the same     |    ->    [     ] + [     ] + [     ]  -> dweight (conv_weight_sum)
//     | pixel tiles   |            | pixel tiles  |
//     +----+----+----+             +----+----+----+
//
//   If there is more than one range, the blocks write partial sums to the workspace, and conv_weight_sum adds them up
//   in a fixed order. The bias gradient is the sum of dout over all pixels. It is computed as dout^T times a matrix of
//   ones. Of all warps that read the same part of dout, only one computes this product. There is one partial of the
//   bias for each pair of a range and an image that have common pixels. Small layers share a launch (WeightBatch).
// Costs: x and dout are read once for every tile of 64 x 64 weights; the partials are written and read once.

// The arguments of the kernels for a layer's weight gradient. In the code "split" is the number of a range.
struct ConvWeight : WeightWork {
    float4* partial; // (splits, tiles, taps, 1024): fragments in the order of weight_place
    // (splits + B, Cout). Row s + n: the sum of dout over the pixels that are both in range s and in image n. Two pairs
    // (s, n) that contain pixels never share a row: in the order of the pixels, s and n never decrease, and at least
    // one of them grows from one pair to the next. So s + n grows, too.
    float* bias_partial;
    int bias_images;        // B; or 1 if all images are treated as one (conv_weight_tma, if demb is not needed)
    int taps;               // taps of the filter
    int tiles1;             // tiles of 64 channels of x1
    int channel_tiles;      // tiles of 64 channels of x1 and x2
    int tiles;              // tiles of 64 x 64 weights: channel_tiles x co_tiles
    int tiles_h, tiles_w;   // pixel tiles of an image, down and across
    int pixel_tiles;        // pixel tiles of all images
    int splits;             // ranges of pixel tiles
    int warpgroups;         // warpgroups of a block of conv_weight_tma
    int block_co, block_ci; // how many tiles of output channels and of input channels a block owns
    int co_tiles;           // tiles of 64 channels of Cout
    int input_groups;       // groups of block_ci tiles of Cin
};

// Layers are collected until their weight gradients together take this many cycles (25 us). Then conv_weight_batch
// computes them together. (The portable kernels need six times as many cycles, see conv_weight_load.)
constexpr double WEIGHT_LAUNCH_CYCLES = 44000;
// A launch of conv_weight_tma may write at most this many partial sums of 16 KB (64 x 64 weights). The number is enough
// for the 132 blocks of an H200, if each of them writes nine tiles of 64 x 64 weights.
constexpr int MAX_WEIGHT_PARTIALS = 1200;

constexpr int WEIGHT_BATCH = 8;          // how many layers' weight gradients one launch computes at most
template <class Work> struct WorkBlock { // a block's work, and its number among that work's blocks
    const Work& work;
    int block;
};
// What one launch computes: the weight gradients of n layers. work[i] describes the i-th of these layers. The blocks
// from first_block[i] to first_block[i + 1] - 1 compute work[i]. All blocks from first_block[n - 1] on compute the last
// layer.
template <class Work, int WORKS = WEIGHT_BATCH> struct WeightBatch {
    Work work[WORKS];
    int first_block[WORKS], n;
    INLINE WorkBlock<Work> work_of_this_block() const {
        int i = 0;
        while (WORKS > 1 && i + 1 < n && (int)blockIdx.x >= first_block[i + 1]) i++;
        return {work[i], (int)blockIdx.x - first_block[i]};
    }
};

// Returns the first pixel tile of range `split`. This range ends before the first pixel tile of range split + 1.
INLINE int first_pixel_tile(const ConvWeight& p, int split) { return (int)((int64_t)p.pixel_tiles * split / p.splits); }

// Where the four values of a thread's fragment are written to in dweight. v.x and v.y are the gradients of weights
// (co, ci) and (co, ci + 1), and v.z and v.w those of weights (co + 8, ci) and (co + 8, ci + 1). A pointer is null if
// its weights lie beyond the last channel.
struct WeightPlace {
    float2 *row, *row8;
    INLINE void set(float4 v) const {
        if (row) *row = make_float2(v.x, v.y);
        if (row8) *row8 = make_float2(v.z, v.w);
    }
};
// Returns the WeightPlace of the i-th float4 of a tile of 64 x 64 weights. 4 warps have 2 x 4 fragments each, and each
// lane of a warp holds one float4 of a fragment: i = (warp * 8 + fragment) * 32 + lane < 1024.
INLINE WeightPlace weight_place(const ConvWeight& p, int tile, int tap, int i) {
    const int lane = i % 32;
    const int fragment = i / 32 % 8;
    const int warp = i / 256;
    const int co_tile = tile / p.channel_tiles;
    const int t = tile % p.channel_tiles;
    const bool second = t >= p.tiles1; // a tile of the second input's channels
    const int ci_tile = second ? t - p.tiles1 : t;
    const int co = warp % 2 * 32 + fragment / 4 * 16 + lane / 4 + co_tile * 64;
    const int ci = warp / 2 * 32 + fragment % 4 * 8 + lane % 4 * 2 + ci_tile * 64;
    const int Cin = p.shape.C1 + p.shape.C2;
    const bool inside = ci < (second ? p.shape.C2 : p.shape.C1);
    float* const row = p.dweight + ((size_t)co * p.taps + tap) * Cin + (second ? p.shape.C1 : 0) + ci;
    float* const row8 = row + (size_t)8 * p.taps * Cin;
    return WeightPlace{inside && co < p.shape.Cout ? (float2*)row : nullptr,
                       inside && co + 8 < p.shape.Cout ? (float2*)row8 : nullptr};
}

// The end of a portable kernel for weight gradients: stores a thread's fragments in dweight or, if there are several
// ranges, in the partials. each(put) calls put(tile, tap, i, v) for all fragments. There are two versions of put, so
// the choice between dweight and the partials is made only once, outside the loop over the fragments.
template <class Each> INLINE void put_weights(const ConvWeight& p, int split, Each each) {
    if (p.splits == 1) each([&](int tile, int tap, int i, float4 v) { weight_place(p, tile, tap, i).set(v); });
    else
        each([&](int tile, int tap, int i, float4 v) {
            const size_t tile_and_tap = ((size_t)split * p.tiles + tile) * p.taps + tap;
            store_whole(p.partial + tile_and_tap * 1024 + i, v);
        });
}

// The second kernel, conv_weight_sum, adds up the partials. The first blocks of a layer add up the partials of the
// bias, and its other blocks add up the partials of the weights. For weights a block has 8 rows of 32 threads. A thread
// sums one float4 over ranges. `groups` rows of threads sum the same 32 float4, and each of these rows adds up every
// groups-th range. So a thread adds up at most 8 ranges, if there are at most 64 ranges.
HD static inline int weight_sum_groups(int splits) {
    if (splits > 32) return 8;
    if (splits > 16) return 4;
    return splits > 8 ? 2 : 1;
}
HD static inline int bias_sum_blocks(int Cout) { return ceil_div(Cout, 8); }

// dweight = the sum of the partials of all ranges. block: this block's number among the blocks that sum a layer's
// weights.
INLINE void sum_weights(const ConvWeight& p, int block) {
    __shared__ float4 rows[8][32];
    const int x = threadIdx.x;
    const int y = threadIdx.y;
    const int groups = weight_sum_groups(p.splits);
    const int group = y % groups;
    const int n = p.tiles * p.taps * 1024; // the number of float4 in the partials of a range
    const int i = (block * (8 / groups) + y / groups) * 32 + x;
    const WeightPlace to = weight_place(p, i / 1024 / p.taps, i / 1024 % p.taps, i % 1024);
    float4 sum = {};
    await_previous_kernel();
    UNROLL_8_FOR (int s = to.row ? group : p.splits; s < p.splits; s += groups) {
        sum = sum + p.partial[(size_t)s * n + i];
    }
    if (groups > 1) {
        rows[y][x] = sum;
        __syncthreads();
        if (group) return;
        for (int k = 1; k < groups; k++) sum = sum + rows[y + k][x];
    }
    to.set(sum);
}
// dbias = the sum of the partials of all pairs (range, image). demb of an image = the sum of this image's partials. A
// block computes 8 channels, with 32 threads for each channel. Each of these 32 threads adds up some of the images or,
// if all images are treated as one, some of the ranges.
INLINE void sum_biases(const ConvWeight& p, int block) {
    __shared__ double totals[32][8];
    const int x = threadIdx.x;
    const int c = block * 8 + x % 8;
    const int row = threadIdx.y * 4 + x / 8;
    const int Cout = p.shape.Cout;
    const int image_tiles = p.pixel_tiles / p.bias_images;
    auto split_of = [&](int tile) { // returns the range that contains this pixel tile
        return (int)(((unsigned)tile * p.splits + p.splits - 1) / (unsigned)p.pixel_tiles);
    };
    await_previous_kernel();
    double total = 0;
    if (p.bias_images == 1 && !p.demb) {
        UNROLL_4_FOR (int s = row; s < p.splits && c < Cout; s += 32) total += p.bias_partial[(size_t)s * Cout + c];
    } else
        for (int n = row; n < p.bias_images && c < Cout; n += 32) {
            const int first = split_of(n * image_tiles);
            const int last = split_of((n + 1) * image_tiles - 1);
            double sum = 0;
            UNROLL_4_FOR (int s = first; s <= last; s++) sum += p.bias_partial[(size_t)(s + n) * Cout + c];
            if (p.demb) p.demb[(size_t)n * p.emb_stride + c] = (float)sum;
            total += sum;
        }
    totals[row][x % 8] = total;
    __syncthreads();
    if (row || c >= Cout) return;
    for (int k = 1; k < 32; k++) total += totals[k][x];
    if (p.dbias) p.dbias[c] = (float)total;
}
static __global__ void __launch_bounds__(256) conv_weight_sum(const __grid_constant__ WeightBatch<ConvWeight> batch) {
    const auto [p, block] = batch.work_of_this_block();
    const int bias_blocks = bias_sum_blocks(p.shape.Cout);
    if (block >= bias_blocks) sum_weights(p, block - bias_blocks);
    else sum_biases(p, block);
}

// Sums dout over each image's pixels, for the warp's 16 M channels from channel co on. The two kernels below do this in
// their main loops. The sums are computed as a product, too: dout^T times a matrix of ones.
template <class T, int M> struct BiasSum {
    const ConvWeight& p;
    bool sums_bias; // false: another warp sums these channels, and this warp does nothing
    int split, co;
    int first;                                // the block's first pixel tile
    int per_image = p.tiles_h * p.tiles_w;    // pixel tiles of an image
    int image = first / per_image;            // the image that is being summed
    int left = per_image - first % per_image; // how many pixel tiles of this image still follow
    float acc[M][4] = {};

    // Is called for each new pixel tile. If the tile is the first of an image, the sums of the previous image are
    // stored.
    INLINE void next_tile() {
        if (left == 0) {
            put();
            image++;
            left = per_image;
        }
        left--;
    }
    INLINE void put() {
        if (!sums_bias) return;
        UNROLL_FOR (int i = 0; i < 2 * M; i++) { // all 8 columns of the product are equal
            const int c = co + i * 8 + threadIdx.x % 32 / 4;
            if (threadIdx.x % 4 == 0 && c < p.shape.Cout)
                p.bias_partial[(size_t)(split + image) * p.shape.Cout + c] = acc[i / 2][i % 2 * 2];
        }
        UNROLL_FOR (int i = 0; i < 4 * M; i++) {
            acc[i / 4][i % 4] = 0;
        }
    }
    INLINE void add(const FragmentA<T> (&dout)[M], float scale) { // dout times ones
        FragmentB<T> ones[1] = {};
        ones[0][0] = ElementOf<T>::TWO_ONES; // for floats: the high parts are 1, and the low parts are 0
        ones[0][1] = ElementOf<T>::TWO_ONES;
        if (sums_bias) multiply<T, M, 1>(acc, 1, 0, dout, ones, scale);
    }
};

// load_dout loads 16 pixels x 16 M channels of dout, and load_x loads 16 pixels x 8 N channels of x. Both operands lie
// in shared memory as (pixels, channels). The product sums over pixels, so pixels are its k, and ldmatrix.trans has to
// transpose the operands. place: the address of this lane's row of the first fragment.
template <class T, int M> INLINE void load_dout(FragmentA<T> (&a)[M], uint32_t place) {
    UNROLL_FOR (int i = 0; i < M; i++) {
        load_fragment<T, true>(a[i], channels_on<T>(place, 16 * i));
    }
}
template <class T, int N> INLINE void load_x(FragmentB<T> (&b)[N], uint32_t place) {
    UNROLL_FOR (int j = 0; j < N; j += 2) {
        load_fragments<T, true>(b[j], b[j + 1], channels_on<T>(place, 8 * j));
    }
}

// conv_weight_halo: 3x3, stride 1. A block owns 64 x 64 weights of all nine taps. It has 12 warps: four for each kw.
// Each of these four warps computes a quarter of the 64 x 64 weights, for all three kh. A pixel tile is 8 x 8 pixels of
// dout, and the 10 x 10 pixels of x that the taps read for them. One product has k = 16 pixels: two image rows of 8
// pixels. Pixel tiles pass through a ring of STAGES stages in shared memory:
//
//     a stage:   | x: 10 x 10 pixels of 64 channels | dout: 8 x 8 pixels of 64 channels |
constexpr int WEIGHT_HALO_BYTES = 4 * 164 * 128; // bytes of shared memory: 4 stages of bf16, or 2 stages of floats

// The part of each pixel tile that one thread copies: one chunk of one column, in every X_ROWS-th row of x and in every
// DOUT_ROWS-th row of dout. The copies have no branches.
template <class T> struct WeightHaloCopies {
    static constexpr int CHUNKS = 8;                   // chunks of a pixel, which has 64 channels here
    static constexpr int PIXEL_BYTES = 64 * sizeof(T); // bytes of a pixel
    static constexpr int STAGES = 4 / PARTS<T>;
    static constexpr int X_BYTES = 100 * PIXEL_BYTES;
    static constexpr int STAGE_BYTES = X_BYTES + 64 * PIXEL_BYTES;
    static constexpr int X_ROWS = 384 / CHUNKS / 10; // rows of x that all 384 threads copy at a time
    static constexpr int X_COPIES = ceil_div(10, X_ROWS);
    static constexpr int DOUT_ROWS = 384 / CHUNKS / 8;
    static constexpr int DOUT_COPIES = ceil_div(8, DOUT_ROWS);
    const ConvWeight& p;
    const uint32_t base;             // the address where shared memory begins
    const int co0, ci0;              // the block's first output channel and first input channel
    const int first, end;            // the block's pixel tiles: first .. end - 1
    const int up = p.shape.upsample; // 1: x is read through upsampling, and has half of dout's rows and columns
    const int H = p.shape.H << up;   // rows of dout
    const int W = p.shape.W << up;
    const int chunk = (int)threadIdx.x % CHUNKS;
    const int pixel = (int)threadIdx.x / CHUNKS; // the pixel of a tile that this thread copies first
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

    INLINE void copy_tile(int pixel_tile) { // called for first, first + 1, ...; from `end` on it copies zeros
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
        // Go on to the next pixel tile: to the right, in the next row of tiles, or in the next image
        next.w += 8;
        if (next.w < W) return;
        next.w = 0;
        next.h += 8;
        if (next.h < H) return;
        next.h = 0;
        next.n++;
    }
    // For take_apart_copies: the functions that x_places and dout_places return call f(address) for each chunk of x and
    // of dout that this thread copies.
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

// Phases:
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

    // The block's weights, and its range of pixel tiles: first .. end - 1.
    const auto [p, block] = batch.work_of_this_block();
    const int tile = block % p.tiles;
    const int split = block / p.tiles;
    const int ci_tile = tile % p.channel_tiles;
    const int first = first_pixel_tile(p, split);
    const int end = first_pixel_tile(p, split + 1);
    const int co0 = tile / p.channel_tiles * 64;
    Copies copies{p, base, co0, ci_tile * 64, first, end};
    for (int i = 0; i < STAGES - 1; i++) copies.copy_tile(first + i);

    // ldmatrix loads four matrices at once, each of 8 pixels of one image row and 8 channels. Each lane gives ldmatrix
    // the address of one pixel of one matrix. The four matrices are, by image row and channels:
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

    float acc[3][2][4][4] = {}; // acc[kh][i][j]: the sums of the warp's i-th 16 co x j-th 8 ci
    float x_scale = 1, dout_scale = 1;
    BiasSum<T, 2> bias{p, ci_tile == 0 && ci_warp == 0 && kw == 0, split, co0 + co_warp * 32, first};
    for (int pixel_tile = first; pixel_tile < end; pixel_tile++) {
        copies_arrived<STAGES - 2>();
        const uint32_t stage = copies.stage(pixel_tile);
        take_apart_copies<T, 12>(x_scale, copies.x_places(stage), dout_scale, copies.dout_places(stage));
        __syncthreads(); // the copies of all threads for this tile have arrived; all have finished the tile before
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

// conv_weight_gather: any convolution. A block owns N x N tiles of 64 x 64 weights, of one tap. It has 2 x 2 warps.
// Each warp owns a quarter of these weights: 2 N x 4 N fragments. Tiles of 64 pixels pass through a ring:
//
//     a stage:   | x: 64 pixels of 64 N channels, as the tap reads them | dout: 64 pixels of 64 N channels |
template <class T, int N> constexpr int WEIGHT_GATHER_STAGE = 2 * 64 * N * 64 * sizeof(T); // bytes
template <class T, int N> constexpr int WEIGHT_GATHER_STAGES = N == 2 ? 2 : 4 / PARTS<T>;

// The part of each pixel tile that one thread copies: the same chunk of every PIXELS_AT_ONCE-th pixel, of x and of
// dout. A chunk of x belongs to a tile of 64 channels, and this tile belongs to one of the two inputs.
template <class T, int N> struct WeightGatherCopies {
    static constexpr int CHUNKS = 8 * N;                   // chunks of a pixel, which has 64 N channels here
    static constexpr int PIXEL_BYTES = 64 * N * sizeof(T); // bytes of a pixel
    static constexpr int PIXELS_AT_ONCE = 128 / CHUNKS;    // pixels that all 128 threads copy at a time
    static constexpr int COPIES = 64 / PIXELS_AT_ONCE;
    const ConvWeight& p;
    const uint32_t base; // the address where shared memory begins
    const int tap;
    const int co_tile, ci_tile; // the block's first tiles of channels
    const int first;            // the block's first pixel tile
    const int chunk = (int)threadIdx.x % CHUNKS;
    const int row = (int)threadIdx.x / CHUNKS; // the row that this thread copies first
    const int Wo = p.shape.out_W();
    const int HWo = p.shape.out_H() * Wo;
    const int t = ci_tile + chunk * 8 / 64; // the tile of input channels that this thread's chunk belongs to
    const bool second = t >= p.tiles1;      // does this tile belong to the second input?
    const int ci = (second ? t - p.tiles1 : t) * 64 + chunk * 8 % 64;
    const int co = co_tile * 64 + chunk * 8;
    const int C = second ? p.shape.C2 : p.shape.C1;
    const bool x_in = t < p.channel_tiles && ci < C;
    const bool dout_in = co < p.shape.Cout;
    const bool direct = p.shape.kernel == 1 && p.shape.stride == 1; // pixel i reads the input's pixel i
    const act* const input = second && x_in ? p.x2 : p.x1;
    const T* const x = (const T*)input + (x_in ? ci : 0);
    const T* const dout = (const T*)p.dout + (dout_in ? co : 0);
    const float Wo_inverse = 1.0f / Wo;
    const TapOffset offset = tap_offset<false>(p.shape, tap);
    // All rows of a thread have the same key.
    const uint32_t place = base + row * PIXEL_BYTES + chunk_place<T>(chunk, row & 7);
    int n = first / p.tiles_w;             // the image of the pixel tile to copy
    int p0 = (first - n * p.tiles_w) * 64; // the tile's first pixel in this image

    INLINE uint32_t stage(int pixel_tile) const {
        return (uint32_t)(pixel_tile - first) % WEIGHT_GATHER_STAGES<T, N> * WEIGHT_GATHER_STAGE<T, N>;
    }
    INLINE void copy_tile(int pixel_tile) { // called for first, first + 1, ...
        const uint32_t stage = this->stage(pixel_tile);
        const int h0 = direct ? 0 : p0 / Wo;
        const int w0 = p0 - h0 * Wo;
        UNROLL_FOR (int k = 0; k < 64; k += PIXELS_AT_ONCE) {
            const int i = row + k;
            const int pixel = p0 + i;
            int source = -1;
            if (pixel < HWo) source = direct ? pixel : source_pixel<false>(p.shape, Wo_inverse, h0, w0, i, offset);
            const bool x_valid = x_in && source >= 0; // if false, the copy writes zeros
            const bool dout_valid = dout_in && pixel < HWo;
            const uint32_t x_pixel = x_valid ? n * p.shape.H * p.shape.W + source : 0;
            const uint32_t dout_pixel = dout_valid ? n * HWo + pixel : 0;
            copy_channels(place, stage + k * PIXEL_BYTES, pixel_of(x, x_pixel, C), x_valid);
            copy_channels(place, stage + (64 + k) * PIXEL_BYTES, pixel_of(dout, dout_pixel, p.shape.Cout), dout_valid);
        }
        // Go on to the next pixel tile of this image, or to the first one of the next image.
        p0 += 64;
        if (p0 < HWo) return;
        p0 = 0;
        n++;
    }
    // For take_apart_copies: returns a function that calls f(address) for each chunk that this thread copies. first_row
    // is 0 for the chunks of x, and 64 for those of dout.
    INLINE auto own_places(uint32_t stage, int first_row) const {
        return places<COPIES, PIXELS_AT_ONCE * PIXEL_BYTES>(place + stage + first_row * PIXEL_BYTES);
    }
};

// Phases: as in conv_weight_halo_kernel.
template <class T, int N, int WORKS>
static __global__ void __launch_bounds__(128, 4 - N)
    conv_weight_gather_kernel(const __grid_constant__ WeightBatch<ConvWeight, WORKS> batch) {
    using Copies = WeightGatherCopies<T, N>;
    constexpr int PIXEL_BYTES = Copies::PIXEL_BYTES;
    constexpr int M = 2 * N;
    constexpr int STAGES = WEIGHT_GATHER_STAGES<T, N>;
    extern __shared__ __align__(128) unsigned char shared[];
    const uint32_t base = shared_address(shared);
    const int lane = threadIdx.x & 31;
    const int warp = (int)threadIdx.x >> 5;
    const int co_warp = warp & 1;
    const int ci_warp = warp >> 1 & 1;

    // The block's tap, its tiles of weights, and its range of pixel tiles: first .. end - 1. Blocks with neighbouring
    // numbers have the same range and the same tap, so they find the pixels of this range in the L2 cache.
    const auto [p, block] = batch.work_of_this_block();
    const int co_tiles = p.tiles / p.channel_tiles;
    const int ci_blocks = ceil_div(p.channel_tiles, N);
    const int blocks = ci_blocks * ceil_div(co_tiles, N);
    const int tap = block / blocks % p.taps;
    const int split = block / blocks / p.taps;
    const int co_tile = block % blocks / ci_blocks * N;
    const int ci_tile = block % ci_blocks * N;
    const int first = first_pixel_tile(p, split);
    const int end = first_pixel_tile(p, split + 1);
    Copies copies{p, base, tap, co_tile, ci_tile, first};
    for (int k = 0; k < STAGES - 1; k++) {
        if (first + k < end) copies.copy_tile(first + k);
        copies_committed();
    }

    // ldmatrix loads four matrices at once, each of 8 pixels and 8 channels. Each lane gives ldmatrix the address of
    // one pixel of one matrix. The four matrices are, by pixels and channels:
    // Of x:    (pixels 0-7, ci 0-7), (8-15, ci 0-7), (0-7, ci 8-15), (8-15, ci 8-15).
    // Of dout: (pixels 0-7, co 0-7), (0-7, co 8-15), (8-15, co 0-7), (8-15, co 8-15).
    const int row_of_matrix = lane & 7;
    const int low = lane >> 3 & 1;
    const int high = lane >> 4;
    uint32_t lane_x =
        base + (low * 8 + row_of_matrix) * PIXEL_BYTES + chunk_place<T>(ci_warp * 4 * N + high, row_of_matrix);
    uint32_t lane_dout =
        base + (64 + high * 8 + row_of_matrix) * PIXEL_BYTES + chunk_place<T>(co_warp * 4 * N + low, row_of_matrix);
    // Without this line the compiler would compute lane_x and lane_dout again for every tile.
    asm volatile("" : "+r"(lane_x), "+r"(lane_dout));

    float acc[M][2 * M][4] = {}; // acc[i][j]: the sums of the warp's i-th 16 co x j-th 8 ci
    float x_scale = 1, dout_scale = 1;
    const bool sums_bias = ci_tile == 0 && ci_warp == 0 && tap == 0;
    BiasSum<T, M> bias{p, sums_bias, split, co_tile * 64 + co_warp * 32 * N, first};
    for (int pixel_tile = first; pixel_tile < end; pixel_tile++) {
        copies_arrived<STAGES - 2>();
        const uint32_t stage = copies.stage(pixel_tile);
        take_apart_copies<T, 4>(x_scale, copies.own_places(stage, 0), dout_scale, copies.own_places(stage, 64));
        __syncthreads(); // the copies of all threads for this tile have arrived; all have finished the tile before
        if (pixel_tile + STAGES - 1 < end) copies.copy_tile(pixel_tile + STAGES - 1);
        copies_committed();
        bias.next_tile();
        UNROLL_FOR (int k = 0; k < 64 * PIXEL_BYTES; k += 16 * PIXEL_BYTES) { // 16 pixels at a time
            FragmentA<T> a[M];
            FragmentB<T> b[2 * M];
            load_dout<T>(a, lane_dout + stage + k);
            load_x<T>(b, lane_x + stage + k);
            bias.add(a, dout_scale);
            multiply<T, M, 2 * M>(acc[0], 2 * M, 1, a, b, x_scale * dout_scale);
        }
    }
    copies_arrived<0>();
    bias.put();
    put_weights(p, split, [&](auto put) {
        // weight_place numbers the fragments as if four warps shared each tile of 64 x 64 weights. So the code below
        // computes the number of each fragment in its tile. The fragment lies in a square of 32 x 32 weights, which is
        // the block's a-th square along Cout, and the b-th along Cin.
        UNROLL_FOR (int f = 0; f < 2 * M * M; f++) {
            const int i = f / (2 * M);
            const int j = f % (2 * M);
            const int a = co_warp * N + i / 2;
            const int b = ci_warp * N + j / 4;
            const int own_co = co_tile + a / 2;
            const int own_ci = ci_tile + b / 2;
            if (own_co >= co_tiles || own_ci >= p.channel_tiles) continue;
            const int tile = own_co * p.channel_tiles + own_ci;
            const int warp_of_tile = a % 2 + b % 2 * 2;
            const int fragment = i % 2 * 4 + j % 4;
            const float* v = acc[i][j];
            put(tile, tap, (warp_of_tile * 8 + fragment) * 32 + lane, make_float4(v[0], v[1], v[2], v[3]));
        }
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// --- Hopper's convolutions (sm_90a, bf16; 3x3 also FP8): what they share: TMA, mbarriers, wgmma
// The main idea: the halo of a pixel tile is loaded once for each slice of 64 channels, and all nine taps read the same
// copy of it in shared memory. TMA loads a box of 64 channels x pixels as rows of 128 bytes, one row for each pixel.
// Pixels outside the image become zeros, which is the padding.
// For wgmma an operand consists of groups of 8 rows of 128 bytes, with the same distance from each group to the next.
// Here a group is 8 neighbouring pixels of an image row, and the distance is one row of the halo (its pitch). So the
// operands of different taps differ only in their start address. The start address need not be a multiple of 1024
// bytes, although the swizzle repeats only after 1024 bytes: TMA and wgmma both compute the full address first, then
// XOR its bits 4-6 with its bits 7-9. (PTX ISA, "Matrix descriptor".)
//
//   D (64 output channels, 8 x ROWS pixels) += A (weights of a tap) * B (pixels of a tap), for each tap and slice
//
//     A: 64 rows of 128 bytes           B: the halo, a pixel = a row of 128 bytes     D: fp32 registers; thread t has
//       k = 0 .. 63 (input channels)      (kh, kw) +---------------+ pitch:             columns 8 j + t % 4 * 2, + 1
//      +----+----+----+----+               start ->| 8 pixels      | 10 pixels        +--------+--------+----
//      | 16 | 16 | 16 | 16 | 64            + pitch | 8 pixels      |                  | j = 0  | j = 1  | ...  rows
//      |    |    |    |    | output        ...     | ... ROWS      |                  |        |        | t / 32 * 16 +
//      +----+----+----+----+ channels              +---------------+                  +--------+--------+  t % 32 / 4
//       four products of k = 16: + 32 bytes each, both in A and in B                                      and 8 more
//
// These kernels are made of the structs in section 16. In the drawing above, Halo::shifted makes the operand B of a
// tap, and Operand::rows makes A. Accumulators::multiply starts the four products. Each product is one call of
// Wgmma<N>::add, which is one instruction wgmma.m64nNk16.
//
// In FP8 a slice has 128 channels, so its rows have 128 bytes, too. All of the above stays as it is, except that the
// instruction is wgmma.m64nNk32, and the function that starts it is multiply_fp8. An FP8 number is a value times a
// factor. In training the factors are FP8_X_FACTOR, FP8_WEIGHT_FACTOR and, for gradients, choose_gradient_factor's
// (make_fp8_training). In samples x has a factor for each norm, and the weights of each output channel have one
// (make_fp8_weights). So a sum of products is too large by two factors. ConvTma::factors holds 1 / (the product of the
// two). The sums are multiplied by it before anything is added to them. An input gradient in FP8 is a forward
// convolution (conv_backward_input_fp8).

// A tensor of one part or two parts (concatenated inputs, and their gradients). It is divided into slices of 64
// channels (in FP8, of 128). A slice belongs to only one part.
struct TmaParts {
    CUtensorMap map1, map2;
    int C1;      // channels of the first part
    int slices1; // slices of the first part
    int slices;  // slices of both parts
    INLINE bool is_second(int slice) const { return slice >= slices1; }
    INLINE const CUtensorMap* map(int slice) const { return is_second(slice) ? &map2 : &map1; }
    // `channel` and `row` return the number of a slice's first channel: `channel` returns the number within the slice's
    // part, and `row` the number over both parts, as in the weights. width: channels of a slice.
    INLINE int channel(int slice, int width = SLICE_CHANNELS) const {
        return (is_second(slice) ? slice - slices1 : slice) * width;
    }
    INLINE int row(int slice, int width = SLICE_CHANNELS) const {
        return (is_second(slice) ? C1 : 0) + channel(slice, width);
    }
    // FP8: does the slice have 64 channels at most? Then two products of 32 channels are enough, instead of four.
    INLINE bool is_half_slice(int slice) const { return slice == slices - 1 && (C1 - 1) % 128 < 64; }
};
// The arguments of the kernels of conv_tiles and conv_small. A CUtensorMap is aligned to 64 bytes; it has to be a
// parameter of the kernel (__grid_constant__), so that TMA can read it.
struct ConvTma {
    TmaParts x;                      // the input; its boxes have a border of one pixel, if the filter is 3x3
    TmaParts skip;                   // the skip connection's input, if this kernel computes the skip connection
    TmaParts results, addends;       // the tensors that results are written to, and those that are added to results
    CUtensorMap weight;              // the layer's weights (Cout, taps, Cin), in boxes of 64 of its Cin (FP8: 128)
    CUtensorMap skip_weight;         // the skip connection's weights (Cout, 1, Cin), in boxes of 64 Cin
    int B, H, W, C;                  // sizes of the output
    int tiles_h, tiles_w;            // tiles of an image, down and across
    int tiles;                       // tiles of all images
    int pixel_stages, weight_stages; // the numbers of stages of pixels and of stages of weights in shared memory
    bool one_image;                  // all pixels of a tile belong to one image, so they are one part of the statistics
    ConvOut out;
    const float* factors; // FP8: (C); the sums of channel c are multiplied by factors[c]
};

// Makes the TMA descriptors of x1 and x2 (s.B images of s.H x s.W pixels, C1 and C2 channels), for boxes of this size.
static TmaParts tma_parts(const void* x1, const void* x2, int C1, int C2, const auto& s, int channels, int columns,
                          int rows, int images, Element element = Element::BF16) {
    auto map = [&](const void* x, int C) {
        return tensor_map(x, {C, s.W, s.H, s.B}, {channels, columns, rows, images}, element);
    };
    const int width = slice_channels(element);
    TmaParts t;
    t.map1 = map(x1, C1);
    t.map2 = map(x2, C2);
    t.C1 = C1;
    t.slices1 = C2 ? ceil_div(C1, width) : INT_MAX;
    t.slices = ceil_div(C1, width) + ceil_div(C2, width);
    return t;
}

// The box of pixels that a block works on at a time (a tile), and the boxes in which TMA moves results and weights.
struct TmaBoxes {
    int rows, columns, images; // sizes of a tile
    int result_channels;       // channels of a box of results
    int weight_rows;           // in the forward pass: output channels of a box of weights
};
// Sets all members of a ConvTma except pixel_stages, weight_stages and one_image.
static ConvTma tma_arguments(const ConvCall& p, bool backward, TmaBoxes box) {
    const ConvOut& o = p.out;
    const ConvSkip& k = o.skip;
    const int taps = p.s.kernel * p.s.kernel;
    const int Cin = p.Cin1 + p.Cin2;
    const int borders = p.s.kernel - 1;
    ConvTma t = {};
    constexpr int CHANNELS = SLICE_CHANNELS;
    const Element in = is_fp8(p.s.in) ? Element::FP8 : Element::BF16; // the element of x and weight: one byte, or two
    const int width = slice_channels(in);
    t.x = tma_parts(p.x1, p.x2, p.Cin1, p.Cin2, p, width, box.columns + borders, box.rows + borders, box.images, in);
    t.skip = tma_parts(k.x1, k.x2, k.C1, k.C2, p, CHANNELS, box.columns, box.rows, box.images);
    t.results = tma_parts(o.part1.dx, o.part2.dx, o.Cout1, o.Cout2, p, box.result_channels, 8, box.rows, 1);
    t.addends = tma_parts(o.part1.add1, o.part2.add1, o.Cout1, o.Cout2, p, box.result_channels, 8, box.rows, 1);
    if (backward) t.weight = tensor_map(p.weight, {p.Cout, taps, Cin}, {CHANNELS, 1, CHANNELS});
    else t.weight = tensor_map(p.weight, {Cin, taps, p.Cout}, {width, 1, box.weight_rows}, in);
    t.skip_weight = tensor_map(k.weight, {k.C1 + k.C2, 1, p.Cout}, {CHANNELS, 1, CHANNELS});
    t.B = p.B;
    t.H = p.H;
    t.W = p.W;
    t.C = p.Cout;
    t.out = o;
    t.factors = p.factors;
    t.tiles_h = ceil_div(p.H, box.rows);
    t.tiles_w = ceil_div(p.W, box.columns);
    t.tiles = ceil_div(p.B, box.images) * t.tiles_h * t.tiles_w;
    return t;
}

// ---------------------------------------------------------------------------------------------------------------------
// --- conv_tiles: 3x3 on large images, and 1x1 (sm_90a)
// Used when: 3x3 on images larger than 32 x 32; 3x3 that computes a skip connection, too, on images of any size; 1x1.
//   On images of 9 to 32 rows, too, pick_conv_small chooses it where it is faster than conv_small.
// How: A tile is 8 x ROWS pixels (8 across, ROWS down) and OUT_SLICES slices of 64 output channels. The products are
//   D[64 OUT_SLICES channels][8 x ROWS pixels], with A = weights and B = pixels, as drawn above. The pixels are the
//   dimension N of a product. So products are large even if there are only 64 channels. Blocks are persistent: there
//   are about as many as multiprocessors. Each block has some output channels, and walks over its share of the tiles. A
//   block's roles:
//
//     warpgroup 0  (warps 0-3)    multiplies its tiles and finishes them: + embedding, + addend, rounding, statistics
//     warpgroup 1  (warps 4-7)    does the same for other tiles
//     warp 8                      one thread loads pixels, addends and weights (TMA)
//     warps 9, 10                 one thread of each warp stores the results of one warpgroup (TMA)
//     warp 11                     is idle. It exists because setmaxnreg applies to whole warpgroups: warps 8-11 give
//                                 registers away together
//
//   Shared memory: | barriers | a ring of stages of pixels: slices of x, addends, then results | stages of weights |
//   Template parameters:
//     TAPS         9: 3x3; 1: 1x1
//     BACKWARD     the input's gradient
//     STEPS        how many products of 16 channels a tap of a slice has: 4, or 2 if the only slice has 32 channels
//     RESIDENT     true: all weights stay in shared memory, and a stage has pixels of one tile. The two warpgroups take
//                  turns with tiles and with the tensor cores. A 3x3 may also compute the skip connection that is added
//                  to its result: further slices, of one tap each.
//                  false: weights pass through a ring, and both warpgroups read them at the same time. A stage has
//                  pixels of two tiles, one tile for each warpgroup.
//     ELEMENT      BF16; FP8: pixels and weights are e4m3 (forward pass); FP8_GRADIENT: pixels are gradients in e5m2,
//                  and weights are e4m3 (input gradient, with BACKWARD = false, see conv_backward_input_fp8). In both
//                  FP8 types (3x3) a slice has 128 channels; the last slice has 64 or 128. Sums begin as 0. They are
//                  scaled after the last product of x. The skip connection stays in bf16, so its products come after
//                  the scaling.
//   From the top down: conv_tiles launches conv_tiles_kernel. The kernel's warpgroups call Accumulators::multiply (in
//   FP8 multiply_fp8) for each slice and tap. This function calls Wgmma<8 ROWS>::add STEPS x OUT_SLICES times.
// Costs: a block reads the halo of a tile once for all channels of the tile. It reads streamed weights once for two
//   tiles.
template <int TAPS_, int ROWS_, int OUT_SLICES_, bool RESIDENT_, bool BACKWARD_, int STEPS_ = 4,
          Element ELEMENT_ = Element::BF16>
struct ConvTiles {
    static constexpr int TAPS = TAPS_;
    static constexpr int ROWS = ROWS_;
    static constexpr int OUT_SLICES = OUT_SLICES_;
    static constexpr int STEPS = STEPS_;
    static constexpr bool RESIDENT = RESIDENT_;
    static constexpr bool BACKWARD = BACKWARD_;
    static constexpr Element ELEMENT = ELEMENT_;
    static constexpr bool IS_FP8 = is_fp8(ELEMENT);       // FP8 or FP8_GRADIENT
    static constexpr int WIDTH = slice_channels(ELEMENT); // channels of a slice of x
    static constexpr bool CAN_SKIP = RESIDENT && !BACKWARD && TAPS == 9 && ELEMENT != Element::FP8_GRADIENT;
    static constexpr int THREADS = 384;
    static constexpr int LOADS = 8;  // the warp that loads
    static constexpr int STORES = 9; // the first of the two warps that store
    static constexpr bool MOVES_REGISTERS = OUT_SLICES == 3 || (IS_FP8 && ROWS == 32);
    // Pixels.
    static constexpr int UNIT = RESIDENT ? 1 : 2; // how many tiles' pixels a stage holds
    static constexpr int BORDER = TAPS == 9 ? 1 : 0;
    static constexpr int PITCH = 8 + 2 * BORDER; // pixels of a row of the halo
    static constexpr int PIXELS = 8 * ROWS;
    static constexpr int TILE_BYTES = PIXELS * SLICE_BYTES; // bytes of a tile without its border
    static constexpr int HALO_BYTES = PITCH * (ROWS + 2 * BORDER) * SLICE_BYTES;
    static constexpr int HALO_ROOM = whole_swizzles(HALO_BYTES); // bytes of shared memory for a halo
    static constexpr int STAGE_BYTES = UNIT * HALO_ROOM;
    // Weights.
    static constexpr int WEIGHT_BYTES = OUT_SLICES * BYTES_OF_64_ROWS; // bytes of the weights of one tap of one slice
    static constexpr int STREAMED_WEIGHTS = TAPS == 9 ? 6 : 4;         // stages of weights, if weights are streamed
    // Statistics: the number of image rows of a part, unless the whole tile is one part (ConvTma::one_image).
    static constexpr int STATS_ROWS = TAPS == 9 ? ROWS : 8;
    static constexpr int MAX_STAGES = 16;
    static constexpr int BARRIERS = 128; // at most 5 for each stage of pixels, and 2 for each stage of weights
    // After this tap of a slice, the stage of pixels of the previous slice is released.
    static constexpr int RELEASE_TAP = RESIDENT && TAPS > 1 ? 1 : 0;

    // Returns the number of blocks among which the tiles are divided. (All these blocks have the same output channels.)
    static int runs(int Cout) { return std::max(1, gpu.sms / ceil_div(Cout, SLICE_CHANNELS * OUT_SLICES)); }
    static int shared_bytes(int n, int weights) {
        return shared_beside(BARRIERS) + n * STAGE_BYTES + weights * WEIGHT_BYTES;
    }
    // Returns how many stages of pixels fit into shared memory beside `weights` stages of weights.
    static int stages(int weights) {
        const int room = hopper_shared(1) - shared_bytes(0, weights);
        return std::min(room / STAGE_BYTES, MAX_STAGES);
    }
    using Pixels = Pipeline<STAGE_BYTES, RESIDENT ? 2 : 1>;
    using Weights = Pipeline<WEIGHT_BYTES>;
    // Returns where in a stage this warpgroup's pixels begin.
    static INLINE int pixels_at(int warpgroup) { return RESIDENT ? 0 : warpgroup * HALO_ROOM; }
};

// A block's tiles, and what passes through the stages of pixels for each tile. What fills one stage is called an item
// here: first come the slices of x, then the slices of the skip connection's input, then OUT_SLICES addends.
//
//   item     0 .. x.slices - 1 | .. products - 1  | first_result .. items - 1 (the last OUT_SLICES)
//            slices of x       | skip connection  | addends come in, results go out
//
// A tile's results are written to the stages of its last OUT_SLICES items, and stored from there. If there are
// addends, these are the addends' stages. This is possible because a thread writes its results to the same places where
// it has read its addends. If there are no addends and fewer slices than OUT_SLICES, there are nevertheless OUT_SLICES
// items, and nothing is loaded into the last of them.
template <class T> struct TileWork {
    const ConvTma& p;
    const int out0 = blockIdx.y * T::OUT_SLICES;                         // the block's first slice of output channels
    const int c0 = out0 * SLICE_CHANNELS;                                // the block's first output channel
    const int products = p.x.slices + (T::CAN_SKIP ? p.skip.slices : 0); // slices that are multiplied
    const int items = has_addends() ? products + T::OUT_SLICES : max(products, T::OUT_SLICES);
    const int first_result = items - T::OUT_SLICES; // the first of the items whose stages the results use
    // How many stages a warpgroup skips between two of its tiles: the stages of the other warpgroup's tile, if any.
    const int others = T::RESIDENT ? items : 0;
    INLINE bool has_addend(int b) const {
        const bool second = p.addends.is_second(out0 + b);
        return (second ? p.out.part2 : p.out.part1).add1;
    }
    INLINE bool has_addends() const {
        bool any = false;
        UNROLL_FOR (int b = 0; b < T::OUT_SLICES; b++) any |= has_addend(b);
        return any;
    }
    // Returns a walk over this block's tiles for warpgroup g. If a stage holds two tiles, the last tile of the walk may
    // lie outside of all images. At any time, different blocks work on neighbouring tiles. The halos of these tiles
    // overlap, so many pixels are found in the L2 cache.
    INLINE TileWalk tiles(int g, int step = 2) const {
        const int first = T::RESIDENT ? blockIdx.x + g * gridDim.x : 2 * blockIdx.x + g;
        const int end = ceil_div(p.tiles, T::UNIT) * T::UNIT;
        return TileWalk(p.tiles_h, p.tiles_w, first, step * gridDim.x, end);
    }
    // Loads the weights of one tap for a slice of x, or the weights for a slice of the skip connection's input.
    INLINE void load_weights(Stage to, int slice, int tap) const {
        const bool skip = T::CAN_SKIP && slice >= p.x.slices;
        const int k = skip ? p.skip.row(slice - p.x.slices) : p.x.row(slice, T::WIDTH);
        mbarrier_expect(to.full, T::WEIGHT_BYTES);
        UNROLL_FOR (int b = 0; b < T::OUT_SLICES; b++) {
            const int c = c0 + b * SLICE_CHANNELS;
            const uint32_t place = to.address + b * BYTES_OF_64_ROWS;
            if (T::BACKWARD) tma_load(place, &p.weight, to.full, c, T::TAPS - 1 - tap, k);
            else tma_load(place, skip ? &p.skip_weight : &p.weight, to.full, k, tap, c);
        }
    }
};

// The loading thread's walk through the ring of pixels: which item of which tile it loads next, and for which
// warpgroup.
template <class T> struct PixelLoader {
    const TileWork<T>& work;
    typename T::Pixels& pixels;
    TileWalk tile = work.tiles(0, T::UNIT);
    TileWalk partner = work.tiles(1, T::UNIT); // UNIT = 2: the second warpgroup's tile, in the same stage
    int item = 0;
    int owner = 0; // UNIT = 1: the warpgroup that computes this tile

    INLINE void load(Stage to, const TmaParts& x, int slice, int border, int bytes, int width = SLICE_CHANNELS) const {
        auto load = [&](const TileWalk& tile, uint32_t place) {
            const int h = tile.h * T::ROWS - border;
            const int w = tile.w * 8 - border;
            tma_load(place, x.map(slice), to.full, x.channel(slice, width), w, h, tile.n);
        };
        mbarrier_expect(to.full, T::UNIT * bytes);
        load(tile, to.address);
        if (T::UNIT == 2) load(partner, to.address + T::HALO_ROOM);
    }
    INLINE void next() {
        if (!tile) return;
        const ConvTma& p = work.p;
        const Stage to = pixels.acquire(owner);
        const int skip = item - p.x.slices;
        const int b = item - work.first_result;
        if (skip < 0) load(to, p.x, item, T::BORDER, T::HALO_BYTES, T::WIDTH);
        else if (T::CAN_SKIP && item < work.products) load(to, p.skip, skip, 0, T::TILE_BYTES);
        else if (work.has_addend(b)) load(to, p.addends, work.out0 + b, 0, T::TILE_BYTES);
        else mbarrier_arrive(to.full); // nothing is loaded into this stage
        if (++item < work.items) return;
        item = 0;
        owner ^= 1;
        tile.next();
        partner.next();
    }
};

// Role: load.
// Resident weights: the thread loads them before the previous kernel has ended, since that kernel does not write them.
// Streamed weights: half way through the weights of slice i, the thread loads the next item. This is slice i + 1 or,
// after the last slice, the first addend or the next tile's first slice. The item needs a stage, and has to wait until
// slice i - 1 or an earlier slice has left this stage (there are at least two stages). The stage is released after the
// first tap of slice i. The weights of that tap have been loaded before. So the thread never waits for products whose
// weights it has not loaded yet. When it has started the loads of all weights of a tile, it loads the remaining items,
// up to and including the next tile's first slice.
template <class T> INLINE void load_tiles(const TileWork<T>& work, auto& pixels, auto& weights) {
    prefetch_tensor_map(&work.p.weight);
    prefetch_tensor_map(&work.p.x.map1);
    const int slices = work.p.x.slices;
    for (int s = 0; T::RESIDENT && s < work.products; s++)
        for (int tap = 0; tap < (s < slices ? T::TAPS : 1); tap++) work.load_weights(weights.next(), s, tap);
    PixelLoader<T> loader{work, pixels};
    await_previous_kernel();
    while (T::RESIDENT && loader.tile) loader.next();
    if (T::RESIDENT) return;
    const int tiles = loader.tile.left;
    loader.next();
    for (int i = 0; i < tiles; i++) {
        for (int s = 0; s < slices; s++)
            for (int tap = 0; tap < T::TAPS; tap++) {
                work.load_weights(weights.acquire(), s, tap);
                if (tap == T::TAPS / 2) loader.next();
            }
        for (int k = slices; k < work.items; k++) loader.next();
    }
}

// Role: store. There is one such thread for each of the two warpgroups. When a result is complete in its stage, the
// thread stores the result by TMA. Then it frees the stage for the loading thread.
template <class T> INLINE void store_tiles(const TileWork<T>& work, auto& pixels, auto& results, int warpgroup) {
    const ConvTma& p = work.p;
    prefetch_tensor_map(&p.results.map1);
    await_previous_kernel();
    results.pass_over(warpgroup * work.others + work.first_result);
    for (TileWalk tile = work.tiles(warpgroup); tile;) {
        for (int b = 0; b < T::OUT_SLICES; b++) {
            results.arrived(warpgroup);
            const int stage = results.hand_over();
            const int slice = work.out0 + b;
            const uint32_t from = pixels.stage(stage).address + T::pixels_at(warpgroup);
            tma_store(p.results.map(slice), from, p.results.channel(slice), tile.w * 8, tile.h * T::ROWS, tile.n);
            tma_stores_read();
            pixels.free(stage);
        }
        tile.next();
        results.pass_over(work.others + work.first_result);
    }
}

// What a warpgroup does with a tile's sums: it adds embedding and addend, and rounds the sums to bf16. It writes the
// results to shared memory, as rows of pixels, and sums them for the statistics.
//
//   d[b] of a thread: its 2 channels c, c + 8 of slice b    ->    a stage: 8 x ROWS rows (pixels) of 64 channels
//   x all rows j, pixels 2 (t % 4) and + 1 of each                 stmatrix turns 8 x 8 blocks on their way there
template <class T> struct Epilogue {
    // For each part of the statistics: channel c's sum and sum of squares, then those of c + 8.
    typedef float StatSums[T::ROWS / T::STATS_ROWS][4];
    const TileWork<T>& work;
    const ConvTma& p;
    int c;                           // this thread's first channel
    int lane_place;                  // the place in a result, in bytes, of this lane's row for ldmatrix and stmatrix
    float bias[T::OUT_SLICES][2];    // bias of channels c and c + 8 of each slice of 64 channels
    float emb[2];                    // embedding of channels c and c + 8, for one slice of 64 channels
    float factors[T::OUT_SLICES][2]; // FP8: the factors of the same channels

    INLINE explicit Epilogue(const TileWork<T>& work) : work(work), p(work.p) {
        const int warp = threadIdx.x >> 5 & 3;
        const int lane = threadIdx.x & 31;
        c = work.c0 + warp * 16 + (lane >> 2);
        const int pixel = (lane & 7) + (lane >> 4) * 8; // the number of this lane's pixel within two image rows
        const int chunk = 2 * warp + (lane >> 3 & 1);   // the number of this lane's chunk of 8 channels
        lane_place = box_place<SLICE_CHANNELS>(pixel, chunk);
        UNROLL_FOR (int b = 0; b < T::OUT_SLICES; b++)
            UNROLL_FOR (int k = 0; k < 2; k++) {
                const int channel = c + b * SLICE_CHANNELS + 8 * k;
                bias[b][k] = p.out.bias && channel < p.C ? p.out.bias[channel] : 0;
                if (T::CAN_SKIP && p.skip.slices && channel < p.C) bias[b][k] += p.out.skip.bias[channel];
                if (T::IS_FP8) factors[b][k] = channel < p.C ? p.factors[channel] : 0;
            }
    }
    // Loads the embedding of slice b of 64 channels. The embedding of the first slice is loaded while products run. The
    // embeddings of the other slices are loaded later, when they are needed, to save registers.
    INLINE void load_embedding(int n, int b) {
        UNROLL_FOR (int k = 0; k < 2; k++) {
            const int channel = c + b * SLICE_CHANNELS + 8 * k;
            const bool wanted = p.out.emb && n < p.B && channel < p.C;
            emb[k] = wanted ? p.out.emb[(size_t)n * p.out.emb_stride + channel] : 0;
        }
    }
    // Adds the addend to d. d[4 j ... 4 j + 7] belong to image rows j and j + 1. They are four pairs of neighbouring
    // pixels: of (row j, channel c), (row j, c + 8), (row j + 1, c), (row j + 1, c + 8).
    // In D a pixel is a column, but in shared memory a pixel is a row. So ldmatrix and stmatrix transpose 8 x 8
    // matrices. In shared memory an image row of 8 pixels takes up 1024 bytes.
    INLINE void add_addend(float (&d)[T::PIXELS / 2], uint32_t place) const {
        constexpr int BATCH = 4; // loads that are started together
        UNROLL_FOR (int j0 = 0; j0 < T::ROWS; j0 += 2 * BATCH) {
            uint32_t v[4 * BATCH];
            UNROLL_FOR (int i = 0; i < 4 * BATCH; i += 4) {
                ldmatrix_trans(v + i, v + i + 2, place + j0 * SWIZZLE_BYTES + i * SWIZZLE_BYTES / 2);
            }
            UNROLL_FOR (int i = 0; i < 4 * BATCH; i++) {
                add_bf16(d + 4 * j0 + 2 * i, v[i]);
            }
        }
    }
    // Rounds d and writes it to shared memory. If STATS, adds the rounded values and their squares to `sums`, except
    // those of pixels outside the image.
    template <bool STATS>
    INLINE void round(float (&d)[T::PIXELS / 2], uint32_t place, int h, int w, StatSums& sums) const {
        const int pixel = w + (threadIdx.x & 3) * 2;
        const uint32_t first_inside = pixel < p.W ? 0xFFFF : 0;
        const uint32_t second_inside = pixel + 1 < p.W ? 0xFFFF0000 : 0;
        const uint32_t inside = first_inside | second_inside;
        UNROLL_FOR (int j = 0; j < T::ROWS; j += 2) {
            uint32_t v[4];
            UNROLL_FOR (int k = 0; k < 4; k++) {
                v[k] = pack_bf16(d[4 * j + 2 * k], d[4 * j + 2 * k + 1]);
            }
            stmatrix_trans(place + j * SWIZZLE_BYTES, v);
            UNROLL_FOR (int k = 0; STATS && k < 4; k++) {
                const float2 x = unpack_bf16(h + j + k / 2 < p.H ? v[k] & inside : 0);
                float* const sum = sums[j / T::STATS_ROWS] + k % 2 * 2;
                sum[0] += x.x + x.y;
                sum[1] += x.x * x.x + x.y * x.y;
            }
        }
    }
    // Four threads hold sums of the same channels, but of different pixels. These sums are added up, and one of the
    // four threads stores the total. A tile is either one part of the statistics, or PARTS parts, one below the other.
    static INLINE float sum_of_four(float v) { return lane_sum<1, 2>(v); }
    INLINE void store_stats(StatSums& sums, int channel, int n, int h, int w) const {
        constexpr int PARTS = T::ROWS / T::STATS_ROWS;
        const int down = ceil_div(p.H, p.one_image ? T::ROWS : T::STATS_ROWS);
        if (PARTS == 2 && p.one_image)
            UNROLL_FOR (int k = 0; k < 4; k++) {
                sums[0][k] += sums[PARTS - 1][k];
            }
        UNROLL_FOR (int r = 0; r < PARTS; r++) {
            UNROLL_FOR (float& sum : sums[r]) sum = sum_of_four(sum);
            const int part = h / (p.one_image ? T::ROWS : T::STATS_ROWS) + r;
            if (threadIdx.x & 3 || part >= down || (r && p.one_image)) continue;
            const size_t part_of_all = ((size_t)n * down + part) * p.tiles_w + w / 8;
            double2* const to = (double2*)p.out.stats + part_of_all * p.out.Cout1;
            if (channel < p.out.Cout1) to[channel] = make_double2(sums[r][0], sums[r][1]);
            if (channel + 8 < p.out.Cout1) to[channel + 8] = make_double2(sums[r][2], sums[r][3]);
        }
    }
    // Finishes a tile, one slice of 64 channels after the other. Each result is handed over to the warp that stores.
    INLINE void finish(auto& acc, const TileWalk& tile, auto& pixels, const Results& results, int warpgroup) {
        const int h = tile.h * T::ROWS;
        const int w = tile.w * 8;
        UNROLL_FOR (int b = 0; b < T::OUT_SLICES; b++) {
            const int stage = pixels.hand_over();
            const uint32_t place = pixels.stage(stage).address + T::pixels_at(warpgroup) + lane_place;
            // After the products' stages there are stages that hold an addend or nothing.
            if (work.first_result + b >= work.products) pixels.arrived(warpgroup);
            if (b) load_embedding(tile.n, b);
            if constexpr (T::IS_FP8) { // with a skip connection, conv_tiles_kernel has scaled the sums already
                emb[0] += bias[b][0];
                emb[1] += bias[b][1];
                if (!p.skip.slices) acc.scale(b, factors[b], emb);
            } else if (p.out.emb) acc.add(b, emb);
            if (work.has_addend(b)) add_addend(acc.d[b], place);
            StatSums sums = {};
            if (p.out.stats) round<true>(acc.d[b], place, h, w, sums);
            else round<false>(acc.d[b], place, h, w, sums);
            warp_stored(results.stage(stage, warpgroup).full);
            if (p.out.stats && tile.n < p.B) store_stats(sums, c + b * SLICE_CHANNELS, tile.n, h, w);
        }
    }
};

// The life of one stage of pixels, which holds slice s of a tile. Time goes from left to right. Each line shows one
// role, or one barrier:
//
//   warp 8         acquire, tma_load                                                       acquire: waits .... tma_load
//                         |                                                                                   ^
//   TMA                   +---> the halo arrives ---+                                                         |
//                                                   v                                                         |
//   full barrier   ..... phase n .................. | phase n + 1 ............................................|........
//                                                   v                                                         |
//   warpgroup      arrived: waits ................. wgmma: 9 taps of s, 1 or 2 of s + 1; wgmma_wait<1>; release
//                                                                                                             v
//   empty barrier  ..... phase m ............................................................................ | m + 1
//
// The warpgroup releases the stage while the next slice's products run. After wgmma_wait<1> only the products of the
// latest tap may still run, so the products of all taps of s have ended. The stages of a tile's last OUT_SLICES items
// are used for results, so the warpgroup does not release them. It hands them over, and the warp that stores frees
// them:
//
//   warpgroup      acc.wait | epilogue: writes results into the stage | warp_stored
//                                                                           v
//   warp 9 or 10   results.arrived: waits ................................. tma_store, tma_stores_read, free
//                                                                                                         v
//   warp 8         acquire: waits ....................................................................... tma_load

// A warpgroup's phases, for each of its tiles:
//   1. The sums begin as the bias (FP8: as 0). With resident weights the warpgroup waits for its turn at the tensor
//      cores.
//   2. For each slice and tap: wait for pixels and weights, start their products, release stages that earlier products
//      have read.
//   3. Do the same for the slices of the skip connection, which have one tap each.
//   4. Pass the turn to the other warpgroup, wait for the products, finish the tile (Epilogue).
template <class T> // a ConvTiles
static __global__ void __launch_bounds__(T::THREADS, 1) conv_tiles_kernel(const __grid_constant__ ConvTma p) {
#if __CUDA_ARCH__ == 900
    SharedMemory shared(T::BARRIERS);
    typename T::Pixels pixels(shared, p.pixel_stages, T::UNIT);
    typename T::Weights weights(shared, p.weight_stages, T::RESIDENT ? 0 : 2);
    Results results(shared, p.pixel_stages, 0, 4);
    ready(pixels, weights, results);
    const TileWork<T> work{p};
    const int warp = uniform(threadIdx.x >> 5);
    const int warpgroup = warp >> 2;

    // The warps that load and store.
    if (warp >= T::LOADS) {
        if (T::MOVES_REGISTERS) asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x & 31) return;
        if (warp == T::LOADS) load_tiles<T>(work, pixels, weights);
        else if (warp < T::STORES + 2) store_tiles<T>(work, pixels, results, warp - T::STORES);
        return;
    }

    // The warpgroups that multiply.
    if (T::MOVES_REGISTERS) asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Epilogue<T> epilogue(work);
    await_previous_kernel();
    pixels.pass_over(warpgroup * work.others);
    const Turn<T::RESIDENT> turn(warpgroup);
    bool is_first_tile = true;
    for (TileWalk tile = work.tiles(warpgroup); tile; tile.next()) {
        typedef Accumulators<T::OUT_SLICES, T::PIXELS> Sums;
        Sums acc = T::IS_FP8 ? Sums() : Sums(epilogue.bias); // sums begin as 0 or as the bias
        turn.wait();
        for (int s = 0; s < p.x.slices; s++) {
            const Halo<T::PITCH> halo(pixels.arrived(warpgroup) + T::pixels_at(warpgroup));
            const bool half_slice = T::IS_FP8 && p.x.is_half_slice(s);
#pragma unroll(T::RESIDENT ? T::TAPS : 1)
            for (int tap = 0; tap < T::TAPS; tap++) {
                const uint32_t weight =
                    T::RESIDENT ? weights.kept(s * T::TAPS + tap, is_first_tile) : weights.arrived();
                if constexpr (!T::IS_FP8) acc.template multiply<T::STEPS, T::BACKWARD>(weight, halo.shifted(tap));
                else if (half_slice) acc.template multiply_fp8<2, T::ELEMENT>(weight, halo.shifted(tap));
                else acc.template multiply_fp8<4, T::ELEMENT>(weight, halo.shifted(tap));
                // The products of this tap may still run while the next products are started. After the wait, all
                // earlier products have ended. So the stages that the earlier products have read are released, except
                // the stages for results.
                if (!T::RESIDENT || (s && tap == T::RELEASE_TAP)) wgmma_wait<1>();
                if (!T::RESIDENT && (s || tap)) weights.release();
                if (tap == T::RELEASE_TAP && s && s <= work.first_result) pixels.release();
            }
        }
        // If there is a skip connection, the FP8 sums are scaled here, because its products, which are added next, must
        // not be scaled.
        if (T::IS_FP8 && T::CAN_SKIP && p.skip.slices) {
            acc.wait();
            UNROLL_FOR (int b = 0; b < T::OUT_SLICES; b++) acc.scale(b, epilogue.factors[b], epilogue.bias[b]);
        }
        for (int s = p.x.slices; T::CAN_SKIP && s < work.products; s++) { // the skip connection's slices
            const Halo<8> skip(pixels.arrived(warpgroup));
            const uint32_t weight = weights.kept(p.x.slices * (T::TAPS - 1) + s, is_first_tile);
            acc.template multiply<4, false>(weight, skip.shifted(0));
            wgmma_wait<1>();
            if (s <= work.first_result) pixels.release();
        }
        turn.pass(); // the other warpgroup multiplies while this one finishes
        epilogue.load_embedding(tile.n, 0);
        acc.wait();
        if (!T::RESIDENT) weights.release();
        if (work.first_result >= work.products) pixels.release();
        else warps_sync(2 + warpgroup, 128); // after it, no warp still reads the stages that results are written to
        epilogue.finish(acc, tile, pixels, results, warpgroup);
        pixels.pass_over(work.others);
        is_first_tile = false;
    }
#endif
}

template <class T> static void conv_tiles(const ConvCall& p) {
    const TmaBoxes box{
        .rows = T::ROWS, .columns = 8, .images = 1, .result_channels = SLICE_CHANNELS, .weight_rows = SLICE_CHANNELS};
    ConvTma t = tma_arguments(p, T::BACKWARD, box);
    t.weight_stages = T::RESIDENT ? T::TAPS * t.x.slices + t.skip.slices : T::STREAMED_WEIGHTS;
    t.pixel_stages = T::stages(t.weight_stages);
    t.one_image = T::TAPS == 9 || p.s.out_H() * p.s.out_W() % T::PIXELS == 0;
    const int parts_down = ceil_div(p.H, t.one_image ? T::ROWS : T::STATS_ROWS);
    if (p.out.parts) *p.out.parts = p.B * parts_down * t.tiles_w / p.s.B;
    const int runs = std::min(T::runs(p.Cout), ceil_div(t.tiles, T::UNIT));
    const dim3 grid(runs, ceil_div(p.Cout, SLICE_CHANNELS * T::OUT_SLICES));
    launch(conv_tiles_kernel<T>, grid, T::THREADS, T::shared_bytes(t.pixel_stages, t.weight_stages), t);
}

// ---------------------------------------------------------------------------------------------------------------------
// --- conv_small: 3x3 on images of up to 32 x 32 (sm_90a)
// Used when: images are so small that there are too few tiles for conv_tiles' persistent blocks (pick_conv_small
// decides by costs).
// How: A block computes one tile: 8 x TILE_W pixels of each of IMAGES images, and N output channels. Each warpgroup
//   computes a square of 8 x 8 pixels: D[64 pixels][N channels], A = pixels, B = weights. One more warp loads.
//
//     warps 0 .. 4 WARPGROUPS - 1    multiply; warpgroup wg has square wg % ACROSS of image wg / ACROSS
//     warp 4 WARPGROUPS              one thread loads halos, weights and addends (TMA)
//
//   A step is one tap of a slice, or STEP_TAPS = 3 taps if the products of one tap are short. The weights of the steps
//   pass through a ring of WEIGHT_STAGES stages. At the same time the next slice's halo is loaded:
//
//     shared memory: | barriers | HALOS halos | WEIGHT_STAGES steps of weights | results | pushed sums | shifts |
//
//   SPLIT = 2: the two blocks of a cluster have the same tile, and each of them computes half of the steps. At the end
//   each block sends the sums of N / 2 channels to the other block, and finishes the N / 2 channels that it keeps:
//
//     block 0: steps of the first half    sums of channels 0 .. N - 1     keeps 0 .. N / 2 - 1,  gets the same from 1
//     block 1: steps of the second half   sums of channels 0 .. N - 1     keeps N / 2 .. N - 1,  gets the same from 0
//
//   From the top down: pick_conv_small (section 22) picks a tile. conv_small launches conv_small_kernel. The kernel's
//   warpgroups call multiply_small, which calls Wgmma<N>::add STEP_TAPS x K times for each step.
//   ELEMENT: as in conv_tiles.
// Costs: a tile's halo is read once for every N output channels. The weights of N channels are read once for every
//   tile.
template <bool BACKWARD_, int WARPGROUPS_, int N_, int IMAGES_, int SPLIT_, int PER_SM_,
          Element ELEMENT_ = Element::BF16>
struct SmallTile {
    static constexpr bool BACKWARD = BACKWARD_;
    static constexpr Element ELEMENT = ELEMENT_;
    static constexpr bool IS_FP8 = is_fp8(ELEMENT);       // FP8 or FP8_GRADIENT
    static constexpr int WIDTH = slice_channels(ELEMENT); // channels of a slice
    static constexpr int WARPGROUPS = WARPGROUPS_;
    static constexpr int N = N_;
    static constexpr int IMAGES = IMAGES_;
    static constexpr int SPLIT = SPLIT_;
    static constexpr int PER_SM = PER_SM_;             // blocks on a multiprocessor
    static constexpr int ACROSS = WARPGROUPS / IMAGES; // squares of 8 x 8 pixels side by side in a tile
    static constexpr int TILE_W = ACROSS * 8;
    static constexpr int CONSUMERS = WARPGROUPS * 128; // threads that multiply
    static constexpr int THREADS = CONSUMERS + 32;
    static constexpr int BARRIERS = 64;
    // Halos.
    static constexpr int PITCH = TILE_W + 2; // pixels of a row of the halo
    static constexpr int HALOS = IMAGES == 2 ? 3 : 2;
    static constexpr int HALO_BYTES = PITCH * 10 * IMAGES * SLICE_BYTES;
    static constexpr int HALO_ROOM = whole_swizzles(HALO_BYTES);
    // Results: a block finishes OUT_N channels, which are OUT_GROUPS groups of 8. It stores them in boxes of 64 pixels
    // x BOX channels.
    static constexpr int OUT_N = N / SPLIT;
    static constexpr int OUT_GROUPS = OUT_N / 8;
    static constexpr int BOX = OUT_N % SLICE_CHANNELS == 0 ? SLICE_CHANNELS : SLICE_CHANNELS / 2;
    static constexpr int BOX_BYTES = 64 * BOX * 2;
    static constexpr int STAGED_BYTES = WARPGROUPS * 64 * OUT_N * 2;
    static constexpr int SUMS_BYTES = WARPGROUPS * OUT_N * 8; // sums of one warp per warpgroup: floats (channel, 2)
    static constexpr int PUSHED_BYTES = SPLIT == 2 ? OUT_GROUPS * CONSUMERS * 16 : 0; // sums from the other block
    static constexpr int SHIFTS_BYTES = CONSUMERS * (IS_FP8 ? 16 : 8);                // bias + embedding; FP8: factors
    // The rest of the shared memory is for weights. A step needs the weights of STEP_TAPS taps of a slice. BACKWARD:
    // the weights of a tap are loaded as WEIGHT_BOXES boxes, each of 64 output channels.
    static constexpr int FIXED =
        HALOS * HALO_ROOM + STAGED_BYTES + PUSHED_BYTES + SHIFTS_BYTES + shared_beside(BARRIERS);
    static constexpr int ROOM = hopper_shared(PER_SM) - FIXED;
    static constexpr int WEIGHT_BOXES = (N + SLICE_CHANNELS - 1) / SLICE_CHANNELS;
    static constexpr int STEP_TAPS = N <= 64 && ROOM / (WEIGHT_BOXES * BYTES_OF_64_ROWS) >= 9 ? 3 : 1;
    static constexpr int SLICE_STEPS = 9 / STEP_TAPS; // steps of a slice
    static constexpr int TAP_BYTES = BACKWARD ? WEIGHT_BOXES * BYTES_OF_64_ROWS : N * SLICE_BYTES;
    static constexpr int WEIGHT_BYTES = STEP_TAPS * TAP_BYTES;
    static constexpr int WEIGHT_STAGES = std::min(ROOM / WEIGHT_BYTES, 12 / STEP_TAPS);
    static constexpr int SHARED_BYTES = FIXED + WEIGHT_STAGES * WEIGHT_BYTES;
    static_assert(N <= 2 * CONSUMERS, "a thread has the shifts of two channels at most");
    static_assert(WEIGHT_STAGES > 2 && 4 * SUMS_BYTES <= WEIGHT_STAGES * WEIGHT_BYTES,
                  "the statistics are summed there at last");
};

// A block's work: a tile of pixels, N output channels from c0 on, and the steps first .. end - 1 (all steps, or half of
// them if SPLIT = 2).
template <class T> struct SmallWork {
    const ConvTma& p;
    const bool has_addend = p.out.part1.add1;
    const int cluster_rank = blockIdx.x % T::SPLIT; // SPLIT = 2: this block's rank in its cluster
    const int steps = p.x.slices * T::SLICE_STEPS;
    const int tile = blockIdx.x / T::SPLIT;
    const int first = steps * cluster_rank / T::SPLIT;
    const int end = steps * (cluster_rank + 1) / T::SPLIT;
    const int c0 = blockIdx.y * T::N;
    const int out_c0 = c0 + cluster_rank * T::OUT_N; // the first channel that this block finishes
    const Origin origin = tile_origin(tile, p.tiles_h, p.tiles_w, 8, T::TILE_W, T::IMAGES);
    // Returns the first pixel (image, row, column) of warpgroup wg's square of 8 x 8 pixels.
    INLINE Origin in_image(int wg) const {
        return {origin.n + wg / T::ACROSS, origin.h, origin.w + wg % T::ACROSS * 8};
    }
    INLINE void load_weights(Stage to, int step) const {
        const int slice = step / T::SLICE_STEPS;
        const int tap0 = step % T::SLICE_STEPS * T::STEP_TAPS;
        mbarrier_expect(to.full, T::WEIGHT_BYTES);
        UNROLL_FOR (int i = 0; i < T::STEP_TAPS; i++) {
            const uint32_t place = to.address + i * T::TAP_BYTES;
            if (!T::BACKWARD) tma_load(place, &p.weight, to.full, slice * T::WIDTH, tap0 + i, c0);
            UNROLL_FOR (int k = 0; T::BACKWARD && k < T::WEIGHT_BOXES; k++) {
                tma_load(place + k * BYTES_OF_64_ROWS, &p.weight, to.full, c0 + k * SLICE_CHANNELS, 8 - tap0 - i,
                         slice * SLICE_CHANNELS);
            }
        }
    }
};

// Role: load. Before the call, this thread has started to load the weights of the first WEIGHT_STAGES steps. When the
// loop comes to the seventh tap of a slice, it loads the next slice's halo. For this it waits until a stage for halos
// is free. The stage becomes free after some products. The loads of these products' weights have been started before,
// so the wait ends.
template <class T> INLINE void load_small(const SmallWork<T>& work, auto& halos, auto& weights, const auto& addends) {
    const ConvTma& p = work.p;
    int next = work.first / T::SLICE_STEPS;           // the slice whose halo is loaded next
    const int last = (work.end - 1) / T::SLICE_STEPS; // the last slice of this block's steps
    auto load_halo = [&] {
        const Stage to = halos.acquire();
        mbarrier_expect(to.full, T::HALO_BYTES);
        tma_load(to.address, &p.x.map1, to.full, next++ * T::WIDTH, work.origin.w - 1, work.origin.h - 1,
                 work.origin.n);
    };
    load_halo();
    if (work.has_addend) {
        auto [place, full] = addends.stage(0);
        mbarrier_expect(full, T::STAGED_BYTES);
        for (int wg = 0; wg < T::WARPGROUPS; wg++) {
            const auto [n, h, w] = work.in_image(wg);
            for (int c = 0; c < T::OUT_N; c += T::BOX, place += T::BOX_BYTES) {
                tma_load(place, &p.addends.map1, full, work.out_c0 + c, w, h, n);
            }
        }
    }
    weights.pass_over(T::WEIGHT_STAGES);
    for (int step = work.first; step < work.end; step++) {
        if (next <= last && step >= (next - 1) * T::SLICE_STEPS + 6 / T::STEP_TAPS) load_halo();
        if (step - work.first >= T::WEIGHT_STAGES) work.load_weights(weights.acquire(), step);
    }
}

// Role: multiply. For each tap of this block's steps: d (64 pixels, N output channels) += the tap's pixels (64, input
// channels of a slice) x the tap's weights (input channels of a slice, N).
// K: the number of products for each tap. A product sums over 16 input channels (FP8: over 32).
template <int K, class T>
INLINE void multiply_small(const SmallWork<T>& work, auto& halos, auto& weights, int wg, auto& d) {
    using Product = Wgmma<T::N>;
    // How many steps the tensor cores still have to compute when a warpgroup issues the next step. With fewer steps,
    // the tensor cores would be idle while the warpgroup waits for the next stage and issues the next products.
    constexpr int IN_FLIGHT = T::STEP_TAPS == 1 ? 2 : 1;
    constexpr int B_MAJOR = T::BACKWARD ? MN_MAJOR : K_MAJOR;
    constexpr int B_STEP = T::BACKWARD ? 128 : 2; // from 16 input channels (k) to the next 16, in units of 16 bytes
    constexpr int TAP_STEP = T::TAP_BYTES / 16;   // from a tap's weights to the next tap's weights, in the same units
    const int image = wg / T::ACROSS;
    const int square = wg % T::ACROSS;
    // where in a halo this warpgroup's pixels begin, in bytes
    const int own_pixels = (image * 10 * T::PITCH + square * 8) * SLICE_BYTES;
    int step_of_slice = work.first % T::SLICE_STEPS; // number of the next step within its slice
    int step_done = step_of_slice;                   // number within its slice of the step that is released next
    uint32_t halo = 0;
    for (int step = work.first; step < work.end; step++) {
        if (step == work.first || step_of_slice == 0) halo = halos.arrived() + own_pixels;
        const Operand a = Halo<T::PITCH>(halo).shifted(step_of_slice * T::STEP_TAPS);
        const Operand b = Operand::rows(weights.arrived(), 8, SLICE_CHANNELS);
        if constexpr (T::IS_FP8) {
            using ProductFp8 = WgmmaFp8<T::N, T::ELEMENT, Element::FP8>;
            auto multiply_fp8 = [&]<int STEPS>(std::integral_constant<int, STEPS>) {
                wgmma_fence();
                UNROLL_FOR (int tap = 0; tap < T::STEP_TAPS; tap++)
                    UNROLL_FOR (int k = 0; k < STEPS; k++)
                        ProductFp8::add(d, a.at(tap * 8 + k * 2), b.at(tap * TAP_STEP + k * 2));
                wgmma_commit();
            };
            // Each of the two branches has its own wgmma_fence and wgmma_commit. If they shared one pair, the compiler
            // would insert a wait after each product.
            if (work.p.x.is_half_slice(step / T::SLICE_STEPS)) multiply_fp8(std::integral_constant<int, 2>{});
            else multiply_fp8(std::integral_constant<int, 4>{});
        } else {
            wgmma_fence();
            UNROLL_FOR (int tap = 0; tap < T::STEP_TAPS; tap++)
                UNROLL_FOR (int k = 0; k < K; k++) {
                    Product::template add<K_MAJOR, B_MAJOR>(d, a.at(tap * 8 + k * 2),
                                                            b.at(tap * TAP_STEP + k * B_STEP));
                }
            wgmma_commit();
        }
        wgmma_wait<IN_FLIGHT>();
        if (step - work.first >= IN_FLIGHT) { // the step IN_FLIGHT before this one has ended
            weights.release();
            if (++step_done == T::SLICE_STEPS) {
                step_done = 0;
                halos.release();
            }
        }
        if (++step_of_slice == T::SLICE_STEPS) step_of_slice = 0;
    }
    multiplied<0>(d);
}

// What a warpgroup does with its sums d. Here the rows of d are pixels, and its columns are channels. The warpgroup
// adds the sums of the cluster's other block (SPLIT = 2), the addend, bias and embedding. It rounds the results and
// writes them to boxes of BOX channels in shared memory. Then it adds up the results for the statistics.
//
//   d of lane t, for each group j of 8 channels:   (pixel t / 4, 2 channels), (pixel t / 4 + 8, the same channels)
//   results:   boxes of 64 pixels x BOX channels; a warp has 16 pixels of each box
//
// A thread block runs this code only once, so most of the time is spent on fetching its instructions (20 bytes a
// cycle). To keep the code short, only the part that uses d is unrolled: d must stay in registers. The rest consists of
// loops over the 16 pixels of each warp.
template <class T> struct SmallEpilogue {
    const SmallWork<T>& work;
    const ConvTma& p;
    const int tid = threadIdx.x & 127;
    const int warp = tid >> 5;
    const int lane = tid & 31;
    const Origin at;       // this warpgroup's square of 8 x 8 pixels
    float bias[2] = {};    // bias of the block's channels tid and tid + 128, from out_c0 on
    float emb[2] = {};     // embedding of the same channels; put_shifts adds it to the bias
    float factors[2] = {}; // FP8: factors of the same channels (ConvTma::factors)

    INLINE SmallEpilogue(const SmallWork<T>& work, int wg) : work(work), p(work.p), at(work.in_image(wg)) {
        UNROLL_FOR (int i = 0; i < 2; i++) {
            const int channel = tid + i * 128;
            const int c = work.out_c0 + channel;
            if (channel >= T::OUT_N || c >= p.C || at.n >= p.B) continue;
            if (p.out.bias) bias[i] = p.out.bias[c];
            if (T::IS_FP8) factors[i] = p.factors[c];
            if (p.out.emb) emb[i] = p.out.emb[(size_t)at.n * p.out.emb_stride + c];
        }
    }
    // Writes the shifts (bias + embedding) to shared memory. From there each thread reads the shifts of its channels.
    // FP8: also writes the factors, which lie after the shifts of all warpgroups.
    static constexpr int FACTORS_AT = T::CONSUMERS * 8;
    INLINE void put_shifts(uint32_t shifts) const {
        for (int i = 0, channel = tid; i < 2 && channel < T::OUT_N; i++, channel += 128) {
            PTX("st.shared.f32 [%0], %1;", "r"(shifts + 4 * channel), "f"(bias[i] + emb[i]));
            if (T::IS_FP8) PTX("st.shared.f32 [%0], %1;", "r"(shifts + FACTORS_AT + 4 * channel), "f"(factors[i]));
        }
    }
    // FP8: multiplies each sum by its channel's factor, and adds bias and embedding.
    INLINE void scale(float (&d)[T::N / 2], uint32_t shifts) const {
        UNROLL_FOR (int j = 0; j < T::OUT_GROUPS; j++) {
            const uint32_t place = shifts + (j * 8 + (lane & 3) * 2) * 4;
            const float2 factor = load_shared_2(place + FACTORS_AT);
            const float2 shift = load_shared_2(place);
            UNROLL_FOR (int k = 4 * j; k < 4 * j + 4; k += 2) {
                d[k] = fmaf(d[k], factor.x, shift.x);
                d[k + 1] = fmaf(d[k + 1], factor.y, shift.y);
            }
        }
    }
    // SPLIT = 2: sends the other block the sums of the channels that the other block finishes. Then adds the sums that
    // the other block has sent to the sums that this block has kept.
    INLINE void exchange(float (&d)[T::N / 2], uint32_t pushed) const {
        const uint32_t mine = pushed + threadIdx.x * 16;
        const uint32_t theirs = at_block(mine, 1 - work.cluster_rank);
        UNROLL_FOR (int i = 0; i < T::OUT_GROUPS * 4; i += 4) {
            float v[4];
            UNROLL_FOR (int k = 0; k < 4; k++) {
                const float low = d[i + k];
                const float high = d[T::OUT_GROUPS * 4 + i + k];
                v[k] = work.cluster_rank ? low : high;
                d[i + k] = work.cluster_rank ? high : low;
            }
            const uint32_t to = theirs + i / 4 * T::CONSUMERS * 16;
            PTX("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};", "r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]));
        }
        cluster_sync();
        UNROLL_FOR (int i = 0; i < T::OUT_GROUPS * 4; i += 4) {
            float v[4];
            unpack<float>(v, load_shared(mine + i / 4 * T::CONSUMERS * 16));
            UNROLL_FOR (int k = 0; k < 4; k++) d[i + k] += v[k];
        }
    }
    // Adds the addend, bias and embedding, and rounds. (FP8: scale has already added bias and embedding.) The addend
    // lies in shared memory, and the results are written over it.
    INLINE void round(float (&d)[T::N / 2], uint32_t results, uint32_t shifts) const {
        // ldmatrix and stmatrix move four matrices of 8 x 8: (pixels 0-7, group j), (pixels 8-15, group j), (pixels
        // 0-7, group j + 1), (pixels 8-15, group j + 1), where group j is the channels 8 j to 8 j + 7. Each lane gives
        // them the address of one row of a matrix; place returns this address.
        auto place = [&](int j) {
            const uint32_t in_box = box_place<T::BOX>(warp * 16 + (lane & 15), j * 8 % T::BOX / 8 + (lane >> 4));
            return results + j * 8 / T::BOX * T::BOX_BYTES + in_box;
        };
        if (work.has_addend)
            UNROLL_FOR (int j = 0; j < T::OUT_GROUPS; j += 2) {
                uint32_t v[4];
                ldmatrix(v, v + 2, place(j));
                UNROLL_FOR (int i = 0; i < 4; i++) {
                    add_bf16(d + 4 * j + 2 * i, v[i]);
                }
            }
        UNROLL_FOR (int j = 0; j < T::OUT_GROUPS; j += 2) {
            uint32_t v[4];
            UNROLL_FOR (int i = 0; i < 2; i++) {
                const float* const sums = d + 4 * (j + i);
                if constexpr (T::IS_FP8) {
                    v[2 * i] = pack_bf16(sums[0], sums[1]);
                    v[2 * i + 1] = pack_bf16(sums[2], sums[3]);
                } else {
                    const int channel = (j + i) * 8 + (lane & 3) * 2;
                    const float2 s = load_shared_2(shifts + channel * 4);
                    UNROLL_FOR (int k = 0; k < 2; k++) {
                        v[2 * i + k] = pack_bf16(sums[2 * k] + s.x, sums[2 * k + 1] + s.y);
                    }
                }
            }
            stmatrix(place(j), v);
        }
    }
    // Adds up the results of each warp's 16 pixels. For each channel it writes the sum of the results and the sum of
    // their squares to shared memory: (warp of the warpgroup, channel, 2). A lane reads two neighbouring channels, of
    // each pixel or (if PIXELS_AT_ONCE = 2) of every second pixel.
    INLINE void sum_pixels(uint32_t results, uint32_t sums) const {
        constexpr int WORDS = T::BOX / 2; // pairs of channels in a row of a box
        constexpr int PIXELS_AT_ONCE = 32 / WORDS;
        constexpr int LOADS = 8 / PIXELS_AT_ONCE;
        const int c = lane % WORDS * 2;
        const int rows = at.n < p.B ? p.H - (at.h + warp * 2) : 0; // how many of the warp's two rows are in the image
        const int columns = p.W - at.w;
        NO_UNROLL_FOR (int box = 0; box < T::OUT_N / T::BOX; box++) {
            float t[4] = {}; // channel c: sum, sum of squares; the same of channel c + 1
            NO_UNROLL_FOR (int i0 = lane / WORDS; i0 < 16; i0 += 8) {
                uint32_t v[LOADS];
                UNROLL_FOR (int k = 0; k < LOADS; k++) {
                    const int place = box_place<T::BOX>(warp * 16 + i0 + k * PIXELS_AT_ONCE, c / 8) + c % 8 * 2;
                    const uint32_t from = results + box * T::BOX_BYTES + place;
                    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v[k]) : "r"(from) : "memory");
                }
                UNROLL_FOR (int k = 0; k < LOADS; k++) {
                    const int i = i0 + k * PIXELS_AT_ONCE; // number among the warp's pixels
                    const float2 x = unpack_bf16(i / 8 < rows && i % 8 < columns ? v[k] : 0);
                    t[0] += x.x;
                    t[1] += x.x * x.x;
                    t[2] += x.y;
                    t[3] += x.y * x.y;
                }
            }
            if (PIXELS_AT_ONCE == 2)
                UNROLL_FOR (int k = 0; k < 4; k++) {
                    t[k] = lane_sum<16>(t[k]);
                }
            if (lane < WORDS) store_shared(sums + warp * (T::OUT_N * 8) + (box * T::BOX + c) * 8, pack<float>(t));
        }
    }
    // Adds up the four warps' sums and stores them. Each square of 8 x 8 pixels has its own part in the statistics.
    INLINE void store_stats(uint32_t sums) const {
        const int across = ceil_div(p.W, 8);
        const int parts = across * ceil_div(p.H, 8);
        const int part = at.h / 8 * across + at.w / 8;
        if (at.n >= p.B || at.h >= p.H || at.w >= p.W) return;
        for (int i = tid; i < T::OUT_N * 2; i += 128) {
            float t[4];
            UNROLL_FOR (int k = 0; k < 4; k++) {
                t[k] = load_float(sums + k * (T::OUT_N * 8) + i * 4);
            }
            const int c = work.out_c0 + i / 2;
            double* const to = p.out.stats + (((size_t)at.n * parts + part) * p.C + c) * 2 + i % 2;
            if (c < p.C) *to = (t[0] + t[1]) + (t[2] + t[3]);
        }
    }
};

// Phases:
//   1. One thread initialises the barriers and starts to load the weights of the first WEIGHT_STAGES steps.
//   2. The loading warp loads halos, addends, and further weights. The warpgroups multiply all steps.
//   3. Each warpgroup exchanges sums with the cluster's other block (SPLIT = 2), adds bias, embedding and addend, and
//      rounds. Then it adds up the results for the statistics.
//   4. One thread of each warpgroup stores the results by TMA. All threads of the warpgroup store the statistics.
template <class T, int K_STEPS> // T: a SmallTile; K_STEPS: products for each tap, as ConvTiles::STEPS
static __global__ void __launch_bounds__(T::THREADS, T::PER_SM) conv_small_kernel(const __grid_constant__ ConvTma p) {
#if __CUDA_ARCH__ == 900
    SharedMemory shared(T::BARRIERS);
    Pipeline<T::HALO_ROOM> halos(shared, T::HALOS, T::WARPGROUPS);
    Pipeline<T::WEIGHT_BYTES> weights(shared, T::WEIGHT_STAGES, T::WARPGROUPS);
    Pipeline<T::STAGED_BYTES> addends(shared, 1, 0); // results are written over the addends
    const uint32_t pushed = shared.tiles_at;
    const uint32_t all_shifts = pushed + T::PUSHED_BYTES;
    const SmallWork<T> work{p};
    if (threadIdx.x == T::CONSUMERS) {
        init_barriers(halos, weights, addends);
        // The previous kernel does not write weights, so these loads need not wait for it.
        for (int i = 0; i < T::WEIGHT_STAGES && work.first + i < work.end; i++)
            work.load_weights(weights.stage(i), work.first + i);
        prefetch_tensor_map(&p.x.map1);
        prefetch_tensor_map(&p.results.map1);
        if (work.has_addend) prefetch_tensor_map(&p.addends.map1);
    }
    if (T::SPLIT == 2) cluster_sync(); // the barriers can be used now
    else __syncthreads();

    await_previous_kernel();
    const int warp = threadIdx.x >> 5;
    const int wg = warp >> 2;

    // The warp that loads.
    if (warp == T::WARPGROUPS * 4) {
        if ((threadIdx.x & 31) == 0) load_small(work, halos, weights, addends);
        __syncwarp();
        if (T::SPLIT == 2) cluster_sync(); // the cluster_sync in exchange needs all threads of both blocks
        return;
    }

    // The warpgroups that multiply.
    const SmallEpilogue<T> epilogue(work, wg);
    float acc[T::N / 2] = {};
    multiply_small<K_STEPS>(work, halos, weights, wg, acc);

    // The sums in acc become results.
    const uint32_t shifts = all_shifts + wg * 1024;
    const uint32_t results = addends.stage(0).address + wg * 64 * T::OUT_N * 2;
    epilogue.put_shifts(shifts);
    if constexpr (T::SPLIT == 2) epilogue.exchange(acc, pushed);
    addends.kept(0, work.has_addend);
    // After this barrier all shifts have been written, and no warpgroup reads weights any more. So the sums of the
    // statistics may be written where the weights have been.
    warps_sync(1, T::CONSUMERS);
    if constexpr (T::IS_FP8) epilogue.scale(acc, shifts);
    epilogue.round(acc, results, shifts);
    const uint32_t sums = weights.stage(0).address + wg * 4 * (T::OUT_N * 8);
    __syncwarp();
    if (p.out.stats) epilogue.sum_pixels(results, sums);
    fence_async();
    warps_sync(2 + wg, 128);
    // All threads of the warpgroup have written their results to shared memory. Now one thread stores them.
    for (int c = 0; epilogue.tid == 0 && c < T::OUT_N; c += T::BOX) {
        const auto [n, h, w] = epilogue.at;
        const uint32_t from = results + c / T::BOX * T::BOX_BYTES;
        if (work.out_c0 + c < p.C) tma_store(&p.results.map1, from, work.out_c0 + c, w, h, n);
    }
    if (p.out.stats) epilogue.store_stats(sums);
    tma_stores_read();
#endif
}

template <class T> static void conv_small(const ConvCall& p) {
    const TmaBoxes box{
        .rows = 8, .columns = T::TILE_W, .images = T::IMAGES, .result_channels = T::BOX, .weight_rows = T::N};
    const ConvTma t = tma_arguments(p, T::BACKWARD, box);
    const dim3 grid(t.tiles * T::SPLIT, ceil_div(p.Cout, T::N));
    if (p.out.parts) *p.out.parts = ceil_div(p.H, 8) * ceil_div(p.W, 8);
    // With 32 input channels, half a slice, two products for each tap are enough. Wide tiles and FP8 tiles have no such
    // version.
    constexpr int STEPS_OF_32 = T::N <= 64 && !T::IS_FP8 ? 2 : 4;
    auto kernel = p.Cin1 == 32 ? conv_small_kernel<T, STEPS_OF_32> : conv_small_kernel<T, 4>;
    launch_on(MAIN_STREAM, T::SPLIT, kernel, grid, T::THREADS, T::SHARED_BYTES, t);
}

// ---------------------------------------------------------------------------------------------------------------------
// --- conv_weight_tma: weight gradients (sm_90a)
// dweight[co, tap, ci] = sum over the output's pixels p of dout[p, co] * x[source(p, tap), ci]
//
// Used when: bf16, stride 1, many channels on both sides; 3x3 of one input, or 1x1.
// How: A = dout and B = x. The product sums over pixels (k). Both operands are read as they lie in memory, where a
//   pixel is a row of 64 channels; wgmma transposes them. A warpgroup's D[64 Cout][192] is
//     3x3   three taps of a filter row x 64 Cin. The three thirds of B are the same halo, as the taps kw = 0, 1, 2 read
//           it. Each third begins one pixel after the previous one, so the descriptor's "leading" distance is ONE PIXEL
//     1x1   up to 192 Cin. The three thirds of B are three slices of x
//
//     D of a 3x3's filter row:    | kw = 0: 64 Cin | kw = 1: 64 Cin | kw = 2: 64 Cin |
//     D of a 1x1:                 | Cin 0 .. 63    | Cin 64 .. 127  | Cin 128 .. 191 |     x 64 Cout rows
//
//   A block has WARPGROUPS warpgroups and a range of pixel tiles:
//     1     The block computes one of these products.
//     3     The block computes up to three: for a 3x3 all three filter rows, for a 1x1 up to 192 Cout. It loads fewer
//           bytes for each product (3x3: about a third, 1x1: half), which is good for large tensors. But each range has
//           fewer blocks. So more ranges are needed to fill the GPU, and up to three times as many partials.
//   One warp loads. In the blocks of filter row 0 and input tile 0, further warps sum dout over the pixels: this is the
//   bias gradient. If there is only one range, TMA stores the sums in dweight. Otherwise the sums are partials, which
//   conv_weight_sum adds up. One launch computes several layers, since a small layer alone would leave most of the GPU
//   idle.
//
//   Shared memory: | barriers | a ring of STAGES, each a pixel tile: X_PARTS slices of x, DOUT_PARTS slices of dout |
// Costs: the time to read x and dout from the L2 (large tensors: from memory), or the time of the products, whichever
//   is longer. In addition the time to write the partials and to add them up.
template <int KERNEL_, int WARPGROUPS_, int TILE_W_, int STAGES_> struct WeightTile {
    static constexpr int KERNEL = KERNEL_;
    static constexpr int WARPGROUPS = WARPGROUPS_;
    static constexpr int STAGES = STAGES_;
    // A pixel tile.
    static constexpr int TILE_H = 8;
    static constexpr int TILE_W = TILE_W_;
    static constexpr int PIXELS = TILE_H * TILE_W;
    static constexpr bool IS_3X3 = KERNEL == 3;              // a product computes the three taps of a filter row
    static constexpr int ROWS = IS_3X3 ? 3 / WARPGROUPS : 1; // blocks that divide the filter rows among them
    // The order of the warps: first the warps that multiply, then the warp that loads (LOADER), then the warps that sum
    // dout for the bias gradient.
    static constexpr int LOADER = 4 * WARPGROUPS;
    static constexpr int BIAS_WARPS_OF_3 = IS_3X3 ? 2 : 3; // BIAS_WARPS, if WARPGROUPS = 3
    static constexpr int BIAS_WARPS = WARPGROUPS == 1 ? 4 : BIAS_WARPS_OF_3;
    static constexpr int THREADS = (LOADER + 1 + BIAS_WARPS) * 32;
    // A stage: X_PARTS slices of x with their border, DOUT_PARTS slices of dout.
    static constexpr int BORDER = KERNEL / 2;
    static constexpr int PITCH = TILE_W + 2 * BORDER;                 // pixels of a row of x
    static constexpr int HALO_H = TILE_H + BORDER * (WARPGROUPS - 1); // rows of x that 1 or 3 filter rows read
    static constexpr int X_PARTS = IS_3X3 ? 1 : 3;
    static constexpr int DOUT_PARTS = IS_3X3 ? 1 : WARPGROUPS;
    static constexpr int X_LOADED = PITCH * HALO_H * SLICE_BYTES;
    static constexpr int X_BYTES = whole_swizzles(X_LOADED);
    static constexpr int DOUT_AT = X_PARTS * X_BYTES;
    static constexpr int DOUT_BYTES = PIXELS * SLICE_BYTES;
    static constexpr int STAGE_BYTES = DOUT_AT + DOUT_PARTS * DOUT_BYTES;
    static constexpr int BARRIERS = 32;
    static constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + shared_beside(BARRIERS);
    static_assert(SHARED_BYTES <= hopper_shared(1), "a multiprocessor has room for one block");
    static_assert(2 * STAGES <= BARRIERS, "a stage has two barriers");
};
struct ConvWeightTma {
    TmaParts x;
    CUtensorMap dout;
    CUtensorMap dweight; // fp32, in boxes of 32 Cin x the taps of a filter row x 64 Cout
    ConvWeight p;
};
typedef WeightBatch<ConvWeightTma> TmaBatch;

// A block's work: which products it computes, and for which range of pixel tiles.
//
//   block (its number in the layer) = split + splits * (row0 + ROWS * (input group + input_groups * output group))
template <class T> struct WeightBlock {
    const ConvWeightTma& maps;
    const int block; // its number in the layer
    const ConvWeight& p = maps.p;
    int split = block % p.splits;           // number of its range of pixel tiles
    int row0 = block / p.splits % T::ROWS;  // its first filter row
    int group = block / p.splits / T::ROWS; // number of its group of tiles of channels
    int output_group = group / p.input_groups;
    int co_tile = output_group * p.block_co;                            // its first tile of 64 output channels
    int ci_tile = (group - output_group * p.input_groups) * p.block_ci; // its first tile of 64 input channels
    int first = first_pixel_tile(p, split);                             // pixel tiles first .. end - 1
    int end = first_pixel_tile(p, split + 1);
    int parts = min(p.block_ci, p.channel_tiles - ci_tile);                          // how many tiles of Cin it has
    int dout_parts = T::DOUT_PARTS == 1 ? 1 : min(p.block_co, p.co_tiles - co_tile); // how many tiles of Cout it has
    int busy_warpgroups = T::IS_3X3 ? T::WARPGROUPS : dout_parts;                    // how many warpgroups have work
    int bias_warps = T::DOUT_PARTS > 1 ? dout_parts : T::BIAS_WARPS; // how many warps sum dout, if sums_bias
    bool sums_bias = row0 == 0 && ci_tile == 0;
    bool final = p.splits == 1; // the block's sums are the whole gradients, not partials
    INLINE explicit WeightBlock(const WorkBlock<ConvWeightTma>& own) : maps(own.work), block(own.block) {}
    // Stores v, which is the sum of channel c of dout over the pixels of image n that lie in this block's range. (If
    // bias_images is 1, all images are treated as image 0.)
    INLINE void put_image_sum(int n, int c, float v) const {
        if (c >= p.shape.Cout) return;
        if (!final) p.bias_partial[(size_t)(split + n) * p.shape.Cout + c] = v;
        else if (p.demb) p.demb[(size_t)n * p.emb_stride + c] = v;
    }
};

// Role: load. All other threads wait for the one thread that loads. So its loop has no divisions (TileWalk).
template <class T> INLINE void load_weight_tiles(const WeightBlock<T>& work, auto& stages) {
    const ConvWeightTma& maps = work.maps;
    TileWalk tile(work.p.tiles_h, work.p.tiles_w, work.first, 1, work.end);
    await_previous_kernel();
    for (; tile; tile.next()) {
        const int h = tile.h * T::TILE_H;
        const int w = tile.w * T::TILE_W;
        const int h_x = h + work.row0 - T::BORDER;
        const int w_x = w - T::BORDER;
        const Stage to = stages.acquire();
        mbarrier_expect(to.full, work.dout_parts * T::DOUT_BYTES + work.parts * T::X_LOADED);
        for (int i = 0; i < (T::IS_3X3 ? 1 : work.parts); i++) {
            const int slice = work.ci_tile + i;
            tma_load(to.address + i * T::X_BYTES, maps.x.map(slice), to.full, maps.x.channel(slice), w_x, h_x, tile.n);
        }
        const uint32_t dout = to.address + T::DOUT_AT;
        for (int i = 0; i < work.dout_parts; i++) {
            const int co = (work.co_tile + i) * SLICE_CHANNELS;
            tma_load(dout + i * T::DOUT_BYTES, &maps.dout, to.full, co, w, h, tile.n);
        }
    }
}

// Adds up 64 channels of dout over the pixels of an image (sum), and over all images (total). WARPS warps share the 64
// channels: each warp adds up CHUNKS chunks of 8 channels. A lane adds up one chunk of every (4 WARPS)-th pixel. The
// pixels are distributed so that any 8 neighbouring lanes read from all banks. At the end of an image the lanes with
// the same chunk add up their sums: pairs of lanes exchange halves of their channels (halve), until each lane has the
// full sums of VALUES channels, which begin with channel c.
template <class T> struct ChannelSums {
    static constexpr int WARPS = T::DOUT_PARTS > 1 ? 1 : T::BIAS_WARPS;
    static constexpr int CHUNKS = 8 / WARPS;
    static constexpr int VALUES = WARPS == 1 ? 2 : 1;
    const WeightBlock<T>& work;
    const int bias_warp; // this warp's number among the warps that sum
    const int lane = threadIdx.x & 31;
    const int eight = lane >> 3;
    const int tile = WARPS == 1 ? bias_warp : 0; // number of the warp's tile of 64 channels
    const int chunk = (WARPS == 1 ? 0 : bias_warp * CHUNKS) + lane % CHUNKS;
    const int pixel = lane % 8 / CHUNKS * CHUNKS + eight % CHUNKS + eight / CHUNKS * 8;
    const int c = (work.co_tile + tile) * SLICE_CHANNELS + chunk * 8 + (lane & (WARPS == 1 ? 24 : 28)) / 4;
    float sum[8] = {};
    float total[VALUES] = {};

    INLINE void add(uint32_t dout) {
        UNROLL_FOR (int i = 0; i < T::PIXELS; i += 4 * WARPS) {
            float x[8];
            unpack<bf16>(x, load_shared(dout + tile * T::DOUT_BYTES + box_place<SLICE_CHANNELS>(i + pixel, chunk)));
            UNROLL_FOR (int k = 0; k < 8; k++) sum[k] += x[k];
        }
    }
    INLINE void end_image(int n) {
        halve<4>(sum, 16);
        halve<2>(sum, 8);
        if (WARPS > 1) halve<1>(sum, 4);
        if (WARPS == 4) sum[0] = lane_sum<2>(sum[0]);
        UNROLL_FOR (int k = 0; k < VALUES; k++) {
            total[k] += sum[k];
            work.put_image_sum(n, c + k, sum[k]);
        }
        UNROLL_FOR (float& x : sum) x = 0;
    }
};

// Role: sum dout for the bias gradient, one pixel tile after the other.
template <class T> INLINE void sum_bias(const WeightBlock<T>& work, auto& stages, ChannelSums<T> sums) {
    const int image_tiles = work.p.pixel_tiles / work.p.bias_images;
    int n = work.first / image_tiles;
    int left = (n + 1) * image_tiles - work.first; // how many pixel tiles of image n remain
    for (int t = work.first; t < work.end; t++) {
        sums.add(stages.arrived() + T::DOUT_AT);
        __syncwarp();
        stages.release((threadIdx.x & 31) == 0);
        if (--left && t + 1 < work.end) continue;
        sums.end_image(n++);
        left = image_tiles;
    }
    if (!work.final) return;
    // Tells the warpgroups that this warp has read all tiles.
    warps_arrive(2, 128 * work.busy_warpgroups + 32 * work.bias_warps);
    UNROLL_FOR (int k = 0; k < sums.VALUES; k++)
        if (sums.c + k < work.p.shape.Cout) work.p.dbias[sums.c + k] = sums.total[k];
}

// Role: multiply. d = dout (64 Cout, pixels) * x (pixels, 2 M columns). In a 3x3 the columns are three taps of 64 Cin
// each, and warpgroup wg computes filter row row0 + wg. In a 1x1 the columns are up to three tiles of 64 Cin, and
// warpgroup wg computes tile wg of the block's tiles of Cout.
template <class T, int M> INLINE void multiply_tiles(const WeightBlock<T>& work, auto& stages, int wg, float (&d)[M]) {
    const int x_at = T::IS_3X3 ? wg * T::PITCH * SLICE_BYTES : 0;
    const int dout_at = T::DOUT_AT + (T::IS_3X3 ? 0 : wg * T::DOUT_BYTES);
    for (int t = work.first; t < work.end; t++) {
        const uint32_t tile = stages.arrived();
        const Operand x = Operand::rows(tile + x_at, T::PITCH, T::IS_3X3 ? 1 : T::X_BYTES / SLICE_BYTES);
        const Operand dout = Operand::rows(tile + dout_at, T::TILE_W);
        wgmma_fence();
        UNROLL_FOR (int r = 0; r < T::TILE_H; r += 2) // k = 16: 8 pixels of a row and the 8 pixels below them
            UNROLL_FOR (int c = 0; c < T::TILE_W; c += 8) {
                const uint64_t a = dout.at((r * T::TILE_W + c) * 8);
                const uint64_t b = x.at((r * T::PITCH + c) * 8);
                Wgmma<2 * M>::template add<MN_MAJOR, MN_MAJOR>(d, a, b);
            }
        wgmma_commit();
        wgmma_wait<2>();
        if (t - work.first >= 2) stages.release();
    }
    multiplied<0>(d);
}

// Writes the sums of the block's range to the partials (splits, tiles, taps, 1024 fragments), in the order of
// weight_place.
template <class T> INLINE void put_partial(const WeightBlock<T>& work, int row, int co_tile, const float* d) {
    const ConvWeight& p = work.p;
    const int warp = threadIdx.x / 32 % 4;
    const int tile = co_tile * p.channel_tiles + work.ci_tile;
    float4* const tiles = p.partial + (((size_t)work.split * p.tiles + tile) * p.taps + row * 3) * 1024;
    float4* const to = tiles + (warp / 2 * 8 + warp % 2 * 4) * 32 + threadIdx.x % 32;
    UNROLL_FOR (int f = 0; f < 24; f++)
        if (T::IS_3X3 || f / 8 < work.parts) // each third of D (f / 8) is another tap or tile, 1024 fragments long
            store_whole(to + f / 8 * 1024 + f % 8 / 4 * 512 + f % 4 * 32, (const float4&)d[4 * f]);
}

// Stores all sums in dweight, by TMA. First the sums are written to shared memory, where the pixel tiles have been, as
// boxes of 32 Cin with rows of 128 bytes. A 3x3 has a row for each (Cout, tap), and a 1x1 has a row for each Cout.
// Fragment f of this thread lies in third f / 8 of D (a tap, or 64 Cin). It holds output channels co and co + 8 for two
// input channels: f % 8 * 8 + lane % 4 * 2 and the next one.
template <class T> INLINE void put_dweight(const auto& work, int row, int co_tile, float* d, uint32_t boxes) {
    constexpr int BOX_BYTES = (T::IS_3X3 ? 3 : 1) * BYTES_OF_64_ROWS;
    const ConvWeight& p = work.p;
    const TmaParts& x = work.maps.x;
    const int lane = threadIdx.x % 32;
    const int co = threadIdx.x / 32 % 4 * 16 + lane / 4;
    UNROLL_FOR (int f = 0; f < 24; f++)
        UNROLL_FOR (int i = 0; i < 2; i++) {
            const int third = f / 8;
            const int box = f % 8 / 4 + (T::IS_3X3 ? 0 : third * 2);
            const int r = T::IS_3X3 ? (co + 8 * i) * 3 + third : co + 8 * i;
            const uint32_t in_box = box_place<SLICE_CHANNELS>(r, f % 4 * 2 + (lane >> 1 & 1)) + lane % 2 * 8;
            const uint32_t to = boxes + box * BOX_BYTES + in_box;
            PTX("st.shared.v2.f32 [%0], {%1,%2};", "r"(to), "f"(d[4 * f + 2 * i]), "f"(d[4 * f + 2 * i + 1]));
        }
    fence_async();
    warps_sync(3 + threadIdx.x / 128, 128);
    if (threadIdx.x % 128) return;
    for (int box = 0; box < (T::IS_3X3 ? 2 : 2 * work.parts); box++) {
        const int slice = work.ci_tile + box / 2;
        const int box_channel = box % 2 * SLICE_CHANNELS / 2; // its first one: a box has half of a slice's
        const int ci = x.row(slice) + box_channel;
        if (x.channel(slice) + box_channel >= (x.is_second(slice) ? p.shape.C2 : p.shape.C1)) continue;
        tma_store(&work.maps.dweight, boxes + box * BOX_BYTES, ci, row * 3, co_tile * SLICE_CHANNELS);
    }
    tma_stores_read();
}

// Roles: warps 0 .. 4 WARPGROUPS - 1 multiply, warp LOADER loads, and the BIAS_WARPS warps after it sum dout. After all
// pixel tiles of the range, each warpgroup writes its sums to dweight or to the partials.
template <class T> // T: a WeightTile
static __global__ void __launch_bounds__(T::THREADS, 1) conv_weight_tma_kernel(const __grid_constant__ TmaBatch b) {
#if __CUDA_ARCH__ == 900
    const WeightBlock<T> work(b.work_of_this_block());
    SharedMemory shared(T::BARRIERS);
    Pipeline<T::STAGE_BYTES> stages(shared, T::STAGES, work.busy_warpgroups + (work.sums_bias ? work.bias_warps : 0));
    if (threadIdx.x == T::LOADER * 32) {
        prefetch_tensor_map(work.maps.x.map(work.ci_tile));
        prefetch_tensor_map(&work.maps.dout);
    }
    ready(stages);

    const int warp = threadIdx.x >> 5;
    const int bias_warp = warp - T::LOADER - 1;
    if (warp == T::LOADER) {
        if ((threadIdx.x & 31) == 0) load_weight_tiles<T>(work, stages);
        return;
    }
    await_previous_kernel();
    if (warp > T::LOADER) {
        if (work.sums_bias && bias_warp < work.bias_warps) sum_bias<T>(work, stages, ChannelSums<T>{work, bias_warp});
        return;
    }
    const int wg = T::WARPGROUPS == 1 ? 0 : uniform(warp / 4);
    if (wg >= work.busy_warpgroups) return;
    float acc[96] = {};
    if (T::IS_3X3 || work.parts == 3) multiply_tiles<T>(work, stages, wg, acc);
    else if (work.parts == 2) multiply_tiles<T>(work, stages, wg, (float(&)[64])acc);
    else multiply_tiles<T>(work, stages, wg, (float(&)[32])acc);
    const int row = work.row0 + (T::IS_3X3 ? wg : 0);
    const int co_tile = work.co_tile + (T::IS_3X3 ? 0 : wg);
    if (!work.final) return put_partial<T>(work, row, co_tile, acc);
    // After this barrier no warp reads the tiles any more.
    warps_sync(2, 128 * work.busy_warpgroups + (work.sums_bias ? 32 * work.bias_warps : 0));
    put_dweight<T>(work, row, co_tile, acc, stages.stage(0).address + wg * 2 * 3 * BYTES_OF_64_ROWS);
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// --- FP8 in training: weights and gradients are rounded
// Used when: round_weights at the beginning of each step. round_gradient before an input gradient, if the kernel that
//   wrote dout did not write its FP8 form, too.
// How: A block of round_weights_kernel rounds a tile of 64 output channels x 64 input channels of one tap. Without
//   turned_alone it writes the tile directly in the order of the weights. For the other order the tile goes through
//   shared memory. One launch rounds the weights of all layers.
// Costs: memory traffic. For each weight, 2 bytes are read, and 2 are written (1 with turned_alone).

constexpr int ROUNDING_TILE = 64;
constexpr int MAX_ROUNDINGS = 96; // of a launch; adm64 has 69 such convolutions
struct RoundingList {
    struct Work : WeightRounding {
        int first_tile; // the number of its first tile
        HD int tiles_in() const { return (Cin + ROUNDING_TILE - 1) / ROUNDING_TILE; }
        HD int tiles_out() const { return (Cout + ROUNDING_TILE - 1) / ROUNDING_TILE; }
        int tiles() const { return tiles_out() * 9 * tiles_in(); }
    } works[MAX_ROUNDINGS];
    int count = 0;
    int tiles = 0; // of all works
};

// There is one block for each tile. list is a __grid_constant__, so it stays in constant memory.
static __global__ void __launch_bounds__(256) round_weights_kernel(uint8_t* weights, uint8_t* turned, // flat
                                                                   const bf16* copy,                  // flat
                                                                   const __grid_constant__ RoundingList list) {
    constexpr int TILE = ROUNDING_TILE;
    constexpr int PITCH = TILE + 8;
    __shared__ __align__(8) uint8_t tile[TILE][PITCH]; // (output channel, input channel)
    // The work to which the tile belongs is found by halving.
    int low = 0;
    for (int end = list.count; end - low > 1;) {
        const int middle = (low + end) / 2;
        if ((int)blockIdx.x < list.works[middle].first_tile) end = middle;
        else low = middle;
    }
    const RoundingList::Work& work = list.works[low];
    const int index = blockIdx.x - work.first_tile; // (tile of output channels, tap, tile of input channels)
    const int ci0 = index % work.tiles_in() * TILE;
    const int tap = index / work.tiles_in() % 9;
    const int co0 = index / work.tiles_in() / 9 * TILE;
    await_previous_kernel();

    // A thread rounds 8 neighbouring input channels of two output channels.
    const int column = threadIdx.x % 8 * 8;
    UNROLL_FOR (int i = 0; i < 2; i++) {
        const int row = threadIdx.x / 8 + i * 32;
        const int co = co0 + row;
        const int ci = ci0 + column;
        if (co >= work.Cout || ci >= work.Cin) continue;
        const size_t at = work.offset + ((size_t)co * 9 + tap) * work.Cin + ci;
        float v[8];
        unpack<bf16>(v, load16(copy + at));
        const uint2 rounded = scaled_to_fp8(v, FP8_WEIGHT_FACTOR);
        if (!work.turned_alone) store_whole(weights + at, rounded);
        *(uint2*)&tile[row][column] = rounded;
    }
    __syncthreads();
    // A thread writes 16 neighbouring output channels of one input channel.
    const int ci = ci0 + (int)threadIdx.x / 4;
    const int co = co0 + (int)threadIdx.x % 4 * 16;
    if (ci >= work.Cin || co >= work.Cout) return;
    uint32_t words[4];
    UNROLL_FOR (int i = 0; i < 4; i++) {
        words[i] = 0;
        UNROLL_FOR (int k = 0; k < 4; k++) {
            words[i] |= (uint32_t)tile[co - co0 + 4 * i + k][ci - ci0] << 8 * k;
        }
    }
    store_whole(turned + work.offset + ((size_t)ci * 9 + 8 - tap) * work.Cout + co,
                make_uint4(words[0], words[1], words[2], words[3]));
}

static void round_weights(uint8_t* weights, uint8_t* turned, const act* copy,
                          const std::vector<WeightRounding>& works) {
    if (!act_has_wgmma()) die("internal error: FP8 is for Hopper");
    RoundingList list;
    for (const WeightRounding& w : works) {
        list.works[list.count] = {w, list.tiles};
        list.tiles += list.works[list.count].tiles();
        list.count++;
        if (list.count < MAX_ROUNDINGS && &w != &works.back()) continue;
        launch(round_weights_kernel, list.tiles, 256, 0, weights, turned, copy, list);
        list = {};
    }
}

// A thread rounds 16 numbers; n is a multiple of 16.
static void round_gradient(Fp8Copy fp8, const act* dout, size_t n) {
    each(n / 16, [=] __device__(size_t i) {
        uint2 rounded[2];
        UNROLL_FOR (int k = 0; k < 2; k++) {
            float v[8];
            unpack<bf16>(v, load16((const bf16*)dout + i * 16 + k * 8));
            rounded[k] = scaled_to_fp8<Element::FP8_GRADIENT>(v, *fp8.factor);
        }
        store_whole(fp8.bytes + i * 16, make_uint4(rounded[0].x, rounded[0].y, rounded[1].x, rounded[1].y));
    });
}

// =====================================================================================================================
// 21. The optimiser

// ---------------------------------------------------------------------------------------------------------------------
// --- adamw: norm of the gradient, the step's verdict, AdamW, averages
// Used when: at the end of every training step.
// How: The gradient is summed in stretches of a fixed size (the comments above step_gradients give the reason). The GPU
//   decides whether and how to update (judge_step), so that the host need not wait.
// Costs: memory traffic: five arrays are read, and four arrays and the bf16 copy are written.

// sum = [the old sum +] the gradients of all ranks, added in the order of the ranks. squares = |sum|^2 of each stretch.
// There is one block for each stretch of this rank's slice. A block adds up one stretch, which has STRETCH floats. A
// quad is 4 neighbouring floats. A thread adds up QUADS quads of the stretch, which are 1024 quads apart.
static __global__ void __launch_bounds__(1024, SUM_BLOCKS)
    sum_gradients_kernel(float* sum,                                         // a flat array
                         const __grid_constant__ Everywhere<double> squares, // (all stretches), written at every rank
                         RankGradients grads,
                         bool add,     // whether the old sum is added
                         bool write) { // false: sum is the only array that is read, so it stays as it is
    await_previous_kernel();
    constexpr int QUADS = STRETCH / 4 / 1024;
    const size_t n = grads.slice.n;
    const size_t at = grads.slice.flat(blockIdx.x * STRETCH); // the stretch's place in the flat arrays
    const size_t first = at / 4 + threadIdx.x;                // this thread's first quad
    // How many quads the stretch has from this thread's first quad on. Only quads among the n floats are counted,
    // because the arrays must not be read beyond those.
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
    if (threadIdx.x < squares.ranks) squares.at[threadIdx.x][at / STRETCH] = total; // to every rank
}

static void sum_gradients(float* sum, const Everywhere<double>& squares, const RankGradients& grads, bool add) {
    const Slice& s = grads.slice;
    const bool write = add || s.ranks > 1 || grads.own != sum;
    const int blocks = s.segments * s.stretches;
    launch(sum_gradients_kernel, blocks, 1024, 0, sum, squares, grads, add, write);
}

// Computes the gradient's norm and the batch's losses, both over all ranks, and decides whether this step is good or is
// skipped. There is one block, which adds up in a fixed order: first each thread adds up its numbers, then each warp
// the sums of its threads, then thread 0 the sums of the 8 warps. Then thread 0 decides (judge_batch).
static __global__ void __launch_bounds__(256)
    judge_step_kernel(StepState* state,      // the norm and the decision are written to it
                      const double* squares, // (stretches): |gradient|^2 of each stretch
                      size_t stretches,
                      const double* loss,  // (B): losses of all ranks' samples
                      const int* quarters, // (B): in which quarter of the noise levels a sample's level lies
                      AdamW h, int B) {
    await_previous_kernel();
    __shared__ LossSums warps[8];
    __shared__ double warp_squares[8];
    LossSums mine{};
    double square = 0; // |gradient|^2
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

// Adds 1 to *step. It is called after all kernels that draw random numbers for this step.
static void next_step(int64_t* step) {
    each(1, [=] __device__(size_t) { ++*step; });
}

// Copies the state of this step to records, a ring of `count` states. Some steps later the host reads from the ring
// what the log needs.
static void record_step(StepState* records, const StepState* state, int count) {
    each(1, [=] __device__(size_t) { records[(state->step - 1) % count] = *state; });
}

// to = params, rounded to bf16. A thread rounds 8 weights.
static void cast_params(bf16* to, const float* params, size_t n) {
    each((n + 7) / 8, [=] __device__(size_t eight) {
        const size_t i = eight * 8;
        if (i + 8 <= n) {
            float v[8];
            load_floats(v, params + i);
            *(uint4*)(to + i) = pack<bf16>(v);
        } else {
            for (size_t k = i; k < n; k++) {
                to[k] = __float2bfloat16(params[k]);
            }
        }
    });
}
static void cast_params(act* copy, const float* params, size_t n) {
    switch (act_element) {
    case Element::FP32: return; // the weights have no copy
    case Element::BF16: return cast_params((bf16*)copy, params, n);
    case Element::FP8:
    case Element::FP8_GRADIENT: return; // act_element is never FP8
    }
}

// Factors that are the same for all parameters in an update. t: the number of updates, including this one.
struct AdamWFactors {
    float clip;      // factor of the gradient, as in torch's clip_grad_norm_
    float decay;     // 1 - lr weight_decay
    float step_size; // lr / (1 - beta1^t)
    float root;      // sqrt(1 - beta2^t)
};
INLINE AdamWFactors adamw_factors(const StepState* state, const AdamW& h) {
    double clip = 1;
    if (h.grad_clip > 0) clip = fmin(1.0, h.grad_clip / (state->grad_norm + 1e-6));
    const double correction1 = 1 - pow((double)h.beta1, (double)state->updates);
    const double correction2 = 1 - pow((double)h.beta2, (double)state->updates);
    const float decay = 1 - state->lr * h.weight_decay;
    const float step_size = (float)(state->lr / correction1);
    return {(float)clip, decay, step_size, (float)sqrt(correction2)};
}

// AdamW (Loshchilov & Hutter 2019) and the average of the parameters, for one rank's slice:
//
//   g   = clip sum                            sum: the gradient, added up over all ranks
//   m   = beta1 m + (1 - beta1) g
//   v   = beta2 v + (1 - beta2) g^2
//   p   = decay p - step_size m / (sqrt(v) / root + eps)
//   ema = ema_rate ema + (1 - ema_rate) p
//
// A thread updates four neighbouring weights at a time. They are elements 4 i ... 4 i + 3 of the slice's arrays (ema, m
// and v), and elements 4 k ... 4 k + 3 of the flat arrays (params, copy, sum).
// u is a __grid_constant__, so it stays in constant memory. Without this the compiler would copy u to local memory,
// because it does not know the index r of params.at[r].
static __global__ void __launch_bounds__(256)
    adamw_kernel(const __grid_constant__ Update u, const StepState* state, AdamW h, Slice own) {
    await_previous_kernel();
    __shared__ AdamWFactors shared;
    if (!state->ok) return;
    if (threadIdx.x == 0) shared = adamw_factors(state, h); // slow (in double): only one thread computes them
    __syncthreads();
    const AdamWFactors f = shared;
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
            e = h.ema_rate * e + (1 - h.ema_rate) * p;
        };
        update(p.x, e.x, m.x, v.x, sum.x);
        update(p.y, e.y, m.y, v.y, sum.y);
        update(p.z, e.z, m.z, v.z, sum.z);
        update(p.w, e.w, m.w, v.w, sum.w);
        ema[i] = e;
        ms[i] = m;
        vs[i] = v;
        // The new weights go to this rank and to all ranks whose memory this rank can write to. Those ranks read the
        // first `plain` weights (all except the convolutions') in fp32. They read all other weights from the copy.
        const uint2 rounded = from_floats<bf16>(p);
        for (int r = 0; r < u.params.ranks; r++) {
            if (r == 0 || 4 * k < u.plain) ((float4*)u.params.at[r])[k] = p;
            if (u.copy.at[0] != u.params.at[0]) ((uint2*)u.copy.at[r])[k] = rounded;
        }
    }
}
static void adamw_update(const Update& u, const StepState* state, AdamW h, Slice own) {
    const size_t quads = own.owned() / 4;
    const int blocks = (int)std::min<size_t>(blocks_for(quads), 8 * gpu.sms);
    switch (act_element) {
    case Element::FP32: // the weights have no copy
    case Element::FP8:  // act_element is never FP8
    case Element::FP8_GRADIENT:
    case Element::BF16: // the kernel writes the copy, in bf16 alone: another element needs a template parameter there
        return launch(adamw_kernel, blocks, 256, 0, u, state, h, own);
    }
}

// Updates a further average of the parameters, by the formula in ema_step. Each thread updates one element.
static __global__ void __launch_bounds__(256)
    ema_kernel(float* ema, const float* params, const StepState* state, float rate, Slice own) {
    __shared__ float step;
    await_previous_kernel();
    if (threadIdx.x == 0) step = power_step(rate, state->updates);
    __syncthreads();
    const size_t i = (size_t)blockIdx.x * 256 + threadIdx.x; // index in the slice
    const size_t k = own.flat(i);                            // index in the flat array
    if (k < own.n && state->ok) ema[i] = ema_step(ema[i], params[k], rate, step);
}
static void ema_update(float* ema, const float* params, const StepState* state, float rate, Slice own) {
    launch(ema_kernel, blocks_for(own.owned()), 256, 0, ema, params, state, rate, own);
}

// =====================================================================================================================
// 22. Which kernel runs: costs as measured, tables of decisions, and the operations that have several kernels

// ---------------------------------------------------------------------------------------------------------------------
// --- groupnorm_backward
// Returns how long groupnorm_backward_whole_kernel takes with plan w, in microseconds. The formula was fitted to 2,700
// measurements on an H200. On average, the plan that it finds cheapest takes 3 % more time than the fastest plan.
//
//   time = START + (number of waves of blocks) * hypot(latency, throughput)
//
// latency: the time that a block waits even if there are few blocks. It waits for loads, and for the rounds in which
// sums are added and exchanged. throughput: the time that all blocks on one multiprocessor need together for their
// bytes and instructions. Latency and throughput overlap in part, and hypot lies between their maximum and their sum.
// tensors: how many tensors of the size of x are read or written.
static double norm_whole_cost(const NormShape& s, const NormWhole& w, int tensors) {
    constexpr double START = 1.9;    // a launch, and the wait for the previous kernel
    constexpr double CLUSTER = 0.65; // blocks of a cluster wait for each other
    constexpr double PART = 0.1;     // to add one more sum, of a warp or of another block
    constexpr double SLOT = 0.394;   // the latency of one more vector for each thread
    constexpr double SLOTS = 0.081;  // the instructions of one more vector for each of 1,024 threads
    constexpr double PER_KB = 0.037; // each KB that a multiprocessor reads or writes
    constexpr double WARPS = 0.34;   // what every 256 threads add to a block's time
    const int C = s.C1 + s.C2;
    const double elements = act_vec() / 8.0; // SLOT and SLOTS were fitted for vectors of 8 elements

    // Memory moves whole sectors of 32 bytes; whole rows of 128 bytes are the most efficient.
    const int row_bytes = w.slab / act_vec() * 16; // the slab's channels in one pixel
    double loss = 0;
    if (row_bytes < 128) loss += 0.07;
    if (row_bytes % 32 > 0) loss += 0.1;
    const double short_rows = w.slab == C ? 1 : 1 + loss;
    const int run = 16 << w.log_columns; // bytes of a pixel that a warp reads
    double short_runs = 1;
    if (run < 64) short_runs = 1.14;
    else if (run < 128) short_runs = 1.01;
    const double kilobytes = w.chunk * row_bytes * tensors / 1024.0 * short_rows * short_runs;

    const double throughput = PER_KB * kilobytes + SLOTS * elements * w.slots() * w.threads / 1024;
    const double parts = w.chunks > 1 ? 2 * w.chunks : 1 << w.log_warps;
    const double latency = PART * parts + SLOT * elements * w.slots() + 0.31 * throughput;

    // How many blocks have room on a multiprocessor (fit), how many blocks there are, and how many of them run on a
    // multiprocessor at the same time (together).
    const int fit_threads = 2 * MAX_WHOLE_THREADS / w.threads;
    const int fit = std::min(gpu.blocks_of(w.bytes(), 16), fit_threads);
    const int blocks = s.B * (C / w.slab) * w.chunks;
    const int together = std::min(fit, ceil_div(blocks, gpu.sms));
    double filled = 1; // large clusters do not fill all multiprocessors
    if (w.chunks > 4) filled = 0.91;
    else if (w.chunks > 2) filled = 0.94;
    const double waves = blocks / (filled * fit * gpu.sms);
    const double block_time = hypot(latency, together * (throughput + WARPS * w.threads / 256));
    const double start = w.chunks > 1 ? START + CLUSTER : START;
    return start + block_time * (waves > 1 ? waves + 0.18 : 1);
}

// Returns the plan with the lowest cost. Its `chunks` is 0 if no plan fits, or if two passes are faster.
static NormWhole plan_norm_whole(const NormShape& s, bool add) {
    const int V = act_vec();
    const int C = s.C1 + s.C2;
    const int group_channels = C / s.groups;
    const int tensors = add ? 4 : 3;

    // How many microseconds two passes take. moved: the kilobytes that the two passes read and write on each
    // multiprocessor.
    const double pieces = (double)s.B * s.HW * C / V; // how many pieces of 16 bytes one tensor has
    const double moved = (tensors + 2) * 16 / 1024.0 * pieces / gpu.sms;
    const double two_passes = std::max(6.5 + 0.027 * moved, 2.3 + 0.0386 * moved);

    Cheapest<NormWhole> plan{{}, two_passes};
    auto consider = [&](int slab, int log_columns, int log_warps, int chunks) {
        const int threads = ceil_div(slab / V, 1 << log_columns) << (5 + log_warps);
        const NormWhole w{threads, slab, log_columns, log_warps, chunks, ceil_div(s.HW, chunks)};
        const bool whole_groups = slab % group_channels == 0 && C % slab == 0;
        const bool enough_rows = chunks == 1 || w.chunk >= 2 * w.rows();
        const bool fits = threads >= std::max(slab, 64) && threads <= MAX_WHOLE_THREADS;
        if (!whole_groups || !enough_rows || !fits) return;
        if (w.bytes() > gpu.shared_for(1, 256)) return;
        plan.consider(norm_whole_cost(s, w, tensors), w);
    };
    const int least_log_columns = std::countr_zero(16u / V); // a warp has 16 neighbouring channels or more
    const int most_chunks = gpu.clusters ? 8 : 1;
    const int largest_slab = std::min(C, MAX_WHOLE_THREADS);
    for (int slab = V; slab <= largest_slab; slab += V)
        for (int chunks = 1; chunks <= most_chunks; chunks *= 2)
            for (int log_warps = 0; log_warps < 5; log_warps++)
                for (int i = 0; i < 3; i++) {
                    consider(slab, least_log_columns + i, log_warps, chunks);
                }
    return plan.best;
}

// Return kernels: the one that does everything, the first of two passes, and the second. Each has a version of its own
// with dropout, and the second pass also one for addends. GRAD: what the gradients are written to.
template <class T, class GRAD> static auto norm_whole_kernel(bool drop) {
    if (drop) return groupnorm_backward_whole_kernel<T, true, GRAD>;
    return groupnorm_backward_whole_kernel<T, false, GRAD>;
}
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

    // The gradients of weight and bias are sums over the images. Each image's part of them stays in memory until
    // finish_gradients adds up the parts.
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
        // Two passes: the first computes sums over chunks of the pixels, the second computes the gradient. All blocks
        // of the second pass read the sums of all chunks, so the first pass has at most 64 chunks. With addends, the
        // second pass divides the pixels into other chunks than the first pass.
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
// Launches Hopper's kernels, for bf16 heads of DIM = 32 or 64 channels, and a multiple of 64 tokens (T). Backward: a
// head of 64 tokens is computed by one block. A head of 256 to 1,024 tokens, a multiple of 128, is computed by a
// cluster whose blocks have 128 tokens each. For all other heads the portable kernel computes the backward pass.
template <int DIM> static void launch_attention_wgmma(const AttentionCall& a) {
    using Alone = AttentionBackward<DIM, 1>;
    using Cluster = AttentionBackward<DIM, 2>;
    const bool back = a.dout;
    const bool fits_block = a.T == 64;
    const bool fits_cluster = gpu.clusters && a.T % 128 == 0 && a.T >= 256 && a.T <= 1024;
    const bool alone = back && fits_block && attention_clusters<Alone>(a.T);
    const bool cluster = back && fits_cluster && attention_clusters<Cluster>(a.T);
    // AttentionForward<channels of a head, warpgroups, keys of a chunk, chunks>; chunks = 0: they pass through a ring
    using Forward64 = AttentionForward<DIM, 1, 64, 1>;
    using Forward256 = AttentionForward<DIM, 2, DIM, 256 / DIM>;
    using ForwardRing2 = AttentionForward<DIM, 2, 64, 0>;
    using ForwardRing1 = AttentionForward<DIM, 1, 64, 0>;
    const Way<AttentionCall> ways[] = {
        {alone, launch_attention_backward_wgmma<Alone>},
        {cluster, launch_attention_backward_wgmma<Cluster>},
        {back, launch_attention<bf16, DIM>},
        {a.T == 64, launch_attention_forward_wgmma<Forward64>},
        {a.T == 256, launch_attention_forward_wgmma<Forward256>},
        {a.T % 128 == 0, launch_attention_forward_wgmma<ForwardRing2>},
        {true, launch_attention_forward_wgmma<ForwardRing1>},
    };
    decide(a, ways);
}

// Picks the kernel for heads of a.d channels. If Hopper's kernels can't be used, it picks the smallest kernel that has
// room for a.d channels.
template <class T> static void attention(const AttentionCall& a) {
    const bool wgmma = act_has_wgmma() && a.T % 64 == 0;
    constexpr int LARGEST = 32 * VEC<T>; // channels of a head whose row has 512 bytes
    const Way<AttentionCall> ways[] = {
        {wgmma && a.d == 32, launch_attention_wgmma<32>}, // Hopper's kernels
        {wgmma && a.d == 64, launch_attention_wgmma<64>},
        {a.d <= 32, launch_attention<T, 32>}, // any GPU; d is padded to the kernel's number of channels
        {a.d <= 64, launch_attention<T, 64>},
        {a.d <= 128, launch_attention<T, 128>},
        {a.d <= LARGEST, launch_attention<T, LARGEST>},
        {true, launch_attention_general<T>}, // heads of any size
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
// conv_forward and conv_backward_input, at the end of this part, call conv_product, which chooses a kernel. A table
// above conv_product shows all roads from there to the instructions of the tensor cores. Functions whose names begin
// with pick_ choose a tile for one of the kernels, by measured costs or by a table.
static bool conv_is_halo(const ConvShape& s) { return s.kernel == 3 && s.stride == 1; }

// Can Hopper's kernels compute this convolution? If so, conv_weight_tma always computes its weight gradient.
static bool conv_is_wgmma(const ConvShape& s) {
    return act_has_wgmma() && s.stride == 1 && !s.upsample && !conv_is_few(s);
}

// Hopper's kernels have neither stride 2 nor upsampling. So such a convolution takes a detour: it is replaced by a
// convolution that has stride 1 and does not change the size. For upsampling, the upsampled input is first written to
// the workspace. For stride 2, the gradient of the output is first written to the workspace, with zeros between its
// pixels. (A forward pass of stride 2 has a detour of another kind, see conv_forward.) The detour moves more bytes, but
// with wgmma it is two to four times as fast. With mma.sync only the gradient of an upsampled input takes the detour,
// and this takes 17 to 33 % less time.
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
    const int channels = s.upsample ? s.C1 : s.Cout; // the upsampled input, or the spread gradient
    const size_t bytes = (size_t)one.B * one.H * one.W * channels * act_bytes();
    return (bytes + 255) / 256 * 256;
}

// Is this a layer whose weight gradient never shares a launch with those of other layers? Such a layer is first
// replaced by another convolution, whose shape conv_weight_shape returns.
static bool conv_weight_alone(const ConvShape& s) { return conv_is_few(s) || conv_takes_detour(s); }
static ConvShape conv_weight_shape(const ConvShape& s) {
    return conv_is_few(s) ? few_shape(s, true) : conv_without_detour(s);
}

// Returns how many tiles cover the output if a tile has so many images, rows and columns.
static int count_tiles(const ConvCall& c, int images, int rows, int columns) {
    const int tiles_of_image = ceil_div(c.H, rows) * ceil_div(c.W, columns);
    return ceil_div(c.B, images) * tiles_of_image;
}

// Returns a measure of conv_halo's time with this tile: the number of rounds of blocks times a block's channels. In a
// round all multiprocessors are full of blocks; the last round takes as long as the others even if it is nearly empty.
template <class Tile> static int halo_rounds(const ConvCall& c) {
    const int tiles = count_tiles(c, Tile::IMAGES, Tile::TILE_H, Tile::TILE_W);
    const int blocks = tiles * ceil_div(c.Cout, Tile::CHANNELS);
    const int fit = std::clamp(gpu.blocks_of(Tile::SHARED_BYTES), 1, Tile::PER_SM); // blocks on a multiprocessor
    const int rounds = ceil_div(blocks, fit * gpu.sms);
    return rounds * Tile::CHANNELS;
}
// Does Tile take at least 10 % less time than Other?
template <class Tile, class Other> static bool halo_is_faster(const ConvCall& c) {
    return halo_rounds<Tile>(c) * 10 <= halo_rounds<Other>(c) * 9;
}
// The choice of conv_halo's tile depends on three questions. Is this the network's last convolution, which has few
// channels? Are the images at most 8 pixels high or wide? Do tiles of 16 x 16 pixels x 64 channels fill the GPU?
static bool halo_is_last(const ConvCall& c) { return c.s.out == Element::FP32 && conv_is_last(c.s); }
static bool halo_is_small(const ConvCall& c) { return c.H <= 8 || c.W <= 8; }
static bool halo_fills_gpu(const ConvCall& c) {
    const int tiles = count_tiles(c, 1, 16, 16) * ceil_div(c.Cout, 64);
    const int enough = c.Cout % 64 ? 2 : 1; // blocks for each multiprocessor
    return tiles > enough * gpu.sms;
}

// Picks the tile of conv_halo, for 3x3, stride 1, bf16 on any GPU.
template <bool BACKWARD> static void pick_conv_halo_bf16(const ConvCall& c) {
    //             images, channels, K groups, blocks per multiprocessor
    using Last = HaloTile<bf16, 1, 16, 1, 4>;
    using Small48 = HaloTile<bf16, 2, 48, 2, 3>;
    using Small32 = HaloTile<bf16, 2, 32, 4, 2>;
    using Large48 = HaloTile<bf16, 1, 48, 1, 2>;
    using Large64 = HaloTile<bf16, 1, 64, 1, 2>;
    using Few32 = HaloTile<bf16, 1, 32, 2, 2>;
    using Few48 = HaloTile<bf16, 1, 48, 2, 1>;
    const bool small = halo_is_small(c);
    const bool many = halo_fills_gpu(c);
    // For some numbers of channels, tiles of 48 channels waste less work.
    const bool small_48 = small && halo_is_faster<Small48, Small32>(c);
    const bool large_48 = many && halo_is_faster<Large48, Large64>(c);
    const Way<ConvCall> ways[] = {
        // the network's last convolution has few channels
        {halo_is_last(c), conv_halo<Last, false, float>},
        // images at most 8 pixels high or wide: a block has two of them, and K groups give it more warps
        {small_48, conv_halo<Small48, BACKWARD>},
        {small, conv_halo<Small32, BACKWARD>},
        // there are enough of the largest tiles
        {large_48, conv_halo<Large48, BACKWARD>},
        {many, conv_halo<Large64, BACKWARD>},
        // few tiles: a block has fewer channels, and two K groups share a tile
        {c.Cout <= 128, conv_halo<Few32, BACKWARD>},
        {true, conv_halo<Few48, BACKWARD>},
    };
    decide(c, ways);
}
// Picks the tile of conv_halo in fp32, for the same reasons as in bf16.
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

// Picks the tile of conv_gather, which computes all other convolutions on any GPU. A tile has 64 or 128 pixels x 64
// channels or, in bf16 only, 128 pixels x 128 channels.
template <class T, bool BACKWARD> static void pick_conv_gather(const ConvCall& c) {
    const int HW = c.H * c.W;
    const int tiles_of_128 = c.B * ceil_div(HW, 128); // tiles of 128 pixels
    const bool many_128 = HW > 64 && tiles_of_128 * ceil_div(c.Cout, 64) >= gpu.sms;
    //                pixels / 64, channels, channels of a warp, stages
    using Pixels64 = GatherTile<T, 1, 64, 32, 3>;
    using Pixels128 = GatherTile<T, 2, 64, 32, 3>;
    if constexpr (std::is_same_v<T, bf16>) { // tiles of 128 x 128 need the fewest bytes
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

// Tiles of conv_tiles for 3x3: ConvTiles<taps, rows, slices of 64 channels, resident weights, ...>. With up to 128
// input channels (FP8: 256) all weights stay in shared memory, and the two warpgroups take turns. With more input
// channels the weights pass through a ring.
template <bool BACKWARD> using HalfSlice = ConvTiles<9, 16, 1, true, BACKWARD, 2>; // 32 channels: half the products
template <bool BACKWARD, Element E = Element::BF16> using Resident16 = ConvTiles<9, 16, 1, true, BACKWARD, 4, E>;
template <bool BACKWARD, Element E = Element::BF16> using Resident32 = ConvTiles<9, 32, 1, true, BACKWARD, 4, E>;
template <bool BACKWARD, Element E = Element::BF16> using Streamed16 = ConvTiles<9, 16, 1, false, BACKWARD, 4, E>;
template <bool BACKWARD, Element E = Element::BF16> using Streamed32 = ConvTiles<9, 32, 1, false, BACKWARD, 4, E>;

// The time of a block of conv_small, in ns, as measured on an H200: of a whole block except its taps, and of one tap of
// one slice. `alone`: there is no more than one block for each multiprocessor. `full`: there are more. Then all
// multiprocessors are busy all the time, and each block gets a smaller share of the L2 cache's bandwidth.
struct SmallCosts {
    int block_alone, tap_alone;
    int block_full, tap_full;
};

// Picks the fastest kernel (conv_small or conv_tiles) and tile for 3x3 on images of up to 32 x 32. FP8: a product takes
// as long as in bf16, and sums over twice as many channels. A last slice of up to 64 channels needs half the products.
template <bool BACKWARD, Element E = Element::BF16> static void pick_conv_small(const ConvCall& p) {
    constexpr bool IS_FP8 = is_fp8(E);
    const int slices = ceil_div(p.Cin1, slice_channels(E));
    const int taps_of_64 = ceil_div(p.Cin1, 64) * 9;
    const int taps = IS_FP8 ? ceil_div(taps_of_64, 2) : taps_of_64; // taps of all slices
    const bool is_32 = p.Cin1 == 32 && !IS_FP8;                     // half a slice
    Cheapest<void (*)(const ConvCall&)> way;

    // Time = rounds of blocks * (the time of a block + taps of a block * the time of a tap).
    auto consider = [&](auto tile, SmallCosts cost) {
        using T = decltype(tile);
        if (T::SPLIT > 1 && !gpu.clusters) return;
        const int tiles = count_tiles(p, T::IMAGES, 8, T::TILE_W);
        const int blocks = tiles * ceil_div(p.Cout, T::N) * T::SPLIT;
        const int64_t rounds = ceil_div(blocks, gpu.sms * T::PER_SM);
        const bool half_slice = is_32 && T::N <= 64; // 32 channels need half the products of a slice
        const bool alone = blocks <= gpu.sms;
        int block = alone ? cost.block_alone : cost.block_full;
        int tap = alone ? cost.tap_alone : cost.tap_full;
        if (half_slice) tap /= 2;
        if (IS_FP8 && !alone) { // measured: FP8 has half as many taps, and each loads as many bytes
            block += 1500;
            tap += tap / 12;
        }
        way.consider(rounds * (block + tap * taps / T::SPLIT), conv_small<T>);
    };
    //          SmallTile: warpgroups, N, images, split, blocks per multiprocessor
    using Square = SmallTile<BACKWARD, 1, 64, 1, 1, 2, E>;          // a square of 8 x 8 pixels and 64 channels
    using SquareShared = SmallTile<BACKWARD, 1, 64, 1, 2, 2, E>;    // two blocks share a tile's taps
    using TwoImagesShared = SmallTile<BACKWARD, 2, 64, 2, 2, 1, E>; // the same, and two images share weights
    using TwoImages = SmallTile<BACKWARD, 2, 64, 2, 1, 1, E>;       // two images share weights
    using ManyChannels = SmallTile<BACKWARD, 1, 192, 1, 1, 1, E>;   // many channels share pixels
    using TwoImages128 = SmallTile<BACKWARD, 2, 128, 2, 1, 1, E>;   // two images, and many channels
    using Wide32 = SmallTile<BACKWARD, 2, 32, 1, 1, 1, E>;          // tiles of 8 x 16 pixels
    using Wide192 = SmallTile<BACKWARD, 2, 192, 1, 1, 1, E>;
    //                          block_alone, tap_alone, block_full, tap_full
    consider(Square(), SmallCosts{1270, 104, 1270, 209});
    consider(SquareShared(), SmallCosts{2350, 52, 2350, 235});
    consider(TwoImagesShared(), SmallCosts{2780, 94, 2780, 196});
    consider(TwoImages(), SmallCosts{1780, 140, 2500, 173});
    consider(ManyChannels(), SmallCosts{1250, 267, 3200, 260});
    consider(TwoImages128(), SmallCosts{2340, 286, 3750, 316});
    if (p.W > 8) {
        consider(Wide32(), SmallCosts{1040, 129, 1040, 124});
        consider(Wide192(), SmallCosts{3160, 422, 4500, 470});
    }
    if (p.H <= 8) return way.best(p);

    // conv_tiles has persistent blocks. Its time, in ns, = once + (tiles of the busiest block / n) * each, where `each`
    // is the time of n tiles. (Here a tile is 8 pixels across and 16 down, even if the kernel's own tiles are larger.)
    const int tiles = count_tiles(p, 1, 16, 8);
    auto consider_tiles = [&](auto tile, int once, int n, int64_t each) {
        const int runs_of_n = ceil_div(ceil_div(tiles, n), tile.runs(p.Cout));
        way.consider(once + runs_of_n * each, conv_tiles<decltype(tile)>);
    };
    if (is_32) {
        consider_tiles(HalfSlice<BACKWARD>(), 1550, 1, 325 + 74 * taps);
    } else if (slices <= 2) {
        consider_tiles(Resident16<BACKWARD, E>(), 1550, 1, 325 + 148 * taps);
    } else if (p.H % 32) {
        consider_tiles(Streamed16<BACKWARD, E>(), 425, 2, 2600 + 300 * taps);
    } else {
        consider_tiles(Streamed32<BACKWARD, E>(), 425, 4, 4000 + 588 * taps);
    }
    way.best(p);
}

// Returns how many cycles conv_tiles takes with tile T for p, a 1x1 convolution, by measurements on an H200. Returns
// INFINITY if a tile's results do not fit into shared memory.
template <class T> static double conv_tiles_1x1_cycles(const ConvCall& p, int slices) {
    constexpr int64_t L2_BYTES = 36; // the most that a multiprocessor reads from or writes to the L2 in a cycle
    const bool add = p.out.part1.add1 || p.out.part2.add1;
    const int weights = T::RESIDENT ? slices : T::STREAMED_WEIGHTS;
    const int stages = T::stages(weights);
    const bool results_fit = stages > T::OUT_SLICES && (T::RESIDENT || slices >= T::OUT_SLICES);
    if (!results_fit) return INFINITY; // a tile's results take OUT_SLICES stages

    // A unit is what a stage holds: a tile, or two tiles, one for each warpgroup.
    const int tiles = count_tiles(p, 1, T::ROWS, 8);
    const int units = ceil_div(tiles, T::UNIT);
    const int64_t rounds = ceil_div(units, T::runs(p.Cout)); // units of the busiest block

    // The cycles of a unit's products. For each slice of input channels and each 64 output channels there are 4
    // products of k = 16. A product takes PIXELS / 2 cycles, and 6 more to start.
    const int64_t products = T::UNIT * T::OUT_SLICES * slices * 4 * (T::PIXELS / 2 + 6);

    // The cycles of a unit's bytes: slices, streamed weights and addends are read, and results are written.
    const int64_t tile_bytes = T::UNIT * T::TILE_BYTES;
    const int64_t slice_bytes = tile_bytes + (T::RESIDENT ? 0 : T::WEIGHT_BYTES);
    const int64_t bytes = slices * slice_bytes + T::OUT_SLICES * tile_bytes * (add ? 2 : 1);
    // If few stages remain beside a tile's results and the current slice, fewer bytes can be loaded at the same time. A
    // load takes 1800 cycles.
    const int64_t ahead = std::max(1, stages - T::OUT_SLICES - 2) * tile_bytes;
    const int64_t bytes_per_cycle = T::RESIDENT ? std::min(L2_BYTES, ahead / 1800) : L2_BYTES;
    const int64_t longest = std::max(products, bytes / bytes_per_cycle);

    // The cycles after a unit's products, for adding, rounding and storing. If there are few stages, the next unit has
    // to wait until this is done.
    const bool tight = !T::RESIDENT && stages < T::OUT_SLICES + 2;
    int64_t end = T::OUT_SLICES * T::PIXELS * (add || p.out.stats ? 10 : 6);
    if (tight) end += 3000;

    // RESIDENT weights: one warpgroup finishes its tile while the other warpgroup multiplies. Streamed weights: both
    // warpgroups multiply, and then both finish their tiles.
    const int64_t unit = T::RESIDENT ? std::max(longest, (products + end) / 2) : longest + end;
    const int64_t first_weights = T::RESIDENT ? slices * T::WEIGHT_BYTES / L2_BYTES : 0;
    return first_weights + end + rounds * unit;
}

// Picks the fastest tile of conv_tiles for 1x1.
template <bool BACKWARD> static void pick_conv_tiles_1x1(const ConvCall& c) {
    ConvCall p = c;
    // A 1x1 convolution can treat all images as one image of width 8. Then all tiles are full. This is impossible with
    // an embedding, which differs from image to image. With statistics it is only possible if no tile of 64 pixels has
    // pixels of two images.
    const int HW = p.H * p.W;
    const bool as_one = !p.out.emb && HW % 8 == 0 && (!p.out.stats || HW % 64 == 0);
    if (as_one) {
        p.H = p.B * (HW / 8);
        p.W = 8;
        p.B = 1;
    }
    using HalfSlice1x1 = ConvTiles<1, 16, 1, true, BACKWARD, 2>; // 32 input channels need half the products of a slice
    if (p.Cin1 + p.Cin2 == 32) return conv_tiles<HalfSlice1x1>(p);

    const int slices = ceil_div(p.Cin1, 64) + ceil_div(p.Cin2, 64);
    Cheapest<void (*)(const ConvCall&)> way;
    auto consider = [&](auto tile) {
        using T = decltype(tile);
        way.consider(conv_tiles_1x1_cycles<T>(p, slices), conv_tiles<T>);
    };
    //                 rows, slices of 64 channels, resident weights
    consider(ConvTiles<1, 16, 1, true, BACKWARD>());
    consider(ConvTiles<1, 16, 2, true, BACKWARD>());
    consider(ConvTiles<1, 16, 3, true, BACKWARD>());
    consider(ConvTiles<1, 8, 3, false, BACKWARD>());
    consider(ConvTiles<1, 16, 2, false, BACKWARD>());
    consider(ConvTiles<1, 16, 3, false, BACKWARD>());
    way.best(p);
}

// Picks the tile of conv_tiles for 3x3 on images larger than 32 x 32. For a convolution with a skip connection it picks
// the tile on images of any size.
template <bool BACKWARD, Element E = Element::BF16> static void pick_conv_tiles_3x3(const ConvCall& c) {
    const int slices = ceil_div(c.Cin1, slice_channels(E));
    const bool skip = c.out.skip.weight;               // only tiles with RESIDENT weights can compute it
    const bool half_slice = c.Cin1 <= 64 && is_fp8(E); // half a slice has too few products for tiles of 32 rows
    const bool one_slice_and_32_rows = slices == 1 && !half_slice && c.Cout > 64 && c.H >= 64;
    const bool fills_32_rows = c.H % 32 == 0 || c.H > 64;

    const Way<ConvCall> ways[] = {
        // 32 input channels are half a slice: each tap needs two products instead of four
        {c.Cin1 == 32 && E == Element::BF16, conv_tiles<HalfSlice<BACKWARD>>},
        // one slice of weights leaves room for tiles of 32 rows
        {!skip && one_slice_and_32_rows, conv_tiles<Resident32<BACKWARD, E>>},
        // up to two slices of weights fit into shared memory beside the pixels
        {slices <= 2, conv_tiles<Resident16<BACKWARD, E>>},
        // more weights pass through a ring; a tile of 32 rows uses them for more pixels, if few of its rows lie outside
        // the image
        {fills_32_rows, conv_tiles<Streamed32<BACKWARD, E>>},
        {true, conv_tiles<Streamed16<BACKWARD, E>>},
    };
    decide(c, ways);
}

// Does pick_conv_small choose the kernel? It does so on small images, which have too few tiles for conv_tiles'
// persistent blocks. But only conv_tiles can compute a skip connection.
static bool conv_is_small(const ConvCall& c) {
    const bool small = c.H <= 32 && c.W <= 32;
    return small && !c.out.skip.weight;
}

// Decides which kernel computes a convolution. A pick_ function, above, chooses the kernel's tile: in general the
// largest tile with which every multiprocessor still has a block. The table shows which functions lead from the
// network's list of layers to an instruction of the tensor cores. Each function calls the function below it:
//
//   forward_conv (section 5)     what a layer of kind CONV calls
//   conv_forward                 fills a ConvCall. For upsampling, stride 2 or few channels it may first replace the
//                                convolution by another one
//   conv_product                 chooses the kernel, by the table in it
//
//   Hopper, bf16, 3x3 (1x1);     Hopper, bf16, small images;  any GPU, 3x3, stride 1       any GPU, all others
//   FP8, 3x3                     FP8 (conv_product_fp8)
//   pick_conv_tiles_3x3 (_1x1)   pick_conv_small              pick_conv_halo_bf16 (_fp32)  pick_conv_gather
//   conv_tiles                   conv_small                   conv_halo                    conv_gather
//   conv_tiles_kernel            conv_small_kernel            conv_halo_kernel             conv_gather_kernel
//                                multiply_small               multiply_step, multiply_tap  multiply
//   Accumulators::multiply (_fp8)                             mma                          mma
//   Wgmma<N>::add (WgmmaFp8)     Wgmma<N>::add (WgmmaFp8)     mma_bf16 (mma_fp16)          mma_bf16 (mma_fp16)
//   wgmma m64nNk16 (k32)         wgmma m64nNk16 (k32)         mma.sync m16n8k16            mma.sync m16n8k16
//
// An input's gradient goes from conv_backward_input through the same functions, with BACKWARD = true. In FP8 it goes
// through conv_backward_input_fp8 and conv_product_fp8, with BACKWARD = false.
template <bool BACKWARD> static void conv_product(const ConvCall& c) {
    const ConvShape& s = c.s;
    const ConvOut& o = c.out;
    const bool halo = conv_is_halo(s);
    if (s.upsample && !halo) die("internal error: upsampled, a convolution must be 3x3 with stride 1");

    // conv_is_wgmma: this is a Hopper GPU, and a convolution in bf16 of stride 1, without upsampling and with more than
    // a few channels. Hopper's kernels always store all parts of the result, and add at most one addend to each part.
    const bool all_parts = o.part1.dx && (!o.Cout2 || (o.part2.dx && o.Cout1 % 64 == 0));
    const bool second_addends = o.part1.add2 || o.part2.add2;
    const bool wgmma = conv_is_wgmma(s) && all_parts && !second_addends;

    const bool bf16_is_it = act_element == Element::BF16;
    const bool fp32_is_it = act_element == Element::FP32;
    const Way<ConvCall> ways[] = {
        {wgmma && s.kernel == 1, pick_conv_tiles_1x1<BACKWARD>},
        {wgmma && conv_is_small(c), pick_conv_small<BACKWARD>},
        {wgmma, pick_conv_tiles_3x3<BACKWARD>},
        {halo && bf16_is_it, pick_conv_halo_bf16<BACKWARD>},
        {halo && fp32_is_it, pick_conv_halo_fp32<BACKWARD>},
        {bf16_is_it, pick_conv_gather<bf16, BACKWARD>},
        {fp32_is_it, pick_conv_gather<float, BACKWARD>},
    };
    decide(c, ways);
}

// Decides the same for the two products in FP8: a forward pass (E = FP8), or an input gradient, which
// conv_backward_input_fp8 has made a forward convolution of dout (E = FP8_GRADIENT). Such a convolution is 3x3, has one
// input and stride 1, and runs on Hopper.
template <Element E> static void conv_product_fp8(const ConvCall& c) {
    const bool known = conv_is_wgmma(c.s) && conv_is_halo(c.s);
    if (!known) die("internal error: no kernel of FP8 for this convolution");
    if (conv_is_small(c)) pick_conv_small<false, E>(c);
    else pick_conv_tiles_3x3<false, E>(c);
}

static void conv_forward(act* out, Stats* stats, const act* x1, const act* x2, const act* weight, // x2: 1x1 only
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
    // Stride 2: compute all pixels with stride 1, and keep every fourth pixel. This is faster if there are so few
    // pixels that launches cost more than products.
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
    if (s.in == Element::FP8) conv_product_fp8<Element::FP8>(call);
    else conv_product<false>(call);
}

// Can a 3x3 convolution of shape s also compute the skip connection (1x1) that is added to its result? It can if shared
// memory has room for all weights of the convolution and of the skip connection, and for one more stage of pixels than
// a tile needs.
static bool conv_takes_skip(const ConvShape& s, const ConvShape& skip) {
    if (!conv_is_wgmma(s) || !conv_is_wgmma(skip)) return false;
    if (s.kernel != 3 || skip.kernel != 1 || s.H < 16) return false;
    const int slices = ceil_div(s.C1, slice_channels(s.in));
    const int skip_slices = ceil_div(skip.C1, 64) + ceil_div(skip.C2, 64);
    const int weights = 9 * slices + skip_slices;
    return weights <= 18 && Resident16<false>::stages(weights) > slices + skip_slices;
}

// The input gradient in FP8. wgmma accepts FP8 operands only if k is the inner dimension of both (K_MAJOR). So the
// weights can't be transposed on their way to the tensor cores, and round_weights has turned them before. With turned
// weights, (C1, 8 - tap, Cout), the input gradient is a forward convolution of dout.
static void conv_backward_input_fp8(Grad dx, const act* dout, const act* turned, ConvShape s, const float* factors) {
    if (s.C2 || dx.add1 || dx.add2) die("internal error: in FP8 an input gradient has one input and no addends");
    std::swap(s.C1, s.Cout);
    s.in = Element::FP8_GRADIENT;
    s.out = act_element;
    ConvCall call{.s = s, .B = s.B, .H = s.H, .W = s.W};
    call.Cin1 = s.C1;
    call.Cout = s.Cout;
    call.x1 = dout;
    call.weight = turned;
    call.out = ConvOut{.part1 = dx, .Cout1 = s.Cout, .B = s.B};
    call.factors = factors;
    conv_product_fp8<Element::FP8_GRADIENT>(call);
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
    // unet_backward does not compute the gradient of a tensor without needs_grad (add_layer). So this ends the program
    // only if somebody adds a layer with a backward pass before the first convolution.
    if (conv_is_first(s)) die("internal error: the gradient of the images, which nobody needs");
    if (conv_is_last(s)) {
        if (dx1.add2) die("a convolution to %d channels has one addend to its input's gradient at most", s.Cout);
        const ConvFew p = make_few_rows(s, dout, weight, device.workspace);
        const ConvShape rows = few_shape(s);
        return conv_forward(dx1.dx, nullptr, p.rows, nullptr, p.weight_rows, nullptr, nullptr, 0, dx1.add1, rows);
    }
    // Here the kernel's input is dout, and its output has the channels of both of the layer's inputs.
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
//       conv_weight_tma, conv_weight_halo or conv_weight_gather     once for each kind
//       conv_weight_sum                                             once, for the partials of all kinds
//     conv_weight_one         layers that are first replaced by other layers: few channels, stride 2, upsampling
//
// A plan is the number of ranges (splits) into which the pixels are divided and, for conv_weight_tma, the number of
// warpgroups of a block. More ranges keep more multiprocessors busy, but each range writes partial sums, which a second
// kernel has to add up.

// What weight gradients cost, in cycles as measured on an H200 while all blocks are at work.
struct WeightCosts {
    int slots;          // blocks that the GPU runs at once
    int tile;           // cycles of a block for one pixel tile
    int filter;         // how many blocks the taps of a filter are divided among
    int beside;         // cycles of a block in addition to its tiles, if it writes partials
    int beside_dweight; // the same, if it writes dweight itself
    int sums;           // cycles of the second kernel, conv_weight_sum, in addition to PARTIAL_CYCLES for each partial
    int most_partials = MAX_WEIGHT_PARTIALS;
};
constexpr int PARTIAL_CYCLES = 10;

// Returns how many cycles a block of conv_weight_tma takes for a pixel tile, with one warpgroup or with three (wide).
// This was measured while other blocks read the same pixels for other filter rows or other channels.
static int weight_tile_cycles(const ConvWeight& p) {
    const ConvShape& s = p.shape;
    const bool wide = p.warpgroups == 3;
    if (s.kernel == 1) return wide ? 267 * (p.block_co + p.block_ci) : 20 + 215 * (1 + p.block_ci);
    if (s.out_W() <= 8) return wide ? 1450 : 600;
    if (wide) return 2400;
    // A block with one warpgroup reads x and dout for only one filter row. The fewer tiles of channels there are, the
    // more time this takes. It takes even more if the tensors have more than 100 MB, since they do not stay in the L2.
    const bool large = (double)s.B * s.H * s.W * (s.C1 + s.Cout) * sizeof(bf16) > 1e8;
    return 800 + (large ? 7 : 3) * (s.C1 + s.Cout) / (2 * p.tiles);
}
static WeightCosts weight_costs(const ConvWeight& p) {
    const ConvShape& s = p.shape;
    if (conv_is_wgmma(s)) {
        const int filter = ceil_div(s.kernel, p.warpgroups);
        const int tile = weight_tile_cycles(p);
        if (p.warpgroups == 3) return {gpu.sms, tile, filter, 9000, 12000, 4000};
        return {gpu.sms, tile, filter, 5000, 5000, 4000};
    }
    // The costs of the portable kernels. Floats need three products where bf16 needs one, and take twice the time.
    const int slow = act_parts();
    const int most = 4 * MAX_WEIGHT_PARTIALS;
    if (conv_is_halo(s)) return {gpu.sms, 2500 * slow, 1, 15000 * slow, 15000 * slow, 0, most};
    if (p.block_co == 2) return {2 * gpu.sms, 2600, p.taps, 8000, 8000, 0, most};
    return {3 * gpu.sms, 1900 * slow, p.taps, 3800 * slow, 3800 * slow, 0, most};
}

// Sets how the tiles of 64 channels are divided among the blocks of conv_weight_tma, if a block has `warpgroups`
// warpgroups.
// 3x3: a block has one tile of Cin and one tile of Cout. 1x1: a block has up to three tiles of Cin, and up to one tile
// of Cout for each warpgroup.
static void set_warpgroups(ConvWeight* p, int warpgroups) {
    // Returns how many tiles a block has if it may have at most `most`, and all tiles are divided as equally as
    // possible.
    auto share = [](int tiles, int most) { return ceil_div(tiles, ceil_div(tiles, most)); };
    p->warpgroups = warpgroups;
    p->co_tiles = p->tiles / p->channel_tiles;
    p->block_co = p->shape.kernel == 1 ? share(p->co_tiles, warpgroups) : 1;
    p->block_ci = p->shape.kernel == 1 ? share(p->channel_tiles, 3) : 1;
    p->input_groups = ceil_div(p->channel_tiles, p->block_ci);
}
// Returns the number of blocks of one range of pixels: the number of groups of Cout tiles, times the number of groups
// of Cin tiles, times the number of blocks that the taps are divided among (WeightCosts::filter).
static int64_t range_blocks(const ConvWeight& p) {
    return (int64_t)ceil_div(p.co_tiles, p.block_co) * ceil_div(p.channel_tiles, p.block_ci) * weight_costs(p).filter;
}

// Finds the fastest plan for layers of one kind, which share a launch. It tries all numbers of pixel tiles for a range,
// from the largest down, until there would be too many partials (most_partials). For conv_weight_tma it tries one and
// three warpgroups.
static void plan_weights(std::span<ConvWeight> works) {
    Cheapest<std::pair<int, int>> cut; // warpgroups, pixel tiles of a range
    for (int warpgroups : {1, 3}) {
        int most_tiles = 1;  // pixel tiles of the largest layer
        int tile_cycles = 0; // cycles of a pixel tile of the slowest layer
        for (ConvWeight& p : works) {
            if (conv_is_wgmma(p.shape)) set_warpgroups(&p, warpgroups);
            most_tiles = std::max(most_tiles, p.pixel_tiles);
            tile_cycles = std::max(tile_cycles, weight_costs(p).tile);
        }
        const WeightCosts cost = weight_costs(works[0]);
        for (int range = most_tiles; range >= 1; range--) {
            int64_t blocks = 0;
            int64_t partials = 0; // how many partials there are, each of a tile of 64 x 64 weights (16 KB)
            for (const ConvWeight& p : works) {
                const int splits = ceil_div(p.pixel_tiles, range);
                blocks += range_blocks(p) * splits;
                if (splits > 1) partials += (int64_t)splits * p.tiles * p.taps;
            }
            if (partials > cost.most_partials) break;
            // Time = rounds of blocks * (the time of a block's tiles + its other work) + the second kernel's time.
            const int64_t rounds = (blocks + cost.slots - 1) / cost.slots; // of blocks
            const int64_t block_cycles = (int64_t)range * tile_cycles + (partials ? cost.beside : cost.beside_dweight);
            const int64_t second_kernel = partials ? cost.sums + PARTIAL_CYCLES * partials : 0;
            cut.consider(rounds * block_cycles + second_kernel, {warpgroups, range});
        }
    }
    // Set the cheapest plan for all layers.
    const auto [warpgroups, range] = cut.best;
    for (ConvWeight& p : works) {
        if (conv_is_wgmma(p.shape)) set_warpgroups(&p, warpgroups);
        p.splits = ceil_div(p.pixel_tiles, range);
    }
}

// Plans one layer alone: sets all members of a ConvWeight except its tensors and bias_images.
static ConvWeight plan_weight(const ConvShape& s) {
    const int Ho = s.out_H();
    const int Wo = s.out_W();
    const bool tma = conv_is_wgmma(s);
    const bool halo = !tma && conv_is_halo(s);
    ConvWeight p = {};
    p.shape = s;
    p.taps = s.kernel * s.kernel;
    p.tiles1 = ceil_div(s.C1, 64);
    p.channel_tiles = p.tiles1 + ceil_div(s.C2, 64);
    p.tiles = p.channel_tiles * ceil_div(s.Cout, 64);
    set_warpgroups(&p, 1);

    // A pixel tile has 8 x 16 or 8 x 8 pixels in conv_weight_tma, 8 x 8 pixels in conv_weight_halo, and 64 consecutive
    // pixels in conv_weight_gather.
    if (tma) {
        p.tiles_h = ceil_div(Ho, 8);
        p.tiles_w = ceil_div(Wo, s.kernel == 3 && Wo > 8 ? 16 : 8);
    } else if (halo) {
        p.tiles_h = ceil_div(Ho, 8);
        p.tiles_w = ceil_div(Wo, 8);
    } else {
        p.tiles_h = 1;
        p.tiles_w = ceil_div(Ho * Wo, 64);
    }
    p.pixel_tiles = s.B * p.tiles_h * p.tiles_w;

    // In bf16 a block of conv_weight_gather computes 2 x 2 tiles of weights, if there are enough tiles and products (of
    // 64 x 64 x 64) for this.
    if (!tma) {
        const int64_t products = (int64_t)p.tiles * p.taps * p.pixel_tiles;
        const bool many_tiles = p.co_tiles > 1 && p.channel_tiles > 1;
        const bool wide = act_parts() == 1 && many_tiles && products >= 64 * gpu.sms;
        p.block_co = wide && !halo ? 2 : 1;
        p.block_ci = p.block_co;
    }
    plan_weights({&p, 1});
    return p;
}

// Sets where the partials of a work lie, and returns how many bytes they take. With a single range there are no
// partials of weights.
static size_t put_partials(ConvWeight* p, char* memory) {
    const size_t partials = (size_t)p->splits * p->tiles * p->taps;
    const size_t bytes = p->splits > 1 ? partials * 1024 * sizeof(float4) : 0;
    const size_t bias_bytes = (size_t)(p->splits + p->shape.B) * p->shape.Cout * sizeof(float);
    p->partial = (float4*)memory;
    p->bias_partial = (float*)(memory + bytes);
    return bytes + (bias_bytes + 255) / 256 * 256;
}
// Returns how many bytes of the side stream's workspace conv_backward_weights needs. (conv_detour_bytes returns how
// many bytes of the main stream's workspace conv_forward and conv_backward_input need.)
static size_t conv_workspace(ConvShape s) {
    if (conv_weight_alone(s)) return conv_detour_bytes(s) + conv_workspace(conv_weight_shape(s));
    ConvWeight p = plan_weight(s);
    return put_partials(&p, nullptr);
}

typedef std::vector<ConvWeight> WeightPlans;
// Launches a kernel once for all works. work_of(p): the kernel's argument for a work. blocks_of(p): the number of the
// work's blocks.
template <class Work, int WORKS>
static void launch_weights(void (*kernel)(WeightBatch<Work, WORKS>), const WeightPlans& works, Stream* stream,
                           dim3 threads, int bytes, auto work_of, auto blocks_of) {
    WeightBatch<Work, WORKS> batch = {};
    int blocks = 0;
    for (const ConvWeight& p : works) {
        batch.work[batch.n] = work_of(p);
        batch.first_block[batch.n] = blocks;
        batch.n++;
        blocks += (int)blocks_of(p);
    }
    if (blocks) launch_on(stream, 1, kernel, blocks, threads, bytes, batch);
}
// Returns the number of blocks of a work, over all its ranges.
static int64_t all_blocks(const ConvWeight& p) { return range_blocks(p) * p.splits; }

// Makes tensor maps for works of one kind, and launches conv_weight_tma_kernel for them.
template <class Tile> static void conv_weight_tma(const WeightPlans& works, Stream* stream) {
    auto with_maps = [](const ConvWeight& p) {
        const ConvShape& s = p.shape;
        const TmaParts x = tma_parts(p.x1, p.x2, s.C1, s.C2, s, SLICE_CHANNELS, Tile::PITCH, Tile::HALO_H, 1);
        const CUtensorMap dout =
            tensor_map(p.dout, {s.Cout, s.W, s.H, s.B}, {SLICE_CHANNELS, Tile::TILE_W, Tile::TILE_H});
        const CUtensorMap dweight = tensor_map(p.dweight, {s.C1 + s.C2, p.taps, s.Cout},
                                               {SLICE_CHANNELS / 2, Tile::KERNEL, SLICE_CHANNELS}, Element::FP32);
        return ConvWeightTma{x, dout, dweight, p};
    };
    launch_weights(conv_weight_tma_kernel<Tile>, works, stream, Tile::THREADS, Tile::SHARED_BYTES, with_maps,
                   all_blocks);
}
// Launches a portable kernel, which has two versions: `alone` for a single layer, `together` for several. In `alone`
// the compiler knows that the layer is entry 0 of the batch. So the layer's arguments lie at a fixed place among the
// kernel's parameters.
static void launch_portable(auto* alone, auto* together, const WeightPlans& works, Stream* stream, int threads,
                            int bytes) {
    stream->joined = true; // these kernels do not call await_previous_kernel
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

// The kinds of weight gradients; works of one kind share a launch.
enum WeightKind { TMA_1X1, TMA_3X3, TMA_3X3_NARROW, HALO_3X3, GATHER, GATHER_WIDE };
static WeightKind weight_kind(const ConvWeight& p) {
    const ConvShape& s = p.shape;
    if (conv_is_wgmma(s)) {
        if (s.kernel == 1) return TMA_1X1;
        return s.out_W() > 8 ? TMA_3X3 : TMA_3X3_NARROW;
    }
    if (conv_is_halo(s)) return HALO_3X3;
    return p.block_co == 2 ? GATHER_WIDE : GATHER;
}

// Launches the kernel of a kind. conv_weight_tma's blocks have one warpgroup or three. WeightTile's parameters are:
// size of the filter, warpgroups, pixels across a tile, stages.
static void launch_weight_kind(WeightKind kind, const WeightPlans& works, Stream* stream) {
    const bool three = works[0].warpgroups == 3;
    switch (kind) {
    case TMA_1X1:
        if (three) return conv_weight_tma<WeightTile<1, 3, 8, 4>>(works, stream);
        return conv_weight_tma<WeightTile<1, 1, 8, 6>>(works, stream);
    case TMA_3X3:
        if (three) return conv_weight_tma<WeightTile<3, 3, 16, 5>>(works, stream);
        return conv_weight_tma<WeightTile<3, 1, 16, 6>>(works, stream);
    case TMA_3X3_NARROW:
        if (three) return conv_weight_tma<WeightTile<3, 3, 8, 9>>(works, stream);
        return conv_weight_tma<WeightTile<3, 1, 8, 10>>(works, stream);
    // any GPU
    case HALO_3X3: return with_act([&]<class T>(T) { conv_weight_halo<T>(works, stream); });
    case GATHER: return with_act([&]<class T>(T) { conv_weight_gather<T, 1>(works, stream); });
    case GATHER_WIDE:
        return with_act([&]<class T>(T) {
            constexpr int TILES = PARTS<T> == 1 ? 2 : 1; // weight_kind never returns GATHER_WIDE for floats
            conv_weight_gather<T, TILES>(works, stream);
        });
    }
}

// Computes the weight gradients of at most WEIGHT_BATCH layers: with one launch for each kind, and one launch that adds
// up all partials. If the workspace has no room for the partials of all layers, it computes the layers in two halves.
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
    // Plan each kind as a whole, and give its works their places in the workspace.
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

// Computes the weight gradient of a layer that is first replaced by another one (conv_weight_alone):
//   few channels   It becomes a 1x1 convolution of rows. Afterwards the product is turned into the layer's gradient.
//   upsampling     x is first upsampled.
//   stride 2       dout is first spread out, with zeros in between.
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

// Returns what fraction of a large enough launch this weight gradient fills. With 1 or more it needs no other layers in
// its launch.
static double conv_weight_load(const ConvShape& s) {
    if (conv_weight_alone(s)) return 1;
    ConvWeight p = plan_weight(s);
    WeightCosts cost = weight_costs(p);
    const bool tma = conv_is_wgmma(s);
    if (tma) {
        set_warpgroups(&p, 1);
        if (s.kernel == 1) cost.tile = 160 + 180 * std::min(3, p.channel_tiles);
        else cost.tile = s.out_W() > 8 ? 830 : 430;
    }
    // Blocks of the portable kernels take longer. So their launches must be larger: otherwise the last round of blocks,
    // which does not fill the GPU, costs too much.
    const double enough = WEIGHT_LAUNCH_CYCLES * (tma ? 1 : 6);
    const double cycles = (double)(range_blocks(p) * cost.tile) * p.pixel_tiles / cost.slots;
    return std::max(1.0 / WEIGHT_BATCH, cycles / enough);
}

// The operation of the interface: computes weight gradients. First come all layers that can share launches, then the
// other layers one by one.
static void conv_backward_weights(const std::vector<WeightWork>& works, Stream* stream) {
    conv_weight_batch(works, stream);
    for (const WeightWork& w : works)
        if (conv_weight_alone(w.shape)) conv_weight_one(w, stream);
}

// =====================================================================================================================
// 23. The GPU: memory, copies, repeated work
//
// There are three streams. The main stream has a high priority and runs nearly everything. The side stream has a low
// priority: its kernels fill multiprocessors that the main stream leaves free. The copy stream copies the next batch to
// the GPU while the current one is computed. CUDA events order the streams: a stream waits for an event of another
// stream, and the host does not wait.

// Returns the largest number of parts that a tensor's Stats can have. There is one part for each tile of a convolution,
// and no tile is smaller than 8 x 8 pixels.
static int max_stat_parts(int H, int W) { return ceil_div(H, 8) * ceil_div(W, 8); }

// A kernel that does nothing. code_version asks the runtime for which architecture this kernel was compiled, which is
// the same for all kernels of this binary.
static __global__ void nothing_kernel() { await_previous_kernel(); }

static cudaDeviceProp properties; // of the GPU of this process
static cudaStream_t side_queue;   // the side stream's queue

// Returns how many GPUs the program can use. Without a driver this is 0.
static int count_gpus() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

// Returns the number of the GPU that this process uses. With one process this is `number`. If the process can't use
// this GPU, ends the program with a message that tells the reason.
static int choose_device(int number) {
    int count = 0, driver = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    CUDA_CHECK(cudaDriverGetVersion(&driver)); // 0: no driver is installed
    if (error == cudaErrorInsufficientDriver && driver)
        die("this GPU's driver is too old for the program: it knows CUDA %d.%d, and the program was built with %d.%d; "
            "update the driver, or build with a CUDA toolkit that is no newer than it (make -B train_unet "
            "NVCC=/path/to/nvcc); make train_unet_cpu needs neither",
            driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    if (error != cudaSuccess || !count)
        die("this is the GPU build and there is no GPU that it can use (%s); make train_unet_cpu needs none",
            cudaGetErrorString(error));
    // If several processes run on a machine, each of them uses a different GPU.
    if (world.size > 1 && count == 1) number = 0; // some launchers let each process see only its own GPU
    else if (world.size > 1) number += world.local_rank;
    if (world.size > 1 && number >= count)
        die("process %d of this machine finds %d GPUs; start one for each", world.local_rank + 1, count);
    if (number >= count)
        die("--device %d: the program can use %d GPUs, from 0 on (CUDA_VISIBLE_DEVICES, if set, says which)", number,
            count);
    return number;
}

// Returns the architecture of the code that GPU `number` runs: 80 if the code was compiled for compute capability 8.0,
// and so on. If the driver translates the code for a newer GPU, this does not change the result.
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

// Chooses the GPU, fills in `gpu` (the properties that the choice of kernels depends on), and makes the streams.
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
           // Code for 9.0 is always compiled for sm_90a, which has wgmma. The #error at the head of section 16 makes
           // sure of that.
           .wgmma = version == 90 && allowed.hopper};
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

// Runs work() as a CUDA graph. The first call records the launches of work(), without running them. Every call,
// including the first, then launches the whole recording at once. This saves time: a training step has hundreds of
// launches, and each costs the host microseconds. The arguments of a launch (pointers, sizes) stay as they were
// recorded. So everything that changes from step to step lies in device memory. If allowed.graphs is false, replay only
// calls work().
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

// Destroys a graph. It first waits, because a graph must not be destroyed while it runs.
static void free_graph(Graph* g) {
    CUDA_CHECK(cudaStreamSynchronize(device.queue));
    if (g->exec) CUDA_CHECK(cudaGraphExecDestroy((cudaGraphExec_t)g->exec));
    g->exec = nullptr;
}

// Records the event *moment in a stream: the event happens when all work that is in the stream now has been done. The
// first call makes the event.
static void record(cudaEvent_t* moment, cudaStream_t queue) {
    if (!*moment) CUDA_CHECK(cudaEventCreateWithFlags(moment, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventRecord(*moment, queue));
}
// All later work of the stream waits for the event `moment`. In the second form of the function, it waits for all work
// that is in the stream `other` now.
static void follow(Stream* stream, cudaEvent_t moment) {
    CUDA_CHECK(cudaStreamWaitEvent(stream->queue, moment));
    stream->joined = true;
}
static void follow(Stream* stream, const Stream& other) {
    static cudaEvent_t moment = nullptr;
    record(&moment, other.queue);
    follow(stream, moment);
}

// Calls work(side stream), which launches kernels on the side stream. These kernels begin after the main stream has
// done all its work so far. Then wait_for_side(ticket) makes the main stream wait until they have ended.
static std::map<int, cudaEvent_t> side_events; // for each ticket: the end of its work
template <class F> static void run_beside(int ticket, F work) {
    follow(&device.side, device);
    work(&device.side);
    record(&side_events[ticket], device.side.queue);
}
static void wait_for_side(int ticket) { follow(MAIN_STREAM, side_events[ticket]); }

// How an Upload u is used, again and again: the host fills u->host. send copies u->host to u->device, in the copy
// stream. The copy begins when the main stream has done all work before the latest call of release, because this work
// still reads the old content of u->device. The main stream waits for the copy, reads u->device and releases it.
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

// If the memory has fewer than `wanted` bytes, replaces it by larger memory. The old content is lost.
static void grow(char** memory, size_t* bytes, size_t wanted) {
    if (wanted <= *bytes) return;
    if (*memory) device_free(*memory);
    *bytes = wanted;
    *memory = device_alloc<char>(wanted);
}
// Allocates memory for all later operations: for each stream a workspace, which all operations of the stream share, and
// memory for the sums of group norms.
static void reserve(const Workspace& most, bool training) {
    const size_t for_most_batches = (size_t)2 * MAX_WEIGHT_PARTIALS * 16384; // bytes of 2 MAX_WEIGHT_PARTIALS partials
    if (training) {
        grow(&device.norm_sums, &device.norm_sums_bytes, most.sums);
        grow(&device.side.workspace, &device.side.workspace_bytes, std::max(most.side, for_most_batches));
    }
    grow(&device.workspace, &device.workspace_bytes, most.main);
}
#endif // the GPU

// =====================================================================================================================
// 24. Between ranks: from device to device
// A rank is a process with a device of its own (host/ranks.h). This section has three ways to exchange data between
// devices, and a build contains one of them:
//   USE_NCCL   GPUs: NCCL or, if GPUs of one machine can access each other's memory, direct copies (world.direct)
//   USE_MPI    CPUs: MPI
//   neither    one process, which has nothing to exchange

// Returns what this build lacks to run on several ranks, as a sentence for the user, or null if it lacks nothing.
static const char* ranks_need() {
#if defined(USE_NCCL) || defined(USE_MPI)
    return nullptr;
#elif defined(__CUDACC__)
    return "this program was built without NCCL, which several GPUs need: install libnccl-dev, or pip install "
           "nvidia-nccl-cu12 into .venv, and make -B train_unet";
#else
    return "this is the CPU build for one process; make train_unet_mpi builds it for several: mpirun -n 2 "
           "./train_unet_mpi";
#endif
}

#ifdef USE_NCCL
// The communicator is never destroyed: destroying it would wait for the graphs in which its calls were recorded.
static ncclComm_t communicator = nullptr;

static void leave_devices() {} // nothing to do before a process ends

static std::string nccl_error(ncclResult_t error) {
    return text("NCCL: %s (%s)", ncclGetErrorString(error), ncclGetLastError(communicator));
}
static void nccl_check(ncclResult_t error) {
    if (error != ncclSuccess) die("%s", nccl_error(error).c_str());
}

// Returns the error of a call that NCCL is still working on, or "" if there is no error. The watch in host/ranks.h
// calls this from time to time.
static std::string device_trouble() {
    ncclResult_t error = ncclSuccess;
    if (communicator) ncclCommGetAsyncError(communicator, &error);
    return error == ncclSuccess || error == ncclInProgress ? "" : nccl_error(error);
}

// Ranks on one machine open memory for each other (CUDA's interprocess communication): then a process can write to
// memory that another process has allocated on another GPU. The GPUs' copy engines do this while kernels run. (NCCL
// copies with kernels of its own, which would take multiprocessors from the other kernels.) Kernels can also write
// their results directly to the other GPUs. `opened` has one entry for each region of memory that the ranks have
// opened.
struct Opened {
    size_t bytes;
    std::vector<char*> at; // for each rank r: the address, in this process, of rank r's region of memory
};
static std::vector<Opened> opened;
static Stream sender;        // the stream that copies to other ranks
static bool sending = false; // copies have begun, and end_exchange has to wait for them
// meetings[r]: how many meetings (meet_kernel) rank r has reached; rank r itself writes this number here.
// meetings[NEAR]: how many meetings this rank has reached.
static unsigned* meetings;

// p points into memory of this rank. Returns the address of the same place in rank r's memory, or null if p is not in
// opened memory. If p lies before a region of memory, the offset is negative, and as a size_t it is larger than any
// region.
static void* at_rank(void* p, int r) {
    for (const Opened& o : opened) {
        const size_t offset = (char*)p - o.at[world.rank];
        if (offset < o.bytes) return o.at[r] + offset;
    }
    return nullptr;
}

// Allocates memory that is open to all ranks, if world.direct. All ranks call this together. Every rank makes a handle
// of its new memory, sends it to all other ranks, and opens the handles that it receives. If a rank can't open another
// rank's memory, world.direct becomes false, and all ranks use NCCL from then on. But if an earlier call has already
// opened memory, the program ends.
static void* open_alloc(size_t bytes) {
    if (!world.direct) return device_alloc_bytes(bytes);
    bytes = std::max<size_t>(bytes, 2 << 20); // a smaller region could share a page with memory that must not be opened
    char* const own = (char*)device_alloc_bytes(bytes);
    std::vector<char*> at(world.size, own);
    cudaIpcMemHandle_t handle = {};
    cudaError_t error = cudaIpcGetMemHandle(&handle, own);
    CUDA_CHECK(cudaStreamSynchronize(device.queue)); // wait until it is filled with zeros
    const std::vector<cudaIpcMemHandle_t> handles = gather_host("opening memory for others", handle);
    for (int r = 0; r < world.size && !error; r++) {
        if (r == world.rank) continue;
        error = cudaIpcOpenMemHandle((void**)&at[r], handles[r], cudaIpcMemLazyEnablePeerAccess);
    }
    cudaGetLastError(); // clears CUDA's last error, which this function handles
    world.direct = !any_rank("opening others' memory", error != cudaSuccess);
    if (world.direct) opened.push_back({bytes, at});
    else if (!opened.empty())
        die("GPUs can't open more memory for each other (%s); --exchange nccl does without", cudaGetErrorString(error));
    return own;
}

// Connects the ranks' GPUs by NCCL. For this, rank 0 makes an id and sends it to all other ranks. If `direct` is true
// and all ranks are on one machine, the ranks also open memory for each other.
static void join_devices(bool direct) {
    if (world.size < 2) return;
    setenv("NCCL_NVLS_ENABLE", "0", 0); // no NVLink multicast, unless the user has set the variable
    ncclUniqueId id;
    if (!world.rank) nccl_check(ncclGetUniqueId(&id));
    memcpy(&id, broadcast_host("the start of NCCL", {(const char*)&id, sizeof id}).data(), sizeof id);
    nccl_check(ncclCommInitRank(&communicator, world.size, id, world.rank));
    world.direct = direct && world.size <= NEAR && on_one_machine();
    meetings = (unsigned*)open_alloc((NEAR + 1) * sizeof(unsigned));
    CUDA_CHECK(cudaStreamCreateWithFlags(&sender.queue, cudaStreamNonBlocking));
    printf("exchange: %s\n", world.direct ? "the GPUs write into each other's memory" : "by NCCL");
}

// Each rank waits here until all ranks have reached this meeting. The kernel has one warp. Thread 0 counts the meeting.
// Each thread k > 0 works for one other rank: it writes the number of this meeting to that rank's memory, and waits
// until that rank has written the same number (or a larger one) here. The first fence makes all earlier writes of this
// rank visible to the other ranks before they see the number. After the second fence this rank sees the earlier writes
// of the others. The numbers may overflow, because the code only compares their difference with 0.
static __global__ void meet_kernel(const __grid_constant__ Everywhere<unsigned> meetings, int rank) {
    await_previous_kernel();
    volatile unsigned* const own = meetings.at[0];
    const unsigned turn = own[NEAR] + 1;
    const int k = threadIdx.x;
    const int r = k <= rank ? k - 1 : k; // the rank of meetings.at[k]; meetings.at[0] is this rank's
    __syncwarp();
    if (k == 0) own[NEAR] = turn;
    if (k == 0 || k >= meetings.ranks) return;
    __threadfence_system();
    ((volatile unsigned*)meetings.at[k])[rank] = turn;
    while ((int)(own[r] - turn) < 0) {}
    __threadfence_system();
}

static void meet() {
    if (world.direct) launch(meet_kernel, 1, 32, 0, everywhere(meetings), world.rank);
}

// All NCCL calls between begin_exchange and end_exchange become one launch. If there were direct copies, end_exchange
// makes the main stream wait for them, and then all ranks meet. After that the copies of all ranks have arrived.
static void begin_exchange() { nccl_check(ncclGroupStart()); }
static void end_exchange() {
    nccl_check(ncclGroupEnd());
    if (!sending) return;
    sending = false;
    follow(MAIN_STREAM, sender);
    meet();
}

// For each other rank r: copies part(r) to the memory that rank r has opened, to the place in it that is reserved for
// this rank. The copies begin when the stream has done all its work so far.
template <class F> static void send_directly(void* to, size_t bytes, const Stream& stream, F part) {
    follow(&sender, stream);
    for (int k = 1; k < world.size; k++) {
        // every rank begins with a different receiver, so that no link has several copies at once
        const int r = (world.rank + k) % world.size;
        char* const there = (char*)at_rank(to, r) + world.rank * bytes;
        CUDA_CHECK(cudaMemcpyAsync(there, part(r), bytes, cudaMemcpyDeviceToDevice, sender.queue));
    }
    sending = true;
}

// The next two functions are the operations of the interface. They use direct copies if the receiving array (recvbuf or
// all) is opened memory. Otherwise they use NCCL, which sends bytes.
static void all_to_all(void* recvbuf, const void* sendbuf, size_t bytes, Stream* stream) {
    auto part = [&](int r) { return (const char*)sendbuf + r * bytes; };
    if (at_rank(recvbuf, 0)) return send_directly(recvbuf, bytes, *stream, part);
    for (int r = 0; r < world.size; r++) {
        if (r == world.rank) continue;
        nccl_check(ncclSend(part(r), bytes, ncclInt8, r, communicator, stream->queue));
        nccl_check(ncclRecv((char*)recvbuf + r * bytes, bytes, ncclInt8, r, communicator, stream->queue));
    }
    stream->joined = true; // NCCL may add more than a kernel to the stream
}

static void all_gather(void* all, const void* own, size_t bytes, Stream* stream) {
    if (at_rank(all, 0)) return send_directly(all, bytes, *stream, [&](int) { return own; });
    nccl_check(ncclAllGather(own, all, bytes, ncclInt8, communicator, stream->queue));
    stream->joined = true;
}
#else // no rank can access another one's memory
// The exchange is complete when a call of MPI returns, so the next three functions have nothing to do.
static void begin_exchange() {}
static void end_exchange() {}
static void meet() {}
static void* open_alloc(size_t bytes) { return device_alloc_bytes(bytes); }
static void* at_rank(void*, int) { return nullptr; }
static std::string device_trouble() { return ""; }
#ifdef USE_MPI
// Starts MPI. Only this thread calls MPI (MPI_THREAD_FUNNELED). MPI returns its errors (MPI_ERRORS_RETURN), and
// mpi_check handles them.
static void join_devices(bool) {
    if (world.size < 2) return;
    any_rank("the start of MPI", false); // if a rank has ended because of an error, this finds it and names the rank
    int level, size;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (size != world.size)
        die("MPI knows of %d processes, and its launcher of %d; the CPU build is started by mpirun", size, world.size);
}

// Ends MPI if it was started.
static void leave_devices() {
    int joined = 0;
    MPI_Initialized(&joined);
    if (joined) MPI_Finalize();
}

// An error of MPI ends the run. Its reason may be that another rank has ended. Then the watch (host/ranks.h) tells the
// user this reason, and ends the program, before this function does.
static void mpi_check(int error) {
    if (error == MPI_SUCCESS) return;
    sleep(3); // if a rank has ended, the watch ends the program during this time
    char why[MPI_MAX_ERROR_STRING] = "";
    int length;
    MPI_Error_string(error, why, &length);
    die("MPI: %s", why);
}

// MPI wants the length of each part, and its place, as numbers of floats. A rank does not send its own part to
// itself, so the length of this part is 0.
static void all_to_all(void* recvbuf, const void* sendbuf, size_t bytes, Stream*) {
    const int floats = (int)(bytes / sizeof(float)); // floats of a part
    std::vector<int> count(world.size, floats);
    std::vector<int> first(world.size); // the first float of each part
    for (int r = 0; r < world.size; r++) first[r] = r * floats;
    count[world.rank] = 0;
    mpi_check(MPI_Alltoallv(sendbuf, count.data(), first.data(), MPI_FLOAT, //
                            recvbuf, count.data(), first.data(), MPI_FLOAT, MPI_COMM_WORLD));
}

static void all_gather(void* all, const void* own, size_t bytes, Stream*) {
    const int n = (int)(bytes / sizeof(float));
    const bool in_place = own == (char*)all + world.rank * bytes;
    mpi_check(MPI_Allgather(in_place ? MPI_IN_PLACE : own, n, MPI_FLOAT, all, n, MPI_FLOAT, MPI_COMM_WORLD));
}
#else // one process: there is nothing to send
static void join_devices(bool) {}
static void leave_devices() {}
static void all_to_all(void*, const void*, size_t, Stream*) {}
static void all_gather(void*, const void*, size_t, Stream*) {}
#endif
#endif
