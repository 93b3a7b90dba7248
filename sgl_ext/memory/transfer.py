"""Transfer engine: batches of copies between memory, devices and files, behind one ticket each.

``engine.submit(copies, lane, priority)`` validates a whole batch, hands it to a lane and returns a
:class:`Ticket`. Native threads move the bytes; the GIL is held by none of them. A copy is a row
``(src, dst, width, height, src_pitch, dst_pitch)`` in bytes: ``height`` rows of ``width`` bytes,
row ``i`` from ``src + i * src_pitch`` to ``dst + i * dst_pitch``; with ``height`` 1 the pitches do
not count. Addresses lie in memory that was registered, or in a file that a lane has opened
(``file.base + offset``): which side is the file says whether it is read or written.

Within a lane, a more urgent ticket overtakes: bulk work is cut into bounded pieces and bounded
work is in flight (FastSwitch, section 3.2). Tickets of one priority start, and are reported
finished, in the order of submission, except that a cancelled one waits for nobody. Copies of one
batch run in any order and must not overlap; tickets in flight together are the caller's to keep
apart: wait for what the next depends on.
"""

from __future__ import annotations

import atexit
import time
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sgl_ext._native import _transfer
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
from sgl_ext.memory.tickets import (
    Priority,
    State,
    Ticket,
    TransferCancelledError,
    TransferError,
    poll,
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
    "poll",
]

_MIB = 1 << 20
_EXIT_DEADLINE_S = 5.0


