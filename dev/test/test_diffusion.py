"""Objectives, samplers and conditioning: parity with PyTorch, formulas worked by hand, and a mixture of normals whose samples are known."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    TINY,
    column,
    data_bytes,
    flags,
    make_images,
    model_name,
    random_weights,
    read_checkpoint,
    read_log,
    read_samples,
    seal_model,
    with_slot,
)
from test_training import QUIET, Double, check_sampling, check_training, command_line, quarter_tolerance, write_parity_files

import train_unet as twin
from common import model_files
from common.config import make_config
from common.model import GroupNorm32

sys.path.insert(0, str(ROOT / "dev/pairs"))
torch.set_num_threads(1)

PLAIN = dict(channel_mult=(1, 2), attention_resolutions=(4,), num_head_channels=32)
CLASSES = dict(class_cond=True, num_classes=3, class_dropout=0.3)
OBJECTIVES = {
    "eps, min-SNR": dict(min_snr_gamma=5.0, noise_schedule="cosine"),
    "x0, min-SNR": dict(predict="x0", min_snr_gamma=5.0),
    "v, rescaled t": dict(predict="v", rescale_timesteps=True, diffusion_steps=300, noise_schedule="cosine"),
    "v, min-SNR, class dropout": dict(predict="v", min_snr_gamma=2.0, **CLASSES, microbatch=2),
    "hybrid, few t": dict(learn_sigma=True, diffusion_steps=50, noise_schedule="cosine", vlb_weight=0.05),
    "hybrid, v": dict(learn_sigma=True, predict="v", vlb_weight=0.01),
    "bound alone": dict(learn_sigma=True, use_kl=True, diffusion_steps=50, predict="v"),
    "bound, fixed variance": dict(use_kl=True, sigma_small=True, diffusion_steps=50),
    "edm": dict(objective="edm"),
    "edm, class dropout": dict(objective="edm", sigma_data=0.3, P_mean=-0.8, P_std=1.5, **CLASSES, microbatch=1, random_flip=True),
    "flow": dict(objective="flow"),
    "flow, logit-normal, class dropout": dict(objective="flow", t_mean=-0.4, t_std=1.3, **CLASSES, microbatch=2, random_flip=True),
    "ect": dict(objective="ect"),
    "ect of a flow, classes, dropout": dict(
        objective="ect", ect_frame="flow", ect_weight="snr", ect_c=0.06, ect_q=4.0, ect_d=6, **CLASSES, dropout=0.2, microbatch=2, random_flip=True
    ),
}


def test_one_image_of_one_pixel_in_the_twin() -> None:
    """Where each channel is a group of its own, torch's layer refuses to train; the norm of one value is its bias."""
    norm, x = GroupNorm32(32, 32), torch.randn(1, 32, 1, 1, requires_grad=True)
    torch.nn.init.normal_(norm.bias)
    out = norm(x)
    rounding = x.abs().max().item() * 2**-23 / norm.eps**0.5  # of x less its mean, which is divided by the root of eps
    torch.testing.assert_close(out.flatten(), norm.bias, rtol=0, atol=rounding)
    out.sum().backward()
    assert torch.isfinite(x.grad).all()


# Left out by `make test`: what others have in them, too.
CONTAINED = {"eps, min-SNR", "v, min-SNR, class dropout", "hybrid, v", "bound, fixed variance", "edm", "flow"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in CONTAINED)) for name in OBJECTIVES])
def test_objectives_follow_pytorch(run: Callable, tmp_path: Path, name: str) -> None:
    """Losses of 20 steps and the gradient of every parameter."""
    check_training(run, tmp_path, (3, 8, 12), PLAIN | OBJECTIVES[name])


@pytest.mark.parametrize("learned", [pytest.param(False, marks=pytest.mark.long), True])
def test_bound_step_by_step(run: Callable, tmp_path: Path, learned: bool) -> None:
    """The bound alone, with x_0 predicted: 250 / ln 2 times a squared error that is magnified a thousandfold at small t. From the same weights at
    each of 20 steps (a run of its own would magnify rounding: AdamW's first steps are signs of gradients) both programs are within 2e-6 of float64:
    fp32 outputs of a few layers are 3e-7 off, and the loss is quadratic in them.
    """
    settings = PLAIN | dict(use_kl=True, predict="x0", rescale_timesteps=True, diffusion_steps=250, learn_sigma=learned)
    config, data = write_parity_files(tmp_path, (3, 8, 12), settings)
    run(flags(command_line(config), QUIET, "--lr 0"))
    model, diffusion = twin.build_model(config, random_weights(config, 4)), twin.Diffusion(config)
    exact = Double(twin.build_model(config, random_weights(config, 4)))
    for step, loss in enumerate(column(tmp_path / "out", "loss")):
        batch = twin.training_batch(config, data, step)
        with torch.no_grad():
            expected = diffusion.losses(exact, *batch).mean().item()
            assert diffusion.losses(model, *batch).mean().item() == pytest.approx(expected, rel=2e-6)
        assert loss == pytest.approx(expected, rel=2e-6), step


