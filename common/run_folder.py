"""The output folder of a run: checkpoints, log.csv, pictures; and what a run starts from."""

from __future__ import annotations

import contextlib
import csv
import errno
import fcntl
import io
import math
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np

from common import files
from common.config import check_ema_rate, default_preset, make_config
from common.data_files import Data, open_data, with_pictures
from common.files import MODEL_MAGIC
from common.flags import Config, preset_flags
from common.formats import SNAPSHOT_NAME, read_model, snapshot_number
from common.model_files import HAS_EMA, HAS_TRAINING, HEADER, ModelFile, TrainingState, bin_chunks, checkpoints, trusted, unpack_header
from common.program import UserError

LOG_COLUMNS = "step,loss,lr,grad_norm,ms,loss_q0,loss_q1,loss_q2,loss_q3,val_loss,seconds"


@dataclass
class StepResult:
    step: int  # finished steps, so the first is 1
    loss: float
    lr: float
    grad_norm: float  # before clipping
    loss_quarters: list[float | None]  # mean loss of the samples in each quarter of the noise levels
    objection: str  # why the step was skipped, or ""


def progress_line(config: Config, r: StepResult, skipped: int, seconds: float, mean: float, val_loss: float | None) -> str:
    """What the screen shows of a step. seconds: a step's; mean: of recent losses."""
    left = int((config.max_steps - r.step) * seconds)
    line = (
        f"step {r.step}/{config.max_steps} | loss {r.loss:.4f} (mean {mean:.4f}) | lr {r.lr:.2e} | "
        f"norm {r.grad_norm:.3f} | {1000 * seconds:.1f} ms | {config.batch_size / seconds:.1f} images/s | "
        f"ETA {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
    )
    return line + (f" | val {val_loss:.4f}" if val_loss is not None else "") + f" | skipped {skipped}" * bool(skipped)


def complete_row(row: str) -> str:
    """A row of log.csv with as many columns as it has: programs of before wrote no seconds, and something else may have damaged a row."""
    columns = LOG_COLUMNS.count(",") + 1
    fields = row.rstrip("\n").split(",")[:columns]
    return ",".join(fields + [""] * (columns - len(fields))) + "\n"


def seconds_of(rows: list[str]) -> float:
    """How long the run of these rows of log.csv has taken; where they do not say it, the time of the steps alone."""
    seconds = 0.0
    with contextlib.suppress(csv.Error):  # what follows a row that can't be one
        for row in csv.DictReader(rows, LOG_COLUMNS.split(",")):
            with contextlib.suppress(TypeError, ValueError):  # a row that something else has damaged
                told = float(row["seconds"]) if row["seconds"] else seconds + float(row["ms"]) / 1000
                seconds = told if seconds <= told < 1e9 else seconds
    return seconds


BEST = "best.bin"  # --keep_best: a hard link to the checkpoint of the lowest validation loss, so that it outlives its other name


