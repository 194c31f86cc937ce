"""What docs/ says: the readers in FORMATS.md read what the programs write, and functions that DIFFUSION.md and FORMATS.md name are there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from conftest import ROOT, TINY, flags

import model_files
import prepare_data
import train_unet

SOURCES = ["train_unet.cu", "dev/reference.h", "dev/harness.h", "dev/harness.py", "train_unet.py", "model_files.py", "prepare_data.py"]


def readers() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs/FORMATS.md").read_text(), re.S):
        exec(code, names)
    return names


def test_readers(run: Callable[..., Any], tmp_path: Path) -> None:
    doc = readers()
    images = np.random.default_rng(0).integers(0, 256, (11, 1, 8, 8), np.uint8)
    labels = np.arange(11) % 3
    doc["write_data"](tmp_path / "data.bin", images, labels, 3)
    for read in (doc["read_data"], prepare_data.read_data):
        again, again_labels, classes = read(str(tmp_path / "data.bin"))
        assert classes == 3 and np.array_equal(images, again) and np.array_equal(labels, again_labels)

    run(flags(TINY, "--image_size 8 --data_file data.bin --max_steps 3 --class_cond True --class_dropout 0.1"))
    path = str(tmp_path / "out/model_0000003.bin")
    header, arrays = doc["read_model"](path)
    twin = train_unet.read_model(path)
    assert header["step"] == 3 and header["num_classes"] == 3 and list(arrays) == list(twin.arrays())
    for name, array in twin.arrays().items():
        assert np.array_equal(arrays[name], array)
    tensors = doc["tensors"](header, arrays["weights"])
    expected = model_files.to_state_dict(twin.config, twin.weights)
    assert list(tensors) == list(expected)
    assert all(np.array_equal(tensors[name], expected[name].numpy()) for name in tensors)
    assert [row["step"] for row in doc["read_log"](tmp_path / "out/log.csv")] == [1, 2, 3]


def test_shapes() -> None:
    doc = readers()
    for preset in ("fashion32", "unet64", "adm64"):
        for extra in ({}, {"conv_resample": True, "resblock_updown": False}, {"channel_mult": (1.0, 1.0), "attention_resolutions": ()}):
            config = model_files.valid(train_unet.preset_flags(preset) | extra)
            raw = model_files.pack_header(train_unet.ModelFile(config, np.zeros(1, np.float32))).tobytes()
            fields = {k: np.frombuffer(raw, kind, *(n or [1]), offset=at).tolist() for k, (at, kind, *n) in doc["HEADER"].items()}
            header = {k: v if len(doc["HEADER"][k]) == 3 else v[0] for k, v in fields.items()}
            expected = {name: tuple(shape) for name, shape in model_files.parameter_shapes(config).items()}
            assert list(doc["shapes"](header).items()) == list(expected.items())


def test_names() -> None:
    code = "\n".join((ROOT / name).read_text() for name in SOURCES if (ROOT / name).exists())
    for page in ("DIFFUSION.md", "FORMATS.md"):
        text = re.sub(r"```.*?```", "", (ROOT / "docs" / page).read_text(), flags=re.S)
        for name in re.findall(r"`([A-Za-z]\w+_\w+)`", text):
            assert re.search(rf"\b{name}\b", code), f"docs/{page} speaks of {name}, which is nowhere in the code"


def test_map() -> None:
    """train_unet.cu's map tells where things are: make map renews it."""
    done = subprocess.run([sys.executable, "dev/map.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr
