"""Turns images into the .bin file that train_unet.cu and train_unet.py train on.

    python prepare_data.py --data_dir DIR --output_name F.bin        folders of images; the folders in them are classes
    python prepare_data.py --data_dir DIR                            the same into DIR_64x64x3.bin (height, width, channels) beside the folder
    python prepare_data.py --zip FILE.zip --output_name F.bin        the same in a zip; EDM's data sets, with their dataset.json
    python prepare_data.py --idx IMAGES LABELS --output_name F.bin   MNIST, Fashion-MNIST (.gz or not)
    python prepare_data.py --cifar10 FILE... --output_name F.bin     CIFAR-10's binary batches
    python prepare_data.py --emoji FONT.ttf --output_name F.bin      every picture of a colour-emoji font
    ... --crops 4                                                    four parts of each picture, cut out at random
    ... --cond_dir DIR2 --cond_output_name F2.bin                    a second file, of the picture with the same name in another folder
    ... --image_size 256 --encode VAE_DIR                            their latents, by an AutoencoderKL of diffusers on this disk
    ... --values TABLE.csv                                           numbers of each picture, to condition on: a line for each, its name first;
                                                                     a first line may name the numbers; of a .npy the rows are in reading order
    ... --white 4095                                                 which value is white in grey pictures of more than 8 bits

docs/FORMATS.md describes the file byte by byte.
"""

from __future__ import annotations

import csv
import dataclasses
import signal
import sys
from dataclasses import dataclass, field

from common import program
from common.flags import flag, format_value, numbers, parse_flags
from common.program import UserError

# ----------------------------------------------------------------------------------------------------------------------
# Command line

SOURCE = "What is read: exactly one of these is needed"


@dataclass
class Options:
    data_dir: str = flag("", "folder of images; the last level of folders in it that has several is the classes", heading=SOURCE)
    zip: str = flag("", "the same in a zip; or EDM's data sets, labelled by their dataset.json", heading=SOURCE)
    idx: list[str] = flag((), "IMAGES LABELS: idx files, as MNIST has; .gz or not; LABELS may be left out", heading=SOURCE)
    cifar10: list[str] = flag((), "FILE...: binary CIFAR-10 batches (data_batch_1.bin ...)", heading=SOURCE)
    emoji: str = flag("", "colour-emoji font with bitmaps, such as Noto Color Emoji", heading=SOURCE)
    output_name: str = flag("", "data file to write; needed, but with --data_dir alone it may be left out: FOLDER_64x64x3.bin beside the folder")
    image_size: tuple[int, int] = flag((), "64, or HxW such as 48x64; default: 64, 32 for CIFAR-10 and 28x28 idx images, EDM's data as they are")
    encode: str = flag("", "write latents instead: the folder of an AutoencoderKL, or of a pipeline that has one")
    values: str = flag("", "numbers of each picture, for --cond_dim: a .csv, each line a file's name and its numbers, or a .npy, a row for each")
    channels: str = flag("", "1 = grey, 3 = RGB; default 3, but 1 for idx files, and if all pictures in a folder or zip are grey", choices="1|3")
    white: int = flag(0, "value that is white in grey pictures of more than 8 bits; default: 65535, and 32 bits are refused", 1, 2**31 - 1)
    crops: int = flag(0, "parts of each picture in a folder or zip, from anywhere (guided-diffusion's random_crop); default: its centre", 1, 1000)
    cond_dir: str = flag("", "folder of pictures that those of --data_dir, of the same path but for .png and such, are conditioned on (--cond_file)")
    cond_output_name: str = flag("", "data file to write them to, in the same order and cut in the same way")
    cond_channels: str = flag("", "as --channels, of those pictures; 4 = RGB and how opaque; default 3", choices="1|3|4")
    folder_checksum: int = flag(0, "what ./train_unet --data_dir hands over, by which it knows its data file again; default: 0", 0, 2**32 - 1)


OPTIONS = {f.name: f for f in dataclasses.fields(Options)}
SOURCES = [name for name, f in OPTIONS.items() if f.metadata.get("heading") == SOURCE]


