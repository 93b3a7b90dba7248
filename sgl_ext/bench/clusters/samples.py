"""Contexts of real text that a server has read, and what is asked of them that it has not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import requests
from numpy.typing import NDArray

from sgl_ext.bench.data.needles import essays
from sgl_ext.bench.data.questions import QuestionSet, questions
from sgl_ext.bench.harness.server import BESIDE_OTHERS, System
from sgl_ext.clusters.activations import attention_mass, log_sum
from sgl_ext.clusters.placement import Blocks
from sgl_ext.clusters.profile import Options, Profile
from sgl_ext.clusters.recorded import Recorded
from sgl_ext.errors import ExtError

_DEADLINE_S = 900.0
_ESSAY_SKIPPED = 20_000
"""Characters, so that an essay does not begin the text of which another is the end."""

Task = Literal["questions", "continuation"]


class Sample(NamedTuple):
    """A context, and a text that follows it."""

    name: str
    task: Task
    context: tuple[int, ...]
    """Token ids."""
    unseen: tuple[int, ...]
    """Of questions with their answers, or of how the text goes on."""


def samples(model: Path, lengths: Sequence[int], unseen: int) -> list[Sample]:
    """One of each length: documents and questions, and at last an essay.

    Args:
        model: whose tokenizer makes the tokens.
        lengths: tokens of the contexts.
        unseen: tokens that follow each.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    sets: list[QuestionSet] = ["hotpotqa", "musique"]
    found = []
    for at, length in enumerate(lengths[:-1] or lengths):
        of = sets[at % len(sets)]
        context, asked = _documents(of, encode, length, unseen, skip=at // len(sets))
        found.append(Sample(f"{of}/{at}", "questions", context, asked))
    if len(lengths) > 1:
        text = encode(essays()[_ESSAY_SKIPPED : _ESSAY_SKIPPED + 8 * (lengths[-1] + unseen)])
        end = lengths[-1]
        found.append(Sample("essays", "continuation", (*text[:end],), (*text[end : end + unseen],)))
    return found


def _documents(
    of: QuestionSet, encode: Callable[[str], list[int]], length: int, unseen: int, skip: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Documents of questions one after the other, and questions whose gold ones are among them."""
    tokens: list[int] = []
    asked: list[list[int]] = []
    for question in questions(of)[100 * skip :]:
        gold = [each for each in question.documents if each.gold]
        more = [token for each in gold for token in encode(str(each))]
        if len(tokens) + len(more) > length:
            tokens += more[: length - len(tokens)]
            break
        tokens += more
        asked.append(encode(f"\n\nQuestion: {question.question}\nAnswer: {question.answers[0]}"))
    # Those that were read first are asked of as well as those that were read last.
    spread = [*chain.from_iterable(asked[::2]), *chain.from_iterable(asked[1::2])]
    if len(tokens) < length or len(spread) < unseen:
        raise ExtError(f"{of} has too few documents for a context of {length} tokens")
    return (*tokens,), (*spread[:unseen],)


def stored_system(
    name: str, place: Path, devices: int, pool: int, section: Mapping[str, Any]
) -> System:
    """A server that stores contexts in as many new directories.

    Args:
        section: of the configuration, but for the directories.
    """
    places = [place / f"device{at}" for at in range(devices)]
    for each in places:
        each.mkdir(parents=True)
    config = {"clusters": {"directories": [*map(str, places)], **section}}
    arguments = (
        "--max-total-tokens", str(pool), *BESIDE_OTHERS,
        "--enable-ext", "--ext-config", json.dumps(config),
    )  # fmt: skip
    return System(name, arguments)


def record(url: str, tokens: Sequence[int]) -> Recorded:
    """What the server at ``url`` has written down of a context.

    Raises:
        ExtError: it did not.
    """
    answer = requests.post(
        f"{url}/ext/stored_contexts",
        json={"input_ids": [*tokens], "record_only": True},
        timeout=_DEADLINE_S,
    )
    if not answer.ok:
        raise ExtError(f"{url} did not record a context: {answer.text[:300]}")
    path = Path(answer.json()["record"])
    try:
        return Recorded.load(path)
    finally:
        path.unlink()


@dataclass(frozen=True)
class Observed:
    """A sample as the model has read it.

    Attributes:
        profile: of the context, with the queries that it is stored by.
        asked: of the context and what follows it.
    """

    sample: Sample
    profile: Recorded
    asked: Recorded

    @classmethod
    def by(cls, url: str, sample: Sample) -> Observed:
        """The model of a server reads it."""
        profile = record(url, sample.context)
        return cls(sample, profile, record(url, [*sample.context, *sample.unseen]))

    @cached_property
    def block(self) -> int:
        """Entries that are stored together."""
        return Blocks.fitting(self.profile.geometry.entry_bytes)

    @property
    def unseen(self) -> slice:
        """Where the queries of the unseen text are among those asked; general ones come behind."""
        first = int(np.argmax(self.asked.seen > len(self.sample.context)))
        return slice(first, first + len(self.sample.unseen))

    def layers(self, numbers: Sequence[int], block: int | None = None) -> Iterator[Layer]:
        """What is asked of some layers.

        Args:
            block: entries that are stored together, if not as many as fit into a sector.
        """
        block = block or self.block
        options = Options().fitted(len(self.sample.context), block)
        for number in numbers:
            yield self._layer(number, options, block)

    def _layer(self, number: int, options: Options, block: int) -> Layer:
        tokens, unseen = len(self.sample.context), len(self.sample.unseen)
        keys, scale = self.asked.keys(number), self.asked.geometry.scale
        queries = self.asked.queries[number, self.unseen]
        sinks, end = options.sinks, tokens - options.window
        resident = np.concatenate([keys[:sinks], keys[end:]])
        seen = sinks + options.window + np.arange(1, unseen + 1)
        beside = log_sum(queries, resident, scale, seen)
        profile = Profile.of(self.profile, number, options, block)
        return Layer(number, block, keys[sinks:end], queries, beside, scale, profile)


@dataclass(frozen=True)
class Layer:
    """What is asked of a layer's middle.

    Attributes:
        block: entries that are stored together.
        keys: ``[entries, kv_heads, head_dim]``.
        queries: ``[queries, heads, head_dim]`` of the unseen text.
        beside: ``[queries, heads]`` logarithm of the exponentials' sum over what is always in
            memory.
        scale: of logits.
        profile: from the context alone.
    """

    number: int
    block: int
    keys: NDArray[np.float32]
    queries: NDArray[np.float32]
    beside: NDArray[np.float32]
    scale: float
    profile: Profile

    def only(self, some: slice) -> Layer:
        """For some of the queries."""
        return replace(self, queries=self.queries[some], beside=self.beside[some])

    @cached_property
    def mass(self) -> NDArray[np.float32]:
        """``[queries, entries]``: the attention that the unseen text pays."""
        return attention_mass(self.queries, self.keys, self.scale, self.beside)

    @cached_property
    def best(self) -> NDArray[np.float64]:
        """``[queries, entries]``: the attention to the best one, the best two, and so on."""
        return np.cumsum(-np.sort(-self.mass, axis=1), axis=1, dtype=np.float64)
