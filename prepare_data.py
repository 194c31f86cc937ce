"""Turns images into the .bin file that train_unet.cu and train_unet.py train on.

    python prepare_data.py --data_dir DIR --output_name F.bin        folders of images; sub-folders are classes
    python prepare_data.py --zip FILE.zip --output_name F.bin        the same in a zip; EDM's data sets, with their dataset.json
    python prepare_data.py --idx IMAGES LABELS --output_name F.bin   MNIST, Fashion-MNIST (.gz or not)
    python prepare_data.py --cifar10 FILE... --output_name F.bin     CIFAR-10's binary batches
    python prepare_data.py --emoji FONT.ttf --output_name F.bin      every picture of a colour-emoji font
    ... --image_size 256 --encode VAE_DIR                            their latents, by an AutoencoderKL of diffusers on this disk

The file: a header of 256 little-endian int32, the images (NCHW), then int32 labels if there are classes. The header:
    0 magic 20261120 | 1 version 1 | 2 count | 3 channels | 4 height | 5 width | 6 number of classes (0 = none)
    7 bytes a value (1 = uint8, 4 = float32 in [-1, 1]) | 8 crc32 of the header with this slot 0
    9 crc32 of everything after the header | the rest 0
A file of more than 4 GiB has version 2, because nobody wants to wait until so much is read and checked before training begins: behind the
labels lies the crc32 of each image, against which it is held whenever it is read, and slot 9 is the crc32 of what lies behind the images.
read_data also reads unet.cu's files (magic 20240620): count, channels, height, width, then float32 images.
"""

from __future__ import annotations

if __name__ == "__main__":  # before what takes seconds
    import signal

    from common import interrupted

    interrupted.take(interrupted.leave, signal.SIGINT, signal.SIGTERM)

import argparse
import contextlib
import dataclasses
import difflib
import errno
import fcntl
import gzip
import io
import itertools
import json
import os
import re
import signal
import stat
import sys
import zipfile
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO, NoReturn, TextIO

from common import interrupted

MISSING = ""  # the package without which there is only --help
try:
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont, ImageOps, features
    from tqdm import tqdm
except ModuleNotFoundError as e:
    MISSING = e.name or ""

MAGIC = 20261120
READ_AT_START = 4 << 30  # bytes: no longer file is read, and so checked, as a whole before training begins
UNET_CU_MAGIC = 20240620
MODEL_MAGIC, UNET_CU_MODEL_MAGIC = 20261121, 12345678  # of model files: common/model_files.py
HEADER_BYTES = 256 * 4
IMAGE_EXTENSIONS = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
MOST_BYTES = 2 << 30  # of a known data set's file, unpacked: more is not what it seems to be
MOST_PICTURE_BYTES = 256 << 20  # of a picture in a zip, unpacked
CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
SKIN_TONES = {chr(code) for code in range(0x1F3FB, 0x1F400)}


def printable(text: object) -> str:
    """The text with escapes for what a terminal would obey: a file's name may hold anything."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


class DataError(ValueError):
    """What is wrong with the user's files, as one sentence."""

    def __init__(self, sentence: object) -> None:
        super().__init__(printable(sentence))


def open_file(path: str, folder: int | None = None) -> BinaryIO:
    """Opens a file for reading. A pipe, whose other end may never come, a device, which may never end, or a folder is refused by an OSError, too.
    folder: a descriptor of the one in which path is a name."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    return open(descriptor, "rb")


def open_regular(path: str) -> BinaryIO:
    """The same, with a DataError for whatever is wrong."""
    try:
        return open_file(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def how_to_install(missing: str, *packages: str) -> str:
    """A sentence with the command that installs a missing package, and others that will be needed."""
    names = " ".join(packages) or {"PIL": "pillow"}.get(missing, missing)
    command = f"{sys.executable} -m pip install {names}"
    if sys.prefix == sys.base_prefix:  # Debian's Python, for one, takes packages in virtual environments only
        command = f"python3 -m venv .venv && .venv/bin/pip install {names}"
        return f"Python's package {missing} is missing; install it with `{command}`, and use .venv/bin/python"
    return f"Python's package {missing} is missing; install it with `{command}`"


def need_packages() -> None:
    if MISSING:
        raise DataError(how_to_install(MISSING, "numpy", "pillow", "tqdm"))


# ----------------------------------------------------------------------------------------------------------------------
# The file


def standard_streams() -> None:
    """Opens the standard streams that are closed (>&-): or else the next file that is opened would take their place."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout, sys.stderr = sys.stdout or open(os.devnull, "w"), sys.stderr or open(os.devnull, "w")


