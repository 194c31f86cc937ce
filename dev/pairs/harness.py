"""What the Python halves of the pairs share: run a binary on random inputs, compare every output with PyTorch in float64.

A pair NAME.py says what its inputs are, what PyTorch makes of them, and how long the sums are; then main() gives it

    python dev/pairs/NAME.py             build dev/NAME, check every case
    python dev/pairs/NAME.py --bench     run dev/NAME's benchmark with PyTorch's time for the same shape beside each row

Names tie the two halves together. An output `out` has its incoming gradient in the input `dout`; the gradient of an
input `x` comes back as `dx`. If the inputs hold an array `dx` too, it is an addend, likewise `dx_add`. `out.v0` is
version 0's `out`.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

DEV = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(DEV.parent))

from common.random_numbers import DROPOUT, random_words

Case = dict[str, Any]
Timed = dict[str, Callable[[], Any]]  # passes by name: what to time
Arrays = dict[str, np.ndarray]
Tensors = dict[str, torch.Tensor]

# ----------------------------------------------------------------------------------------------------------------------
# how far a right answer can be off

# Unit roundoff: rounding to nearest changes a number by at most this factor (24 and 8 bits). A GPU build may store
# activations and convolution weights in bf16; products (of two 8-bit numbers: exact in float32) and sums are float32 all
# the same. So inputs that are stored in bf16 are made exact in bf16, both sides start from the same numbers, and what
# is allowed on top of float32's errors is one EPS_BF16 for each time that a kernel rounds to bf16 on the way: when it
# stores a result, and where a pair says so (Pair.inside). Roundings are independent, so their variances add; an
# element's error is spread over +-EPS_BF16, so that the norm of an array's is expected at 0.4 of that.
EPS = 2.0**-24
EPS_BF16 = 2.0**-8


EXACT = EPS / 100  # allowed where nothing is rounded but on its way into memory; what is below is the reference's own


def rounding(*lengths: float, steps: float = 4) -> float:
    """The tolerance of a chain of sums of `lengths` products each and `steps` elementwise roundings.

    A float32 sum of K products with independent rounding errors drifts like a random walk: after k terms it is of size
    s(k), the next addition rounds it by at most EPS * s(k), so the error's variance is below EPS^2 * sum s(k)^2 / 3.
    With s(k) ~ sqrt(k) (signs vary) or ~ k (they don't) that makes 0.4 or 0.33 * sqrt(K) * EPS relative to the whole
    sum; blocked or pairwise sums do better, the worst case would be K * EPS. Sums one after the other add their
    variances. Allowed is sqrt(K1 + K2 + ...) * EPS, 2.5 times what is expected of the norm of a whole array, and EPS for
    each elementwise step.
    """
    return float(EPS * (steps + np.sqrt(sum(lengths))))


def rounding_bf16(count: float) -> float:
    """The tolerance of so many roundings to bf16 one after the other, each of all elements of an array.

    What comes after a rounding treats the error as it treats the array, so a relative error stays what it is.
    """
    return EPS_BF16 * count**0.5


def error(got: np.ndarray, wanted: np.ndarray, cancelled: float = 1) -> float:
    """The relative error of a whole array.

    |got - wanted| / |wanted| with Euclidean norms, or half of max |got - wanted| / max |wanted| if that is larger: both
    maxima lie 4 to 5 standard deviations out, but where they fall is chance. If wanted is zero but for float64's
    roundings (the gradient of a bias just before a group norm with one channel a group), the largest error is compared
    with the size of what cancelled.
    """
    difference = got.astype(np.float64) - wanted
    worst, largest = np.abs(difference).max(), np.abs(wanted).max()
    if largest < 1e-10:
        return float(worst / cancelled)
    return float(max(np.linalg.norm(difference) / np.linalg.norm(wanted), worst / largest / 2))


# ----------------------------------------------------------------------------------------------------------------------
# files of arrays (harness.h says how they look)

FILE_TYPES = {"f4": np.float32, "f8": np.float64, "i4": np.int32, "i8": np.int64, "u1": np.uint8, "b2": np.uint16}


def write_arrays(path: Path, arrays: dict[str, Any]) -> None:
    with open(path, "wb") as f:
        for name, value in arrays.items():
            a = np.frombuffer(value.encode(), np.uint8) if isinstance(value, str) else np.asarray(value, order="C")
            dims = "".join(f" {d}" for d in a.shape)
            f.write(f"{name} {a.dtype.kind}{a.dtype.itemsize}{dims}\n".encode() + a.tobytes())


def read_arrays(path: Path) -> tuple[Arrays, set[str]]:
    """The arrays, and the names of those that came in bf16."""
    arrays, in_bf16 = {}, set()
    with open(path, "rb") as f:
        while line := f.readline():
            name, kind, *dims = line.decode().split()
            shape, dtype = tuple(map(int, dims)), np.dtype(FILE_TYPES[kind])
            a = np.frombuffer(f.read(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)
            if kind == "b2":
                a = (a.astype(np.uint32) << 16).view(np.float32)
                in_bf16.add(name)
            arrays[name] = a
    return arrays, in_bf16


# ----------------------------------------------------------------------------------------------------------------------
# a pair


@dataclass(frozen=True)
class Pair:
    """One kernel's check.

    A case is a dict of sizes and choices, the pair's own; on a GPU `sms` may say how many multiprocessors the plans shall count with (few: then a small
    case goes the ways of large layers), `block_shared` how many bytes of shared memory a block can have, and `takes` which way that is. `only`: in this
    precision. `exact`: no sum is rounded, so that every kernel has the same bits, in whatever order it sums; without which of dev/benchmarks/timing.h's BENCH_WITHOUT
    other kernels take the case. `rounded_last`: an output whose last factor is rounded: kernels agree in it, but not with the reference. `fp32`: an activation that is fp32 in every build. `on`: see test_pairs.py.

    inputs(case, rng)         what goes into the file: float32 arrays (activations NHWC); ints, floats and text
    reference(case, tensors)  the outputs, from the float32 inputs as float64 tensors (all else stays)
    tolerance(case, name)     the allowed error of output `name` (see rounding())
    gradients                 names of the inputs whose gradients the binary returns
    activations               names of the inputs that a bf16 build holds in bf16 (activations, convolution weights)
    stats_of                  inputs that come with the sums over their pixels: `stats_x` with `x`
    inside(case, name, all)   what roundings to bf16 between input and output make of output `name`, as a relative
                              error (all: inputs and exact outputs in float64); storing the output itself is not among them
    bench(shape)              PyTorch's operation on the shape of a row: {pass: what to time}
    """

    name: str
    cases: list[Case]
    inputs: Callable[[Case, np.random.Generator], dict[str, Any]]
    reference: Callable[[Case, dict[str, Any]], Tensors]
    tolerance: Callable[[Case, str], float]
    gradients: tuple[str, ...] = ()
    activations: tuple[str, ...] = ()
    stats_of: tuple[str, ...] = ()
    inside: Callable[[Case, str, Arrays], float] = lambda case, name, all: 0.0
    bench: Callable[[dict[str, int]], Timed] | None = None


def run(pair: Pair, inputs: dict[str, Any], environment: dict[str, str] | None = None) -> tuple[Arrays, set[str]]:
    """The binary's outputs, and the names of those that it stored in bf16."""
    with tempfile.TemporaryDirectory() as folder:
        file_in, file_out = Path(folder) / "in", Path(folder) / "out"
        write_arrays(file_in, inputs)
        # threads that wait without spinning: on a busy machine a spinning team is a hundred times slower
        environment = {"OMP_WAIT_POLICY": "passive"} | os.environ | (environment or {})
        result = subprocess.run([binary(pair.name), file_in, file_out], env=environment, capture_output=True)
        if result.returncode:
            raise AssertionError(f"{pair.name} ended with {result.returncode}: {result.stderr.decode().strip()}")
        arrays, in_bf16 = read_arrays(file_out)
        if chosen_build() == "emulated":  # dev/test/fake_cudart.cpp runs no naive versions
            arrays = {name: a for name, a in arrays.items() if not re.search(r"\.v\d", name)}
        return arrays, in_bf16


