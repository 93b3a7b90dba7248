"""Contexts of real text, texts that follow them, and records of their keys and queries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import requests
from numpy.typing import NDArray

from sgl_ext.bench.data.needles import essays
from sgl_ext.bench.data.questions import QuestionSet, questions
from sgl_ext.clusters.activations import attention_mass, log_sum
from sgl_ext.clusters.placement import Blocks
from sgl_ext.clusters.profile import Options, Profile
from sgl_ext.clusters.recorded import Recorded, RecordedLayer
from sgl_ext.clusters.records import remove_record
from sgl_ext.errors import ExtError
from sgl_ext.serving.server import BESIDE_OTHERS, System, extension

_DEADLINE_S = 900.0
_ESSAY_SKIPPED = 20_000
"""Characters that are skipped, so that the text is not the end of one essay and the start of
another."""

Task = Literal["questions", "continuation"]


class Sample(NamedTuple):
    """Context with a text that follows it."""

    name: str
    task: Task
    context: tuple[int, ...]
    """Token ids of the context."""
    unseen: tuple[int, ...]
    """Token ids of questions with their answers, or of the continuation of the text."""


def samples(model: Path, lengths: Sequence[int], unseen: int) -> list[Sample]:
    """Returns one sample of each length: documents with questions, and an essay as the last one.

    A single length gives documents with questions.

    Args:
        model: directory of the model whose tokenizer is used.
        lengths: number of tokens of each context.
        unseen: number of tokens that follow each context.

    Raises:
        ExtError: a question set has too few documents or questions.
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
        found.append(essay(model, lengths[-1], unseen))
    return found


def essay(model: Path, length: int, unseen: int) -> Sample:
    """Returns a sample of essays.

    Args:
        model: directory of the model whose tokenizer is used.
        length: number of tokens of the context.
        unseen: number of tokens that follow it.
    """
    from transformers import AutoTokenizer

    end = length + unseen
    text = essays()[_ESSAY_SKIPPED : _ESSAY_SKIPPED + 8 * end]
    tokens = AutoTokenizer.from_pretrained(model).encode(text, add_special_tokens=False)
    return Sample("essays", "continuation", (*tokens[:length],), (*tokens[length:end],))


def code(model: Path, length: int, unseen: int) -> Sample:
    """Returns a sample of program text: modules of Python's standard library.

    Args:
        model: directory of the model whose tokenizer is used.
        length: number of tokens of the context.
        unseen: number of tokens that follow it.

    Raises:
        ExtError: the modules are too short.
    """
    from transformers import AutoTokenizer

    folder = Path(asyncio.__file__).parent
    text = "\n\n".join(path.read_text() for path in sorted(folder.glob("*_*.py")))
    tokens = AutoTokenizer.from_pretrained(model).encode(text, add_special_tokens=False)
    if len(tokens) < (end := length + unseen):
        raise ExtError(f"the modules of asyncio have {len(tokens)} tokens, {end} are needed")
    return Sample("code", "continuation", (*tokens[:length],), (*tokens[length:end],))


