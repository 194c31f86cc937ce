"""The CPU build beside PyTorch (eager), same model, same draws, same threads, in one run: python dev/benchmarks/bench_cpu.py [--steps 40] [flags of train_unet]

Prints the median step of each program and its spread (10th to 90th percentile), GFLOP/s, and the peak memory of the process. The two take turns,
so that a slow phase of the machine hits both.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run_program(command: list[str], flags: list[str], steps: int, threads: int) -> tuple[list[float], float]:
    """Milliseconds of each step but the first five, and the peak memory of the process in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        quiet = ["--max_steps", str(steps), "--output_dir", folder + "/out", "--sample_interval", "0", "--save_interval", "1000000"]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        child = subprocess.Popen(command + flags + quiet, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        output = child.stdout.read() if child.stdout else ""
        _, status, usage = os.wait4(child.pid, 0)
        if status:
            sys.exit(f"bench_cpu: {' '.join(command)} failed:\n{output}")
        rows = pathlib.Path(folder, "out", "log.csv").read_text().splitlines()[1:]
    return [float(row.split(",")[4]) for row in rows[5:]], usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="steps per turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args, flags = parser.parse_known_args()
    programs = {
        "train_unet (CPU build)": ["./train_unet_cpu"],
        "PyTorch eager": [sys.executable, "train_unet.py", "--compile", "0", "--device", "cpu"],
    }
    times: dict[str, list[float]] = {name: [] for name in programs}
    memory = dict.fromkeys(programs, 0.0)
    for _ in range(args.turns):
        for name, command in programs.items():
            ms, peak = run_program(command, flags, args.steps, args.threads)
            times[name] += ms
            memory[name] = max(memory[name], peak)
    print(f"{args.threads} threads, {args.turns} turns of {args.steps} steps; median step (10th to 90th percentile), peak memory")
    medians = {name: statistics.median(ms) for name, ms in times.items()}
    for name, ms in times.items():
        deciles = statistics.quantiles(ms, n=10)
        print(f"{name:24s} {medians[name]:8.1f} ms ({deciles[0]:.1f} to {deciles[-1]:.1f}), {memory[name]:6.0f} MiB")
    ours, theirs = medians.values()
    print(f"speed of train_unet over PyTorch: {theirs / ours:.2f}")


if __name__ == "__main__":
    main()
