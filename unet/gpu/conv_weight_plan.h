// conv_weight_plan.h - how the pixels of a weight gradient are divided among blocks: costs as measured.
#pragma once
#include "conv.h"
#ifndef NO_HOPPER
#include "hopper/choose.h"
#else
#include "no_hopper.h"
#endif

#ifdef __CUDACC__ // the GPU

constexpr int PARTIAL_CYCLES = 10;

static WeightCosts weight_costs(const ConvWeight& p) {
    const ConvShape& s = p.shape;
    if (conv_is_wgmma(s)) return hopper_weight_costs(p);
    // Where bf16 needs one product, floats need three, but the measured time is only twice as long (slow = 2).
    const int slow = act_parts();
    const int most = 4 * MAX_WEIGHT_PARTIALS;
    if (conv_is_halo(s)) return {gpu.sms, 2500 * slow, 1, 15000 * slow, 15000 * slow, 0, most};
    if (p.block_co == 2) return {2 * gpu.sms, 2600, p.taps, 8000, 8000, 0, most};
    return {3 * gpu.sms, 1900 * slow, p.taps, 3800 * slow, 3800 * slow, 0, most};
}

// Sets how the tiles of 64 channels are divided among the blocks of conv_weight_tma and conv_weight_fp8. 3x3: a block
// computes one tile of Cin and one tile of Cout. 1x1: a block computes up to three tiles of Cin, and up to one tile of
// Cout for each of its `warpgroups`.
static void set_warpgroups(ConvWeight* p, int warpgroups) {
    // Returns how many tiles a block computes, at most `most`, if all tiles are divided as equally as possible.
    auto share = [](int tiles, int most) { return ceil_div(tiles, ceil_div(tiles, most)); };
    p->warpgroups = is_fp8(p->shape.in) ? 3 : warpgroups; // conv_weight_fp8 always has three
    p->co_tiles = p->tiles / p->channel_tiles;
    p->block_co = p->shape.kernel == 1 ? share(p->co_tiles, warpgroups) : 1;
    p->block_ci = p->shape.kernel == 1 ? share(p->channel_tiles, 3) : 1;
    p->input_groups = ceil_div(p->channel_tiles, p->block_ci);
}
// Returns the number of blocks of one range of pixels.
static int64_t range_blocks(const ConvWeight& p) {
    return (int64_t)ceil_div(p.co_tiles, p.block_co) * ceil_div(p.channel_tiles, p.block_ci) * weight_costs(p).filter;
}

// Finds the fastest plan for layers of one kind, which share a launch. It tries all sizes of a range (numbers of pixel
// tiles), from the largest down, until there would be too many partials. In FP8 even the largest size may need too many
// partials. Then it is the plan. For conv_weight_tma each size is tried with one warpgroup and with three.
static void plan_weights(std::span<ConvWeight> works) {
    Cheapest<std::pair<int, int>> cut; // the best plan: warpgroups, pixel tiles of a range
    for (int warpgroups : {1, 3}) {
        int most_tiles = 1;  // pixel tiles of the largest layer
        int tile_cycles = 0; // cycles of a block for a pixel tile of the slowest layer
        for (ConvWeight& p : works) {
            if (conv_is_wgmma(p.shape)) set_warpgroups(&p, warpgroups);
            most_tiles = std::max(most_tiles, p.pixel_tiles);
            tile_cycles = std::max(tile_cycles, weight_costs(p).tile);
        }
        const WeightCosts cost = weight_costs(works[0]);
        const ConvShape& first = works[0].shape;
        const int tile_products = first.out_W() > 8 ? 4 : 2; // FP8: a tile is 128 or 64 pixels, and a product sums 32
        const int most_fp8 = MAX_FP8_PRODUCTS / tile_products;
        const int most_range = is_fp8(first.in) ? std::min(most_tiles, most_fp8) : most_tiles;
        for (int range = most_range; range >= 1; range--) {
            int64_t blocks = 0;
            int64_t partials = 0; // how many partials there are, each of a tile of 64 x 64 weights (16 KB)
            for (const ConvWeight& p : works) {
                const int splits = ceil_div(p.pixel_tiles, range);
                blocks += range_blocks(p) * splits;
                if (splits > 1) partials += (int64_t)splits * p.tiles * p.taps;
            }
            if (partials > cost.most_partials && cut.cost < INFINITY) break;
            // Time = rounds of blocks * (a block's time for its tiles + for other work) + the second kernel's time.
            const int64_t rounds = (blocks + cost.slots - 1) / cost.slots; // a round is `slots` blocks at once
            const int64_t block_cycles = (int64_t)range * tile_cycles + (partials ? cost.beside : cost.beside_dweight);
            const int64_t second_kernel = partials ? cost.sums + PARTIAL_CYCLES * partials : 0;
            cut.consider(rounds * block_cycles + second_kernel, {warpgroups, range});
        }
    }
    const auto [warpgroups, range] = cut.best;
    for (ConvWeight& p : works) {
        if (conv_is_wgmma(p.shape)) set_warpgroups(&p, warpgroups);
        p.splits = ceil_div(p.pixel_tiles, range);
    }
}

