"""Model and data files: round trips, the files of unet.cu, and files that are wrong in every way."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import (
    BUILD,
    DATA_MAGIC,
    MODEL_MAGIC,
    ROOT,
    TINY,
    TINY_RUN,
    UNET_CU_DATA_MAGIC,
    UNET_CU_MODEL_MAGIC,
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
    seal_model,
    with_slot,
)  # fmt: skip
from PIL import Image

import train_unet as twin
from common import files, model_files
from common.config import make_config
from common.data_files import write_data
from common.files import DataError
from common.flags import FLAGS, format_value, parse_flags
from common.program import run_program

torch.set_num_threads(1)
SAMPLE = "--sample 2 --timestep_respacing 3 --output x.bin --init".split()


# ----------------------------------------------------------------------------------------------------------------------
# files that are right

EVERY_FLAG = flags(
    """--preset fashion32 --patch_size 2 --num_channels 64 --channel_mult 0.5,0.5 --num_res_blocks 1 --attention_resolutions 4,2 --num_heads 2 --num_head_channels -1
    --num_heads_upsample 4 --dropout 0.3 --class_cond True --num_classes 5 --learn_sigma True --use_scale_shift_norm True --resblock_updown True
    --conv_resample False --use_new_attention_order False --max_period 777 --diffusion_steps 500 --noise_schedule cosine --batch_size 4
    --predict v --rescale_timesteps True --min_snr_gamma 5 --vlb_weight 0.5 --sigma_small True --class_dropout 0.25
    --microbatch 2 --lr 3e-4 --lr_schedule cosine --warmup_steps 1 --weight_decay 0.01 --adam_beta1 0.8 --adam_beta2 0.95 --adam_eps 1e-6
    --optimizer muon --grad_clip 0.7 --ema_rate 0.9 --seed 8589934599 --random_flip True --max_steps 1 --sample_interval 0""".replace("\n   ", "")
)


@pytest.fixture(scope="session")
def checkpoint(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a model with every flag at an unusual value, after one step."""
    folder = tmp_path_factory.mktemp("checkpoint")
    command = [str(binary_path("cpu")), *EVERY_FLAG, "--data_file", str(data)]
    subprocess.run(command, cwd=folder, env=environment(), check=True, stdout=subprocess.DEVNULL)
    return folder / "out" / model_name(1)


def test_round_trip_through_every_format(checkpoint: Path, tmp_path: Path) -> None:
    """.bin -> .pt -> .safetensors -> .bin: the same bytes, of a checkpoint and of bare weights."""
    bare = twin.read_model(str(checkpoint))
    twin.write_model(str(tmp_path / "bare.bin"), twin.ModelFile(bare.config, bare.weights))
    for source in (checkpoint, tmp_path / "bare.bin"):
        before = str(source)
        for name in ("a.pt", "b.safetensors", "c.bin", "d.safetensors", "e.pt", "f.bin"):
            (tmp_path / name).unlink(missing_ok=True)
            twin.run(["--convert", before, str(tmp_path / name)])
            before = str(tmp_path / name)
        assert (tmp_path / "c.bin").read_bytes() == source.read_bytes()
        assert (tmp_path / "f.bin").read_bytes() == source.read_bytes()


