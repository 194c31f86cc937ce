"""Checks patches.cu: numbers move and are not computed with, so each of them is exact, but for those of bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from harness import Case, Pair, Tensors, Timed, bench_tensor, main, nchw, nhwc, normal, rounding

from common.conditions import draw_holes, enlarge, grey, noise_strengths, with_holes
from common.random_numbers import COND_DROPOUT, COND_NOISE, FLIP, normals, random_words

SEED, STEP, SAMPLE0 = 2**40 + 3, 5, 7


def inputs(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    B, H, W, C, K, p = (case[k] for k in ("B", "H", "W", "C", "K", "p"))
    return {
        "x": normal(rng, B, H, W, C),
        "patches": normal(rng, B, H // p, W // p, C * p * p),
        "patch": np.zeros(p, np.float32),
        "cond": normal(rng, B, H, W, K),
        "pictures": normal(rng, B, K, H, W),
        "colours": normal(rng, B, 3, H, W),
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
    colours = torch.where(mirrored, v["colours"].flip(3), v["colours"])
    from_bytes = torch.as_tensor(v["bytes"]).double() / 127.5 - 1
    small, small_bytes = F.avg_pool2d(pictures, case["p"]), F.avg_pool2d(from_bytes, case["p"])
    strengths = 0.5 * noise_strengths(SEED, STEP, samples)[:, None, None, None]
    small = small + strengths * normals(SEED, COND_NOISE, STEP, samples, tuple(small.shape[1:]))
    holes = draw_holes(SEED, STEP, samples, case["H"], case["W"])
    assert 0 < holes.double().mean() < 1
    return {
        "small": nhwc(small),
        "small_bytes": nhwc(small_bytes),
        "large": nhwc(torch.where(left_out, 0, enlarge(small, case["p"]))),
        "large_bytes": nhwc(enlarge(small_bytes, case["p"])),
        "grey": nhwc(torch.where(left_out, 0, grey(colours))),
        "holed": nhwc(torch.where(left_out, 0, with_holes(pictures, holes))),
        "holed_bytes": nhwc(with_holes(from_bytes, holes)),
        "out": nhwc(F.pixel_unshuffle(nchw(v["x"]), case["p"])),
        "back": nhwc(F.pixel_shuffle(nchw(v["patches"]), case["p"])),
        "joined": torch.cat([v["x"], v["cond"]], dim=3),
        "taken": nhwc(torch.where(left_out, 0, pictures)),
        "taken_bytes": nhwc(from_bytes),
    }


def tolerance(case: Case, name: str) -> float:
    """Means of p x p pixels, and four products between them, with normals that are exact to 1e-6."""
    if name in ("small", "small_bytes", "large", "large_bytes"):
        return rounding(case["p"] ** 2, steps=20)
    return rounding(steps=3) if name in ("taken_bytes", "grey", "holed_bytes") else 0.0


def bench(s: dict[str, int]) -> Timed:
    x = bench_tensor(s["B"], s["C"], s["H"], s["W"], fp32=True)
    return {"forward": lambda: F.pixel_unshuffle(x, s["p"])}


CASES = [dict(B=9, H=8, W=12, C=3, K=2, p=2), dict(B=1, H=9, W=3, C=5, K=1, p=3), dict(B=2, H=16, W=8, C=1, K=4, p=8)]
PAIR = Pair("patches", CASES, inputs, reference, tolerance, bench=bench)

if __name__ == "__main__":
    main(PAIR)
