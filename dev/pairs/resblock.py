"""Checks resblock.cu against guided-diffusion's ResBlock: both ways of conditioning, up, down, two sources, dropout, skip convolution or none."""

from __future__ import annotations  # noqa: I001 (names side by side)

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from harness import (
    Arrays, Case, Pair, Tensors, Timed, bench_tensor, channel_stats, dropout_mask, forward_backward, main, nchw, nhwc, normal, oihw, rounding,
    rounding_bf16,
)  # fmt: skip

DROPOUT = dict(seed=11, step=5, sample0=1, layer=2)


def parameter_shapes(Cin: int, Cout: int, E: int, scale_shift: bool) -> dict[str, tuple[int, ...]]:
    """In our layout, (Cout, kh, kw, Cin)."""
    Ce = 2 * Cout if scale_shift else Cout
    weights: dict[str, tuple[int, ...]] = {
        "in_layers.0": (Cin,),
        "in_layers.2": (Cout, 3, 3, Cin),
        "emb_layers.1": (Ce, E),
        "out_layers.0": (Cout,),
        "out_layers.3": (Cout, 3, 3, Cout),
    }
    if Cin != Cout:
        weights["skip_connection"] = (Cout, 1, 1, Cin)
    shapes = {}
    for name, shape in weights.items():
        shapes[name + ".weight"], shapes[name + ".bias"] = shape, shape[:1]
    return shapes


