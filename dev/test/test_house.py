"""The house: train_unet.cu is the story, headers are pages. Arrows point one way, each header stands alone, the story works without Hopper's pages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

# From the ground up. A header includes only what stands on its own level or below.
LEVELS = [
    "host/",
    "elements.h random.h interface.h",
    "gpu/",
    "flags.h config.h data.h network.h trainer.h",
    "diffusion/",
    "cpu.h fp8.h muon.h",
    "run/",
]
HEADERS = sorted(path.relative_to(ROOT / "unet").as_posix() for path in (ROOT / "unet").rglob("*.h"))
MOST_BYTES = 350 * 1024  # GitHub's code search leaves out larger files
MOST_CALLS_UPWARDS = 10  # prototypes in trainer.h of what train_unet.cu defines and headers call


def level(header: str) -> int:
    (found,) = [
        i
        for i, names in enumerate(LEVELS)
        if header in names.split() or any(name.endswith("/") and header.startswith(name) for name in names.split())
    ]
    return found


def includes(path: Path) -> list[Path]:
    return [(path.parent / name).resolve() for name in re.findall(r'^#include "(.*)"', path.read_text(), re.M)]


@pytest.mark.parametrize("header", HEADERS)
def test_arrows_point_one_way(header: str) -> None:
    for target in includes(ROOT / "unet" / header):
        name = os.path.relpath(target, ROOT / "unet")
        if name.startswith("../dev/"):
            assert header == "cpu.h", f"unet/{header} includes {name[3:]}, which unet/cpu.h alone may"
        elif target.suffix == ".h":
            assert level(name) <= level(header), f"unet/{header} includes unet/{name}, which stands above it"


def test_calls_upwards_stand_in_one_place() -> None:
    block = (ROOT / "unet/trainer.h").read_text().partition("called by headers")[2]
    declared = re.findall(r"(\w+)\([^()]*\);", block)
    assert 0 < len(declared) <= MOST_CALLS_UPWARDS
    story = (ROOT / "train_unet.cu").read_text()
    pages = {header: (ROOT / "unet" / header).read_text() for header in HEADERS} | {"reference.h": (ROOT / "dev/reference.h").read_text()}
    for name in declared:
        assert re.search(rf"^[A-Za-z].*\b{name}\([^;]*\{{", story, re.M), f"train_unet.cu does not define {name}"
        called = [page for page, text in pages.items() if page != "trainer.h" and re.search(rf"\b{name}\(", re.sub(r"//.*", "", text))]
        assert called, f"no header calls {name}: it needs no prototype"


def test_size_of_the_story() -> None:
    assert (ROOT / "train_unet.cu").stat().st_size <= MOST_BYTES


@pytest.mark.parametrize("header", [header for header in HEADERS if header != "flags.h"])
def test_header_stands_alone(header: str, tmp_path: Path) -> None:
    """It includes all that it needs. cpu.h behind it defines `replay`, a template that must not stay undefined."""
    (tmp_path / "alone.cpp").write_text(f'#include "unet/{header}"\n#include "unet/cpu.h"\n')
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-fsyntax-only", "-w", "-fopenmp", f"-I{ROOT}", "alone.cpp"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert not done.returncode, done.stderr


def nvcc() -> list[str]:
    found = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(found).exists():
        pytest.skip("there is no nvcc")
    return [found, "-x", "cu", "-std=c++20", "--expt-relaxed-constexpr", "--extended-lambda", f"-I{ROOT}"]


@pytest.mark.long
@pytest.mark.parametrize("header", [header for header in HEADERS if header.startswith("gpu/") or header in ("fp8.h", "muon.h")])
def test_header_stands_alone_with_nvcc(header: str, tmp_path: Path) -> None:
    """The kernels of a page, for the newest GPU that has code of its own. The host's half needs what train_unet.cu defines, so it is left out."""
    (tmp_path / "alone.cu").write_text(f'#include "unet/{header}"\n')
    done = subprocess.run([*nvcc(), "-arch=sm_90a", "-ptx", "-w", "alone.cu", "-o", "alone.ptx"], cwd=tmp_path, capture_output=True, text=True)
    assert not done.returncode, done.stderr


@pytest.mark.long
def test_one_file(tmp_path: Path) -> None:
    """make one: the same program, and no other file is needed."""
    done = subprocess.run(["python3", str(ROOT / "dev/one.py")], capture_output=True, text=True, check=True)
    assert not re.search(r'^#include "', done.stdout, re.M)
    (tmp_path / "one.cu").write_text(done.stdout)
    command = [os.environ.get("CXX", "g++"), "-x", "c++", "-std=c++20", "-fsyntax-only", "-w", "-fopenmp", "one.cu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert not done.returncode, done.stderr
