"""The turn of a request: what it waits for, and what follows from its admission."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from sgl_ext.config import ExtConfig
from sgl_ext.engine.chunks import power as chunk_hooks
from sgl_ext.engine.core import runtime
from sgl_ext.engine.core.meta_info import told
from sgl_ext.engine.step import admission
from sgl_ext.plan import Compute, PrefillPlan, Span


class Tiers:
    """Stands for the stack: pages of ``coming`` requests are on their way."""

    lower = ("ssd",)

    def __init__(self) -> None:
        self.coming = {"r"}

    def ready(self, rid: str) -> bool:
        return rid not in self.coming

    def take_restored(self, _rid: str) -> dict[str, Any]:
        return {}

    def forget(self, rid: str) -> None:
        pass


class Links:
    """Stands for the links of requests."""

    def __init__(self) -> None:
        self.coming = {"r"}
        self.held: set[str] = set()

    def ready(self, req: Any) -> bool:
        return req.rid not in self.coming

    def acquire(self, req: Any, *, computing: bool = False) -> dict[str, Any]:
        self.held.add(req.rid)
        if computing:
            return {"power": "chunks", "linked": 0}
        return {"power": "chunks", "linked": 3}

    def release(self, rid: str) -> None:
        self.held.discard(rid)


ROWS = 4


@pytest.fixture
def ext(monkeypatch: pytest.MonkeyPatch) -> Any:
    ext: Any = runtime.ExtRuntime(ExtConfig())
    ext.tiers, ext.links = Tiers(), Links()
    monkeypatch.setattr(runtime, "current", ext)
    return ext


@pytest.fixture
def adder() -> Any:
    linker = SimpleNamespace(agreed=lambda value: value, used_in_device=lambda *_: None)
    wrapper = SimpleNamespace(cache_linker=linker, private_load_indices={})
    rows = SimpleNamespace(available_size=lambda: ROWS)
    cache = SimpleNamespace(linker=wrapper, tree_core=None, req_to_token_pool=rows)
    running = SimpleNamespace(reqs=[], is_empty=lambda: True)
    return SimpleNamespace(
        tree_cache=cache,
        can_run_list=[],
        running_batch=running,
        preempt_list=[],
        max_running_requests=None,
    )


def request() -> Any:
    return SimpleNamespace(
        rid="r", customized_info=None, last_node=0, output_ids=[], session=None, beam_group=None,
        prefix_len=16, kv=SimpleNamespace(cache_protected_len=16, holds_kv=True),
    )  # fmt: skip


def test_a_request_waits_for_all_that_is_on_its_way(ext: Any, adder: Any) -> None:
    req, asked = request(), []

    def original(_adder: Any, req: Any, *_args: Any) -> bool:
        asked.append(req)
        return True

    for power in (ext.tiers, ext.links):
        assert admission._preempt(original, adder, req) is False
        assert admission._admit(original, adder, req, False, None) == AddReqResult.CONTINUE
        assert not asked
        assert not ext.links.held
        power.coming.clear()
    assert admission._preempt(original, adder, req) is True
    assert asked == [req]
    targets = [hook.target for hook in admission.HOOKS]
    for method in (PrefillAdder.preempt_to_schedule, PrefillAdder.add_one_req):
        assert f"{method.__module__}.{method.__qualname__}" in targets


@pytest.mark.parametrize("admitted", [True, False])
def test_chunks_stay_for_those_who_are_admitted(ext: Any, adder: Any, admitted: bool) -> None:
    ext.tiers.coming.clear()
    ext.links.coming.clear()
    req = request()

    def original(adder: Any, req: Any) -> AddReqResult:
        assert ext.links.held == {"r"}  # the cost of the request follows from its plan
        if admitted:
            adder.can_run_list.append(req)
        return AddReqResult.CONTINUE

    assert admission._admit(original, adder, req) == AddReqResult.CONTINUE
    assert bool(ext.links.held) is admitted
    assert bool(told(req, "chunks")) is admitted


@pytest.mark.parametrize("alone", [True, False])
def test_chunks_that_leave_no_room_are_given_up(ext: Any, adder: Any, alone: bool) -> None:
    """If nobody else holds memory, nobody's end would make room."""
    ext.tiers.coming.clear()
    ext.links.coming.clear()
    adder.running_batch.is_empty = lambda: alone
    req, results = request(), [AddReqResult.NO_TOKEN, AddReqResult.CONTINUE]

    def original(adder: Any, req: Any) -> AddReqResult:
        result = results.pop(0)
        if result == AddReqResult.CONTINUE:
            adder.can_run_list.append(req)
        return result

    last = AddReqResult.CONTINUE if alone else AddReqResult.NO_TOKEN
    assert admission._admit(original, adder, req) == last
    assert [entry["linked"] for entry in told(req, "chunks")] == ([0] if alone else [])
    assert bool(ext.links.held) is alone


