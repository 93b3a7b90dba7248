"""Interleaved samples: what systems differ in must not be when they were measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

from sgl_ext.bench.harness.progress import Progress

Sample = TypeVar("Sample")


def interleaved(
    samplers: Sequence[Callable[[int], Sample]], rounds: int, what: str = "a round"
) -> list[list[Sample]]:
    """Calls every sampler once a round, each round beginning with the next one.

    Args:
        samplers: take one sample; given the number of the round.
        what: is measured, for who waits.

    Returns:
        The samples of each sampler.
    """
    samples: list[list[Sample]] = [[] for _ in samplers]
    progress = Progress(what, rounds)
    for number in range(rounds):
        for position in range(len(samplers)):
            index = (number + position) % len(samplers)
            samples[index].append(samplers[index](number))
        progress.step()
    return samples


def ratio_of_medians(samples: Sequence[float], to: Sequence[float]) -> float:
    """Median of ``samples`` over median of ``to``."""
    return statistics.median(samples) / statistics.median(to)
