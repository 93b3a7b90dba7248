"""Tests of priorities: a policy's levels order requests and are not visible outside."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.observability.metrics_collector import QueueCount

from sgl_ext.config import ExtConfig, Swap
from sgl_ext.config.swap import EXPERIMENT
from sgl_ext.engine.core import runtime
from sgl_ext.engine.core.hooks import ActivationError
from sgl_ext.engine.swap import priorities
from sgl_ext.engine.swap.power import SwapPower
from sgl_ext.engine.swap.priorities import Priorities, priorities_of

LEAST = -sys.maxsize - 1
"""Value that SGLang gives a request without a priority."""


def request(rid: str, priority: int = LEAST) -> Any:
    return SimpleNamespace(
        rid=rid, priority=priority, cache_salt=None, origin_input_ids=[1] * 8, output_ids=[],
        time_stats=SimpleNamespace(wait_queue_entry_time=0.0),
    )  # fmt: skip


@pytest.fixture
def policy(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Priorities:
    name = request.param
    if name in ("random", "markov"):
        monkeypatch.setenv(EXPERIMENT, json.dumps({"trace": name}))
        name = "sglang"
    found = priorities_of(Swap(capacity=1 << 20, policy=name, quantum=1))
    assert found is not None
    ext = runtime.ExtRuntime(ExtConfig())
    ext.swap = SimpleNamespace(priorities=found)
    monkeypatch.setattr(runtime, "current", ext)
    return found


def labels(reqs: list[Any]) -> dict[int, int]:
    found = priorities._count(QueueCount.from_reqs.__func__, QueueCount, reqs, True)
    assert found.total == len(reqs)
    assert found.by_priority is not None
    return found.by_priority


LEVELS = [
    ("fcfs", 3), ("static", 2), ("round-robin", 50), ("token-counter", 50),
    ("random", 150), ("markov", 150),
]  # fmt: skip
"""Levels that each policy gives three requests in 50 steps, of which one runs."""


@pytest.mark.parametrize(("policy", "count"), LEVELS, indirect=["policy"])
def test_metrics_count_requests_by_their_given_priority(policy: Priorities, count: int) -> None:
    reqs = [request("a"), request("b", 3), request("c", 3)]
    late = request("late", 1)
    seen, levels = set(labels(reqs)), set()
    for forward in range(50):
        policy.step(reqs[1:], reqs[:1], forward)
        reqs[0].output_ids.append(1)
        levels |= {req.priority for req in reqs}
        assert labels([*reqs, late]) == {0: 1, 3: 2, 1: 1}
        seen |= set(labels(reqs))
    assert seen == {0, 3}
    assert len(levels) == count
    ended = reqs.pop()  # counted in the report of the forward in which it ends
    policy.step(reqs, [], 51)
    assert labels([ended]) == {3: 1}
    assert policy.give("b", 7)
    policy.step(reqs[:1], [], 52)  # request b is between two queues
    priorities.give_to(reqs[1], 9)
    assert not policy.give("b", 8)
    policy.step(reqs, [], 53)
    assert labels(reqs) == {0: 1, 9: 1}


@pytest.mark.parametrize("policy", ["round-robin"], indirect=True)
def test_given_priorities_survive_a_flush(policy: Priorities) -> None:
    reqs = [request("a"), request("b", 2)]
    for forward in range(9):
        policy.step(reqs[1:], reqs[:1], forward)
    policy.clear()
    policy.step(reqs, [], 0)
    assert labels(reqs) == {0: 1, 2: 1}


@pytest.mark.parametrize("policy", ["round-robin", "fcfs"], indirect=True)
@pytest.mark.parametrize(("new", "refused"), [(LEAST, "new"), (0, "new"), (1, "new"), (5, "b")])
def test_a_full_queue_compares_given_priorities(
    policy: Priorities, new: int, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang.srt.managers.scheduler._make_abort_req", lambda *_, **_kw: None)
    waiting = [request("a", 1), request("b"), request("c", 1)]
    waiting[1].priority = 1
    for forward in range(9):
        policy.step(waiting, [], forward)
    before = [req.priority for req in waiting]
    aborted: list[str] = []

    def send(_out: object, req: Any) -> None:
        aborted.append(req.rid)

    scheduler = SimpleNamespace(
        max_queued_requests=3, waiting_queue=waiting, enable_priority_scheduling=True,
        schedule_low_priority_values_first=False, _release_aborted_request=lambda _req: None,
        beam_coordinator=SimpleNamespace(retire_group=lambda _req: None),
        send_abort_output=send,
        ipc_channels=SimpleNamespace(send_to_tokenizer=SimpleNamespace(send_output=send)),
    )  # fmt: skip
    for req in (*waiting, asked := request("new", new)):
        req.time_stats.trace_ctx = SimpleNamespace(abort=lambda **_kw: None)
    waiting[1].time_stats.wait_queue_entry_time = 1.0  # queued last
    original = getattr(Scheduler._abort_on_queued_limit, "__wrapped__", None)
    original = original or Scheduler._abort_on_queued_limit
    assert priorities._full(original, scheduler, asked) is (refused == "new")
    assert aborted == [refused]
    left = [level for level, rid in zip(before, "abc", strict=True) if rid != refused]
    assert [req.priority for req in waiting] == left
    assert asked.priority == new


def power(config: dict[str, Any]) -> SwapPower:
    loaded = ExtConfig.model_validate(config)
    assert loaded.swap is not None
    return SwapPower(loaded, loaded.swap)


def test_radix_eviction_by_priority_is_refused() -> None:
    from sgl_ext.engine.core.unserved import COMMON

    fields = [field for field, *_ in (*COMMON, *SwapPower.unserved)]
    off = dict.fromkeys(fields, 0) | {"disaggregation_mode": "null"}
    args = SimpleNamespace(
        **off, schedule_low_priority_values_first=False, disable_priority_preemption=False,
        radix_eviction_policy="priority", schedule_policy="fcfs",
    )  # fmt: skip
    swap = {"capacity": "1MiB", "policy": "fcfs"}
    tiers = {"host": {"capacity": "1MiB"}}
    with pytest.raises(ActivationError, match=r"swap\.policy fcfs .* --radix-eviction-policy"):
        power({"tiers": tiers, "swap": swap}).declare(args)
    args.schedule_policy = "lpm"
    with pytest.raises(
        ActivationError, match=r"only with --schedule-policy fcfs or lof, found lpm"
    ):
        power({"tiers": tiers, "swap": swap}).declare(args)
    power({"tiers": tiers, "swap": {"capacity": "1MiB"}}).declare(args)


@pytest.mark.parametrize(
    ("priority", "given"),
    [(LEAST, 0), (None, 0), (3, 3), (sys.maxsize, (1 << 31) - 1), (LEAST + 1, -(1 << 31))],
)
def test_given_priorities_leave_room_for_ageing(priority: int, given: int) -> None:
    """SGLang takes any integer of 64 bits, and its tree raises OverflowError for a larger level."""
    req = request("one", priority)
    found = priorities_of(Swap(capacity=1 << 20, policy="static", ageing=1))
    assert found is not None
    for step in range(99):
        found.step([req], [], step)
    assert priorities.given(req) == given
    assert req.priority == given + 99
