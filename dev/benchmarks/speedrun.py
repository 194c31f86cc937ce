"""How many seconds of training until the pictures are good? Quality against seconds, of ./train_unet with any flags.

    make speedrun                                                                     what ./train_unet alone does, and what it did before, on both sets of data/
    python dev/benchmarks/speedrun.py --data_file data/emoji64.bin --recipes "" "--objective edm --sampler heun" --seeds 0,1,2
    python dev/benchmarks/speedrun.py --rivals lucidrains,diffusers,guided,edm        and beside it what others' programs do in the same seconds
    python dev/benchmarks/speedrun.py --recipes --rivals guided --rival_seconds 60 --judge F.pt --earlier first.json      one table of two calls

Every fifth image of the data is held out, or where the data have a test set, that (--held_out F.bin); everyone trains on the others. At --moments moments
of a run (its end, half of it, a quarter, and so on), samples are drawn (--samples, or as many as there are training images, at most 5,000) and compared with
the held-out images, which neither the models nor the judge have seen, and beside that with the training images: a model that copies these is closer to them.

- Distance: the Frechet distance of common/judge.py's features. They come from a classifier that this program trains on the training images
  with fixed seeds, by their labels, or without labels with each image as a class of its own. Everyone in a table is judged by the same features.
- Seconds: of training alone, by the program's own clock. Start-up, compilation, checkpoints and sampling are left out.
  A recipe is flags of ./train_unet, but for those of files, seeds and intervals, which this program gives.
- Rivals: dev/benchmarks/speedrun_rivals.py says what they are. They train for --rival_seconds, by default as long as our longest run.
- Plain: the share of samples that are a form of one colour; grain: of those that are noisy everywhere; copies: of those that a training image is as good
  as equal to. See plain_form, has_grain and is_copy.
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

FIFTH = 5  # every fifth image is held out
MOST_SAMPLES = 5000


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--data_file", default=str(ROOT / "data/emoji64.bin"), help="uint8 images (default: data/emoji64.bin)")
    parser.add_argument("--held_out", metavar="F.bin", default="", help="images to compare with (default: every fifth of the data)")
    told = 'of ./train_unet, such as "--objective edm" (default: one recipe without flags; --recipes alone: none of ours)'
    parser.add_argument("--recipes", nargs="*", default=[""], metavar="FLAGS", help=told)
    parser.add_argument("--seeds", default="0", help="numbers with commas (default: 0)")
    parser.add_argument(
        "--moments", type=int, default=6, help="how often in a run quality is measured: at its end, half of it, a quarter, ... (default: 6)"
    )
    parser.add_argument("--samples", type=int, default=0, help=f"at each moment (default: as many as training images, at most {MOST_SAMPLES})")
    parser.add_argument("--program", default=str(ROOT / "train_unet"), help="what trains and samples (default: ./train_unet)")
    parser.add_argument("--rivals", default="", help="with commas, of lucidrains, diffusers, guided, edm (default: none)")
    parser.add_argument("--rival_seconds", type=float, default=0, help="how long each trains (default: as long as our longest run)")
    parser.add_argument("--rival_moments", type=int, default=0, help="how often its quality is measured (default: --moments)")
    parser.add_argument("--judge", metavar="F.pt", default="", help="the features: read from here, or written if there is no such file")
    parser.add_argument("--output", metavar="F.json", default="", help="every moment of every run")
    parser.add_argument("--earlier", nargs="+", metavar="F.json", default=[], help="--output of other calls with the same --judge, for the table")
    parser.add_argument("--plot", metavar="F.png", default="", help="distance against seconds")
    args = parser.parse_args(argv)
    args.rivals = [name for name in args.rivals.split(",") if name]
    args.rival_moments = args.rival_moments or args.moments
    return args


if __name__ == "__main__":  # before PyTorch
    program.begin("speedrun", parse_arguments, program.SAMPLING)

import csv
import dataclasses
import io
import json
import os
import re
import shlex
import statistics
import subprocess
import tempfile
import textwrap
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import speedrun_rivals
import torch

from common import files
from common import judge as judges
from common.config import make_config, pick_device
from common.data_files import open_data, write_data
from common.flags import FLAGS, SAMPLING_FLAGS, Config, format_value, parse_flags
from common.model_files import checkpoints
from common.samples import COPY, nearest_images


@dataclasses.dataclass
class Moment:
    """A run's pictures at one moment."""

    step: int
    seconds: float  # of training until then
    distance: float  # of the samples to the held-out images
    training: float  # to the training images
    plain: float  # share of the samples
    grain: float
    copies: float


