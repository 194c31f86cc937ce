"""Folders of diffusers: its UNet2DModel, schedulers and pipelines compute what a model here does, and what they can't is refused."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import random_weights, read_log
from PIL import Image

import generate
import prepare_data
import train_unet as twin
from common import model_files
from common.config import make_config
from common.data_files import open_data
from common.diffusers_files import Autoencoder
from common.formats import read_model
from common.program import UserError

diffusers = pytest.importorskip("diffusers")

SMALL: dict[str, Any] = {
    "preset": "fashion32", "image_size": (16, 16), "in_channels": 3, "num_channels": 32, "channel_mult": (1, 2, 3), "num_res_blocks": 1,
    "attention_resolutions": (8,), "num_head_channels": 32, "timestep_respacing": "", "eta": 0.0,
}  # fmt: skip
# One model for each thing that UNet2DModel has an argument for, or none.
MODELS: dict[str, dict[str, Any]] = {
    "plain": {"conv_resample": True, "noise_schedule": "linear"},
    "pooling": {"conv_resample": False, "use_scale_shift_norm": True, "predict": "v", "sigma_small": True, "dropout": 0.1},
    "resblock_updown": {"resblock_updown": True, "learn_sigma": True, "use_new_attention_order": False, "use_scale_shift_norm": True},
    "classes": {"class_cond": True, "num_classes": 5, "class_dropout": 0.1, "conv_resample": True, "num_head_channels": 16},
    "heads": {"num_head_channels": -1, "num_heads": 4, "channel_mult": (1, 2, 2), "use_new_attention_order": False, "attention_resolutions": (8, 4)},
    "one head": {"num_head_channels": -1, "num_heads": 1, "attention_resolutions": (16, 4), "predict": "x0", "num_res_blocks": 2},
    "oblong": {"image_size": (8, 16), "in_channels": 1, "attention_resolutions": (), "diffusion_steps": 200, "noise_schedule": "linear"},
    "one level": {"channel_mult": (1,), "attention_resolutions": (), "rescale_timesteps": True},
    "patches": {"patch_size": 2, "learn_sigma": True, "image_size": (16, 32), "channel_mult": (1, 2), "class_cond": True, "num_classes": 3},
    "edm": {"objective": "edm", "sigma_data": 0.6, "conv_resample": False},
    "flow": {"objective": "flow", "conv_resample": True},
}


def make_model(path: Path, **settings: Any) -> model_files.ModelFile:
    config = make_config(SMALL | settings)
    file = model_files.ModelFile(config, random_weights(config), state=model_files.TrainingState(step=7))
    model_files.write_model(str(path), file)
    return file


def inputs(config: twin.Config, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(batch, config.in_channels, *config.image_size, generator=random)
    t = torch.tensor([0.3, -1.2]) if config.objective == "edm" else torch.tensor([3, config.diffusion_steps - 1])
    return x, t, torch.tensor([0, config.num_classes - 1 + config.null_class]) if config.class_cond else None


def convert(*words: object) -> None:
    twin.run(["--convert", *map(str, words)])


@pytest.mark.parametrize("name", MODELS)
def test_unet2dmodel_computes_the_same(tmp_path: Path, name: str) -> None:
    file = make_model(tmp_path / "m.bin", **MODELS[name])
    convert(tmp_path / "m.bin", f"{tmp_path}/folder/")
    unet, told = diffusers.UNet2DModel.from_pretrained(tmp_path / "folder", subfolder="unet", output_loading_info=True)
    assert not any(told.values())  # no key missing, unexpected or of another shape
    x, t, y = inputs(file.config)
    model, unet, patch = twin.build_model(file.config, file.weights).double(), unet.eval().double(), file.config.patch
    seen = F.pixel_unshuffle(x.double(), patch)  # what their network sees, and answers
    with torch.no_grad():
        ours, theirs = F.pixel_unshuffle(model(x.double(), t, y), patch), unet(seen, t, class_labels=y).sample
        unet.time_proj.forward = model.timestep_embedding  # theirs has float32's angles, of up to 1000
        exact = unet(seen, t, class_labels=y).sample
    assert (ours - theirs).abs().max() < 2e-4 * ours.abs().max()
    assert (ours - exact).abs().max() < 1e-12 * ours.abs().max()
    # and back, to the same bits
    convert(f"{tmp_path}/folder", tmp_path / "again.bin")
    assert (tmp_path / "again.bin").read_bytes() == (tmp_path / "m.bin").read_bytes()


class Draws:
    """Our draws in place of diffusers', in the order in which its samplers ask: the start, then the noise of each step."""

    def __init__(self, config: twin.Config, count: int, monkeypatch: pytest.MonkeyPatch):
        self.denoiser = twin.Denoiser(torch.nn.Identity(), config, torch.arange(count))
        self.denoiser.asked = -1
        for module in "pipelines.ddpm.pipeline_ddpm", "pipelines.ddim.pipeline_ddim", "schedulers.scheduling_ddpm", "schedulers.scheduling_ddim":
            monkeypatch.setattr(f"diffusers.{module}.randn_tensor", self.draw)

    def draw(self, shape: tuple[int, ...], **_: Any) -> torch.Tensor:
        self.denoiser.asked += 1
        noise = self.denoiser.noise() if self.denoiser.asked else self.denoiser.normals(twin.SAMPLE_START, 0)
        noise = F.pixel_unshuffle(noise, self.denoiser.config.patch)
        assert noise.shape == tuple(shape)
        return noise


