"""What a run returns that a signal has stopped: 128 and the signal's number, whoever has started its processes and whichever of them got the signal.

--num_gpus, torchrun, mpirun and Slurm start two ranks of the GPU build here, each with a GPU made of software, whose network does nothing; between them is
fake_nccl.cpp. srun, scancel and scontrol are small scripts that do what Slurm's do. The twin trains in one process, alone or under torchrun.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import ROOT, TINY, checkpoints, environment, flags
from test_failures import HAS_NCCL, IDLE
from test_order import BINARY as EMULATED
from test_order import describe

needs_emulated = pytest.mark.skipif(not HAS_NCCL, reason="needs make -C dev BUILD=emulated, nvcc and nccl.h")
pytestmark = pytest.mark.long  # launchers take seconds to start
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
MPIRUN = ["mpirun", "-q", "--oversubscribe", "--bind-to", "none", "--mca", "plm_rsh_agent", "sh", "-n", "2"]
RUN = flags(TINY, "--max_steps 1000000 --log_interval 1 --save_interval 1000000 --data_file small.bin")
LAUNCHERS = ["--num_gpus", "torchrun", "mpirun", "srun"]

SLURM = {
    # Starts the tasks, waits for all of them, and returns the largest of their codes.
    "srun": """
import os, subprocess, sys
job = {"SLURM_JOB_ID": os.environ.get("SLURM_JOB_ID", str(os.getpid())), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
job["SLURM_STEP_NODELIST"] = "localhost"
tasks = [subprocess.Popen(sys.argv[1:], env=os.environ | job | {"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)}) for r in range(2)]
open("tasks", "w").write(" ".join(str(task.pid) for task in tasks))
sys.exit(max(code if code >= 0 else 128 - code for code in [task.wait() for task in tasks]))
""",
    # Sends SIGTERM to all tasks of the step.
    "scancel": """
import os, signal, sys
assert sys.argv[1:] == ["--signal=TERM", os.environ["SLURM_JOB_ID"] + ".0"]
for task in open("tasks").read().split():
    os.kill(int(task), signal.SIGTERM)
""",
    "scontrol": """
import os, sys
assert sys.argv[1:] == ["requeue", os.environ["SLURM_JOB_ID"]]
open("requeued", "w")
""",
}


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def command(launcher: str) -> list[str]:
    run = [str(EMULATED), *RUN]
    return {
        "--num_gpus": [*run, "--num_gpus", "2"],
        "torchrun": [*TORCHRUN, "--nproc-per-node", "2", "--master-port", free_port(), "--no-python", *run],
        "mpirun": [*MPIRUN, *run],
        "srun": ["srun", *run],
    }[launcher]


@pytest.fixture
def begin(tmp_path: Path, data: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """begin(words): a launcher in tmp_path, in a session of its own, all of which ends with the test."""
    shutil.copy(data, tmp_path / "small.bin")
    describe(tmp_path, "H200")
    with open(tmp_path / "gpu.txt", "a") as description:
        description.write(" count 2")
    (tmp_path / "bin").mkdir()
    for name, script in SLURM.items():
        (tmp_path / "bin" / name).write_text(f"#!{sys.executable}{script}")
        (tmp_path / "bin" / name).chmod(0o755)
    known = {"FAKE_GPU": "gpu.txt", "FAKE_IDLE": IDLE, "TMPDIR": str(tmp_path), "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    known |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    begun = []

    def begin(words: list[str], **variables: str) -> subprocess.Popen:
        if words[0] == "mpirun" and not shutil.which("mpirun"):
            pytest.skip("there is no mpirun")
        variables = environment() | known | variables
        pipe = subprocess.PIPE
        begun.append(subprocess.Popen(words, cwd=tmp_path, env=variables, stdout=pipe, stderr=pipe, text=True, start_new_session=True))
        return begun[-1]

    yield begin
    for process in begun:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for_step(process: subprocess.Popen) -> None:
    assert process.stdout
    for line in process.stdout:
        if re.search(r"step \d+/", line):  # mpirun gives it a terminal
            return
    raise AssertionError(process.communicate())


def ranks_in(folder: Path) -> list[int]:
    """Process numbers of the two ranks that run in a folder, in their order."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "cwd") != str(folder) or os.readlink(entry / "exe") != str(EMULATED.resolve()):
                continue
            rank = re.search(r"\0(?:RANK|OMPI_COMM_WORLD_RANK|SLURM_PROCID)=(\d+)\0", (entry / "environ").read_text())
            if rank:
                found[int(rank[1])] = int(entry.name)
        except OSError:
            continue
    assert sorted(found) == [0, 1], found
    return [found[0], found[1]]


def check_stopped(process: subprocess.Popen, launcher: str, how: signal.Signals, code: int, folder: Path) -> str:
    """All have ended after the same step, with a checkpoint. What is said on stderr."""
    out, err = process.communicate(timeout=60)
    assert process.returncode == code and how.name in out and checkpoints(folder / "out"), (process.returncode, out, err)
    assert not re.search(r"^train_unet: ", err, re.MULTILINE), err
    if launcher != "torchrun":
        return err
    assert set(re.findall(r"exitcode +: (-?\d+)", err)) <= {str(128 + how)}, err
    return err


@needs_emulated
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_signal_at_one_rank(begin: Callable, tmp_path: Path, launcher: str, rank: int) -> None:
    """torchrun takes 143 for a failure, says so, and returns 1."""
    process = begin(command(launcher))
    wait_for_step(process)
    os.kill(ranks_in(tmp_path)[rank], signal.SIGTERM)
    check_stopped(process, launcher, signal.SIGTERM, 1 if launcher == "torchrun" else 143, tmp_path)


@needs_emulated
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_at_who_started_the_ranks(begin: Callable, tmp_path: Path, how: signal.Signals) -> None:
    process = begin(command("--num_gpus"))
    wait_for_step(process)
    process.send_signal(how)
    assert not re.sub(r"fake GPU.*\n", "", check_stopped(process, "--num_gpus", how, 128 + how, tmp_path))


@needs_emulated
def test_ctrl_c(begin: Callable, tmp_path: Path) -> None:
    """A terminal sends it to all processes that it started, and who started the ranks passes it on, too."""
    process = begin(command("--num_gpus"))
    wait_for_step(process)
    os.killpg(process.pid, signal.SIGINT)
    check_stopped(process, "--num_gpus", signal.SIGINT, 130, tmp_path)


@needs_emulated
@pytest.mark.parametrize("wait", [0, 0.02, 0.05, 0.1, 0.2, 0.3])
def test_a_signal_before_the_first_step(begin: Callable, tmp_path: Path, wait: float) -> None:
    """Before ranks look at signals, one ends them at once: what started them returns what a shell returns of a single process.

    The rank that is ended last may have seen the other one end, and says so.
    """
    process = begin(command("--num_gpus"))
    time.sleep(wait)
    process.terminate()
    out, err = process.communicate(timeout=60)
    said = re.sub(r"fake GPU.*\n|train_unet: rank [01].* has ended, so the run ends; .*\n", "", err)
    assert process.returncode in (143, -signal.SIGTERM) and not said, (process.returncode, out, err)


@needs_emulated
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_torchrun(begin: Callable, tmp_path: Path, how: signal.Signals) -> None:
    """It passes the signal on, waits for the ranks, and returns 1."""
    process = begin(command("torchrun"))
    wait_for_step(process)
    process.send_signal(how)
    check_stopped(process, "torchrun", how, 1, tmp_path)


@needs_emulated
def test_the_job_of_the_documentation(begin: Callable, tmp_path: Path) -> None:
    """SCALING.md's batch script: two minutes before its time is up it stops the run, which is saved, and queues itself again."""
    script = re.search(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", (ROOT / "docs/SCALING.md").read_text(), re.DOTALL)[1]
    given = "--preset adm64 --data_file imagenet64.bin --batch_size 512"
    assert script.count(given) == 1
    (tmp_path / "job.sh").write_text(script.replace(given, " ".join(RUN)))
    (tmp_path / "train_unet").symlink_to(EMULATED)
    process = begin(["bash", "job.sh"], SLURM_JOB_ID=str(os.getpid()))
    wait_for_step(process)
    process.send_signal(signal.SIGUSR1)
    check_stopped(process, "srun", signal.SIGTERM, 143, tmp_path)
    assert (tmp_path / "requeued").exists()


TWIN = [str(ROOT / "train_unet.py"), *flags(RUN, "--device cpu")]


@pytest.mark.parametrize("where", ["alone", "the twin", "torchrun"])
def test_the_twin(begin: Callable, tmp_path: Path, where: str) -> None:
    """Alone, or as torchrun's only process; the signal comes to one of them."""
    launcher = [sys.executable] if where == "alone" else [*TORCHRUN, "--nproc-per-node", "1", "--master-port", free_port()]
    process = begin([*launcher, *TWIN], PYTHONUNBUFFERED="1")
    wait_for_step(process)
    if where == "the twin":
        [child] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)
    else:
        process.terminate()
    check_stopped(process, "alone" if where == "alone" else "torchrun", signal.SIGTERM, 143 if where == "alone" else 1, tmp_path)


def test_the_twin_is_one_process(begin: Callable, tmp_path: Path) -> None:
    process = begin([*TORCHRUN, "--nproc-per-node", "2", "--master-port", free_port(), *TWIN])
    _, err = process.communicate(timeout=60)
    said = re.findall(r"^train_unet: .*", err, re.MULTILINE)
    assert process.returncode == 1 and said and not (tmp_path / "out").exists(), err
