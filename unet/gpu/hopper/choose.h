// choose.h - which of Hopper's kernels runs: costs as measured.
#pragma once
#include "conv_small.h"
#include "conv_weight_tma.h"

#ifdef __CUDACC__ // the GPU

// Tiles of conv_tiles for 3x3: ConvTiles<taps, rows of pixels, slices of 64 output channels, RESIDENT, BACKWARD, HALF,
// element>. With up to 128 input channels (FP8: 256) all weights stay in shared memory (RESIDENT). With more, the
// weights pass through a ring (streamed).
template <bool BACKWARD> using ResidentHalf = ConvTiles<9, 16, 1, true, BACKWARD, true>;  // 32 or 96 input channels
template <bool BACKWARD> using StreamedHalf = ConvTiles<9, 32, 1, false, BACKWARD, true>; // 160, 224, ...
template <bool BACKWARD, Element E = Element::BF16> using Resident16 = ConvTiles<9, 16, 1, true, BACKWARD, false, E>;
template <bool BACKWARD, Element E = Element::BF16> using Resident32 = ConvTiles<9, 32, 1, true, BACKWARD, false, E>;
template <bool BACKWARD, Element E = Element::BF16> using Streamed16 = ConvTiles<9, 16, 1, false, BACKWARD, false, E>;
template <bool BACKWARD, Element E = Element::BF16> using Streamed32 = ConvTiles<9, 32, 1, false, BACKWARD, false, E>;

// The time of a block of conv_small in ns, as measured on an H200. tap_: one tap of one slice. block_: everything else.
// _alone: there is at most one block for each multiprocessor. _full: there are more blocks.
struct SmallCosts {
    int block_alone, tap_alone;
    int block_full, tap_full;
};

// Picks the fastest kernel and tile for 3x3 on images of up to 32 x 32. FP8: a product takes as long as in bf16, and
// sums over twice as many channels. A last slice that is half empty needs only half of the products.
template <bool BACKWARD, Element E = Element::BF16> static void pick_conv_small(const ConvCall& p) {
    constexpr bool IS_FP8 = is_fp8(E);
    const int slices = ceil_div(p.Cin1, slice_channels(E));
    const int half_slices = ceil_div(p.Cin1, slice_channels(E) / 2);
    const bool is_half = half_slices % 2 && !IS_FP8;    // the last slice is half empty, and some kernels know it
    const int half_taps = ceil_div(9 * half_slices, 2); // of whole slices, for these kernels (FP8: for all)
    const int taps = IS_FP8 ? half_taps : 9 * slices;
    Cheapest<void (*)(const ConvCall&)> way;

    // Time = rounds of blocks * (block + taps of a block * tap). In a round, as many blocks run as fit on the GPU.
    auto consider = [&](auto tile, SmallCosts cost) {
        using T = decltype(tile);
        if (T::SPLIT > 1 && !gpu.clusters) return;
        const int tiles = count_tiles(p, T::IMAGES, 8, T::TILE_W);
        const int blocks = tiles * ceil_div(p.Cout, T::N) * T::SPLIT;
        const int64_t rounds = ceil_div(blocks, gpu.sms * T::PER_SM);
        const bool alone = blocks <= gpu.sms;
        int block = alone ? cost.block_alone : cost.block_full;
        int tap = alone ? cost.tap_alone : cost.tap_full;
        if (IS_FP8 && !alone) { // as measured on an H200: this much longer than in bf16
            block += 1500;
            tap += tap / 12;
        }
        way.consider(rounds * (block + tap * (has_half_kernel<T>(p) ? half_taps : taps) / T::SPLIT), conv_small<T>);
    };
    // SmallTile<BACKWARD, warpgroups, N (output channels), images, SPLIT, blocks per multiprocessor, element>
    using Square = SmallTile<BACKWARD, 1, 64, 1, 1, 2, E>;          // a square of 8 x 8 pixels and 64 channels
    using SquareShared = SmallTile<BACKWARD, 1, 64, 1, 2, 2, E>;    // each of two blocks computes half of the steps
    using TwoImagesShared = SmallTile<BACKWARD, 2, 64, 2, 2, 1, E>; // as SquareShared, and two images share weights
    using TwoImages = SmallTile<BACKWARD, 2, 64, 2, 1, 1, E>;       // two images share weights
    using ManyChannels = SmallTile<BACKWARD, 1, 192, 1, 1, 1, E>;   // pixels are loaded once for 192 channels
    using TwoImages128 = SmallTile<BACKWARD, 2, 128, 2, 1, 1, E>;   // as TwoImages, but for 128 channels
    using Wide32 = SmallTile<BACKWARD, 2, 32, 1, 1, 1, E>;          // tiles of 8 x 16 pixels
    using Wide192 = SmallTile<BACKWARD, 2, 192, 1, 1, 1, E>;
    //                          block_alone, tap_alone, block_full, tap_full
    consider(Square(), SmallCosts{1270, 104, 1270, 209});
    consider(SquareShared(), SmallCosts{2350, 52, 2350, 235});
    consider(TwoImagesShared(), SmallCosts{2780, 94, 2780, 196});
    consider(TwoImages(), SmallCosts{1780, 140, 2500, 173});
    consider(ManyChannels(), SmallCosts{1250, 267, 3200, 260});
    consider(TwoImages128(), SmallCosts{2340, 286, 3750, 316});
    if (p.W > 8) {
        consider(Wide32(), SmallCosts{1040, 129, 1040, 124});
        consider(Wide192(), SmallCosts{3160, 422, 4500, 470});
    }
    if (p.H <= 8) return way.best(p); // conv_tiles' tiles for 3x3 have at least 16 rows

    // conv_tiles takes once + (tiles of the busiest block / n, rounded up) * each, in ns, as measured on an H200. Here
    // a tile is 8 pixels across and 16 down, even if the kernel's own tiles are larger.
    const int tiles = count_tiles(p, 1, 16, 8);
    auto consider_tiles = [&](auto tile, int once, int n, int64_t each) {
        const int runs_of_n = ceil_div(ceil_div(tiles, n), tile.runs(p.Cout));
        way.consider(once + runs_of_n * each, conv_tiles<decltype(tile)>);
    };
    if (is_half && slices <= 2) {
        consider_tiles(ResidentHalf<BACKWARD>(), 1550, 1, 325 + 148 * half_taps);
    } else if (slices <= 2) {
        consider_tiles(Resident16<BACKWARD, E>(), 1550, 1, 325 + 148 * taps);
    } else if (p.H % 32) {
        consider_tiles(Streamed16<BACKWARD, E>(), 425, 2, 2600 + 300 * taps);
    } else if (is_half) {
        consider_tiles(StreamedHalf<BACKWARD>(), 425, 4, 4000 + 588 * half_taps);
    } else {
        consider_tiles(Streamed32<BACKWARD, E>(), 425, 4, 4000 + 588 * taps);
    }
    way.best(p);
}

