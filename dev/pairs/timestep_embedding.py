"""Checks timestep_embedding.cu: sinusoids, the class embedding with its repeated labels, and the linear layer of an image's numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from harness import Case, Pair, Tensors, Timed, bench_tensor, main, normal, rounding


def inputs(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    B, C, K, classes = case["B"], case["C"], case["K"], case["classes"]
    return {
        "dim": case["dim"],
        "max_period": case["max_period"],
        "t": rng.integers(0, 1000, B).astype(np.float32),
        "labels": rng.integers(0, classes, B).astype(np.int32),
        "x": normal(rng, B, C),
        "table": normal(rng, classes, C),
        "dout": normal(rng, B, C),
        "dx": normal(rng, B, C),
        "x2": normal(rng, B, C),
        "values": normal(rng, B, K),
        "weight": normal(rng, C, K),
        "dout2": normal(rng, B, C),
        "dx2": normal(rng, B, C),
    }


def sinusoids(t: torch.Tensor, dim: int, max_period: float) -> torch.Tensor:
    """timestep_embedding of guided-diffusion, in the type of t."""
    frequencies = torch.exp(-math.log(max_period) * torch.arange(dim // 2, dtype=t.dtype, device=t.device) / (dim // 2))
    angles = t[:, None] * frequencies[None]
    return torch.cat([angles.cos(), angles.sin()], -1)


def reference(case: Case, v: dict[str, Any]) -> Tensors:
    out = v["x"] + v["table"][torch.from_numpy(v["labels"]).long()]
    out2 = v["x2"] + v["values"] @ v["weight"].T
    return {"sinusoids": sinusoids(v["t"], case["dim"], case["max_period"]), "out": out, "out2": out2}


def tolerance(case: Case, name: str) -> float:
    """An angle of up to 1000 radians carries the roundings of the frequency (exp, its argument of up to log(max_period))
    and of the product; half the frequencies have angles that small that it does not show in the norm.
    """
    return rounding(steps=1000) if name == "sinusoids" else rounding(max(case["B"], case["K"]))


def bench(s: dict[str, int]) -> Timed:
    t = bench_tensor(s["B"], fp32=True).abs() * 300
    return {"forward": lambda: sinusoids(t, s["dim"], 10000)}


CASES = [
    dict(B=3, dim=96, max_period=10000, C=160, K=3, classes=2),
    dict(B=1, dim=32, max_period=1000, C=96, K=1, classes=3),
    dict(B=33, dim=64, max_period=10000, C=256, K=40, classes=5),
]
PAIR = Pair("timestep_embedding", CASES, inputs, reference, tolerance, ("x", "table", "x2", "weight"), bench=bench)

if __name__ == "__main__":
    main(PAIR)
