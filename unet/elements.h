// elements.h - numbers as they lie in memory: element types, FP8, nonlinearities, patches of pixels.
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

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define HD __host__ __device__ // marks functions that both the host and the device call
#define INLINE __device__ __forceinline__
typedef void act; // an element of an activation; void, because act_element holds its type at run time
#else
#define HD
#define INLINE inline
typedef float act;
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
//   with_act                   a case for the type (gpu/shared.h). with_act turns act_element into a C++ type T.
//                              (conv_product does so, too, see below.) Once the case is there, the compiler names all
//                              that kernels need for T:
//   ElementOf                  its constants (elements.h)
//   unpack, pack, FourOf,      how a piece of 16 bytes becomes floats, and the reverse. Then the same for four of its
//   to_floats, from_floats,    numbers, and for two (gpu/shared.h, side by side)
//   store_two, load_two
//   mma, pack_pair             its instruction on the tensor cores, and how two numbers are packed into one register
//                              (gpu/shared.h). A type that is split into several fp16 numbers (ElementOf::PARTS is above
//                              1) does not need them. Fragments are made for numbers of 2 bytes, where an instruction
//                              adds up 16 products for each sum. With numbers of 1 byte it adds up 32, so
//                              load_fragment, load_fragments and their callers change, too
//
// Until these are done, a run ends with an error message:
//   ACTIVATION_ELEMENTS        the types that activations may have (below)
//   `precision`                its name as a word, in the flag's row of unet/flags.h. There it comes after all other
//                              words, because model files hold a word's place in the row. (--use_fp16 chooses bf16. If
//                              the new type is fp16, change precision_of_use_fp16, in config.h)
//   conv_product               its rows in the table ("Which kernel runs"): one for pick_conv_gather, and one for a function
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
//                              launch_attention ("Which kernel runs") are reached only where act_has_wgmma is true. They name
//                              bf16 as their type, so change them, too
// Only for a type whose smallest numbers are larger than bf16's, such as fp16, which loses small gradients:
//   forward_and_loss           `factor` has to be larger: it becomes a loss scale ("A training step")
//   sum_gradients              divides each rank's gradient by the loss scale, but not the old sum, which is divided
//                              already. It must always write the sum: so far, its `write` may be false ("The optimiser")
//   orthogonalise              rounds the momentum and products of it to the type (--optimizer muon). Small numbers
//                              would become 0, and then the weights would not move. So orthogonalise has to multiply
//                              the momentum by a factor first ("The optimiser")
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

enum class Nonlinearity : uint8_t { NONE, SILU }; // the function that a group norm applies to its result

// Kernels are compiled for a type T of elements: float or, on a GPU, bf16. ElementOf<T> holds the constants that depend
// on the type, except those that follow from the type's size. (Enum Element, in interface.h, lists what else a new type
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
    static constexpr int FEW_PARTS =
        1; // conv_few ("Convolution") stores a float as the sum of this many values of type T
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
// it, set BEHIND_NORMS ("The network") to this value. The PyTorch twin has its nonlinearities in common/model.py.
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
// defined in dev/reference.h for a CPU, and in gpu/shared.h for a GPU.)
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
