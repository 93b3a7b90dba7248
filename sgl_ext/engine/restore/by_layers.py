"""Restoration by layers: a forward computes lower layers while upper ones load (CacheFlow §3.1).

The layer where both meet need not be known in advance. Before the forward computes a layer, it
cancels the layer's load. If the load has begun, all layers from this one on are loaded or being
loaded, because the last layer is loaded first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from sgl_ext.engine.step.layerwise import Layers, first_rows, layer_by_layer
from sgl_ext.engine.step.rows import Row
from sgl_ext.memory.streams import Streams
from sgl_ext.memory.tickets import COPY_DEADLINE_S, State, Ticket, TransferCancelledError
from sgl_ext.memory.transfer import TransferError
from sgl_ext.restore.host_prefixes import HostPrefixes
from sgl_ext.tiers.arena import Pages
from sgl_ext.tiers.stack import TierStack

if TYPE_CHECKING:
    from sgl_ext.engine.step.forward import PlannedForward


class Coming(NamedTuple):
    """Consecutive pages of a request in host memory, and their blocks on the device."""

    start: int
    """First token of the pages in the prompt."""
    pages: Pages
    blocks: Pages


class LayerLoads(Protocol):
    """Loads of pages in progress, of which the last layers come first."""

    layers: int

    def taken_back(self, layer: int) -> bool:
        """Returns whether the forward has to compute a layer; if not, its KV is on the device."""

    def fence(self, layer: int) -> None:
        """Has the device's next work wait for the KV of a layer that was not taken back."""

    def end(self) -> None:
        """Ends all loads, so that none writes to blocks after the next owner of the blocks."""


class HostLoads:
    """Loads from host memory, with a ticket for each layer; see :class:`LayerLoads`."""

    def __init__(self, tickets: Sequence[Ticket], streams: Streams) -> None:
        self.layers = len(tickets)
        self._tickets, self._streams = tickets, streams

    def taken_back(self, layer: int) -> bool:
        return taken_back(self._tickets[layer], self._streams)

    def fence(self, layer: int) -> None:
        self._tickets[layer].fence(self._streams.current(), COPY_DEADLINE_S)

    def end(self) -> None:
        end(self._tickets, self._streams)


def from_host(tiers: TierStack, coming: Mapping[int, Sequence[Coming]]) -> HostLoads:
    """Starts to load pages in host memory."""
    pages, blocks = places(coming)
    return HostLoads(tiers.holds.fill_from_the_top(pages, blocks), tiers.streams)


def places(coming: Mapping[int, Sequence[Coming]]) -> tuple[Pages, Pages]:
    """Returns the pages of all requests in host memory, and their blocks on the device."""
    every = [one for each in coming.values() for one in each]
    pages = np.concatenate([one.pages for one in every])
    return pages, np.concatenate([one.blocks for one in every])


@contextmanager
def restoring(
    tiers: TierStack,
    held: HostPrefixes,
    planned: PlannedForward,
    parts: Sequence[Row],
    coming: Mapping[int, Sequence[Coming]],
    loads: LayerLoads,
) -> Iterator[list[Row]]:
    """Makes the model's next forward compute lower layers of prefixes and use loaded upper ones.

    Args:
        held: records how many tokens were computed instead of loaded.
        parts: rows that are computed in all layers.
        coming: pages to restore, by the request's place in the batch.
        loads: their loads, which have begun.

    Yields:
        The rows that the forward begins with.

    Raises:
        TimeoutError: a load has not ended in time.
        TransferError: a load that the forward waits for has failed.
    """
    begin = first_rows(planned, coming, parts)
    computed = 0  # layers

    def run(first: Layers) -> object:
        nonlocal computed
        loads.taken_back(0)
        output = first.run(0, 1)
        computed = 1
        tiers.streams.pace()
        while computed < loads.layers and loads.taken_back(computed):
            output = first.run(computed, computed + 1)
            computed += 1
            tiers.streams.pace()
        if computed == loads.layers:
            return output
        with planned.cutting_over(begin, parts, first.batch) as batch:
            second = Layers(first.model, batch)
            for layer in range(computed, loads.layers):
                loads.fence(layer)
                output = second.run(layer, layer + 1)
        return output

    try:
        with layer_by_layer(planned, run):
            yield begin
    finally:
        for at, each in coming.items():
            tokens = sum(len(one.pages) for one in each) * tiers.layout.page
            held.computed(planned.batch.rids[at], tokens * computed // loads.layers)
        loads.end()


def end(tickets: Sequence[Ticket], streams: Streams) -> None:
    """Ends loads, so that none writes to blocks after the next owner of the blocks.

    Raises:
        TimeoutError: a load has not ended within :data:`COPY_DEADLINE_S`; the others are cancelled.
    """
    for ticket in tickets:
        ticket.cancel()
    for ticket in tickets:
        taken_back(ticket, streams)


def taken_back(ticket: Ticket, streams: Streams) -> bool:
    """Cancels a load of which no bytes have landed; what follows on the device waits for others.

    Returns:
        True if the load was cancelled or has failed, so that its KV must be computed; False if all
        of it has landed before the device's next work.

    Raises:
        TimeoutError: the load has not ended within :data:`COPY_DEADLINE_S`.
    """
    if not ticket.bytes_done:
        ticket.cancel()
    with suppress(TransferError, TransferCancelledError):
        ticket.fence(streams.current(), COPY_DEADLINE_S)
    return ticket.state in (State.CANCELLED, State.FAILED)
