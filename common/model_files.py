"""The files that the Python programs read and write: model files (.bin, .pt, .safetensors, unet.cu's),
data files, and what lies in the output folder of a run.

docs/FORMATS.md has the tables.
"""

from __future__ import annotations  # noqa: I001 (names side by side)

import contextlib
import csv
import dataclasses
import errno
import fcntl
import io
import json
import math
import os
import re
import shutil
import socket
import stat
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

import prepare_data
from common.config import (
    FLAGS, FOREIGN_PRESET, MOST_EMAS, OBJECTIVES_OWN, POWER_EMAS, WORDS, Config, UserError, default_preset, format_value, make_config, np, preset_flags,
    torch, validate,
)  # fmt: skip

HISTORY_LENGTH = 10  # losses of each t that a checkpoint keeps
SNAPSHOT_NAME = r"ema_(\d+)\.bin"


class ModelFileError(UserError):
    """A model file that can't be used."""


class DataFileError(UserError):
    """A data file that can't be used."""


# ======================================================================================================================
# data files


@dataclass
class Data:
    """Images (N, C, H, W), uint8 or float32 in [-1, 1], memory-mapped if they come from a file; then read() verifies what it takes from there."""

    path: str
    images: np.ndarray
    labels: np.ndarray | None = None
    num_classes: int = 0
    crc: int = 0  # of the file's header, which names its content
    file: Any = None  # prepare_data.DataFile

    def expect(self, index: np.ndarray) -> None:
        """These images will be read soon."""
        if self.file:
            self.file.expect(index)

    def read(self, index: np.ndarray) -> np.ndarray:
        """These images, or a DataFileError."""
        if not self.file:
            return self.images[index]
        try:
            return self.file.read(index)
        except prepare_data.DataError as e:
            raise DataFileError(str(e)) from None

    def batch(self, index: np.ndarray, config: Config, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor | None]:
        """x0 (B, C, H, W), float32 in [-1, 1], and labels (B) if the model wants them."""
        images, pixels = self.read(index), self.images.dtype == np.uint8
        images = images.astype(np.float32) / np.float32(127.5) - np.float32(1) if pixels else np.ascontiguousarray(images, np.float32)
        labels = torch.from_numpy(self.labels[index].astype(np.int64)).to(device) if config.class_cond else None
        return torch.from_numpy(images).to(device), labels

    def check(self, config: Config) -> None:
        """UserError if a model of this configuration can't be trained on it."""
        _, channels, height, width = self.images.shape
        if (channels, height, width) != (config.in_channels, *config.image_size):
            here = f"{config.in_channels}x{config.image_size[0]}x{config.image_size[1]}"
            raise UserError(f"{self.path}: its images are {channels}x{height}x{width}, the model's {here}; prepare them again")
        if config.class_cond and self.labels is None:
            raise UserError(f"--class_cond True: {self.path} has no labels; leave it out, or use data that has")
        if config.class_cond and self.num_classes > config.num_classes:
            raise UserError(f"--num_classes {config.num_classes}: {self.path} has {self.num_classes} classes")


def open_data(path: str) -> Data:
    """Maps a data file, ours or unet.cu's."""
    try:
        file = prepare_data.open_data_file(path)
    except prepare_data.DataError as e:
        raise DataFileError(f"{e}; prepare_data.py makes such files; make unpacks data/fashion32.bin and data/emoji64.bin") from None
    return Data(path, file.images, file.labels, file.num_classes, file.header_crc, file)


def read_images(config: Config, name: str, most: int) -> torch.Tensor | None:
    """The images (up to most, C, H, W) of --start_from, --inpaint or --mask, in [-1, 1]; None: the flag isn't given."""
    path = getattr(config, name)
    if not path:
        return None
    data, config = open_data(path), dataclasses.replace(config, class_cond=False, in_channels=1 if name == "mask" else config.in_channels)
    data.check(config)
    images = data.batch(np.arange(min(len(data.images), most)), config)[0]
    for i, image in enumerate(images):
        if not torch.isfinite(image).all():
            raise DataFileError(f"--{name} {path}: image {i} holds a value that is not finite; make the file again")
    return images


def open_folder(path: str, config: Config) -> Data:
    """Reads the images in a folder, cropped to the configuration's size; sub-folders are classes."""
    try:
        images, labels, names = prepare_data.load_folder(path, config.image_size, config.in_channels)
    except prepare_data.DataError as e:
        raise DataFileError(f"--data_dir {path}: {e}") from None
    return Data(path, images, labels, len(names) if labels is not None else 0)


def atomic_write(path: str, chunks: Iterable[Any]) -> None:
    """Writes a file that appears under its name whole or not at all."""
    try:
        with prepare_data.atomic_file(path) as file:
            file.writelines(chunks)
    except OSError as e:
        raise UserError(f"{path}: can't be written ({e.strerror}); choose a folder that exists and is yours") from None


def check_output(flag: str, path: str, inputs: Iterable[str], replaces: Callable[[np.ndarray], bool] | None = None) -> None:
    """prepare_data.check_output, for a UserError."""
    try:
        prepare_data.check_output(flag, path, (name for name in inputs if name), replaces)
    except prepare_data.DataError as e:
        raise UserError(str(e)) from None


def check_samples(config: Config, *inputs: str) -> None:
    """UserError if --output can't be written, or would replace more than older samples. inputs: what else is read."""
    read = [*inputs, config.data_file, config.start_from, config.inpaint, config.mask]
    check_output("--output", config.output, read, prepare_data.is_samples)


def is_model(start: np.ndarray) -> bool:
    """Whether a file that starts with these 256 numbers is a model file, ours."""
    return start[0] == MODEL_MAGIC


def check_model_output(flag: str, path: str, inputs: Iterable[str]) -> None:
    """UserError if a model file can't be written, or would replace more than one that was written so before: a run's, for one."""
    target = Path(path).resolve()
    if target.exists() and re.fullmatch(r"(model|ema)_\d+\.bin", target.name) and (target.parent / "log.csv").exists():
        raise UserError(f"{flag} {path}: belongs to the run in its folder; choose another name")
    check_output(flag, path, inputs, is_model)


def check_folder(flag: str, path: str, source: str) -> None:
    """Before it is made: UserError if a folder would replace what is read, or one that holds a run."""
    target = Path(path)
    if Path(source).resolve().is_relative_to(target.resolve()):
        raise UserError(f"{flag} {path}: would replace {source}, which is read; choose another name")
    if target.is_dir() and (checkpoints(path) or (target / "log.csv").exists()):
        raise UserError(f"{flag} {path}: holds a run; choose another name")


def check_conversion(source: str, target: str) -> None:
    """Before anything is read: UserError if --convert can't write its target, or would replace what somebody may miss."""
    if not target:
        raise UserError(f"--convert {source}: needs two files, as in --convert model.bin model.pt")
    if target.endswith("/"):
        return check_folder("--convert", target, source)
    reader_or_writer(target, bin_chunks, pt_chunks, safetensors_chunks)
    check_model_output("--convert", target, [source, *map(str, Path(source).parent.glob("ema_*.bin"))])


def write_folder(path: str, own: tuple[str, ...], make: Callable[[Path], None]) -> None:
    """make(a path beside it) makes a folder, which appears whole or not at all. own: the files and the folders/ that such folders have, the first being
    in all. One that is there is replaced if it is empty, or has that first file and nothing but its own."""
    target = Path(path)
    if os.path.lexists(target):
        check_replaceable(target, own)
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            new, old = Path(folder, "new" + target.suffix), Path(folder, "old")
            make(new)
            if target.exists():
                target.rename(old)
            try:
                new.rename(target)
            except OSError:
                if old.exists():
                    old.rename(target)
                raise
    except OSError as e:
        raise UserError(f"{path}: can't be written ({e.strerror}); choose a folder that exists and is yours") from None


