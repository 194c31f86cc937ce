"""What the documents say: the readers in FORMATS.md read what the programs write; functions, files, flags and make's targets that are named exist."""

from __future__ import annotations

import ast
import bisect
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, TINY, flags

import train_unet
from common import model_files
from common.data_files import open_data_file, write_data
from common.flags import preset_flags

SOURCES = [
    "train_unet.cu",
    *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "unet").rglob("*.h"))),
    "dev/reference.h",
    "dev/winograd.h",
    "dev/pairs/harness.h",
    "dev/pairs/harness.py",
    "train_unet.py",
    *(f"common/{path.name}" for path in sorted((ROOT / "common").glob("*.py"))),
    "prepare_data.py",
]
DOCS = [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]
PAGES = ["README.md", "dev/README.md", "data/README.md", *(page for page in DOCS if page != "docs/LEARNT.md")]  # a lab book names what was
WORKSHOP = [ROOT / "dev/pairs", ROOT / "dev/benchmarks"]
SCRIPTS = [
    *ROOT.glob("*.py"),
    *filter(Path.is_file, (ROOT / "common").iterdir()),
    *(ROOT / "dev").glob("*.py"),
    *(path for folder in WORKSHOP for path in sorted(folder.glob("*.py"))),
    ROOT / "train_unet.cu",
    *(ROOT / "unet").rglob("*.h"),
    ROOT / "dev/pairs/harness.h",
    *(path for folder in WORKSHOP for path in sorted(folder.glob("*.cu"))),
]
OTHERS = set(
    "unet.cu diffusion.cu image_sample.py super_res_sample.py image_train.py NAME.cu NAME.py dev/pairs/NAME.cu unet/config.json pipeline.py unet/diffusion_pytorch_model.safetensors".split()
)  # other people's, and patterns


def code_of(page: str) -> str:
    """What stands in backticks and code blocks, a piece a line."""
    text = text_of(page)
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.S)
    return "\n".join([*blocks, *(" ".join(piece.split()) for piece in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.S)))])


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
    ours = open_data_file(str(tmp_path / "data.bin"))
    for again, again_labels, classes, *_ in (doc["read_data"](tmp_path / "data.bin"), (ours.images, ours.labels, ours.num_classes)):
        assert classes == 3 and np.array_equal(images, again) and np.array_equal(labels, again_labels)
    values = np.random.default_rng(1).standard_normal((11, 2)).astype(np.float32)
    for class_names in [], ["x", "y z", "ä"]:
        write_data(str(tmp_path / "numbers.bin"), images, labels, 3, values, ["a", "bcd e"], class_names, folder=7)
        *_, again_values, names, again_names = doc["read_data"](tmp_path / "numbers.bin")
        assert np.array_equal(values, again_values) and names == ["a", "bcd e"] and again_names == class_names

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
        for extra in (
            {},
            {"conv_resample": True, "resblock_updown": False},
            {"channel_mult": (1.0, 1.0), "attention_resolutions": ()},
            {"cond_dim": 7},
            {"cond_dim": 2, "augment": 0.1},
        ):
            config = model_files.valid(preset_flags(preset) | extra)
            raw = model_files.pack_header(train_unet.ModelFile(config, np.zeros(1, np.float32))).tobytes()
            fields = {k: np.frombuffer(raw, kind, *(n or [1]), offset=at).tolist() for k, (at, kind, *n) in doc["HEADER"].items()}
            header = {k: v if len(doc["HEADER"][k]) == 3 else v[0] for k, v in fields.items()}
            expected = {name: tuple(shape) for name, shape in model_files.parameter_shapes(config).items()}
            assert list(doc["shapes"](header).items()) == list(expected.items())


def text_of(page: str) -> str:
    """Without what is still to be written: paragraphs that begin with TODO(lead)."""
    return re.sub(r"^TODO\(lead\).*?(\n\n|\Z)", "", (ROOT / page).read_text(), flags=re.S | re.M)


