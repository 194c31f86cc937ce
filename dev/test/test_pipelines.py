"""The barriers of Hopper's kernels without a GPU: models of train_unet.cu's blocks (Pipeline, Results, Turn) and of the roles of each kernel,
which wait, release and hand over as those do, in random order. A stage must hold what its reader expects until it is released, and all must end.
The two rules that Pipeline states were bugs once: what breaks them is found here too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product

import pytest

Role = Iterator[Callable[[], bool]]  # yields what it waits for


class Barrier:
    """An mbarrier: a phase ends with so many arrivals. Who waits says no more than whether the phase is an odd one."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals, self.pending, self.phase = arrivals, arrivals, 0

    def arrive(self) -> None:
        self.pending -= 1
        if not self.pending:
            self.pending, self.phase = self.arrivals, self.phase + 1

    def ended(self, parity: int) -> Callable[[], bool]:
        return lambda: self.phase & 1 != parity


class Block:
    """A block of threads: its roles, and what TMA has still to bring, in any order."""

    def __init__(self, seed: int) -> None:
        self.draw, self.flying = random.Random(seed), []

    def ends(self, *roles: Role) -> bool:
        """Whether all come to their end when what goes on next is drawn from all that can."""
        waiting = [(role, next(role, None)) for role in roles]
        while waiting := [(role, condition) for role, condition in waiting if condition]:
            able = [i for i, (_, condition) in enumerate(waiting) if condition()]
            if not able and not self.flying:
                return False
            i = self.draw.randrange(len(able) + len(self.flying))
            if i < len(able):
                role, _ = waiting[able[i]]
                waiting[able[i]] = role, next(role, None)
            else:
                self.flying.pop(i - len(able))()
        return True


class Stages:
    """What the roles share of a Pipeline."""

    def __init__(self, block: Block, size: int, readers: int, owners: int = 1) -> None:
        self.block, self.size, self.owners = block, size, owners
        self.full = [[Barrier(1) for _ in range(owners)] for _ in range(size)]
        self.empty = [Barrier(readers) for _ in range(size)]
        self.content: list[object] = [None] * size