def check_replaceable(target: Path, own: tuple[str, ...]) -> None:
    """UserError if a folder that is to be replaced holds what would be lost."""
    if not target.is_dir() or (any(target.iterdir()) and not (target / own[0]).is_file()):
        raise UserError(f"{target}: is there and holds no {own[0]}; choose another name")
    for file in sorted(target.rglob("*")):
        name = file.relative_to(target).as_posix()
        above = file.is_dir() and not file.is_symlink() and any(known.startswith(f"{name}/") for known in own)
        inside = any(known.endswith("/") and name.startswith(known) for known in own)
        if not (name in own or above or inside):
            raise UserError(f"{target}: holds {name}, too, which would be lost; choose another name, or move that away")


# ======================================================================================================================
# model files: a header of 256 int32, then float32 tensors in state_dict order: weights [, EMA][, both moments [, further EMAs][, losses]]

MODEL_MAGIC, UNET_CU_MODEL_MAGIC = prepare_data.MODEL_MAGIC, prepare_data.UNET_CU_MODEL_MAGIC
HAS_EMA, HAS_TRAINING = 1, 2  # bits of "contents"

HEADER_FIELDS: list[tuple] = (  # little-endian; the names are Config's and TrainingState's where they have them
    [("magic", "<i4"), ("version", "<i4"), ("contents", "<i4"), ("crc", "<u4"), ("parameters", "<u8")]
    + [("image_size", "<i4", 2), ("in_channels", "<i4"), ("num_channels", "<i4"), ("num_res_blocks", "<i4")]
    + [("num_heads", "<i4"), ("num_head_channels", "<i4"), ("num_heads_upsample", "<i4"), ("class_cond", "<i4")]
    + [("num_classes", "<i4"), ("learn_sigma", "<i4"), ("use_scale_shift_norm", "<i4"), ("resblock_updown", "<i4")]
    + [("conv_resample", "<i4"), ("use_new_attention_order", "<i4"), ("dropout", "<f4"), ("levels", "<i4")]
    + [("channel_mult", "<f4", 8), ("resolutions", "<i4"), ("attention_resolutions", "<i4", 8), ("max_period", "<i4")]
    + [("diffusion_steps", "<i4"), ("noise_schedule", "<i4"), ("objective", "<i4"), ("predict", "<i4"), ("rescale_timesteps", "<i4")]
    + [("min_snr_gamma", "<f4"), ("vlb_weight", "<f4"), ("use_kl", "<i4"), ("sigma_small", "<i4"), ("class_dropout", "<f4")]
    + [("sigma_data", "<f4"), ("P_mean", "<f4"), ("P_std", "<f4"), ("t_mean", "<f4"), ("t_std", "<f4"), ("patch_size", "<i4")]
    + [("ect_frame", "<i4"), ("zero1", "<i4", 6)]
    + [("step", "<u8"), ("seed", "<u8")]
    # from here on zero in files without moments
    + [("batch_size", "<i4"), ("microbatch", "<i4"), ("max_steps", "<i4"), ("lr", "<f4"), ("weight_decay", "<f4")]
    + [("adam_beta1", "<f4"), ("adam_beta2", "<f4"), ("adam_eps", "<f4"), ("grad_clip", "<f4")]
    + [("warmup_steps", "<i4"), ("lr_schedule", "<i4"), ("ema_rate", "<f4"), ("random_flip", "<i4")]
    + [("updates", "<i4"), ("bad_total", "<i4"), ("bad_in_row", "<i4"), ("data_images", "<u8"), ("data_crc", "<u4")]
    + [("zero2", "<i4"), ("guard", "<f8", 5), ("more_emas", "<i4"), ("more_rates", "<f4", MOST_EMAS - 1), ("schedule_sampler", "<i4")]
    + [("ect_q", "<f4"), ("ect_k", "<f4"), ("ect_b", "<f4"), ("ect_d", "<i4"), ("ect_c", "<f4"), ("ect_weight", "<i4")]
    + [("zero3", "<i4", 15), ("data_file", "S512")]
)
HEADER = np.dtype(HEADER_FIELDS)
CHECKPOINT_FLAGS = [name for name, *_ in HEADER_FIELDS if name in FLAGS]
SAVED_FLAGS = CHECKPOINT_FLAGS[: CHECKPOINT_FLAGS.index("seed")]  # the model's and the diffusion's
FREE_FLAGS = {"dropout", "min_snr_gamma", "vlb_weight", "use_kl", "sigma_small", "P_mean", "P_std", "t_mean", "t_std"}  # may change from run to run


TUNES = "--objective ect: tunes models of --objective edm and flow, and {} was made with ddpm"


def unused_slots(header: Any) -> list[str]:
    """Flags that say nothing beside others in a header (or in a dictionary), and are 0 there."""
    unused = [] if header["learn_sigma"] else ["vlb_weight"]
    objective = header["objective"] if isinstance(header["objective"], str) else WORDS["objective"][header["objective"] % len(WORDS["objective"])]
    return unused + [name for name, whose in OBJECTIVES_OWN.items() if objective not in whose]


@dataclass
class TrainingState:
    """Where a run stands. guard: number of good steps, running mean and variance of loss and of gradient norm."""

    step: int = 0  # finished steps
    updates: int = 0  # of the weights
    bad_total: int = 0
    bad_in_row: int = 0
    data_images: int = 0
    data_crc: int = 0
    guard: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass
class ModelFile:
    """What a model file holds; arrays are flat float32. A checkpoint has all four, bare weights only the first."""

    config: Config
    weights: np.ndarray
    ema: np.ndarray | None = None
    m: np.ndarray | None = None
    v: np.ndarray | None = None
    state: TrainingState = field(default_factory=TrainingState)
    path: str = ""
    more_emas: tuple[np.ndarray, ...] = ()  # of config.ema_rate[1:]
    history: np.ndarray | None = None  # (diffusion_steps, HISTORY_LENGTH + 1), float32; with --schedule_sampler loss-second-moment

    def arrays(self) -> dict[str, np.ndarray]:
        named = {"weights": self.weights, "ema": self.ema, "m": self.m, "v": self.v}
        named |= {f"ema{k}": ema for k, ema in enumerate(self.more_emas, 2)}
        return {name: array for name, array in named.items() if array is not None}

    def is_finite(self) -> bool:
        return all(np.isfinite(array).all() for array in self.arrays().values())

    def choose_ema(self, rates: tuple[float, ...] | None) -> ModelFile:
        """The same with the average of this rate as its first, for weights_to_use."""
        if rates is None or self.ema is None:
            return self
        there, wanted = (self.config.ema_rate if self.m is not None else ()), Config(ema_rate=rates).ema_rate
        if len(wanted) != 1 or wanted[0] not in there:
            holds = " ".join(f"{rate:g}" for rate in there)
            raise UserError(f"--ema_rate {format_value('ema_rate', rates)}: {self.path} holds averages of the rates {holds}")
        k, emas = there.index(wanted[0]), [self.ema, *self.more_emas]
        others = (*emas[:k], *emas[k + 1 :])
        config = dataclasses.replace(self.config, ema_rate=(there[k], *there[:k], *there[k + 1 :]))
        return dataclasses.replace(self, config=config, ema=emas[k], more_emas=others)

    def averages_for(self, config: Config) -> list[np.ndarray]:
        """With which a run of this configuration goes on: each from the one of the same rate, or else in the same place, or else from the weights."""
        rates, emas = (self.config.ema_rate, [self.ema, *self.more_emas]) if self.ema is not None else ((), [])
        if emas and not {*config.ema_rate} & {*POWER_EMAS} <= {*rates}:
            told = f"averages the whole run, and {self.path} has kept no such average; leave it out"
            raise UserError(f"--ema_snapshots {config.ema_snapshots}: {told}")
        places = [rates.index(rate) if rate in rates else k for k, rate in enumerate(config.ema_rate)]
        return [emas[k] if k < len(emas) else self.weights for k in places]

    def inherit(self, flags: dict[str, Any], resume: bool) -> dict[str, Any]:
        """The flags of a run that starts from this file, or resumes it; UserError if a given one says otherwise about the model."""
        inherited = {name: getattr(self.config, name) for name in (CHECKPOINT_FLAGS if resume else SAVED_FLAGS)}
        if flags.get("objective") == "ect" != self.config.objective and not resume:  # its frame stays
            if self.config.objective == "ddpm":
                raise UserError(TUNES.format(self.path))
            inherited |= {"objective": "ect", "ect_frame": self.config.objective}
        as_saved = Config(**flags)  # in float32
        for name in flags.keys() & {*SAVED_FLAGS, *(["seed"] if resume else [])} - FREE_FLAGS:
            if getattr(as_saved, name) != inherited[name]:
                given, there = format_value(name, flags[name]), format_value(name, inherited[name])
                raise UserError(f"--{name} {given}: {self.path} was made with {there}; leave the flag out")
        return inherited

    def metadata(self) -> dict[str, dict[str, Any]]:
        """What the header of a .bin says, for the other formats."""
        names = CHECKPOINT_FLAGS if self.m is not None else [*SAVED_FLAGS, "seed"]
        return {"config": {n: getattr(self.config, n) for n in names}, "state": dataclasses.asdict(self.state)}

    def weights_to_use(self, use_ema: bool) -> np.ndarray:
        return self.ema if use_ema and self.ema is not None else self.weights