# What each network computes, test_unet2dmodel_computes_the_same sees: `make test` draws with some of them.
PIPELINES = [(sampler, name) for sampler in ("ddpm", "ddim") for name in ("plain", "pooling", "resblock_updown", "one head", "oblong", "one level")]
DRAWN = [("ddpm", "resblock_updown"), ("ddpm", "oblong"), ("ddim", "plain")]


@pytest.mark.parametrize(("sampler", "name"), [pytest.param(*row, marks=[pytest.mark.long] * (row not in DRAWN)) for row in PIPELINES])
def test_a_pipeline_draws_our_images(tmp_path: Path, name: str, sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the same noise, in as many steps; with weights small enough that not every value is clipped."""
    if (name, sampler) == ("resblock_updown", "ddim"):
        name = "heads"  # their DDIMScheduler has no learned variance
    file = make_model(tmp_path / "m.bin", **MODELS[name])
    file.weights *= 0.5
    model_files.write_model(str(tmp_path / "m.bin"), file)
    convert(tmp_path / "m.bin", f"{tmp_path}/folder/")
    kind = diffusers.DDPMPipeline if sampler == "ddpm" else diffusers.DDIMPipeline
    pipeline = kind.from_pretrained(tmp_path / "folder")
    pipeline.set_progress_bar_config(disable=True)
    assert isinstance(pipeline.scheduler, diffusers.DDPMScheduler if sampler == "ddpm" else diffusers.DDIMScheduler)
    config = make_config({"sampler": sampler, "timestep_respacing": "ddim5", "eta": 0.0}, None, file)
    images = twin.draw(twin.build_model(config, file.weights), config, 3)
    Draws(config, 3, monkeypatch)
    how = {} if sampler == "ddpm" else {"eta": 0.0, "use_clipped_model_output": True}  # as Song et al. and guided-diffusion have it
    theirs = pipeline(batch_size=3, num_inference_steps=5, output_type="pt", **how).images
    assert images.std() > 0.1 and (images.abs() < 1).float().mean() > 0.02
    assert (((images + 1) / 2).clamp(0, 1) - theirs).abs().max() < 1e-3


def test_a_folders_own_pipeline_draws_models_of_patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what diffusers saves of it, as after training it there, comes back."""
    monkeypatch.setattr("diffusers.utils.dynamic_modules_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    file = make_model(tmp_path / "m.bin", **MODELS["patches"])
    file.weights *= 0.5
    model_files.write_model(str(tmp_path / "m.bin"), file)
    convert(tmp_path / "m.bin", f"{tmp_path}/folder/")
    pipeline = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "folder", trust_remote_code=True)
    pipeline.set_progress_bar_config(disable=True)
    config = make_config({"sampler": "ddpm", "timestep_respacing": "ddim5", "classes": (0, 2)}, None, file)
    images = twin.draw(twin.build_model(config, file.weights), config, 3)
    draws = Draws(config, 3, monkeypatch)
    monkeypatch.setattr(sys.modules[type(pipeline).__module__], "randn_tensor", draws.draw)
    theirs = pipeline(batch_size=3, num_inference_steps=5, class_labels=torch.tensor([0, 2, 0]), output_type="np").images
    assert images.std() > 0.1 and (images.abs() < 1).float().mean() > 0.02
    assert (((images + 1) / 2).clamp(0, 1) - torch.from_numpy(theirs).permute(0, 3, 1, 2)).abs().max() < 1e-3
    pipeline.save_pretrained(tmp_path / "theirs")
    convert(f"{tmp_path}/theirs", tmp_path / "again.bin")
    again = read_model(str(tmp_path / "again.bin"))
    assert (again.weights == file.weights).all() and again.config.image_size == (16, 32) and again.config.patch_size == 2
    index = tmp_path / "theirs/model_index.json"
    index.write_text(index.read_text().replace('"patch_size": 2', '"patch_size": 0.5'))
    assert "patch_size" in refused(f"{tmp_path}/theirs", tmp_path / "again.bin")


def test_edm_by_hand(tmp_path: Path) -> None:
    """Without a pipeline: UNet2DModel and the scheduler, as its documentation says."""
    file = make_model(tmp_path / "m.bin", **MODELS["edm"])
    convert(tmp_path / "m.bin", f"{tmp_path}/folder/", "--sigma_max", 20)
    assert not (tmp_path / "folder/model_index.json").exists()
    unet = diffusers.UNet2DModel.from_pretrained(tmp_path / "folder", subfolder="unet")
    scheduler = diffusers.EDMEulerScheduler.from_pretrained(tmp_path / "folder", subfolder="scheduler")
    settings = {"sampler": "euler", "timestep_respacing": "6", "clip_denoised": False, "sigma_max": 20.0}
    config = make_config(settings, None, file)
    images = twin.draw(twin.build_model(config, file.weights), config, 2)
    x = 20 * twin.normals(config.seed, twin.SAMPLE_START, 0, torch.arange(2), (3, 16, 16))
    scheduler.set_timesteps(6)
    with torch.no_grad():
        for t in scheduler.timesteps:
            x = scheduler.step(unet(scheduler.scale_model_input(x, t), t).sample, t, x).prev_sample
    assert (x - images).abs().max() < 1e-4 * images.abs().max()


def test_flow_by_hand(tmp_path: Path) -> None:
    """The same for rectified flow, through the times that our sampler visits, in their scale: x_t = (1 - t) x0 + t noise."""
    file = make_model(tmp_path / "m.bin", **MODELS["flow"])
    convert(tmp_path / "m.bin", f"{tmp_path}/folder/")
    assert not (tmp_path / "folder/model_index.json").exists()
    unet = diffusers.UNet2DModel.from_pretrained(tmp_path / "folder", subfolder="unet")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(tmp_path / "folder", subfolder="scheduler")
    config = make_config({"sampler": "euler", "timestep_respacing": "6", "clip_denoised": False}, None, file)
    images = twin.draw(twin.build_model(config, file.weights), config, 2)
    times = [sigma / (1 + sigma) for _, sigma in twin.noise_route(config, twin.Diffusion(config))]
    x = times[0] * twin.normals(config.seed, twin.SAMPLE_START, 0, torch.arange(2), (3, 16, 16))
    scheduler.set_timesteps(sigmas=times[:-1])
    with torch.no_grad():
        for t in scheduler.timesteps:
            x = scheduler.step(unet(x, t).sample, t, x).prev_sample
    assert (x - images).abs().max() < 1e-4 * images.abs().max()


def test_the_average_is_what_is_written(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = make_config(SMALL)
    weights, ema = random_weights(config), random_weights(config, 1)
    model_files.write_model(str(tmp_path / "m.bin"), model_files.ModelFile(config, weights, ema))
    (tmp_path / "folder").mkdir()
    convert(tmp_path / "m.bin", f"{tmp_path}/folder/")
    np.testing.assert_array_equal(read_model(f"{tmp_path}/folder/").weights, ema)
    assert f"{tmp_path}/folder/" in refused(tmp_path / "m.bin", f"{tmp_path}/folder/", "--use_ema", "False")  # the average would be lost
    convert(tmp_path / "m.bin", f"{tmp_path}/bare/", "--use_ema", "False", "--clip_denoised", "False")
    np.testing.assert_array_equal(read_model(f"{tmp_path}/bare").weights, weights)
    assert not diffusers.DDPMScheduler.from_pretrained(tmp_path / "bare", subfolder="scheduler").config.clip_sample
    assert {path.name for path in tmp_path.iterdir()} == {"m.bin", "folder", "bare"}  # nothing temporary


def test_a_model_of_diffusers_comes_here(tmp_path: Path) -> None:
    """As its own training script saves them, without what we write beside the weights; and in half precision."""
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=16, block_out_channels=(32, 64), layers_per_block=1, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), num_class_embeds=4, attention_head_dim=16,
    ).eval()  # fmt: skip
    diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2")).save_pretrained(tmp_path / "theirs")
    twin.run(["--convert", f"{tmp_path}/theirs/", f"{tmp_path}/m.bin", "--class_dropout", "0.1"])
    file = read_model(str(tmp_path / "m.bin"))
    config = file.config
    assert (config.num_classes, config.null_class, config.noise_schedule, config.num_head_channels) == (3, True, "cosine", 16)
    assert config.sigma_small and config.conv_resample and config.attention_resolutions == (8,) and config.diffusion_steps == 1000
    x, t, y = inputs(config)
    with torch.no_grad():
        ours, theirs = twin.build_model(config, file.weights)(x, t, y), unet(x, t, class_labels=y).sample
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()
    given = f"--model_filename {tmp_path}/theirs/ --steps 2 --num_samples 2 --device cpu --output {tmp_path}/theirs.bin".split()
    generate.run([*given, "--classes", "1,2"])
    images = open_data(str(tmp_path / "theirs.bin")).images
    settings = make_config({"timestep_respacing": "2", "classes": (1, 2)}, None, read_model(f"{tmp_path}/theirs"))
    torch.testing.assert_close(twin.draw(twin.build_model(settings, file.weights), settings, 2), torch.from_numpy(images.copy()))
    diffusers.DDIMPipeline(unet.half(), diffusers.DDIMScheduler(prediction_type="v_prediction")).save_pretrained(tmp_path / "half")
    half = read_model(str(tmp_path / "half"))
    assert half.config.predict == "v" and half.config.num_classes == 4
    np.testing.assert_allclose(half.weights, read_model(f"{tmp_path}/theirs").weights, rtol=1e-3, atol=1e-6)


