"""Flags: their names, defaults, limits and presets, and how a command line gives them.

The names and defaults are ./train_unet's, whose --help says what each flag means and may be. This module needs Python alone.
"""

from __future__ import annotations

import ctypes
import dataclasses
import difflib
import math
import sys
from dataclasses import dataclass, field
from typing import Any

from common.program import UserError


def float32(value: float) -> float:
    """The number as files and the C++ program hold it."""
    return ctypes.c_float(value).value


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
        for name in (n for n, f in FLAGS.items() if f.type == "float"):
            setattr(self, name, float32(getattr(self, name)))
        rates = self.ema_rate if isinstance(self.ema_rate, (tuple, list)) else (self.ema_rate,)
        height, _ = self.image_size
        mult = self.channel_mult or DEFAULT_CHANNEL_MULT.get(height, ())
        self.channel_mult, self.ema_rate = (tuple(float32(m) for m in values) for values in (mult, rates))
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
# Flags that model files keep, in the order of their header: the model's and the diffusion's, and what a checkpoint keeps besides.
SAVED_FLAGS = """image_size in_channels num_channels num_res_blocks num_heads num_head_channels num_heads_upsample class_cond num_classes learn_sigma
    use_scale_shift_norm resblock_updown conv_resample use_new_attention_order dropout channel_mult attention_resolutions max_period diffusion_steps
    noise_schedule objective predict rescale_timesteps min_snr_gamma vlb_weight use_kl sigma_small class_dropout sigma_data P_mean P_std t_mean t_std
    patch_size ect_frame""".split()
CHECKPOINT_FLAGS = (
    SAVED_FLAGS
    + """seed batch_size microbatch max_steps lr weight_decay adam_beta1 adam_beta2 adam_eps grad_clip warmup_steps lr_schedule ema_rate
    random_flip schedule_sampler ect_q ect_k ect_b ect_d ect_c ect_weight data_file""".split()
)

# What a number or a word may be at all, in a file or on a command line.
MOST_EMAS, BIG = 8, 10**9
POWER_EMAS = tuple(float32(exponent) for exponent in (16.97, 6.94))  # in the place of a rate: --ema_snapshots'
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
ELSEWHERE |= dict.fromkeys(["bench", "profile"], "python dev/benchmarks/bench_torch.py times PyTorch, make profile the program")


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
