"""Deadlines of requests that are held back."""

from __future__ import annotations

import math
from collections.abc import Container

from sgl_ext.planning.want import Name

_KEPT = 64
"""Deadlines that are kept in any case."""
_COUNTED = -math.inf
"""Deadline that has passed and was counted."""


class Deadlines:
    """Times until which requests are held back, each from when it is asked about first.

    Args:
        wait: longest time for which a request is held back, in seconds.
    """

    def __init__(self, wait: float) -> None:
        self._wait = wait
        self._until: dict[Name, float] = {}
        self.late = 0
        """Number of deadlines that have :meth:`passed`."""

    def __contains__(self, name: Name) -> bool:
        return name in self._until

    def holds(self, name: Name, now: float) -> bool:
        """Returns whether a request may be held back at the time ``now``, in seconds."""
        return now <= self._until.setdefault(name, now + self._wait)

    def passed(self, name: Name, now: float) -> bool:
        """Returns whether a request is not held back any longer; counts each deadline once."""
        if self.holds(name, now):
            return False
        self.late += self._until[name] > _COUNTED
        self._until[name] = _COUNTED
        return True

    def forget(self, name: Name) -> None:
        self._until.pop(name, None)

    def prune(self, number: int, names: Container[Name]) -> None:
        """Forgets requests that are not among ``names``, a ``number`` of them, if they are many."""
        if len(self._until) > 2 * number + _KEPT:
            self._until = {name: at for name, at in self._until.items() if name in names}

    def clear(self) -> None:
        self._until.clear()
