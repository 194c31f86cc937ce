"""From flags to a configuration: what they leave open, and what can work together."""

from __future__ import annotations  # noqa: I001 (names side by side)

import csv
import io
import math
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from common.flags import (
    DEFAULT_CHANNEL_MULT, FLAGS, LARGEST_GAP_DIVISOR, MANY_IMAGES, MOST_EMAS, OBJECTIVES_OWN, POWER_EMAS, PRESETS, SHARED, Config, check_value, finite_numbers, float32,
    format_value, parse_flags, preset_flags, without_aliases,
)  # fmt: skip
from common.files import open_file
from common.program import UserError


def space_timesteps(steps: int, respacing: str) -> list[int]:
    """The timesteps that a sampler visits, ascending: "" = all, "50" = 50 evenly spaced, "ddim50" = every steps/50-th,
    "10,15,20" = so many from each third. As guided-diffusion does it, rounding halves to even; but "1" is the last one, whose noise is the start's."""
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
        position = size - 1.0 if counts == [1] else 0.0
        for _ in range(count):
            kept.append(start + round(position))
            position += stride
        start += size
    if not kept:
        raise UserError(problem + "keeps no step")
    return kept


def check_hearing(config: Config, flags: dict[str, Any]) -> None:
    """Of a new run, whether some block can hear the embedding: UserError if the user asked for classes or numbers, else a line. Where the embedding is
    only added, a norm of 32 groups follows, and takes it away again if a group is one channel."""
    if config.use_scale_shift_norm or any(config.channels(level) > 32 for level in range(len(config.channel_mult))):
        return
    told = "with 32 channels at all levels, norms take away what blocks are told (t, classes, numbers)"
    told += "; use --use_scale_shift_norm True, or more channels"
    for name in "cond_dim", "class_cond":
        check(config, not (flags.get(name) and getattr(config, name)), name, f"would have no effect: {told}")
    print(f"--num_channels {config.num_channels}: {told}")


def class_numbers(classes: Iterable[int | str], names: Sequence[str]) -> tuple[int, ...]:
    """Classes by their numbers; those that are words by the names of the model's classes."""
    for name in classes:
        if isinstance(name, str) and name not in names:
            raise UserError(f"--classes {name}: is none of this model's classes ({', '.join(names) or 'they have no names; use their numbers'})")
    return tuple([*names].index(name) if isinstance(name, str) else int(name) for name in classes)


def check(config: Config, ok: bool, name: str, wanted: str) -> None:
    """UserError about a flag, unless it is ok."""
    if not ok:
        raise UserError(f"{' '.join(filter(None, (f'--{name}', format_value(name, getattr(config, name)))))}: {wanted}")


def validate(config: Config) -> None:
    """UserError, with what would work, if a model or a run with these flags can't."""
    for f in FLAGS.values():
        check_value(f, getattr(config, f.name))
    check_network(config)
    check_attention(config)
    check_objective(config)
    check_pictures(config)
    check_sampling(config)
    check_run(config)


def check_network(config: Config) -> None:
    """Sizes: of images, patches, levels, channels."""
    height, width = config.image_size
    check(config, 4 <= height <= 4096 and 4 <= width <= 4096, "image_size", "must be a number of pixels from 4 to 4096, or HxW")
    check(config, len(config.channel_mult) > 0, "channel_mult", f"must be given for images {height} high, such as 1,2,2")
    levels = len(config.channel_mult)
    check(config, levels <= 8, "channel_mult", "must be 1 to 8 numbers with commas, such as 1,2,3,4")
    depth, patch = config.patch * 2 ** (levels - 1), config.seen_channels * config.patch**2
    check(config, patch <= 64, "patch_size", f"makes {patch} channels of a patch, of at most 64")
    wanted = f"must be a multiple of {depth}, because {levels} levels halve it {levels - 1} times{' in patches' * (config.patch > 1)}"
    check(config, height % depth == 0 and width % depth == 0, "image_size", wanted)
    check(config, config.num_channels % 32 == 0, "num_channels", "must be a multiple of 32 (group norm has 32 groups)")
    for level, m in enumerate(config.channel_mult):
        ok = 0 < m <= 64 and config.channels(level) >= 32 and config.channels(level) % 32 == 0
        check(config, ok, "channel_mult", f"{m:g} * num_channels {config.num_channels} must be a positive multiple of 32")


