"""Conditions: a picture beside each image, in both programs, from the file to the sample."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    TINY,
    binary_path,
    checkpoints,
    column,
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
    shown_run,
    with_slot,
)  # fmt: skip
from PIL import Image

import train_unet as twin
from common import conditions
from common.config import make_config
from common.data_files import open_data, with_pictures, write_data
from common.flags import FLAGS, parse_flags
from common.model import UNetModel, build_model
from common.model_files import ModelFile, write_model
from common.program import UserError

torch.set_num_threads(1)

# Of the twin, what TINY says
TINY_TWIN = dict(preset="fashion32", image_size=(8, 8), channel_mult=(1, 1), attention_resolutions=(4,), noise_schedule="linear", batch_size=4)


@pytest.fixture
def pairs(tmp_path: Path) -> tuple[Path, Path]:
    """24 grey images of 8x8 with labels of 3 classes and two numbers each, and a picture of 2 channels for each of them."""
    values = np.random.default_rng(3).standard_normal((24, 2)).astype(np.float32)
    write_data(str(tmp_path / "images.bin"), make_images(), np.arange(24) % 3, 3, values)
    write_data(str(tmp_path / "pictures.bin"), make_images(channels=2, seed=1))
    return tmp_path / "images.bin", tmp_path / "pictures.bin"


@pytest.fixture
def floats(tmp_path: Path) -> Path:
    """24 pictures of 8x8 of floats."""
    write_data(str(tmp_path / "floats.bin"), np.random.default_rng(4).standard_normal((24, 1, 8, 8)).astype(np.float32))
    return tmp_path / "floats.bin"


# ----------------------------------------------------------------------------------------------------------------------
# training

HOW = {
    "alone": "--cond_channels 2",
    "mirrored, left out, with classes": "--random_flip True --cond_dropout 0.4 --class_cond True --class_dropout 0.4",
    "in patches": "--patch_size 2 --attention_resolutions 2 --cond_channels 2",
    "changed images with numbers": "--augment 0.6 --cond_dim 2 --cond_dropout 0.3 --microbatch 2",
    "ect": "--objective ect --cond_dropout 0.3 --random_flip True --microbatch 2",
    "learned variance, blocks again": "--learn_sigma True --use_checkpoint True",
}


# Of floats two tell what differs from bytes. Left out by `make test`: what others have in them, too.
LOSSES = [("bytes", how) for how in HOW] + [("floats", how) for how in ("mirrored, left out, with classes", "changed images with numbers")]
CONTAINED = [("bytes", how) for how in ("alone", "changed images with numbers", "learned variance, blocks again")]
CONTAINED += [("floats", "mirrored, left out, with classes")]


@pytest.mark.parametrize(("kind", "how"), [pytest.param(*row, marks=[pytest.mark.long] * (row in CONTAINED)) for row in LOSSES])
def test_losses_are_the_twins(run: Callable, pairs: tuple[Path, Path], floats: Path, tmp_path: Path, how: str, kind: str) -> None:
    """Five steps: losses and gradient norms, of both programs from the same seed; and each resumes the other's checkpoint."""
    images, pictures = pairs[0], floats if kind == "floats" else pairs[1]
    given = flags(TINY, HOW[how], "--data_file", images, "--cond_file", pictures, "--val_data_file", images, "--val_cond_file", pictures)
    given = flags(given, "--val_interval 5 --max_steps 5")
    run([*given, "--output_dir", "cpp"])
    assert twin.run(flags(given, "--output_dir", tmp_path / "twin", "--device cpu")) == 0
    ours, theirs = read_log(tmp_path / "cpp"), read_log(tmp_path / "twin")
    for a, b in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm"):
            assert float(a[name]) == pytest.approx(float(b[name]), rel=1e-4), (name, a, b)
    assert float(ours[-1]["val_loss"]) == pytest.approx(float(theirs[-1]["val_loss"]), rel=1e-4)
    header = read_checkpoint(tmp_path / "cpp" / model_name(5)).header
    assert header[60] == (1 if kind == "floats" else 2) and header[113] != 0
    same = [k for k in range(4, 256) if k not in range(88, 98)]  # but for the guard, which is of the losses
    assert np.array_equal(header[same], read_checkpoint(tmp_path / "twin" / model_name(5)).header[same])
    run(["--resume_checkpoint", tmp_path / "twin" / model_name(5), "--max_steps", 6, "--output_dir", "on", "--sample_interval", 0])
    assert checkpoints(tmp_path / "on") == [6]
    resume = flags("--resume_checkpoint", tmp_path / "cpp" / model_name(5), "--max_steps 6 --sample_interval 0 --device cpu")
    assert twin.run(flags(resume, "--output_dir", tmp_path / "twin on")) == 0


