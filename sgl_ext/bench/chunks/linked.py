"""Servers of the chunk benchmarks, their contexts, and requests with linked prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

from sgl_ext.bench.chunks.prompts import Prompt, Template, document_prompts
from sgl_ext.bench.data.questions import SETS, Question, QuestionSet, questions
from sgl_ext.bench.harness.metrics import samples
from sgl_ext.chunks.methods import BLEND_LAYERS, PASSAGES
from sgl_ext.client import ContextCache
from sgl_ext.config import Chunks
from sgl_ext.errors import ExtError
from sgl_ext.marks import mark
from sgl_ext.serving import server

PAGE = 16
_ARGUMENTS = ("--page-size", str(PAGE), "--enable-metrics")
_EXTENSION = ("--enable-ext", "--ext-config", '{"chunks": {}}')
DEFAULT = Chunks().method
QUERY = "query-15"
EXACT = ("--dtype", "float32")
"""Arguments of servers whose answers should differ because of linking, not of rounding."""
_NOT_LINKED = "sglang_ext:chunks_missing_tokens_total", "sglang_ext:chunks_computed_tokens_total"

Ids = Mapping[tuple[int, ...], str]
"""Ids of contexts, by the token ids of their chunks."""


_STOCK_POOL = 65_536
"""Device pool of the stock server, in tokens: 16 prompts of the second largest length (4,096)."""


def systems(pool: int, *arguments: str) -> list[server.System]:
    """Returns two systems: SGLang with its radix cache, and SGLang that links chunks.

    Args:
        pool: device pool of the system that links chunks, in tokens; it has to hold the KV of the
            chunks for each method. The stock system gets at most ``_STOCK_POOL``, because it never
            finds more than a first chunk again.
        arguments: further arguments of both servers.
    """

    def sized(tokens: int) -> tuple[str, ...]:
        return ("--max-total-tokens", str(tokens), *_ARGUMENTS, *arguments)

    return [
        server.System("stock", sized(min(pool, _STOCK_POOL))),
        server.System("chunks", (*sized(pool), *_EXTENSION)),
    ]


def asked(of: QuestionSet) -> list[Question]:
    """Returns all questions of a set but the last; prompts are made of them.

    The documents of the last question of HotpotQA prime contexts.
    """
    return questions(of)[:-1]


def mixed_questions(template: Template, count: int, *, distractors: int) -> list[Prompt]:
    """Returns prompts with documents, equally many of each set.

    One of each set follows the other, so that an interrupted run has some of each.
    """
    of_sets = [
        document_prompts(template, asked(name), -(-count // len(SETS)), distractors=distractors)
        for name in SETS
    ]
    return [*chain.from_iterable(zip(*of_sets, strict=True))][:count]


class Contexts:
    """Contexts of a server, primed with the same few passages, as the contexts of a corpus are.

    Args:
        url: URL of the server.
        template: template of the prompts.
    """

    def __init__(self, url: str, template: Template) -> None:
        self._cache = ContextCache(url)
        # A server primes chunks with the first chunks of the same creation request.
        last = document_prompts(template, questions("hotpotqa")[-1:], 1)[0]
        self._passages = sorted(last.chunks)[:PASSAGES]

    def create(self, prompt: Prompt, method: str) -> Ids:
        """Creates the contexts of a prompt's chunks, which also serve the prompt's other orders."""
        chunks = sorted(prompt.chunks)
        together = [*self._passages, *chunks]
        created = self._cache.create(together, method=method, prefix=prompt.prefix)
        return {
            chunk: context.id
            for chunk, context in zip(chunks, created[len(self._passages) :], strict=True)
        }


def text_of(prompt: Prompt, ids: Ids) -> str:
    """Returns the text of the prompt's ``/generate`` request, with marks for its contexts."""
    return "".join([prompt.prefix, *(mark(ids[chunk]) for chunk in prompt.chunks), prompt.question])


def computed_share(meta: Mapping[str, Any], tokens: int, layers: int) -> float:
    """Returns the share of a linked prompt's KV that was computed, over tokens and layers.

    Args:
        meta: ``meta_info`` of the answer.
        tokens: tokens of the prompt.
        layers: layers of the model.
    """
    (entry,) = (entry for entry in meta["ext"] if entry["power"] == "chunks")
    computed: int = tokens - entry["linked"] - entry["prefix"]
    if entry["method"].startswith("blend-"):
        # CacheBlend computes the first layers of all linked tokens to find the values that differ.
        linked: int = entry["linked"]
        return (computed + BLEND_LAYERS / layers * linked) / tokens
    return computed / tokens


@contextmanager
def nothing_missing(url: str) -> Iterator[None]:
    """Checks at its end that the server had the KV of every chunk that it linked meanwhile.

    Raises:
        ExtError: the KV of a chunk was missing and was computed, so that the measurement is not one
            of linking; or the server does not report its metrics.
    """
    before = _missing(url)
    yield
    if gone := _missing(url) - before:
        raise ExtError(
            f"{gone:.0f} tokens of chunks were computed instead of linked: the pool is too "
            'small, or its configuration lacks chunks: {"link": "always"}'
        )


def _missing(url: str) -> float:
    """Returns how many tokens of chunks a server has computed instead of linking them."""
    return sum(sample.value for sample in samples(url, *_NOT_LINKED))