def parse_arguments(arguments: list[str]) -> Options:
    args = Options(**parse_flags(arguments, OPTIONS, __doc__.strip()))
    if sum(bool(getattr(args, name)) for name in SOURCES) != 1:
        raise UserError(f"--{', --'.join(SOURCES)}: one of these says what is read, and only one")
    if not args.output_name and (not args.data_dir or args.cond_dir or args.encode):
        raise UserError("--output_name: is missing; name the data file to write")
    # Images that are encoded may be larger: their latents are smaller.
    if args.image_size and (min(args.image_size) < 1 or (max(args.image_size) > 4096 and not args.encode)):
        raise UserError(f"--image_size {format_value('image_size', args.image_size)}: must be a number of pixels from 1 to 4096, or HxW")
    return args


if __name__ == "__main__":  # before packages that take a second
    program.begin("prepare_data", parse_arguments, program.PREPARING, signal.SIGTERM)

import gzip
import io
import itertools
import json
import os
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO, TextIO

import numpy as np
from PIL import Image, ImageDraw, ImageFont, features

from common.data_files import MOST_VALUES, new_data_file, write_data
from common.files import DataError, check_output, is_data, open_regular
from common.pictures import (
    Account,
    Cut,
    Parts,
    channels_of,
    choose_pictures,
    counted,
    decode_images,
    image_to_array,
    label_by_folder,
    list_images,
    nfc,
    picture_formats,
    progress,
    read_picture,
    say,
    tell,
)
from common.program import NOT_OF_DATA, NOT_OF_PICTURES, how_to_install, printable, standard_streams, take

MOST_BYTES = 2 << 30  # of a known data set's file, unpacked: more is not what it seems to be
MOST_PICTURE_BYTES = 256 << 20  # of a picture in a zip, unpacked
CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
SKIN_TONES = {chr(code) for code in range(0x1F3FB, 0x1F400)}


# ----------------------------------------------------------------------------------------------------------------------
# What the command line can read. A source makes its images as they are asked for; the labels are complete after the
# last one.


@dataclass
class Source:
    images: Iterator[np.ndarray]
    labels: list[int] | None = None
    num_classes: int = 0
    class_names: list[str] = field(default_factory=list)
    # Of files: their names, and of each image made so far which of them it is (broken ones are left out).
    names: list[str] | None = None
    kept: list[int] = field(default_factory=list)
    # --cond_dir: the pictures that belong to images made so far, until they are written.
    conditions: deque[np.ndarray] = field(default_factory=deque)


def decoded(
    paths: list[str],
    all_labels: list[int] | None,
    class_names: list[str],
    decode: Callable[[str, int], Iterable[np.ndarray]],
    account: Account,
) -> Source:
    """Pictures that are decoded as they are asked for. Without names, the classes are as many as the largest label says."""
    kept: list[int] = []
    if all_labels is None:
        return Source(decode_images(paths, kept, decode, account), names=paths, kept=kept)
    labels: list[int] = []

    def images() -> Iterator[np.ndarray]:
        for image in decode_images(paths, kept, decode, account):
            labels.append(all_labels[kept[-1]])
            yield image

    return Source(images(), labels, len(class_names) or max(all_labels) + 1, class_names, paths, kept)


def by_name(found: list[Parts], folder: str) -> dict[str, str]:
    """Pictures by their path in the folder without .png and such."""
    named: dict[str, str] = {}
    for parts in found:
        name, path = nfc(os.path.splitext("/".join(parts))[0]), os.path.join(folder, *parts)
        if name in named:
            told = "differ in the last part of their names, or in how accents are written, alone"
            raise DataError(f"{named[name]} and {path} {told}, so nothing says which one belongs to a pair")
        named[name] = path
    return named


def tell_alone(paths: list[str], folder: str, other: str) -> None:
    """Names the pictures that have no partner in the other folder."""
    if paths:
        some = ", ".join(paths[:3]) + (", ..." if len(paths) > 3 else "")
        tell(f"{counted(len(paths), 'picture')} of {folder} without a partner in {other}, left out: {some}")