// The cycles that conv_tiles takes with T for p, a 1x1, by measurements on an H200. INFINITY: T is not possible
// (results_fit). slices: slices of 64 input channels.
template <class T> static double conv_tiles_1x1_cycles(const ConvCall& p, int slices) {
    constexpr int64_t L2_BYTES = 36; // bytes that a multiprocessor can exchange with the L2 in a cycle
    const bool add = p.out.part1.add1 || p.out.part2.add1;
    const int weights = T::RESIDENT ? slices : T::STREAMED_WEIGHTS;
    const int stages = T::stages(weights);
    const bool results_fit = stages > T::OUT_SLICES && (T::RESIDENT || slices >= T::OUT_SLICES);
    if (!results_fit) return INFINITY; // a tile's results take OUT_SLICES stages

    // A unit is what a stage holds: a tile, or two tiles, one for each warpgroup.
    const int tiles = count_tiles(p, 1, T::ROWS, 8);
    const int units = ceil_div(tiles, T::UNIT);
    const int64_t rounds = ceil_div(units, T::runs(p.Cout)); // of the busiest block

    // 4 products of k = 16 for each tile, slice and 64 output channels. Each takes PIXELS / 2 cycles, and 6 to start.
    const int64_t products = T::UNIT * T::OUT_SLICES * slices * 4 * (T::PIXELS / 2 + 6);

    // Slices, streamed weights and addends are read, and results are written.
    const int64_t tile_bytes = T::UNIT * T::TILE_BYTES;
    const int64_t slice_bytes = tile_bytes + (T::RESIDENT ? 0 : T::WEIGHT_BYTES);
    const int64_t bytes = slices * slice_bytes + T::OUT_SLICES * tile_bytes * (add ? 2 : 1);
    // ahead: bytes that can be on their way to shared memory at the same time. A tile's results occupy OUT_SLICES
    // stages, and the slices that are being multiplied two more. A load takes 1800 cycles. (Streamed weights: this
    // limit is left out.)
    const int64_t ahead = std::max(1, stages - T::OUT_SLICES - 2) * tile_bytes;
    const int64_t bytes_per_cycle = T::RESIDENT ? std::min(L2_BYTES, ahead / 1800) : L2_BYTES;
    const int64_t longest = std::max(products, bytes / bytes_per_cycle);

    // Adding, rounding and storing. With streamed weights and few stages, the next unit has to wait until this is done.
    const bool tight = !T::RESIDENT && stages < T::OUT_SLICES + 2;
    int64_t end = T::OUT_SLICES * T::PIXELS * (add || p.out.stats ? 10 : 6);
    if (tight) end += 3000;

    // RESIDENT: one warpgroup finishes its tile while the other one multiplies, so on average a tile takes at least
    // (products + end) / 2. Streamed weights: both warpgroups multiply, and then both finish their tiles.
    const int64_t unit = T::RESIDENT ? std::max(longest, (products + end) / 2) : longest + end;
    const int64_t first_weights = T::RESIDENT ? slices * T::WEIGHT_BYTES / L2_BYTES : 0;
    return first_weights + end + rounds * unit;
}