def open_folder(path: str) -> int:
    """A descriptor of a folder, which stays the same one when it is moved, or when another takes its name."""
    return os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def remove_leftovers(folder: int, *starts: str) -> None:
    """Removes what killed processes left of files whose names start so: temporary files that no living process locks."""
    for name in os.listdir(folder):
        if name.startswith(starts) and re.fullmatch(r".*\.tmp\d+", name):
            with contextlib.suppress(OSError):
                descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(name, dir_fd=folder)
                finally:
                    os.close(descriptor)


def is_there(name: str, folder: int) -> bool:
    try:
        os.stat(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def open_temporary(name: str, folder: int) -> tuple[str, BinaryIO]:
    """A new file beside one of this name, to be renamed to it when it is complete, and locked until it is closed; and its own name."""
    remove_leftovers(folder, f"{name}.tmp")
    for number in itertools.count(os.getpid()):  # another host may have such a process, too
        temporary = f"{name}.tmp{number}"
        with contextlib.suppress(FileExistsError):
            file = open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder), "wb")
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_there(temporary, folder):  # or it was removed as left over before it was locked
                return temporary, file
            file.close()
    raise AssertionError


@contextlib.contextmanager
def atomic_file(path: str, folder: int | None = None) -> Iterator[BinaryIO]:
    """A file that appears under its name when it is complete; on failure what was there before stays as it was. folder: a descriptor of the one in
    which path is a name."""
    if folder is None:
        folder = open_folder(os.path.dirname(path))
        try:
            with atomic_file(os.path.basename(path), folder) as file:
                yield file
        finally:
            os.close(folder)
        return
    temporary, file = open_temporary(path, folder)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)  # the new name, too, must survive a power cut
    finally:
        with contextlib.suppress(OSError):  # after os.replace there is nothing left to remove
            os.remove(temporary, dir_fd=folder)


def is_data(start: np.ndarray) -> bool:
    """Whether a file that starts with these 256 numbers is a data file."""
    return start[0] in (MAGIC, UNET_CU_MAGIC)


def is_samples(start: np.ndarray) -> bool:
    """Whether it may be one that --sample has written: of float images without labels."""
    return bool(start[0] == MAGIC and start[6] == 0 and start[7] == 4)


def check_output(flag: str, path: str, inputs: Iterable[str], replaces: Callable[[np.ndarray], bool] | None = None) -> None:
    """Before work that may take long: DataError if a file can't be written under this name, or would replace one that somebody may miss: what is read
    (inputs), or a file of models or data. replaces: which of these it may, by its first 256 numbers. Leaves nothing behind."""
    told = f"{flag} {path}: "
    try:
        folder = open_folder(os.path.dirname(path))
    except OSError as error:
        raise DataError(f"{told}its folder can't be opened ({error.strerror}); name one that is there") from None
    try:
        if os.path.isdir(path):
            raise DataError(f"{told}is a folder; name a file")
        if os.path.exists(path):
            check_replaced(told, path, inputs, replaces)
        temporary, file = open_temporary(os.path.basename(path), folder)
        file.close()
        os.remove(temporary, dir_fd=folder)
    except OSError as error:
        raise DataError(f"{told}can't be written ({error.strerror}); choose a folder that exists and is yours") from None
    finally:
        os.close(folder)


