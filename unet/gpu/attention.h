// attention.h - what all attention kernels share.
#pragma once
#include "shared.h"

#ifdef __CUDACC__ // the GPU

struct AttentionCall {
    act* to;                     // where the result is written: out, or dqkv in the backward pass
    SoftmaxRow* rows;            // (B, heads, T): the forward pass writes them, the backward pass reads them
    const act *qkv, *dout, *out; // dout and out are null in the forward pass
    int B, T, C, heads;
    int d = C / heads;         // how many channels a head has
    int all_heads = B * heads; // how many heads all images have together
};

// The rows of one head in a matrix. p: the address of row 0. pitch: elements from a row to the next one
template <class T> struct HeadRows {
    T* p;
    int pitch;
    INLINE T* row(size_t t) const { return p + t * pitch; }
};

enum { Q_PART, K_PART, V_PART }; // the parts of a pixel's 3C channels in qkv and dqkv

// A block's tile of `rows` rows of one head. Blocks with neighbouring numbers have tiles of the same head, so most of
// them find the rows that they read in the L2 cache.
struct HeadTile {
    const AttentionCall& a;
    int rows;
    int tiles = ceil_div(a.T, rows);      // how many tiles a head has
    int index = blockIdx.x / tiles;       // the number of the head: b * heads + h
    int row0 = blockIdx.x % tiles * rows; // the tile's first row
    int b = index / a.heads;
    int h = index % a.heads;

    // Returns the index of the head's row t in arrays of (B, heads, T).
    INLINE size_t row_index(int t) const { return (size_t)index * a.T + t; }
    template <class T> INLINE HeadRows<T> of_qkv(const act* qkv, int part) const {
        return {(T*)qkv + (size_t)b * a.T * 3 * a.C + part * a.C + h * a.d, 3 * a.C};
    }
    template <class T> INLINE HeadRows<T> of_out(const act* out) const {
        return {(T*)out + (size_t)b * a.T * a.C + h * a.d, a.C};
    }
};

// The operands of the portable backward kernels. owns_keys: whether the block owns keys
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

// Returns the number of the warp's first own row, counted within the block's own rows.
template <class Tile> INLINE int warp_row() { return threadIdx.x / 32 * Tile::WARP_ROWS; }

// Returns D of a row: rowsum(dout * out). Four lanes compute D together, and each of them returns it.
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

// D is (B, heads, T). grid (B * heads * tiles of T): a block works on 64 rows of a head. Four threads work on each row.
template <class T> static __global__ void __launch_bounds__(256) attention_dots_kernel(float* D, AttentionCall a) {
    const HeadTile tile{a, 64};
    const int t = tile.row0 + threadIdx.x / 4;
    const int row = min(t, a.T - 1); // threads whose row lies beyond T must take part in row_dot's lane_sum, too
    await_previous_kernel();
    const auto dout = tile.of_out<const T>(a.dout);
    const auto out = tile.of_out<const T>(a.out);
    const float dot = row_dot(dout.row(row), out.row(row), a.d);
    if (threadIdx.x % 4 == 0 && t < a.T) D[tile.row_index(t)] = dot;
}

// Computes D into the workspace, and returns the address of D.
template <class T> static float* launch_attention_dots(const AttentionCall& a) {
    launch(attention_dots_kernel<T>, a.all_heads * ceil_div(a.T, 64), 256, 0, device.workspace, a);
    return (float*)device.workspace;
}
#endif
