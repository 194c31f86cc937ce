"""Checks augment.cu against the twin's in float64, which doubles and halves whole images by convolutions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from harness import Case, Pair, Tensors, main, normal, rounding

from common.augment import augment

SEED, STEP, SAMPLE0 = 2**40 + 3, 5, 7


def inputs(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    B, C, H, W, own = (case[k] for k in ("B", "C", "H", "W", "own"))
    return {
        "images": normal(rng, B, C, H, W),
        "bytes": rng.integers(0, 256, (B, C, H, W)).astype(np.uint8),
        "start": normal(rng, B, own + 9),
        "own": own,
        "percent": case["percent"],
        "seed": SEED,
        "step": STEP,
        "sample0": SAMPLE0,
    }


def reference(case: Case, v: dict[str, Any]) -> Tensors:
    samples = SAMPLE0 + torch.arange(case["B"])
    p = float(np.float32(case["percent"]) / np.float32(100))
    out, told = augment(v["images"].double(), p, SEED, STEP, samples)
    from_bytes, _ = augment(torch.as_tensor(v["bytes"]).double() / 127.5 - 1, p, SEED, STEP, samples)
    before = v["start"].double()[:, : case["own"]]
    return {"out": out, "out_bytes": from_bytes, "told": torch.cat([before, told], dim=1)}


def tolerance(case: Case, name: str) -> float:
    """Sums of 49 and then 144 products. A place is as exact as the normals, to 1e-6, and the numbers told are float32."""
    return rounding(49, 144, steps=200)


CASES = [
    dict(B=3, C=3, H=16, W=12, own=2, percent=100),
    dict(B=4, C=1, H=8, W=8, own=0, percent=50),
    dict(B=2, C=2, H=4, W=20, own=1, percent=0),
]
PAIR = Pair("augment", CASES, inputs, reference, tolerance)

if __name__ == "__main__":
    main(PAIR)
