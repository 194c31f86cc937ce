"""Train a diffusion UNet in PyTorch: the twin of train_unet.cu.

The same model (guided-diffusion's module names and state_dict keys), the same random numbers (counter-based: every
draw is a function of seed, purpose, step and sample), the same step and the same files, so that a run of either
program can be compared with the other's line by line, and continued by it.

  python train_unet.py                                   train the default preset into out/
  python train_unet.py --data_dir PICTURES               on your own pictures
  python train_unet.py --resume_checkpoint latest        continue the run in out/
  python train_unet.py --init_model_only True            write initial weights to unet_init.bin
  python train_unet.py --convert model.bin model.pt      between .bin, .pt and .safetensors
  python train_unet.py --bench 20 --preset unet64        time steps and forward passes, as make bench does
  python train_unet.py --help                            every flag

Contents, in the order in which data meets them:
  flags          Config, presets, what can work and what can't
  randomness     Philox4x32-10: words, normals, the order of the data
  data           .bin files and folders; training_batch(): what one step trains on
  model          UNetModel and its initial weights
  diffusion      noise schedule, loss, samplers
  model files    .bin, .pt, .safetensors
  training       Trainer: one step, the guard, checkpoints
  benchmark      PyTorch at its fastest: the step and the forward pass as CUDA graphs, timed
  output         log.csv, grids, loss.png
  a run          from the command line to the training loop
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import fcntl
import io
import json
import math
import os
import re
import shutil
import signal
import socket
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import prepare_data


class Absent(type):
    """The class of a stand-in for packages that are not installed: whatever is asked of it is the stand-in again, which can be called and
    derived from. So these files can be loaded, and print their --help."""

    def __getattr__(cls, _: str) -> Any:
        return cls

    def __call__(cls, *_: Any, **__: Any) -> Any:
        return cls


MISSING = ""  # the package without which there is only --help
try:
    import numpy as np
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.checkpoint import checkpoint
except ModuleNotFoundError as e:
    MISSING = e.name or ""
    np = torch = nn = F = checkpoint = Absent("absent", (Exception,), {})  # so that "except torch.Error" works, too


class UserError(Exception):
    """What one sentence explains: main() prints it after "train_unet: " and exits with 1."""


class ModelFileError(UserError):
    """A model file that can't be used."""


class DataFileError(UserError):
    """A data file that can't be used."""


# ======================================================================================================================
# flags

BIG, MOST_EMAS = 10**9, 8


def flag(default: Any, text: str, low: float = 0, high: float = 0, choices: str = "", group: str = "") -> Any:
    """One flag: what --help says, low..high for numbers, "a|b" for words; group is set on the first flag of a group."""
    meta = {"help": text, "low": low, "high": high, "choices": choices, "group": group}
    return field(default=default, metadata=meta)


@dataclass
class Config:
    """Every flag, as an attribute; make_config() is how to get a valid one."""

    preset: str = flag(
        "", "flags to start from; any other flag wins", choices="fashion32|emoji64|unet64|adm|adm64|adm128|adm256|lsun256", group="Start"
    )
    sample: int = flag(0, "draw this many images from --init FILE into --output, and stop", 0, 10**8)
    init_model_only: bool = flag(False, "write initial weights to --init_model_filename, and stop")
    bench: int = flag(0, "time this many training steps and forward passes on synthetic data, print a line of JSON, and stop", 0, 10**6)
    convert: tuple[str, str] = flag((), "IN OUT: convert a model file (.bin, .pt, .safetensors), and stop")

    image_size: tuple[int, int] = flag((32, 32), "pixels: 64, or HxW such as 48x64 (default: the data's)", group="Model")
    in_channels: int = flag(1, "channels of an image (default: the data's)", 1, 64)
    num_channels: int = flag(32, "channels of the first level, a multiple of 32", 32, 8192)
    num_res_blocks: int = flag(1, "residual blocks per level", 1, 32)
    channel_mult: tuple[float, ...] = flag((1, 2, 2), "channels of each level, as multiples of num_channels")
    attention_resolutions: tuple[int, ...] = flag((8,), "image heights at which there is attention; may be empty")
    num_heads: int = flag(4, "attention heads", 1, 1024)
    num_head_channels: int = flag(32, "channels per head instead of num_heads; -1: use num_heads", -1, 8192)
    num_heads_upsample: int = flag(-1, "heads in the upward half; -1: num_heads", -1, 1024)
    dropout: float = flag(0.0, "probability", 0, 0.99)
    class_cond: bool = flag(False, "condition on the labels of the data")
    num_classes: int = flag(0, "classes (default: the data's)", 0, 10**6)
    class_dropout: float = flag(0.0, "probability of training an image without its class, for --guidance_scale", 0, 0.99)
    learn_sigma: bool = flag(False, "twice the output channels, for a learned variance")
    use_scale_shift_norm: bool = flag(False, "the embedding scales and shifts the second norm of a block")
    resblock_updown: bool = flag(False, "residual blocks change the resolution")
    conv_resample: bool = flag(True, "convolutions change the resolution (False: average pool and nearest, as unet.cu)")
    use_new_attention_order: bool = flag(True, "qkv's rows are ordered q, k, v, then heads; False: heads first")
    max_period: int = flag(10000, "slowest period of the timestep embedding, in steps (unet.cu: 1000)", 1, 10**8)

    diffusion_steps: int = flag(1000, "T, steps of the forward process", 2, 100000, group="Diffusion")
    noise_schedule: str = flag("linear", "how beta grows with t", choices="linear|cosine")
    rescale_timesteps: bool = flag(False, "tell the network 1000 t / T instead of t")
    objective: str = flag("ddpm", "what is trained: T steps (Ho et al. 2020), or any sigma (Karras et al. 2022)", choices="ddpm|edm")
    predict: str = flag("eps", "what the network answers with: the noise, x_0, or signal * noise - sigma * x_0", choices="eps|x0|v")
    predict_xstart: bool = flag(False, "guided-diffusion's name for --predict x0")
    min_snr_gamma: float = flag(0.0, "weigh the loss by min(SNR, gamma), Hang et al. 2023; 0: don't", 0, 10**6)
    vlb_weight: float = flag(1e-3, "with --learn_sigma: weight of the variational bound in the loss; 0: no variance is learned", 0, 1000)
    rescale_learned_sigmas: bool = flag(True, "guided-diffusion's --vlb_weight: True 1/1000, False 1/T")
    use_kl: bool = flag(False, "train on the variational bound alone")
    sigma_small: bool = flag(False, "the smaller of the two fixed variances, where none is learned")
    sigma_data: float = flag(0.5, "edm: standard deviation of the data", 1e-3, 1e3)
    P_mean: float = flag(-1.2, "edm: mean of ln(sigma) in training", -20, 20)
    P_std: float = flag(1.2, "edm: its standard deviation", 0, 20)

    sampler: str = flag("ddim", "for the grids and --sample; any works with any objective", choices="ddim|ddpm|euler|heun|dpmpp_2m", group="Sampling")
    timestep_respacing: str = flag("50", "the sampler's steps: 50, ddim25, 10,15,20 (of equal parts of T); empty: all")
    eta: float = flag(0.0, "ddim's noise: 0 deterministic, 1 as ddpm", 0, 1)
    sigma_min: float = flag(0.002, "euler, heun, dpmpp_2m: the last sigma before 0 (the model's, if that is larger)", 1e-6, 1e6)
    sigma_max: float = flag(80.0, "the first sigma (the model's, if that is smaller)", 1e-6, 1e6)
    rho: float = flag(7.0, "the larger, the shorter the steps at low sigma", 0.1, 1000)
    S_churn: float = flag(0.0, "euler, heun: noise added anew, in all steps together", 0, 1e6)
    S_min: float = flag(0.0, "at sigmas from here", 0, 1e9)
    S_max: float = flag(1e9, "to here", 0, 1e9)
    S_noise: float = flag(1.0, "times this", 0, 10)
    clip_denoised: bool = flag(True, "clip the predicted x_0 to [-1, 1] while sampling")
    dynamic_threshold: float = flag(0.0, "clip x_0 to this quantile of its |values| instead, if that is above 1, and divide by it; 0: don't", 0, 1)
    classes: tuple[int, ...] = flag((), "classes of the images, such as 3,5, in turns (default: all)")
    guidance_scale: float = flag(1.0, "1: the class alone; above: away from what it is without class; needs --class_dropout", 0, 1000)
    noise_seed: int = flag(-1, "of the sampler's noise; -1: seed", -1, 9 * 10**15)

    max_steps: int = flag(1000, "training steps in all", 1, 2 * BIG, group="Training")
    batch_size: int = flag(16, "images per step", 1, 10**6)
    microbatch: int = flag(0, "images at a time, gradients added up to batch_size; 0 or -1: all at once", 0, 10**6)
    use_checkpoint: bool = flag(False, "compute the insides of blocks again for the backward pass: half the activations, more time")
    lr: float = flag(1e-3, "learning rate", 0, 100)
    lr_schedule: str = flag("constant", "after the warmup, to 0 at max_steps or not", choices="constant|linear|cosine")
    warmup_steps: int = flag(0, "steps over which lr rises from 0", 0, BIG)
    lr_anneal_steps: int = flag(0, "guided-diffusion's: lr falls to 0 over so many steps, the last ones; 0: never", 0, 2 * BIG)
    schedule_sampler: str = flag("uniform", "how t is drawn", choices="uniform|loss-second-moment")
    weight_decay: float = flag(0.0, "AdamW's, per unit of lr", 0, 100)
    adam_beta1: float = flag(0.9, "decay of the first moment", 0, 0.999999)
    adam_beta2: float = flag(0.999, "decay of the second moment", 0, 0.999999)
    adam_eps: float = flag(1e-8, "added to the root of the second moment", 1e-30, 1)
    grad_clip: float = flag(1.0, "largest global norm of the gradient; 0: no clipping", 0, 1e30)
    ema_rate: tuple[float, ...] = flag((0.995,), "decay of the averaged weights; of 0.9999,0.999 both are kept, pictures use the first")
    max_bad_steps: int = flag(10, "stop after so many skipped steps in a row", 1, BIG)
    seed: int = flag(0, "of everything random", 0, 9 * 10**15)

    data_file: str = flag("data/fashion32.bin", "images, from prepare_data.py", group="Data and files")
    data_dir: str = flag("", "a folder of images in place of data_file; sub-folders are classes")
    random_flip: bool = flag(False, "mirror half of the images")
    val_data_file: str = flag("", "images whose loss is logged but not trained on (the first 512)")
    val_interval: int = flag(100, "steps between two validation losses", 1, BIG)
    init: str = flag("", "start from the weights of this file, whose model flags then hold")
    resume_checkpoint: str = flag("", "continue the run of this checkpoint, or of output_dir's latest one: latest")
    output_dir: str = flag("out", "folder for the log, pictures and checkpoints")
    output: str = flag("samples.png", "--sample's file: .png (one grid) or .bin (float images)")
    use_ema: bool = flag(True, "--sample draws from the averaged weights if the file has them")
    init_model_filename: str = flag("unet_init.bin", "--init_model_only's file")
    save_interval: int = flag(500, "steps between two checkpoints", 1, BIG)
    keep_checkpoints: int = flag(3, "checkpoints kept, the newest; 0: all", 0, BIG)
    sample_interval: int = flag(250, "steps between two grids of samples; 0: none", 0, BIG)
    num_samples: int = flag(36, "images in a grid", 1, 4096)
    log_interval: int = flag(10, "steps between two lines on the screen, of which there is one in ten seconds at least", 1, BIG)

    device: str = flag("auto", "auto (a GPU if there is one), the number of a GPU, cpu, cuda, cuda:1, ...", group="PyTorch")
    compile: str = flag("auto", "torch.compile the model; auto: on a GPU", choices="auto|0|1")
    precision: str = flag("auto", "fp32 (no TF32) or bf16 (autocast); auto: bf16 on a GPU", choices="auto|fp32|bf16")
    use_fp16: bool = flag(False, "guided-diffusion's name for --precision: True bf16, False fp32")
    fp16_scale_growth: float = flag(1e-3, "guided-diffusion's, for fp16's loss scale; bf16 has none", 0, 1e9)
    bench_mode: str = flag("auto", "what --bench times; graph: compiled, one CUDA graph; auto: that on a GPU", choices="auto|eager|compile|graph")
    bench_parts: str = flag("both", "what of it; one alone compiles faster", choices="both|step|forward")

    def __post_init__(self) -> None:
        for name in (n for n, f in FLAGS.items() if f.type == "float"):  # float32, as files and the C++ program hold it
            setattr(self, name, float(np.float32(getattr(self, name))))
        rates = self.ema_rate if isinstance(self.ema_rate, (tuple, list)) else (self.ema_rate,)
        self.channel_mult, self.ema_rate = (tuple(float(np.float32(m)) for m in values) for values in (self.channel_mult, rates))

    @property
    def null_class(self) -> bool:
        """Whether the class embedding has a row for "no class", after those of all classes."""
        return self.class_cond and self.class_dropout > 0

    @property
    def learned_variance(self) -> bool:
        return self.learn_sigma and (self.vlb_weight > 0 or self.use_kl)

    @property
    def out_channels(self) -> int:
        return 2 * self.in_channels if self.learn_sigma else self.in_channels

    def channels(self, level: int) -> int:
        return int(self.channel_mult[level] * self.num_channels)

    def has_attention(self, level: int) -> bool:
        return any(r * 2**level == self.image_size[0] for r in self.attention_resolutions)


FLAGS: dict[str, dataclasses.Field] = {f.name: f for f in dataclasses.fields(Config)}

# What guided-diffusion's published models of 128x128 and 256x256 have in common.
ADM = """ --in_channels 3 --num_channels 256 --num_res_blocks 2 --attention_resolutions 32,16,8 --use_scale_shift_norm True --resblock_updown True
        --use_new_attention_order False --learn_sigma True --noise_schedule linear --lr 1e-4 --ema_rate 0.9999 --sample_interval 5000
        --save_interval 5000 --log_interval 50"""
