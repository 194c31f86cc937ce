"""The GPU build beside the CPU build: losses, sizes that tile badly, bit-identical repeats, resume, files that move, the sanitizer.

test_training.py runs on the GPU build as well (TRAIN_UNET_BUILD=cuda), and test_pairs.py builds its pairs for the GPU where there is one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, flags, make_images

HAS_GPU = subprocess.run(["nvidia-smi"], capture_output=True).returncode == 0 if shutil.which("nvidia-smi") else False
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="this machine has no GPU")
QUERY = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
HOPPER = HAS_GPU and subprocess.run(QUERY, capture_output=True, text=True).stdout.startswith("9.0")
IN_FP8 = pytest.param("fp8", marks=pytest.mark.skipif(not HOPPER, reason="this machine has no H100 or H200"))

RUN = flags(
    "--preset fashion32 --lr 1e-3 --lr_schedule constant --warmup_steps 0 --adam_beta2 0.999 --ema_rate 0.995 --noise_schedule linear --sample_interval 0"
)
EVERYTHING = flags(
    "--num_channels 32 --channel_mult 1,2,3 --num_res_blocks 1 --attention_resolutions 6,3 --num_head_channels 16 --use_scale_shift_norm True",
    "--resblock_updown True --learn_sigma True --class_cond True --dropout 0.1 --random_flip True",
)
STRIDED = flags("--num_channels 96 --channel_mult 1,1 --num_res_blocks 1 --attention_resolutions 6 --num_heads 3 --num_head_channels -1")
POOLED = flags("--num_channels 32 --channel_mult 1,5 --num_res_blocks 2 --attention_resolutions 12 --num_head_channels 32 --conv_resample False")
AGAIN = flags(EVERYTHING, "--use_checkpoint True")


def read_losses(folder: Path) -> np.ndarray:
    return np.array([float(row.split(",")[1]) for row in (folder / "log.csv").read_text().splitlines()[1:]])


def train(binary: str, folder: Path, steps: int, *words: object) -> tuple[list[float], bytes]:
    """Losses of all steps, and the last checkpoint."""
    command = [f"{ROOT}/train_unet_{binary}", "--output_dir", folder, "--max_steps", steps, "--log_interval", 100, *words]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stderr[-2000:]}"
    return list(read_losses(folder)), (folder / f"model_{steps:07d}.bin").read_bytes()


@pytest.fixture
def data(make_data: Callable) -> Path:
    """12 x 20 pixels, three channels, three classes."""
    return make_data("odd.bin", make_images(24, 3, 12, 20), np.arange(24) % 3, 3)


@needs_gpu
@pytest.mark.parametrize("batch", [1, 3, 5])
@pytest.mark.parametrize("model", [EVERYTHING, STRIDED, POOLED, AGAIN], ids=["everything", "strided", "pooled", "again"])
def test_losses_follow_the_cpu(data: Path, tmp_path: Path, model: list[str], batch: int) -> None:
    """fp32: only the order of sums differs, 1e-4 after 20 steps as in test_training.py. bf16: every activation is rounded by up to 2^-8 and
    a loss averages thousands of them, so that the first losses agree to 2^-9 (what is random averages out); later ones drift apart, as small batches amplify any difference.
    (What a whole forward and backward pass may differ by in bf16 is derived and checked in dev/pairs/unet.py.)"""
    words = [*RUN, *model, "--data_file", data, "--batch_size", batch]
    cpu, _ = train("cpu", tmp_path / "cpu", 20, *words)
    exact, _ = train("cuda", tmp_path / "exact", 20, *words, "--precision", "fp32")
    bf16, _ = train("cuda", tmp_path / "bf16", 20, *words)
    assert np.max(np.abs(np.array(exact) / cpu - 1)) < 1e-4
    assert np.max(np.abs(np.array(bf16) / cpu - 1)[:4]) < 2**-9


@needs_gpu
@pytest.mark.parametrize("precision", ["bf16", "fp32", IN_FP8])
def test_repeats_are_bit_identical(data: Path, tmp_path: Path, precision: str) -> None:
    """300 steps twice, and once more in two parts."""
    words = [*RUN, *EVERYTHING, "--data_file", data, "--batch_size", 6, "--microbatch", 3, "--precision", precision, "--save_interval", 150]
    once, twice = (train("cuda", tmp_path / name, 300, *words) for name in ("a", "b"))
    assert once == twice
    train("cuda", tmp_path / "c", 150, *words)
    resumed = train("cuda", tmp_path / "c", 300, "--resume_checkpoint", "latest", "--sample_interval", 0, "--precision", precision)
    assert resumed == once


def bench(folder: Path, without: str, words: list[str]) -> None:
    """Trains unet64 without what dev/bench can leave out."""
    command = [ROOT / "dev" / "bench_cuda", *flags("--preset unet64 --data_file", ROOT / "data" / "emoji64.bin", words, "--output_dir", folder)]
    known = os.environ | {"BENCH_WITHOUT": without}
    done = subprocess.run(list(map(str, command)), env=known, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@needs_gpu
@pytest.mark.parametrize("precision", ["bf16", IN_FP8])
@pytest.mark.parametrize("without", ["", "early", "beside", "graphs", "early,beside,graphs"])
def test_what_makes_it_fast_changes_no_bit(tmp_path: Path, without: str, precision: str) -> None:
    """unet64, whose launches overlap, whose weight gradients are computed beside the rest, and whose steps are graphs: without each of them the same 40
    steps, in which every launch meets its neighbours often. A kernel that reads what another one has not written yet shows here as other bits."""
    words = flags("--max_steps 40 --log_interval 100 --sample_interval 40 --timestep_respacing 5 --warmup_steps 1 --precision", precision)
    for name, left_out in (("with", ""), ("without", without)):
        bench(tmp_path / name, left_out, words)
    for name in ("model_0000040.bin", "samples_0000040.png"):
        assert (tmp_path / "with" / name).read_bytes() == (tmp_path / "without" / name).read_bytes()


@needs_gpu
@pytest.mark.parametrize("without", ["clusters", "hopper", "clusters,hopper"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_what_sums_in_another_order_changes_little(tmp_path: Path, without: str, precision: str) -> None:
    """Clusters, and Hopper's kernels in place of portable ones. unet64's first losses to what test_losses_follow_the_cpu derives: 2^-9 in bf16, 1e-4 in fp32.
    (That the sums themselves are the same, test_pairs.py checks where they are exact.)"""
    words = flags("--max_steps 4 --log_interval 100 --sample_interval 0 --warmup_steps 1 --precision", precision)
    for name, left_out in (("with", ""), ("without", without)):
        bench(tmp_path / name, left_out, words)
    usual, other = (read_losses(tmp_path / name) for name in ("with", "without"))
    assert len(usual) == 4
    assert np.max(np.abs(other / usual - 1)) < (2**-9 if precision == "bf16" else 1e-4)


@needs_gpu
def test_a_checkpoint_moves(data: Path, tmp_path: Path) -> None:
    """20 steps on the CPU = 10 there and 10 on the GPU, and the other way round."""
    words = [*RUN, *STRIDED, "--data_file", data, "--batch_size", 4]
    whole, _ = train("cpu", tmp_path / "whole", 20, *words)
    for first, then in (("cpu", "cuda"), ("cuda", "cpu")):
        folder = tmp_path / first
        train(first, folder, 10, *words, "--precision", "fp32")
        moved, _ = train(then, folder, 20, "--resume_checkpoint", "latest", "--sample_interval", 0, "--precision", "fp32")
        assert np.max(np.abs(np.array(moved) / whole - 1)) < 1e-4


@needs_gpu
@pytest.mark.parametrize("precision", ["bf16", IN_FP8])
def test_training_follows_autocast(tmp_path: Path, precision: str) -> None:
    """300 steps of unet64 beside PyTorch's autocast (and the twin's rounding to FP8), with the same draws. Training amplifies every difference of a
    rounding, so two right runs part; how far they may is measured: PyTorch eager against PyTorch compiled, which round at different places. As the
    root of the mean square of loss / loss - 1, in bf16 on an H200: 0.75 to 1.0 % for these two, 0.7 % for two runs of the same PyTorch command, 0.55 to
    1.0 % for ours and any of these.
    Such a figure scatters by a sixth from run to run, the ratio of two by a quarter: twice the spread is four standard deviations."""
    words = flags("--preset unet64 --data_file", ROOT / "data" / "emoji64.bin", "--sample_interval 0")

    def twin(compiled: int) -> np.ndarray:
        folder = tmp_path / f"torch_{compiled}"
        more = flags("--max_steps 300 --precision", precision, "--compile", str(compiled), "--output_dir", folder)
        command = [sys.executable, ROOT / "train_unet.py", *words, *more]
        done = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr[-2000:]
        return read_losses(folder)

    with ThreadPoolExecutor() as pool:
        eager, compiled = pool.map(twin, [0, 1])
    ours = np.array(train("cuda", tmp_path / "ours", 300, *words, "--precision", precision)[0])

    def apart(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.mean((a / b - 1) ** 2) ** 0.5)

    assert len(ours) == len(eager) == 300
    spread, distances = apart(eager, compiled), (apart(ours, eager), apart(ours, compiled))
    print(f"eager and compiled PyTorch {spread:.2%} apart; ours from them {distances[0]:.2%}, {distances[1]:.2%}")
    assert max(distances) < 2 * spread


@needs_gpu
def test_sampling_in_large_batches(tmp_path: Path) -> None:
    """256 images at a time fill the GPU several times over: early blocks write while late ones still read. A run, whose memory plan keeps what it
    reads, and --sample, whose plan uses it again, draw the same bits."""
    sampling = flags("--sampler ddim --timestep_respacing 4 --eta 0 --batch_size 256")
    words = flags("--preset unet64 --data_file", ROOT / "data" / "emoji64.bin", sampling, "--num_samples 512 --warmup_steps 1")
    train("cuda", tmp_path / "out", 10, *words)
    command = [f"{ROOT}/train_unet_cuda", *flags("--sample 512 --output s.png --init out/model_0000010.bin", sampling)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "s.png").read_bytes() == (tmp_path / "out" / "samples_0000010.png").read_bytes()


@needs_gpu
@pytest.mark.parametrize(("size", "batch", "limit"), [(8, 65536, "65535 images"), (4096, 16, "268435455 pixels")])
def test_more_at_a_time_than_kernels_can_number(refused: Callable, make_data: Callable, size: int, batch: int, limit: str) -> None:
    """CUDA limits the dimensions of a grid, and halo_source has 28 bits for a pixel."""
    few = make_data("few.bin", make_images(1, 1, size, size))
    model = f"--num_channels 32 --channel_mult 1 --num_res_blocks 1 --attention_resolutions {size}"
    refused(flags(RUN, model, "--data_file", few, "--batch_size", batch), f"--batch_size {batch}", limit, binary="cuda")


@needs_gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_sanitizer(data: Path, tmp_path: Path, tool: str) -> None:
    if not shutil.which("compute-sanitizer"):
        pytest.skip("compute-sanitizer is not installed")
    for precision in ("bf16", "fp32", *["fp8"] * HOPPER):
        words = [*RUN, *EVERYTHING, "--data_file", data, "--batch_size", 2, "--max_steps", 2, "--precision", precision, "--output_dir", precision]
        words = flags(words, "--class_dropout 0.2 --guidance_scale 2 --sampler heun --S_churn 2 --timestep_respacing 3 --dynamic_threshold 0.9")
        words = flags(words, "--sample_interval 2 --num_samples 3")
        if precision != "fp8":  # bf16: Hopper's kernels for it
            words = flags(words, "--optimizer muon")
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", f"{ROOT}/train_unet_cuda", *words]
        done = subprocess.run(list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.skipif(HAS_GPU, reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, data: Path) -> None:
    binary = ROOT / "train_unet_cuda"
    if not binary.exists():
        pytest.skip("there is no nvcc here to build it")
    done = subprocess.run([binary, *RUN, *STRIDED, "--data_file", data], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("train_unet: this is the GPU build and there is no GPU") and "make train_unet_cpu" in done.stderr
    assert not (tmp_path / "out").exists()
