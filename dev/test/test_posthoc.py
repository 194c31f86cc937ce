"""Averages of the weights that are chosen after training (Karras et al. 2024): what --ema_snapshots keeps, and what --ema_sigma_rel makes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import TINY, flags, model_name, read_checkpoint, with_slot

import model_files
import train_unet as twin
from config import POWER_EMAS, make_config


def power_average(weights: np.ndarray, power: float) -> np.ndarray:
    """(T, n) -> (T, n): eq. 1 of the paper, summed: the weights of step k count as k^power does between k - 1 and k, that is k^(power + 1) - (k - 1)^(power + 1)."""
    k = np.arange(len(weights) + 1, dtype=np.float64)
    share = np.diff(k ** (power + 1))
    return np.cumsum(weights.astype(np.float64) * share[:, None], 0) / np.cumsum(share)[:, None]


@pytest.mark.parametrize("program", ["program", "twin"])
def test_averages_while_training(run: Callable, data: Path, tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in snapshots are sums of every step's weights with the power function's shares; a resumed run goes on with them."""
    monkeypatch.chdir(tmp_path)

    def train(words: list[str]) -> None:
        twin.run(words) if program == "twin" else run(words)

    given = flags(TINY, "--data_file", data, "--save_interval 1 --keep_checkpoints 0 --ema_snapshots 4 --ema_rate 0.9,0.5")
    train([*given, "--max_steps", "6"])
    resumed = flags(
        "--resume_checkpoint latest --max_steps 10 --save_interval 1 --keep_checkpoints 0 --ema_snapshots 4 --sample_interval 0 --log_interval 100"
    )
    train(resumed)
    saved = [read_checkpoint(tmp_path / "out" / model_name(step)) for step in range(1, 11)]
    weights = np.stack([file.weights for file in saved])
    assert sorted(path.name for path in (tmp_path / "out").glob("ema_*")) == [f"ema_{step:07d}.bin" for step in (4, 6, 8, 10)]
    for step in (4, 6, 8, 10):
        snapshot = twin.read_model(str(tmp_path / f"out/ema_{step:07d}.bin"))
        assert snapshot.state.step == step and snapshot.m is None
        for average, power, kept in zip((snapshot.weights, snapshot.ema), POWER_EMAS, saved[step - 1].arrays[5:], strict=True):
            assert np.array_equal(average, kept)
            assert np.abs(average - power_average(weights, power)[step - 1]).max() < 1e-6 * np.abs(weights).max()
    # an ordinary average is what it was
    assert np.abs(saved[9].arrays[4] - saved[9].weights).max() < np.abs(saved[9].ema - saved[9].weights).max()


def test_a_late_start_is_refused(run: Callable, data: Path, tmp_path: Path) -> None:
    run(flags(TINY, "--data_file", data, "--max_steps 2"))
    told = run("--resume_checkpoint latest --max_steps 4 --ema_snapshots 2".split(), code=1).err
    assert "--ema_snapshots 2" in told and model_name(2) in told and told.count("\n") == 1
    with pytest.raises(twin.UserError, match="ema_snapshots 2"):
        twin.Trainer(make_config(dict(ema_snapshots=2), None, file := twin.read_model(str(tmp_path / "out" / model_name(2))), True), start=file)


def solve_weights(t_i: np.ndarray, gamma_i: np.ndarray, t_r: np.ndarray, gamma_r: np.ndarray) -> np.ndarray:
    """Algorithm 3 of the paper, its code."""

    def p_dot_p(t_a: np.ndarray, gamma_a: np.ndarray, t_b: np.ndarray, gamma_b: np.ndarray) -> np.ndarray:
        t_ratio = t_a / t_b
        t_exp = np.where(t_a < t_b, gamma_b, -gamma_a)
        t_max = np.maximum(t_a, t_b)
        num = (gamma_a + 1) * (gamma_b + 1) * t_ratio**t_exp
        den = (gamma_a + gamma_b + 1) * t_max
        return num / den

    def rv(x: np.ndarray) -> np.ndarray:
        return np.float64(x).reshape(-1, 1)

    def cv(x: np.ndarray) -> np.ndarray:
        return np.float64(x).reshape(1, -1)

    A = p_dot_p(rv(t_i), rv(gamma_i), cv(t_i), cv(gamma_i))
    B = p_dot_p(rv(t_i), rv(gamma_i), cv(t_r), cv(gamma_r))
    return np.linalg.solve(A, B)


