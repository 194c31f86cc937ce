"""Checks sampler_step.cu: every step of ddpm and ddim samplers, respaced, clipped or not, of any prediction and variance, against guided-diffusion's
formulas. (Whole samples of all samplers: dev/test/test_diffusion.py, with the mixture that the binary takes instead of answers.)"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from ddpm_loss import alpha_bar
from harness import Case, Pair, Tensors, Timed, bench_tensor, main, normal, rounding

from common.random_numbers import BACK_NOISE, KNOWN_NOISE, SAMPLE_NOISE, SAMPLE_START, random_words, to_normals

# timestep_respacing: the timesteps that guided-diffusion's space_timesteps keeps
KEPT = {
    (1000, "5"): [0, 250, 500, 749, 999],
    (100, "ddim10"): list(range(0, 100, 10)),
    (1000, "2,1,3"): [0, 333, 334, 667, 833, 999],
    (20, ""): list(range(20)),
}


def inputs(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    if "known" in case:
        B, n = case["shape"]
        rows = dict(zip(("known_x", "known_sigma", "back_x", "back_sigma"), (float(np.float32(v)) for v in case["known"]), strict=True))
        mask = normal(rng, B, n) * (rng.random((B, n)) < 0.7).astype(np.float32)  # some zeros, as in a picture's mask
        arrays = {"x": normal(rng, B * (2 if case["guided"] else 1), n), "image": normal(rng, B, n), "mask": mask}
        return arrays | rows | {"guided": int(case["guided"]), "seed": (7 << 32) + 2, "sample0": 5}
    K, (B, H, W, C) = len(KEPT[case["steps"]]), case["shape"]
    flags = {"diffusion_steps": case["steps"][0], "timestep_respacing": case["steps"][1], "noise_schedule": "linear", "learn_sigma": False}
    flags |= {name: value for name, value in case.items() if name not in ("steps", "shape", "clip", "rank", "on")}
    copies = 2 if "guidance_scale" in case else 1
    out = normal(rng, K, B * copies, H, W, C * (2 if case.get("learn_sigma") else 1))
    if copies == 2:  # a step that is not guided must not read the second half
        out[~guided_steps(case), B:] = np.nan
    return {
        "flags": " ".join(f"{name}={value}" for name, value in flags.items()),
        "eta": float(np.float32(case.get("eta", 0))),
        "clip": int(case.get("clip", True)),
        "rank": case.get("rank", -1),
        "seed": (5 << 32) + 1,
        "sample0": 3,
        "x": normal(rng, K, B * copies, H, W, C),
        "out": out,
    }


def noise(v: dict[str, Any], purpose: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    samples, count = torch.arange(v["sample0"], v["sample0"] + shape[0]), int(np.prod(shape[1:]))
    words = random_words(v["seed"], purpose, step, samples, (count + 3) // 4 * 4)
    return to_normals(words)[:, :count].reshape(shape).double()


def schedule(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """alpha_bar of the kept steps and of the ones before them, in ascending t."""
    kept = alpha_bar(case["steps"][0], case.get("noise_schedule", "linear"))[KEPT[case["steps"]]]
    return kept, np.append(1.0, kept[:-1])


def guided_steps(case: Case) -> np.ndarray:
    """(K) bool, in the order of the steps: whether sigma lies in the interval of --guidance_min and --guidance_max."""
    ab, _ = schedule(case)
    sigma = np.sqrt(1 / ab - 1)[::-1]
    return (case["guidance_min"] <= sigma) & (sigma <= case["guidance_max"])


def reference(case: Case, v: dict[str, Any]) -> Tensors:
    if "known" in case:
        x, shape = v["x"][: case["shape"][0]], case["shape"]
        if v["known_x"]:
            x = torch.where(v["mask"] > 0, x, v["known_x"] * v["image"] + v["known_sigma"] * noise(v, KNOWN_NOISE, 1, shape))
            x = v["back_x"] * x + v["back_sigma"] * noise(v, BACK_NOISE, 1, shape)
        return {"next": torch.cat([x, x if v["known_x"] else v["x"][shape[0] :]]) if case["guided"] else x}
    ab, ab_prev = schedule(case)
    shape, K = case["shape"], len(ab)
    nexts = []
    for k, i in enumerate(range(K - 1, -1, -1)):
        x, out = v["x"][k][: shape[0]], v["out"][k][: shape[0], ..., : shape[-1]]
        if "guidance_scale" in case and guided_steps(case)[k]:  # Ho & Salimans 2022
            without = v["out"][k][shape[0] :, ..., : shape[-1]]
            out = without + case["guidance_scale"] * (out - without)
        a, b, beta = ab[i], ab_prev[i], 1 - ab[i] / ab_prev[i]
        z = noise(v, SAMPLE_NOISE, k, shape) if i else 0
        x0 = {"eps": x / a**0.5 - (1 / a - 1) ** 0.5 * out, "x0": out, "v": a**0.5 * x - (1 - a) ** 0.5 * out}[case.get("predict", "eps")]
        if "rank" in case:  # Saharia et al. 2022, section 2.3
            s = x0.abs().flatten(1).sort().values[:, case["rank"]].clamp(min=1).view(-1, 1, 1, 1)
            assert (s > 1).any()
            x0 = torch.minimum(torch.maximum(x0, -s), s) / s
        elif v["clip"]:
            x0 = x0.clamp(-1, 1)
        if case["sampler"] == "ddpm":  # p_sample: LEARNED_RANGE, FIXED_SMALL or FIXED_LARGE
            mean = beta * b**0.5 / (1 - a) * x0 + (1 - b) * (a / b) ** 0.5 / (1 - a) * x
            posterior, fraction = beta * (1 - b) / (1 - a), 0.0 if case.get("sigma_small") else 1.0
            if case.get("learn_sigma"):
                fraction = (v["out"][k][: shape[0], ..., shape[-1] :] + 1) / 2
            nexts.append(mean + (posterior / beta) ** ((1 - fraction) / 2) * beta**0.5 * z if i else mean)
        else:  # ddim_sample
            eps = (x / a**0.5 - x0) / (1 / a - 1) ** 0.5
            sigma = v["eta"] * ((1 - b) / (1 - a)) ** 0.5 * beta**0.5
            nexts.append(x0 * b**0.5 + (1 - b - sigma**2) ** 0.5 * eps + sigma * z)
    t = torch.tensor(KEPT[case["steps"]][::-1], dtype=torch.float64)[:, None].expand(K, shape[0])
    halves = 2 if "guidance_scale" in case else 1  # with guidance both halves get the new x
    return {"start": noise(v, SAMPLE_START, 0, shape), "t": t, "next": torch.stack(nexts).repeat(1, halves, 1, 1, 1)}


def tolerance(case: Case, name: str) -> float:
    """x0 is a difference of terms 1 / sqrt(a) as large as x; the next x takes sqrt(b) of it. Guidance mixes two answers, with factors w and 1 - w."""
    if "known" in case:
        return rounding(steps=8)
    ab, ab_prev = schedule(case)
    amplification = np.sqrt(ab_prev / ab).max() * (2 * case.get("guidance_scale", 1) - 1)
    return {"t": 0.0, "start": rounding(steps=6)}.get(name, rounding(steps=6 + 3 * amplification))


def bench(s: dict[str, int]) -> Timed:
    """ddim without eta, as one would write it."""
    x, eps = (bench_tensor(s["B"], s["HW"] * s["C"], fp32=True) for _ in range(2))

    def step() -> torch.Tensor:
        x0 = (2.0 * x - 1.7 * eps).clamp(-1, 1)
        return 0.6 * x0 + 0.8 * (2.0 * x - x0) / 1.7

    return {"step": step}


CASES = [
    dict(known=(0.7, 0.6, 1, 0), shape=(3, 50), guided=False, on="A100 fp32, H200 bf16"),
    dict(known=(0.9, 0.3, 0.8, 0.5), shape=(2, 77), guided=True),
    dict(known=(0, 0, 0, 0), shape=(2, 8), guided=True),  # in the middle of a step
    dict(sampler="ddpm", steps=(1000, "5"), shape=(3, 12, 20, 3)),
    dict(sampler="ddpm", steps=(20, ""), shape=(1, 7, 9, 1), clip=False, noise_schedule="cosine"),
    dict(sampler="ddpm", steps=(1000, "2,1,3"), shape=(2, 6, 5, 3), learn_sigma=True, on="A100 fp32, H200 bf16"),
    dict(sampler="ddim", steps=(100, "ddim10"), shape=(3, 8, 8, 3)),
    dict(
        sampler="ddim",
        steps=(1000, "5"),
        shape=(2, 6, 5, 3),
        eta=0.7,
        clip=False,
        noise_schedule="cosine",
        learn_sigma=True,
        on="A100 fp32, H200 bf16",
    ),
    dict(sampler="ddim", steps=(1000, "2,1,3"), shape=(5, 4, 4, 1), eta=1.0),
    dict(sampler="ddpm", steps=(20, ""), shape=(2, 6, 5, 3), noise_schedule="cosine", predict="v", sigma_small=True, on="A100 fp32, H200 bf16"),
    dict(sampler="ddpm", steps=(1000, "5"), shape=(2, 6, 5, 3), learn_sigma=True, predict="x0", rank=80),
    dict(sampler="ddim", steps=(100, "ddim10"), shape=(3, 40, 33, 3), eta=0.5, rank=3919, noise_schedule="cosine"),
    dict(sampler="ddpm", steps=(1000, "5"), shape=(3, 6, 5, 3), guidance_scale=2.5, guidance_min=0.1, guidance_max=10, learn_sigma=True),
    dict(sampler="ddim", steps=(100, "ddim10"), shape=(2, 7, 9, 1), guidance_scale=3, guidance_min=0.5, guidance_max=2, rank=55),
]
PAIR = Pair("sampler_step", CASES, inputs, reference, tolerance, bench=bench)

if __name__ == "__main__":
    main(PAIR)
