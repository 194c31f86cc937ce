"""Judges of pictures: a small classifier's features, the Frechet distance, precision and recall in them, and what else is said of samples.

A judge is trained on the images of a data set, with fixed seeds, and compares samples with images of it. Its file (--judge F.pt) holds the weights, so that
several calls are judged by the same features; its checksum names it. Of many images a GPU trains a larger network: of photographs
the small one's distances mislead (docs/LEARNT.md, "A minute, searched").
"""

from __future__ import annotations

import io
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from common import files
from common.program import UserError

FEATURES, LARGE_FEATURES = 64, 512
LARGE_FROM = 10_000  # images of which a GPU trains the larger network
NEIGHBOUR = 3
BOOTSTRAPS = 200
EPOCHS, EXEMPLAR_EPOCHS = 10, 60  # of the training, with labels and without
LARGE_EPOCHS = 24  # with labels


# ----------------------------------------------------------------------------------------------------------------------
# the figures, of features (N, features), float64


def covariance(points: torch.Tensor) -> torch.Tensor:
    centred = points - points.mean(0)
    return centred.T @ centred / (len(points) - 1)


def frechet(a: torch.Tensor, b: torch.Tensor) -> float:
    """Frechet distance between the Gaussians with the means and covariances of a and b."""
    S, T = covariance(a), covariance(b)
    values, vectors = torch.linalg.eigh(S)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    # tr (S T)^1/2 = the sum of the roots of the eigenvalues of S^1/2 T S^1/2, which is symmetric
    shared = torch.linalg.eigvalsh(root @ T @ root).clamp(min=0).sqrt().sum()
    return ((a.mean(0) - b.mean(0)).square().sum() + S.trace() + T.trace() - 2 * shared).item()


def radii(points: torch.Tensor) -> torch.Tensor:
    """(N) distance of each point to its third nearest other."""
    near = [torch.cdist(part, points).topk(NEIGHBOUR + 1, largest=False).values[:, -1] for part in points.split(1000)]  # the nearest is itself
    return torch.cat(near)


def covered(points: torch.Tensor, manifold: torch.Tensor) -> torch.Tensor:
    """(N) 1.0 where a point is within the manifold of the other set, else 0.0."""
    reach = radii(manifold)
    return torch.cat([(torch.cdist(part, manifold) <= reach).any(1) for part in points.split(1000)]).double()


@dataclass
class Figures:
    """Frechet distance, precision, recall, and a standard deviation of each."""

    values: tuple[float, float, float]
    spreads: tuple[float, float, float]

    def __str__(self) -> str:
        (f, p, r), (df, dp, dr) = self.values, self.spreads
        return f"{f:8.3f} +- {df:.3f}   {p:.3f} +- {dp:.3f}   {r:.3f} +- {dr:.3f}"


def measure(samples: torch.Tensor, held_out: torch.Tensor) -> Figures:
    random, shares = torch.Generator().manual_seed(0), [covered(samples, held_out), covered(held_out, samples)]

    def draw(x: torch.Tensor) -> torch.Tensor:
        return x[torch.randint(len(x), (len(x),), generator=random)]

    draws = [(frechet(draw(samples), draw(held_out)), *(draw(share).mean().item() for share in shares)) for _ in range(BOOTSTRAPS)]
    return Figures((frechet(samples, held_out), *(share.mean().item() for share in shares)), tuple(np.std(draws, axis=0).tolist()))


# ----------------------------------------------------------------------------------------------------------------------
# features


def to_floats(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels.astype(np.float32) / 127.5 - 1)


