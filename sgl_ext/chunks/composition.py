"""Composition of a prompt from chunks: sent with a request, turned into a prefill plan."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import msgspec

from sgl_ext.planning.plan import ROUNDING, Compute, Link, PrefillPlan, Span

LEAD = -1
"""Chunk number that stands for the KV of another prompt with the same prefix."""
_FILLER = 0
"""Token id that fills the last page of a chunk. Every vocabulary has it, and later tokens do not
change the KV of earlier ones."""


class LinkedChunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Chunk at tokens ``at .. at + length - 1`` of the prompt, whose KV is linked."""

    at: int
    length: int
    preparation: int
    """Index of the prefix in :attr:`Composition.preparations` that the KV was computed with."""
    recompute: tuple[int, ...] = ()
    """Offsets of the chunk's tokens that are recomputed, ascending (EPIC §3.2)."""
    blend: int = 0
    """Percentage of the other tokens that are recomputed in all layers but the first ones. They are
    the tokens whose values change most (CacheBlend)."""
    query: int = 0
    """Percentage of the other tokens that are recomputed because the last tokens of the prompt
    attend to them most."""


class Composition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Chunks of a prompt in order; the tokens outside them are computed."""

    method: str
    """Names of the link methods, joined by ``/``, for the answer's ``meta_info``."""
    namespace: str
    """SGLang's ``extra_key`` under which the KV of the chunks is cached."""
    preparations: tuple[tuple[int, ...], ...]
    """Token ids of each prefix that chunks of this prompt were computed with."""
    chunks: tuple[LinkedChunk, ...]
    question: str = ""
    """Digest of the tokens from the first chunk on of which the end of the prompt selects tokens:
    which are selected depends on all of them. Empty if there is no such chunk."""

    @property
    def extra_key(self) -> str:
        """SGLang's ``extra_key`` for the prompt's own KV. Prompts that have the same tokens but
        other chunks have other keys; so have all prompts whose ends select tokens."""
        # Covers everything that linked KV depends on except the tokens, which the tree compares.
        named = (self.namespace, self.preparations, self.chunks, self.question)
        digest = hashlib.sha256(msgspec.json.encode(named)).hexdigest()
        return f"ext:link:{digest[:32]}"

    def until(self, count: int) -> Composition:
        """Returns the composition of a prompt that has only the first ``count`` chunks.

        An earlier turn of the conversation has it if the other chunks were added later.

        Args:
            count: at least 1.
        """
        chunks = self.chunks[:count]
        named = 1 + max(chunk.preparation for chunk in chunks)
        return Composition(self.method, self.namespace, self.preparations[:named], chunks)

    def check(self, length: int, extra_key: str | None) -> None:
        """Raises ValueError unless this composition fits a prompt of ``length`` tokens whose own KV
        is cached under ``extra_key``."""
        if extra_key != self.extra_key and not (extra_key or "").startswith(f"{self.extra_key}:"):
            raise ValueError(
                f"the KV of the prompt would be cached under extra_key {extra_key!r}, where other "
                "requests would reuse it as exact KV; use the extra_key of the composition"
            )
        free = 0
        if not self.chunks:
            raise ValueError("the composition has no chunks; give at least one")
        for number, chunk in enumerate(self.chunks):
            offsets = chunk.recompute
            end = chunk.at + chunk.length
            linked_end = end - (chunk.length - 1 in offsets)
            if chunk.at < free or chunk.length < 1 or end > length or linked_end == length:
                raise ValueError(
                    f"chunk {number} covers tokens {chunk.at} .. {end - 1} of a prompt of "
                    f"{length} tokens, after a chunk that ends at {free}; chunks must follow each "
                    "other within the prompt, and its last token must be computed"
                )
            if list(offsets) != sorted({*offsets}) or not all(
                0 <= offset < chunk.length for offset in offsets
            ):
                raise ValueError(
                    f"chunk {number} of {chunk.length} tokens recomputes {offsets}; expected "
                    "ascending offsets of its tokens"
                )
            if not 0 <= chunk.blend < 100:
                raise ValueError(f"chunk {number} blends {chunk.blend} percent; expected 0 to 99")
            if not 0 <= chunk.query < 100 or (chunk.query and chunk.blend):
                raise ValueError(
                    f"chunk {number} selects {chunk.query} percent by attention and blends "
                    f"{chunk.blend} percent; expected one of them, 0 to 99"
                )
            if not 0 <= chunk.preparation < len(self.preparations):
                raise ValueError(
                    f"chunk {number} references preparation {chunk.preparation}, but the "
                    f"composition has {len(self.preparations)}"
                )
            free = chunk.at + chunk.length

    @property
    def computed_from(self) -> int:
        """Position from which on all tokens are computed. Tokens before it may be linked; linked
        tokens have no logits."""
        every = [[range(chunk.length)] for chunk in self.chunks]
        end = self.chunks[-1].at + self.chunks[-1].length
        spans = self._spans(end, every, [range(self.chunks[0].at)] if self.chunks[0].at else [])
        return max((span.end for span in spans if isinstance(span.source, Link)), default=0)

    def check_logprobs(self, start: int) -> None:
        """Raises ValueError if the logprobs from token ``start`` on include linked tokens.

        Args:
            start: SGLang's ``logprob_start_len``; negative if no prompt logprobs are wanted.
        """
        if 0 <= start < self.computed_from:
            raise ValueError(
                f"logprobs were requested from token {start} on (logprob_start_len), but linked "
                f"tokens have none; set logprob_start_len to {self.computed_from} or more, or "
                "omit it"
            )

    def plan(
        self,
        length: int,
        available: Sequence[Sequence[range]],
        lead: Sequence[range] = (),
        *,
        blend_share: float = 0.0,
        stop: int | None = None,
        budget: int | None = None,
    ) -> PrefillPlan:
        """Returns the prefill plan of a prompt of ``length`` tokens.

        If a forward cannot compute all tokens that the end of the prompt selects together with the
        text that is computed from the first chunk on, it selects fewer.

        Args:
            available: offsets of the tokens of each chunk whose KV is available, as ascending
                ranges; the others are computed.
            lead: positions of the tokens whose KV comes from another prompt, in the same form.
            blend_share: share of the model's layers that CacheBlend computes for all tokens.
            stop: see :class:`~sgl_ext.planning.plan.PrefillPlan`.
            budget: tokens that a forward computes at most; None if there is no limit.
        """
        selecting = next((chunk.at for chunk in self.chunks if chunk.query), None)
        spans = [*self._spans(length, available, lead, blend_share)]
        if selecting is not None and budget is not None:
            spans = self._within(budget, spans, selecting)
        return PrefillPlan(spans, stop=stop, undivided=selecting)

    def _within(self, budget: int, spans: Sequence[Span], selecting: int) -> list[Span]:
        """Returns the spans with fewer selected tokens if a forward cannot compute all of them.
        What is selected takes half of its budget at least.

        Args:
            selecting: position from which on a forward computes the prompt.
        """
        others = selected = 0.0
        for span in spans:
            work = (span.end - max(span.start, selecting)) * span.source.work
            if work > 0 and self._queried(span):
                selected += work
            elif work > 0:
                others += work
        share = max(budget - others, budget / 2) / selected if selected else 1.0
        if share >= 1:
            return [*spans]
        return [
            span._replace(source=replace(span.source, work=share * span.source.work))
            if isinstance(span.source, Link) and self._queried(span)
            else span
            for span in spans
        ]

    def _queried(self, span: Span) -> bool:
        """Returns whether the end of the prompt selects tokens of a span."""
        link = span.source
        return isinstance(link, Link) and link.chunk != LEAD and self.chunks[link.chunk].query > 0

    def selected(self, spans: Iterable[Span]) -> int:
        """Returns how many tokens of ``spans`` the end of the prompt selects."""
        works = ((one.end - one.start) * one.source.work for one in spans if self._queried(one))
        return int(sum(works) + ROUNDING)

    def _spans(
        self,
        length: int,
        available: Sequence[Sequence[range]],
        lead: Sequence[range],
        blend_share: float = 0.0,
    ) -> Iterator[Span]:
        spans = [Span(one.start, one.stop, Link(LEAD, 0)) for one in lead]
        for number, (chunk, found) in enumerate(zip(self.chunks, available, strict=True)):
            blend = chunk.blend / 100
            work = blend + (1 - blend) * blend_share if chunk.blend else chunk.query / 100
            link = Link(number, chunk.at, work)
            for start, end in _gaps(chunk.recompute, found):
                every = _without(chunk.at + start, chunk.at + end, lead)
                spans += [Span(begin, stop, link) for begin, stop in every]
        at = 0
        for span in sorted(spans, key=lambda one: one.start):
            if span.start > at:
                yield Span(at, span.start, Compute())
            yield span
            at = span.end
        yield Span(at, length, Compute())


