"""What fp32 means: errors of our products, of PyTorch's in fp32 and of its in TF32 against float64, on shapes of the presets, and of a whole
model's output and gradients (needs a GPU).

python dev/benchmarks/precision.py    a row for each output: root mean square of the error over that of the result; for all gradients of a model
                                      together the root mean square of that
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "pairs"))

from attention import PAIR as ATTENTION
from conv1x1 import PAIR as CONV1X1
from conv3x3 import PAIR as CONV3X3
from harness import Arrays, Case, Pair, Tensors, build, nchw, nhwc, run

from common.flags import PRESETS
from common.model import UNetModel
from unet import PAIR as UNET
from unet import config_of, shapes_of

LIMIT = 4  # times PyTorch's own error in fp32
MODEL = PRESETS["unet64"] + " --dropout 0"


def model_reference(case: Case, v: dict[str, Any]) -> Tensors:
    model = UNetModel(config_of(case["flags"])).to("cuda").train()
    parameters = {name: v[name].reshape(p.shape) for name, p in model.named_parameters()}  # attention's are those of Conv1d
    return {"out": nhwc(torch.func.functional_call(model, parameters, (nchw(v["x"]), v["t"], None)))}


WHOLE_MODEL = dataclasses.replace(UNET, reference=model_reference, gradients=tuple(shapes_of(MODEL)))
CASES: list[tuple[Pair, Case]] = [
    (CONV3X3, dict(B=2, H=64, W=64, C1=64, Cout=64)),
    (CONV3X3, dict(B=2, H=32, W=32, C1=320, Cout=128)),
    (CONV3X3, dict(B=4, H=8, W=8, C1=512, Cout=256)),
    (CONV3X3, dict(B=1, H=16, W=16, C1=1152, Cout=576)),
    (CONV3X3, dict(B=2, H=64, W=64, C1=64, Cout=3)),
    (CONV3X3, dict(B=2, H=32, W=32, C1=128, Cout=128, stride=2)),
    (CONV1X1, dict(B=2, H=64, W=64, C1=192, Cout=64)),
    (CONV1X1, dict(B=8, H=8, W=8, C1=768, Cout=2304)),
    (ATTENTION, dict(B=2, T=256, C=192, heads=6)),
    (ATTENTION, dict(B=1, T=1024, C=384, heads=6)),
    (ATTENTION, dict(B=1, T=256, C=512, heads=4)),
    (WHOLE_MODEL, dict(B=2, flags=MODEL)),
]


def torch_results(pair: Pair, case: Case, inputs: dict[str, Any], dtype: torch.dtype) -> Arrays:
    tensors = {k: torch.tensor(v, device="cuda", dtype=dtype) if isinstance(v, np.ndarray) else v for k, v in inputs.items()}
    leaves = [name for name in pair.gradients if name in inputs]
    for name in leaves:
        tensors[name].requires_grad_()
    out = pair.reference(case, tensors)["out"]
    gradients = torch.autograd.grad(out, [tensors[name] for name in leaves], tensors["dout"])
    return {"out": out.detach().double().cpu().numpy()} | {"d" + name: g.double().cpu().numpy() for name, g in zip(leaves, gradients, strict=True)}


def main() -> None:
    build("conv3x3", "conv1x1", "attention", "unet")
    torch.backends.cudnn.benchmark = False
    worst = 0.0
    print(f"{'':53}{'PyTorch TF32':>13}{'fp32':>10}{'ours':>10}{'ours / fp32':>13}")
    for pair, case in CASES:
        inputs = pair.inputs(case, np.random.default_rng(1)) | {"precision": "fp32"}
        results: dict[str, Arrays] = {"ours": run(pair, inputs)[0]}
        for name, dtype, tf32 in (("exact", torch.float64, False), ("fp32", torch.float32, False), ("tf32", torch.float32, True)):
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
            results[name] = torch_results(pair, case, inputs, dtype)
        exact = results.pop("exact")
        error = {n: {k: np.linalg.norm(r[k] - exact[k]) / np.linalg.norm(exact[k]) for k in exact} for n, r in results.items()}
        if pair is WHOLE_MODEL:
            error = {n: {"out": e.pop("out"), "all": np.linalg.norm([*e.values()]) / len(e) ** 0.5} for n, e in error.items()}
        shape = " ".join(f"{k}={v}" for k, v in case.items() if k != "flags")
        for output, ours in error["ours"].items():
            tf32, fp32 = error["tf32"][output], error["fp32"][output]
            worst = max(worst, ours / fp32)
            print(f"{pair.name:10}{shape:35}{output:8}{tf32:13.1e}{fp32:10.1e}{ours:10.1e}{ours / fp32:13.2f}", flush=True)
    print(f"worst: {worst:.2f} times PyTorch's fp32; allowed: {LIMIT}")
    raise SystemExit(worst > LIMIT)


if __name__ == "__main__":
    main()