def refused(*words: object) -> str:
    """The one sentence."""
    with pytest.raises(UserError) as error:
        convert(*words)
    return str(error.value)


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        ("--channel_mult 2", {"channel_mult": (2, 2)}),
        ("--max_period 1000", {"max_period": 1000}),
        ("--rescale_timesteps True", {"rescale_timesteps": True, "diffusion_steps": 100}),
        ("--num_heads 4", {"num_head_channels": -1, "num_heads": 4}),
        ("--num_heads_upsample 2", {"num_head_channels": -1, "num_heads": 1, "num_heads_upsample": 2}),
        ("--vlb_weight 0", {"learn_sigma": True, "vlb_weight": 0.0}),
    ],
)
def test_what_has_no_counterpart(tmp_path: Path, flag: str, settings: dict[str, Any]) -> None:
    make_model(tmp_path / "m.bin", **settings)
    assert flag.split()[0] in refused(tmp_path / "m.bin", f"{tmp_path}/folder/")
    assert [path.name for path in tmp_path.iterdir()] == ["m.bin"]


def test_folders_that_can_not_be_written(tmp_path: Path) -> None:
    make_model(tmp_path / "m.bin")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/photo.png").write_text("mine")
    refused(tmp_path / "m.bin", "")
    for target in "folder", "mine/", "not/there/":
        assert f"{tmp_path}/{target.split('/')[0]}" in refused(tmp_path / "m.bin", f"{tmp_path}/{target}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.bin", "mine"]


