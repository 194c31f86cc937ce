"""docs/walk.py: its cells run from top to bottom, in a shorter training run, and docs/walk.ipynb is made of them."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from conftest import ROOT, binary_path

WALK = ROOT / "docs/walk.py"
STEPS = 6


def notebook_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notebook", ROOT / "dev/notebook.py")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def test_the_notebook_is_up_to_date() -> None:
    made = notebook_module().notebook(WALK.read_text())
    assert WALK.with_suffix(".ipynb").read_text() == made, "python dev/notebook.py makes it anew"


def test_ten_cells() -> None:
    cells = notebook_module().cells(WALK.read_text())
    assert [kind for kind, _ in cells] == ["markdown", "code"] * 10 + ["markdown"]
    named = set(re.findall(r"`((?:docs/)?\w+\.(?:py|md|ipynb))`", "".join(text for kind, text in cells if kind == "markdown")))
    assert named and all((ROOT / name).exists() for name in named)


def test_the_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    """From docs/, where a notebook begins. The repeated step's loss is the program's."""
    import matplotlib

    matplotlib.use("Agg")
    torch.set_num_threads(1)
    monkeypatch.chdir(ROOT / "docs")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    settings = f'PROGRAM, FOLDER, STEPS = "{binary_path("cpu")}", "{tmp_path}/out", {STEPS}'
    names: dict = {"__name__": "walk"}
    for kind, text in notebook_module().cells(WALK.read_text()):
        if kind == "code":
            text = re.sub(r"^PROGRAM, FOLDER, STEPS = .*", settings, text, flags=re.M)
            text = re.sub(r"steps=20", "steps=2", text)
            exec(compile(text, "docs/walk.py", "exec"), names)
            names["plt"].close("all")
    assert names["images"].shape == (16, 1, 32, 32) and len(names["log"]) == STEPS
    assert names["result"].step == names["row"]["step"] == STEPS * 2 // 3 + 1
    np.testing.assert_allclose(names["result"].loss, names["row"]["loss"], rtol=1e-5)
    told = capfd.readouterr().out
    assert f"step {STEPS * 2 // 3 + 1}: loss" in told and "(1, 64, 16, 16) -> (1, 64, 16, 16)" in told
