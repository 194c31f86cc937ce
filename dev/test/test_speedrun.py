"""dev/benchmarks/speedrun.py: what it says of pictures whose faults are known, when a run has come to a quality, and a short run of it."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY_MODEL, TINY_RUN, binary_path, environment, make_images

from common import judge as judges
from common.program import UserError, run_program

sys.path.insert(0, str(ROOT / "dev/benchmarks"))
import conditions
import speedrun
import speedrun_rivals


def picture(*parts: tuple[slice, slice, float]) -> torch.Tensor:
    """One white picture (1, 3, 16, 16) with rectangles of one grey each."""
    image = torch.ones(1, 3, 16, 16)
    for rows, columns, value in parts:
        image[:, :, rows, columns] = value
    return image


def test_plain_forms() -> None:
    square = picture((slice(4, 12), slice(4, 12), -0.5))
    two_colours = picture((slice(4, 12), slice(4, 8), -0.5), (slice(4, 12), slice(8, 12), 0.0))
    assert speedrun.plain_form(square) == 1
    assert speedrun.plain_form(picture()) == 1  # nothing at all is no better
    assert speedrun.plain_form(two_colours) == 0
    faint = square + 0.05 * torch.rand(square.shape, generator=torch.Generator().manual_seed(0))  # 6 of 255: no other colour
    assert speedrun.plain_form(faint) == 1


def test_grain() -> None:
    square, noise = picture((slice(4, 12), slice(4, 12), -0.5)), torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert speedrun.has_grain(square) == 0  # edges are few
    assert speedrun.has_grain(square + 0.1 / 127.5 * noise) == 0
    assert speedrun.has_grain(square + 4 / 127.5 * noise) == 1


def test_copies() -> None:
    """15 of 255 from a training image in all its pixels is a copy of it, 17 none; half of the pixels may differ by the root of two more."""
    training = torch.cat([picture((slice(4, 12), slice(4, 12), -0.5)), picture((slice(0, 8), slice(4, 8), 0.0))])
    apart = torch.tensor([15, 17, 22, 23])[:, None, None, None] / 127.5
    changed = training[[1]].expand(4, -1, -1, -1) - apart * torch.cat([torch.ones(2, 3, 16, 16), torch.ones(2, 3, 16, 16) * (torch.arange(16) % 2)])
    assert speedrun.is_copy(changed, training).tolist() == [1, 0, 1, 0]
    assert speedrun.is_copy(changed.to("meta"), training).is_meta  # all that it computes lies where the images are, as on a GPU


def test_seconds_to() -> None:
    run = [speedrun.Moment(step, seconds, distance, 0, 0, 0, 0) for step, seconds, distance in ((10, 2.0, 30.0), (20, 4.0, 10.0), (30, 6.0, 12.0))]
    assert speedrun.seconds_to(run, 40) == 2
    assert speedrun.seconds_to(run, 15) == pytest.approx(3.5)
    assert speedrun.seconds_to(run, 10) == 4
    assert speedrun.seconds_to(run, 9) == float("inf")


def test_images_without_labels_are_classes_of_their_own() -> None:
    """The features of pictures that were never seen tell their subject: parts of one picture are nearer to each other than to those of others."""
    images = judges.to_floats(make_images(130, 3, 16, 16))
    torch.set_num_threads(1)
    a, b = (judges.train_classifier(images, None, 6) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))
    with torch.no_grad():
        right = (a(images).argmax(1) == torch.arange(130)).double().mean()
    assert right > 10 / 130  # ten times what chance gives


def test_crops_stay_inside() -> None:
    """A part of a picture that grows to the right and downwards has values of that picture alone, and half of them are mirrored."""
    torch.manual_seed(0)
    ramp = torch.linspace(-0.5, 0.5, 16).expand(64, 1, 16, 16)
    parts = judges.crop(ramp)
    assert parts.shape == ramp.shape and parts.min() >= -0.5 - 1e-6 and parts.max() <= 0.5 + 1e-6
    mirrored = (parts[:, 0, 0, -1] < parts[:, 0, 0, 0]).double().mean()
    assert 0.25 < mirrored < 0.75


@pytest.mark.long
def test_a_run(tmp_path: Path, make_data: object) -> None:
    images = make_images(700, 1, 8, 8)
    file = make_data("d.bin", images, np.arange(700) % 7, 7)
    recipe = " ".join(map(str, [*TINY_MODEL, *TINY_RUN, "--timestep_respacing", 4, "--max_steps", 4]))
    command = [
        sys.executable,
        ROOT / "dev/benchmarks/speedrun.py",
        "--data_file",
        file,
        "--program",
        binary_path("cpu"),
        "--recipes",
        recipe,
        "--moments",
        2,
    ]
    command += ["--seeds", "3", "--judge", "judge.pt", "--output", "o.json", "--plot", "o.png"]
    held_out = ["--held_out", make_data("held.bin", make_images(130, 1, 8, 8, seed=1))]
    for more, count in ([], 560), (held_out, 700):  # the second time with the judge of the first
        done = subprocess.run(list(map(str, [*command, *more])), cwd=tmp_path, env=environment(1), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert f"data: {count} images to train on" in done.stdout
        moments = json.loads((tmp_path / "o.json").read_text())["runs"][recipe][0]
        assert [m["step"] for m in moments] == [2, 4] and 0 < moments[0]["seconds"] < moments[1]["seconds"]
        assert all(m["distance"] > 1 for m in moments)
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")


def test_what_it_refuses(tmp_path: Path, make_data: object, capfd: pytest.CaptureFixture) -> None:
    few = make_data("few.bin", make_images(20, 1, 8, 8))
    judge = tmp_path / "junk.pt"
    judge.write_bytes(b"junk")
    for words, named in (
        (["--data_file", few], "few.bin"),
        (
            ["--data_file", make_data("700.bin", make_images(700, 1, 8, 8)), "--held_out", make_data("larger.bin", make_images(200, 1, 16, 16))],
            "larger.bin",
        ),
        (["--seeds", "a"], "--seeds"),
        (["--moments", "0"], "--moments"),
        (["--samples", "9"], "--samples"),
        (["--rivals", "guided,abacus"], "--rivals"),
        (["--rivals", "guided", "--rival_seconds", "-1"], "--rival_seconds"),
        (["--rivals", "guided", "--recipes"], "--rival_seconds"),
        (["--recipes"], "--recipes"),
        (["--seeds", "0,"], "--seeds"),
        (["--plot", "x.foo"], "--plot"),
        (["--plot", "x.png", "--judge", "./x.png"], "--plot"),
        (["--recipes", "", "--lr 'x"], "--recipes"),
        (["--recipes", "", "--lrr 1"], "--lrr"),
        (["--judge", judge, "--data_file", make_data("many.bin", make_images(640, 1, 8, 8))], "junk.pt"),
    ):
        code = run_program("speedrun", lambda _, words=words: speedrun.run([*map(str, words)]))
        error = capfd.readouterr().err
        assert code == 1 and named in error and error.count("\n") == 1


# ----------------------------------------------------------------------------------------------------------------------
# rivals

TINY_RIVALS: dict[str, dict[str, object]] = {
    "lucidrains": {"model": {"dim": 8, "dim_mults": (1, 2)}, "sampling_steps": 3},
    "diffusers": {
        "model": {
            "layers_per_block": 1,
            "block_out_channels": (8, 8),
            "norm_num_groups": 4,
            "down_block_types": ("DownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "UpBlock2D"),
        },
        "sampling_steps": 3,
        "batch_size": 4,
    },
    "guided": {"flags": " ".join([speedrun_rivals.Guided.flags.replace("ddim25", "3").replace("128", "4"), *TINY_MODEL, "--num_heads 1"])},
    "edm": {"model": speedrun_rivals.EDM.model | {"model_channels": 8, "channel_mult": [1, 1]}, "batch_size": 4, "sampling_steps": 3},
}


@pytest.fixture
def tiny_rivals(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, attributes in TINY_RIVALS.items():
        for attribute, value in attributes.items():
            monkeypatch.setattr(speedrun_rivals.RIVALS[name], attribute, value)
    monkeypatch.setattr(speedrun_rivals, "PACE_STEPS", 2)
    monkeypatch.setattr(speedrun_rivals, "WARM_UP_STEPS", 1)


def need_rival(name: str) -> None:
    for package in speedrun_rivals.RIVALS[name].packages:
        pytest.importorskip(package)


@pytest.mark.long
@pytest.mark.parametrize("name", TINY_RIVALS)
def test_a_rival_learns_and_draws(name: str, tmp_path: Path, make_data: Callable, tiny_rivals: None) -> None:
    """Images that are all of one dark grey: after some steps its weights have changed, and samples are images of the set's size. Seeds matter."""
    need_rival(name)
    file = make_data("d.bin", np.full((64, 1, 8, 8), 30, np.uint8))
    device = torch.device("cpu")
    drawn = []
    for seed in (0, 0, 1):
        rival = speedrun_rivals.RIVALS[name](speedrun_rivals.Pictures(str(file), device), seed)
        rival.train(3)
        drawn.append(rival.draw(5))
        assert all(images.shape == (5, 1, 8, 8) and images.abs().max() <= 1 for images in drawn[-1])
    assert all(torch.equal(a, b) for a, b in zip(drawn[0], drawn[1]))
    assert not torch.equal(drawn[0][0], drawn[2][0])


