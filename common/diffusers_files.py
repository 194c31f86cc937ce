"""Folders of Hugging Face's diffusers: a UNet2DModel and its scheduler, from and to a model file; autoencoders, for latents as data.

  python train_unet.py --convert model.bin DIR/          diffusers.DDPMPipeline.from_pretrained("DIR") draws with it
  python train_unet.py --convert DIR/ model.bin          one that was trained there

What maps does so exactly: the same function with the same weights, up to float32 rounding. What UNet2DModel lacks is refused by the flag that asks for
it. Three things are not there but can be said with what is: pooling and repeating of pixels (--conv_resample False) as 3x3 convolutions with 1/4 and 1
where these read, either order of the rows of qkv, and squares of pixels (--patch_size) as the channels of fewer pixels, which the folder's own pipeline makes
an image of. diffusers itself is not needed for any of this.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common import files, model_files
from common.config import pick_device
from common.flags import FLAGS, SAMPLING_FLAGS, Config, format_value
from common.model import parameter_shapes, to_state_dict
from common.model_files import ModelFile, ModelFileError
from common.program import NOT_OF_DATA, UserError

WEIGHTS = "unet/diffusion_pytorch_model.safetensors"
UNET, SCHEDULER, INDEX = "unet/config.json", "scheduler/scheduler_config.json", "model_index.json"
PIPELINE = "pipeline.py"  # of models with --patch_size: common/patch_pipeline.py

# The defaults of UNet2DModel and of its schedulers, for what a folder leaves out.
UNET_DEFAULTS: dict[str, Any] = {
    "sample_size": None, "in_channels": 3, "out_channels": 3, "center_input_sample": False, "time_embedding_type": "positional",
    "time_embedding_dim": None, "freq_shift": 0, "flip_sin_to_cos": True,
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"], "mid_block_type": "UNetMidBlock2D",
    "up_block_types": ["AttnUpBlock2D", "AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"], "block_out_channels": [224, 448, 672, 896],
    "layers_per_block": 2, "mid_block_scale_factor": 1, "downsample_padding": 1, "downsample_type": "conv", "upsample_type": "conv",
    "dropout": 0.0, "act_fn": "silu", "attention_head_dim": 8, "norm_num_groups": 32, "attn_norm_num_groups": None, "norm_eps": 1e-5,
    "resnet_time_scale_shift": "default", "add_attention": True, "class_embed_type": None, "num_class_embeds": None, "num_train_timesteps": None,
}  # fmt: skip
DDPM_DEFAULTS: dict[str, Any] = {
    "num_train_timesteps": 1000, "beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear", "trained_betas": None, "variance_type": "fixed_small",
    "clip_sample": True, "clip_sample_range": 1.0, "prediction_type": "epsilon", "thresholding": False, "rescale_betas_zero_snr": False,
    "timestep_spacing": "leading", "steps_offset": 0,
}  # fmt: skip
EDM_DEFAULTS: dict[str, Any] = {
    "num_train_timesteps": 1000, "sigma_min": 0.002, "sigma_max": 80.0, "sigma_data": 0.5, "sigma_schedule": "karras", "rho": 7.0,
    "prediction_type": "epsilon", "final_sigmas_type": "zero",
}  # fmt: skip
UP_BLOCKS = {"AttnDownBlock2D": "AttnUpBlock2D", "DownBlock2D": "UpBlock2D", "ResnetDownsampleBlock2D": "ResnetUpsampleBlock2D"}
FLOW_DEFAULTS: dict[str, Any] = {"num_train_timesteps": 1000, "shift": 1.0, "use_dynamic_shifting": False, "invert_sigmas": False}
SAMPLING = ("clip_sample", "sigma_min", "sigma_max", "rho")  # of a sampler, not of the model
PREDICTIONS = {"eps": "epsilon", "x0": "sample", "v": "v_prediction"}
SCHEDULES = {"linear": "linear", "cosine": "squaredcos_cap_v2"}


# ======================================================================================================================
# what their files say of a configuration, and which configuration they speak of


def refuse_unless(ok: bool, config: Config, flag: str, why: str) -> None:
    if not ok:
        raise UserError(f"--{flag} {format_value(flag, getattr(config, flag))}: {why}, so this model can't be one of diffusers'")


def head_channels(config: Config) -> int | None:
    """attention_head_dim: the channels of a head, the same in every block, or None for a single head in each."""
    if config.num_head_channels != -1:
        return config.num_head_channels
    told = "UNet2DModel has as many heads on the way up as down"
    refuse_unless(config.num_heads_upsample in (-1, config.num_heads), config, "num_heads_upsample", told)
    if config.num_heads == 1:
        return None
    last = len(config.channel_mult) - 1
    widths = {config.channels(level) for level in range(last + 1) if config.has_attention(level) or level == last}
    refuse_unless(len(widths) == 1, config, "num_heads", "UNet2DModel has heads of one width; these differ from level to level")
    return widths.pop() // config.num_heads


def unet_settings(config: Config) -> dict[str, Any]:
    """UNet2DModel's arguments; UserError names the flag that it has none for."""
    refuse_unless(config.channel_mult[0] == 1, config, "channel_mult", "UNet2DModel's time embedding is as wide as its first level")
    refuse_unless(config.cond_dim == 0, config, "cond_dim", "UNet2DModel takes no numbers")
    refuse_unless(config.cond_channels == 0, config, "cond_channels", "UNet2DModel takes no pictures")
    refuse_unless(config.augment == 0, config, "augment", "UNet2DModel takes no numbers, and this model is told of changes to its images")
    refuse_unless(config.max_period == 10000, config, "max_period", "UNet2DModel's is 10000")
    at_1000 = not config.rescale_timesteps or config.diffusion_steps == 1000
    refuse_unless(at_1000, config, "rescale_timesteps", "UNet2DModel is told t as it is")
    levels, kind = range(len(config.channel_mult)), "resnet" if config.resblock_updown else "conv"
    plain = "ResnetDownsampleBlock2D" if config.resblock_updown else "DownBlock2D"
    down = ["AttnDownBlock2D" if config.has_attention(level) else plain for level in levels]
    height, width = (side // config.patch for side in config.image_size)
    return UNET_DEFAULTS | {
        "sample_size": height if height == width else [height, width],
        "in_channels": config.in_channels * config.patch**2,
        "out_channels": config.out_channels * config.patch**2,
        "block_out_channels": [config.channels(level) for level in levels],
        "down_block_types": down,
        "up_block_types": [UP_BLOCKS[block] for block in reversed(down)],
        "layers_per_block": config.num_res_blocks,
        "downsample_type": kind,
        "upsample_type": kind,
        "dropout": config.dropout,
        "attention_head_dim": head_channels(config),
        "attn_norm_num_groups": 32 if config.use_scale_shift_norm else None,  # None means 32 without scale and shift, and no norm with
        "resnet_time_scale_shift": "scale_shift" if config.use_scale_shift_norm else "default",
        "num_class_embeds": config.num_classes + config.null_class if config.class_cond else None,
    }


def scheduler_settings(config: Config) -> dict[str, Any]:
    """A scheduler's class and its arguments."""
    refuse_unless(config.objective != "ect", config, "objective", "their schedulers know no such model; .pt and .safetensors hold it")
    if config.frame == "edm":  # their samplers of this kind do not clip what the network says
        limits = {name: getattr(config, name) for name in ("sigma_min", "sigma_max", "sigma_data", "rho")}
        return {"_class_name": "EDMEulerScheduler"} | EDM_DEFAULTS | limits
    if config.frame == "flow":  # nor does theirs; what both tell the network is 1000 t
        return {"_class_name": "FlowMatchEulerDiscreteScheduler"} | FLOW_DEFAULTS
    untrained = config.learn_sigma and not config.learned_variance
    refuse_unless(not untrained, config, "vlb_weight", "the variance that --learn_sigma True adds is untrained, and their schedulers would use it")
    betas = {"beta_start": 0.1 / config.diffusion_steps, "beta_end": 20 / config.diffusion_steps} if config.noise_schedule == "linear" else {}
    variance = "learned_range" if config.learned_variance else "fixed_small" if config.sigma_small else "fixed_large"
    return {"_class_name": "DDPMScheduler"} | DDPM_DEFAULTS | betas | {
        "num_train_timesteps": config.diffusion_steps,
        "beta_schedule": config.meaning("noise_schedule", SCHEDULES),
        "variance_type": variance,
        "clip_sample": config.clip_denoised,
        "prediction_type": config.meaning("predict", PREDICTIONS),
    }  # fmt: skip


def config_values(unet: dict[str, Any], scheduler: dict[str, Any], patch: int) -> dict[str, Any]:
    """The flags of a model whose folder says these; what it says besides is compared afterwards."""
    size, widths, attention = unet["sample_size"], unet["block_out_channels"], unet["attention_head_dim"]
    height, width = size if isinstance(size, list) else (size, size)
    learned = unet["out_channels"] == 2 * unet["in_channels"]
    values = {
        "image_size": (height * patch, width * patch),
        "in_channels": unet["in_channels"] // patch**2,
        "patch_size": patch if patch > 1 else 0,
        "num_channels": widths[0],
        "channel_mult": tuple(w / widths[0] for w in widths),
        "num_res_blocks": unet["layers_per_block"],
        "attention_resolutions": tuple(height // 2**level for level, block in enumerate(unet["down_block_types"]) if block == "AttnDownBlock2D"),
        "num_heads": 1,
        "num_head_channels": -1 if attention is None else attention,
        "dropout": unet["dropout"],
        "class_cond": unet["num_class_embeds"] is not None,
        "num_classes": unet["num_class_embeds"] or 0,
        "learn_sigma": learned,
        "use_scale_shift_norm": unet["resnet_time_scale_shift"] == "scale_shift",
        "resblock_updown": unet["downsample_type"] == "resnet" or "ResnetDownsampleBlock2D" in unet["down_block_types"],
        "timestep_respacing": "",
        "diffusion_steps": scheduler["num_train_timesteps"],
    }
    if scheduler["_class_name"] == "EDMEulerScheduler":
        return values | {"objective": "edm", "sigma_data": scheduler["sigma_data"]}
    if scheduler["_class_name"] == "FlowMatchEulerDiscreteScheduler":
        return values | {"objective": "flow"}
    return values | {
        "objective": "ddpm",
        "noise_schedule": next((k for k, v in SCHEDULES.items() if v == scheduler["beta_schedule"]), "linear"),
        "predict": next((k for k, v in PREDICTIONS.items() if v == scheduler["prediction_type"]), "eps"),
        "sigma_small": scheduler["variance_type"] == "fixed_small",
        "vlb_weight": 1e-3 if learned else 0.0,
    }


# ======================================================================================================================
# weights

LEAVES = {"in_layers.0": "norm1", "in_layers.2": "conv1", "emb_layers.1": "time_emb_proj", "out_layers.0": "norm2", "out_layers.3": "conv2",
          "skip_connection": "conv_shortcut", "norm": "group_norm", "qkv": "to_qkv", "proj_out": "to_out.0", "op": "conv", "conv": "conv"}  # fmt: skip
SINGLES = {"time_embed.0": "time_embedding.linear_1", "time_embed.2": "time_embedding.linear_2", "label_emb": "class_embedding",
           "input_blocks.0.0": "conv_in", "out.0": "conv_norm_out", "out.2": "conv_out", "middle_block.0": "mid_block.resnets.0",
           "middle_block.1": "mid_block.attentions.0", "middle_block.2": "mid_block.resnets.1"}  # fmt: skip


def their_modules(config: Config) -> dict[str, str]:
    """Blocks and layers outside of blocks, by our names."""
    names, levels, blocks = dict(SINGLES), len(config.channel_mult), config.num_res_blocks
    numbers = itertools.count(1)
    for level in range(levels):
        for i, n in zip(range(blocks), numbers):
            names |= {f"input_blocks.{n}.0": f"down_blocks.{level}.resnets.{i}", f"input_blocks.{n}.1": f"down_blocks.{level}.attentions.{i}"}
        names[f"input_blocks.{next(numbers)}.0"] = f"down_blocks.{level}.downsamplers.0"
    numbers = itertools.count()
    for place, level in enumerate(reversed(range(levels))):
        last = 1 + config.has_attention(level)
        for i, n in zip(range(blocks + 1), numbers):
            names |= {f"output_blocks.{n}.0": f"up_blocks.{place}.resnets.{i}", f"output_blocks.{n}.1": f"up_blocks.{place}.attentions.{i}"}
        names[f"output_blocks.{n}.{last}"] = f"up_blocks.{place}.upsamplers.0"
    return names


def their_name(modules: dict[str, str], name: str) -> str:
    module, rest, kind = re.fullmatch(
        r"(\w+_blocks\.\d+\.\d+|middle_block\.\d+|time_embed\.\d|label_emb|out\.\d)\.?(.*?)\.?(weight|bias)", name
    ).groups()
    return ".".join(filter(None, (modules[module], LEAVES[rest] if rest else "", kind)))


def resampling(config: Config) -> dict[str, Tensor]:
    """Their convolutions between levels, as the mean of 2x2 pixels on the way down and as nothing but a copy on the way up."""
    kernels, levels = {}, len(config.channel_mult)
    for k in range(levels - 1):
        down, up = f"down_blocks.{k}.downsamplers.0.conv", f"up_blocks.{k}.upsamplers.0.conv"
        for name, C, pixels, factor in (down, config.channels(k), slice(1, 3), 0.25), (up, config.channels(levels - 1 - k), slice(1, 2), 1.0):
            kernels[f"{name}.weight"], kernels[f"{name}.bias"] = torch.zeros(C, C, 3, 3), torch.zeros(C)
            kernels[f"{name}.weight"][range(C), range(C), pixels, pixels] = factor
    return kernels


def reorder_qkv(config: Config, qkv: Tensor, to_theirs: bool) -> Tensor:
    """Rows (heads, q k v, channels), the older order, to (q k v, heads, channels), or back."""
    if config.use_new_attention_order:
        return qkv
    heads = len(qkv) // 3 // (head_channels(config) or len(qkv) // 3)
    return qkv.unflatten(0, (heads, 3, -1) if to_theirs else (3, heads, -1)).transpose(0, 1).flatten(0, 2)


def to_theirs(config: Config, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """UNet2DModel's state_dict from ours."""
    modules = their_modules(config)
    result = {} if config.conv_resample or config.resblock_updown else resampling(config)
    for name, tensor in tensors.items():
        key = their_name(modules, name)
        if ".to_qkv." not in key:
            result[key] = tensor.squeeze(-1) if tensor.ndim == 3 else tensor
            continue
        for letter, part in zip("qkv", reorder_qkv(config, tensor, True).chunk(3)):
            result[key.replace("to_qkv", f"to_{letter}")] = part.squeeze(-1).contiguous()
    return result


def to_ours(config: Config, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our state_dict from UNet2DModel's, which has the names and shapes that to_theirs makes."""
    modules, result = their_modules(config), {}
    for name, shape in parameter_shapes(config).items():
        key = their_name(modules, name)
        if ".to_qkv." in key:
            rows = torch.cat([tensors[key.replace("to_qkv", f"to_{letter}")] for letter in "qkv"])
            result[name] = reorder_qkv(config, rows, False).reshape(shape)
        else:
            result[name] = tensors[key].view(shape)
    return result


# ======================================================================================================================
# folders


def write_folder(path: str, file: ModelFile, flags: dict[str, Any]) -> str:
    """Writes the weights that sampling would use (--use_ema, --ema_rate); returns what there is to tell."""
    source, file, path = file.path, file.choose_ema(flags.get("ema_rate")), path.rstrip("/")
    config = dataclasses.replace(file.config, **{name: flags[name] for name in SAMPLING_FLAGS if name in flags})
    unet, scheduler = unet_settings(config), scheduler_settings(config)
    bare = ModelFile(
        file.config, file.weights_to_use(flags.get("use_ema", True)), state=model_files.TrainingState(file.state.step), class_names=file.class_names
    )
    tensors = to_theirs(config, to_state_dict(config, bare.weights))
    metadata = {"format": "pt"} | {key: json.dumps(value) for key, value in bare.metadata().items()}
    settings = {UNET: {"_class_name": "UNet2DModel"} | unet, SCHEDULER: scheduler}
    if config.objective == "ddpm":  # their pipelines know of no noise levels but t
        parts = {"scheduler": ["diffusers", scheduler["_class_name"]], "unet": ["diffusers", "UNet2DModel"]}
        of_patches = {"_class_name": ["pipeline", "PatchPipeline"], "patch_size": config.patch}
        of_pixels = {"_class_name": "DDPMPipeline"}
        settings[INDEX] = (of_patches if config.patch > 1 else of_pixels) | parts

    def make(folder: Path) -> None:
        import safetensors.torch

        for name, values in settings.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(json.dumps(values, indent=2) + "\n")
        (folder / WEIGHTS).write_bytes(safetensors.torch.save(tensors, metadata))  # save_file has an error of its own for a full disk
        if INDEX in settings and config.patch > 1:
            shutil.copyfile(Path(__file__).with_name("patch_pipeline.py"), folder / PIPELINE)

    if os.path.isfile(f"{path}/{UNET}") and not holds(path, bare.weights):
        raise UserError(f"--convert {path}/: is there and holds another model; choose another name, or move it away")
    files.write_folder(path, (UNET, WEIGHTS, SCHEDULER, INDEX, PIPELINE), make)
    told = f"{path}: the model of {source} for diffusers"
    by_hand = f"by UNet2DModel.from_pretrained('{path}', subfolder='unet') and {scheduler['_class_name']}'s"
    if config.objective != "ddpm":
        whole = f"; torch.nn.functional.pixel_shuffle(x, {config.patch}) makes the image of what they draw" if config.patch > 1 else ""
        return f"{told}, {by_hand}; its pipelines know of no noise but t{whole}"
    if config.patch > 1:
        labels = "; drawing needs class_labels" if config.class_cond else ""
        return f"{told}, by DiffusionPipeline.from_pretrained('{path}', trust_remote_code=True), which runs its {PIPELINE}{labels}"
    if config.class_cond:
        return f"{told}, {by_hand}; the classes are class_labels there, which DDPMPipeline does not pass on"
    return f"{told}, by DDPMPipeline.from_pretrained('{path}')"


def holds(path: str, weights: np.ndarray) -> bool:
    """Whether a folder holds these weights."""
    try:
        return np.array_equal(read_folder(path, {}).weights, weights)
    except (UserError, OSError):
        return False


def read_json(path: str) -> dict[str, Any]:
    try:
        with files.open_file(path) as file:
            values = json.load(file)
    except OSError as e:
        raise ModelFileError(f"{path}: can't be opened ({e.strerror}); name a folder that diffusers wrote") from None
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ModelFileError(f"{path}: is no dictionary in JSON, as diffusers writes it")
    return values


def patch_of(path: str) -> int:
    """A folder's patch_size, which its pipeline knows; the UNet2DModel sees channels."""
    patch = read_json(f"{path}/{INDEX}").get("patch_size", 1) if os.path.exists(f"{path}/{INDEX}") else 1
    if not isinstance(patch, int) or patch < 1:
        raise ModelFileError(f"{path}/{INDEX}: its patch_size is {model_files.brief(patch)}, which must be a whole number from 1 on")
    return patch


def same(a: Any, b: Any) -> bool:
    """Numbers to float32's rounding."""
    numbers = all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (a, b))
    try:
        return math.isclose(a, b, rel_tol=1e-6) if numbers else a == b
    except OverflowError:  # of a whole number beyond float64
        return False


def check_settings(path: str, given: dict[str, Any], ours: dict[str, Any]) -> None:
    """ModelFileError if a file of a folder asks for what models here do not do."""
    for name, value in given.items():
        if name.startswith("_") or name in SAMPLING:
            continue
        if name in ours and not same(value, ours[name]):
            raise ModelFileError(f"{path}: its {name} is {json.dumps(value):.60}, where a model here would have {json.dumps(ours[name]):.60}")
        if name not in ours and value and path.endswith(UNET):
            raise ModelFileError(f"{path}: its {name} is {json.dumps(value):.60}, which no model here has")


def check_tensors(path: str, given: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """ModelFileError if the names or shapes differ."""
    for name, tensor in wanted.items():
        if name not in given or given[name].shape != tensor.shape:
            there = f"has shape {list(given[name].shape)}, not" if name in given else "is missing; it should have shape"
            raise ModelFileError(f"{path}: {name} {there} {list(tensor.shape)}")
    for name in given.keys() - wanted.keys():
        raise ModelFileError(f"{path}: has {name}, which a UNet2DModel of these settings lacks")


def read_folder(path: str, flags: dict[str, Any]) -> ModelFile:
    """A ModelFile of bare weights. What a folder does not say, such as --class_dropout, flags do; one that was written here says it all."""
    unet, scheduler = read_json(f"{path}/{UNET}"), read_json(f"{path}/{SCHEDULER}")
    kinds = {"DDPMScheduler": DDPM_DEFAULTS, "DDIMScheduler": DDPM_DEFAULTS, "EDMEulerScheduler": EDM_DEFAULTS}
    kinds["FlowMatchEulerDiscreteScheduler"] = FLOW_DEFAULTS
    for name, values, known in (UNET, unet, ["UNet2DModel"]), (SCHEDULER, scheduler, kinds):
        if values.get("_class_name") not in list(known):
            raise ModelFileError(f"{path}/{name}: is of class {model_files.brief(values.get('_class_name'))}, not {' or '.join(known)}")
    unet, scheduler = UNET_DEFAULTS | unet, kinds[scheduler["_class_name"]] | scheduler
    files.open_file(f"{path}/{WEIGHTS}").close()  # says what is wrong with the path itself
    tensors, metadata = model_files.safetensors_content(f"{path}/{WEIGHTS}")

    saved = {name: value for name, value in flags.items() if name in model_files.SAVED_FLAGS}
    if unet["sample_size"] is None:  # UNet2DModel's default
        if "image_size" not in saved:
            raise ModelFileError(f"{path}/{UNET}: its sample_size is null, so it does not say how large images are; --image_size does")
        height, width = saved["image_size"]
        unet["sample_size"] = height if height == width else [height, width]

    def derive(_: Any) -> Config:
        said = model_files.typed(config_values(unet, scheduler, patch_of(path)), FLAGS)
        values = saved | said | {name: value for name, value in saved.items() if name in model_files.FREE_FLAGS}
        if values.get("class_dropout"):
            values["num_classes"] -= 1  # the last is "no class"
        return model_files.valid(values)

    if "config" in metadata:
        config = model_files.trusted(path, model_files.saved_config, metadata["config"])
    else:
        config = model_files.trusted(path, derive, None)
    learnt = dataclasses.replace(config, conv_resample=True)  # whose tensors are as many and as large as of one that pools
    check_settings(f"{path}/{UNET}", unet, unet_settings(config))
    check_settings(f"{path}/{SCHEDULER}", scheduler, scheduler_settings(config))
    with torch.device("meta"):
        empty = {name: torch.empty(shape) for name, shape in parameter_shapes(learnt).items()}
    check_tensors(f"{path}/{WEIGHTS}", tensors, to_theirs(learnt, empty))
    pooled = {} if config.resblock_updown else resampling(config)
    if pooled:
        config.conv_resample = not all(name in tensors and torch.equal(tensors[name].float(), kernel) for name, kernel in pooled.items())
    names = [*model_files.SAVED_FLAGS, "seed"]
    metadata["config"] = {name: getattr(config, name) for name in names}
    file = model_files.from_sections(path, {"weights": to_ours(config, tensors)}, metadata, None, flags)
    dataclasses.replace(file, path=path).inherit(saved, resume=False)  # refuses a flag that says otherwise
    return file


# ======================================================================================================================
# autoencoders


MOST = 1e30  # what an autoencoder's latents may be scaled or moved by


class Autoencoder:
    """An AutoencoderKL in a folder of its own or in one of a pipeline's. Latents are scaled as its configuration says, to train on."""

    def __init__(self, path: str):
        folder = os.path.join(path, "vae") if os.path.isdir(os.path.join(path, "vae")) else path
        if read_json(os.path.join(folder, "config.json")).get("_class_name") != "AutoencoderKL":
            raise UserError(f"{folder}: holds no AutoencoderKL; name the folder of one, or of a pipeline that has one")
        for entry in os.scandir(folder):  # diffusers would wait for a pipe's other end
            if os.path.exists(entry.path) and not (entry.is_file() or entry.is_dir()):
                raise UserError(f"{entry.path}: is not a regular file")
        from diffusers import AutoencoderKL  # a package that only this needs

        try:
            vae = AutoencoderKL.from_pretrained(folder, local_files_only=True, low_cpu_mem_usage=False, torch_dtype=torch.float32)
        except NOT_OF_DATA:
            raise
        except Exception as e:  # noqa: BLE001 (diffusers and what it reads files with raise nearly anything at a damaged file)
            raise UserError(f"{folder}: can't be used ({str(e).strip().partition(chr(10))[0][:200]})") from None
        self.path, self.device = folder, pick_device("auto")
        self.vae, self.config = vae.eval().requires_grad_(False).to(self.device), vae.config
        self.factor = 2 ** (len(vae.config.block_out_channels) - 1)  # pixels to a latent, each way

        def by_channel(values: Any) -> Tensor:
            return torch.tensor(values, device=self.device, dtype=torch.float32).view(1, -1, 1, 1)

        moved_by = "latents_mean" if vae.config.latents_mean else "shift_factor"
        means = self.scaling(moved_by, -MOST) if vae.config[moved_by] else [0.0]
        stds = self.scaling("latents_std", 1 / MOST) if vae.config.latents_std else [1.0]
        scale = self.scaling("scaling_factor", 1 / MOST)[0]
        self.mean, self.std = by_channel(means), by_channel(stds) / scale

    def scaling(self, name: str, least: float) -> list[float]:
        """What the configuration says of this name: a number for all channels, or one for each. Latents must stay numbers in float32."""
        said, channels = self.config[name], self.config.latent_channels
        values = said if isinstance(said, (list, tuple)) else [said]
        numbers = all(isinstance(value, (int, float)) and least < value < MOST for value in values)
        if not numbers or len(values) not in (1, channels):
            raise UserError(f"{self.path}: its {name} is {json.dumps(said):.60}, which scales no latents of {channels} channels")
        return list(values)

    def encode(self, images: Tensor) -> Tensor:
        """Images (N, C, H, W) in [-1, 1] to latents: the means of what it draws from, so that the same images give the same file."""
        N, C, H, W = images.shape
        if C != self.config.in_channels or H % self.factor or W % self.factor:
            told = f"takes images of {self.config.in_channels} channels and multiples of {self.factor} pixels, not {C}x{H}x{W}"
            raise UserError(f"{self.path}: {told}; --image_size and --channels say how large they become")
        return ((self.vae.encode(images.to(self.device)).latent_dist.mean - self.mean) / self.std).cpu()

    def check(self, channels: int, height: int, width: int) -> None:
        """UserError if it can't decode latents of this shape: one is tried, so that nobody waits for samples that nothing can draw."""
        if channels != self.config.latent_channels:
            raise UserError(f"{self.path}: decodes {self.config.latent_channels} channels, and there are {channels}; it is another model's")
        try:
            self.decode(torch.zeros(1, channels, height, width))
        except RuntimeError as e:  # too large for memory, say
            why = str(e).strip().partition("\n")[0][:200]
            raise UserError(f"{self.path}: can't decode latents of {channels}x{height}x{width} ({why})") from None

    def decode(self, latents: Tensor, batch_size: int = 8) -> Tensor:
        """Images (N, C, H, W) of latents whose shape check() has seen."""
        parts = (self.vae.decode(part.to(self.device) * self.std + self.mean).sample.cpu() for part in latents.split(batch_size))
        return torch.cat(list(parts))
