"""Flags: their names, defaults, limits and presets, and how a command line gives them.

unet/flags.h has them, in a table that the C++ program reads, too. Only flags that ./train_unet lacks are here. This module needs Python alone.
"""

from __future__ import annotations

import ast
import ctypes
import dataclasses
import difflib
import math
import re
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from common.program import UserError

T = TypeVar("T")


def float32(value: float) -> float:
    """The number as files and the C++ program hold it."""
    return ctypes.c_float(value).value


def number(word: str, type_: type[int] | type[float] = float) -> int | float:
    """The number that a word is. ValueError: it is none, or one for Python alone, such as 1_0 or digits of another alphabet."""
    if "_" in word or not word.isascii():
        raise ValueError(word)
    return type_(word)


def numbers(words: list[str]) -> list[float]:
    """The numbers that these words are, as float32; [] if one of them is something else."""
    try:
        return [float32(number(word)) for word in words]
    except ValueError:
        return []


def finite_numbers(words: list[str]) -> list[float]:
    """The same; [] also if one of them is not finite."""
    row = numbers(words)
    return row if all(map(math.isfinite, row)) else []


# ======================================================================================================================
# the table: unet/flags.h

TYPES = {"int": "int", "int64_t": "int", "float": "float", "bool": "bool", "string": "str"}
TYPES |= {"pixels": "tuple[int, int]", "ints": "tuple[int, ...]", "floats": "tuple[float, ...]", "names": "tuple[int | str, ...]"}
NAMES = {"true": True, "false": False, "BIG": 1e9}


def flag(default: Any, text: str, low: float = -math.inf, high: float = math.inf, choices: str = "", **more: Any) -> Any:
    """A flag: what --help says, and low..high for numbers or "a|b" for words. more: what the table says besides."""
    return field(default=default, metadata={"help": text, "limits": (low, high), "words": choices.split("|") if choices else None} | more)


def literal(node: ast.expr) -> Any:
    return NAMES[node.id] if isinstance(node, ast.Name) else ast.literal_eval(node)


def read_flag(row: dict[str, Any], kind: ast.Name, name: ast.Name, default: ast.expr, text: ast.expr, *limits: ast.expr) -> tuple[str, str, Any]:
    """(name, type, dataclass field) of a FLAG. row: what else its row says."""
    value, type_ = literal(default), TYPES[kind.id]
    if isinstance(value, str):
        value = parse_value(name.id, type_, value)
    if type_ == "float":
        value = float(value)
    if limits and isinstance(limits[0], ast.Call):  # WORDS("a|b")
        more = {"choices": literal(limits[0].args[0])}
    else:
        more = dict(zip(("low", "high"), map(literal, limits)))
    return name.id, type_, flag(value, literal(text), **more, **row)


def read_table(path: Path) -> tuple[list[tuple[str, str, Any]], dict[str, str], dict[str, str]]:
    """The flags, the presets, and what presets share, of unet/flags.h, whose rows are Python, too."""
    flags, presets, shared, heading, objectives = [], {}, {}, "", ""
    for row in ast.parse(re.sub(r"^//", "#", path.read_text(), flags=re.M)).body:
        macro, (first, *rest) = row.value.func.id, row.value.args
        if macro == "HEADING":
            heading = literal(rest[0])
        elif macro == "OBJECTIVES":
            objectives = literal(rest[0])
        elif macro in ("FLAG", "SAVED", "FREE"):
            slot, args = (0, row.value.args) if macro == "FLAG" else (literal(first), rest)
            flags.append(read_flag({"slot": slot, "free": macro == "FREE", "objectives": objectives, "heading": heading}, *args))
        else:  # PRESET, PRESETS_SHARE, TEXT
            text = " ".join(shared[part.id] if isinstance(part, ast.Name) else literal(part) for part in rest)
            (presets if macro == "PRESET" else shared)[first.id] = text
    return flags, presets, shared


