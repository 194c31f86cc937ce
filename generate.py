"""Generate images with a trained model, by any program that this machine has for it.

  python generate.py --model_filename out/model_0000400.bin                     a grid of 16 in samples.png
  python generate.py --model_filename model.pt --steps 250 --sampler ddpm       from .pt or .safetensors
  python generate.py --model_filename unet_init.bin --backend native            by ./train_unet, without PyTorch's model
  python generate.py --model_filename 64x64_diffusion.pt --preset adm64         guided-diffusion's weights: the model
                                                                                flags say what the file does not; its
                                                                                image_sample.py's flags work here too
  python generate.py --model_filename model.bin --image F.png --strength 0.6    changes a picture (SDEdit); with --mask M.png paints
                                                                                anew what is white there (RePaint)
  python generate.py --model_filename model.bin --output F.npz                  for guided-diffusion's evaluator.py; --num_samples 50000
  python generate.py --model_filename model.bin --compare True                  a table: time of every back end, and how
                                                                                far its images are from PyTorch's
  python generate.py --model_filename model.bin --export_onnx model.onnx        for other programs; --export_coreml
                                                                                F.mlpackage for Apple's
  python generate.py --model_filename model.bin --decode VAE_DIR                of latents, drawn by an AutoencoderKL of diffusers;
                                                                                --data_file samples.bin in place of the model
                                                                                decodes what ./train_unet --sample wrote
  python generate.py --model_filename model.bin --show denoising                pictures of what diffusion does; with
                                                                                --output F.gif one that moves

Contents: flags, back ends, exported networks, the table of back ends, pictures, a run.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

from common import program
from common.flags import FLAGS, SAMPLING_FLAGS, SAVED_FLAGS, Config, flag, format_value, parse_flags, resolve
from common.program import UserError, run_program

INTRO = __doc__.partition("\n\nContents")[0]

# ======================================================================================================================
# flags


@dataclass
class Options:
    """The flags that are not train_unet.py's."""

    asked: ClassVar[frozenset[str]] = frozenset()  # every flag that the command line names
    model_filename: str = flag("", "the weights: .bin (ours or unet.cu's), .pt or .safetensors")
    num_samples: int = flag(16, "images", 1, 10**6)
    steps: str = flag("50", "sampling steps: 50, ddim25, or 10,15,20 for equal parts of T; empty: all")
    output: str = flag("samples.png", "the grid; or .npz for guided-diffusion's evaluator, .bin of float images, .gif for --show denoising")
    separate: bool = flag(False, "also write each image as a file of its own, OUTPUT_0000.png, ...")
    batch_size: int = flag(16, "images at a time", 1, 10**6)
    backend: str = flag("torch", "PyTorch, ./train_unet, PyTorch on Apple's GPU, Core ML, onnxruntime", choices="torch|native|mps|coreml|onnx")
    compare: bool = flag(False, "time every back end of this machine, compare their images, and stop")
    export_onnx: str = flag("", "write the network as F.onnx (inputs x, timesteps[, y]; any batch), and stop")
    export_coreml: str = flag("", "write the network as F.mlpackage (inputs x, timesteps[, y]; batches of batch_size), and stop")
    precision: str = flag(
        "auto",
        "fp32, or on a GPU bf16 (auto); fp8: faster with --backend native on an H100; with Core ML fp32 (auto), or fp16 for the Neural Engine",
        choices="auto|fp32|bf16|fp8|fp16",
    )
    image: str = flag("", "a picture to change: by --strength from 0 to 1, or with --mask; shows it before and after")
    mask: str = flag("", "a picture that is white where --image, or --cond, is to be painted anew")
    cond: str = flag("", "a picture to condition on, or from which train_unet's --cond makes it; shows it, the images, and the truth if known")
    show: str = flag(
        "",
        "draw a picture of the process instead; nearest: each sample above the picture of the data that it resembles",
        choices="corruption|denoising|samplers|interpolation|nearest",
    )
    data_file: str = flag("", "where --show takes images of the data from (default: the model's data); without a model, what to --decode")
    decode: str = flag("", "folder of the AutoencoderKL (diffusers) that draws pictures from the model's latents, or from those in data_file")
    model_path: str = flag("", "--model_filename; what is not given is then as there, all steps of ddpm")
    use_ddim: bool = flag(False, "True: --sampler ddim, False: ddpm")
    timestep_respacing: str = flag("", "--steps")
    use_fp16: bool = flag(False, "True: --precision bf16, False: fp32")
    use_checkpoint: bool = flag(False, "of training; means nothing here")


OWN = {f.name: f for f in dataclasses.fields(Options)}
ALIASES = ["predict_xstart", "rescale_learned_sigmas", "large_size", "small_size"]  # guided-diffusion's names of what a model's flags say
SHARED = {*SAMPLING_FLAGS, *SAVED_FLAGS, *ALIASES, "seed", "use_ema", "ema_rate", "device", "preset"}
SHARED -= {"timestep_respacing", "cond"}  # which are --steps and a picture here; the model says how that is used


def parse_command_line(argv: list[str]) -> dict[str, Any]:
    return parse_flags(without_classifier(argv), OWN | {name: f for name, f in FLAGS.items() if name in SHARED}, INTRO)


def without_aliases(flags: dict[str, Any]) -> dict[str, Any]:
    """flags with the names and defaults of guided-diffusion's image_sample.py as ours."""
    meant = []
    if "model_path" in flags:
        meant.append(("model_path", "model_filename", flags["model_path"]))
        flags = {"sampler": "ddim" if flags.get("use_ddim") else "ddpm", "timestep_respacing": flags.get("steps", "")} | flags
    if "use_ddim" in flags:
        meant.append(("use_ddim", "sampler", "ddim" if flags["use_ddim"] else "ddpm"))
    if "timestep_respacing" in flags:
        meant.append(("timestep_respacing", "steps", flags["timestep_respacing"]))
    if "use_fp16" in flags:
        meant.append(("use_fp16", "precision", "bf16" if flags["use_fp16"] else "fp32"))
    return resolve(flags, meant)