def make_inputs(pair: Pair, case: Case, precision: str = "fp32") -> dict[str, Any]:
    """Seeded; for bf16 what is stored so is exact in bf16, and sums are those of what is stored."""
    inputs = pair.inputs(case, np.random.default_rng([pair.cases.index(case), len(pair.name)]))
    if precision == "bf16":
        for name in pair.activations:
            if name in inputs and name != case.get("fp32"):
                inputs[name] = torch.from_numpy(inputs[name]).bfloat16().float().numpy()
    sums = {"stats_" + x: host_stats(inputs[x]) for x in pair.stats_of if x in inputs}
    return inputs | sums | {name: case[name] for name in ("sms", "block_shared", "takes") if name in case} | {"precision": precision}


def expected(pair: Pair, case: Case, inputs: dict[str, Any]) -> Arrays:
    """Every output and gradient in float64."""
    tensors: dict[str, Any] = {}
    for name, value in inputs.items():
        is_float = isinstance(value, np.ndarray) and value.dtype == np.float32
        tensors[name] = torch.from_numpy(value).double() if is_float else value
    leaves = [name for name in pair.gradients if name in inputs]
    for name in leaves:
        tensors[name].requires_grad_()
    outputs = pair.reference(case, tensors)
    result = {name: value.detach().numpy() for name, value in outputs.items()}
    if leaves:
        total = sum((outputs[name] * tensors["d" + name]).sum() for name in outputs if "d" + name in tensors)
        for name, gradient in zip(leaves, torch.autograd.grad(total, [tensors[n] for n in leaves]), strict=True):
            d = "d" + name
            result[d] = gradient.numpy() + sum(inputs[a].astype(np.float64) for a in (d, d + "_add") if a in inputs)
    return result


