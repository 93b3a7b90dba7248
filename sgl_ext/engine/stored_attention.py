"""Attention over a context that lies on devices: what each query needs of it is fetched (Swarm §6).

A row sees the context's sinks and window, the blocks that are selected for it, and its own tokens,
as one sequence in the order of the text. Everything of the context lies in memory of its own, which
the native attention reads as slots behind the pool's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_ext._native import _clusters
from sgl_ext.clusters.selection import best_blocks, blocks_of
from sgl_ext.clusters.stored import Stored
from sgl_ext.engine.cpu.native_attention import NativeAttention, batch_of
from sgl_ext.engine.stored_memory import StoredMemory
from sgl_ext.errors import ExtError

_ROWS = 32
"""That are selected for at once: each has a score of every entry."""


class Own(NamedTuple):
    """A request's own tokens: those behind the context, in the pool.

    Attributes:
        slots: ``[width]`` of all that any of its rows sees.
        lengths: of each row, how many it sees: the first ones, itself the last.
    """

    slots: torch.Tensor
    lengths: Sequence[int]


class StoredAttention:
    """One context, open for decoding.

    Args:
        memory: what there is of it.
    """

    def __init__(self, stored: Stored, memory: StoredMemory) -> None:
        self._about, self._stored = stored.about, stored
        self._blocks = stored.about.blocks
        self.memory = memory
        self.seconds = {"choosing": 0.0, "fetching": 0.0, "placing": 0.0, "expecting": 0.0}
        """That the forward's thread has spent on it."""

    @property
    def tokens(self) -> int:
        """Of the context."""
        return self._about.tokens

    def attend(
        self,
        native: NativeAttention,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        own: Sequence[Own],
        share: float,
    ) -> torch.Tensor:
        """What rows of one query each see of the context and of their own tokens.

        Args:
            query: ``[rows, heads, head_dim]``, the rows of each request one after the other.
            keys: ``[slots, kv_heads, head_dim]``: the pool of this layer, as ``values``.
            own: of each request.
            share: of the context's blocks, that each row is given.

        Returns:
            ``[rows, heads, head_dim]``.

        Raises:
            DeviceError: a block does not come.
        """
        each, memory = self._each(share), self.memory
        if each > memory.most:
            raise ExtError(
                f"a query is given {each} blocks of the context, at most {memory.most} fit into "
                "memory at once: ask for a smaller share"
            )
        parts, start = [], 0
        for some in _groups(own, self._together(each)):
            end = start + sum(len(one.lengths) for one in some)
            asked = query[start:end]
            with self._timed("choosing"):
                chosen = self._select(layer, asked, keys, some, share)
                wanted = _all(chosen)
            with self._timed("fetching"):
                slots = memory.bring(layer, wanted)
            with self._timed("placing"):
                first = slots[np.searchsorted(wanted, chosen)]
                table, contexts = self._table(layer, chosen, first, some, len(keys))
                batch = batch_of(table, range(len(table)), contexts, [1] * len(table))
            parts.append(
                native.attend(
                    batch, asked, keys, values, scale=self._about.geometry.scale,
                    elsewhere=memory.slots, beyond=True,
                )
            )  # fmt: skip
            start = end
        with self._timed("placing"):
            memory.keep(layer, wanted, slots)  # one step, be it of several groups
        return torch.cat(parts)

    def expect(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        own: Sequence[Own],
        share: float,
        times: float,
    ) -> None:
        """Begins to read what rows will probably need, if they are attended to together.

        Args:
            query: as for :meth:`attend`, predicted.
            times: as many blocks are read as each row is given.
        """
        each = self._each(share)
        if share < 1 and len(query) <= self._together(each):
            # As much as there is memory for, the best of it.
            room = self.memory.most / (len(query) * self._blocks.blocks)
            with self._timed("expecting"):
                self._expect(layer, query, keys, own, min(share * times, room, 1.0))

    def _expect(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, own: Sequence[Own], share: float
    ) -> None:
        before = [  # the layer has no K of the new tokens yet
            Own(one.slots[: one.lengths[0] - 1], [one.lengths[0] - 1] * len(one.lengths))
            for one in own
        ]
        self.memory.expect(layer, _all(self._select(layer, query, keys, before, share)))

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - begin

    def describe(self) -> dict[str, Any]:
        """What following it has cost, for ``/server_info``."""
        return {**self.memory.describe(), "seconds": self.seconds}

    def _each(self, share: float) -> int:
        """Blocks that a row is given."""
        return blocks_of(share, self._blocks.blocks, self._blocks.devices)

    def _together(self, each: int) -> int:
        """Rows whose blocks fit into memory."""
        return min(max(self.memory.most // each, 1), _ROWS)

    def _select(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, own: Sequence[Own], share: float
    ) -> NDArray[np.int64]:
        """``[rows, blocks]``, each row's sorted."""
        blocks = self._blocks
        if share >= 1:
            return np.broadcast_to(np.arange(blocks.blocks), (len(query), blocks.blocks))
        asked = query.float().contiguous().numpy()
        mass = self._stored.layers[layer].codes.mass(
            asked, self._about.geometry.scale, self._beside(layer, asked, keys, own),
            torch.get_num_threads(),
        )  # fmt: skip
        return best_blocks(mass, share, block=blocks.block, devices=blocks.devices)

    def _beside(
        self, layer: int, query: NDArray[np.float32], keys: torch.Tensor, own: Sequence[Own]
    ) -> NDArray[np.float32]:
        """``[rows, heads]`` logarithm of the exponentials' sum over what every row sees anyway."""
        geometry, memory = self._about.geometry, self.memory
        near = memory.slots[memory.first(layer) :, 0]
        parts, start = [], 0
        for slots, lengths in own:
            rows = query[start : (start := start + len(lengths))]
            parts.append(
                _clusters.log_sum(
                    rows, geometry.scale, near.data_ptr(), near.stride(0), memory.near,
                    keys.data_ptr(), keys.stride(0), slots.numpy(), np.array(lengths, np.int64),
                    geometry.kv_heads, keys.dtype == torch.bfloat16, torch.get_num_threads(),
                )
            )  # fmt: skip
        return np.concatenate(parts)

    def _table(
        self,
        layer: int,
        chosen: NDArray[np.int64],
        first: NDArray[np.int64],
        own: Sequence[Own],
        pool: int,
    ) -> tuple[torch.Tensor, list[int]]:
        """Slots of each row in the order of the text, and how many there are.

        Args:
            first: ``[rows, blocks]`` the first slot of each chosen block.
        """
        block, sinks, near = self._blocks.block, self._about.sinks, self.memory.near
        rows = len(chosen)
        slots = first[:, :, None] + np.arange(block)
        tokens = self._stored.layers[layer].order.reshape(-1, block)[chosen]
        text = np.argsort(tokens.reshape(rows, -1), axis=1)
        middle = np.take_along_axis(slots.reshape(rows, -1), text, axis=1)
        end = sinks + middle.shape[1]
        begin = end + near - sinks
        table = np.empty((rows, begin + max(len(one.slots) for one in own)), np.int32)
        kept = pool + self.memory.first(layer)
        table[:, :sinks] = kept + np.arange(sinks)
        table[:, sinks:end] = pool + middle
        table[:, end:begin] = kept + np.arange(sinks, near)
        contexts: list[int] = []
        for one in own:
            mine = slice(len(contexts), len(contexts) + len(one.lengths))
            table[mine, begin : begin + len(one.slots)] = one.slots.numpy()
            contexts += [begin + length for length in one.lengths]
        return torch.from_numpy(table), contexts


def _all(chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """Blocks that any row is given, sorted."""
    return chosen[0] if len(chosen) == 1 else np.unique(chosen)


def _groups(own: Sequence[Own], most: int) -> Iterator[list[Own]]:
    """Rows in groups of at most so many."""
    group: list[Own] = []
    room = most
    for slots, lengths in own:
        for start in range(0, len(lengths), most):
            part = lengths[start : start + most]
            if len(part) > room:
                yield group
                group, room = [], most
            group.append(Own(slots[: part[-1]], part))
            room -= len(part)
    yield group
