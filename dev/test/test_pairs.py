"""Every pair of the workshop: each output and gradient of each case against PyTorch in float64, in fp32 and, where there is a GPU, in bf16; the same
bits from any number of threads; compute-sanitizer.

BUILD=emulated checks the GPU build's kernels where there is no GPU (emulator.cpp): some of the cases in make test_all, EMULATE_ALL=1, which is
make test_emulated, all of a bearable size."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).resolve().parents[1] / "pairs"
sys.path.insert(0, str(FOLDER))

import harness  # noqa: E402

NAMES = sorted(path.stem for path in FOLDER.glob("*.cu") if path.stem != "pairs")
torch.set_num_threads(1)  # a spinning team of threads suffers from every neighbour
PAIRS: dict[str, harness.Pair] = {name: importlib.import_module(name).PAIR for name in NAMES}
PRECISIONS = harness.precisions()
# Where software runs the kernels (emulator.cpp): the GPUs that it plays, {name: (capability, multiprocessors, KB of shared memory)}. Else the machine's own.
BUILD = harness.chosen_build()
GPUS: dict[str, tuple[int, ...]] = {"A100": (80, 108, 164), "H200": (90, 132, 228)} if BUILD == "emulated" else {"": ()}
ALL = bool(os.environ.get("EMULATE_ALL"))  # make test_emulated


def special(name: str) -> list[int]:
    """Small cases that go the ways of large layers."""
    return [i for i, case in enumerate(PAIRS[name].cases) if case.get("sms", 132) < 132]


def cases(gpu: str, precision: str, name: str) -> Iterator[int]:
    """Those of this precision. Software is slow: layers of their real size are left out, and, unless ALL are wanted, all but what a case says it is there for
    (`on`: names of GPUs and precisions), the second, the last and the special ones; of these, fp32 is the same on both GPUs but for what overlaps."""
    last = len(PAIRS[name].cases) - 1
    for i, case in enumerate(PAIRS[name].cases):
        usual = case.get("only", precision) == precision
        if "fp8" in case and BUILD != "cpu":  # of which only Hopper has kernels
            usual &= gpu == "H200" or (BUILD == "cuda" and torch.cuda.get_device_capability() == (9, 0))
        if gpu:
            usual &= case.get("sms", 0) < 132
            chosen = (i in (1, last) or i in special(name)) and (precision, gpu) != ("fp32", "H200")
            usual &= ALL or (f"{gpu} {precision}" in case["on"] if "on" in case else chosen)
        if usual:
            yield i


def is_long(name: str, case: dict) -> bool:
    """Of attention, on a CPU: cases so large that a GPU cuts them up in other ways. A CPU computes them as it does the smaller ones."""
    return BUILD == "cpu" and name == "attention" and case["B"] * case["T"] ** 2 * case["C"] > 5e7


@pytest.fixture
def machine(gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Describes the GPU that software plays."""
    if gpu:
        capability, multiprocessors, kb = GPUS[gpu]
        description = f"capability {capability} code {capability} multiprocessors {multiprocessors} shared {kb << 10} block_shared {(kb - 1) << 10}"
        (tmp_path / "gpu.txt").write_text(description)
        monkeypatch.setenv("FAKE_GPU", str(tmp_path / "gpu.txt"))


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    harness.build(*NAMES)


def test_every_pair_is_here() -> None:
    wanted = "conv3x3 conv1x1 linear groupnorm silu attention upsample downsample patches timestep_embedding resblock attention_block"
    wanted += " adamw augment ddpm_loss fp8 muon sampler_step unet"
    assert set(wanted.split()) == set(NAMES)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("gpu", "precision", "name", "number"),
    [
        pytest.param(g, p, n, i, marks=[pytest.mark.long] * is_long(n, PAIRS[n].cases[i]))
        for g in GPUS
        for p in PRECISIONS
        for n in NAMES
        for i in cases(g, p, n)
    ],
)
def test_pair(gpu: str, precision: str, name: str, number: int, tmp_path: Path) -> None:
    """Against PyTorch. The ways of large layers give the same bits again; where software runs them, when blocks, warps and copies come in another order, and
    barriers order all that different warps do with shared memory. So do other kernels where sums are exact: without clusters, and portable ones in Hopper's place."""
    pair, case = PAIRS[name], PAIRS[name].cases[number]
    inputs = harness.make_inputs(pair, case, precision)

    def run(variable: str, value: str) -> tuple[harness.Arrays, set[str], str]:
        launches = tmp_path / "launches"
        arrays, in_bf16 = harness.run(pair, inputs, {variable: value, "FAKE_LAUNCHES": str(launches)})
        return arrays, in_bf16, launches.read_text() if gpu else value

    got, in_bf16, usual = run("EMULATE_RACES", "1")
    comparisons = harness.compare(pair, case, inputs, harness.expected(pair, case, inputs), got, in_bf16)
    assert comparisons
    assert all(c.ok for c in comparisons), "\n" + "\n".join(str(c) for c in comparisons if not c.ok)
    others = [("EMULATE_REVERSED", "1")] if "bf16" in PRECISIONS and ("sms" in case or (gpu and ALL)) else []
    if gpu != "A100":  # which has neither
        others += [("BENCH_WITHOUT", without) for without in case.get("exact", "").split(",") if without]
    for variable, value in others:
        again, _, launches = run(variable, value)
        for output in got:
            assert got[output].tobytes() == again[output].tobytes(), (variable, value, output)
        if variable == "BENCH_WITHOUT" and precision == "bf16":  # Hopper's kernels are for bf16
            assert launches != usual, f"nothing changes without {value}"