def open_pairs(data_dir: str, cond_dir: str, cut: Cut, channels: int, cond_channels: int, account: Account) -> Source:
    """The pictures in a folder, each with the one that has its path and name, but for .png and such, in the other folder. channels: 0: they say it."""
    found = list_images(data_dir, account)
    labels, class_names = label_by_folder(found)
    images, partners = by_name(found, data_dir), by_name(list_images(cond_dir, account), cond_dir)
    tell_alone([path for name, path in images.items() if name not in partners], data_dir, cond_dir)
    tell_alone([path for name, path in partners.items() if name not in images], cond_dir, data_dir)
    paired = [(number, path, partners[name]) for number, (name, path) in enumerate(images.items()) if name in partners]
    if not paired:
        raise DataError(f"no picture of {data_dir} has one of the same name in {cond_dir}")
    channels = channels or channels_of(path for _, path, _ in paired)
    conditions: deque[np.ndarray] = deque()

    def decode(path: str, index: int) -> list[np.ndarray]:
        partner = paired[index][2]
        picture, condition = read_picture(path, channels, account), read_picture(partner, cond_channels, account)
        if picture.width * condition.height != picture.height * condition.width:
            sizes = f"{picture.width}x{picture.height} and {condition.width}x{condition.height}"
            raise DataError(f"{partner}, its partner, has another shape ({sizes}), so that nothing says where they lie on each other")
        if condition.size != picture.size:
            condition = condition.resize(picture.size, resample=Image.Resampling.BICUBIC)
        parts = cut.parts(picture, index)
        conditions.extend(cut.parts(condition, index))
        return parts

    pair_labels = None if labels is None else [labels[number] for number, _, _ in paired]
    source = decoded([path for _, path, _ in paired], pair_labels, class_names, decode, account)
    source.conditions = conditions
    return source


def read_member(archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    """A file in a zip, never more of it than its entry says. (Other ways to pack unpack without limit.)"""
    entry = archive.getinfo(name)
    if entry.flag_bits & 1:
        raise DataError(f"{name} in {archive.filename} is encrypted")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or entry.file_size > most:
        raise DataError(f"{name} in {archive.filename} unpacks to {entry.file_size} bytes, or is neither stored nor deflated")
    with archive.open(entry) as file:
        return file.read(entry.file_size)


def zip_labels(archive: zipfile.ZipFile, names: list[str]) -> list[int] | None:
    """The labels of an EDM data set (dataset_tool.py): {"labels": [["00000/img00000000.png", 6], ...]}, or null in place of the list."""
    where = f"dataset.json in {archive.filename}"
    try:
        labels = json.loads(read_member(archive, "dataset.json", (1 << 20) + 1024 * len(names)))["labels"]
        if labels is None:
            return None
        by_name = {nfc(name): label for name, label in labels}
    except (ValueError, TypeError, KeyError, RecursionError, zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError) as error:
        raise DataError(f"{where} holds no labels as EDM's dataset_tool.py writes them") from error
    for name in map(nfc, names):
        if name not in by_name:
            raise DataError(f"{where} has no label for {name}")
        if type(by_name[name]) is not int or not 0 <= by_name[name] < 1000000:
            raise DataError(f"{where} says {str(by_name[name])[:40]} of {name}, which is not the number of a class")
    return [by_name[nfc(name)] for name in names]


def shared_folders(names: list[str]) -> int:
    """How many folders all of these files lie in, counted from the top."""
    return len(os.path.commonprefix([name.split("/")[:-1] for name in names]))


def open_zip(path: str, image_size: tuple[int, int] | None, channels: int, crops: int, account: Account) -> Source:
    """The pictures in a zip, read from where they lie. In a data set of EDM's, dataset.json holds the labels and the folders mean nothing; else they mean
    what they do in a folder. channels: 0: the pictures say it."""
    try:
        archive = zipfile.ZipFile(open_regular(path))
        archive.filename = path
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, EOFError) as error:
        raise DataError(f"{path} is not a zip file, or a damaged one: {error}") from error

    entries = archive.namelist()
    # Windows knows two signs between folders, and some of its programs write the one that zips do not have.
    members = {tuple(part for part in name.replace("\\", "/").split("/") if part): name for name in entries if not name.endswith(("/", "\\"))}
    members.pop(("dataset.json",), None)
    found = choose_pictures(filter(None, members), path, account)
    names = [members[parts] for parts in found]

    def open_picture(name: str) -> BinaryIO:
        return io.BytesIO(read_member(archive, name, MOST_PICTURE_BYTES))

    def cut_out(size: tuple[int, int]) -> Callable[[str, int], list[np.ndarray]]:
        return lambda name, index: Cut(size, crops).parts(read_picture(name, channels, account, open_picture), index)

    if all(archive.getinfo(name).flag_bits & 1 for name in names):
        raise DataError(f"{path} is encrypted: unpack it, and give the folder to --data_dir")
    channels = channels or channels_of(names, open_picture)
    if "dataset.json" not in entries:
        labels, class_names = label_by_folder(found)
        return decoded(names, labels, class_names, cut_out(image_size or (64, 64)), account)
    if not image_size:
        try:
            with Image.open(open_picture(names[0]), formats=picture_formats()[0]) as image:
                image_size = image.height, image.width
        except NOT_OF_PICTURES:
            raise
        except Exception as error:  # noqa: BLE001 (Pillow's decoders raise nearly anything on a damaged file)
            raise DataError(f"{names[0]} in {path} is no picture that says the size of all: {error}; --image_size does") from error
    return decoded(names, zip_labels(archive, names), [], cut_out(image_size), account)


