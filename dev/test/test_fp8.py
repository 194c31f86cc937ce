"""--precision fp8: how numbers are rounded, what the twin's convolutions make of them, and both programs side by side, sampling and training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import BUILD, TINY, column, flags, model_name, random_weights, read_checkpoint, read_log, read_samples
from test_training import QUIET, command_line, write_parity_files
from torch.utils.checkpoint import checkpoint

import train_unet as twin
from common import model as common_model
from common.config import make_config
from common.model import (
    FP8_MAX,
    Fp8TrainedConv,
    ResBlock,
    UNetModel,
    fp8_gradient_factor,
    fp8_gradient_layers,
    fp8_layers,
    to_fp8,
    to_state_dict,
)

torch.set_num_threads(1)

programs = pytest.mark.skipif(BUILD != "cpu", reason="the other build's exact mode is fp32")

# The smallest network that has convolutions in FP8, of images of few numbers.
SMALLEST = dict(channel_mult=(1,), attention_resolutions=())
CLASSES = dict(class_cond=True, num_classes=3, class_dropout=0.3)

# ----------------------------------------------------------------------------------------------------------------------
# the formats

FORMATS = {  # function, PyTorch's type, bits of the mantissa, smallest number, largest number
    "e4m3": (to_fp8, torch.float8_e4m3fn, 3, 2.0**-9, FP8_MAX),
    "e5m2": (partial(to_fp8, dtype=torch.float8_e5m2), torch.float8_e5m2, 2, 2.0**-16, 57344.0),
}


def rounded(format: str, x: torch.Tensor) -> torch.Tensor:
    """In float64, from the format's description: the nearest multiple of the last place, ties to even; too large a number becomes the largest one."""
    _, _, bits, smallest, largest = FORMATS[format]
    v = x.detach().double().numpy()
    exponent = np.frexp(v)[1] - 1  # 2^exponent <= |v| < 2^(exponent + 1)
    place = np.maximum(2.0 ** (exponent - bits), smallest)
    return torch.from_numpy(np.clip(np.round(v / place) * place, -largest, largest))  # numpy rounds ties to even


@pytest.mark.parametrize("format", FORMATS)
def test_rounding(format: str) -> None:
    """The format's numbers stay what they are. Between two of them the nearer one is taken, in the middle the even one. Too large a number becomes
    the largest one."""
    function, stored, bits, smallest, largest = FORMATS[format]
    every = torch.arange(256, dtype=torch.uint8).view(stored).float()
    numbers = every[every.isfinite()].unique()  # in order; of the two zeros one
    assert numbers.max() == largest and numbers[numbers > 0].min() == smallest and function(numbers).equal(numbers)
    low, high = numbers[:-1].double(), numbers[1:].double()
    for part, wanted in ((0.499, low), (0.501, high)):
        assert function((low + part * (high - low)).float()).double().equal(wanted)
    index = torch.arange(len(low)) - len(numbers) // 2  # of a number from 0, whose neighbours are even and odd in turns
    assert function(((low + high) / 2).float()).double().equal(torch.where(index % 2 == 0, low, high))
    beyond = torch.tensor([1.01 * largest, 1e30, torch.inf])
    assert function(beyond).tolist() == [largest] * 3 and function(-beyond).tolist() == [-largest] * 3
    assert function(torch.tensor([torch.nan])).isnan().all()


@pytest.mark.parametrize("format", FORMATS)
def test_rounding_of_bf16_and_of_floats(format: str) -> None:
    """Of all numbers that bf16 has, and of floats of every size."""
    function, *_ = FORMATS[format]
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    finite = every[every.isfinite()]
    assert function(finite).dtype == torch.bfloat16 and function(finite).double().equal(rounded(format, finite))
    random = np.random.default_rng(0)
    floats = torch.from_numpy((random.standard_normal(100000) * 2.0 ** random.uniform(-30, 20, 100000)).astype(np.float32))
    assert function(floats).double().equal(rounded(format, floats))


# ----------------------------------------------------------------------------------------------------------------------
# the twin's convolution


