"""Blocks per contiguous run of the requests that are swapped, by the size of a new block group.

No model runs. Requests with the lengths of ShareGPT's turns take their blocks from
``BlockGroups``, one token per iteration, and new priorities preempt them. FastSwitch varies the
same size (Figure 11) and reports about 20 blocks per run on its A10 (§3.1).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice, product
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from sgl_ext.bench.data.texts import sharegpt_whole_conversations
from sgl_ext.bench.harness.report import Report
from sgl_ext.memory.block_groups import BlockGroups, Run
from sgl_ext.memory.runs import runs_of
from sgl_ext.models import SMOLLM2, prepare

_PAGE = 16
_BLOCKS = 2304
"""Device pool: 4.5 GB of LLaMA-8B's KV, which an A10 has left."""
_LONGEST = 4096
"""Tokens of the longest turn, with all before it."""
_LOAD = 1.2
"""Requests that arrive, relative to what the pool can answer."""
_FIRST_GROUPS = (64, 250, 1000, 3000)
"""Sizes of a new group, in tokens (FastSwitch, Figure 11: 64 to 3,000)."""
_EVERY = (100, 50, 25)
"""Iterations between draws of the priorities."""


class Length(NamedTuple):
    """Lengths of a turn, in tokens."""

    prompt: int
    """All earlier turns, and the user's message."""
    answer: int


@dataclass
class Swaps:
    """Blocks of the requests that were swapped, and the contiguous runs that they were in."""

    blocks: int = 0
    runs: int = 0

    def add(self, blocks: Sequence[int]) -> None:
        self.blocks += len(blocks)
        self.runs += len(_runs(blocks))

    @property
    def granularity(self) -> float:
        """Blocks per run; 0 if nothing was swapped."""
        return self.blocks / self.runs if self.runs else 0.0


class Replayed(NamedTuple):
    out: Swaps
    back: Swaps


@dataclass
class _Request:
    owner: int
    at: float
    tokens: int
    end: int
    priority: float = 0.0
    blocks: list[int] = field(default_factory=list)
    """Its blocks in the order of its tokens; empty if it is not running."""
    swapped: bool = False

    @property
    def needed(self) -> int:
        """Blocks for its tokens and the next one."""
        return self.tokens // _PAGE + 1


class _Pool:
    """Pool of blocks that requests are swapped out of and into."""

    def __init__(self, blocks: int, first_group: int) -> None:
        self._groups = BlockGroups(blocks, page=_PAGE, expected_tokens=first_group)
        self.swaps = Replayed(Swaps(), Swaps())
        self.running: list[_Request] = []

    def start(self, one: _Request) -> None:
        """Allocates the blocks of a new or swapped-out request, for which there is room."""
        given = self._groups.allocate([(one.owner, one.needed)]) or [[]]
        one.blocks = [at for run in given[0] for at in range(run.start, run.start + run.length)]
        if one.swapped:
            self.swaps.back.add(one.blocks)
        self.running.append(one)

    def stop(self, one: _Request, *, swap: bool) -> None:
        """Releases the blocks of a request that has ended, or is swapped out."""
        if swap:
            self.swaps.out.add(one.blocks)
        self._groups.release(_runs(one.blocks))
        self._groups.close(one.owner)
        one.blocks, one.swapped = [], swap
        self.running.remove(one)

    def step(self) -> Iterator[_Request]:
        """Appends a token to each running request; yields those that have ended.

        Requests of the lowest priority are swapped out if there are too few blocks.
        """
        while sum(len(one.blocks) < one.needed for one in self.running) > self._groups.available:
            self.stop(min(self.running, key=attrgetter("priority")), swap=True)
        growing = [one for one in self.running if len(one.blocks) < one.needed]
        given = self._groups.append([one.owner for one in growing]) or []
        for one, block in zip(growing, given, strict=True):
            one.blocks.append(block)
        for one in [*self.running]:
            one.tokens += 1
            if one.tokens == one.end:
                self.stop(one, swap=False)
                yield one


