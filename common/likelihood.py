"""Bits per dimension of a data set by a model (--nll): how many bits a lossless coder of this model would need for a value of an image.

Of a model of T steps it is the variational bound, as guided-diffusion's image_nll.py computes it; of edm and flow models the density by the
probability-flow ODE. docs/DIFFUSION.md has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common.conditions import made_pictures
from common.config import make_config
from common.data_files import Data, open_data, with_pictures
from common.flags import Config
from common.log import open_start
from common.model_files import ModelFile
from common.program import UserError
from common.random_numbers import VAL_NOISE, VAL_TIMESTEP, normals, random_words

Told = dict[str, Tensor]  # the model's conditions, by the name of its argument
ODE_STEPS = 64  # of Runge and Kutta's method of order 4, equal in ln(sigma): see docs/DIFFUSION.md
# Steps of the counters of VAL_TIMESTEP and VAL_NOISE, of which validation takes 0: timestep t takes noise t + 1.
RADEMACHER, DEQUANTISATION = 1, 2


def open_measured(path: str, flags: dict[str, Any]) -> tuple[Config, Data, ModelFile]:
    """What --nll measures by: the configuration (num_samples: how many images at most), the data, and the model, whose first average is --ema_rate's."""
    if not path:
        raise UserError("--nll: is empty; give the path of a data file")
    if not flags.get("init"):
        raise UserError(f"--nll {path}: needs --init FILE, the model by which these images are measured")
    start = open_start(flags).choose_ema(flags.get("ema_rate"))
    data = with_pictures(open_data(path), "cond_file", flags.get("cond_file", ""))
    config = make_config({"precision": "fp32"} | flags, None, start)  # bf16 would be seen in the result
    if config.objective == "ect":
        told = "was tuned by --objective ect to answer with samples, which say nothing of a density; name the model that it was tuned from"
        raise UserError(f"--init {start.path}: {told}")
    if data.images.dtype != np.uint8:
        told = "holds floats, and bits per dimension are those of images of 8 bits; name a data file of such images"
        raise UserError(f"--nll {path}: {told}")
    data = data.as_classes_of(start.path, start.class_names) if config.class_cond else data
    data.check(config)
    config.num_samples = flags.get("num_samples", len(data.images))
    return config, data, start


@torch.no_grad()
def bound_terms(
    model: Callable, diffusion: Any, x0: Tensor, labels: Tensor | None, conditions: Told, samples: Tensor, tick: Callable = lambda: None
) -> dict[str, Tensor]:
    """What guided-diffusion's calc_bpd_loop returns, in double: total_bpd and prior_bpd (B), vb, xstart_mse and mse (B, T). samples (B): the images'
    numbers, by which their noise is drawn. tick is called after each timestep."""
    config, C = diffusion.config, diffusion.channels
    rows: dict[str, list[Tensor]] = {"vb": [], "xstart_mse": [], "mse": []}
    for step in range(diffusion.steps):
        t = torch.full((len(x0),), step, device=x0.device)
        level, shown = diffusion.level(t), diffusion.level(t).float32()
        x = shown.signal * x0 + shown.sigma * normals(config.seed, VAL_NOISE, step + 1, samples, tuple(x0.shape[1:]))
        out = model(x, shown.t.flatten(), labels, **conditions)
        x0_x, x0_out = level.x0_x[:, None, None, None], level.x0_out[:, None, None, None]
        xstart = x0_x * x.double() + x0_out * out[:, :C].double()
        away = (xstart.clamp(-1, 1) if config.clip_denoised else xstart) - x0
        rows["vb"].append(diffusion.bound(away / x0_out, out[:, C:], x0, t) / math.log(2))
        rows["xstart_mse"].append(away.square().flatten(1).mean(1))
        rows["mse"].append((level.signal / level.sigma) ** 2 * rows["xstart_mse"][-1])  # of the noise that goes with this x0
        tick()
    terms = {name: torch.stack(row, dim=1) for name, row in rows.items()}
    # The divergence of q(x_T | x0), whose variance is 1 - alpha_bar, from the standard normal
    alpha_bar = float(diffusion.alpha_bar[-1])
    nats = (alpha_bar * x0.double().square().flatten(1).mean(1) - alpha_bar - math.log1p(-alpha_bar)) / 2
    terms["prior_bpd"] = nats / math.log(2)
    return terms | {"total_bpd": terms["vb"].sum(1) + terms["prior_bpd"]}


def random_values(seed: int, step: int, like: Tensor, samples: Tensor) -> Tensor:
    """Words (B, C, H, W) for these images; elements are counted over (H, W, C), as those of normals()."""
    _, C, H, W = like.shape
    return random_words(seed, VAL_TIMESTEP, step, samples, C * H * W).view(-1, H, W, C).permute(0, 3, 1, 2)


