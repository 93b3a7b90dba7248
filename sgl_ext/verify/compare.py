"""Comparison of two answers to the same prompt, of which one may have used other KV."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

WINDOW = 16
"""Positions over which differences are averaged: those of few pages, but more than one outlier."""


class Bounds(NamedTuple):
    """Differences, in nats, that rounding explains; a page of wrong KV differs by whole nats."""

    mean: float
    """Largest mean difference over :data:`WINDOW` positions."""
    single: float
    """Largest difference at one position, and between tokens that are equally likely."""


_FULL = Bounds(0.01, 0.05)
# One unit in the last place of logits from 16 to 32 is an eighth in bfloat16.
_HALF = Bounds(0.15, 1.0)


class Reply(NamedTuple):
    """Greedy answer of a server, and where the KV of its prompt came from."""

    text: str
    tokens: tuple[int, ...]
    likeliest: tuple[Mapping[int, float], ...]
    """Log-probabilities of the likeliest tokens by token id, for each token of the answer; empty
    unless they were asked for."""
    prompt: int
    """Tokens of the prompt."""
    sources: Mapping[str, int]
    """Tokens of the prompt by the source of their KV, such as ``device``, ``ssd`` or ``linked``;
    the rest was computed."""
    entries: tuple[Mapping[str, Any], ...]
    """Entries of the powers in ``meta_info.ext``."""
    seconds: float
    """Time to the first token, in seconds."""


class Difference(NamedTuple):
    """Difference between the log-probabilities of the same tokens, in nats."""

    mean: float
    """Largest mean over :data:`WINDOW` positions."""
    position: int
    """First position of these."""
    single: float
    """Largest difference at one position."""

    def within(self, bounds: Bounds) -> bool:
        """Returns whether rounding explains the difference."""
        return self.mean <= bounds.mean and self.single <= bounds.single


def bounds(*dtypes: str) -> Bounds:
    """Returns what rounding explains.

    A forward of another shape rounds differently.

    Args:
        dtypes: dtypes that the answers were computed in; any other than ``float32`` counts as one
            of 16 bits.
    """
    return _FULL if all(each in ("float32", "float") for each in dtypes) else _HALF


def difference(reference: Sequence[float], found: Sequence[float]) -> Difference:
    """Returns the difference between log-probabilities of the same tokens.

    Args:
        reference: log-probabilities in the answer that is compared with.
        found: log-probabilities in the other answer. NaN, an infinity and another number of them
            are an infinite difference.
    """
    if not reference or len(reference) != len(found):
        return Difference(math.inf, 0, math.inf)
    apart = np.nan_to_num(np.abs(np.subtract(found, reference)), nan=np.inf, posinf=np.inf)
    width = min(WINDOW, len(apart))
    means = np.lib.stride_tricks.sliding_window_view(apart, width).mean(axis=1)
    position = int(means.argmax())
    return Difference(float(means[position]), position, float(apart.max()))


def diverges_at(reference: Reply, found: Reply, tie: float) -> int | None:
    """Returns the index of the first token that differs; None if no token differs.

    Where both answers give both tokens about the same probability, rounding decides, and the
    answers are not compared behind it.

    Args:
        tie: difference in nats up to which two tokens are equally likely.
    """
    for at, (one, other) in enumerate(zip(reference.tokens, found.tokens, strict=False)):
        if one != other:
            apart = max(_apart(each.likeliest[at], one, other) for each in (reference, found))
            return None if apart <= tie else at
    same = len(reference.tokens) == len(found.tokens)
    return None if same else min(len(reference.tokens), len(found.tokens))


def _apart(likeliest: Mapping[int, float], one: int, other: int) -> float:
    """Returns the difference of two tokens' log-probabilities; infinity if one is not known."""
    if one not in likeliest or other not in likeliest:
        return math.inf
    return abs(likeliest[one] - likeliest[other])
