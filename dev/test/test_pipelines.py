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

    def __init__(self, block: Block, size: int, readers: int, owners: int = 1, writers: int = 1) -> None:
        self.block, self.size, self.owners = block, size, owners
        self.full = [[Barrier(writers) for _ in range(owners)] for _ in range(size)]
        self.empty = [Barrier(readers) for _ in range(size)]
        self.content: list[object] = [None] * size


class Pipeline:
    """What a role has of its own."""

    def __init__(self, stages: Stages) -> None:
        self.s, self.at, self.done, self.phases, self.reads = stages, 0, 0, [0] * stages.size, {}

    def acquire(self, content: object, owner: int = 0) -> Role:
        yield self.s.empty[self.at % self.s.size].ended(self.at // self.s.size & 1 ^ 1)
        self.next(content, owner)

    def next(self, content: object, owner: int = 0) -> None:
        i, s = self.at % self.s.size, self.s
        self.at += 1

        def land() -> None:
            s.content[i] = content
            s.full[i][owner % s.owners].arrive()

        s.block.flying.append(land)

    def fill(self, content: object) -> Role:
        """What warps do that write a stage themselves."""
        i, s = self.at % self.s.size, self.s
        yield s.empty[i].ended(self.at // s.size & 1 ^ 1)
        self.at += 1
        s.content[i] = content
        s.full[i][0].arrive()

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


class Inbox:
    """A pipeline between the blocks of a cluster, a stage in so many messages: `full` is the receiver's, `empty` the sender's.
    In a block alone warps store the messages, and no bytes are announced."""

    def __init__(self, block: Block, size: int, messages: int, readers: int, announced: bool = True) -> None:
        self.block, self.size, self.announced = block, size, announced
        self.full, self.empty = [Barrier(announced + messages) for _ in range(size)], [Barrier(readers) for _ in range(size)]
        self.content: list[list[tuple[int, ...]]] = [[] for _ in range(size)]
        for barrier in self.full if announced else ():
            barrier.arrive()  # the first round's bytes are announced

    def room(self, at: int) -> Callable[[], bool]:
        return self.empty[at % self.size].ended(at // self.size & 1 ^ 1)

    def send(self, at: int, message: tuple[int, ...]) -> None:  # called of the receiver's
        def land() -> None:
            self.content[at % self.size].append(message)
            self.full[at % self.size].arrive()

        self.block.flying.append(land)

    def arrived(self, at: int, speaks: bool) -> Role:
        yield self.full[at % self.size].ended(at // self.size & 1)
        if speaks and self.announced:
            self.full[at % self.size].arrive()

    def holds(self, at: int, *what: int) -> None:
        content = self.content[at % self.size]
        assert content and all(message[: len(what)] == what for message in content), "not what was to be read"


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


def conv_weight_fp8(stages: tuple[int, int, int], tiles: int, seed: int, steps: int = 4, released_at: int = 1) -> bool:
    """The loader fills two rings, of x and of dout; some warps write x, transposed, into a third one; the products read that, and dout goes into registers."""
    block, transposers = Block(seed), 3
    xs, douts = Stages(block, stages[0], transposers), Stages(block, stages[1], 12)
    strips = Stages(block, stages[2], 3, writers=transposers)

    def loader() -> Role:
        x, dout = Pipeline(xs), Pipeline(douts)
        for tile in range(tiles):
            yield from x.acquire(tile)
            yield from dout.acquire(tile)

    def transposer() -> Role:
        x, to = Pipeline(xs), Pipeline(strips)
        for tile in range(tiles):
            yield from x.arrived(tile)
            yield from to.fill(tile)
            x.release()

    def multiplier() -> Role:  # the four warps of a warpgroup; products end in order, one of them still runs when the next one begins
        dout, strip = [Pipeline(douts) for _ in range(4)], Pipeline(strips)
        for tile in range(tiles):
            for warp in dout:
                yield from warp.arrived(tile)
            yield from strip.arrived(tile)
            for step in range(steps):
                if step == released_at and tile:
                    strip.release()
                if step == steps - 1:
                    for warp in dout:
                        warp.release()

    return block.ends(loader(), *(transposer() for _ in range(transposers)), *(multiplier() for _ in range(3)))


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


def attention_forward(stages: int, groups: int, chunks: int, seed: int, late: int = 1) -> bool:
    """Warpgroups that read keys and values; the first one also loads, a step late."""
    block = Block(seed)
    keys, values = Stages(block, stages, groups), Stages(block, stages, groups)

    def multiplier(group: int) -> Role:
        k, v, to_keys, to_values = (Pipeline(s) for s in (keys, values, keys, values))
        for i in range(min(stages, chunks) if group == 0 else 0):
            yield from to_keys.acquire(i)
            yield from to_values.acquire(i)
        yield from k.arrived(0)
        for i in range(chunks):
            yield from v.arrived(i)
            if i + 1 < chunks:
                yield from k.arrived(i + 1)
            k.release()
            v.release()
            if group == 0 and i >= late and i - late + stages < chunks:
                yield from to_keys.acquire(i - late + stages)
                yield from to_values.acquire(i - late + stages)

    return block.ends(*(multiplier(group) for group in range(groups)))


def attention_backward(blocks: int, groups: int, heads: int, seed: int, sums_stages: int = 3, early: int = 0) -> bool:
    """All blocks of a cluster, each with the warpgroups that own keys, and two warps that take dq, of which the first also loads."""
    block, n, warps, stages = Block(seed), blocks * groups, 2, 4 if groups > 1 else 3
    keys = [Stages(block, 2, groups + warps) for _ in range(blocks)]
    chunks = [Stages(block, stages, 0) for _ in range(blocks)]
    ds = [Stages(block, 2, warps, writers=groups) for _ in range(blocks)]
    sums = [Inbox(block, sums_stages, warps, warps) for _ in range(blocks)]
    dots = [Inbox(block, 2, blocks * groups * warps, blocks, announced=groups > 1) for _ in range(blocks)]
    together = [Barrier(warps) for _ in range(blocks)]

    def chunk(rank: int, step: int) -> int:
        return (step - groups * rank) % n

    def key_gradients(rank: int, group: int) -> Role:
        k, q, d = Pipeline(keys[rank]), Pipeline(chunks[rank]), Pipeline(ds[rank])
        yield from k.arrived(0)
        yield from q.arrived((0, chunk(rank, 0)))
        for head in range(heads):
            yield from dots[rank].arrived(head, group == 0)
            for i in range(n):
                dots[rank].holds(head, head)
                yield from d.fill((head, chunk(rank, i)))
                last = i + 1 == n
                if last and head + 1 < heads:
                    yield from k.arrived(head + 1)
                if not last or head + 1 < heads:
                    yield from q.arrived((head + last, chunk(rank, 0 if last else i + 1)))
                q.hand_over()  # the next dS says that this chunk may go
            k.release()

    def query_gradients(rank: int, warp: int) -> Role:
        k, k_loads, q, d = Pipeline(keys[rank]), Pipeline(keys[rank]), Pipeline(chunks[rank]), Pipeline(ds[rank])
        upcoming = iter([(head, chunk(rank, i)) for head in range(heads) for i in range(n)])
        received, sent, met = 0, 0, 0

        def load_chunks(number: int) -> None:
            for content in [c for _, c in zip(range(number), upcoming, strict=False)]:
                q.next(content)

        def send_dots(head: int, part: int) -> Role:
            yield dots[rank].room(head)
            for to in dots:
                to.send(head, (head, rank, part, warp))

        if warp == 0:
            yield from k_loads.acquire(0)
            load_chunks(stages - 1 + early)
        for part in range(groups):
            yield from send_dots(0, part)
        for head in range(heads):
            yield from k.arrived(head)
            for i in range(n):
                part = i - max(n // 2 - 1, 0)
                if i >= groups:
                    yield from sums[rank].arrived(received, warp == 0)
                    sums[rank].holds(received, head, chunk(rank, i))
                yield from d.arrived((head, chunk(rank, i)))
                if warp == 0:
                    load_chunks(1)
                    if i == 0 and head + 1 < heads:
                        yield from k_loads.acquire(head + 1)
                if i >= groups:
                    sums[rank].content[received % sums_stages].remove((head, chunk(rank, i), warp))
                    sums[rank - 1].empty[received % sums_stages].arrive()
                    received += 1
                if i >= n - groups:
                    together[rank].arrive()
                    met += 1
                    yield lambda met=met: together[rank].phase >= met
                d.release()
                if i < n - groups:
                    yield sums[rank].room(sent)
                    sums[(rank + 1) % blocks].send(sent, (head, chunk(rank, i), warp))
                    sent += 1
                if 0 <= part < groups and head + 1 < heads:
                    yield from send_dots(head + 1, part)
            if warp == 0:
                dots[rank].content[head % 2].clear()
                for to in dots:
                    to.empty[head % 2].arrive()
            k.release()

    roles = [key_gradients(r, g) for r in range(blocks) for g in range(groups)]
    return block.ends(*roles, *(query_gradients(r, w) for r in range(blocks) for w in range(warps)))


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


def test_conv_weight_fp8() -> None:
    for seed, (stages, tiles, steps) in enumerate(product(((6, 7, 6), (8, 10, 9), (1, 1, 2)), (1, 7, 23), (2, 4))):
        assert conv_weight_fp8(stages, tiles, seed, steps)
    assert not conv_weight_fp8((6, 7, 1), 7, seed=0)  # a tile's strips are released when the next tile's have arrived


def test_conv_small() -> None:
    for seed, (slices, (group, slots), halos, warpgroups) in enumerate(product((1, 2, 5, 8), ((1, 3), (1, 12), (3, 3), (3, 4)), (2, 3), (1, 2))):
        assert conv_small(slices, group, 1, slots, halos, warpgroups, seed)
        assert conv_small(slices, group, 2, slots, halos, warpgroups, seed)
    assert not conv_small(8, 1, 1, 3, 2, 1, seed=0, ahead=-6)  # a slice's halo asked for six taps before the slice in front of it


def test_attention_forward() -> None:
    for seed, (stages, groups, chunks) in enumerate(product((4, 8), (1, 2), (1, 3, 4, 5, 9, 24))):
        assert attention_forward(stages, groups, chunks, seed)
    assert not attention_forward(4, 2, 9, seed=0, late=4)  # it would wait for what it loads itself, four steps on


def test_attention_backward() -> None:
    for seed, (blocks, heads) in enumerate(product(range(1, 9), (1, 2, 3, 7))):
        assert attention_backward(blocks, 2, heads, seed)
    for seed, heads in enumerate((1, 2, 3, 4, 5, 9)):
        assert attention_backward(1, 1, heads, seed)
    with pytest.raises(AssertionError, match="overwritten while it was read"):
        for seed in range(20):
            attention_backward(2, 2, 3, seed, early=1)
    assert not attention_backward(4, 2, 1, seed=0, sums_stages=1)  # who sends waits for the next block, around the ring, before it receives
