"""Editing with a trained model: --start_from (SDEdit) and --inpaint (RePaint), in the program and the twin."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import BUILD, ROOT, binary_path, data_bytes, flags, make_images, random_weights, read_samples
from PIL import Image
from test_diffusion import CLASSES, DEVIATION, MEANS, PLAIN, WEIGHT, ExactNetwork
from test_generate import cells
from test_training import Double, write_parity_files

import generate
import train_unet as twin
from common import model_files
from common.config import make_config, validate
from common.samples import to_pixels

torch.set_num_threads(1)
SHAPE = (3, 8, 12)
MODELS = {
    "eps": dict(noise_schedule="cosine"),
    "v": dict(predict="v", rescale_timesteps=True, diffusion_steps=400),
    "learned": dict(learn_sigma=True),
    "edm, classes": dict(objective="edm", **CLASSES),
    "flow, classes": dict(objective="flow", **CLASSES),
    "learned, classes": dict(learn_sigma=True, predict="v", **CLASSES),
}
START, PAINT = "--start_from d.bin", "--inpaint d.bin --mask m.bin"
EDITING = [
    ("eps", f"{START} --sampler ddim --timestep_respacing 10 --eta 0"),
    ("learned, classes", f"{START} --sampler ddpm --timestep_respacing 7 --strength 0.5 --classes 1,2 --guidance_scale 2"),
    ("v", f"{START} --sampler dpmpp_2m --timestep_respacing 8 --strength 0.75"),
    ("edm, classes", f"{START} --sampler heun --timestep_respacing 6 --strength 0.4"),
    ("flow, classes", f"{START} --sampler euler --timestep_respacing 5 --strength 1 --guidance_scale 1.5"),
    ("eps", f"{PAINT} --sampler ddim --timestep_respacing 6 --eta 0.5 --jump_length 2 --jump_n_sample 3"),
    pytest.param("learned", f"{PAINT} --sampler ddpm --timestep_respacing 5 --jump_length 1 --jump_n_sample 2", marks=pytest.mark.long),
    ("learned, classes", f"{PAINT} --sampler ddpm --timestep_respacing 5 --jump_n_sample 4 --guidance_scale 3"),
    pytest.param("v", f"{PAINT} --sampler dpmpp_2m --timestep_respacing 7 --jump_length 3 --jump_n_sample 2", marks=pytest.mark.long),
    ("edm, classes", f"{PAINT} --sampler heun --timestep_respacing 5 --jump_length 2 --jump_n_sample 2 --guidance_scale 1.5"),
    ("flow, classes", f"{PAINT} --sampler euler --timestep_respacing 6 --jump_length 3 --jump_n_sample 3"),
]


def write_mask(path: Path, shape: tuple[int, int, int] = SHAPE, count: int = 2) -> np.ndarray:
    """count masks (count, 1, H, W): a box in each, elsewhere black; also grey on either side of half the range."""
    masks = np.zeros((count, 1, *shape[1:]), np.uint8)
    masks[:, :, 2:6, 3:7], masks[0, 0, 0, :2], masks[-1, 0, 7] = 255, (127, 128), 200
    path.write_bytes(data_bytes(masks))
    return masks


@pytest.mark.parametrize("name, words", EDITING, ids=str)
def test_editing_follows_pytorch(run: Callable, tmp_path: Path, name: str, words: str) -> None:
    """The same images as the twin's, as near as its float32 is to its float64 (times 4), whatever the batches are."""
    config, _ = write_parity_files(tmp_path, SHAPE, PLAIN | MODELS[name])
    masks = write_mask(tmp_path / "m.bin")
    run(["--init", "init.bin", "--sample", 5, "--batch_size", 3, "--seed", 3, "--output", "s.bin", *words.split()])
    run(["--init", "init.bin", "--sample", 5, "--batch_size", 5, "--seed", 3, "--output", "t.bin", *words.split()])
    native = read_samples(tmp_path / "s.bin")
    assert np.array_equal(native, read_samples(tmp_path / "t.bin"))
    given = twin.parse_flags(words.split(), twin.FLAGS, "")
    paths = {key: str(tmp_path / given[key]) for key in ("start_from", "inpaint", "mask") if key in given}
    config = dataclasses.replace(config, seed=3, sample=5, **(given | paths))
    validate(config)
    model = twin.build_model(config, random_weights(config, 4))
    single = twin.draw(model, config, 5).numpy()
    double = twin.draw(Double(model), config, 5).numpy()
    ours, theirs = np.abs(native - double).max(), np.abs(single - double).max()
    assert ours <= 4 * theirs + 1e-6, f"{ours:.3g} from float64, PyTorch's float32 {theirs:.3g}"
    assert theirs < 1e-2 and np.abs(native[0] - native[1]).max() > 0.1
    if config.inpaint:
        known = np.broadcast_to(masks[[0, 1, 0, 1, 0]] < 128, native.shape)
        images = twin.read_images(config, "inpaint", 5).numpy()
        assert np.array_equal(native[known], images[known]) and not np.isclose(native, images)[~known].all()