@pytest.mark.parametrize("page", ["docs/DIFFUSION.md", "docs/FORMATS.md", "docs/READING.md"])
def test_names(page: str) -> None:
    code = "\n".join((ROOT / name).read_text() for name in SOURCES if (ROOT / name).exists())
    if page == "docs/READING.md":
        code += "".join(path.read_text() for path in (ROOT / "dev/test").glob("*.py"))
    for name in re.findall(r"`([A-Za-z]\w+_\w+)`", re.sub(r"```.*?```", "", text_of(page), flags=re.S)):
        assert re.search(rf"\b{name}\b", code), f"{page} speaks of {name}, which is nowhere in the code"


@pytest.mark.parametrize("page", PAGES)
def test_make_targets(page: str) -> None:
    """`make X`, wherever it is written as code."""
    targets = {folder: set(re.findall(r"^([\w ]+?):(?!=)", (ROOT / folder / "Makefile").read_text(), re.M)) for folder in (".", "dev")}
    targets = {folder: {word for line in lines for word in line.split()} for folder, lines in targets.items()}
    targets["dev"] |= {path.stem for place in WORKSHOP for path in place.glob("*.cu")}
    for words in re.findall(r"(?:^|[`(;] ?)make((?: -C dev)?(?: [\w]+)+)(?=[`\n ;)&]| [A-Z]+=)", code_of(page), re.M):
        folder, _, names = ("dev", "", words[len(" -C dev") :]) if words.startswith(" -C dev") else (".", "", words)
        for name in names.split():
            assert name in targets[folder], f"{page}: make{words}: {folder}/Makefile has no {name}"


@pytest.mark.parametrize("page", PAGES)
def test_files(page: str) -> None:
    """Links lead somewhere (to a heading, too), and so do names of the repository's own files."""
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#\s:]*(?:#[^)\s]+)?)\)", text_of(page)):
        path, _, heading = target.partition("#")
        file = folder / path if path else ROOT / page
        assert file.exists(), f"{page} leads to {target}"
        if heading:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            assert heading in [re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in headings], f"{page} leads to {target}"
    for name in re.findall(r"(?<![\w/.<-])((?:common|dev|docs|data|assets|unet)/[\w./]+\w|\w+\.(?:cu|py))(?![\w.*])", code_of(page)):
        near = [place / name for place in (ROOT, folder, ROOT / "dev", ROOT / "dev/test", *WORKSHOP)]
        built = re.fullmatch(r"data/\w+\.bin", name) and (ROOT / f"{name}.gz").exists()
        if program := re.fullmatch(r"dev/(\w+?)(_cuda|_cpu|_emulated)?", name):
            built = any((place / f"{program[1]}.cu").exists() for place in WORKSHOP)
        known = name in OTHERS or any(path.exists() for path in near) or built
        assert known, f"{page} names {name}, which is not there"


@pytest.mark.parametrize("page", PAGES)
def test_flags(page: str) -> None:
    """Every --flag is one of some program's here."""
    code = "\n".join(path.read_text() for path in SCRIPTS)
    for name in set(re.findall(r"(?<![\w-])--([A-Za-z]\w+)(?![\w-])", code_of(page))) - {
        "split",
        "help",
        "prefix",
        "requeue",
        "nnodes",
        "mca",
        "mpi",
    }:
        assert re.search(rf"[\"' {{-]{name}\b", code), f"{page} speaks of --{name}, which no program takes"


