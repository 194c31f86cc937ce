"""Checks ddpm_loss.cu: timesteps, normals, flips, both schedules, uint8 and float images, learned variance."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from harness import Case, Pair, Tensors, Timed, bench_tensor, main, nhwc, normal, rounding

from train_unet import FLIP, NOISE, TIMESTEP, philox_key, random_words, to_normals


def inputs(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    B, C, H, W = case["shape"]
    images = rng.integers(0, 256, (B, C, H, W), np.uint8)
    return {
        "diffusion_steps": case.get("diffusion_steps", 1000),
        "noise_schedule": case.get("noise_schedule", "linear"),
        "random_flip": int(case.get("random_flip", False)),
        "step": case.get("step", 0),
        "sample0": case.get("sample0", 0),
        "seed": case.get("seed", 0),
        "factor": 1 / B,
        "images": images if case.get("bytes", True) else rng.uniform(-1, 1, (B, C, H, W)).astype(np.float32),
        "out": normal(rng, B, H, W, C * (2 if case.get("learn_sigma") else 1)),
    }


def alpha_bar(steps: int, schedule: str) -> np.ndarray:
    """guided-diffusion's get_named_beta_schedule, and the product of 1 - beta."""
    if schedule == "cosine":
        f = [math.cos((t / steps + 0.008) / 1.008 * math.pi / 2) ** 2 for t in range(steps + 1)]
        betas = np.array([min(1 - b / a, 0.999) for a, b in zip(f, f[1:], strict=False)])
    else:
        betas = np.linspace(1e-4 * 1000 / steps, 0.02 * 1000 / steps, steps)
    return np.cumprod(1 - betas)


def reference(case: Case, v: dict[str, Any]) -> Tensors:
    B, H, W, Cout = v["out"].shape
    C = case["shape"][1]
    samples, key = torch.arange(v["sample0"], v["sample0"] + B), philox_key(v["seed"])

    def words(purpose: int, count: int) -> torch.Tensor:
        return random_words(key, purpose, v["step"], samples, count)

    t = (words(TIMESTEP, 1)[:, 0] * v["diffusion_steps"]) >> 32
    noise = to_normals(words(NOISE, (H * W * C + 3) // 4 * 4))[:, : H * W * C].view(B, H, W, C).double()
    images = v["images"]
    x0 = nhwc(torch.from_numpy(images).double() / 127.5 - 1 if case.get("bytes", True) else images)
    if v["random_flip"]:
        odd = (words(FLIP, 1) & 1).view(B, 1, 1, 1) == 1
        assert odd.any() and not odd.all()
        x0 = torch.where(odd, x0.flip(2), x0)
    a = torch.from_numpy(alpha_bar(v["diffusion_steps"], v["noise_schedule"]))[t].view(B, 1, 1, 1)
    out = v["out"].requires_grad_()
    loss = ((out[..., :C] - noise) ** 2).mean((1, 2, 3))
    (dout,) = torch.autograd.grad(loss.sum() * float(np.float32(v["factor"])), out)
    return {"t": t.double(), "noise": noise, "x_t": a.sqrt() * x0 + (1 - a).sqrt() * noise, "loss": loss, "dout": dout}


def tolerance(case: Case, name: str) -> float:
    """t is an integer. A normal: logarithm, root, product, cosine, and rounding here and in the twin. Losses are sums in
    double of squares of twice the error of a normal. The image's two halves have four roundings.
    """
    return {"t": 0.0, "loss": rounding(steps=4)}.get(name, rounding(steps=6))


def bench(s: dict[str, int]) -> Timed:
    shape = tuple(s[n] for n in "BCHW")
    x0, out = bench_tensor(*shape, fp32=True), bench_tensor(*shape, grad=True, fp32=True)
    a, b = (bench_tensor(s["B"], fp32=True).abs().view(-1, 1, 1, 1) for _ in range(2))
    noise = torch.randn_like(x0)
    images = (x0 * 30 + 128).to(torch.uint8)
    return {
        "q_sample": lambda: a * (images / 127.5 - 1) + b * torch.randn_like(x0),
        "mse": lambda: torch.autograd.grad(F.mse_loss(out, noise), out),
    }


CASES = [
    dict(shape=(8, 3, 12, 20), random_flip=True, step=7, sample0=16, seed=(3 << 32) + 9),
    dict(shape=(5, 1, 7, 9), noise_schedule="cosine", bytes=False, diffusion_steps=4000),
    dict(shape=(33, 3, 8, 8), learn_sigma=True, diffusion_steps=100, random_flip=True),
    dict(shape=(1, 3, 5, 3), noise_schedule="cosine", step=123456),
]
PAIR = Pair("ddpm_loss", CASES, inputs, reference, tolerance, bench=bench)

if __name__ == "__main__":
    main(PAIR)
