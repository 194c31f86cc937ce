// conv_small.h - 3x3 on images of up to 32 x 32 (sm_90a).
#pragma once
#include "conv_tiles.h"

#ifdef __CUDACC__ // the GPU

// ---------------------------------------------------------------------------------------------------------------------
// --- conv_small: 3x3 on images of up to 32 x 32 (sm_90a)
// Used for 3x3 without a skip connection, on images of up to 32 x 32, which often have too few tiles for conv_tiles'
// persistent blocks. (pick_conv_small picks conv_tiles if it is faster nevertheless.)
// A block computes one tile: 8 x TILE_W pixels of each of IMAGES images, and N output channels. Each warpgroup computes
// a square of 8 x 8 pixels. Its products are D[64 pixels][N channels] += A * B, with A = pixels and B = weights.
//
//     warps 0 .. 4 WARPGROUPS - 1    multiply; warpgroup wg has square wg % ACROSS of image wg / ACROSS
//     warp 4 WARPGROUPS              one thread loads halos, weights and addends (TMA)
//
// A step is STEP_TAPS taps of a slice. If N is at most 64, the products of one tap take little time, compared with the
// wait at a barrier before each step. So STEP_TAPS is 3 then, if shared memory suffices. Otherwise it is 1. The weights
// of the steps pass through a ring. Meanwhile the next slice's halo is loaded.
//
//     shared memory: | barriers | HALOS halos | WEIGHT_STAGES steps of weights | results | pushed sums | shifts |
//
// The addends are loaded to where the results will be written. The shifts are the sums of bias and embedding. (In FP8
// the factors lie behind them.)
// SPLIT = 2: the two blocks of a cluster work on the same tile, and each of them computes half of the steps. At the end
// each block pushes the sums of N / 2 channels to the other block, and finishes the N / 2 channels that it keeps:
//
//     block 0: steps of the first half    sums of channels 0 .. N - 1     keeps 0 .. N / 2 - 1,  adds block 1's sums
//     block 1: steps of the second half   sums of channels 0 .. N - 1     keeps N / 2 .. N - 1,  adds block 0's sums
template <bool BACKWARD_, int WARPGROUPS_, int N_, int IMAGES_, int SPLIT_, int PER_SM_,
          Element ELEMENT_ = Element::BF16>
struct SmallTile {
    static constexpr bool BACKWARD = BACKWARD_;
    static constexpr Element ELEMENT = ELEMENT_;
    static constexpr bool IS_FP8 = is_fp8(ELEMENT);
    static constexpr int WIDTH = slice_channels(ELEMENT); // channels of a slice
    static constexpr int WARPGROUPS = WARPGROUPS_;
    static constexpr int N = N_;
    static constexpr int IMAGES = IMAGES_;
    static constexpr int SPLIT = SPLIT_;
    static constexpr int PER_SM = PER_SM_;             // how many blocks shall fit on a multiprocessor
    static constexpr int ACROSS = WARPGROUPS / IMAGES; // squares of 8 x 8 pixels side by side in each image
    static constexpr int TILE_W = ACROSS * 8;
    static constexpr int CONSUMERS = WARPGROUPS * 128; // threads that multiply
    static constexpr int THREADS = CONSUMERS + 32;
    static constexpr int BARRIERS = 64;
    static constexpr int PITCH = TILE_W + 2;          // pixels of a row of the halo
    static constexpr int HALOS = IMAGES == 2 ? 3 : 2; // stages of the ring of halos
    static constexpr int HALO_BYTES = PITCH * 10 * IMAGES * SLICE_BYTES;
    static constexpr int HALO_ROOM = whole_swizzles(HALO_BYTES);
    // A block finishes OUT_N channels, OUT_GROUPS groups of 8, and stores them in boxes of 64 pixels x BOX channels.
    static constexpr int OUT_N = N / SPLIT;
    static constexpr int OUT_GROUPS = OUT_N / 8;
    static constexpr int BOX = OUT_N % SLICE_CHANNELS == 0 ? SLICE_CHANNELS : SLICE_CHANNELS / 2;
    static constexpr int BOX_BYTES = 64 * BOX * 2;
    static constexpr int STAGED_BYTES = WARPGROUPS * 64 * OUT_N * 2;
    // Statistics: each warp writes two floats for each of OUT_N channels. (This counts one warp of each warpgroup.)
    static constexpr int SUMS_BYTES = WARPGROUPS * OUT_N * 8;
    static constexpr int PUSHED_BYTES = SPLIT == 2 ? OUT_GROUPS * CONSUMERS * 16 : 0; // sums that the other block sends
    // Each warpgroup has its own copy of the shifts: up to two floats for each thread. FP8: and as many factors.
    static constexpr int SHIFTS_BYTES = CONSUMERS * (IS_FP8 ? 16 : 8);
    // The rest of the shared memory is for weights. BACKWARD: the block's N channels are input channels of the layer,
    // and the weights of a tap are loaded as WEIGHT_BOXES boxes of 64 input and 64 output channels, even if N is 32.
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
    static_assert(OUT_N <= 2 * 128, "each of a warpgroup's 128 threads has the shifts of two channels at most");
    static_assert(WEIGHT_STAGES > 2 && 4 * SUMS_BYTES <= WEIGHT_STAGES * WEIGHT_BYTES,
                  "at the end, the statistics are summed where the weights have been");
};

