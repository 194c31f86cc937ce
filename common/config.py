"""Flags: their names and defaults, presets, command lines, what can work together; and what programs share: signals, the
screen, one sentence for a mistake.

The names and defaults are ./train_unet's, whose --help says what each flag means and may be. train_unet.py, generate.py and model_files.py share
this file; it needs neither model nor files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import prepare_data
from common import interrupted


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
    """What one sentence explains: run_program() prints it after "train_unet: " and exits with 1."""


# ======================================================================================================================
# names and defaults


def flag(default: Any, text: str, low: float = -math.inf, high: float = math.inf, choices: str = "") -> Any:
    """A flag that ./train_unet does not have: with what --help says, and low..high for numbers or "a|b" for words."""
    return field(default=default, metadata={"help": text, "limits": (low, high), "words": choices.split("|") if choices else None})


@dataclass
class Config:
    """Every flag, as an attribute; make_config() is how to get a valid one."""

    preset: str = ""
    sample: int = 0
    init_model_only: bool = flag(False, "write initial weights to --init_model_filename, and stop")
    init_model_filename: str = flag("unet_init.bin", "where to")
    convert: tuple[str, str] = flag((), "IN OUT: convert a model file (.bin, .pt, .safetensors, or DIR/ of diffusers), and stop")
    device: str = flag("auto", "auto (a GPU if there is one), the number of a GPU, cpu, cuda, cuda:1, ...")
    compile: str = flag("auto", "torch.compile the model; auto: on a GPU", choices="auto|0|1")
    precision: str = "auto"
    use_fp16: bool = False
    fp16_scale_growth: float = 1e-3
    # the model
    image_size: tuple[int, int] = (64, 64)
    in_channels: int = 3
    patch_size: int = 0
    num_channels: int = 64
    num_res_blocks: int = 2
    channel_mult: tuple[float, ...] = ()
    attention_resolutions: tuple[int, ...] = (16, 8)
    num_heads: int = 4
    num_head_channels: int = -1
    num_heads_upsample: int = -1
    dropout: float = 0.0
    class_cond: bool = False
    num_classes: int = 0
    class_dropout: float = 0.0
    learn_sigma: bool = False
    use_scale_shift_norm: bool = False
    resblock_updown: bool = False
    conv_resample: bool = True
    use_new_attention_order: bool = True
    max_period: int = 10000
    # diffusion
    diffusion_steps: int = 1000
    noise_schedule: str = "linear"
    rescale_timesteps: bool = False
    objective: str = "ddpm"
    predict: str = "eps"
    predict_xstart: bool = False
    min_snr_gamma: float = 0.0
    vlb_weight: float = 1e-3
    rescale_learned_sigmas: bool = True
    use_kl: bool = False
    sigma_small: bool = False
    sigma_data: float = 0.5
    P_mean: float = -1.2
    P_std: float = 1.2
    t_mean: float = 0.0
    t_std: float = 0.0
    ect_frame: str = "edm"
    ect_q: float = 2.0
    ect_k: float = 8.0
    ect_b: float = 1.0
    ect_d: int = 0
    ect_c: float = 0.0
    ect_weight: str = "gap"
    # sampling
    sampler: str = "ddim"
    timestep_respacing: str = "50"
    eta: float = 0.0
    sigma_min: float = 0.002
    sigma_max: float = 80.0
    mid_t: float = 0.821
    rho: float = 7.0
    S_churn: float = 0.0
    S_min: float = 0.0
    S_max: float = 1e9
    S_noise: float = 1.0
    clip_denoised: bool = True
    dynamic_threshold: float = 0.0
    start_from: str = ""
    strength: float = 0.6
    inpaint: str = ""
    mask: str = ""
    jump_length: int = 10
    jump_n_sample: int = 10
    classes: tuple[int, ...] = ()
    guidance_scale: float = 1.0
    noise_seed: int = -1
    # training
    max_steps: int = 1000
    batch_size: int = 16
    microbatch: int = 0
    use_checkpoint: bool = False
    lr: float = 1e-3
    lr_schedule: str = "constant"
    warmup_steps: int = 0
    lr_anneal_steps: int = 0
    schedule_sampler: str = "uniform"
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    grad_clip: float = 1.0
    ema_snapshots: int = 0
    ema_sigma_rel: float = flag(0.0, "with --convert IN OUT: of the average that OUT holds, over a run up to the snapshot IN, ema_STEP.bin", 0, 0.28)
    ema_rate: tuple[float, ...] = (0.995,)
    max_bad_steps: int = 10
    seed: int = 0
    # data and files
    data_file: str = ""
    data_dir: str = ""
    random_flip: bool = False
    val_data_file: str = ""
    val_interval: int = 100
    init: str = ""
    resume_checkpoint: str = ""
    output_dir: str = "out"
    output: str = "samples.png"
    use_ema: bool = True
    save_interval: int = 500
    keep_checkpoints: int = 3
    keep_best: bool = False
    sample_interval: int = 250
    num_samples: int = 36
    log_interval: int = 10

    def __post_init__(self) -> None:
        for name in (n for n, f in FLAGS.items() if f.type == "float"):  # float32, as files and the C++ program hold it
            setattr(self, name, float(np.float32(getattr(self, name))))
        rates = self.ema_rate if isinstance(self.ema_rate, (tuple, list)) else (self.ema_rate,)
        height, _ = self.image_size
        mult = self.channel_mult or DEFAULT_CHANNEL_MULT.get(height, ())
        self.channel_mult, self.ema_rate = (tuple(float(np.float32(m)) for m in values) for values in (mult, rates))
        if self.ema_snapshots > 0:
            self.ema_rate += tuple(power for power in POWER_EMAS if power not in self.ema_rate)

    @property
    def null_class(self) -> bool:
        """Whether the class embedding has a row for "no class", after those of all classes."""
        return self.class_cond and self.class_dropout > 0

    @property
    def learned_variance(self) -> bool:
        return self.learn_sigma and (self.vlb_weight > 0 or self.use_kl)

    @property
    def frame(self) -> str:
        """What the network is shown and told, and what its answer means: those of objective ddpm, edm or flow."""
        return self.ect_frame if self.objective == "ect" else self.objective

    @property
    def ect_stage(self) -> int:
        """Steps of one a."""
        return self.ect_d or math.ceil(self.max_steps / 8)

    @property
    def out_channels(self) -> int:
        return 2 * self.in_channels if self.learn_sigma else self.in_channels

    def channels(self, level: int) -> int:
        """The nearest whole number: 1.6666666 * 96 is 160. The product of a float32 is exact."""
        return math.floor(self.channel_mult[level] * self.num_channels + 0.5)

    @property
    def patch(self) -> int:
        return max(self.patch_size, 1)

    def has_attention(self, level: int) -> bool:
        return any(r * self.patch * 2**level == self.image_size[0] for r in self.attention_resolutions)


FLAGS: dict[str, dataclasses.Field] = {f.name: f for f in dataclasses.fields(Config)}
SAMPLING_FLAGS = ["sampler", "timestep_respacing", "eta", "sigma_min", "sigma_max", "rho", "S_churn", "S_min", "S_max", "S_noise", "clip_denoised"]
SAMPLING_FLAGS += ["mid_t", "dynamic_threshold", "classes", "guidance_scale", "noise_seed", "strength", "jump_length", "jump_n_sample"]

# What a number or a word may be at all, in a file or on a command line.
MOST_EMAS, BIG = 8, 10**9
POWER_EMAS = tuple(float(np.float32(exponent)) for exponent in (16.97, 6.94)) if not MISSING else ()  # in the place of a rate: --ema_snapshots'
LIMITS = {"in_channels": (1, 64), "patch_size": (0, 8), "num_channels": (32, 8192), "num_res_blocks": (1, 32), "num_heads": (1, 1024), "num_head_channels": (-1, 8192),
          "num_heads_upsample": (-1, 1024), "dropout": (0, 0.99), "num_classes": (0, 10**6), "class_dropout": (0, 0.99), "max_period": (1, 10**8),
          "diffusion_steps": (2, 100000), "min_snr_gamma": (0, 10**6), "vlb_weight": (0, 1000), "sigma_data": (1e-3, 1e3), "P_mean": (-20, 20),
          "P_std": (0, 20), "t_mean": (-20, 20), "t_std": (0, 20),
          "ect_q": (1.01, 1e6), "ect_k": (0, 1000), "ect_b": (0, 1000), "ect_d": (0, 2 * BIG), "ect_c": (0, 1e6), "mid_t": (1e-6, 1e6),
          "max_steps": (1, 2 * BIG), "batch_size": (1, 10**6), "microbatch": (0, 10**6), "lr": (0, 100), "warmup_steps": (0, BIG),
          "weight_decay": (0, 100), "adam_beta1": (0, 0.999999), "adam_beta2": (0, 0.999999), "adam_eps": (1e-30, 1), "grad_clip": (0, 1e30),
          "seed": (0, 9 * 10**15), "noise_seed": (-1, 9 * 10**15), "eta": (0, 1), "dynamic_threshold": (0, 1), "sigma_min": (1e-6, 1e6),
          "strength": (0, 1), "jump_length": (1, 100000), "jump_n_sample": (1, 1000), "rho": (0.1, 1000), "num_samples": (1, 4096), "sample": (0, 10**8)}  # fmt: skip
LIMITS |= dict.fromkeys(["val_interval", "save_interval", "log_interval", "max_bad_steps"], (1, BIG))
LIMITS |= dict.fromkeys(["keep_checkpoints", "sample_interval", "ema_snapshots"], (0, BIG))
WORDS = {"noise_schedule": ["linear", "cosine"], "objective": ["ddpm", "edm", "flow", "ect"], "ect_frame": ["edm", "flow"], "ect_weight": ["gap", "snr"],
         "predict": ["eps", "x0", "v"],
         "lr_schedule": ["constant", "linear", "cosine"], "schedule_sampler": ["uniform", "loss-second-moment"],
         "sampler": ["ddim", "ddpm", "euler", "heun", "dpmpp_2m", "consistency"], "precision": ["auto", "fp32", "bf16"]}  # fmt: skip

# Flags that are for some objectives only.
OBJECTIVES_OWN = dict.fromkeys(["sigma_data", "P_mean", "P_std"], ("edm", "ect")) | dict.fromkeys(["t_mean", "t_std"], ("flow",))
OBJECTIVES_OWN |= dict.fromkeys(["ect_frame", "ect_q", "ect_k", "ect_b", "ect_d", "ect_c", "ect_weight"], ("ect",))
LARGEST_GAP_DIVISOR = 1e6  # of ect_q^a: a smaller gap is lost in fp32's rounding

# ======================================================================================================================
# presets

# What the large models have in common, and those of 128x128 and 256x256.
LARGE = """ --use_scale_shift_norm True --resblock_updown True --lr 1e-4 --ema_rate 0.9999 --sample_interval 5000 --save_interval 5000
    --log_interval 50"""
ADM = f""" --num_channels 256 --num_res_blocks 2 --attention_resolutions 32,16,8 --use_new_attention_order False --learn_sigma True
    --noise_schedule linear{LARGE}"""
# The same texts as the C++ program's; what they leave open keeps its default.
PRESETS = {
    # what ./train_unet alone does, on a CPU and on a GPU
    "quick32": """--image_size 32 --in_channels 1 --patch_size 2 --num_channels 32 --channel_mult 1,2,2 --num_res_blocks 1 --attention_resolutions 4
        --num_head_channels 32 --conv_resample False --use_scale_shift_norm True --noise_schedule cosine --predict x0 --min_snr_gamma 5
        --sampler heun --S_churn 10 --timestep_respacing 25 --batch_size 16 --lr 2e-3 --warmup_steps 100 --lr_schedule linear
        --adam_beta2 0.99 --max_steps 3000 --ema_rate 0.99 --data_file data/fashion32.bin --save_interval 1000 --sample_interval 500""",
    "quick64": """--image_size 64 --patch_size 2 --num_channels 128 --channel_mult 1,2,2 --num_res_blocks 2 --attention_resolutions 16,8
        --num_head_channels 32 --conv_resample False --use_scale_shift_norm True --noise_schedule cosine --predict x0 --min_snr_gamma 5
        --sampler heun --timestep_respacing 25 --batch_size 32 --lr 4e-4 --warmup_steps 500 --lr_schedule cosine --adam_beta2 0.99
        --max_steps 20000 --ema_rate 0.999 --data_file data/emoji64.bin --sample_interval 2500 --save_interval 5000 --log_interval 50""",
    # clothing in a few minutes on two CPU cores
    "fashion32": """--image_size 32 --in_channels 1 --num_channels 32 --channel_mult 1,2,2 --num_res_blocks 1 --attention_resolutions 8
        --num_head_channels 32 --noise_schedule cosine --eta 1 --batch_size 16 --lr 2e-3 --warmup_steps 100 --lr_schedule linear --adam_beta2 0.99
        --max_steps 1000 --ema_rate 0.98 --data_file data/fashion32.bin""",
    # 64x64 pictures, half an hour on two CPU cores
    "emoji64": """--image_size 64 --patch_size 2 --num_channels 32 --channel_mult 1,2,2,2 --num_res_blocks 1 --attention_resolutions 8,4
        --num_head_channels 32 --conv_resample False --use_scale_shift_norm True --noise_schedule cosine --objective flow --t_mean 0.4 --t_std 1
        --sampler heun --timestep_respacing 25 --batch_size 8 --lr 1.5e-3 --warmup_steps 100 --lr_schedule linear --adam_beta2 0.99
        --max_steps 20000 --ema_rate 0.995 --data_file data/emoji64.bin --sample_interval 5000 --save_interval 5000""",
    "unet64": """--image_size 64 --num_channels 64 --channel_mult 1,2,3,4 --num_res_blocks 2 --attention_resolutions 16,8 --num_head_channels 32
        --conv_resample False --noise_schedule cosine --eta 1 --timestep_respacing 100 --batch_size 32 --lr 4e-4 --warmup_steps 500
        --lr_schedule cosine --adam_beta2 0.99 --max_steps 25000 --ema_rate 0.999 --data_file data/emoji64.bin --sample_interval 2500
        --save_interval 5000 --log_interval 50""",
    # guided-diffusion's defaults, for which its recipes are written, and its published models of ImageNet and LSUN
    "adm": """--image_size 64 --num_channels 128 --num_res_blocks 2 --attention_resolutions 16,8 --num_heads 4 --use_scale_shift_norm True
        --use_new_attention_order False --num_classes 1000 --noise_schedule linear --rescale_learned_sigmas False --batch_size 1 --lr 1e-4
        --grad_clip 0 --max_steps 1000000 --ema_rate 0.9999 --data_file data/imagenet64.bin --save_interval 10000 --sample_interval 10000""",
    "adm64": """--image_size 64 --num_channels 192 --channel_mult 1,2,3,4 --num_res_blocks 3 --attention_resolutions 32,16,8
        --num_head_channels 64 --learn_sigma True --class_cond True --num_classes 1000 --dropout 0.1 --noise_schedule cosine --batch_size 32
        --max_steps 540000 --data_file data/imagenet64.bin"""
    + LARGE,
    "adm128": """--image_size 128 --num_heads 4 --class_cond True --num_classes 1000 --batch_size 16 --max_steps 4360000
        --data_file data/imagenet128.bin"""
    + ADM,
    "adm256": """--image_size 256 --num_head_channels 64 --class_cond True --num_classes 1000 --batch_size 8 --max_steps 1980000
        --data_file data/imagenet256.bin"""
    + ADM,
    "lsun256": """--image_size 256 --num_head_channels 64 --dropout 0.1 --batch_size 8 --max_steps 1000000 --data_file data/lsun256.bin""" + ADM,
    # latents of 256x256 pictures, as prepare_data.py --encode makes them: an eighth as wide and high, of any size
    "latent32": """--image_size 32 --in_channels 4 --num_channels 192 --channel_mult 1,2,2,4 --num_res_blocks 2 --attention_resolutions 16,8,4
        --num_head_channels 64 --noise_schedule linear --clip_denoised False --batch_size 64 --max_steps 400000 --data_file data/latent32.bin"""
    + LARGE,
}
FOREIGN_PRESET = "adm"  # what a state_dict without a configuration, most likely guided-diffusion's, does not say
# guided-diffusion's channel_mult by image height, for --channel_mult ""
DEFAULT_CHANNEL_MULT = {512: (0.5, 1, 1, 2, 2, 4, 4), 256: (1, 1, 2, 2, 4, 4), 128: (1, 1, 2, 3, 4), 64: (1, 2, 3, 4)}
WORDS["preset"] = ["", *PRESETS]


def preset_flags(preset: str) -> dict[str, Any]:
    """What a preset sets."""
    return parse_flags(PRESETS[preset].split(), FLAGS)


# ======================================================================================================================
# command lines

# What to do instead of flags that other programs have.
CLASSIFIERS = "there are no classifiers here; train with --class_dropout 0.1 and sample with --guidance_scale"
UPSAMPLERS = "there are no upsamplers here; --image_size is the size of what is drawn"
SAMPLING_PROGRAM = "python generate.py takes it; here it is --sample N --init FILE with --sampler"
ELSEWHERE = dict.fromkeys(["iterations", "anneal_lr"], CLASSIFIERS) | dict.fromkeys(["large_size", "small_size", "base_samples"], UPSAMPLERS)
ELSEWHERE |= dict.fromkeys(["model_path", "use_ddim"], SAMPLING_PROGRAM)
ELSEWHERE |= dict.fromkeys(["bench", "profile"], "python dev/bench_torch.py times PyTorch, make profile the program")


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
        given[name] = parse_value(flags[name], "0" if name == "microbatch" and text == "-1" else text)  # guided-diffusion's "all at once"
        check_value(flags[name], given[name])
    return given


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
        wanted = {"bool": "True or False", "int": "a whole number", "float": "a number", "tuple[int, int]": "64 or 48x64"}
        raise UserError(f"--{f.name} {text}: must be {wanted.get(f.type, 'numbers with commas')}") from None


def format_value(name: str, value: Any) -> str:
    """The text that parse_value reads."""
    if name == "image_size":
        return f"{value[0]}" if value[0] == value[1] else f"{value[0]}x{value[1]}"
    if isinstance(value, tuple):
        return ",".join(f"{v:g}" if isinstance(v, float) else str(v) for v in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def check_value(f: dataclasses.Field, value: Any) -> None:
    words, (low, high) = f.metadata.get("words", WORDS.get(f.name)), f.metadata.get("limits", LIMITS.get(f.name, (-math.inf, math.inf)))
    if words and value not in words:
        raise UserError(f"--{f.name} {value}: must be one of {', '.join(filter(None, words))}")
    if f.type in ("int", "float") and not low <= value <= high:
        kind = "whole number" if f.type == "int" else "number"
        raise UserError(f"--{f.name} {value}: must be a {kind} from {low:.10g} to {high:.10g}")


def print_help(flags: dict[str, dataclasses.Field], intro: str) -> None:
    print(intro)
    for ours in True, False:
        print("\nFlags of this program:" if ours else "\n./train_unet's flags, with their defaults; its --help says what they mean and may be:")
        for name, f in flags.items():
            if ("help" in f.metadata) == ours:
                words = f.metadata.get("words")
                told = (f.metadata.get("help", ""), f"({'|'.join(words)})" if words else "", f"[{format_value(name, f.default) or chr(34) * 2}]")
                print(f"  --{name:25s} {' '.join(filter(None, told))}")
    print("\nPresets: without --preset fashion32, or for images of 64x64 emoji64; on a GPU unet64")
    for preset, text in PRESETS.items():
        print(f"  {preset:10s}", " ".join(text.split()))


# ======================================================================================================================
# what can work


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
            least = int(len(counts) == 1)
            raise UserError(problem + f"can't take {count} of {size} steps; use {least} to {size}")
        stride = (size - 1) / (count - 1) if count > 1 else 1
        position = 0.0
        for _ in range(count):
            kept.append(start + round(position))
            position += stride
        start += size
    if not kept:
        raise UserError(problem + "keeps no step")
    return kept


def validate(config: Config) -> None:
    """UserError, with what would work, if a model or a run with these flags can't."""

    def check(ok: bool, name: str, wanted: str) -> None:
        if not ok:
            raise UserError(f"--{name} {format_value(name, getattr(config, name))}: {wanted}")

    for f in FLAGS.values():
        check_value(f, getattr(config, f.name))
    height, width = config.image_size
    check(4 <= height <= 4096 and 4 <= width <= 4096, "image_size", "must be a number of pixels from 4 to 4096, or HxW")
    check(len(config.channel_mult) > 0, "channel_mult", f"must be given for images {height} high, such as 1,2,2")
    levels = len(config.channel_mult)
    check(levels <= 8, "channel_mult", "must be 1 to 8 numbers with commas, such as 1,2,3,4")
    depth, patch = config.patch * 2 ** (levels - 1), config.in_channels * config.patch**2
    check(patch <= 64, "patch_size", f"makes {patch} channels of a patch, of at most 64")
    wanted = f"must be a multiple of {depth}, because {levels} levels halve it {levels - 1} times{' in patches' * (config.patch > 1)}"
    check(height % depth == 0 and width % depth == 0, "image_size", wanted)
    check(config.num_channels % 32 == 0, "num_channels", "must be a multiple of 32 (group norm has 32 groups)")
    for level, m in enumerate(config.channel_mult):
        ok = 0 < m <= 64 and config.channels(level) >= 32 and config.channels(level) % 32 == 0
        check(ok, "channel_mult", f"{m:g} * num_channels {config.num_channels} must be a positive multiple of 32")
    check(len(config.attention_resolutions) <= 8, "attention_resolutions", "must be up to 8 heights, such as 16,8")
    heights = [height // config.patch // 2**level for level in range(levels)]
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
    if config.objective != "ddpm":
        for name in ("predict", "learn_sigma", "schedule_sampler", "use_kl", "min_snr_gamma", "rescale_timesteps"):
            wanted = f"is for --objective ddpm; {config.objective} has a prediction, a weighting and noise levels of its own"
            check(getattr(config, name) == getattr(Config, name), name, wanted)
    for name, objectives in OBJECTIVES_OWN.items():
        if config.objective not in objectives:
            default = getattr(Config, name)
            setattr(config, name, float(np.float32(default)) if isinstance(default, float) else default)
    if config.objective == "ect":
        stages, most = math.ceil(config.max_steps / config.ect_stage), int(math.log(LARGEST_GAP_DIVISOR) / math.log(config.ect_q))
        enough = math.ceil(config.max_steps / max(most, 1))
        told = f"makes a grow to {stages}, and --ect_q {config.ect_q:g}^a must stay below {LARGEST_GAP_DIVISOR:g}; {enough} is enough"
        check(stages <= most, "ect_d", told)
    check(not (config.use_kl and config.min_snr_gamma > 0), "min_snr_gamma", "weighs the squared error, which --use_kl True leaves out")
    check(not config.classes or config.class_cond, "classes", "this model is not conditioned on classes; leave the flag out")
    ok = all(0 <= k < config.num_classes for k in config.classes)
    check(ok, "classes", f"must be some of the classes 0 to {config.num_classes - 1}")
    wanted = "needs a model that was trained with --class_cond True and a --class_dropout, such as 0.1"
    check(config.guidance_scale == 1 or config.null_class, "guidance_scale", wanted)
    check(config.sigma_min < config.sigma_max, "sigma_min", f"must be below --sigma_max {config.sigma_max:g}")
    check(config.sampler != "consistency" or config.mid_t < config.sigma_max, "mid_t", f"must be below --sigma_max {config.sigma_max:g}")
    check(not (config.start_from and config.inpaint), "start_from", "and --inpaint: images are changed in one of these ways at a time")
    check(bool(config.inpaint) == bool(config.mask), "inpaint", "and --mask need each other, the images and where to paint them anew")
    changed = bool(config.start_from or config.inpaint)
    check(not changed or config.sample > 0, "start_from" if config.start_from else "inpaint", "is for --sample")
    ok = config.S_churn == 0 or not changed
    check(ok, "S_churn", "is for images made of noise alone; leave it out with --start_from and --inpaint")
    ok = config.S_churn == 0 or config.sampler in ("euler", "heun")
    check(ok, "S_churn", f"is for --sampler euler and heun; {config.sampler} adds no noise that way")
    space_timesteps(config.diffusion_steps, config.timestep_respacing)
    if config.noise_schedule == "linear":
        check(config.diffusion_steps > 20, "diffusion_steps", "must be above 20 with the linear schedule")
    ok = 1 <= len(config.ema_rate) <= MOST_EMAS and all(0 <= rate <= 1 or rate in POWER_EMAS[: 2 * (k > 0)] for k, rate in enumerate(config.ema_rate))
    check(ok, "ema_rate", f"must be a number from 0 to 1, or up to {MOST_EMAS} of them with commas")
    ok = config.microbatch == 0 or (config.batch_size % config.microbatch == 0)
    check(ok, "microbatch", f"must divide --batch_size {config.batch_size}")
    check(config.output_dir != "", "output_dir", "must name a folder")
    ok = not config.keep_best or config.val_data_file != "" or config.sample > 0
    check(ok, "keep_best", "needs --val_data_file, the images whose loss says which checkpoint is the best")
    check(config.output.endswith((".png", ".bin")), "output", "must end in .png (one grid) or .bin (float images)")
    ok = len(config.data_file.encode(errors="replace")) <= 511 and "\0" not in config.data_file
    check(ok, "data_file", "must be at most 511 bytes long, to fit in a checkpoint")


def make_config(flags: dict[str, Any], data: Any = None, start: Any = None, resume: bool = False) -> Config:
    """A valid Config. What flags leave open comes from the model file that it starts from (its model flags; to resume,
    its training flags, too) or else from the data (size, channels, classes), and then from the preset.
    data: a model_files.Data, start: a model_files.ModelFile;
    flags: {name: value} as parse_flags gives them, for example {"preset": "unet64", "channel_mult": (1, 2)}."""
    flags = without_aliases(flags)
    preset = flags.get("preset") or (start and start.config.preset) or default_preset(flags, data)
    without = left_out_of_preset(flags)
    chosen = {name: value for name, value in preset_flags(preset).items() if name not in without}
    values = chosen | flags | {"preset": preset}
    if start and flags.get("channel_mult") == ():
        flags = flags | {"channel_mult": DEFAULT_CHANNEL_MULT.get(start.config.image_size[0], ())}
    if start:
        values |= start.inherit(flags, resume) | flags
    elif data:
        shape = {"image_size": data.images.shape[2:], "in_channels": data.images.shape[1]}
        values |= {name: value for name, value in shape.items() if name not in flags}
        values.setdefault("num_classes", data.num_classes)
    values |= ect_defaults(values, flags, start)
    config = Config(**values)
    if "rescale_learned_sigmas" in flags and "vlb_weight" in flags:
        raise UserError("--rescale_learned_sigmas: sets --vlb_weight, which is given too; leave one of them out")
    if "rescale_learned_sigmas" in flags or (not start and "rescale_learned_sigmas" in chosen and "vlb_weight" not in flags):
        config.vlb_weight = float(np.float32(1e-3 if config.rescale_learned_sigmas else 1 / config.diffusion_steps))
    steps = config.timestep_respacing
    if "timestep_respacing" not in flags and steps.isdigit() and int(steps) > config.diffusion_steps:
        config.timestep_respacing = ""  # all of them
    if data and not start and "attention_resolutions" not in flags:
        heights = [config.image_size[0] // config.patch // 2**level for level in range(len(config.channel_mult))]
        if heights and not set(config.attention_resolutions) <= set(heights):
            config.attention_resolutions = (heights[-1],)
    if data and not start and config.image_size != tuple(data.images.shape[2:]):
        data.check(config)  # before flags that nobody gave are judged
    validate(config)
    return config


def left_out_of_preset(flags: dict[str, Any]) -> set[str]:
    """What of a preset would undo or forbid what these flags ask for."""
    names = set()
    if "num_heads" in flags:
        names.add("num_head_channels")
    if flags.get("objective", "ddpm") != "ddpm":
        names |= {"predict", "min_snr_gamma", "learn_sigma"}
    if "predict" in flags or flags.get("use_kl"):  # a weighting goes with its prediction
        names.add("min_snr_gamma")
    if "sampler" in flags or flags.get("start_from") or flags.get("inpaint"):
        names.add("S_churn")
    return names


def ect_defaults(values: dict[str, Any], flags: dict[str, Any], start: Any) -> dict[str, Any]:
    """The levels and the sampler that Geng et al. 2024 tune for, where no flag, and no model file of ect, says otherwise."""
    own: dict[str, Any] = {}
    if values.get("objective") == "ect":
        own = {"sampler": "consistency"}
        if not start or start.config.objective != "ect":
            own |= {"P_mean": -1.1, "P_std": 2.0}
    if (own | flags).get("sampler") == "consistency":
        own |= {"timestep_respacing": "2", "S_churn": 0.0}  # which a preset may have for another sampler
    return {name: value for name, value in own.items() if name not in flags}


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
    return resolve(flags, meant)


def resolve(flags: dict[str, Any], meant: list[tuple[str, str, Any]]) -> dict[str, Any]:
    """flags with what others mean by them: (alias, name, value); UserError if that is given otherwise, too."""
    for alias, name, value in meant:
        if flags.get(name, value) != value:
            raise UserError(f"--{alias} {flags[alias]}: means --{name} {value}, and --{name} is {flags[name]}; leave one of them out")
    return flags | {name: value for _, name, value in meant}


def default_preset(flags: dict[str, Any], data: Any = None) -> str:
    on_gpu = pick_device(flags.get("device", "auto")).type == "cuda"
    height = data.images.shape[2] if "data_file" in flags and data else None
    if flags.get("data_dir"):
        height = 64  # a folder becomes 64x64 RGB, as in prepare_data.py
    if height == 64:
        return "quick64" if on_gpu else "emoji64"
    if height is None:
        return "quick64" if on_gpu else "quick32"
    if on_gpu:
        return "unet64"
    return "quick32" if height == 32 else "fashion32"


# ======================================================================================================================
# programs


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


def pick_precision(config: Config, device: torch.device) -> str:
    return config.precision if config.precision != "auto" else "bf16" if device.type == "cuda" else "fp32"


def need_packages() -> None:
    if MISSING:
        raise UserError(prepare_data.how_to_install(MISSING, "torch", "numpy", "pillow", "safetensors", "tqdm", "matplotlib"))


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


class Screen:
    """What a run tells; on a terminal its status is one line, drawn anew. stop: the list that ends the run, also when nobody reads (| head)."""

    def __init__(self, stop: list[str]):
        self.stop, self.terminal, self.shown = stop, sys.stdout.isatty(), -math.inf

    def print(self, text: str, end: str = "\n") -> None:
        try:
            print(text, end=end, flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self.stop.append("SIGPIPE")

    def tell(self, text: str) -> None:
        self.print("\n" * self.terminal + text)

    def tell_any(self, text: str) -> None:
        """What may be nothing."""
        if text:
            self.tell(text)

    def status(self, line: str) -> None:
        """line: its parts stand between | and |; those that matter least go where there is no room."""
        columns = shutil.get_terminal_size().columns if self.terminal else len(line) + 1
        for part in "norm", "lr", "[^|]* images", "[^|]* ms", "skipped", "val", "ETA":
            if len(line) >= columns:
                line = re.sub(rf" \| {part}[^|]*(?= \||$)", "", line)
        self.print("\r\033[K" * self.terminal + line[: columns - 1], end="" if self.terminal else "\n")
        self.shown = time.perf_counter()


def run_program(program: str, body: Callable[[list[str]], int | None]) -> int:
    """Runs a program, and returns the exit code, that of body or 0; a mistake ends in one sentence and exit code 1, Ctrl-C in 130."""
    code = 1
    before = signal.getsignal(signal.SIGINT)
    try:
        interrupted.take(interrupted.interrupt, signal.SIGINT)
        prepare_data.standard_streams()
        done = body(sys.argv[1:]) or 0
        sys.stdout.flush()
        return done
    except KeyboardInterrupt as e:
        sentence, code = "interrupted", interrupted.exit_code(e)
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
    finally:
        signal.signal(signal.SIGINT, before)
    sentence = re.sub(r"[\x00-\x1f\x7f]\s*", " ", sentence)  # what a file says may have several lines
    print(f"{program}: {sentence}", file=sys.stderr)
    return code
