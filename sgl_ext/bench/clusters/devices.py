"""SSDs that are slowed down to a stated part of what published ones do."""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_ext.errors import ExtError
from sgl_ext.memory.runs import copy_rows, run_starts
from sgl_ext.memory.transfer import File, Lane, Priority, TransferEngine

SCALE = 400
"""Times slower than the real ones are, so that 8 of them are slower than this machine."""
_DEADLINE_S = 60.0
_CHUNK = 1 << 20


class DeviceType(NamedTuple):
    """An SSD's published figures."""

    name: str
    bytes_per_second: float
    operations_per_second: float


PM9A3 = DeviceType("PM9A3", 6.9e9, 1.1e6)
OPTANE = DeviceType("Optane 900P", 2.5e9, 0.55e6)


class Reads(NamedTuple):
    """What a query reads of a layer.

    Attributes:
        units: numbers of pieces that are dealt out to the devices in turn.
        unit_bytes: of each.
        used: bytes of entries among them that were chosen.
    """

    units: NDArray[np.int64]
    unit_bytes: int
    used: int


class Devices:
    """Some of one type; see :func:`devices`."""

    def __init__(
        self, engine: TransferEngine, lanes: list[Lane], files: list[File], area: mmap.mmap
    ) -> None:
        self._engine, self._lanes, self._files = engine, lanes, files
        self._address = np.frombuffer(area, np.uint8).ctypes.data
        self._bases = np.array([file.base for file in files], np.int64)
        self.requests = 0

    def read(self, reads: Reads) -> float:
        """Reads all of it from all devices at once; returns seconds since the first submission."""
        row, device = np.divmod(reads.units, len(self._lanes))
        order = np.lexsort((row, device))
        row, device = row[order], device[order]
        size = reads.unit_bytes
        # What follows each other on a device is one request.
        first = run_starts(device * (int(row.max(initial=0)) + 2) + row)
        lengths = np.diff(first, append=len(order))
        copies = copy_rows(
            self._bases[device[first]] + row[first] * size, self._address + first * size,
            lengths * size, 1, 0, 0,
        )  # fmt: skip
        batches = [
            (copies[mine], lane)
            for at, lane in enumerate(self._lanes)
            if (mine := device[first] == at).any()
        ]
        begin = time.perf_counter()
        tickets = [self._engine.submit(batch, lane, Priority.URGENT) for batch, lane in batches]
        try:
            for ticket in tickets:
                ticket.wait(_DEADLINE_S)
        except TimeoutError as error:  # an OSError, which would seem to be of the results' file
            raise ExtError(f"an emulated SSD did not answer: {error}") from error
        self.requests += len(copies)
        return time.perf_counter() - begin


@contextmanager
def devices(
    directory: Path, kind: DeviceType, count: int, each: int, most: int
) -> Iterator[Devices]:
    """Slowed-down SSDs with a file each; the page cache stands behind them.

    Args:
        directory: for their files, which are gone at the end.
        each: bytes of each file.
        most: bytes that are read at once.
    """
    area = mmap.mmap(-1, most)
    with TransferEngine() as engine:
        lanes: list[Lane] = []
        files: list[File] = []
        for at in range(count):
            place = directory / f"device{at}"
            place.mkdir()
            _write(place / "blocks", each)
            lane = engine.file_lane(place, direct=False)
            files.append(lane.open("blocks", each))
            lanes.append(
                engine.throttled_lane(
                    lane,
                    bytes_per_second=kind.bytes_per_second / SCALE,
                    operations_per_second=kind.operations_per_second / SCALE,
                )
            )
        address = np.frombuffer(area, np.uint8).ctypes.data
        region = engine.register(address, most, owner=area)
        try:
            yield Devices(engine, lanes, files, area)
        finally:
            engine.unregister(region)
            for file in files:
                file.close()
            for at in range(count):
                shutil.rmtree(directory / f"device{at}")


def _write(path: Path, size: int) -> None:
    with path.open("wb") as file:
        for start in range(0, size, _CHUNK):
            file.write(os.urandom(min(_CHUNK, size - start)))
