"""Faults: two processes in one folder, closed streams, full disks, kills at random moments, runs that break their weights.

TRAIN_UNET_FAULT_SECONDS=600 makes the random kills and full disks take so long (ten seconds by default).
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import random
import resource
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    TINY,
    TINY_MODEL,
    UNET_CU_DATA_MAGIC,
    binary_path,
    called,
    checkpoints,
    column,
    data_bytes,
    environment,
    flags,
    make_images,
    model_name,
    read_checkpoint,
    read_log,
    read_samples,
    seal_model,
    with_slot,
)  # fmt: skip
from PIL import Image

import generate
import prepare_data
import train_unet as twin

sys.path.insert(0, str(ROOT / "dev/benchmarks"))
import quality

torch.set_num_threads(1)

SECONDS = float(os.environ.get("TRAIN_UNET_FAULT_SECONDS", 10))
TWIN = [sys.executable, str(ROOT / "train_unet.py"), "--device", "cpu"]  # whose steps are exact
LONG = flags(TINY, "--max_steps 100000 --log_interval 1 --save_interval 1000000")


@pytest.fixture
def program() -> list[str]:
    return [str(binary_path("cpu"))]


@pytest.fixture(params=["program", pytest.param("twin", marks=pytest.mark.long)])  # which starts in seconds, for PyTorch
def either(request: pytest.FixtureRequest, program: list[str]) -> list[str]:
    """The command of either program, for what both do."""
    return program if request.param == "program" else TWIN


STARTED: list[subprocess.Popen] = []


def start(command: list, cwd: Path, **how: object) -> subprocess.Popen:
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | how
    STARTED.append(subprocess.Popen(list(map(str, command)), cwd=cwd, env=environment(), text=True, **how))
    return STARTED[-1]


@pytest.fixture(autouse=True)
def end_what_was_started() -> Iterator[None]:
    """Or a test that fails would leave a run behind that goes on for hours."""
    yield
    while STARTED:
        STARTED.pop().kill()


def wait_for(process: subprocess.Popen, begin: str) -> None:
    """Until a line begins so."""
    for line in process.stdout:
        if line.startswith(begin):
            return
    pytest.fail(f"no line begins with {begin!r}: {process.stderr.read()}")


# The Python programs, and what each of them does when it is started.
PYTHON_PROGRAMS = {
    str(ROOT / "train_unet.py"): lambda: twin.run_program("train_unet", twin.run),
    str(ROOT / "generate.py"): lambda: generate.run_program("generate", generate.run),
    str(ROOT / "prepare_data.py"): prepare_data.main,
    str(ROOT / "dev/benchmarks/quality.py"): lambda: quality.run_program("quality", quality.run),
}


def call(command: list, cwd: Path, code: int = 0, **how: object) -> subprocess.CompletedProcess:
    """Runs a program to its end; one in Python, where nothing speaks against it, in this process, which has loaded PyTorch already."""
    if command[0] == sys.executable and not how:
        with contextlib.chdir(cwd):
            p = called(PYTHON_PROGRAMS[str(command[1])], *command[1:])
    else:
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | how
        p = subprocess.run(list(map(str, command)), cwd=cwd, env=environment(), text=True, timeout=120, **how)
    assert p.returncode == code, f"exit code {p.returncode} of {command}\n{(p.stdout or '')[-2000:]}\n{p.stderr}"
    return p


def resume(checkpoint: str, folder: str = "out") -> str:
    """The command that a sentence names."""
    return f"./train_unet --resume_checkpoint out/{checkpoint} --output_dir {folder}"


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*tmp*"))


# ----------------------------------------------------------------------------------------------------------------------
# two processes


def test_one_process_at_a_time(program: list[str], data: Path, tmp_path: Path) -> None:
    """Another one is refused, in one sentence that says who holds the folder; a kill leaves it free."""
    process = start([*program, *LONG, "--data_file", data], tmp_path)
    wait_for(process, "step 3/")
    for more in (["--data_file", data], ["--resume_checkpoint", "latest"]):
        err = call([*program, *TINY, *more], tmp_path, code=1).stderr
        assert err.startswith("train_unet: out: ") and err.count("\n") == 1 and f"process {process.pid} on {os.uname().nodename}" in err, err
    call([*program, *TINY, "--data_file", data, "--max_steps", 1, "--output_dir", "elsewhere"], tmp_path)
    process.kill()
    process.communicate(timeout=120)
    shutil.rmtree(tmp_path / "elsewhere")
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    for step in checkpoints(tmp_path / "elsewhere"):
        (tmp_path / "elsewhere" / model_name(step)).unlink()
    (tmp_path / "elsewhere/log.csv").unlink()  # .lock stays
    call([binary_path("cpu"), *TINY, "--data_file", data, "--max_steps", 1, "--output_dir", "elsewhere"], tmp_path)
    assert checkpoints(tmp_path / "elsewhere") == [1]


def test_two_that_start_at_once(data: Path, tmp_path: Path) -> None:
    """One trains, the others end with a sentence; nobody writes into the one's log."""
    command = [binary_path("cpu"), *TINY, "--data_file", data, "--max_steps", 60]
    many = [start(command, tmp_path) for _ in range(4)]
    errors = [p.communicate(timeout=120)[1] for p in many]
    assert sorted(p.returncode for p in many) == [0, 1, 1, 1], errors
    assert all(e.count("\n") == 1 and "out: " in e for e in errors if e)
    assert [row["step"] for row in read_log(tmp_path / "out")] == [str(step) for step in range(1, 61)]


# ----------------------------------------------------------------------------------------------------------------------
# runs that break their weights


def test_a_broken_checkpoint_replaces_no_good_one(program: list[str], data: Path, tmp_path: Path) -> None:
    """Weights that explode: the checkpoint from which no step is good replaces none, and the message names both."""
    given = flags(TINY, "--data_file", data, "--lr 100 --weight_decay 10 --save_interval 1 --keep_checkpoints 1 --max_steps 60 --max_bad_steps 3")
    err = call([*program, *given], tmp_path, code=1).stderr
    saved = checkpoints(tmp_path / "out")
    assert len(saved) == 2 and err.count("\n") == 1, err
    assert f"no step was good from out/{model_name(saved[1])}, so move it away and go on with {resume(model_name(saved[0]))}" in err
    (tmp_path / "out" / model_name(saved[1])).unlink()
    resumed = call([*program, "--resume_checkpoint", "latest", "--max_bad_steps", 1, "--max_steps", saved[0] + 1, "--sample_interval", 0], tmp_path)
    assert f"step {saved[0]} of" in resumed.stdout
    assert np.isfinite(column(tmp_path / "out", "loss")[-1])


def test_older_checkpoints_go_when_a_step_from_the_new_one_was_good(program: list[str], tmp_path: Path) -> None:
    """The fifth step meets an image that is NaN: until a good step comes, the checkpoint before the newest stays."""
    seed = next(s for s in range(99) if np.flatnonzero(twin.data_order(s, 0, 9, 6) == 3).tolist() == [4])
    images = (make_images(6).astype(np.float32) / 127.5 - 1).astype("<f4")
    images[3] = math.nan
    (tmp_path / "d.bin").write_bytes(data_bytes(images))
    given = ["--batch_size 1 --save_interval 1 --keep_checkpoints 1 --max_bad_steps 1 --max_steps 7 --data_file d.bin --seed", seed]
    err = call([*program, *flags(TINY, *given)], tmp_path, code=1).stderr
    assert f"no step was good from out/{model_name(4)}" in err and f"go on with {resume(model_name(3))}" in err
    assert checkpoints(tmp_path / "out") == [3, 4]
    again = "--resume_checkpoint latest --save_interval 1 --keep_checkpoints 1 --sample_interval 0"
    call([*program, *flags(again)], tmp_path)
    assert checkpoints(tmp_path / "out") == [7]


