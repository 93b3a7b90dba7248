"""Reader of a context's blocks, from all its devices in parallel (Swarm §6.1, §7)."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sgl_ext.clusters.placement import SECTOR
from sgl_ext.clusters.stored import Stored
from sgl_ext.errors import ExtError, reason_of
from sgl_ext.memory.lanes import File
from sgl_ext.memory.runs import copy_rows, run_starts
from sgl_ext.memory.transfer import (
    FileLane,
    Lane,
    Priority,
    Ticket,
    TransferCancelledError,
    TransferEngine,
    TransferError,
)

_SETTLE_S = 10.0


class DeviceError(ExtError):
    """Error of devices: a read was refused, failed, is late, or gave damaged blocks.

    Attributes:
        devices: Numbers of the devices at fault; empty if they are not known.
    """

    status = 503

    def __init__(self, message: str, devices: Collection[int] = ()) -> None:
        super().__init__(message)
        self.devices = frozenset(devices)


@dataclass(frozen=True)
class Device:
    """Device with files of contexts, and the lanes that open and read them.

    Attributes:
        number: Index in ``clusters.directories``, from 0; clients see it instead of the path.
        directory: Folder of the files.
        files: Lane that opens the files.
        lane: Lane that reads the files; differs from ``files`` if it is throttled.
    """

    number: int
    directory: Path
    files: FileLane
    lane: Lane


class Reading:
    """Read of blocks, prepared or in progress.

    Attributes:
        numbers: Blocks in their order in memory, ``[blocks]``.
        requests: Number of reads that are submitted to the devices.
    """

    def __init__(
        self,
        engine: TransferEngine,
        numbers: NDArray[np.int64],
        parts: Sequence[tuple[Device, NDArray[np.int64]]],
    ) -> None:
        self.numbers = numbers
        self.requests = sum(len(rows) for _, rows in parts)
        self._engine, self._parts = engine, parts
        self._tickets: dict[Ticket, Device] = {}

    def begin(self, priority: Priority) -> None:
        """Submits the reads to all devices.

        Raises:
            DeviceError: A read is refused. Reads that other devices have begun may use the memory
                until :attr:`finished`.
        """
        try:
            for device, rows in self._parts:
                self._tickets[self._engine.submit(rows, device.lane, priority)] = device
        except (ExtError, ValueError) as error:
            self.cancel()
            self.settle(_SETTLE_S)
            raise DeviceError(
                f"a read from device {device.number} was refused: {error}; try again later",
                (device.number,),
            ) from None

    @property
    def finished(self) -> bool:
        """True if the memory is no longer in use, however the reads ended."""
        return all(ticket.poll() for ticket in self._tickets)

    def wait(self, deadline: float) -> None:
        """Waits until all blocks are in memory.

        Args:
            deadline: Seconds from now.

        Raises:
            DeviceError: A read failed or is late. Reads that have not started are cancelled. If a
                device is late, the memory is in use until :attr:`finished`.
        """
        end = time.monotonic() + deadline
        try:
            for ticket, device in self._tickets.items():
                self._wait(ticket, device, max(end - time.monotonic(), 0.0))
        except DeviceError:
            self.cancel()
            self.settle(end - time.monotonic())  # the memory is reused
            raise

    def settle(self, deadline: float) -> None:
        """Waits until no read is in progress, for at most ``deadline`` seconds."""
        end = time.monotonic() + deadline
        for ticket in self._tickets:
            with suppress(OSError, ExtError):  # TimeoutError is an OSError
                ticket.wait(max(end - time.monotonic(), 0.0))

    def cancel(self) -> None:
        """Cancels the reads that have not started."""
        for ticket in self._tickets:
            ticket.cancel()

    def _wait(self, ticket: Ticket, device: Device, timeout: float) -> None:
        try:
            ticket.wait(timeout)
        except TimeoutError:
            raise DeviceError(
                f"device {device.number} returned {ticket.bytes_done:,} of {ticket.bytes_total:,} "
                "B of a context before the deadline; check the device",
                (device.number,),
            ) from None
        except TransferError as error:
            raise DeviceError(
                f"device {device.number} cannot be read: {error.strerror}; check the device, or "
                "store the context again",
                (device.number,),
            ) from None
        except TransferCancelledError:
            raise DeviceError(
                f"a read from device {device.number} was cancelled; try again later"
            ) from None


class Reader:
    """Files of a context, open for reading.

    Args:
        devices: Devices, in the order of the context's files.

    Raises:
        ExtError: A file cannot be opened, or its alignment does not divide :data:`SECTOR`.
    """

    def __init__(self, engine: TransferEngine, devices: Sequence[Device], stored: Stored) -> None:
        self._engine, self._devices = engine, devices
        self._blocks = stored.about.blocks
        self.lost: frozenset[int] = frozenset()
        """Devices whose blocks are read from their copies on other devices."""
        self._files: dict[int, File] = {}
        sizes = self._blocks.file_bytes
        for at, path in enumerate(stored.files):
            device = devices[at % len(devices)]
            try:
                if device.number in stored.lost:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
                self._files[at] = device.files.open(path.relative_to(device.directory), sizes[at])
            except (OSError, ValueError) as error:
                if self.lose((device.number,)):
                    continue
                self.close()
                raise ExtError(
                    f"context {stored.name} cannot be read: {reason_of(error)}; store it again"
                ) from None
        alignments = [max(file.alignment) for file in self._files.values()]
        odd = next((each for each in alignments if SECTOR % each), None)
        if odd is not None:
            self.close()
            raise ExtError(
                f"context {stored.name} is on a device whose alignment for direct I/O, "
                f"{odd:,} B, does not divide {SECTOR:,} B; store it on another device"
            )
        self._bases = np.zeros(len(stored.files), np.int64)
        for number, file in self._files.items():
            self._bases[number] = file.base

    def lose(self, devices: Collection[int]) -> bool:
        """Reads no more blocks from some devices; returns False if there are not enough copies."""
        lost = self.lost | frozenset(devices)
        if not devices or len(lost) >= self._blocks.copies:
            return False
        self.lost = lost
        return True

    def devices_of(self, layer: int, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the device that each of the blocks ``numbers`` of a layer is read from."""
        return self._place(layer, numbers)[0] % len(self._devices)

    def _place(
        self, layer: int, numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the file and the offset in it that each block is read from."""
        file, offset = self._blocks.place(layer, numbers)
        if self.lost:
            copy = np.isin(file % len(self._devices), [*self.lost]).astype(np.int64)
            file, offset = self._blocks.place(layer, numbers, copy)
        return file, offset

    def reading(self, layer: int, numbers: NDArray[np.int64], address: int) -> Reading:
        """Prepares a read of blocks of a layer.

        Args:
            numbers: Numbers of the blocks, without duplicates.
            address: Address of registered memory for all of them, aligned to :data:`SECTOR`.
        """
        file, offset = self._place(layer, numbers)
        size = self._blocks.block_bytes
        place = file * (max(self._blocks.file_bytes) // size + 1) + offset // size
        order = np.argsort(place)
        file, offset = file[order], offset[order]
        # Blocks that are consecutive in a file are consecutive in memory and form one request.
        first = run_starts(place[order])
        lengths = np.diff(first, append=len(order))
        rows = copy_rows(
            self._bases[file[first]] + offset[first], address + first * size, lengths * size,
            1, 0, 0,
        )  # fmt: skip
        of = file[first] % len(self._devices)
        parts = [(one, rows[of == at]) for at, one in enumerate(self._devices) if (of == at).any()]
        return Reading(self._engine, numbers[order], parts)

    def close(self) -> None:
        """Closes the files; see :meth:`TransferEngine.release` for reads in progress."""
        self._engine.release(*self._files.values())
        self._files.clear()
