"""Checks conv3x3.cu: stride 1 and 2, multiples of 32 and of 64 channels, upsampled input, 3 channels in or out, embedding, residual, statistics."""

from conv import conv_pair
from harness import main, precisions

# Weight gradients with three warpgroups to a block, whose sums are added up by a second kernel or by TMA: layers of unet64 and adm64, and small ones as if they were large
LARGE = [
    dict(B=256, H=32, W=32, C1=64, Cout=128, emb=True, sms=132, takes="3 warpgroups, partials"),
    dict(B=32, H=8, W=8, C1=576, Cout=768, emb=True, sms=132, takes="3 warpgroups, one range"),
    dict(B=2, H=12, W=12, C1=96, Cout=160, emb=True, residual=True, sms=1, takes="3 warpgroups, one range", on="H200 bf16"),
    dict(B=7, H=9, W=17, C1=64, Cout=64, emb=True, sms=2, takes="3 warpgroups, partials", on="H200 bf16"),
    dict(B=3, H=8, W=8, C1=192, Cout=128, emb=True, sms=1, takes="3 warpgroups, one range", on="H200 bf16"),
    dict(B=20, H=7, W=8, C1=64, Cout=64, sms=2, takes="3 warpgroups, partials", on="H200 bf16"),
    # blocks of the forward convolutions that do several tiles
    dict(B=1, H=40, W=18, C1=64, Cout=64, emb=True, residual=True, addends=1, sms=1),
    dict(B=1, H=64, W=9, C1=64, Cout=96, residual=True, sms=1, on="H200 bf16"),
    dict(B=1, H=32, W=34, C1=160, Cout=64, emb=True, addends=1, sms=1, on="H200 bf16"),
    dict(B=1, H=35, W=20, C1=32, Cout=32, residual=True, sms=1, on="H200 bf16"),
    # the portable kernels' tiles of 48 channels, where 64 leave a round of blocks nearly empty
    dict(B=1, H=14, W=16, C1=64, Cout=576, emb=True, residual=True, addends=1, sms=4, on="A100 bf16"),
    # ... where those of 32 do on images of at most 8x8
    dict(B=3, H=7, W=8, C1=96, Cout=288, emb=True, residual=True, addends=2, sms=6, on="A100 bf16"),
    # fp32 on a GPU whose blocks have 99 KB (RTX 30 to 50), images of more than 8x8 and below
    dict(B=2, H=12, W=20, C1=96, Cout=64, emb=True, residual=True, sms=82, block_shared=101376, on="A100 fp32"),
    dict(B=3, H=7, W=8, C1=96, Cout=96, addends=2, sms=82, block_shared=101376, on="A100 fp32"),
]
# Each of Hopper's kernels, with more slices of channels, or more tiles, than their rings have stages: images of at most 8x8, of 8x16, of 16 rows; weight gradients
RINGS = [
    dict(B=1, H=8, W=7, C1=192, Cout=192, residual=True, addends=1, sms=1, exact="hopper", on="H200 bf16"),
    dict(B=1, H=8, W=8, C1=320, Cout=64, emb=True, sms=2, exact="clusters,hopper", on="H200 bf16"),
    dict(B=1, H=7, W=8, C1=64, Cout=320, addends=1, sms=2, exact="clusters,hopper", on="H200 bf16"),
    dict(B=2, H=8, W=8, C1=448, Cout=32, residual=True, sms=2, exact="clusters,hopper", on="H200 bf16"),
    dict(B=2, H=8, W=8, C1=32, Cout=448, addends=1, sms=2, exact="clusters,hopper", on="H200 bf16"),
    dict(B=2, H=8, W=8, C1=192, Cout=128, emb=True, addends=1, sms=1, exact="hopper", on="H200 bf16"),
    dict(B=2, H=8, W=8, C1=128, Cout=192, residual=True, sms=1, exact="hopper", on="H200 bf16"),
    dict(B=1, H=8, W=15, C1=192, Cout=192, residual=True, addends=1, sms=1, exact="hopper", on="H200 bf16"),
    dict(B=1, H=8, W=16, C1=192, Cout=32, emb=True, sms=1, exact="hopper", on="H200 bf16"),
    dict(B=1, H=8, W=16, C1=32, Cout=192, addends=1, sms=1, exact="hopper", on="H200 bf16"),
    dict(B=2, H=8, W=8, C1=192, Cout=32, emb=True, sms=1, exact="hopper", on="H200 bf16"),
    dict(B=2, H=8, W=8, C1=32, Cout=192, residual=True, addends=1, sms=1, exact="hopper", on="H200 bf16"),
    dict(B=1, H=16, W=24, C1=192, Cout=64, residual=True, sms=1, exact="hopper", on="H200 bf16"),
    dict(B=1, H=16, W=24, C1=64, Cout=192, addends=1, sms=1, exact="hopper", on="H200 bf16"),
    dict(B=2, H=8, W=6, C1=32, Cout=32, stride=2, addends=1, exact="hopper", on="H200 bf16"),
    dict(B=2, H=5, W=4, C1=32, Cout=32, upsample=1, addends=1, exact="hopper", on="H200 bf16"),
    dict(B=2, H=8, W=8, C1=64, Cout=64, residual=True, addends=1, exact="hopper", on="A100 bf16, A100 fp32"),
    dict(B=12, H=8, W=8, C1=32, Cout=32, emb=True, sms=3, takes="1 warpgroups, one range", exact="hopper", on="H200 bf16"),
    dict(B=8, H=8, W=16, C1=32, Cout=32, emb=True, sms=3, takes="1 warpgroups, one range", exact="hopper", on="H200 bf16"),
    dict(B=10, H=8, W=8, C1=32, Cout=32, sms=1, takes="3 warpgroups, one range", exact="hopper", on="H200 bf16"),
    dict(B=6, H=8, W=16, C1=32, Cout=32, sms=1, takes="3 warpgroups, one range", exact="hopper", on="H200 bf16"),
]

