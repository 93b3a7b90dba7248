"""KVSplit: splits a document into chunks before any KV is computed (EPIC appendix B)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field
from semantic_text_splitter import MarkdownSplitter, TextSplitter

from sgl_ext.errors import ExtError

_MOST = 1 << 24
_HEAD, _BORDER = 8, 16
"""Characters per token of a part that are tokenized first, and tokens by which cutting a text there
may change their number."""
_WINDOW, _LARGE_WINDOW, _WINDOW_PARTS = 1 << 14, 1 << 17, 64
"""Minimum characters of a window, characters beyond which it grows only if it has too few parts,
and its characters per token of a part. The splitter holds the GIL between its callbacks."""
_FEWEST = 3
"""Minimum number of parts in a window; a window with fewer parts is enlarged."""


class Tokenizer(Protocol):
    """Interface of a model's tokenizer that splitting needs."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        """Returns the token ids of ``text``."""


class Split(BaseModel):
    """Parameters of a split.

    ``none``: no split; the user has made the parts. ``tokens``: a fixed number of tokens per part,
    wherever that cuts. ``paragraph``: at the largest units that fit (empty lines, lines, sentences,
    words); units are joined until a part is full. ``markdown``: as ``paragraph``, with headings,
    blocks and inline elements before sentences.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    by: Literal["none", "tokens", "paragraph", "markdown"] = "none"
    tokens: Annotated[int, Field(strict=True)] | None = None
    """Maximum tokens of a part, tokenized on its own."""


def split(
    whole: str | Sequence[int], how: Split, tokenizer: Tokenizer
) -> Iterator[list[str] | list[list[int]]]:
    """Yields the parts of a text or of token ids in order, several at each step.

    No part is empty, and no part exceeds the requested size. By paragraph or as Markdown, the time
    of a step depends on the size of a part, not on the text that follows, and the total time is
    linear in the length of the text.

    Splitting a text by tokens tokenizes the whole text and cuts the token ids. Splitting by
    paragraph or as Markdown yields texts whose concatenation is exactly the whole text. The token
    ids of these parts, each tokenized on its own, may differ from the token ids of the whole text.

    Raises:
        ExtError: there is nothing to split, the size is out of range or given for ``none``, token
            ids are given where text is needed, or a character takes more tokens than a part may
            have.
    """
    if not whole:
        raise ExtError("cannot split an empty text; give a text or token ids")
    if how.by == "none":
        if how.tokens is not None:
            raise ExtError(
                f"split by none does not split, but tokens is {how.tokens}; omit tokens, or split "
                "by tokens, paragraph or markdown"
            )
        yield [whole] if isinstance(whole, str) else [list(whole)]
        return
    size = how.tokens
    if size is None or not 1 <= size <= _MOST:
        raise ExtError(
            f"split by {how.by} requires tokens, the maximum tokens of a part, from 1 to {_MOST}; "
            f"found {size}"
        )
    if how.by == "tokens":
        ids = tokenizer.encode(whole, add_special_tokens=False) if isinstance(whole, str) else whole
        yield [list(ids[at : at + size]) for at in range(0, len(ids), size)]
    elif isinstance(whole, str):
        yield from _text_parts(whole, how.by, size, tokenizer)
    else:
        raise ExtError(
            f"split by {how.by} requires text, but token ids were given; split by tokens"
        )


def _text_parts(whole: str, by: str, size: int, tokenizer: Tokenizer) -> Iterator[list[str]]:
    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    def length(text: str) -> int:
        """Returns the tokens of ``text``; any number above ``size`` if it is clearly too long."""
        head = _HEAD * size
        while head < len(text):
            if (found := count(text[:head])) > 2 * size + _BORDER:
                return found
            head *= 2
        return count(text)

    kind = TextSplitter if by == "paragraph" else MarkdownSplitter
    splitter = kind.from_callback(length, size, trim=False)
    # The splitter scans all text that follows for every part, so it is given a window of the text.
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
                raise ExtError(
                    f"the part {part!r} takes {found} tokens and cannot be split further; raise "
                    f"tokens, which is {size}"
                )
        yield parts
        at += sum(map(len, parts))


def _next_window(parts: Sequence[str]) -> int:
    """Returns the index of the part that the next window begins with.

    It is the last part in the second half that begins with a heading, or else the last part. The
    last part ends where the window ends, which need not be a good place to split.
    """
    last = len(parts) - 1
    late = range(last, len(parts) // 2, -1)
    return next((at for at in late if parts[at].lstrip("\n").startswith("#")), last)