def crop(images: torch.Tensor) -> torch.Tensor:
    """A part of each image, of 75 to 100 % of its sides, at a random place, enlarged to the whole size; half of them mirrored."""
    n, sides = len(images), 0.75 + 0.25 * torch.rand(len(images))
    centres = (2 * torch.rand(n, 2) - 1) * (1 - sides)[:, None]  # in units of half an image, so that no part leaves the image
    mirrored = torch.where(torch.rand(n) < 0.5, -1.0, 1.0)
    transform = torch.zeros(n, 2, 3)
    transform[:, 0, 0], transform[:, 1, 1], transform[:, :, 2] = sides * mirrored, sides, centres
    grid = nn.functional.affine_grid(transform.to(images.device), list(images.shape), align_corners=False)
    return nn.functional.grid_sample(images, grid, padding_mode="border", align_corners=False)


def shift(images: torch.Tensor) -> torch.Tensor:
    """All images moved by the same random way of up to 4 pixels, with their mirrored borders."""
    height, width = images.shape[2:]
    y, x = torch.randint(9, (2,)).tolist()
    return nn.functional.pad(images, (4, 4, 4, 4), mode="reflect")[:, :, y : y + height, x : x + width]


def build_classifier(channels: int, height: int, width: int, classes: int) -> nn.Sequential:
    """Convolutions that halve the sides until 4 pixels are left, then FEATURES numbers, then the classes."""
    model = nn.Sequential()
    while min(height, width) > 4:  # of 32x32: 16x16, 8x8, 4x4 pixels
        wider = 32 if len(model) == 0 else 64
        model.extend([nn.Conv2d(channels, wider, 3, stride=2, padding=1), nn.BatchNorm2d(wider), nn.ReLU()])
        channels, height, width = wider, (height + 1) // 2, (width + 1) // 2
    inputs = channels * height * width
    return model.extend([nn.Flatten(), nn.Dropout(0.3), nn.Linear(inputs, FEATURES), nn.ReLU(), nn.Linear(FEATURES, classes)])


