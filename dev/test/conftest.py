"""What the tests of the whole program share: the binaries, small data files and models, and readers of what it writes.

The formats are written and read here with numpy alone, from docs/FORMATS.md's tables, so that a mistake in one of the programs can't hide.
The tests run one thread each (several processes may share the machine) except where threads are what is tested.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and what is started here would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)  # so it is in the background of a script

DATA_MAGIC, MODEL_MAGIC, UNET_CU_DATA_MAGIC, UNET_CU_MODEL_MAGIC = 20261120, 20261121, 20240620, 12345678


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: left out by make test, which takes less than six minutes; make test_all runs everything")


def flags(*parts: object) -> list[str]:
    """A command line of `--name value` pairs, from lists, single words and "--several words"; of a flag given twice the last value holds."""
    words: list[str] = []
    for part in parts:
        words += map(str, part) if isinstance(part, list) else part.split(" ") if isinstance(part, str) and part.startswith("--") else [str(part)]
    pairs = dict(zip(words[::2], words[1::2]))
    assert len(words) % 2 == 0 and all(name.startswith("--") for name in pairs), words
    return [word for pair in pairs.items() for word in pair]


# A model that trains a step in a few milliseconds on 8x8 images. Every training flag is named: presets may change.
TINY_MODEL = flags("--num_channels 32 --channel_mult 1,1 --num_res_blocks 1 --attention_resolutions 4 --num_head_channels 32")
TINY_RUN = flags(
    "--preset fashion32 --batch_size 4 --lr 1e-3 --lr_schedule constant --warmup_steps 0 --adam_beta2 0.999 --ema_rate 0.995 --noise_schedule linear"
)
TINY = flags(TINY_MODEL, TINY_RUN, "--sample_interval 0 --timestep_respacing 4 --eta 0 --num_samples 4")


@dataclass
class Result:
    code: int
    out: str
    err: str


def environment(threads: int = 1) -> dict[str, str]:
    # Threads that wait without spinning: on a busy machine a spinning team is a hundred times slower.
    return os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
        "ASAN_OPTIONS": "allocator_may_return_null=1:detect_leaks=0",  # what lives as long as the process is not freed
    }


# TRAIN_UNET_BUILD=cuda runs the same tests on the GPU build, in its exact mode: `make test` does so where there is a GPU.
BUILD = os.environ.get("TRAIN_UNET_BUILD", "cpu")


@functools.cache
def exact_gpu_build(program: str) -> Path:
    """A script that is the GPU build with --precision fp32."""
    script = Path(tempfile.mkdtemp()) / "train_unet"
    script.write_text(f'#!/bin/sh\nexec "{ROOT}/{program}_cuda" "$@" --precision fp32\n')
    script.chmod(0o755)
    return script


def binary_path(name: str) -> Path:
    """A build by name: cpu, asan, cuda, or bench, the workshop's. `make test` makes them first; TRAIN_UNET_BINARIES names another folder to take them from."""
    if name in ("cpu", "bench") and BUILD == "cuda":
        return exact_gpu_build("dev/bench" if name == "bench" else "train_unet")
    path = Path(os.environ.get("TRAIN_UNET_BINARIES", ROOT)) / ("dev/bench_cpu" if name == "bench" else f"train_unet_{name}")
    if not path.exists():
        pytest.fail(f"{path} is missing: make {path.name if name != 'bench' else 'dev/bench_cpu'}")
    return path


# What asks for too much must fail, and not take the machine with it. (The address sanitizer and a GPU's driver ask for terabytes.)
LIMIT_MEMORY = ["sh", "-c", 'ulimit -v 4194304 && exec "$0" "$@"']


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Result]:
    """run(args, cwd=tmp_path, binary="cpu", threads=1, code=0): runs the program; code is the expected exit code, None: any."""

    def run(args: Sequence[object], cwd: Path = tmp_path, binary: str = "cpu", threads: int = 1, code: int | None = 0, timeout: float = 60) -> Result:
        command = [*(LIMIT_MEMORY if binary == BUILD == "cpu" else []), str(binary_path(binary)), *map(str, args)]
        p = subprocess.run(command, cwd=cwd, env=environment(threads), capture_output=True, text=True, errors="replace", timeout=timeout)
        assert code is None or p.returncode == code, f"exit code {p.returncode} of {' '.join(command)}\n{p.stdout[-2000:]}\n{p.stderr[-4000:]}"
        return Result(p.returncode, p.stdout, p.stderr)

    return run


