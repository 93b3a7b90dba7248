"""Interleaved samples: what two systems differ in must not be when they were measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Sample = TypeVar("Sample")


def interleaved(
    first: Callable[[int], Sample], second: Callable[[int], Sample], rounds: int
) -> tuple[list[Sample], list[Sample]]:
    """Calls both once a round, each first in every other round.

    Args:
        first, second: take one sample; given the number of the round.
    """
    samples: tuple[list[Sample], list[Sample]] = ([], [])
    for number in range(rounds):
        for index in (0, 1) if number % 2 == 0 else (1, 0):
            samples[index].append((first, second)[index](number))
    return samples
