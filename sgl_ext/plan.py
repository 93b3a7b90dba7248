"""Where the KV of each token of a prompt comes from: the one thing that planners rewrite."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Compute:
    """The forward computes it: a row of the batch."""


@dataclass(frozen=True)
class Link:
    """It is copied from a chunk's KV, keys rotated to where they stand now (EPIC §2.2)."""

    chunk: int
    """Number of the chunk among those of the prompt, or what else its planner names."""
    at: int
    """Position in the prompt of the chunk's first token."""


Source = Compute | Link


class Span(NamedTuple):
    """Tokens ``start .. end - 1`` of a prompt."""

    start: int
    end: int
    source: Source


class PrefillPlan:
    """Ordered, gap-free spans from the first token on.

    Raises:
        ValueError: a gap, an overlap, an empty span, or a last token that is not computed: the
            answer is sampled from its logits.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self.spans = tuple(spans)
        at = 0
        for span in self.spans:
            if span.start != at or span.end <= span.start:
                raise ValueError(f"the plan's tokens {at} on, then {span}: a gap, overlap or hole")
            at = span.end
        if not self.spans or not isinstance(self.spans[-1].source, Compute):
            raise ValueError(f"the last token of a plan is computed, not {self.spans[-1:]}")
        self._starts = [span.start for span in self.spans]

    def __len__(self) -> int:
        """Tokens."""
        return self.spans[-1].end

    def between(self, start: int, end: int) -> Iterator[Span]:
        """The parts of the spans in ``start .. end - 1``; tokens behind the plan are computed."""
        for span in self.spans[max(bisect_right(self._starts, start) - 1, 0) :]:
            if span.start >= end:
                return
            if span.end > start:
                yield Span(max(span.start, start), min(span.end, end), span.source)
        if end > (behind := max(len(self), start)):
            yield Span(behind, end, Compute())

    def computed(self, start: int, end: int) -> int:
        """Tokens in ``start .. end - 1`` that the forward computes."""
        spans = self.between(start, end)
        return sum(span.end - span.start for span in spans if isinstance(span.source, Compute))

    def reach(self, start: int, budget: int) -> int:
        """How far a forward from ``start`` on gets that computes ``budget`` tokens."""
        at = start
        for span in self.between(start, len(self)):
            length = span.end - span.start
            if isinstance(span.source, Compute):
                if length >= budget:
                    return at + budget
                budget -= length
            at = span.end
        return at + budget
