"""What is in memory of a context that lies on devices.

Its sinks and its window always; blocks that are wanted often; and those that were fetched for the
layer that is being computed, whose place the next layer's take.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_ext._native import _clusters
from sgl_ext.clusters.adaptation import HotBlocks
from sgl_ext.clusters.placement import Blocks
from sgl_ext.clusters.reader import Device, DeviceError, Reader, Reading
from sgl_ext.clusters.stored import Stored
from sgl_ext.memory.transfer import Priority, TransferEngine

_POOR = 0.5
"""Of what a layer wants, what has to be expected rightly for it to be read ahead."""
_LATELY = 0.1
"""Weight of the latest step."""
_TRIED_AGAIN = 0.001
"""What a step adds to a poor layer's share, so that it is tried again after some."""


class _Expected(NamedTuple):
    """Blocks that are on their way before they are asked for.

    Attributes:
        numbers: in the order in which they come to lie in memory.
        order: that sorts them.
    """

    layer: int
    numbers: NDArray[np.int64]
    order: NDArray[np.int64]


class _Area:
    """Memory that devices write blocks into."""

    def __init__(self, engine: TransferEngine, blocks: Blocks, most: int) -> None:
        area = mmap.mmap(-1, most * blocks.block_bytes)
        self.bytes = np.frombuffer(area, np.uint8).reshape(most, blocks.block_bytes)
        self.region = engine.register(self.bytes.ctypes.data, len(area), owner=area)
        self.reading: Reading | None = None
        """The latest; the memory is in use until it is finished."""
        self.expected: _Expected | None = None
        """What the latest is of, if nobody has asked for it yet."""

    @property
    def busy(self) -> bool:
        """Whether a device may yet write into it."""
        return self.reading is not None and not self.reading.finished


