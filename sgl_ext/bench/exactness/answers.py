"""Whether an answer is the one that stock SGLang gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

ALIKE = 1e-3
"""Logprobs in float32 that differ by no more are the same."""


class Ending(Enum):
    """How a request ended, as its client sees it."""

    DONE = "done"
    ABORTED = "aborted"
    """Aborted by its id; the tokens sent before are kept."""
    LEFT = "left"
    """The client closed the connection."""
    REFUSED = "refused"
    """An error, in JSON or as the status."""
    CUT = "cut"
    """The connection ended, or there was none."""
    HUNG = "hung"
    """It had not ended by its deadline."""


@dataclass(frozen=True)
class Answer:
    """Greedy tokens and their logprobs.

    Attributes:
        gaps: by how much each token's logprob is above the second best's.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    gaps: Sequence[float] = ()


@dataclass
class Found:
    """The outcome of a request.

    Attributes:
        answers: of each of its ``n``, as far as it came.
        whole: which of them were ended by the server and not by an abort.
        said: the error.
    """

    ending: Ending = Ending.DONE
    answers: dict[int, Answer] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    ids: dict[int, str] = field(default_factory=dict)
    said: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Difference:
    """The first one between an answer and what stock gives.

    Attributes:
        number: of the answer, among ``n``.
        at: token of the answer.
        gap: between stock's best and second best there.
    """

    number: int
    at: int
    what: str
    gap: float | None = None


def compare(expected: Answer, found: Found, n: int, *, logprobs: bool) -> Difference | None:
    """The first difference, None if there is none.

    Answers that were given up are compared as far as they came.
    """
    if found.ending is Ending.DONE and len(found.answers) != n:
        return Difference(0, 0, f"{len(found.answers)} answers, not {n}")
    for number, answer in sorted(found.answers.items()):
        for at, (ours, right) in enumerate(zip(answer.tokens, expected.tokens, strict=False)):
            if ours != right:
                gap = expected.gaps[at] if at < len(expected.gaps) else None
                return Difference(number, at, f"token {ours}, not {right}", gap)
        count, right_count = len(answer.tokens), len(expected.tokens)
        if count > right_count or (number in found.whole and count < right_count):
            return Difference(number, count, f"{count} tokens, not {right_count}")
        if logprobs and (difference := _logprobs(number, answer, expected)):
            return difference
    return None


def _logprobs(number: int, answer: Answer, expected: Answer) -> Difference | None:
    if len(answer.logprobs) != len(answer.tokens):
        what = f"{len(answer.logprobs)} logprobs of {len(answer.tokens)} tokens"
        return Difference(number, len(answer.logprobs), what)
    for at, (ours, right) in enumerate(zip(answer.logprobs, expected.logprobs, strict=False)):
        if not abs(ours - right) <= ALIKE:
            return Difference(number, at, f"logprob {ours:.6f}, not {right:.6f}")
    return None
