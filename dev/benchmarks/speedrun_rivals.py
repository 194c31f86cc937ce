"""What dev/benchmarks/speedrun.py compares ./train_unet with: four well-known ways to train a diffusion model, as their authors publish them.

Each rival keeps its own model, objective, optimizer, schedule, average of the weights and sampler. What would only cost it time is left out: all images
wait in the GPU's memory, cuDNN chooses by trying, and a step's network is replayed as CUDA graphs, forward and backward. torch.compile would
take minutes before the first step of networks of this size, longer than the whole run; guided-diffusion's is compiled all the same, as train_unet.py
does it. Where the authors leave a choice, it is the one that is faster. Samples' seconds are not counted.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import math
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common.config import make_config
from common.data_files import open_data
from common.flags import FLAGS, parse_flags
from common.program import UserError, how_to_install
from train_unet import Trainer, draw, training_batch

WARM_UP_STEPS = 20  # their seconds aren't counted: they compile, or let cuDNN try
PACE_STEPS = 30  # how long a step takes is measured with these
MOST_AT_ONCE = 1024  # images of one batch of a sampler


class Pictures:
    """The training images (N, C, H, W) and their labels (N, classes), one-hot, on the device, and random batches of them."""

    def __init__(self, data_file: str, device: torch.device):
        self.path, self.device, data = data_file, device, open_data(data_file)
        self.images = torch.from_numpy(data.images.astype(np.float32) / 127.5 - 1).to(device)
        self.labels = torch.zeros(len(self.images), data.num_classes, device=device)
        if data.labels is not None:
            self.labels = F.one_hot(torch.from_numpy(data.labels.astype(np.int64)), data.num_classes).float().to(device)

    def numbers(self, size: int) -> Iterator[torch.Tensor]:
        """Endless (size): which images are in a batch, every epoch in a new order."""
        while True:
            for index in torch.randperm(len(self.images), device=self.device).split(size):
                if len(index) == size:  # other sizes would be compiled anew
                    yield index

    def batches(self, size: int) -> Iterator[torch.Tensor]:
        """Endless (size, C, H, W) in [-1, 1], half of the images mirrored."""
        for index in self.numbers(size):
            mirrored = torch.rand(size, 1, 1, 1, device=self.device) < 0.5
            yield torch.where(mirrored, self.images[index].flip(3), self.images[index])


def replay_on_gpu(network: nn.Module, *example: torch.Tensor, autocast: bool = True) -> None:
    """Makes network(*example) and its backward pass CUDA graphs, so that no step waits for Python to launch its kernels."""
    device = example[0].device
    if device.type == "cuda":
        with torch.autocast("cuda", torch.float16, enabled=autocast, cache_enabled=False):
            torch.cuda.make_graphed_callables(network, example)


class Rival:
    """A model in training. total: how many steps the whole run has, as far as that is known."""

    name = ""
    packages: tuple[str, ...] = ()  # that must be installed, by the names of their modules
    install = ""  # what pip calls them
    repository = ""  # where they are, if pip does not know them

    def __init__(self, pictures: Pictures, seed: int):
        self.pictures, self.device, self.seed, self.total = pictures, pictures.device, seed, 100_000
        on_gpu = self.device.type == "cuda"
        self.half = torch.autocast(self.device.type, torch.float16, enabled=on_gpu)
        self.dtype = torch.float16 if on_gpu else torch.float32
        torch.manual_seed(seed)
        self.build()

    def build(self) -> None:
        raise NotImplementedError

    def train(self, steps: int) -> None:
        """So many steps more."""
        raise NotImplementedError

    def draw(self, count: int) -> list[torch.Tensor]:
        """Samples (count, C, H, W) in [-1, 1]; several sets if there are several weights that a user may take. The best of them counts."""
        raise NotImplementedError


def in_batches(count: int, draw: Any) -> torch.Tensor:
    """draw(size) until there are count images, all batches of one size, so that nothing is compiled twice."""
    batches = math.ceil(count / MOST_AT_ONCE)
    size = math.ceil(count / batches)
    return torch.cat([draw(size).float().cpu() for _ in range(batches)])[:count]


# ----------------------------------------------------------------------------------------------------------------------


class Lucidrains(Rival):
    """https://github.com/lucidrains/denoising-diffusion-pytorch: its Trainer with its defaults (batches of 16, Adam, learning rate 1e-4, EMA 0.995,
    mirrored images), the README's model, its mixed precision, and the README's sampler: 250 steps of ddim."""

    name = "lucidrains"
    packages = ("denoising_diffusion_pytorch", "ema_pytorch", "accelerate", "einops", "torchvision", "scipy")
    install = "denoising-diffusion-pytorch"
    model: dict[str, Any] = {"dim": 64, "dim_mults": (1, 2, 4, 8), "flash_attn": True}
    sampling_steps = 250

    def build(self) -> None:
        from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet

        images = self.pictures.images
        model = Unet(**self.model, channels=images.shape[1])
        diffusion = GaussianDiffusion(model, image_size=tuple(images.shape[2:]), timesteps=1000, sampling_timesteps=self.sampling_steps)
        with tempfile.TemporaryDirectory() as folder:
            for i in range(100):  # it wants a folder of so many pictures, but gets them from the GPU's memory
                pathlib.Path(folder, f"{i}.png").touch()
            settings = {"amp": self.device.type == "cuda", "calculate_fid": False, "save_and_sample_every": 10**9, "results_folder": folder}
            self.trainer = Trainer(diffusion, folder, **settings)
        self.trainer.dl = ((batch + 1) / 2 for batch in self.pictures.batches(self.trainer.batch_size))
        self.replay()

    def replay(self) -> None:
        network = self.trainer.model.model
        noisy = torch.zeros(self.trainer.batch_size, *self.pictures.images.shape[1:], device=self.device)
        replay_on_gpu(network, noisy, torch.zeros(len(noisy), dtype=torch.long, device=self.device))
        forward = network.forward  # without self-conditioning, the third argument is None, which a graph doesn't take
        network.forward = lambda x, time, x_self_cond=None: forward(x, time)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield

    def train(self, steps: int) -> None:
        self.trainer.train_num_steps = self.trainer.step + steps
        with self.quiet():
            self.trainer.train()

    def draw(self, count: int) -> list[torch.Tensor]:
        average = self.trainer.ema.ema_model.eval()
        with self.quiet(), self.half:
            return [2 * in_batches(count, average.sample) - 1]


class AnswerAlone(nn.Module):
    """A network of diffusers that returns a tensor."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, noisy: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.network(noisy, t, return_dict=False)[0]


