"""What every Python program does: it ends in one sentence, whatever goes wrong, and on Ctrl-C at once.

A program calls begin() before it imports PyTorch, which takes seconds: until then a Ctrl-C would print a page of traceback, and --help and a mistake
in the command line need no PyTorch. This module needs Python alone.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import math
import os
import re
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any


class UserError(Exception):
    """What one sentence explains: run_program() prints it after the program's name, and exits with 1."""


# Faults of the computer and of programs, which must not be taken for those of a file that is read meanwhile. (Where other people's code raises any
# kind at a damaged file, the last two may be the file's, too.)
NOT_OF_DATA = (MemoryError, ImportError)
NOT_OF_PICTURES = (*NOT_OF_DATA, AttributeError, NameError)


def printable(text: object) -> str:
    """The text with escapes for what a terminal would obey: a file's name may hold anything."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


# ======================================================================================================================
# packages

# Packages that have to be of some version: how they are called where they are installed, and the oldest that works (requirements.txt says why).
NEEDED = {
    "numpy": ("numpy", "1.24"),
    "PIL": ("pillow", "10.1"),
    "tqdm": ("tqdm", "4.64"),
    "torch": ("torch", "2.6"),
    "matplotlib": ("matplotlib", "3.7"),
}

PREPARING = ("numpy", "PIL", "tqdm")  # what prepare_data.py imports as it begins
TRAINING = ("numpy", "torch")  # train_unet.py
SAMPLING = ("numpy", "torch", "PIL", "tqdm")  # generate.py


def how_to_install(missing: str, names: str = "") -> str:
    """A sentence with the command that installs a missing package, and others that will be needed."""
    names = names or {"PIL": "pillow"}.get(missing, missing)
    return f"Python's package {missing} is missing; install it with {command_to_install(names)}"


def command_to_install(names: str) -> str:
    """As part of a sentence."""
    if sys.prefix == sys.base_prefix:  # Debian's Python, for one, takes packages in virtual environments only
        return f"`python3 -m venv .venv && .venv/bin/pip install {names}`, and use .venv/bin/python"
    return f"`{sys.executable} -m pip install {names}`"


def old_version(package: str) -> str:
    """The version of a package that is older than what is needed; or "": it is new enough, or doesn't say."""
    name, needed = NEEDED.get(package, ("", ""))
    try:
        version = importlib.metadata.version(name) if name else ""
    except importlib.metadata.PackageNotFoundError:
        return ""
    there, wanted = (tuple(int(part) for part in re.findall(r"\d+", text)[:2]) for text in (version, needed))
    return version if there < wanted else ""


def need_packages(packages: tuple[str, ...]) -> None:
    """UserError if one of these is missing or too old, with the command that installs it and what may be needed later."""
    names = "torch numpy pillow safetensors tqdm matplotlib" if "torch" in packages else "numpy pillow tqdm"
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise UserError(how_to_install(package, names))
        if version := old_version(package):
            name, needed = NEEDED[package]
            command = command_to_install(f"'{name}>={needed}'" if sys.prefix != sys.base_prefix else names)
            raise UserError(f"Python's package {name} is of version {version}, and {needed} or newer is needed; install it with {command}")


# ======================================================================================================================
# signals


def leave(number: int, _: object) -> None:
    """Ends the program at once. That is for moments in which it has nothing to tidy up."""
    program = os.path.splitext(os.path.basename(sys.argv[0]))[0]
    os.write(2, f"{program}: interrupted\n".encode())
    os._exit(128 + number)


def let_go(number: int, _: object) -> None:
    """Takes a signal, and does nothing."""


def interrupt(number: int, _: object) -> None:
    """Raises KeyboardInterrupt, on whose way out temporary files are removed. Another Ctrl-C doesn't wait for that. SIGTERM says nothing new: who has
    started this program sends it at his own end, of the same Ctrl-C, and a second exception would break into what tidies up."""
    take(leave, signal.SIGINT)
    if signal.getsignal(signal.SIGTERM) == interrupt:
        signal.signal(signal.SIGTERM, let_go)
    raise KeyboardInterrupt(number)


def take(handler: object, *numbers: int) -> None:
    """Makes this the handler of these signals. One that is ignored, as in the background of a script, stays ignored."""
    for number in numbers:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def exit_code(error: KeyboardInterrupt) -> int:
    """As a shell has it for a program that a signal has ended."""
    return 128 + (error.args[0] if error.args else signal.SIGINT)


@contextlib.contextmanager
def stop_on_signal() -> Iterator[list[str]]:
    """A list that stays empty until SIGINT, SIGTERM or SIGHUP, so that the step in hand can be finished."""
    received: list[str] = []
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # or under nohup
        signals.append(signal.SIGHUP)
    handlers = {s: signal.signal(s, lambda n, _: received.append(signal.Signals(n).name)) for s in signals}
    try:
        yield received
    finally:
        for s, handler in handlers.items():
            signal.signal(s, handler)