def test_the_average_in_somebody_elses_file_is_kept(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A .pt that says nothing of its model, which flags do then, may hold the weights and their average."""
    source = twin.read_model(str(checkpoint))
    tensors = {name: model_files.to_state_dict(source.config, array) for name, array in (("model", source.weights), ("ema", source.weights / 2))}
    torch.save(tensors | {"steps": 3}, tmp_path / "theirs.pt")
    words = [w for name in model_files.SAVED_FLAGS if name != "cond" for w in (f"--{name}", str(format_value(name, getattr(source.config, name))))]
    twin.run(["--convert", str(tmp_path / "theirs.pt"), str(tmp_path / "ours.bin"), *words])
    ours = twin.read_model(str(tmp_path / "ours.bin"))
    assert np.array_equal(ours.weights, source.weights) and np.array_equal(ours.ema, source.weights / 2)
    # In float64 it may hold numbers that float32 can't.
    tensors["model"] = {name: tensor.double() for name, tensor in tensors["model"].items()}
    tensors["model"]["out.2.bias"][0] = 1e39
    torch.save(tensors, tmp_path / "theirs.pt")
    told = one_sentence("train_unet", twin.run, ["--convert", tmp_path / "theirs.pt", tmp_path / "more.bin", *words], capsys, monkeypatch)
    assert "theirs.pt" in told and not (tmp_path / "more.bin").exists()


def test_weights_of_another_network_are_called_that(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """As lucidrains' are, which no flag makes readable: none is named."""
    tensors = {"betas": torch.zeros(1000), "model.init_conv.weight": torch.zeros(64, 3, 7, 7), "model.init_conv.bias": torch.zeros(64)}
    torch.save({"step": 1000, "model": tensors, "ema": {"initted": torch.tensor(True)} | tensors, "version": "2.0"}, tmp_path / "theirs.pt")
    told = one_sentence("train_unet", twin.run, ["--convert", tmp_path / "theirs.pt", tmp_path / "o.bin"], capsys, monkeypatch)
    assert "theirs.pt" in told and "betas" in told and "--" not in told


def test_header_is_the_configuration(checkpoint: Path, data: Path) -> None:
    model = read_checkpoint(checkpoint)
    h, f = model.header, model.header.view("<f4")
    expected = {
        6: 8,
        7: 8,
        8: 1,
        9: 64,
        10: 1,
        11: 2,
        12: -1,
        13: 4,
        14: 1,
        15: 5,
        16: 1,
        17: 1,
        18: 1,
        19: 0,
        20: 0,
        22: 2,
        31: 2,
        32: 4,
        33: 2,
        56: 2,
        120: 500,
        121: 0,
        122: 36,
    }
    expected |= {40: 777, 41: 500, 42: 1, 64: 1, 65: 0, 66: 7, 67: 2, 68: 4, 69: 2, 70: 1, 77: 1, 78: 2, 80: 1, 81: 1, 82: 0, 83: 0, 84: 24, 85: 0}
    expected |= {43: 0, 44: 2, 45: 1, 48: 0, 49: 1, 87: 1, 116: 1}
    floats = {46: 5, 47: 0.5, 50: 0.25, 21: 0.3, 23: 0.5, 24: 0.5, 71: 3e-4, 72: 0.01, 73: 0.8, 74: 0.95, 75: 1e-6, 76: 0.7, 79: 0.9}
    assert {i: int(h[i]) for i in expected} == expected
    assert {i: f[i] for i in floats} == {i: np.float32(v) for i, v in floats.items()}
    assert h[86] == np.frombuffer(data.read_bytes()[:1024], "<i4")[8]
    assert h.tobytes()[512:].rstrip(b"\0").decode() == str(data)
    unused = [*range(25, 31), *range(34, 40), *range(51, 56), *range(57, 64), *range(98, 116), 118, 119, *range(123, 128)]
    assert not h[unused].any()


@pytest.mark.parametrize("respacing", ["5", "ddim5"])
def test_both_attention_orders_are_one_function(run: Callable, tmp_path: Path, respacing: str) -> None:
    """A file in the old order, converted by permuting rows here, samples the same images to the last bit; in the wrong order, others."""
    settings = {"preset": "fashion32", "image_size": (8, 8), "channel_mult": (1, 2), "attention_resolutions": (8,)}
    settings |= {"num_heads": 4, "num_head_channels": -1, "use_new_attention_order": False}
    old = make_config(settings)
    new = make_config(settings | {"use_new_attention_order": True})
    weights, parts = random_weights(old), []
    for name, tensor in model_files.to_state_dict(old, weights).items():
        if ".qkv." in name:  # [head][q k v][d] -> [q k v][head][d]
            tensor = tensor.unflatten(0, (4, 3, -1)).transpose(0, 1).flatten(0, 2)
        parts.append(tensor.flatten().numpy())
    twin.write_model(str(tmp_path / "old.bin"), twin.ModelFile(old, weights))
    twin.write_model(str(tmp_path / "new.bin"), twin.ModelFile(new, np.concatenate(parts)))
    twin.write_model(str(tmp_path / "wrong.bin"), twin.ModelFile(new, weights))
    images = {}
    for name in ("old", "new", "wrong"):
        run(["--sample", "2", "--timestep_respacing", respacing, "--output", f"{name}_images.bin", "--init", f"{name}.bin"])
        images[name] = read_samples(tmp_path / f"{name}_images.bin")
    assert np.array_equal(images["old"], images["new"])
    assert np.abs(images["old"] - images["wrong"]).max() > 0.1


def unet_cu_model(seed: int = 0, **shape: object) -> tuple[bytes, object, np.ndarray]:
    """What unet.cu's train_unet.py writes as unet_init.bin, with its model's configuration and weights here."""
    fixed = dict(
        preset="fashion32",
        num_channels=32,
        channel_mult=(1, 2, 3, 4),
        num_res_blocks=2,
        num_head_channels=32,
        conv_resample=False,
        use_scale_shift_norm=False,
        max_period=1000,
    )
    config = make_config(fixed | dict(image_size=(32, 32), in_channels=3, attention_resolutions=(8, 4), noise_schedule="linear") | shape)
    weights = random_weights(config, seed)
    header = np.zeros(256, "<i4")
    header[:10] = [UNET_CU_MODEL_MAGIC, 32, 3, config.num_channels, 3, *config.image_size, 1000, 0, 0]
    return header.tobytes() + weights.tobytes(), config, weights


def test_unet_cu_models_are_converted(run: Callable, refused: Callable, tmp_path: Path) -> None:
    """The twin reads them; the program says how they are made its own."""
    file, config, weights = unet_cu_model()
    twin.write_model(str(tmp_path / "ours.bin"), twin.ModelFile(config, weights))
    (tmp_path / "theirs.bin").write_bytes(file)
    saved = with_slot(with_slot(file, 8, 1), 9, 1) + bytes(2 * len(weights) * 4) + b"states of cuRAND"
    (tmp_path / "saved.bin").write_bytes(saved)
    for name in ("theirs", "saved"):
        refused([*SAMPLE, f"{name}.bin"], f"{name}.bin: is a model of unet.cu; `python train_unet.py --convert {name}.bin model.bin`")
        twin.run(["--convert", str(tmp_path / f"{name}.bin"), str(tmp_path / f"{name} converted.bin")])
        assert (tmp_path / f"{name} converted.bin").read_bytes() == (tmp_path / "ours.bin").read_bytes()
    run([*SAMPLE, "theirs converted.bin"])
    (tmp_path / "x.bin").unlink()
    path = str(tmp_path / "theirs.bin")
    assert twin.read_model(path).config.noise_schedule == "linear"
    for given in {"noise_schedule": "cosine"}, {"diffusion_steps": 500, "objective": "edm"}:
        told = make_config(given, None, twin.read_model(path, given))
        assert {name: getattr(told, name) for name in given} == given
    with pytest.raises(twin.UserError, match="--num_channels 64"):
        make_config({"num_channels": 64}, None, twin.read_model(path, {"num_channels": 64}))

    for name, bad in {
        "short.bin": file[:-4],
        "long.bin": file + b"more",  # no moments, no states of cuRAND: then what is it?
        "c_out.bin": with_slot(file, 4, 6),
        "c_model.bin": with_slot(file, 3, 64),
        "height.bin": with_slot(file, 5, 36),
        "negative.bin": with_slot(file, 2, -3),
    }.items():
        (tmp_path / name).write_bytes(bad)
        with pytest.raises((twin.UserError, model_files.ModelFileError), match=name):
            twin.read_model(str(tmp_path / name))


# The twin takes presets from the same table as the program, so that one of its cases is enough for `make test`.
OF_FILES = [
    pytest.param(given, source, program, marks=[pytest.mark.long] * (program == "twin" and (given, source) != ("--preset emoji64", "ours")))
    for given in ("", "--preset emoji64", "--objective edm --noise_schedule cosine")
    for source, program in (("ours", "program"), ("ours", "twin"), ("unet.cu's", "twin"))
]


@pytest.mark.parametrize(("given", "source", "program"), OF_FILES)
def test_a_files_own_values_come_before_a_presets(
    run: Callable,
    make_data: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    source: str,
    given: str,
) -> None:
    """With data of 64x64, whose preset has another prediction, another schedule and patches."""
    told = {"objective": "edm", "noise_schedule": "cosine"} if "edm" in given else {}
    file, config, weights = unet_cu_model(image_size=(64, 64), attention_resolutions=(16, 8), **told)
    (tmp_path / "m.bin").write_bytes(file)
    if source == "ours":
        twin.write_model(str(tmp_path / "m.bin"), twin.ModelFile(config, weights))
    data = make_data("d.bin", make_images(4, 3, 64, 64))
    words = flags("--init m.bin --data_file", data, "--batch_size 1 --max_steps 1 --lr 0 --sample_interval 0", *([given] if given else []))
    monkeypatch.chdir(tmp_path)
    if program == "twin":
        twin.run([*words, "--device", "cpu"])
    else:
        run(words)
    made = twin.read_model(f"out/{model_name(1)}")
    for name in model_files.SAVED_FLAGS:
        assert getattr(made.config, name) == getattr(config, name), name
    assert np.array_equal(made.weights, weights)


# Models that differ from every preset in as much as can be; together in every flag that a model file keeps (below).
OF_ALL = flags(
    "--in_channels 2 --num_channels 96 --num_res_blocks 3 --channel_mult 0.33333334,0.6666667 --num_heads 2 --num_head_channels -1 --max_period 5000 --dropout 0.3",
    "--diffusion_steps 500 --use_new_attention_order False --noise_schedule linear --num_classes 3 --class_cond True",
)
ODD_MODELS = {
    "ddpm": flags(
        "--num_heads_upsample 8 --class_dropout 0.2 --learn_sigma True --resblock_updown True --conv_resample True --augment 0.1 --predict v",
        "--rescale_timesteps True --vlb_weight 0.03 --min_snr_gamma 3 --use_scale_shift_norm False",
    ),
    "the bound alone": flags("--learn_sigma True --vlb_weight 0.1 --use_kl True --use_scale_shift_norm True --conv_resample False --predict eps"),
    "edm": flags("--objective edm --sigma_data 0.7 --P_mean -1 --P_std 1.1 --cond_dim 2 --use_scale_shift_norm False --sigma_small True"),
    "flow": flags("--objective flow --t_mean 0.3 --t_std 0.8 --patch_size 1 --cond_channels 2 --cond_dropout 0.1 --conv_resample True"),
    "ect": flags("--objective ect --ect_frame flow --P_mean -0.9 --P_std 1.7 --cond lowres:2 --cond_channels 2"),
}
ODD_RUN = flags(
    "--batch_size 2 --microbatch 1 --lr 0.0007 --weight_decay 0.02 --adam_beta1 0.8 --adam_beta2 0.95 --adam_eps 1e-7 --grad_clip 0.7 --lr_schedule cosine",
    "--warmup_steps 3 --max_steps 2 --random_flip True --ema_rate 0.9,0.8 --seed 7 --cond_noise 0.3",
    "--ect_q 4 --ect_k 3 --ect_b 2 --ect_d 7 --ect_c 0.1 --ect_weight snr",
)


def odd_model(name: str, size: int) -> twin.Config:
    words = parse_flags(flags(OF_ALL, ODD_MODELS[name], "--image_size", size, "--attention_resolutions", size // 2), FLAGS)
    return model_files.valid({"timestep_respacing": ""} | words)


def test_odd_models_are_odd() -> None:
    """No preset says of a flag what all of these files say of it, so that none of its values can pass for a file's."""
    presets = [make_config({"preset": preset}) for preset in ("quick32", "fashion32", "emoji64", "quick64", "unet64")]
    models = [odd_model(name, 32) for name in ODD_MODELS]
    for name in set(model_files.SAVED_FLAGS) - {"image_size"}:
        for preset in presets:
            assert any(getattr(model, name) != getattr(preset, name) for model in models), (name, preset.preset)


# fashion32, quick32 and emoji64 are what nobody has asked for. The twin takes them from the same table, so that one size is enough.
ODD_SIZES = [(8, "program"), *(pytest.param(*sizes, marks=pytest.mark.long) for sizes in ((32, "program"), (64, "program"), (8, "twin")))]


@pytest.mark.parametrize(("size", "program"), ODD_SIZES)
@pytest.mark.parametrize("model", ODD_MODELS)
def test_every_flag_of_a_file_comes_before_a_presets(
    run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, size: int, program: str
) -> None:
    """A new run takes what the model file says of the model, a resumed one also what its checkpoint says of the run. The model file comes from --convert, through
    every other format."""
    monkeypatch.chdir(tmp_path)
    config, random = odd_model(model, size), np.random.default_rng(0)
    weights = random_weights(config)
    twin.write_model("m.pt", twin.ModelFile(config, weights))
    twin.run(["--convert", "m.pt", "m.safetensors"])
    twin.run(["--convert", "m.safetensors", "m.bin"])
    assert np.array_equal(twin.read_model("m.bin").weights, weights)
    images = random.integers(0, 256, (6, 2, size, size), np.uint8)
    write_data("d.bin", images, np.arange(6) % 3, 3, random.standard_normal((6, 2)).astype(np.float32))
    begin = lambda words: twin.run([*words, "--device", "cpu"]) if program == "twin" else run(words, timeout=300)  # noqa: E731
    pictures = ["--cond_file", "d.bin"] if model == "flow" else []
    begin(flags("--init m.bin --data_file d.bin --batch_size 1 --max_steps 1 --sample_interval 0 --output_dir new", pictures))
    made = twin.read_model(f"new/{model_name(1)}").config
    unused = {"P_mean", "P_std"} & set(model_files.unused_slots(vars(config)))
    assert not {n: (getattr(made, n), getattr(config, n)) for n in set(model_files.SAVED_FLAGS) - unused if getattr(made, n) != getattr(config, n)}

    given = parse_flags(flags(ODD_RUN, "--optimizer", "adamw" if size == 32 else "muon"), FLAGS)  # not what the preset for this size has
    for name in [name for name in given if name in model_files.unused_slots(vars(config))] + ["cond_noise"] * ("lowres" not in config.cond):
        given.pop(name, None)
    if config.augment:
        del given["random_flip"]  # which is a part of it
    words = [word for name, value in given.items() for word in (f"--{name}", format_value(name, value))]
    begin(flags("--init m.bin --data_file d.bin --sample_interval 0 --save_interval 1 --output_dir run", words, pictures))
    begin(flags("--sample_interval 0 --output_dir again --resume_checkpoint", f"run/{model_name(1)}"))
    assert Path(f"run/{model_name(2)}").read_bytes() == Path(f"again/{model_name(2)}").read_bytes()
    made = twin.read_model(f"again/{model_name(2)}").config
    assert not {
        name: (getattr(made, name), value) for name, value in vars(twin.Config(**given)).items() if name in given and getattr(made, name) != value
    }


def test_a_flag_against_a_file_of_unet_cu(tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(unet_cu_model()[0])
    for flag, value in {"patch_size": 2, "num_heads": 8, "num_res_blocks": 1, "class_cond": True}.items():
        with pytest.raises(twin.UserError, match=f"--{flag}"):
            make_config({flag: value}, None, twin.read_model(str(tmp_path / "m.bin"), {flag: value}))


# ----------------------------------------------------------------------------------------------------------------------
# widths


def test_widths_are_whole_numbers_within_rounding(run: Callable, refused: Callable, data: Path, tmp_path: Path) -> None:
    """A fraction of two widths, rounded to float32 as files hold it, times the one is the other, at all widths that there can be."""
    for first in range(32, 1025, 32):
        for second in range(32, min(64 * first, 8192) + 1, 32):
            config = twin.Config(num_channels=first, channel_mult=(1, second / first))
            assert config.channels(1) == second
    thirds = "--preset fashion32 --num_channels 96 --num_res_blocks 1 --attention_resolutions 4 --num_head_channels 32 --batch_size 1 --max_steps 1"
    shapes = {}
    for mult in "1,1.66666666", "1,1.6666667", "1,1.66667":
        words = flags(thirds, "--sample_interval 0 --data_file", data, "--channel_mult", mult, "--output_dir", mult)
        run(words, cwd=tmp_path)
        file = twin.read_model(str(tmp_path / mult / model_name(1)))
        shapes[mult] = twin.parameter_count(file.config)
        assert file.config.channels(1) == 160
    assert len(set(shapes.values())) == 1
    refused(flags(thirds, "--data_file", data, "--channel_mult 1,1.66"), "--channel_mult")  # 159.36
    with pytest.raises(twin.UserError, match="--channel_mult"):
        make_config({"num_channels": 96, "channel_mult": (1, 1.66)})


def test_a_flag_that_says_the_same_as_the_file_is_no_conflict(run: Callable, refused: Callable, tmp_path: Path) -> None:
    _, config, weights = unet_cu_model()
    twin.write_model(str(tmp_path / "m.bin"), twin.ModelFile(config, weights))
    same = "--image_size 32 --channel_mult 1,2.0,3,4 --attention_resolutions 4,8 --num_channels 32 --conv_resample 0".split()
    run([*SAMPLE, "m.bin", *same])
    for other in ("--image_size 64", "--channel_mult 1,2,3", "--attention_resolutions 8", "--num_channels 64", "--conv_resample True"):
        refused([*SAMPLE, "m.bin", *other.split()], *other.split(), "m.bin")


def test_the_twin_compares_flags_as_files_hold_them(tmp_path: Path) -> None:
    given = {"class_cond": True, "num_classes": 3, "class_dropout": 0.1, "sigma_data": 0.3, "objective": "edm"}
    config = make_config(given | {"preset": "fashion32"})
    twin.write_model(str(tmp_path / "m.bin"), twin.ModelFile(config, np.zeros(twin.parameter_count(config), np.float32)))
    file = twin.read_model(str(tmp_path / "m.bin"))
    assert make_config(given, None, file).class_dropout == file.config.class_dropout == float(np.float32(0.1))
    with pytest.raises(twin.UserError, match="--class_dropout"):
        make_config(given | {"class_dropout": 0.2}, None, file)


def test_unet_cu_data_is_read(run: Callable, make_data: Callable, tmp_path: Path) -> None:
    """float32 in [-1, 1]: trains as our own file of the same floats does."""
    images = (make_images(7, 3).astype(np.float32) / 127.5 - 1).astype("<f4")
    make_data("ours.bin", images)
    header = np.zeros(256, "<i4")
    header[:5] = [UNET_CU_DATA_MAGIC, *images.shape]
    (tmp_path / "theirs.bin").write_bytes(header.tobytes() + images.tobytes())
    for name in ("ours", "theirs"):
        run([*TINY, "--data_file", f"{name}.bin", "--max_steps", "3", "--output_dir", name])
    assert read_log(tmp_path / "ours") == read_log(tmp_path / "theirs")
    a, b = (read_checkpoint(tmp_path / name / model_name(3)) for name in ("ours", "theirs"))
    assert all(np.array_equal(x, y) for x, y in zip(a.arrays, b.arrays)) and a.header[86] != 0 and b.header[86] == 0


def test_data_with_a_checksum_for_each_image_trains_alike(run: Callable, tmp_path: Path) -> None:
    """Version 2 of the format, which prepare_data.py writes beyond 4 GiB."""
    for version in (1, 2):
        (tmp_path / f"{version}.bin").write_bytes(data_bytes(make_images(7), np.arange(7) % 3, 3, version))
        run([*TINY, "--data_file", f"{version}.bin", "--class_cond", "True", "--max_steps", "3", "--output_dir", version])
    assert read_log(tmp_path / "1") == read_log(tmp_path / "2")
    labels = [twin.open_data(str(tmp_path / f"{version}.bin")).labels.tolist() for version in (1, 2)]
    assert labels[0] == labels[1] == [0, 1, 2, 0, 1, 2, 0]


def test_uint8_and_float_data_train_alike(run: Callable, make_data: Callable, tmp_path: Path) -> None:
    images = make_images(7)
    make_data("bytes.bin", images)
    make_data("floats.bin", images.astype(np.float32) / np.float32(127.5) - np.float32(1))
    for name in ("bytes", "floats"):
        run([*TINY, "--data_file", f"{name}.bin", "--max_steps", "3", "--random_flip", "True", "--output_dir", name])
    assert read_log(tmp_path / "bytes") == read_log(tmp_path / "floats")


def test_unround_multiples_survive_a_file(run: Callable, data: Path, tmp_path: Path) -> None:
    """0.33333334 * 96 = 32 channels, 0.333333 * 96 would be 31."""
    run(flags(TINY, "--num_channels 96 --channel_mult 0.33333334,0.6666667 --attention_resolutions 4 --max_steps 1 --data_file", data))
    run([*SAMPLE, "out/model_0000001.bin"])


@pytest.mark.parametrize(
    "flag, value", [("dropout", "0.99"), ("grad_clip", "1e30"), ("adam_beta2", "0.999999"), ("adam_eps", "1e-30"), ("lr", "100")]
)
def test_extreme_settings_survive_a_file(run: Callable, data: Path, flag: str, value: str) -> None:
    """A limit of a flag, rounded to float32 and back, is still within the limit."""
    run(flags(TINY, "--data_file", data, "--max_steps 1", f"--{flag}", value))
    run(flags("--resume_checkpoint latest --max_steps 1 --sample_interval 0"))


@pytest.mark.long
def test_only_convolutions_weights_are_turned(tmp_path: Path) -> None:
    """A parameter of four dimensions that no convolution has lies in memory as in files; and what a layer has and what it must have is compared."""
    source = f"""
        #define TRAIN_UNET_NO_MAIN
        #include "{ROOT}/train_unet.cu"
        int main() {{
            UNet net;
            const int own = add_params(&net, "own", {{2, 3, 4, 4}});
            check_conv_params(net);
            std::vector<float> memory(96), file(96);
            std::iota(memory.begin(), memory.end(), 0.0f);
            permute_param(net.config, net.params[own], file.data(), memory.data(), true);
            puts(file == memory ? "as it is" : "turned");
            const int conv = add_conv_params(&net, "conv", {{2, 3, 4, 4}}, INIT_UNIFORM);
            permute_param(net.config, net.params[conv], file.data(), memory.data(), true);
            puts(file == memory ? "as it is" : "turned");
            fflush(stdout);
            check_conv_params(net); // no layer has it
        }}"""
    (tmp_path / "own.cpp").write_text(source)
    words = "g++ -x c++ -std=c++20 -O0 -fopenmp -w own.cpp -o own".split()
    subprocess.run(words, cwd=tmp_path, check=True)
    done = subprocess.run([tmp_path / "own"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "as it is\nturned\n")
    assert "conv.weight" in done.stderr, done.stderr


# ----------------------------------------------------------------------------------------------------------------------
# files that are wrong

NAN = float("nan")
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)

# slot, value, numpy type: what no header of a model can hold. The bare values are int32.
BAD_MODEL_SLOTS = [
    (0, 0), (0, MODEL_MAGIC + 1), (0, DATA_MAGIC), (0, UNET_CU_MODEL_MAGIC), (1, 0), (1, 2), (2, -1), (2, 4), (2, 0), (2, 1), (2, 2),
    (4, 0), (4, INT_MAX), (4, 2**62, "<i8"), (4, -1, "<i8"), (4, 2**61, "<i8"), (5, 1), (5, -1), (6, 0), (6, -8), (6, 12), (6, INT_MAX), (7, 0),
    (7, 9), (8, 0), (8, 2), (8, -1), (8, 64), (8, INT_MAX), (9, 0), (9, 32), (9, 63), (9, 8192), (9, INT_MAX), (9, -64), (10, 0), (10, 2), (10, 32),
    (10, INT_MAX), (11, 0), (11, 5), (11, -1), (11, INT_MAX), (12, 0), (12, 24), (12, -2), (12, INT_MIN), (13, 0), (13, 5), (13, -2), (14, 2),
    (14, 0), (14, -1), (15, 0), (15, 4), (15, -1), (15, 1000000), (15, INT_MAX), (16, 0), (16, 2), (17, 0), (17, -1), (18, 0), (18, 7),
    (19, 2), (20, 2), (20, -1), (21, NAN, "<f4"), (21, -0.1, "<f4"), (21, 1.0, "<f4"), (21, np.inf, "<f4"), (22, 0), (22, 1), (22, 9), (22, -1),
    (22, INT_MAX), (22, 3), (23, NAN, "<f4"), (23, 0.0, "<f4"), (23, -0.5, "<f4"), (23, 1e38, "<f4"), (23, 1.0, "<f4"), (24, 0.3, "<f4"),
    (24, np.inf, "<f4"), (31, 0), (31, 1), (31, 3), (31, -1), (31, 9), (31, INT_MAX), (32, 7), (32, 0), (32, -8), (32, INT_MAX), (33, INT_MIN),
    (40, 0), (40, -1), (40, INT_MAX), (41, 0), (41, 1), (41, -1), (41, INT_MAX), (42, 2), (42, -1), (42, INT_MAX), (43, 1), (43, 2), (43, -1),
    (44, 3), (44, INT_MIN), (45, 2), (46, -1.0, "<f4"), (46, NAN, "<f4"), (47, -1.0, "<f4"), (47, np.inf, "<f4"), (48, 1), (48, 2), (49, -1),
    (50, 0.0, "<f4"), (50, 1.0, "<f4"), (50, NAN, "<f4"), (51, 0.5, "<f4"), (52, NAN, "<f4"), (2, 7), (4, 0, "<i8"), (43, 9), (98, 9), (98, -1),
]  # fmt: skip
# the same for what only resuming reads
BAD_TRAINING_SLOTS = [
    (64, -1, "<i8"), (64, -1), (64, 2**62, "<i8"), (65, 1), (65, -1), (66, -1, "<i8"), (67, -1), (67, INT_MAX), (68, 0), (68, -4), (68, INT_MAX),
    (69, 3), (69, -1), (69, INT_MAX), (70, 0), (70, -1), (70, INT_MIN), (71, NAN, "<f4"), (71, -1.0, "<f4"), (71, np.inf, "<f4"), (72, NAN, "<f4"), (72, -1.0, "<f4"),
    (73, 1.0, "<f4"), (73, NAN, "<f4"), (74, 1.0, "<f4"), (74, -0.5, "<f4"), (75, 0.0, "<f4"), (75, NAN, "<f4"), (76, -1.0, "<f4"),
    (76, NAN, "<f4"), (77, -1), (77, INT_MAX), (78, 3), (78, -1), (79, 1.5, "<f4"), (79, NAN, "<f4"), (80, 2), (80, -1), (81, -1), (81, 2),
    (81, INT_MAX), (82, -1), (82, 5), (83, -1), (83, 1), (84, 23), (84, -1, "<i8"), (85, 1), (86, 0), (87, 2), (87, -1), (88, NAN, "<f8"), (88, -1.0, "<f8"),
    (90, NAN, "<f8"), (90, np.inf, "<f8"), (92, -1.0, "<f8"), (92, NAN, "<f8"), (94, NAN, "<f8"), (94, -np.inf, "<f8"), (96, -1e-3, "<f8"),
    (96, NAN, "<f8"), (116, 2), (116, -1), (123, -0.1, "<f4"), (123, 1.0, "<f4"), (123, NAN, "<f4"),
]  # fmt: skip
# another value, but one that could be meant: a model that is as large, or another run of it
OTHER_MODEL_SLOTS = [
    (7, 16), (7, 32), (11, 4), (13, 2), (13, -1), (19, 1), (20, 1), (21, 0.1, "<f4"), (40, 1), (40, 10000),
    (41, 1000), (42, 0), (44, 0), (44, 1), (45, 0), (46, 0.0, "<f4"), (47, 0.0, "<f4"), (49, 0), (50, 0.5, "<f4"), (66, 5), (66, 2**52, "<i8"),
]  # fmt: skip
OTHER_TRAINING_SLOTS = [
    (68, 8), (69, 0), (69, 1), (70, 100), (71, 0.1, "<f4"), (72, 0.5, "<f4"), (73, 0.0, "<f4"), (74, 0.5, "<f4"), (75, 1e-3, "<f4"), (76, 0.0, "<f4"),
    (77, 0), (78, 0), (79, 1.0, "<f4"), (80, 0), (90, 0.5, "<f8"), (94, 3.0, "<f8"), (116, 0), (123, 0.3, "<f4"),
]  # fmt: skip
UNUSED_SLOTS = [25, 30, 34, 39, 51, 53, 54, 57, 99, 105, 107, 119, 127]
RESUME = "--output_dir fresh --resume_checkpoint".split()


def write_start(path: Path, file: bytes, start: bytes) -> None:
    """file with another start; quick if path holds file with some other start of the same length."""
    if not path.exists() or path.stat().st_size != len(file):
        path.write_bytes(file)
    with open(path, "r+b") as f:
        f.write(start)


def test_every_model_slot_wrong_in_turn(refused: Callable, checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """With the checksum made right, so that what a field says is what is refused."""
    good = checkpoint.read_bytes()
    for i, slot in enumerate(BAD_MODEL_SLOTS):
        write_start(tmp_path / "m.bin", good, seal_model(with_slot(good, *slot))[:1024])
        said = f"slot {slot[0]}: {slot[1]}"
        assert "m.bin" in refused([*SAMPLE, "m.bin"]), said
        assert "m.bin" in refused([*RESUME, "m.bin"]), said
        if i % 3 == 0:
            assert "m.bin" in refused(["--init", "m.bin", "--data_file", data, "--batch_size", 1]), said


def test_every_training_slot_wrong_in_turn(refused: Callable, checkpoint: Path, tmp_path: Path) -> None:
    good = checkpoint.read_bytes()
    for slot in BAD_TRAINING_SLOTS:
        write_start(tmp_path / "m.bin", good, seal_model(with_slot(good, *slot))[:1024])
        assert "m.bin" in refused([*RESUME, "m.bin"]), f"slot {slot[0]}: {slot[1]}"


def test_tuning_a_model_of_an_unknown_objective(
    refused: Callable, checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m.bin").write_bytes(seal_model(with_slot(checkpoint.read_bytes(), 43, 9)))
    given = flags("--init m.bin --objective ect --data_file", data)
    refused(given, "m.bin")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(twin.UserError, match=r"m\.bin"):
        twin.prepare_run(twin.parse_flags(given, twin.FLAGS))


def test_unused_slots_must_be_zero(refused: Callable, checkpoint: Path, tmp_path: Path) -> None:
    """Whatever is there means something to somebody, not to this program."""
    good = checkpoint.read_bytes()
    for slot in UNUSED_SLOTS:
        write_start(tmp_path / "unused.bin", good, seal_model(with_slot(good, slot, 1))[:1024])
        refused([*SAMPLE, "unused.bin"], "unused.bin")
        refused([*RESUME, "unused.bin"], "unused.bin")


def test_other_values_of_model_slots_are_other_models(run: Callable, checkpoint: Path, data: Path, tmp_path: Path) -> None:
    good = checkpoint.read_bytes()
    for slot in OTHER_MODEL_SLOTS:
        write_start(tmp_path / "other.bin", good, seal_model(with_slot(good, *slot))[:1024])
        run([*SAMPLE, "other.bin"])
    for slot in OTHER_TRAINING_SLOTS:
        write_start(tmp_path / "other.bin", good, seal_model(with_slot(good, *slot))[:1024])
        run(["--max_steps", 2, "--output_dir", f"{slot[0]}_{slot[1]}", "--sample_interval", 0, "--resume_checkpoint", "other.bin"])


def test_wrong_checksums(refused: Callable, checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """A header field that changed, and whose checksum did not: any value is refused, even one that could be meant."""
    for name, file, args in (("m.bin", checkpoint.read_bytes(), RESUME), ("d.bin", data.read_bytes(), [*TINY, "--data_file"])):
        for slot in [*range(100 if name == "m.bin" else 12), 127, 128, 255]:
            changed = np.frombuffer(file[4 * slot : 4 * slot + 4], "<i4")[0] ^ 1
            write_start(tmp_path / name, file, with_slot(file[:1024], slot, changed))
            refused([*args, name], name)


BAD_DATA_SLOTS = [
    (0, 0), (0, MODEL_MAGIC), (0, UNET_CU_DATA_MAGIC), (1, 0), (1, 2), (1, 3), (2, 0), (2, 23), (2, 25), (2, -1), (2, INT_MAX), (2, INT_MIN), (3, 0), (3, 2),
    (3, -1), (3, 65), (3, INT_MAX), (4, 0), (4, 7), (4, 9), (4, -8), (4, INT_MAX), (5, 0), (5, 4), (5, INT_MIN), (5, 4096), (6, -1), (6, 0),
    (6, 2), (6, INT_MIN), (7, 0), (7, 2), (7, 4), (7, -1), (7, INT_MAX), (10, 4097), (11, 4), *((slot, 1) for slot in (10, 11, 64, 255)),
]  # fmt: skip


def test_every_data_slot_wrong_in_turn(refused: Callable, data: Path, tmp_path: Path) -> None:
    good = data.read_bytes()
    for slot in BAD_DATA_SLOTS:
        name = f"data_{slot[0]}_{slot[1]}.bin"
        (tmp_path / name).write_bytes(seal_data(with_slot(good, *slot)))
        refused([*TINY, "--data_file", name], name)
        refused([*TINY, "--data_file", data, "--val_data_file", name], name)
        (tmp_path / name).unlink()


def test_labels_outside_the_classes(refused: Callable, data: Path, tmp_path: Path) -> None:
    good = data.read_bytes()
    for label in (3, -1, INT_MAX, INT_MIN):
        (tmp_path / "d.bin").write_bytes(seal_data(good[:-8] + np.int32(label).tobytes() + good[-4:]))
        refused([*TINY, "--data_file", "d.bin", "--class_cond", "True"], "d.bin")


def cuts(size: int) -> Iterator[int]:
    """50 places at which to cut a file: around the ends of its parts, and anywhere."""
    edges = [0, 1, 3, 4, 511, 512, 1000, 1023, 1024, 1025, 1028, size // 4, size // 2, size // 2 + 1, size - 1025, size - 1024, size - 4, size - 1]
    yield from edges
    yield from np.random.default_rng(0).integers(1, size, 50 - len(edges)).tolist()


def test_cut_short_at_50_places(refused: Callable, checkpoint: Path, data: Path, tmp_path: Path) -> None:
    model, images = checkpoint.read_bytes(), data.read_bytes()
    (tmp_path / "m.bin").write_bytes(model)
    for i, at in enumerate(sorted(cuts(len(model)), reverse=True)):
        os.truncate(tmp_path / "m.bin", at)
        refused([*(RESUME if i % 2 else SAMPLE), "m.bin"], "m.bin")
    for at in cuts(len(images)):
        (tmp_path / "d.bin").write_bytes(images[:at])
        refused([*TINY, "--data_file", "d.bin"], "d.bin")
    for name, file, args in (("m.bin", model, RESUME), ("d.bin", images, [*TINY, "--data_file"])):
        (tmp_path / name).write_bytes(file + b"\0")
        refused([*args, name], name)


def test_one_bit_flipped(refused: Callable, checkpoint: Path, data: Path, tmp_path: Path) -> None:
    second = data_bytes(make_images(), np.arange(24) % 3, 3, version=2)
    given = [*TINY, "--data_file"]
    for name, file, args in (("m.bin", checkpoint.read_bytes(), RESUME), ("d.bin", data.read_bytes(), given), ("second.bin", second, given)):
        last = 8 * len(file) - 1
        for bit in [0, 8 * 1024 - 1, 8 * 1024, last, *np.random.default_rng(1).integers(0, last, 30).tolist()]:
            flipped = bytearray(file)
            flipped[bit // 8] ^= 1 << bit % 8
            (tmp_path / name).write_bytes(flipped)
            refused([*args, name], name)
            if name == "second.bin":
                with pytest.raises(DataError, match=name):
                    twin.open_data(str(tmp_path / name))


@pytest.mark.parametrize(
    "given", [SAMPLE, RESUME, [*TINY_RUN, "--init"], [*TINY, "--data_file"], [*TINY, "--data_file", "DATA", "--val_data_file"]], ids=" ".join
)
def test_what_is_no_file(refused: Callable, data: Path, tmp_path: Path, given: list[str]) -> None:
    given = [str(data) if word == "DATA" else word for word in given]
    (tmp_path / "empty.bin").touch()
    (tmp_path / "folder.bin").mkdir()
    (tmp_path / "text.bin").write_text("step,loss\n" * 1000)
    (tmp_path / "circle.bin").symlink_to("circle.bin")
    os.mkfifo(tmp_path / "pipe.bin")  # opening one for reading waits for a writer, if one lets it
    for name in ("missing.bin", "empty.bin", "folder.bin", "text.bin", "circle.bin", "pipe.bin", "text.bin/x", "/dev/zero"):
        refused([*given, name], name)


@pytest.fixture
def alarm() -> Iterator[None]:
    """Waiting for a pipe's other end fails a test, and does not hold up the others."""

    def too_long(*_: object) -> None:
        raise TimeoutError("something waits for a pipe's other end")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def make_special(path: Path, kind: str) -> Path:
    """A file that is no regular one."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(os.path.relpath(path))  # whose length has a limit
    return path


def one_sentence(program: str, body: Callable, words: list[object], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> str:
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", [program, *map(str, words)])
    assert run_program(program, body) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"{program}: ") and told.count("\n") == 1, told
    return told


@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "folder"])
def test_what_is_no_regular_file_in_python(
    checkpoint: Path, data: Path, tmp_path: Path, kind: str, alarm: None, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sentence from each reader, where a pipe, say, would be waited for without end. (A folder of that name may be one of diffusers'.)"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "dev/benchmarks")
    import quality

    import generate

    def tell(body: Callable, *words: object) -> str:
        return one_sentence("program", body, list(words), capsys, monkeypatch)

    for ending in "bin", "pt", "safetensors":
        name = make_special(tmp_path / f"m.{ending}", kind).name
        for body, flag in (generate.run, "--model_filename"), (twin.run, "--init"), (twin.run, "--resume_checkpoint"):
            assert name in tell(body, flag, name)
        assert name in tell(twin.run, "--convert", name, "x.bin")
    picture = make_special(tmp_path / "p.png", kind).name
    Image.new("L", (8, 8)).save("good.png")
    sample = ["--model_filename", checkpoint, "--num_samples", 1, "--steps", 1, "--output", "x.png"]
    assert f"--image {picture}" in tell(generate.run, *sample, "--image", picture)
    assert f"--mask {picture}" in tell(generate.run, *sample, "--image", "good.png", "--mask", picture)
    images = make_special(tmp_path / "d.bin", kind).name
    for flag in "--data_file", "--val_data_file":
        assert images in tell(twin.run, flag, images, *([] if flag == "--data_file" else ["--data_file", data]), "--device", "cpu")
    assert images in tell(generate.run, *sample[:2], "--output", "x.png", "--show", "corruption", "--data_file", images)
    assert images in tell(quality.run, "--samples", images)
    assert images in tell(quality.run, "--split", "x", "--data_file", images)
    weights = make_special(tmp_path / "w.pth", kind).name
    assert weights in tell(quality.run, "--features", "inception", "--weights", weights, "--samples", images)

    # what lies in folders: a model of diffusers, an autoencoder, a run's log
    config = make_config({"preset": "fashion32", "image_size": (8, 8), "channel_mult": (1, 1), "attention_resolutions": (4,)})
    twin.write_model("plain.bin", twin.ModelFile(config, random_weights(config)))
    for part in "unet/config.json", "scheduler/scheduler_config.json", "unet/diffusion_pytorch_model.safetensors":
        twin.run(["--convert", "plain.bin", "theirs/"])
        make_special(tmp_path / "theirs" / part, kind)
        assert part in tell(twin.run, "--convert", "theirs/", "x.bin")
        shutil.rmtree("theirs")
    if kind != "folder":  # diffusers says by itself what it lacks
        Path("vae").mkdir()
        Path("vae/config.json").write_text('{"_class_name": "AutoencoderKL"}')
        make_special(tmp_path / "vae/diffusion_pytorch_model.safetensors", kind)
        assert "vae/diffusion_pytorch_model.safetensors" in tell(generate.run, *sample, "--decode", "vae")
    Path("out").mkdir()
    make_special(tmp_path / "out/log.csv", kind)
    assert "--output_dir" in tell(twin.run, "--data_file", data, "--max_steps", 1000, "--device", "cpu")
    assert not list(tmp_path.glob("x.*"))


@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "folder"])
def test_a_log_that_is_no_regular_file(run: Callable, checkpoint: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    shutil.copy(checkpoint, tmp_path / "out" / checkpoint.name)
    make_special(tmp_path / "out/log.csv", kind)
    done = run(["--resume_checkpoint", "latest", "--max_steps", 1000], code=1, timeout=60)
    assert "out/log.csv" in done.err and done.err.count("\n") == 1


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_no_permission(refused: Callable, checkpoint: Path, data: Path, tmp_path: Path) -> None:
    for name, file, args in (("m.bin", checkpoint, RESUME), ("d.bin", data, [*TINY, "--data_file"])):
        (tmp_path / name).write_bytes(file.read_bytes())
        (tmp_path / name).chmod(0)
        refused([*args, name], name)


def test_weights_that_are_not_finite_give_no_pictures(refused: Callable, checkpoint: Path, tmp_path: Path) -> None:
    """Black samples, elsewhere. (The weight is the bias of the first output channel.)"""
    good = checkpoint.read_bytes()
    count = int(np.frombuffer(good[16:24], "<i8")[0])
    for value in ("nan", "inf"):
        (tmp_path / "m.bin").write_bytes(seal_model(with_slot(good, 256 + 2 * count - 2, float(value), "<f4")))
        for output in ("x.png", "x.bin"):
            refused(["--sample", 1, "--timestep_respacing", 3, "--init", "m.bin", "--output", output], "m.bin")


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.long)])
def test_the_twin_refuses_the_same_files(checkpoint: Path, data: Path, tmp_path: Path, step: int) -> None:
    """One sentence that names the file, whatever is wrong with it; and it takes what the program takes. step: 4 tries every fourth slot of a model."""
    model, images = checkpoint.read_bytes(), data.read_bytes()
    flipped = [model[:i] + bytes([model[i] ^ 4]) + model[i + 1 :] for i in (0, 100, 1023, 1024, len(model) - 1)]
    cut = [model[:at] for at in (0, 3, 1023, 1024, 2000, len(model) - 1)]
    unused = [seal_model(with_slot(model, slot, 1)) for slot in UNUSED_SLOTS]
    for file in [*(seal_model(with_slot(model, *slot)) for slot in BAD_MODEL_SLOTS[::step]), *flipped, *cut, *unused, model + b"0"]:
        (tmp_path / "m.bin").write_bytes(file)
        with pytest.raises(model_files.ModelFileError, match=r"m\.bin"):
            twin.read_model(str(tmp_path / "m.bin"))
    for slot in (OTHER_MODEL_SLOTS + OTHER_TRAINING_SLOTS)[::step]:
        (tmp_path / "m.bin").write_bytes(seal_model(with_slot(model, *slot)))
        assert len(twin.read_model(str(tmp_path / "m.bin")).weights) == np.frombuffer(model[16:24], "<i8")[0]
    for file in [
        *(seal_data(with_slot(images, *slot)) for slot in BAD_DATA_SLOTS),
        images[:-1],
        images[:1000],
        images + b"0",
        b"",
        with_slot(images, 400, 7),
    ]:
        (tmp_path / "d.bin").write_bytes(file)
        with pytest.raises(DataError, match=r"d\.bin"):
            twin.open_data(str(tmp_path / "d.bin"))


def test_an_error_is_not_taken_for_a_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a disk that fails for a moment would look like one on which the file is not there."""

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / "log.csv").write_text("1,0.5")
    folder = files.open_folder(str(tmp_path))
    assert files.is_there("log.csv", folder) and not files.is_there("best.bin", folder)
    for look in (lambda: files.is_there("log.csv", folder), lambda: files.open_temporary("index.html", folder)):
        with monkeypatch.context() as broken, pytest.raises(OSError, match="Input/output error"):
            broken.setattr(os, "stat", fails)
            look()
    os.close(folder)


def test_files_to_convert_are_two(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    told = one_sentence("train_unet", twin.run, ["--convert", "a.bin", "b.pt", "extra"], capsys, monkeypatch)
    assert "--convert" in told


def test_the_twin_refuses_the_same_checkpoints(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters, settings and running means that no run can have, when it is to be continued."""
    model = checkpoint.read_bytes()
    monkeypatch.chdir(tmp_path)
    for slot in BAD_TRAINING_SLOTS:
        (tmp_path / "m.bin").write_bytes(seal_model(with_slot(model, *slot)))
        with pytest.raises(twin.UserError, match=r"m\.bin"):
            twin.prepare_run(twin.parse_flags([*RESUME, "m.bin"], twin.FLAGS))
            pytest.fail(f"slot {slot[0]}: {slot[1]} is taken")


ODD = [
    None,
    True,
    -1,
    0,
    7,
    10**30,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "config",
    b"bytes",
    [],
    {},
    ["config"],
    {"config": 3},
    (1, "x"),
    {3: 4},
    [[1], [2]],
]
ODD_TENSORS = [
    torch.zeros(0), torch.tensor(1.0), torch.zeros(3, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.complex64), torch.eye(3).to_sparse(),
    torch.zeros(4, dtype=torch.bool), torch.zeros(1).expand(1 << 40), torch.full((2, 3), float("nan")), torch.zeros(2, device="meta"),
]  # fmt: skip


def fuzzed_files(random: np.random.Generator, count: int, folder: Path) -> Iterator[Path]:
    """.pt and .safetensors files that are nearly model files: other things in their places, other bytes in their descriptions."""
    config = make_config(dict(preset="fashion32", image_size=(8, 8), channel_mult=(1,), attention_resolutions=(), diffusion_steps=30, ema_rate=(0.9, 0.5),
                                   schedule_sampler="loss-second-moment", timestep_respacing=""))  # fmt: skip
    weights = random_weights(config)
    history = np.zeros((30, 11), np.float32)
    full = twin.ModelFile(config, *[weights] * 4, twin.TrainingState(1, 1, guard=(1, 0, 0, 0, 0)), more_emas=(weights,), history=history)
    seeds = {kind: folder / f"seed.{kind}" for kind in ("pt", "safetensors")}
    for path in seeds.values():
        twin.write_model(str(path), full)
        assert twin.read_model(str(path)).history is not None
    saved = torch.load(seeds["pt"], weights_only=True)
    bare = {"state_dict": saved["model"]}
    tensors = safetensors.torch.load_file(seeds["safetensors"])
    metadata = {key: json.dumps(value) for key, value in full.metadata().items()}

    def odd() -> object:
        things = [*ODD, *ODD_TENSORS]
        return things[random.integers(len(things))]

    def changed(node: object, depth: int = 0) -> object:
        """node, with something in it another thing, or gone, or more than it was."""
        if depth > 0 and random.random() < 0.3 or not isinstance(node, (dict, list, tuple)) or not node:
            return odd()
        if isinstance(node, dict):
            copy, key = dict(node), list(node)[random.integers(len(node))]
            what = random.integers(6)
            if what == 0:
                del copy[key]
            elif what == 1:
                copy[["config", "state", "m", "ema3", 5, "x"][random.integers(6)]] = odd()
            else:
                copy[key] = changed(node[key], depth + 1)
            return copy
        at = random.integers(len(node))
        return type(node)([*node[:at], changed(node[at], depth + 1), *node[at + 1 :]])

    def noisy(data: bytes) -> bytes:
        found = bytearray(data)
        for _ in range(random.integers(1, 9)):
            found[random.integers(len(found))] = random.integers(256)
        return bytes(found[: random.integers(len(found))] if random.random() < 0.2 else found)

    for i in range(count):
        way, path = i % 6, folder / f"f{i}.{'pt' if i % 6 < 4 else 'safetensors'}"
        if i < len(ODD):
            torch.save(ODD[i], path := folder / f"f{i}.pt")
        elif way < 2:
            torch.save(changed(saved if random.random() < 0.8 else bare), path)
        elif way == 2:
            path.write_bytes(noisy(seeds["pt"].read_bytes()))
        elif way == 3:  # the pickle, whose checksum zip files know
            with zipfile.ZipFile(seeds["pt"]) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
                for name in old.namelist():
                    new.writestr(name, noisy(old.read(name)) if name.endswith("data.pkl") else old.read(name))
        elif way == 4:
            kept = {k: v for k, v in tensors.items() if random.random() < 0.9}
            told = {k: json.dumps(changed(json.loads(v)), default=str) if random.random() < 0.7 else str(odd()) for k, v in metadata.items()}
            safetensors.torch.save_file(kept, path, told)
        else:
            data = seeds["safetensors"].read_bytes()
            size = int.from_bytes(data[:8], "little")
            path.write_bytes(data[:8] + noisy(data[8 : 8 + size])[:size].ljust(size) + data[8 + size :])
        yield path
        path.unlink()


def test_fuzzed_pytorch_files(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """Whatever is in them: they convert, or one sentence says why not. TRAIN_UNET_FUZZ=5000 tries as many."""
    refusals, count = 0, int(os.environ.get("TRAIN_UNET_FUZZ", "60"))
    (tmp_path / "files").mkdir()
    for path in fuzzed_files(np.random.default_rng(1), count, tmp_path / "files"):
        target = tmp_path / "out.bin"
        code = run_program("train_unet", lambda _, path=path, target=target: twin.run(["--convert", str(path), str(target)]))
        told = capfd.readouterr().err
        assert code in (0, 1) and told.count("\n") == code and (code == 0 or str(path) in told), (path.name, code, told)
        assert target.exists() == (code == 0)
        target.unlink(missing_ok=True)
        refusals += code
    assert count / 2 < refusals < count


# ----------------------------------------------------------------------------------------------------------------------
# data files larger than 4 GiB, and files that change, or whose disk fails, while they are read


@pytest.fixture
def large(tmp_path: Path) -> tuple[Path, int]:
    """A data file of more than 4 GiB that takes no place on the disk (all its images are zero), and the number of its images."""
    shape = (270000, 64, 8, 8)
    size = math.prod(shape) * 4
    table = np.full(shape[0], zlib.crc32(bytes(64 * 8 * 8 * 4)), "<u4").tobytes()
    header = np.zeros(256, "<u4")
    header[:8] = [DATA_MAGIC, 2, *shape, 0, 4]
    header[9] = zlib.crc32(table)
    header[8] = zlib.crc32(header.tobytes())
    with open(tmp_path / "large.bin", "wb") as f:
        f.write(header.tobytes())
        f.seek(size, 1)
        f.write(table)
    assert size > 4 << 30
    return tmp_path / "large.bin", shape[0]


def test_an_image_beyond_4_gib_is_verified_when_it_is_read(run: Callable, refused: Callable, large: tuple[Path, int], tmp_path: Path) -> None:
    """The run ends before the step that would train on it, with a checkpoint; and goes on from there once the file is whole again."""
    path, count = large
    given = [*TINY, "--data_file", "large.bin", "--max_steps", "4", "--output_dir"]
    run([*given, "unbroken"])
    image = int(twin.data_order(0, 2 * 4, 4, count)[3])  # in the batch of the third step

    def write(value: bytes, at: int = 1024 + image * 64 * 8 * 8 * 4 + 4321) -> None:
        with open(path, "r+b") as f:
            f.seek(at)
            f.write(value)

    write(b"\1")
    told = run([*given, "out"], code=1).err
    assert "large.bin" in told and str(image) in told
    assert told.count("\n") == 1 and checkpoints(tmp_path / "out") == [2] and len(read_log(tmp_path / "out")) == 2
    told = run([*given, "out", "--resume_checkpoint", "latest"], code=1).err
    assert str(image) in told and checkpoints(tmp_path / "out") == [2]
    with pytest.raises(DataError, match=str(image)):
        twin.open_data(str(path)).read(np.array([3, image]))
    write(b"\0")
    run([*given, "out", "--resume_checkpoint", "latest"])
    assert read_log(tmp_path / "out") == read_log(tmp_path / "unbroken")
    assert not twin.open_data(str(path)).read(np.array([3, image])).any()
    for at in (1024 + count * 64 * 8 * 8 * 4, path.stat().st_size - 1):  # the images' checksums are verified at the start
        write(b"\1", at)
        refused([*given, "new"], "large.bin")
        with pytest.raises(DataError, match=r"large\.bin"):
            twin.open_data(str(path))
        write(table_byte(at - 1024 - count * 64 * 8 * 8 * 4), at)


def test_older_files_of_more_than_4_gib_are_read(run: Callable, large: tuple[Path, int], tmp_path: Path) -> None:
    path, count = large
    run([*TINY, "--data_file", "large.bin", "--max_steps", "2", "--output_dir", "new"])
    os.truncate(path, path.stat().st_size - 4 * count)
    with open(path, "r+b") as f:
        header = with_slot(f.read(1024), 1, 1)
        f.seek(0)
        f.write(seal_data(header)[:1024])
    run([*TINY, "--data_file", "large.bin", "--max_steps", "2", "--output_dir", "old"])
    assert read_log(tmp_path / "old") == read_log(tmp_path / "new")
    assert twin.open_data(str(path)).image_crcs is None


def table_byte(at: int) -> bytes:
    return np.array([zlib.crc32(bytes(64 * 8 * 8 * 4))], "<u4").tobytes()[at % 4 :][:1]


def wait_for_rows(folder: Path, rows: int, child: subprocess.Popen) -> None:
    end = time.monotonic() + 60
    while not (folder / "log.csv").exists() or len((folder / "log.csv").read_text().splitlines()) <= rows:
        assert time.monotonic() < end and child.poll() is None, child.communicate()
        time.sleep(0.01)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwrite(path: Path) -> None:
    """As cp does: the same file, other content."""
    with open(path, "r+b") as f:
        f.seek(1024)
        f.write(np.random.default_rng(0).bytes(path.stat().st_size - 1024))


@pytest.mark.parametrize("kind, change", [("data", cut), ("data", overwrite), ("unet.cu's", overwrite), ("validation", cut)])
def test_data_that_changes_under_a_run(data: Path, tmp_path: Path, kind: str, change: Callable[[Path], None]) -> None:
    """The run ends in a sentence, and what it saves is the last step before that; a resume goes on from there, with the losses of an unbroken run."""
    images = np.random.default_rng(1).integers(0, 256, (120, 1, 8, 8), np.uint8)
    if kind == "unet.cu's":
        images = images.astype("<f4") / 128 - 1
        file = np.array([UNET_CU_DATA_MAGIC, *images.shape, *[0] * 251], "<i4").tobytes() + images.tobytes()
    else:
        file = data_bytes(images)
    (tmp_path / "d.bin").write_bytes(file)
    given = ["--val_data_file", "d.bin", "--data_file", data, "--val_interval", 2] if kind == "validation" else ["--data_file", "d.bin"]
    command = [str(word) for word in [binary_path("cpu"), *TINY, *given, "--log_interval", 1, "--save_interval", 1000000, "--max_steps"]]
    child = subprocess.Popen([*command, "1000000"], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_rows(tmp_path / "out", 5, child)
        change(tmp_path / "d.bin")
        _, told = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 1 and told.startswith("train_unet: ") and told.count("\n") == 1 and "d.bin" in told, (child.returncode, told)
    (step,) = checkpoints(tmp_path / "out")
    assert read_checkpoint(tmp_path / "out" / model_name(step)).step == step == len(read_log(tmp_path / "out"))
    (tmp_path / "d.bin").write_bytes(file)
    for more in ([], ["--output_dir", "unbroken"]):
        resume = [] if more else ["--resume_checkpoint", "latest"]
        subprocess.run([*command, str(step + 2), *more, *resume], cwd=tmp_path, env=environment(), check=True, stdout=subprocess.DEVNULL)
    resumed, unbroken = (read_log(tmp_path / name) for name in ("out", "unbroken"))
    assert [row["loss"] for row in resumed] == [row["loss"] for row in unbroken]


DISK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
ssize_t pread(int fd, void* to, size_t n, off_t at) {
    static int calls;
    fprintf(stderr, "read %ld %zu\n", (long)at, n);
    if (getenv("FAIL_AT") && ++calls >= atoi(getenv("FAIL_AT"))) return errno = EIO, -1;
    return ((ssize_t(*)(int, void*, size_t, off_t))dlsym(RTLD_NEXT, "pread"))(fd, to, n > 1 ? n - n / 3 : n, at);
}
int posix_fadvise(int fd, off_t at, off_t n, int advice) {
    if (advice == POSIX_FADV_WILLNEED) fprintf(stderr, "ask %ld %ld\n", (long)at, (long)n);
    return 0;
}
"""


@pytest.mark.skipif(BUILD == "cuda", reason="stands between the CPU build and the system")
def test_images_are_asked_for_ahead_and_read_errors_end_the_run(data: Path, tmp_path: Path) -> None:
    """With a disk of our own: it gives part of what was asked for, and from some call on nothing."""
    (tmp_path / "disk.c").write_text(DISK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "disk.so", "disk.c", "-ldl"], cwd=tmp_path, check=True)
    command = [str(binary_path("cpu")), *TINY, "--data_file", str(data), "--max_steps", "30", "--output_dir"]
    disk = environment() | {"LD_PRELOAD": str(tmp_path / "disk.so")}
    p = subprocess.run([*command, "whole"], cwd=tmp_path, env=disk, capture_output=True, text=True, check=True)
    calls = [(what, int(at), int(n)) for what, at, n in (line.split() for line in p.stderr.splitlines())]
    start = next(i for i, call in enumerate(calls) if call[0] == "ask")
    asked = [at for what, at, n in calls if what == "ask" and n == 64]
    read = [at for what, at, n in calls[start:] if what == "read" and n == 64]
    assert read == [1024 + 64 * int(i) for i in twin.data_order(0, 0, 30 * 4, 24)] == asked[: len(read)]
    reads = 0
    for position, (what, at, n) in enumerate(calls):  # when an image is read, those of eight batches more have been asked for
        if position > start and what == "read" and n == 64:
            assert sum(call[0] == "ask" for call in calls[:position]) == (reads // 4 + 9) * 4
            reads += 1

    first = sum(call[0] == "read" for call in calls[:start])  # the reads of the start; a step has four images, each of several
    a_step = sum(call[0] == "read" for call in calls[start:]) // 30
    p = subprocess.run([*command, "out"], cwd=tmp_path, env=disk | {"FAIL_AT": str(first + 5 * a_step + 2)}, capture_output=True, text=True)
    told = p.stderr.splitlines()[-1]
    assert p.returncode == 1 and told.startswith("train_unet: ") and str(data) in told
    assert checkpoints(tmp_path / "out") == [5] and read_log(tmp_path / "out") == read_log(tmp_path / "whole")[:5]
    p = subprocess.run([*command, "none"], cwd=tmp_path, env=disk | {"FAIL_AT": "3"}, capture_output=True, text=True)
    assert p.returncode == 1 and str(data) in p.stderr.splitlines()[-1] and not (tmp_path / "none").exists()


def test_a_model_file_that_is_cut_while_it_is_read(checkpoint: Path, tmp_path: Path) -> None:
    """A sentence, not a signal. (Sparse, and so large that its checksum takes a second or more.)"""
    parameters = 1 << 29
    header = np.frombuffer(checkpoint.read_bytes()[:1024], "<i4").copy()
    header[2:6] = [0, 0, parameters, 0]
    (tmp_path / "m.bin").write_bytes(header.tobytes())
    os.truncate(tmp_path / "m.bin", 1024 + 4 * parameters)
    child = subprocess.Popen([str(binary_path("cpu")), *SAMPLE, "m.bin"], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
    time.sleep(0.4)
    os.truncate(tmp_path / "m.bin", 1024)
    _, told = child.communicate(timeout=60)
    assert child.returncode == 1 and told.startswith("train_unet: ") and "m.bin" in told and told.count("\n") == 1, (child.returncode, told)


def test_the_twin_ends_in_order_when_its_data_is_cut(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sentence; the log holds all steps until then. Validation data are in memory by then."""
    monkeypatch.chdir(tmp_path)
    file, train_step = data.read_bytes(), twin.Trainer.train_step
    command = flags(TINY, "--device cpu --compile 0 --max_steps 6 --val_interval 3 --data_file d.bin --val_data_file v.bin")

    def cut_after(self: object, *batch: object) -> object:
        result = train_step(self, *batch)
        if result.step == 3:
            cut(Path(name))
        return result

    Path("d.bin").write_bytes(file)
    Path("v.bin").write_bytes(file)
    monkeypatch.setattr(twin.Trainer, "train_step", cut_after)
    name = "v.bin"
    twin.run([*command, "--output_dir", "unbroken"])
    Path(name).write_bytes(file)
    name = "d.bin"
    with pytest.raises(DataError, match="d.bin"):
        twin.run([*command, "--output_dir", "cut"])
    begun, unbroken = (read_log(tmp_path / name) for name in ("cut", "unbroken"))
    assert [row["loss"] for row in begun] == [row["loss"] for row in unbroken[:3]]


# ----------------------------------------------------------------------------------------------------------------------
# the same with AddressSanitizer and UBSan, which end a program with another exit code and many lines

ASAN_MODELS = [
    (4, INT_MAX), (4, 2**61, "<i8"), (6, INT_MAX), (8, 64), (9, 8192), (9, INT_MAX), (10, 32), (12, INT_MIN), (13, 0), (15, INT_MAX), (22, INT_MAX),
    (23, 1e38, "<f4"), (23, NAN, "<f4"), (31, INT_MAX), (32, INT_MIN), (41, INT_MAX), (42, -1), (64, -1, "<i8"), (68, INT_MAX), (69, -1),
    (81, INT_MAX), (88, NAN, "<f8"), (84, -1, "<i8"),
]  # fmt: skip
ASAN_DATA = [(2, INT_MAX), (2, INT_MIN), (3, 65), (4, INT_MAX), (5, INT_MIN), (6, 2), (7, INT_MAX)]


def test_hostile_files_under_the_sanitizers(refused: Callable, checkpoint: Path, data: Path, tmp_path: Path) -> None:
    model, images = checkpoint.read_bytes(), data.read_bytes()
    for slot in ASAN_MODELS:
        (tmp_path / "m.bin").write_bytes(seal_model(with_slot(model, *slot)))
        refused([*RESUME, "m.bin"], "m.bin", binary="asan")
    for slot in ASAN_DATA:
        (tmp_path / "d.bin").write_bytes(seal_data(with_slot(images, *slot)))
        refused([*TINY, "--data_file", "d.bin"], "d.bin", binary="asan")
    for at in (0, 3, 1023, 1025, 1024 + 24 * 64):
        (tmp_path / "m.bin").write_bytes(model[:at])
        (tmp_path / "d.bin").write_bytes(images[:at])
        refused([*SAMPLE, "m.bin"], "m.bin", binary="asan")
        refused([*TINY, "--data_file", "d.bin"], "d.bin", binary="asan")


SANITIZED = [  # image sizes whose bytes and pixels are no multiples of anything
    ((2, 6, 10), "--channel_mult 1,1 --attention_resolutions 3 --class_cond True --num_heads 4 --num_head_channels -1 --num_heads_upsample 2 --dropout 0.5 --random_flip 1 --sampler ddpm"),
    ((1, 5, 7), "--channel_mult 1 --attention_resolutions 5 --learn_sigma True --use_scale_shift_norm True --use_new_attention_order False --noise_schedule cosine --microbatch 1"),
    ((3, 4, 6), "--channel_mult 1,2 --attention_resolutions 2 --resblock_updown True --lr_schedule cosine --warmup_steps 1 --weight_decay 0.1 --eta 1 --clip_denoised False"),
    ((1, 8, 4), "--channel_mult 1,1,1 --attention_resolutions 4 --conv_resample False --grad_clip 0 --lr_schedule linear --num_head_channels 16"),
    ((3, 4, 6), "--channel_mult 1 --attention_resolutions 4 --learn_sigma True --class_cond True --class_dropout 0.5 --predict v --min_snr_gamma 5 --sampler ddpm --guidance_scale 2 --classes 2,0 --dynamic_threshold 0.9 --microbatch 1"),
    ((1, 5, 7), "--channel_mult 1 --attention_resolutions 5 --use_kl True --predict x0 --sampler dpmpp_2m --diffusion_steps 50 --schedule_sampler loss-second-moment --ema_rate 0.9,0.5"),
    ((2, 4, 4), "--channel_mult 1 --attention_resolutions 4 --objective edm --sampler heun --S_churn 1"),
    ((1, 5, 7), "--channel_mult 1 --attention_resolutions 5 --objective ect --ect_d 1 --dropout 0.5 --use_checkpoint True"),
]  # fmt: skip


@pytest.mark.parametrize("i", [pytest.param(i, marks=[pytest.mark.long] * (i not in (0, 4, 6, 7))) for i in range(len(SANITIZED))])
def test_every_flag_under_the_sanitizers(run: Callable, make_data: Callable, tmp_path: Path, i: int) -> None:
    """Training, validation, sampling and resuming."""
    shape, given = SANITIZED[i]
    small = flags(TINY_RUN, "--num_channels 32 --num_res_blocks 1 --batch_size 2 --timestep_respacing 2 --num_samples 3 --sample_interval 1")
    images = make_images(3, *shape) if i % 2 else make_images(3, *shape).astype(np.float32) / 128 - 1
    make_data("d.bin", images, np.arange(3), 3)
    run(flags(small, given, "--data_file d.bin --val_data_file d.bin --val_interval 1 --max_steps 1"), binary="asan")
    run("--resume_checkpoint latest --max_steps 2 --sample_interval 0".split(), binary="asan")
    run(flags("--sample 3 --timestep_respacing 2 --batch_size 2 --output s.png --init", f"out/{model_name(2)}"), binary="asan")
    assert checkpoints(tmp_path / "out") in ([2], [1, 2])