class RunFolder:
    """The output folder of a run, held by its descriptor: it stays the same one when it is moved, or when another takes its name."""

    def __init__(self, path: str):
        self.path, self.moved, self.files_wait, self.tried = path, False, False, 0.0  # tried: when pictures last were
        self.waiting: dict[str, Any] = {}  # pictures that could not be written, by name
        try:
            os.makedirs(path, exist_ok=True)
            self.descriptor = files.open_folder(path)
        except OSError as e:
            raise UserError(f"--output_dir {path}: can't be written to ({e.strerror}); choose another") from None

    def name(self, file: str) -> str:
        return f"{self.path}/{file}"

    def has_its_name(self) -> bool:
        """False: it was moved or removed."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.descriptor))
        except FileNotFoundError:
            return False

    def check(self, step: int) -> str:
        """UserError if it was removed: then there is no place for checkpoints. What there is to tell if it was moved, or ""."""
        if os.fstat(self.descriptor).st_nlink == 0:
            raise UserError(f"{self.path}: was removed while the run wrote there; stopped after step {step}")
        if self.moved or self.has_its_name():
            return ""
        self.moved = True
        return f"{self.path}: was moved; the run goes on in it, wherever it is now"

    def checkpoints(self) -> dict[int, str]:
        """step -> name, oldest first."""
        found = ((re.fullmatch(r"model_(\d+)\.bin", name), name) for name in os.listdir(self.descriptor))
        return dict(sorted((int(match[1]), name) for match, name in found if match))

    def leave_later_snapshots(self, first_step: int) -> None:
        """Snapshots of later steps than a run begins at are of steps that it does again, maybe otherwise: no average of this run may take them. They
        stay under another name."""
        names = [name for name in sorted(os.listdir(self.descriptor)) if re.fullmatch(SNAPSHOT_NAME, name) and snapshot_number(name) > first_step]
        for name in names:
            left, k = f"{name}.left", 2
            while files.is_there(left, self.descriptor):
                left, k = f"{name}.left{k}", k + 1
            try:
                os.rename(name, left, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
            except OSError as e:
                raise UserError(f"{self.name(name)}: can't be renamed to {left} ({e.strerror}); move it away") from None
        if names:
            told = "they are called ema_STEP.bin.left now (or .left2 and so on), and no average takes them"
            print(f"{self.path}: snapshots ema_STEP.bin beyond step {first_step}, where this run goes on: {len(names)}; {told}")

    def best(self) -> tuple[Config, TrainingState] | None:
        """What best.bin, the checkpoint that --keep_best keeps, says of its run; None: there is none."""
        if not files.is_there(BEST, self.descriptor):
            return None
        try:
            with files.open_file(BEST, self.descriptor) as f:
                header = np.frombuffer(f.read(HEADER.itemsize), HEADER)[0]
        except (OSError, ValueError, IndexError):
            header = None
        if header is None or header["magic"] != MODEL_MAGIC or header["contents"] != HAS_EMA | HAS_TRAINING:
            raise UserError(f"{self.name(BEST)}: is no checkpoint; move it away, for --keep_best would replace it")
        return trusted(self.name(BEST), unpack_header, header)

    def link(self, file: str, name: str) -> None:
        """Gives a file a second name, in place of what has that name; a copy, where there are no hard links. OSError if neither can be done."""
        temporary = f"{name}.tmp{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):  # a killed process of this number may have left it
            os.unlink(temporary, dir_fd=self.descriptor)
        try:
            os.link(file, temporary, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
        except OSError:
            with files.open_file(file, self.descriptor) as source, files.atomic_file(name, self.descriptor) as copy:
                shutil.copyfileobj(source, copy)
            return
        try:
            os.replace(temporary, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
            os.fsync(self.descriptor)
        finally:
            with contextlib.suppress(FileNotFoundError):  # it is still there if both names were this file's before
                os.unlink(temporary, dir_fd=self.descriptor)

    def write(self, file: str, chunks: Iterable[Any]) -> None:
        """OSError if it can't be written; then what was there before is untouched."""
        with files.atomic_file(file, self.descriptor) as f:
            f.writelines(chunks)

    def write_or_wait(self, file: str, content: Any) -> str:
        """A picture. Those that don't fit on the disk wait until they do. Returns what there is to tell, or ""."""
        self.waiting[file] = content
        return "" if self.files_wait else self.write_waiting()

    def write_waiting(self) -> str:
        """Tries it again. Returns what there is to tell, or ""."""
        error, file = "", ""
        self.tried = time.monotonic()
        while self.waiting and not error:
            file = next(iter(self.waiting))
            try:
                self.write(file, [self.waiting[file]])
                del self.waiting[file]
            except OSError as e:
                error = e.strerror
        before, self.files_wait = self.files_wait, bool(self.waiting)
        if before == self.files_wait:
            return ""
        return f"{self.name(file)}: " + (f"can't be written ({error}); pictures wait" if error else "is written again, and no picture is missing")

    def close(self) -> None:
        os.close(self.descriptor)
        if self.waiting:
            missing = f"could not be written, and so {len(self.waiting)} pictures are missing, for want of room; the rest is there"
            raise UserError(f"{self.name(next(iter(self.waiting)))}: {missing}")


