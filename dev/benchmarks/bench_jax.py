"""JAX's side of make bench, written for XLA: python dev/benchmarks/bench_jax.py --preset unet64 --batch_size 32 --bench 20

Takes train_unet's flags and prints a line of JSON as dev/bench does. JAX is optional (pip install "jax[cuda13]");
where it is missing, one sentence says so and the exit code is 1. dev/test/test_bench_jax.py compares loss and
gradients with train_unet.py's in fp32.

A step (draw t and noise, q_sample, forward, loss, backward, AdamW, average of the weights) is one jit whose state is
donated; bf16 where --precision says so, with fp32 master weights. It is written for XLA, which fuses elementwise work
and reductions but not across them:

- A group norm is the sums of each channel, from which come two numbers a channel, and then one multiply-add with SiLU
  in the pass that writes bf16. Its gradient is written by hand: one pass for two sums, one for dx; z is computed
  again in both instead of kept.
- Neither a concatenation nor a nearest upsampling is stored as such (View): the norm reads the parts and writes what
  the convolution reads, 1x1 skip connections are a product for each part, and sums are made once for all readers of
  an activation.
- A block's first convolution has no pass for its bias, which joins what the second norm adds; the second's joins the
  skip connection's.
- Sums over pixels have two stages, so that small batches fill the GPU.
- Weights are stored (out, height, width, in) as cuDNN wants them, and once more in bf16 by AdamW; all embedding
  layers are one product; all vectors (biases, norms) are one array; t and noise come out of one call of the
  generator; attention is cuDNN's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
try:
    import jax
except ModuleNotFoundError:
    how = 'pip install "jax[cuda13]" brings it (jax alone: for the CPU)'
    sys.exit(f"bench_jax: JAX is not installed, so its column is left out; {how}")
import jax.numpy as jnp
from jax import lax

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from common.config import make_config
from common.flags import FLAGS, Config, format_value, parse_flags
from common.program import UserError

Tree = Any
GROUPS, EPSILON = 32, 1e-5
# Graphs of everything, convolutions too: launching kernels one by one takes longer than running them.
COMPILER_OPTIONS = {"xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONVOLUTION"}


# ======================================================================================================================
# the network as a list


class Block(NamedTuple):
    """kind: res, pool, shrink (strided convolution), nearest, enlarge (nearest and convolution). name:
    guided-diffusion's. push, pop: after it the activation is kept for the upward half, or before it the last kept
    one is concatenated. heads: 0 without attention."""

    kind: str
    name: str
    inputs: int = 0
    outputs: int = 0
    resample: str = ""
    heads: int = 0
    push: bool = False
    pop: bool = False


def build(config: Config) -> list[Block]:
    """The layers between the first and the last convolution, in guided-diffusion's order."""
    blocks: list[Block] = []
    levels, width = len(config.channel_mult), config.channels(0)
    kept = [width]
    heads_up = config.num_heads if config.num_heads_upsample == -1 else config.num_heads_upsample

    def heads(channels: int, otherwise: int) -> int:
        return otherwise if config.num_head_channels == -1 else channels // config.num_head_channels

    for level in range(levels):
        wide = config.channels(level)
        for _ in range(config.num_res_blocks):
            attention = heads(wide, config.num_heads) if config.has_attention(level) else 0
            blocks.append(Block("res", f"input_blocks.{len(kept)}", width, wide, heads=attention, push=True))
            width = wide
            kept.append(width)
        if level < levels - 1:
            kind = "res" if config.resblock_updown else "shrink" if config.conv_resample else "pool"
            blocks.append(Block(kind, f"input_blocks.{len(kept)}", width, width, "down", push=True))
            kept.append(width)
    blocks.append(Block("res", "middle_block", width, width, heads=heads(width, config.num_heads)))
    blocks.append(Block("res", "middle_block+2", width, width))
    index = 0
    for level in reversed(range(levels)):
        wide = config.channels(level)
        for i in range(config.num_res_blocks + 1):
            attention = heads(wide, heads_up) if config.has_attention(level) else 0
            blocks.append(Block("res", f"output_blocks.{index}", width + kept.pop(), wide, heads=attention, pop=True))
            width = wide
            if level > 0 and i == config.num_res_blocks:
                kind = "res" if config.resblock_updown else "enlarge" if config.conv_resample else "nearest"
                blocks.append(Block(kind, f"output_blocks.{index}+{1 + (attention > 0)}", width, width, "up"))
            index += 1
    return blocks


