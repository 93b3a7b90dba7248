"""Copies of KV to another position: keys are rotated by the difference, values stay."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sgl_ext.memory.slab import Layout

_TABLE_ERROR = 0.02
"""Radians. Tables are computed in fp32, which at position 100,000 is good to a hundredth."""

FROM, TO, TOKENS, FROM_PITCH, TO_PITCH = range(5)
"""Columns of a table of runs: addresses, a count, and bytes from one token to the next."""


@dataclass(frozen=True)
class Rope:
    """A static rotary embedding: pair ``i`` at position ``p`` is turned by ``p * frequencies[i]``.

    Scaled variants (linear, llama3, YaRN) differ in their frequencies only. A factor on the keys
    (YaRN's) is in the cached ones already and must not be applied again.
    """

    rotary_dim: int
    """Leading elements of a head that are rotated."""
    frequencies: tuple[float, ...]
    """Radians a position of each of the ``rotary_dim / 2`` pairs."""
    interleaved: bool = False
    """Whether the elements of a pair are neighbours (GPT-J); else half a head apart (NeoX)."""


def frequencies_of(table: NDArray[np.float32]) -> tuple[float, ...]:
    """The frequencies that a model's table of angles was made from.

    Args:
        table: ``[positions, rotary_dim]``: of each position the cosines of all pairs, then their
            sines, all times one factor (YaRN's).

    Raises:
        ValueError: an angle is not its frequency times the position: the embedding is not static.
    """
    half = table.shape[1] // 2
    waves = table[:, :half].astype(np.float64) + 1j * table[:, half:]
    waves /= waves[0].real
    found = np.angle(waves[1])
    # The angle at twice the position, of which whole turns are known by now, tells one more bit.
    at = 1
    while (at := 2 * at) < len(table):
        found += np.angle(waves[at] * np.exp(-1j * at * found)) / at
    positions = np.arange(len(table))[:, None]
    error = np.abs(waves - np.exp(1j * positions * found)).max()
    if not error <= _TABLE_ERROR:
        raise ValueError(
            f"the angles of the rotary embedding are off by up to {error:.2g} from frequencies "
            "times positions; only static embeddings can be moved"
        )
    return tuple(found.tolist())


class RotatingCopy:
    """Moves tokens of one layout by ``delta`` positions.

    Angles are computed in float64, products in float32 from the keys as they are cached, rounded
    once: chained rotations would lose a bit each time, so a copy of a copy must never be made.

    Raises:
        ValueError: a layout that the native kernel does not take.
    """

    def __init__(self, layout: Layout, rope: Rope) -> None:
        from sgl_ext._native import _rotation

        self._native = _rotation.Rotation(
            layout.dtype, layout.layers, layout.kv_heads, layout.head_dim,
            rope.rotary_dim, rope.interleaved,
        )  # fmt: skip
        self._frequencies = np.array(rope.frequencies, np.float64)
        self._threads = len(os.sched_getaffinity(0))

    def __call__(self, runs: NDArray[np.int64], delta: int) -> None:
        """Copies ``runs`` ``[count, 5]``, see :data:`FROM`; sources and targets do not overlap."""
        runs = np.ascontiguousarray(runs, np.int64)
        angles = delta * self._frequencies
        cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self._native(
            runs.ctypes.data, len(runs), cosines.ctypes.data, sines.ctypes.data, self._threads
        )
