"""Averages of the weights that are chosen after training (Karras et al. 2024): what --ema_snapshots keeps, and what --ema_sigma_rel makes of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import TINY, flags, model_name, read_checkpoint, read_samples, with_slot

import train_unet as twin
from common import model_files
from common.config import make_config
from common.flags import POWER_EMAS
from common.formats import post_hoc_average, post_hoc_factors, power_of


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
    more = "--max_steps 10 --save_interval 1 --keep_checkpoints 0 --ema_snapshots 4 --sample_interval 0 --log_interval 100 --output_dir on"
    train(flags("--resume_checkpoint", f"out/{model_name(6)}", more))
    for path in Path("on").glob("*.bin"):
        path.rename(Path("out", path.name))
    saved = [read_checkpoint(tmp_path / "out" / model_name(step)) for step in range(1, 11)]
    weights = np.stack([file.weights for file in saved])
    assert sorted(path.name for path in (tmp_path / "out").glob("ema_*")) == [f"ema_{step:07d}.bin" for step in (4, 6, 8, 10)]
    for step in (4, 6, 8, 10):
        snapshot = twin.read_model(str(tmp_path / f"out/ema_{step:07d}.bin"))
        assert snapshot.state.step == step and snapshot.m is None
        for average, power, kept in zip((snapshot.weights, snapshot.ema), POWER_EMAS, saved[step - 1].arrays[5:], strict=True):
            assert np.array_equal(average, kept)
            assert np.abs(average - power_average(weights, power)[step - 1]).max() < 1e-6 * np.abs(weights).max()
    # samples may be drawn from any average
    for rate in f"{POWER_EMAS[0]:g}", f"{POWER_EMAS[1]:g}", "0.5":
        given = flags("--sample 2 --timestep_respacing 2 --ema_rate", rate, "--init", f"out/{model_name(10)}", "--output s.bin")
        run(given)
        ours = read_samples(tmp_path / "s.bin")
        assert twin.run([*given, "--device", "cpu"]) == 0
        assert np.abs(read_samples(tmp_path / "s.bin") - ours).max() < 1e-3
    # an ordinary average is what it was
    assert np.abs(saved[9].arrays[4] - saved[9].weights).max() < np.abs(saved[9].ema - saved[9].weights).max()


def test_a_late_start_is_refused(run: Callable, data: Path, tmp_path: Path) -> None:
    run(flags(TINY, "--data_file", data, "--max_steps 2"))
    told = run("--resume_checkpoint latest --max_steps 4 --ema_snapshots 2".split(), code=1).err
    assert "--ema_snapshots 2" in told and model_name(2) in told and told.count("\n") == 1
    with pytest.raises(twin.UserError, match="ema_snapshots 2"):
        twin.Trainer(make_config(dict(ema_snapshots=2), None, file := twin.read_model(str(tmp_path / "out" / model_name(2))), True), start=file)


def test_a_branch_that_was_left(run: Callable, data: Path, tmp_path: Path) -> None:
    """Who goes on from an earlier checkpoint in another way averages what was trained then, and nothing of what was trained before: a run with the
    same checkpoint and only the snapshots up to it is averaged alike."""

    def train(words: list[str]) -> str:
        return run(words).out

    given = flags(TINY, "--data_file", data, "--save_interval 4 --keep_checkpoints 0")
    on = flags("--resume_checkpoint latest --lr 3e-3 --max_steps 12 --sample_interval 0 --ema_snapshots 6")
    assert ".left" not in train([*given, "--max_steps", "8", "--ema_snapshots", "2"])
    folder, there = tmp_path / "out", tmp_path / "there"
    (folder / model_name(8)).rename(tmp_path / "later.bin")
    there.mkdir()
    for name in (model_name(4), "ema_0000002.bin", "ema_0000004.bin", "log.csv"):
        shutil.copy(folder / name, there / name)
    was = (folder / "ema_0000006.bin").read_bytes()
    told = train(on)
    assert "beyond step 4, where this run goes on" in told or "is later than step 4, where this run goes on" in told
    assert (folder / "ema_0000006.bin.left").read_bytes() == was
    assert sorted(p.name for p in folder.glob("ema_*")) == sorted(
        [f"ema_{step:07d}.bin" for step in (2, 4, 6, 12)] + [f"ema_{step:07d}.bin.left" for step in (6, 8)]
    )
    assert ".left" not in train([*on, "--output_dir", "there"])
    made = [post_hoc_average(str(path / "ema_0000012.bin"), 0.1) for path in (folder, there)]
    assert np.array_equal(made[0].weights, made[1].weights)


def solve_weights(t_i: np.ndarray, gamma_i: np.ndarray, t_r: np.ndarray, gamma_r: np.ndarray) -> np.ndarray:
    """Algorithm 3 of the paper, its code; and as in its authors' program, factors that sum to one."""

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
    X = np.linalg.solve(A, B)
    return X / X.sum(0)


