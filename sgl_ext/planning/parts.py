"""Next part of a request that is being restored: what its forward computes and where it ends."""

from __future__ import annotations

from collections.abc import Iterable

from sgl_ext.planning.costs import Costs
from sgl_ext.planning.plan import Compute, Load, PrefillPlan, Span
from sgl_ext.planning.pointers import Pointers


def next_part(
    pointers: Pointers, costs: Costs, page: int, *, flying_for: float, busy: float
) -> int | None:
    """Returns the page that the next forward ends before.

    The forward computes the pages that would not be loaded sooner: up to the position where both
    pointers meet at the estimated rates, and at most a chunk.

    Args:
        page: tokens of a page.
        flying_for: seconds since the load in flight for the request began.
        busy: seconds until the channel begins to load its next pages; infinite if it does not.

    Returns:
        ``pointers.end`` if nothing is left to load: the forward goes to the end of the prompt, as
        far as its budget allows. None if waiting for pages in flight is better than computing.
    """
    free, flying, chunk = pointers.next_free, pointers.flying, costs.chunk // page
    if free is not None and (flying is None or free.end <= flying.end):
        if pointers.front < free.begin:  # no tier loads the pages before
            return min(free.begin, pointers.front + chunk)
        begin = pointers.front
        meeting = costs.meeting(begin * page, free.end * page, free.tier, busy)
        end = min(round(meeting / page), begin + chunk)
        return end if end > begin else None
    if flying is None:
        return pointers.end
    begin = max(flying.end, pointers.front)
    end = min(flying.end + flying.flying, begin + chunk)
    late = flying_for - costs.loads[flying.tier].seconds(flying.flying * page)
    # If the load does not end, waiting has cost at most twice as much as computing at once.
    return end if abs(late) > costs.compute.seconds(begin * page, end * page) else None


def plan_of(
    loaded: Iterable[tuple[int, int]], end: int, page: int, *, stop: int | None = None
) -> PrefillPlan:
    """Returns the plan that computes everything that was not loaded.

    Args:
        loaded: runs ``(first, end)`` of pages, in order.
        end: tokens of the prompt.
        page: tokens of a page.
        stop: page that the forward does not go beyond; None if it may go to the end.
    """
    spans, at = [], 0
    for first, last in loaded:
        if at < first * page:
            spans.append(Span(at, first * page, Compute()))
        spans.append(Span(first * page, last * page, Load()))
        at = last * page
    spans.append(Span(at, end, Compute()))
    return PrefillPlan(spans, stop=None if stop is None else stop * page)