@dataclass(frozen=True)
class Comparison:
    name: str
    error: float
    tolerance: float
    nans: int

    @property
    def ok(self) -> bool:
        return self.nans == 0 and self.error <= self.tolerance

    def __str__(self) -> str:
        verdict = "ok" if self.ok else f"{self.nans} NaN" if self.nans else "WRONG"
        return f"    {self.name:<20} error {self.error:.1e}   allowed {self.tolerance:.1e}   {verdict}"


def check(pair: Pair, case: Case, precision: str = "fp32") -> list[Comparison]:
    """Runs one case. Raises AssertionError if outputs are missing, superfluous or of another shape."""
    inputs = make_inputs(pair, case, precision)
    got, in_bf16 = run(pair, inputs)
    return compare(pair, case, inputs, expected(pair, case, inputs), got, in_bf16)


def compare(pair: Pair, case: Case, inputs: dict[str, Any], wanted: Arrays, got: Arrays, in_bf16: set[str]) -> list[Comparison]:
    """What a binary wrote, with every output and gradient in float64."""
    missing = set(wanted) - set(got)
    assert not missing, f"{pair.name}: the binary did not write {sorted(missing)}"
    comparisons = []
    for name, value in got.items():
        base, version = re.fullmatch(r"(.*?)(\.v\d|\.cublas)?", name).groups(default="")
        assert base in wanted, f"{pair.name}: nothing to compare {name} with"
        exact = case.get("exact") and base != case.get("rounded_last")
        right, allowed = wanted[base], pair.tolerance(case, base)
        if base in ("stats_sum", "stats_square"):  # a group norm downstream needs the sums of what was stored
            stored = torch.tensor(got["out" + version], dtype=torch.float64)
            right, allowed = channel_stats(stored)[base].numpy(), rounding(stored.shape[1] * stored.shape[2])
        elif inputs["precision"] == "bf16" and not exact:
            allowed += float(np.hypot(pair.inside(case, base, inputs | wanted), rounding_bf16(name in in_bf16)))
        if exact:
            right, allowed = as_stored(right, name in in_bf16), EXACT
        assert value.shape == right.shape, f"{pair.name}: {name} is {value.shape}, not {right.shape}"
        # what cancels is of order one, or, a bias's gradient being the sum that its weight's is, but for a factor of order one, of that one's size
        weight = wanted.get(base.removesuffix("bias") + "weight", np.ones(1))
        cancelled = max(1, float(np.linalg.norm(weight) / weight.size**0.5))
        comparisons.append(Comparison(name, error(value, right, cancelled), allowed, int(np.isnan(value).sum())))
    return comparisons


# ----------------------------------------------------------------------------------------------------------------------
# small things that many pairs need


