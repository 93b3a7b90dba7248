"""Report of the tokens that were linked into a request, for the answer's ``meta_info``."""

from __future__ import annotations

from typing import TypedDict

from sgl_ext.chunks.composition import LEAD, Composition
from sgl_ext.planning.plan import Link, PrefillPlan


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
    prefix: int
    """Tokens whose KV is copied from another prompt that begins with the same tokens and chunks."""


def report(composition: Composition, plan: PrefillPlan, prefix: int) -> Linked:
    """Returns the report of ``plan`` for the tokens behind the cached ``prefix`` of a request.

    Args:
        prefix: number of tokens that the request already has. After a retraction it may exceed
            the length of the prompt.
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
