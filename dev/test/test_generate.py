"""generate.py: every back end draws the same images, exported networks compute what the model does, pictures, errors; weights that move between
the programs, and guided-diffusion's published layout."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from conftest import ROOT, binary_path, data_bytes, flags, make_images, random_weights
from PIL import Image
from test_files import unet_cu_model

import generate
import prepare_data
import train_unet as twin
from common import model_files
from common.config import make_config
from common.data_files import open_data, write_data
from common.flags import FOREIGN_PRESET, SAMPLING_FLAGS
from common.model import UNetModel
from common.program import run_program
from common.samples import to_pixels

SMALL = dict(image_size=(8, 8), num_channels=32, channel_mult=(1, 2), attention_resolutions=(4,), preset="fashion32")
# every kind of layer, both orders of attention's rows, images that are not square
MODELS = {
    "everything": SMALL | dict(class_cond=True, num_classes=3, learn_sigma=True, use_scale_shift_norm=True, resblock_updown=True, in_channels=3),
    "old": SMALL | dict(image_size=(8, 12), use_new_attention_order=False, num_heads=4, num_head_channels=-1, conv_resample=False),
    "strided": SMALL | dict(num_res_blocks=2, attention_resolutions=(8, 4)),
    "edm": SMALL | dict(objective="edm", class_cond=True, num_classes=3, class_dropout=0.1, in_channels=3),
}
# The smallest one that has attention, classes and a learned variance, for what takes seconds for each layer
ONE_LEVEL = SMALL | dict(
    channel_mult=(1,),
    num_res_blocks=1,
    attention_resolutions=(8,),
    class_cond=True,
    num_classes=3,
    learn_sigma=True,
    use_scale_shift_norm=True,
    in_channels=3,
)


def make_model(path: Path, seed: int = 0, **settings: object) -> twin.ModelFile:
    """A file of random weights and other random averaged weights."""
    config = make_config({"timestep_respacing": ""} | settings)
    file = twin.ModelFile(config, random_weights(config, seed), random_weights(config, seed + 1), path=str(path))
    twin.write_model(str(path), file)
    return file


@pytest.fixture(autouse=True)
def programs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where generate.py finds the program: the build that the other tests use, too."""
    folder = tmp_path_factory.mktemp("programs")
    for name in ("train_unet", "train_unet_cpu"):
        (folder / name).symlink_to(binary_path("cpu"))
    monkeypatch.setattr(generate, "ROOT", folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_model(tmp_path / "model.bin", **MODELS["everything"])
    return tmp_path / "model.bin"


def exact_images(path: Path, *words: object) -> tuple[torch.Tensor, torch.Tensor]:
    """What sampling at t = 667, 333 and 0 (for edm: the sigmas there) gives in float64, with the noise of float32, and how far off PyTorch's float32
    is: the largest difference of a pixel."""
    given = flags("--preset fashion32 --num_samples 3 --timestep_respacing 1,1,1 --batch_size 2 --device cpu --precision fp32", list(words))
    given = twin.parse_flags(given, twin.FLAGS)
    count = given.pop("num_samples")
    file = twin.read_model(str(path), given)
    config = make_config(given, None, file)
    model = twin.build_model(config, file.weights_to_use(config.use_ema)).double()
    exact = twin.draw(generate.Network(lambda given: model(**{k: v if k == "y" else v.double() for k, v in given.items()})), config, count)
    return exact, (generate.BACKENDS["torch"](file, config, count) - exact).abs().max()


def check_close(found: np.ndarray, exact: tuple[torch.Tensor, torch.Tensor]) -> None:
    """As near to float64 as PyTorch in float32 is, up to the order of its sums. How much a difference grows from step to step depends on model
    and sampler (5e-7 to 2e-4 here), but it does so alike in both: the ratio of their largest errors was 0.5 to 3.5 in 32 cases. 8 is asked for."""
    images, error = exact
    assert found.shape == images.shape and images.std() > 0.1
    assert np.abs(found - images.numpy()).max() < 8 * error, (np.abs(found - images.numpy()).max(), error)


def images_of(path: Path, tmp_path: Path, *words: object) -> np.ndarray:
    """The images that generate.py writes."""
    words = flags("--preset fashion32 --num_samples 3 --steps 1,1,1 --batch_size 2 --device cpu", list(words))
    generate.run(["--model_filename", str(path), *words, "--output", f"{tmp_path}/x.bin"])
    return np.array(twin.open_data(f"{tmp_path}/x.bin").images)


def refused(words: list[object], *told: str) -> None:
    """The command must fail with one sentence that holds these words."""
    with pytest.raises(twin.UserError) as e:
        generate.run(list(map(str, words)))
    assert "\n" not in str(e.value)
    for word in told:
        assert word in str(e.value), str(e.value)


# ----------------------------------------------------------------------------------------------------------------------
# files for evaluations


def read_npz(path: Path, batch: int = 2) -> dict[str, np.ndarray]:
    """As guided-diffusion's evaluator.py does, which reads a member of the zip as a stream, in batches, behind the header of numpy's version 1."""
    arrays = {}
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            assert member.compress_type == zipfile.ZIP_STORED
            with archive.open(member) as file:
                assert np.lib.format.read_magic(file) == (1, 0)
                shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
                assert not fortran and not dtype.hasobject
                bytes_each = int(np.prod(shape[1:])) * dtype.itemsize
                parts = [np.frombuffer(file.read(min(batch, shape[0] - i) * bytes_each), dtype) for i in range(0, shape[0], batch)]
                assert not file.read()
            arrays[member.filename] = np.concatenate(parts).reshape(shape)
    return arrays


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("classes, labels", [("", [0, 1, 2, 0, 1]), ("2,0", [2, 0, 2, 0, 2])])
def test_npz(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, classes: str, labels: list[int]) -> None:
    """More images than a batch, those of the PNGs, and the classes in which they were drawn."""
    words = flags("--model_filename", model, "--num_samples 5 --batch_size 2 --steps 1,1,1 --device cpu --backend", backend)
    words += ["--classes", classes] if classes else []
    seen, forward = [], UNetModel.forward
    monkeypatch.setattr(UNetModel, "forward", lambda self, x, t, y: seen.extend([y.tolist()] * (float(t[0]) == 0)) or forward(self, x, t, y))
    generate.run([*words, "--output", f"{tmp_path}/x.npz"])
    assert sum(seen, []) == (labels if backend == "torch" else [])
    generate.run([*words, "--output", f"{tmp_path}/x.png", "--separate", "True"])
    found = read_npz(tmp_path / "x.npz")
    pngs = np.stack([np.asarray(Image.open(tmp_path / f"x_{i:04d}.png")) for i in range(5)])
    assert list(found) == ["arr_0.npy", "arr_1.npy"]
    assert found["arr_0.npy"].dtype == np.uint8 and found["arr_0.npy"].shape == (5, 8, 8, 3) and np.array_equal(found["arr_0.npy"], pngs)
    assert found["arr_1.npy"].dtype == np.int64 and found["arr_1.npy"].tolist() == labels


def test_the_same_classes_in_npz_one_by_one(model: Path, tmp_path: Path) -> None:
    """--classes with what stands in arr_1 draws the same images again, by the other back end, too."""
    words = flags("--model_filename", model, "--num_samples 4 --steps 1,1,1 --device cpu")
    generate.run([*words, "--output", f"{tmp_path}/x.npz", "--backend", "native"])
    found = read_npz(tmp_path / "x.npz")
    generate.run([*words, "--output", f"{tmp_path}/y.npz", "--classes", ",".join(map(str, found["arr_1.npy"]))])
    assert np.abs(found["arr_0.npy"].astype(int) - read_npz(tmp_path / "y.npz")["arr_0.npy"]).max() <= 1


@pytest.mark.parametrize("class_dropout, labels", [(0.0, [0, 1, 2, 0, 1]), (0.1, [3] * 5)])
def test_npz_of_a_changed_picture(tmp_path: Path, class_dropout: float, labels: list[int]) -> None:
    """A picture says nothing of its class: then images have none (3), if the model has learnt that."""
    make_model(tmp_path / "m.bin", **(MODELS["edm"] | dict(class_dropout=class_dropout)))
    Image.fromarray(make_images(1, 3)[0].transpose(1, 2, 0)).save(tmp_path / "p.png")
    seen, forward = [], UNetModel.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UNetModel, "forward", lambda self, x, t, y: seen.append(y.tolist()) or forward(self, x, t, y))
        words = flags("--model_filename", tmp_path / "m.bin", "--image", tmp_path / "p.png", "--num_samples 5 --steps 2 --device cpu")
        generate.run([*words, "--output", f"{tmp_path}/x.npz"])
    assert {tuple(y) for y in seen} == {tuple(labels)} == {tuple(read_npz(tmp_path / "x.npz")["arr_1.npy"])}


