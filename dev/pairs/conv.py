"""What conv3x3.py and conv1x1.py share."""

from __future__ import annotations

from typing import Any

import harness
import numpy as np
import torch
import torch.nn.functional as F
from harness import Case, Pair, Tensors, Timed, bench_tensor, channel_stats, nchw, nhwc, oihw, poisoned_columns, rounding, whole

from common.model import fp8_weight, to_fp8


def sizes(case: Case) -> Case:
    return {"C2": 0, "stride": 1, "upsample": 0, "emb": False, "residual": False, "addends": 0} | case


def out_size(case: Case) -> tuple[int, int]:
    s = sizes(case)
    return tuple((s[n] * (1 + s["upsample"]) + s["stride"] - 1) // s["stride"] for n in "HW")


def inputs(kernel: int, case: Case, rng: np.random.Generator) -> dict[str, Any]:
    s = sizes(case)
    B, H, W, C1, C2, Cout = (s[n] for n in ("B", "H", "W", "C1", "C2", "Cout"))
    out = (B, *out_size(case), Cout)
    K = kernel * kernel * (C1 + C2)

    if case.get("fp8") == "gradient":
        return inputs_fp8_gradient(s, rng)
    if case.get("fp8") == "weights":
        return inputs_fp8_weights(s, rng)
    if case.get("fp8"):
        return inputs_fp8(s, rng)

    def normal(*shape: int, scale: float = 1) -> np.ndarray:
        return whole(rng, *shape) if case.get("exact") else harness.normal(rng, *shape, scale=scale)

    a: dict[str, Any] = {
        "stride": s["stride"],
        "upsample": s["upsample"],
        "x1": normal(B, H, W, C1),
        "weight": normal(Cout, kernel, kernel, C1 + C2, scale=K**-0.5),
        "bias": normal(Cout),
        "dout": normal(*out),
    }
    if C2:
        a["x2"] = normal(B, H, W, C2)
    if s["residual"]:
        a["residual"] = normal(*out)
    if s["emb"]:  # these are columns 64 .. 64 + Cout of the projections of all blocks
        a["emb"] = normal(B, Cout + 160)
        a["emb_offset"] = 64
        a["demb_start"] = poisoned_columns(B, Cout + 160, 64, Cout)
    for name, needed in (("dx1", 1), ("dx1_add", 2)):
        if s["addends"] >= needed:
            a[name] = normal(B, H, W, C1)
    if case.get("wild"):  # of very different sizes: wherever a tile's largest number lies, it must be seen
        for name in ("x1", "weight", "dout"):
            a[name] *= 2.0 ** rng.integers(-6, 7, a[name].shape)
    if case.get("spikes"):  # a number in each tile, more or less, is far larger than all others: who overlooks it when the tile is scaled overflows
        for name, every in {"x1": 1500, "weight": 12000, "dout": 1500}.items():
            is_spike = rng.random(a[name].shape) < 1 / every
            a[name] = np.where(is_spike, np.float32(256) * (a[name] + np.sign(a[name]) * abs(a[name]).mean()), a[name])
    return a


def inputs_fp8(s: Case, rng: np.random.Generator) -> dict[str, Any]:
    """Of a 3x3 convolution: x is what a norm writes, its factor being 8, the weights are rounded as make_fp8_weights does."""
    B, H, W, C1, Cout = (s[n] for n in ("B", "H", "W", "C1", "Cout"))
    x = F.silu(torch.from_numpy(harness.normal(rng, B, H, W, C1))) * 8
    weight = (
        torch.from_numpy(harness.normal(rng, Cout, 3, 3, C1, scale=(9 * C1) ** -0.5)) * 2.0 ** torch.arange(Cout).remainder(5)[:, None, None, None]
    )
    if s.get("exact"):
        x, weight = (torch.from_numpy(whole(rng, *t.shape)) for t in (x, weight))
        scale = torch.full((Cout,), 0.125)
    else:
        weight, scale = fp8_weight(weight)
    a = {"fp8_x": to_fp8(x).numpy(), "fp8_weight": weight.numpy(), "fp8_factors": (scale / 8).numpy(), "fp8_bias": whole(rng, Cout)}
    if s["emb"]:
        a["fp8_emb"] = whole(rng, B, Cout + 160)
    if s["residual"]:
        a["fp8_residual"] = whole(rng, B, H, W, Cout)
    if "skip" in s:
        a["fp8_skip_x"], a["fp8_skip_bias"] = whole(rng, B, H, W, s["skip"]), whole(rng, Cout)
        a["fp8_skip_weight"] = (whole(rng, Cout, 1, 1, s["skip"]) / 4).astype(np.float32)
    return a


def inputs_fp8_gradient(s: Case, rng: np.random.Generator) -> dict[str, Any]:
    """Of a 3x3 convolution: the output's gradient in e5m2, of very different sizes, its factor being 2^10; weights times 128, turned as round_weights does."""
    B, H, W, C1, Cout = (s[n] for n in ("B", "H", "W", "C1", "Cout"))
    dout = torch.from_numpy(harness.normal(rng, B, H, W, Cout)) * 2.0 ** torch.from_numpy(rng.integers(-8, 3, (B, H, W, Cout)))
    turned = torch.from_numpy(harness.normal(rng, C1, 3, 3, Cout, scale=(9 * Cout) ** -0.5)) * 128
    if s.get("exact"):
        dout, turned = (torch.from_numpy(whole(rng, *t.shape)) for t in (dout, turned))
    dout = dout.float().to(torch.float8_e5m2).float()
    factors = np.full(C1, 2.0**-17, np.float32)
    return {"fp8_dout": dout.numpy(), "fp8_turned": to_fp8(turned).numpy(), "fp8_factors": factors}


def inputs_fp8_weights(s: Case, rng: np.random.Generator) -> dict[str, Any]:
    """Of a 3x3 convolution: what a norm writes, its factor being 16 (train_unet.cu's FP8_X_FACTOR), and the output's gradient in e5m2, its factor being 2^10."""
    B, H, W, C1, Cout = (s[n] for n in ("B", "H", "W", "C1", "Cout"))
    x = F.silu(torch.from_numpy(harness.normal(rng, B, H, W, C1))) * 16
    dout = torch.from_numpy(harness.normal(rng, B, H, W, Cout)) * 2.0 ** torch.from_numpy(rng.integers(-8, 3, (B, H, W, Cout)))
    a = {"fp8_x": to_fp8(x).numpy(), "fp8_dout": dout.float().to(torch.float8_e5m2).float().numpy(), "dout_factor": np.full(1, 2.0**10, np.float32)}
    if s["emb"]:
        a["demb_start"], a["emb_offset"] = poisoned_columns(B, Cout + 160, 64, Cout), 64
    return a


def reference_fp8_weights(v: dict[str, Any]) -> Tensors:
    x, dout = nchw(v["fp8_x"]) / 16, nchw(v["fp8_dout"]) / v["dout_factor"]
    shape = (dout.shape[1], x.shape[1], 3, 3)
    dweight = torch.nn.grad.conv2d_weight(x, shape, dout, padding=1).permute(0, 2, 3, 1)
    result = {"dweight": dweight, "dbias": dout.sum((0, 2, 3))}
    if "demb_start" in v:
        result["demb"] = v["demb_start"].clone()
        result["demb"][:, v["emb_offset"] :][:, : dout.shape[1]] = dout.sum((2, 3))
    return result


def reference_fp8(v: dict[str, Any]) -> Tensors:
    if "fp8_x" in v and "fp8_dout" in v:
        return reference_fp8_weights(v)
    if "fp8_dout" in v:  # the weights are turned already, so it is the forward convolution
        return {"dx": nhwc(F.conv2d(nchw(v["fp8_dout"]), oihw(v["fp8_turned"]), padding=1)) * v["fp8_factors"]}
    out = nhwc(F.conv2d(nchw(v["fp8_x"]), oihw(v["fp8_weight"]), padding=1)) * v["fp8_factors"] + v["fp8_bias"]
    if "fp8_emb" in v:
        out = out + v["fp8_emb"][:, None, None, 64:][..., : out.shape[-1]]
    if "fp8_residual" in v:
        out = out + v["fp8_residual"]
    if "fp8_skip_x" in v:
        out = out + nhwc(F.conv2d(nchw(v["fp8_skip_x"]), oihw(v["fp8_skip_weight"]), v["fp8_skip_bias"]))
    return {"out": out} | channel_stats(out)


def inside(case: Case, name: str) -> float:
    """What roundings between input and output make, as a relative error. FP8: the tensor cores sum 32 products at a time, and keep 14 bits of a sum; see
    rounding() in harness.py, with EPS 2^-13. Weight gradients have tiles of 8 x 16 or 8 x 8 pixels, also where an image is smaller. A product and the sum so
    far are cut off at 2^-13 of the largest of these 33 numbers: few steps therefore count as three more, and since cutting makes every sum smaller, errors of
    many steps add up where signs stay as they are, to 2^-14 a step, of sums that grow as the root of their number: to n / 3 of it at most."""
    if case.get("fp8") == "weights":
        across = 16 if case["W"] > 8 else 8
        steps = case["B"] * -(-case["H"] // 8) * -(-case["W"] // across) * across // 4
        return 2.0**-13 * (steps + 3) ** 0.5 + 2.0**-14 * steps / 3
    if case.get("fp8"):
        summed = case["Cout"] if case["fp8"] == "gradient" else case["C1"]
        return 2.0**-13 * (9 * summed / 32) ** 0.5
    return 2.0**-17 if "fp32" in case else 0.0  # which two bf16 numbers add up to


def reference(case: Case, v: dict[str, Any]) -> Tensors:
    if case.get("fp8"):
        return reference_fp8(v)
    x = v["x1"] if "x2" not in v else torch.cat([v["x1"], v["x2"]], -1)
    x = nchw(x)
    if v["upsample"]:
        x = F.interpolate(x, scale_factor=2, mode="nearest")
    weight = oihw(v["weight"])
    out = nhwc(F.conv2d(x, weight, v["bias"], stride=v["stride"], padding=weight.shape[-1] // 2))
    if "emb" in v:
        out = out + v["emb"][:, None, None, v["emb_offset"] :][..., : out.shape[-1]]
    if "residual" in v:
        out = out + v["residual"]
    return {"out": out} | ({} if out.shape[-1] % 32 else channel_stats(out))  # no norm reads the network's own output


def tolerance(kernel: int, case: Case, name: str) -> float:
    s = sizes(case)
    Ho, Wo = out_size(case)
    forward = kernel * kernel * (s["C1"] + s["C2"])
    if name.startswith("dx"):  # an upsampled pixel was read four times as often
        return rounding(kernel * kernel * s["Cout"] * 4 ** s["upsample"])
    if name in ("dweight", "dbias"):
        return rounding(s["B"] * Ho * Wo)
    if name == "demb":
        return rounding(Ho * Wo)
    return rounding(forward, steps=4)


def bench(kernel: int, s: dict[str, int]) -> Timed:
    """PyTorch's convolution of the concatenated (and upsampled) input: concatenation and upsampling are not in its time."""
    x = bench_tensor(s["B"], s["C1"] + s["C2"], s["H"] << s["up"], s["W"] << s["up"])
    weight = bench_tensor(s["Cout"], s["C1"] + s["C2"], kernel, kernel)
    bias = bench_tensor(s["Cout"])
    out = F.conv2d(x, weight, bias, s["stride"], kernel // 2)
    dout = torch.randn_like(out)

    def gradients(dx: bool, dweight: bool) -> Any:
        return torch.ops.aten.convolution_backward(
            dout, x, weight, [s["Cout"]], [s["stride"]] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], 1, [dx, dweight, dweight]
        )

    return {
        "forward": lambda: F.conv2d(x, weight, bias, s["stride"], kernel // 2),
        "dx": lambda: gradients(True, False),
        "dweight": lambda: gradients(False, True),
    }


def conv_pair(name: str, kernel: int, cases: list[Case]) -> Pair:
    return Pair(
        name,
        cases,
        lambda case, rng: inputs(kernel, case, rng),
        reference,
        lambda case, name: tolerance(kernel, case, name),
        ("x1", "x2", "weight", "bias", "emb"),
        (
            *("x1", "x2", "weight", "dout", "residual", "dx1", "dx1_add", "fp8_residual", "fp8_skip_x", "fp8_skip_weight"),
            *(["bias"] if kernel == 1 else []),  # cuBLAS adds biases of the output's type
        ),
        inside=lambda case, name, all: inside(case, name),
        bench=lambda shape: bench(kernel, shape),
    )