# FP8: one slice of 64 and of 128 channels and more; each kernel and tile, with all that is added to the result
ON_HOPPER = dict(fp8=True, only=precisions()[0], on="H200 bf16")
FP8 = [
    # conv_small: images of at most 8x8, of 8x16, of 32x32; clusters
    dict(B=3, H=8, W=8, C1=64, Cout=64, emb=True),
    dict(B=2, H=7, W=8, C1=192, Cout=96, residual=True, sms=2),
    dict(B=1, H=8, W=8, C1=320, Cout=64, emb=True, sms=2, exact="clusters"),
    dict(B=2, H=8, W=8, C1=448, Cout=32, emb=True, residual=True, sms=2),
    dict(B=1, H=8, W=8, C1=96, Cout=320, sms=1),
    dict(B=2, H=8, W=8, C1=192, Cout=256, emb=True, sms=1),
    dict(B=4, H=8, W=8, C1=320, Cout=128, residual=True, sms=1),
    dict(B=1, H=8, W=15, C1=192, Cout=192, residual=True, emb=True, sms=1),
    dict(B=1, H=8, W=16, C1=160, Cout=32, emb=True, sms=1),
    dict(B=1, H=16, W=24, C1=32, Cout=64, residual=True, sms=1),
    dict(B=1, H=9, W=21, C1=128, Cout=64, emb=True),
    # conv_tiles: resident weights of one slice and of two, tiles of 32 rows, streamed weights
    dict(B=1, H=40, W=18, C1=64, Cout=64, emb=True, residual=True, sms=1),
    dict(B=1, H=35, W=20, C1=32, Cout=32, residual=True, sms=1),
    dict(B=1, H=64, W=9, C1=128, Cout=96, residual=True, emb=True, sms=1),
    dict(B=1, H=40, W=12, C1=192, Cout=64, emb=True, sms=1),
    dict(B=1, H=40, W=12, C1=256, Cout=32, sms=1),
    dict(B=1, H=33, W=10, C1=288, Cout=64, residual=True, sms=1),
    dict(B=1, H=64, W=18, C1=320, Cout=64, emb=True, residual=True, sms=1),
    dict(B=1, H=32, W=32, C1=448, Cout=64, emb=True, sms=1),
    # a skip connection, which stays in bf16, fused and not
    dict(B=2, H=16, W=17, C1=64, Cout=64, skip=96, sms=1, takes="skip"),
    dict(B=1, H=35, W=18, C1=128, Cout=96, skip=96, sms=1, takes="skip"),
    dict(B=1, H=33, W=18, C1=192, Cout=64, skip=32, sms=1, takes="residual"),
]

# The same kernels, for the input gradient: Cout is summed over
FP8_GRADIENTS = [
    dict(B=3, H=8, W=8, C1=64, Cout=64),
    dict(B=2, H=7, W=8, C1=96, Cout=192, sms=2),
    dict(B=1, H=8, W=8, C1=64, Cout=320, sms=2, exact="clusters"),
    dict(B=2, H=8, W=8, C1=32, Cout=448, sms=2),
    dict(B=1, H=8, W=8, C1=320, Cout=96, sms=1),
    dict(B=2, H=8, W=8, C1=256, Cout=192, sms=1),
    dict(B=4, H=8, W=8, C1=128, Cout=320, sms=1),
    dict(B=1, H=8, W=15, C1=192, Cout=192, sms=1),
    dict(B=1, H=8, W=16, C1=32, Cout=160, sms=1),
    dict(B=1, H=16, W=24, C1=64, Cout=32, sms=1),
    dict(B=1, H=35, W=20, C1=32, Cout=32, sms=1),
    dict(B=1, H=64, W=9, C1=96, Cout=128, sms=1),
    dict(B=1, H=40, W=12, C1=64, Cout=192, sms=1),
    dict(B=1, H=33, W=10, C1=64, Cout=288, sms=1),
    dict(B=1, H=64, W=18, C1=64, Cout=320, sms=1),
    dict(B=1, H=32, W=32, C1=64, Cout=448, sms=1),
]