@pytest.mark.parametrize("theirs", ["vae/config.json", "notes.txt", "unet/notes.txt", "unet/diffusion_pytorch_model.fp16.safetensors", "empty/"])
def test_what_else_a_folder_holds_is_kept(tmp_path: Path, theirs: str) -> None:
    """A pipeline's other parts, and what somebody has put there. A folder of ours alone is replaced."""
    make_model(tmp_path / "m.bin")
    convert(tmp_path / "m.bin", f"{tmp_path}/pipe/")
    convert(tmp_path / "m.bin", f"{tmp_path}/pipe/")
    other = tmp_path / "pipe" / theirs
    other.parent.mkdir(exist_ok=True)
    other.mkdir() if theirs.endswith("/") else other.write_text("mine")
    before = sorted((path, path.is_file() and path.read_bytes()) for path in (tmp_path / "pipe").rglob("*"))
    assert theirs.split("/")[0] in refused(tmp_path / "m.bin", f"{tmp_path}/pipe/")
    assert sorted((path, path.is_file() and path.read_bytes()) for path in (tmp_path / "pipe").rglob("*")) == before


def test_flags_that_say_otherwise_than_a_folder(tmp_path: Path) -> None:
    """Whoever wrote it. And settings of samplers that no sampler here has."""
    make_model(tmp_path / "m.bin")
    convert(tmp_path / "m.bin", f"{tmp_path}/ours/")
    shutil.copytree(tmp_path / "ours", tmp_path / "theirs")
    import safetensors.torch

    weights = tmp_path / "theirs/unet/diffusion_pytorch_model.safetensors"
    safetensors.torch.save_file(safetensors.torch.load_file(weights), weights)  # without our configuration
    for folder in "ours", "theirs":
        for name, value in {"objective": "flow", "num_heads": "2", "num_channels": "64", "predict": "v"}.items():
            assert f"--{name}" in refused(f"{tmp_path}/{folder}/", tmp_path / "o.bin", f"--{name}", value)
    assert "--objective" in refused(tmp_path / "m.bin", tmp_path / "o.pt", "--objective", "flow")
    settings = {"clip_sample_range": 2.0, "thresholding": True, "timestep_spacing": "trailing", "steps_offset": 1}
    for name, value in settings.items():
        shutil.copytree(tmp_path / "ours", tmp_path / name)
        change(tmp_path / name / "scheduler/scheduler_config.json", **{name: value})
        assert name in refused(f"{tmp_path}/{name}/", tmp_path / "o.bin")
    assert not (tmp_path / "o.bin").exists()


