// conv_tiles.h - 3x3 on large images, and 1x1 (sm_90a).
#pragma once
#include "../conv.h"
#include "hopper.h"

#ifdef __CUDACC__ // the GPU

// ---------------------------------------------------------------------------------------------------------------------
// --- Hopper's convolutions (sm_90a, bf16; 3x3 also FP8): what they share
// The main idea: the halo of a pixel tile is loaded once for each slice of 64 channels, and all nine taps read the same
// copy of it in shared memory. TMA loads a box of 64 channels x pixels as rows of 128 bytes, one row for each pixel.
// Pixels outside the image become zeros, which is the padding.
// For wgmma an operand consists of groups of 8 rows of 128 bytes, with the same distance (pitch) from each group to the
// next. Here a group is 8 neighbouring pixels of an image row, and the pitch is one row of the halo. So the operands of
// different taps differ only in their start address. This address need not be a multiple of 1024 bytes, after which the
// swizzle repeats, because TMA and wgmma both compute the full address first, and then XOR its bits 4-6 with its bits
// 7-9 (PTX ISA, "Matrix descriptor").
//
//   D (64 output channels, 8 x ROWS pixels) += A (weights of a tap) * B (pixels of a tap), for each tap and slice
//
//     A: 64 rows of 128 bytes           B: the halo, a pixel = a row of 128 bytes     D: fp32 registers; thread t has
//       k = 0 .. 63 (input channels)      (kh, kw) +---------------+ pitch:             columns 8 j + t % 4 * 2, + 1
//      +----+----+----+----+               start ->| 8 pixels      | 10 pixels        +--------+--------+----
//      | 16 | 16 | 16 | 16 | 64            + pitch | 8 pixels      |                  | j = 0  | j = 1  | ...  rows r
//      |    |    |    |    | output        ...     | ... ROWS      |                  |        |        |  and r + 8,
//      +----+----+----+----+ channels              +---------------+                  +--------+--------+  r = t / 32
//       four products of k = 16: in A (forward) and in B, each begins                            * 16 + t % 32 / 4
//       32 bytes after the one before
//
// The drawing shows conv_tiles: Halo::shifted makes B, Operand::rows makes A, and Accumulators::multiply starts the
// products. In conv_small, A is pixels and B is weights.
//
// In FP8 a slice has 128 channels, and a product sums over 32 of them. Each value was multiplied by a factor before it
// was rounded to FP8. For each output channel, ConvTma::factors holds the reciprocal of the product of both operands'
// factors. The channel's sums are multiplied by this number before bias, embedding, addend or the products of a skip
// connection are added.

// The tensor maps of a tensor of one or two parts: concatenated inputs, or their gradients. Each part is divided into
// slices of 64 channels (FP8: 128), so no slice has channels of both parts.
struct TmaParts {
    CUtensorMap map1, map2;
    int C1;      // channels of the first part
    int slices1; // slices of the first part, or INT_MAX if there is no second part
    int slices;  // slices of both parts
    INLINE bool is_second(int slice) const { return slice >= slices1; }
    INLINE const CUtensorMap* map(int slice) const { return is_second(slice) ? &map2 : &map1; }
    // channel: a slice's first channel within its part. row: the same channel if the second part's channels are counted
    // on from the first part's, as in the weights. width: channels of a slice.
    INLINE int channel(int slice, int width = SLICE_CHANNELS) const {
        return (is_second(slice) ? slice - slices1 : slice) * width;
    }
    INLINE int row(int slice, int width = SLICE_CHANNELS) const {
        return (is_second(slice) ? C1 : 0) + channel(slice, width);
    }
    // The last slice needs only two of its four products if at most half of it has channels. (Only inputs of one part
    // are asked.)
    INLINE bool is_half_slice(int slice, int width) const {
        return slice == slices - 1 && (C1 - 1) % width < width / 2;
    }
};
// The arguments of conv_tiles and conv_small. TMA reads a CUtensorMap by its address, so this is a __grid_constant__
// parameter: the compiler does not copy it to local memory.
struct ConvTma {
    TmaParts x;                      // the input; its boxes have a border of one pixel if the filter is 3x3
    TmaParts skip;                   // the skip connection's input, if this kernel computes it
    TmaParts results, addends;       // where results are written; what is added to them
    CUtensorMap weight;              // the layer's weights (Cout, taps, Cin); a box has 64 of Cin (FP8: 128)
    CUtensorMap skip_weight;         // the skip connection's weights (Cout, 1, Cin); a box has 64 of Cin
    int B, H, W, C;                  // sizes of the output
    int tiles_h, tiles_w;            // tiles of an image, down and across
    int tiles;                       // tiles of all images
    int pixel_stages, weight_stages; // conv_tiles: stages of pixels and of weights
    bool one_image;                  // conv_tiles: a tile lies in one image and is one part of the statistics
    ConvOut out;
    const float* factors; // FP8: (C); the sums of channel c are multiplied by factors[c]
};

