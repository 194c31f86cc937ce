"""Pictures as a condition that are made of the images themselves (--cond): coarse, grey, or with holes. docs/DIFFUSION.md has the formulas."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.flags import Config
from common.random_numbers import COND_NOISE, HOLES_OF_MASK, normals, philox, random_words

HOLES = 4  # of --cond mask, at most
NOISE_STRENGTH = 0xFFFFFFFF  # the block of random words that the noise's strength is drawn from


def enlarge(small: Tensor, factor: int) -> Tensor:
    """As guided-diffusion's SuperResModel does it."""
    return F.interpolate(small, scale_factor=factor, mode="bilinear", align_corners=False)


def noise_strengths(seed: int, step: int, samples: Tensor) -> Tensor:
    """(B) in [0, 1): each picture's part of the largest standard deviation."""
    word = philox(NOISE_STRENGTH, samples, step, COND_NOISE, seed)[0]
    return (word >> 8).float() * 2.0**-24


def coarse(config: Config, x0: Tensor, step: int, samples: Tensor, noise: float) -> Tensor:
    small = F.avg_pool2d(x0, config.picture_factor)
    if noise > 0:
        strength = noise * noise_strengths(config.seed, step, samples)
        small = small + strength[:, None, None, None] * normals(config.seed, COND_NOISE, step, samples, tuple(small.shape[1:]))
    return enlarge(small, config.picture_factor)


def grey(x0: Tensor) -> Tensor:
    """ITU-R BT.601."""
    weights = torch.tensor([0.299, 0.587, 0.114], dtype=x0.dtype, device=x0.device)
    return (x0 * weights[:, None, None]).sum(1, keepdim=True)


def with_holes(x0: Tensor, hidden: Tensor) -> Tensor:
    """(B, C + 1, H, W): images with zeros where they are hidden (B, 1, H, W), and where that is."""
    return torch.cat([torch.where(hidden, 0, x0), torch.where(hidden, 1.0, -1.0).to(x0.dtype)], dim=1)


def in_stroke(y: Tensor, x: Tensor, y0: Tensor, x0: Tensor, y1: Tensor, x1: Tensor, radius: Tensor) -> Tensor:
    """Which pixels are no further than a radius from the line between two points. In whole numbers."""
    along_y, along_x = y1 - y0, x1 - x0
    length2, radius2 = along_y**2 + along_x**2, radius**2
    ahead = (y - y0) * along_y + (x - x0) * along_x
    beside = (y - y0) * along_x - (x - x0) * along_y
    from_start, from_end = (y - y0) ** 2 + (x - x0) ** 2, (y - y1) ** 2 + (x - x1) ** 2
    near_line = torch.where(ahead < length2, beside**2 <= radius2 * length2, from_end <= radius2)
    return torch.where(ahead <= 0, from_start <= radius2, near_line)


def draw_holes(seed: int, step: int, samples: Tensor, H: int, W: int) -> Tensor:
    """(B, 1, H, W), bool: up to four rectangles and strokes between two random points."""
    words = random_words(seed, HOLES_OF_MASK, step, samples, 8 * HOLES).view(len(samples), HOLES, 8, 1, 1)
    y, x = torch.arange(H, device=samples.device)[:, None], torch.arange(W, device=samples.device)[None]
    hidden = torch.zeros(len(samples), H, W, dtype=torch.bool, device=samples.device)
    for k in range(HOLES):
        there, stroke, width, _, *points = words[:, k].unbind(1)
        y0, x0, y1, x1 = (word * size >> 32 for word, size in zip(points, (H, W, H, W)))
        radius = 1 + (width * (min(H, W) // 8 + 1) >> 32)
        rectangle = (y >= torch.minimum(y0, y1)) & (y <= torch.maximum(y0, y1)) & (x >= torch.minimum(x0, x1)) & (x <= torch.maximum(x0, x1))
        inside = torch.where(stroke & 1 == 1, in_stroke(y, x, y0, x0, y1, x1, radius), rectangle)
        hidden |= inside & ((there & 1 == 1) | (k == 0))
    return hidden[:, None]


def made_pictures(config: Config, x0: Tensor, step: int, samples: Tensor, noise: float = 0.0, masks: Tensor | None = None) -> Tensor:
    """(B, cond_channels, H, W), of images (B, C, H, W). masks (B, 1, H, W), bool: where holes are; None: they are drawn."""
    if config.meaning("picture_kind", {"lowres": False, "gray": False, "mask": True}):
        return with_holes(x0, draw_holes(config.seed, step, samples, *x0.shape[2:]) if masks is None else masks)
    return grey(x0) if config.picture_kind == "gray" else coarse(config, x0, step, samples, noise)