@pytest.mark.parametrize("flag", ["start_from", "inpaint", "mask"])
def test_what_is_not_finite_in_images_is_named(refused: Callable, tmp_path: Path, flag: str) -> None:
    """The images and the masks, not the model's weights."""
    config, _ = write_parity_files(tmp_path, SHAPE, PLAIN)
    images = {"d.bin": np.zeros((2, *SHAPE), np.float32), "m.bin": np.ones((2, 1, *SHAPE[1:]), np.float32)}
    images["m.bin" if flag == "mask" else "d.bin"][1, 0, 3, 3] = np.nan
    for name, values in images.items():
        (tmp_path / name).write_bytes(data_bytes(values))
    words = (START if flag == "start_from" else PAINT).split()
    refused(["--init", "init.bin", "--sample", 2, "--output", "s.bin", *words], f"--{flag}")
    given = {name[2:]: str(tmp_path / value) for name, value in zip(words[::2], words[1::2])}
    config = dataclasses.replace(config, sample=2, **given)
    with pytest.raises(twin.UserError, match=f"--{flag}"):
        twin.draw(twin.build_model(config, random_weights(config)), config, 2)


def test_strength(run: Callable, tmp_path: Path) -> None:
    """A little noise changes an image a little; images are taken in turns."""
    config, data = write_parity_files(tmp_path, SHAPE, PLAIN)
    images = data.images[[0, 1, 2, 0]] / 127.5 - 1  # of a file of 3
    (tmp_path / "three.bin").write_bytes(data_bytes(data.images[:3]))
    change = []
    for strength in (0, 0.3, 0.6, 1):
        run(f"--init init.bin --sample 4 --start_from three.bin --strength {strength} --timestep_respacing 50 --output s.bin".split())
        change.append(np.sqrt(np.mean((read_samples(tmp_path / "s.bin") - images) ** 2)))
    assert change[0] < 0.05 and np.all(np.diff(change) > 0.01), change
    # float images, as --sample writes them, are as good
    run("--init init.bin --sample 4 --start_from s.bin --strength 0 --timestep_respacing 50 --output t.bin".split())
    assert np.sqrt(np.mean((read_samples(tmp_path / "t.bin") - read_samples(tmp_path / "s.bin")) ** 2)) < 0.05


def schedule_jump(t_T: int, jump_length: int, jump_n_sample: int) -> list[int]:
    """get_schedule_jump of https://github.com/andreas128/RePaint, with n_sample 1."""
    jumps = {}
    for j in range(0, t_T - jump_length, jump_length):
        jumps[j] = jump_n_sample - 1
    t, ts = t_T, []
    while t >= 1:
        t = t - 1
        ts.append(t)
        if jumps.get(t, 0) > 0:
            jumps[t] = jumps[t] - 1
            for _ in range(jump_length):
                t = t + 1
                ts.append(t)
    ts.append(-1)
    return ts