def test_widths_that_no_file_holds_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder's shapes are compared with its weights before convolutions that pool are made, of 2.4 GB each at 8192 channels."""
    make_model(tmp_path / "m.bin", channel_mult=(1, 1), num_channels=32, attention_resolutions=())
    convert(tmp_path / "m.bin", f"{tmp_path}/folder/")
    import safetensors.torch

    weights = tmp_path / "folder/unet/diffusion_pytorch_model.safetensors"
    safetensors.torch.save_file(safetensors.torch.load_file(weights), weights)
    change(tmp_path / "folder/unet/config.json", block_out_channels=[8192, 8192])
    monkeypatch.setattr("common.diffusers_files.resampling", lambda _: pytest.fail("these were made"))
    refused(f"{tmp_path}/folder/", tmp_path / "o.bin")


def test_strange_values_of_a_folder(tmp_path: Path) -> None:
    make_model(tmp_path / "m.bin")
    convert(tmp_path / "m.bin", f"{tmp_path}/theirs/")
    import safetensors.torch

    weights = tmp_path / "theirs/unet/diffusion_pytorch_model.safetensors"
    safetensors.torch.save_file(safetensors.torch.load_file(weights), weights)
    for name, value in {"layers_per_block": 1.5, "norm_eps": 10**400, "in_channels": 10**400, "dropout": 10**400}.items():
        shutil.copytree(tmp_path / "theirs", tmp_path / name)
        change(tmp_path / name / "unet/config.json", **{name: value})
        refused(f"{tmp_path}/{name}/", tmp_path / "o.bin")
    change(tmp_path / "theirs/unet/config.json", sample_size=None)
    assert "--image_size" in refused(f"{tmp_path}/theirs/", tmp_path / "o.bin")
    size = "x".join(map(str, read_model(str(tmp_path / "m.bin")).config.image_size))
    convert(f"{tmp_path}/theirs/", tmp_path / "o.bin", "--image_size", size)
    first, again = (read_model(str(tmp_path / name)) for name in ("m.bin", "o.bin"))
    np.testing.assert_array_equal(first.weights, again.weights)


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_folders_that_are_no_model_of_ours(tmp_path: Path) -> None:
    make_model(tmp_path / "m.bin")
    convert(tmp_path / "m.bin", f"{tmp_path}/good/")

    def told(damage: Callable[[Path], object]) -> str:
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "bad")
        damage(tmp_path / "bad")
        sentence = refused(f"{tmp_path}/bad/", tmp_path / "out.bin")
        assert not (tmp_path / "out.bin").exists()
        return sentence

    def unet(**values: Any) -> Callable[[Path], None]:
        return lambda folder: change(folder / "unet/config.json", **values)

    def scheduler(**values: Any) -> Callable[[Path], None]:
        return lambda folder: change(folder / "scheduler/scheduler_config.json", **values)

    for values in {"freq_shift": 1}, {"add_attention": False}, {"time_cond_proj_dim": 8}, {"_class_name": "UNet2DConditionModel"}:
        assert "unet" in told(unet(**values))
    for values in {"_class_name": "PNDMScheduler"}, {"trained_betas": [0.1, 0.2]}:
        assert "scheduler" in told(scheduler(**values))
    assert "unet/config.json" in told(lambda folder: (folder / "unet/config.json").unlink())
    assert "unet/config.json" in told(lambda folder: (folder / "unet/config.json").write_text("[" * 100000))
    weights = "unet/diffusion_pytorch_model.safetensors"
    assert weights in told(lambda folder: (folder / weights).unlink())
    assert weights in told(lambda folder: (folder / weights).write_bytes(b"1234567890"))

    import safetensors.torch

    tensors = safetensors.torch.load_file(tmp_path / "good" / weights)

    def save(**changes: Any) -> Callable[[Path], None]:
        kept = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
        return lambda folder: safetensors.torch.save_file(kept, folder / weights)

    for value in None, torch.zeros(3), torch.zeros(32, dtype=torch.int32):
        assert "bias" in told(save(**{"conv_in.bias": value}))
    assert "bad" in told(save(more=torch.zeros(3)))
    for name, value in {"sample_size": "16", "block_out_channels": [], "layers_per_block": "2", "in_channels": -3, "down_block_types": 5}.items():
        bare = save()
        assert "bad" in told(lambda folder: (bare(folder), unet(**{name: value})(folder))), name


