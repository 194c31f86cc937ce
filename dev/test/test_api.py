"""load() and sample(), the door for people who know PyTorch: the program's pixels, classes by name, tensors and files as pictures, sentences."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, data_bytes, make_images, random_weights, read_samples
from PIL import Image
from test_diffusion import CLASSES, PLAIN
from test_training import SMALL

import train_unet
from common.config import make_config
from common.flags import SAVED_FLAGS
from common.model_files import ModelFile, write_model
from train_unet import load, sample

torch.set_num_threads(1)
SHAPE = (3, 8, 12)
NAMES = ("cat", "dog", "a flying fish")
QUICK = "--sampler ddim --timestep_respacing 6 --eta 0.5"


class Double(torch.nn.Module):
    """A loaded model that computes in float64, whatever it is given."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model, self.config, self.class_names = model.double(), model.config, model.class_names

    def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor | None = None, **conditions: torch.Tensor) -> torch.Tensor:
        return self.model(x.double(), t.double(), y, **{name: value.double() for name, value in conditions.items()})


def write_file(path: Path, **settings: Any) -> Path:
    """A model of random weights and other random averages, in any format."""
    config = make_config(SMALL | PLAIN | dict(image_size=SHAPE[1:], in_channels=SHAPE[0]) | settings)
    names = NAMES if config.class_cond else ()
    write_model(str(path), ModelFile(config, random_weights(config, 4), random_weights(config, 5), class_names=names))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Of three classes with names."""
    return write_file(tmp_path / "model.bin", **CLASSES)


def check_same(run: Callable, path: Path, words: str, **asked: Any) -> None:
    """What the program writes is what sample() returns: as near to float64 as PyTorch's float32 is (times 4), as the root of the mean square. The largest
    error of a draw is one pixel's, and by chance it differs fourfold between two orders of the same sums. 1e-7: a rounding of a pixel."""
    run(["--init", path, "--sample", 5, "--output", "s.bin", *words.split()])
    single, double = (sample(network, 5, **asked).numpy() for network in (load(path, "cpu"), Double(load(path, "cpu"))))
    assert single.shape == (5, *SHAPE) and single.dtype == np.float32 and single.std() > 0.1
    ours, theirs = (np.sqrt(np.square(found - double).mean()) for found in (read_samples(path.parent / "s.bin"), single))
    assert ours <= 4 * theirs + 1e-7, f"{ours:.3g} from float64, PyTorch's float32 {theirs:.3g}"


@pytest.mark.parametrize(
    "words, asked",
    [
        ("", {}),
        ("--seed 3 --sampler heun --timestep_respacing 4", dict(seed=3, sampler="heun", steps=4)),
        (f"{QUICK} --classes 2,0 --guidance_scale 1.7", dict(sampler="ddim", steps="6", eta=0.5, classes=["a flying fish", 0], guidance_scale=1.7)),
        (f"{QUICK} --classes 1", dict(sampler="ddim", steps=6, eta=0.5, classes="dog", batch_size=2)),
    ],
)
def test_the_programs_pixels(run: Callable, model: Path, words: str, asked: dict) -> None:
    """Without any flag, too: the defaults are the program's."""
    write_file(model, **CLASSES, diffusion_steps=40)
    check_same(run, model, words, **asked)


def test_editing(run: Callable, model: Path, tmp_path: Path) -> None:
    """The same picture as a data file, as a tensor of floats, of bytes, and as a picture file."""
    images = make_images(1, *SHAPE)
    (tmp_path / "d.bin").write_bytes(data_bytes(images))
    Image.fromarray(images[0].transpose(1, 2, 0)).save(tmp_path / "d.png")
    asked = dict(strength=0.7, steps=6, sampler="ddim", eta=0.5)
    check_same(run, model, f"{QUICK} --strength 0.7 --start_from d.bin", image=tmp_path / "d.bin", **asked)
    network = load(model, "cpu")
    expected = sample(network, 2, image=str(tmp_path / "d.bin"), **asked)
    for image in images[0], torch.from_numpy(images), torch.from_numpy(images[0] / 127.5 - 1), tmp_path / "d.png":
        assert (sample(network, 2, image=image, **asked) - expected).abs().max() < 1e-4
    assert (sample(network, 2, image=images, classes="cat", **asked) - expected).abs().max() > 0.01


def test_numbers_and_pictures(run: Callable, tmp_path: Path) -> None:
    """What images are conditioned on: numbers and coarse pictures."""
    path = write_file(tmp_path / "model.bin", cond_dim=2, cond="lowres:2", cond_dropout=0.1, class_dropout=0.1)
    images = make_images(3, *SHAPE)
    (tmp_path / "d.bin").write_bytes(data_bytes(images))
    (tmp_path / "v.csv").write_text("0.1,-2\n0.3,1\n")
    asked = dict(sampler="ddim", steps=6, eta=0.5, guidance_scale=2, pictures=images)
    words = f"{QUICK} --guidance_scale 2 --cond_file d.bin --values"
    check_same(run, path, f"{words} v.csv", values=torch.tensor([[0.1, -2], [0.3, 1]]), **asked)
    check_same(run, path, f"{words} 0.1,-2", values=[0.1, -2], **asked)