def part(block: Block, offset: int = 0) -> str:
    """guided-diffusion's name of a layer of a block: "output_blocks.2+1" is the second of output_blocks.2."""
    name, _, first = block.name.partition("+")
    return f"{name}.{int(first or 0) + offset}"


def parameter_shapes(config: Config) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """Matrices and filters (out, height, width, in), and vectors, by guided-diffusion's names without .weight;
    embedding: all blocks' embedding layers side by side."""
    matrices: dict[str, tuple[int, ...]] = {}
    vectors: dict[str, int] = {}
    base, first, embedded = config.num_channels, config.channels(0), 0

    def norm(name: str, channels: int) -> None:
        vectors[f"{name}.weight"] = vectors[f"{name}.bias"] = channels

    def layer(name: str, *shape: int) -> None:
        matrices[name] = shape
        vectors[f"{name}.bias"] = shape[0] if len(shape) == 4 else shape[1]

    layer("time_embed.0", base, 4 * base)
    layer("time_embed.2", 4 * base, 4 * base)
    layer("input_blocks.0.0", first, 3, 3, config.in_channels)
    for block in build(config):
        name, c, k = part(block), block.inputs, block.outputs
        if block.kind == "res":
            norm(f"{name}.in_layers.0", c)
            layer(f"{name}.in_layers.2", k, 3, 3, c)
            width = (2 if config.use_scale_shift_norm else 1) * k
            vectors[f"{name}.emb_layers.1.bias"] = width
            embedded += width
            norm(f"{name}.out_layers.0", k)
            layer(f"{name}.out_layers.3", k, 3, 3, k)
            if c != k:
                layer(f"{name}.skip_connection", c, k)
            if block.heads:
                name = part(block, 1)
                norm(f"{name}.norm", k)
                layer(f"{name}.qkv", k, 3 * k)
                layer(f"{name}.proj_out", k, k)
        elif block.kind in ("shrink", "enlarge"):
            layer(f"{name}.{'op' if block.kind == 'shrink' else 'conv'}", k, 3, 3, k)
    matrices["embedding"] = 4 * base, embedded
    norm("out.0", first)
    layer("out.2", config.out_channels, 3, 3, first)
    return matrices, vectors


def random_parameters(config: Config, seed: int = 0) -> Tree:
    """Nothing is zero: zeros are quicker to multiply."""
    random, (matrices, vectors) = np.random.default_rng(seed), parameter_shapes(config)
    found = {}
    for name, shape in matrices.items():
        fan_in = shape[0] if len(shape) == 2 else math.prod(shape[1:])
        found[name] = (random.standard_normal(shape) / math.sqrt(3 * fan_in)).astype(np.float32)
    parts = [np.ones(n) if name.endswith("weight") else 0.02 * random.standard_normal(n) for name, n in vectors.items()]
    return {"matrices": found, "vectors": np.concatenate(parts).astype(np.float32)}


# ======================================================================================================================
# operations


class View:
    """A stored activation x (B, H, W, C), seen as it is or twice as large (up). sums: of each channel and of its
    square, made once."""

    def __init__(self, x: jax.Array, up: bool = False):
        self.x, self.up = x, up
        self.sums: tuple[jax.Array, jax.Array] | None = None

    def full(self) -> jax.Array:
        return enlarge(self.x) if self.up else self.x

    def twice(self) -> View:
        view = View(self.x, True)
        view.sums = self.moments()
        return view

    def moments(self) -> tuple[jax.Array, jax.Array]:
        """Each channel's mean, and its square's, of every image: (B, C). Their gradient is part of group_norm's."""
        if self.sums is None:
            x = lax.stop_gradient(self.x).astype(jnp.float32)
            pixels = x.shape[1] * x.shape[2]
            first, second = sum_pixels(x, x * x)
            self.sums = first / pixels, second / pixels
        return self.sums


