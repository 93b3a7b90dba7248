"""Blocks in flight: the next owner of a block waits for the copies that still touch it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from sgl_ext.memory.in_flight import BlocksInFlight


class Copy:
    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: Exception | None = None

    def end(self, error: Exception | None = None) -> None:
        self._error = error
        self._over.set()

    def poll(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: float) -> None:
        if not self._over.wait(timeout):
            raise TimeoutError
        if self._error is not None:
            raise self._error

    def fence(self, stream: int | None, timeout: float) -> None:
        self.wait(timeout)


def blocks(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, np.int64)


def test_wait_considers_only_copies_of_the_given_blocks() -> None:
    flight, one, other = BlocksInFlight(10), Copy(), Copy()
    flight.begin(blocks(1, 2, 3), one)
    flight.begin(blocks(7, 8), other)
    flight.wait(blocks(4, 5, 6), 0.0)
    with pytest.raises(TimeoutError):
        flight.wait(blocks(3, 4), 0.0)
    one.end()
    flight.wait(blocks(1, 2, 3), 0.0)
    with pytest.raises(TimeoutError):
        flight.wait(blocks(8), 0.0)
    assert flight.waited == 2
    other.end()
    flight.wait(np.arange(10), 0.0)
    assert flight.pending == 0


def test_an_earlier_copy_is_awaited_after_a_later_one_has_ended() -> None:
    flight, one, other = BlocksInFlight(10), Copy(), Copy()
    flight.begin(blocks(1, 2), one)
    flight.begin(blocks(2, 3), other)
    other.end()
    flight.wait(blocks(4), 0.0)
    for block in (1, 2):
        with pytest.raises(TimeoutError):
            flight.wait(blocks(block), 0.0)
    one.end()
    flight.wait(blocks(1, 2, 3), 0.0)
    assert flight.pending == 0


def test_wait_returns_when_the_copy_ends() -> None:
    flight, copy = BlocksInFlight(4), Copy()
    flight.begin(blocks(0), copy)
    threading.Timer(0.05, copy.end).start()
    flight.wait(blocks(0), 60.0)
    assert copy.poll()


def test_wait_returns_when_the_copy_fails() -> None:
    flight, copy = BlocksInFlight(4), Copy()
    flight.begin(blocks(0), copy)
    threading.Timer(0.05, copy.end, [OSError("failed")]).start()
    flight.wait(blocks(0), 60.0)


def test_wait_includes_the_last_copy_of_a_block() -> None:
    flight, first, last = BlocksInFlight(4), Copy(), Copy()
    flight.begin(blocks(0, 1), first)
    flight.begin(blocks(1, 2), last)
    first.end()
    flight.wait(blocks(0), 0.0)
    with pytest.raises(TimeoutError):
        flight.wait(blocks(1), 0.0)


def test_finished_copies_are_forgotten() -> None:
    flight = BlocksInFlight(4)
    for _ in range(1000):
        copy = Copy()
        flight.begin(blocks(0), copy)
        copy.end()
    assert flight.pending == 0
    assert not flight._transfers
