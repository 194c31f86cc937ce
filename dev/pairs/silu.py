"""Checks silu.cu, far tails included."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.nn.functional as F
from harness import Case, Pair, Tensors, Timed, bench_tensor, forward_backward, main, normal, rounding


def inputs(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    x = normal(rng, case["n"], scale=case["scale"])
    arrays = {"x": x, "dout": normal(rng, case["n"])}
    return arrays | ({"dx": normal(rng, case["n"])} if case.get("addend") else {})


def reference(case: Case, v: dict[str, Any]) -> Tensors:
    return {"out": F.silu(v["x"])}


def tolerance(case: Case, name: str) -> float:
    """exp to 2 ulp (4 roundings), then a sum, a division, a product; backward three more."""
    return rounding(steps=7 if name == "out" else 10)


def bench(s: dict[str, int]) -> Timed:
    x = bench_tensor(s["n"], grad=True, fp32=True)
    return forward_backward(lambda: F.silu(x), [x])


CASES = [dict(n=3 * 12 * 20 * 96, scale=2), dict(n=1001, scale=60, addend=True), dict(n=1, scale=1)]
PAIR = Pair("silu", CASES, inputs, reference, tolerance, ("x",), bench=bench)

if __name__ == "__main__":
    main(PAIR)
