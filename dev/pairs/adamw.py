"""Checks adamw.cu: AdamW with decay, clipping, warmup, schedules and EMA over several steps, some of which are bad and must change nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from harness import HAS_GPU, Case, Pair, Tensors, Timed, bench_tensor, main, normal, rounding

SETTINGS = dict(lr=0.05, weight_decay=0.0, beta1=0.9, beta2=0.999, eps=1e-8, grad_clip=1.0, ema_rate=0.995, ema_rate2=0.9)
SCHEDULE = dict(lr_schedule=0, warmup_steps=0, max_steps=100)


def inputs(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    n, steps, B = case["n"], 7, 6
    grads = normal(rng, steps, n, scale=case.get("grad_scale", 1))
    losses = rng.uniform(0.1, 1, (steps, B))
    norm = float(np.linalg.norm(grads[0].astype(np.float64)))
    guard = np.array([case.get("updates", 0), math.log(0.5), 0.1, math.log(norm), 0.1])
    for at, factor in case.get("scale_grads", {}).items():
        grads[at] *= factor
    for at, loss in case.get("set_loss", {}).items():
        losses[at] = loss
    if "inf_at" in case:
        grads[case["inf_at"], n // 2] = np.inf
    return {
        # float32 values, as the flags are
        **{k: float(np.float32(case.get(k, v))) for k, v in SETTINGS.items()},
        **{k: case.get(k, v) for k, v in SCHEDULE.items()},
        "step": case.get("step", 0),
        "updates": case.get("updates", 0),
        "guard": guard,
        "params": normal(rng, n),
        "ema": normal(rng, n),
        "m": normal(rng, n, scale=0.1),
        "v": np.abs(normal(rng, n, scale=0.1)),
        "grads": grads,
        "losses": losses,
        "t": np.array([0, 249, 250, 999, 600, 260], np.float32),
    }


def learning_rate(v: dict[str, Any], step: int) -> float:
    warm = min(1, (step + 1) / v["warmup_steps"]) if v["warmup_steps"] else 1
    progress = min(max((step - v["warmup_steps"]) / max(v["max_steps"] - v["warmup_steps"], 1), 0), 1)
    return v["lr"] * warm * [1, 1 - progress, 0.5 * (1 + math.cos(math.pi * progress))][v["lr_schedule"]]


def average_share(rate: float, updates: int) -> float:
    """How much of an average are the newest weights: those after update k count as rate^(updates - k), or as k^rate if rate is above 1."""
    if rate > 1:  # Karras et al. 2024, eq. 2
        return 1 - (1 - 1 / updates) ** (rate + 1)
    return 1 / sum(rate**k for k in range(updates))


def reference(case: Case, v: dict[str, Any]) -> Tensors:
    """torch.optim.AdamW in float64; the verdicts step by step."""
    p = torch.nn.Parameter(v["params"].clone())
    ema, ema2 = v["ema"].clone(), v["ema"].clone()
    betas = (v["beta1"], v["beta2"])
    adamw = torch.optim.AdamW([p], v["lr"], betas, v["eps"], v["weight_decay"])
    adamw.state[p] = dict(step=torch.tensor(float(v["updates"])), exp_avg=v["m"].clone(), exp_avg_sq=v["v"].clone())
    n, mean_l, var_l, mean_g, var_g = v["guard"]
    step, updates, bad_total, bad_row = v["step"], v["updates"], 0, 0
    verdicts, rates, norms, mean_losses = [], [], [], []
    quarter = (4 * v["t"] / 1000).long()
    for grads, losses in zip(v["grads"], torch.from_numpy(v["losses"]), strict=True):
        loss, norm = losses.mean().item(), grads.norm().item()
        ok = math.isfinite(loss) and math.isfinite(norm)
        if ok and n >= 100:
            ok = math.log(loss) - mean_l <= max(math.log(10), 10 * var_l**0.5) and math.log(norm) - mean_g <= max(math.log(10), 10 * var_g**0.5)
        verdicts.append(ok)
        rates.append(learning_rate(v, step))
        step += 1
        if not ok:
            bad_total, bad_row = bad_total + 1, bad_row + 1
            continue
        if bad_row:
            var_l, var_g = 4 * var_l, 4 * var_g
        updates, bad_row = updates + 1, 0
        norms.append(norm)
        mean_losses += [loss, *(losses[quarter == q].mean().nan_to_num().item() for q in range(4))]
        rate = max(5 / (n + 5), 0.01)
        d_l, d_g = math.log(loss) - mean_l, math.log(norm) - mean_g
        mean_l, var_l = mean_l + rate * d_l, (1 - rate) * (var_l + rate * d_l**2)
        mean_g, var_g = mean_g + rate * d_g, (1 - rate) * (var_g + rate * d_g**2)
        n += 1
        p.grad = grads.clone()
        if v["grad_clip"]:
            torch.nn.utils.clip_grad_norm_([p], v["grad_clip"])
        adamw.param_groups[0]["lr"] = rates[-1]
        adamw.step()
        ema.lerp_(p.detach(), average_share(v["ema_rate"], updates))
        ema2.lerp_(p.detach(), average_share(v["ema_rate2"], updates))
    state = adamw.state[p]
    arrays = {
        "verdicts": verdicts,
        "rates": rates,
        "norms": norms,
        "mean_losses": mean_losses,
        "guard_losses": [mean_l, var_l],
        "guard_norms": [mean_g, var_g],
        "counts": [step, updates, bad_total, bad_row, n],
    }
    tensors = {
        "params_out": p.detach(),
        "ema_out": ema,
        "ema2_out": ema2,
        "m_out": state["exp_avg"],
        "v_out": state["exp_avg_sq"],
        "copy": p.detach(),
    }
    return tensors | {k: torch.tensor(a, dtype=torch.float64) for k, a in arrays.items()}


def tolerance(case: Case, name: str) -> float:
    """Decisions are exact; losses are double all the way; the norm may sum short runs in float before it goes on in double.
    Seven updates of about six roundings each, of which half fall on the full size.
    """
    if name in ("verdicts", "counts"):
        return 0
    if name in ("mean_losses", "guard_losses"):
        return 1e-12
    return {"norms": rounding(32), "guard_norms": 2 * rounding(32), "rates": rounding(steps=1)}.get(name, rounding(steps=20))


def bench(s: dict[str, int]) -> Timed:
    """PyTorch's fused AdamW and a lerp for the EMA; its norm."""
    p = bench_tensor(s["n"], grad=True, fp32=True)
    p.grad, ema = torch.randn_like(p), torch.randn_like(p)
    adamw = torch.optim.AdamW([p], 1e-4, fused=True, capturable=HAS_GPU)

    def update() -> None:
        adamw.step()
        ema.lerp_(p.detach(), 0.001)
        assert p.grad is not None
        p.grad.zero_()

    return {"update": update, "norm": lambda: torch.linalg.vector_norm(p.grad)}