@pytest.mark.skipif(BUILD != "cpu", reason="a GPU's kernels make D of dout and out")
def test_attention_of_one_key_alone_has_no_gradient_of_scores() -> None:
    """If one P of each row is 1, then dP - D is exactly 0 for it in dev/reference.h, so q and k have no gradient, however large they are. The other P are what
    fast_exp returns for numbers below its range, up to 2^-125. Times q, k and dP they stay below 1e-30."""
    rng = np.random.default_rng(5)
    B, T, heads, d = 2, 16, 2, 32
    q = np.zeros((B, T, heads, d), np.float32)
    q[:, np.arange(T), :, np.arange(T)] = 1e4  # a key is like one query, and unlike the others
    v = rng.standard_normal((B, T, heads, d), np.float32)
    qkv = np.stack([q, q, v], 2).reshape(B, T, 3 * heads * d)
    dout = rng.standard_normal((B, T, heads * d), np.float32)
    got, _ = harness.run(PAIRS["attention"], {"heads": heads, "qkv": qkv, "dout": dout, "precision": "fp32"})
    dqkv = got["dqkv"].reshape(B, T, 3, heads * d)
    assert np.abs(dqkv[:, :, :2]).max() < 1e-30
    assert np.array_equal(dqkv[:, :, 2], dout)


@pytest.mark.skipif(BUILD == "emulated", reason="software runs kernels in one thread")
@pytest.mark.parametrize("name", NAMES)
def test_threads_do_not_matter(name: str) -> None:
    precision = PAIRS[name].cases[0].get("only", "fp32")
    if 0 not in cases("", precision, name):
        pytest.skip("this GPU has no kernels for the pair's first case")
    inputs = harness.make_inputs(PAIRS[name], PAIRS[name].cases[0], precision)
    one, three = (harness.run(PAIRS[name], inputs, {"OMP_NUM_THREADS": n})[0] for n in "13")
    assert one.keys() == three.keys()
    for output in one:
        assert one[output].tobytes() == three[output].tobytes(), output


@pytest.mark.skipif(BUILD != "cuda" or not shutil.which("compute-sanitizer"), reason="needs a GPU, nvcc and compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_sanitizer(tool: str, tmp_path: Path) -> None:
    """Two small cases of every pair, those that go the ways of large layers, and those in FP8; all versions, in every precision that a case is for."""

    def run(name: str) -> str:
        command: list[str | Path] = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", harness.binary(name)]
        last = len(PAIRS[name].cases) - 1
        for precision in PRECISIONS:
            for number in cases("", precision, name):
                case = PAIRS[name].cases[number]
                if number not in ([0] if name == "unet" else [1, *special(name), last]) and "fp8" not in case:
                    continue
                file = tmp_path / f"{name}_{number}_{precision}"
                harness.write_arrays(file, harness.make_inputs(PAIRS[name], case, precision))
                command += [file, f"{file}_out"]
        done = subprocess.run(command, env=os.environ | {"NO_CUBLAS": "1"}, capture_output=True, text=True, timeout=300)
        finished = done.returncode == 0 and all(Path(file).exists() for file in command[6::2])
        return "" if finished else f"{name}: {done.stdout[-2000:]}{done.stderr[-500:]}\n"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        complaints = [*pool.map(run, NAMES)]
    assert not any(complaints), "".join(complaints)


@pytest.mark.skipif(BUILD != "emulated", reason="needs kernels as text: make test_emulated")
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("gpu", "name", "right", "wrong"),
    [
        ("A100", "conv3x3", b"bar.sync 0;", b"fence.cta ;"),
        ("A100", "conv3x3", b"cp.async.wait_group 1;", b"cp.async.wait_group 2;"),
        ("A100", "attention", b"bar.sync 0;", b"fence.cta ;"),
        ("H200", "conv3x3", b"wgmma.wait_group.sync.aligned 0;", b"wgmma.wait_group.sync.aligned 1;"),
        ("H200", "conv3x3", b"cp.async.bulk.wait_group.read 0;", b"fence.cta                      ;"),
    ],
)
def test_races_are_found(name: str, right: bytes, wrong: bytes, tmp_path: Path) -> None:
    """Kernels that do not wait: at barriers, for the last copy, for the last product, for TMA before they end."""
    program, case = tmp_path / harness.binary(name).name, tmp_path / "case"
    text = harness.binary(name).read_bytes()
    assert right in text and len(right) == len(wrong)
    program.write_bytes(text.replace(right, wrong))
    program.chmod(0o755)
    harness.write_arrays(case, harness.make_inputs(PAIRS[name], PAIRS[name].cases[special(name)[0]], "bf16"))
    done = subprocess.run([program, case, f"{case}_out"], env=os.environ | {"EMULATE_RACES": "1"}, capture_output=True, text=True, timeout=120)
    assert done.returncode and re.search("a race for|still reads its block's shared memory", done.stderr), done.stderr[-300:]


@pytest.mark.skipif(BUILD == "emulated", reason="the same in every build")
def test_the_harness_notices() -> None:
    """One wrong element of many, a NaN that a skipped output would leave, a missing output."""
    right = np.random.default_rng(0).standard_normal((8, 100, 96))
    wrong = right.astype(np.float32)
    assert harness.error(wrong, right) < harness.rounding(steps=1)
    wrong[3, 50, 7] *= 1.001
    assert harness.error(wrong, right) > harness.rounding(500)
    assert not harness.Comparison("out", 0.0, 1.0, nans=1).ok
    silu = PAIRS["silu"]
    incomplete = harness.Pair("silu", silu.cases, silu.inputs, lambda case, v: {"absent": v["x"]}, silu.tolerance)
    with pytest.raises(AssertionError, match="absent"):
        harness.check(incomplete, silu.cases[0])
