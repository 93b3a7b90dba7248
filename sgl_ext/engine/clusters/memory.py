"""Memory of a context that is stored on devices.

It always holds the sinks, the window, and frequently selected (hot) blocks of each layer. It also
holds the blocks that were fetched for the current layer, which those of the next layer replace.
Blocks that are full are read to where the attention reads them. Others end with padding between two
slots, so that their entries are copied.
"""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_ext._native import _clusters
from sgl_ext.clusters.adaptation import HotBlocks
from sgl_ext.clusters.coverage import Coverage
from sgl_ext.clusters.placement import SECTOR
from sgl_ext.clusters.reader import Device, DeviceError, Reader, Reading
from sgl_ext.clusters.stored import Stored
from sgl_ext.engine.clusters.areas import Area, Prefetched
from sgl_ext.memory.transfer import Priority, TransferEngine

logger = logging.getLogger(__name__)


class StoredMemory:
    """Memory of one context.

    Args:
        engine: transfer engine that reads the blocks; the memory is registered with it.
        devices: devices that hold the blocks.
        stored: the context.
        hot: bytes of the blocks of all layers that are kept in memory.
        most: maximum number of blocks of a layer that are fetched at once.
        deadline: deadline for reading the blocks of a layer, in seconds.

    Raises:
        ExtError: the context's files cannot be opened or read.
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
        """Number of slots of the sinks and the window of a layer."""
        each = blocks.block * blocks.entry_bytes
        kept = min(hot // (each * geometry.layers), blocks.blocks)
        self._hot = [HotBlocks(layer.often.astype(np.int64), kept) for layer in stored.layers]
        self.most = min(most, blocks.blocks)
        self._layer = self.near + kept * blocks.block
        unit = SECTOR // math.gcd(SECTOR, blocks.entry_bytes)
        self._fetched = -(-geometry.layers * self._layer // unit) * unit
        # Room for copies, and for blocks that are read in place; what is not used takes no memory.
        slots = self._fetched + 4 * self.most * blocks.block
        memory = mmap.mmap(-1, slots * blocks.entry_bytes)
        bytes_ = np.frombuffer(memory, np.uint8).reshape(slots, -1)
        row = (slots, 2, geometry.kv_heads, geometry.head_dim)
        self.slots = torch.from_numpy(bytes_).view(getattr(torch, geometry.dtype)).view(row)
        """K and V, ``[slots, 2, kv_heads, head_dim]``: sinks, window and hot blocks of each layer,
        and then the fetched blocks."""
        of_layers = bytes_[: geometry.layers * self._layer]
        of_layers = of_layers.reshape(geometry.layers, self._layer, -1)
        self._hot_bytes = of_layers[:, self.near :].reshape(geometry.layers, kept, each)
        self._fetched_bytes = bytes_[self._fetched :].reshape(4 * self.most, each)
        self._reader = Reader(engine, devices, stored)
        if self._reader.lost:
            self._log_lost("a file is missing")

        def area(number: int) -> Area:
            if each != blocks.block_bytes:
                return Area.apart(engine, blocks, self.most)
            some = self._fetched_bytes[number * self.most : (number + 1) * self.most]
            first = self._fetched + number * self.most * blocks.block
            return Area(engine, some, memory, first)

        self._asked = area(1)
        # Two areas, because a layer is prefetched before the previous layer's blocks are wanted.
        self._ahead = [area(2), area(3)]
        self._late: list[Area] = []
        """Memory that lost devices may still write into."""
        self.requests = 0
        """Number of reads that were submitted to devices."""
        self.hits = np.zeros(geometry.layers, np.int64)
        """Blocks of each layer that were in memory when they were wanted, int64 ``[layers]``."""
        self.fetched = np.zeros(geometry.layers, np.int64)
        """Blocks of each layer that were read when they were wanted, int64 ``[layers]``."""
        self.prefetched = np.zeros(geometry.layers, np.int64)
        """Blocks of each layer that were prefetched before they were wanted, int64 ``[layers]``."""
        self._coverage = [Coverage() for _ in stored.layers]
        try:
            for at, layer in enumerate(stored.layers):
                of_layers[at, : self.near] = layer.resident
                self._fill(at, self._hot[at].held)
        except BaseException:
            self.close()
            raise
        self.fetched[:] = self.requests = 0

    def first(self, layer: int) -> int:
        """Returns the slot of the layer's first sink."""
        return layer * self._layer

    @property
    def lost(self) -> int:
        """Number of devices that are given up."""
        return len(self._reader.lost)

    def describe(self) -> dict[str, object]:
        """Returns the numbers of reads and of wanted blocks, for ``/server_info``."""
        counts = {"fetched": self.fetched, "prefetched": self.prefetched, "in_memory": self.hits}
        return {
            "requests": self.requests,
            "lost": sorted(self._reader.lost),
            **{name: int(each.sum()) for name, each in counts.items()},
            "by_layer": {name: each.tolist() for name, each in counts.items()},
        }

    def close(self) -> None:
        """Cancels reads, waits for those in progress until the deadline, and releases memory and
        files.

        What a device does not give back in time is released by a later call of
        :meth:`TransferEngine.release`.
        """
        areas = (self._asked, *self._ahead, *self._late)
        for area in areas:
            if area.reading is not None:
                area.reading.cancel()
                area.reading.settle(self._deadline)
        if any(area.busy for area in areas):
            logger.error(
                "context %s is closed, but a device does not respond: memory and files that it "
                "uses are freed when it does", self._stored.name,
            )  # fmt: skip
        self._reader.close()
        self._engine.release(*(area.region for area in areas))

    def prefetch(self, layer: int, wanted: NDArray[np.int64]) -> None:
        """Starts to read the blocks that a layer will probably need.

        Does nothing if few blocks of the layer were prefetched lately, the area is in use, or the
        read is refused.

        Args:
            wanted: blocks, without duplicates. Of those that are not in memory, the first
                :attr:`most` are read.
        """
        area = self._ahead[layer % 2]
        if area.prefetched is not None and area.prefetched.layer == layer:
            return  # another part of the forward has called it already
        area.prefetched = None
        if not self._coverage[layer].step():
            return
        missing = wanted[self._hot[layer].place[wanted] < 0][: self.most]
        if len(missing) and not area.busy:
            with suppress(DeviceError):  # reported when the blocks are wanted
                reading = self._read(layer, missing, area, Priority.NORMAL)
                order = np.argsort(reading.numbers)
                area.prefetched = Prefetched(layer, reading.numbers, order)

    def bring(self, layer: int, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        """Brings blocks into memory.

        Args:
            wanted: blocks, sorted, without duplicates.

        Returns:
            The first slot of each block, int64 ``[blocks]``.

        Raises:
            DeviceError: a block cannot be read, is late, or is damaged.
        """
        block = self._blocks.block
        held = self._hot[layer].place[wanted]
        slots: NDArray[np.int64] = self.first(layer) + self.near + held * block
        missing = np.flatnonzero(held < 0)
        self.hits[layer] += len(wanted) - len(missing)
        slots[missing] = arrived = self._arrived(layer, wanted[missing])
        if len(rest := missing[arrived < 0]):
            slots[rest] = self._fetch(layer, wanted[rest], len(missing) - len(rest))
        return slots

    def keep(
        self,
        layer: int,
        wanted: NDArray[np.int64],
        last: NDArray[np.int64],
        slots: NDArray[np.int64],
    ) -> None:
        """Replaces hot blocks by fetched ones that are selected more often.

        Call it when the hot blocks of the layer are no longer read in this step.

        Args:
            wanted: blocks that the whole step wanted, sorted.
            last: blocks of the latest call of :meth:`bring`, sorted.
            slots: result of that call.
        """
        hot = self._hot[layer]
        coming = hot.step(wanted, last)
        if len(coming):
            source = slots[np.searchsorted(last, coming)] - self._fetched
            taken = self._fetched_bytes[source // self._blocks.block]
            self._hot_bytes[layer, hot.place[coming]] = taken

    def _arrived(self, layer: int, missing: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the first slot of each missing block that was prefetched, -1 for others.

        Raises:
            DeviceError: a device is late, or a block is damaged.
        """
        area, none = self._ahead[layer % 2], np.full(len(missing), -1)
        prefetched, reading = area.prefetched, area.reading
        if prefetched is None or reading is None or prefetched.layer != layer:
            return none
        area.prefetched = None
        if not len(missing):
            return none
        try:
            reading.wait(self._deadline)
        except DeviceError as error:
            if area.busy:  # another read from the device would be late as well
                if not self._lose(error):
                    raise
                self._ahead[layer % 2] = self._instead_of(area)
            return none  # the blocks are read again, and that read raises the error
        at = np.searchsorted(prefetched.numbers[prefetched.order], missing)
        rows = prefetched.order[np.minimum(at, len(prefetched.order) - 1)]
        found: NDArray[np.bool_] = prefetched.numbers[rows] == missing
        slots = none.copy()
        try:
            slots[found] = self._take(layer, missing[found], area, rows[found], 0)
        except DeviceError as error:
            if not self._lose(error):
                raise
            return none
        self.prefetched[layer] += np.count_nonzero(found)
        self._coverage[layer].observe(float(found.mean()))
        return slots

    def _fetch(self, layer: int, numbers: NDArray[np.int64], behind: int) -> NDArray[np.int64]:
        """Reads blocks.

        Args:
            numbers: numbers of the blocks, sorted.
            behind: number of blocks that are already fetched for the layer.

        Returns:
            First slot of each block, int64 ``[blocks]``.
        """
        while True:
            area = self._asked
            if area.busy:
                raise DeviceError(
                    f"context {self._stored.name}: an earlier read from a device is still pending; "
                    "try again later"
                )
            try:
                reading = self._read(layer, numbers, area, Priority.URGENT)
                reading.wait(self._deadline)
                rows = np.argsort(reading.numbers)
                slots = self._take(layer, numbers, area, rows, behind)
                break
            except DeviceError as error:
                if not self._lose(error):
                    raise
                if self._asked.busy:
                    self._asked = self._instead_of(area)
        self.fetched[layer] += len(numbers)
        return slots

    def _lose(self, error: DeviceError) -> bool:
        """Reads the blocks of the devices at fault from their copies from now on.

        Returns:
            False if there are no copies of these blocks.
        """
        if not self._reader.lose(error.devices):
            return False
        for area in self._ahead:  # may have been read from these devices
            area.prefetched = None
        self._log_lost(str(error))
        return True

    def _instead_of(self, late: Area) -> Area:
        """Returns new memory for reads, in place of memory that a lost device may write into."""
        self._late.append(late)
        return Area.apart(self._engine, self._blocks, self.most)

    def _log_lost(self, why: str) -> None:
        logger.warning(
            "context %s: device %s is lost, and its blocks are read from their copies: %s",
            self._stored.name, ", ".join(map(str, sorted(self._reader.lost))), why,
        )  # fmt: skip

    def _read(
        self, layer: int, numbers: NDArray[np.int64], area: Area, priority: Priority
    ) -> Reading:
        area.reading = reading = self._reader.reading(layer, numbers, area.bytes.ctypes.data)
        reading.begin(priority)
        self.requests += reading.requests
        return reading

    def _take(
        self,
        layer: int,
        numbers: NDArray[np.int64],
        area: Area,
        rows: NDArray[np.int64],
        behind: int,
    ) -> NDArray[np.int64]:
        """Verifies blocks that were read, and copies them if the attention cannot read them there.

        Args:
            numbers: numbers of the blocks.
            rows: their rows in the area.
            behind: number of blocks that are already fetched for the layer.

        Returns:
            First slot of each block, int64 ``[blocks]``.

        Raises:
            DeviceError: a checksum differs.
        """
        found = _clusters.checksums(area.bytes, rows)
        if (wrong := found != self._stored.layers[layer].sums[numbers]).any():
            raise DeviceError(
                f"context {self._stored.name}: {wrong.sum()} of {len(wrong)} blocks are damaged "
                "(their checksums differ); store it again",
                self._reader.devices_of(layer, numbers[wrong]).tolist(),
            )
        block = self._blocks.block
        if area.first is not None:
            return area.first + rows * block
        used = block * self._blocks.entry_bytes
        self._fetched_bytes[behind : behind + len(rows)] = area.bytes[rows, :used]
        return self._fetched + (behind + np.arange(len(rows))) * block

    def _fill(self, layer: int, numbers: NDArray[np.int64]) -> None:
        """Reads blocks into their places among the hot ones."""
        for start in range(0, len(numbers), self.most):
            some = np.sort(numbers[start : start + self.most])
            rows = (self._fetch(layer, some, 0) - self._fetched) // self._blocks.block
            self._hot_bytes[layer, self._hot[layer].place[some]] = self._fetched_bytes[rows]