def nchw(x: torch.Tensor) -> torch.Tensor:
    return x.permute(0, 3, 1, 2)


def nhwc(x: torch.Tensor) -> torch.Tensor:
    return x.permute(0, 2, 3, 1)


def oihw(weight: torch.Tensor) -> torch.Tensor:
    return weight.permute(0, 3, 1, 2)


def normal(rng: np.random.Generator, *shape: int, scale: float = 1, mean: float = 0) -> np.ndarray:
    return (rng.standard_normal(shape) * scale + mean).astype(np.float32)


def channel_stats(x: torch.Tensor) -> Tensors:
    """Sums over the pixels of each image and channel of x (B, H, W, C), as a group norm downstream reads them."""
    return {"stats_sum": x.sum((1, 2)), "stats_square": (x * x).sum((1, 2))}


def host_stats(x: np.ndarray) -> np.ndarray:
    """The same (B, C, 2) from the float32 array, as an operation's input."""
    x = x.astype(np.float64)
    return np.stack([x.sum((1, 2)), (x * x).sum((1, 2))], -1)


def whole(rng: np.random.Generator, *shape: int, most: int = 2) -> np.ndarray:
    """Whole numbers from -most to most, of which a sum of thousands of products is exact."""
    return rng.integers(-most, most + 1, shape).astype(np.float32)


def as_stored(x: np.ndarray, bf16: bool) -> np.ndarray:
    """Rounded as memory holds it, then in float64 again."""
    stored = torch.from_numpy(x).to(torch.bfloat16 if bf16 else torch.float32)
    return stored.double().numpy()


def poisoned_columns(B: int, stride: int, offset: int, width: int) -> np.ndarray:
    """(B, stride) of zeros, NaN in the columns that an operation has to fill; the others it must leave alone."""
    a = np.zeros((B, stride), np.float32)
    a[:, offset : offset + width] = np.nan
    return a


