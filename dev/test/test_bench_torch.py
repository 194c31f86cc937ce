"""dev/benchmarks/bench_torch.py: what it times is a training step of the model that it says."""

from __future__ import annotations

import sys

import pytest
import torch
from conftest import ROOT

sys.path.insert(0, str(ROOT / "dev/benchmarks"))
import bench_torch

from common.config import make_config
from common.model import UNetModel
from train_unet import muon_updates


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")
def test_muon_updates_the_weights_themselves() -> None:
    """torch.optim.Muon takes matrices alone: those that it gets are the memory of the convolutions' weights, and their gradients lie in the same order."""
    torch.manual_seed(0)
    config = make_config(dict(preset="quick64", image_size=(16, 16), num_channels=32, channel_mult=(1.0, 2.0), attention_resolutions=(4,)))
    model = UNetModel(config).to(memory_format=torch.channels_last)
    matrices = bench_torch.as_matrices(model)
    named = {weight: name for name, weight in model.named_parameters()}
    assert {named[weight] for weight in matrices} == {name for name, weight in model.named_parameters() if muon_updates(name, weight.shape)}
    x = torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last)
    model(x, torch.zeros(2), torch.zeros(2, dtype=torch.long)).square().mean().backward()
    copies = {}
    for weight in matrices:
        values = weight.detach().movedim(1, -1).reshape(len(weight), -1).clone()  # the order of channels_last, written in another way
        copies[weight] = torch.nn.Parameter(values)
        copies[weight].grad = weight.grad.movedim(1, -1).reshape(len(weight), -1).clone()
        matrices[weight].grad = bench_torch.as_matrix(weight.grad)
    torch.optim.Muon(matrices.values(), 0.02).step()
    torch.optim.Muon(copies.values(), 0.02).step()
    for weight, copy in copies.items():
        assert torch.equal(weight.detach().movedim(1, -1).reshape(len(weight), -1), copy), named[weight]