template <bool BACKWARD> static void pick_conv_tiles_1x1(const ConvCall& c) {
    ConvCall p = c;
    // All images can be treated as one image of width 8, so that all tiles are full, except perhaps the last one. But
    // an embedding differs from image to image. And a part of the statistics, which may be as small as 8 x 8 pixels,
    // must not belong to two images.
    const int HW = p.H * p.W;
    const bool as_one = !p.out.emb && HW % 8 == 0 && (!p.out.stats || HW % 64 == 0);
    if (as_one) {
        p.H = p.B * (HW / 8);
        p.W = 8;
        p.B = 1;
    }
    // 32 input channels need half the products of a slice.
    using HalfSlice1x1 = ConvTiles<1, 16, 1, true, BACKWARD, true>;
    if (p.Cin1 + p.Cin2 == 32) return conv_tiles<HalfSlice1x1>(p);

    const int slices = ceil_div(p.Cin1, 64) + ceil_div(p.Cin2, 64);
    Cheapest<void (*)(const ConvCall&)> way;
    auto consider = [&](auto tile) {
        using T = decltype(tile);
        way.consider(conv_tiles_1x1_cycles<T>(p, slices), conv_tiles<T>);
    };
    // ConvTiles<taps, rows, slices of 64 output channels, whether weights are resident, ...>
    consider(ConvTiles<1, 16, 1, true, BACKWARD>());
    consider(ConvTiles<1, 16, 2, true, BACKWARD>());
    consider(ConvTiles<1, 16, 3, true, BACKWARD>());
    consider(ConvTiles<1, 8, 3, false, BACKWARD>());
    consider(ConvTiles<1, 16, 2, false, BACKWARD>());
    consider(ConvTiles<1, 16, 3, false, BACKWARD>());
    way.best(p);
}

// Picks the tile of conv_tiles for 3x3 on images larger than 32 x 32 or with a skip connection. The number in a tile's
// name is how many rows it has.
template <bool BACKWARD, Element E = Element::BF16> static void pick_conv_tiles_3x3(const ConvCall& c) {
    const int slices = ceil_div(c.Cin1, slice_channels(E));
    const bool skip = c.out.skip.weight;               // only RESIDENT tiles can compute a skip connection
    const bool half_slice = c.Cin1 <= 64 && is_fp8(E); // too few products for tiles of 32 rows
    const bool one_slice_and_32_rows = slices == 1 && !half_slice && c.Cout > 64 && c.H >= 64;
    const bool fills_32_rows = c.H % 32 == 0 || c.H > 64;

    const Way<ConvCall> ways[] = {
        // 32 input channels are half a slice, so each tap needs two products instead of four
        {c.Cin1 == 32 && E == Element::BF16, conv_tiles<ResidentHalf<BACKWARD>>},
        // one slice of weights leaves room for tiles of 32 rows (by measurement they pay only above 64 output channels)
        {!skip && one_slice_and_32_rows, conv_tiles<Resident32<BACKWARD, E>>},
        // the weights of up to two slices fit into shared memory, together with pixels
        {slices <= 2, conv_tiles<Resident16<BACKWARD, E>>},
        // a tile of 32 rows uses streamed weights for more pixels, which pays if few of its rows lie outside the image
        {fills_32_rows, conv_tiles<Streamed32<BACKWARD, E>>},
        {true, conv_tiles<Streamed16<BACKWARD, E>>},
    };
    decide(c, ways);
}

// Small images often have too few tiles for conv_tiles' blocks. But only conv_tiles can compute a skip connection.
static bool conv_is_small(const ConvCall& c) {
    const bool small = c.H <= 32 && c.W <= 32;
    return small && !c.out.skip.weight;
}

