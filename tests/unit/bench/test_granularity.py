"""Replay of swapped requests on block groups: what a run of blocks is, and when requests swap."""

from __future__ import annotations

import random

import pytest

from sgl_ext.bench.memory.granularity import (
    Length,
    Replayed,
    Swaps,
    _Pool,
    _Request,
    _runs,
    replay,
)

PAGE = 16


def turns(count: int) -> list[Length]:
    chance = random.Random(7)  # noqa: S311
    return [Length(chance.randint(20, 900), chance.randint(2, 300)) for _ in range(count)]


def test_blocks_are_in_the_runs_of_their_order() -> None:
    assert _runs([4, 5, 6, 9, 8, 20]) == [(4, 3), (9, 1), (8, 1), (20, 1)]
    swaps = Swaps()
    swaps.add([4, 5, 6, 9])
    swaps.add([7])
    assert (swaps.blocks, swaps.runs, swaps.granularity) == (5, 3, 5 / 3)
    assert Swaps().granularity == 0


def test_a_pool_that_holds_all_requests_swaps_none() -> None:
    few = [Length(100, 50)] * 40
    assert replay(few, 40 * 10, 1000, 25, 0) == Replayed(Swaps(), Swaps())


def test_swapped_requests_come_back() -> None:
    swaps = replay(turns(150), 300, 1000, 25, 0)
    # Only a request that was swapped out comes back, and it needs room for one more token.
    assert 0 < swaps.back.blocks <= 1.2 * swaps.out.blocks
    assert swaps.out.granularity > 1
    assert replay(turns(150), 300, 1000, 25, 0) == swaps


@pytest.mark.parametrize(("first_group", "runs"), [(PAGE, 20), (1000, 2)])
def test_requests_grow_side_by_side_in_groups(first_group: int, runs: int) -> None:
    pool = _Pool(1000, first_group)
    for owner in range(2):
        pool.start(_Request(owner, 0.0, 15, 1000))
    for _ in range(9 * PAGE):
        assert [*pool.step()] == []
    for one in [*pool.running]:
        pool.stop(one, swap=True)
    assert (pool.swaps.out.blocks, pool.swaps.out.runs) == (20, runs)


@pytest.mark.parametrize("every", [5, 50])
def test_frequent_priorities_swap_more(every: int) -> None:
    swaps = replay(turns(150), 300, 1000, every, 1)
    seldom = replay(turns(150), 300, 1000, 10 * every, 1)
    assert swaps.out.blocks > seldom.out.blocks