def read_bytes(path: str) -> bytes:
    """A file, unpacked if it is compressed with gzip."""
    with open_regular(path) as file:
        try:
            packed = file.peek(2)[:2] == b"\x1f\x8b"
            chunks, size = [], 0
            with gzip.open(file) if packed else file as stream:
                while chunk := stream.read(1 << 24):
                    chunks.append(chunk)
                    size += len(chunk)
                    if size > MOST_BYTES:
                        raise DataError(f"{path} holds more than {MOST_BYTES >> 30} GiB, so it is no file of a data set that is known here")
            return b"".join(chunks)
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or f"damaged gzip data ({error})"
            raise DataError(f"cannot read {path}: {reason}") from error


def read_idx(path: str, dimensions: int) -> np.ndarray:
    """An idx file of bytes: two zeros, 8 (unsigned byte), the number of dimensions, their big-endian sizes, values."""
    data = read_bytes(path)
    if data[:4] != bytes([0, 0, 8, dimensions]) or len(data) < 4 + 4 * dimensions:
        content = {1: "labels", 3: "images"}[dimensions]
        raise DataError(f"{path} is not an idx file of {content} (bytes in {dimensions} dimensions)")
    shape = [int(size) for size in np.frombuffer(data, ">u4", dimensions, offset=4)]
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions)
    if values.size != np.prod(shape, dtype=object) or values.size == 0:
        raise DataError(f"{path} holds {values.size} values; its header says {'x'.join(map(str, shape))}")
    return values.reshape(shape)


def open_idx(files: list[str], image_size: tuple[int, int] | None, channels: int) -> Source:
    if len(files) > 2:
        raise DataError(f"--idx takes a file of images and a file of labels, not {len(files)} files")
    images = read_idx(files[0], 3)
    if images.shape[1:] == (28, 28) and image_size != (28, 28):  # 32 can be halved five times; 0 is the background
        images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    size = image_size or images.shape[1:]
    source = Source(image_to_array(Image.fromarray(image), size, channels) for image in progress(images))
    if len(files) == 2:
        labels = read_idx(files[1], 1)
        if len(labels) != len(images):
            raise DataError(f"{files[0]} has {len(images)} images, but {files[1]} has {len(labels)} labels")
        source.labels = labels.tolist()
        source.num_classes = max(10, int(labels.max()) + 1)
    return source


