"""The same bits in whatever order a GPU works: a short run of the GPU build, whose kernels emulator.cpp runs, with and without what makes it fast.

fake_cudart.cpp does what the streams are told either at once or, with FAKE_LATE, as late as CUDA allows, and lets kernels begin as early as CUDA allows. Who does
not wait for what he needs has other bits then. make -C dev BUILD=emulated builds the binary; make test_all does so where there is nvcc and no GPU."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, TINY_RUN, binary_path, data_bytes, environment, flags, make_images, model_name

BINARY, PLAIN = ROOT / "dev/bench_emulated", ROOT / "dev/bench_plain_emulated"
pytestmark = [pytest.mark.long, pytest.mark.skipif(not BINARY.is_file(), reason="needs make -C dev BUILD=emulated, and nvcc for that")]

GPUS = {"A100": (80, 108, 164), "H200": (90, 132, 228)}
# Two levels, so that there are skips, a strided convolution and an upsampled one; attention; microbatches, whose gradients are added; three steps, of
# which two are graphs and the third is a graph again; a picture.
MODEL = flags("--num_channels 32 --channel_mult 1,2 --num_res_blocks 1 --attention_resolutions 4 --num_head_channels 32")
RUN = flags(TINY_RUN, MODEL, "--data_file small.bin --max_steps 3 --microbatch 2 --dropout 0.1 --class_cond True --num_samples 2 --sample_interval 3")
RUN = flags(RUN, "--timestep_respacing 2 --sampler ddim --output_dir out")
WAYS = {  # after the GPU and the precision; fp32 is the same on both GPUs but for what overlaps
    "others late": ("H200", "bf16", {"FAKE_LATE": "others"}),
    "main late": ("H200", "bf16", {"FAKE_LATE": "main"}),
    "main late, the last block first": ("H200", "bf16", {"FAKE_LATE": "main", "EMULATE_REVERSED": "1"}),
    "no early launches": ("H200", "bf16", {"BENCH_WITHOUT": "early"}),
    "no side stream": ("H200", "bf16", {"BENCH_WITHOUT": "beside"}),
    "a gradient at a time": ("H200", "bf16", {"BENCH_WITHOUT": "batches"}),  # none of so small a model is summed in parts
    "no graphs": ("H200", "bf16", {"BENCH_WITHOUT": "graphs", "FAKE_LATE": "others"}),
    "fp32, others late": ("H200", "fp32", {"FAKE_LATE": "others"}),
    "fp32, main late": ("H200", "fp32", {"FAKE_LATE": "main"}),
    "fp8, others late": ("H200", "fp8", {"FAKE_LATE": "others"}),
    "fp8, main late": ("H200", "fp8", {"FAKE_LATE": "main"}),
    "A100, others late": ("A100", "bf16", {"FAKE_LATE": "others"}),
    "A100, main late": ("A100", "bf16", {"FAKE_LATE": "main"}),
}
# The launches of clusters, and of kernels that Hopper alone has.
CLUSTER, HOPPER = r"cluster (?!1$)", r"^(conv_tiles|conv_small|conv_weight_tma|conv_weight_fp8|attention_\w+_wgmma)"


def describe(folder: Path, gpu: str) -> None:
    """What FAKE_GPU names."""
    capability, multiprocessors, kb = GPUS[gpu]
    words = f"capability {capability} code {capability} multiprocessors {multiprocessors} shared {kb << 10} block_shared {(kb - 1) << 10}"
    (folder / "gpu.txt").write_text(words)


def start(
    folder: Path, gpu: str, precision: str, binary: Path | None = None, more: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess:
    folder.mkdir()
    describe(folder, gpu)
    if "--num_gpus" in more:
        with open(folder / "gpu.txt", "a") as description:
            description.write(" count 2")
    (folder / "small.bin").write_bytes(data_bytes(make_images(8, 3), np.arange(8) % 3, 3))
    known = environment() | {"FAKE_GPU": "gpu.txt"} | variables
    return subprocess.run(
        [binary or BINARY, *RUN, *more, "--precision", precision], cwd=folder, env=known, capture_output=True, text=True, timeout=900
    )


def losses(folder: Path) -> np.ndarray:
    rows = (folder / "out/log.csv").read_text().splitlines()
    return np.array([float(row.split(",")[1]) for row in rows[1:]])


def train(folder: Path, gpu: str, precision: str, more: tuple[str, ...] = (), binary: Path | None = None, **variables: str) -> Path:
    done = start(folder, gpu, precision, binary, more, FAKE_LAUNCHES="launches.txt", **variables)
    assert done.returncode == 0 and re.fullmatch(r"fake GPU 0: .*\n", done.stderr), done.stdout[-1000:] + done.stderr[-2000:]
    return folder


def results(folder: Path) -> tuple[bytes, bytes]:
    """The last checkpoint and the picture."""
    return (folder / "out" / model_name(3)).read_bytes(), (folder / "out/samples_0000003.png").read_bytes()


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """usual(gpu, precision): a run in which everything is on and happens at once."""

    @functools.cache
    def usual(gpu: str, precision: str) -> Path:
        return train(tmp_path_factory.mktemp("usual") / "run", gpu, precision)

    return usual


@pytest.mark.parametrize("way", WAYS)
def test_same_bits(way: str, usual: Callable, tmp_path: Path) -> None:
    gpu, precision, variables = WAYS[way]
    assert results(train(tmp_path / "run", gpu, precision, **variables)) == results(usual(gpu, precision))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_without_hoppers_pages(precision: str, usual: Callable, tmp_path: Path) -> None:
    """make train_unet_plain: the bits of the usual build on a GPU that is no Hopper."""
    assert results(train(tmp_path / "run", "A100", precision, binary=PLAIN)) == results(usual("A100", precision))


def test_fp8_needs_hoppers_pages(tmp_path: Path) -> None:
    done = start(tmp_path / "run", "A100", "fp8", PLAIN)
    assert done.returncode == 1 and "--precision fp8: needs" in done.stderr


@pytest.mark.parametrize("gpu, precision", [("H200", "bf16"), ("A100", "fp32")])
def test_muon(gpu: str, precision: str, tmp_path: Path) -> None:
    """Muon's kernels between the others of a step: the same bits whatever waits, and in fp32 the losses of the CPU build. Both round float32's sums
    in another order (2^-24 of each). Muon enlarges what is smallest in a momentum by up to 3.4445^5 = 485, so a weight of size 1 may move by 485 of 2^-24
    in a step; 2^-12 of a loss leaves as much again for each of the steps and layers between."""
    muon = ("--optimizer", "muon")
    run, late = (train(tmp_path / name, gpu, precision, muon, **how) for name, how in (("run", {}), ("late", {"FAKE_LATE": "main"})))
    assert results(run) == results(late)
    assert len(re.findall("^muon_(wgmma_)?kernel", (run / "launches.txt").read_text(), re.MULTILINE)) >= 15
    if precision == "fp32":
        folder = tmp_path / "cpu"
        folder.mkdir()
        (folder / "small.bin").write_bytes((run / "small.bin").read_bytes())
        subprocess.run([binary_path("cpu"), *RUN, *muon], cwd=folder, env=environment(), check=True, capture_output=True)
        assert np.max(np.abs(losses(run) / losses(folder) - 1)) < 2**-12


@pytest.mark.skipif(not BINARY.is_file() or b"fake NCCL: " not in BINARY.read_bytes(), reason="needs nccl.h")
def test_muon_on_two_gpus(tmp_path: Path) -> None:
    """A slice's border may cut a matrix, so each GPU needs the momentum of the other (fake_nccl.cpp)."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, more in zip(folders, ((), ("--num_gpus", "2"))):
        done = start(folder, "H200", "bf16", more=("--optimizer", "muon", *more))
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    one, two = map(results, folders)
    assert one == two