# The same texts as the C++ program's.
PRESETS = {
    # clothing in a few minutes on two CPU cores
    "fashion32": """--image_size 32 --in_channels 1 --num_channels 32 --channel_mult 1,2,2 --num_res_blocks 1 --attention_resolutions 8
        --num_head_channels 32 --noise_schedule cosine --eta 1 --batch_size 16 --lr 2e-3 --warmup_steps 100 --lr_schedule linear --adam_beta2 0.99
        --max_steps 1000 --ema_rate 0.98 --data_file data/fashion32.bin --sample_interval 250 --save_interval 500 --log_interval 10""",
    # 64x64 pictures, half an hour on two CPU cores
    "emoji64": """--image_size 64 --in_channels 3 --num_channels 32 --channel_mult 1,1,2,4 --num_res_blocks 1 --attention_resolutions 8
        --num_head_channels 32 --conv_resample False --noise_schedule cosine --predict v --eta 1 --batch_size 8 --lr 1e-3 --warmup_steps
        100 --lr_schedule linear --adam_beta2 0.99 --max_steps 7000 --ema_rate 0.995 --data_file data/emoji64.bin --sample_interval 1000
        --save_interval 1000 --log_interval 10""",
    # unet.cu's model; emoji in a few minutes on an H200
    "unet64": """--image_size 64 --in_channels 3 --num_channels 64 --channel_mult 1,2,3,4 --num_res_blocks 2 --attention_resolutions 16,8
        --num_head_channels 32 --conv_resample False --noise_schedule cosine --eta 1 --timestep_respacing 100 --batch_size 32 --lr 4e-4
        --warmup_steps 500 --lr_schedule cosine --adam_beta2 0.99 --max_steps 25000 --ema_rate 0.999 --data_file data/emoji64.bin
        --sample_interval 2500 --save_interval 5000 --log_interval 50""",
    # guided-diffusion's defaults, for which its recipes are written, and its published models of ImageNet and LSUN
    "adm": """--image_size 64 --in_channels 3 --num_channels 128 --num_res_blocks 2 --attention_resolutions 16,8 --num_heads 4
        --use_scale_shift_norm True --use_new_attention_order False --num_classes 1000 --noise_schedule linear --rescale_learned_sigmas False
        --batch_size 1 --lr 1e-4 --grad_clip 0 --max_steps 1000000 --ema_rate 0.9999 --data_file data/imagenet64.bin --save_interval 10000
        --sample_interval 10000""",
    "adm64": """--image_size 64 --in_channels 3 --num_channels 192 --channel_mult 1,2,3,4 --num_res_blocks 3 --attention_resolutions 32,16,8
        --num_head_channels 64 --use_scale_shift_norm True --resblock_updown True --learn_sigma True --class_cond True --num_classes 1000
        --dropout 0.1 --noise_schedule cosine --batch_size 32 --lr 1e-4 --max_steps 540000 --ema_rate 0.9999 --data_file data/imagenet64.bin
        --sample_interval 5000 --save_interval 5000 --log_interval 50""",
    "adm128": """--image_size 128 --num_heads 4 --class_cond True --num_classes 1000 --batch_size 16 --max_steps 4360000
        --data_file data/imagenet128.bin"""
    + ADM,
    "adm256": """--image_size 256 --num_head_channels 64 --class_cond True --num_classes 1000 --batch_size 8
        --max_steps 1980000 --data_file data/imagenet256.bin"""
    + ADM,
    "lsun256": """--image_size 256 --num_head_channels 64 --dropout 0.1 --batch_size 8 --max_steps 1000000
        --data_file data/lsun256.bin"""
    + ADM,
}
FOREIGN_PRESET = "adm"  # what a state_dict without a configuration, most likely guided-diffusion's, does not say
# guided-diffusion's channel_mult by image height, for --channel_mult ""
DEFAULT_CHANNEL_MULT = {512: (0.5, 1, 1, 2, 2, 4, 4), 256: (1, 1, 2, 2, 4, 4), 128: (1, 1, 2, 3, 4), 64: (1, 2, 3, 4)}


# What to do instead of flags that other programs have.
CLASSIFIERS = "there are no classifiers here; train with --class_dropout 0.1 and sample with --guidance_scale"
UPSAMPLERS = "there are no upsamplers here; --image_size is the size of what is drawn"
SAMPLING_PROGRAM = "python generate.py takes it; here it is --sample N --init FILE with --sampler"
ELSEWHERE = dict.fromkeys(["iterations", "anneal_lr"], CLASSIFIERS) | dict.fromkeys(["large_size", "small_size", "base_samples"], UPSAMPLERS)
ELSEWHERE |= dict.fromkeys(["model_path", "use_ddim"], SAMPLING_PROGRAM)


def preset_flags(preset: str) -> dict[str, Any]:
    """What a preset sets; what it leaves open and Config has fashion32's value for is open."""
    return {"num_head_channels": -1, "channel_mult": ()} | parse_flags(PRESETS[preset].split(), FLAGS)


def parse_value(f: dataclasses.Field, text: str) -> Any:
    """The value of a flag from its text."""
    try:
        if f.type == "bool":
            return {"True": True, "true": True, "1": True, "False": False, "false": False, "0": False}[text]
        if f.type in ("int", "float"):
            return int(text) if f.type == "int" else float(text)
        if f.name == "image_size":
            height, _, width = text.partition("x")
            return int(height), int(width or height)
        if f.type.startswith("tuple"):
            return tuple((float if "float" in f.type else int)(v) for v in text.split(",")) if text else ()
        return text
    except (ValueError, KeyError):
        wanted = {
            "bool": "True or False",
            "int": "a whole number",
            "float": "a number",
            "tuple[int, int]": "64 or 48x64",
        }
        raise UserError(f"--{f.name} {text}: must be {wanted.get(f.type, 'numbers with commas')}") from None


