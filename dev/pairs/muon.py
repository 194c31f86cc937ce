"""Checks muon.cu: the directions of matrices of all shapes at once, and several steps of Muon beside AdamW, of which a bad one must change nothing."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import EPS, EPS_BF16, Case, Pair, Tensors, Timed, bench_tensor, bench_type, error, main, normal, rounding

from common.config import Config
from common.flags import preset_flags
from common.model import parameter_shapes
from train_unet import muon_updates

ITERATIONS = 5
# As the programs have them, in float32
POLYNOMIAL = tuple(float(np.float32(x)) for x in (3.4445, -4.7750, 2.0315))
EPS_FP16 = 2.0**-11
SMALLEST_FP16 = 2.0**-24  # no two neighbours of fp16 are nearer; numbers that bf16 rounds here are all larger
MOMENTUM = float(np.float32(0.95))
SETTINGS = dict(lr=0.05, weight_decay=0.0, beta1=0.9, beta2=0.999, eps=1e-8, grad_clip=1.0, ema_rate=0.995)

Matrix = tuple[int, int, str | float]  # rows, columns, and either a standard deviation or "few"
Round = Callable[[torch.Tensor], torch.Tensor]


def polynomial_steps(X: torch.Tensor, stored: Round) -> torch.Tensor:
    """Five iterations in float64; `stored` rounds what is stored in between. As in orthogonalise, |X|^2 is the trace of X X^T, both of them stored."""
    a, b, c = POLYNOMIAL
    is_high = X.shape[0] > X.shape[1]
    X = X.T if is_high else X
    square = stored(stored(X) @ stored(X).T).trace()
    X = stored(X / square.sqrt())
    for iteration in range(ITERATIONS):
        A = stored(X @ X.T)
        X = a * X + stored(b * A + c * A @ A) @ X
        if iteration < ITERATIONS - 1:
            X = stored(X)
    return X.T if is_high else X


def gram_steps(X: torch.Tensor, stored: Round) -> torch.Tensor:
    """The same by muon_wgmma.h's formulas: two iterations, and then three, of the squares alone."""
    a, b, c = POLYNOMIAL
    is_high = X.shape[0] > X.shape[1]
    X = stored((X.T if is_high else X) / X.norm())
    for iterations in (2, 3):
        R = stored(X @ X.T)
        q, T = 1.0, torch.zeros_like(R)
        for iteration in range(iterations):
            Z = stored(b * R + c * R @ R)
            T = stored(T @ Z + a * T + q * Z) if iteration else Z
            q *= a
            if iteration < iterations - 1:
                W = stored(a * R + Z @ R)
                R = stored(a * W + W @ Z)
        X = T @ X + q * X
        if iterations == 2:
            X = stored(X)
    return X.T if is_high else X


def direction(X: torch.Tensor, stored: Round = lambda x: x, steps: Callable[[torch.Tensor, Round], torch.Tensor] = polynomial_steps) -> torch.Tensor:
    return 0.2 * math.sqrt(max(X.shape)) * steps(X, stored) if X.any() else X.clone()


def to_bf16(x: torch.Tensor) -> torch.Tensor:
    return x.float().bfloat16().double()


def to_fp16(x: torch.Tensor) -> torch.Tensor:
    return x.float().half().double()


def is_hopper() -> bool:
    """Whether the pair runs on a Hopper GPU, which may be played by software (dev/test/fake_cudart.cpp)."""
    if "FAKE_GPU" in os.environ:
        return "capability 90 " in Path(os.environ["FAKE_GPU"]).read_text()
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def rounded_direction(X: torch.Tensor) -> torch.Tensor:
    """The direction by the kernels of a bf16 build, in float64 but for what they store: Hopper's in fp16, others' in bf16."""
    return direction(X, to_fp16, gram_steps) if is_hopper() else direction(X, to_bf16)


def surely_rounded(to_type: Round, eps: float, x: torch.Tensor) -> torch.Tensor:
    """Rounds x, unless a float32 sum of such numbers, which is off by a few EPS of the largest, may be rounded to the other side."""
    rounded = to_type(x)
    ulp = (2 * eps * 2.0 ** torch.floor(torch.log2(x.abs()))).clamp(min=SMALLEST_FP16)
    if (ulp / 2 - (x - rounded).abs()).min() < 8 * EPS * x.abs().max():
        raise ArithmeticError
    return rounded


