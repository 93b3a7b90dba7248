"""Static rotary embeddings, by which keys and queries are moved to other positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_TABLE_ERROR = 0.02
"""Maximum error of an angle near the first position, in radians."""
_ROUNDING = 2.0**-22
"""Maximum further error, relative to the angle. Tables are computed in fp32: scaled positions and
angles are rounded, by up to 2^-24 each, and so is the angle that a frequency is found from."""
_BLOCK = 1 << 14
"""Positions that are compared at a time. A table can take gigabytes, and complex numbers four times
as much as their cosines."""


@dataclass(frozen=True)
class Rope:
    """Static rotary embedding: rotates pair ``i`` at position ``p`` by ``p * frequencies[i]``.

    Scaled variants (linear, llama3, YaRN) differ only in their frequencies. A scale factor on the
    keys (YaRN) is already part of the cached keys and must not be applied again.
    """

    rotary_dim: int
    """Leading elements of a head that are rotated."""
    frequencies: tuple[float, ...]
    """Radians per position of each of the ``rotary_dim / 2`` pairs."""
    interleaved: bool = False
    """True if the elements of a pair are adjacent (GPT-J), False if they are ``rotary_dim / 2``
    apart (NeoX)."""

    def waves(self, deltas: Sequence[int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Returns the cosines and sines of rotations by ``deltas`` positions.

        Angles are computed in float64.

        Returns:
            Two float32 ``[deltas, rotary_dim / 2]``.
        """
        angles = np.array(deltas, np.float64)[:, None] * np.array(self.frequencies, np.float64)
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def frequencies_of(table: NDArray[np.float32]) -> tuple[float, ...]:
    """Returns the frequencies that a model's table of angles was computed from.

    Args:
        table: float32 ``[positions, rotary_dim]``: for each position the cosines of all pairs, then
            their sines, all scaled by one factor (YaRN).

    Raises:
        ValueError: an angle is not its frequency times the position, so the embedding is not
            static.
    """
    half = table.shape[1] // 2
    scale = table[0, :half].astype(np.float64)

    def waves(rows: slice | int) -> NDArray[Any]:
        both = table[rows].astype(np.float64)
        return (both[..., :half] + 1j * both[..., half:]) / scale

    found = np.angle(waves(1))
    # The angle at twice the position adds one bit; its full turns follow from the estimate so far.
    at = 1
    while (at := 2 * at) < len(table):
        found += np.angle(waves(at) * np.exp(-1j * at * found)) / at
    for start in range(0, len(table), _BLOCK):
        end = min(start + _BLOCK, len(table))
        angles = np.arange(start, end)[:, None] * found
        error = np.abs(waves(slice(start, end)) - np.exp(1j * angles))
        if not np.all(error <= _TABLE_ERROR + _ROUNDING * np.abs(angles)):
            raise ValueError(
                f"the angles of the rotary embedding at positions {start} to {end - 1} differ by "
                f"up to {error.max():.2g} from frequency times position; keys can be moved only if "
                "the embedding is static"
            )
    return tuple(found.tolist())