def check_replaced(told: str, path: str, inputs: Iterable[str], replaces: Callable[[np.ndarray], bool] | None) -> None:
    """check_output of a file that is there."""
    if not os.path.isfile(path):
        raise DataError(f"{told}is there and is no usual file; choose another name")
    for name in inputs:
        if os.path.exists(name) and os.path.samefile(name, path):
            raise DataError(f"{told}would replace {name}, which is read; choose another name")
    with open_regular(path) as file:
        start = np.frombuffer(file.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0"), "<i4")
    ours = is_data(start) or start[0] in (MODEL_MAGIC, UNET_CU_MODEL_MAGIC)
    if ours and not (replaces and replaces(start)):
        raise DataError(f"{told}holds a model or data; choose another name, or move it away")


def write_data(path: str, images: Iterable[np.ndarray], labels: Sequence[int] | np.ndarray | None = None, num_classes: int = 0) -> int:
    """Writes a data file, whole or not at all, and returns the number of images in it.

    images: an array (N, C, H, W) or an iterator over (C, H, W), uint8 or float32 in [-1, 1]. They go to the disk one by
    one, so an iterator may yield more than fits in memory; `labels` is not looked at before its end and may be a list
    that grows meanwhile.
    """
    if (labels is None) != (num_classes == 0):
        raise DataError(f"labels and num_classes ({num_classes}) must be given together or not at all")
    target = os.path.realpath(path)  # if path is a link, the file behind it is replaced, not the link
    if os.path.exists(target) and not os.path.isfile(target):
        raise DataError(f"cannot write {path}: it exists and is not a regular file")
    if os.path.exists(target) and not os.access(target, os.W_OK):
        raise DataError(f"cannot write {path}: it exists and is write-protected")
    try:
        with atomic_file(target) as file:
            file.write(bytes(HEADER_BYTES))
            shape, dtype, written, crc, image_crcs = None, None, 0, 0, array("I")
            for image in images:
                image = np.asarray(image)
                if shape is None:
                    shape, dtype = image.shape, image.dtype
                    if len(shape) != 3 or min(shape) < 1 or dtype not in (np.uint8, np.float32):
                        raise DataError(f"images must be uint8 or float32 (C, H, W), not {dtype} {shape}")
                if image.shape != shape or image.dtype != dtype:
                    raise DataError(f"image {written} is {image.dtype} {image.shape}, the first was {dtype} {shape}")
                if dtype == np.float32 and not np.isfinite(image).all():
                    raise DataError(f"image {written} has values that are not finite")
                data = image.astype(dtype.newbyteorder("<")).tobytes()
                file.write(data)
                crc = zlib.crc32(data, crc)
                image_crcs.append(zlib.crc32(data))
                written += 1
            if shape is None or dtype is None:
                raise DataError(f"there are no images to write to {path}")
            if written >= 2**31:
                raise DataError(f"there are {written} images, not fewer than 2^31")
            behind = b""  # the images
            if labels is not None:
                numbers = np.asarray(labels)
                if numbers.shape != (written,) or numbers.min() < 0 or numbers.max() >= num_classes:
                    raise DataError(f"{written} images need {written} labels from 0 to {num_classes - 1}")
                behind = numbers.astype("<i4").tobytes()
            version = 1 if file.tell() + len(behind) <= READ_AT_START else 2
            if version == 2:
                behind, crc = behind + np.array(image_crcs, "<u4").tobytes(), 0
            file.write(behind)
            header = np.zeros(256, "<u4")
            header[:8] = [MAGIC, version, written, *shape, num_classes, dtype.itemsize]
            header[9] = zlib.crc32(behind, crc)
            header[8] = zlib.crc32(header.tobytes())
            file.seek(0)
            file.write(header.tobytes())
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror or error}") from error
    return written


