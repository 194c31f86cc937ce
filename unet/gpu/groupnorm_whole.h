// groupnorm_whole.h - group norm's backward pass with an image's slab in shared memory.
#pragma once
#include "norm.h"

#ifdef __CUDACC__ // the GPU

// ---------------------------------------------------------------------------------------------------------------------
// --- groupnorm_backward_whole: an image's slab in shared memory
// Used when: x and dout of a slab fit into the shared memory of a block, or of a cluster of blocks (sm_90 and later),
//   and plan_norm_whole expects this kernel to be faster than two passes.
// How: A slab is whole groups of channels of one image. Each block of a cluster works on a chunk of the pixels:
//
//     1. each thread copies x and dout of its own pixels and channels to shared memory
//     2. each thread adds up dz and dz x of its pixels; dz replaces dout in shared memory
//     3. each warp adds up the sums of its threads; in a cluster, each block sends the sums of its warps to all blocks
//     4. every block computes x_factor and offset of each of the slab's groups
//     5. dx = scale dz - (x_factor x + offset) + addends, from x and dz in shared memory
//     6. one block of the cluster computes the image's part of the parameters' gradients
// Costs: x and dout are read once. On 8x8 images the threads mostly wait for x, and for their instructions to be
//   fetched. So most loops are not unrolled, and the values that the first computations need are loaded first.

// v holds a pair of sums for each of the thread's channels: of dz, and of dz x. This function adds up v over those
// lanes of a warp whose numbers differ by multiples of `columns` (a power of 2). In each step, a lane gives half of its
// values to another lane, and adds the values that it receives to its other half. At the end the lane's pairs begin at
// v[0]. Returns the index that the lane's first sum had in v. HALF: how many values a lane gives away in the first
// step. OFFSET: by how much the numbers of the two lanes differ in the first step.
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

// How groupnorm_backward_whole_kernel divides an image. A vector is VEC neighbouring channels (16 bytes). A slab
// consists of whole groups, and also of whole vectors. The 32 lanes of a warp work on 2^log_columns neighbouring
// vectors of each of 32 / 2^log_columns pixels at a time. 2^log_warps warps work on the same vectors of different
// pixels. Lanes whose vectors lie beyond the slab are idle.
struct NormWhole {
    int threads; // threads of a block
    int slab;    // how many channels a slab has
    int log_columns, log_warps;
    int chunks; // how many blocks a cluster has; 0: groupnorm_backward makes two passes instead (plan_norm_whole)
    int chunk;  // how many pixels a chunk has

    HD int rows() const { return 32 << log_warps >> log_columns; } // how many pixels a block works on at a time
    HD int slots() const { return (chunk + rows() - 1) / rows(); } // how many pixels a thread works on at most
    // Returns the distance, in pairs, between rows of sums in shared memory. A row has a pair of sums for each channel
    // of the slab. The distance is odd, so that the pairs of one channel lie in different banks.
    HD int pitch() const { return slab + 1; }
    // Returns how many bytes of shared memory a block needs. NormSlab has the same order of arrays.
    int bytes() const {
        const int pieces = 2 * slots() * threads; // x and dout
        const int per_channel = sizeof(float2) + sizeof(float4);
        // One row of sums for each of the warps that work on the same vectors and, in a cluster, one for each block.
        const int sums = (1 << log_warps) + (chunks > 1 ? chunks : 0);
        return pieces * 16 + slab * per_channel + sums * pitch() * (int)sizeof(float2);
    }
};

// With at most this many threads in a block, the registers of a multiprocessor suffice for two blocks.
constexpr int MAX_WHOLE_THREADS = 384;

