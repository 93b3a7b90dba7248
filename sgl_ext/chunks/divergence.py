"""How far one model's next tokens are from another's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean

Distribution = Mapping[int, float]
"""Natural logprobs of the likeliest tokens, by token id."""


def divergence(right: Distribution, other: Distribution) -> float:
    """KL(right || other) in nats, of the likeliest tokens of each.

    All tokens that are not in both count as one: never more than the divergence of all of them.
    """
    both = right.keys() & other.keys()
    total = sum(math.exp(right[token]) * (right[token] - other[token]) for token in both)
    rest, other_rest = (
        max(1 - math.fsum(math.exp(logprobs[token]) for token in both), 1e-12)
        for logprobs in (right, other)
    )
    return total + rest * math.log(rest / other_rest)


def mean_divergence(right: Sequence[Distribution], other: Sequence[Distribution]) -> float:
    """Over the tokens of an answer."""
    return mean(divergence(*pair) for pair in zip(right, other, strict=True))
