"""Linked request: its chunks, its plan, and the tokens among which its forwards select."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from sgl_ext.chunks.composition import LEAD, Composition, LinkedChunk
from sgl_ext.engine.chunks.blend import Candidates
from sgl_ext.engine.chunks.search import Found
from sgl_ext.planning.plan import Link, PrefillPlan, Span


@dataclass
class LinkedRequest:
    """Request whose prompt has chunks, from the attempt to admit it to the end of its prefill."""

    composition: Composition
    tokens: int
    """Tokens of the prompt."""
    found: dict[int, Found]
    """KV of the chunks behind the prefix that the request already has, by chunk number.
    :data:`LEAD` stands for the KV of another prompt with the same prefix."""
    plan: PrefillPlan
    prefix: int
    """Tokens that the request had when it was admitted."""
    spared: Sequence[range] = ()
    """Positions whose KV exists, but is computed because that is expected to be faster."""
    reached: int = 0
    """End of the tokens that the forwards so far have computed or linked."""
    earlier: list[LinkedRequest] = field(default_factory=list)
    """The same request before it was interrupted or retracted in the middle of its prompt."""

    def blended(self, start: int, end: int) -> Candidates | None:
        """Returns the linked tokens in ``start .. end - 1`` among which CacheBlend selects.

        Returns None if it would select none.
        """
        positions, share = [], 0
        for span, chunk in self._linked(start, end):
            if chunk.blend:
                positions.append(np.arange(span.start, span.end))
                share += chunk.blend * (span.end - span.start)
        return Candidates(np.concatenate(positions), share // 100) if share >= 100 else None

    def queried(self, start: int, end: int) -> tuple[Candidates, int] | None:
        """Returns the linked tokens in ``start .. end - 1`` among which the end of the prompt
        selects, and the number of tokens of the prompt.

        Returns None if it would select none, or if the end of the prompt is not among them.
        """
        if end < self.tokens:
            return None
        spans = [span for span, chunk in self._linked(start, end) if chunk.query]
        if not (wanted := self.composition.selected(spans)):
            return None
        positions = np.concatenate([np.arange(one.start, one.end) for one in spans])
        return Candidates(positions, wanted), self.tokens

    def _linked(self, start: int, end: int) -> Iterator[tuple[Span, LinkedChunk]]:
        """Yields the spans in ``start .. end - 1`` whose KV is that of a chunk, and the chunks."""
        for span in self.plan.between(start, end):
            if isinstance(span.source, Link) and span.source.chunk != LEAD:
                yield span, self.composition.chunks[span.source.chunk]
