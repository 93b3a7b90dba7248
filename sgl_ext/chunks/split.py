"""KVSplit: a document becomes chunks (EPIC appendix B), before any KV is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field
from semantic_text_splitter import MarkdownSplitter, TextSplitter

from sgl_ext.errors import ExtError

_MOST = 1 << 24


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
) -> list[str] | list[list[int]]:
    """The parts of a text or of token ids, in order; none is empty, and none longer than asked.

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
        return [whole] if isinstance(whole, str) else [list(whole)]
    size = how.tokens
    if size is None or not 1 <= size <= _MOST:
        raise ExtError(f"split by {how.by} needs the tokens of a part, 1 to {_MOST}; found {size}")
    if how.by == "tokens":
        ids = tokenizer.encode(whole, add_special_tokens=False) if isinstance(whole, str) else whole
        return [list(ids[at : at + size]) for at in range(0, len(ids), size)]
    if not isinstance(whole, str):
        raise ExtError(f"split by {how.by} needs text, and this is token ids; split by tokens")

    def length(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    splitter = TextSplitter if how.by == "paragraph" else MarkdownSplitter
    parts = splitter.from_callback(length, size, trim=False).chunks(whole)
    for part in parts:
        if (found := length(part)) > size:
            raise ExtError(f"{part!r} alone takes {found} tokens, and a part may have {size}")
    return parts