// The tensor maps of x1 and x2. channels, columns, rows and images are the size of a box.
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

struct TmaBoxes {
    int rows, columns, images; // a tile has `rows` x `columns` pixels of each of `images` images
    int result_channels;       // channels of a box of results
    int weight_rows;           // output channels of a box of weights (if BACKWARD, a box has 64 x 64)
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
    const Element in = is_fp8(p.s.in) ? Element::FP8 : Element::BF16; // TMA sees no difference between the FP8 types
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
// Used for 1x1, and for 3x3 on images of more than 32 rows or columns or with a skip connection (conv_takes_skip). For
// 3x3 on smaller images with more than 8 rows, pick_conv_small chooses between conv_tiles and conv_small.
// A tile is 8 x ROWS pixels (8 across, ROWS down) and OUT_SLICES slices of 64 output channels. The products are
// D[64 channels][8 x ROWS pixels], with A = weights and B = pixels, as drawn above. So a product is large (N up to 256)
// even if there are only 64 output channels. Blocks are persistent: there are about as many as multiprocessors, and
// each of them walks over its share of the tiles. A block's roles:
//
//     warpgroup 0  (warps 0-3)    multiplies its tiles and finishes them: + embedding, + addend, rounding, statistics
//     warpgroup 1  (warps 4-7)    does the same for other tiles
//     warp 8                      one thread loads pixels, addends and weights (TMA)
//     warps 9, 10                 one thread of each warp stores the results of one warpgroup (TMA)
//     warp 11                     is idle: setmaxnreg applies to whole warpgroups
//
//   Shared memory: | barriers | a ring of stages of pixels: input slices, addends, then results | stages of weights |
//
//     HALF         whether the last slice is half empty (is_half_slice). In FP8 this is found at run time.
//     RESIDENT     true: all weights stay in shared memory, and a stage has pixels of one tile. The two warpgroups take
//                  turns with tiles and with the tensor cores. A 3x3 may also compute the skip connection that is added
//                  to its result: the slices of the skip connection's input follow those of x, with one tap each.
//                  false: weights pass through a ring, and both warpgroups read them at the same time. A stage has
//                  pixels of two tiles, one for each warpgroup.
//     ELEMENT      BF16, FP8 (pixels and weights are e4m3), or FP8_GRADIENT (pixels are gradients in e5m2). FP8 sums
//                  begin as 0, and are scaled after the last product of x. The skip connection stays in bf16, so its
//                  products are added after the scaling.
template <int TAPS_, int ROWS_, int OUT_SLICES_, bool RESIDENT_, bool BACKWARD_, bool HALF_ = false,
          Element ELEMENT_ = Element::BF16>
struct ConvTiles {
    static constexpr int TAPS = TAPS_;
    static constexpr int ROWS = ROWS_;
    static constexpr int OUT_SLICES = OUT_SLICES_;
    static constexpr bool HALF = HALF_;
    static constexpr bool RESIDENT = RESIDENT_;
    static constexpr bool BACKWARD = BACKWARD_;
    static constexpr Element ELEMENT = ELEMENT_;
    static constexpr bool IS_FP8 = is_fp8(ELEMENT);
    static constexpr int WIDTH = slice_channels(ELEMENT); // channels of a slice of x
    static constexpr bool CAN_SKIP = RESIDENT && !BACKWARD && TAPS == 9 && ELEMENT != Element::FP8_GRADIENT;
    static constexpr int THREADS = 384;
    static constexpr int LOADS = 8;  // the warp that loads
    static constexpr int STORES = 9; // the first of the two warps that store
    // The warps that load and store give registers to the warpgroups that multiply (setmaxnreg).
    static constexpr bool MOVES_REGISTERS = OUT_SLICES == 3 || (IS_FP8 && ROWS == 32);
    static constexpr int UNIT = RESIDENT ? 1 : 2; // how many tiles' pixels a stage holds
    static constexpr int BORDER = TAPS == 9 ? 1 : 0;
    static constexpr int PITCH = 8 + 2 * BORDER; // pixels of a row of the halo
    static constexpr int PIXELS = 8 * ROWS;
    static constexpr int TILE_BYTES = PIXELS * SLICE_BYTES; // a slice of a tile's pixels, without a border
    static constexpr int HALO_BYTES = PITCH * (ROWS + 2 * BORDER) * SLICE_BYTES;
    static constexpr int HALO_ROOM = whole_swizzles(HALO_BYTES);
    static constexpr int STAGE_BYTES = UNIT * HALO_ROOM;
    static constexpr int WEIGHT_BYTES = OUT_SLICES * BYTES_OF_64_ROWS; // of one tap of an input slice
    static constexpr int STREAMED_WEIGHTS = TAPS == 9 ? 6 : 4;         // stages of weights, if weights are streamed
    // A part of the statistics has this many rows of pixels, unless a tile is one part (ConvTma::one_image). No part
    // may belong to two images. A 1x1 may treat all images as one if each has a multiple of 64 pixels
    // (pick_conv_tiles_1x1), so a part has only 8 rows of 8 pixels there.
    static constexpr int STATS_ROWS = TAPS == 9 ? ROWS : 8;
    static constexpr int MAX_STAGES = 16;
    static constexpr int BARRIERS = 128; // at most 5 for a stage of pixels (with Results), and 2 for a stage of weights
    // After this tap of a slice, the stage of pixels of the previous slice is released.
    static constexpr int RELEASE_TAP = RESIDENT && TAPS > 1 ? 1 : 0;