# ----------------------------------------------------------------------------------------------------------------------
# what is wrong with a picture, without any features


def plain_form(images: torch.Tensor) -> torch.Tensor:
    """(N) 1.0 where an image (C, H, W) in [-1, 1] is a form of one colour on a background of one colour.

    Of its pixels that differ from the corner by more than 16 of 255, 95 % are within 16 of their median."""
    pixels = ((images + 1) * 127.5).flatten(2)
    inside = ((pixels - pixels[:, :, :1]).abs() > 16).any(1)
    found = []
    for image, form in zip(pixels, inside):
        colours = image[:, form]
        if colours.shape[1] == 0:
            found.append(1.0)
            continue
        near = ((colours - colours.median(1, keepdim=True).values).abs() <= 16).all(0)
        found.append(float(near.double().mean() >= 0.95))
    return torch.tensor(found)


def has_grain(images: torch.Tensor) -> torch.Tensor:
    """(N) 1.0 where the median of an image's absolute Laplacian is over 4 of 255: it is noisy nearly everywhere."""
    pixels = (images + 1) * 127.5
    middle = pixels[:, :, 1:-1, 1:-1]
    around = pixels[:, :, :-2, 1:-1] + pixels[:, :, 2:, 1:-1] + pixels[:, :, 1:-1, :-2] + pixels[:, :, 1:-1, 2:]
    return ((4 * middle - around).abs().flatten(1).median(1).values > 4).float()


def is_copy(images: torch.Tensor, training: torch.Tensor) -> torch.Tensor:
    """(N) 1.0 where one of the training images is within COPY of an image. Both in [-1, 1], of the same (C, H, W); the training images visit the images'
    device part by part. Every set has some that resemble others: of emoji64's held-out images 2 % are within 16 of a training image."""
    parts = (part.to(images.device) for part in training.split(4096))
    return (nearest_images(images, parts)[0] < COPY).float()


# ----------------------------------------------------------------------------------------------------------------------
# the judge


class Contest:
    """A data set, split, and the features that judge everyone's samples of it."""

    def __init__(self, data_file: str, folder: pathlib.Path, device: torch.device, judge_file: str = "", samples: int = 0, held_out: str = ""):
        data = open_data(data_file)
        if data.images.dtype != np.uint8 or len(data.images) < 2 * FIFTH * judges.FEATURES:
            raise UserError(f"--data_file {data_file}: must hold at least {2 * FIFTH * judges.FEATURES} uint8 images")
        images, labels = np.array(data.images), None if data.labels is None else np.array(data.labels)
        held = np.zeros(len(images), bool)
        if not held_out:
            held[FIFTH - 1 :: FIFTH] = True
        aside = np.array(open_data(held_out).images) if held_out else images[held]
        if aside.dtype != np.uint8 or aside.shape[1:] != images.shape[1:] or len(aside) < 2 * judges.FEATURES:
            shape = "x".join(map(str, images.shape[1:]))
            raise UserError(f"--held_out {held_out}: must hold at least {2 * judges.FEATURES} uint8 images of {shape}, as --data_file")
        self.train_file = str(folder / "train.bin")
        self.train_images = images[~held]
        self.train_labels = None if labels is None else labels[~held]
        write_data(self.train_file, self.train_images, self.train_labels, data.num_classes)
        training = judges.to_floats(self.train_images)
        classes = None if labels is None else torch.from_numpy(labels[~held].astype(np.int64)).to(device)
        self.features = judges.make_judge(training.to(device), classes, judges.to_floats(aside), judge_file)
        self.checksums = {"images": zlib.crc32(self.train_images.tobytes()), "held_out": zlib.crc32(aside.tobytes())}
        self.samples = samples or min(len(training), MOST_SAMPLES)
        self.device = device

    def rules(self) -> dict[str, Any]:
        """What two runs must have in common if their distances shall be compared."""
        return {**self.checksums, "judge": self.features.checksum(), "samples": self.samples}

    def judge(self, images: torch.Tensor, step: int, seconds: float) -> Moment:
        """Of samples (N, C, H, W), floats in [-1, 1], which are rounded to 256 levels as pictures hold them."""
        levels, found = judges.levels(images), self.features.features(images)
        distances = judges.frechet(found, self.features.held_out), judges.frechet(found, self.features.training)
        copies = is_copy(levels.to(self.device), judges.to_floats(self.train_images))
        faults = plain_form(levels), has_grain(levels), copies
        return Moment(step, seconds, *distances, *(fault.mean().item() for fault in faults))

    def floor(self) -> float:
        """The held-out images' distance from the training images: what a model that draws from the very same distribution might reach."""
        return judges.frechet(self.features.held_out, self.features.training)


