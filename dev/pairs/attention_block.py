"""Checks attention_block.cu against guided-diffusion's AttentionBlock (QKVAttention: the new attention order)."""

from __future__ import annotations  # noqa: I001 (names side by side)

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from harness import (
    Arrays, Case, Pair, Tensors, Timed, bench_tensor, channel_stats, forward_backward, main, nchw, nhwc, normal, oihw, rounding, rounding_bf16,
)  # fmt: skip


def parameter_shapes(C: int) -> dict[str, tuple[int, ...]]:
    """In our layout, (Cout, kh, kw, Cin)."""
    weights = {"norm": (C,), "qkv": (3 * C, 1, 1, C), "proj_out": (C, 1, 1, C)}
    return {f"{n}.{kind}": shape if kind == "weight" else shape[:1] for n, shape in weights.items() for kind in ("weight", "bias")}


def inputs(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    shape = tuple(case[n] for n in ("B", "H", "W", "C"))
    x = normal(rng, *shape, mean=0.3)
    arrays: dict[str, Any] = {"heads": case["heads"], "x": x, "dout": normal(rng, *shape)}
    for name, dims in parameter_shapes(case["C"]).items():
        arrays[name] = normal(rng, *dims, scale=case["C"] ** -0.5 if len(dims) > 1 else 1)
    return arrays


def attention_block(p: Tensors, x: torch.Tensor, heads: int) -> torch.Tensor:
    """The math of guided-diffusion's AttentionBlock.forward with QKVAttention, NCHW."""
    B, C, H, W = x.shape
    h = F.group_norm(x, 32, p["norm.weight"], p["norm.bias"], 1e-5)
    qkv = F.conv2d(h, p["qkv.weight"], p["qkv.bias"]).view(B, 3, heads, C // heads, H * W)
    q, k, v = qkv.transpose(-1, -2).unbind(1)
    a = F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(B, C, H, W)
    return x + F.conv2d(a, p["proj_out.weight"], p["proj_out.bias"])


def reference(case: Case, v: dict[str, Any]) -> Tensors:
    p = {n: oihw(v[n]) if v[n].dim() == 4 else v[n] for n in parameter_shapes(1)}
    out = nhwc(attention_block(p, nchw(v["x"]), v["heads"]))
    return {"out": out, **channel_stats(out)}


def tolerance(case: Case, name: str) -> float:
    """The sums in the way, added up: norm, qkv, scores, softmax (see attention.py), weighted sum, projection; backward all
    of them once more, then the sum over pixels that a parameter's gradient is.
    """
    C, d, T = case["C"], case["C"] // case["heads"], case["H"] * case["W"]
    forward = rounding(C, d, T, C, steps=20)
    return forward if name in ("out", "stats_sum", "stats_square") else forward + rounding(C, d, T, C, case["B"] * T, steps=20)


def inside(case: Case, name: str, all: Arrays) -> float:
    """Forward: the norm's output, qkv, P, the attention's output. Backward reads them and rounds a gradient of each, dS for P.
    The attention's output counts twice, since dS is a small difference of dP and D, which was made of it (see attention.py),
    and so do q, k and v, each of which is read for dS and for a product with it. Float64 in which these arrays alone are
    rounded, in 12 draws of each case, leaves 0.2 to 1.0e-2 on average and 1.43e-2 at most (dnorm.weight); this allows 1.35e-2."""
    return rounding_bf16(4 if name == "out" else 12)


def bench(s: dict[str, int]) -> Timed:
    x = bench_tensor(s["B"], s["C"], s["H"], s["W"], grad=True)
    p = {}
    for name, shape in parameter_shapes(s["C"]).items():
        p[name] = bench_tensor(*((shape[0], shape[3], 1, 1) if len(shape) == 4 else shape), grad=True)
    return forward_backward(lambda: attention_block(p, x, s["heads"]), [x, *p.values()])


CASES = [
    dict(B=3, H=12, W=20, C=96, heads=3),
    dict(B=1, H=7, W=5, C=160, heads=5),
    dict(B=5, H=4, W=4, C=64, heads=4),
]
ACTIVATIONS = ("x", "dout", "qkv.weight", "proj_out.weight")
PAIR = Pair("attention_block", CASES, inputs, reference, tolerance, ("x", *parameter_shapes(1)), ACTIVATIONS, ("x",), inside, bench)

if __name__ == "__main__":
    main(PAIR)