def format_value(name: str, value: Any) -> str:
    """The text that parse_value reads."""
    if name == "image_size":
        return f"{value[0]}" if value[0] == value[1] else f"{value[0]}x{value[1]}"
    if isinstance(value, tuple):
        return ",".join(f"{v:g}" if isinstance(v, float) else str(v) for v in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def parse_flags(argv: list[str], flags: dict[str, dataclasses.Field], intro: str = "") -> dict[str, Any]:
    """What a command line (--name value or --name=value) sets, as {name: value}. Prints and leaves on --help."""
    given: dict[str, Any] = {}
    words = iter(argv)
    for word in words:
        if word in ("--help", "-h"):
            print_help(flags, intro)
            sys.exit(0)
        if not word.startswith("--"):
            raise UserError(f"{word}: is not a flag; flags look like --batch_size 16, and --help lists them")
        name, equals, text = word[2:].partition("=")
        if name not in flags:
            instead = CLASSIFIERS if name.startswith("classifier_") else ELSEWHERE.get(name)
            nearest = "".join(f"; did you mean --{flag}?" for flag in difflib.get_close_matches(name, flags, 1))
            raise UserError(f"--{name}: {instead or f'there is no such flag{nearest}; --help lists those there are'}")
        if name in given:
            raise UserError(f"--{name}: is given twice; once is enough")
        text = text if equals else next(words, None)
        if text is None:
            raise UserError(f"--{name}: its value is missing")
        if name == "convert":
            given[name] = (text, next(words, ""))
            continue
        if name == "microbatch" and text == "-1":  # guided-diffusion's "all at once"
            text = "0"
        given[name] = parse_value(flags[name], text)
        check_range(flags[name], given[name])
    return given


def print_help(flags: dict[str, dataclasses.Field], intro: str) -> None:
    print(intro)
    for name, f in flags.items():
        m, default = f.metadata, format_value(name, f.default)
        print(f"\n{m['group']}" * bool(m["group"]), end="\n" * bool(m["group"]))
        choices = f" ({m['choices']})" if m["choices"] else ""
        print(f"  --{name:25s} {m['help']}{choices} [{default or chr(34) * 2}]")
    print("\nPresets: without --preset fashion32, or for images of 64x64 emoji64; on a GPU unet64")
    for preset, text in PRESETS.items():
        print(f"  {preset:10s}", " ".join(text.split()))


def check_range(f: dataclasses.Field, value: Any) -> None:
    m = f.metadata
    if m["choices"] and value not in m["choices"].split("|") and (value or f.name != "preset"):
        raise UserError(f"--{f.name} {value}: must be one of {m['choices'].replace('|', ', ')}")
    if f.type in ("int", "float") and not m["low"] <= value <= m["high"]:
        kind = "whole number" if f.type == "int" else "number"
        raise UserError(f"--{f.name} {value}: must be a {kind} from {m['low']:.10g} to {m['high']:.10g}")


def validate(config: Config) -> None:
    """UserError, with what would work, if a model or a run with these flags can't."""

    def check(ok: bool, name: str, wanted: str) -> None:
        if not ok:
            raise UserError(f"--{name} {format_value(name, getattr(config, name))}: {wanted}")

    for f in FLAGS.values():
        check_range(f, getattr(config, f.name))
    height, width = config.image_size
    check(4 <= height <= 4096 and 4 <= width <= 4096, "image_size", "must be a number of pixels from 4 to 4096, or HxW")
    if not config.channel_mult:
        check(height in DEFAULT_CHANNEL_MULT, "channel_mult", f"must be given for images {height} high, such as 1,2,2")
        config.channel_mult = tuple(map(float, DEFAULT_CHANNEL_MULT[height]))
    levels = len(config.channel_mult)
    check(levels <= 8, "channel_mult", "must be 1 to 8 numbers with commas, such as 1,2,3,4")
    depth = 2 ** (levels - 1)
    wanted = f"must be a multiple of {depth}, because {levels} levels halve it {levels - 1} times"
    check(height % depth == 0 and width % depth == 0, "image_size", wanted)
    check(config.num_channels % 32 == 0, "num_channels", "must be a multiple of 32 (group norm has 32 groups)")
    for level, m in enumerate(config.channel_mult):
        ok = 0 < m <= 64 and config.channels(level) >= 32 and config.channels(level) % 32 == 0
        check(ok, "channel_mult", f"{m:g} * num_channels {config.num_channels} must be a positive multiple of 32")
    check(len(config.attention_resolutions) <= 8, "attention_resolutions", "must be up to 8 heights, such as 16,8")
    heights = [height // 2**level for level in range(levels)]
    for r in config.attention_resolutions:
        wanted = f"{r} never occurs; the heights of this model are {', '.join(map(str, heights))}"
        check(r in heights, "attention_resolutions", wanted)
    for level in (lv for lv in range(levels) if config.has_attention(lv) or lv == levels - 1):  # and the middle block
        ch, wanted = config.channels(level), "must divide the {} channels where there is attention"
        if config.num_head_channels != -1:
            ok = config.num_head_channels > 0 and ch % config.num_head_channels == 0
            check(ok, "num_head_channels", wanted.format(ch) + "; 32 does")
        else:
            check(ch % config.num_heads == 0, "num_heads", wanted.format(ch))
            up = config.num_heads if config.num_heads_upsample == -1 else config.num_heads_upsample
            check(up > 0 and ch % up == 0, "num_heads_upsample", wanted.format(ch))
    if config.class_cond:
        check(config.num_classes > 0, "num_classes", "must say how many classes --class_cond True conditions on")
    else:
        config.num_classes = 0
        check(config.class_dropout == 0, "class_dropout", "there is no class to leave out without --class_cond True")
    if config.objective == "edm":
        for name in ("predict", "learn_sigma", "schedule_sampler", "use_kl", "min_snr_gamma", "rescale_timesteps"):
            wanted = "is for --objective ddpm; edm has a prediction, a weighting and a sigma of its own"
            check(getattr(config, name) == FLAGS[name].default, name, wanted)
    else:
        for name in ("sigma_data", "P_mean", "P_std"):  # edm's
            setattr(config, name, float(np.float32(FLAGS[name].default)))
    check(not (config.use_kl and config.min_snr_gamma > 0), "min_snr_gamma", "weighs the squared error, which --use_kl True leaves out")
    check(not config.classes or config.class_cond, "classes", "this model is not conditioned on classes; leave the flag out")
    ok = all(0 <= k < config.num_classes for k in config.classes)
    check(ok, "classes", f"must be some of the classes 0 to {config.num_classes - 1}")
    wanted = "needs a model that was trained with --class_cond True and a --class_dropout, such as 0.1"
    check(config.guidance_scale == 1 or config.null_class, "guidance_scale", wanted)
    check(config.sigma_min < config.sigma_max, "sigma_min", f"must be below --sigma_max {config.sigma_max:g}")
    ok = config.S_churn == 0 or config.sampler in ("euler", "heun")
    check(ok, "S_churn", f"is for --sampler euler and heun; {config.sampler} adds no noise that way")
    space_timesteps(config.diffusion_steps, config.timestep_respacing)
    if config.noise_schedule == "linear":
        check(config.diffusion_steps > 20, "diffusion_steps", "must be above 20 with the linear schedule")
    ok = 1 <= len(config.ema_rate) <= MOST_EMAS and all(0 <= rate <= 1 for rate in config.ema_rate)
    check(ok, "ema_rate", f"must be a number from 0 to 1, or up to {MOST_EMAS} of them with commas")
    ok = config.microbatch == 0 or (config.batch_size % config.microbatch == 0)
    check(ok, "microbatch", f"must divide --batch_size {config.batch_size}")
    check(config.output_dir != "", "output_dir", "must name a folder")
    check(config.output.endswith((".png", ".bin")), "output", "must end in .png (one grid) or .bin (float images)")
    ok = len(config.data_file.encode(errors="replace")) <= 511 and "\0" not in config.data_file
    check(ok, "data_file", "must be at most 511 bytes long, to fit in a checkpoint")


def make_config(flags: dict[str, Any], data: Data | None = None, start: ModelFile | None = None, resume: bool = False) -> Config:
    """A valid Config. What flags leave open comes from the model file that it starts from (its model flags; to resume,
    its training flags, too) or else from the data (size, channels, classes), and then from the preset.
    flags: {name: value} as parse_flags gives them, for example {"preset": "unet64", "channel_mult": (1, 2)}."""
    flags = without_aliases(flags)
    preset = flags.get("preset") or (start and start.config.preset) or default_preset(flags, data)
    chosen = preset_flags(preset)
    if "num_heads" in flags:  # which a preset's num_head_channels would override
        chosen["num_head_channels"] = -1
    values = chosen | flags | {"preset": preset}
    if start and flags.get("channel_mult") == ():
        flags = flags | {"channel_mult": DEFAULT_CHANNEL_MULT.get(start.config.image_size[0], ())}
    if start:
        inherited = {name: getattr(start.config, name) for name in (CHECKPOINT_FLAGS if resume else SAVED_FLAGS)}
        as_saved = Config(**flags)  # in float32
        for name in flags.keys() & {*SAVED_FLAGS, *(["seed"] if resume else [])} - FREE_FLAGS:
            if getattr(as_saved, name) != inherited[name]:
                given, there = format_value(name, flags[name]), format_value(name, inherited[name])
                raise UserError(f"--{name} {given}: {start.path} was made with {there}; leave the flag out")
        values |= inherited | flags
    elif data:
        shape = {"image_size": data.images.shape[2:], "in_channels": data.images.shape[1]}
        values |= {name: value for name, value in shape.items() if name not in flags}
        values.setdefault("num_classes", data.num_classes)
    config = Config(**values)
    if "rescale_learned_sigmas" in flags and "vlb_weight" in flags:
        raise UserError("--rescale_learned_sigmas: sets --vlb_weight, which is given too; leave one of them out")
    if "rescale_learned_sigmas" in flags or (not start and "rescale_learned_sigmas" in chosen and "vlb_weight" not in flags):
        config.vlb_weight = float(np.float32(1e-3 if config.rescale_learned_sigmas else 1 / config.diffusion_steps))
    steps = config.timestep_respacing
    if "timestep_respacing" not in flags and steps.isdigit() and int(steps) > config.diffusion_steps:
        config.timestep_respacing = ""  # all of them
    if data and not start and "attention_resolutions" not in flags:
        heights = [config.image_size[0] // 2**level for level in range(len(config.channel_mult))]
        if not set(config.attention_resolutions) <= set(heights):
            config.attention_resolutions = (heights[-1],)
    if data and not start and config.image_size != tuple(data.images.shape[2:]):
        check_data(config, data)  # before flags that nobody gave are judged
    validate(config)
    return config


def without_aliases(flags: dict[str, Any]) -> dict[str, Any]:
    """flags with guided-diffusion's names for values of others, such as --predict_xstart True, as these: --predict x0."""
    meant: list[tuple[str, str, Any]] = []
    if flags.get("predict_xstart"):
        meant.append(("predict_xstart", "predict", "x0"))
    if "use_fp16" in flags:
        meant.append(("use_fp16", "precision", "bf16" if flags["use_fp16"] else "fp32"))
    if "lr_anneal_steps" in flags:
        meant.append(("lr_anneal_steps", "lr_schedule", "linear" if flags["lr_anneal_steps"] else "constant"))
    if flags.get("lr_anneal_steps"):
        meant.append(("lr_anneal_steps", "max_steps", flags["lr_anneal_steps"]))
        flags = {"warmup_steps": 0} | flags
    for alias, name, value in meant:
        if flags.get(name, value) != value:
            raise UserError(f"--{alias} {flags[alias]}: means --{name} {value}, and --{name} is {flags[name]}; leave one of them out")
    return flags | {name: value for _, name, value in meant}


def default_preset(flags: dict[str, Any], data: Data | None = None) -> str:
    small = pick_device(flags.get("device", "auto")).type != "cuda"
    if flags.get("data_dir") or ("data_file" in flags and data and data.images.shape[2] == 64):
        return "emoji64" if small else "unet64"  # a folder becomes 64x64 RGB, as in prepare_data.py
    return "fashion32" if small else "unet64"


def pick_device(name: str) -> torch.device:
    """A device by --device's value; a number is that of a GPU, as for ./train_unet."""
    torch.backends.cudnn.allow_tf32 = False  # fp32 means fp32
    try:
        named = f"cuda:{name}" if name.isdecimal() else name
        device = torch.device(named if named != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise UserError(f"--device {name}: is not here; auto and cpu always work") from None
    return device


# ======================================================================================================================
# randomness: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), key = seed,
# counter = (block, sample, step, purpose). No state, so any step of any run can be reproduced alone, on any machine.

INIT, TIMESTEP, NOISE, FLIP, ORDER, DROPOUT, SAMPLE_START, SAMPLE_NOISE, VAL_TIMESTEP, VAL_NOISE, CLASS_DROPOUT = range(11)
MASK = 0xFFFFFFFF  # 32 bits


def philox(c0: Any, c1: Any, c2: Any, c3: Any, key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Four 32-bit words for a counter of four and a key of two: Python ints, int64 arrays or int64 tensors, broadcast.

    A product of 32-bit numbers fits in 64 bits; that int64 takes its upper half for negative is undone by & MASK.
    """
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) & MASK ^ c1 ^ k0, p1 & MASK, (p0 >> 32) & MASK ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def philox_key(seed: int) -> tuple[int, int]:
    return seed & MASK, seed >> 32


def random_words(key: tuple[Any, Any], purpose: int, step: Any, samples: torch.Tensor, count: int) -> torch.Tensor:
    """(len(samples), count) words: element e of a sample is word e % 4 of its block e / 4."""
    blocks = torch.arange((count + 3) // 4, device=samples.device)
    words = philox(blocks[None, :], samples[:, None], step, purpose, key)
    return torch.stack(words, dim=-1).flatten(1)[:, :count]


def to_normals(words: torch.Tensor) -> torch.Tensor:
    """Standard normals from words (..., 2n), pair by pair (Box & Muller 1958), in double, rounded to float."""
    u = ((words >> 9).double() + 0.5) * 2.0**-23
    radius, angle = (-2 * u[..., 0::2].log()).sqrt(), 2 * math.pi * u[..., 1::2]
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1).flatten(-2).float()


def normals(seed: int, purpose: int, step: int, samples: torch.Tensor, chw: tuple[int, int, int]) -> torch.Tensor:
    """Normals (B, C, H, W) for these samples; elements are counted over (H, W, C)."""
    C, H, W = chw
    count = C * H * W
    z = to_normals(random_words(philox_key(seed), purpose, step, samples, count + count % 2))[:, :count]
    return z.view(-1, H, W, C).permute(0, 3, 1, 2).contiguous()


def timesteps(seed: int, purpose: int, step: int, samples: torch.Tensor, diffusion_steps: int) -> torch.Tensor:
    """t (B), uniform on [0, diffusion_steps)."""
    return (random_words(philox_key(seed), purpose, step, samples, 1)[:, 0] * diffusion_steps) >> 32


def noise_levels(config: Config, purpose: int, step: int, samples: torch.Tensor, probabilities: np.ndarray | None = None) -> torch.Tensor:
    """(B): t (int64), or with --objective edm sigma (float64), whose logarithm is normal. probabilities (T): of each t, if they differ."""
    if probabilities is not None:
        u = random_words(philox_key(config.seed), purpose, step, samples, 1)[:, 0].double() * 2.0**-32
        below = torch.from_numpy(np.cumsum(probabilities)).to(u.device)
        return torch.searchsorted(below, u, right=True).clamp(max=config.diffusion_steps - 1)
    if config.objective == "ddpm":
        return timesteps(config.seed, purpose, step, samples, config.diffusion_steps)
    normal = to_normals(random_words(philox_key(config.seed), purpose, step, samples, 2))[:, 0]
    return (config.P_mean + config.P_std * normal.double()).exp()


def data_order(seed: int, first: int, count: int, images: int) -> np.ndarray:
    """Indices of the images first, first + 1, ... of the run: each epoch is a permutation of its own, without a table.

    A Feistel network permutes the next even number of bits; walked until it lands inside [0, images).
    """
    g = np.arange(first, first + count, dtype=np.int64)
    epoch, x = (g // images) & MASK, g % images
    half = 1
    while 4**half < images:
        half += 1
    outside = np.ones(count, dtype=bool)
    while outside.any():
        left, right = x >> half, x & (2**half - 1)
        for r in range(4):
            left, right = right, left ^ philox(right, r, epoch, ORDER, philox_key(seed))[0] & (2**half - 1)
        x = np.where(outside, left << half | right, x)
        outside = x >= images
    return x


# ======================================================================================================================
# data


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


def open_data(path: str) -> Data:
    """Maps a data file, ours or unet.cu's."""
    try:
        file = prepare_data.open_data_file(path)
    except prepare_data.DataError as e:
        raise DataFileError(f"{e}; prepare_data.py makes data files, and make unpacks those in data/") from None
    return Data(path, file.images, file.labels, file.num_classes, file.header_crc, file)


def open_folder(path: str, config: Config) -> Data:
    """Reads the images in a folder, cropped to the configuration's size; sub-folders are classes."""
    try:
        images, labels, names = prepare_data.load_folder(path, config.image_size, config.in_channels)
    except prepare_data.DataError as e:
        raise DataFileError(f"--data_dir {path}: {e}") from None
    return Data(path, images, labels, len(names) if labels is not None else 0)


def atomic_write(path: str, chunks: Iterable[Any]) -> None:
    """Writes a file that appears under its name whole or not at all."""
    import prepare_data

    temporary = ""
    try:
        temporary, file = prepare_data.open_temporary(path)
        with file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        os.fsync(folder)  # the new name, too, must survive a power cut
        os.close(folder)
    except OSError as e:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise UserError(f"{path}: can't be written ({e.strerror}); choose a folder that exists and is yours") from None


def fetch(config: Config, data: Data, index: np.ndarray) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x0 (B, C, H, W), float32 in [-1, 1], and labels (B) if the model wants them."""
    images = data.read(index)
    if images.dtype == np.uint8:
        images = images.astype(np.float32) / np.float32(127.5) - np.float32(1)
    labels = torch.from_numpy(data.labels[index].astype(np.int64)) if config.class_cond else None
    return torch.from_numpy(np.ascontiguousarray(images, np.float32)), labels


Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"]


def training_batch(config: Config, data: Data, step: int, device: torch.device | str = "cpu", probabilities: np.ndarray | None = None) -> Batch:
    """What step `step` (0-based) of a run trains on, in any build of the program: x0 (B, C, H, W) float32 in [-1, 1],
    t (B) int64 (with --objective edm: sigma (B) float64), noise (B, C, H, W) float32, labels (B) int64 or None. It
    depends on the data and on config's seed, batch_size, random_flip, diffusion_steps, class_cond and class_dropout
    (for edm P_mean and P_std) alone, so that any other model can be trained on the very same numbers and compared with
    ours loss by loss; see Diffusion.losses for the loss. probabilities: LossHistory.probabilities(), on which t depends too.
    """
    B = config.batch_size
    index = data_order(config.seed, step * B, B, len(data.images))
    x0, labels = fetch(config, data, index)
    data.expect(data_order(config.seed, (step + 1) * B, B, len(data.images)))
    x0, samples = x0.to(device), torch.arange(B, device=device)
    if config.random_flip:
        mirror = random_words(philox_key(config.seed), FLIP, step, samples, 1)[:, 0] & 1
        x0 = torch.where(mirror[:, None, None, None] == 1, x0.flip(3), x0)
    t = noise_levels(config, TIMESTEP, step, samples, probabilities)
    noise = normals(config.seed, NOISE, step, samples, tuple(x0.shape[1:]))
    if labels is not None:
        labels = labels.to(device)
        dropped = random_words(philox_key(config.seed), CLASS_DROPOUT, step, samples, 1)[:, 0] < int(config.class_dropout * 2**32)
        labels = torch.where(dropped, config.num_classes, labels)
    return x0, t, noise, labels


# ======================================================================================================================
# model: guided-diffusion's UNetModel (Dhariwal & Nichol 2021), its module names, hence its state_dict


class GroupNorm32(nn.GroupNorm):
    """32 groups; statistics in float32 even where activations are bf16."""

    def __init__(self, channels: int):
        super().__init__(32, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).to(x.dtype) if x.dtype == torch.bfloat16 else super().forward(x)


class PhiloxDropout(nn.Module):
    """Dropout whose mask is a function of (seed, step, sample, layer). draw: see UNetModel.set_dropout_draw."""

    def __init__(self, p: float, layer: int):
        super().__init__()
        self.purpose = DROPOUT | layer << 8
        self.threshold = int(float(np.float32(p)) * 2**32)
        self.scale = float(np.float32(1) / (np.float32(1) - np.float32(p)))

    def forward(self, x: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
        if not self.training or self.threshold == 0:
            return x
        B, C, H, W = x.shape
        key_low, key_high, step, first_sample = draw.unbind()
        samples = first_sample + torch.arange(B, device=x.device)
        words = random_words((key_low, key_high), self.purpose, step, samples, H * W * C)
        keep = (words >= self.threshold).view(B, H, W, C).permute(0, 3, 1, 2)
        return torch.where(keep, x * self.scale, 0)


class Upsample(nn.Module):
    def __init__(self, channels: int, use_conv: bool):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1) if use_conv else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(F.interpolate(x, scale_factor=2, mode="nearest"))


class Downsample(nn.Module):
    def __init__(self, channels: int, use_conv: bool):
        super().__init__()
        self.op = nn.Conv2d(channels, channels, 3, stride=2, padding=1) if use_conv else nn.AvgPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(x)


def checkpointed(block: Callable[..., torch.Tensor], on: bool, *inputs: torch.Tensor) -> torch.Tensor:
    """block(*inputs), whose backward pass computes it once more if on; dropout is a function of the draw, so no generator's state is kept."""
    return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False) if on else block(*inputs)


class ResBlock(nn.Module):
    """x (B, C, H, W), emb (B, 4 * num_channels) -> (B, out_channels, H, W), or half or twice H and W."""

    def __init__(self, config: Config, layer: int, channels: int, out_channels: int, up: bool = False, down: bool = False):
        super().__init__()
        self.use_scale_shift_norm, self.use_checkpoint = config.use_scale_shift_norm, config.use_checkpoint
        emb_width = (2 if config.use_scale_shift_norm else 1) * out_channels
        self.in_layers = nn.Sequential(GroupNorm32(channels), nn.SiLU(), nn.Conv2d(channels, out_channels, 3, padding=1))
        self.resample = Upsample(channels, False) if up else Downsample(channels, False) if down else nn.Identity()
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(4 * config.num_channels, emb_width))
        self.out_layers = nn.Sequential(
            GroupNorm32(out_channels),
            nn.SiLU(),
            PhiloxDropout(config.dropout, layer),
            nn.Conv2d(out_channels, out_channels, 3, padding=1),
        )
        self.skip_connection = nn.Identity() if out_channels == channels else nn.Conv2d(channels, out_channels, 1)

    def forward(self, x: torch.Tensor, emb: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
        return checkpointed(self.compute, self.use_checkpoint and self.training, x, emb, draw)

    def compute(self, x: torch.Tensor, emb: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
        norm, silu, conv = self.in_layers
        h = conv(self.resample(silu(norm(x))))
        emb = self.emb_layers(emb).to(h.dtype)[:, :, None, None]
        norm, silu, dropout, conv = self.out_layers
        if self.use_scale_shift_norm:
            scale, shift = emb.chunk(2, dim=1)
            h = norm(h) * (1 + scale) + shift
        else:
            h = norm(h + emb)
        return self.skip_connection(self.resample(x)) + conv(dropout(silu(h), draw))


class AttentionBlock(nn.Module):
    """Self-attention over the H * W pixels of x (B, C, H, W)."""

    def __init__(self, config: Config, channels: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads if config.num_head_channels == -1 else channels // config.num_head_channels
        self.use_new_attention_order, self.use_checkpoint = config.use_new_attention_order, config.use_checkpoint
        self.norm = GroupNorm32(channels)
        self.qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpointed(self.compute, self.use_checkpoint and self.training, x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        B, C, H, W = x.shape
        qkv = self.qkv(self.norm(x).reshape(B, C, H * W))
        if self.use_new_attention_order:  # rows: q, k, v, then heads
            q, k, v = qkv.view(B, 3, self.num_heads, -1, H * W).transpose(3, 4).unbind(1)
        else:  # rows: heads, then q, k, v
            q, k, v = qkv.view(B, self.num_heads, 3, -1, H * W).transpose(3, 4).unbind(2)
        if qkv.dtype == torch.bfloat16:  # flash attention, which fp32 does without, wants the channels of a pixel side by side
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        h = F.scaled_dot_product_attention(q, k, v)  # (B, heads, H * W, C / heads)
        return x + self.proj_out(h.transpose(2, 3).reshape(B, C, H * W)).view(B, C, H, W)


class EmbedSequential(nn.Sequential):
    """Layers in a row; residual blocks also see the embedding and the dropout draw."""

    def forward(self, x: torch.Tensor, emb: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x, emb, draw) if isinstance(layer, ResBlock) else layer(x)
        return x


class UNetModel(nn.Module):
    """x (B, in_channels, H, W), timesteps (B) [, y (B) class labels] -> (B, out_channels, H, W)."""

    def __init__(self, config: Config):
        super().__init__()
        self.class_cond, self.bf16 = config.class_cond, False
        width, levels = config.num_channels, len(config.channel_mult)
        up_heads = config.num_heads if config.num_heads_upsample == -1 else config.num_heads_upsample
        self.time_embed = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
        if config.class_cond:
            self.label_emb = nn.Embedding(config.num_classes + config.null_class, 4 * width)
        res_blocks = 0

        def res_block(*args: Any, **kwargs: Any) -> ResBlock:
            nonlocal res_blocks
            res_blocks += 1
            return ResBlock(config, res_blocks - 1, *args, **kwargs)

        ch = config.channels(0)
        self.input_blocks = nn.ModuleList([EmbedSequential(nn.Conv2d(config.in_channels, ch, 3, padding=1))])
        skips = [ch]
        for level in range(levels):
            for _ in range(config.num_res_blocks):
                layers: list[nn.Module] = [res_block(ch, config.channels(level))]
                ch = config.channels(level)
                if config.has_attention(level):
                    layers.append(AttentionBlock(config, ch, config.num_heads))
                self.input_blocks.append(EmbedSequential(*layers))
                skips.append(ch)
            if level < levels - 1:
                down = res_block(ch, ch, down=True) if config.resblock_updown else Downsample(ch, config.conv_resample)
                self.input_blocks.append(EmbedSequential(down))
                skips.append(ch)

        middle = (res_block(ch, ch), AttentionBlock(config, ch, config.num_heads), res_block(ch, ch))
        self.middle_block = EmbedSequential(*middle)

        self.output_blocks = nn.ModuleList()
        for level in reversed(range(levels)):
            for i in range(config.num_res_blocks + 1):
                layers = [res_block(ch + skips.pop(), config.channels(level))]
                ch = config.channels(level)
                if config.has_attention(level):
                    layers.append(AttentionBlock(config, ch, up_heads))
                if level > 0 and i == config.num_res_blocks:
                    up = res_block(ch, ch, up=True) if config.resblock_updown else Upsample(ch, config.conv_resample)
                    layers.append(up)
                self.output_blocks.append(EmbedSequential(*layers))
        self.out = nn.Sequential(GroupNorm32(ch), nn.SiLU(), nn.Conv2d(ch, config.out_channels, 3, padding=1))

        half = width // 2
        frequencies = np.exp(-math.log(config.max_period) * np.arange(half) / half).astype(np.float32)
        self.register_buffer("frequencies", torch.from_numpy(frequencies), persistent=False)
        self.register_buffer("dropout_draw", torch.zeros(4, dtype=torch.int64), persistent=False)

    def set_dropout_draw(self, seed: int, step: int, first_sample: int = 0) -> None:
        """Before a forward pass in training mode: which masks to draw. first_sample: the batch's first in the step."""
        self.dropout_draw.copy_(torch.tensor([*philox_key(seed), step, first_sample]))

    def timestep_embedding(self, t: torch.Tensor) -> torch.Tensor:
        angles = t[:, None].double() * self.frequencies.double()
        return torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.time_embed[0].weight.dtype)

    def forward(self, x: torch.Tensor, timesteps: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            emb = self.time_embed(self.timestep_embedding(timesteps))
            if self.class_cond:
                emb = emb + self.label_emb(y)
            h, skips = x, []
            for block in self.input_blocks:
                h = block(h, emb, self.dropout_draw)
                skips.append(h)
            h = self.middle_block(h, emb, self.dropout_draw)
            for block in self.output_blocks:
                h = block(torch.cat([h, skips.pop()], dim=1), emb, self.dropout_draw)
            return self.out(h).to(x.dtype)


# Weights as flat arrays: parameters one after the other in state_dict order, which is what a .bin file holds.


def parameter_shapes(config: Config) -> dict[str, torch.Size]:
    with torch.device("meta"):  # shapes without memory
        return {name: p.shape for name, p in UNetModel(config).named_parameters()}


def initial_weights(config: Config) -> np.ndarray:
    """Distributed as guided-diffusion's: kaiming-uniform convolutions and linears, zeroed output projections. Element e
    of parameter p is a function of (seed, p, e), so that the C++ program initialises to the same bits."""
    key, chunk, tensors = philox_key(config.seed), 2**18, []
    with torch.device("meta"):
        model = UNetModel(config)
    for p, (name, parameter) in enumerate(model.named_parameters()):
        owner_name, _, kind = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        values = torch.zeros(parameter.numel())
        if isinstance(owner, nn.GroupNorm):
            values.fill_(1 if kind == "weight" else 0)
        elif not owner_name.endswith(("out_layers.3", "proj_out")) and owner_name != "out.2":
            for start in range(0, len(values), chunk):  # stays in the cache
                part = values[start : start + chunk]
                blocks = torch.arange(start // 4, (start + len(part) + 3) // 4)
                words = torch.stack(philox(blocks, p, 0, INIT, key), dim=-1).flatten()
                if isinstance(owner, nn.Embedding):
                    part.copy_(to_normals(words)[: len(part)])
                else:
                    fan_in = owner.weight[0].numel()
                    u = (words >> 8)[: len(part)].float() * 2.0**-24
                    part.copy_((2 * u - 1) * float(np.float32(1 / math.sqrt(fan_in))))
        tensors.append(values)
    return torch.cat(tensors).numpy()


def build_model(config: Config, weights: np.ndarray | torch.Tensor, device: torch.device | str = "cpu") -> UNetModel:
    """A model in eval mode whose parameters are views of weights, a flat array (if that is on the device already)."""
    model = UNetModel(config).to(device)
    flat = torch.as_tensor(weights).to(device)
    for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
        p.data = part.view(p.shape)
    return model.eval()


# ======================================================================================================================
# diffusion (Ho et al. 2020, "DDPM"; Song et al. 2021, "DDIM")


def space_timesteps(steps: int, respacing: str) -> list[int]:
    """The timesteps that a sampler visits, ascending: "" = all, "50" = 50 evenly spaced, "ddim50" = every steps/50-th,
    "10,15,20" = so many from each third. As guided-diffusion does it, rounding halves to even."""
    problem = f"--timestep_respacing {respacing}: "
    if not respacing:
        return list(range(steps))
    if not re.fullmatch(r"ddim\d+|\d+(,\d+)*", respacing):
        raise UserError(problem + "must be a number of steps, such as 50, ddim25 or 10,15,20, or empty")
    if respacing.startswith("ddim"):
        for stride in range(1, steps):
            if len(range(0, steps, stride)) == int(respacing[4:]):
                return list(range(0, steps, stride))
        raise UserError(problem + f"no whole stride through {steps} steps takes that many; ddim50 and 50 usually work")
    counts, kept, start = [int(n) for n in respacing.split(",")], [], 0
    for i, count in enumerate(counts):
        size = steps // len(counts) + (i < steps % len(counts))
        if not 0 <= count <= size or counts == [0]:
            raise UserError(problem + f"can't take {count} of {size} steps; use 1 to {size}")
        stride = (size - 1) / (count - 1) if count > 1 else 1
        position = 0.0
        for _ in range(count):
            kept.append(start + round(position))
            position += stride
        start += size
    if not kept:
        raise UserError(problem + "keeps no step")
    return kept


@dataclass
class NoiseLevel:
    """What the network is shown and told, what it should answer, and what its answer means; float64 (B) each."""

    t: torch.Tensor  # what the network is told
    signal: torch.Tensor  # its input x = signal x0 + sigma noise
    sigma: torch.Tensor
    target_x0: torch.Tensor  # its target = target_x0 x0 + target_noise noise
    target_noise: torch.Tensor
    x0_x: torch.Tensor  # what it says about x0: x0_x x + x0_out output
    x0_out: torch.Tensor
    weight: torch.Tensor  # of the squared error

    def float32(self) -> NoiseLevel:
        """As both programs compute with it, beside images."""
        return NoiseLevel(*(getattr(self, f.name).float()[:, None, None, None] for f in dataclasses.fields(self)))


class Diffusion:
    """What is trained: the noise levels, the loss at them, and the denoiser that the network's answers make."""

    def __init__(self, config: Config, device: torch.device | str = "cpu"):
        self.config, self.steps, self.channels = config, config.diffusion_steps, config.in_channels
        t = np.arange(self.steps, dtype=np.float64) / self.steps
        if config.noise_schedule == "linear":
            betas = np.linspace(0.0001 * 1000 / self.steps, 0.02 * 1000 / self.steps, self.steps)
        else:  # cosine (Nichol & Dhariwal 2021)
            curve = np.cos((np.append(t, 1) + 0.008) / 1.008 * np.pi / 2) ** 2
            betas = np.minimum(1 - curve[1:] / curve[:-1], 0.999)
        self.alpha_bar = np.cumprod(1 - betas)
        self.sigmas = np.sqrt((1 - self.alpha_bar) / self.alpha_bar)  # in the scale of x_0
        self.tables = torch.tensor(np.stack([self.alpha_bar, *self.variances(betas)]), device=device)

    def variances(self, betas: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Logarithms of the smaller and the larger variance of x_s, s = t - 1, given x_t and x_0; how its mean goes with x_0. At t = 0, where
        the smaller one is 0, that of t = 1 (guided-diffusion's posterior_log_variance_clipped)."""
        before = np.append(1.0, self.alpha_bar[:-1])
        small = betas * (1 - before) / (1 - self.alpha_bar)
        return np.log(np.append(small[1], small[1:])), np.log(betas), betas * np.sqrt(before) / (1 - self.alpha_bar)

    def ddpm_level(self, alpha_bar: torch.Tensor, t: torch.Tensor) -> NoiseLevel:
        """Where the signal's variance is alpha_bar: the three predictions, and Min-SNR's weights for them."""
        signal, sigma, snr = alpha_bar.sqrt(), (1 - alpha_bar).sqrt(), alpha_bar / (1 - alpha_bar)
        zero, one = torch.zeros_like(signal), torch.ones_like(signal)
        target_x0, target_noise, x0_x, x0_out, relative = {
            "eps": (zero, one, 1 / signal, -sigma / signal, snr),
            "x0": (one, zero, zero, one, one),
            "v": (-sigma, signal, signal, -sigma, snr + 1),  # Salimans & Ho 2022, appendix D
        }[self.config.predict]
        gamma = self.config.min_snr_gamma
        told = t.double() * 1000 / self.steps if self.config.rescale_timesteps else t.double()
        weight = snr.clamp(max=gamma) / relative if gamma > 0 else one
        return NoiseLevel(told, signal, sigma, target_x0, target_noise, x0_x, x0_out, weight)

    def edm_level(self, sigma: torch.Tensor) -> NoiseLevel:
        """Table 1 of Karras et al. 2022: their loss is the squared error of the network's own output."""
        data = self.config.sigma_data
        total = (sigma**2 + data**2).sqrt()
        c_skip, c_out, c_in, c_noise = data**2 / total**2, sigma * data / total, 1 / total, sigma.log() / 4
        weight = total**2 / (sigma * data) ** 2 * c_out**2
        return NoiseLevel(c_noise, c_in, c_in * sigma, sigma / (data * total), -c_skip * sigma / c_out, c_skip / c_in, c_out, weight)

    def level(self, t: torch.Tensor) -> NoiseLevel:
        """Of what noise_levels draws: t, or sigma."""
        return self.edm_level(t) if self.config.objective == "edm" else self.ddpm_level(self.tables[0][t], t)

    def level_at(self, sigma: float) -> NoiseLevel:
        """At any sigma, of x = x0 + sigma noise. Between two t the network is told what lies between: linear in log(sigma)."""
        one = torch.tensor([sigma], dtype=torch.float64)
        if self.config.objective == "edm":
            return self.edm_level(one)
        i = min(max(int(np.searchsorted(self.sigmas, sigma, "right")) - 1, 0), self.steps - 2)
        at = i + math.log(sigma / self.sigmas[i]) / math.log(self.sigmas[i + 1] / self.sigmas[i])
        return self.ddpm_level(1 / (1 + one**2), torch.tensor([min(max(at, 0.0), self.steps - 1)], dtype=torch.float64))

    def quarters(self, t: torch.Tensor) -> list[int]:
        """In which quarter of the noise levels that are drawn each lies, from little noise to much."""
        if self.config.objective == "ddpm":
            return (4 * t // self.steps).tolist()
        normal = (t.log() - self.config.P_mean) / max(self.config.P_std, 1e-30)
        return torch.bucketize(normal, torch.tensor([-0.67448975, 0, 0.67448975], device=t.device, dtype=torch.float64)).tolist()

    def q_sample(self, x0: torch.Tensor, t: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """What the network sees: x_t, for edm c_in (x0 + sigma noise)."""
        level = self.level(t).float32()
        return level.signal * x0 + level.sigma * noise

    def losses(self, model: Callable, x0: torch.Tensor, t: torch.Tensor, noise: torch.Tensor, labels: Any) -> torch.Tensor:
        """(B) each sample's loss, in double: the weighted squared error, and what learns the variance."""
        config, level = self.config, self.level(t).float32()
        x, target = level.signal * x0 + level.sigma * noise, level.target_x0 * x0 + level.target_noise * noise
        out = model(x, level.t.flatten(), labels)
        error = out[:, : self.channels] - target
        losses = (level.weight * error.square()).flatten(1).mean(1, dtype=torch.float64)
        if not config.learned_variance and not config.use_kl:
            return losses
        # The bound is a sum over all t, of which each step draws one; guided-diffusion counts it in bits.
        bits = self.steps / math.log(2) * self.bound(error if config.use_kl else error.detach(), out[:, self.channels :], x0, t)
        return bits if config.use_kl else losses + config.vlb_weight * bits

    def bound(self, error: torch.Tensor, v: torch.Tensor, x0: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """(B) the variational bound's term of each sample, in nats a value, in double. v (B, C or 0, H, W): the variance, from the smaller (-1)
        to the larger one (1) (Nichol & Dhariwal 2021, eq. 15)."""
        level, (small, large, mean_x0) = self.level(t), (table[t][:, None, None, None] for table in self.tables[1:])
        fraction = (v.double() + 1) / 2 if self.config.learned_variance else torch.full_like(x0, 0.0 if self.config.sigma_small else 1.0).double()
        if not self.config.learned_variance:
            large = torch.where(t[:, None, None, None] == 0, small, large)
        log_var = fraction * large + (1 - fraction) * small
        away = -level.x0_out[:, None, None, None] * error.double()  # x0 - what the network says about it
        divergence = 0.5 * (-1 + log_var - small + (small - log_var).exp() + (mean_x0 * away) ** 2 * (-log_var).exp())
        # at t = 0: the likelihood of one of 256 values
        inverse = (-0.5 * log_var).exp()
        below = [
            0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) for z in (inverse * (away + 1 / 255), inverse * (away - 1 / 255))
        ]
        p = torch.where(x0 < -0.999, below[0], torch.where(x0 > 0.999, 1 - below[1], below[0] - below[1]))
        likelihood = torch.where(p < 1e-12, math.log(1e-12), p.clamp(min=1e-12).log())
        return torch.where(t[:, None, None, None] == 0, -likelihood, divergence).flatten(1).mean(1)


# The samplers work on x = x_0 + sigma noise, whatever the model was trained on: sigma^2 = (1 - alpha_bar) / alpha_bar, and
# the network's answer is turned into its x_0, D(x; sigma). Further samplers go here.

SAMPLING_FLAGS = ["sampler", "timestep_respacing", "eta", "sigma_min", "sigma_max", "rho", "S_churn", "S_min", "S_max", "S_noise", "clip_denoised"]
SAMPLING_FLAGS += ["dynamic_threshold", "classes", "guidance_scale", "noise_seed"]


@dataclass
class Move:
    """A step as the papers write it: x' = x_x x + x_x0 x0 + x_m m + noise z, and then m = m_x x + m_x0 x0, the sampler's memory."""

    sigma: float  # of x
    x: float
    x0: float
    m: float = 0.0
    noise: float = 0.0
    m_x: float = 0.0
    m_x0: float = 0.0
    learned: tuple[float, float] | None = None  # instead of noise, what the network chooses from


Route = tuple[float, float, list[Move]]  # the first x is start * normals + churn * other normals


def straight_move(sigma: float, following: float) -> Move:
    """Towards sigma = following, in proportion."""
    return Move(sigma, following / sigma, 1 - following / sigma)


def ancestral_route(config: Config, sigmas: np.ndarray) -> Route:
    """ddpm (Ho et al. 2020, eq. 7 and section 3.2) and ddim (Song et al. 2021, eq. 12 and 16), through the timesteps kept."""
    kept = [0.0, *(float(sigmas[t]) for t in space_timesteps(config.diffusion_steps, config.timestep_respacing))]
    moves = []
    for n, s in reversed(list(zip(kept, kept[1:]))):
        difference = s * s - n * n
        small = n * math.sqrt(difference) / s
        large = math.sqrt(difference * (1 + n * n) / (1 + s * s)) if n > 0 else 0.0
        if config.sampler == "ddim":
            move = straight_move(s, math.sqrt(n * n - (config.eta * small) ** 2))
            move.noise = config.eta * small
        else:
            move = straight_move(s, n * n / s)
            move.noise = small if config.sigma_small else large
            if config.learned_variance and n > 0:
                move.learned = small, large
        moves.append(move)
    return math.sqrt(1 + kept[-1] ** 2), 0.0, moves


def karras_route(config: Config, sigmas: np.ndarray) -> Route:
    """euler and heun (Karras et al. 2022, algorithm 2, without and with its correction; without churn, algorithm 1) and dpmpp_2m (Lu et al.
    2022, algorithm 2), along their eq. 5, cut to the sigmas that the model knows."""
    count = len(space_timesteps(config.diffusion_steps, config.timestep_respacing))
    low, high = config.sigma_min, config.sigma_max
    if config.objective == "ddpm":
        low, high = max(low, float(sigmas[0])), min(high, float(sigmas[-1]))
    start, end = high ** (1 / config.rho), low ** (1 / config.rho)
    schedule = [(start + (i / (count - 1) if count > 1 else 0) * (end - start)) ** config.rho for i in range(count)] + [0.0]
    first_churn, moves = 0.0, []
    for i, (sigma, n) in enumerate(zip(schedule, schedule[1:])):
        gamma = min(config.S_churn / count, math.sqrt(2) - 1) if config.S_min <= sigma <= config.S_max else 0.0
        s = sigma * (1 + gamma)
        churn = sigma * math.sqrt(gamma * (2 + gamma)) * config.S_noise
        if i:
            moves[-1].noise = churn
        else:
            first_churn = churn
        move, h = straight_move(s, n), n - s
        moves.append(move)
        if n == 0:
            break
        if config.sampler == "heun":  # m = x + half a step along this slope; then half a step along that at the end
            move.m_x, move.m_x0 = 1 + h / (2 * s), -h / (2 * s)
            moves.append(Move(n, h / (2 * n), -h / (2 * n), 1))
        if config.sampler == "dpmpp_2m":  # m = the last x0
            if i:
                r = math.log(schedule[i - 1] / s) / math.log(s / n)
                move.x0, move.m = move.x0 * (1 + 1 / (2 * r)), -move.x0 / (2 * r)
            move.m_x0 = 1
    return high, first_churn, moves


@dataclass
class SamplerStep:
    """A move on the network's input, signal * x instead of x: x0 = limit(x0_x x + x0_out output), then
    x' = next_x x + next_x0 x0 + next_m m + sigma z and m' = m_x x + m_x0 x0. sigma: a learned one is exp(log_sigma + range (v + 1) / 2)."""

    t: float
    x0_x: float
    x0_out: float
    next_x: float
    next_x0: float
    next_m: float
    m_x: float
    m_x0: float
    sigma: float
    log_sigma: float
    range: float


def plan_sampler(config: Config, diffusion: Diffusion) -> tuple[float, float, list[SamplerStep]]:
    """The steps of config.sampler, the noisiest first, and what the first input is made of: start * normals + churn * other normals."""
    route = ancestral_route if config.sampler in ("ddpm", "ddim") else karras_route
    start, churn, moves = route(config, diffusion.sigmas)
    levels, steps = [diffusion.level_at(move.sigma) for move in moves], []
    scales = [float(np.float32(level.signal.item())) for level in levels] + [1.0]
    for move, level, scale, following in zip(moves, levels, scales, scales[1:]):
        row = [level.t, level.x0_x, level.x0_out, following * move.x / scale, following * move.x0, following * move.m, move.m_x / scale, move.m_x0]
        row += [following * move.noise, 0, 0]
        if move.learned:
            row[-2:] = math.log(following * move.learned[0]), math.log(move.learned[1] / move.learned[0])
        steps.append(SamplerStep(*(float(np.float32(float(v))) for v in row)))
    return scales[0] * start, scales[0] * churn, steps


@torch.no_grad()
def sample(
    model: nn.Module,
    config: Config,
    n: int,
    seed: int | None = None,
    labels: torch.Tensor | None = None,
    sampler: str | None = None,
    respacing: str | None = None,
    eta: float | None = None,
    clip: bool | None = None,
    progress: bool = False,
    batch_size: int | None = None,
    trace: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None,
    x_start: torch.Tensor | None = None,
    first: int = 0,
) -> torch.Tensor:
    """n images (n, C, H, W) in [-1, 1], on the CPU. What is None comes from config; labels then go through config.classes, or all classes, in
    turns. Image i depends on (seed, i) alone, not on batch_size. trace(k, x, x0) sees each step: the network's input and what it says about
    x_0. x_start: the network's inputs (n, C, H, W) at step `first` (one at which the sampler remembers nothing), instead of noise at step 0.
    Leaves the model in eval mode."""
    changes = {"noise_seed": seed, "sampler": sampler, "timestep_respacing": respacing, "eta": eta, "clip_denoised": clip}
    changes["batch_size"] = batch_size
    config = dataclasses.replace(config, **{name: value for name, value in changes.items() if value is not None})
    seed = config.noise_seed if config.noise_seed >= 0 else config.seed
    device, C = next(model.parameters()).device, config.in_channels
    start, churn, steps = plan_sampler(config, Diffusion(config))
    guided, chw = config.guidance_scale != 1, (C, *config.image_size)
    if labels is None and config.class_cond:
        listed = torch.tensor(config.classes or range(config.num_classes))
        labels = listed[torch.arange(n) % len(listed)]
    model.eval()
    bar: Any = contextlib.nullcontext()
    if progress:
        from tqdm import tqdm

        bar = tqdm(total=len(steps) * math.ceil(n / config.batch_size), unit="step")
    images = []
    with bar:
        for numbers in torch.arange(n, device=device).split(config.batch_size):
            y = labels.to(device)[numbers] if config.class_cond else None
            if guided:  # one batch of both: with their classes, and without
                y = torch.cat([y, torch.full_like(y, config.num_classes)])
            x, memory = start * normals(seed, SAMPLE_START, 0, numbers, chw), 0.0
            if churn > 0:
                x = x + churn * normals(seed, SAMPLE_START, 1, numbers, chw)
            if x_start is not None:
                x = x_start.to(device)[numbers]
            for k, step in enumerate(steps[first:], first):
                batch = torch.cat([x, x]) if guided else x
                out = model(batch, torch.full((len(batch),), step.t, device=device), y)
                answer = out[: len(x), :C]
                if guided:
                    answer = out[len(x) :, :C] + config.guidance_scale * (answer - out[len(x) :, :C])
                x0 = step.x0_x * x + step.x0_out * answer
                if config.dynamic_threshold > 0:
                    rank = math.ceil(config.dynamic_threshold * x0[0].numel())
                    limit = x0.abs().flatten(1).kthvalue(rank).values.clamp(min=1)[:, None, None, None]
                    x0 = torch.minimum(torch.maximum(x0, -limit), limit) / limit
                elif config.clip_denoised:
                    x0 = x0.clamp(-1, 1)
                if trace:
                    trace(k, x, x0)
                following = step.next_x * x + step.next_x0 * x0 + step.next_m * memory
                memory = step.m_x * x + step.m_x0 * x0
                x = following
                if step.sigma > 0:
                    sigma = (step.log_sigma + step.range * (out[: len(x), C:] + 1) / 2).exp() if step.range > 0 else step.sigma
                    x = x + sigma * normals(seed, SAMPLE_NOISE, k, numbers, chw)
                if progress:
                    bar.update()
            images.append(x.cpu())
    return torch.cat(images)


# ======================================================================================================================
# model files: a header of 256 int32, then float32 tensors in state_dict order: weights [, EMA][, both moments [, further EMAs][, losses]]

MODEL_MAGIC, UNET_CU_MODEL_MAGIC = 20261121, 12345678
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
    + [("sigma_data", "<f4"), ("P_mean", "<f4"), ("P_std", "<f4"), ("zero1", "<i4", 10), ("step", "<u8"), ("seed", "<u8")]
    # from here on zero in files without moments
    + [("batch_size", "<i4"), ("microbatch", "<i4"), ("max_steps", "<i4"), ("lr", "<f4"), ("weight_decay", "<f4")]
    + [("adam_beta1", "<f4"), ("adam_beta2", "<f4"), ("adam_eps", "<f4"), ("grad_clip", "<f4")]
    + [("warmup_steps", "<i4"), ("lr_schedule", "<i4"), ("ema_rate", "<f4"), ("random_flip", "<i4")]
    + [("updates", "<i4"), ("bad_total", "<i4"), ("bad_in_row", "<i4"), ("data_images", "<u8"), ("data_crc", "<u4")]
    + [("zero2", "<i4"), ("guard", "<f8", 5), ("more_emas", "<i4"), ("more_rates", "<f4", MOST_EMAS - 1), ("schedule_sampler", "<i4")]
    + [("zero3", "<i4", 21), ("data_file", "S512")]
)
HEADER = np.dtype(HEADER_FIELDS)
CHECKPOINT_FLAGS = [name for name, *_ in HEADER_FIELDS if name in FLAGS]
SAVED_FLAGS = CHECKPOINT_FLAGS[: CHECKPOINT_FLAGS.index("seed")]  # the model's and the diffusion's
FREE_FLAGS = {"dropout", "min_snr_gamma", "vlb_weight", "use_kl", "sigma_small", "P_mean", "P_std"}  # may change from run to run


def unused_slots(header: Any) -> list[str]:
    """Flags that say nothing beside others in a header (or in a dictionary), and are 0 there."""
    unused = [] if header["learn_sigma"] else ["vlb_weight"]
    return unused + ([] if header["objective"] else ["sigma_data", "P_mean", "P_std"])


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
    history: np.ndarray | None = None  # (diffusion_steps, LossHistory.LENGTH + 1), float32; with --schedule_sampler loss-second-moment

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
            value = FLAGS[name].metadata["choices"].split("|").index(value)
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
        words = FLAGS[name].metadata["choices"]
        if words:
            values[name] = words.split("|")[values[name] % (words.count("|") + 1)]
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
    """Reads .bin (ours or unet.cu's), .pt or .safetensors. flags: the model flags, for a bare state_dict that does not
    say its own shape. ModelFileError with one sentence if the file can't be used."""
    try:
        with open(path, "rb"):  # says what is wrong with the path itself
            file = reader_or_writer(path, read_bin, read_pt, read_safetensors)(path, flags or {})
    except OSError as e:
        raise ModelFileError(f"{path}: can't be opened ({e.strerror}); name a model file that is there") from None
    file.path = path
    return file


def write_model(path: str, file: ModelFile) -> None:
    """Writes .bin, .pt or .safetensors, whole or not at all."""
    atomic_write(path, reader_or_writer(path, bin_chunks, pt_chunks, safetensors_chunks)(file))


def reader_or_writer(path: str, for_bin: Callable, for_pt: Callable, for_safetensors: Callable) -> Callable:
    kinds = {".bin": for_bin, ".pt": for_pt, ".pth": for_pt, ".safetensors": for_safetensors}
    if Path(path).suffix not in kinds:
        raise ModelFileError(f"{path}: is of no known kind; model files end in .bin, .pt or .safetensors")
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


def read_bin(path: str, flags: dict[str, Any]) -> ModelFile:
    size, start = os.path.getsize(path), np.fromfile(path, np.uint8, 1024)
    if len(start) < 1024:
        raise ModelFileError(f"{path}: is only {size} bytes long, shorter than a header (1024 bytes)")
    header = start.view(HEADER).reshape(())
    if header["magic"] == UNET_CU_MODEL_MAGIC:
        return read_unet_cu(path, size, start.view("<i4"), flags)
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
    expected = 1024 + 4 * (count * len(names) + rows * (LossHistory.LENGTH + 1))
    if size != expected:
        raise ModelFileError(f"{path}: is {size} bytes long, but its header speaks of {expected}; it is cut or damaged")
    header["crc"] = 0
    values = np.memmap(path, "<f4", "r", 1024)
    arrays, history = values[: count * len(names)].reshape(-1, count), values[count * len(names) :].reshape(-1, LossHistory.LENGTH + 1)
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
    shape = (config.diffusion_steps, LossHistory.LENGTH + 1) if training and config.schedule_sampler != "uniform" else None
    fits = (None if history is None else history.shape) == shape
    if not fits or (shape and not (np.isfinite(history).all() and np.isin(history[:, -1], range(LossHistory.LENGTH + 1)).all())):
        raise ModelFileError(f"{path}: its history of losses is damaged")
    return ModelFile(config, state=state, more_emas=more, history=history, **arrays)


def read_unet_cu(path: str, size: int, header: np.ndarray, flags: dict[str, Any]) -> ModelFile:
    """unet.cu's unet_init.bin, and what its train_unet saves: the weights; moments and cuRAND's state are left. flags say what it does not:
    the diffusion, of which unet.cu knows the linear schedule alone."""
    c_in, width, c_out, H, W, max_period, moments = header[2:9].tolist()
    values = {"image_size": (H, W), "in_channels": c_in, "num_channels": width, "max_period": max_period}
    values |= {"attention_resolutions": (H // 4, H // 8), "learn_sigma": c_out == 2 * c_in, "timestep_respacing": ""}
    values["vlb_weight"] = 0.0
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
    except (TypeError, ValueError, OverflowError, UserError) as e:
        raise ModelFileError(f"{path}: describes a model that can't work ({e})") from None


def parameter_count(config: Config) -> int:
    return sum(shape.numel() for shape in parameter_shapes(config).values())


def to_state_dict(config: Config, flat: np.ndarray) -> dict[str, torch.Tensor]:
    """state_dict of a flat array (a view)."""
    shapes = parameter_shapes(config)
    parts = torch.from_numpy(flat).split([s.numel() for s in shapes.values()])
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


def from_sections(path: str, sections: dict[str, Any], metadata: Any, history: torch.Tensor | None, flags: dict[str, Any]) -> ModelFile:
    """A ModelFile from state_dicts and what metadata() says; without a configuration they are bare weights, whose shape flags give."""
    older = {"timestep_respacing": "", "vlb_weight": 0.0}  # files from before the variational bound
    states = {f.name: f for f in dataclasses.fields(TrainingState)}
    if "config" in metadata:
        config = trusted(path, lambda values: valid(older | typed(values, FLAGS)), metadata["config"])
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


def read_safetensors(path: str, flags: dict[str, Any]) -> ModelFile:
    import safetensors

    sections: dict[str, dict[str, torch.Tensor]] = {}
    try:
        with safetensors.safe_open(path, "pt") as f:
            metadata = {key: json.loads(value) for key, value in (f.metadata() or {}).items() if key in ("config", "state")}
            for key in f.keys():  # noqa: SIM118 (it is no dictionary)
                name = next((n for n, prefix in SECTIONS.items() if prefix and key.startswith(prefix)), "weights")
                sections.setdefault(name, {})[key.removeprefix(SECTIONS[name])] = f.get_tensor(key)
    except OSError:
        raise
    except Exception:  # noqa: BLE001 (of a damaged file's tensors torch raises nearly anything)
        raise ModelFileError(f"{path}: is not a safetensors file, or is damaged") from None
    history = sections.get("weights", {}).pop(HISTORY, None)
    if history is not None and not is_plain(history):
        raise ModelFileError(f"{path}: its history of losses is damaged")
    return from_sections(path, sections, metadata, history, flags)


# ======================================================================================================================
# training


def learning_rate(config: Config, step: int) -> float:
    """Of a step (0-based), as float32."""
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps > 0 else 1.0
    progress = (step - config.warmup_steps) / max(config.max_steps - config.warmup_steps, 1)
    progress = min(max(progress, 0.0), 1.0)
    shape = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return float(np.float32(config.lr * warm * shape[config.lr_schedule]))


class Guard:
    """Running mean and variance of what a healthy step looks like, in state.guard."""

    def __init__(self, state: TrainingState):
        self.state = state

    def objection(self, loss: float, grad_norm: float) -> str:
        """Why a step must not touch the weights, "" if it may. Training passes these bounds only when it breaks."""
        n, mean_l, var_l, mean_g, var_g = self.state.guard
        for name, x, mean, var in ("loss", loss, mean_l, var_l), ("gradient norm", grad_norm, mean_g, var_g):
            if not math.isfinite(x):
                return f"{name} {x} is not finite"
            if n >= 100 and x > 2 * mean + 10 * math.sqrt(var):
                return f"{name} {x:.4g} is far above its running mean {mean:.4g}"
        return ""

    def update(self, loss: float, grad_norm: float) -> None:
        n, mean_l, var_l, mean_g, var_g = self.state.guard
        a = max(1 / (n + 1), 0.01)
        dl, dg = loss - mean_l, grad_norm - mean_g
        moments = mean_l + a * dl, (1 - a) * (var_l + a * dl * dl), mean_g + a * dg, (1 - a) * (var_g + a * dg * dg)
        self.state.guard = (n + 1, *moments)


class LossHistory:
    """--schedule_sampler loss-second-moment (Nichol & Dhariwal 2021, section 3.3): t is drawn in proportion to the root mean square of its latest
    losses. rows (T, LENGTH + 1): losses, oldest first, and how many."""

    LENGTH, EVEN_SHARE = 10, 0.001  # the latter: of the probability, which all t have in equal parts

    def __init__(self, config: Config, rows: np.ndarray | None = None):
        self.rows = np.zeros((config.diffusion_steps, self.LENGTH + 1), np.float32) if rows is None else rows.copy()

    def probabilities(self) -> np.ndarray | None:
        """(T), None as long as losses are missing."""
        squares = self.rows[:, :-1].astype(np.float64) ** 2
        weights = np.sqrt(np.cumsum(squares, 1)[:, -1] / self.LENGTH)  # sums in order, as in C++
        total = np.cumsum(weights)[-1]
        if (self.rows[:, -1] < self.LENGTH).any() or not total > 0:
            return None
        return weights * ((1 - self.EVEN_SHARE) / total) + self.EVEN_SHARE / len(weights)

    def remember(self, t: list[int], losses: list[float]) -> None:
        for row, loss in zip((self.rows[k] for k in t), losses):
            n = int(row[-1])
            if n == self.LENGTH:
                row[:-2] = row[1:-1].copy()
            row[min(n, self.LENGTH - 1)], row[-1] = min(loss, float(np.finfo(np.float32).max)), min(n + 1, self.LENGTH)


@dataclass
class StepResult:
    step: int  # finished steps, so the first is 1
    loss: float
    lr: float
    grad_norm: float  # before clipping
    loss_quarters: list[float | None]  # mean loss of the samples in each quarter of the noise levels
    objection: str  # why the step was skipped, or ""


class Trainer:
    """A model in training: weights, their average and AdamW's moments, all flat arrays in state_dict order.

    start: a checkpoint is continued; bare weights are started from; None starts from initial_weights(config).
    """

    def __init__(
        self,
        config: Config,
        device: torch.device | str = "cpu",
        start: ModelFile | None = None,
        compile: bool = False,
        precision: str = "fp32",
    ):
        self.config, self.device = config, pick_device(str(device))
        resumed = start if start and start.m is not None else None
        self.state = dataclasses.replace(resumed.state) if resumed else TrainingState()
        self.guard, self.diffusion = Guard(self.state), Diffusion(config, self.device)

        def flat(saved: np.ndarray | None, otherwise: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(saved).to(self.device, copy=True) if saved is not None else otherwise.clone()

        def average(k: int) -> torch.Tensor:
            """Goes on from the file's average of the same rate, or else in the same place, or else starts as the weights."""
            there = [resumed.ema, *resumed.more_emas] if resumed else []
            rates = resumed.config.ema_rate if resumed else ()
            place = rates.index(config.ema_rate[k]) if config.ema_rate[k] in rates else k
            return flat(there[place] if place < len(there) else None, weights)

        weights = flat(start.weights if start else initial_weights(config), torch.empty(0))
        self.weights = nn.Parameter(weights)
        self.weights.grad = torch.zeros_like(weights)
        self.emas = [average(k) for k in range(len(config.ema_rate))]
        self.ema = self.emas[0]
        self.history = LossHistory(config, resumed and resumed.history) if config.schedule_sampler != "uniform" else None
        self.moments: dict[str, torch.Tensor] = {
            "step": torch.tensor(float(self.state.updates)),
            "exp_avg": flat(resumed and resumed.m, torch.zeros_like(weights)),
            "exp_avg_sq": flat(resumed and resumed.v, torch.zeros_like(weights)),
        }
        self.model, self.averaged = (build_model(config, w, self.device) for w in (self.weights.data, self.ema))
        self.model.bf16 = self.averaged.bf16 = precision == "bf16"
        self.forward = torch.compile(self.model) if compile else self.model
        sizes = [p.numel() for p in self.model.parameters()]
        for p, grad in zip(self.model.parameters(), self.weights.grad.split(sizes)):
            p.grad = grad.view(p.shape)  # backward() adds to it in place

        betas, fused = (config.adam_beta1, config.adam_beta2), self.device.type == "cuda"
        decay = config.weight_decay
        self.optimizer = torch.optim.AdamW([self.weights], 0, betas, config.adam_eps, decay, fused=fused)
        if fused:
            self.moments["step"] = self.moments["step"].to(self.device)
        self.optimizer.state[self.weights] = self.moments

    def probabilities(self) -> np.ndarray | None:
        """Of each t, for training_batch; None if all are the same."""
        return self.history.probabilities() if self.history else None

    def importance(self, t: torch.Tensor) -> torch.Tensor:
        """(B) of the losses: what they count, so that their mean is that of a uniform t."""
        p = self.probabilities()
        return torch.ones(len(t), device=t.device) if p is None else (1 / (len(p) * torch.from_numpy(p).to(t.device)[t])).float()

    def compute_gradients(self, x0: torch.Tensor, t: torch.Tensor, noise: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Leaves the gradient of the mean loss in the model's parameters (and, flat, in weights.grad); returns the
        samples' losses (B), times their importance."""
        B, config, losses = len(x0), self.config, []
        importance = self.importance(t)
        self.model.train()
        self.weights.grad.zero_()
        for first in range(0, B, config.microbatch or B):
            part = slice(first, first + (config.microbatch or B))
            if config.dropout > 0:
                self.model.set_dropout_draw(config.seed, self.state.step, first)
            y = None if labels is None else labels[part]
            loss = self.diffusion.losses(self.forward, x0[part], t[part], noise[part], y) * importance[part]
            (loss.sum() / B).backward()
            losses.append(loss.detach())
        return torch.cat(losses)

    def train_step(self, x0: torch.Tensor, t: torch.Tensor, noise: torch.Tensor, labels: torch.Tensor | None = None) -> StepResult:
        """One step on a batch from training_batch(config, data, state.step)."""
        config, state = self.config, self.state
        losses, importance = self.compute_gradients(x0, t, noise, labels), self.importance(t)
        norm = torch.linalg.vector_norm(self.weights.grad, dtype=torch.float64)
        *losses, grad_norm = torch.cat([losses, norm[None]]).tolist()  # where the CPU waits for the GPU
        loss = sum(losses) / len(losses)
        lr, objection = learning_rate(config, state.step), self.guard.objection(loss, grad_norm)
        if not objection:
            self.guard.update(loss, grad_norm)
            if config.grad_clip > 0:
                self.weights.grad.mul_(min(1.0, config.grad_clip / (grad_norm + 1e-6)))
            self.optimizer.param_groups[0]["lr"] = lr
            self.optimizer.step()
            for rate, ema in zip(config.ema_rate, self.emas):
                ema.mul_(rate).add_(self.weights.detach(), alpha=1 - rate)
            if self.history:
                self.history.remember(t.tolist(), [loss / i for loss, i in zip(losses, importance.tolist())])
            state.updates += 1
        state.step += 1
        state.bad_total += objection != ""
        state.bad_in_row = state.bad_in_row + 1 if objection else 0
        quarters: list[list[float]] = [[], [], [], []]
        for sample_loss, quarter in zip(losses, self.diffusion.quarters(t)):
            quarters[quarter].append(sample_loss)
        means = [sum(q) / len(q) if q else None for q in quarters]
        return StepResult(state.step, loss, lr, grad_norm, means, objection)

    @torch.no_grad()
    def validation_loss(self, data: Data) -> float:
        """Mean loss over the first 512 images, with the same t and noise every time, so that the curve is smooth."""
        config, losses, count = self.config, [], min(len(data.images), 512)
        self.model.eval()
        for index in np.split(np.arange(count), range(config.batch_size, count, config.batch_size)):
            x0, labels = fetch(config, data, index)
            samples = torch.from_numpy(index).to(self.device)
            t = noise_levels(config, VAL_TIMESTEP, 0, samples)
            noise = normals(config.seed, VAL_NOISE, 0, samples, tuple(x0.shape[1:]))
            labels = None if labels is None else labels.to(self.device)
            losses.append(self.diffusion.losses(self.model, x0.to(self.device), t, noise, labels))
        return torch.cat(losses).mean().item()

    def checkpoint(self) -> ModelFile:
        """Everything that continuing the run needs, for write_model."""
        flat = [self.weights, self.ema, self.moments["exp_avg"], self.moments["exp_avg_sq"], *self.emas[1:]]
        arrays = [a.detach().cpu().numpy() for a in flat]
        history = self.history.rows.copy() if self.history else None
        return ModelFile(self.config, *arrays[:4], state=dataclasses.replace(self.state), more_emas=tuple(arrays[4:]), history=history)


# ======================================================================================================================
# benchmark


def bench(config: Config, device: torch.device, precision: str) -> dict[str, Any]:
    """Milliseconds (median, 10th and 90th percentile) of config.bench training steps and forward passes on synthetic data, and the step's
    peak memory.

    This is PyTorch at its fastest, not the Trainer above. "graph": the loss is compiled, then the whole step (drawing t and noise, q_sample,
    forward, loss, backward, fused AdamW) is captured once in a CUDA graph and replayed, since launching its kernels one by one takes longer
    than running them; likewise the forward pass, as a sampler needs it. Channels last, cuDNN chooses by trying, nothing waits for the CPU.
    It leaves out what the Trainer adds: the guard, clipping, and the average of the weights."""
    on_gpu = device.type == "cuda"
    mode = config.bench_mode if config.bench_mode != "auto" else "graph" if on_gpu else "eager"
    if mode == "graph" and not on_gpu:
        raise UserError("--bench_mode graph: needs a GPU; eager and compile work without")
    if config.objective == "edm":
        raise UserError("--objective edm: --bench times the loss of ddpm; leave the flag out")
    torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32 = True, False
    torch.manual_seed(config.seed)
    compiled: Callable = (lambda f: f) if mode == "eager" else torch.compile
    B, C, steps, diffusion = config.batch_size, config.in_channels, config.diffusion_steps, Diffusion(config, device)
    with device:  # PyTorch's own initial weights, none of which are zero: zeros would compute faster than what training meets
        model = UNetModel(config).to(device, memory_format=torch.channels_last)
        x0 = (2 * torch.rand(B, C, *config.image_size) - 1).to(memory_format=torch.channels_last)
        labels = torch.randint(max(config.num_classes, 1), (B,))
    model.bf16 = precision == "bf16"
    result: dict[str, Any] = {"program": f"PyTorch {mode}", "model": config.preset, "batch": B, "precision": precision}

    def part_loss(x0: torch.Tensor, t: torch.Tensor, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        out = model(diffusion.q_sample(x0, t, noise), t.float(), labels)
        return F.mse_loss(out[:, :C], noise) * (len(x0) / B)

    def measure(work: Callable[[], Any]) -> list[float]:
        ms = time_calls(work, config.bench, device, mode == "graph")
        return [round(float(q), 4) for q in np.percentile(ms, [50, 10, 90])]

    def measure_steps() -> list[float]:
        betas, compiled_loss = (config.adam_beta1, config.adam_beta2), compiled(part_loss)
        settings: dict[str, Any] = {"eps": config.adam_eps, "weight_decay": config.weight_decay, "fused": on_gpu, "capturable": mode == "graph"}
        optimizer = torch.optim.AdamW(model.train().parameters(), config.lr, betas, **settings)

        def step() -> None:
            batch = x0, torch.randint(steps, (B,), device=device), torch.randn_like(x0), labels
            optimizer.zero_grad()
            for part in zip(*(values.split(config.microbatch or B) for values in batch)):
                compiled_loss(*part).backward()
            optimizer.step()

        return measure(step)

    @torch.no_grad()
    def measure_forward() -> list[float]:
        forward, t = compiled(model.eval()), torch.randint(steps, (B,), device=device).float()
        return measure(lambda: forward(x0, t, labels))

    result["step_ms"] = measure_steps() if config.bench_parts != "forward" else None
    memory = torch.cuda.max_memory_allocated(device) if on_gpu else None  # of the forward pass only if there is no step
    model.zero_grad()
    result["forward_ms"] = measure_forward() if config.bench_parts != "step" else None
    if on_gpu and config.bench_parts == "forward":
        memory = torch.cuda.max_memory_allocated(device)
    result["memory_gib"] = round(memory / 2**30, 3) if memory else None
    return result


def time_calls(work: Callable[[], Any], count: int, device: torch.device, capture: bool) -> list[float]:
    """Milliseconds of each of count calls, after some to warm up; the GPU's peak memory counts from after these. capture: of a CUDA graph."""
    if device.type != "cuda":
        work()  # compiles
        times = [time.perf_counter()]
        for _ in range(count):
            work()
            times.append(time.perf_counter())
        return [1000 * (after - before) for before, after in zip(times, times[1:])]
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # as PyTorch wants it before a capture
            for _ in range(3):
                work()  # compiles, lets cuDNN choose, makes the optimizer's state
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        if capture:
            with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
                work()
            work = graph.replay
        for _ in range(5):
            work()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            work()
            mark.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in zip(marks, marks[1:])]


# ======================================================================================================================
# output

LOG_COLUMNS = "step,loss,lr,grad_norm,ms,loss_q0,loss_q1,loss_q2,loss_q3,val_loss"


class Log:
    """log.csv, a row per step. A resumed run keeps the rows up to the step that it resumes from."""

    def __init__(self, path: str, step: int):
        kept = []
        if step > 0 and os.path.exists(path):
            with open(path) as f:
                kept = [row for row in f if row.split(",")[0].isdigit() and int(row.split(",")[0]) <= step]
        atomic_write(path, [LOG_COLUMNS.encode() + b"\n", *(row.encode() for row in kept)])
        self.path, self.rows, self.error = path, b"", ""  # rows: those that the file still lacks, because of this error
        self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)

    def write(self, r: StepResult, ms: float, val_loss: float | None) -> str:
        """Adds a row. On a full disk rows wait until it is full no more. Returns what there is to tell about that, or ""."""
        fields = [r.loss, r.lr, r.grad_norm, ms, *r.loss_quarters, val_loss]
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

    def close(self) -> None:
        os.close(self.descriptor)
        if self.rows:
            raise UserError(f"{self.path}: its last rows could not be written ({self.error})")


def to_pixels(images: torch.Tensor) -> np.ndarray:
    """(..., C, H, W) in [-1, 1] to uint8 (..., H, W, 3 or 1). Of other than 3 channels, the first is shown in grey."""
    shown = images if images.shape[-3] == 3 else images[..., :1, :, :]
    return ((shown + 1) * 127.5).clamp(0, 255).add(0.5).to(torch.uint8).movedim(-3, -1).numpy()


def save_png(pixels: np.ndarray, path: str) -> None:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels).save(buffer, "PNG")
    atomic_write(path, [buffer.getbuffer()])


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


def save_grid(images: torch.Tensor, path: str) -> None:
    save_png(grid_pixels(images), path)


def save_samples(images: torch.Tensor, path: str) -> None:
    """Images in [-1, 1] as a grid (.png), or as a data file of float32 images (.bin)."""
    if not torch.isfinite(images).all():
        raise UserError(f"{path}: is not written, because the samples are not finite numbers; these weights are broken")
    if path.endswith(".bin"):
        prepare_data.write_data(path, images.numpy())
    else:
        save_grid(images, path)


def plot_loss(log: str, path: str) -> None:
    """loss.png from log.csv. Light: every step's loss; dark: its mean; orange: validation."""
    from matplotlib.figure import Figure

    table = np.genfromtxt(log, delimiter=",", names=True, ndmin=1)
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
    atomic_write(path, [buffer.getbuffer()])


def checkpoints(folder: str) -> dict[int, str]:
    """step -> file, of the checkpoints in a folder, oldest first."""
    found = ((re.fullmatch(r"model_(\d+)\.bin", p.name), str(p)) for p in Path(folder).glob("model_*.bin"))
    return dict(sorted((int(match[1]), path) for match, path in found if match))


# ======================================================================================================================
# a run


def prepare_run(flags: dict[str, Any]) -> tuple[Config, Data | None, ModelFile | None]:
    """From flags to what a run needs: its configuration, its data and what it starts from. Creates nothing."""
    flags, start, data, resume = dict(flags), None, None, flags.get("resume_checkpoint", "")
    named = flags.keys() & {"data_file", "data_dir"}
    if len(named) == 2:
        raise UserError("--data_file and --data_dir: a run trains on one of them; leave the other out")
    if resume and flags.get("init"):
        raise UserError("--init and --resume_checkpoint: a run starts from one of them; leave the other out")
    if not (flags.get("sample") or flags.get("bench") or flags.get("init_model_only")):
        with lock_folder(flags.get("output_dir", Config.output_dir), create=False):
            pass
    if resume == "latest":
        folder = flags.get("output_dir", Config.output_dir)
        if not checkpoints(folder):
            rest = ", once its log.csv is moved away" if os.path.exists(f"{folder}/log.csv") else ""
            raise UserError(f"--resume_checkpoint latest: {folder} holds no checkpoint; leave the flag out to start there{rest}")
        resume = list(checkpoints(folder).values())[-1]
    if resume or flags.get("init"):
        start = read_model(resume or flags["init"], flags)
    if resume and (start.m is None or start.ema is None):
        raise UserError(f"{resume}: holds weights only, no moments to resume from; --init starts a new run from it")
    if start and not start.is_finite():
        raise UserError(f"{start.path}: its weights, their average or moments are not finite; move it away and use an earlier checkpoint")
    if resume and not named:
        path = find_data(start.config.data_file, resume)
        flags["data_dir" if os.path.isdir(path) else "data_file"] = path

    if flags.get("sample") or flags.get("bench"):
        return make_config(flags, None, start, bool(resume)), None, start
    if flags.get("data_dir"):
        unlabelled = {name: value for name, value in flags.items() if name != "class_cond"}
        data = open_folder(flags["data_dir"], start.config if start else make_config(unlabelled))
    else:
        preset = flags.get("preset") or default_preset(flags)
        path = flags.get("data_file") or preset_flags(preset).get("data_file", Config.data_file)
        if os.path.exists(path) or not flags.get("init_model_only") or "data_file" in flags:
            data = open_data(path)
    if data:
        flags["data_file"] = data.path
    config = make_config(flags, data, start, bool(resume))
    if data:
        check_data(config, data)
    if resume and not named and (len(data.images), data.crc) != (start.state.data_images, start.state.data_crc):
        raise UserError(f"{data.path}: is not the data that {resume} was trained on; name it, or this one, with --data_file")
    return config, data, start


def check_data(config: Config, data: Data) -> None:
    _, channels, height, width = data.images.shape
    if (channels, height, width) != (config.in_channels, *config.image_size):
        here = f"{config.in_channels}x{config.image_size[0]}x{config.image_size[1]}"
        raise UserError(f"{data.path}: its images are {channels}x{height}x{width}, the model's {here}; prepare them again")
    if config.class_cond and data.labels is None:
        raise UserError(f"--class_cond True: {data.path} has no labels; leave it out, or use data that has")
    if config.class_cond and data.num_classes > config.num_classes:
        raise UserError(f"--num_classes {config.num_classes}: {data.path} has {data.num_classes} classes")


def find_data(path: str, checkpoint: str) -> str:
    """A checkpoint's data: where it says, or from a folder above its own, where the run may have been started."""
    if not os.path.exists(path):
        for folder in Path(checkpoint).absolute().parents:
            if (folder / path).exists():
                return str(folder / path)
    return path


def check_output(config: Config, start: ModelFile | None) -> None:
    """An output folder holds one run: a new run needs a folder without one, a resumed run its own or an empty one."""
    folder, saved = config.output_dir, checkpoints(config.output_dir)
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
def lock_folder(folder: str, create: bool = True) -> Iterator[None]:
    """One process at a time trains in a folder: a file there is locked until the process ends, however it ends, and
    says whose the lock is. Without create, only a file that is there already is looked at."""
    try:
        descriptor = os.open(f"{folder}/.lock", os.O_RDWR | (os.O_CREAT if create else 0), 0o666)
    except OSError as e:
        if create:
            raise UserError(f"{folder}/.lock: can't be written ({e.strerror}); choose another --output_dir") from None
        yield
        return
    try:
        with contextlib.suppress(OSError):  # a file system without locks has none, a full disk doesn't say whose it is
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                who = os.pread(descriptor, 127, 0).decode(errors="replace").partition("\n")[0] or "another process"
                raise UserError(f"{folder}: {who} trains there; wait until it ends, or choose another --output_dir") from None
            if create:
                os.ftruncate(descriptor, 0)
                who = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')},\n"
                os.pwrite(descriptor, who.encode(), 0)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def stop_on_signal() -> Iterator[list[str]]:
    """A list that stays empty until SIGINT, SIGTERM or SIGHUP, so that the step in hand can be finished."""
    received: list[str] = []
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # or under nohup
        signals.append(signal.SIGHUP)
    handlers = {s: signal.signal(s, lambda n, _: received.append(signal.Signals(n).name)) for s in signals}
    try:
        yield received
    finally:
        for s, handler in handlers.items():
            signal.signal(s, handler)


def progress_line(config: Config, trainer: Trainer, r: StepResult, seconds: float, mean: float, val_loss: float | None, columns: int) -> str:
    """seconds: a step's; mean: of recent losses; columns: of the terminal, or 0."""
    left, skipped = int((config.max_steps - r.step) * seconds), trainer.state.bad_total
    line = (
        f"step {r.step}/{config.max_steps} | loss {r.loss:.4f} (mean {mean:.4f}) | lr {r.lr:.2e} | "
        f"norm {r.grad_norm:.3f} | {1000 * seconds:.1f} ms | {config.batch_size / seconds:.1f} images/s | "
        f"ETA {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
    )
    line += (f" | val {val_loss:.4f}" if val_loss is not None else "") + f" | skipped {skipped}" * bool(skipped)
    for part in ("norm", "lr", "[^|]* images", "[^|]* ms", "skipped", "val", "ETA"):  # what goes first where there is no room
        if columns and len(line) >= columns:
            line = re.sub(rf" \| {part}[^|]*(?= \||$)", "", line)
    return line[: columns - 1] if columns else line


def train(config: Config, data: Data, start: ModelFile | None, device: torch.device, precision: str) -> None:
    """A training run."""
    import prepare_data

    check_output(config, start)
    val_data = open_data(config.val_data_file) if config.val_data_file else None
    if val_data:
        check_data(config, val_data)
    if start and not config.resume_checkpoint:  # --init takes the weights alone
        start = ModelFile(start.config, start.weights_to_use(config.use_ema))
    compiled = config.compile == "1" or (config.compile == "auto" and device.type == "cuda")
    trainer = Trainer(config, device, start, compiled, precision)
    state, first_step = trainer.state, trainer.state.step
    state.data_images, state.data_crc = len(data.images), data.crc
    print(f"model: {trainer.weights.numel() / 1e6:.2f} M parameters, {device}, {precision}{', compiled' * compiled}")
    unverified = " (not verified: more than 4 GiB, and no checksums of them)" if data.file and data.file.image_crcs is None else ""
    print(f"data: {data.path}, {len(data.images)} images{unverified}; output: {config.output_dir}/", flush=True)
    if config.resume_checkpoint:
        print(f"resumed from {start.path}: step {first_step} of {config.max_steps}, seed {config.seed}")
    if first_step >= config.max_steps:
        return print(f"nothing to do: step {first_step} of {config.max_steps} is reached; a larger --max_steps goes on")
    if start and config.resume_checkpoint and config.batch_size != start.config.batch_size:
        was, now = start.config.batch_size * first_step, config.batch_size * first_step
        order = f"the order of the data goes by batches, so that image {now} of it comes next, not {was}"
        print(f"--batch_size {config.batch_size}: was {start.config.batch_size} before; {order}")
    os.makedirs(config.output_dir, exist_ok=True)
    with lock_folder(config.output_dir):
        check_output(config, start)  # again, now that nobody else can change it
        prepare_data.remove_leftovers(config.output_dir, "model_", "samples_", "log.csv.", "loss.png.")
        train_in_folder(config, data, val_data, trainer)


def train_in_folder(config: Config, data: Data, val_data: Data | None, trainer: Trainer) -> None:
    """The loop itself, in a folder that is this process's alone."""
    state, first_step, device = trainer.state, trainer.state.step, trainer.device
    saved, proven = first_step, -1 if first_step else 0  # the newest checkpoint, and the newest from which a step was good
    log, terminal = Log(f"{config.output_dir}/log.csv", first_step), sys.stdout.isatty()

    def tell(text: str, end: str = "\n") -> None:
        try:
            print(text, end=end, flush=True)
        except BrokenPipeError:  # the reader went away (| head): nobody reads the rest
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            stop.append("SIGPIPE")

    def stop_run(why: str) -> NoReturn:
        last, files = "no checkpoint was written yet", checkpoints(config.output_dir)
        if proven in list(files)[-1:]:
            last = f"the last good checkpoint is {files[proven]}"
        elif files:
            *before, newest = files.values()
            last = f"no step was good from {newest}" + ", so move it away and " + (f"go on from {before[-1]}" if before else "start again")
        raise UserError(f"stopped at step {state.step}: {why}; {last}; a lower --lr or a --warmup_steps may help")

    def save() -> None:
        nonlocal saved
        file = trainer.checkpoint()
        if not file.is_finite():
            stop_run("weights, their average or moments are not finite and were not saved")
        write_model(f"{config.output_dir}/model_{state.step:07d}.bin", file)
        saved = state.step

    def prove() -> None:
        """A step from the newest checkpoint was good: older ones may go."""
        nonlocal proven
        proven, files = saved, list(checkpoints(config.output_dir).values())
        for path in files[: -config.keep_checkpoints] if config.keep_checkpoints else []:
            os.unlink(path)

    def draw_pictures() -> None:
        if config.sample_interval:
            images = sample(trainer.averaged, config, config.num_samples)
            if not torch.isfinite(images).all():
                tell("\n" * terminal + f"the samples of step {state.step} are not finite numbers: the run is broken")
            save_grid(images, f"{config.output_dir}/samples_{state.step:07d}.png")
        if not log.rows:
            plot_loss(log.path, f"{config.output_dir}/loss.png")

    seconds, mean, last, failure = 0.0, 0.0, False, None  # seconds: a recent step's, smoothed; failure: of the data, which ends the run
    shown = -math.inf  # when the last line was
    with stop_on_signal() as stop:
        while not last:
            began = time.perf_counter()
            try:
                batch = training_batch(config, data, state.step, device, trainer.probabilities())
            except DataFileError as e:
                failure = e
                break
            result = trainer.train_step(*batch)
            elapsed = time.perf_counter() - began
            step, val_loss = state.step, None
            seconds = elapsed if step <= first_step + 2 else 0.95 * seconds + 0.05 * elapsed  # the first may compile
            last = step >= config.max_steps or bool(stop)
            mean += (result.loss - mean) * max(10 / (step - first_step + 9), 0.02)  # as in loss.png of train_unet.cu
            if val_data and (step % config.val_interval == 0 or last):
                try:
                    val_loss = trainer.validation_loss(val_data)
                except DataFileError as e:
                    failure, last = e, True
            if message := log.write(result, 1000 * elapsed, val_loss):
                tell("\n" * terminal + message)
            if result.objection:
                tell("\n" * terminal + f"step {step} is skipped: {result.objection} ({state.bad_in_row} in a row)")
                if state.bad_in_row >= config.max_bad_steps:
                    stop_run(f"{config.max_bad_steps} steps in a row had to be skipped")
            elif proven != saved:
                prove()
            if step % config.log_interval == 0 or last or val_loss is not None or time.perf_counter() - shown + seconds > 10:
                shown, columns = time.perf_counter(), shutil.get_terminal_size().columns if terminal else 0
                line = progress_line(config, trainer, result, seconds, mean, val_loss, columns)
                tell("\r\033[K" * terminal + line, end="" if terminal else "\n")
            if last or (step % config.save_interval == 0 and not result.objection):
                save()
            if last or (config.sample_interval and step % config.sample_interval == 0):
                draw_pictures()
    if failure:
        told = "nothing was trained"
        if state.step > first_step:
            if state.step not in checkpoints(config.output_dir):
                save()
            plot_loss(log.path, f"{config.output_dir}/loss.png")
            told = "that is saved, and --resume_checkpoint latest goes on from there"
        print("\n" * terminal, end="", flush=True)
        raise DataFileError(f"{failure}; stopped after step {state.step}: {told}")
    if step < config.max_steps:
        told = f"stopped by {stop[0]} after step {state.step}, which is saved; --resume_checkpoint latest goes on from there"
    else:
        told = f"done: {state.step} steps, {1000 * seconds:.1f} ms a step; see {config.output_dir}/"
        if config.keep_checkpoints and len(checkpoints(config.output_dir)) > config.keep_checkpoints:
            # one step more, only to see whether the last checkpoint is good
            with contextlib.suppress(DataFileError):
                if not trainer.train_step(*training_batch(config, data, step, device)).objection:
                    prove()
    tell("\n" * terminal + told)
    log.close()


def need_packages() -> None:
    if MISSING:
        raise UserError(prepare_data.how_to_install(MISSING, "torch", "numpy", "pillow", "safetensors", "tqdm", "matplotlib"))


def run(argv: list[str]) -> None:
    flags = parse_flags(argv, FLAGS, __doc__.partition("\n\nContents")[0])
    need_packages()
    if "convert" in flags:
        source, target = flags.pop("convert")
        if not target:
            raise UserError(f"--convert {source}: needs two files, as in --convert model.bin model.pt")
        write_model(target, read_model(source, flags))
        return print(f"{target}: the same model as {source}")
    if "fp16_scale_growth" in flags:
        print("--fp16_scale_growth: bf16 has fp32's range, so there is no loss scale to grow")
    config, data, start = prepare_run(flags)
    device = pick_device(config.device)
    precision = config.precision if config.precision != "auto" else "bf16" if device.type == "cuda" else "fp32"
    if config.bench:
        return print(json.dumps(bench(config, device, precision)))
    for title, shown in (f"preset {config.preset}", preset_flags(config.preset)), ("flags", flags):
        print(f"{title}:", *(f"--{name} {format_value(name, value)}" for name, value in shown.items()))
    if config.init_model_only:
        write_model(config.init_model_filename, ModelFile(config, initial_weights(config)))
        print(f"{config.init_model_filename}: initial weights, {parameter_count(config) / 1e6:.2f} M parameters")
    elif config.sample:
        if not start:
            raise UserError(f"--sample {config.sample}: needs --init FILE, a model to sample from")
        start = start.choose_ema(flags.get("ema_rate"))
        model = build_model(config, start.weights_to_use(config.use_ema), device)
        model.bf16 = precision == "bf16"
        save_samples(sample(model, config, config.sample, progress=sys.stderr.isatty()), config.output)
        print(f"{config.output}: {config.sample} images with {config.sampler}")
    else:
        train(config, data, start, device, precision)


def main(program: str = "train_unet", body: Callable[[list[str]], None] = run) -> int:
    """Runs a program; a mistake ends in one sentence and exit code 1."""
    try:
        import prepare_data

        prepare_data.standard_streams()
        body(sys.argv[1:])
        sys.stdout.flush()
        return 0
    except UserError as e:
        sentence = str(e)
    except OSError as e:
        if isinstance(e, BrokenPipeError):  # or Python tries to write the rest once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sentence = f"{e.filename or 'a file'}: {e.strerror}"
    except ModuleNotFoundError as e:
        sentence = prepare_data.how_to_install(e.name or "")
    except torch.OutOfMemoryError:
        sentence = "the GPU's memory is full; a smaller --batch_size or a --microbatch needs less"
    sentence = re.sub(r"[\x00-\x1f\x7f]\s*", " ", sentence)  # what a file says may have several lines
    print(f"{program}: {sentence}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
