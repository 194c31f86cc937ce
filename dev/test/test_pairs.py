"""Every pair of the workshop: each output and gradient of each case against PyTorch in float64, in fp32 and, where there is a GPU, in bf16; the same
bits from any number of threads; compute-sanitizer."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

DEV = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(DEV))

import harness  # noqa: E402

NAMES = sorted(path.stem for path in DEV.glob("*.cu") if path.stem not in ("bench", "pairs"))
torch.set_num_threads(1)  # a spinning team of threads suffers from every neighbour
PAIRS: dict[str, harness.Pair] = {name: importlib.import_module(name).PAIR for name in NAMES}
PRECISIONS = harness.precisions()


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    harness.build()


def test_every_pair_is_here() -> None:
    wanted = "conv3x3 conv1x1 linear groupnorm silu attention upsample downsample patches timestep_embedding resblock attention_block"
    wanted += " adamw ddpm_loss sampler_step unet"
    assert set(wanted.split()) == set(NAMES)


@pytest.mark.parametrize(
    ("precision", "name", "number"),
    [(p, name, i) for p in PRECISIONS for name in NAMES for i, case in enumerate(PAIRS[name].cases) if case.get("only", p) == p],
)
def test_pair(precision: str, name: str, number: int) -> None:
    comparisons = harness.check(PAIRS[name], PAIRS[name].cases[number], precision)
    assert comparisons
    assert all(c.ok for c in comparisons), "\n" + "\n".join(str(c) for c in comparisons if not c.ok)


@pytest.mark.parametrize("name", NAMES)
def test_threads_do_not_matter(name: str) -> None:
    inputs = harness.make_inputs(PAIRS[name], PAIRS[name].cases[0])
    one, three = (harness.run(PAIRS[name], inputs, {"OMP_NUM_THREADS": n})[0] for n in "13")
    assert one.keys() == three.keys()
    for output in one:
        assert one[output].tobytes() == three[output].tobytes(), output


@pytest.mark.skipif("bf16" not in PRECISIONS, reason="needs a GPU")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", [name for name in NAMES if any("sms" in case for case in PAIRS[name].cases)])
def test_repeats(name: str, precision: str) -> None:
    """The ways of large layers give the same bits again."""
    for case in PAIRS[name].cases:
        if "sms" not in case:
            continue
        inputs = harness.make_inputs(PAIRS[name], case, precision)
        first, again = (harness.run(PAIRS[name], inputs)[0] for _ in range(2))
        for output in first:
            assert first[output].tobytes() == again[output].tobytes(), output


@pytest.mark.skipif("bf16" not in PRECISIONS or not shutil.which("compute-sanitizer"), reason="needs a GPU, nvcc and compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_sanitizer(tool: str, tmp_path: Path) -> None:
    """Two small cases of every pair, and those that go the ways of large layers; all versions, in both precisions."""

    def run(name: str) -> str:
        command: list[str | Path] = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", harness.binary(name)]
        cases = PAIRS[name].cases
        few = [i for i in range(len(cases)) if cases[i].get("sms", 132) < 132]
        for number in [0] if name == "unet" else [1, *few, len(cases) - 1]:
            for precision in PRECISIONS:
                file = tmp_path / f"{name}_{number}_{precision}"
                harness.write_arrays(file, harness.make_inputs(PAIRS[name], cases[number], precision))
                command += [file, f"{file}_out"]
        done = subprocess.run(command, env=os.environ | {"NO_CUBLAS": "1"}, capture_output=True, text=True, timeout=300)
        finished = done.returncode == 0 and all(Path(file).exists() for file in command[6::2])
        return "" if finished else f"{name}: {done.stdout[-2000:]}{done.stderr[-500:]}\n"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        complaints = [*pool.map(run, NAMES)]
    assert not any(complaints), "".join(complaints)


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
