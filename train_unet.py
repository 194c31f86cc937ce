"""Train a diffusion UNet in PyTorch: the twin of train_unet.cu.

The same model (guided-diffusion's module names and state_dict keys), the same random numbers (counter-based: every
draw is a function of seed, purpose, step and sample), the same step and the same files, so that a run of either
program can be compared with the other's line by line, and any of its steps be repeated by it from a checkpoint.

  python train_unet.py                                   train the default preset into out/
  python train_unet.py --data_dir PICTURES               on your own pictures
  python train_unet.py --resume_checkpoint F.bin         go on from a checkpoint, of either program, in a new --output_dir
  python train_unet.py --init_model_only True            write initial weights to unet_init.bin
  python train_unet.py --convert model.bin model.pt      between .bin, .pt, .safetensors and a folder for diffusers (DIR/)
  python train_unet.py --nll my.bin --init model.bin     bits per dimension of these images
  python train_unet.py --help                            every flag

Contents, in the order in which data meets them: draws, data, diffusion, samplers, training, a run. The network is in common/model.py, random numbers
in common/random_numbers.py, flags in common/flags.py, files in common/model_files.py and common/log.py.
"""

from __future__ import annotations

import sys

from common import program
from common.flags import FLAGS, POWER_EMAS, SHARED, Config, format_value, parse_flags

INTRO = __doc__.partition("\n\nContents")[0]
if __name__ == "__main__":  # before PyTorch
    program.begin("train_unet", lambda argv: parse_flags(argv, FLAGS, INTRO), program.TRAINING)

import dataclasses  # noqa: I001 (names side by side)
import math
import shlex
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from common.api import Given, load as load, sampling_config
from common.augment import augment
from common.conditions import enlarge, made_pictures
from common.config import pick_device, pick_precision, preset_checksum, preset_of_run, space_timesteps, value_rows
from common.data_files import Data, open_data
from common.files import check_output, is_compared
from common.formats import check_conversion, check_replaced_model, convert, post_hoc_average, read_model
from common.likelihood import bits_per_dim, open_measured
from common.log import (
    Log, StepResult, announce, prepare_run, progress_line, training_and_validation_data, validation_crc, validation_images, weights_of_init,
)  # fmt: skip
from common.model import build_model, initial_weights, parameter_count, parameter_shapes, to_state_dict, train_in_fp8
from common.model_files import HISTORY_LENGTH, ModelFile, TrainingState, write_model
from common.program import Screen, UserError, check_alone, run_program, stop_on_signal
from common.random_numbers import (
    BACK_NOISE, CLASS_DROPOUT, COND_DROPOUT, FLIP, KNOWN_NOISE, NOISE, SAMPLE_NOISE, SAMPLE_START, TIMESTEP, VAL_NOISE, VAL_TIMESTEP, data_order, normals, random_words, to_normals,
)  # fmt: skip
from common.samples import Classes, beside_pictures, count_copies, grid_pixels, save_png, save_samples, value_captions

# ======================================================================================================================
# draws: which noise levels and which images a step has. They are functions of the seed and of the step (common/random_numbers.py).


def noise_levels(config: Config, purpose: int, step: int, samples: Tensor, probabilities: np.ndarray | None = None) -> Tensor:
    """(B): t (int64), or in float64 with --objective edm and ect sigma, whose logarithm is normal, and with flow t, in (0, 1), uniform or a normal's
    logistic function. probabilities (T): of each t, if they differ."""
    words = random_words(config.seed, purpose, step, samples, 2)
    u = words[:, 0].double() * 2.0**-32
    if probabilities is not None:
        below = torch.from_numpy(np.cumsum(probabilities)).to(u.device)
        return torch.searchsorted(below, u, right=True).clamp(max=config.diffusion_steps - 1)
    if config.objective == "ddpm":
        return words[:, 0] * config.diffusion_steps >> 32
    if config.objective == "flow" and config.t_std == 0:
        return u + 2.0**-33
    normal = to_normals(words)[:, 0].double()
    return (config.t_mean + config.t_std * normal).sigmoid() if config.objective == "flow" else (config.P_mean + config.P_std * normal).exp()


# ======================================================================================================================
# data

# What the model is told of the images besides, by the name of its argument: values (B, cond_dim or num_values), cond (B, cond_channels, H, W).
Conditions = dict[str, Tensor]
Batch = tuple[Tensor, Tensor, Tensor, "Tensor | None", Conditions]  # x0, t, noise, labels


def to_tensors(config: Config, data: Data, index: np.ndarray, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor | None, Conditions]:
    """x0 (B, C, H, W) of these images, float32 in [-1, 1], and labels (B), int64, and conditions, if the model wants them."""
    labels = torch.from_numpy(data.labels[index].astype(np.int64)).to(device) if config.class_cond else None
    conditions = {"values": torch.from_numpy(data.values[index]).to(device)} if config.cond_dim else {}
    if config.cond_channels and not config.cond:
        conditions["cond"] = torch.from_numpy(data.pictures.read_finite(index)).to(device)
    return torch.from_numpy(data.read_floats(index)).to(device), labels, conditions


def training_batch(config: Config, data: Data, step: int, device: torch.device | str = "cpu", probabilities: np.ndarray | None = None) -> Batch:
    """What step `step` (0-based) of a run trains on, in any build of the program: x0 and noise (B, C, H, W), float32, t (B) as noise_levels draws it,
    labels (B) int64 or None, and conditions by the name of the model's argument. It depends on the data and on flags of config alone, so that any other model can be trained on the very same numbers and
    compared with ours loss by loss (Diffusion.losses). probabilities: LossHistory.probabilities(), on which t depends too."""
    B = config.batch_size
    index = data_order(config.seed, step * B, B, data.count)
    x0, labels, conditions = to_tensors(config, data, index, device)
    data.expect(data_order(config.seed, (step + 1) * B, B, data.count))
    samples = torch.arange(B, device=device)
    if config.random_flip:
        mirror = random_words(config.seed, FLIP, step, samples, 1)[:, 0] & 1
        x0 = torch.where(mirror[:, None, None, None] == 1, x0.flip(3), x0)
        if "cond" in conditions:
            conditions["cond"] = torch.where(mirror[:, None, None, None] == 1, conditions["cond"].flip(3), conditions["cond"])
    t = noise_levels(config, TIMESTEP, step, samples, probabilities)
    noise = normals(config.seed, NOISE, step, samples, tuple(x0.shape[1:]))
    dropped = random_words(config.seed, CLASS_DROPOUT, step, samples, 1)[:, 0] < int(config.class_dropout * 2**32)
    if labels is not None:
        labels = torch.where(dropped, config.num_classes, labels)
    if config.cond_dim:
        conditions["values"] = torch.where(dropped[:, None], 0, conditions["values"])
    if config.augment > 0:
        own = [conditions["values"]] if config.cond_dim else []
        pictures = [conditions["cond"]] if "cond" in conditions else []
        changed, told = augment(torch.cat([x0, *pictures], dim=1), config.augment, config.seed, step, samples)
        x0, changed_cond = changed.tensor_split([config.in_channels], dim=1)
        conditions["values"] = torch.cat([*own, told], dim=1)
        if "cond" in conditions:
            conditions["cond"] = changed_cond
    if config.cond:
        conditions["cond"] = made_pictures(config, x0, step, samples, config.cond_noise)
    if config.cond_channels:
        left_out = random_words(config.seed, COND_DROPOUT, step, samples, 1)[:, 0] < int(config.cond_dropout * 2**32)
        conditions["cond"] = torch.where(left_out[:, None, None, None], 0, conditions["cond"])
    return x0, t, noise, labels, conditions


# ======================================================================================================================
# diffusion (Ho et al. 2020, "DDPM"; Song et al. 2021, "DDIM")


@dataclass
class NoiseLevel:
    """What the network is shown and told, what it should answer, and what its answer means; float64 (B) each."""

    t: Tensor  # what the network is told
    signal: Tensor  # its input x = signal x0 + sigma noise
    sigma: Tensor
    target_x0: Tensor  # its target = target_x0 x0 + target_noise noise
    target_noise: Tensor
    x0_x: Tensor  # what it says about x0: x0_x x + x0_out output
    x0_out: Tensor
    weight: Tensor  # of the squared error
    target_teacher: Tensor | None = None  # ect: the target's share of the teacher's answer

    def float32(self) -> NoiseLevel:
        """As both programs compute with it, beside images."""
        values = [getattr(self, f.name) for f in dataclasses.fields(self)]
        return NoiseLevel(*(value if value is None else value.float()[:, None, None, None] for value in values))


