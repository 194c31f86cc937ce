"""How good are the pictures? Frechet distance, precision and recall between samples and images that no model was trained on.

    python dev/benchmarks/quality.py --split out_quality                        writes out_quality/train.bin and out_quality/held_out.bin
    ./train_unet --preset fashion32 --data_file out_quality/train.bin --output_dir out_quality/native
    ./train_unet --sample 2000 --init out_quality/native/model_0001000.bin --output out_quality/samples.bin
    python dev/benchmarks/quality.py --samples out_quality/samples.bin          the figures of a file of samples (or of images)
    python dev/benchmarks/quality.py --runs out_quality/native out_torch        the figures of every checkpoint of these runs, whose samples it draws
    python dev/benchmarks/quality.py --runs ... --plot out_quality/quality.png  and how they change over training
    python dev/benchmarks/quality.py --features inception --weights F.pth --data_file data/emoji64.bin --samples samples.bin
                                                                                FID and more as papers report them, of 50,000 samples against that data

The split: data/fashion32.bin (10,000 images) without its last 2,000, which are held out. Nothing sees these but the last line of the
measurement: a model must be trained on train.bin (a run's checkpoint says what it was trained on, and any other is refused), and so is the
classifier.

Features are the 64 inputs of the last layer of a small classifier (122,000 parameters, ten epochs on the 8,000 training images, always the same
seed), each divided by its standard deviation over the training images. Its accuracy on the held-out images is printed.
- Frechet distance |m - m'|^2 + tr(S + S' - 2 (S S')^1/2) of the two sets' means and covariances (Heusel et al. 2017, with these features for
  Inception's). 0 is best. It shrinks with the number of samples, so only sets of one size can be compared; the first row is the training
  images, as many as there are samples: what a model that draws from the very same distribution would reach.
- Precision: the share of samples within the held-out images' manifold; recall: the share of held-out images within the samples'. The manifold of
  a set is the union of balls around its points that reach to their third nearest neighbour (Kynkaanniemi et al. 2019, k = 3).
- +-: one standard deviation over 200 bootstrap draws. For the Frechet distance both sets are drawn with repetition. For precision and recall
  the balls stay (a repeated point would be its own neighbour) and the points that are asked for are drawn.

With --features inception the features are Inception's, the figures torch-fidelity's, and what is compared with is all of --data_file (as in papers:
the images that the model was trained on): FID, KID (mean and standard deviation over subsets, times 1000), precision and recall (k = 3) of the same
features. Samples go from the data file that ./train_unet --sample 50000 --output samples.bin writes (or, with --runs, from the program) to the
network with 256 levels, as PNGs would hold them, and no PNG is written. Nothing is downloaded: the weights are a file that --weights names.
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

BACKENDS = ["coreml", "mps", "native", "onnx", "torch"]  # generate.py's
WEIGHTS = "weights-inception-2015-12-05-6726825d.pth, which https://github.com/toshas/torch-fidelity/releases/tag/v0.2.0 has"


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--split", metavar="DIR", help="write DIR/train.bin and DIR/held_out.bin, and stop")
    what.add_argument("--samples", nargs="+", metavar="F.bin", help="files of samples to judge")
    what.add_argument("--runs", nargs="+", metavar="DIR", help="output folders of runs: judge samples of each checkpoint")
    parser.add_argument("--features", default="classifier", choices=["classifier", "inception"], help="default: classifier, trained here")
    parser.add_argument("--weights", default="", metavar="F.pth", help=f"Inception's: {WEIGHTS}")
    told = "what is split, or with --features inception compared with (default: data/fashion32.bin)"
    parser.add_argument("--data_file", default=f"{ROOT}/data/fashion32.bin", help=told)
    parser.add_argument("--num_samples", type=int, help="samples of each checkpoint (default: 2000, with --features inception 50000)")
    parser.add_argument("--batch_size", type=int, default=250, help="images at a time")
    parser.add_argument("--steps", default="50", help="sampling steps (default: 50, of ddim with eta 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples")
    parser.add_argument("--backend", default="native", choices=BACKENDS, help="what draws the samples (default: ./train_unet)")
    parser.add_argument("--plot", metavar="F.png", help="how the figures change over training")
    return parser.parse_args(argv)


if __name__ == "__main__":  # before PyTorch
    program.begin("quality", parse_arguments, program.SAMPLING)

import io
import itertools
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import generate
from common import files
from common.config import make_config
from common.data_files import Data, open_data, write_data
from common.formats import read_model
from common.judge import FEATURES, NEIGHBOUR, Figures, Judge, make_judge, measure, to_floats
from common.model_files import ModelFile, checkpoints
from common.samples import to_pixels

HELD_OUT = 2000


def judge_of(data: Data, epochs: int = 0) -> tuple[Judge, float]:
    """The judge of the split, and the share of the held-out images that it knows the class of."""
    images, labels = to_floats(np.array(data.images)), torch.from_numpy(np.array(data.labels, np.int64))
    seen = len(images) - HELD_OUT
    judge = make_judge(images[:seen], labels[:seen], images[seen:], epochs=epochs)
    return judge, judge.right(images[seen:], labels[seen:])


# ----------------------------------------------------------------------------------------------------------------------
# Inception's features, through torch-fidelity


class Pictures(torch.utils.data.Dataset):
    """The images of a data file as torch-fidelity wants them: uint8 (3, H, W). What is grey becomes colour."""

    def __init__(self, data: Data):
        self.data = data
        if data.images.shape[1] not in (1, 3):
            raise UserError(
                f"{data.path}: holds {data.images.shape[1]} channels; pictures have 1 or 3 (generate.py --decode makes them from latents)"
            )

    def __len__(self) -> int:
        return len(self.data.images)

    def __getitem__(self, i: int) -> torch.Tensor:
        image = torch.from_numpy(self.data.read(np.array([i]))[0])
        if image.dtype != torch.uint8:
            image = torch.from_numpy(to_pixels(image)).movedim(-1, 0)
        return image.expand(3, -1, -1)


def inception_figures(samples: Pictures, reference: Pictures, weights: str, batch_size: int, **settings: Any) -> dict[str, float]:
    """torch-fidelity's figures. settings: others than its defaults."""
    import torch_fidelity

    fewest = min(len(samples), len(reference))
    settings = {"fid": True, "kid": True, "prc": True, "kid_subset_size": min(1000, fewest), "batch_size": batch_size, "verbose": False} | settings
    settings |= {"feature_extractor": "inception-v3-compat", "feature_extractor_weights_path": weights, "cuda": torch.cuda.is_available()}
    return torch_fidelity.calculate_metrics(input1=samples, input2=reference, save_cpu_ram=True, **settings)


