"""Training: resuming, optimiser, bad steps, logs, pictures, the rules of the output folder, and parity with PyTorch."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import shutil
import signal
import subprocess
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    BUILD,
    LOG_COLUMNS,
    TINY,
    Model,
    binary_path,
    checkpoints,
    column,
    data_bytes,
    environment,
    flags,
    make_images,
    model_name,
    random_weights,
    read_checkpoint,
    read_log,
    read_samples,
    seal_model,
    shown_run,
    snapshot,
    with_slot,
)  # fmt: skip
from PIL import Image
from torch.utils.checkpoint import checkpoint

import train_unet as twin
from common import model_files
from common.config import make_config, validate
from common.program import UserError

torch.set_num_threads(1)  # as the program here; and threads that spin take the time from each other on a busy machine

# Whatever a resume might get wrong: state of the optimiser and of the schedule, draws that depend on the step, order of the data.
SENSITIVE = flags(TINY, "--lr_schedule cosine --warmup_steps 3 --dropout 0.2 --random_flip True --class_cond True --ema_rate 0.8 --weight_decay 0.01")

# TINY's model with classes, for the twin.
TINY_TWIN = dict(
    preset="fashion32", image_size=(8, 8), channel_mult=(1, 1), attention_resolutions=(4,), class_cond=True, num_classes=3, noise_schedule="linear"
)

QUIET = ["--sample_interval", 0]  # which no checkpoint holds


def start(args: list, cwd: Path) -> subprocess.Popen:
    """The program in the background, with its output in a pipe."""
    command = [str(binary_path("cpu")), *map(str, args)]
    return subprocess.Popen(command, cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def stop(process: subprocess.Popen, after: str, how: int, delay: float = 0) -> str:
    """Sends a signal once a line starts with `after`; returns all of the output. The program must end as a shell says it of this signal."""
    text = ""
    for line in process.stdout:
        text += line
        if line.startswith(after):
            time.sleep(delay)
            process.send_signal(how)
            break
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + how and err == "", text + out + err
    return text + out


# ----------------------------------------------------------------------------------------------------------------------
# resuming


@pytest.mark.parametrize("more", ["--microbatch 0", "--microbatch 2 --optimizer muon"])
def test_resume_is_bit_identical(run: Callable, data: Path, tmp_path: Path, more: str) -> None:
    given = flags(SENSITIVE, more, "--data_file", data, "--max_steps 9 --seed", 2**40 + 7)
    run([*given, "--save_interval", 4, "--keep_checkpoints", 0, "--output_dir", "unbroken"])
    whole, final = read_log(tmp_path / "unbroken"), (tmp_path / "unbroken" / model_name(9)).read_bytes()

    # a named checkpoint, into a folder of its own; everything that matters comes out of the file
    out = run(["--resume_checkpoint", f"unbroken/{model_name(4)}", "--output_dir", "named", *QUIET]).out
    assert "step 4 of 9" in out and f"unbroken/{model_name(4)}" in out
    assert read_log(tmp_path / "named") == whole[4:]
    assert (tmp_path / "named" / model_name(9)).read_bytes() == final

    # latest, in the run's own folder, whose log is longer than the checkpoint
    shutil.copytree(tmp_path / "unbroken", tmp_path / "latest")
    (tmp_path / "latest" / model_name(9)).unlink()
    with open(tmp_path / "latest/log.csv", "a") as f:
        f.write("10,0.12")  # what a crash leaves
    out = run(["--resume_checkpoint", "latest", "--output_dir", "latest", *QUIET]).out
    assert "step 8 of 9" in out
    assert read_log(tmp_path / "latest") == whole
    assert (tmp_path / "latest" / model_name(9)).read_bytes() == final

    # the comparison itself: another seed is seen
    run(flags(given, "--seed 5 --output_dir other"))
    assert all(a["loss"] != b["loss"] for a, b in zip(read_log(tmp_path / "other"), whole))


def test_losses_have_nine_digits(run: Callable, data: Path, tmp_path: Path) -> None:
    """Enough to tell any two floats apart: rounding to fewer digits changes most of them."""
    run([*TINY, "--data_file", data, "--max_steps", 10])
    losses = [row["loss"] for row in read_log(tmp_path / "out")]
    assert all(f"{float(text):.9g}" == text for text in losses)
    assert sum(f"{float(text):.8g}" != text for text in losses) >= 5


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_finish_the_step_and_save(run: Callable, data: Path, tmp_path: Path, how: signal.Signals) -> None:
    given = [*SENSITIVE, "--data_file", data, "--max_steps", 60, "--log_interval", 1]
    run([*given, "--output_dir", "unbroken"])
    told = stop(start([*given, "--output_dir", "stopped"], tmp_path), "step 5/", how)
    folder = tmp_path / "stopped"
    (at,) = checkpoints(folder)
    assert 5 <= at < 60 and f"stopped by {how.name} after step {at}" in told.splitlines()[-1]
    assert len(read_log(folder)) == at
    run(["--resume_checkpoint", "latest", "--output_dir", "stopped", *QUIET])
    assert read_log(folder) == read_log(tmp_path / "unbroken")
    assert (folder / model_name(60)).read_bytes() == (tmp_path / "unbroken" / model_name(60)).read_bytes()


@pytest.mark.parametrize("phase", ["samples", "validation"])
def test_a_signal_between_steps_is_saved_too(data: Path, tmp_path: Path, phase: str) -> None:
    """While pictures are drawn or a validation loss is computed, a step is already finished: the message must not lie."""
    if phase == "samples":
        slow = ["--sample_interval", 2, "--num_samples", 16, "--timestep_respacing", 200]
    else:  # so many images before the line is printed that the signal finds it at them: it goes after the line of step 1
        images = 512 if BUILD == "cpu" else 16384
        slow = ["--val_data_file", tmp_path / "val.bin", "--val_interval", 2]
        (tmp_path / "val.bin").write_bytes(data_bytes(make_images(images), np.arange(images) % 3, 3))
    process = start(flags(TINY, slow, "--data_file", data, "--max_steps 1000 --log_interval 1"), tmp_path)
    told = stop(process, "step 2/" if phase == "samples" else "step 1/", signal.SIGTERM, delay=0.05)
    assert "stopped by SIGTERM after step 2" in told
    assert checkpoints(tmp_path / "out") == [2]


def test_a_kill_leaves_what_can_be_resumed(run: Callable, data: Path, tmp_path: Path) -> None:
    """SIGKILL at any time: the checkpoints that are there are whole, leftovers are not taken for checkpoints."""
    given = [*TINY, "--data_file", data, "--max_steps", 40, "--save_interval", 1, "--log_interval", 1]
    run([*given, "--output_dir", "unbroken", "--keep_checkpoints", 1])
    process = start([*given, "--output_dir", "killed"], tmp_path)
    for line in process.stdout:
        if line.startswith("step 12/"):
            process.kill()
            break
    process.communicate()
    folder = tmp_path / "killed"
    assert checkpoints(folder) and all(read_checkpoint(folder / model_name(step)).step == step for step in checkpoints(folder))
    (folder / "model_0000099.bin.tmp123").write_bytes(b"half")
    (folder / "notes.tmp123").write_text("mine")
    run(["--resume_checkpoint", "latest", "--output_dir", "killed", *QUIET])
    assert (folder / model_name(40)).read_bytes() == (tmp_path / "unbroken" / model_name(40)).read_bytes()
    assert [p.name for p in folder.glob("*tmp*")] == ["notes.tmp123"]


@pytest.mark.parametrize("at", [2, 4], ids=["between", "end"])
def test_a_signal_gives_up_a_grid(data: Path, tmp_path: Path, at: int) -> None:
    """A grid may take minutes, which somebody who stops a run need not wait for. The resumed run goes on as if nothing had been."""
    slow = flags("--sample_interval 2 --num_samples 8 --sampler ddim --log_interval 1 --timestep_respacing 1000")
    given = flags(TINY, slow, "--max_steps 4 --data_file", data)
    assert start([*given, "--output_dir", "unbroken"], tmp_path).wait(120) == 0
    told = stop(start(given, tmp_path), f"step {at}/", signal.SIGTERM, delay=0.1)
    folder = tmp_path / "out"
    assert f"stopped by SIGTERM after step {at}" in told.splitlines()[-1]
    assert checkpoints(folder)[-1] == at and not (folder / f"samples_{at:07d}.png").exists()
    again = start(flags(TINY, slow, "--resume_checkpoint latest"), tmp_path)
    assert ("nothing to do" in again.communicate(timeout=120)[0]) == (at == 4) and again.returncode == 0
    assert (folder / model_name(4)).read_bytes() == (tmp_path / "unbroken" / model_name(4)).read_bytes()


def test_the_order_of_a_steps_files(run: Callable, data: Path, tmp_path: Path) -> None:
    """A snapshot is there before its checkpoint: a run that is killed between the two comes to this step again."""
    run(flags(TINY, "--save_interval 2 --ema_snapshots 2 --max_steps 5 --keep_checkpoints 0 --data_file", data))
    for step in (2, 4, 5):
        snapshot, checkpoint = (tmp_path / "out" / name for name in (f"ema_{step:07d}.bin", model_name(step)))
        assert snapshot.stat().st_mtime_ns < checkpoint.stat().st_mtime_ns


@pytest.mark.parametrize("what", ["--vlb_weight", "--val_data_file"])
def test_the_best_checkpoint_of_another_loss(run: Callable, data: Path, tmp_path: Path, make_data: Callable, what: str) -> None:
    """Validation losses that mean something else can't be compared: the next checkpoint becomes the best, however large its loss."""
    validated = flags("--val_interval 1 --save_interval 2 --keep_best True --val_data_file", data, QUIET)
    run(flags(TINY, validated, "--learn_sigma True --max_steps 2 --data_file", data))
    other = flags(what, 1000 if what == "--vlb_weight" else make_data("other.bin", make_images(24, seed=5), np.arange(24) % 3, 3))
    for steps, more in ((4, []), (6, other)):
        told = run(flags("--resume_checkpoint latest --lr 0 --max_steps", steps, validated, more)).out
        assert ("so the next checkpoint becomes the best" in told) == (more != [])
    assert read_checkpoint(tmp_path / "out/best.bin").step == 6


def test_another_length_of_a_tuning(run: Callable, data: Path, tmp_path: Path) -> None:
    """The stages follow from --max_steps, and so do the losses."""
    run(flags(TINY, "--objective edm --max_steps 1 --output_dir edm --data_file", data))
    run(flags(TINY, "--objective ect --max_steps 8 --init", f"edm/{model_name(1)}", "--data_file", data))
    assert "--max_steps 16: was 8 before, so" in run(flags("--resume_checkpoint latest --max_steps 16", QUIET)).out
    assert "before" not in run(flags("--resume_checkpoint latest --max_steps 16", QUIET)).out


def test_the_best_checkpoint_of_a_longer_tuning(run: Callable, data: Path, tmp_path: Path) -> None:
    """The validation loss of a tuning is that of its last stage, which depends on --max_steps although --ect_d is given."""
    run(flags(TINY, "--objective edm --max_steps 1 --output_dir edm --data_file", data))
    validated = flags("--val_interval 2 --save_interval 2 --keep_best True --val_data_file", data, QUIET)
    tuning = flags(TINY, "--objective ect --ect_d 2 --max_steps 4 --init", f"edm/{model_name(1)}", "--data_file", data, validated)
    run(tuning)
    for steps, can_be_compared in ((8, False), (8, True)):
        told = run(flags("--resume_checkpoint latest --lr 0 --max_steps", steps, validated)).out
        assert ("so the next checkpoint becomes the best" not in told) == can_be_compared


def test_another_loss_starts_the_guard_anew(run: Callable, data: Path, tmp_path: Path) -> None:
    """The bound, weighted a million times as much, makes losses that the guard of the run so far would all skip."""
    run(flags(TINY, "--learn_sigma True --max_steps 120 --lr 1e-4 --data_file", data))
    resume = flags("--resume_checkpoint", f"out/{model_name(120)}", "--max_steps 125", QUIET)
    told = run(flags(resume, "--vlb_weight 1000 --output_dir weight")).out
    assert "--vlb_weight 1000: was 0.001 before, so the first 100 steps show anew" in told and "skipped" not in told
    resumed = read_checkpoint(tmp_path / "weight" / model_name(125))
    assert resumed.updates == 125 and resumed.header[88:98].view("<f8")[0] == 5
    told = run(flags(resume, "--lr 1e-5 --sigma_small True --min_snr_gamma 0 --output_dir same")).out
    assert "anew" not in told and read_checkpoint(tmp_path / "same" / model_name(125)).header[88:98].view("<f8")[0] == 125
    again = flags("--resume_checkpoint", f"weight/{model_name(125)}", "--max_steps 126 --output_dir again", QUIET)
    assert "anew" not in run(again).out  # and a guard that has seen fewer steps than the weights is no damage


