"""Transfer engine: batches of copies between memory, devices and files, with one ticket per batch.

``engine.submit(copies, lane, priority)`` validates a whole batch, queues it on a lane and returns a
:class:`Ticket`. Native threads move the bytes without holding the GIL. A copy is a row ``(src, dst,
width, height, src_pitch, dst_pitch)`` in bytes: it moves ``height`` rows of ``width`` bytes, row
``i`` from ``src + i * src_pitch`` to ``dst + i * dst_pitch``. With ``height`` 1 the pitches are
ignored. Addresses lie in registered memory, or in a file that a lane has opened (``file.base +
offset``). A file as the source is read, a file as the destination is written.

Within a lane, a ticket of higher priority overtakes the others: bulk work is cut into pieces of
bounded size, and a bounded amount of work is in flight (FastSwitch §3.2). Tickets of one priority
start, and are reported as finished, in the order of submission, except that a cancelled ticket does
not wait for earlier ones. The copies of one batch run in any order and must not overlap. The caller
keeps tickets in flight independent of each other: it waits for a ticket before it submits one that
depends on it.

Copies of a CUDA lane are ordered with the work of other CUDA streams in both directions, without
waiting on the host: the copies of ``submit(..., after=streams)`` wait for the work on ``streams``,
and work that is submitted to a stream after :meth:`Ticket.fence` waits for the copies.
"""

from __future__ import annotations

import atexit
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sgl_ext._native import _transfer
from sgl_ext.errors import ExtError
from sgl_ext.memory.lanes import (
    CudaLane,
    File,
    FileLane,
    HostLane,
    Lane,
    Region,
    ThrottledLane,
    direct_alignment,
)
from sgl_ext.memory.native_ticket import NativeTicket
from sgl_ext.memory.tickets import (
    Priority,
    State,
    Ticket,
    TransferCancelledError,
    TransferError,
)

__all__ = [
    "CudaLane",
    "File",
    "FileLane",
    "HostLane",
    "Lane",
    "Priority",
    "Region",
    "State",
    "ThrottledLane",
    "Ticket",
    "TransferCancelledError",
    "TransferEngine",
    "TransferError",
]

_MIB = 1 << 20
_EXIT_DEADLINE_S = 5.0


