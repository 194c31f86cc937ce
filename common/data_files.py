"""Data files: images, and labels if there are classes. docs/FORMATS.md describes them byte by byte. This module needs numpy."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import ArrayLike

from common.files import DATA_MAGIC, HEADER_BYTES, SAMPLES, UNET_CU_DATA_MAGIC, DataError, atomic_file, open_regular
from common.flags import Config
from common.program import UserError

MOST_VALUES, MOST_NAME_BYTES = 4096, 1 << 20  # numbers an image, and bytes of their names, or of those of the classes
READ_AT_START = 4 << 30  # bytes: no longer file is read, and so checked, as a whole before training begins


@dataclass
class Data:
    """Images (N, C, H, W), uint8 or float32 in [-1, 1]. Those of a file are a memory map; read() takes some of them, verified, and can say when it fails."""

    path: str
    images: np.ndarray
    labels: np.ndarray | None = None
    num_classes: int = 0
    crc: int = 0  # of the file's header, which names its content; 0: unet.cu's, or no file
    file: BinaryIO | None = None
    image_crcs: np.ndarray | None = None  # None: not known
    values: np.ndarray | None = None  # (N, K) float32: numbers of each image
    value_names: list[str] = field(default_factory=list)  # of the K numbers; or empty
    class_names: list[str] = field(default_factory=list)  # by their numbers; or empty
    pictures: Data | None = None  # --cond_file: one that each image is conditioned on, in the same order
    numbers: np.ndarray | None = None  # of a part (part_of): the numbers of its images in the file, as `images` and `image_crcs` have them; None: all

    @property
    def count(self) -> int:
        return len(self.images) if self.numbers is None else len(self.numbers)

    def in_file(self, index: np.ndarray) -> np.ndarray:
        """The numbers of these images in the file."""
        return index if self.numbers is None else self.numbers[index]

    def part_of(self, numbers: np.ndarray) -> Data:
        """The images that have these numbers, which are counted from 0 on in it."""
        labels, values = (None if array is None else array[numbers] for array in (self.labels, self.values))
        pictures = self.pictures and self.pictures.part_of(numbers)
        return dataclasses.replace(self, labels=labels, values=values, pictures=pictures, numbers=numbers)

    def expect(self, index: np.ndarray) -> None:
        """Asks the system to bring these images into memory, and does not wait for them."""
        size = self.images[0].nbytes
        for i in self.in_file(index).tolist() if self.file and hasattr(os, "posix_fadvise") else []:
            os.posix_fadvise(self.file.fileno(), HEADER_BYTES + i * size, size, os.POSIX_FADV_WILLNEED)

    def read(self, index: np.ndarray) -> np.ndarray:
        """These images. (From the map the process would be killed if the file had been cut short or the disk failed.)"""
        if not self.file:
            return self.images[self.in_file(index)]
        self.expect(index)
        images = np.empty((len(index), *self.images.shape[1:]), self.images.dtype)
        for image, i in zip(images, self.in_file(index).tolist()):
            reason = read_at(self.file, image, HEADER_BYTES + i * image.nbytes)
            if not reason and self.image_crcs is not None and zlib.crc32(image) != self.image_crcs[i]:
                reason = "its checksum is wrong"
            if reason:
                raise DataError(f"{self.path}: image {i} can't be used ({reason}): the file was changed, cut short or damaged")
        return images

    def read_floats(self, index: np.ndarray) -> np.ndarray:
        """These images as float32 in [-1, 1]."""
        images = self.read(index)
        return images.astype(np.float32) / np.float32(127.5) - np.float32(1) if images.dtype == np.uint8 else np.ascontiguousarray(images, np.float32)

    def read_finite(self, index: np.ndarray, flag: str = "") -> np.ndarray:
        """The same; DataError if a value is not finite. flag: the one that names the file, for the sentence."""
        images = self.read_floats(index)
        for i, image in zip(self.in_file(index).tolist(), images):
            if not np.isfinite(image).all():
                raise DataError(f"{flag}{self.path}: image {i} holds a value that is not finite; make the file again")
        return images

    def as_classes_of(self, path: str, names: Sequence[str]) -> Data:
        """The same images with the numbers that another file's classes (names) have: the same name is the same class. Where one of the two has no names,
        the numbers stay as they are."""
        if not self.class_names or not names or self.labels is None or self.class_names == list(names):
            return self
        if unknown := [name for name in self.class_names if name not in names]:
            others = f", nor are {len(unknown) - 1} others" if len(unknown) > 1 else ""
            raise UserError(f"{self.path}: its class {unknown[0]} is none of those of {path}{others}; {brief_list(names)} are")
        number = {name: k for k, name in enumerate(names)}
        labels = np.array([number[name] for name in self.class_names], np.int32)[self.labels]
        return dataclasses.replace(self, labels=labels, num_classes=len(names), class_names=list(names))

    def check(self, config: Config) -> None:
        """UserError if a model of this configuration can't be trained on it."""
        _, channels, height, width = self.images.shape
        if (channels, height, width) != (config.in_channels, *config.image_size):
            here = f"{config.in_channels}x{config.image_size[0]}x{config.image_size[1]}"
            raise UserError(f"{self.path}: its images are {channels}x{height}x{width}, the model's {here}; prepare them again")
        if config.class_cond and self.labels is None:
            raise UserError(f"--class_cond True: {self.path} has no labels; use data that has, or, for a new model, --class_cond False")
        if config.class_cond and self.num_classes > config.num_classes:
            raise UserError(f"--num_classes {config.num_classes}: {self.path} has {self.num_classes} classes")
        count = 0 if self.values is None else self.values.shape[1]
        if config.cond_dim and config.cond_dim != count:
            told = f"has {count} numbers an image" if count else "has no numbers; prepare_data.py --values TABLE puts those of a table into it"
            raise UserError(f"--cond_dim {config.cond_dim}: {self.path} {told}")
        if config.cond_channels and not config.cond and not self.pictures:
            raise UserError(f"--cond_channels {config.cond_channels}: needs a picture for each image of {self.path}: --cond_file, or --val_cond_file")
        if self.pictures and self.pictures.images.shape[1] != config.cond_channels:
            told = f"its pictures have {self.pictures.images.shape[1]} channels and the model takes --cond_channels {config.cond_channels}"
            raise UserError(f"{self.pictures.path}: {told}")