def without_classifier(argv: list[str]) -> list[str]:
    """argv less --classifier_... if --classifier_scale is 0, which is how guided-diffusion's scripts do without a classifier."""
    pairs = [tuple(word[2:].split("=", 1)) if "=" in word else (word[2:], following) for word, following in zip(argv, [*argv[1:], ""])]
    if not any(name == "classifier_scale" and re.fullmatch(r"0+\.?0*", value) for name, value in pairs):
        return argv
    words, kept = iter(argv), []
    for word in words:
        if not word.startswith("--classifier_"):
            kept.append(word)
        elif "=" not in word:
            next(words, None)
    return kept


if __name__ == "__main__":  # before PyTorch
    program.begin("generate", lambda argv: without_aliases(parse_command_line(argv)), program.SAMPLING)

import contextlib
import io
import logging
import math
import platform
import re
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn
from tqdm import tqdm

import train_unet
from common import files, formats, model_files
from common.config import ect_defaults, make_config, pick_device, pick_precision, validate, value_rows
from common.data_files import Data, find_data, open_data
from common.diffusers_files import Autoencoder
from common.model import UNetModel, build_model
from common.model_files import ModelFile
from common.pictures import picture_file
from common.samples import COPY, Classes, check_finite, grid_pixels, nearest_images, save_png, save_samples, to_pixels, value_captions, visible

ROOT = Path(__file__).resolve().parent

# ======================================================================================================================
# back ends: each draws count images (count, C, H, W) in [-1, 1]. Draws and sampler are train_unet's in all of them, so
# the images are the same up to rounding.


class Network(nn.Module):
    """A network that another program computes, in a UNetModel's place: what train_unet.draw() asks of a model.
    compute(inputs by name): float32 or int64 tensors on the CPU -> the output there."""

    def __init__(self, compute: Callable):
        super().__init__()
        self.compute = compute
        self.here = nn.Parameter(torch.empty(0))  # says that draws and sampler run on the CPU

    def forward(self, x: Tensor, timesteps: Tensor, y: Tensor | None = None, **conditions: Tensor) -> Tensor:
        given = {"x": x, "timesteps": timesteps, "y": y} | conditions
        return self.compute({name: value for name, value in given.items() if value is not None})


def torch_model(file: ModelFile, config: Config) -> UNetModel:
    device = pick_device(config.device)
    return build_model(config, file.weights_to_use(config.use_ema), device, pick_precision(config, device))


def mps_network(file: ModelFile, config: Config, device: str = "mps") -> Network:
    """The GPU of a Mac, which has no float64: the draws and the timestep embedding, which use it, stay on the CPU."""
    if device == "mps" and not torch.backends.mps.is_available():
        raise UserError("--backend mps: this machine has no Apple GPU that PyTorch can use; --backend torch or native works here")
    model = build_model(config, file.weights_to_use(config.use_ema), device)
    embed = UNetModel(config)  # on the CPU
    model.timestep_embedding = lambda t: embed.timestep_embedding(t.cpu()).to(device)

    def compute(given: dict[str, Tensor]) -> Tensor:
        return model(**{name: value.to(device) for name, value in given.items()}).cpu()

    return Network(compute)


def onnx_network(file: ModelFile, config: Config) -> Network:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(onnx_bytes(file, config), settings, providers=["CPUExecutionProvider"])

    def compute(given: dict[str, Tensor]) -> Tensor:
        return torch.from_numpy(session.run(None, {name: value.numpy() for name, value in given.items()})[0])

    return Network(compute)


def coreml_network(file: ModelFile, config: Config) -> Network:
    """Its batches are of one size: smaller ones are filled up."""
    if platform.system() != "Darwin":
        raise UserError("--backend coreml: only macOS runs Core ML; --export_coreml F.mlpackage works here, and so does --backend torch or native")
    model = coreml_model(file, config)

    def compute(given: dict[str, Tensor]) -> Tensor:
        outputs = []
        for part in zip(*(values.split(config.batch_size) for values in given.values())):
            full = {}
            for name, values in zip(given, part):
                full[name] = np.zeros((config.batch_size, *values.shape[1:]), INPUTS[name])
                full[name][: len(values)] = values
            outputs.append(torch.from_numpy(model.predict(full)["output"][: len(part[0])]))
        return torch.cat(outputs)

    return Network(compute)


def generate_with(model: Callable) -> Callable:
    """The back end that samples with model(file, config)."""
    return lambda file, config, count: train_unet.draw(model(file, config), config, count, progress=sys.stderr.isatty())


def run_native(program: Path, file: ModelFile, config: Config, count: int) -> tuple[Tensor, float]:
    """The images, and the seconds that it took by its own clock, without reading and writing files."""
    if not program.exists():
        raise UserError(f"--backend native: {program} is not there; make {program.name} builds it")
    with tempfile.TemporaryDirectory() as folder:
        source, target = file.path, f"{folder}/samples.bin"
        ours = source.endswith(".bin") and np.fromfile(source, "<i4", 1)[0] == files.MODEL_MAGIC
        if not ours:  # unet.cu's .bin does not say what the flags do
            source = f"{folder}/model.bin"
            model_files.write_model(source, file)
        command = [str(program), f"--sample={count}", f"--init={source}", f"--output={target}"]
        for name in [*SAMPLING_FLAGS, "seed", "use_ema", "batch_size", "precision"]:
            value = getattr(config, name)
            command.append(f"--{name}={format_value(name, value) if isinstance(value, tuple) else value}")
        command += [f"--{name}={getattr(config, name)}" for name in ("start_from", "inpaint", "mask") if getattr(config, name)]
        number = config.device.removeprefix("cuda:")
        if number.isdecimal():  # else auto, cpu or cuda: the program is built for one of them
            command.append(f"--device={number}")
        if file.more_emas:
            command.append(f"--ema_rate={file.config.ema_rate[0]!r}")
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            told = done.stderr.strip().removeprefix("train_unet: ").replace(source, file.path)  # which may be a copy in this folder
            raise UserError(told or f"{program} failed")
        return torch.from_numpy(open_data(target).images.copy()), told_seconds(done.stdout, count)