def test_halvings() -> None:
    assert speedrun_rivals.halvings(20000, 6) == [625, 1250, 2500, 5000, 10000, 20000]
    assert speedrun_rivals.halvings(10, 3) == [2, 5, 10] and speedrun_rivals.halvings(3, 6) == [1, 3] and speedrun_rivals.halvings(7, 1) == [7]


@pytest.mark.long
@pytest.mark.parametrize("name", TINY_RIVALS)
def test_a_race(name: str, tmp_path: Path, make_data: Callable, tiny_rivals: None) -> None:
    """It stops at as many moments as it should, the last of them at about the seconds that it has, by the pace of two steps."""
    need_rival(name)
    file = make_data("d.bin", make_images(64, 1, 8, 8))
    found = [(step, took) for step, took, _ in speedrun_rivals.race(name, str(file), 0, 0.5, 3, torch.device("cpu"))]
    steps, seconds = zip(*found)
    assert 1 <= len(found) <= 3 and list(steps) == sorted(set(steps)) and list(seconds) == sorted(seconds)
    assert list(steps) == speedrun_rivals.halvings(steps[-1], 3)[-len(steps) :]
    assert 0.05 < seconds[-1] < 5


def test_the_pictures_come_mirrored_and_all_of_them(make_data: Callable) -> None:
    images = np.arange(24, dtype=np.uint8)[:, None, None, None] + np.array([0, 100], np.uint8)
    pictures = speedrun_rivals.Pictures(str(make_data("d.bin", images)), torch.device("cpu"))
    batches = pictures.batches(8)
    epochs = [torch.cat([next(batches) for _ in range(3)]) for _ in range(20)]
    for epoch in epochs:
        assert sorted(((epoch.amin((1, 2, 3)) + 1) * 127.5).round().tolist()) == list(range(24))
    mirrored = torch.stack([epoch[:, 0, 0, 0] > epoch[:, 0, 0, 1] for epoch in epochs]).double().mean()
    assert 0.4 < mirrored < 0.6