def dequantised(seed: int, x0: Tensor, samples: Tensor) -> Tensor:
    """Images of 8 bits with noise that is uniform over the width of a value (2 / 255), in double."""
    u = (random_values(seed, DEQUANTISATION, x0, samples).double() + 0.5) * 2.0**-32
    return x0.double() + (u - 0.5) / 127.5


def ode_bits(
    model: Callable, diffusion: Any, x: Tensor, labels: Tensor | None, conditions: Told, samples: Tensor, tick: Callable = lambda: None
) -> Tensor:
    """(B) minus log2 of the density at x (B, C, H, W), over the number of values, in double, by the probability-flow ODE (Song et al. 2021, eq. 39) from
    sigma_min to sigma_max, with Hutchinson's estimate of its divergence (eq. 40). tick is called after each step."""
    config, count = diffusion.config, x[0].numel()
    signs = (2 * (random_values(config.seed, RADEMACHER, x, samples) & 1) - 1).double()

    def slope(x: Tensor, log_sigma: float) -> tuple[Tensor, Tensor]:
        """dx / dln(sigma) = x - D(x; sigma), and its divergence (B)."""
        level = diffusion.level_at(math.exp(log_sigma))
        signal, t = level.signal.item(), torch.full((len(x),), level.t.item(), device=x.device)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            denoised = level.x0_x.item() * signal * x + level.x0_out.item() * model((signal * x).float(), t, labels, **conditions)
            (product,) = torch.autograd.grad(denoised, x, signs)
        return (x - denoised).detach(), count - (product * signs).flatten(1).sum(1)

    start, end = math.log(config.sigma_min), math.log(config.sigma_max)
    h, volume = (end - start) / ODE_STEPS, torch.zeros(len(x), dtype=torch.float64, device=x.device)
    for step in range(ODE_STEPS):
        at = start + step * h
        s1, d1 = slope(x, at)
        s2, d2 = slope(x + h / 2 * s1, at + h / 2)
        s3, d3 = slope(x + h / 2 * s2, at + h / 2)
        s4, d4 = slope(x + h * s3, at + h)
        x, volume = x + h / 6 * (s1 + 2 * s2 + 2 * s3 + s4), volume + h / 6 * (d1 + 2 * d2 + 2 * d3 + d4)
        tick()
    energy = (x / config.sigma_max).square().flatten(1).mean(1) / 2
    return (energy + math.log(config.sigma_max) + math.log(2 * math.pi) / 2 - volume / count) / math.log(2)


def bits_per_dim(model: nn.Module, diffusion: Any, path: str, index: np.ndarray, read: Callable[..., Any], progress: bool = False) -> str:
    """What --nll prints. index: which images of the file; read(some of them): x0, labels and conditions, as train_unet.py's to_tensors."""
    from tqdm import tqdm

    config, is_bound = diffusion.config, diffusion.config.meaning("objective", {"ddpm": True, "edm": False, "flow": False})
    batches, totals, sums = np.split(index, range(config.batch_size, len(index), config.batch_size)), [], {}
    model.eval()
    with tqdm(total=len(batches) * (diffusion.steps if is_bound else ODE_STEPS), unit="step", disable=not progress) as bar:
        for part in batches:
            x0, labels, conditions = read(part)
            samples = torch.from_numpy(part).to(x0.device)
            if config.cond:
                conditions["cond"] = made_pictures(config, x0, 0, samples)
            if is_bound:
                terms = bound_terms(model, diffusion, x0, labels, conditions, samples, bar.update)
                totals.append(terms["total_bpd"])
                sums = {name: sums.get(name, 0) + term.sum(0).cpu().numpy() for name, term in terms.items()}
            else:
                bits = ode_bits(model, diffusion, dequantised(config.seed, x0, samples), labels, conditions, samples, bar.update)
                totals.append(bits + math.log2(127.5))  # a value is 1 / 127.5 wide
    bits = torch.cat(totals)
    error = f" +- {bits.std().item() / math.sqrt(len(bits)):.4f}" if len(bits) > 1 else ""
    told = f"{path}: {bits.mean().item():.4f}{error} bits/dim ({len(bits)} images; "
    if not is_bound:
        return told + f"probability-flow ODE in {ODE_STEPS} steps of order 4, Hutchinson's estimate, uniform dequantisation)"
    vb, mse, xstart_mse, prior = (sums[name] / len(bits) for name in ("vb", "mse", "xstart_mse", "prior_bpd"))
    lines = [told + f"variational bound, of which prior_bpd is {prior:.3g})", "           t          vb (sum)  mse (mean)  xstart_mse (mean)"]
    for t in np.array_split(np.arange(diffusion.steps), min(diffusion.steps, 10)):
        lines.append(f"{t[0]:6d} to {t[-1]:<6d}  {vb[t].sum():12.6f}  {mse[t].mean():10.6f}  {xstart_mse[t].mean():17.6f}")
    return "\n".join(lines)
