"""Checks attention.cu: odd numbers of pixels, one pixel, scores large enough that exp would overflow without the maximum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from harness import Case, Pair, Tensors, bench_tensor, forward_backward, main, normal, rounding


def inputs(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    B, T, C = case["B"], case["T"], case["C"]
    qkv = normal(rng, B, T, 3 * C, scale=case.get("scale", 1))
    return {"heads": case["heads"], "qkv": qkv, "dout": normal(rng, B, T, C)}


def reference(case: Case, v: dict[str, Any]) -> Tensors:
    """QKVAttention of guided-diffusion: q, k, v first, then heads."""
    B, T, C3 = v["qkv"].shape
    q, k, value = v["qkv"].view(B, T, 3, v["heads"], -1).permute(2, 0, 3, 1, 4)  # (B, heads, T, d) each
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    out = (scores.softmax(-1) @ value).transpose(1, 2).reshape(B, T, C3 // 3)
    return {"out": out, "lse": scores.logsumexp(-1)}


def tolerance(case: Case, name: str) -> float:
    """A score's absolute error is an element of P's relative one: the sum over d products, a few roundings, times the
    size of the scores, of which the largest decide (scale^2 times about 4). Then a sum over the pixels; backward has one
    more product over d and one more over the pixels, of terms of which dP - mean(dP) cancels a part.
    """
    d, largest_score = case["C"] // case["heads"], 4 * case.get("scale", 1) ** 2
    P = rounding(d, steps=4) * max(1, largest_score / 2)
    if name == "lse":
        return P
    return P + rounding(case["T"]) if name == "out" else 2 * P + rounding(d, case["T"])


def bench(s: dict[str, int]) -> dict[str, Callable[[], Any]]:
    qkv = bench_tensor(s["B"], s["T"], 3 * s["C"])
    q, k, v = (x.contiguous().requires_grad_() for x in qkv.view(s["B"], s["T"], 3, s["heads"], -1).permute(2, 0, 3, 1, 4))
    with torch.no_grad():
        F.scaled_dot_product_attention(q, k, v)
    return forward_backward(lambda: F.scaled_dot_product_attention(q, k, v), [q, k, v])


CASES = [
    dict(B=3, T=60, C=96, heads=3),
    dict(B=1, T=240, C=64, heads=2),
    dict(B=2, T=35, C=160, heads=5),
    dict(B=2, T=33, C=96, heads=2),
    dict(B=5, T=16, C=64, heads=1),
    dict(B=2, T=64, C=64, heads=4, scale=5),
    dict(B=2, T=1, C=32, heads=1),
]
PAIR = Pair("attention", CASES, inputs, reference, tolerance, ("qkv",), bench=bench)

if __name__ == "__main__":
    main(PAIR)
