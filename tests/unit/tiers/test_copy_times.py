"""Durations of copies, without the time that they wait for each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from stack_kit import Machine
from tier_kit import keys, places

from sgl_ext.memory.tickets import State
from sgl_ext.planning.costs import HOST, HOST_OUT, Costs
from sgl_ext.tiers.copy_times import CopyTimes


@dataclass
class Copy:
    """Ticket of a copy that ends when the test says so."""

    seconds: float = 0.0
    state: State = State.PENDING

    def poll(self) -> bool:
        return self.state != State.PENDING

    def end(self, seconds: float, state: State = State.DONE) -> None:
        self.seconds, self.state = seconds, state


class Times:
    def __init__(self) -> None:
        self.now = 0.0
        self.costs = Costs()
        self.times = CopyTimes(self.costs, HOST, lambda: self.now)

    def begin(self, at: float, tokens: int, count: int = 1) -> list[Any]:
        self.now = at
        tickets: list[Any] = [Copy() for _ in range(count)]
        self.times.begin(tokens, tickets)
        return tickets

    @property
    def recorded(self) -> list[tuple[int, float]]:
        self.times.poll()
        return [*self.costs.loaded_lately.get(HOST, ())]


def test_copies_that_queue_behind_each_other_count_once() -> None:
    times = Times()
    (first,) = times.begin(10.0, 100)
    (second,) = times.begin(10.0, 200)
    assert times.recorded == []
    second.end(3.0)
    assert times.recorded == []  # the lane is in order: the first has not been seen yet
    first.end(1.0)
    assert times.recorded == [(100, 1.0), (200, 2.0)]
    (third,) = times.begin(20.0, 300)
    third.end(0.5)
    assert times.recorded[2:] == [(300, 0.5)]


def test_a_copy_ends_with_its_last_ticket() -> None:
    times = Times()
    tickets = times.begin(0.0, 100, 3)
    for seconds, ticket in zip((1.0, 3.0, 2.0), tickets, strict=True):
        assert times.recorded == []
        ticket.end(seconds)
    assert times.recorded == [(100, 3.0)]


@pytest.mark.parametrize(
    ("state", "recorded"),
    [(State.FAILED, [(50, 0.5)]), (State.CANCELLED, [(50, 1.0), (50, 0.5)])],
)
def test_only_what_has_landed_is_recorded(state: State, recorded: list[tuple[int, float]]) -> None:
    times = Times()
    tickets = times.begin(0.0, 100, 2)
    (behind,) = times.begin(0.0, 50)
    tickets[0].end(1.0)
    tickets[1].end(2.0, state)
    behind.end(2.5)
    assert times.recorded == recorded


def test_copies_that_are_cancelled_as_a_whole_are_not_recorded() -> None:
    times = Times()
    for ticket in times.begin(0.0, 100, 2):
        ticket.end(0.0, State.CANCELLED)
    assert times.recorded == []


def test_copies_whose_end_is_never_polled_are_forgotten() -> None:
    times = Times()
    for at in range(1000):
        times.begin(float(at), 1)
    assert len(times.times._copies) == 256


def test_copies_and_loads_of_a_stack_are_recorded() -> None:
    """Stores two pages, loads them, and loads one page from a lower tier."""
    machine = Machine(4, 16)
    assert machine.store(keys(1, 2), places(1, 2))
    assert machine.load("r", keys(1, 2), places(5, 6))
    machine.shelve(keys(3))
    machine.prefixes.lookup("q", keys(3))
    machine.settle("q")
    machine.poll()
    found = {name: [tokens for tokens, _ in each] for name, each in
             machine.costs.loaded_lately.items()}  # fmt: skip
    assert found == {HOST_OUT: [8], HOST: [8], "shelf": [4]}
    assert all(seconds > 0 for each in machine.costs.loaded_lately.values() for _, seconds in each)
    machine.stack.close()
    assert np.isfinite(machine.costs.loads[HOST].seconds(1))
