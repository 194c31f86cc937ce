// weights.h - launches Hopper's weight gradients (sm_90a).
#pragma once
#include "../conv_fp8.h"
#include "../conv_weight_plan.h"
#include "conv_weight_tma.h"

#ifdef __CUDACC__ // the GPU

// Makes tensor maps for works of one kind, and launches conv_weight_tma_kernel for them.
template <class Tile> static void conv_weight_tma(const WeightPlans& works, Stream* stream) {
    auto with_maps = [](const ConvWeight& p) {
        const ConvShape& s = p.shape;
        const TmaParts x = tma_parts(p.x1, p.x2, s.C1, s.C2, s, SLICE_CHANNELS, Tile::PITCH, Tile::HALO_H, 1);
        const CUtensorMap dout =
            tensor_map(p.dout, {s.Cout, s.W, s.H, s.B}, {SLICE_CHANNELS, Tile::TILE_W, Tile::TILE_H});
        const int k = Tile::KERNEL;
        const CUtensorMap dweight = tensor_map(p.dweight, {s.C1 + s.C2, k, k, s.Cout},
                                               {SLICE_CHANNELS / 2, k, 1, SLICE_CHANNELS}, Element::FP32);
        return ConvWeightTma{x, dout, dweight, p};
    };
    launch_weights(conv_weight_tma_kernel<Tile>, works, stream, Tile::THREADS, Tile::SHARED_BYTES, with_maps,
                   all_blocks);
}
// Does the same for conv_weight_fp8_kernel.
template <class Tile> static void conv_weight_fp8(const WeightPlans& works, Stream* stream) {
    auto with_maps = [](const ConvWeight& p) {
        const ConvShape& s = p.shape;
        const TmaParts x = tma_parts(p.x1, nullptr, s.C1, 0, s, SLICE_CHANNELS, Tile::TILE_W, Tile::X_ROWS, 1, s.in);
        const CUtensorMap dout =
            tensor_map(p.dout, {s.Cout, s.W, s.H, s.B}, {SLICE_CHANNELS, Tile::PITCH, Tile::TILE_H}, s.out);
        const CUtensorMap dweight =
            tensor_map(p.dweight, {s.C1, 3, 3, s.Cout}, {SLICE_CHANNELS / 2, 1, 3, SLICE_CHANNELS}, Element::FP32);
        return ConvWeightTma{x, dout, dweight, p};
    };
    launch_weights(conv_weight_fp8_kernel<Tile>, works, stream, Tile::THREADS, Tile::SHARED_BYTES, with_maps,
                   all_blocks);
}

// conv_weight_tma's blocks have one warpgroup or three. WeightTile<filter, warpgroups, pixels across a tile, stages>
static void hopper_weights(WeightKind kind, const WeightPlans& works, Stream* stream) {
    const bool three = works[0].warpgroups == 3;
    switch (kind) {
    case TMA_1X1:
        if (three) return conv_weight_tma<WeightTile<1, 3, 8, 4>>(works, stream);
        return conv_weight_tma<WeightTile<1, 1, 8, 6>>(works, stream);
    case TMA_3X3:
        if (three) return conv_weight_tma<WeightTile<3, 3, 16, 5>>(works, stream);
        return conv_weight_tma<WeightTile<3, 1, 16, 6>>(works, stream);
    case TMA_3X3_NARROW:
        if (three) return conv_weight_tma<WeightTile<3, 3, 8, 9>>(works, stream);
        return conv_weight_tma<WeightTile<3, 1, 8, 10>>(works, stream);
    // WeightTileFp8<pixels across a tile, stages of x, of dout, of strips (x transposed)>
    case FP8_3X3: return conv_weight_fp8<WeightTileFp8<16, 6, 7, 6>>(works, stream);
    case FP8_3X3_NARROW: return conv_weight_fp8<WeightTileFp8<8, 8, 10, 9>>(works, stream);
    case HALO_3X3:
    case GATHER:
    case GATHER_WIDE: break; // for any GPU: launch_weight_kind
    }
}
#endif