def brief_list(names: Sequence[str]) -> str:
    """The first of some names, for a sentence."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def class_names_block(names: Sequence[str], num_classes: int) -> bytes:
    """What data and model files hold of the names of their classes: UTF-8, a line for each, filled up with zeros to a multiple of 4 bytes."""
    if names and (len(names) != num_classes or len(set(names)) != num_classes or any(not name or {"\n", "\0"} & {*name} for name in names)):
        raise DataError(f"{num_classes} classes need as many names of one line, each another one, not {brief_list(names)}")
    text = "\n".join(names).encode()
    if len(text) > MOST_NAME_BYTES:
        raise DataError(f"the names of the classes take {len(text)} bytes, and {MOST_NAME_BYTES} are the most")
    return text + bytes(-len(text) % 4)


def read_class_names(block: bytes, num_classes: int) -> list[str]:
    """The names in such a block; DataError if they are none. An empty one has none."""
    names = block.rstrip(b"\0").decode(errors="replace").split("\n") if block else []
    if names and (len(set(names)) != num_classes or "" in names or class_names_block(names, num_classes) != block):
        raise DataError(f"its names of {num_classes} classes are damaged")
    return names


def values_block(values: ArrayLike, names: Sequence[str], count: int) -> tuple[bytes, int, int]:
    """What a data file holds of the numbers (count, K) of its images: the bytes, K, and how many of the bytes are the names, a line for each."""
    numbers = np.asarray(values, np.float32)
    if numbers.ndim != 2 or len(numbers) != count or not 1 <= numbers.shape[1] <= MOST_VALUES:
        raise DataError(f"{count} images need as many rows of 1 to {MOST_VALUES} numbers, not an array of {numbers.shape}")
    if not np.isfinite(numbers).all():
        raise DataError(f"image {np.argwhere(~np.isfinite(numbers))[0][0]} has a number that is not finite")
    if names and len(names) != numbers.shape[1]:
        raise DataError(f"{numbers.shape[1]} numbers an image need as many names, not {len(names)}")
    text = "\n".join(" ".join(name.split()) for name in names).encode()
    text += bytes(-len(text) % 4)
    if len(text) > MOST_NAME_BYTES:
        raise DataError(f"the names of the numbers take {len(text)} bytes, and {MOST_NAME_BYTES} are the most")
    return numbers.astype("<f4").tobytes() + text, numbers.shape[1], len(text)


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """A DataError that names the file in place of the system's error."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error


