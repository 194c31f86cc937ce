"""Files that appear whole or not at all, and that replace nothing which somebody may miss. This module needs Python alone."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from common.program import UserError, printable

HEADER_BYTES = 256 * 4
DATA_MAGIC, UNET_CU_DATA_MAGIC = 20261120, 20240620  # the first number of a data file, ours or unet.cu's
MODEL_MAGIC, UNET_CU_MODEL_MAGIC = 20261121, 12345678  # and of a model file


class DataError(UserError):
    """What is wrong with the user's files, as one sentence."""

    def __init__(self, sentence: object) -> None:
        super().__init__(printable(sentence))


def open_file(path: str, folder: int | None = None) -> BinaryIO:
    """Opens a file for reading. A pipe, whose other end may never come, a device, which may never end, or a folder is refused by an OSError, too.
    folder: a descriptor of the one in which path is a name."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    return open(descriptor, "rb")


def open_regular(path: str) -> BinaryIO:
    """The same, with a DataError for whatever is wrong."""
    try:
        return open_file(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def open_folder(path: str) -> int:
    """A descriptor of a folder, which stays the same one when it is moved, or when another takes its name."""
    return os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def remove_leftovers(folder: int, *starts: str) -> None:
    """Removes what killed processes left of files whose names start so: temporary files that no living process locks."""
    for name in os.listdir(folder):
        if name.startswith(starts) and re.fullmatch(r".*\.tmp\d+", name):
            with contextlib.suppress(OSError):
                descriptor = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(name, dir_fd=folder)
                finally:
                    os.close(descriptor)


def is_there(name: str, folder: int) -> bool:
    """Whether a folder holds a file of this name; an OSError if that can't be said. (os.access would take every error for a no.)"""
    try:
        os.stat(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def open_temporary(name: str, folder: int) -> tuple[str, BinaryIO]:
    """A new file beside one of this name, to be renamed to it when it is complete, and locked until it is closed; and its own name."""
    remove_leftovers(folder, f"{name}.tmp")
    for number in itertools.count(os.getpid()):  # another host may have such a process, too
        temporary = f"{name}.tmp{number}"
        with contextlib.suppress(FileExistsError):
            file = open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=folder), "wb")
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_there(temporary, folder):  # or it was removed as left over before it was locked
                return temporary, file
            file.close()
    raise AssertionError


@contextlib.contextmanager
def atomic_file(path: str, folder: int | None = None) -> Iterator[BinaryIO]:
    """A file that appears under its name when it is complete; on failure what was there before stays as it was. folder: a descriptor of the one in
    which path is a name."""
    if folder is None:
        folder = open_folder(os.path.dirname(path))
        try:
            with atomic_file(os.path.basename(path), folder) as file:
                yield file
        finally:
            os.close(folder)
        return
    temporary, file = open_temporary(path, folder)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)  # the new name, too, must survive a power cut
    finally:
        with contextlib.suppress(OSError):  # after os.replace there is nothing left to remove
            os.remove(temporary, dir_fd=folder)


def atomic_write(path: str, chunks: Iterable[Any]) -> None:
    """Writes a file that appears under its name whole or not at all."""
    try:
        with atomic_file(path) as file:
            file.writelines(chunks)
    except OSError as e:
        raise UserError(f"{path}: can't be written ({e.strerror}); choose a folder that exists and is yours") from None


def write_folder(path: str, own: tuple[str, ...], make: Callable[[Path], None]) -> None:
    """make(a path beside it) makes a folder, which appears whole or not at all. own: the files and the folders/ that such folders have, the first being
    in all. One that is there is replaced if it is empty, or has that first file and nothing but its own."""
    target = Path(os.path.realpath(path))  # a link stays one, and what it leads to is replaced
    if os.path.lexists(target):
        check_replaceable(target, own)
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            new, old = Path(folder, "new" + target.suffix), Path(folder, "old")
            make(new)
            if target.exists():
                target.rename(old)
            try:
                new.rename(target)
            except BaseException:  # Ctrl-C, too
                if old.exists() and not target.exists():
                    old.rename(target)
                raise
    except OSError as e:
        raise UserError(f"{path}: can't be written ({e.strerror}); choose a folder that exists and is yours") from None