def test_the_schedule_of_diffusers(make_data: Callable, tiny_rivals: None) -> None:
    """get_cosine_schedule_with_warmup's factors, for a total that is known later."""
    optimization = pytest.importorskip("diffusers.optimization")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 1.0)
    theirs = optimization.get_scheduler("cosine", optimizer, num_warmup_steps=500, num_training_steps=2000)
    ours = speedrun_rivals.Diffusers(speedrun_rivals.Pictures(str(make_data("d.bin", make_images(8, 1, 8, 8))), torch.device("cpu")), 0)
    ours.total = 2000
    for step in range(2000):
        assert ours.rate_at(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-9)
        optimizer.step()
        theirs.step()


def test_the_sampler_for_diffusers_finds_what_a_perfect_network_knows(make_data: Callable, tiny_rivals: None) -> None:
    """Of images that are all of one grey the noise is known exactly: it is the same at every step, and the samples are of that grey."""
    need_rival("diffusers")
    file = make_data("d.bin", np.full((8, 1, 8, 8), 200, np.uint8))
    rival = speedrun_rivals.Diffusers(speedrun_rivals.Pictures(str(file), torch.device("cpu")), 0)
    grey, alpha_bars = float(rival.pictures.images[0, 0, 0, 0]), rival.scheduler.alphas_cumprod
    noises = []

    def perfect(x: torch.Tensor, t: torch.Tensor) -> types.SimpleNamespace:
        alpha_bar = alpha_bars[t].view(-1, 1, 1, 1)
        noises.append((x - alpha_bar.sqrt() * grey) / (1 - alpha_bar).sqrt())
        return types.SimpleNamespace(sample=noises[-1])

    rival.drawn_from = perfect
    assert (rival.draw_batch(3) - grey).abs().max() < 1e-3
    assert len(noises) == 3 and all((noise - noises[0]).abs().max() < 1e-3 for noise in noises)