@dataclasses.dataclass
class DataFile:
    """A data file that is open. `images` is a memory map of them all; read() takes some of them, verified, and can say when it fails."""

    path: str
    file: BinaryIO
    images: np.ndarray
    labels: np.ndarray | None
    num_classes: int
    header_crc: int  # names the content; 0: unet.cu's
    image_crcs: np.ndarray | None  # None: not known

    def expect(self, index: np.ndarray) -> None:
        """Asks the system to bring these images into memory, and does not wait for them."""
        size = self.images[0].nbytes
        for i in index.tolist() if hasattr(os, "posix_fadvise") else []:
            os.posix_fadvise(self.file.fileno(), HEADER_BYTES + i * size, size, os.POSIX_FADV_WILLNEED)

    def read(self, index: np.ndarray) -> np.ndarray:
        """These images. (From the map the process would be killed if the file had been cut short or the disk failed.)"""
        self.expect(index)
        images = np.empty((len(index), *self.images.shape[1:]), self.images.dtype)
        for image, i in zip(images, index.tolist()):
            reason = read_at(self.file, image, HEADER_BYTES + i * image.nbytes)
            if not reason and self.image_crcs is not None and zlib.crc32(image) != self.image_crcs[i]:
                reason = "its checksum is wrong"
            if reason:
                raise DataError(f"{self.path}: image {i} can't be used ({reason}): the file was changed, cut short or damaged")
        return images


def read_at(file: BinaryIO, to: np.ndarray, offset: int) -> str:
    """Fills an array from an offset in the file on; says why, if it can't."""
    buffer = memoryview(to).cast("B")
    try:
        while buffer and (count := os.preadv(file.fileno(), [buffer], offset)):
            buffer, offset = buffer[count:], offset + count
        return "the file ends before it" if buffer else ""
    except OSError as error:
        return error.strerror or str(error)


def check_images(data: DataFile) -> int:
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


def read_data(path: str) -> tuple[np.ndarray, np.ndarray | None, int]:
    """A data file, ours or unet.cu's: (images as a memory map (N, C, H, W), int32 labels or None, classes). See open_data_file."""
    data = open_data_file(path)
    return data.images, data.labels, data.num_classes


def open_data_file(path: str) -> DataFile:
    """Opens a data file, ours or unet.cu's.

    Header, size and checksums are checked, those of the images if there are at most 4 GiB; whatever is wrong comes as a DataError that names the file.
    """
    file = open_regular(path)
    start, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    if start[:2] == b"\x1f\x8b":
        raise DataError(f"{path} is compressed: unpack it with gunzip first")
    if len(start) < HEADER_BYTES:
        raise DataError(f"{path} is not a data file: {size} bytes are too few for a header of {HEADER_BYTES}")
    header = np.frombuffer(start, "<i4")
    magic, version, header_crc = int(header[0]), 1, 0
    if magic == UNET_CU_MAGIC:
        count, channels, height, width = (int(value) for value in header[1:5])
        num_classes, value_bytes = 0, 4
    elif magic == MAGIC:
        version, header_crc = int(header[1]), int(header.view("<u4")[8])
        if version not in (1, 2):
            raise DataError(f"{path} has version {version} of the data format; this program reads versions 1 and 2")
        if header_crc != zlib.crc32(start[:32] + bytes(4) + start[36:]):
            raise DataError(f"{path} is damaged: its header does not match its checksum")
        count, channels, height, width, num_classes, value_bytes = (int(value) for value in header[2:8])
    else:
        raise DataError(f"{path} is not a data file: it starts with {magic}, not with {MAGIC} or {UNET_CU_MAGIC}")
    if min(count, channels, height, width) < 1 or num_classes < 0 or value_bytes not in (1, 4) or header[10:].any():
        raise DataError(
            f"{path} has a header that cannot be: {count} images of {channels}x{height}x{width}, {num_classes} classes, {value_bytes} bytes a value"
        )
    image_bytes = count * channels * height * width * value_bytes
    columns = (num_classes > 0) + (version == 2)
    expected = HEADER_BYTES + image_bytes + 4 * count * columns
    if size != expected:
        raise DataError(f"{path} has {size} bytes; its header says {expected}: it is cut short or not what it says")
    images = np.memmap(file, np.uint8 if value_bytes == 1 else "<f4", "r", HEADER_BYTES, (count, channels, height, width))
    behind = np.empty((columns, count), "<i4")
    if columns and (reason := read_at(file, behind, HEADER_BYTES + image_bytes)):
        raise DataError(f"cannot read {path}: {reason}")
    labels = behind[0].astype(np.int32) if num_classes else None
    data = DataFile(path, file, images, labels, num_classes, header_crc, behind[-1].view("<u4") if version == 2 else None)
    whole = size <= READ_AT_START
    crc = check_images(data) if whole else 0
    if magic == MAGIC and (whole or version == 2) and zlib.crc32(behind, crc) != int(header.view("<u4")[9]):
        raise DataError(f"{path} is damaged: its images or labels do not match their checksum")
    if num_classes and (labels.min() < 0 or labels.max() >= num_classes):
        raise DataError(f"{path} has labels outside 0 to {num_classes - 1}")
    return data