def test_a_finished_run_goes_on_with_more_steps(run: Callable, data: Path, tmp_path: Path) -> None:
    run([*TINY, "--data_file", data, "--max_steps", 6, "--output_dir", "unbroken"])
    run([*TINY, "--data_file", data, "--max_steps", 3, "--output_dir", "extended"])
    told = run(["--resume_checkpoint", "latest", "--output_dir", "extended", *QUIET]).out
    assert "nothing to do" in told and checkpoints(tmp_path / "extended") == [3]
    run(["--resume_checkpoint", "latest", "--max_steps", 6, "--output_dir", "extended", *QUIET])
    assert read_log(tmp_path / "extended") == read_log(tmp_path / "unbroken")
    assert (tmp_path / "extended" / model_name(6)).read_bytes() == (tmp_path / "unbroken" / model_name(6)).read_bytes()


def test_flags_on_resume(run: Callable, refused: Callable, data: Path, tmp_path: Path, make_data: Callable) -> None:
    """Training flags may change, the model, the diffusion and the seed may not, other data must be named."""
    run(flags(TINY, "--data_file", data, "--max_steps 2 --lr 1e-4"))
    resume = ["--resume_checkpoint", f"out/{model_name(2)}", "--max_steps", 3, *QUIET]
    for flag, value in (
        ("num_channels", 64),
        ("diffusion_steps", 500),
        ("noise_schedule", "cosine"),
        ("seed", 1),
        ("class_cond", True),
        ("channel_mult", "1,2"),
    ):
        refused([*resume, f"--{flag}", value], f"--{flag} {value}", model_name(2))
    run([*resume, "--lr", 3e-4, "--output_dir", "lr"])
    assert column(tmp_path / "lr", "lr").tolist() == [pytest.approx(3e-4)]
    run([*resume, "--output_dir", "same"])
    assert column(tmp_path / "same", "lr").tolist() == [pytest.approx(1e-4)]

    moved = tmp_path / "moved.bin"
    moved.write_bytes(data.read_bytes())
    run([*resume, "--data_file", moved, "--output_dir", "moved"])
    assert read_log(tmp_path / "moved") == read_log(tmp_path / "same")
    other = make_data("other.bin", make_images(24, seed=5))
    run([*resume, "--data_file", other, "--output_dir", "other"])
    assert read_log(tmp_path / "other") != read_log(tmp_path / "same")


@pytest.mark.parametrize("first", ["cpp", "twin"])
@pytest.mark.parametrize("preset", ["unet64", ""])
def test_a_resume_keeps_the_preset(
    run: Callable, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, first: str, preset: str
) -> None:
    """And so the flags that no checkpoint holds, such as --timestep_respacing of its grids. Without --preset, images of 8x8 get fashion32 or unet64."""
    monkeypatch.chdir(tmp_path)

    def train(program: str, *words: object) -> str:
        if program == "cpp":
            return run(flags(*words)).out
        assert twin.run([*flags(*words), "--device", "cpu"]) == 0
        return capsys.readouterr().out

    given = flags(TINY, "--data_file", data, QUIET)
    at = given.index("--preset")
    given[at : at + 2] = ["--preset", preset] if preset else []
    second = "twin" if first == "cpp" else "cpp"
    chosen = preset or ("unet64" if BUILD == "cuda" and first == "cpp" else "fashion32")
    assert f"preset {chosen}" in train(first, given, "--max_steps 1 --output_dir run1")

    def resume(program: str, step: int, *words: object) -> str:
        """A run that goes on from the checkpoint of the one before, in a folder of its own."""
        given = flags("--resume_checkpoint", f"run{step - 1}/{model_name(step - 1)}", "--max_steps", step, QUIET, *words)
        return train(program, given, "--output_dir", f"run{step}")

    assert f"preset {chosen}" in resume(second, 2)
    assert f"preset {chosen}" in resume(first, 3)
    slots = {int(read_checkpoint(Path(f"run{step}/{model_name(step)}")).header.view("<u4")[117]) for step in (1, 2, 3)}
    assert slots == {zlib.crc32((chosen if preset else f"{chosen}, by default").encode())}
    assert "preset quick64" in resume(second, 4, "--preset quick64")
    assert "preset quick64" in resume(first, 5)