@pytest.mark.parametrize("width", [4, 8, 12])
def test_ect_step_by_step(run: Callable, tmp_path: Path, width: int) -> None:
    """The loss of each quarter of t against float64, from the same weights at each of 20 steps. What float32's rounding may do is in quarter_tolerance."""
    config, data = write_parity_files(tmp_path, (3, 8, width), PLAIN | OBJECTIVES["ect"])
    run(flags(command_line(config), QUIET, "--lr 0"))
    exact, diffusion = Double(twin.build_model(config, random_weights(config, 4))), twin.Diffusion(config)
    for step, row in enumerate(read_log(tmp_path / "out")):
        batch = twin.training_batch(config, data, step)
        with torch.no_grad():
            losses = diffusion.losses(exact, *batch, step=step).tolist()
        quarters = [[x for x, q in zip(losses, diffusion.quarters(batch[1])) if q == k] for k in range(4)]
        means = [sum(quarter) / len(quarter) if quarter else None for quarter in quarters]
        for k, mean in enumerate(means):
            assert mean is None or float(row[f"loss_q{k}"]) == pytest.approx(mean, rel=quarter_tolerance(config, mean, means)), (step, k)


def test_edm_by_hand(run: Callable, tmp_path: Path) -> None:
    """One step's loss and gradient from table 1 and eq. 2 of Karras et al. 2022, around the bare network F."""
    config, data = write_parity_files(tmp_path, (1, 8, 8), PLAIN | dict(objective="edm", sigma_data=0.4, P_mean=-1.0, P_std=1.1))
    run(flags(command_line(config), QUIET, "--max_steps 1"))
    F = twin.build_model(config, random_weights(config, 4)).double()
    order, samples = twin.data_order(11, 0, 4, 13), torch.arange(4)
    y = torch.from_numpy(data.images[order].astype(np.float64)) / 127.5 - 1
    words = twin.random_words(11, twin.TIMESTEP, 0, samples, 2).numpy()
    u, v = ((words >> 9) + 0.5).T / 2**23
    normal = np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v)
    P_mean, P_std, sigma_data = (float(np.float32(value)) for value in (-1.0, 1.1, 0.4))
    sigma = torch.from_numpy(np.exp(normal * P_std + P_mean)).view(4, 1, 1, 1)
    n = sigma * twin.normals(11, twin.NOISE, 0, samples, (1, 8, 8)).double()
    weight = (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2
    c_skip, c_out = sigma_data**2 / (sigma**2 + sigma_data**2), sigma * sigma_data / torch.sqrt(sigma**2 + sigma_data**2)
    c_in, c_noise = 1 / torch.sqrt(sigma**2 + sigma_data**2), torch.log(sigma) / 4
    D = c_skip * (y + n) + c_out * F(c_in * (y + n), c_noise.flatten())
    loss = (weight * (D - y) ** 2).mean()
    loss.backward()
    assert column(tmp_path / "out", "loss")[0] == pytest.approx(loss.item(), rel=1e-5)
    gradient = torch.cat([p.grad.flatten() for p in F.parameters()])
    norm = torch.linalg.vector_norm(gradient)
    ours = torch.from_numpy(read_checkpoint(tmp_path / "out" / model_name(1)).m.copy()).double() / (1 - float(np.float32(0.9)))
    assert column(tmp_path / "out", "grad_norm")[0] == pytest.approx(norm.item(), rel=1e-5)
    assert torch.linalg.vector_norm(ours - gradient * min(1, config.grad_clip / norm)) < 1e-4 * torch.linalg.vector_norm(ours)
    quarter = np.searchsorted([-0.67448975, 0, 0.67448975], normal)
    row = read_log(tmp_path / "out")[0]
    assert [row[f"loss_q{q}"] != "" for q in range(4)] == [bool((quarter == q).any()) for q in range(4)]


@pytest.mark.parametrize("t_std", [pytest.param(0.0, marks=pytest.mark.long), 0.8])
def test_flow_by_the_book(run: Callable, tmp_path: Path, t_std: float) -> None:
    """Rectified flow as anyone would write it: the losses of 20 steps, and Euler's method from t to 0 in equal steps."""
    config, data = write_parity_files(tmp_path, (1, 8, 8), PLAIN | dict(objective="flow", t_mean=0.3, t_std=t_std))
    model = twin.build_model(config, random_weights(config, 4))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(config.adam_beta1, config.adam_beta2), weight_decay=config.weight_decay)
    run(flags(command_line(config), QUIET))
    for step, logged in enumerate(column(tmp_path / "out", "loss")):
        order, samples = twin.data_order(11, step * 4, 4, 13), torch.arange(4)
        x0 = torch.from_numpy(data.images[order].astype(np.float32)) / 127.5 - 1
        words = twin.random_words(11, twin.TIMESTEP, step, samples, 2)
        t = (words[:, 0] + 0.5) / 2**32 if t_std == 0 else torch.sigmoid(config.t_mean + config.t_std * twin.to_normals(words)[:, 0])
        t = t.float().view(4, 1, 1, 1)
        noise = twin.normals(11, twin.NOISE, step, samples, (1, 8, 8))
        velocity = model((1 - t) * x0 + t * noise, 1000 * t.flatten())
        loss = torch.nn.functional.mse_loss(velocity, noise - x0)
        assert logged == pytest.approx(loss.item(), rel=1e-3), step
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip)
        for group in optimizer.param_groups:
            group["lr"] = twin.learning_rate(config, step)
        optimizer.step()

    run("--init init.bin --sample 3 --sampler euler --timestep_respacing 7 --sigma_max 99 --clip_denoised False --seed 2 --output s.bin".split())
    model, x = twin.build_model(config, random_weights(config, 4)), 0.99 * twin.normals(2, twin.SAMPLE_START, 0, torch.arange(3), (1, 8, 8))
    times = torch.linspace(0.99, 0, 8)
    with torch.no_grad():
        for t, following in zip(times, times[1:]):
            x = x + (following - t) * model(x, (1000 * t).expand(3))
    assert np.abs(read_samples(tmp_path / "s.bin") - x.numpy()).max() < 1e-4