def test_any_file_and_the_average(model: Path, tmp_path: Path) -> None:
    """The formats hold one model; the average is taken unless use_ema says otherwise."""
    network = load(str(model), device="cpu")
    assert isinstance(network, torch.nn.Module) and not network.training
    assert network.class_names == NAMES and network.config.image_size == SHAPE[1:]
    flat = {use_ema: torch.cat([p.flatten() for p in load(model, "cpu", use_ema=use_ema).parameters()]).detach() for use_ema in (True, False)}
    for use_ema, seed in (True, 5), (False, 4):
        assert np.array_equal(flat[use_ema].numpy(), random_weights(network.config, seed))
    expected = sample(network, 2, steps=3)
    for name in "copy.pt", "copy.safetensors":
        write_file(tmp_path / name, **CLASSES)
        assert torch.equal(sample(load(tmp_path / name, "cpu"), 2, steps=3), expected)
    torch.save(network.state_dict(), tmp_path / "bare.pt")
    said = {name: getattr(network.config, name) for name in SAVED_FLAGS if name in SMALL | PLAIN | CLASSES}
    bare = load(tmp_path / "bare.pt", "cpu", preset="fashion32", in_channels=3, **said | dict(image_size=SHAPE[1:]))
    assert torch.equal(torch.cat([p.flatten() for p in bare.parameters()]), flat[True]) and bare.class_names == ()


@pytest.mark.parametrize(
    "asked, told",
    [
        (dict(classes="horse"), "--classes horse: is none of this model's classes (cat, dog, a flying fish)"),
        (dict(classes=3), "--classes 3: must be some of the classes 0 to 2"),
        (dict(sampler="huen"), "--sampler huen: must be one of ddim"),
        (dict(steps=5000), "--timestep_respacing 5000"),
        (dict(stepz=3), "--stepz: there is no such flag"),
        (dict(strength=0.5), "--strength 0.5: says how much of image is changed"),
        (dict(image=np.zeros((3, 9, 9), np.float32)), "image.bin: its images are 3x9x9"),
        (dict(image=np.zeros(3, np.float32)), "image: has the shape (3,)"),
        (dict(image="nowhere.png"), "--image nowhere.png: can't be read"),
        (dict(values=[1]), "this model is not conditioned on numbers"),
        (dict(pictures=np.zeros(SHAPE)), "this model is not conditioned on pictures"),
        (dict(n=0), "one image or more, not 0"),
        (dict(model=torch.nn.Identity()), "takes a model that load() has read, not a Identity"),
    ],
)
def test_sentences(model: Path, asked: dict, told: str) -> None:
    with pytest.raises(train_unet.UserError) as e:
        sample(**dict(model=load(model, "cpu"), n=1) | asked)
    assert told in str(e.value) and "\n" not in str(e.value) and "/tmp" not in str(e.value)


def test_sentences_of_load(model: Path, tmp_path: Path) -> None:
    (tmp_path / "not.bin").write_bytes(b"x" * 2000)
    for path, asked, told in (
        (tmp_path / "nothing.bin", {}, "can't be opened"),
        (tmp_path / "not.bin", {}, "not.bin"),
        (model, dict(device="meta"), "--device meta: is not here"),
        (model, dict(num_channels=64), "--num_channels 64"),
        (model, dict(use_emma=True), "--use_emma: there is no such flag; did you mean --use_ema?"),
    ):
        with pytest.raises(train_unet.UserError) as e:
            load(path, **asked)
        assert told in str(e.value) and "\n" not in str(e.value)


def test_classes_that_may_be_wrong_are_told(tmp_path: Path) -> None:
    """A model that knows no image without a class, of a picture without one."""
    network = load(write_file(tmp_path / "model.bin", **CLASSES | dict(class_dropout=0.0)), "cpu")
    with pytest.warns(UserWarning, match="takes them in turns"):
        sample(network, 1, image=make_images(1, *SHAPE), steps=2)


def test_the_door_needs_no_further_package(model: Path) -> None:
    """train_unet.py is imported, and loads and draws, without Pillow, matplotlib and safetensors."""
    code = "import sys; sys.modules.update(dict.fromkeys(['PIL', 'matplotlib', 'safetensors'])); from train_unet import load, sample; "
    code += f"import numpy; print(sample(load({str(model)!r}, 'cpu'), 1, steps=1, image=numpy.zeros((3, 8, 12))).shape)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "torch.Size([1, 3, 8, 12])\n", done.stderr