@pytest.mark.parametrize("array", range(4))
def test_arrays_that_are_not_finite_are_refused(either: list[str], data: Path, tmp_path: Path, array: int) -> None:
    """Weights, average and moments, in a file whose checksum is right."""
    call([binary_path("cpu"), *TINY, "--data_file", data, "--max_steps", 2], tmp_path)
    path = tmp_path / "out" / model_name(2)
    good = path.read_bytes()
    count = int(np.frombuffer(good[16:24], "<i8")[0])
    for value in (math.nan, -math.inf):
        path.write_bytes(broken := seal_model(with_slot(good, 256 + array * count + 777, value, "<f4")))
        err = call([*either, "--resume_checkpoint", f"out/{model_name(2)}", "--max_steps", 4], tmp_path, code=1).stderr
        assert err.count("\n") == 1 and model_name(2) in err and "not finite" in err
    assert path.read_bytes() == broken and checkpoints(tmp_path / "out") == [2] and len(read_log(tmp_path / "out")) == 2


# ----------------------------------------------------------------------------------------------------------------------
# streams and signals


CLOSE_OUTPUT = dict(preexec_fn=lambda: os.close(1), stdout=None)
CLOSE_ALL = dict(preexec_fn=lambda: [os.close(fd) for fd in (0, 1, 2)], stdout=None, stderr=None)


def test_closed_streams(either: list[str], data: Path, tmp_path: Path) -> None:
    """`>&-`: what is printed lands nowhere, least of all in the log."""
    call([*either, *TINY, "--data_file", data, "--max_steps", 3, "--log_interval", 1], tmp_path, **CLOSE_OUTPUT)
    rows = (tmp_path / "out/log.csv").read_text().splitlines()
    assert len(rows) == 4 and all(row.count(",") == 11 for row in rows)
    call([*either, "--sample", 1, "--init", f"out/{model_name(3)}"], tmp_path, **CLOSE_ALL)
    assert (tmp_path / "samples.png").exists()


@pytest.mark.long  # Python programs of their own, each of which loads PyTorch for seconds
def test_closed_streams_of_the_other_programs(data: Path, tmp_path: Path) -> None:
    call([binary_path("cpu"), *TINY, "--data_file", data, "--max_steps", 1], tmp_path)
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "pictures/a.png")
    make = [sys.executable, ROOT / "generate.py", "--model_filename", f"out/{model_name(1)}", "--num_samples", 1, "--steps", 2, "--output", "x.png"]
    call(make, tmp_path, **CLOSE_ALL)
    prepare = [sys.executable, ROOT / "prepare_data.py", "--data_dir", "pictures", "--image_size", 8, "--output_name", "x.bin"]
    call(prepare, tmp_path, **CLOSE_OUTPUT)
    call(prepare, tmp_path, **CLOSE_ALL)
    assert (tmp_path / "x.png").exists() and (tmp_path / "x.bin").exists()


