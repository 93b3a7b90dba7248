"""KV copies to another position: keys are rotated by the difference, values are unchanged."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_ext.memory.rope import Rope
from sgl_ext.memory.slab import Layout

FROM, TO, TOKENS, FROM_PITCH, TO_PITCH = range(5)
"""Columns of a table of runs: source and target address, number of tokens, and bytes from one token
to the next in source and target."""


class RotatingCopy:
    """Callable that copies the KV of tokens of one layout to positions ``delta`` higher.

    Products are computed in float32 from the cached keys and rounded once. Chained rotations would
    lose a bit each time, so a copy must never be the source of another copy.

    Raises:
        ValueError: the native kernel does not support the layout.
    """

    def __init__(self, layout: Layout, rope: Rope) -> None:
        from sgl_ext._native import _rotation

        self._native = _rotation.Rotation(
            layout.dtype, layout.layers, layout.kv_heads, layout.head_dim,
            rope.rotary_dim, rope.interleaved,
        )  # fmt: skip
        self._rope = rope

    def __call__(self, runs: NDArray[np.int64], delta: int) -> None:
        """Copies ``runs`` of tokens and rotates their keys by ``delta`` positions.

        Args:
            runs: ``[count, 5]``, see :data:`FROM`. Sources and targets must not overlap.
            delta: target position minus source position; may be negative.
        """
        runs = np.ascontiguousarray(runs, np.int64)
        cosines, sines = self._rope.waves([delta])
        self._native(
            runs.ctypes.data,
            len(runs),
            cosines.ctypes.data,
            sines.ctypes.data,
            torch.get_num_threads(),  # a pool of another size would be built anew for torch
        )
