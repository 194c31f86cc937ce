"""Several GPUs of this machine against one, for train_unet's GPU build (dev/bench_cuda, with either --exchange) and for PyTorch (DistributedDataParallel, compiled, the
whole step one CUDA graph) in the same run: make bench_gpus, or

  python dev/bench_gpus.py [--gpus 2] [--only unet64] [--skip_torch] [--output bench_gpus.json]

Weak scaling: the same batch a GPU; the step's time over that of one GPU, 1 at best. Strong scaling: one batch shared; how many times as fast, at best the
number of GPUs. What each of several GPUs has in memory, too.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import bench
from bench import MODELS, ROOT, TORCH

# model, batch, and whether that is a GPU's, however many there are, or what they share
ROWS = [("unet64", 32, True), ("unet64", 128, True), ("adm64", 32, True), ("unet64", 64, False)]
MASTER = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]


def command_of(model: str, program: str, gpus: int, batch: int, steps: int) -> list[str]:
    words = [*MODELS[model].split(), "--batch_size", str(batch), "--precision", "bf16", "--bench", str(steps)]
    if program != TORCH:
        return ["dev/bench_cuda", *words, *(["--num_gpus", str(gpus), "--exchange", program] if gpus > 1 else [])]
    start = [sys.executable, *([*MASTER, str(gpus)] if gpus > 1 else [])]
    return [*start, "dev/bench_torch.py", *words, "--bench_parts", "step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, help="how many, default: all that PyTorch sees, but 2 at least")
    parser.add_argument("--steps", type=int, default=30, help="steps that are timed in each run")
    parser.add_argument("--turns", type=int, default=2, help="runs of each program, with one GPU and with several in turns")
    parser.add_argument("--only", default="", help="rows whose 'model batch' holds this, such as 'unet64 32'")
    parser.add_argument("--skip_torch", action="store_true")
    parser.add_argument("--timeout", type=float, default=400, help="seconds, of each run")
    parser.add_argument("--output", help="write every line of JSON that the programs printed to this file")
    args = parser.parse_args()
    probe = "import torch; print(torch.cuda.device_count(), torch.cuda.is_available() and torch.cuda.get_device_name(), 'PyTorch', torch.__version__)"
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True).stdout.split(maxsplit=1) or ["0", "no PyTorch\n"]
    gpus, everything = args.gpus or max(int(found[0]), 2), []
    print(f"{gpus} GPUs against one, {found[1].strip()}", flush=True)
    print(f"{'model':7s} {'a GPU':>6s} {'program':12s} {'1 GPU, ms':>10s} {f'{gpus} GPUs, ms':>11s} {'':16s} {'GiB':>6s} {'GiB each':>9s}")
    for model, batch, each in ROWS:
        if args.only not in f"{model} {batch}":
            continue
        for program in ("nccl", "direct", TORCH)[: 2 if args.skip_torch else 3]:
            results: dict[int, list[dict[str, Any]]] = {1: [], gpus: []}
            name = f"{model:7s} {batch if each else f'{batch}/{gpus}':>6} {'PyTorch DDP' if program == TORCH else f'ours, {program}':12s}"
            try:
                for _ in range(args.turns):
                    for n in results:
                        whole = batch * n if each else batch
                        results[n].append(bench.run_program(command_of(model, program, n, whole, args.steps), args.timeout))
            except RuntimeError as e:
                print(f"{name} {e}", flush=True)
                continue
            everything += [line for lines in results.values() for line in lines]
            one, all_of_them = (statistics.median(line["step_ms"][0] for line in lines) for lines in results.values())
            ratio = f"{all_of_them / one:6.3f} x as long" if each else f"{one / all_of_them:6.3f} x as fast"
            memory = [lines[0]["memory_gib"] for lines in results.values()]
            print(f"{name} {one:10.3f} {all_of_them:11.3f} {ratio:16s} {memory[0]:6.2f} {memory[1]:9.2f}", flush=True)
    if args.output:
        (ROOT / args.output).write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
