"""The simulated swap trace: it keeps to the pool's size, and allocators replay it alike."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest

from sgl_ext.bench.memory.granularity import (
    _FreeList,
    _Grouped,
    _operations,
    _SortedFreeList,
    replay,
)
from sgl_ext.bench.swap.trace import BLOCKS, PAGE, Pattern, Step, simulate
from sgl_ext.memory.block_groups import Run

# 94 blocks each in the end: 60 of them are more than the pool holds.
CONVERSATIONS = [[(200, 300 + owner)] * 3 for owner in range(60)]


def steps_of(pattern: Pattern, keep_idle: bool) -> list[Step]:
    return list(simulate(CONVERSATIONS, pattern, seed=1, rate=10.0, keep_idle=keep_idle))


@pytest.mark.parametrize("keep_idle", [False, True])
@pytest.mark.parametrize("pattern", get_args(Pattern))
def test_the_trace_is_possible_and_complete(pattern: Pattern, keep_idle: bool) -> None:
    resident: Counter[int] = Counter()
    swapped: dict[int, int] = {}
    freed: list[int] = []
    swaps = 0
    for step in steps_of(pattern, keep_idle):
        for owner in step.swap_out:
            swapped[owner] = resident.pop(owner)
            swaps += 1
        for owner, blocks, swapped_in in step.admit:
            if swapped_in:
                assert swapped.pop(owner) == blocks
            assert owner not in swapped
            resident[owner] += blocks
        resident.update(step.append)
        assert resident.total() <= BLOCKS
        assert set(step.close) <= resident.keys()
        for owner in step.free:
            tokens = sum(map(sum, CONVERSATIONS[owner]))
            assert resident.pop(owner) == -(-tokens // PAGE)
            freed.append(owner)
    assert sorted(freed) == list(range(60))
    assert swaps > 60


def test_allocators_move_the_same_blocks() -> None:
    steps = steps_of("random", keep_idle=False)
    assert steps == steps_of("random", keep_idle=False)
    moved = [replay(steps, pool()) for pool in (_Grouped, _FreeList, _SortedFreeList)]
    assert len({(out.blocks, back.blocks) for out, back in moved}) == 1
    out, back = moved[0]
    assert out.blocks == back.blocks  # who was swapped out came back
    grouped, listed, ordered = (out.operations + back.operations for out, back in moved)
    assert grouped < ordered < listed < out.blocks + back.blocks


def test_an_operation_is_contiguous_on_both_sides() -> None:
    assert _operations([Run(1, 10)], [Run(5, 10)]) == 1
    assert _operations([Run(1, 4), Run(9, 6)], [Run(5, 4), Run(20, 6)]) == 2
    assert _operations([Run(1, 4), Run(9, 6)], [Run(5, 7), Run(20, 3)]) == 3
