"""What models that are conditioned on pictures or numbers learn in a minute: four times the size, colours, filled holes, a knob that turns.

    python dev/benchmarks/conditions.py                                    trains five models on data/emoji64.bin, and prints how far their pictures are from the truth
    python dev/benchmarks/conditions.py --only lowres,numbers --max_steps 2000 --output_dir out_short

One image in 20 is held out, and so are the training images that resemble one of these: what a model makes of the held-out ones' conditions, it has not
seen. Errors are the root of the mean square over pixels and colours, in 255ths.

- lowres: the held-out images made four times smaller, and enlarged by the model (beside it: by bilinear interpolation). Small again: how far the results,
  made four times smaller, are from the condition.
- gray: their brightness, coloured by the model.
- mask: about a quarter of each, in rectangles, is left out and filled by the model; by RePaint (--inpaint) with a model without a condition, by its own
  sampler and by ddpm; and with white. The error is that of the pixels that were left out.
- numbers: a model of two numbers for each image, its brightness and its warmth; the same noise with five values of brightness.

The folder gets lowres.png, gray.png, mask.png (a held-out image in each row: condition, results, truth) and numbers.png (the same noise in each row).
"""

from __future__ import annotations

import argparse
import pathlib
import shlex
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from command_line import Parser

from common import program
from common.program import UserError, run_program

TASKS = ["lowres", "gray", "mask", "numbers"]
TWENTIETH = 20  # one image in so many is held out
RESEMBLES = 34  # so far from a held-out image, in 255ths, a training image must at least be
FACTOR = 4  # how much smaller lowres makes an image
DDPM_STEPS = 250  # of RePaint with ddpm
KNOB = [-1.0, -0.5, 0.0, 0.5, 1.0]  # brightness of the columns of numbers.png
ROWS = 6  # of a picture


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--only", default=",".join(TASKS), help=f"some of {', '.join(TASKS)}, with commas (default: all)")
    parser.add_argument("--data_file", default=str(ROOT / "data/emoji64.bin"), help="uint8 colour images (default: data/emoji64.bin)")
    parser.add_argument("--program", default=str(ROOT / "train_unet"), help="what trains and samples (default: ./train_unet)")
    parser.add_argument("--recipe", default="--preset quick64", metavar="FLAGS", help='of ./train_unet, for all models (default: "--preset quick64")')
    parser.add_argument("--max_steps", type=int, default=10000, help="of each model (default: 10000)")
    parser.add_argument("--output_dir", default="out_conditions", help="default: out_conditions")
    return parser.parse_args(argv)


if __name__ == "__main__":  # before PyTorch
    program.begin("conditions", parse_arguments, program.SAMPLING)

import numpy as np
import torch
import torch.nn.functional as F
from speedrun import checked

from common import files
from common.data_files import open_data, write_data
from common.formats import read_model
from common.model_files import checkpoints
from common.samples import save_png


