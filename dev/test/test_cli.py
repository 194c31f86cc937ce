"""The command line: presets, defaults that come from the data, and every kind of value that cannot work."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import math
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import (
    BUILD,
    ROOT,
    TINY,
    TINY_MODEL,
    TINY_RUN,
    binary_path,
    checkpoints,
    data_bytes,
    environment,
    flags,
    make_images,
    model_name,
    random_weights,
    read_checkpoint,
    read_log,
    read_samples,
    seal_data,
    shown_run,
    with_slot,
)
from PIL import Image

import train_unet
from common import model_files
from common.config import default_preset, make_config, preset_checksum
from common.data_files import open_data
from common.flags import MANY_IMAGES, NOT_HERE, PRESETS, SHARED, TABLE, Own, format_value
from common.formats import read_model
from common.model import build_model
from common.program import UserError


def test_both_programs_read_one_table(run: Callable) -> None:
    """What common/flags.py makes of unet/flags.h is what the compiler makes of it: names and their order, defaults, words, limits."""
    text = run(["--help", "all"]).out.partition("\nPresets")[0]
    listed = dict(re.findall(r"^  --(\w+) (.*)", text, re.MULTILINE))
    assert [name for name, *_ in TABLE] == list(listed)
    for name, type_, flag in TABLE:
        default = re.search(r"\[([^\]]*?)(; .*)?\]$", listed[name])[1].replace('""', "")
        assert default == format_value(name, flag.default) or float(default) == flag.default, name
        if flag.metadata["words"]:
            assert all(word in listed[name] for word in flag.metadata["words"])
        if type_ in ("int", "float"):
            low, high = flag.metadata["limits"]
            form, told = ".0f" if type_ == "int" else "g", run([f"--{name}", "x"], code=1).err
            assert f"{low:{form}}" in told and f"{high:{form}}" in told
    assert train_unet.FLAGS.keys() == {name for name, *_ in TABLE} - set(NOT_HERE) | {f.name for f in dataclasses.fields(Own)}
    with pytest.raises(train_unet.UserError, match="--bench"):
        train_unet.parse_flags(["--bench", "20"], train_unet.FLAGS)


UNHEARD = [
    "--objective unheard", "--objective ect --ect_frame unheard", "--objective ect --ect_weight unheard", "--noise_schedule unheard",
    "--predict unheard", "--lr_schedule unheard", "--schedule_sampler unheard", "--precision unheard", "--sampler unheard --sample_interval 1",
    "--exchange unheard",
]  # fmt: skip


@pytest.fixture(scope="module")
def with_unheard_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both programs, in a folder, with a word more for each flag that has words: as they are before somebody has written what it means."""
    folder = tmp_path_factory.mktemp("unheard")
    for name in ("common", "unet", "dev/reference.h", "dev/winograd.h"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copytree(ROOT / name, folder / name) if (ROOT / name).is_dir() else shutil.copy(ROOT / name, folder / name)
    for name in ("train_unet.py", "train_unet.cu"):
        shutil.copy(ROOT / name, folder / name)
    table = (ROOT / "unet/flags.h").read_text()
    (folder / "unet/flags.h").write_text(re.sub(r'WORDS\("([^"]+)"\)', r'WORDS("\1|unheard")', table))
    words = "g++ -x c++ -std=c++20 -O0 -fopenmp train_unet.cu -o train_unet".split()
    subprocess.run(words, cwd=folder, check=True, capture_output=True)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("given", UNHEARD)
def test_a_word_without_a_meaning_is_a_sentence(with_unheard_words: Path, data: Path, tmp_path: Path, given: str) -> None:
    """A new word of a flag is never silently taken for an old one, wherever somebody forgot to say what it means."""
    program, twin = [with_unheard_words / "train_unet"], [sys.executable, with_unheard_words / "train_unet.py", "--device", "cpu"]
    for command in [program] if "exchange" in given else [program, twin]:
        words = [*command, *flags(TINY, "--data_file", data, "--max_steps 1", given)]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        flag = next(word for word, value in zip(given.split(), given.split()[1:]) if value == "unheard")
        assert done.returncode == 1 and f"{flag} unheard" in done.stderr and done.stderr.count("\n") == 1, done
        shutil.rmtree(tmp_path / "out", ignore_errors=True)


def test_help_begins_with_few_flags(run: Callable, capsys: pytest.CaptureFixture) -> None:
    """Both programs list the same flags in --help, which names --help all; --version is the same word."""

    def twin(*words: str) -> str:
        with pytest.raises(SystemExit):
            train_unet.parse_flags(list(words), train_unet.FLAGS)
        return capsys.readouterr().out

    first = re.findall(r"^  --(\w+) ", run(["--help"]).out, re.MULTILINE)
    own = {field.name for field in dataclasses.fields(Own)}
    assert len(first) == 15 and [name for name in re.findall(r"^  --(\w+) ", twin("--help"), re.MULTILINE) if name not in own] == [
        name for name in first if name not in own and name not in NOT_HERE
    ]
    assert "--help all" in run(["--help"]).out and "--help all" in twin("--help")
    assert "--ect_q " in twin("--help", "all") and "--ect_q " not in twin("--help")
    assert run(["--version"]).out.split(",")[0].strip() == twin("--version").strip() == f"train_unet {SHARED['VERSION']}"
    assert f"## {SHARED['VERSION']} " in (ROOT / "docs/CHANGELOG.md").read_text()


def test_first_and_last_lines_say_where_to_look(run: Callable, data: Path, tmp_path: Path) -> None:
    """What is trained, what it costs (the ETA counts grids, too), and the command that draws more, which works as it is."""
    words = flags(TINY, "--data_file", data, "--max_steps 5 --sample_interval 2 --num_samples 16 --timestep_respacing 40 --log_interval 1")
    lines = run(words).out.splitlines()
    assert lines[0].startswith(f"train_unet {SHARED['VERSION']}: preset fashion32 on the CPU") and len(lines[0]) < 80
    assert "run: 5 steps, a grid of 16 samples every 2; the ETA counts both; open out/index.html to watch it" in lines
    assert any(line.startswith("done: 5 steps, ") and line.endswith("; open out/index.html") for line in lines)
    command = lines[-1].removeprefix("more images: ./train_unet ").split()
    assert command[:2] == ["--sample", "64"] and command[-1] == "samples_more.png"
    run([*command, "--timestep_respacing", 2])
    assert (tmp_path / "samples_more.png").exists()


def test_limits_are_as_exact_as_files(run: Callable, data: Path) -> None:
    """Both programs take the highest dropout, whose nearest float32 is a little above the limit as text."""
    run(flags(TINY, "--data_file", data, "--max_steps 1 --dropout 0.99"))
    assert make_config({"preset": "fashion32", "dropout": 0.99}).dropout == np.float32(0.99)


def test_presets_agree_with_the_twin(run: Callable) -> None:
    text = run(["--help", "all"]).out
    told = dict(re.findall(r"^  (\w+) +(--.*)", text.partition("Presets")[2], re.MULTILINE))
    assert told.keys() == PRESETS.keys()
    for preset, words in PRESETS.items():
        assert told[preset].split() == words.split(), preset
        make_config({"preset": preset})  # can work


def test_heads_given_are_heads_taken(run: Callable, data: Path, tmp_path: Path) -> None:
    """A preset's --num_head_channels does not hold beside a --num_heads of the command line."""
    given = flags(TINY, "--num_head_channels 32", "--data_file", data, "--max_steps 1")
    at = given.index("--num_head_channels")
    run([*given[:at], *given[at + 2 :], "--num_heads", 4])
    assert read_checkpoint(tmp_path / "out" / model_name(1)).header[11:13].tolist() == [4, -1]
    assert make_config({"preset": "unet64", "num_heads": 4}).num_head_channels == -1
    assert make_config({"preset": "unet64", "num_heads": 4, "num_head_channels": 16}).num_head_channels == 16


# height, width; more flags; the preset, its patch
BY_SIZE = {
    (28, 28, ""): ("fashion32", 0),
    (32, 32, ""): ("quick32", 2),
    (48, 32, ""): ("emoji64", 2),
    (64, 64, ""): ("emoji64", 2),
    (64, 64, "--patch_size 4"): ("emoji64", 4),
    (100, 100, ""): ("fashion32", 0),  # 100 can't be halved often enough
    (128, 128, ""): ("emoji64", 4),
    (144, 144, ""): ("emoji64", 2),  # in squares of 4x4 it can't be halved three times
    (128, 128, "--cond lowres:4"): ("emoji64", 2),  # squares of 4x4 would have 96 channels
}


@pytest.mark.skipif(BUILD == "cuda", reason="names the CPU's presets; test_the_preset_on_a_gpu has the others")
@pytest.mark.parametrize("case", BY_SIZE, ids=str)
def test_the_preset_by_the_size_of_the_images(run: Callable, make_data: Callable, tmp_path: Path, case: tuple[int, int, str]) -> None:
    """Without --preset: what draws the best pictures for a minute, where images can be halved often enough, else the one that takes any size. Both
    programs choose the same preset and squares."""
    (height, width, more), (preset, patch) = case, BY_SIZE[case]
    file = make_data("d.bin", make_images(4, 3, height, width))
    out = run(["--data_file", file, *more.split(), "--max_steps", 1, "--sample_interval", 0, "--batch_size", 1]).out
    assert f"preset {preset}" in out
    trained = read_model(str(tmp_path / "out" / model_name(1))).config
    assert (trained.patch_size, trained.image_size) == (patch, (height, width))
    given = train_unet.parse_flags(["--data_file", str(file), "--device", "cpu", *more.split()], train_unet.FLAGS)
    config = make_config(given, train_unet.open_data(str(file)))
    assert (config.preset, config.patch_size, config.attention_resolutions) == (preset, patch, trained.attention_resolutions)


def test_the_preset_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin's choice, as if it had a GPU."""
    monkeypatch.setattr("common.config.pick_device", lambda name: SimpleNamespace(type="cuda"))
    chosen = {size: default_preset({"data_dir": "pets", "image_size": (size, size)}) for size in (24, 32, 64, 100, 128, 144, 256)}
    quick = {64: 2, 128: 4, 144: 4, 256: 4}
    assert chosen == {24: ("unet64", 0), 32: ("photos32", 0), 100: ("unet64", 0)} | {size: ("quick64", patch) for size, patch in quick.items()}
    assert default_preset({"data_file": SHARED["DEFAULT_DATA"]}, open_data(str(ROOT / SHARED["DEFAULT_DATA"]))) == ("photos32", 0)
    assert default_preset({}) == ("quick64", 0)


# labels, count, flags; class_cond, class_dropout, guidance_scale, min_snr_gamma
BY_IMAGES = {
    ("labels", 4, ""): (True, 0.1, 2.0, 0.5),
    ("", 4, ""): (False, 0.0, 1.0, 0.5),
    ("", MANY_IMAGES, ""): (False, 0.0, 1.0, 5.0),
    ("labels", MANY_IMAGES - 1, ""): (True, 0.1, 2.0, 0.5),
    ("labels", 4, "--class_cond False"): (False, 0.0, 1.0, 0.5),
    ("labels", 4, "--class_dropout 0 --min_snr_gamma 2"): (True, 0.0, 1.0, 2.0),
    ("labels", MANY_IMAGES, "--objective flow"): (True, 0.1, 2.0, 0.0),
    ("labels", MANY_IMAGES, "--preset emoji64"): (False, 0.0, 1.0, 0.5),
}


@pytest.mark.parametrize("case", BY_IMAGES, ids=str)
def test_the_flags_by_the_labels_and_the_number_of_images(run: Callable, make_data: Callable, tmp_path: Path, case: tuple[str, int, str]) -> None:
    """Without --preset, images with labels are learned as classes, and the loss is weighted for few or for many images. Both programs do the same."""
    (labels, count, more), wanted = case, BY_IMAGES[case]
    file = make_data("d.bin", make_images(count, 1, 32, 48), *((np.arange(count) % 3, 3) if labels else ()))
    small = "--num_channels 32 --channel_mult 1,1 --attention_resolutions 8 --max_steps 1 --sample_interval 0 --batch_size 1 --warmup_steps 0"
    words = ["--data_file", str(file), *small.split(), *more.split()]
    run(words)
    trained = read_model(str(tmp_path / "out" / model_name(1))).config
    config = make_config(train_unet.parse_flags([*words, "--device", "cpu"], train_unet.FLAGS), open_data(str(file)))
    assert (config.class_cond, config.class_dropout, config.guidance_scale, config.min_snr_gamma) == (wanted[0], np.float32(wanted[1]), *wanted[2:])
    assert (trained.class_cond, trained.class_dropout, trained.min_snr_gamma) == (wanted[0], np.float32(wanted[1]), wanted[3])


def test_the_preset_of_a_folder() -> None:
    """Without a size, a folder becomes 64x64; the preset goes by --image_size where it is given. No data: the default."""
    folder = {"data_dir": "pets", "device": "cpu"}
    assert default_preset(folder) == default_preset(folder | {"image_size": (64, 64)}) == ("emoji64", 2)
    assert default_preset(folder | {"image_size": (32, 32)}) == ("quick32", 2)
    assert default_preset(folder | {"image_size": (256, 256)}) == ("emoji64", 4)
    assert default_preset(folder | {"image_size": (28, 28)}) == ("fashion32", 0)
    assert default_preset({"device": "cpu"}) == ("quick32", 0)


@pytest.mark.parametrize("name", ["data_dir", "data_file", "init"])
def test_an_empty_path_is_no_default(run: Callable, name: str) -> None:
    """As a script gives it whose variable is not set: the program does not train on its own data then."""
    assert f"--{name}" in run([f"--{name}", "", "--max_steps", 1], code=1).err
    with pytest.raises(train_unet.UserError, match=f"--{name}"):
        train_unet.run([f"--{name}", "", "--max_steps", "1"])


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("", {"predict": "x0", "min_snr_gamma": 5.0, "S_churn": 20.0}),
        ("--objective flow", {"predict": "eps", "min_snr_gamma": 0.0, "S_churn": 20.0}),
        ("--predict v", {"predict": "v", "min_snr_gamma": 0.0, "S_churn": 20.0}),
        ("--sampler ddim", {"predict": "x0", "min_snr_gamma": 5.0, "S_churn": 0.0}),
        ("--sampler heun", {"predict": "x0", "min_snr_gamma": 5.0, "S_churn": 0.0}),
        ("--learn_sigma True --use_kl True", {"predict": "x0", "min_snr_gamma": 0.0, "S_churn": 20.0}),
    ],
)
def test_a_preset_does_not_stand_in_the_way(run: Callable, make_data: Callable, tmp_path: Path, given: str, kept: dict) -> None:
    """What of quick32 would forbid what is asked for, or say something else of it, is left out in both programs."""
    file = make_data("d.bin", make_images(8, 1, 32, 32), np.arange(8) % 3, 3)
    out = run(["--preset", "quick32", *given.split(), "--data_file", file, "--max_steps", 1, "--batch_size", 1, "--sample_interval", 0]).out
    config = make_config({"preset": "quick32"} | train_unet.parse_flags(given.split(), train_unet.FLAGS))
    assert {name: getattr(config, name) for name in kept} == kept
    header = read_checkpoint(tmp_path / "out/model_0000001.bin").header
    assert ("eps", "x0", "v")[header[44]] == kept["predict"] and header[46:47].view(np.float32) == kept["min_snr_gamma"], out