def test_npz_without_classes_in_grey(tmp_path: Path) -> None:
    make_model(tmp_path / "m.bin", **(MODELS["old"] | dict(in_channels=1)))
    generate.run(flags("--model_filename", tmp_path / "m.bin", "--num_samples 3 --steps 2 --device cpu --output", tmp_path / "x.npz"))
    found = read_npz(tmp_path / "x.npz")
    assert list(found) == ["arr_0.npy"] and found["arr_0.npy"].shape == (3, 8, 12, 1)


def test_what_is_no_npz(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images that are no pictures, a file that is there, a name of no kind: before anything is drawn. Numbers that are not finite."""
    words = ["--model_filename", model, "--steps", 2, "--device", "cpu", "--output", tmp_path / "x.npz"]
    file = make_model(tmp_path / "broken.bin", **MODELS["edm"])
    file.ema[-1] = np.nan
    twin.write_model(file.path, file)
    refused(flags(words, ["--model_filename", file.path]), "x.npz", "finite")
    monkeypatch.setattr(generate, "BACKENDS", {"torch": lambda *_: pytest.fail("drew what it can't write")})
    make_model(tmp_path / "latent.bin", **(MODELS["edm"] | dict(in_channels=4)))
    refused(flags(words, ["--model_filename", tmp_path / "latent.bin"]), "x.npz", "4", "--decode")
    refused(flags(words, ["--show", "samplers"]), "x.npz", ".png")
    refused(flags(words, ["--output", tmp_path / "x.jpg"]), "x.jpg", ".npz")
    np.savez(tmp_path / "mine.npz", np.arange(3))
    refused(flags(words, ["--output", tmp_path / "mine.npz"]), "mine.npz")
    assert not (tmp_path / "x.npz").exists()


# ----------------------------------------------------------------------------------------------------------------------
# back ends


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sampler", ["--sampler ddpm", "--sampler ddim --eta 0.5 --clip_denoised False"])
def test_native_draws_what_torch_draws(tmp_path: Path, name: str, sampler: str) -> None:
    path, words = tmp_path / "m.bin", sampler.split()
    make_model(path, **MODELS[name])
    check_close(images_of(path, tmp_path, *words, "--backend", "native"), exact_images(path, *words))


@pytest.mark.long  # what the exported network computes, test_onnx_file checks
def test_onnx_draws_what_native_draws(tmp_path: Path) -> None:
    """The exported network, computed by onnxruntime, in train_unet.py's sampler, against the C++ program. The batch (2, then 1) is not that of the export."""
    path = tmp_path / "m.bin"
    make_model(path, **MODELS["old"])
    a, b = (images_of(path, tmp_path, "--backend", kind) for kind in ("onnx", "native"))
    images, error = exact_images(path)
    check_close(a, (images, error))
    check_close(b, (images, error))
    assert np.abs(a - b).max() < 8 * error


@pytest.mark.parametrize("kind", ["torch", "native", pytest.param("onnx", marks=pytest.mark.long)])
def test_every_back_end_takes_numbers(tmp_path: Path, kind: str) -> None:
    """Of the images (--cond_dim), with guidance away from none; and without them a sentence."""
    path, told = tmp_path / "m.bin", ["--values", "0.5,-1", "--guidance_scale", "2"]
    make_model(path, **MODELS["strided"], cond_dim=2, class_dropout=0.1)
    check_close(images_of(path, tmp_path, *told, "--backend", kind), exact_images(path, *told))
    refused(["--model_filename", path, "--output", tmp_path / "x.png"], "--values")
    generate.run([*map(str, ["--model_filename", path, "--num_samples", 2, "--steps", 2, "--output", tmp_path / "x.png", *told])])
    assert generate.Image.open(tmp_path / "x.png").size == (2 * 66 + 2, 64 + 2 + 7 + 2)


def test_apples_gpu_is_given_no_float64(tmp_path: Path, model: Path) -> None:
    """PyTorch's MPS device has none. The same code with another device in its place: no tensor that gets to it is of float64, and the images
    are those of --backend torch."""
    file = twin.read_model(str(model))
    config = make_config({"timestep_respacing": "3", "batch_size": 2}, None, file)
    seen = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
            result = function(*args, **(kwargs or {}))
            seen.extend(t.dtype for t in (*args, result) if isinstance(t, torch.Tensor))
            return result

    network = generate.mps_network(file, config, "cpu")
    emb = network.compute.__closure__[1].cell_contents  # the model on the device
    assert isinstance(emb, UNetModel)
    x, t, y = torch.randn(2, 3, 8, 8), torch.tensor([3.0, 700.0]), torch.tensor([0, 2])
    embedding = emb.timestep_embedding(t)
    emb.timestep_embedding = lambda t: embedding
    with Watch(), torch.no_grad():
        network(x, t, y)
    assert seen and torch.float64 not in seen
    expected = twin.draw(generate.torch_model(file, config), config, 3)
    assert torch.equal(twin.draw(generate.mps_network(file, config, "cpu"), config, 3), expected)


def test_core_ml_batches_are_filled_up(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Mac, with the model itself in the place of the Core ML program: batches of 2, in what type it takes them."""
    file = twin.read_model(str(model))
    config = make_config({"preset": "fashion32", "timestep_respacing": "3", "batch_size": 2}, None, file)
    network = generate.torch_model(file, config)

    class Program:
        def predict(self, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            assert {name: (value.dtype, len(value)) for name, value in given.items()} == {"x": ("f4", 2), "timesteps": ("f4", 2), "y": ("i4", 2)}
            return {"output": network(*(torch.from_numpy(given[name]) for name in ("x", "timesteps", "y"))).numpy()}

    monkeypatch.setattr(generate.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(generate, "coreml_model", lambda file, config: Program())
    images = twin.draw(generate.coreml_network(file, config), config, 5)
    assert torch.allclose(images, twin.draw(network, config, 5), atol=1e-5)


def test_back_ends_that_are_not_here(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--model_filename", model, "--output", tmp_path / "x.png"]
    refused([*given, "--backend", "mps"], "--backend")
    refused([*given, "--backend", "coreml"], "--backend")
    refused([*given, "--backend", "tpu"], "--backend")
    refused([*given, "--device", "meta"], "--device")
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    refused([*given, "--backend", "native"], "train_unet")
    assert not (tmp_path / "x.png").exists()


def test_packages_that_are_not_here(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """As a user sees it: one sentence, exit code 1."""
    for name in "onnxruntime", "onnxscript", "coremltools":
        monkeypatch.setitem(sys.modules, name, None)
    for words, told in (
        (["--backend", "onnx"], "onnxruntime"),
        (["--export_onnx", "x.onnx"], "onnxscript"),
        (["--export_coreml", "x.mlpackage"], "coremltools"),
    ):
        monkeypatch.setattr(sys, "argv", ["generate.py", "--model_filename", str(model), *words])
        assert run_program("generate", generate.run) == 1
        sentence = capsys.readouterr().err
        assert sentence.startswith("generate: ") and sentence.count("\n") == 1 and told in sentence


@pytest.mark.parametrize("program", ["generate", "train_unet", "prepare_data", "quality", "speedrun"])
def test_help_works_without_packages(program: str) -> None:
    """-S: without site-packages. Anything but --help ends in a sentence with the command that installs what is missing."""
    path = ROOT / ("dev/benchmarks" if program in ("quality", "speedrun") else ".") / f"{program}.py"

    def run(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, *words[:1], str(path), *words[1:]], **captured)

    captured = dict(capture_output=True, text=True, env=os.environ | {"PYTHONWARNINGS": "ignore"})
    alone = run("-S", "--help")
    assert alone.returncode == 0 and alone.stderr == "" and alone.stdout == run("-B", "--help").stdout
    usual = {"prepare_data": ["--data_dir", "x", "--output_name", "y.bin"], "quality": ["--split", "x"], "speedrun": ["--seeds", "1"]}
    done = run("-S", *usual.get(program, ["--seed", "1"]))
    assert done.returncode == 1 and done.stderr.startswith(f"{program}: ") and "numpy" in done.stderr and done.stderr.count("\n") == 1, done.stderr
    wrong = run("-S", "--output_nam", "x", *usual.get(program, []))
    assert wrong.returncode == 1 and "--output_nam" in wrong.stderr and wrong.stderr.count("\n") == 1


def test_the_command_that_installs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a virtual environment pip takes packages; Debian's Python refuses them outside."""
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert "`python3 -m venv .venv && .venv/bin/pip install pillow`" in prepare_data.how_to_install("PIL")
    monkeypatch.setattr(sys, "prefix", "/venv")
    assert f"`{sys.executable} -m pip install numpy pillow`" in prepare_data.how_to_install("PIL", "numpy pillow")


def test_fewer_diffusion_steps_than_the_sampler_takes(tmp_path: Path) -> None:
    """Where nobody said how many, all of them are taken; who said so is told that there are fewer."""
    make_model(tmp_path / "m.bin", **SMALL, diffusion_steps=40)
    given = ["--preset", "fashion32", "--model_filename", tmp_path / "m.bin", "--num_samples", "2", "--backend", "native"]
    given += ["--output", tmp_path / "x.bin"]
    generate.run(list(map(str, given)))
    everything = np.array(twin.open_data(f"{tmp_path}/x.bin").images)
    generate.run([*map(str, given), "--steps", "40"])
    assert np.array_equal(everything, twin.open_data(f"{tmp_path}/x.bin").images)
    refused([*given, "--steps", "50"], "--steps")
    for preset, steps in ("fashion32", 30), ("unet64", 90):
        assert make_config({"preset": preset, "diffusion_steps": steps}).timestep_respacing == ""
    assert make_config({"preset": "fashion32", "diffusion_steps": 60}).timestep_respacing == "50"


def test_channel_mult_as_guided_diffusion_has_it(tmp_path: Path) -> None:
    """Its default, --channel_mult "", stands for what it takes at that size; with a bare state_dict, too."""
    model_flags = flags("--preset fashion32 --image_size 64 --num_channels 32 --attention_resolutions 8 --num_res_blocks 1")
    config = make_config(twin.parse_flags(model_flags, twin.FLAGS) | {"channel_mult": ()})
    assert config.channel_mult == (1, 2, 3, 4)
    torch.save(model_files.to_state_dict(config, random_weights(config)), tmp_path / "bare.pt")
    given = ["--model_filename", f"{tmp_path}/bare.pt", *model_flags, "--steps", "1", "--num_samples", "1", "--output", f"{tmp_path}/x.bin"]
    for words in (["--channel_mult", ""], ["--channel_mult", "1,2,3,4"]):
        generate.run([*given, *words])
        assert np.isfinite(twin.open_data(f"{tmp_path}/x.bin").images).all()
    refused([*given, "--channel_mult", "1,2,3,8"], "bare.pt")


def test_compare(model: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every back end of a machine without a GPU is in the table; the one that fails is named, and hides no other. (The compiler and the
    exporter, which take half a minute, are left out.)"""
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: None)
    monkeypatch.setattr(generate, "onnx_network", generate.torch_model)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = ["--model_filename", str(model), "--compare", "True", "--num_samples", "2", "--steps", "1,1,1"]
    generate.run(given)
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines[2:]] == ["| PyTorch, eager", "| train_unet", "| onnxruntime", "| PyTorch, compiled"]
    assert {len(line) for line in lines} == {7}
    for _, device, precision, seconds, rate, speed, difference in lines[2:]:
        assert (device, precision) == ("cpu", "fp32") and float(speed) > 0 and int(difference.strip(" |")) <= 1
        assert float(seconds.removesuffix(" s")) * float(rate) == pytest.approx(2, rel=0.1)
    assert lines[2][5:] == ["1.00", "0 |"]

    monkeypatch.setattr(generate, "onnx_network", lambda *_: 1 / 0)
    generate.run(given)
    seen = capsys.readouterr()
    assert "onnxruntime" in seen.err and seen.out.count("\n") == 5


def test_sampler_flags_go_through(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the native program, whichever train_unet.py has: each with the value that the configuration ends up with."""
    commands = []
    monkeypatch.setattr(
        generate.subprocess, "run", lambda command, **_: commands.append(command) or subprocess.CompletedProcess(command, 1, "", "stop")
    )
    refused(["--model_filename", model, "--backend", "native", "--sampler", "ddpm", "--eta", 0.25, "--seed", 9, "--device", "cuda:1"], "stop")
    given = dict(word.removeprefix("--").split("=") for word in commands[0][1:])
    assert {
        "sampler": "ddpm",
        "eta": "0.25",
        "seed": "9",
        "timestep_respacing": "50",
        "clip_denoised": "True",
        "device": "1",
    }.items() <= given.items()
    assert set(SAMPLING_FLAGS) < given.keys() and not set(SAMPLING_FLAGS) & set(model_files.SAVED_FLAGS)


def test_the_time_that_the_program_tells() -> None:
    """Of a GPU's milliseconds the rate has more digits, of a large model's minutes the time; the rate may even be 0.0."""
    line = "{} images with ddim, 50 steps, in {:.2f} s ({:.1f} images/s): x.bin"
    for count, seconds in (16, 0.0199), (16, 0.61), (1, 36.41), (3, 1234.5):
        assert generate.told_seconds(line.format(count, seconds, count / seconds), count) == pytest.approx(seconds, rel=0.003)


# ----------------------------------------------------------------------------------------------------------------------
# exported networks


def random_inputs(config: twin.Config, batch: int) -> list[torch.Tensor]:
    """Timesteps between whole numbers, too, as EDM's are."""
    torch.manual_seed(batch)
    inputs = [torch.randn(batch, config.in_channels, *config.image_size), torch.rand(batch) * 999]
    return inputs + [torch.arange(batch) % max(config.num_classes, 1)] * config.class_cond


@pytest.mark.parametrize("settings", [ONE_LEVEL, pytest.param(MODELS["everything"], marks=pytest.mark.long)], ids=["one level", "everything"])
def test_onnx_file(tmp_path: Path, settings: dict) -> None:
    """Names, shapes, any batch, here of the weights that are not averaged. The embedding's angles are float64 there as in PyTorch, the rest float32."""
    make_model(tmp_path / "m.bin", **settings)
    generate.run(["--model_filename", f"{tmp_path}/m.bin", "--export_onnx", f"{tmp_path}/m.onnx", "--use_ema", "False"])
    session = onnxruntime.InferenceSession(f"{tmp_path}/m.onnx", providers=["CPUExecutionProvider"])
    inputs = {i.name: (i.shape[1:], i.type) for i in session.get_inputs()}
    assert inputs == {"x": ([3, 8, 8], "tensor(float)"), "timesteps": ([], "tensor(float)"), "y": ([], "tensor(int64)")}
    assert [(o.name, o.shape[1:]) for o in session.get_outputs()] == [("output", [6, 8, 8])]  # learn_sigma: twice the channels
    file = twin.read_model(f"{tmp_path}/m.bin")
    network = twin.build_model(file.config, file.weights)
    for batch in (1, 2, 5):
        given = random_inputs(file.config, batch)
        with torch.no_grad():
            expected = network(*given).numpy()
        found = session.run(None, dict(zip(("x", "timesteps", "y"), (v.numpy() for v in given))))[0]
        assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_names_of_exported_files(model: Path, tmp_path: Path) -> None:
    given = ["--model_filename", model]
    refused([*given, "--export_onnx", tmp_path / "m.pt"], "--export_onnx")
    refused([*given, "--export_coreml", tmp_path / "m.onnx"], "--export_coreml")
    refused([*given, "--export_onnx", "a.onnx", "--export_coreml", "a.mlpackage"], "--export_onnx", "--export_coreml")
    refused([*given, "--show", "samplers", "--backend", "native"], "--show", "--backend")
    for words in ("--precision fp16", "--precision fp8 --export_onnx a.onnx", "--precision fp8 --backend onnx"):
        refused([*given, *words.split()], "--precision")
    (tmp_path / "mine.mlpackage/mine").mkdir(parents=True)
    with pytest.raises(twin.UserError, match="mine.mlpackage"):
        generate.files.write_folder(str(tmp_path / "mine.mlpackage"), generate.COREML_FILES, lambda _: None)


def run_mil(path: Path, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list]:
    """The output of a saved Core ML program, which only macOS can run: its operations (the MIL specification's), one by one in PyTorch, with the
    weights of the file. And the operations."""
    import coremltools
    from coremltools.converters.mil.frontend.milproto.load import load

    package = coremltools.models.MLModel(str(path), skip_model_load=True)
    spec = package.get_spec()
    function = load(spec, spec.specificationVersion, package.weights_dir).functions["main"]
    values = {id(function.inputs[name]): value for name, value in inputs.items()}

    def get(var: object) -> object:
        if isinstance(var, (list, tuple)):
            return [get(v) for v in var]
        if id(var) not in values:  # a constant
            value = var.val
            values[id(var)] = (
                torch.tensor(np.array(value)) if isinstance(value, (np.ndarray, np.floating)) and np.asarray(value).dtype.kind == "f" else value
            )
        return values[id(var)]

    def conv(
        x: torch.Tensor, weight: torch.Tensor, strides: np.ndarray, pad: np.ndarray, bias: torch.Tensor | None = None, **_: object
    ) -> torch.Tensor:
        sides = pad.tolist()[::-1]  # torch.nn.functional.pad begins with the last dimension, and has the end of it second
        sides = [v for pair in zip(sides[1::2], sides[::2]) for v in pair]
        padded = torch.nn.functional.pad(x, sides)
        return (torch.nn.functional.conv2d if x.ndim == 4 else torch.nn.functional.conv1d)(padded, weight, bias, strides.tolist())

    def squeeze(x: torch.Tensor, axes: np.ndarray) -> torch.Tensor:
        return x.squeeze(tuple(axes.tolist()))

    def expand_dims(x: torch.Tensor, axes: np.ndarray) -> torch.Tensor:
        for axis in sorted(axes.tolist()):
            x = x.unsqueeze(axis)
        return x

    def batch_norm(
        x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, epsilon: torch.Tensor
    ) -> torch.Tensor:
        return torch.nn.functional.batch_norm(x, mean, variance, gamma, beta, eps=float(epsilon))

    def matmul(x: torch.Tensor, y: torch.Tensor, transpose_x: bool, transpose_y: bool) -> torch.Tensor:
        return (x.mT if transpose_x else x) @ (y.mT if transpose_y else y)

    operations: dict[str, Callable] = {
        "add": lambda x, y: x + y,
        "sub": lambda x, y: x - y,
        "mul": lambda x, y: x * y,
        "real_div": lambda x, y: x / y,
        "square": lambda x: x * x,
        "sqrt": lambda x: x.sqrt(),
        "cos": lambda x: x.cos(),
        "sin": lambda x: x.sin(),
        "silu": lambda x: x * x.sigmoid(),
        "cast": lambda x, dtype: x.to({"fp16": torch.float16, "fp32": torch.float32, "int32": torch.int32}[dtype]),
        "linear": torch.nn.functional.linear,
        "gather": lambda x, indices, axis, **_: x[indices.long()] if axis == 0 else None,
        "reshape": lambda x, shape: x.reshape(shape.tolist()),
        "transpose": lambda x, perm: x.permute(perm.tolist()),
        "concat": lambda values, axis, **_: torch.cat(values, int(axis)),
        "reduce_mean": lambda x, axes, keep_dims: x.mean(axes.tolist(), keepdim=bool(keep_dims)),
        "softmax": lambda x, axis: x.softmax(int(axis)),
        "split": lambda x, split_sizes, axis: x.split(split_sizes.tolist(), int(axis)),
        "avg_pool": lambda x, kernel_sizes, strides, **_: torch.nn.functional.avg_pool2d(x, kernel_sizes.tolist(), strides.tolist()),
        "upsample_nearest_neighbor": lambda x, **scale: torch.nn.functional.interpolate(x, scale_factor=float(scale["scale_factor_height"])),
        "conv": conv,
        "squeeze": squeeze,
        "expand_dims": expand_dims,
        "batch_norm": batch_norm,
        "matmul": matmul,
    }
    used = [op for op in function.operations if op.op_type != "const"]
    for op in used:
        given = {name: get(var) for name, var in op.inputs.items() if var is not None}
        results = operations[op.op_type](**{"input" if op.op_type == "linear" and k == "x" else k: v for k, v in given.items()})
        values |= {id(var): r for var, r in zip(op.outputs, results if isinstance(results, tuple) else [results])}
    return values[id(function.outputs[0])], used


@pytest.mark.filterwarnings("ignore:Function _TORCH_OPS_REGISTRY:DeprecationWarning")  # coremltools' own functions, which it calls
@pytest.mark.parametrize(
    "name, precision", [("one level", "fp16"), *(pytest.param(*how, marks=pytest.mark.long) for how in (("old", "fp32"), ("everything", "fp16")))]
)
def test_core_ml_package(tmp_path: Path, name: str, precision: str) -> None:
    """Converted on any machine; what the saved program computes, operation by operation, is what the model does.

    fp32: the angle of an embedding is a product of float32 numbers up to 1000, so off by up to 6e-5, and the embedding with it: 1e-4 of the
    output. fp16 (11 bits): weights and activations are off by 2^-12 of their size, and a few hundred operations in a row that are not correlated
    by a few times sqrt(100) of that, 2^-12 * 10 * 3 = 1/136 of the output's size; angles must stay in fp32: in fp16 they would be off by 1/4."""
    file = make_model(tmp_path / "m.bin", **(ONE_LEVEL if name == "one level" else MODELS[name]))
    given = random_inputs(file.config, 3)
    generate.run(
        ["--model_filename", f"{tmp_path}/m.bin", "--export_coreml", f"{tmp_path}/m.mlpackage", "--batch_size", "3", "--precision", precision]
    )
    found, used = run_mil(tmp_path / "m.mlpackage", dict(zip(("x", "timesteps", "y"), given)))
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".mlpackage"] == ["m.mlpackage"]
    with torch.no_grad():
        expected = twin.build_model(file.config, file.ema)(*given)
    assert found.dtype == torch.float32 and (found - expected).abs().max() < (1e-4 if precision == "fp32" else 1 / 136) * expected.abs().max()
    angles = [op for op in used if op.op_type in ("sin", "cos")]
    assert len(angles) == 2 and {str(op.x.dtype) for op in angles} == {str(op.outputs[0].dtype) for op in angles} and "fp16" not in str(angles[0].x)
    assert any("fp16" in str(op.outputs[0]) for op in used) == (precision == "fp16")


def test_a_core_ml_that_fails(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of coremltools or PyTorch that does not know the other raises anything; nothing of the file appears."""
    pytest.importorskip("coremltools")

    def export(*_: object) -> None:
        raise TypeError("only 0-dimensional arrays can be converted\nand a page more")

    monkeypatch.setattr(torch.export, "export", export)
    refused(["--model_filename", model, "--export_coreml", tmp_path / "m.mlpackage"], "coremltools")
    assert not (tmp_path / "m.mlpackage").exists()


# ----------------------------------------------------------------------------------------------------------------------
# pictures


@pytest.fixture
def picture(tmp_path: Path) -> Callable[..., Image.Image]:
    """picture(*words): what --show draws with a model of random weights on 8x8 images of three classes; settings: other ones of the model."""
    (tmp_path / "data.bin").write_bytes(data_bytes(make_images(4, 3), np.array([2, 1, 0, 2]), 3))

    def picture(*words: object, output: str = "p.png", **settings: object) -> Image.Image:
        make_model(tmp_path / "m.bin", **(MODELS["everything"] if "objective" not in settings else {}) | settings)
        given = flags("--model_filename", tmp_path / "m.bin", "--data_file", tmp_path / "data.bin", "--device cpu", list(words))
        generate.run([*given, "--output", f"{tmp_path}/{output}"])
        return Image.open(tmp_path / output)

    return picture


def cells(image: Image.Image, rows: int, columns: int, width: int = 64) -> np.ndarray:
    """The cells (rows, columns, 64, width, 3) of a labelled grid, which lie at its right and lower edges, 4 pixels apart."""
    pixels = np.asarray(image)
    top, left = pixels.shape[0] - rows * 68, pixels.shape[1] - columns * (width + 4)
    grid = pixels[top:, left:].reshape(rows, 68, columns, width + 4, 3).transpose(0, 2, 1, 3, 4)
    return grid[:, :, :64, :width]


def test_corruption(picture: Callable) -> None:
    """From the image to noise: what is left of it correlates as sqrt(alpha_bar) says."""
    found = cells(picture("--show", "corruption"), 2, 9).astype(float)
    data = make_images(4, 3)[0].transpose(1, 2, 0)
    assert np.abs(found[1, 0, ::8, ::8] - data).max() <= 1 + 255 * 0.01 * 5  # at t = 0 there is noise of sigma 0.01
    for row in found:
        correlation = [np.corrcoef(row[0].ravel(), cell.ravel())[0, 1] for cell in row]
        assert correlation[1] > 0.8 and abs(correlation[-1]) < 0.3 and all(np.diff(correlation) < 0.05)
    assert np.abs(found[:, -1] - found[:1, -1]).max() <= 8  # at the end both are the same noise


def test_corruption_of_edm(picture: Callable) -> None:
    """From sigma 0.002 to 80."""
    found = cells(picture("--show", "corruption", **MODELS["edm"]), 2, 9).astype(float)
    assert np.abs(found[1, 0, ::8, ::8] - make_images(4, 3)[0].transpose(1, 2, 0)).max() <= 3
    assert np.abs(found[:, -1] - found[:1, -1]).max() <= 8


def test_smileys() -> None:
    """Grey on black, in colour on white; of any shape and number of channels."""
    for channels, shape in (1, (32, 32)), (3, (64, 64)), (2, (16, 24)):
        config = make_config(SMALL | dict(in_channels=channels, image_size=shape, channel_mult=(1, 1), attention_resolutions=()))
        image = generate.smiley(config)
        assert image.shape == (channels, *shape) and image.min() >= -1 and image.max() <= 1 and image.std() > 0.3
        assert image[0, 0, 0] == (1 if channels == 3 else -1)
        middle = image[:, shape[0] // 2, shape[1] // 2]
        assert middle[-1] == (-1 if channels == 3 else 1)  # yellow has no blue


@pytest.mark.parametrize("name, sampler", [("everything", "ddim"), ("edm", "heun")])
def test_denoising(picture: Callable, tmp_path: Path, name: str, sampler: str) -> None:
    """Eight rows: both images from four levels of noise. The last is from noise to what sampling from it gives, in the class of the image."""
    image = picture("--show", "denoising", "--steps", 6, "--sampler", sampler, "--eta", 0, **MODELS[name])
    found = cells(image, 8, 9)
    file = twin.read_model(str(tmp_path / "m.bin"))
    config = make_config({"timestep_respacing": "6", "eta": 0.0, "sampler": sampler}, None, file)
    model, sigma = generate.torch_model(file, config), 80.0 if name == "edm" else float(twin.Diffusion(config).sigmas[-1])
    x0 = torch.from_numpy(make_images(4, 3)[:1].astype(np.float32) / 127.5 - 1)
    x = (x0 + sigma * generate.start_noise(config)) / (1 if name == "edm" else (sigma**2 + 1) ** 0.5)
    end = to_pixels(generate.denoise(model, config, x, torch.tensor([2]))[-1])[0]
    assert np.abs(found[7, -1, ::8, ::8].astype(int) - end).max() <= 1
    begin = to_pixels((x0 + sigma * generate.start_noise(config)) / (sigma**2 + 1) ** 0.5)[0]
    assert np.abs(found[7, 1, ::8, ::8].astype(int) - begin).max() <= 1
    assert np.array_equal(found[4, 0], found[7, 0]) and not np.array_equal(found[4, 1], found[7, 1])


@pytest.mark.parametrize("steps", [1, 2])
def test_denoising_in_few_steps(picture: Callable, steps: int) -> None:
    """Fewer steps than rows: each step is there once."""
    picture("--show", "denoising", "--steps", steps, "--sampler", "euler", **MODELS["edm"])


def test_starting_in_the_middle_is_going_on(tmp_path: Path) -> None:
    """From the x of any step, with what is drawn there, the sampler ends in the same image."""
    file = make_model(tmp_path / "m.bin", **MODELS["strided"])
    for sampler in "ddim", "ddpm", "euler", "heun":
        config = make_config({"timestep_respacing": "7", "sampler": sampler, "eta": 1.0}, None, file)
        D = twin.Denoiser(generate.torch_model(file, config), config, torch.arange(2))
        seen = list(twin.sampler_steps(D, D.start()))
        assert [step for step, *_ in seen] == list(range(7)) and len(generate.step_noises(config)) == len(seen)
        assert torch.equal(twin.draw(D.model, config, 2), seen[-1][-1])
        for first in 0, 4, 6:
            assert torch.equal(list(twin.sampler_steps(D, seen[first][1], first))[-1][-1], seen[-1][-1])


def test_samplers(picture: Callable, tmp_path: Path) -> None:
    """A row for each sampler that there is, from the same noise; the cells hold num_samples images side by side. Of T = 40 steps they take 10 and 25."""
    names = list(twin.SAMPLERS)
    found = cells(picture("--show", "samplers", "--num_samples", 2, diffusion_steps=40), len(names), 2, width=128)
    file = twin.read_model(str(tmp_path / "m.bin"))
    config = make_config({"sampler": "ddpm", "timestep_respacing": "10"}, None, file)
    expected = to_pixels(twin.draw(generate.torch_model(file, config), config, 2))
    cell = found[names.index("ddpm"), 0, ::8, ::8]
    assert np.array_equal(cell, np.concatenate(list(expected), axis=1))


def test_samplers_without_noise_agree(picture: Callable) -> None:
    """What ends at the same images must begin at the same noise and add none. Errors of a first-order sampler fall as 1 / steps, those of others faster:
    in 25 steps to less than half of those in 10. Images of other noises differ by some 80 grey levels in either."""
    names = list(twin.SAMPLERS)
    found = cells(picture("--show", "samplers", "--steps", 25, "--num_samples", 2, **MODELS["edm"]), len(names), 2, width=128).astype(float)
    reference = found[names.index("dpmpp_2m"), 1]
    for name in "ddim", "euler", "heun":
        few, many = (np.abs(cell - reference).mean() for cell in found[names.index(name)])
        assert few < 20 and many < few / 2, (name, few, many)
    assert np.abs(found[names.index("ddpm"), 1] - reference).mean() > 40


def test_interpolation(picture: Callable, tmp_path: Path) -> None:
    """Its ends are the images of neighbouring noises, and what is between has the size of noise."""
    found = cells(picture("--show", "interpolation", "--steps", 6, "--num_samples", 2), 2, 9)
    file = twin.read_model(str(tmp_path / "m.bin"))
    config = make_config({"timestep_respacing": "6", "sampler": "ddim", "eta": 0.0, "classes": (0, 0, 1, 1)}, None, file)
    expected = to_pixels(twin.draw(generate.torch_model(file, config), config, 4))
    ends = found[:, [0, -1], ::8, ::8].reshape(4, 8, 8, 3).astype(int)
    assert np.abs(ends - expected).max() <= 1


def test_nearest(picture: Callable, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Each sample above the image of the data that is nearest, in several parts of the data, and a line for each. Samples that are in the data are copies."""
    words = ["--show", "nearest", "--steps", 3, "--num_samples", 11]
    picture(*words)
    told = capsys.readouterr().out.splitlines()
    file = twin.read_model(str(tmp_path / "m.bin"))
    config = make_config({"timestep_respacing": "3"}, None, file)
    samples = twin.draw(generate.torch_model(file, config), config, 11)
    data = open_data(str(tmp_path / "data.bin")).read_floats(np.arange(4))
    apart = ((samples[:, None].double() - torch.from_numpy(data).double()) ** 2).mean((2, 3, 4)).sqrt() * 127.5
    expected = [f"sample {i}: {row.min():.0f} of 255 from picture {row.argmin()}" for i, row in enumerate(apart)]
    assert told[:11] == expected and told[11].startswith("0 of 11 samples are copies")
    noisy = (samples + 0.1 * torch.randn(samples.shape, generator=torch.Generator().manual_seed(0))).clamp(-1, 1)  # 13 of 255 apart
    write_data(str(tmp_path / "more.bin"), np.concatenate([np.zeros((4200, 3, 8, 8), np.float32), noisy[::2].numpy()]))
    found = cells(picture(*words, "--data_file", tmp_path / "more.bin"), 4, 9)
    told = capsys.readouterr().out.splitlines()
    assert told[11].startswith("6 of 11 samples are copies") and told[4].endswith("from picture 4202 (a copy)") and not told[3].endswith("(a copy)")
    for i in range(0, 11, 2):
        above, below = found[i // 9 * 2, i % 9, ::8, ::8], found[i // 9 * 2 + 1, i % 9, ::8, ::8]
        assert np.abs(above.astype(int) - to_pixels(samples[i])).max() <= 1 and np.abs(below.astype(int) - to_pixels(noisy[i])).max() <= 1


@pytest.mark.parametrize("show", ["corruption", "denoising"])
def test_a_model_of_numbers_is_shown_with_data_that_have_none(picture: Callable, show: str) -> None:
    picture("--show", show, *(["--steps", 2, "--values", "1,2"] if show == "denoising" else []), **(MODELS["edm"] | dict(cond_dim=2)))


def test_a_gif_of_denoising(picture: Callable) -> None:
    """A frame for each of the six steps, and the images; x and x_0 side by side in grids of 2 x 2."""
    image = picture("--show", "denoising", "--steps", 6, "--num_samples", 4, output="p.gif")
    assert (image.format, image.n_frames, image.size) == ("GIF", 7, (2 * (2 * 10 + 2), 2 * 10 + 2))
    image.seek(6)
    pixels = np.asarray(image.convert("RGB"))
    assert np.array_equal(pixels[:, :22], pixels[:, 22:])
    image.seek(0)
    assert not np.array_equal(np.asarray(image.convert("RGB"))[:, :22], np.asarray(image.convert("RGB"))[:, 22:])


@pytest.mark.parametrize("steps, columns", [("6", [6]), ("12", [10, 12]), ("25", [10, 25]), ("", [10, 25, 40])])
def test_samplers_take_up_to_so_many_steps(tmp_path: Path, steps: str, columns: list[int]) -> None:
    make_model(tmp_path / "m.bin", **SMALL, diffusion_steps=40)
    taken = []

    def draw(model: torch.nn.Module, config: object, count: int) -> torch.Tensor:
        taken.append((config.sampler, config.timestep_respacing))
        return torch.zeros(count, 1, 8, 8)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twin, "draw", draw)
        generate.run([*map(str, ["--model_filename", tmp_path / "m.bin", "--show", "samplers", "--output", tmp_path / "p.png"]), "--steps", steps])
    assert taken == [(sampler, str(n)) for sampler in twin.SAMPLERS for n in columns]


def test_flags_that_mean_nothing_for_a_picture(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (
        *("corruption --steps 10", "corruption --timestep_respacing 10", "corruption --sampler ddpm", "corruption --num_samples 3"),
        *(
            "denoising --num_samples 3",
            "samplers --sampler ddpm",
            "samplers --steps ddim25",
            "samplers --num_samples 5",
            "interpolation --use_ddim False",
        ),
    ):
        refused(["--model_filename", model, "--output", "x.png", "--show", *words.split()], words.split()[1])
    assert not (tmp_path / "x.png").exists()


def test_pictures_that_can_not_be(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["--model_filename", model, "--show"]
    (tmp_path / "grey.bin").write_bytes(data_bytes(make_images(4)))
    refused([*given, "noise"], "--show")
    refused([*given, "samplers", "--output", "x.gif"], "x.gif")
    refused([*given, "denoising", "--output", "x.bin"], "x.bin")
    refused([*given, "corruption", "--data_file", "no.bin", "--output", "x.png"], "no.bin")
    refused([*given, "denoising", "--sampler", "dpmpp_2m", "--output", "x.png"], "--sampler")
    refused([*given, "corruption", "--data_file", "grey.bin", "--output", "x.png"], "grey.bin")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["grey.bin", "model.bin"]


# ----------------------------------------------------------------------------------------------------------------------
# weights that move


@pytest.mark.parametrize("kind", [".pt", ".safetensors", pytest.param(".bin", marks=pytest.mark.long)])
def test_weights_trained_in_pytorch_are_sampled_by_both(tmp_path: Path, data: Path, kind: str) -> None:
    """Averaged or not. Two steps are enough for the two to differ."""
    made = {"data_file": str(data), "batch_size": 4, "lr": 0.01, "class_cond": True, "ema_rate": 0.5, "warmup_steps": 0} | SMALL
    config = make_config(made, images := twin.open_data(str(data)))
    trainer = twin.Trainer(config)
    for step in range(2):
        trainer.train_step(*twin.training_batch(config, images, step))
    path = tmp_path / f"m{kind}"
    twin.write_model(str(path), trainer.checkpoint())
    found = {}
    for use_ema in True, False:
        exact = exact_images(path, "--use_ema", use_ema)
        found[use_ema] = images_of(path, tmp_path, "--use_ema", use_ema)
        check_close(found[use_ema], exact)
        check_close(images_of(path, tmp_path, "--use_ema", use_ema, "--backend", "native"), exact)
    assert np.abs(found[True] - found[False]).max() > 0.01


def test_weights_trained_natively_are_sampled_by_both(run: Callable, data: Path, tmp_path: Path) -> None:
    """The program's own samples, through --init, and PyTorch's from the same checkpoint in each format."""
    settings = (
        "--num_channels 32 --channel_mult 1,2 --attention_resolutions 4 --class_cond True --batch_size 4 --lr 0.01 --ema_rate 0.5 --warmup_steps 0"
    )
    run(flags("--preset fashion32", settings, "--max_steps 2 --sample_interval 0 --data_file", data))
    checkpoint = tmp_path / "out/model_0000002.bin"
    for use_ema in ("True", "False"):
        words = ["--sampler", "ddpm", "--use_ema", use_ema]
        exact = exact_images(checkpoint, *words)
        run(flags("--sample 3 --timestep_respacing 1,1,1 --batch_size 2 --output y.bin --init", checkpoint, words))
        check_close(np.array(twin.open_data(f"{tmp_path}/y.bin").images), exact)
        for kind in ("bin", "pt", "safetensors"):
            if kind != "bin":
                twin.run(["--convert", str(checkpoint), f"{tmp_path}/m.{kind}"])
            check_close(images_of(checkpoint if kind == "bin" else tmp_path / f"m.{kind}", tmp_path, *words), exact)


# ----------------------------------------------------------------------------------------------------------------------
# guided-diffusion's released 64x64 model: MODEL_FLAGS of its README, without --use_fp16

ADM64 = flags(
    "--attention_resolutions 32,16,8 --class_cond True --dropout 0.1 --image_size 64 --learn_sigma True --noise_schedule cosine --num_channels 192",
    "--num_head_channels 64 --num_res_blocks 3 --resblock_updown True --use_new_attention_order True --use_scale_shift_norm True",
)


def guided_diffusion_layout(width: int, mult: list[int], blocks: int, attention: list[int], classes: int) -> dict[str, tuple[int, ...]]:
    """Keys and shapes, in the order of the state_dict, of guided_diffusion.unet.UNetModel(64, 3, width, 6, blocks, attention, channel_mult=mult,
    num_classes=classes, use_scale_shift_norm=True, resblock_updown=True), by reading its constructor; attention: downsampling factors there."""
    keys: dict[str, tuple[int, ...]] = {}
    emb = 4 * width

    def layer(name: str, *shape: int) -> None:
        keys[f"{name}.weight"], keys[f"{name}.bias"] = shape, shape[:1]

    def res_block(name: str, channels: int, out: int) -> None:
        layer(f"{name}.in_layers.0", channels)
        layer(f"{name}.in_layers.2", out, channels, 3, 3)
        layer(f"{name}.emb_layers.1", 2 * out, emb)  # scale and shift
        layer(f"{name}.out_layers.0", out)
        layer(f"{name}.out_layers.3", out, out, 3, 3)
        if channels != out:
            layer(f"{name}.skip_connection", out, channels, 1, 1)

    def attention_block(name: str, channels: int) -> None:
        layer(f"{name}.norm", channels)
        layer(f"{name}.qkv", 3 * channels, channels, 1)
        layer(f"{name}.proj_out", channels, channels, 1)

    layer("time_embed.0", emb, width)
    layer("time_embed.2", emb, emb)
    keys["label_emb.weight"] = (classes, emb)
    layer("input_blocks.0.0", width, 3, 3, 3)
    ch, ds, index, skips = width, 1, 1, [width]
    for level, m in enumerate(mult):
        for _ in range(blocks):
            res_block(f"input_blocks.{index}.0", ch, m * width)
            ch = m * width
            if ds in attention:
                attention_block(f"input_blocks.{index}.1", ch)
            skips.append(ch)
            index += 1
        if level != len(mult) - 1:
            res_block(f"input_blocks.{index}.0", ch, ch)
            skips.append(ch)
            index, ds = index + 1, 2 * ds
    res_block("middle_block.0", ch, ch)
    attention_block("middle_block.1", ch)
    res_block("middle_block.2", ch, ch)
    index = 0
    for level, m in reversed(list(enumerate(mult))):
        for i in range(blocks + 1):
            res_block(f"output_blocks.{index}.0", ch + skips.pop(), m * width)
            ch, place = m * width, 1
            if ds in attention:
                attention_block(f"output_blocks.{index}.1", ch)
                place = 2
            if level and i == blocks:
                res_block(f"output_blocks.{index}.{place}", ch, ch)
                ds //= 2
            index += 1
    layer("out.0", ch)
    layer("out.2", 6, width, 3, 3)
    return keys


def test_the_released_layout() -> None:
    """Every key and shape of 64x64_diffusion.pt, 296 M parameters, from --preset adm64 as from guided-diffusion's own flags."""
    expected = guided_diffusion_layout(192, [1, 2, 3, 4], 3, [2, 4, 8], 1000)
    assert sum(int(np.prod(shape)) for shape in expected.values()) == 295_904_454
    given = twin.parse_flags(ADM64, twin.FLAGS)
    for config in make_config({"preset": "adm64"}), make_config(given | {"preset": "adm64", "channel_mult": (), "num_classes": 1000}):
        assert {name: tuple(shape) for name, shape in model_files.parameter_shapes(config).items()} == expected
        assert list(model_files.parameter_shapes(config)) == list(expected)
        assert (config.noise_schedule, config.diffusion_steps, config.num_head_channels, config.use_new_attention_order) == ("cosine", 1000, 64, True)


@pytest.mark.long  # of smaller models test_published_commands_sample draws
@pytest.mark.parametrize("new_order, half", [(True, True), (False, False)])
def test_a_released_state_dict_is_sampled_by_both(tmp_path: Path, new_order: bool, half: bool) -> None:
    """The released layout a third as wide (33 M parameters; with all 296 M it takes a minute and 3.5 GB a program), as published: a bare state_dict of
    fp32, or fp16, in a .pt; with the attention order of the 64x64 model, and of the others."""
    layout = guided_diffusion_layout(64, [1, 2, 3, 4], 3, [2, 4, 8], 1000)
    torch.manual_seed(0)
    tensors = {}
    for name, shape in layout.items():
        w = torch.randn(shape)
        tensors[name] = w / w[0].numel() ** 0.5 if w.ndim > 1 else 0.2 * w + name.endswith("weight")
    torch.save({name: w.half() for name, w in tensors.items()} if half else tensors, tmp_path / "64x64_diffusion.pt")
    words = ["--preset", "adm64", "--num_channels", 64, "--use_new_attention_order", new_order, "--num_samples", 1, "--sampler", "ddpm"]
    path = tmp_path / "64x64_diffusion.pt"
    exact = exact_images(path, *words, "--timestep_respacing", "1,1")  # t = 500 and 0; PyTorch's own part of this is in float32
    check_close(images_of(path, tmp_path, *words, "--steps", "1,1", "--backend", "native"), exact)
    if half:  # wrong flags: which key says so
        refused(["--model_filename", path, "--preset", "adm64"], "64x64_diffusion.pt")


# guided-diffusion's other models, as its README publishes them, and what is then true of them: image_size, channel_mult, heads, channels of a head, classes
SAMPLE_FLAGS = "--batch_size 4 --num_samples 100 --timestep_respacing 250"
COMMON = "--attention_resolutions 32,16,8 --class_cond {} --diffusion_steps 1000 {} --learn_sigma True --noise_schedule linear --num_channels 256 {}"
COMMON += " --num_res_blocks 2 --resblock_updown True --use_fp16 {} --use_scale_shift_norm True"
PUBLISHED = {
    "128x128_diffusion": (COMMON.format(True, "--image_size 128", "--num_heads 4", True), 421_529_606, (1, 1, 2, 3, 4), -1),
    "256x256_diffusion": (COMMON.format(True, "--image_size 256", "--num_head_channels 64", True), 553_838_086, (1, 1, 2, 2, 4, 4), 64),
    "256x256_diffusion_uncond": (COMMON.format(False, "--image_size 256", "--num_head_channels 64", True), 552_814_086, (1, 1, 2, 2, 4, 4), 64),
    "512x512_diffusion": (COMMON.format(True, "--image_size 512", "--num_head_channels 64", False), 558_997_638, (0.5, 1, 1, 2, 2, 4, 4), 64),
    "lsun_bedroom": (COMMON.format(False, "--dropout 0.1 --image_size 256", "--num_head_channels 64", True), 552_814_086, (1, 1, 2, 2, 4, 4), 64),
    "64_256_upsampler": (
        "--attention_resolutions 32,16,8 --class_cond True --diffusion_steps 1000 --large_size 256 --small_size 64 --learn_sigma True --noise_schedule"
        " linear --num_channels 192 --num_heads 4 --num_res_blocks 2 --resblock_updown True --use_fp16 True --use_scale_shift_norm True",
        311_795_910, (1, 1, 2, 2, 4, 4), -1,
    ),
    "128_512_upsampler": (
        "--attention_resolutions 32,16 --class_cond True --diffusion_steps 1000 --large_size 512 --small_size 128 --learn_sigma True --noise_schedule"
        " linear --num_channels 192 --num_head_channels 64 --num_res_blocks 2 --resblock_updown True --use_fp16 True --use_scale_shift_norm True",
        308_835_270, (1, 1, 2, 2, 4, 4), 64,
    ),
}  # fmt: skip
OF_PRESETS = {"128x128_diffusion": "adm128", "256x256_diffusion": "adm256", "lsun_bedroom": "lsun256"}
OF_PRESETS |= {"64_256_upsampler": "adm64_256", "128_512_upsampler": "adm128_512"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_flags_are_the_published_models(name: str) -> None:
    """Beside a bare state_dict what they leave open is as guided-diffusion has it; the presets say the same."""
    words, count, mult, head_channels = PUBLISHED[name]
    config = make_config({"preset": FOREIGN_PRESET} | twin.parse_flags(flags(words), twin.FLAGS))
    assert twin.parameter_count(config) == count
    assert (config.channel_mult, config.num_head_channels, config.num_heads, config.dropout > 0) == (mult, head_channels, 4, name == "lsun_bedroom")
    assert (config.noise_schedule, config.use_new_attention_order, config.num_classes) == ("linear", False, 1000 * config.class_cond)
    assert (config.cond, config.cond_channels) == (("lowres:4", 3) if "upsampler" in name else ("", 0))
    if name in OF_PRESETS:
        preset = make_config({"preset": OF_PRESETS[name]})
        assert {n for n in model_files.SAVED_FLAGS if getattr(preset, n) != getattr(config, n)} == set()


@pytest.mark.parametrize("name", ["128x128_diffusion", "lsun_bedroom"])
def test_published_commands_sample(tmp_path: Path, name: str) -> None:
    """The commands as they stand, but for a smaller model and fewer images, draw what the right model draws: ddpm with the learned variance."""
    words, _, _, head_channels = PUBLISHED[name]
    smaller = (
        "--image_size 16 --num_channels 64 --channel_mult 1,2 --attention_resolutions 8 --num_res_blocks 1 --num_samples 2 --timestep_respacing 3,0,1"
    )
    settings = dict(
        image_size=(16, 16), num_channels=64, channel_mult=(1, 2), attention_resolutions=(8,), num_res_blocks=1, in_channels=3, learn_sigma=True,
        num_heads=4, num_head_channels=head_channels, use_new_attention_order=False, use_scale_shift_norm=True, resblock_updown=True,
        noise_schedule="linear", class_cond=name != "lsun_bedroom", num_classes=1000 * (name != "lsun_bedroom"), preset="fashion32",
    )  # fmt: skip
    file = make_model(tmp_path / "right.bin", **settings)
    torch.save(model_files.to_state_dict(file.config, file.weights), tmp_path / f"{name}.pt")
    command = flags("--model_path", tmp_path / f"{name}.pt", words, SAMPLE_FLAGS, smaller, "--use_fp16 False --output", tmp_path / "x.bin")
    generate.run(command)
    found = np.array(twin.open_data(f"{tmp_path}/x.bin").images)
    right = make_config(settings | {"sampler": "ddpm", "timestep_respacing": "3,0,1", "batch_size": 4}, None, file)
    model = twin.build_model(right, file.weights)
    assert np.array_equal(found, twin.draw(model, right, 2).numpy())

    generate.run([*flags(command, "--timestep_respacing ddim4 --use_ddim True")])
    other = dataclasses.replace(right, sampler="ddim", timestep_respacing="ddim4", eta=0.0)
    assert np.array_equal(np.array(twin.open_data(f"{tmp_path}/x.bin").images), twin.draw(model, other, 2).numpy())

    guided = "--classifier_scale 0.5 --classifier_path models/128x128_classifier.pt --classifier_depth 4".split()
    refused([*command, *guided], "--classifier_scale")
    generate.run([*command, *flags(guided, "--classifier_scale 0.0")])
    assert np.array_equal(np.array(twin.open_data(f"{tmp_path}/x.bin").images), found)
    refused(["--model_path", "64_256_upsampler.pt", "--base_samples", "64.npz"], "--base_samples")
    refused([*command, "--sampler", "heun", "--use_ddim", True], "--use_ddim")


@pytest.mark.parametrize("schedule", ["linear", pytest.param("cosine", marks=pytest.mark.long)])
def test_unet_cu_models_are_sampled_by_both(tmp_path: Path, schedule: str) -> None:
    """With unet.cu's own schedule, or with the one that the flag names."""
    (tmp_path / "unet_init.bin").write_bytes(unet_cu_model()[0])
    words = ["--sampler", "ddpm"] + ["--noise_schedule", "cosine"] * (schedule == "cosine")
    exact = exact_images(tmp_path / "unet_init.bin", *words)
    for backend in "torch", "native":
        check_close(images_of(tmp_path / "unet_init.bin", tmp_path, *words, "--backend", backend), exact)
    if schedule == "cosine":
        assert (exact[0] - exact_images(tmp_path / "unet_init.bin", "--sampler", "ddpm")[0]).abs().max() > 0.1


def test_averages_are_chosen_by_every_back_end(run: Callable, data: Path, tmp_path: Path) -> None:
    run(flags("--preset fashion32 --num_channels 32 --channel_mult 1,2 --attention_resolutions 4 --batch_size 4 --lr 0.01 --ema_rate 0.9,0.5",
              "--warmup_steps 0 --max_steps 2 --sample_interval 0 --data_file", data))  # fmt: skip
    checkpoint, found = tmp_path / "out/model_0000002.bin", {}
    twin.run(["--convert", str(checkpoint), f"{tmp_path}/m.pt"])
    for rate in "0.9", "0.5":
        found[rate] = images_of(checkpoint, tmp_path, "--ema_rate", rate)
        for path, backend in (checkpoint, "native"), (tmp_path / "m.pt", "native"), (tmp_path / "m.pt", "torch"):
            assert images_of(path, tmp_path, "--ema_rate", rate, "--backend", backend) == pytest.approx(found[rate], abs=1e-3)
    assert np.abs(found["0.9"] - found["0.5"]).max() > 0.01
    refused(["--model_filename", checkpoint, "--ema_rate", 0.7], "--ema_rate")