def test_a_resume_keeps_the_optimizer(run: Callable, refused: Callable, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments are of no use to the other one. A new run from the same file is free. Slot 116 is 0 in files that are older than the flag: AdamW's."""
    monkeypatch.chdir(tmp_path)
    for slot, (made, other) in enumerate((("adamw", "muon"), ("muon", "adamw"))):
        run(flags(TINY, "--data_file", data, "--max_steps 2 --optimizer", made, "--output_dir", made))
        checkpoint = f"{made}/{model_name(2)}"
        assert read_checkpoint(tmp_path / checkpoint).header[116] == slot and twin.read_model(checkpoint).config.optimizer == made
        resume = flags("--resume_checkpoint", checkpoint, "--max_steps 3", QUIET)
        told = f"--optimizer {other}: {checkpoint} was made with {made}; leave the flag out"
        refused([*resume, "--optimizer", other], told)
        with pytest.raises(twin.UserError, match=re.escape(told)):
            twin.run([*resume, "--optimizer", other, "--device", "cpu"])
        run(flags(resume, "--optimizer", made, "--output_dir", f"{made}_named"))
        run(flags(resume, "--output_dir", f"{made}_again"))
        named, again = (tmp_path / f"{made}_{how}" / model_name(3) for how in ("named", "again"))
        assert named.read_bytes() == again.read_bytes() and read_checkpoint(again).header[116] == slot
        run(flags(TINY, "--data_file", data, "--init", checkpoint, "--max_steps 1 --optimizer", other, "--output_dir", f"{made}_init"))
        assert read_checkpoint(tmp_path / f"{made}_init" / model_name(1)).header[116] == 1 - slot


def test_another_batch_size_is_said(
    run: Callable, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """It changes which images come next: so many batches of the data are done."""
    run(flags(TINY, "--data_file", data, "--max_steps 2"))
    resume = ["--resume_checkpoint", f"out/{model_name(2)}", "--max_steps", 3, *QUIET]
    monkeypatch.chdir(tmp_path)
    for number, batch in enumerate((8, 4)):
        told = run([*resume, "--batch_size", batch, "--output_dir", f"out{number}"]).out
        twin.run([*map(str, resume), "--batch_size", str(batch), "--output_dir", f"twin{number}", "--device", "cpu"])
        for out in (told, capsys.readouterr().out):
            assert ("--batch_size 8: was 4 before" in out and "image 16 of it comes next, not 8" in out) == (batch == 8)


def test_a_resume_from_elsewhere(run: Callable, refused: Callable, tmp_path: Path) -> None:
    """A relative path is seen from the current folder; who is elsewhere names the data, which is the same then."""
    project, other = tmp_path / "project", tmp_path / "other"
    (project / "data").mkdir(parents=True)
    other.mkdir()
    (project / "data/d.bin").write_bytes(data_bytes(make_images()))
    run([*TINY, "--data_file", "data/d.bin", "--max_steps", 2, "--output_dir", "runs/a"], cwd=project)
    again = ["--resume_checkpoint", project / "runs/a" / model_name(2), "--max_steps", 3, "--output_dir", other / "b", *QUIET]
    refused(again, "was trained on data/d.bin, which is no file here; name its data by --data_file", cwd=other)
    assert "anew" not in run([*again, "--data_file", project / "data/d.bin"], cwd=other).out


def test_data_that_changed_under_a_run(run: Callable, refused: Callable, tmp_path: Path, make_data: Callable) -> None:
    make_data("d.bin", make_images())
    run([*TINY, "--data_file", "d.bin", "--max_steps", 2])
    make_data("d.bin", make_images(seed=1))
    refused(["--resume_checkpoint", "latest", "--max_steps", 3], "d.bin", model_name(2), "--data_file")
    (tmp_path / "d.bin").unlink()
    refused(["--resume_checkpoint", "latest", "--max_steps", 3], "d.bin")


HELD_OUT = [0, 1, 7, 9, 13]  # of 24 images with --val_fraction 0.2


def test_images_that_are_held_out(
    run: Callable, refused: Callable, tmp_path: Path, make_data: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """--val_fraction is a run on a file of the others and with one of the held-out images as --val_data_file, with their labels and pictures; resumed by
    either program; and the twin's."""
    monkeypatch.chdir(tmp_path)
    images, pictures, labels = make_images(), make_images(seed=1), np.arange(24) % 3
    parts = {"whole": np.arange(24), "held": np.array(HELD_OUT), "rest": np.setdiff1d(np.arange(24), HELD_OUT)}
    for name, part in parts.items():
        make_data(f"{name}.bin", images[part], labels[part], 3)
        make_data(f"{name}_cond.bin", pictures[part])
    given = flags(SENSITIVE, "--cond_channels 1 --val_interval 3 --save_interval 3 --max_steps 9")
    run(
        flags(
            given,
            "--data_file rest.bin --cond_file rest_cond.bin --val_data_file held.bin --val_cond_file held_cond.bin --output_dir files --keep_best True",
        )
    )
    drawn = flags("--data_file whole.bin --cond_file whole_cond.bin --val_fraction 0.2")
    said = run(flags(given, drawn, "--output_dir cpp --keep_best True")).out
    assert "data: whole.bin, 19 images, 5 others are held out, 5 steps of 4 an epoch" in said
    assert "data: 19 images, 5 others are held out" in shown_run(tmp_path / "cpp")["about"]
    assert read_log(tmp_path / "files") == read_log(tmp_path / "cpp")
    for kept, other in zip(*(read_checkpoint(tmp_path / folder / model_name(9)).arrays for folder in ("files", "cpp"))):
        assert np.array_equal(kept, other)
    run(flags(given, drawn, "--seed 1 --lr 0 --max_steps 1 --output_dir other"))  # the draw is that of every seed
    assert read_checkpoint(tmp_path / "other" / model_name(1)).header[118] == read_checkpoint(tmp_path / "cpp" / model_name(9)).header[118]

    resume = flags("--resume_checkpoint", f"cpp/{model_name(3)}", "--max_steps 9 --val_interval 3 --sample_interval 0")
    run(flags(resume, "--output_dir cpp_on"))
    assert (tmp_path / "cpp_on" / model_name(9)).read_bytes() == (tmp_path / "cpp" / model_name(9)).read_bytes()
    assert twin.run(flags(given, drawn, "--device cpu --compile 0 --output_dir twin")) == 0
    assert twin.run(flags(resume, "--device cpu --compile 0 --output_dir twin_on")) == 0
    for name in ("loss", "grad_norm", "val_loss"):
        ours = column(tmp_path / "cpp", name)
        assert column(tmp_path / "twin", name) == pytest.approx(ours, rel=1e-4, nan_ok=True)
        assert column(tmp_path / "twin_on", name) == pytest.approx(ours[3:], rel=1e-4, nan_ok=True)
    header, theirs = (read_checkpoint(tmp_path / folder / model_name(9)).header for folder in ("cpp", "twin"))
    assert header[123:124].view("<f4") == np.float32(0.2) and header[84] == 24
    assert header[[84, 85, 86, 113, 118, 123]].tolist() == theirs[[84, 85, 86, 113, 118, 123]].tolist()

    more = np.append(parts["whole"], 0)
    make_data("more.bin", images[more], labels[more], 3)
    make_data("more_cond.bin", pictures[more])
    grown = flags(resume, "--data_file more.bin --cond_file more_cond.bin")
    told = "--val_fraction 0.2: the images have changed, so others are held out than before, of which the steps before have seen some"
    assert told in run(flags(grown, "--output_dir cpp_more")).out and told not in said
    assert twin.run(flags(grown, "--device cpu --compile 0 --output_dir twin_more")) == 0 and told in capsys.readouterr().out

    both, few = flags(resume, "--val_data_file held.bin --output_dir x"), flags(given, "--cond_channels 0 --data_file whole.bin --output_dir x")
    for words, told in {
        (*resume, "--val_fraction", 0.1, "--output_dir", "x"): f"--val_fraction 0.1: cpp/{model_name(3)} was made with 0.2; leave the flag out",
        (*both,): "--val_data_file held.bin: --val_fraction 0.2 holds out validation images, too; leave one of the two out",
        (*few, "--val_fraction", 0.02): "--val_fraction 0.02: holds out 0 of the 24 images of whole.bin; another fraction must hold out one at least",
        (*few, "--val_fraction", 0.99): "--val_fraction 0.99: holds out 24 of the 24 images of whole.bin; another fraction must hold out one",
        (*few, "--val_fraction", 1): "must be a number from 0 to 0.99",
    }.items():
        refused(words, told)
        with pytest.raises(UserError, match=re.escape(told)):
            twin.run(flags(*words, "--device cpu"))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_threads_change_nothing(run: Callable, data: Path, tmp_path: Path, optimizer: str) -> None:
    """Losses, weights, moments and pictures are the same bits for any number of threads."""
    given = [
        *SENSITIVE,
        "--optimizer",
        optimizer,
        "--data_file",
        data,
        "--max_steps",
        4,
        "--microbatch",
        2,
        "--val_data_file",
        data,
        "--val_interval",
        2,
    ]
    given = flags(given, "--sample_interval 4")
    for threads in (1, 2, 3, 5):
        run([*given, "--output_dir", str(threads)], threads=threads)
        for name in (model_name(4), "samples_0000004.png"):
            assert (tmp_path / f"{threads}" / name).read_bytes() == (tmp_path / "1" / name).read_bytes()
        assert read_log(tmp_path / str(threads)) == read_log(tmp_path / "1")


# ----------------------------------------------------------------------------------------------------------------------
# the step


def test_microbatches_add_up_to_the_batch(run: Callable, data: Path, tmp_path: Path) -> None:
    """The first moment after one step is the gradient times (1 - beta1): the same up to rounding, dropout and flips included. From random
    weights, because what starts as zero hides everything before it."""
    given = flags(SENSITIVE, "--data_file", data, "--max_steps 3 --save_interval 1 --grad_clip 0")
    config = make_config(TINY_TWIN)
    twin.write_model(str(tmp_path / "init.bin"), twin.ModelFile(config, random_weights(config)))
    for microbatch in (0, 4, 2, 1):
        run([*given, "--init", "init.bin", "--microbatch", microbatch, "--output_dir", microbatch])
    whole, losses = read_checkpoint(tmp_path / "0" / model_name(1)), column(tmp_path / "0", "loss")
    assert (tmp_path / "4" / model_name(3)).read_bytes()[1024:] == (tmp_path / "0" / model_name(3)).read_bytes()[1024:]
    for microbatch in (2, 1):
        parts = read_checkpoint(tmp_path / str(microbatch) / model_name(1))
        assert np.linalg.norm(parts.m - whole.m) < 1e-5 * np.linalg.norm(whole.m)
        assert column(tmp_path / str(microbatch), "loss") == pytest.approx(losses, rel=1e-4)
        assert column(tmp_path / str(microbatch), "loss")[0] == pytest.approx(losses[0], rel=1e-7)


def learning_rate(step: int, lr: float, schedule: str, warmup: int, max_steps: int) -> float:
    progress = min(max((step - warmup) / (max_steps - warmup), 0), 1)
    shape = {"constant": 1, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}[schedule]
    return lr * min(1, (step + 1) / warmup if warmup else 1) * shape


@pytest.mark.parametrize(
    "schedule, warmup", [("constant", 0), ("constant", 4), ("linear", 0), ("linear", 3), ("cosine", 0), ("cosine", 5), ("cosine", 8)]
)
def test_learning_rate(run: Callable, data: Path, tmp_path: Path, schedule: str, warmup: int) -> None:
    run(flags(TINY, "--data_file", data, "--max_steps 8 --lr 2e-3 --lr_schedule", schedule, "--warmup_steps", warmup))
    expected = [learning_rate(step, np.float32(2e-3), schedule, warmup, max(8, warmup + 1)) for step in range(8)]
    assert column(tmp_path / "out", "lr") == pytest.approx(expected, rel=1e-6)


def after_adamw(model: Model, gradient: np.ndarray, lr: float) -> np.ndarray:
    """The weights, in float64, that PyTorch's AdamW makes of a checkpoint's with a gradient that is clipped already."""
    weight_decay, beta1, beta2, eps = model.header.view("<f4")[72:76].astype(np.float64).tolist()
    p = torch.nn.Parameter(torch.tensor(model.weights, dtype=torch.float64))
    p.grad = torch.tensor(gradient)
    adamw = torch.optim.AdamW([p], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
    m, v = (torch.tensor(moments, dtype=torch.float64) for moments in (model.m, model.v))
    adamw.state[p] = dict(step=torch.tensor(float(model.updates)), exp_avg=m, exp_avg_sq=v)
    adamw.step()
    return p.detach().numpy()


@pytest.mark.parametrize(
    "settings, clipped",
    [
        ("--grad_clip 0", False),
        ("--grad_clip 0.05 --weight_decay 0.3 --lr_schedule linear", True),
        ("--adam_beta1 0 --adam_beta2 0.5 --adam_eps 1e-3 --ema_rate 0.5 --grad_clip 1e9", False),
        ("--adam_beta1 0.5 --adam_beta2 0.9 --weight_decay 10 --warmup_steps 4 --ema_rate 0 --grad_clip 0.2", True),
        ("--ema_rate 1 --lr 0 --weight_decay 1 --grad_clip 0", False),
    ],
)
def test_optimiser_is_adamw(run: Callable, data: Path, tmp_path: Path, settings: str, clipped: bool) -> None:
    """From one checkpoint to the next: the gradient is read off the first moments, PyTorch's AdamW takes the step from there."""
    run(flags(TINY, "--data_file", data, "--max_steps 6 --save_interval 1 --keep_checkpoints 0", settings))
    folder = tmp_path / "out"
    lrs, norms = column(folder, "lr"), column(folder, "grad_norm")
    models = [read_checkpoint(folder / model_name(step)) for step in range(1, 7)]
    for k in range(5):
        a, b = models[k], models[k + 1]
        f = a.header.view("<f4").astype(np.float64)
        beta1, beta2, _, clip, rate = *f[73:77].tolist(), f[79].item()
        gradient = (b.m.astype(np.float64) - beta1 * a.m) / (1 - beta1)
        norm = np.linalg.norm(gradient)
        # rounding of the moments: 2^-24 of each, over 1 - beta1
        assert norm == pytest.approx(norms[k + 1] * (min(1, clip / (norms[k + 1] + 1e-6)) if clipped else 1), rel=1e-5)
        assert not clipped or norms[k + 1] > clip
        assert np.abs(b.v - (beta2 * a.v + (1 - beta2) * gradient**2)).max() < 1e-5 * b.v.max()

        expected = after_adamw(a, gradient, lrs[k + 1])
        # an update is a few lr at most; float32 moments give it to 1e-4, float32 weights round at 2^-24
        assert np.abs(b.weights - expected).max() <= 1e-4 * lrs[k + 1] + 2.0**-23 * np.abs(expected).max()
        assert lrs[k + 1] == 0 or np.abs(b.weights - a.weights).max() > 0.1 * lrs[k + 1]
        average = next_average(a, b, rate)
        assert np.abs(b.ema - average).max() <= 2.0**-22 * np.abs(average).max()


def next_average(before: Model, after: Model, rate: float) -> np.ndarray:
    """The average in `after`, in float64: the weights after update k of n count as rate^(n - k), divided by the sum of these numbers."""
    share = 1 / sum(rate**k for k in range(after.updates))
    return (1 - share) * before.ema.astype(np.float64) + share * after.weights


# What Muon leaves to AdamW, beside biases and norms: the first and the last convolution, and embeddings of classes and numbers.
NOT_MUONS = {"input_blocks.0.0.weight", "out.2.weight", "label_emb.weight", "cond_emb.weight"}
# Newton and Schulz's five iterations multiply a small difference of X / |X| by at most 3.4445^5 = 485: that is their slope at 0, and the steepest.
STEEPEST = 3.4445**5
# How far float32 may lead the result of the five away. X, its products and their sums round; together each iteration may change X by 2^-20 of its norm, which
# grows from 1 by at most 3.4445 an iteration. What the i-th of them changes by 3.4445^i 2^-20, the others multiply by about 3.4445^(5 - i).
ROUNDING = 5 * STEEPEST * 2.0**-20


def muon_mask(config: object) -> np.ndarray:
    """Which elements of a flat array are of matrices that Muon updates."""
    mask = np.zeros(twin.parameter_count(config), bool)
    for name, part in model_files.to_state_dict(config, mask).items():
        part[...] = part.ndim >= 2 and name not in NOT_MUONS
    return mask


def orthogonal(X: torch.Tensor) -> torch.Tensor:
    """Jordan et al. 2024, as they write it down: quintic iterations of Newton and Schulz."""
    X = X / X.norm() if X.any() else X
    for _ in range(5):
        A = X @ X.T
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
    return X


@pytest.mark.parametrize(
    "settings, clipped",
    [
        ("--grad_clip 0 --class_cond True --class_dropout 0.3 --augment 0.2 --patch_size 2 --learn_sigma True", False),
        (
            "--grad_clip 0.05 --weight_decay 0.3 --lr_schedule linear --adam_beta1 0.5 --adam_beta2 0.9 --ema_rate 0.5 --use_scale_shift_norm True",
            True,
        ),
    ],
)
def test_optimiser_is_muon(run: Callable, data: Path, tmp_path: Path, settings: str, clipped: bool) -> None:
    """From one checkpoint to the next, as above: gradients are read off momenta, and Muon takes the step for matrices, PyTorch's AdamW for the others."""
    run(flags(TINY, "--optimizer muon --data_file", data, "--max_steps 6 --save_interval 1 --keep_checkpoints 0", settings))
    folder = tmp_path / "out"
    lrs, norms = column(folder, "lr"), column(folder, "grad_norm")
    config = twin.read_model(str(folder / model_name(1))).config
    muons, models = muon_mask(config), [read_checkpoint(folder / model_name(step)) for step in range(1, 7)]
    assert 0.8 < muons.mean() < 1
    for a, b, lr, norm in zip(models, models[1:], lrs[1:], norms[1:]):
        weight_decay, beta1, beta2, _, clip, *_, rate = a.header.view("<f4")[72:80].astype(np.float64).tolist()
        beta = np.where(muons, 0.95, beta1)
        gradient = (b.m.astype(np.float64) - beta * a.m) / (1 - beta)
        # rounding of the moments: 2^-24 of each, over 1 - beta; that of 1 - 0.95 in float32: 2^-22
        assert np.linalg.norm(gradient) == pytest.approx(norm * (min(1, clip / (norm + 1e-6)) if clipped else 1), rel=1e-5)
        assert not clipped or norm > clip
        assert not b.v[muons].any()
        assert np.abs(b.v - (beta2 * a.v + (1 - beta2) * gradient**2))[~muons].max() < 1e-5 * b.v.max()

        expected = after_adamw(a, gradient, lr)
        assert np.abs(b.weights - expected)[~muons].max() <= 1e-4 * lr + 2.0**-23 * np.abs(expected).max()
        assert np.abs(b.weights - a.weights)[~muons].max() > 0.1 * lr
        nesterov = 0.95 * b.m.astype(np.float64) + 0.05 * gradient
        named = [model_files.to_state_dict(config, flat) for flat in (muons, nesterov, a.weights.astype(np.float64), b.weights.astype(np.float64))]
        for name, (is_muons, *tensors) in zip(named[0], zip(*(tensors.values() for tensors in named))):
            if is_muons.all():
                X, before, after = (tensor.flatten(1) for tensor in tensors)
                step = lr * 0.2 * max(X.shape) ** 0.5
                expected = (1 - lr * weight_decay) * before - step * orthogonal(X)
                # the weights round at 2^-24, once when they shrink, and once when the step is taken
                assert (after - expected).norm() <= ROUNDING * step + 2.0**-23 * before.norm(), name
                assert not X.any() or (after - before).norm() > 0.6 * step, name
        average = next_average(a, b, rate)
        assert np.abs(b.ema - average).max() <= 2.0**-22 * np.abs(average).max()


@pytest.mark.parametrize("kind", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(64, 288), (288, 64), (96, 96)])
def test_muons_directions_have_the_same_singular_vectors(shape: tuple[int, int], kind: torch.dtype) -> None:
    """By torch's singular value decomposition. The polynomial of a value from 0.0015 to 1 lies between 0.68 and 1.21; it multiplies small ones by 485."""
    tolerance = ROUNDING * 2.0 ** (-29 if kind == torch.float64 else 0)
    s = torch.linspace(1, 2, min(shape)).double()
    s[: len(s) // 4] = torch.logspace(-7, -1, len(s) // 4)
    generator = torch.Generator().manual_seed(3)
    random = torch.randn(shape, dtype=torch.float64, generator=generator)
    U, _, V = torch.linalg.svd(random, full_matrices=False)
    for X in (random, 1e-14 * random, U @ s.diag() @ V):  # gradients that are nothing but rounding are as small as the second
        U, s, V = torch.linalg.svd(X, full_matrices=False)
        s /= s.norm()
        turned = U.T @ twin.orthogonal(X.to(kind)).double() @ V.T
        values = turned.diagonal()
        assert torch.linalg.norm(turned - values.diag()) < tolerance
        assert values[s > 0.0015].min() > 0.68 and values.max() < 1.21
        assert torch.allclose(values[s < 1e-5], STEEPEST * s[s < 1e-5], rtol=1e-4, atol=tolerance)
        assert (s > 0.0015).sum() >= 3 / 4 * len(s)
    zero = twin.orthogonal(torch.zeros(shape, dtype=kind))
    assert zero.shape == shape and not zero.any()  # and not what 0 / 0 is


@pytest.mark.parametrize("rate", [0, 0.5, 0.999, 1])
def test_the_average_is_of_all_updates_and_not_of_the_initial_weights(run: Callable, data: Path, tmp_path: Path, rate: float) -> None:
    """The weights after update k of n count as rate^(n - k)."""
    run(flags(TINY, "--data_file", data, "--max_steps 6 --save_interval 1 --keep_checkpoints 0 --lr 0.01 --ema_rate", rate))
    saved = [read_checkpoint(tmp_path / "out" / model_name(step)) for step in range(1, 7)]
    for n in range(1, 7):
        counts = float(np.float32(rate)) ** np.arange(n - 1, -1, -1)
        expected = np.average([file.weights for file in saved[:n]], axis=0, weights=counts)
        # each update rounds twice, at 2^-24
        assert np.abs(saved[n - 1].ema - expected).max() <= n * 2.0**-23 * np.abs(expected).max()


def test_the_initial_weights_are_the_twins(run: Callable, data: Path, tmp_path: Path) -> None:
    """To the last bit; weights from --init likewise."""
    given = flags(TINY, "--data_file", data, "--max_steps 1 --lr 0 --class_cond True --seed 12345678901")
    run([*given, "--output_dir", "native"])
    config = make_config(TINY_TWIN | dict(seed=12345678901))
    assert np.array_equal(read_checkpoint(tmp_path / "native" / model_name(1)).weights, twin.initial_weights(config))
    weights = random_weights(config)
    twin.write_model(str(tmp_path / "init.bin"), twin.ModelFile(config, weights))
    run([*given, "--init", "init.bin", "--output_dir", "init"])
    assert np.array_equal(read_checkpoint(tmp_path / "init" / model_name(1)).weights, weights)


def test_init_from_a_checkpoint_is_the_same_in_both_programs(run: Callable, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint has two sets of weights; both programs must take the same one."""
    run([*TINY, "--data_file", data, "--max_steps", 3])
    given = ["--init", f"out/{model_name(3)}", "--data_file", data, "--batch_size", 4, "--max_steps", 1, "--lr", 0, "--sample_interval", 0]
    run([*given, "--output_dir", "native"])
    monkeypatch.chdir(tmp_path)
    twin.run([*map(str, given), "--output_dir", "twin", "--device", "cpu"])
    first, second = (read_checkpoint(tmp_path / name / model_name(1)) for name in ("native", "twin"))
    assert np.array_equal(first.weights, second.weights)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_either_program_continues_the_others_run(run: Callable, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    given = flags(SENSITIVE, "--optimizer", optimizer, "--data_file", data, "--max_steps 6")
    run([*given, "--save_interval", 3, "--output_dir", "native"])
    monkeypatch.chdir(tmp_path)
    twin.run([*given, "--save_interval", "3", "--output_dir", "twin", "--device", "cpu"])
    twin.run(["--resume_checkpoint", f"native/{model_name(3)}", "--output_dir", "native_twin", "--device", "cpu", *map(str, QUIET)])
    run(["--resume_checkpoint", f"twin/{model_name(3)}", "--output_dir", "twin_native", *QUIET])
    whole = column(tmp_path / "native", "loss")
    assert column(tmp_path / "twin", "loss") == pytest.approx(whole, rel=1e-4)
    for name in ("native_twin", "twin_native"):
        assert column(tmp_path / name, "loss") == pytest.approx(whole[3:], rel=1e-4)
        last, expected = (read_checkpoint(tmp_path / folder / model_name(6)) for folder in (name, "native"))
        same = np.flatnonzero(last.header != expected.header)
        assert {*same.tolist()} <= {3, *range(88, 98)}  # the checksum, and the running means
        assert last.header[88:98].view("<f8") == pytest.approx(expected.header[88:98].view("<f8"), rel=1e-2)


# ----------------------------------------------------------------------------------------------------------------------
# guided-diffusion's sampler of t, and its several averages

LEARNT_DRAWS = flags(
    TINY, "--schedule_sampler loss-second-moment --diffusion_steps 8 --noise_schedule cosine --batch_size 10 --max_steps 26 --seed 3"
)


def second_moment(history: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """t and importance, as guided-diffusion's LossSecondMomentResampler draws and weighs them, from a word a sample."""
    w = np.sqrt(np.mean(history[:, :10].astype(np.float64) ** 2, axis=1))
    p = w / w.sum() * (1 - 0.001) + 0.001 / len(w)
    t = np.searchsorted(np.cumsum(p), words * 2.0**-32, side="right")
    return t, 1 / (len(p) * p[t])


@pytest.mark.parametrize("more", ["--learn_sigma True --use_kl True", "--min_snr_gamma 5 --microbatch 5"])
def test_t_is_drawn_by_its_losses(run: Callable, data: Path, tmp_path: Path, more: str) -> None:
    """Checkpoint by checkpoint: which t are drawn, what is remembered of them, and how their losses count. Even, until ten losses of all t are there."""
    given = flags(LEARNT_DRAWS, "--data_file", data, more, "--save_interval 1 --keep_checkpoints 0")
    run(given)
    run(flags(given, "--schedule_sampler uniform --save_interval 100 --output_dir even"))
    folder, losses = tmp_path / "out", column(tmp_path / "out", "loss")
    models, learnt, drawn = [read_checkpoint(folder / model_name(step)) for step in range(1, 27)], 0, np.zeros(8)
    for step, (a, b) in enumerate(zip(models, models[1:]), 1):  # steps from 0
        words = twin.random_words(3, twin.TIMESTEP, step, torch.arange(10), 1)[:, 0].numpy()
        full = (a.history[:, 10] == 10).all()
        t, importance = second_moment(a.history, words) if full else (words * 8 >> 32, np.ones(10))
        remembered, kept = b.history.copy(), []
        for k in range(8):
            n = int(min(10, a.history[k, 10] + np.count_nonzero(t == k)))
            assert b.history[k, 10] == n
            fresh = b.history[k, n - np.count_nonzero(t == k) : n]
            old = a.history[k, : int(a.history[k, 10])]
            remembered[k, :n] = [*old, *fresh][-n:] if n else []
            kept += [loss * importance[t == k][0] for loss in fresh]
        assert np.array_equal(remembered, b.history)
        assert losses[step] == pytest.approx(np.mean(kept), rel=1e-5)
        learnt += full
        drawn += np.bincount(t, minlength=8) * full
    assert 5 < learnt < 20
    assert drawn[np.argmax(models[-1].history[:, :10].mean(1))] > drawn[np.argmin(models[-1].history[:, :10].mean(1))]
    same = losses == column(tmp_path / "even", "loss")
    assert same[: 26 - learnt].all() and not same[26 - learnt :].any()


def test_learnt_draws_resume_and_follow_pytorch(run: Callable, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The history of losses and all averages go from file to file and from program to program."""
    given = flags(LEARNT_DRAWS, "--data_file", data, "--ema_rate 0.9,0.5 --save_interval 20")
    few = ["--timestep_respacing", "4"]  # of 8
    run([*given, "--output_dir", "whole"])
    run(["--resume_checkpoint", f"whole/{model_name(20)}", "--output_dir", "resumed", *QUIET, *few])
    final = tmp_path / "whole" / model_name(26)
    assert read_log(tmp_path / "resumed") == read_log(tmp_path / "whole")[20:]
    assert (tmp_path / "resumed" / model_name(26)).read_bytes() == final.read_bytes()

    monkeypatch.chdir(tmp_path)
    resume = ["--resume_checkpoint", f"whole/{model_name(20)}", "--output_dir", "twin", "--device", "cpu", "--save_interval", "3"]
    twin.run([*resume, *map(str, QUIET), *few])
    run(["--resume_checkpoint", f"twin/{model_name(24)}", "--output_dir", "twin_native", "--save_interval", 20, *QUIET, *few])
    for name in ("twin", "twin_native"):
        found, expected = read_checkpoint(tmp_path / name / model_name(26)), read_checkpoint(final)
        assert column(tmp_path / name, "loss") == pytest.approx(column(tmp_path / "whole", "loss")[26 - len(read_log(tmp_path / name)) :], rel=1e-4)
        assert found.history == pytest.approx(expected.history, rel=1e-3)
        for k in (1, 4):  # averages; where a gradient is all rounding, Adam's update goes either way
            assert np.abs(found.arrays[k] - expected.arrays[k]).mean() < 1e-5
        assert np.flatnonzero(found.header != expected.header).tolist() == [
            n for n in range(256) if n in {3, 120, *range(88, 98)} and found.header[n] != expected.header[n]
        ]

    for kind in ("pt", "safetensors"):
        twin.run(["--convert", str(final), f"all.{kind}"])
        twin.run(["--convert", f"all.{kind}", "all.bin"])
        assert (tmp_path / "all.bin").read_bytes() == final.read_bytes()


def test_a_damaged_history(run: Callable, refused: Callable, data: Path, tmp_path: Path) -> None:
    run(flags(LEARNT_DRAWS, "--data_file", data, "--max_steps 1"))
    good = (tmp_path / "out" / model_name(1)).read_bytes()
    for value in (np.nan, -1, 11):  # of a count
        (tmp_path / "m.bin").write_bytes(seal_model(good[:-4] + np.float32(value).tobytes()))
        refused(["--resume_checkpoint", "m.bin", "--max_steps", 2, "--timestep_respacing", 4, "--output_dir", "fresh"], "m.bin", "history of losses")
        with pytest.raises(twin.UserError, match="history of losses"):
            twin.read_model(str(tmp_path / "m.bin"))
    (tmp_path / "m.bin").write_bytes(seal_model(good[:-44]))
    refused(["--resume_checkpoint", "m.bin", "--max_steps", 2, "--timestep_respacing", 4, "--output_dir", "fresh"], "m.bin", "cut short")


def same_average(found: np.ndarray, expected: np.ndarray) -> None:
    """The first average is made in the optimiser's kernel, the others in their own, which may round the same formula in another way."""
    assert np.abs(found - expected).max() <= 2.0**-22 * np.abs(expected).max()


def test_several_averages(run: Callable, refused: Callable, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is what a run with its rate alone keeps; a resume knows them by their rates, and sampling chooses."""
    given = flags(TINY, "--data_file", data, "--max_steps 6 --save_interval 3")
    for rates in ("0.9,0.5,0.25", "0.9", "0.5", "0.25"):
        run([*flags(given, "--ema_rate", rates), "--output_dir", rates])
    several, *single = (read_checkpoint(tmp_path / rates / model_name(6)) for rates in ("0.9,0.5,0.25", "0.9", "0.5", "0.25"))
    for found, alone in zip([several.ema, *several.arrays[4:]], single):
        same_average(found, alone.ema)
    first, alone = ((tmp_path / rates / model_name(6)).read_bytes() for rates in ("0.9,0.5,0.25", "0.9"))
    assert first[16:392] == alone[16:392] and first[1024 : len(alone)] == alone[1024:]  # more behind it, and slots 98 to 100
    assert several.header[98] == 2 and several.header.view("<f4")[99:101].tolist() == [0.5, 0.25]

    run(["--resume_checkpoint", f"0.9,0.5,0.25/{model_name(3)}", "--ema_rate", "0.25,0.9,0.125", "--output_dir", "other", *QUIET])
    other = read_checkpoint(tmp_path / "other" / model_name(6))
    same_average(other.ema, single[2].ema)
    same_average(other.arrays[4], single[0].ema)
    assert np.abs(other.arrays[5] - other.ema).max() > 1e-5

    monkeypatch.chdir(tmp_path)
    file = f"0.9,0.5,0.25/{model_name(6)}"
    # S_churn: the default presets of a CPU and of a GPU have different ones
    sample = "--sample 2 --timestep_respacing 3 --S_churn 0 --output x.bin --init".split()
    images = {}
    for rate in ("0.9", "0.5", "0.25"):
        run([*sample, file, "--ema_rate", rate])
        images[rate] = read_samples(tmp_path / "x.bin")
        run([*sample, f"{rate}/{model_name(6)}"])
        assert read_samples(tmp_path / "x.bin") == pytest.approx(images[rate], abs=1e-3)
        twin.run([*sample, file, "--ema_rate", rate, "--device", "cpu"])
        assert read_samples(tmp_path / "x.bin") == pytest.approx(images[rate], abs=1e-3)
    assert np.abs(images["0.9"] - images["0.5"]).max() > 0.01
    refused([*sample[:-3], "--output", "y.bin", "--init", file, "--ema_rate", "0.7"], "--ema_rate 0.7", "0.9 0.5 0.25")
    with pytest.raises(twin.UserError, match=r"--ema_rate 0.7: .* 0.9 0.5 0.25"):
        twin.run([*sample, file, "--ema_rate", "0.7", "--device", "cpu"])


# ----------------------------------------------------------------------------------------------------------------------
# bad steps

BAD = ["--max_bad_steps", 4, "--log_interval", 1, "--save_interval", 1, "--keep_checkpoints", 0]


def test_broken_weights_stop_the_run(run: Callable, data: Path, tmp_path: Path) -> None:
    """Weights that no loss comes of, in a file whose checksum is right: each step is named and skipped, and nothing is replaced."""
    run([*TINY, "--data_file", data, "--max_steps", 3])
    good = tmp_path / "out" / model_name(3)
    broken = seal_model(with_slot(good.read_bytes(), 256, np.full(20000, 1e38), "<f4"))
    good.write_bytes(broken)
    result = run(["--resume_checkpoint", "latest", "--max_steps", 50, *BAD], code=1)
    for step in (4, 5, 6, 7):
        assert f"step {step}: loss nan" in result.out or f"step {step}: loss -nan" in result.out
    assert "step 8" not in result.out and "4 in a row, 4 in all" in result.out
    assert result.err.startswith("train_unet: ") and result.err.count("\n") == 1
    assert "step 7" in result.err and "4 steps" in result.err and f"no step was good from out/{model_name(3)}" in result.err
    assert checkpoints(tmp_path / "out") == [3] and good.read_bytes() == broken
    losses = column(tmp_path / "out", "loss")
    assert len(losses) == 7 and np.isnan(losses[3:]).all() and np.isfinite(losses[:3]).all()


def test_a_run_that_explodes_keeps_its_good_checkpoints(run: Callable, data: Path, tmp_path: Path) -> None:
    """A learning rate that no network survives."""
    result = run(
        flags(TINY, "--data_file", data, "--use_scale_shift_norm False --max_steps 200 --lr 100 --weight_decay 100 --grad_clip 0", BAD), code=1
    )
    kept = checkpoints(tmp_path / "out")
    steps = len(read_log(tmp_path / "out"))
    assert kept and steps == kept[-1] + 4 and f"step {steps}" in result.err and model_name(kept[-1]) in result.err
    losses, norms = column(tmp_path / "out", "loss"), column(tmp_path / "out", "grad_norm")
    finite = np.isfinite(losses) & np.isfinite(norms)
    assert finite[: kept[-1]].all() and not finite[kept[-1] :].any()
    for step in kept:
        model = read_checkpoint(tmp_path / "out" / model_name(step))
        assert model.updates == step and model.bad_in_all == 0


@pytest.mark.parametrize("micro", [0, 1])
def test_a_bad_step_touches_nothing(run: Callable, tmp_path: Path, make_data: Callable, micro: int) -> None:
    """An image that is NaN: once an epoch (of 4 steps) a step is bad, between good ones. With beta1 = 0 the first moment is the gradient of
    the last good step, so that AdamW can be followed from the checkpoint before the bad step to the one after it."""
    images = (make_images(8).astype(np.float32) / 127.5 - 1).astype("<f4")
    images[5] = math.nan
    make_data("d.bin", images)
    given = flags(TINY, "--data_file d.bin --batch_size 2 --adam_beta1 0 --grad_clip 0 --weight_decay 0.1 --ema_rate 0.9 --microbatch", micro)
    out = run([*given, *BAD, "--max_steps", 12]).out
    losses, lrs = column(tmp_path / "out", "loss"), column(tmp_path / "out", "lr")
    bad = [int(step) for step in np.flatnonzero(np.isnan(losses)) + 1]
    assert len(bad) == 3 and [(step - 1) // 4 for step in bad] == [0, 1, 2]
    assert all(f"step {step}: loss" in out for step in bad) and "skipped 3" in out
    saved = checkpoints(tmp_path / "out")
    assert saved == [step for step in range(1, 13) if step not in bad]
    before, after = next((s, s + 2) for s in saved if s + 1 in bad and s + 2 in saved)
    a, b = (read_checkpoint(tmp_path / "out" / model_name(step)) for step in (before, after))
    assert b.updates == a.updates + 1 and b.bad_in_all == a.bad_in_all + 1 and b.header[83] == 0
    assert b.header[88:98].view("<f8")[0] == b.updates  # the guard, too, counts good steps only
    p = torch.nn.Parameter(torch.tensor(a.weights, dtype=torch.float64))
    p.grad = torch.tensor(b.m, dtype=torch.float64)
    adamw = torch.optim.AdamW([p], lr=lrs[after - 1], betas=(0.0, float(np.float32(0.999))), weight_decay=0.1)
    state = torch.tensor(a.v, dtype=torch.float64)
    adamw.state[p] = dict(step=torch.tensor(float(a.updates)), exp_avg=torch.zeros_like(p), exp_avg_sq=state)
    adamw.step()
    assert np.abs(b.weights - p.detach().numpy()).max() < 1e-6
    assert np.abs(b.v - state.numpy()).max() < 1e-6 * b.v.max()
    assert np.abs(b.ema - next_average(a, b, 0.9)).max() < 1e-6


def test_nan_under_the_sanitizers(run: Callable, make_data: Callable) -> None:
    """The same in the build that ends where behaviour is undefined, as a whole number made of NaN is."""
    make_data("d.bin", np.full((4, 1, 8, 8), math.nan, np.float32))
    out = run(flags(TINY, "--data_file d.bin --max_steps 2 --log_interval 1", "--max_bad_steps 3"), binary="asan").out
    assert "step 1: loss" in out and "skipped 2" in out


def one_step(run: Callable, model: bytes, guard: tuple[float, ...], folder: Path, kind: int = 1) -> Path:
    """The output folder of one step after guard[0] good ones, from a checkpoint of two steps."""
    n = int(guard[0])
    for slot, value, dtype in ((64, n, "<i4"), (81, n, "<i4"), (70, n + 1, "<i4"), (87, kind, "<i4"), (88, np.array(guard), "<f8")):
        model = with_slot(model, slot, value, dtype)
    (folder.parent / "m.bin").write_bytes(seal_model(model))
    run(["--resume_checkpoint", "m.bin", "--output_dir", folder.name, "--sample_interval", 0])
    return folder


def test_far_outside_its_running_spread(run: Callable, data: Path, tmp_path: Path) -> None:
    """A finite loss or norm is bad from the 100th good step on, and if its logarithm is ln 10 and 10 standard deviations above the mean."""
    run([*TINY, "--data_file", data, "--max_steps", 2])
    model = (tmp_path / "out" / model_name(2)).read_bytes()
    for n in (99, 100, 10**6):
        row = read_log(one_step(run, model, (n, 99, 0, 99, 0), tmp_path / f"{n}"))[0]
        loss, norm = math.log(float(row["loss"])), math.log(float(row["grad_norm"]))
        cases = [  # mean and variance of the loss and of the norm; is it good?
            (loss - math.log(9.9), 0, norm, 1, True), (loss - math.log(10.1), 0, norm, 1, False),
            (loss - 4, 0.41**2, norm, 1, True), (loss - 4, 0.39**2, norm, 1, False),
            (loss, 1, norm - math.log(9.9), 0, True), (loss, 1, norm - math.log(10.1), 0, False),
            (loss, 1, norm - 4, 0.41**2, True), (loss, 1, norm - 4, 0.39**2, False),
        ]  # fmt: skip
        for i, (*guard, good) in enumerate(cases):
            folder = one_step(run, model, (n, *guard), tmp_path / f"{n}.{i}")
            state = read_checkpoint(folder / model_name(n + 1)) if checkpoints(folder) else None
            assert (state is not None and state.updates == n + 1) == (good or n < 100), guard
            verdict, after = twin.judge((n, *guard), math.exp(loss), math.exp(norm))
            assert (verdict == "") == (good or n < 100)
            if state is not None:
                assert np.allclose(state.header[88:98].view("<f8"), after, atol=1e-6, rtol=1e-6)


def test_a_guard_of_an_older_program_is_not_used(run: Callable, data: Path, tmp_path: Path) -> None:
    """It holds no logarithms: these means would have every step skipped. The guard starts anew, in both programs."""
    run([*TINY, "--data_file", data, "--max_steps", 2])
    model = (tmp_path / "out" / model_name(2)).read_bytes()
    old = (200, -50, 0, -50, 0)
    assert not checkpoints(one_step(run, model, old, tmp_path / "new"))
    resumed = read_checkpoint(one_step(run, model, old, tmp_path / "old", kind=0) / model_name(201))
    assert resumed.updates == 201 and resumed.header[87] == 1 and resumed.header[88:98].view("<f8")[0] == 1
    file = twin.read_model(str(tmp_path / "m.bin"))
    trainer = twin.Trainer(file.config, "cpu", file)
    assert file.state.guard == old and trainer.state.guard == (0, 0, 0, 0, 0) and trainer.state.guard_kind == 1


def judged(series: np.ndarray) -> list[bool]:
    """Which steps of a series of losses and norms (steps, 2) the guard skips, until ten in a row are."""
    guard, skipped, in_row = twin.TrainingState.guard, [], 0
    for loss, norm in series.tolist():
        verdict, guard = twin.judge(guard, loss, norm, in_row)
        skipped.append(verdict != "")
        in_row = in_row + 1 if verdict else 0
        if in_row == 10:
            break
    return skipped


@pytest.mark.parametrize("seed", range(3))
def test_losses_of_any_spread(seed: int) -> None:
    """Nothing usual is skipped, also with heavy tails (one step of a hundred is 3,000 times as large); and jumps by powers of ten that last end a run."""
    random, steps = np.random.default_rng(seed), np.arange(1500)[:, None]
    learning = np.exp(0.3 * random.standard_normal((1500, 2))) * (0.1 + np.exp(-steps / 20))
    heavy = np.exp(random.standard_normal((1500, 1)) + 8 * (random.random((1500, 1)) < 0.01)) * np.ones((1, 2))
    for series, jumps in ((learning, (1e3, 1e6)), (heavy, (1e12,))):
        assert sum(judged(series)) <= (0 if series is learning else 5)
        for at, jump in itertools.product((150, 300, 1000), jumps):
            assert judged(np.where(steps >= at, jump * series, series))[at - 1 :] == [False, *[True] * 10], (at, jump)


def test_what_is_rare_is_not_skipped_for_ever() -> None:
    """Steps 1,000 times as large, none among the first 300 and one of fifty from then on: each one that is skipped alone widens what is usual."""
    random = np.random.default_rng(0)
    series = np.exp(0.1 * random.standard_normal((3000, 2)))
    series[300::50] *= 1e3
    skipped = np.flatnonzero(judged(series)).tolist()
    assert len(series) == len(judged(series)) and skipped == [300 + 50 * k for k in range(len(skipped))] and 1 <= len(skipped) <= 10


@pytest.mark.parametrize("given", ["--batch_size 1 --lr 1e-3", "--batch_size 4 --lr 3e-4"])
def test_low_noise_is_trained(run: Callable, data: Path, tmp_path: Path, given: str) -> None:
    """The bound's losses at low t are hundreds of times the others: no outliers."""
    told = run(flags(TINY, "--learn_sigma True --use_kl True --max_steps 300", given, "--data_file", data)).out
    losses = column(tmp_path / "out", "loss")
    assert "skipped" not in told and losses[100:].max() > 30 * np.median(losses[100:])
    assert read_checkpoint(tmp_path / "out" / model_name(300)).updates == 300


@pytest.mark.parametrize("jump", [30, 1000])
def test_a_jump_that_lasts(run: Callable, data: Path, tmp_path: Path, jump: float) -> None:
    """Weights of the last convolution become much larger, and so the loss by the square of that: the run ends after ten steps, and with
    --max_bad_steps 0, which skips only what is not finite, it goes on. The log's rows, judged again, say which steps were skipped."""
    run([*TINY, "--data_file", data, "--max_steps", 150])
    path = tmp_path / "out" / model_name(150)
    file = twin.read_model(str(path))
    model_files.to_state_dict(file.config, file.weights)["out.2.weight"].mul_(jump)
    twin.write_model(str(path), file)
    run(["--resume_checkpoint", path, "--max_steps", 175, "--output_dir", "all", "--max_bad_steps", 0, *QUIET])
    assert read_checkpoint(tmp_path / "all" / model_name(175)).updates == 175
    err = run(["--resume_checkpoint", "latest", "--max_steps", 200, *QUIET], code=1).err
    assert "10 steps" in err and f"no step was good from out/{model_name(150)}" in err
    losses = np.stack([column(tmp_path / "out", "loss"), column(tmp_path / "out", "grad_norm")], 1)
    assert np.median(losses[150:, 0]) > 500 * np.median(losses[100:150, 0])
    assert judged(losses) == [False] * 150 + [True] * 10


def test_what_is_not_finite_is_always_skipped(run: Callable, tmp_path: Path, make_data: Callable) -> None:
    """--max_bad_steps 0, too; and a run of nothing else ends."""
    images = (make_images(8).astype(np.float32) / 127.5 - 1).astype("<f4")
    images[5] = math.nan
    make_data("d.bin", images)
    given = flags(TINY, "--max_bad_steps 0 --log_interval 1 --max_steps 20 --batch_size 2")
    assert "skipped 5" in run([*given, "--data_file", "d.bin"]).out
    make_data("nan.bin", np.full((4, 1, 8, 8), math.nan, np.float32))
    assert "10 steps" in run([*given, "--data_file", "nan.bin", "--output_dir", "nan"], code=1).err


def test_a_bad_step_delays_a_checkpoint(run: Callable, tmp_path: Path, make_data: Callable) -> None:
    """A step at which a checkpoint is due, but bad: the next good step is saved instead, or a run could go on for long without any."""
    images = (make_images(8).astype(np.float32) / 127.5 - 1).astype("<f4")
    images[5] = math.nan
    make_data("d.bin", images)
    given = flags(TINY, "--batch_size 2 --data_file d.bin")
    run([*given, "--max_steps", 4, "--output_dir", "find"])
    bad = int(np.flatnonzero(np.isnan(column(tmp_path / "find", "loss")))[0]) + 1
    run([*given, "--max_steps", bad + 3, "--save_interval", bad, "--keep_checkpoints", 0, "--output_dir", "due"])
    assert bad + 1 in checkpoints(tmp_path / "due")


def test_the_last_step_is_bad(run: Callable, tmp_path: Path, make_data: Callable) -> None:
    """Then the weights are those of the step before, which must not be lost, nor called saved if they aren't."""
    images = (make_images(8).astype(np.float32) / 127.5 - 1).astype("<f4")
    images[5] = math.nan
    make_data("d.bin", images)
    given = flags(TINY, "--batch_size 2 --data_file d.bin --max_bad_steps 100")
    run([*given, "--max_steps", 8, "--output_dir", "find"])
    bad = int(np.flatnonzero(np.isnan(column(tmp_path / "find", "loss")))[1]) + 1  # of the second epoch: good steps came before
    run([*given, "--max_steps", bad, "--output_dir", "last"])
    saved = checkpoints(tmp_path / "last")
    assert saved == [bad]
    model = read_checkpoint(tmp_path / "last" / model_name(bad))
    assert model.updates == bad - 2 and np.isfinite(model.weights).all()


# ----------------------------------------------------------------------------------------------------------------------
# the log


def test_log(run: Callable, data: Path, tmp_path: Path) -> None:
    run([*TINY, "--data_file", data, "--max_steps", 12, "--val_data_file", data, "--val_interval", 5, "--diffusion_steps", 333])
    with open(tmp_path / "out/log.csv") as f:
        assert f.readline() == ",".join(LOG_COLUMNS) + "\n"
    rows = read_log(tmp_path / "out")
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 13)]
    assert [bool(row["val_loss"]) for row in rows] == [step in (5, 10, 12) for step in range(1, 13)]
    for step, row in enumerate(rows):
        t = twin.noise_levels(twin.Config(diffusion_steps=333), twin.TIMESTEP, step, torch.arange(4))
        counts = np.bincount((4 * t // 333).numpy(), minlength=4)
        quarters = [row[f"loss_q{q}"] for q in range(4)]
        assert [quarter != "" for quarter in quarters] == (counts > 0).tolist()
        mean = sum(float(quarter or 0) * count for quarter, count in zip(quarters, counts)) / 4
        assert float(row["loss"]) == pytest.approx(mean, rel=1e-8)


@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_copies(run: Callable, tmp_path: Path, make_data: Callable, kind: type) -> None:
    """The share of a grid's samples that training images equal, to below 16 of 255: in the log and on the page, in both programs. With lr 0 the grids of
    all these runs are the same."""

    def runs(name: str, images: np.ndarray, *more: object) -> list[str]:
        make_data(f"{name}.bin", images if kind == np.uint8 else (images / 127.5 - 1).astype(np.float32))
        given = flags(TINY, "--lr 0 --sample_interval 1 --num_samples 4 --save_interval 1 --data_file", tmp_path / f"{name}.bin", *more)
        said = run(flags(given, "--max_steps 1 --output_dir", name)).out
        run(flags("--resume_checkpoint latest --max_steps 2 --timestep_respacing 4 --eta 0 --output_dir", name))
        logged = [row["copies"] for row in read_log(tmp_path / name)]
        twin.run(flags(given, "--max_steps 2 --device cpu --compile 0 --output_dir", tmp_path / f"twin_{name}"))
        assert [row["copies"] for row in read_log(tmp_path / f"twin_{name}")] == logged
        assert [row[-1] for row in shown_run(tmp_path / name)["rows"]] == [float(share) for share in logged]
        assert f"step 1: {round(4 * float(logged[0]))} of 4 samples are copies of training images\n" in said
        return logged

    images = np.random.default_rng(0).integers(0, 256, (24, 1, 8, 8), dtype=np.uint8)
    assert runs("noise", images) == ["0", "0"]
    grid = np.array(Image.open(tmp_path / "noise/samples_0000001.png"))
    samples = [grid[2 + 66 * y :, 2 + 66 * x :][:64:8, :64:8].astype(int) for y in (0, 1) for x in (0, 1)]
    near, far = (np.where(sample < 128, sample + by, sample - by) for sample, by in zip(samples[1:], (15, 17)))
    images[[HELD_OUT[0], 2, 3, 4], 0] = samples[0], near, far, samples[3][:, ::-1]
    assert runs("two", images) == ["0.5", "0.5"]
    assert runs("mirrored", images, "--random_flip True") == ["0.75", "0.75"]
    assert runs("held_out", images, "--val_fraction 0.2") == ["0.25", "0.25"]


@pytest.mark.long
def test_data_that_are_too_large_to_be_compared(run: Callable, tmp_path: Path, make_data: Callable, capsys: pytest.CaptureFixture) -> None:
    """Copies are not counted, and a line says so."""
    data = make_data("large.bin", np.zeros((17_000, 1, 64, 64), np.float32))
    given = flags(TINY, "--attention_resolutions 32 --max_steps 1 --sample_interval 1 --num_samples 1 --timestep_respacing 2 --data_file", data)
    line = "copies are not counted in grids, because the images have more than 256 MiB"
    assert line in run(flags(given, "--output_dir ours")).out
    twin.run(flags(given, "--device cpu --compile 0 --output_dir", tmp_path / "twin"))
    assert line in capsys.readouterr().out
    assert [row["copies"] for folder in ("ours", "twin") for row in read_log(tmp_path / folder)] == ["", ""]


def test_validation_loss_depends_on_the_weights_alone(run: Callable, data: Path, tmp_path: Path, make_data: Callable) -> None:
    """t and noise are fixed for each image: with lr 0 it is always the same number, whatever the batches, and the twin's number."""
    val = make_data("val.bin", make_images(9, seed=3), np.arange(9) % 3, 3)
    given = flags(
        TINY, "--data_file", data, "--val_data_file", val, "--class_cond True --dropout 0.3 --random_flip True --val_interval 1 --max_steps 4"
    )
    for name, more in {"still": "--lr 0", "parts": "--lr 0 --microbatch 2", "moving": "--lr 1e-3"}.items():
        run(flags(given, more, "--output_dir", name))
    still, moving = column(tmp_path / "still", "val_loss"), column(tmp_path / "moving", "val_loss")
    assert len({*still}) == 1 and len({*column(tmp_path / "still", "loss")}) == 4
    assert column(tmp_path / "parts", "val_loss") == pytest.approx(still, rel=1e-7)
    assert len({*moving}) == 4
    model = twin.read_model(str(tmp_path / "moving" / model_name(4)))
    assert twin.Trainer(model.config, start=model).validation_loss(twin.open_data(str(val))) == pytest.approx(moving[-1], rel=1e-5)


def test_it_learns(run: Callable, data: Path, tmp_path: Path) -> None:
    """From 1 (the output is zero at the start, the noise has variance 1) down."""
    run(flags(TINY, "--data_file", data, "--max_steps 250 --lr 2e-3"))
    losses = column(tmp_path / "out", "loss")
    assert losses[0] == pytest.approx(1, abs=0.3)
    assert losses[-50:].mean() < 0.35


# ----------------------------------------------------------------------------------------------------------------------
# pictures


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 12), (2, 12, 8)])
def test_pictures_are_what_the_files_say(run: Callable, tmp_path: Path, make_data: Callable, shape: tuple[int, int, int]) -> None:
    """A PNG that Pillow reads, whose cells are the images that --output x.bin holds."""
    C, H, W = shape
    d = make_data("d.bin", make_images(8, *shape))
    given = flags(TINY, "--batch_size 2 --timestep_respacing 3 --num_samples 5 --sample_interval 2 --max_steps 4 --attention_resolutions", H)
    run([*given, "--data_file", d])
    sample = ["--preset", "fashion32", "--timestep_respacing", 3, "--eta", 0, "--sample", 5, "--init", f"out/{model_name(4)}", "--output"]
    run([*sample, "s.png"])
    run([*sample, "s.bin"])
    assert (tmp_path / "s.png").read_bytes() == (tmp_path / "out/samples_0000004.png").read_bytes()
    assert sorted(p.name for p in (tmp_path / "out").glob("*.png")) == ["samples_0000002.png", "samples_0000004.png"]
    images, zoom, gap = read_samples(tmp_path / "s.bin"), 64 // max(H, W), 2
    assert images.shape == (5, C, H, W) and np.abs(images).max() <= 1
    with Image.open(tmp_path / "s.png") as png:
        png.verify()
    with Image.open(tmp_path / "s.png") as png:
        grid = np.asarray(png)
        assert png.mode == ("RGB" if C == 3 else "L")
    height, width = H * zoom + gap, W * zoom + gap
    assert grid.shape[:2] == (2 * height + gap, 3 * width + gap)
    for i, image in enumerate(images):
        y, x = gap + i // 3 * height, gap + i % 3 * width
        cell = grid[y : y + H * zoom, x : x + W * zoom].reshape(H * zoom, W * zoom, -1).transpose(2, 0, 1)
        expected = np.round((image[: 3 if C == 3 else 1] + 1) * 127.5).repeat(zoom, 1).repeat(zoom, 2)
        assert np.abs(cell - expected).max() <= 1  # 0.5 may round either way
        assert (cell == expected).mean() > 0.99


@pytest.mark.parametrize("sampler", ["--sampler ddim --eta 0", "--sampler ddpm --eta 0", "--sampler ddim --eta 1"])
def test_sampling(run: Callable, data: Path, tmp_path: Path, sampler: str) -> None:
    """The images of a seed are the same in every run, whatever the size of batches and their number; noise counts where it should."""
    run(flags(TINY, "--data_file", data, "--class_cond True --max_steps 30 --ema_rate 0.5"))
    given = flags("--init", f"out/{model_name(30)}", "--timestep_respacing 8", sampler)

    def images(n: int, name: str, *more: object) -> np.ndarray:
        run(flags(given, "--sample", n, "--output", f"{name}.bin", *more))
        return read_samples(tmp_path / f"{name}.bin")

    first = images(5, "first", "--batch_size", 5)
    again, parts = images(5, "again", "--batch_size", 5), images(5, "parts", "--batch_size", 2)
    assert (tmp_path / "first.bin").read_bytes() == (tmp_path / "again.bin").read_bytes() == (tmp_path / "parts.bin").read_bytes()
    assert np.array_equal(first, again) and np.array_equal(first, parts)
    assert np.array_equal(images(2, "few"), first[:2])
    assert len({image.tobytes() for image in first}) == 5
    assert not np.array_equal(images(2, "seed", "--seed", 3), first[:2])
    assert not np.array_equal(images(2, "weights", "--use_ema", False), first[:2])
    assert np.array_equal(images(2, "eta", "--eta 0.5"), first[:2]) == ("ddpm" in sampler)  # which has no eta
    assert not np.array_equal(images(2, "other", "--sampler", "ddim" if "ddpm" in sampler else "ddpm"), first[:2])


# ----------------------------------------------------------------------------------------------------------------------
# the output folder


def test_keep_checkpoints(run: Callable, data: Path, tmp_path: Path) -> None:
    for keep, kept in ((0, [1, 2, 3, 4, 5]), (1, [5]), (2, [4, 5]), (9, [1, 2, 3, 4, 5])):
        run([*TINY, "--data_file", data, "--max_steps", 5, "--save_interval", 1, "--keep_checkpoints", keep, "--output_dir", str(keep)])
        assert checkpoints(tmp_path / str(keep)) == kept
    run([*TINY, "--data_file", data, "--max_steps", 5, "--save_interval", 2, "--output_dir", "some"])
    assert checkpoints(tmp_path / "some") == [2, 4, 5]


def test_output_folder(run: Callable, refused: Callable, data: Path, tmp_path: Path) -> None:
    given = [*TINY, "--data_file", data, "--max_steps", 4]
    (tmp_path / "a").mkdir()
    (tmp_path / "a/notes.txt").write_text("mine")
    run([*given, "--output_dir", "a", "--save_interval", 2])  # a folder that holds no run is used
    assert (tmp_path / "a/notes.txt").read_text() == "mine"
    refused([*given, "--output_dir", "a"], "a", "step 4", "--resume_checkpoint latest")
    run([*given, "--output_dir", "b/c/d"])

    # a checkpoint of one run in the folder of another
    refused(["--resume_checkpoint", f"a/{model_name(4)}", "--max_steps", 6, "--output_dir", "b/c/d"], "b/c/d", f"a/{model_name(4)}")
    # an earlier checkpoint, with a later one there
    refused(["--resume_checkpoint", f"a/{model_name(2)}", "--max_steps", 6, "--output_dir", "a"], "a", "step 4", model_name(2))
    # the same folder by other names is the same folder
    (tmp_path / "link").symlink_to("a")
    run(["--resume_checkpoint", f"./a/../a/{model_name(4)}", "--max_steps", 5, "--output_dir", "link/", *QUIET])
    assert checkpoints(tmp_path / "a") == [2, 4, 5] and len(read_log(tmp_path / "a")) == 5
    run(["--resume_checkpoint", model_name(5), "--max_steps", 6, "--output_dir", ".", *QUIET], cwd=tmp_path / "a")
    assert checkpoints(tmp_path / "a") == [4, 5, 6]

    # only a log: still a run
    (tmp_path / "e").mkdir()
    shutil.copy(tmp_path / "a/log.csv", tmp_path / "e")
    for args in ([*given, "--output_dir", "e"], ["--resume_checkpoint", "latest", "--output_dir", "e"]):
        refused(args, "e", "checkpoint", "log.csv", "away")
    # a checkpoint with the name of a later step
    shutil.copy(tmp_path / "a" / model_name(4), tmp_path / "e" / model_name(9))
    for args in (["--resume_checkpoint", path, "--max_steps", 12, "--output_dir", "e"] for path in ("latest", f"e/{model_name(9)}")):
        refused(args, f"e/{model_name(9)}")
    # a file in the place of the folder
    refused([*given, "--output_dir", data], data)


@pytest.mark.parametrize("left", ["log.csv", model_name(2), "ema_0000002.bin"])
def test_the_twin_begins_in_a_folder_without_a_run(run: Callable, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str) -> None:
    """Whatever is left of a run stays as it is, whether a new run is asked for or one that goes on."""
    monkeypatch.chdir(tmp_path)
    run(flags(TINY, "--data_file", data, "--max_steps 2 --ema_snapshots 2"))
    shutil.copy(tmp_path / "out" / model_name(2), tmp_path / "m.bin")
    for path in (tmp_path / "out").iterdir():
        if path.name != left:
            path.unlink()
    before = snapshot(tmp_path)
    for given in (flags(TINY, "--data_file", data), flags("--resume_checkpoint m.bin --max_steps 3", QUIET)):
        with pytest.raises(twin.UserError, match=f"--output_dir out: already holds a run's {left}; name a new folder"):
            twin.run([*given, "--device", "cpu"])
        assert snapshot(tmp_path) == before


@pytest.mark.parametrize("given", ["--resume_checkpoint latest", "--resume_checkpoint auto", "--keep_best True"])
def test_what_the_program_alone_does_is_said_by_the_twin(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(twin.UserError, match=f"{given.removesuffix(' True')}: ./train_unet does that"):
        twin.run([*flags(TINY, "--data_file", data, "--val_data_file", data), *given.split(), "--device", "cpu"])
    assert not list(tmp_path.iterdir())


def test_checkpoints_of_the_twin(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At their interval and at the end, the newest ones."""
    monkeypatch.chdir(tmp_path)
    for keep, kept in ((0, [2, 4, 5]), (1, [5]), (2, [4, 5])):
        given = flags(TINY, "--data_file", data, "--max_steps 5 --save_interval 2 --keep_checkpoints", keep, "--output_dir", keep)
        assert twin.run([*given, "--device", "cpu"]) == 0
        assert checkpoints(tmp_path / str(keep)) == kept and (tmp_path / str(keep) / "loss.png").exists()


def test_a_resume_that_fails_leaves_the_folder_alone(run: Callable, refused: Callable, data: Path, tmp_path: Path) -> None:
    run([*TINY, "--data_file", data, "--max_steps", 4, "--save_interval", 2])
    latest = tmp_path / "out" / model_name(4)
    latest.write_bytes(latest.read_bytes()[:-1])
    refused(["--resume_checkpoint", "latest", "--max_steps", 6], model_name(4), "move it away", "earlier")
    refused(["--resume_checkpoint", f"out/{model_name(2)}", "--max_steps", 6], model_name(4), "move it away")
    latest.rename(tmp_path / "damaged.bin")
    run(["--resume_checkpoint", "latest", "--max_steps", 3])
    assert checkpoints(tmp_path / "out") == [2, 3]


def test_weights_alone_are_not_resumed(run: Callable, refused: Callable, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run([*TINY, "--data_file", data, "--max_steps", 1])
    file = twin.read_model(str(tmp_path / "out" / model_name(1)))
    twin.write_model(str(tmp_path / "bare.bin"), twin.ModelFile(file.config, file.weights))
    assert "--batch_size" not in refused(["--resume_checkpoint", "bare.bin", "--data_file", data], "bare.bin: holds weights only", "--init")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(twin.UserError, match="bare.bin: holds weights only"):
        twin.run(["--resume_checkpoint", "bare.bin", "--data_file", str(data)])


# ----------------------------------------------------------------------------------------------------------------------
# parity with PyTorch

SMALL = dict(preset="fashion32", use_scale_shift_norm=False, num_channels=32, num_res_blocks=1, batch_size=4, max_steps=20, lr=1e-3, lr_schedule="constant", warmup_steps=0, adam_beta2=0.999,
             ema_rate=0.99, noise_schedule="linear", eta=0.0, dropout=0.0)  # fmt: skip
PARITY = {  # together they use every flag of the model; all levels are small, some are odd
    "new order, odd": (
        (3, 12, 20),
        dict(channel_mult=(1, 2, 2), attention_resolutions=(6, 3), num_head_channels=32, random_flip=True, grad_clip=0.5),
    ),
    "old order, classes, dropout": (
        (1, 16, 16),
        dict(channel_mult=(1, 2), attention_resolutions=(8,), num_heads=4, num_head_channels=-1, num_heads_upsample=2, class_cond=True,
             num_classes=7, dropout=0.3, use_new_attention_order=False, microbatch=2, warmup_steps=5),
    ),
    "scale-shift, learned sigma, cosine": (
        (3, 8, 8),
        dict(channel_mult=(1, 1), attention_resolutions=(8, 4), num_head_channels=16, use_scale_shift_norm=True, learn_sigma=True,
             noise_schedule="cosine", diffusion_steps=400, lr_schedule="cosine", weight_decay=0.05),
    ),
    "resblock up and down, everything": (
        (2, 20, 12),
        dict(num_channels=64, channel_mult=(0.5, 1, 1.5), attention_resolutions=(5,), num_heads=2, num_head_channels=-1, num_heads_upsample=4,
             resblock_updown=True, use_scale_shift_norm=True, class_cond=True, num_classes=3, dropout=0.1, learn_sigma=True,
             use_new_attention_order=False, noise_schedule="cosine", random_flip=True, batch_size=3, microbatch=1),
    ),
    "unet.cu's: average pool, nearest": (
        (1, 8, 16),
        dict(channel_mult=(1, 2, 3), num_res_blocks=2, attention_resolutions=(4, 2), num_head_channels=32, conv_resample=False, max_period=1000,
             lr_schedule="linear", warmup_steps=3),
    ),
    "one level, odd numbers of everything": (
        (1, 7, 5),
        dict(channel_mult=(1,), attention_resolutions=(7,), num_head_channels=32, noise_schedule="cosine", adam_beta1=0.5, batch_size=3, max_steps=20),
    ),
    "Muon": (  # the last one: its samples are those of any model
        (3, 12, 16),
        dict(optimizer="muon", patch_size=2, channel_mult=(1, 2), attention_resolutions=(6,), num_head_channels=32, use_scale_shift_norm=True,
             class_cond=True, num_classes=3, microbatch=2, weight_decay=0.05, grad_clip=0.5),
    ),
}  # fmt: skip


def write_parity_files(folder: Path, shape: tuple[int, int, int], settings: dict) -> tuple[object, object]:
    """d.bin and init.bin in folder, and the twin's configuration and data."""
    (folder / "d.bin").write_bytes(data_bytes(make_images(13, *shape), np.arange(13) % 3, 3))
    data = twin.open_data(str(folder / "d.bin"))
    config = make_config(SMALL | settings | dict(image_size=shape[1:], in_channels=shape[0], data_file="d.bin", seed=11))
    twin.write_model(str(folder / "init.bin"), twin.ModelFile(config, random_weights(config, 4)))
    return config, data


def command_line(config: object) -> list[str]:
    elsewhere = {*model_files.SAVED_FLAGS, "data_file", "precision"}  # the fixture of GPU runs gives --precision itself
    names = [name for name in model_files.CHECKPOINT_FLAGS if name not in elsewhere] + ["dropout"]
    return [
        "--preset",
        "fashion32",
        "--init",
        "init.bin",
        "--data_file",
        "d.bin",
        *(word for n in names for word in (f"--{n}", twin.format_value(n, getattr(config, n)))),
    ]


@pytest.mark.parametrize("name", PARITY)
def test_training_follows_pytorch(run: Callable, tmp_path: Path, name: str) -> None:
    check_training(run, tmp_path, *PARITY[name])


def quarter_tolerance(config: twin.Config, loss: float, quarters: list[float | None]) -> float:
    """Of the mean loss of a quarter of t. A loss of ect is quadratic in the difference of two answers of the network. If it is 1 / n^2 of the largest one, the
    difference is 1 / n of the largest, and rounding of the answers counts n times as much. Each passes some 160 roundings at 2^-24, and the square doubles
    that. (PyTorch's own float32 is up to 4.7e-4 off float64 where a loss is 0.02 beside 20: test_ect_step_by_step.)"""
    largest = max(filter(None, quarters))
    return max(2e-4, 2 * 160 * 2.0**-24 * math.sqrt(largest / loss)) if config.objective == "ect" else 2e-4


def check_training(run: Callable, tmp_path: Path, shape: tuple[int, int, int], settings: dict) -> None:
    """20 steps in float32 from the same random weights (none of them zero): the losses stay within 1e-4 of each other."""
    config, data = write_parity_files(tmp_path, shape, settings)
    run([*command_line(config), *QUIET])
    run(flags(command_line(config), QUIET, "--max_steps 1 --output_dir first"))
    trainer = twin.Trainer(config, start=twin.ModelFile(config, random_weights(config, 4)))
    rows = read_log(tmp_path / "out")
    for step in range(20):
        result = trainer.train_step(*twin.training_batch(config, data, step))
        row = rows[step]
        assert not result.objection
        assert float(row["loss"]) == pytest.approx(result.loss, rel=1e-4), f"step {step + 1}"
        assert float(row["lr"]) == pytest.approx(result.lr, rel=1e-6)
        assert float(row["grad_norm"]) == pytest.approx(result.grad_norm, rel=1e-3)
        quarters = [None if row[f"loss_q{q}"] == "" else float(row[f"loss_q{q}"]) for q in range(4)]
        for found, expected in zip(quarters, result.loss_quarters, strict=True):
            assert found == (expected and pytest.approx(expected, rel=quarter_tolerance(config, expected, result.loss_quarters)))
        if step == 0:  # the first moment is the gradient times 1 - beta1; every parameter's is right
            native = read_checkpoint(tmp_path / "first" / model_name(1))
            moments = model_files.to_state_dict(config, trainer.moments["exp_avg"].clone().numpy())
            scale = max(m.norm().item() for m in moments.values())
            for key, m in model_files.to_state_dict(config, native.m.copy()).items():
                # what a group norm of one channel a group follows has no gradient but rounding
                assert (m - moments[key]).norm().item() <= 1e-4 * moments[key].norm().item() + 1e-7 * scale, key
            moved, ours = native.weights - random_weights(config, 4), trainer.weights.detach().numpy()
            adams = ~(muon_mask(config) & config.muon)
            clear = adams & (np.abs(native.m) > 1e-4 * np.abs(native.m).max())
            # Adam's first update is lr * g / (|g| + eps): the sign of the gradient, so gradients that are all rounding go either way
            assert np.abs(native.weights - ours)[clear].max() <= 0.01 * result.lr + 2.0**-23 * np.abs(ours).max()
            assert (
                np.abs(moved[adams]).max() <= 1.01 * result.lr + config.weight_decay * result.lr * np.abs(ours).max() + 2.0**-23 * np.abs(ours).max()
            )
            if config.muon:  # the first direction is that of the gradient
                flat = (native.m.copy(), trainer.moments["exp_avg"].clone().numpy(), native.weights.copy(), ours)
                named = [model_files.to_state_dict(config, array) for array in (~adams, *flat)]
                for key, (is_muons, *tensors) in zip(named[0], zip(*(tensors.values() for tensors in named))):
                    m, other_m, w, other_w = (tensor.flatten(1) if is_muons.all() else tensor for tensor in tensors)
                    apart = STEEPEST * (m / m.norm() - other_m / other_m.norm()).norm().item() + 2 * ROUNDING
                    furthest = result.lr * 0.2 * max(m.shape) ** 0.5 * apart + 2.0**-22 * w.norm().item()
                    assert not is_muons.all() or (w - other_w).norm().item() <= furthest, key
    if config.muon:  # seen: 2e-5 of the way
        muons, native, ours = muon_mask(config), read_checkpoint(tmp_path / "out" / model_name(20)), trainer.weights.detach().numpy()
        assert np.linalg.norm((native.weights - ours)[muons]) <= 1e-3 * np.linalg.norm((ours - random_weights(config, 4))[muons])


@pytest.mark.parametrize(
    "name",
    [
        "old order, classes, dropout",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("resblock up and down, everything", "unet.cu's: average pool, nearest")),
    ],
)
def test_checkpointing_changes_no_bit(run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """--use_checkpoint computes the same once more: in the program, and in the twin."""
    config, data = write_parity_files(tmp_path, *PARITY[name])
    weights, blocks = [], []  # blocks: those that the twin checkpoints
    monkeypatch.setattr("common.model.checkpoint", lambda block, *inputs, **how: blocks.append(block) or checkpoint(block, *inputs, **how))
    for on in (False, True):
        run(flags(command_line(config), QUIET, "--max_steps 3 --output_dir", str(on), "--use_checkpoint", str(on)))
        trainer = twin.Trainer(dataclasses.replace(config, use_checkpoint=on), start=twin.ModelFile(config, random_weights(config, 4)))
        for step in range(3):
            trainer.train_step(*twin.training_batch(config, data, step))
        weights.append(trainer.weights.detach().numpy().copy())
        assert bool(blocks) == on
    assert (tmp_path / "True" / model_name(3)).read_bytes() == (tmp_path / "False" / model_name(3)).read_bytes()
    assert np.array_equal(*weights)


@pytest.mark.long
def test_checkpointing_takes_less_memory(run: Callable) -> None:
    """Nearly half of the activations go, which are 0.08 of 0.1 GiB on a CPU: a third of all. On a GPU 0.04 of workspace are added: a quarter."""
    line = ["--bench", 1, "--preset", "fashion32", "--batch_size", 16, "--use_checkpoint"]
    kept, again = (json.loads(run([*line, on], binary="bench").out)["memory_gib"] for on in (False, True))
    assert again < 0.8 * kept


class Double(torch.nn.Module):
    """A model that computes in float64, whatever it is given."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model.double()

    def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return self.model(x.double(), t.double(), y)


SAMPLERS = ["--sampler ddim --timestep_respacing 7 --eta 0", "--sampler ddpm --timestep_respacing 9", "--sampler ddim --timestep_respacing ddim10 --eta 0.7",
            "--sampler ddpm --timestep_respacing 3,2,4", "--sampler ddim --timestep_respacing 5 --eta 0 --clip_denoised False",
            "--sampler ddpm --timestep_respacing 1"]  # fmt: skip


# What these networks compute, test_training_follows_pytorch sees, and test_samplers_follow_pytorch what samplers do: `make test` draws from two of them.
DRAWN = ["resblock up and down, everything", "one level, odd numbers of everything"]


@pytest.mark.parametrize(
    "name, sampler", [pytest.param(*row, marks=[pytest.mark.long] * (row[0] not in DRAWN)) for row in zip(PARITY, SAMPLERS)], ids=str
)
def test_sampling_follows_pytorch(run: Callable, tmp_path: Path, name: str, sampler: str) -> None:
    check_sampling(run, tmp_path, *PARITY[name], sampler)


def check_sampling(run: Callable, tmp_path: Path, shape: tuple[int, int, int], settings: dict, sampler: str) -> None:
    """The same images from the same weights and seed. How much rounding matters depends on the model and on the sampler's steps, so the
    tolerance is measured: the twin's sampler in float32 differs from the same sampler in float64 by so much, and so may we, times 4."""
    config, _ = write_parity_files(tmp_path, shape, settings)
    run(["--init", "init.bin", "--sample", 5, "--batch_size", 3, "--seed", 3, "--output", "s.bin", *sampler.split()])
    config = dataclasses.replace(config, seed=3, **twin.parse_flags(sampler.split(), twin.FLAGS, ""))
    validate(config)
    model = twin.build_model(config, random_weights(config, 4))
    single = twin.draw(model, config, 5).numpy()
    double = twin.draw(Double(model), config, 5).numpy()
    native = read_samples(tmp_path / "s.bin")
    assert np.abs(double).max() > 0.5 and np.abs(double[0] - double[1]).max() > 0.1
    for difference in (np.linalg.norm, np.abs):
        ours, theirs = np.max(difference(native - double)), np.max(difference(single - double))
        assert ours <= 4 * theirs + 1e-6, f"{ours:.3g} from float64, PyTorch's float32 {theirs:.3g}"
        assert theirs < 1e-2 * np.max(difference(double)), "rounding matters so much here that the test says nothing"


# ----------------------------------------------------------------------------------------------------------------------
# validation


def test_validation_is_a_draw_over_the_whole_file(run: Callable, data: Path, tmp_path: Path) -> None:
    """Of a file that is sorted: 600 black images, then 400 noisy ones. Both programs measure the same loss, near that of all images, and say in the
    checkpoint that it is a draw's. Of up to 512 images all are taken, in their order."""
    images = np.zeros((1000, 1, 8, 8), np.uint8)
    images[600:] = np.random.default_rng(0).integers(0, 256, (400, 1, 8, 8))
    losses, crcs = {}, {}
    for name, count in ("many", 1000), ("few", 512):
        (tmp_path / f"{name}.bin").write_bytes(data_bytes(images[:count]))
        given = flags(TINY, "--predict x0 --max_steps 1 --lr 0 --val_interval 1 --data_file", data, "--val_data_file", tmp_path / f"{name}.bin")
        run([*given, "--output_dir", name])
        assert twin.run(flags(given, "--device cpu --output_dir", tmp_path / f"twin {name}")) == 0
        losses[name], theirs = (column(tmp_path / folder, "val_loss")[0] for folder in (name, f"twin {name}"))
        assert losses[name] == pytest.approx(theirs, rel=1e-4)
        headers = [read_checkpoint(tmp_path / folder / model_name(1)).header for folder in (name, f"twin {name}")]
        assert headers[0][118] == headers[1][118]
        crcs[name] = (headers[0][118], np.frombuffer((tmp_path / f"{name}.bin").read_bytes(), "<i4", 1, 32)[0])
    assert crcs["few"][0] == crcs["few"][1] and crcs["many"][0] != crcs["many"][1]
    trainer = twin.Trainer(make_config(twin.parse_flags(given, twin.FLAGS), twin.open_data(str(data))))
    everything = trainer.validation_loss(twin.open_data(str(tmp_path / "many.bin")))
    assert losses["many"] == pytest.approx(everything, rel=0.05) and abs(losses["few"] / everything - 1) > 0.1


def test_a_validation_loss_that_is_not_finite_is_told(run: Callable, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    broken = make_images(4).astype(np.float32)
    broken[2, 0, 3] = np.nan
    (tmp_path / "nan.bin").write_bytes(data_bytes(broken))
    given = flags(TINY, "--max_steps 2 --val_interval 1 --data_file", data, "--val_data_file", tmp_path / "nan.bin")
    out = run([*given, "--keep_best", True]).out
    assert out.count("nan.bin: ") == 2 and not (tmp_path / "out/best.bin").exists()
    assert twin.run(flags(given, "--device cpu --output_dir", tmp_path / "twin")) == 0
    assert capsys.readouterr().out.count("nan.bin: ") == 2
    assert [row["val_loss"] for row in read_log(tmp_path / "twin")] == ["", ""]