def told_seconds(line: str, count: int) -> float:
    """From "... in 0.02 s (804.3 images/s)": a short time from its rate, a long one as it is, since both have few digits."""
    seconds, rate = map(float, re.search(r"in ([\d.]+) s \(([\d.]+) images/s\)", line).groups())
    return seconds if seconds >= 1 else count / rate


BACKENDS: dict[str, Callable] = {
    "torch": generate_with(torch_model),
    "native": lambda file, config, count: run_native(ROOT / "train_unet", file, config, count)[0],
    "mps": generate_with(mps_network),
    "coreml": generate_with(coreml_network),
    "onnx": generate_with(onnx_network),
}


# ======================================================================================================================
# exported networks: inputs x (B, C, H, W), timesteps (B) and, of a conditional model, y (B), values (B, cond_dim) and cond (B, cond_channels, H, W); the output is the
# network's own (B, out_channels, H, W), as UNetModel.forward's, in PyTorch's layout. The sampler stays outside.


INPUTS = {"x": np.float32, "timesteps": np.float32, "y": np.int32, "values": np.float32, "cond": np.float32}
COREML_FILES = ("Manifest.json", "Data/")  # what an .mlpackage holds


def example_inputs(config: Config, batch: int) -> dict[str, Tensor]:
    inputs = {"x": torch.zeros(batch, config.in_channels, *config.image_size), "timesteps": torch.zeros(batch)}
    if config.class_cond:
        inputs["y"] = torch.zeros(batch, dtype=torch.int64)
    if config.cond_dim:
        inputs["values"] = torch.zeros(batch, config.cond_dim)
    if config.cond_channels:
        inputs["cond"] = torch.zeros(batch, config.cond_channels, *config.image_size)
    return inputs


def onnx_bytes(file: ModelFile, config: Config) -> bytes:
    import onnxscript  # noqa: F401 (torch.onnx needs it, and says so in a page)

    model = build_model(config, file.weights_to_use(config.use_ema))
    inputs = example_inputs(config, 2)
    shapes = {name: {0: torch.export.Dim("batch")} for name in inputs}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # of axes that have one name
        program = torch.onnx.export(
            model, kwargs=inputs, dynamo=True, dynamic_shapes=shapes, input_names=list(inputs), output_names=["output"], verbose=False
        )
    proto = program.model_proto
    if proto.ByteSize() >= 2**31:
        raise UserError("--export_onnx: this model is larger than 2 GiB, the most that one .onnx file holds")
    return proto.SerializeToString()


def coreml_model(file: ModelFile, config: Config) -> Any:
    """A Core ML program of float32, or of float16 with --precision fp16, which is what the Neural Engine computes with."""
    try:
        logging.getLogger("coremltools").setLevel(logging.CRITICAL)  # it reports what it lacks outside macOS, and every version of torch
        import coremltools
    except ImportError:
        raise UserError("Python's coremltools is missing, which Core ML needs; pip install coremltools") from None

    def feeds_angle(op: Any, steps: int = 4) -> bool:
        """Whether a sine or cosine comes within a few operations: a timestep's angle of up to 1000 in float16 would be off by up to 1/4."""
        below = [child for out in op.outputs for child in out.child_ops]
        return op.op_type in ("sin", "cos") or (steps > 0 and any(feeds_angle(child, steps - 1) for child in below))

    half = coremltools.transform.FP16ComputePrecision(lambda op: not feeds_angle(op))
    model = build_model(config, file.weights_to_use(config.use_ema))
    inputs = example_inputs(config, config.batch_size)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars
            exported = torch.export.export(model, (), inputs).run_decompositions({})
            return coremltools.convert(
                exported,
                convert_to="mlprogram",
                inputs=[coremltools.TensorType(name, dtype=INPUTS[name]) for name in inputs],
                outputs=[coremltools.TensorType("output", dtype=np.float32)],
                compute_precision=half if config.precision == "fp16" else coremltools.precision.FLOAT32,
                minimum_deployment_target=coremltools.target.macOS13,
                skip_model_load=platform.system() != "Darwin",
            )
    except Exception as e:  # noqa: BLE001 (coremltools raises anything at a version of torch that it does not know)
        why = f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0][:200]}"
        told = f"coremltools {coremltools.__version__} can't convert this model from torch {torch.__version__}"
        raise UserError(f"{told} ({why}); another version of one of them may") from None


# ======================================================================================================================
# the table of back ends


def time_torch(model: nn.Module, config: Config, count: int, compiled: bool = False) -> tuple[float, Tensor]:
    """Seconds and images of the second of two runs. The first, of two steps, compiles and lets cuDNN choose."""
    if compiled:
        model.compile()
    short = dataclasses.replace(config, timestep_respacing="2")
    train_unet.draw(model, short, count)
    began = time.perf_counter()
    images = train_unet.draw(model, config, count)
    return time.perf_counter() - began, images


def time_native(program: Path, file: ModelFile, config: Config, count: int) -> tuple[float, Tensor]:
    """Seconds of a batch behind the first, in which a GPU loads its kernels: three batches less one, halved. (Where other work held the first
    one up for as long as the other two take, a third of the three.)"""
    images, once = run_native(program, file, config, count)
    thrice = run_native(program, file, config, 3 * count)[1]
    return (thrice - once) / 2 if thrice > once else thrice / 3, images


Row = tuple[str, str, str, float, Tensor]  # a back end's name, its device, its precision, the seconds of a batch (warm), and that batch's images