@pytest.mark.parametrize("rounds_forward", [True, False])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_a_convolution_in_training(kind: torch.dtype, rounds_forward: bool) -> None:
    """Its output and its three gradients against float64, of operands that the formats' description rounds. Some of them are too large and too small
    for FP8. In bf16 the weights are bf16's first, as autocast makes them, and results are rounded once. Without rounds_forward the output and the
    gradients of weight and bias are as usual, and only the gradient of x has rounded operands."""
    random = np.random.default_rng(0)

    def draw(*shape: int, low: float, high: float) -> torch.Tensor:
        return torch.from_numpy((random.standard_normal(shape) * 2.0 ** random.uniform(low, high, shape)).astype(np.float32))

    conv, factor = torch.nn.Conv2d(24, 16, 3, padding=1), 2.0**20
    conv.weight.data = draw(16, 24, 3, 3, low=-18, high=2)
    trained = Fp8TrainedConv(conv, factor, rounds_forward)
    x, dout = draw(2, 24, 7, 5, low=-16, high=5).to(kind), (draw(2, 16, 7, 5, low=-18, high=16) / factor).to(kind)
    x.requires_grad_()
    trained(x).backward(dout)

    weight = conv.weight.detach().to(kind).double()
    x_fp8, weight_fp8, dout_fp8 = rounded("e4m3", 16 * x) / 16, rounded("e4m3", 128 * weight) / 128, rounded("e5m2", factor * dout) / factor
    for own, kept, large in ((x_fp8, x, 28), (weight_fp8, weight, 3.5), (dout_fp8, dout, 57344 / factor)):
        assert own.abs().max() == large < kept.abs().max() and ((own == 0) & (kept != 0)).any()
    bias, usual_x, usual_dout = conv.bias.detach().to(kind).double(), x.detach().double(), dout.double()
    in_fp8, usual = ([a.clone().requires_grad_() for a in (left, right, bias)] for left, right in ((x_fp8, weight_fp8), (usual_x, weight)))
    out, usual_out = (F.conv2d(*operands, padding=1) for operands in (in_fp8, usual))
    dx, dweight, dbias = torch.autograd.grad(out, in_fp8, dout_fp8)
    usual_dweight, usual_dbias = torch.autograd.grad(usual_out, usual[1:], usual_dout)
    for own, kept in ((dweight, usual_dweight), (dbias, usual_dbias)):
        assert (own - kept).norm() > 0.01 * kept.norm()
    if not rounds_forward:
        out, dweight, dbias = usual_out, usual_dweight, usual_dbias

    rounding = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-8}[kind]  # of sums of some hundred products; FP8's is 2^-5 or more
    for ours, exact in ((trained(x), out), (x.grad, dx), (conv.weight.grad, dweight), (conv.bias.grad, dbias)):
        assert (ours - exact).norm() < rounding * exact.norm()
        assert ours.dtype == (torch.float32 if ours is conv.weight.grad or ours is conv.bias.grad else kind)


def tiny_trainer(precision: str, **settings: object) -> twin.Trainer:
    config = make_config(
        dict(preset="fashion32", num_channels=32, num_res_blocks=1, image_size=(8, 8), batch_size=4, precision=precision, device="cpu") | settings
    )
    return twin.Trainer(config, start=twin.ModelFile(config, random_weights(config, 4)))


def test_the_gradients_factor() -> None:
    for batch_size, shape, exponent in ((4, (8, 8), 8 + 9), (5, (8, 8), 8 + 9), (32, (64, 64), 8 + 18), (128, (64, 64), 8 + 20)):
        config = make_config(dict(preset="fashion32", in_channels=3, image_size=shape, batch_size=batch_size, attention_resolutions=(), microbatch=1))
        assert fp8_gradient_factor(config) == 2.0**exponent
        assert 2.0**exponent <= 2.0**8 * batch_size * 3 * shape[0] * shape[1] < 2.0 ** (exponent + 1)


