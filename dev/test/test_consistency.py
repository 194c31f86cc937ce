"""Consistency tuning (--objective ect) and the sampler of one or a few steps: its paper's formulas, files, runs that go on, what can't be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, column, flags, model_name, random_weights, read_log, read_samples
from test_training import QUIET, Double, command_line, write_parity_files

import generate
import train_unet as twin
from common.config import make_config

torch.set_num_threads(1)
PLAIN = dict(channel_mult=(1, 2), attention_resolutions=(4,), num_head_channels=32)
FRAMES = {
    "edm": dict(objective="ect", sigma_data=0.4, P_mean=-0.9, P_std=1.6, ect_q=3.0, ect_k=6.0, ect_b=0.7, ect_d=2),
    "flow": dict(objective="ect", ect_frame="flow", ect_weight="snr", ect_c=0.3, ect_d=2),
}


def image_of(model: Callable, config: object, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """D(x; sigma), x = x0 + sigma noise; sigma (B, 1, 1, 1)."""
    if config.ect_frame == "flow":
        t = sigma / (1 + sigma)
        return x / (1 + sigma) - t * model(x / (1 + sigma), 1000 * t.flatten())
    data = config.sigma_data
    total = (sigma**2 + data**2).sqrt()
    return data**2 / total**2 * x + sigma * data / total * model(x / total, sigma.log().flatten() / 4)


@pytest.mark.parametrize("frame", FRAMES)
def test_tuning_by_the_book(run: Callable, tmp_path: Path, frame: str) -> None:
    """Geng et al. 2024 as anyone would write it, in float64: two images, and how far they are apart. Three values of a; the gradient of the first step,
    which the teacher has no part in; the validation loss, whose gap is the last step's. In fp32 the network's answers are about 3e-7 off, and where r is
    near t an image's error counts t / (t - r) times, here up to 20 times: 1e-5."""
    config, data = write_parity_files(tmp_path, (1, 8, 8), PLAIN | dict(dropout=0.25) | FRAMES[frame])
    run(flags(command_line(config), QUIET, "--max_steps 6 --lr 0 --val_data_file d.bin --val_interval 3"))
    model = Double(twin.build_model(config, random_weights(config, 4)))

    def losses(x0: torch.Tensor, normal: torch.Tensor, noise: torch.Tensor, step: int) -> torch.Tensor:
        t = (config.P_mean + config.P_std * normal.double()).exp().view(-1, 1, 1, 1)
        a = 1 + step // 2
        r = t * (1 - (1 + config.ect_k / (1 + (config.ect_b * t).exp())) / config.ect_q**a)
        student = image_of(model, config, x0 + t * noise, t)
        with torch.no_grad():
            clean = r <= 0
            r = torch.where(clean, 0, r)
            teacher = torch.where(clean, x0, image_of(model, config, x0 + r * noise, torch.where(clean, t, r)))
        distance = ((student - teacher) ** 2).sum((1, 2, 3)).add(config.ect_c**2).sqrt() - config.ect_c
        weight = 1 / t**2 + 1 / config.sigma_data**2 if config.ect_weight == "snr" else 1 / (t - r)
        return weight.flatten() * distance

    def drawn(purpose: int, noise: int, step: int, samples: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normal = twin.to_normals(twin.random_words(11, purpose, step, samples, 2))[:, 0]
        return normal, twin.normals(11, noise, step, samples, (1, 8, 8)).double()

    def images(index: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(data.images[index].astype(np.float64)) / 127.5 - 1

    model.train()
    for step, logged in enumerate(column(tmp_path / "out", "loss")):
        model.model.dropout_draw.copy_(torch.tensor([11, step, 0]))
        normal, noise = drawn(twin.TIMESTEP, twin.NOISE, step, torch.arange(4))
        loss = losses(images(twin.data_order(11, 4 * step, 4, 13)), normal, noise, step).mean()
        assert logged == pytest.approx(loss.item(), rel=1e-5), step
        if step == 0:
            loss.backward()
            norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])).item()
    assert column(tmp_path / "out", "grad_norm")[0] == pytest.approx(norm, rel=1e-5)
    model.eval()
    with torch.no_grad():
        expected = losses(images(np.arange(13)), *drawn(twin.VAL_TIMESTEP, twin.VAL_NOISE, 0, torch.arange(13)), step=5).mean().item()
    logged = [float(row["val_loss"]) for row in read_log(tmp_path / "out") if row["val_loss"]]
    assert logged == [pytest.approx(expected, rel=1e-5)] * 2


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_sampling_by_the_book(run: Callable, tmp_path: Path, steps: int) -> None:
    """Song et al. 2023, algorithm 1: an image, fresh noise, the next image. Two steps are those of Geng et al. 2024; more are spread between them."""
    config, _ = write_parity_files(tmp_path, (1, 8, 8), PLAIN | dict(objective="ect"))
    words = f"--init init.bin --sample 3 --timestep_respacing {steps} --clip_denoised False --seed 2 --output s.bin"
    run(words.split())  # the sampler of such a model is consistency
    samples, first, last = torch.arange(3), 80 ** (1 / 7), float(np.float32(0.821)) ** (1 / 7)
    sigmas = [80.0] if steps == 1 else [(first + i / (steps - 1) * (last - first)) ** 7 for i in range(steps)]
    model, x = (
        Double(twin.build_model(config, random_weights(config, 4))),
        sigmas[0] * twin.normals(2, twin.SAMPLE_START, 0, samples, (1, 8, 8)).double(),
    )
    with torch.no_grad():
        for k, sigma in enumerate(sigmas):
            image = image_of(model, config, x, torch.full((3, 1, 1, 1), sigma, dtype=torch.float64))
            if k + 1 < len(sigmas):
                x = image + sigmas[k + 1] * twin.normals(2, twin.SAMPLE_NOISE, k, samples, (1, 8, 8)).double()
    assert np.abs(read_samples(tmp_path / "s.bin") - image.numpy()).max() < 1e-4
    read = make_config(twin.parse_flags(words.split(), twin.FLAGS), None, twin.read_model(str(tmp_path / "init.bin")))
    assert np.abs(twin.draw(model.model.float(), read, 3).numpy() - image.numpy()).max() < 1e-4