class Selection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request parameter that asks which tokens of a computed chunk have the values that differ most
    between two preparations of the chunk."""

    namespace: str
    length: int
    """Tokens of the chunk."""
    preparation: tuple[int, ...]
    """Token ids of the prefix that the chunk was computed with."""
    other: tuple[int, ...]
    """Token ids of the prefix that it was computed with earlier."""
    count: int
    """Maximum number of tokens to select."""

    def check(self, length: int) -> None:
        """Raises ValueError unless this selection fits a prompt of ``length`` tokens."""
        if min(self.length, self.count) < 1 or len(self.preparation) + self.length > length:
            raise ValueError(
                f"cannot select {self.count} tokens of a chunk of {self.length} tokens after a "
                f"prefix of {len(self.preparation)} tokens in a prompt of {length} tokens"
            )


def path_of(before: Sequence[int], chunk: Sequence[int], page: int) -> array[int]:
    """Returns the token ids under which the radix tree caches a chunk's KV.

    They are the prefix that the chunk is computed with, the chunk itself, and filler tokens up to
    the end of its last page.

    Args:
        page: tokens of a page.
    """
    path = array("q", before)
    path.extend(chunk)
    path.extend([_FILLER] * (-len(path) % page))
    return path


def _gaps(recompute: Sequence[int], found: Sequence[range]) -> Iterator[tuple[int, int]]:
    """Yields runs ``(start, end)`` of a chunk's ``found`` tokens that are not recomputed."""
    for each in found:
        start = each.start
        for offset in recompute[bisect_left(recompute, start) :]:
            if offset >= each.stop:
                break
            if offset > start:
                yield start, offset
            start = offset + 1
        if start < each.stop:
            yield start, each.stop


def _without(start: int, end: int, taken: Sequence[range]) -> Iterator[tuple[int, int]]:
    """Yields the parts of ``start .. end - 1`` outside of ascending ranges."""
    for each in taken:
        if each.start > start and start < end:
            yield start, min(each.start, end)
        start = max(start, each.stop)
    if start < end:
        yield start, end