@pytest.mark.parametrize(
    "labels, given, classes, class_dropout, guidance_scale",
    [
        (True, "", 3, 0.1, 2),
        (False, "", 0, 0, 1),
        (True, "--class_cond False", 0, 0, 1),
        (True, "--class_dropout 0", 3, 0, 1),
        (True, "--guidance_scale 1", 3, 0.1, 1),
        (True, "--objective ect --ect_frame edm", 3, 0.1, 1),
    ],
)
def test_a_preset_with_classes(
    run: Callable, make_data: Callable, tmp_path: Path, labels: bool, given: str, classes: int, class_dropout: float, guidance_scale: float
) -> None:
    """quick32 learns classes, and guides by them a model that can be guided; where nobody named it and the data has no labels, it does without them.
    Both programs do the same."""
    if BUILD == "cuda" and not labels:
        pytest.skip("there the default preset is another one")
    file = make_data("d.bin", make_images(8, 1, 32, 32), *((np.arange(8) % 3, 3) if labels else ()))
    words = [*(["--preset", "quick32"] if labels else []), *given.split()]
    if not labels:
        assert "--class_cond" in run(["--preset", "quick32", "--data_file", file], code=1).err
        with pytest.raises(train_unet.UserError, match="--class_cond"):
            open_data(str(file)).check(make_config({"preset": "quick32", "num_classes": 3}))
    run([*words, "--data_file", file, "--max_steps", 3, "--batch_size", 1, "--sample_interval", 0])
    header = read_checkpoint(tmp_path / "out/model_0000003.bin").header
    assert (header[14], header[15], header[50:51].view("<f4")) == (classes > 0, classes, np.float32(class_dropout))
    config = make_config(train_unet.parse_flags([*words, "--data_file", str(file), "--device", "cpu"], train_unet.FLAGS), open_data(str(file)))
    assert (config.class_cond, config.class_dropout) == (classes > 0, np.float32(class_dropout))
    assert (config.guidance_scale, config.class_cond and config.num_classes) == (guidance_scale, classes)

    # Without a word about guidance, samples are guided if the model can be; a consistency model never is. (In the third step the classes first matter:
    # the first step changes the last convolution alone, and the second one those that end the blocks. Both begin with zeros.)
    guided = class_dropout > 0 and "ect" not in given
    # Of three steps, only the second one begins at a sigma where the preset guides: at 2.5. A --guidance_scale of one's own acts in all of them.
    sample = ["--preset", "quick32", "--sample", 1, "--init", f"out/{model_name(3)}", "--use_ema", "False", "--timestep_respacing", 3]
    run([*sample, "--output", "s.bin"])
    run([*sample, "--output", "one.bin", "--guidance_scale", 1])
    assert np.array_equal(read_samples(tmp_path / "s.bin"), read_samples(tmp_path / "one.bin")) == (not guided)
    if guided:
        run([*sample, "--output", "two.bin", "--guidance_scale", 2, "--guidance_min", 0.2, "--guidance_max", 5])
        run([*sample, "--output", "anywhere.bin", "--guidance_scale", 2])
        assert np.array_equal(read_samples(tmp_path / "s.bin"), read_samples(tmp_path / "two.bin"))
        assert not np.array_equal(read_samples(tmp_path / "s.bin"), read_samples(tmp_path / "anywhere.bin"))
        for given, limits in (({}, (0.2, 5)), ({"guidance_scale": 2.0}, (0, 1e9))):
            config = make_config({"preset": "quick32", "num_classes": 3} | given)
            assert (config.guidance_min, config.guidance_max) == pytest.approx(limits)


