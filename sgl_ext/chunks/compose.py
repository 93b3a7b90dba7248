"""Prompts of text and contexts: from what a user writes to what the scheduler is told."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from sgl_ext.chunks.composition import Composition, LinkedChunk
from sgl_ext.chunks.contexts import Context
from sgl_ext.errors import ExtError

_OPEN, _CLOSE = "\ue0c0", "\ue0c1"
_MARK = re.compile(rf"{_OPEN}(ctx-[\w-]+){_CLOSE}", re.ASCII)
"""Fonts have glyphs for either character, so others write them, too."""
_MOST = 1000

NAMESPACE = "ext:chunk"
"""SGLang's ``extra_key`` of the chunks themselves."""


def mark(id_: str) -> str:
    """What stands for a context within text, where text is all that gets through.

    Private-use characters: a template leaves them alone. Whoever writes them by hand gets what
    the id would get them anyway.
    """
    return f"{_OPEN}{id_}{_CLOSE}"


def ids_in(text: str) -> list[str]:
    """Of all contexts that are named in ``text``."""
    return _MARK.findall(text)


def marked(text: str) -> bool:
    """Whether any context is named in ``text``."""
    return _MARK.search(text) is not None


@dataclass(frozen=True)
class Prompt:
    """A prompt as SGLang takes it."""

    tokens: list[int]
    composition: Composition | None
    """None if nothing of it is linked."""


def compose(
    text: str,
    *,
    context_of: Callable[[str], Context],
    tokenize: Callable[[str, bool], Sequence[int]],
    longest: int,
) -> Prompt:
    """The prompt that ``text`` with its marks stands for.

    Text between contexts is tokenised by itself, as the contexts were.

    Args:
        context_of: the context of an id; raises where there is none.
        tokenize: token ids of a text, and whether it begins the prompt.
        longest: tokens of a prompt, at most.

    Raises:
        ExtError: it is longer. A mark is short, and what it stands for may be long.
    """
    tokens: list[int] = []
    chunks: list[LinkedChunk] = []
    preparations: dict[tuple[int, ...], int] = {}
    methods: dict[str, None] = {}
    for part in _parts(text, context_of):
        if len(chunks) > _MOST:
            raise ExtError(f"the prompt names more than {_MOST} contexts; make larger ones")
        if len(tokens) > longest:
            raise ExtError(
                f"with its contexts the prompt has more than the {longest} tokens that "
                "the model takes; name fewer"
            )
        if isinstance(part, str):
            tokens += tokenize(part, not tokens)
            continue
        if not tokens:
            tokens += tokenize("", True)
        recompute, blend = part.recompute, part.blend
        if not tokens and not part.before:
            recompute, blend = (), 0  # computed behind nothing, it is exact here
        elif not tokens:
            # All attend to a prompt's first token, for nothing but that it is the first.
            recompute = tuple(sorted({0, *recompute}))
        chunks.append(
            LinkedChunk(
                at=len(tokens),
                length=len(part.tokens),
                preparation=preparations.setdefault(part.before, len(preparations)),
                recompute=recompute,
                blend=blend,
            )
        )
        methods[part.method] = None
        tokens += part.tokens
    if not chunks:
        return Prompt(tokens, None)
    if (last := chunks[-1]).at + last.length == len(tokens):
        # The answer follows from the last token's logits, which no KV has.
        again = tuple(sorted({*last.recompute, last.length - 1}))
        chunks[-1] = msgspec.structs.replace(last, recompute=again)
    composition = Composition("/".join(methods), NAMESPACE, tuple(preparations), tuple(chunks))
    return Prompt(tokens, composition)


def _parts(text: str, context_of: Callable[[str], Context]) -> Iterator[str | Context]:
    end = 0
    for match in _MARK.finditer(text):
        if match.start() > end:
            yield text[end : match.start()]
        yield context_of(match[1])
        end = match.end()
    if end < len(text):
        yield text[end:]