# ======================================================================================================================
# from the command line to the exit code


def standard_streams() -> None:
    """Opens the standard streams that are closed (>&-): or else the next file that is opened would take their place."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout, sys.stderr = sys.stdout or open(os.devnull, "w"), sys.stderr or open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names need not be valid text


def begin(program: str, parse: Callable[[list[str]], Any], packages: tuple[str, ...], *signals: int) -> None:
    """Before packages are imported: --help, a mistake in the command line (parse raises a UserError) and a missing package end the program here.
    While they are imported SIGINT and `signals` end it at once."""
    take(leave, signal.SIGINT, *signals)

    def check(argv: list[str]) -> None:
        parse(argv)
        need_packages(packages)

    if code := run_program(program, check):
        sys.exit(code)


# What launchers tell each process: its rank, and how many there are (torchrun, Open MPI, MPICH, Slurm).
LAUNCHERS = {"RANK": "WORLD_SIZE", "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE", "PMI_RANK": "PMI_SIZE", "SLURM_PROCID": "SLURM_STEP_NUM_TASKS"}


def check_alone() -> None:
    """UserError if a launcher has started several processes: each would train the whole run, in the same folder."""
    for rank, size in LAUNCHERS.items():
        started = os.environ.get(size, "1")
        if started.isdigit() and int(started) > 1 and rank in os.environ:
            told = f"{started} processes were started, of which this is rank {os.environ[rank]}"
            raise UserError(f"{told}; train_unet.py is one process; ./train_unet trains on several GPUs, and both read the same checkpoints")


def run_program(program: str, body: Callable[[list[str]], int | None]) -> int:
    """Runs a program, and returns the exit code, that of body or 0; a mistake ends in one sentence and exit code 1, Ctrl-C in 130."""
    code = 1
    before = signal.getsignal(signal.SIGINT)
    try:
        take(interrupt, signal.SIGINT)
        standard_streams()
        done = body(sys.argv[1:]) or 0
        sys.stdout.flush()
        return done
    except KeyboardInterrupt as e:
        sentence, code = "interrupted", exit_code(e)
    except UserError as e:
        sentence = str(e)
    except BrokenPipeError:  # nobody reads any more, as behind | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python tries to write the rest once more at its end
        return 128 + signal.SIGPIPE
    except OSError as e:
        sentence = f"{e.filename or 'a file'}: {e.strerror}"
    except ModuleNotFoundError as e:
        sentence = how_to_install(e.name or "")
    except ImportError as e:
        sentence = f"one of Python's packages can't be used ({e}); install it again"
    except MemoryError as e:
        sentence = f"the memory is full{f' ({e})' if str(e) else ''}"
    except RuntimeError as e:
        if type(e).__name__ != "OutOfMemoryError":  # torch's
            raise
        sentence = "the GPU's memory is full; a smaller --batch_size or a --microbatch needs less"
    finally:
        signal.signal(signal.SIGINT, before)
    sentence = re.sub(r"[\x00-\x1f\x7f]\s*", " ", sentence)  # what a file says may have several lines
    print(f"{program}: {printable(sentence)}", file=sys.stderr)
    return code


class Screen:
    """What a run tells; on a terminal its status is one line, drawn anew. stop: the list that ends the run, also when nobody reads (| head)."""

    def __init__(self, stop: list[str]):
        self.stop, self.terminal, self.shown = stop, sys.stdout.isatty(), -math.inf

    def takes_a_line(self) -> bool:
        """Waits until stdout takes a line, which a terminal held by Ctrl-S does not, nor a full pipe whose reader is busy. False: a signal has come,
        which print() would not heed while it waits."""
        while not select.select([], [1], [], 0.2)[1]:
            if self.stop:
                return False
        return True

    def print(self, text: str, end: str = "\n") -> None:
        if not self.takes_a_line():
            return
        try:
            print(text, end=end, flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self.stop.append("SIGPIPE")

    def tell(self, text: str) -> None:
        """text: a sentence."""
        self.print("\n" * self.terminal + text)

    def status(self, line: str) -> None:
        """line: its parts stand between | and |; those that matter least go where there is no room."""
        columns = shutil.get_terminal_size().columns if self.terminal else len(line) + 1
        for part in "norm", "lr", "[^|]* images", "[^|]* ms", "skipped", "val", "ETA":
            if len(line) >= columns:
                line = re.sub(rf" \| {part}[^|]*(?= \||$)", "", line)
        self.print("\r\033[K" * self.terminal + line[: columns - 1], end="" if self.terminal else "\n")
        self.shown = time.perf_counter()
