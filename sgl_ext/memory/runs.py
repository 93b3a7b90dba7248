"""Runs of consecutive numbers in arrays; one copy can move one run."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def run_starts(*numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the indices at which runs begin, int64 ``[runs]``.

    Within a run, each of the arrays ``numbers`` (1-D, of equal length) rises by one per element.
    """
    if not len(numbers[0]):
        return np.empty(0, np.int64)
    breaks = np.logical_or.reduce([np.diff(each) != 1 for each in numbers])
    return np.concatenate(([0], np.flatnonzero(breaks) + 1))


def runs_of(blocks: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Returns ``(start, length)`` of each contiguous run of block numbers.

    A repeated number begins a new run.
    """
    first = run_starts(blocks)
    lengths = np.diff(first, append=len(blocks))
    return list(zip(blocks[first].tolist(), lengths.tolist(), strict=True))


def copy_rows(*columns: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """Returns a batch of copies for a transfer engine, int64 ``[copies, 6]``.

    Args:
        columns: source, destination, width, height, source pitch and destination pitch, each as one
            value for all copies or as one value per copy.
    """
    return np.stack(np.broadcast_arrays(*columns), axis=1)