def test_edm_with_a_preset_for_ddpm(run: Callable, data: Path, tmp_path: Path) -> None:
    """A preset's prediction and weighting do not stand in the way of --objective edm of the command line."""
    small = "--num_channels 32 --channel_mult 1,1 --attention_resolutions 4 --batch_size 2 --max_steps 1 --sample_interval 0"
    given = ["--preset", "emoji64", "--objective", "edm", *small.split(), "--data_file", data, "--image_size", "8x8", "--in_channels", "1"]
    run([*given, "--output_dir", tmp_path / "out"])
    done = run([*given, "--predict", "v", "--output_dir", tmp_path / "out2"], code=1)
    assert "--predict" in done.err
    for preset in ("emoji64", "adm64"):
        config = make_config({"preset": preset, "objective": "edm"})
        assert (config.predict, config.min_snr_gamma, config.learn_sigma) == ("eps", 0, False)


# guided-diffusion's and improved-diffusion's recipes, as their READMEs publish them
RECIPES = {
    "baseline": "--image_size 64 --num_channels 128 --num_res_blocks 3 --diffusion_steps 4000 --noise_schedule linear --lr 1e-4 --batch_size 128",
    "ImageNet-64, hybrid": "--image_size 64 --num_channels 128 --num_res_blocks 3 --learn_sigma True --diffusion_steps 4000 --noise_schedule cosine"
    " --lr 1e-4 --batch_size 128",
    "CIFAR-10": "--image_size 32 --num_channels 128 --num_res_blocks 3 --learn_sigma True --dropout 0.3 --diffusion_steps 4000 --noise_schedule cosine"
    " --lr 1e-4 --batch_size 128",
    "ImageNet-64, classes": "--image_size 64 --num_channels 192 --num_res_blocks 3 --learn_sigma True --class_cond True --diffusion_steps 4000"
    " --noise_schedule cosine --rescale_learned_sigmas False --rescale_timesteps False --lr 3e-4 --batch_size 2048",
    "LSUN": "--image_size 256 --num_channels 128 --num_res_blocks 2 --num_heads 1 --learn_sigma True --use_scale_shift_norm False"
    " --attention_resolutions 16 --diffusion_steps 1000 --noise_schedule linear --rescale_learned_sigmas False --rescale_timesteps False --lr 1e-4"
    " --batch_size 128",
    "ImageNet-64, bound": "--image_size 64 --num_channels 128 --num_res_blocks 3 --learn_sigma True --diffusion_steps 4000 --noise_schedule cosine"
    " --use_kl True --lr 1e-4 --batch_size 128 --schedule_sampler loss-second-moment",
    # every other flag of image_train.py at once
    "all": "--image_size 64 --num_channels 192 --num_res_blocks 3 --num_heads 4 --num_heads_upsample -1 --num_head_channels 64 --attention_resolutions"
    " 32,16,8 --channel_mult 1,2,3,4 --dropout 0.1 --class_cond True --use_checkpoint False --use_scale_shift_norm True --resblock_updown True --use_fp16"
    " False --use_new_attention_order True --learn_sigma True --diffusion_steps 1000 --noise_schedule cosine --timestep_respacing 25,0,10 --use_kl False"
    " --predict_xstart False --rescale_timesteps False --rescale_learned_sigmas False --schedule_sampler uniform --lr 3e-4 --weight_decay 0.05"
    " --lr_anneal_steps 300000 --batch_size 256 --microbatch -1 --ema_rate 0.9999,0.999 --log_interval 10 --save_interval 10000"
    " --fp16_scale_growth 1e-3 --resume_checkpoint=",
}
SMALLER = "--image_size 8 --num_channels 32 --num_res_blocks 1 --channel_mult 1,1 --attention_resolutions 4 --batch_size 2 --sample_interval 0 --timestep_respacing 4"


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_run_as_published(run: Callable, refused: Callable, data: Path, tmp_path: Path, name: str) -> None:
    """As they stand they are the published models (parameters counted by hand of guided-diffusion's code); made smaller, they train for two steps, and both
    programs understand the same."""
    words = RECIPES[name].replace("=", " ").split(" ")
    given = train_unet.parse_flags(words, train_unet.FLAGS)
    config = make_config({"preset": "adm"} | given | ({"channel_mult": (1, 2, 2, 2)} if name == "CIFAR-10" else {}))
    defaults = dict(num_heads=4, num_head_channels=-1, use_scale_shift_norm=True, use_new_attention_order=False, noise_schedule="linear",
                    attention_resolutions=(16, 8), conv_resample=True, vlb_weight=float(np.float32(1 / config.diffusion_steps)))  # fmt: skip
    published = {
        k: v for k, v in given.items() if k not in ("channel_mult", "lr_anneal_steps", "rescale_learned_sigmas", "predict_xstart", "use_fp16")
    }
    for flag, value in (defaults | published).items():
        assert train_unet.format_value(flag, getattr(config, flag)) == train_unet.format_value(flag, value), flag
    refused([*words, "--data_dir", "path/to/images"], "path/to/images")

    both = [
        "--preset",
        "adm",
        *flags(RECIPES[name].replace("=", " "), SMALLER, "--num_head_channels 32" if name == "all" else []),
        "--data_file",
        str(data),
    ]
    at = both.index("--lr_anneal_steps") if "--lr_anneal_steps" in both else 0
    both = [*both[:at], "--lr_anneal_steps", "2", *both[at + 2 :]] if at else [*both, "--max_steps", "2"]
    run(both)
    header = read_checkpoint(tmp_path / "out" / model_name(2)).header
    twins = make_config(train_unet.parse_flags(both, train_unet.FLAGS), opened := train_unet.open_data(str(data)))
    weights = np.zeros(train_unet.parameter_count(twins), np.float32)
    preset = preset_checksum(twins.preset, "--preset" not in both)
    state = train_unet.TrainingState(2, 2, 0, 0, len(opened.images), opened.crc, preset=preset, guard_kind=1)
    state = dataclasses.replace(state, **{name: getattr(twins, name) for name in ("save_interval", "sample_interval", "num_samples")})
    more = (weights,) * (len(twins.ema_rate) - 1)
    file = train_unet.ModelFile(dataclasses.replace(twins, data_file=str(data)), weights, weights, weights, weights, state, more_emas=more)
    expected = model_files.pack_header(file).tobytes()
    differs = np.flatnonzero(header != np.frombuffer(expected, "<i4"))
    assert {*differs.tolist()} <= {3, *range(88, 98)}  # the checksum, the running means