def sigma_rel(gamma: float) -> float:
    """The spread of the power function, eq. 16: its standard deviation as a part of the run."""
    return (gamma + 1) ** 0.5 / (gamma + 2) / (gamma + 3) ** 0.5


@pytest.fixture(scope="module")
def wandering(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """Snapshots of a run of 4000 steps whose weights wander, every 250; and the weights."""
    config = make_config(dict(preset="fashion32", image_size=(8, 8), channel_mult=(1,), num_channels=32, attention_resolutions=()))
    n, T, folder = model_files.parameter_count(config), 4000, tmp_path_factory.mktemp("snapshots")
    steps = np.cumsum(np.random.default_rng(0).standard_normal((T, 8)), 0) / T**0.5 + np.linspace(0, 1, T)[:, None] * np.arange(8)
    averages = [power_average(steps, power) for power in POWER_EMAS]
    for step in range(250, T + 1, 250):
        arrays = (np.resize(average[step - 1], n).astype(np.float32) for average in averages)
        model_files.write_model(str(folder / f"ema_{step:07d}.bin"), twin.ModelFile(config, *arrays, state=twin.TrainingState(step=step)))
    return folder, steps


@pytest.fixture
def synthetic(wandering: tuple[Path, np.ndarray], tmp_path: Path) -> tuple[Path, np.ndarray]:
    """The same, in a folder that a test may change."""
    folder, steps = wandering
    return Path(shutil.copytree(folder, tmp_path, dirs_exist_ok=True)), steps


@pytest.mark.parametrize("wanted", [0.03, *(pytest.param(wanted, marks=pytest.mark.long) for wanted in (0.05, 0.08, 0.1)), 0.15])
def test_any_average_afterwards(synthetic: tuple[Path, np.ndarray], wanted: float, capsys: pytest.CaptureFixture) -> None:
    """The factors are the paper's; so the file is, exact to rounding, the paper's formula; and near to the average itself, kept while training."""
    folder, steps = synthetic
    gamma = power_of(wanted)
    assert sigma_rel(gamma) == pytest.approx(wanted, rel=1e-9)
    assert sigma_rel(POWER_EMAS[0]) == pytest.approx(0.05, rel=1e-3) and sigma_rel(POWER_EMAS[1]) == pytest.approx(0.1, rel=1e-3)
    for end in (2000, 4000):
        (folder / "a.bin").unlink(missing_ok=True)
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


@pytest.mark.parametrize(("snapshots", "wanted"), [(1, 0.12), (1, 0.25), (8, 0.02), (8, 0.28)])
def test_an_average_counts_all_weights_as_one(snapshots: int, wanted: float, tmp_path: Path) -> None:
    """Of weights that stay what they are, any average is these weights, up to its float32: the factors' sizes sum to at most 20, and each rounds once."""
    config = make_config(dict(preset="fashion32", image_size=(8, 8), channel_mult=(1,), num_channels=32, attention_resolutions=()))
    weights = np.random.default_rng(1).standard_normal(model_files.parameter_count(config)).astype(np.float32)
    for step in range(1, snapshots + 1):
        file = twin.ModelFile(config, weights, weights, state=twin.TrainingState(step=step * 500))
        model_files.write_model(str(tmp_path / f"ema_{step:07d}.bin"), file)
    made = post_hoc_average(str(tmp_path / f"ema_{snapshots:07d}.bin"), wanted)
    assert np.abs(made.weights / weights - 1).max() < 2**-23


@pytest.mark.parametrize(("snapshots", "wanted", "share"), [(8, 0.03, 0.03), (8, 0.12, 0.01), (16, 0.03, 0.005), (16, 0.15, 0.005), (16, 0.2, 0.02)])
def test_an_average_is_that_of_every_step(snapshots: int, wanted: float, share: float) -> None:
    """Weights that wander around 10 by about 1: an average is off by a share of that wandering, not of the 10. (Factors that sum to 0.99 are off by 0.1.)"""
    T, rng = 4000, np.random.default_rng(0)
    wander = np.cumsum(rng.standard_normal((T, 8)), 0) / T**0.5
    averages = [power_average(10 + wander, power) for power in POWER_EMAS]
    updates = np.arange(T // snapshots, T + 1, T // snapshots)
    factors = post_hoc_factors(updates.astype(float), wanted)
    made = sum(factors[i, k] * averages[k][step - 1] for i, step in enumerate(updates) for k in range(2))
    itself = power_average(10 + wander, power_of(wanted))[-1]
    assert np.abs(made - itself).max() < share


@pytest.mark.parametrize("program", ["program", "twin"])
def test_weights_that_never_change(run: Callable, data: Path, tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = flags(TINY, "--data_file", data, "--lr 0 --max_steps 10 --batch_size 1 --ema_snapshots 10 --output_dir E")
    twin.run(words) if program == "twin" else run(words)
    twin.run("--ema_sigma_rel 0.2 --convert E/ema_0000010.bin a.bin".split())
    weights = read_checkpoint(tmp_path / "E" / model_name(10)).weights
    # the averages themselves were rounded at each of ten steps; the factors' sizes sum to 2.1
    np.testing.assert_allclose(twin.read_model("a.bin").weights, weights, rtol=2.1 * 11 * 2**-24)


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
    (folder / "ema_notes.bin").write_bytes(b"mine")  # is none of the run's files
    (folder / "ema_0009000.bin").write_bytes(b"")  # is later than what is averaged
    words = ["--ema_sigma_rel", "0.1", "--convert", str(folder / "ema_0004000.bin"), str(folder / "a.bin")]
    twin.run(words)
    assert (folder / "a.bin").exists()
    damaged = with_slot((folder / "ema_0001000.bin").read_bytes(), 300, 7)
    (folder / "ema_0001000.bin").write_bytes(damaged)
    with pytest.raises(twin.UserError, match="ema_0001000.bin"):
        twin.run(words)
    for content in b"", bytes(5000):
        (folder / "ema_0001000.bin").write_bytes(content)
        with pytest.raises(twin.UserError, match="ema_0001000.bin"):
            twin.run(words)


@pytest.mark.parametrize(
    ("changes", "updates", "told"),
    [
        ({"seed": 5}, 1500, "ema_0001500.bin: is of a run with --seed 5, and .*ema_0004000.bin of one with 0"),
        ({"channel_mult": (2,)}, 1500, "ema_0001500.bin: is of a run with --channel_mult 2, "),
        ({"predict": "v"}, 1500, "ema_0001500.bin: is of a run with --predict v, "),
        ({}, 1900, "ema_0001750.bin: does not go on"),  # which counts 1750
    ],
)
def test_snapshots_of_other_runs(synthetic: tuple[Path, np.ndarray], changes: dict, updates: int, told: str) -> None:
    folder, _ = synthetic
    config = make_config(dict(preset="fashion32", image_size=(8, 8), channel_mult=(1,), num_channels=32, attention_resolutions=()) | changes)
    weights = np.zeros(model_files.parameter_count(config), np.float32)
    file = twin.ModelFile(config, weights, weights, state=twin.TrainingState(step=updates))
    model_files.write_model(str(folder / "ema_0001500.bin"), file)
    with pytest.raises(twin.UserError, match=told):
        twin.run(["--ema_sigma_rel", "0.1", "--convert", str(folder / "ema_0004000.bin"), str(folder / "a.bin")])
    assert not (folder / "a.bin").exists()


def test_free_flags_may_change(synthetic: tuple[Path, np.ndarray]) -> None:
    """A resumed run may have another dropout."""
    folder, _ = synthetic
    file = twin.read_model(str(folder / "ema_0001500.bin"))
    file.config.dropout = 0.1
    model_files.write_model(str(folder / "ema_0001500.bin"), file)
    assert post_hoc_average(str(folder / "ema_0004000.bin"), 0.1).state.step == 4000
