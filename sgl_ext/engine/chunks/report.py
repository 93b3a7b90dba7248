"""Report of the tokens that were linked into a request, for the answer's ``meta_info``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from sgl_ext.chunks.composition import LEAD, Composition
from sgl_ext.planning.plan import Link, PrefillPlan

COUNTED: tuple[Literal["linked", "recomputed", "missing", "computed"], ...] = (
    "linked", "recomputed", "missing", "computed",
)  # fmt: skip
"""Fields of a report that are counted over all requests."""


class Linked(TypedDict):
    """Tokens of a prompt behind its cached prefix, by the source of their KV."""

    power: str
    exact: bool
    method: str
    linked: int
    """Tokens whose KV is copied from a chunk."""
    recomputed: int
    """Tokens of chunks that are computed because the link method requires it."""
    missing: int
    """Tokens of chunks that are computed because their KV is not available."""
    computed: int
    """Tokens of chunks that are computed because that is expected to take less time than loading or
    copying their KV."""
    prefix: int
    """Tokens whose KV is copied from another prompt that begins with the same tokens and chunks."""


def report(
    composition: Composition,
    plan: PrefillPlan,
    prefix: int,
    spared: Iterable[range] = (),
    *,
    part: int = 0,
    until: int | None = None,
) -> Linked:
    """Returns the report of ``plan`` for the tokens behind the cached ``prefix`` of a request.

    Args:
        prefix: number of tokens that the request already has. After a retraction it may exceed
            the length of the prompt.
        spared: positions whose KV exists and is not loaded or copied.
        part: first token of the prompt's last forward, in which its end selects tokens.
        until: end of the tokens that are reported; None for that of the prompt.
    """
    last = len(plan) if until is None else until
    lead, linked = np.zeros(len(plan), bool), np.zeros(len(plan), bool)
    blended = 0
    for start, end, source in plan.between(min(prefix, last), last):
        if not isinstance(source, Link):
            continue
        if source.chunk == LEAD:
            lead[start:end] = True
        else:
            linked[start:end] = True
            chunk = composition.chunks[source.chunk]
            blended += chunk.blend * (end - start)
    behind = (np.arange(len(plan)) >= prefix) & (np.arange(len(plan)) < last)
    chunks = _mask(plan, (range(one.at, one.at + one.length) for one in composition.chunks))
    wanted = np.zeros(len(plan), bool)
    for chunk in composition.chunks:
        wanted[chunk.at + np.array(chunk.recompute, np.int64)] = True
    left = chunks & behind & ~lead & ~wanted & ~linked
    chosen = left & _mask(plan, spared)
    selected = blended // 100
    if until is None:
        selected += composition.selected(plan.between(max(prefix, part), len(plan)))
    return Linked(
        power="chunks", exact=False, method=composition.method,
        linked=_count(linked) - selected, recomputed=_count(wanted & behind & ~lead) + selected,
        missing=_count(left & ~chosen), computed=_count(chosen), prefix=_count(lead),
    )  # fmt: skip


def _mask(plan: PrefillPlan, ranges: Iterable[range]) -> NDArray[np.bool_]:
    found = np.zeros(len(plan), bool)
    for each in ranges:
        found[each.start : each.stop] = True
    return found


def _count(mask: NDArray[np.bool_]) -> int:
    return int(np.count_nonzero(mask))
