"""Tests of prefixes that are loaded from host memory layer by layer, the last layer first."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from stack_kit import Machine
from tier_kit import LAYOUTS, arena, content, keys

from sgl_ext.engine.restore.by_layers import end, taken_back
from sgl_ext.memory.slab import HostSlab
from sgl_ext.memory.streams import Streams
from sgl_ext.memory.tickets import State
from sgl_ext.memory.transfer import TransferEngine
from sgl_ext.planning.plan import Compute, LoadOrCompute, Span
from sgl_ext.planning.strategy import Strategy
from sgl_ext.restore.host_prefixes import HostPrefixes
from sgl_ext.tiers.copies import DeviceCopies

PAGE = 4
LAYOUT = LAYOUTS[PAGE]
PAGES = 8


class Link:
    """A slab, an arena, and a link between them on which a layer takes 0.1 s."""

    def __init__(self) -> None:
        self.engine = TransferEngine()
        self.slab = HostSlab.create(LAYOUT, PAGES)
        self.engine.register(self.slab.address, self.slab.size, owner=self.slab)
        self.arena = arena(self.engine, PAGES, LAYOUT)
        lane = self.engine.host_lane()
        layer_bytes = PAGES * LAYOUT.block_bytes // LAYOUT.layers
        slow = self.engine.throttled_lane(lane, bytes_per_second=10 * layer_bytes)
        self.copies = DeviceCopies(self.engine, lane, self.slab, self.arena, loads=slow)
        self.rows = np.asarray(self.slab.mapping)[-self.slab.size :].reshape(
            PAGES * PAGE, LAYOUT.layers, -1
        )
        self.names = keys(*range(PAGES))
        for place, name in enumerate(self.names):
            self.arena.memory[place, : LAYOUT.block_bytes] = content(name, LAYOUT)

    def landed(self, layer: int) -> bool:
        blocks = np.stack([content(name, LAYOUT) for name in self.names])
        wanted = blocks.reshape(PAGES * PAGE, LAYOUT.layers, -1)[:, layer]
        return np.array_equal(self.rows[:, layer], wanted)


@pytest.fixture
def link() -> Iterator[Link]:
    link = Link()
    yield link
    link.engine.close()


def test_loads_of_computed_layers_are_cancelled(link: Link) -> None:
    link.rows[:] = 0xDD
    every = np.arange(PAGES)
    tickets = link.copies.load_from_the_top(every, every)
    tickets[3].wait(30)  # of layers 0 to 4: the last two are loaded
    assert tickets[4].state == State.DONE
    assert taken_back(tickets[0], Streams())
    assert taken_back(tickets[1], Streams())
    met = 2 if not taken_back(tickets[2], Streams()) else 3  # the load may have begun by now
    assert all(link.landed(layer) for layer in range(met, LAYOUT.layers))
    assert (link.rows[:, :2] == 0xDD).all()  # cancelled loads write nothing
    for ticket in tickets:
        assert ticket.poll()


def test_a_landed_load_is_not_cancelled(link: Link) -> None:
    every = np.arange(PAGES)
    tickets = link.copies.load_from_the_top(every, every)
    tickets[0].wait(30)
    assert not any(taken_back(ticket, Streams()) for ticket in tickets)
    assert all(map(link.landed, range(LAYOUT.layers)))


class Load:
    """Ticket of a load that ends when it is cancelled, unless it is late."""

    bytes_done, bytes_total, seconds, error = 0, 1, 0.0, None

    def __init__(self, *, late: bool) -> None:
        self.late, self.state = late, State.PENDING

    def poll(self) -> bool:
        return self.state != State.PENDING

    def cancel(self) -> bool:
        if not self.late:
            self.state = State.CANCELLED
        return not self.late

    def wait(self, _timeout: float) -> None:
        if self.late:
            raise TimeoutError

    def fence(self, _stream: int | None, timeout: float) -> None:
        self.wait(timeout)


def test_a_late_load_does_not_keep_others_from_being_cancelled() -> None:
    loads = [Load(late=at == 1) for at in range(4)]
    with pytest.raises(TimeoutError):
        end(loads, Streams())
    assert [load.state for load in loads if not load.late] == [State.CANCELLED] * 3


def test_prefixes_stay_pinned_until_release_or_expiry() -> None:
    machine, names = Machine(PAGE, PAGES, keep_after=2), keys(*range(PAGES))
    assert machine.store(names, np.arange(PAGES))
    host, pages = machine.stack.host, machine.stack.host.places(names)
    held = HostPrefixes(machine.stack.holds, PAGE, time.monotonic)
    held.hold("a", names[2:5], 2, Strategy.LAYERS)
    held.hold("a", names[2:4], 2, Strategy.LAYERS)  # a second lookup finds fewer pages
    held.check_integrity()
    assert host.room == PAGES - 2
    assert not host.worth_keeping(pages, 2, 0).any()  # lookups are no uses
    held.computed("a", PAGE)
    assert held.used("a") == PAGE
    assert machine.stack.hits == {"host": 1}
    machine.until(lambda: {*machine.shelf.pages} == {*names[2:4]})
    assert held["a"].pages.tolist() == pages[2:4].tolist()
    assert held.plan("a", 21).spans == (
        Span(0, 8, Compute()),
        Span(8, 16, LoadOrCompute()),
        Span(16, 21, Compute()),
    )
    held.hold("b", names[:1], 0, Strategy.TOKENS)
    assert held.plan("b", 5).spans == (Span(0, 4, LoadOrCompute()), Span(4, 5, Compute()))
    held.release("a")
    held.release("a")
    assert "a" not in held
    held.hold("a", names[2:4], 2, Strategy.LAYERS)
    held.expire(held["a"].since, kept={"b"})
    assert "a" in held
    held.expire(held["a"].since + 1, kept={"b"})
    assert "a" not in held
    held.hold("a", names[2:4], 2, Strategy.LAYERS)
    assert held.give_up_one(kept={"b"})  # a preempted request needs places
    assert "a" not in held
    assert not held.give_up_one(kept={"b"})
    assert held.clear() == ["b"]
    machine.until(lambda: host.room == PAGES)  # the write to the shelf pins its pages until it ends
    held.check_integrity()
    machine.close()