def test_what_other_programs_have(refused: Callable, data: Path) -> None:
    """guided-diffusion's other scripts, and lists of which one entry cannot work: each ends in a sentence that names the flag, in both programs."""
    for words in (
        "--iterations 300000 --anneal_lr True --batch_size 256 --lr 3e-4 --save_interval 10000 --weight_decay 0.05 --image_size 128",
        "--classifier_attention_resolutions 32,16,8 --classifier_depth 2",
        "--base_samples 64_samples.npz --large_size 256",
        "--large_size 256 --learn_sigma True",
        "--small_size 60 --large_size 256",
        "--small_size 64 --large_size 256 --cond gray",
        "--model_path model.pt --use_ddim True",
        "--lr_anneal_steps 100 --max_steps 200",
        "--lr_anneal_steps 100 --lr_schedule cosine",
        *("--timestep_respacing 0", "--timestep_respacing 1001", "--timestep_respacing 0,501", "--timestep_respacing 0,0"),
        *("--ema_rate 0.9,1.1", "--ema_rate 1,1,1,1,1,1,1,1,1", "--ema_rate ,"),
    ):
        name, *_ = given = words.split(" ")
        refused([*given, "--data_file", data], name)
        with pytest.raises(train_unet.UserError, match=name):
            make_config(train_unet.parse_flags(given, train_unet.FLAGS))


def test_a_part_that_keeps_no_step(run: Callable, data: Path) -> None:
    assert train_unet.space_timesteps(30, "3,0,2") == [0, 4, 9, 20, 29]  # as guided-diffusion's space_timesteps gives them
    run([*TINY, "--data_file", data, "--max_steps", 1])
    sample = ["--preset", "fashion32", "--sample", 1, "--init", f"out/{model_name(1)}"]
    assert " 5 evaluations" in run([*sample, "--timestep_respacing", "3,0,2"]).out


# What cannot work, and where that is not the first flag, the flag or the file to be named
REFUSED = [
    # what is no flag, or has no value
    "--batchsize 4", "--max_step=4", "--learningrate 4", "--profile 20", "batch_size 4", "-batch_size 4", "--batch_size",
    "--batch_size 4 --batch_size=4", "--", "--=4",
    # numbers
    "--batch_size ", "--batch_size four", "--batch_size 4.5", "--batch_size 0", "--batch_size -3", "--batch_size 4294967300",
    "--max_steps 99999999999999999999", "--seed -1", "--device 1", "--device -1", "--lr fast", "--lr nan", "--lr inf", "--lr -1e-3", "--lr 1e-3x",
    "--lr 1e999", "--lr 0x1p-9", "--max_steps 1_0", "--channel_mult 1,0x2", "--dropout 1", "--ema_rate 1.5", "--adam_beta2 1", "--adam_eps 0",
    "--eta 2", "--max_bad_steps -1",
    # words
    "--class_cond maybe", "--preset imagenet", "--noise_schedule quadratic", "--noise_schedule linear|cosine", "--sampler ", "--lr_schedule Cosine",
    # the shape of the model
    "--num_channels 48", "--num_channels 16", "--channel_mult 1,2,x", "--channel_mult 1,,2", "--channel_mult 1,2,", "--channel_mult 1,1.3",
    "--channel_mult 1,-1", "--channel_mult 1,nan", "--channel_mult 1,1e30", "--channel_mult 1,-1e30", "--channel_mult 1,1,1,1,1,1,1,1,1",
    ("--channel_mult 1,1,1,1,1", "--image_size"), "--channel_mult ", "--attention_resolutions 5", "--attention_resolutions 4;8",
    "--attention_resolutions 4,4,4,4,4,4,4,4,4", "--num_head_channels 24", "--num_head_channels 0",
    ("--num_head_channels -1 --num_heads 5", "--num_heads"), ("--num_head_channels -1 --num_heads_upsample 5", "--num_heads_upsample"),
    ("--num_head_channels -1 --num_heads_upsample 0", "--num_heads_upsample"), "--image_size x8", "--image_size 8x", "--image_size 8x8x8",
    "--image_size 2", "--image_size -8", "--image_size 4294967304", "--image_size 9", "--image_size 10 --patch_size 2",
    ("--in_channels 3 --patch_size 5", "--patch_size"), "--num_classes 3 --class_cond True --num_classes=3",
    # the diffusion and its samplers
    "--diffusion_steps 1", "--diffusion_steps 10", "--diffusion_steps 20", "--timestep_respacing 0", "--timestep_respacing 1001",
    "--timestep_respacing ddim400", "--timestep_respacing ddim", "--timestep_respacing ddim25x", "--timestep_respacing ten",
    "--timestep_respacing 10,,20", "--timestep_respacing 10,-20", "--timestep_respacing 2.5", "--timestep_respacing 1e30",
    "--timestep_respacing 600,10", "--objective score", "--predict noise", "--predict_xstart True --predict v", "--use_fp16 True --precision fp32",
    ("--use_fp16 True", "--precision"), "--use_fp16 False --precision bf16", "--rescale_learned_sigmas True --vlb_weight 1",
    ("--objective edm --predict x0", "--predict"), ("--objective edm --learn_sigma True", "--learn_sigma"),
    ("--objective edm --use_kl True", "--use_kl"), ("--objective edm --min_snr_gamma 5", "--min_snr_gamma"),
    ("--objective edm --rescale_timesteps True", "--rescale_timesteps"), ("--objective edm --sigma_data 0", "--sigma_data"),
    ("--use_kl True --min_snr_gamma 5", "--min_snr_gamma"), "--min_snr_gamma -1", "--class_dropout 0.1", "--classes 1",
    "--classes 1,x --class_cond True", "--classes 1,3 --class_cond True", "--classes 0.5 --class_cond True", "--guidance_scale 3",
    "--guidance_min 3 --guidance_max 2", "--guidance_scale 3 --class_cond True", "--sigma_min 1 --sigma_max 0.5",
    ("--sampler dpmpp_2m --S_churn 10", "--S_churn"), "--dynamic_threshold 1.5", "--noise_seed -2",
    # the run
    "--microbatch 3", "--microbatch 8", "--output_dir ", "--precision bf16", "--init a.bin --resume_checkpoint b.bin", "--resume_checkpoint latest",
    "--sample 4", ("--val_data_file missing.bin", "missing.bin"), ("--init missing.bin", "missing.bin"),
]  # fmt: skip


