"""Slots of which the host knows the numbers, and slots whose numbers are on their way to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from sgl_ext.engine.kv.indices import Download, Slots, on_host


class KnownSlots:
    """Numbers of slots that were allocated, so that nobody has to ask the device for them."""

    def __init__(self) -> None:
        self._extended: dict[int, Slots] = {}
        self._last: tuple[torch.Tensor, Slots] | None = None

    def allocated(self, given: torch.Tensor, slots: Slots) -> None:
        """Records the last allocation: the tensor that was returned, and its contents."""
        self._last = given, slots

    def on_host(self, slots: torch.Tensor) -> Slots:
        """Returns slots on the host; does not wait if they are the last that were allocated."""
        if self._last is not None:
            given, known = self._last
            if (slots.data_ptr(), len(slots)) == (given.data_ptr(), len(given)):
                return known
        return on_host(slots)

    def extend(self, row: int | None, slots: Slots | None) -> None:
        """Records with which slots the request of a row was extended; None if not all are known."""
        if row is None:
            return
        if slots is None:
            self._extended.pop(row, None)
        else:
            self._extended[row] = slots

    def extended(self, row: int) -> Slots | None:
        """Returns the slots of the last extension of a row, int64 ``[tokens]``; None if unknown."""
        return self._extended.get(row)


class FreedSlots:
    """Slots that were freed on the device, at most one of each block, in the order of the calls."""

    def __init__(self) -> None:
        self._coming: deque[Download] = deque()
        self._grouped: list[Download] = []

    def __len__(self) -> int:
        """Returns the number of slots, which is known before they have landed."""
        return sum(map(len, self._coming))

    def add(self, slots: torch.Tensor, *, grouped: bool) -> None:
        """Adds slots; those of a group count from :meth:`end_group` on."""
        (self._grouped if grouped else self._coming).append(Download(slots))

    def end_group(self) -> None:
        self._coming.extend(self._grouped)
        self._grouped.clear()

    def take(self, *, wait: bool) -> Iterator[Slots]:
        """Yields and forgets the slots that have landed, or all of them."""
        while self._coming and (wait or self._coming[0].landed()):
            yield self._coming.popleft().numpy()

    def clear(self) -> None:
        self._coming.clear()
        self._grouped.clear()
