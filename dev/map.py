"""The map at the head of train_unet.cu, made of its headings: make map renews it, make lint checks it (--check).

A heading is the line behind a ruler (// and then = or - up to column 120): "// Part I. TITLE" or "// 7. TITLE" behind =, "// --- TITLE" behind -.
"""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "train_unet.cu"
FIRST, LAST = "// Map (make map renews the line numbers)\n", "//\n"
FORMS = {"=": r"(Part [IVX]+\. .*|\d+\. .*)\n", "-": r"--- (.*)\n"}


def entries(lines: list[str]) -> list[str]:
    """A line of the map for every heading."""
    found, wrong = [], []
    for number, (ruler, heading) in enumerate(pairwise(lines), 2):
        if kind := re.fullmatch(r"// (=|-)\1{116}\n", ruler):
            title = re.fullmatch("// " + FORMS[kind[1]], heading)
            if not title:
                wrong.append(f"{SOURCE.name}:{number}: behind a ruler stands a heading, as dev/map.py's head says")
                continue
            indent = "       " if kind[1] == "-" else "" if title[1].startswith("Part") else "   " if title[1][1] == "." else "  "
            found.append(f"// {number:6d}  {indent}{title[1]}\n")
            if len(found[-1]) > 121:
                wrong.append(f"{SOURCE.name}:{number}: the heading is too long for the map, by {len(found[-1]) - 121} characters")
    if wrong:
        sys.exit("\n".join(wrong))
    return found


def main() -> None:
    lines = SOURCE.read_text().splitlines(keepends=True)
    renewed, before = lines, None
    while renewed != before:  # a map of another length moves what it tells of
        before, first = renewed, renewed.index(FIRST) + 1
        renewed = renewed[:first] + entries(renewed) + renewed[renewed.index(LAST, first) :]
    if renewed != lines and "--check" in sys.argv:
        sys.exit(f"{SOURCE.name}: its map is old; make map renews it")
    if renewed != lines:
        SOURCE.write_text("".join(renewed))


if __name__ == "__main__":
    main()
