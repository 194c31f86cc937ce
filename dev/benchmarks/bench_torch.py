"""PyTorch by torch.compile with autocast, the step one CUDA graph, timed: the rival of dev/benchmarks/bench.py's table.

  python dev/benchmarks/bench_torch.py --preset unet64 --batch_size 32 --bench 20

prints a line of JSON. torchrun --nproc_per_node 2 starts it on two GPUs, which share the batch: DistributedDataParallel. It takes train_unet.py's flags, and --bench (how many), --bench_mode and --bench_parts.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from common import program
from common.flags import FLAGS, Config, flag, parse_flags
from common.program import UserError, run_program


@dataclass
class Options:
    """The flags that are not train_unet.py's."""

    bench: int = flag(20, "time this many training steps and forward passes on synthetic data", 1, 10**6)
    bench_mode: str = flag("auto", "what is timed; graph: compiled, one CUDA graph; auto: that on a GPU", choices="auto|eager|compile|graph")
    bench_parts: str = flag("both", "what of it; one alone compiles faster", choices="both|step|forward")


OWN = {f.name: f for f in dataclasses.fields(Options)}

if __name__ == "__main__":  # before PyTorch
    program.begin("bench_torch", lambda argv: parse_flags(argv, OWN | FLAGS, __doc__), program.TRAINING)

import json
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from common.config import make_config, pick_device, pick_precision
from common.model import UNetModel
from train_unet import Diffusion, muon_updates

RANKS = int(os.environ.get("WORLD_SIZE", 1))


def bench(config: Config, options: Options, device: torch.device, precision: str) -> dict[str, Any]:
    """Milliseconds (median, 10th and 90th percentile) of options.bench training steps and forward passes on synthetic data, and the step's
    peak memory.

    This is what makes PyTorch fast, not the twin's Trainer. "graph": the loss is compiled, then the whole step (drawing t and noise, q_sample,
    forward, loss, backward, fused AdamW) is captured once in a CUDA graph and replayed, since launching its kernels one by one takes longer
    than running them; likewise the forward pass, as a sampler needs it. Channels last, cuDNN chooses by trying, nothing waits for the CPU.
    It leaves out what the Trainer adds: the guard, clipping, and the average of the weights. With several ranks each takes its part of the
    batch, and DistributedDataParallel averages the gradients while the backward pass goes on."""
    on_gpu = device.type == "cuda"
    mode = options.bench_mode if options.bench_mode != "auto" else "graph" if on_gpu else "eager"
    if mode == "graph" and not on_gpu:
        raise UserError("--bench_mode graph: needs a GPU; eager and compile work without")
    if config.objective != "ddpm":
        raise UserError(f"--objective {config.objective}: --bench times the loss of ddpm; leave the flag out")
    if config.muon and not hasattr(torch.optim, "Muon"):
        raise UserError(f"--optimizer muon: PyTorch {torch.__version__} has no torch.optim.Muon, 2.9 has; use --optimizer adamw")
    torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32 = True, False
    torch.manual_seed(config.seed)
    compiled: Callable = (lambda f: f) if mode == "eager" else torch.compile
    B, C, steps, diffusion = config.batch_size // RANKS, config.in_channels, config.diffusion_steps, Diffusion(config, device)
    with device:  # PyTorch's own initial weights, none of which are zero: zeros would compute faster than what training meets
        model = UNetModel(config).to(device, memory_format=torch.channels_last)
        x0 = (2 * torch.rand(B, C, *config.image_size) - 1).to(memory_format=torch.channels_last)
        labels = torch.randint(max(config.num_classes, 1), (B,))
    model.bf16 = precision == "bf16"
    network = model if RANKS == 1 else torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    name = f"PyTorch {mode}" if RANKS == 1 else f"PyTorch DDP {mode}"
    result: dict[str, Any] = {"program": name, "model": config.preset, "gpus": RANKS, "batch": config.batch_size, "precision": precision}

    def part_loss(x0: torch.Tensor, t: torch.Tensor, noise: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        level = diffusion.level(t).float32()
        out = network(level.signal * x0 + level.sigma * noise, t.float(), labels)
        return F.mse_loss(out[:, :C], noise) * (len(x0) / B)

    def measure(work: Callable[[], Any]) -> list[float]:
        ms = time_calls(work, options.bench, device, mode == "graph")
        return [round(float(q), 4) for q in np.percentile(ms, [50, 10, 90])]

    def measure_steps() -> list[float]:
        betas, compiled_loss = (config.adam_beta1, config.adam_beta2), compiled(part_loss)
        settings: dict[str, Any] = {"eps": config.adam_eps, "weight_decay": config.weight_decay, "fused": on_gpu, "capturable": mode == "graph"}
        matrices = as_matrices(model.train()) if config.muon else {}
        optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight not in matrices], config.lr, betas, **settings)
        muon = torch.optim.Muon(matrices.values(), config.lr, config.weight_decay) if matrices else None

        def step() -> None:
            batch = x0, torch.randint(steps, (B,), device=device), torch.randn_like(x0), labels
            model.zero_grad()
            for part in zip(*(values.split(config.microbatch or B) for values in batch)):
                compiled_loss(*part).backward()
            optimizer.step()
            for weight, matrix in matrices.items():
                matrix.grad = as_matrix(weight.grad)
            if muon:
                muon.step()

        return measure(step)

    @torch.no_grad()
    def measure_forward() -> list[float]:
        forward, t = compiled(model.eval()), torch.randint(steps, (B,), device=device).float()
        return measure(lambda: forward(x0, t, labels))

    result["step_ms"] = measure_steps() if options.bench_parts != "forward" else None
    memory = torch.cuda.max_memory_allocated(device) if on_gpu else None  # of the forward pass only if there is no step
    model.zero_grad()
    result["forward_ms"] = measure_forward() if options.bench_parts != "step" else None
    if on_gpu and options.bench_parts == "forward":
        memory = torch.cuda.max_memory_allocated(device)
    result["memory_gib"] = round(memory / 2**30, 3) if memory else None
    return result


