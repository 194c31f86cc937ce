"""docs/GUIDE.md: every command and every Python example in it is run, section by section, as a reader would paste them, with shorter runs and smaller models
(`shortened`). PARSED are those that are only parsed, since they take another machine or other people's weights, and NOT_RUN are no commands of ours."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, binary_path, called, environment
from PIL import Image

import generate
import prepare_data
import train_unet as twin
from common.flags import FLAGS

GUIDE = (ROOT / "docs/GUIDE.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", GUIDE, re.S | re.M))
NOT_RUN = ("pip install", "sbatch", "torchrun --nnodes")  # torchrun's ./train_unet is parsed
PARSED = (
    "dev/bench",
    "python dev/benchmarks/quality.py",
    "python dev/benchmarks/judge.py",
    "python generate.py --model_filename 64x64_diffusion.pt",
    "./train_unet --num_gpus",
)
# Sections that take longest: make test leaves them out, and their command lines are parsed there as well.
LONG = {"Other formats", "More images from a model"}
PROGRAMS = {
    "train_unet.py": lambda: twin.run_program("train_unet", twin.run),
    "generate.py": lambda: generate.run_program("generate", generate.run),
    "prepare_data.py": prepare_data.main,
}
TINY_MODEL = {"num_channels": "32", "channel_mult": "1,1,1", "num_res_blocks": "1", "attention_resolutions": "16"}


def blocks(section: str) -> list[tuple[str, str]]:
    """(language, text) of the code in a section, in its order."""
    return re.findall(r"```(bash|python)\n(.*?)```", SECTIONS[section], re.S)


def commands(text: str) -> Iterator[list[str]]:
    """The command lines of a block, without comments, as words."""
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def ours(words: list[str]) -> list[str]:
    """The part of a command that begins with one of our programs: torchrun starts one."""
    return words[words.index("./train_unet") :] if "./train_unet" in words else words


def newest(folder: Path, begin: str) -> Path | None:
    return max(folder.glob(f"{begin}_*.bin"), default=None)


def with_steps_of(desk: Path, word: str) -> str:
    """out_x/model_0007500.bin becomes the file of the last step that the shortened run wrote."""
    at = re.fullmatch(r"(\S+)/(model|ema)_\d{7}\.bin", word)
    found = at and newest(desk / at[1], at[2])
    return str(found.relative_to(desk)) if found else word


def shortened(words: list[str], desk: Path) -> list[str]:
    """The same command for fewer steps, images and weights. (A flag that stands there has its value replaced.)"""
    words = [with_steps_of(desk, word) for word in words]
    program = words[0] if words[0] == "./train_unet" else words[1]
    asked = {word[2:] for word in words if word.startswith("--")}
    less: dict[str, str] = {}
    if program == "prepare_data.py":
        sizes = {"128": "64", "256": "32"}
        less = {"image_size": sizes[word] for word in words if word in sizes}
    elif program == "generate.py":
        less = {} if "export_onnx" in asked else {"steps": "4"} if "show" in asked else {"num_samples": "2", "steps": "3"}
        less |= {"jump_length": "1", "jump_n_sample": "2"} if "mask" in asked else {}
    elif "sample" in asked:
        less = {"sample": "4", "timestep_respacing": "3"} | ({"jump_length": "1", "jump_n_sample": "2"} if "inpaint" in asked else {})
    elif not asked & {"convert", "compare_runs"}:
        folder = desk / words[words.index("--output_dir") + 1]
        last = newest(folder, "model")
        less = {"batch_size": "4", "num_samples": "2", "timestep_respacing": "3", "max_steps": str((int(last.stem[6:]) if last else 0) + 2)}
        less |= {"ema_snapshots": "1"} if "ema_snapshots" in asked else {}
        if "resume_checkpoint" in asked:
            del less["batch_size"], less["num_samples"]
        elif "init" not in asked:
            less |= TINY_MODEL
            less |= {"num_channels": "64"} if {"adm64", "latent32"} & set(words) else {}  # whose heads have 64
            less |= {"image_size": "8", "attention_resolutions": "8"} if "latent32" in words else {}
            shutil.rmtree(folder, ignore_errors=True)  # the shelf's
            less["max_steps"] = "2"
        if program == "train_unet.py" and "resume_checkpoint" in asked:
            less["max_steps"] = "4"
    for name, value in less.items():
        if f"--{name}" in words:
            words[words.index(f"--{name}") + 1] = value
        else:
            words += [f"--{name}", value]
    return words


def start(words: list[str], desk: Path) -> subprocess.CompletedProcess:
    if words[0] == "./train_unet":
        return subprocess.run(words, cwd=desk, env=environment(), capture_output=True, text=True, timeout=60)
    assert words[0] == "python"
    return called(PROGRAMS[words[1]], desk / words[1], *words[2:])


def picture(path: Path, seed: int, grey: bool = False) -> None:
    """A blob of some colour: something that can be made smaller and larger."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:70, 0:80]
    blob = np.exp(-((y - random.uniform(20, 50)) ** 2 + (x - random.uniform(20, 60)) ** 2) / 300)
    path.parent.mkdir(parents=True, exist_ok=True)
    colour = random.uniform(50, 255, 3)
    Image.fromarray((255 * blob).astype(np.uint8) if grey else (blob[:, :, None] * colour).astype(np.uint8)).save(path)


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the reader has: the repository, pictures of each kind that the guide speaks of, and what earlier sections have made."""
    desk = tmp_path_factory.mktemp("guide")
    for name in ("common", "dev", "data", "train_unet.py", "generate.py", "prepare_data.py"):
        (desk / name).symlink_to(ROOT / name)
    (desk / "train_unet").symlink_to(binary_path("cpu"))
    for k in range(8):
        picture(desk / f"my_pictures/{'cats' if k % 2 else 'dogs'}/{k}.png", k)
        picture(desk / f"held_out/{'cats' if k % 2 else 'dogs'}/{k}.png", 10 + k)
        for folder in ("pictures", "photos", "small"):
            picture(desk / folder / f"{k}.png", 20 + k)
        picture(desk / f"sketches/{k}.png", 20 + k, grey=True)
        picture(desk / f"masks/{k}.png", 30 + k, grey=True)
    picture(desk / "picture.png", 0)
    picture(desk / "mask.png", 1, grey=True)
    with zipfile.ZipFile(desk / "pictures.zip", "w") as archive:
        for path in sorted((desk / "my_pictures").rglob("*.png")):
            archive.write(path, path.relative_to(desk / "my_pictures"))
    (desk / "table.csv").write_text("name,bright,warm\n" + "".join(f"{k}.png,{k / 8},{-k / 8}\n" for k in range(8)))
    (desk / "rows.csv").write_text("0.1,0.2\n-0.5,1\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(desk)
        for line in (
            "--data_dir my_pictures --image_size 64 --output_name my.bin",
            "--data_dir photos --cond_dir sketches --output_name photos.bin --cond_output_name new_sketches.bin",
            "--data_dir masks --channels 1 --output_name masks.bin",
        ):
            done = called(PROGRAMS["prepare_data.py"], "prepare_data.py", *line.split())
            assert done.returncode == 0, done.stderr
    tiny = [word for name, value in TINY_MODEL.items() for word in (f"--{name}", value)]
    tiny += "--batch_size 4 --max_steps 1 --num_samples 1 --timestep_respacing 2".split()
    for more in (
        "--preset fashion32 --class_cond True --class_dropout 0.1 --output_dir out",
        "--data_dir my_pictures --output_dir out_mine",
        "--data_file my.bin --output_dir out_mine_2",
        "--preset unet64 --data_file photos.bin --output_dir out_plain",
    ):
        done = start(["./train_unet", *more.split(), *tiny], desk)
        assert done.returncode == 0, done.stderr
    os.link(desk / "out_plain/model_0000001.bin", desk / "model.bin")
    done = start("./train_unet --sample 4 --init model.bin --timestep_respacing 2 --output samples.bin".split(), desk)
    assert done.returncode == 0, done.stderr
    return desk


@pytest.fixture
def desk(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the shelf, which costs no room: our programs never write into a file that is there."""
    shutil.copytree(shelf, tmp_path / "desk", symlinks=True, copy_function=os.link)
    monkeypatch.chdir(tmp_path / "desk")
    monkeypatch.syspath_prepend(str(ROOT))
    return tmp_path / "desk"