class Log:
    """log.csv, a row per step. A resumed run keeps the rows up to the step that it resumes from."""

    def __init__(self, folder: RunFolder, step: int):
        self.folder, self.path, kept = folder, folder.name("log.csv"), []
        self.rows, self.error = b"", ""  # rows: those that the file still lacks, because of this error
        if step > 0 and files.is_there("log.csv", folder.descriptor):
            with self.reader() as f:
                kept = [complete_row(row) for row in f if re.fullmatch(r"[0-9]{1,18}", row.split(",")[0]) and int(row.split(",")[0]) <= step]
        self.began = time.perf_counter() - seconds_of(kept)  # when the run would have begun if it had never paused
        try:
            folder.write("log.csv", [LOG_COLUMNS.encode() + b"\n", *(row.encode() for row in kept)])
        except OSError as e:
            raise UserError(f"{self.path}: can't be written ({e.strerror}); choose a folder that exists and is yours") from None
        self.descriptor = os.open("log.csv", os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder.descriptor)

    def reader(self) -> IO[str]:
        try:
            return io.TextIOWrapper(files.open_file("log.csv", self.folder.descriptor), errors="replace")
        except OSError as e:
            e.filename = self.path
            raise

    def write(self, r: StepResult, ms: float, val_loss: float | None) -> str:
        """Adds a row. On a full disk rows wait until it is full no more. Returns what there is to tell about that, or ""."""
        fields = [r.loss, r.lr, r.grad_norm, ms, *r.loss_quarters, val_loss, time.perf_counter() - self.began]
        self.rows += (",".join([str(r.step), *("" if v is None else f"{v:.9g}" for v in fields)]) + "\n").encode()
        before, self.error = self.error, ""
        try:
            while self.rows:
                self.rows = self.rows[os.write(self.descriptor, self.rows) :]
        except OSError as e:
            self.error = e.strerror
        if bool(before) == bool(self.error):
            return ""
        return f"{self.path}: " + (f"can't be written ({self.error}); rows wait" if self.error else "is written again, and no row is missing")

    def val_loss(self, step: int) -> float:
        """The validation loss in the row of a step; infinite: there is none."""
        with self.reader() as f:
            found = [row["val_loss"] for row in csv.DictReader(f) if row["step"] == str(step)]
        try:
            value = float(found[-1])
        except (IndexError, TypeError, ValueError):
            return math.inf
        return value if math.isfinite(value) else math.inf

    def close(self) -> None:
        os.close(self.descriptor)
        if self.rows:
            raise UserError(f"{self.path}: its last rows could not be written ({self.error})")


