"""Runs that start from a model of other images or other classes (--init), in both programs."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, column, flags, make_images, model_name, random_weights, seal_model, with_slot
from PIL import Image

import train_unet as twin
from common.data_files import write_data
from common.model import initial_weights, to_state_dict
from common.model_files import ModelFile, read_bin, write_model
from common.program import UserError

# A run of one step that changes no weight, so that its checkpoint holds those with which it began.
STILL = flags("--lr 0 --weight_decay 0 --batch_size 2 --max_steps 1 --sample_interval 0 --seed 7")
FRESH = ["input_blocks.0.0.weight", "out.2.weight", "out.2.bias"]  # of a model of other channels


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_model(name: str, names: tuple[str, ...] = (), **settings: object) -> ModelFile:
    """A model file of random weights, and another average of them. It is of 8x8x1 images, with attention at the second of two levels."""
    shape = dict(num_channels=32, channel_mult=(1, 1), num_res_blocks=1, attention_resolutions=(4,), num_head_channels=32, use_scale_shift_norm=True)
    config = twin.Config(**{"image_size": (8, 8), "in_channels": 1, "preset": "fashion32"} | shape | settings)
    file = ModelFile(config, random_weights(config, 1), random_weights(config, 2), class_names=names)
    write_model(name, file)
    return read_bin(name, {})


def begun(run: Callable, capsys: pytest.CaptureFixture, *words: object) -> tuple[ModelFile, str]:
    """The first checkpoint of a run with these flags, whose weights are still those with which it began, and what it said of them. Both programs
    must write and say the same."""
    command = flags(STILL, *words)
    told = run([*command, "--output_dir", "cpp"]).out
    capsys.readouterr()
    assert twin.run([*command, "--device", "cpu", "--output_dir", "twin"]) == 0
    lines = [next(line for line in text.split("\n") if line.startswith("started from")) for text in (told, capsys.readouterr().out)]
    ours, theirs = (read_bin(f"{folder}/{model_name(1)}", {}) for folder in ("cpp", "twin"))
    assert lines[0] == lines[1] and np.array_equal(ours.weights, theirs.weights) and np.array_equal(ours.ema, theirs.ema)
    assert ours.class_names == theirs.class_names and np.array_equal(ours.weights, ours.ema)
    there = dataclasses.replace(theirs.config, data_file="", output_dir="", precision="auto")
    assert dataclasses.replace(ours.config, data_file="", output_dir="", precision="auto") == there
    return ours, lines[0]


def parts(file: ModelFile, weights: np.ndarray) -> dict[str, torch.Tensor]:
    return to_state_dict(file.config, weights)


def test_classes_by_name(run: Callable, capsys: pytest.CaptureFixture) -> None:
    """A class that the model has by that name keeps its row, wherever it stands now, and so does "no class"."""
    model = make_model("m.bin", ("cat", "dog", "owl"), class_cond=True, num_classes=3, class_dropout=0.1)
    write_data("d.bin", make_images(10), np.arange(10) % 5, 5, class_names=["owl", "ant", "cat", "dog", "fox"])
    file, told = begun(run, capsys, "--init m.bin --data_file d.bin")
    assert file.config.num_classes == 5 and file.class_names == ("owl", "ant", "cat", "dog", "fox")
    assert told == "started from m.bin: all weights are taken but those of 2 of 5 classes, which begin anew"
    before, now, new = parts(model, model.ema), parts(file, file.weights), parts(file, initial_weights(file.config))
    rows, table = now.pop("label_emb.weight"), before.pop("label_emb.weight")
    assert torch.equal(rows[[0, 2, 3, 5]], table[[2, 0, 1, 3]])
    assert torch.equal(rows[[1, 4]], new["label_emb.weight"][[1, 4]]) and 0.7 < rows[[1, 4]].std() < 1.3
    assert all(torch.equal(now[name], before[name]) for name in before)


@pytest.mark.parametrize("shape, heights", [((3, 8, 8), (4,)), ((1, 16, 12), (8,)), ((4, 4, 8), (2,))])
def test_other_images(run: Callable, capsys: pytest.CaptureFixture, shape: tuple[int, ...], heights: tuple[int, ...]) -> None:
    """Attention stays at its level. Where images have other channels, the layers that read and write them begin anew."""
    model = make_model("m.bin")
    write_data("d.bin", make_images(6, *shape))
    file, told = begun(run, capsys, "--init m.bin --use_ema False --data_file d.bin")
    assert (file.config.in_channels, *file.config.image_size) == shape and file.config.attention_resolutions == heights
    fresh = FRESH if shape[0] != 1 else []
    but = " but those of the first and the last layer, which begin anew" if fresh else ""
    assert told == f"started from m.bin: all weights are taken{but}"
    shutil.rmtree("cpp")
    shutil.rmtree("twin")
    again, _ = begun(run, capsys, "--init m.bin --use_ema False --attention_resolutions 4 --data_file d.bin")  # as the file says it
    assert np.array_equal(again.weights, file.weights)
    before, now, new = parts(model, model.weights), parts(file, file.weights), parts(file, initial_weights(file.config))
    for name in now:
        assert torch.equal(now[name], (new if name in fresh else before)[name]), name


def test_classes_without_names(run: Callable, capsys: pytest.CaptureFixture) -> None:
    """Are compared by number, as long as the model has as many. More of them are other classes."""
    model = make_model("m.bin", ("cat", "dog", "owl"), class_cond=True, num_classes=3)
    before, cases = parts(model, model.ema)["label_emb.weight"], {2: [0, 1, 2], 3: [0, 1, 2], 4: []}
    for classes, kept in cases.items():
        write_data("d.bin", make_images(8), np.arange(8) % classes, classes)
        file, told = begun(run, capsys, "--init m.bin --data_file d.bin")
        rows = parts(file, file.weights)["label_emb.weight"]
        assert file.class_names == (("cat", "dog", "owl") if kept else ()) and len(rows) == max(classes, 3)
        fresh = parts(file, initial_weights(file.config))["label_emb.weight"]
        assert torch.equal(rows, before if kept else fresh) and ("4 of 4 classes" in told) == (not kept)
        for folder in ("cpp", "twin"):
            shutil.rmtree(folder)
    write_data("d.bin", make_images(8), np.arange(8) % 3, 3, class_names=["cat", "dog", "owl"])
    file, told = begun(run, capsys, "--init m.bin --data_file d.bin --num_classes 5")  # room for two more
    rows = parts(file, file.weights)["label_emb.weight"]
    assert torch.equal(rows[:3], before) and len(rows) == 5 and "2 of 5 classes" in told


def test_a_folder_is_prepared_for_the_model_or_as_asked(run: Callable, capsys: pytest.CaptureFixture) -> None:
    for name in ("cat", "fox"):
        (folder := Path("pictures") / name).mkdir(parents=True)
        Image.fromarray(np.full((20, 20, 3), (90, 30, 200), np.uint8)).save(folder / "1.png")
    make_model("m.bin", ("cat", "dog"), class_cond=True, num_classes=2)
    file, told = begun(run, capsys, "--init m.bin --data_dir pictures")
    assert file.config.image_size == (8, 8) and file.config.in_channels == 1 and file.class_names == ("cat", "fox")
    for folder in ("cpp", "twin"):
        shutil.rmtree(folder)
    file, told = begun(run, capsys, "--init m.bin --data_dir pictures --image_size 16 --in_channels 3")
    assert file.config.image_size == (16, 16) and file.config.in_channels == 3
    assert told.endswith(" but those of the first and the last layer and 1 of 2 classes, which begin anew")


def test_pictures_that_are_made_of_the_images(run: Callable, capsys: pytest.CaptureFixture) -> None:
    """They have as many channels as the images."""
    model = make_model("m.bin", cond="mask", cond_channels=2)
    write_data("d.bin", make_images(6, 3, 8, 8))
    file, _ = begun(run, capsys, "--init m.bin --data_file d.bin")
    assert file.config.cond_channels == 4 and parts(file, file.weights)["input_blocks.0.0.weight"].shape[1] == 7
    assert torch.equal(parts(file, file.weights)["time_embed.0.weight"], parts(model, model.ema)["time_embed.0.weight"])


def test_what_remains_refused(run: Callable, refused: Callable) -> None:
    """The network itself is the file's; what is resumed stays what it was; samples are those of the model."""
    make_model("m.bin", ("cat", "dog", "owl"), class_cond=True, num_classes=3)
    write_data("three.bin", make_images(6), np.arange(6) % 3, 3, class_names=["cat", "dog", "owl"])
    write_data("five.bin", make_images(6), np.arange(6) % 5, 5, class_names=["owl", "ant", "cat", "dog", "fox"])
    write_data("large.bin", make_images(6, 1, 16, 16), np.arange(6) % 3, 3)
    write_data("odd.bin", make_images(6, 1, 9, 9), np.arange(6) % 3, 3)
    write_data("unlabelled.bin", make_images(6))
    run(flags(STILL, "--init m.bin --data_file three.bin --output_dir out"))
    resume = ["--resume_checkpoint", f"out/{model_name(1)}", "--max_steps", 2, "--output_dir", "new"]
    given = flags(STILL, "--init m.bin")
    for words, *told in (
        (flags(given, "--data_file five.bin --num_channels 64"), "--num_channels 64", "m.bin"),
        (flags(given, "--data_file five.bin --class_cond False"), "--class_cond False", "m.bin"),
        (flags(given, "--data_file large.bin --image_size 8"), "large.bin", "16x16", "8x8"),
        (flags(given, "--data_file five.bin --num_classes 4"), "five.bin", "5 classes", "4"),
        (flags(given, "--data_file odd.bin"), "--image_size 9", "multiple of 2"),
        (flags(given, "--data_file unlabelled.bin"), "unlabelled.bin", "no labels"),
        (flags(resume, "--data_file five.bin"), "five.bin", "ant"),
        (flags(resume, "--data_file large.bin"), "large.bin", "16x16"),
        (flags("--init m.bin --sample 1 --image_size 16"), "--image_size 16", "m.bin"),
        (flags("--init m.bin --sample 1 --num_classes 5"), "--num_classes 5", "m.bin"),
    ):
        refused(words, *told)
        with pytest.raises(UserError):
            twin.run([*words, "--device", "cpu"])


