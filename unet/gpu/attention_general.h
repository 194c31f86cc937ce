// attention_general.h - attention for heads of any size, any GPU.
#pragma once
#include "attention.h"

#ifdef __CUDACC__ // the GPU

// ---------------------------------------------------------------------------------------------------------------------
// --- attention_forward_general and attention_backward_general: heads of any size, any GPU
// Used when: no other kernel can be used: d > 256 in bf16, d > 128 in fp32.
// How: a warp owns a row, and each of its lanes computes 8 columns of the row's result. Rows of more than 256 columns
//   are computed by several warps, each of which computes P again.
// Costs: The fp32 units compute everything. Each warp reads all rows that its own row is combined with.

constexpr int GENERAL_WARPS = 8;   // warps of a block
constexpr int GENERAL_COLUMNS = 8; // a lane computes this many columns, which lie 32 apart; a warp computes 256 columns

// Returns the dot product of a and b, which have d elements. All lanes of a warp compute it together.
template <class T> INLINE float warp_dot(const T* a, const T* b, int d) {
    float sum = 0;
    for (int c = threadIdx.x % 32; c < d; c += 32) {
        sum += (float)a[c] * (float)b[c];
    }
    return warp_sum(sum);
}

// This block computes chunk blockIdx.y of 256 columns. Calls f(i, c) for this lane's columns c < d of the chunk.
template <class F> INLINE void each_column(int d, F f) {
    UNROLL_FOR (int i = 0; i < GENERAL_COLUMNS; i++) {
        const int c = (blockIdx.y * GENERAL_COLUMNS + i) * 32 + threadIdx.x % 32;
        if (c < d) f(i, c);
    }
}

// grid (B * heads * tiles of T, chunks of 256 columns). A warp works on one query, and reads one key after the other.
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
    float out[GENERAL_COLUMNS] = {}; // the sum of P v over the keys so far, in this lane's columns
    float top = -INFINITY;           // the highest score so far
    float sum = 0;                   // the sum of P so far
    for (int j = 0; j < a.T; j++) {
        const float S = warp_dot(q.row(row), k.row(j), a.d);
        const float highest = fmaxf(top, S);
        // If this score is higher than all earlier ones, the earlier sums shrink.
        const float shrink = exp2f((top - highest) * scale);
        const float P = exp2f((S - highest) * scale);
        top = highest;
        sum = sum * shrink + P;
        each_column(a.d, [&](int i, int c) { // out = shrink out + P v
            const float value = (float)v.row(j)[c];
            out[i] = out[i] * shrink + P * value;
        });
    }
    // The values P were not divided by the sum of their row. So the array `out` is divided by it here.
    T* to = tile.of_out<T>(a.to).row(row);
    each_column(a.d, [&](int i, int c) { to[c] = (T)(out[i] / sum); });
    // All lanes write the same numbers. So do the warps that compute the row's other chunks of columns.
    a.rows[tile.row_index(row)] = SoftmaxRow{top, log2f(sum)};
}

// grid (B * heads * tiles of T, chunks of 256 columns, 2): blocks with z = 0 own keys, blocks with z = 1 own queries. A
// warp owns one row, and reads the streamed rows one after the other:
//
//   own query:   A1 = q, A2 = dout,   B1 = k, B2 = v      sum1 becomes dq
//   own key:     A1 = k, A2 = v,      B1 = q, B2 = dout   sum1 becomes dk, sum2 becomes dv
//
// D holds, for each query, the sum of dout * out over the head's channels. For each streamed row:
//   S = A1 B1^T,   P = 2^((S - top) log2(e) / sqrt(d) - log_sum),   dP = A2 B2^T,   dS = P (dP - D),
//   sum1 += dS B1,   and if the warp owns a key: sum2 += P B2
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
    float sum1[GENERAL_COLUMNS] = {}; // dq or dk, before the factor 1 / sqrt(d)
    float sum2[GENERAL_COLUMNS] = {}; // dv; not used if the warp owns a query
    for (int j = 0; j < a.T; j++) {   // the streamed row j: a query if the warp owns a key, otherwise a key
        const T* const b1 = operands.B1.row(j);
        const T* const b2 = operands.B2.row(j);
        const size_t query = tile.row_index(owns_keys ? j : row);
        const SoftmaxRow& r = a.rows[query]; // P is computed again from S and from the query's top and log_sum
        const float S = warp_dot(a1, b1, a.d);
        const float dP = warp_dot(a2, b2, a.d);
        const float P = exp2f((S - r.top) * scale2 - r.log_sum);
        const float dS = P * (dP - D[query]);
        each_column(a.d, [&](int i, int c) {
            sum1[i] += dS * (float)b1[c];
            if (owns_keys) sum2[i] += P * (float)b2[c];
        });
    }
    // dq or dk is multiplied by 1 / sqrt(d) only here, at the end.
    T* d_own = tile.of_qkv<T>(a.to, owns_keys ? K_PART : Q_PART).row(row);
    T* dv = tile.of_qkv<T>(a.to, V_PART).row(row);
    each_column(a.d, [&](int i, int c) {
        d_own[c] = (T)(sum1[i] * scale);
        if (owns_keys) dv[c] = (T)sum2[i];
    });
}

// Launches the backward pass if a.dout is not null, and otherwise the forward pass.
template <class T> static void launch_attention_general(const AttentionCall& a) {
    const int tiles = a.all_heads * ceil_div(a.T, GENERAL_WARPS);
    const int chunks = ceil_div(a.d, 32 * GENERAL_COLUMNS); // chunks of 256 columns; a warp computes one chunk
    const dim3 grid(tiles, chunks, a.dout ? 2 : 1);
    constexpr int threads = 32 * GENERAL_WARPS;
    if (!a.dout) return launch(attention_forward_general_kernel<T>, grid, threads, 0, a);
    launch(attention_backward_general_kernel<T>, grid, threads, 0, a, launch_attention_dots<T>(a));
}

static size_t attention_backward_workspace(int B, int T, int, int heads) { // returns how many bytes D has
    return (size_t)B * heads * T * sizeof(float);
}
#endif