def few_values(rows: int, columns: int) -> np.ndarray:
    """A matrix of which bf16 and fp16 round all results alike, whoever computes them.

    A difference of float32's last bit can decide to which side an element is rounded. Each such choice changes all elements of the next product, of
    which more then go to the other side. So after five iterations two right programs differ by as much as either does from the exact result, and that hides
    small mistakes. Here all elements of any result have one of a few magnitudes: at most 4, and powers of two of these. They are drawn until none of those
    in the five iterations comes near to the middle between two neighbours of the type. Then all right programs round alike, and only float32's errors are left.
    The same holds for fp16 in Hopper's formulas.

    In the matrix F, an element's value says only in how small a block of 1, 8 or S rows and columns both of its indices lie; sums and products of such matrices
    are such matrices. The matrix is [F, 2 F, -F, ...], with signs of its rows and columns changed, and rows and columns in another order.
    """
    S, L = sorted((rows, columns))
    assert L % S == 0
    blocks = [1, 8, S]
    i = np.arange(S)
    level = sum((i[:, None] // size != i // size).astype(int) for size in blocks)
    for seed in itertools.count():
        rng = np.random.default_rng([seed, rows, columns])
        values = rng.standard_normal(len(blocks)) / np.sqrt(blocks)
        F = to_bf16(torch.from_numpy(values[np.minimum(level, len(blocks) - 1)])).numpy()
        X = np.concatenate([factor * F for factor in rng.choice([0.5, 1, 2, -1], L // S)], 1)
        X = X[rng.permutation(S)][:, rng.permutation(L)] * rng.choice([-1, 1], (S, 1)) * rng.choice([-1, 1], L)
        try:
            gram_steps(torch.from_numpy(X), functools.partial(surely_rounded, to_fp16, EPS_FP16))
            polynomial_steps(torch.from_numpy(X), functools.partial(surely_rounded, to_bf16, EPS_BF16))
        except ArithmeticError:
            continue
        return (X if rows <= columns else X.T).astype(np.float32)
    raise AssertionError


@functools.cache
def matrix(rows: int, columns: int, kind: str | float) -> np.ndarray:
    if kind == "few":
        return few_values(rows, columns)
    assert isinstance(kind, (int, float))
    return normal(np.random.default_rng([rows, columns]), rows, columns, scale=kind)


def flat_array(case: Case, parts: list[np.ndarray], gaps: Callable[[int], np.ndarray]) -> np.ndarray:
    """The matrices one after the other, each behind gaps(its size)."""
    pieces = [piece for gap, part in zip(case["gaps"], parts) for piece in (gaps(gap), part.ravel())]
    return np.concatenate([*pieces, gaps(case["gaps"][-1])]).astype(np.float32)


def inputs(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    shapes = [(rows, columns) for rows, columns, *_ in case["matrices"]]
    arrays: dict[str, Any] = {
        "rows": np.array([rows for rows, _ in shapes], np.int32),
        "columns": np.array([columns for _, columns in shapes], np.int32),
        "gaps": np.array(case["gaps"], np.int32),
    }

    def poison(size: int) -> np.ndarray:
        return np.full(size, np.nan)

    if "ranks" not in case:
        return arrays | {"X": flat_array(case, [matrix(*m) for m in case["matrices"]], poison)}
    steps, B, n = 4, 6, len(flat_array(case, [np.zeros(shape) for shape in shapes], np.zeros))
    losses = rng.uniform(0.1, 1, (steps, B))
    losses[case["bad"], 2] = np.nan
    directions = [flat_array(case, [normal(rng, *shape) for shape in shapes], poison) for _ in range(steps)]
    return arrays | {
        # float32 values, as the flags are
        **{k: float(np.float32(case.get(k, v))) for k, v in SETTINGS.items()},
        "updates": case["updates"],
        "ranks": case["ranks"],
        "is_matrix": flat_array(case, [np.ones(shape) for shape in shapes], np.zeros),
        "params": normal(rng, n),
        "ema": normal(rng, n),
        "m": normal(rng, n, scale=0.1),
        "v": np.abs(normal(rng, n, scale=0.1)),
        "grads": normal(rng, steps, n),
        "directions": np.stack(directions),
        "losses": losses,
    }


def reference(case: Case, v: dict[str, Any]) -> Tensors:
    return steps_reference(v) if "ranks" in case else directions_reference(case, v)


def directions_reference(case: Case, v: dict[str, Any]) -> Tensors:
    tensors = {"changed": torch.zeros(2, dtype=torch.float64)}
    for i, (rows, columns, kind) in enumerate(case["matrices"]):
        X = torch.from_numpy(matrix(rows, columns, kind)).double()
        as_rounded = v["precision"] == "bf16" and kind == "few"
        tensors[f"direction{i}"] = rounded_direction(X) if as_rounded else direction(X)
    return tensors


def steps_reference(v: dict[str, Any]) -> Tensors:
    """torch.optim.AdamW in float64 for what is not a matrix; Muon's formulas for the others."""
    is_matrix = v["is_matrix"].bool()
    params, ema, m, moment2 = (v[name].clone() for name in ("params", "ema", "m", "v"))
    p = torch.nn.Parameter(params[~is_matrix])
    adamw = torch.optim.AdamW([p], v["lr"], (v["beta1"], v["beta2"]), v["eps"], v["weight_decay"])
    adamw.state[p] = dict(step=torch.tensor(float(v["updates"])), exp_avg=m[~is_matrix], exp_avg_sq=moment2[~is_matrix])
    verdicts, momenta = [], []
    for grads, losses, directions in zip(v["grads"], torch.from_numpy(v["losses"]), v["directions"], strict=True):
        verdicts.append(math.isfinite(losses.mean()))
        if not verdicts[-1]:
            momenta.append(torch.zeros_like(grads))
            continue
        g = grads * (min(1.0, v["grad_clip"] / (grads.norm().item() + 1e-6)) if v["grad_clip"] else 1)
        p.grad = g[~is_matrix]
        adamw.step()
        params[~is_matrix] = p.detach()
        m[is_matrix] = MOMENTUM * m[is_matrix] + (1 - MOMENTUM) * g[is_matrix]
        momenta.append(torch.where(is_matrix, MOMENTUM * m + (1 - MOMENTUM) * g, 0))
        params[is_matrix] = params[is_matrix] * (1 - v["lr"] * v["weight_decay"]) - v["lr"] * directions[is_matrix]
        updates = v["updates"] + sum(verdicts)
        ema.lerp_(params, (1 - v["ema_rate"]) / (1 - v["ema_rate"] ** updates))
    m[~is_matrix], moment2[~is_matrix] = adamw.state[p]["exp_avg"], adamw.state[p]["exp_avg_sq"]
    return {
        "params_out": params,
        "copy": params,
        "ema_out": ema,
        "m_out": m,
        "v_out": moment2,
        "momenta": torch.stack(momenta),
        "verdicts": torch.tensor(verdicts, dtype=torch.float64),
        "changed": torch.zeros(2, dtype=torch.float64),
    }


@functools.cache
def float32_bound(rows: int, columns: int, kind: str | float) -> float:
    """How far the result can be off in float32, relative to its norm.

    The singular values of X go through p(s) = a s + b s^3 + c s^5 in each iteration. An error E that X has before an iteration is, behind it, at most
    max(|p'(s)|, p(s) / s) |E|, over all s between its singular values (that is the norm of the derivative of such a function of a matrix): 3.4445 |E| as long as
    some are tiny, and |X| grows by nearly as much meanwhile. To this, the iteration's own errors are added, as bounds of Frobenius norms (|.|; ||.||
    is the largest singular value): a sum of K products has rounding(K) of its result, and an error D of A becomes at most max |b + c (t + t')| |D| ||X||, with
    t and t' between the eigenvalues of A.
    """
    a, b, c = POLYNOMIAL
    X = torch.from_numpy(matrix(rows, columns, kind)).double()
    S, L = sorted((rows, columns))
    s = torch.linalg.svdvals(X / X.norm())
    E = rounding(steps=2) + rounding(L)  # X / |X|
    for _ in range(ITERATIONS):
        A, B = s**2, b * s**2 + c * s**4
        following = a * s + B * s
        top = float(s.max())
        of_A = rounding(L) * float(s.norm()) * top
        of_B = max(-b, abs(b + 2 * c * top**2)) * of_A + c * rounding(S) * float(A.norm()) * top**2 + 4 * EPS * float(B.norm())
        own = of_B * top + rounding(S) * float((B * s).norm()) + 4 * EPS * float(following.norm())
        between = torch.linspace(float(s.min()), top, 1000, dtype=torch.float64)
        slope = float((a + 3 * b * between**2 + 5 * c * between**4).abs().max())
        E = max(slope, float((following / s).max())) * E + own
        s = following
    return E / float(s.norm())


def tolerance(case: Case, name: str) -> float:
    """Momenta are four roundings of the gradient's and the momentum's size, behind the norm's; weights as in adamw.py."""
    if name in ("changed", "verdicts"):
        return 0
    if "ranks" in case:
        return rounding(steps=20)
    rows, columns, kind = case["matrices"][int(name.removeprefix("direction"))]
    return float32_bound(rows, columns, kind) if kind else 0


def inside(case: Case, name: str, all: dict[str, np.ndarray]) -> float:
    """What bf16 or fp16 makes of a direction. The bound of float32_bound, with their errors, would allow everything, since all worst things would have to come together.
    So it is measured: 2.5 times the error that a computation in float64 has if it rounds what is stored, as harness.py allows 2.5 times
    what is expected elsewhere. In bf16 that is 2e-2 to 1e-1, where a wrong index makes errors of order one. Smaller mistakes are found by few_values, whose
    reference rounds in the same places.
    """
    if not name.startswith("direction"):
        return 0
    rows, columns, kind = case["matrices"][int(name.removeprefix("direction"))]
    if kind in ("few", 0):
        return 0
    X = torch.from_numpy(matrix(rows, columns, kind)).double()
    return 2.5 * error(rounded_direction(X).numpy(), all[name])


def bench(s: dict[str, int]) -> Timed:
    """Five iterations in PyTorch, of all matrices of one shape as a batch, in the type of the products (as the rivals' programs have it)."""
    a, b, c = POLYNOMIAL
    if "matrices" in s:
        shapes = parameter_shapes(Config(**preset_flags("quick64")))
        sides = [(shape[0], shape[1:].numel()) for name, shape in shapes.items() if muon_updates(name, shape)]
        assert len(sides) == s["matrices"]
        batches = [(sides.count(side), *side) for side in dict.fromkeys(sides)]
    else:
        batches = [(s["count"], s["rows"], s["columns"])]
    tensors = [bench_tensor(count, *sorted(side), fp32=True) for count, *side in batches]

    def directions() -> None:
        for tensor in tensors:
            X = (tensor / tensor.norm(dim=(1, 2), keepdim=True)).to(bench_type)
            for _ in range(ITERATIONS):
                A = X @ X.mT
                X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)

    return {"muon": directions}


CASES = [
    dict(matrices=[(32, 32, 1.0), (96, 32, 1.0), (64, 64, 0.0)], gaps=[64, 0, 128, 64], on="A100 fp32, H200 bf16"),
    dict(
        matrices=[
            *[(32, 32, 1.0), (96, 32, 1.0), (32, 288, 1.0), (160, 96, 1.0), (96, 96, 0.0), (96, 160, 1e-6), (64, 32, 1e3)],
            *[(32, 288, "few"), (96, 32, "few"), (96, 96, "few"), (64, 64, "few")],
        ],
        gaps=[64, 192, 0, 64, 128, 64, 0, 64, 64, 0, 64, 64],
    ),
    dict(
        matrices=[(64, 576, 1.0), (128, 1152, 1.0), (192, 192, 1.0), (288, 96, "few"), (128, 576, 3.0)],
        gaps=[0, 64, 64, 0, 64, 64],
    ),
    dict(  # tiles of 128 x 128, since one multiprocessor has enough of them
        matrices=[(160, 160, "few"), (288, 96, "few"), (64, 576, "few"), (160, 416, 1.0), (352, 192, 1.0), (32, 32, 0.0)],
        gaps=[64, 0, 0, 64, 0, 128, 64],
        sms=1,
        on="A100 bf16, H200 bf16",
    ),
    # at the start of a warmup, gradients behind layers that begin as zeros are tiny
    dict(matrices=[(64, 96, 1e-14), (32, 32, 1e-12), (32, 64, 1e8)], gaps=[64, 64, 0, 64], on="A100 fp32, H200 bf16"),
    dict(matrices=[(32, 96), (64, 64), (96, 32)], gaps=[128, 0, 64, 192], ranks=1, updates=0, bad=2, on="A100 fp32, H200 bf16"),
    dict(matrices=[(64, 64), (32, 288)], gaps=[64, 64, 64], ranks=1, updates=500, bad=0, grad_clip=0.0, weight_decay=0.1, ema_rate=0.9),
    # a matrix of which each rank has parts
    dict(matrices=[(32, 32), (128, 480)], gaps=[64, 640, 64], ranks=2, updates=3, bad=1, weight_decay=0.02, on="A100 fp32, H200 bf16"),
]
PAIR = Pair("muon", CASES, inputs, reference, tolerance, inside=inside, bench=bench)

if __name__ == "__main__":
    main(PAIR)
