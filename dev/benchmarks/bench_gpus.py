"""Several GPUs of this machine against one, for train_unet's GPU build (dev/bench_cuda; by itself and with --exchange nccl)
and for PyTorch (DistributedDataParallel, compiled, the whole step one CUDA graph) in the same run: make bench_gpus, or

  python dev/benchmarks/bench_gpus.py [--gpus 2,4] [--only unet64] [--skip_torch] [--output bench_gpus.json]

Weak scaling: the same batch a GPU; the step's time over that of one GPU, 1 at best. Strong scaling: one batch shared; how
many times as fast, at best the number of GPUs, as one that takes it at once, and as one that takes the same run (the same
bits: each GPU's share is its --microbatch). What each of several GPUs has in memory, too. Programs take turns, since
the clocks of GPUs at their power's limit wander by some percent.
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


OURS = ("ours", "ours, NCCL")
SAME_RUN = "same run"  # ours on one GPU, which takes several GPUs' shares one after the other


def command_of(model: str, program: str, gpus: int, batch: int, steps: int) -> list[str]:
    words = [*MODELS[model].split(), "--batch_size", str(batch), "--precision", "bf16", "--bench", str(steps)]
    if program in OURS:
        exchange = ["--exchange", "auto" if program == OURS[0] else "nccl"]
        return ["dev/bench_cuda", *words, *(["--num_gpus", str(gpus), *exchange] if gpus > 1 else [])]
    start = [sys.executable, *([*MASTER, str(gpus)] if gpus > 1 else [])]
    return [*start, "dev/benchmarks/bench_torch.py", *words, "--bench_parts", "step"]


def measure(commands: dict[tuple[str, int], list[str]], turns: int, timeout: float) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """What each of them printed in its turns (PyTorch, which compiles for a minute, has one); of one that failed, nothing."""
    results: dict[tuple[str, int], list[dict[str, Any]]] = {key: [] for key in commands}
    for turn in range(turns):
        for key, command in commands.items():
            if turn and key[0] == TORCH:
                continue
            try:
                results[key].append(bench.run_program(command, timeout))
            except RuntimeError as e:
                print(f"{' '.join(command)}: {e}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", help="how many, such as 2,4; default: 2 and all that PyTorch sees")
    parser.add_argument("--steps", type=int, default=20, help="tens of steps that are timed in each run")
    parser.add_argument("--turns", type=int, default=2, help="runs of each program, which take turns")
    parser.add_argument("--only", default="", help="rows whose 'model batch' holds this, such as 'unet64 32'")
    parser.add_argument("--skip_torch", action="store_true")
    parser.add_argument("--timeout", type=float, default=400, help="seconds, of each run")
    parser.add_argument("--output", help="write every line of JSON that the programs printed to this file")
    args = parser.parse_args()
    probe = "import torch; print(torch.cuda.device_count(), torch.cuda.is_available() and torch.cuda.get_device_name(), 'PyTorch', torch.__version__)"
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True).stdout.split(maxsplit=1) or ["2", "no PyTorch\n"]
    several, everything = sorted({int(n) for n in args.gpus.split(",")} if args.gpus else {2, max(int(found[0]), 2)}), []
    print(f"{' and '.join(map(str, several))} GPUs against one, {found[1].strip()}", flush=True)
    print(f"{'model':7s} {'a GPU':>6s} {'program':12s} {'GPUs':>4s} {'1 GPU, ms':>10s} {'so many, ms':>12s} {'':16s} {'GiB':>6s} {'GiB each':>9s}")
    for model, batch, each in ROWS:
        if args.only not in f"{model} {batch}":
            continue
        pairs = [(program, n) for program in (*OURS, *([] if args.skip_torch else [TORCH])) for n in (1, *several)]
        pairs.remove((OURS[1], 1))
        commands = {(program, n): command_of(model, program, n, batch * n if each else batch, args.steps) for program, n in pairs}
        for n in several if not each else ():
            commands[SAME_RUN, n] = [*commands[OURS[0], 1], "--microbatch", str(batch // n)]
        results = measure(commands, args.turns, args.timeout)
        everything += [line for lines in results.values() for line in lines]
        for (program, n), lines in results.items():
            first = results[TORCH if program == TORCH else OURS[0], 1]
            if n == 1 or program == SAME_RUN or not lines or not first:
                continue
            one, time = (statistics.median(line["step_ms"][0] for line in lines) for lines in (first, lines))
            ratio = f"{time / one:6.3f} x as long" if each else f"{one / time:6.3f} x as fast"
            name = f"{model:7s} {batch if each else f'{batch}/{n}':>6} {'PyTorch DDP' if program == TORCH else program:12s} {n:4d}"
            same = [line["step_ms"][0] for line in results.get((SAME_RUN, n), []) if program in OURS]
            more = f"  {statistics.median(same) / time:.3f} x as the same run on one, {statistics.median(same):.3f} ms" if same else ""
            memory = f"{first[0]['memory_gib']:6.2f} {lines[0]['memory_gib']:9.2f}"
            print(f"{name} {one:10.3f} {time:12.3f} {ratio:16s} {memory}{more}", flush=True)
    if args.output:
        (ROOT / args.output).write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
