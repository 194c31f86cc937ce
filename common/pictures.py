"""From pictures to arrays: of a file, of a folder. This module needs numpy, Pillow and tqdm."""

from __future__ import annotations

import math
import os
import random
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, TextIO

import numpy as np
from PIL import Image, ImageOps
from tqdm import tqdm

from common.data_files import Data, data_header
from common.files import DataError, open_regular
from common.flags import Config
from common.program import printable

IMAGE_EXTENSIONS = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
MOST_PIXELS = 1 << 27  # of a picture that is enlarged for a random crop: half a GiB

warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # of a picture of 90 million pixels; one of 180 million is refused


def say(text: str, file: TextIO) -> None:
    """Prints a line, beside the progress bar if there is one."""
    tqdm.write(printable(text), file=file)


def progress(items: Iterable) -> Iterable:
    """The items under a progress bar; without one if stderr is not a terminal."""
    return tqdm(items, unit=" images", disable=None)


def flat_image(image: Image.Image, channels: int) -> Image.Image:
    """A picture upright, of 8 bits: on white in grey (1 channel) or RGB (3), or RGBA (4)."""
    image = ImageOps.exif_transpose(image)  # photographs that are stored lying on their side
    if image.mode == "LAB":  # which convert() knows only how to make RGB
        image = image.convert("RGB")
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):  # 16-bit and float grey, which convert() would clip at 255 and cut off at 0 and 1
        values, white = np.asarray(image), 1 if image.mode == "F" else 65535
        is_clear = values == image.info.get("transparency")  # the grey value that is transparent, as a PNG may have one
        values = np.where(is_clear, white, values)
        if not (values.min() >= 0 and values.max() <= white):
            raise DataError(f"its grey values are from {values.min():g} to {values.max():g}, not from 0 to {white}")
        grey, opaque = np.rint(values * (255 / white)).astype(np.uint8), np.where(is_clear, 0, 255).astype(np.uint8)
        image = Image.fromarray(np.stack([grey, opaque], axis=-1), "LA") if np.any(is_clear) else Image.fromarray(grey)
    if channels == 4:
        return image.convert("RGBA")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("L" if channels == 1 else "RGB")


def flat_array(image: Image.Image) -> np.ndarray:
    """A picture in grey, RGB or RGBA as uint8 (C, H, W)."""
    array = np.asarray(image)
    return np.ascontiguousarray(array[None] if array.ndim == 2 else array.transpose(2, 0, 1))


def image_to_array(image: Image.Image, size: tuple[int, int], channels: int, resample: Image.Resampling = Image.Resampling.LANCZOS) -> np.ndarray:
    """A picture as uint8 (C, H, W): on white, cropped at the centre to the aspect ratio of (height, width), resized."""
    return flat_array(ImageOps.fit(flat_image(image, channels), size[::-1], method=resample))  # Pillow's sizes are (width, height)


