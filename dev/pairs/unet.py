"""Checks unet.cu, the whole model with all weights random, against train_unet.py's in float64. Between them the cases set every model flag."""

from __future__ import annotations

import dataclasses
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from harness import Arrays, Case, Pair, Tensors, Timed, autocast, bench_tensor, main, nchw, nhwc, normal, precisions, rounding, rounding_bf16

from common.flags import FLAGS, PRESETS, Config, parse_flags
from common.model import UNetModel, parameter_shapes

STEP, SAMPLE0 = 3, 2
# By the latest reference, of each bias, whose gradient is a sum over pixels: how large the summed gradients are, and how many times larger than their sum.
SUMMED: dict[str, float] = {}
CANCELLED: dict[str, float] = {}


def config_of(flags: str) -> Config:
    return Config(**parse_flags(flags.split(), FLAGS))


@cache
def shapes_of(flags: str) -> dict[str, tuple[int, ...]]:
    """The program's, in which attention's projections are convolutions like others, (Cout, Cin, 1, 1)."""
    return {name: (*shape, 1) if len(shape) == 3 else tuple(shape) for name, shape in parameter_shapes(config_of(flags)).items()}


def inputs(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    """No parameter is left at zero: a zeroed projection would hide what lies before it."""
    c, B = config_of(case["flags"]), case["B"]
    arrays: dict[str, Any] = {
        "flags": case["flags"],
        "step": STEP,
        "sample0": SAMPLE0,
        "x": normal(rng, B, *c.image_size, c.in_channels),
        "t": rng.integers(0, 1000, B).astype(np.float32),
        "labels": rng.integers(0, max(c.num_classes, 1), B).astype(np.int32),
        "dout": normal(rng, B, *c.image_size, c.out_channels),
    }
    if c.cond_dim:
        arrays["values"] = normal(rng, B, c.cond_dim)
    if c.cond_channels:
        arrays["cond"] = normal(rng, B, *c.image_size, c.cond_channels)
    for name, shape in shapes_of(case["flags"]).items():
        is_norm = len(shape) == 1 and name.endswith("weight")
        arrays[name] = normal(rng, *shape, scale=np.prod(shape[1:]) ** -0.5 if len(shape) > 1 else 0.3, mean=float(is_norm))
    return arrays


def watch_gradient(name: str, _module: torch.nn.Module, _inputs: Any, out: torch.Tensor) -> None:
    def note(gradient: torch.Tensor) -> None:
        over_pixels = [k for k in range(gradient.dim()) if k != 1]
        SUMMED[name] = float(gradient.norm() / gradient.shape[1] ** 0.5)
        CANCELLED[name] = float(gradient.norm() / gradient.sum(over_pixels).norm())

    out.register_hook(note)


def reference(case: Case, v: dict[str, Any]) -> Tensors:
    c = dataclasses.replace(config_of(case["flags"]), use_checkpoint=False)  # which computes again outside of functional_call
    model = UNetModel(c).double().train()
    model.dropout_draw.copy_(torch.tensor([c.seed, STEP, SAMPLE0]))
    for name, module in model.named_modules():
        if isinstance(getattr(module, "bias", None), torch.Tensor):
            module.register_forward_hook(partial(watch_gradient, f"d{name}.bias"))
    labels = torch.from_numpy(v["labels"]).long() if c.class_cond else None
    parameters = {name: v[name].view(p.shape) for name, p in model.named_parameters()}
    cond = nchw(v["cond"]) if c.cond_channels else None
    return {"out": nhwc(torch.func.functional_call(model, parameters, (nchw(v["x"]), v["t"], labels, v.get("values"), cond)))}


def tolerance(case: Case, name: str) -> float:
    """The sums of all layers in a row, ten roundings for each layer's norm and activation; backward the same once more."""
    shapes = shapes_of(case["flags"]).values()
    lengths = [float(np.prod(shape[1:])) for shape in shapes if len(shape) > 1]
    forward = rounding(*lengths, steps=10 * len(lengths) ** 0.5)
    return forward if name == "out" else 2 * forward


def inside(case: Case, name: str, all: Arrays) -> float:
    """Every convolution and norm stores an output, an attention rounds P as well; backward as many gradients. No path has more of them.

    The errors of a bias's gradient are in proportion to what was added up: to more than the sum where that cancels, as the gradients of
    attention's keys do (one number added to all scores of a query changes nothing). A bias before a norm with one channel a group has no
    gradient at all, and what is computed is nothing but the rounding of what was summed. compare() takes the weight's gradient for the size of that.
    But a weight's gradient sums products with the layer's input, and behind SiLU that is about 0.6, not 1: so here the size is the one that it has.
    """
    shapes = shapes_of(case["flags"]).items()
    stored = sum(len(shape) > 2 or len(shape) == 1 and n.endswith("weight") or "qkv.weight" in n for n, shape in shapes)
    cancelled = CANCELLED.get(name, 1)
    factor = max(cancelled, 1)
    if cancelled > 1e6:
        weight = all[name.removesuffix("bias") + "weight"]
        factor = max(SUMMED[name] / max(1, float(np.linalg.norm(weight) / weight.size**0.5)), 1)
    return rounding_bf16(stored if name == "out" else 2 * stored) * factor


def bench(s: dict[str, int]) -> Timed:
    """PyTorch's own kernels, one after the other. Compiled PyTorch is what bench.py compares with."""
    preset = next(p for p in ("fashion32", "unet64") if config_of(PRESETS[p]).num_channels == s["channels"])
    x = bench_tensor(s["B"], s["in"], s["H"], s["W"], fp32=True)
    model, t = UNetModel(config_of(PRESETS[preset])).to(x.device, memory_format=torch.channels_last), torch.arange(s["B"], device=x.device)

    def forward() -> torch.Tensor:
        with torch.no_grad(), autocast():
            return model(x, t)

    def both() -> None:
        model.zero_grad(set_to_none=True)
        with autocast():
            loss = model(x, t).square().mean()
        loss.backward()

    return {"forward": forward, "both": both}


CASES = [
    dict(
        B=3,
        flags="--image_size 8x12 --in_channels 1 --num_channels 32 --channel_mult 1,2 --num_res_blocks 1"
        " --attention_resolutions 4 --num_head_channels 32",
    ),
    dict(
        B=2,
        flags="--image_size 16x8 --in_channels 3 --num_channels 32 --channel_mult 1,2,3 --num_res_blocks 2"
        " --attention_resolutions 8,4 --num_head_channels -1 --num_heads 4 --num_heads_upsample 2 --conv_resample False"
        " --use_new_attention_order False --max_period 1000 --class_cond True --num_classes 3",
    ),
    dict(
        B=1,
        flags="--image_size 12x20 --in_channels 3 --num_channels 64 --channel_mult 0.5,1.5 --num_res_blocks 1"
        " --attention_resolutions 12 --num_head_channels 32 --use_scale_shift_norm True --resblock_updown True"
        " --learn_sigma True --dropout 0.2 --seed 12884901889 --use_checkpoint True --cond_dim 5",
    ),
]
LARGE = [case | {"sms": 1} for case in CASES]  # a GPU's plans as for large layers
CASES[1]["on"] = LARGE[0]["on"] = "H200 bf16"
LARGE[1]["on"], LARGE[2]["on"] = "A100 bf16, H200 bf16", "A100 fp32, H200 bf16"
CASES += LARGE if "bf16" in precisions() else []
# gradients: of whatever is a parameter in one of the cases
# Patches are fp32, and bf16 adds nothing to them; the gradients of this small batch are sums that cancel more than others do.
CASES.append(
    dict(
        B=2,
        only="fp32",
        flags="--image_size 16x24 --in_channels 3 --patch_size 2 --num_channels 32 --channel_mult 1,2 --num_res_blocks 1"
        " --cond_channels 2 --attention_resolutions 4 --num_head_channels 32 --learn_sigma True --use_checkpoint True",
    )
)
NAMES = dict.fromkeys(name for case in CASES for name in shapes_of(case["flags"]))
CONVOLUTIONS = {name for case in CASES for name, shape in shapes_of(case["flags"]).items() if len(shape) > 2}
PAIR = Pair("unet", CASES, inputs, reference, tolerance, tuple(NAMES), tuple(CONVOLUTIONS), inside=inside, bench=bench)

if __name__ == "__main__":
    main(PAIR)