class Diffusers(Rival):
    """https://github.com/huggingface/diffusers, examples/unconditional_image_generation: its model, noise, optimizer, schedule (a cosine over the
    whole run) and average, with the README's flags and --mixed_precision fp16. Its own sampler takes 1,000 steps, for which there is no time: this is
    DDIMPipeline's, with its 50."""

    name = "diffusers"
    packages = ("diffusers",)
    install = "diffusers"
    model: dict[str, Any] = {
        "layers_per_block": 2,
        "block_out_channels": (128, 128, 256, 256, 512, 512),
        "down_block_types": ("DownBlock2D", "DownBlock2D", "DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D", "UpBlock2D", "UpBlock2D"),
    }
    batch_size, lr, warm_up, sampling_steps = 16, 1e-4, 500, 50

    def build(self) -> None:
        from diffusers import DDIMScheduler, DDPMScheduler, UNet2DModel
        from diffusers.training_utils import EMAModel

        _, channels, height, width = self.pictures.images.shape
        network = UNet2DModel(sample_size=(height, width), in_channels=channels, out_channels=channels, **self.model)
        self.network, self.drawn_from = network.to(self.device), copy.deepcopy(network).to(self.device).eval()
        self.scheduler = DDPMScheduler(num_train_timesteps=1000, beta_schedule="linear")
        self.sampler = DDIMScheduler.from_config(self.scheduler.config)
        # foreach: the same numbers by fewer kernels
        self.average = EMAModel(self.network.parameters(), decay=0.9999, use_ema_warmup=True, inv_gamma=1.0, power=3 / 4, foreach=True)
        self.average.to(self.device)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=self.lr, betas=(0.95, 0.999), weight_decay=1e-6, eps=1e-8)
        self.rate = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate_at)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.device.type == "cuda")
        self.data = self.pictures.batches(self.batch_size)
        self.answer = AnswerAlone(self.network)
        noisy = torch.zeros(self.batch_size, channels, height, width, device=self.device, dtype=self.dtype)
        replay_on_gpu(self.answer, noisy, torch.zeros(self.batch_size, dtype=torch.long, device=self.device))

    def rate_at(self, step: int) -> float:
        """Its get_cosine_schedule_with_warmup, whose total may change."""
        if step < self.warm_up:
            return step / self.warm_up
        progress = (step - self.warm_up) / max(1, self.total - self.warm_up)
        return 0.5 * (1 + math.cos(math.pi * min(progress, 1)))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            clean = next(self.data).to(self.dtype)
            noise = torch.randn_like(clean)
            t = torch.randint(0, 1000, (len(clean),), device=self.device)
            noisy = self.scheduler.add_noise(clean, noise, t)
            with self.half:
                answer = self.answer(noisy, t)
            self.scaler.scale(F.mse_loss(answer.float(), noise.float())).backward()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.rate.step()
            self.optimizer.zero_grad()
            self.average.step(self.network.parameters())

    @torch.no_grad()
    def draw_batch(self, size: int) -> torch.Tensor:
        x = torch.randn(size, *self.pictures.images.shape[1:], device=self.device)
        self.sampler.set_timesteps(self.sampling_steps)
        for t in self.sampler.timesteps:
            with self.half:
                answer = self.drawn_from(x, t.to(self.device).expand(size)).sample
            x = self.sampler.step(answer.float(), t, x).prev_sample
        return x.clamp(-1, 1)

    def draw(self, count: int) -> list[torch.Tensor]:
        self.average.copy_to(self.drawn_from.parameters())
        return [in_batches(count, self.draw_batch)]