// FP8: a 3x3 of one input with stride 1, either forward or an input gradient (conv_backward_input_fp8).
template <Element E> static void hopper_conv_fp8(const ConvCall& c) {
    const bool known = conv_is_wgmma(c.s) && conv_is_halo(c.s);
    if (!known) die("internal error: no kernel of FP8 for this convolution");
    if (conv_is_small(c)) pick_conv_small<false, E>(c);
    else pick_conv_tiles_3x3<false, E>(c);
}
// Computes a convolution by Hopper's kernels, if they can. Returns whether they do.
template <bool BACKWARD> static bool hopper_conv(const ConvCall& c) {
    const ConvShape& s = c.s;
    const ConvOut& o = c.out;
    if constexpr (!BACKWARD) {
        if (s.in == Element::FP8) hopper_conv_fp8<Element::FP8>(c);
        if (s.in == Element::FP8_GRADIENT) hopper_conv_fp8<Element::FP8_GRADIENT>(c);
        if (is_fp8(s.in)) return true;
    }
    // Hopper's kernels always store all parts of the result, and add at most one addend to each part. If there are two
    // parts, the first one must consist of whole slices of 64 channels.
    const bool all_parts = o.part1.dx && (!o.Cout2 || (o.part2.dx && o.Cout1 % 64 == 0));
    const bool second_addends = o.part1.add2 || o.part2.add2;
    if (!conv_is_wgmma(s) || !all_parts || second_addends) return false;
    const Way<ConvCall> ways[] = {
        {s.kernel == 1, pick_conv_tiles_1x1<BACKWARD>},
        {conv_is_small(c), pick_conv_small<BACKWARD>},
        {true, pick_conv_tiles_3x3<BACKWARD>},
    };
    decide(c, ways);
    return true;
}

// Can a 3x3 convolution of shape s also compute the skip connection (1x1) that is added to its result? A tile has 16
// rows, and shared memory needs room for all weights and for one more stage of pixels than a tile needs.
static bool conv_takes_skip(const ConvShape& s, const ConvShape& skip) {
    if (!conv_is_wgmma(s) || !conv_is_wgmma(skip)) return false;
    if (s.kernel != 3 || skip.kernel != 1 || s.H < 16) return false;
    const int slices = ceil_div(s.C1, slice_channels(s.in));
    const int skip_slices = ceil_div(skip.C1, 64) + ceil_div(skip.C2, 64);
    const int weights = 9 * slices + skip_slices;
    return weights <= 18 && Resident16<false>::stages(weights) > slices + skip_slices;
}

// wgmma accepts FP8 operands only if they are K_MAJOR, so the weights can't be transposed on their way to the tensor
// cores. Instead, round_weights has written a turned copy of them, `turned` (C1, taps in reverse order, Cout). With it,
// a forward convolution of dout computes the input gradient.
static void conv_backward_input_fp8(Grad dx, const act* dout, const act* turned, ConvShape s, const float* factors) {
    if (s.C2 || dx.add1 || dx.add2) die("internal error: in FP8 an input gradient has one input and no addends");
    std::swap(s.C1, s.Cout);
    s.in = Element::FP8_GRADIENT;
    s.out = act_element;
    ConvCall call{.s = s, .B = s.B, .H = s.H, .W = s.W};
    call.Cin1 = s.C1;
    call.Cout = s.Cout;
    call.x1 = dout;
    call.weight = turned;
    call.out = ConvOut{.part1 = dx, .Cout1 = s.Cout, .B = s.B};
    call.factors = factors;
    hopper_conv<false>(call);
}

// The cycles that a block of conv_weight_tma or conv_weight_fp8 takes for a pixel tile, with one warpgroup or with
// three (wide). They were measured while other blocks read the same pixels; those for FP8 are an estimate.
static int weight_tile_cycles(const ConvWeight& p) {
    const ConvShape& s = p.shape;
    const bool wide = p.warpgroups == 3;
    if (is_fp8(s.in)) return s.out_W() <= 8 ? 850 : 1400;
    if (s.kernel == 1) return wide ? 267 * (p.block_co + p.block_ci) : 20 + 215 * (1 + p.block_ci);
    if (s.out_W() <= 8) return wide ? 1450 : 600;
    if (wide) return 2400;
    // With one warpgroup, reading x and dout for only one filter row takes much of the time. The formula was fitted to
    // measurements. With more tiles of weights, more blocks share what the L2 holds. Tensors of more than 100 MB do not
    // stay in the L2.
    const bool large = (double)s.B * s.H * s.W * (s.C1 + s.Cout) * sizeof(bf16) > 1e8;
    return 800 + (large ? 7 : 3) * (s.C1 + s.Cout) / (2 * p.tiles);
}
static WeightCosts hopper_weight_costs(const ConvWeight& p) {
    const ConvShape& s = p.shape;
    const int filter = ceil_div(s.kernel, p.warpgroups);
    const int tile = weight_tile_cycles(p);
    if (is_fp8(s.in)) return {gpu.sms, tile, 1, 9000, 12000, 4000, 4 * MAX_WEIGHT_PARTIALS};
    if (p.warpgroups == 3) return {gpu.sms, tile, filter, 9000, 12000, 4000};
    return {gpu.sms, tile, filter, 5000, 5000, 4000};
}
#endif