def test_guided_diffusions_names(run: Callable, data: Path, tmp_path: Path) -> None:
    """--predict_xstart, --rescale_learned_sigmas; and what they say holds for the next run that starts from the file."""
    given = flags(TINY, "--data_file", data, "--max_steps 3 --diffusion_steps 50 --learn_sigma True")
    pairs = {
        "--predict_xstart True": "--predict x0",
        "--rescale_learned_sigmas False": "--vlb_weight 0.02",
        "--rescale_learned_sigmas True": "--vlb_weight 0.001",
    }
    for i, (theirs, ours) in enumerate(pairs.items()):
        for name, words in (("theirs", theirs), ("ours", ours)):
            run(flags(given, words, "--output_dir", f"{name}{i}"))
        assert (tmp_path / f"theirs{i}" / model_name(3)).read_bytes() == (tmp_path / f"ours{i}" / model_name(3)).read_bytes()
        twins = make_config(twin.parse_flags(flags("--preset fashion32 --data_file x --diffusion_steps 50 --learn_sigma True", theirs), twin.FLAGS))
        expected = twin.read_model(str(tmp_path / f"ours{i}" / model_name(3))).config
        assert (twins.predict, twins.vlb_weight) == (expected.predict, expected.vlb_weight)
    with pytest.raises(twin.UserError, match="predict"):
        make_config(dict(preset="fashion32", predict="eps"), None, twin.read_model(str(tmp_path / "ours0" / model_name(3))))


def test_older_files_mean_what_they_did(run: Callable, data: Path, tmp_path: Path) -> None:
    """With zeros in the slots of the objective, as before there was a choice: eps, squared error, nothing for a variance to learn from."""
    given = flags(TINY, "--data_file", data, "--learn_sigma True --class_cond True --vlb_weight 0")
    run([*given, "--max_steps", 6, "--output_dir", "whole"])
    run([*given, "--max_steps", 3, "--output_dir", "part"])
    path = tmp_path / "part" / model_name(3)
    assert not np.frombuffer(path.read_bytes()[:1024], "<i4")[43:64].any()
    run(["--resume_checkpoint", f"part/{model_name(3)}", "--max_steps", 6, "--output_dir", "resumed", *QUIET])
    assert read_log(tmp_path / "resumed") == read_log(tmp_path / "whole")[3:]
    for sampler in ("ddpm", "ddim"):
        run(["--sample", 2, "--init", path, "--sampler", sampler, "--timestep_respacing", 5, "--eta", 0, "--output", "s.bin"])
        config = make_config(dict(sampler=sampler, timestep_respacing="5", eta=0.0), None, file := twin.read_model(str(path)))
        assert config.predict == "eps" and not config.learned_variance
        expected = twin.draw(twin.build_model(config, file.ema), dataclasses.replace(config, noise_seed=0), 2)
        assert np.abs(read_samples(tmp_path / "s.bin") - expected.numpy()).max() < 1e-3
    twin.write_model(str(tmp_path / "a.pt"), file)
    saved = torch.load(tmp_path / "a.pt", weights_only=True)
    saved["config"] = {
        name: value for name, value in saved["config"].items() if name not in model_files.SAVED_FLAGS[model_files.SAVED_FLAGS.index("objective") :]
    }
    torch.save(saved, tmp_path / "older.pt")
    assert twin.read_model(str(tmp_path / "older.pt")).config == file.config
    # what a slot can't mean is refused, by either program
    for slot, value in ((43, 4), (44, 3), (48, 2), (51, 1), (54, 1), (56, 9), (57, 1), (107, 1)):
        (tmp_path / "bad.bin").write_bytes(seal_model(with_slot(path.read_bytes(), slot, value)))
        told = run(["--resume_checkpoint", "bad.bin", "--output_dir", "bad"], code=1).err
        assert "bad.bin" in told and told.count("\n") == 1
        with pytest.raises(model_files.ModelFileError, match=r"bad\.bin"):
            twin.read_model(str(tmp_path / "bad.bin"))