# ======================================================================================================================
# command lines

# What to do instead of flags that other programs have.
CLASSIFIERS = "there are no classifiers here; train with --class_dropout 0.1 and sample with --guidance_scale"
ELSEWHERE = {"base_samples": "here it is --sample N --cond_file, a data file of the small images"}
ELSEWHERE |= dict.fromkeys(["iterations", "anneal_lr"], CLASSIFIERS)
ELSEWHERE["keep_best"] = "./train_unet does that; here --keep_checkpoints 0 keeps all checkpoints, and log.csv has their validation losses"
ELSEWHERE |= dict.fromkeys(["model_path", "use_ddim"], "python generate.py takes it; here it is --sample N --init FILE --sampler")
ELSEWHERE |= dict.fromkeys(["bench", "profile"], "python dev/benchmarks/bench_torch.py times PyTorch, make profile the program")


def parse_flags(argv: list[str], flags: dict[str, dataclasses.Field], intro: str = "") -> dict[str, Any]:
    """What a command line (--name value or --name=value) sets, as {name: value}. Prints and leaves on --help."""
    as_in_cpp = "preset" in flags  # a program with ./train_unet's flags says what that says
    listed = "--help all lists" if as_in_cpp else "--help lists"
    given: dict[str, Any] = {}
    words = deque(argv)
    while words:
        word = words.popleft()
        if word in ("--help", "-h"):
            print_help(flags, intro, everything=not as_in_cpp or bool(words) and words[0] == "all")
            sys.exit(0)
        if word == "--version" and as_in_cpp:
            print("train_unet", SHARED["VERSION"])
            sys.exit(0)
        if not word.startswith("--"):
            example = "batch_size 16" if as_in_cpp else next(iter(flags))
            raise UserError(f"{word}: is no flag; they look like --{example}; {listed} them")
        name, equals, text = word[2:].partition("=")
        if name not in flags:
            instead = CLASSIFIERS if name.startswith("classifier_") else ELSEWHERE.get(name)
            if as_in_cpp and instead:
                raise UserError(f"--{name}: {instead}")
            nearest = "".join(f"; did you mean --{flag}?" for flag in difflib.get_close_matches(name, flags, 1))
            raise UserError(f"--{name}: there is no such flag{nearest}; {listed} those there are")
        if name in given:
            raise UserError(f"--{name}: is given twice; once is enough")
        if not equals and (not words or words[0].startswith("--")):  # that is the next flag
            raise UserError(f"--{name}: its value is missing")
        text = text if equals else words.popleft()
        if flags[name].type == "list[str]":  # up to the next flag
            given[name] = [text]
            while words and not words[0].startswith("--"):
                given[name].append(words.popleft())
            continue
        given[name] = parse_value(name, flags[name].type, "0" if name == "microbatch" and text == "-1" else text)  # guided-diffusion's "all at once"
        check_value(flags[name], given[name])
    return given


def parse_value(name: str, type_: str, text: str) -> Any:
    """The value of a flag from its text."""

    def exact(word: str, kind: type[int] | type[float]) -> int | float:
        if word != word.rstrip():  # train_unet.cu takes no space behind a number
            raise ValueError(word)
        return number(word, kind)

    def number_or_name(word: str) -> int | str:
        try:
            return exact(word, int)
        except ValueError:
            return word

    try:
        if type_ == "bool":
            return {"True": True, "true": True, "1": True, "False": False, "false": False, "0": False}[text]
        if type_ in ("int", "float"):
            return exact(text, int if type_ == "int" else float)
        if name == "image_size":
            height, x, width = text.partition("x")
            return exact(height, int), exact(width if x else height, int)
        if type_ == TYPES["names"]:
            return tuple(map(number_or_name, text.split(","))) if text else ()
        if type_.startswith("tuple"):
            return tuple(exact(v, float if "float" in type_ else int) for v in text.split(",")) if text else ()
        return text
    except (ValueError, KeyError):
        wanted = {"bool": "True or False", "int": "a whole number", "float": "a number", "tuple[int, int]": "64 or 48x64"}
        raise UserError(f"--{name} {text}: must be {wanted.get(type_, 'numbers with commas')}") from None


