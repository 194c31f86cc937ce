"""prepare_data.py: every source, the file format, and what must not happen to the user's files."""

import gzip
import io
import json
import math
import os
import random
import shutil
import struct
import subprocess
import sys
import time
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, features

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from conftest import BUILD, TINY, binary_path, data_bytes, environment, make_images, model_name

import prepare_data
import train_unet
from common import data_files, files
from common.data_files import open_data_file, write_data
from common.files import DataError
from common.formats import read_model
from common.pictures import load_folder

ROOT = Path(__file__).resolve().parents[2]
EMOJI_FONT = "/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf"
FASHION = Path("/usr/share/datasets/fashion-mnist")
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def save(path: Path, color, size=(20, 20), mode="RGB", **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, color).save(path, **options)
    return path


def noise(path: Path, size=(40, 30)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(path)
    return path


def read_data(path: str) -> tuple[np.ndarray, np.ndarray | None, int]:
    """Images, labels or None, and how many classes there are."""
    data = open_data_file(path)
    return data.images, data.labels, data.num_classes


def convert(*arguments) -> int:
    return prepare_data.main([str(argument) for argument in arguments])


def fails(capsys, *arguments) -> str:
    """Runs a command that must end with exit code 1 and one sentence; returns the sentence."""
    assert convert(*arguments) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("prepare_data: ") and captured.err.count("\n") == 1, captured.err
    assert captured.out == ""
    return captured.err


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def repair_header(data: bytearray) -> bytes:
    """Gives a tampered header a right checksum, so that the other checks have to find the fault."""
    data[32:36] = bytes(4)
    data[32:36] = struct.pack("<I", zlib.crc32(bytes(data[:1024])))
    return bytes(data)


# ----------------------------------------------------------------------------------------------------------------------
# Folders


def test_quick_start_command_on_a_folder_with_classes(tmp_path):
    save(tmp_path / "pets/dog/b.png", GREEN)
    save(tmp_path / "pets/cat/deep/er/a.JPG", RED, quality=95)
    save(tmp_path / "pets/cat/z.png", BLUE)
    save(tmp_path / "pets/.hidden/a.png", WHITE)
    (tmp_path / "pets/notes.txt").write_text("not an image")
    command = [sys.executable, ROOT / "prepare_data.py", "--data_dir", "pets", "--output_name", "pets.bin"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    images, labels, num_classes = read_data(str(tmp_path / "pets.bin"))
    assert images.shape == (3, 3, 64, 64) and images.dtype == np.uint8 and isinstance(images, np.memmap)
    assert labels.tolist() == [0, 0, 1] and labels.dtype == np.int32 and num_classes == 2
    np.testing.assert_allclose(images.mean((2, 3)), [RED, BLUE, GREEN], atol=3)  # sorted by path: deep/er/a.JPG first
    loaded, loaded_labels, names = load_folder(str(tmp_path / "pets"), (64, 64), 3)
    assert np.array_equal(loaded, images) and np.array_equal(loaded_labels, labels) and names == ["cat", "dog"]


def test_folder_without_classes_is_grey_on_request(tmp_path):
    save(tmp_path / "in/a.png", RED)
    save(tmp_path / "in/b.png", 200, mode="L")
    assert convert("--data_dir", tmp_path / "in", "--output_name", tmp_path / "o.bin", "--channels=1") == 0
    images, labels, num_classes = read_data(str(tmp_path / "o.bin"))
    assert images.shape == (2, 1, 64, 64) and labels is None and num_classes == 0
    assert np.all(images[0] == 76) and np.all(images[1] == 200)  # ITU-R 601 luma of red
    assert load_folder(str(tmp_path / "in"), (8, 8), 1)[1:] == (None, [])


def test_images_beside_sub_folders_mean_no_labels_and_say_so(tmp_path, capsys):
    save(tmp_path / "in/a.png", RED)
    save(tmp_path / "in/cat/b.png", BLUE)
    images, labels, names = load_folder(str(tmp_path / "in"), (4, 4), 3)
    assert len(images) == 2 and labels is None and names == []
    assert capsys.readouterr().err


def test_centre_crop_to_the_aspect_ratio(tmp_path):
    picture = np.zeros((40, 100, 3), np.uint8)
    picture[:, :30], picture[:, 30:70], picture[:, 70:] = RED, GREEN, BLUE
    (tmp_path / "in").mkdir()
    Image.fromarray(picture).save(tmp_path / "in/wide.png")
    images, _, _ = load_folder(str(tmp_path / "in"), (40, 40), 3)
    assert np.all(images[0].transpose(1, 2, 0) == GREEN)  # exactly the middle square, not resampled
    images, _, _ = load_folder(str(tmp_path / "in"), (16, 40), 3)  # (height, width): the whole picture, made smaller
    assert images.shape == (1, 3, 16, 40)
    edges = images[0, :, :, [0, 20, -1]].transpose(0, 2, 1)
    assert np.all(edges == np.array([RED, GREEN, BLUE])[:, None])
    assert convert("--data_dir", tmp_path / "in", "--output_name", tmp_path / "o.bin", "--image_size", "16x40") == 0
    assert np.array_equal(read_data(str(tmp_path / "o.bin"))[0], images)


def test_resizing_is_antialiased(tmp_path):
    checkers = np.indices((128, 128)).sum(0) % 2 * 255
    (tmp_path / "in").mkdir()
    Image.fromarray(checkers.astype(np.uint8)).save(tmp_path / "in/a.png")
    images, _, _ = load_folder(str(tmp_path / "in"), (32, 32), 1)
    assert np.abs(images.astype(int) - 127.5).max() < 4  # picking pixels would give 0 or 255


def test_transparent_pictures_go_on_white(tmp_path):
    save(tmp_path / "in/a_rgba.png", (255, 0, 0, 0), mode="RGBA")
    save(tmp_path / "in/b_half.png", (0, 0, 0, 128), mode="RGBA")
    save(tmp_path / "in/c_grey.png", (0, 0), mode="LA")
    save(tmp_path / "in/d_palette.png", 0, mode="P", transparency=0)
    images, _, _ = load_folder(str(tmp_path / "in"), (8, 8), 3)
    assert [int(image.mean()) for image in images] == [255, 127, 255, 255]


def test_sixteen_bit_and_rotated_pictures(tmp_path):
    (tmp_path / "in").mkdir()
    Image.fromarray(np.full((8, 8), 32896, np.uint16)).save(tmp_path / "in/a.png")
    Image.fromarray(np.full((8, 8), 32896, np.uint16)).save(tmp_path / "in/c_transparent.png", transparency=32896)
    Image.new("LAB", (8, 8), (128, 128, 128)).save(tmp_path / "in/d_lab.tif")
    picture = np.zeros((8, 16, 3), np.uint8)
    picture[:, 8:] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # stored lying on its side: to be turned clockwise
    Image.fromarray(picture).save(tmp_path / "in/b.png", exif=exif)
    images, _, _ = load_folder(str(tmp_path / "in"), (16, 8), 1)
    assert np.all(images[0] == 128)
    assert np.all(images[1, 0, :8] == 0) and np.all(images[1, 0, 8:] == 255)
    assert np.all(images[2] == 255) and np.all(abs(images[3].astype(int) - 119) <= 2)  # a lightness of half of L* is 119 of 255 in sRGB


def test_broken_images_are_named_and_skipped(tmp_path, capsys):
    save(tmp_path / "in/a/good.png", RED)
    whole = noise(tmp_path / "in/b/truncated.png").read_bytes()
    (tmp_path / "in/b/truncated.png").write_bytes(whole[: len(whole) // 2])
    whole = noise(tmp_path / "in/b/truncated.jpg").read_bytes()
    (tmp_path / "in/b/truncated.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "in/b/empty.png").write_bytes(b"")
    (tmp_path / "in/b/text.jpg").write_text("hello")
    (tmp_path / "in/b/nowhere.png").symlink_to("gone.png")
    save(tmp_path / "in/c/good.png", BLUE)
    assert convert("--data_dir", tmp_path / "in", "--output_name", tmp_path / "o.bin") == 0
    captured = capsys.readouterr()
    for name in ("truncated.png", "truncated.jpg", "empty.png", "text.jpg", "nowhere.png"):
        assert f"{tmp_path}/in/b/{name}" in captured.err
    images, labels, num_classes = read_data(str(tmp_path / "o.bin"))
    assert labels.tolist() == [0, 2] and num_classes == 3  # a broken image does not renumber the classes
    assert np.all(images[0].transpose(1, 2, 0) == RED) and np.all(images[1].transpose(1, 2, 0) == BLUE)
    images, labels, names = load_folder(str(tmp_path / "in"), (8, 8), 3)
    assert len(images) == 2 and labels.tolist() == [0, 2] and names == ["a", "b", "c"]


def test_links_are_followed_but_not_in_circles(tmp_path):
    save(tmp_path / "elsewhere/a.png", RED)
    save(tmp_path / "in/cat/b.png", BLUE)
    (tmp_path / "in/dog").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in/cat/circle").symlink_to(tmp_path / "in")
    _, labels, names = load_folder(str(tmp_path / "in"), (4, 4), 3)
    assert labels.tolist() == [0, 1] and names == ["cat", "dog"]


def test_two_runs_give_the_same_bytes(tmp_path):
    for name in ("b/2.png", "a/10.png", "a/9.png"):
        noise(tmp_path / "in" / name)
    for output in ("1.bin", "2.bin", "2.bin"):  # the last one replaces a file
        assert convert("--data_dir", tmp_path / "in", "--output_name", tmp_path / output) == 0
    assert (tmp_path / "1.bin").read_bytes() == (tmp_path / "2.bin").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["1.bin", "2.bin", "in"]


# ----------------------------------------------------------------------------------------------------------------------
# Mistakes


def test_mistakes_end_in_one_sentence_and_change_nothing(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text/notes.txt").write_text("hello")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/a.png").write_text("hello")
    good = save(tmp_path / "good/a.png", RED).parent
    kept = tmp_path / "kept.bin"
    kept.write_bytes(data_bytes(make_images()))
    before = contents(tmp_path)
    for folder in "empty", "text", "missing", "kept.bin":
        assert str(tmp_path / folder) in fails(capsys, "--data_dir", tmp_path / folder, "--output_name", kept)
    for output in tmp_path / "missing/o.bin", tmp_path / "empty", "/dev/null", kept / "o.bin":
        assert str(output) in fails(capsys, "--data_dir", good, "--output_name", output)
    for size in ("0", "64x", "-8", "64x64x3", "6.5", ""):
        assert "--image_size" in fails(capsys, "--data_dir", good, "--output_name", kept, f"--image_size={size}")
    assert "--channels" in fails(capsys, "--data_dir", good, "--output_name", kept, "--channels", "2")
    assert "--data_dir" in fails(capsys, "--output_name", kept)
    for words in (["--zip", kept], ["--data_dir", good, "--encode", "vae"], ["--data_dir", good, "--cond_dir", good, "--cond_output_name", "c.bin"]):
        assert "--output_name: is missing" in fails(capsys, *words)
    assert "--colour" in fails(capsys, "--data_dir", good, "--output_name", kept, "--colour", "3")
    assert "--idx" in fails(capsys, "--data_dir", good, "--output_name", kept, "--idx", kept)
    assert convert("--data_dir", tmp_path / "broken", "--output_name", kept) == 1
    assert contents(tmp_path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_write_protected_output_and_folder(tmp_path, capsys):
    good = save(tmp_path / "good/a.png", RED).parent
    kept = tmp_path / "kept.bin"
    kept.write_bytes(b"precious")
    kept.chmod(0o444)
    assert "kept.bin" in fails(capsys, "--data_dir", good, "--output_name", kept)
    (tmp_path / "closed").mkdir(mode=0o555)
    assert "o.bin" in fails(capsys, "--data_dir", good, "--output_name", tmp_path / "closed/o.bin")
    assert kept.read_bytes() == b"precious"


def test_full_disk_and_interruption_leave_the_old_file(tmp_path, capsys, monkeypatch):
    good = save(tmp_path / "good/a.png", RED).parent
    kept = tmp_path / "kept.bin"
    kept.write_bytes(data_bytes(make_images()))

    def full(descriptor):
        raise OSError(28, "No space left on device")

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert "kept.bin" in fails(capsys, "--data_dir", good, "--output_name", kept)
    with monkeypatch.context() as patch:
        patch.setattr("common.pictures.flat_image", interrupted)
        assert convert("--data_dir", good, "--output_name", kept) == 130
        assert capsys.readouterr().err.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["good", "kept.bin"] and kept.read_bytes() == data_bytes(make_images())


# ----------------------------------------------------------------------------------------------------------------------
# The format


def test_header_is_as_documented(tmp_path):
    path = tmp_path / "o.bin"
    images = np.random.default_rng(1).integers(0, 256, (5, 3, 6, 4), dtype=np.uint8)
    assert write_data(str(path), images, [0, 1, 2, 1, 0], 3) == 5
    data = path.read_bytes()
    assert len(data) == 1024 + 5 * 3 * 6 * 4 + 5 * 4
    assert struct.unpack("<8i", data[:32]) == (20261120, 1, 5, 3, 6, 4, 3, 1)
    assert struct.unpack("<I", data[32:36])[0] == zlib.crc32(data[:32] + bytes(4) + data[36:1024])
    assert struct.unpack("<I", data[36:40])[0] == zlib.crc32(data[1024:])
    assert not any(data[40:1024])
    assert data[1024:] == images.tobytes() + struct.pack("<5i", 0, 1, 2, 1, 0)


def test_float_images_round_trip(tmp_path):
    path = str(tmp_path / "o.bin")
    images = np.linspace(-1, 1, 2 * 1 * 5 * 7, dtype=np.float32).reshape(2, 1, 5, 7)
    write_data(path, images)
    back, labels, num_classes = read_data(path)
    assert back.dtype == np.float32 and np.array_equal(back, images) and labels is None and num_classes == 0


def test_iterator_is_streamed(tmp_path):
    """More images than the process ever holds, with labels that come along."""
    path = str(tmp_path / "o.bin")
    labels: list[int] = []

    def images():
        for number in range(500):
            labels.append(number % 7)
            yield np.full((3, 64, 64), number % 256, np.uint8)

    tracemalloc.start()
    assert write_data(path, images(), labels, 7) == 500
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6 < os.path.getsize(path)
    back, back_labels, _ = read_data(path)
    assert np.array_equal(back[:, 0, 0, 0], np.arange(500) % 256) and np.array_equal(back_labels, np.arange(500) % 7)


def test_write_data_refuses_what_read_data_would(tmp_path):
    path = str(tmp_path / "o.bin")
    images = np.zeros((2, 1, 4, 4), np.uint8)
    cases = [
        (iter([]), None, 0),
        (images, [0], 2),
        (images, [0, 2], 2),
        (images, [0, -1], 2),
        (images, [0, 1], 0),
        (images, None, 2),
        (images.astype(np.float64), None, 0),
        (images[0], None, 0),
        (np.zeros((1, 1, 1, 4097), np.uint8), None, 0),
        (np.full((1, 1, 2, 2), np.nan, np.float32), None, 0),
        ([images[0], images[0].astype(np.float32)], None, 0),
        ([images[0], images[0][:, :2]], None, 0),
    ]
    for arguments in cases:
        with pytest.raises(DataError):
            write_data(path, *arguments)
        assert os.listdir(tmp_path) == []


def test_any_flipped_bit_is_found(tmp_path):
    path = tmp_path / "o.bin"
    write_data(str(path), np.random.default_rng(2).integers(0, 256, (3, 1, 4, 4), dtype=np.uint8), [0, 1, 0], 2)
    whole = path.read_bytes()
    positions = [*range(48), 512, 1020, *range(1024, len(whole))]
    for position in positions:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=path.name):
            read_data(str(path))
    path.write_bytes(whole)
    read_data(str(path))


def test_every_header_field_wrong_in_turn(tmp_path):
    """With a checksum that fits, as a hostile or a foreign writer would make it."""
    path = tmp_path / "o.bin"
    write_data(str(path), np.zeros((3, 1, 4, 4), np.uint8), [0, 1, 0], 2)
    whole = path.read_bytes()
    for slot, values in {
        0: (0, 1, -1, 20261121),
        1: (0, 2, 3, -1),
        2: (0, -3, 2, 4, 2**31 - 1),
        3: (0, -1, 3, 2**31 - 1),
        4: (0, -4, 5, 2**31 - 1),
        5: (0, -4, 5, 2**31 - 1),
        6: (0, -1, 1),
        7: (0, 2, 4, -1),
        9: (0, 1),
        10: (1,),
        255: (1,),
    }.items():
        for value in values:
            damaged = bytearray(whole)
            damaged[4 * slot : 4 * slot + 4] = struct.pack("<i", value)
            path.write_bytes(repair_header(damaged))
            with pytest.raises(DataError, match=path.name):
                read_data(str(path))
    path.write_bytes(repair_header(bytearray(whole)))
    read_data(str(path))


def test_beyond_4_gib_each_image_has_a_checksum(tmp_path, monkeypatch):
    """Version 2, and what it is for: with a limit of 300 bytes in place of 4 GiB."""
    path = tmp_path / "o.bin"
    images = np.random.default_rng(1).integers(0, 256, (5, 3, 6, 4), dtype=np.uint8)
    for labels, num_classes in ((None, 0), ([0, 1, 2, 1, 0], 3)):
        monkeypatch.setattr(data_files, "READ_AT_START", 1024 + images.size + 4 * len(labels or []))
        write_data(str(path), images, labels, num_classes)
        assert struct.unpack("<2i", path.read_bytes()[:8]) == (20261120, 1)
        monkeypatch.setattr(data_files, "READ_AT_START", data_files.READ_AT_START - 1)
        write_data(str(path), images, labels, num_classes)
        whole = path.read_bytes()
        behind = struct.pack(f"<{len(labels or [])}i", *labels or []) + struct.pack("<5I", *(zlib.crc32(image.tobytes()) for image in images))
        assert whole[1024:] == images.tobytes() + behind
        assert struct.unpack("<8i", whole[:32]) == (20261120, 2, 5, 3, 6, 4, num_classes, 1)
        assert struct.unpack("<I", whole[32:36])[0] == zlib.crc32(whole[:32] + bytes(4) + whole[36:1024])
        assert struct.unpack("<I", whole[36:40])[0] == zlib.crc32(behind) and not any(whole[40:1024])
        back, back_labels, classes = read_data(str(path))
        assert np.array_equal(back, images) and classes == num_classes and (back_labels is None if labels is None else back_labels.tolist() == labels)

    data = open_data_file(str(path))
    assert np.array_equal(data.read(np.array([4, 0, 4])), images[[4, 0, 4]])
    for position in [*range(48), 1020, *range(1024, len(whole), 5), len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        image = (position - 1024) // 72
        if not 0 <= image < 5:  # header, labels and checksums are verified at once, an image when it is read
            with pytest.raises(DataError, match=path.name):
                read_data(str(path))
            continue
        data = open_data_file(str(path))
        with pytest.raises(DataError, match=f"{path.name}.*{image}"):
            data.read(np.arange(5))
        assert data.read(np.delete(np.arange(5), image)).shape[0] == 4
    path.write_bytes(whole)
    data = open_data_file(str(path))
    os.truncate(path, 1024 + 3 * 72 + 10)
    data.read(np.arange(3))
    with pytest.raises(DataError, match=path.name):
        data.read(np.arange(5))


def test_cut_lengthened_missing_and_compressed_files(tmp_path):
    path = tmp_path / "o.bin"
    write_data(str(path), np.zeros((2, 3, 8, 8), np.uint8))
    whole = path.read_bytes()
    for data in (b"", *(whole[:size] for size in range(1, len(whole), 29)), whole + b"\0", gzip.compress(whole)):
        path.write_bytes(data)
        with pytest.raises(DataError, match=path.name):
            read_data(str(path))
    for other in (tmp_path, tmp_path / "missing.bin"):
        with pytest.raises(DataError, match=other.name):
            read_data(str(other))


def test_unet_cu_files_are_read(tmp_path):
    path = tmp_path / "elephant_train.bin"
    images = np.random.default_rng(3).uniform(-1, 1, (4, 3, 8, 6)).astype(np.float32)
    header = np.zeros(256, np.int32)
    header[:5] = [20240620, *images.shape]
    path.write_bytes(header.tobytes() + images.tobytes())
    back, labels, num_classes = read_data(str(path))
    assert np.array_equal(back, images) and labels is None and num_classes == 0
    path.write_bytes(header.tobytes() + images.tobytes()[:-4])
    with pytest.raises(DataError, match=path.name):
        read_data(str(path))


# ----------------------------------------------------------------------------------------------------------------------
# Known data sets


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def test_idx_images_are_padded_and_keep_their_labels(tmp_path, capsys):
    images = np.random.default_rng(4).integers(1, 256, (6, 28, 28), dtype=np.uint8)
    labels = np.array([3, 0, 9, 1, 1, 2], np.uint8)
    (tmp_path / "i.gz").write_bytes(gzip.compress(idx(images)))
    (tmp_path / "l").write_bytes(idx(labels))
    output = tmp_path / "o.bin"
    assert convert("--idx", tmp_path / "i.gz", tmp_path / "l", "--output_name", output) == 0
    back, back_labels, num_classes = read_data(str(output))
    assert back.shape == (6, 1, 32, 32) and num_classes == 10 and np.array_equal(back_labels, labels)
    assert np.array_equal(back[:, 0, 2:30, 2:30], images)
    assert back.sum(dtype=int) == images.sum(dtype=int)  # the border is 0
    assert convert("--idx", tmp_path / "i.gz", "--output_name", output, "--channels", "3") == 0
    back, back_labels, num_classes = read_data(str(output))
    assert back.shape == (6, 3, 32, 32) and back_labels is None and num_classes == 0
    capsys.readouterr()

    (tmp_path / "few").write_bytes(idx(labels[:5]))
    (tmp_path / "cut").write_bytes(idx(images)[:-1])
    (tmp_path / "cut.gz").write_bytes(gzip.compress(idx(images))[:-99])
    before = contents(tmp_path)
    for *first, named in (["l"], ["i.gz", "i.gz"], ["missing"], ["i.gz", "few"], ["cut"], ["cut.gz"]):
        assert named in fails(capsys, "--idx", *(tmp_path / name for name in [*first, named]), "--output_name", output)
    assert "--idx" in fails(capsys, "--idx", "a", "b", "c", "--output_name", output)
    assert contents(tmp_path) == before


def test_cifar10_batches(tmp_path, capsys):
    rng = np.random.default_rng(5)
    records = rng.integers(0, 256, (5, 3073), dtype=np.uint8)
    records[:, 0] = [6, 9, 9, 4, 0]
    (tmp_path / "1.bin").write_bytes(records[:3].tobytes())
    (tmp_path / "2.bin").write_bytes(records[3:].tobytes())
    output = tmp_path / "o.bin"
    assert convert("--cifar10", tmp_path / "1.bin", tmp_path / "2.bin", "--output_name", output) == 0
    images, labels, num_classes = read_data(str(output))
    assert np.array_equal(images.reshape(5, -1), records[:, 1:])
    assert labels.tolist() == [6, 9, 9, 4, 0] and num_classes == 10
    capsys.readouterr()
    for damaged in (records.tobytes()[:-1], b"", b"\x0a" + records.tobytes()[1:]):
        (tmp_path / "1.bin").write_bytes(damaged)
        assert "1.bin" in fails(capsys, "--cifar10", tmp_path / "1.bin", "--output_name", output)


@pytest.mark.skipif(not os.path.exists(EMOJI_FONT), reason=f"{EMOJI_FONT} is not there (fonts-noto-color-emoji)")
@pytest.mark.skipif(not features.check("raqm"), reason="this Pillow has no raqm, which joins emoji")
def test_emoji_font(tmp_path):
    assert convert("--emoji", EMOJI_FONT, "--output_name", tmp_path / "o.bin") == 0
    images, labels, _ = read_data(str(tmp_path / "o.bin"))
    assert len(images) > 1900 and images.shape[1:] == (3, 64, 64) and labels is None
    assert len({image.tobytes() for image in images}) == len(images)
    flat = images.reshape(len(images), -1)
    assert flat.min(1).max() < 250  # none is blank
    ink = np.argwhere((images < 250).any(1))  # (image, y, x)
    assert np.abs(ink.mean(0)[1:] - 31.5).max() < 2  # centred, as a whole
    assert (images.max(1).astype(int) - images.min(1) > 60).any((1, 2)).mean() > 0.8  # in colour
    texts, size = prepare_data.emoji_texts(EMOJI_FONT)
    assert size == 109 and "\U0001f600" in texts  # grinning face
    assert "\U0001f1eb\U0001f1f7" in texts and "\U0001f469\u200d\U0001f680" in texts  # a flag, a woman astronaut
    assert not any("\U0001f3fb" <= character <= "\U0001f3ff" for text in texts for character in text)


def test_emoji_needs_a_font_with_pictures(tmp_path, capsys):
    matplotlib = pytest.importorskip("matplotlib", reason="its DejaVu Sans serves as a font without pictures")
    plain = Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf"
    (tmp_path / "text.ttf").write_text("hello")
    assert str(plain) in fails(capsys, "--emoji", plain, "--output_name", tmp_path / "o.bin")
    assert "text.ttf" in fails(capsys, "--emoji", tmp_path / "text.ttf", "--output_name", tmp_path / "o.bin")
    assert "missing.ttf" in fails(capsys, "--emoji", tmp_path / "missing.ttf", "--output_name", tmp_path / "o.bin")


# ----------------------------------------------------------------------------------------------------------------------
# Zips


def png(color, size=(20, 20), mode="RGB") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, color).save(buffer, "PNG")
    return buffer.getvalue()


def make_zip(path: Path, files: dict[str, bytes | str], compression=zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def test_edm_data_sets(tmp_path, capsys, monkeypatch):
    """As its dataset_tool.py writes them: the folders mean nothing, dataset.json holds the labels, the pictures say their size."""
    colors = [RED, GREEN, BLUE, WHITE]
    files = {f"0000{i // 2}/img0000000{i}.png": png(color, (32, 32)) for i, color in enumerate(colors)}
    numbers = [2, 0, 6, 2]
    files["dataset.json"] = json.dumps({"labels": [[name, label] for name, label in zip(files, numbers)]})
    make_zip(tmp_path / "edm.zip", dict(reversed(files.items())))
    output = tmp_path / "o.bin"
    monkeypatch.chdir(tmp_path)
    assert convert("--zip", "edm.zip", "--output_name", output) == 0
    assert sorted(os.listdir()) == ["edm.zip", "o.bin"]
    images, labels, num_classes = read_data(str(output))
    assert images.shape == (4, 3, 32, 32) and labels.tolist() == numbers and num_classes == 7
    assert [tuple(image[:, 0, 0]) for image in images] == colors
    assert convert("--zip", "edm.zip", "--output_name", output, "--image_size", "8", "--channels", "1") == 0
    assert read_data(str(output))[0].shape == (4, 1, 8, 8)

    make_zip(tmp_path / "edm.zip", files | {"dataset.json": '{"labels": null}'})
    assert convert("--zip", "edm.zip", "--output_name", output) == 0
    assert read_data(str(output))[1:] == (None, 0)
    capsys.readouterr()

    before = contents(tmp_path)
    name = next(iter(files))
    for content in (
        *("", "[]", '{"labels": 5}', '{"labels": [[[], 1]]}', "[" * 100000, '{"labels": []}', " " * (2 << 20)),
        *(json.dumps({"labels": [[n, label] for n in files]}) for label in ([0.5, 1.5], -1, 10**9, "\x1b[31m")),
    ):
        make_zip(tmp_path / "edm.zip", files | {"dataset.json": content})
        sentence = fails(capsys, "--zip", "edm.zip", "--output_name", output)
        assert "dataset.json" in sentence and "edm.zip" in sentence and "\x1b" not in sentence
    make_zip(tmp_path / "edm.zip", files | {name: b"no picture"})
    assert name in fails(capsys, "--zip", "edm.zip", "--output_name", output)
    (tmp_path / "edm.zip").unlink()
    before.pop("edm.zip")
    assert contents(tmp_path) == before


def test_zips_of_pictures_are_as_the_folders_that_were_packed(tmp_path, capsys):
    files = {"cat/deep/er/a.JPG": png(RED), "cat/z.png": png(BLUE), "dog/b.png": png(GREEN), ".hidden/a.png": b"", "__MACOSX/cat/._z.png": b""}
    files |= {"notes.txt": "no picture", "dog/broken.png": png(RED)[:50], "cat/": b""}
    output = tmp_path / "o.bin"
    for folder in ("", "pets/", "my/pets/"):
        make_zip(tmp_path / "pets.zip", {folder + name: content for name, content in files.items()}, zipfile.ZIP_DEFLATED)
        assert convert("--zip", tmp_path / "pets.zip", "--output_name", output) == 0
        assert f"{folder}dog/broken.png" in capsys.readouterr().err
        images, labels, num_classes = read_data(str(output))
        assert images.shape == (3, 3, 64, 64) and labels.tolist() == [0, 0, 1] and num_classes == 2
        np.testing.assert_allclose(images.mean((2, 3)), [RED, BLUE, GREEN], atol=3)
    make_zip(tmp_path / "flat.zip", {"some/a.png": png(RED), "some/b.png": png(BLUE)})
    assert convert("--zip", tmp_path / "flat.zip", "--output_name", output) == 0
    assert read_data(str(output))[1] is None


def test_damaged_and_hostile_zips(tmp_path, capsys, monkeypatch):
    """One sentence, nothing unpacked to the disk, and no more memory than a picture needs."""
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    good = make_zip(tmp_path / "good.zip", {"a.png": png(RED), "b.png": png(BLUE)}).read_bytes()
    Path("z.zip").write_bytes(good)
    before = contents(tmp_path)

    def refused(content: bytes | None = None) -> str:
        if content is not None:
            Path("z.zip").write_bytes(content)
        tracemalloc.start()
        sentence = fails(capsys, "--zip", "z.zip", "--output_name", "o.bin")
        assert tracemalloc.get_traced_memory()[1] < 64e6
        tracemalloc.stop()
        assert os.listdir() == ["z.zip"]
        return sentence

    for content in (b"", b"PK", good[:-5], good[: len(good) // 2], b"hello" * 100, good[:-18] + b"\xff" * 18):
        assert "z.zip" in refused(content)
    assert "z.zip" in refused(make_zip(tmp_path / "x", {"a.txt": "", "b/": ""}).read_bytes())
    encrypted = bytearray(good)
    for signature, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        at = -1
        while (at := good.find(signature, at + 1)) >= 0:
            encrypted[at + offset] |= 1
    assert "z.zip" in refused(bytes(encrypted))

    def skipped(content: bytes) -> str:
        """None of its pictures can be used, and each is named."""
        Path("z.zip").write_bytes(content)
        tracemalloc.start()
        assert convert("--zip", "z.zip", "--output_name", "o.bin") == 1
        assert tracemalloc.get_traced_memory()[1] < 64e6
        tracemalloc.stop()
        error = capsys.readouterr().err
        assert error.startswith("prepare_data: ") and os.listdir() == ["z.zip"]
        return error

    monkeypatch.setattr(prepare_data, "MOST_PICTURE_BYTES", 1 << 20)
    bomb = make_zip(tmp_path / "x", {"bomb.png": bytes(200 << 20)}, zipfile.ZIP_DEFLATED).read_bytes()
    assert "bomb.png" in skipped(bomb)
    liar = bytearray(bomb)  # says that it unpacks to 999 bytes
    for at in (22, bomb.find(b"PK\1\2") + 24):
        liar[at : at + 4] = struct.pack("<I", 999)
    assert "bomb.png" in skipped(bytes(liar))
    assert "bomb.png" in skipped(make_zip(tmp_path / "x", {"bomb.png": bytes(1 << 20)}, zipfile.ZIP_BZIP2).read_bytes())
    assert "text.png" in skipped(make_zip(tmp_path / "x", {"text.png": "hello"}).read_bytes())
    flipped = bytearray(good)
    for name in (b"a.png", b"b.png"):
        flipped[good.find(name) + 40] ^= 1
    assert "a.png" in skipped(bytes(flipped))
    pixels = struct.pack(">II", 60000, 60000)
    huge = png(RED)[:16] + pixels + png(RED)[24:29] + struct.pack(">I", zlib.crc32(b"IHDR" + pixels + png(RED)[24:29])) + png(RED)[33:]
    assert "huge.png" in skipped(make_zip(tmp_path / "x", {"huge.png": huge}).read_bytes())
    (tmp_path / "x").unlink()
    assert contents(tmp_path).keys() == before.keys()

    outside = make_zip(tmp_path / "good.zip", {"../../evil.png": png(RED), "/etc/evil.png": png(RED), "C:\\evil\x1b[31m.png": png(RED)})
    assert convert("--zip", outside, "--output_name", "o.bin") == 0  # names are names: nothing is written there
    assert sorted(os.listdir()) == ["o.bin", "z.zip"] and "\x1b" not in "".join(capsys.readouterr())


def test_pipes_and_devices_are_refused(tmp_path, capsys, monkeypatch):
    """A pipe without a writer would never come to an end, nor would /dev/zero."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        for source in ("--zip", "--idx", "--cifar10", "--emoji"):
            assert str(path) in fails(capsys, source, path, "--output_name", tmp_path / "o.bin")
        with pytest.raises(DataError, match=str(path)):
            read_data(str(path))
    save(tmp_path / "in/a.png", RED)
    os.mkfifo(tmp_path / "in/x.png")
    assert convert("--data_dir", tmp_path / "in", "--output_name", tmp_path / "o.bin") == 0
    assert f"{tmp_path}/in/x.png" in capsys.readouterr().err and len(read_data(str(tmp_path / "o.bin"))[0]) == 1
    monkeypatch.setattr(prepare_data, "MOST_BYTES", 1 << 20)
    for content in (gzip.compress(bytes(99 << 20)), bytes(2 << 20)):
        (tmp_path / "large").write_bytes(content)
        assert "large" in fails(capsys, "--cifar10", tmp_path / "large", "--output_name", tmp_path / "o.bin")


def test_float_pictures(tmp_path, capsys):
    """From 0 to 1 they are grey values; of others nobody knows what white is."""
    (tmp_path / "in").mkdir()
    for name, values in {"a": [0, 0.5, 1], "b": [0, 100, 255], "c": [-0.1, 0, 1], "d": [float("nan"), 0, 1]}.items():
        Image.fromarray(np.array([values], np.float32)).save(tmp_path / f"in/{name}.tiff")
    Image.fromarray(np.array([[0, 70000, 5]], np.int32)).save(tmp_path / "in/e.tiff")
    images, _, _ = load_folder(str(tmp_path / "in"), (1, 3), 1)
    assert images.tolist() == [[[[0, 128, 255]]]]
    error = capsys.readouterr().err
    assert all(f"{name}.tiff" in error for name in "bcde") and "a.tiff" not in error


def test_names_cannot_speak_to_the_terminal(tmp_path, capsys):
    name = "evil\x1b]0;owned\x07\x9b31m\r\u202e"
    save(tmp_path / f"in/{name}/a.png", RED)
    (tmp_path / f"in/{name}/{name}.png").write_text("hello")
    save(tmp_path / f"{name}.png", RED)
    assert convert("--data_dir", tmp_path / "in", "--output_name", tmp_path / f"{name}.bin") == 0
    assert convert("--data_dir", tmp_path / f"{name}/\n", "--output_name", tmp_path / "o.bin") == 1
    assert convert("--idx", tmp_path / f"{name}.png", "--output_name", tmp_path / "o.bin") == 1
    assert convert("--image_size", name, "--idx", "x", "--output_name", "x") == 1
    words = [sys.executable, ROOT / "prepare_data.py", f"--{name}"]
    done = subprocess.run(words, capture_output=True, text=True)  # ends in begin()
    captured = capsys.readouterr()
    assert "--evil" in done.stderr and captured.err.count("evil\\x1b]0") >= 4
    assert all(character.isprintable() or character == "\n" for character in captured.out + captured.err + done.stderr)


# ----------------------------------------------------------------------------------------------------------------------
# The shipped files


@pytest.mark.parametrize(("name", "shape", "num_classes"), [("fashion32", (10000, 1, 32, 32), 10), ("emoji64", (2026, 3, 64, 64), 0)])
def test_shipped_files(tmp_path, name, shape, num_classes):
    path = tmp_path / f"{name}.bin"
    path.write_bytes(gzip.decompress((ROOT / f"data/{name}.bin.gz").read_bytes()))
    images, labels, classes = read_data(str(path))
    assert images.shape == shape and images.dtype == np.uint8 and classes == num_classes
    if num_classes:
        assert np.bincount(labels).tolist() == [shape[0] // num_classes] * num_classes


@pytest.mark.skipif(not FASHION.is_dir(), reason=f"{FASHION} is not there (dataset-fashion-mnist)")
def test_shipped_fashion_is_what_its_command_makes(tmp_path):
    sources = [FASHION / "t10k-images-idx3-ubyte.gz", FASHION / "t10k-labels-idx1-ubyte.gz"]
    assert convert("--idx", *sources, "--output_name", tmp_path / "o.bin") == 0
    assert (tmp_path / "o.bin").read_bytes() == gzip.decompress((ROOT / "data/fashion32.bin.gz").read_bytes())


# ----------------------------------------------------------------------------------------------------------------------
# ./train_unet --data_dir


class Trainer:
    """./train_unet in a folder, where prepare_data.py lies beside it and PATH has a python3 that counts how often it is called."""

    def __init__(self, folder: Path):
        self.folder, self.calls, self.path = folder, folder / "tools/calls", str(folder / "tools")
        (folder / "tools").mkdir()
        self.program = folder / "tools/train_unet"
        shutil.copy(binary_path("cpu") if BUILD == "cpu" else ROOT / f"train_unet_{BUILD}", self.program)
        (folder / "tools/prepare_data.py").symlink_to(ROOT / "prepare_data.py")
        python = folder / "tools/python3"
        python.write_text(f'#!/bin/sh\necho "$@" >>{self.calls}\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)

    def __call__(self, *words: object, code: int = 0) -> subprocess.CompletedProcess:
        done = subprocess.run(
            [self.program, *map(str, words)], cwd=self.folder, env=environment() | {"PATH": self.path}, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done

    def train(self, *words: object, code: int = 0) -> subprocess.CompletedProcess:
        shutil.rmtree(self.folder / "out", ignore_errors=True)
        return self(*TINY, "--max_steps", 1, *words, code=code)

    def prepared(self) -> int:
        """How often python3 was called."""
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


PETS = ["--data_dir", "pets", "--image_size", "8"]


def save_pets(folder: Path) -> None:
    for k in range(4):
        noise(folder / f"pets/{'cat' if k % 2 else 'dog'}/{k}.png")


def test_train_unet_prepares_a_folder_once(trainer: Trainer, tmp_path: Path) -> None:
    """What it makes is what the command makes; a checkpoint records the file, with which a run goes on without the flag."""
    save_pets(tmp_path)
    words = ["--data_dir", "pets//", "--image_size", 8, "--class_cond", "True"]
    done = trainer.train(*words)
    assert not done.stderr
    assert convert("--data_dir", tmp_path / "pets", "--output_name", tmp_path / "same.bin", "--image_size", 8) == 0
    made, same = ((tmp_path / name).read_bytes() for name in ("pets_8x8x3.bin", "same.bin"))
    assert made == same[:52] + made[52:56] + same[56:] and made[52:56] != same[52:56] == bytes(4)  # slot 13
    assert read_model(str(tmp_path / "out" / model_name(1))).config.data_file == "pets_8x8x3.bin"
    trainer("--resume_checkpoint", "latest", "--max_steps", 2)
    trainer.train(*words)
    assert trainer.prepared() == 1
    trainer.train("--data_file", "pets_8x8x3.bin")


def test_train_unet_prepares_a_folder_again_when_it_changed(trainer: Trainer, tmp_path: Path) -> None:
    """A picture that is new, changed or gone. Files of another size, or of other channels, lie beside the first."""
    save_pets(tmp_path)
    trainer.train(*PETS)
    os.utime(tmp_path / "pets/cat/1.png", ns=(0, 0))  # an older picture took its place
    trainer.train(*PETS)
    assert trainer.prepared() == 2
    old, new = tmp_path / "pets", tmp_path / "new"  # other pictures, all of them older
    save_pets(new)
    for path in (new / "pets").rglob("*"):
        os.utime(path, ns=(0, 0))
    old.rename(tmp_path / "old")
    (new / "pets").rename(old)
    trainer.train(*PETS)
    ahead = time.time_ns() + 10**12  # a picture dated ahead hides no later change
    os.utime(tmp_path / "pets/dog/0.png", ns=(ahead, ahead))
    trainer.train(*PETS)
    Image.new("RGB", (8, 8)).save(tmp_path / "pets/cat/1.png")
    trainer.train(*PETS)
    assert trainer.prepared() == 5 and not read_data(str(tmp_path / "pets_8x8x3.bin"))[0].min(axis=(1, 2, 3)).all()
    (tmp_path / "pets/cat/1.png").unlink()
    trainer.train(*PETS)
    assert len(read_data(str(tmp_path / "pets_8x8x3.bin"))[0]) == 3
    grey = ["--data_dir", "pets", "--image_size", "8x16", "--in_channels", 1]
    trainer.train(*grey)
    assert trainer.prepared() == 7 and read_data(str(tmp_path / "pets_8x16x1.bin"))[0].shape == (3, 1, 8, 16)
    (tmp_path / "pets/.hidden").write_text("of a file manager")
    trainer.train(*PETS)
    trainer.train(*grey)
    assert trainer.prepared() == 7


def test_train_unet_asks_for_the_size_of_the_model(trainer: Trainer, tmp_path: Path) -> None:
    """Of a file that it starts from; else the preset's; else 64x64, with the preset for that. No preset makes pictures grey."""
    save_pets(tmp_path)
    trainer.train(*PETS, "--in_channels", 1)
    shutil.move(tmp_path / "out" / model_name(1), tmp_path / "m.bin")
    words = ["--data_dir", "pets", "--max_steps", 1, "--batch_size", 1, "--sample_interval", 0]
    for output, more, shape in (
        ("new", ["--init", "m.bin"], (1, (8, 8))),
        ("preset", ["--preset", "fashion32"], (3, (32, 32))),
        ("28", ["--image_size", 28], (3, (28, 28))),
        ("32", ["--image_size", 32], (3, (32, 32))),
        ("64", [], (3, (64, 64))),
    ):
        told = trainer(*words, *more, "--output_dir", output).stdout
        config = read_model(str(tmp_path / output / model_name(1))).config
        assert (config.in_channels, config.image_size) == shape
    assert f"preset {'quick64' if BUILD == 'cuda' else 'emoji64'}" in told


def test_train_unet_prefers_the_python_beside_it(trainer: Trainer, tmp_path: Path) -> None:
    """What `make python` has set up, or the command that names a missing package, also helps a program that is started without it."""
    save_pets(tmp_path)
    (tmp_path / "tools/.venv/bin").mkdir(parents=True)
    (tmp_path / "tools/python3").rename(tmp_path / "tools/.venv/bin/python")
    trainer.train(*PETS)
    assert trainer.prepared() == 1


def test_the_twin_notices_other_pictures(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it reads of a folder has the checksum of the file that is made of the folder."""
    save_pets(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["--preset", "fashion32", *PETS, "--in_channels", "1", "--num_channels", "32", "--attention_resolutions", "", "--batch_size", "2"]
    words += ["--sample_interval", "0", "--device", "cpu"]
    assert train_unet.run([*words, "--max_steps", "1"]) == 0
    resume = ["--resume_checkpoint", f"out/{model_name(1)}", "--sample_interval", "0", "--device", "cpu", "--max_steps", "2", "--output_dir"]
    assert train_unet.run([*resume, "on"]) == 0
    assert convert("--data_dir", "pets", "--output_name", "same.bin", "--image_size", 8, "--channels", 1) == 0
    assert read_model(f"on/{model_name(2)}").state.data_crc == data_files.open_data("same.bin").crc
    save(tmp_path / "pets/cat/1.png", RED)
    with pytest.raises(train_unet.UserError, match="pets"):
        train_unet.run([*resume, "again"])


def test_train_unet_passes_on_what_is_wrong_with_pictures(trainer: Trainer, tmp_path: Path) -> None:
    save_pets(tmp_path)
    (tmp_path / "pets/cat/bad.png").write_bytes(b"no picture")
    done = trainer.train(*PETS)
    assert "pets/cat/bad.png" in done.stderr and len(read_data(str(tmp_path / "pets_8x8x3.bin"))[0]) == 4
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/bad.png").write_bytes(b"no picture")
    done = trainer.train("--data_dir", "bad", "--image_size", 8, code=1)
    assert "prepare_data: " in done.stderr and "train_unet: --data_dir bad" in done.stderr
    assert not (tmp_path / "bad_8x8x3.bin").exists() and not (tmp_path / "out").exists()


def test_train_unet_refuses_what_it_cant_prepare(trainer: Trainer, tmp_path: Path) -> None:
    def refused(*words: object) -> str:
        before = contents(tmp_path)
        told = trainer.train(*words, code=1).stderr
        assert contents(tmp_path) == before and told.count("\n") == 1
        return told

    save_pets(tmp_path)
    assert "--data_dir" in refused(*PETS, "--data_file", "x.bin")
    for path in "none", "pets/cat/1.png", "/":
        assert f"--data_dir {path}" in refused("--data_dir", path)
    assert "4" in refused(*PETS, "--in_channels", 4)
    assert "--image_size" in refused("--data_dir", "pets", "--image_size", 9)
    for kept in (b"my notes" * 200, data_bytes(make_images(4, 3)), b"short"):  # which --data_dir has not made
        (tmp_path / "pets_8x8x3.bin").write_bytes(kept)
        assert "pets_8x8x3.bin" in refused(*PETS)
    (tmp_path / "pets_8x8x3.bin").unlink()
    trainer.path = str(tmp_path / "pets")
    assert "--data_dir pets" in refused(*PETS)
    (tmp_path / "tools/prepare_data.py").unlink()
    assert "prepare_data.py" in refused(*PETS)


def test_train_unet_ends_with_what_prepares(trainer: Trainer, tmp_path: Path) -> None:
    """A program that is stopped leaves nobody behind who still prepares."""
    save_pets(tmp_path)
    (tmp_path / "tools/python3").write_text(f"#!/bin/sh\necho $$ >{tmp_path}/number\nexec sleep 60\n")
    process = subprocess.Popen([trainer.program, *TINY, *PETS], cwd=tmp_path, env=environment() | {"PATH": f"{trainer.path}:{os.environ['PATH']}"})
    try:
        wait_for(lambda: (tmp_path / "number").exists() and (tmp_path / "number").read_text().endswith("\n"))
    finally:
        process.terminate()
    assert process.wait(20) == -15
    child = Path("/proc") / (tmp_path / "number").read_text().strip() / "cmdline"
    wait_for(lambda: not child.exists() or b"sleep" not in child.read_bytes())


def wait_for(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# ----------------------------------------------------------------------------------------------------------------------
# --crops, and pairs of --cond_dir


def random_crop_of_guided_diffusion(picture: Image.Image, image_size: int, draw: random.Random) -> np.ndarray:
    """random_crop_arr of guided-diffusion's image_datasets.py, by its formulas: 0.8 to 1 of the smaller side."""
    smaller = draw.randrange(image_size, math.ceil(image_size / 0.8) + 1)
    while min(picture.size) >= 2 * smaller:
        picture = picture.resize(tuple(side // 2 for side in picture.size), resample=Image.Resampling.BOX)
    scale = smaller / min(picture.size)
    array = np.asarray(picture.resize(tuple(round(side * scale) for side in picture.size), resample=Image.Resampling.BICUBIC))
    top = draw.randrange(array.shape[0] - image_size + 1)
    left = draw.randrange(array.shape[1] - image_size + 1)
    return array[top : top + image_size, left : left + image_size]


@pytest.mark.parametrize("size", [(200, 131), (64, 64), (33, 90), (517, 300)])
def test_crops_are_those_of_guided_diffusion(tmp_path, size):
    picture = Image.open(noise(tmp_path / "in/a.png", size))
    assert convert("--data_dir", tmp_path / "in", "--output_name", tmp_path / "out.bin", "--image_size", 32, "--crops", 5) == 0
    images, _, _ = read_data(str(tmp_path / "out.bin"))
    for crop, image in enumerate(images):
        expected = random_crop_of_guided_diffusion(picture, 32, random.Random(f"crop {crop} of picture 0"))
        assert (image == expected.transpose(2, 0, 1)).all(), crop
    assert len({image.tobytes() for image in images}) == 5


def test_a_rectangle_is_cut_from_anywhere_in_a_picture(tmp_path):
    """Columns of the picture tell where a part comes from: all of them do, and none is stretched."""
    rows, columns = np.mgrid[0:100, 0:240]
    (tmp_path / "in").mkdir()
    Image.fromarray(np.stack([columns, rows * 2, rows * 0], 2).astype(np.uint8)).save(tmp_path / "in/a.png")
    assert convert("--data_dir", tmp_path / "in", "--output_name", tmp_path / "out.bin", "--image_size", "16x24", "--crops", 200) == 0
    images = read_data(str(tmp_path / "out.bin"))[0].astype(float)
    assert images.shape == (200, 3, 16, 24)
    seen = images[:, 0].mean(1)  # the column of the picture at each column of a part
    assert seen.min() < 8 and seen.max() > 231
    # 100 rows become 16 to 20, so a step is 5 to 6.25 of the picture's pixels both ways. (Values are whole numbers, and the edges are reflected.)
    across, down = np.diff(seen[:, 2:-2]).mean(1), np.diff(images[:, 1].mean(2)[:, 2:-2] / 2).mean(1)
    assert ((across > 4.9) & (across < 6.4)).all() and np.abs(across - down).max() < 0.3


def test_labels_and_numbers_are_those_of_the_picture_that_was_cut(tmp_path):
    for name, color in {"cats/a": RED, "dogs/b": GREEN, "dogs/c": BLUE}.items():
        save(tmp_path / f"in/{name}.png", color)
    (tmp_path / "in/dogs/broken.png").write_bytes(b"no picture")
    (tmp_path / "t.csv").write_text("file,n\na.png,1\nb.png,2\nc.png,3\nbroken.png,4\n")
    arguments = ["--output_name", tmp_path / "out.bin", "--image_size", 8, "--crops", 3, "--values", tmp_path / "t.csv"]
    assert convert("--data_dir", tmp_path / "in", *arguments) == 0
    data = open_data_file(str(tmp_path / "out.bin"))
    assert data.labels.tolist() == [0] * 3 + [1] * 6 and data.values[:, 0].tolist() == [1] * 3 + [2] * 3 + [3] * 3
    assert (data.images[:, :, 0, 0] == np.repeat([RED, GREEN, BLUE], 3, 0)).all()
    shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "in")
    before = (tmp_path / "out.bin").read_bytes()
    assert convert("--zip", tmp_path / "packed.zip", *arguments) == 0 and (tmp_path / "out.bin").read_bytes() == before


def pairs(folder: Path) -> list:
    return ["--data_dir", folder / "a", "--cond_dir", folder / "b", "--output_name", folder / "a.bin", "--cond_output_name", folder / "b.bin"]


@pytest.mark.parametrize("crops", [[], ["--crops", "4"]])
def test_pairs_are_in_one_order_and_cut_alike(tmp_path, capsys, crops):
    """Each condition is the negative of its image, of half the size in one pair, and so are the parts that were cut out."""
    for name, size in {"x/1": (40, 30), "x/2": (64, 64), "y/3": (30, 50)}.items():
        picture = Image.open(noise(tmp_path / f"a/{name}.png", size))
        (tmp_path / f"b/{name}").parent.mkdir(parents=True, exist_ok=True)
        Image.eval(picture, lambda value: 255 - value).save(tmp_path / f"b/{name}.bmp")
    save(tmp_path / "a/y/4.png", RED, (80, 60))
    save(tmp_path / "b/y/4.gif", BLUE, (40, 30))
    save(tmp_path / "a/y/alone.png", RED)
    save(tmp_path / "b/other.png", RED)
    assert convert(*pairs(tmp_path), "--image_size", 16, *crops) == 0
    said = capsys.readouterr().err
    assert f"{tmp_path}/a/y/alone.png" in said and f"{tmp_path}/b/other.png" in said
    images, labels, _ = read_data(str(tmp_path / "a.bin"))
    conditions, no_labels, _ = read_data(str(tmp_path / "b.bin"))
    parts = 4 if crops else 1
    assert len(images) == len(conditions) == 4 * parts and labels.tolist() == [0, 0] * parts + [1, 1] * parts and no_labels is None
    # A half is rounded up in both, so that each pass over rows or columns adds at most 1 to the sum of a value and its negative. Halving has two
    # passes, and the two of resizing enlarge what is there by at most 1.3 (bicubic's negative weights): ((1 + 1) 1.3 + 1) 1.3 + 1 = 5.7.
    assert np.abs(images[:-parts].astype(int) + conditions[:-parts] - 255).max() <= 5
    assert (conditions[-parts:] == np.array(BLUE, np.uint8)[:, None, None]).all()


def test_pairs_that_are_none(tmp_path, capsys):
    noise(tmp_path / "a/1.png", (40, 30))
    noise(tmp_path / "b/2.png", (40, 30))
    assert convert(*pairs(tmp_path)) == 1
    noise(tmp_path / "b/1.png", (40, 31))
    assert convert(*pairs(tmp_path)) == 1
    assert "b/1.png" in capsys.readouterr().err
    noise(tmp_path / "b/1.jpg", (40, 30))
    assert "b/1." in fails(capsys, *pairs(tmp_path))
    assert not (tmp_path / "a.bin").exists() and not (tmp_path / "b.bin").exists()


def test_both_files_of_pairs_appear_or_neither(tmp_path, capsys, monkeypatch):
    for folder in "ab":
        noise(tmp_path / folder / "1.png")
    assert convert(*pairs(tmp_path)) == 0
    before = contents(tmp_path)
    noise(tmp_path / "a/2.png")
    noise(tmp_path / "b/2.png")
    capsys.readouterr()
    with monkeypatch.context() as patch:
        real, calls = os.replace, []
        patch.setattr(os, "replace", lambda *args, **kw: calls.append(args) or real(*args, **kw))
        patch.setattr("common.data_files.DataWriter.finish", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert fails(capsys, *pairs(tmp_path)) and not calls
    assert {name: content for name, content in contents(tmp_path).items() if "2.png" not in name} == before


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--idx x --crops 2", "--crops"),
        ("--data_dir a --cond_dir b", "--cond_output_name"),
        ("--zip x.zip --cond_dir b --cond_output_name c.bin", "--cond_dir"),
        ("--data_dir a --cond_output_name c.bin", "--cond_output_name"),
        ("--data_dir a --cond_dir b --cond_output_name ./out.bin", "--cond_output_name"),
        ("--data_dir a --cond_dir b --cond_output_name b/1.png", "--cond_output_name"),
        ("--data_dir a --cond_dir b --cond_output_name c.bin --encode vae", "--cond_dir"),
    ],
)
def test_flags_of_crops_and_pairs_that_do_not_go_together(tmp_path, capsys, monkeypatch, arguments, named):
    noise(tmp_path / "a/1.png")
    noise(tmp_path / "b/1.png")
    monkeypatch.chdir(tmp_path)
    before = contents(tmp_path)
    assert named in fails(capsys, *arguments.split(), "--output_name", "out.bin") and contents(tmp_path) == before


def test_a_flag_is_not_the_value_of_another(capsys):
    for flag in "--data_dir", "--idx":
        assert flag in fails(capsys, flag, "--output_name", "a.bin")
    assert "--output_name" in fails(capsys, "--data_dir", "a", "--output_name", "--crops=2")
    assert "--nowhere" in fails(capsys, "--data_dir=--nowhere", "--output_name", "a.bin")
    for flag in "junk", "--model_path", "--iterations", "--classifier_scale":
        assert flag in fails(capsys, flag, "1")


def test_images_that_are_encoded_may_be_large(capsys):
    given = ["--data_dir", "a", "--output_name", "b", "--image_size", "4104"]
    assert "--image_size" in fails(capsys, *given)
    assert prepare_data.parse_arguments([*given, "--encode", "vae"]).image_size == (4104, 4104)


@pytest.mark.parametrize("crops", ["0", "-1", "1001", "2.5", "many"])
def test_absurd_numbers_of_crops(capsys, crops):
    assert "--crops" in fails(capsys, "--data_dir", "a", "--output_name", "b", "--crops", crops)


@pytest.mark.parametrize("channels, expected", [(None, [153, 153, 233]), (1, [162]), (3, [153, 153, 233]), (4, [0, 0, 200, 102])])
def test_a_condition_may_be_transparent(tmp_path, channels, expected):
    """102 of 255 are 0.4: on white 255 - 0.4 255 and 255 - 0.4 55 are left; grey is 0.299, 0.587 and 0.114 of these."""
    save(tmp_path / "a/1.png", RED)
    save(tmp_path / "b/1.png", (0, 0, 200, 102), mode="RGBA")
    for crops in (["--crops", 2], []):
        assert convert(*pairs(tmp_path), "--image_size", 8, *crops, *(["--cond_channels", channels] if channels else [])) == 0
        assert read_data(str(tmp_path / "b.bin"))[0][-1, :, 3, 3].tolist() == expected


def test_a_condition_of_sixteen_bits_may_be_transparent(tmp_path):
    save(tmp_path / "a/1.png", RED)
    save(tmp_path / "b/1.png", RED)
    values = np.full((8, 8), 32896, np.uint16)
    values[:, 4:] = 1000
    Image.fromarray(values).save(tmp_path / "b/1.png", transparency=1000)
    assert convert(*pairs(tmp_path), "--image_size", 8, "--cond_channels", 4) == 0
    pictures = read_data(str(tmp_path / "b.bin"))[0]
    assert pictures[0, :, 4, 0].tolist() == [128, 128, 128, 255] and pictures[0, 3, 4, 7] == 0


def test_a_picture_is_too_narrow_for_crops(tmp_path, capsys):
    """It would become 64 pixels high and 25 million wide, which is more than the memory of a small machine."""
    save(tmp_path / "in/a.png", RED, (400000, 1))
    assert convert("--data_dir", tmp_path / "in", "--output_name", tmp_path / "o.bin", "--crops", 4) == 1
    assert "in/a.png" in capsys.readouterr().err


@pytest.mark.parametrize("full", ["a.bin", "b.bin"])
def test_a_full_disk_is_told_of_the_file_that_did_not_fit(tmp_path, capsys, monkeypatch, full):
    """Even where only the last bytes, which wait in a buffer, do not fit: the other file is still the old one."""
    for folder in "ab":
        noise(tmp_path / folder / "1.png")
        (tmp_path / f"{folder}.bin").write_bytes(b"precious")
    before = contents(tmp_path)

    class FullDisk(io.BufferedWriter):
        def flush(self):
            raise OSError(28, "No space left on device")

    def open_temporary(name: str, folder: int):
        temporary, file = real(name, folder)
        return temporary, FullDisk(file.detach()) if name == full else file

    real = files.open_temporary
    with monkeypatch.context() as patch:
        patch.setattr("prepare_data.check_output", lambda *arguments, **named: None)
        patch.setattr(files, "open_temporary", open_temporary)
        said = fails(capsys, *pairs(tmp_path))
    assert f"{tmp_path}/{full}" in said
    assert contents(tmp_path) == before