@pytest.mark.parametrize("page", PAGES)
def test_what_commands_write_is_ignored_by_git(page: str) -> None:
    """Who follows the documents inside the repository finds it clean afterwards. (Names in capitals stand for names of the reader's own.)"""
    if not (ROOT / ".git").exists():
        pytest.skip("no clone: git can't say what it ignores")
    written = set(re.findall(r"--(?:output_dir|output|output_name|plot|export_\w+|init_model_filename) (\S+)", code_of(page)))
    written |= set(re.findall(r"--convert \S+ (\S+)", code_of(page)))
    written |= set(re.findall(r"save\([\"'](\S+)[\"']\)", code_of(page)))
    for name in sorted(name.rstrip("`,.;)") for name in written if not re.match(r"[A-Z]+\b|\$|/", name)):
        below = f"{name.rstrip('/')}/samples.png" if "." not in name else name
        done = subprocess.run(["git", "check-ignore", "--no-index", "-q", below], cwd=ROOT)
        assert done.returncode == 0, f"{page}: a command writes {name}, which git would call untracked"


def test_names_in_comments() -> None:
    """What a comment of the C++ program names is there. (Names with an underscore.)"""
    sources = [name for name in SOURCES if name == "train_unet.cu" or name.startswith("unet/")]
    names: set[str] = set()
    code = []
    for name in sources:
        for line in (ROOT / name).read_text().splitlines():
            before, comment, behind = line.partition("//")
            if before.count('"') % 2:  # inside a string
                before, behind = line, ""
            code.append(before)
            names |= set(re.findall(r"\b[A-Za-z]\w*_\w+", behind))
    others = set("DNO_HOPPER state_dict align_corners samples_STEP PICTURES_64x64x3 sample_row test_pipelines tma_stores c_skip x_s x_n".split())
    text = "\n".join([*code, *((ROOT / name).read_text() for name in SOURCES if name not in sources)])
    files = {path.stem for folder in ("unet", "dev", "common") for path in (ROOT / folder).rglob("*.*")}
    words = sorted(set(re.findall(r"\w+", text)) | files)

    def begins_a_word(name: str) -> bool:
        at = bisect.bisect_left(words, name)
        return at < len(words) and words[at].startswith(name)

    missing = {name for name in names - others if not begins_a_word(name) and not re.fullmatch(r"sm_\d+a?", name)}
    assert not missing, f"comments of the C++ program name {sorted(missing)}, which are nowhere in the code"


def test_what_lies_at_the_root() -> None:
    """Programs, what builds them, what tells of them: whoever opens the repository for the first time finds nothing else there but folders."""
    if not (ROOT / ".git").exists():
        pytest.skip("no clone: git can't say what belongs to it")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    files = {name for name in tracked if "/" not in name and not name.startswith(".")}
    assert files == set("train_unet.cu train_unet.py generate.py prepare_data.py Makefile README.md LICENSE requirements.txt".split())


def test_imports_go_one_way() -> None:
    """A Python file imports only what stands above it in common/__init__.py, and there is no import inside a function but of other people's packages
    and of a module that needs one."""
    order = re.findall(r"^    (\w+)  ", (ROOT / "common/__init__.py").read_text(), re.M)
    assert sorted(order) == sorted(path.stem for path in (ROOT / "common").glob("*.py") if path.stem != "__init__")
    files = [ROOT / "common" / f"{name}.py" for name in order] + [ROOT / f"{name}.py" for name in ("prepare_data", "train_unet", "generate")]
    order += ["train_unet"]
    for place, path in enumerate(files):
        text = path.read_text()
        assert "sys.modules" not in text
        above = set(order[: place + 1]) - {path.stem} if path.parent.name == "common" else set(order) - {path.stem}
        for node in ast.walk(ast.parse(text)):
            names = [name.name for name in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            if isinstance(node, ast.ImportFrom) and node.module != "common":
                names = [node.module]
            for name in names:
                ours = (ROOT / "common" / f"{name.removeprefix('common.')}.py").exists() or (ROOT / f"{name}.py").exists()
                assert not ours or name.removeprefix("common.") in above, f"{path.name} imports {name}, which does not stand above it"
                assert not ours or node.col_offset == 0 or name in ("common.pictures", "common.diffusers_files"), (
                    f"{path.name} imports {name} inside a function"
                )