@pytest.mark.parametrize("name", ["train_unet.py", "generate.py", "prepare_data.py", "dev/benchmarks/quality.py"])
def test_help_that_nobody_reads_to_its_end(tmp_path: Path, name: str) -> None:
    """`--help | head -1`: no sentence about a pipe, which is no mistake of the user's."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, ROOT / name, "--help"], cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.stderr == "" and done.returncode in (0, 128 + signal.SIGPIPE)  # argparse takes no notice


@pytest.mark.long  # as are the twin's cases of what both programs do
def test_the_twin_saves_when_nobody_reads(data: Path, tmp_path: Path) -> None:
    process = start([*TWIN, *LONG, "--data_file", data], tmp_path)
    wait_for(process, "step 2/")
    process.stdout.close()
    assert process.wait(timeout=60) == 128 + signal.SIGPIPE and process.stderr.read() == "" and checkpoints(tmp_path / "out")


@pytest.mark.parametrize("reader", ["terminal", "pipe"])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_signal_while_nobody_reads(program: list[str], data: Path, tmp_path: Path, reader: str, goes_on: bool) -> None:
    """A terminal held by Ctrl-S, a pipe whose reader is busy: the run waits, and a signal makes it save. Then it waits to say so, if need be until
    another signal comes."""
    output, stdout = os.openpty() if reader == "terminal" else os.pipe()
    if reader == "pipe":
        fcntl.fcntl(stdout, fcntl.F_SETPIPE_SZ, 16384)  # which is full sooner
    process = start([*program, *LONG, "--data_file", data], tmp_path, stdout=stdout)
    while True:  # until it has written nothing for half a second
        full = sum(not select.select([], [stdout], [], 0)[1] for _ in range(10) if not time.sleep(0.05))
        assert process.poll() is None
        if full == 10:
            break
    process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + 60
    while not checkpoints(tmp_path / "out"):
        assert process.poll() is None and time.monotonic() < deadline, "the signal has no effect"
        time.sleep(0.05)
    if not goes_on:
        process.send_signal(signal.SIGTERM)
    assert goes_on or process.wait(timeout=60) == 128 + signal.SIGTERM
    os.close(stdout)
    told = b""
    with contextlib.suppress(OSError):  # of a terminal that nobody writes to any more
        while some := os.read(output, 65536):
            told += some
    os.close(output)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM and process.stderr.read() == ""
    assert (b"stopped by SIGTERM after step" in told) == goes_on


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_a_signal_stops_is_no_success(either: list[str], data: Path, tmp_path: Path, how: signal.Signals) -> None:
    """`train && next` must not go on with a model that is half trained: the exit code is a shell's for the signal. And no grid is drawn first, which
    may take long, here hours."""
    given = flags("--sample_interval 1000000 --num_samples 4096 --timestep_respacing 1000 --data_file", data)
    process = start([*either, *flags(LONG, given)], tmp_path)
    wait_for(process, "step 2/")
    process.send_signal(how)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + how and err == "" and f"stopped by {how.name} after step" in out, out + err
    [step] = checkpoints(tmp_path / "out")
    assert len(read_log(tmp_path / "out")) == step and not list((tmp_path / "out").glob("samples*"))


# The package that takes longest to import, and a command line that can work: what can't ends a program before.
IMPORTS = {
    "train_unet.py": "torch",
    "generate.py": "torch",
    "prepare_data.py --data_dir x --output_name y.bin": "numpy",
    "dev/benchmarks/quality.py --split x": "torch",
}


@pytest.mark.parametrize("line", IMPORTS)
def test_ctrl_c_while_importing(tmp_path: Path, line: str) -> None:
    """The package that takes longest to import is one that takes for ever: Ctrl-C ends the program with a line."""
    name, *words = line.split()
    (tmp_path / f"{IMPORTS[line]}.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        process = start([sys.executable, ROOT / name, *words], tmp_path)
    wait_for(process, "importing")
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=120)[1]
    assert process.returncode == 130 and err == f"{Path(name).stem}: interrupted\n"


@pytest.mark.long  # as are the twin's cases of what both programs do
def test_ctrl_c_while_sampling(data: Path, tmp_path: Path) -> None:
    call([binary_path("cpu"), *TINY, "--data_file", data, "--max_steps", 1], tmp_path)
    given = flags("--sample 100000 --timestep_respacing 1000 --sampler ddpm --init", f"out/{model_name(1)}")
    process = start([*TWIN, *given], tmp_path)
    wait_for(process, "flags: ")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=120)[1]
    assert process.returncode == 130 and err == "train_unet: interrupted\n"


# ----------------------------------------------------------------------------------------------------------------------
# what is written where


def refuse(command: list, cwd: Path, *words: str) -> str:
    """Ends with exit code 1 and a sentence with these words, soon, and neither makes nor changes a file."""
    before = {path: (path.lstat().st_mtime_ns, path.lstat().st_ino) for path in cwd.rglob("*")}
    err = call(command, cwd, code=1).stderr
    assert err.count("\n") == 1 and all(word in err for word in words), err
    assert {path: (path.lstat().st_mtime_ns, path.lstat().st_ino) for path in cwd.rglob("*")} == before
    return err


def test_samples_replace_nothing_of_worth(either: list[str], data: Path, tmp_path: Path) -> None:
    """What is read, by whatever name, a checkpoint, and data: refused before anything is drawn (100,000 images would take hours)."""
    call([binary_path("cpu"), *TINY, "--data_file", data, "--max_steps", 2, "--save_interval", 1], tmp_path)
    shutil.copy(data, tmp_path / "d.bin")
    shutil.copy(tmp_path / "out" / model_name(1), tmp_path / "f.bin")
    os.link(tmp_path / "f.bin", tmp_path / "second.bin")
    (tmp_path / "link.bin").symlink_to("f.bin")
    (tmp_path / "folder").symlink_to(".")
    given = [*either, "--sample", 100000, "--timestep_respacing", 250, "--init", "f.bin", "--output"]
    for name in "f.bin", "second.bin", "link.bin", "folder/f.bin", str(tmp_path / "f.bin"):
        refuse([*given, name], tmp_path, f"--output {name}: would replace f.bin, which is read")
    shutil.copy(tmp_path / "out" / model_name(2), tmp_path / "another.bin")
    numbers = bytearray(data_bytes(make_images().astype(np.float32)))
    numbers[40:44] = (2).to_bytes(4, "little")  # slot 10: each image has two numbers
    (tmp_path / "numbers.bin").write_bytes(numbers)
    large = bytearray(data_bytes(make_images().astype(np.float32)))
    large[4:8] = (2).to_bytes(4, "little")  # the version of data above 4 GiB, such as latents; samples are never of that version
    (tmp_path / "large.bin").write_bytes(large)
    theirs = np.zeros(1024, "<i4")
    theirs[0] = UNET_CU_DATA_MAGIC
    (tmp_path / "theirs.bin").write_bytes(theirs.tobytes())
    for name in "d.bin", "another.bin", "numbers.bin", "large.bin", "theirs.bin":
        refuse([*given, name], tmp_path, f"--output {name}")
    refuse([*given, "x.bin", "--start_from", "x.bin"], tmp_path)  # which is not there
    call([*either, *flags("--sample 2 --timestep_respacing 2 --init f.bin --output x.bin")], tmp_path)
    refuse([*given, "x.bin", "--start_from", "x.bin"], tmp_path, "would replace x.bin, which is read")
    call([*either, *flags("--sample 3 --timestep_respacing 2 --init f.bin --output x.bin")], tmp_path)  # older samples


NAME_OF_RUN = "is a name for files of the run in that folder; choose another one"


@pytest.mark.parametrize("left", ["log.csv", model_name(2)])
def test_samples_take_no_name_of_a_run(either: list[str], data: Path, tmp_path: Path, left: str) -> None:
    """Such a file may be there, or may come with the run's next steps; a run's page would show its pictures, and `latest` find its checkpoints."""
    call([binary_path("cpu"), *flags(TINY, "--data_file", data, "--max_steps 2 --sample_interval 1")], tmp_path)
    shutil.copy(tmp_path / "out" / model_name(2), tmp_path / "f.bin")
    given = [*either, *flags("--sample 1 --timestep_respacing 1 --init", tmp_path / "f.bin"), "--output"]
    for path in (tmp_path / "out").iterdir():
        if path.name not in (left, "samples_0000002.png"):
            path.unlink()
    (tmp_path / "link").symlink_to("out")
    names = [f"samples_{2:07d}.png", f"samples_{3:07d}.png", f"samples_{10**7}.png", model_name(2), model_name(9), f"ema_{9:07d}.bin", "best.bin"]
    for name in [*(f"out/{name}" for name in names), f"link/{model_name(9)}", "./link/../out/best.bin", str(tmp_path / "out/best.bin")]:
        refuse([*given, name], tmp_path, f"--output {name}: {NAME_OF_RUN}")
    refuse([*given, model_name(9)], tmp_path / "out", f"--output {model_name(9)}: {NAME_OF_RUN}")
    # names that no run gives, and then, where no run is, those that one does
    for name in "out/samples.png", "out/samples_3.png", "out/model_9.bin", "out/best.png", "best.bin", model_name(9):
        call([*given, name], tmp_path)


def test_other_programs_take_no_name_of_a_run(data: Path, tmp_path: Path) -> None:
    """Whatever they write, and whether such a file is there yet or not."""
    call([binary_path("cpu"), *TINY, "--data_file", data, "--max_steps", 1], tmp_path)
    model = f"out/{model_name(1)}"
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "pictures/a.png")
    names = [model_name(1), model_name(9), f"ema_{9:07d}.bin", "best.bin"]
    new_weights = [*flags(TINY_MODEL, "--data_file", data, "--init_model_only True"), "--init_model_filename"]
    generate = [sys.executable, ROOT / "generate.py", "--model_filename", model, *flags("--num_samples 1 --steps 1"), "--output"]
    prepare = [sys.executable, ROOT / "prepare_data.py", *flags("--data_dir pictures --image_size 8"), "--output_name"]
    for flag, command, taken in (
        ("--convert", [*TWIN, "--convert", model], names),
        ("--init_model_filename", [*TWIN, *new_weights], names),
        ("--output", generate, [f"samples_{9:07d}.png", *names]),
        ("--output_name", prepare, ["index.html", "log.csv", "loss.png", ".lock", *names]),
        ("--cond_output_name", [*prepare, "d.bin", "--cond_dir", "pictures", "--cond_output_name"], names),
    ):
        for name in taken:
            refuse([*command, f"out/{name}"], tmp_path, f"{flag} out/{name}: {NAME_OF_RUN}")
    call([*prepare, "out/mine.bin"], tmp_path)


def test_an_output_that_can_not_be_written_is_refused_before_work(either: list[str], data: Path, tmp_path: Path) -> None:
    call([binary_path("cpu"), *TINY, "--data_file", data, "--max_steps", 1], tmp_path)
    (tmp_path / "x.png").mkdir()
    (tmp_path / "file").write_text("mine")
    given = [*either, "--sample", 100000, "--timestep_respacing", 250, "--init", f"out/{model_name(1)}", "--output"]
    refuse([*given, "nowhere/x.png"], tmp_path, "--output nowhere/x.png: its folder can't be opened (No such file or directory)")
    refuse([*given, "file/x.png"], tmp_path, "its folder can't be opened (Not a directory)")
    refuse([*given, "x.png"], tmp_path, "--output x.png: is a folder")
    refuse(
        [*either, *TINY, "--data_file", data, "--output_dir", "file/out"], tmp_path, "--output_dir file/out: can't be written to (Not a directory)"
    )


@pytest.mark.skipif(not shutil.which("setpriv"), reason="needs setpriv, of util-linux")
def test_a_folder_without_permission_is_called_that(either: list[str], data: Path, tmp_path: Path) -> None:
    call([binary_path("cpu"), *TINY, "--data_file", data, "--max_steps", 1], tmp_path)
    (tmp_path / "closed").mkdir(mode=0o555)
    user = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    model = ["--init", f"out/{model_name(1)}"]
    refuse([*user, *either, *flags("--sample 100000", model, "--output closed/x.png")], tmp_path, "closed/x.png", "(Permission denied)")
    refuse([*user, *either, *flags(TINY, "--data_file", data, "--output_dir closed/out")], tmp_path, "closed/out", "(Permission denied)")


def test_other_programs_replace_nothing_of_worth(data: Path, tmp_path: Path) -> None:
    call([binary_path("cpu"), *TINY, "--data_file", data, "--max_steps", 2, "--ema_snapshots", 1], tmp_path)
    model, snapshot = f"out/{model_name(2)}", "out/ema_0000002.bin"
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "pictures/a.png")
    shutil.copy(data, tmp_path / "d.bin")
    python = [sys.executable]
    refuse([*TWIN, "--convert", model, model], tmp_path, f"--convert {model}: {NAME_OF_RUN}")
    shutil.copy(tmp_path / model, tmp_path / "m.bin")
    refuse([*TWIN, "--convert", "m.bin", "./m.bin"], tmp_path, "--convert ./m.bin: would replace m.bin, which is read")
    refuse([*TWIN, "--convert", snapshot, model], tmp_path, f"--convert {model}: {NAME_OF_RUN}")
    refuse([*TWIN, "--ema_sigma_rel", 0.1, "--convert", snapshot, "out/ema_0000001.bin"], tmp_path, f"out/ema_0000001.bin: {NAME_OF_RUN}")
    refuse([*TWIN, "--convert", model, "out/"], tmp_path, "--convert out/: would replace")
    refuse([*TWIN, "--convert", "out/../" + model, "out/"], tmp_path, "--convert out/: would replace")
    refuse([*TWIN, *flags("--init_model_only True --init_model_filename d.bin --data_file d.bin")], tmp_path, "would replace d.bin, which is read")
    make = [*python, ROOT / "generate.py", "--model_filename", model, "--num_samples", 100000]
    refuse([*make, "--image", "pictures/a.png", "--output", "pictures/a.png"], tmp_path, "would replace pictures/a.png, which is read")
    refuse([*make, "--output", "nowhere/x.png"], tmp_path, "its folder can't be opened (No such file or directory)")
    prepare = [*python, ROOT / "prepare_data.py", "--data_dir", "pictures", "--image_size", 8, "--output_name"]
    refuse([*prepare, "pictures/a.png"], tmp_path, "--output_name pictures/a.png: would replace pictures/a.png, which is read")
    refuse([*prepare, "m.bin"], tmp_path, "--output_name m.bin")
    judge = [*python, ROOT / "dev/benchmarks/quality.py", "--data_file", ROOT / "data/fashion32.bin", "--samples", "d.bin", "--plot"]
    refuse([*judge, "d.bin"], tmp_path, "--plot d.bin: would replace d.bin, which is read")
    call([*TWIN, "--convert", model, "weights.pt"], tmp_path)
    call([*TWIN, "--convert", model, "weights.pt"], tmp_path)  # again
    call([*TWIN, "--convert", model, "bare/", "--use_ema", "False"], tmp_path)
    refuse([*TWIN, "--convert", "bare/", "m.bin"], tmp_path, "--convert m.bin: is there and holds something else")  # the moments would be lost
    another = "out/ema_0000001.bin"
    for name in ("weights.pt", "m.bin", "notes.txt.bin"):
        (tmp_path / "notes.txt.bin").write_text("mine")
        before = (tmp_path / name).read_bytes()
        refuse([*TWIN, "--convert", another, name], tmp_path, f"--convert {name}: is there and holds something else")
        refuse(
            [*TWIN, "--init_model_only", "True", "--init_model_filename", name],
            tmp_path,
            f"--init_model_filename {name}: is there and holds something",
        )
        assert (tmp_path / name).read_bytes() == before
    for name in ("weights.pt", "notes.txt.bin"):
        refuse([*prepare, name], tmp_path, f"--output_name {name}: is there and is no data file")


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("program", ["program"], indirect=True)
def test_a_folder_that_another_run_takes_the_name_of(program: list[str], data: Path, tmp_path: Path, removed: bool) -> None:
    """The first run goes on in its own folder, or ends with a sentence if that is gone; nothing of it gets into the other's."""
    given = flags(LONG, "--save_interval 5 --keep_checkpoints 0 --data_file", data)
    first = start([*program, *given], tmp_path)
    wait_for(first, "step 6/")
    (tmp_path / "out").rename(tmp_path / "old")
    call([*program, *TINY, "--data_file", data, "--max_steps", 3, "--seed", 5], tmp_path)
    second = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    if removed:
        shutil.rmtree(tmp_path / "old", ignore_errors=True)
        shutil.rmtree(tmp_path / "old", ignore_errors=True)  # of what was written meanwhile
        out, err = first.communicate(timeout=120)
        assert first.returncode == 1 and err.count("\n") == 1 and "(No such file or directory)" in err, err
    else:
        saved = len(checkpoints(tmp_path / "old"))
        while len(checkpoints(tmp_path / "old")) < saved + 2:
            assert first.poll() is None
            first.stdout.readline()
        first.send_signal(signal.SIGTERM)
        out, err = first.communicate(timeout=120)
        assert first.returncode == 128 + signal.SIGTERM and err == ""
        last = checkpoints(tmp_path / "old")[-1]
        assert len(read_log(tmp_path / "old")) == last and read_checkpoint(tmp_path / "old" / model_name(last)).step == last
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == second