class Diffusion:
    """What is trained: the noise levels, the loss at them, and the denoiser that the network's answers make."""

    def __init__(self, config: Config, device: torch.device | str = "cpu"):
        self.config, self.steps, self.channels = config, config.diffusion_steps, config.in_channels
        if config.meaning("noise_schedule", {"linear": True, "cosine": False}):
            betas = np.linspace(0.0001 * 1000 / self.steps, 0.02 * 1000 / self.steps, self.steps)
        else:  # cosine (Nichol & Dhariwal 2021)
            curve = np.cos((np.arange(self.steps + 1) / self.steps + 0.008) / 1.008 * np.pi / 2) ** 2
            betas = np.minimum(1 - curve[1:] / curve[:-1], 0.999)
        self.alpha_bar = np.cumprod(1 - betas)
        self.sigmas = np.sqrt((1 - self.alpha_bar) / self.alpha_bar)  # in the scale of x_0
        # The smaller variance of x_s, s = t - 1, given x_t and x_0, and how its mean goes with x_0; the larger variance is beta. At t = 0, where the
        # smaller one is 0, that of t = 1 (guided-diffusion's posterior_log_variance_clipped).
        before = np.append(1.0, self.alpha_bar[:-1])
        small = betas * (1 - before) / (1 - self.alpha_bar)
        small[0], mean_x0 = small[1], betas * np.sqrt(before) / (1 - self.alpha_bar)
        self.tables = torch.tensor(np.stack([self.alpha_bar, np.log(small), np.log(betas), mean_x0]), device=device)

    def ddpm_level(self, alpha_bar: Tensor, t: Tensor) -> NoiseLevel:
        """Where the signal's variance is alpha_bar: the three predictions, and Min-SNR's weights for them."""
        signal, sigma, snr = alpha_bar.sqrt(), (1 - alpha_bar).sqrt(), alpha_bar / (1 - alpha_bar)
        zero, one = torch.zeros_like(signal), torch.ones_like(signal)
        target_x0, target_noise, x0_x, x0_out, relative = self.config.meaning(
            "predict",
            {
                "eps": (zero, one, 1 / signal, -sigma / signal, snr),
                "x0": (one, zero, zero, one, one),
                "v": (-sigma, signal, signal, -sigma, snr + 1),  # Salimans & Ho 2022, appendix D
            },
        )
        gamma = self.config.min_snr_gamma
        told = t.double() * 1000 / self.steps if self.config.rescale_timesteps else t.double()
        weight = snr.clamp(max=gamma) / relative if gamma > 0 else one
        return NoiseLevel(told, signal, sigma, target_x0, target_noise, x0_x, x0_out, weight)

    def edm_level(self, sigma: Tensor) -> NoiseLevel:
        """Table 1 of Karras et al. 2022: their loss is the squared error of the network's own output."""
        data = self.config.sigma_data
        total = (sigma**2 + data**2).sqrt()
        c_skip, c_out, c_in, c_noise = data**2 / total**2, sigma * data / total, 1 / total, sigma.log() / 4
        weight = total**2 / (sigma * data) ** 2 * c_out**2
        return NoiseLevel(c_noise, c_in, c_in * sigma, sigma / (data * total), -c_skip * sigma / c_out, c_skip / c_in, c_out, weight)

    def flow_level(self, t: Tensor) -> NoiseLevel:
        """Rectified flow (Liu et al. 2022): on the line x_t = (1 - t) x0 + t noise the network answers with the velocity noise - x0."""
        one = torch.ones_like(t)
        return NoiseLevel(1000 * t, 1 - t, t, -one, one, one, -t, one)

    def level(self, t: Tensor) -> NoiseLevel:
        """Of what noise_levels draws."""
        frame = self.config.frame
        if frame == "ddpm":
            return self.ddpm_level(self.tables[0][t], t)
        if frame == "edm":
            return self.edm_level(t)
        return self.flow_level(t / (1 + t) if self.config.objective == "ect" else t)  # ect draws sigma

    def teacher_sigma(self, t: Tensor, step: int | None = None) -> Tensor:
        """Geng et al. 2024: (B) r of the students' t, at this step (0-based) or in the run's last one."""
        config = self.config
        a = 1 + (config.max_steps - 1 if step is None else step) // config.ect_stage
        n = 1 + config.ect_k * (-config.ect_b * t).sigmoid()
        return (t * (1 - n / config.ect_q**a)).clamp(min=0)

    def pair(self, t: Tensor, step: int | None = None) -> tuple[NoiseLevel, NoiseLevel]:
        """Student and teacher. The student's target makes its image the teacher's, of which x0 and noise are parts, too: so what both see alike
        cancels here, in float64. At r = 0 the teacher is the image itself."""
        r = self.teacher_sigma(t, step)
        student, teacher = self.level(t), self.level(torch.where(r > 0, r, t))
        asked = (r > 0).double()
        parts = [asked * teacher.x0_x * teacher.signal + (1 - asked), asked * teacher.x0_x * teacher.sigma, asked * teacher.x0_out]
        student.target_x0 = (parts[0] - student.x0_x * student.signal) / student.x0_out
        student.target_noise = (parts[1] - student.x0_x * student.sigma) / student.x0_out
        student.target_teacher = parts[2] / student.x0_out
        snr = 1 / t**2 + 1 / self.config.sigma_data**2
        student.weight = self.config.meaning("ect_weight", {"gap": 1 / (t - r), "snr": snr})
        return student, teacher

    def level_at(self, sigma: float) -> NoiseLevel:
        """At any sigma, of x = x0 + sigma noise. Between two t the network is told what lies between: linear in log(sigma)."""
        one = torch.tensor([sigma], dtype=torch.float64)
        if self.config.frame == "edm":
            return self.edm_level(one)
        if self.config.frame == "flow":
            return self.flow_level(one / (1 + one))
        t = np.interp(np.log(sigma), np.log(self.sigmas), np.arange(self.steps))
        return self.ddpm_level(1 / (1 + one**2), torch.tensor([t]))

    def quarters(self, t: Tensor) -> list[int]:
        """In which quarter of the noise levels that are drawn each lies, from little noise to much."""
        config, flow = self.config, self.config.objective == "flow"
        if config.objective == "ddpm":
            return (4 * t // self.steps).tolist()
        if flow and config.t_std == 0:
            return (4 * t).long().tolist()
        mean, std, value = (config.t_mean, config.t_std, t.logit()) if flow else (config.P_mean, config.P_std, t.log())
        return torch.bucketize((value - mean) / max(std, 1e-30), torch.tensor([-0.67448975, 0, 0.67448975], device=t.device).double()).tolist()

    def tuning_losses(self, model: Callable, x0: Tensor, t: Tensor, noise: Tensor, labels: Any, conditions: Conditions, step: int | None) -> Tensor:
        """(B) consistency tuning (Geng et al. 2024), in double: the pseudo-Huber distance of the images that a model makes of x0 with much and with
        less of the same noise. The second one, with the same dropout, is what the first should be, and has no gradient."""
        student, teacher = (level.float32() for level in self.pair(t, step))
        with torch.no_grad():
            answer = model(teacher.signal * x0 + teacher.sigma * noise, teacher.t.flatten(), labels, **conditions)
        target = student.target_x0 * x0 + student.target_noise * noise + student.target_teacher * answer
        out = model(student.signal * x0 + student.sigma * noise, student.t.flatten(), labels, **conditions)
        squares = (student.x0_out * (out - target)).square().flatten(1).sum(1, dtype=torch.float64)
        c, known = self.config.ect_c, squares > 0  # a root has no slope at 0
        root = (torch.where(known, squares, 1) + c * c).sqrt()
        return torch.where(known, student.weight.flatten().double() * squares / (root + c), 0)

    def losses(
        self,
        model: Callable,
        x0: Tensor,
        t: Tensor,
        noise: Tensor,
        labels: Any,
        conditions: Conditions | None = None,
        step: int | None = None,
    ) -> Tensor:
        """(B) each sample's loss, in double: the weighted squared error, and what learns the variance. step: of ect's schedule; None: the last."""
        conditions = conditions or {}
        if self.config.objective == "ect":
            return self.tuning_losses(model, x0, t, noise, labels, conditions, step)
        config, level = self.config, self.level(t).float32()
        x, target = level.signal * x0 + level.sigma * noise, level.target_x0 * x0 + level.target_noise * noise
        out = model(x, level.t.flatten(), labels, **conditions)
        error = out[:, : self.channels] - target
        losses = (level.weight * error.square()).flatten(1).mean(1, dtype=torch.float64)
        if not config.learned_variance and not config.use_kl:
            return losses
        # The bound is a sum over all t, of which each step draws one; guided-diffusion counts it in bits.
        bits = self.steps / math.log(2) * self.bound(error if config.use_kl else error.detach(), out[:, self.channels :], x0, t)
        return bits if config.use_kl else losses + config.vlb_weight * bits

    def bound(self, error: Tensor, v: Tensor, x0: Tensor, t: Tensor) -> Tensor:
        """(B) the variational bound's term of each sample, in nats a value, in double. v (B, C or 0, H, W): the variance, from the smaller (-1)
        to the larger one (1) (Nichol & Dhariwal 2021, eq. 15)."""
        level, (small, large, mean_x0) = self.level(t), (table[t][:, None, None, None] for table in self.tables[1:])
        fraction = (v.double() + 1) / 2 if self.config.learned_variance else torch.full_like(x0, 0.0 if self.config.sigma_small else 1.0).double()
        if not self.config.learned_variance:
            large = torch.where(t[:, None, None, None] == 0, small, large)
        log_var = fraction * large + (1 - fraction) * small
        away = -level.x0_out[:, None, None, None] * error.double()  # x0 - what the network says about it
        divergence = 0.5 * (-1 + log_var - small + (small - log_var).exp() + (mean_x0 * away) ** 2 * (-log_var).exp())
        # at t = 0: the likelihood of one of 256 values
        edges = ((-0.5 * log_var).exp() * (away + width) for width in (1 / 255, -1 / 255))
        below = [0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) for z in edges]
        p = torch.where(x0 < -0.999, below[0], torch.where(x0 > 0.999, 1 - below[1], below[0] - below[1]))
        likelihood = torch.where(p < 1e-12, math.log(1e-12), p.clamp(min=1e-12).log())
        return torch.where(t[:, None, None, None] == 0, -likelihood, divergence).flatten(1).mean(1)


