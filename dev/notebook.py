"""Makes docs/walk.ipynb, a notebook without outputs, of the cells of docs/walk.py: python dev/notebook.py"""

from __future__ import annotations

import json
import re
from pathlib import Path

WALK = Path(__file__).resolve().parent.parent / "docs/walk.py"


def cells(text: str) -> list[tuple[str, str]]:
    """(kind, text) of each cell: kind is "markdown", whose text is a comment, or "code"."""
    found = re.findall(r"^# %%( \[markdown\])?\n(.*?)(?=^# %%|\Z)", text, re.M | re.S)
    return [("markdown", re.sub(r"^# ?", "", cell.strip(), flags=re.M)) if mark else ("code", cell.strip()) for mark, cell in found]


def notebook(text: str) -> str:
    """The .ipynb (nbformat 4.5) of a script's cells."""
    written = []
    for number, (kind, cell) in enumerate(cells(text)):
        more = {"execution_count": None, "outputs": []} if kind == "code" else {}
        written.append({"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": cell.splitlines(keepends=True)} | more)
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}, "language_info": {"name": "python"}}
    return json.dumps({"cells": written, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    WALK.with_suffix(".ipynb").write_text(notebook(WALK.read_text()))