def pack_header(file: ModelFile) -> np.ndarray:
    """The header of a .bin file, its checksum still 0."""
    header = np.zeros((), HEADER)
    values = file.metadata()["state"] | file.metadata()["config"] if file.m is not None else file.metadata()["config"]
    for name, value in (values | {"step": file.state.step}).items():
        if name in ("channel_mult", "attention_resolutions"):
            header["levels" if name == "channel_mult" else "resolutions"] = len(value)
            value = (*value, *[0] * (8 - len(value)))
        elif name == "ema_rate":
            header["more_emas"], header["more_rates"][: len(value) - 1], value = len(value) - 1, value[1:], value[0]
        elif name == "data_file":
            value = value.encode()
        elif isinstance(value, str):  # one of several words, as its number
            value = WORDS[name].index(value)
        header[name] = value
    for name in unused_slots(header):
        header[name] = 0
    header["magic"], header["version"], header["parameters"] = MODEL_MAGIC, 1, len(file.weights)
    header["contents"] = HAS_EMA * (file.ema is not None) | HAS_TRAINING * (file.m is not None)
    return header


def unpack_header(header: np.ndarray) -> tuple[Config, TrainingState]:
    """The configuration and state in a header whose magic and contents are right."""
    values: dict[str, Any] = {name: header[name].tolist() for name in HEADER.names}
    values["channel_mult"] = values["channel_mult"][: max(values["levels"], 0)]
    values["attention_resolutions"] = values["attention_resolutions"][: max(values["resolutions"], 0)]
    values["ema_rate"] = [values["ema_rate"], *values["more_rates"][: max(values["more_emas"], 0)]]
    values["data_file"] = values["data_file"].decode(errors="replace")
    for name in CHECKPOINT_FLAGS:
        if name in WORDS:
            values[name] = WORDS[name][values[name] % len(WORDS[name])]
        elif FLAGS[name].type == "bool":
            values[name] = values[name] == 1
    training = bool(header["contents"] & HAS_TRAINING)
    names = [name for name in (CHECKPOINT_FLAGS if training else [*SAVED_FLAGS, "seed"]) if name not in unused_slots(header)]
    state_names = [f.name for f in dataclasses.fields(TrainingState)] if training else ["step"]
    config = valid({"timestep_respacing": ""} | tuples({name: values[name] for name in names}))
    state = TrainingState(**tuples({name: values[name] for name in state_names}))
    if training:
        check_state(config, state)
    return config, state


def tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


def check_state(config: Config, state: TrainingState) -> None:
    """UserError if a run can't stand there."""
    n, mean_l, var_l, mean_g, var_g = state.guard
    counted = state.updates >= 0 and 0 <= state.bad_in_row <= state.bad_total and state.updates + state.bad_total == state.step <= config.max_steps
    if not (counted and n == state.updates and math.isfinite(sum(state.guard)) and min(var_l, var_g) >= 0):
        told = f"{state.updates} updates, {state.bad_total} skipped, {state.bad_in_row} in a row, running means {state.guard}"
        raise UserError(f"step {state.step}, {told}")


def read_model(path: str, flags: dict[str, Any] | None = None) -> ModelFile:
    """Reads .bin (ours or unet.cu's), .pt, .safetensors or a folder of diffusers'. flags: the model flags, for a bare state_dict that does not
    say its own shape. ModelFileError with one sentence if the file can't be used."""
    try:
        if os.path.isdir(path):
            from common import diffusers_files  # which imports this file

            file = diffusers_files.read_folder(path.rstrip("/"), flags or {})
        else:
            prepare_data.open_file(path).close()  # says what is wrong with the path itself
            file = reader_or_writer(path, read_bin, read_pt, read_safetensors)(path, flags or {})
    except OSError as e:
        raise ModelFileError(f"{e.filename or path}: can't be opened ({e.strerror}); name a model file that is there") from None
    file.path = path
    return file


def write_model(path: str, file: ModelFile) -> None:
    """Writes .bin, .pt or .safetensors, whole or not at all."""
    atomic_write(path, reader_or_writer(path, bin_chunks, pt_chunks, safetensors_chunks)(file))


def convert(file: ModelFile, target: str, flags: dict[str, Any]) -> str:
    """Writes a model in another format, a folder of diffusers' if target ends in /; returns what there is to tell."""
    file.inherit({name: value for name, value in flags.items() if name in SAVED_FLAGS}, resume=False)  # refuses what says otherwise
    if target.endswith("/"):
        from common import diffusers_files  # which imports this file

        return diffusers_files.write_folder(target, file, flags)
    write_model(target, file)
    return f"{target}: the same model as {file.path}"


def reader_or_writer(path: str, for_bin: Callable, for_pt: Callable, for_safetensors: Callable) -> Callable:
    kinds = {".bin": for_bin, ".pt": for_pt, ".pth": for_pt, ".safetensors": for_safetensors}
    if Path(path).suffix not in kinds:
        raise ModelFileError(f"{path}: is of no known kind; model files end in .bin, .pt or .safetensors, and folders of diffusers' in /")
    return kinds[Path(path).suffix]


def bin_chunks(file: ModelFile) -> list[np.ndarray]:
    history = [file.history] if file.history is not None else []
    header, arrays = pack_header(file), [np.ascontiguousarray(a, "<f4") for a in [*file.arrays().values(), *history]]
    header["crc"] = checksum(header, arrays)
    return [header, *arrays]


def checksum(header: np.ndarray, arrays: Iterable[np.ndarray]) -> int:
    crc = zlib.crc32(header.tobytes())
    for a in arrays:
        crc = zlib.crc32(a, crc)
    return crc


def read_header(path: str) -> np.ndarray:
    """The header of a .bin file, as it is there."""
    with prepare_data.open_file(path) as file:
        start = np.frombuffer(bytearray(file.read(HEADER.itemsize)), np.uint8)  # a bytearray, so that it can be changed
    if len(start) < HEADER.itemsize:
        raise ModelFileError(f"{path}: is only {len(start)} bytes long, shorter than a header ({HEADER.itemsize} bytes)")
    return start.view(HEADER).reshape(())


def read_bin(path: str, flags: dict[str, Any]) -> ModelFile:
    size, header = os.path.getsize(path), read_header(path)
    if header["magic"] == UNET_CU_MODEL_MAGIC:
        return read_unet_cu(path, size, np.frombuffer(header.tobytes(), "<i4"), flags)
    if header["magic"] != MODEL_MAGIC:
        raise ModelFileError(f"{path}: is not a model file (it starts with {header['magic']}, not {MODEL_MAGIC})")
    if header["version"] != 1:
        raise ModelFileError(f"{path}: is a model file of version {header['version']}, this program reads version 1")
    count, contents, crc = int(header["parameters"]), int(header["contents"]), int(header["crc"])
    training, more = bool(contents & HAS_TRAINING), int(header["more_emas"])
    if not 0 <= contents <= 3 or count < 1 or not 0 <= more < MOST_EMAS:
        raise ModelFileError(f"{path}: its header is damaged (contents {contents}, {count} parameters)")
    names = ["weights"] + ["ema"] * bool(contents & HAS_EMA) + ["m", "v"] * training + [f"ema{k}" for k in range(2, 2 + more)] * training
    rows = max(int(header["diffusion_steps"]), 0) if training and header["schedule_sampler"] else 0
    expected = 1024 + 4 * (count * len(names) + rows * (HISTORY_LENGTH + 1))
    if size != expected:
        raise ModelFileError(f"{path}: is {size} bytes long, but its header speaks of {expected}; it is cut or damaged")
    header["crc"] = 0
    values = np.memmap(path, "<f4", "r", 1024)
    arrays, history = values[: count * len(names)].reshape(-1, count), values[count * len(names) :].reshape(-1, HISTORY_LENGTH + 1)
    if checksum(header, [arrays, history]) != crc:
        raise ModelFileError(f"{path}: its checksum is wrong, so it was damaged; use another copy or checkpoint")
    config, state = trusted(path, unpack_header, header)
    if count != parameter_count(config):
        raise ModelFileError(f"{path}: holds {count} parameters, its model has {parameter_count(config)}")
    file = make_file(path, config, state, {name: np.array(a) for name, a in zip(names, arrays)}, np.array(history) if rows else None)
    again = pack_header(file)
    for name in HEADER.names:
        if header[name].tobytes() != again[name].tobytes():
            raise ModelFileError(f"{path}: its header's {name} is {header[name].tolist()}, which can't be")
    return file


