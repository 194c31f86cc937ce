"""Is my model good, or does it copy? Samples beside the data that a model was trained on, of any size, with labels or without.

    ./train_unet --sample 2000 --init out_mine/model_0007500.bin --output samples.bin
    python dev/benchmarks/judge.py --data_file my_pictures_64x64x3.bin --samples samples.bin --judge my_judge.pt
    python dev/benchmarks/judge.py --data_file train.bin --held_out held_out.bin --samples samples.bin

The judge is a small classifier (common/judge.py) that is trained on the data without every fifth image: features that have seen an image put it in too good
a place. So samples are compared with the images that it has not seen, and with those of --held_out, which the model has not seen either. A model that
copies is nearer to the former than those of --held_out are.

- Distance: the Frechet distance in 64 features, 0 is best. It shrinks with the number of images, so only sets of one size can be compared.
- +-: one standard deviation over 200 bootstrap draws of both sets. "other judge": the same by a judge that was trained from another seed. A difference
  that is smaller than one of the two says nothing.
- Precision: the share of samples that lie among the unseen images; recall: the share of these that lie among the samples (dev/benchmarks/quality.py).
- Copies: the share of samples that are closer than 16 of 255 to any image of the data, as the root of the mean square over pixels and colours.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from command_line import Parser

from common import program
from common.program import UserError, run_program

FIFTH = 5  # every fifth image is not shown to the judge
FEWEST = 300  # images of the data, so that there are sixty to compare with


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--data_file", required=True, help="the data that the models were trained on")
    parser.add_argument("--samples", nargs="+", required=True, metavar="F.bin", help="files of samples, or of any images")
    parser.add_argument("--held_out", default="", metavar="F.bin", help="images that no model was trained on")
    parser.add_argument("--judge", default="", metavar="F.pt", help="the judge: read from here, or written if there is no such file")
    return parser.parse_args(argv)


if __name__ == "__main__":  # before PyTorch
    program.begin("judge", parse_arguments, program.SAMPLING)

import numpy as np
import torch

from common import files
from common.config import pick_device
from common.data_files import Data, open_data
from common.judge import FEATURES, Judge, frechet, levels, make_judge, measure
from common.samples import COPY, nearest_images


def open_images(flag: str, path: str, shape: tuple[int, ...], fewest: int) -> Data:
    """A data file of at least so many images of this shape (C, H, W); (): any."""
    data = open_data(path)
    if len(data.images) < fewest or (shape and data.images.shape[1:] != shape):
        wanted = f"{fewest} or more" + (f" of {'x'.join(map(str, shape))}" if shape else "")
        raise UserError(f"--{flag} {path}: holds {len(data.images)} images of {'x'.join(map(str, data.images.shape[1:]))}, not {wanted}")
    return data


def floats(data: Data) -> torch.Tensor:
    """All images (N, C, H, W), in [-1, 1] with 256 levels."""
    return levels(torch.from_numpy(data.read_finite(np.arange(len(data.images)))))


def row(name: str, images: torch.Tensor, judge: Judge, other: Judge, unseen: int, data: torch.Tensor) -> str:
    """A line of the table. unseen: how many of the judge's held-out images are the data's; those of --held_out follow them."""
    found = judge.features(images)
    figures = measure(found, judge.held_out[:unseen])
    distance, precision, recall = figures.values
    again = frechet(other.features(images), other.held_out[:unseen])
    to_held_out = f"{frechet(found, judge.held_out[unseen:]):12.3f}" if len(judge.held_out) > unseen else f"{'':12s}"
    copies = (nearest_images(images, data.split(4096))[0] < COPY).double().mean().item()
    return f"{name[:40]:40s} {distance:8.3f} +- {figures.spreads[0]:.3f} {again:12.3f} {to_held_out} {precision:10.3f} {recall:7.3f} {copies:7.3f}"


def run(argv: list[str]) -> None:
    args = parse_arguments(argv)
    if args.judge:
        files.check_output("--judge", args.judge, [args.data_file, args.held_out, *args.samples], lambda head: True)  # a judge is read
    source = open_images("data_file", args.data_file, (), FEWEST)
    shape = source.images.shape[1:]
    samples = {path: open_images("samples", path, shape, FEWEST // FIFTH) for path in args.samples}
    known = open_images("held_out", args.held_out, shape, FEWEST // FIFTH) if args.held_out else None
    data, device = floats(source), pick_device("auto")
    seen = torch.arange(len(data)) % FIFTH < FIFTH - 1
    labels = None if source.labels is None else torch.from_numpy(source.labels.astype(np.int64))
    compared = torch.cat([data[~seen], floats(known)]) if known else data[~seen]
    unseen = int((~seen).sum())
    print("training the judges; this takes minutes on a CPU", file=sys.stderr, flush=True)
    shown = data[seen].to(device), None if labels is None else labels[seen].to(device), compared
    judge, other = make_judge(*shown, args.judge), make_judge(*shown, seed=1)
    right = "" if labels is None else f", {judge.right(data[~seen], labels[~seen]):.1%} of the {unseen} images that it has not seen right"
    print(f"judge {judge.checksum():08x}: trained on {int(seen.sum())} images of {args.data_file}{right}")
    if min(len(images.images) for images in samples.values()) < 2 * FEATURES or unseen < 2 * FEATURES:
        print(f"fewer than {2 * FEATURES} samples, or images to compare with: distances are uncertain, and larger than of more")
    print(f"{'':40s}        distance  other judge  to held out  precision  recall  copies")
    if known:
        print(row(f"{args.held_out} ({len(known.images)})", floats(known), judge, other, unseen, data), flush=True)
    for path, images in samples.items():
        print(row(f"{path} ({len(images.images)})", floats(images), judge, other, unseen, data), flush=True)


if __name__ == "__main__":
    sys.exit(run_program("judge", run))
