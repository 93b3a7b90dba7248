"""Next part of a request that is being restored: what its forward computes and where it ends."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from sgl_ext.planning.costs import Costs
from sgl_ext.planning.plan import Compute, Load, PrefillPlan, Span
from sgl_ext.planning.pointers import Pointers
from sgl_ext.planning.want import Positions

_GAP = 64
"""Least tokens before the first page that may be loaded for which a forward ends at that page: with
fewer, the forward costs more than it gains."""


class Part(NamedTuple):
    """Loaded pages of a want, and the end of its next forward."""

    loaded: tuple[tuple[int, int], ...]
    """Runs ``(first, end)`` of loaded pages, in order."""
    stop: int | None
    """Position that the forward must not pass; None if it may go to the end of the prompt."""


def next_part(
    pointers: Pointers,
    at: Positions,
    costs: Costs,
    position: int,
    *,
    flying_for: float,
    busy: float,
) -> int | None:
    """Returns the position that the next forward ends before.

    The forward computes the pages that would not be loaded sooner: up to the position where both
    pointers meet at the estimated rates, and at most a chunk.

    Args:
        at: positions of the pages.
        position: first token that is not computed.
        flying_for: seconds since the load in flight for the request began.
        busy: seconds until the channel begins to load its next pages; infinite if it does not.

    Returns:
        The end of all pages if nothing is left to load: the forward goes to the end of the prompt,
        as far as its budget allows. None if waiting for pages in flight is better than computing.
    """
    free, flying = pointers.next_free, pointers.flying
    coming = [] if free is None else [free.begin]
    coming += [] if flying is None else [flying.end]
    if not coming:
        return at.end(pointers.end)
    first = max(min(coming), pointers.front)
    # Tokens before the first page that may be loaded, and are not loaded.
    gap = max(at.start(first) - position - pointers.landed(first) * at.page, 0)
    begin = at.start(first) - gap
    if gap >= _GAP:
        return min(at.start(first), begin + costs.chunk)
    if free is not None and (flying is None or free.end <= flying.end):
        number = at.nearest(meeting(pointers, at, costs, begin, free.tier, busy))
        return min(at.start(number), begin + costs.chunk) if number > first else None
    assert flying is not None  # noqa: S101  # else nothing is coming
    begin = max(at.start(max(flying.end, pointers.front)), position)
    end = min(at.end(flying.end + flying.flying), begin + costs.chunk)
    late = flying_for - costs.loads[flying.tier].seconds(flying.flying * at.page)
    # If the load does not end, waiting has cost at most twice as much as computing at once.
    return end if abs(late) > costs.compute.seconds(begin, end) else None


def gives_way(
    pointers: Pointers,
    at: Positions,
    costs: Costs,
    begin: int,
    *,
    busy: float,
    others: int,
    key: str,
) -> bool:
    """Returns whether a prompt should only be loaded, while others are computed.

    Computing its first pages delays every other prompt by the time that this takes, and saves the
    time of loading these pages.

    Args:
        begin: first token that is not computed.
        busy: seconds until the channel begins to load its next pages; infinite if it does not.
        others: prompts that could be computed meanwhile.
        key: key of the decision.
    """
    if not others or busy == inf or (free := pointers.next_free) is None:
        return False
    number = at.nearest(meeting(pointers, at, costs, begin, free.tier, busy))
    pages = sum(
        max(min(one.end, number) - max(one.begin, pointers.front), 0) for one in pointers.free
    )
    tokens, end = pages * at.page, at.start(number)
    seconds = {
        "give_way": tokens * costs.per_loaded(free.tier),
        "compute": others * costs.recomputing(end - tokens, end),
    }
    return costs.decisions.least("compute_or_give_way", seconds, key) == "give_way"


def meeting(
    pointers: Pointers, at: Positions, costs: Costs, begin: int, tier: str, busy: float
) -> float:
    """Returns the position where computing from ``begin`` on and loading from ``tier`` meet.

    The tier loads the last stretches first. The position may lie behind the first forward.
    """
    tokens = pointers.left(tier) * at.page
    found = float(begin)
    for one in (each for each in pointers.free if each.tier == tier):
        tokens -= (one.end - max(one.begin, pointers.front)) * at.page
        end = at.end(one.end)
        found = costs.meeting(begin, end, tier, busy + costs.per_loaded(tier) * tokens)
        if found < end or found >= begin + costs.chunk:
            break
    return found


def plan_of(loaded: Iterable[range], end: int, *, stop: int | None = None) -> PrefillPlan:
    """Returns the plan of a prompt that computes everything that was not loaded.

    Args:
        loaded: positions of loaded tokens, in order.
        end: tokens of the prompt.
        stop: position that the forward does not go beyond; None if it may go to the end.
    """
    spans, at = [], 0
    for tokens in loaded:
        if at < tokens.start:
            spans.append(Span(at, tokens.start, Compute()))
        spans.append(Span(tokens.start, tokens.stop, Load()))
        at = tokens.stop
    spans.append(Span(at, end, Compute()))
    return PrefillPlan(spans, stop=stop)
