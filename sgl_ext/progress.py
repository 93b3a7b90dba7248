"""Progress reports on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

_EVERY_S = 10.0
Item = TypeVar("Item")


def say(text: str) -> None:
    """Prints a line to standard error immediately."""
    print(f"sgl_ext: {text}", file=sys.stderr, flush=True)


class Progress:
    """Progress of equal steps, reported every ten seconds with the time that is left.

    Args:
        what: name of the measurement.
        steps: number of all steps.
        now: clock, in seconds.
    """

    def __init__(self, what: str, steps: int, *, now: Callable[[], float] = time.monotonic) -> None:
        self._what, self._steps, self._now = what, steps, now
        self._done = 0
        self._begin = self._said = now()

    def step(self) -> None:
        """Counts a step as done."""
        self._done += 1
        if (now := self._now()) - self._said < _EVERY_S:
            return
        self._said = now
        left = (now - self._begin) / self._done * (self._steps - self._done)
        say(f"{self._what}: {self._done} of {self._steps}, about {left:.0f} s left")


def steps(items: Sequence[Item], what: str) -> Iterator[Item]:
    """Yields items, and reports the progress of the loop over them as :class:`Progress` does."""
    progress = Progress(what, len(items))
    for item in items:
        yield item
        progress.step()