# ----------------------------------------------------------------------------------------------------------------------
# samplers


class Noise(NamedTuple):
    """How noisy a sampler's x is: x = signal (x_0 + sigma noise)."""

    signal: float
    sigma: float


def noise_route(config: Config, diffusion: Diffusion) -> list[Noise]:
    """Before each step, and at the end. The x of ddpm and ddim has variance 1, that of the others the signal's scale."""
    kept = space_timesteps(config.diffusion_steps, config.timestep_respacing)[::-1]
    n = len(kept)
    if config.sampler in ("ddpm", "ddim"):
        alpha_bars = [float(diffusion.alpha_bar[t]) for t in kept] + [1.0]
        return [Noise(math.sqrt(alpha_bar), math.sqrt(1 / alpha_bar - 1)) for alpha_bar in alpha_bars]
    if config.frame == "flow" and config.sampler != "consistency":  # equal steps of its t
        times = [config.sigma_max / (1 + config.sigma_max) * (1 - i / n) for i in range(n + 1)]
        return [Noise(1.0, t / (1 - t)) for t in times]
    low, high = config.mid_t if config.sampler == "consistency" else config.sigma_min, config.sigma_max
    if config.objective == "ddpm":  # as far as the model knows them
        known = float(diffusion.sigmas[0]), float(diffusion.sigmas[-1])
        low, high = max(low, known[0]), min(high, known[1])
        if low > high:
            told = f"there is no sigma between them that this model knows: {known[0]:.3g} to {known[1]:.3g}"
            raise UserError(f"--sigma_min {config.sigma_min:g}, --sigma_max {config.sigma_max:g}: {told}")
    start, end = high ** (1 / config.rho), low ** (1 / config.rho)  # Karras et al. 2022, eq. 5
    sigmas = [(start + i / max(n - 1, 1) * (end - start)) ** config.rho for i in range(n)]
    if n > 1:
        sigmas[-1] = low  # with a small rho, the formula's rounding errors could make this sigma 0
    return [Noise(1.0, sigma) for sigma in [*sigmas, 0.0]]


def step_order(config: Config, n: int, first: int = 0) -> list[tuple[int, int]]:
    """(step, the step after it) of n steps from `first`: one after the other, or with --inpaint some of them again (RePaint's
    get_schedule_jump). The step after the last is n."""
    again = dict.fromkeys(range(0, n - config.jump_length, config.jump_length), config.jump_n_sample - 1) if config.inpaint else {}
    steps, level = [], n - 1 - first  # of noise, the lowest being 0
    while level >= 0:
        steps.append(n - 1 - level)
        level -= 1
        if again.get(level, 0) > 0:
            again[level] -= 1
            level += config.jump_length
    return list(zip(steps, [*steps[1:], n]))