CASES = [
    dict(n=20012),
    dict(n=1004, updates=5000, weight_decay=0.1, grad_clip=0.0, grad_scale=1e-3, ema_rate=0.9999, step=30, lr_schedule=1),
    dict(n=516, updates=0, ema_rate2=6.94, on="A100 fp32, H200 bf16"),
    dict(n=516, updates=0, ema_rate=1.0, ema_rate2=0.0, on="A100 fp32, H200 bf16"),
    dict(n=516, updates=70, ema_rate2=16.97, on="A100 fp32, H200 bf16"),
    dict(
        n=16384,
        updates=3,
        step=5,
        beta1=0.5,
        beta2=0.95,
        eps=1e-3,
        warmup_steps=8,
        lr_schedule=2,
        max_steps=14,
        weight_decay=0.02,
        on="A100 fp32, H200 bf16",
    ),
    dict(n=5000, updates=150, inf_at=1, scale_grads={2: 1e4}, set_loss={4: np.nan}, on="A100 fp32, H200 bf16"),
    # just beyond and just within 10 standard deviations: losses of 11.8, norms of 23.6 times the mean; what was skipped alone widens both
    dict(n=700, updates=100, set_loss={0: 11.9, 1: 11.7}, scale_grads={3: 1e4}, on="A100 fp32, H200 bf16"),
    dict(n=700, updates=101, scale_grads={0: 26, 1: 21}),
    dict(n=32, updates=99, scale_grads={0: 1e4}, grad_clip=100.0),  # the guard does not know enough yet
]
PAIR = Pair("adamw", CASES, inputs, reference, tolerance, bench=bench)

if __name__ == "__main__":
    main(PAIR)