def make_file(path: str, config: Config, state: TrainingState, arrays: dict[str, np.ndarray], history: np.ndarray | None) -> ModelFile:
    """A ModelFile of arrays by name, which must be what the configuration speaks of."""
    more = tuple(arrays.pop(name) for name in [f"ema{k}" for k in range(2, 1 + MOST_EMAS)] if name in arrays)
    training = {"m", "v"} & arrays.keys()
    if "weights" not in arrays or len(training) == 1 or len(more) != (len(config.ema_rate) - 1) * bool(training):
        raise ModelFileError(f"{path}: holds {', '.join(arrays) or 'no weights'} and {len(more)} further averages, which make no model file")
    shape = (config.diffusion_steps, HISTORY_LENGTH + 1) if training and config.schedule_sampler != "uniform" else None
    fits = (None if history is None else history.shape) == shape
    if not fits or (shape and not (np.isfinite(history).all() and np.isin(history[:, -1], range(HISTORY_LENGTH + 1)).all())):
        raise ModelFileError(f"{path}: its history of losses is damaged")
    return ModelFile(config, state=state, more_emas=more, history=history, **arrays)


def read_unet_cu(path: str, size: int, header: np.ndarray, flags: dict[str, Any]) -> ModelFile:
    """unet.cu's unet_init.bin, and what its train_unet saves: the weights; moments and cuRAND's state are left. flags say what it does not:
    the diffusion, of which unet.cu knows the linear schedule alone."""
    c_in, width, c_out, H, W, max_period, moments = header[2:9].tolist()
    values = {"image_size": (H, W), "in_channels": c_in, "num_channels": width, "max_period": max_period}
    values |= {"attention_resolutions": (H // 4, H // 8), "learn_sigma": c_out == 2 * c_in, "timestep_respacing": ""}
    values |= {"vlb_weight": 0.0, "patch_size": 0}
    if flags.get("objective") == "ect":
        raise UserError(TUNES.format(path))
    told = {name: value for name, value in flags.items() if name in SAVED_FLAGS[SAVED_FLAGS.index("diffusion_steps") :]}
    config = trusted(path, valid, preset_flags("unet64") | {"noise_schedule": "linear"} | told | values)
    count = parameter_count(config)
    if c_out != config.out_channels or size < 1024 + 4 * count or (size > 1024 + 4 * count and not moments):
        raise ModelFileError(f"{path}: {size} bytes, {c_in} channels in and {c_out} out make no model of unet.cu")
    return ModelFile(config, np.fromfile(path, "<f4", count, offset=1024))


def valid(values: dict[str, Any]) -> Config:
    config = Config(**values)
    validate(config)
    return config


def trusted(path: str, make: Callable, values: Any) -> Any:
    """make(values), where values come from a file."""
    try:
        return make(values)
    except (TypeError, ValueError, ArithmeticError, LookupError, UserError) as e:
        raise ModelFileError(f"{path}: describes a model that can't work ({e})") from None


def parameter_count(config: Config) -> int:
    return sum(shape.numel() for shape in parameter_shapes(config).values())


def to_state_dict(config: Config, flat: np.ndarray | torch.Tensor) -> dict[str, torch.Tensor]:
    """state_dict of a flat array (a view)."""
    shapes = parameter_shapes(config)
    parts = torch.as_tensor(flat).split([s.numel() for s in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts)}


def is_plain(tensor: Any) -> bool:
    """Whether this is a tensor of real numbers in memory: files may hold others."""
    return isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.layout == torch.strided and tensor.device.type == "cpu"


def from_state_dict(config: Config, tensors: dict[str, torch.Tensor], path: str) -> np.ndarray:
    """The flat array of a state_dict; ModelFileError names the first key that does not fit the configuration."""
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not is_plain(tensor):
            raise ModelFileError(f"{path}: {brief(name)} is no tensor of numbers")
    tensors = {name.removeprefix("_orig_mod.").removeprefix("module."): tensor for name, tensor in tensors.items()}
    shapes = parameter_shapes(config)
    hint = "the model flags (--help lists them) must be those that it was trained with"
    for name, shape in shapes.items():
        if name not in tensors:
            raise ModelFileError(f"{path}: lacks {name}, which a model with these flags has; {hint}")
        if tensors[name].shape != shape:
            there, here = list(tensors[name].shape), list(shape)
            raise ModelFileError(f"{path}: {name} has shape {there}, a model with these flags {here}; {hint}")
    for name in tensors:
        if name not in shapes:
            raise ModelFileError(f"{path}: has {name}, which a model with these flags lacks; {hint}")
    return torch.cat([tensors[name].detach().float().flatten() for name in shapes]).numpy()


SECTIONS = {"weights": "", "ema": "ema.", "m": "exp_avg.", "v": "exp_avg_sq."}  # array -> prefix in .safetensors
SECTIONS |= {f"ema{k}": f"ema{k}." for k in range(2, 1 + MOST_EMAS)}
HISTORY = "loss_history"


def brief(value: Any) -> str:
    """What something from a file is, for a sentence; of what may be long or strange, its type."""
    return " ".join(f"{value!r:.40}".split()) if isinstance(value, (str, int, float, bytes, type(None))) else f"a {type(value).__name__}"


def typed(values: Any, fields: dict[str, dataclasses.Field]) -> dict[str, Any]:
    """values from a file, if they are what these fields of a dataclass are; TypeError names the first that is not."""
    if not isinstance(values, dict):
        raise TypeError(f"{brief(values)} where names and values should be")
    result = {}
    for name, value in values.items():
        kind = fields[name].type.partition("[")[0] if name in fields else "none"
        value = (value,) if name == "ema_rate" and isinstance(value, float) else tuple(value) if isinstance(value, list) else value
        wanted = {"bool": bool, "int": int, "float": (int, float), "str": str, "tuple": tuple}.get(kind)
        parts = value if isinstance(value, tuple) else ()
        if not wanted or not isinstance(value, wanted) or (kind in ("int", "float") and isinstance(value, bool)):
            raise TypeError(f"{brief(name)} is {brief(value)}")
        if not all(type(part) in ((int, float) if "float" in fields[name].type else (int,)) for part in parts):
            raise TypeError(f"{name} holds {', '.join(map(brief, parts[:8]))}")
        result[name] = value
    return result


def saved_config(values: Any) -> Config:
    """The configuration that metadata() wrote; files from before the variational bound do not speak of it."""
    return valid({"timestep_respacing": "", "vlb_weight": 0.0} | typed(values, FLAGS))


def from_sections(path: str, sections: dict[str, Any], metadata: Any, history: torch.Tensor | None, flags: dict[str, Any]) -> ModelFile:
    """A ModelFile from state_dicts and what metadata() says; without a configuration they are bare weights, whose shape flags give."""
    states = {f.name: f for f in dataclasses.fields(TrainingState)}
    if "config" in metadata:
        config = trusted(path, saved_config, metadata["config"])
    else:
        config = make_config({"preset": FOREIGN_PRESET} | flags)
    state = trusted(path, lambda values: TrainingState(**typed(values, states)), metadata.get("state", {}))
    arrays = {name: from_state_dict(config, tensors, path) for name, tensors in sections.items()}
    file = make_file(path, config, state, arrays, None if history is None else history.float().numpy())
    trusted(path, lambda file: (check_state(file.config, file.state) if file.m is not None else None, pack_header(file)), file)
    return file


def pt_chunks(file: ModelFile) -> list[Any]:
    saved: dict[str, Any] = {name: to_state_dict(file.config, array) for name, array in file.arrays().items()}
    saved["model"] = saved.pop("weights")
    if file.history is not None:
        saved[HISTORY] = torch.from_numpy(file.history)
    buffer = io.BytesIO()
    torch.save(saved | file.metadata(), buffer)
    return [buffer.getbuffer()]


def read_pt(path: str, flags: dict[str, Any]) -> ModelFile:
    damaged = ModelFileError(f"{path}: is not a PyTorch file of tensors, or is damaged")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tensors that are refused below
            saved = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception:  # noqa: BLE001 (torch and pickle raise nearly anything at a damaged file)
        raise damaged from None
    if not isinstance(saved, dict):
        raise damaged
    if "config" not in saved:  # somebody else's: a state_dict, perhaps under a name
        tensors = next((saved[k] for k in ("model", "state_dict") if isinstance(saved.get(k), dict)), saved)
        saved = {"model": {k: v for k, v in tensors.items() if isinstance(v, torch.Tensor)}}
    saved["weights"] = saved.pop("model", {})
    sections = {name: saved[name] for name in SECTIONS if name in saved}
    history = saved.get(HISTORY)
    if not all(isinstance(tensors, dict) for tensors in sections.values()) or (history is not None and not is_plain(history)):
        raise damaged
    return from_sections(path, sections, saved, history, flags)


def safetensors_chunks(file: ModelFile) -> list[Any]:
    import safetensors.numpy

    tensors = {
        SECTIONS[name] + key: tensor.numpy() for name, array in file.arrays().items() for key, tensor in to_state_dict(file.config, array).items()
    }
    if file.history is not None:
        tensors[HISTORY] = file.history
    return [safetensors.numpy.save(tensors, {key: json.dumps(value) for key, value in file.metadata().items()})]


def safetensors_content(path: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a file, and those of its metadata that metadata() wrote."""
    import safetensors

    try:
        with safetensors.safe_open(path, "pt") as f:
            metadata = {key: json.loads(value) for key, value in (f.metadata() or {}).items() if key in ("config", "state")}
            return {key: f.get_tensor(key) for key in f.keys()}, metadata  # noqa: SIM118 (it is no dictionary)
    except OSError:
        raise
    except Exception:  # noqa: BLE001 (of a damaged file's tensors torch raises nearly anything)
        raise ModelFileError(f"{path}: is not a safetensors file, or is damaged") from None


def read_safetensors(path: str, flags: dict[str, Any]) -> ModelFile:
    sections: dict[str, dict[str, torch.Tensor]] = {}
    tensors, metadata = safetensors_content(path)
    for key, tensor in tensors.items():
        name = next((n for n, prefix in SECTIONS.items() if prefix and key.startswith(prefix)), "weights")
        sections.setdefault(name, {})[key.removeprefix(SECTIONS[name])] = tensor
    history = sections.get("weights", {}).pop(HISTORY, None)
    if history is not None and not is_plain(history):
        raise ModelFileError(f"{path}: its history of losses is damaged")
    return from_sections(path, sections, metadata, history, flags)


def power_of(sigma_rel: float) -> float:
    """The exponent of the power function whose spread is this part of the run (Karras et al. 2024, appendix C.2)."""
    t = sigma_rel**-2
    return float(np.roots([1, 7, 16 - t, 12 - t]).real.max())


def response_products(t_a: np.ndarray, power_a: np.ndarray, t_b: np.ndarray, power_b: np.ndarray) -> np.ndarray:
    """(a, b): integrals over time of what two averages make of the weights at each time, p_a(t) p_b(t), where p(t) is (power + 1) t^power / end^(power +
    1) up to its end (Karras et al. 2024, appendix C.3)."""
    t_a, power_a, t_b, power_b = t_a[:, None], power_a[:, None], t_b[None, :], power_b[None, :]
    ratio = (t_a / t_b) ** np.where(t_a < t_b, power_b, -power_a)
    return (power_a + 1) * (power_b + 1) * ratio / ((power_a + power_b + 1) * np.maximum(t_a, t_b))


def read_snapshot(path: str) -> ModelFile:
    """A snapshot of a run: two averages of its weights, and as its step the number of updates that they are over."""
    file = read_model(path)
    if not re.fullmatch(SNAPSHOT_NAME, Path(path).name) or file.ema is None or file.m is not None:
        raise UserError(f"{path}: is no snapshot of a run, ema_STEP.bin, as --ema_snapshots writes them")
    if file.state.step < 1:
        raise UserError(f"{path}: averages no weights, since no update came before it; name a later snapshot")
    if not file.is_finite():
        raise UserError(f"{path}: its averages are not finite; move it away and use the other snapshots")
    return file


def snapshots_up_to(path: str) -> dict[int, str]:
    """updates -> file, of the snapshots beside this one, up to it, oldest first."""
    number = snapshot_number(path)
    beside = (p for p in Path(path).parent.iterdir() if re.fullmatch(SNAPSHOT_NAME, p.name))
    found, last = {}, 0
    for name in sorted((str(p) for p in beside if snapshot_number(p) <= number), key=snapshot_number):
        header = read_header(name)
        updates = header["step"].item()
        if header["magic"] != MODEL_MAGIC or updates < last:
            raise UserError(f"{name}: does not go on from the snapshots before it, so it is damaged or another run's; move it out of that folder")
        if updates > 0:  # else no step was good yet
            found[updates] = name  # two with as many updates hold the same
        last = updates
    return found


def snapshot_number(path: str | Path) -> int:
    return int(re.fullmatch(SNAPSHOT_NAME, Path(path).name)[1])


def check_same_run(file: ModelFile, end: ModelFile) -> None:
    """UserError if a snapshot is not of the run that another one is of. Flags that a resumed run may change may differ."""
    for name in ["seed", *(name for name in SAVED_FLAGS if name not in FREE_FLAGS)]:
        here, there = getattr(file.config, name), getattr(end.config, name)
        if here != there:
            told = f"--{name} {format_value(name, here)}, and {end.path} of one with {format_value(name, there)}"
            raise UserError(f"{file.path}: is of a run with {told}; move it out of that folder")


def post_hoc_factors(updates: np.ndarray, sigma_rel: float) -> np.ndarray:
    """(snapshots, 2): how much of each average is in the one that is wanted at the end of these updates (Karras et al. 2024, algorithm 3)."""
    t, powers = np.repeat(updates, 2), np.tile(np.array(POWER_EMAS), len(updates))
    wanted = response_products(t, powers, updates[-1:], np.array([power_of(sigma_rel)]))
    factors = np.linalg.solve(response_products(t, powers, t, powers), wanted)
    # The nearest sum of responses may count all weights together as less than one; an average counts them as one. (Karras et al.'s published code
    # divides so, too; their algorithm 3 as printed does not.)
    return (factors / factors.sum()).reshape(-1, 2)


def post_hoc_average(path: str, sigma_rel: float) -> ModelFile:
    """The average of the weights of a run up to a snapshot ema_STEP.bin, whose weights are spread over this part of it: a sum of all snapshots to that
    one, with the factors whose sum of responses is nearest to the wanted one (Karras et al. 2024, section 3.2)."""
    if not 0.005 <= sigma_rel <= 0.28:
        raise UserError(f"--ema_sigma_rel {sigma_rel:g}: must be from 0.005 to 0.28; 0.05 to 0.15 is usual")
    end = read_snapshot(path)
    found = snapshots_up_to(path)
    total = np.zeros(len(end.weights))
    for name, (first, second) in zip(found.values(), post_hoc_factors(np.array([*found], float), sigma_rel)):
        file = read_snapshot(name)
        check_same_run(file, end)
        total += first * file.weights.astype(np.float64) + second * file.ema.astype(np.float64)
    return dataclasses.replace(end, weights=total.astype(np.float32), ema=None, path=f"an average of the weights up to {path}")


def parameter_shapes(config: Config) -> dict[str, torch.Size]:
    """Of the model's state_dict, in its order."""
    from train_unet import UNetModel  # which imports this file

    with torch.device("meta"):  # shapes without memory
        return {name: p.shape for name, p in UNetModel(config).named_parameters()}


# ======================================================================================================================
# the output folder of a run: checkpoints, log.csv, grids, loss.png

LOG_COLUMNS = "step,loss,lr,grad_norm,ms,loss_q0,loss_q1,loss_q2,loss_q3,val_loss,seconds"


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


def complete_row(row: str) -> str:
    """A row of log.csv with all columns: programs of before wrote no seconds."""
    return row.replace("\n", ",\n") if row.count(",") == LOG_COLUMNS.count(",") - 1 else row


def seconds_of(rows: list[str]) -> float:
    """How long the run of these rows of log.csv has taken; where they do not say it, the time of the steps alone."""
    seconds = 0.0
    for row in csv.DictReader(rows, LOG_COLUMNS.split(",")):
        with contextlib.suppress(TypeError, ValueError):  # a row that something else has damaged
            told = float(row["seconds"]) if row["seconds"] else seconds + float(row["ms"]) / 1000
            seconds = told if seconds <= told < 1e9 else seconds
    return seconds


BEST = "best.bin"  # --keep_best: a hard link to the checkpoint of the lowest validation loss, so that it outlives its other name


class RunFolder:
    """The output folder of a run, held by its descriptor: it stays the same one when it is moved, or when another takes its name."""

    def __init__(self, path: str):
        self.path, self.moved, self.files_wait, self.tried = path, False, False, 0.0  # tried: when pictures last were
        self.waiting: dict[str, Any] = {}  # pictures that could not be written, by name
        try:
            os.makedirs(path, exist_ok=True)
            self.descriptor = prepare_data.open_folder(path)
        except OSError as e:
            raise UserError(f"--output_dir {path}: can't be written to ({e.strerror}); choose another") from None

    def name(self, file: str) -> str:
        return f"{self.path}/{file}"

    def open(self, file: str, how: int) -> int:
        return os.open(file, how | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.descriptor)

    def has_its_name(self) -> bool:
        """False: it was moved or removed."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.descriptor))
        except FileNotFoundError:
            return False

    def check(self, step: int) -> str:
        """UserError if it was removed: then there is no place for checkpoints. What there is to tell if it was moved, or ""."""
        if os.fstat(self.descriptor).st_nlink == 0:
            raise UserError(f"{self.path}: was removed while the run wrote there; stopped after step {step}")
        if self.moved or self.has_its_name():
            return ""
        self.moved = True
        return f"{self.path}: was moved; the run goes on in it, wherever it is now"

    def checkpoints(self) -> dict[int, str]:
        """step -> name, oldest first."""
        found = ((re.fullmatch(r"model_(\d+)\.bin", name), name) for name in os.listdir(self.descriptor))
        return dict(sorted((int(match[1]), name) for match, name in found if match))

    def leave_later_snapshots(self, first_step: int) -> None:
        """Snapshots of later steps than a run begins at are of steps that it does again, maybe otherwise: no average of this run may take them. They
        stay under another name."""
        names = [name for name in sorted(os.listdir(self.descriptor)) if re.fullmatch(SNAPSHOT_NAME, name) and snapshot_number(name) > first_step]
        for name in names:
            try:
                os.rename(name, f"{name}.left", src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
            except OSError as e:
                raise UserError(f"{self.name(name)}: can't be renamed to {name}.left ({e.strerror}); move it away") from None
        if names:
            told = "they are called ema_STEP.bin.left now, and no average takes them"
            print(f"{self.path}: snapshots ema_STEP.bin beyond step {first_step}, where this run goes on: {len(names)}; {told}")

    def best_step(self) -> int | None:
        """The step of best.bin, the checkpoint that --keep_best keeps; None: there is none."""
        if not prepare_data.is_there(BEST, self.descriptor):
            return None
        try:
            with prepare_data.open_file(BEST, self.descriptor) as f:
                header = np.frombuffer(f.read(HEADER.itemsize), HEADER)[0]
        except (OSError, ValueError, IndexError):
            header = None
        if header is None or header["magic"] != MODEL_MAGIC or header["contents"] != HAS_EMA | HAS_TRAINING:
            raise UserError(f"{self.name(BEST)}: is no checkpoint; move it away, for --keep_best would replace it")
        return int(header["step"])

    def link(self, file: str, name: str) -> None:
        """Gives a file a second name, in place of what has that name; a copy, where there are no hard links. OSError if neither can be done."""
        temporary = f"{name}.tmp{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):  # a killed process of this number may have left it
            os.unlink(temporary, dir_fd=self.descriptor)
        try:
            os.link(file, temporary, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except OSError:
            with prepare_data.open_file(file, self.descriptor) as source, prepare_data.atomic_file(name, self.descriptor) as copy:
                shutil.copyfileobj(source, copy)
            return
        try:
            os.replace(temporary, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
            os.fsync(self.descriptor)
        finally:
            with contextlib.suppress(FileNotFoundError):  # it is still there if both names were this file's before
                os.unlink(temporary, dir_fd=self.descriptor)

    def write(self, file: str, chunks: Iterable[Any]) -> None:
        """OSError if it can't be written; then what was there before is untouched."""
        with prepare_data.atomic_file(file, self.descriptor) as f:
            f.writelines(chunks)

    def write_or_wait(self, file: str, content: Any) -> str:
        """A picture. Those that don't fit on the disk wait until they do. Returns what there is to tell, or ""."""
        self.waiting[file] = content
        return "" if self.files_wait else self.write_waiting()

    def write_waiting(self) -> str:
        """Tries it again. Returns what there is to tell, or ""."""
        error, file = "", ""
        self.tried = time.monotonic()
        while self.waiting and not error:
            file = next(iter(self.waiting))
            try:
                self.write(file, [self.waiting[file]])
                del self.waiting[file]
            except OSError as e:
                error = e.strerror
        before, self.files_wait = self.files_wait, bool(self.waiting)
        if before == self.files_wait:
            return ""
        return f"{self.name(file)}: " + (f"can't be written ({error}); pictures wait" if error else "is written again, and no picture is missing")

    def close(self) -> None:
        os.close(self.descriptor)
        if self.waiting:
            missing = f"could not be written, and so {len(self.waiting)} pictures are missing, for want of room; the rest is there"
            raise UserError(f"{self.name(next(iter(self.waiting)))}: {missing}")


class Log:
    """log.csv, a row per step. A resumed run keeps the rows up to the step that it resumes from."""

    def __init__(self, folder: RunFolder, step: int):
        self.folder, self.path, kept = folder, folder.name("log.csv"), []
        self.rows, self.error = b"", ""  # rows: those that the file still lacks, because of this error
        if step > 0 and prepare_data.is_there("log.csv", folder.descriptor):
            with self.reader() as f:
                kept = [complete_row(row) for row in f if row.split(",")[0].isdigit() and int(row.split(",")[0]) <= step]
        self.began = time.perf_counter() - seconds_of(kept)  # when the run would have begun if it had never paused
        try:
            folder.write("log.csv", [LOG_COLUMNS.encode() + b"\n", *(row.encode() for row in kept)])
        except OSError as e:
            raise UserError(f"{self.path}: can't be written ({e.strerror}); choose a folder that exists and is yours") from None
        self.descriptor = folder.open("log.csv", os.O_WRONLY | os.O_APPEND)

    def reader(self) -> IO[str]:
        try:
            return io.TextIOWrapper(prepare_data.open_file("log.csv", self.folder.descriptor))
        except OSError as e:
            e.filename = self.path
            raise

    def write(self, r: StepResult, ms: float, val_loss: float | None) -> str:
        """Adds a row. On a full disk rows wait until it is full no more. Returns what there is to tell about that, or ""."""
        fields = [r.loss, r.lr, r.grad_norm, ms, *r.loss_quarters, val_loss, time.perf_counter() - self.began]
        self.rows += (",".join([str(r.step), *("" if v is None else f"{v:.9g}" for v in fields)]) + "\n").encode()
        before, self.error = self.error, ""
        try:
            while self.rows:
                self.rows = self.rows[os.write(self.descriptor, self.rows) :]
        except OSError as e:
            self.error = e.strerror
        if bool(before) == bool(self.error):
            return ""
        return f"{self.path}: " + (f"can't be written ({self.error}); rows wait" if self.error else "is written again, and no row is missing")

    def val_loss(self, step: int) -> float:
        """The validation loss in the row of a step; infinite: there is none."""
        with self.reader() as f:
            found = [row["val_loss"] for row in csv.DictReader(f) if row["step"] == str(step)]
        try:
            value = float(found[-1])
        except (IndexError, TypeError, ValueError):
            return math.inf
        return value if math.isfinite(value) else math.inf

    def close(self) -> None:
        os.close(self.descriptor)
        if self.rows:
            raise UserError(f"{self.path}: its last rows could not be written ({self.error})")


def to_pixels(images: torch.Tensor) -> np.ndarray:
    """(..., C, H, W) in [-1, 1] to uint8 (..., H, W, 3 or 1). Of other than 3 channels, the first is shown in grey."""
    shown = images if images.shape[-3] == 3 else images[..., :1, :, :]
    return ((shown + 1) * 127.5).clamp(0, 255).add(0.5).to(torch.uint8).movedim(-3, -1).numpy()


def png_bytes(pixels: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels).save(buffer, "PNG")
    return buffer.getvalue()


def save_png(pixels: np.ndarray, path: str) -> None:
    atomic_write(path, [png_bytes(pixels)])


def grid_pixels(images: torch.Tensor, enlarge: bool = True) -> np.ndarray:
    """uint8 (H, W, 3 or 1) of a square grid of images (N, C, H, W) in [-1, 1], small ones enlarged."""
    pixels, gap = to_pixels(images), 2
    zoom = max(1, 64 // max(pixels.shape[1:3])) if enlarge else 1
    pixels = pixels.repeat(zoom, axis=1).repeat(zoom, axis=2)
    N, H, W, C = pixels.shape
    columns = math.ceil(math.sqrt(N))
    grid = np.full((math.ceil(N / columns) * (H + gap) + gap, columns * (W + gap) + gap, C), 255, np.uint8)
    for i, image in enumerate(pixels):
        y, x = gap + i // columns * (H + gap), gap + i % columns * (W + gap)
        grid[y : y + H, x : x + W] = image
    return grid


def save_samples(images: torch.Tensor, path: str) -> None:
    """Images in [-1, 1] as a grid (.png), or as a data file of float32 images (.bin)."""
    if not torch.isfinite(images).all():
        raise UserError(f"{path}: is not written, because the samples are not finite numbers; these weights are broken")
    if path.endswith(".bin"):
        prepare_data.write_data(path, images.numpy())
    else:
        save_png(grid_pixels(images), path)


def plot_loss(log: Log) -> bytes:
    """loss.png from log.csv. Light: every step's loss; dark: its mean; orange: validation."""
    from matplotlib.figure import Figure

    with log.reader() as rows:
        table = np.genfromtxt(rows, delimiter=",", names=True, ndmin=1)
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
    figure.savefig(buffer := io.BytesIO(), format="png", dpi=100)
    return buffer.getvalue()


def checkpoints(folder: str) -> dict[int, str]:
    """step -> file, of the checkpoints in a folder, oldest first."""
    found = ((re.fullmatch(r"model_(\d+)\.bin", p.name), str(p)) for p in Path(folder).glob("model_*.bin"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def find_data(path: str, checkpoint: str) -> str:
    """A checkpoint's data: where it says, or from a folder above its own, where the run may have been started."""
    if not os.path.exists(path):
        for folder in Path(checkpoint).absolute().parents:
            if (folder / path).exists():
                return str(folder / path)
    return path


def check_output_dir(config: Config, start: ModelFile | None) -> None:
    """An output folder holds one run: a new run needs a folder without one, a resumed run its own or an empty one."""
    folder, saved = config.output_dir, checkpoints(config.output_dir)
    best = os.path.join(folder, BEST)
    if config.keep_best and not saved and os.path.exists(best):
        if not (config.resume_checkpoint and os.path.samefile(best, start.path)):
            raise UserError(f"{best}: is another run's; move it away, or choose another --output_dir")
    if not saved and not os.path.exists(os.path.join(folder, "log.csv")):
        return
    if not config.resume_checkpoint:
        hint = "; continue it with --resume_checkpoint latest"
        hint = hint if saved else "'s log.csv, but no checkpoint to continue it from; move log.csv away to start again"
        raise UserError(f"{folder}: already holds a run{hint}, or choose another --output_dir")
    if not os.path.samefile(os.path.dirname(start.path) or ".", folder):
        raise UserError(f"{folder}: already holds a run, but {start.path} is not part of it; choose another --output_dir")
    later = [path for step, path in saved.items() if step > start.state.step]
    if later and os.path.samefile(later[-1], start.path):
        raise UserError(f"{later[-1]}: holds step {start.state.step}; rename it to model_{start.state.step:07d}.bin")
    if later:
        told = f"{later[-1]}: is later than {start.path}"
        raise UserError(f"{told}; resume that one (latest), move it away, or choose another --output_dir")


@contextlib.contextmanager
def lock_folder(path: str, folder: int | None = None) -> Iterator[None]:
    """One process at a time trains in a folder: a file there is locked until the process ends, however it ends, and
    says whose the lock is. folder: its descriptor; without, only a file that is there already is looked at."""
    create = folder is not None
    how = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    try:
        descriptor = os.open(".lock" if create else f"{path}/.lock", how, 0o666, dir_fd=folder)
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise UserError(f"{path}/.lock: is a link, and a run's is a file of its own; remove it") from None
        if create or not isinstance(e, FileNotFoundError):
            raise UserError(f"--output_dir {path}: can't be written to ({e.strerror}); choose another") from None
        yield
        return
    try:
        with contextlib.suppress(OSError):  # a file system without locks has none
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                who = os.pread(descriptor, 127, 0).decode(errors="replace").partition("\n")[0] or "another process"
                raise UserError(f"{path}: {who} trains there; wait until it ends, or choose another --output_dir") from None
        there = os.fstat(descriptor)
        empty = there.st_size == 0 and there.st_nlink == 1
        if not stat.S_ISREG(there.st_mode) or not (empty or os.pread(descriptor, 8, 0) == b"process "):
            raise UserError(f"{path}/.lock: is no run's lock, but something else; move it away")
        if create:
            with contextlib.suppress(OSError):  # a full disk doesn't say whose it is
                os.ftruncate(descriptor, 0)
                who = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')},\n"
                os.pwrite(descriptor, who.encode(), 0)
        yield
    finally:
        os.close(descriptor)


def open_start(flags: dict[str, Any]) -> ModelFile | None:
    """The model file that a run with these flags starts from, or resumes."""
    path, folder = flags.get("resume_checkpoint", ""), flags.get("output_dir", Config.output_dir)
    if path and flags.get("init"):
        raise UserError("--init and --resume_checkpoint: a run starts from one of them; leave the other out")
    if path == "latest":
        if not checkpoints(folder):
            rest = ", once its log.csv is moved away" if os.path.exists(f"{folder}/log.csv") else ""
            raise UserError(f"--resume_checkpoint latest: {folder} holds no checkpoint; leave the flag out to start there{rest}")
        path = list(checkpoints(folder).values())[-1]
    if not (path or flags.get("init")):
        return None
    start = read_model(path or flags["init"], flags)
    if path and (start.m is None or start.ema is None):
        raise UserError(f"{path}: holds weights only, no moments to resume from; --init starts a new run from it")
    if not start.is_finite():
        raise UserError(f"{start.path}: its weights, their average or moments are not finite; move it away and use an earlier checkpoint")
    return start


# How long a checkpoint that can't be written may be tried again, and after which time. Training goes on meanwhile. Ten minutes are enough for whoever
# sees the message to make room. If nobody does, ten minutes of steps are lost, no night's. At the end nothing goes on meanwhile, and whoever has stopped
# a run may soon kill it: then it is a quarter of a minute.
PATIENCE, PATIENCE_AT_THE_END, RETRY_AFTER = 600.0, 15.0, 5.0  # seconds


class Keeper:
    """The checkpoints of a run: an older one goes only when a step from the newest was good. tell: what shows a sentence. best_loss: with --keep_best
    the validation loss of best.bin, infinite if it is unknown; None without. val_loss: after the latest step, if it was measured there."""

    def __init__(self, folder: RunFolder, keep: int, step: int, best_loss: float | None = None):
        self.folder, self.keep, self.tell = folder, keep, print
        self.best_loss = best_loss
        self.val_loss: float | None = None
        self.saved, self.proven = step, -1 if step else 0  # the newest checkpoint, and the newest from which a step was good
        self.snapshot = step  # the newest of the averages
        self.no_room_since, self.retry_at = 0.0, 0.0  # when a file first could not be written (0: it could), and when it is tried again

    def is_due(self, step: int, interval: int, before: int) -> bool:
        """Whether a file is to be written after this step; late, if a bad step or a full disk was in the way. before: step of the one before."""
        return interval > 0 and step // interval > before // interval and time.monotonic() >= self.retry_at

    def save(self, file: ModelFile) -> None:
        """A checkpoint."""
        if not file.is_finite():
            self.stop_run(file.state.step, "weights, their average or moments are not finite and were not saved")
        name = f"model_{file.state.step:07d}.bin"
        if self.write(name, file, file.state.step):
            self.saved = file.state.step
            self.keep_best(name)

    def keep_best(self, checkpoint: str) -> None:
        """Makes best.bin this checkpoint, just written, if its validation loss is the lowest. One whose step has none, because the data ended the
        run, is not compared."""
        if self.best_loss is None or self.val_loss is None:
            return
        loss = float(f"{self.val_loss:.9g}")  # as in log.csv: a resumed run decides as one that never paused
        if not loss < self.best_loss:
            return
        try:
            self.folder.link(checkpoint, BEST)
            self.best_loss = loss
        except OSError as e:
            failure = f"can't be written ({e.strerror}); what was there before is untouched"
            self.tell(f"{self.folder.name(BEST)}: {failure}; the run goes on, and {checkpoint} is the best checkpoint until now")

    def save_snapshot(self, file: ModelFile, step: int) -> None:
        """The averages by power functions."""
        if self.write(f"ema_{step:07d}.bin", file, step):
            self.snapshot = step

    def write(self, name: str, file: ModelFile, step: int) -> bool:
        """Whether a model file could be written; if not, it is tried again later. What never gets better ends the run: a limit on the size of files."""
        path = self.folder.name(name)
        try:
            self.folder.write(name, bin_chunks(file))
        except OSError as e:
            told, now = f"{path}: writing failed ({e.strerror}); what was there before is untouched", time.monotonic()
            self.folder.check(step)
            if not self.no_room_since:
                self.no_room_since = now
                self.tell(f"{told}; it is tried again for {PATIENCE / 60:.0f} minutes")
            if e.errno == errno.EFBIG or now - self.no_room_since > PATIENCE:
                raise UserError(f"{told}; stopped after step {step}; {self.saved_so_far()}") from None
            self.retry_at = now + RETRY_AFTER
            return False
        if self.no_room_since:
            self.tell(f"{path}: is written again")
        self.no_room_since, self.retry_at = 0.0, 0.0
        return True

    def saved_so_far(self) -> str:
        if not self.saved:
            return "no checkpoint was written yet"
        return f"saved is step {self.saved}; --resume_checkpoint latest goes on from there"

    def finish(self, step: int, save: Callable[[], bool], stop: list[str]) -> None:
        """Calls save until it has saved everything. A disk that is full is waited for, but not for long, and not beyond another signal."""
        signals, began = len(stop), time.monotonic()
        while not save():
            if len(stop) > signals or time.monotonic() - began > PATIENCE_AT_THE_END:
                raise UserError(f"{self.folder.path}: step {step} could not be saved; {self.saved_so_far()}")
            time.sleep(1)

    def prove(self) -> None:
        """A step from the newest checkpoint was good."""
        if self.proven != self.saved:
            self.proven, names = self.saved, list(self.folder.checkpoints().values())
            for name in names[: -self.keep] if self.keep else []:
                os.unlink(name, dir_fd=self.folder.descriptor)

    def waits(self) -> bool:
        """Whether there are more checkpoints than are to be kept."""
        return 0 < self.keep < len(self.folder.checkpoints())

    def stop_run(self, step: int, why: str) -> NoReturn:
        """UserError, with what to go on from after a run that broke."""
        files = {step: self.folder.name(name) for step, name in self.folder.checkpoints().items()}
        if not files:
            advice = "no checkpoint was written yet"
        elif self.proven in list(files)[-1:]:
            advice = f"the last good checkpoint is {files[self.proven]}"
        else:
            *before, newest = files.values()
            advice = f"no step was good from {newest}, so move it away and " + (f"go on from {before[-1]}" if before else "start again")
        raise UserError(f"stopped at step {step}: {why}; {advice}; a lower --lr or a --warmup_steps may help")


@contextlib.contextmanager
def run_folder(config: Config, start: ModelFile | None) -> Iterator[tuple[RunFolder, Log, Keeper]]:
    """The output folder as this process's alone, for a run that starts there or is resumed."""
    step = start.state.step if config.resume_checkpoint else 0
    folder = RunFolder(config.output_dir)
    with lock_folder(folder.path, folder.descriptor):
        if not folder.has_its_name():
            raise UserError(f"{folder.path}: was moved or replaced while the run began; start it again")
        check_output_dir(config, start)  # again, now that nobody else can change it
        prepare_data.remove_leftovers(folder.descriptor, "model_", "samples_", "log.csv.", "loss.png.", "ema_", f"{BEST}.")
        folder.leave_later_snapshots(step)
        best_step = folder.best_step() if config.keep_best and step else None
        log = Log(folder, step)
        best_loss = log.val_loss(best_step) if best_step is not None else math.inf
        if best_step is not None and math.isinf(best_loss):
            told = f"log.csv has no validation loss of its step {best_step}, so the next checkpoint becomes the best"
            print(f"{folder.name(BEST)}: {told}", flush=True)
        yield folder, log, Keeper(folder, config.keep_checkpoints, step, best_loss if config.keep_best else None)
        log.close()
        folder.close()


def prepare_run(flags: dict[str, Any]) -> tuple[Config, Data | None, ModelFile | None]:
    """From flags to what a run needs: its configuration, its data and what it starts from. Creates nothing."""
    flags, data, resume = dict(flags), None, bool(flags.get("resume_checkpoint"))
    named = flags.keys() & {"data_file", "data_dir"}
    if len(named) == 2:
        raise UserError("--data_file and --data_dir: a run trains on one of them; leave the other out")
    if not (flags.get("sample") or flags.get("init_model_only")):
        with lock_folder(flags.get("output_dir", Config.output_dir)):
            pass
    start = open_start(flags)
    if flags.get("sample"):
        config = make_config(flags, None, start, resume)
        check_samples(config, start.path if start else "")
        return config, None, start
    if resume and not named:
        path = find_data(start.config.data_file, start.path)
        flags["data_dir" if os.path.isdir(path) else "data_file"] = path
    if flags.get("data_dir"):
        unlabelled = {name: value for name, value in flags.items() if name != "class_cond"}
        data = open_folder(flags["data_dir"], start.config if start else make_config(unlabelled))
    else:
        path = flags.get("data_file") or preset_flags(flags.get("preset") or default_preset(flags))["data_file"]
        if os.path.exists(path) or not flags.get("init_model_only") or "data_file" in flags:
            data = open_data(path)
    if data:
        flags["data_file"] = data.path
    config = make_config(flags, data, start, resume)
    if data:
        data.check(config)
    if resume and not named and (len(data.images), data.crc) != (start.state.data_images, start.state.data_crc):
        raise UserError(f"{data.path}: is not the data that {start.path} was trained on; name it, or this one, with --data_file")
    if not config.init_model_only:
        check_output_dir(config, start)
    return config, data, start
