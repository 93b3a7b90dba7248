"""What the next forward of a request that is being restored does, and how far it goes."""

from __future__ import annotations

from collections.abc import Iterable

from sgl_ext.plan import Compute, Load, PrefillPlan, Span
from sgl_ext.restore.costs import Costs
from sgl_ext.restore.pointers import Pointers


def next_part(
    pointers: Pointers, costs: Costs, page: int, *, flying_for: float, busy: float
) -> int | None:
    """The page that the next forward ends before.

    What it computes is what loading would not bring sooner: up to where both pointers, at the
    rates that are believed in, meet; at most a chunk.

    Args:
        page: tokens.
        flying_for: seconds that what is on its way to the request has been.
        busy: seconds until the channel begins to load its next pages; infinite if it does not.

    Returns:
        ``pointers.end`` if nothing is left to load: the forward goes to the end of the prompt, as
        far as its budget goes. None if waiting for what is on its way is better than computing.
    """
    free, flying, chunk = pointers.next_free, pointers.flying, costs.chunk // page
    if free is not None and (flying is None or free.end <= flying.end):
        if pointers.front < free.begin:  # nobody loads what comes before
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
    # If it does not come, waiting has cost at most twice what computing at once would have.
    return end if abs(late) > costs.compute.seconds(begin * page, end * page) else None


def plan_of(
    loaded: Iterable[tuple[int, int]], end: int, page: int, *, stop: int | None = None
) -> PrefillPlan:
    """Computes what was not loaded.

    Args:
        loaded: runs of pages, in order.
        end: tokens of the prompt.
        page: tokens.
        stop: page that the forward does not go beyond.
    """
    spans, at = [], 0
    for first, last in loaded:
        if at < first * page:
            spans.append(Span(at, first * page, Compute()))
        spans.append(Span(first * page, last * page, Load()))
        at = last * page
    spans.append(Span(at, end, Compute()))
    return PrefillPlan(spans, stop=None if stop is None else stop * page)
