"""What becomes of the user's own pictures: which files are taken, of which class they are, what their values mean, and that nothing of it is silent."""

from __future__ import annotations

import csv
import dataclasses
import importlib.metadata
import io
import os
import re
import signal
import struct
import subprocess
import sys
import unicodedata
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, binary_path, flags, make_images, random_weights, seal_data, seal_model, shown_run, with_slot
from PIL import Image, ImageCms, features

import generate
import prepare_data
import train_unet as twin
from common import data_files, log, pictures, program
from common.config import make_config
from common.data_files import Data, open_data, write_data
from common.files import DataError
from common.flags import Config
from common.model_files import ModelFile, write_model
from common.program import UserError

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
COLORS = [RED, GREEN, BLUE, (200, 100, 50), (1, 2, 3), (9, 99, 199)]
NFC, NFD = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))


SMALL_RUN = (
    "--preset fashion32 --image_size 8 --num_channels 32 --channel_mult 1,1 --attention_resolutions 4 --batch_size 2 --sample_interval 0 "
    "--noise_schedule linear --max_steps 1"
).split()
ON_THE_CPU = ["--device", "cpu"]  # the twin's
WITH_CLASSES = ["--class_cond", "True", "--class_dropout", "0"]


def encoded(color: object, form: str = "PNG", size: tuple[int, int] = (8, 8), mode: str = "RGB", **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, color).save(buffer, form, **options)
    return buffer.getvalue()