@pytest.mark.parametrize("n, length, times", [(250, 10, 10), (20, 3, 2), (7, 1, 4), (5, 5, 3), (6, 50, 2), (12, 4, 1)])
def test_repaints_schedule(run: Callable, tmp_path: Path, n: int, length: int, times: int) -> None:
    """The steps that are taken are the downward ones of RePaint's walk; and the program takes so many."""
    ts = schedule_jump(n, length, times)
    downward = [n - 1 - a for a, b in zip(ts, ts[1:], strict=False) if b < a]
    config = make_config(
        dict(inpaint="x", mask="y", sample=1, jump_length=length, jump_n_sample=times, timestep_respacing=str(n), preset="fashion32")
    )
    assert twin.step_order(config, n) == list(zip(downward, [*downward[1:], n]))
    if n > 20:
        return
    write_parity_files(tmp_path, (1, 8, 8), PLAIN)
    write_mask(tmp_path / "m.bin", (1, 8, 8), 1)
    words = f"--preset fashion32 --init init.bin --sample 1 --inpaint d.bin --mask m.bin --timestep_respacing {n} --jump_length {length} --jump_n_sample {times}"
    assert f" {len(downward)} evaluations" in run([*words.split(), "--output", "s.bin"]).out


@pytest.mark.long
@pytest.mark.parametrize("settings", [dict(sampler="ddpm"), dict(sampler="dpmpp_2m", objective="flow"), dict(sampler="heun", objective="edm")])
def test_going_back_helps(tmp_path: Path, settings: dict) -> None:
    """Of points from a mixture of normals one coordinate is known, and the other one painted with an exact network. RePaint is no exact method: the
    mean is between the one that the mixture gives it, 0.58, and the one that it has where nothing is known, 0.06; nearer after going back."""
    count, known = 256, 0.4
    mean, own = MEANS[2].astype(np.float64), DEVIATION.astype(np.float64) ** 2
    posterior = WEIGHT * np.exp(-0.5 * (known - mean[:, 0]) ** 2 / own) / np.sqrt(own)
    expected, without = posterior @ mean[:, 1] / posterior.sum(), WEIGHT @ mean[:, 1]
    for name, values in ("x", np.full(16, known)), ("y", np.tile([-1, 1], 8)):
        (tmp_path / name).write_bytes(data_bytes(values.astype(np.float32).reshape(1, 1, 4, 4)))
    shape = dict(preset="fashion32", image_size=(4, 4), in_channels=1, channel_mult=(1,), attention_resolutions=())
    shape |= dict(clip_denoised=False, seed=3, sample=count)
    means = []
    for times in (1, 10):
        painting = dict(inpaint=f"{tmp_path}/x", mask=f"{tmp_path}/y", jump_length=5, jump_n_sample=times, timestep_respacing="50", batch_size=count)
        config = make_config(shape | painting | settings)
        points = twin.draw(ExactNetwork(config, 2), config, count).numpy().reshape(-1, 2)
        assert np.all(points[:, 0] == np.float32(known))
        means.append(points[:, 1].mean())
    assert without < means[0] < means[1] - 0.05 < expected, (means, without, expected)


def test_what_cannot_be_edited(refused: Callable, tmp_path: Path) -> None:
    write_parity_files(tmp_path, (1, 8, 8), PLAIN)
    write_mask(tmp_path / "m.bin", (1, 8, 8))
    (tmp_path / "small.bin").write_bytes(data_bytes(make_images(3, 1, 4, 4)))
    given = flags("--init init.bin --sample 2 --timestep_respacing 3 --output s.bin")
    refused([*given, "--start_from", "d.bin", "--inpaint", "d.bin", "--mask", "m.bin"], "--start_from")
    refused([*given, "--inpaint", "d.bin"], "--inpaint")
    refused([*given, "--mask", "m.bin"], "--mask")
    refused([*given, "--start_from", "small.bin"], "small.bin")
    refused([*given, "--inpaint", "d.bin", "--mask", "small.bin"], "small.bin")
    refused([*given, "--start_from", "none.bin"], "none.bin")
    refused([*given, "--start_from", "d.bin", "--strength", 2], "--strength")
    refused([*given, "--start_from", "d.bin", "--sampler", "euler", "--S_churn", 1], "--S_churn")
    refused(["--data_file", "d.bin", "--start_from", "d.bin", "--output_dir", "o"], "--start_from")
    for words in (
        "--start_from a --inpaint b --mask c --sample 1",
        "--inpaint b --sample 1",
        "--start_from a",
        "--start_from a --sample 1 --S_churn 1 --sampler heun",
    ):
        with pytest.raises(twin.UserError, match="start_from|inpaint|S_churn"):
            make_config({"preset": "fashion32"} | twin.parse_flags(words.split(), twin.FLAGS))


