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
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
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
from PIL import Image

KILLS = int(os.environ.get("TRAIN_UNET_KILLS", 3))
LISTED = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines() if BUILD == "cuda" else []
GPUS = len(os.environ["CUDA_VISIBLE_DEVICES"].split(",") if "CUDA_VISIBLE_DEVICES" in os.environ else LISTED)
MOST = min(GPUS, 4) if BUILD == "cuda" else 4
pytestmark = pytest.mark.skipif(
    MOST < 2 if BUILD == "cuda" else not (shutil.which("mpicxx") and shutil.which("mpirun")), reason="there are no two GPUs, or there is no MPI"
)
# All ranks are on this machine, so none is started by ssh, which need not be there: mpirun only asks whether there is such a program.
MPIRUN = ["mpirun", "-q", "--oversubscribe", "--bind-to", "none", "--mca", "plm_rsh_agent", "sh", "--mca", "mpi_yield_when_idle", "1"]
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


def ranks_in(folder: Path) -> dict[int, int]:
    """Process numbers, by rank, of the ranks that run in a folder."""
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
    return found


def processes(folder: Path, n: int) -> list[int]:
    """Process numbers of the n ranks that run in a folder, in their order, once all have been started."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        found = ranks_in(folder)
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


@pytest.mark.long
def test_rank_0_prepares_a_folder(ranks: Callable, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and longer than --rank_timeout: the others wait for what is alive. What goes wrong with it ends all."""
    (tmp_path / "tools").mkdir()
    copy = tmp_path / "tools/train_unet"  # beside which there is no .venv, whose Python it would take
    shutil.copy(program, copy)
    (tmp_path / "tools/prepare_data.py").symlink_to(ROOT / "prepare_data.py")
    python = tmp_path / "tools/python3"
    python.write_text(f'#!/bin/sh\necho x >>{tmp_path}/calls\nsleep 7\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setitem(ENVIRONMENT, "PATH", f"{tmp_path}/tools:{os.environ['PATH']}")
    (tmp_path / "pets").mkdir()
    for k, image in enumerate(make_images(8, 3)):
        Image.fromarray(image.transpose(1, 2, 0)).save(tmp_path / f"pets/{k}.png")
    done = ranks([[copy, *flags(TINY, "--data_dir pets --image_size 8 --max_steps 2 --rank_timeout 5")]] * 2)
    assert done.out.count("pets_8x8x3.bin: prepared from pets") == done.out.count("step 2/2") == 1
    assert "have waited for 5 s for rank 0" in done.err and "it is alive" in done.err
    done = ranks([[copy, *flags(TINY, "--data_dir pets --image_size 8 --max_steps 2 --output_dir again")]] * 2)
    assert done.out.count("pets_8x8x3.bin: is up to date with pets") == 1 and (tmp_path / "calls").read_text() == "x\n"
    python.write_text("#!/bin/sh\necho no picture >&2\nexit 1\n")
    done = ranks([[copy, *flags(TINY, "--data_dir pets --image_size 16 --max_steps 2 --output_dir third")]] * 2, code=1)
    assert "no picture" in done.err and len(own_sentences(done.err)) == 1 and "--data_dir pets: was not prepared" in done.err


def test_rank_0_speaks(ranks: Callable, data: Path) -> None:
    out = ranks(MOST, flags(TINY, "--max_steps 2 --batch_size 12 --microbatch 1 --data_file", data)).out
    assert out.count("parameters") == out.count("step 2/2") == out.count("done: 2 steps") == 1
    assert out.count("exchange: ") == (BUILD == "cuda")
    assert ranks(2, ["--help"]).out.count("--batch_size ") >= 1


def test_a_mistake_of_all_is_said_once(ranks: Callable) -> None:
    for args, words in ((["--lrr", 1], "--lrr: "), (["--sample", 1], "--sample 1: needs --init"), (["--data_file", "none.bin"], "none.bin: ")):
        said = own_sentences(ranks(MOST, args, code=1).err)
        assert len(said) == 1 and words in said[0], said


DIFFER = {
    # what rank 0 and rank 1 are given, each in a folder of its own, and what is said
    "a flag": ("", "--adam_eps 1e-7", "has --adam_eps 1e-07, and rank 0 has --adam_eps 1e-08; all ranks need the same"),
    "the seed": ("--seed 3", "--seed 4", "has --seed 4, and rank 0 has --seed 3"),
    "the preset": ("", "--preset emoji64 --image_size 8", "--preset"),
    "the patience": ("", "--rank_timeout 7", "has --rank_timeout 7, and rank 0 has --rank_timeout 5"),
    "the exchange": ("", "--exchange nccl", "has --exchange nccl, and rank 0 has --exchange auto"),
    "a flag that there is not": ("", "--lrr 1", "--lrr: there is no such flag"),
    "help at one": ("", "--help", "has come to its end, and rank 0 to the comparison of flags and files"),
    "help at rank 0": ("--help", "", "has come to the choice of a checkpoint, and rank 0 to its end"),
    "a run and samples": ("", "--init init.bin --sample 2 --output_dir other", "file of weights"),
    "samples and a run": ("--sample 2 --init init.bin", "", "file of weights"),
    "data of another name": ("", "--data_file other.bin", "has a --data_file of 2656 bytes and checksum"),
    "data of one name": ("--data_file differs.bin", "--data_file differs.bin", "has a --data_file of 2656 bytes and checksum"),
    "data that one lacks": ("--data_file only_0.bin", "--data_file only_0.bin", "only_0.bin: can't be opened"),
    "data that is damaged at one": ("--data_file damaged_1.bin", "--data_file damaged_1.bin", "damaged_1.bin: its checksum is wrong"),
    "validation at one": ("", "--val_data_file data.bin", "has a --val_data_file of 2656 bytes and checksum"),
    "validation at rank 0": ("--val_data_file data.bin", "", "has no --val_data_file, and rank 0 has a --val_data_file of 2656 bytes"),
    "validation of other length": ("--val_data_file short.bin", "--val_data_file data.bin", "rank 0 has a --val_data_file of 1432 bytes"),
    "validation of one name": ("--val_data_file differs.bin", "--val_data_file differs.bin", "has a --val_data_file of 2656 bytes"),
    "weights at one": ("", "--init init.bin", "has a file of weights (--init, --resume_checkpoint) of"),
    "weights of one name": ("--init init.bin", "--init init.bin", "has a file of weights (--init, --resume_checkpoint) of"),
    "what is resumed": ("--output_dir run --resume_checkpoint auto", "--output_dir run --resume_checkpoint auto", "has a file of weights"),
    "whether something is resumed": ("", "--resume_checkpoint latest", "has --resume_checkpoint latest, and rank 0 has --resume_checkpoint ;"),
    "whether to resume what there is": ("--resume_checkpoint auto", "", "has --resume_checkpoint , and rank 0 has --resume_checkpoint auto"),
    "start_from": ("--start_from differs.bin", "--start_from differs.bin", "has a --start_from of 2656 bytes"),
    "inpaint": ("--inpaint differs.bin --mask data.bin", "--inpaint differs.bin --mask data.bin", "has a --inpaint of 2656 bytes"),
    "mask": ("--inpaint data.bin --mask differs.bin", "--inpaint data.bin --mask differs.bin", "has a --mask of 2656 bytes"),
    "mask at one": ("--inpaint data.bin --mask data.bin", "", "has no --inpaint, and rank 0 has a --inpaint of 2656 bytes"),
}


@pytest.fixture(scope="module")
def folders(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two ranks' folders: what is called differs.bin, init.bin and run is another one in each."""
    both = [tmp_path_factory.mktemp("rank"), tmp_path_factory.mktemp("rank")]
    for rank, folder in enumerate(both):
        images = make_images(seed=rank)
        shutil.copy(data, folder / "data.bin")
        (folder / "other.bin").write_bytes(data_bytes(make_images(seed=7), np.arange(24) % 3, 3))
        (folder / "differs.bin").write_bytes(data_bytes(images, np.arange(24) % 3, 3))
        (folder / "short.bin").write_bytes(data_bytes(images[:6], np.arange(6) % 3, 3))
        given = [binary_path("cpu"), *TINY, *flags("--data_file data.bin --max_steps 1 --output_dir run --seed", rank)]
        subprocess.run(list(map(str, given)), cwd=folder, env=environment(), check=True, capture_output=True)
        shutil.copy(folder / "run" / model_name(1), folder / "init.bin")
        shutil.copy(both[0] / "init.bin", folder / "same.bin")
    shutil.copy(data, both[0] / "only_0.bin")
    whole = data.read_bytes()
    (both[0] / "damaged_1.bin").write_bytes(whole)
    (both[1] / "damaged_1.bin").write_bytes(whole[:1500] + bytes([whole[1500] ^ 1]) + whole[1501:])
    return both


def in_folders(words: list[list], folders: list[Path], limit: float = 20) -> tuple[int | None, str]:
    """mpirun with a program, arguments and a folder for each rank: its exit code and what was said. None: all ranks have ended, and Open MPI
    4.1's mpirun goes on waiting for one that was just ending by itself when it was told to."""
    command = [*MPIRUN, "--mca", "odls_base_sigkill_timeout", "0"]
    for number, each in enumerate(words):
        command += [":"] * (number > 0) + ["-n", "1", "-wdir", str(folders[number % len(folders)]), *map(str, each)]
    p = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True)
    begun = time.monotonic()
    try:
        while p.poll() is None:
            assert time.monotonic() < begun + limit, f"still there after {limit} s: {' '.join(command)}"
            time.sleep(0.05)
            ranks_left = [number for folder in folders for number in ranks_in(folder)]
            if not ranks_left and time.monotonic() > begun + limit / 2:
                os.killpg(p.pid, signal.SIGKILL)
                return None, p.communicate()[1]
        return p.returncode, p.communicate()[1]
    finally:
        if p.poll() is None:
            os.killpg(p.pid, signal.SIGKILL)


@pytest.mark.skipif(BUILD == "cuda", reason="mpirun gives each rank arguments of its own")
@pytest.mark.parametrize("name", DIFFER)
def test_ranks_that_differ(program: Path, folders: list[Path], name: str) -> None:
    """Whoever differs from rank 0 says in what, by rank and host, before anything is written."""
    of_0, of_1, words = DIFFER[name]
    common = flags(TINY, "--batch_size 6 --data_file data.bin --max_steps 30 --val_interval 2 --rank_timeout 5")
    if "--mask" in of_0 or "--start_from" in of_0:
        common = flags("--init same.bin --sample 2 --rank_timeout 5")
    lines = [[program, *flags(common, mine)] if "--" in mine and mine != "--help" else [program, *common, *mine.split()] for mine in (of_0, of_1)]
    code, err = in_folders(lines, folders)
    said = own_sentences(err)
    assert code in (1, None) and len(said) == 1, err
    assert said[0].startswith("train_unet: rank 1 (process ") and f" on {socket.gethostname()}): " in said[0] and words in said[0], said
    assert not (folders[0] / "out").exists() and not (folders[0] / "samples.png").exists()


@pytest.mark.skipif(BUILD == "cuda", reason="mpirun gives each rank a program of its own")
def test_programs_that_differ(program: Path, folders: list[Path], tmp_path: Path) -> None:
    shutil.copy(program, tmp_path / "train_unet")
    with open(tmp_path / "train_unet", "ab") as f:
        f.write(b"\0")
    given = flags(TINY, "--data_file data.bin --max_steps 3")
    said = own_sentences(in_folders([[program, *given], [tmp_path / "train_unet", *given]], folders)[1])
    assert len(said) == 1 and "has a program of checksum" in said[0] and "and rank 0 has a program" in said[0], said


ONLY_AT_RANK_0 = {
    "a run is there": ("", "already holds a run (up to step 1)"),
    "a log without checkpoints": ("rm out/model*", "already holds a run, but no checkpoint"),
    "a folder that can't be made": ("rm -r out; touch out", "--output_dir out: can't be written to"),
    "a full disk": ("rm -r out; ulimit -f 8", "writing failed (File too large); what was there before is untouched"),
    "another run holds the folder": ("rm -r out; mkdir out; exec 9>out/.lock; flock -n 9", "trains there; wait until it ends"),
}


@pytest.mark.skipif(BUILD == "cuda" or not shutil.which("flock"), reason="mpirun gives each rank a program of its own")
@pytest.mark.parametrize("name", ONLY_AT_RANK_0)
def test_what_only_rank_0_meets(program: Path, folders: list[Path], name: str) -> None:
    """What rank 0 alone reads and writes: its mistakes end all."""
    shutil.copytree(folders[0] / "run", folders[0] / "out")
    before, words = ONLY_AT_RANK_0[name]
    given = [program, *flags(TINY, "--data_file data.bin --max_steps 8 --save_interval 4 --rank_timeout 5")]
    try:
        code, err = in_folders([["sh", "-c", f'{before}\n"$0" "$@"; exit $?', *given], given], folders)
    finally:
        subprocess.run(["rm", "-rf", folders[0] / "out"], check=True)
    assert code in (1, None) and len(own_sentences(err)) == 1 and words in err, err


@pytest.fixture(scope="module")
def branches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """dev/test/branches.cpp: each rank does what its words say."""
    path = tmp_path_factory.mktemp("branches") / "train_unet_branches"
    words = "mpicxx -DUSE_MPI -DTRAIN_UNET_NO_MAIN -x c++ -std=c++20 -O0 -fopenmp -Wno-unused-function -Wno-unknown-pragmas".split()
    subprocess.run([*words, ROOT / "dev/test/branches.cpp", "-o", path], check=True, capture_output=True)
    return path


BRANCHES = {
    # what ranks do, and what is said of which rank and of rank 0
    "question / exchange": ("an exchange", "a question"),
    "exchange / question": ("a question", "an exchange"),
    "question / answer": ("an answer", "a question"),
    "answer / question": ("a question", "an answer"),
    "exchange / sums": ("an exchange of sums", "an exchange"),
    "exchange exchange exchange / exchange exchange": ("its end", "an exchange"),
    "exchange exchange / exchange exchange exchange": ("an exchange", "its end"),
    "question exchange question / question exchange": ("its end", "a question"),
    "question / question exchange": ("an exchange", "its end"),
    "question exchange / question exchange / question question": ("a question", "an exchange"),
    "exchange / exchange / fail": ("a mistake", ""),
    "fail / exchange": ("a mistake", ""),
}


@pytest.mark.long
@pytest.mark.skipif(BUILD == "cuda", reason="of mpirun")
@pytest.mark.parametrize("name", BRANCHES)
def test_ranks_that_take_different_branches(branches: Path, tmp_path: Path, name: str) -> None:
    """Wherever each of them waits, in MPI or for a host, all end within the timeout."""
    code, err = in_folders([[branches, *words.split()] for words in name.split(" / ")], [tmp_path])
    said, (place, of_0) = own_sentences(err), BRANCHES[name]
    assert code in (1, None) and len(said) == 1, err
    words = f"has come to {place}, and rank 0 to {of_0}; all ranks must do the same" if of_0 else f": {place}"
    assert words in said[0] and said[0].startswith("train_unet: " if name.startswith("fail") else "train_unet: rank "), said


@pytest.mark.long
@pytest.mark.skipif(BUILD == "cuda", reason="of mpirun")
def test_a_rank_that_is_slow_is_waited_for(branches: Path, tmp_path: Path) -> None:
    """It is alive: whoever looks is told for whom the others wait, and the run goes on."""
    code, err = in_folders([[branches, "exchange", "exchange", "question"], [branches, "exchange", "slow", "exchange", "question"]], [tmp_path])
    said = own_sentences(err)
    assert code == 0 and len(said) == 1 and "the others have waited for 5 s for rank 1 (process " in said[0], err
    assert "since an exchange; it is alive, so they wait on" in said[0], said


@pytest.mark.skipif(BUILD == "cuda", reason="of the CPU build")
def test_num_gpus(ranks: Callable, run: Callable) -> None:
    for value, words in {"0": "from 1 on, or all", "x": "from 1 on, or all", "2": "mpirun -n 2 ./train_unet_mpi", "all": "mpirun -n 2"}.items():
        assert words in run(["--num_gpus", value], code=1).err
    assert own_sentences(ranks(2, ["--num_gpus", 3], code=1).err) == [
        "train_unet: --num_gpus 3: a launcher has started 2 processes; leave the flag out"
    ]


@pytest.mark.skipif(BUILD == "cuda", reason="of the CPU build")
@pytest.mark.parametrize("rank", [0, 1])
def test_one_process_is_told_of_many(run: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: int) -> None:
    """A build for one process says so whichever rank it is: nobody else may be there to say it."""
    mpi = ROOT / "train_unet_mpi"
    if mpi.exists() and mpi.read_bytes() == (ROOT / "train_unet_cpu").read_bytes():
        pytest.skip("train_unet_cpu was built with MPI=1")
    launched = subprocess.run([*MPIRUN, "-n", "2", binary_path("cpu")], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert launched.returncode == 1 and "this is rank" in launched.stderr
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    told = f"2 processes were started, of which this is rank {rank}; this is the CPU build for one process; make train_unet_mpi builds it"
    assert told in run([], code=1).err and not list(tmp_path.iterdir())


VARIABLES = {
    "RANK=5 WORLD_SIZE=2": 'RANK is "5", and must be a whole number from 0 to 1',
    "RANK=2 WORLD_SIZE=2": 'RANK is "2", and must be a whole number from 0 to 1',
    "RANK=-1 WORLD_SIZE=2": 'RANK is "-1", and must be',
    "RANK=one WORLD_SIZE=2": 'RANK is "one", and must be',
    "RANK=1.5 WORLD_SIZE=2": 'RANK is "1.5", and must be',
    "RANK=0 WORLD_SIZE=": 'WORLD_SIZE is "", and must be a whole number from 1 to 100000',
    "RANK=0 WORLD_SIZE=-2": 'WORLD_SIZE is "-2", and must be',
    "RANK=0 WORLD_SIZE=99999999999": 'WORLD_SIZE is "99999999999", and must be',
    "RANK=1": "RANK is 1, but WORLD_SIZE is not set",
    "WORLD_SIZE=2": "WORLD_SIZE is 2, but RANK is not set",
    "RANK=0 WORLD_SIZE=2 LOCAL_RANK=2": 'LOCAL_RANK is "2", and must be a whole number from 0 to 1',
    "RANK=0 WORLD_SIZE=2 LOCAL_RANK=-1": 'LOCAL_RANK is "-1", and must be',
    "RANK=0 WORLD_SIZE=2 MASTER_PORT=http": 'MASTER_PORT is "http", and must be a whole number from 1 to 65534',
    "RANK=1 WORLD_SIZE=2 MASTER_PORT=65535": 'MASTER_PORT is "65535", and must be',
    "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=2": 'OMPI_COMM_WORLD_RANK is "3", and must be',
    "PMI_RANK=x PMI_SIZE=2": 'PMI_RANK is "x", and must be',
    "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=9": 'SLURM_LOCALID is "9", and must be',
}


@pytest.mark.parametrize("given", VARIABLES)
def test_what_a_launcher_says_is_checked(program: Path, tmp_path: Path, given: str) -> None:
    own = dict(word.split("=") for word in given.split())
    p = subprocess.run([program, "--lrr", "1"], cwd=tmp_path, env=QUIET | own, capture_output=True, text=True, timeout=60)
    assert p.returncode == 1 and p.stderr.count("\n") == 1 and p.stderr.startswith("train_unet: ") and VARIABLES[given] in p.stderr, p.stderr


def test_what_says_nothing_of_several_processes(program: Path, tmp_path: Path) -> None:
    """One process, as before: a batch script's, or one that a launcher started alone. Of two launchers, the one that started several counts."""
    for given in ("RANK=0", "SLURM_PROCID=0", "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0", "WORLD_SIZE=1"):
        own = dict(word.split("=") for word in given.split())
        p = subprocess.run([program, "--lrr", "1"], cwd=tmp_path, env=QUIET | own, capture_output=True, text=True, timeout=60)
        assert p.returncode == 1 and p.stderr.startswith("train_unet: --lrr: there is no such flag"), (given, p.stderr)


# ----------------------------------------------------------------------------------------------------------------------
# how they meet


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def knock(port: int, said: bytes) -> None:
    """Somebody else comes to where rank 0 listens, as soon as it does, says something and waits for the line's end."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                s.settimeout(10)
                s.sendall(said)
                try:
                    assert s.recv(100) == b""
                except ConnectionResetError:
                    pass
                return
        time.sleep(0.05)
    raise AssertionError("nobody listens")


def started_ranks(words: list[list], environments: list[dict[str, str]], folder: Path, visit: Callable | None = None) -> list[str]:
    """What ranks say that a launcher starts with these words and variables, each of which must end with exit code 1."""
    begun = []
    try:
        for line, own in zip(words, environments):
            begun.append(subprocess.Popen(line, cwd=folder, env=QUIET | own, stderr=subprocess.PIPE, text=True))
            if visit and len(begun) == 1:
                visit()
        said = [p.communicate(timeout=60)[1] for p in begun]
    finally:
        for p in begun:
            p.kill()
    assert [p.returncode for p in begun] == [1] * len(begun), said
    return said


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("launcher", ["torchrun", "MPICH", "Slurm", "Slurm's list", "no job's name"])
def test_launchers(program: Path, data: Path, tmp_path: Path, launcher: str, wrapped: bool) -> None:
    """By what each of them sets, as far as a mistake that rank 1 makes and rank 0 says; wrapped: in a script that waits for the program. Before
    that others knock at rank 0's door: a browser, and a rank of another run."""
    port = free_port()
    job = {"SLURM_JOB_ID": str(port), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    of_rank = {
        "torchrun": lambda r: {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port - 1), "RANK": r, "LOCAL_RANK": r, "WORLD_SIZE": "2"},
        "MPICH": lambda r: {"PMI_RANK": r, "PMI_SIZE": "2", "MPI_LOCALRANKID": r},
        "Slurm": lambda r: job | {"SLURM_PROCID": r, "SLURM_LOCALID": r, "SLURM_STEP_NODELIST": "localhost,other"},
        "Slurm's list": lambda r: job | {"SLURM_PROCID": r, "SLURM_LOCALID": r, "SLURM_STEP_NODELIST": "127.0.0.[1-3,7]"},
        "no job's name": lambda r: {"RANK": r, "WORLD_SIZE": "2"},
    }[launcher]

    def visit() -> None:
        knock(port, b"GET / HTTP/1.1\r\n\r\n")
        other = b"train_unet job 12345678 rank 1/2"
        knock(port, np.array([2, len(other)], "<u4").tobytes() + other)  # 2: HELLO

    (tmp_path / "run.sh").write_text(f'"{program}" "$@"\nexit $?\n')
    start: list = ["sh", "run.sh"] if wrapped else [program]
    words = [[*start, *map(str, flags(TINY, "--data_file", data))], [*start, "--lrr", "1"]]
    said = started_ranks(words, [of_rank(r) | {"SLURM_PROCID": r} for r in "01"], tmp_path, visit if launcher == "torchrun" else None)
    assert said[1] == "" and said[0].startswith("train_unet: rank 1 (process ") and said[0].count("\n") == 1, said
    assert "--lrr: there is no such flag" in said[0], said


@pytest.mark.skipif(BUILD == "cuda", reason="of mpirun")
def test_two_jobs_at_once_in_scripts_that_wait(program: Path, data: Path, tmp_path: Path) -> None:
    """mpirun -n 2 sh run.sh: the script stays as each rank's parent. Two such jobs on one machine do not meet each other."""
    (tmp_path / "run.sh").write_text(f'"{program}" "$@"\nexit $?\n')
    args = list(map(str, flags(TINY, "--max_steps 3 --data_file", data)))
    words = [[*MPIRUN, "-n", "2", "sh", "run.sh", *args, "--output_dir", name] for name in ("a", "b")]
    begun = [subprocess.Popen(w, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for w in words]
    try:
        said = [p.communicate(timeout=40) for p in begun]
    finally:
        for p in begun:
            p.kill()
    assert [p.returncode for p in begun] == [0, 0] and all("processes: 2" in out and "done: 3 steps" in out for out, _ in said), said
    assert checkpoints(tmp_path / "a") == checkpoints(tmp_path / "b") == [3]


# ----------------------------------------------------------------------------------------------------------------------
# failures


@pytest.mark.long
def test_a_rank_that_stops_moving_ends_all(run_of: Callable, data: Path, tmp_path: Path) -> None:
    """Stopped, as by a debugger or a machine that is gone: no connection breaks, and no launcher notices."""
    for lost in (0, MOST - 1):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        p = run_of(MOST, [*MINUTES, "--data_file", data])
        found = processes(tmp_path, MOST)
        wait_for_step(p)
        os.kill(found[lost], signal.SIGSTOP)
        begun = time.monotonic()
        _, err = p.communicate(timeout=60)
        assert p.returncode != 0 and 4 < time.monotonic() - begun < 20
        assert (
            f"train_unet: rank {lost} (process {found[lost]} on " in err and "has been silent for 5 s" in err and "--resume_checkpoint auto" in err
        ), err
        assert len(own_sentences(err)) == 1, err


@pytest.mark.long
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
    out, err = p.communicate(timeout=60)
    assert p.returncode == 128 + signal.SIGTERM and "stopped by SIGTERM after step" in out and own_sentences(err) == []


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


@pytest.mark.long
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
            # Before the ranks have met, mpirun may end the others before they can say anything. Then its code alone tells of the signal.
            never_met = out == "" and p.returncode == 128 + signal.SIGKILL
            assert p.returncode != 0 and (own_sentences(err) or "signal 9" in err or never_met), told
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
