"""Checks ddpm_loss.cu: noise levels, normals, flips, both schedules, uint8 and float images, every objective, learned variance."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from harness import Case, Pair, Tensors, Timed, bench_tensor, main, nhwc, normal, rounding

from common.random_numbers import FLIP, NOISE, TIMESTEP, random_words, to_normals


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
        "objective": case.get("objective", "ddpm"),
        "predict": case.get("predict", "eps"),
        "use_kl": int(case.get("use_kl", False)),
        "vlb_weight": float(np.float32(case.get("vlb_weight", 0))),
        "min_snr_gamma": float(case.get("min_snr_gamma", 0)),
        "t_mean": float(case.get("t_mean", 0)),
        "t_std": float(case.get("t_std", 0)),
        "images": images if case.get("bytes", True) else rng.uniform(-1, 1, (B, C, H, W)).astype(np.float32),
        "out": normal(rng, B, H, W, C * (2 if case.get("learn_sigma") else 1)),
        **({"teacher": normal(rng, B, H, W, C), "flags": case["flags"]} if "flags" in case else {}),
        **({"history": loss_history(case, rng)} if "history" in case else {}),
    }


def loss_history(case: Case, rng: np.random.Generator) -> np.ndarray:
    """(T, 11): up to ten losses of each t, and how many; "full": ten of all, else of one t fewer."""
    T = case.get("diffusion_steps", 1000)
    rows = np.concatenate([rng.uniform(0.5, 1.5, (T, 10)) * np.geomspace(1, 100, T)[:, None], np.full((T, 1), 10)], 1).astype(np.float32)
    if case["history"] != "full":
        rows[7, 6:] = [0, 0, 0, 0, 6]
    return rows


def second_moment(v: dict[str, Any], words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """t and importance, as guided-diffusion's LossSecondMomentResampler draws and weighs them, from one word a sample."""
    losses, counts = v["history"][:, :10].double(), v["history"][:, 10]
    w = losses.square().mean(1).sqrt() if (counts == 10).all() else torch.ones(len(losses)).double()
    p = w / w.sum()
    p = p * (1 - 0.001) + 0.001 / len(p) if (counts == 10).all() else p
    t = torch.searchsorted(p.cumsum(0), words.double() * 2.0**-32, right=True)
    return t, 1 / (len(p) * p[t])


def vb_terms_bpd(
    x0: torch.Tensor, x_t: torch.Tensor, pred_xstart: torch.Tensor, v: torch.Tensor | None, t: torch.Tensor, ab: np.ndarray
) -> torch.Tensor:
    """guided-diffusion's _vb_terms_bpd, with the means it computes; v None: the larger of the fixed variances."""
    before = np.append(1.0, ab[:-1])
    betas = 1 - ab / before
    posterior = betas * (1 - before) / (1 - ab)
    min_log = np.log(np.append(posterior[1], posterior[1:]))
    max_log = np.log(betas if v is not None else np.append(posterior[1], betas[1:]))
    coef1, coef2 = betas * np.sqrt(before) / (1 - ab), (1 - before) * np.sqrt(ab / before) / (1 - ab)
    low, high, coef1, coef2 = (torch.from_numpy(a)[t].view(-1, 1, 1, 1) for a in (min_log, max_log, coef1, coef2))
    fraction = (v + 1) / 2 if v is not None else 1.0
    log_variance = fraction * high + (1 - fraction) * low
    true_mean, mean = coef1 * x0 + coef2 * x_t, coef1 * pred_xstart + coef2 * x_t
    kl = 0.5 * (-1 + log_variance - low + torch.exp(low - log_variance) + (true_mean - mean) ** 2 * torch.exp(-log_variance))
    plus, minus = ((x0 - mean + s / 255) * torch.exp(-0.5 * log_variance) for s in (1, -1))
    cdf_plus, cdf_min = (0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) for z in (plus, minus))
    inside = torch.where(x0 > 0.999, (1 - cdf_min).clamp(min=1e-12), (cdf_plus - cdf_min).clamp(min=1e-12))
    log_likelihood = torch.where(x0 < -0.999, cdf_plus.clamp(min=1e-12), inside).log()
    return torch.where(t.view(-1, 1, 1, 1) == 0, -log_likelihood, kl).mean((1, 2, 3)) / math.log(2)