def check_weights(path: str) -> None:
    """UserError if torch-fidelity can't use this file, which it would load whatever it holds."""
    if not path:
        raise UserError(f"--features inception: needs --weights FILE, Inception's weights as torch-fidelity has them: {WEIGHTS}")
    try:
        files.open_file(path).close()
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        usable = isinstance(tensors, dict) and "Mixed_7c.branch_pool.conv.weight" in tensors
    except OSError:
        raise
    except Exception:  # noqa: BLE001 (torch and pickle raise nearly anything at a damaged file)
        usable = False
    if not usable:
        raise UserError(f"--weights {path}: holds no weights of Inception as torch-fidelity has them, in {WEIGHTS}")


def judge_by_inception(args: argparse.Namespace, flags: dict[str, Any]) -> None:
    check_weights(args.weights)
    reference, count = Pictures(open_data(args.data_file)), 50000 if args.num_samples is None else args.num_samples
    given = {path: Pictures(open_data(path)) for path in args.samples or []}
    if min(map(len, [reference, *given.values()])) <= NEIGHBOUR or count <= NEIGHBOUR:
        raise UserError(f"precision and recall go by the neighbour number {NEIGHBOUR}, so each set must have more images than that")

    def drawn() -> Iterator[tuple[str, Pictures]]:
        for path in (path for folder in args.runs or [] for path in checkpoints(folder).values()):
            file = read_model(path)
            yield path, Pictures(Data(path, generate.BACKENDS[args.backend](file, make_config(flags, None, file), count).numpy()))

    print(f"{f'against {args.data_file} ({len(reference)})':40s}      FID   KID x 1000        precision   recall", flush=True)
    with tempfile.TemporaryDirectory() as folder:  # where the reference's features wait for the next set
        for path, pictures in itertools.chain(given.items(), drawn()):
            cache = {"cache_root": folder, "input2_cache_name": "reference"}
            f = inception_figures(pictures, reference, args.weights, args.batch_size, **cache)
            kid, spread = (1000 * f[f"kernel_inception_distance_{name}"] for name in ("mean", "std"))
            distance = f"{f['frechet_inception_distance']:8.3f}   {kid:7.3f} +- {spread:6.3f}"
            print(f"{f'{path} ({len(pictures)})':40s} {distance}   {f['precision']:9.3f}   {f['recall']:6.3f}", flush=True)