def test_a_lock_that_is_none(program: list[str], data: Path, tmp_path: Path) -> None:
    """A link, or another file, in place of .lock: what it holds stays."""
    call([binary_path("cpu"), *TINY, "--data_file", data, "--max_steps", 1], tmp_path)
    lock, mine = tmp_path / "out/.lock", tmp_path / "mine"
    mine.write_text("precious")
    lock.unlink()
    for words in (["--resume_checkpoint", "latest", "--max_steps", 2], [*TINY, "--data_file", data, "--output_dir", "out"]):
        lock.symlink_to(mine)
        refuse([*program, *words], tmp_path, "out/.lock: is a link")
        lock.unlink()
        os.link(mine, lock)
        refuse([*program, *words], tmp_path, "out/.lock: is no run's lock")
        lock.unlink()
    assert mine.read_text() == "precious"
    call([*program, "--resume_checkpoint", "latest", "--max_steps", 2, "--sample_interval", 0], tmp_path)
    assert lock.read_text().startswith("process ")


# ----------------------------------------------------------------------------------------------------------------------
# full disks


@contextlib.contextmanager
def file_limit(size: int) -> Iterator[None]:
    """`ulimit -f`, as a shell sets it: no file may grow beyond so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


# A disk that is full while a file of the name $FULL is there, for whatever goes to a folder out. FAST: how fast the clock goes.
FULL_DISK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

ssize_t write(int fd, const void* data, size_t n) {
    ssize_t (*real)(int, const void*, size_t) = (ssize_t(*)(int, const void*, size_t))dlsym(RTLD_NEXT, "write");
    char link[64], path[4096] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (readlink(link, path, sizeof path - 1) > 0 && strstr(path, "/out/") && !access(getenv("FULL"), F_OK)) return errno = ENOSPC, -1;
    return real(fd, data, n);
}

int clock_gettime(clockid_t which, struct timespec* t) {
    int (*real)(clockid_t, struct timespec*) = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
    const int result = real(which, t);
    const long fast = getenv("FAST") ? atol(getenv("FAST")) : 1;
    const long long ns = (t->tv_sec * 1000000000LL + t->tv_nsec) * fast;
    if (which == CLOCK_MONOTONIC && fast > 1) *t = (struct timespec){ns / 1000000000, ns % 1000000000};
    return result;
}
"""


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The name of the file that fills the disk."""
    (tmp_path / "full.c").write_text(FULL_DISK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "full.so", tmp_path / "full.c", "-ldl"], check=True)
    monkeypatch.setenv("FULL", str(tmp_path / "full"))
    monkeypatch.setenv("LD_PRELOAD", str(tmp_path / "full.so"))
    return tmp_path / "full"


@pytest.mark.parametrize("program", ["program"], indirect=True)
def test_a_disk_that_is_full_for_a_while_ends_no_run(program: list[str], data: Path, tmp_path: Path, full: Path) -> None:
    """The run waits, says so once, and everything is there in the end."""
    given = flags(LONG, "--sample_interval 4 --save_interval 10 --keep_checkpoints 1 --data_file", data)
    process = start([*program, *given], tmp_path)
    wait_for(process, "step 11/")
    full.touch()
    told = process.stdout.readline()
    while told.startswith("step "):
        told = process.stdout.readline()
    assert "No space left on device; it is tried again for 10 minutes" in told, told
    before = checkpoints(tmp_path / "out")
    assert before and read_checkpoint(tmp_path / "out" / model_name(before[-1])).step == before[-1]
    full.unlink()
    wait_for(process, "step ")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM and err == "" and "tried again" not in out, out + err
    last = checkpoints(tmp_path / "out")[-1]
    assert [int(row["step"]) for row in read_log(tmp_path / "out")] == list(range(1, last + 1))
    grids = sorted(int(path.stem[8:]) for path in (tmp_path / "out").glob("samples_*"))
    assert grids == list(range(4, last - last % 4 + 1, 4)) or grids == list(range(4, last, 4)), (grids, last)
    assert not leftovers(tmp_path / "out")


def test_a_stopped_run_keeps_the_checkpoint_before_its_last(program: list[str], data: Path, tmp_path: Path) -> None:
    """No step has shown that the last one is good: that is for the run that goes on to find."""
    process = start([*program, *flags(LONG, "--sample_interval 0 --save_interval 5 --keep_checkpoints 1 --data_file", data)], tmp_path)
    wait_for(process, "step 8/")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    saved = checkpoints(tmp_path / "out")
    assert saved[-1] % 5 == 0 or (len(saved) == 2 and saved[0] == saved[-1] // 5 * 5), saved
    words = flags("--resume_checkpoint latest --sample_interval 0 --keep_checkpoints 1 --max_steps", saved[-1] + 2)
    assert not call([*program, *words], tmp_path).stderr
    assert checkpoints(tmp_path / "out") == [saved[-1] + 2]


@pytest.mark.parametrize("program", ["program"], indirect=True)
def test_a_disk_that_stays_full_ends_the_run(program: list[str], data: Path, tmp_path: Path, full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After ten minutes, which pass here in seconds, or at a signal. The checkpoint before stays."""
    monkeypatch.setenv("FAST", "500")
    given = flags(LONG, "--save_interval 5 --data_file", data)
    process = start([*program, *given], tmp_path)
    wait_for(process, "step 6/")
    full.touch()
    out, err = process.communicate(timeout=120)
    saved = checkpoints(tmp_path / "out")
    assert process.returncode == 1 and err.count("\n") == 1 and "(No space left on device)" in err, err
    assert saved and f"saved is step {saved[-1]}; {resume(model_name(saved[-1]))} goes on" in err
    full.unlink()
    process = start([*program, "--resume_checkpoint", "latest", "--save_interval", 1000000, "--log_interval", 1, "--sample_interval", 0], tmp_path)
    wait_for(process, f"step {saved[-1] + 2}/")
    full.touch()
    wait_for(process, "out/")
    process.send_signal(signal.SIGTERM)
    err = process.communicate(timeout=120)[1]
    assert process.returncode == 1 and err.count("\n") == 1 and f"saved is step {saved[-1]}; " in err, err
    assert checkpoints(tmp_path / "out") == saved


