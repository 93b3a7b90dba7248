"""Loads of parts from a lower tier: what the forward computes, awaits and takes back."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from sgl_ext.tiers.part_loads import Pace, PartLoads

PARTS = ((0, 3), (3, 6), (6, 8))


class Trial:
    """Loads whose clock, copies and tier the test controls."""

    def __init__(self, *, layer: float = 1.0, part: float = 100.0) -> None:
        self.now = 0.0
        self.copied: list[tuple[int, int]] = []
        self.fenced: list[tuple[int, int]] = []
        copy: Any = self._copy
        self.loads = PartLoads(PARTS, copy, self.fenced.append, Pace(layer, part), lambda: self.now)  # type: ignore[arg-type]

    def _copy(self, layers: tuple[int, int]) -> tuple[int, int]:
        self.copied.append(layers)
        return layers

    def read(self, count: int) -> None:
        for _ in range(count):
            assert self.loads.next() is not None
            self.loads.read(good=True)


def test_parts_are_read_from_the_last_one_to_the_first_that_is_not_computed() -> None:
    trial = Trial()
    assert trial.loads.next() == 2
    assert trial.loads.taken_back(0)
    trial.loads.read(good=True)
    assert trial.loads.next() == 1
    trial.loads.read(good=True)
    assert trial.loads.next() is None  # layers 0 to 2 are being computed
    assert [trial.loads.taken_back(layer) for layer in range(8)] == [True] * 3 + [False] * 5
    assert sorted(trial.copied) == [(3, 6), (6, 8)]
    assert set(trial.fenced) == {(3, 6), (6, 8)}


def test_a_part_that_lands_while_its_layers_are_computed_is_used() -> None:
    trial = Trial()
    trial.read(1)
    assert trial.loads.next() == 1
    assert trial.loads.taken_back(3)
    trial.loads.read(good=True)
    assert not trial.loads.taken_back(4)
    assert trial.loads.next() is None


@pytest.mark.parametrize("how", ["bad", "gone"])
def test_a_part_that_fails_is_computed_and_those_above_are_loaded(how: str) -> None:
    trial = Trial()
    trial.read(1)
    assert trial.loads.next() == 1
    if how == "bad":
        trial.loads.read(good=False)
        assert trial.loads.next() is None
        assert not trial.loads.closed
    else:
        trial.loads.close()
        assert trial.loads.closed
    assert [trial.loads.taken_back(layer) for layer in range(8)] == [True] * 6 + [False] * 2
    assert trial.copied == [(6, 8)]


def test_nothing_is_loaded_if_the_first_read_fails() -> None:
    trial = Trial()
    trial.loads.next()
    trial.loads.read(good=False)
    assert all(trial.loads.taken_back(layer) for layer in range(8))
    assert trial.copied == trial.fenced == []


def test_a_part_is_awaited_only_if_computing_it_takes_longer() -> None:
    trial = Trial(part=4.0)
    trial.read(2)
    assert trial.loads.next() == 0
    trial.now = 1.5  # read in 2.5 s, computed in 3 s
    other = threading.Timer(0.05, lambda: trial.loads.read(good=True))
    other.start()
    assert not trial.loads.taken_back(0)
    other.join()
    trial = Trial(part=4.0)
    trial.read(2)
    trial.loads.next()
    trial.now = 0.5  # read in 3.5 s
    assert trial.loads.taken_back(0)


def test_a_late_part_is_not_awaited_for_long() -> None:
    trial = Trial(part=0.01)
    trial.loads.next()
    waits: list[float] = []
    changed: Any = trial.loads._changed
    changed.wait_for = lambda _done, seconds: bool(waits.append(seconds))
    assert all(trial.loads.taken_back(layer) for layer in range(8))
    assert waits == [pytest.approx(0.53)]  # once, although the tier never ends


def test_a_load_that_has_not_begun_is_not_awaited() -> None:
    trial = Trial(part=0.01)
    changed: Any = trial.loads._changed
    changed.wait_for = lambda *_: pytest.fail("the tier loads for others")
    assert all(trial.loads.taken_back(layer) for layer in range(8))


def test_no_copy_begins_after_the_end() -> None:
    trial = Trial()
    trial.read(2)
    trial.loads.taken_back(0)
    copied = [*trial.copied]
    trial.loads.end()
    assert trial.loads.next() is None
    trial.loads.read(good=False)
    assert trial.copied == copied
    assert set(trial.fenced) == set(copied)


def test_layers_that_are_not_taken_back_were_read_whatever_the_order() -> None:
    for seed in range(200):
        chance = random.Random(seed)  # noqa: S311
        trial = Trial(part=1e9)  # nothing is awaited: there is no other thread
        good, reading, part = set[int](), False, None
        took = []
        for layer in range(8):
            for _ in range(chance.randrange(4)):
                if reading:
                    landed = chance.random() < 0.9
                    good |= {part} if landed and part is not None else set()
                    trial.loads.read(good=landed)
                    reading = False
                elif (part := trial.loads.next()) is not None:
                    reading = True
            took.append(trial.loads.taken_back(layer))
        loaded = [layer for layer, computed in enumerate(took) if not computed]
        assert loaded == [*range(8 - len(loaded), 8)]
        for layer in loaded:
            part = next(at for at, (first, end) in enumerate(PARTS) if first <= layer < end)
            assert part in good
            assert PARTS[part] in trial.copied