@pytest.mark.parametrize("given", REFUSED, ids=str)
def test_what_cannot_work_is_refused(refused: Callable, data: Path, given: str | tuple[str, str]) -> None:
    """In one sentence with the flag; nothing is created."""
    given, named = given if isinstance(given, tuple) else (given, given.split(" ")[0].split("=")[0])
    args = given.split(" ")
    if len(args) % 2 == 0 and all(name.startswith("--") and "=" not in name for name in args[::2]):
        args = flags(TINY, "--data_file", data, args)
    refused(args, named)


@pytest.mark.parametrize(
    "words",
    ["junk", "--data_file --output_dir x", "--output_dir --junk", "--data_file", "--model_path x", "--iterations 3", "--qqqqqqqq 3"],
)
def test_both_programs_refuse_a_wrong_word(refused: Callable, words: str) -> None:
    name = words.split()[0]
    refused(words.split(), name)
    with pytest.raises(train_unet.UserError, match=name):
        train_unet.parse_flags(words.split(), train_unet.FLAGS)


@pytest.mark.parametrize(
    "words", ["--max_steps 1_0", "--max_steps 0x2", "--lr 1_0", "--lr 0x2", "--channel_mult 1,0x2", "--ema_rate 0.9_9", "--classes 1,2_0"]
)
def test_numbers_that_only_one_language_reads(refused: Callable, data: Path, words: str) -> None:
    """Python reads 1_0, and C reads 0x2."""
    name = words.split()[0]
    with pytest.raises(train_unet.UserError, match=name):
        train_unet.run([*words.split(), "--data_file", str(data), "--device", "cpu"])
    refused([*words.split(), "--data_file", data], name)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_memory_line_adds_up(run: Callable, make_data: Callable, optimizer: str) -> None:
    """No use takes less than nothing, also where a device does without a copy. (The model is so large that a copy too many is 0.07 GiB.)"""
    file = make_data("labels.bin", make_images(4, 1, 32, 32), np.arange(4) % 2, 2)
    words = flags("--preset quick32 --num_channels 256 --channel_mult 1,1 --batch_size 1 --max_steps 1 --sample_interval 0 --optimizer", optimizer)
    line = re.search(r"^memory: (.*)$", run([*words, "--data_file", file]).out, re.MULTILINE)[1]
    total, *parts = map(float, re.findall(r"-?\d+\.\d+", line))
    assert len(parts) == 5 and min(parts) >= 0 and abs(total - sum(parts)) < 0.005 * (len(parts) + 1)


@pytest.mark.parametrize(
    "words", [["--channel_mult", "1,1e30"], ["--channel_mult", "1,-1e30"], ["--timestep_respacing", "1e30"], ["--channel_mult", "x"]]
)
def test_numbers_that_fit_no_int(refused: Callable, data: Path, words: list[str]) -> None:
    """The sanitizers watch."""
    refused(flags(TINY, "--data_file", data, words), words[0], binary="asan")


def test_data_and_flags_that_do_not_fit(refused: Callable, data: Path, make_data: Callable) -> None:
    plain = make_data("plain.bin", make_images())
    refused([*TINY, "--data_file", data, "--image_size", "8x12"], data)
    refused([*TINY, "--data_file", data, "--in_channels", "3"], data)
    for size in (64, 16, 12):  # attention at 8 does not occur in all of them, which nobody asked for
        assert "attention" not in refused(["--preset", "fashion32", "--data_file", data, "--image_size", size], "--image_size")
    refused([*TINY, "--data_file", data, "--class_cond", "True", "--num_classes", "2"], "--num_classes")
    refused([*TINY, "--data_file", plain, "--class_cond", "True"], "--class_cond")
    refused([*TINY, "--data_file", plain, "--class_cond", "True", "--num_classes", "5"], "--class_cond", "plain.bin")
    refused([*TINY, "--data_file", "none.bin"], "none.bin")
    refused([*TINY, "--data_file", "."])
    refused([*TINY, "--data_file", data, "--output_dir", plain], plain)
    refused([*TINY, "--data_file", "./" * 255 + "plain.bin"], "--data_file")  # a checkpoint could not hold it
    odd = make_data("odd.bin", make_images(4, 1, 30, 30))  # nobody asked for attention at 7
    assert "attention" not in refused(["--data_file", odd, "--preset", "fashion32"], "30")


@pytest.mark.parametrize("problem", ["shape", "no labels", "too many classes"])
def test_validation_data_that_does_not_fit(refused: Callable, data: Path, make_data: Callable, problem: str) -> None:
    images, labels, classes = make_images(), np.arange(24) % 7, 7
    if problem == "shape":
        images = make_images(height=16)
    if problem == "no labels":
        labels, classes = None, 0
    val = make_data("val.bin", images, labels, classes)
    refused([*TINY, "--data_file", data, "--class_cond", "True", "--max_steps", "1", "--val_data_file", val], "val.bin")


@pytest.mark.parametrize("output", ["x", "x.jpg", ".png", "nowhere/x.png", "folder.png"])
def test_output_of_sample(refused: Callable, run: Callable, data: Path, tmp_path: Path, output: str) -> None:
    run([*TINY, "--data_file", data, "--max_steps", "1"])
    (tmp_path / "folder.png").mkdir()
    refused(["--sample", "1", "--timestep_respacing", "2", "--init", "out/model_0000001.bin", "--output", output], output)


def test_more_samples_than_memory(refused: Callable, run: Callable, data: Path) -> None:
    run([*TINY, "--data_file", data, "--max_steps", "1"])
    refused(["--sample", "100000000", "--init", "out/model_0000001.bin"])
    refused(["--sample", "100000000", "--init", "out/model_0000001.bin", "--batch_size", "1000000"])


def test_a_model_that_does_not_fit_into_memory(refused: Callable, make_data: Callable) -> None:
    """Sizes whose product wraps around 64 bits must not pass for small ones. (Data: one image of 4096x4096.)"""
    big = make_data("big.bin", np.zeros((1, 1, 4096, 4096), np.uint8))
    refused(flags(TINY, "--data_file", big, "--num_channels 8192 --channel_mult 64 --attention_resolutions 4096"))
    refused(flags(TINY, "--data_file", big, "--channel_mult 1 --attention_resolutions 4096 --batch_size 1000000"), "--batch_size")


