"""dev/benchmarks/bench_jax.py computes what train_unet.py does: loss and every gradient in fp32, same weights and inputs.

Without JAX all but the last are skipped.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, flags

import train_unet
from common.flags import Config
from common.model import UNetModel

sys.path.insert(0, str(ROOT / "dev/benchmarks"))
HAS_JAX = importlib.util.find_spec("jax") is not None
needs_jax = pytest.mark.skipif(not HAS_JAX, reason="JAX is optional (pip install jax)")
if HAS_JAX:
    import bench_jax
    import jax

SMALL = flags(
    "--image_size 16 --in_channels 3 --batch_size 2 --num_channels 32 --channel_mult 1,2",
    "--attention_resolutions 8 --num_head_channels 16",
)
MODELS = {
    "unet64": flags("--preset unet64", SMALL, "--num_res_blocks 1"),
    "adm64": flags("--preset adm64 --class_cond False --dropout 0", SMALL, "--num_res_blocks 1"),
    "tiny": flags("--preset fashion32 --conv_resample True", SMALL, "--num_res_blocks 1"),
}
SMALLEST = flags(MODELS["unet64"], "--image_size 8 --channel_mult 1 --attention_resolutions 8")


def ours(name: str, value: np.ndarray) -> np.ndarray:
    """PyTorch's layouts -> bench_jax's: filters (out, height, width, in), matrices (in, out)."""
    if value.ndim == 4 and value.shape[-1] == 3:
        return value.transpose(0, 2, 3, 1)
    return value.reshape(value.shape[:2]).T


def convert(config: Config, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    matrices, vectors = bench_jax.parameter_shapes(config)
    embedding = [tensors[name.replace("bias", "weight")].T for name in vectors if "emb_layers" in name]
    found = {name: ours(name, tensors[f"{name}.weight"]) for name in matrices if name != "embedding"}
    found["embedding"] = np.concatenate(embedding, 1)
    assert {name: value.shape for name, value in found.items()} == matrices
    used = {f"{name}.weight" for name in found} | set(vectors)
    used |= {name.replace("bias", "weight") for name in vectors if "emb_layers" in name}
    assert used - {"embedding.weight"} == set(tensors)
    return {"matrices": found, "vectors": np.concatenate([tensors[name] for name in vectors])}


@needs_jax
@pytest.mark.parametrize("model", MODELS)
def test_loss_and_gradients(model: str) -> None:
    config = bench_jax.read_config(MODELS[model])
    torch.manual_seed(0)
    net = UNetModel(config)  # PyTorch's own initial weights, none of which are zero
    for name, p in net.named_parameters():
        if p.ndim == 1:
            p.data += 0.1 * torch.randn_like(p)
    B, C, (H, W) = 2, config.in_channels, config.image_size
    x0, noise, t = torch.rand(B, C, H, W) * 2 - 1, torch.randn(B, C, H, W), torch.tensor([20, 700])
    bar = torch.from_numpy(bench_jax.alpha_bars(config))[t].float()[:, None, None, None]
    out = net(bar.sqrt() * x0 + (1 - bar).sqrt() * noise, t.float())
    loss = torch.nn.functional.mse_loss(out[:, :C], noise)
    loss.backward()
    level = train_unet.Diffusion(config).level(t).float32()
    assert torch.allclose(level.signal * x0 + level.sigma * noise, bar.sqrt() * x0 + (1 - bar).sqrt() * noise, atol=1e-5)

    parameters = convert(config, {name: p.detach().numpy() for name, p in net.named_parameters()})
    expected = convert(config, {name: p.grad.numpy() for name, p in net.named_parameters()})
    pixels = [v.numpy().transpose(0, 2, 3, 1) for v in (x0, noise)]
    find = jax.jit(jax.value_and_grad(bench_jax.make_loss(config, np.float32), (0, 1)))
    value, (matrices, vectors) = find(parameters["matrices"], parameters["vectors"], pixels[0], t.numpy(), pixels[1])
    assert abs(float(value) / loss.item() - 1) < 1e-5
    size = max(np.abs(g).max() for g in expected["matrices"].values())
    for name, gradient in matrices.items():
        assert np.max(np.abs(gradient - expected["matrices"][name])) < 1e-4 * size, name
    names = np.repeat(*zip(*bench_jax.parameter_shapes(config)[1].items()))
    error = np.abs(vectors - expected["vectors"])
    assert error.max() < 1e-4 * np.abs(expected["vectors"]).max(), names[error.argmax()]


@needs_jax
def test_steps_train() -> None:
    """Sixty steps on the same two images: the loss falls, the average follows, the working copy is the weights'."""
    config = bench_jax.read_config(flags(SMALLEST, "--lr 1e-3"))
    x0 = np.random.default_rng(0).uniform(-1, 1, (2, 8, 8, 3)).astype(np.float32)
    state = bench_jax.initial_state(config, np.float32)
    before = state["parameters"]["vectors"].copy()
    step, losses = jax.jit(bench_jax.make_step(config, np.float32)), []
    for _ in range(60):
        state, loss = step(state, x0)
        losses.append(float(loss))
    assert np.mean(losses[-20:]) < 0.8 * np.mean(losses[:20])
    assert state["step"] == 60
    assert np.array_equal(state["copy"]["out.2"], state["parameters"]["matrices"]["out.2"])
    moved, followed = (np.abs(state[name]["vectors"] - before).mean() for name in ("parameters", "average"))
    assert 0 < followed < moved


@needs_jax
def test_bench() -> None:
    config = bench_jax.read_config(SMALLEST)
    line = bench_jax.bench(config, "bf16", "both", 2)
    assert set(line) == {"program", "model", "batch", "precision", "step_ms", "forward_ms", "memory_gib"}
    assert min(line["step_ms"] + line["forward_ms"]) > 0 and line["memory_gib"] > 0


@needs_jax
def test_refuses() -> None:
    command = [sys.executable, "dev/benchmarks/bench_jax.py", "--preset", "adm64"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "class_cond" in done.stderr


def test_without_jax() -> None:
    """One sentence, exit code 1; bench.py says what is left out."""
    program = "import runpy, sys; sys.modules['jax'] = None; runpy.run_path('dev/benchmarks/bench_jax.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "JAX is not installed" in done.stderr
