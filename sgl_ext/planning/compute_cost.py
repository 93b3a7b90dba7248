"""Costs of forwards: of prompts, whose tokens attend to all before them, and of decode steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sgl_ext.planning import learner
from sgl_ext.planning.learner import Features


@dataclass(frozen=True)
class ComputeCost:
    """Cost in seconds of a forward over tokens ``begin .. end - 1`` of a prompt.

    The cost of a token grows with its position because it attends to all tokens before it.
    """

    overhead: float = 0.0
    """Seconds of a forward, whatever its tokens."""
    per_token: float = 1e-3
    """Seconds per token."""
    per_pair: float = 0.0
    """Seconds per pair of a token and a token that it attends to."""

    def seconds(self, begin: int, end: int) -> float:
        """Returns the seconds of one forward."""
        return self.overhead + self.work(begin, end)

    def work(self, begin: int, end: int) -> float:
        """Returns the seconds without the overhead of the forward."""
        return (end - begin) * (self.per_token + self.per_pair * (begin + end) / 2)

    def in_chunks(self, begin: int, end: int, chunk: int) -> float:
        """Returns the seconds of computing in forwards of ``chunk`` tokens each."""
        return math.ceil((end - begin) / chunk) * self.overhead + self.work(begin, end)


def features_of(parts: Sequence[tuple[int, int]]) -> Features:
    """Returns one forward, its tokens, and its pairs of tokens that attend to each other.

    Args:
        parts: tokens ``begin .. end - 1`` of each prompt.
    """
    tokens = sum(end - begin for begin, end in parts)
    pairs = sum((end - begin) * (begin + end) / 2 for begin, end in parts)
    return 1.0, float(tokens), pairs


def fit(samples: Sequence[tuple[int, int, float]]) -> ComputeCost:
    """Returns the costs that explain measured forwards best; see :func:`.learner.fit`.

    Args:
        samples: ``(begin, end, seconds)`` of each forward of one prompt.

    Raises:
        ValueError: a forward did not take any time, there are fewer than three forwards, or all
            have the same number of tokens.
    """
    begin, end, seconds = np.array(samples, float).reshape(-1, 3).T
    tokens = end - begin
    if len(seconds) < 3 or np.ptp(tokens) == 0 or not (seconds > 0).all():
        raise ValueError(f"{len(samples)} forwards do not determine the costs: {samples[:3]}")
    features = np.stack((np.ones_like(tokens), tokens, tokens * (begin + end) / 2), axis=1)
    return ComputeCost(*learner.fit(features, seconds).tolist())


@dataclass(frozen=True)
class DecodeCost:
    """Cost in seconds of a decode step: one token for each of some requests."""

    overhead: float = 0.0
    per_request: float = 1e-2

    def seconds(self, requests: int) -> float:
        return self.overhead + requests * self.per_request