def put(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def packed(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def of_colors(*names: str) -> dict[str, bytes]:
    """Pictures of these names, each of another colour."""
    return {name: encoded(color) for name, color in zip(names, COLORS, strict=False)}


def prepare(capsys: pytest.CaptureFixture, *words: object, code: int = 0, size: object = 8) -> str:
    """What prepare_data.py says on stderr."""
    assert prepare_data.main(["--image_size", str(size), *map(str, words)]) == code, capsys.readouterr()
    return capsys.readouterr().err


def labels_of(path: Path) -> tuple[list[int] | None, list[str]]:
    data = open_data(str(path))
    return None if data.labels is None else data.labels.tolist(), data.class_names


# ----------------------------------------------------------------------------------------------------------------------
# A5: classes


LAYOUTS = {
    # names of files, labels of the sorted ones, names of classes, words of the line that says so
    "classes below a folder": (["images/cats/1.png", "images/dogs/1.png", "images/cats/2.png"], [0, 0, 1], ["cats", "dogs"], ""),
    "classes": (["cats/1.png", "cats/more/2.png", "dogs/1.png"], [0, 0, 1], ["cats", "dogs"], ""),
    "one class": (["cats/1.png", "cats/2.png"], None, [], r"no labels: there is one folder of pictures \(cats\), and one class is no class"),
    "one class, deep": (["my/cats/1.png", "my/cats/2.png"], None, [], r"one folder of pictures \(my/cats\)"),
    "no folders": (["1.png", "2.png"], None, [], ""),
    "two levels": (
        ["train/cats/1.png", "train/dogs/1.png", "val/cats/1.png"],
        [0, 1, 0],
        ["cats", "dogs"],
        "classes are cats, dogs, .* not train, val",
    ),
    "a level that not all reach": (
        ["cats/a/1.png", "cats/b/1.png", "dogs/1.png"],
        [0, 0, 1],
        ["cats", "dogs"],
        r"\(dogs/1.png\) lies beside .* a, b",
    ),
    "one stray file": (
        ["cats/1.png", "dogs/1.png", "cover.png"],
        None,
        [],
        r"no labels: 1 picture \(cover.png\) lies beside the folders cats, dogs;",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["folder", "zip", "zip of Windows"])
def test_one_rule_says_the_classes(tmp_path, capsys, layout: str, kind: str) -> None:
    """images/{cats,dogs} was one class as a folder and two as a zip; a zip with \\ in its names had no classes; one sub-folder made a model of one class,
    sampled with guidance."""
    names, labels, class_names, told = LAYOUTS[layout]
    files = of_colors(*names)
    if kind == "folder":
        source = ["--data_dir", put(tmp_path / "in", files)]
    else:
        source = [
            "--zip",
            packed(tmp_path / "in.zip", {name.replace("/", "\\") if "Windows" in kind else name: file for name, file in files.items()}),
        ]
    said = prepare(capsys, *source, "--output_name", tmp_path / "o.bin")
    assert labels_of(tmp_path / "o.bin") == (labels, class_names)
    colors = [COLORS[names.index(name)] for name in sorted(names)]
    assert [tuple(image[:, 0, 0]) for image in open_data(str(tmp_path / "o.bin")).images] == colors
    assert said.count("\n") == bool(told) and re.search(told, said), said


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_folders_of_runs_and_of_systems_are_left_out(tmp_path, capsys, kind: str) -> None:
    """The grids of the run's own folder became pictures or a class, and so did what file servers, Windows and macOS put beside pictures."""
    strange = ["@eaDir/x.png", "$RECYCLE.BIN/x.png", "__MACOSX/cats/._1.png", "cats/@eaDir/1.png", ".thumbs/1.png", "System Volume Information/a.png"]
    run = ["out/samples_0000100.png", "cats/second/samples_0000100.png"]
    files = of_colors("cats/1.png", "dogs/1.png", "dogs/2.png")
    others = dict.fromkeys([*strange, *run, "cats/.hidden.png", "notes.txt"], encoded(BLUE)) | {"out/log.csv": b"step", "cats/second/.lock": b""}
    if kind == "folder":
        source = ["--data_dir", put(tmp_path / "in", files | others)]
    else:
        source = ["--zip", packed(tmp_path / "in.zip", files | others)]
    said = prepare(capsys, *source, "--output_name", tmp_path / "o.bin")
    assert labels_of(tmp_path / "o.bin") == ([0, 1, 1], ["cats", "dogs"])
    assert said.count("\n") == 1 and said.startswith(
        "prepare_data: left out: 1 file of other kinds (.txt 1); 1 hidden file; 6 folders of a system"
    ), said
    assert "2 folders of runs (cats/second, out)" in said


def test_the_folder_of_a_run_is_refused(tmp_path, capsys) -> None:
    """`--data_dir .` where a run wrote its files: its grids were trained on."""
    folder = put(tmp_path / "in", of_colors("samples_0000100.png") | {"log.csv": b"step"})
    said = prepare(capsys, "--data_dir", folder, "--output_name", tmp_path / "o.bin", code=1)
    assert said.count("\n") == 1 and "log.csv" in said and not (tmp_path / "o.bin").exists()
    put(tmp_path / "none", {"a.txt": b"", "b.txt": b""})
    assert "(left out: 2 files of other kinds (.txt 2))" in prepare(
        capsys, "--data_dir", tmp_path / "none", "--output_name", tmp_path / "o.bin", code=1
    )


def test_names_of_classes_are_kept(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte where FORMATS.md says; they were not kept, so that labels could be compared by position alone."""
    path, images, labels, names = tmp_path / "o.bin", make_images(4), [0, 1, 2, 1], ["Äpfel", "b", "c d"]
    values = np.arange(4, dtype=np.float32)[:, None]
    text = "Äpfel\nb\nc d".encode()
    for version in 1, 2:
        monkeypatch.setattr(data_files, "READ_AT_START", (4 << 30) * (version == 1))
        write_data(str(path), images, labels, 3, values, ["n"], class_names=names)
        monkeypatch.setattr(data_files, "READ_AT_START", 4 << 30)
        raw, header = path.read_bytes(), np.fromfile(path, "<u4", 256)
        assert header[10:14].tolist() == [1, 4, len(text), 0] and len(text) == 12
        crcs = b"".join(struct.pack("<I", zlib.crc32(image.tobytes())) for image in images) if version == 2 else b""
        behind = struct.pack("<4i", *labels) + values.tobytes() + b"n\0\0\0" + text + crcs
        assert raw[1024:] == images.tobytes() + behind
        assert header[9] == zlib.crc32(raw[1024:] if version == 1 else behind)
        data = open_data(str(path))
        assert data.class_names == names and data.labels.tolist() == labels and data.value_names == ["n"] and data.values.tolist() == values.tolist()
    write_data(str(path), images, labels, 3)
    assert open_data(str(path)).class_names == [] and np.fromfile(path, "<u4", 13)[12] == 0


def test_damaged_names_of_classes(tmp_path) -> None:
    path = tmp_path / "o.bin"
    write_data(str(path), make_images(4), [0, 1, 2, 1], 3, class_names=["a", "b", "cd"])
    whole = path.read_bytes()
    assert whole.endswith(b"a\nb\ncd\0\0")
    for damaged in (
        *(with_slot(whole, 12, value) for value in (-8, 4, 7, 12, 1 << 21)),
        *(whole[:-8] + text for text in (b"a\na\ncd\0\0", b"a\nb\0\0\0\0\0", b"a\n\ncd\0\0\0", b"a\nb\nc\nd\0", b"a\nb\n\xffd\0\0", b"\0" * 8)),
        whole[:-4],
    ):
        path.write_bytes(seal_data(damaged))
        with pytest.raises(DataError, match="o.bin"):
            open_data(str(path))
    write_data(str(path), make_images(4))
    path.write_bytes(seal_data(with_slot(path.read_bytes(), 12, 4) + b"a\0\0\0"))  # of no classes
    with pytest.raises(DataError, match="o.bin"):
        open_data(str(path))
    for names in (["a", "b"], ["a", "a", "b"], ["a", "", "b"], ["a", "b\nc", "d"]):
        with pytest.raises(DataError):
            write_data(str(path), make_images(4), [0, 1, 2, 1], 3, class_names=names)


def test_classes_are_compared_by_name(tmp_path) -> None:
    """Training data of a, b, c and validation data of a, c: c counted as b."""
    write_data(str(tmp_path / "t.bin"), make_images(4), [0, 1, 2, 2], 3, class_names=["a", "b", "c"])
    config = make_config(dict(preset="fashion32", class_cond=True, class_dropout=0.0, val_data_file=str(tmp_path / "v.bin"), num_channels=32,
                              channel_mult=(1, 1), attention_resolutions=(4,)), training := open_data(str(tmp_path / "t.bin")))  # fmt: skip
    for names, expected in {("a", "c"): [0, 2, 2, 0], ("c", "a"): [2, 0, 0, 2], ("c", "b", "a"): [2, 1, 1, 2], (): [0, 1, 1, 0]}.items():
        write_data(str(tmp_path / "v.bin"), make_images(4), [0, 1, 1, 0], len(names) or 3, class_names=names)
        assert log.open_validation_data(config, training).labels.tolist() == expected
    write_data(str(tmp_path / "v.bin"), make_images(4), [0, 1, 1, 0], 2, class_names=["a", "horse"])
    with pytest.raises(UserError, match="v.bin: its class horse is none of those of .*t.bin; a, b, c are"):
        log.open_validation_data(config, training)
    log.open_validation_data(dataclasses.replace(config, class_cond=False), training)  # whose classes mean nothing


def test_a_folder_has_the_names_and_the_checksum_of_its_file(tmp_path, capsys) -> None:
    put(tmp_path / "in", of_colors("b/1.png", "a/1.png", "a/2.png"))
    prepare(capsys, "--data_dir", tmp_path / "in", "--output_name", tmp_path / "o.bin")
    config = Config(image_size=(8, 8), in_channels=3)
    folder, file = pictures.open_pictures(str(tmp_path / "in"), config), open_data(str(tmp_path / "o.bin"))
    assert folder.crc == file.crc and folder.class_names == file.class_names == ["a", "b"]


@pytest.mark.parametrize("end", [".bin", ".pt", ".safetensors"])
def test_a_model_knows_the_names_of_its_classes(tmp_path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """A run that starts from a model takes its classes by name; labels were compared by position."""
    monkeypatch.chdir(tmp_path)
    write_data("t.bin", make_images(8), np.arange(8) % 3, 3, class_names=["a", "b", "c"])
    assert twin.run([*SMALL_RUN, *ON_THE_CPU, *WITH_CLASSES, "--data_file", "t.bin"]) == 0
    trained = twin.read_model("out/model_0000001.bin")
    assert trained.class_names == ("a", "b", "c")
    raw = Path("out/model_0000001.bin").read_bytes()
    assert struct.unpack("<i", raw[476:480]) == (8,) and raw.endswith(b"a\nb\nc\0\0\0")
    write_model(f"m{end}", trained)
    file = twin.read_model(f"m{end}")
    assert file.class_names == ("a", "b", "c") and np.array_equal(file.weights, trained.weights)

    write_data("u.bin", make_images(8), np.arange(8) % 2, 2, class_names=["c", "b"])
    start = dict(device="cpu", batch_size=2, class_cond=True, output_dir="other")
    config, data, _ = twin.prepare_run({"init": f"m{end}", "data_file": "u.bin"} | start)
    assert data.labels.tolist() == [2, 1] * 4 and data.num_classes == config.num_classes == 3
    write_data("u.bin", make_images(8), np.arange(8) % 2, 2, class_names=["c", "d"])
    config, data, _ = twin.prepare_run({"init": f"m{end}", "data_file": "u.bin"} | start)  # test_init.py: what such a run begins with
    assert data.labels.tolist() == [0, 1] * 4 and data.num_classes == config.num_classes == 2

    write_model(f"n{end}", dataclasses.replace(trained, class_names=()))
    assert twin.read_model(f"n{end}").class_names == ()
    if end == ".bin":
        assert Path("n.bin").read_bytes() == seal_model(with_slot(raw[:-8], 119, 0))
        for damaged in (with_slot(raw, 119, 12), with_slot(raw, 119, -4), with_slot(raw, 119, 0), raw[:-8] + b"a\na\nc\0\0\0", raw[:-4]):
            Path("bad.bin").write_bytes(seal_model(damaged))
            with pytest.raises(UserError, match="bad.bin"):
                twin.read_model("bad.bin")


def test_a_model_keeps_the_names_of_all_its_classes_or_none(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --num_classes 5 three names ended the run at its first checkpoint."""
    monkeypatch.chdir(tmp_path)
    write_data("t.bin", make_images(8), np.arange(8) % 3, 3, class_names=["a", "b", "c"])
    for classes, kept in {5: (), 3: ("a", "b", "c")}.items():
        words = [*SMALL_RUN, *ON_THE_CPU, *WITH_CLASSES, "--data_file", "t.bin", "--num_classes", str(classes)]
        assert twin.run([*words, "--output_dir", f"out{classes}"]) == 0
        assert twin.run([*words, "--init_model_only", "True", "--init_model_filename", f"init{classes}.bin"]) == 0
        for path in (f"out{classes}/model_0000001.bin", f"init{classes}.bin"):
            file = twin.read_model(path)
            assert file.class_names == kept and file.config.num_classes == classes
    assert twin.run(["--resume_checkpoint", "out5/model_0000001.bin", "--max_steps", "2", "--device", "cpu", "--output_dir", "on"]) == 0
    assert twin.read_model("on/model_0000002.bin").class_names == ()


def test_train_unet_compares_classes_by_name(run: Callable, refused: Callable, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation data, a run from a model, a resumed run and images to change: each counted classes by position."""
    monkeypatch.chdir(tmp_path)
    images, names = make_images(8), ["a", "Äpfel", "c"]
    labels = np.array([2, 0, 1, 2, 0, 1, 2, 0])
    words = [*SMALL_RUN, *WITH_CLASSES, "--val_interval", 1, "--val_data_file", "v.bin"]
    write_data("t.bin", images, np.arange(8) % 3, 3, class_names=names)

    def val_loss(folder: str, of_file: list[str], *more: object) -> str:
        """With validation data whose file numbers the classes as of_file does; []: it has no names."""
        by_name = [(of_file or names).index(names[label]) for label in labels]
        write_data("v.bin", images, by_name, 3, class_names=of_file)
        run(flags(words, *more, "--output_dir", folder))
        with open(f"{folder}/log.csv") as log:
            return list(csv.DictReader(log))[-1]["val_loss"]

    first = val_loss("out", names, "--data_file", "t.bin")
    assert first == val_loss("position", [], "--data_file", "t.bin") == val_loss("order", ["c", "a", "Äpfel"], "--data_file", "t.bin")
    raw, model = Path("out/model_0000001.bin").read_bytes(), "order/model_0000001.bin"
    assert struct.unpack("<i", raw[476:480]) == (12,) and raw.endswith("a\nÄpfel\nc\0\0".encode())
    assert twin.read_model(model).class_names == tuple(names)

    # A model is started from, or goes on, with data that numbers its classes in another way.
    write_data("other.bin", images, [["c", "a", "Äpfel"].index(names[k]) for k in np.arange(8) % 3], 3, class_names=["c", "a", "Äpfel"])
    started = [val_loss(f"init_{data}", names, "--init", model, "--data_file", f"{data}.bin") for data in ("t", "other")]
    assert started[0] == started[1]
    more = ["--resume_checkpoint", model, "--max_steps", 2]
    resumed = [val_loss(f"on_{data}", names, *more, "--data_file", f"{data}.bin") for data in ("t", "other")]
    assert resumed[0] == resumed[1] and twin.read_model("on_other/model_0000002.bin").class_names == tuple(names)
    for folder, data in ("two", "other"), ("one", "t"):  # samples of class a are drawn from images of class a
        run(["--sample", 2, "--init", model, "--start_from", f"{data}.bin", "--timestep_respacing", 2, "--output", f"{folder}.bin"])
    assert Path("one.bin").read_bytes() == Path("two.bin").read_bytes()

    write_data("strange.bin", images, np.arange(8) % 2, 2, class_names=["a", "horse"])
    sentence = "its class horse is none of those of"
    refused(flags(words, "--data_file", "t.bin", "--val_data_file", "strange.bin", "--output_dir", "x"), "strange.bin", sentence, "t.bin")
    refused(flags(words, more, "--data_file", "strange.bin", "--output_dir", "x"), "strange.bin", sentence, model)
    run([*words, "--data_file", "t.bin", "--num_classes", 5, "--output_dir", "five"])
    assert twin.read_model("five/model_0000001.bin").class_names == ()
    for damaged in (with_slot(raw, 119, 16), with_slot(raw, 119, -4), with_slot(raw, 119, 0), raw[:-12] + b"a\na\nc".ljust(12, b"\0"), raw[:-4]):
        Path("bad.bin").write_bytes(seal_model(damaged))
        refused([*words, "--init", "bad.bin", "--data_file", "t.bin", "--output_dir", "x"], "bad.bin")
    data = Path("t.bin").read_bytes()
    for damaged in (
        with_slot(data, 12, 4),
        with_slot(data, 12, 7),
        data[:-12] + b"a\na\nc".ljust(12, b"\0"),
        data[:-12] + b"a\n\nc".ljust(12, b"\0"),
    ):
        Path("bad.bin").write_bytes(seal_data(damaged))
        refused([*words, "--data_file", "bad.bin", "--output_dir", "x"], "bad.bin")


def make_named_model(path: str, **more: object) -> None:
    config = make_config(dict(preset="fashion32", image_size=(8, 8), num_channels=32, channel_mult=(1, 1), attention_resolutions=(4,), num_classes=3,
                              class_cond=True, use_scale_shift_norm=True) | more)  # fmt: skip
    write_model(path, ModelFile(config, random_weights(config), class_names=("cat", "dog", "barn owl")))


def drawn(run: Callable, count: int, model: str, *more: object) -> list[Data]:
    """The data files of the same samples by both programs and both back ends of generate.py."""
    words = flags("--timestep_respacing 2 --sample", count, "--init", model, *more)
    run([*words, "--output", "cpp.bin"])
    assert twin.run([*words, *ON_THE_CPU, "--output", "twin.bin"]) == 0
    for backend in ("torch", "native"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(generate.BACKENDS, "native", lambda *asked: generate.run_native(binary_path("cpu"), *asked)[0])
            words = flags("--steps 2 --device cpu --num_samples", count, "--model_filename", model, *more)
            generate.run([*words, "--backend", backend, "--output", f"{backend}.bin"])
    return [open_data(f"{name}.bin") for name in ("cpp", "twin", "torch", "native")]


def test_samples_hold_their_classes(run: Callable, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In data files, with their names, as they were drawn: all in turns, or --classes by number or name. A model can be trained on them."""
    monkeypatch.chdir(tmp_path)
    make_named_model("m.bin")
    for classes, labels in {"": [0, 1, 2, 0, 1], "2,0": [2, 0, 2, 0, 2], "barn owl,cat,1": [2, 0, 1, 2, 0]}.items():
        for data in drawn(run, 5, "m.bin", *(["--classes", classes] if classes else [])):
            assert data.labels.tolist() == labels and data.num_classes == 3 and data.class_names == ["cat", "dog", "barn owl"]
    assert np.array_equal(open_data("cpp.bin").images, open_data("native.bin").images)
    run([*SMALL_RUN, *WITH_CLASSES, "--data_file", "cpp.bin"])


def test_samples_without_classes_hold_no_labels(run: Callable, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model without classes, and of images that say nothing of a class (start.bin) by one that has learnt to do without."""
    monkeypatch.chdir(tmp_path)
    config = make_config(dict(preset="fashion32", image_size=(8, 8), num_channels=32, channel_mult=(1, 1), attention_resolutions=(4,)))
    write_model("plain.bin", ModelFile(config, random_weights(config)))
    for data in drawn(run, 2, "plain.bin"):
        assert data.labels is None and not data.class_names
    make_named_model("m.bin", class_dropout=0.1)
    write_data("start.bin", make_images(2))
    words = flags("--sample 2 --init m.bin --timestep_respacing 2 --start_from start.bin")
    run([*words, "--output", "cpp.bin"])
    assert twin.run([*words, *ON_THE_CPU, "--output", "twin.bin"]) == 0
    assert open_data("cpp.bin").labels is None and open_data("twin.bin").labels is None


def test_names_that_are_no_classes(run: Callable, refused: Callable, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both programs say the same."""
    monkeypatch.chdir(tmp_path)
    make_named_model("m.bin")
    named = twin.read_model("m.bin")
    write_model("n.bin", dataclasses.replace(named, class_names=()))
    write_data("t.bin", make_images(8), np.arange(8) % 2, 2, class_names=["a", "b"])
    none = "is none of this model's classes"
    for model, classes, told in (
        ("m.bin", "cat,owl", f"--classes owl: {none} (cat, dog, barn owl)"),
        ("m.bin", "cat,", f"--classes : {none} (cat, dog, barn owl)"),
        ("n.bin", "cat", f"--classes cat: {none} (they have no names; use their numbers)"),
    ):
        words = flags("--sample 1 --timestep_respacing 2", "--init", model, "--classes", classes)
        refused(words, told)
        with pytest.raises(UserError, match=re.escape(told)):
            twin.run([*words, *ON_THE_CPU])
        with pytest.raises(UserError, match=re.escape(told)):
            generate.run(flags("--num_samples 1 --steps 2 --device cpu --model_filename", model, "--classes", classes))
    words = flags(SMALL_RUN, WITH_CLASSES, "--data_file t.bin --sample_interval 1 --num_samples 4 --timestep_respacing 2")
    refused([*words, "--classes", "cat"], f"--classes cat: {none} (a, b)")
    with pytest.raises(UserError, match=re.escape(f"--classes cat: {none} (a, b)")):
        twin.run([*words, "--classes", "cat", *ON_THE_CPU])
    run([*words, "--classes", "b,0,b,a", "--output_dir", "cpp"])  # in a run's grids
    assert twin.run([*words, "--classes", "b,0,b,a", *ON_THE_CPU, "--output_dir", "twin"]) == 0
    assert shown_run(tmp_path / "cpp")["classes"] == [["b", "a"], ["b", "a"]]
    run(flags(words, "--num_samples 5 --output_dir all"))
    assert shown_run(tmp_path / "all")["classes"] == [["a", "b", "a"], ["b", "a"]]
    run(flags(words, "--class_cond False --class_dropout 0 --output_dir without"))
    assert shown_run(tmp_path / "without")["classes"] == []


def test_names_of_classes_that_are_no_list(tmp_path) -> None:
    """In files of PyTorch's, which hold anything."""
    import torch

    config = make_config(
        dict(preset="fashion32", image_size=(8, 8), num_channels=32, channel_mult=(1,), attention_resolutions=(), num_classes=2, class_cond=True)
    )
    write_model(str(tmp_path / "m.pt"), ModelFile(config, random_weights(config), class_names=("a", "b")))
    saved = torch.load(tmp_path / "m.pt")
    assert saved["class_names"] == ["a", "b"]
    for names in ("ab", ["a"], ["a", 1], {"a": 1}, ["a", "b", "c"], ["a", "a"], [["a"], ["b"]]):
        torch.save(saved | {"class_names": names}, tmp_path / "bad.pt")
        with pytest.raises(UserError, match="bad.pt"):
            twin.read_model(str(tmp_path / "bad.pt"))


# ----------------------------------------------------------------------------------------------------------------------
# A6: colour profiles


def icc(space: bytes, **tags: bytes) -> bytes:
    """A colour profile for displays (ICC.1:2010) with these tags."""
    start, body = 128 + 4 + 12 * len(tags), b""
    table = struct.pack(">I", len(tags))
    for name, content in tags.items():
        table += name.encode() + struct.pack(">II", start + len(body), len(content))
        body += content + bytes(-len(content) % 4)
    header = struct.pack(">I4sI4s4s4s", start + len(body), b"lcms", 0x04000000, b"mntr", space, b"XYZ ")
    header += struct.pack(">6H4s", 2024, 1, 1, 0, 0, 0, b"acsp").ljust(32, b"\0") + bytes(12)
    header += struct.pack(">3i", *(round(x * 65536) for x in (0.9642, 1, 0.8249)))  # D50
    return header.ljust(128, b"\0") + table + body


def xyz(*values: float) -> bytes:
    return b"XYZ " + bytes(4) + struct.pack(">3i", *(round(x * 65536) for x in values))


def curve(kind: int, *values: float) -> bytes:
    """A parametric curve; kind 0: a power."""
    return b"para" + bytes(4) + struct.pack(">HH", kind, 0) + struct.pack(f">{len(values)}i", *(round(x * 65536) for x in values))


WHITE_POINT = dict(wtpt=xyz(0.9642, 1, 0.8249))
SRGB_CURVE = curve(3, 2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)
PRIMARIES = dict(rXYZ=xyz(0.51512, 0.2412, -0.00105), gXYZ=xyz(0.29198, 0.69225, 0.04189), bXYZ=xyz(0.1571, 0.06657, 0.78407))  # P3's, seen in D50
DISPLAY_P3 = icc(b"RGB ", **WHITE_POINT, **PRIMARIES, **dict.fromkeys(("rTRC", "gTRC", "bTRC"), SRGB_CURVE))
LINEAR_GREY = icc(b"GRAY", **WHITE_POINT, kTRC=curve(0, 1.0))
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def test_colours_are_what_the_profile_says(tmp_path, capsys) -> None:
    """Profiles were ignored: (60, 200, 90) of Display P3 stayed so. In sRGB it is (0, 203, 73)."""
    light = round(255 * (1.055 * (55 / 255) ** (1 / 2.4) - 0.055))  # of grey whose values are light itself: 128
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([60, 200, 90])
    deep = Image.fromarray(np.full((8, 8), 55 * 257, np.uint16))
    files = {
        "a_rgb.png": encoded((60, 200, 90), icc_profile=DISPLAY_P3),
        "b_jpeg.jpg": encoded((60, 200, 90), "JPEG", icc_profile=DISPLAY_P3, quality=100, subsampling=0),
        "c_clear.png": encoded((60, 200, 90, 0), mode="RGBA", icc_profile=DISPLAY_P3),
        "d_half.png": encoded((60, 200, 90, 128), mode="RGBA", icc_profile=DISPLAY_P3),
        "e_palette.png": b"",
        "f_grey.png": encoded(55, mode="L", icc_profile=LINEAR_GREY),
        "g_deep.png": b"",
        "h_grey_and_clear.png": encoded((55, 255), mode="LA", icc_profile=LINEAR_GREY),
        "i_srgb.png": encoded((60, 200, 90), icc_profile=SRGB),
        "j_grey_in_rgb.png": encoded(55, mode="L", icc_profile=DISPLAY_P3),
    }
    put(tmp_path / "in", files)
    palette.save(tmp_path / "in/e_palette.png", icc_profile=DISPLAY_P3)
    deep.save(tmp_path / "in/g_deep.png", icc_profile=LINEAR_GREY)
    said = prepare(capsys, "--data_dir", tmp_path / "in", "--output_name", tmp_path / "o.bin")
    green = (0, 203, 73)
    half = [round(255 - 128 / 255 * (255 - value)) for value in green]
    expected = [green, green, (255,) * 3, half, green, (light,) * 3, (light,) * 3, (light,) * 3, (60, 200, 90), (55,) * 3]
    found = open_data(str(tmp_path / "o.bin")).images[:, :, 4, 4].astype(int)
    assert np.abs(found - expected).max() <= 2 and np.abs(np.delete(found - expected, 1, 0)).max() <= 1, found.tolist()
    assert found[8].tolist() == [60, 200, 90] and "largest value" in said and "profiles" not in said  # of the deep one: 14135


def test_broken_profiles_are_none_and_counted(tmp_path, capsys) -> None:
    """A profile that is no profile, one that is cut off, and one of grey in a picture in colour."""
    bad = [b"no profile", DISPLAY_P3[:200], LINEAR_GREY]
    put(tmp_path / "in", {f"{k}.png": encoded((60, 200, 90), icc_profile=profile) for k, profile in enumerate(bad)})
    said = prepare(capsys, "--data_dir", tmp_path / "in", "--output_name", tmp_path / "o.bin")
    assert open_data(str(tmp_path / "o.bin")).images[:, :, 0, 0].tolist() == [[60, 200, 90]] * 3
    assert said == "prepare_data: colour profiles that are broken or don't fit, so that sRGB was taken: 3\n"


# ----------------------------------------------------------------------------------------------------------------------
# A7: which value is white


def deep_png(path: Path, *values: int) -> Path:
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(np.array([values], np.uint16)).save(path)
    return path


def test_integers_without_a_range_are_refused_by_name(tmp_path, capsys) -> None:
    """A 32-bit TIFF of 200 became 1: its white was taken for 65535."""
    deep_png(tmp_path / "in/fine.png", 0, 65535)
    Image.fromarray(np.array([[0, 200]], np.int32)).save(tmp_path / "in/int32.tiff")
    given = ["--data_dir", tmp_path / "in", "--output_name", tmp_path / "o.bin", "--channels", 1]
    said = prepare(capsys, *given, size="1x2")
    assert "int32.tiff: its grey values are integers of 32 bits, or with a sign" in said and "left out: 1 picture that can't be used" in said
    assert open_data(str(tmp_path / "o.bin")).images.tolist() == [[[[0, 255]]]]
    (tmp_path / "in/fine.png").unlink()
    prepare(capsys, *given, "--white", 250, size="1x2")  # now something says it
    assert open_data(str(tmp_path / "o.bin")).images.tolist() == [[[[0, 204]]]]


def test_white_is_said_where_values_are_far_below_it(tmp_path, capsys) -> None:
    """12-bit data in a 16-bit PNG, white 4095, became 16 of 255, and nobody was told."""
    deep_png(tmp_path / "in/a.png", 0, 4000)
    deep_png(tmp_path / "in/b.png", 4095, 2000)
    given = ["--data_dir", tmp_path / "in", "--output_name", tmp_path / "o.bin", "--channels", 1]
    said = prepare(capsys, *given, size="1x2")
    assert said.count("\n") == 1 and "largest value in 2 pictures of 16-bit grey is 4095" in said and "--white 4095" in said
    assert open_data(str(tmp_path / "o.bin")).images.max() == 16
    assert prepare(capsys, *given, "--white", 4095, size="1x2") == ""
    assert open_data(str(tmp_path / "o.bin")).images.ravel().tolist() == [0, 249, 255, 125]
    said = prepare(capsys, *given, "--white", 4000, size="1x2")
    assert "b.png: its grey values are from 2000 to 4095, not from 0 to 4000" in said
    deep_png(tmp_path / "in/c.png", 0, 16384)
    assert prepare(capsys, *given, size="1x2") == ""
    put(tmp_path / "flat", of_colors("a.png"))
    told = prepare(capsys, "--data_dir", tmp_path / "flat", "--output_name", tmp_path / "o.bin", "--white", 4095)
    assert told.count("\n") == 1 and "--white 4095: changes nothing" in told
    for words in (["--white", 0], ["--white", -1], ["--white", "x"]):
        assert "--white" in prepare(capsys, *given, *words, code=1)
    assert "--white" in prepare(capsys, "--idx", "x", "--output_name", tmp_path / "o.bin", "--white", 9, code=1)


def test_white_that_the_file_says(tmp_path, capsys) -> None:
    """A PGM names its white, and a TIFF of 12 bits can hold no more than 4095. (The latter became 16 of 255.)"""
    values = struct.pack(">2H", 0, 1000)
    tags = [
        (256, 3, 1, 2),
        (257, 3, 1, 1),
        (258, 3, 1, 12),
        (259, 3, 1, 1),
        (262, 3, 1, 1),
        (273, 4, 1, 8),
        (277, 3, 1, 1),
        (278, 3, 1, 1),
        (279, 4, 1, 3),
    ]
    twelve_bits = b"II*\0" + struct.pack("<I", 12) + bytes([0x00, 0x0F, 0xFF, 0])  # 0 and 4095
    twelve_bits += struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4)
    put(tmp_path / "in", {"a.pgm": b"P5 2 1 1000\n" + values, "b.tif": twelve_bits})
    said = prepare(capsys, "--data_dir", tmp_path / "in", "--output_name", tmp_path / "o.bin", "--channels", 1, size="1x2")
    assert open_data(str(tmp_path / "o.bin")).images.reshape(-1, 2).tolist() == [[0, 255]] * 2 and said == ""


# ----------------------------------------------------------------------------------------------------------------------
# B1: which files are pictures


KINDS = {
    ".jfif": "JPEG", ".jpe": "JPEG", ".dib": "DIB", ".tga": "TGA", ".apng": "PNG", ".pbm": "PPM", ".pnm": "PPM", ".ico": "ICO", ".pcx": "PCX",
    ".sgi": "SGI", ".bmp": "BMP", ".png": "PNG", ".tiff": "TIFF", ".gif": "GIF", ".PPM": "PPM", ".mpo": "MPO", ".dds": "DDS", ".icns": "ICNS",
}  # fmt: skip
KINDS |= {
    end: form
    for end, form, feature in ((".avif", "AVIF", "avif"), (".jp2", "JPEG2000", "jpg_2000"), (".webp", "WEBP", "webp"))
    if features.check(feature)
}


def test_every_raster_format_is_taken(tmp_path, capsys) -> None:
    """Of 15 files that Pillow wrote, 3 were taken: others were left out by their names, in silence."""
    files = {f"{k:02}{end}": encoded((255, 255, 255), form, (32, 32)) for k, (end, form) in enumerate(KINDS.items())}
    if "QOI" in Image.SAVE:
        files["99.qoi"] = encoded((255, 255, 255), "QOI", (32, 32))
    put(
        tmp_path / "in",
        files | {"a.eps": b"%!PS-Adobe-3.0 EPSF-3.0\n", "b.wmf": b"", "c.pdf": b"%PDF-1.4", "d.heic": b"", "e.pdf": b"", "f": b"", "g.h5": b""},
    )
    said = prepare(capsys, "--data_dir", tmp_path / "in", "--output_name", tmp_path / "o.bin")
    assert len(open_data(str(tmp_path / "o.bin")).images) == len(files)
    assert said.count("\n") == 1 and "left out: 7 files of other kinds (.pdf 2, " in said
    assert all(f"{end} 1" in said for end in (".eps", ".wmf", ".heic", "without an end")) and "1 more" in said


def test_further_frames_are_counted(tmp_path, capsys) -> None:
    """Of GIF, TIFF, WebP and APNG the first frame is taken, and nothing said so."""
    (tmp_path / "in").mkdir()
    frames = [Image.new("RGB", (16, 16), color) for color in (RED, GREEN, BLUE)]
    ends = ["gif", "tiff", "png", *["webp"] * features.check("webp")]
    for end in ends:
        frames[0].save(tmp_path / f"in/a.{end}", save_all=True, append_images=frames[1:], **({"lossless": True} if end == "webp" else {}))
    said = prepare(capsys, "--data_dir", tmp_path / "in", "--output_name", tmp_path / "o.bin")
    assert said == f"prepare_data: left out: {2 * len(ends)} further frames of {len(ends)} pictures\n"
    assert (open_data(str(tmp_path / "o.bin")).images[:, :, 0, 0] == RED).all()
    whole = (tmp_path / "in/a.tiff").read_bytes()
    second = struct.unpack(
        "<I", whole[(first := struct.unpack("<I", whole[4:8])[0]) + 2 + 12 * struct.unpack("<H", whole[first : first + 2])[0] :][:4]
    )[0]
    (tmp_path / "in/a.tiff").write_bytes(whole[:second] + b"\xff" * 40)  # what follows the first frame is damaged
    prepare(capsys, "--data_dir", tmp_path / "in", "--output_name", tmp_path / "o.bin")
    assert len(open_data(str(tmp_path / "o.bin")).images) == len(ends)


def test_a_document_is_no_picture_whatever_it_is_called(tmp_path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """An EPS called .png was given to Ghostscript."""
    from PIL import EpsImagePlugin

    def never(*_: object, **__: object) -> None:
        raise AssertionError("Ghostscript was called")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", never)
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
    put(tmp_path / "in", of_colors("a.png") | {"b.png": eps})
    said = prepare(capsys, "--data_dir", tmp_path / "in", "--output_name", tmp_path / "o.bin")
    assert "b.png: Pillow cannot identify it" in said


# ----------------------------------------------------------------------------------------------------------------------
# B2, A2: a folder's data file, and how many channels its images have


@pytest.mark.parametrize(
    ("folder", "size", "written"),
    [
        ("pets", "8", "pets_8x8x3.bin"),
        ("pets//", "6x8", "pets_6x8x3.bin"),
        ("sub/../pets", "8", "sub/../pets_8x8x3.bin"),
        ("pets/.", "8", "{}/pets_8x8x3.bin"),
        ("pets/sub/..", "8", "{}/pets_8x8x3.bin"),
        ("link/..", "8", "{}/pets_8x8x3.bin"),
    ],
)
def test_the_file_of_a_folder_lies_beside_it(tmp_path, capsys, monkeypatch: pytest.MonkeyPatch, folder: str, size: str, written: str) -> None:
    """As C++ looks for it; one of another size replaced pets.bin."""
    put(tmp_path / "pets", of_colors("a.png", "sub/b.png"))
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to("pets/sub")
    monkeypatch.chdir(tmp_path)
    assert prepare_data.main(["--data_dir", folder, "--image_size", size]) == 0
    written = written.format(os.path.realpath(tmp_path))
    assert f"wrote {written}: " in capsys.readouterr().out
    assert sorted(os.listdir(tmp_path)) == sorted(["link", "pets", "sub", os.path.basename(written)])
    prepare(capsys, "--data_dir", folder, size=size)  # a data file is replaced
    Path(written).write_bytes(b"my notes")
    assert f"{written}: is there and is no data file" in prepare(capsys, "--data_dir", folder, size=size, code=1)
    assert Path(written).read_bytes() == b"my notes"


def test_the_root_has_no_file_beside_it() -> None:
    for folder in "/", "//", "/.":
        with pytest.raises(UserError, match="--output_name"):
            prepare_data.data_file_beside(folder, (8, 8), 3)


GREY = {
    "1.png": encoded(1, mode="1"),
    "L.jpg": encoded(9, "JPEG", mode="L"),
    "LA.png": encoded((9, 99), mode="LA"),
    "I;16.png": encoded(65535, mode="I;16"),
    "I;16.tif": encoded(65535, "TIFF", mode="I;16"),
    "F.tif": encoded(0.5, "TIFF", mode="F"),
    "sub/broken.png": b"no picture",
}
GREY_TOLD = "prepare_data: all pictures are grey, so images have 1 channel; "


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_grey_pictures_have_one_channel(tmp_path, capsys, kind: str) -> None:
    """They had three equal ones. One picture in colours, or with a palette, makes it three for all."""
    palette = encoded(0, mode="P")
    for name, more, words, channels in (
        ("grey", {}, [], 1),
        ("rgb", {}, ["--channels", 3], 3),
        ("coloured", {"M.png": encoded(RED)}, [], 3),
        ("palette", {"M.png": palette}, [], 3),
        ("made_grey", {"M.png": encoded(RED)}, ["--channels", 1], 1),
    ):
        if kind == "folder":
            source = ["--data_dir", put(tmp_path / name, GREY | more)]
        else:
            source = ["--zip", packed(tmp_path / f"{name}.zip", GREY | more)]
        said = prepare(capsys, *source, *words, "--output_name", tmp_path / "o.bin")
        assert open_data(str(tmp_path / "o.bin")).images.shape == (len(GREY) + len(more) - 1, channels, 8, 8)
        assert (GREY_TOLD in said) == (name == "grey") and "broken.png" in said


def test_channels_of_pairs_and_latents(tmp_path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of pairs the images may be grey; an autoencoder takes RGB."""
    grey = put(tmp_path / "a", {"1.png": encoded(9, mode="L")})
    others = put(tmp_path / "b", {"1.png": encoded(9, mode="L")})
    names = [tmp_path / "a.bin", "--cond_output_name", tmp_path / "b.bin"]
    assert GREY_TOLD in prepare(capsys, "--data_dir", grey, "--cond_dir", others, "--output_name", *names, "--folder_checksum", 7)
    assert [open_data(str(tmp_path / name)).images.shape[1] for name in ("a.bin", "b.bin")] == [1, 3]
    assert [np.fromfile(tmp_path / name, "<u4", 14)[13] for name in ("a.bin", "b.bin")] == [7, 0]
    monkeypatch.setattr(prepare_data, "encoded", lambda images, vae: images)
    assert prepare(capsys, "--data_dir", grey, "--output_name", tmp_path / "c.bin", "--encode", tmp_path) == ""
    assert open_data(str(tmp_path / "c.bin")).images.shape[1] == 3


def test_the_folder_checksum_is_no_part_of_the_content(tmp_path, capsys) -> None:
    """A picture that was touched, and not changed, leaves the data the same, so that a run goes on with it."""
    put(tmp_path / "pets", of_colors("a.png", "b.png"))
    headers = []
    for words in [], ["--folder_checksum", 0], ["--folder_checksum", 1], ["--folder_checksum", 2**32 - 1]:
        prepare(capsys, "--data_dir", tmp_path / "pets", *words)
        headers.append(np.fromfile(tmp_path / "pets_8x8x3.bin", "<u4", 256))
        assert open_data(str(tmp_path / "pets_8x8x3.bin")).crc == headers[-1][8]
        raw = (tmp_path / "pets_8x8x3.bin").read_bytes()
        assert headers[-1][8] == zlib.crc32(raw[:32] + bytes(4) + raw[36:52] + bytes(4) + raw[56:1024]) and seal_data(raw) == raw
    assert [header[13] for header in headers] == [0, 0, 1, 2**32 - 1]
    assert len({np.delete(header, 13).tobytes() for header in headers}) == 1
    for words in ("-1", str(2**32), "x"):
        assert "--folder_checksum" in prepare(capsys, "--data_dir", tmp_path / "pets", "--folder_checksum", words, code=1)


def test_the_twin_takes_the_channels_of_the_pictures(tmp_path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """--preset fashion32, which is for grey images, made pictures in colours grey, and others made grey ones RGB."""
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "pets", of_colors("a.png", "b.png"))
    put(tmp_path / "grey", {name: encoded(k, mode="L") for k, name in enumerate(("a.png", "b.png"))})
    assert twin.run([*SMALL_RUN, *ON_THE_CPU, "--data_dir", "pets"]) == 0
    assert twin.read_model("out/model_0000001.bin").config.in_channels == 3
    assert twin.run([*SMALL_RUN, *ON_THE_CPU, "--data_dir", "pets", "--in_channels", "1", "--output_dir", "one"]) == 0
    capsys.readouterr()

    def channels(folder: str, **given: object) -> int:
        config, data, _ = twin.prepare_run({"data_dir": folder, "device": "cpu", "output_dir": "new"} | given)
        prepare(capsys, "--data_dir", folder, "--channels", config.in_channels, size="x".join(map(str, config.image_size)))
        height, width = config.image_size
        assert data.crc == open_data(f"{folder}_{height}x{width}x{config.in_channels}.bin").crc
        return config.in_channels

    for given in {"preset": "fashion32"}, {"preset": "emoji64"}, {}, {"image_size": (32, 32)}, {"image_size": (28, 28)}:
        assert channels("pets", **given) == 3 and channels("grey", **given) == 1
    assert channels("pets", in_channels=1) == 1 and channels("grey", in_channels=3) == 3
    for start in "init", "resume_checkpoint":
        assert channels("grey", **{start: "out/model_0000001.bin"}) == 3 and channels("pets", **{start: "one/model_0000001.bin"}) == 1
    for folder in "none", "out":
        with pytest.raises(UserError, match=f"--data_dir {folder}: "):
            twin.prepare_run({"data_dir": folder, "device": "cpu", "output_dir": "new"})


# ----------------------------------------------------------------------------------------------------------------------
# what newcomers stumbled over


def test_files_of_the_user_are_no_files_of_a_run(run: Callable, refused: Callable, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page called index.html and a photograph called samples_0000001.png, in the folder of a new run, were replaced."""
    monkeypatch.chdir(tmp_path)
    write_data("t.bin", make_images(4))
    words = [*SMALL_RUN, "--data_file", "t.bin"]
    for name, content in {"index.html": b"<!doctype html>my gallery", "samples_0000001.png": encoded(RED)}.items():
        put(tmp_path / "out", {name: content})
        refused(words, f"out/{name}", "is no run's")
        Path(f"out/{name}").unlink()
    run(words)
    for name in "log.csv", "model_0000001.bin":
        Path(f"out/{name}").unlink()
    run(words)  # the page and the grids of an older run may go
    refused([*words, "--sample", 0, "--output_dir", "x"], "--sample 0")
    put(tmp_path / "pets", of_colors("a.png"))
    refused([*SMALL_RUN, "--data_dir", "pets", "--output_dir", "pets/../pets"], "--data_dir pets", "--output_dir")


def test_a_run_says_which_classes_it_has(run: Callable, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names and numbers; that data has fewer than the model; that data has some, or numbers, which the model does not learn."""
    monkeypatch.chdir(tmp_path)
    write_data("t.bin", make_images(6), np.arange(6) % 3, 3, np.zeros((6, 2)), ["n", "m"], class_names=["a", "Äpfel", "c d"])
    words = flags(SMALL_RUN, "--data_file", "t.bin")

    def lines(*more: object) -> str:
        return run([*words, *more, "--output_dir", f"out{len(os.listdir())}"]).out

    assert "\nclasses: 3: 0 a, 1 Äpfel, 2 c d; --class_dropout 0; " in lines(*WITH_CLASSES)
    assert "\nclasses: 5: 0 a, 1 Äpfel, 2 c d, of which the data has 3; " in lines(*WITH_CLASSES, "--num_classes", 5)
    told = lines()
    assert "\nclasses: the data has 3, which this model does not learn; --class_cond True does\n" in told
    assert "\nnumbers: the data has 2 an image, which this model does not learn; --cond_dim 2 does\n" in told
    assert "does not learn" not in lines("--class_cond", "False", "--cond_dim", 2)


def test_a_resumed_run_in_a_new_folder_begins_its_mean_anew(run: Callable, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses that its log does not have counted as 0."""
    monkeypatch.chdir(tmp_path)
    write_data("t.bin", make_images(4))
    words = flags(SMALL_RUN, "--data_file", "t.bin", "--max_steps", 20)
    run(words)
    line = run(["--resume_checkpoint", "out/model_0000020.bin", "--max_steps", 21, "--output_dir", "on", "--log_interval", 1]).out
    loss, mean = re.search(r"step 21/21 \| loss (\S+) \(mean (\S+)\)", line).groups()
    assert loss == mean


# ----------------------------------------------------------------------------------------------------------------------
# B6: faults that are none of the data


def test_old_packages_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow 9.4, Debian 12's: "skipped 56 of 56 images as broken"."""
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.4.0" if name == "pillow" else real(name))
    with pytest.raises(UserError, match=r"Python's package pillow is of version 9.4.0, and 10.1 or newer is needed; install it with `.*`"):
        program.need_packages(program.PREPARING)
    for version, is_old in {"10.0.1": True, "10.1.0": False, "10.1": False, "13.0.0.dev0": False, "9": True, "11": False}.items():
        monkeypatch.setattr(importlib.metadata, "version", lambda _, version=version: version)
        assert bool(program.old_version("PIL")) == is_old, version

    def unknown(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", unknown)
    program.need_packages(program.PREPARING)
    needed = dict(re.findall(r"^(\w+)>=([\d.]+)", (ROOT / "requirements.txt").read_text(), re.M))
    assert all(needed[name] == version for name, version in program.NEEDED.values())


def test_an_old_pillow_ends_the_program_before_work(tmp_path) -> None:
    """As the user sees it: a sentence, and no picture is blamed."""
    put(tmp_path / "in", of_colors("a.png"))
    old = put(tmp_path / "site", {"pillow-9.4.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: pillow\nVersion: 9.4.0\n"})
    command = [sys.executable, ROOT / "prepare_data.py", "--data_dir", tmp_path / "in", "--output_name", tmp_path / "o.bin"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(old)})
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "pillow is of version 9.4.0" in done.stderr, done.stderr
    assert not (tmp_path / "o.bin").exists()


@pytest.mark.parametrize("error", [AttributeError, ImportError, NameError])
def test_a_fault_of_the_environment_is_not_one_of_the_picture(tmp_path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    """Such as the attribute that an old Pillow lacks: each picture was called broken."""

    def fail(*_: object, **__: object) -> None:
        raise error("has_transparency_data")

    put(tmp_path / "in", of_colors("a.png"))
    monkeypatch.setattr(pictures, "flat_image", fail)
    with pytest.raises(error):
        prepare_data.main(["--data_dir", str(tmp_path / "in"), "--output_name", str(tmp_path / "o.bin")])
    assert os.listdir(tmp_path) == ["in"]


def test_a_picture_for_which_memory_is_short_ends_the_program(tmp_path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was called broken, and others took its place."""

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    put(tmp_path / "in", of_colors("a.png", "b.png"))
    monkeypatch.setattr(pictures, "flat_image", fail)
    said = prepare(capsys, "--data_dir", tmp_path / "in", "--output_name", tmp_path / "o.bin", code=1)
    assert said.count("\n") == 1 and "a.png: needs more memory than is free" in said
    monkeypatch.setattr(np, "load", fail)
    np.save(tmp_path / "v.npy", np.zeros(2))
    said = prepare(capsys, "--data_dir", tmp_path / "in", "--output_name", tmp_path / "o.bin", "--values", tmp_path / "v.npy", code=1)
    assert said.count("\n") == 1 and "v.npy: needs more memory than is free" in said


@pytest.mark.parametrize(("error", "told"), [(ImportError("libtiff.so.6: no such file"), "libtiff.so.6"), (MemoryError(), "the memory is full")])
def test_what_the_environment_lacks_is_a_sentence(capsys, error: Exception, told: str) -> None:
    def fail(_: list[str]) -> None:
        raise error

    assert program.run_program("prepare_data", fail) == 1
    said = capsys.readouterr().err
    assert said.startswith("prepare_data: ") and told in said and said.count("\n") == 1


def test_model_files_are_not_blamed_for_the_memory(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A .pt for which there was no memory was called damaged."""
    import torch

    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(torch, "load", fail)
    (tmp_path / "m.pt").write_bytes(b"x")
    with pytest.raises(MemoryError):
        twin.read_model(str(tmp_path / "m.pt"))


# ----------------------------------------------------------------------------------------------------------------------
# B7: an accent may be a character of its own


def test_accents_do_not_part_pairs(tmp_path, capsys) -> None:
    """ph/café.png and sk/café.png, one with e and an accent, were no pair."""
    put(tmp_path / "ph", {f"{NFC}/{NFD}.png": encoded(RED), f"{NFC}/b.png": encoded(BLUE)})
    put(tmp_path / "sk", {f"{NFD}/{NFC}.png": encoded(GREEN), f"{NFD}/b.png": encoded(BLUE)})
    given = [
        "--data_dir",
        tmp_path / "ph",
        "--cond_dir",
        tmp_path / "sk",
        "--output_name",
        tmp_path / "p.bin",
        "--cond_output_name",
        tmp_path / "s.bin",
    ]
    said = prepare(capsys, *given)
    assert "partner" not in said and len(open_data(str(tmp_path / "p.bin")).images) == 2
    colors = {tuple(a[:, 0, 0]): tuple(b[:, 0, 0]) for a, b in zip(*(open_data(str(tmp_path / name)).images for name in ("p.bin", "s.bin")))}
    assert colors == {RED: GREEN, BLUE: BLUE}
    put(tmp_path / "sk", {f"{NFD}/{NFD}.png": encoded(GREEN)})
    assert "how accents are written" in prepare(capsys, *given, code=1)


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_accents_do_not_part_pictures_from_their_lines(tmp_path, capsys, kind: str) -> None:
    files = {f"{NFD}.png": encoded(RED), f"x/{NFC} 2.png": encoded(BLUE)}
    if kind == "folder":
        source = ["--data_dir", put(tmp_path / "in", files)]
    else:
        source = ["--zip", packed(tmp_path / "in.zip", files)]
    with open(tmp_path / "t.csv", "w", newline="") as file:
        csv.writer(file).writerows([["file", "v"], [f"{NFC}.png", 1], [f"x/{NFD} 2.png", 2]])
    prepare(capsys, *source, "--values", tmp_path / "t.csv", "--output_name", tmp_path / "o.bin")
    data = open_data(str(tmp_path / "o.bin"))
    assert {tuple(image[:, 0, 0]): value for image, (value,) in zip(data.images, data.values.tolist())} == {RED: 1, BLUE: 2}
    with open(tmp_path / "t.csv", "a", newline="") as file:
        csv.writer(file).writerow([f"{NFD}.png", 3])
    assert "has two lines of" in prepare(capsys, *source, "--values", tmp_path / "t.csv", "--output_name", tmp_path / "o.bin", code=1)


def test_accents_do_not_part_a_class(tmp_path, capsys) -> None:
    put(tmp_path / "in", of_colors(f"a/{NFC}/1.png", f"b/{NFD}/1.png", "b/dog/1.png"))
    prepare(capsys, "--data_dir", tmp_path / "in", "--output_name", tmp_path / "o.bin")
    labels, names = labels_of(tmp_path / "o.bin")
    assert names == [NFC, "dog"] and sorted(labels) == [0, 0, 1]


def test_a_table_of_a_zip_of_windows(tmp_path, capsys) -> None:
    """Its lines name files with /, or with the name alone; they belonged to none."""
    packed(tmp_path / "in.zip", {"all\\cats\\1.png": encoded(RED), "all\\dogs\\2.png": encoded(BLUE)})
    (tmp_path / "t.csv").write_text("cats/1.png,1\n2.png,2\n")
    prepare(capsys, "--zip", tmp_path / "in.zip", "--values", tmp_path / "t.csv", "--output_name", tmp_path / "o.bin")
    assert open_data(str(tmp_path / "o.bin")).values.tolist() == [[1], [2]]


# ----------------------------------------------------------------------------------------------------------------------
# C: signals


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_break_into_what_tidies_up(first: signal.Signals) -> None:
    """Ctrl-C reaches prepare_data.py and ./train_unet, whose end sends a SIGTERM: a traceback of tqdm's in 3 of 8 tries."""
    code = f"""
import os, signal, time
from common import program
program.take(program.interrupt, signal.SIGINT, signal.SIGTERM)
try:
    os.kill(os.getpid(), {int(first)})
    time.sleep(5)
except KeyboardInterrupt as error:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)
    print("tidied up", program.exit_code(error))
    os.kill(os.getpid(), signal.SIGINT)  # and the user's second does not wait
    time.sleep(5)
    print("too late")
"""
    done = subprocess.run([sys.executable, "-u", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == f"tidied up {128 + first}\n" and done.returncode == 130 and "Traceback" not in done.stderr, done