def data_header(
    slots: list[int], body_crc: int, numbers_an_image: int = 0, name_bytes: int = 0, class_name_bytes: int = 0, kind: int = 0, folder: int = 0
) -> np.ndarray:
    """The header (256 numbers) of a data file, with the checksum of itself in slot 8. slots: from slot 1 on: version, images, their C, H and W, classes, and
    bytes of a value. body_crc: of what lies behind the header. kind: SAMPLES, or 0. folder: the checksum of the list of files that `./train_unet --data_dir`
    made the data of, or 0. It is no part of slot 8: the content has the same name, whenever its pictures were touched."""
    header = np.zeros(256, "<u4")
    header[:8] = [DATA_MAGIC, *slots]
    header[10:13] = numbers_an_image, name_bytes, class_name_bytes
    header[9], header[14] = body_crc, kind
    header[8] = zlib.crc32(header.tobytes())
    header[13] = folder
    return header


class DataWriter:
    """A data file that is being written: images one by one, then what lies behind them. See new_data_file."""

    def __init__(self, path: str, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.shape: tuple[int, ...] | None = None  # of every image
        self.dtype: np.dtype | None = None
        self.written, self.crc, self.image_crcs = 0, 0, array("I")
        self.kind, self.folder = 0, 0  # as in data_header
        with naming(path):
            file.write(bytes(HEADER_BYTES))

    def add(self, image: np.ndarray) -> None:
        """An image (C, H, W), uint8 or float32 in [-1, 1]."""
        image = np.asarray(image)
        if self.shape is None or self.dtype is None:
            self.shape, self.dtype = image.shape, image.dtype
            if len(self.shape) != 3 or min(self.shape) < 1 or max(self.shape) > 4096 or self.dtype not in (np.uint8, np.float32):
                raise DataError(f"images must be uint8 or float32 (C, H, W) of at most 4096x4096, not {self.dtype} {self.shape}")
        if image.shape != self.shape or image.dtype != self.dtype:
            raise DataError(f"image {self.written} is {image.dtype} {image.shape}, the first was {self.dtype} {self.shape}")
        if self.dtype == np.float32 and not np.isfinite(image).all():
            raise DataError(f"image {self.written} has values that are not finite")
        data = image.astype(self.dtype.newbyteorder("<")).tobytes()
        with naming(self.path):
            self.file.write(data)
        self.crc = zlib.crc32(data, self.crc)
        self.image_crcs.append(zlib.crc32(data))
        self.written += 1

    def finish(
        self,
        labels: ArrayLike | None = None,
        num_classes: int = 0,
        values: ArrayLike | None = None,
        value_names: Sequence[str] = (),
        class_names: Sequence[str] = (),
    ) -> int:
        """Labels, numbers, names and the header; returns how many images there are."""
        if self.shape is None or self.dtype is None:
            raise DataError(f"there are no images to write to {self.path}")
        if self.written >= 2**31:
            raise DataError(f"there are {self.written} images, not fewer than 2^31")
        behind = b""  # the images
        if labels is not None:
            numbers = np.asarray(labels)
            if numbers.shape != (self.written,) or numbers.min() < 0 or numbers.max() >= num_classes:
                raise DataError(f"{self.written} images need {self.written} labels from 0 to {num_classes - 1}")
            behind = numbers.astype("<i4").tobytes()
        numbers_an_image, name_bytes = 0, 0
        if values is not None:
            block, numbers_an_image, name_bytes = values_block(values, value_names, self.written)
            behind += block
        names = class_names_block(class_names, num_classes)
        behind += names
        crc = self.crc
        version = 1 if self.file.tell() + len(behind) <= READ_AT_START else 2
        if version == 2:
            behind, crc = behind + np.array(self.image_crcs, "<u4").tobytes(), 0
        slots = [version, self.written, *self.shape, num_classes, self.dtype.itemsize]
        header = data_header(slots, zlib.crc32(behind, crc), numbers_an_image, name_bytes, len(names), self.kind, self.folder)
        with naming(self.path):
            self.file.write(behind)
            self.file.seek(0)
            self.file.write(header.tobytes())
            self.file.flush()  # all of it, so that of two files none appears where the other does not fit on the disk
        return self.written


@contextlib.contextmanager
def new_data_file(path: str) -> Iterator[DataWriter]:
    """Writes a data file, whole or not at all: it appears under its name after the last line of the `with` block, which must end with finish()."""
    target = os.path.realpath(path)  # if path is a link, the file behind it is replaced, not the link
    if os.path.exists(target) and not os.path.isfile(target):
        raise DataError(f"cannot write {path}: it exists and is not a regular file")
    if os.path.exists(target) and not os.access(target, os.W_OK):
        raise DataError(f"cannot write {path}: it exists and is write-protected")
    with naming(path), atomic_file(target) as file:
        yield DataWriter(path, file)


def write_data(
    path: str,
    images: Iterable[np.ndarray],
    labels: ArrayLike | None = None,
    num_classes: int = 0,
    values: ArrayLike | None = None,
    value_names: Sequence[str] = (),
    class_names: Sequence[str] = (),
    kind: int = 0,
    folder: int = 0,
) -> int:
    """Writes a data file, whole or not at all, and returns the number of images in it. images: (C, H, W) each, uint8 or float32 in [-1, 1]. They go to
    the disk one by one; `labels` and `values` (N, K) are not looked at before their end, and may be lists that grow meanwhile. kind, folder: as
    in data_header."""
    if (labels is None) != (num_classes == 0):
        raise DataError(f"labels and num_classes ({num_classes}) must be given together or not at all")
    with new_data_file(path) as writer:
        writer.kind, writer.folder = kind, folder
        for image in images:
            writer.add(image)
        return writer.finish(labels, num_classes, values, value_names, class_names)


def read_at(file: BinaryIO, to: np.ndarray, offset: int) -> str:
    """Fills an array from an offset in the file on; says why, if it can't."""
    buffer = memoryview(to).cast("B")
    try:
        while buffer and (count := os.preadv(file.fileno(), [buffer], offset)):
            buffer, offset = buffer[count:], offset + count
        return "the file ends before it" if buffer else ""
    except OSError as error:
        return error.strerror or str(error)


def check_images(data: Data) -> int:
    """Reads all images, for the checksum of each and, of version 1, that of them all, which is returned."""
    crc, crcs, step = 0, np.empty(len(data.images), "<u4"), 1 + (1 << 24) // data.images[0].nbytes
    for first in range(0, len(crcs), step):
        images = np.empty_like(data.images[first : first + step])
        if reason := read_at(data.file, images, HEADER_BYTES + first * images[0].nbytes):
            raise DataError(f"cannot read {data.path}: {reason}")
        crcs[first : first + step] = [zlib.crc32(image) for image in images]
        crc = zlib.crc32(images, crc) if data.image_crcs is None else 0
    if data.image_crcs is not None and (wrong := np.flatnonzero(crcs != data.image_crcs)).size:
        raise DataError(f"{data.path} is damaged: image {wrong[0]} does not match its checksum")
    data.image_crcs = crcs
    return crc


def check_field(path: str, field: str, value: int, low: int, high: int) -> None:
    """DataError if a field of a header is no number from low to high."""
    if not low <= value <= high:
        raise DataError(f"{path}: its header is damaged ({field}: {value}, where {low} to {high} is possible)")


def open_data_file(path: str) -> Data:
    """A data file, ours or unet.cu's; DataError for whatever is wrong. Checksums of images are checked if they are at most 4 GiB."""
    file = open_regular(path)
    start, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    if start[:2] == b"\x1f\x8b":
        raise DataError(f"{path} is compressed: unpack it with gunzip first")
    if len(start) < HEADER_BYTES:
        raise DataError(f"{path} is not a data file: {size} bytes are too few for a header of {HEADER_BYTES}")
    header = np.frombuffer(start, "<i4")
    magic, version, header_crc = int(header[0]), 1, 0
    if magic == UNET_CU_DATA_MAGIC:
        count, channels, height, width = (int(value) for value in header[1:5])
        num_classes, value_bytes = 0, 4
    elif magic == DATA_MAGIC:
        version, header_crc = int(header[1]), int(header.view("<u4")[8])
        if version not in (1, 2):
            raise DataError(f"{path} has version {version} of the data format; this program reads versions 1 and 2")
        if header_crc != zlib.crc32(start[:32] + bytes(4) + start[36:52] + bytes(4) + start[56:]):  # 0 in slots 8 and 13
            raise DataError(f"{path} is damaged: its header does not match its checksum")
        count, channels, height, width, num_classes, value_bytes = (int(value) for value in header[2:8])
    else:
        raise DataError(f"{path} is not a data file: it starts with {magic}, not with {DATA_MAGIC} or {UNET_CU_DATA_MAGIC}")
    check_field(path, "images", count, 1, 2**31 - 1)
    check_field(path, "channels", channels, 1, 64)
    check_field(path, "height", height, 1, 4096)
    check_field(path, "width", width, 1, 4096)
    check_field(path, "classes", num_classes, 0, 2**31 - 1)
    if value_bytes not in (1, 4):
        raise DataError(f"{path}: its header is damaged (bytes a value: {value_bytes}, where 1 or 4 is possible)")
    numbers, name_bytes, class_name_bytes = (int(value) for value in header[10:13])
    check_field(path, "numbers an image", numbers, 0, MOST_VALUES)
    check_field(path, "bytes of names", name_bytes, 0, MOST_NAME_BYTES * (numbers > 0))
    check_field(path, "bytes of names of classes", class_name_bytes, 0, MOST_NAME_BYTES * (num_classes > 0))
    for there in (name_bytes, class_name_bytes):
        if there % 4:
            raise DataError(f"{path}: its header is damaged (bytes of names: {there}, where a multiple of 4 is possible)")
    if magic == DATA_MAGIC:
        check_field(path, "kind", int(header[14]), 0, SAMPLES)
    first_unused = 15 if magic == DATA_MAGIC else 10
    if (unused := np.flatnonzero(header[first_unused:])).size:
        field = first_unused + unused[0]
        raise DataError(f"{path}: its header is damaged (field {field} holds {header[field]}, which means nothing)")
    image_bytes = count * channels * height * width * value_bytes
    # behind the images, in words of 4 bytes
    parts = [count * (num_classes > 0), count * numbers, name_bytes // 4, class_name_bytes // 4, count * (version == 2)]
    expected = HEADER_BYTES + image_bytes + 4 * sum(parts)
    if size != expected:
        raise DataError(f"{path} has {size} bytes; its header says {expected}: it is cut short or not what it says")
    images = np.memmap(file, np.uint8 if value_bytes == 1 else "<f4", "r", HEADER_BYTES, (count, channels, height, width))
    behind = np.empty(sum(parts), "<i4")
    if len(behind) and (reason := read_at(file, behind, HEADER_BYTES + image_bytes)):
        raise DataError(f"cannot read {path}: {reason}")
    labels, values, names, class_names, crcs = np.split(behind, np.cumsum(parts)[:-1])
    labels = labels.astype(np.int32) if num_classes else None
    values = values.view("<f4").astype(np.float32).reshape(count, numbers) if numbers else None
    value_names = names.tobytes().rstrip(b"\0").decode(errors="replace").split("\n") if name_bytes else []
    data = Data(path, images, labels, num_classes, header_crc, file, crcs.view("<u4") if version == 2 else None, values, value_names)
    whole = size <= READ_AT_START
    crc = check_images(data) if whole else 0
    if magic == DATA_MAGIC and (whole or version == 2) and zlib.crc32(behind, crc) != int(header.view("<u4")[9]):
        raise DataError(f"{path} is damaged: its images or labels do not match their checksum")
    if num_classes and (labels.min() < 0 or labels.max() >= num_classes):
        raise DataError(f"{path} has labels outside 0 to {num_classes - 1}")
    if values is not None and not np.isfinite(values).all():
        raise DataError(f"{path}: image {np.argwhere(~np.isfinite(values))[0][0]} has a number that is not finite")
    try:
        data.class_names = read_class_names(class_names.tobytes(), num_classes)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    return data


def open_data(path: str) -> Data:
    """The same, with what to do when there is no such file."""
    try:
        return open_data_file(path)
    except DataError as e:
        raise DataError(f"{e}; prepare_data.py makes such files; make unpacks data/fashion32.bin and data/emoji64.bin") from None


def find_data(path: str, checkpoint: str) -> str:
    """A checkpoint's data: where it says, or from a folder above its own, where the run may have been started."""
    if not os.path.exists(path):
        for folder in Path(checkpoint).absolute().parents:
            if (folder / path).exists():
                return str(folder / path)
    return path


def with_pictures(data: Data, flag: str, path: str) -> Data:
    """The same data with the pictures of a file that its images are conditioned on. flag: the one that names the file; path: "": there are none."""
    if not path:
        return data
    pictures = open_data(path)
    count, there = len(data.images), len(pictures.images)
    if there != count:
        told = f"has {there} pictures, and {data.path} has {count} images; each image needs its own, in the same order"
        raise UserError(f"--{flag} {path}: {told}")
    (height, width), (H, W) = pictures.images.shape[2:], data.images.shape[2:]
    if (height, width) != (H, W):
        told = f"its pictures are {height}x{width}, and the images of {data.path} {H}x{W}; prepare_data.py --image_size makes them fit"
        raise UserError(f"--{flag} {path}: {told}")
    return dataclasses.replace(data, pictures=pictures)
