"""Model files: weights and checkpoints as .bin, .pt and .safetensors, and unet.cu's. docs/FORMATS.md describes them byte by byte."""

from __future__ import annotations  # noqa: I001 (names side by side)

import dataclasses
import io
import json
import math
import os
import re
import warnings
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import files
from common.data_files import MOST_NAME_BYTES, Data, class_names_block, read_class_names
from common.config import make_config, validate
from common.files import MODEL_MAGIC, UNET_CU_MODEL_MAGIC
from common.flags import (
    CHECKPOINT_FLAGS, FLAGS, FOREIGN_PRESET, FREE_FLAGS, INTERVALS, MOST_EMAS, MOST_LEVELS, OBJECTIVES_OWN, PICTURE_KINDS, POWER_EMAS, SAVED_FLAGS, SLOTS, WORDS, Config, format_value, preset_flags,
)  # fmt: skip
from common.model import parameter_count, parameter_shapes, to_state_dict
from common.program import NOT_OF_DATA, UserError

HISTORY_LENGTH = 10  # losses of each t that a checkpoint keeps


class ModelFileError(UserError):
    """A model file that can't be used."""


# ======================================================================================================================
# .bin: a header of 256 int32, then float32 tensors in state_dict order: weights [, EMA][, both moments [, further EMAs][, losses]] [, names of classes]

HAS_EMA, HAS_TRAINING = 1, 2  # bits of "contents"

# Slots that hold no flag, or one that is more than a number of four bytes: slot, type (little-endian), how many. The names are Config's and
# TrainingState's where they have them. From slot 68 on all is zero in files without moments.
FIELDS: dict[str, tuple] = {
    "magic": (0, "<i4"), "version": (1, "<i4"), "contents": (2, "<i4"), "crc": (3, "<u4"), "parameters": (4, "<u8"), "image_size": (6, "<i4", 2),
    "levels": (22, "<i4"), "channel_mult": (23, "<f4", 8), "resolutions": (31, "<i4"), "attention_resolutions": (32, "<i4", 8),
    "step": (64, "<u8"), "seed": (66, "<u8"), "updates": (81, "<i4"), "bad_total": (82, "<i4"), "bad_in_row": (83, "<i4"),
    "data_images": (84, "<u8"), "data_crc": (86, "<u4"), "cond_crc": (113, "<u4"), "preset": (117, "<u4"), "val_crc": (118, "<u4"), "class_name_bytes": (119, "<i4"), "guard_kind": (87, "<i4"), "guard": (88, "<f8", 5), "more_emas": (98, "<i4"), "more_rates": (99, "<f4", MOST_EMAS - 1),
    "ema_rate": (79, "<f4"), "data_file": (128, "S512"), "cond": (62, "<i4", 2),
}  # fmt: skip
FIELDS |= {name: (slot, "<f4" if FLAGS[name].type == "float" else "<i4") for name, slot in SLOTS.items() if name not in FIELDS}


def header_type() -> np.dtype:
    """The header, with what is always zero as fields, too."""
    found: list[tuple] = []
    end = 0
    for name, (slot, *kind) in sorted(FIELDS.items(), key=lambda item: item[1]):
        if slot > end:
            found.append((f"slot {end}", "<i4", slot - end))
        found.append((name, *kind))
        end = np.dtype(found).itemsize // 4
    return np.dtype(found)


HEADER = header_type()

TUNES = "--objective ect: tunes models of --objective edm and flow, and {} was made with ddpm"


def unused_slots(header: Any) -> list[str]:
    """Flags that say nothing beside others in a header (or in a dictionary), and are 0 there."""
    unused = [] if header["learn_sigma"] else ["vlb_weight"]
    objective = header["objective"] if isinstance(header["objective"], str) else WORDS["objective"][header["objective"] % len(WORDS["objective"])]
    return unused + [name for name, whose in OBJECTIVES_OWN.items() if objective not in whose]