def sigma_rel(gamma: float) -> float:
    """The spread of the power function, eq. 16: its standard deviation as a part of the run."""
    return (gamma + 1) ** 0.5 / (gamma + 2) / (gamma + 3) ** 0.5


@pytest.fixture
def synthetic(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """Snapshots of a run of 4000 steps whose weights wander, every 250; and the weights."""
    config = make_config(dict(preset="fashion32", image_size=(8, 8), channel_mult=(1,), num_channels=32, attention_resolutions=()))
    n, T = model_files.parameter_count(config), 4000
    steps = np.cumsum(np.random.default_rng(0).standard_normal((T, 8)), 0) / T**0.5 + np.linspace(0, 1, T)[:, None] * np.arange(8)
    averages = [power_average(steps, power) for power in POWER_EMAS]
    for step in range(250, T + 1, 250):
        arrays = (np.resize(average[step - 1], n).astype(np.float32) for average in averages)
        model_files.write_model(str(tmp_path / f"ema_{step:07d}.bin"), twin.ModelFile(config, *arrays, state=twin.TrainingState(step=step)))
    return tmp_path, steps


@pytest.mark.parametrize("wanted", [0.03, 0.05, 0.08, 0.1, 0.15])
def test_any_average_afterwards(synthetic: tuple[Path, np.ndarray], wanted: float, capsys: pytest.CaptureFixture) -> None:
    """The factors are the paper's; so the file is, exact to rounding, the paper's formula; and near to the average itself, kept while training."""
    folder, steps = synthetic
    gamma = model_files.power_of(wanted)
    assert sigma_rel(gamma) == pytest.approx(wanted, rel=1e-9)
    assert sigma_rel(POWER_EMAS[0]) == pytest.approx(0.05, rel=1e-3) and sigma_rel(POWER_EMAS[1]) == pytest.approx(0.1, rel=1e-3)
    for end in (2000, 4000):
        twin.run(["--ema_sigma_rel", str(wanted), "--convert", str(folder / f"ema_{end:07d}.bin"), str(folder / "a.bin")])
        made = twin.read_model(str(folder / "a.bin"))
        assert made.ema is None and made.state.step == end
        t = np.repeat(np.arange(250, end + 1, 250), 2)
        factors = solve_weights(t, np.tile(POWER_EMAS, len(t) // 2), np.array([end]), np.array([gamma]))[:, 0]
        files = [twin.read_model(str(folder / f"ema_{step:07d}.bin")) for step in range(250, end + 1, 250)]
        terms = np.concatenate([np.stack([file.weights[:8], file.ema[:8]]) for file in files]).astype(np.float64) * factors[:, None]
        assert np.abs(made.weights[:8] - terms.sum(0)).max() < 1e-6 * max(1, np.abs(terms).max())
        itself = power_average(steps, gamma)[end - 1]
        assert np.abs(made.weights[:8] - itself).max() < 0.01 * np.abs(itself).max(), (made.weights[:8], itself)
    assert "a.bin: the same model as an average of the weights up to" in capsys.readouterr().out
    twin.run(["--ema_sigma_rel", str(wanted), "--convert", str(folder / "ema_0004000.bin"), f"{folder}/diffusers/"])
    assert np.array_equal(twin.read_model(str(folder / "diffusers")).weights, made.weights)
    capsys.readouterr()


def test_what_cannot_be_averaged(synthetic: tuple[Path, np.ndarray]) -> None:
    folder, _ = synthetic
    (folder / "other.bin").write_bytes((folder / "ema_0004000.bin").read_bytes())
    for words, told in (
        (["--ema_sigma_rel", "0.1", "--convert", str(folder / "other.bin"), "x.bin"], "other.bin: is no snapshot"),
        (["--ema_sigma_rel", "0.1", "--convert", str(folder / "ema_0009999.bin"), "x.bin"], "ema_0009999.bin: can't be opened"),
        (["--ema_sigma_rel", "0.4", "--convert", str(folder / "ema_0004000.bin"), "x.bin"], "--ema_sigma_rel 0.4"),
    ):
        with pytest.raises(twin.UserError, match=told):
            twin.run(words)
    damaged = with_slot((folder / "ema_0001000.bin").read_bytes(), 300, 7)
    (folder / "ema_0001000.bin").write_bytes(damaged)
    with pytest.raises(twin.UserError, match="ema_0001000.bin"):
        twin.run(["--ema_sigma_rel", "0.1", "--convert", str(folder / "ema_0004000.bin"), "x.bin"])
