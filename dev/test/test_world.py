"""Ranks: how they meet, what is said when they differ or fail, and that a run outlives the death of any of them.

TRAIN_UNET_KILLS=50 kills so many ranks at random moments (three by default). TRAIN_UNET_BUILD=cuda starts them on this machine's GPUs by --num_gpus.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from conftest import (
    BUILD,
    ROOT,
    TINY,
    Result,
    binary_path,
    checkpoints,
    data_bytes,
    environment,
    flags,
    make_images,
    model_name,
    read_checkpoint,
    read_log,
)

KILLS = int(os.environ.get("TRAIN_UNET_KILLS", 3))
LISTED = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines() if BUILD == "cuda" else []
GPUS = len(os.environ["CUDA_VISIBLE_DEVICES"].split(",") if "CUDA_VISIBLE_DEVICES" in os.environ else LISTED)
MOST = min(GPUS, 4) if BUILD == "cuda" else 4
pytestmark = pytest.mark.skipif(
    MOST < 2 if BUILD == "cuda" else not (shutil.which("mpicxx") and shutil.which("mpirun")), reason="there are no two GPUs, or there is no MPI"
)
MPIRUN = ["mpirun", "-q", "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]
MINUTES = flags(TINY, "--max_steps 1000000 --batch_size 12 --microbatch 1 --log_interval 1 --rank_timeout 5")
# What a launcher would say is not for these.
QUIET = {k: v for k, v in environment().items() if not k.startswith(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "OMPI_", "PMI_", "SLURM_"))}
ENVIRONMENT = QUIET | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture(scope="session")
def program() -> Path:
    if BUILD == "cuda":
        return binary_path("cpu")  # which is the GPU build then
    subprocess.run(["make", "train_unet_mpi"], cwd=ROOT, check=True, capture_output=True)
    return ROOT / "train_unet_mpi"


def command(program: Path, n: int, args: Sequence[object]) -> list[str]:
    words = [str(program), *map(str, args)]
    return [*words, "--num_gpus", str(n)] if BUILD == "cuda" else [*MPIRUN, "-n", str(n), *words]


@pytest.fixture
def ranks(program: Path, tmp_path: Path) -> Callable[..., Result]:
    """ranks(n, args, code=0): runs the program in tmp_path as n processes. ranks([args, args, ...]): with other arguments for each; a
    path among them, in front, is another program."""

    def ranks(n: int | list[list], args: Sequence[object] = (), code: int = 0) -> Result:
        words = command(program, n, args) if isinstance(n, int) else MPIRUN[:]
        for each in [] if isinstance(n, int) else n:
            words += [":"] * (words[-2:] != MPIRUN[-2:]) + ["-n", "1", *map(str, each if isinstance(each[0], Path) else [program, *each])]
        p = subprocess.run(words, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
        assert p.returncode == code, f"exit code {p.returncode} of {' '.join(words)}\n{p.stdout[-2000:]}\n{p.stderr[-4000:]}"
        return Result(p.returncode, p.stdout, p.stderr)

    return ranks


def own_sentences(err: str) -> list[str]:
    """What the program said, without what a launcher adds."""
    return [line for line in err.splitlines() if line.startswith("train_unet: ") and "was ended by signal" not in line]


def processes(folder: Path, n: int) -> list[int]:
    """Process numbers of the n ranks that run in a folder, in their order, once all have been started."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(entry / "cwd") != str(folder) or "train_unet" not in os.readlink(entry / "exe"):
                    continue
                variables = dict(v.split("=", 1) for v in (entry / "environ").read_text().split("\0") if "=" in v)
                rank = variables.get("OMPI_COMM_WORLD_RANK", variables.get("RANK"))
                if rank is not None:
                    found[int(rank)] = int(entry.name)
            except OSError:
                continue
        if len(found) == n:
            return [found[rank] for rank in range(n)]
        time.sleep(0.01)
    raise AssertionError(f"{n} ranks did not start")


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def end_of(p: subprocess.Popen, found: list[int], limit: float) -> tuple[str, str]:
    """What they said, once all ranks have ended, which must be soon. Open MPI 4.1's mpirun itself may then wait for ever for one that it met half."""
    end = time.monotonic() + limit
    while any(map(lives, found)):
        assert time.monotonic() < end, f"of {found} still alive: {[number for number in found if lives(number)]}"
        time.sleep(0.02)
    try:
        return p.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        assert BUILD == "cpu"
        p.kill()
        return p.communicate()


