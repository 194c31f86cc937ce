// conv_weight_tma.h - weight gradients (sm_90a).
#pragma once
#include "conv_tiles.h"

#ifdef __CUDACC__ // the GPU

// ---------------------------------------------------------------------------------------------------------------------
// --- conv_weight_tma: weight gradients (sm_90a)
// dweight[co, tap, ci] = sum over the output's pixels p of dout[p, co] * x[source(p, tap), ci]
//
// Used for bf16, with stride 1 and without upsampling (conv_is_wgmma): 3x3 of one input, or 1x1. A = dout and B = x.
// The products sum over pixels (k). Both operands are read as they lie in memory, where a pixel is a row of 64
// channels; wgmma transposes them. A warpgroup's result is D[64 Cout][192]:
//
//     D of a 3x3's filter row:    | kw = 0: 64 Cin | kw = 1: 64 Cin | kw = 2: 64 Cin |
//     D of a 1x1:                 | Cin 0 .. 63    | Cin 64 .. 127  | Cin 128 .. 191 |     x 64 Cout rows
//
// In a 3x3, the three thirds of B lie in the same halo, and each begins one pixel after the third before it. So the
// "leading" distance in the descriptor of B, from one third to the next, is ONE PIXEL. In a 1x1, the thirds of B are
// three slices of x.
// A block works on a range of pixel tiles. With WARPGROUPS = 1 it computes one D. With 3 it computes up to three: those
// of all filter rows, or of up to 192 Cout. Then it loads fewer bytes for each D, but fewer blocks work on each range,
// so more ranges are needed to fill the GPU, and there are more partials.
// One warp loads. Further warps sum dout over the pixels: over all images for the bias gradient, and over one image for
// the gradient of its embedding (demb). Only blocks with filter row 0 and the first tile of Cin do so.
// If there is only one range, D is the gradient, and TMA stores it in dweight. Otherwise D is a partial, and
// conv_weight_sum adds up the partials. One launch computes the weight gradients of several layers, since a small layer
// alone would leave most of the GPU idle.
//
//   Shared memory: | barriers | a ring of STAGES, each a pixel tile: X_PARTS slices of x, DOUT_PARTS slices of dout |
template <int KERNEL_, int WARPGROUPS_, int TILE_W_, int STAGES_> struct WeightTile {
    static constexpr int KERNEL = KERNEL_;
    static constexpr int WARPGROUPS = WARPGROUPS_;
    static constexpr int STAGES = STAGES_;
    static constexpr int TILE_H = 8;
    static constexpr int TILE_W = TILE_W_;
    static constexpr int PIXELS = TILE_H * TILE_W;
    static constexpr bool IS_3X3 = KERNEL == 3;              // true: a warpgroup's D holds the taps of a filter row
    static constexpr int ROWS = IS_3X3 ? 3 / WARPGROUPS : 1; // among how many blocks the filter rows are divided
    // From a third of D to the next, the number of the tap (3x3) or of the tile of Cin (1x1) grows by this much.
    static constexpr int NEXT_TAP = 1;
    // The warps that multiply come first, then the warp that loads (LOADER), then the warps that sum dout.
    static constexpr int LOADER = 4 * WARPGROUPS;
    static constexpr int BIAS_WARPS_OF_3 = IS_3X3 ? 2 : 3;
    static constexpr int BIAS_WARPS = WARPGROUPS == 1 ? 4 : BIAS_WARPS_OF_3;
    static constexpr int THREADS = (LOADER + 1 + BIAS_WARPS) * 32;
    // In a 3x3, x has a border of one pixel to the left and right; with three warpgroups also above and below.
    static constexpr int BORDER = KERNEL / 2;
    static constexpr int PITCH = TILE_W + 2 * BORDER;                 // pixels of a row of x, with its border
    static constexpr int HALO_H = TILE_H + BORDER * (WARPGROUPS - 1); // rows of x that the block's filter rows read
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
    // The output channel of a thread's row i (0 or 1) of D, among the 16 channels of its warp.
    static INLINE int row_channel(int lane, int i) { return lane / 4 + 8 * i; }
};
struct ConvWeightTma {
    TmaParts x;
    CUtensorMap dout;
    CUtensorMap dweight; // of an fp32 array; a box has 32 Cin x the taps of a filter row (in FP8: column) x 64 Cout
    ConvWeight p;
};
typedef WeightBatch<ConvWeightTma> TmaBatch;