class TransferEngine:
    """Owner of regions and lanes that carries out batches of copies.

    Thread-safe. Cannot be used in a forked child process. Close it, or use it as a context manager.
    An engine that was not closed is closed when it is garbage-collected or when the interpreter
    exits: copies that have not started are cancelled, and copies in flight are waited for, for a
    few seconds at most. The lanes and their threads live as long as the engine.
    """

    def __init__(self) -> None:
        self._over = False  # closed, or left to the native code to keep alive
        self._core = _transfer.Engine()
        # Kept until no copy can touch the memory. An owner may refer to the engine.
        self._owners: dict[int, object] = {}
        self._released: deque[Region | File] = deque()
        self._lock = threading.Lock()
        self._disks: dict[tuple[int, str], FileLane] = {}
        """Lanes by device and backend; guarded by the lock."""
        _engines.add(self)

    def register(
        self,
        address: int,
        length: int,
        *,
        owner: object = None,
        writable: bool = True,
        pinned: bool = False,
        device: bool = False,
    ) -> Region:
        """Registers ``length`` bytes of memory at ``address``.

        Regions are disjoint. The source and the destination of a copy each lie within one region.

        Args:
            owner: object that keeps the memory alive; held until the region is unregistered.
            writable: whether the memory may be a destination.
            pinned: whether the physical pages never change while registered (nothing punches holes
                into the memory or maps over it). File lanes then register it with the kernel, which
                locks it in memory and saves a page look-up in every read and write. CUDA lanes
                register it with the CUDA runtime, without which copies are not asynchronous.
            device: whether this is memory of a CUDA device.

        Raises:
            ValueError: the range is empty, is no range of memory addresses, or overlaps a
                registered region.
            ExtError: the CUDA runtime cannot pin the memory.
        """
        region = self._core.register(address, length, device, writable, pinned)
        self._owners[region.id] = owner
        return Region(self, region)

    def unregister(self, region: Region | File) -> None:
        """Unregisters memory or a file and drops its owner. Does not wait.

        Raises:
            ExtError: an unfinished ticket uses the region.
            ValueError: the region is not registered.
        """
        self._core.unregister(region._native.id)
        self._owners.pop(region._native.id, None)

    def release(self, *regions: Region | File) -> None:
        """Unregisters memory and files that no unfinished ticket uses. Does not wait.

        What is still in use is unregistered by a later call, which may be for other regions.
        """
        self._released.extend(regions)
        for _ in range(len(self._released)):
            try:
                region = self._released.popleft()
            except IndexError:  # another thread has taken it
                return
            try:
                self.unregister(region)
            except ExtError:
                self._released.append(region)

    def host_lane(self, threads: int = 2, *, piece_bytes: int = 256 << 10) -> HostLane:
        """Creates a lane for copies within host memory.

        Args:
            threads: number of threads that copy.
            piece_bytes: bytes that an urgent ticket waits for on each thread, at most.
        """
        return HostLane(self._core.host_lane(threads, piece_bytes))

    def file_lane(
        self,
        directory: str | Path,
        *,
        depth: int = 32,
        backend: str = "auto",
        direct: bool = True,
        bytes_in_flight: int = 16 * _MIB,
        request_bytes: int = _MIB,
    ) -> FileLane:
        """Creates a lane for the files of one directory (one SSD).

        Args:
            depth: reads and writes in flight for each priority.
            backend: ``io_uring``, ``threads``, or ``auto``, which uses threads where io_uring is
                not available and warns with the reason.
            direct: whether to bypass the page cache with O_DIRECT where the file system supports
                it; the lane's ``direct`` says whether it does.
            bytes_in_flight: bytes in flight for each priority; with ``depth`` it bounds the work
                that an urgent copy waits for.
            request_bytes: largest single read or write, in bytes.

        Raises:
            ExtError: ``backend`` is ``io_uring``, which is not available.
            OSError: the directory cannot be written to.
            ValueError: a bound or the backend is invalid.
        """
        if backend not in ("auto", "io_uring", "threads"):
            raise ValueError(f"backend {backend!r}; expected 'auto', 'io_uring' or 'threads'")
        directory = Path(directory).absolute()
        alignment = direct_alignment(directory) if direct else None
        native, reason = self._core.file_lane(backend, depth, bytes_in_flight, request_bytes)
        if reason:
            warnings.warn(
                f"files in {directory} are read and written by threads instead of io_uring: "
                f"{reason}",
                RuntimeWarning,
                stacklevel=2,
            )
        return FileLane(self, native, directory, depth, alignment)

    def disk_lane(
        self, directory: str | Path, *, backend: str = "auto", direct: bool = True
    ) -> FileLane:
        """Returns the lane of the device that a directory lies on, for the directory's files.

        All directories on one device share its reads and writes in flight, so that priorities hold
        between all who use the device. Creates the lane at the first call; see :meth:`file_lane`.
        """
        directory = Path(directory).absolute()
        device = directory.stat().st_dev, backend
        with self._lock:
            if (lane := self._disks.get(device)) is None:
                lane = self._disks[device] = self.file_lane(
                    directory, backend=backend, direct=direct
                )
        alignment = direct_alignment(directory) if direct else None
        return FileLane(self, lane._file_lane, directory, lane.depth, alignment)

    def cuda_lane(
        self,
        device: int = 0,
        *,
        library: str | Path | None = None,
        dispatches: int = 64,
        group_bytes: int = 8 * _MIB,
    ) -> CudaLane:
        """Creates a lane for copies from, to and within CUDA device ``device``.

        A ticket is dispatched in pieces of up to ``dispatches`` copies and ``group_bytes`` bytes,
        and the single rows of a piece in one call from CUDA 12.8 on. At most two pieces of a
        priority are in flight, which bounds the work that an urgent copy waits for. Urgent tickets,
        and tickets that are fenced, are dispatched at once.

        Args:
            library: path of the CUDA runtime; by default the one that the process has loaded
                (for example with torch) or that the dynamic linker finds.

        Raises:
            ExtError: the CUDA runtime or the device is not available.
        """
        native = self._core.cuda_lane(str(library or ""), device, dispatches, group_bytes)
        return CudaLane(native, device)

    def throttled_lane(
        self,
        inner: Lane,
        *,
        bytes_per_second: float = float("inf"),
        operations_per_second: float = float("inf"),
        latency: float = 0.0,
        depth: int = 32,
        piece_bytes: int = 256 << 10,
    ) -> ThrottledLane:
        """Creates a lane that emulates a slower device over the lane ``inner``.

        Copies pass one after the other, in pieces of ``piece_bytes``. A piece takes its bytes
        divided by ``bytes_per_second``, and the first piece of a copy takes at least the time of
        one operation: a copy is one operation, however many rows it has. A piece finishes
        ``latency`` seconds later, or when ``inner`` has copied it. At most ``depth`` pieces of a
        priority are in flight, so ``depth / latency`` also bounds the operations per second.

        Raises:
            ValueError: a parameter is invalid, or ``inner`` belongs to another engine.
        """
        native = self._core.throttled_lane(
            inner._native, bytes_per_second, operations_per_second, latency, depth, piece_bytes
        )
        return ThrottledLane(native, inner, bytes_per_second, operations_per_second, latency)

    def submit(
        self,
        copies: ArrayLike,
        lane: Lane,
        priority: Priority = Priority.NORMAL,
        after: Sequence[int] = (),
    ) -> NativeTicket:
        """Validates a batch and queues it. Nothing is queued if a copy is invalid.

        Args:
            copies: integers ``[n, 6]`` in bytes: ``src, dst, width, height, src_pitch, dst_pitch``.
                The array is copied.
            after: handles of CUDA streams (``torch.cuda.Stream.cuda_stream``) of the lane's device,
                which is the current one: the copies wait for the work that is on them now.

        Raises:
            ValueError: a size is below 1, a pitch is below the width, memory is not registered,
                copies overlap, the lane does not serve a kind of memory or cannot wait for
                streams, or a copy is misaligned for O_DIRECT. The message names the copy, what was
                found and what is expected.
            ExtError: the engine is closed, or belongs to the process that forked this one.
        """
        batch = _as_batch(copies)
        ticket = self._core.submit(batch, lane._native, priority, after)
        return NativeTicket(ticket, self._core)

    def wait_any(self, tickets: Sequence[NativeTicket], timeout: float) -> list[NativeTicket]:
        """Waits until one of ``tickets`` is finished, at most ``timeout`` seconds.

        Returns:
            The finished tickets; empty after a timeout.

        Raises:
            ValueError: a ticket belongs to another engine (checked only if none is finished).
        """
        finished = _finished(tickets)
        if finished or not tickets:
            return finished
        self._core.wait_any([ticket._native for ticket in tickets], timeout)
        return _finished(tickets)

    @property
    def closed(self) -> bool:
        return self._core.closed

    def close(self, timeout: float = _EXIT_DEADLINE_S) -> None:
        """Refuses new batches, cancels copies that have not started and waits for those in flight.

        Raises:
            TimeoutError: copies are still in flight, and the engine keeps the owners of the memory.
                Call again.
        """
        if self._core.forked:
            return
        if not self._core.close(timeout):
            raise TimeoutError(f"copies were still in flight after {timeout} s; close again")
        self._owners.clear()
        self._released.clear()
        self._over = True

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_core"):
            _close_forgotten(self)