def test_ulimit(either: list[str], data: Path, tmp_path: Path) -> None:
    """`ulimit -f`: a checkpoint that can't be written ends the run with a sentence; no part of a file is left."""
    given = [*TINY, "--data_file", data, "--max_steps", 5, "--save_interval", 2]
    with file_limit(1 << 20):
        err = call([*either, *given], tmp_path, code=1).stderr
    assert err.startswith("train_unet: ") and err.count("\n") == 1 and model_name(2) in err
    assert sorted({f.name for f in (tmp_path / "out").iterdir()} - {"index.html", ".lock"}) == ["log.csv"]


@pytest.mark.long  # as are the twin's cases of what both programs do
def test_a_log_that_can_not_be_written_ends_the_twins_run(data: Path, tmp_path: Path) -> None:
    with file_limit(300):
        err = call([*TWIN, *TINY, "--data_file", data, "--max_steps", 9], tmp_path, code=1, stdin=subprocess.DEVNULL).stderr  # a process of its own
    assert err == "train_unet: out/log.csv: can't be written (File too large), so the run is stopped\n"


def test_what_is_saved_lies_in_another_folder(program: list[str], data: Path, tmp_path: Path) -> None:
    """A run that was resumed into a new folder, and can't write there, says where the checkpoint lies. A limit on the size of files is not waited for."""
    call([*program, *TINY, "--data_file", data, "--max_steps", 2], tmp_path)
    with file_limit(1 << 20):
        done = call(
            [*program, *flags("--resume_checkpoint", f"out/{model_name(2)}", "--max_steps 3 --output_dir new --sample_interval 0")], tmp_path, code=1
        )
    assert f"saved is step 2; {resume(model_name(2), 'new')} goes on" in done.stderr
    assert "tried again" not in done.stdout


# ----------------------------------------------------------------------------------------------------------------------
# the best checkpoint

# The loss rises after the first steps: this learning rate is far too high.
RISING = flags(TINY, "--lr 0.5 --save_interval 2 --keep_checkpoints 1 --max_bad_steps 100 --keep_best True")


def best_of(folder: Path, saved: list[int]) -> int:
    """Which of these steps, all of which were saved, had the lowest validation loss; the first of several."""
    losses = dict(zip(column(folder, "step"), column(folder, "val_loss")))
    return min(saved, key=lambda step: losses[step])


def best_step(folder: Path) -> int:
    return read_checkpoint(folder / "best.bin").step


