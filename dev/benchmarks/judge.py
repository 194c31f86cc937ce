"""Is my model good, or does it copy? Samples beside the data that a model was trained on, of any size, with labels or without.

    ./train_unet --sample 2000 --init out_mine/model_0007500.bin --output samples.bin
    python dev/benchmarks/judge.py --data_file my_pictures_64x64x3.bin --samples samples.bin --judge my_judge.pt
    python dev/benchmarks/judge.py --data_file train.bin --held_out held_out.bin --samples samples.bin
    python dev/benchmarks/judge.py --data_file my_pictures_64x64x3.bin --runs out_mine          each checkpoint of a run, drawn by ./train_unet

Images that the models have not seen are those of --held_out, or of --val_fraction, which a run's checkpoints name.

The judge is a small classifier (common/judge.py) that is trained on the data without every fifth image: features that have seen an image put it in too good
a place. So samples are compared with the images that it has not seen, and with those of --held_out, which the model has not seen either. A model that
copies is nearer to the former than those of --held_out are.

- Distance: the Frechet distance in 64 features, or in 512 where a GPU judges 10,000 images or more; 0 is best. It shrinks with the number of images, so only
  sets of one size can be compared.
- +-: one standard deviation over 200 bootstrap draws of both sets. "other judge": the same by a judge that was trained from another seed. A difference
  that is smaller than one of the two says nothing.
- Precision: the share of samples that lie among the unseen images; recall: the share of these that lie among the samples (dev/benchmarks/quality.py).
- Copies: the share of samples that are closer than 16 of 255 to any image of the data, as the root of the mean square over pixels and colours.

--runs writes its rows to judge.csv in the run's folder, too, and the run's page shows them. best.bin stays the checkpoint with the lowest validation loss.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import astuple, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from command_line import Parser

from common import program
from common.program import UserError, run_program

FIFTH = 5  # every fifth image is not shown to the judge
FEWEST = 300  # images of the data, so that there are sixty to compare with


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--data_file", required=True, help="the data that the models were trained on")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--samples", nargs="+", default=[], metavar="F.bin", help="files of samples, or of any images")
    what.add_argument("--runs", nargs="+", default=[], metavar="DIR", help="output folders of runs: judge samples of each checkpoint")
    parser.add_argument("--num_samples", type=int, help="with --runs: samples of each checkpoint (default: 1000)")
    parser.add_argument("--held_out", default="", metavar="F.bin", help="images that no model was trained on")
    parser.add_argument(
        "--val_fraction", type=float, help="instead: the images of the data that a run with this flag holds out (default: that of --runs)"
    )
    parser.add_argument("--judge", default="", metavar="F.pt", help="the judge: read from here, or written if there is no such file")
    return parser.parse_args(argv)


if __name__ == "__main__":  # before PyTorch
    program.begin("judge", parse_arguments, program.SAMPLING)

import numpy as np
import torch

import generate
from common import files
from common.config import make_config, pick_device
from common.data_files import Data, open_data
from common.flags import float32
from common.formats import read_model
from common.judge import Judge, frechet, levels, make_judge, measure
from common.model_files import ModelFile, checkpoints
from common.random_numbers import held_out_images
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
    return levels(torch.from_numpy(data.read_finite(np.arange(data.count))))


def held_out_fraction(args: argparse.Namespace, newest: dict[str, ModelFile]) -> float:
    """--val_fraction, or that of the runs, which must have the same; 0: the models have seen all images. newest: each run's newest checkpoint."""
    found = {file.config.val_fraction for file in newest.values()}
    if args.val_fraction is not None:
        if args.held_out:
            raise UserError(
                f"--val_fraction {args.val_fraction:g}: --held_out {args.held_out} names images that no model has seen, too; leave one of the two out"
            )
        if not 0 < args.val_fraction < 1:
            raise UserError(f"--val_fraction {args.val_fraction:g}: must be above 0 and below 1")
        found.add(float32(args.val_fraction))
    if len(found) > 1:
        raise UserError(f"--val_fraction {' and '.join(f'{x:g}' for x in sorted(found))}: hold out different images; judge such runs one by one")
    return found.pop() if found else 0.0


@dataclass
class Row:
    """A line of the table, and of judge.csv. to_held_out: NaN without --held_out."""

    distance: float
    spread: float
    other_judge: float
    to_held_out: float
    precision: float
    recall: float
    copies: float

    def __str__(self) -> str:
        to_held_out = "" if np.isnan(self.to_held_out) else f"{self.to_held_out:.3f}"
        others = f"{self.other_judge:12.3f} {to_held_out:>12s} {self.precision:10.3f} {self.recall:7.3f} {self.copies:7.3f}"
        return f"{self.distance:8.3f} +- {self.spread:.3f} {others}"