def is_parsed_only(words: list[str]) -> bool:
    return " ".join(words).startswith(PARSED) or words[0] == "torchrun"


def check_flags(words: list[str], desk: Path) -> None:
    """Every flag is one of the program's: it reads its command line up to a flag that nobody has. Of programs in dev/ their source says it."""
    words = ours(words)
    names = [word[2:] for word in words if word.startswith("--")]
    if words[0] == "dev/bench" or words[1].startswith("dev/"):
        source = (ROOT / ("dev/benchmarks/bench.cu" if words[0] == "dev/bench" else words[1])).read_text()
        for name in names:
            assert (words[0] == "dev/bench" and name in FLAGS) or re.search(rf"[\"-]{name}\b", source), f"--{name}"
        return
    done = start([*words, "--no_flag_of_anybody", "1"], desk)
    assert done.returncode and "no_flag_of_anybody" in done.stderr and done.stderr.count("\n") == 1, f"{shlex.join(words)}\n{done.stderr}"


def after(words: list[str], desk: Path) -> None:
    """What the command says that it writes is there."""
    for flag in ("--output", "--output_dir", "--output_name", "--cond_output_name", "--export_onnx"):
        if flag in words:
            assert (desk / words[words.index(flag) + 1]).exists(), shlex.join(words)
    if "--convert" in words:
        assert (desk / words[words.index("--convert") + 2]).exists(), shlex.join(words)
    if "--keep_best" in words:
        assert (desk / words[words.index("--output_dir") + 1] / "best.bin").exists()


