"""Reads blocks of a context from all its devices at once (Swarm §6.1, §7)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sgl_ext.clusters.placement import SECTOR
from sgl_ext.clusters.stored import Stored
from sgl_ext.errors import ExtError, reason_of
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
    """A device did not give what was asked for: which one, what, and why."""


@dataclass(frozen=True)
class Device:
    """Where files of contexts are, and what reads them.

    Attributes:
        number: among ``clusters.directories``, from 0; clients are told it, not the directory.
        files: opens them.
        lane: reads them; another one than ``files`` if it is slowed down.
    """

    number: int
    directory: Path
    files: FileLane
    lane: Lane


class Reading:
    """Blocks that are to be read, or on their way.

    Attributes:
        numbers: ``[blocks]``, in the order in which they come to lie in memory.
        requests: reads that the devices are asked for.
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
        """Asks all devices at once.

        Raises:
            DeviceError: one refuses. What others have begun may use the memory until
                :attr:`finished`.
        """
        try:
            for device, rows in self._parts:
                self._tickets[self._engine.submit(rows, device.lane, priority)] = device
        except (ExtError, ValueError) as error:
            self.cancel()
            self.settle(_SETTLE_S)
            raise DeviceError(f"a read was refused: {error}") from None

    @property
    def finished(self) -> bool:
        """Whether the memory is in use no more, however the reads ended."""
        return all(ticket.poll() for ticket in self._tickets)

    def wait(self, deadline: float) -> None:
        """Until all blocks are there.

        Args:
            deadline: seconds from now.

        Raises:
            DeviceError: they will not come. What has not started is cancelled; if a device is
                late, the memory is in use until :attr:`finished`.
        """
        end = time.monotonic() + deadline
        try:
            for ticket, device in self._tickets.items():
                self._wait(ticket, device, max(end - time.monotonic(), 0.0))
        except DeviceError:
            self.cancel()
            self.settle(end - time.monotonic())  # for the memory is used again
            raise

    def settle(self, deadline: float) -> None:
        """Until nothing is under way any more, or so many seconds."""
        end = time.monotonic() + deadline
        for ticket in self._tickets:
            with suppress(OSError, ExtError):  # TimeoutError is an OSError
                ticket.wait(max(end - time.monotonic(), 0.0))

    def cancel(self) -> None:
        """What has not started is not read."""
        for ticket in self._tickets:
            ticket.cancel()

    def _wait(self, ticket: Ticket, device: Device, timeout: float) -> None:
        try:
            ticket.wait(timeout)
        except TimeoutError:
            raise DeviceError(
                f"device {device.number} gave {ticket.bytes_done:,} of {ticket.bytes_total:,} B of "
                "a context in time; is the device still there?"
            ) from None
        except TransferError as error:
            raise DeviceError(f"device {device.number} cannot be read: {error.strerror}") from None
        except TransferCancelledError:
            raise DeviceError(f"reading from device {device.number} was given up") from None


class Reader:
    """The files of a context, open for reading.

    Args:
        devices: in the order of the context's files.

    Raises:
        ExtError: a file cannot be opened.
    """

    def __init__(self, engine: TransferEngine, devices: Sequence[Device], stored: Stored) -> None:
        self._engine, self._devices = engine, devices
        self._blocks = stored.about.blocks
        self._files = []
        try:
            for device, path in zip(devices, stored.files, strict=True):
                self._files.append(
                    device.files.open(path.relative_to(device.directory), self._blocks.file_bytes)
                )
        except (OSError, ValueError) as error:
            self.close()
            raise ExtError(f"context {stored.name} cannot be read: {reason_of(error)}") from None
        odd = next((file.alignment for file in self._files if SECTOR % max(file.alignment)), None)
        if odd is not None:
            self.close()
            raise ExtError(f"context {stored.name} lies on a device that reads {odd} B at a time")
        self._bases = np.array([file.base for file in self._files], np.int64)

    def reading(self, layer: int, numbers: NDArray[np.int64], address: int) -> Reading:
        """Blocks of a layer, to be read.

        Args:
            numbers: of the blocks, none twice.
            address: of registered memory for all of them, aligned to a sector.
        """
        device, offset = self._blocks.place(layer, numbers)
        size = self._blocks.block_bytes
        place = device * (self._blocks.file_bytes // size + 1) + offset // size
        order = np.argsort(place)
        device, offset = device[order], offset[order]
        # Blocks that follow each other on a device do so in memory, and are one request.
        first = run_starts(place[order])
        lengths = np.diff(first, append=len(order))
        rows = copy_rows(
            self._bases[device[first]] + offset[first], address + first * size, lengths * size,
            1, 0, 0,
        )  # fmt: skip
        of = device[first]
        parts = [(one, rows[of == at]) for at, one in enumerate(self._devices) if (of == at).any()]
        return Reading(self._engine, numbers[order], parts)

    def close(self) -> None:
        """Closes the files.

        Raises:
            ExtError: something is still read.
        """
        while self._files:
            self._files[-1].close()
            self._files.pop()
