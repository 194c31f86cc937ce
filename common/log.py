"""A run of train_unet.py: what it starts from, and log.csv, its lines on the screen and loss.png."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import shlex
import time
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common import files
from common.config import check_ema_rate, check_hearing, make_config
from common.data_files import Data, find_data, open_data, with_pictures
from common.flags import SHARED, Config, preset_flags
from common.formats import read_model
from common.model import initial_weights, to_state_dict
from common.model_files import ModelFile
from common.program import UserError
from common.random_numbers import data_order, held_out_images
from common.samples import MOST_COMPARED, is_compared

LOG_COLUMNS = "step,loss,lr,grad_norm,ms,loss_q0,loss_q1,loss_q2,loss_q3,val_loss,seconds,copies"
VAL_IMAGES = 512  # of a validation loss: as many are enough, and stay in memory
MANY_EPOCHS, FEW_EPOCHS = 200, 120  # from the first on a line says that samples will be copies, and how many steps make the second


@dataclass
class StepResult:
    step: int  # finished steps, so the first is 1
    loss: float
    lr: float
    grad_norm: float  # before clipping
    loss_quarters: list[float | None]  # mean loss of the samples in each quarter of the noise levels
    objection: str  # why the step was skipped, or ""


def progress_line(config: Config, r: StepResult, skipped: int, seconds: float, mean: float, val_loss: float | None) -> str:
    """What the screen shows of a step. seconds: a step's; mean: of recent losses."""
    left = int((config.max_steps - r.step) * seconds)
    line = (
        f"step {r.step}/{config.max_steps} | loss {r.loss:.4f} (mean {mean:.4f}) | lr {r.lr:.2e} | "
        f"norm {r.grad_norm:.3f} | {1000 * seconds:.1f} ms | {config.batch_size / seconds:.1f} images/s | "
        f"ETA {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
    )
    return line + (f" | val {val_loss:.4f}" if val_loss is not None else "") + f" | skipped {skipped}" * bool(skipped)