@pytest.mark.parametrize("family", ["edm", "flow"])
def test_a_model_is_tuned(run: Callable, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """From its weights, with levels of its own; what is written says so, can be tuned on and resumed, and every program draws the same from it."""
    monkeypatch.chdir(tmp_path)
    given = flags(TINY, "--data_file", data, "--max_steps 2 --lr 0")
    run(flags(given, "--objective", family, "--output_dir first"))
    first = f"first/{model_name(2)}"
    words = flags("--preset fashion32 --objective ect --data_file", data, "--init", first, "--max_steps 4 --save_interval 2 --batch_size 4 --lr 0")
    run(flags(words, QUIET, "--output_dir tuned"))
    tuned = twin.read_model(f"tuned/{model_name(4)}")
    config = tuned.config
    assert (config.objective, config.ect_frame, config.frame) == ("ect", family, family)
    assert (config.P_mean, config.P_std) == (float(np.float32(-1.1)), 2.0)
    assert np.array_equal(tuned.weights, twin.read_model(first).ema)
    start = twin.read_model(first)
    twins = make_config(twin.parse_flags(list(map(str, words)), twin.FLAGS), twin.open_data(str(data)), start)
    assert all(getattr(twins, name) == getattr(config, name) for name in ("ect_frame", "P_mean", "P_std", "sigma_data", "objective"))
    assert (twins.sampler, twins.timestep_respacing) == ("consistency", "2")
    if family == "flow":  # whose file says nothing of sigma_data
        given = twin.parse_flags([*map(str, words), "--sigma_data", "0.25"], twin.FLAGS)
        assert make_config(given, twin.open_data(str(data)), start).sigma_data == 0.25
    # resumed, and tuned on
    run(flags("--resume_checkpoint", f"tuned/{model_name(2)}", "--max_steps 4 --output_dir again", QUIET))
    assert (tmp_path / "again" / model_name(4)).read_bytes() == (tmp_path / "tuned" / model_name(4)).read_bytes()
    run(flags("--init", f"tuned/{model_name(4)}", "--P_std 1.5 --data_file", data, "--max_steps 1 --batch_size 4 --output_dir on", QUIET))
    on = twin.read_model(f"on/{model_name(1)}").config
    assert (on.objective, on.ect_frame, on.P_mean, on.P_std) == ("ect", family, config.P_mean, 1.5)
    # samples
    model = f"tuned/{model_name(4)}"
    run(f"--init {model} --sample 3 --output native.bin".split())
    sampled = dataclasses.replace(make_config({}, None, tuned), noise_seed=0)
    assert (sampled.sampler, sampled.timestep_respacing) == ("consistency", "2")
    ours = twin.draw(twin.build_model(sampled, tuned.ema), sampled, 3).numpy()
    assert np.abs(read_samples(tmp_path / "native.bin") - ours).max() < 1e-4
    generate.run(f"--model_filename {model} --num_samples 3 --output generated.bin".split())
    assert np.abs(read_samples(tmp_path / "generated.bin") - ours).max() < 1e-6
    run(f"--init {model} --sample 3 --sampler heun --timestep_respacing 4 --output heun.bin".split())
    assert np.isfinite(read_samples(tmp_path / "heun.bin")).all()


def test_microbatches_and_checkpointing_change_nothing(run: Callable, tmp_path: Path) -> None:
    config, _ = write_parity_files(tmp_path, (1, 8, 8), PLAIN | dict(dropout=0.25) | FRAMES["edm"])
    given = flags(command_line(config), QUIET, "--max_steps 3")
    run(flags(given, "--output_dir whole"))
    run(flags(given, "--output_dir again --use_checkpoint True"))
    assert (tmp_path / "again" / model_name(3)).read_bytes() == (tmp_path / "whole" / model_name(3)).read_bytes()
    run(flags(given, "--output_dir parts --microbatch 1"))
    for name, far in ("loss", 1e-6), ("grad_norm", 1e-5):
        assert column(tmp_path / "parts", name)[0] == pytest.approx(column(tmp_path / "whole", name)[0], rel=far)


def test_what_cannot_be_tuned(refused: Callable, run: Callable, data: Path, tmp_path: Path) -> None:
    write_parity_files(tmp_path, (1, 8, 8), PLAIN)  # of ddpm
    tune = flags("--preset fashion32 --data_file d.bin --init init.bin --objective ect")
    refused(tune, "--objective", "init.bin")
    with pytest.raises(twin.UserError, match="--objective"):
        make_config({"objective": "ect"}, None, twin.read_model(str(tmp_path / "init.bin")))
    write_parity_files(tmp_path, (1, 8, 8), PLAIN | dict(objective="flow"))
    refused([*tune, "--ect_frame", "edm"], "--ect_frame", "init.bin")
    refused(flags("--preset fashion32 --data_file d.bin --init init.bin --objective edm"), "--objective")
    refused(flags(tune, "--max_steps 1000 --ect_d 10"), "--ect_d")
    refused(flags(tune, "--ect_q 256"), "--ect_q")
    refused(flags(tune, "--ect_q 1"), "--ect_q")
    refused(flags(tune, "--ect_weight sum"), "--ect_weight")
    refused(flags("--preset fashion32 --data_file d.bin --objective ect --predict v"), "--predict")
    refused(flags("--init init.bin --sample 1 --sampler consistency --mid_t 90"), "--mid_t")
    for words in "--ect_d 10", "--ect_q 256", "--mid_t 90 --sampler consistency":
        with pytest.raises(twin.UserError, match=words.split()[0]):
            make_config({"preset": "fashion32", "objective": "ect"} | twin.parse_flags(words.split(), twin.FLAGS))
    make_config({"preset": "fashion32", "objective": "ect", "ect_q": 256.0, "ect_d": 500})
    # a run of edm is not resumed as one of ect
    run(flags(TINY, "--data_file", data, "--objective edm --max_steps 1"))
    refused(flags("--resume_checkpoint latest --max_steps 2 --objective ect"), "--objective")


def test_gap_of_each_step() -> None:
    """The paper's example: q = 2, k = 8, b = 1, eight stages. At first r = 0 wherever n(t) >= 2, which is the loss of a diffusion model."""
    diffusion = twin.Diffusion(make_config({"preset": "fashion32", "objective": "ect", "max_steps": 200000}))
    t = torch.tensor([1e-4, 1.0, 10.0], dtype=torch.float64)
    n = [1 + 8 / (1 + math.exp(x)) for x in t.tolist()]
    for step, a in ((0, 1), (24999, 1), (25000, 2), (199999, 8), (None, 8)):
        expected = [x * max(1 - k / 2**a, 0) for x, k in zip(t.tolist(), n, strict=True)]
        assert diffusion.teacher_sigma(t, step).tolist() == pytest.approx(expected)
    assert diffusion.teacher_sigma(t, 0)[0] == 0
