"""Progress of the I/O on one lane, by which a stalled device is told from a slow one."""

from __future__ import annotations

import time

from sgl_ext.memory.transfer import Ticket


class Progress:
    """Progress of the tickets in flight on one lane. Not thread-safe.

    Volumes on one device share its lane, in which a ticket may wait for those of other volumes to
    be carried out. Progress of any of them is therefore progress of all.

    Args:
        deadline: Seconds without progress after which the device counts as stalled.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._tickets: set[Ticket] = set()
        self._settled = 0  # bytes of the tickets that have ended
        self._moved, self._since = 0, time.monotonic()

    def started(self, ticket: Ticket) -> None:
        """Records that ``ticket`` is in flight."""
        if not self._tickets:
            self._since = time.monotonic()
        self._tickets.add(ticket)

    def ended(self, ticket: Ticket) -> None:
        """Records that ``ticket`` has ended."""
        self._tickets.discard(ticket)
        self._settled += ticket.bytes_done

    def stalled(self) -> bool:
        """Returns whether tickets are in flight without progress for the deadline."""
        now = time.monotonic()
        moved = self._settled + sum(ticket.bytes_done for ticket in self._tickets)
        if moved != self._moved or not self._tickets:
            self._moved, self._since = moved, now
        return now - self._since > self._deadline
