"""How fast JAX and PyTorch are in FP8, where a UNet spends its time: chains of 3x3 convolutions, in their bf16 and in their FP8.

    python dev/benchmarks/fp8_rivals.py                     adm64's four shapes, 32 images, on the GPU
    python dev/benchmarks/fp8_rivals.py --batch_size 128

Each chain has six convolutions of one shape with weights of their own; what one writes, the next one reads. The table has microseconds a convolution.

- JAX: lax.conv_general_dilated (NHWC) of operands in e4m3 that are widened and scaled, the pattern that XLA rewrites into cuDNN's FP8 convolution. The
  last column says which of cuDNN's calls are in the compiled program, so one sees whether it was rewritten.
- PyTorch has no FP8 convolution (cuDNN through torch.nn.functional.conv2d takes fp32, fp16 and bf16), but has an FP8 matrix product. So the 3x3
  squares of pixels are written one after another (nine times the input, in bytes) and multiplied: torch._scaled_mm.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from command_line import Parser

from common.program import UserError, run_program

LAYERS = 6
TURNS = 10
CHANNELS = {64: 192, 32: 384, 16: 576, 8: 768}  # of adm64's levels, by their size
LARGEST = 448.0  # of e4m3


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__ or "")
    parser.add_argument("--batch_size", type=int, default=32, help="images (default: 32)")
    parser.add_argument(
        "--sizes", default="64,32,16,8", help="some of the shapes, by their size (default: 64,32,16,8); each takes JAX a minute to compile"
    )
    return parser.parse_args(argv)


def median_us(work: Callable[[], None], wait: Callable[[], None]) -> float:
    """Microseconds of one convolution: the median of TURNS chains."""
    times = []
    for turn in range(TURNS + 2):
        start = time.perf_counter()
        work()
        wait()
        if turn >= 2:
            times.append((time.perf_counter() - start) * 1e6 / LAYERS)
    return statistics.median(times)


Row = tuple[str, float, str]  # name, microseconds a convolution, what there is to say


def jax_rows(batch: int, size: int, channels: int) -> Iterator[Row]:
    """JAX's chains, with cuDNN's calls in the compiled program."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    import jax.numpy as jnp
    from jax import lax

    key = jax.random.key(0)
    x = jax.random.normal(key, (batch, size, size, channels), jnp.float32)
    weights = [jax.random.normal(jax.random.fold_in(key, i), (3, 3, channels, channels), jnp.float32) / (9 * channels) ** 0.5 for i in range(LAYERS)]
    f8 = jnp.float8_e4m3fn
    labels = ("NHWC", "HWIO", "NHWC")

    def in_bf16(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        for w in weights:
            x = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=labels)
        return x

    def in_fp8(x: jax.Array, weights: list[jax.Array], wide: jnp.dtype, between: jnp.dtype, scale: jax.Array) -> jax.Array:
        for w in weights:
            y = lax.conv_general_dilated(
                x.astype(wide) * scale.astype(wide), w.astype(wide) * scale.astype(wide), (1, 1), "SAME", dimension_numbers=labels
            )
            if between != f8:
                y = y.astype(between)
            x = jnp.clip(y * scale.astype(y.dtype), -LARGEST, LARGEST).astype(f8)
        return x

    one = jnp.float32(1)
    eights = [w.astype(f8) for w in weights]
    chains: list[tuple[str, Callable[..., jax.Array], tuple[object, ...]]] = [
        ("JAX, bf16", in_bf16, (x.astype(jnp.bfloat16), [w.astype(jnp.bfloat16) for w in weights])),
        ("JAX, e4m3 (through fp32)", lambda x, w, s: in_fp8(x, w, jnp.float32, f8, s), (x.astype(f8), eights, one)),
        ("JAX, e4m3 (through bf16)", lambda x, w, s: in_fp8(x, w, jnp.bfloat16, f8, s), (x.astype(f8), eights, one)),
        ("JAX, e4m3, sums as bf16", lambda x, w, s: in_fp8(x, w, jnp.float32, jnp.bfloat16, s), (x.astype(f8), eights, one)),
    ]
    for name, chain, arguments in chains:
        try:
            compiled = jax.jit(chain).lower(*arguments).compile()
            calls = sorted(set(re.findall(r'custom_call_target="(__cudnn[^"]*)"', compiled.as_text())))
            eight = re.findall(r"f8e4m3fn\[[0-9,]*\][^=]*custom-call\(", compiled.as_text())
            note = " ".join(calls) + (" of e4m3" if eight else "")
            microseconds = median_us(lambda: compiled(*arguments).block_until_ready(), lambda: None)
            yield name, microseconds, note
        except Exception as error:  # XLA's own errors have many types
            yield name, float("nan"), str(error).split("\n")[0][:150]


