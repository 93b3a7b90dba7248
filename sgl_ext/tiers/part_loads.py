"""Loads of layer-major pages from a lower tier to the device, part by part, the last layers first.

The tier's thread reads parts; the thread of the scheduler, which computes the first layers
meanwhile, copies them to the device and takes back what it computes itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sgl_ext.clock import Clock
from sgl_ext.memory.tickets import Ticket

_LATE_S = 0.5
"""Seconds that a part may be late, in addition to its expected duration."""


@dataclass(frozen=True)
class Pace:
    """Expected durations, in seconds."""

    layer: float
    """Time to compute one layer of all tokens."""
    part: float
    """Time to read one part of all pages."""


class PartLoads:
    """State of the loads of some pages, shared by both threads.

    A part that is read is never needed for parts above it, which were read before: if it fails or
    is late, its layers are computed, and those above are loaded.

    Args:
        parts: layers ``(first, end)`` of each part.
        copy: begins to copy layers ``(first, end)`` of the pages to the device.
        fence: has the device's next work wait for a copy.
    """

    def __init__(
        self,
        parts: Sequence[tuple[int, int]],
        copy: Callable[[tuple[int, int]], Ticket],
        fence: Callable[[Ticket], None],
        pace: Pace,
        clock: Clock,
    ) -> None:
        self.layers = parts[-1][1]
        self._parts = parts
        self._part_of = [at for at, part in enumerate(parts) for _ in range(*part)]
        self._copy, self._fence, self._pace, self._clock = copy, fence, pace, clock
        self._changed = threading.Condition()
        self._reading: int | None = None
        self._began: float | None = None
        """Time at which the last read began; None before the first one."""
        self._late = False
        self._bottom = len(parts)
        """First part that has been read; all above it have been, too."""
        self._computed = 0
        """Parts that are not to be read, from the first on."""
        self._ended = self._closed = False
        self._copies: dict[int, Ticket] = {}

    # --- the tier's thread ------------------------------------------------------------------------

    def next(self) -> int | None:
        """Returns the next part to read; None if no more are."""
        with self._changed:
            part = self._bottom - 1
            if self._ended or part < self._computed:
                return None
            self._reading, self._began = part, self._clock()
            return part

    def read(self, *, good: bool) -> None:
        """Records that all pages of the part have landed, or that no further part can be read."""
        with self._changed:
            if good and self._reading is not None:
                self._bottom = self._reading
            else:
                self._ended = True
            self._reading = None
            self._changed.notify_all()

    def close(self) -> None:
        """Records that the tier's thread no longer writes to the pages."""
        with self._changed:
            self._ended = self._closed = True
            self._reading = None
            self._changed.notify_all()

    # --- the scheduler's thread -------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Returns whether the tier's thread no longer writes to the pages."""
        return self._closed

    def taken_back(self, layer: int) -> bool:
        """Returns whether the forward has to compute a layer; if not, its KV is on the device.

        Its part is awaited if that is expected to be faster than computing it.
        """
        part = self._part_of[layer]
        with self._changed:
            if part < self._bottom and not self._ended:
                self._await(part, layer)
            if part < self._bottom:
                self._computed = part + 1
        self._begin_copies(part)
        if part in self._copies:
            self._fence(self._copies[part])
        return part not in self._copies

    def _await(self, part: int, layer: int) -> None:
        if self._late or self._began is None:
            return  # what hangs, or waits for another load, is not awaited for each layer again
        left = self._began + (self._bottom - part) * self._pace.part - self._clock()
        if left <= self._pace.layer * (self._parts[part][1] - layer):
            self._late = not self._changed.wait_for(
                lambda: self._ended or self._bottom <= part, max(left, 0.0) + _LATE_S
            )

    def fence(self, layer: int) -> None:
        """Has the device's next work wait for the KV of a layer that was not taken back."""
        self._fence(self._copies[self._part_of[layer]])

    def end(self) -> None:
        """Ends all loads: nothing writes to the device after the next owner of its blocks.

        Parts that are being read still land in host memory.

        Raises:
            TimeoutError: a copy has not ended in time.
        """
        with self._changed:
            self._ended = True
        for ticket in self._copies.values():
            self._fence(ticket)

    def _begin_copies(self, least: int) -> None:
        for part in range(max(self._bottom, least), len(self._parts)):
            if part not in self._copies:
                self._copies[part] = self._copy(self._parts[part])
