// norm.h - what all group norms share.
#pragma once
#include "shared.h"

#ifdef __CUDACC__ // the GPU

constexpr int NORM_THREADS = 256;
constexpr int NORM_SLAB = 64; // how many channels a slab has at most
// How many blocks of a kernel should run on a multiprocessor at the same time. This limits the registers of a thread.
// heavy: the kernel needs more registers, because it computes dropout or, in the second pass, adds addends
constexpr int norm_forward_blocks(bool dropout) { return dropout ? 3 : 4; }
constexpr int norm_backward_blocks(bool heavy) { return heavy ? 2 : 3; }

struct NormArgs {
    const void *x1, *x2;        // (B, HW, C1) and (B, HW, C2)
    const float *weight, *bias; // (C)
    const float* scale_shift;   // (B, ss_stride): film scale (C), then film shift (C); null: none
    int ss_stride;              // floats from one image's scales to the next image's; a multiple of 4, for float4 reads
    Dropout dropout;
    NormShape s;
    // Used only in the backward pass:
    const float *mean = nullptr, *rstd = nullptr; // (B, groups)
    float* dscale_shift = nullptr;                // the gradient of scale_shift, in the same layout
    float2* sums = nullptr;                       // (B, C): each image's part of dbias and dweight

    // Computed from the members above, once, on the host. norm_grid sets `chunk`.
    int C = s.C1 + s.C2;
    int Cg = C / s.groups; // how many channels a group has
    int log_slab = C % NORM_SLAB ? 5 : 6;
    int slab = 1 << log_slab;                              // how many channels a slab has
    int chunk = 0;                                         // how many pixels a chunk has
    uint32_t threshold = dropout_threshold(dropout.p);     // an element is dropped if its random word is below it
    uint32_t group_factor = (1u << 31) / (uint32_t)Cg + 1; // see group_of
    double weight_of_one = 1.0 / ((double)s.HW * Cg);      // the weight of one value in its group's mean

    // Returns c / Cg, if c * Cg < 2^31. A division would take some 20 instructions.
    __device__ int group_of(int c) const { return (int)((uint64_t)c * group_factor >> 31); }
};

// Loads a pair for each of V channels: (first[i], second[i]) = table[i].
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

// The parameters of V channels in z = (xhat weight + bias) factor + shift, where factor = 1 + scale. scale and shift
// come from the embedding (FiLM). The previous kernel does not write them, so they are loaded before the wait for it.
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
    // Returns z_scale and z_shift of the i-th channel (z = x z_scale + z_shift), both multiplied by z_factor. In the
    // backward pass z_factor is Z_FACTOR, because a nonlinearity's df expects Z_FACTOR z.
    INLINE float2 coefficients(int i, float mean, float rstd, float z_factor = 1) const {
        const float x_weight = rstd * weight[i]; // xhat weight = (x - mean) x_weight
        const float z_scale = x_weight * factor(i);
        const float z_shift = (bias[i] - mean * x_weight) * factor(i) + shift[i];
        return make_float2(z_scale * z_factor, z_shift * z_factor);
    }
};

// The parameters of one channel of one image, and mean and rstd of its group, which the forward pass has stored.
struct NormChannel : NormParameters<1> {
    int b, c;
    float mean, rstd;

    INLINE NormChannel(const NormArgs& a, int b, int c) : NormParameters(a, b, c), b(b), c(c) {
        const int group = b * a.s.groups + a.group_of(c);
        mean = a.mean[group];
        rstd = a.rstd[group];
    }
    INLINE float2 coefficients(float z_factor) const { return NormParameters::coefficients(0, mean, rstd, z_factor); }
    INLINE float dxhat_factor() const { return weight[0] * factor(0); } // w in the formula dxhat = w dz
    // Writes this image's part of dbias and dweight, and the gradients of its film shift and film scale. sum holds the
    // sums of dz and of dz x over the image's pixels. Below, factor is 1 + film scale.
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

// Multiplies v by dropout's factors for elements e, e + 1, ... of image b: 0 if dropped, and else 1 / (1 - p).
template <int V> INLINE void apply_dropout(float (&v)[V], const NormArgs& a, uint32_t step, int b, size_t e) {
    const float keep = 1.0f / (1.0f - a.dropout.p);
    UNROLL_FOR (int i = 0; i < V; i += 4) { // each call of philox gives four random words
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

// Returns the sum of n pairs, which lie `pitch` pairs apart. AT_ONCE pairs are loaded at a time.
template <int AT_ONCE> INLINE double2 sum_pairs(const float2* pairs, int n, int pitch) {
    double2 sum = make_double2(0, 0);
    _Pragma("unroll AT_ONCE") for (int i = 0; i < n; i++) {
        const float2 q = pairs[(size_t)i * pitch];
        sum.x += q.x;
        sum.y += q.y;
    }
    return sum;
}

// Multiplies dout by the nonlinearity's derivative and by dropout's factors. x is the norm's input. scale and shift
// have been multiplied by Z_FACTOR, as df expects.
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

// Returns x_factor and offset of a group, in dx = scale dz - (x_factor x + offset):
//   x_factor = rstd^2 E[dxhat xhat]      offset = rstd E[dxhat] - x_factor mean
// sum, product: this lane's part of the group's sums of dxhat and of dxhat x. Eight lanes work on one group.
INLINE float2 group_terms(double sum, double product, float mean, float rstd, const NormArgs& a) {
    sum = group_sum(sum) * a.weight_of_one;                          // E[dxhat]
    product = group_sum(product) * a.weight_of_one;                  // E[dxhat x]
    const float dxhat_xhat = (float)((product - mean * sum) * rstd); // E[dxhat xhat]
    const float x_factor = dxhat_xhat * rstd * rstd;
    return make_float2(x_factor, (float)sum * rstd - x_factor * mean);
}

// A norm for norm_sums_kernel, which adds up the images' parts of dbias and dweight, for many norms in one launch.
struct NormSums {
    const float2* sums; // (B, C): each image's part of dbias and dweight
    float *dweight, *dbias;
    int B, C;
};
constexpr int MAX_NORM_SUMS = 64;
static int norm_sums_count = 0;
static size_t norm_sums_used = 0; // how many bytes of device.norm_sums are in use

// Chooses a.chunk, the number of pixels of a chunk, so that there are about per_sm blocks for each multiprocessor. An
// image has at most max_chunks chunks. Returns the grid.
static dim3 norm_grid(NormArgs& a, int per_sm, int max_chunks) {
    const int slabs = a.C / a.slab;
    const int rows = NORM_THREADS * act_vec() / a.slab; // how many pixels a block works on at a time
    const int fill_gpu = std::max(per_sm * gpu.sms / (a.s.B * slabs), 1);
    const int chunks = std::min(fill_gpu, max_chunks);
    a.chunk = ceil_div(ceil_div(a.s.HW, chunks), rows) * rows;
    return dim3(ceil_div(a.s.HW, a.chunk), slabs, a.s.B);
}
#endif
