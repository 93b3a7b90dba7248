"""Volume: one directory of the SSD tier, with its file of slots, its lane and its health."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sgl_ext.errors import ExtError
from sgl_ext.memory.native_ticket import NativeTicket
from sgl_ext.memory.runs import run_starts
from sgl_ext.memory.transfer import (
    FileLane,
    Lane,
    Priority,
    Ticket,
    TransferEngine,
)
from sgl_ext.own_files import open_own
from sgl_ext.tiers.arena import Arena, Pages
from sgl_ext.tiers.folder import PAGES, Folder
from sgl_ext.tiers.layer_major import ALIGNMENT
from sgl_ext.tiers.progress import Progress
from sgl_ext.tiers.slots import Slots

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a file that cannot grow; its existing slots can still be overwritten."""
FATAL_FAILURES = 3
"""Consecutive failed batches after which a device is given up."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class VolumeStatistics:
    """Statistics of one directory since it was opened."""

    directory: str
    state: str
    """State: ``ok``, ``full`` (the file system is full and pages are evicted), ``stalled`` or
    ``dead``."""
    pages: int
    limit: int
    """Largest number of slots."""
    bytes_read: int
    bytes_written: int
    evictions: int
    failed_batches: int


class Volume:
    """File ``<directory>/sgl_ext-v…/pages`` of slots: slot ``i`` begins at ``i * arena.stride``.

    A slot of the file has the bytes of an arena slot, so the file needs no other metadata. Methods
    whose docstring says so are called with the tier's lock held.

    Args:
        capacity: Bytes of the file, at most.
        backend: See :meth:`TransferEngine.disk_lane`.
        wrap: Wraps the lane, to emulate another device.
        deadline: Seconds without progress after which the device counts as stalled.

    Raises:
        ExtError: The directory cannot be used or is in use by another server, or ``capacity`` is
            less than one page or more than the disk.
    """

    def __init__(
        self,
        arena: Arena,
        engine: TransferEngine,
        directory: Path,
        capacity: int,
        *,
        backend: str,
        wrap: Callable[[FileLane], Lane] | None,
        deadline: float,
    ) -> None:
        self.directory = directory
        self.bytes_read = self.bytes_written = 0
        self.failed_batches = 0
        self.dead = False
        self._arena = arena
        self._engine = engine
        self.progress = Progress(deadline)
        """Progress on the lane; shared with the other volumes that have the same lane."""
        self._failures_in_a_row = 0
        self._told_full = False
        self._tickets: set[Ticket] = set()
        with ExitStack() as undo:
            self._folder = Folder(directory, arena.layout)
            undo.callback(self._folder.close)
            limit = capacity // arena.stride
            if limit < 1:
                raise ExtError(
                    f"a capacity of {capacity:,} B in {directory} is less than one page of "
                    f"{arena.stride:,} B; raise the capacity"
                )
            if capacity > (total := shutil.disk_usage(directory).total):
                raise ExtError(
                    f"a capacity of {capacity:,} B in {directory} exceeds the disk, which has "
                    f"{total:,} B in total; lower the capacity"
                )
            self.slots = Slots(limit)
            try:
                lane = engine.disk_lane(self._folder.path, backend=backend)
                if any(ALIGNMENT % needed for needed in lane.alignment):
                    lane = engine.disk_lane(self._folder.path, backend=backend, direct=False)
                self._fd = open_own(self._folder.pages)
                undo.callback(os.close, self._fd)
                # The folder's lock file may have been removed; this lock lasts as long as the file.
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(self._fd).st_size > limit * arena.stride:
                    os.ftruncate(self._fd, limit * arena.stride)
                self.file = lane.open(PAGES, limit * arena.stride, writable=True)
            except BlockingIOError:
                raise ExtError(
                    f"{self._folder.pages} is in use by another server; stop it, or give this one "
                    "another directory"
                ) from None
            except OSError as error:
                raise ExtError(
                    f"cannot store KV in {self._folder.path}: {error.strerror}"
                ) from None
            self.lane = wrap(lane) if wrap else lane
            self.direct = lane.direct
            undo.pop_all()

    @property
    def present(self) -> int:
        """Number of whole slots in the file."""
        return os.fstat(self._fd).st_size // self._arena.stride

    def submit(
        self, slots: NDArray[np.int64], places: Pages, *, write: bool, part: int | None = None
    ) -> NativeTicket:
        """Starts to write arena slots to slots of the file, or to read them from there.

        Args:
            slots: Slots of the file, ``[pages]``.
            places: Slots of the arena, ``[pages]``.
            write: Whether to write to the file.
            part: Number of the only part of each page that is moved; None for the whole slot.

        Raises:
            ExtError: The engine is closed.
        """
        stride, (begin, size) = self._arena.stride, self._arena.extent(part)
        order = np.argsort(slots, kind="stable")
        slots, places = slots[order], places[order]
        starts = run_starts(slots, places)
        copies = np.zeros((len(starts), 6), np.int64)
        sides = (0, 1) if write else (1, 0)
        copies[:, sides[0]] = self._arena.address + places[starts] * stride + begin
        copies[:, sides[1]] = self.file.base + slots[starts] * stride + begin
        run = np.diff(starts, append=len(slots))
        # Whole slots that follow each other are one piece.
        copies[:, 2], copies[:, 3] = (run * stride, 1) if part is None else (size, run)
        copies[:, 4:] = 0 if part is None else stride
        # Decoding waits for reads of contexts on the same device, which are urgent.
        priority = Priority.BULK if write else Priority.NORMAL
        return self._engine.submit(copies, self.lane, priority)

    def started(self, ticket: Ticket) -> None:
        """Records that ``ticket`` is in flight. With the lock held."""
        self._tickets.add(ticket)
        self.progress.started(ticket)

    def ended(self, ticket: Ticket, *, write: bool) -> None:
        """Records that ``ticket`` has ended, and the bytes that it moved. With the lock held."""
        self._tickets.discard(ticket)
        self.progress.ended(ticket)
        if write:
            self.bytes_written += ticket.bytes_done
        else:
            self.bytes_read += ticket.bytes_done

    def sync(self) -> None:
        """Syncs the file, so that written pages survive a power failure; has no deadline.

        Raises:
            OSError: The sync failed; written pages may be lost.
        """
        os.fdatasync(self._fd)

    def stalled(self) -> bool:
        """Returns whether I/O is in flight on the lane without progress for the deadline.

        With the lock held.
        """
        return self.progress.stalled()

    def usable(self) -> bool:
        """Returns whether the volume is neither dead nor stalled. With the lock held."""
        return not self.dead and not self.stalled()

    def removed(self) -> bool:
        """Returns whether the file is no longer at its path; may wait for the device."""
        try:
            found = self._folder.pages.stat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False  # the next batches report such an error
        return not os.path.samestat(found, os.fstat(self._fd))

    def give_up(self, why: str) -> int:
        """Marks the volume as dead and logs ``why``; returns the number of pages that are lost.

        With the lock held.
        """
        lost = len(self.slots.index)
        self.dead = True
        self.slots.abandon()
        logger.error("%s is disabled: %s, then restart the server", self.directory, why)
        return lost

    def ran_full(self, slots: Sequence[int]) -> None:
        """Frees slots that the file system had no room for. With the lock held."""
        self.slots.release_unbacked(slots, time.monotonic())
        if not self._told_full:
            self._told_full = True  # once, because the file system may stay full
            logger.warning(
                "the file system of %s is full: the tier keeps %d pages there of at most %d until "
                "there is space", self.directory, len(self.slots.index), self.slots.limit,
            )  # fmt: skip

    def succeeded(self) -> None:
        """Records that a batch has succeeded. With the lock held."""
        self._failures_in_a_row = 0

    def failed(self, error: OSError) -> None:
        """Records that a batch has failed. With the lock held.

        Gives the volume up after :data:`FATAL_FAILURES` consecutive failures.
        """
        self.failed_batches += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row < FATAL_FAILURES or self.dead:
            return
        code = errno.errorcode.get(error.errno or 0, str(error.errno))
        self.give_up(
            f"{self._failures_in_a_row} batches failed in a row, the last with {code} ({error}); "
            "check the device and its file system"
        )

    @property
    def state(self) -> str:
        """State, as in :attr:`VolumeStatistics.state`. With the lock held."""
        if self.dead:
            return "dead"
        if self.stalled():
            return "stalled"
        return "full" if self.slots.full(time.monotonic()) else "ok"

    def statistics(self) -> VolumeStatistics:
        """Returns the state and the totals of the volume. With the lock held."""
        return VolumeStatistics(
            str(self.directory),
            self.state,
            len(self.slots.index),
            self.slots.limit,
            self.bytes_read,
            self.bytes_written,
            self.slots.evictions,
            self.failed_batches,
        )

    def cancel(self) -> None:
        """Cancels I/O that has not started. With the lock held."""
        for ticket in self._tickets:
            ticket.cancel()

    def close(self) -> None:
        """Closes the file and releases the locks; I/O in flight keeps the lane's file open."""
        try:
            self.file.close()
        except ExtError as error:
            logger.warning("cannot close %s: %s", self._folder.pages, error)
        os.close(self._fd)
        self._folder.close()