def format_value(name: str, value: Any) -> str:
    """The text that parse_value reads."""
    if name == "image_size" and value:  # prepare_data.py's default is ()
        return f"{value[0]}" if value[0] == value[1] else f"{value[0]}x{value[1]}"
    if isinstance(value, tuple):
        return ",".join(f"{v:g}" if isinstance(v, float) else str(v) for v in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def check_value(f: dataclasses.Field, value: Any) -> None:
    words, (low, high) = f.metadata["words"], f.metadata["limits"]
    if words and value not in (*words, f.default):
        raise UserError(f"--{f.name} {value}: must be one of {', '.join(words)}")
    if f.type == "int" and not low <= value <= high:
        raise UserError(f"--{f.name} {value}: must be a whole number from {low:.10g} to {high:.10g}")
    if f.type == "float" and not float32(low) <= float32(value) <= float32(high):
        raise UserError(f"--{f.name} {value}: must be a number from {low:.10g} to {high:.10g}")


def print_help(flags: dict[str, dataclasses.Field], intro: str, everything: bool) -> None:
    """everything: False leaves out the flags of ./train_unet that people seldom need, and the presets."""
    print(intro)
    heading = None
    for name, f in flags.items():
        if not everything and name in TABLE_NAMES and name not in SHARED["FIRST_FLAGS"].split():
            continue
        if heading != (heading := f.metadata.get("heading", "Flags of this program")):
            print(f"\n{heading}")
        words = f"({'|'.join(f.metadata['words'])})" if f.metadata["words"] else ""
        default = f"[{format_value(name, f.default) or chr(34) * 2}]" if f.default or "preset" in flags else ""
        told = (f.metadata["help"], words, default)
        print(f"  --{name:25s} {' '.join(filter(None, told))}")
    if not everything:
        print(f"\n--help all lists all {len(flags)} flags, and what each preset sets.")
    if "preset" not in flags or not everything:
        return
    print("\nPresets: without --preset, and for your own images of 32x32, quick32; for larger ones emoji64 (from 128x128 on with --patch_size 4),")
    print("for images that are smaller, or whose sides can't be halved so often, fashion32. On a GPU photos32, quick64 and unet64.")
    print(f"If the images have labels, also {SHARED['OF_LABELS']} (where the preset says nothing else);")
    print(f"from {MANY_IMAGES} images on --min_snr_gamma 5 (where the preset sets it).")
    for preset, text in PRESETS.items():
        print(f"  {preset:13s}", text)


def without_aliases(flags: dict[str, Any]) -> dict[str, Any]:
    """flags with guided-diffusion's names for values of others, such as --predict_xstart True, as these: --predict x0."""
    meant: list[tuple[str, str, Any]] = []
    large, small = flags.get("large_size", 0), flags.get("small_size", 0)
    if (large > 0) != (small > 0):
        raise UserError(f"--large_size {large}, --small_size {small}: an upsampler needs both")
    if small and large % small:
        raise UserError(f"--small_size {small}: must divide --large_size {large}")
    if small:
        meant += [("large_size", "image_size", (large, large)), ("small_size", "cond", f"lowres:{large // small}")]
    if large == 512 and "channel_mult" not in flags:
        meant.append(("large_size", "channel_mult", (1.0, 1.0, 2.0, 2.0, 4.0, 4.0)))
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


# ======================================================================================================================
# the configuration

# What ./train_unet has for several processes, for its page, and for a run that goes on in its own folder, and what is otherwise here (Own).
NOT_HERE = ("num_gpus", "exchange", "rank_timeout", "compare_runs", "keep_best", "resume_checkpoint", "device")
TABLE, PRESETS, SHARED = read_table(Path(__file__).parent.parent / "unet/flags.h")
TABLE_NAMES = {name for name, _, _ in TABLE}
MANY_IMAGES = 5000  # from how many images on a run without --preset has --min_snr_gamma 5


@dataclass
class Own:
    """Flags that ./train_unet lacks, or has with other values."""

    init_model_only: bool = flag(False, "write initial weights to --init_model_filename, and stop")
    init_model_filename: str = flag("unet_init.bin", "where to")
    convert: list[str] = flag((), "IN OUT: convert a model file (.bin, .pt, .safetensors, or DIR/ of diffusers), and stop")
    nll: str = flag("", "F.bin: bits per dimension of its images by the model --init, and stop")
    device: str = flag("auto", "auto (a GPU if there is one), the number of a GPU, cpu, cuda, cuda:1, ...")
    compile: str = flag("auto", "torch.compile the model; auto: on a GPU", choices="auto|0|1")
    resume_checkpoint: str = flag("", "go on from this checkpoint, of either program, in a new output_dir")
    ema_sigma_rel: float = flag(0.0, "with --convert IN OUT: of the average that OUT holds, over a run up to the snapshot IN, ema_STEP.bin", 0, 0.28)


@dataclass
class Config(dataclasses.make_dataclass("AllFlags", [row for row in TABLE if row[0] not in NOT_HERE], bases=(Own,))):
    """Every flag, as an attribute; make_config() is how to get a valid one."""

    def __post_init__(self) -> None:
        for name in (n for n, f in FLAGS.items() if f.type == "float"):
            setattr(self, name, float32(getattr(self, name)))
        rates = self.ema_rate if isinstance(self.ema_rate, (tuple, list)) else (self.ema_rate,)
        height, _ = self.image_size
        mult = self.channel_mult or DEFAULT_CHANNEL_MULT.get(height, ())
        self.channel_mult, self.ema_rate = (tuple(float32(m) for m in values) for values in (mult, rates))
        if self.cond and not self.cond_channels:
            self.cond_channels = self.made_channels
        if self.ema_snapshots > 0:
            self.ema_rate += tuple(power for power in POWER_EMAS if power not in self.ema_rate)

    @property
    def null_class(self) -> bool:
        """Whether the class embedding has a row for "no class", after those of all classes."""
        return self.class_cond and self.class_dropout > 0

    @property
    def muon(self) -> bool:
        """Whether Muon updates the matrices between hidden channels."""
        return self.optimizer == "muon"

    @property
    def num_values(self) -> int:
        """Numbers that the network is told of an image: its own, and those of its augmentation."""
        return self.cond_dim + (AUGMENT_NUMBERS if self.augment > 0 else 0)

    @property
    def can_be_guided(self) -> bool:
        """Whether the model has learnt to do without what it is conditioned on."""
        return (self.class_dropout > 0 and (self.class_cond or self.cond_dim > 0)) or self.cond_dropout > 0

    @property
    def picture_kind(self) -> str:
        """What --cond makes of an image: lowres, gray or mask; "": --cond_file has the pictures, or there are none."""
        return self.cond.partition(":")[0]

    @property
    def picture_factor(self) -> int:
        """K of --cond lowres:K; 0: another kind, or no whole number."""
        kind, _, factor = self.cond.partition(":")
        return int(factor) if kind == "lowres" and factor.isascii() and factor.isdecimal() and len(factor) <= 5 else 0

    @property
    def made_channels(self) -> int:
        """How many channels a picture has that --cond makes of an image."""
        return 1 if self.picture_kind == "gray" else self.in_channels + (self.picture_kind == "mask")

    @property
    def seen_channels(self) -> int:
        """Channels of the network's input, and of a picture beside it."""
        return self.in_channels + self.cond_channels

    @property
    def learned_variance(self) -> bool:
        return self.learn_sigma and (self.vlb_weight > 0 or self.use_kl)

    def meaning(self, name: str, meanings: dict[str, T]) -> T:
        """What a flag's word means in one place of the program. UserError if that place does not know it: no new word is taken for an old one."""
        word = getattr(self, name)
        if word not in meanings:
            raise UserError(f"--{name} {word}: a part of this program does not know that word yet; choose another one")
        return meanings[word]

    @property
    def frame(self) -> str:
        """What the network is shown and told, and what its answer means: those of objective ddpm, edm or flow."""
        if self.objective == "ect":
            return self.meaning("ect_frame", {"edm": "edm", "flow": "flow"})
        return self.meaning("objective", {"ddpm": "ddpm", "edm": "edm", "flow": "flow"})

    @property
    def ect_stage(self) -> int:
        """Steps of one a."""
        return self.ect_d or math.ceil(self.max_steps / 8)

    @property
    def last_ect_stage(self) -> int:
        """The stage of the last step, from 0 on."""
        return (self.max_steps - 1) // self.ect_stage

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
WORDS: dict[str, list[str]] = {name: f.metadata["words"] for name, f in FLAGS.items() if f.metadata["words"]}
OBJECTIVES_OWN = {name: f.metadata["objectives"].split("|") for name, f in FLAGS.items() if f.metadata.get("objectives")}
FREE_FLAGS = {name for name, f in FLAGS.items() if f.metadata.get("free")}  # saved, but may change from run to run
SAMPLING_FLAGS = ["sampler", "timestep_respacing", "eta", "sigma_min", "sigma_max", "rho", "S_churn", "S_min", "S_max", "S_noise", "clip_denoised"]
SAMPLING_FLAGS += ["mid_t", "dynamic_threshold", "classes", "guidance_scale", "guidance_min", "guidance_max", "noise_seed"]
SAMPLING_FLAGS += ["strength", "jump_length", "jump_n_sample", "values", "cond_file"]

# Where model files keep flags in their header: the table's slots, and those of flags that are more than one number of four bytes. The model and the
# diffusion come first, then what a checkpoint keeps besides.
SLOTS = {name: f.metadata["slot"] for name, f in FLAGS.items() if f.metadata.get("slot")}
SLOTS |= {"image_size": 6, "channel_mult": 23, "attention_resolutions": 32, "seed": 66, "ema_rate": 79, "data_file": 128, "cond": 62}
INTERVALS = ("save_interval", "sample_interval", "num_samples")  # a TrainingState has them, since older files have none
CHECKPOINT_FLAGS = [*sorted(SLOTS.keys() - INTERVALS, key=SLOTS.__getitem__), "cond_file"]  # which lies behind data_file, in the same slots
SAVED_FLAGS = [name for name in CHECKPOINT_FLAGS if SLOTS.get(name, 128) < 64]

PICTURE_KINDS = ("", "lowres", "gray", "mask")  # of --cond, as their numbers in files
AUGMENT_NUMBERS = 9
MOST_EMAS = 8
MOST_LEVELS = 8
POWER_EMAS = tuple(float32(exponent) for exponent in (16.97, 6.94))  # in the place of a rate: --ema_snapshots'
LARGEST_GAP_DIVISOR = 1e6  # of ect_q^a: a smaller gap is lost in fp32's rounding
FOREIGN_PRESET = "adm"  # what a state_dict without a configuration, most likely guided-diffusion's, does not say
# guided-diffusion's channel_mult by image height, for --channel_mult ""
DEFAULT_CHANNEL_MULT = {512: (0.5, 1, 1, 2, 2, 4, 4), 256: (1, 1, 2, 2, 4, 4), 128: (1, 1, 2, 3, 4), 64: (1, 2, 3, 4)}


def preset_flags(preset: str) -> dict[str, Any]:
    """What a preset sets."""
    return parse_flags(PRESETS[preset].split(), FLAGS)
