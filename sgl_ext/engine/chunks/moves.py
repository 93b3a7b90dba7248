"""Moves: copies of the KV of chunks to slots of a request, at other positions.

A move reads the chunk's tokens where they are, on the device or in host memory. On a CUDA device
its kernel runs on the calling thread's stream, that of the forward, and the host waits for nothing:

- Chunks on the device were written by earlier work on this stream, or by loads that it waited for:
  the radix tree gets a loaded prefix after the forward that waits for its layers.
- The target slots may still be used by earlier forwards. Copies from host memory begin when these
  have ended, and the kernel waits for the copies.
- The request releases its chunks as soon as its forward is launched, and their blocks and pages may
  get new owners. Later forwards write to the blocks on the same stream, and loads into them begin
  when the work on it has ended. A page is recorded as being read, and its next owner waits.

"Streams and order" in the README of ``sgl_ext.engine`` has the rules for all powers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_ext.chunks.rotation import FROM, FROM_PITCH, TO, TO_PITCH, TOKENS, RotatingCopy
from sgl_ext.engine.kv.indices import upload
from sgl_ext.memory.rope import Rope
from sgl_ext.memory.slab import Layout

if TYPE_CHECKING:
    from sgl_ext.tiers.holds import Holds


class Move(NamedTuple):
    """Tokens of one chunk, and the slots that they are copied to."""

    slots: torch.Tensor
    """Slots of the chunk's leading tokens, which are on the device, int64 ``[tokens]`` there."""
    places: NDArray[np.int64]
    """Places in host memory of the tokens behind them, int64 ``[tokens]``: the page times the
    tokens of a page, plus the offset in the page."""
    offsets: NDArray[np.int64]
    """Offsets in the chunk of the tokens that are copied, int64 ``[copied]``."""
    targets: NDArray[np.int64]
    """Slots that they are copied to, int64 ``[copied]``; no slot of a chunk."""
    delta: int
    """Target position minus position in the chunk; may be negative."""


class Moves(Protocol):
    """Callable that carries out the moves of one request.

    The KV is in place for the calling thread's next work on the device.
    """

    def __call__(self, moves: Sequence[Move]) -> None: ...


class HostMoves:
    """Moves within host memory, by the native kernel.

    Args:
        slab: slab of the KV, ``[blocks, page, layers, 2, kv_heads, head_dim]``.
        holds: pages of host memory; None if moves have no places there.

    Raises:
        ValueError: the kernel does not support the layout.
    """

    def __init__(
        self, layout: Layout, rope: Rope, slab: torch.Tensor, holds: Holds | None = None
    ) -> None:
        self._copy = RotatingCopy(layout, rope)
        self._layout = layout
        self._address = slab.data_ptr()
        self._holds = holds

    def __call__(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self._copy(self._runs(move), move.delta)

    def _runs(self, move: Move) -> NDArray[np.int64]:
        """Returns the table of runs of a move, int64 ``[runs, 5]``, see :class:`RotatingCopy`."""
        page, size = self._layout.page, self._layout.token_bytes
        sources = self._address + move.slots.numpy() * size
        if self._holds is not None and len(move.places):
            pages = self._holds.addresses(move.places // page)
            sources = np.concatenate([sources, pages + move.places % page * size])
        sources = sources[move.offsets]
        breaks = (np.diff(sources) != size) | (np.diff(move.targets) != 1)
        first = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        runs = np.empty((len(first), 5), np.int64)
        runs[:, FROM] = sources[first]
        runs[:, TO] = self._address + move.targets[first] * size
        runs[:, TOKENS] = np.diff(first, append=len(sources))
        runs[:, [FROM_PITCH, TO_PITCH]] = size
        return runs


class DeviceMoves:
    """Moves within the memory of a CUDA device, by one launch of the Triton kernel.

    KV in host memory is copied to its target slots as it is, and the kernel rotates it there. Each
    key is rounded once.

    Args:
        slab: as for :class:`HostMoves`, like ``holds``.
    """

    def __init__(
        self, _layout: Layout, rope: Rope, slab: torch.Tensor, holds: Holds | None = None
    ) -> None:
        from sgl_ext_kernels import rotate  # imports Triton, which only a device needs

        self._rotate = rotate
        self._rope = rope
        self._slab = slab
        self._holds = holds

    def __call__(self, moves: Sequence[Move]) -> None:
        chunk = np.repeat(np.arange(len(moves)), [len(move.offsets) for move in moves])
        offsets = np.concatenate([move.offsets for move in moves])
        targets = np.concatenate([move.targets for move in moves])
        known = np.array([len(move.slots) for move in moves])
        here = offsets < known[chunk]
        if self._holds is not None and not here.all():
            behind = np.array([len(move.places) for move in moves])
            begin = np.cumsum(behind) - behind - known
            places = np.concatenate([move.places for move in moves])
            self._holds.fill_tokens(places[(offsets + begin[chunk])[~here]], targets[~here])
        deltas = [move.delta for move in moves]
        in_place = ~here & (np.array(deltas)[chunk] != 0)
        order = np.concatenate([np.flatnonzero(here), np.flatnonzero(in_place)])
        if not len(order):
            return
        begin = np.cumsum(known) - known
        index = self._upload((offsets + begin[chunk])[here])
        to = self._upload(targets[order])
        sources = torch.cat([self._slots(moves)[index], to[len(index) :]])
        segments = self._upload(chunk[order].astype(np.int32))
        cosines, sines = self._upload(np.stack(self._rope.waves(deltas)))
        self._rotate.rotate_tokens(
            self._slab,
            self._rotate.guaranteed_moves(self._slab, sources, to, segments),
            cosines,
            sines,
            interleaved=self._rope.interleaved,
        )

    def _slots(self, moves: Sequence[Move]) -> torch.Tensor:
        """Returns the slots of the chunks of ``moves`` in one tensor."""
        for move in moves:
            if move.slots.is_cuda:  # the scheduler allocated it on another stream
                move.slots.record_stream(torch.cuda.current_stream())
        return torch.cat([move.slots for move in moves])

    def _upload(self, values: NDArray[Any]) -> torch.Tensor:
        return upload(torch.from_numpy(values), self._slab.device)


def moves_of(
    layout: Layout, rope: Rope, slab: torch.Tensor, holds: Holds | None = None
) -> HostMoves | DeviceMoves:
    """Returns the implementation for the memory that ``slab`` lies in; see :class:`HostMoves`.

    Raises:
        ValueError: the kernel does not support the layout.
    """
    return (DeviceMoves if slab.is_cuda else HostMoves)(layout, rope, slab, holds)