def enlarge(x: jax.Array) -> jax.Array:
    B, H, W, C = x.shape
    return jnp.broadcast_to(x[:, :, None, :, None, :], (B, H, 2, W, 2, C)).reshape(B, 2 * H, 2 * W, C)


def fours(x: jax.Array) -> jax.Array:
    """Sums of 2 x 2 pixels, in fp32."""
    B, H, W, C = x.shape
    return x.astype(jnp.float32).reshape(B, H // 2, 2, W // 2, 2, C).sum((2, 4))


def shrink(x: jax.Array) -> jax.Array:
    return (fours(x) / 4).astype(x.dtype)


def sum_pixels(*values: jax.Array) -> list[jax.Array]:
    """Sums over H and W of arrays (B, H, W, C), in two stages: first over pieces of the image, as many as it takes to
    fill a GPU."""
    B, H, W, C = values[0].shape
    pieces = 1
    while B * max(C // 32, 1) * pieces < 512 and H * W % (2 * pieces) == 0 and H * W // pieces > 64:
        pieces *= 2
    stages = lax.optimization_barrier([v.reshape(B, pieces, H * W // pieces, C).sum(2) for v in values])
    return [v.sum(1) for v in stages]


def over_pixels(v: jax.Array) -> jax.Array:
    return v[:, None, None, :]


def group_mean(v: jax.Array) -> jax.Array:
    """(B, C) -> (B, C): the mean of each group in every channel of it."""
    B, C = v.shape
    means = v.reshape(B, GROUPS, C // GROUPS).mean(2, keepdims=True)
    return jnp.broadcast_to(means, (B, GROUPS, C // GROUPS)).reshape(B, C)


class Norm(NamedTuple):
    """What a group norm does, apart from its arrays. silu: after it. ups: which parts are seen twice as large."""

    silu: bool
    ups: tuple[bool, ...]


def split(v: jax.Array, xs: tuple[jax.Array, ...]) -> list[jax.Array]:
    """(B, C of all parts) -> for each part its own, to be multiplied with pixels."""
    ends = np.cumsum([x.shape[-1] for x in xs])
    return [over_pixels(v[:, end - x.shape[-1] : end]) for x, end in zip(xs, ends)]


def norm_forward(norm: Norm, xs: Any, moments: Any, gamma: Any, beta: Any, addend: Any) -> tuple[jax.Array, Tree]:
    first, second = (jnp.concatenate(m, -1) for m in zip(*moments))
    mean = group_mean(first + addend)
    variance = group_mean(second + 2 * addend * first + addend * addend) - mean * mean
    mean, rstd = lax.optimization_barrier((mean, lax.rsqrt(jnp.maximum(variance, 0) + EPSILON)))
    scale = rstd * gamma
    shift = beta + (addend - mean) * scale
    ys = []
    for x, a, b, up in zip(xs, split(scale, xs), split(shift, xs), norm.ups):
        z = x.astype(jnp.float32) * a + b
        y = (z * jax.nn.sigmoid(z) if norm.silu else z).astype(x.dtype)
        ys.append(enlarge(y) if up else y)
    return jnp.concatenate(ys, -1), (xs, first, mean, rstd, gamma, scale, shift, addend)


def norm_backward(norm: Norm, kept: Tree, dy: jax.Array) -> tuple[Any, ...]:
    """xhat = (x + addend - mean) rstd, z = gamma xhat + beta. With the means over a group's pixels and channels of
    gamma dz (m1) and of gamma dz xhat (m2): dx = rstd (gamma dz - m1 - xhat m2), which is scale dz + constant +
    slope (x + addend). A pixel that is seen four times has the sum of four dx."""

    def gradients(xs: Any, dy: jax.Array, scale: jax.Array, shift: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        """x and dz of each part, in fp32: computed in either pass rather than stored."""
        found, end = [], 0
        for x, a, b, up in zip(xs, split(scale, xs), split(shift, xs), norm.ups):
            d = dy[..., end : end + x.shape[-1]]
            end += x.shape[-1]
            d, x = fours(d) if up else d.astype(jnp.float32), x.astype(jnp.float32)
            if norm.silu:
                z = x * a + b
                s = jax.nn.sigmoid(z)
                d = d * s * (1 + z * (1 - s))
            found.append((x, d))
        return found

    xs, first, mean, rstd, gamma, scale, shift, addend = lax.optimization_barrier(kept)
    pixels = dy.shape[1] * dy.shape[2]
    sums = [sum_pixels(d, d * x) for x, d in gradients(xs, dy, scale, shift)]
    dbeta, weighted = (jnp.concatenate(s, -1) for s in zip(*sums))
    dgamma = (weighted + (addend - mean) * dbeta) * rstd
    m1, m2 = group_mean(gamma * dbeta) / pixels, group_mean(gamma * dgamma) / pixels
    slope = -rstd * rstd * m2
    constant = -rstd * m1 - mean * slope
    daddend = scale * dbeta + pixels * (constant + slope * (first + addend))
    base = constant + slope * addend
    # The second pass waits for the first, or XLA would make one of both that stores dz.
    xs, dy, scale, shift, base, slope = lax.optimization_barrier((xs, dy, scale, shift, base, slope))
    dxs = []
    affine = zip(*(split(v, xs) for v in (scale, base, slope)))
    for (x, d), (a, k, s), up in zip(gradients(xs, dy, scale, shift), affine, norm.ups):
        dxs.append((a * d + (4 if up else 1) * (k + s * x)).astype(dy.dtype))
    return tuple(dxs), [(jnp.zeros((B, C)),) * 2 for B, _, _, C in (x.shape for x in xs)], dgamma, dbeta, daddend


def norm_only(norm: Norm, *arrays: Any) -> jax.Array:
    return norm_forward(norm, *arrays)[0]


group_norm = jax.custom_vjp(norm_only, nondiff_argnums=(0,))
group_norm.defvjp(norm_forward, norm_backward)


def conv3x3(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
    layouts = ("NHWC", "OHWI", "NHWC")
    return lax.conv_general_dilated(x, w, (stride, stride), ((1, 1), (1, 1)), dimension_numbers=layouts)


@jax.custom_vjp
def add_bias(x: jax.Array, b: jax.Array) -> jax.Array:
    return x + b.astype(x.dtype)


def add_bias_backward(_: None, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    return dy, sum_pixels(dy.astype(jnp.float32))[0].sum(0)


add_bias.defvjp(lambda x, b: (add_bias(x, b), None), add_bias_backward)


def unpacker(lengths: dict[str, int]) -> Callable[[jax.Array], dict[str, jax.Array]]:
    """One array -> its vectors by name. The gradient is one concatenation, not a sum of padded pieces."""
    ends = np.cumsum(list(lengths.values()))

    def slices(v: jax.Array) -> dict[str, jax.Array]:
        return {name: lax.slice(v, (end - n,), (end,)) for (name, n), end in zip(lengths.items(), ends.tolist())}

    unpack = jax.custom_vjp(slices)
    unpack.defvjp(lambda v: (slices(v), None), lambda _, g: (jnp.concatenate([g[name] for name in lengths]),))
    return unpack


def silu(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(x)


# ======================================================================================================================
# the model


def make_forward(config: Config, dtype: Any) -> Callable[..., jax.Array]:
    """forward(matrices in dtype, vectors in fp32, x (B, H, W, C) in fp32, t (B)) -> (B, H, W, out_channels) in fp32."""
    blocks, unpack = build(config), unpacker(parameter_shapes(config)[1])
    half = config.num_channels // 2
    frequencies = np.exp(-math.log(config.max_period) * np.arange(half) / half).astype(np.float32)
    cudnn = jax.default_backend() == "gpu" and dtype == jnp.bfloat16

    def forward(w: dict[str, jax.Array], vectors: jax.Array, x: jax.Array, t: jax.Array) -> jax.Array:
        v = unpack(vectors)
        B = len(x)

        def linear(name: str, x: jax.Array) -> jax.Array:
            return jnp.dot(x.astype(dtype), w[name], preferred_element_type=jnp.float32) + v[f"{name}.bias"]

        def norm(name: str, parts: list[View], silu=True, addend: Any = 0.0, scale: Any = 0.0, shift: Any = 0.0) -> Any:
            gamma, beta = v[f"{name}.weight"] * (1 + scale), v[f"{name}.bias"] * (1 + scale) + shift
            per_image = [jnp.broadcast_to(a, (B, len(v[f"{name}.bias"]))) for a in (gamma, beta, addend)]
            kind = Norm(silu, tuple(p.up for p in parts))
            return group_norm(kind, tuple(p.x for p in parts), [p.moments() for p in parts], *per_image)

        def res_block(block: Block, parts: list[View], embedding: jax.Array) -> View:
            name, down = part(block), block.resample == "down"
            if block.resample == "up":
                parts = [parts[0].twice()]
            y = norm(f"{name}.in_layers.0", parts)
            y = View(conv3x3(shrink(y) if down else y, w[f"{name}.in_layers.2"]))
            bias = v[f"{name}.in_layers.2.bias"]
            if config.use_scale_shift_norm:
                scale, shift = jnp.split(embedding, 2, -1)
                y = norm(f"{name}.out_layers.0", [y], addend=bias, scale=scale, shift=shift)
            else:
                y = norm(f"{name}.out_layers.0", [y], addend=embedding + bias)
            y = conv3x3(y, w[f"{name}.out_layers.3"])
            bias = v[f"{name}.out_layers.3.bias"]
            if f"{name}.skip_connection" in w:
                bias = bias + v[f"{name}.skip_connection.bias"]
                first = 0
                for p in parts:  # 1x1 convolution and upsampling may change places
                    columns = w[f"{name}.skip_connection"][first : first + p.x.shape[-1]]
                    y = y + View(jnp.einsum("bhwc,ck->bhwk", p.x, columns), p.up).full()
                    first += p.x.shape[-1]
            else:
                x = parts[0].full() if len(parts) == 1 else jnp.concatenate([p.full() for p in parts], -1)
                y = y + (shrink(x) if down else x)
            return View(add_bias(y, bias))

        def attention(name: str, x: View, heads: int) -> View:
            B, H, W, C = x.x.shape
            y = norm(f"{name}.norm", [x], silu=False)
            y = add_bias(jnp.einsum("bhwc,ck->bhwk", y, w[f"{name}.qkv"]), v[f"{name}.qkv.bias"])
            q, k, u = jnp.split(y.reshape(B, H * W, 3 * heads, C // heads), 3, 2)
            y = jax.nn.dot_product_attention(q, k, u, implementation="cudnn" if cudnn else "xla")
            y = jnp.einsum("bhwc,ck->bhwk", y.reshape(B, H, W, C), w[f"{name}.proj_out"])
            return View(add_bias(x.x + y, v[f"{name}.proj_out.bias"]))

        angles = t.astype(jnp.float32)[:, None] * frequencies
        emb = linear("time_embed.0", jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1))
        emb = silu(linear("time_embed.2", silu(emb)))
        embeddings = jnp.dot(emb.astype(dtype), w["embedding"], preferred_element_type=jnp.float32)

        h = View(add_bias(conv3x3(x.astype(dtype), w["input_blocks.0.0"]), v["input_blocks.0.0.bias"]))
        kept, column = [h], 0
        for block in blocks:
            name = part(block)
            if block.kind == "res":
                bias = v[f"{name}.emb_layers.1.bias"]
                embedding = embeddings[:, column : column + len(bias)] + bias
                column += len(bias)
                h = res_block(block, [h, kept.pop()] if block.pop else [h], embedding)
                if block.heads:
                    h = attention(part(block, 1), h, block.heads)
            elif block.kind == "pool":
                h = View(shrink(h.x))
            elif block.kind == "shrink":
                h = View(add_bias(conv3x3(h.x, w[f"{name}.op"], 2), v[f"{name}.op.bias"]))
            elif block.kind == "nearest":
                h = h.twice()
            else:
                h = View(add_bias(conv3x3(enlarge(h.x), w[f"{name}.conv"]), v[f"{name}.conv.bias"]))
            if block.push:
                kept.append(h)
        y = norm("out.0", [h])
        return conv3x3(y, w["out.2"]).astype(jnp.float32) + v["out.2.bias"]

    return forward


# ======================================================================================================================
# a training step


def alpha_bars(config: Config) -> np.ndarray:
    T = config.diffusion_steps
    if config.noise_schedule == "linear":
        return np.cumprod(1 - np.linspace(1e-4, 0.02, T) * 1000 / T)
    f = np.cos((np.arange(T + 1) / T + 0.008) / 1.008 * np.pi / 2) ** 2
    return np.cumprod(1 - np.minimum(1 - f[1:] / f[:-1], 0.999))


def draw(key: jax.Array, shape: tuple[int, ...], steps: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The next key, t (B) and noise, out of one call of the device's own generator."""
    count = math.prod(shape)
    key, bits = lax.rng_bit_generator(key, (count + shape[0],), dtype=jnp.uint32)
    uniform = (bits[:count] >> 8).astype(jnp.float32) * 2**-23 + (2**-24 - 1)  # inside (-1, 1)
    noise = math.sqrt(2) * lax.erf_inv(jnp.clip(uniform, -1 + 2**-24, 1 - 2**-24))
    return key, (bits[count:] % steps).astype(jnp.int32), noise.reshape(shape)


def make_loss(config: Config, dtype: Any) -> Callable[..., jax.Array]:
    forward, bars = make_forward(config, dtype), alpha_bars(config)
    signal, sigma = np.sqrt(bars).astype(np.float32), np.sqrt(1 - bars).astype(np.float32)

    def loss(matrices: Tree, vectors: jax.Array, x0: jax.Array, t: jax.Array, noise: jax.Array) -> jax.Array:
        """The mean squared error of the predicted noise."""
        a, b = (jnp.asarray(v)[t][:, None, None, None] for v in (signal, sigma))
        out = forward(matrices, vectors, a * x0 + b * noise, t)
        return jnp.mean(jnp.square(out[..., : config.in_channels] - noise))

    return loss


def working_copy(parameters: Tree, dtype: Any) -> Tree:
    return {name: w.astype(dtype) for name, w in parameters["matrices"].items()}


def initial_state(config: Config, dtype: Any) -> Tree:
    parameters = random_parameters(config)
    copies = {name: jax.tree.map(np.zeros_like, parameters) for name in ("first", "second")}
    average = jax.tree.map(np.copy, parameters)
    scalars = {"key": np.arange(1, 5, dtype=np.uint32), "step": np.zeros((), np.int32)}
    return {"parameters": parameters, "copy": working_copy(parameters, dtype), "average": average, **copies, **scalars}


def make_step(config: Config, dtype: Any) -> Callable[[Tree, jax.Array], tuple[Tree, jax.Array]]:
    """step(state, x0) -> the next state, the loss."""
    loss, (beta1, beta2), rate = make_loss(config, dtype), (config.adam_beta1, config.adam_beta2), config.ema_rate[0]

    def step(state: Tree, x0: jax.Array) -> tuple[Tree, jax.Array]:
        key, t, noise = draw(state["key"], x0.shape, config.diffusion_steps)
        value, gradient = jax.value_and_grad(loss, (0, 1))(state["copy"], state["parameters"]["vectors"], x0, t, noise)
        gradient = {"matrices": gradient[0], "vectors": gradient[1]}
        count = state["step"] + 1
        correct1, correct2 = (1 / (1 - beta ** count.astype(jnp.float32)) for beta in (beta1, beta2))
        first = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g.astype(jnp.float32), state["first"], gradient)
        squares = jax.tree.map(lambda g: jnp.square(g.astype(jnp.float32)), gradient)
        second = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g, state["second"], squares)

        def adamw(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
            update = m * correct1 / (jnp.sqrt(v * correct2) + config.adam_eps)
            return p - config.lr * (update + config.weight_decay * p)

        parameters = jax.tree.map(adamw, state["parameters"], first, second)
        average = jax.tree.map(lambda a, p: a + (1 - rate) * (p - a), state["average"], parameters)
        copy = working_copy(parameters, dtype)
        following = {"parameters": parameters, "copy": copy, "average": average, "first": first, "second": second}
        return {**following, "key": key, "step": count}, value

    return step


# ======================================================================================================================
# measuring


def compiled(work: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()) -> Any:
    options = COMPILER_OPTIONS if jax.default_backend() == "gpu" else None
    return jax.jit(work, donate_argnums=donate).lower(*arguments).compile(compiler_options=options)


def gibibytes(program: Any) -> float:
    """Arguments, results and everything between them, as the compiler laid it out."""
    m = program.memory_analysis()
    parts = m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes
    return round(parts / 2**30, 3)


def time_calls(work: Callable[[], Any], count: int) -> list[float]:
    """Median, 10th and 90th percentile of count times the milliseconds of a call; on a GPU ten between two looks at the
    clock, as train_unet's are, because nothing waits for a step in training either."""
    repeats = 10 if jax.default_backend() == "gpu" else 1
    ms = []
    for i in range(-1, count):  # the first turn warms up
        start = time.perf_counter()
        for _ in range(repeats):
            last = work()
        jax.block_until_ready(last)
        if i >= 0:
            ms.append((time.perf_counter() - start) * 1e3 / repeats)
    return [round(float(q), 4) for q in np.percentile(ms, [50, 10, 90])]


def bench(config: Config, precision: str, parts: str, count: int) -> dict[str, Any]:
    dtype = jnp.bfloat16 if precision == "bf16" else jnp.float32
    random = np.random.default_rng(1)
    x0 = jnp.asarray(random.uniform(-1, 1, (config.batch_size, *config.image_size, config.in_channels)), jnp.float32)
    state = jax.tree.map(lambda a: jnp.array(a, copy=True), initial_state(config, dtype))
    result: dict[str, Any] = {"program": f"JAX {jax.__version__}", "model": config.preset, "batch": config.batch_size}
    result |= {"precision": precision, "step_ms": None, "forward_ms": None, "memory_gib": None}
    if parts != "step":
        t = jnp.arange(config.batch_size) * 7 % config.diffusion_steps
        arguments = state["copy"], state["parameters"]["vectors"], x0, t
        forward = compiled(make_forward(config, dtype), *arguments)
        result |= {"forward_ms": time_calls(lambda: forward(*arguments), count), "memory_gib": gibibytes(forward)}
    if parts != "forward":
        step = compiled(make_step(config, dtype), state, x0, donate=(0,))

        def one_step() -> jax.Array:
            nonlocal state
            state, value = step(state, x0)
            return value

        result |= {"step_ms": time_calls(one_step, count), "memory_gib": gibibytes(step)}
        if not np.isfinite(last := float(one_step())):
            raise UserError(f"the loss is {last} after {int(state['step'])} steps")
    return result


def read_config(argv: list[str]) -> Config:
    config = make_config({"preset": "unet64"} | parse_flags(argv, FLAGS))
    for name, wrong in {
        "class_cond": config.class_cond,
        "patch_size": config.patch > 1,
        "dropout": config.dropout > 0,
        "microbatch": config.microbatch > 0,
        "use_checkpoint": config.use_checkpoint,
        "use_new_attention_order": not config.use_new_attention_order,
        "objective": config.objective != "ddpm" or config.predict != "eps",
        "optimizer": config.muon,
    }.items():
        if wrong:
            value = format_value(name, getattr(config, name))
            raise UserError(f"--{name} {value}: bench_jax.py times models without it; another value works")
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=int, default=20, help="how many times steps and forward passes are timed")
    parser.add_argument("--bench_parts", default="both", choices=["both", "step", "forward"])
    args, flags = parser.parse_known_args()
    config = read_config(flags)
    precision = config.precision if config.precision != "auto" else "bf16" if jax.default_backend() == "gpu" else "fp32"
    if precision == "fp32":
        jax.config.update("jax_default_matmul_precision", "highest")  # no TF32
    print(json.dumps(bench(config, precision, args.bench_parts, args.bench)))


if __name__ == "__main__":
    try:
        main()
    except UserError as e:
        sys.exit(f"bench_jax: {e}")