# ----------------------------------------------------------------------------------------------------------------------
# Folders of images


def image_to_array(image: Image.Image, image_size: tuple[int, int], channels: int, resample: Image.Resampling | None = None) -> np.ndarray:
    """A picture as uint8 (C, H, W): on white, cropped at the centre to the aspect ratio of (height, width), resized (by Lanczos)."""
    image = ImageOps.exif_transpose(image)  # photographs that are stored lying on their side
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):  # 16-bit and float grey, which convert() would clip at 255 and cut off at 0 and 1
        values, white = np.asarray(image), 1 if image.mode == "F" else 65535
        if not (values.min() >= 0 and values.max() <= white):
            raise DataError(f"its grey values are from {values.min():g} to {values.max():g}, not from 0 to {white}")
        image = Image.fromarray(np.rint(values * (255 / white)).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = image.convert("L" if channels == 1 else "RGB")
    image = ImageOps.fit(image, (image_size[1], image_size[0]), method=resample or Image.Resampling.LANCZOS)
    array = np.asarray(image)
    return np.ascontiguousarray(array[None] if channels == 1 else array.transpose(2, 0, 1))


def list_images(data_dir: str) -> tuple[list[str], list[int] | None, list[str]]:
    """All images below a folder in sorted order, their labels or None, and the names of the classes.

    The class of an image is the first folder below data_dir on its path. Hidden files and folders are left out; links
    are followed, each folder once. If images also lie in data_dir itself, nothing says their class, and there are no
    labels.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error

    found: list[tuple[str, ...]] = []
    visited: set[str] = set()
    for folder, subfolders, files in os.walk(data_dir, onerror=refuse, followlinks=True):
        real = os.path.realpath(folder)
        if real in visited:  # links may lead here twice, or in circles
            subfolders.clear()
            continue
        visited.add(real)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        prefix = () if folder == data_dir else tuple(os.path.relpath(folder, data_dir).split(os.sep))
        for name in files:
            if name.lower().endswith(IMAGE_EXTENSIONS) and not name.startswith("."):
                found.append((*prefix, name))
    if not found:
        raise DataError(f"there are no images in {data_dir} (looked for {' '.join(IMAGE_EXTENSIONS)})")
    found.sort()
    return [os.path.join(data_dir, *parts) for parts in found], *label_by_folder(found)


def label_by_folder(found: list[tuple[str, ...]]) -> tuple[list[int] | None, list[str]]:
    """Labels or None, and the names of the classes, of pictures whose paths have these parts."""
    class_names = sorted({parts[0] for parts in found if len(parts) > 1})
    loose = [parts[0] for parts in found if len(parts) == 1]
    if class_names and loose:
        say(
            f"prepare_data: no labels, because {len(loose)} images (the first is {loose[0]}) lie beside "
            f"the {len(class_names)} sub-folders and belong to none of them",
            sys.stderr,
        )
        class_names = []
    if not class_names:
        return None, []
    number = {name: index for index, name in enumerate(class_names)}
    return [number[parts[0]] for parts in found], class_names


def decode_images(
    paths: list[str], image_size: tuple[int, int], channels: int, kept: list[int], open_picture: Callable[[str], BinaryIO] = open_regular
) -> Iterator[np.ndarray]:
    """Yields the images that can be read and appends their indices to `kept`; names the others on stderr."""
    for index, path in enumerate(progress(paths)):
        try:
            with open_picture(path) as file, Image.open(file) as image:
                array = image_to_array(image, image_size, channels)
        except Exception as error:  # noqa: BLE001 (Pillow's decoders raise nearly anything on a damaged file)
            reason = "Pillow cannot identify it" if isinstance(error, Image.UnidentifiedImageError) else error
            say(f"prepare_data: skipped {path}: {reason}", sys.stderr)
            continue
        kept.append(index)
        yield array
    if len(kept) < len(paths):
        say(f"prepare_data: skipped {len(paths) - len(kept)} of {len(paths)} images as broken", sys.stderr)
    if not kept:
        raise DataError("none of the images could be read")


def load_folder(data_dir: str, image_size: tuple[int, int], channels: int) -> tuple[np.ndarray, np.ndarray | None, list[str]]:
    """All images below a folder, in memory: uint8 (N, C, H, W), int32 labels or None, and the names of the classes.

    Same images, order and labels as `--data_dir` writes. image_size is (height, width), channels 1 (grey) or 3 (RGB).
    """
    need_packages()
    paths, labels, class_names = list_images(data_dir)
    images = np.empty((len(paths), channels, *image_size), np.uint8)
    kept: list[int] = []
    for position, image in enumerate(decode_images(paths, image_size, channels, kept)):
        images[position] = image
    return images[: len(kept)], None if labels is None else np.array(labels, np.int32)[kept], class_names


# ----------------------------------------------------------------------------------------------------------------------
# What the command line can read. A source makes its images as they are asked for; the labels are complete after the
# last one.


@dataclasses.dataclass
class Source:
    images: Iterator[np.ndarray]
    labels: list[int] | None = None
    num_classes: int = 0
    class_names: list[str] = dataclasses.field(default_factory=list)


def say(text: str, file: TextIO) -> None:
    """Prints a line, beside the progress bar if there is one."""
    tqdm.write(printable(text), file=file)


def progress(items: Iterable, total: int | None = None) -> Iterable:
    """The items under a progress bar; without one if stderr is not a terminal."""
    return tqdm(items, total=total, unit=" images", disable=None)


def decoded(
    paths: list[str],
    all_labels: list[int] | None,
    class_names: list[str],
    image_size: tuple[int, int],
    channels: int,
    open_picture: Callable[[str], BinaryIO] = open_regular,
) -> Source:
    """Pictures that are decoded as they are asked for. Without names, the classes are as many as the largest label says."""
    if all_labels is None:
        return Source(decode_images(paths, image_size, channels, [], open_picture))
    labels: list[int] = []

    def decode() -> Iterator[np.ndarray]:
        kept: list[int] = []
        for image in decode_images(paths, image_size, channels, kept, open_picture):
            labels.append(all_labels[kept[-1]])
            yield image

    return Source(decode(), labels, len(class_names) or max(all_labels) + 1, class_names)


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
        by_name = {name: label for name, label in labels}
    except (ValueError, TypeError, KeyError, RecursionError, zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise error if isinstance(error, DataError) else DataError(f"{where} holds no labels as EDM's dataset_tool.py writes them") from error
    for name in names:
        if name not in by_name:
            raise DataError(f"{where} has no label for {name}")
        if type(by_name[name]) is not int or not 0 <= by_name[name] < 1000000:
            raise DataError(f"{where} says {str(by_name[name])[:40]} of {name}, which is not the number of a class")
    return [by_name[name] for name in names]


def open_zip(path: str, image_size: tuple[int, int] | None, channels: int) -> Source:
    """The pictures in a zip, read from where they lie. In a data set of EDM's, dataset.json holds the labels and the folders mean nothing; else
    sub-folders are classes, below those that all pictures share."""
    try:
        archive = zipfile.ZipFile(open_regular(path))
        archive.filename = path
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, EOFError) as error:
        raise error if isinstance(error, DataError) else DataError(f"{path} is not a zip file, or a damaged one: {error}") from error

    def is_picture(name: str) -> bool:
        hidden = any(part.startswith((".", "__MACOSX")) for part in name.split("/"))
        return name.lower().endswith(IMAGE_EXTENSIONS) and not hidden

    entries = archive.namelist()
    names = sorted({name for name in entries if is_picture(name)})
    if not names:
        raise DataError(f"there are no images in {path} (looked for {' '.join(IMAGE_EXTENSIONS)})")

    def open_picture(name: str) -> BinaryIO:
        return io.BytesIO(read_member(archive, name, MOST_PICTURE_BYTES))

    if all(archive.getinfo(name).flag_bits & 1 for name in names):
        raise DataError(f"{path} is encrypted: unpack it, and give the folder to --data_dir")
    if "dataset.json" not in entries:
        parts = [tuple(name.split("/")) for name in names]
        shared = len(os.path.commonprefix([folders for *folders, _ in parts]))
        labels, class_names = label_by_folder([p[shared:] for p in parts])
        return decoded(names, labels, class_names, image_size or (64, 64), channels, open_picture)
    if not image_size:
        try:
            with Image.open(open_picture(names[0])) as image:
                image_size = image.height, image.width
        except Exception as error:  # noqa: BLE001 (as above)
            raise DataError(f"{names[0]} in {path} is no picture that says the size of all: {error}; --image_size does") from error
    return decoded(names, zip_labels(archive, names), [], image_size, channels, open_picture)


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
    if images.shape[1:] == (28, 28):  # 32 can be halved five times; 0 is the background
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
    """The texts for which a bitmap font has a picture, sorted, without skin tones; and the pictures' native size.

    Single code points are in the font's cmap; flags, keycaps and the sequences that are joined to one picture are
    ligatures in its GSUB table.
    """
    try:
        from fontTools.ttLib import TTFont, TTLibError
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
    except TTLibError as error:
        raise DataError(f"{font_file} is not a font: {error}") from error
    return sorted(text for text in texts if not SKIN_TONES.intersection(text)), size


def open_emoji(font_file: str, image_size: tuple[int, int], channels: int) -> Source:
    texts, size = emoji_texts(font_file)
    if not features.check("raqm"):  # Pillow's basic layout knows no ligatures
        print("prepare_data: this Pillow has no raqm: flags and joined emoji are left out", file=sys.stderr)
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
    from common.config import UserError  # which imports this file

    try:
        import torch

        from common.diffusers_files import Autoencoder

        vae, images = Autoencoder(vae_dir), iter(images)
        count, total, squares = 0, 0.0, 0.0
        while batch := list(itertools.islice(images, batch_size)):
            latents = vae.encode(torch.from_numpy(np.stack(batch)).float() / 127.5 - 1).numpy()
            count, total, squares = count + latents.size, total + latents.sum(dtype=float), squares + np.square(latents, dtype=float).sum()
            yield from latents
    except (UserError, ModuleNotFoundError) as error:
        raise DataError(how_to_install(error.name) if isinstance(error, ModuleNotFoundError) else error) from error
    if count:
        say(f"latents: mean {total / count:.3f}, standard deviation {(squares / count - (total / count) ** 2) ** 0.5:.3f}", sys.stdout)


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def parse_image_size(text: str) -> tuple[int, int]:
    """(height, width) from "64" or "48x64"."""
    match = re.fullmatch(r"([1-9][0-9]{0,4})(?:x([1-9][0-9]{0,4}))?", text)
    if not match:
        raise argparse.ArgumentTypeError(f"'{text}' is no size; say 64, or 48x64 for height x width")
    return int(match[1]), int(match[2] or match[1])


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        unknown = re.fullmatch("unrecognized arguments: (--[^ =]*).*", message, re.DOTALL)
        nearest = difflib.get_close_matches(unknown[1], self._option_string_actions, 1) if unknown else []
        message += "".join(f"; did you mean {flag}?" for flag in nearest)
        raise DataError(f"{message} (--help lists the flags)")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="prepare_data.py", description="Turns images into a data file for train_unet.", allow_abbrev=False)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data_dir", metavar="DIR", help="folder of images; its sub-folders are the classes")
    source.add_argument("--zip", metavar="FILE.zip", help="the same in a zip; or EDM's data sets, labelled by their dataset.json")
    source.add_argument("--idx", nargs="+", metavar="FILE", help="idx files of images and of labels (optional), as MNIST has; .gz or not")
    source.add_argument("--cifar10", nargs="+", metavar="FILE", help="binary CIFAR-10 batches (data_batch_1.bin ...)")
    source.add_argument("--emoji", metavar="FONT.ttf", help="colour-emoji font with bitmaps, such as Noto Color Emoji")
    parser.add_argument("--output_name", required=True, metavar="F.bin", help="data file to write")
    parser.add_argument(
        "--image_size",
        type=parse_image_size,
        metavar="SIZE",
        help="64, or HxW such as 48x64; default 64 for folders, zips and emoji, 32 for CIFAR-10 and 28x28 idx images, EDM's data as they are",
    )
    parser.add_argument("--encode", metavar="DIR", help="write latents instead: the folder of an AutoencoderKL, or of a pipeline that has one")
    parser.add_argument("--channels", type=int, choices=(1, 3), help="1 = grey, 3 = RGB; default 3, for idx files 1")
    return parser.parse_args(arguments)


def input_files(args: argparse.Namespace) -> Iterator[str]:
    """Whatever is read, so that nothing of it is replaced."""
    yield from [*(args.idx or []), *(args.cifar10 or []), *filter(None, [args.zip, args.emoji])]
    for folder in filter(None, [args.data_dir, args.encode]):
        for path, _, names in os.walk(folder):
            yield from (os.path.join(path, name) for name in names)


def open_source(args: argparse.Namespace) -> Source:
    channels = args.channels or 3
    if args.idx:
        return open_idx(args.idx, args.image_size, args.channels or 1)
    if args.cifar10:
        return open_cifar10(args.cifar10, args.image_size or (32, 32), channels)
    if args.zip:
        return open_zip(args.zip, args.image_size, channels)
    if args.emoji:
        return open_emoji(args.emoji, args.image_size or (64, 64), channels)
    return decoded(*list_images(args.data_dir), args.image_size or (64, 64), channels)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    standard_streams()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # file names need not be valid text
    try:
        args = parse_arguments(arguments)
        need_packages()
        check_output("--output_name", args.output_name, input_files(args), is_data)
        source = open_source(args)
        if args.encode:
            source.images = encoded(source.images, args.encode)
        count = write_data(args.output_name, source.images, source.labels, source.num_classes)
    except DataError as error:
        print(f"prepare_data: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interruption:
        print("prepare_data: interrupted, nothing was written", file=sys.stderr)
        return interrupted.exit_code(interruption)
    if source.labels is not None:
        counts = np.bincount(source.labels, minlength=source.num_classes)
        for number, images in enumerate(counts):
            name = f" = {source.class_names[number]}" if source.class_names else ""
            say(f"class {number}{name}: {images} images", sys.stdout)
    channels, height, width = np.fromfile(args.output_name, "<i4", 6)[3:]
    megabytes = os.path.getsize(args.output_name) / 1e6
    say(f"wrote {args.output_name}: {count} images of {channels}x{height}x{width} (CxHxW), {megabytes:.1f} MB", sys.stdout)
    return 0


if __name__ == "__main__":
    interrupted.take(interrupted.interrupt, signal.SIGINT, signal.SIGTERM)  # so that the temporary file goes
    sys.exit(main())