# ----------------------------------------------------------------------------------------------------------------------
# samplers

MODELS = {
    "eps": dict(noise_schedule="cosine"),
    "x0": dict(predict="x0"),
    "v": dict(predict="v", rescale_timesteps=True, diffusion_steps=400),
    "learned": dict(learn_sigma=True),
    "edm": dict(objective="edm"),
    "classes": CLASSES,
    "edm, classes": dict(objective="edm", **CLASSES),
    "flow, classes": dict(objective="flow", **CLASSES),
    "learned, classes": dict(learn_sigma=True, predict="v", **CLASSES),
}
SAMPLING = [
    ("eps", "--sampler dpmpp_2m --timestep_respacing 6 --sigma_max 20 --rho 3"),
    ("eps", "--sampler ddpm --timestep_respacing 6 --sigma_small True --dynamic_threshold 0.9"),
    ("x0", "--sampler euler --timestep_respacing 7 --S_churn 3"),
    ("v", "--sampler ddim --timestep_respacing 2,3,1 --eta 0.5 --dynamic_threshold 0.75"),
    ("v", "--sampler heun --timestep_respacing 6 --S_churn 4 --S_min 0.05 --S_max 30 --S_noise 1.003 --clip_denoised False"),
    ("learned", "--sampler ddpm --timestep_respacing 8"),
    ("learned", "--sampler dpmpp_2m --timestep_respacing 5"),
    ("edm", "--sampler heun --timestep_respacing 6 --S_churn 2 --sigma_max 40"),
    ("edm", "--sampler dpmpp_2m --timestep_respacing 7 --sigma_min 0.01"),
    ("edm", "--sampler euler --timestep_respacing 5 --rho 0.1"),
    ("edm", "--sampler ddim --timestep_respacing 6 --eta 1 --noise_seed 12345678901"),
    ("classes", "--sampler ddpm --timestep_respacing 5 --classes 2,0 --guidance_scale 2.5"),
    ("edm, classes", "--sampler heun --timestep_respacing 5 --guidance_scale 1.5 --dynamic_threshold 0.95"),
    ("edm, classes", "--sampler heun --timestep_respacing 6 --S_churn 2 --guidance_scale 3 --guidance_min 0.2 --guidance_max 10"),
    ("learned, classes", "--sampler ddpm --timestep_respacing 5 --guidance_scale 3 --noise_seed 9"),
    ("flow, classes", "--sampler dpmpp_2m --timestep_respacing 7 --sigma_max 500 --dynamic_threshold 0.95"),
    ("edm, classes", "--sampler consistency --timestep_respacing 4 --mid_t 0.5 --guidance_scale 1.5"),
    ("flow, classes", "--sampler consistency --timestep_respacing 3"),
    ("eps", "--sampler consistency --timestep_respacing 2"),
]
# Left out by `make test`: what others have in them, too.
MORE_SAMPLING = [
    ("eps", "--sampler heun --timestep_respacing 5"),
    ("x0", "--sampler ddpm --timestep_respacing ddim10"),
    ("edm", "--sampler euler --timestep_respacing 6"),
    ("edm", "--sampler ddpm --timestep_respacing 6"),
    ("flow, classes", "--sampler euler --timestep_respacing 6"),
    ("flow, classes", "--sampler ddpm --timestep_respacing 6 --classes 1"),
    ("flow, classes", "--sampler heun --timestep_respacing 5 --guidance_scale 1.5 --S_churn 2"),
    ("classes", "--sampler ddim --timestep_respacing 5 --eta 0 --classes 1 --guidance_scale 0"),
]


@pytest.mark.parametrize("name, sampler", [*SAMPLING, *(pytest.param(*row, marks=pytest.mark.long) for row in MORE_SAMPLING)], ids=str)
def test_samplers_follow_pytorch(run: Callable, tmp_path: Path, name: str, sampler: str) -> None:
    """The same images from the same weights and seed, with every sampler and every kind of model."""
    settings = PLAIN | MODELS[name]
    if "--sigma_small True" in sampler:  # the model file says so
        settings, sampler = settings | dict(sigma_small=True), sampler.replace(" --sigma_small True", "")
    check_sampling(run, tmp_path, (3, 8, 12), settings, sampler)