def test_other_sums(usual: Callable, tmp_path: Path) -> None:
    """Without clusters, and with portable kernels in place of Hopper's, which sum in another order (test_pairs.py holds each of them to the same bits where
    sums are exact). The losses of all three steps: where bf16 is rounded, an activation changes by up to 2^-8, and a loss, which averages a thousand of
    their errors, by less than 2^-9 (test_gpu.py holds the first four losses to the same)."""
    folders = [usual("H200", "bf16"), train(tmp_path / "run", "H200", "bf16", BENCH_WITHOUT="clusters,hopper")]
    launches = [(folder / "launches.txt").read_text() for folder in folders]
    assert [[bool(re.search(kind, text, re.MULTILINE)) for kind in (CLUSTER, HOPPER)] for text in launches] == [[True, True], [False, False]]
    usual_losses, others = ([float(row.split(",")[1]) for row in (folder / "out/log.csv").read_text().splitlines()[1:]] for folder in folders)
    assert len(usual_losses) == 3
    assert np.max(np.abs(np.array(others) / usual_losses - 1)) < 2**-9


def is_noticed(done: subprocess.CompletedProcess, folder: Path, right: Path) -> bool:
    return done.returncode != 0 or results(folder) != results(right)


def test_kernels_that_do_not_wait_are_noticed(usual: Callable, tmp_path: Path) -> None:
    """Kernels that begin early and read what the one before writes."""
    program, text = tmp_path / "bench", BINARY.read_bytes()
    right, wrong = b"griddepcontrol.wait;", b"griddepcontrol.none;"
    assert right in text and len(right) == len(wrong)
    program.write_bytes(text.replace(right, wrong))
    program.chmod(0o755)
    assert is_noticed(start(tmp_path / "run", "H200", "bf16", program, FAKE_LATE="others"), tmp_path / "run", usual("H200", "bf16"))
