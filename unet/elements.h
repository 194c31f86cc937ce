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

// Code that needs a case for every enumerator is a switch without a default. So the compiler names all such places if
// an enumerator is added (-Werror=switch). ALL_CASES_RETURN stands after such a switch if all of its cases return.
#define ALL_CASES_RETURN __builtin_unreachable();

// The format in which a number of a tensor is stored. Sums are computed in fp32 or double. For FP8, see choose_fp8.
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

// The type of activations, and of the copy of the convolutions' weights that kernels read. It is never FP8. All other
// weights, and all gradients of weights, are in fp32.
static Element act_element = Element::FP32;
static size_t act_bytes() { return bytes_of(act_element); }
// If activations are fp32, there is no copy: kernels read the convolutions' weights themselves.
static bool weights_have_copy() { return act_element != Element::FP32; }

// FP8 has two formats (Micikevicius et al. 2022, arXiv:2209.05433), of a sign, an exponent and a mantissa.
//   Element::FP8            e4m3: four bits of exponent, three of mantissa, for activations and weights
//   Element::FP8_GRADIENT   e5m2: five bits of exponent, two of mantissa, for gradients of activations, whose sizes
//                           differ more
struct Fp8Format {
    int mantissa;         // bits of the mantissa
    int bias;             // is added to the exponent before the exponent is stored
    float largest;        // the largest number
    uint8_t largest_bits; // its bits
};
constexpr Fp8Format E4M3{.mantissa = 3, .bias = 7, .largest = 448, .largest_bits = 0x7E};
[[maybe_unused]] constexpr Fp8Format E5M2{.mantissa = 2, .bias = 15, .largest = 57344, .largest_bits = 0x7B};
constexpr uint8_t FP8_NAN = 0x7F; // these bits mean NaN in both formats
// Rounds v to the nearest FP8 number; halfway between two, to the one whose last bit is 0. Numbers that are too large
// become the largest FP8 number. Kernels round in the same way (pack_fp8).
static inline uint8_t fp8_bits(float v, const Fp8Format& f = E4M3) {
    const uint8_t sign = std::signbit(v) ? 0x80 : 0;
    const float size = std::fabs(v);
    if (std::isnan(v)) return FP8_NAN;
    if (size >= f.largest) return sign | f.largest_bits;
    uint32_t bits; // the float's bits: 8 of exponent and 23 of mantissa
    memcpy(&bits, &size, sizeof bits);
    // FP8 numbers below the smallest normal number are subnormal: multiples of the smallest FP8 number above 0. Their
    // bits, read as an integer, say which multiple.
    const int smallest_normal = 127 + 1 - f.bias; // its exponent, as fp32 stores it
    if ((int)(bits >> 23) < smallest_normal)
        return sign | (uint8_t)std::lrintf(std::ldexp(size, f.bias - 1 + f.mantissa));
    const int dropped = 23 - f.mantissa; // how many bits of the float's mantissa FP8 does not keep
    // Adds half of what the last kept bit is worth, or a little less if that bit is 0, so that a value halfway becomes
    // the number whose last bit is 0. If the mantissa overflows, the exponent grows by 1. The last line drops the other
    // bits, and exchanges fp32's bias of 127 for FP8's.
    bits += (1u << (dropped - 1)) - 1 + (bits >> dropped & 1);
    return sign | (uint8_t)((bits >> dropped) - ((127 - f.bias) << f.mantissa));
}
// The value of an FP8 number. e5m2's infinities, which fp8_bits never makes, become NaN.
[[maybe_unused]] static inline float fp8_value(uint8_t bits, const Fp8Format& f = E4M3) {
    const int exponent = (bits & 0x7F) >> f.mantissa;
    const int mantissa = bits & ((1 << f.mantissa) - 1);
    if ((bits & 0x7F) > f.largest_bits) return NAN;
    const int of_step = std::max(exponent, 1) - f.bias - f.mantissa; // the last bit of the mantissa is worth 2^of_step
    const float size = std::ldexp((float)(mantissa + (exponent ? 1 << f.mantissa : 0)), of_step);
    return bits & 0x80 ? -size : size;
}

enum class Nonlinearity : uint8_t { NONE, SILU }; // the function that a group norm applies to its result

// Kernels are compiled for a type T of elements: float or, on a GPU, bf16. These constants depend on the type.
template <class T> struct ElementOf;
// static_assert(IS_MISSING<T>) stops the compilation if a type has no specialisation of a function.
template <class T> constexpr bool IS_MISSING = false;
template <> struct ElementOf<float> {
    static constexpr Element ELEMENT = Element::FP32;
    static constexpr bool FAST_EXP = false; // whether the hardware's approximate e^x is exact enough for this type
    static constexpr int PARTS = 2;         // for tensor cores, a float is split into this many fp16 numbers
    static constexpr uint32_t TWO_ONES = 0x3C003C00; // two ones in fp16. (A product with ones computes sums.)
    static constexpr int FEW_PARTS = 1;              // conv_few stores a float as the sum of so many values of type T
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

// df, the derivative of a nonlinearity at z, is given u = Z_FACTOR<T> z. The sigmoid is computed fastest from u: for
// bf16, u = -z log2(e), because the hardware computes 2^u, which is e^-z. For fp32, u is z. The factor costs nothing: a
// norm's z is x * scale + shift, and the norm multiplies scale and shift by the factor, once for each image and
// channel.
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
template <class T> constexpr float Z_FACTOR = ElementOf<T>::FAST_EXP ? -LOG2E : 1;

// sigmoid(z) = 1 / (1 + e^-z) of u = Z_FACTOR<T> z, as exactly as tensors of type T need it.
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

// Calls `work` with an object of the struct that computes nonlinearity n: work(Silu<T>{}) if n is SILU.
template <class T, class F> HD INLINE void with_nonlinearity(Nonlinearity n, F work) {
    switch (n) {
    case Nonlinearity::NONE: return;
    case Nonlinearity::SILU: return work(Silu<T>{});
    }
    ALL_CASES_RETURN
}
// nvcc looks for a missing case of a switch only in code for the host. So this compiles with_nonlinearity for the host,
// too.
struct NoWork {
    template <class N> HD void operator()(N) const {}
};
template void with_nonlinearity<float>(Nonlinearity, NoWork);

// Pixels (B, H, W, C) become patches of p x p pixels, (B, H / p, W / p, C p p), as in PyTorch's F.pixel_unshuffle, but
// with the channels last. i: the index of an element in the pixels. The result is its index in the patches.
HD static inline size_t place_in_patches(size_t i, int H, int W, int C, int p) {
    const int c = i % C;
    const int w = i / C % W;
    const int h = i / C / W % H;
    const size_t b = i / C / W / H;
    const size_t patch = (b * (H / p) + h / p) * (W / p) + w / p;
    return ((patch * C + c) * p + h % p) * p + w % p;
}