def test_damaged_sizes(refused: Callable) -> None:
    """Of what the data decide the file's own values are checked, too."""
    make_model("m.bin", class_cond=True, num_classes=3)
    write_data("d.bin", make_images(6), np.arange(6) % 5, 5)
    file = Path("m.bin").read_bytes()
    for slot, value in ((6, 0), (6, -8), (8, 0), (8, 65), (15, 0), (15, 4), (15, -1)):
        Path("bad.bin").write_bytes(seal_model(with_slot(file, slot, value)))
        for more in ([], ["--image_size", 8, "--in_channels", 1, "--num_classes", 5]):
            refused(flags(STILL, "--init bad.bin --data_file d.bin", *more), "bad.bin")


def test_tuning_is_better_than_a_new_start(run: Callable) -> None:
    """Of five classes of disks, of which a model knows three, the validation loss after a hundred steps."""
    names = ["left", "right", "top", "bottom", "middle"]
    at = np.array([(4, 1), (4, 6), (1, 4), (6, 4), (4, 4)])
    random = np.random.default_rng(0)

    def write(name: str, classes: list[str]) -> None:
        labels = random.integers(0, len(classes), 200)
        centre = at[[names.index(classes[k]) for k in labels]] + random.uniform(-1, 1, (200, 2))
        y, x = np.mgrid[0:8, 0:8]
        near = np.hypot(y - centre[:, 0, None, None], x - centre[:, 1, None, None]) < 2
        write_data(name, np.where(near, 230, 20).astype(np.uint8)[:, None], labels, len(classes), class_names=classes)

    write("three.bin", names[:3])
    write("five.bin", names[4:1:-1] + names[:2])
    write("val.bin", names)
    words = flags(TINY, "--class_cond True --use_scale_shift_norm True --batch_size 16 --lr 2e-3 --seed 3 --ema_rate 0.98")
    run(flags(words, "--data_file three.bin --max_steps 400 --output_dir base"))
    tuning = flags("--data_file five.bin --val_data_file val.bin --max_steps 100 --val_interval 100")
    run(flags(words, tuning, "--output_dir scratch"))
    run(flags(words, tuning, "--output_dir tuned --init", f"base/{model_name(400)}"))
    scratch, tuned = (column(Path(folder), "val_loss")[-1] for folder in ("scratch", "tuned"))
    assert tuned < 0.8 * scratch