def replay(
    turns: Sequence[Length], blocks: int, first_group: int, every: int, seed: int
) -> Replayed:
    """Replays turns until the last one has arrived.

    Args:
        blocks: blocks of the device pool, enough for the longest turn.
        first_group: size of a new group, in tokens.
        every: iterations between draws of the priorities.
    """
    chance = random.Random(seed)  # noqa: S311
    at_once = blocks * _PAGE / statistics.mean(one.prompt + one.answer / 2 for one in turns)
    rate = _LOAD * at_once / statistics.mean(one.answer for one in turns)
    coming: list[_Request] = []
    at = 0.0
    for owner, turn in enumerate(turns):
        at += chance.expovariate(rate)
        coming.append(_Request(owner, at, turn.prompt, turn.prompt + turn.answer))
    coming.reverse()
    pool, present = _Pool(blocks, first_group), list[_Request]()
    for iteration in count():
        changed = False
        while coming and coming[-1].at <= iteration:
            one = coming.pop()
            one.priority, changed = chance.random(), True
            present.append(one)
        if not coming:
            break
        if iteration % every == 0:
            for one in present:
                one.priority = chance.random()
            changed = True
        if changed:
            _schedule(pool, present, blocks)
        for one in pool.step():
            present.remove(one)
    return pool.swaps


def _schedule(pool: _Pool, present: Sequence[_Request], blocks: int) -> None:
    """Runs the requests of the highest priorities that fit."""
    chosen: list[_Request] = []
    for one in sorted(present, key=attrgetter("priority"), reverse=True):
        if one.needed > blocks:
            break
        blocks -= one.needed
        chosen.append(one)
    owners = {one.owner for one in chosen}
    for one in [each for each in pool.running if each.owner not in owners]:
        pool.stop(one, swap=True)
    for one in chosen:
        if not one.blocks:
            pool.start(one)


def _runs(blocks: Sequence[int]) -> list[Run]:
    """Returns the contiguous runs of blocks."""
    return [Run(*run) for run in runs_of(np.array(blocks, np.int64))]


def lengths() -> Iterator[Length]:
    """Yields the lengths of ShareGPT's turns, in SmolLM2's tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(prepare(SMOLLM2))
    for texts in sharegpt_whole_conversations():
        before = 0
        for user, assistant in zip(texts[::2], texts[1::2], strict=False):
            said, answer = (len(tokenizer.encode(text)) for text in (user, assistant))
            if before + said + answer > _LONGEST:
                break
            if said and answer:
                yield Length(before + said, answer)
            before += said + answer


def measure(report: Report, *, quick: bool) -> None:
    """Adds the blocks per run of each size and frequency, and how much they differ by size."""
    turns = [*islice(lengths(), 200 if quick else 1500)]
    seeds = range(1 if quick else 5)
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for every, first_group in product(_EVERY, _FIRST_GROUPS):
        of = [replay(turns, _BLOCKS, first_group, every, seed) for seed in seeds]
        out_of, back = ([each[way].granularity for each in of] for way in (0, 1))
        found[every, first_group] = statistics.mean(out_of), statistics.mean(back)
        run = {
            "what": "granularity", "every": every, "first_group": first_group,
            "seeds": len(seeds), "turns": len(turns), "pool": _BLOCKS,
            "blocks_out": statistics.mean(each.out.blocks for each in of),
            "out": statistics.mean(out_of), "out_low": min(out_of), "out_high": max(out_of),
            "back": statistics.mean(back), "back_low": min(back), "back_high": max(back),
        }  # fmt: skip
        report.runs.append(run)
        report.figures[f"granularity_{first_group}_every_{every}"] = statistics.mean(out_of)
    for every in _EVERY:
        ways = zip(*(found[every, size] for size in _FIRST_GROUPS), strict=True)
        for name, of_sizes in zip(("", "_back"), ways, strict=True):
            spread = max(of_sizes) / min(of_sizes) - 1
            report.figures[f"granularity_spread{name}_every_{every}"] = spread