def _finished(tickets: Sequence[NativeTicket]) -> list[NativeTicket]:
    return [ticket for ticket in tickets if ticket.poll()]


def _as_batch(copies: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(copies)
    if array.size == 0:
        array = array.reshape(0, 6).astype(np.int64)
    if array.ndim != 2 or array.shape[1] != 6 or array.dtype.kind not in "iu":
        raise ValueError(
            f"copies have shape {array.shape} and type {array.dtype}; expected integers [n, 6]: "
            "src, dst, width, height, src_pitch, dst_pitch"
        )
    if array.dtype == np.uint64:
        array = array.view(np.int64)  # values over 2**63 - 1 become negative and are refused
    return np.ascontiguousarray(array, dtype=np.int64)


_engines: weakref.WeakSet[TransferEngine] = weakref.WeakSet()


def _close_forgotten(engine: TransferEngine, timeout: float = _EXIT_DEADLINE_S) -> None:
    if engine._over or engine._core.forked:
        return
    engine._over = True
    closed = False
    try:
        closed = engine._core.close(timeout)
    finally:  # an interrupt also leaves copies in flight
        if not closed:
            _transfer.leak((engine._core, engine._owners))
        engine._owners = {}


@atexit.register
def _close_all() -> None:
    deadline = time.monotonic() + _EXIT_DEADLINE_S
    engines = [engine for engine in _engines if not engine._core.forked]
    try:
        for engine in engines:
            engine._core.close(0)  # stop every engine before waiting for any
        for engine in engines:
            _close_forgotten(engine, max(0.0, deadline - time.monotonic()))
    finally:
        # Threads in the native code must return before the interpreter is gone.
        _transfer.end(_EXIT_DEADLINE_S)
