"""Interleaved samples of systems, so that the time of measurement does not differ between them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from sgl_ext.progress import Progress

Sample = TypeVar("Sample")
_RESAMPLES = 2000


Item = TypeVar("Item")


def rotated(items: Iterable[Item], number: int) -> list[Item]:
    """Returns items in the order of round ``number``; each round begins with the next one."""
    found = [*items]
    first = number % len(found)
    return [*found[first:], *found[:first]]


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
        for into, sampler in rotated(zip(samples, samplers, strict=True), number):
            into.append(sampler(number))
        progress.step()
    return samples


class Ratio(NamedTuple):
    """Median ratio of paired samples, and its 95 % confidence interval."""

    median: float
    low: float
    high: float


def paired_ratio(samples: ArrayLike, to: ArrayLike) -> Ratio:
    """Returns the median of the samples' ratios to those of the same rounds.

    The interval is a percentile bootstrap over the rounds.
    """
    ratios = np.asarray(samples) / np.asarray(to)
    drawn = np.random.default_rng(0).choice(ratios, (_RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return Ratio(float(np.median(ratios)), float(low), float(high))


def ratio(samples: Sequence[float], to: Sequence[float]) -> float:
    """Returns the median of the samples' ratios to those of the same rounds."""
    return statistics.median(one / other for one, other in zip(samples, to, strict=True))


def ratio_of_medians(samples: Sequence[float], to: Sequence[float]) -> float:
    """Returns the median of ``samples`` over the median of ``to``."""
    return statistics.median(samples) / statistics.median(to)