# ----------------------------------------------------------------------------------------------------------------------
# latents


@pytest.fixture
def vae(tmp_path: Path) -> Any:
    """A small AutoencoderKL of random weights in tmp_path/vae, four pixels to a latent each way."""
    torch.manual_seed(0)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 3, "up_block_types": ["UpDecoderBlock2D"] * 3, "block_out_channels": [8, 8, 16]}
    vae = diffusers.AutoencoderKL(**blocks, norm_num_groups=4, latent_channels=4, scaling_factor=1.7, shift_factor=0.3).eval()
    vae.save_pretrained(tmp_path / "vae")
    return vae.requires_grad_(False)


@pytest.fixture
def pictures(tmp_path: Path) -> np.ndarray:
    """Ten pictures of 32x32 in two folders of tmp_path/pictures, as (N, C, H, W)."""
    made = np.random.default_rng(0).integers(0, 256, (10, 3, 32, 32)).astype(np.uint8)
    for i, picture in enumerate(made):
        folder = tmp_path / f"pictures/{'ab'[i // 5]}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture.transpose(1, 2, 0)).save(folder / f"{i}.png")
    return made


def prepare(*words: object) -> int:
    return prepare_data.main([*map(str, words)])


def test_latents_are_encoded_trained_on_and_decoded(tmp_path: Path, vae: Any, pictures: np.ndarray, run: Callable) -> None:
    folder = ["--data_dir", tmp_path / "pictures", "--image_size", 32, "--encode", tmp_path / "vae", "--output_name", tmp_path / "latents.bin"]
    assert prepare(*folder) == 0
    data = open_data(str(tmp_path / "latents.bin"))
    x0 = torch.from_numpy(pictures) / 127.5 - 1
    latents = ((vae.encode(x0).latent_dist.mean - 0.3) * 1.7).numpy()
    np.testing.assert_allclose(data.images, latents, rtol=1e-4, atol=1e-5)
    assert data.images.shape == (10, 4, 8, 8) and data.labels.tolist() == [0] * 5 + [1] * 5

    # the program and the twin train on them
    words = ["--preset", "latent32", "--data_file", tmp_path / "latents.bin", *"--num_channels 32 --channel_mult 1,2 --num_res_blocks 1".split()]
    words += "--attention_resolutions 4 --num_head_channels 32 --batch_size 4 --max_steps 2 --timestep_respacing 4 --num_samples 4".split()
    run([*words, "--output_dir", tmp_path / "native"])
    twin.run([*map(str, words), "--output_dir", str(tmp_path / "torch"), "--device", "cpu"])
    losses = [[float(row["loss"]) for row in read_log(tmp_path / name)] for name in ("native", "torch")]
    np.testing.assert_allclose(*losses, rtol=1e-4)

    # samples, which reach beyond [-1, 1], through the decoder; and what the program wrote
    weights = tmp_path / "native/model_0000002.bin"
    generate.run(
        [
            *map(str, ["--model_filename", weights, "--decode", tmp_path / "vae", "--steps", 4, "--num_samples", 3, "--device", "cpu"]),
            "--output",
            f"{tmp_path}/a.bin",
        ]
    )
    samples = ["--sample", 3, "--init", weights, "--timestep_respacing", 4, "--clip_denoised", "False", "--output", tmp_path / "samples.bin"]
    run(samples)
    native = torch.from_numpy(open_data(str(tmp_path / "samples.bin")).images.copy())
    assert native.abs().max() > 1.5
    generate.run([*map(str, ["--data_file", tmp_path / "samples.bin", "--decode", tmp_path / "vae", "--output", tmp_path / "b.bin"])])
    decoded = [open_data(str(tmp_path / name)).images for name in ("a.bin", "b.bin")]
    wanted = vae.decode(native / 1.7 + 0.3).sample.numpy()
    for images in decoded:
        np.testing.assert_allclose(images, wanted, atol=2e-3)


