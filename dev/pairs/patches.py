"""Checks patches.cu: numbers move and are not computed with, so each of them is exact, but for those of bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from harness import Case, Pair, Tensors, Timed, bench_tensor, main, nchw, nhwc, normal, rounding

from common.random_numbers import COND_DROPOUT, FLIP, random_words

SEED, STEP, SAMPLE0 = 2**40 + 3, 5, 7


def inputs(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    B, H, W, C, K, p = (case[k] for k in ("B", "H", "W", "C", "K", "p"))
    return {
        "x": normal(rng, B, H, W, C),
        "patches": normal(rng, B, H // p, W // p, C * p * p),
        "patch": np.zeros(p, np.float32),
        "cond": normal(rng, B, H, W, K),
        "pictures": normal(rng, B, K, H, W),
        "bytes": rng.integers(0, 256, (B, K, H, W)).astype(np.uint8),
        "seed": SEED,
        "step": STEP,
        "sample0": SAMPLE0,
    }


def reference(case: Case, v: dict[str, Any]) -> Tensors:
    samples = SAMPLE0 + torch.arange(case["B"])
    mirrored = (random_words(SEED, FLIP, STEP, samples, 1) & 1 == 1)[:, :, None, None]
    left_out = (random_words(SEED, COND_DROPOUT, STEP, samples, 1) < int(float(np.float32(0.4)) * 2**32))[:, :, None, None]
    pictures = torch.where(mirrored, v["pictures"].flip(3), v["pictures"])
    return {
        "out": nhwc(F.pixel_unshuffle(nchw(v["x"]), case["p"])),
        "back": nhwc(F.pixel_shuffle(nchw(v["patches"]), case["p"])),
        "joined": torch.cat([v["x"], v["cond"]], dim=3),
        "taken": nhwc(torch.where(left_out, 0, pictures)),
        "taken_bytes": nhwc(torch.as_tensor(v["bytes"]).double() / 127.5 - 1),
    }


def tolerance(case: Case, name: str) -> float:
    return rounding(steps=1) if name == "taken_bytes" else 0.0


def bench(s: dict[str, int]) -> Timed:
    x = bench_tensor(s["B"], s["C"], s["H"], s["W"], fp32=True)
    return {"forward": lambda: F.pixel_unshuffle(x, s["p"])}


CASES = [dict(B=9, H=8, W=12, C=3, K=2, p=2), dict(B=1, H=9, W=3, C=5, K=1, p=3), dict(B=2, H=16, W=8, C=1, K=4, p=8)]
PAIR = Pair("patches", CASES, inputs, reference, tolerance, bench=bench)

if __name__ == "__main__":
    main(PAIR)
