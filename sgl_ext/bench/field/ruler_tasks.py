"""Tasks like those of RULER (Hsieh et al., 2024): facts that are hidden in a text, and a question.

``single``, ``multi-key`` and ``multi-value`` are RULER's needles in a haystack, ``variables`` is
its variable tracking, in RULER's words.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from string import ascii_uppercase
from typing import Literal, get_args

from sgl_ext.errors import ExtError

Kind = Literal["single", "multi-key", "multi-value", "variables"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_ADJECTIVES = (
    "amber", "brave", "calm", "dusty", "eager", "faint", "gentle", "hollow", "icy", "jolly", "keen",
    "lucky", "mellow", "narrow", "odd", "proud",
)  # fmt: skip
_NOUNS = (
    "anchor", "basket", "candle", "desert", "engine", "feather", "garden", "harbor", "island",
    "jacket", "kettle", "ladder", "meadow", "needle", "orchard", "pocket",
)  # fmt: skip
_KEYS = tuple(f"{adjective}-{noun}" for adjective in _ADJECTIVES for noun in _NOUNS)
_NEEDLES = 4
"""Needles of ``multi-key`` and ``multi-value``, as in RULER."""
_HOPS = 4
"""Assignments from one variable to the next, as in RULER."""


@dataclass(frozen=True)
class Task:
    """Facts and a question about them.

    Attributes:
        name: name of the kind and number of the task.
        facts: sentences to hide in a text, in this order.
        question: question about the text.
        begin: begin of the answer, which is part of the prompt.
        answers: all values that the answer has to name.
    """

    name: str
    facts: tuple[str, ...]
    question: str
    begin: str
    answers: tuple[str, ...]


def task(kind: Kind, number: int) -> Task:
    """Returns the task of a kind with this number."""
    name = f"ruler/{kind}/{number}"
    chance = random.Random(name)  # noqa: S311
    if kind == "variables":
        return _variables(name, chance)
    keys = chance.sample(_KEYS, _NEEDLES if kind == "multi-key" else 1)
    values = _numbers(chance, 7, 1 if kind == "single" else _NEEDLES)
    facts = tuple(
        f"One of the special magic numbers for {key} is: {value}."
        for key, value in zip(keys * (len(values) // len(keys)), values, strict=True)
    )
    if kind == "multi-value":
        what = f"special magic numbers for {keys[0]} mentioned in the provided text are"
        question = f"What are all the {what.removesuffix(' are')}?"
        return Task(name, facts, question, f"The {what}", tuple(values))
    asked = chance.randrange(len(keys))
    what = f"special magic number for {keys[asked]} mentioned in the provided text is"
    question = f"What is the {what.removesuffix(' is')}?"
    return Task(name, facts, question, f"The {what}", (values[asked],))


def score(text: str, answers: Sequence[str]) -> float:
    """Returns the share of ``answers`` that a text contains (RULER's ``string_match_all``)."""
    return sum(each.lower() in text.lower() for each in answers) / len(answers)


def chunks_of(facts: int, chunks: int, chance: random.Random) -> list[int]:
    """Returns the number of the random chunk of each fact, such that facts keep their order."""
    return sorted(chance.randrange(chunks) for _ in range(facts))


def hidden(
    sentences: Iterable[Sequence[int]],
    facts: Sequence[Sequence[int]],
    size: int,
    chance: random.Random,
) -> list[int]:
    """Returns the first sentences with the facts between them, as token ids.

    Args:
        sentences: token ids of each sentence of a text.
        facts: token ids of each fact, which keep their order.
        size: maximum number of tokens.

    Raises:
        ExtError: the facts alone are longer than ``size``.
    """
    room = size - sum(map(len, facts))
    if room < 0:
        raise ExtError(f"a chunk of {size} tokens is too small for its facts; ask for longer ones")
    kept: list[Sequence[int]] = []
    for sentence in sentences:
        if (room := room - len(sentence)) < 0:
            break
        kept.append(sentence)
    places = sorted(chance.randint(0, len(kept)) for _ in facts)
    for fact, place in reversed([*zip(facts, places, strict=True)]):
        kept.insert(place, fact)
    return [token for piece in kept for token in piece]


def _variables(name: str, chance: random.Random) -> Task:
    (value,) = _numbers(chance, 5, 1)
    names = ["".join(chance.sample(ascii_uppercase, 5)) for _ in range(_HOPS + 1)]
    facts = [f"VAR {names[0]} = {value}."]
    facts += [f"VAR {after} = VAR {before}." for before, after in pairwise(names)]
    question = f"Find all variables that are assigned the value {value} in the text above."
    begin = (
        "According to the chain(s) of variable assignment in the text above, "
        f"{len(names)} variables are assigned the value {value}, they are:"
    )
    return Task(name, tuple(facts), question, begin, tuple(names))


def _numbers(chance: random.Random, digits: int, count: int) -> list[str]:
    return [str(each) for each in chance.sample(range(10 ** (digits - 1), 10**digits), count)]
