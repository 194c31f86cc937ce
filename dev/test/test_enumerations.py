"""A new word of an enumeration: the compiler names every place of the program that has to know it, and nothing is computed wrongly in silence."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

# Each enumeration of the CPU build, and the functions in which its words are told apart.
PLACES = {
    "Element": {"facts_of"},
    "Nonlinearity": {"with_nonlinearity"},
    "PictureKind": {"put_pictures"},
    "Frame": {"ask", "has_steps_of_t"},
    "TuningWeight": {"tuning_weight"},
    "LrSchedule": {"lr_factor"},
    "ParamInit": {"initial_values"},
    "Resample": {"add_resample"},
}
# The same for what only the GPU build has.
GPU_PLACES = PLACES | {
    "Element": {"facts_of", "with_act"},
    "WeightKind": {"launch_weight_kind", "hopper_weights"},
}
PICTURE_ROW = '    {PictureKind::LOWRES, "lowres"},\n'  # of PICTURE_WORDS


def copy_sources(folder: Path) -> list[Path]:
    """Puts the program's sources into a folder, and returns them."""
    shutil.copytree(ROOT / "unet", folder / "unet")
    (folder / "dev").mkdir()
    for name in "train_unet.cu", "dev/reference.h", "dev/winograd.h":
        shutil.copy(ROOT / name, folder / name)
    return [folder / "train_unet.cu", *sorted((folder / "unet").rglob("*.h"))]


def change(sources: list[Path], pattern: str, new: str) -> None:
    """Replaces the one place of all sources that the pattern fits."""
    counts = 0
    for path in sources:
        text, count = re.subn(pattern, new, path.read_text())
        if count:
            path.write_text(text)
        counts += count
    assert counts == 1, pattern


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train_unet.cu with a word more in each of its enumerations."""
    folder = tmp_path_factory.mktemp("words")
    sources = copy_sources(folder)
    for enumeration in GPU_PLACES:
        change(sources, rf"(?m)^(enum (?:class )?{enumeration}\b[^{{;]*\{{[^}}]*?),?\s*\}}", rf"\1, NEW_{enumeration} }}")
    change(sources, ',val_loss,seconds,copies";', ',val_loss,new,seconds,copies";')
    change(sources, re.escape(PICTURE_ROW), "")
    return folder / "train_unet.cu"


def flags(makefile: Path, name: str) -> list[str]:
    """The compiler's flags in a variable of a makefile: those that are the same on every machine."""
    (line,) = re.findall(rf"^{name} = (.*)$", makefile.read_text(), re.MULTILINE)
    return re.sub(r"\$\(.*\)", "", line).split()


def places(messages: str) -> dict[str, set[str]]:
    """Where a compiler missed a new word: enumeration -> functions. Its messages name the function first, then the word."""
    found: dict[str, set[str]] = {}
    function = ""
    for line in messages.splitlines():
        if heading := re.search(r"In (?:static |lambda )?(?:member )?(?:function|instantiation of) '(.*)'", line):
            (function,) = re.findall(r"(\w+)(?:<.*?>)?\(", heading[1])[:1] or ["?"]
        elif word := re.search(r"error: enumeration value 'NEW_(\w+)' not handled in switch", line):
            found.setdefault(word[1], set()).add(function)
    return found


@pytest.mark.long
def test_the_compiler_names_all_places(source: Path) -> None:
    warnings = flags(ROOT / "dev/cpu.mk", "WARNINGS")
    command = [os.environ.get("CXX", "g++"), "-x", "c++", "-std=c++20", "-fsyntax-only", *warnings, str(source)]
    if "Free Software Foundation" not in subprocess.run([command[0], "--version"], capture_output=True, text=True).stdout:
        pytest.skip("the messages are g++'s")
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"})
    assert done.returncode != 0
    assert places(done.stderr) == PLACES
    assert "PICTURE_WORDS[kind] must be the row of that kind" in done.stderr
    assert "a column needs its place in LogColumn" in done.stderr


def find_nvcc() -> str:
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).exists():
        pytest.skip("there is no nvcc")
    return f"{nvcc} -x cu -std=c++20 --expt-relaxed-constexpr --extended-lambda -arch=sm_90a"


def host_half_of_nvcc(folder: Path, source: str, options: str) -> str:
    """What the compilers say that nvcc calls for the host's half of a program: cudafe++ and g++. (Its other half takes minutes.)"""
    nvcc = find_nvcc()
    plan = subprocess.run(f"{nvcc} {options} --keep -c {source} --dryrun".split(), cwd=folder, capture_output=True, text=True, check=True).stderr
    steps = [line.removeprefix("#$ ") for line in plan.splitlines()]
    (front,) = (i for i, step in enumerate(steps) if step.startswith("cudafe++"))
    last = [step for step in steps if re.match(r"(gcc|g\+\+) .* -c -x c\+\+", step)][-1]
    (stub,) = re.findall(r'--stub_file_name "(.*?)"', steps[front])  # what the other half would say of each kernel
    environment = os.environ | {"LC_ALL": "C", "PATH": f"{Path(nvcc.split()[0]).parent}:{os.environ['PATH']}"}
    script = "\n".join([*steps[front - 1 : front + 1], f"touch {stub}", last])
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, env=environment)
    return done.stdout + done.stderr


@pytest.mark.long
def test_nvcc_names_all_places(source: Path) -> None:
    warnings = ",".join(flags(ROOT / "dev/cpu.mk", "WARNINGS"))
    sources = [source, *(source.parent / "unet").rglob("*.h")]
    change(sources, ",new,seconds", ",seconds")  # a failed static_assert would end cudafe++
    change(sources, r' \{\n    \{PictureKind::FILE, ""\},\n', ' {\n    {PictureKind::FILE, ""},\n' + PICTURE_ROW)
    assert places(host_half_of_nvcc(source.parent, source.name, f"-Xcompiler {warnings}")) == GPU_PLACES


@pytest.mark.long
def test_a_type_without_conversions(tmp_path: Path) -> None:
    """A type of two bytes, as bf16 is: kernels must not take its numbers for bf16."""
    copy_sources(tmp_path)
    kernel = """
    static __global__ void use(float* out, const __half* x) {
        float v[8];
        unpack<__half>(v, load16(x));
        store4((__half*)out, load4(x));
        *(uint4*)out = pack<__half>(v);
    }
    """
    (tmp_path / "changed.cu").write_text((tmp_path / "train_unet.cu").read_text() + kernel)
    done = subprocess.run(f"{find_nvcc()} -ptx changed.cu".split(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    for function in "unpack", "pack", "FourOf":
        assert re.search(rf"\berror\b.*\n(.*\n)*?.*\b{function}<", said), said


@pytest.mark.long
def test_a_norm_of_a_layer_without_sums(tmp_path: Path) -> None:
    """A kind of layer that does not say that it sums its channels, in front of a group norm."""
    change(copy_sources(tmp_path), r"(LayerKind DOWNSAMPLE\{[^}]*?),\s*\.sums = true", r"\1")
    command = [os.environ.get("CXX", "g++"), "-x", "c++", "-std=c++20", "-O0", "-w", "train_unet.cu", "-o", "changed"]
    subprocess.run(command, check=True, cwd=tmp_path)
    flags = "--preset fashion32 --num_channels 32 --channel_mult 1,2 --conv_resample False --max_steps 1 --output_dir out".split()
    done = subprocess.run(["./changed", *flags, "--data_file", ROOT / "data/fashion32.bin"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "a tensor whose layer leaves no sums of its channels" in done.stderr + done.stdout