def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """generate.py takes a picture of any size, and shows it, its mask and what became of it; both back ends make the same of it."""
    (tmp_path / "programs").mkdir()
    program = ROOT / "train_unet_cuda" if BUILD == "cuda" else binary_path("cpu")  # generate.py names the precision
    (tmp_path / "programs/train_unet").symlink_to(program)
    monkeypatch.setattr(generate, "ROOT", tmp_path / "programs")
    monkeypatch.chdir(tmp_path)
    config = make_config(dict(preset="fashion32", image_size=(8, 8), in_channels=3, channel_mult=(1, 2), attention_resolutions=(4,)))
    model_files.write_model("m.bin", twin.ModelFile(config, random_weights(config, 4)))
    colours = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    Image.fromarray(colours.repeat(4, 0).repeat(4, 1)).save("f.png")
    white = np.zeros((16, 16), np.uint8)
    white[:, 8:] = 255
    Image.fromarray(white).save("mask.png")

    def make(*words: str, output: str) -> None:
        generate.run(
            [
                *flags("--model_filename m.bin --image f.png --num_samples 6 --steps 6 --device cpu --precision fp32 --eta 0", list(words)),
                "--output",
                output,
            ]
        )

    for words in ["--strength", "0.5"], ["--mask", "mask.png", "--jump_length", "2", "--jump_n_sample", "2", "--sampler", "heun"]:
        for backend in "torch", "native":
            make(*words, "--backend", backend, output=f"{backend}.bin")
        assert np.abs(read_samples(tmp_path / "torch.bin") - read_samples(tmp_path / "native.bin")).max() < 1e-3
        made = read_samples(tmp_path / "torch.bin").copy()
        make(*words, output="o.png")
        columns = 6 if "--mask" in words else 5
        grid = cells(Image.open("o.png"), 2, columns)[:, :, ::8, ::8]
        before = grid[0, 0].astype(int)  # scaled down by Lanczos
        assert np.array_equal(grid[0, columns - 4 :], np.stack([to_pixels(torch.from_numpy(image)) for image in made[:4]]))
        assert np.array_equal(grid[1, columns - 4 : columns - 2], np.stack([to_pixels(torch.from_numpy(image)) for image in made[4:]]))
        if "--mask" in words:
            assert np.array_equal(grid[0, 1, :, :, 0], np.repeat([[0] * 4 + [255] * 4], 8, 0))
            assert np.array_equal(grid[0, 2, :, :4], before[:, :4]) and not np.array_equal(grid[0, 2, :, 4:], before[:, 4:])
    for words in "--mask m.bin", "--strength 3", "--show samplers", "--S_churn 1 --sampler euler":
        with pytest.raises(twin.UserError, match=words.split()[0]):
            make(*words.split(), output="x.png")
    for words in "--mask mask.png", "--strength 0.5":
        with pytest.raises(twin.UserError, match=words.split()[0]):
            generate.run(["--model_filename", "m.bin", *words.split()])
    assert not Path("x.png").exists()


# ----------------------------------------------------------------------------------------------------------------------
# classes of given images