# Weight gradients: tiles of 16 and of 8 pixels across, parts of tiles, one range and partials, more tiles than the rings have stages, images of several tiles
FP8_WEIGHTS = [
    dict(B=1, H=8, W=16, C1=64, Cout=64, sms=1, takes="one range"),
    dict(B=1, H=8, W=8, C1=64, Cout=64, sms=1, takes="one range"),
    dict(B=2, H=12, W=20, C1=96, Cout=160, emb=True, sms=1, takes="one range"),
    dict(B=7, H=9, W=17, C1=64, Cout=64, emb=True, sms=2, takes="partials"),
    dict(B=3, H=8, W=8, C1=192, Cout=128, emb=True, sms=1, takes="one range"),
    dict(B=20, H=7, W=8, C1=64, Cout=64, sms=2, takes="partials"),
    dict(B=10, H=8, W=8, C1=32, Cout=32, emb=True, sms=1, takes="one range"),
    dict(B=6, H=8, W=16, C1=32, Cout=32, emb=True, sms=1, takes="one range"),
    dict(B=3, H=4, W=5, C1=64, Cout=96, emb=True, sms=2),
    dict(B=1, H=32, W=34, C1=160, Cout=64, emb=True, sms=6, takes="partials"),
    dict(B=2, H=40, W=18, C1=64, Cout=96, sms=1, takes="one range"),
    dict(B=2, H=20, W=7, C1=32, Cout=96, emb=True, sms=1, takes="one range"),
    dict(B=3, H=1, W=1, C1=32, Cout=32, emb=True, sms=1, takes="one range"),
    dict(B=1, H=136, W=128, C1=32, Cout=32, sms=1, takes="partials"),  # of more products than one sum may take
]

PAIR = conv_pair(
    "conv3x3",
    3,
    [
        dict(B=3, H=12, W=20, C1=96, Cout=160, emb=True, residual=True),
        dict(B=1, H=8, W=8, C1=96, Cout=64, residual=True, addends=2),
        dict(B=5, H=7, W=9, C1=128, Cout=32, emb=True),
        dict(B=2, H=16, W=12, C1=32, Cout=96, stride=2, addends=1),
        dict(B=3, H=7, W=5, C1=64, Cout=32, stride=2),
        dict(B=3, H=9, W=10, C1=64, Cout=64, wild=True, on="A100 fp32"),
        dict(B=3, H=7, W=8, C1=96, Cout=64, wild=True, on="A100 fp32"),
        dict(B=2, H=6, W=5, C1=96, Cout=64, upsample=1, addends=1, emb=True),
        dict(B=2, H=12, W=20, C1=3, Cout=64, fp32="x1", on="A100 bf16, H200 bf16"),
        dict(B=1, H=9, W=11, C1=1, Cout=32, fp32="x1"),
        dict(B=2, H=12, W=20, C1=64, Cout=3, fp32="dout", on="A100 bf16, H200 bf16"),
        dict(B=1, H=1, W=1, C1=32, Cout=6, fp32="dout", on="A100 fp32"),
        dict(B=2, H=18, W=37, C1=96, Cout=1, fp32="dout", on="A100 fp32"),
        dict(B=2, H=16, W=16, C1=64, Cout=64, residual=True, emb=True),
        dict(B=3, H=8, W=8, C1=192, Cout=128, addends=2),
        dict(B=1, H=9, W=21, C1=128, Cout=64, emb=True),
        *(LARGE + RINGS if "bf16" in precisions() else []),
        *(case | ON_HOPPER for case in FP8),
        *(case | ON_HOPPER | {"fp8": "gradient"} for case in FP8_GRADIENTS),
        *(case | ON_HOPPER | {"fp8": "weights"} for case in FP8_WEIGHTS),
        dict(B=1, H=8, W=8, C1=64, Cout=128, upsample=1, addends=1),
        dict(B=20, H=8, W=8, C1=256, Cout=32, spikes=True, on="A100 fp32"),
        dict(B=1, H=8, W=8, C1=256, Cout=192, spikes=True, on="A100 fp32"),
        dict(B=2, H=24, W=24, C1=160, Cout=32, spikes=True, on="A100 fp32"),
        dict(B=1, H=9, W=8, C1=160, Cout=160, spikes=True, on="A100 fp32"),
    ],
)

if __name__ == "__main__":
    main(PAIR)
