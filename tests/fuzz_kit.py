"""Mutations of bytes for fuzz tests, and the number of rounds of long tests."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

_REGION = 64
"""Maximum size of the region that a mutation adds, zeroes, removes or copies, in bytes."""


def rounds(default: int) -> int:
    """Returns the number of rounds of a test: ``SGLEXT_ROUNDS``, or the default."""
    return int(os.environ.get("SGLEXT_ROUNDS", default))


PATIENT = pytest.mark.timeout(600 + rounds(0) // 50)
"""Mark of tests that take longer with more rounds: 20 ms of each round are allowed for."""


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Returns a copy of the data with one mutation, which may leave the bytes unchanged."""
    found = bytearray(data)
    rng.choice(_MUTATIONS if found else (_extend,))(found, rng)
    return bytes(found)


def _region(data: bytearray, rng: random.Random) -> slice:
    start = rng.randrange(len(data))
    return slice(start, min(start + rng.randint(1, _REGION), len(data)))


def _flip(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _truncate(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def _extend(data: bytearray, rng: random.Random) -> None:
    data += rng.randbytes(rng.randint(1, _REGION))


def _zero(data: bytearray, rng: random.Random) -> None:
    region = _region(data, rng)
    data[region] = bytes(len(data[region]))


def _remove(data: bytearray, rng: random.Random) -> None:
    del data[_region(data, rng)]


def _duplicate(data: bytearray, rng: random.Random) -> None:
    region = data[_region(data, rng)]
    at = rng.randrange(len(data) + 1)
    data[at:at] = region


def _splice(data: bytearray, rng: random.Random) -> None:
    region = data[_region(data, rng)]
    at = rng.randrange(len(data) - len(region) + 1)
    data[at : at + len(region)] = region


_MUTATIONS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    _flip, _set, _truncate, _extend, _zero, _remove, _duplicate, _splice,
)  # fmt: skip
