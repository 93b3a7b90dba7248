"""Parallel I/O of one call on several SSD volumes."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sgl_ext.errors import ExtError
from sgl_ext.memory.native_ticket import NativeTicket
from sgl_ext.memory.transfer import State, TransferEngine, TransferError
from sgl_ext.tiers.arena import Pages
from sgl_ext.tiers.volume import FULL, Volume

STALLED, CLOSED = "stalled", "closed"
"""Reasons for a failed batch: the device made no progress for the deadline; the tier or its engine
was closed."""
MOST_DIVIDED = 64
"""Batches of one call that are divided after an error; finds a few damaged pages. A device on which
everything fails is not asked for each page."""
Reason: TypeAlias = str | OSError | None
"""Reason why a batch failed; None if it succeeded."""


@dataclass(frozen=True)
class Batch:
    """Pages of one call that lie, or will be written, on one volume.

    Attributes:
        rows: Positions of the pages in the keys of the call, ``[rows]``.
        slots: Slot of each page in the volume, ``[rows]``.
    """

    volume: Volume
    rows: NDArray[np.int64]
    slots: NDArray[np.int64]

    def halves(self) -> tuple[Batch, Batch]:
        """Divides a batch of two or more pages."""
        at = len(self.rows) // 2
        first = Batch(self.volume, self.rows[:at], self.slots[:at])
        return first, Batch(self.volume, self.rows[at:], self.slots[at:])


class Batches:
    """Submits batches to the volumes of a tier and waits for them.

    Args:
        lock: Guards the state of the tier's volumes. Not held while waiting.
        fsync: Whether a write counts as done only after the file was synced.
        deadline: Seconds; a stall is looked for every quarter of it.
    """

    def __init__(
        self, engine: TransferEngine, lock: threading.Lock, *, fsync: bool, deadline: float
    ) -> None:
        self.closed = False
        self._engine = engine
        self._lock = lock
        self._fsync = fsync
        self._step = deadline / 4

    def run(
        self, batches: Sequence[Batch], pages: Pages, *, write: bool, part: int | None = None
    ) -> list[tuple[Batch, Reason]]:
        """Copies ``pages[rows]`` from or to the slots of each batch, on all volumes in parallel.

        A ticket stops at its first error, which says nothing about the pages that it has not
        copied. A batch that an error has ended is therefore divided and repeated, until the pages
        with errors are found, or :data:`MOST_DIVIDED` batches have been divided.

        I/O that a stalled volume has not started is cancelled. Nothing is in flight when this
        returns, so it waits as long as started I/O takes.

        Args:
            pages: Arena slots of the call's keys.
            part: Number of the only part of each page that is copied; None for the whole slot.

        Returns:
            The batches, or the parts that they were divided into, each with the reason of its
            failure or None.
        """
        ended: list[tuple[Batch, Reason]] = []
        left, divided = list(batches), 0
        while left:
            again: list[Batch] = []
            for batch, reason in zip(left, self._run(left, pages, write, part), strict=True):
                error = isinstance(reason, TransferError) and reason.errno not in FULL
                if error and len(batch.rows) > 1 and divided < MOST_DIVIDED:
                    divided += 1
                    again += batch.halves()
                else:
                    ended.append((batch, reason))
            left = again
        return ended

    def _run(
        self, batches: Sequence[Batch], pages: Pages, write: bool, part: int | None
    ) -> list[Reason]:
        """Copies each batch once. Returns the reason of each batch's failure, or None."""
        reasons: list[Reason] = [None] * len(batches)
        pending: dict[NativeTicket, int] = {}
        for number, batch in enumerate(batches):
            try:
                ticket = batch.volume.submit(batch.slots, pages[batch.rows], write=write, part=part)
            except ExtError:
                reasons[number] = CLOSED
                continue
            pending[ticket] = number
            with self._lock:
                batch.volume.started(ticket)
                if self.closed:
                    ticket.cancel()
        while pending:
            for ticket in self._engine.wait_any(list(pending), self._step):
                number = pending.pop(ticket)
                reasons[number] = self._end(ticket, batches[number].volume, reasons[number], write)
            with self._lock:
                for ticket, number in pending.items():
                    if reasons[number] is None and batches[number].volume.stalled():
                        reasons[number] = STALLED
                        ticket.cancel()
        return reasons

    def _end(self, ticket: NativeTicket, volume: Volume, reason: Reason, write: bool) -> Reason:
        if ticket.state == State.DONE:
            reason = None  # the volume was stalled, but everything was moved in the end
            if write and self._fsync:
                try:
                    volume.sync()
                except OSError as error:
                    reason = error
        else:
            reason = ticket.error or reason or CLOSED
        with self._lock:
            volume.ended(ticket, write=write)
        return reason


def label(reason: Reason) -> str:
    """Returns the name under which failures count ``reason``."""
    if isinstance(reason, OSError):
        return errno.errorcode.get(reason.errno or 0, "EIO")
    return reason or "EIO"
