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

import dataclasses
import io
import itertools
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

import generate
from common import files
from common.config import make_config
from common.data_files import Data, open_data, write_data
from common.formats import read_model
from common.model_files import ModelFile, checkpoints
from common.samples import to_pixels

FEATURES = 64
HELD_OUT = 2000
NEIGHBOUR = 3
BOOTSTRAPS = 200


# ----------------------------------------------------------------------------------------------------------------------
# the figures, of features (N, FEATURES), float64


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


@dataclasses.dataclass
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


def build_classifier(channels: int, height: int, width: int, classes: int) -> nn.Sequential:
    """Convolutions that halve the sides until 4 pixels are left, then FEATURES numbers, then the classes."""
    model = nn.Sequential()
    while min(height, width) > 4:  # of 32x32: 16x16, 8x8, 4x4 pixels
        wider = 32 if len(model) == 0 else 64
        model.extend([nn.Conv2d(channels, wider, 3, stride=2, padding=1), nn.BatchNorm2d(wider), nn.ReLU()])
        channels, height, width = wider, (height + 1) // 2, (width + 1) // 2
    inputs = channels * height * width
    return model.extend([nn.Flatten(), nn.Dropout(0.3), nn.Linear(inputs, FEATURES), nn.ReLU(), nn.Linear(FEATURES, classes)])


def train_classifier(images: torch.Tensor, labels: torch.Tensor | None, epochs: int) -> nn.Sequential:
    """A classifier of images (N, C, H, W). The same images give the same one: initial weights, order and mirroring come from seed 0.

    Without labels every image is a class of its own, which is known again by random parts of it (Dosovitskiy et al. 2014, "Exemplar CNN")."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        classes = len(images) if labels is None else int(labels.max()) + 1
        model = build_classifier(*images.shape[1:], classes)
        model.to(images.device)
        steps = epochs * (len(images) // 64)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps)
        for _ in range(epochs):
            for index in torch.randperm(len(images)).split(64)[: len(images) // 64]:
                if labels is None:
                    x, target = crop(images[index]), index.to(images.device)
                else:
                    mirror = torch.rand(len(index), 1, 1, 1) < 0.5
                    x, target = torch.where(mirror.to(images.device), images[index].flip(3), images[index]), labels[index]
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), target).backward()
                optimizer.step()
                schedule.step()
    return model.eval()


@dataclasses.dataclass
class Judge:
    """The classifier and what is compared with."""

    classifier: nn.Sequential
    accuracy: float  # on the held-out images
    scale: torch.Tensor  # (FEATURES) standard deviations over the training images
    training: torch.Tensor  # features
    held_out: torch.Tensor

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """(N, FEATURES), float64, of images as pictures hold them: with 256 levels."""
        return features(self.classifier, to_floats(((images + 1) * 127.5).round().clamp(0, 255).numpy())) / self.scale

    def figures(self, images: torch.Tensor) -> Figures:
        return measure(self.features(images), self.held_out)


@torch.no_grad()
def features(classifier: nn.Sequential, images: torch.Tensor) -> torch.Tensor:
    """(N, FEATURES), float64, on the CPU."""
    device = next(classifier.parameters()).device
    return torch.cat([classifier[:-1](part.to(device)).cpu() for part in images.split(1000)]).double()


def make_judge(data: Data, epochs: int = 10) -> Judge:
    images, labels = to_floats(np.array(data.images)), torch.from_numpy(np.array(data.labels, np.int64))
    seen = len(images) - HELD_OUT
    classifier = train_classifier(images[:seen], labels[:seen], epochs)
    with torch.no_grad():
        accuracy = (classifier(images[seen:]).argmax(1) == labels[seen:]).double().mean().item()
    training = features(classifier, images[:seen])
    scale = training.std(0)
    # A unit that hardly any training image wakes says nothing, and divided by its tiny deviation one held-out image would outweigh all others.
    scale[scale <= 0.01 * scale.median()] = torch.inf
    return Judge(classifier, accuracy, scale, training / scale, features(classifier, images[seen:]) / scale)


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
    judge = make_judge(data)
    count = min([len(s) for s in samples.values()], default=args.num_samples)
    floor = measure(judge.training[:count], judge.held_out)
    print(f"classifier: {100 * judge.accuracy:.1f} % of the {HELD_OUT} held-out images right")
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
