"""Clock of policies. Tests and simulators pass their own."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]
"""Function that returns the time of a monotonic clock, in seconds."""