def compare(file: ModelFile, config: Config, count: int) -> Iterator[Row]:
    """Every back end that this machine has; the first row is what the others' images are compared with."""
    config = dataclasses.replace(config, batch_size=count)
    cpu = dataclasses.replace(config, device="cpu", precision="fp32")
    gpu = [dataclasses.replace(config, device="cuda", precision=precision) for precision in ("fp32", "bf16")] * torch.cuda.is_available()
    tries: list[tuple[str, str, str, Callable]] = []
    for c in cpu, *gpu:
        tries.append(("PyTorch, eager", c.device, c.precision, lambda c=c: time_torch(torch_model(file, c), c, count)))
    if torch.backends.mps.is_available():
        tries.append(("PyTorch, eager", "mps", "fp32", lambda: time_torch(mps_network(file, cpu), cpu, count)))
    if platform.system() == "Darwin":
        for c in cpu, dataclasses.replace(cpu, precision="fp16"):
            tries.append(("Core ML", "Apple's choice", c.precision, lambda c=c: time_torch(coreml_network(file, c), c, count)))
    for c in cpu, *gpu:
        tries.append(("train_unet", c.device, c.precision, lambda c=c: time_native(ROOT / f"train_unet_{c.device}", file, c, count)))
    tries.append(("onnxruntime", "cpu", "fp32", lambda: time_torch(onnx_network(file, cpu), cpu, count)))
    for c in *gpu, cpu:  # last, since compiling takes longest
        tries.append(("PyTorch, compiled", c.device, c.precision, lambda c=c: time_torch(torch_model(file, c), c, count, compiled=True)))
    for name, device, precision, measure in tries:
        try:
            yield name, device, precision, *measure()
        except Exception as e:  # noqa: BLE001 (a back end that does not work here is no reason to hide the others)
            print(f"without {name} on {device}, {precision}: {str(e).strip().partition(chr(10))[0][:150] or type(e).__name__}", file=sys.stderr)


def print_table(rows: Iterable[Row], count: int) -> None:
    """Markdown, line by line. Speed is against eager PyTorch in fp32 on the same device; pixels go from 0 to 255."""
    print(f"| back end | device | precision | {count} images | images/s | speed | largest pixel difference |")
    print("| --- " * 7 + "|")
    eager: dict[str, float] = {}
    first = None
    for name, device, precision, seconds, images in rows:
        pixels = to_pixels(images).astype(int)
        first = pixels if first is None else first
        if name == "PyTorch, eager":
            eager.setdefault(device, seconds)
        speed = f"{eager[device] / seconds:.2f}" if device in eager else ""
        cells = f"{seconds:.3g} s", f"{count / seconds:.1f}", speed, f"{abs(pixels - first).max()}"
        print(f"| {' | '.join((name, device, precision, *cells))} |", flush=True)


# ======================================================================================================================
# pictures


