"""Policies: who goes first, that nobody waits for ever, and what a choice costs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from sgl_ext.restore.policies import POLICIES, Cake, Longest, Policy, Shortest, soonest


@dataclass(eq=False)
class Request:
    arrived: float
    remaining: float
    recomputing: float
    rank: tuple[int, float] = (0, 0.0)


def computed(policy: Policy, waiting: Sequence[Request]) -> Request:
    """Whose prompt is computed next."""
    for one in waiting:
        one.rank = 0, policy.rank(one)
    return soonest(waiting)


def requests(*figures: tuple[float, float, float]) -> list[Request]:
    return [Request(*each) for each in figures]


def test_who_goes_first() -> None:
    early, long, short = waiting = requests((0, 5, 9), (1, 9, 20), (2, 1, 2))
    assert computed(Shortest(0.2), waiting) is short
    assert Shortest(0.2).load(waiting, None) is short
    assert Shortest(0.2).load(waiting, long) is long  # computing and channel on the same
    assert Shortest(0.2).load([early, short], long) is short
    assert Longest().load(waiting, short) is long
    assert computed(Longest(), waiting) is early
    assert computed(Cake(), waiting) is early
    assert Cake().load(waiting, short) is early
    assert sorted(POLICIES) == ["cake", "longest", "shortest"]


@pytest.mark.parametrize("ageing", [0.05, 0.2, 1.0])
def test_nobody_waits_for_ever(ageing: float) -> None:
    """A long request among endless short ones: it goes before all that come late enough."""
    policy = Shortest(ageing)
    long = Request(0.0, 30.0, 60.0)
    most = int((long.remaining - 1.0) / ageing) + 2
    # One second of work arrives in each second.
    shorts = [Request(float(clock), 1.0, 2.0) for clock in range(most)]
    assert any(computed(policy, [long, short]) is long for short in shorts)


def mean_and_worst(policy: Policy, waiting: Sequence[Request]) -> tuple[float, float]:
    """Seconds until each is restored when all are there and nothing overlaps."""
    left, now, ends = list(waiting), 0.0, []
    while left:
        one = computed(policy, left)
        left.remove(one)
        now += one.remaining
        ends.append(now)
    return sum(ends) / len(ends), ends[-1]


def test_the_shortest_first_is_best_on_average() -> None:
    choose = random.Random(7)  # noqa: S311
    for _ in range(50):
        sizes = [choose.uniform(0.1, 5.0) for _ in range(8)]
        waiting = [Request(0.0, size, 2 * size) for size in sizes]
        best, worst = mean_and_worst(Shortest(0.2), waiting)
        other, same = mean_and_worst(Cake(), waiting)
        assert best <= other
        assert worst == pytest.approx(same)
