"""The Nth failure: each call of the system, of CUDA and of NCCL that a short run makes fails once, or it and all behind it, a run for each N, as SQLite's tests do.

Whatever fails, a run ends with exit code 1 and one sentence, or goes on and says what it could not do; no checkpoint and no row of the log is lost; and the
next start with --resume_checkpoint auto ends with the same bits as a run without failures. docs/TESTING.md says how many were tried.

Calls of the system fail in the CPU build, by failing_calls.cpp. Those of CUDA and NCCL fail in the GPU build on a GPU made of software, by fake_cudart.cpp and
fake_nccl.cpp, which take the same variables: make -C dev BUILD=emulated builds it.

`make test` tries some of those of a resumed run, evenly spaced, `make test_all` some of all; `make test_faults` tries every N (TRAIN_UNET_FAILURES=all).
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, TINY, binary_path, checkpoints, data_bytes, environment, flags, make_images, model_name, read_checkpoint
from test_order import BINARY as EMULATED
from test_order import describe

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="failing_calls.cpp catches calls of Linux")

ALL = os.environ.get("TRAIN_UNET_FAILURES") == "all"
TRIES = 3  # of each call, in each scenario and way to fail, where not every N is tried
CALLS = [
    "open",
    "read",
    "write",
    "short write",
    "seek",
    "sync",
    "close",
    "rename",
    "unlink",
    "mkdir",
    "stat",
    "list",
    "lock",
    "truncate",
    "mmap",
    "malloc",
]
SCENARIOS = ["start", "resume", "sample"]
RANKS = ["rank 0", "rank 1"]  # start, by two processes; calls of this one fail
CUDA_CALLS = [
    "cudaGetDeviceCount",
    "cudaDriverGetVersion",
    "cudaSetDevice",
    "cudaGetDeviceProperties",
    "cudaDeviceGetStreamPriorityRange",
    "cudaGetDriverEntryPointByVersion",
    "cuTensorMapEncodeTiled",
    "cudaFuncGetAttributes",
    "cudaFuncSetAttribute",
    "cudaOccupancyMaxActiveClusters",
    "cudaMalloc",
    "cudaHostAlloc",
    "cudaMemGetInfo",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
    "cudaStreamCreateWithFlags",
    "cudaStreamCreateWithPriority",
    "cudaStreamSynchronize",
    "cudaStreamWaitEvent",
    "cudaStreamBeginCapture",
    "cudaStreamEndCapture",
    "cudaEventCreateWithFlags",
    "cudaEventRecord",
    "cudaEventSynchronize",
    "cudaGraphInstantiate",
    "cudaGraphGetNodes",
    "cudaGraphLaunch",
    "cudaGraphDestroy",
    "cudaGraphExecDestroy",
    "cudaLaunchKernelExC",
]
NCCL_CALLS = [
    "ncclGetUniqueId",
    "ncclCommInitRank",
    "ncclCommGetAsyncError",
    "ncclGroupStart",
    "ncclGroupEnd",
    "ncclSend",
    "ncclRecv",
    "ncclAllGather",
]
RUN = flags(
    TINY,
    "--channel_mult 1 --attention_resolutions 8 --max_steps 6 --save_interval 2 --sample_interval 2 --log_interval 1 --keep_checkpoints 2 --val_interval 3 --timestep_respacing 2",
)
RUN = flags(RUN, "--data_file small.bin --val_data_file small.bin")
PICTURES = {
    "start": ["samples_0000002.png", "samples_0000004.png", "samples_0000006.png"],
    "resume": ["samples_0000004.png", "samples_0000006.png"],
    "sample": [],
}
PICTURES |= dict.fromkeys(RANKS, PICTURES["start"])
HAS_NCCL = EMULATED.is_file() and b"fake NCCL: " in EMULATED.read_bytes()  # where there was an nccl.h
FOREVER = 1_000_000_000
FAKE_GPU_SAYS = re.compile(r"^fake GPU \d+: \d+ launches of \d+ kernels\n", re.MULTILINE)
# Kernels that are left out, so that a run takes a third of a second: those of the network. What comes before and behind it does what it always does.
IDLE = "conv_ attention_ groupnorm_ linear_ resample_ silu_ label_ timestep_"
# With several ranks gradients of the weights must be computed, if only of zeros: something else lies in their memory in between.
IDLE_FORWARD = "conv_tiles conv_small conv_halo conv_gather conv_few_rows attention_ groupnorm_forward linear_forward resample_ silu_ timestep_"


@dataclass
class Failure:
    """A run in which the call number `at` fails, and those behind it, `many` in all."""

    scenario: str
    call: str
    at: int
    many: int
    code: int | None = None
    out: str = ""
    err: str = ""
    report: str = ""
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        how = f"{self.call} number {self.at}{' and all behind it' if self.many > 1 else ''}"
        return (
            f"{self.scenario}: {how} ({self.report.splitlines()[:1]}): {'; '.join(self.wrong)} (exit code {self.code}, {self.err.strip()[-300:]!r})"
        )


def run_ranks(words: list, cwd: Path, environments: list[dict[str, str]]) -> subprocess.CompletedProcess:
    """A process for each of these environments, as a launcher starts them; what all of them say."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(len(environments))}
    begun = []
    try:
        for rank, variables in enumerate(environments):
            own = variables | meeting | {"RANK": str(rank), "LOCAL_RANK": "0"}
            begun.append(subprocess.Popen(words, cwd=cwd, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        said = [process.communicate(timeout=120) for process in begun]
    finally:
        for process in begun:
            process.kill()
    codes = {process.returncode for process in begun}
    code = codes.pop() if len(codes) == 1 else None
    return subprocess.CompletedProcess(words, code, "".join(out for out, _ in said), "".join(err for _, err in said))


@dataclass
class Laboratory:
    """A folder with the data and a run without failures, all of whose checkpoints are kept."""

    folder: Path
    program: Path
    variables: dict[str, str]  # of its environment
    train: list[str]  # the command line
    failing: dict[str, str] = field(default_factory=dict)  # of runs in which a call may fail
    models: dict[int, bytes] = field(default_factory=dict)
    log: list[list[str]] = field(default_factory=list)
    pictures: dict[str, bytes] = field(default_factory=dict)

    def make(self) -> Laboratory:
        """Runs without failures."""
        (self.folder / "small.bin").write_bytes(data_bytes(make_images(), np.arange(24) % 3, 3))
        words = flags(self.train, "--keep_checkpoints 0")
        subprocess.run([self.program, *words], cwd=self.folder, env=environment() | self.variables, capture_output=True, check=True)
        assert self.run("sample", self.folder).returncode == 0
        self.models = {step: (self.folder / "out" / model_name(step)).read_bytes() for step in (2, 4, 6)}
        self.log = whole_rows(self.folder / "out")
        self.pictures = {p.name: p.read_bytes() for p in [self.folder / "x.png", *(self.folder / "out").glob("*.png")]}
        return self

    @property
    def grid(self) -> bytes:
        """A picture that --output may replace: the program's own."""
        return next(content for name, content in sorted(self.pictures.items()) if name.startswith("samples_"))

    def run(self, scenario: str, cwd: Path, **failure: object) -> subprocess.CompletedProcess:
        sample = flags("--init", self.folder / "out" / model_name(6), "--sample 4 --output x.png --batch_size 4")
        words = sample if scenario == "sample" else [*self.train, "--resume_checkpoint", "auto"]
        failing = self.failing | {name: str(value) for name, value in failure.items()} if failure else {}
        variables = environment() | self.variables
        if scenario in RANKS:
            done = run_ranks([self.program, *words], cwd, [variables | (failing if scenario == rank else {}) for rank in RANKS])
        else:
            done = subprocess.run([self.program, *words], cwd=cwd, env=variables | failing, capture_output=True, text=True, timeout=120)
        done.stderr = FAKE_GPU_SAYS.sub("", done.stderr)
        return done

    def prepare(self, scenario: str, cwd: Path) -> None:
        """resume: what a run has left that was killed as it saved its fourth step, with a half row of the fifth."""
        cwd.mkdir()
        shutil.copy(self.folder / "small.bin", cwd)
        (cwd / "x.png").write_bytes(self.grid)
        if scenario != "resume":
            return
        (cwd / "out").mkdir()
        shutil.copy(self.folder / "out" / model_name(2), cwd / "out")
        rows = (self.folder / "out/log.csv").read_text().splitlines(keepends=True)
        (cwd / "out/log.csv").write_text("".join(rows[:5]) + rows[5][:20])
        (cwd / "out" / f"{model_name(4)}.tmp12345").write_text("half")

    def count(self, scenario: str, call: str) -> int:
        """How many such calls a run makes."""
        cwd = self.folder / f"count {scenario} {call}"
        self.prepare(scenario, cwd)
        done = self.run(scenario, cwd, FAIL_CALL=call, FAIL_REPORT="report")
        assert done.returncode == 0, done.stderr
        self.check_end(scenario, cwd, wrong := [])
        assert not wrong
        counted = int((cwd / "report").read_text().split()[1])
        shutil.rmtree(cwd)
        return counted

    def check_end(self, scenario: str, cwd: Path, wrong: list[str]) -> None:
        """What a run that came to its end has written."""
        if scenario == "sample":
            return
        if not (checkpoints(cwd / "out") and (cwd / "out" / model_name(6)).read_bytes() == self.models[6]):
            wrong.append("the last checkpoint is another one")
        if not same_rows(whole_rows(cwd / "out"), self.log):
            wrong.append("the log is another one")

    def check_kept(self, failure: Failure, cwd: Path) -> None:
        """Nothing is lost, whatever happened."""
        out, wrong = cwd / "out", failure.wrong
        if failure.scenario == "sample":
            if (cwd / "x.png").read_bytes() not in ((self.grid,) if failure.code else (self.pictures["x.png"],)):
                wrong.append("x.png is damaged")
            return
        saved = checkpoints(out)
        if failure.scenario == "resume" and not saved:
            wrong.append("the checkpoint is gone")
        for step in saved:  # a run whose data can't be read saves where it is, too
            right = self.models.get(step)
            same = (out / model_name(step)).read_bytes() == right if right else read_checkpoint(out / model_name(step)).step == step
            if not same:
                wrong.append(f"the checkpoint of step {step} is another one")
        if saved and not same_rows(whole_rows(out)[: saved[-1]], self.log[: saved[-1]]):
            wrong.append("rows of the log are lost")
        left = sorted(p.name for p in cwd.rglob("*.tmp*") if "tmp12345" not in p.name)
        if left and failure.call not in ("unlink", "malloc"):  # without memory a run ends at once, as if it were killed
            wrong.append(f"left over: {left}")

    def check_said(self, failure: Failure, cwd: Path) -> None:
        """One sentence, or what could not be done."""
        err, wrong = failure.err, failure.wrong
        if failure.code == 1:
            if not err.startswith("train_unet: ") or err.count("\n") != 1 or not err.endswith("\n"):
                wrong.append("not one sentence")
        elif failure.code == 0:
            if err:
                wrong.append("something on stderr of a run that did not fail")
            expected = {name: self.pictures[name] for name in PICTURES[failure.scenario]}
            for name, content in expected.items():
                path = cwd / "out" / name
                if not (path.exists() and path.read_bytes() == content) and name not in failure.out:
                    wrong.append(f"{name} is missing, and nothing says so")
            if expected:
                page = cwd / "out/index.html"
                if not (page.exists() and re.search(r'\bstate"?: ?"done"', page.read_text())) and "index.html" not in failure.out:
                    wrong.append("the page is missing or old, and nothing says so")
            self.check_end(failure.scenario, cwd, wrong)
        elif not wrong:
            wrong.append("a crash")

    def try_it(self, failure: Failure) -> Failure:
        cwd = self.folder / f"{failure.scenario} {failure.call} {failure.at} {failure.many}"
        self.prepare(failure.scenario, cwd)
        try:
            how = dict(FAIL_CALL=failure.call, FAIL_AT=failure.at, FAIL_FOR=failure.many, FAIL_FAST=10000)
            done = self.run(failure.scenario, cwd, **how, FAIL_REPORT="report")
            failure.code, failure.out, failure.err = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired:
            failure.wrong.append("it hangs")
        failure.report = (cwd / "report").read_text() if (cwd / "report").exists() else ""
        self.check_kept(failure, cwd)
        self.check_said(failure, cwd)
        again = self.run(failure.scenario, cwd)
        if again.returncode or again.stderr:
            failure.wrong.append(f"the next start ends with {again.stderr.strip()}")
        else:
            self.check_end(failure.scenario, cwd, failure.wrong)
        if not failure.wrong:
            shutil.rmtree(cwd)
        return failure


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    folder = tmp_path_factory.mktemp("failures")
    library, source = folder / "failing_calls.so", ROOT / "dev/test/failing_calls.cpp"
    subprocess.run(["c++", "-std=c++20", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    if subprocess.run(["true"], env=os.environ | {"LD_PRELOAD": str(library), "FAIL_CALL": "open"}).returncode == 77:
        pytest.skip("this system does not let a process catch its own calls")
    return Laboratory(folder, binary_path("cpu"), {}, RUN, {"LD_PRELOAD": str(library)}).make()


def make_gpu_laboratory(folder: Path, idle: str) -> Laboratory:
    """Of the GPU build, on an H200 made of software. idle: kernels that are left out."""
    if not EMULATED.is_file():
        pytest.skip("needs make -C dev BUILD=emulated, and nvcc for that")
    describe(folder, "H200")
    variables = {"FAKE_GPU": str(folder / "gpu.txt"), "FAKE_IDLE": idle, "TMPDIR": str(folder)}
    return Laboratory(folder, EMULATED, variables, flags(RUN, "--microbatch 2")).make()


@pytest.fixture(scope="module")
def gpu_laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return make_gpu_laboratory(tmp_path_factory.mktemp("gpu"), IDLE)


@pytest.fixture(scope="module")
def rank_laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return make_gpu_laboratory(tmp_path_factory.mktemp("ranks"), IDLE_FORWARD)


def whole_rows(folder: Path) -> list[list[str]]:
    """The rows of a log whose last one may lack its end, up to val_loss, without the times and the copies, which an image that can't be read may prevent."""
    names, *rows = [row.split(",") for row in (folder / "log.csv").read_text().split("\n")[:-1]]
    kept = [at for at, name in enumerate(names) if name not in ("ms", "seconds", "copies")]
    assert names[kept[-1]] == "val_loss"
    return [[row[at] for at in kept] for row in rows]


def same_rows(rows: list[list[str]], right: list[list[str]]) -> bool:
    """A row may lack its validation loss: an image of it could not be read."""
    return len(rows) == len(right) and all(a[:-1] == b[:-1] and a[-1] in ("", b[-1]) for a, b in zip(rows, right, strict=True))


def spaced(count: int, tries: int) -> list[int]:
    """Which calls fail: all, or some from the first to the last; if only one, the middle one."""
    tries = count if ALL else min(count, tries)
    if tries == 1:
        return [(count + 1) // 2]
    return sorted({1 + round(k * (count - 1) / max(tries - 1, 1)) for k in range(tries)})


def try_all(laboratory: Laboratory, scenario: str, call: str, tries: int) -> list[Failure]:
    """Each call fails once, and for ever; or `tries` of them do once, and the middle one for ever. What was tried."""
    count = laboratory.count(scenario, call)
    calls = spaced(count, tries)
    ways = [(at, 1) for at in calls] + [(at, FOREVER) for at in (calls if ALL else calls[len(calls) // 2 : len(calls) // 2 + 1])]
    failures = [Failure(scenario, call, at, many) for at, many in ways]
    with ThreadPoolExecutor(2 if ALL else 1) as pool:
        tried = list(pool.map(laboratory.try_it, failures))
    bad = [str(failure) for failure in tried if failure.wrong]
    print(f"{scenario}, {call}: {count} calls, {len(tried)} failures tried, {sum(f.code == 0 for f in tried)} runs went on")
    assert not bad, f"{len(bad)} of {len(tried)}:\n" + "\n".join(bad)
    return tried


@pytest.mark.parametrize("scenario", [pytest.param("start", marks=pytest.mark.long), "resume", pytest.param("sample", marks=pytest.mark.long)])
@pytest.mark.parametrize("call", CALLS)
def test_each_call_fails(laboratory: Laboratory, scenario: str, call: str) -> None:
    try_all(laboratory, scenario, call, TRIES)


# What is said instead of a name of CUDA's or NCCL's.
SAID = {
    "cudaMalloc": "GPU memory could not be had",
    "cudaGetDeviceCount": "there is no GPU that it can use",
    "cudaFuncGetAttributes": "no code for GPU 0",
    "cudaHostAlloc": "cudaMallocHost",
    "cudaLaunchKernelExC": "cudaLaunchKernelEx",
    "cudaGetDriverEntryPointByVersion": "cuTensorMapEncodeTiled",
}


def check_sentences(failures: list[Failure]) -> None:
    """Each run has ended and said what failed; or, if all calls do, what it asked next."""
    for failure in failures:
        call = SAID.get(failure.call, "NCCL" if failure.call.startswith("nccl") else failure.call)
        says = call if failure.many == 1 else f"{call}|CUDA|GPU"
        assert failure.code == 1 and re.search(says, failure.err), f"{failure}: the sentence does not say what failed"


@pytest.mark.long
@pytest.mark.parametrize("scenario", SCENARIOS if ALL else ["resume", "sample"])
@pytest.mark.parametrize("call", CUDA_CALLS)
def test_each_call_of_cuda_fails(gpu_laboratory: Laboratory, scenario: str, call: str) -> None:
    """Once, or it and every other call behind it, as after a kernel that crashed."""
    check_sentences(try_all(gpu_laboratory, scenario, call, 1))


@pytest.mark.long
@pytest.mark.skipif(not HAS_NCCL, reason="needs make -C dev BUILD=emulated, nvcc and nccl.h")
@pytest.mark.parametrize(("call", "scenario"), [(call, rank) for k, call in enumerate(NCCL_CALLS) for rank in (RANKS if ALL else [RANKS[k % 2]])])
def test_each_call_of_nccl_fails(rank_laboratory: Laboratory, call: str, scenario: str) -> None:
    """At one of two ranks, which otherwise write what one process writes."""
    check_sentences(try_all(rank_laboratory, scenario, call, 1))


@pytest.mark.long
def test_a_call_of_cuda_fails_beside_all_kernels(tmp_path: Path) -> None:
    """No kernel is left out: what the next start goes on with are a network's weights."""
    laboratory = make_gpu_laboratory(tmp_path, "")
    assert float(laboratory.log[3][3]) > 0  # the gradient's norm
    check_sentences([laboratory.try_it(Failure("start", "cudaGraphLaunch", 9, FOREVER))])