// Plans one layer alone. conv_weight_batch sets bias_images and the rest of WeightWork, and put_partials sets the
// places of the partials.
static ConvWeight plan_weight(const ConvShape& s) {
    const int Ho = s.out_H();
    const int Wo = s.out_W();
    const bool tma = conv_is_wgmma(s);
    const bool halo = !tma && conv_is_halo(s);
    ConvWeight p = {};
    p.shape = s;
    p.taps = s.kernel * s.kernel;
    p.tiles1 = ceil_div(s.C1, 64);
    p.channel_tiles = p.tiles1 + ceil_div(s.C2, 64);
    p.tiles = p.channel_tiles * ceil_div(s.Cout, 64);
    set_warpgroups(&p, 1);

    // A pixel tile has 8 x 16 or 8 x 8 pixels on Hopper, and 8 x 8 in conv_weight_halo. In conv_weight_gather it has 64
    // consecutive pixels.
    if (tma) {
        p.tiles_h = ceil_div(Ho, 8);
        p.tiles_w = ceil_div(Wo, s.kernel == 3 && Wo > 8 ? 16 : 8);
    } else if (halo) {
        p.tiles_h = ceil_div(Ho, 8);
        p.tiles_w = ceil_div(Wo, 8);
    } else {
        p.tiles_h = 1;
        p.tiles_w = ceil_div(Ho * Wo, 64);
    }
    p.pixel_tiles = s.B * p.tiles_h * p.tiles_w;

    // In bf16 a block of conv_weight_gather computes 2 x 2 tiles of weights, if there are enough tiles and enough
    // products to keep the GPU busy. A product is a tile of weights, of one tap, summed over one pixel tile.
    if (!tma) {
        const int64_t products = (int64_t)p.tiles * p.taps * p.pixel_tiles;
        const bool many_tiles = p.co_tiles > 1 && p.channel_tiles > 1;
        const bool wide = act_parts() == 1 && many_tiles && products >= 64 * gpu.sms;
        p.block_co = wide && !halo ? 2 : 1;
        p.block_ci = p.block_co;
    }
    plan_weights({&p, 1});
    return p;
}

// Sets where the partials of a layer lie, and returns how many bytes they take. If there is only one range, the weights
// have no partials, but the bias has one partial for each image.
static size_t put_partials(ConvWeight* p, char* memory) {
    const size_t partials = (size_t)p->splits * p->tiles * p->taps;
    const size_t bytes = p->splits > 1 ? partials * 1024 * sizeof(float4) : 0;
    const size_t bias_bytes = (size_t)(p->splits + p->shape.B) * p->shape.Cout * sizeof(float);
    p->partial = (float4*)memory;
    p->bias_partial = (float*)(memory + bytes);
    return bytes + (bias_bytes + 255) / 256 * 256;
}

// Returns the number of blocks of a work, over all its ranges.
static int64_t all_blocks(const ConvWeight& p) { return range_blocks(p) * p.splits; }
#endif
