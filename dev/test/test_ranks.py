"""One run on several processes (mpirun and the CPU build for MPI): the files are those of one process, byte for byte."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, TINY, Result, checkpoints, environment, flags, make_images, model_name, read_log

from common.data_files import write_data

pytestmark = pytest.mark.skipif(not shutil.which("mpicxx") or not shutil.which("mpirun"), reason="there is no MPI here (libopenmpi-dev, openmpi-bin)")
ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
MPIRUN = ["mpirun", "--oversubscribe", "--bind-to", "none", "--mca", "plm_rsh_agent", "sh", "--mca", "mpi_yield_when_idle", "1", "-n"]


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    subprocess.run(["make", "train_unet_mpi"], cwd=ROOT, check=True, capture_output=True)
    return ROOT / "train_unet_mpi"


@pytest.fixture
def ranks(program: Path, tmp_path: Path) -> Callable[..., Result]:
    """ranks(n, args, code=0): runs the program in tmp_path as n processes, or without mpirun as one."""

    def ranks(n: int, args: Sequence[object], code: int | None = 0) -> Result:
        command = [*([*MPIRUN, str(n)] if n > 1 else []), str(program), *map(str, args)]
        p = subprocess.run(command, cwd=tmp_path, env=environment() | ROOT_MAY, capture_output=True, text=True, timeout=60)
        assert code is None or p.returncode == code, f"exit code {p.returncode} of {' '.join(command)}\n{p.stdout[-2000:]}\n{p.stderr[-4000:]}"
        return Result(p.returncode, p.stdout, p.stderr)

    return ranks


def assert_same_run(a: Path, b: Path) -> None:
    """All checkpoints and pictures, byte for byte, and the log but for its times."""
    names = {p.name for p in a.iterdir() if p.suffix in (".bin", ".png")}
    assert names == {p.name for p in b.iterdir() if p.suffix in (".bin", ".png")} and any(name.endswith(".bin") for name in names)
    assert read_log(a) == read_log(b)
    for name in sorted(names):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


CLASSES = "--class_cond True --class_dropout 0.3 --random_flip True --dropout 0.2"
RUNS = {
    "eps, averages, snapshots, Muon": "--optimizer muon --ema_rate 0.9,0.5 --ema_snapshots 2 --grad_clip 0.1",
    "edm, classes, guidance": f"--objective edm {CLASSES} --guidance_scale 2 --sampler heun",
    "ect of a flow": f"--objective ect --ect_frame flow --ect_d 2 {CLASSES} --use_checkpoint True",
    "learned variance, t by their losses, blocks again": "--learn_sigma True --schedule_sampler loss-second-moment --diffusion_steps 4"
    " --noise_schedule cosine --timestep_respacing 4 --use_checkpoint True --use_scale_shift_norm True",
    "numbers, guidance, changed images": "--cond_dim 2 --class_dropout 0.3 --guidance_scale 2 --augment 0.3",
    "pictures, guidance": "--cond_channels 2 --cond_dropout 0.3 --guidance_scale 2 --random_flip True",
    "holes, changed images": "--cond mask --cond_dropout 0.3 --augment 0.3 --objective edm",
    "coarse pictures": "--cond lowres:4 --cond_noise 0.5 --random_flip True",
    "numbers of 8 bits": f"--precision fp8 --use_checkpoint True {CLASSES}",
    "steps that are skipped": "--lr 100 --weight_decay 100 --grad_clip 0 --max_bad_steps 9 --num_samples 1 --use_scale_shift_norm False",
}


# Left out by `make test`: what others have in them, too.
CONTAINED = {"ect of a flow", "pictures, guidance", "coarse pictures", "learned variance, t by their losses, blocks again"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in CONTAINED)) for name in RUNS])
def test_any_number_of_ranks_is_the_same_run(ranks: Callable, data: Path, tmp_path: Path, name: str) -> None:
    if "--cond_dim" in RUNS[name]:
        values = np.random.default_rng(0).standard_normal((24, 2))
        data = tmp_path / "numbers.bin"
        write_data(str(data), make_images(), values=values)
    pictures = []
    if "--cond_channels" in RUNS[name]:
        write_data(str(tmp_path / "pictures.bin"), make_images(channels=2))
        pictures = flags("--cond_file pictures.bin --val_cond_file pictures.bin")
    given = flags(
        TINY, RUNS[name], pictures, "--data_file", data, "--val_data_file", data, "--batch_size 12 --microbatch 3 --max_steps 5 --save_interval 2"
    )
    given = flags(given, "--val_interval 2 --sample_interval 3 --num_samples 5 --keep_best True")
    several = {"eps, averages, snapshots, Muon": (2, 4), "edm, classes, guidance": (2,), "numbers of 8 bits": (2,)}.get(name, (4,))
    for n in (1, *several):
        ranks(n, [*given, "--output_dir", n])
    for n in several:
        assert_same_run(tmp_path / "1", tmp_path / str(n))
    assert ("nan" in (tmp_path / "1" / "log.csv").read_text() or name != "steps that are skipped") and checkpoints(tmp_path / "1")


def test_what_each_takes_is_its_share_of_the_batch(ranks: Callable, data: Path, tmp_path: Path) -> None:
    """Without --microbatch, three ranks are one with a third of the batch at a time, and go on as such."""
    given = flags(TINY, "--data_file", data, "--batch_size 6 --max_steps 3")
    ranks(3, [*given, "--output_dir", "3"])
    ranks(1, [*given, "--microbatch", 2, "--output_dir", "1"])
    assert_same_run(tmp_path / "1", tmp_path / "3")
    for name, n in (("1", 3), ("3", 1)):
        ranks(n, ["--resume_checkpoint", "latest", "--output_dir", name, "--max_steps", 6])
    assert_same_run(tmp_path / "1", tmp_path / "3")
    again = ["--resume_checkpoint", "latest", "--output_dir", "3", "--max_steps", 7]
    assert "--microbatch 2: must divide the 3 images of a process, of --batch_size 6; 1 does" in ranks(2, again, code=1).err
    ranks(2, [*again, "--microbatch", 3])
    assert checkpoints(tmp_path / "3")[-1] == 7


def test_resume_on_another_number(ranks: Callable, data: Path, tmp_path: Path) -> None:
    """2 -> 1 -> 3 ranks: the bits of an unbroken run."""
    given = flags(TINY, CLASSES, "--data_file", data, "--val_fraction 0.2 --val_interval 1 --ema_rate 0.9,0.5 --batch_size 6 --microbatch 1")
    ranks(1, [*given, "--max_steps", 6, "--save_interval", 2, "--output_dir", "whole"])
    ranks(2, [*given, "--max_steps", 2, "--save_interval", 2, "--output_dir", "parts"])
    ranks(1, ["--resume_checkpoint", "latest", "--max_steps", 4, "--output_dir", "parts", *flags("--val_interval 1")])
    ranks(3, ["--resume_checkpoint", "latest", "--max_steps", 6, "--output_dir", "parts", *flags("--val_interval 1")])
    last = model_name(6)
    assert (tmp_path / "whole" / last).read_bytes() == (tmp_path / "parts" / last).read_bytes()
    assert read_log(tmp_path / "whole") == read_log(tmp_path / "parts")


def test_samples_are_those_of_one(ranks: Callable, data: Path, tmp_path: Path) -> None:
    ranks(1, flags(TINY, CLASSES, "--data_file", data, "--max_steps 1"))
    given = flags("--init", f"out/{model_name(1)}", "--sample 7 --batch_size 2 --sampler ddpm --timestep_respacing 5 --guidance_scale 1.5")
    for n in (1, 2, 3):
        ranks(n, [*given, "--output", f"{n}.bin"])
    assert len({(tmp_path / f"{n}.bin").read_bytes() for n in (1, 2, 3)}) == 1


@pytest.mark.parametrize(
    "batch, words",
    [("--batch_size 5", ["--batch_size 5", "2 processes", "; 4 is one"]), ("--batch_size 8 --microbatch 3", ["--microbatch 3", "8", "; 2 does"])],
)
def test_what_does_not_divide(ranks: Callable, data: Path, batch: str, words: list[str]) -> None:
    result = ranks(2, flags(TINY, "--data_file", data, "--max_steps 1", batch), code=None)
    assert result.code == 1 and all(word in result.err for word in words), result.err


def test_memory_a_rank_falls(ranks: Callable, data: Path) -> None:
    """Moments and averages are split: of 20 bytes a parameter, 14 are left with two ranks."""
    given = flags(TINY, "--num_channels 160 --data_file", data, "--max_steps 1 --batch_size 2 --microbatch 1 --save_interval 5")
    told = {}
    for n in (1, 2):
        line = re.search(r"memory: (\S+) GiB: weights and EMA (\S+), gradients (\S+), moments (\S+),", ranks(n, [*given, "--output_dir", n]).out)
        assert line
        told[n] = [float(word) for word in line.groups()]
    assert told[2][3] == pytest.approx(told[1][3] / 2, abs=0.011) and told[2][1] == pytest.approx(told[1][1] * 3 / 4, abs=0.011)
    assert told[2][0] < 0.8 * told[1][0]


def test_data_that_is_cut_short_ends_all(program: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "d.bin").write_bytes(data.read_bytes())
    command = [*MPIRUN, "2", str(program), *flags(TINY, "--data_file d.bin --max_steps 1000000 --log_interval 1 --save_interval 5")]
    with subprocess.Popen(command, cwd=tmp_path, env=environment() | ROOT_MAY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as p:
        try:
            assert p.stdout
            while "step " not in p.stdout.readline():
                assert p.poll() is None
            os.truncate(tmp_path / "d.bin", 1024 + 64)
            told = p.communicate(timeout=60)[1]
            assert p.returncode and re.search(r"d\.bin: image \d+ can't be used", told), told
        finally:
            p.kill()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_at_one_rank_stops_all(program: Path, data: Path, tmp_path: Path, rank: int) -> None:
    command = [*MPIRUN, "2", str(program), *flags(TINY, "--data_file", data, "--max_steps 1000000 --log_interval 1")]
    with subprocess.Popen(command, cwd=tmp_path, env=environment() | ROOT_MAY, stdout=subprocess.PIPE, text=True) as p:
        try:
            assert p.stdout
            while "step " not in p.stdout.readline():
                assert p.poll() is None
            of_rank = {}
            for folder in Path("/proc").glob("[0-9]*"):
                try:
                    variables = (folder / "environ").read_bytes().split(b"\0")
                    if os.readlink(folder / "exe") == str(program) and os.readlink(folder / "cwd") == str(tmp_path):
                        of_rank[next(int(v[21:]) for v in variables if v.startswith(b"OMPI_COMM_WORLD_RANK="))] = int(folder.name)
                except OSError:
                    continue
            os.kill(of_rank[rank], signal.SIGTERM)
            rest = p.communicate(timeout=60)[0]
            assert p.returncode == 128 + signal.SIGTERM and "stopped by SIGTERM after step" in rest and checkpoints(tmp_path / "out")
        finally:
            p.kill()


@pytest.mark.long  # Open MPI waits for seconds
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_mpirun_itself(program: Path, data: Path, tmp_path: Path, how: signal.Signals) -> None:
    """As docs/SCALING.md says of Open MPI: after a while it sends SIGTERM, whatever it was sent, and it returns 1. In the meantime it may read nothing
    of what the program prints, so these are few lines: or else the last one, that says what is saved, does not come through."""
    words = flags(TINY, "--data_file", data, "--max_steps 1000000 --log_interval 100")
    command = ["mpirun", "--mca", "odls_base_sigkill_timeout", "4", *MPIRUN[1:], "2", str(program), *words]
    with subprocess.Popen(command, cwd=tmp_path, env=environment() | ROOT_MAY, stdout=subprocess.PIPE, text=True) as p:
        try:
            assert p.stdout
            while "step " not in p.stdout.readline():
                assert p.poll() is None
            p.send_signal(how)
            rest = p.communicate(timeout=60)[0]
            assert p.returncode == 1 and "stopped by SIGTERM after step" in rest and checkpoints(tmp_path / "out")
        finally:
            p.kill()
