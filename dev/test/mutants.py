"""Mutants: changes one instruction of a kernel's PTX at a time and runs its pair under the emulator. What survives is a hole in the tests, or changes nothing.

    make -C dev BUILD=emulated && BUILD=emulated python dev/test/mutants.py --count 200

The mutants are drawn by a fixed seed, as many of each kernel that the usual small cases run (test_pairs.py), one in two of them a barrier or a wait, and
written over the text in a copy of the binary. A mutant is killed if its case ends with an error, does not end, or misses the pair's tolerance, or if another order of
blocks, warps and copies gives other bits. It is tried on the quickest --cases that reach the instruction. EMULATE_ALL=1 makes all cases known.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

DEV = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(DEV / "pairs"), str(DEV / "test")]

os.environ["BUILD"] = "emulated"
import harness  # noqa: E402
import test_pairs  # noqa: E402

WORD = r"[%\w.$]+"


def swap(a: str, b: str) -> list[tuple[str, str, str]]:
    return [("operator", rf"^(@!?{WORD}\s+)?{a}\.(?=[\w.]*\s)", rf"\g<1>{b}."), ("operator", rf"^(@!?{WORD}\s+)?{b}\.(?=[\w.]*\s)", rf"\g<1>{a}.")]


# Kind, what a statement looks like, what becomes of it. Results may not be longer: they take the place of the text.
RULES: list[tuple[str, str, str]] = [
    *swap("add", "sub"),
    *swap("min", "max"),
    ("operator", rf"^((?:@!?{WORD}\s+)?)and\.", r"\g<1>or."),
    ("operator", rf"^((?:@!?{WORD}\s+)?)xor\.", r"\g<1>or."),
    ("operator", rf"^((?:@!?{WORD}\s+)?)shl\.b32", r"\g<1>shr.u32"),
    ("operator", rf"^((?:@!?{WORD}\s+)?)shr\.u32", r"\g<1>shl.b32"),
    ("operator", rf"^((?:@!?{WORD}\s+)?)neg\.", r"\g<1>mov."),
    ("operator", rf"^((?:@!?{WORD}\s+)?)fma\.rn\.(f32|f64)(\s+[^,]*,[^,]*,[^,]*),.*$", r"\g<1>mul.rn.\2\3"),
    ("operator", rf"^((?:@!?{WORD}\s+)?)mad\.lo\.(s32|u32)(\s+[^,]*,[^,]*,[^,]*),.*$", r"\g<1>mul.lo.\2\3"),
    ("operator", rf"^((?:@!?{WORD}\s+)?selp\.\w+\s+[^,]*),([^,]*),([^,]*),", r"\1,\3,\2,"),
    ("comparison", r"setp\.lt\.", "setp.le."),
    ("comparison", r"setp\.le\.", "setp.lt."),
    ("comparison", r"setp\.gt\.", "setp.ge."),
    ("comparison", r"setp\.ge\.", "setp.gt."),
    ("comparison", r"setp\.eq\.", "setp.ne."),
    ("comparison", r"setp\.ne\.", "setp.eq."),
    ("comparison", r"^@!(?=%)", "@"),
    ("comparison", r"^@(?=%)", "@!"),
    ("barrier", r"^(?:@!?%\w+\s+)?(?:bar|barrier)\.(?!warp).*$", ""),  # a warp's lanes stay together here without one
    ("barrier", r"^cp\.async\.wait_group\s+(\d)$", "NEXT"),
    ("barrier", r"^cp\.async\.(?:commit_group|wait_all)$", ""),
    ("barrier", r"^cp\.async\.bulk\.wait_group.*$", ""),
    ("barrier", r"^wgmma\.wait_group\.sync\.aligned\s+(\d)$", "NEXT"),
    ("barrier", r"^mbarrier\.arrive\.shared.*$", ""),
    ("barrier", r"^mbarrier\.arrive\.expect_tx(\.shared::\w+\.b64\s+_,\s*\[[^\]]*\]),.*$", r"mbarrier.arrive\1"),
    ("barrier", r"^mbarrier\.try_wait\.parity\S*\s+(\w+),.*$", r"setp.eq.u32 \1, 0, 0"),
]
INDEX = re.compile(r"(?<=\+)\d+(?=\])|(?<=, )\d+$")  # an address's offset, or the last operand
NO_RESULT = re.compile(
    r"^(@!?\S+\s+)?(bra|ret|exit|bar|barrier|fence|griddepcontrol|setmaxnreg|prefetch|createpolicy|wgmma\.fence|mbarrier|call|cp\.async\.\w+_)"
)


@dataclass(frozen=True)
class Case:
    """A case of a pair on a GPU."""

    gpu: str
    precision: str
    pair: str
    number: int

    def __str__(self) -> str:
        return f"{self.gpu} {self.precision} {self.pair} {self.number}"


@dataclass
class Ready:
    """A case with its inputs, what is right, and what the kernels as they are write."""

    inputs: dict[str, Any]
    wanted: dict[str, np.ndarray]
    seconds: float
    kernels: dict[str, list[int]]  # where the instructions begin that it reached; - before others


@dataclass
class Mutant:
    kernel: str
    arch: int
    at: int  # in the binary
    old: str
    new: str
    kind: str
    which: int = 0  # of the same statements in the kernel
    verdict: str = ""
    tried: list[str] = field(default_factory=list)


def without_hash(kernel: str) -> str:
    """The name of a kernel that other binaries have, too."""
    return re.sub(r"_INTERNAL_[0-9a-f]{8}_", "_INTERNAL_", kernel)


def module_at(text: bytes, arch: int) -> int:
    """Where the PTX of an architecture begins in the binary."""
    for found in re.finditer(rb"\.version 9", text):
        target = text.find(b".target", found.start())
        if text[target:].startswith(f".target sm_{arch}".encode()):
            return found.start()
    raise SystemExit(f"no PTX for sm_{arch} in the binary")


def kernels_of(text: bytes, module: int) -> dict[str, tuple[int, int]]:
    """Where the kernels of a module begin and end, by their names without_hash."""
    found = list(re.finditer(rb"\.entry (\w+)\(", text[module : text.index(b"\0", module)]))
    ends = [module + match.start() for match in found[1:]] + [text.index(b"\0", module)]
    return {without_hash(match[1].decode()): (module + match.start(), end) for match, end in zip(found, ends, strict=True)}


def mutations(statement: str) -> list[tuple[str, str]]:
    """(kind, what becomes of it): everything that the rules make of a statement, no longer than it is."""
    found = []
    for kind, pattern, result in RULES:
        match = re.search(pattern, statement)
        if not match:
            continue
        if result == "NEXT":
            new = statement[: match.start(1)] + str(int(match[1]) + 1) + statement[match.end(1) :]
        else:
            new = match.expand(result) if not match[0].startswith("@") or result else ""
            new = statement[: match.start()] + new + statement[match.end() :]
        found.append((kind, new))
    for match in INDEX.finditer(statement):
        value = int(match[0])
        step = 4 if statement[match.end() :].startswith("]") else 1
        other = value + step if len(str(value + step)) == len(match[0]) else value - step
        found.append(("index", statement[: match.start()] + str(other) + statement[match.end() :]))
    if not NO_RESULT.match(statement):
        found.append(("removed", ""))
    shorter = [(kind, new if len(new) <= len(statement) else re.sub(r"\s+", " ", new).replace(", ", ",")) for kind, new in found]
    return [(kind, new) for kind, new in shorter if len(new) <= len(statement) and new != statement]


class Laboratory:
    """A copy of the binary with links by the pairs' names, and the cases."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.program = folder, folder / "pairs"
        shutil.copy(harness.binary(test_pairs.NAMES[0]).resolve(), self.program)
        self.text = self.program.read_bytes()
        self.modules = {arch: module_at(self.text, arch) for arch in (80, 90)}
        self.kernels = {arch: kernels_of(self.text, start) for arch, start in self.modules.items()}
        for name in test_pairs.NAMES:
            (folder / harness.binary(name).name).symlink_to(self.program)
        for gpu, (capability, multiprocessors, kb) in test_pairs.GPUS.items():
            words = f"capability {capability} code {capability} multiprocessors {multiprocessors} shared {kb << 10} block_shared {(kb - 1) << 10}"
            (folder / gpu).write_text(words)
        self.ready: dict[Case, Ready] = {}

    def run(self, case: Case, seconds: float, **variables: str) -> tuple[dict[str, np.ndarray], set[str]] | str:
        """What the program wrote, or how it ended."""
        (self.folder / "result").unlink(missing_ok=True)
        known = os.environ | {"OMP_NUM_THREADS": "1", "FAKE_GPU": str(self.folder / case.gpu)} | variables
        command = [self.folder / harness.binary(case.pair).name, self.folder / str(case), self.folder / "result"]
        try:
            done = subprocess.run(command, env=known, capture_output=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            return "does not end"
        if done.returncode:
            return f"error: {done.stderr.decode(errors='replace').strip().splitlines()[:1]}"
        arrays, in_bf16 = harness.read_arrays(self.folder / "result")
        return {name: a for name, a in arrays.items() if not re.search(r"\.v\d", name)}, in_bf16

    def prepare(self, case: Case) -> None:
        pair = test_pairs.PAIRS[case.pair]
        inputs = harness.make_inputs(pair, pair.cases[case.number], case.precision)
        harness.write_arrays(self.folder / str(case), inputs)
        wanted = harness.expected(pair, pair.cases[case.number], inputs)
        start = time.monotonic()
        result = self.run(case, 600, EMULATE_COVERAGE=str(self.folder / "coverage"))
        seconds = time.monotonic() - start
        lines = [line.split() for line in (self.folder / "coverage").read_text().splitlines()]
        self.ready[case] = Ready(inputs, wanted, seconds, {line[0]: [int(at) for at in line[1:]] for line in lines})
        assert not isinstance(result, str) and not self.wrong(case, result), f"{case}: {result}"

    def wrong(self, case: Case, result: tuple[dict[str, np.ndarray], set[str]]) -> str:
        """What misses the tolerance."""
        ready, pair = self.ready[case], test_pairs.PAIRS[case.pair]
        try:
            comparisons = harness.compare(pair, pair.cases[case.number], ready.inputs, ready.wanted, *result)
        except AssertionError as e:
            return str(e)
        return "; ".join(c.name for c in comparisons if not c.ok)

    def kill(self, mutant: Mutant, case: Case) -> str:
        """How the mutant dies of a case; empty: it does not."""
        seconds = 20 * self.ready[case].seconds + 20
        usual = self.run(case, seconds, EMULATE_RACES="1")
        if isinstance(usual, str):
            return usual
        if wrong := self.wrong(case, usual):
            return f"wrong: {wrong}"
        if mutant.kind != "barrier":
            return ""
        reversed = self.run(case, seconds, EMULATE_REVERSED="1")
        if isinstance(reversed, str):
            return reversed
        same = all(usual[0][name].tobytes() == reversed[0][name].tobytes() for name in usual[0])
        return "" if same else "other bits in another order"

    def try_mutant(self, mutant: Mutant, cases: int) -> None:
        reached = [case for case, ready in self.ready.items() if mutant.at - self.modules[mutant.arch] in ready.kernels.get(mutant.kernel, [])]
        reached = [case for case in reached if test_pairs.GPUS[case.gpu][0] == mutant.arch]
        for case in sorted(reached, key=lambda case: self.ready[case].seconds)[:cases]:
            with open(self.program, "r+b") as file:
                file.seek(mutant.at)
                file.write(mutant.new.ljust(len(mutant.old)).encode())
            verdict = self.kill(mutant, case)
            with open(self.program, "r+b") as file:
                file.seek(mutant.at)
                file.write(mutant.old.encode())
            mutant.tried.append(str(case))
            if verdict:
                mutant.verdict = verdict
                return
        mutant.verdict = "survived"

    def statement(self, at: int) -> str:
        return self.text[at : self.text.index(b";", at)].decode()

    def places(self, arch: int, kernel: str, statement: str) -> list[int]:
        """Where a kernel has this statement."""
        start, end = self.kernels[arch][without_hash(kernel)]
        return [start + match.start() for match in re.finditer(rb"(?<=[\s{])" + re.escape(statement.encode()) + b";", self.text[start:end])]

    def find_again(self, mutant: Mutant) -> Mutant | None:
        """What another binary's mutant is in this one, if its kernel still has the statement."""
        places = self.places(mutant.arch, mutant.kernel, mutant.old) if without_hash(mutant.kernel) in self.kernels[mutant.arch] else []
        if mutant.which >= len(places):
            return None
        names = {without_hash(name): name for ready in self.ready.values() for name in ready.kernels}
        return replace(mutant, kernel=names.get(without_hash(mutant.kernel), mutant.kernel), at=places[mutant.which], verdict="", tried=[])

    def draw(self, count: int, seed: int) -> list[Mutant]:
        """As many of each kernel, of barriers and of all else in turns."""
        reached: dict[tuple[int, str], set[int]] = {}
        for case, ready in self.ready.items():
            for kernel, places in ready.kernels.items():
                reached.setdefault((test_pairs.GPUS[case.gpu][0], kernel), set()).update(at for at in places if at >= 0)
        chance = random.Random(seed)
        queues: dict[tuple[int, str], list[Mutant]] = {}
        for (arch, kernel), places in sorted(reached.items()):
            if re.search(r"_v\d", kernel):  # naive versions, whose results are not compared
                continue
            barriers, others = [], []
            for at in sorted(places):
                old = self.statement(self.modules[arch] + at)
                for kind, new in mutations(old):
                    (barriers if kind == "barrier" else others).append(Mutant(kernel, arch, self.modules[arch] + at, old, new, kind))
            chance.shuffle(barriers)
            by_kind: dict[str, list[Mutant]] = {}
            for mutant in others:
                by_kind.setdefault(mutant.kind, []).append(mutant)
            for mutants in by_kind.values():
                chance.shuffle(mutants)
            mixed = [m for k in range(max(map(len, by_kind.values()), default=0)) for name in sorted(by_kind) for m in by_kind[name][k : k + 1]]
            start = chance.randrange(max(len(by_kind), 1))  # or each kernel would begin with the same kind
            mixed = mixed[start:] + mixed[:start]
            queues[arch, kernel] = [m for pair in zip(barriers, mixed, strict=False) for m in pair] + mixed[len(barriers) :] + barriers[len(mixed) :]
        order = sorted(queues)
        chance.shuffle(order)
        rounds = [queues[key][k] for k in range(count) for key in order if k < len(queues[key])]
        for mutant in rounds[:count]:
            mutant.which = self.places(mutant.arch, mutant.kernel, mutant.old).index(mutant.at)
        return rounds[:count]


def short(kernel: str) -> str:
    plain = subprocess.run(["c++filt", kernel], capture_output=True, text=True).stdout.strip()
    return plain.split("(")[0].removeprefix("void ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=3, help="that a mutant is tried on, at most")
    parser.add_argument("--survivors", help="an earlier output: instead of new ones, those that survived there")
    parser.add_argument("--pairs", default=",".join(test_pairs.NAMES), help="only these")
    parser.add_argument("--output", default="mutants.jsonl", help="a line for each mutant; those that are there are not tried again")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        laboratory = Laboratory(Path(folder))
        for gpu in test_pairs.GPUS:
            for precision in test_pairs.PRECISIONS:
                for pair in args.pairs.split(","):
                    for number in test_pairs.cases(gpu, precision, pair):
                        laboratory.prepare(case := Case(gpu, precision, pair, number))
                        print(f"{case}: {laboratory.ready[case].seconds:.1f} s, {len(laboratory.ready[case].kernels)} kernels", flush=True)
        known = [json.loads(line) for line in Path(args.output).read_text().splitlines()] if Path(args.output).exists() else []
        done = {(m["at"], m["new"]): m for m in known}
        verdicts: Counter[str] = Counter()
        if args.survivors:
            earlier = [json.loads(line) for line in Path(args.survivors).read_text().splitlines()]
            found = [laboratory.find_again(Mutant(**m)) for m in earlier if m["verdict"] == "survived"]
            drawn = [mutant for mutant in found if mutant]
            print(f"{len(drawn)} of {len(found)} survivors are still there")
        else:
            drawn = laboratory.draw(args.count, args.seed)
        for mutant in drawn:
            before = done.get((mutant.at, mutant.new))
            if before:
                mutant.verdict = before["verdict"]
            else:
                laboratory.try_mutant(mutant, args.cases)
                with open(args.output, "a") as file:
                    print(json.dumps(vars(mutant)), file=file)
            verdicts[f"{mutant.kind}, {'survived' if mutant.verdict == 'survived' else 'killed'}"] += 1
            if mutant.verdict == "survived":
                print(f"survived: sm_{mutant.arch} {short(mutant.kernel)}: {mutant.old!r} -> {mutant.new!r} ({mutant.tried})", flush=True)
        print(dict(sorted(verdicts.items())))


if __name__ == "__main__":
    main()
