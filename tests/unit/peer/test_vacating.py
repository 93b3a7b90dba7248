"""Policy of vacating memory: evicted prefixes, requests that do not fit, retries and waits."""

from __future__ import annotations

import random

import pytest

from sgl_ext.peer.vacating import RETRY_S, Attempts, chunk_fits, fits, leaves_to_evict
from sgl_ext.peer.waiting import Waiting


def test_leaves_are_evicted_for_any_node_of_their_path() -> None:
    paths = {"c": "abc", "d": "abd", "e": "e"}
    assert leaves_to_evict(paths, {"a"}.__contains__) == ["c", "d"]
    assert leaves_to_evict(paths, {"d", "e"}.__contains__) == ["d", "e"]
    assert leaves_to_evict(paths, {"x"}.__contains__) == []


@pytest.mark.parametrize("seed", range(20))
def test_repeated_eviction_frees_the_range_and_keeps_all_else(seed: int) -> None:
    """Evicts leaves of a random tree until none is left to evict."""
    choose = random.Random(seed)  # noqa: S311
    parents = {node: choose.randrange(node) for node in range(1, 40)}
    within = set(choose.sample(range(1, 40), 5))

    def path(node: int) -> list[int]:
        return [*path(parents[node]), node] if node else []

    needed = {node for node in parents if not within & {*path(node)}}
    left = set(parents)
    while True:
        leaves = left - {parents[node] for node in left}
        evicted = leaves_to_evict({leaf: path(leaf) for leaf in leaves}, within.__contains__)
        if not evicted:
            break
        left -= {*evicted}
    assert left == needed


def test_a_request_needs_one_page_more_than_its_tokens() -> None:
    assert fits(83, size=100, page=16)
    assert not fits(84, size=100, page=16)


@pytest.mark.parametrize(
    ("rest", "chunk", "available", "found"),
    [
        (100, 64, 80, True),
        (100, 64, 79, False),
        (40, 64, 56, True),  # the last chunk is shorter
        (100, None, 116, True),  # the prompt is not split
        (100, None, 115, False),
    ],
)
def test_a_chunk_needs_one_page_more_than_its_tokens(
    rest: int, chunk: int | None, available: int, found: bool
) -> None:
    assert chunk_fits(rest, chunk, available, page=16) == found


def test_a_range_is_vacated_again_after_a_time_or_a_change() -> None:
    attempts = Attempts()
    assert attempts.due(1, 5, "a", 0.0)
    attempts.record(1, 5, "a", 0.0)
    assert not attempts.due(1, 5, "a", RETRY_S / 2)
    assert attempts.due(1, 6, "a", RETRY_S / 2)
    assert attempts.due(1, 5, "b", RETRY_S / 2)
    assert attempts.due(1, 5, "a", RETRY_S)


def test_requests_expire_after_their_wait() -> None:
    waiting = Waiting(10)
    assert waiting.expired(["a"], 0) == []
    assert waiting.expired(["a", "b"], 10) == []
    assert waiting.expired(["a", "b"], 10.5) == ["a"]
    assert waiting.expired(["a", "b"], 11) == []  # counted anew
    assert waiting.expired(["a"], 12) == []  # b fits now
    assert waiting.expired(["a", "b"], 21.5) == ["a"]
