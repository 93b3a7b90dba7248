"""Texts of an exactness run: conversations, prompts with contexts, followers of stored contexts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sgl_ext.bench.clusters.answers import follows, store
from sgl_ext.bench.data.texts import sharegpt_prompts
from sgl_ext.bench.exactness.clients import Stock
from sgl_ext.bench.exactness.script import Ask, Material
from sgl_ext.bench.swap.load import talks
from sgl_ext.client import ContextCache, part

_TALKS = 32
_LONGEST = 900
"""Maximum tokens of a conversation with its answers; three answers at once fit the pool."""
_LONGEST_ANSWER = 256
"""Maximum new tokens of a turn; short answers allow more requests."""
_ANSWER = 24
_CHARACTERS = (1500, 4000)
_CONTEXTS, _STORED, _QUESTIONS = 4, 2, 4
_CUT = 1300
"""Maximum characters of a context, about 300 tokens."""
_STORED_TOKENS = 700


@dataclass(frozen=True)
class Prompt:
    """Prompt of a request, and the equivalent prompt for stock SGLang.

    Attributes:
        ids: token ids for stock SGLang.
        body: ``input_ids`` or ``text``, and ``custom_params`` of a follower.
        answer: number of new tokens.
    """

    ids: tuple[int, ...]
    body: Mapping[str, Any]
    answer: int


class Texts:
    """Prompts that are drawn from one seed."""

    def __init__(self, model: Path, seed: int, *, chunks: bool, clusters: bool) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)

        def encode(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        self._encode = encode
        self._talks = [
            tuple(replace(turn, answer=min(turn.answer, _LONGEST_ANSWER)) for turn in talk.turns)
            for talk in talks(model, _TALKS, longest=_LONGEST, pause=1, seed=seed)
        ]
        texts = sharegpt_prompts(_CONTEXTS + _STORED + _QUESTIONS, characters=_CHARACTERS)
        self._contexts = [text[:_CUT] for text in texts[:_CONTEXTS]]
        self._stored = [
            encode(text)[:_STORED_TOKENS] for text in texts[_CONTEXTS : _CONTEXTS + _STORED]
        ]
        self._questions = [text[:120] for text in texts[_CONTEXTS + _STORED :]]
        pairs = itertools.permutations(range(_CONTEXTS), 2)
        self._linked = list(itertools.product(pairs, range(2))) if chunks else []
        both = itertools.product(range(_STORED), range(_QUESTIONS))
        self._followers = list(both) if clusters else []
        self._ids: Sequence[str] = ()
        self._stored_ids: Sequence[str] = ()

    @property
    def material(self) -> Material:
        """Sizes of the material, for the script."""
        return Material(
            [len(turns) for turns in self._talks], len(self._linked), len(self._followers)
        )

    def create(self, url: str) -> None:
        """Creates the linked contexts on a server, and the stored contexts if there are none yet.

        Raises:
            ExtError: the server refuses.
        """
        if self._linked:
            contexts = ContextCache(url).create(self._contexts, method="full")
            self._ids = [context.id for context in contexts]
        if self._followers and not self._stored_ids:
            self._stored_ids = [store(url, context) for context in self._stored]

    async def prompt(self, ask: Ask, stock: Stock) -> Prompt:
        """Returns the prompt of a request, with stock SGLang's answers to earlier turns.

        Raises:
            ExtError: stock SGLang does not answer an earlier turn.
        """
        if ask.kind == "linked":
            pair, question = self._linked[ask.talk]
            texts = ["Read this. ", *(self._contexts[at] for at in pair), self._questions[question]]
            ids = tuple(token for text in texts for token in self._encode(text))
            named = [part(self._ids[at]) for at in pair]
            return Prompt(ids, {"text": [texts[0], *named, texts[-1]]}, _ANSWER)
        if ask.kind == "follower":
            context, question = self._followers[ask.talk]
            ids = self._encode(f"\n\n{self._questions[question]}")
            custom = follows(self._stored_ids[context], 1.0)
            body = {"input_ids": ids, "custom_params": custom}
            return Prompt((*self._stored[context], *ids), body, _ANSWER)
        tokens: list[int] = []
        for turn in self._talks[ask.talk][: ask.turn]:
            tokens += turn.said
            tokens += (await stock.answer(tokens, turn.answer)).tokens
        last = self._talks[ask.talk][ask.turn]
        tokens += last.said
        return Prompt(tuple(tokens), {"input_ids": tokens}, last.answer)