def as_matrix(weight: torch.Tensor) -> torch.Tensor:
    """A weight (O, I, ...) as a matrix (O, all else), in the order in which its values lie in memory: torch.optim.Muon takes nothing else."""
    last = (0, *range(2, weight.ndim), 1)  # (O, height, width, I) of a convolution in channels_last
    return (weight if weight.is_contiguous() else weight.permute(last)).reshape(len(weight), -1)


def as_matrices(model: UNetModel) -> dict[torch.Tensor, torch.nn.Parameter]:
    """The weights that --optimizer muon has Muon update, each with a matrix of the same memory."""
    muons = [weight for name, weight in model.named_parameters() if muon_updates(name, weight.shape)]
    found = {weight: torch.nn.Parameter(as_matrix(weight.detach())) for weight in muons}
    assert all(matrix.data_ptr() == weight.data_ptr() for weight, matrix in found.items())
    return found


def time_calls(work: Callable[[], Any], count: int, device: torch.device, capture: bool) -> list[float]:
    """Milliseconds of each of count calls, after some to warm up; the GPU's peak memory counts from after these. capture: of a CUDA graph."""
    if device.type != "cuda":
        work()  # compiles
        times = [time.perf_counter()]
        for _ in range(count):
            work()
            times.append(time.perf_counter())
        return [1000 * (after - before) for before, after in zip(times, times[1:])]
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # as PyTorch wants it before a capture
            for _ in range(3 if RANKS == 1 else 11):  # as DistributedDataParallel wants it
                work()  # compiles, lets cuDNN choose, makes the optimizer's state
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        if capture:
            with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
                work()
            work = graph.replay
        for _ in range(5):
            work()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            work()
            mark.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in zip(marks, marks[1:])]


def run(argv: list[str]) -> None:
    flags = parse_flags(argv, OWN | FLAGS, __doc__)
    options = Options(**{name: flags.pop(name) for name in OWN if name in flags})
    config = make_config(flags)
    device = pick_device(os.environ["LOCAL_RANK"] if RANKS > 1 and torch.cuda.is_available() else config.device)
    if RANKS > 1:
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # its thread would ask for events while a graph is captured
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.cuda.set_stream(torch.cuda.Stream())  # DistributedDataParallel must not be made on the stream that graphs can't capture
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    result = bench(config, options, device, pick_precision(config, device))
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(result), flush=True)
    if RANKS > 1:
        os._exit(0)  # a process group waits for graphs that captured it


if __name__ == "__main__":
    sys.exit(run_program("bench_torch", run))