def test_the_best_checkpoint_is_kept(program: list[str], data: Path, tmp_path: Path) -> None:
    """It is measured at every checkpoint, outlives its other name, and a resumed run that finds none better keeps it. It can be drawn from."""
    given = flags(RISING, "--val_interval 1000 --data_file", data, "--val_data_file", data)
    out = tmp_path / "out"
    call([*program, *given, "--max_steps", 12], tmp_path)
    assert [step for step, loss in zip(column(out, "step"), column(out, "val_loss")) if np.isfinite(loss)] == [2, 4, 6, 8, 10, 12]
    best = best_of(out, [2, 4, 6, 8, 10, 12])
    assert best_step(out) == best and checkpoints(out) == [12] and best < 12 and not leftovers(out)
    kept = (out / "best.bin").read_bytes()

    more = flags("--resume_checkpoint latest --save_interval 2 --keep_checkpoints 1 --max_bad_steps 100 --sample_interval 0 --keep_best True")
    call([*program, *more, "--val_data_file", data, "--max_steps", 14, "--lr", 0.5], tmp_path)
    assert best_of(out, [2, 4, 6, 8, 10, 12, 14]) == best and (out / "best.bin").read_bytes() == kept and checkpoints(out) == [14]

    # a resumed run that gets better replaces it
    call([*program, *given, "--max_steps", 2, "--output_dir", "better"], tmp_path)
    call([*program, *more, "--val_data_file", data, "--max_steps", 30, "--lr", 1e-3, "--output_dir", "better"], tmp_path)
    assert best_step(tmp_path / "better") == best_of(tmp_path / "better", list(range(2, 31, 2))) > 2

    # its row is gone
    rows = (out / "log.csv").read_text().splitlines(keepends=True)
    (out / "log.csv").write_text("".join(rows[:best] + rows[best + 1 :]))
    told = call([*program, *more, "--val_data_file", data, "--max_steps", 16], tmp_path).stdout
    assert told.count(f"out/best.bin: log.csv has no validation loss of its step {best}, so the next checkpoint becomes the best\n") == 1
    assert best_step(out) == 16

    call([*program, "--sample", 1, "--init", "out/best.bin", "--timestep_respacing", 4], tmp_path)
    assert (tmp_path / "samples.png").exists()
    (tmp_path / "next").mkdir()
    told = call([*program, "--resume_checkpoint", "out/best.bin", "--output_dir", "next", "--max_steps", 17, "--sample_interval", 0], tmp_path).stdout
    assert "resumed from out/best.bin: step 16 of 17" in told and checkpoints(tmp_path / "next") == [17]


@pytest.mark.parametrize("program", ["program"], indirect=True)
def test_the_best_checkpoint_is_compared_by_its_own_flags(program: list[str], data: Path, tmp_path: Path) -> None:
    """A run that was resumed in between without --keep_best may have changed what losses mean."""
    given = flags(TINY, "--save_interval 2 --val_interval 2 --data_file", data, "--val_data_file", data)
    call([*program, *given, "--max_steps", 4, "--min_snr_gamma", 0.01, "--keep_best", True], tmp_path)
    on = flags("--resume_checkpoint latest --save_interval 2 --val_interval 2 --sample_interval 0 --val_data_file", data)
    told = call([*program, *on, "--max_steps", 6, "--min_snr_gamma", 0], tmp_path).stdout
    assert "best.bin" not in told and best_step(tmp_path / "out") <= 4
    told = call([*program, *on, "--max_steps", 8, "--keep_best", True], tmp_path).stdout
    assert told.count("out/best.bin: --min_snr_gamma 0: was 0.01 before, so the next checkpoint becomes the best\n") == 1
    assert best_step(tmp_path / "out") == 8
    told = call([*program, *on, "--max_steps", 10, "--keep_best", True], tmp_path).stdout
    assert "becomes the best" not in told


@pytest.mark.parametrize("program", ["program"], indirect=True)
def test_what_the_best_checkpoint_needs(program: list[str], data: Path, tmp_path: Path) -> None:
    """Images to judge by; and no file of another run is replaced."""
    err = call([*program, *flags(RISING, "--data_file", data)], tmp_path, code=1).stderr
    assert "--keep_best True: needs --val_data_file" in err and err.count("\n") == 1 and not (tmp_path / "out").exists()
    given = flags(RISING, "--max_steps 2 --data_file", data, "--val_data_file", data)
    call([*program, *given], tmp_path)
    (tmp_path / "out" / "log.csv").unlink()
    (tmp_path / "out" / model_name(2)).unlink()
    before = (tmp_path / "out/best.bin").read_bytes()
    err = call([*program, *given], tmp_path, code=1).stderr
    assert (
        "out: already holds a run, but no checkpoint model_STEP.bin" in err
        and err.count("\n") == 1
        and (tmp_path / "out/best.bin").read_bytes() == before
    )
    (tmp_path / "out/best.bin").rename(tmp_path / "out" / model_name(2))
    (tmp_path / "out/best.bin").write_text("my notes")
    again = ["--resume_checkpoint", "latest", "--keep_best", "True", "--val_data_file", data, "--max_steps", 4]
    err = call([*program, *again], tmp_path, code=1).stderr
    assert "out/best.bin: is 8 bytes long" in err and (tmp_path / "out/best.bin").read_text() == "my notes"


# Ctrl-C comes at the moment at which the checkpoint of the last step gets its name.
INTERRUPTED = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

int renameat(int from, const char* name, int to, const char* other) {
    int (*real)(int, const char*, int, const char*) = (int (*)(int, const char*, int, const char*))dlsym(RTLD_NEXT, "renameat");
    if (strcmp(other, "model_0000003.bin") == 0) raise(SIGINT);
    return real(from, name, to, other);
}
"""


@pytest.mark.parametrize("program", ["program"], indirect=True)
def test_a_signal_at_the_last_step(program: list[str], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends without its last grid, and has nothing to do when it is resumed."""
    (tmp_path / "interrupted.c").write_text(INTERRUPTED)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "interrupted.so", tmp_path / "interrupted.c", "-ldl"], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(tmp_path / "interrupted.so"))
    grid = "--sample_interval 3 --num_samples 1 --timestep_respacing 2"
    given = flags(TINY, "--max_steps 3 --data_file", data)
    told = call([*program, *flags(given, grid)], tmp_path, code=128 + signal.SIGINT, stdin=subprocess.DEVNULL).stdout  # a process of its own
    assert "stopped by SIGINT after step 3" in told and checkpoints(tmp_path / "out") == [3]
    assert not (tmp_path / "out/samples_0000003.png").exists()
    monkeypatch.delenv("LD_PRELOAD")
    assert "nothing to do" in call([*program, *flags("--resume_checkpoint latest", grid)], tmp_path).stdout


# A disk without hard links, on which, if NO_BEST is there, nothing can be called best.bin.
NO_LINKS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int linkat(int from, const char* name, int to, const char* other, int how) { return errno = EPERM, -1; }

