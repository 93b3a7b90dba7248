"""Prefill plans: the source of the KV of each token of a prompt.

A plan is the only thing that planners change.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

ROUNDING = 1e-6
"""Tolerance for sums of fractions of tokens, in tokens."""


@dataclass(frozen=True)
class Compute:
    """Source of tokens that the forward computes, as rows of the batch."""

    work: ClassVar[float] = 1.0


@dataclass(frozen=True)
class Link:
    """Source of tokens whose KV is copied from a chunk (EPIC §2.2).

    Keys are rotated to the positions of the tokens in the prompt.
    """

    chunk: int
    """Number of the chunk in the prompt, or another number that its planner defines."""
    at: int
    """Position in the prompt of the chunk's first token."""
    work: float = 0.0
    """Share of a token's computation that the forward does nevertheless (CacheBlend)."""


@dataclass(frozen=True)
class Load:
    """Source of tokens whose KV a tier has loaded, from an earlier prompt with the same prefix."""

    work: ClassVar[float] = 0.0


@dataclass(frozen=True)
class LoadOrCompute:
    """Source of tokens whose KV is in host memory, and is partly loaded and partly computed.

    The last tokens or the upper layers are loaded first. The forward computes the others until
    both meet (CacheFlow §3.1).
    """

    work: ClassVar[float] = 1.0


Source = Compute | Link | Load | LoadOrCompute


class Span(NamedTuple):
    """Tokens ``start .. end - 1`` of a prompt, and the source of their KV."""

    start: int
    end: int
    source: Source


class PrefillPlan:
    """Ordered spans without gaps, from the first token of a prompt on.

    Args:
        stop: Position that the next forward must not pass, because the sources of the tokens after
            it are not decided yet; None if all are decided.
        undivided: Position from which on one forward should compute the rest, if the budget of a
            forward allows it, because the last tokens select which others are computed; None if
            the rest may be divided anywhere.

    Raises:
        ValueError: The spans have a gap or an overlap, a span is empty, or the last token is not
            computed. It must be, because the answer is sampled from its logits.
    """

    def __init__(
        self, spans: Iterable[Span], *, stop: int | None = None, undivided: int | None = None
    ) -> None:
        self.spans = tuple(spans)
        self.stop = stop
        self.undivided = undivided
        at = 0
        for span in self.spans:
            if span.start != at or span.end <= span.start:
                raise ValueError(
                    f"the spans of a plan cover the tokens before {at}, but {span} follows; "
                    "expected spans without gap or overlap, none of them empty"
                )
            at = span.end
        if not self.spans or not isinstance(self.spans[-1].source, Compute):
            raise ValueError(f"the last span of a plan must be computed, found {self.spans[-1:]}")
        self._starts = [span.start for span in self.spans]

    def __len__(self) -> int:
        """Returns the number of tokens that the spans cover."""
        return self.spans[-1].end

    def between(self, start: int, end: int) -> Iterator[Span]:
        """Yields the parts of the spans in ``start .. end - 1``; later tokens are computed."""
        for span in self.spans[max(bisect_right(self._starts, start) - 1, 0) :]:
            if span.start >= end:
                return
            if span.end > start:
                yield Span(max(span.start, start), min(span.end, end), span.source)
        if end > (behind := max(len(self), start)):
            yield Span(behind, end, Compute())

    def computed(self, start: int, end: int) -> int:
        """Returns the work of computing the tokens ``start .. end - 1``, in tokens, rounded up."""
        spans = self.between(start, end)
        work = sum((span.end - span.start) * span.source.work for span in spans)
        return math.ceil(work - ROUNDING)

    def reach(self, start: int, budget: int) -> int:
        """Returns the end of a forward from ``start`` on that computes ``budget`` tokens.

        The end follows a token that is computed, because rows compute the last token of a part in
        any case. It is not beyond ``stop``.
        """
        end = self._reach(start, budget)
        return end if self.stop is None else min(end, self.stop)

    def _reach(self, start: int, budget: int) -> int:
        end, left = start, float(budget)
        for span in self.between(start, len(self)):
            length, work = span.end - span.start, span.source.work
            if not work:
                continue
            fitting = int(left / work + ROUNDING)
            if fitting < length:
                return span.start + fitting if fitting else end
            end, left = span.end, left - length * work
        return end + int(left + ROUNDING)
