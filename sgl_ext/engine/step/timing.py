"""Durations of forwards: of the call on the CPU, of the work on the device's stream on a GPU."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

Report = Callable[[float], None]
"""Function that receives the duration of a forward, in seconds."""


class _Pending(NamedTuple):
    start: torch.cuda.Event
    end: torch.cuda.Event
    report: Report


class ForwardTimer:
    """Timer of the forwards of a scheduler.

    A call that launches a forward on a GPU returns before the forward has begun. Its duration is
    known when the GPU has passed the events around it, and is reported by :meth:`poll`.

    Args:
        stream: CUDA stream of the forwards; None on the CPU.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._pending: deque[_Pending] = deque()

    @contextmanager
    def measure(self, report: Report) -> Iterator[None]:
        """Measures the forward that is launched inside the block; nothing if it raises."""
        if self._stream is None:
            begin = time.monotonic()
            yield
            report(time.monotonic() - begin)
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(self._stream)
        yield
        end.record(self._stream)
        self._pending.append(_Pending(start, end, report))

    def poll(self) -> None:
        """Reports the durations of forwards that have ended."""
        while self._pending and self._pending[0].end.query():
            start, end, report = self._pending.popleft()
            report(start.elapsed_time(end) / 1000)