def nearest_distance(images: np.ndarray, others: np.ndarray) -> np.ndarray:
    """(N) how far each image is from the nearest of the others, as a root of a mean square."""
    a, b = (x.reshape(len(x), -1).astype(np.float64) for x in (images, others))
    squares = (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T
    return np.sqrt(squares.min(1).clip(0) / a.shape[1])


def smaller(images: np.ndarray) -> np.ndarray:
    """The mean of each square of FACTOR x FACTOR pixels."""
    return F.avg_pool2d(torch.from_numpy(images), FACTOR).numpy()


def error(images: np.ndarray, truth: np.ndarray, where: np.ndarray | None = None) -> float:
    """In 255ths; where (N, 1, H, W): of these pixels alone."""
    squares = (127.5 * (images.astype(np.float64) - truth)) ** 2
    if where is None:
        return float(np.sqrt(squares.mean()))
    return float(np.sqrt((squares * where).sum() / (where.sum() * images.shape[1])))


def brightness_and_warmth(images: np.ndarray) -> np.ndarray:
    """(N, 2) of uint8 images: the mean of all colours, and red minus blue; each scaled so that 90 % of the images lie between -1 and 1."""
    means = images.astype(np.float64).mean((2, 3))
    numbers = np.stack([means.mean(1), means[:, 0] - means[:, 2]], 1)
    low, high = np.quantile(numbers, [0.05, 0.95], axis=0)
    return ((2 * numbers - low - high) / np.maximum(high - low, 1e-9)).astype(np.float32)


def holes(count: int, height: int, width: int) -> np.ndarray:
    """(N, 1, H, W) 1 where a pixel is left out: a rectangle of half the height and half the width, somewhere."""
    rng = np.random.default_rng(0)
    found = np.zeros((count, 1, height, width), np.uint8)
    for mask in found:
        top, left = rng.integers(0, height - height // 2 + 1), rng.integers(0, width - width // 2 + 1)
        mask[0, top : top + height // 2, left : left + width // 2] = 1
    return found


def picture(columns: list[np.ndarray]) -> np.ndarray:
    """Pixels (H, W, 3) of a picture whose columns are images (N, C, H, W) in [-1, 1]: ROWS of them."""
    rows = [np.concatenate([column[row] for column in columns], 2) for row in range(min(ROWS, *map(len, columns)))]
    whole = np.concatenate(rows, 1)
    return ((whole + 1) * 127.5 + 0.5).clip(0, 255).astype(np.uint8).transpose(1, 2, 0)


class Workshop:
    """The split data, and the program that trains and samples."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.folder = args, pathlib.Path(args.output_dir)
        data = open_data(args.data_file)
        if data.images.dtype != np.uint8 or data.images.shape[1] != 3 or len(data.images) < 2 * TWENTIETH:
            raise UserError(f"--data_file {args.data_file}: must hold at least {2 * TWENTIETH} uint8 images of three colours")
        self.folder.mkdir(parents=True, exist_ok=True)
        images = np.array(data.images)
        held = np.arange(len(images)) % TWENTIETH == TWENTIETH - 1
        near = ~held
        near[near] = nearest_distance(images[near], images[held]) < RESEMBLES
        kept = ~held & ~near
        self.train_file, self.numbers_file, self.held_file, self.mask_file = (
            str(self.folder / name) for name in ("train.bin", "numbers.bin", "held_out.bin", "masks.bin")
        )
        numbers = brightness_and_warmth(images)[kept]
        for path in self.train_file, self.numbers_file, self.held_file, self.mask_file:
            files.check_output("--output_dir", path, [args.data_file], files.is_data, only="data file")
        for name in "samples.bin", "lowres.png", "gray.png", "mask.png", "numbers.png":
            files.check_output("--output_dir", str(self.folder / name), [args.data_file], files.samples_like(name))
        write_data(self.train_file, images[kept])
        write_data(self.numbers_file, images[kept], values=numbers, value_names=["brightness", "warmth"])
        write_data(self.held_file, images[held])
        self.truth = images[held].astype(np.float32) / 127.5 - 1
        self.left_out = holes(len(self.truth), *self.truth.shape[2:])
        write_data(self.mask_file, 255 * self.left_out)
        print(f"{kept.sum()} images to train on, {held.sum()} held out, {near.sum()} left out that resemble one of these", flush=True)

    def call(self, *words: object) -> None:
        checked([self.args.program, *map(str, words)])

    def train(self, name: str, *flags: object) -> str:
        """Trains a model, or finds the one that an earlier call has trained. Its last checkpoint."""
        target = self.folder / name
        steps = self.args.max_steps
        common = [*shlex.split(self.args.recipe), "--max_steps", steps, "--sample_interval", 0, "--save_interval", steps, "--output_dir", target]
        if steps not in checkpoints(str(target)):
            self.call("--resume_checkpoint", "auto", *common, *flags)
        found = checkpoints(str(target))
        if steps not in found:
            raise UserError(f"{target}: holds a run of {max(found, default=0)} steps, not {steps}; choose another --output_dir")
        model, trained_on = found[steps], self.numbers_file if name == "numbers" else self.train_file
        if read_model(model).state.data_crc != open_data(trained_on).crc:
            raise UserError(f"{model}: was trained on other data; choose another --output_dir")
        return model

    def draw(self, model: str, count: int, *flags: object) -> np.ndarray:
        """Samples (count, C, H, W) in [-1, 1]."""
        target = self.folder / "samples.bin"
        target.unlink(missing_ok=True)
        self.call("--sample", count, "--init", model, "--output", target, *flags)
        return np.array(open_data(str(target)).images)

    def lowres(self) -> None:
        model = self.train("lowres", "--data_file", self.train_file, "--cond", f"lowres:{FACTOR}")
        found = self.draw(model, len(self.truth), "--cond_file", self.held_file)
        small = smaller(self.truth)
        enlarged = F.interpolate(torch.from_numpy(small), scale_factor=FACTOR, mode="bilinear").numpy()
        print(f"lowres: enlarged by the model {error(found, self.truth):.1f}, bilinearly {error(enlarged, self.truth):.1f}", flush=True)
        print(f"lowres: small again, from the condition {error(smaller(found), small):.1f}", flush=True)
        save_png(picture([enlarged, found, self.truth]), str(self.folder / "lowres.png"))

    def gray(self) -> None:
        model = self.train("gray", "--data_file", self.train_file, "--cond", "gray")
        found = self.draw(model, len(self.truth), "--cond_file", self.held_file)
        grey = np.tensordot(np.float32([0.299, 0.587, 0.114]), self.truth, (0, 1))[:, None].repeat(3, 1)
        print(f"gray: coloured by the model {error(found, self.truth):.1f}, without colours {error(grey, self.truth):.1f}", flush=True)
        save_png(picture([grey, found, self.truth]), str(self.folder / "gray.png"))

    def mask(self) -> None:
        count, left_out = len(self.truth), self.left_out
        model = self.train("mask", "--data_file", self.train_file, "--cond", "mask")
        found = self.draw(model, count, "--cond_file", self.held_file, "--mask", self.mask_file)
        plain = self.train("plain", "--data_file", self.train_file)
        known = ["--inpaint", self.held_file, "--mask", self.mask_file]
        repainted = self.draw(plain, count, *known)
        by_ddpm = self.draw(plain, count, *known, "--sampler", "ddpm", "--timestep_respacing", DDPM_STEPS)
        white = np.where(left_out, np.float32(1), self.truth)
        rows = {"by --cond mask": found, "by RePaint": repainted, "by RePaint with ddpm": by_ddpm, "with white": white}
        print("mask: filled " + ", ".join(f"{name} {error(images, self.truth, left_out):.1f}" for name, images in rows.items()), flush=True)
        save_png(picture([white, found, repainted, self.truth]), str(self.folder / "mask.png"))

    def numbers(self) -> None:
        model = self.train("numbers", "--data_file", self.numbers_file, "--cond_dim", 2, "--class_dropout", 0.1)
        columns = [self.draw(model, ROWS, "--values", f"{value:g},0", "--guidance_scale", 2) for value in KNOB]
        means = ", ".join(f"{value:g}: {127.5 * (column.mean() + 1):.0f}" for value, column in zip(KNOB, columns))
        print(f"numbers: the mean of all pixels, by the number that was asked for, {means}", flush=True)
        save_png(picture(columns), str(self.folder / "numbers.png"))


def run(argv: list[str]) -> None:
    args = parse_arguments(argv)
    tasks = args.only.split(",")
    for task in tasks:
        if task not in TASKS:
            raise UserError(f"--only {task}: must be some of {', '.join(TASKS)}, with commas")
    if args.max_steps < 1:
        raise UserError(f"--max_steps {args.max_steps}: must be at least 1")
    if pathlib.Path(args.output_dir).exists() and not pathlib.Path(args.output_dir).is_dir():
        raise UserError(f"--output_dir {args.output_dir}: is a file; name a folder")
    try:
        shlex.split(args.recipe)
    except ValueError as error:
        raise UserError(f"--recipe {args.recipe}: can't be read ({error})") from None
    workshop = Workshop(args)
    for task in tasks:
        getattr(workshop, task)()


if __name__ == "__main__":
    sys.exit(run_program("conditions", run))