// A block's work: its products, and its range of pixel tiles. An input group is up to block_ci tiles of 64 input
// channels, and an output group is up to block_co tiles of 64 output channels.
//
//   block = split + splits * (row0 + ROWS * (input group + input_groups * output group))
template <class T> struct WeightBlock {
    const ConvWeightTma& maps;
    const int block; // this block's number among the layer's blocks
    const ConvWeight& p = maps.p;
    int split = block % p.splits;          // the number of its range of pixel tiles
    int row0 = block / p.splits % T::ROWS; // its first filter row
    int group = block / p.splits / T::ROWS;
    int output_group = group / p.input_groups;
    int co_tile = output_group * p.block_co;                            // its first tile of 64 output channels
    int ci_tile = (group - output_group * p.input_groups) * p.block_ci; // its first tile of 64 input channels
    int first = first_pixel_tile(p, split);                             // its pixel tiles: first .. end - 1
    int end = first_pixel_tile(p, split + 1);
    int parts = min(p.block_ci, p.channel_tiles - ci_tile);                          // tiles of Cin
    int dout_parts = T::DOUT_PARTS == 1 ? 1 : min(p.block_co, p.co_tiles - co_tile); // tiles of Cout
    int busy_warpgroups = T::IS_3X3 ? T::WARPGROUPS : dout_parts;
    int bias_warps = T::DOUT_PARTS > 1 ? dout_parts : T::BIAS_WARPS; // warps that only sum dout, if sums_bias
    bool sums_bias = row0 == 0 && ci_tile == 0;
    bool final = p.splits == 1; // the block's sums are the whole gradients, not partials
    INLINE explicit WeightBlock(const WorkBlock<ConvWeightTma>& own) : maps(own.work), block(own.block) {}
    // v: the sum of channel c of dout over image n's pixels in this block's range. (If bias_images is 1, all images are
    // image 0.) With several ranges, v is a partial, in row split + n. Otherwise it is the gradient of the image's
    // embedding, because the forward pass adds the embedding to all pixels of the image.
    INLINE void put_image_sum(int n, int c, float v) const {
        if (c >= p.shape.Cout) return;
        if (!final) p.bias_partial[(size_t)(split + n) * p.shape.Cout + c] = v;
        else if (p.demb) p.demb[(size_t)n * p.emb_stride + c] = v;
    }
};

// Role: load. All other threads wait for this one, so its loop must be fast. TileWalk needs no divisions.
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

// The sums of 64 channels of dout, over the current image (`sum`) and over the block's range (`total`). Each of WARPS
// warps adds up CHUNKS chunks of 8 channels, and a lane adds up one chunk of every (4 WARPS)-th pixel. Each lane's
// first pixel is chosen so that any 8 neighbouring lanes read from all banks. At the end of an image, the lanes with
// the same chunk add up their sums: pairs of lanes exchange halves of their channels (halve), until each lane holds
// VALUES channels from c on. (With four warps, two lanes then have the same channel.)
template <class T> struct ChannelSums {
    static constexpr int WARPS = T::DOUT_PARTS > 1 ? 1 : T::BIAS_WARPS;
    static constexpr int CHUNKS = 8 / WARPS;
    static constexpr int VALUES = WARPS == 1 ? 2 : 1;
    const WeightBlock<T>& work;
    const int bias_warp; // this warp's number among the warps that sum dout
    const int lane = threadIdx.x & 31;
    const int eight = lane >> 3;
    const int tile = WARPS == 1 ? bias_warp : 0; // which of the block's tiles of 64 output channels
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

// Role: sum dout for the bias gradient.
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
    // Tells the warpgroups that this warp has read all tiles, so that put_dweight may overwrite them.
    warps_arrive(2, 128 * work.busy_warpgroups + 32 * work.bias_warps);
    UNROLL_FOR (int k = 0; k < sums.VALUES; k++)
        if (sums.c + k < work.p.shape.Cout) work.p.dbias[sums.c + k] = sums.total[k];
}

