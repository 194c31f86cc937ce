"""dev/benchmarks/judge.py: whether samples are near to the data, or copies of it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT

from common import judge as common_judge
from common.data_files import write_data
from common.program import UserError
from common.random_numbers import held_out_images

sys.path.insert(0, str(ROOT / "dev/benchmarks"))
import judge


def shapes(count: int, seed: int, size: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Bright squares of four sizes, the classes, anywhere on a dark ground: uint8 (count, 1, size, size), labels."""
    draw = np.random.default_rng(seed)
    images, labels = draw.integers(0, 40, (count, 1, size, size)).astype(np.uint8), np.arange(count) % 4
    for image, label in zip(images, labels):
        y, x = draw.integers(0, size - label, 2)
        image[0, y : y + label + 1, x : x + label + 1] = draw.integers(150, 256)
    return images, labels


@pytest.mark.parametrize("labelled", [True, False])
def test_copies_and_strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, labelled: bool) -> None:
    """Of the same distribution: as near as held-out images. Copies of the data are told; noise is far; the judge in a file says the same again."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"EPOCHS": 4, "EXEMPLAR_EPOCHS": 8, "BOOTSTRAPS": 20}.items():
        monkeypatch.setattr(common_judge, name, value)
    data, held_out = shapes(800, 0), shapes(160, 1)
    write_data("d.bin", data[0], *([data[1], 4] if labelled else []))
    write_data("h.bin", held_out[0])
    write_data("same.bin", shapes(160, 2)[0])
    write_data("copies.bin", np.concatenate([data[0][:120], shapes(40, 3)[0]]))
    write_data("noise.bin", np.random.default_rng(4).uniform(-1, 1, (160, 1, 8, 8)).astype(np.float32))
    words = ["--data_file", "d.bin", "--held_out", "h.bin", "--samples", "same.bin", "copies.bin", "noise.bin", "--judge", "j.pt"]
    said = []
    for _ in range(2):
        judge.run(words)
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and re.match(r"judge [0-9a-f]{8}: trained on 640 images of d.bin", said[0])
    assert ("of the 160 images that it has not seen right" in said[0]) == labelled
    rows = {line.split()[0]: line for line in said[0].splitlines() if re.match(r"\w+\.bin \(", line)}
    figures = {name: [float(x) for x in re.findall(r"[\d.]+", line.partition(")")[2])] for name, line in rows.items()}
    assert list(figures) == ["h.bin", "same.bin", "copies.bin", "noise.bin"]
    distance, other, to_held_out, copies = ({name: row[i] for name, row in figures.items()} for i in (0, 2, 3, 6))
    assert distance["same.bin"] < 3 * distance["h.bin"] and distance["noise.bin"] > 3 * distance["same.bin"]
    assert other["noise.bin"] > 3 * other["same.bin"] and to_held_out["noise.bin"] > 3 * to_held_out["same.bin"] and to_held_out["h.bin"] < 1e-6
    assert copies["copies.bin"] >= 120 / 160 and copies["noise.bin"] == 0 and copies["same.bin"] < copies["copies.bin"] - 0.2


def pretend_to_draw(monkeypatch: pytest.MonkeyPatch, drawn: dict[int, np.ndarray], val_fraction: float, trained_on: int = 0) -> None:
    """As if ./train_unet had drawn these images from the checkpoint of each step. trained_on: the checksum of its data."""
    monkeypatch.setattr(
        judge,
        "read_model",
        lambda path: SimpleNamespace(
            step=int(re.findall(r"\d+", path)[0]), config=SimpleNamespace(val_fraction=val_fraction), state=SimpleNamespace(data_crc=trained_on)
        ),
    )
    monkeypatch.setattr(judge, "make_config", lambda flags, preset, file: flags)
    monkeypatch.setitem(judge.generate.BACKENDS, "native", lambda file, config, count: torch.from_numpy(drawn[file.step]).float()[:count])


def test_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The checkpoints of a run, oldest first, as if ./train_unet had drawn noise at first and copies of the data at last; judge.csv has the same figures."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"EPOCHS": 2, "EXEMPLAR_EPOCHS": 3, "BOOTSTRAPS": 10}.items():
        monkeypatch.setattr(common_judge, name, value)
    images = shapes(300, 0)[0]
    write_data("d.bin", images)
    Path("out").mkdir()
    for step in (20, 100, 3):
        Path(f"out/model_{step:07d}.bin").touch()
    drawn = {3: np.random.default_rng(4).uniform(-1, 1, (60, 1, 8, 8)), 20: shapes(60, 2)[0] / 127.5 - 1, 100: images[:60] / 127.5 - 1}
    pretend_to_draw(monkeypatch, drawn, 0.0)
    Path("out/index.html").write_text('<script>[{"name":"out","judge":"","rows":[]}]</script>')
    judge.run("--data_file d.bin --runs out --num_samples 60".split())
    assert json.loads(Path("out/index.html").read_text()[8:-9]) == [{"name": "out", "judge": Path("out/judge.csv").read_text(), "rows": []}]
    rows = re.findall(r"^out/model_0*(\d+)\.bin +([\d.]+) .* ([\d.]+)$", capsys.readouterr().out, re.M)
    assert [int(step) for step, *_ in rows] == [3, 20, 100]
    head, *lines = (line.split(",") for line in Path("out/judge.csv").read_text().splitlines())
    assert head == "step distance spread other_judge to_held_out precision recall copies".split()
    for line, row in zip(lines, rows, strict=True):  # three decimals on the screen, six digits in the file
        assert [float(line[0]), float(line[1]), float(line[-1])] == pytest.approx([float(x) for x in row], abs=1e-3)
    assert float(lines[0][-1]) == 0 and float(lines[2][-1]) == 1 and {line[4] for line in lines} == {"nan"}
    with pytest.raises(UserError, match="--runs out: draws images of 1x8x8; those of the data are 1x16x16".replace("out", r"out/model_0000003\.bin")):
        write_data("large.bin", shapes(300, 0, 16)[0])
        judge.run("--data_file large.bin --runs out --num_samples 60".split())


def test_images_that_a_run_has_held_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Those of --val_fraction are no part of the data, and stand beside the samples, by the flag or as the run's checkpoints say."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"EPOCHS": 2, "EXEMPLAR_EPOCHS": 3, "BOOTSTRAPS": 10}.items():
        monkeypatch.setattr(common_judge, name, value)
    images, labels = shapes(400, 0)
    write_data("d.bin", images, labels, 4)
    held_out = held_out_images(400, 0.25)
    write_data("held.bin", images[held_out])
    rest = np.setdiff1d(np.arange(400), held_out)
    write_data("rest.bin", images[rest], labels[rest], 4)
    Path("out").mkdir()
    Path("out/model_0000003.bin").touch()
    pretend_to_draw(monkeypatch, {3: images[held_out] / 127.5 - 1}, 0.25)
    said = []
    for words in (
        "--data_file rest.bin --held_out held.bin --samples held.bin",
        "--data_file d.bin --val_fraction 0.25 --samples held.bin",
        "--data_file d.bin --runs out --num_samples 100",
    ):
        judge.run(words.split())
        said.append(
            [line[40:] if "(" in line or "model_" in line else line for line in capsys.readouterr().out.replace("rest.bin", "d.bin").splitlines()]
        )
    assert said[2].pop() == "wrote out/judge.csv; open out/index.html"
    assert said[0] == said[1] == said[2] and said[0][0].startswith("judge ") and len(said[0]) == 5
    assert float(said[0][-1].split()[-1]) < 0.5  # an image that was held out is no copy of the others
    with pytest.raises(UserError, match="--val_fraction 0.1 and 0.25: hold out different images"):
        judge.run("--data_file d.bin --runs out --val_fraction 0.1".split())
    pretend_to_draw(monkeypatch, {3: images[held_out] / 127.5 - 1}, 0.125, trained_on=1)
    judge.run("--data_file d.bin --runs out --num_samples 100".split())
    told = capsys.readouterr().out
    assert "50 images are held out, too few to compare with" in told and "--runs out: was trained on other images than those of d.bin" in told


def test_what_it_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_data("d.bin", shapes(300, 0)[0])
    write_data("few.bin", shapes(299, 0)[0])
    write_data("large.bin", shapes(60, 0, 16)[0])
    write_data("s.bin", shapes(60, 0)[0])
    Path("out").mkdir()
    Path("out/model_0000003.bin").touch()
    Path("notes.pt").write_text("notes")
    for words, told in {
        "--data_file few.bin --samples s.bin": "few.bin: holds 299 images of 1x8x8, not 300 or more",
        "--data_file d.bin --samples large.bin": "large.bin: holds 60 images of 1x16x16, not 60 or more of 1x8x8",
        "--data_file d.bin --samples s.bin --held_out large.bin": "--held_out large.bin",
        "--data_file d.bin --samples s.bin --judge notes.pt": "--judge notes.pt: is no judge of this data",
        "--data_file d.bin --samples s.bin --judge d.bin": "--judge d.bin",
        "--data_file d.bin --samples s.bin --val_fraction 0.6": "--val_fraction 0.6: leaves 120 images of d.bin for a judge, not 150 or more",
        "--data_file d.bin --samples s.bin --val_fraction 1": "--val_fraction 1: must be above 0 and below 1",
        "--data_file d.bin --samples s.bin --val_fraction 0.1 --held_out s.bin": "--val_fraction 0.1: --held_out s.bin names images that no model",
        "--data_file d.bin": "--samples",
        "--data_file d.bin --runs .": "--runs .: holds no checkpoint",
        "--data_file d.bin --runs out --num_samples 59": "--num_samples 59: must be at least 60",
        "--data_file d.bin --samples s.bin --num_samples 60": "--num_samples 60: is of the checkpoints of --runs",
    }.items():
        with pytest.raises(UserError, match=re.escape(told)):
            judge.run(words.split())
    assert Path("notes.pt").read_text() == "notes"


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 20, 28), (3, 64, 96)])
def test_the_larger_network(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """512 numbers of images of any size; read from a judge's file in place of the small one, with the same features."""
    images, labels = torch.rand(6, *shape) * 2 - 1, torch.tensor([0, 1, 2, 0, 1, 2])
    network = common_judge.build_large_classifier(*shape, 3).eval()
    torch.save(network.state_dict(), tmp_path / "j.pt")
    found = common_judge.make_judge(images, labels, images, str(tmp_path / "j.pt"))
    assert found.held_out.shape == (6, common_judge.LARGE_FEATURES) and found.held_out.isfinite().all()
    assert torch.equal(found.held_out, common_judge.features(network, images) / found.scale)
    moved = common_judge.shift(images)
    assert moved.shape == images.shape and moved.abs().max() <= 1