class Guided(Rival):
    """https://github.com/openai/guided-diffusion: the model and loss that its scripts have without flags, but for --learn_sigma True and
    --noise_schedule cosine, which all of its published 64x64 models have; batches of 128 and learning rate 1e-4, to which it refers for training; its
    25 steps of ddim. train_unet.py computes it, whose mathematics is the same. Its average of 0.9999 remembers 10,000 steps and begins with the initial
    weights; samples come from that and from the weights themselves."""

    name = "guided-diffusion"
    flags = (
        "--preset adm --learn_sigma True --noise_schedule cosine --batch_size 128 --ema_rate 0.9999 --random_flip True"
        " --sampler ddim --eta 0 --timestep_respacing ddim25"
    )

    def build(self) -> None:
        self.data = open_data(self.pictures.path)
        height = self.data.images.shape[2]
        words = self.flags.split()
        if height < 64 and "--channel_mult" not in words:
            words += ["--channel_mult", "1,2,2,2"]  # improved-diffusion's of 32x32
        self.config = make_config(parse_flags([*words, "--seed", str(self.seed), "--data_file", self.pictures.path], FLAGS), self.data)
        self.trainer = Trainer(self.config, self.device)
        self.average = self.trainer.emas[0].clone()  # train_unet.py's own average leaves out the initial weights
        self.drawn_from = copy.deepcopy(self.trainer.averaged)

    @torch.no_grad()
    def train(self, steps: int) -> None:
        for _ in range(steps):
            with torch.enable_grad():
                self.trainer.train_step(*training_batch(self.config, self.data, self.trainer.state.step, self.device))
            self.average.lerp_(self.trainer.weights, 1 - self.config.ema_rate[0])

    @torch.no_grad()
    def draw(self, count: int) -> list[torch.Tensor]:
        found, config = [], copy.copy(self.config)
        self.trainer.emas[0].copy_(self.average)
        for source in self.trainer.averaged, self.trainer.model:
            for mine, its in zip(self.drawn_from.parameters(), source.parameters()):
                mine.copy_(its)
            found.append(in_batches(count, lambda size: self.draw_batch(config, size)))
        return found

    def draw_batch(self, config: Any, size: int) -> torch.Tensor:
        config.batch_size, config.seed = size, config.seed + 1  # other noise for every batch
        with self.half:  # as its scripts sample with --use_fp16 True
            return draw(self.drawn_from, config, size)


