"""Every launch of the GPU build, on GPUs that are not there: the program's host code runs with fake_cudart.cpp in the place of CUDA's runtime library, which checks
threads, registers, shared memory, attributes, grids and clusters of whatever is launched. Then the sentences for GPUs and drivers that do not fit.

make test_launches builds the binary and runs this (ARCH=all: code for all architectures, several minutes); make test_all does so where there is nvcc.

launches.txt says which kernels each preset gets on each kind of GPU. Who changes a choice reads the difference and renews the file:
    python dev/test/test_launches.py                 writes launches.txt anew, for the GPUs that the newest binary has code for
    python dev/test/test_launches.py FOLDER          all launches, tensor maps and allocations of all models, a file each: to be compared with diff -r
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT, flags

BINARY = Path(os.environ.get("TRAIN_UNET_LAUNCHES") or max(ROOT.glob("train_unet_launches_*[0-9a]"), key=os.path.getmtime, default=""))
pytestmark = [pytest.mark.long, pytest.mark.skipif(not BINARY.is_file() and not shutil.which("nvcc"), reason="there is no nvcc here to build it")]


@dataclass(frozen=True)
class Gpu:
    """As in CUDA C++ Programming Guide, "Compute Capabilities". A block can have all of a multiprocessor's shared memory but 1 KB."""

    name: str
    capability: int
    multiprocessors: int
    shared_kb: int
    threads: int = 2048
    blocks: int = 32
    presets: bool = True  # False: a GPU like another one but for its multiprocessors, which the models beside the presets show


GPUS = [
    Gpu("A100", 80, 108, 164),
    Gpu("RTX 3090", 86, 82, 100, 1536, 16),
    Gpu("RTX 3050", 86, 20, 100, 1536, 16, presets=False),
    Gpu("RTX 4090", 89, 128, 100, 1536, 24, presets=False),
    Gpu("H200", 90, 132, 228),
    Gpu("B200", 100, 148, 228),
    Gpu("RTX 5090", 120, 170, 100, 1536, 24),
    Gpu("RTX 5060", 120, 30, 100, 1536, 24, presets=False),
]
RTX_3090 = GPUS[1]

# Beside the presets: other sizes of images, batches, channels and heads, and what trains in other ways.
UNET64 = "--preset unet64"
MODELS = [
    flags(UNET64, "--batch_size 128"),
    flags(UNET64, "--batch_size 1"),
    flags("--preset fashion32 --batch_size 256"),
    flags(UNET64, "--image_size 32 --num_channels 128 --num_head_channels 64 --attention_resolutions 16,8"),
    flags(
        UNET64, "--image_size 128 --num_channels 128 --channel_mult 1,1,2,3,4 --attention_resolutions 32,16,8 --num_head_channels 64 --batch_size 4"
    ),
    flags(UNET64, "--image_size 256 --batch_size 2 --attention_resolutions 32"),
    flags(UNET64, "--num_channels 96 --image_size 48x96 --attention_resolutions 12,6 --batch_size 7 --num_head_channels 48 --optimizer muon"),
    flags(UNET64, "--num_channels 128 --num_head_channels 128"),
    flags(UNET64, "--image_size 128 --patch_size 2"),
    flags(
        UNET64, "--num_channels 256 --channel_mult 1,2 --attention_resolutions 32 --num_heads 1 --num_head_channels -1 --batch_size 4"
    ),  # 512 channels
    flags(UNET64, "--num_channels 32 --num_head_channels 32 --attention_resolutions 64,32 --batch_size 2 --in_channels 1"),
    flags(UNET64, "--dropout 0.1 --class_cond True --num_classes 10 --class_dropout 0.1 --guidance_scale 2 --learn_sigma True"),
    flags(UNET64, "--use_scale_shift_norm True --resblock_updown True --num_res_blocks 1 --dropout 0.1"),
    flags(UNET64, "--conv_resample False --objective edm --channel_mult 1,5 --attention_resolutions 32"),
    flags(UNET64, "--microbatch 8 --optimizer muon"),
    flags(UNET64, "--use_checkpoint True"),
]
SAMPLERS = [  # the models take turns
    "--sampler ddim",
    "--sampler ddpm --dynamic_threshold 0.9",
    "--sampler heun --S_churn 2",
    "--sampler dpmpp_2m",
]


