"""What fp32 means: errors of our products, of PyTorch's in fp32 and of its in TF32 against float64, on shapes of the presets (needs a GPU).

python dev/precision.py          a row for each output: root mean square of the error over that of the result
"""

from __future__ import annotations

from typing import Any

import conv
import numpy as np
import torch
from attention import PAIR as ATTENTION
from conv1x1 import PAIR as CONV1X1
from conv3x3 import PAIR as CONV3X3
from harness import Arrays, Case, Pair, build, run

LIMIT = 4  # times PyTorch's own error in fp32
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
    build("conv3x3", "conv1x1", "attention")
    torch.backends.cudnn.benchmark = False
    worst = 0.0
    print(f"{'':53}{'PyTorch TF32':>13}{'fp32':>10}{'ours':>10}{'ours / fp32':>13}")
    for pair, case in CASES:
        inputs = pair.inputs(case, np.random.default_rng(1)) | {"precision": "fp32"}
        results: dict[str, Arrays] = {"ours": run(pair, inputs)[0]}
        for name, dtype, tf32 in (("exact", torch.float64, False), ("fp32", torch.float32, False), ("tf32", torch.float32, True)):
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
            results[name] = torch_results(pair, case, inputs, dtype)
        shape = " ".join(f"{k}={v}" for k, v in conv.sizes(case).items() if v and k in case)
        for output, exact in results["exact"].items():
            tf32, fp32, ours = (np.linalg.norm(results[n][output] - exact) / np.linalg.norm(exact) for n in ("tf32", "fp32", "ours"))
            worst = max(worst, ours / fp32)
            print(f"{pair.name:10}{shape:35}{output:8}{tf32:13.1e}{fp32:10.1e}{ours:10.1e}{ours / fp32:13.2f}", flush=True)
    print(f"worst: {worst:.2f} times PyTorch's fp32; allowed: {LIMIT}")
    raise SystemExit(worst > LIMIT)


if __name__ == "__main__":
    main()