def open_cifar10(files: list[str], image_size: tuple[int, int], channels: int) -> Source:
    records = []
    for path in files:
        data = np.frombuffer(read_bytes(path), np.uint8)
        if data.size == 0 or data.size % 3073 or data[::3073].max() > 9:
            raise DataError(f"{path} is not a binary CIFAR-10 batch (a label from 0 to 9 and 3x32x32 bytes an image)")
        records.append(data.reshape(-1, 3073))
    batch = np.concatenate(records)
    pictures = batch[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    images = (image_to_array(Image.fromarray(np.ascontiguousarray(p)), image_size, channels) for p in progress(pictures))
    return Source(images, batch[:, 0].tolist(), 10, CIFAR10_CLASSES)


def emoji_texts(font_file: str) -> tuple[list[str], int]:
    """The texts for which a bitmap font has a picture, sorted, without skin tones; and the pictures' native size. Single code points are in the font's
    cmap; flags, keycaps and the sequences that are joined to one picture are ligatures in its GSUB table."""
    try:
        from fontTools.ttLib import TTFont
    except ImportError as error:
        raise DataError("--emoji needs fontTools, which comes with matplotlib: pip install matplotlib") from error
    open_regular(font_file).close()
    try:
        font = TTFont(font_file, lazy=True)
        if "CBDT" not in font or "cmap" not in font:
            raise DataError(f"{font_file} has no bitmap pictures (table CBDT), as Noto Color Emoji has")
        size = font["CBLC"].strikes[0].bitmapSizeTable.ppemY
        pictures = set(font["CBDT"].strikeData[0])
        cmap = font.getBestCmap()
        texts = {chr(code) for code, glyph in cmap.items() if glyph in pictures}
        character = {glyph: chr(code) for code, glyph in cmap.items()}
        lookups = font["GSUB"].table.LookupList.Lookup if "GSUB" in font else []
        for table in (getattr(table, "ExtSubTable", table) for lookup in lookups for table in lookup.SubTable):
            for first, ligatures in getattr(table, "ligatures", {}).items():
                for ligature in ligatures:
                    glyphs = [first, *ligature.Component]
                    if ligature.LigGlyph in pictures and all(glyph in character for glyph in glyphs):
                        texts.add("".join(character[glyph] for glyph in glyphs))
    except OSError as error:
        raise DataError(f"cannot read {font_file}: {error.strerror or error}") from error
    except NOT_OF_DATA:
        raise
    except Exception as error:  # noqa: BLE001 (fontTools raises nearly anything at a damaged font)
        raise DataError(f"{font_file} is not a font, or is damaged: {error}") from error
    return sorted(text for text in texts if not SKIN_TONES.intersection(text)), size


def open_emoji(font_file: str, image_size: tuple[int, int], channels: int) -> Source:
    texts, size = emoji_texts(font_file)
    if not features.check("raqm"):  # Pillow's basic layout knows no ligatures
        tell("this Pillow has no raqm: flags and joined emoji are left out")
        texts = [text for text in texts if len(text) == 1]
    try:
        font = ImageFont.truetype(font_file, size)
    except OSError as error:
        raise DataError(f"Pillow cannot use {font_file}: {error}") from error

    def render() -> Iterator[np.ndarray]:
        seen: set[bytes] = set()
        for text in progress(texts):
            left, top, right, bottom = (int(edge) for edge in font.getbbox(text))
            if right - left > 1.5 * size:  # more than one picture: the ligature was not applied
                continue
            picture = Image.new("RGB", (right - left, bottom - top), "white")
            ImageDraw.Draw(picture).text((-left, -top), text, font=font, embedded_color=True)
            # Noto's pictures are 128x128 in a cell of 136x128. At half their size a box filter is an exact mean, and
            # flat colours stay flat, where Lanczos would ring.
            image = image_to_array(picture, image_size, channels, Image.Resampling.BOX)
            if image.min() == 255 or image.tobytes() in seen:
                continue
            seen.add(image.tobytes())
            yield image
        print(f"{len(texts)} code points and sequences without skin tones, {len(seen)} distinct pictures")

    return Source(render())


def encoded(images: Iterable[np.ndarray], vae_dir: str, batch_size: int = 8) -> Iterator[np.ndarray]:
    """The latents of images, float32, whose standard deviation (some 1, or the autoencoder's scaling factor does not suit these images) is told."""
    try:
        import torch  # which takes seconds, and only this needs it

        from common.diffusers_files import Autoencoder

        vae = Autoencoder(vae_dir)
    except ModuleNotFoundError as error:
        raise DataError(how_to_install(error.name or "")) from error
    images = iter(images)
    count, total, squares = 0, 0.0, 0.0
    while batch := list(itertools.islice(images, batch_size)):
        latents = vae.encode(torch.from_numpy(np.stack(batch)).float() / 127.5 - 1).numpy()
        count, total, squares = count + latents.size, total + latents.sum(dtype=float), squares + np.square(latents, dtype=float).sum()
        yield from latents
    if count:
        say(f"latents: mean {total / count:.3f}, standard deviation {(squares / count - (total / count) ** 2) ** 0.5:.3f}", sys.stdout)


# ----------------------------------------------------------------------------------------------------------------------
# --values: numbers of each image


def csv_lines(file: TextIO, path: str) -> Iterator[list[str]]:
    """The cells of each line of a .csv."""
    try:
        yield from csv.reader(file)
    except csv.Error as error:
        raise DataError(f"{path}: is no table of cells with commas ({error})") from None


def read_table(path: str) -> tuple[list[str], dict[str, list[float]]]:
    """A .csv of a file's name and numbers in each line: the numbers' names, from the first line ([] if that has numbers, too), and the rows by file."""
    names: list[str] = []
    rows: dict[str, list[float]] = {}
    width = 0
    with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig", errors="replace", newline="") as file:
        for cells in csv_lines(file, path):
            if not cells:
                continue
            first, width = width == 0, width or len(cells)
            if len(cells) != width or width < 2:
                told = f"has {len(cells)} columns; a line is a file's name and its numbers, {max(width, 2)} columns"
                if len(cells) == 1 and ";" in cells[0]:
                    told = "has semicolons between its cells; save the table with commas"
                raise DataError(f"{path}: the line of {cells[0]} {told}")
            row = numbers(cells[1:])
            if not row and first:
                names = cells[1:]
                continue
            if not row or not np.isfinite(row).all():
                raise DataError(f"{path}: the line of {cells[0]} holds something else than finite numbers: {','.join(cells[1:])[:60]}")
            name = nfc(cells[0])
            if name in rows:
                raise DataError(f"{path}: has two lines of {name}")
            rows[name] = row
    if not rows:
        raise DataError(f"{path}: has no line of a file's name and numbers")
    return names, rows


def table_values(path: str, files: list[str], folder: str) -> tuple[np.ndarray, list[str]]:
    """(numbers (len(files), K), their names) of a .csv. A line names its file from the folder on, or by its last part if no other has the same. folder: "":
    the files are those of a zip, and the folder is what all of them share."""
    names, rows = read_table(path)
    files = files if folder else [file.replace("\\", "/") for file in files]  # as open_zip reads them
    shared = shared_folders(files)
    found, missing = [], []
    of_line: dict[str, str] = {}  # the file of each line
    for file in files:
        within = os.path.relpath(file, folder) if folder else "/".join(file.split("/")[shared:])
        key = next((name for name in map(nfc, (file, within, os.path.basename(file))) if name in rows), within)
        (found if key in rows else missing).append(key)
        other = of_line.setdefault(key, within)
        if other != within:
            raise DataError(f"{path}: the line of {key} may mean {other} or {within}; name them with their folders")
    if missing:
        raise DataError(f"{path}: has no line of {missing[0]}" + (f", nor of {len(missing) - 1} others" if len(missing) > 1 else ""))
    if unused := sorted(rows.keys() - set(found)):
        tell(f"{path}: lines that no picture belongs to: {len(unused)}, the first of {unused[0]}")
    return np.array([rows[key] for key in found], np.float32), names


def array_values(path: str) -> np.ndarray:
    """(images, K) of a .npy; one of a single dimension has one number an image."""
    try:
        with open_regular(path) as file:
            values = np.load(file, allow_pickle=False)
        if not isinstance(values, np.ndarray):
            raise ValueError("it is an archive of arrays")
        if values.dtype.kind not in "biuf":
            raise ValueError(f"its type is {values.dtype}")
        with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite, and is refused
            values = np.asarray(values, np.float32)
    except MemoryError as error:
        raise DataError(f"{path}: needs more memory than is free, or is damaged: {error}") from error
    except NOT_OF_DATA:
        raise
    except Exception as error:  # noqa: BLE001 (numpy raises nearly anything at a damaged header)
        raise DataError(f"{path} is no array of numbers as numpy.save writes it: {error}") from error
    return values[:, None] if values.ndim == 1 else values


def read_values(path: str, source: Source, folder: str) -> tuple[np.ndarray, list[str]]:
    """(numbers (images of the source, K), their names or [])."""
    if path.endswith(".csv"):
        if source.names is None:
            raise DataError(f"--values {path}: names files, and these images come out of one; a .npy has a row for each, in their order")
        values, names = table_values(path, source.names, folder)
    elif path.endswith(".npy"):
        values, names = array_values(path), []
    else:
        raise DataError(f"--values {path}: must end in .csv or .npy")
    if values.ndim != 2 or not 1 <= values.shape[1] <= MOST_VALUES or not np.isfinite(values).all():
        raise DataError(f"--values {path}: must hold finite numbers, a row of 1 to {MOST_VALUES} for each image; its shape is {values.shape}")
    if source.names is not None and len(values) != len(source.names):
        raise DataError(f"--values {path}: has {len(values)} rows, and there are {len(source.names)} pictures")
    return values, names


def take_values(images: Iterable[np.ndarray], source: Source, values: np.ndarray, path: str, taken: list[np.ndarray]) -> Iterator[np.ndarray]:
    """The source's images as they come; the row of each is appended to `taken` meanwhile."""
    in_order = source.names is None  # else read_values has found a row for each name
    for image in images:
        if in_order and len(taken) == len(values):
            raise DataError(f"--values {path}: has {len(values)} rows, and there are more images")
        taken.append(values[len(taken) if in_order else source.kept[-1]])
        yield image
    if in_order and len(taken) != len(values):
        raise DataError(f"--values {path}: has {len(values)} rows, and there are {len(taken)} images")


def tell_values(values: np.ndarray, names: list[str]) -> None:
    """Their ranges: a network learns best from numbers around 1."""
    for k, column in enumerate(values.T[:8]):
        name = f" = {names[k]}" if names else ""
        say(f"number {k}{name}: from {column.min():g} to {column.max():g}", sys.stdout)
    if np.abs(values).max() > 10:
        say("some of these numbers are larger than 10; a network learns best from numbers between -1 and 1", sys.stdout)


# ----------------------------------------------------------------------------------------------------------------------
# A run


def input_files(args: Options) -> Iterator[str]:
    """Whatever is read, so that nothing of it is replaced."""
    yield from filter(None, [*args.idx, *args.cifar10, args.zip, args.emoji, args.values])
    for folder in filter(None, [args.data_dir, args.cond_dir, args.encode]):
        seen: set[str] = set()  # links may lead round in a circle
        for path, folders, names in os.walk(folder, followlinks=True):
            seen.add(os.path.realpath(path))
            folders[:] = [name for name in folders if os.path.realpath(os.path.join(path, name)) not in seen]
            yield from (os.path.join(path, name) for name in names)


def check_flags(args: Options) -> None:
    """UserError if flags do not go together, or an output can't be written."""
    if args.crops and not (args.data_dir or args.zip):
        raise UserError(f"--crops {args.crops}: is for pictures in a folder or a zip: --data_dir or --zip")
    if args.white and not (args.data_dir or args.zip):
        raise UserError(f"--white {args.white}: is for pictures in a folder or a zip: --data_dir or --zip")
    if args.cond_dir and not args.data_dir:
        raise UserError(f"--cond_dir {args.cond_dir}: its pictures belong to those of another folder, which --data_dir names")
    if args.cond_dir and args.encode:
        raise UserError("--encode: makes latents of images, but not of the pictures of --cond_dir; leave out one of the two")
    if args.cond_dir and not args.cond_output_name:
        raise UserError(f"--cond_dir {args.cond_dir}: its pictures become a file of their own; name it with --cond_output_name")
    if not args.cond_dir and (args.cond_output_name or args.cond_channels):
        raise UserError("--cond_output_name and --cond_channels: say what becomes of the pictures of --cond_dir, which is not given")
    if args.output_name:
        check_output("--output_name", args.output_name, input_files(args), is_data, only="data file")
    if args.cond_output_name:
        check_output("--cond_output_name", args.cond_output_name, input_files(args), is_data, only="data file")
        if os.path.realpath(args.cond_output_name) == os.path.realpath(args.output_name):
            raise UserError(f"--cond_output_name {args.cond_output_name}: is --output_name, too; two files are written")


def data_file_beside(folder: str, image_size: tuple[int, int], channels: int) -> str:
    """Where the data file of a folder lies, if nobody names another: as data_file_beside in unet/run/prepare.h says it, too."""
    path = folder.rstrip("/")
    if os.path.basename(path) in ("", ".", ".."):  # no name to which the ending could be added
        path = os.path.realpath(folder)
    if path == "/":
        raise UserError(f"--data_dir {folder}: has no folder in which its data file could lie; name one with --output_name")
    return f"{path}_{image_size[0]}x{image_size[1]}x{channels}.bin"


def open_source(args: Options) -> Source:
    of_pictures = (args.data_dir or args.zip) and not args.encode
    channels = int(args.channels or (1 if args.idx else 0 if of_pictures else 3))  # 0: the pictures say it
    account = Account(args.white)
    if args.idx:
        return open_idx(args.idx, args.image_size, channels)
    if args.cifar10:
        return open_cifar10(args.cifar10, args.image_size or (32, 32), channels)
    if args.zip:
        return open_zip(args.zip, args.image_size, channels, args.crops, account)
    if args.emoji:
        return open_emoji(args.emoji, args.image_size or (64, 64), channels)
    cut = Cut(args.image_size or (64, 64), args.crops)
    if args.cond_dir:
        return open_pairs(args.data_dir, args.cond_dir, cut, channels, int(args.cond_channels or 3), account)
    found = list_images(args.data_dir, account)
    paths = [os.path.join(args.data_dir, *parts) for parts in found]
    channels = channels or channels_of(paths)
    if not args.output_name:  # it depends on the channels
        args.output_name = data_file_beside(args.data_dir, cut.image_size, channels)
        check_output("--output_name", args.output_name, input_files(args), is_data, only="data file")
    return decoded(paths, *label_by_folder(found), lambda path, index: cut.parts(read_picture(path, channels, account), index), account)


def write_pairs(args: Options, source: Source, values: list[np.ndarray] | None, value_names: list[str]) -> int:
    """Both files of --cond_dir, or neither; returns the number of images in each."""
    with new_data_file(args.output_name) as images, new_data_file(args.cond_output_name) as conditions:
        images.folder = args.folder_checksum
        for image in source.images:
            images.add(image)
            conditions.add(source.conditions.popleft())
        conditions.finish()
        return images.finish(source.labels, source.num_classes, values, value_names, source.class_names)


def tell_file(path: str) -> None:
    """What a data file that has been written holds."""
    count, channels, height, width = np.fromfile(path, "<i4", 6)[2:]
    megabytes = os.path.getsize(path) / 1e6
    say(f"wrote {path}: {counted(count, 'image')} of {channels}x{height}x{width} (CxHxW), {megabytes:.1f} MB", sys.stdout)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    standard_streams()
    try:
        args = parse_arguments(list(sys.argv[1:] if arguments is None else arguments))
        check_flags(args)
        source = open_source(args)
        values: list[np.ndarray] | None = None
        value_names: list[str] = []
        if args.values:
            values = []
            rows, value_names = read_values(args.values, source, args.data_dir)
            source.images = take_values(source.images, source, rows, args.values, values)
        if args.encode:
            source.images = encoded(source.images, args.encode)
        if args.cond_dir:
            write_pairs(args, source, values, value_names)
        else:
            behind = source.labels, source.num_classes, values, value_names, source.class_names  # the images
            write_data(args.output_name, source.images, *behind, folder=args.folder_checksum)
    except UserError as error:
        print(f"prepare_data: {printable(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interruption:
        print("prepare_data: interrupted, nothing was written", file=sys.stderr)
        return program.exit_code(interruption)
    if source.labels is not None:
        counts = np.bincount(source.labels, minlength=source.num_classes)
        for number, images in enumerate(counts):
            name = f" = {source.class_names[number]}" if source.class_names else ""
            say(f"class {number}{name}: {counted(images, 'image')}", sys.stdout)
    if values:
        tell_values(np.array(values), value_names)
    tell_file(args.output_name)
    if args.cond_dir:
        tell_file(args.cond_output_name)
    return 0


if __name__ == "__main__":
    take(program.interrupt, signal.SIGINT, signal.SIGTERM)  # so that the temporary file goes
    sys.exit(program.run_program("prepare_data", main))