def check_replaceable(target: Path, own: tuple[str, ...]) -> None:
    """UserError if a folder that is to be replaced holds what would be lost."""
    if not target.is_dir() or (any(target.iterdir()) and not (target / own[0]).is_file()):
        raise UserError(f"{target}: is there and holds no {own[0]}; choose another name")
    for file in sorted(target.rglob("*")):
        name = file.relative_to(target).as_posix()
        above = file.is_dir() and not file.is_symlink() and any(known.startswith(f"{name}/") for known in own)
        inside = any(known.endswith("/") and name.startswith(known) for known in own)
        if not (name in own or above or inside):
            raise UserError(f"{target}: holds {name}, too, which would be lost; choose another name, or move that away")


# ======================================================================================================================
# what a file may replace


SAMPLES = 1  # slot 14 of a data file that --sample has written; 0: other data
SOFTWARE = "train_unet"  # which pictures name as their maker


def slot(head: bytes, number: int) -> int:
    """A number of the header with which a .bin file begins; 0: the file is shorter."""
    return int.from_bytes(head[4 * number : 4 * number + 4], "little", signed=True)


def is_data(head: bytes) -> bool:
    """Whether a file that begins so is a data file that prepare_data.py may have written."""
    return slot(head, 0) == DATA_MAGIC and slot(head, 14) != SAMPLES


def is_samples(head: bytes) -> bool:
    """Whether it is a data file that --sample has written."""
    return slot(head, 0) == DATA_MAGIC and slot(head, 14) == SAMPLES


def is_picture(head: bytes) -> bool:
    """Whether it is a picture that one of our programs has written."""
    return head.startswith((b"\x89PNG", b"GIF8")) and SOFTWARE.encode() in head


def samples_like(path: str) -> Callable[[bytes], bool]:
    """Of a file of this name, is_picture or is_samples."""
    return is_samples if path.endswith(".bin") else is_picture


def is_compared(head: bytes) -> bool:
    """True: whether a model file may be replaced is said by all that it holds, and not by its beginning (check_replaced_model)."""
    return True


# Names that a run gives its files: train_unet.cu, is_name_of_run.
NAME_OF_RUN = re.compile(r"index\.html|log\.csv|loss\.png|best\.bin|\.lock|(model|ema)_\d{7,}\.bin|samples_\d{7,}\.png")


def check_name(flag: str, path: str) -> None:
    """DataError if a folder holds a run that has, or may later write, a file of this name: it would replace that, or take it for its own."""
    folder, name = os.path.split(path)
    if not NAME_OF_RUN.fullmatch(name) or not os.path.isdir(folder or "."):
        return
    there = os.listdir(folder or ".")
    if "log.csv" in there or any(re.fullmatch(r"model_\d{7,}\.bin", other) for other in there):
        raise DataError(f"{flag} {path}: is a name for files of the run in that folder; choose another one")


def check_output(flag: str, path: str, inputs: Iterable[str], replaces: Callable[[bytes], bool] | None = None, only: str = "") -> None:
    """Before work that may take long: DataError if a file can't be written under this name, or would replace one that somebody may miss: what is read
    (inputs), what our programs have not written, or what is of another kind than what replaces it. replaces: says of a file's first bytes whether it is of
    that kind; None: no file is. only: what that kind is called. Leaves nothing behind."""
    told = f"{flag} {path}: "
    try:
        folder = open_folder(os.path.dirname(path))
    except OSError as error:
        raise DataError(f"{told}its folder can't be opened ({error.strerror}); name one that is there") from None
    try:
        check_name(flag, path)
        if os.path.isdir(path):
            raise DataError(f"{told}is a folder; name a file")
        if os.path.exists(path):
            check_replaced(told, path, inputs, replaces, only)
        temporary, file = open_temporary(os.path.basename(path), folder)
        file.close()
        os.remove(temporary, dir_fd=folder)
    except OSError as error:
        raise DataError(f"{told}can't be written ({error.strerror}); choose a folder that exists and is yours") from None
    finally:
        os.close(folder)


def check_replaced(told: str, path: str, inputs: Iterable[str], replaces: Callable[[bytes], bool] | None, only: str) -> None:
    """check_output of a file that is there."""
    if not os.path.isfile(path):
        raise DataError(f"{told}is there and is no usual file; choose another name")
    if path.endswith(".bin") and not os.access(path, os.W_OK):
        raise DataError(f"{told}is there and is write-protected; choose another name")
    for name in inputs:
        if os.path.exists(name) and os.path.samefile(name, path):
            raise DataError(f"{told}would replace {name}, which is read; choose another name")
    with open_regular(path) as file:
        head = file.read(2 * HEADER_BYTES)  # in which pictures name their maker
    if head and not (replaces and replaces(head)):
        kind = f" and is no {only or 'file of the same kind'} of this program" if replaces else ""
        raise DataError(f"{told}is there{kind}; choose another name, or move it away")
