"""The door for people who know PyTorch: a model file as a torch.nn.Module, and what is to be drawn with it as tensors.

    from train_unet import load, sample
    model = load("out/model_0000400.bin")
    images = sample(model, 16)  # (16, C, H, W) in [-1, 1]

load is here. sample stands in train_unet.py beside the samplers; sampling_config, here, turns its arguments into the flags of ./train_unet --sample,
and its tensors into the data files that these flags name. So every value is read, checked and refused in one place, the programs' own.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common.config import class_numbers, make_config, pick_device, pick_precision
from common.data_files import write_data
from common.flags import FLAGS, SAMPLING_FLAGS, SAVED_FLAGS, Config, format_value, parse_flags
from common.log import open_start
from common.model import UNetModel, build_model
from common.model_files import ModelFile
from common.program import UserError

LOADING = {"preset", "use_ema", "ema_rate", "precision", *SAVED_FLAGS}
DRAWING = {"seed", "batch_size", *SAMPLING_FLAGS}
Given = str | Path | Tensor | np.ndarray | None  # pictures: a picture file, a data file, or numbers


def load(path: str | Path, device: str = "auto", **flags: Any) -> UNetModel:
    """The network of a model file (.bin, .pt, .safetensors, or a folder of diffusers') in eval mode, with the average of the weights if there is one.

    model(x, timesteps, y): x (B, C, H, W) float32, timesteps (B), classes y (B) int64 -> (B, C or 2 C, H, W), as the model's objective means it.
    model.config has its settings; model.class_names the names of its classes by their numbers, or ().
    device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1". On a GPU it computes in bf16 unless precision="fp32".
    flags: use_ema=False for the weights themselves, ema_rate=0.999 for one of several averages, and preset="adm64" and other model flags
    for a state_dict that does not say its own shape."""
    told = read_flags(flags, LOADING)
    file = open_start({"init": str(Path(path))} | told).choose_ema(told.get("ema_rate"))
    config = make_config(told | {"device": str(device), "precision": told.get("precision", "auto")}, None, file)
    there = pick_device(config.device)
    model = build_model(config, file.weights_to_use(config.use_ema), there, pick_precision(config, there))
    model.config, model.class_names = file.config, file.class_names
    return model


def read_flags(flags: dict[str, Any], allowed: set[str]) -> dict[str, Any]:
    """Arguments of Python as the command line reads them. Those that are None are not given."""
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in flags.items() if value is not None}
    words = [f"--{name}={format_value(name, value) if isinstance(value, tuple) else value}" for name, value in given.items()]
    return parse_flags(words, {name: f for name, f in FLAGS.items() if name in allowed})


@contextlib.contextmanager
def sampling_config(model: nn.Module, n: int, image: Given, pictures: Given, flags: dict[str, Any]) -> Iterator[Config]:
    """The settings of ./train_unet --sample n with these flags. Files that they name last as long as the `with` block, and have short names in sentences."""
    if not hasattr(model, "config"):
        raise UserError(f"sample: takes a model that load() has read, not a {type(model).__name__}")
    if not isinstance(n, int) or n < 1:
        raise UserError(f"sample: draws one image or more, not {n}")
    if flags.get("strength") is not None and image is None:
        raise UserError(f"--strength {flags['strength']}: says how much of image is changed, and there is none")
    config: Config = model.config
    with tempfile.TemporaryDirectory() as folder:
        try:
            classes = flags["classes"]
            listed = [classes] if isinstance(classes, (int, str)) else classes
            numbers = None if classes is None else class_numbers(listed, model.class_names)
            told = read_flags(flags | {"classes": numbers, "values": table(flags["values"], folder)}, DRAWING)
            files = {"start_from": data_file("image", image, config.in_channels, config, folder)}
            files["cond_file"] = data_file("cond", pictures, config.in_channels if config.cond else config.cond_channels, config, folder)
            told |= {name: path for name, path in files.items() if path} | {"sample": n, "device": str(next(model.parameters()).device)}
            yield make_config(told, None, ModelFile(config, np.empty(0, np.float32)))
        except UserError as e:
            raise UserError(str(e).replace(f"{folder}/", "")) from None


def data_file(name: str, given: Given, channels: int, config: Config, folder: str) -> str | None:
    """The path of a data file: the one that is given, or one in this folder that holds the given picture file, or tensor (C, H, W) or (N, C, H, W)."""
    if given is None:
        return None
    if isinstance(given, (str, Path)):
        if Path(given).suffix == ".bin":
            return str(given)
        from common.pictures import picture_file  # needs Pillow, which who gives tensors does without

        return picture_file(name, str(given), channels, config, folder)
    array = torch.as_tensor(given).detach().cpu().numpy()
    if array.ndim not in (3, 4):
        raise UserError(f"{name}: has the shape {tuple(array.shape)}; (C, H, W) and (N, C, H, W) are taken")
    array = array.reshape(-1, *array.shape[-3:])
    write_data(f"{folder}/{name}.bin", array if array.dtype == np.uint8 else array.astype(np.float32))
    return f"{folder}/{name}.bin"


def table(values: Any, folder: str) -> str | None:
    """What --values says: the text that is given, or a table in this folder of rows (N, cond_dim), of which one may stand alone."""
    if values is None or isinstance(values, str):
        return values
    rows = np.atleast_2d(torch.as_tensor(values).cpu().numpy().astype(np.float32)).tolist()
    Path(f"{folder}/values.csv").write_text("\n".join(",".join(map(str, row)) for row in rows))
    return f"{folder}/values.csv"