# ----------------------------------------------------------------------------------------------------------------------
# command line


def open_source(path: str) -> Data:
    data = open_data(path)
    if data.labels is None or data.images.dtype != np.uint8 or data.images.shape[1:] != (1, 32, 32) or len(data.images) < 2 * HELD_OUT:
        raise UserError(f"--data_file {path}: must be labelled uint8 images of 1x32x32, at least {2 * HELD_OUT} of them, as data/fashion32.bin")
    return data


def write_split(data: Data, folder: str) -> list[str]:
    """Writes train.bin and held_out.bin, and returns their paths."""
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    seen = len(data.images) - HELD_OUT
    parts = {f"{folder}/train.bin": slice(0, seen), f"{folder}/held_out.bin": slice(seen, None)}
    for path in parts:
        files.check_output("--split", path, [data.path], files.is_data, only="data file")
    for path, part in parts.items():
        write_data(path, data.images[part], data.labels[part], data.num_classes)
    return list(parts)


def read_samples(path: str, data: Data) -> torch.Tensor:
    images = open_data(path).images
    if images.shape[1:] != data.images.shape[1:] or len(images) < 2 * FEATURES:
        raise UserError(f"--samples {path}: holds {len(images)} images of {images.shape[1:]}, not {2 * FEATURES} or more of {data.images.shape[1:]}")
    if images.dtype == np.uint8:
        return to_floats(images)
    floats = torch.from_numpy(np.array(images))
    if not torch.isfinite(floats).all():
        raise UserError(f"--samples {path}: holds values that are not finite; the model that drew them is broken")
    return floats


def check_trained_on(file: ModelFile, train_crc: int) -> None:
    """UserError if a model was not trained on train.bin, whose header has this checksum."""
    if file.state.data_crc != train_crc:
        raise UserError(f"{file.path}: was trained on {file.config.data_file}, not on the train.bin of --split; what a model has seen can't judge it")


def draw_samples(path: str, count: int, flags: dict[str, Any], backend: str) -> torch.Tensor:
    file = read_model(path)
    return generate.BACKENDS[backend](file, make_config(flags, None, file), count)


def plot(runs: dict[str, dict[int, Figures]], floor: Figures, path: str) -> None:
    from matplotlib.figure import Figure

    titles = ["Fréchet distance to held-out images", "precision", "recall"]
    steps = sorted({step for found in runs.values() for step in found})
    for axes, title, i in zip((figure := Figure(figsize=(12, 3.6), layout="constrained")).subplots(1, 3), titles, range(3)):
        for name, found in runs.items():
            y, spread = (np.array([getattr(f, kind)[i] for f in found.values()]) for kind in ("values", "spreads"))
            axes.errorbar(list(found), y, 2 * spread, label=name, capsize=3, marker="o", markersize=3, linewidth=1)
        axes.axhline(floor.values[i], color="grey", linestyle="--", linewidth=1, label="training images")
        axes.set(title=title, xlabel="step", xscale="log", ylim=(0, 1 if i else None))
        axes.set_xticks(steps, map(str, steps))
        axes.minorticks_off()
    axes.legend()
    figure.savefig(buffer := io.BytesIO(), format="png", dpi=80, metadata={"Software": files.SOFTWARE})
    files.atomic_write(path, [buffer.getbuffer()])