@pytest.mark.parametrize("section", SECTIONS)
def test_commands_are_parsed(section: str, shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them: a typing error in a flag is found without the run."""
    monkeypatch.chdir(shelf)
    for language, text in blocks(section):
        for words in commands(text) if language == "bash" else ():
            if not " ".join(words).startswith(NOT_RUN) or words[0] == "torchrun":
                check_flags(words, shelf)


@pytest.mark.parametrize("section", [pytest.param(name, marks=[pytest.mark.long] if name in LONG else []) for name in SECTIONS if blocks(name)])
def test_section(section: str, desk: Path) -> None:
    names: dict[str, object] = {}
    for language, text in blocks(section):
        if language == "python":
            run_python(text, desk, names)
            continue
        for words in commands(text):
            if " ".join(words).startswith(NOT_RUN) or is_parsed_only(words):
                continue
            if "--encode" in words:
                make_autoencoder(desk / words[words.index("--encode") + 1])
            words = shortened(words, desk)
            done = start(words, desk)
            assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-1000:]}\n{done.stderr}"
            after(words, desk)


def run_python(text: str, desk: Path, names: dict[str, object]) -> None:
    text = re.sub(r"[\w/]+_\d{7}\.bin", lambda found: with_steps_of(desk, found[0]), text)
    text = re.sub(r"(?m)(sample\(model, )\d+(.*)\)", r"\g<1>2, steps=3\2)", re.sub(r", steps=\d+", "", text))
    text = text.replace('from_pretrained("out_diffusers")()', 'from_pretrained("out_diffusers")(num_inference_steps=2)')
    exec(compile(text, "docs/GUIDE.md", "exec"), names)
    for written in re.findall(r'save\("(.*?)"\)', text):
        assert (desk / written).exists()
    if "training_batch" in text:
        assert names["labels"] is None and names["conditions"] == {}


def make_autoencoder(folder: Path) -> None:
    """A small AutoencoderKL of random weights, four pixels to a latent each way."""
    import diffusers

    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 3, "up_block_types": ["UpDecoderBlock2D"] * 3, "block_out_channels": [8, 8, 16]}
    diffusers.AutoencoderKL(**blocks, norm_num_groups=4, latent_channels=4).save_pretrained(folder)


def test_runs_begin_in_new_folders() -> None:
    """Who pastes all commands of the guide, one after the other, is never told that a folder already holds a run."""
    begun = []
    for section in SECTIONS:
        for language, text in blocks(section):
            for words in commands(text) if language == "bash" else ():
                if words[0] == "./train_unet" and "--output_dir" in words and "--resume_checkpoint" not in words:
                    begun.append(words[words.index("--output_dir") + 1])
    assert len(begun) == len(set(begun)) > 10, sorted(begun)


def test_contents() -> None:
    """Every section is in the contents, by its name."""
    links = set(re.findall(r"\]\(#(.*?)\)", GUIDE.partition("\n## ")[0]))
    assert links == {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in SECTIONS}


def test_symptoms() -> None:
    """What "When it goes wrong" quotes is said by a program."""
    files = [ROOT / "Makefile", ROOT / "train_unet.cu", *(ROOT / "unet").rglob("*.h"), *ROOT.glob("*.py"), *(ROOT / "common").glob("*.py")]
    said = " ".join("\n".join(path.read_text() for path in files).replace('"\n', "").split()).replace('" "', "")
    rows = re.findall(r"^\| (.*?) \|", SECTIONS["When it goes wrong"], re.M)
    quoted = [piece for row in rows for words in re.findall(r"`(.*?)`", row) for piece in words.split(" ... ")]
    assert len(quoted) > 10
    for piece in quoted:
        piece = re.sub(r"\d+", "%d", re.sub(r"^--\w+ \S+: ", "", piece)).removesuffix(" ...")
        assert piece in said, f"no program says {piece!r}"