# ----------------------------------------------------------------------------------------------------------------------
# ours


def parse_recipe(recipe: str, contest: Contest) -> Config:
    flags = parse_flags([*shlex.split(recipe), "--data_file", contest.train_file], FLAGS)
    return make_config(flags, open_data(contest.train_file))


def sampling_flags(config: Config) -> list[str]:
    words = []
    for name in SAMPLING_FLAGS:
        value = getattr(config, name)
        words.append(f"--{name}={format_value(name, value) if isinstance(value, tuple) else value}")
    return words


def checked(command: list[str]) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise UserError(f"{shlex.join(command)}: {done.stderr.strip()}")
    return done.stdout


def draw(program: str, checkpoint: str, count: int, flags: list[str], folder: pathlib.Path) -> torch.Tensor:
    """Samples (count, C, H, W) of a checkpoint. The noise is another one than the training's."""
    target = str(folder / "samples.bin")
    checked([program, "--sample", str(count), "--init", checkpoint, "--output", target, "--batch_size", "256", "--seed", "1000", *flags])
    return torch.from_numpy(open_data(target).images.copy())


def training_seconds(log: pathlib.Path) -> dict[int, float]:
    """By step, from a run's log.csv."""
    seconds, total = {}, 0.0
    with log.open() as rows:
        for row in csv.DictReader(rows):
            total += float(row["ms"]) / 1000
            seconds[int(row["step"])] = total
    return seconds


def run_ours(program: str, recipe: str, seed: int, moments: int, contest: Contest, folder: pathlib.Path) -> Iterator[Moment]:
    config = parse_recipe(recipe, contest)
    wanted = speedrun_rivals.halvings(config.max_steps, moments)
    every = wanted[0]
    target = folder / "run"
    command = [program, *shlex.split(recipe), "--data_file", contest.train_file, "--output_dir", str(target), "--seed", str(seed)]
    checked([*command, "--sample_interval", "0", "--save_interval", str(every), "--keep_checkpoints", "0"])
    seconds = training_seconds(target / "log.csv")
    saved = checkpoints(str(target))
    for moment in wanted:
        step = max((step for step in saved if step <= moment), default=min(saved))  # the checkpoint before it
        checkpoint = saved[step]
        images = draw(program, checkpoint, contest.samples, sampling_flags(config), folder)
        yield contest.judge(images, step, seconds[step])
        pathlib.Path(checkpoint).unlink()
    for file in target.iterdir():
        file.unlink()
    target.rmdir()


# ----------------------------------------------------------------------------------------------------------------------
# theirs


def run_rival(name: str, seed: int, seconds: float, moments: int, contest: Contest) -> Iterator[Moment]:
    for step, took, rival in speedrun_rivals.race(name, contest.train_file, seed, seconds, moments, contest.device):
        sets = [contest.judge(images, step, took) for images in rival.draw(contest.samples)]
        yield min(sets, key=lambda moment: moment.distance)