def test_given_images_keep_their_classes(run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --classes: their own, or if they have none, "no class". Noise alone still gets the classes in turns."""
    monkeypatch.chdir(tmp_path)
    config, _ = write_parity_files(tmp_path, SHAPE, PLAIN | CLASSES)
    images = make_images(5, *SHAPE)
    (tmp_path / "labelled.bin").write_bytes(data_bytes(images, np.array([2, 2, 0, 1, 1]), 3))
    (tmp_path / "bare.bin").write_bytes(data_bytes(images))
    model = twin.build_model(config, random_weights(config, 4))

    def drawn(*words: str) -> np.ndarray:
        run(flags("--init init.bin --sample 5 --sampler ddim --timestep_respacing 4 --eta 0 --output s.bin", *words))
        return read_samples(tmp_path / "s.bin")

    own = drawn("--start_from labelled.bin")
    assert np.array_equal(own, drawn("--start_from labelled.bin", "--classes 2,2,0,1,1"))
    bare, first = drawn("--start_from bare.bin"), drawn("--start_from bare.bin", "--classes 0")
    assert abs(bare - first).max() > 0.01 and abs(bare - drawn("--start_from bare.bin", "--classes 0,1,2")).max() > 0.01
    assert np.array_equal(drawn("--classes 0,1,2"), drawn())
    for name, ours in ("labelled", own), ("bare", bare):
        changed = dataclasses.replace(config, start_from=f"{name}.bin", sample=5, timestep_respacing="4", eta=0.0, seed=0)
        assert abs(twin.draw(model, changed, 5).numpy() - ours).max() < 2e-3
        labels = twin.labels_of_given(changed)[0].tolist()
        assert labels == ([2, 2, 0, 1, 1] if name == "labelled" else [3])


def test_a_picture_of_ones_own_has_no_class(run: Callable, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """generate.py --image, by both back ends; a model that knows no image without a class says what it takes."""
    Image.fromarray(make_images(1, *SHAPE)[0].transpose(1, 2, 0)).save(tmp_path / "flower.png")
    for dropout in 0.3, 0.0:
        config, _ = write_parity_files(tmp_path, SHAPE, PLAIN | CLASSES | dict(class_dropout=dropout))
        pictures = []
        for words in (), ("--classes", "0"):
            given = [
                "--model_filename",
                tmp_path / "init.bin",
                "--image",
                tmp_path / "flower.png",
                "--strength",
                0.7,
                "--steps",
                4,
                "--num_samples",
                2,
                *words,
            ]
            generate.run([*map(str, given), "--device", "cpu", "--output", str(tmp_path / "g.bin")])
            pictures.append(read_samples(tmp_path / "g.bin"))
            assert ("--classes" in capsys.readouterr().out) == (dropout == 0 and not words)
        assert abs(pictures[0] - pictures[1])[0].max() > 0.01 if dropout else np.array_equal(pictures[0][0], pictures[1][0])


def test_grids_of_pictures_are_spread_over_the_data(run: Callable, tmp_path: Path) -> None:
    """Of a file that is sorted by class, with the labels of the images whose pictures they show."""
    labels = np.repeat(np.arange(3), 8)
    (tmp_path / "sorted.bin").write_bytes(data_bytes(make_images(24, 3, 8, 8), labels, 3))
    given = flags(
        "--preset fashion32 --in_channels 3 --num_channels 32 --channel_mult 1,1 --num_res_blocks 1 --attention_resolutions 4 --cond lowres:2 --lr 0 --max_steps 1",
        "--class_cond True --class_dropout 0.1 --batch_size 4 --num_samples 6 --sample_interval 1 --timestep_respacing 4 --data_file", tmp_path / "sorted.bin",
    )  # fmt: skip
    run([*given, "--output_dir", "cpp"])
    assert twin.run(flags(given, "--device cpu --output_dir", tmp_path / "twin")) == 0
    grids = [np.asarray(Image.open(tmp_path / name / "samples_0000001.png")).astype(int) for name in ("cpp", "twin")]
    assert grids[0].shape == grids[1].shape and abs(grids[0] - grids[1]).max() <= 1
    data = twin.open_data(str(tmp_path / "sorted.bin"))
    shown = twin.GridConditions(make_config(twin.parse_flags(given, twin.FLAGS), data), data)
    assert shown.labels.tolist() == [0, 0, 1, 1, 2, 2] and torch.equal(shown.truth, torch.from_numpy(data.read_floats(np.arange(0, 24, 4))))