def inputs(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    B, H, W, C1, Cout, E = (case[n] for n in ("B", "H", "W", "C1", "Cout", "E"))
    C2, up, down = case.get("C2", 0), case.get("up", False), case.get("down", False)
    Ho, Wo = (2 * H, 2 * W) if up else (H // 2, W // 2) if down else (H, W)
    arrays: dict[str, Any] = {
        "up": int(up),
        "down": int(down),
        "scale_shift": int(case.get("scale_shift", False)),
        "p": float(case.get("dropout", 0)),
        **DROPOUT,
        "x1": normal(rng, B, H, W, C1, mean=0.3),
        "emb": normal(rng, B, E),
        "dout": normal(rng, B, Ho, Wo, Cout),
    }
    if C2:
        arrays["x2"] = normal(rng, B, H, W, C2)
    for name, shape in parameter_shapes(C1 + C2, Cout, E, case.get("scale_shift", False)).items():
        fan_in = np.prod(shape[1:]) if len(shape) > 1 else 1
        arrays[name] = normal(rng, *shape, scale=fan_in**-0.5)
    return arrays


def resblock(p: Tensors, x: torch.Tensor, emb: torch.Tensor, up: bool, down: bool, mask: torch.Tensor | None) -> torch.Tensor:
    """The math of guided-diffusion's ResBlock.forward, NCHW; p holds its parameters with PyTorch's layouts."""

    def norm(h: torch.Tensor, name: str) -> torch.Tensor:
        return F.group_norm(h, 32, p[name + ".weight"], p[name + ".bias"], 1e-5)

    def conv(h: torch.Tensor, name: str) -> torch.Tensor:
        weight = p[name + ".weight"]
        return F.conv2d(h, weight, p[name + ".bias"], padding=weight.shape[-1] // 2)

    h = F.silu(norm(x, "in_layers.0"))
    if up:
        h, x = F.interpolate(h, scale_factor=2, mode="nearest"), F.interpolate(x, scale_factor=2, mode="nearest")
    if down:
        h, x = F.avg_pool2d(h, 2), F.avg_pool2d(x, 2)
    h = conv(h, "in_layers.2")
    e = F.linear(F.silu(emb), p["emb_layers.1.weight"], p["emb_layers.1.bias"])[:, :, None, None]
    if e.shape[1] == 2 * h.shape[1]:
        scale, shift = e.chunk(2, 1)
        h = norm(h, "out_layers.0") * (1 + scale) + shift
    else:
        h = norm(h + e, "out_layers.0")
    h = F.silu(h)
    if mask is not None:
        h = h * mask
    h = conv(h, "out_layers.3")
    return h + (conv(x, "skip_connection") if "skip_connection.weight" in p else x)


def reference(case: Case, v: dict[str, Any]) -> Tensors:
    x = nchw(torch.cat([v["x1"], v["x2"]], -1) if "x2" in v else v["x1"])
    p = {n: oihw(v[n]) if v[n].dim() == 4 else v[n] for n in v if "layers" in n or "skip" in n}
    mask = None
    if v["p"] > 0:
        mask = nchw(dropout_mask(v["p"], v["seed"], v["step"], v["sample0"], v["layer"], tuple(v["dout"].shape)))
    out = nhwc(resblock(p, x, v["emb"], v["up"], v["down"], mask))
    return {"out": out, **channel_stats(out)}


def tolerance(case: Case, name: str) -> float:
    """The sums in the way, added up. Forward: the two convolutions, norms of about ten roundings each. Backward: the
    same once more, then the sum over pixels that a parameter's gradient is.
    """
    Cin, Cout = case["C1"] + case.get("C2", 0), case["Cout"]
    pixels = case["B"] * case["H"] * case["W"] * (4 if case.get("up") else 1)
    forward = rounding(9 * Cin, 9 * Cout, case["E"], steps=20)
    return forward if name in ("out", "stats_sum", "stats_square") else forward + rounding(9 * Cout, 9 * Cout, pixels, steps=20)


def inside(case: Case, name: str, all: Arrays) -> float:
    """Forward: both norms' outputs, the first convolution's, and the shortcut. Backward reads them and stores a gradient of each."""
    return rounding_bf16(4 if name == "out" else 8)


def bench(s: dict[str, int]) -> Timed:
    Cin = s["C1"] + s["C2"]
    x, emb = bench_tensor(s["B"], Cin, s["H"], s["W"], grad=True), bench_tensor(s["B"], s["E"], grad=True)
    p = {}
    for name, shape in parameter_shapes(Cin, s["Cout"], s["E"], False).items():
        shape = (shape[0], shape[3], *shape[1:3]) if len(shape) == 4 else shape
        p[name] = bench_tensor(*shape, grad=True)
    return forward_backward(lambda: resblock(p, x, emb, False, False, None), [x, emb, *p.values()])


CASES = [
    dict(B=3, H=12, W=20, C1=96, Cout=160, E=128),
    dict(B=2, H=6, W=10, C1=96, C2=64, Cout=64, E=96, dropout=0.2),
    dict(B=1, H=7, W=5, C1=96, Cout=96, E=64, scale_shift=True, dropout=0.1),
    dict(B=2, H=5, W=6, C1=64, Cout=64, E=96, up=True),
    dict(B=2, H=8, W=12, C1=64, Cout=64, E=64, down=True, scale_shift=True),
    dict(B=1, H=8, W=6, C1=64, Cout=96, E=64, down=True),
    dict(B=2, H=4, W=3, C1=32, Cout=64, E=64, up=True, scale_shift=True, dropout=0.3),
    dict(B=2, H=12, W=11, C1=192, Cout=192, E=64),
    dict(B=5, H=7, W=8, C1=64, C2=32, Cout=256, E=96),  # from here: on Hopper the first convolution takes the second norm along
    dict(B=3, H=16, W=16, C1=64, Cout=64, E=64, down=True),
    dict(B=2, H=24, W=20, C1=64, C2=32, Cout=64, E=64),
    dict(B=1, H=32, W=17, C1=96, Cout=192, E=64, scale_shift=True),
    dict(B=3, H=18, W=24, C1=32, Cout=160, E=64),
    dict(B=3, H=17, W=20, C1=96, C2=64, Cout=64, E=64),  # here and below: on Hopper the second convolution takes the skip connection along
    dict(B=2, H=35, W=9, C1=32, C2=64, Cout=64, E=64, sms=1),
    dict(B=1, H=19, W=24, C1=32, Cout=64, E=64),
]
GRADIENTS = ("x1", "x2", "emb", *parameter_shapes(1, 2, 1, False))
ACTIVATIONS = ("x1", "x2", "dout", "in_layers.2.weight", "out_layers.3.weight", "skip_connection.weight")
PAIR = Pair("resblock", CASES, inputs, reference, tolerance, GRADIENTS, ACTIVATIONS, ("x1", "x2"), inside, bench)

if __name__ == "__main__":
    main(PAIR)
