"""Report of the tokens that were linked into a request, for the answer's ``meta_info``."""

from __future__ import annotations

from typing import TypedDict

import numpy as np

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
    lead = np.zeros(max(len(plan) - prefix, 0), bool)
    linked = share = 0
    for start, end, source in plan.between(min(prefix, len(plan)), len(plan)):
        if not isinstance(source, Link):
            continue
        if source.chunk == LEAD:
            lead[start - prefix : end - prefix] = True
        else:
            linked += end - start
            share += composition.chunks[source.chunk].blend * (end - start)
    tokens = wanted = 0
    for chunk in composition.chunks:
        at = chunk.at - prefix
        tokens += int(np.count_nonzero(~lead[max(at, 0) : max(at + chunk.length, 0)]))
        offsets = at + np.array(chunk.recompute, np.int64)
        wanted += int(np.count_nonzero(~lead[offsets[offsets >= 0]]))
    blended = share // 100
    return Linked(
        power="chunks", exact=False, method=composition.method, linked=linked - blended,
        recomputed=wanted + blended, missing=tokens - wanted - linked,
        prefix=int(np.count_nonzero(lead)),
    )  # fmt: skip