class EDM(Rival):
    """https://github.com/NVlabs/edm: its network, loss, augmentation and training loop with train.py's defaults, which are those of CIFAR-10 (DDPM++, batches
    of 512, Adam, a learning rate that rises to 1e-3 over ten million images, an average with a half-life of half a million), conditional if there are
    classes, with --fp16 True, and generate.py's 18 steps of Heun's method, of which each but the last looks twice."""

    name = "EDM"
    packages = ("dnnlib", "torch_utils")
    repository = "https://github.com/NVlabs/edm"
    model: dict[str, Any] = {
        "model_type": "SongUNet", "embedding_type": "positional", "encoder_type": "standard", "decoder_type": "standard", "channel_mult_noise": 1,
        "resample_filter": [1, 1], "model_channels": 128, "channel_mult": [2, 2, 2], "augment_dim": 9, "dropout": 0.13,
    }  # fmt: skip
    batch_size, lr, warm_up_images, half_life, rise = 512, 1e-3, 10_000_000, 500_000, 0.05
    loss_scale = 100  # --ls, of its runs with --fp16 True
    sampling_steps, sigma_min, sigma_max, rho = 18, 0.002, 80, 7

    def build(self) -> None:
        from training.augment import AugmentPipe
        from training.loss import EDMLoss
        from training.networks import EDMPrecond

        _, channels, height, width = self.pictures.images.shape
        if height != width:
            raise UserError(f"--rivals edm: its network takes square images; these have {height}x{width} pixels")
        shape = {"img_resolution": height, "img_channels": channels, "label_dim": self.pictures.labels.shape[1]}
        self.network = EDMPrecond(**shape, use_fp16=self.dtype == torch.float16, **self.model).to(self.device)
        self.average = copy.deepcopy(self.network).eval().requires_grad_(False)
        self.augment, self.loss = AugmentPipe(p=0.12, xflip=1e8, yflip=1, scale=1, rotate_frac=1, aniso=1, translate_frac=1), EDMLoss()
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=self.lr)
        self.numbers, self.seen = self.pictures.numbers(self.batch_size), 0
        self.replay()

    def replay(self) -> None:
        network, size = self.network.model, self.batch_size
        noisy = torch.zeros(size, *self.pictures.images.shape[1:], device=self.device, dtype=self.dtype)
        sigma, changes = torch.zeros(size, device=self.device), torch.zeros(size, self.model["augment_dim"], device=self.device)
        none = torch.zeros(size, max(1, self.pictures.labels.shape[1]), device=self.device)  # a graph takes no None in the place of labels
        replay_on_gpu(network, noisy, sigma, none, changes, autocast=False)
        forward = network.forward  # a graph takes no names, either
        network.forward = lambda x, t, class_labels, augment_labels: forward(x, t, none if class_labels is None else class_labels, augment_labels)

    def train(self, steps: int) -> None:
        mine, its = list(self.average.parameters()), list(self.network.parameters())
        for _ in range(steps):
            index = next(self.numbers)
            loss = self.loss(self.network, self.pictures.images[index], self.pictures.labels[index], self.augment)
            self.optimizer.zero_grad(set_to_none=True)
            (loss.sum() * (self.loss_scale / self.batch_size)).backward()
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr * min(self.seen / self.warm_up_images, 1)
            for p in its:
                if p.grad is not None:
                    torch.nan_to_num(p.grad, nan=0, posinf=1e5, neginf=-1e5, out=p.grad)
            self.optimizer.step()
            half_life = min(self.half_life, self.seen * self.rise)
            with torch.no_grad():
                torch._foreach_lerp_(mine, its, 1 - 0.5 ** (self.batch_size / max(half_life, 1e-8)))
            self.seen += self.batch_size

    @torch.no_grad()
    def draw_batch(self, size: int) -> torch.Tensor:
        ramp = torch.arange(self.sampling_steps, dtype=torch.float64, device=self.device) / (self.sampling_steps - 1)
        first, last = self.sigma_max ** (1 / self.rho), self.sigma_min ** (1 / self.rho)
        sigmas = F.pad((first + ramp * (last - first)) ** self.rho, (0, 1))  # the last is 0
        classes = self.pictures.labels[torch.randint(len(self.pictures.labels), (size,), device=self.device)]
        x = torch.randn(size, *self.pictures.images.shape[1:], dtype=torch.float64, device=self.device) * sigmas[0]
        for here, there in zip(sigmas, sigmas[1:]):
            slope = (x - self.average(x, here, classes)) / here
            ahead = x + (there - here) * slope
            if there > 0:
                slope = (slope + (ahead - self.average(ahead, there, classes)) / there) / 2
            x = x + (there - here) * slope
        return x.clamp(-1, 1)

    def draw(self, count: int) -> list[torch.Tensor]:
        return [in_batches(count, self.draw_batch)]


