"""train_unet's GPU build (dev/bench_cuda) beside PyTorch (compiled, the whole step one CUDA graph) and, where it is installed, JAX: make bench, or
python dev/benchmarks/bench.py [--only unet64] [--gpus 4] [--plain] [--skip_torch] [--skip_jax] [--chart bench.png] [--output bench.json]

Prints, for each model, batch and precision, the median milliseconds of a training step or of a forward pass of each program, the spread (10th
to 90th percentile), the others' time over ours, and each step's peak memory. The programs take turns at going first, each run a process of its
own; what fails is a line below the table. In FP8 only ours runs (docs/BENCHMARKS.md says why), and with Muon not JAX. What a step is: docs/BENCHMARKS.md, dev/benchmarks/bench_torch.py and dev/benchmarks/bench_jax.py.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import queue
import statistics
import subprocess
import sys
import threading
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
OURS, PLAIN, TORCH, JAX = "train_unet", "plain", "PyTorch", "JAX"
COMMANDS = {
    OURS: ["dev/bench_cuda"],
    PLAIN: ["dev/bench_plain_cuda"],
    TORCH: [sys.executable, "dev/benchmarks/bench_torch.py"],
    JAX: [sys.executable, "dev/benchmarks/bench_jax.py"],
}
COLORS = {OURS: "darkblue", PLAIN: "royalblue", TORCH: "lightsteelblue", JAX: "lightgrey"}
CORES = os.cpu_count() or 1

MODELS = {
    "unet64": "--preset unet64",
    "adm64": "--preset adm64 --class_cond False --dropout 0",
    "tiny": """--preset fashion32 --image_size 32 --in_channels 1 --num_channels 32 --channel_mult 1,2,2 --num_res_blocks 2
        --attention_resolutions 16,8 --num_head_channels 32 --conv_resample True""",
    "photos32": "--preset photos32 --class_cond True --num_classes 10",
    "quick64": "--preset quick64",
}
WITH_MUON = ("photos32", "quick64")  # and with classes or squares of pixels, none of which bench_jax.py has


@dataclasses.dataclass
class Run:
    """A process of each program; parts: step, forward or both, a row of the table each."""

    model: str
    batch: int
    precision: str
    parts: str
    results: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=lambda: {name: [] for name in COMMANDS})
    errors: dict[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.model} {self.batch} {self.precision} {self.parts}"

    def rows(self) -> list[str]:
        return ["step", "forward"] if self.parts == "both" else [self.parts] * bool(self.parts)

    def times(self, program: str, row: str) -> tuple[float, float, float] | None:
        """Median, 10th and 90th percentile over all turns."""
        turns = [found[f"{row}_ms"] for found in self.results[program]]
        if not turns or None in turns:
            return None
        medians, low, high = zip(*turns)
        return statistics.median(medians), min(low), max(high)


RUNS = [
    Run("unet64", 32, "bf16", "step"),
    Run("unet64", 128, "bf16", "step"),
    Run("unet64", 256, "bf16", "both"),
    Run("unet64", 32, "fp32", "step"),
    Run("adm64", 32, "bf16", "both"),
    Run("adm64", 32, "fp8", "both"),
    Run("adm64", 128, "fp8", "step"),
    Run("tiny", 128, "bf16", "step"),
    Run("photos32", 256, "bf16", "step"),
    Run("quick64", 128, "bf16", "step"),
    Run("unet64", 16, "bf16", "forward"),
    Run("unet64", 64, "bf16", "forward"),
    Run("tiny", 16, "bf16", "forward"),
]


def command_of(run: Run, program: str, steps: int, torch_mode: str) -> list[str]:
    flags = ["--bench", str(steps), *MODELS[run.model].split(), "--batch_size", str(run.batch), "--precision", run.precision]
    if program not in (OURS, PLAIN):
        flags += ["--bench_parts", run.parts]
    return [*COMMANDS[program], *flags, *(["--bench_mode", torch_mode] if program == TORCH else [])]


def run_program(command: list[str], timeout: float, gpu: str | None = None) -> dict[str, Any]:
    """The line of JSON that a program prints; RuntimeError with one sentence if there is none. gpu: its number; None: the first."""
    env = os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
    try:
        child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, env=env)
    except OSError as e:
        raise RuntimeError(f"{command[0]} can't be started ({e.strerror}); make -C dev bench builds it") from None
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"took longer than {timeout:g} s; --timeout allows more") from None
    lines = [line for line in child.stdout.splitlines() if line.startswith("{")]
    if child.returncode or not lines:
        last = (child.stderr.strip() or child.stdout.strip() or "it printed nothing").splitlines()[-1]
        raise RuntimeError(f"exit code {child.returncode}: {last}")
    return json.loads(lines[-1])


def measure(run: Run, program: str, args: argparse.Namespace, gpu: str | None) -> None:
    """Adds a turn's result, or its error."""
    began = time.perf_counter()
    try:
        run.results[program].append(run_program(command_of(run, program, args.steps, args.torch_mode), args.timeout, gpu))
    except (RuntimeError, json.JSONDecodeError) as e:
        run.errors[program] = str(e)
    if sys.stderr.isatty() or args.verbose:
        print(f"  {run}, {program}: {run.errors.get(program, 'done')} in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)


def compile_ahead(runs: list[Run], args: argparse.Namespace) -> None:
    """Runs PyTorch's side at once, the largest model first, so that torch.compile's cache holds what the measured runs, one at a time, need."""

    def attempt(run: Run) -> None:
        with contextlib.suppress(RuntimeError, json.JSONDecodeError):  # the measured run says what is wrong
            run_program(command_of(run, TORCH, 1, args.torch_mode), args.timeout)

    in_torch = [run for run in runs if run.precision != "fp8"]
    with concurrent.futures.ThreadPoolExecutor(max(CORES // 2, 1)) as pool:
        list(pool.map(attempt, sorted(in_torch, key=lambda run: run.model)))


def header(programs: list[str]) -> str:
    named = ["ours" if program == OURS else program for program in programs]
    line = f"{'model':8s} {'batch':>5s} {'prec.':5s} {'what':7s}" + "".join(f" {f'{name}, ms':>11s} {'(10 to 90 %)':>17s}" for name in named)
    return line + "".join(f" {f'{name}/ours':>12s}" for name in named if name != "ours") + "".join(f" {f'{name}, GiB':>12s}" for name in named)


def table_row(run: Run, row: str, programs: list[str]) -> str:
    line, found = f"{run.model:8s} {run.batch:5d} {run.precision:5s} {row:7s}", {program: run.times(program, row) for program in programs}
    for program, times in found.items():
        if times:
            line += f" {times[0]:11.2f} {f'({times[1]:.2f} to {times[2]:.2f})':>17s}"
        else:
            line += f" {'failed' if program in run.errors else '-':>11s} {'':17s}"
    ours = found.get(OURS)
    for times in (found[program] for program in programs if program != OURS):
        line += f" {times[0] / ours[0]:12.2f}" if times and ours else f" {'-':>12s}"
    for program in programs:
        found_gib = [result.get("training_gib") or result["memory_gib"] for result in run.results[program]]  # training_gib: ours, in FP8
        memory = [gib for gib in found_gib if gib is not None]
        line += f" {max(memory):12.2f}" if memory and row == "step" else f" {'-':>12s}"
    return line


def draw_chart(path: str, title: str) -> bool:
    """The bars of each row that both ours and PyTorch have, in units of PyTorch's time. False if there is none."""
    from matplotlib.figure import Figure

    found = [(run, row) for run in RUNS for row in run.rows() if run.times(OURS, row) and run.times(TORCH, row)]
    if not found:
        return False
    programs = [program for program in COMMANDS if any(run.times(program, row) for run, row in found)]
    axes = (figure := Figure(figsize=(9, 0.9 + 0.275 * len(programs) * len(found)), layout="constrained")).add_subplot()
    height, labelled = 0.8 / len(programs), set()
    for i, (run, row) in enumerate(found):
        unit = run.times(TORCH, row)[0]
        for k, program in enumerate(programs):
            if not (ms := run.times(program, row)):
                continue
            median, low, high = (v / unit for v in ms)
            spread, y = [[max(median - low, 0)], [max(high - median, 0)]], i + height * (k - (len(programs) - 1) / 2)
            label = None if program in labelled else program
            labelled.add(program)
            axes.barh(y, median, 0.95 * height, color=COLORS[program], xerr=spread, ecolor="grey", label=label)
            axes.text(max(median, high) + 0.01, y, f"{ms[0]:.2f} ms", va="center", fontsize=8)
    names = [f"{run.model}, batch {run.batch}, {run.precision}\n{'training step' if row == 'step' else 'forward pass'}" for run, row in found]
    axes.set_yticks(range(len(found)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(right=1.12 * axes.get_xlim()[1])
    axes.set_xlabel("time, PyTorch (compiled, CUDA graph) = 1; shorter is faster")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower right", ncols=len(programs), fontsize=8)
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True


def missing_jax() -> str:
    """Why JAX can't run here, or nothing."""
    probe = "import jax; assert jax.default_backend() == 'gpu', 'JAX sees no GPU here'"
    quiet = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, env=quiet)
    return (found.stderr.strip().splitlines() or ["it failed"])[-1].partition(": ")[2] if found.returncode else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps and forward passes that are timed in each run")
    parser.add_argument("--turns", type=int, default=1, help="runs of each program for each row")
    parser.add_argument("--only", default="", help="rows whose 'model batch precision what' holds this, such as 'unet64 32'")
    parser.add_argument("--gpus", type=int, default=1, help="rows are shared out among so many GPUs; a row's programs run on one, one at a time")
    parser.add_argument("--torch_mode", default="graph", choices=["graph", "compile", "eager"], help="graph is PyTorch's fastest, by far")
    parser.add_argument("--skip_torch", action="store_true")
    parser.add_argument("--skip_jax", action="store_true")
    parser.add_argument("--skip_ours", action="store_true")
    parser.add_argument("--plain", action="store_true", help="ours once more without the kernels for Hopper (make -C dev bench_plain_cuda)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds, of each run")
    parser.add_argument("--chart", help="write a bar chart to this PNG")
    parser.add_argument("--output", help="write every line of JSON that the programs printed to this file")
    parser.add_argument("--verbose", action="store_true", help="say what each run took")
    args = parser.parse_args()
    probe = "import torch; print(f'{torch.cuda.get_device_name()}, PyTorch {torch.__version__}')"
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    if found.returncode:
        sys.exit("bench: there is no GPU here that PyTorch can use; python dev/benchmarks/bench_cpu.py compares the CPU builds")
    why_no_jax = "" if args.skip_jax else missing_jax()
    if why_no_jax:
        print(f"JAX is left out: {why_no_jax}; pip install 'jax[cuda13]' adds its column")
    programs = [OURS] * (not args.skip_ours) + [PLAIN] * args.plain + [TORCH] * (not args.skip_torch) + [JAX] * (not args.skip_jax and not why_no_jax)
    for run in RUNS:
        kept = [row for row in run.rows() if args.only in f"{run.model} {run.batch} {run.precision} {row}"]
        run.parts = "both" if len(kept) == 2 else "".join(kept)
    chosen = [run for run in RUNS if run.parts]
    if not chosen or not programs:
        sys.exit("bench: nothing is left to run; --only takes words of a row of the table, such as 'unet64 32 bf16 step' or 'forward'")

    title = f"{found.stdout.strip()}, {time.strftime('%Y-%m-%d')}"
    print(f"{title}; medians of {args.steps}, a process for each run", flush=True)
    if TORCH in programs and args.torch_mode != "eager" and len(chosen) > 1 and CORES >= 4:
        began = time.perf_counter()
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(CORES // 4, 1)))
        compile_ahead(chosen, args)
        print(f"compiled for PyTorch in {time.perf_counter() - began:.0f} s")
    print(f"\n{header(programs)}", flush=True)
    free_gpus: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for gpu in range(args.gpus):
        free_gpus.put(str(gpu) if args.gpus > 1 else None)
    finished = threading.Lock()  # one row at a time is printed and written

    def measure_run(i: int) -> None:
        run, gpu = chosen[i], free_gpus.get()
        left_out = {TORCH, JAX, PLAIN} if run.precision == "fp8" else {JAX} if run.model in WITH_MUON else {}
        known = [program for program in programs if program not in left_out]
        for turn in range(args.turns):
            for program in known if (i + turn) % 2 == 0 else known[::-1]:
                measure(run, program, args, gpu)
        free_gpus.put(gpu)
        with finished:
            for row in run.rows():
                print(table_row(run, row, programs), flush=True)
            if args.output:  # after every row: a run that is ended loses the rest alone
                lines = [{"row": str(run), **line} for run in chosen for program in programs for line in run.results[program]]
                pathlib.Path(args.output).parent.mkdir(parents=True, exist_ok=True)
                pathlib.Path(args.output).write_text(json.dumps({"machine": title, "steps": args.steps, "runs": lines}, indent=1) + "\n")

    with concurrent.futures.ThreadPoolExecutor(args.gpus) as pool:
        list(pool.map(measure_run, range(len(chosen))))
    print()
    for run in chosen:
        for program, error in run.errors.items():
            print(f"{run}, {program}: {error}")
    if args.output:
        print(f"{args.output}: the programs' own lines")
    if args.chart:
        drawn = draw_chart(args.chart, title)
        print(f"{args.chart}: {'the bar chart' if drawn else 'is not drawn, because no row has both ours and PyTorch'}")


if __name__ == "__main__":
    main()
