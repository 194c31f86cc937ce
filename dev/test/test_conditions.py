"""Conditions: numbers of the images, in both programs, from the table to the picture."""

from __future__ import annotations

import csv
import importlib
import math
import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    TINY,
    called,
    checkpoints,
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

import prepare_data
import train_unet as twin
from common.augment import augment, change, draw_changes, rotation
from common.config import make_config
from common.data_files import open_data, write_data
from common.model import build_model
from common.model_files import ModelFile, write_model
from common.program import UserError
from common.random_numbers import AUGMENT, random_words, to_normals
from common.samples import caption_pixels

torch.set_num_threads(1)

NAMES = ["brightness", "hue", "size of it"]
VALUES = np.random.default_rng(3).standard_normal((24, 3)).astype(np.float32)
# Of the twin, what TINY says
TINY_TWIN = dict(preset="fashion32", image_size=(8, 8), channel_mult=(1, 1), attention_resolutions=(4,), noise_schedule="linear", batch_size=4)


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    """24 grey images of 8x8 with labels of 3 classes, and three numbers each."""
    write_data(str(tmp_path / "numbered.bin"), make_images(), np.arange(24) % 3, 3, VALUES, NAMES)
    return tmp_path / "numbered.bin"


def prepare(*args: object, code: int = 0) -> subprocess.CompletedProcess:
    done = called(prepare_data.main, ROOT / "prepare_data.py", *args)
    assert done.returncode == code, done.stdout + done.stderr
    return done