class Pipeline:
    """What a role has of its own."""

    def __init__(self, stages: Stages) -> None:
        self.s, self.at, self.done, self.phases, self.reads = stages, 0, 0, [0] * stages.size, {}

    def acquire(self, content: object, owner: int = 0) -> Role:
        i, s = self.at % self.s.size, self.s
        yield s.empty[i].ended(self.at // s.size & 1 ^ 1)
        self.at += 1

        def land() -> None:
            s.content[i] = content
            s.full[i][owner % s.owners].arrive()

        s.block.flying.append(land)

    def arrived(self, content: object, owner: int = 0) -> Role:
        i, s = self.at % self.s.size, self.s
        yield s.full[i][owner % s.owners].ended(self.phases[i] if s.owners == 2 else self.at // s.size & 1)
        self.phases[i] ^= 1
        self.reads[i], self.at = content, self.at + 1
        assert s.content[i] == content, "another one's arrival"

    def hand_over(self) -> int:
        i, self.done = self.done % self.s.size, self.done + 1
        if i in self.reads:
            assert self.s.content[i] == self.reads.pop(i), "overwritten while it was read"
        return i

    def release(self) -> None:
        self.s.empty[self.hand_over()].arrive()

    def pass_over(self, n: int) -> None:
        self.at += n
        self.done = self.at


def conv_tiles(
    taps: int, blocks: int, resident: bool, slices: int, skips: int, addend: bool, stages: int, seed: int, order: str = "", owners: int = 2
) -> bool:
    products = slices + skips
    pieces = products + blocks if addend else max(products, blocks)
    results, unit = pieces - blocks, 1 if resident else 2
    block, tiles = Block(seed), 5
    pixels, weights = Stages(block, stages, unit, owners if resident else 1), Stages(block, 6 if taps == 9 else 4, 2)
    staged = [[Barrier(1), Barrier(1)] for _ in range(stages)]
    turns = [Barrier(2), Barrier(2)]

    def loader() -> Role:
        to, heavy = Pipeline(pixels), Pipeline(weights)
        upcoming = iter([(tile, piece) for tile in range(tiles) for piece in range(pieces)])

        def load_pixels(n: int) -> Role:
            for content in [c for _, c in zip(range(n), upcoming, strict=False)]:
                yield from to.acquire(content, content[0] & 1)

        if resident:
            yield from load_pixels(tiles * pieces)
            return
        yield from load_pixels(2 if order == "two ahead" else 1)
        for tile in range(tiles):
            for s, tap in product(range(slices), range(taps)):
                if order == "before the weights" and tap == 0:
                    yield from load_pixels(1)
                yield from heavy.acquire((tile, s, tap))
                if order != "before the weights" and tap == taps // 2:
                    yield from load_pixels(1)
            yield from load_pixels(pieces - slices)

    def multiplier(g: int) -> Role:
        p, w, others = Pipeline(pixels), Pipeline(weights), pieces if resident else 0
        p.pass_over(g * others)
        if resident and g:
            turns[0].arrive()
        for turn, tile in enumerate(range(g, tiles, 2) if resident else range(tiles)):
            if resident:
                turns[g].arrive()
                yield lambda turn=turn: turns[g].phase > turn
            for s in range(products):
                yield from p.arrived((tile, s), g)
                for tap in range(taps if s < slices else 1):
                    if not resident:
                        yield from w.arrived((tile, s, tap))
                    if not resident and (s or tap):
                        w.release()
                    if s and s <= results and tap == (1 if resident and taps > 1 and s < slices else 0):
                        p.release()
            if resident:
                turns[g ^ 1].arrive()
            else:
                w.release()
            if results >= products:
                p.release()
            for b in range(blocks):
                if results + b >= products:
                    yield from p.arrived((tile, results + b), g)
                staged[p.hand_over()][g].arrive()
            p.pass_over(others)

    def storer(g: int) -> Role:
        others, phases = pieces if resident else 0, [0] * stages
        at = g * others + results
        for _ in range(g, tiles, 2) if resident else range(tiles):
            for _ in range(blocks):
                i = at % stages
                yield staged[i][g].ended(phases[i])
                phases[i] ^= 1
                pixels.empty[i].arrive()
                at += 1
            at += others + results

    return block.ends(loader(), multiplier(0), multiplier(1), storer(0), storer(1))


def conv_weight_tma(stages: int, busy: int, bias_warps: int, tiles: int, seed: int, in_flight: int = 2) -> bool:
    block = Block(seed)
    shared = Stages(block, stages, busy + bias_warps)

    def loader() -> Role:
        to = Pipeline(shared)
        for tile in range(tiles):
            yield from to.acquire(tile)

    def reader(in_flight: int) -> Role:  # warpgroups release a stage two products later; what they still have at the end nobody fills again
        p = Pipeline(shared)
        for tile in range(tiles):
            yield from p.arrived(tile)
            if tile >= in_flight:
                p.release()

    return block.ends(loader(), *(reader(in_flight) for _ in range(busy)), *(reader(0) for _ in range(bias_warps)))


def conv_small(slices: int, group: int, split: int, slots: int, halos: int, warpgroups: int, seed: int, ahead: int = 6) -> bool:
    block, groups, in_flight = Block(seed), 9 // group, 2 if group == 1 else 1
    pixels, weights = Stages(block, halos, warpgroups), Stages(block, slots, warpgroups)
    half = seed % split
    first, end = slices * groups * half // split, slices * groups * (half + 1) // split

    def loader() -> Role:
        p, w, upcoming = Pipeline(pixels), Pipeline(weights), first // groups
        for step in range(first, min(end, first + slots)):
            yield from w.acquire(step)
        yield from p.acquire(upcoming)
        for step in range(first, end):
            if upcoming < (end - 1) // groups and step >= upcoming * groups + ahead // group:
                upcoming += 1
                yield from p.acquire(upcoming)
            if step - first >= slots:
                yield from w.acquire(step)

    def multiplier() -> Role:
        p, w, done = Pipeline(pixels), Pipeline(weights), first % groups
        for step in range(first, end):
            if step == first or step % groups == 0:
                yield from p.arrived(step // groups)
            yield from w.arrived(step)
            if step - first >= in_flight:
                w.release()
                done += 1
                if done % groups == 0:
                    p.release()

    return block.ends(loader(), *(multiplier() for _ in range(warpgroups)))


def test_conv_tiles() -> None:
    tried = 0
    for taps, resident, slices, addend, stages in product((1, 9), (False, True), (1, 2, 3, 5), (False, True), (2, 3, 4, 7)):
        for blocks, skips in product((1, 2, 3) if taps == 1 else (1,), (0, 1, 3) if resident and taps == 9 and not addend else (0,)):
            if stages <= blocks or (not resident and slices < blocks):
                continue  # the host does not choose these
            tried += 1
            assert conv_tiles(taps, blocks, resident, slices, skips, addend, stages, seed=tried)
    assert tried > 100


@pytest.mark.parametrize("order", ["two ahead", "before the weights"])
def test_never_so_far_ahead(order: str) -> None:
    assert not conv_tiles(9, 1, False, 3, 0, False, 2, seed=0, order=order)


def test_own_full_barrier() -> None:
    with pytest.raises(AssertionError, match="another one's arrival"):
        for seed in range(100):
            conv_tiles(1, 3, True, 2, 0, True, 4, seed, owners=1)


def test_conv_weight_tma() -> None:
    for seed, (stages, busy, bias_warps, tiles) in enumerate(product((4, 5, 10), (1, 2, 3), (0, 2, 4), (1, 7, 23))):
        assert conv_weight_tma(stages, busy, bias_warps, tiles, seed)
    assert not conv_weight_tma(2, 1, 0, 7, seed=0)  # two stages cannot have two products in flight and one more on its way


def test_conv_small() -> None:
    for seed, (slices, (group, slots), halos, warpgroups) in enumerate(product((1, 2, 5, 8), ((1, 3), (1, 12), (3, 3), (3, 4)), (2, 3), (1, 2))):
        assert conv_small(slices, group, 1, slots, halos, warpgroups, seed)
        assert conv_small(slices, group, 2, slots, halos, warpgroups, seed)
    assert not conv_small(8, 1, 1, 3, 2, 1, seed=0, ahead=-6)  # a slice's halo asked for six taps before the slice in front of it
