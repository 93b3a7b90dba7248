"""Restoration by tokens: forwards compute the first tokens while the last load (CacheFlow §3.1).

As with layers, the position where both meet need not be known in advance. Before tokens are
computed, their loads are cancelled. If one has begun, all tokens after it are loaded or being
loaded, because the last tokens are loaded first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sgl_ext.engine.restore.by_layers import Coming, end, taken_back
from sgl_ext.engine.step import rows
from sgl_ext.engine.step.rows import Row
from sgl_ext.memory.streams import Streams
from sgl_ext.memory.tickets import COPY_DEADLINE_S, Priority, Ticket
from sgl_ext.planning.channels import LOAD_TOKENS
from sgl_ext.tiers.stack import TierStack

if TYPE_CHECKING:
    from sgl_ext.engine.step.forward import PlannedForward


class _Load(NamedTuple):
    request: int
    start: int
    end: int
    ticket: Ticket


def restore(
    tiers: TierStack,
    planned: PlannedForward,
    coming: Mapping[int, Sequence[Coming]],
    chunk: int,
    share: Callable[[int, int], float],
) -> dict[int, int]:
    """Restores pages into their blocks: computes their first tokens, loads the last ones.

    Args:
        coming: pages to restore, by the request's place in the batch.
        chunk: maximum tokens of a forward; a forward has the tokens of one load at least.
        share: returns the estimated share of a range of positions whose tokens are computed while
            the others load.

    Returns:
        The number of computed tokens, by the request's place in the batch.

    Raises:
        TimeoutError: a load has not ended in time; the blocks must not be read.
        TransferError: a load has failed; the blocks must not be read.
    """
    page = tiers.layout.page
    loads = [*_loads(tiers, coming, page)][::-1]  # in the order of the prompts
    computed = dict.fromkeys(coming, 0)
    try:
        for at in coming:
            left = [load for load in loads if load.request == at]
            while left:
                most = share(left[0].start, left[-1].end) * len(left)
                taken = _taken(left, tiers.streams, min(chunk, round(most) * LOAD_TOKENS))
                if not taken:
                    break
                part = rows.split(planned.batch, [Row(at, taken[0].start, taken[-1].end)])
                computed[at] += taken[-1].end - taken[0].start
                part.return_logprob = False
                planned.run(part)
                tiers.streams.pace()
            for load in left:
                load.ticket.fence(tiers.streams.current(), COPY_DEADLINE_S)
    finally:
        end([load.ticket for load in loads], tiers.streams)
    return computed


def _loads(tiers: TierStack, coming: Mapping[int, Sequence[Coming]], page: int) -> Iterator[_Load]:
    """Starts the loads, the last tokens first, and yields them in this order."""
    step = max(LOAD_TOKENS // page, 1)
    for at in reversed([*coming]):
        for one in reversed(coming[at]):
            for first in reversed(range(0, len(one.pages), step)):
                pages, blocks = one.pages[first : first + step], one.blocks[first : first + step]
                start = one.start + first * page
                ticket = tiers.holds.begin_fill(pages, blocks, Priority.NORMAL)
                yield _Load(at, start, start + len(pages) * page, ticket)


def _taken(left: list[_Load], streams: Streams, most: int) -> list[_Load]:
    """Cancels the first loads, of up to ``most`` consecutive tokens but of one load at least.

    Stops at a load that has begun.

    Returns:
        The cancelled loads, which are removed from ``left``; their tokens must be computed.
    """
    taken: list[_Load] = []
    while left and (not taken or left[0].end - taken[0].start <= most):
        if (taken and left[0].start != taken[-1].end) or not taken_back(left[0].ticket, streams):
            break
        taken.append(left.pop(0))
    return taken