@pytest.mark.parametrize("megabytes", range(15, 100, 14))
def test_memory_that_runs_out(make_data: Callable, tmp_path: Path, megabytes: int) -> None:
    """Wherever that is, also in the threads of a parallel loop, it ends in a sentence (or the memory is enough)."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))

    d = make_data("d.bin", np.zeros((1, 1, 48, 48), np.uint8))
    args = flags(TINY, "--data_file", d, "--channel_mult 1 --attention_resolutions 48 --batch_size 1 --max_steps 1")
    p = subprocess.run([binary_path("cpu"), *args], cwd=tmp_path, env=environment(), capture_output=True, text=True, preexec_fn=limit)
    if p.returncode == 0:
        assert checkpoints(tmp_path / "out") == [1]
    else:
        assert p.returncode == 1 and p.stderr.startswith("train_unet: ") and p.stderr.count("\n") == 1, p.stderr


# ----------------------------------------------------------------------------------------------------------------------
# what is left open


def settings(run: Callable, args: list, cwd: Path) -> dict[str, object]:
    """The model that one step with these flags trains, from the checkpoint's header."""
    run([*args, "--max_steps", "1", "--batch_size", "1", "--sample_interval", "0", "--output_dir", "out"], cwd=cwd)
    header = read_checkpoint(cwd / "out/model_0000001.bin").header
    return dict(
        size=tuple(header[6:8]), in_channels=header[8], num_channels=header[9], num_classes=header[15], conv_resample=header[19], objective=header[43],
        mult=tuple(header.view("<f4")[23 : 23 + header[22]]), attention=tuple(header[32 : 32 + header[31]]), max_steps=header[70],
    )  # fmt: skip


