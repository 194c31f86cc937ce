"""dev/speedrun.py: what it says of pictures whose faults are known, when a run has come to a quality, and a short run of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY_MODEL, TINY_RUN, binary_path, environment, make_images

sys.path.insert(0, str(ROOT / "dev"))
import quality
import speedrun


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


def test_seconds_to() -> None:
    run = [speedrun.Moment(step, seconds, distance, 0, 0, 0) for step, seconds, distance in ((10, 2.0, 30.0), (20, 4.0, 10.0), (30, 6.0, 12.0))]
    assert speedrun.seconds_to(run, 40) == 2
    assert speedrun.seconds_to(run, 15) == pytest.approx(3.5)
    assert speedrun.seconds_to(run, 10) == 4
    assert speedrun.seconds_to(run, 9) == float("inf")


def test_images_without_labels_are_classes_of_their_own() -> None:
    """The features of pictures that were never seen tell their subject: parts of one picture are nearer to each other than to those of others."""
    images = quality.to_floats(make_images(130, 3, 16, 16))
    torch.set_num_threads(1)
    a, b = (quality.train_classifier(images, None, 6) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))
    with torch.no_grad():
        right = (a(images).argmax(1) == torch.arange(130)).double().mean()
    assert right > 10 / 130  # ten times what chance gives


def test_crops_stay_inside() -> None:
    """A part of a picture that grows to the right and downwards has values of that picture alone, and half of them are mirrored."""
    torch.manual_seed(0)
    ramp = torch.linspace(-0.5, 0.5, 16).expand(64, 1, 16, 16)
    parts = quality.crop(ramp)
    assert parts.shape == ramp.shape and parts.min() >= -0.5 - 1e-6 and parts.max() <= 0.5 + 1e-6
    mirrored = (parts[:, 0, 0, -1] < parts[:, 0, 0, 0]).double().mean()
    assert 0.25 < mirrored < 0.75


def test_a_run(tmp_path: Path, make_data: object) -> None:
    images = make_images(700, 1, 8, 8)
    file = make_data("d.bin", images, np.arange(700) % 7, 7)
    recipe = " ".join(map(str, [*TINY_MODEL, *TINY_RUN, "--timestep_respacing", 4, "--max_steps", 4]))
    command = [sys.executable, ROOT / "dev/speedrun.py", "--data_file", file, "--program", binary_path("cpu"), "--recipes", recipe, "--moments", 2]
    command += ["--seeds", "3", "--judge", "judge.pt", "--output", "o.json", "--plot", "o.png"]
    for _ in range(2):  # the second time with the judge of the first
        done = subprocess.run(list(map(str, command)), cwd=tmp_path, env=environment(1), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        moments = json.loads((tmp_path / "o.json").read_text())["runs"][recipe][0]
        assert [m["step"] for m in moments] == [2, 4] and 0 < moments[0]["seconds"] < moments[1]["seconds"]
        assert all(m["distance"] > 1 for m in moments)
        assert "560 images to train on" in done.stdout and "seconds to " in done.stdout
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")


def test_what_it_refuses(tmp_path: Path, make_data: object) -> None:
    few = make_data("few.bin", make_images(20, 1, 8, 8))
    for words, told in ((["--data_file", few], "at least 640"), (["--seeds", "a"], "--seeds a: "), (["--moments", "0"], "--moments 0: ")):
        done = subprocess.run([sys.executable, str(ROOT / "dev/speedrun.py"), *map(str, words)], capture_output=True, text=True, timeout=120)
        assert done.returncode == 1 and told in done.stderr and done.stderr.count("\n") == 1
