"""Interleaved samples of systems, so that the time of measurement does not differ between them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

from sgl_ext.progress import Progress

Sample = TypeVar("Sample")


def interleaved(
    samplers: Sequence[Callable[[int], Sample]], rounds: int, what: str = "rounds"
) -> list[list[Sample]]:
    """Calls every sampler once per round; each round begins with the next sampler.

    Args:
        samplers: functions that take one sample, given the number of the round.
        what: name of the measurement in progress reports.

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
    """Returns the median of ``samples`` over the median of ``to``."""
    return statistics.median(samples) / statistics.median(to)
