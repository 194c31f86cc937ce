"""Changes of training images of which the network is told (Karras et al. 2022, appendix F.2), so that it does not draw them by itself."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from common.random_numbers import AUGMENT, random_words, to_normals

# The wavelet filter sym6 (Daubechies 1992, table 6.2).
SYM6 = [0.015404109327027373, 0.0034907120842174702, -0.11799011114819057, -0.048311742585633, 0.4910559419267466, 0.787641141030194]
SYM6 += [0.3379294217276218, -0.07263752278646252, -0.021060292512300564, 0.04472490177066578, 0.0017677118642428036, -0.007800708325034148]
MARGIN = len(SYM6) // 2  # of an image at twice the resolution, on each side


def rotation(angle: Tensor) -> Tensor:
    """(B, 2, 2)"""
    return torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).view(-1, 2, 2)


def draw_changes(p: float, words: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of random words (B, 16): the nine numbers (B, 9), of which the first two are flips; and the way from a pixel of the changed image, counted from
    the centre, back to where it comes from in the flipped one: a matrix (B, 2, 2), and what is added (B, 2). In float64."""
    u, z = words.double() * 2.0**-32, to_normals(words[:, 12:16]).double()
    angles = (2 * u - 1) * math.pi

    def drawn(value: Tensor, coin: int, probability: float = p) -> Tensor:
        return torch.where(u[:, coin] < probability, value, 0)

    flip_x, flip_y = (words[:, 0] & 1).double(), drawn((words[:, 1] & 1).double(), 2)
    size, angle, stretch, axis = drawn(z[:, 0], 3), drawn(angles[:, 5], 4), drawn(z[:, 1], 6), drawn(angles[:, 7], 8, 0.5)
    shift_x, shift_y = drawn(z[:, 2], 9), drawn(z[:, 3], 9)
    longer = 2 ** (0.2 * stretch)
    stretched = rotation(-axis) @ torch.diag_embed(torch.stack([1 / longer, longer], -1)) @ rotation(axis)
    matrix = 2 ** (-0.2 * size)[:, None, None] * rotation(angle) @ stretched
    shift = torch.stack([shift_x * width / 8, shift_y * height / 8], -1)
    told = [flip_x, flip_y, size, angle.cos() - 1, angle.sin(), stretch * axis.cos(), stretch * axis.sin(), shift_x, shift_y]
    return torch.stack(told, -1), matrix, -(matrix @ shift[:, :, None])[:, :, 0]


def mirrored(index: Tensor, size: int) -> Tensor:
    """Where the pixels of a row are that is continued by its mirror image at both ends."""
    index = index.remainder(2 * size - 2)
    return torch.where(index < size, index, 2 * size - 2 - index)


def doubled(image: Tensor) -> Tensor:
    """(C, H, W) -> (C, 2 H, 2 W): zeros between the pixels, and the filter over them."""
    filter_ = torch.tensor(SYM6, dtype=image.dtype, device=image.device).flip(0)[None, None]
    for axis in (2, 1):
        lines = image.movedim(axis, -1)
        sparse = torch.zeros(*lines.shape[:-1], 2 * lines.shape[-1] - 1, dtype=image.dtype, device=image.device)
        sparse[..., ::2] = lines
        wide = F.conv1d(sparse.reshape(-1, 1, sparse.shape[-1]), filter_, padding=MARGIN)
        image = wide.view(*lines.shape[:-1], -1).movedim(-1, axis)
    return image


def halved(fine: Tensor) -> Tensor:
    """(C, 2 H + 12, 2 W + 12) -> (C, H, W): the filter once more, and every other pixel."""
    filter_ = torch.tensor(SYM6, dtype=fine.dtype, device=fine.device)[None, None]
    for axis in (2, 1):
        lines = fine.movedim(axis, -1)[..., 1:]
        narrow = F.conv1d(lines.reshape(-1, 1, lines.shape[-1]), filter_, stride=2)
        fine = narrow.view(*lines.shape[:-1], -1).movedim(-1, axis)
    return fine


def change(image: Tensor, told: Tensor, matrix: Tensor, added: Tensor) -> Tensor:
    """An image (C, H, W), in float64, as these say: at twice the resolution, read between four pixels."""
    _, H, W = image.shape
    image = image.flip([axis for axis, flip in ((2, told[0]), (1, told[1])) if flip])
    y, x = torch.meshgrid(*(torch.arange(2 * n + 2 * MARGIN, dtype=image.dtype, device=image.device) for n in (H, W)), indexing="ij")
    place = torch.stack([(x - W - 5) / 2, (y - H - 5) / 2]).flatten(1)
    source = matrix @ place + added[:, None]
    # A part of the endless mirrored image that has all that is read.
    u = 2 * source + torch.tensor([[W - 1.0], [H - 1.0]], dtype=image.dtype, device=image.device)
    low, high = (u.min(1).values / 2).floor().long() - MARGIN, (u.max(1).values / 2).ceil().long() + MARGIN
    columns, rows = (mirrored(torch.arange(int(a), int(b) + 1, device=image.device), size) for a, b, size in zip(low, high, (W, H)))
    fine = doubled(image[:, rows][:, :, columns])
    u = u - 2 * low[:, None]
    corner = u.floor().long()
    part_x, part_y = u - corner
    (i, j) = corner
    upper = fine[:, j, i] * (1 - part_x) + fine[:, j, i + 1] * part_x
    lower = fine[:, j + 1, i] * (1 - part_x) + fine[:, j + 1, i + 1] * part_x
    return halved((upper * (1 - part_y) + lower * part_y).view(-1, *x.shape))


def augment(x0: Tensor, p: float, seed: int, step: int, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Images (B, C, H, W), each changed with probability p in each of six ways, and the numbers (B, 9) that say how."""
    told, matrices, added = draw_changes(p, random_words(seed, AUGMENT, step, samples, 16), *x0.shape[2:])
    images = [change(*parts) for parts in zip(x0.double(), told, matrices, added)]
    return torch.stack(images).to(x0.dtype), told.to(x0.dtype)