@functools.cache
def code() -> dict[int, list[str]]:
    """For each architecture in the binary (80, 90, ...), the lines that tell fake_cudart.cpp of its kernels, from what ptxas -v said."""
    lines: dict[int, list[str]] = {}
    pattern = r"Compiling entry function '(\w+)' for 'sm_(\d+)a?'(?s:.*?)Used (\d+) registers(?:.*?(\d+) bytes smem)?"
    for kernel, arch, registers, shared in re.findall(pattern, Path(f"{BINARY}.ptxas").read_text()):
        lines.setdefault(int(arch), []).append(f"kernel {kernel} {registers} {shared or 0}")
    return lines


def describe(folder: Path, gpu: Gpu, arch: int | None = None, **changes: int) -> Path:
    """The description of a GPU that runs this code (of the nearest older architecture of its generation, as its driver chooses), with changes."""
    if arch is None:
        suited = [a for a in code() if a // 10 == gpu.capability // 10 and a <= gpu.capability]
        if not suited:
            pytest.skip(f"{BINARY.name} holds no code for sm_{gpu.capability}: make test_launches ARCH=all")
        arch = max(suited)
    shared = gpu.shared_kb * 1024
    numbers = {"capability": gpu.capability, "code": arch, "multiprocessors": gpu.multiprocessors, "threads": gpu.threads, "blocks": gpu.blocks}
    numbers |= {"shared": shared, "block_shared": shared - 1024} | changes
    path = folder / "gpu.txt"
    path.write_text("\n".join([*(f"{name} {value}" for name, value in numbers.items()), *code().get(arch, [])]))
    return path


def run(words: Iterable[object], gpu: Path | str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    if not BINARY.is_file():
        pytest.fail("train_unet_launches is missing: make test_launches")
    environment = os.environ | {"FAKE_GPU": str(gpu)} | environment
    return subprocess.run([BINARY, *map(str, words)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def problems(words: list[str], gpu: Path | str, cwd: Path) -> list[str]:
    """What is wrong with the launches of a run, a line each."""
    done = run(words, gpu, cwd)
    *lines, summary = done.stderr.strip().split("\n")
    launches = re.fullmatch(r"fake GPU \d+: (\d+) launches of \d+ kernels", summary)
    if done.returncode or not launches or int(launches[1]) < 10:
        lines.append(f"exit code {done.returncode}, {summary}")
    return [f"{' '.join(words)}: {line.removeprefix('fake GPU: ')}" for line in lines]


def check_all(runs: list[list[object]], gpu: Gpu, folder: Path) -> None:
    described = describe(folder, gpu)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [*itertools.chain(*pool.map(lambda words: problems([*map(str, words)], described, folder), runs))]
    assert not found, f"on a {gpu.name} (sm_{gpu.capability}), whose blocks have {gpu.shared_kb - 1} KB of shared memory:\n" + "\n".join(found)


@functools.cache
def presets() -> list[str]:
    """As --help lists them."""
    return re.search(r"--preset .*\((\w+(?:\|\w+)+)\)", run(["--help"], os.devnull, ROOT).stdout)[1].split("|")


@functools.cache
def models() -> list[list[str]]:
    return [*MODELS, *(["--preset", name] for name in presets())]


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_training(gpu: Gpu, tmp_path: Path) -> None:
    """And forward passes; on Hopper in FP8, too."""
    precisions = ("bf16", "fp32", "fp8") if gpu.capability == 90 else ("bf16", "fp32")
    check_all([[*words, "--precision", p, "--bench", 1] for words in (models() if gpu.presets else MODELS) for p in precisions], gpu, tmp_path)


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS if gpu.capability != 90], ids=lambda gpu: gpu.name)
def test_fp8_needs_hopper(gpu: Gpu, tmp_path: Path) -> None:
    told = run(["--preset", "unet64", "--bench", 1, "--precision", "fp8"], describe(tmp_path, gpu), tmp_path)
    assert told.returncode == 1
    assert told.stderr.startswith("train_unet: --precision fp8: needs an H100 or H200")


CHOICES = Path(__file__).with_name("launches.txt")


def choices(words: list[str], precision: str, gpu: Path) -> str:
    """All launches of training steps and forward passes, a line each, with their grids, and what is between them: tensor maps, allocations."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "launches"
        run([*words, "--precision", precision, "--bench", 1], gpu, path.parent, FAKE_LAUNCHES=str(path))
        return path.read_text()


def table_of_choices(gpu: Gpu, folder: Path) -> str:
    """How many launches of each kernel there are in a training step and a forward pass of each preset; and a digest of them with all that choices() tells."""
    described = describe(folder, gpu)
    columns = [(preset, precision) for precision in ("bf16", "fp32") for preset in presets()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        lists = [*pool.map(lambda column: choices(["--preset", column[0]], column[1], described), columns)]
    counts = [Counter(re.findall(r"^(\w+).* grid ", lines, re.MULTILINE)) for lines in lists]
    digests = [hashlib.sha256(lines.encode()).hexdigest()[:8] for lines in lists]
    kernels = sorted(set().union(*counts))
    rows = [[gpu.name, *(preset for preset, _ in columns)], ["", *(precision for _, precision in columns)], ["digest", *digests]]
    rows += [[kernel, *(str(count[kernel] or "-") for count in counts)] for kernel in kernels]
    return "\n".join(f"{row[0]:40}" + "".join(f"{cell:>14}" for cell in row[1:]) for row in rows)


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS if gpu.presets], ids=lambda gpu: gpu.name)
def test_choices(gpu: Gpu, tmp_path: Path) -> None:
    found, known = table_of_choices(gpu, tmp_path), CHOICES.read_text().strip().split("\n\n")
    assert found in known, f"{CHOICES.name} has other launches (python {Path(__file__).relative_to(ROOT)} renews it)"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, list[str]]:
    """A file of each model, and its flags. It is all zeros, which take no room on the disk."""
    import numpy as np

    import train_unet as twin
    from common import model_files
    from common.config import make_config
    from common.data_files import write_data

    folder, files = tmp_path_factory.mktemp("weights"), {}
    for words in models():
        config = make_config(twin.parse_flags(words, twin.FLAGS))
        file = twin.ModelFile(config, np.zeros(twin.parameter_count(config), "<f4"))
        header = model_files.pack_header(file)
        header["crc"] = model_files.checksum(header, [file.weights])
        path = folder / f"{'_'.join(words[1::2])}.bin"
        path.write_bytes(header.tobytes())
        os.truncate(path, 1024 + file.weights.nbytes)
        files[path] = words
        if config.picture_factor:
            H, W = (size // config.picture_factor for size in config.image_size)
            write_data(f"{folder}/small_{path.name}", np.zeros((1, config.in_channels, H, W), np.uint8))
    return files


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_sampling(gpu: Gpu, weights: dict[Path, list[str]], tmp_path: Path) -> None:
    """Of models above 25 M parameters on one GPU and in one precision only: reading them takes long."""
    runs = []
    for i, (path, words) in enumerate(weights.items()):
        small = path.stat().st_size < 1e8
        how = flags(SAMPLERS[i % len(SAMPLERS)], "--guidance_scale 2" if "--class_dropout" in words else [], "--sample", [3, 48][i % 2])
        small_images = path.with_name(f"small_{path.name}")
        how += ["--cond_file", small_images] * small_images.exists()
        for p in ("bf16", "fp32") if small else ("fp32",) if gpu is RTX_3090 else ():
            runs.append(["--init", path, "--output", f"{path.stem}_{p}.bin", "--precision", p, "--timestep_respacing", 3, *how])
    check_all(runs, gpu, tmp_path)


@pytest.mark.parametrize(
    "precision, change, complaint",
    [
        ("bf16", {"block_shared": 48 * 1024}, "shared memory: .* there are 49152"),
        ("fp32", {"block_shared": 48 * 1024}, "shared memory: .* there are 49152"),
        ("bf16", {"shared": 64 * 1024, "block_shared": 63 * 1024, "arch": 90}, "shared memory: .* there are 64512"),
        ("bf16", {"arch": 90}, "cluster: .* capability 9.0"),
        ("fp32", {"arch": 0, "code": 86}, "code: "),
    ],
)
def test_the_check_notices(precision: str, change: dict[str, int], complaint: str, tmp_path: Path) -> None:
    """Negative controls: GPUs with less than the program takes for granted."""
    if change.get("arch") == 90 and 90 not in code():
        pytest.skip("there is no code for sm_90a")
    gpu = describe(tmp_path, RTX_3090, **change)
    found = problems(["--preset", "unet64", "--precision", precision, "--bench", "1"], gpu, tmp_path)
    assert any(re.search(complaint, line) for line in found), "\n".join(found)


@pytest.mark.parametrize(
    "numbers, words, told",
    [
        ({"error": 35, "driver": 12020}, [], ["driver is too old", "CUDA 12.2", "make -B train_unet NVCC=", "make train_unet_cpu"]),
        (
            {"error": 35, "driver": 0},
            [],
            ["there is no GPU that it can use", "make train_unet_cpu"],
        ),  # what CUDA says where there is no driver at all
        ({"error": 100}, [], ["there is no GPU that it can use", "make train_unet_cpu"]),
        ({"capability": 75, "code": 0}, [], ["capability 7.5", "8.0 or later", "make train_unet_cpu"]),
        ({"capability": 120, "code": 0}, [], ["no code for GPU 0", "12.0", "make -B train_unet "]),
        ({"count": 2}, ["--device", "2"], ["--device 2", "2 GPUs", "CUDA_VISIBLE_DEVICES"]),
    ],
)
def test_what_does_not_fit_is_a_sentence(numbers: dict[str, int], words: list[str], told: list[str], tmp_path: Path) -> None:
    done = run(["--preset", "fashion32", *words], describe(tmp_path, RTX_3090, **{"arch": 0} | numbers), tmp_path)
    sentence = done.stderr.split("fake GPU")[0]
    assert done.returncode == 1 and sentence.startswith("train_unet: ") and sentence.count("\n") == 1, done.stderr
    assert all(word in sentence for word in told), sentence
    assert os.listdir(tmp_path) == ["gpu.txt"]


def test_device_chooses(tmp_path: Path) -> None:
    done = run(["--preset", "fashion32", "--bench", "1", "--device", "1"], describe(tmp_path, RTX_3090, count=2), tmp_path)
    assert done.returncode == 0 and "fake GPU 1: " in done.stderr, done.stderr


def main(to: Path | None) -> None:
    tables = {table.split("  ")[0]: table for table in CHOICES.read_text().strip().split("\n\n")} if CHOICES.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for gpu in GPUS:
            if not any(a // 10 == gpu.capability // 10 and a <= gpu.capability for a in code()):
                continue
            if to is None and gpu.presets:
                tables[gpu.name] = table_of_choices(gpu, Path(folder))
            elif to:
                described = describe(Path(folder), gpu)
                for number, words in enumerate(models()):
                    for precision in ("bf16", "fp32"):
                        to.mkdir(exist_ok=True)
                        (to / f"{gpu.name} {number} {precision}".replace(" ", "_")).write_text(choices(words, precision, described))
    if to is None:
        CHOICES.write_text("\n\n".join(tables[gpu.name] for gpu in GPUS if gpu.name in tables) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
