"""Pages that leave the device for tiers while their blocks stay."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from stack_kit import BLOCKS, Machine
from tier_kit import keys

from sgl_ext.tiers.departures import PATIENCE_S, Departures

PAGE = 4
PLACES = 8
NAMES = keys(*range(BLOCKS))


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine(PAGE, PLACES)
    yield machine
    machine.close()


def test_many_pages_leave_through_little_host_memory(machine: Machine) -> None:
    """Each page is on the shelf, or in host memory, when its block is given away."""
    departures = Departures(machine.stack, lambda: 1.0)
    blocks = np.arange(BLOCKS)
    machine.compute(NAMES, blocks)
    left: set[int] = set()

    def leave() -> bool:
        for first in range(0, BLOCKS, 16):
            nodes = slice(first, first + 16)
            if first not in left and departures.leave(NAMES[nodes], blocks[nodes]):
                left.add(first)
                machine.blocks[nodes] = 0xDD
        return len(left) == BLOCKS // 16

    machine.until(leave)
    departures.end()
    machine.until(lambda: NAMES[-1] in machine.shelf.pages or machine.stack.host.present(NAMES))
    machine.stack.host.clear()
    machine.until(lambda: all(name in machine.shelf.pages for name in NAMES))
    for first in range(0, BLOCKS, PLACES):
        rid = f"load {first}"
        names = NAMES[first : first + PLACES]
        assert machine.prefixes.lookup(rid, names, 0) in (0, PLACES)
        machine.settle(rid)
        assert machine.prefixes.lookup(rid, names, 0) == PLACES
        assert machine.load(rid, names, blocks[first : first + PLACES])
        machine.stack.host.clear()


def test_pages_that_were_used_again_leave_once_a_tier_has_them(machine: Machine) -> None:
    """Their uses alone do not make a tier take them anew, while they wait to leave."""
    departures = Departures(machine.stack, lambda: 1.0)  # never gives up waiting
    names, blocks = NAMES[:4], np.arange(4)
    machine.store(names, blocks)
    machine.stack.used(names, 2)
    machine.until(lambda: departures.leave(names, blocks))
    machine.until(lambda: {*names} <= {*machine.shelf.pages})  # it had begun to store them


def test_pages_leave_in_any_case_when_no_tier_takes_them(machine: Machine) -> None:
    now = 1.0
    departures = Departures(machine.stack, lambda: now)
    blocks = np.arange(BLOCKS)
    machine.compute(NAMES, blocks)
    machine.shelf.open.clear()  # the tier hangs
    for _ in range(20):
        assert not departures.leave(NAMES, blocks)
        machine.poll()
    machine.until(lambda: not machine.stack.stores.in_progress)
    assert not departures.leave(NAMES, blocks)  # sees what host memory has received by now
    now += PATIENCE_S - 0.1
    assert not departures.leave(NAMES, blocks)
    now += 0.2
    assert departures.leave(NAMES, blocks)
    machine.shelf.open.set()


def test_an_attempt_that_was_given_up_does_not_shorten_the_next_one(machine: Machine) -> None:
    now = 1.0
    departures = Departures(machine.stack, lambda: now)
    blocks = np.arange(BLOCKS)
    machine.compute(NAMES, blocks)
    machine.shelf.open.clear()
    assert not departures.leave(NAMES, blocks)
    now += 10 * PATIENCE_S  # nothing had to leave meanwhile
    assert not departures.leave(NAMES, blocks)
    machine.shelf.open.set()


def test_pages_of_disabled_tiers_leave_at_once(machine: Machine) -> None:
    departures = Departures(machine.stack, lambda: 1.0)
    machine.disable("test")
    assert departures.leave(NAMES, np.arange(BLOCKS))
    assert not machine.stack.stores.in_progress
