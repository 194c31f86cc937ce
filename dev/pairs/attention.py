"""Checks attention.cu: odd numbers of pixels, one pixel, every size of a head that has a kernel of its own, with few blocks and with many, scores large
enough that exp would overflow without the maximum, and scores up to 1e10, which fp32 holds to 1,024: of half of the keys the same, of the others less.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from harness import EPS_BF16, Arrays, Case, Pair, Tensors, Timed, bench_tensor, forward_backward, main, normal, precisions, rounding, whole


def inputs(case: Case, rng: np.random.Generator) -> dict[str, Any]:
    B, T, C = case["B"], case["T"], case["C"]
    if case.get("exact"):
        return {"heads": case["heads"]} | exact_inputs(B, T, C, case["heads"], rng)
    qkv = normal(rng, B, T, 3 * C, scale=case.get("scale", 1))
    if "equal" in case:  # q and k have powers of two, so that every order of summation gives the same score
        d = C // case["heads"]
        size = 2.0 ** np.round(np.log2(case["equal"] / d**0.5) / 2)
        qkv[:, :, : 2 * C] = size * rng.choice([-1.0, 1.0], 1)
        qkv[:, 1::2, C : 2 * C] *= case.get("others", 1)
    return {"heads": case["heads"], "qkv": qkv, "dout": normal(rng, B, T, C)}


def exact_inputs(B: int, T: int, C: int, heads: int, rng: np.random.Generator) -> Arrays:
    """Every query is like the half of the keys that have its kind, which changes every 32 pixels, and most unlike the others: a score is 0 or -2048, P is 2 / T
    (a power of two) or 0. The values of a kind lie symmetrically around a whole number, which is what comes out, so that dS is a whole number times P,
    and all products and sums are exact. Of q and k each has channels of its own, so that they have gradients but no scores."""
    d, half = C // heads, T // 2
    kind = np.arange(T) // 32 % 2
    order = np.argsort(kind, kind="stable")
    q, k, v = np.zeros((3, B, heads, T, d), np.float32)
    for sort in range(2):
        q[:, :, kind == sort, sort] = -1
        k[:, :, kind != sort, sort] = 2**11 * 2 ** round(np.log2(d) / 2)
        some = whole(rng, B, heads, half // 2, d)
        v[:, :, order[sort * half : (sort + 1) * half]] = whole(rng, B, heads, 1, d) + np.concatenate([some, -some], 2)
    q[..., 2 : d // 2] = whole(rng, B, heads, T, d // 2 - 2)
    k[..., d // 2 :] = whole(rng, B, heads, T, d - d // 2)
    qkv = np.stack([q, k, v]).transpose(1, 3, 0, 2, 4).reshape(B, T, 3 * C)
    return {"qkv": qkv, "dout": whole(rng, B, T, C, most=1)}


def heads_of(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    """q, k, v (3, B, heads, T, d): QKVAttention of guided-diffusion has q, k, v first, then heads."""
    B, T, C3 = qkv.shape
    return qkv.view(B, T, 3, heads, C3 // 3 // heads).permute(2, 0, 3, 1, 4)


def reference(case: Case, v: dict[str, Any]) -> Tensors:
    q, k, value = heads_of(v["qkv"], v["heads"])
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    out = (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)
    return {"out": out}


def tolerance(case: Case, name: str) -> float:
    """A score's absolute error is an element of P's relative one: the sum over d products, a few roundings, times the
    size of the scores, of which the largest decide (scale^2 times about 4). Then a sum over the pixels; backward has one
    more product over d and one more over the pixels, of terms of which dP - mean(dP) cancels a part.
    """
    d, largest_score = case["C"] // case["heads"], 4 * case.get("scale", 1) ** 2
    P = rounding(d, steps=4) * max(1, largest_score / 2)
    return P + rounding(case["T"]) if name == "out" else 2 * P + rounding(d, case["T"])


def inside(case: Case, name: str, all: Arrays) -> float:
    """P and dS are rounded on their way into a product, and D = rowsum(dout * out) reads the out that was stored: element (t, s) of dS = P (dP - D)
    inherits P[t, s] times that row's error of D, however small dP - D is. Where a softmax is nearly one-hot, dP - D nearly vanishes for all that
    matter and this is the largest error there is: with scores of +-100 (scale = 5) 7 times what storing dqkv adds. So it is computed: variances, in
    units of EPS_BF16^2, of independent relative errors of that size, carried through the products.
    """
    q, k, v = heads_of(torch.from_numpy(all["qkv"]).double(), case["heads"])
    B, heads, T, d = q.shape
    dout, out = (torch.from_numpy(all[n]).double().view(B, T, heads, d).transpose(1, 2) for n in ("dout", "out"))
    P = (q @ k.transpose(-1, -2) / d**0.5).softmax(-1)
    if name == "out":
        return EPS_BF16 * float((P**2 @ v**2).sum().sqrt() / out.norm())
    dS2 = (P * (dout @ v.transpose(-1, -2) - (dout * out).sum(-1, keepdim=True))) ** 2
    D2 = ((dout * out) ** 2).sum(-1, keepdim=True)
    dq2 = (dS2 @ k**2 + D2 * (P @ k) ** 2) / d
    dk2 = (dS2.transpose(-1, -2) @ q**2 + (P**2).transpose(-1, -2) @ (D2 * q**2)) / d
    dv2 = (P**2).transpose(-1, -2) @ dout**2
    return EPS_BF16 * float((dq2.sum() + dk2.sum() + dv2.sum()).sqrt() / np.linalg.norm(all["dqkv"]))


def bench(s: dict[str, int]) -> Timed:
    qkv = bench_tensor(s["B"], s["T"], 3 * s["C"])
    q, k, v = (x.contiguous().requires_grad_() for x in qkv.view(s["B"], s["T"], 3, s["heads"], -1).permute(2, 0, 3, 1, 4))
    with torch.no_grad():
        F.scaled_dot_product_attention(q, k, v)
    return forward_backward(lambda: F.scaled_dot_product_attention(q, k, v), [q, k, v])


LARGE_SCORES = [(48, 32), (256, 32), (300, 32), (64, 64), (192, 64), (256, 64), (1024, 64), (70, 96), (40, 192), (20, 288)]  # every kernel there is
CASES = [
    dict(B=3, T=60, C=96, heads=3),
    dict(B=1, T=240, C=64, heads=2),
    dict(B=2, T=35, C=160, heads=5, on="A100 bf16, A100 fp32, H200 bf16"),
    dict(B=2, T=33, C=96, heads=2, on="A100 bf16, A100 fp32, H200 bf16"),
    dict(B=5, T=16, C=64, heads=1, on="A100 bf16, A100 fp32, H200 bf16"),
    dict(B=2, T=64, C=64, heads=4, scale=5),
    dict(B=1, T=100, C=64, heads=1, on="A100 bf16, A100 fp32, H200 bf16"),
    dict(B=2, T=1, C=32, heads=1, on="A100 bf16, A100 fp32"),
    dict(B=1, T=300, C=64, heads=2, on="A100 bf16, A100 fp32"),
    dict(B=1, T=272, C=128, heads=2),
    dict(B=1, T=70, C=128, heads=1, on="A100 bf16, A100 fp32"),
    dict(B=1, T=40, C=192, heads=1, on="A100 bf16, A100 fp32"),
    dict(B=1, T=24, C=288, heads=1, on="A100 bf16, A100 fp32, H200 bf16"),
    *(dict(B=3, T=T, C=96, heads=3) for T in (64, 128, 192, 256, 320)),
    *(dict(B=3, T=T, C=128, heads=2) for T in (64, 128, 192, 256, 512)),
    dict(B=9, T=256, C=480, heads=15),
    dict(B=5, T=130, C=864, heads=32),
    dict(B=2, T=70, C=96, heads=32),
    dict(B=1, T=600, C=64, heads=2),
    dict(B=1, T=600, C=96, heads=2),
    dict(B=1, T=256, C=32, heads=1, scale=5),
    dict(B=1, T=256, C=64, heads=1, scale=5, sms=1),  # sms: so that the sanitizers see it
    dict(B=9, T=256, C=960, heads=15),  # more heads than two rounds of clusters take
    *(dict(B=B, T=T, C=C, heads=1) for B, T, C in ((3, 384, 64), (1, 640, 32), (2, 1024, 64), (1, 1152, 64))),
    dict(B=1, T=1024, C=64, heads=2, scale=5),
    *(
        dict(B=1, T=T, C=C, heads=1, equal=size, others=others)
        for T, C in LARGE_SCORES
        for size, others in ((1e4, 1), (1e6, 0.5), (1e10, 1), (1e10, -1))
    ),
]
# Each of Hopper's kernels, and what takes their places
RINGS = [
    # dq and dk end with a factor 1 / sqrt(32). It is no float, and a GPU's rsqrtf is off by up to 2 ulp (CUDA's guide). attention_v0 multiplies by it
    # before the last product, whose large terms cancel then but for their rounding: bf16's tolerance covers that, and fp32's does not.
    *(dict(B=1, T=T, C=64, heads=2, exact="hopper", rounded_last="dqkv", only="bf16", on="H200 bf16") for T in (64, 128)),
    *(dict(B=1, T=T, C=64, heads=2, exact="clusters,hopper", rounded_last="dqkv", only="bf16", on="H200 bf16") for T in (256, 512)),
    *(dict(B=1, T=T, C=64, heads=1, exact="hopper", on="H200 bf16") for T in (64, 128)),
    *(dict(B=1, T=T, C=64, heads=1, exact="clusters,hopper", on="H200 bf16") for T in (256, 512)),
    *(dict(B=1, T=192, C=64, heads=heads, on="H200 bf16") for heads in (1, 2)),
]
CASES[-1:-1] = RINGS if "bf16" in precisions() else []
PAIR = Pair("attention", CASES, inputs, reference, tolerance, ("qkv",), ("qkv", "dout"), inside=inside, bench=bench)

if __name__ == "__main__":
    main(PAIR)
