"""KVSplit: a document becomes chunks (EPIC appendix B), before any KV is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field
from semantic_text_splitter import MarkdownSplitter, TextSplitter

from sgl_ext.errors import ExtError

_MOST = 1 << 24
_HEAD, _BORDER = 8, 16
"""Characters for each token that are tokenised first, and tokens by which a cut may be wrong."""
_WINDOW, _LARGE_WINDOW, _WINDOW_PARTS = 1 << 14, 1 << 17, 64
"""Least characters of a window, those beyond which it grows only if it gives too few parts, and
characters of it for each token of a part. The splitter holds Python's lock between its calls."""
_FEWEST = 3
"""Parts that a window must give before the next one begins."""


class Tokenizer(Protocol):
    """What of a model's tokenizer is needed."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        """Token ids."""


class Split(BaseModel):
    """How to split.

    ``none``: the parts are the user's own. ``tokens``: every so many tokens, wherever that is.
    ``paragraph``: at the largest of empty lines, lines, sentences and words that fit, then filled
    up. ``markdown``: the same with headings, blocks and inline elements before sentences.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    by: Literal["none", "tokens", "paragraph", "markdown"] = "none"
    tokens: Annotated[int, Field(strict=True)] | None = None
    """Most tokens of a part, tokenised by itself."""


def split(
    whole: str | Sequence[int], how: Split, tokenizer: Tokenizer
) -> Iterator[list[str] | list[list[int]]]:
    """Yields the parts of a text or of token ids in order, several at each step.

    No part is empty, and none is longer than asked. A step takes time by the size of a part, not
    by what follows, and the whole takes time by its length.

    Text that is split by tokens becomes token ids: those of the whole, cut. Split by paragraph or
    as Markdown it stays text, the parts of which make up the whole to the last space; their token
    ids, each tokenised by itself, need not be those of the whole.

    Raises:
        ExtError: nothing to split, a size that cannot be, token ids where text is needed, a
            character that takes more tokens than a part may have.
    """
    if not whole:
        raise ExtError("there is nothing to split: the text is empty")
    if how.by == "none":
        if how.tokens is not None:
            raise ExtError(
                f"split by none leaves parts as they are, but tokens is {how.tokens}; leave it "
                "out, or split by tokens, paragraph or markdown"
            )
        yield [whole] if isinstance(whole, str) else [list(whole)]
        return
    size = how.tokens
    if size is None or not 1 <= size <= _MOST:
        raise ExtError(f"split by {how.by} needs the tokens of a part, 1 to {_MOST}; found {size}")
    if how.by == "tokens":
        ids = tokenizer.encode(whole, add_special_tokens=False) if isinstance(whole, str) else whole
        yield [list(ids[at : at + size]) for at in range(0, len(ids), size)]
    elif isinstance(whole, str):
        yield from _text_parts(whole, how.by, size, tokenizer)
    else:
        raise ExtError(f"split by {how.by} needs text, and this is token ids; split by tokens")


def _text_parts(whole: str, by: str, size: int, tokenizer: Tokenizer) -> Iterator[list[str]]:
    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    def length(text: str) -> int:
        """Tokens of ``text``; any number beyond ``size`` if it is plainly too long."""
        head = _HEAD * size
        while head < len(text):
            if (found := count(text[:head])) > 2 * size + _BORDER:
                return found
            head *= 2
        return count(text)

    kind = TextSplitter if by == "paragraph" else MarkdownSplitter
    splitter = kind.from_callback(length, size, trim=False)
    # The splitter looks at all that follows for every part, so it is given a window of the text.
    at = 0
    while at < len(whole):
        width = max(_WINDOW, min(_WINDOW_PARTS * size, _LARGE_WINDOW))
        parts = splitter.chunks(whole[at : at + width])
        while at + width < len(whole) and len(parts) < _FEWEST:
            width *= 2
            parts = splitter.chunks(whole[at : at + width])
        if at + width < len(whole):
            parts = parts[: _next_window(parts)]
        for part in parts:
            if (found := count(part)) > size:
                raise ExtError(f"{part!r} alone takes {found} tokens, and a part may have {size}")
        yield parts
        at += sum(map(len, parts))


def _next_window(parts: Sequence[str]) -> int:
    """The part that the next window begins with: a late one with a heading, or else the last.

    The last one ends where the window does, not where it should.
    """
    last = len(parts) - 1
    late = range(last, len(parts) // 2, -1)
    return next((at for at in late if parts[at].lstrip("\n").startswith("#")), last)
