"""Copies between the device's slab and an arena: whole pages out, layer by layer in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from sgl_ext.memory.in_flight import BlocksInFlight
from sgl_ext.memory.runs import copy_rows, run_starts
from sgl_ext.memory.slab import Slab
from sgl_ext.memory.transfer import Lane, Priority, Ticket, TransferEngine
from sgl_ext.tiers.arena import Arena, Pages


class DeviceCopies:
    """Moves pages between ``slab`` and ``arena``, both registered with ``engine``.

    A page has the bytes of a block, so a run of pages out of a run of blocks is one copy of as
    many rows. On the way in layers come in groups, the first one small, so that a forward can
    begin with what it needs first and the rest arrives while it computes.

    Args:
        lane: carries copies.
        loads: carries those on the way in; ``lane`` if it is not given.
        by_layer: whether keys and values of each page and layer are copied by themselves, as from
            a pool that has a tensor for each layer; to measure against.
    """

    def __init__(
        self,
        engine: TransferEngine,
        lane: Lane,
        slab: Slab,
        arena: Arena,
        *,
        loads: Lane | None = None,
        by_layer: bool = False,
    ) -> None:
        self._by_layer = by_layer
        self._engine = engine
        self._lane = lane
        self._loads = loads or lane
        self._slab = slab
        self._arena = arena
        self.layout = slab.layout
        """Of a page."""
        self.in_flight = BlocksInFlight(slab.blocks)
        """Blocks that a copy reads or writes, whoever owns them meanwhile."""
        self.groups = tuple(layer_groups(slab.layout.layers))
        """``(first, end)`` layers of each group of a load, in order."""

    def addresses(self, pages: Pages) -> Pages:
        """Of the first byte of each of ``pages``."""
        return self._arena.address + pages * self._arena.stride

    def store(self, blocks: Pages, pages: Pages, priority: Priority = Priority.BULK) -> Ticket:
        """Copies ``blocks`` of the slab to ``pages``, behind everything that is more urgent."""
        device, host, width, height, pitch, stride = self._runs(blocks, pages)
        rows = copy_rows(device, host, width, height, pitch, stride)
        ticket = self._engine.submit(rows, self._lane, priority)
        self.in_flight.begin(blocks, ticket)
        return ticket

    def fill(self, pages: Pages, blocks: Pages) -> Ticket:
        """Copies ``pages`` to ``blocks`` of the slab, before everything that is less urgent."""
        device, host, width, height, pitch, stride = self._runs(blocks, pages)
        rows = copy_rows(host, device, width, height, stride, pitch)
        return self._engine.submit(rows, self._loads, Priority.URGENT)

    def _runs(self, blocks: Pages, pages: Pages) -> tuple[NDArray[np.int64] | int, ...]:
        """What moves ``blocks`` and ``pages``, one copy for each run of both: addresses in the slab
        and in the arena, bytes of a row, rows, and the pitches of both."""
        layout, stride = self._slab.layout, self._arena.stride
        device = self._slab.address + blocks * layout.block_bytes
        host = self._arena.address + pages * stride
        if not self._by_layer:
            first = run_starts(blocks, pages)
            rows = np.diff(first, append=len(pages))
            return device[first], host[first], layout.block_bytes, rows, layout.block_bytes, stride
        half = layout.token_bytes // layout.layers // 2
        within = half * np.arange(2 * layout.layers)
        device, host = ((address[:, None] + within).ravel() for address in (device, host))
        return device, host, half, layout.page, layout.token_bytes, layout.token_bytes

    def load_from_the_top(self, pages: Pages, blocks: Pages) -> list[Ticket]:
        """As :meth:`load`, the last layer first; the ticket of each layer, by its number."""
        layers = self._slab.layout.layers
        return self.load(pages, blocks, [(at, at + 1) for at in reversed(range(layers))])[::-1]

    def load(
        self, pages: Pages, blocks: Pages, groups: Sequence[tuple[int, int]] | None = None
    ) -> list[Ticket]:
        """Copies ``pages`` to ``blocks`` of the slab: one ticket for each group of layers.

        Args:
            groups: ``(first, end)``, in their order; :attr:`groups` if not given.
        """
        layout, stride = self._slab.layout, self._arena.stride
        layer_bytes = layout.token_bytes // layout.layers
        if layout.page == 1:  # tokens that follow each other on both sides are rows of one copy
            first = run_starts(blocks, pages)
            height = np.diff(first, append=len(pages))
            pitches = (stride, layout.token_bytes)
        else:
            first = np.arange(len(pages))
            height = np.full(len(pages), layout.page)
            pitches = (layout.token_bytes, layout.token_bytes)
        sources = self._arena.address + pages[first] * stride
        targets = self._slab.address + blocks[first] * layout.block_bytes
        return [
            self._engine.submit(
                copy_rows(
                    sources + begin * layer_bytes,
                    targets + begin * layer_bytes,
                    (end - begin) * layer_bytes,
                    height,
                    *pitches,
                ),
                self._loads,
                Priority.URGENT,
            )
            for begin, end in (self.groups if groups is None else groups)
        ]


def layer_groups(layers: int) -> Iterator[tuple[int, int]]:
    """Layers ``(first, end)`` in groups of 1, 2, 4...: few copies, and the first one soon."""
    begin, size = 0, 1
    while begin < layers:
        # A rest smaller than a group would be copies of little: it joins the group before it.
        end = begin + size if layers - begin - size >= size else layers
        yield begin, end
        begin, size = end, 2 * size


class LayerLoads:
    """Tells a forward which layers of its loads have landed; SGLang's ``layer_done_counter``.

    One load is under way for each batch that is being built or run; a ticket covers a group of
    layers. Waiting happens in the native engine, without the GIL.
    """

    def __init__(self, groups: Sequence[tuple[int, int]], deadline: float) -> None:
        self._group_of = [at for at, (begin, end) in enumerate(groups) for _ in range(begin, end)]
        self._deadline = deadline
        self._loads: dict[int, list[Ticket]] = {}
        self._next = 0
        self.consumer_index = -1
        """The load that the running forward depends on; -1 if on none."""

    def start(self, tickets: list[Ticket]) -> int:
        """Names a load, given one ticket for each group of layers."""
        index, self._next = self._next, self._next + 1
        self._loads[index] = tickets
        return index

    def set_consumer(self, index: int) -> None:
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Returns when ``layer`` of the consumer's load has landed, or never will."""
        tickets = self._loads.get(self.consumer_index)
        if tickets is not None:
            _landed(tickets[self._group_of[layer]], self._deadline)

    def finish(self, index: int) -> float | None:
        """Waits for the whole load and forgets it; the seconds it took, None if not all landed.

        Raises:
            TimeoutError: it is still under way, and its memory in use.
        """
        tickets = self._loads.pop(index, [])
        landed = [_landed(ticket, self._deadline) for ticket in tickets]
        if not all(ticket.poll() for ticket in tickets):
            raise TimeoutError(f"a copy from host memory took over {self._deadline} s")
        return max((each.seconds for each in tickets), default=0.0) if all(landed) else None

    def reset(self) -> None:
        """Waits for all loads and forgets them."""
        for index in list(self._loads):
            self.finish(index)
        self.consumer_index = -1


def _landed(ticket: Ticket, deadline: float) -> bool:
    try:
        ticket.wait(deadline)
    except Exception:  # failed, cancelled or too slow: the caller says so, to whom it concerns
        return False
    return True
