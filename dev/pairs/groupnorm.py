"""Checks groupnorm.cu: with and without SiLU, scale-shift, two sources whose border cuts a group, dropout, a mean far from zero."""

from __future__ import annotations  # noqa: I001 (names side by side)

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common.model import FP8_MAX
from harness import (
    Arrays, Case, Pair, Tensors, Timed, bench_tensor, dropout_mask, forward_backward, main, nchw, nhwc, normal, poisoned_columns, precisions, rounding, whole,
)  # fmt: skip

DROPOUT = dict(seed=(7 << 32) + 5, step=3, sample0=2, layer=4)


def inputs(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    B, H, W, C1 = (case[n] for n in ("B", "H", "W", "C1"))
    C2 = case.get("C2", 0)
    C = C1 + C2
    arrays: dict[str, Any] = {
        "silu": int(case["silu"]),
        "p": float(case.get("dropout", 0)),
        **({"factor": case["fp8"]} if "fp8" in case else {}),
        **DROPOUT,
        "x1": normal(rng, B, H, W, C1, scale=2, mean=case.get("mean", 0.5)),
        "weight": normal(rng, C),
        "bias": normal(rng, C),
        "dout": normal(rng, B, H, W, C),
    }
    if C2:
        arrays["x2"] = normal(rng, B, H, W, C2, mean=-1)
    if case.get("scale_shift"):  # columns 32 .. 32 + 2C of the projections of all blocks
        arrays["scale_shift"] = normal(rng, B, 2 * C + 96)
        arrays["ss_offset"] = 32
        arrays["dscale_shift_start"] = poisoned_columns(B, 2 * C + 96, 32, 2 * C)
    for name in ("dx1", "dx1_add")[: case.get("addends", 0)]:
        arrays[name] = normal(rng, B, H, W, C1)
    return arrays | (exact_inputs(arrays, rng) if case.get("exact") else {})


def exact_inputs(arrays: dict[str, Any], rng: np.random.Generator) -> Arrays:
    """Half of x is 1024, half -1024 in every channel, so that the mean is 0 and 1 / the standard deviation 2^-10 in fp32; weights are powers of two."""
    B, H, W, _ = arrays["x1"].shape
    signs = np.where(np.arange(H * W) % 2, 1, -1)
    exact = {}
    for name, value in arrays.items():
        if not isinstance(value, np.ndarray) or name == "dscale_shift_start":
            continue
        exact[name] = whole(rng, *value.shape)
        if name in ("x1", "x2"):
            exact[name] = (
                (1024 * rng.permuted(np.broadcast_to(signs[:, None], (B, H * W, value.shape[3])), axis=1)).reshape(value.shape).astype(np.float32)
            )
        if name == "weight":
            exact[name] = rng.choice(np.float32([-2, -1, 1, 2, 4]), value.shape)
    return exact


def reference(case: Case, v: dict[str, Any]) -> Tensors:
    x = torch.cat([v["x1"], v["x2"]], -1) if "x2" in v else v["x1"]
    B, H, W, C = x.shape
    out = nhwc(F.group_norm(nchw(x), 32, v["weight"], v["bias"], 1e-5))
    if "scale_shift" in v:
        scale, shift = v["scale_shift"][:, v["ss_offset"] :][:, : 2 * C, None, None].permute(0, 2, 3, 1).chunk(2, -1)
        out = out * (1 + scale) + shift
    if v["silu"]:
        out = F.silu(out)
    if v["p"] > 0:
        out = out * dropout_mask(v["p"], v["seed"], v["step"], v["sample0"], v["layer"], (B, H, W, C))
    groups = x.view(B, H * W, 32, C // 32).transpose(1, 2).flatten(2)
    rstd = 1 / torch.sqrt(groups.var(-1, correction=0) + 1e-5)
    return {"out": out, "mean": groups.mean(-1), "rstd": rstd, **(reference_fp8(v, out) if "factor" in v else {})}


def reference_fp8(v: dict[str, Any], out: torch.Tensor) -> Tensors:
    """What is written in FP8, before it is rounded."""
    fp8 = out.detach().clamp(-FP8_MAX / v["factor"], FP8_MAX / v["factor"])
    gradient = torch.autograd.grad((out * v["dout"]).sum(), v["x1"], retain_graph=True)[0]
    return {"fp8": fp8, "dx1_fp8": gradient + sum(v[n] for n in ("dx1", "dx1_add") if n in v)}


def tolerance(case: Case, name: str) -> float:
    """Elementwise, all sums being in double: x * a + b, then SiLU. b and x * a are |mean| / std times as large as their
    sum, so the roundings of a, b and the product count that often. Backward has three more terms of that kind; sums of
    dz and dz * xhat inherit the errors of their terms.
    """
    offset = abs(case.get("mean", 0.5)) / 2
    # FP8: half of a last place is 2^-4 of a number at most, of which error() takes half; of all numbers it is some 2^-3 / 12^0.5
    if name == "fp8":
        return 2.0**-5
    if name == "dx1_fp8":  # it has a bit less of mantissa
        return 2.0**-4
    if name in ("mean", "rstd"):
        return rounding(steps=1)
    return rounding(steps=6 + 2 * offset if name.startswith("out") else 10 + 4 * offset)


def bench(s: dict[str, int]) -> Timed:
    """PyTorch's group norm and SiLU of the concatenated input, two operations."""
    C = s["C1"] + s["C2"]
    side = int(s["HW"] ** 0.5)
    x = bench_tensor(s["B"], C, side, side, grad=True)
    weight, bias = bench_tensor(C, grad=True), bench_tensor(C, grad=True)

    def forward() -> torch.Tensor:
        out = F.group_norm(x, 32, weight, bias, 1e-5)
        return F.silu(out) if s["silu"] else out

    return forward_backward(forward, [x, weight, bias])


# Clusters of 8 blocks: a layer of unet64, and small ones as if they were large
LARGE = [
    dict(B=64, H=64, W=64, C1=64, silu=True, scale_shift=True, addends=1, sms=132, takes="clusters of 8"),
    dict(B=2, H=65, W=63, C1=32, C2=32, silu=True, dropout=0.1, addends=1, sms=1, takes="clusters of 8"),
    dict(B=1, H=64, W=32, C1=96, C2=32, silu=True, scale_shift=True, sms=1, takes="clusters of 8"),
    dict(B=1, H=64, W=63, C1=96, C2=96, silu=True, addends=1, sms=1, takes="clusters of 8", on="A100 bf16, A100 fp32"),
    dict(B=1, H=64, W=63, C1=64, silu=True, dropout=0.1, sms=1, on="A100 bf16, A100 fp32"),
    dict(B=1, H=32, W=32, C1=32, C2=32, silu=False, addends=2, sms=1, exact="clusters", only="fp32", on="H200 fp32"),
]
CASES = [
    dict(B=3, H=12, W=20, C1=96, silu=True),
    dict(B=1, H=7, W=5, C1=160, silu=False, addends=2),
    dict(B=2, H=6, W=10, C1=96, C2=64, silu=True, addends=1),
    dict(B=5, H=4, W=4, C1=32, C2=160, silu=False),
    dict(B=3, H=12, W=20, C1=64, silu=True, scale_shift=True),
    dict(B=2, H=5, W=9, C1=96, silu=True, scale_shift=True, dropout=0.3),
    dict(B=3, H=8, W=8, C1=128, silu=True, dropout=0.1, addends=1),
    dict(B=2, H=8, W=8, C1=64, silu=True, mean=100),
    *(LARGE if "bf16" in precisions() else []),
    dict(B=32, H=4, W=4, C1=64, silu=True, on="A100 fp32, H200 bf16"),
    # an output in FP8, which some numbers of the second case are too large for
    *(
        case | dict(silu=True, only=precisions()[0], on="H200 bf16")
        for case in (
            dict(B=2, H=12, W=20, C1=96, fp8=8.0),
            dict(B=2, H=7, W=9, C1=96, C2=64, scale_shift=True, fp8=64.0),
            dict(B=2, H=8, W=8, C1=64, fp8=16.0, addends=1, dropout=0.3),
            dict(B=1, H=64, W=64, C1=96, fp8=8.0, sms=8, takes="two passes"),
            dict(B=1, H=64, W=64, C1=96, fp8=8.0, sms=8, takes="two passes", dropout=0.1),
            dict(B=1, H=64, W=64, C1=96, fp8=8.0, sms=2, takes="two passes", addends=1),
            dict(B=1, H=64, W=64, C1=96, fp8=8.0, sms=2, takes="two passes", addends=1, dropout=0.1),
        )
    ),
    dict(B=1, H=1, W=3, C1=96, C2=64, silu=True),
]
GRADIENTS = ("x1", "x2", "weight", "bias", "scale_shift")
ACTIVATIONS = ("x1", "x2", "dout", "dx1", "dx1_add")
PAIR = Pair("groupnorm", CASES, inputs, reference, tolerance, GRADIENTS, ACTIVATIONS, stats_of=("x1", "x2"), bench=bench)

if __name__ == "__main__":
    main(PAIR)