class Denoiser:
    """D(x; sigma) of Karras et al. 2022, of any model: what it says about x_0 in x = x_0 + sigma noise, guided and clipped. And the sampler's
    draws, which depend on the images' numbers alone, and on how often the network was asked. labels: those of config.classes, or all classes, in turns.
    rows: of cond_dim numbers, which the images take in turns; None: those of config.values. pictures (count, cond_channels, H, W): the same.
    image, mask (B, C or 1, H, W): what is known where the mask is not above 0; None: nothing."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        numbers: Tensor,
        labels: Tensor | None = None,
        rows: list[list[float]] | None = None,
        pictures: Tensor | None = None,
    ):
        self.model, self.config, self.numbers, self.asked = model, config, numbers, 0
        self.labels = labels_of_images(config, numbers) if labels is None else labels
        self.diffusion, self.image, self.mask = Diffusion(config), None, None
        self.route = noise_route(config, self.diffusion)
        self.conditions: Conditions = {}
        if config.cond_dim:
            table = torch.tensor(rows or value_rows(config), device=numbers.device)
            self.conditions["values"] = table[numbers % len(table)]
        if config.cond_channels:
            pictures = sample_pictures(config, len(numbers)) if pictures is None else pictures
            self.conditions["cond"] = pictures.to(numbers.device)[numbers % len(pictures)]

    def without_condition(self) -> tuple[Tensor | None, Conditions]:
        """Labels and conditions for guidance: without all that the model has learnt to do without."""
        config, labels = self.config, self.labels
        if config.null_class:
            labels = torch.full_like(labels, config.num_classes)
        learnt = {"values": config.class_dropout > 0, "cond": config.cond_dropout > 0}
        return labels, {name: torch.zeros_like(value) if learnt[name] else value for name, value in self.conditions.items()}

    def normals(self, purpose: int, step: int) -> Tensor:
        seed = self.config.noise_seed if self.config.noise_seed >= 0 else self.config.seed
        return normals(seed, purpose, step, self.numbers, (self.config.in_channels, *self.config.image_size))

    def start(self) -> Tensor:
        return self.normals(SAMPLE_START, 0) * (1.0 if self.config.sampler in ("ddpm", "ddim") else self.route[0].sigma)

    def noise(self) -> Tensor:
        return self.normals(SAMPLE_NOISE, self.asked - 1) if self.asked else self.normals(SAMPLE_START, 1)

    def keep_known(self, x: Tensor, here: Noise, then: Noise) -> Tensor:
        """RePaint (Lugmayr et al. 2022, algorithm 1): x with what is known; and back to the noise of the step that follows, if that is an earlier one."""
        if self.mask is None:
            return x
        x = torch.where(self.mask > 0, x / here.signal, self.image + here.sigma * self.normals(KNOWN_NOISE, self.asked - 1))
        if then.sigma > here.sigma:
            x = x + math.sqrt(then.sigma**2 - here.sigma**2) * self.normals(BACK_NOISE, self.asked - 1)
        return x * then.signal

    def __call__(self, x: Tensor, sigma: float) -> Tensor:
        config, level, C = self.config, self.diffusion.level_at(sigma), self.config.in_channels
        shown, t = level.signal.item() * x, torch.full((len(x),), level.t.item(), device=x.device)
        out = self.model(shown, t, self.labels, **self.conditions)
        self.asked += 1
        self.fraction = (out[:, C:] + 1) / 2  # of the way from the smaller variance to the larger, where that is learned
        out = out[:, :C]
        if config.guidance_scale != 1 and config.guidance_min <= sigma <= config.guidance_max:  # Ho & Salimans 2022; Kynkaanniemi et al. 2024
            labels, conditions = self.without_condition()
            without = self.model(shown, t, labels, **conditions)[:, :C]
            out = without + config.guidance_scale * (out - without)
        x0 = level.x0_x.item() * shown + level.x0_out.item() * out
        if config.dynamic_threshold > 0:  # Saharia et al. 2022, section 2.3
            rank = math.ceil(config.dynamic_threshold * x0[0].numel())
            s = x0.abs().flatten(1).kthvalue(rank).values.clamp(min=1)[:, None, None, None]
            return torch.minimum(torch.maximum(x0, -s), s) / s
        return x0.clamp(-1, 1) if config.clip_denoised else x0


# A step of each sampler, as in its paper, from the noise `here` to that of the next step, `there`: what the network says about x_0, and the next x.
# before: what it said a step earlier, and the sigma there, if the sampler comes from there. A step scales what is left of the noise: x plus a slope times
# the difference of sigmas is the same number, but in float32 the difference of two large ones where sigma falls far, as a flow's does from a large
# --sigma_max.


def ddpm(D: Denoiser, x: Tensor, here: Noise, there: Noise, before: Any) -> tuple[Tensor, Tensor]:
    """Ho et al. 2020, eq. 6 and 7, with either of their variances or a learned one (Nichol & Dhariwal 2021, eq. 15)."""
    ab, ab_next = here.signal**2, there.signal**2
    beta = 1 - ab / ab_next
    x0 = D(x / here.signal, here.sigma)
    mean = math.sqrt(ab_next) * beta / (1 - ab) * x0 + math.sqrt(1 - beta) * (1 - ab_next) / (1 - ab) * x
    if ab_next == 1:
        return x0, mean
    small, large = beta * (1 - ab_next) / (1 - ab), beta
    deviation: Any = math.sqrt(small if D.config.sigma_small else large)
    if D.config.learned_variance:
        deviation = ((D.fraction * math.log(large) + (1 - D.fraction) * math.log(small)) / 2).exp()
    return x0, mean + deviation * D.noise()


def ddim(D: Denoiser, x: Tensor, here: Noise, there: Noise, before: Any) -> tuple[Tensor, Tensor]:
    """Song et al. 2021, eq. 12 and 16."""
    ab, ab_next = here.signal**2, there.signal**2
    x0 = D(x / here.signal, here.sigma)
    eps = (x - math.sqrt(ab) * x0) / math.sqrt(1 - ab)
    sigma = D.config.eta * math.sqrt((1 - ab_next) / (1 - ab)) * math.sqrt(1 - ab / ab_next)
    x_next = math.sqrt(ab_next) * x0 + math.sqrt(1 - ab_next - sigma**2) * eps
    return x0, x_next + sigma * D.noise() if sigma > 0 else x_next


def add_churn(D: Denoiser, x: Tensor, sigma: float) -> tuple[Tensor, float]:
    """Karras et al. 2022, algorithm 2, lines 4 to 6: x with noise added, and its sigma."""
    config = D.config
    gamma = min(config.S_churn / (len(D.route) - 1), math.sqrt(2) - 1) if config.S_min <= sigma <= config.S_max else 0.0
    if gamma == 0:
        return x, sigma
    sigma_hat = sigma * (1 + gamma)
    return x + math.sqrt(sigma_hat**2 - sigma**2) * config.S_noise * D.noise(), sigma_hat


def euler(D: Denoiser, x: Tensor, here: Noise, there: Noise, before: Any) -> tuple[Tensor, Tensor]:
    """Karras et al. 2022, algorithm 2, without the correction."""
    x, sigma = add_churn(D, x, here.sigma)
    x0 = D(x, sigma)
    return x0, x0 + there.sigma / sigma * (x - x0)


def heun(D: Denoiser, x: Tensor, here: Noise, there: Noise, before: Any) -> tuple[Tensor, Tensor]:
    """Karras et al. 2022, algorithm 2 (without churn, algorithm 1). With s and s' the slopes at both ends and h the difference of sigmas, its
    x + h (s + s') / 2 is Euler's x + h s and half of h (s' - s), in which only what the network says differs."""
    x, sigma = add_churn(D, x, here.sigma)
    x0 = D(x, sigma)
    x_next = x0 + there.sigma / sigma * (x - x0)
    if there.sigma > 0:
        x_next = x_next + (there.sigma - sigma) / (2 * there.sigma) * (x0 - D(x_next, there.sigma))
    return x0, x_next


def dpmpp_2m(D: Denoiser, x: Tensor, here: Noise, there: Noise, before: Any) -> tuple[Tensor, Tensor]:
    """Lu et al. 2022, "DPM-Solver++", algorithm 2, in lambda = -log(sigma)."""
    x0 = mixed = D(x, here.sigma)
    if before and there.sigma > 0:
        x0_before, sigma_before = before
        r = math.log(sigma_before / here.sigma) / math.log(here.sigma / there.sigma)
        mixed = (1 + 1 / (2 * r)) * x0 - 1 / (2 * r) * x0_before
    return x0, there.sigma / here.sigma * x + (1 - there.sigma / here.sigma) * mixed


def consistency(D: Denoiser, x: Tensor, here: Noise, there: Noise, before: Any) -> tuple[Tensor, Tensor]:
    """Song et al. 2023, "Consistency Models", algorithm 1: every answer is an image, and fresh noise makes it the next input."""
    x0 = D(x, here.sigma)
    return x0, x0 + there.sigma * D.noise() if there.sigma > 0 else x0


SAMPLERS: dict[str, Callable] = {"ddim": ddim, "ddpm": ddpm, "euler": euler, "heun": heun, "dpmpp_2m": dpmpp_2m, "consistency": consistency}


@torch.no_grad()
def sampler_steps(D: Denoiser, x: Tensor, first: int = 0) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """(step, x, what the network says about x_0 in it, the next x), from the sampler's x at step `first`."""
    before, D.asked = None, first * (2 if D.config.sampler == "heun" else 1)
    take_step = D.config.meaning("sampler", SAMPLERS)
    for step, then in step_order(D.config, len(D.route) - 1, first):
        x0, x_next = take_step(D, x, D.route[step], D.route[step + 1], before)
        x_next = D.keep_known(x_next, D.route[step + 1], D.route[then])
        yield step, x, x0, x_next
        x, before = x_next, (x0, D.route[step].sigma) if then == step + 1 else None


def read_images(config: Config, name: str, most: int) -> Tensor | None:
    """The images (up to most, C, H, W) of --start_from, --inpaint, --mask or --cond_file, in [-1, 1]; None: the flag isn't given."""
    path = getattr(config, name)
    if not path:
        return None
    data = open_data(path)
    channels = {"mask": 1, "cond_file": config.cond_channels}.get(name, config.in_channels)
    data.check(dataclasses.replace(config, class_cond=False, cond_dim=0, cond_channels=0, in_channels=channels))
    return torch.from_numpy(data.read_finite(np.arange(min(len(data.images), most)), f"--{name} "))


def sample_pictures(config: Config, most: int) -> Tensor:
    """The pictures (up to most, cond_channels, H, W) of --sample, from --cond_file. With --cond they are made of its images, unless it holds such
    pictures already: small ones are enlarged, grey ones taken as they are."""
    if not config.cond_file:
        raise UserError(f"--cond_file: must name the pictures of {config.cond_channels} channels that the model is conditioned on")
    if not config.cond:
        return read_images(config, "cond_file", most)
    (H, W), C, factor = config.image_size, config.in_channels, config.picture_factor
    shape = open_data(config.cond_file).images.shape[1:]
    taken = {(C, H, W): "images"}
    if config.picture_kind == "gray":
        taken[1, H, W] = "grey ones"
    if factor:
        taken[C, H // factor, W // factor] = f"small ones of {H // factor}x{W // factor}x{C}"
    if shape not in taken:
        told = f"its pictures are {shape[1]}x{shape[2]}x{shape[0]}, and --cond {config.cond} takes images of {H}x{W}x{C}"
        raise UserError(f"--cond_file {config.cond_file}: {' or '.join([told, *list(taken.values())[1:]])}")
    as_file = dataclasses.replace(config, image_size=shape[1:], cond="", cond_channels=shape[0], attention_resolutions=())
    images = read_images(as_file, "cond_file", most)
    if taken[shape].startswith("small"):
        return enlarge(images, factor)
    if taken[shape].startswith("grey"):
        return images
    masks = read_images(config, "mask", most) if config.picture_kind == "mask" and config.mask else None
    numbers = torch.arange(len(images))
    return made_pictures(config, images, 0, numbers, masks=None if masks is None else masks[numbers % len(masks)] > 0)


def labels_of_given(config: Config) -> tuple[Tensor | None, str]:
    """The labels of the images that are changed, or whose pictures the samples are conditioned on. A file without labels of the model's classes says
    nothing of the class: then the samples have none, if the model has learnt that. None: the samples take classes in turns; and if that may be wrong, a
    sentence that says so."""
    path = config.start_from or config.inpaint or config.cond_file
    if not (config.class_cond and path and config.sample) or config.classes:
        return None, ""
    data = open_data(path)
    if data.num_classes == config.num_classes:
        return torch.from_numpy(data.labels.astype(np.int64)), ""
    if config.null_class:
        return torch.tensor([config.num_classes]), ""
    told = f"has no labels of the model's {config.num_classes} classes, so it takes them in turns; --classes says what is right"
    return None, f"{path}: {told}"


def labels_of_images(config: Config, numbers: Tensor, given: Tensor | None = None) -> Tensor | None:
    """The classes (B), int64, in which images of these numbers (B) are drawn: in turns those of config.classes, the given ones (None: those of the given
    files), or all; num_classes stands for none. None: the model has no classes."""
    if not config.class_cond:
        return None
    given = labels_of_given(config)[0] if given is None else given
    everything = torch.arange(config.num_classes) if given is None else given
    listed = (torch.tensor(config.classes) if config.classes else everything).to(numbers.device)
    return listed[numbers % len(listed)]


def doubts(config: Config) -> list[str]:
    """What makes samples worse than they could be, and may not be what the user meant: a sentence each."""
    told = [labels_of_given(config)[1]]
    first, last = space_timesteps(config.diffusion_steps, config.timestep_respacing)[-1], config.diffusion_steps - 1
    if config.sampler in ("ddpm", "ddim") and not config.start_from and first < last:
        begins = f"its first step is at timestep {first}, but the noise at the start is that of {last}"
        told.append(f"--timestep_respacing {config.timestep_respacing}: {begins}; a number alone, such as 50, begins there")
    if config.sampler == "consistency" and config.objective != "ect":
        told.append("--sampler consistency: is for models that --objective ect has tuned for it; this one was not, and its images are blurred")
    return [sentence for sentence in told if sentence]


@torch.no_grad()
def draw(
    model: nn.Module,
    config: Config,
    n: int,
    progress: bool = False,
    rows: list[list[float]] | None = None,
    pictures: Tensor | None = None,
    stop: Sequence[str] = (),
    labels: Tensor | None = None,
) -> Tensor | None:
    """n images (n, C, H, W) in [-1, 1], on the CPU, of a model that it leaves in eval mode. Image i depends on (seed, i) alone, not on batch_size.
    rows, pictures: see Denoiser; None: those of --values and --cond_file. stop: a list of signals (stop_on_signal); once it holds one, None is returned.
    labels: those of the images to which the pictures belong, in turns, unless there are config.classes; None: those of the given files."""
    from tqdm import tqdm  # which who only trains or times the network does without

    device, drawn = next(model.parameters()).device, []
    images = read_images(config, "start_from" if config.start_from else "inpaint", n)
    masks = read_images(config, "mask", n) if config.inpaint else None
    if config.cond_channels and pictures is None:
        pictures = sample_pictures(config, n)
    steps = len(space_timesteps(config.diffusion_steps, config.timestep_respacing))
    first = steps - max(1, math.floor(config.strength * steps + 0.5)) if config.start_from else 0  # Meng et al. 2022, "SDEdit"
    batches = torch.arange(n, device=device).split(config.batch_size)
    labels = labels_of_images(config, torch.arange(n, device=device), labels)
    model.eval()
    with tqdm(total=len(batches) * len(step_order(config, steps, first)), unit="step", disable=not progress) as bar:
        for numbers in batches:
            D = Denoiser(model, config, numbers, None if labels is None else labels[numbers], rows, pictures)
            x = D.start()
            if config.inpaint:
                D.image, D.mask = images.to(device)[numbers % len(images)], masks.to(device)[numbers % len(masks)]
            if config.start_from:
                signal, sigma = D.route[first]
                x = signal * images.to(device)[numbers % len(images)] + signal * sigma * D.normals(SAMPLE_START, 0)
            for *_, x_next in sampler_steps(D, x, first):
                if stop:
                    return None
                bar.update()
            drawn.append(x_next.cpu())
    return torch.cat(drawn)


def sample(
    model: nn.Module,
    n: int,
    *,
    classes: int | str | Sequence[int | str] | None = None,
    values: Any = None,
    pictures: Given = None,
    image: Given = None,
    strength: float | None = None,
    guidance_scale: float | None = None,
    steps: int | str | None = None,
    sampler: str | None = None,
    seed: int | None = None,
    **flags: Any,
) -> Tensor:
    """n images (n, C, H, W), float32 in [-1, 1], on the CPU, of a model from load(): those that ./train_unet --sample n --init FILE draws with the
    same flags, up to rounding. What is None is as there. The network stays on its device.

    classes: a number or a name, or several, which the images take in turns; None: all classes in turns.
    values: (cond_dim) numbers, or rows (N, cond_dim), which the images take in turns.
    pictures: what the images are conditioned on: a tensor (N, channels, H, W), a data file (.bin) or a picture file. A model of --cond makes its
    conditions of images (N, C, H, W), as in training.
    image: what is changed, in the same ways: a tensor (C, H, W) or (N, C, H, W), float in [-1, 1] or uint8, or a file. strength: from 0 to 1 (all).
    steps: of the sampler, such as 50 or "ddim25". sampler: ddim, ddpm, euler, heun, dpmpp_2m or consistency.
    flags: eta=1.0, S_churn=20, batch_size=64 and others of the programs' by their names. What can't work is a UserError of one sentence."""
    given = flags | {"classes": classes, "values": values, "strength": strength, "guidance_scale": guidance_scale, "sampler": sampler, "seed": seed}
    if steps is not None:
        given["timestep_respacing"] = steps
    with sampling_config(model, n, image, pictures, given) as config:
        for told in doubts(config):
            warnings.warn(told, stacklevel=2)
        return draw(model, config, n)


# ======================================================================================================================
# training


def learning_rate(config: Config, step: int) -> float:
    """Of a step (0-based), as float32."""
    warm = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps > 0 else 1.0
    progress = min(max((step - config.warmup_steps) / max(config.max_steps - config.warmup_steps, 1), 0.0), 1.0)
    shape = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
    return float(np.float32(config.lr * warm * config.meaning("lr_schedule", shape)))


def average_share(rate: float, updates: int) -> float:
    """The share of the newest weights in an average of the weights after each of so many updates: see train_unet.cu, average_share."""
    if rate > 1:  # Karras et al. 2024, eq. 2
        return 1 - (1 - 1 / updates) ** (rate + 1)
    return 1 / updates if rate == 1 else (1 - rate) / (1 - rate**updates)


def judge(guard: tuple[float, ...], loss: float, grad_norm: float, bad_in_row: int = 0, outliers: bool = True) -> tuple[str, tuple[float, ...]]:
    """Why a step must not touch the weights, "" if it may. And the guard after it: how many healthy steps there were, and the running mean and variance
    of the logarithms of both. outliers: whether they are skipped (--max_bad_steps 0: they are not)."""
    n, *moments = guard
    a, after = max(5 / (n + 5), 0.01), [n + 1]
    for name, x in ("loss", loss), ("gradient norm", grad_norm):
        if not math.isfinite(x):
            return f"{name} {x} is not finite", guard
    for name, x, mean, var in ("loss", loss, *moments[:2]), ("gradient norm", grad_norm, *moments[2:]):
        log = math.log(max(x, 1e-30))
        if outliers and n >= 100 and log - mean > max(math.log(10), 10 * math.sqrt(var)):
            return f"{name} {x:.4g} is far above its running mean {math.exp(mean):.4g}", guard
        var = min(4 * var, 1e4) if bad_in_row else var  # the run did not break: what was skipped is rare, but usual (see train_unet.cu, healthy)
        d = log - mean
        after += [mean + a * d, (1 - a) * (var + a * d * d)]
    return "", tuple(after)


MUON_MOMENTUM = 0.95
MUON_ITERATIONS = 5
MUON_POLYNOMIAL = 3.4445, -4.7750, 2.0315  # a, b, c
MUON_SMALLEST = 1e-14  # a momentum whose norm is below it is what rounding has left of a gradient of 0: it moves nothing


def muon_updates(name: str, shape: torch.Size) -> bool:
    """Whether --optimizer muon has Muon update a parameter: the matrices between hidden channels. AdamW updates the others."""
    return len(shape) >= 2 and name not in ("input_blocks.0.0.weight", "out.2.weight", "label_emb.weight", "cond_emb.weight")


def orthogonal(X: Tensor) -> Tensor:
    """About the orthogonal matrix that is nearest to X (rows, columns): the same singular vectors, with singular values of about 1 (Jordan et al. 2024,
    "Muon"). Each iteration is an odd polynomial of X."""
    a, b, c = MUON_POLYNOMIAL
    norm = X.norm()
    X = torch.where(norm < MUON_SMALLEST, 0, X / norm)
    for _ in range(MUON_ITERATIONS):
        if X.shape[0] <= X.shape[1]:
            A = X @ X.T
            X = a * X + (b * A + c * A @ A) @ X
        else:
            A = X.T @ X
            X = a * X + X @ (b * A + c * A @ A)
    return X


def muon_scale(X: Tensor) -> float:
    """The factor that makes Muon's updates about as large as AdamW's (Liu et al. 2025, "Muon is scalable for LLM training", eq. 4)."""
    return 0.2 * math.sqrt(max(X.shape))


class LossHistory:
    """--schedule_sampler loss-second-moment (Nichol & Dhariwal 2021, section 3.3): t is drawn in proportion to the root mean square of its latest
    losses. rows (T, HISTORY_LENGTH + 1): losses, oldest first, and how many; None: t is uniform."""

    def __init__(self, config: Config, rows: np.ndarray | None):
        empty = np.zeros((config.diffusion_steps, HISTORY_LENGTH + 1), np.float32)
        learnt = config.meaning("schedule_sampler", {"uniform": False, "loss-second-moment": True})
        self.rows = None if not learnt else empty if rows is None else rows.copy()

    def probabilities(self) -> np.ndarray | None:
        """(T), for training_batch; None if all are the same, as they are as long as losses are missing."""
        if self.rows is None or (self.rows[:, -1] < HISTORY_LENGTH).any():
            return None
        squares = self.rows[:, :-1].astype(np.float64) ** 2
        weights = np.sqrt(np.cumsum(squares, 1)[:, -1] / HISTORY_LENGTH)  # sums in order, as in C++
        total = np.cumsum(weights)[-1]
        even = 0.001  # of the probability all t have in equal parts
        return weights * ((1 - even) / total) + even / len(weights) if total > 0 else None

    def importance(self, t: Tensor) -> Tensor:
        """(B) of the losses: what they count, so that their mean is that of a uniform t."""
        p = self.probabilities()
        return torch.ones(len(t), device=t.device) if p is None else (1 / (len(p) * torch.from_numpy(p).to(t.device)[t])).float()

    def remember(self, t: Tensor, losses: Tensor) -> None:
        if self.rows is None:
            return
        for k, loss in zip(t.tolist(), losses.tolist()):
            row, n = self.rows[k], int(self.rows[k, -1])
            if n == HISTORY_LENGTH:
                row[:-2] = row[1:-1].copy()
            row[min(n, HISTORY_LENGTH - 1)], row[-1] = min(loss, float(np.finfo(np.float32).max)), min(n + 1, HISTORY_LENGTH)


def kept_names(config: Config, names: Sequence[str]) -> tuple[str, ...]:
    """The names of classes that a model keeps: those of all its classes, or none."""
    return tuple(names) if config.class_cond and len(names) == config.num_classes else ()


class Trainer:
    """A model in training: weights, their averages and AdamW's moments, all flat arrays in state_dict order. start: a checkpoint is continued; bare
    weights are started from; None starts from initial_weights(config)."""

    def __init__(self, config: Config, device: torch.device | str = "cpu", start: ModelFile | None = None):
        self.device = pick_device(str(device))
        if not start or start.m is None:
            fresh = start.weights if start else initial_weights(config, self.device if self.device.type == "cuda" else "cpu")
            names = kept_names(config, start.class_names) if start else ()
            start = ModelFile(config, fresh, m=np.zeros_like(fresh), v=np.zeros_like(fresh), class_names=names)
        guard = start.state.guard if start.state.guard_kind else TrainingState.guard
        self.config, self.state = config, dataclasses.replace(start.state, guard=guard, guard_kind=1)
        self.class_names = start.class_names
        self.diffusion, self.history = Diffusion(config, self.device), LossHistory(config, start.history)
        weights, m, v, *self.emas = (torch.tensor(a, device=self.device) for a in (start.weights, start.m, start.v, *start.averages_for(config)))
        self.precision = pick_precision(config, self.device)
        usual = pick_precision(dataclasses.replace(config, precision="auto"), self.device) if self.precision == "fp8" else self.precision
        self.model, self.averaged = (build_model(config, w, self.device, usual) for w in (weights, self.emas[0]))
        if self.precision == "fp8":  # in training alone: validation and grids are as usual
            train_in_fp8(self.model, config)
        self.compiled = config.meaning("compile", {"0": False, "1": True, "auto": self.device.type == "cuda"})
        self.forward = torch.compile(self.model) if self.compiled else self.model
        self.weights = nn.Parameter(weights)
        self.weights.grad = torch.zeros_like(weights)
        for p, grad in zip(self.model.parameters(), to_state_dict(config, self.weights.grad).values()):
            p.grad = grad  # backward() adds to it in place
        betas, fused = (config.adam_beta1, config.adam_beta2), self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW([self.weights], 0, betas, config.adam_eps, config.weight_decay, fused=fused)
        updates = torch.tensor(float(self.state.updates), device=self.device if fused else "cpu")
        self.moments = self.optimizer.state[self.weights] = {"step": updates, "exp_avg": m, "exp_avg_sq": v}
        # Of each matrix that Muon updates: weight, gradient and momentum, views of the flat arrays
        views = (to_state_dict(config, flat) for flat in (weights, self.weights.grad, m))
        triples = zip(parameter_shapes(config), *(named.values() for named in views))
        chosen = [matrices for name, *matrices in triples if config.muon and muon_updates(name, matrices[0].shape)]
        self.muon_matrices = [[matrix.view(matrix.shape[0], -1) for matrix in matrices] for matrices in chosen]

    def compute_gradients(self, x0: Tensor, t: Tensor, noise: Tensor, labels: Tensor | None, conditions: Conditions) -> Tensor:
        """Leaves the gradient of the mean loss in the model's parameters (and, flat, in weights.grad); returns the samples' losses (B)."""
        B, config, losses, importance = len(x0), self.config, [], self.history.importance(t)
        self.model.train()
        self.weights.grad.zero_()
        for first in range(0, B, config.microbatch or B):
            part = slice(first, first + (config.microbatch or B))
            if config.dropout > 0:
                self.model.dropout_draw.copy_(torch.tensor([config.seed, self.state.step, first]))
            told = {name: value[part] for name, value in conditions.items()}
            shown = x0[part], t[part], noise[part], None if labels is None else labels[part], told
            loss = self.diffusion.losses(self.forward, *shown, step=self.state.step)
            ((loss * importance[part]).sum() / B).backward()
            losses.append(loss.detach())
        return torch.cat(losses)

    def train_step(self, x0: Tensor, t: Tensor, noise: Tensor, labels: Tensor | None = None, conditions: Conditions | None = None) -> StepResult:
        """One step on a batch from training_batch(config, data, state.step)."""
        config, state, raw = self.config, self.state, self.compute_gradients(x0, t, noise, labels, conditions or {})
        norm = torch.linalg.vector_norm(self.weights.grad, dtype=torch.float64)
        *losses, grad_norm = torch.cat([raw * self.history.importance(t), norm[None]]).tolist()  # where the CPU waits for the GPU
        loss, lr = sum(losses) / len(losses), learning_rate(config, state.step)
        why, state.guard = judge(state.guard, loss, grad_norm, state.bad_in_row, config.max_bad_steps > 0)
        if not why:
            if config.grad_clip > 0:
                self.weights.grad.mul_(min(1.0, config.grad_clip / (grad_norm + 1e-6)))
            self.optimizer.param_groups[0]["lr"] = lr
            self.update_weights(lr)
            for rate, ema in zip(config.ema_rate, self.emas):
                ema.lerp_(self.weights.detach(), average_share(rate, state.updates + 1))
            self.history.remember(t, raw)
            state.updates += 1
        state.step += 1
        state.bad_total += why != ""
        state.bad_in_row = state.bad_in_row + 1 if why else 0
        where = self.diffusion.quarters(t)
        quarters = [[x for x, q in zip(losses, where) if q == k] for k in range(4)]
        return StepResult(state.step, loss, lr, grad_norm, [sum(q) / len(q) if q else None for q in quarters], why)

    @torch.no_grad()
    def update_weights(self, lr: float) -> None:
        """By AdamW, and with --optimizer muon by Muon where there are matrices. There AdamW only decays the weights: it is shown no momentum and no
        gradient."""
        directions, momenta = [], []
        for _, grad, momentum in self.muon_matrices:
            momentum.mul_(MUON_MOMENTUM).add_(grad, alpha=1 - MUON_MOMENTUM)
            directions.append(orthogonal(MUON_MOMENTUM * momentum + (1 - MUON_MOMENTUM) * grad))
            momenta.append(momentum.clone())
            momentum.zero_()
            grad.zero_()
        self.optimizer.step()
        for (weight, _, momentum), direction, kept in zip(self.muon_matrices, directions, momenta):
            weight.sub_(direction, alpha=lr * muon_scale(weight))
            momentum.copy_(kept)

    @torch.no_grad()
    def validation_loss(self, data: Data) -> float:
        """Mean loss over all images, with the same t and noise every time, so that the curve is smooth, and ect's gap of the run's last step."""
        config, losses, count = self.config, [], data.count
        self.model.eval()
        for index in np.split(np.arange(count), range(config.batch_size, count, config.batch_size)):
            x0, labels, conditions = to_tensors(config, data, index, self.device)
            samples = torch.from_numpy(index).to(self.device)
            if config.cond:
                conditions["cond"] = made_pictures(config, x0, 0, samples)
            t = noise_levels(config, VAL_TIMESTEP, 0, samples)
            noise = normals(config.seed, VAL_NOISE, 0, samples, tuple(x0.shape[1:]))
            losses.append(self.diffusion.losses(self.model, x0, t, noise, labels, conditions))
        return torch.cat(losses).mean().item()

    def checkpoint(self) -> ModelFile:
        """Everything that continuing the run needs, for write_model."""
        flat = self.weights.detach(), self.emas[0], self.moments["exp_avg"], self.moments["exp_avg_sq"], *self.emas[1:]
        weights, ema, m, v, *more = (a.cpu().numpy() for a in flat)
        more_emas, history, names = tuple(more), self.history.rows, self.class_names
        return ModelFile(self.config, weights, ema, m, v, dataclasses.replace(self.state), more_emas=more_emas, history=history, class_names=names)

    def snapshot(self) -> ModelFile:
        """The two averages by power functions, whose step is the number of updates."""
        arrays = (self.emas[self.config.ema_rate.index(power)].cpu().numpy() for power in POWER_EMAS)
        return ModelFile(self.config, *arrays, state=TrainingState(step=self.state.updates), class_names=self.class_names)


# ======================================================================================================================
# a run


def next_batch(trainer: Trainer, data: Data) -> Batch:
    return training_batch(trainer.config, data, trainer.state.step, trainer.device, trainer.history.probabilities())


def shown_images(config: Config, data: Data) -> np.ndarray:
    """Which images of the data a grid shows, if it does: they are spread evenly over it, as it may be sorted by class."""
    shown = min(data.count, config.num_samples)
    return np.arange(shown) * data.count // shown


def grid_rows(config: Config, data: Data) -> list[list[float]]:
    """The numbers of a grid's images: those of --values, or of images of the data."""
    if not config.cond_dim:
        return []
    return value_rows(config) if config.values else data.values[shown_images(config, data)].tolist()


def grid_pictures(config: Config, data: Data) -> Tensor | None:
    """What a grid's images are conditioned on: pictures of the data."""
    if not config.cond_channels:
        return None
    index = shown_images(config, data)
    if config.cond:
        return made_pictures(config, torch.from_numpy(data.read_floats(index)), 0, torch.arange(len(index)))
    return torch.from_numpy(data.pictures.read_finite(index))


class GridConditions:
    """What a run's grids are conditioned on, and the images (truth) to which these pictures belong, with their labels. They are read before the run
    begins, so that no grid fails at data that are damaged or gone by then."""

    def __init__(self, config: Config, data: Data):
        self.rows, self.pictures, self.truth, self.labels = grid_rows(config, data), grid_pictures(config, data), None, None
        if self.pictures is not None:
            index = shown_images(config, data)
            self.truth = torch.from_numpy(data.read_floats(index))
            self.labels = torch.from_numpy(data.labels[index].astype(np.int64)) if config.class_cond else None


def draw_samples(trainer: Trainer, screen: Screen, shown: GridConditions, data: Data, log: Log) -> None:
    """Writes a grid of pictures by the averaged weights, and counts the copies of the training images among them. A signal gives it up."""
    config, step, rows, pictures = trainer.config, trainer.state.step, shown.rows, shown.pictures
    images = draw(trainer.averaged, config, config.num_samples, rows=rows, pictures=pictures, stop=screen.stop, labels=shown.labels)
    if images is None:
        return
    if not torch.isfinite(images).all():
        screen.tell(f"the samples of step {step} are not finite numbers: the run is broken")
    captions, parts, grid = value_captions(rows, len(images)), 1, images
    if pictures is not None:
        grid, parts = beside_pictures(images, pictures, shown.truth), 3
    save_png(grid_pixels(grid, captions=captions, parts=parts), f"{config.output_dir}/samples_{step:07d}.png")
    if (copies := count_copies(images, data, config.random_flip)) is not None:
        screen.tell(f"step {step}: {copies} of {len(images)} samples are copies of training images")
        log.write_copies(copies / len(images))


def stop_run(trainer: Trainer, kept: list[str], why: str) -> NoReturn:
    """UserError, with the checkpoint to go on from after a run that broke. kept: the run's checkpoints, oldest first."""
    told = f"the last checkpoint is {kept[-1]}" if kept else "no checkpoint was written yet"
    raise UserError(f"stopped at step {trainer.state.step}: {why}; {told}; a lower --lr or a --warmup_steps may help")


def save_checkpoint(trainer: Trainer, kept: list[str]) -> None:
    """Writes a checkpoint and adds its path to the run's. Beyond --keep_checkpoints the oldest go."""
    config, file = trainer.config, trainer.checkpoint()
    if not file.is_finite():
        stop_run(trainer, kept, "weights, their average or moments are not finite and were not saved")
    path = f"{config.output_dir}/model_{file.state.step:07d}.bin"
    write_model(path, file)
    kept.append(path)
    while 0 < config.keep_checkpoints < len(kept):
        Path(kept.pop(0)).unlink(missing_ok=True)


def save_snapshot(trainer: Trainer) -> None:
    """Writes the averages that --convert --ema_sigma_rel adds up."""
    write_model(f"{trainer.config.output_dir}/ema_{trainer.state.step:07d}.bin", trainer.snapshot())


def train(config: Config, data: Data, start: ModelFile | None, device: torch.device, preset: int) -> int:
    """A training run, in a folder without one. preset: preset_checksum of its preset. Returns the program's exit code, which after a signal is a shell's
    for it: what comes next must not go on with a model that is half trained (python train_unet.py && next)."""
    program.need_packages(("torch", "PIL", "tqdm", "matplotlib"))  # for grids and loss.png, before hours of training and not after them
    told_of_start = ""
    if start and not config.resume_checkpoint:  # --init takes the weights alone
        start, told_of_start = weights_of_init(start, config, data, device)
    data, all_val = training_and_validation_data(config, data, data if data.class_names or not start else start)
    val_data = validation_images(all_val) if all_val else None
    trainer = Trainer(config, device, start)
    trainer.class_names = kept_names(config, data.class_names or trainer.class_names)
    state, first_step = trainer.state, trainer.state.step
    held_out_crc = validation_crc(all_val) if all_val else 0
    if config.val_fraction and first_step and state.val_crc != held_out_crc:
        told_of_start = (
            f"--val_fraction {config.val_fraction:g}: the images have changed, so others are held out than before, "
            "of which the steps before have seen some; a new run would not have"
        )
    state.preset, state.val_crc = preset, held_out_crc
    state.data_images, state.data_crc, state.cond_crc = len(data.images), data.crc, data.pictures.crc if data.pictures else 0
    state.save_interval, state.sample_interval, state.num_samples = config.save_interval, config.sample_interval, config.num_samples
    announce(trainer, data, start)
    for told in filter(None, [told_of_start, *(doubts(config) if config.sample_interval else ())]):
        print(told)
    if first_step >= config.max_steps:
        more = f"--max_steps {min(2 * first_step, 2 * 10**9)}"
        command = shlex.join(["python", "train_unet.py", "--resume_checkpoint", start.path, "--output_dir", config.output_dir])
        print(f"nothing to do: step {first_step} of {config.max_steps} is reached; {command} {more} goes on")
        return 0
    shown = GridConditions(config, all_val or data) if config.sample_interval else None
    log = Log(config.output_dir)
    kept: list[str] = []  # the run's checkpoints, oldest first
    saved, last = first_step, False  # saved: the step of the newest checkpoint
    seconds, mean, good = 0.0, 0.0, 0  # seconds: a recent step's, smoothed; good: steps that were not skipped
    with stop_on_signal() as stop:
        screen = Screen(stop)
        while state.step == first_step or not (last or stop):  # one step at least, so that there is something to save
            began = time.perf_counter()
            result = trainer.train_step(*next_batch(trainer, data))
            elapsed, step = time.perf_counter() - began, state.step
            seconds = elapsed if step <= first_step + 2 else 0.95 * seconds + 0.05 * elapsed  # the first may compile
            if not result.objection:  # of good steps alone, as train_unet.cu prints it
                good += 1
                mean += (result.loss - mean) * max(10 / (good + 9), 0.02)
            last = step == config.max_steps
            validate = val_data and (last or step % config.val_interval == 0)
            val_loss = trainer.validation_loss(val_data) if validate else None
            if val_loss is not None and not math.isfinite(val_loss):
                told = f"its validation loss after step {step} is {val_loss:g}; are all values finite?"
                screen.tell(f"{val_data.path}: {told}")
                val_loss = None if math.isnan(val_loss) else val_loss
            log.write(result, 1000 * elapsed, val_loss)
            if result.objection:
                screen.tell(f"step {step} is skipped: {result.objection} ({state.bad_in_row} in a row)")
                if state.bad_in_row >= (config.max_bad_steps or Config().max_bad_steps):
                    stop_run(trainer, kept, f"{state.bad_in_row} steps in a row had to be skipped")
            if step % config.log_interval == 0 or last or val_loss is not None or time.perf_counter() - screen.shown + seconds > 10:
                screen.status(progress_line(config, result, state.bad_total, seconds, mean, val_loss))
            if config.ema_snapshots and step % config.ema_snapshots == 0:
                save_snapshot(trainer)
            # After a step that was skipped a checkpoint waits for the next good one.
            if not result.objection and step // config.save_interval > saved // config.save_interval:
                save_checkpoint(trainer, kept)
                saved = step
            if config.sample_interval and step % config.sample_interval == 0 and not last:
                draw_samples(trainer, screen, shown, data, log)
                log.plot()
        # What was not due after the step with which the run ends.
        if config.ema_snapshots and step % config.ema_snapshots > 0:
            save_snapshot(trainer)
        if saved < step:
            save_checkpoint(trainer, kept)
        if config.sample_interval and not stop:
            draw_samples(trainer, screen, shown, data, log)
        log.plot()
        told = f"done: {step} steps, {1000 * seconds:.1f} ms a step; see {config.output_dir}/"
        if stopped := "".join(stop[:1]):  # the first signal
            folder = f"{config.output_dir.rstrip('/')}_2"
            command = shlex.join(["python", "train_unet.py", "--resume_checkpoint", kept[-1], "--output_dir", folder])
            told = f"stopped by {stopped} after step {step}, which is saved; {command} goes on from there"
        screen.tell(told)
    return 128 + signal.Signals[stopped] if stopped else 0


def run(argv: list[str]) -> int:
    """Does what a command line says, and returns the exit code."""
    flags = parse_flags(argv, FLAGS, INTRO)
    check_alone()
    if "convert" in flags:
        named = [path for path in flags.pop("convert") if path]
        if len(named) != 2:
            raise UserError(f"--convert {' '.join(named)}: takes two files, not {len(named)}, as in --convert model.bin model.pt")
        source, target = named
        check_conversion(source, target)
        file = post_hoc_average(source, flags["ema_sigma_rel"]) if "ema_sigma_rel" in flags else read_model(source, flags)
        print(convert(file, target, flags))
        return 0
    if "nll" in flags:
        path = flags.pop("nll")
        config, data, start = open_measured(path, flags)
        device = pick_device(config.device)
        model = build_model(config, start.weights_to_use(config.use_ema), device, pick_precision(config, device))
        chosen = shown_images(config, data), lambda index: to_tensors(config, data, index, device)
        print(bits_per_dim(model, Diffusion(config, device), path, *chosen, sys.stderr.isatty()))
        return 0
    if "fp16_scale_growth" in flags:
        print("--fp16_scale_growth: bf16 has fp32's range, so there is no loss scale to grow")
    config, data, start = prepare_run(flags)
    device = pick_device(config.device)
    print(f"train_unet.py {SHARED['VERSION']}: preset {config.preset}")
    print("flags:", *(f"--{name} {format_value(name, value)}" for name, value in flags.items()))
    if config.init_model_only:
        check_output("--init_model_filename", config.init_model_filename, [config.data_file], is_compared)
        file = ModelFile(config, initial_weights(config), class_names=kept_names(config, data.class_names) if data else ())
        check_replaced_model("--init_model_filename", config.init_model_filename, file)
        write_model(config.init_model_filename, file)
        print(f"{config.init_model_filename}: initial weights, {parameter_count(config) / 1e6:.2f} M parameters")
    elif config.sample:
        if not start:
            raise UserError(f"--sample {config.sample}: needs --init FILE, a model to sample from")
        start = start.choose_ema(flags.get("ema_rate"))
        model = build_model(config, start.weights_to_use(config.use_ema), device, pick_precision(config, device))
        for told in doubts(config):
            print(told)
        captions = value_captions(value_rows(config) if config.cond_dim else [], config.sample)
        classes = Classes(labels_of_images(config, torch.arange(config.sample)), config.num_classes, start.class_names)
        save_samples(draw(model, config, config.sample, progress=sys.stderr.isatty()), config.output, captions, classes)
        print(f"{config.output}: {config.sample} images with {config.sampler}")
    else:
        chosen = "preset" in flags or (config.resume_checkpoint and preset_of_run(start.state.preset) == (config.preset, False))
        return train(config, data, start, device, preset_checksum(config.preset, not chosen))
    return 0


if __name__ == "__main__":
    sys.exit(run_program("train_unet", run))