// A block works on a chunk of the pixels and a slab of the channels of image b. Each thread works on V neighbouring
// channels of `count` pixels, which lie `rows` pixels apart.
template <class T, bool DROPOUT> struct NormSlab {
    static constexpr int V = VEC<T>;
    static constexpr int COPY_GROUPS = 4; // dout is copied in 4 groups; dz is computed as soon as a group has arrived
    static constexpr int BATCH = 2;       // the addends of this many pixels are loaded together
    const NormArgs& a;
    const NormWhole& w;
    uint4* const kept; // (slots, 2, threads): of each pixel of each thread, a piece of x, and one of dout (later of dz)

    // Each 2^log_columns lanes of a warp form a row. A row works on one pixel at a time.
    int tid = threadIdx.x;
    int threads = w.threads;
    int rows = w.rows();
    int row_warps = 1 << w.log_warps; // warps that work on the same channels
    int blocks = CLUSTERS ? gridDim.x : 1;
    int column_in_warp = tid & ((1 << w.log_columns) - 1);
    int column = (tid >> (5 + w.log_warps) << w.log_columns) + column_in_warp; // this thread's vector within the slab
    int row_warp = tid / 32 & (row_warps - 1);
    int row = (row_warp << 5 | tid % 32) >> w.log_columns;
    int slots = w.slots(); // a slot of shared memory holds a piece of x and a piece of dout for each thread (see kept)
    int slots_in_group = ceil_div(slots, COPY_GROUPS); // slots that one of the COPY_GROUPS groups of copies fills

    // These arrays follow `kept` in shared memory. coefficients (slab) holds each channel's scale and shift, multiplied
    // by Z_FACTOR. In step 4, find_group_terms replaces them by x_factor and offset.
    float2* coefficients = (float2*)(kept + 2 * slots * threads);
    float4* channels = (float4*)(coefficients + w.slab);    // (slab): mean, rstd, dxhat_factor(), and one not used
    float2* warp_sums = (float2*)(channels + w.slab);       // (row_warps, slab), rows w.pitch() apart: sums of dz, dz x
    float2* block_sums = warp_sums + row_warps * w.pitch(); // the same for each block, if blocks > 1

    // Images are processed from the last to the first, because dout of the last images may still be in the L2 cache.
    // And the next kernel begins with the first image, whose dx may then still be there.
    int b = gridDim.z - 1 - blockIdx.z;
    int slab0 = blockIdx.y * w.slab;         // the slab's first channel
    int first = blockIdx.x * w.chunk + row;  // this thread's first pixel
    bool busy = column * V < w.slab;         // false: the thread is idle, because its vector lies beyond the slab
    int c = slab0 + (busy ? column * V : 0); // this thread's first channel
    int end = busy ? min(a.s.HW, ((int)blockIdx.x + 1) * w.chunk) : 0;
    int count = end > first ? ceil_div(end - first, rows) : 0;
    bool in_x1 = c < a.s.C1;                                                     // false: the channels belong to x2
    int pitch = in_x1 ? a.s.C1 : a.s.C2;                                         // elements in a pixel of x1 (or x2)
    int stride = rows * pitch;                                                   // elements to the thread's next pixel
    size_t at = ((size_t)b * a.s.HW + first) * pitch + (in_x1 ? c : c - a.s.C1); // the next pixel's place in x and dx

    // The addends of the next BATCH pixels. Those of the first pixels are loaded before the sums are complete. An
    // addend may be dx itself, so it is read before dx is written to the same place.
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
    // Adds dz and dz x of each channel to v, for all pixels of this thread. dz is written to the place of dout.
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
    // Loads the addends of this thread's pixels k ... k + BATCH - 1. `at` must be pixel k's place: store_dx moves it.
    INLINE void load_addends(const GradOf<T>& to, int k) {
        UNROLL_FOR (int j = 0; j < BATCH; j++) {
            if (to.add1 && k + j < count) add1[j] = load16(to.add1 + at + j * stride);
            if (to.add2 && k + j < count) add2[j] = load16(to.add2 + at + j * stride);
        }
    }
    INLINE void begin_addends(const GradOf<T>& to) {
        if (to.dx) load_addends(to, 0);
        if (to.add1) // add1 of the later pixels is fetched into the L2 cache, where load_addends then finds it
            NO_UNROLL_FOR (int k = BATCH; k < count; k++) {
                asm volatile("prefetch.global.L2 [%0];" ::"l"(to.add1 + at + k * stride));
            }
    }
    // For each channel, adds up the sums of all threads of a warp.
    INLINE void fold(float (&v)[2 * V]) const {
        // v now begins with the `left` sums that this lane has. `value` is the index that the first of them had in v.
        const int value = fold_rows<V, 16>(v, 1 << w.log_columns);
        const int left = max(2 * V << w.log_columns >> 5, 2);
        float2* const to = warp_sums + row_warp * w.pitch() + column * V + value / 2;
        if (busy)
            UNROLL_FOR (int i = 0; i < V; i++)
                if (2 * i < left) to[i] = make_float2(v[2 * i], v[2 * i + 1]);
    }
    // Writes this block's sums into the shared memory of all blocks of the cluster, and waits for the sums of all
    // blocks. all_here: the barrier that counts the bytes of these sums
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
    // Computes x_factor and offset of each group, and writes them to coefficients. `sums` is warp_sums or block_sums.
    // Its 2^log_items rows still have to be added up. Eight threads work on each group.
    INLINE void find_group_terms(const float2* sums, int log_items) const {
        NO_UNROLL_FOR (int g = tid / 8; g < a.group_of(w.slab); g += threads / 8) {
            double sum = 0;     // the sum of dxhat
            double product = 0; // the sum of dxhat x
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
    // Computes and stores dx = scale dz - (x_factor x + offset) + addends, for all pixels of this thread.
    template <class GRAD> INLINE void store_dx(const GRAD& to, float (&scale)[V]) {
        float factor = 0; // dx is multiplied by this before it is rounded to FP8
        if constexpr (std::is_same_v<GRAD, Fp8GradOf<T>>) factor = to.fp8.bytes ? *to.fp8.factor : 0;
        float x_factor[V], offset[V];
        load_pairs(x_factor, offset, coefficients + (c - slab0));
        UNROLL_FOR (int i = 0; i < V; i++) { // takes Z_FACTOR out of scale, because only norm_dz needs it
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

// grid (chunks of pixels, slabs of channels, images). The blocks of one image and one slab form a cluster. GRAD is
// GradOf<T>, or, if dx1 or dx2 is also written in FP8, Fp8GradOf<T>.
template <class T, bool DROPOUT, class GRAD>
static __global__ void __launch_bounds__(MAX_WHOLE_THREADS, 2)
    groupnorm_backward_whole_kernel(GRAD dx1, GRAD dx2, const T* dout, NormArgs a, NormWhole w) {
    constexpr int V = VEC<T>;
    // Aligned to 128 bytes, so that the 128 bytes that 8 neighbouring threads read together begin at bank 0.
    extern __shared__ __align__(128) uint4 kept[];
    __shared__ uint64_t barrier;
    NormSlab<T, DROPOUT> slab{a, w, kept};
    const int tid = threadIdx.x;
    const int blocks = slab.blocks;

    // The previous kernel has written neither x nor anything that `channel` loads. So they are read before the wait.
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
    // Announces how many bytes of sums the blocks will write here. The barrier's phase ends when thread 0 and all these
    // bytes have arrived, in any order. So this is right even if sums of other blocks are here already.
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
    // For each channel, 2^log_items sums still have to be added up: one from each block or, if there is one block, one
    // from each of the warps that work on this channel.
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

// ---------------------------------------------------------------------------------------------------------------------
// --- the cost of a plan
// Returns how long groupnorm_backward_whole_kernel takes with plan w, in microseconds. The formula was fitted to 2,700
// measurements on an H200. On average, its cheapest plan takes 3 % more time than the fastest plan.
//
//   time = START + (number of waves of blocks) * hypot(latency, work)
//
// A wave is as many blocks as the GPU runs at the same time. The number of waves is at least 1, and may be a fraction.
// latency: the time that a block waits for loads, and for the rounds in which sums are added and exchanged. work: the
// time that all blocks on one multiprocessor need for their bytes and instructions. Latency and work overlap in part,
// so together they take less time than their sum. tensors: how many tensors of the size of x are read or written.
static double norm_whole_cost(const NormShape& s, const NormWhole& w, int tensors) {
    // How many microseconds each of these takes:
    constexpr double START = 1.9;    // a launch, and the wait for the previous kernel
    constexpr double CLUSTER = 0.65; // blocks of a cluster wait for each other
    constexpr double PART = 0.1;     // the sum of one more warp is added (of one more block: twice as long)
    constexpr double SLOT = 0.394;   // the latency of one more vector (16 bytes) for each thread
    constexpr double SLOTS = 0.081;  // the instructions of one more vector for each of 1,024 threads
    constexpr double PER_KB = 0.037; // a multiprocessor reads or writes one KB
    constexpr double WARPS = 0.34;   // a block has 256 more threads
    // Fractions of a time, without a unit:
    constexpr double SERIAL = 0.31;    // this fraction of a block's work does not overlap with its latency
    constexpr double LAST_WAVE = 0.18; // if there are several waves, the time grows by this fraction of a wave
    const int C = s.C1 + s.C2;
    // A vector's elements are counted in units of 8, because SLOT and SLOTS were fitted for vectors of 8 elements.
    const double elements = act_vec() / 8.0;

    // Memory moves whole sectors of 32 bytes, and cache lines of 128 bytes are the most efficient. So a byte takes more
    // time if the slab has few bytes of each pixel, unless it has all channels (short_rows), or if a warp reads few
    // neighbouring bytes of a pixel (short_runs).
    const int row_bytes = w.slab / act_vec() * 16; // bytes of the slab's channels in one pixel
    double loss = 0;
    if (row_bytes < 128) loss += 0.07;
    if (row_bytes % 32 > 0) loss += 0.1;
    const double short_rows = w.slab == C ? 1 : 1 + loss;
    const int run = 16 << w.log_columns; // bytes of a pixel that a warp reads
    double short_runs = 1;
    if (run < 64) short_runs = 1.14;
    else if (run < 128) short_runs = 1.01;
    const double kilobytes = w.chunk * row_bytes * tensors / 1024.0 * short_rows * short_runs;

    const double work = PER_KB * kilobytes + SLOTS * elements * w.slots() * w.threads / 1024;
    const double parts = w.chunks > 1 ? 2 * w.chunks : 1 << w.log_warps;
    const double latency = PART * parts + SLOT * elements * w.slots() + SERIAL * work;

    // fit: how many blocks have room on a multiprocessor. together: how many run there at the same time.
    const int fit_threads = 2 * MAX_WHOLE_THREADS / w.threads;
    const int fit = std::min(gpu.blocks_of(w.bytes(), 16), fit_threads);
    const int blocks = s.B * (C / w.slab) * w.chunks;
    const int together = std::min(fit, ceil_div(blocks, gpu.sms));
    double filled = 1; // the fraction of the multiprocessors that is used: large clusters leave some of them idle
    if (w.chunks > 4) filled = 0.91;
    else if (w.chunks > 2) filled = 0.94;
    const double waves = blocks / (filled * fit * gpu.sms);
    const double block_time = hypot(latency, together * (work + WARPS * w.threads / 256));
    const double start = w.chunks > 1 ? START + CLUSTER : START;
    return start + block_time * (waves > 1 ? waves + LAST_WAVE : 1);
}

// Returns the plan with the lowest cost. Its `chunks` is 0 if no plan fits, or if two passes are faster.
static NormWhole plan_norm_whole(const NormShape& s, bool add) {
    const int V = act_vec();
    const int C = s.C1 + s.C2;
    const int group_channels = C / s.groups;
    const int tensors = add ? 4 : 3;

    // How many microseconds the two passes take (groupnorm_sums_kernel and groupnorm_backward_kernel), by measurements:
    // about the higher one of two straight lines. moved: the kilobytes that they move on each multiprocessor.
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
    const int least_log_columns = std::countr_zero(16u / V); // a warp works on at least 16 neighbouring channels
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

// GRAD: GradOf<T>, or Fp8GradOf<T> if gradients are also written in FP8.
template <class T, class GRAD> static auto norm_whole_kernel(bool drop) {
    if (drop) return groupnorm_backward_whole_kernel<T, true, GRAD>;
    return groupnorm_backward_whole_kernel<T, false, GRAD>;
}
#endif
