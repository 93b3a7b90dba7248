"""Statistics of the tiers since the server started, as plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from sgl_ext.tiers.lower import LowerTier
from sgl_ext.tiers.stack import TierStack


class TierReport(TypedDict):
    """Statistics of one tier since the server started."""

    pages: int
    """Pages that the tier holds; for a shared store, pages that this process has stored."""
    capacity_pages: int
    """Capacity in pages; 0 if unknown."""
    hit_tokens: int
    """Prompt tokens that were loaded from the tier instead of computed."""
    missed_tokens: int
    """Prompt tokens of admitted requests that neither this tier nor a nearer one had."""
    loaded_bytes: int
    loading_seconds: float
    stored_bytes: int
    storing_seconds: float
    evicted_pages: int
    queue_depth: int
    """Operations that are queued or in progress: for the host tier, stores; for a lower tier,
    lookups, loads and stores."""
    available: bool
    failures: dict[str, int]
    """Pages that could not be loaded or stored, by reason."""
    directories: dict[str, str]
    """State of each directory of an SSD tier; see
    :attr:`~sgl_ext.tiers.volume.VolumeStatistics.state`."""


def describe(stack: TierStack) -> dict[str, TierReport]:
    """Returns a report for each tier by name, the nearest first."""
    layout, host = stack.layout, stack.host
    reports = {
        "host": TierReport(
            pages=len(host),
            capacity_pages=host.capacity,
            hit_tokens=stack.hits["host"] * layout.page,
            missed_tokens=_missed(stack, stack.lower),
            loaded_bytes=stack.loads.traffic.pages * layout.block_bytes,
            loading_seconds=stack.loads.traffic.seconds,
            stored_bytes=stack.stores.traffic.pages * layout.block_bytes,
            storing_seconds=stack.stores.traffic.seconds,
            evicted_pages=host.evicted,
            queue_depth=stack.stores.in_progress,
            available=stack.enabled,
            failures={"no_room": host.refused} if host.refused else {},
            directories={},
        )
    }
    for at, lower in enumerate(stack.lower, 1):
        farther = stack.lower[at:]
        reports[lower.tier.name] = _report(lower, stack, _missed(stack, farther))
    return reports


def _missed(stack: TierStack, farther: Sequence[LowerTier]) -> int:
    """Returns the tokens that were found in no tier, or in one of these only."""
    found = sum(stack.hits[each.tier.name] for each in farther)
    return (stack.missed + found) * stack.layout.page


def _report(lower: LowerTier, stack: TierStack, missed: int) -> TierReport:
    layout, statistics = stack.layout, lower.tier.statistics()
    return TierReport(
        pages=statistics.pages,
        capacity_pages=statistics.capacity,
        hit_tokens=stack.hits[lower.tier.name] * layout.page,
        missed_tokens=missed,
        loaded_bytes=lower.loaded.pages * layout.block_bytes,
        loading_seconds=lower.loaded.seconds,
        stored_bytes=lower.stored.pages * layout.block_bytes,
        storing_seconds=lower.stored.seconds,
        evicted_pages=statistics.evicted,
        queue_depth=lower.under_way,
        available=lower.tier.available and stack.enabled,
        failures=statistics.failures,
        directories=statistics.directories,
    )
