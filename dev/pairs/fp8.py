"""Checks fp8.cu, byte by byte: all bf16 numbers in e4m3 and in e5m2, numbers in the middle between two and beside it, both orders of weights."""

from __future__ import annotations  # noqa: I001 (names side by side)

from typing import Any

import numpy as np
import torch
from harness import EXACT, Case, Pair, Tensors, main, normal, precisions

FACTOR = 128  # of weights
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def all_bf16() -> np.ndarray:
    """All 65,536, infinities included, but for NaN."""
    numbers = (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)
    return np.where(np.isnan(numbers), np.float32(0), numbers)


def odd_numbers(largest: float, dtype: torch.dtype, factor: float) -> np.ndarray:
    """What FP8 can hold, the middles between two neighbours, and the float32 numbers beside these. (bf16 rounds the last ones to the middles.)"""
    numbers = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    numbers = numbers[numbers <= largest]
    middles = ((numbers[1:] + numbers[:-1]) / 2 / factor).float().numpy()
    odd = np.concatenate([(numbers / factor).float().numpy(), middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(9e9))])
    return np.concatenate([odd, -odd])


def places(case: Case) -> dict[str, int]:
    first = case["Cout1"] * 9 * case["Cin1"]
    return {"offset1": 64, "offset2": 64 + (first + 127) // 64 * 64}


def inputs(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    at = places(case)
    size = at["offset2"] + case["Cout2"] * 9 * case["Cin2"] + 64
    flat, gradient = normal(rng, size, scale=case["scale"]), normal(rng, case["n"])
    if case.get("all"):
        numbers = np.concatenate([all_bf16(), odd_numbers(448.0, torch.float8_e4m3fn, FACTOR)])
        flat[at["offset1"] :][: len(numbers)] = numbers
        numbers = np.concatenate([all_bf16(), odd_numbers(57344.0, torch.float8_e5m2, case["factor"])])
        gradient[: len(numbers)] = numbers
    sizes = {name: case[name] for name in ("Cout1", "Cin1", "Cout2", "Cin2")}
    return {"flat": flat, "gradient": gradient, "factor": float(case["factor"]), **sizes, **at}


def codes(x: torch.Tensor, factor: float, dtype: torch.dtype) -> torch.Tensor:
    most = LARGEST[dtype]
    return (x.float() * factor).clamp(-most, most).to(dtype).view(torch.uint8).double()


def reference(case: Case, v: dict[str, Any]) -> Tensors:
    weights, turned = torch.full_like(v["flat"], 255), torch.full_like(v["flat"], 255)
    for k in "12":
        Cout, Cin = v["Cout" + k], v["Cin" + k]
        here = slice(v["offset" + k], v["offset" + k] + Cout * 9 * Cin)
        rounded = codes(v["flat"][here], FACTOR, torch.float8_e4m3fn)
        turned[here] = rounded.view(Cout, 9, Cin).flip(1).permute(2, 1, 0).flatten()
        if k == "1":  # of the second one only the turned order is made
            weights[here] = rounded
    return {"weights": weights, "turned": turned, "rounded": codes(v["gradient"], v["factor"], torch.float8_e5m2)}


ON_HOPPER = dict(fp8=True, only=precisions()[0], on="H200 bf16")
CASES = [
    dict(Cout1=96, Cin1=96, Cout2=32, Cin2=160, scale=1.0, n=65536 + 1024, factor=2.0**7, all=True, **ON_HOPPER),
    dict(Cout1=192, Cin1=64, Cout2=64, Cin2=192, scale=0.05, n=32, factor=2.0**20, **ON_HOPPER),
]
PAIR = Pair("fp8", CASES, inputs, reference, lambda case, name: EXACT, (), ("flat", "gradient"))

if __name__ == "__main__":
    main(PAIR)
