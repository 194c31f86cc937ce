"""Checks patches.cu: a permutation, so every number is exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.nn.functional as F
from harness import Case, Pair, Tensors, Timed, bench_tensor, main, nchw, nhwc, normal


def inputs(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    B, H, W, C, p = (case[k] for k in ("B", "H", "W", "C", "p"))
    return {"x": normal(rng, B, H, W, C), "patches": normal(rng, B, H // p, W // p, C * p * p), "patch": np.zeros(p, np.float32)}


def reference(case: Case, v: dict[str, Any]) -> Tensors:
    return {"out": nhwc(F.pixel_unshuffle(nchw(v["x"]), case["p"])), "back": nhwc(F.pixel_shuffle(nchw(v["patches"]), case["p"]))}


def tolerance(case: Case, name: str) -> float:
    return 0.0


def bench(s: dict[str, int]) -> Timed:
    x = bench_tensor(s["B"], s["C"], s["H"], s["W"], fp32=True)
    return {"forward": lambda: F.pixel_unshuffle(x, s["p"])}


CASES = [dict(B=3, H=8, W=12, C=3, p=2), dict(B=1, H=9, W=3, C=5, p=3), dict(B=2, H=16, W=8, C=1, p=8)]
PAIR = Pair("patches", CASES, inputs, reference, tolerance, bench=bench)

if __name__ == "__main__":
    main(PAIR)
