"""Long contexts from real conversations and recorded coding agents, with new tokens after them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from sgl_ext.bench.data.texts import sharegpt_whole_conversations
from sgl_ext.errors import ExtError
from sgl_ext.packages import PackagedFile, fetch

AGENTS = tuple(
    PackagedFile(
        requirement="agentic-swarm-bench==4.0.9",
        member=f"agentic_swarm_bench/scenarios/data/cpp-builds-gemma-4-31b/{name}.jsonl",
        sha256=sha256,
        size=size,
    )
    for name, sha256, size in (
        (
            "cpp-build-firefox",
            "22dba630e68592a09b73e1f1ff2f0c0e72201757b52212b1509068bddcac887b",
            1_872_840,
        ),
        (
            "cpp-vllm-docker-125m",
            "b0584127e6bfc0bd109a0bed546f573b8c20a09a644b132afcb90131d1d79486",
            582_724,
        ),
    )
)
NEW_TOKENS = 32
"""Tokens after a context: the user's next message."""


@dataclass(frozen=True)
class Context:
    """Prompt most of which was computed before."""

    name: str
    tokens: Sequence[int]
    """Token ids of the context and of :data:`NEW_TOKENS` more."""

    @property
    def length(self) -> int:
        """Number of tokens of the context, without the new ones."""
        return len(self.tokens) - NEW_TOKENS

    @property
    def heard(self) -> list[int]:
        """Token ids of the context, whose KV tiers are given beforehand."""
        return [*self.tokens[: self.length]]


def texts(model: Path) -> Iterator[tuple[str, list[int]]]:
    """Yields the names and token ids of conversations and of agents' steps.

    Every fourth text is a step, as long as there are steps.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    agents = _agents()
    for number, turns in enumerate(sharegpt_whole_conversations()):
        if number % 3 == 2 and (session := next(agents, None)) is not None:
            yield f"agent/{number}", _encode(tokenizer, session)
        yield f"sharegpt/{number}", _encode(tokenizer, "\n".join(turns))


def of_lengths(model: Path, lengths: Sequence[int]) -> list[Context]:
    """Returns one context of each length, no two from the same text.

    Raises:
        ExtError: the data sets have too few texts that are long enough.
    """
    left = sorted(enumerate(lengths), key=lambda each: -each[1])
    found: dict[int, Context] = {}
    for name, tokens in texts(model):
        for at, (place, length) in enumerate(left):
            if len(tokens) >= length + NEW_TOKENS:
                found[place] = Context(name, tokens[: length + NEW_TOKENS])
                del left[at]
                break
        if not left:
            return [found[place] for place in range(len(lengths))]
    raise ExtError(f"no texts are left for contexts of {[length for _, length in left]} tokens")


def mixed_lengths(count: int, least: int, most: int, seed: int) -> list[int]:
    """Returns log-uniform lengths in tokens, as in practice: many short ones, few long ones."""
    choose = random.Random(f"lengths/{seed}")  # noqa: S311
    return [round(least * (most / least) ** choose.random()) for _ in range(count)]


def _encode(tokenizer: Any, text: str) -> list[int]:
    # Text beyond the longest prompt need not be tokenized.
    tokens: list[int] = tokenizer(text[:60_000])["input_ids"]
    return tokens


def _agents() -> Iterator[str]:
    """Yields the messages of each step of an agent, without the system messages of all steps."""
    sessions = (
        [json.loads(line) for line in fetch(file).read_text(encoding="utf-8").splitlines()]
        for file in AGENTS
    )
    for step in chain.from_iterable(sessions):
        messages = [each for each in step["messages"] if each["role"] != "system"]
        yield f"step {step['seq']}\n" + "\n".join(json.dumps(each) for each in messages)
