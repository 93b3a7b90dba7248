"""Which chunks a prompt is made of, as a request tells the scheduler, and the plan that follows."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

import msgspec

from sgl_ext.plan import Compute, Link, PrefillPlan, Span

LEAD = -1
"""In place of a chunk's number: what another prompt has that begins as this one."""
_FILLER = 0
"""A token that every vocabulary has; what follows a token does not change its KV."""


class LinkedChunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens ``at .. at + length - 1`` of the prompt are a chunk's, whose KV is to be linked."""

    at: int
    length: int
    preparation: int
    """Number of the text that the chunk's KV was computed behind."""
    recompute: tuple[int, ...] = ()
    """Tokens of the chunk, ascending, that are computed nevertheless (EPIC §3.2)."""
    blend: int = 0
    """Per cent of the others that are computed nevertheless, of all layers but the first ones:
    those whose values change most (CacheBlend)."""


class Composition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt's chunks in order; the rest of it is computed."""

    method: str
    """Name of the link method, for the answer's ``meta_info``."""
    namespace: str
    """SGLang's ``extra_key`` that the chunks' KV was computed under."""
    preparations: tuple[tuple[int, ...], ...]
    """Token ids of each text that chunks of this prompt were computed behind."""
    chunks: tuple[LinkedChunk, ...]

    @property
    def extra_key(self) -> str:
        """SGLang's ``extra_key`` that a prompt's own KV belongs under: that of no other prompt of
        the same tokens is like it."""
        # It names all that linked KV depends on but the tokens, which the tree compares.
        named = (self.namespace, self.preparations, self.chunks)
        digest = hashlib.sha256(msgspec.json.encode(named)).hexdigest()
        return f"ext:link:{digest[:32]}"

    def until(self, count: int) -> Composition:
        """The composition of a prompt of the first ``count`` chunks only, at least one: that of an
        earlier turn of this conversation, if the others came later."""
        chunks = self.chunks[:count]
        named = 1 + max(chunk.preparation for chunk in chunks)
        return Composition(self.method, self.namespace, self.preparations[:named], chunks)

    def check(self, length: int, extra_key: str | None) -> None:
        """Raises ValueError unless this can be a prompt of ``length`` tokens whose own KV goes
        under ``extra_key``."""
        if extra_key != self.extra_key and not (extra_key or "").startswith(f"{self.extra_key}:"):
            raise ValueError(
                f"its KV would be cached under {extra_key!r}, where others would take it for exact"
            )
        free = 0
        if not self.chunks:
            raise ValueError("a composition has chunks, and this one has none")
        for number, chunk in enumerate(self.chunks):
            offsets = chunk.recompute
            end = chunk.at + chunk.length
            linked_end = end - (chunk.length - 1 in offsets)
            if chunk.at < free or chunk.length < 1 or end > length or linked_end == length:
                raise ValueError(
                    f"chunk {number} lies at {chunk.at} .. {end - 1} of a prompt of {length} "
                    f"tokens, behind one that ends at {free}; chunks follow each other, and the "
                    "prompt's last token is computed"
                )
            if list(offsets) != sorted({*offsets}) or not all(
                0 <= offset < chunk.length for offset in offsets
            ):
                raise ValueError(f"chunk {number} of {chunk.length} tokens recomputes {offsets}")
            if not 0 <= chunk.blend < 100:
                raise ValueError(f"chunk {number} blends {chunk.blend} per cent; expected 0 to 99")
            if not 0 <= chunk.preparation < len(self.preparations):
                raise ValueError(
                    f"chunk {number} names preparation {chunk.preparation} "
                    f"of {len(self.preparations)}"
                )
            free = chunk.at + chunk.length

    @property
    def computed_from(self) -> int:
        """From which token on all are computed: what comes before may be linked, and has no
        logits."""
        every = [chunk.length for chunk in self.chunks]
        end = self.chunks[-1].at + self.chunks[-1].length
        spans = self._spans(end, every, self.chunks[0].at)
        return max((span.end for span in spans if isinstance(span.source, Link)), default=0)

    def check_logprobs(self, start: int) -> None:
        """Raises ValueError if logprobs from token ``start`` on are of linked tokens, too.

        Args:
            start: SGLang's ``logprob_start_len``; negative for none of the prompt.
        """
        if 0 <= start < self.computed_from:
            raise ValueError(
                f"logprobs from token {start} on (logprob_start_len), and linked tokens have "
                f"none; begin at {self.computed_from} or later, or leave it out"
            )

    def plan(
        self, length: int, available: Sequence[int], lead: int = 0, *, blend_share: float = 0.0
    ) -> PrefillPlan:
        """The plan of a prompt of ``length`` tokens.

        Args:
            available: how many tokens of each chunk, from its first on, there is KV of; the
                others are computed.
            lead: as many of the prompt, from its first on, that another one has.
            blend_share: of a model's layers, those that blending computes of all tokens.
        """
        return PrefillPlan(self._spans(length, available, lead, blend_share))

    def _spans(
        self, length: int, available: Sequence[int], lead: int, blend_share: float = 0.0
    ) -> Iterator[Span]:
        if lead:
            yield Span(0, lead, Link(LEAD, 0))
        at = lead  # what lies before has a span
        for number, (chunk, found) in enumerate(zip(self.chunks, available, strict=True)):
            blend = chunk.blend / 100
            work = blend + (1 - blend) * blend_share if chunk.blend else 0.0
            for start, end in _gaps(chunk.recompute, found):
                if chunk.at + end <= at:
                    continue
                if (begin := max(chunk.at + start, at)) > at:
                    yield Span(at, begin, Compute())
                at = chunk.at + end
                yield Span(begin, at, Link(number, chunk.at, work))
        yield Span(at, length, Compute())


class Selection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks, when a chunk's KV has been computed, which of its tokens' values differ most between
    this and another preparation of it."""

    namespace: str
    length: int
    """Tokens of the chunk."""
    preparation: tuple[int, ...]
    """Token ids that the chunk was computed behind."""
    other: tuple[int, ...]
    """Those that it was computed behind before."""
    count: int
    """Tokens that are wanted."""

    def check(self, length: int) -> None:
        """Raises ValueError unless this can be asked of a prompt of ``length`` tokens."""
        if min(self.length, self.count) < 1 or len(self.preparation) + self.length > length:
            raise ValueError(
                f"{self.count} tokens of a chunk of {self.length} behind {len(self.preparation)}, "
                f"in a prompt of {length}"
            )


def path_of(before: Sequence[int], chunk: Sequence[int], page: int) -> array[int]:
    """The token ids that a chunk's KV lies under in the tree: those it was computed behind, its
    own, and so many of no meaning as fill its last page."""
    path = array("q", before)
    path.extend(chunk)
    path.extend([_FILLER] * (-len(path) % page))
    return path


def _gaps(recompute: Sequence[int], found: int) -> Iterator[tuple[int, int]]:
    """Runs ``(start, end)`` of the chunk's first ``found`` tokens that are not recomputed."""
    start = 0
    for offset in recompute:
        if offset >= found:
            break
        if offset > start:
            yield start, offset
        start = offset + 1
    if start < found:
        yield start, found
