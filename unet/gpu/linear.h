// linear.h - linear layers of the embedding: fp32, few rows, so latency is what they cost.
#pragma once
#include "shared.h"

#ifdef __CUDACC__ // the GPU

INLINE float with_addends(const GradOf<float>& g, size_t i, float d) {
    d += g.add1 ? g.add1[i] : 0.0f;
    return d + (g.add2 ? g.add2[i] : 0.0f);
}

// images that a block works on at a time. Cin is a multiple of 4; x, weight and dweight are aligned to 16 bytes
constexpr int LINEAR_ROWS = 32;

// out (B, Cout) = x (B, Cin) weight (Cout, Cin)^T + bias. grid (Cout / OUTPUTS, B / 32), both rounded up: a block
// computes OUTPUTS outputs of 32 images. A lane works on one image, and a warp on every eighth quad of its inputs (a
// quad is 4 neighbouring inputs). The first weights are copied before the previous kernel has ended, because it does
// not write weights.
template <int OUTPUTS>
static __global__ void __launch_bounds__(256) linear_forward_kernel(float* out, const float* x, const float* weight,
                                                                    const float* bias, int B, int Cin, int Cout) {
    constexpr int WARPS = 8;
    constexpr int QUADS = 64; // how many quads of a row are in shared memory at a time
    __shared__ float4 weights[OUTPUTS][QUADS], rows[LINEAR_ROWS][QUADS];
    const int row = threadIdx.x % 32; // the number of this lane's image among the block's 32
    const int warp = threadIdx.x / 32;
    const int n0 = blockIdx.x * OUTPUTS;           // the block's first output
    const int b0 = blockIdx.y * LINEAR_ROWS;       // the block's first image
    const int column = n0 + threadIdx.x % OUTPUTS; // the output that this thread adds up and stores in the end
    const float shift = column < Cout ? bias[column] : 0;
    // Copies 64 quads, from column k0 on, of rows `first`, `first + 1`, ... of `from` (`end` rows, Cin columns), and
    // zeros beyond. Quad i of row r is stored at place i ^ (r & swap). With swap = 7, lanes that read the same quad of
    // different rows use different banks.
    auto load = [&](auto& to, const float* from, int first, int end, int k0, int swap) {
        UNROLL_FOR (int i = threadIdx.x; i < (int)(sizeof(to) / sizeof(float4)); i += 256) {
            const int r = i / QUADS;
            const int quad = i % QUADS;
            const int k = k0 + quad * 4;
            const bool inside = first + r < end && k < Cin;
            const size_t place = inside ? (size_t)(first + r) * Cin + k : 0;
            copy_async_16(&to[r][quad ^ (r & swap)], from + place, inside);
        }
    };
    float acc[OUTPUTS] = {}; // the part that this warp has summed of each output of this thread's image
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
    // The warps' partial sums are written over the array `rows`, which nobody reads any more.
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

// Backward:
//   dweight = dout^T x      dbias = the sum of dout over images      dx = dout weight
//
// A warp works on 64 inputs of 32 images, and on 8 outputs at a time. A lane has two of these inputs. Its registers
// hold x and dx of both for all 32 images. For each output it reads its two weights once, and the dout of every image.
// The outputs are divided among the 4 warps of a block, and among splits, which are different blocks. A split stores
// its dx as one of the `parts` (splits, B, Cin). A second kernel adds up the parts.
constexpr int LINEAR_OUTS = 8;
constexpr int LINEAR_WARPS = 4;
// What a warp reads for 8 outputs, 64 inputs and 32 images. before: dweight, summed over earlier images
struct LinearStage {
    float weight[LINEAR_OUTS][64];
    float before[LINEAR_OUTS][64];
    float dout[LINEAR_OUTS][LINEAR_ROWS + 4]; // padded, so that a warp copies to 32 different banks
};
struct LinearShared { // a block's shared memory
    LinearStage stages[LINEAR_WARPS][2];
    float2 sums[LINEAR_WARPS][LINEAR_ROWS][32]; // the part of dx that each warp has summed over its outputs
};
struct LinearBackward {
    float *dweight, *dbias;
    float* parts; // (splits, B, Cin): partial sums of dx; null: dx is not wanted
    const float *dout, *x, *weight;
    int B, Cin, Cout;
    int tiles;  // how many tiles of 64 inputs there are
    int splits; // into how many splits the outputs are divided; different blocks work on different splits
};

// Copies what belongs to outputs o0 ... o0 + 7 and images b0 ... b0 + 31. dout of others becomes 0.
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

// grid (tiles * splits): a block works on one tile of 64 inputs and on one split of the outputs.
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
    // For dbias, this lane sums dout of output o0 + bias_output over images 8 bias_row ... 8 bias_row + 7 of the 32.
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
        int place = 0; // the stage that is read
        for (int o0 = first; o0 < p.Cout; o0 += stride, place ^= 1) {
            copies_arrived<0>();
            __syncwarp();
            load_linear_stage(shared.stages[warp][place ^ 1], p, o0 + stride, b0, tile);
            const LinearStage& now = shared.stages[warp][place];
            // dbias does not depend on the inputs, so only the blocks of the first tile of inputs compute it.
            if (tile == 0) { // a lane adds up dout of 8 images for one output, then 4 lanes add up their sums
                const float4* const d = (const float4*)&now.dout[bias_output][bias_row * 8];
                const float4 u = d[0];
                const float4 v = d[1];
                const float eight = ((u.x + u.y) + (u.z + u.w)) + ((v.x + v.y) + (v.z + v.w));
                const float sum = lane_sum<8, 16>(eight);
                float* const bias = p.dbias + o0 + bias_output;
                if (bias_row == 0 && o0 + bias_output < p.Cout) *bias = b0 ? *bias + sum : sum;
            }
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
        copies_arrived<0>();
        // All warps have read their stages, and the shared.sums of the previous 32 images.
        __syncthreads();
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
    const int outputs = Cout <= 1024 ? 8 : 16;
    const dim3 grid(ceil_div(Cout, outputs), ceil_div(B, LINEAR_ROWS));
    auto kernel = outputs == 8 ? linear_forward_kernel<8> : linear_forward_kernel<16>;
    launch_on(stream, 1, kernel, grid, 256, 0, out, x, weight, bias, B, Cin, Cout);
}

// about two blocks for each multiprocessor, but not so many that some warps have no outputs
static int linear_splits(int Cin, int Cout) {
    const int two_blocks_an_sm = 2 * gpu.sms / ceil_div(Cin, 64);
    const int all_warps_busy = ceil_div(Cout, LINEAR_WARPS * LINEAR_OUTS);
    return std::max(1, std::min(two_blocks_an_sm, all_warps_busy));
}
static size_t linear_backward_workspace(int B, int Cin, int Cout) {
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
    each(n, [=] __device__(size_t i) {
        float sum = 0;
        _Pragma("unroll 12") for (int k = 0; k < splits; k++) sum += parts[k * n + i];
        dx.dx[i] = with_addends(dx, i, sum);
    });
}

// struct Silu (elements.h) has the formulas. Z_FACTOR<float> is 1, so the argument of df is x itself.
#endif