def row(images: torch.Tensor, judge: Judge, other: Judge, unseen: int, data: torch.Tensor) -> Row:
    """unseen: how many of the judge's held-out images are the data's; those of --held_out follow them."""
    found = judge.features(images)
    figures = measure(found, judge.held_out[:unseen])
    distance, precision, recall = figures.values
    again = frechet(other.features(images), other.held_out[:unseen])
    to_held_out = frechet(found, judge.held_out[unseen:]) if len(judge.held_out) > unseen else np.nan
    copies = (nearest_images(images, data.split(4096))[0] < COPY).double().mean().item()
    return Row(distance, figures.spreads[0], again, to_held_out, precision, recall, copies)


def draw_samples(path: str, count: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Of a checkpoint, by ./train_unet, with the run's own sampler."""
    file = read_model(path)
    images = generate.BACKENDS["native"](file, make_config({"batch_size": min(count, 250)}, None, file), count)
    if images.shape[1:] != shape:
        raise UserError(f"--runs {path}: draws images of {'x'.join(map(str, images.shape[1:]))}; those of the data are {'x'.join(map(str, shape))}")
    return levels(images)


def write_rows(folder: str, rows: dict[int, Row]) -> None:
    names = [field.name for field in fields(Row)]
    lines = [",".join(["step", *names])] + [",".join([str(step), *(f"{x:.6g}" for x in astuple(found))]) for step, found in rows.items()]
    text = "\n".join(lines) + "\n"
    files.atomic_write(f"{folder}/judge.csv", [text.encode()])
    page = Path(folder, "index.html")
    if page.exists():  # a run that goes on writes it anew, from judge.csv
        shown = re.sub(r'"judge":"[^"]*"', lambda _: f'"judge":{json.dumps(text)}', page.read_text(), count=1)
        files.atomic_write(str(page), [shown.encode()])


def run(argv: list[str]) -> None:
    args = parse_arguments(argv)
    if args.judge:
        files.check_output("--judge", args.judge, [args.data_file, args.held_out, *args.samples], lambda head: True)  # a judge is read
    for folder in args.runs:
        if not checkpoints(folder):
            raise UserError(f"--runs {folder}: holds no checkpoint; name the --output_dir of a run")
    if args.num_samples is not None and not args.runs:
        raise UserError(f"--num_samples {args.num_samples}: is of the checkpoints of --runs; a file of --samples is taken whole")
    args.num_samples = 1000 if args.num_samples is None else args.num_samples
    if args.num_samples < FEWEST // FIFTH:
        raise UserError(f"--num_samples {args.num_samples}: must be at least {FEWEST // FIFTH}")
    newest = {folder: read_model([*checkpoints(folder).values()][-1]) for folder in args.runs}
    whole, fraction = open_images("data_file", args.data_file, (), FEWEST), held_out_fraction(args, newest)
    for folder, file in newest.items():
        if file.state.data_crc not in (0, whole.crc):
            print(
                f"--runs {folder}: was trained on other images than those of {args.data_file}, so what is said of copies and held-out images may be wrong"
            )
    held_out = held_out_images(whole.count, fraction)
    source = whole.part_of(np.setdiff1d(np.arange(whole.count), held_out))
    if source.count < FEWEST // 2:
        raise UserError(f"--val_fraction {fraction:g}: leaves {source.count} images of {args.data_file} for a judge, not {FEWEST // 2} or more")
    shape = source.images.shape[1:]
    samples = {path: open_images("samples", path, shape, FEWEST // FIFTH) for path in args.samples}
    known, known_name = None, args.held_out or f"--val_fraction {fraction:g}"
    if args.held_out:
        known = open_images("held_out", args.held_out, shape, FEWEST // FIFTH)
    elif len(held_out) >= FEWEST // FIFTH:
        known = whole.part_of(held_out)
    elif len(held_out):
        print(f"--val_fraction {fraction:g}: {len(held_out)} images are held out, too few to compare with; {FEWEST // FIFTH} would do")
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
    features = judge.training.shape[1]
    if min([len(images.images) for images in samples.values()], default=args.num_samples) < 2 * features or unseen < 2 * features:
        print(f"there are fewer than {2 * features} samples, or images to compare them with, so distances are uncertain and too large")
    print(f"{'':40s}        distance  other judge  to held out  precision  recall  copies")
    if known:
        print(f"{f'{known_name} ({known.count})':40.40s} {row(floats(known), judge, other, unseen, data)}", flush=True)
    for path, images in samples.items():
        print(f"{f'{path} ({len(images.images)})':40.40s} {row(floats(images), judge, other, unseen, data)}", flush=True)
    for folder in args.runs:
        rows = {}
        for step, path in checkpoints(folder).items():
            rows[step] = row(draw_samples(path, args.num_samples, shape), judge, other, unseen, data)
            print(f"{path:40.40s} {rows[step]}", flush=True)
            write_rows(folder, rows)
        print(f"wrote {folder}/judge.csv; open {folder}/index.html")


if __name__ == "__main__":
    sys.exit(run_program("judge", run))