RIVALS: dict[str, type[Rival]] = {"lucidrains": Lucidrains, "diffusers": Diffusers, "guided": Guided, "edm": EDM}


# ----------------------------------------------------------------------------------------------------------------------


def check(names: list[str]) -> None:
    """UserError for a rival that isn't known, or whose packages are missing."""
    for name in names:
        if name not in RIVALS:
            raise UserError(f"--rivals {name}: must be some of {', '.join(RIVALS)}, with commas")
        for package in RIVALS[name].packages:
            if importlib.util.find_spec(package) is None:
                told = how_to_install(package, RIVALS[name].install)
                if repository := RIVALS[name].repository:
                    told = f"Python finds no {package}; clone {repository} and name its folder in PYTHONPATH"
                raise UserError(f"--rivals {name}: {told}")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(rival: Rival, steps: int) -> float:
    synchronize(rival.device)
    start = time.perf_counter()
    rival.train(steps)
    synchronize(rival.device)
    return time.perf_counter() - start


def halvings(total: int, moments: int) -> list[int]:
    """After how many of total steps quality is measured: at the end, at half of it, at a quarter, and so on, moments times at most; ascending."""
    return sorted({max(1, total >> halved) for halved in range(moments)})


def race(name: str, data_file: str, seed: int, seconds: float, moments: int, device: torch.device) -> Iterator[tuple[int, float, Rival]]:
    """Trains a rival for so many seconds, and stops at so many moments, as `halvings` places them: the step, the seconds until then, and the rival to draw from."""
    torch.backends.cudnn.benchmark = True
    rival = RIVALS[name](Pictures(data_file, device), seed)
    rival.train(WARM_UP_STEPS)
    took = seconds_of(rival, PACE_STEPS)
    done = WARM_UP_STEPS + PACE_STEPS
    rival.total = WARM_UP_STEPS + max(PACE_STEPS + moments, round(seconds / (took / PACE_STEPS)))
    for until in halvings(rival.total, moments):
        if until <= done:
            continue  # the steps that told the pace went further
        took += seconds_of(rival, until - done)
        done = until
        yield done, took, rival