class StoredMemory:
    """Of one context.

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
        about = stored.about
        blocks = self._blocks = about.blocks
        geometry = about.geometry
        self._engine, self._stored, self._deadline = engine, stored, deadline
        self.near = about.sinks + about.window
        """Slots of sinks and window."""
        each = blocks.block * blocks.entry_bytes
        kept = min(hot // (each * geometry.layers), blocks.blocks)
        self._hot = [HotBlocks(layer.often.astype(np.int64), kept) for layer in stored.layers]
        self.most = min(most, blocks.blocks)
        self._layer = self.near + kept * blocks.block
        fetched = geometry.layers * self._layer
        slots = fetched + self.most * blocks.block
        row = (slots, 2, geometry.kv_heads, geometry.head_dim)
        self.slots = torch.empty(*row, dtype=getattr(torch, geometry.dtype))
        """``[slots, 2, kv_heads, head_dim]``: of each layer sinks, window and hot blocks; and last
        what was fetched."""
        bytes_ = self.slots.view(torch.uint8).numpy().reshape(slots, -1)
        of_layers = bytes_[:fetched].reshape(geometry.layers, self._layer, -1)
        self._hot_bytes = of_layers[:, self.near :].reshape(geometry.layers, kept, each)
        self._fetched_bytes = bytes_[fetched:].reshape(self.most, each)
        self._fetched = fetched
        self._reader = Reader(engine, devices, stored)
        self._asked = _Area(engine, blocks, self.most)
        # A layer's blocks are expected before those of the layer before it have been asked for.
        self._ahead = [_Area(engine, blocks, self.most) for _ in range(2)]
        self.requests = 0
        """Reads that devices were asked for."""
        self.hits = np.zeros(geometry.layers, np.int64)
        """Of each layer the blocks that were in memory when they were wanted."""
        self.fetched = np.zeros(geometry.layers, np.int64)
        """And those that were read then."""
        self.came = np.zeros(geometry.layers, np.int64)
        """And those that were wanted and had been expected."""
        self._covered = np.ones(geometry.layers)
        """Of what was missing, the share that had been expected lately."""
        try:
            for at, layer in enumerate(stored.layers):
                of_layers[at, : self.near] = layer.resident
                self._fill(at, self._hot[at].held)
        except BaseException:
            self.close()
            raise
        self.fetched[:] = self.requests = 0

    def first(self, layer: int) -> int:
        """The slot of the layer's first sink."""
        return layer * self._layer

    def describe(self) -> dict[str, Any]:
        """What was wanted, for ``/server_info``."""
        counts = {"fetched": self.fetched, "expected": self.came, "in_memory": self.hits}
        return {
            "requests": self.requests,
            **{name: int(each.sum()) for name, each in counts.items()},
            "by_layer": {name: each.tolist() for name, each in counts.items()},
        }

    def close(self) -> None:
        """Gives memory and files back.

        Raises:
            ExtError: something is still read.
        """
        for area in (self._asked, *self._ahead):
            if area.reading is not None:
                area.reading.cancel()
                area.reading.settle(self._deadline)
        self._reader.close()
        for area in (self._asked, *self._ahead):
            self._engine.unregister(area.region)

    def expect(self, layer: int, wanted: NDArray[np.int64]) -> None:
        """Begins to read what the layer will probably be asked for; nothing, if that cannot be.

        Args:
            wanted: blocks, none twice; of those that are not in memory at most :attr:`most`.
        """
        area = self._ahead[layer % 2]
        if area.expected is not None and area.expected.layer == layer:
            return  # another part of the forward has said so
        area.expected = None
        if self._covered[layer] < _POOR:
            self._covered[layer] += _TRIED_AGAIN
            return
        missing = wanted[self._hot[layer].place[wanted] < 0][: self.most]
        if len(missing) and not area.busy:
            with suppress(DeviceError):  # it is told of when the blocks are asked for
                reading = self._read(layer, missing, area, Priority.NORMAL)
                order = np.argsort(reading.numbers)
                area.expected = _Expected(layer, reading.numbers, order)

    def bring(self, layer: int, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        """Has blocks in memory.

        Args:
            wanted: sorted, none twice.

        Returns:
            The first slot of each.

        Raises:
            DeviceError: a block does not come.
        """
        block = self._blocks.block
        held = self._hot[layer].place[wanted]
        slots: NDArray[np.int64] = self.first(layer) + self.near + held * block
        missing = np.flatnonzero(held < 0)
        self.hits[layer] += len(wanted) - len(missing)
        numbers = wanted[missing]
        found = self._arrived(layer, numbers)
        arrived = int(np.count_nonzero(found))
        slots[missing[found]] = self._fetched + np.arange(arrived) * block
        if arrived < len(missing):
            places = arrived + self._fetch(layer, numbers[~found], arrived)
            slots[missing[~found]] = self._fetched + places * block
        return slots

    def keep(
        self,
        layer: int,
        wanted: NDArray[np.int64],
        last: NDArray[np.int64],
        slots: NDArray[np.int64],
    ) -> None:
        """Blocks that have been wanted often are hot, now that nobody reads those that they
        replace.

        Args:
            wanted: sorted, in the whole step.
            last: those that :meth:`bring` was asked for last.
            slots: what it has said of them.
        """
        hot = self._hot[layer]
        coming = hot.step(wanted, last)
        if len(coming):
            source = slots[np.searchsorted(last, coming)] - self._fetched
            taken = self._fetched_bytes[source // self._blocks.block]
            self._hot_bytes[layer, hot.place[coming]] = taken

    def _arrived(self, layer: int, missing: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the missing blocks were expected; they are the first fetched ones now."""
        area, none = self._ahead[layer % 2], np.zeros(len(missing), bool)
        expected, reading = area.expected, area.reading
        if expected is None or reading is None or expected.layer != layer:
            return none
        area.expected = None
        if not len(missing):
            return none
        try:
            reading.wait(self._deadline)
        except DeviceError:
            if area.busy:
                raise  # nor will the device answer when it is asked once more
            return none  # they are asked for once more, and the device says what is wrong
        at = np.searchsorted(expected.numbers[expected.order], missing)
        rows = expected.order[np.minimum(at, len(expected.order) - 1)]
        found: NDArray[np.bool_] = expected.numbers[rows] == missing
        self._take(layer, missing[found], area.bytes[rows[found]], 0)
        self.came[layer] += np.count_nonzero(found)
        self._covered[layer] += _LATELY * (found.mean() - self._covered[layer])
        return found

    def _fetch(self, layer: int, numbers: NDArray[np.int64], behind: int) -> NDArray[np.int64]:
        """Reads blocks.

        Args:
            numbers: sorted.
            behind: so many that have been fetched.

        Returns:
            Of each, how many of them lie before it.
        """
        area = self._asked
        if area.busy:
            raise DeviceError(
                f"context {self._stored.name}: a device has not answered an earlier read yet"
            )
        reading = self._read(layer, numbers, area, Priority.URGENT)
        reading.wait(self._deadline)
        self._take(layer, reading.numbers, area.bytes[: len(numbers)], behind)
        self.fetched[layer] += len(numbers)
        return np.argsort(reading.numbers)

    def _read(
        self, layer: int, numbers: NDArray[np.int64], area: _Area, priority: Priority
    ) -> Reading:
        area.reading = reading = self._reader.reading(layer, numbers, area.bytes.ctypes.data)
        reading.begin(priority)
        self.requests += reading.requests
        return reading

    def _take(
        self, layer: int, numbers: NDArray[np.int64], blocks: NDArray[np.uint8], behind: int
    ) -> None:
        """Blocks as they were read, into the places of fetched ones behind the first so many."""
        found = _clusters.checksums(np.ascontiguousarray(blocks))
        if (harmed := found != self._stored.layers[layer].sums[numbers]).any():
            raise DeviceError(
                f"context {self._stored.name}: {harmed.sum()} of {len(harmed)} blocks are not what "
                "was written; store it again"
            )
        used = self._blocks.block * self._blocks.entry_bytes
        self._fetched_bytes[behind : behind + len(numbers)] = blocks[:, :used]

    def _fill(self, layer: int, numbers: NDArray[np.int64]) -> None:
        """Puts blocks into the places that they are to have among the hot ones."""
        for start in range(0, len(numbers), self.most):
            some = np.sort(numbers[start : start + self.most])
            places = self._fetch(layer, some, 0)
            self._hot_bytes[layer, self._hot[layer].place[some]] = self._fetched_bytes[places]