// A block's work: a tile of pixels, N output channels from c0 on, and the steps from `first` to `end` - 1.
template <class T> struct SmallWork {
    const ConvTma& p;
    const bool has_addend = p.out.part1.add1;
    const int cluster_rank = blockIdx.x % T::SPLIT; // SPLIT = 2: this block's rank in its cluster
    const int steps = p.x.slices * T::SLICE_STEPS;
    const int tile = blockIdx.x / T::SPLIT;
    const int first = steps * cluster_rank / T::SPLIT;
    const int end = steps * (cluster_rank + 1) / T::SPLIT;
    const int c0 = blockIdx.y * T::N;
    // The first channel that this block stores.
    const int out_c0 = c0 + cluster_rank * T::OUT_N;
    const Origin origin = tile_origin(tile, p.tiles_h, p.tiles_w, 8, T::TILE_W, T::IMAGES);
    // The first pixel of warpgroup wg's square.
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

// Role: load. The weights of the first WEIGHT_STAGES steps are already being loaded. At the seventh tap of a slice, the
// thread waits for a free stage and loads the next slice's halo. An older slice leaves this stage one or two steps
// after its last step (IN_FLIGHT in multiply_small). The weights of these steps are already being loaded, so the wait
// ends (rule 2 of Pipeline).
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
// channels of a slice) x the tap's weights (input channels of a slice, N). A tap has four products, of 16 input channels
// each (FP8: 32), or two if its slice is half empty. HALF: as in ConvTiles.
template <bool HALF, class T>
INLINE void multiply_small(const SmallWork<T>& work, auto& halos, auto& weights, int wg, auto& d) {
    using Product = Wgmma<T::N>;
    using ProductFp8 = WgmmaFp8<T::N, T::IS_FP8 ? T::ELEMENT : Element::FP8, Element::FP8>;
    // Steps that may still run when a warpgroup issues the next one. With fewer steps, the tensor cores would be idle
    // while the warpgroup waits for the next stage.
    constexpr int IN_FLIGHT = T::STEP_TAPS == 1 ? 2 : 1;
    constexpr int B_MAJOR = T::BACKWARD ? MN_MAJOR : K_MAJOR;
    // In units of 16 bytes. B_STEP: from the weights of 16 input channels to the next 16. TAP_STEP: from tap to tap.
    constexpr int B_STEP = T::BACKWARD ? 128 : 2;
    constexpr int TAP_STEP = T::TAP_BYTES / 16;
    const int image = wg / T::ACROSS;
    const int square = wg % T::ACROSS;
    // where in a halo this warpgroup's pixels begin, in bytes
    const int own_pixels = (image * 10 * T::PITCH + square * 8) * SLICE_BYTES;
    int step_of_slice = work.first % T::SLICE_STEPS; // the number of `step` within its slice
    int step_done = step_of_slice;                   // the same of the step that is released next
    uint32_t halo = 0;
    for (int step = work.first; step < work.end; step++) {
        if (step == work.first || step_of_slice == 0) halo = halos.arrived() + own_pixels;
        const Operand a = Halo<T::PITCH>(halo).shifted(step_of_slice * T::STEP_TAPS);
        const Operand b = Operand::rows(weights.arrived(), 8, SLICE_CHANNELS);
        auto multiply = [&]<int STEPS>(std::integral_constant<int, STEPS>) {
            wgmma_fence();
            UNROLL_FOR (int tap = 0; tap < T::STEP_TAPS; tap++)
                UNROLL_FOR (int k = 0; k < STEPS; k++) {
                    if constexpr (T::IS_FP8) ProductFp8::add(d, a.at(tap * 8 + k * 2), b.at(tap * TAP_STEP + k * 2));
                    else
                        Product::template add<K_MAJOR, B_MAJOR>(d, a.at(tap * 8 + k * 2),
                                                                b.at(tap * TAP_STEP + k * B_STEP));
                }
            wgmma_commit();
        };
        // Each branch has its own fence and commit. With a common pair, the compiler would wait after each product.
        if constexpr (!HALF && !T::IS_FP8) multiply(std::integral_constant<int, 4>{});
        else if (work.p.x.is_half_slice(step / T::SLICE_STEPS, T::WIDTH)) multiply(std::integral_constant<int, 2>{});
        else multiply(std::integral_constant<int, 4>{});
        wgmma_wait<IN_FLIGHT>();
        if (step - work.first >= IN_FLIGHT) { // step number step - IN_FLIGHT has ended
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

// What a warpgroup does with its sums d: adds the other block's sums (SPLIT = 2), scales (FP8), adds bias, embedding
// and addend, rounds, writes the results to shared memory, and adds them up for the statistics. Unlike in conv_tiles,
// the rows of d are pixels, and its columns are channels.
//
//   d of lane t:   pixels t / 4 and t / 4 + 8 of the warp's 16 pixels; of each group j of 8 channels, the channels
//                  8 j + t % 4 * 2 and the next one
//   results:       boxes of 64 pixels x BOX channels; a warp has 16 pixels of each box
//
// This code runs only once in a block, so most of its time is spent on fetching instructions (about 20 bytes arrive in
// a cycle). Therefore the code must be short. Loops over d are unrolled nevertheless, because d must stay in registers.
// sum_pixels reads the results from shared memory, so its outer loops need not be unrolled.
template <class T> struct SmallEpilogue {
    const SmallWork<T>& work;
    const ConvTma& p;
    const int tid = threadIdx.x & 127;
    const int warp = tid >> 5;
    const int lane = tid & 31;
    const Origin at;       // the first pixel of this warpgroup's square
    float bias[2] = {};    // of channels out_c0 + tid and out_c0 + tid + 128
    float emb[2] = {};     // of the same channels
    float factors[2] = {}; // FP8: ConvTma::factors of the same channels

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
    // Each thread reads the shifts of its channels from shared memory. FP8: the factors lie after all shifts.
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
    // SPLIT = 2: sends the other block the sums that it finishes, and adds the sums that arrive to the kept ones.
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
    // Adds the addend and (unless scale has added them) the shifts, and rounds. Results are written over the addend.
    INLINE void round(float (&d)[T::N / 2], uint32_t results, uint32_t shifts) const {
        // Four matrices of 8 x 8: pixels 0-7 and 8-15 of group j, then of group j + 1 (group j: channels 8 j to 8 j +
        // 7). Each lane gives the address of one row of a matrix.
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
    // Adds up the results of each warp's 16 pixels: an array (warp of the warpgroup, channel, 2) of sums and sums of
    // squares in shared memory. A lane reads two neighbouring channels of every PIXELS_AT_ONCE-th pixel.
    INLINE void sum_pixels(uint32_t results, uint32_t sums) const {
        constexpr int WORDS = T::BOX / 2; // words of a pixel in a box, two channels each
        constexpr int PIXELS_AT_ONCE = 32 / WORDS;
        constexpr int LOADS = 8 / PIXELS_AT_ONCE;
        const int c = lane % WORDS * 2;
        // The warp has 2 rows of 8 pixels. Pixel i is in the image if i / 8 < rows and i % 8 < columns.
        const int rows = at.n < p.B ? p.H - (at.h + warp * 2) : 0;
        const int columns = p.W - at.w;
        NO_UNROLL_FOR (int box = 0; box < T::OUT_N / T::BOX; box++) {
            float t[4] = {}; // sum and sum of squares of channel c, then those of channel c + 1
            NO_UNROLL_FOR (int i0 = lane / WORDS; i0 < 16; i0 += 8) {
                uint32_t v[LOADS];
                UNROLL_FOR (int k = 0; k < LOADS; k++) {
                    const int place = box_place<T::BOX>(warp * 16 + i0 + k * PIXELS_AT_ONCE, c / 8) + c % 8 * 2;
                    const uint32_t from = results + box * T::BOX_BYTES + place;
                    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v[k]) : "r"(from) : "memory");
                }
                UNROLL_FOR (int k = 0; k < LOADS; k++) {
                    const int i = i0 + k * PIXELS_AT_ONCE;
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
    // Adds up the four warps' sums. Each square of 8 x 8 pixels is one part of the statistics.
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

template <class T, bool HALF> // T: a SmallTile
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
    // SPLIT = 2: the other block has started, too, so this block may write to its shared memory (exchange).
    if (T::SPLIT == 2) cluster_sync();
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
    multiply_small<HALF>(work, halos, weights, wg, acc);

    const uint32_t shifts = all_shifts + wg * 1024;
    const uint32_t results = addends.stage(0).address + wg * 64 * T::OUT_N * 2;
    epilogue.put_shifts(shifts);
    if constexpr (T::SPLIT == 2) epilogue.exchange(acc, pushed);
    addends.kept(0, work.has_addend);
    // All shifts have been written, and no warpgroup reads weights. So the statistics may overwrite the weights.
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

// Whether conv_small has a kernel that leaves out half of the last slice. Tiles of more than 64 output channels have none.
template <class T> static bool has_half_kernel(const ConvCall& p) {
    return T::N <= 64 && !T::IS_FP8 && p.Cin1 % SLICE_CHANNELS == SLICE_CHANNELS / 2;
}

template <class T> static void conv_small(const ConvCall& p) {
    const TmaBoxes box{
        .rows = 8, .columns = T::TILE_W, .images = T::IMAGES, .result_channels = T::BOX, .weight_rows = T::N};
    const ConvTma t = tma_arguments(p, T::BACKWARD, box);
    const dim3 grid(t.tiles * T::SPLIT, ceil_div(p.Cout, T::N));
    if (p.out.parts) *p.out.parts = ceil_div(p.H, 8) * ceil_div(p.W, 8);
    auto kernel = has_half_kernel<T>(p) ? conv_small_kernel < T,
         T::N <= 64 && !T::IS_FP8 >     : conv_small_kernel<T, false>;
    launch_on(MAIN_STREAM, T::SPLIT, kernel, grid, T::THREADS, T::SHARED_BYTES, t);
}
#endif
