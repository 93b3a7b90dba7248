"""Index of host memory against a plain model under random operations; order of eviction."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_ext.tiers.host import HostPages

LIVES = 100
OPERATIONS = 300


def keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in numbers]


def put(host: HostPages, names: list[bytes]) -> np.ndarray:
    pages = host.reserve(len(names))
    assert pages is not None
    host.publish(names, pages)
    return pages


def test_lookup_finds_published_pages_up_to_the_first_miss() -> None:
    host = HostPages(8)
    pages = put(host, keys(1, 2, 3))
    assert pages.tolist() == [0, 1, 2]
    assert host.lookup(keys(1, 2, 3, 4)) == 3
    assert host.lookup(keys(2, 4, 3)) == 1
    assert host.lookup(keys(4, 1)) == 0
    assert host.missing(keys(4, 1, 5)) == [0, 2]
    assert host.places(keys(3, 1)).tolist() == [2, 0]


def test_tail_of_a_prompt_is_evicted_first() -> None:
    host = HostPages(4)
    put(host, keys(1, 2, 3, 4))
    put(host, keys(9))
    assert host.lookup(keys(1, 2, 3)) == 3
    assert host.missing(keys(4)) == [0]
    host.use(keys(1, 2))
    put(host, keys(8, 7))
    assert host.missing(keys(1, 2, 3, 9, 8, 7)) == [2, 3]


def test_renewed_pages_are_evicted_last_and_not_used() -> None:
    host = HostPages(4)
    put(host, keys(1, 2))
    put(host, keys(3, 4))
    host.pin(host.places(keys(1)))
    assert host.renew(keys(1, 2, 9)) == 1
    put(host, keys(5, 6))
    assert host.missing(keys(1, 2, 3, 4)) == [2, 3]
    assert host.use(keys(2), times=1).size == 1
    assert not host.worth_keeping(host.places(keys(2)), 2, 0).any()


def test_pinned_pages_stay_and_oversized_reservations_are_refused() -> None:
    host = HostPages(4)
    put(host, keys(1, 2, 3))
    host.pin(host.places(keys(1, 2)))
    assert host.room == 2
    assert host.reserve(3) is None
    assert host.reserve(5) is None
    assert len(host) == 3
    assert host.reserve(2) is not None
    assert host.lookup(keys(1, 2)) == 2


def test_page_published_twice_is_held_once() -> None:
    host = HostPages(4)
    put(host, keys(1, 2))
    again = put(host, keys(2, 3))
    assert host.free == 1
    assert host.places(keys(2, 3)).tolist() == [1, again[1]]
    host.check_integrity()


@pytest.mark.parametrize("tier", [0, 7])
def test_reused_pages_are_worth_keeping_until_they_are_copied(tier: int) -> None:
    host = HostPages(2)
    pages = put(host, keys(1, 2))
    assert host.worth_keeping(pages, 1, tier).all()
    assert not host.worth_keeping(pages, 2, tier).any()
    host.use(keys(1))
    assert host.worth_keeping(pages, 2, tier).tolist() == [True, False]
    host.mark_copied(pages[:1], tier, True)
    assert not host.worth_keeping(pages, 2, tier).any()
    assert host.worth_keeping(pages, 2, 3).any()
    host.mark_copied(pages[:1], tier, False)
    assert host.worth_keeping(pages, 2, tier).any()
    put(host, keys(3, 4))  # evicts both pages
    pages = put(host, keys(2))
    assert host.worth_keeping(pages, 2, tier).tolist() == [True]  # its use count is kept


@pytest.mark.parametrize("leaves", ["flushed", "evicted"])
def test_use_counts_survive_flushes_and_evictions(leaves: str) -> None:
    host = HostPages(2)
    put(host, keys(1, 2))
    host.use(keys(1))
    if leaves == "flushed":
        host.clear()
    else:
        put(host, keys(3, 4))
    assert host.missing(keys(1, 2)) == [0, 1]
    pages = put(host, keys(1, 2))
    assert host.worth_keeping(pages, 2, 0).tolist() == [True, True]
    assert host.worth_keeping(pages, 3, 0).tolist() == [True, False]
    assert not host.worth_keeping(pages, 4, 0).any()
    for number in range(10, 40, 2):
        put(host, keys(number, number + 1))
    assert len(host._ghosts) == 8  # bounded


@given(seed=st.integers(0, 2**32), capacity=st.integers(1, 40))
@settings(max_examples=LIVES, derandomize=True, deadline=None)
def test_random_operations_match_the_model(seed: int, capacity: int) -> None:
    """Compares 30,000 operations in total with a dict of pages and counters of pins."""
    choose = random.Random(seed)  # noqa: S311
    host = HostPages(capacity)
    model: dict[bytes, int] = {}
    pins: dict[bytes, int] = {}
    held: list[np.ndarray] = []
    for _ in range(OPERATIONS):
        action = choose.randrange(8)
        names = keys(*choose.sample(range(60), choose.randrange(1, 10)))
        if action <= 2:
            pages = host.reserve(len(names))
            in_hand = sum(map(len, held))
            possible = len(names) <= capacity - in_hand - sum(n > 0 for n in pins.values())
            assert (pages is not None) == possible
            if pages is None:
                continue
            gone = [name for name in model if host.missing([name])]
            assert not any(pins.get(name) for name in gone)
            for name in gone:
                del model[name]
            if action == 0:
                held.append(pages)
                continue
            host.publish(names, pages)
            for name, page in zip(names, pages.tolist(), strict=True):
                model.setdefault(name, page)
        elif action == 3 and held:
            host.release(held.pop(choose.randrange(len(held))))
        elif action == 4:
            here = [name for name in names if name in model]
            assert host.use(here).tolist() == [model[name] for name in here]
        elif action == 5:
            here = [name for name in names if name in model]
            host.pin(host.places(here))
            for name in here:
                pins[name] = pins.get(name, 0) + 1
        elif action == 6:
            pinned = [name for name in names if pins.get(name)]
            host.unpin(host.places(pinned))
            for name in pinned:
                pins[name] -= 1
        elif not choose.randrange(20):
            host.clear()
            model = {name: page for name, page in model.items() if pins.get(name)}
        host.check_integrity()
        assert len(host) == len(model)
        assert host.free == capacity - len(model) - sum(map(len, held))
        assert [name in model for name in names] == [not host.missing([name]) for name in names]


def test_pages_of_a_sequence_get_adjacent_slots() -> None:
    host = HostPages(64)
    last = {}
    for turn in range(3):
        for name in range(4):
            pages = host.reserve(2, after=last.get(name, -1))
            assert pages is not None
            if turn:
                assert pages.tolist() == [last[name] + 1, last[name] + 2]
            last[name] = int(pages[-1])
    host.check_integrity()


def test_slots_kept_for_growth_serve_other_reservations() -> None:
    host = HostPages(16)
    first = host.reserve(2, after=-1)
    assert first is not None
    assert host.room == 14
    others = host.reserve(14)
    assert others is not None
    host.release(others)
    again = host.reserve(2, after=int(first[-1]))
    assert again is not None
    host.check_integrity()


def test_number_of_sequences_with_kept_slots_is_bounded() -> None:
    host = HostPages(256)
    for number in range(200):
        pages = host.reserve(1, after=-1)
        assert pages is not None
        host.publish(keys(number), pages)
    assert len(host._groups._active) <= 64
    host.check_integrity()
