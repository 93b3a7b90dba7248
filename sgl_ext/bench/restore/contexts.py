"""Long contexts of real conversations and of recorded coding agents, and what comes after them."""

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
"""Behind a context: what the user says next."""


@dataclass(frozen=True)
class Context:
    """A prompt, most of which was computed before."""

    name: str
    tokens: Sequence[int]
    """The context, and :data:`NEW_TOKENS` more."""

    @property
    def length(self) -> int:
        """Tokens of the context."""
        return len(self.tokens) - NEW_TOKENS

    @property
    def heard(self) -> list[int]:
        """The context: what tiers are given beforehand."""
        return [*self.tokens[: self.length]]


def texts(model: Path) -> Iterator[tuple[str, list[int]]]:
    """Names and tokens of conversations and agents' sessions, every fourth one of the latter."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    agents = _agents()
    for number, turns in enumerate(sharegpt_whole_conversations()):
        if number % 3 == 2 and (session := next(agents, None)) is not None:
            yield f"agent/{number}", _encode(tokenizer, session)
        yield f"sharegpt/{number}", _encode(tokenizer, "\n".join(turns))


def of_lengths(model: Path, lengths: Sequence[int]) -> list[Context]:
    """One context of each length, no two of the same text.

    Raises:
        ExtError: the data sets have none that is long enough.
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
    raise ExtError(f"no conversations are left with {[length for _, length in left]} tokens")


def mixed_lengths(count: int, least: int, most: int, seed: int) -> list[int]:
    """Lengths as they come in use: many short ones, few long ones (log-uniform)."""
    choose = random.Random(f"lengths/{seed}")  # noqa: S311
    return [round(least * (most / least) ** choose.random()) for _ in range(count)]


def _encode(tokenizer: Any, text: str) -> list[int]:
    # What is longer than any prompt is not tokenised in vain.
    tokens: list[int] = tokenizer(text[:60_000])["input_ids"]
    return tokens


def _agents() -> Iterator[str]:
    """What agents were sent in each step, without the instructions that all steps share."""
    sessions = (
        [json.loads(line) for line in fetch(file).read_text(encoding="utf-8").splitlines()]
        for file in AGENTS
    )
    for step in chain.from_iterable(sessions):
        messages = [each for each in step["messages"] if each["role"] != "system"]
        yield f"step {step['seq']}\n" + "\n".join(json.dumps(each) for each in messages)
