"""Interleaved samples: what systems differ in must not be when they were measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

Sample = TypeVar("Sample")


def interleaved(samplers: Sequence[Callable[[int], Sample]], rounds: int) -> list[list[Sample]]:
    """Calls every sampler once a round, each round beginning with the next one.

    Args:
        samplers: take one sample; given the number of the round.

    Returns:
        The samples of each sampler.
    """
    samples: list[list[Sample]] = [[] for _ in samplers]
    for number in range(rounds):
        for position in range(len(samplers)):
            index = (number + position) % len(samplers)
            samples[index].append(samplers[index](number))
    return samples


def ratio_of_medians(samples: Sequence[float], to: Sequence[float]) -> float:
    """Median of ``samples`` over median of ``to``."""
    return statistics.median(samples) / statistics.median(to)
