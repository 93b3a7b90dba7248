"""Consecutive numbers in arrays: what one copy can move."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def run_starts(*numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where runs begin in which every one of ``numbers`` (of equal length) rises by one."""
    if not len(numbers[0]):
        return np.empty(0, np.int64)
    breaks = np.logical_or.reduce([np.diff(each) != 1 for each in numbers])
    return np.concatenate(([0], np.flatnonzero(breaks) + 1))


def runs_of(blocks: NDArray[np.int64]) -> list[tuple[int, int]]:
    """``(start, length)`` of the contiguous runs of block numbers.

    A number that comes twice begins a run of its own.
    """
    first = run_starts(blocks)
    lengths = np.diff(first, append=len(blocks))
    return list(zip(blocks[first].tolist(), lengths.tolist(), strict=True))


def copy_rows(*columns: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """``[copies, 6]`` for a transfer engine: source, destination, width, height and both pitches,
    each one for all copies or one of each."""
    return np.stack(np.broadcast_arrays(*columns), axis=1)