@pytest.mark.parametrize("sigma_max", ["80", "1e4", "1e6"])
@pytest.mark.parametrize("sampler", ["euler", "heun", "dpmpp_2m", "euler --S_churn 2"])
def test_a_large_sigma_max_costs_no_precision(run: Callable, tmp_path: Path, sampler: str, sigma_max: str) -> None:
    """Of a flow, whose sigma falls far in one step. The images of both programs, and those that float64 makes of the same noise, differ by what the
    network's own float32 differs, some 10 times 2^-24 an evaluation. heun's correction counts the differences of its answers h / (2 sigma') times."""
    config, _ = write_parity_files(tmp_path, (3, 8, 12), PLAIN | dict(objective="flow"))
    words = f"--sampler {sampler} --timestep_respacing 6 --sigma_max {sigma_max}".split()
    run(["--init", "init.bin", "--sample", 3, "--seed", 3, "--output", "s.bin", *words])
    config = dataclasses.replace(config, seed=3, **twin.parse_flags(words, twin.FLAGS, ""))
    model = twin.build_model(config, random_weights(config, 4))
    single, double = twin.draw(model, config, 3).numpy(), twin.draw(Double(model), config, 3).numpy()
    route = twin.noise_route(config, twin.Diffusion(config))
    counted = 1 + (route[0].sigma / (2 * route[1].sigma) if sampler == "heun" else 0)
    assert np.abs(single - double).max() < counted * 60 * 2**-24
    assert np.abs(read_samples(tmp_path / "s.bin") - double).max() < counted * 60 * 2**-24


# Data from normal distributions: E[x_0 | x] is known, and in one dimension also where the deterministic samplers' path from any x ends: at the same
# quantile, since the probability flow keeps the order of its points.
WEIGHT, DEVIATION = np.float32([0.3, 0.5, 0.2]), np.float32([0.25, 0.35, 0.1])
MEANS = {1: np.float32([[-0.6], [0.5], [0.1]]), 2: np.float32([[-0.6, -0.2], [0.5, 0.6], [0.1, -0.9]])}


class ExactNetwork(torch.nn.Module):
    """Answers as a perfect network of config would, each n values of an image being one draw from the mixture. Sees its input and t alone."""

    def __init__(self, config: object, n: int):
        super().__init__()
        self.parameter, self.config, self.n = torch.nn.Parameter(torch.zeros(1)), config, n
        steps = config.diffusion_steps
        scale = 1000 / steps
        alpha_bar = np.cumprod(1 - np.linspace(1e-4 * scale, 0.02 * scale, steps))
        self.log_sigmas = 0.5 * np.log(1 / alpha_bar - 1)

    def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        told, edm, flow, data = t[0].double().item(), self.config.objective == "edm", self.config.objective == "flow", self.config.sigma_data
        sigma = math.exp(4 * told if edm else np.interp(told, np.arange(len(self.log_sigmas)), self.log_sigmas))
        if flow:
            sigma = told / (1000 - told)
        noisy = x.double() * (1 + sigma if flow else math.hypot(sigma, data if edm else 1))
        points = noisy.reshape(-1, 1, self.n)  # (draws, 1, n) beside (components, n)
        weight, mean, own = (torch.from_numpy(a).double() for a in (WEIGHT, MEANS[self.n], DEVIATION**2))
        variance = own + sigma**2
        log_p = weight.log() - self.n / 2 * variance.log() - 0.5 * (points - mean).square().sum(-1) / variance
        x0 = (log_p.softmax(-1)[..., None] * (mean + (own / variance)[:, None] * (points - mean))).sum(1).reshape(x.shape)
        if edm:
            return (x0 - data**2 / (sigma**2 + data**2) * noisy) * math.hypot(sigma, data) / (sigma * data)
        eps, signal = (noisy - x0) / sigma, 1 / math.hypot(sigma, 1)
        if flow:
            return eps - x0
        return {"eps": eps, "x0": x0, "v": signal * eps - signal * sigma * x0}[self.config.predict]


def mixture_cdf(x: np.ndarray, sigma: float) -> np.ndarray:
    z = (x[..., None] - MEANS[1][:, 0].astype(np.float64)) / np.sqrt(DEVIATION.astype(np.float64) ** 2 + sigma**2)
    return (0.5 * torch.erfc(torch.from_numpy(-z / math.sqrt(2))).numpy() * WEIGHT.astype(np.float64)).sum(-1)


def end_of_path(x: np.ndarray, sigma: float) -> np.ndarray:
    """Where the probability flow takes x from sigma to 0, in one dimension (by bisection)."""
    quantile, low, high = mixture_cdf(x, sigma), np.full_like(x, -4.0), np.full_like(x, 4.0)
    for _ in range(60):
        middle = (low + high) / 2
        below = mixture_cdf(middle, 0) < quantile
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return low