def smiley(config: Config) -> Tensor:
    """(C, H, W) in [-1, 1]: drawn four times as large and scaled down. White on black in grey, yellow on white in colour."""
    H, W = config.image_size
    grey = config.in_channels != 3
    sky, skin, ink = ("black", "white", "black") if grey else ("white", "gold", "black")
    picture = Image.new("RGB", (4 * W, 4 * H), sky)
    draw = ImageDraw.Draw(picture)

    def box(left: float, top: float, right: float, bottom: float) -> list[float]:
        return [4 * W * left, 4 * H * top, 4 * W * right, 4 * H * bottom]

    draw.ellipse(box(0.1, 0.1, 0.9, 0.9), fill=skin, outline=ink, width=2)
    for eye in 0.35, 0.65:
        draw.ellipse(box(eye - 0.06, 0.3, eye + 0.06, 0.46), fill=ink)
    draw.arc(box(0.27, 0.3, 0.73, 0.75), 20, 160, fill=ink, width=max(W // 4, 4))
    pixels = np.asarray(picture.resize((W, H), Image.Resampling.BOX), np.float32) / 127.5 - 1
    image = torch.from_numpy(pixels).permute(2, 0, 1)
    return image if not grey else image.mean(0, keepdim=True).expand(config.in_channels, -1, -1)


def shown_data(file: ModelFile, config: Config, data_file: str) -> Data:
    """The model's data, or that of --data_file."""
    path = data_file or find_data(file.config.data_file or "data/fashion32.bin", file.path)
    if Path(path).is_dir():
        raise UserError(
            f"{path}: the model was trained on this folder of pictures; name a data file of them with --data_file, as prepare_data.py makes it"
        )
    of_program = not data_file and not Path(path).exists() and (ROOT / path).exists()
    if not (data_file or of_program or Path(path).exists()):
        raise UserError(f"{path}: the model was trained on these images, and they are not there; name a data file with --data_file")
    data = open_data(str(ROOT / path) if of_program else path)
    data.check(dataclasses.replace(config, class_cond=False, cond_dim=0, cond="", cond_channels=0))  # only its images are needed
    return data


def two_images(file: ModelFile, config: Config, data_file: str) -> dict[str, tuple[Tensor, Tensor]]:
    """A drawn smiley and the first image of the data: x0 (1, C, H, W) and the label (1), 0 where there is none."""
    data = shown_data(file, config, data_file)
    label = torch.tensor([0 if data.labels is None else int(data.labels[0])]).clamp(max=max(config.num_classes - 1, 0))
    return {"a smiley": (smiley(config)[None], label * 0), Path(data.path).name: (torch.from_numpy(data.read_floats(np.array([0]))), label)}


def labelled_grid(rows: dict[str, list[Tensor]], columns: list[str], title: str) -> np.ndarray:
    """Pixels (H, W, 3) of rows of cells, each an image (C, H, W) or several side by side (N, C, H, W), small ones enlarged."""
    zoom = max(1, 64 // max(next(iter(rows.values()))[0].shape[-2:]))

    def cell(images: Tensor) -> np.ndarray:
        pixels = to_pixels(images.reshape(-1, *images.shape[-3:])).repeat(zoom, 1).repeat(zoom, 2)
        return np.concatenate(list(np.broadcast_to(pixels, (*pixels.shape[:3], 3))), axis=1)

    cells = {name: [cell(images) for images in row] for name, row in rows.items()}
    H, W = next(iter(cells.values()))[0].shape[:2]
    font, gap = ImageFont.load_default(13), 4
    left = max(round(font.getlength(name)) for name in rows) + 3 * gap
    top = 2 * 18 + gap
    width = max(left + len(columns) * (W + gap), round(font.getlength(title)) + 2 * gap)
    picture = Image.new("RGB", (width, top + len(rows) * (H + gap)), "white")
    draw = ImageDraw.Draw(picture)
    draw.text((gap, gap), title, "black", font)
    for x, name in enumerate(columns):
        draw.text((left + x * (W + gap) + W // 2, 20 + gap), name, "black", font, anchor="mt")
    for y, (name, row) in enumerate(cells.items()):
        draw.text((left - 2 * gap, top + y * (H + gap) + H // 2), name, "black", font, anchor="rm")
        for x, pixels in enumerate(row):
            picture.paste(Image.fromarray(pixels), (left + x * (W + gap), top + y * (H + gap)))
    return np.asarray(picture)


COLUMNS = 9


def start_noise(config: Config, count: int = 1) -> Tensor:
    """(count, C, H, W): the normals that sampling starts from. No condition changes them, so none has to be given."""
    config = dataclasses.replace(config, class_cond=False, cond_dim=0, cond="", cond_channels=0)
    return train_unet.Denoiser(nn.Identity(), config, torch.arange(count)).normals(train_unet.SAMPLE_START, 0)


def step_noises(config: Config) -> list[train_unet.Noise]:
    """How noisy the sampler's x is before each of its steps."""
    return train_unet.noise_route(config, train_unet.Diffusion(config))[:-1]


def noise_name(config: Config, sigma: float) -> str:
    """As the model's objective counts noise."""
    told = train_unet.Diffusion(config).level_at(sigma).t.item()
    return {"edm": f"sigma = {sigma:.2g}", "flow": f"t = {told / 1000:.2f}"}.get(config.frame, f"t = {told:.0f}")


def corrupt(x0: Tensor, sigma: float, noise: Tensor) -> Tensor:
    """x0 with so much noise, scaled so that signal^2 + noise^2 = 1."""
    return (x0 + sigma * noise) / (1 + sigma * sigma) ** 0.5


def scale_of(noise: train_unet.Noise) -> float:
    """By how much the sampler's x is larger than that."""
    return noise.signal * (1 + noise.sigma**2) ** 0.5


def denoise(model: nn.Module, config: Config, x: Tensor, labels: Tensor, first: int = 0) -> list[Tensor]:
    """From the sampler's x (B, C, H, W) at step `first`, in one batch: each step's x in that scale, and what comes out."""
    device = next(model.parameters()).device
    D = train_unet.Denoiser(model, config, torch.arange(len(x), device=device), labels.to(device) if config.class_cond else None)
    steps = list(train_unet.sampler_steps(D, x.to(device), first))
    return [*(x.cpu() / scale_of(D.route[step]) for step, x, _, _ in steps), steps[-1][-1].cpu()]


def network_calls(config: Config, first: int = 0) -> int:
    """How often a sampler asks the network for one batch, from step `first` on. (heun asks twice in each step but the last.)"""
    steps = len(step_noises(config)) - first
    return 2 * steps - 1 if config.sampler == "heun" else steps


@contextlib.contextmanager
def progress(model: nn.Module, calls: int) -> Iterator[None]:
    """A bar on a terminal, of how often the network was asked."""

    def count(*_: Any) -> None:
        bar.update()

    with tqdm(total=calls, unit="step", disable=not sys.stderr.isatty()) as bar, model.register_forward_hook(count):
        yield


def show_corruption(file: ModelFile, config: Config, options: Options) -> np.ndarray:
    """Both images with more and more of the same noise: at even distances from t = 0 to T - 1, or for edm and flow in as many steps of euler's."""
    noise, T = start_noise(config), config.diffusion_steps
    if config.objective != "ddpm":
        euler = dataclasses.replace(config, sampler="euler", S_churn=0.0, timestep_respacing=str(COLUMNS))
        sigmas = [step.sigma for step in step_noises(euler)][::-1]
    else:
        sigmas = [train_unet.Diffusion(config).sigmas[t] for t in np.linspace(0, T - 1, COLUMNS).round().astype(int)]
    images, rows = two_images(file, config, options.data_file), {}
    for name, (x0, _) in images.items():
        rows[name] = [corrupt(x0, sigma, noise) for sigma in sigmas]
    told = config.objective if config.objective != "ddpm" else f"{config.noise_schedule} schedule, {T} steps"
    return labelled_grid(rows, [noise_name(config, sigma) for sigma in sigmas], f"the forward process ({told})")


def show_denoising(file: ModelFile, config: Config, options: Options) -> np.ndarray:
    """Both images, corrupted as at a quarter, half, three quarters and all of the sampler's steps before its end, and then denoised."""
    if config.sampler == "dpmpp_2m":
        raise UserError("--sampler dpmpp_2m: goes by the step before, so it can't start in the middle, as --show denoising does; the others can")
    model, rows, noise, steps = torch_model(file, config), {}, start_noise(config), step_noises(config)
    images, starts = two_images(file, config, options.data_file), [round(len(steps) * (1 - share)) for share in (0.25, 0.5, 0.75, 1)]
    starts = list(dict.fromkeys(min(first, len(steps) - 1) for first in starts))  # of one or two steps, some are the same
    with progress(model, len(images) * sum(network_calls(config, first) for first in starts)):
        for name, (x0, label) in images.items():
            for first in starts:
                x = scale_of(steps[first]) * corrupt(x0, steps[first].sigma, noise)
                path = denoise(model, config, x, label, first)
                kept = np.linspace(0, len(path) - 1, COLUMNS - 1).round().astype(int)
                rows[f"{name}, from {noise_name(config, steps[first].sigma)}"] = [x0, *(path[k] for k in kept)]
    columns = ["the image", "with noise", *[""] * (COLUMNS - 3), "denoised"]
    return labelled_grid(rows, columns, f"the reverse process ({config.sampler}, {len(steps)} steps in all)")


MOST_ROWS = 4  # of images that --show samplers and interpolation draw


def sampler_steps_shown(config: Config, options: Options) -> list[int]:
    """How many steps the columns of --show samplers take: up to --steps, where that is given."""
    usual = [n for n in (10, 25, 50, 250) if n <= config.diffusion_steps]
    if not options.asked & STEPS:
        return usual
    if not re.fullmatch(r"\d*", options.steps):
        raise UserError(f"--steps {options.steps}: with --show samplers it is the most steps that they take, one number")
    most = int(options.steps or config.diffusion_steps)
    return [n for n in usual if n < most] + [most]


def show_samplers(file: ModelFile, config: Config, options: Options) -> np.ndarray:
    """Every sampler from the same noise with few and with many steps; ddim, euler and heun as they are without noise."""
    counts, count, rows = sampler_steps_shown(config, options), min(options.num_samples, MOST_ROWS), {}
    tries = {
        sampler: [dataclasses.replace(config, sampler=sampler, timestep_respacing=str(n), eta=0.0, S_churn=0.0) for n in counts]
        for sampler in train_unet.SAMPLERS
    }
    model, batches = torch_model(file, config), math.ceil(count / config.batch_size)
    with progress(model, batches * sum(network_calls(each) for row in tries.values() for each in row)):
        for sampler, row in tries.items():
            rows[sampler] = [train_unet.draw(model, each, count) for each in row]
    return labelled_grid(rows, [f"{n} steps" for n in counts], "from the same noise")


def show_interpolation(file: ModelFile, config: Config, options: Options) -> np.ndarray:
    """Between the noises of neighbouring images, along the great circle (Song et al. 2021, appendix D.5), by ddim without noise."""
    config = dataclasses.replace(config, sampler="ddim", eta=0.0)
    model, count, rows = torch_model(file, config), min(options.num_samples, MOST_ROWS), {}
    classes = config.classes or range(max(config.num_classes, 1))
    shares = torch.linspace(0, 1, COLUMNS)[:, None, None, None]
    with progress(model, count * network_calls(config)):
        for i, (a, b) in enumerate(start_noise(config, 2 * count).split(2)):
            angle = torch.arccos((a * b).sum() / (a.norm() * b.norm()))
            x = (torch.sin((1 - shares) * angle) * a + torch.sin(shares * angle) * b) / torch.sin(angle)
            labels = torch.full((COLUMNS,), classes[i % len(classes)])
            rows[f"{2 * i} to {2 * i + 1}"] = list(denoise(model, config, x, labels)[-1])
    return labelled_grid(rows, [f"{s:.3g}" for s in shares.flatten().tolist()], "between two noises (ddim)")


def show_nearest(file: ModelFile, config: Config, options: Options) -> np.ndarray:
    """Samples, each above the picture of the data that is nearest to it pixel by pixel; says how near, and how many are copies."""
    data, rows = shown_data(file, config, options.data_file), {}
    model, batches = torch_model(file, config), math.ceil(options.num_samples / config.batch_size)
    with progress(model, batches * network_calls(config)):
        samples = train_unet.draw(model, config, options.num_samples)
    parts = np.split(np.arange(len(data.images)), range(4096, len(data.images), 4096))
    apart, number = nearest_images(samples, (torch.from_numpy(data.read_floats(part)) for part in parts))
    pictures = torch.from_numpy(data.read_floats(number.numpy()))
    for first in range(0, len(samples), COLUMNS):
        shown = slice(first, min(first + COLUMNS, len(samples)))
        rows[f"samples {shown.start} to {shown.stop - 1}"], rows[f"nearest to {shown.start} to {shown.stop - 1}"] = (
            list(samples[shown]),
            list(pictures[shown]),
        )
    for i, (distance, k) in enumerate(zip(apart.tolist(), number.tolist())):
        print(f"sample {i}: {distance:.0f} of 255 from picture {k}{' (a copy)' if distance < COPY else ''}")
    print(
        f"{(apart < COPY).sum()} of {len(samples)} samples are copies, closer than {COPY} of 255 to a picture; one that is mirrored or shifted is not found"
    )
    return labelled_grid(rows, [""] * COLUMNS, f"samples, and what is nearest to them in {Path(data.path).name}")


PICTURES = {
    "corruption": show_corruption,
    "denoising": show_denoising,
    "samplers": show_samplers,
    "interpolation": show_interpolation,
    "nearest": show_nearest,
}


STEPS = frozenset({"steps", "timestep_respacing"})  # names of one flag
SAMPLER = frozenset({"sampler", "use_ddim"})
# Flags that mean nothing for a picture, and why.
MEANINGLESS: dict[str, tuple[tuple[frozenset[str], str], ...]] = {
    "corruption": (
        (STEPS | SAMPLER, "draws how noise is added, which takes no sampler"),
        (frozenset({"num_samples"}), "draws two images, a smiley and the first of the data"),
    ),
    "denoising": ((frozenset({"num_samples"}), "draws two images, a smiley and the first of the data; --output F.gif draws so many"),),
    "samplers": ((SAMPLER, "draws all of them"),),
    "interpolation": ((SAMPLER, "goes by ddim without noise, for which alone what lies between two noises is between their images"),),
}


def check_picture(options: Options) -> None:
    """UserError if the command line names a flag that would change nothing."""
    moves = options.output.endswith(".gif")
    for names, why in () if moves else MEANINGLESS.get(options.show, ()):
        for name in sorted(names & options.asked):
            raise UserError(f"--{name}: means nothing here, because --show {options.show} {why}; leave it out")
    if options.show in ("samplers", "interpolation") and "num_samples" in options.asked and options.num_samples > MOST_ROWS:
        raise UserError(f"--num_samples {options.num_samples}: --show {options.show} draws up to {MOST_ROWS}")


def animate_denoising(file: ModelFile, config: Config, options: Options) -> bytes:
    """A GIF of num_samples images coming out of noise: on the left x_t, on the right the x_0 that the network sees in it."""
    device, frames = pick_device(config.device), []
    D = train_unet.Denoiser(torch_model(file, config), config, torch.arange(options.num_samples, device=device))
    shown = set(np.linspace(0, len(D.route) - 2, min(len(D.route) - 1, 20)).round().astype(int))

    def add_frame(left: Tensor, right: Tensor) -> None:
        halves = [grid_pixels(images.cpu(), enlarge=False) for images in (left, right)]
        both = Image.fromarray(np.concatenate([np.broadcast_to(half, (*half.shape[:2], 3)) for half in halves], axis=1))
        frames.append(both.quantize(32, dither=Image.Dither.NONE))  # noise takes space

    with progress(D.model, network_calls(config)):
        for step, x, x0, x_next in train_unet.sampler_steps(D, D.start()):
            if step in shown:
                add_frame(x / scale_of(D.route[step]), x0)
    add_frame(x_next, x_next)
    durations = [120] * (len(frames) - 1) + [3000]  # ms
    frames[0].save(buffer := io.BytesIO(), "GIF", save_all=True, append_images=frames[1:], duration=durations, loop=0, comment=files.SOFTWARE)
    return buffer.getvalue()


def take_pictures(options: Options, config: Config, folder: str) -> Config:
    """config with --image or --cond, and --mask, as data files in this folder. Of a picture to --cond the condition is made as in training."""
    if options.cond and not config.cond_channels:
        raise UserError(f"--cond {options.cond}: this model is not conditioned on pictures")
    taken: dict[str, Any] = {}
    if options.image:
        taken["inpaint" if options.mask else "start_from"] = picture_file("image", options.image, config.in_channels, config, folder)
        taken["S_churn"] = config.S_churn if "S_churn" in options.asked else 0.0  # a preset's is for images made of noise alone
    if options.cond:
        channels = config.in_channels if config.cond else config.cond_channels
        taken["cond_file"] = picture_file("cond", options.cond, channels, config, folder)
    if options.mask:
        taken["mask"] = picture_file("mask", options.mask, 1, config, folder)
    config = dataclasses.replace(config, sample=options.num_samples, **taken)
    validate(config)
    return config


def beside(shown: dict[str, Tensor], name: str, images: Tensor, title: str) -> np.ndarray:
    """A grid of images under this name, four in a row, each row beside what is shown, an image for each name."""
    parts = images.split(4)
    rows = {f"{4 * i} to {4 * i + len(part) - 1}" if len(images) > 1 else "0": [*shown.values(), *part] for i, part in enumerate(parts)}
    return labelled_grid(rows, [*shown, name, *[""] * (len(parts[0]) - 1)], title)


def beside_condition(config: Config, images: Tensor) -> np.ndarray:
    """What the images are conditioned on, the truth, if the condition was made of it, and the images."""
    shown = {"condition": visible(train_unet.sample_pictures(config, 1), config.in_channels)[0]}
    data = open_data(config.cond_file)
    if config.cond and data.images.shape[1:] == (config.in_channels, *config.image_size):
        shown["truth"] = torch.from_numpy(data.read_floats(np.array([0])))[0]
    return beside(shown, "result", images, f"{config.sampler}, {config.cond or 'a picture'}")


def before_and_after(config: Config, images: Tensor) -> np.ndarray:
    """The picture, its mask if there is one, and what was made of it."""
    shown = {"before": train_unet.read_images(config, "start_from" if config.start_from else "inpaint", 1)[0]}
    if config.mask:
        shown["mask"] = train_unet.read_images(config, "mask", 1)[0].expand(config.in_channels, -1, -1)
    return beside(shown, "after", images, f"{config.sampler}, {'painted where white' if config.mask else f'strength {config.strength:g}'}")


# ======================================================================================================================
# a run


def make_pictures(file: ModelFile, config: Config, options: Options) -> None:
    check_picture(options)
    if options.output.endswith(".gif"):
        if options.show != "denoising":
            raise UserError(f"--output {options.output}: only --show denoising moves; name a .png for --show {options.show}")
        files.atomic_write(options.output, [animate_denoising(file, config, options)])
    elif options.output.endswith(".png"):
        save_png(PICTURES[options.show](file, config, options), options.output)
    else:
        raise UserError(f"--output {options.output}: must end in .png, or in .gif for --show denoising")
    print(f"{options.output}: {options.show} with {options.model_filename}")


def read_latents(options: Options) -> Tensor:
    images = open_data(options.data_file).images[: options.num_samples]
    if images.dtype != np.float32:
        told = "holds pictures; latents are what prepare_data.py --encode and --sample N --output F.bin write"
        raise UserError(f"--data_file {options.data_file}: {told}")
    return torch.from_numpy(images.astype(np.float32))


def check_kind(options: Options, channels: int) -> None:
    """UserError if images of so many channels can't be written into a file of this name."""
    if not options.output.endswith((".png", ".npz", ".bin")):
        raise UserError(f"--output {options.output}: must end in .png (one grid), .npz (for evaluations) or .bin (float images)")
    if options.output.endswith(".npz") and channels not in (1, 3):
        raise UserError(f"--output {options.output}: pictures have 1 or 3 channels, and these images {channels}; --decode makes pictures of latents")


def separate_names(options: Options) -> list[str]:
    """Of the images one by one."""
    return [f"{Path(options.output).with_suffix('')}_{i:04d}.png" for i in range(options.num_samples)] if options.separate else []


def check_outputs(options: Options, cond_file: str = "") -> None:
    """Before work that may take long: UserError if what is to be written can't be, or would replace what somebody may miss."""
    read = [options.model_filename, options.data_file, options.image, options.mask, options.cond, cond_file]
    if options.export_coreml:
        model_files.check_folder("--export_coreml", options.export_coreml, options.model_filename)
        if Path(options.export_coreml).is_dir() and any(Path(options.export_coreml).iterdir()):
            raise UserError(f"--export_coreml {options.export_coreml}: is there; choose another name, or move it away")
    elif options.export_onnx:
        files.check_output("--export_onnx", options.export_onnx, read)
    elif not options.compare:
        there = [name for name in separate_names(options) if Path(name).exists()]
        for path in [options.output, *there]:
            replaces = None if path.endswith(".npz") else files.samples_like(path)  # an .npz does not say whose it is
            files.check_output("--output", path, read, replaces)


def save_npz(images: Tensor, labels: Tensor | None, path: str) -> None:
    """The file of guided-diffusion's image_sample.py, which its evaluator.py reads: arr_0 uint8 (N, H, W, C) and, with labels, arr_1 (N)."""
    check_finite(images, path)
    pixels = np.concatenate([to_pixels(part) for part in images.split(256)])  # all at once they would take several times their memory, as floats
    np.savez(buffer := io.BytesIO(), pixels, *([] if labels is None else [labels.numpy()]))
    files.atomic_write(path, [buffer.getbuffer()])


def write_images(images: Tensor, told: str, options: Options, captions: Sequence[str] = (), classes: Classes = Classes()) -> None:
    """The grid, with these captions, the data file or the .npz, with these classes, and the images one by one."""
    if options.output.endswith(".npz"):
        save_npz(images, classes.labels, options.output)
    else:
        save_samples(images, options.output, captions, classes)
    print(f"{options.output}: {len(images)} images {told}")
    write_separate(images, options)


def write_separate(images: Tensor, options: Options) -> None:
    """With --separate: the images one by one."""
    if not options.separate:
        return
    names = separate_names(options)[: len(images)]
    for name, image in zip(names, images):
        save_png(to_pixels(image), name)
    print(f"{names[0]} to {names[-1]}: one by one")


def run(argv: list[str]) -> None:
    logging.getLogger("torch").setLevel(logging.ERROR)  # exporters and compilers tell what they found missing
    words = parse_command_line(argv)
    flags = without_aliases(words)
    given = {name: flags.pop(name) for name in OWN if name in flags}
    options = Options(**given)
    options.asked = frozenset(words)
    vae = Autoencoder(options.decode) if options.decode else None  # before anything takes long
    if vae and options.data_file and not options.model_filename:
        check_outputs(options)
        check_kind(options, vae.config.out_channels)
        latents = read_latents(options)
        vae.check(*latents.shape[1:])
        return write_images(vae.decode(latents), f"decoded from {options.data_file}", options)
    if not options.model_filename:
        raise UserError("--model_filename: is missing; name a .bin, .pt or .safetensors file of weights")
    for name, ending in ("export_onnx", ".onnx"), ("export_coreml", ".mlpackage"):
        path = getattr(options, name)
        if path and not path.endswith(ending):
            raise UserError(f"--{name} {path}: must end in {ending}")
    asked = [f"--{name}" for name in ("compare", "export_onnx", "export_coreml", "show", "decode", "image", "cond") if getattr(options, name)]
    asked += ["--backend"] * ("backend" in given and bool(set(asked) - {"--decode", "--image", "--cond"}))
    if len(asked) > 1:
        raise UserError(f"{' and '.join(asked)}: one thing at a time")
    if options.data_file and not options.show:
        raise UserError(f"--data_file {options.data_file}: is for --show, or in place of --model_filename for --decode; leave it out")
    if options.mask and not (options.image or options.cond):
        raise UserError(f"--mask {options.mask}: says where --image (or --cond) is painted anew, and there is none")
    if "strength" in flags and not options.image:
        raise UserError(f"--strength {flags['strength']:g}: says how much of --image is changed, and there is none")
    if options.precision == "fp16" and not options.export_coreml and options.backend != "coreml":
        raise UserError("--precision fp16: is for --backend coreml and --export_coreml; fp32 and bf16 are for the others")
    if options.precision == "fp8" and (options.backend not in ("torch", "native") or options.export_onnx or options.export_coreml):
        raise UserError("--precision fp8: is for --backend torch and native; leave it out")
    check_outputs(options, flags.get("cond_file", ""))
    cond_file = flags.pop("cond_file", "")  # make_config checks flags as those of a training run, where models of --cond have no cond_file
    flags |= {"batch_size": options.batch_size} | ({"timestep_respacing": options.steps} if "steps" in given else {})
    flags = ({"clip_denoised": False} if options.decode else {}) | flags  # latents lie outside of [-1, 1], too
    device = flags.pop("device", "auto") if options.backend == "native" else ""  # which PyTorch may not have
    try:
        file = formats.read_model(options.model_filename, flags).choose_ema(flags.get("ema_rate"))
        if "timestep_respacing" not in flags and file.config.diffusion_steps >= int(Options.steps):
            flags["timestep_respacing"] = ect_defaults(vars(file.config), flags, file).get("timestep_respacing", options.steps)
        config = make_config(flags, None, file)
    except UserError as e:
        raise UserError(str(e) if "timestep_respacing" in given else str(e).replace("--timestep_respacing", "--steps")) from None
    config.precision, config.device = options.precision, device or config.device
    if cond_file:
        config = dataclasses.replace(config, cond_file=cond_file, sample=options.num_samples)
        validate(config)

    if not options.show:
        check_kind(options, vae.config.out_channels if vae else config.in_channels)
    if vae:
        vae.check(config.in_channels, *config.image_size)
    if options.compare:
        return print_table(compare(file, config, options.num_samples), options.num_samples)
    if options.export_onnx:
        files.atomic_write(options.export_onnx, [onnx_bytes(file, config)])
        return print(f"{options.export_onnx}: the network of {options.model_filename}")
    if options.export_coreml:
        model = coreml_model(file, config)
        files.write_folder(options.export_coreml, COREML_FILES, lambda folder: model.save(str(folder)))
        return print(f"{options.export_coreml}: the network of {options.model_filename}, for batches of {config.batch_size}")
    if options.show:
        return make_pictures(file, config, options)
    with tempfile.TemporaryDirectory() as folder:
        config = take_pictures(options, config, folder) if options.image or options.cond else config
        for told in train_unet.doubts(config):
            print(told)
        labels = train_unet.labels_of_images(config, torch.arange(options.num_samples))
        classes = Classes(labels, config.num_classes, file.class_names)
        images = BACKENDS[options.backend](file, config, options.num_samples)
        shows_beside = (options.image or options.cond) and options.output.endswith(".png")
        if shows_beside:
            check_finite(images, options.output)
            save_png(before_and_after(config, images) if options.image else beside_condition(config, images), options.output)
            told = f"{options.image} before and after" if options.image else f"{len(images)} images of {options.cond}"
            print(f"{options.output}: {told}, with {config.sampler} from {options.model_filename}")
            return write_separate(images, options)
    captions = value_captions(value_rows(config) if config.cond_dim else [], len(images))
    told = f"with {config.sampler} from {options.model_filename}"
    write_images(vae.decode(images) if vae else images, told, options, captions, classes)


if __name__ == "__main__":
    sys.exit(run_program("generate", run))