int renameat(int from, const char* name, int to, const char* other) {
    int (*real)(int, const char*, int, const char*) = (int (*)(int, const char*, int, const char*))dlsym(RTLD_NEXT, "renameat");
    if (getenv("NO_BEST") && strcmp(other, "best.bin") == 0) return errno = EIO, -1;
    return real(from, name, to, other);
}
"""


def test_the_best_checkpoint_without_links(program: list[str], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a copy then. What can't be written is said, and ends no run."""
    (tmp_path / "links.c").write_text(NO_LINKS)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "links.so", tmp_path / "links.c", "-ldl"], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(tmp_path / "links.so"))
    given = flags(RISING, "--max_steps 2 --data_file", data, "--val_data_file", data)
    call([*program, *given], tmp_path, stdin=subprocess.DEVNULL)  # a process of its own
    best, checkpoint = tmp_path / "out/best.bin", tmp_path / "out" / model_name(2)
    assert best.read_bytes() == checkpoint.read_bytes() and best.stat().st_ino != checkpoint.stat().st_ino
    monkeypatch.setenv("NO_BEST", "1")
    told = call([*program, *given, "--output_dir", "none"], tmp_path, stdin=subprocess.DEVNULL).stdout
    assert told.count("none/best.bin: ") == 1 and "Input/output error" in told and model_name(2) in told
    assert checkpoints(tmp_path / "none") == [2] and not (tmp_path / "none/best.bin").exists() and not leftovers(tmp_path / "none")


# ----------------------------------------------------------------------------------------------------------------------
# kills and full disks at random moments


@pytest.mark.long
def test_random_kills_and_full_disks(program: list[str], data: Path, tmp_path: Path) -> None:
    """A run that saves after every step is killed, or can write no more, again and again. Every checkpoint that is there can be read, the next
    start removes what was left half written, and in the end everything is as if nothing had happened, to the last bit."""
    end, seed = time.monotonic() + SECONDS, int(os.environ.get("TRAIN_UNET_FAULT_SEED", time.time()))
    print(f"TRAIN_UNET_FAULT_SEED={seed}")
    chance = random.Random(seed)
    given = flags(
        TINY, "--lr_schedule cosine --dropout 0.2 --random_flip True --max_steps 60 --log_interval 1 --save_interval 1 --keep_checkpoints 2"
    )
    given += ["--data_file", data, "--output_dir"]
    took = -time.monotonic()
    call([*program, *given, "unbroken"], tmp_path)
    took += time.monotonic()
    model, log = (tmp_path / "unbroken" / model_name(60)).read_bytes(), read_log(tmp_path / "unbroken")
    counts = dict(kills=0, full=0, runs=0, leftovers=0)
    while time.monotonic() < end or not counts["runs"]:
        folder, finished = tmp_path / "out", False
        shutil.rmtree(folder, ignore_errors=True)
        while not finished:
            counts["leftovers"] += len(leftovers(folder))
            if checkpoints(folder):
                command = [*program, "--resume_checkpoint", "latest", "--save_interval", 1, "--log_interval", 1, "--keep_checkpoints", 2]
                command += ["--sample_interval", 0, "--output_dir", "out"]
            else:
                (folder / "log.csv").unlink(missing_ok=True)
                command = [*program, *given, "out"]
            full, moment = chance.random() < 0.3, took * chance.random() ** 2
            size = chance.randrange(5_000_000)
            with file_limit(size) if full else contextlib.nullcontext():
                process = start(command, tmp_path, stdout=subprocess.DEVNULL)
            try:
                finished = process.wait(timeout=None if full else moment) == 0
                counts["full"] += full
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                counts["kills"] += 1
            error = process.stderr.read()
            assert process.returncode in ((0, 1) if full else (0, -9)) and error.count("\n") <= 1, error
            for step in checkpoints(folder):
                assert read_checkpoint(folder / model_name(step)).step == step
            assert process.returncode == -9 or not leftovers(folder)
        assert (folder / model_name(60)).read_bytes() == model and read_log(folder) == log
        counts["runs"] += 1
    print(counts)
    assert counts["kills"]