# ----------------------------------------------------------------------------------------------------------------------
# files of runs

Runs = dict[str, list[list[Moment]]]  # of each contestant, for each seed


def write_runs(path: str, data_file: str, contest: Contest, runs: Runs) -> None:
    kept = {name: [[dataclasses.asdict(m) for m in run] for run in found] for name, found in runs.items()}
    files.atomic_write(path, [json.dumps({"data": data_file, "rules": contest.rules(), "runs": kept}, indent=1).encode()])


def read_runs(paths: list[str], contest: Contest) -> Runs:
    """Of earlier calls, by the same rules."""
    runs: Runs = {}
    for path in paths:
        try:
            kept = json.loads(pathlib.Path(path).read_text())
            theirs = {name: [[Moment(**m) for m in run] for run in found] for name, found in kept["runs"].items()}
            rules = kept["rules"]
            if not all(found and all(found) for found in theirs.values()):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"--earlier {path}: was not written by --output of this program") from None
        if rules != contest.rules():
            wanted = "training images, held-out images, --judge and --samples"
            raise UserError(f"--earlier {path}: was judged otherwise; its {wanted} must be those of this call")
        for name, found in theirs.items():
            runs.setdefault(name, []).extend(found)
    return runs


# ----------------------------------------------------------------------------------------------------------------------
# tables and pictures


def seconds_to(run: list[Moment], distance: float) -> float:
    """When a run's distance came down to this one, between two moments in proportion; infinite: never."""
    before = None
    for moment in run:
        if moment.distance <= distance:
            if before is None:
                return moment.seconds
            part = (before.distance - distance) / (before.distance - moment.distance)
            return before.seconds + part * (moment.seconds - before.seconds)
        before = moment
    return float("inf")


def spread(values: list[float], digits: int) -> str:
    """The median, and the range if there are several."""
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def shown(name: str) -> str:
    """A contestant's name: of ours, the command."""
    return f"./train_unet {name}".strip() if not name or name.startswith("--") else name


def print_table(runs: Runs) -> None:
    """A line for each contestant at its end, and when it had come to where each of the others ended."""
    ends = {name: statistics.median(run[-1].distance for run in found) for name, found in runs.items()}
    print(f"{'':50s} {'seconds':>10s} {'distance':>26s} {'to training':>12s} {'plain':>7s} {'grain':>7s} {'copies':>7s}")
    for name, found in runs.items():
        last = [run[-1] for run in found]
        fields = ("seconds", "training", "plain", "grain", "copies")
        middle = {field: statistics.median(getattr(m, field) for m in last) for field in fields}
        distances = spread([m.distance for m in last], 2)
        figures = f"{middle['seconds']:10.1f} {distances:>26s} {middle['training']:12.2f} {middle['plain']:7.2f} {middle['grain']:7.2f} {middle['copies']:7.2f}"
        print(f"{shown(name)[:50]:50s} {figures}")
    for goal, distance in ends.items():
        times = {shown(name): spread([seconds_to(run, distance) for run in found], 1) for name, found in runs.items()}
        print(f"seconds to {distance:.2f}, where {shown(goal)} ended: " + "; ".join(f"{name} {time}" for name, time in times.items()))