def test_a_table_with_a_rival(tmp_path: Path, make_data: Callable, tiny_rivals: None, capsys: pytest.CaptureFixture) -> None:
    """Two calls, one table: a rival trains for as long as ours, or for the seconds that it is given; who was judged otherwise is refused."""
    file = make_data("d.bin", make_images(700, 1, 8, 8), np.arange(700) % 7, 7)
    recipe = " ".join(map(str, [*TINY_MODEL, *TINY_RUN, "--timestep_respacing", 4, "--max_steps", 4]))
    common = ["--data_file", str(file), "--judge", str(tmp_path / "judge.pt"), "--program", str(binary_path("cpu")), "--samples", "130"]
    first, second = str(tmp_path / "first.json"), str(tmp_path / "second.json")
    speedrun.run([*common, "--recipes", recipe, "--moments", "2", "--rivals", "guided", "--rival_moments", "1", "--output", first])
    runs = json.loads(Path(first).read_text())["runs"]
    assert list(runs) == [recipe, "guided-diffusion"] and len(runs["guided-diffusion"][0]) == 1
    speedrun.run([*common, "--recipes", "--rivals", "guided", "--rival_seconds", "0.1", "--moments", "2", "--earlier", first, "--output", second])
    runs = json.loads(Path(second).read_text())["runs"]
    rivals = runs["guided-diffusion"]
    assert len(rivals) == 2 and len(rivals[0]) == 1 and len(rivals[1]) in (1, 2) and len(runs[recipe]) == 1  # half of 0.1 s may be no step
    assert "guided-diffusion" in capsys.readouterr().out
    other = [*common[:-1], "140", "--recipes", "--earlier", first]
    for words, earlier in (other, first), ([*common, "--recipes", "--earlier", str(file)], str(file)):
        with pytest.raises(UserError, match=earlier):
            speedrun.run(words)


def test_a_rival_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speedrun_rivals.Lucidrains, "packages", ("no_such_package",))
    with pytest.raises(UserError, match="--rivals .*no_such_package"):
        speedrun_rivals.check(["lucidrains"])


# ----------------------------------------------------------------------------------------------------------------------
# dev/benchmarks/conditions.py


def test_what_resembles_held_out_images_is_left_out() -> None:
    images = np.stack([np.full((3, 8, 8), level, np.uint8) for level in (0, 10, 100, 200)])
    assert conditions.nearest_distance(images[:3], images[3:]).tolist() == [200, 190, 100]


def test_errors_of_conditions() -> None:
    truth = np.zeros((2, 3, 8, 8), np.float32)
    left_out = conditions.holes(2, 8, 8)
    assert left_out.sum((1, 2, 3)).tolist() == [16, 16]
    assert conditions.error(truth + 0.1, truth) == pytest.approx(12.75)
    assert conditions.error(truth + 0.2 * left_out, truth, left_out) == pytest.approx(25.5)
    assert conditions.smaller(truth + 0.1).shape == (2, 3, 2, 2)


@pytest.mark.long
def test_conditions_by_the_program(tmp_path: Path, make_data: Callable, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its models, tiny ones: each is trained, draws, and leaves its picture; a second call finds them trained."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(conditions, "DDPM_STEPS", 12)
    file = make_data("d.bin", np.random.default_rng(0).integers(0, 256, (60, 3, 8, 8)).astype(np.uint8))
    recipe = " ".join(map(str, [*TINY_MODEL, "--batch_size", 2, "--timestep_respacing", 3]))
    words = ["--data_file", str(file), "--program", str(binary_path("cpu")), "--recipe", recipe, "--max_steps", "2", "--output_dir", "c"]
    conditions.run(words)
    told = capsys.readouterr().out
    assert all(task in told and (tmp_path / f"c/{task}.png").exists() for task in conditions.TASKS)
    conditions.run([*words, "--only", "gray"])
    assert "gray" in capsys.readouterr().out
    for more in ["--only", "depth"], ["--output_dir", str(file)]:
        with pytest.raises(UserError, match=more[0]):
            conditions.run([*words, *more])
    with pytest.raises(UserError, match="train.bin"):
        conditions.run([*words, "--data_file", "c/train.bin"])
    other = make_data("e.bin", np.random.default_rng(1).integers(0, 256, (60, 3, 8, 8)).astype(np.uint8))
    with pytest.raises(UserError, match="gray/model_0000002.bin"):
        conditions.run([*words, "--data_file", str(other), "--only", "gray"])
