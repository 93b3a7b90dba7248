"""Restoration by layers: a forward computes lower layers while upper ones load (CacheFlow §3.1).

The layer where both meet need not be known in advance. Before the forward computes a layer, it
cancels the layer's load. If the load has begun, all layers from this one on are loaded or being
loaded, because the last layer is loaded first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sgl_ext.engine.core.sglang_types import ForwardBatch
from sgl_ext.engine.step.rows import Row
from sgl_ext.memory.tickets import COPY_DEADLINE_S, State, Ticket, TransferCancelledError
from sgl_ext.memory.transfer import TransferError
from sgl_ext.restore.host_prefixes import HostPrefixes
from sgl_ext.tiers.arena import Pages
from sgl_ext.tiers.stack import TierStack

if TYPE_CHECKING:
    import torch

    from sgl_ext.engine.step.forward import PlannedForward


class Coming(NamedTuple):
    """Consecutive pages of a request in host memory, and their blocks on the device."""

    start: int
    """First token of the pages in the prompt."""
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
    """Makes the model's next forward compute lower layers of prefixes and use loaded upper ones.

    Args:
        held: records how many tokens were computed instead of loaded.
        parts: rows that are computed in all layers.
        coming: pages to restore, by the request's place in the batch.

    Yields:
        The rows that the forward begins with.

    Raises:
        TimeoutError: a load has not ended in time.
        TransferError: a load that the forward waits for has failed.
    """
    runner, batch = planned.runner, planned.batch
    prefixes, lengths = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu
    whole = [Row(at, prefixes[at], prefixes[at] + lengths[at]) for at in coming]
    begin = sorted(whole + [part for part in parts if part.request not in coming])
    every = [one for each in coming.values() for one in each]
    pages = np.concatenate([one.pages for one in every])
    blocks = np.concatenate([one.blocks for one in every])
    tickets = tiers.holds.fill_from_the_top(pages, blocks)
    model = runner.model
    computed = 0  # layers

    def forward(
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        first: ForwardBatch,
        input_embeds: torch.Tensor | None = None,
        **_kw: object,
    ) -> object:
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
        end(tickets)


def end(tickets: Sequence[Ticket]) -> None:
    """Ends loads, so that none writes to blocks that get another owner.

    Raises:
        TimeoutError: a load has not ended within :data:`COPY_DEADLINE_S`; the others are cancelled.
    """
    for ticket in tickets:
        ticket.cancel()
    for ticket in tickets:
        taken_back(ticket)


def taken_back(ticket: Ticket) -> bool:
    """Cancels a load of which no bytes have landed, and waits until it has ended.

    Returns:
        True if the load was cancelled or has failed, so that its KV must be computed; False if all
        of it has landed.

    Raises:
        TimeoutError: the load has not ended within :data:`COPY_DEADLINE_S`.
    """
    if not ticket.bytes_done:
        ticket.cancel()
    with suppress(TransferError, TransferCancelledError):
        ticket.wait(COPY_DEADLINE_S)
    return ticket.state != State.DONE