@dataclass
class TrainingState:
    """Where a run stands. guard: number of good steps, running mean and variance of the logarithms of loss and gradient norm."""

    step: int = 0  # finished steps
    updates: int = 0  # of the weights
    bad_total: int = 0
    bad_in_row: int = 0
    data_images: int = 0
    data_crc: int = 0
    cond_crc: int = 0  # of --cond_file
    preset: int = 0  # config.preset_checksum; 0: written by an older program
    val_crc: int = 0  # of the validation images; 0: there is none, or the file is older
    guard_kind: int = 0  # 1; 0: the guard is an older program's, without logarithms, and is not used
    save_interval: int = 0  # the run's, as the next two; 0: the file is older and has none of them
    sample_interval: int = 0
    num_samples: int = 0
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
    class_names: tuple[str, ...] = ()  # by their numbers; or empty

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

    def class_rows(self, data: Data, count: int) -> list[int]:
        """For each of `count` classes of a run that starts from this file, its row in the file's table of classes, or -1: the file does not know it. Classes
        are the same if their names are. Without names, the file knows data of no more classes than its own, by their numbers."""
        known = list(self.class_names)
        if known and data.class_names:
            rows = [known.index(name) if name in known else -1 for name in data.class_names]
        else:
            rows = list(range(self.config.num_classes)) if data.num_classes <= self.config.num_classes else []
        return (rows + [-1] * count)[:count]

    def knows_classes(self, data: Data) -> bool:
        """Whether this file's model has all classes of the data."""
        return -1 not in self.class_rows(data, data.num_classes)

    def adapted(self, data: Data, flags: dict[str, Any]) -> dict[str, Any]:
        """The flags that a run which starts from this file (--init) takes from its data, unless they are given: size and channels of the images, and the
        classes, unless the model has all of them."""
        channels, *size = data.images.shape[1:]
        taken = {"image_size": tuple(size), "in_channels": channels}
        if self.config.class_cond and not self.knows_classes(data):
            taken["num_classes"] = data.num_classes
        taken |= {name: flags[name] for name in taken if name in flags}
        # Attention stays at the same levels, whose heights grow with the images.
        height, now = self.config.image_size[0], taken["image_size"][0]
        taken["attention_resolutions"] = tuple(r * now // height for r in self.config.attention_resolutions)
        if self.config.cond and "cond_channels" not in flags:
            taken["cond_channels"] = 0  # as many as --cond makes of the images
        return taken

    def inherit(self, flags: dict[str, Any], resume: bool, adapts: bool = False) -> dict[str, Any]:
        """The flags of a run that starts from this file, or resumes it; UserError if a given one says otherwise about the model. adapts: the run may have
        other images and classes (adapted)."""
        others = {name for name, objectives in OBJECTIVES_OWN.items() if self.config.objective not in objectives}  # this file says nothing of them
        inherited = {name: getattr(self.config, name) for name in (CHECKPOINT_FLAGS if resume else SAVED_FLAGS) if name not in others}
        if resume and self.state.save_interval:
            inherited |= {name: getattr(self.state, name) for name in INTERVALS}
        if flags.get("sample"):  # how a model was trained does not say how to sample it
            inherited.pop("precision", None)
        if flags.get("objective") == "ect" != self.config.objective and not resume:  # its frame stays
            if self.config.objective == "ddpm":
                raise UserError(TUNES.format(self.path))
            inherited |= {"objective": "ect", "ect_frame": self.config.objective}
        as_saved = Config(**flags)  # in float32
        kept = {*SAVED_FLAGS, *(["seed", "optimizer", "val_fraction"] if resume else [])} - FREE_FLAGS
        if adapts:
            kept -= {"image_size", "in_channels", "num_classes"}
        for name in flags.keys() & inherited.keys() & kept:
            if getattr(as_saved, name) != inherited[name]:
                given, there = format_value(name, flags[name]), format_value(name, inherited[name])
                made = f"with {there}" if there else "without it"
                raise UserError(f"--{name} {given}: {self.path} was made {made}; leave the flag out")
        return inherited

    def metadata(self) -> dict[str, dict[str, Any]]:
        """What the header of a .bin says, for the other formats."""
        names = CHECKPOINT_FLAGS if self.m is not None else [*SAVED_FLAGS, "seed"]
        found: dict[str, Any] = {"config": {n: getattr(self.config, n) for n in names}, "state": dataclasses.asdict(self.state)}
        return found | ({"class_names": list(self.class_names)} if self.class_names else {})

    def class_names_block(self) -> bytes:
        """The names as a .bin holds them."""
        return class_names_block(self.class_names, self.config.num_classes)

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
        elif name == "cond_file":
            continue  # it lies behind data_file
        elif name == "data_file":
            value = "\0".join([value, values["cond_file"]]).encode(errors="surrogateescape")  # a name need not be UTF-8
        elif name == "cond":  # a word's number, and lowres's factor
            kind, _, factor = value.partition(":")
            value = PICTURE_KINDS.index(kind), int(factor or 0)
        elif isinstance(value, str):  # one of several words, as its number
            value = WORDS[name].index(value)
        header[name] = value
    for name in unused_slots(header):
        header[name] = 0
    if not header["cond_channels"]:
        header["cond_crc"] = header["cond_noise"] = 0
    header["magic"], header["version"], header["parameters"] = MODEL_MAGIC, 1, len(file.weights)
    header["class_name_bytes"] = len(file.class_names_block())
    header["contents"] = HAS_EMA * (file.ema is not None) | HAS_TRAINING * (file.m is not None)
    return header


def unpack_header(header: np.ndarray) -> tuple[Config, TrainingState]:
    """The configuration and state in a header whose magic and contents are right."""
    values: dict[str, Any] = {name: header[name].tolist() for name in HEADER.names}
    values["channel_mult"] = values["channel_mult"][: values["levels"]]
    values["attention_resolutions"] = values["attention_resolutions"][: values["resolutions"]]
    values["ema_rate"] = [values["ema_rate"], *values["more_rates"][: max(values["more_emas"], 0)]]
    values["data_file"], _, values["cond_file"] = values["data_file"].decode(errors="surrogateescape").partition("\0")
    kind, factor = values["cond"]
    check_field("", "cond", kind, 0, len(PICTURE_KINDS) - 1)
    values["cond"] = PICTURE_KINDS[kind] + (f":{factor}" if factor else "")
    for name in CHECKPOINT_FLAGS:
        if name in WORDS:
            if not 0 <= values[name] < len(WORDS[name]):
                raise UserError(f"--{name} {values[name]}: must be one of {'|'.join(WORDS[name])}")
            values[name] = WORDS[name][values[name]]
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
    n, _, var_l, _, var_g = state.guard
    if state.guard_kind not in (0, 1):
        raise UserError(f"a guard of the kind {state.guard_kind}, where 0 and 1 are possible")
    if state.updates < 0 or state.updates + state.bad_total != state.step or state.step > config.max_steps:
        told = f"{state.updates} updates and {state.bad_total} skipped steps must add up to it"
        raise UserError(f"step {state.step} of at most {config.max_steps}, where {told}")
    intervals = [getattr(state, name) for name in INTERVALS]
    if min(intervals) < 0 or (max(intervals) > 0 and not (state.save_interval and state.num_samples)):
        raise UserError(f"{', '.join(INTERVALS)} {intervals}")
    if not 0 <= state.bad_in_row <= state.bad_total:
        raise UserError(f"{state.bad_in_row} skipped steps in a row, where {state.bad_total} were skipped in all")
    if not (0 <= n <= state.updates and n == int(n)) or not math.isfinite(sum(state.guard)) or min(var_l, var_g) < 0:
        raise UserError(f"running means of loss and gradient norm that {state.updates} updates can't give")


def bin_chunks(file: ModelFile) -> list[np.ndarray]:
    history = [file.history] if file.history is not None else []
    header, arrays = pack_header(file), [np.ascontiguousarray(a, "<f4") for a in [*file.arrays().values(), *history]]
    arrays.append(np.frombuffer(file.class_names_block(), np.uint8))
    header["crc"] = checksum(header, arrays)
    return [header, *arrays]


def checksum(header: np.ndarray, arrays: Iterable[np.ndarray]) -> int:
    crc = zlib.crc32(header.tobytes())
    for a in arrays:
        crc = zlib.crc32(a, crc)
    return crc


def read_header(path: str) -> np.ndarray:
    """The header of a .bin file, as it is there."""
    with files.open_file(path) as file:
        start = np.frombuffer(bytearray(file.read(HEADER.itemsize)), np.uint8)  # a bytearray, so that it can be changed
    if len(start) < HEADER.itemsize:
        raise ModelFileError(f"{path}: is only {len(start)} bytes long, shorter than a header ({HEADER.itemsize} bytes)")
    return start.view(HEADER).reshape(())


def check_field(path: str, field: str, value: int, low: int, high: int) -> None:
    """ModelFileError if a field of a header is no number from low to high."""
    if not low <= value <= high:
        told = f"{field}: {value}, where {low} to {high} is possible"
        raise ModelFileError(f"{path}: its header is damaged ({told}): move it away and use an earlier checkpoint")


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
    check_field(path, "contents", contents, 0, HAS_EMA | HAS_TRAINING)
    check_field(path, "parameters", count, 1, 2**40)
    if training:
        check_field(path, "further averages", more, 0, MOST_EMAS - 1)
    names = ["weights"] + ["ema"] * bool(contents & HAS_EMA) + ["m", "v"] * training + [f"ema{k}" for k in range(2, 2 + more)] * training
    rows = max(int(header["diffusion_steps"]), 0) if training and header["schedule_sampler"] else 0
    name_bytes, classes = int(header["class_name_bytes"]), int(header["num_classes"])
    check_field(path, "bytes of names of classes", name_bytes, 0, MOST_NAME_BYTES * (classes > 0))
    words = count * len(names) + rows * (HISTORY_LENGTH + 1)  # before these names
    expected = 1024 + 4 * words + name_bytes
    if size != expected:
        raise ModelFileError(f"{path}: is {size} bytes long, but its header speaks of {expected}; it is cut or damaged")
    header["crc"] = 0
    values, block = np.memmap(path, "<f4", "r", 1024, words), np.fromfile(path, np.uint8, offset=1024 + 4 * words)
    arrays, history = values[: count * len(names)].reshape(-1, count), values[count * len(names) :].reshape(-1, HISTORY_LENGTH + 1)
    if checksum(header, [arrays, history, block]) != crc:
        raise ModelFileError(f"{path}: its checksum is wrong, so it was damaged; use another copy or checkpoint")
    check_field(path, "levels", int(header["levels"]), 1, MOST_LEVELS)
    check_field(path, "attention resolutions", int(header["resolutions"]), 0, MOST_LEVELS)
    config, state = trusted(path, unpack_header, header)
    if count != parameter_count(config):
        raise ModelFileError(f"{path}: holds {count} parameters, its model has {parameter_count(config)}")
    file = make_file(path, config, state, {name: np.array(a) for name, a in zip(names, arrays)}, np.array(history) if rows else None)
    file.class_names = tuple(trusted(path, lambda block: read_class_names(block, config.num_classes), block.tobytes()))
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


def is_plain(tensor: Any) -> bool:
    """Whether this is a tensor of real numbers in memory: files may hold others."""
    return isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.layout == torch.strided and tensor.device.type == "cpu"


def from_state_dict(config: Config, tensors: dict[str, Tensor], path: str) -> np.ndarray:
    """The flat array of a state_dict; ModelFileError names the first key that does not fit the configuration."""
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not is_plain(tensor):
            raise ModelFileError(f"{path}: {brief(name)} is no tensor of numbers")
    tensors = {name.removeprefix("_orig_mod.").removeprefix("module."): tensor for name, tensor in tensors.items()}
    shapes = parameter_shapes(config)
    hint = "the model flags (--help lists them) must be those that it was trained with"
    if tensors and not shapes.keys() & tensors.keys():
        told = f"none of its tensors ({brief(next(iter(tensors)))} is the first) is one of a UNet of guided-diffusion or unet.cu"
        raise ModelFileError(f"{path}: is of another network: {told}, and no flag makes it one")
    for name, shape in shapes.items():
        if name not in tensors:
            raise ModelFileError(f"{path}: lacks {name}, which a model with these flags has; {hint}")
        if tensors[name].shape != shape:
            there, here = list(tensors[name].shape), list(shape)
            raise ModelFileError(f"{path}: {name} has shape {there}, a model with these flags {here}; {hint}")
    for name in tensors:
        if name not in shapes:
            raise ModelFileError(f"{path}: has {name}, which a model with these flags lacks; {hint}")
    return torch.cat([to_float32(tensors[name].detach().flatten(), name, path) for name in shapes]).numpy()


def to_float32(tensor: Tensor, name: str, path: str) -> Tensor:
    """The tensor in float32; ModelFileError if it holds numbers that are finite, but beyond float32's range."""
    rounded = tensor.float()
    if not torch.equal(rounded.isfinite(), tensor.isfinite()):
        raise ModelFileError(f"{path}: {name} holds numbers beyond float32's range, in which weights are kept")
    return rounded


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


def words_of(values: Any) -> tuple[str, ...]:
    """values from a file, if they are a list of words."""
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError(f"{brief(values)} where names of classes should be")
    return tuple(values)


def saved_config(values: Any) -> Config:
    """The configuration that metadata() wrote; files from before the variational bound do not speak of it."""
    return valid({"timestep_respacing": "", "vlb_weight": 0.0} | typed(values, FLAGS))


def from_sections(path: str, sections: dict[str, Any], metadata: Any, history: Tensor | None, flags: dict[str, Any]) -> ModelFile:
    """A ModelFile from state_dicts and what metadata() says; without a configuration they are bare weights, whose shape flags give."""
    states = {f.name: f for f in dataclasses.fields(TrainingState)}
    if "config" in metadata:
        config = trusted(path, saved_config, metadata["config"])
    else:
        config = make_config({"preset": FOREIGN_PRESET} | flags)
    state = trusted(path, lambda values: TrainingState(**typed(values, states)), metadata.get("state", {}))
    arrays = {name: from_state_dict(config, tensors, path) for name, tensors in sections.items()}
    file = make_file(path, config, state, arrays, None if history is None else history.float().numpy())
    file.class_names = trusted(path, words_of, metadata.get("class_names", []))
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
    except (OSError, *NOT_OF_DATA):
        raise
    except Exception:  # noqa: BLE001 (torch and pickle raise nearly anything at a damaged file)
        raise damaged from None
    if not isinstance(saved, dict):
        raise damaged
    if "config" not in saved:  # somebody else's: a state_dict, perhaps under a name
        tensors = next((saved[k] for k in ("model", "state_dict") if isinstance(saved.get(k), dict)), saved)
        average = saved.get("ema")
        saved = {"model": {k: v for k, v in tensors.items() if isinstance(v, Tensor)}}
        if isinstance(average, dict) and average.keys() == tensors.keys():  # the same tensors, averaged
            saved["ema"] = {k: v for k, v in average.items() if isinstance(v, Tensor)}
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


def safetensors_content(path: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file, and those of its metadata that metadata() wrote."""
    import safetensors

    try:
        with safetensors.safe_open(path, "pt") as f:
            metadata = {key: json.loads(value) for key, value in (f.metadata() or {}).items() if key in ("config", "state", "class_names")}
            return {key: f.get_tensor(key) for key in f.keys()}, metadata  # noqa: SIM118 (it is no dictionary)
    except (OSError, *NOT_OF_DATA):
        raise
    except Exception:  # noqa: BLE001 (of a damaged file's tensors torch raises nearly anything)
        raise ModelFileError(f"{path}: is not a safetensors file, or is damaged") from None


def read_safetensors(path: str, flags: dict[str, Any]) -> ModelFile:
    sections: dict[str, dict[str, Tensor]] = {}
    tensors, metadata = safetensors_content(path)
    for key, tensor in tensors.items():
        name = next((n for n, prefix in SECTIONS.items() if prefix and key.startswith(prefix)), "weights")
        sections.setdefault(name, {})[key.removeprefix(SECTIONS[name])] = tensor
    history = sections.get("weights", {}).pop(HISTORY, None)
    if history is not None and not is_plain(history):
        raise ModelFileError(f"{path}: its history of losses is damaged")
    return from_sections(path, sections, metadata, history, flags)


# ======================================================================================================================
# files by their names


READERS: dict[str, Callable] = {".bin": read_bin, ".pt": read_pt, ".pth": read_pt, ".safetensors": read_safetensors}
WRITERS: dict[str, Callable] = {".bin": bin_chunks, ".pt": pt_chunks, ".pth": pt_chunks, ".safetensors": safetensors_chunks}


def kind_of(path: str) -> str:
    """The end of a model file's name; ModelFileError if it is none."""
    if Path(path).suffix not in READERS:
        raise ModelFileError(f"{path}: is of no known kind; model files end in .bin, .pt or .safetensors, and folders of diffusers' in /")
    return Path(path).suffix


def write_model(path: str, file: ModelFile) -> None:
    """Writes .bin, .pt or .safetensors, whole or not at all."""
    files.atomic_write(path, WRITERS[kind_of(path)](file))


def checkpoints(folder: str) -> dict[int, str]:
    """step -> file, of the checkpoints in a folder, oldest first."""
    found = ((re.fullmatch(r"model_(\d+)\.bin", p.name), str(p)) for p in Path(folder).glob("model_*.bin"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def check_folder(flag: str, path: str, source: str) -> None:
    """Before it is made: UserError if a folder would replace what is read, or one that holds a run."""
    target = Path(path)
    if Path(source).resolve().is_relative_to(target.resolve()):
        raise UserError(f"{flag} {path}: would replace {source}, which is read; choose another name")
    if target.is_dir() and (checkpoints(path) or (target / "log.csv").exists()):
        raise UserError(f"{flag} {path}: holds a run; choose another name")