def consistency_tuning(v: dict[str, Any], x0: torch.Tensor, noise: torch.Tensor, normal: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
    """Geng et al. 2024 by its paper: losses, and what leads to them. The images D are computed, and then taken from each other."""
    flags = {name: np.float32(value).item() if value[0].isdigit() else value for name, value in (word.split("=") for word in v["flags"].split())}
    data, flow = 0.5, flags.get("ect_frame") == "flow"

    def image(answer: torch.Tensor, sigma: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """D(x0 + sigma noise; sigma), the network's input, and how an image goes back to an answer."""
        noisy = x0 + sigma * noise
        if flow:
            at = sigma / (1 + sigma)
            return noisy / (1 + sigma) - at * answer, noisy / (1 + sigma), lambda D: (noisy / (1 + sigma) - D) / at
        c_skip, c_out = data**2 / (sigma**2 + data**2), sigma * data / (sigma**2 + data**2) ** 0.5
        return c_skip * noisy + c_out * answer, noisy / (sigma**2 + data**2) ** 0.5, lambda D: (D - c_skip * noisy) / c_out

    def told(sigma: torch.Tensor) -> torch.Tensor:
        return (1000 * sigma / (1 + sigma) if flow else sigma.log() / 4).flatten()

    t = torch.exp(float(np.float32(-1.1)) + 2 * normal).view(-1, 1, 1, 1)
    a = 1 + v["step"] // int(flags["ect_d"])
    n = 1 + flags.get("ect_k", 8) * torch.sigmoid(-flags.get("ect_b", 1) * t)
    r = (t * (1 - n / flags.get("ect_q", 2) ** a)).clamp(min=0)
    assert v["some_clean"] == bool((r == 0).any()) and (r > 0).any()
    shown = torch.where(r > 0, r, t)
    D_t, x_t, to_answer = image(v["out"], t)
    D_r, x_r, _ = image(v["teacher"], shown)
    D_r = torch.where(r > 0, D_r, x0)
    c, weight = flags.get("ect_c", 0), 1 / t**2 + 1 / data**2 if flags.get("ect_weight") == "snr" else 1 / (t - r)
    loss = weight.flatten() * (((D_t - D_r) ** 2).sum((1, 2, 3)).add(c * c).sqrt() - c)
    return loss, {"t": told(t), "teacher_t": told(shown), "x_t": x_t, "x_r": x_r, "target": to_answer(D_r)}


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
    samples = torch.arange(v["sample0"], v["sample0"] + B)

    def words(purpose: int, count: int) -> torch.Tensor:
        return random_words(v["seed"], purpose, v["step"], samples, count)

    steps = v["diffusion_steps"]
    t, importance = (words(TIMESTEP, 1)[:, 0] * steps) >> 32, torch.ones(B).double()
    if "history" in v:
        t, importance = second_moment(v, words(TIMESTEP, 1)[:, 0])
        assert len(t.unique()) < B  # one of them twice
    noise = to_normals(words(NOISE, (H * W * C + 3) // 4 * 4))[:, : H * W * C].view(B, H, W, C).double()
    images = v["images"]
    x0 = nhwc(torch.from_numpy(images).double() / 127.5 - 1 if case.get("bytes", True) else images)
    if v["random_flip"]:
        odd = (words(FLIP, 1) & 1).view(B, 1, 1, 1) == 1
        assert odd.any() and not odd.all()
        x0 = torch.where(odd, x0.flip(2), x0)
    out = v["out"].requires_grad_()
    mean, variance = out[..., :C], out[..., C:] if Cout > C else None
    if v["objective"] == "ect":
        normal = to_normals(words(TIMESTEP, 2))[:, 0].double()
        loss, found = consistency_tuning(v | {"some_clean": case.get("some_clean", False)}, x0, noise, normal)
        quarters = torch.bucketize(normal, torch.tensor([-0.67448975, 0, 0.67448975]).double()).double()
        (dout,) = torch.autograd.grad(loss.sum() * float(np.float32(v["factor"])), out)
        return found | {"quarters": quarters, "loss": loss, "dout": dout}
    if v["objective"] == "edm":  # Karras et al. 2022, table 1 and eq. 2: lambda * (D(x0 + n; sigma) - x0)^2
        normal = to_normals(words(TIMESTEP, 2))[:, 0].double()
        sigma, data = torch.exp(float(np.float32(-1.2)) + float(np.float32(1.2)) * normal).view(B, 1, 1, 1), 0.5
        c_skip, c_out = data**2 / (sigma**2 + data**2), sigma * data / (sigma**2 + data**2) ** 0.5
        c_in, c_noise = 1 / (sigma**2 + data**2) ** 0.5, sigma.log() / 4
        noisy = x0 + sigma * noise
        loss = ((sigma**2 + data**2) / (sigma * data) ** 2 * (c_skip * noisy + c_out * mean - x0) ** 2).mean((1, 2, 3))
        told, x_t, target = c_noise.view(B), c_in * noisy, (x0 - c_skip * noisy) / c_out
        quarters = torch.bucketize(normal, torch.tensor([-0.67448975, 0, 0.67448975]).double())
    elif v["objective"] == "flow":  # Liu et al. 2022; with t_std Esser et al. 2024, section 3.1
        normal, u = to_normals(words(TIMESTEP, 2))[:, 0].double(), (words(TIMESTEP, 1)[:, 0].double() + 0.5) * 2.0**-32
        told = torch.sigmoid(v["t_mean"] + v["t_std"] * normal) if v["t_std"] else u
        x_t, target = (1 - told.view(B, 1, 1, 1)) * x0 + told.view(B, 1, 1, 1) * noise, noise - x0
        loss = ((mean - target) ** 2).mean((1, 2, 3))
        quarters = torch.bucketize(normal, torch.tensor([-0.67448975, 0, 0.67448975]).double()) if v["t_std"] else (4 * u).long()
        told = 1000 * told
    else:
        ab = alpha_bar(steps, v["noise_schedule"])
        a = torch.from_numpy(ab)[t].view(B, 1, 1, 1)
        x_t, snr = a.sqrt() * x0 + (1 - a).sqrt() * noise, a / (1 - a)
        target, x0_of, relative = {
            "eps": (noise, lambda eps: (x_t - (1 - a).sqrt() * eps) / a.sqrt(), snr),
            "x0": (x0, lambda x: x, 1),
            "v": (a.sqrt() * noise - (1 - a).sqrt() * x0, lambda velocity: a.sqrt() * x_t - (1 - a).sqrt() * velocity, snr + 1),
        }[v["predict"]]
        gamma = v["min_snr_gamma"]
        loss = ((snr.clamp(max=gamma) / relative if gamma else 1) * (mean - target) ** 2).mean((1, 2, 3))
        if v["use_kl"]:  # RESCALED_KL
            loss = steps * vb_terms_bpd(x0, x_t, x0_of(mean), variance, t, ab)
        elif variance is not None and v["vlb_weight"]:  # RESCALED_MSE, whose factor is T / 1000
            loss = loss + v["vlb_weight"] * steps * vb_terms_bpd(x0, x_t, x0_of(mean.detach()), variance, t, ab)
        told, quarters = t.double(), 4 * t // steps
        assert case.get("has_first", False) == bool((t == 0).any())
    more: Tensors = {}
    if "history" in v:
        rows = v["history"].clone()
        for row, value in zip((rows[k] for k in t), loss.tolist(), strict=True):
            n = int(row[10])
            kept = [*row[:n].tolist(), value][-10:]
            row[: len(kept)], row[10] = torch.tensor(kept), len(kept)
        full = rows[:, 10] == 10
        more = {"history_out": rows, "rms_losses": torch.where(full, rows[:, :10].double().square().mean(1).sqrt(), -1.0)}
        loss = loss * importance
    (dout,) = torch.autograd.grad(loss.sum() * float(np.float32(v["factor"])), out)
    return more | {"t": told, "quarters": quarters.double(), "target": target, "x_t": x_t, "loss": loss, "dout": dout}


def tolerance(case: Case, name: str) -> float:
    """t is an integer, or half of a normal's error. A normal: logarithm, root, product, cosine, and rounding here and in the twin. Losses are
    sums in double of squares of twice the error of a normal. The image's two halves have four roundings. The bound's terms: an exponential of u
    (up to 4 here, whose rounding e^-u multiplies) and the square of an error.
    """
    if case.get("learn_sigma") and case.get("vlb_weight") or case.get("use_kl"):
        return {"t": 0.0, "quarters": 0.0, "loss": rounding(steps=16), "dout": rounding(steps=20)}.get(name, rounding(steps=6))
    if name in ("t", "teacher_t") and "objective" in case:
        return rounding(steps=6)
    return {"t": 0.0, "quarters": 0.0, "loss": rounding(steps=4)}.get(name, rounding(steps=6))


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
    dict(shape=(33, 3, 8, 8), learn_sigma=True, diffusion_steps=100, random_flip=True, on="A100 fp32, H200 bf16"),
    dict(shape=(1, 3, 5, 3), noise_schedule="cosine", step=123456),
    dict(shape=(2, 3, 64, 40), noise_schedule="cosine", step=2, on="A100 fp32, H200 bf16"),
    dict(shape=(8, 3, 6, 6), predict="x0", min_snr_gamma=5),
    dict(shape=(8, 3, 6, 6), predict="v", noise_schedule="cosine", min_snr_gamma=5, on="A100 fp32, H200 bf16"),
    dict(shape=(8, 3, 6, 6), min_snr_gamma=1, random_flip=True),
    dict(shape=(33, 3, 8, 8), learn_sigma=True, vlb_weight=1e-3, diffusion_steps=30, step=4, has_first=True),
    dict(
        shape=(33, 1, 5, 7),
        learn_sigma=True,
        vlb_weight=0.3,
        predict="v",
        noise_schedule="cosine",
        diffusion_steps=30,
        step=5,
        has_first=True,
        on="A100 fp32, H200 bf16",
    ),
    dict(
        shape=(33, 3, 8, 8),
        learn_sigma=True,
        use_kl=True,
        predict="v",
        noise_schedule="cosine",
        diffusion_steps=30,
        step=7,
        has_first=True,
        on="A100 fp32, H200 bf16",
    ),
    dict(
        shape=(33, 3, 8, 8), learn_sigma=True, use_kl=True, predict="x0", diffusion_steps=30, step=6
    ),  # at t = 0 the likelihood of so wrong an x_0 cancels
    dict(shape=(33, 3, 8, 8), use_kl=True, diffusion_steps=30, step=8, has_first=True),
    dict(shape=(16, 3, 8, 8), objective="edm", step=3),
    dict(shape=(16, 3, 8, 8), objective="flow", step=3),
    dict(shape=(16, 3, 8, 8), objective="flow", step=4, t_mean=0.5, t_std=0.75, random_flip=True, on="A100 fp32, H200 bf16"),
    dict(shape=(16, 3, 8, 8), objective="ect", step=3, random_flip=True, some_clean=True, flags="P_mean=-1.1 P_std=2 ect_d=2"),
    dict(shape=(7, 1, 5, 3), objective="ect", step=9, flags="P_mean=-1.1 P_std=2 ect_d=1 ect_q=4 ect_k=3 ect_b=0.5 ect_c=0.3"),
    dict(shape=(5, 3, 33, 20), objective="ect", step=30, flags="P_mean=-1.1 P_std=2 ect_d=10 ect_frame=flow ect_q=3 ect_weight=snr"),
    dict(
        shape=(2, 3, 64, 40),
        objective="ect",
        step=5,
        bytes=False,
        flags="P_mean=-1.1 P_std=2 ect_d=1 ect_c=0.06 ect_weight=snr",
        on="A100 fp32, H200 bf16",
    ),
    dict(shape=(33, 3, 8, 8), history="full", diffusion_steps=100, step=9),
    dict(shape=(65, 3, 6, 6), history="full", learn_sigma=True, use_kl=True, diffusion_steps=300, step=10, on="A100 fp32, H200 bf16"),
    dict(shape=(33, 3, 8, 8), history="not yet", learn_sigma=True, vlb_weight=1e-3, diffusion_steps=30, step=4, has_first=True),
]
PAIR = Pair("ddpm_loss", CASES, inputs, reference, tolerance, bench=bench)

if __name__ == "__main__":
    main(PAIR)