def test_what_was_linked_is_told_once(ext: Any, adder: Any) -> None:
    """A request that is retracted is admitted again."""
    ext.tiers.coming.clear()
    ext.links.coming.clear()
    req = request()

    def original(adder: Any, req: Any) -> AddReqResult:
        adder.can_run_list.append(req)
        return AddReqResult.CONTINUE

    for _ in range(2):
        admission._admit(original, adder, req)
    assert len(told(req, "chunks")) == 1


@pytest.mark.parametrize("waits", ["for a seat", "for others to give way"])
def test_no_plan_outlives_what_it_is_of(
    ext: Any, adder: Any, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    """Not admitted, the request may stop being restored; its next plan is made anew."""
    plan = PrefillPlan([Span(0, 32, Compute())])
    ext.tiers, ext.links, ext.prefixes = None, None, {}
    ext.restorer = SimpleNamespace(
        turn=lambda *_: True, restores=lambda _rid: True, computes=lambda _rid: False,
        plan=lambda *_: plan,
    )  # fmt: skip
    req = request()
    req.prefix_len, req.host_hit_length, req.full_untruncated_fill_ids = 0, 0, [0] * 32
    made = []

    def original(_adder: Any, req: Any) -> bool:
        made.append(ext.plans[req.rid])
        return False

    if waits == "for a seat":
        monkeypatch.setattr(admission.swap_in, "expect", lambda _adder: None)
        monkeypatch.setattr(admission.swap_in, "take_back", lambda *_: AddReqResult.OTHER)
        assert admission._admit(original, adder, req) is AddReqResult.OTHER
    else:
        assert not admission._preempt(original, adder, req)
        assert made == [plan]
    assert ext.plans == {}


@pytest.mark.parametrize(("readable", "tries"), [(True, True), (None, False), (False, True)])
def test_others_give_way_to_whom_has_lost_its_kv(
    ext: Any, adder: Any, monkeypatch: pytest.MonkeyPatch, readable: bool | None, tries: bool
) -> None:
    """It is computed again; but nobody makes room for what is still on its way."""
    ext.tiers = ext.links = None
    ext.swap = MagicMock(clock=SimpleNamespace(on=nullcontext))
    ext.swap.__contains__.return_value = True
    monkeypatch.setattr(admission.swap_in, "expect", lambda _adder: None)
    found = admission.swap_in.Found(16, 0, readable)
    monkeypatch.setattr(admission.swap_in, "look_up", lambda *_: found)
    monkeypatch.setattr(admission.swap_in, "lacking", lambda *_: 3.0)
    asked = []
    monkeypatch.setattr(
        admission.swap_hooks, "displace", lambda *given: asked.append(given[2]) or True
    )

    def original(*_: Any) -> bool:
        raise AssertionError

    assert admission._preempt(original, adder, request()) is tries
    assert asked == [3.0] * tries


def test_a_swapped_request_waits_for_no_chunks(
    ext: Any, adder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its KV holds them; if that is lost, they begin to come then, and it waits for them."""
    ext.tiers.coming.clear()
    asked = []
    ext.links.ask = asked.append
    swapped: dict[str, Any] = {"r": SimpleNamespace(keys=(), tokens=16)}
    ext.swap = MagicMock(clock=SimpleNamespace(on=nullcontext), get=swapped.get)
    ext.swap.__contains__.side_effect = swapped.__contains__
    ext.swap.drop.side_effect = swapped.pop
    monkeypatch.setattr(admission.swap_in, "expect", lambda _adder: None)
    adder.page_size = 16
    req = request()
    assert not admission._held_back(adder, req, False)
    chunk_hooks._check(None, req)
    assert not asked

    lost = admission.swap_in.Found(16, 0, False)
    monkeypatch.setattr(admission.swap_in, "look_up", lambda *_: lost)

    def original(*_: Any) -> AddReqResult:
        raise AssertionError

    assert admission._admit(original, adder, req) == AddReqResult.CONTINUE
    assert (asked, swapped) == ([req], {})
    assert admission._held_back(adder, req, False)


def test_nobody_is_preempted_for_a_request_that_was_admitted(
    ext: Any, adder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's result says whether there is room for the next one."""
    ext.tiers.coming.clear()
    ext.links.coming.clear()

    def makes_room(*_: Any) -> bool:
        raise AssertionError

    monkeypatch.setattr(admission.swap_hooks, "makes_room", makes_room)

    def original(adder: Any, req: Any) -> AddReqResult:
        adder.can_run_list.append(req)
        return AddReqResult.NO_TOKEN

    assert admission._admit(original, adder, request()) == AddReqResult.NO_TOKEN
    assert len(adder.can_run_list) == 1


def preempting(running: list[Any], released: list[int], **more: Any) -> Any:
    """An adder that may preempt ``running``, and records the places of those it releases."""
    batch = SimpleNamespace(
        reqs=running, release_req=lambda at, _left: released.append(at),
        filter_batch=lambda **_kept: None,
    )  # fmt: skip
    return SimpleNamespace(
        running_batch=batch, preempt_list=[], priority_scheduling_preemption_threshold=1,
        memory_budget=SimpleNamespace(total_offset=0), **more,
    )  # fmt: skip


def test_beams_are_never_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's release of a beam group's leader leaves the slots of its members behind."""
    from sglang.srt import runtime_context

    schedule = SimpleNamespace(schedule_low_priority_values_first=False)
    monkeypatch.setattr(runtime_context, "get_schedule", lambda: schedule)
    released: list[int] = []
    running = [
        SimpleNamespace(
            finished=lambda: False, priority=0, beam_group=group, arrival=at,
            kv=SimpleNamespace(kv_allocated_len=100),
        )
        for at, group in enumerate((object(), None))
    ]  # fmt: skip
    adder = preempting(running, released, _get_running_request_total_token_offset=lambda _req: 0)
    monkeypatch.setattr(admission.swap_hooks, "_arrival", lambda one: one.arrival)
    urgent: Any = SimpleNamespace(priority=5)
    assert not admission.swap_hooks.displace(adder, urgent, 150.0)
    assert released == []
    assert admission.swap_hooks.displace(adder, urgent, 50.0)
    assert released == [1]


def test_sglang_preempts_no_beams_for_a_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers import schedule_policy

    schedule = SimpleNamespace(schedule_low_priority_values_first=False)
    monkeypatch.setattr(schedule_policy, "get_schedule", lambda: schedule)
    released: list[int] = []

    class Running(SimpleNamespace):
        __hash__ = object.__hash__

    running = [
        Running(
            finished=lambda: False, priority=0, beam_group=group,
            time_stats=SimpleNamespace(wait_queue_entry_time=at),
        )
        for at, group in enumerate((None, object()))
    ]  # fmt: skip
    adder = preempting(
        running, released, rem_total_tokens=1000, _request_slot_reserve_for_req=lambda _req: 0,
        _get_running_request_total_token_offset=lambda _req: 10,
    )  # fmt: skip
    urgent: Any = SimpleNamespace(
        priority=5, full_untruncated_fill_ids=[1] * 8, prefix_len=0,
        sampling_params=SimpleNamespace(max_new_tokens=8),
    )  # fmt: skip
    original = schedule_policy.PrefillAdder.preempt_to_schedule
    assert admission.beams.sparing(original, adder, urgent)
    assert released == [0]
    assert adder.preempt_list == [running[0]]


def leader(width: int) -> Any:
    group = SimpleNamespace(beam_width=width, member_rows=None, retired=False)
    return SimpleNamespace(
        beam_group=group, finished=lambda: False, kv=SimpleNamespace(holds_kv=False)
    )


def test_rows_of_a_beam_group_are_promised_with_its_leader(ext: Any, adder: Any) -> None:
    """SGLang ends the scheduler if a group finds no rows for its members after the prefill."""
    plain = SimpleNamespace(beam_group=None, kv=SimpleNamespace(holds_kv=False))
    assert admission.swap_in.has_seat(adder, leader(ROWS))
    assert not admission.swap_in.has_seat(adder, leader(ROWS + 1))
    adder.can_run_list.append(leader(ROWS - 1))
    assert admission.swap_in.has_seat(adder, plain)
    assert not admission.swap_in.has_seat(adder, leader(2))
    adder.can_run_list.append(plain)
    assert not admission.swap_in.has_seat(adder, plain)
    ext.resuming.append(plain)
    adder.can_run_list.pop()
    assert not admission.swap_in.has_seat(adder, plain)
