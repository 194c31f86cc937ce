"""What make would do (make -n) on machines with other GPUs and compilers: scripts stand in for nvidia-smi and nvcc."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT

CUDA_13 = "75 80 86 87 88 89 90 100 110 103 120 121"
CUDA_12_4 = "50 52 53 60 61 62 70 72 75 80 86 87 89 90"


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """make(goal, gpus="8.6", nvcc=CUDA_13, **environment): gpus as nvidia-smi lists them, "" none, None: there is no nvidia-smi; nvcc: what it
    knows, "" not there."""

    def make(*words: str, gpus: str | None = "", nvcc: str = CUDA_13, **environment: str) -> subprocess.CompletedProcess:
        if gpus is None and shutil.which("nvidia-smi", path="/usr/bin:/bin"):
            pytest.skip("this machine's own nvidia-smi can't be hidden from make")
        for name, lines in ("nvidia-smi", (gpus or "").split()), ("nvcc", [f"sm_{arch}" for arch in nvcc.split()]):
            (tmp_path / name).write_text("#!/bin/sh\nprintf '%s\\n' " + " ".join(lines) + f"\nexit {int(not lines)}\n")
            (tmp_path / name).chmod(0o755)
        if not nvcc:
            (tmp_path / "nvcc").unlink()
        if gpus is None:
            (tmp_path / "nvidia-smi").unlink()
        kept = {name: value for name, value in os.environ.items() if name not in ("ARCH", "BUILD", "MAKEFLAGS", "CUDA_VISIBLE_DEVICES", "NVCC")}
        kept |= {"PATH": f"{tmp_path}:/usr/bin:/bin"} | environment
        command = ["make", "-n", "-B", *words, *(() if nvcc else ("NVCC=nvcc",))]
        return subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True)

    return make


def compiled(done: subprocess.CompletedProcess) -> list[str]:
    """The architectures that nvcc is told to compile, those with PTX marked."""
    assert done.returncode == 0, done.stderr
    found = re.findall(r"-gencode arch=compute_(\w+),code='?(\S+?)'? ", done.stdout)
    assert all(code in (f"sm_{arch}", f"[sm_{arch},compute_{arch}]") for arch, code in found)
    return [arch + "+" * code.startswith("[") for arch, code in found]


def sentence(done: subprocess.CompletedProcess) -> str:
    """Of a build that make refuses, before nvcc has said anything."""
    assert done.returncode == 2 and "nvcc -x" not in done.stdout
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "gpus, nvcc, wanted",
    [
        ("8.6", CUDA_13, "86+"),
        ("9.0 9.0", CUDA_13, "90a"),
        ("12.0 8.6 8.6", CUDA_13, "86+ 120+"),  # nvidia-smi's first GPU need not be CUDA's
        ("7.5 8.9", CUDA_13, "89+"),
        ("12.1", CUDA_13, "121+"),
        ("12.0", CUDA_12_4, "90+"),  # the newest that this nvcc knows: the driver compiles its PTX
        ("10.3", CUDA_13.replace("103", ""), "100+"),
        ("", CUDA_13, "80+ 90a 100+ 120+"),  # an image is being built
        ("", CUDA_12_4, "80+ 90a"),
    ],
)
def test_code_for_the_gpus_that_are_here(make: Callable, gpus: str, nvcc: str, wanted: str) -> None:
    assert compiled(make("train_unet_cuda", gpus=gpus, nvcc=nvcc)) == wanted.split()
    done = make("train_unet", gpus=gpus, nvcc=nvcc)
    assert compiled(done) == (wanted.split() if gpus else [])
    assert ("train_unet: the GPU build" if gpus else "train_unet: the CPU build") in done.stdout


def test_arch(make: Callable) -> None:
    assert compiled(make("train_unet_cuda", "ARCH=80", gpus="9.0")) == ["80+"]
    assert compiled(make("train_unet_cuda", "ARCH=120 86")) == ["86+", "120+"]
    assert compiled(make("train_unet_cuda", "ARCH=all")) == "80+ 86+ 89+ 90a 100+ 120+".split()
    assert compiled(make("train_unet_cuda", "ARCH=all", nvcc=CUDA_12_4)) == "80+ 86+ 89+ 90a".split()
    assert "x86_64" in sentence(make("train_unet_cuda", "ARCH=x86_64")) and "120" in sentence(make("train_unet_cuda", "ARCH=120", nvcc=CUDA_12_4))


def test_old_gpus(make: Callable) -> None:
    """What Colab lends: the CPU build, and one sentence instead of ptxas's many."""
    done = make("train_unet", gpus="7.5")
    assert compiled(done) == []
    assert "train_unet: the CPU build" in done.stdout
    for words, gpus in (["train_unet_cuda"], "7.5"), (["train_unet_cuda", "ARCH=75"], ""), (["train_unet_cuda", "ARCH=70 86"], "8.6"):
        assert "make train_unet_cpu" in sentence(make(*words, gpus=gpus))


def test_without_nvcc(make: Callable) -> None:
    done = make("train_unet", gpus="8.6", nvcc="")
    assert compiled(done) == [] and "train_unet: the CPU build" in done.stdout
    assert "nvcc" in sentence(make("train_unet_cuda", gpus="8.6", nvcc=""))


