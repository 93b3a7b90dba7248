"""What was linked into a request, for its answer's ``meta_info``."""

from __future__ import annotations

from typing import TypedDict

from sgl_ext.chunks.composition import LEAD, Composition
from sgl_ext.plan import Link, PrefillPlan


class Linked(TypedDict):
    """Tokens of a prompt by where their KV comes from, behind the prefix that it has."""

    power: str
    exact: bool
    method: str
    linked: int
    """Tokens whose KV is a chunk's."""
    recomputed: int
    """Tokens of chunks that are computed, as the method wants it."""
    missing: int
    """Tokens of chunks that are computed because there was no KV of them."""
    prefix: int
    """Tokens whose KV is that of another prompt which begins with them and the same chunks."""


def report(composition: Composition, plan: PrefillPlan, prefix: int) -> Linked:
    """What ``plan`` does behind the ``prefix`` tokens that a request has already.

    After a retraction these may be more than the prompt's.
    """
    first = plan.spans[0]
    is_lead = isinstance(first.source, Link) and first.source.chunk == LEAD
    lead = max(first.end - prefix, 0) if is_lead else 0
    begin = min(prefix + lead, len(plan))
    linked = share = 0
    for start, end, source in plan.between(begin, len(plan)):
        if isinstance(source, Link):
            linked += end - start
            share += composition.chunks[source.chunk].blend * (end - start)
    tokens = sum(max(one.at + one.length - max(one.at, begin), 0) for one in composition.chunks)
    wanted = sum(
        chunk.at + offset >= begin for chunk in composition.chunks for offset in chunk.recompute
    )
    blended = share // 100
    return Linked(
        power="chunks", exact=False, method=composition.method, linked=linked - blended,
        recomputed=wanted + blended, missing=tokens - wanted - linked, prefix=lead,
    )  # fmt: skip
