"""What a model has drawn, as files: pictures, grids, data files."""

from __future__ import annotations

import io
import math

import numpy as np
import torch

from common import files
from common.data_files import write_data
from common.flags import Config
from common.program import UserError


def to_pixels(images: torch.Tensor) -> np.ndarray:
    """(..., C, H, W) in [-1, 1] to uint8 (..., H, W, 3 or 1). Of other than 3 channels, the first is shown in grey."""
    shown = images if images.shape[-3] == 3 else images[..., :1, :, :]
    return ((shown + 1) * 127.5).clamp(0, 255).add(0.5).to(torch.uint8).movedim(-3, -1).numpy()


def png_bytes(pixels: np.ndarray) -> bytes:
    from PIL import Image  # which who only times the network does without

    buffer = io.BytesIO()
    Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels).save(buffer, "PNG")
    return buffer.getvalue()


def save_png(pixels: np.ndarray, path: str) -> None:
    files.atomic_write(path, [png_bytes(pixels)])


def grid_pixels(images: torch.Tensor, enlarge: bool = True) -> np.ndarray:
    """uint8 (H, W, 3 or 1) of a square grid of images (N, C, H, W) in [-1, 1], small ones enlarged."""
    pixels, gap = to_pixels(images), 2
    zoom = max(1, 64 // max(pixels.shape[1:3])) if enlarge else 1
    pixels = pixels.repeat(zoom, axis=1).repeat(zoom, axis=2)
    N, H, W, C = pixels.shape
    columns = math.ceil(math.sqrt(N))
    grid = np.full((math.ceil(N / columns) * (H + gap) + gap, columns * (W + gap) + gap, C), 255, np.uint8)
    for i, image in enumerate(pixels):
        y, x = gap + i // columns * (H + gap), gap + i % columns * (W + gap)
        grid[y : y + H, x : x + W] = image
    return grid


def save_samples(images: torch.Tensor, path: str) -> None:
    """Images in [-1, 1] as a grid (.png), or as a data file of float32 images (.bin)."""
    if not torch.isfinite(images).all():
        raise UserError(f"{path}: is not written, because the samples are not finite numbers; these weights are broken")
    if path.endswith(".bin"):
        write_data(path, images.numpy())
    else:
        save_png(grid_pixels(images), path)


def check_samples(config: Config, *inputs: str) -> None:
    """UserError if --output can't be written, or would replace more than older samples. inputs: what else is read."""
    read = [*inputs, config.data_file, config.start_from, config.inpaint, config.mask]
    files.check_output("--output", config.output, read, files.is_samples)
