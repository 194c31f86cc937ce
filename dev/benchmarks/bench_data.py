"""How long training waits for its data, from memory and from the disk: python dev/benchmarks/bench_data.py [--gib 5]

Writes a file of 64x64 RGB images (random ones: no disk can make them smaller) and times load_batch of the program that ships, beside two simpler ways,
while a device is busy for as long as an H200 is with a step of unet64. Where all images come from the disk (its pages are dropped first; no image is
read twice), it is as if the file were any number of times larger than memory; --gib makes it so in truth. Where there is a GPU, it trains, too.
The file goes to --folder and is deleted at the end.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from common.data_files import write_data

STEPS = {32: 4.3, 128: 12.6, 256: 24.3}  # batch: milliseconds of a step of unet64 on an H200 (docs/BENCHMARKS.md)
IMAGE = (3, 64, 64)


def random_images(count: int) -> Iterator[np.ndarray]:
    random = np.random.default_rng(0)
    for first in range(0, count, 1024):
        yield from np.frombuffer(random.bytes(min(1024, count - first) * 3 * 64 * 64), np.uint8).reshape(-1, *IMAGE)


def drop_pages(path: Path) -> None:
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def quantiles(ms: list[float]) -> str:
    centiles = statistics.quantiles(ms, n=100, method="inclusive")
    return f"{statistics.median(ms):9.2f} {centiles[89]:9.2f} {centiles[98]:9.2f} {max(ms):9.2f}"


def load_batches(program: str, path: Path, steps: int) -> None:
    print(f"{'':42s} {'median':>9s} {'90 %':>9s} {'99 %':>9s} {'longest':>9s}  ms a batch; steps that waited for it")
    for batch, step_ms in STEPS.items():
        for cold in (True, False):
            for how, name in {"faults": "page faults (unverified)", "asked": "asked for at once", "ahead": "train_unet"}.items():
                if not cold and how == "asked":
                    continue
                command = [program, str(path), str(batch), str(steps), str(step_ms), str(int(cold)), how]
                told = subprocess.run(command, capture_output=True, text=True)
                if told.returncode:
                    sys.exit(told.stderr)
                ms = [float(line) for line in told.stdout.split()][1:]  # nothing was asked for before the first
                late = sum(m > step_ms for m in ms) / len(ms)
                print(f"{batch:4d}, {'disk' if cold else 'memory'}: {name:28s} {quantiles(ms)}  {late:6.1%}", flush=True)


def train(path: Path, folder: Path) -> None:
    """Steps of the GPU build: of images that are made up (dev/bench), from the disk, and from memory."""
    for batch in STEPS:
        flags = ["--preset", "unet64", "--batch_size", str(batch)]
        told = subprocess.run([str(ROOT / "dev/bench_cuda"), *flags, "--bench", "20"], capture_output=True, text=True, check=True)
        print(f"train_unet_cuda, batch {batch}: made-up images {told.stdout[told.stdout.index('step_ms') + 10 :].split(']')[0]}", end="")
        for name in ("disk", "memory"):
            if name == "disk":
                drop_pages(path)
            output = folder / f"{name}{batch}"
            more = f"--max_steps 1000 --sample_interval 0 --save_interval 1000000 --warmup_steps 1000 --data_file {path} --output_dir {output}"
            subprocess.run([str(ROOT / "train_unet_cuda"), *flags, *more.split()], stdout=subprocess.DEVNULL, check=True)
            rows = (output / "log.csv").read_text().splitlines()[101:]
            print(f"; from {name} {statistics.mean(float(row.split(',')[4]) for row in rows):.3f}", end="")
        print(" ms a step", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gib", type=float, default=5, help="size of the file; more than 4 has a checksum for each image, as what is larger than memory has"
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--folder", type=Path, default=ROOT, help="on the disk that is to be measured")
    args = parser.parse_args()
    count, free = int(args.gib * 2**30 / np.prod(IMAGE)), shutil.disk_usage(args.folder).free
    if count < (args.steps + 10) * max(STEPS):
        sys.exit(f"bench_data: --gib {args.gib:g} holds {count} images, too few for --steps {args.steps} of {max(STEPS)} without a repeat")
    if free < 1.2 * args.gib * 2**30:
        sys.exit(f"bench_data: {args.folder} has {free / 2**30:.1f} GiB left; a smaller --gib, or another --folder")
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="out_bench_data") as folder:
        program, path = f"{folder}/bench_data", Path(folder, "data.bin")
        compiler = "-std=c++20 -O3 -march=native -fopenmp -fno-math-errno -fno-trapping-math -Wno-unused-function"
        subprocess.run([os.environ.get("CXX", "g++"), *compiler.split(), "-o", program, ROOT / "dev/benchmarks/bench_data.cpp"], check=True)
        write_data(str(path), random_images(count))
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        print(f"{count} images of 64x64, {path.stat().st_size / 2**30:.1f} GiB on the disk; this machine has {memory:.0f} GiB of memory")
        load_batches(program, path, args.steps)
        if (ROOT / "train_unet_cuda").exists() and shutil.which("nvidia-smi"):
            train(path, Path(folder))


if __name__ == "__main__":
    main()
