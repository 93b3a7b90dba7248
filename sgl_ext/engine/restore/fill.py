"""Restoration of prefixes within one forward, each by its strategy."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from sgl_ext.engine.core.sglang_types import Req
from sgl_ext.engine.restore import by_layers, by_tokens
from sgl_ext.engine.restore.by_layers import Coming, LayerLoads
from sgl_ext.engine.step import cached_tokens
from sgl_ext.planning.plan import LoadOrCompute
from sgl_ext.planning.strategy import Strategy, computed_share
from sgl_ext.tiers.part_loads import Pace

if TYPE_CHECKING:
    from sgl_ext.engine.restore.power import RestorePower
    from sgl_ext.engine.step.forward import PlannedForward
    from sgl_ext.engine.step.rows import Row
    from sgl_ext.restore.host_prefixes import Held
    from sgl_ext.tiers.arena import Key


@contextmanager
def restoring(power: RestorePower, forward: PlannedForward, rows: list[Row]) -> Iterator[list[Row]]:
    """Restores the forward's prefixes in host memory, or in a tier that loads layers.

    By tokens, they are complete before the forward; by layers, the forward itself restores them. If
    the forward already goes on with other rows between two layers, prefixes are only loaded.

    Args:
        rows: rows that are computed in any case.

    Yields:
        The rows that the forward begins with.
    """
    coming = _coming(power, forward)
    before = {at: power.prefixes[forward.rids[at]].computed for at in coming}
    with ExitStack() as layers:
        if forward.cut_over:
            _load_whole(power, forward, coming)
        elif coming:
            rows = layers.enter_context(_by_strategy(power, forward, rows, coming))
        yield rows
    for at, each in coming.items():
        _count(power, power.batch.reqs[at], each, before[at])


def _held(power: RestorePower, forward: PlannedForward, at: int) -> Held:
    return power.prefixes[forward.rids[at]]


def _load_whole(
    power: RestorePower, forward: PlannedForward, coming: Mapping[int, Sequence[Coming]]
) -> None:
    for at, each in coming.items():
        if _held(power, forward, at).tier is not None:
            # Only chunks cut forwards over, and the configuration excludes them.
            raise RuntimeError(f"{forward.rids[at]} has pages that are not in host memory")
        for one in each:
            power.stack.holds.fill(one.pages, one.blocks)


def _coming(power: RestorePower, forward: PlannedForward) -> dict[int, list[Coming]]:
    """Returns the forward's pages in host memory, by the request's place in the batch."""
    page, found = power.stack.layout.page, {}
    for at, plan, start, end in forward.planned():
        if (rid := forward.rids[at]) not in power.prefixes:
            continue
        held, slots = power.prefixes[rid], forward.slots(at)
        each = []
        for span in plan.between(start, end):
            if isinstance(span.source, LoadOrCompute):
                first, last = span.start // page - held.first, span.end // page - held.first
                blocks = slots[span.start - start : span.end - start : page] // page
                each.append(
                    Coming(span.start, held.pages[first:last], np.ascontiguousarray(blocks))
                )
        if each:
            found[at] = each
    return found


@contextmanager
def _by_strategy(
    power: RestorePower,
    forward: PlannedForward,
    rows: list[Row],
    coming: Mapping[int, Sequence[Coming]],
) -> Iterator[list[Row]]:
    ways: dict[Strategy, dict[int, Sequence[Coming]]] = {each: {} for each in Strategy}
    below: dict[int, Sequence[Coming]] = {}
    for at, each in coming.items():
        held = _held(power, forward, at)
        (below if held.tier else ways[held.by])[at] = each
    if tokens := ways[Strategy.TOKENS]:
        costs = power.planner.costs
        share = partial(computed_share, costs)
        began = time.monotonic()
        computed = by_tokens.restore(power.stack, forward, tokens, costs.chunk, share)
        for at, count in computed.items():
            power.prefixes.computed(forward.rids[at], count)
        _measured(power, forward, tokens, time.monotonic() - began)
    if below:
        # A forward is divided once: its other prefixes are loaded.
        _load_whole(power, forward, ways[Strategy.LAYERS])
        layers, loads = below, _from_below(power, forward, below)
    elif layers := ways[Strategy.LAYERS]:
        loads = by_layers.from_host(power.stack, layers)
    else:
        yield rows
        return
    with by_layers.restoring(power.stack, power.prefixes, forward, rows, layers, loads) as begin:
        yield begin


def _from_below(
    power: RestorePower, forward: PlannedForward, coming: Mapping[int, Sequence[Coming]]
) -> LayerLoads:
    """Starts to load pages from the lower tier that has them."""
    pages, blocks = by_layers.places(coming)
    page, costs = power.stack.layout.page, power.planner.costs
    keys: list[Key] = []
    computing = 0.0
    for at, each in coming.items():
        held = _held(power, forward, at)
        for one in each:
            first = one.start // page - held.first
            keys += held.keys[first : first + len(one.pages)]
            computing += costs.compute.work(one.start, one.start + len(one.pages) * page)
    tier = held.tier
    if tier is None:
        raise RuntimeError("pages in host memory are not loaded from a tier")
    pace = Pace(
        layer=computing / power.stack.layout.layers,
        part=costs.loads[tier.tier.name].seconds(len(keys) * page) / len(tier.parts),
    )
    loads = power.stack.holds.parts_into(pages, blocks, tier.parts, pace, time.monotonic)
    for at in coming:
        _held(power, forward, at).loads.append(loads)
    tier.load_parts(keys, pages, loads)
    return loads


def _measured(
    power: RestorePower,
    forward: PlannedForward,
    tokens: Mapping[int, Sequence[Coming]],
    seconds: float,
) -> None:
    """Records how long a prefix took to restore by tokens, if it is known for this one alone."""
    rids = [forward.rids[at] for at in tokens]
    pages = sum(len(one.pages) for each in tokens.values() for one in each)
    on_device = power.stack.streams.current() is not None
    if on_device or len(rids) > 1 or pages < len(power.prefixes[rids[0]].pages):
        return
    for kind in ("load_or_compute", "tokens_or_layers"):
        power.planner.costs.decisions.ended(kind, rids[0], seconds)


def _count(power: RestorePower, req: Req, coming: Sequence[Coming], before: int) -> None:
    """Counts the tokens of a request that a forward has loaded.

    Args:
        before: tokens of the request's pinned pages that earlier forwards had computed.
    """
    held, page = power.prefixes[req.rid], power.stack.layout.page
    tokens = sum(len(one.pages) for one in coming) * page - (held.computed - before)
    end = coming[-1].start + len(coming[-1].pages) * page
    begin, end = cached_tokens.first_time(req, coming[0].start, end)
    cached_tokens.count(req, held.source, min(tokens, end - begin))
    cached_tokens.reach(req, end)