def plot(runs: Runs, title: str, path: str) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axes = (figure := Figure(figsize=(7, 4.2 + 0.16 * len(runs)), layout="constrained")).subplots()
    for name, found in runs.items():
        count = min(map(len, found))
        columns = [[run[i] for run in found] for i in range(count)]
        seconds = [statistics.median(m.seconds for m in column) for column in columns]
        distances = [[m.distance for m in column] for column in columns]
        (line,) = axes.plot(seconds, [statistics.median(d) for d in distances], marker="o", markersize=5, label=textwrap.fill(shown(name), 100))
        axes.fill_between(seconds, [min(d) for d in distances], [max(d) for d in distances], alpha=0.2, color=line.get_color())
    axes.set(title=title, xlabel="seconds of training", ylabel="Fréchet distance to held-out images", xscale="log", yscale="log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())
    axes.grid(which="both", alpha=0.3)
    figure.legend(loc="outside lower left", fontsize="small", frameon=False)  # below: a name is a whole command
    kind = path.rpartition(".")[2]
    figure.savefig(buffer := io.BytesIO(), format=kind, dpi=110, metadata={"Software": files.SOFTWARE} if kind == "png" else None)
    files.atomic_write(path, [buffer.getbuffer()])


# ----------------------------------------------------------------------------------------------------------------------
# command line


def check_arguments(args: argparse.Namespace) -> None:
    written = {"--output": args.output, "--plot": args.plot, "--judge": args.judge}
    kinds = {"--output": lambda head: head.startswith(b'{\n "data"'), "--plot": files.is_picture, "--judge": lambda head: True}  # a judge is read
    for flag, path in written.items():
        if path:
            files.check_output(flag, path, [args.data_file, args.held_out, args.program, *args.earlier], kinds[flag])
    places = [os.path.realpath(path) for path in written.values() if path]
    if len({*places}) < len(places):
        raise UserError("--output, --plot and --judge: two of them name the same file")
    if not re.fullmatch(r"\d+(,\d+)*", args.seeds):
        raise UserError(f"--seeds {args.seeds}: must be numbers with commas, such as 0,1,2")
    for flag, value in (("--moments", args.moments), ("--rival_moments", args.rival_moments)):
        if value < 1:
            raise UserError(f"{flag} {value}: must be at least 1")
    if args.samples and args.samples < 2 * judges.FEATURES:
        raise UserError(f"--samples {args.samples}: must be at least {2 * judges.FEATURES}, twice the number of features")
    if args.rival_seconds < 0:
        raise UserError(f"--rival_seconds {args.rival_seconds:g}: must be above 0")
    if args.rivals and not args.recipes and not args.rival_seconds:
        raise UserError("--rivals: without --recipes it needs --rival_seconds, how long each trains")
    if not args.rivals and not args.recipes and not args.earlier:
        raise UserError("--recipes: names none, so name --rivals or --earlier")
    if args.plot and not args.plot.endswith((".png", ".pdf", ".svg")):
        raise UserError(f"--plot {args.plot}: must end in .png, .pdf or .svg")
    for recipe in args.recipes:  # before hours of training, and not when its turn comes
        try:
            parse_flags(shlex.split(recipe), FLAGS)
        except ValueError as error:
            raise UserError(f"--recipes {recipe}: can't be read ({error})") from None
    speedrun_rivals.check(args.rivals)


def run(argv: list[str]) -> None:
    args = parse_arguments(argv)
    check_arguments(args)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        contest = Contest(args.data_file, folder, pick_device("auto"), args.judge, args.samples, args.held_out)
        print(f"data: {len(contest.train_images)} images to train on; the held-out ones' distance from them is {contest.floor():.2f}", flush=True)
        runs = read_runs(args.earlier, contest)

        def keep(name: str, seed: int, moments: Iterator[Moment]) -> None:
            """Each moment is written as it comes: a call that is cut off keeps what it has."""
            runs.setdefault(name, []).append([])
            for moment in moments:
                runs[name][-1].append(moment)
                print(f"{shown(name)}, seed {seed}: {moment}", flush=True)
                if args.output:
                    write_runs(args.output, args.data_file, contest, runs)

        seeds = [int(seed) for seed in args.seeds.split(",")]
        for seed in seeds:
            for recipe in args.recipes:
                keep(recipe, seed, run_ours(args.program, recipe, seed, args.moments, contest, folder))
        seconds = args.rival_seconds or max((run[-1].seconds for recipe in args.recipes for run in runs[recipe]), default=0)
        for seed in seeds:
            for rival in args.rivals:
                keep(speedrun_rivals.RIVALS[rival].name, seed, run_rival(rival, seed, seconds, args.rival_moments, contest))
    print_table(runs)
    if args.plot:
        plot(runs, pathlib.Path(args.data_file).stem, args.plot)


if __name__ == "__main__":
    sys.exit(run_program("speedrun", run))