def torch_rows(batch: int, size: int, channels: int) -> Iterator[Row]:
    """PyTorch's chains, each replayed as one CUDA graph."""
    import torch
    import torch.nn.functional as F

    device = torch.device("cuda")
    torch.manual_seed(0)
    x = torch.randn(batch, channels, size, size, device=device)
    weights = [torch.randn(channels, channels, 3, 3, device=device) / (9 * channels) ** 0.5 for _ in range(LAYERS)]
    f8 = torch.float8_e4m3fn
    one = torch.ones((), device=device)

    bf16_input = x.bfloat16().contiguous(memory_format=torch.channels_last)
    bf16_weights = [w.bfloat16().contiguous(memory_format=torch.channels_last) for w in weights]

    def in_bf16() -> torch.Tensor:
        y = bf16_input
        for w in bf16_weights:
            y = F.conv2d(y, w, padding=1)
        return y

    fp8_input = x.permute(0, 2, 3, 1).contiguous().to(f8)
    fp8_weights = [w.permute(0, 2, 3, 1).reshape(channels, 9 * channels).contiguous().to(f8) for w in weights]

    def one_product(y: torch.Tensor, w: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        padded = F.pad(y.view(torch.uint8), (0, 0, 1, 1, 1, 1))
        squares = torch.cat([padded[:, i : i + size, j : j + size] for i in range(3) for j in range(3)], 3)
        rows = squares.reshape(-1, 9 * channels).view(f8)
        out = torch._scaled_mm(rows, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
        return out.clamp(-LARGEST, LARGEST).to(f8).view(batch, size, size, channels)

    product = torch.compile(one_product, dynamic=False)  # each shape is compiled for itself

    def in_fp8() -> torch.Tensor:
        y = fp8_input
        for w in fp8_weights:
            y = product(y, w, one)
        return y

    torch.backends.cudnn.benchmark = True
    for name, chain in (("PyTorch, bf16", in_bf16), ("PyTorch, e4m3 by _scaled_mm", in_fp8)):
        try:
            stream = torch.cuda.Stream()
            with torch.no_grad(), torch.cuda.stream(stream):
                for _ in range(3):
                    chain()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    chain()
            yield name, median_us(graph.replay, torch.cuda.synchronize), ""
        except Exception as error:  # of the compiler, of CUDA
            yield name, float("nan"), str(error).split("\n")[0][:150]


def run(argv: list[str]) -> None:
    args = parse_arguments(argv)
    if args.batch_size < 1:
        raise UserError(f"--batch_size {args.batch_size}: must be at least 1")
    sizes = args.sizes.split(",")
    for size in sizes:
        if size not in map(str, CHANNELS):
            raise UserError(f"--sizes {size}: must be some of {', '.join(map(str, CHANNELS))}, with commas")
    import torch

    if not torch.cuda.is_available():
        raise UserError("fp8_rivals: needs an NVIDIA GPU that PyTorch can use")
    print("| shape | chain | us a convolution | calls |\n| --- | --- | --- | --- |")
    for size in map(int, sizes):
        channels = CHANNELS[size]
        for name, us, note in itertools.chain(torch_rows(args.batch_size, size, channels), jax_rows(args.batch_size, size, channels)):
            print(f"| {args.batch_size} x {channels} at {size}x{size} | {name} | {us:.1f} | {note} |", flush=True)


if __name__ == "__main__":
    sys.exit(run_program("fp8_rivals", run))
