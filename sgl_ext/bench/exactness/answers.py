"""Comparison of an answer with that of stock SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

ALIKE = 1e-3
"""Largest difference at which two float32 logprobs count as equal."""


class Ending(Enum):
    """End of a request, as its client observes it."""

    DONE = "done"
    ABORTED = "aborted"
    """The client aborted it by its id; the tokens received before are kept."""
    LEFT = "left"
    """The client closed the connection."""
    REFUSED = "refused"
    """The server answered with an error, in JSON or as the status."""
    CUT = "cut"
    """The connection broke, or could not be opened."""
    HUNG = "hung"
    """The request did not end within its deadline."""


@dataclass(frozen=True)
class Answer:
    """Greedy tokens and their logprobs.

    Attributes:
        gaps: difference between the logprobs of each token and of the second best.
    """

    tokens: Sequence[int]
    logprobs: Sequence[float]
    gaps: Sequence[float] = ()


@dataclass
class Found:
    """Outcome of a request.

    Attributes:
        answers: answers of the ``n`` of the request by number, as far as they were received.
        whole: numbers of the answers that the server completed without an abort.
        ids: request ids of the answers by number.
        said: error message; empty if there is none.
        seconds: duration of the request, in seconds.
    """

    ending: Ending = Ending.DONE
    answers: dict[int, Answer] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    ids: dict[int, str] = field(default_factory=dict)
    said: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Difference:
    """First difference between an answer and that of stock SGLang.

    Attributes:
        number: number of the answer among ``n``.
        at: position of the token in the answer.
        what: description of the difference.
        gap: gap of stock SGLang's logprobs at this token.
    """

    number: int
    at: int
    what: str
    gap: float | None = None


def compare(expected: Answer, found: Found, n: int, *, logprobs: bool) -> Difference | None:
    """Returns the first difference; None if there is none.

    Answers that were given up are compared as far as they were received.
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