def draw_mixture(program: str, B: int, n: int, settings: dict) -> tuple[np.ndarray, np.ndarray, object]:
    """Samples (B, n), the normals (B, n) that they start from, and the twin's configuration."""
    shape = dict(image_size=(4, 4), in_channels=1, channel_mult=(1,), attention_resolutions=(), noise_schedule="linear", eta=0.0)
    config = make_config(shape | dict(clip_denoised=False, seed=3) | settings)
    if program == "python":
        images = B * n // 16
        samples = twin.draw(ExactNetwork(config, n), dataclasses.replace(config, batch_size=images), images).numpy()
        noise = twin.normals(3, twin.SAMPLE_START, 0, torch.arange(images), (1, 4, 4)).numpy()
        return samples.reshape(B, n), noise.reshape(B, n), config
    import harness
    import sampler_step

    words = " ".join(f"{name}={twin.format_value(name, getattr(config, name))}" for name in [*settings, "noise_schedule", "eta"])
    mixture = {"weight": WEIGHT, "mean": MEANS[n], "deviation": DEVIATION}
    out, _ = harness.run(sampler_step.PAIR, {"flags": words, "seed": 3, "B": B, **mixture, "precision": "fp32"})
    return out["samples"].astype(np.float64), out["noise"].astype(np.float64), config


@pytest.fixture(scope="module", autouse=True)
def pair_is_built() -> None:
    import harness

    harness.build("sampler_step")  # one process at a time


KINDS = {"edm": dict(objective="edm"), "flow": dict(objective="flow"), "eps": {}, "v": dict(predict="v"), "x0": dict(predict="x0")}


# Both programs draw the same images (test_samplers_follow_pytorch): `make test` asks one of them whether these are right.
PROGRAMS = ["c++", pytest.param("python", marks=pytest.mark.long)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampler, order", [("ddim", 1), ("euler", 1), ("heun", 2), ("dpmpp_2m", 2)])
@pytest.mark.parametrize("program", PROGRAMS)
def test_order_of_convergence(program: str, sampler: str, order: int, kind: str) -> None:
    """The distance to where the exact path ends falls as steps^-order, with every kind of model."""
    errors, steps = [], [24, 48, 96]
    for count in steps:
        settings = KINDS[kind] | dict(sampler=sampler, timestep_respacing=str(count), sigma_min=0.005, sigma_max=20.0)
        samples, noise, config = draw_mixture(program, 256, 1, settings)
        # ddim starts from the model's last t, with x_t of variance 1
        last = math.exp(ExactNetwork(config, 1).log_sigmas[-1])
        sigma, start = (last, math.hypot(1, last)) if sampler == "ddim" else (20.0, 20.0)
        errors.append(np.sqrt(np.mean((samples - end_of_path(start * noise.astype(np.float64), sigma)) ** 2)))
    measured = np.log2(np.array(errors[:-1]) / errors[1:])
    assert errors[-1] < (2e-2 if order == 1 else 1e-3), errors
    assert np.abs(measured - order).max() < (0.15 if order == 1 else 0.35), f"order {measured}, errors {errors}"


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    "settings",
    [
        dict(sampler="ddpm", timestep_respacing="500"),
        dict(sampler="ddpm", timestep_respacing="500", sigma_small=True, predict="v"),
        dict(sampler="ddim", timestep_respacing="200", eta=1.0, predict="x0"),
        dict(sampler="ddim", timestep_respacing="200", objective="edm"),
        dict(sampler="euler", timestep_respacing="200", objective="edm"),
        dict(sampler="euler", timestep_respacing="200", S_churn=40.0),
        dict(sampler="heun", timestep_respacing="32", objective="edm"),
        dict(sampler="heun", timestep_respacing="64", objective="edm", S_churn=30.0, S_min=0.05, S_max=50.0, S_noise=1.0),
        dict(sampler="dpmpp_2m", timestep_respacing="48", predict="v"),
    ],
    ids=str,
)
def test_mean_and_covariance(program: str, settings: dict) -> None:
    """4,000 samples in two dimensions have the mixture's mean and covariance, up to chance (4 standard deviations) and a hundredth for the steps."""
    B = 4000
    samples, _, _ = draw_mixture(program, B, 2, settings)
    weight, mean = WEIGHT.astype(np.float64), MEANS[2].astype(np.float64)
    center = weight @ mean
    deviation = mean - center
    covariance = (deviation.T * weight) @ deviation + np.eye(2) * (weight @ DEVIATION.astype(np.float64) ** 2)
    assert np.abs(samples.mean(0) - center).max() < 4 * np.sqrt(covariance.max() / B) + 0.01
    # the variance of a product of two centred values is at most its fourth moment: below 3 * variance^2 for these
    assert np.abs(np.cov(samples.T) - covariance).max() < 4 * np.sqrt(3 / B) * covariance.max() + 0.01


