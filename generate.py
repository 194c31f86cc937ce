"""Generate images with a trained model.

python generate.py --model_filename out/model_0001000.bin                     a grid of 16 in samples.png
python generate.py --model_filename model.pt --steps 250 --sampler ddpm       from .pt or .safetensors
python generate.py --model_filename unet_init.bin --backend native            by ./train_unet, without PyTorch's model
python generate.py --model_filename 64x64_diffusion.pt --preset adm64         guided-diffusion's weights: the model
                                                                              flags say what the file does not
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import train_unet
from train_unet import ModelFile, UserError, flag

NATIVE_PROGRAM = Path(__file__).resolve().parent / "train_unet"


@dataclass
class Options:
    """The flags that are not train_unet.py's."""

    model_filename: str = flag("", "the weights: .bin (ours or unet.cu's), .pt or .safetensors", group="Images")
    num_samples: int = flag(16, "images", 1, 10**6)
    steps: str = flag("50", "sampling steps: 50, ddim25, or 10,15,20 for equal parts of T; empty: all")
    output: str = flag("samples.png", "the grid; or .bin for a data file of float images")
    separate: bool = flag(False, "also write each image as a file of its own, OUTPUT_0000.png, ...")
    batch_size: int = flag(16, "images at a time", 1, 10**6)
    backend: str = flag("torch", "PyTorch, or ./train_unet --sample", choices="torch|native")


def generate_torch(file: ModelFile, config: train_unet.Config, count: int) -> torch.Tensor:
    """Images (count, C, H, W) in [-1, 1], by PyTorch."""
    weights = file.weights_to_use(config.use_ema)
    model = train_unet.build_model(config, weights, train_unet.pick_device(config.device))
    return train_unet.sample(model, config, count, progress=True)


def generate_native(file: ModelFile, config: train_unet.Config, count: int) -> torch.Tensor:
    """The same images, by ./train_unet."""
    if not NATIVE_PROGRAM.exists():
        raise UserError(f"--backend native: {NATIVE_PROGRAM} is not there; make train_unet builds it")
    with tempfile.TemporaryDirectory() as folder:
        source, target = file.path, f"{folder}/samples.bin"
        if not source.endswith(".bin"):
            source = f"{folder}/model.bin"
            train_unet.write_model(source, file)
        flags = ["sampler", "timestep_respacing", "eta", "seed", "clip_denoised", "use_ema", "batch_size"]
        command = [str(NATIVE_PROGRAM), f"--sample={count}", f"--init={source}", f"--output={target}"]
        command += [f"--{name}={getattr(config, name)}" for name in flags]
        done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise UserError(done.stderr.strip().removeprefix("train_unet: ") or f"{NATIVE_PROGRAM} failed")
        return torch.from_numpy(train_unet.open_data(target).images.copy())


def run(argv: list[str]) -> None:
    own = {f.name: f for f in dataclasses.fields(Options)}
    shared = ["sampler", "eta", "clip_denoised", "seed", "use_ema", "device"]
    shared += ["preset", *train_unet.SAVED_FLAGS]
    flags: dict[str, Any] = train_unet.parse_flags(argv, own | {name: train_unet.FLAGS[name] for name in shared if name not in own}, __doc__)
    options = Options(**{name: flags.pop(name) for name in own if name in flags})
    if not options.model_filename:
        raise UserError("--model_filename: is missing; name a .bin, .pt or .safetensors file of weights")
    file = train_unet.read_model(options.model_filename, flags)
    flags |= {"timestep_respacing": options.steps, "batch_size": options.batch_size, "output": options.output}
    try:
        config = train_unet.make_config(flags, None, file)
    except UserError as e:
        raise UserError(str(e).replace("--timestep_respacing", "--steps")) from None
    generate = {"torch": generate_torch, "native": generate_native}[options.backend]
    images = generate(file, config, options.num_samples)
    train_unet.save_samples(images, options.output)
    print(f"{options.output}: {len(images)} images with {config.sampler} from {options.model_filename}")
    if options.separate:
        names = [f"{Path(options.output).with_suffix('')}_{i:04d}.png" for i in range(len(images))]
        for name, image in zip(names, images):
            train_unet.save_png(train_unet.to_pixels(image), name)
        print(f"{names[0]} to {names[-1]}: one by one")


if __name__ == "__main__":
    sys.exit(train_unet.main("generate", run))
