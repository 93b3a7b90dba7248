"""Tests of restore policies: order, absence of starvation, and mean time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from sgl_ext.planning.policies import POLICIES, Cake, Longest, Policy, Shortest, soonest


@dataclass(eq=False)
class Request:
    arrived: float
    remaining: float
    recomputing: float
    rank: tuple[int, float] = (0, 0.0)


def computed(policy: Policy, waiting: Sequence[Request]) -> Request:
    """Returns the request whose prompt is computed next."""
    for one in waiting:
        one.rank = 0, policy.rank(one)
    return soonest(waiting)


def requests(*figures: tuple[float, float, float]) -> list[Request]:
    return [Request(*each) for each in figures]


def test_each_policy_chooses_the_expected_request() -> None:
    early, long, short = waiting = requests((0, 5, 9), (1, 9, 20), (2, 1, 2))
    assert computed(Shortest(0.2), waiting) is short
    assert Shortest(0.2).load(waiting, None) is short
    assert Shortest(0.2).load(waiting, long) is long  # computing and channel serve the same request
    assert Shortest(0.2).load([early, short], long) is short
    assert Longest().load(waiting, short) is long
    assert computed(Longest(), waiting) is early
    assert computed(Cake(), waiting) is early
    assert Cake().load(waiting, short) is early
    assert sorted(POLICIES) == ["cake", "longest", "shortest"]


@pytest.mark.parametrize("ageing", [0.05, 0.2, 1.0])
def test_ageing_prevents_starvation(ageing: float) -> None:
    """A long request goes before all short ones that arrive late enough, however many arrive."""
    policy = Shortest(ageing)
    long = Request(0.0, 30.0, 60.0)
    most = int((long.remaining - 1.0) / ageing) + 2
    # One second of work arrives in each second.
    shorts = [Request(float(clock), 1.0, 2.0) for clock in range(most)]
    assert any(computed(policy, [long, short]) is long for short in shorts)


def mean_and_worst(policy: Policy, waiting: Sequence[Request]) -> tuple[float, float]:
    """Returns the mean and the largest time until a request is restored, in seconds.

    All requests are present at the start, and are restored one after the other.
    """
    left, now, ends = list(waiting), 0.0, []
    while left:
        one = computed(policy, left)
        left.remove(one)
        now += one.remaining
        ends.append(now)
    return sum(ends) / len(ends), ends[-1]


def test_shortest_has_no_longer_mean_time_than_cake() -> None:
    choose = random.Random(7)  # noqa: S311
    for _ in range(50):
        sizes = [choose.uniform(0.1, 5.0) for _ in range(8)]
        waiting = [Request(0.0, size, 2 * size) for size in sizes]
        best, worst = mean_and_worst(Shortest(0.2), waiting)
        other, same = mean_and_worst(Cake(), waiting)
        assert best <= other
        assert worst == pytest.approx(same)