@pytest.mark.long
def test_the_fuzzers_compile() -> None:
    """`make fuzz` needs clang and ten minutes; whether the program still has what dev/test/fuzz.cpp calls, any compiler says in seconds."""
    warnings = ["-Wno-unknown-pragmas", "-Wno-unused-function"]
    done = subprocess.run(["g++", "-std=c++20", "-fsyntax-only", *warnings, ROOT / "dev/test/fuzz.cpp"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


# ----------------------------------------------------------------------------------------------------------------------
# what is told, and what is kept


def commands_in(sentence: str) -> list[list[str]]:
    """The commands ./train_unet in a sentence, as a shell would read them: up to the first word that is no flag or its value."""
    found = []
    for part in sentence.split("./train_unet ")[1:]:
        words = shlex.split(part.replace("`", " ` "))
        end = next((i for i in range(0, len(words), 2) if not words[i].startswith("--")), len(words))
        found.append(words[:end])
    return found


def test_a_command_that_goes_on_can_be_pasted(program: list[str], data: Path, tmp_path: Path) -> None:
    """In every sentence that names one: of a run that was stopped, one that is done, and one that would begin in a run's folder."""
    folder = "my runs/it's 3"
    process = start([*program, *flags(LONG, "--data_file", data), "--output_dir", folder], tmp_path)
    wait_for(process, "step 2/")
    process.send_signal(signal.SIGINT)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 130
    step = max(checkpoints(tmp_path / folder))
    (command,) = commands_in(out.splitlines()[-1])
    call([*program, *command, "--max_steps", step + 1], tmp_path)
    (command,) = commands_in(call([*program, *flags(TINY, "--data_file", data), "--output_dir", folder], tmp_path, code=1).stderr)
    call([*program, *command, "--max_steps", step + 2], tmp_path)
    assert max(checkpoints(tmp_path / folder)) == step + 2
    (command,) = commands_in(call([*program, *command, "--max_steps", step + 2], tmp_path).stdout.splitlines()[-1])
    call([*program, *command], tmp_path)
    assert max(checkpoints(tmp_path / folder)) > step + 2 and [path.name for path in tmp_path.iterdir()] == ["my runs"]


def test_names_are_printed_without_what_a_terminal_obeys(program: list[str], data: Path, tmp_path: Path) -> None:
    name = "a\n\x1b[2Jb"
    shutil.copy(data, tmp_path / f"{name}.bin")
    trained = call([*program, *TINY, "--data_file", f"{name}.bin", "--max_steps", 1, "--output_dir", name], tmp_path)
    resumed = call([*program, "--resume_checkpoint", "latest", "--output_dir", name, "--max_steps", 2], tmp_path)
    drawn = call([*program, *flags("--sample 1 --timestep_respacing 1"), "--init", f"{name}/{model_name(1)}", "--output", f"{name}.png"], tmp_path)
    refused = call([*program, *TINY, "--data_file", f"{name}/none.bin"], tmp_path, code=1)
    for text in trained.stdout, resumed.stdout, drawn.stdout, refused.stderr:
        assert "[2Jb" in text and "\x1b" not in text and "a\n" not in text.replace("data\n", "")
    assert (tmp_path / f"{name}.png").exists() and refused.stderr.count("\n") == 1


def test_what_is_not_of_the_same_kind_is_not_replaced(either: list[str], data: Path, tmp_path: Path) -> None:
    """Latents, which have no labels and are floats, a text, a photograph, a page; older samples of the same kind are."""
    call([binary_path("cpu"), *TINY, "--data_file", data, "--max_steps", 1], tmp_path)
    (tmp_path / "latents.bin").write_bytes(data_bytes(make_images(50).astype(np.float32)))
    (tmp_path / "notes.bin").write_text("mine")
    Image.new("RGB", (64, 64), "red").save(tmp_path / "photo.png")
    given = [*either, *flags("--timestep_respacing 1 --sample 1 --init", f"out/{model_name(1)}"), "--output"]
    call([*given, "samples.bin"], tmp_path)
    shutil.copy(tmp_path / "samples.bin", tmp_path / "renamed.png")
    for name in "latents.bin", "notes.bin", "photo.png", "renamed.png":
        refuse([*given, name], tmp_path, f"--output {name}")
    (tmp_path / "empty.png").touch()
    for name in "samples.bin", "grid.png", "grid.png", "empty.png":
        before = (tmp_path / name).stat().st_ino if (tmp_path / name).exists() else 0
        call([*given, name], tmp_path)
        assert (tmp_path / name).stat().st_ino != before
    assert np.frombuffer((tmp_path / "samples.bin").read_bytes(), "<i4")[14] == 1
    assert Image.open(tmp_path / "grid.png").text == {"Software": "train_unet"}
    call([binary_path("cpu"), *TINY, "--data_file", "samples.bin", "--max_steps", 1, "--output_dir", "of_samples"], tmp_path)  # they are data, too


def test_either_programs_samples_are_samples(program: list[str], data: Path, tmp_path: Path) -> None:
    call([*program, *TINY, "--data_file", data, "--max_steps", 1], tmp_path)
    for name in "s.bin", "s.png":
        for command in program, TWIN, program:
            call([*command, *flags("--timestep_respacing 1 --sample 1 --init", f"out/{model_name(1)}", "--output", name)], tmp_path)


def test_a_page_of_runs_replaces_no_other_page(program: list[str], data: Path, tmp_path: Path) -> None:
    for folder in "a", "b":
        call([*program, *TINY, "--data_file", data, "--max_steps", 1, "--output_dir", folder], tmp_path)
    (tmp_path / "mine.html").write_text("<!doctype html><title>mine</title>")
    shutil.copy(tmp_path / "a/index.html", tmp_path / "run.html")
    compare = [*program, "--compare_runs", "a,b", "--output"]
    for name in "mine.html", "run.html":
        refuse([*compare, name], tmp_path, f"--output {name}")
    call([*compare, "both.html"], tmp_path)
    call([*compare, "both.html"], tmp_path)


def test_a_folder_of_another_model_is_not_replaced(program: list[str], data: Path, tmp_path: Path) -> None:
    for seed in 1, 2:
        call([*program, *flags(TINY, "--data_file", data, "--max_steps 1 --seed", seed, "--output_dir", f"out{seed}")], tmp_path)
    call([*TWIN, "--convert", f"out1/{model_name(1)}", "folder/"], tmp_path)
    call([*TWIN, "--convert", f"out1/{model_name(1)}", "folder/"], tmp_path)
    refuse([*TWIN, "--convert", f"out2/{model_name(1)}", "folder/"], tmp_path, "--convert folder/")


def test_ctrl_c_keeps_the_samples_that_are_drawn(program: list[str], data: Path, tmp_path: Path) -> None:
    """What is kept are the first images of those that were asked for; pasted into the same command, what is told draws as many as are missing."""
    call([*program, *TINY, "--data_file", data, "--max_steps", 1], tmp_path)
    model = [*program, *flags("--sampler ddim --timestep_respacing 10 --batch_size 4 --init", f"out/{model_name(1)}")]
    process = start([*model, *flags("--sample 100000 --output s.bin")], tmp_path, stdin=subprocess.DEVNULL)
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 130
    kept = read_samples(tmp_path / "s.bin")
    assert 4 <= len(kept) < 100000 and len(kept) % 4 == 0
    call([*model, *flags("--sample 8 --output first.bin")], tmp_path)
    assert np.array_equal(read_samples(tmp_path / "first.bin")[: len(kept)], kept[:8])
    words = out.splitlines()[-1].split()
    rest = {name: words[words.index(name) + 1] for name in ("--sample", "--noise_seed", "--output")}
    assert int(rest["--sample"]) == 100000 - len(kept) and rest["--output"] != "s.bin"
    call([*model, *flags("--sample 4 --noise_seed", rest["--noise_seed"], "--output", rest["--output"])], tmp_path)
    assert not np.array_equal(read_samples(tmp_path / rest["--output"]), kept[:4])
    # Before a batch is drawn there is nothing to keep.
    process = start([*program, *flags(model[1:], "--sample 4 --sampler ddpm --timestep_respacing 1000 --output none.bin")], tmp_path)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode in (0, 130) and (tmp_path / "none.bin").exists() == (process.returncode == 0)


@pytest.mark.parametrize("name", ["index.html", "samples_0000003.png", model_name(1), "best.bin"])
def test_a_folder_in_the_place_of_a_runs_file(program: list[str], data: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)
    refuse([*program, *TINY, "--data_file", data, "--max_steps", 3], tmp_path, f"out/{name}")


def test_a_full_disk_while_a_folder_is_written(program: list[str], data: Path, tmp_path: Path) -> None:
    call([*program, *TINY, "--data_file", data, "--max_steps", 1], tmp_path)
    small = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))}
    err = call([*TWIN, "--convert", f"out/{model_name(1)}", "folder/"], tmp_path, code=1, **small).stderr
    assert err.startswith("train_unet: folder") and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_intervals_are_kept_with_the_run(either: list[str], program: list[str], data: Path, tmp_path: Path) -> None:
    """--save_interval, --sample_interval and --num_samples of the first command; the command line comes first; older files have none."""
    given = flags(TINY, "--data_file", data, "--max_steps 4 --save_interval 2 --sample_interval 3 --num_samples 16 --timestep_respacing 1")
    call([*either, *given], tmp_path)
    header = read_checkpoint(tmp_path / "out" / model_name(4)).header
    assert header[119:124].tolist() == [0, 2, 3, 16, 0]
    for k, command in enumerate((program, TWIN)):
        folder = tmp_path / f"on{k}"
        resume = [*command, "--resume_checkpoint", f"out/{model_name(4)}", "--keep_checkpoints", 0]
        call([*resume, "--max_steps", 10, "--output_dir", folder], tmp_path)
        assert {6, 8, 10} == {*checkpoints(folder)}
        grids = sorted(folder.glob("samples_*.png"))
        assert [int(path.stem[8:]) for path in grids] == [6, 9, 10]
        assert {Image.open(path).size for path in grids} == {Image.open(tmp_path / "out/samples_0000003.png").size}
        call([*resume, *flags("--max_steps 7 --save_interval 1 --sample_interval 0 --output_dir", f"other{k}")], tmp_path)
        assert checkpoints(tmp_path / f"other{k}") == [5, 6, 7] and not [*(tmp_path / f"other{k}").glob("samples*")]
        last = read_checkpoint(tmp_path / f"other{k}" / model_name(7)).header
        assert last[119:124].tolist() == [0, 1, 0, 16, 0]
    # A file without them: as before, the preset's, here fashion32's 500, 250 and 36.
    file = (tmp_path / "out" / model_name(4)).read_bytes()
    for slot in 120, 121, 122:
        file = with_slot(file, slot, 0)
    (tmp_path / "old.bin").write_bytes(seal_model(file))
    for k, command in enumerate((program, TWIN)):
        call([*command, *flags("--resume_checkpoint old.bin --max_steps 5 --sample_interval 0 --output_dir", f"old{k}")], tmp_path)
        assert read_checkpoint(tmp_path / f"old{k}" / model_name(5)).header[119:124].tolist() == [0, 500, 0, 36, 0]
