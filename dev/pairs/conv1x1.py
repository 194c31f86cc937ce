"""Checks conv1x1.cu: skip connections over one or two sources, qkv, the projection with residual."""

from conv import conv_pair
from harness import main, precisions

# What only large layers take on a GPU (the naive loops of a CPU would need minutes): adm64's projection, where a tile takes more places than the ring of
# Hopper's kernel has; weight gradients with three warpgroups to a block, also for small layers as if they were large
LARGE = [
    dict(B=32, H=16, W=16, C1=576, Cout=576, residual=True, addends=1),
    dict(B=256, H=16, W=16, C1=192, Cout=576, sms=132, takes="3 warpgroups, partials"),
    dict(B=32, H=8, W=8, C1=1728, Cout=2304, sms=132, takes="3 warpgroups, one range"),
    dict(B=5, H=7, W=9, C1=160, Cout=480, sms=1, takes="3 warpgroups, one range", on="H200 bf16"),
    dict(B=9, H=12, W=20, C1=96, C2=32, Cout=160, addends=1, sms=3, takes="3 warpgroups, partials", on="H200 bf16, A100 bf16"),
    dict(B=2, H=12, W=20, C1=288, Cout=96, residual=True, addends=1, sms=1),
]
# Each of Hopper's kernels, most of them with more tiles than their rings have stages
RINGS = [
    dict(B=1, H=32, W=64, C1=32, Cout=32, addends=1, sms=1, exact="hopper", on="H200 bf16"),
    dict(B=1, H=32, W=64, C1=64, Cout=64, residual=True, sms=1, exact="hopper", on="H200 bf16"),
    dict(B=16, H=7, W=9, C1=96, Cout=96, addends=1, sms=2, exact="hopper", on="H200 bf16"),
    dict(B=4, H=7, W=9, C1=96, Cout=384, sms=8, exact="hopper", on="H200 bf16"),
    dict(B=4, H=7, W=9, C1=384, Cout=96, addends=1, sms=8, exact="hopper", on="H200 bf16"),
    dict(B=4, H=7, W=9, C1=192, Cout=192, residual=True, addends=1, sms=2, exact="hopper", on="H200 bf16"),
    dict(B=2, H=16, W=16, C1=1152, Cout=32, sms=1, exact="hopper", on="H200 bf16"),
    dict(B=2, H=16, W=16, C1=96, Cout=576, addends=1, sms=2, exact="hopper", on="H200 bf16"),
]

PAIR = conv_pair(
    "conv1x1",
    1,
    [
        dict(B=3, H=12, W=20, C1=96, Cout=160),
        dict(B=1, H=8, W=8, C1=64, C2=32, Cout=64, addends=2),
        dict(B=5, H=7, W=9, C1=160, Cout=480),
        dict(B=2, H=6, W=5, C1=96, Cout=96, residual=True, addends=1),
        dict(B=3, H=12, W=20, C1=96, Cout=160, wild=True, sms=1, on="A100 fp32"),
        dict(B=5, H=7, W=9, C1=32, Cout=32, residual=True, addends=2, sms=1, on="A100 bf16, A100 fp32"),
        dict(B=1, H=1, W=1, C1=32, C2=160, Cout=32, addends=1),
        dict(B=2, H=16, W=16, C1=64, C2=64, Cout=64, addends=1),
        dict(B=3, H=8, W=8, C1=192, Cout=576),
        *(LARGE + RINGS if "bf16" in precisions() else []),
        dict(B=1, H=9, W=15, C1=256, Cout=128, residual=True),
    ],
)

if __name__ == "__main__":
    main(PAIR)
