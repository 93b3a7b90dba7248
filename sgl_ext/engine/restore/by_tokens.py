"""Forwards that compute the first tokens of a prefix while its last ones load (CacheFlow §3.1).

As with layers, nobody needs to know beforehand where they meet: before tokens are computed their
loads are taken back, and if one has begun, everything behind it has come or is about to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sgl_ext.engine.restore.by_layers import Coming, taken_back
from sgl_ext.engine.step import rows
from sgl_ext.engine.step.rows import Row
from sgl_ext.memory.tickets import COPY_DEADLINE_S, Ticket
from sgl_ext.tiers.stack import TierStack

if TYPE_CHECKING:
    from sgl_ext.engine.step.forward import PlannedForward

_UNIT = 128
"""Tokens of one load, at most."""


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
    share: float,
) -> dict[int, int]:
    """Returns when all that is coming is in place.

    Args:
        coming: by the request's place in the batch.
        chunk: tokens of a forward, at most.
        share: of what is left that is computed by the time the rest has come.

    Returns:
        How many tokens of each request were computed.

    Raises:
        TimeoutError, TransferError: it is not, and nobody may read it.
    """
    page = tiers.layout.page
    loads = [*_loads(tiers, coming, page)][::-1]  # in the order of the prompts
    computed = dict.fromkeys(coming, 0)
    try:
        for at in coming:
            left = [load for load in loads if load.request == at]
            while taken := _taken(left, min(chunk, round(share * len(left)) * _UNIT)):
                part = rows.split(planned.batch, [Row(at, taken[0].start, taken[-1].end)])
                computed[at] += taken[-1].end - taken[0].start
                part.return_logprob = False
                planned.run(part)
            for load in left:
                load.ticket.wait(COPY_DEADLINE_S)
    finally:
        for load in loads:
            taken_back(load.ticket)  # nothing writes to blocks that somebody else may have next
    return computed


def _loads(tiers: TierStack, coming: Mapping[int, Sequence[Coming]], page: int) -> Iterator[_Load]:
    """Begins them, the last tokens first."""
    step = max(_UNIT // page, 1)
    for at in reversed([*coming]):
        for one in reversed(coming[at]):
            for first in reversed(range(0, len(one.pages), step)):
                pages, blocks = one.pages[first : first + step], one.blocks[first : first + step]
                start = one.start + first * page
                ticket = tiers.begin_fill(pages, blocks)
                yield _Load(at, start, start + len(pages) * page, ticket)


def _taken(left: list[_Load], most: int) -> list[_Load]:
    """Takes back the first ones, of up to ``most`` consecutive tokens; they are left no more."""
    taken: list[_Load] = []
    while left and (not taken or left[0].end - taken[0].start <= most):
        if (taken and left[0].start != taken[-1].end) or not taken_back(left[0].ticket):
            break
        taken.append(left.pop(0))
    return taken
