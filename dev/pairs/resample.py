"""What upsample.py and downsample.py share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from harness import Case, Pair, Tensors, Timed, bench_tensor, channel_stats, forward_backward, nchw, nhwc, normal, rounding

CASES = [
    dict(B=3, H=12, W=20, C=96, on="A100 bf16, A100 fp32, H200 bf16"),
    dict(B=1, H=8, W=6, C=160, addends=1),
    dict(B=1, H=64, W=38, C=64, addends=1, sms=1, on="A100 bf16, A100 fp32, H200 bf16"),
    dict(B=5, H=7, W=9, C=32, addends=2),
]


def resample_pair(name: str, operation: Callable[[torch.Tensor], torch.Tensor]) -> Pair:
    def inputs(case: Case, rng: np.random.Generator) -> dict[str, Any]:
        x = normal(rng, case["B"], case["H"], case["W"], case["C"])
        dout = normal(rng, *nhwc(operation(nchw(torch.from_numpy(x)))).shape)
        addends = {n: normal(rng, *x.shape) for n in ("dx", "dx_add")[: case.get("addends", 0)]}
        return {"x": x, "dout": dout} | addends

    def reference(case: Case, v: dict[str, Any]) -> Tensors:
        out = nhwc(operation(nchw(v["x"])))
        return {"out": out, **channel_stats(out)}

    def bench(s: dict[str, int]) -> Timed:
        x = bench_tensor(s["B"], s["C"], s["H"], s["W"], grad=True)
        return forward_backward(lambda: operation(x), [x])

    return Pair(name, CASES, inputs, reference, lambda case, name: rounding(steps=6), ("x",), ("x", "dout", "dx", "dx_add"), bench=bench)