@pytest.mark.parametrize(
    "shape, flags, wanted",
    [
        ((1, 8, 8), ["--channel_mult", "1,1"], dict(size=(8, 8), in_channels=1, attention=(8,))),
        ((3, 8, 12), ["--channel_mult", "1,1,2"], dict(size=(8, 12), in_channels=3, attention=(8,))),
        ((2, 20, 12), ["--channel_mult", "1,1,2"], dict(size=(20, 12), in_channels=2, attention=(5,))),  # 8 doesn't occur: the deepest
        ((1, 8, 8), ["--channel_mult", "1,1", "--attention_resolutions", ""], dict(attention=())),
        ((1, 8, 8), ["--channel_mult", "1,1", "--attention_resolutions", "4,8"], dict(attention=(4, 8))),
        ((1, 8, 8), ["--class_cond", "True", "--channel_mult", "1,1"], dict(num_classes=3)),
        ((1, 8, 8), ["--class_cond", "True", "--channel_mult", "1,1", "--num_classes", "5"], dict(num_classes=5)),
        ((1, 8, 8), ["--channel_mult", "1,1"], dict(num_classes=3)),
        ((1, 8, 8), ["--class_cond", "False", "--channel_mult", "1,1"], dict(num_classes=0)),
        ((1, 8, 8), ["--image_size=8x8", "--channel_mult", "1,1"], dict(size=(8, 8))),
        ((3, 64, 64), [], dict(mult=(1, 1, 1, 1), objective=0, conv_resample=0, attention=(8, 4))),  # emoji64: what two cores can train
        (
            (3, 64, 64),
            ["--preset", "unet64", "--num_channels", "32", "--num_res_blocks", "1"],
            dict(mult=(1, 2, 3, 4), conv_resample=0, attention=(16, 8)),
        ),
        ((1, 64, 64), ["--preset", "fashion32"], dict(mult=(1, 2, 2), conv_resample=1, in_channels=1, attention=(16,))),
        ((1, 64, 64), ["--preset", "fashion32", "--image_size", "64"], dict(mult=(1, 2, 2), attention=(16,))),
    ],
    ids=str,
)
def test_defaults_from_the_data(run: Callable, make_data: Callable, tmp_path: Path, shape: tuple, flags: list, wanted: dict) -> None:
    path = make_data("d.bin", make_images(4, *shape), np.arange(4) % 3, 3)
    found = settings(run, ["--data_file", path, *flags], tmp_path)
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.skipif(BUILD == "cuda", reason="libgomp is the CPU build's")
@pytest.mark.parametrize(
    "set_by_user, count",
    [({}, "3000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "passive"}, "0"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_wait_briefly(set_by_user: dict[str, str], count: str | None) -> None:
    """libgomp's own 300,000 looks make a step 8 times as long beside a busy process. It tells what it read when it was loaded, which is what counts."""
    clean = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [binary_path("cpu"), "--help"]
    told = subprocess.run(command, env=clean | set_by_user | {"OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True, timeout=60)
    if "GOMP_SPINCOUNT" not in told.stderr:
        pytest.skip("this is not libgomp, or one that doesn't tell")
    last = re.findall(r"GOMP_SPINCOUNT = '(\w+)'", told.stderr)[-1]
    assert told.returncode == 0 and (last == count if count else last != "3000")


def test_parameters_and_flops_are_pytorchs(run: Callable, data: Path) -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    out = run([*TINY, "--data_file", data, "--max_steps", "1"]).out
    config = make_config(dict(preset="fashion32", image_size=(8, 8), channel_mult=(1, 1), attention_resolutions=(4,)))
    weights = train_unet.initial_weights(config)
    parameters, gflops = re.search(r"([\d.]+) M parameters, .* ([\d.]+) GFLOP", out).groups()
    assert float(parameters) == round(len(weights) / 1e6, 2)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        train_unet.build_model(config, weights)(torch.zeros(1, 1, 8, 8), torch.zeros(1))
    assert float(gflops) == pytest.approx(counter.get_total_flops() / 1e9, rel=0.02, abs=5e-4)


def test_equals_sign_and_booleans(run: Callable, data: Path, tmp_path: Path) -> None:
    for i, words in enumerate((["--random_flip", "True"], ["--random_flip=true"], ["--random_flip=1"])):
        run([*TINY, f"--data_file={data}", *words, "--max_steps=2", f"--output_dir={i}"])
        assert read_checkpoint(tmp_path / f"{i}/model_0000002.bin").header[80] == 1
        assert read_log(tmp_path / f"{i}") == read_log(tmp_path / "0")
    for value in ("False", "false", "0"):
        assert "--random_flip" not in run(["--random_flip", value, "--data_file", "none"], code=1).err


def test_fewer_diffusion_steps_than_the_sampler_takes(run: Callable, data: Path, tmp_path: Path) -> None:
    """Where nobody gave --timestep_respacing, all of them are taken."""
    tiny = flags(TINY_MODEL, TINY_RUN, "--num_samples 2")
    run([*tiny, "--data_file", data, "--max_steps", "1", "--sample_interval", "1", "--diffusion_steps", "40"])
    assert " 40 evaluations" in run(["--preset", "fashion32", "--sample", "1", "--init", "out/model_0000001.bin"]).out
    assert (tmp_path / "samples.png").exists()


@pytest.mark.long  # lines come every ten seconds
def test_slow_steps_and_slow_samplers_are_told_by_time(run: Callable, data: Path, tmp_path: Path) -> None:
    """The first step at once, then a line every ten seconds, however large --log_interval; and the figures are those of recent steps."""
    command = [binary_path("cpu"), *flags(TINY, "--data_file", data, "--batch_size 32 --max_steps 120 --log_interval 1000")]
    training = subprocess.Popen(list(map(str, command)), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True)
    lines = []
    while not lines or not lines[-1].startswith("step "):
        lines.append(training.stdout.readline())
        assert lines[-1], "it ended before its first step"
    time.sleep(0.1)  # now it is in a step (of some 25 ms), hardly between two (0.1 ms)
    training.send_signal(signal.SIGSTOP)
    run([*TINY, "--data_file", data, "--max_steps", "1", "--output_dir", "model"])
    count = 32 if BUILD == "cpu" else 20000
    words = f"--preset fashion32 --sample {count} --timestep_respacing 100 --init model/model_0000001.bin"
    sampling = subprocess.Popen([binary_path("cpu"), *words.split()], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True)
    began = time.monotonic()
    while not select.select([sampling.stdout], [], [], 0)[0]:  # stopped nearly all the time, so that it takes longer than ten seconds
        sampling.send_signal(signal.SIGSTOP)
        time.sleep(1)
        sampling.send_signal(signal.SIGCONT)
        time.sleep(0.03)
    training.send_signal(signal.SIGCONT)
    told = sampling.stdout.read()  # whose last words are no half-done sampling
    assert time.monotonic() - began > 10
    assert told.count("\n") >= 3, told  # how far it was, perhaps several times; that it is done; how long it took
    lines += training.stdout.readlines()
    assert training.wait() == 0 and sampling.wait() == 0
    steps = [line for line in lines if line.startswith("step ")]
    with open(tmp_path / "out/log.csv") as f:
        ms = [float(row["ms"]) for row in csv.DictReader(f)]
    # On a busy machine the stop may fall into the first three steps: then the next look as slow, and some 15 of them get lines, too.
    assert steps[0].startswith("step 1/120 ") and steps[-1].startswith("step 120/120 ") and 3 <= len(steps) <= 30, steps
    assert max(ms) > 10000 and min(ms[60:]) < float(re.search(r"([\d.]+) ms ", steps[-1])[1]) < max(ms[60:])


@pytest.mark.long
def test_the_mean_of_the_loss_is_of_recent_steps(run: Callable, data: Path, tmp_path: Path) -> None:
    """While the loss falls fast, too: the guard's mean, which decides what is skipped, lags behind for hundreds of steps."""
    fast = flags(TINY, "--lr 5e-3 --batch_size 16 --max_steps 200 --log_interval 1 --data_file", data)
    means = [float(mean) for mean in re.findall(r"\(mean ([\d.]+)\)", run(fast).out)]
    losses = [float(row["loss"]) for row in read_log(tmp_path / "out")]
    assert len(means) == len(losses) == 200 and np.mean(losses[:10]) > 3 * np.mean(losses[-30:])
    for n in range(1, 201):
        recent = losses[max(0, n // 2 - 2) : n]
        assert min(recent) - 1e-4 <= means[n - 1] <= max(recent) + 1e-4
        assert n < 50 or means[n - 1] == pytest.approx(np.mean(losses[n - n // 5 : n]), rel=0.3)


def test_pictures_are_small_and_hold_the_right_pixels(run: Callable, make_data: Callable, tmp_path: Path) -> None:
    """PNGs that other programs read: of RGB, of grey enlarged, of noise, and the loss curve."""
    for channels, size in ((3, 32), (1, 8), (4, 64)):
        d = make_data("d.bin", make_images(8, channels, size, size))
        args = flags(
            TINY, ["--attention_resolutions", ""], "--max_steps 1 --num_samples 3 --sample_interval 1", "--data_file", d, "--output_dir", size
        )
        run(args)
        sample = flags("--preset fashion32 --sample 3 --eta 0 --timestep_respacing 4 --init", f"{size}/model_0000001.bin", "--batch_size 4")
        run([*sample, "--output", "s.png"])
        run([*sample, "--output", "s.bin"])
        wanted = np.clip(np.floor(np.clip((read_samples(tmp_path / "s.bin") + 1) * 127.5, 0, 255) + 0.5), 0, 255).astype(np.uint8)
        zoom = max(1, 64 // size)
        with Image.open(tmp_path / "s.png") as image:
            assert image.format == "PNG" and image.mode == ("RGB" if channels == 3 else "L")
            pixels = np.array(image).reshape(2 * (size * zoom + 2) + 2, 2 * (size * zoom + 2) + 2, -1)
        for i in range(3):
            y, x = (2 + k * (size * zoom + 2) for k in divmod(i, 2))
            shown = pixels[y : y + size * zoom, x : x + size * zoom]
            assert np.array_equal(shown, wanted[i][: 3 if channels == 3 else 1].transpose(1, 2, 0).repeat(zoom, 0).repeat(zoom, 1))
        assert (pixels[-size * zoom :, -size * zoom :] == 255).all()  # no fourth image
        assert (tmp_path / "s.png").read_bytes() == (tmp_path / f"{size}/samples_0000001.png").read_bytes()
        assert (tmp_path / "s.png").stat().st_size < (1.1 if zoom == 1 else 0.8) * pixels.size  # noise itself can't be compressed


def test_a_damaged_log_does_no_harm(run: Callable, data: Path, tmp_path: Path) -> None:
    """Whatever the rows hold that the page of a resumed run begins with, it gets numbers."""
    run([*TINY, "--data_file", data, "--max_steps", "2"], binary="asan")
    rows = [
        "nan,1",
        "-1e300,1",
        "1e300,1",
        "-5,1",
        "1,1e308,,,,,,,,-1e308",
        "1,-1e308",
        "2,nan",
        "2,inf,,,,,,,,inf",
        "0,5e-324",
        "1,1,,,,,,,,x",
        "2,",
    ]
    log = tmp_path / "out/log.csv"
    log.write_text(log.read_text() + "".join(row + "\n" for row in rows) + "0,1\n" + "9" * 2000 + "\n1,")
    run([*TINY, "--data_file", data, "--max_steps", "4", "--resume_checkpoint", "latest"], binary="asan")
    assert all(len(row) == 16 and row[14] < 1e10 for row in shown_run(tmp_path / "out")["rows"])


def test_a_data_file_whose_name_is_no_utf8(run: Callable, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system takes any bytes for a name. Both programs write it into their checkpoints, and find it again."""
    name = os.fsdecode(b"d\xff.bin")
    (tmp_path / name).write_bytes(data.read_bytes())
    run([*TINY, "--data_file", name, "--max_steps", "1"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), errors="surrogateescape"))
    resume = flags("--max_steps 2 --sample_interval 0 --output_dir on --resume_checkpoint", "out/model_0000001.bin")
    assert train_unet.run([*resume, "--device", "cpu"]) == 0
    assert train_unet.run(["--convert", "on/model_0000002.bin", "m.pt"]) == 0
    run(flags("--max_steps 3 --sample_interval 0 --output_dir on --resume_checkpoint latest"))
    assert checkpoints(tmp_path / "on")[-1] == 3


def test_a_reader_that_goes_away_loses_nothing(data: Path, tmp_path: Path) -> None:
    """./train_unet | head stops the run as Ctrl-C does: the step is finished and saved."""
    command = [binary_path("cpu"), *TINY, "--data_file", data, "--max_steps", "10000", "--log_interval", "1"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    process.wait(timeout=60)
    assert checkpoints(tmp_path / "out") == [len(read_log(tmp_path / "out"))]


def test_unet_cus_quick_start_works_where_it_stands(run: Callable, data: Path, tmp_path: Path) -> None:
    """In docs/FORMATS.md, after `make train_unet && ./train_unet`: what is unpacked is there already, and out/ holds a run."""
    page = (ROOT / "docs/FORMATS.md").read_text()
    unpack, _, _, train = re.search(r"quick start work here too.*?```bash\n(.*?)```", page, re.DOTALL)[1].splitlines()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/emoji64.bin").write_bytes(data.read_bytes())
    (tmp_path / "data/emoji64.bin.gz").write_bytes(gzip.compress(data.read_bytes()))
    run([*TINY, "--data_file", data, "--max_steps", "1"])
    subprocess.run(unpack, shell=True, check=True, cwd=tmp_path, stdin=subprocess.DEVNULL)
    run([*TINY, "--data_file", "data/emoji64.bin", "--max_steps", "1", *train.split()[1:]])


def test_files_are_written_whole(run: Callable, data: Path, tmp_path: Path) -> None:
    """No temporary files stay behind, and what --output held before is replaced at once."""
    run([*TINY, "--data_file", data, "--max_steps", "2"])
    (tmp_path / "s.bin").write_bytes(seal_data(with_slot(data_bytes(make_images().astype("<f4")), 14, 1)))  # older samples
    run(["--sample", "2", "--timestep_respacing", "2", "--init", "out/model_0000002.bin", "--output", "s.bin"])
    assert sorted(p.name for p in tmp_path.rglob("*.*")) == [".lock", "index.html", "log.csv", "model_0000002.bin", "s.bin"]


@pytest.mark.long
def test_profile_adds_up(run: Callable) -> None:
    """The times of the operations are those of the whole step; every operation of the network is in the table."""
    out = run(["--profile", 1, *TINY_MODEL, "--preset", "fashion32", "--image_size", 8, "--batch_size", 2], binary="bench").out
    for title, wanted in (
        ("a training step", ["conv3x3 32->32 @8x8, weight gradient", "group norm 32->32 @8x8, backward", "AdamW, EMA"]),
        ("a forward pass", ["conv3x3 32->32 @8x8", "attention 1 heads 96->32 @4x4", "linear 128->128"]),
    ):
        table = out[out.index(title) :].split("a forward pass:")[-1 if title == "a forward pass" else 0].splitlines()
        rows = re.findall(r"^ *[-\d.]+ +([-\d.]+) +[\d.]+ +[-\d.]+% +(\d+) +\S+ +\S+ +\d+%  (.+)$", "\n".join(table), re.MULTILINE)
        total = float(re.search(r"^ *[-\d.]+ +([\d.]+) +[\d.]+$", "\n".join(table), re.MULTILINE)[1])
        assert abs(sum(float(us) for us, _, _ in rows) - total) < 0.1 * len(rows) + 0.5
        assert set(wanted) <= {name for _, _, name in rows}


# ----------------------------------------------------------------------------------------------------------------------
# sentences


def test_a_flag_without_a_value_is_named_alone(refused: Callable, run: Callable, data: Path) -> None:
    """Not as `--cond_file : must name ...`, in both programs."""
    run([*TINY, "--data_file", data, "--max_steps", "1", "--cond", "lowres:2"])
    assert "--cond_file: " in refused(["--sample", "1", "--init", "out/model_0000001.bin"])
    with pytest.raises(UserError, match="^--cond_file: "):
        make_config({"preset": "fashion32", "sample": 1, "cond_channels": 1})


@pytest.mark.skipif(BUILD == "cuda", reason="a GPU's memory is another one")
def test_memory_is_compared_with_what_is_free(make_data: Callable, tmp_path: Path) -> None:
    """Before any is taken. What is said to be free is what the system says, or less in a control group."""
    d = make_data("d.bin", np.zeros((1, 64, 1024, 1024), np.uint8))
    args = flags(TINY, "--data_file", d, "--num_channels 32 --channel_mult 1,1 --attention_resolutions 512 --batch_size 64 --max_steps 1")
    p = subprocess.run([binary_path("cpu"), *args], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert p.returncode == 1 and p.stderr.count("\n") == 1
    needed, free = map(float, re.findall(r"([\d.]+) GiB", p.stderr))
    words = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(words["MemAvailable"].split()[0]) / 2**20
    assert 0 < free < 1.2 * available + 1 < needed


# ----------------------------------------------------------------------------------------------------------------------
# what acts otherwise than it seems, and says so

DEAF = flags(TINY, "--use_scale_shift_norm False")


def test_conditions_that_no_block_can_hear(run: Callable, refused: Callable, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one channel a group, norms take away what is added. A new run says so, or is refused if the user has asked for a condition."""
    monkeypatch.chdir(tmp_path)
    given = flags(DEAF, "--max_steps 1 --data_file", data)
    refused([*given, "--class_cond", True], "--class_cond")
    with pytest.raises(train_unet.UserError, match="--class_cond"):
        train_unet.run([*given, "--class_cond", "True"])
    told = "--num_channels 32: "
    assert told in run([*given, "--output_dir", "deaf"]).out
    assert told not in run(flags(given, "--channel_mult 1,2", "--class_cond True --output_dir wide")).out
    assert told not in run(flags(given, "--use_scale_shift_norm True --class_cond True --output_dir hears")).out
    config = make_config(dict(preset="fashion32", image_size=(8, 8), channel_mult=(1, 1), attention_resolutions=(4,), use_scale_shift_norm=False, class_cond=True,
                              num_classes=3))  # fmt: skip
    model_files.write_model("old.bin", train_unet.ModelFile(config, random_weights(config)))
    assert told not in run(["--init", "old.bin", *flags("--max_steps 1 --sample_interval 0 --data_file", data)]).out


def test_all_blocks_of_fashion32_hear() -> None:
    """What a block makes of one and the same image depends on what it is told."""
    config = make_config(dict(preset="fashion32", class_cond=True, num_classes=10))
    model, x = build_model(config, random_weights(config)), torch.randn(1, 1, 32, 32)
    outputs: list[list[torch.Tensor]] = []
    blocks = [module for module in model.modules() if hasattr(module, "emb_layers")]
    with torch.no_grad():
        for t, label in (10.0, 0), (900.0, 7):
            outputs.append([])
            torch.manual_seed(0)
            emb = model.time_embed(model.timestep_embedding(torch.tensor([t]))) + model.label_emb(torch.tensor([label]))
            for block in blocks:
                channels = block.in_layers[0].weight.shape[0]
                outputs[-1].append(block(torch.randn(1, channels, 8, 8), emb, model.dropout_draw))
        answers = [model(x, torch.tensor([10.0]), torch.tensor([label])) for label in (0, 7)]
    assert len(blocks) == 11 and all((a - b).abs().max() > 0.1 for a, b in zip(*outputs))
    assert (answers[0] - answers[1]).abs().max() > 0.01


def test_few_images_for_many_steps(run: Callable, make_data: Callable, tmp_path: Path) -> None:
    five = make_data("five.bin", make_images(5))
    assert "1280 times" in run(flags(TINY, "--max_steps 400 --batch_size 16 --data_file", five)).out
    assert " times" not in run(flags(TINY, "--max_steps 20 --output_dir few --data_file", five)).out


def test_samplers_that_begin_elsewhere_say_so(
    run: Callable, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A step of its own is at T - 1, where the noise is that of the start. Other routes are as papers have them, and say it; so does a sampler for other models."""
    monkeypatch.chdir(tmp_path)
    assert train_unet.space_timesteps(1000, "1") == [999] and train_unet.space_timesteps(1000, "10,1")[-1] == 500
    config = make_config(dict(preset="fashion32", image_size=(8, 8), channel_mult=(1, 1), attention_resolutions=(4,), noise_schedule="linear"))
    weights = np.zeros_like(random_weights(config))  # the answer is 0, so that x_0 is x / signal
    model_files.write_model("zero.bin", train_unet.ModelFile(config, weights))
    given = flags("--preset fashion32 --init zero.bin --sample 4 --sampler ddim --eta 0 --clip_denoised False --output s.bin")
    largest = 1 / math.sqrt(train_unet.Diffusion(config).alpha_bar[999])
    for steps, told in (1, False), (50, False), ("10,1", True), ("ddim25", True):
        words = flags(given, "--timestep_respacing", steps)
        out = run(words).out
        if steps == 1:
            assert read_samples(tmp_path / "s.bin").std() == pytest.approx(largest, rel=0.1)
        assert (f"--timestep_respacing {steps}: " in out) == told
        assert train_unet.run(flags(words, "--output t.bin --device cpu")) == 0
        assert (f"--timestep_respacing {steps}: " in capsys.readouterr().out) == told
        assert abs(read_samples(tmp_path / "s.bin") - read_samples(tmp_path / "t.bin")).max() < 1e-3 * largest
    for sampler in "consistency", "euler":
        words = flags("--init zero.bin --sample 1 --output s.png --timestep_respacing 2 --sampler", sampler)
        assert ("--sampler consistency: " in run(words).out) == (sampler == "consistency")
        assert train_unet.run(flags(words, "--device cpu")) == 0 and ("--sampler consistency: " in capsys.readouterr().out) == (
            sampler == "consistency"
        )