    // Among how many blocks the tiles are divided. All these blocks have the same output channels.
    static int runs(int Cout) { return std::max(1, gpu.sms / ceil_div(Cout, SLICE_CHANNELS * OUT_SLICES)); }
    static int shared_bytes(int n, int weights) {
        return shared_beside(BARRIERS) + n * STAGE_BYTES + weights * WEIGHT_BYTES;
    }
    // How many stages of pixels fit into shared memory beside `weights` stages of weights.
    static int stages(int weights) {
        const int room = hopper_shared(1) - shared_bytes(0, weights);
        return std::min(room / STAGE_BYTES, MAX_STAGES);
    }
    using Pixels = Pipeline<STAGE_BYTES, RESIDENT ? 2 : 1>;
    using Weights = Pipeline<WEIGHT_BYTES>;
    static INLINE int pixels_at(int warpgroup) { return RESIDENT ? 0 : warpgroup * HALO_ROOM; }
};

// What passes through the stages of pixels for a tile. The content of one stage is called an item:
//
//   item     0 .. x.slices - 1 | .. products - 1  | first_result .. items - 1 (the last OUT_SLICES)
//            slices of x       | skip connection  | addends come in, results go out
//
// A tile's results are written to the stages of its last OUT_SLICES items, and stored from there. With addends, as
// drawn, a thread writes its results to the places where it has read its addends. Otherwise these are the stages of the
// last slices, whose products have ended by then. A tile has at least OUT_SLICES items: nothing is loaded into those
// that are neither slices nor addends.
template <class T> struct TileWork {
    const ConvTma& p;
    const int out0 = blockIdx.y * T::OUT_SLICES;                         // the block's first slice of output channels
    const int c0 = out0 * SLICE_CHANNELS;                                // the block's first output channel
    const int products = p.x.slices + (T::CAN_SKIP ? p.skip.slices : 0); // slices that are multiplied
    const int items = has_addends() ? products + T::OUT_SLICES : max(products, T::OUT_SLICES);
    const int first_result = items - T::OUT_SLICES; // the first of the items whose stages the results use
    // Stages that a warpgroup skips between two of its tiles. RESIDENT: those of the other warpgroup's tile.
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
    // The tiles of warpgroup g. (With g = 0 and step = 1, if RESIDENT: of both warpgroups, in turn.) If UNIT = 2 and
    // the number of tiles is odd, one warpgroup's last tile lies outside of all images: TMA loads zeros and stores
    // nothing. Different blocks work on neighbouring tiles, so their overlapping halos are found in the L2.
    INLINE TileWalk tiles(int g, int step = 2) const {
        const int first = T::RESIDENT ? blockIdx.x + g * gridDim.x : 2 * blockIdx.x + g;
        const int end = ceil_div(p.tiles, T::UNIT) * T::UNIT;
        return TileWalk(p.tiles_h, p.tiles_w, first, step * gridDim.x, end);
    }
    // Loads one tap's weights of a slice of x, or the weights of a slice of the skip connection's input.
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

// Loads a block's items into the ring of pixels. UNIT = 2: an item is loaded for both warpgroups' tiles at once.
template <class T> struct PixelLoader {
    const TileWork<T>& work;
    typename T::Pixels& pixels;
    TileWalk tile = work.tiles(0, T::UNIT);
    TileWalk partner = work.tiles(1, T::UNIT); // UNIT = 2: the second warpgroup's tile
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

// Role: load (warp 8). Resident weights are loaded before the previous kernel has ended, because it does not write
// them. (conv_few_rows does write the next kernel's weights, but the next kernel does not overlap it.)
// Streamed weights: half way through the weights of slice i, the thread loads the next item, which is slice i + 1 or,
// after the last slice, the first addend or the next tile's first slice. The remaining items follow a tile's weights.
// This order cannot deadlock (rule 2 of Pipeline). There are at least two stages, so before it loads the next item, the
// thread waits for the stage of slice i - 1 or of an older item. The warpgroups release slice i - 1 after the first tap
// of slice i. The thread has already started to load that tap's weights.
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

// Role: store (warps 9 and 10), for one of the warpgroups. When the results for 64 channels are complete in their
// stage, the thread stores them and frees the stage for the loading thread.
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

// What a warpgroup does with a tile's sums: it adds embedding and addend, rounds the sums to bf16, writes one row for
// each pixel to shared memory, and adds up the results for the statistics. (FP8: it first scales the sums and adds the
// bias, unless there is a skip connection.)
//
//   d[b] of thread t: channels c and c + 8 of slice b,      ->    a stage: 8 x ROWS rows (pixels) of 64 channels
//   for pixels 2 (t % 4) and 2 (t % 4) + 1 of all image rows       stmatrix transposes 8 x 8 matrices on the way
template <class T> struct Epilogue {
    // For each part of the statistics: sum and sum of squares of channel c, then those of c + 8.
    typedef float StatSums[T::ROWS / T::STATS_ROWS][4];
    const TileWork<T>& work;
    const ConvTma& p;
    int c;                           // the thread's channels in the block's slice b are c + 64 b and c + 64 b + 8
    int lane_place;                  // the place in a stage, in bytes, that this lane gives to ldmatrix and stmatrix
    float bias[T::OUT_SLICES][2];    // of channels c and c + 8 of each slice
    float emb[2];                    // of channels c and c + 8 of one slice
    float factors[T::OUT_SLICES][2]; // FP8: ConvTma::factors of channels c and c + 8 of each slice

    INLINE explicit Epilogue(const TileWork<T>& work) : work(work), p(work.p) {
        const int warp = threadIdx.x >> 5 & 3;
        const int lane = threadIdx.x & 31;
        c = work.c0 + warp * 16 + (lane >> 2);
        const int pixel = (lane & 7) + (lane >> 4) * 8; // this lane's pixel within two image rows
        const int chunk = 2 * warp + (lane >> 3 & 1);   // this lane's chunk of 8 channels
        lane_place = box_place<SLICE_CHANNELS>(pixel, chunk);
        UNROLL_FOR (int b = 0; b < T::OUT_SLICES; b++)
            UNROLL_FOR (int k = 0; k < 2; k++) {
                const int channel = c + b * SLICE_CHANNELS + 8 * k;
                bias[b][k] = p.out.bias && channel < p.C ? p.out.bias[channel] : 0;
                if (T::CAN_SKIP && p.skip.slices && channel < p.C) bias[b][k] += p.out.skip.bias[channel];
                if (T::IS_FP8) factors[b][k] = channel < p.C ? p.factors[channel] : 0;
            }
    }
    // The first slice's embedding is loaded while products run, the others when they are needed, to save registers.
    INLINE void load_embedding(int n, int b) {
        UNROLL_FOR (int k = 0; k < 2; k++) {
            const int channel = c + b * SLICE_CHANNELS + 8 * k;
            const bool wanted = p.out.emb && n < p.B && channel < p.C;
            emb[k] = wanted ? p.out.emb[(size_t)n * p.out.emb_stride + channel] : 0;
        }
    }
    // place: the address that this lane gives to ldmatrix for image rows 0 and 1 of the tile. d[4 j ... 4 j + 7], with
    // j even, are four pairs of neighbouring pixels: (row j, channel c), (row j, channel c + 8), (row j + 1, channel
    // c), (row j + 1, channel c + 8). In D a pixel is a column, but in shared memory it is a row, so ldmatrix and
    // stmatrix transpose 8 x 8 matrices. An image row of 8 pixels takes up 1024 bytes there.
    INLINE void add_addend(float (&d)[T::PIXELS / 2], uint32_t place) const {
        constexpr int BATCH = 4; // how many ldmatrix are started together
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
    // those of pixels outside the image. (h, w) is the tile's first pixel.
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
    static INLINE float sum_of_four(float v) { return lane_sum<1, 2>(v); }
    // Stores each channel's sum of the results and sum of their squares. Four threads hold the same channels of
    // different pixels, and one of them stores the totals. A tile is one part of the statistics (one_image), or has
    // PARTS parts, one below the other. (h, w) is the tile's first pixel.
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
    // Finishes a tile slice by slice. When a slice's results are in their stage, the warp that stores gets the stage.
    INLINE void finish(auto& acc, const TileWalk& tile, auto& pixels, const Results& results, int warpgroup) {
        const int h = tile.h * T::ROWS;
        const int w = tile.w * 8;
        UNROLL_FOR (int b = 0; b < T::OUT_SLICES; b++) {
            const int stage = pixels.hand_over();
            const uint32_t place = pixels.stage(stage).address + T::pixels_at(warpgroup) + lane_place;
            // Waits for the addend. (If nothing is loaded into the stage, the loading thread passes it on; if the stage
            // has held a slice, the warpgroup has waited for it before.)
            if (work.first_result + b >= work.products) pixels.arrived(warpgroup);
            if (b) load_embedding(tile.n, b);
            // FP8: the sums began as 0, so the bias is added here, after the scaling. With a skip connection there is
            // no embedding, and conv_tiles_kernel has already done both.
            if constexpr (T::IS_FP8) {
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

// The life of one stage of pixels, which holds slice s of a 3x3's tile. Each line shows one role, or one barrier:
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
// After wgmma_wait<1> only the products of the latest tap may still run, so the products of all taps of s have ended.
// The stages to which results are written (TileWork) are handed over to the warp that stores, which frees them:
//
//   warpgroup      acc.wait | epilogue: writes results into the stage | warp_stored
//                                                                           v
//   warp 9 or 10   results.arrived: waits ................................. tma_store, tma_stores_read, free
//                                                                                                         v
//   warp 8         acquire: waits ....................................................................... tma_load

template <class T> // T: a ConvTiles
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
        Sums acc = T::IS_FP8 ? Sums() : Sums(epilogue.bias);
        turn.wait();
        for (int s = 0; s < p.x.slices; s++) {
            const Halo<T::PITCH> halo(pixels.arrived(warpgroup) + T::pixels_at(warpgroup));
            const bool half_slice = (T::HALF || T::IS_FP8) && p.x.is_half_slice(s, T::WIDTH);
#pragma unroll(T::RESIDENT ? T::TAPS : 1)
            for (int tap = 0; tap < T::TAPS; tap++) {
                const uint32_t weight =
                    T::RESIDENT ? weights.kept(s * T::TAPS + tap, is_first_tile) : weights.arrived();
                if constexpr (!T::IS_FP8) {
                    if (half_slice) acc.template multiply<2, T::BACKWARD>(weight, halo.shifted(tap));
                    else acc.template multiply<4, T::BACKWARD>(weight, halo.shifted(tap));
                } else if (half_slice) acc.template multiply_fp8<2, T::ELEMENT>(weight, halo.shifted(tap));
                else acc.template multiply_fp8<4, T::ELEMENT>(weight, halo.shifted(tap));
                // After this wait only the latest tap's products may still run. So the stages that earlier products
                // have read are released, except resident weights and stages that results are written to.
                if (!T::RESIDENT || (s && tap == T::RELEASE_TAP)) wgmma_wait<1>();
                if (!T::RESIDENT && (s || tap)) weights.release();
                if (tap == T::RELEASE_TAP && s && s <= work.first_result) pixels.release();
            }
        }
        // The skip connection's products are of bf16 numbers, which have no factors. So the sums are scaled first.
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
        turn.pass(); // the other warpgroup multiplies while this one finishes its tile
        epilogue.load_embedding(tile.n, 0);
        acc.wait();
        if (!T::RESIDENT) weights.release();
        if (work.first_result >= work.products) pixels.release();
        else warps_sync(2 + warpgroup, 128); // no warp reads the last slices any more, which the results overwrite
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
#endif