@pytest.fixture
def run_of(program: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """run_of(n, args): the same, begun; whatever is left of it ends with the test."""
    begun = []

    def run_of(n: int, args: Sequence[object]) -> subprocess.Popen:
        p = subprocess.Popen(
            command(program, n, args),
            cwd=tmp_path,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        begun.append(p)
        return p

    yield run_of
    for p in begun:
        if p.poll() is None:
            os.killpg(p.pid, signal.SIGKILL)
        p.communicate()


def wait_for_step(p: subprocess.Popen) -> None:
    assert p.stdout
    for line in p.stdout:
        if "step " in line:  # mpirun gives it a terminal
            return
    raise AssertionError(p.communicate())


# ----------------------------------------------------------------------------------------------------------------------
# what is said, and how often


def test_rank_0_speaks(ranks: Callable, data: Path) -> None:
    out = ranks(MOST, flags(TINY, "--max_steps 2 --batch_size 12 --microbatch 1 --data_file", data)).out
    assert out.count("parameters") == out.count("step 2/2") == out.count("done: 2 steps") == 1
    assert out.count("exchange: ") == (BUILD == "cuda")
    assert ranks(2, ["--help"]).out.count("--batch_size ") >= 1


def test_a_mistake_of_all_is_said_once(ranks: Callable) -> None:
    for args, words in ((["--lrr", 1], "--lrr: "), (["--sample", 1], "--sample 1: needs --init"), (["--data_file", "none.bin"], "none.bin: ")):
        said = own_sentences(ranks(MOST, args, code=1).err)
        assert len(said) == 1 and words in said[0], said


@pytest.mark.skipif(BUILD == "cuda", reason="mpirun gives each rank arguments of its own")
def test_ranks_that_differ(ranks: Callable, program: Path, data: Path, tmp_path: Path) -> None:
    """Whoever differs from rank 0 says in what, by rank and host, before anything is written."""
    (tmp_path / "other.bin").write_bytes(data_bytes(make_images(seed=1)))
    shutil.copy(program, tmp_path / "train_unet")
    with open(tmp_path / "train_unet", "ab") as f:
        f.write(b"\0")
    given = flags(TINY, "--batch_size 6 --data_file", data)
    for other, words in {
        "flags": (flags(given, "--adam_eps 1e-7"), ["--adam_eps 1e-07", "--adam_eps 1e-08"]),
        "data": (flags(given, "--data_file other.bin"), ["has data of checksum", "and rank 0 has data of checksum"]),
        "program": ([tmp_path / "train_unet", *given], ["has a program of checksum", "and rank 0 has a program"]),
        "a flag that there is not": (flags(given, "--lrr 1"), ["--lrr: there is no such flag"]),
    }.values():
        said = own_sentences(ranks([given, other, given] if words[0] != "--lrr" else [given, other], code=1).err)
        assert len(said) == 1 and said[0].startswith("train_unet: rank 1 (process ") and f" on {socket.gethostname()}): " in said[0], said
        assert all(word in said[0] for word in words), said
        assert not (tmp_path / "out/log.csv").exists()


@pytest.mark.skipif(BUILD == "cuda", reason="of the CPU build")
def test_num_gpus(ranks: Callable, run: Callable) -> None:
    for value, words in {"0": "from 1 on, or all", "x": "from 1 on, or all", "2": "mpirun -n 2 ./train_unet_mpi", "all": "mpirun -n 2"}.items():
        assert words in run(["--num_gpus", value], code=1).err
    assert own_sentences(ranks(2, ["--num_gpus", 3], code=1).err) == [
        "train_unet: --num_gpus 3: a launcher has started 2 processes; leave the flag out"
    ]


def test_one_process_is_told_of_many(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    mpi = ROOT / "train_unet_mpi"
    if BUILD == "cpu" and mpi.exists() and mpi.read_bytes() == (ROOT / "train_unet_cpu").read_bytes():
        pytest.skip("train_unet_cpu was built with MPI=1")
    if BUILD == "cpu":
        assert "2 processes were started; this is the CPU build for one process" in run([], code=1).err


# ----------------------------------------------------------------------------------------------------------------------
# how they meet


@pytest.mark.parametrize("launcher", ["torchrun", "MPICH", "Slurm", "Slurm's list"])
def test_launchers(program: Path, tmp_path: Path, launcher: str) -> None:
    """By what each of them sets, as far as a mistake that rank 1 makes and rank 0 says. Before that somebody else knocks at rank 0's door."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    job = {"SLURM_JOB_ID": str(port - 20000 if 20000 <= port < 40000 else port), "SLURM_STEP_NUM_TASKS": "2"}
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port - 1)}
    of_rank = {
        "torchrun": lambda r: meeting | {"RANK": r, "LOCAL_RANK": r, "WORLD_SIZE": "2", "SLURM_PROCID": "0"},
        "MPICH": lambda r: {"PMI_RANK": r, "PMI_SIZE": "2", "MPI_LOCALRANKID": r},  # meets by the number of their parent
        "Slurm": lambda r: job | {"SLURM_PROCID": r, "SLURM_LOCALID": r, "SLURM_STEP_NODELIST": "localhost,other"},
        "Slurm's list": lambda r: job | {"SLURM_PROCID": r, "SLURM_LOCALID": r, "SLURM_STEP_NODELIST": "127.0.0.[1-3,7]"},
    }[launcher]
    environments = [QUIET | of_rank(r) for r in "01"]
    begun = []
    try:
        begun.append(subprocess.Popen([program], cwd=tmp_path, env=environments[0], stderr=subprocess.PIPE, text=True))
        if launcher == "torchrun":
            for _ in range(100):
                with socket.socket() as s:
                    if s.connect_ex(("127.0.0.1", port)) == 0:
                        s.sendall(b"GET / HTTP/1.1\r\n\r\n")
                        break
                time.sleep(0.05)
            else:
                raise AssertionError("nobody listens")
        begun.append(subprocess.Popen([program, "--lrr", "1"], cwd=tmp_path, env=environments[1], stderr=subprocess.PIPE, text=True))
        said = [p.communicate(timeout=20)[1] for p in begun]
    finally:
        for p in begun:
            p.kill()
    assert [p.returncode for p in begun] == [1, 1] and said[1] == "", said
    assert said[0].startswith("train_unet: rank 1 (process ") and said[0].count("\n") == 1 and "--lrr: there is no such flag" in said[0], said


# ----------------------------------------------------------------------------------------------------------------------
# failures


def test_a_rank_that_stops_moving_ends_all(run_of: Callable, data: Path, tmp_path: Path) -> None:
    """Stopped, as by a debugger or a machine that is gone: no connection breaks, and no launcher notices."""
    for lost in (0, MOST - 1):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        p = run_of(MOST, [*MINUTES, "--data_file", data])
        found = processes(tmp_path, MOST)
        wait_for_step(p)
        os.kill(found[lost], signal.SIGSTOP)
        begun = time.monotonic()
        _, err = p.communicate(timeout=30)
        assert p.returncode != 0 and 4 < time.monotonic() - begun < 20
        assert (
            f"train_unet: rank {lost} (process {found[lost]} on " in err and "has been silent for 5 s" in err and "--resume_checkpoint auto" in err
        ), err
        assert len(own_sentences(err)) == 1, err


def test_all_stopped_and_continued(run_of: Callable, data: Path, tmp_path: Path) -> None:
    """Ctrl-Z and fg: nobody is lost."""
    p = run_of(2, [*MINUTES, "--data_file", data])
    found = processes(tmp_path, 2)
    wait_for_step(p)
    for number in found:
        os.kill(number, signal.SIGSTOP)
    time.sleep(6)
    for number in found:
        os.kill(number, signal.SIGCONT)
    wait_for_step(p)
    os.kill(found[1], signal.SIGTERM)
    out, err = p.communicate(timeout=30)
    assert p.returncode == 0 and "stopped by SIGTERM after step" in out and own_sentences(err) == []


@pytest.mark.skipif(BUILD != "cuda" or not shutil.which("compute-sanitizer"), reason="needs two GPUs and compute-sanitizer")
@pytest.mark.parametrize("exchange", ["auto", "nccl"])
def test_sanitizer_on_one_rank(program: Path, data: Path, tmp_path: Path, exchange: str) -> None:
    """Rank 1 of two under memcheck: a step on shares of microbatches, the exchange, validation, a grid and a checkpoint. Its API errors are
    not counted: NCCL tries what a machine may lack, and the program asks whether it can open a neighbour's memory."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        meeting = QUIET | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(s.getsockname()[1]), "WORLD_SIZE": "2"}
    words = flags(TINY, "--max_steps 3 --batch_size 8 --microbatch 2 --val_interval 2 --sample_interval 3 --save_interval 2")
    words = list(map(str, flags(words, "--rank_timeout 300 --exchange", exchange, "--data_file", data, "--val_data_file", data)))
    checker = ["compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    begun = []
    try:
        for rank, start in (("0", []), ("1", checker)):
            own = meeting | {"RANK": rank, "LOCAL_RANK": rank}
            begun.append(
                subprocess.Popen([*start, program, *words], cwd=tmp_path, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
        said = [p.communicate(timeout=300)[0] for p in begun]
    finally:
        for p in begun:
            p.kill()
    assert [p.returncode for p in begun] == [0, 0] and "ERROR SUMMARY: 0 errors" in said[1], said
    assert "done: 3 steps" in said[0], said[0]


def test_kills_at_random_moments(ranks: Callable, run_of: Callable, data: Path, tmp_path: Path) -> None:
    """Any rank, at any time from its start on: the others end at once with a sentence, the newest checkpoint can be read, and --resume_checkpoint
    auto goes on, on any number of ranks, to the bits of a run that nobody disturbed. A signal to one rank in between ends all after the same step."""
    seed = int(os.environ.get("TRAIN_UNET_FAULT_SEED", time.time()))
    print(f"TRAIN_UNET_FAULT_SEED={seed}")
    chance = random.Random(seed)
    given = flags(TINY, "--lr_schedule cosine --dropout 0.2 --batch_size 12 --microbatch 1 --log_interval 1 --save_interval 1 --keep_checkpoints 2")
    given += flags("--max_steps 16 --resume_checkpoint auto --data_file", data)
    begun = time.monotonic()
    ranks(MOST, [*given, "--output_dir", "unbroken"])
    took = time.monotonic() - begun
    killed = 0
    for number in range(50 * KILLS):
        if killed >= KILLS:
            break
        n = chance.choice(range(2, MOST + 1))
        p = run_of(n, [*given, "--output_dir", "out"])
        found, rank = processes(tmp_path, n), chance.randrange(n)
        time.sleep(chance.uniform(0, took))
        try:
            os.kill(found[rank], signal.SIGTERM if number % 5 == 4 else signal.SIGKILL)
        except ProcessLookupError:
            pass
        out, err = end_of(p, found, 10)
        told = f"kill {number}: rank {rank} of {n}, exit code {p.returncode}\n{out[-1000:]}\n{err[-1000:]}"
        if "done: " in out or "nothing to do" in out:
            shutil.rmtree(tmp_path / "out")  # again
        elif number % 5 != 4:
            assert p.returncode != 0 and (own_sentences(err) or "signal 9" in err), told
            killed += 1
        for step in checkpoints(tmp_path / "out"):
            read_checkpoint(tmp_path / "out" / model_name(step))
    assert killed >= KILLS
    ranks(chance.choice(range(2, MOST + 1)), [*given, "--output_dir", "out"])
    assert (tmp_path / "out" / model_name(16)).read_bytes() == (tmp_path / "unbroken" / model_name(16)).read_bytes()
    assert read_log(tmp_path / "out") == read_log(tmp_path / "unbroken")


# ----------------------------------------------------------------------------------------------------------------------
# --resume_checkpoint auto


def test_auto_starts_or_goes_on(run: Callable, data: Path, tmp_path: Path) -> None:
    given = [*TINY, "--data_file", data, "--resume_checkpoint", "auto"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out/log.csv").write_text("step,loss\n1,2\n")  # of a run that was killed before its first checkpoint
    assert "resumed" not in run([*given, "--max_steps", 2]).out
    assert "resumed from out/model_0000002.bin" in run([*given, "--max_steps", 3]).out
    assert [row["step"] for row in read_log(tmp_path / "out")] == ["1", "2", "3"]
    shutil.copytree(tmp_path / "out", tmp_path / "first")
    tuned = [
        *given,
        "--init",
        "first/model_0000003.bin",
        "--output_dir",
        "tuned",
        "--max_steps",
    ]  # weights to start from, unless there are newer ones
    assert "resumed" not in run([*tuned, 1]).out
    assert "resumed from tuned/model_0000001.bin" in run([*tuned, 2]).out
    assert "leave the other out" in run([*given[:-2], "--resume_checkpoint", "latest", "--init", "first/model_0000003.bin"], code=1).err
