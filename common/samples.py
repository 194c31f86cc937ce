"""What a model has drawn, as files: pictures, grids, data files."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common import files
from common.data_files import Data, write_data
from common.program import UserError


def to_pixels(images: Tensor) -> np.ndarray:
    """(..., C, H, W) in [-1, 1] to uint8 (..., H, W, 3 or 1). Of other than 3 channels, the first is shown in grey."""
    shown = images if images.shape[-3] == 3 else images[..., :1, :, :]
    return ((shown + 1) * 127.5).clamp(0, 255).add(0.5).to(torch.uint8).movedim(-3, -1).numpy()


def png_bytes(pixels: np.ndarray) -> bytes:
    from PIL import Image, PngImagePlugin  # which who only times the network does without

    buffer, maker = io.BytesIO(), PngImagePlugin.PngInfo()
    maker.add_text("Software", files.SOFTWARE)
    Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels).save(buffer, "PNG", pnginfo=maker)
    return buffer.getvalue()


def save_png(pixels: np.ndarray, path: str) -> None:
    files.atomic_write(path, [png_bytes(pixels)])


# Characters of 3 x 5 pixels, enough to write numbers. An octal digit is a row, from the top; its highest bit is left.
LETTERS = {
    "0": 0o75557, "1": 0o26227, "2": 0o71747, "3": 0o71717, "4": 0o55711, "5": 0o74717, "6": 0o74757, "7": 0o71111, "8": 0o75757, "9": 0o75717,
    "-": 0o00700, "+": 0o02720, ".": 0o00002, "e": 0o35743,
}  # fmt: skip
LETTER_W, LETTER_H = 3, 5


def caption_pixels(caption: str, width: int) -> np.ndarray:
    """uint8 (LETTER_H, width): a caption in black on white, as much of it as there is room for."""
    pixels = np.full((LETTER_H, width), 255, np.uint8)
    for i, character in enumerate(caption[: width // (LETTER_W + 1)]):
        rows = LETTERS.get(character, 0)
        bits = [rows >> bit & 1 for bit in reversed(range(LETTER_W * LETTER_H))]
        letter = np.reshape(bits, (LETTER_H, LETTER_W)).astype(np.uint8)
        pixels[:, i * (LETTER_W + 1) :][:, :LETTER_W] = 255 * (1 - letter)
    return pixels


def value_captions(rows: list[list[float]], count: int) -> list[str]:
    """What stands below each of `count` images, which take these rows of numbers in turns; [] without rows."""
    return ["".join(f"{v:.2g} " for v in rows[i % len(rows)]) for i in range(count)] if rows else []


def visible(pictures: Tensor, channels: int) -> Tensor:
    """(N, channels, H, W) of pictures (N, K, H, W) that images are conditioned on: of one with fewer channels the first is shown."""
    return pictures[:, :channels] if pictures.shape[1] >= channels else pictures[:, :1].expand(-1, channels, -1, -1)


def beside_pictures(images: Tensor, pictures: Tensor, truth: Tensor) -> Tensor:
    """(N, C, H, 3 W): what each image is conditioned on, the image, and the image of the data that belongs to it; pictures and truth take turns."""
    index = torch.arange(len(images)) % len(pictures)
    return torch.cat([visible(pictures, images.shape[1])[index], images, truth[index]], dim=3)


def grid_pixels(images: Tensor, enlarge: bool = True, captions: Sequence[str] = (), parts: int = 1) -> np.ndarray:
    """uint8 (H, W, 3 or 1) of a square grid of images (N, C, H, W) in [-1, 1], small ones enlarged. captions: what stands below each, in numbers.
    parts: how many pictures lie side by side in an image, each W / parts wide."""
    pixels, gap = to_pixels(images), 2
    zoom = max(1, 64 // max(pixels.shape[1], pixels.shape[2] // parts)) if enlarge else 1
    pixels = pixels.repeat(zoom, axis=1).repeat(zoom, axis=2)
    if captions:
        below = np.stack([caption_pixels(caption, pixels.shape[2]) for caption in captions])[..., None]
        below = np.broadcast_to(below, (*below.shape[:3], pixels.shape[3]))
        white = np.full((len(pixels), gap, *pixels.shape[2:]), 255, np.uint8)
        pixels = np.concatenate([pixels, white, below], axis=1)
    N, H, W, C = pixels.shape
    columns = math.ceil(math.sqrt(N / parts))
    grid = np.full((math.ceil(N / columns) * (H + gap) + gap, columns * (W + gap) + gap, C), 255, np.uint8)
    for i, image in enumerate(pixels):
        y, x = gap + i // columns * (H + gap), gap + i % columns * (W + gap)
        grid[y : y + H, x : x + W] = image
    return grid


COPY = 16  # so near to a picture of the data, in 255ths, is a copy of it
MOST_COMPARED = 256 << 20  # bytes: a run's grids are not compared with more data than this


def nearest_images(images: Tensor, data: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """For each image (N, C, H, W) the nearest of the data, parts of (n, C, H, W), all in [-1, 1]: how far it is in 255ths, as the root of the mean square
    over pixels and colours, and its number in the data. All on one device."""
    nearest = torch.full((len(images),), math.inf, device=images.device)
    number, first = torch.zeros_like(nearest, dtype=torch.int64), 0
    for part in data:
        apart, index = torch.cdist(images.flatten(1), part.flatten(1)).min(1)
        number = torch.where(apart < nearest, first + index, number)
        nearest, first = torch.minimum(nearest, apart), first + len(part)
    return nearest * 127.5 / images[0].numel() ** 0.5, number


def is_compared(data: Data) -> bool:
    """Whether the grids of a run on this data are compared with it."""
    return data.count * data.images[0].nbytes <= MOST_COMPARED


def count_copies(images: Tensor, data: Data, mirrors: bool) -> int | None:
    """How many of the samples (N, C, H, W) in [-1, 1] are copies of images of the data; None: they are not compared, because the data are large.
    mirrors: copies of mirrored images count, too. As ./train_unet's count_copies."""
    if not is_compared(data):
        return None
    pixels = ((images.cpu() + 1) * 127.5).clamp(0, 255).round() / 127.5 - 1
    apart = torch.full((len(images),), math.inf)
    for samples in (pixels, pixels.flip(3)) if mirrors else (pixels,):
        parts = (torch.from_numpy(data.read_floats(part)) for part in np.array_split(np.arange(data.count), 1 + data.count // 4096))
        apart = torch.minimum(apart, nearest_images(samples, parts)[0])
    return int((apart < COPY).sum())


def check_finite(images: Tensor, path: str) -> None:
    """UserError if these are no images: before they are written to path."""
    if not torch.isfinite(images).all():
        raise UserError(f"{path}: is not written, because the samples are not finite numbers; these weights are broken")


class Classes(NamedTuple):
    """In which images were drawn."""

    labels: Tensor | None = None  # (N), int64: of each image; `count` stands for none. None: the model has no classes
    count: int = 0  # of the model's classes
    names: Sequence[str] = ()  # of them, by their numbers; or empty


def save_samples(images: Tensor, path: str, captions: Sequence[str] = (), classes: Classes = Classes()) -> None:
    """Images in [-1, 1] as a grid (.png) with these captions, or as a data file of float32 images (.bin) with their classes. If one was drawn without a
    class, the file has no labels."""
    check_finite(images, path)
    if path.endswith(".bin"):
        has_labels = classes.labels is not None and bool((classes.labels < classes.count).all())
        labels = {"labels": classes.labels.numpy(), "num_classes": classes.count, "class_names": classes.names} if has_labels else {}
        write_data(path, images.numpy(), kind=files.SAMPLES, **labels)
    else:
        save_png(grid_pixels(images, captions=captions), path)
