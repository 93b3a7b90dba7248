"""Composition of prompts: turns text with context marks into token ids and linked chunks."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from sgl_ext.chunks.composition import Composition, LinkedChunk
from sgl_ext.chunks.contexts import Context
from sgl_ext.errors import ExtError
from sgl_ext.marks import MARK

_MOST = 1000

NAMESPACE = "ext:chunk"
"""SGLang's ``extra_key`` under which the KV of chunks is cached."""


@dataclass(frozen=True)
class Prompt:
    """Prompt in the form that SGLang takes."""

    tokens: list[int]
    """Token ids of the whole prompt, those of its chunks included."""
    composition: Composition | None
    """Chunks of the prompt; None if it has none."""


def compose(
    text: str,
    *,
    context_of: Callable[[str], Context],
    tokenize: Callable[[str, bool], Sequence[int]],
    longest: int,
) -> Prompt:
    """Returns the prompt that ``text`` with its marks stands for.

    Text between contexts is tokenized on its own, as the contexts were.

    Args:
        context_of: returns the context of an id; raises if there is none.
        tokenize: returns the token ids of a text; its second argument is True if the text begins
            the prompt.
        longest: maximum tokens of the prompt.

    Raises:
        ExtError: the parts before the last one have more than ``longest`` tokens or name too many
            contexts. A short mark can stand for a long text, so the check precedes each part.
    """
    tokens: list[int] = []
    chunks: list[LinkedChunk] = []
    preparations: dict[tuple[int, ...], int] = {}
    methods: dict[str, None] = {}
    for part in _parts(text, context_of):
        if not isinstance(part, str) and len(chunks) == _MOST:
            raise ExtError(
                f"the prompt references more than {_MOST} contexts; create fewer, larger contexts"
            )
        if len(tokens) > longest:
            raise ExtError(
                f"the prompt with its contexts exceeds the maximum length of {longest} tokens; "
                "reference fewer contexts"
            )
        if isinstance(part, str):
            tokens += tokenize(part, not tokens)
            continue
        if not tokens:
            tokens += tokenize("", True)
        preparation = preparations.setdefault(part.before, len(preparations))
        chunks.append(_linked(part, len(tokens), preparation))
        methods[part.method] = None
        tokens += part.tokens
    if not chunks:
        return Prompt(tokens, None)
    if (last := chunks[-1]).at + last.length == len(tokens):
        # The answer is sampled from the last token's logits, which linked KV does not provide.
        again = tuple(sorted({*last.recompute, last.length - 1}))
        chunks[-1] = msgspec.structs.replace(last, recompute=again)
    composition = Composition(
        "/".join(methods), NAMESPACE, tuple(preparations), tuple(chunks), _question(tokens, chunks)
    )
    return Prompt(tokens, composition)


def _question(tokens: Sequence[int], chunks: Sequence[LinkedChunk]) -> str:
    """Returns :attr:`Composition.question` of a prompt."""
    if (first := next((chunk.at for chunk in chunks if chunk.query), None)) is None:
        return ""
    return hashlib.sha256(array("q", tokens[first:]).tobytes()).hexdigest()[:32]


def _linked(context: Context, at: int, preparation: int) -> LinkedChunk:
    """Returns the chunk of a context at a position of a prompt."""
    recompute, blend, query = context.recompute, context.blend, context.query
    if at == 0 and not context.before:
        recompute, blend, query = (), 0, 0  # computed without a prefix, its KV is exact here
    elif at == 0:
        # The first token of a prompt is an attention sink because of its position.
        recompute = tuple(sorted({0, *recompute}))
    return LinkedChunk(at, len(context.tokens), preparation, recompute, blend, query)


def _parts(text: str, context_of: Callable[[str], Context]) -> Iterator[str | Context]:
    end = 0
    for match in MARK.finditer(text):
        if match.start() > end:
            yield text[end : match.start()]
        yield context_of(match[1])
        end = match.end()
    if end < len(text):
        yield text[end:]
