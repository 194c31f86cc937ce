"""Model files of all kinds: read any, convert it to another, average those of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from common import diffusers_files
from common.files import MODEL_MAGIC, check_output, is_compared, open_file
from common.flags import POWER_EMAS, SAVED_FLAGS, format_value
from common.model_files import FREE_FLAGS, READERS, ModelFile, ModelFileError, check_folder, kind_of, read_header, write_model
from common.program import UserError


def read_model(path: str, flags: dict[str, Any] | None = None) -> ModelFile:
    """Reads .bin (ours or unet.cu's), .pt, .safetensors or a folder of diffusers'. flags: the model flags, for a bare state_dict that does not
    say its own shape. ModelFileError with one sentence if the file can't be used."""
    try:
        if os.path.isdir(path):
            file = diffusers_files.read_folder(path.rstrip("/"), flags or {})
        else:
            open_file(path).close()  # says what is wrong with the path itself
            file = READERS[kind_of(path)](path, flags or {})
    except OSError as e:
        raise ModelFileError(f"{e.filename or path}: can't be opened ({e.strerror}); name a model file that is there") from None
    file.path = path
    return file


def convert(file: ModelFile, target: str, flags: dict[str, Any]) -> str:
    """Writes a model in another format, a folder of diffusers' if target ends in /; returns what there is to tell."""
    file.inherit({name: value for name, value in flags.items() if name in SAVED_FLAGS}, resume=False)  # refuses what says otherwise
    if target.endswith("/"):
        return diffusers_files.write_folder(target, file, flags)
    check_replaced_model("--convert", target, file)
    write_model(target, file)
    return f"{target}: the same model as {file.path}"


def check_conversion(source: str, target: str) -> None:
    """Before anything is read: UserError if --convert can't write its target, or would replace what somebody may miss."""
    if target.endswith("/"):
        return check_folder("--convert", target, source)
    kind_of(target)
    check_output("--convert", target, [source, *map(str, Path(source).parent.glob("ema_*.bin"))], is_compared)


def check_replaced_model(flag: str, target: str, file: ModelFile) -> None:
    """UserError if there is a file of this name and it holds anything (weights, averages, moments) that this one does not hold, which would replace it."""
    if not os.path.exists(target) or os.path.getsize(target) == 0:
        return
    with contextlib.suppress(UserError):
        arrays = file.arrays()
        if all(name in arrays and np.array_equal(array, arrays[name]) for name, array in read_model(target).arrays().items()):
            return
    raise UserError(f"{flag} {target}: is there and holds something else; choose another name, or move it away")


# ======================================================================================================================
# an average of a run's weights, from its snapshots (Karras et al. 2024)
SNAPSHOT_NAME = r"ema_(\d+)\.bin"


def power_of(sigma_rel: float) -> float:
    """The exponent of the power function whose spread is this part of the run (Karras et al. 2024, appendix C.2)."""
    t = sigma_rel**-2
    return float(np.roots([1, 7, 16 - t, 12 - t]).real.max())


def response_products(t_a: np.ndarray, power_a: np.ndarray, t_b: np.ndarray, power_b: np.ndarray) -> np.ndarray:
    """(a, b): integrals over time of what two averages make of the weights at each time, p_a(t) p_b(t), where p(t) is (power + 1) t^power / end^(power +
    1) up to its end (Karras et al. 2024, appendix C.3)."""
    t_a, power_a, t_b, power_b = t_a[:, None], power_a[:, None], t_b[None, :], power_b[None, :]
    ratio = (t_a / t_b) ** np.where(t_a < t_b, power_b, -power_a)
    return (power_a + 1) * (power_b + 1) * ratio / ((power_a + power_b + 1) * np.maximum(t_a, t_b))


def read_snapshot(path: str) -> ModelFile:
    """A snapshot of a run: two averages of its weights, and as its step the number of updates that they are over."""
    file = read_model(path)
    if not re.fullmatch(SNAPSHOT_NAME, Path(path).name) or file.ema is None or file.m is not None:
        raise UserError(f"{path}: is no snapshot of a run, ema_STEP.bin, as --ema_snapshots writes them")
    if file.state.step < 1:
        raise UserError(f"{path}: averages no weights, since no update came before it; name a later snapshot")
    if not file.is_finite():
        raise UserError(f"{path}: its averages are not finite; move it away and use the other snapshots")
    return file


def snapshots_up_to(path: str) -> dict[int, str]:
    """updates -> file, of the snapshots beside this one, up to it, oldest first."""
    number = snapshot_number(path)
    beside = (p for p in Path(path).parent.iterdir() if re.fullmatch(SNAPSHOT_NAME, p.name))
    found, last = {}, 0
    for name in sorted((str(p) for p in beside if snapshot_number(p) <= number), key=snapshot_number):
        header = read_header(name)
        updates = header["step"].item()
        if header["magic"] != MODEL_MAGIC or updates < last:
            raise UserError(f"{name}: does not go on from the snapshots before it, so it is damaged or another run's; move it out of that folder")
        if updates > 0:  # else no step was good yet
            found[updates] = name  # two with as many updates hold the same
        last = updates
    return found


def snapshot_number(path: str | Path) -> int:
    return int(re.fullmatch(SNAPSHOT_NAME, Path(path).name)[1])


def check_same_run(file: ModelFile, end: ModelFile) -> None:
    """UserError if a snapshot is not of the run that another one is of. Flags that a resumed run may change may differ."""
    for name in ["seed", *(name for name in SAVED_FLAGS if name not in FREE_FLAGS)]:
        here, there = getattr(file.config, name), getattr(end.config, name)
        if here != there:
            told = f"--{name} {format_value(name, here)}, and {end.path} of one with {format_value(name, there)}"
            raise UserError(f"{file.path}: is of a run with {told}; move it out of that folder")


def post_hoc_factors(updates: np.ndarray, sigma_rel: float) -> np.ndarray:
    """(snapshots, 2): how much of each average is in the one that is wanted at the end of these updates (Karras et al. 2024, algorithm 3)."""
    t, powers = np.repeat(updates, 2), np.tile(np.array(POWER_EMAS), len(updates))
    wanted = response_products(t, powers, updates[-1:], np.array([power_of(sigma_rel)]))
    factors = np.linalg.solve(response_products(t, powers, t, powers), wanted)
    # The nearest sum of responses may count all weights together as less than one; an average counts them as one. (Karras et al.'s published code
    # divides so, too; their algorithm 3 as printed does not.)
    return (factors / factors.sum()).reshape(-1, 2)


def post_hoc_average(path: str, sigma_rel: float) -> ModelFile:
    """The average of the weights of a run up to a snapshot ema_STEP.bin, whose weights are spread over this part of it: a sum of all snapshots to that
    one, with the factors whose sum of responses is nearest to the wanted one (Karras et al. 2024, section 3.2)."""
    if not 0.005 <= sigma_rel <= 0.28:
        raise UserError(f"--ema_sigma_rel {sigma_rel:g}: must be from 0.005 to 0.28; 0.05 to 0.15 is usual")
    end = read_snapshot(path)
    found = snapshots_up_to(path)
    total = np.zeros(len(end.weights))
    for name, (first, second) in zip(found.values(), post_hoc_factors(np.array([*found], float), sigma_rel)):
        file = read_snapshot(name)
        check_same_run(file, end)
        total += first * file.weights.astype(np.float64) + second * file.ema.astype(np.float64)
    return dataclasses.replace(end, weights=total.astype(np.float32), ema=None, path=f"an average of the weights up to {path}")
