"""Simulated CUDA device: work on streams, random schedules, and a check that accesses are ordered.

Build its library with :func:`transfer_kit.fake_cuda`, and pass the same path to the code under
test. Races are found by the order of calls, whatever the schedule was; what jobs wrote can be
compared as well. All threads of the host count as one: a device does not see how they synchronize.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import numpy as np
from fake_cuda import DEFAULT_KIND, NOT_READY, Access, CudaError, Handle, Size, load
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
# Address and bytes; or address, bytes of a row, rows, and bytes from one row to the next.
Range = tuple[int, int] | tuple[int, int, int, int]


class SimulatedDevice:
    """The device of one library, and the streams, events and memory that a test uses there.

    As a context manager it synchronizes the device at the end, checks that there were no races,
    and resets the device; after an exception it only resets it. A test of races takes
    :attr:`races` and calls :meth:`reset` itself.

    Args:
        library: path from :func:`transfer_kit.fake_cuda`.
        seed: of the schedules; 0 executes each job as soon as its stream reaches it.
    """

    LEGACY = 0  # the default stream

    def __init__(self, library: Path, seed: int = 0) -> None:
        self.fake = load(library)
        self._streams: list[int] = []
        self._events: list[int] = []
        self._memory: dict[int, tuple[Bytes, bool]] = {}  # by address; whether on the device
        self.seed(seed)

    def __enter__(self) -> SimulatedDevice:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        try:
            self.synchronize()
            if error is None:
                self.assert_no_races()
        finally:
            self.close()

    def close(self) -> None:
        """Resets the device, and frees the streams, events and memory of this object."""
        self.reset()
        for stream in self._streams:
            self._call("cudaStreamDestroy", stream)
        for event in self._events:
            self._call("cudaEventDestroy", event)
        for array, on_device in list(self._memory.values()):
            if on_device:
                self.free(array)
            else:
                self.unregister(array)
        self._streams, self._events = [], []

    def reset(self) -> None:
        """Synchronizes the device, and forgets races, names, failures, counts and the seed."""
        self.fake.fake_reset()

    def seed(self, seed: int) -> None:
        """Draws the schedules of the next jobs from a seed; 0 ends random schedules."""
        self.fake.fake_seed(seed)

    def _call(self, function: str, *arguments: object) -> None:
        if code := getattr(self.fake, function)(*arguments):
            raise CudaError(function, code)

    # Streams and events are handles, as in CUDA.

    def stream(self, priority: int = 0) -> int:
        handle = Handle()
        self._call("cudaStreamCreateWithPriority", ctypes.byref(handle), 1, priority)
        assert handle.value is not None
        self._streams.append(handle.value)
        return handle.value

    def event(self, *, timing: bool = False) -> int:
        handle = Handle()
        self._call("cudaEventCreateWithFlags", ctypes.byref(handle), 0 if timing else 2)
        assert handle.value is not None
        self._events.append(handle.value)
        return handle.value

    def destroy_event(self, event: int) -> None:
        self._events.remove(event)
        self._call("cudaEventDestroy", event)

    def record(self, stream: int, event: int | None = None) -> int:
        """Records an event, a new one by default, and returns it."""
        event = self.event() if event is None else event
        self._call("cudaEventRecord", event, stream)
        return event

    def wait(self, stream: int, event: int) -> None:
        """Has the stream wait for the event."""
        self._call("cudaStreamWaitEvent", stream, event, 0)

    def synchronize(self, *, stream: int | None = None, event: int | None = None) -> None:
        """Waits for a stream or an event, by default for the device."""
        if event is not None:
            self._call("cudaEventSynchronize", event)
        elif stream is not None:
            self._call("cudaStreamSynchronize", stream)
        else:
            self._call("cudaDeviceSynchronize")

    def query(self, *, stream: int | None = None, event: int | None = None) -> bool:
        """Returns whether a stream or an event is complete."""
        name, handle = ("cudaStreamQuery", stream) if event is None else ("cudaEventQuery", event)
        code = getattr(self.fake, name)(handle)
        if code not in (0, NOT_READY):
            raise CudaError(name, code)
        return bool(code == 0)

    def elapsed_ms(self, start: int, end: int) -> float:
        found = ctypes.c_float()
        self._call("cudaEventElapsedTime", ctypes.byref(found), start, end)
        return found.value

    def kernel(
        self,
        stream: int,
        reads: Iterable[Range] = (),
        writes: Iterable[Range] = (),
        *,
        fill: int = 0,
    ) -> int:
        """Launches a kernel that fills what it writes with the 8 bytes of ``fill``, row by row."""
        accesses = [_access(r, 0) for r in reads] + [_access(w, 1) for w in writes]
        array = (Access * len(accesses))(*accesses)
        number = int(self.fake.fake_kernel(stream, array, len(accesses), fill))
        if number < 0:
            raise CudaError("fake_kernel", 400)
        return number

    def result(self, kernel: int) -> int:
        """Returns the CRC-32 of the bytes that a complete kernel read; see :func:`checksum`."""
        return int(self.fake.fake_result(kernel))

    def copy(self, stream: int, dst: int, src: int, size: int) -> None:
        self._call("cudaMemcpyAsync", dst, src, size, DEFAULT_KIND, stream)

    def copy_rows(
        self, stream: int, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int, rows: int
    ) -> None:
        self._call(
            "cudaMemcpy2DAsync", dst, dst_pitch, src, src_pitch, width, rows, DEFAULT_KIND, stream
        )

    def copy_batch(
        self, stream: int, copies: list[tuple[int, int, int]], *, any_order: bool = False
    ) -> None:
        """Enqueues copies ``(dst, src, size)``, whose sources may be read ahead of the stream."""
        count = len(copies)
        dsts, srcs, sizes = ((Size * count)(*column) for column in zip(*copies, strict=True))
        attributes = (ctypes.c_int * 6)(3 if any_order else 1)
        first = (Size * 1)(0)
        self._call("cudaMemcpyBatchAsync", dsts, srcs, sizes, count, attributes, first, 1, stream)

    @contextmanager
    def tagged(self, text: str) -> Iterator[None]:
        """Names the jobs that this thread enqueues meanwhile, in descriptions of races."""
        self.fake.fake_tag(text.encode())
        try:
            yield
        finally:
            self.fake.fake_tag(b"")

    def hold(self, *, copies: bool = False, kernels: bool = False) -> None:
        """Holds back the jobs that have not started; with neither, releases them."""
        self.fake.fake_hold(copies + 2 * kernels)

    # Memory

    def memory(self, size: int, name: str = "") -> Bytes:
        """Returns zeros that take the place of device memory."""
        array = np.zeros(size, np.uint8)
        self.fake.fake_device_memory(array.ctypes.data, size)
        return self._own(array, name, on_device=True)

    def host(self, size: int, name: str = "") -> Bytes:
        """Returns zeros in registered host memory."""
        array = np.zeros(size, np.uint8)
        self._call("cudaHostRegister", array.ctypes.data, size, 0)
        return self._own(array, name, on_device=False)

    def _own(self, array: Bytes, name: str, *, on_device: bool) -> Bytes:
        self._memory[array.ctypes.data] = (array, on_device)
        if name:
            self.fake.fake_name(array.ctypes.data, array.nbytes, name.encode())
        return array

    def unregister(self, array: Bytes) -> None:
        self._memory.pop(array.ctypes.data, None)
        self._call("cudaHostUnregister", array.ctypes.data)

    def free(self, array: Bytes) -> None:
        """Declares that the host frees the memory."""
        self._memory.pop(array.ctypes.data, None)
        self.fake.fake_free(array.ctypes.data, array.nbytes)

    def host_reads(self, address: int, size: int) -> None:
        self.fake.fake_host_access(address, size, 0)

    def host_writes(self, address: int, size: int) -> None:
        self.fake.fake_host_access(address, size, 1)

    # Findings

    @property
    def race_count(self) -> int:
        return int(self.fake.fake_races())

    @property
    def races(self) -> list[str]:
        """Descriptions of the first 1,000 races, and of memory that was freed too early."""
        found: list[str] = []
        while (text := self.fake.fake_race(len(found))) is not None:
            found.append(text.decode())
        return found

    def assert_no_races(self) -> None:
        if found := self.races:
            raise AssertionError("\n".join([f"{self.race_count} races", *found[:20]]))

    @property
    def pageable_copies(self) -> int:
        """Number of copies from or to memory that is neither registered nor on the device."""
        return int(self.fake.fake_pageable_copies())

    @property
    def registered_bytes(self) -> int:
        return int(self.fake.fake_registered_bytes())


def at(array: Bytes, start: int = 0, end: int | None = None) -> Range:
    """Returns the range of ``array[start:end]``."""
    return array.ctypes.data + start, (array.nbytes if end is None else end) - start


def checksum(*parts: Bytes) -> int:
    """Returns what :meth:`SimulatedDevice.result` does for a kernel that reads these bytes."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part.tobytes(), crc)
    return crc


def pattern(fill: int, size: int) -> Bytes:
    """Returns the bytes that a kernel writes to a row."""
    return np.full(-(-size // 8), fill, np.uint64).view(np.uint8)[:size]


def _access(range_: Range, write: int) -> Access:
    base, width, *rest = range_
    height, pitch = rest or (1, width)
    return Access(base, width, height, pitch, write)