def check_attention(config: Config) -> None:
    """Where there is attention, and how many heads."""
    height, levels = config.image_size[0], len(config.channel_mult)
    check(config, len(config.attention_resolutions) <= 8, "attention_resolutions", "must be up to 8 heights, such as 16,8")
    heights = [height // config.patch // 2**level for level in range(levels)]
    for r in config.attention_resolutions:
        wanted = f"{r} never occurs; the heights of this model are {', '.join(map(str, heights))}"
        check(config, r in heights, "attention_resolutions", wanted)
    for level in (lv for lv in range(levels) if config.has_attention(lv) or lv == levels - 1):  # and the middle block
        ch, wanted = config.channels(level), "must divide the {} channels where there is attention"
        if config.num_head_channels != -1:
            ok = config.num_head_channels > 0 and ch % config.num_head_channels == 0
            check(config, ok, "num_head_channels", wanted.format(ch) + "; 32 does")
        else:
            check(config, ch % config.num_heads == 0, "num_heads", wanted.format(ch))
            up = config.num_heads if config.num_heads_upsample == -1 else config.num_heads_upsample
            check(config, up > 0 and ch % up == 0, "num_heads_upsample", wanted.format(ch))


def check_objective(config: Config) -> None:
    """Classes, and flags that are for some objectives alone; those of other objectives get their defaults."""
    if config.class_cond:
        check(config, config.num_classes > 0, "num_classes", "must say how many classes --class_cond True conditions on; or use --class_cond False")
    else:
        config.num_classes = 0
        wanted = "there is nothing to leave out without --class_cond True or --cond_dim"
        check(config, config.class_dropout == 0 or config.cond_dim > 0, "class_dropout", wanted)
    if config.objective != "ddpm":
        for name in ("predict", "learn_sigma", "schedule_sampler", "use_kl", "min_snr_gamma", "rescale_timesteps"):
            wanted = f"is for --objective ddpm; {config.objective} has a prediction, a weighting and noise levels of its own"
            check(config, getattr(config, name) == getattr(Config, name), name, wanted)
    for name, objectives in OBJECTIVES_OWN.items():
        if config.objective not in objectives:
            default = getattr(Config, name)
            setattr(config, name, float32(default) if isinstance(default, float) else default)
    if config.objective == "ect":
        stages, most = math.ceil(config.max_steps / config.ect_stage), int(math.log(LARGEST_GAP_DIVISOR) / math.log(config.ect_q))
        enough = math.ceil(config.max_steps / max(most, 1))
        told = f"makes a grow to {stages}, and --ect_q {config.ect_q:g}^a must stay below {LARGEST_GAP_DIVISOR:g}; {enough} is enough"
        check(config, stages <= most, "ect_d", told)
    check(config, config.augment == 0 or not config.random_flip, "random_flip", "is a part of --augment, which tells the network of it")
    check(config, not (config.use_kl and config.min_snr_gamma > 0), "min_snr_gamma", "weighs the squared error, which --use_kl True leaves out")


def check_cond(config: Config) -> None:
    """--cond: lowres:K, gray or mask."""
    if not config.cond:
        return
    (height, width), factor = config.image_size, config.picture_factor
    ok = re.fullmatch(r"gray|mask|lowres:[0-9]{1,5}", config.cond) is not None
    check(config, ok, "cond", "must be lowres:4 (or another factor), gray or mask")
    if config.picture_kind == "lowres":
        ok = factor >= 2 and height % factor == 0 and width % factor == 0
        check(config, ok, "cond", f"the factor must be at least 2 and divide the height and width of {height}x{width}")
    ok = config.picture_kind != "gray" or config.in_channels == 3
    check(config, ok, "cond", f"makes images of 3 channels grey, and these have {config.in_channels}")
    told = f"--cond {config.cond} makes pictures of {config.made_channels}"
    check(config, config.cond_channels == config.made_channels, "cond_channels", told)


def check_pictures(config: Config) -> None:
    """Whether the pictures that a model is conditioned on are named, and only then. (A run's are compared with its data in Data.check.)"""
    check_cond(config)
    check(config, not config.cond_file or config.cond_channels > 0, "cond_file", "this model is not conditioned on pictures (--cond_channels)")
    check(config, config.cond_dropout == 0 or config.cond_channels > 0, "cond_dropout", "has nothing to leave out without --cond_channels")
    if config.sample > 0 and config.cond_channels > 0:
        told = f"must name the pictures of {config.cond_channels} channels that the model is conditioned on"
        check(config, config.cond_file != "", "cond_file", told)
    told = "is not read in training, where --cond makes the pictures of the images"
    check(config, not (config.cond and config.cond_file) or config.sample > 0, "cond_file", told)
    check(config, not (config.cond and config.val_cond_file), "val_cond_file", "is not read, since --cond makes the pictures of the images")
    told = "is for --cond lowres, whose coarse pictures it is added to"
    check(config, config.cond_noise == 0 or config.picture_kind == "lowres", "cond_noise", told)
    told = "needs --val_data_file, the images that these pictures belong to"
    check(config, not config.val_cond_file or config.val_data_file != "", "val_cond_file", told)


def check_sampling(config: Config) -> None:
    """Samplers, guidance, and images that are changed."""
    check(config, not config.classes or config.class_cond, "classes", "this model is not conditioned on classes; leave the flag out")
    ok = all(0 <= k < config.num_classes for k in config.classes)
    check(config, ok, "classes", f"must be some of the classes 0 to {config.num_classes - 1}")
    wanted = "needs a model that was trained with --class_cond True (or --cond_dim) and a --class_dropout, such as 0.1, or with a --cond_dropout"
    check(config, config.guidance_scale == 1 or config.can_be_guided, "guidance_scale", wanted)
    check(config, config.guidance_min <= config.guidance_max, "guidance_min", f"must not be above --guidance_max {config.guidance_max:g}")
    if config.values or (config.sample > 0 and config.cond_dim > 0):
        value_rows(config)
    check(config, config.sigma_min < config.sigma_max, "sigma_min", f"must be below --sigma_max {config.sigma_max:g}")
    check(config, config.sampler != "consistency" or config.mid_t < config.sigma_max, "mid_t", f"must be below --sigma_max {config.sigma_max:g}")
    check(config, not (config.start_from and config.inpaint), "start_from", "and --inpaint: images are changed in one of these ways at a time")
    takes_mask = config.sample > 0 and config.picture_kind == "mask"
    told = "and --mask need each other, the images and where to paint them anew"
    check(config, bool(config.inpaint) == bool(config.mask) or (takes_mask and not config.inpaint), "inpaint", told)
    changed = bool(config.start_from or config.inpaint)
    check(config, not changed or config.sample > 0, "start_from" if config.start_from else "inpaint", "is for --sample")
    ok = config.S_churn == 0 or not changed
    check(config, ok, "S_churn", "is for images made of noise alone; leave it out with --start_from and --inpaint")
    ok = config.S_churn == 0 or config.sampler in ("euler", "heun")
    check(config, ok, "S_churn", f"is for --sampler euler and heun; {config.sampler} adds no noise that way")
    space_timesteps(config.diffusion_steps, config.timestep_respacing)
    if config.noise_schedule == "linear":
        check(config, config.diffusion_steps > 20, "diffusion_steps", "must be above 20 with the linear schedule")


def read_value_table(config: Config) -> list[list[float]]:
    """The rows of --values F.csv. A first line that holds no numbers names the columns, and a column more than there are numbers names the images, as
    in a table for prepare_data.py: both are left out. A number is no image's name."""
    try:
        with io.TextIOWrapper(open_file(config.values), encoding="utf-8-sig", errors="replace") as file:  # a line ends with \n, \r\n or \r
            lines = file.read().split("\n")
    except OSError as e:
        raise UserError(f"--values {config.values}: can't be opened ({e.strerror})") from None
    check(config, not any("\0" in line for line in lines), "values", "holds a byte 0, as no table in UTF-8 does; save it as CSV, UTF-8")

    def row_of(cells: list[str]) -> list[float]:
        return [] if any(cell != cell.rstrip() for cell in cells) else finite_numbers(cells)  # train_unet.cu takes no space behind a number

    rows: list[list[float]] = []
    for number, line in enumerate(lines, 1):
        cells = next(csv.reader([line]), [""])
        cells = cells[1:] if len(cells) == config.cond_dim + 1 and not row_of(cells[:1]) else cells
        row = row_of(cells)
        holds_number = any(re.match(r" *([-+.\d]|(inf|infinity|nan)$)", cell, re.IGNORECASE) for cell in cells)
        if len(row) == config.cond_dim:
            rows.append(row)
        elif line and (number > 1 or holds_number):
            raise UserError(f"--values {config.values}: line {number} must hold {config.cond_dim} numbers with commas")
    check(config, len(rows) > 0, "values", f"has no row of {config.cond_dim} numbers with commas")
    return rows


def value_rows(config: Config) -> list[list[float]]:
    """--values: rows of cond_dim numbers, which the images take in turns."""
    count = config.cond_dim
    check(config, count > 0, "values", "this model is not conditioned on numbers (--cond_dim)")
    check(config, config.values != "", "values", f"must be the {count} numbers of the images, such as 0.3,1, or a .csv file of them")
    if config.values.endswith(".csv"):
        return read_value_table(config)
    row = finite_numbers(config.values.split(","))
    check(config, len(row) == count, "values", f"must be {count} numbers with commas, or a .csv file of rows of them")
    return [row]


def check_ema_rate(config: Config, samples: bool = False) -> None:
    """The averages. Of --ema_snapshots' two, a run has none as its first; samples may be drawn from any of them."""
    powers = POWER_EMAS if samples else ()
    ok = 1 <= len(config.ema_rate) <= MOST_EMAS and all(
        0 <= rate <= 1 or rate in (powers if k == 0 else POWER_EMAS) for k, rate in enumerate(config.ema_rate)
    )
    most, beside = (MOST_EMAS - 2, ", beside the two of --ema_snapshots") if config.ema_snapshots else (MOST_EMAS, "")
    check(config, ok, "ema_rate", f"must be a number from 0 to 1, or up to {most} of them with commas{beside}")


def check_run(config: Config) -> None:
    """Training, data and files."""
    check_ema_rate(config, samples=True)
    ok = config.microbatch == 0 or (config.batch_size % config.microbatch == 0)
    check(config, ok, "microbatch", f"must divide --batch_size {config.batch_size}")
    check(config, config.output_dir != "", "output_dir", "must name a folder")
    told = f"--val_fraction {config.val_fraction:g} holds out validation images, too; leave one of the two out"
    check(config, config.val_fraction == 0 or config.val_data_file == "", "val_data_file", told)
    check(config, config.output.endswith((".png", ".bin")), "output", "must end in .png (one grid) or .bin (float images)")
    ok = len(config.data_file.encode(errors="replace")) <= 511 and "\0" not in config.data_file
    check(config, ok, "data_file", "must be at most 511 bytes long, to fit in a checkpoint")
    paths = f"{config.data_file}{config.cond_file}"
    ok = not config.cond_file or (len(paths.encode(errors="replace")) <= 510 and "\0" not in paths)
    check(config, ok, "cond_file", "and --data_file must be at most 510 bytes long, to fit in a checkpoint")


# ======================================================================================================================
# from flags to a configuration


def preset_checksum(preset: str, is_default: bool) -> int:
    """By which a checkpoint tells which preset its run has. is_default: the program has chosen it, not the user. See train_unet.cu."""
    return zlib.crc32((preset + ", by default" * is_default).encode())


def preset_of_run(checksum: int) -> tuple[str, bool]:
    """The preset and is_default of this checksum; "" if it is not known."""
    known = ((preset, is_default) for preset in PRESETS for is_default in (False, True))
    return next((found for found in known if preset_checksum(*found) == checksum), ("", True))


def make_config(flags: dict[str, Any], data: Any = None, start: Any = None, resume: bool = False) -> Config:
    """A valid Config. What flags leave open comes from the model file that it starts from (its model flags; to resume,
    its training flags, too) or else from the data (size, channels, classes), and then from the preset.
    data: a data_files.Data, start: a model_files.ModelFile;
    flags: {name: value} as parse_flags gives them, for example {"preset": "unet64", "channel_mult": (1, 2)}."""
    flags = without_aliases(flags)
    preset, patch = flags.get("preset") or (start and start.config.preset), 0
    is_default = not preset
    if not preset and resume:  # the flags that no checkpoint holds stay as they were: the intervals, and how grids are sampled
        preset, is_default = preset_of_run(start.state.preset)
    if not preset:
        preset, patch = default_preset(flags, data)
    without = left_out_of_preset(flags)
    chosen = preset_flags(preset)
    if is_default:
        chosen = parse_flags(SHARED["OF_LABELS"].split(), FLAGS) | chosen
    chosen = {name: value for name, value in chosen.items() if name not in without}
    if patch and "patch_size" in chosen:
        chosen["patch_size"] = patch
    values = chosen | flags | {"preset": preset}
    if start and flags.get("channel_mult") == ():
        flags = flags | {"channel_mult": DEFAULT_CHANNEL_MULT.get(start.config.image_size[0], ())}
    if start:
        adapts = data is not None and not resume
        values |= start.inherit(flags, resume, adapts) | flags
        values |= start.adapted(data, flags) if adapts else {}
    elif data:
        shape = {"image_size": data.images.shape[2:], "in_channels": data.images.shape[1]}
        values |= {name: value for name, value in shape.items() if name not in flags}
        values.setdefault("num_classes", data.num_classes)
        if data.pictures and not values.get("cond"):
            values.setdefault("cond_channels", data.pictures.images.shape[1])
    of_preset = chosen.keys() - flags.keys()
    if data:  # whoever named the preset asked for its classes
        without_classes = data.labels is None and "preset" not in flags
    else:
        without_classes = not values.get("num_classes")
    if not start and without_classes and "class_cond" in of_preset:
        values["class_cond"] = False
        if "class_dropout" in of_preset:
            values["class_dropout"] = 0.0
    if data and not start and is_default and "min_snr_gamma" in of_preset and len(data.images) >= MANY_IMAGES:
        values["min_snr_gamma"] = 5.0  # see apply_default_preset in unet/run/settings.h
    values |= ect_defaults(values, flags, start)
    config = Config(**values)
    if config.class_cond:
        named = start if start and (not data or resume or start.knows_classes(data)) else data
        config.classes = class_numbers(config.classes, named.class_names if named else ())
    if "class_dropout" in of_preset and not config.class_cond and not config.cond_dim:
        config.class_dropout = 0.0
    if "guidance_scale" in of_preset and not config.null_class:
        config.guidance_scale = 1.0
    if "rescale_learned_sigmas" in flags and "vlb_weight" in flags:
        raise UserError("--rescale_learned_sigmas: sets --vlb_weight, which is given too; leave one of them out")
    if "rescale_learned_sigmas" in flags or (not start and "rescale_learned_sigmas" in chosen and "vlb_weight" not in flags):
        config.vlb_weight = float32(1e-3 if config.rescale_learned_sigmas else 1 / config.diffusion_steps)
    steps = config.timestep_respacing
    if "timestep_respacing" not in flags and steps.isdigit() and int(steps) > config.diffusion_steps:
        config.timestep_respacing = ""  # all of them
    if (data or flags.get("data_dir")) and not start and "attention_resolutions" not in flags:
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
        names |= {"S_churn", "guidance_scale"}  # they suit the preset's sampler
    if "guidance_scale" in flags:
        names |= {"guidance_min", "guidance_max"}  # they suit the preset's scale
    if flags.get("class_cond") is False:
        names |= {"class_dropout", "guidance_scale"}
    if flags.get("class_dropout") == 0:
        names.add("guidance_scale")
    return names


def ect_defaults(values: dict[str, Any], flags: dict[str, Any], start: Any) -> dict[str, Any]:
    """The levels and the sampler that Geng et al. 2024 tune for, where no flag, and no model file of ect, says otherwise."""
    own: dict[str, Any] = {}
    if values.get("objective") == "ect":
        own = {"sampler": "consistency"}
        if not start or start.config.objective != "ect":
            own |= {"P_mean": -1.1, "P_std": 2.0}
    if (own | flags).get("sampler") == "consistency":
        own |= {"timestep_respacing": "2", "S_churn": 0.0, "guidance_scale": 1.0}  # which a preset may have for another sampler
    return {name: value for name, value in own.items() if name not in flags}


def default_preset(flags: dict[str, Any], data: Any = None) -> tuple[str, int]:
    """The preset that is used without --preset, and its --patch_size (0: as the preset has it). For one's own images it depends on their size: see
    apply_default_preset in train_unet.cu."""
    on_gpu = pick_device(flags.get("device", "auto")).type == "cuda"
    for_32, from_32, otherwise = ("photos32", "quick64", "unet64") if on_gpu else ("quick32", "emoji64", "fashion32")
    channels = flags.get("in_channels", 3)
    if "data_file" in flags and data:
        channels, height, width = data.images.shape[1:]
    elif flags.get("data_dir"):  # a folder becomes 64x64, as in prepare_data.py
        height, width = flags.get("image_size", (64, 64))
    else:
        return "quick64" if on_gpu else "quick32", 0  # to sample
    preset = for_32 if (height, width) == (32, 32) else from_32
    for patch, smallest in ((4, 128), (2, 32)):
        own = preset_flags(preset)
        if "patch_size" in own:
            own["patch_size"] = patch
        model = own | flags | {"image_size": (height, width), "in_channels": channels}
        if flags.get("cond_file"):
            model.setdefault("cond_channels", channels)
        if min(height, width) >= smallest and has_network(model):
            return preset, own.get("patch_size", 0)
    return otherwise, 0


def has_network(flags: dict[str, Any]) -> bool:
    """Whether these flags make a network whose sizes fit."""
    try:
        check_network(Config(**flags))
    except UserError:
        return False
    return True


def pick_device(name: str) -> torch.device:
    """A device by --device's value; a number is that of a GPU, as for ./train_unet."""
    torch.backends.cudnn.allow_tf32 = False  # fp32 means fp32
    try:
        named = f"cuda:{name}" if name.isdecimal() else name
        device = torch.device(named if named != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
        torch.empty(0, device=device).tolist()  # on PyTorch's "meta" device there is nothing to read
    except (RuntimeError, AssertionError, ImportError):
        raise UserError(f"--device {name}: is not here; auto and cpu always work") from None
    return device


def pick_precision(config: Config, device: torch.device) -> str:
    fastest = "bf16" if device.type == "cuda" else "fp32"
    return config.meaning("precision", {"auto": fastest, "fp32": "fp32", "bf16": "bf16", "fp8": "fp8", "fp16": "fp16"})  # fp16: of Core ML
