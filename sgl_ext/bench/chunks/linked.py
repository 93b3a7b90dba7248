"""Prompts of chunks as a server with contexts is asked them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import requests
from prometheus_client.parser import text_string_to_metric_families

from sgl_ext.bench.chunks.prompts import Prompt, Template, document_prompts
from sgl_ext.bench.data.questions import Question, QuestionSet, questions
from sgl_ext.bench.harness import server
from sgl_ext.chunks.compose import mark
from sgl_ext.chunks.methods import BLEND_LAYERS, PASSAGES
from sgl_ext.client import ContextCache
from sgl_ext.config import Chunks
from sgl_ext.errors import ExtError

PAGE = 16
_ARGUMENTS = ("--page-size", str(PAGE), "--enable-metrics")
_EXTENSION = ("--enable-ext", "--ext-config", '{"chunks": {}}')
DEFAULT = Chunks().method
EXACT = ("--dtype", "float32")
"""Arguments of servers whose answers differ by what is linked, not by rounding."""
_DEADLINE_S = 600.0

Ids = Mapping[tuple[int, ...], str]
"""Of contexts, by their tokens."""


_STOCK_POOL = 65_536
"""Tokens: 16 of the longest prompts but one."""


def systems(pool: int, *arguments: str) -> list[server.System]:
    """SGLang with its radix cache, and with chunks.

    Args:
        pool: tokens that the KV of the server with chunks holds, by each method; the other one
            never finds more than a first chunk again.
        arguments: more of them, for both.
    """

    def sized(tokens: int) -> tuple[str, ...]:
        return ("--max-total-tokens", str(tokens), *_ARGUMENTS, *arguments)

    return [
        server.System("stock", sized(min(pool, _STOCK_POOL))),
        server.System("chunks", (*sized(pool), *_EXTENSION)),
    ]


def asked(of: QuestionSet) -> list[Question]:
    """What prompts are made of: all of a set but the last, whose documents prime contexts."""
    return questions(of)[:-1]


class Contexts:
    """The contexts of a server, created as those of a corpus are: behind the same few passages.

    Args:
        template: whose prefix the prompts have.
    """

    def __init__(self, url: str, template: Template) -> None:
        self._cache = ContextCache(url)
        # A server primes chunks with the first ones of those that are created together.
        last = document_prompts(template, questions("hotpotqa")[-1:], 1)[0]
        self.token_bytes = 0
        """Of a token's KV; known when contexts have been created."""
        self._passages = sorted(last.chunks)[:PASSAGES]

    def create(self, prompt: Prompt, method: str) -> Ids:
        """Contexts of a prompt's chunks, which serve for their other orders, too."""
        chunks = sorted(prompt.chunks)
        together = [*self._passages, *chunks]
        created = self._cache.create(together, method=method, prefix=prompt.prefix)
        self.token_bytes = created[0].bytes // created[0].tokens
        return {
            chunk: context.id
            for chunk, context in zip(chunks, created[len(self._passages) :], strict=True)
        }


def text_of(prompt: Prompt, ids: Ids) -> str:
    """What ``/generate`` is asked."""
    return "".join([prompt.prefix, *(mark(ids[chunk]) for chunk in prompt.chunks), prompt.question])


def computed_share(meta: Mapping[str, Any], tokens: int, layers: int) -> float:
    """Of the KV of a prompt of ``tokens``, by tokens and layers, what was computed for it."""
    (entry,) = (entry for entry in meta["ext"] if entry["power"] == "chunks")
    computed: int = tokens - entry["linked"] - entry["prefix"]
    if entry["method"].startswith("blend-"):
        # The first layers are computed of all that is linked, to see where values differ.
        linked: int = entry["linked"]
        return (computed + BLEND_LAYERS / layers * linked) / tokens
    return computed / tokens


@contextmanager
def nothing_missing(url: str) -> Iterator[None]:
    """Within it every chunk that the server links is there.

    Raises:
        ExtError: one was not, so that what was measured is not linking; or the server does not
            say.
    """
    before = _missing(url)
    yield
    if gone := _missing(url) - before:
        raise ExtError(f"{gone:.0f} tokens of chunks had no KV: the server's pool is too small")


def _missing(url: str) -> float:
    """Tokens of chunks that a server has computed so far because it had no KV of them."""
    try:
        text = requests.get(f"{url}/metrics", timeout=_DEADLINE_S).text
    except requests.RequestException as error:
        raise ExtError(f"{url} does not tell its metrics: {error}") from None
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "sglang_ext:chunks_missing_tokens_total"
    )


def generate(
    url: str, prompt: str | Sequence[int], tokens: int, stop: str | None = None
) -> tuple[str, dict[str, Any]]:
    """The text that a server goes on with, greedily, and the answer's ``meta_info``.

    Args:
        tokens: of the answer, at most.
        stop: it ends before this text, too.

    Raises:
        ExtError: the server does not answer or refuses.
    """
    body = {
        "text" if isinstance(prompt, str) else "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "stop": stop},
    }
    try:
        answer = requests.post(f"{url}/generate", json=body, timeout=_DEADLINE_S)
        answer.raise_for_status()
    except requests.RequestException as error:
        raise ExtError(f"{url} did not answer: {error}") from None
    found = answer.json()
    return found["text"], found["meta_info"]