def test_between_two_timesteps() -> None:
    """A model of T steps is told a t between them where sigma lies between: linear in log(sigma), exact at each t, and within [0, T - 1]."""
    config = make_config(dict(diffusion_steps=100, noise_schedule="cosine"))
    diffusion = twin.Diffusion(config)
    for t in (0, 1, 57, 99):
        assert diffusion.level_at(diffusion.sigmas[t]).t.item() == t
    middle = math.sqrt(diffusion.sigmas[40] * diffusion.sigmas[41])
    assert diffusion.level_at(middle).t.item() == pytest.approx(40.5)
    assert diffusion.level_at(1e-9).t.item() == 0 and diffusion.level_at(1e9).t.item() == 99


# ----------------------------------------------------------------------------------------------------------------------
# conditioning


def test_class_dropout(run: Callable, tmp_path: Path) -> None:
    """A row more in the embedding, for "no class"; without dropout the layout is guided-diffusion's. Each image loses its class with this
    probability, in both programs alike (which test_objectives_follow_pytorch sees, too)."""
    (tmp_path / "d.bin").write_bytes(data_bytes(make_images(), np.arange(24) % 3, 3))
    data, given = (
        twin.open_data(str(tmp_path / "d.bin")),
        dict(preset="fashion32", class_cond=True, image_size=(8, 8), channel_mult=(1, 1), attention_resolutions=(4,)),
    )
    plain = make_config(given, data)
    config = make_config(given | dict(class_dropout=0.25, batch_size=400), data)
    assert model_files.parameter_shapes(plain)["label_emb.weight"] == (3, 128) and model_files.parameter_shapes(config)["label_emb.weight"] == (
        4,
        128,
    )
    labels = torch.cat([twin.training_batch(config, data, step)[3] for step in range(5)])
    assert (labels == 3).float().mean().item() == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / 2000))
    kept = twin.training_batch(make_config(given | dict(batch_size=400), data), data, 0)[3]
    assert torch.equal(labels[:400][labels[:400] < 3], kept[labels[:400] < 3])
    # validation keeps every class: with lr 0 its loss is the same with and without dropout in training
    run(flags(TINY, "--data_file d.bin --class_cond True --class_dropout 0.5 --max_steps 2 --lr 0 --val_data_file d.bin --val_interval 1"))
    model = twin.read_model(str(tmp_path / "out" / model_name(2)))
    expected = twin.Trainer(model.config, start=model).validation_loss(data)
    assert column(tmp_path / "out", "val_loss").tolist() == [pytest.approx(expected, rel=1e-5)] * 2


def test_guidance_by_hand(run: Callable, tmp_path: Path) -> None:
    """One deterministic step from T: the answer is unconditional + scale * (conditional - unconditional)."""
    config, _ = write_parity_files(tmp_path, (1, 8, 8), PLAIN | CLASSES)
    run(
        "--init init.bin --sample 4 --sampler ddim --timestep_respacing 1 --eta 0 --clip_denoised False --classes 2,1".split()
        + ["--guidance_scale", 2.5, "--output", "s.bin"]
    )
    model = twin.build_model(config, random_weights(config, 4)).double()
    # one step kept is T - 1, from whose noise it begins
    x = twin.normals(0, twin.SAMPLE_START, 0, torch.arange(4), (1, 8, 8)).double()
    with torch.no_grad():
        t = torch.full((4,), 999.0)
        conditional, unconditional = model(x, t, torch.tensor([2, 1, 2, 1])), model(x, t, torch.full((4,), 3))
    alpha_bar = float(twin.Diffusion(config).alpha_bar[999])
    eps = unconditional + 2.5 * (conditional - unconditional)
    expected = (x - math.sqrt(1 - alpha_bar) * eps) / math.sqrt(alpha_bar)
    assert np.abs(read_samples(tmp_path / "s.bin") - expected.numpy()).max() < 1e-5 / math.sqrt(alpha_bar)
    assert (conditional - unconditional).abs().max() > 0.05


@pytest.mark.parametrize(
    "more", ["--sampler ddim", "--guidance_scale 2", "--dynamic_threshold 0.9", "--sampler heun --S_churn 2", "--sampler dpmpp_2m"]
)
def test_images_depend_on_seed_and_number_alone(run: Callable, tmp_path: Path, more: str) -> None:
    """Whatever the size of batches and their number; --noise_seed is another name of the same noise as --seed's."""
    write_parity_files(tmp_path, (1, 8, 8), PLAIN | CLASSES)

    def images(n: int, *words: object) -> np.ndarray:
        run(flags("--init init.bin --timestep_respacing 4 --output s.bin --classes 0,2", more, "--sample", n, *words))
        return read_samples(tmp_path / "s.bin")

    seven = images(7, "--batch_size", 7, "--seed", 5)
    assert np.array_equal(images(7, "--batch_size", 3, "--seed", 5), seven)
    assert np.array_equal(images(7, "--batch_size", 1, "--noise_seed", 5), seven)
    assert np.array_equal(images(2, "--batch_size", 16, "--noise_seed", 5, "--seed", 8), seven[:2])
    assert not np.array_equal(images(2, "--batch_size", 16, "--seed", 8), seven[:2])
    assert len({image.tobytes() for image in seven}) == 7