def test_what_decodes_nothing(tmp_path: Path, vae: Any, pictures: np.ndarray, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "m.bin")

    def told(*words: object) -> str:
        with pytest.raises(UserError) as error:
            generate.run([*map(str, words)])
        return str(error.value)

    start = ["--model_filename", tmp_path / "m.bin", "--steps", 2, "--num_samples", 1, "--device", "cpu", "--output", tmp_path / "a.png"]
    assert "vae" in told(*start, "--decode", tmp_path / "vae")
    assert "config.json" in told(*start, "--decode", tmp_path / "pictures")
    assert "--show" in told(*start, "--decode", tmp_path / "vae", "--show", "samplers")
    prepare_data.write_data(str(tmp_path / "pictures.bin"), pictures)
    latents = ["--decode", tmp_path / "vae", "--data_file", tmp_path / "pictures.bin"]
    assert "pictures.bin" in told(*latents)
    assert not (tmp_path / "a.png").exists()

    # before anything is sampled
    monkeypatch.setattr(generate, "BACKENDS", {"torch": lambda *_: pytest.fail("sampled what nothing can decode")})
    assert "vae" in told(*start, "--decode", tmp_path / "vae")
    make_model(tmp_path / "m.bin", in_channels=4)
    monkeypatch.setattr(Autoencoder, "decode", lambda *_: torch.empty(1 << 60))
    assert "vae" in told(*start, "--decode", tmp_path / "vae")
    wrong_values: list[tuple[str, Any]] = [
        ("scaling_factor", None),
        ("scaling_factor", 0),
        ("scaling_factor", 1e-320),
        ("scaling_factor", 10**400),
        ("shift_factor", float("nan")),
        ("latents_mean", 5e40),
        ("latents_mean", [0.0] * 16),
        ("latents_std", [1.0, 0.0, 1.0, 1.0]),
        ("latents_std", "1"),
    ]
    for name, value in wrong_values:
        before = json.loads((tmp_path / "vae/config.json").read_text())
        change(tmp_path / "vae/config.json", **{name: value})
        assert name in told(*start, "--decode", tmp_path / "vae")
        (tmp_path / "vae/config.json").write_text(json.dumps(before))
    assert "--data_file" in told(*start, "--decode", tmp_path / "vae", "--data_file", tmp_path / "pictures.bin")

    def fails(*words: object) -> str:
        assert prepare("--data_dir", tmp_path / "pictures", "--output_name", tmp_path / "l.bin", *words) == 1
        assert not (tmp_path / "l.bin").exists()
        return capsys.readouterr().err

    assert "vae" in fails("--image_size", 30, "--encode", tmp_path / "vae")
    assert "vae" in fails("--image_size", 32, "--channels", 1, "--encode", tmp_path / "vae")
    change(tmp_path / "vae/config.json", _class_name="VQModel")
    assert "vae" in fails("--encode", tmp_path / "vae")
    change(tmp_path / "vae/config.json", _class_name="AutoencoderKL", block_out_channels=[8, 8, 32])
    assert "vae" in fails("--encode", tmp_path / "vae")
    monkeypatch.setitem(sys.modules, "diffusers", None)
    assert "diffusers" in fails("--encode", tmp_path / "vae")


def test_a_setting_is_named_before_the_tensors_that_follow_from_it(tmp_path: Path) -> None:
    """A folder that diffusers wrote with such a setting has other tensors, too, and who reads of these can't tell why."""
    make_model(tmp_path / "m.bin", use_scale_shift_norm=True)
    convert(tmp_path / "m.bin", f"{tmp_path}/good/")
    import safetensors.torch

    weights = tmp_path / "good/unet/diffusion_pytorch_model.safetensors"
    tensors = safetensors.torch.load_file(weights)
    tensors = dict(list(tensors.items())[:-3]) | {"more.weight": torch.zeros(3)}
    safetensors.torch.save_file(tensors, weights)
    settings = {"add_attention": False, "time_embedding_type": "fourier", "class_embed_type": "timestep", "upsample_type": "resnet"}
    for name, value in (settings | {"attn_norm_num_groups": None}).items():
        shutil.rmtree(tmp_path / "theirs", ignore_errors=True)
        shutil.copytree(tmp_path / "good", tmp_path / "theirs")
        change(tmp_path / "theirs/unet/config.json", **{name: value})
        assert f"its {name} " in refused(f"{tmp_path}/theirs/", tmp_path / "o.bin")
