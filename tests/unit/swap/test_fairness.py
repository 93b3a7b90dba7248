"""Fairness policies: the requests that run if not all fit."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_ext.swap.fairness import (
    Candidate,
    FirstCome,
    Policy,
    RoundRobin,
    Static,
    TokenCounter,
    Trace,
)


def serve(policy: Policy, requests: list[Candidate], slots: int, steps: int) -> dict[str, int]:
    """Returns the number of iterations that each request runs in, ``slots`` requests at a time."""
    ran = dict.fromkeys((one.name for one in requests), 0)
    for _ in range(steps):
        policy.step(requests)
        # Only a higher level preempts: the sort is stable, and running requests come first.
        order = sorted(requests, key=lambda one: (-one.level, not one.running))
        for at, one in enumerate(order):
            one.running = at < slots
            if one.running:
                ran[one.name] += 1
                one.generated += 1
    return ran


def names(count: int) -> list[Candidate]:
    return [Candidate(f"r{at}") for at in range(count)]


def test_first_come_runs_requests_in_order_of_arrival() -> None:
    policy, requests = FirstCome(), names(4)
    ran = serve(policy, requests, slots=2, steps=100)
    assert ran == {"r0": 100, "r1": 100, "r2": 0, "r3": 0}
    ran = serve(policy, [Candidate("late"), *requests[1:]], slots=2, steps=100)
    assert ran == {"late": 0, "r1": 100, "r2": 100, "r3": 0}


def test_static_follows_the_given_priorities() -> None:
    requests = names(3)
    requests[2].given = 5
    ran = serve(Static(ageing=1000), requests, slots=1, steps=100)
    assert ran == {"r0": 0, "r1": 0, "r2": 100}
    requests[0].given = 6
    assert serve(Static(ageing=1000), requests, slots=1, steps=10)["r0"] == 10


def test_waiting_requests_do_not_starve_under_static() -> None:
    requests = names(2)
    requests[1].given = 3
    ran = serve(Static(ageing=10), requests, slots=1, steps=2000)
    assert ran["r0"] > 500


def test_an_aged_request_runs_for_several_iterations() -> None:
    requests = names(2)
    requests[1].given = 1
    policy = Static(ageing=10)
    stretches, before = [], None
    for _ in range(400):
        policy.step(requests)
        first = min(requests, key=lambda one: (-one.level, not one.running))
        for one in requests:
            one.running = one is first
        if first is before:
            stretches[-1] += 1
        else:
            stretches.append(1)
        before = first
    assert min(stretches[1:-1]) >= 5


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_round_robin_gives_each_request_an_equal_share(slots: int) -> None:
    ran = serve(RoundRobin(quantum=10), names(5), slots=slots, steps=1000)
    assert max(ran.values()) - min(ran.values()) <= 2 * 10


def test_round_robin_takes_turns_of_a_quantum() -> None:
    policy, (one, other) = RoundRobin(quantum=10), names(2)
    ran = []
    for _ in range(40):
        policy.step([one, other])
        one.running = (one.level, one.running) >= (other.level, other.running)
        other.running = not one.running
        ran.append(one.running)
    assert ran == ([True] * 10 + [False] * 10) * 2


def test_a_late_request_is_not_compensated_for_earlier_iterations() -> None:
    policy, (one, late) = RoundRobin(quantum=10), names(2)
    serve(policy, [one], slots=1, steps=500)
    ran = serve(policy, [one, late], slots=1, steps=200)
    assert abs(ran["r0"] - ran["r1"]) <= 2 * 10


def test_clients_get_equal_service_whatever_their_number_of_requests() -> None:
    requests = [Candidate(f"a{at}", "a") for at in range(9)] + [Candidate("b", "b")]
    ran = serve(TokenCounter(quantum=20), requests, slots=1, steps=2000)
    assert ran["b"] == pytest.approx(1000, abs=50)


def test_a_prompt_counts_when_it_is_computed() -> None:
    policy = TokenCounter(quantum=1)
    one, other = Candidate("a", "a", prompt=100), Candidate("b", "b", prompt=10)
    policy.step([one, other])
    assert one.level == other.level == 0
    one.running = other.running = True
    policy.step([one, other])
    assert (one.level, other.level) == (-100, -10)
    policy.step([one, other])
    assert (one.level, other.level) == (-100, -10)


def test_requests_that_end_within_an_iteration_count() -> None:
    policy = TokenCounter(quantum=1)
    other = Candidate("b", "b", prompt=10, running=True)
    for number in range(3):
        short = Candidate(f"a{number}", "a", prompt=10)
        policy.step([short, other])
        short.generated = 1
        policy.ended(short)  # it was prefilled and has ended before the next iteration
        policy.ended(short)  # counted once
    policy.step([last := Candidate("a", "a"), other])
    assert (last.level, other.level) == (-36, -10)


def test_a_returning_client_accumulates_no_unused_service() -> None:
    policy, one, other = TokenCounter(quantum=1), Candidate("a", "a"), Candidate("b", "b")
    policy.step([one])
    one.running, one.generated = True, 500
    policy.step([one])
    policy.step([one, other])
    assert other.level == one.level == -1000


def test_random_priorities_do_not_depend_on_other_requests() -> None:
    alone, crowd = names(1), names(8)
    policies = [Trace("random", 5, seed=3) for _ in range(2)]
    for _ in range(20):
        policies[0].step(alone)
        policies[1].step(random.sample(crowd, len(crowd)))
        assert alone[0].level == crowd[0].level


def test_priorities_change_at_the_given_rate() -> None:
    policy, (one,) = Trace("random", 25, seed=0), names(1)
    levels = []
    for _ in range(100):
        policy.step([one])
        levels.append(one.level)
    changes = [at for at in range(1, 100) if levels[at] != levels[at - 1]]
    assert changes == [25, 50, 75]


@given(st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_markov_prefers_served_requests(seed: int) -> None:
    policy, requests = Trace("markov", 1, seed), names(40)
    kept = total = 0
    for _ in range(100):
        before = {one for one in requests if one.running}
        policy.step(requests)
        for one in requests:
            one.running = False
        for one in sorted(requests, key=lambda one: -one.level)[:8]:
            one.running = True
            kept += one in before
        total += len(before)
    assert kept > 0.3 * total  # with random levels, a fifth would stay