def test_grids_with_guidance(run: Callable, data: Path, tmp_path: Path) -> None:
    """While training, with any size of batch, and the same as --sample draws."""
    given = flags(
        TINY,
        "--data_file",
        data,
        "--class_cond True --class_dropout 0.2 --guidance_scale 2 --max_steps 2 --sample_interval 2 --num_samples 5 --save_interval 2",
    )
    for batch, micro in ((4, 0), (4, 1), (3, 3)):
        run(flags(given, "--batch_size", batch, "--microbatch", micro, "--output_dir", f"{batch}{micro}"))
        sample = flags(
            "--preset fashion32 --timestep_respacing 4 --eta 0 --guidance_scale 2 --sample 5 --output s.png --init", f"{batch}{micro}/{model_name(2)}"
        )
        run(sample)
        assert (tmp_path / "s.png").read_bytes() == (tmp_path / f"{batch}{micro}/samples_0000002.png").read_bytes()


REFUSED = [
    ("--objective edm --predict v", "predict"),
    ("--objective edm --learn_sigma True", "learn_sigma"),
    ("--objective edm --min_snr_gamma 5", "min_snr_gamma"),
    ("--objective flow --predict x0", "predict"),
    ("--objective flow --learn_sigma True", "learn_sigma"),
    ("--use_kl True --min_snr_gamma 5", "min_snr_gamma"),
    ("--predict_xstart True --predict v", "predict_xstart"),
    ("--use_fp16 True --precision fp32", "use_fp16"),
    ("--rescale_learned_sigmas True --vlb_weight 1", "rescale_learned_sigmas"),
    ("--class_dropout 0.1", "class_dropout"),
    ("--classes 1", "classes"),
    ("--class_cond True --num_classes 3 --classes 1,3", "0 to 2"),
    ("--guidance_scale 2", "class_dropout"),
    ("--sigma_min 2 --sigma_max 1", "sigma_max 1"),
    ("--sampler ddim --S_churn 1", "S_churn"),
    ("--dynamic_threshold 2", "dynamic_threshold"),
]


@pytest.mark.parametrize("words, named", REFUSED)
def test_the_twin_refuses_the_same(words: str, named: str) -> None:
    """What test_cli.py wants of the program."""
    with pytest.raises(twin.UserError, match=named):
        make_config({"preset": "fashion32"} | twin.parse_flags(words.split(), twin.FLAGS))


def test_sampling_what_the_model_cannot(refused: Callable, tmp_path: Path) -> None:
    write_parity_files(tmp_path, (1, 8, 8), PLAIN | dict(class_cond=True, num_classes=3))
    given = "--sample 2 --timestep_respacing 3 --init init.bin".split()
    refused([*given, "--guidance_scale", 3], "init.bin", "--guidance_scale 3", "--class_dropout")
    refused([*given, "--classes", "0,7"], "init.bin", "--classes 0,7", "0 to 2")
    refused([*given, "--class_dropout", 0.1], "--class_dropout 0.1", "init.bin")
    refused([*given, "--predict", "v"], "--predict v", "init.bin", "eps")
    refused([*given, "--objective", "edm"], "--objective edm", "init.bin", "ddpm")
    refused(flags(given, "--sampler heun --timestep_respacing 1001"), "--timestep_respacing 1001", "1000")
    few = "--sampler euler --sigma_min 1e-4 --sigma_max 1e-3"
    refused(flags(given, few), "--sigma_min 0.0001, --sigma_max 0.001: there is no sigma between them that this model knows")
    with pytest.raises(twin.UserError, match="there is no sigma between them that this model knows"):
        twin.run([*flags("--preset fashion32 --device cpu --sample 2 --init", tmp_path / "init.bin", few)])


@pytest.mark.long
def test_other_objectives_learn(run: Callable, data: Path, tmp_path: Path) -> None:
    """From 1 or so down, as eps does in test_training.py."""
    for name, words in {
        "x0": "--predict x0",
        "v": "--predict v",
        "edm": "--objective edm",
        "flow": "--objective flow",
        "hybrid": "--learn_sigma True --diffusion_steps 100",
    }.items():
        run(flags(TINY, "--data_file", data, "--max_steps 200 --lr 2e-3 --output_dir", name, words))
        losses = column(tmp_path / name, "loss")
        assert losses[-50:].mean() < 0.7 * losses[:5].mean(), name