def _documents(
    of: QuestionSet, encode: Callable[[str], list[int]], length: int, unseen: int, skip: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns a context of gold documents, and questions about them, as token ids.

    Args:
        length: number of tokens of the context.
        unseen: number of tokens of the questions with their answers.
        skip: number of questions of the set that are skipped, in hundreds.
    """
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
    # The first ``unseen`` tokens have questions about early documents and about late ones.
    spread = [*chain.from_iterable(asked[::2]), *chain.from_iterable(asked[1::2])]
    if len(tokens) < length or len(spread) < unseen:
        raise ExtError(f"{of} has too few documents or questions for a context of {length} tokens")
    return (*tokens,), (*spread[:unseen],)


def stored_system(
    name: str, place: Path, devices: int, pool: int, section: Mapping[str, Any], *more: str
) -> System:
    """Returns a system that stores contexts in new directories, one for each device.

    Args:
        place: folder of the directories.
        devices: number of directories.
        pool: tokens that the KV pool of the server holds.
        section: section ``clusters`` of the configuration, without ``directories``.
        more: further arguments of the server.
    """
    places = device_directories(place, devices)
    for each in places:
        each.mkdir(parents=True)
    config = {"clusters": {"directories": [*map(str, places)], **section}}
    arguments = (
        "--max-total-tokens", str(pool), *BESIDE_OTHERS,
        *extension(config), *more,
    )  # fmt: skip
    return System(name, arguments)


def device_directories(place: Path, devices: int) -> list[Path]:
    """Returns the directories of :func:`stored_system`, one for each device."""
    return [place / f"device{at}" for at in range(devices)]


def record(url: str, tokens: Sequence[int]) -> Recorded:
    """Has the server at ``url`` record a context, loads the record and removes its folder.

    Raises:
        ExtError: the server did not record the context, or the record cannot be loaded.
    """
    answer = requests.post(
        f"{url}/ext/clusters",
        json={"input_ids": [*tokens], "record_only": True},
        timeout=_DEADLINE_S,
    )
    if not answer.ok:
        raise ExtError(f"{url} did not record a context: {answer.text[:300]}")
    path = Path(answer.json()["record"])
    try:
        found = Recorded.load(path)
        return replace(found, kv=found.kv[:])
    finally:
        remove_record(path)


@dataclass(frozen=True)
class Observed:
    """Sample with the keys and queries that a model has computed for it.

    Attributes:
        profile: record of the context alone, with the queries that profile it.
        asked: record of the context and the unseen text.
    """

    sample: Sample
    profile: Recorded
    asked: Recorded

    @classmethod
    def by(cls, url: str, sample: Sample) -> Observed:
        """Records a sample on the server at ``url``."""
        profile = record(url, sample.context)
        return cls(sample, profile, record(url, [*sample.context, *sample.unseen]))

    @property
    def unseen(self) -> slice:
        """Range of the unseen text's queries in ``asked``. Queries of general questions follow."""
        first = int(np.argmax(self.asked.seen > len(self.sample.context)))
        return slice(first, first + len(self.sample.unseen))

    def layer(self, number: int, head: int | None = None) -> Layer:
        """Returns the keys and queries of a layer, or those of one of its KV heads."""
        profile, asked = (_recorded(each, number, head) for each in (self.profile, self.asked))
        block = Blocks.fitting(profile.geometry.entry_bytes)
        options = Options().fitted(len(self.sample.context), block)
        tokens, unseen = len(self.sample.context), len(self.sample.unseen)
        keys, scale = asked.keys, asked.geometry.scale
        queries = asked.queries[self.unseen]
        sinks, end = options.sinks, tokens - options.window
        resident = np.concatenate([keys[:sinks], keys[end:]])
        seen = sinks + options.window + np.arange(1, unseen + 1)
        beside = log_sum(queries, resident, scale, seen)
        found = Profile.of(profile, options, block)
        return Layer(number, block, keys[sinks:end], queries, beside, scale, found)


def _recorded(record: Recorded, number: int, head: int | None) -> RecordedLayer:
    """Returns a layer of a record, or one of its KV heads with the heads that share it."""
    layer, geometry = record.layer(number), record.geometry
    if head is None:
        return layer
    group = geometry.heads // geometry.kv_heads
    kv = layer.kv.reshape(len(layer.kv), 2, geometry.kv_heads, -1)[:, :, head]
    return RecordedLayer(
        msgspec.structs.replace(geometry, heads=group, kv_heads=1),
        number,
        np.ascontiguousarray(kv).reshape(len(kv), -1),
        layer.queries[:, head * group : (head + 1) * group],
        layer.seen,
    )


@dataclass(frozen=True)
class Layer:
    """Entries of one layer between sinks and window, and queries that attend to them.

    Attributes:
        number: number of the layer.
        block: number of entries that are stored together.
        keys: keys of the entries, ``[entries, kv_heads, head_dim]``.
        queries: queries of the unseen text, ``[queries, heads, head_dim]``.
        beside: logarithm of the sum of the exponentials of the logits of all tokens that are
            always in memory, ``[queries, heads]``.
        scale: scale of the logits.
        profile: profile of the layer, computed from the context alone.
    """

    number: int
    block: int
    keys: NDArray[np.float32]
    queries: NDArray[np.float32]
    beside: NDArray[np.float32]
    scale: float
    profile: Profile

    @cached_property
    def mass(self) -> NDArray[np.float32]:
        """Attention of each query to each entry, summed over heads, ``[queries, entries]``."""
        return attention_mass(self.queries, self.keys, self.scale, self.beside)

    @cached_property
    def best(self) -> NDArray[np.float64]:
        """Attention of each query to its best entry, its best two, etc., ``[queries, entries]``."""
        return np.cumsum(-np.sort(-self.mass, axis=1), axis=1, dtype=np.float64)
