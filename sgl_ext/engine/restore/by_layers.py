"""A forward that computes lower layers of a prefix while upper ones are loaded (CacheFlow §3.1).

Nobody needs to know beforehand where they meet: before the forward computes a layer it takes the
layer's load back, and if that has begun, everything from this layer on has come or is about to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sgl_ext.engine.step.rows import Row
from sgl_ext.memory.tickets import COPY_DEADLINE_S, State, Ticket, TransferCancelledError
from sgl_ext.memory.transfer import TransferError
from sgl_ext.restore.host_prefixes import HostPrefixes
from sgl_ext.tiers.arena import Pages
from sgl_ext.tiers.stack import TierStack

if TYPE_CHECKING:
    from sgl_ext.engine.step.forward import PlannedForward


class Coming(NamedTuple):
    """Pages of a request in host memory, and the blocks of the device that they are for."""

    start: int
    """Token of the prompt that they begin with."""
    pages: Pages
    blocks: Pages


@contextmanager
def restoring(
    tiers: TierStack,
    held: HostPrefixes,
    planned: PlannedForward,
    parts: Sequence[Row],
    coming: Mapping[int, Sequence[Coming]],
) -> Iterator[list[Row]]:
    """Has the model's next forward cut over from computing to what was loaded.

    Args:
        held: is told how much was computed, not loaded.
        parts: the rows that are computed of every layer.
        coming: by the request's place in the batch.

    Yields:
        The rows that the forward has to begin with.
    """
    runner, batch = planned.runner, planned.batch
    prefixes, lengths = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
    whole = [Row(at, prefixes[at], prefixes[at] + lengths[at]) for at in coming]
    begin = sorted(whole + [part for part in parts if part.request not in coming])
    every = [one for each in coming.values() for one in each]
    pages = np.concatenate([one.pages for one in every])
    blocks = np.concatenate([one.blocks for one in every])
    tickets = tiers.fill_from_the_top(pages, blocks)
    model = runner.model
    computed = 0  # layers

    def forward(
        input_ids: Any, positions: Any, first: Any, input_embeds: Any = None, **_kw: object
    ) -> Any:
        nonlocal computed
        layer, output = 0, None
        while layer == 0 or (layer < len(tickets) and taken_back(tickets[layer])):
            if layer == 0:
                taken_back(tickets[0])
            output = model.forward_split_prefill(
                input_ids, positions, first, (layer, layer + 1), input_embeds
            )
            layer += 1
        computed = layer
        if layer == len(tickets):
            return output
        with planned.cutting_over(begin, parts, first) as second:
            for at in range(layer, len(tickets)):
                tickets[at].wait(COPY_DEADLINE_S)
                output = model.forward_split_prefill(
                    second.input_ids, second.positions, second, (at, at + 1)
                )
        return output

    try:
        with planned.replaced(forward):
            yield begin
    finally:
        for at, each in coming.items():
            tokens = sum(len(one.pages) for one in each) * tiers.layout.page
            held.computed(batch.rids[at], tokens * computed // len(tickets))
        for ticket in tickets:
            taken_back(ticket)  # nothing writes to blocks that somebody else may have next


def taken_back(ticket: Ticket) -> bool:
    """Whether the load was not begun, and will not be; one that was is waited for."""
    if not ticket.bytes_done:
        ticket.cancel()
    with suppress(TransferError, TransferCancelledError):
        ticket.wait(COPY_DEADLINE_S)
    return ticket.state != State.DONE