# ----------------------------------------------------------------------------------------------------------------------
# the data file


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("names", [NAMES, []])
def test_data_files_hold_numbers(tmp_path: Path, labels: bool, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Read back by both versions of the format, byte for byte where FORMATS.md says; without numbers the file is what it always was."""
    from common import data_files

    classes = (np.arange(24) % 3, 3) if labels else (None, 0)
    path = str(tmp_path / "d.bin")
    write_data(path, make_images(), *classes, VALUES, names)
    header = np.fromfile(path, "<i4", 12)
    text = "\n".join(names).encode()
    assert header[10:].tolist() == [3, (len(text) + 3) // 4 * 4]
    behind = Path(path).read_bytes()[1024 + 24 * 64 + 4 * 24 * labels :]
    assert behind == VALUES.tobytes() + text + bytes(-len(text) % 4)
    data = open_data(path)
    assert np.array_equal(data.values, VALUES) and data.value_names == names and (data.labels is not None) == labels

    monkeypatch.setattr(data_files, "READ_AT_START", 0)  # so that the file is of version 2
    write_data(path, make_images(), *classes, VALUES, names)
    assert np.fromfile(path, "<i4", 2)[1] == 2
    monkeypatch.undo()
    data = open_data(path)
    assert np.array_equal(data.values, VALUES) and data.value_names == names and len(data.image_crcs) == 24


def test_damaged_numbers_are_refused(refused: Callable, numbered: Path, tmp_path: Path) -> None:
    whole = numbered.read_bytes()
    given = [*TINY, "--cond_dim", 3, "--data_file", "bad.bin"]
    for file in (
        whole[:-4],
        with_slot(whole, 10, -1),
        with_slot(whole, 10, 5000),
        with_slot(whole, 11, 7),
        with_slot(whole, 12, 1),
        whole.replace(VALUES[5].tobytes(), np.array([1, np.nan, 1], "<f4").tobytes()),
    ):
        (tmp_path / "bad.bin").write_bytes(seal_data(file))
        refused(given, "bad.bin")
        with pytest.raises(UserError, match="bad.bin"):
            open_data(str(tmp_path / "bad.bin"))


# ----------------------------------------------------------------------------------------------------------------------
# prepare_data.py --values


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """a/0.png, b/1.png, a/2.png, and so on to b/5.png."""
    for k, image in enumerate(make_images(6)):
        folder = tmp_path / "pictures" / "ab"[k % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0]).save(folder / f"{k}.png")
    return tmp_path / "pictures"


def test_prepare_takes_a_table(pictures: Path, tmp_path: Path) -> None:
    """In any order, by the path from the folder on or the file's name alone; numbers follow their pictures, broken ones are left out."""
    order = ["a/0.png", "a/2.png", "a/4.png", "b/1.png", "b/3.png", "b/5.png"]
    with open(tmp_path / "table.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["file", "brightness", "with, comma"])
        for k in [5, 3, 0, 1, 4, 2, 9]:
            table.writerow([f"{k}.png" if k % 3 else f"{'ab'[k % 2]}/{k}.png", k / 4, -k])
    (pictures / "a/2.png").write_bytes(b"broken")
    done = prepare("--data_dir", pictures, "--image_size", 8, "--values", tmp_path / "table.csv", "--output_name", tmp_path / "d.bin")
    assert "b/9.png" in done.stderr
    data = open_data(str(tmp_path / "d.bin"))
    kept = [int(name[2]) for name in order if name != "a/2.png"]
    assert data.values.tolist() == [[k / 4, -k] for k in kept]
    assert data.value_names == ["brightness", "with, comma"] and data.labels.tolist() == [k % 2 for k in kept]

    # in a zip, too, where the names are those from the folder on that all pictures share
    with zipfile.ZipFile(tmp_path / "p.zip", "w") as archive:
        for name in order:
            archive.write(pictures / name, f"all of them/{name}")
    (tmp_path / "whole.csv").write_text("file,v\n" + "".join(f"{name},{name[2]}\n" for name in order))
    prepare("--zip", tmp_path / "p.zip", "--image_size", 8, "--values", tmp_path / "whole.csv", "--output_name", tmp_path / "z.bin")
    assert open_data(str(tmp_path / "z.bin")).values.tolist() == [[k] for k in kept]

    np.save(tmp_path / "values.npy", np.arange(6.0))
    prepare("--data_dir", pictures, "--image_size", 8, "--values", tmp_path / "values.npy", "--output_name", tmp_path / "d.bin")
    data = open_data(str(tmp_path / "d.bin"))
    assert data.values.tolist() == [[0], [2], [3], [4], [5]] and data.value_names == []


@pytest.mark.parametrize(
    "table",
    [
        "file,v\na/0.png,1\n",
        "file,v\na/0.png,nan\n",
        "file,v\na/0.png,1,2\n",
        "file,v\na/0.png,1\na/0.png,2\n",
        "file\na/0.png\n",
        "",
        'file,v\n"a/0.png,1\n' + "a/2.png,2\n" * 20000,
        "a/0.png,1e39\na/2.png,2\n",
    ],
)
def test_bad_tables(pictures: Path, tmp_path: Path, table: str) -> None:
    (tmp_path / "table.csv").write_text(table)
    done = prepare("--data_dir", pictures, "--image_size", 8, "--values", tmp_path / "table.csv", "--output_name", tmp_path / "d.bin", code=1)
    assert "table.csv" in done.stderr and not (tmp_path / "d.bin").exists()


def test_bad_arrays(pictures: Path, tmp_path: Path) -> None:
    given = ["--data_dir", pictures, "--image_size", 8, "--channels", 1, "--output_name", tmp_path / "d.bin", "--values"]
    for values in np.zeros((5, 2)), np.full(6, np.inf), np.array(["a"]), np.zeros(6, complex), np.zeros(6, "datetime64[s]"), np.full(6, 1e39):
        np.save(tmp_path / "v.npy", values)
        told = prepare(*given, tmp_path / "v.npy", code=1).stderr
        assert "v.npy" in told and told.count("\n") == 1
    with (tmp_path / "v.npy").open("wb") as file:
        np.savez(file, np.zeros(6))
    assert "v.npy" in prepare(*given, tmp_path / "v.npy", code=1).stderr
    assert "a/0.png" in prepare(*given, pictures / "a/0.png", code=1).stderr
    np.save(tmp_path / "v.npy", np.zeros(7))
    images = bytes([0, 0, 8, 3, 0, 0, 0, 6, 0, 0, 0, 8, 0, 0, 0, 8]) + make_images(6).tobytes()
    (tmp_path / "idx").write_bytes(images)
    given[:2] = ["--idx", tmp_path / "idx"]
    assert "v.npy" in prepare(*given, tmp_path / "v.npy", code=1).stderr
    np.save(tmp_path / "v.npy", np.ones((6, 1)))
    prepare(*given, tmp_path / "v.npy")
    assert (open_data(str(tmp_path / "d.bin")).values == 1).all()


# ----------------------------------------------------------------------------------------------------------------------
# training

HOW = {
    "alone": "--cond_dim 3",
    "with classes, left out": "--cond_dim 3 --class_cond True --class_dropout 0.4",
    "ect": "--cond_dim 3 --class_dropout 0.3 --objective ect",
    "changed images": "--augment 0.5",
    "changed images with numbers and classes, of ect": "--augment 1 --cond_dim 3 --class_cond True --class_dropout 0.4 --objective ect --microbatch 2",
}


@pytest.mark.parametrize("how", HOW)
def test_losses_are_the_twins(run: Callable, numbered: Path, tmp_path: Path, how: str) -> None:
    """Five steps: losses and gradient norms, of both programs from the same seed; and each resumes the other's checkpoint."""
    given = flags(TINY, HOW[how], "--data_file", numbered, "--val_data_file", numbered, "--val_interval 5 --max_steps 5")
    run([*given, "--output_dir", "cpp"])
    assert twin.run(flags(given, "--output_dir", tmp_path / "twin", "--device cpu")) == 0
    ours, theirs = read_log(tmp_path / "cpp"), read_log(tmp_path / "twin")
    for a, b in zip(ours, theirs, strict=True):
        for name in ("loss", "grad_norm"):
            assert float(a[name]) == pytest.approx(float(b[name]), rel=1e-4), (name, a, b)
    assert float(ours[-1]["val_loss"]) == pytest.approx(float(theirs[-1]["val_loss"]), rel=1e-4)
    header = read_checkpoint(tmp_path / "twin" / model_name(5)).header
    assert np.array_equal(header[4:64], read_checkpoint(tmp_path / "cpp" / model_name(5)).header[4:64]) and header[58] == (
        3 if "--cond_dim" in HOW[how] else 0
    )
    run(["--resume_checkpoint", tmp_path / "twin" / model_name(5), "--max_steps", 6, "--output_dir", "on", "--sample_interval", 0])
    assert checkpoints(tmp_path / "on") == [6]


def test_numbers_are_left_out_with_the_class(numbered: Path) -> None:
    """By the same draw, so that both are zeros or "no class" at once; and about as often as asked."""
    data = open_data(str(numbered))
    config = make_config(TINY_TWIN | dict(class_cond=True, cond_dim=3, class_dropout=0.25, batch_size=400), data)
    *_, labels, conditions = twin.training_batch(config, data, 0)
    left_out = (conditions["values"] == 0).all(1)
    assert torch.equal(left_out, labels == 3) and 0.15 < left_out.float().mean() < 0.35
    index = twin.data_order(config.seed, 0, 400, 24)
    assert torch.equal(conditions["values"][~left_out], torch.from_numpy(VALUES[index])[~left_out])


def test_resume_and_microbatches_keep_the_bits(run: Callable, numbered: Path, tmp_path: Path) -> None:
    given = flags(TINY, HOW["with classes, left out"], "--data_file", numbered, "--max_steps 4 --save_interval 2 --keep_checkpoints 0 --microbatch 2")
    run([*given, "--output_dir", "whole"])
    run(["--resume_checkpoint", f"whole/{model_name(2)}", "--output_dir", "rest", "--sample_interval", 0])
    assert (tmp_path / "whole" / model_name(4)).read_bytes() == (tmp_path / "rest" / model_name(4)).read_bytes()


def test_grids_show_the_numbers(run: Callable, numbered: Path, tmp_path: Path) -> None:
    """Below each image, of both programs alike; the page says what they are."""
    given = flags(TINY, "--cond_dim 3 --max_steps 1 --sample_interval 1 --lr 0 --data_file", numbered)
    run([*given, "--output_dir", "cpp"])
    assert twin.run(flags(given, "--output_dir", tmp_path / "twin", "--device cpu")) == 0
    grids = [np.asarray(Image.open(tmp_path / name / "samples_0000001.png")).astype(int) for name in ("cpp", "twin")]
    assert grids[0].shape == grids[1].shape == (2 * (64 + 2 + 7) + 2, 2 * 66 + 2)
    assert abs(grids[0] - grids[1]).max() <= 1
    for k in range(4):
        top, left = 2 + k // 2 * 73 + 66, 2 + k % 2 * 66
        caption = "".join(f"{v:.2g} " for v in VALUES[6 * k])  # of 24 images four, spread evenly
        assert np.array_equal(grids[0][top : top + 5, left : left + 64], caption_pixels(caption, 64))
    assert all(name in shown_run(tmp_path / "cpp")["about"] for name in NAMES)


def test_a_number_turns_a_knob(run: Callable, tmp_path: Path) -> None:
    """A model of flat images whose number is their brightness draws what it is asked for, without and with guidance.

    (With 32 channels each of a norm's 32 groups is one channel, so that what is added to it is subtracted again: the embedding has to scale and shift.)
    """
    random = np.random.default_rng(0)
    values = random.uniform(-0.8, 0.8, (64, 1)).astype(np.float32)
    images = np.broadcast_to(values[:, :, None, None], (64, 1, 8, 8)).astype(np.float32)
    write_data(str(tmp_path / "flat.bin"), images, values=values)
    given = flags(
        TINY,
        "--cond_dim 1 --class_dropout 0.1 --objective flow --use_scale_shift_norm True --max_steps 200 --lr 3e-3 --ema_rate 0.9 --batch_size 8 --data_file",
        tmp_path / "flat.bin",
    )
    run(given)
    (tmp_path / "five.csv").write_text("number\n-0.7\n-0.35\n0\n0.35\n0.7\n")
    model = ["--preset", "fashion32", "--init", f"out/{model_name(200)}", "--timestep_respacing", 20]
    run([*model, "--sample", 10, "--values", "five.csv", "--output", "s.bin"])
    means = read_samples(tmp_path / "s.bin").mean((1, 2, 3))
    wanted = np.tile([-0.7, -0.35, 0, 0.35, 0.7], 2)
    assert abs(means - wanted).max() < 0.2, means
    run([*model, "--sample", 2, "--values", 0.5, "--guidance_scale", 1.5, "--output", "g.bin"])
    assert (abs(read_samples(tmp_path / "g.bin").mean((1, 2, 3)) - 0.5) < 0.4).all()


# ----------------------------------------------------------------------------------------------------------------------
# changed images (--augment)


def draws(count: int, step: int) -> torch.Tensor:
    return random_words(5, AUGMENT, step, torch.arange(count), 16)


def test_changes_are_as_often_and_as_large_as_published() -> None:
    """Karras et al. 2022, appendix F.2: each with probability p, an image mirrored in half of all cases."""
    told, _, _ = draw_changes(0.3, draws(4000, 0), 32, 32)
    often = (told != 0).float().mean(0)
    wanted = torch.tensor([0.5, 0.15, 0.3, 0.3, 0.3, 0.3, 0.15, 0.3, 0.3])
    assert (abs(often - wanted) < 0.03).all(), often
    for k in (2, 7, 8):
        assert 0.9 < told[told[:, k] != 0, k].std() < 1.1


def test_no_change_leaves_the_image() -> None:
    """But for the mirror: the filter gives every image back, to its border."""
    x = torch.rand(8, 3, 9, 14, dtype=torch.float64)
    changed, told = augment(x, 0.0, 5, 0, torch.arange(8))
    assert torch.allclose(changed, torch.where(told[:, 0, None, None, None] == 1, x.flip(3), x), atol=1e-12) and (told[:, 1:] == 0).all()


@pytest.mark.parametrize(("angle", "quarter"), [(math.pi / 2, 1), (math.pi, 2), (-math.pi / 2, 3)])
def test_turns_and_shifts_by_whole_pixels(angle: float, quarter: int) -> None:
    """Quarter turns, and shifts to the right and down. sym6 is not quite symmetric: what is turned by half a turn lies 0.1 pixels from its place along
    each axis, and what is turned by a quarter no further. So values differ by a tenth of what neighbours differ by, and a wrong turn by much more."""
    torch.manual_seed(quarter)
    coarse = torch.rand(1, 2, 4, 4, dtype=torch.float64)
    x = torch.nn.functional.interpolate(coarse, size=(16, 16), mode="bicubic")[0]
    inside = (slice(None), slice(6, -6), slice(6, -6))
    told = torch.zeros(9, dtype=torch.float64)
    turned = change(x, told, rotation(torch.tensor([angle], dtype=torch.float64))[0], torch.zeros(2, dtype=torch.float64))
    steepest = x.diff(dim=1).abs().max() + x.diff(dim=2).abs().max()
    differences = [(turned - torch.rot90(x, k, (1, 2)))[inside].abs().max() for k in range(4)]
    assert differences.pop(quarter) < 0.1 * steepest < min(differences)
    shifted = change(x, told, torch.eye(2, dtype=torch.float64), torch.tensor([-3.0, 2.0], dtype=torch.float64))
    assert torch.allclose(shifted[inside], x.roll((-2, 3), (1, 2))[inside], atol=1e-9)


@pytest.mark.skipif("EDM" not in os.environ, reason="EDM=FOLDER names a checkout of github.com/NVlabs/edm")
def test_changes_are_edms(monkeypatch: pytest.MonkeyPatch) -> None:
    """AugmentPipe with the same draws. Where an image moves so far that the pipe's padding (one image on each side, then black) would show, ours goes on."""
    monkeypatch.syspath_prepend(os.environ["EDM"])
    pipe = importlib.import_module("training.augment").AugmentPipe(p=0.5, xflip=1e8, yflip=1, scale=1, rotate_frac=1, aniso=1, translate_frac=1)
    H, W, compared = 16, 24, 0
    for step in range(60):
        x = torch.rand(1, 3, H, W) * 2 - 1
        words = draws(1, step)
        (u,), (z,) = words.double() * 2.0**-32, to_normals(words[:, 12:16])
        told, matrix, added = draw_changes(0.5, words, H, W)
        queues = {
            "randint": [words[0, 0] & 1, words[0, 1] & 1],
            "rand": [torch.tensor(0.0), u[2], u[3], u[5], u[4], u[7], u[6], u[8], u[9]],
            "randn": [z[0], z[1], z[2:4].reshape(2, 1)],
        }
        for name, queue in queues.items():
            kind = torch.int64 if name == "randint" else torch.float32
            monkeypatch.setattr(torch, name, lambda *shape, device, queue=queue, kind=kind: queue.pop(0).to(kind).expand(shape[-1]))
        theirs, labels = pipe(x)
        monkeypatch.undo()
        monkeypatch.syspath_prepend(os.environ["EDM"])
        assert torch.allclose(labels.double(), told, atol=1e-6)
        center = torch.tensor([[(W - 1) / 2], [(H - 1) / 2]], dtype=torch.float64)
        corners = torch.tensor([[-1.0, 1, 1, -1], [-1, -1, 1, 1]], dtype=torch.float64) * center
        reach = (matrix[0] @ corners + added[0][:, None]).abs().max(1).values + 6 - center[:, 0]
        if (reach <= 2 * center[:, 0]).all():
            compared += 1
            ours, _ = augment(x, 0.5, 5, step, torch.arange(1))
            assert abs(ours - theirs).max() < 1e-4
    assert compared > 50


def test_the_network_is_told_and_samples_are_not(run: Callable, data: Path, tmp_path: Path) -> None:
    """A run of --augment alone: nine more columns, samples without numbers, a resumed run with the same bits, and both programs' samples."""
    given = flags(
        TINY, "--augment 0.4 --use_scale_shift_norm True --max_steps 4 --save_interval 2 --keep_checkpoints 0 --microbatch 2 --data_file", data
    )
    run([*given, "--output_dir", "whole"])
    run(["--resume_checkpoint", f"whole/{model_name(2)}", "--output_dir", "rest", "--sample_interval", 0])
    assert (tmp_path / "whole" / model_name(4)).read_bytes() == (tmp_path / "rest" / model_name(4)).read_bytes()
    file = twin.read_model(str(tmp_path / "whole" / model_name(4)))
    assert file.config.augment == float(np.float32(0.4)) and file.config.num_values == 9
    file.weights[:] = random_weights(file.config)
    write_model(str(tmp_path / "m.bin"), ModelFile(file.config, file.weights))
    sample = flags(SAMPLE, "--init", tmp_path / "m.bin")
    run(sample)
    assert twin.run(flags(sample, "--device cpu --output", tmp_path / "t.bin")) == 0
    assert abs(read_samples(tmp_path / "s.bin") - read_samples(tmp_path / "t.bin")).max() < 2e-3


# ----------------------------------------------------------------------------------------------------------------------
# samples


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = make_config(
        TINY_TWIN | dict(in_channels=1, class_cond=True, num_classes=3, cond_dim=3, class_dropout=0.2, num_channels=32, num_res_blocks=1)
    )
    write_model(str(tmp_path / "m.bin"), ModelFile(config, random_weights(config)))
    return tmp_path / "m.bin"


SAMPLE = "--preset fashion32 --sample 5 --batch_size 4 --timestep_respacing 4 --output s.bin"


@pytest.mark.parametrize(
    "more", ["--values 0.3,-1,2", "--values rows.csv --guidance_scale 2", "--values table.csv --guidance_scale 0 --classes 2", "--values mac.csv"]
)
def test_samples_are_the_twins(run: Callable, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("\ufeff1,2,3\n\n-1,0,0.5\r\n")  # no heading, but the mark that Excel writes before UTF-8
    (tmp_path / "mac.csv").write_bytes(b"a,b,c\r1,2,3\r-1,0,0.5\r")
    (tmp_path / "table.csv").write_text('file,a,b,c\n"Smith, ""J"".png",1, 2,3\ny.png,-1,"0",0.5\n')
    given = flags(SAMPLE, more, "--init", model)
    run(given)
    assert twin.run(flags(given, "--output t.bin --device cpu")) == 0
    ours, theirs = read_samples(tmp_path / "s.bin"), read_samples(tmp_path / "t.bin")
    assert abs(ours - theirs).max() < 2e-3 and abs(ours[0] - ours[1]).max() > 0.01


def test_validation_pictures_are_a_part_of_the_validation_data(data: Path, run: Callable, make_data: Callable, tmp_path: Path) -> None:
    """With other pictures the validation loss means something else, so it is not compared with that of best.bin."""
    for name, seed in ("p", 1), ("q", 2):
        make_data(f"{name}.bin", make_images(24, seed=seed))
    validated = flags("--val_interval 1 --save_interval 1 --keep_best True --sample_interval 0 --val_data_file", data)
    run(flags(TINY, "--max_steps 1 --data_file", data, "--cond_file p.bin --val_cond_file p.bin", validated))
    for steps, pictures in (2, "p.bin"), (3, "q.bin"):
        told = run(flags("--resume_checkpoint latest --lr 0 --max_steps", steps, "--val_cond_file", pictures, validated)).out
        assert ("best.bin" in told) == (pictures == "q.bin")


def test_a_line_that_may_mean_two_pictures(pictures: Path, tmp_path: Path) -> None:
    shutil.copy(pictures / "a/0.png", pictures / "b/0.png")
    (tmp_path / "table.csv").write_text("file,v\n" + "".join(f"{k}.png,{k}\n" for k in range(6)))
    done = prepare("--data_dir", pictures, "--image_size", 8, "--values", tmp_path / "table.csv", "--output_name", tmp_path / "d.bin", code=1)
    assert "0.png" in done.stderr and not (tmp_path / "d.bin").exists()


def test_zeros_are_no_condition(run: Callable, model: Path, tmp_path: Path) -> None:
    """Guidance away from nothing: with a scale of 0 the numbers and classes change nothing, and with zeros and no class it is what it is without."""
    outputs = []
    for values in ("1,2,3", "-3,0,1"):
        run(flags(SAMPLE, "--guidance_scale 0 --values", values, "--init", model))
        outputs.append(read_samples(tmp_path / "s.bin"))
    assert np.array_equal(*outputs)


def test_the_network_adds_a_linear_layer(model: Path) -> None:
    """emb = time_embed + label_emb + cond_emb values: seen from outside, by a model without numbers whose class table has them."""
    file = twin.read_model(str(model))
    network = build_model(file.config, file.weights)
    x, t, y = torch.randn(3, 1, 8, 8), torch.tensor([1.0, 500, 900]), torch.tensor([0, 1, 2])
    values = torch.tensor([[1.0, 2, 3]]).expand(3, 3)
    out = network(x, t, y, values)
    with torch.no_grad():
        network.label_emb.weight += values[:1] @ network.cond_emb.weight.T
    assert torch.allclose(network(x, t, y, torch.zeros(3, 3)), out, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# what can't work

REFUSED = [
    "--cond_dim 2", "--values 1,2,3", "--cond_dim 3 --values 1,2", "--cond_dim 3 --values 1,2,nan", "--cond_dim 3 --values 1,2,x",
    "--cond_dim 3 --values none.csv", "--cond_dim 3 --values bad.csv", "--cond_dim 3 --values inf.csv", "--cond_dim 3 --values spaced.csv",
    "--cond_dim 3 --values pipe.csv", "--cond_dim 3 --values empty.csv", "--cond_dim 2 --values four.csv", "--cond_dim 3 --values nul.csv",
    "--cond_dim 2 --values bad.csv", "--cond_dim 1 --values cr.csv", "--cond_dim 3 --guidance_scale 2", "--cond_dim 5000",
    "--augment 0.1 --random_flip True", "--augment 1.5", "--class_dropout 0.1",
]  # fmt: skip


@pytest.mark.parametrize("more", REFUSED)
def test_refused(refused: Callable, numbered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str) -> None:
    """The last flag can't work, and is named."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.csv").write_text("a,b,c\n1,2,3\n1,2\n")
    (tmp_path / "empty.csv").write_text("a,infrared,c\n")
    (tmp_path / "inf.csv").write_text("0,inf,0\n1,2,3\n")
    (tmp_path / "spaced.csv").write_text("0 ,0,0\n1,2,3\n")
    (tmp_path / "four.csv").write_text("9,1,2\n8,3,4\n")  # 9 and 8 are no names of images
    (tmp_path / "nul.csv").write_text("1,2,3\n1,2\0,3\n")
    (tmp_path / "cr.csv").write_text("a,b,c\r1,2,3\r")
    os.mkfifo(tmp_path / "pipe.csv")
    given, name = flags(TINY, "--data_file", numbered, more), more.split()[-2]
    refused(given, name)
    with pytest.raises(UserError, match=name):
        twin.run(given)


def test_other_data_is_refused(refused: Callable, run: Callable, numbered: Path, data: Path, model: Path, tmp_path: Path) -> None:
    given = flags(TINY, "--cond_dim 3 --max_steps 1")
    refused([*given, "--data_file", data], "--cond_dim")
    refused([*given, "--data_file", numbered, "--val_data_file", data], "--val_data_file")
    refused(flags(SAMPLE, "--init", model), "--values")
    refused(flags(TINY, "--init", model, "--data_file", numbered, "--cond_dim 2"), "--cond_dim")
    with pytest.raises(UserError, match="--cond_dim"):
        twin.run(flags(given, "--data_file", data))
    with pytest.raises(UserError, match="--cond_dim"):
        twin.run(["--convert", str(model), f"{tmp_path}/folder/"])
    (tmp_path / "damaged.bin").write_bytes(seal_model(with_slot(model.read_bytes(), 58, 5000)))
    refused(flags(SAMPLE, "--values 1,2,3 --init damaged.bin"), "damaged.bin")
