"""Copies between the device's slab and an arena: pages, layers of pages, and tokens of pages."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sgl_ext.memory.in_flight import BlocksInFlight, Together
from sgl_ext.memory.runs import copy_rows, run_starts
from sgl_ext.memory.slab import Slab
from sgl_ext.memory.streams import Streams
from sgl_ext.memory.transfer import Lane, Priority, Ticket, TransferEngine
from sgl_ext.planning.costs import HOST, HOST_OUT, Costs
from sgl_ext.tiers.arena import Arena, Pages
from sgl_ext.tiers.copy_times import CopyTimes
from sgl_ext.tiers.layer_loads import layer_groups
from sgl_ext.tiers.layer_major import LayerMajor


class DeviceCopies:
    """Copies of pages between ``slab`` and ``arena``, both registered with ``engine``.

    A copy begins when the work on ``streams`` has ended that was submitted before it: a store must
    not read a block before the forward that writes it, and a load must not write a block that an
    earlier forward may still use.

    A page has the bytes of a block, so a run of blocks that goes to a run of pages is one copy
    with a row for each page. Of layer-major pages, each layer is a copy with a row for each token.
    A load copies groups of layers, and the first group is small: the
    forward can begin with the first layers while the others are copied.

    Args:
        lane: Lane for stores.
        loads: Lane for loads; ``lane`` if not given.
        streams: Streams whose work uses the slab.
        costs: Cost model, in which the durations of copies are recorded.
        by_layer: Whether :meth:`store` and :meth:`fill` copy the keys and the values of each page
            and layer separately, as for a pool with one tensor per layer. A baseline for
            measurements.
    """

    def __init__(
        self,
        engine: TransferEngine,
        lane: Lane,
        slab: Slab,
        arena: Arena,
        *,
        loads: Lane | None = None,
        streams: Streams | None = None,
        costs: Costs | None = None,
        by_layer: bool = False,
    ) -> None:
        costs = costs or Costs()
        self._into_device = CopyTimes(costs, HOST, time.monotonic)
        self._out_of_device = CopyTimes(costs, HOST_OUT, time.monotonic)
        self.streams = streams or Streams()
        self._by_layer = by_layer
        self._engine = engine
        self._lane = lane
        self._loads = loads or lane
        self._slab = slab
        self._arena = arena
        self.layout = arena.layout
        """Layout of a page."""
        self._row = slab.layout.token_bytes // slab.layout.layers
        self._layer_major = isinstance(arena.layout, LayerMajor)
        # Of a page in the arena; in the slab, layers are a row apart, and tokens all layers.
        if self._layer_major:
            self._layer_pitch, self._token_pitch = slab.layout.page * self._row, self._row
        else:
            self._layer_pitch, self._token_pitch = self._row, slab.layout.token_bytes
        self.in_flight = BlocksInFlight(slab.blocks)
        """Blocks that a copy reads or writes, although they may have a new owner."""
        self.reading = BlocksInFlight(arena.pages)
        """Pages of the arena that a copy reads, although their slots may have a new owner."""
        self.groups = tuple(layer_groups(slab.layout.layers))
        """Layers ``(first, end)`` of each group of a load, in order."""

    def addresses(self, pages: Pages) -> Pages:
        """Returns the address of the first byte of each of ``pages``."""
        return self._arena.address + pages * self._arena.stride

    def poll(self) -> None:
        """Records the durations of copies that have ended."""
        self._into_device.poll()
        self._out_of_device.poll()

    def store(self, blocks: Pages, pages: Pages, priority: Priority = Priority.BULK) -> Ticket:
        """Starts to copy ``blocks`` of the slab to ``pages``, after all copies of higher priority.

        The blocks are :attr:`in_flight` until the ticket is finished.
        """
        device, host, width, height, pitch, stride = self._runs(blocks, pages)
        rows = copy_rows(device, host, width, height, pitch, stride)
        ticket = self._engine.submit(rows, self._lane, priority, self.streams.busy())
        self.in_flight.begin(blocks, ticket)
        self._out_of_device.begin(len(pages) * self.layout.page, [ticket])
        return ticket

    def fill(self, pages: Pages, blocks: Pages, priority: Priority = Priority.URGENT) -> Ticket:
        """Starts to copy ``pages`` to ``blocks`` of the slab.

        The pages are :attr:`reading` until the ticket is finished.
        """
        device, host, width, height, pitch, stride = self._runs(blocks, pages)
        rows = copy_rows(host, device, width, height, stride, pitch)
        ticket = self._engine.submit(rows, self._loads, priority, self.streams.busy())
        self.reading.begin(pages, ticket)
        self._into_device.begin(len(pages) * self.layout.page, [ticket])
        return ticket

    def fill_tokens(self, places: Pages, slots: Pages) -> Ticket:
        """Starts to copy tokens of pages to ``slots`` of the slab, before all other copies.

        The pages are :attr:`reading` until the ticket is finished.

        Args:
            places: Tokens in the arena, each as its page times the tokens of a page plus its offset
                in the page, int64 ``[tokens]``; at least one.
            slots: Slots of the slab, in the same order.
        """
        page = self._slab.layout.page
        pages = places // page
        # A piece is a run of tokens within a page.
        cut = (np.diff(places) != 1) | (np.diff(slots) != 1) | (np.diff(pages) != 0)
        first = np.flatnonzero(np.concatenate(([True], cut)))
        pieces = (self.addresses(pages[first]), places[first] % page, slots[first])
        copies = self._layers_of_pieces if self._layer_major else self._pieces
        rows = copies(*pieces, np.diff(first, append=len(places)))
        ticket = self._engine.submit(rows, self._loads, Priority.URGENT, self.streams.busy())
        self.reading.begin(pages, ticket)
        return ticket

    def _pieces(self, source: Pages, offset: Pages, slots: Pages, count: Pages) -> Pages:
        """Returns the copies of runs of tokens, int64 ``[copies, 6]``.

        Args:
            source: addresses of the pages, ``[pieces]``.
            offset: first token of each piece within its page.
            slots: first slot of each piece in the slab.
            count: tokens of each piece.
        """
        size, stride = self._slab.layout.token_bytes, self._arena.stride
        source, width = source + offset * size, count * size
        target = self._slab.address + slots * size
        # Pieces of one length whose sources are a page apart, and whose targets are contiguous, are
        # the rows of one copy.
        same = (np.diff(width) == 0) & (np.diff(source) == stride) & (np.diff(target) == width[1:])
        row = np.flatnonzero(np.concatenate(([True], ~same)))
        height = np.diff(row, append=len(count))
        return copy_rows(source[row], target[row], width[row], height, stride, width[row])

    def _layers_of_pieces(self, source: Pages, offset: Pages, slots: Pages, count: Pages) -> Pages:
        """Returns the copies of runs of tokens of layer-major pages, like :meth:`_pieces`."""
        layout, row = self._slab.layout, self._row
        layers = np.arange(layout.layers)
        source = source + offset * row
        target = self._slab.address + slots * layout.token_bytes
        return copy_rows(
            (source[:, None] + self._layer_pitch * layers).ravel(),
            (target[:, None] + row * layers).ravel(),
            row,
            np.repeat(count, layout.layers),
            row,
            layout.token_bytes,
        )

    def _runs(self, blocks: Pages, pages: Pages) -> tuple[NDArray[np.int64] | int, ...]:
        """Returns the geometry of the copies between ``blocks`` and ``pages``.

        There is one copy for each run of both; one for each layer if pages are layer-major; with
        ``by_layer``, one for the keys and one for the values of each page and layer.

        Returns:
            Addresses in the slab, addresses in the arena, bytes of a row, number of rows, pitch in
            the slab and pitch in the arena; each one an int for all copies or ``[copies]``.
        """
        layout, stride = self._slab.layout, self._arena.stride
        device = self._slab.address + blocks * layout.block_bytes
        host = self._arena.address + pages * stride
        if not (self._by_layer or self._layer_major):
            first = run_starts(blocks, pages)
            rows = np.diff(first, append=len(pages))
            return device[first], host[first], layout.block_bytes, rows, layout.block_bytes, stride
        size = self._row // 2 if self._by_layer else self._row
        within = np.arange(0, layout.token_bytes, size)
        device = (device[:, None] + within).ravel()
        further = (self._layer_pitch - self._row) * (within // self._row)
        host = (host[:, None] + within + further).ravel()
        return device, host, size, layout.page, layout.token_bytes, self._token_pitch

    def load_from_the_top(self, pages: Pages, blocks: Pages) -> list[Ticket]:
        """Starts to copy ``pages`` to ``blocks`` of the slab layer by layer, the last layer first.

        Their priority is not the highest, so that loads can be cancelled before they are
        dispatched. The pages are :attr:`reading` until all tickets are finished.

        Returns:
            One ticket for each layer; the index is the layer's number.
        """
        layers = self._slab.layout.layers
        groups = [(at, at + 1) for at in reversed(range(layers))]
        tickets = self.load(pages, blocks, groups, Priority.NORMAL)
        self.reading.begin(pages, Together(tickets))
        return tickets[::-1]

    def load_layers(self, pages: Pages, blocks: Pages, layers: tuple[int, int]) -> Ticket:
        """Starts to copy layers ``(first, end)`` of ``pages`` to ``blocks`` of the slab.

        The pages are :attr:`reading` until the ticket is finished.
        """
        (ticket,) = self.load(pages, blocks, [layers])
        self.reading.begin(pages, ticket)
        return ticket

    def load(
        self,
        pages: Pages,
        blocks: Pages,
        groups: Sequence[tuple[int, int]] | None = None,
        priority: Priority = Priority.URGENT,
    ) -> list[Ticket]:
        """Starts to copy ``pages`` to ``blocks`` of the slab, group of layers by group of layers.

        Args:
            groups: Layers ``(first, end)`` of each group, in the order of the copies;
                :attr:`groups` if not given.

        Returns:
            One ticket for each group.
        """
        layout, stride = self._slab.layout, self._arena.stride
        if layout.page == 1:  # a run of tokens on both sides is one copy, with a row for each
            first = run_starts(blocks, pages)
            height = np.diff(first, append=len(pages))
            pitches = (stride, layout.token_bytes)
        else:
            first = np.arange(len(pages))
            height = np.full(len(pages), layout.page)
            pitches = (self._token_pitch, layout.token_bytes)
        sources = self._arena.address + pages[first] * stride
        targets = self._slab.address + blocks[first] * layout.block_bytes
        busy = self.streams.busy()
        tickets: list[Ticket] = []
        for begin, end in self.groups if groups is None else groups:
            # The rows of a token's layers are contiguous only in the slab if pages are layer-major.
            step = 1 if self._layer_major else end - begin
            layers = np.arange(begin, end, step)[:, None]
            rows = copy_rows(
                (sources + self._layer_pitch * layers).ravel(),
                (targets + self._row * layers).ravel(),
                step * self._row,
                np.tile(height, len(layers)),
                *pitches,
            )
            tickets.append(self._engine.submit(rows, self._loads, priority, busy))
        copied = sum(end - begin for begin, end in (self.groups if groups is None else groups))
        self._into_device.begin(len(pages) * layout.page * copied // layout.layers, tickets)
        return tickets