def dropout_mask(p: float, seed: int, step: int, sample0: int, layer: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Factors 0 or 1 / (1 - p) for an activation of this shape (B, H, W, C)."""
    p32 = float(np.float32(p))
    samples = sample0 + torch.arange(shape[0])
    words = random_words(seed, DROPOUT | layer << 8, step, samples, int(np.prod(shape[1:])))
    return torch.where(words < int(p32 * 2**32), 0.0, 1 / (1 - p32)).double().view(shape)


# ----------------------------------------------------------------------------------------------------------------------
# command line


HAS_GPU = torch.cuda.is_available()
torch.backends.cudnn.benchmark = True
torch.backends.cudnn.allow_tf32 = False  # fp32 means fp32
bench_type = torch.float32  # of activations and convolution weights


def bench_tensor(*shape: int, grad: bool = False, fp32: bool = False) -> torch.Tensor:
    """Random values on the GPU if there is one; four dimensions mean NCHW shapes in channels_last memory. fp32: in either precision."""
    x = torch.randn(shape, device="cuda" if HAS_GPU else "cpu", dtype=torch.float32 if fp32 else bench_type)
    if len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    return x.requires_grad_(grad)


def autocast() -> torch.autocast:
    """How PyTorch runs a whole model whose parameters are float32."""
    return torch.autocast("cuda" if HAS_GPU else "cpu", torch.bfloat16, enabled=bench_type == torch.bfloat16)


def median_us(repeat: Callable[[], Any]) -> float:
    """On a CPU."""
    repeat()
    times: list[float] = []
    while len(times) < 3 or (len(times) < 100 and sum(times) < 1e5):
        start = time.perf_counter()
        repeat()
        times.append((time.perf_counter() - start) * 1e6)
    return float(np.median(times))


class TorchBench:
    """PyTorch's operations on one shape, timed as harness.h times ours: on a GPU many of them in a CUDA graph, which take turns at as many copies
    of their tensors as are larger than twice the L2 cache; the median of seven replays."""

    def __init__(self, make: Callable[[], Timed]) -> None:
        if not HAS_GPU:
            self.copies = [make()]
            return
        self.stream = torch.cuda.Stream()  # one that can be captured, for all of it: autograd runs where the forward pass ran
        with torch.cuda.stream(self.stream):
            before = torch.cuda.memory_allocated()
            self.copies = [make()]
            used = max(torch.cuda.memory_allocated() - before, 1)
            count = min(-(-2 * torch.cuda.get_device_properties(0).L2_cache_size // used), 64)
            self.copies += [make() for _ in range(count - 1)]

    def us(self, which: str) -> float:
        if not HAS_GPU:
            return median_us(self.copies[0][which])
        with torch.cuda.stream(self.stream):
            for copy in self.copies:
                copy[which]()
            once = self.elapsed(self.copies[0][which])
            launches = -(-int(min(max(1000 / once, 1), 300)) // len(self.copies)) * len(self.copies)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                for k in range(launches):
                    self.copies[k % len(self.copies)][which]()
            graph.replay()
            return float(np.median([self.elapsed(graph.replay) for _ in range(7)])) / launches

    def elapsed(self, work: Callable[[], Any]) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(self.stream)
        work()
        end.record(self.stream)
        end.synchronize()
        return start.elapsed_time(end) * 1e3


def forward_backward(function: Callable[[], torch.Tensor], leaves: list[torch.Tensor]) -> Timed:
    """What to time for the rows "forward" and "backward": an operation without and the gradients of `leaves` with autograd."""

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return function()

    out = function()
    d = torch.randn_like(out)
    return {"forward": forward, "backward": lambda: torch.autograd.grad(out, leaves, d, retain_graph=True)}


def bench(pair: Pair, precision: str) -> None:
    """Runs the binary's benchmark; beside each row that PyTorch has an operation for, PyTorch's time and how much faster we are."""
    global bench_type
    bench_type = torch.bfloat16 if precision == "bf16" else torch.float32
    process = subprocess.run([binary(pair.name), precision], stdout=subprocess.PIPE, text=True)  # first all of ours: they would disturb each other
    assert process.returncode == 0, f"{pair.name} ended with {process.returncode}"
    timed: dict[str, TorchBench] = {}
    for row in process.stdout.splitlines():
        match = re.match(r"(.*?)  +(\w+) +([\d.]+) us", row)
        if pair.bench and match:
            shape, which, us = match.groups()
            if shape not in timed:
                timed.clear()  # one shape's tensors at a time
                sizes = {k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", shape)}
                timed[shape] = TorchBench(lambda sizes=sizes: pair.bench(sizes))
            if which in timed[shape].copies[0]:
                torch_us = timed[shape].us(which)
                row = f"{row:<124} PyTorch {torch_us:10.1f} us  x{torch_us / float(us):.2f}"
        print(row, flush=True)


def build(*names: str) -> None:
    """One process at a time, of those among which tests are divided."""
    with open(DEV / "Makefile") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["make", "-s", "-C", DEV, *names], check=True)


@functools.cache
def chosen_build() -> str:
    """cuda or cpu: what make chooses here, or what BUILD says."""
    return subprocess.run(["make", "-s", "-C", DEV, "build"], check=True, capture_output=True, text=True).stdout.strip()


def binary(name: str) -> Path:
    """A pair's binary of that build. (The other build's lies beside it.)"""
    return DEV / f"{name}_{chosen_build()}"


def precisions() -> list[str]:
    """Of that build."""
    return ["fp32"] if chosen_build() == "cpu" else ["bf16", "fp32"]


def main(pair: Pair) -> None:
    """The command line of every pair."""
    parser = argparse.ArgumentParser(description=f"checks dev/{pair.name} against PyTorch in float64")
    parser.add_argument("--bench", action="store_true", help="benchmark it instead, beside PyTorch's own operation")
    parser.add_argument("--precision", choices=["fp32", "bf16"], help="only this one (bf16: on a GPU)")
    arguments = parser.parse_args()
    build(pair.name)
    outputs = wrong = 0
    for precision in [arguments.precision] if arguments.precision else precisions():
        if arguments.bench:
            bench(pair, precision)
            continue
        for case in (case for case in pair.cases if case.get("only", precision) == precision):
            print(f"{pair.name} {precision} {case}")
            for comparison in check(pair, case, precision):
                print(comparison)
                outputs += 1
                wrong += not comparison.ok
    if not arguments.bench:
        print(f"{pair.name}: {wrong} of {outputs} outputs are wrong")
    sys.exit(wrong > 0)