def compare_last(runs: dict[str, dict[int, Figures]]) -> None:
    """Every pair of runs at the last step that both have."""
    for (a, found_a), (b, found_b) in itertools.combinations(runs.items(), 2):
        common = found_a.keys() & found_b.keys()
        if common:
            x, y = found_a[max(common)], found_b[max(common)]
            parts = [
                f"{name} {vx - vy:+.3f} (+- {np.hypot(sx, sy):.3f})"
                for name, vx, vy, sx, sy in zip(("Frechet", "precision", "recall"), x.values, y.values, x.spreads, y.spreads)
            ]
            print(f"step {max(common)}, {a} less {b}: {', '.join(parts)}")


def run(argv: list[str]) -> None:
    args = parse_arguments(argv)
    for folder in args.runs or []:
        if not checkpoints(folder):
            raise UserError(f"--runs {folder}: holds no checkpoint; name the --output_dir of a run")
    if args.plot:
        files.check_output("--plot", args.plot, [args.data_file, args.weights, *(args.samples or [])], files.is_picture)
    flags = {"sampler": "ddim", "eta": 1.0, "timestep_respacing": args.steps, "seed": args.seed, "batch_size": args.batch_size}
    if args.features == "inception" and not args.split:
        if args.plot:
            raise UserError(f"--plot {args.plot}: draws the classifier's figures; leave it out with --features inception")
        return judge_by_inception(args, flags)
    if args.plot and not args.runs:
        raise UserError(f"--plot {args.plot}: draws how the figures of --runs change over training; name runs, or leave it out")
    args.num_samples = 2000 if args.num_samples is None else args.num_samples
    if args.num_samples < 2 * FEATURES:
        raise UserError(f"--num_samples {args.num_samples}: must be at least {2 * FEATURES}, twice the number of features")
    data = open_source(args.data_file)
    if args.split:
        return print(*write_split(data, args.split), sep="\n")
    samples = {path: read_samples(path, data) for path in args.samples or []}
    with tempfile.TemporaryDirectory() as folder:
        train_crc = open_data(write_split(data, folder)[0]).crc
    for path in (path for folder in args.runs or [] for path in checkpoints(folder).values()):
        file = read_model(path)
        check_trained_on(file, train_crc)
        make_config(flags, None, file)  # refuses flags that can't be

    print("training the classifier that judges; this takes minutes on a CPU", file=sys.stderr, flush=True)
    judge, accuracy = judge_of(data)
    count = min([len(s) for s in samples.values()], default=args.num_samples)
    floor = measure(judge.training[:count], judge.held_out)
    print(f"classifier: {100 * accuracy:.1f} % of the {HELD_OUT} held-out images right")
    print(f"{'':40s}  Frechet distance   precision         recall")
    print(f"{f'training images ({min(count, len(judge.training))})':40s} {floor}", flush=True)
    for path, images in samples.items():
        print(f"{f'{path} ({len(images)})':40s} {judge.figures(images)}", flush=True)
    runs: dict[str, dict[int, Figures]] = {}
    for folder in args.runs or []:
        runs[folder] = {}
        for step, path in checkpoints(folder).items():
            images = draw_samples(path, args.num_samples, flags, args.backend)
            runs[folder][step] = judge.figures(images)
            print(f"{path:40s} {runs[folder][step]}", flush=True)
    compare_last(runs)
    if args.plot and runs:
        plot(runs, floor, args.plot)
        print(f"{args.plot}: the same over training")


if __name__ == "__main__":
    sys.exit(run_program("quality", run))