def plot_loss(log: Log) -> bytes:
    """loss.png from log.csv. Light: every step's loss; dark: its mean; orange: validation."""
    from matplotlib.figure import Figure  # takes a second, and only this needs it

    with log.reader() as rows:
        table = np.genfromtxt(rows, delimiter=",", names=True, ndmin=1, comments=None)
    axes = (figure := Figure(figsize=(9, 5), layout="constrained")).add_subplot()
    window = max(1, len(table) // 50)
    mean = np.convolve(table["loss"], np.ones(window) / window, "valid")
    axes.plot(table["step"], table["loss"], "lightblue", label="loss")
    axes.plot(table["step"][window - 1 :], mean, "darkblue", label=f"mean of {window} steps")
    validated = np.isfinite(table["val_loss"])
    if validated.any():
        axes.plot(table["step"][validated], table["val_loss"][validated], "orange", label="validation")
    axes.set(xlabel="step", ylabel="loss", yscale="log")
    axes.legend()
    figure.savefig(buffer := io.BytesIO(), format="png", dpi=100)
    return buffer.getvalue()


# How long a checkpoint that can't be written may be tried again, and after which time. Training goes on meanwhile. Ten minutes are enough for whoever
# sees the message to make room. If nobody does, ten minutes of steps are lost, no night's. At the end nothing goes on meanwhile, and whoever has stopped
# a run may soon kill it: then it is a quarter of a minute.
PATIENCE, PATIENCE_AT_THE_END, RETRY_AFTER = 600.0, 15.0, 5.0  # seconds


@dataclass
class Retries:
    """What a kind of model file (checkpoints, or snapshots) waits for while the disk has no room for its files. Each kind has a state of its own: a
    snapshot that could be written says nothing about checkpoints, which are larger."""

    failing_since: float = 0.0  # when a file of this kind first could not be written; 0: the latest one was written
    next_time: float = 0.0  # when it is tried again


class Keeper:
    """The checkpoints of a run: an older one goes only when a step from the newest was good. tell: what shows a sentence. best_loss: with --keep_best
    the validation loss of best.bin, infinite if it is unknown; None without. val_loss: after the latest step, if it was measured there. resumed_from: the
    checkpoint that was resumed, which may lie in another folder."""

    def __init__(self, folder: RunFolder, keep: int, step: int, best_loss: float | None = None, resumed_from: str = ""):
        self.folder, self.keep, self.tell, self.resumed_from = folder, keep, print, resumed_from
        self.best_loss = best_loss
        self.val_loss: float | None = None
        self.saved, self.proven = step, -1 if step else 0  # the newest checkpoint, and the newest from which a step was good
        self.snapshot = step  # the newest of the averages
        self.checkpoint_retries, self.snapshot_retries = Retries(), Retries()

    def saves(self, step: int, interval: int) -> bool:
        """Whether a checkpoint is to be written after this step; late, if a bad step or a full disk was in the way."""
        return interval > 0 and step // interval > self.saved // interval and time.monotonic() >= self.checkpoint_retries.next_time

    def takes_snapshot(self, step: int, interval: int) -> bool:
        """The same of a snapshot."""
        return interval > 0 and step // interval > self.snapshot // interval and time.monotonic() >= self.snapshot_retries.next_time

    def save(self, file: ModelFile) -> None:
        """A checkpoint."""
        if not file.is_finite():
            self.stop_run(file.state.step, "weights, their average or moments are not finite and were not saved")
        name = f"model_{file.state.step:07d}.bin"
        if self.write(name, file, file.state.step, self.checkpoint_retries):
            self.saved = file.state.step
            self.keep_best(name)

    def keep_best(self, checkpoint: str) -> None:
        """Makes best.bin this checkpoint, just written, if its validation loss is the lowest. One whose step has none, because the data ended the
        run, is not compared."""
        if self.best_loss is None or self.val_loss is None:
            return
        loss = float(f"{self.val_loss:.9g}")  # as in log.csv: a resumed run decides as one that never paused
        if not loss < self.best_loss:
            return
        try:
            self.folder.link(checkpoint, BEST)
            self.best_loss = loss
        except OSError as e:
            failure = f"can't be written ({e.strerror}); what was there before is untouched"
            self.tell(f"{self.folder.name(BEST)}: {failure}; the run goes on, and {checkpoint} is the best checkpoint until now")

    def save_snapshot(self, file: ModelFile, step: int) -> None:
        """The averages by power functions."""
        if self.write(f"ema_{step:07d}.bin", file, step, self.snapshot_retries):
            self.snapshot = step

    def write(self, name: str, file: ModelFile, step: int, retries: Retries) -> bool:
        """Whether a model file could be written; if not, it is tried again later. What never gets better ends the run: a limit on the size of files.
        retries: those of this kind of file."""
        path = self.folder.name(name)
        try:
            self.folder.write(name, bin_chunks(file))
        except OSError as e:
            told, now = f"{path}: writing failed ({e.strerror}); what was there before is untouched", time.monotonic()
            self.folder.check(step)
            hopeless = e.errno == errno.EFBIG  # the file is above a limit of size (ulimit -f)
            if not hopeless and not retries.failing_since:
                retries.failing_since = now
                self.tell(f"{told}; it is tried again for {PATIENCE / 60:.0f} minutes")
            if hopeless or now - retries.failing_since > PATIENCE:
                raise UserError(f"{told}; stopped after step {step}; {self.saved_so_far()}") from None
            retries.next_time = now + RETRY_AFTER
            return False
        if retries.failing_since:
            self.tell(f"{path}: is written again")
        retries.failing_since, retries.next_time = 0.0, 0.0
        return True

    def saved_so_far(self) -> str:
        if not self.saved:
            return "no checkpoint was written yet"
        resumed = "latest" if self.saved in self.folder.checkpoints() else self.resumed_from
        return f"saved is step {self.saved}; --resume_checkpoint {resumed} goes on from there"

    def finish(self, step: int, save: Callable[[], bool], stop: list[str]) -> None:
        """Calls save until it has saved everything. A disk that is full is waited for, but not for long, and not beyond another signal."""
        signals, began = len(stop), time.monotonic()
        while not save():
            if len(stop) > signals or time.monotonic() - began > PATIENCE_AT_THE_END:
                raise UserError(f"{self.folder.path}: step {step} could not be saved; {self.saved_so_far()}")
            time.sleep(1)

    def prove(self) -> None:
        """A step from the newest checkpoint was good."""
        if self.proven != self.saved:
            self.proven, names = self.saved, list(self.folder.checkpoints().values())
            for name in names[: -self.keep] if self.keep else []:
                os.unlink(name, dir_fd=self.folder.descriptor)

    def waits(self) -> bool:
        """Whether there are more checkpoints than are to be kept."""
        return 0 < self.keep < len(self.folder.checkpoints())

    def stop_run(self, step: int, why: str) -> NoReturn:
        """UserError, with what to go on from after a run that broke."""
        files = {step: self.folder.name(name) for step, name in self.folder.checkpoints().items()}
        if not files:
            advice = "no checkpoint was written yet"
        elif self.proven in list(files)[-1:]:
            advice = f"the last good checkpoint is {files[self.proven]}"
        else:
            *before, newest = files.values()
            advice = f"no step was good from {newest}, so move it away and " + (f"go on from {before[-1]}" if before else "start again")
        raise UserError(f"stopped at step {step}: {why}; {advice}; a lower --lr or a --warmup_steps may help")


def check_output_dir(config: Config, start: ModelFile | None) -> None:
    """An output folder holds one run: a new run needs a folder without one, a resumed run its own or an empty one."""
    folder, saved = config.output_dir, checkpoints(config.output_dir)
    best = os.path.join(folder, BEST)
    if config.keep_best and not saved and os.path.exists(best):
        if not (config.resume_checkpoint and os.path.samefile(best, start.path)):
            raise UserError(f"{best}: is another run's; move it away, or choose another --output_dir")
    if not saved and not os.path.exists(os.path.join(folder, "log.csv")):
        return
    if not config.resume_checkpoint:
        hint = "; continue it with --resume_checkpoint latest"
        hint = hint if saved else "'s log.csv, but no checkpoint to continue it from; move log.csv away to start again"
        raise UserError(f"{folder}: already holds a run{hint}, or choose another --output_dir")
    if not os.path.samefile(os.path.dirname(start.path) or ".", folder):
        raise UserError(f"{folder}: already holds a run, but {start.path} is not part of it; choose another --output_dir")
    later = [path for step, path in saved.items() if step > start.state.step]
    if later and os.path.samefile(later[-1], start.path):
        raise UserError(f"{later[-1]}: holds step {start.state.step}; rename it to model_{start.state.step:07d}.bin")
    if later:
        told = f"{later[-1]}: is later than {start.path}"
        raise UserError(f"{told}; resume that one (latest), move it away, or choose another --output_dir")


@contextlib.contextmanager
def lock_folder(path: str, folder: int | None = None) -> Iterator[None]:
    """One process at a time trains in a folder: a file there is locked until the process ends, however it ends, and
    says whose the lock is. folder: its descriptor; without, only a file that is there already is looked at."""
    create = folder is not None
    how = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    try:
        descriptor = os.open(".lock" if create else f"{path}/.lock", how, 0o666, dir_fd=folder)
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise UserError(f"{path}/.lock: is a link, and a run's is a file of its own; remove it") from None
        if create or not isinstance(e, FileNotFoundError):
            raise UserError(f"--output_dir {path}: can't be written to ({e.strerror}); choose another") from None
        yield
        return
    try:
        with contextlib.suppress(OSError):  # a file system without locks has none
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                who = os.pread(descriptor, 127, 0).decode(errors="replace").partition("\n")[0] or "another process"
                raise UserError(f"{path}: {who} trains there; wait until it ends, or choose another --output_dir") from None
        there = os.fstat(descriptor)
        empty = there.st_size == 0 and there.st_nlink == 1
        if not stat.S_ISREG(there.st_mode) or not (empty or os.pread(descriptor, 8, 0) == b"process "):
            raise UserError(f"{path}/.lock: is no run's lock, but something else; move it away")
        if create:
            with contextlib.suppress(OSError):  # a full disk doesn't say whose it is
                os.ftruncate(descriptor, 0)
                who = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')},\n"
                os.pwrite(descriptor, who.encode(), 0)
        yield
    finally:
        os.close(descriptor)


def lacks_file(config: Config, step: int, name: str, interval: int) -> bool:
    """Whether the output folder lacks a file of the step that a resumed run goes on from, because the run was killed after it had written its
    checkpoint. interval: the steps between two such files. A run that goes on in a new folder lacks none there."""
    due = interval > 0 and (step % interval == 0 or step >= config.max_steps)
    own = config.resume_checkpoint != "" and os.path.exists(f"{config.output_dir}/model_{step:07d}.bin")
    return due and own and not os.path.exists(f"{config.output_dir}/{name}")


@contextlib.contextmanager
def run_folder(config: Config, start: ModelFile | None, changed: Callable[[Config, TrainingState], bool]) -> Iterator[tuple[RunFolder, Log, Keeper]]:
    """The output folder as this process's alone, for a run that starts there or is resumed. changed(config, state): whether its validation losses mean
    something else than those of such a checkpoint."""
    step = start.state.step if config.resume_checkpoint else 0
    folder = RunFolder(config.output_dir)
    with lock_folder(folder.path, folder.descriptor):
        if not folder.has_its_name():
            raise UserError(f"{folder.path}: was moved or replaced while the run began; start it again")
        check_output_dir(config, start)  # again, now that nobody else can change it
        files.remove_leftovers(folder.descriptor, "model_", "samples_", "log.csv.", "loss.png.", "ema_", f"{BEST}.")
        folder.leave_later_snapshots(step)
        best = folder.best() if config.keep_best and step else None
        log = Log(folder, step)
        # The run may have been resumed in between with other flags, so best.bin is compared by what itself says.
        comparable = best is not None and not changed(*best)
        best_loss = log.val_loss(best[1].step) if best and comparable else math.inf
        if best and math.isinf(best_loss):
            why = (
                f"log.csv has no validation loss of its step {best[1].step}"
                if comparable
                else "its validation loss can't be compared with those of this run"
            )
            print(f"{folder.name(BEST)}: {why}, so the next checkpoint becomes the best", flush=True)
        keeper = Keeper(folder, config.keep_checkpoints, step, best_loss if config.keep_best else None, config.resume_checkpoint)
        # The run may have been killed after it wrote its best checkpoint, and before it made best.bin a link to it.
        newest = f"model_{step:07d}.bin"
        known = best is None or math.isfinite(best_loss)
        if step and config.keep_best and known and newest in folder.checkpoints().values() and not changed(start.config, start.state):
            keeper.val_loss = log.val_loss(step)
            keeper.keep_best(newest)
        yield folder, log, keeper
        log.close()
        folder.close()


# ======================================================================================================================
# from flags to a run


def find_data(path: str, checkpoint: str) -> str:
    """A checkpoint's data: where it says, or from a folder above its own, where the run may have been started."""
    if not os.path.exists(path):
        for folder in Path(checkpoint).absolute().parents:
            if (folder / path).exists():
                return str(folder / path)
    return path


def open_start(flags: dict[str, Any]) -> ModelFile | None:
    """The model file that a run with these flags starts from, or resumes."""
    path, folder = flags.get("resume_checkpoint", ""), flags.get("output_dir", Config.output_dir)
    if path and flags.get("init"):
        raise UserError("--init and --resume_checkpoint: a run starts from one of them; leave the other out")
    if path == "latest":
        if not checkpoints(folder):
            rest = ", once its log.csv is moved away" if os.path.exists(f"{folder}/log.csv") else ""
            raise UserError(f"--resume_checkpoint latest: {folder} holds no checkpoint; leave the flag out to start there{rest}")
        path = list(checkpoints(folder).values())[-1]
    if not (path or flags.get("init")):
        return None
    start = read_model(path or flags["init"], flags)
    if path and (start.m is None or start.ema is None):
        raise UserError(f"{path}: holds weights only, no moments to resume from; --init starts a new run from it")
    if not start.is_finite():
        raise UserError(f"{start.path}: its weights, their average or moments are not finite; move it away and use an earlier checkpoint")
    return start


def prepare_run(flags: dict[str, Any]) -> tuple[Config, Data | None, ModelFile | None]:
    """From flags to what a run needs: its configuration, its data and what it starts from. Creates nothing."""
    flags, data = dict(flags), None
    if flags.get("resume_checkpoint") == "auto":  # the newest checkpoint; without one the run is new
        flags["resume_checkpoint"] = "latest" if checkpoints(flags.get("output_dir", Config.output_dir)) else ""
    resume = bool(flags.get("resume_checkpoint"))
    named = flags.keys() & {"data_file", "data_dir"}
    if len(named) == 2:
        raise UserError("--data_file and --data_dir: a run trains on one of them; leave the other out")
    for name in "data_dir", "data_file", "init":
        if flags.get(name) == "":
            raise UserError(f"--{name}: is empty; give a path, or leave the flag out")
    if not (flags.get("sample") or flags.get("init_model_only")):
        with lock_folder(flags.get("output_dir", Config.output_dir)):
            pass
    start = open_start(flags)
    if flags.get("sample"):
        config = make_config(flags, None, start, resume)
        read = [start.path if start else "", config.data_file, config.start_from, config.inpaint, config.mask, config.values, config.cond_file]
        files.check_output("--output", config.output, read, files.is_samples)
        return config, None, start
    if resume and not named:
        path = find_data(start.config.data_file, start.path)
        flags["data_dir" if os.path.isdir(path) else "data_file"] = path
    names_pictures = "cond_file" in flags
    if resume and not names_pictures and start.config.cond_file:
        flags["cond_file"] = find_data(start.config.cond_file, start.path)
    if flags.get("data_dir"):
        # Whether there are classes, and what the pictures of a condition are, is not known yet.
        later = {"class_cond", "class_dropout", "guidance_scale", "classes", "cond_file", "val_cond_file", "cond_channels", "cond_dropout"}
        unlabelled = {name: value for name, value in flags.items() if name not in later} | {"class_cond": False}
        from common.pictures import open_pictures  # needs Pillow and tqdm, which who trains on a data file does without

        data = open_pictures(flags["data_dir"], start.config if start else make_config(unlabelled))
    else:
        path = flags.get("data_file") or preset_flags(flags.get("preset") or default_preset(flags)[0])["data_file"]
        if os.path.exists(path) or not flags.get("init_model_only") or "data_file" in flags:
            data = open_data(path)
    if data:
        flags["data_file"] = data.path
        data = with_pictures(data, "cond_file", flags.get("cond_file", ""))
    config = make_config(flags, data, start, resume)
    check_ema_rate(config)
    if data:
        data.check(config)
    # A folder of pictures had no checksum in older checkpoints.
    is_known = resume and not (os.path.isdir(data.path) and start.state.data_crc == 0)
    if is_known and not named and (len(data.images), data.crc) != (start.state.data_images, start.state.data_crc):
        flag = "--data_dir" if os.path.isdir(data.path) else "--data_file"
        raise UserError(f"{data.path}: is not the data that {start.path} was trained on; name it, or this one, with {flag}")
    if resume and not names_pictures and data.pictures and data.pictures.crc != start.state.cond_crc:
        told = f"does not hold the pictures that {start.path} was trained with"
        raise UserError(f"{data.pictures.path}: {told}; name them, or this file, with --cond_file")
    if not config.init_model_only:
        check_output_dir(config, start)
    return config, data, start
