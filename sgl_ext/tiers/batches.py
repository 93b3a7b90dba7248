"""Carries out what a call asks of several devices at once, and waits for all of it."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sgl_ext.errors import ExtError
from sgl_ext.memory.transfer import State, Ticket, TransferEngine
from sgl_ext.tiers.arena import Pages
from sgl_ext.tiers.volume import Volume

STALLED, CLOSED = "stalled", "closed"
"""The device moved nothing for the deadline; the tier or its engine was closed."""
Reason: TypeAlias = str | OSError | None
"""Why a batch was not carried out; None if it was."""


@dataclass(frozen=True)
class Batch:
    """What one call asks of one volume: ``keys[rows]`` lie, or shall lie, in ``slots``."""

    volume: Volume
    rows: NDArray[np.int64]
    slots: NDArray[np.int64]


class Batches:
    """I/O of a tier whose ``lock`` guards the state of its volumes."""

    def __init__(
        self, engine: TransferEngine, lock: threading.Lock, *, fsync: bool, deadline: float
    ) -> None:
        self.closed = False
        self._engine = engine
        self._lock = lock
        self._fsync = fsync
        self._step = deadline / 4

    def run(self, batches: Sequence[Batch], pages: Pages, *, write: bool) -> list[Reason]:
        """Moves ``pages[rows]`` from or to the slots of each batch, of all volumes at once.

        What a stalled volume has not started is cancelled. When this returns nothing is in
        flight, however long that takes.
        """
        reasons: list[Reason] = [None] * len(batches)
        pending: dict[Ticket, int] = {}
        for number, batch in enumerate(batches):
            try:
                ticket = batch.volume.submit(batch.slots, pages[batch.rows], write=write)
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

    def _end(self, ticket: Ticket, volume: Volume, reason: Reason, write: bool) -> Reason:
        if ticket.state == State.DONE:
            reason = None  # late, but whole
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
    """What ``reason`` is counted as."""
    if isinstance(reason, OSError):
        return errno.errorcode.get(reason.errno or 0, "EIO")
    return reason or "EIO"
