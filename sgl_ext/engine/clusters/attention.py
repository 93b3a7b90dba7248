"""Attention over a context that lies on devices: what each query needs of it is fetched (Swarm §6).

A row sees the context's sinks and window, the blocks that are selected for it, and its own tokens.
Everything of the context lies in memory of its own, which the native attention reads as slots
behind the pool's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_ext._native import _clusters
from sgl_ext.clusters.selection import blocks_of, each_of
from sgl_ext.clusters.stored import Stored
from sgl_ext.engine.clusters.memory import StoredMemory
from sgl_ext.engine.cpu.native_attention import NativeAttention, batch_of
from sgl_ext.errors import ExtError

_ROWS = 32
"""That are selected for at once: each has a score of every entry."""


class Own(NamedTuple):
    """Tokens of requests' own, behind the context, in the pool; rows of a request share theirs.

    Attributes:
        slots: int64, of all requests.
        starts: ``[rows]`` int64: where among them those of a row's request begin.
        lengths: ``[rows]`` int64: how many a row sees, itself the last.
        before: ``[rows]`` int64: how many there were before the forward.
    """

    slots: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    before: NDArray[np.int64]

    @classmethod
    def of(cls, slots: Sequence[NDArray[np.int64]], new: Sequence[int]) -> Own:
        """What the rows of some requests see.

        Args:
            slots: of each request.
            new: rows of each: its last tokens.
        """
        ends = np.array([len(each) for each in slots], np.int64)
        rows = np.array(new, np.int64)
        before = np.repeat(ends - rows, rows)
        at = np.arange(len(before)) - np.repeat(np.cumsum(rows) - rows, rows)
        return cls(
            np.concatenate(slots), np.repeat(np.cumsum(ends) - ends, rows), before + at + 1, before
        )

    def only(self, some: slice) -> Own:
        """Some of the rows."""
        return Own(self.slots, self.starts[some], self.lengths[some], self.before[some])


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
        self.failed = ""
        """Why nobody can follow it until it is opened again."""

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
        own: Own,
        share: float,
    ) -> torch.Tensor:
        """What rows of one query each see of the context and of their own tokens.

        Args:
            query: ``[rows, heads, head_dim]``, the rows of each request one after the other.
            keys: ``[slots, kv_heads, head_dim]``: the pool of this layer, as ``values``.
            own: what the rows see behind the context.
            share: of the context's blocks, that each row is given.

        Returns:
            ``[rows, heads, head_dim]``.

        Raises:
            DeviceError: a block does not come.
            ExtError: the share is too large, what comes out is no number, or it has failed before.
        """
        if self.failed:
            raise ExtError(self.failed)
        each, memory = self._each(share), self.memory
        if each > memory.most:
            raise ExtError(
                f"a query is given {each} blocks of the context, at most {memory.most} fit into "
                "memory at once: ask for a smaller share"
            )
        parts: list[torch.Tensor] = []
        wanted_by_all: list[NDArray[np.int64]] = []
        for start in range(0, len(query), _ROWS):
            some = slice(start, start + _ROWS)
            began = time.perf_counter()
            chosen = self._select(layer, query[some], keys, own.only(some), share)
            began = self._spent("choosing", began)
            for first, end, wanted in _fitting(chosen, memory.most):
                began = time.perf_counter()
                slots = memory.bring(layer, wanted)
                began = self._spent("fetching", began)
                some = slice(start + first, start + end)
                rows = slots[None]
                if end - first > 1:
                    rows = slots[np.searchsorted(wanted, chosen[first:end])]
                table, contexts = self._table(layer, rows, own.only(some), len(keys), share)
                batch = batch_of(table, range(len(table)), contexts, [1] * len(table))
                self._spent("placing", began)
                parts.append(
                    native.attend(
                        batch, query[some], keys, values, scale=self._about.geometry.scale,
                        elsewhere=memory.slots, beyond=True,
                    )
                )  # fmt: skip
                wanted_by_all.append(wanted)
        began = time.perf_counter()
        # One step, be it of several groups, of which the last one's blocks are there yet.
        memory.keep(layer, _union(wanted_by_all), wanted_by_all[-1], slots)
        self._spent("placing", began)
        found = parts[0] if len(parts) == 1 else torch.cat(parts)
        if not torch.isfinite(found).all():  # sampling from it would end the process
            raise ExtError(f"attention of layer {layer} to it is no number; store it again")
        return found

    def expect(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        own: Own,
        share: float,
        times: float,
    ) -> None:
        """Begins to read what rows will probably need, if they are attended to together.

        Args:
            query: as for :meth:`attend`, predicted.
            times: as many blocks are read as each row is given.
        """
        if share >= 1 or len(query) > _ROWS or self.failed:
            return
        began = time.perf_counter()
        # As much as there is memory for, the best of it.
        room = self.memory.most / (len(query) * self._blocks.blocks)
        share = max(min(share * times, room, 1.0), 1 / self._blocks.blocks)
        known = own._replace(lengths=own.before)  # the layer has no K of the new tokens yet
        self.memory.expect(layer, _union([*self._select(layer, query, keys, known, share)]))
        self._spent("expecting", began)

    def _spent(self, what: str, began: float) -> float:
        """Counts the time since then; returns what time it is."""
        now = time.perf_counter()
        self.seconds[what] += now - began
        return now

    def describe(self) -> dict[str, Any]:
        """What following it has cost, for ``/server_info``."""
        return {**self.memory.describe(), "seconds": self.seconds}

    def _each(self, share: float) -> int:
        """Blocks that a row is given."""
        return blocks_of(share, self._blocks.blocks, self._blocks.devices)

    def _select(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, own: Own, share: float
    ) -> NDArray[np.int64]:
        """``[rows, blocks]``, each row's sorted."""
        blocks = self._blocks
        if share >= 1:
            return np.broadcast_to(np.arange(blocks.blocks), (len(query), blocks.blocks))
        codes, slots = self._stored.layers[layer].codes, self.memory.slots
        near = slots.data_ptr() + self.memory.first(layer) * slots.stride(0) * slots.itemsize
        return _clusters.choose(
            codes.codes, codes.centroids, codes.projection, codes.mean,
            query.float().contiguous().numpy(), self._about.geometry.scale, near, slots.stride(0),
            self.memory.near, keys.data_ptr(), keys.stride(0), own.slots, own.starts, own.lengths,
            keys.dtype == torch.bfloat16, blocks.block, blocks.devices,
            each_of(share, blocks.blocks, blocks.devices), torch.get_num_threads(),
        )  # fmt: skip

    def _table(
        self, layer: int, first: NDArray[np.int64], own: Own, pool: int, share: float
    ) -> tuple[torch.Tensor, list[int]]:
        """Slots of each row, and how many there are.

        Where a row sees the whole context they are in the order of the text, so that what comes out
        is what dense attention gives to the last bit; attention to a part has no such twin.

        Args:
            first: ``[rows, blocks]`` the first slot of each block.
        """
        about, block = self._about, self._blocks.block
        text = np.argsort(self._stored.layers[layer].order) if share >= 1 else None
        table = _clusters.table(
            first, block, pool, pool + self.memory.first(layer), about.sinks, about.window, text,
            own.slots, own.starts, own.lengths,
        )  # fmt: skip
        behind = about.sinks + about.window + first.shape[1] * block
        return torch.from_numpy(table), (own.lengths + behind).tolist()


def _union(chosen: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Blocks that are among any of these, sorted."""
    return chosen[0] if len(chosen) == 1 else np.unique(np.concatenate(chosen))


def _fitting(chosen: NDArray[np.int64], most: int) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """Rows in groups whose blocks together are at most so many: first, end, and the blocks."""
    first, wanted = 0, chosen[0]
    for row in range(1, len(chosen)):
        more = np.union1d(wanted, chosen[row])
        if len(more) > most:
            yield first, row, wanted
            first, more = row, chosen[row]
        wanted = more
    yield first, len(chosen), wanted
