"""Attention over a context that lies on devices: what each query needs of it is fetched (Swarm §6).

A row sees the context's sinks and window, the blocks that are selected for it, and its own tokens,
as one sequence in the order of the text. Everything of the context lies in memory of its own, which
the native attention reads as slots behind the pool's.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_ext._native import _clusters
from sgl_ext.clusters.adaptation import HotBlocks
from sgl_ext.clusters.reader import Device, DeviceError, Reader, Reading
from sgl_ext.clusters.selection import best_blocks, blocks_of
from sgl_ext.clusters.stored import Stored
from sgl_ext.engine.cpu.native_attention import NativeAttention, batch_of
from sgl_ext.errors import ExtError
from sgl_ext.memory.transfer import Priority, TransferEngine

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
        engine: reads it; memory is registered with it.
        devices: that its blocks lie on.
        hot: bytes of blocks that are kept in memory, of all layers.
        most: blocks of a layer that are fetched at once, at most.
        deadline: seconds in which the blocks of a layer have to come.

    Raises:
        ExtError: the context's files cannot be opened.
    """

    def __init__(
        self,
        engine: TransferEngine,
        devices: Sequence[Device],
        stored: Stored,
        *,
        hot: int,
        most: int,
        deadline: float,
    ) -> None:
        about = self._about = stored.about
        blocks = self._blocks = about.blocks
        geometry = about.geometry
        self._engine, self._stored, self._deadline = engine, stored, deadline
        self._near = about.sinks + about.window
        each = blocks.block * blocks.entry_bytes
        kept = min(hot // (each * geometry.layers), blocks.blocks)
        self._hot = [HotBlocks(layer.often.astype(np.int64), kept) for layer in stored.layers]
        self._most = min(most, blocks.blocks)
        slots = self._near + (kept + self._most) * blocks.block
        row = (slots, 2, geometry.kv_heads, geometry.head_dim)
        dtype = getattr(torch, geometry.dtype)
        self._memory = torch.empty(geometry.layers, *row, dtype=dtype)
        """Of each layer: sinks and window, hot blocks, and those that were fetched last."""
        bytes_ = self._memory.view(torch.uint8).numpy().reshape(geometry.layers, slots, -1)
        self._near_bytes = bytes_[:, : self._near]
        in_blocks = bytes_[:, self._near :].reshape(geometry.layers, kept + self._most, -1)
        self._hot_bytes, self._fetched_bytes = in_blocks[:, :kept], in_blocks[:, kept:]
        area = mmap.mmap(-1, self._most * blocks.block_bytes)
        self._staging = np.frombuffer(area, np.uint8).reshape(self._most, blocks.block_bytes)
        self._reader = Reader(engine, devices, stored)
        self._region = engine.register(self._staging.ctypes.data, len(area), owner=area)
        self._reading: Reading | None = None
        """The latest; its memory is in use until it is finished."""
        self.fetched = self.requests = self.hits = 0
        """Blocks that were read, reads that this took, blocks that were in memory."""
        try:
            for at, layer in enumerate(stored.layers):
                self._near_bytes[at] = layer.resident
                self._fill(at, self._hot[at].held)
        except BaseException:
            self.close()
            raise
        self.fetched = self.requests = 0

    @property
    def tokens(self) -> int:
        """Of the context."""
        return self._about.tokens

    def close(self) -> None:
        """Gives memory and files back.

        Raises:
            ExtError: something is still read.
        """
        if self._reading is not None:
            self._reading.settle(self._deadline)
        self._reader.close()
        self._engine.unregister(self._region)

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
        each = blocks_of(share, self._blocks.blocks, self._blocks.devices)
        if each > self._most:
            raise ExtError(
                f"a query is given {each} blocks of the context, at most {self._most} fit into "
                "memory at once: ask for a smaller share"
            )
        parts, start = [], 0
        for some in _groups(own, min(max(self._most // each, 1), _ROWS)):
            end = start + sum(len(one.lengths) for one in some)
            asked = query[start:end]
            chosen = self._select(layer, asked, keys, some, share)
            wanted, places = self._bring(layer, chosen)
            table, contexts = self._table(layer, chosen, places, some, len(keys))
            batch = batch_of(table, range(len(table)), contexts, [1] * len(table))
            parts.append(
                native.attend(
                    batch, asked, keys, values, scale=self._about.geometry.scale,
                    elsewhere=self._memory[layer], beyond=True,
                )
            )  # fmt: skip
            start = end
        self._keep(layer, wanted, places)  # one step, be it of several groups
        return torch.cat(parts)

    def _select(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, own: Sequence[Own], share: float
    ) -> NDArray[np.int64]:
        """``[rows, blocks]``, each row's sorted."""
        blocks = self._blocks
        if share >= 1:
            return np.broadcast_to(np.arange(blocks.blocks), (len(query), blocks.blocks))
        asked = query.float()
        mass = self._stored.layers[layer].codes.mass(
            asked.numpy(), self._about.geometry.scale,
            self._beside(layer, asked, keys, own).numpy(), torch.get_num_threads(),
        )  # fmt: skip
        each = [best_blocks(row, share, block=blocks.block, devices=blocks.devices) for row in mass]
        return np.stack(each)

    def _beside(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, own: Sequence[Own]
    ) -> torch.Tensor:
        """``[rows, heads]`` logarithm of the exponentials' sum over what every row sees anyway."""
        geometry = self._about.geometry
        grouped = query.view(len(query), geometry.kv_heads, -1, geometry.head_dim) * geometry.scale
        near = self._memory[layer, : self._near, 0].float()
        found = torch.einsum("rkgd,nkd->rkgn", grouped, near).logsumexp(3)
        start = 0
        for slots, lengths in own:
            rows = slice(start, start := start + len(lengths))
            mine = keys.index_select(0, slots).float()
            logits = torch.einsum("rkgd,nkd->rkgn", grouped[rows], mine)
            hidden = torch.arange(len(slots)) >= torch.tensor(lengths)[:, None]
            logits.masked_fill_(hidden[:, None, None], -torch.inf)
            found[rows] = found[rows].logaddexp(logits.logsumexp(3))
        return found.flatten(1)

    def _bring(
        self, layer: int, chosen: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Has the chosen blocks in memory.

        Returns:
            Which they are; and ``[blocks]`` where each block lies, counted in blocks.
        """
        hot = self._hot[layer]
        wanted = np.unique(chosen)
        places = hot.place.copy()
        missing = wanted[places[wanted] < 0]
        self.hits += len(wanted) - len(missing)
        if len(missing):
            places[self._fetch(layer, missing)] = len(hot.held) + np.arange(len(missing))
        return wanted, places

    def _keep(self, layer: int, wanted: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        """Blocks that have been wanted often are hot, now that nobody reads those that they
        replace."""
        hot = self._hot[layer]
        coming = hot.step(wanted)
        source = places[coming] - len(hot.held)
        self._hot_bytes[layer, hot.place[coming]] = self._fetched_bytes[layer, source]

    def _fetch(self, layer: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Reads blocks; their numbers in the order in which they lie behind the hot ones."""
        if self._reading is not None and not self._reading.finished:
            raise DeviceError(
                f"context {self._stored.name}: a device has not answered an earlier read yet"
            )
        address = self._staging.ctypes.data
        self._reading = reading = self._reader.read(layer, numbers, address, Priority.URGENT)
        reading.wait(self._deadline)
        found = _clusters.checksums(self._staging[: len(numbers)])
        if (harmed := found != self._stored.layers[layer].sums[reading.numbers]).any():
            raise DeviceError(
                f"context {self._stored.name}: {harmed.sum()} of {len(harmed)} blocks are not what "
                "was written; store it again"
            )
        used = self._blocks.block * self._blocks.entry_bytes
        self._fetched_bytes[layer, : len(numbers)] = self._staging[: len(numbers), :used]
        self.fetched += len(numbers)
        self.requests += reading.requests
        return reading.numbers

    def _fill(self, layer: int, numbers: NDArray[np.int64]) -> None:
        """Puts blocks into the places that they are to have among the hot ones."""
        for start in range(0, len(numbers), self._most):
            some = numbers[start : start + self._most]
            found = self._fetch(layer, some)
            self._hot_bytes[layer, self._hot[layer].place[found]] = self._fetched_bytes[
                layer, : len(some)
            ]

    def _table(
        self,
        layer: int,
        chosen: NDArray[np.int64],
        places: NDArray[np.int64],
        own: Sequence[Own],
        pool: int,
    ) -> tuple[torch.Tensor, list[int]]:
        """Slots of each row in the order of the text, and how many there are."""
        block, sinks = self._blocks.block, self._about.sinks
        rows = len(chosen)
        slots = (self._near + places[chosen] * block)[:, :, None] + np.arange(block)
        tokens = self._stored.layers[layer].order.reshape(-1, block)[chosen]
        text = np.argsort(tokens.reshape(rows, -1), axis=1)
        middle = np.take_along_axis(slots.reshape(rows, -1), text, axis=1)
        end = sinks + middle.shape[1]
        begin = end + self._near - sinks
        table = np.empty((rows, begin + max(len(one.slots) for one in own)), np.int32)
        table[:, :sinks] = pool + np.arange(sinks)
        table[:, sinks:end] = pool + middle
        table[:, end:begin] = pool + np.arange(sinks, self._near)
        contexts: list[int] = []
        for one in own:
            mine = slice(len(contexts), len(contexts) + len(one.lengths))
            table[mine, begin : begin + len(one.slots)] = one.slots.numpy()
            contexts += [begin + length for length in one.lengths]
        return torch.from_numpy(table), contexts


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