@pytest.mark.parametrize(
    "settings",
    [
        dict(objective="edm"),
        dict(objective="ect"),
        dict(objective="ect", ect_frame="flow"),
        dict(objective="ect", ect_weight="snr"),
        dict(use_kl=True),
    ],
    ids=str,
)
def test_gradients_of_every_loss_fit(settings: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first and the last step of a run, no gradient comes near to e5m2's largest number, 57344, and rounding changes them all by as much as its
    mantissa of two bits says: by at most 2^-3, at the mean by 2^-5 to 2^-4. With one factor for all losses, the largest gradient of ect and of the bound
    was above it in the last step, up to 20 times."""
    settings = (
        dict(preset="fashion32", num_channels=32, num_res_blocks=1, image_size=(32, 32), attention_resolutions=(), batch_size=16, device="cpu")
        | settings
    )
    config = make_config(settings | dict(precision="fp8", max_steps=16))
    data = twin.Data("", np.random.default_rng(5).integers(0, 256, (16, 1, 32, 32), dtype=np.uint8))
    seen = []

    def round_gradient(dout: torch.Tensor, factor: float) -> torch.Tensor:
        rounded = unchanged(dout, factor)
        seen.append((dout.double() * factor, rounded.double() * factor))
        return rounded

    unchanged = common_model.round_gradient
    monkeypatch.setattr(common_model, "round_gradient", round_gradient)
    for step in 0, config.max_steps - 1:
        trainer = twin.Trainer(config, start=twin.ModelFile(config, random_weights(config, 4)))
        trainer.state.step = step
        trainer.train_step(*twin.training_batch(config, data, step))
        exact, rounded = (torch.cat([pair[k].flatten() for pair in seen]) for k in range(2))
        assert exact.abs().max() < 57344 / 2 and (rounded - exact).norm() < 2.0**-4 * exact.norm()
        seen.clear()


def test_which_modules_change() -> None:
    """Those in the middle, in the model that is trained, and only while it is trained. Names and order of the parameters stay, and so do the
    parameters themselves: a step moves what the convolutions read."""
    settings = dict(channel_mult=(1, 2), attention_resolutions=(4,), resblock_updown=True)
    usual, trainer = tiny_trainer("fp32", **settings), tiny_trainer("fp8", **settings)
    changed = [name for name, module in trainer.model.named_modules() if isinstance(module, Fp8TrainedConv)]
    rounds = [name for name, module in trainer.model.named_modules() if isinstance(module, Fp8TrainedConv) and module.rounds_forward]

    def last_of(chosen: list[torch.nn.Sequential]) -> list[str]:
        ids = {id(layers) for layers in chosen}
        return [f"{name}.{len(module) - 1}" for name, module in usual.model.named_modules() if id(module) in ids]

    assert changed == last_of(fp8_gradient_layers(usual.model)) and rounds == last_of(fp8_layers(usual.model))
    # of 22 3x3 convolutions the outermost four at each end are left out, and the first of a block that changes the resolution
    assert len(rounds) == 22 - 8 - 1, rounds
    # input gradients: all but those of the outermost one at each end, and of the first in the block that doubles the resolution
    assert len(changed) == 22 - 2 - 1 and set(rounds) < set(changed), changed
    assert list(trainer.model.state_dict()) == list(usual.model.state_dict())
    assert not any(isinstance(module, Fp8TrainedConv) for module in trainer.averaged.modules())
    x, t = torch.randn(2, 1, 8, 8), torch.tensor([3.0, 700.0])

    def answers(training: bool) -> list[torch.Tensor]:
        with torch.no_grad():
            return [trainer.model.train(training)(x, t), usual.model.train(training)(x, t), trainer.averaged(x, t)]

    ours, theirs, averaged = answers(training=False)
    assert ours.equal(theirs) and ours.equal(averaged)
    in_fp8, theirs, _ = answers(training=True)
    assert theirs.equal(averaged) and 1e-3 < (in_fp8 - theirs).norm() / theirs.norm() < 0.3
    for each in trainer, usual:
        each.weights.data.mul_(0.5)
    ours, theirs, _ = answers(training=False)
    assert ours.equal(theirs)
    halved, theirs, _ = answers(training=True)
    assert not halved.equal(in_fp8) and 1e-3 < (halved - theirs).norm() / theirs.norm() < 0.3


def test_the_gradient_of_the_embedding() -> None:
    """Where an embedding is added to the output of a convolution whose forward product is in FP8, its gradient is a sum of rounded numbers. Elsewhere,
    and in eval mode, it is the usual sum. The gradient that goes on to the convolution is not rounded yet."""
    trainer = tiny_trainer("fp8", channel_mult=(1, 2), attention_resolutions=(4,), resblock_updown=True, use_scale_shift_norm=False)
    factor, blocks = fp8_gradient_factor(trainer.config), [module for module in trainer.model.modules() if isinstance(module, ResBlock)]
    seen = {}

    def keep(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        seen[module] = inputs[0], out
        for tensor in seen[module]:
            tensor.retain_grad()

    for block in blocks:
        for module in block.in_layers[-1], block.emb_layers[-1], block.out_layers[0]:
            module.register_forward_hook(keep)
    x, t, dout = torch.randn(2, 1, 8, 8), torch.tensor([3.0, 700.0]), torch.randn(2, 1, 8, 8) / (2 * 8 * 8)
    for training, count in (True, 6), (False, 0):
        trainer.model.train(training)(x, t).backward(dout)
        found = []
        for block in blocks:
            conv = block.in_layers[-1]
            h, emb, total = seen[conv][1].grad, seen[block.emb_layers[-1]][1].grad.double(), seen[block.out_layers[0]][0].grad
            usual, in_fp8 = total.double().sum((2, 3)), rounded("e5m2", factor * total).sum((2, 3)) / factor
            found.append(training and isinstance(conv, Fp8TrainedConv) and conv.rounds_forward)
            # Not compared with the usual sum: where a group of the norm is one channel, as here at the first level, that is 0.
            assert h.equal(total) and (in_fp8 - usual).norm() > 1e-3 * total.norm()
            assert (emb - (in_fp8 if found[-1] else usual)).norm() < 1e-4 * (in_fp8 - usual).norm()
        assert sum(found) == count < len(blocks), found


@pytest.mark.long
@pytest.mark.parametrize("again", [False, True])
def test_the_twins_compiler_keeps_the_formats(again: bool) -> None:
    """torch.compile without the code generator, whose work takes minutes: what is traced of a block, two convolutions and the addition of an embedding
    between them, with autocast and with --use_checkpoint, has the bits of the plain one."""
    torch.manual_seed(0)
    config = make_config(dict(preset="fashion32", num_channels=32))
    block, draw = ResBlock(config, 32, 32), torch.zeros(3, dtype=torch.int64)
    for layers in block.in_layers, block.out_layers:
        layers[0].weight.data *= 20  # some of what it writes is too large for FP8
        layers[-1] = Fp8TrainedConv(layers[-1], 2.0**12)
    emb = torch.randn(2, 4 * 32)

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(block, x, emb, draw, use_reentrant=False, preserve_rng_state=False) if again else block(x, emb, draw)

    found = []
    for function in forward, torch.compile(forward, backend="aot_eager"):
        x = torch.randn(2, 32, 5, 5, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
        block.zero_grad()
        out = function(x)
        (out.float() ** 2).mean().backward()
        found.append([out.detach(), x.grad, *(p.grad for p in block.parameters())])
    assert all(plain.equal(traced) for plain, traced in zip(*found)) and len(found[0]) == 2 + 5 * 2


# ----------------------------------------------------------------------------------------------------------------------
# both programs: samples


@programs
@pytest.mark.parametrize("settings", [{}, dict(use_scale_shift_norm=True, **CLASSES), dict(resblock_updown=True, channel_mult=(1, 1))], ids=str)
def test_samples_follow_pytorch(run: Callable, tmp_path: Path, settings: dict) -> None:
    """One evaluation of a small model, by either program in fp32 and with operands rounded to FP8. Both round alike: they differ by a hundredth, at
    most, of what rounding changes. (Numbers that lie in the middle between two of FP8 are rounded up or down as float32's own rounding has it, and what
    one of them changes becomes such chances further on; so large models do not compare.)"""
    config, _ = write_parity_files(tmp_path, (3, 8, 8), dict(num_head_channels=32) | SMALLEST | settings)
    words = "--preset fashion32 --sampler euler --timestep_respacing 1 --clip_denoised False".split()
    config = dataclasses.replace(config, seed=3, **twin.parse_flags(words[2:], twin.FLAGS, ""))
    ours, theirs = {}, {}
    for precision in ("fp32", "fp8"):
        run([*words, "--init", "init.bin", "--sample", 3, "--seed", 3, "--output", "s.bin", "--precision", precision])
        ours[precision] = read_samples(tmp_path / "s.bin")
        theirs[precision] = twin.draw(twin.build_model(config, random_weights(config, 4), precision=precision), config, 3).numpy()
    rounded = np.linalg.norm(theirs["fp8"] - theirs["fp32"])
    assert 1e-3 * np.linalg.norm(theirs["fp32"]) < rounded < 0.5 * np.linalg.norm(theirs["fp32"])
    assert np.linalg.norm(ours["fp32"] - theirs["fp32"]) < 1e-3 * rounded
    assert np.linalg.norm(ours["fp8"] - theirs["fp8"]) < 1e-2 * rounded


# ----------------------------------------------------------------------------------------------------------------------
# both programs: training

TRAINED = {  # the smallest network, as it is and with what else a training step has
    "eps": {},
    "edm, class dropout, dropout": dict(objective="edm", **CLASSES, dropout=0.2, use_scale_shift_norm=True),
    "flow, microbatches, blocks up and down": dict(objective="flow", microbatch=1, channel_mult=(1, 1), resblock_updown=True, random_flip=True),
    "ect": dict(objective="ect", P_mean=-1.1, P_std=2.0),
    "small gradients": dict(predict="x0", min_snr_gamma=1e-5),  # most of them are below e5m2's normal numbers
    "large gradients, blocks computed again": dict(predict="x0", min_snr_gamma=1e5, use_checkpoint=True),  # at some t they are too large
    "bound": dict(use_kl=True),
}
EXTREME = ["eps", "flow, microbatches, blocks up and down"]


def with_extreme_numbers(config: object) -> np.ndarray:
    """Random weights of which the chosen convolutions read and hold numbers that are too large for FP8, or below its normal ones, in turns."""
    weights = random_weights(config, 4)
    named, model = to_state_dict(config, weights), twin.build_model(config, weights)
    for k, layers in enumerate(fp8_layers(model)):
        name = next(name for name, module in model.named_modules() if module is layers)
        named[f"{name}.0.weight"] *= 2.0 ** (5, -9)[k % 2]
        named[f"{name}.{len(layers) - 1}.weight"] *= 2.0 ** (-10, 6)[k % 2]
    return weights


def next_step(config: object, data: object, start: twin.ModelFile) -> tuple[float, np.ndarray]:
    """The twin's loss and gradient in the step that follows."""
    trainer = twin.Trainer(config, start=start)
    before = trainer.moments["exp_avg"].numpy().copy()
    result = trainer.train_step(*twin.training_batch(config, data, trainer.state.step))
    return result.loss, gradient_between(config, before, trainer.moments["exp_avg"].numpy())


def gradient_between(config: object, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Of two first moments."""
    return (after.astype(np.float64) - config.adam_beta1 * before) / (1 - config.adam_beta1)


# Left out by `make test`: what others have in them, too.
CONTAINED = [
    ("ect", False),
    ("large gradients, blocks computed again", False),
    *(("flow, microbatches, blocks up and down", extreme) for extreme in (False, True)),
]
CASES = [*((name, False) for name in TRAINED), *((name, True) for name in EXTREME)]


@programs
@pytest.mark.parametrize("name, extreme", [pytest.param(*case, marks=[pytest.mark.long] * (case in CONTAINED)) for case in CASES], ids=str)
def test_training_follows_pytorch(run: Callable, tmp_path: Path, name: str, extreme: bool) -> None:
    """Five steps of the program, and one of the twin from each of the program's checkpoints: losses and gradients.

    FP8 changes a gradient by a twentieth of it, or more. Two programs that round alike differ as they do in fp32, by 2^-19 to 2^-16 of a gradient.
    1e-4 is allowed, as without FP8. But if a number lies so near the middle between two of FP8 that fp32's rounding decides, the programs may take
    different ones. What that changes, 2^-4 of the number, puts others beyond their middles, and then gradients can differ by a third of what FP8
    changes. In so small a network, with so small images, this happens in one step of twenty to forty. So it may happen in two of the five.
    (If the twin trained on by itself, the programs would part by as much as FP8 changes: AdamW's first steps are signs of gradients, and the moved
    weights are rounded, too.)

    It notices: a wrong factor of x or of weights (with extreme numbers), or of gradients (with small ones); an operand that is not rounded, or
    that is rounded where it must not be; a gradient of a bias or of an embedding that is a sum of other numbers; weights that are rounded only once."""
    settings = SMALLEST | dict(num_head_channels=32, batch_size=2, max_steps=5, grad_clip=0.0) | TRAINED[name]
    config, data = write_parity_files(tmp_path, (1, 4, 4), settings)
    if extreme:
        twin.write_model(str(tmp_path / "init.bin"), twin.ModelFile(config, with_extreme_numbers(config)))
    told = run(flags(command_line(config), QUIET, "--precision fp8 --save_interval 1 --keep_checkpoints 0")).out
    model = UNetModel(config)
    assert f"fp8: {len(fp8_layers(model))} convolutions" in told and f" each, and the input gradients of {len(fp8_gradient_layers(model))}" in told
    logged, losses_apart, gradients_apart = column(tmp_path / "out", "loss"), [], []
    for step in range(5):
        start = twin.read_model(str(tmp_path / "out" / model_name(step) if step else tmp_path / "init.bin"))
        loss, theirs = next_step(dataclasses.replace(config, precision="fp8"), data, start)
        before = start.m if step else np.zeros_like(start.weights)
        ours = gradient_between(config, before, read_checkpoint(tmp_path / "out" / model_name(step + 1)).m)
        losses_apart.append(abs(logged[step] / loss - 1))
        gradients_apart.append(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
        if step == 0:
            _, in_fp32 = next_step(dataclasses.replace(config, precision="fp32"), data, start)
            assert np.linalg.norm(theirs - in_fp32) > 0.04 * np.linalg.norm(in_fp32)
    assert np.median(gradients_apart) < 1e-4 and max(gradients_apart) < 0.5, gradients_apart
    assert np.median(losses_apart) < 2e-6, losses_apart  # as in test_bound_step_by_step


SENSITIVE = flags(
    TINY, "--precision fp8 --lr_schedule cosine --warmup_steps 3 --dropout 0.2 --random_flip True --class_cond True --ema_rate 0.8 --grad_clip 0.5"
)


@programs
def test_a_run_keeps_its_bits(run: Callable, data: Path, tmp_path: Path) -> None:
    """After a resume, whose checkpoint holds the precision; with --use_checkpoint, which computes the same once more; with any number of threads."""
    given = flags(SENSITIVE, "--data_file", data, "--max_steps 6 --save_interval 3 --keep_checkpoints 0 --microbatch 2")
    run([*given, "--output_dir", "unbroken"])
    whole, final = read_log(tmp_path / "unbroken"), (tmp_path / "unbroken" / model_name(6)).read_bytes()
    resume = ["--resume_checkpoint", f"unbroken/{model_name(3)}", *QUIET]
    run([*resume, "--output_dir", "resumed"])
    assert read_log(tmp_path / "resumed") == whole[3:] and (tmp_path / "resumed" / model_name(6)).read_bytes() == final
    run([*given, "--use_checkpoint", "True", "--output_dir", "again"], threads=3)
    assert read_log(tmp_path / "again") == whole and (tmp_path / "again" / model_name(6)).read_bytes() == final

    # a run may go on without FP8, and the other way round; and each of them is seen
    run([*resume, "--precision", "auto", "--output_dir", "left"])
    run(flags(given, "--precision fp32 --output_dir usual"))
    run(["--resume_checkpoint", f"usual/{model_name(3)}", *QUIET, "--precision", "fp8", "--output_dir", "joined"])
    runs = [whole[3:], read_log(tmp_path / "left"), read_log(tmp_path / "usual")[3:], read_log(tmp_path / "joined")]
    assert len({rows[0]["loss"] for rows in runs}) == len(runs) and all(len(rows) == 3 for rows in runs)


@programs
def test_validation_and_grids_are_as_usual(run: Callable, data: Path, tmp_path: Path) -> None:
    """With weights that do not move, a run in FP8 has the validation loss and the pictures of one without. Only the training loss is another."""
    config, _ = write_parity_files(tmp_path, (1, 8, 8), SMALLEST)
    given = flags(
        "--preset fashion32 --init init.bin --lr 0 --max_steps 2 --batch_size 4 --val_interval 1 --sample_interval 2 --timestep_respacing 4 --num_samples 4"
    )
    for precision in ("fp32", "fp8"):
        run(flags(given, "--data_file d.bin --val_data_file", data, "--precision", precision, "--output_dir", precision))
    usual, in_fp8 = (read_log(tmp_path / precision) for precision in ("fp32", "fp8"))
    assert all(a["val_loss"] == b["val_loss"] != "" and a["loss"] != b["loss"] for a, b in zip(usual, in_fp8))
    grids = [(tmp_path / precision / "samples_0000002.png").read_bytes() for precision in ("fp32", "fp8")]
    assert grids[0] == grids[1]


@programs
def test_microbatches_add_up_to_the_batch(run: Callable, tmp_path: Path) -> None:
    """The gradients' factor is of the whole batch, so the same numbers are rounded, whatever the microbatch: what is left is the order of a sum."""
    write_parity_files(tmp_path, (1, 8, 8), SMALLEST | dict(num_head_channels=32, class_cond=True, num_classes=3))
    given = flags(SENSITIVE, "--init init.bin --data_file d.bin --max_steps 1 --grad_clip 0")
    given = given[: given.index("--num_channels")] + given[given.index("--preset") :]  # the model is the file's
    moments = []
    for microbatch in (0, 2, 1):
        run([*given, "--microbatch", microbatch, "--output_dir", microbatch])
        moments.append(read_checkpoint(tmp_path / str(microbatch) / model_name(1)).m)
    for parts in moments[1:]:
        assert np.linalg.norm(parts - moments[0]) < 1e-5 * np.linalg.norm(moments[0])


@programs
def test_the_sanitizers_see_nothing(run: Callable, data: Path) -> None:
    run([*SENSITIVE, "--data_file", data, "--max_steps", 2, "--use_checkpoint", "True", "--microbatch", 2], binary="asan")


@pytest.mark.parametrize("again", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_twin_keeps_its_bits(again: bool) -> None:
    """After a resume, and with --use_checkpoint. What it saves has no trace of FP8: it is a checkpoint like any other."""
    settings = dict(SMALLEST, dropout=0.2, max_steps=4, warmup_steps=2)
    whole, first = tiny_trainer("fp8", **settings), tiny_trainer("fp8", **settings, use_checkpoint=again)
    batches = [torch.rand(4, 1, 8, 8), torch.tensor([5, 100, 400, 900]), torch.randn(4, 1, 8, 8)]
    for _ in range(4):
        whole.train_step(*batches)
    for _ in range(2):
        first.train_step(*batches)
    second = twin.Trainer(first.config, start=first.checkpoint())
    for _ in range(2):
        second.train_step(*batches)
    assert second.weights.equal(whole.weights) and second.emas[0].equal(whole.emas[0]) and second.moments["exp_avg"].equal(whole.moments["exp_avg"])