def random_crop(image: Image.Image, image_size: tuple[int, int], draw: random.Random) -> Image.Image:
    """A part from anywhere in the picture, 0.8 to 1 times as high or wide as it: guided-diffusion's random_crop_arr (image_datasets.py), which is
    for squares. Of a (height, width) that differ, the part has their ratio."""
    height, width = image_size
    covered_height = draw.randrange(height, math.ceil(height / 0.8) + 1)
    covered_width = math.ceil(covered_height * width / height)
    # Lanczos and its like look at few pixels: the picture is halved, each pixel a mean of four, until it is nearly small enough.
    while image.width >= 2 * covered_width and image.height >= 2 * covered_height:
        image = image.resize((image.width // 2, image.height // 2), resample=Image.Resampling.BOX)
    scale = max(covered_width / image.width, covered_height / image.height)
    size = round(image.width * scale), round(image.height * scale)
    if size[0] * size[1] > MOST_PIXELS:
        raise DataError("it is too long and narrow to be cut from anywhere")
    image = image.resize(size, resample=Image.Resampling.BICUBIC)
    top = draw.randrange(image.height - height + 1)
    left = draw.randrange(image.width - width + 1)
    return image.crop((left, top, left + width, top + height))


@dataclass(frozen=True)
class Cut:
    """What parts of a picture become images: one at its centre, or, with crops, so many from anywhere in it."""

    image_size: tuple[int, int]  # (height, width)
    crops: int = 0

    def parts(self, picture: Image.Image, index: int) -> list[np.ndarray]:
        """uint8 (C, H, W) each. They are the same for every picture of an index and a size, and whenever the command runs."""
        if not self.crops:
            return [flat_array(ImageOps.fit(picture, self.image_size[::-1], method=Image.Resampling.LANCZOS))]
        draws = [random.Random(f"crop {crop} of picture {index}") for crop in range(self.crops)]
        return [flat_array(random_crop(picture, self.image_size, draw)) for draw in draws]


def read_picture(path: str, channels: int, open_picture: Callable[[str], BinaryIO] = open_regular) -> Image.Image:
    """A picture as flat_image makes it."""
    with open_picture(path) as file, Image.open(file) as picture:
        return flat_image(picture, channels)


def list_images(data_dir: str) -> tuple[list[str], list[int] | None, list[str]]:
    """All images below a folder in sorted order, their labels or None, and the names of the classes (see label_by_folder). Hidden files and folders
    are left out; links are followed, each folder once."""

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
    """Labels and the names of the classes, which are the first folders on paths of these parts. None and [] if there are none, or if a picture is in
    no folder, so that nothing says its class."""
    class_names = sorted({parts[0] for parts in found if len(parts) > 1})
    loose = [parts[0] for parts in found if len(parts) == 1]
    if class_names and loose:
        told = f"{len(loose)} images (the first is {loose[0]}) lie beside the {len(class_names)} sub-folders and belong to none of them"
        say(f"prepare_data: no labels, because {told}", sys.stderr)
        class_names = []
    if not class_names:
        return None, []
    number = {name: index for index, name in enumerate(class_names)}
    return [number[parts[0]] for parts in found], class_names


def decode_images(paths: list[str], kept: list[int], decode: Callable[[str, int], Iterable[np.ndarray]]) -> Iterator[np.ndarray]:
    """Yields what `decode` makes of each path and its index, all of a path or nothing, and appends the index for each image to `kept`; names on stderr
    the paths that can't be read."""
    skipped = 0
    for index, path in enumerate(progress(paths)):
        try:
            arrays = list(decode(path, index))
        except Exception as error:  # noqa: BLE001 (Pillow's decoders raise nearly anything on a damaged file)
            reason = "Pillow cannot identify it" if isinstance(error, Image.UnidentifiedImageError) else error
            say(f"prepare_data: skipped {path}: {reason}", sys.stderr)
            skipped += 1
            continue
        for array in arrays:
            kept.append(index)
            yield array
    if skipped:
        say(f"prepare_data: skipped {skipped} of {len(paths)} images as broken", sys.stderr)
    if not kept:
        raise DataError("none of the images could be read")


def load_folder(data_dir: str, image_size: tuple[int, int], channels: int) -> tuple[np.ndarray, np.ndarray | None, list[str]]:
    """What `--data_dir` writes of a folder, in memory: uint8 (N, C, H, W), int32 labels or None, and the names of the classes."""
    paths, labels, class_names = list_images(data_dir)
    images = np.empty((len(paths), channels, *image_size), np.uint8)
    kept: list[int] = []
    cut = Cut(image_size)
    decoded = decode_images(paths, kept, lambda path, index: cut.parts(read_picture(path, channels), index))
    for position, image in enumerate(decoded):
        images[position] = image
    return images[: len(kept)], None if labels is None else np.array(labels, np.int32)[kept], class_names


def open_pictures(path: str, config: Config) -> Data:
    """Reads the images in a folder, cropped to the configuration's size; sub-folders are classes."""
    try:
        images, labels, names = load_folder(path, config.image_size, config.in_channels)
    except DataError as e:
        raise DataError(f"--data_dir {path}: {e}") from None
    # The checksum is that of the data file that `prepare_data.py` makes of this folder, so that a resumed run notices other pictures.
    classes, behind = (0, b"") if labels is None else (len(names), labels.astype("<i4").tobytes())
    header = data_header([1, *images.shape, classes, 1], zlib.crc32(behind, zlib.crc32(images)))
    return Data(path, images, labels, classes, int(header[8]))