class Log:
    """log.csv in a folder without one, which is made if need be: a row per step, as ./train_unet writes it."""

    def __init__(self, folder: str):
        self.path, self.began = f"{folder}/log.csv", time.perf_counter()
        try:
            os.makedirs(folder, exist_ok=True)
            self.file = open(self.path, "xb", buffering=0)  # x: if two runs begin in one folder, one of them ends here
        except OSError as e:
            raise UserError(f"--output_dir {folder}: can't be written to ({e.strerror}); choose another") from None
        self.write_line(LOG_COLUMNS)

    def write_line(self, line: str) -> None:
        rest = f"{line}\n".encode()
        try:
            while rest:
                rest = rest[self.file.write(rest) :]
        except OSError as e:
            raise UserError(f"{self.path}: can't be written ({e.strerror}), so the run is stopped") from None

    def write(self, r: StepResult, ms: float, val_loss: float | None) -> None:
        """Adds a row. ms: the step's time; the last column is the run's until now, in seconds."""
        fields = [r.loss, r.lr, r.grad_norm, ms, *r.loss_quarters, val_loss, time.perf_counter() - self.began]
        self.write_line(",".join([str(r.step), *("" if v is None else f"{v:.9g}" for v in fields), ""]))

    def write_copies(self, share: float) -> None:
        """Adds the share of copies in a grid to the last row, whose line break it writes over."""
        self.file.seek(-1, os.SEEK_END)
        self.write_line(f"{share:.9g}")

    def plot(self) -> None:
        """loss.png beside it. Light: every step's loss; dark: its mean; orange: validation."""
        from matplotlib.figure import Figure  # takes a second, and only this needs it

        table = np.genfromtxt(self.path, delimiter=",", names=True, ndmin=1, comments=None)
        axes = (figure := Figure(figsize=(9, 5), layout="constrained")).add_subplot()
        window = max(1, len(table) // 50)
        mean = np.convolve(table["loss"], np.ones(window) / window, "valid")
        axes.plot(table["step"], table["loss"], "lightblue", label="loss")
        axes.plot(table["step"][window - 1 :], mean, "darkblue", label=f"mean of {window} steps")
        validated = np.isfinite(table["val_loss"])
        if validated.any():
            axes.plot(table["step"][validated], table["val_loss"][validated], "orange", label="validation")
        axes.set(xlabel="step", ylabel="loss", yscale="log")
        axes.legend()
        figure.savefig(picture := io.BytesIO(), format="png", dpi=100)
        files.atomic_write(f"{os.path.dirname(self.path)}/loss.png", [picture.getvalue()])


# ======================================================================================================================
# from flags to a run


def check_new_folder(folder: str) -> None:
    """UserError if an output folder holds a run: ./train_unet alone goes on in one."""
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        if name == "log.csv" or re.fullmatch(r"(model|ema)_\d+\.bin", name):
            told = f"name a new folder (in that one ./train_unet --resume_checkpoint latest --output_dir {shlex.quote(folder)} goes on)"
            raise UserError(f"--output_dir {folder}: already holds a run's {name}; {told}")


def open_start(flags: dict[str, Any]) -> ModelFile | None:
    """The model file that a run with these flags starts from, or resumes."""
    path = flags.get("resume_checkpoint", "")
    if path and flags.get("init"):
        raise UserError("--init and --resume_checkpoint: a run starts from one of them; leave the other out")
    if path in ("latest", "auto"):
        told = "./train_unet does that, in the run's own folder; here name a checkpoint, model_STEP.bin, and a new --output_dir"
        raise UserError(f"--resume_checkpoint {path}: {told}")
    if not (path or flags.get("init")):
        return None
    start = read_model(path or flags["init"], flags)
    if path and (start.m is None or start.ema is None):
        raise UserError(f"{path}: holds weights only, no moments to resume from; --init starts a new run from it")
    if not start.is_finite():
        raise UserError(f"{start.path}: its weights, their average or moments are not finite; move it away and use an earlier checkpoint")
    return start


def prepare_run(flags: dict[str, Any]) -> tuple[Config, Data | None, ModelFile | None]:
    """From flags to what a run needs: its configuration, its data and what it starts from. Creates nothing."""
    flags, data = dict(flags), None
    resume = bool(flags.get("resume_checkpoint"))
    named = flags.keys() & {"data_file", "data_dir"}
    if len(named) == 2:
        raise UserError("--data_file and --data_dir: a run trains on one of them; leave the other out")
    for name in "data_dir", "data_file", "init":
        if flags.get(name) == "":
            raise UserError(f"--{name}: is empty; give a path, or leave the flag out")
    start = open_start(flags)
    if flags.get("sample"):
        config = make_config(flags, None, start, resume)
        read = [start.path if start else "", config.data_file, config.start_from, config.inpaint, config.mask, config.values, config.cond_file]
        files.check_output("--output", config.output, read, files.samples_like(config.output))
        return config, None, start
    if not flags.get("init_model_only"):
        check_new_folder(flags.get("output_dir", Config.output_dir))
    if resume and not named:
        path = find_data(start.config.data_file, start.path)
        flags["data_dir" if os.path.isdir(path) else "data_file"] = path
    names_pictures = "cond_file" in flags
    if resume and not names_pictures and start.config.cond_file:
        flags["cond_file"] = find_data(start.config.cond_file, start.path)
    if flags.get("data_dir"):
        # Whether there are classes, and what the pictures of a condition are, is not known yet.
        later = {"class_cond", "class_dropout", "guidance_scale", "classes", "cond_file", "val_cond_file", "cond_channels", "cond_dropout"}
        unlabelled = {name: value for name, value in flags.items() if name not in later} | {"class_cond": False}
        from common.pictures import folder_channels, open_pictures  # needs Pillow and tqdm, which who trains on a data file does without

        try:
            if not start and "in_channels" not in flags:  # no preset makes pictures grey
                unlabelled["in_channels"] = folder_channels(flags["data_dir"])
            made = {name: flags[name] for name in ("image_size", "in_channels") if name in flags}
            data = open_pictures(flags["data_dir"], dataclasses.replace(start.config, **made) if start else make_config(unlabelled))
        except files.DataError as e:
            raise files.DataError(f"--data_dir {flags['data_dir']}: {e}") from None
    else:
        path = flags.get("data_file") or (preset_flags(flags["preset"])["data_file"] if flags.get("preset") else SHARED["DEFAULT_DATA"])
        if os.path.exists(path) or not flags.get("init_model_only") or "data_file" in flags:
            data = open_data(path)
    if data:
        flags["data_file"] = data.path
        data = with_pictures(data, "cond_file", flags.get("cond_file", ""))
    config = make_config(flags, data, start, resume)
    check_ema_rate(config)
    if data and start and config.class_cond and (resume or start.knows_classes(data)):
        data = data.as_classes_of(start.path, start.class_names)
    if data:
        data.check(config)
    if not start:
        check_hearing(config, flags)
    # A folder of pictures had no checksum in older checkpoints.
    is_known = resume and not (os.path.isdir(data.path) and start.state.data_crc == 0)
    if is_known and not named and (len(data.images), data.crc) != (start.state.data_images, start.state.data_crc):
        flag = "--data_dir" if os.path.isdir(data.path) else "--data_file"
        raise UserError(f"{data.path}: is not the data that {start.path} was trained on; name it, or this one, with {flag}")
    if resume and not names_pictures and data.pictures and data.pictures.crc != start.state.cond_crc:
        told = f"does not hold the pictures that {start.path} was trained with"
        raise UserError(f"{data.pictures.path}: {told}; name them, or this file, with --cond_file")
    return config, data, start


def weights_of_init(start: ModelFile, config: Config, data: Data, device: torch.device) -> tuple[ModelFile, str]:
    """The weights with which a run begins that starts from a model file (--init), with the names of classes that it knows, and what there is to tell. What the
    file has in another shape begins as in a new run: the weights of the first layer and all of the last one, if the images have other channels. So
    does the row of each class that the file does not know."""
    drawn_on = device if device.type == "cuda" else "cpu"
    was, flat, rows = start.config, initial_weights(config, drawn_on), start.class_rows(data, config.num_classes)
    new_classes = rows.count(-1)
    if config.null_class:
        rows.append(was.num_classes)  # the row of "no class" is the last one in both
    there = to_state_dict(was, start.weights_to_use(config.use_ema))
    for name, tensor in to_state_dict(config, flat).items():
        if name == "label_emb.weight":
            for row, k in zip(tensor, rows):
                row.copy_(there[name][k] if k >= 0 else row)
        elif tensor.shape == there[name].shape:
            tensor.copy_(there[name])
    fresh = ["the first and the last layer"] * (was.in_channels != config.in_channels)
    if config.class_cond and new_classes:
        fresh.append(f"{new_classes} of {config.num_classes} classes")
    names = start.class_names if start.knows_classes(data) else ()
    told = f"started from {start.path}: all weights are taken"
    told += f" but those of {' and '.join(fresh)}, which begin anew" if fresh else ""
    return ModelFile(config, flat, path=start.path, class_names=names), told


def open_validation_data(config: Config, known: Data | ModelFile) -> Data | None:
    """--val_data_file, with --val_cond_file. known: what has the names of the model's classes, by which those of the images are found."""
    if not config.val_data_file:
        return None
    data = with_pictures(open_data(config.val_data_file), "val_cond_file", config.val_cond_file)
    data = data.as_classes_of(known.path, known.class_names) if config.class_cond else data
    data.check(config)
    return data


def training_and_validation_data(config: Config, data: Data, known: Data | ModelFile) -> tuple[Data, Data | None]:
    """The images to train on, and those whose loss is logged. known: as in open_validation_data."""
    if not config.val_fraction:
        return data, open_validation_data(config, known)
    held_out, count = held_out_images(data.count, config.val_fraction), data.count
    if not 0 < len(held_out) < count:
        told = f"holds out {len(held_out)} of the {count} images of {data.path}; another fraction must hold out one at least, and leave one"
        raise UserError(f"--val_fraction {config.val_fraction:g}: {told}")
    return data.part_of(np.setdiff1d(np.arange(count), held_out)), data.part_of(held_out)


def validation_images(data: Data) -> Data:
    """Those whose loss is measured, in memory. Of many, some are drawn, the same in all runs: files are often sorted by class."""
    drawn = data.count > VAL_IMAGES
    index = data_order(0, 0, VAL_IMAGES, data.count) if drawn else np.arange(data.count)
    pictures = Data(data.pictures.path, data.pictures.read(index), crc=data.pictures.crc) if data.pictures else None
    labels, values = (None if array is None else array[index] for array in (data.labels, data.values))
    return Data(data.path, data.read(index), labels, crc=data.crc, values=values, pictures=pictures)


def validation_crc(data: Data) -> int:
    """Which images, with which pictures, a checkpoint's validation loss is of."""
    crc = zlib.crc32(b"drawn", data.crc) if data.count > VAL_IMAGES else data.crc  # the first ones were taken once
    crc = zlib.crc32(data.pictures.crc.to_bytes(4, "little"), crc) if data.pictures else crc
    return crc if data.numbers is None else zlib.crc32(data.numbers.astype("<i4"), crc)


def announce(trainer: Any, data: Data, start: ModelFile | None) -> None:
    """Prints what is trained, on what, and where it goes on."""
    config, first_step = trainer.config, trainer.state.step
    print(f"model: {trainer.weights.numel() / 1e6:.2f} M parameters, {trainer.device}, {trainer.precision}{', compiled' * trainer.compiled}")
    if trainer.precision == "fp8":
        print("--precision fp8: PyTorch multiplies the rounded numbers in the usual precision, so this shows what FP8 changes, and is not faster")
    unverified = " (not verified: more than 4 GiB, and no checksums of them)" if data.file and data.image_crcs is None else ""
    held_out = f", {len(data.images) - data.count} others are held out" if data.numbers is not None else ""
    print(f"data: {data.path}, {data.count} images{unverified}{held_out}; output: {config.output_dir}/", flush=True)
    if (epochs := config.max_steps * config.batch_size // data.count) > MANY_EPOCHS:
        few = max(1, FEW_EPOCHS * data.count // config.batch_size)
        print(f"each image is seen {epochs} times, so many samples will be copies; --max_steps {few} shows each {FEW_EPOCHS} times")
    if not config.class_cond and data.labels is None and preset_flags(config.preset).get("class_cond"):
        print("classes: none, because the data has no labels")
    if config.class_cond:
        print(f"classes: {config.num_classes}, --class_dropout {config.class_dropout:g}; grids: --guidance_scale {config.guidance_scale:g}")
    if data.pictures:
        print(f"condition: {data.pictures.path}, pictures of {config.cond_channels} channels")
    if config.in_channels not in (1, 3):
        print(f"grids show the first of {config.in_channels} channels, in grey")
    if config.sample_interval and not is_compared(data):
        print(f"copies are not counted in grids, because the images have more than {MOST_COMPARED >> 20} MiB; dev/benchmarks/judge.py counts them")
    if config.resume_checkpoint:
        print(f"resumed from {start.path}: step {first_step} of {config.max_steps}, seed {config.seed}")
        was, now = start.config.batch_size, config.batch_size
        if was != now and first_step < config.max_steps:
            order = f"the order of the data goes by batches, so that image {now * first_step} of it comes next, not {was * first_step}"
            print(f"--batch_size {now}: was {was} before; {order}")
