"""KL divergence between next-token distributions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean

Distribution = Mapping[int, float]
"""Natural logprobs of the most likely tokens, by token id."""


def divergence(right: Distribution, other: Distribution) -> float:
    """Returns KL(right || other) in nats, computed from the most likely tokens of each.

    All tokens that are not in both count as one token, so the result never exceeds the divergence
    of the full distributions.
    """
    both = right.keys() & other.keys()
    total = sum(math.exp(right[token]) * (right[token] - other[token]) for token in both)
    rest, other_rest = (
        max(1 - math.fsum(math.exp(logprobs[token]) for token in both), 1e-12)
        for logprobs in (right, other)
    )
    return total + rest * math.log(rest / other_rest)


def mean_divergence(right: Sequence[Distribution], other: Sequence[Distribution]) -> float:
    """Returns the mean of :func:`divergence` over the tokens of an answer, in nats."""
    return mean(divergence(*pair) for pair in zip(right, other, strict=True))