class TransferEngine:
    """Regions, lanes and tickets. Thread-safe; of no use in a child that was forked.

    Close it, or use it as a context manager. One that is forgotten is closed when it is collected
    or when the interpreter exits: what has not started is cancelled, what is in flight is waited
    for, a few seconds at most. Its lanes, and their threads, live as long as it does.
    """

    def __init__(self) -> None:
        self._over = False  # nobody has to close it any more
        self._core = _transfer.Engine()
        # Kept until no copy can touch the memory; an owner may refer to the engine.
        self._owners: dict[int, object] = {}
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
        """Makes memory known. Regions are disjoint, and a copy lies within one on each side.

        Args:
            owner: what keeps the memory alive; held until the region is unregistered.
            writable: whether it may be a destination.
            pinned: its physical pages never change while registered (nothing punches holes into
                it, or maps over it), so that file lanes register it with the kernel and save the
                look-up of pages in every read and write. It is then locked in memory.
            device: memory of a CUDA device.

        Raises:
            ValueError: empty, no address of memory, or overlapping a registered region.
        """
        region = self._core.register(address, length, device, writable, pinned)
        self._owners[region.id] = owner
        return Region(self, region)

    def unregister(self, region: Region | File) -> None:
        """Forgets memory or a file and drops its owner.

        It does not wait: while an unfinished ticket uses the region it refuses.

        Raises:
            ExtError: in use.
            ValueError: not registered.
        """
        self._core.unregister(region._native.id)
        self._owners.pop(region._native.id, None)

    def host_lane(self, threads: int = 2, *, piece_bytes: int = 256 << 10) -> HostLane:
        """A lane for copies within host memory.

        An urgent ticket waits for at most ``piece_bytes`` on each thread.
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
        """A lane for the files of one directory (one SSD).

        Args:
            depth: reads and writes in flight, for each priority.
            backend: ``io_uring``, ``threads``, or ``auto``: threads, with a warning that says
                why, where there is no io_uring.
            direct: bypass the page cache with O_DIRECT where the file system allows it; the
                lane's ``direct`` says whether it does.
            bytes_in_flight: for each priority; with ``depth`` it bounds what an urgent copy finds
                in front of it.
            request_bytes: largest single read or write.

        Raises:
            ExtError: ``io_uring`` was asked for and there is none.
            OSError: the directory cannot be written to.
            ValueError: a bad bound or backend.
        """
        if backend not in ("auto", "io_uring", "threads"):
            raise ValueError(f"backend {backend!r}; expected 'auto', 'io_uring' or 'threads'")
        directory = Path(directory).absolute()
        alignment = direct_alignment(directory) if direct else None
        native, reason = self._core.file_lane(backend, depth, bytes_in_flight, request_bytes)
        if reason:
            warnings.warn(
                f"files in {directory} are read and written by threads: {reason}",
                RuntimeWarning,
                stacklevel=2,
            )
        return FileLane(self, native, directory, depth, alignment)

    def cuda_lane(
        self,
        device: int = 0,
        *,
        library: str | Path | None = None,
        dispatches: int = 16,
        group_bytes: int = 8 * _MIB,
    ) -> CudaLane:
        """A lane for copies from, to and within CUDA device ``device``.

        After ``dispatches`` copies or ``group_bytes`` an event is recorded; two of them are
        outstanding for each priority, which bounds what an urgent copy finds in front of it.

        Args:
            library: path of the CUDA runtime; without it, the one that the process has loaded
                (with torch, say) or that the dynamic linker finds.

        Raises:
            ExtError: no CUDA runtime, or no such device.
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
        """A lane that emulates a slower device over ``inner``.

        Copies pass one after the other, each in the longer of its bytes over the rate and one
        operation's time, and are finished ``latency`` seconds after they passed. A copy of the
        batch is one operation, whatever its rows. At most ``depth`` pieces of a priority are under
        way, so ``depth / latency`` bounds the operations per second too.

        Raises:
            ValueError: a bad figure, or a lane of another engine.
        """
        native = self._core.throttled_lane(
            inner._native, bytes_per_second, operations_per_second, latency, depth, piece_bytes
        )
        return ThrottledLane(native, inner, bytes_per_second, operations_per_second, latency)

    def submit(self, copies: ArrayLike, lane: Lane, priority: Priority = Priority.NORMAL) -> Ticket:
        """Validates a batch and queues it. Nothing is queued if any copy is bad.

        Args:
            copies: int64 or uint64 ``[n, 6]`` of bytes: ``src, dst, width, height, src_pitch,
                dst_pitch``. It is copied.

        Raises:
            ValueError: names the copy, what was found and what is expected: sizes below 1, a
                pitch below the width, memory that is not registered, copies that overlap, kinds
                of memory that the lane does not serve, misalignment for O_DIRECT.
            ExtError: the engine is closed, or belongs to the process that forked this one.
        """
        batch = _as_batch(copies)
        return Ticket(self._core.submit(batch, lane._native, priority), self._core)

    def wait_any(self, tickets: Sequence[Ticket], timeout: float) -> list[Ticket]:
        """The finished ones of ``tickets``, as soon as there is one, or after ``timeout`` s.

        Raises:
            ValueError: one of them is another engine's.
        """
        finished = poll(tickets)
        if finished or not tickets:
            return finished
        self._core.wait_any([ticket._native for ticket in tickets], timeout)
        return poll(tickets)

    @property
    def closed(self) -> bool:
        return self._core.closed

    def close(self, timeout: float = _EXIT_DEADLINE_S) -> None:
        """Refuses new work, cancels what has not started and waits for what is in flight.

        Raises:
            TimeoutError: something is in flight still; the memory stays owned. Call again.
        """
        if self._core.forked:
            return
        if not self._core.close(timeout):
            raise TimeoutError(f"copies were still in flight after {timeout} s; close again")
        self._owners.clear()
        self._over = True

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_core"):
            _close_forgotten(self)


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
        array = array.view(np.int64)  # what does not fit is negative and refused
    return np.ascontiguousarray(array, dtype=np.int64)


_engines: weakref.WeakSet[TransferEngine] = weakref.WeakSet()


def _close_forgotten(engine: TransferEngine, timeout: float = _EXIT_DEADLINE_S) -> None:
    if engine._over or engine._core.forked:
        return
    engine._over = True
    closed = False
    try:
        closed = engine._core.close(timeout)
    finally:  # an interrupt, too, leaves copies in flight
        if not closed:
            _transfer.leak((engine._core, engine._owners))
        engine._owners = {}


@atexit.register
def _close_all() -> None:
    deadline = time.monotonic() + _EXIT_DEADLINE_S
    engines = [engine for engine in _engines if not engine._core.forked]
    try:
        for engine in engines:
            engine._core.close(0)  # none goes on while another is waited for
        for engine in engines:
            _close_forgotten(engine, max(0.0, deadline - time.monotonic()))
    finally:
        # Threads that are in the native code must be back before the interpreter is gone.
        _transfer.end(_EXIT_DEADLINE_S)
