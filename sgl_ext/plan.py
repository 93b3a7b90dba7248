"""Where the KV of each token of a prompt comes from: the one thing that planners rewrite."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

_ROUNDING = 1e-6
"""Tokens."""


@dataclass(frozen=True)
class Compute:
    """The forward computes it: a row of the batch."""

    work: ClassVar[float] = 1.0


@dataclass(frozen=True)
class Link:
    """It is copied from a chunk's KV, keys rotated to where they stand now (EPIC §2.2)."""

    chunk: int
    """Number of the chunk among those of the prompt, or what else its planner names."""
    at: int
    """Position in the prompt of the chunk's first token."""
    work: float = 0.0
    """Share of a token's computing that the forward does of it nevertheless (CacheBlend)."""


@dataclass(frozen=True)
class Load:
    """A tier has brought it, from an earlier prompt that begins with the same tokens."""

    work: ClassVar[float] = 0.0


@dataclass(frozen=True)
class LoadOrCompute:
    """Host memory has it, and gives its last tokens or upper layers first; the forward computes the
    others until both meet (CacheFlow §3.1)."""

    work: ClassVar[float] = 1.0


Source = Compute | Link | Load | LoadOrCompute


class Span(NamedTuple):
    """Tokens ``start .. end - 1`` of a prompt."""

    start: int
    end: int
    source: Source


class PrefillPlan:
    """Ordered, gap-free spans from the first token on.

    Args:
        stop: position that the next forward does not go beyond, because what lies behind it is not
            decided yet; None if all is.

    Raises:
        ValueError: a gap, an overlap, an empty span, or a last token that is not computed: the
            answer is sampled from its logits.
    """

    def __init__(self, spans: Iterable[Span], *, stop: int | None = None) -> None:
        self.spans = tuple(spans)
        self.stop = stop
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
        """What computing the tokens ``start .. end - 1`` takes, in whole tokens."""
        spans = self.between(start, end)
        work = sum((span.end - span.start) * span.source.work for span in spans)
        return math.ceil(work - _ROUNDING)

    def reach(self, start: int, budget: int) -> int:
        """End of a forward from ``start`` on that computes ``budget`` tokens.

        It lies behind a token that is computed: rows compute the last token of a part in any case.
        """
        end = self._reach(start, budget)
        return end if self.stop is None else min(end, self.stop)

    def _reach(self, start: int, budget: int) -> int:
        end, left = start, float(budget)
        for span in self.between(start, len(self)):
            length, work = span.end - span.start, span.source.work
            if not work:
                continue
            fitting = int(left / work + _ROUNDING)
            if fitting < length:
                return span.start + fitting if fitting else end
            end, left = span.end, left - length * work
        return end + int(left + _ROUNDING)