def convolution(inputs: int, outputs: int, halve: bool = False) -> list[nn.Module]:
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return [*layers, nn.MaxPool2d(2, ceil_mode=True)] if halve else layers


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.added = nn.Sequential(*convolution(channels, channels), *convolution(channels, channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.added(x)


def build_large_classifier(channels: int, height: int, width: int, classes: int) -> nn.Sequential:
    """A ResNet of nine layers, for 32x32 pixels (Page 2018, "How to train your ResNet"); larger images are first halved to that. Then LARGE_FEATURES numbers,
    the largest of each channel, then the classes."""
    model = nn.Sequential(*convolution(channels, 64))
    while min(height, width) > 32:
        model.extend(convolution(64, 64, halve=True))
        height, width = (height + 1) // 2, (width + 1) // 2
    model.extend([*convolution(64, 128, halve=True), Residual(128), *convolution(128, 256, halve=True)])
    model.extend([*convolution(256, LARGE_FEATURES, halve=True), Residual(LARGE_FEATURES)])
    return model.extend([nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(LARGE_FEATURES, classes)])


def train_classifier(images: torch.Tensor, labels: torch.Tensor | None, epochs: int = 0, seed: int = 0) -> nn.Sequential:
    """A classifier of images (N, C, H, W). The same images and seed give the same one: initial weights, order and changes of images come from the seed.
    epochs: 0: as many as are usual.

    Without labels every image is a class of its own, which is known again by random parts of it (Dosovitskiy et al. 2014, "Exemplar CNN")."""
    large = images.is_cuda and len(images) >= LARGE_FROM
    batch = 512 if large else 64
    epochs = epochs or (EXEMPLAR_EPOCHS if labels is None else LARGE_EPOCHS if large else EPOCHS)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        classes = len(images) if labels is None else int(labels.max()) + 1
        model = (build_large_classifier if large else build_classifier)(*images.shape[1:], classes)
        model.to(images.device)
        steps = epochs * (len(images) // batch)
        if large:
            optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, weight_decay=5e-4, nesterov=True)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.4 if large else 4e-3, steps)
        for _ in range(epochs):
            for index in torch.randperm(len(images)).split(batch)[: len(images) // batch]:
                if labels is None:
                    x, target = crop(images[index]), index.to(images.device)
                else:
                    mirror = torch.rand(len(index), 1, 1, 1) < 0.5
                    x, target = torch.where(mirror.to(images.device), images[index].flip(3), images[index]), labels[index]
                    x = shift(x) if large else x
                optimizer.zero_grad()
                with torch.autocast(images.device.type, torch.bfloat16, enabled=large):
                    classified = model(x)
                nn.functional.cross_entropy(classified.float(), target, label_smoothing=0.1 if large else 0).backward()
                optimizer.step()
                schedule.step()
    return model.eval()


@torch.no_grad()
def features(classifier: nn.Sequential, images: torch.Tensor) -> torch.Tensor:
    """(N, features), float64, on the CPU."""
    device = next(classifier.parameters()).device
    return torch.cat([classifier[:-1](part.to(device)).cpu() for part in images.split(1000)]).double()


def levels(images: torch.Tensor) -> torch.Tensor:
    """Images in [-1, 1] as pictures hold them: with 256 levels."""
    return to_floats(((images + 1) * 127.5).round().clamp(0, 255).numpy())


@dataclass
class Judge:
    """A classifier, and the features of what samples are compared with, each divided by its standard deviation over the training images."""

    classifier: nn.Sequential
    scale: torch.Tensor  # (features)
    training: torch.Tensor
    held_out: torch.Tensor

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """(N, features), float64, of images (N, C, H, W) in [-1, 1], which are rounded to 256 levels."""
        return features(self.classifier, levels(images)) / self.scale

    def figures(self, images: torch.Tensor) -> Figures:
        """Of samples, beside the held-out images."""
        return measure(self.features(images), self.held_out)

    def right(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """The share of images that it knows the class of."""
        with torch.no_grad():
            device = next(self.classifier.parameters()).device
            return torch.cat([self.classifier(part.to(device)).argmax(1).cpu() for part in images.split(1000)]).eq(labels).double().mean().item()

    def checksum(self) -> int:
        """Of its weights: distances of two calls can be compared if these are equal."""
        return zlib.crc32(b"".join(tensor.cpu().numpy().tobytes() for tensor in self.classifier.state_dict().values()))


def read_classifier(path: str, images: torch.Tensor, labels: torch.Tensor | None) -> nn.Sequential:
    """What train_classifier made of these images, from the file of --judge."""
    classes = len(images) if labels is None else int(labels.max()) + 1
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
        large = [*weights.values()][-2].shape[1] == LARGE_FEATURES  # the last layer's weights are (classes, features)
        model = (build_large_classifier if large else build_classifier)(*images.shape[1:], classes)
        model.load_state_dict(weights)
    except Exception:  # noqa: BLE001 (PyTorch has many for a file that is none of its own)
        raise UserError(f"--judge {path}: is no judge of this data; leave the flag out, or name a file that is not there") from None
    return model.to(images.device).eval()


def make_judge(training: torch.Tensor, labels: torch.Tensor | None, held_out: torch.Tensor, path: str = "", seed: int = 0, epochs: int = 0) -> Judge:
    """A judge that is trained on images (N, C, H, W) in [-1, 1], on their device, by their labels (N), or without labels with each image as a class of its
    own. path: a file of --judge, which is read, or written if it is not there. epochs: 0: as many as are usual."""
    if path and Path(path).exists():
        classifier = read_classifier(path, training, labels)
    else:
        classifier = train_classifier(training, labels, epochs, seed)
        if path:
            torch.save(classifier.state_dict(), buffer := io.BytesIO())
            files.atomic_write(path, [buffer.getbuffer()])
    seen = features(classifier, training)
    scale = seen.std(0)
    # A unit that hardly any training image wakes says nothing, and divided by its tiny deviation one held-out image would outweigh all others.
    scale[scale <= 0.01 * scale.median()] = torch.inf
    return Judge(classifier, scale, seen / scale, features(classifier, held_out) / scale)
