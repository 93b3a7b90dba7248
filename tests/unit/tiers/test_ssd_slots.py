"""Slots of an SSD tier: allocation and eviction, and the tier compared with a dictionary."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tier_kit import (
    LARGE,
    arena,
    content,
    directories,
    get,
    key,
    keys,
    put,
)

from sgl_ext.memory.transfer import TransferEngine
from sgl_ext.tiers.slots import Slots, spread
from sgl_ext.tiers.ssd import SsdTier


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    volumes=st.integers(1, 3),
    slots=st.integers(1, 12),
    steps=st.lists(
        st.one_of(
            st.tuples(
                st.just("store"), st.lists(st.integers(0, 30), min_size=1, max_size=12, unique=True)
            ),
            st.tuples(
                st.just("load"), st.lists(st.integers(0, 30), min_size=1, max_size=12, unique=True)
            ),
            st.tuples(st.just("reopen"), st.just([])),
        ),
        max_size=20,
    ),
)
def test_ssd_tier_differs_from_a_dictionary_only_by_evictions(
    volumes: int, slots: int, steps: list[tuple[str, list[int]]]
) -> None:
    with tempfile.TemporaryDirectory() as root, TransferEngine() as engine:
        host, paths = arena(engine, 12), directories(Path(root), volumes)

        def open_tier() -> SsdTier:
            return SsdTier(host, engine, paths, slots * host.stride, backend="threads")

        def present() -> set[int]:
            return {number for number in range(31) if tier.lookup(keys(number))}

        def evictions() -> int:
            return sum(volume.evictions for volume in tier.volumes)

        tier, held = open_tier(), set[int]()
        for step, numbers in steps:
            before = evictions()
            if step == "reopen":
                tier.close()
                tier = open_tier()
                before = 0
            elif step == "load":
                assert get(tier, host, *numbers) == [number in held for number in numbers]
            else:
                stored = put(tier, host, *numbers)
                assert all(stored) or len(numbers) > volumes * slots
                held |= {number for number, there in zip(numbers, stored, strict=True) if there}
            assert present() <= held
            assert len(held - present()) == evictions() - before
            held = present()
            assert tier.statistics().pages == len(held) <= volumes * slots
        assert set(tier.statistics().failures) <= {"no_room"}
        tier.close()


def test_least_recently_used_slots_are_evicted_first() -> None:
    slots = Slots(3)
    for number, slot in enumerate(slots.take(3, now=0.0)):
        slots.publish(key(number), slot)
    slots.index.move_to_end(key(0))
    assert slots.take(2, now=0.0) == [1, 2]
    assert list(slots.index) == keys(0)
    assert slots.take(2, now=0.0) == [0]
    slots.release([2, 0, 1])
    assert slots.take(5, now=0.0) == [0, 1, 2]


def test_slots_that_could_not_be_written_are_used_last() -> None:
    slots = Slots(6)
    slots.release_doubtful(slots.take(2, now=0.0))
    assert slots.take(2, now=0.0) == [2, 3]
    slots.publish(key(0), 2)
    slots.release([3])
    assert (slots.room(now=0.0), slots.reused) == (3, 3)
    assert slots.take(4, now=0.0) == [2, 3, 4, 5]
    assert slots.evictions == 1
    assert (slots.room(now=0.0), slots.reused) == (0, 2)
    assert slots.take(5, now=0.0) == [0, 1]
    slots.release_doubtful([0])
    slots.abandon()
    assert slots.take(1, now=0.0) == []


def test_a_full_file_system_stops_growth_for_a_while() -> None:
    slots = Slots(10)
    for number, slot in enumerate(slots.take(4, now=0.0)):
        slots.publish(key(number), slot)
    slots.release_unbacked(slots.take(2, now=0.0), now=0.0)
    assert slots.room(now=1.0) == 0
    assert slots.take(2, now=1.0) == [0, 1]  # slots of the least recently used pages
    slots.release([0, 1])
    assert slots.room(now=61.0) == 8
    assert slots.take(8, now=61.0) == [0, 1, 4, 5, 6, 7, 8, 9]
    assert slots.evictions == 2


@given(
    count=st.integers(0, 300),
    volumes=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), max_size=6),
    phase=st.floats(0, 1, exclude_max=True),
)
@example(count=1, volumes=[(0, 1)], phase=0.9999999999999999)
def test_pages_are_spread_in_proportion_to_room(
    count: int, volumes: list[tuple[int, int]], phase: float
) -> None:
    room, used = [r for r, _ in volumes], [u for _, u in volumes]
    owners = spread(count, room, used, phase=phase)
    shares = np.bincount(owners, minlength=len(volumes)) if volumes else np.zeros(0, int)
    assert len(owners) == min(count, sum(room) + sum(used))
    assert (shares <= np.add(room, used)).all()
    if count <= sum(room):
        assert (shares <= room).all()
        ideal = count * np.array(room) / max(sum(room), 1)
        assert (np.abs(shares - ideal) <= 1).all()


def test_pages_on_equal_volumes_are_interleaved() -> None:
    assert spread(8, [50] * 4, [0] * 4, phase=0.0).tolist() == [0, 1, 2, 3] * 2


def test_page_contents_differ_in_every_sector() -> None:
    one, two = content(key(1), LARGE).reshape(-1, 4096), content(key(2), LARGE).reshape(-1, 4096)
    assert (one != two).any(axis=1).all()