// Role: multiply. D[64 Cout][2 M columns] = dout (64 Cout, pixels) * x (pixels, 2 M columns) over the block's range.
// Each thread holds M elements of D, in d. Warpgroup wg computes filter row row0 + wg (3x3), or tile wg of the block's
// tiles of Cout (1x1).
template <class T, int M> INLINE void multiply_tiles(const WeightBlock<T>& work, auto& stages, int wg, float (&d)[M]) {
    const int x_at = T::IS_3X3 ? wg * T::PITCH * SLICE_BYTES : 0;
    const int dout_at = T::DOUT_AT + (T::IS_3X3 ? 0 : wg * T::DOUT_BYTES);
    for (int t = work.first; t < work.end; t++) {
        const uint32_t tile = stages.arrived();
        const Operand x = Operand::rows(tile + x_at, T::PITCH, T::IS_3X3 ? 1 : T::X_BYTES / SLICE_BYTES);
        const Operand dout = Operand::rows(tile + dout_at, T::TILE_W);
        wgmma_fence();
        UNROLL_FOR (int r = 0; r < T::TILE_H; r += 2) // wgmma sums over 16 pixels: 8 in a row, and the 8 below
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

// Writes d to p.partial (splits, tiles, taps, 1024 float4). The 1024 float4 of a tile and tap lie in the order that
// weight_place explains. tap: the tap of D's first third.
template <class T> INLINE void put_partial(const WeightBlock<T>& work, int tap, int co_tile, const float* d) {
    const ConvWeight& p = work.p;
    const int warp = threadIdx.x / 32 % 4;
    const int tile = co_tile * p.channel_tiles + work.ci_tile;
    float4* const tiles = p.partial + (((size_t)work.split * p.tiles + tile) * p.taps + tap) * 1024;
    float4* const to = tiles + (warp / 2 * 8 + warp % 2 * 4) * 32 + threadIdx.x % 32;
    UNROLL_FOR (int f = 0; f < 24; f++)
        if (T::IS_3X3 || f / 8 < work.parts) // third f / 8 of D is a tap or a tile of Cin, which has 1024 float4
            store_whole(to + f / 8 * T::NEXT_TAP * 1024 + f % 8 / 4 * 512 + f % 4 * 32, (const float4&)d[4 * f]);
}

// Stores a warpgroup's sums, D, in dweight by TMA. tap: the first tap of the filter row (FP8: column), or 0 in a 1x1.
// D is first written to shared memory, over the pixel tiles, in boxes of 32 input channels. A row of a box is 32 floats
// (128 bytes). A box has one row for each of the 64 output channels or, for a 3x3, three rows: one for each tap.
// A thread's d consists of 24 groups of four sums. Group f belongs to third f / 8 of D. Its four sums are those of two
// output channels (row_channel) and two of the 64 input channels: f % 8 * 8 + lane % 4 * 2 and the next one.
template <class T> INLINE void put_dweight(const auto& work, int tap, int co_tile, float* d, uint32_t boxes) {
    constexpr int BOX_BYTES = (T::IS_3X3 ? 3 : 1) * BYTES_OF_64_ROWS;
    const ConvWeight& p = work.p;
    const TmaParts& x = work.maps.x;
    const int lane = threadIdx.x % 32;
    UNROLL_FOR (int f = 0; f < 24; f++)
        UNROLL_FOR (int i = 0; i < 2; i++) {
            const int co = threadIdx.x / 32 % 4 * 16 + T::row_channel(lane, i);
            const int third = f / 8;
            const int box = f % 8 / 4 + (T::IS_3X3 ? 0 : third * 2);
            const int r = T::IS_3X3 ? co * 3 + third : co;
            const uint32_t in_box = box_place<SLICE_CHANNELS>(r, f % 4 * 2 + (lane >> 1 & 1)) + lane % 2 * 8;
            const uint32_t to = boxes + box * BOX_BYTES + in_box;
            PTX("st.shared.v2.f32 [%0], {%1,%2};", "r"(to), "f"(d[4 * f + 2 * i]), "f"(d[4 * f + 2 * i + 1]));
        }
    fence_async();
    warps_sync(3 + threadIdx.x / 128, 128);
    if (threadIdx.x % 128) return;
    for (int box = 0; box < (T::IS_3X3 ? 2 : 2 * work.parts); box++) {
        const int slice = work.ci_tile + box / 2;
        const int box_channel = box % 2 * SLICE_CHANNELS / 2; // within its slice
        const int ci = x.row(slice) + box_channel;
        if (x.channel(slice) + box_channel >= (x.is_second(slice) ? p.shape.C2 : p.shape.C1)) continue;
        // tap % 3 and tap / 3 are the column and the row of the filter
        const int co = co_tile * SLICE_CHANNELS;
        tma_store(&work.maps.dweight, boxes + box * BOX_BYTES, ci, tap % 3, tap / 3, co);
    }
    tma_stores_read();
}

// Warps 0 .. 4 WARPGROUPS - 1 multiply, warp LOADER loads, and the BIAS_WARPS warps after it sum dout (sums_bias).
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
    const int tap = 3 * (work.row0 + (T::IS_3X3 ? wg : 0));
    const int co_tile = work.co_tile + (T::IS_3X3 ? 0 : wg);
    if (!work.final) return put_partial<T>(work, tap, co_tile, acc);
    // No warp reads the pixel tiles any more, so put_dweight may overwrite them.
    warps_sync(2, 128 * work.busy_warpgroups + (work.sums_bias ? 32 * work.bias_warps : 0));
    put_dweight<T>(work, tap, co_tile, acc, stages.stage(0).address + wg * 2 * 3 * BYTES_OF_64_ROWS);
#endif
}
#endif