def test_a_folder_of_pictures_and_the_other_program(run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both programs train on a folder with a file of conditions, and each goes on from the other's checkpoint. C++ is told the folder of the twin's run."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "pictures"
    folder.mkdir()
    for k, image in enumerate(make_images(6, 3, 32, 32)):
        Image.fromarray(image.transpose(1, 2, 0)).save(folder / f"{k}.png")
    (tmp_path / "sketches.bin").write_bytes(data_bytes(make_images(6, 3, 32, 32, seed=1)))
    given = flags(
        "--num_channels 32 --num_res_blocks 1 --channel_mult 1,1 --attention_resolutions 16 --max_steps 2 --batch_size 4 --sample_interval 0 --data_dir pictures --image_size 32"
    )
    assert twin.run([*given, *flags("--cond_file sketches.bin --output_dir twin")]) == 0
    run([*given, *flags("--cond_file sketches.bin --output_dir ours")])
    assert np.allclose(column(tmp_path / "ours", "loss"), column(tmp_path / "twin", "loss"), rtol=1e-4)

    assert twin.run(given) == 0
    again = flags("--resume_checkpoint latest --max_steps 3 --sample_interval 0")
    assert "--data_dir" in run(again, code=1).err
    run([*again, "--data_dir", "pictures"])
    assert len(read_log(tmp_path / "out")) == 3
    assert twin.run(flags("--resume_checkpoint", f"out/{model_name(3)}", "--max_steps 4 --sample_interval 0 --output_dir on")) == 0
    assert len(read_log(tmp_path / "on")) == 1
    # a folder that has changed is another data set
    (folder / "0.png").unlink()
    with pytest.raises(UserError, match="pictures: is not the data that .* with --data_dir"):
        twin.run(flags("--resume_checkpoint out/model_0000002.bin --output_dir next --max_steps 3"))


def test_pictures_change_as_their_images(pairs: tuple[Path, Path]) -> None:
    """Images that are conditioned on themselves still are when they are mirrored or otherwise changed; some are left out, as often as asked, by a
    draw that is not that of the class."""
    images = str(pairs[0])
    data = with_pictures(open_data(images), "cond_file", images)
    for how in (dict(random_flip=True), dict(augment=0.8)):
        config = make_config(TINY_TWIN | how | dict(batch_size=60, cond_dropout=0.25, class_cond=True, class_dropout=0.25), data)
        x0, _, _, labels, conditions = twin.training_batch(config, data, 0)
        left_out = (conditions["cond"] == 0).flatten(1).all(1)
        assert torch.equal(conditions["cond"][~left_out], x0[~left_out]) and 0.1 < left_out.float().mean() < 0.45
        assert not torch.equal(left_out, labels == 3)
    plain = open_data(images)
    unchanged, *_ = twin.training_batch(make_config(TINY_TWIN | dict(batch_size=60), plain), plain, 0)
    assert not torch.equal(unchanged, x0)


def test_resume_and_microbatches_keep_the_bits(run: Callable, refused: Callable, pairs: tuple[Path, Path], tmp_path: Path) -> None:
    """A checkpoint knows its pictures: a resumed run finds them, and notices if they were replaced."""
    images, pictures = pairs
    given = flags(TINY, HOW["mirrored, left out, with classes"], "--data_file images.bin --cond_file pictures.bin --max_steps 4 --save_interval 2")
    run([*given, *flags("--keep_checkpoints 0 --microbatch 2 --output_dir whole")])
    run(["--resume_checkpoint", f"whole/{model_name(2)}", "--output_dir", "rest", "--sample_interval", 0])
    assert (tmp_path / "whole" / model_name(4)).read_bytes() == (tmp_path / "rest" / model_name(4)).read_bytes()
    resume = flags("--resume_checkpoint", tmp_path / "whole" / model_name(2), "--output_dir", tmp_path / "third", "--sample_interval 0")
    write_data(str(pictures), make_images(channels=2, seed=9))
    refused(resume, "pictures.bin", "does not hold the pictures", model_name(2))
    with pytest.raises(UserError, match="does not hold the pictures"):
        twin.run(resume)
    run([*resume, "--cond_file", pictures])


def test_a_file_that_is_replaced_under_a_run(run: Callable, pairs: tuple[Path, Path], tmp_path: Path) -> None:
    """Each picture is compared with its checksum when it is read; one that isn't finite ends the run as well. What was trained is saved."""
    write_data(str(tmp_path / "nan.bin"), np.zeros((24, 1, 8, 8), np.float32))
    with open(tmp_path / "nan.bin", "r+b") as file:
        file.seek(1024 + 5 * 256)
        file.write(np.array([np.nan], "<f4").tobytes())
    (tmp_path / "nan.bin").write_bytes(seal_data((tmp_path / "nan.bin").read_bytes()))
    given = flags(TINY, "--data_file images.bin --cond_file nan.bin --max_steps 50 --sample_interval 0")
    result = run(given, code=1)
    assert "nan.bin: image 5 holds a value that is not finite" in result.err and "goes on from there" in result.err
    with pytest.raises(UserError, match="nan.bin: image 5 holds a value that is not finite"):
        twin.run(flags(given, "--data_file", pairs[0], "--cond_file", tmp_path / "nan.bin", "--output_dir", tmp_path / "twin", "--device cpu"))


@pytest.fixture
def begin(pairs: tuple[Path, Path], tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """begin(): a run on the pairs in tmp_path, which has no end of its own, once it has done a few steps."""
    begun = []

    def begin() -> subprocess.Popen:
        given = flags(TINY, "--data_file images.bin --cond_file pictures.bin --max_steps 1000000 --save_interval 1000000 --random_flip True")
        command, log = [binary_path("cpu"), *given, "--output_dir", "out"], tmp_path / "out/log.csv"
        begun.append(subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        end = time.monotonic() + 100
        while not log.exists() or log.read_text().count("\n") < 12:  # an epoch has six steps
            assert begun[-1].poll() is None and time.monotonic() < end, begun[-1].communicate()
            time.sleep(0.02)
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.wait()


HARM = {
    "replaced": lambda path, other: os.replace(other, path),
    "removed": lambda path, other: path.unlink(),
    "cut short": lambda path, other: os.truncate(path, path.stat().st_size - 600),
    "emptied": lambda path, other: os.truncate(path, 0),
    "written over": lambda path, other: shutil.copyfile(other, path),
}


@pytest.mark.parametrize("how", HARM)
def test_pictures_that_change_under_a_run(begin: Callable, run: Callable, pairs: tuple[Path, Path], tmp_path: Path, how: str) -> None:
    """A file under another name goes on being read; one that is no longer what it was ends the run in a sentence. Either way all steps are saved, and
    with the file back in its place the run goes on to the bits of one that nobody has disturbed."""
    pictures, other = pairs[1], tmp_path / "other.bin"
    write_data(str(other), make_images(channels=2, seed=9))
    shutil.copy(pictures, tmp_path / "kept.bin")
    process = begin()
    HARM[how](pictures, other)
    if goes_on := how in ("replaced", "removed"):
        done = (tmp_path / "out/log.csv").read_text().count("\n")
        while (tmp_path / "out/log.csv").read_text().count("\n") < done + 12:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    if goes_on:
        assert process.returncode == 128 + signal.SIGTERM and not err, (process.returncode, out, err)
    else:
        assert process.returncode == 1 and err.startswith("train_unet: ") and err.count("\n") == 1, (process.returncode, out, err)
        assert "pictures.bin" in err and "goes on from there" in err, err
    [step] = checkpoints(tmp_path / "out")
    assert step >= 11 and len(read_log(tmp_path / "out")) == step
    assert sorted(p.name for p in (tmp_path / "out").glob("*.bin")) == [model_name(step)] and not list((tmp_path / "out").glob("*.tmp*"))
    # goes on
    os.replace(tmp_path / "kept.bin", pictures)
    resume = flags("--resume_checkpoint latest --sample_interval 0 --max_steps", step + 2)
    assert run(resume, code=None).code == 0 and step + 2 in checkpoints(tmp_path / "out")
    given = flags(TINY, "--data_file images.bin --cond_file pictures.bin --random_flip True --output_dir calm --save_interval 1000000")
    run(flags(given, "--max_steps", step + 2))
    ours, theirs = (np.array([float(row["loss"]) for row in read_log(tmp_path / name)]) for name in ("out", "calm"))
    assert len(ours) == len(theirs) == step + 2
    assert np.array_equal(ours, theirs)


def test_the_network_sees_both_side_by_side() -> None:
    """As guided-diffusion's SuperResModel: x and the picture are concatenated along channels before input_blocks.0. So a model of as many
    channels without a condition, given both, answers the same."""
    config = make_config(TINY_TWIN | dict(in_channels=1, cond_channels=2, num_channels=32, num_res_blocks=1, cond_file="c.bin"))
    joined = make_config(TINY_TWIN | dict(in_channels=3, num_channels=32, num_res_blocks=1))
    network, plain = build_model(config, random_weights(config)), UNetModel(joined)
    plain.load_state_dict(network.state_dict() | {"out.2.weight": torch.zeros(3, 32, 3, 3), "out.2.bias": torch.zeros(3)})
    with torch.no_grad():
        plain.out[2].weight[:1], plain.out[2].bias[:1] = network.out[2].weight, network.out[2].bias
    x, cond, t = torch.randn(2, 1, 8, 8), torch.randn(2, 2, 8, 8), torch.tensor([3.0, 700])
    assert network.input_blocks[0][0].weight.shape == (32, 3, 3, 3)
    assert torch.allclose(network(x, t, cond=cond), plain.eval()(torch.cat([x, cond], 1), t)[:, :1], atol=1e-6)


def test_a_picture_is_followed(run: Callable, tmp_path: Path) -> None:
    """A model of images that are the negative of their pictures draws what it is asked for, without and with guidance."""
    random = np.random.default_rng(0)
    pictures = np.broadcast_to(random.uniform(-0.8, 0.8, (64, 1, 1, 2)).repeat(4, axis=3), (64, 1, 8, 8)).astype(np.float32)
    write_data(str(tmp_path / "pictures.bin"), pictures)
    write_data(str(tmp_path / "images.bin"), -pictures)
    given = flags(TINY, "--cond_dropout 0.1 --objective flow --max_steps 200 --lr 3e-3 --ema_rate 0.9 --batch_size 8 --random_flip True")
    run([*given, *flags("--data_file images.bin --cond_file pictures.bin")])
    write_data(str(tmp_path / "some.bin"), pictures[:3])
    model = ["--preset", "fashion32", "--init", f"out/{model_name(200)}", "--timestep_respacing", 20, "--cond_file", "some.bin"]
    run([*model, "--sample", 6, "--output", "s.bin"])
    wanted = -np.concatenate([pictures[:3], pictures[:3]])
    assert abs(read_samples(tmp_path / "s.bin") - wanted).mean() < 0.2
    run([*model, "--sample", 3, "--guidance_scale", 1.2, "--output", "g.bin"])
    assert abs(read_samples(tmp_path / "g.bin") - wanted[:3]).mean() < 0.3


# ----------------------------------------------------------------------------------------------------------------------
# samples

SAMPLE = "--preset fashion32 --sample 5 --batch_size 4 --timestep_respacing 4 --output s.bin"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    told = dict(in_channels=1, class_cond=True, num_classes=3, cond_channels=2, cond_dropout=0.2, num_channels=32, num_res_blocks=1)
    config = make_config(TINY_TWIN | told)
    write_model(str(tmp_path / "m.bin"), ModelFile(config, random_weights(config)))
    return tmp_path / "m.bin"


@pytest.mark.parametrize("more", ["", "--guidance_scale 2", "--guidance_scale 1.5 --sampler heun --classes 2"])
def test_samples_are_the_twins(
    run: Callable, model: Path, pairs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    """Three pictures for five images, in turns. Guidance leaves out the picture alone: there is no "no class" in this model."""
    monkeypatch.chdir(tmp_path)
    write_data("three.bin", make_images(3, channels=2, seed=1))
    given = flags(SAMPLE, more or [], "--init", model, "--cond_file three.bin")
    run(given)
    assert twin.run(flags(given, "--output t.bin --device cpu")) == 0
    ours, theirs = read_samples(tmp_path / "s.bin"), read_samples(tmp_path / "t.bin")
    assert abs(ours - theirs).max() < 2e-3 and abs(ours[0] - ours[1]).max() > 0.01
    run([*flags(given, "--sample 1 --output one.bin")])
    assert np.array_equal(read_samples(tmp_path / "one.bin")[0], ours[0])


def test_zeros_are_no_picture(run: Callable, model: Path, tmp_path: Path) -> None:
    """Guidance away from nothing: with a scale of 0 the pictures change nothing, and samples are those of zeros."""
    outputs = []
    for k, pictures in enumerate((make_images(5, channels=2), np.zeros((1, 2, 8, 8), np.float32))):
        write_data(str(tmp_path / f"{k}.bin"), pictures)
        run(flags(SAMPLE, "--guidance_scale", 1 if k else 0, "--init", model, "--cond_file", f"{k}.bin"))
        outputs.append(read_samples(tmp_path / "s.bin"))
    assert abs(outputs[0] - outputs[1]).max() < 1e-5


def test_grids_show_held_out_pictures(run: Callable, pairs: tuple[Path, Path], tmp_path: Path) -> None:
    """A run's grid is drawn of the validation data's pictures, and is that of --sample with these."""
    write_data(str(tmp_path / "held images.bin"), make_images(4, seed=7))
    write_data(str(tmp_path / "held.bin"), make_images(4, channels=2, seed=8))
    given = flags(TINY, "--data_file images.bin --cond_file pictures.bin --val_cond_file held.bin --max_steps 1 --sample_interval 1")
    given += ["--val_data_file", "held images.bin"]
    grids = []
    for val_cond in ("held.bin", "pictures.bin"):
        held = "held images.bin" if val_cond == "held.bin" else "images.bin"
        run(flags(given, "--val_cond_file", val_cond, "--val_data_file", [held], "--output_dir", val_cond[:4]))
        grids.append(np.asarray(Image.open(tmp_path / val_cond[:4] / "samples_0000001.png")).astype(int))
    assert grids[0].shape == grids[1].shape and not np.array_equal(*grids)


# ----------------------------------------------------------------------------------------------------------------------
# pictures that are made of the images (--cond)

MADE = {
    "coarse": "--cond lowres:2",
    "coarse, with noise, mirrored, left out": "--cond lowres:4 --cond_noise 0.5 --random_flip True --cond_dropout 0.3 --microbatch 2",
    "grey, in patches": "--cond gray --random_flip True --patch_size 2 --attention_resolutions 2",
    "holes": "--cond mask --cond_dropout 0.3 --microbatch 2 --random_flip True",
    "holes in changed images, of ect": "--cond mask --augment 0.5 --objective ect",
}


@pytest.fixture
def colours(tmp_path: Path) -> Path:
    """24 images of 8x8 in colour."""
    write_data(str(tmp_path / "colours.bin"), make_images(channels=3, seed=2))
    return tmp_path / "colours.bin"


@pytest.mark.parametrize("how", [pytest.param(how, marks=[pytest.mark.long] * (how in ("coarse", "holes"))) for how in MADE])
def test_losses_of_made_pictures_are_the_twins(run: Callable, colours: Path, tmp_path: Path, how: str) -> None:
    """Five steps of both programs, with a grid, and each resumes the other's checkpoint, to the bits of a run that never paused."""
    given = flags(TINY, MADE[how], "--data_file", colours, "--val_data_file", colours, "--val_interval 5 --max_steps 5 --sample_interval 5")
    run([*given, "--output_dir", "cpp"])
    assert twin.run(flags(given, "--output_dir", tmp_path / "twin", "--device cpu")) == 0
    ours, theirs = read_log(tmp_path / "cpp"), read_log(tmp_path / "twin")
    for a, b in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm"):
            assert float(a[name]) == pytest.approx(float(b[name]), rel=1e-4), (name, a, b)
    assert float(ours[-1]["val_loss"]) == pytest.approx(float(theirs[-1]["val_loss"]), rel=1e-4)
    grids = [np.asarray(Image.open(tmp_path / name / "samples_0000005.png")).astype(int) for name in ("cpp", "twin")]
    assert grids[0].shape == grids[1].shape and abs(grids[0] - grids[1]).mean() < 1
    headers = [read_checkpoint(tmp_path / name / model_name(5)).header for name in ("cpp", "twin")]
    same = [k for k in range(4, 256) if k not in range(88, 98)]  # but for the guard, which is of the losses
    assert np.array_equal(headers[0][same], headers[1][same]) and headers[0][62] == 1 + ["lowres", "gray", "mask"].index(
        MADE[how].split()[1].split(":")[0]
    )
    resume = flags("--resume_checkpoint", tmp_path / "twin" / model_name(5), "--max_steps 6 --sample_interval 0")
    run([*resume, "--output_dir", "on"])
    resume = flags("--resume_checkpoint", tmp_path / "cpp" / model_name(5), "--max_steps 6 --sample_interval 0 --device cpu")
    assert twin.run(flags(resume, "--output_dir", tmp_path / "twin on")) == 0


def test_coarse_pictures_are_torchs(run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """guided-diffusion's SuperResModel enlarges by F.interpolate(low_res, size, mode="bilinear"). A model of --cond lowres, given small pictures or
    the images of which they are the means, draws what the same weights draw when they are given torch's enlarged pictures."""
    monkeypatch.chdir(tmp_path)
    images = torch.from_numpy(np.random.default_rng(5).uniform(-1, 1, (4, 3, 8, 8)).astype(np.float32))
    small = torch.nn.functional.interpolate(images, scale_factor=0.25, mode="area")
    write_data("images.bin", images.numpy())
    write_data("small.bin", small.numpy())
    write_data("large.bin", torch.nn.functional.interpolate(small, (8, 8), mode="bilinear").numpy())
    shape = TINY_TWIN | dict(in_channels=3, num_channels=32, num_res_blocks=1)
    weights = random_weights(make_config(shape | dict(cond="lowres:4")))
    for name, told in (("lowres", dict(cond="lowres:4")), ("file", dict(cond_channels=3))):
        write_model(f"{name}.bin", ModelFile(make_config(shape | told), weights))
    drawn = []
    for name, pictures in (("file", "large"), ("lowres", "small"), ("lowres", "images")):
        given = flags(SAMPLE, "--sample 4 --init", f"{name}.bin", "--cond_file", f"{pictures}.bin")
        run(given)
        assert twin.run(flags(given, "--output t.bin --device cpu")) == 0
        drawn.append(read_samples(tmp_path / "s.bin"))
        assert abs(drawn[-1] - read_samples(tmp_path / "t.bin")).max() < 2e-3
    assert abs(drawn[1] - drawn[0]).max() < 1e-3 and abs(drawn[2] - drawn[0]).max() < 1e-3
    assert abs(drawn[0][0] - drawn[0][1]).max() > 0.01


def test_grey_pictures_and_masks_of_ones_own(run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A colouring model takes grey pictures, or makes them of colours; an inpainting one takes images and masks, or draws holes as in training."""
    monkeypatch.chdir(tmp_path)
    images = np.random.default_rng(6).uniform(-1, 1, (3, 3, 8, 8)).astype(np.float32)
    masks = make_images(3, seed=3)
    write_data("images.bin", images)
    write_data("masks.bin", masks)
    write_data("grey.bin", (images * np.array([0.299, 0.587, 0.114], np.float32)[:, None, None]).sum(1, keepdims=True))
    hidden = masks > 127
    write_data("holed.bin", np.concatenate([np.where(hidden, 0, images), np.where(hidden, 1, -1)], axis=1).astype(np.float32))
    drawn = {}
    for kind, channels in (("gray", 1), ("mask", 4)):
        shape = TINY_TWIN | dict(in_channels=3, num_channels=32, num_res_blocks=1)
        weights = random_weights(make_config(shape | dict(cond=kind)))
        write_model("made.bin", ModelFile(make_config(shape | dict(cond=kind)), weights))
        write_model("file.bin", ModelFile(make_config(shape | dict(cond_channels=channels)), weights))
        ways = {"gray": ["made images", "made grey", "file grey"], "mask": ["made images --mask masks.bin", "file holed", "made images"]}[kind]
        for way in ways:
            model, pictures, *mask = way.split()
            given = flags(SAMPLE, "--sample 3 --init", f"{model}.bin", "--cond_file", f"{pictures}.bin", mask)
            run(given)
            assert twin.run(flags(given, "--output t.bin --device cpu")) == 0
            drawn[kind, way] = read_samples(tmp_path / "s.bin")
            assert abs(drawn[kind, way] - read_samples(tmp_path / "t.bin")).max() < 2e-3, (kind, way)
        first, second, third = (drawn[kind, way] for way in ways)
        assert abs(first - second).max() < 1e-3
        assert (abs(first - third).max() < 1e-3) == (kind == "gray")


def test_holes_are_rectangles_and_strokes() -> None:
    """As often and as large as DIFFUSION.md says, never nothing, and other ones in each step."""
    samples = torch.arange(500)
    holes = conditions.draw_holes(3, 0, samples, 32, 48)
    assert (holes.flatten(1).sum(1) > 0).all() and 0.15 < holes.float().mean() < 0.45
    assert not torch.equal(holes, conditions.draw_holes(3, 1, samples, 32, 48))
    points = [torch.tensor(v) for v in (2, 1, 2, 6, 1)]
    y, x = torch.arange(8)[:, None], torch.arange(8)[None]
    stroke = conditions.in_stroke(y, x, *points)
    assert stroke[1:4, 1:7].all() and stroke[2, 0] and stroke[2, 7] and stroke.sum() == 3 * 6 + 2


def test_noise_on_coarse_pictures_has_many_strengths() -> None:
    """Ho et al. 2021: uniform up to the largest; the noise is on the small picture, so it is enlarged with it."""
    config = make_config(TINY_TWIN | dict(in_channels=1, cond="lowres:2", image_size=(16, 16), attention_resolutions=(8,)))
    x0, samples = torch.zeros(400, 1, 16, 16), torch.arange(400)
    strengths = conditions.noise_strengths(config.seed, 3, samples)
    assert 0.45 < strengths.mean() < 0.55 and strengths.min() < 0.02 and strengths.max() > 0.98
    noisy = conditions.made_pictures(config, x0, 3, samples, noise=0.5)
    small = torch.nn.functional.avg_pool2d(noisy, 2)  # the means of what was enlarged
    assert torch.corrcoef(torch.stack([small.flatten(1).std(1), strengths]))[0, 1] > 0.9
    assert torch.equal(conditions.made_pictures(config, x0, 3, samples), torch.zeros_like(x0))


@pytest.mark.skipif("GUIDED_DIFFUSION" not in os.environ, reason="GUIDED_DIFFUSION=FOLDER names a checkout of github.com/openai/guided-diffusion")
def test_the_network_is_guided_diffusions(monkeypatch: pytest.MonkeyPatch) -> None:
    """SuperResModel on the same weights and a small picture."""
    monkeypatch.syspath_prepend(os.environ["GUIDED_DIFFUSION"])
    theirs = importlib.import_module("guided_diffusion.unet").SuperResModel(
        8, 3, 32, 3, num_res_blocks=1, attention_resolutions=(2,), channel_mult=(1, 1), num_head_channels=32, use_new_attention_order=True
    )
    config = make_config(TINY_TWIN | dict(in_channels=3, num_channels=32, num_res_blocks=1, cond="lowres:4"))
    ours = build_model(config, random_weights(config))
    theirs.load_state_dict(ours.state_dict())
    x, small, t = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 2, 2), torch.tensor([3.0, 700])
    cond = conditions.enlarge(small, 4)
    assert torch.allclose(ours(x, t, cond=cond), theirs.eval()(x, t, low_res=small), atol=1e-4)


UPSAMPLER = (
    "--attention_resolutions 8 --class_cond True --diffusion_steps 1000 --large_size 16 --small_size 4 --learn_sigma True --noise_schedule linear"
    " --num_channels 32 --num_heads 4 --num_res_blocks 2 --resblock_updown True --use_scale_shift_norm True --channel_mult 1,2 --num_classes 10"
)


def test_guided_diffusions_upsamplers_load(run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state_dict of SuperResModel's layout, with the flags of its README made smaller: it is sampled from, and trained on, as our own."""
    monkeypatch.chdir(tmp_path)
    config = make_config({"preset": "adm"} | parse_flags(flags(UPSAMPLER), FLAGS))
    assert (config.image_size, config.cond, config.cond_channels) == ((16, 16), "lowres:4", 3)
    weights = random_weights(config)
    network = build_model(config, weights)
    if "GUIDED_DIFFUSION" in os.environ:
        monkeypatch.syspath_prepend(os.environ["GUIDED_DIFFUSION"])
        theirs = importlib.import_module("guided_diffusion.unet").SuperResModel(
            16, 3, 32, 6, num_res_blocks=2, attention_resolutions=(2,), channel_mult=(1, 2), num_heads=4, num_classes=10,
            resblock_updown=True, use_scale_shift_norm=True,
        )  # fmt: skip
        theirs.load_state_dict(network.state_dict())
    torch.save(network.state_dict(), "upsampler.pt")
    model_flags = flags(UPSAMPLER)
    assert twin.run(["--convert", "upsampler.pt", "up.bin", *model_flags]) == 0
    assert np.array_equal(twin.read_model("up.bin").weights, weights)
    write_data("small.bin", make_images(2, channels=3, height=4, width=4))
    given = flags("--preset adm --init up.bin --sample 2 --timestep_respacing 3 --cond_file small.bin --output s.bin")
    run(given)
    assert twin.run(flags(given, "--output t.bin --device cpu")) == 0
    assert read_samples(tmp_path / "s.bin").shape == (2, 3, 16, 16)
    assert abs(read_samples(tmp_path / "s.bin") - read_samples(tmp_path / "t.bin")).max() < 2e-3
    write_data("images.bin", make_images(4, channels=3, height=16, width=16), np.arange(4), 10)
    run(flags("--preset adm --init up.bin --data_file images.bin --batch_size 1 --max_steps 1 --sample_interval 0"))


@pytest.mark.parametrize("preset", ["adm64_256", pytest.param("adm128_512", marks=pytest.mark.long)])
def test_published_upsamplers_load_by_their_names(run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str) -> None:
    """A bare state_dict of the preset's layout, a third as wide and of smaller images, is converted, and both programs sample from it."""
    monkeypatch.chdir(tmp_path)
    smaller = flags("--preset", preset, "--num_channels 64 --image_size 64")
    config = make_config(parse_flags(smaller, FLAGS))
    assert (config.cond, config.channel_mult, config.out_channels) == ("lowres:4", (1, 1, 2, 2, 4, 4), 6)
    torch.save(build_model(config, random_weights(config)).state_dict(), "upsampler.pt")
    assert twin.run(["--convert", "upsampler.pt", "up.bin", *smaller]) == 0
    write_data("small.bin", make_images(1, channels=3, height=16, width=16))
    given = flags("--init up.bin --sample 1 --sampler ddpm --timestep_respacing 2 --cond_file small.bin --output s.bin")
    run(given)
    assert twin.run(flags(given, "--output t.bin --device cpu")) == 0
    assert abs(read_samples(tmp_path / "s.bin") - read_samples(tmp_path / "t.bin")).max() < 2e-3


def test_bad_ways_of_making_pictures(refused: Callable, colours: Path, data: Path, pairs: tuple[Path, Path], tmp_path: Path) -> None:
    given = flags(TINY, "--max_steps 1 --data_file", colours)
    config = make_config(TINY_TWIN | dict(in_channels=3, num_channels=32, num_res_blocks=1, cond="lowres:2"))
    write_model(str(tmp_path / "m.bin"), ModelFile(config, random_weights(config)))
    plain = flags(SAMPLE, "--init", tmp_path / "m.bin")
    cases = [
        (flags(given, "--cond", word), [f"--cond {word}", "must be lowres:4"])
        for word in ("lowres", "lowres:", "lowres:2x", "lowres:-2", "lowres:2.0", "lowres: 2", "gray:2", "gray:", "blur", ":4", "lowres:123456")
    ]
    cases += [(flags(given, "--cond", f"lowres:{K}"), [f"--cond lowres:{K}", "divide", "8x8"]) for K in (0, 1, 3, 16, 99999)]
    cases += [
        (flags(given, "--cond gray --data_file", data), ["--cond gray", "3 channels", "1"]),
        (flags(given, "--cond gray --cond_channels 3"), ["--cond_channels 3", "pictures of 1"]),
        (flags(given, "--cond gray --cond_file", pairs[1]), ["--cond_file", "not read in training"]),
        (flags(given, "--cond gray --val_data_file", colours, "--val_cond_file", colours), ["--val_cond_file", "not read"]),
        (flags(given, "--cond gray --cond_noise 0.1"), ["--cond_noise 0.1", "lowres"]),
        (flags(given, "--cond lowres:2 --cond_noise nan"), ["--cond_noise nan"]),
        (flags(given, "--cond lowres:2 --cond_noise -1"), ["--cond_noise -1"]),
        (flags(given, "--cond mask --mask", data), ["--inpaint"]),
        (plain, ["--cond_file", "3 channels"]),
        (flags(plain, "--cond_file", data), ["--cond_file", "8x8x1", "8x8x3", "small ones of 4x4x3"]),
        (flags(plain, "--cond lowres:4 --cond_file", colours), ["--cond lowres:4", "was made with lowres:2"]),
    ]
    for arguments, words in cases:
        told = refused(arguments, *words)
        with pytest.raises(UserError) as error:
            twin.run(flags(arguments, "--device cpu"))
        assert words[0] in str(error.value), (told, error.value)
    for slot, value, word in ((62, 4, "cond"), (62, -1, "cond"), (63, 3, "lowres:3"), (62, 2, "gray:2")):
        (tmp_path / "damaged.bin").write_bytes(seal_model(with_slot((tmp_path / "m.bin").read_bytes(), slot, value)))
        refused(flags(SAMPLE, "--init damaged.bin --cond_file", colours), "damaged.bin", word)
        with pytest.raises(UserError, match="damaged.bin"):
            twin.read_model(str(tmp_path / "damaged.bin"))


# ----------------------------------------------------------------------------------------------------------------------
# what one sees


def test_grids_show_condition_result_and_truth(run: Callable, colours: Path, pairs: tuple[Path, Path], tmp_path: Path) -> None:
    """Side by side, small ones enlarged as ever; both programs alike; and the page says what they are."""
    write_data(str(tmp_path / "held.bin"), make_images(3, channels=3, seed=9))
    write_data(str(tmp_path / "held pictures.bin"), make_images(3, channels=2, seed=8))
    runs = {
        "lowres": flags("--cond lowres:2 --data_file", colours, "--val_data_file", tmp_path / "held.bin"),
        "file": flags("--data_file", colours, "--cond_file", pairs[1]),
        "held": flags("--data_file", colours, "--cond_file", pairs[1], "--val_data_file", tmp_path / "held.bin")
        + ["--val_cond_file", str(tmp_path / "held pictures.bin")],
    }
    truth = {"lowres": make_images(3, channels=3, seed=9), "file": make_images(channels=3, seed=2), "held": make_images(3, channels=3, seed=9)}
    pictures = {"file": make_images(channels=2, seed=1), "held": make_images(3, channels=2, seed=8)}
    for name, how in runs.items():
        given = flags(TINY, how, "--max_steps 1 --sample_interval 1 --lr 0 --num_samples 4")
        run([*given, "--output_dir", name])
        assert twin.run(flags(given, "--output_dir", tmp_path / f"twin {name}", "--device cpu")) == 0
        grids = [np.asarray(Image.open(tmp_path / folder / "samples_0000001.png")).astype(int) for folder in (name, f"twin {name}")]
        assert grids[0].shape == grids[1].shape == (2 * 66 + 2, 2 * (3 * 64 + 2) + 2, 3)
        assert abs(grids[0] - grids[1]).max() <= 1
        for k in range(4):
            top, left = 2 + k // 2 * 66, 2 + k % 2 * (3 * 64 + 2)
            cell = grids[0][top : top + 64 : 8, left : left + 3 * 64 : 8]
            count = len(truth[name])
            i = k * count // 4 if count > 4 else k % count  # spread evenly over the file
            assert abs(cell[:, 16:] - truth[name][i].transpose(1, 2, 0)).max() <= 1, (name, k)
            if name in pictures:  # of two channels: the first is shown
                assert abs(cell[:, :8] - pictures[name][i][0][..., None]).max() <= 1
        assert "what each is conditioned on" in shown_run(tmp_path / name)["about"]


def test_generate_takes_a_picture(run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--cond: condition, truth and results in a row; a small picture is enlarged, a larger one is made small first; by PyTorch and by ./train_unet."""
    monkeypatch.chdir(tmp_path)
    generate = importlib.import_module("generate")
    shape = TINY_TWIN | dict(in_channels=3, num_channels=32, num_res_blocks=1)
    for name, told in dict(lowres=dict(cond="lowres:2"), gray=dict(cond="gray"), mask=dict(cond="mask"), file=dict(cond_channels=1)).items():
        config = make_config(shape | told)
        write_model(f"{name}.bin", ModelFile(config, random_weights(config)))
    colours = np.random.default_rng(0).integers(0, 256, (12, 12, 3)).astype(np.uint8)
    Image.fromarray(colours).save("large.png")
    Image.fromarray(colours[:4, :4]).save("small.png")
    Image.fromarray((np.arange(64).reshape(8, 8) % 3 * 100).astype(np.uint8)).save("mask.png")
    widths = {}
    for name, picture, more in (
        ("lowres", "large", ""), ("lowres", "small", ""), ("gray", "large", ""), ("file", "large", ""), ("mask", "large", "--mask mask.png"),
    ):  # fmt: skip
        given = flags("--num_samples 2 --steps 3 --S_churn 0 --device cpu --model_filename", f"{name}.bin", "--cond", f"{picture}.png", more or [])
        generate.run(given)
        widths[name, picture] = Image.open("samples.png").size[0]
        generate.run(flags(given, "--output s.bin"))
        drawn = read_samples(tmp_path / "s.bin")
        assert drawn.shape == (2, 3, 8, 8) and not np.array_equal(drawn[0], drawn[1])
        generate.run(flags(given, "--output n.bin --backend native --precision fp32"))
        assert abs(drawn - read_samples(tmp_path / "n.bin")).max() < 2e-3
    assert widths["lowres", "large"] == widths["gray", "large"] == widths["lowres", "small"] + 68 == widths["file", "large"] + 68
    generate.run(flags("--num_samples 2 --steps 3 --device cpu --model_filename gray.bin --cond large.png --output one.png --separate True"))
    assert Image.open("one_0000.png").size == Image.open("one_0001.png").size and not Path("one_0002.png").exists()
    write_data("d.bin", make_images(2, 3))
    for name in ("torch", "native"):
        generate.run(
            flags(
                "--num_samples 2 --steps 3 --S_churn 0 --device cpu --model_filename lowres.bin --cond_file d.bin --backend",
                name,
                "--output",
                f"{name}.bin",
            )
        )
    assert abs(read_samples(tmp_path / "torch.bin") - read_samples(tmp_path / "native.bin")).max() < 2e-3
    generate.run(flags("--show corruption --device cpu --model_filename lowres.bin --data_file d.bin --output c.png"))
    model = [*flags("--num_samples 1 --device cpu"), "--model_filename"]
    for arguments, words in (
        ([*model, "gray.bin", "--cond", "large.png", "--output", "large.png"], "would replace large.png"),
        ([*model, "lowres.bin", "--cond_file", "torch.bin", "--output", "torch.bin"], "would replace torch.bin"),
        ([*model, "file.bin"], "--cond_file: must name the pictures of 1 channels"),
        ([*model, "file.bin", "--cond", "mask.bin"], "--cond mask.bin: can't be opened|--cond mask.bin"),
        ([*model, "file.bin", "--cond", "large.png", "--image", "large.png"], "one thing at a time"),
        ([*model, "file.bin", "--show", "samplers"], "--cond_file: must name"),
        ([*model, "file.bin", "--cond", "large.png", "--mask", "mask.png"], "--mask"),
    ):
        with pytest.raises(UserError, match=words):
            generate.run(arguments)


# ----------------------------------------------------------------------------------------------------------------------
# what can't work


def test_what_cannot_work_ends_in_a_sentence(refused: Callable, pairs: tuple[Path, Path], model: Path, tmp_path: Path) -> None:
    images, pictures = pairs
    write_data(str(tmp_path / "fewer.bin"), make_images(23, channels=2))
    write_data(str(tmp_path / "smaller.bin"), make_images(24, channels=2, height=4))
    given = flags(TINY, "--max_steps 1 --data_file", images)
    plain = flags(SAMPLE, "--init", model)
    cases = [
        (flags(given, "--cond_file", tmp_path / "fewer.bin"), ["--cond_file", "fewer.bin", "23 pictures", "24 images"]),
        (flags(given, "--cond_file", tmp_path / "smaller.bin"), ["smaller.bin", "4x8", "8x8"]),
        (flags(given, "--cond_file", tmp_path / "none.bin"), ["none.bin"]),
        (flags(given, "--cond_channels 2"), ["--cond_channels 2", "needs", "--cond_file"]),
        (flags(given, "--cond_channels 3 --cond_file", pictures), ["pictures have 2 channels", "--cond_channels 3"]),
        (flags(given, "--cond_channels 0 --cond_file", pictures), ["--cond_file", "not conditioned on pictures"]),
        (flags(given, "--cond_dropout 0.1"), ["--cond_dropout 0.1", "nothing to leave out"]),
        (flags(given, "--guidance_scale 2 --cond_file", pictures), ["--guidance_scale 2", "--cond_dropout"]),
        (flags(given, "--cond_file", pictures, "--val_data_file", images), ["--val_cond_file"]),
        (flags(given, "--cond_file", pictures, "--val_cond_file", pictures), ["--val_cond_file", "--val_data_file"]),
        (flags(given, "--patch_size 5 --attention_resolutions 2 --cond_file", pictures), ["--patch_size 5", "75", "64"]),
        (plain, ["--cond_file", "2 channels"]),
        (flags(plain, "--cond_file", images), ["images.bin", "8x8"]),
        (flags(plain, "--cond_file", pictures, "--output", pictures), ["pictures.bin"]),
        (flags(given, "--init", model), ["--cond_channels 2", "--cond_file"]),
        (flags(given, "--init", model, "--cond_channels 1 --cond_file", pictures), ["--cond_channels 1", "was made with 2"]),
    ]
    for arguments, words in cases:
        told = refused(arguments, *words)
        with pytest.raises(UserError) as error:
            twin.run(flags(arguments, "--device cpu"))
        assert all(word in str(error.value) for word in words[:1]), (told, error.value)
    with pytest.raises(UserError, match="--cond_channels 2: UNet2DModel takes no pictures"):
        twin.run(["--convert", str(model), f"{tmp_path}/folder/"])
    (tmp_path / "damaged.bin").write_bytes(seal_model(with_slot(model.read_bytes(), 60, 65)))
    refused(flags(SAMPLE, "--init damaged.bin --cond_file", pictures), "damaged.bin", "--cond_channels 65")


def test_a_model_without_pictures_takes_none(refused: Callable, pairs: tuple[Path, Path], tmp_path: Path) -> None:
    config = make_config(TINY_TWIN | dict(in_channels=1, num_channels=32, num_res_blocks=1))
    write_model(str(tmp_path / "plain.bin"), ModelFile(config, random_weights(config)))
    for arguments in (flags(SAMPLE, "--init plain.bin"), flags(TINY, "--init plain.bin --data_file", pairs[0])):
        refused(flags(arguments, "--cond_file", pairs[1]), "--cond_file", "this model is not conditioned on pictures")
