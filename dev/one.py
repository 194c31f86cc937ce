"""Prints train_unet.cu with all quoted includes expanded, each file once: `make one` writes the program as a single file."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def expand(path: Path, done: set[Path]) -> str:
    """The text of a file with its quoted includes replaced by those files' texts. A header (#pragma once) comes once."""
    lines = []
    for line in path.read_text().splitlines():
        included = re.match(r'#include "(.*)"', line)
        if not included:
            if line != "#pragma once":
                lines.append(line)
            continue
        target = (path.parent / included[1]).resolve()
        if target in done:
            continue
        if target.suffix == ".h" and "#pragma once" in target.read_text():
            done.add(target)
        lines.append(expand(target, done))
    return "\n".join(lines)


print(expand(ROOT / "train_unet.cu", set()))