@pytest.fixture
def refused(run: Callable[..., Result], tmp_path: Path) -> Callable[..., str]:
    """refused(args, *words): the program must end with exit code 1 and one sentence that holds these words, and must neither create nor
    change anything in cwd. Returns the sentence."""

    def refused(args: Sequence[object], *words: object, cwd: Path = tmp_path, binary: str = "cpu") -> str:
        before = snapshot(cwd)
        result = run(args, cwd=cwd, binary=binary, code=None, timeout=60)
        told = f"{' '.join(map(str, args))}\nexit code {result.code}, stderr: {result.err[-3000:]}"
        assert result.code == 1, told
        assert result.err.startswith("train_unet: ") and result.err.endswith("\n") and result.err.count("\n") == 1, told
        for word in words:
            assert str(word) in result.err, f"{word!r} is not in: {told}"
        assert snapshot(cwd) == before, f"something was created or changed by {told}"
        return result.err

    return refused


def called(main: Callable[[], int], program: Path | str, *words: object) -> subprocess.CompletedProcess:
    """What a Python program says and returns whose main() is run here: this process has loaded PyTorch already, which takes seconds."""
    out, err = (io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(program), *map(str, words)])
        code = main()
    return subprocess.CompletedProcess(sys.argv, code, *(stream.buffer.getvalue().decode() for stream in (out, err)))


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder below a folder, with size and time of change."""
    return {str(p): (0 if p.is_dir() else p.lstat().st_size, p.lstat().st_mtime_ns) for p in folder.rglob("*")}


# ----------------------------------------------------------------------------------------------------------------------
# data files


def data_bytes(images: np.ndarray, labels: np.ndarray | None = None, num_classes: int = 0, version: int = 1) -> bytes:
    """A data file of images (N, C, H, W), uint8 or float32."""
    body = np.ascontiguousarray(images).tobytes() + (b"" if labels is None else labels.astype("<i4").tobytes())
    if version == 2:
        body += np.array([zlib.crc32(image.tobytes()) for image in images], "<u4").tobytes()
    header = np.zeros(256, "<u4")
    header[:8] = [DATA_MAGIC, version, *images.shape, num_classes, images.dtype.itemsize]
    return seal_data(header.tobytes() + body)


def seal_data(file: bytes) -> bytes:
    """A data file with the two checksums in its header made right: slot 9 is of all behind the header, in version 2 of all behind the images. Slot 8 is of
    the header with 0 in slots 8 and 13."""
    header = np.frombuffer(file[:1024], "<u4").copy()
    images = math.prod(int(header[i]) for i in (2, 3, 4, 5, 7)) if header[1] == 2 else 0
    header[9] = zlib.crc32(file[1024 + images :])
    folder = header[13]
    header[[8, 13]] = 0
    header[8], header[13] = zlib.crc32(header.tobytes()), folder
    return header.tobytes() + file[1024:]


def make_images(count: int = 24, channels: int = 1, height: int = 8, width: int = 8, seed: int = 0) -> np.ndarray:
    """Smooth blobs, uint8: something that can be learnt."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    at = random.uniform(0, 1, (count, channels, 2, 1, 1)) * [[[height]], [[width]]]
    distance = (y - at[:, :, 0]) ** 2 + (x - at[:, :, 1]) ** 2
    return np.clip(255 * np.exp(-distance / height), 0, 255).astype(np.uint8)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 grey images of 8x8 with labels of 3 classes."""
    path = tmp_path_factory.mktemp("data") / "small.bin"
    path.write_bytes(data_bytes(make_images(), np.arange(24) % 3, 3))
    return path


@pytest.fixture
def make_data(tmp_path: Path) -> Callable[..., Path]:
    """make_data(name, images, labels, num_classes): a data file in tmp_path."""

    def make(name: str, images: np.ndarray, labels: np.ndarray | None = None, num_classes: int = 0) -> Path:
        (tmp_path / name).write_bytes(data_bytes(images, labels, num_classes))
        return tmp_path / name

    return make


def read_samples(path: Path) -> np.ndarray:
    """The images (N, C, H, W) that --sample --output x.bin wrote."""
    file = path.read_bytes()
    header = np.frombuffer(file[:1024], "<i4")
    assert header[0] == DATA_MAGIC and header[7] == 4 and seal_data(file) == file
    return np.frombuffer(file[1024:], "<f4", math.prod(header[2:6].tolist())).reshape(header[2:6])


# ----------------------------------------------------------------------------------------------------------------------
# model files


def seal_model(file: bytes) -> bytes:
    """A model file with its checksum made right."""
    zeroed = file[:12] + bytes(4) + file[16:]
    return zeroed[:12] + np.uint32(zlib.crc32(zeroed)).tobytes() + zeroed[16:]


def with_slot(file: bytes, slot: int, value: int | float, kind: str = "<i4") -> bytes:
    """A file whose header holds another value (of a numpy type) from this slot on; its checksums are left as they were."""
    new = np.array(value, kind).tobytes()
    return file[: 4 * slot] + new + file[4 * slot + len(new) :]


@dataclass
class Model:
    """A model file: header as int32, and its arrays, flat, in the order of the file."""

    header: np.ndarray
    arrays: list[np.ndarray]
    history: np.ndarray | None = None  # (T, 11): the latest losses of each t, and how many

    @property
    def weights(self) -> np.ndarray:
        return self.arrays[0]

    @property
    def ema(self) -> np.ndarray:
        return self.arrays[1]

    @property
    def m(self) -> np.ndarray:
        return self.arrays[2]

    @property
    def v(self) -> np.ndarray:
        return self.arrays[3]

    @property
    def step(self) -> int:
        return int(self.header.view("<i8")[32])

    @property
    def updates(self) -> int:
        return int(self.header[81])

    @property
    def bad_in_all(self) -> int:
        return int(self.header[82])


def read_checkpoint(path: Path) -> Model:
    file = path.read_bytes()
    header = np.frombuffer(file[:1024], "<i4")
    assert header[:3].tolist() == [MODEL_MAGIC, 1, 3] and seal_model(file) == file
    values, end = np.frombuffer(file[1024:], "<f4"), int(header.view("<i8")[2]) * (4 + int(header[98]))
    history = values[end:].reshape(header[41], 11) if header[106] else None
    assert header[106] or len(values) == end
    return Model(header, list(values[:end].reshape(4 + header[98], -1)), history)


def random_weights(config: object, seed: int = 0) -> np.ndarray:
    """Every parameter random, those that start as zero too: with a zero projection most of a model is not seen in its output."""
    from common import model_files

    random, parts = np.random.default_rng(seed), []
    for name, shape in model_files.parameter_shapes(config).items():
        w = random.standard_normal(shape, np.float32)
        fan_in = int(np.prod(shape[1:]))
        parts.append(w.ravel() / fan_in**0.5 if len(shape) > 1 else 0.2 * w + (name.endswith("weight")))
    return np.concatenate(parts).astype(np.float32)


def model_name(step: int) -> str:
    return f"model_{step:07d}.bin"


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(p.stem[6:]) for p in folder.glob("model_*.bin"))


# ----------------------------------------------------------------------------------------------------------------------
# logs

LOG_COLUMNS = "step,loss,lr,grad_norm,ms,loss_q0,loss_q1,loss_q2,loss_q3,val_loss,seconds,copies".split(",")


def read_log(folder: Path) -> list[dict[str, str]]:
    """The rows of log.csv as text, without the times that they name, which are never the same."""
    with open(folder / "log.csv", newline="") as f:
        reader = csv.DictReader(f)
        rows = list(reader)
    assert reader.fieldnames == LOG_COLUMNS
    for row in rows:
        assert float(row.pop("ms")) >= 0 and float(row.pop("seconds") or 0) >= 0
    return rows


def shown_runs(page: Path) -> list[dict[str, Any]]:
    """The runs that a page shows."""
    return json.loads(page.read_text().partition('<script id="data" type="application/json">')[2].partition("</script>")[0])


def shown_run(folder: Path) -> dict[str, Any]:
    """What the page of a run's folder shows."""
    return shown_runs(folder / "index.html")[0]


def column(folder: Path, name: str) -> np.ndarray:
    """A column of log.csv; NaN where it is empty."""
    return np.array([float(row[name] or "nan") for row in read_log(folder)])
