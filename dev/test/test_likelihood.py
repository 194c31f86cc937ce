"""--nll: bits per dimension. guided-diffusion's formulas, written down once more in float64; a normal distribution, whose density is known; the command."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TINY_MODEL, called, data_bytes, flags, make_images, random_weights, snapshot
from torch import Tensor, nn

import train_unet as twin
from common.config import make_config
from common.flags import Config, parse_flags
from common.likelihood import bits_per_dim, bound_terms, ode_bits
from common.model import build_model
from common.model_files import ModelFile, write_model
from common.random_numbers import VAL_NOISE, normals

torch.set_num_threads(1)

SHAPE = (3, 8, 8)
BASE: dict[str, Any] = dict(
    image_size=SHAPE[1:], num_channels=32, channel_mult=(1, 2), num_res_blocks=1, attention_resolutions=(4,), num_head_channels=32
)


# ----------------------------------------------------------------------------------------------------------------------
# the variational bound


def guided_bpd(config: Config, model: Callable, x0: np.ndarray, labels: Tensor | None, samples: Tensor) -> dict[str, np.ndarray]:
    """guided-diffusion's calc_bpd_loop, with its normal_kl, discretized_gaussian_log_likelihood and _prior_bpd, in float64."""
    T, flat = config.diffusion_steps, (1, 2, 3)
    if config.noise_schedule == "linear":
        betas = np.linspace(0.1 / T, 20 / T, T)
    else:
        bar = [math.cos((i / T + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(T + 1)]
        betas = np.array([min(1 - bar[i + 1] / bar[i], 0.999) for i in range(T)])
    ab = np.cumprod(1 - betas)
    ab_prev = np.append(1.0, ab[:-1])
    variance = betas * (1 - ab_prev) / (1 - ab)
    clipped = np.log(np.append(variance[1], variance[1:]))
    large = np.log(np.append(variance[1], betas[1:]))
    coef_x0, coef_xt = betas * np.sqrt(ab_prev) / (1 - ab), (1 - ab_prev) * np.sqrt(1 - betas) / (1 - ab)

    def normal_kl(mean1: Any, logvar1: Any, mean2: Any, logvar2: Any) -> Any:
        return 0.5 * (-1 + logvar2 - logvar1 + np.exp(logvar1 - logvar2) + (mean1 - mean2) ** 2 * np.exp(-logvar2))

    def cdf(x: np.ndarray) -> np.ndarray:
        return 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    rows: dict[str, list[np.ndarray]] = {"vb": [], "xstart_mse": [], "mse": []}
    for t in range(T):
        noise = normals(config.seed, VAL_NOISE, t + 1, samples, SHAPE).double().numpy()
        x_t = np.sqrt(ab[t]) * x0 + np.sqrt(1 - ab[t]) * noise
        told = torch.full((len(x0),), t * (1000 / T if config.rescale_timesteps else 1))
        with torch.no_grad():
            answer = model(torch.from_numpy(x_t).float(), told, labels).double().numpy()
        out, v = answer[:, :3], answer[:, 3:]
        if config.learn_sigma:
            log_var = (v + 1) / 2 * np.log(betas[t]) + (1 - v) / 2 * clipped[t]
        else:
            log_var = np.full_like(x0, (clipped if config.sigma_small else large)[t])
        signal, sigma = np.sqrt(ab[t]), np.sqrt(1 - ab[t])
        xstart = {"eps": (x_t - sigma * out) / signal, "x0": out, "v": signal * x_t - sigma * out}[config.predict]
        xstart = np.clip(xstart, -1, 1) if config.clip_denoised else xstart
        true_mean, mean = (coef_x0[t] * image + coef_xt[t] * x_t for image in (x0, xstart))
        if t > 0:
            vb = normal_kl(true_mean, clipped[t], mean, log_var)
        else:
            above, below = (cdf(np.exp(-log_var / 2) * (x0 - mean + width)) for width in (1 / 255, -1 / 255))
            p = np.where(x0 < -0.999, above, np.where(x0 > 0.999, 1 - below, above - below))
            vb = -np.log(p.clip(min=1e-12))
        eps = (x_t / signal - xstart) / np.sqrt(1 / ab[t] - 1)
        rows["vb"].append(vb.mean(flat) / np.log(2))
        rows["xstart_mse"].append(((xstart - x0) ** 2).mean(flat))
        rows["mse"].append(((eps - noise) ** 2).mean(flat))
    terms = {name: np.stack(row, axis=1) for name, row in rows.items()}
    terms["prior_bpd"] = normal_kl(np.sqrt(ab[-1]) * x0, np.log(1 - ab[-1]), 0.0, 0.0).mean(flat) / np.log(2)
    return terms | {"total_bpd": terms["vb"].sum(1) + terms["prior_bpd"]}


@pytest.mark.parametrize(
    "given",
    [
        dict(learn_sigma=True, diffusion_steps=60),
        dict(learn_sigma=True, predict="v", noise_schedule="cosine", diffusion_steps=40, rescale_timesteps=True, class_cond=True, num_classes=3),
        dict(diffusion_steps=60, noise_schedule="cosine"),
        dict(sigma_small=True, predict="x0", diffusion_steps=50, clip_denoised=False, seed=3),
    ],
)
def test_bound_is_that_of_guided_diffusion(given: dict[str, Any]) -> None:
    config = Config(**BASE, **given)
    model = build_model(config, random_weights(config))
    images = np.random.default_rng(0).integers(0, 256, (3, *SHAPE)).astype(np.uint8)
    images[0, :, :2], images[1, :, :2] = 0, 255  # at the ends the intervals are open
    x0, samples = torch.from_numpy(images).float() / 127.5 - 1, torch.tensor([4, 0, 9])
    labels = torch.tensor([2, 0, 1]) if config.class_cond else None
    ours = bound_terms(model, twin.Diffusion(config), x0, labels, {}, samples)
    theirs = guided_bpd(config, model, x0.double().numpy(), labels, samples)
    assert ours.keys() == theirs.keys()
    for name, term in theirs.items():
        np.testing.assert_allclose(ours[name].numpy(), term, rtol=1e-5, err_msg=name)


# ----------------------------------------------------------------------------------------------------------------------
# the probability-flow ODE


class Normal(nn.Module):
    """The network of an edm or flow model that knows its data exactly: normal, with this mean (D) and covariance (D, D)."""

    def __init__(self, config: Config, mean: Tensor, covariance: Tensor):
        super().__init__()
        self.config, self.mean, self.covariance = config, mean, covariance

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        told, x = t[0].double().item(), x.double()
        if self.config.objective == "edm":  # Karras et al. 2022, table 1
            sigma, sd = math.exp(4 * told), self.config.sigma_data
            total = math.sqrt(sigma**2 + sd**2)
            noisy = total * x
        else:
            time = told / 1000
            sigma = time / (1 - time)
            noisy = x / (1 - time)
        gain = self.covariance @ torch.linalg.inv(self.covariance + sigma**2 * torch.eye(len(self.mean)))
        denoised = (self.mean + (noisy.flatten(1) - self.mean) @ gain.T).view_as(x)
        if self.config.objective == "edm":
            return ((denoised - sd**2 / total**2 * noisy) / (sigma * sd / total)).float()
        return ((x - denoised) / time).float()


def normal_data(correlated: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """mean, covariance, images (400, 48), and the bits of each by the known density."""
    draws, n = torch.Generator().manual_seed(0), 48
    mean, s = torch.rand(n, generator=draws).double() - 0.5, 0.1 + 0.3 * torch.rand(n, generator=draws).double()
    turn = torch.linalg.qr(torch.randn(n, n, generator=draws).double())[0] if correlated else torch.eye(n).double()
    covariance = turn @ torch.diag(s**2) @ turn.T
    x = mean + torch.randn(400, n, generator=draws).double() @ torch.linalg.cholesky(covariance).T
    return mean, covariance, x, -torch.distributions.MultivariateNormal(mean, covariance).log_prob(x) / n / math.log(2)


@pytest.mark.parametrize("objective", ["edm", "flow"])
def test_density_of_a_normal_distribution(objective: str) -> None:
    """Where pixels are independent Hutchinson's estimate is the trace itself, so each image's density comes out (but for what is left of its mean at
    sigma_max, about 1e-3); where they are not, it is right on average."""
    config = Config(objective=objective, image_size=(4, 4))
    diffusion = twin.Diffusion(config)
    mean, covariance, x, bits = normal_data(correlated=False)
    found = ode_bits(Normal(config, mean, covariance), diffusion, x.view(-1, 3, 4, 4), None, {}, torch.arange(len(x)))
    assert abs(found.mean() - bits.mean()) < 2e-4 and (found - bits).abs().max() < 4e-3
    mean, covariance, x, bits = normal_data(correlated=True)
    error = ode_bits(Normal(config, mean, covariance), diffusion, x.view(-1, 3, 4, 4), None, {}, torch.arange(len(x))) - bits
    assert abs(error.mean()) < 4 * error.std() / len(x) ** 0.5 and 1e-3 < error.std() < 0.5


@pytest.mark.parametrize("objective", ["edm", "flow"])
def test_bits_of_images_of_a_normal_distribution(objective: str) -> None:
    """Of 8 bits: what is printed is the entropy of rounded normals, whatever the batch size, each time."""
    config = Config(objective=objective, image_size=(4, 4), in_channels=1, batch_size=300)
    mean, s = torch.linspace(-0.3, 0.3, 16).double(), torch.linspace(0.1, 0.25, 16).double()
    images = (mean + s * torch.randn(1000, 16, generator=torch.Generator().manual_seed(1))).view(-1, 1, 4, 4)
    pixels = ((images + 1) * 127.5).round().clamp(0, 255)
    normal = torch.distributions.Normal(mean.view(4, 4), s.view(4, 4))
    x0 = pixels.double() / 127.5 - 1
    known = -(normal.cdf(x0 + 1 / 255) - normal.cdf(x0 - 1 / 255)).log2().mean().item()
    model, printed = Normal(config, mean, torch.diag(s**2)), []
    for config.batch_size in (300, 1000):
        diffusion = twin.Diffusion(config)
        printed.append(bits_per_dim(model, diffusion, "F.bin", np.arange(1000), lambda index: (x0[torch.from_numpy(index)].float(), None, {})))
    assert printed[0] == printed[1]
    assert abs(float(re.match(r"F\.bin: ([\d.]+) \+- 0\.\d{4} bits/dim \(1000 images; probability-flow ODE ", printed[0])[1]) - known) < 1e-3


# ----------------------------------------------------------------------------------------------------------------------
# the command


def write_tiny(path: Path, weights: np.ndarray | None = None, **more: Any) -> Config:
    """A model file of random weights; given weights are its average, and all of its weights 0."""
    words = flags(TINY_MODEL, "--preset fashion32 --image_size 8 --in_channels 1 --batch_size 5 --use_scale_shift_norm True --class_cond False")
    config = make_config(parse_flags(words, twin.FLAGS) | more)
    some = random_weights(config)
    write_model(str(path), ModelFile(config, some if weights is None else 0 * some, weights))
    return config


def nll(*words: object) -> Any:
    return called(lambda: twin.run_program("train_unet", twin.run), "train_unet.py", "--device", "cpu", "--nll", *words)


def test_command(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The averaged weights, labels of the file, all images or some of them that are spread over it; it writes nothing."""
    monkeypatch.chdir(tmp_path)
    more: dict[str, Any] = dict(learn_sigma=True, diffusion_steps=25, class_cond=True, num_classes=3)
    config = write_tiny(tmp_path / "model.bin", **more)
    write_tiny(tmp_path / "averaged.bin", random_weights(config), **more)
    before = snapshot(tmp_path)
    done = nll(data, "--init", "averaged.bin")
    assert done.returncode == 0 and not done.stderr and snapshot(tmp_path) == before, done.stderr
    assert (
        done.stdout == nll(data, "--init", "model.bin", "--batch_size", 24).stdout != nll(data, "--init", "averaged.bin", "--use_ema", "False").stdout
    )
    assert all(re.fullmatch(r" +\d+ to \d+ +\d+\.\d+ +\d+\.\d+ +\d+\.\d+", line) for line in done.stdout.splitlines()[2:])

    x0, samples = torch.from_numpy(make_images()).float() / 127.5 - 1, torch.arange(24)
    terms = bound_terms(build_model(config, random_weights(config)), twin.Diffusion(config), x0, samples % 3, {}, samples)
    total, prior = terms["total_bpd"], terms["prior_bpd"].mean()
    first = f"{data}: {total.mean():.4f} +- {total.std() / 24**0.5:.4f} bits/dim (24 images; variational bound, of which prior_bpd is {prior:.3g})"
    assert done.stdout.splitlines()[0] == first
    table = np.array([line.split()[3:] for line in done.stdout.splitlines()[2:]], np.float64)
    assert len(table) == 10 and abs(table[:, 0].sum() + prior - total.mean()) < 1e-4
    spread = nll(data, "--init", "model.bin", "--num_samples", 3).stdout
    assert f": {total[[0, 8, 16]].mean():.4f} +- " in spread and "(3 images; " in spread
    assert " +- " not in nll(data, "--init", "model.bin", "--num_samples", 1).stdout


@pytest.mark.parametrize(
    "more", [dict(objective="edm"), dict(objective="flow"), dict(cond="lowres:2", diffusion_steps=25), dict(patch_size=2, objective="edm")]
)
def test_command_with_other_models(data: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    write_tiny(tmp_path / "model.bin", **more, **({"attention_resolutions": ()} if "patch_size" in more else {}))
    done = nll(data, "--init", tmp_path / "model.bin", "--num_samples", 2)
    told = (
        "probability-flow ODE in 64 steps of order 4, Hutchinson's estimate, uniform dequantisation" if "objective" in more else "variational bound"
    )
    assert done.returncode == 0 and re.match(rf".*: -?\d+\.\d+ \+- \d+\.\d+ bits/dim \(2 images; {told}", done.stdout), done


def test_mistakes_are_sentences(data: Path, tmp_path: Path) -> None:
    write_tiny(tmp_path / "model.bin")
    write_tiny(tmp_path / "ect.bin", objective="ect")
    write_tiny(tmp_path / "classes.bin", class_cond=True, num_classes=2)
    (tmp_path / "floats.bin").write_bytes(data_bytes(np.zeros((2, 1, 8, 8), np.float32)))
    (tmp_path / "large.bin").write_bytes(data_bytes(make_images(2, 1, 16, 16)))
    for words, told in (
        ([data], "needs --init FILE"),
        (["", "--init", tmp_path / "model.bin"], "--nll: is empty"),
        ([tmp_path / "none.bin", "--init", tmp_path / "model.bin"], "none.bin"),
        ([tmp_path / "floats.bin", "--init", tmp_path / "model.bin"], "floats.bin: holds floats"),
        ([tmp_path / "large.bin", "--init", tmp_path / "model.bin"], "1x16x16"),
        ([data, "--init", tmp_path / "ect.bin"], "--objective ect"),
        ([data, "--init", tmp_path / "classes.bin"], "has 3 classes"),
    ):
        done = nll(*words)
        assert done.returncode == 1 and told in done.stderr and done.stderr.count("\n") == 1 and not done.stdout, done
