"""Random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

Its key is the seed, and its counter (quartet, sample, step, purpose). There is no state, so any step of any run can be reproduced alone, on any machine.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

INIT, TIMESTEP, NOISE, FLIP, ORDER, DROPOUT, SAMPLE_START, SAMPLE_NOISE, VAL_TIMESTEP, VAL_NOISE, CLASS_DROPOUT, KNOWN_NOISE, BACK_NOISE = range(13)
AUGMENT = 13  # a training image's change
COND_DROPOUT = 14  # whether the picture that an image is conditioned on is left out
COND_NOISE = 15  # on a coarse picture
HOLES_OF_MASK = 16  # what --cond mask leaves out
HELD_OUT = 17  # the images of --val_fraction
MASK = 0xFFFFFFFF  # 32 bits


def philox(c0: Any, c1: Any, c2: Any, c3: Any, seed: Any) -> tuple[Any, Any, Any, Any]:
    """Four 32-bit words for a counter of four such words: Python ints, int64 arrays or int64 tensors, broadcast.
    A product of 32-bit numbers fits in 64 bits; that int64 takes its upper half for negative is undone by & MASK."""
    k0, k1 = seed & MASK, seed >> 32
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) & MASK ^ c1 ^ k0, p1 & MASK, (p0 >> 32) & MASK ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def random_words(seed: Any, purpose: int, step: Any, samples: Tensor, count: int) -> Tensor:
    """(len(samples), count) words: element e of a sample is word e % 4 of its quartet e / 4."""
    quartets = torch.arange((count + 3) // 4, device=samples.device).split(2**16)  # whose words stay in the cache
    words = [torch.stack(philox(part, samples[:, None], step, purpose, seed), dim=-1).flatten(1) for part in quartets]
    return torch.cat(words, dim=1)[:, :count]


def to_normals(words: Tensor) -> Tensor:
    """Standard normals from words (..., 2n), pair by pair (Box & Muller 1958), in double, rounded to float."""
    u = ((words >> 9).double() + 0.5) * 2.0**-23
    radius, angle = (-2 * u[..., 0::2].log()).sqrt(), 2 * math.pi * u[..., 1::2]
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1).flatten(-2).float()


def normals(seed: int, purpose: int, step: int, samples: Tensor, chw: tuple[int, int, int]) -> Tensor:
    """Normals (B, C, H, W) for these samples; elements are counted over (H, W, C)."""
    C, H, W = chw
    count = C * H * W
    z = to_normals(random_words(seed, purpose, step, samples, count + count % 2))[:, :count]
    return z.view(-1, H, W, C).permute(0, 3, 1, 2).contiguous()


def data_order(seed: int, first: int, count: int, images: int, purpose: int = ORDER) -> np.ndarray:
    """Indices of the images first, first + 1, ... of the run: each epoch is a permutation of its own, without a table.
    A Feistel network permutes the next even number of bits; walked until it lands inside [0, images)."""
    g = np.arange(first, first + count, dtype=np.int64)
    epoch, x = (g // images) & MASK, g % images
    half = max(1, ((images - 1).bit_length() + 1) // 2)
    outside = np.ones(count, dtype=bool)
    while outside.any():
        left, right = x >> half, x & (2**half - 1)
        for r in range(4):
            left, right = right, left ^ philox(right, r, epoch, purpose, seed)[0] & (2**half - 1)
        x = np.where(outside, left << half | right, x)
        outside = x >= images
    return x


def held_out_images(images: int, fraction: float) -> np.ndarray:
    """Which of so many images --val_fraction (a float32) holds out, in ascending order: the same in all runs, whatever their seed."""
    count = math.floor(fraction * images + 0.5)
    return np.sort(data_order(0, 0, count, images, HELD_OUT))
