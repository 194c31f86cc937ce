"""The map at the head of train_unet.cu, made of its headings, and its roads: make map renews them, make lint checks them (--check).

A heading is the line behind a ruler (// and then = or - up to column 120): "// Part I. TITLE" or "// 7. TITLE" behind =, "// --- TITLE" behind -.
A road names what comes one after the other, "train 4606, run_step 4453": behind each name stands the line where it is defined (the last one, if
several builds have their own), or behind "that of silu_forward" the line of its prototype. Names are written by hand, numbers by this program.
"""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "train_unet.cu"
FIRST, LAST = "// Map (make map renews the line numbers)\n", "//\n"
ROADS = "// Roads (make map renews the line numbers)\n"
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


def is_definition(lines: list[str], start: int, name: str) -> bool:
    """Does line number start (from 0) begin a function, struct, enum or table of that name?"""
    line = lines[start]
    if re.match(rf"\s*(template <.*> )?(struct|class|enum|enum class) {name}\b.*{{|static constexpr .*\b{name}(\[\w*\])+ = {{", line):
        return True
    before = lines[start - 1].rstrip()
    if line.lstrip().startswith(f"{name}(") and before.startswith("static __global__"):  # its type stands in a line of its own
        line = f"{before} {line.lstrip()}"
    head = re.match(rf"\s*([\w:<>,&*()\[\]\"= ]*[\w>*&)] ?[*& ]){name}\(", line)
    if not head or re.search(r"\b(return|else|case|new|throw|if|for|while)\b|[=(]\s*$", head[1]):
        return False
    text = "".join(re.sub(r"//.*", "", each) for each in lines[start : start + 12])
    return "{" in text and ";" not in text[: text.index("{")]


def roads(lines: list[str]) -> list[str]:
    """The roads, every name with the line of its definition."""
    first = lines.index(ROADS) + 1
    last = lines.index(LAST, first)
    missing = []

    def renew(match: re.Match[str]) -> str:
        prototype, name, space, _ = match.groups()
        if prototype:
            places = [number for number, line in enumerate(lines, 1) if re.match(rf"static [\w*& ]+\b{name}\(", line)][:1]
        else:
            places = [number for number, line in enumerate(lines, 1) if name in line and is_definition(lines, number - 1, name)]
        if not places:
            missing.append(f"{SOURCE.name}: a road at its head leads to {name}, which is defined nowhere")
        structs = [number for number in places if re.match(r"\s*(template <.*> )?(struct|class|enum)\b", lines[number - 1])]  # not its constructors
        return f"{prototype or ''}{name}{space}{(structs or places or [0])[-1]}"

    between = r" |\n// +"  # a number may stand at the beginning of the next line
    renewed = re.sub(rf"(that of )?\b([A-Za-z_]\w*)({between})(\d+)", renew, "".join(lines[first:last])).splitlines(keepends=True)
    if missing:
        sys.exit("\n".join(missing))
    return [*lines[:first], *renewed, *lines[last:]]


def main() -> None:
    lines = SOURCE.read_text().splitlines(keepends=True)
    renewed, before = lines, None
    while renewed != before:  # a map of another length moves what it tells of
        before, first = renewed, renewed.index(FIRST) + 1
        renewed = roads(renewed[:first] + entries(renewed) + renewed[renewed.index(LAST, first) :])
    if renewed != lines and "--check" in sys.argv:
        sys.exit(f"{SOURCE.name}: its map is old; make map renews it")
    if renewed != lines:
        SOURCE.write_text("".join(renewed))


if __name__ == "__main__":
    main()
