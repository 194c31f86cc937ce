"""Checks linear.cu."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.nn.functional as F
from harness import Case, Pair, Tensors, Timed, bench_tensor, forward_backward, main, normal, rounding


def inputs(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    B, Cin, Cout = case["B"], case["Cin"], case["Cout"]
    arrays = {
        "x": normal(rng, B, Cin),
        "weight": normal(rng, Cout, Cin, scale=Cin**-0.5),
        "bias": normal(rng, Cout),
        "dout": normal(rng, B, Cout),
    }
    return arrays | ({"dx": normal(rng, B, Cin)} if case.get("addend") else {})


def reference(case: Case, v: dict[str, Any]) -> Tensors:
    return {"out": F.linear(v["x"], v["weight"], v["bias"])}


def tolerance(case: Case, name: str) -> float:
    return rounding({"out": case["Cin"], "dx": case["Cout"]}.get(name, case["B"]))


def bench(s: dict[str, int]) -> Timed:
    x, weight, bias = (bench_tensor(*shape, grad=True, fp32=True) for shape in [(s["B"], s["Cin"]), (s["Cout"], s["Cin"]), (s["Cout"],)])
    return forward_backward(lambda: F.linear(x, weight, bias), [x, weight, bias])


CASES = [
    dict(B=3, Cin=96, Cout=160, on="A100 fp32, H200 bf16"),
    dict(B=1, Cin=32, Cout=128, addend=True),
    dict(B=32, Cin=256, Cout=736, on="A100 fp32, H200 bf16"),
    dict(B=5, Cin=160, Cout=33, on="A100 fp32, H200 bf16"),
    dict(B=3, Cin=1056, Cout=20, on="A100 fp32, H200 bf16"),
    dict(B=70, Cin=68, Cout=4500),
    dict(B=33, Cin=768, Cout=1000, addend=True),
]
PAIR = Pair("linear", CASES, inputs, reference, tolerance, ("x", "weight", "bias"), bench=bench)

if __name__ == "__main__":
    main(PAIR)
