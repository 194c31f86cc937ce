"""dev/benchmarks/judge.py: whether samples are near to the data, or copies of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

from common import judge as common_judge
from common.data_files import write_data
from common.program import UserError

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


def test_what_it_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_data("d.bin", shapes(300, 0)[0])
    write_data("few.bin", shapes(299, 0)[0])
    write_data("large.bin", shapes(60, 0, 16)[0])
    write_data("s.bin", shapes(60, 0)[0])
    Path("notes.pt").write_text("notes")
    for words, told in {
        "--data_file few.bin --samples s.bin": "few.bin: holds 299 images of 1x8x8, not 300 or more",
        "--data_file d.bin --samples large.bin": "large.bin: holds 60 images of 1x16x16, not 60 or more of 1x8x8",
        "--data_file d.bin --samples s.bin --held_out large.bin": "--held_out large.bin",
        "--data_file d.bin --samples s.bin --judge notes.pt": "--judge notes.pt: is no judge of this data",
        "--data_file d.bin --samples s.bin --judge d.bin": "--judge d.bin",
        "--data_file d.bin": "--samples",
    }.items():
        with pytest.raises(UserError, match=re.escape(told)):
            judge.run(words.split())
    assert Path("notes.pt").read_text() == "notes"
