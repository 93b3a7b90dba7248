"""Tests of host memory for preempted requests: only present pages are read, and none leak."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from delayed_copies import DelayedEngine
from stack_kit import BLOCKS, Machine
from tier_kit import DEADLINE_S, key, keys, places

from sgl_ext.config import SwapExperiment
from sgl_ext.swap.manager import SwapManager, Swapped

PAGE = 4


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine(PAGE, 16)
    yield machine
    machine.stack.host.check_integrity()
    machine.close()


def manager_of(machine: Machine, capacity: int = 16) -> SwapManager:
    return SwapManager(machine.stack, capacity, SwapExperiment())


def out(
    machine: Machine,
    swap: SwapManager,
    rid: str,
    names: list[int],
    tail: int | None = None,
    at: int = 0,
) -> Swapped:
    """Swaps out a request whose whole pages are in the blocks from ``at`` on.

    Its partial last page, if any, is in block ``tail``. All blocks get new contents first.
    """
    blocks = at + np.arange(len(names))
    machine.stack.in_flight.wait(blocks, DEADLINE_S)
    machine.compute(keys(*names), blocks)
    saved = None
    if tail is not None:
        machine.stack.in_flight.wait(places(tail), DEADLINE_S)
        machine.compute([key(1000 + tail)], places(tail))
        saved = swap.save_tail(tail)
    machine.stack.stores.store(keys(*names), blocks)
    tokens = len(names) * PAGE + (tail is not None)
    swap.out(rid, tokens, keys(*names), saved)
    swap.check_integrity()
    found = swap.get(rid)
    assert found is not None
    return found


def settle(machine: Machine, swap: SwapManager) -> None:
    machine.until(lambda: not machine.stack.stores.in_progress)
    while machine.stack.stores.completed():
        machine.stack.stores.pop()
    swap.advance()
    swap.check_integrity()


def back(machine: Machine, swap: SwapManager, swapped: Swapped, first: int) -> None:
    """Loads the request into the last blocks, and checks its whole pages."""
    swap.hold(swapped, first)
    count = len(swapped.keys) - first + (swapped.tail is not None)
    blocks = np.arange(BLOCKS - count, BLOCKS)
    machine.stack.in_flight.wait(blocks, DEADLINE_S)
    machine.blocks[blocks] = 0xDD
    for ticket in swap.load(swapped, blocks):
        ticket.wait(DEADLINE_S)
    whole = blocks[: len(swapped.keys) - first]
    assert machine.right(swapped.keys[first:], whole)


def test_pages_go_on_to_lower_tiers_when_the_budget_is_nearly_used(machine: Machine) -> None:
    """Stores pages that were used once only, and unpins them when room is needed."""
    swap = manager_of(machine, 6)
    machine.stack.keepers.append(swap.give_up_one)
    out(machine, swap, "a", [1, 2, 3])
    settle(machine, swap)
    machine.until(lambda: True)
    assert not machine.shelf.pages
    assert not swap.give_up_one()
    out(machine, swap, "b", [4, 5, 6, 7], at=8)  # one page exceeds the budget
    settle(machine, swap)
    machine.until(lambda: len(machine.shelf.pages) == 4)
    machine.until(lambda: machine.stack.host._pinned == 6)  # the stores have ended
    machine.stack.make_room(12)
    assert machine.stack.host.room == 13  # those of the first request stay
    swap.check_integrity()
    pages = machine.stack.host.reserve(13)
    assert pages is not None
    machine.stack.host.release(pages)
    one, other = swap.get("a"), swap.get("b")
    assert one is not None and other is not None
    assert (swap.readable(one, 0), swap.readable(other, 0)) == (True, False)
    back(machine, swap, one, 0)
    swap.drop("a")
    swap.drop("b")


def test_no_page_is_readable_after_the_weights_have_changed(machine: Machine) -> None:
    swap = manager_of(machine)
    swapped = out(machine, swap, "one", [1, 2, 3], tail=9)
    machine.until(lambda: swap.readable(swapped, 0))
    machine.disable("the weights have changed")
    # The radix tree may still have the whole pages on the device.
    assert [swap.readable(swapped, first) for first in (0, 3)] == [False, False]


def test_a_request_resumes_with_the_kv_that_it_had(machine: Machine) -> None:
    swap = manager_of(machine)
    swapped = out(machine, swap, "one", [1, 2, 3], tail=9)
    settle(machine, swap)
    machine.until(lambda: swap.readable(swapped, 0))
    machine.blocks[:10] = 0xEE
    back(machine, swap, swapped, 1)
    assert machine.right([key(1009)], places(BLOCKS - 1))
    swap.drop("one")
    assert "one" not in swap
    assert machine.stack.host._pinned == 0


@pytest.mark.parametrize("by_layer", [False, True])
def test_no_page_is_readable_before_it_is_copied(by_layer: bool) -> None:
    machine = Machine(PAGE, 16, bytes_per_second=1 << 14, by_layer=by_layer)
    swap = manager_of(machine)
    swapped = out(machine, swap, "one", [1, 2], tail=9)
    other = out(machine, swap, "other", [4, 5], at=20)
    assert swap.readable(swapped, 0) is None
    assert swap.readable(swapped, 2) is None  # its partial page is not there either
    assert swap.readable(other, 2) is True
    machine.until(lambda: swap.readable(swapped, 0))
    back(machine, swap, swapped, 0)
    assert machine.right([key(1009)], places(BLOCKS - 1))
    swap.clear()
    settle(machine, swap)
    machine.close()


def test_pages_within_the_budget_are_not_evicted(machine: Machine) -> None:
    swap = manager_of(machine, capacity=4)
    kept = out(machine, swap, "kept", [1, 2, 3, 4])
    settle(machine, swap)
    lost = out(machine, swap, "lost", [5, 6, 7, 8])
    settle(machine, swap)
    for begin in range(20, 60, 8):
        assert machine.store(keys(*range(begin, begin + 8)), np.arange(8))
    assert swap.readable(kept, 0) is True
    assert swap.readable(lost, 0) is False
    assert swap.readable(lost, 4) is True
    swap.drop("kept")
    for begin in range(100, 140, 8):
        assert machine.store(keys(*range(begin, begin + 8)), np.arange(8))
    assert swap.readable(kept, 0) is False


def test_pages_beyond_the_budget_are_pinned_when_budget_is_freed(machine: Machine) -> None:
    swap = manager_of(machine, capacity=4)
    out(machine, swap, "first", [1, 2, 3, 4])
    second = out(machine, swap, "second", [5, 6, 7, 8])
    settle(machine, swap)
    swap.drop("first")
    swap.advance()
    for begin in range(20, 60, 8):
        assert machine.store(keys(*range(begin, begin + 8)), np.arange(8))
    assert swap.readable(second, 0) is True


def test_pages_that_host_memory_has_evicted_are_stored_again(machine: Machine) -> None:
    swap = manager_of(machine)
    for begin in (1, 20, 28, 36):  # host memory has 16 slots
        assert machine.store(keys(*range(begin, begin + 8)), np.arange(8))
    assert not machine.stack.host.lookup(keys(1))
    machine.compute(keys(1, 2, 3), np.arange(3))
    for _ in range(2):  # the second time they are already being copied
        machine.stack.stores.store_lost(keys(1, 2, 3), np.arange(3))
    assert machine.stack.stores.in_progress <= 1
    swap.out("one", 3 * PAGE, keys(1, 2, 3), None)
    swapped = swap.get("one")
    assert swapped is not None
    machine.until(lambda: not machine.stack.stores.in_progress)
    assert machine.stack.stores.completed() == 0  # SGLang did not ask for them
    assert swap.advance()
    machine.blocks[:3] = 0xEE
    back(machine, swap, swapped, 0)
    swap.drop("one")


def test_held_pages_are_not_evicted_even_beyond_the_budget(machine: Machine) -> None:
    swap = manager_of(machine, capacity=1)
    swapped = out(machine, swap, "one", [1, 2, 3, 4])
    settle(machine, swap)
    swap.hold(swapped, 0)
    for begin in range(20, 60, 8):
        machine.store(keys(*range(begin, begin + 8)), np.arange(8))
    for ticket in swap.load(swapped, np.arange(60, 64)):
        ticket.wait(DEADLINE_S)
    assert machine.right(keys(1, 2, 3, 4), np.arange(60, 64))
    swap.drop("one")
    assert machine.stack.host._pinned == 0


def test_pages_stay_pinned_until_they_are_copied_again() -> None:
    delayed = DelayedEngine(random.Random(0))  # noqa: S311
    machine = Machine(PAGE, 16, delayed=delayed)
    swap = manager_of(machine)
    for name, first in (("one", 1), ("other", 4)):
        out(machine, swap, name, [first, first + 1, first + 2], at=first)
        delayed.let_happen(1)
        settle(machine, swap)
    swap.clear()
    for first in (1, 4):
        swap.copy_again(keys(first, first + 1, first + 2), first + np.arange(3))
    assert swap.counts.copied_again == 6
    assert machine.stack.host._pinned == 6
    last = delayed.pending.pop()
    last.happen(well=True)
    machine.stack.poll()
    assert machine.stack.host._pinned == 3
    delayed.let_happen(1)
    machine.stack.poll()
    assert machine.stack.host._pinned == 0
    machine.close()


def test_a_request_without_room_for_its_partial_page_is_lost(machine: Machine) -> None:
    swap = manager_of(machine, capacity=0)
    swapped = out(machine, swap, "one", [1], tail=5)
    settle(machine, swap)
    assert swapped.tail is None
    assert swap.readable(swapped, 0) is False


def test_shared_pages_are_stored_once(machine: Machine) -> None:
    swap = manager_of(machine)
    one = out(machine, swap, "one", [1, 2, 3])
    settle(machine, swap)
    other = out(machine, swap, "other", [1, 2, 4])
    settle(machine, swap)
    assert len(machine.stack.host) == 4
    swap.drop("one")
    assert swap.readable(other, 0) is True
    back(machine, swap, other, 0)
    swap.drop("other")
    assert swap.readable(one, 0) is True  # unpinned pages stay until their slots are needed
    assert machine.stack.host._pinned == 0


@pytest.mark.parametrize("seed", range(5))
def test_random_operations_leak_no_pages(machine: Machine, seed: int) -> None:
    chance, swap = random.Random(seed), manager_of(machine, capacity=10)  # noqa: S311
    names = [f"r{at}" for at in range(6)]
    for _ in range(300):
        rid = chance.choice(names)
        swapped = swap.get(rid)
        if swapped is None:
            begin, count = chance.randrange(30), chance.randint(0, 5)
            tail = chance.choice([None, chance.randrange(20, 40)])
            out(machine, swap, rid, [*range(begin, begin + count)], tail)
        elif chance.random() < 0.3:
            swap.drop(rid)
        elif swap.readable(swapped, first := chance.randint(0, len(swapped.keys))) is True:
            back(machine, swap, swapped, first)
            swap.drop(rid)
        if chance.random() < 0.5:
            machine.stack.stores.presume()
        while machine.stack.stores.completed():
            machine.stack.stores.pop()
        swap.advance()
    swap.clear()
    settle(machine, swap)
    # The tier below pins pages while it writes them.
    machine.until(lambda: not machine.stack.stores._dropped and not machine.stack.host._pinned)
    assert swap._used == 0
    assert machine.stack.host.capacity - machine.stack.host.free == len(machine.stack.host)