def test_nvcc_without_a_gpu(make: Callable) -> None:
    """Where programs are built for other machines: the CPU build."""
    for nvcc in CUDA_13, "":
        done = make("train_unet", gpus=None, nvcc=nvcc)
        assert compiled(done) == [] and "the CPU build" in done.stdout


def test_visible_devices(make: Callable) -> None:
    """Any of them may be chosen when the program runs; none where all are hidden, and then nothing is missing."""
    assert compiled(make("train_unet_cuda", gpus="8.6 8.9", CUDA_VISIBLE_DEVICES="1")) == ["86+", "89+"]
    for hidden in "", "-1":
        done = make("train_unet", gpus="8.6", CUDA_VISIBLE_DEVICES=hidden)
        assert compiled(done) == [] and "the CPU build" in done.stdout


def test_flags_are_added(make: Callable) -> None:
    for goal, variable, flag in ("train_unet_cuda", "NVCCFLAGS", "-lineinfo"), ("train_unet_launches_80_90a", "NVCCFLAGS", "-lineinfo"):
        usual = make(goal).stdout.split()
        for assignment in f"{variable}+={flag}", f"{variable}={flag}":
            more = make(goal, assignment).stdout.split()
            assert [word for word in more if word != flag] == usual and flag in more


def test_make_test_needs_neither_nvcc_nor_long_tests(make: Callable) -> None:
    """It takes less than six minutes. The rest is what CI runs."""
    few = make("test", "PYTHON=python3", gpus=None)
    assert few.returncode == 0 and "nvcc" not in few.stdout.replace("nvcc is, and", "")
    assert len(re.findall(r'-m pytest -q .*-n \d -m "not long" dev/test\n', few.stdout)) == few.stdout.count("pytest -q") == 1
    everything = make("test_all", "PYTHON=python3", gpus=None)
    assert everything.returncode == 0 and "not long" not in everything.stdout
    assert re.search(
        r"BUILD=emulated PYTHONDONTWRITEBYTECODE= python3 -m pytest .* dev/test/test_pairs.py\nTRAIN_UNET_LAUNCHES=\S* .* dev/test\n",
        everything.stdout,
    )
    assert {"-o pairs_emulated", "-o bench_emulated", "-o train_unet_launches_80_90a_100_120"} <= set(re.findall(r"-o \w+", everything.stdout))
    assert (ROOT / ".ci/run").read_text().endswith("\nmake test_all\n")


def test_pairs_of_both_builds_lie_side_by_side(make: Callable) -> None:
    for build, gpus in ("cpu", ""), ("cuda", "8.6"):
        lines = make("-C", "dev", "silu", gpus=gpus).stdout
        assert f" -o pairs_{build}" in lines and f"ln -sf pairs_{build} silu_{build}\nln -sf silu_{build} silu\n" in lines
    assert " -o pairs_cpu\n" in make("-C", "dev", "silu", gpus="8.6", BUILD="cpu").stdout
    assert compiled(make("-C", "dev", "silu", gpus="8.6 9.0")) == ["86+", "90a"]


def test_a_mac(make: Callable, tmp_path: Path) -> None:
    """As far as it can be seen without one: Homebrew's libomp, or a sentence."""
    told = make("train_unet_cpu").stdout
    assert " -march=native " in told and " -fopenmp " in told and "-Xclang" not in told
    (tmp_path / "uname").write_text('#!/bin/sh\n[ "$1" = -m ] && echo arm64 || echo Darwin\n')
    (tmp_path / "uname").chmod(0o755)
    done = make("train_unet_cpu")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "libomp" in done.stderr
    for words in (["train_unet_cpu"], ["-C", "dev", "silu"]):
        told = make(*words, f"LIBOMP={tmp_path}").stdout
        assert f" -Xclang -fopenmp -I{tmp_path}/include -L{tmp_path}/lib -lomp " in told and " -mcpu=native " in told and "-march" not in told


def test_the_program_is_told_its_commit(make: Callable[..., subprocess.CompletedProcess]) -> None:
    """The latest of its sources, and whether they differ from it; outside a git checkout nothing."""
    git = ["git", "-C", str(ROOT)]
    inside = subprocess.run(
        [*git, "log", "-1", "--format=%h", "--", "train_unet.cu", "unet", "dev/reference.h", "dev/winograd.h"],
        capture_output=True,
        text=True,
    )
    wanted = inside.stdout.strip()
    told = re.search(r" -DTRAIN_UNET_COMMIT=(\w+)(-changed)? ", make("train_unet_cpu").stdout)
    assert (told[1] if told else "") == wanted
    assert "TRAIN_UNET_COMMIT" not in make("train_unet_cpu", GIT_DIR="/nowhere").stdout


def test_the_page_compiles() -> None:
    """nvcc reads ?? and one of nine characters as a trigraph, and warns of it, in a raw string, too."""
    for file in (ROOT / "unet/run/page.html", ROOT / "unet/flags.h"):
        assert not re.search(r"\?\?[=/'()!<>-]", file.read_text()), file
