"""Tests of SGLang's prefill budget: it counts computed tokens, and cuts one prompt at a time."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

from sgl_ext.config import ExtConfig
from sgl_ext.engine.core import runtime
from sgl_ext.engine.step.budget import PARKED, _charge, _continue, _select
from sgl_ext.planning.plan import Compute, Link, Load, PrefillPlan, Span

PAGE = 16
PLAN = PrefillPlan([Span(0, 50, Compute()), Span(50, 350, Link(0, 50)), Span(350, 480, Compute())])


@dataclass
class Admission:
    prefix_len: int
    extend_len: int
    is_chunked: bool
    max_new_tokens: int = 7


@pytest.fixture(autouse=True)
def ext(monkeypatch: pytest.MonkeyPatch) -> None:
    ext = runtime.ExtRuntime(ExtConfig())
    ext.plans["linked"] = PLAN
    monkeypatch.setattr(runtime, "current", ext)


def adder(rem: int, **more: Any) -> Any:
    budget = SimpleNamespace(remaining_total=10_000, total_offset=0, ceil_paged_tokens=int)
    fields = {
        "new_chunked_req": None, "chunked_req_limit": None, "can_run_list": [],
        "running_batch": None,
        "memory_budget": budget, "log_input_tokens": 0, "log_hit_tokens": 0,
        "log_replay_tokens": 0, "reprocessed_log_input_tokens": 0, "reprocessed_log_hit_tokens": 0,
    }  # fmt: skip
    return SimpleNamespace(
        page_size=PAGE, rem_chunk_tokens=rem, rem_input_tokens=1000, **{**fields, **more}
    )


def select(adder: Any, rid: str, admission: Any, **kw: Any) -> Any:
    req = SimpleNamespace(rid=rid, prefix_len=0, full_untruncated_fill_ids=[0] * 480)
    return _select(lambda *_args, **_kw: admission, adder, req, host_hit_length=0, **kw)


def test_a_part_of_a_prompt_ends_where_the_budget_ends() -> None:
    found = select(adder(64), "linked", Admission(0, 352, is_chunked=True))
    assert (found.extend_len, PLAN.computed(0, found.extend_len)) == (352, 52)
    found = select(adder(40), "linked", Admission(0, 340, is_chunked=True))
    assert found.extend_len == 32
    part = Admission(0, 384, is_chunked=True)
    found = select(adder(64), "linked", part, truncation_align_size=64)
    assert found.extend_len == 320


def test_a_part_of_a_prompt_ends_at_the_stop_of_its_plan() -> None:
    """It ends there even if the budget allows all of it; for SGLang the prompt is chunked."""
    runtime.current.plans["restored"] = PrefillPlan([Span(0, 480, Compute())], stop=96)
    found = select(adder(4096), "restored", Admission(0, 480, is_chunked=False))
    assert (found.extend_len, found.is_chunked, found.max_new_tokens) == (96, True, 0)
    found = select(adder(64), "restored", Admission(16, 480, is_chunked=True))
    assert found.extend_len == 64
    whole = Admission(0, 90, is_chunked=False)
    assert select(adder(4096), "restored", whole) is whole


def test_a_part_of_a_prompt_ends_with_a_whole_page() -> None:
    """SGLang fills a budget to the last token, also within a page that is loaded."""
    spans = [Span(0, 16, Compute()), Span(16, 464, Load()), Span(464, 480, Compute())]
    runtime.current.plans["restored"] = PrefillPlan(spans)
    found = select(adder(24), "restored", Admission(0, 472, is_chunked=True))
    assert found.extend_len == 464
    req = SimpleNamespace(rid="restored", prefix_len=0, full_untruncated_fill_ids=[0] * 480)
    limits: list[int] = []
    _continue(lambda adder, _req: limits.append(adder.chunked_req_limit), adder(24), req)
    assert limits == [464]
    most = Admission(400, 80, is_chunked=True)  # another part has not used up the budget
    assert select(adder(512), "restored", most).extend_len == 80


def test_the_part_that_selects_tokens_is_not_divided_if_a_whole_budget_has_room_for_it() -> None:
    spans = [Span(0, 50, Compute()), Span(50, 350, Link(0, 50, 0.1)), Span(350, 480, Compute())]
    runtime.current.plans["asking"] = PrefillPlan(spans, undivided=50)
    whole = Admission(0, 480, is_chunked=False)
    assert select(adder(1000), "asking", whole) is whole
    assert select(adder(100), "asking", Admission(0, 480, is_chunked=True)).extend_len == 48
    assert select(adder(40), "asking", Admission(0, 480, is_chunked=True)).extend_len == 32
    # The prefix is cached: the next step has a whole budget.
    cached = Admission(64, 416, is_chunked=True)
    busy = adder(140, can_run_list=["another"])
    assert select(busy, "asking", cached) is AddReqResult.OTHER
    # If that is not enough, either, the last part is as long as it can be.
    assert select(adder(140), "asking", cached).extend_len == 256 - 64

    def continued(prefix: int, budget: int) -> int:
        limits: list[int] = []
        req = SimpleNamespace(rid="asking", prefix_len=prefix, full_untruncated_fill_ids=[0] * 480)
        _continue(lambda adder, _: limits.append(adder.chunked_req_limit), adder(budget), req)
        return limits[0]

    assert continued(64, 200) == 416
    assert continued(16, 100) == 32
    assert continued(64, 140) == 256 - 64
    assert continued(256, 140) == 480 - 256
    assert continued(64, 100) == 384 - 64  # text behind the chunk is computed in both parts


@pytest.mark.parametrize("rid", ["linked", "plain"])
def test_no_request_is_admitted_behind_a_chunked_prompt(rid: str) -> None:
    """Some budget is left, but no memory is reserved for the rest of the chunked prompt."""
    cut = adder(12, new_chunked_req="other")
    for chunked in (True, False):
        admission = Admission(0, 8, is_chunked=chunked)
        assert select(cut, rid, admission) is AddReqResult.OTHER


def test_only_whole_unplanned_prompts_join_a_continued_prompt() -> None:
    whole, part = Admission(0, 8, is_chunked=False), Admission(0, 16, is_chunked=True)
    assert select(adder(40), "plain", whole, has_chunked_req=True) is whole
    assert select(adder(40), "plain", part, has_chunked_req=True) is AddReqResult.OTHER
    assert select(adder(40), "linked", whole, has_chunked_req=True) is AddReqResult.OTHER
    assert select(adder(40), "plain", part) is part
    assert select(adder(9), "linked", Admission(0, 300, is_chunked=True)) is AddReqResult.OTHER


@pytest.mark.parametrize("taken", [0, 64, 352])
def test_the_unused_part_of_a_budget_credit_is_returned(taken: int) -> None:
    budget = adder(64)
    req = SimpleNamespace(
        rid="linked", prefix_len=0, extend_len=taken, full_untruncated_fill_ids=[0] * 480,
        extend_end=taken, sampling_params=SimpleNamespace(max_new_tokens=9), retracted_stain=False,
        output_ids=[0, 0],  # generated before it was preempted, and part of the prompt now
    )  # fmt: skip

    def original(adder: Any, req: Any) -> Any:
        assert adder.rem_chunk_tokens >= 352
        if taken:
            adder.can_run_list.append(req)
            adder.rem_chunk_tokens -= taken
            adder.log_input_tokens += taken
        return req

    assert _continue(original, budget, req) is req
    assert budget.rem_chunk_tokens == 64 - PLAN.computed(0, taken)
    assert budget.rem_input_tokens == 1000 + taken - PLAN.computed(0, taken)
    assert budget.log_input_tokens == PLAN.computed(0, taken)
    assert budget.log_hit_tokens == taken - PLAN.computed(0, taken)
    # The memory of the rest of the prompt and of the answer stays reserved.
    assert budget.memory_budget.total_offset == (480 - taken + 7 if taken else 0)


def test_a_part_waits_for_running_requests_that_have_all_memory() -> None:
    req = SimpleNamespace(
        rid="plain", prefix_len=64, full_untruncated_fill_ids=[0] * 480, output_ids=[],
        sampling_params=SimpleNamespace(max_new_tokens=9),
    )  # fmt: skip
    for free, empty, waits in ((15, False, True), (16, False, False), (15, True, False)):
        budget = adder(512, running_batch=SimpleNamespace(is_empty=lambda empty=empty: empty))
        budget.memory_budget.total_offset = 100
        budget.memory_budget.remaining_total = free - 100
        found = _continue(lambda _adder, _req: None, budget, req)
        assert found is (req if waits else None)
        assert getattr(budget, PARKED, False) == waits
        assert budget.memory_budget.total_offset == (100 + 416 + 9 if waits else 100)


@pytest.mark.parametrize(("left", "waits"), [(-1, True), (0, True), (16, False)])
def test_a_part_waits_for_a_budget(left: int, waits: bool) -> None:
    """Mixed chunks take running requests off the budget, also those that were resumed."""
    req = SimpleNamespace(
        rid="plain", prefix_len=64, full_untruncated_fill_ids=[0] * 480, output_ids=[],
        sampling_params=SimpleNamespace(max_new_tokens=9),
    )  # fmt: skip
    budget = adder(left)
    assert _continue(lambda _adder, _req: None, budget, req) is (req if waits else None)
    assert getattr(budget, PARKED, False) == waits


@pytest.mark.parametrize(("free", "limit"), [(300, 288), (5, 16), (4000, 512)])
def test_a_part_takes_no_more_than_the_free_memory(free: int, limit: int) -> None:
    """Running requests have reserved more than there is. SGLang would take a whole chunk."""
    req = SimpleNamespace(rid="plain", prefix_len=64, full_untruncated_fill_ids=[0] * 4800)
    budget = adder(512)
    budget.memory_budget.total_offset, budget.memory_budget.remaining_total = 5000, free - 5000
    assert _continue(lambda adder, _req: adder.chunked_req_limit, budget, req) == limit


def test_the_limit_of_a_chunked_request_counts_computed_tokens() -> None:
    limited = adder(512, chunked_req_limit=64)
    req = SimpleNamespace(rid="linked", prefix_len=0, full_untruncated_fill_ids=[0] * 480)
    _continue(lambda adder, _req: adder.chunked_req_limit, limited, req)
    assert limited.chunked_req_limit == 352
    assert limited.rem_chunk_tokens == 512


@pytest.mark.parametrize("retracted", [False, True])
def test_linked_tokens_are_logged_as_cached(retracted: bool) -> None:
    """They are not charged, and no logged number is negative."""
    found = adder(512, rem_dllm_tokens=None, dllm_config=None, exact_chunk_fill=False)
    found.memory_budget.reserve = lambda *_args, **_kw: None
    found.ceil_paged_tokens, found.per_req_token_overhead = int, 0
    for rid, computed in (("linked", 180), ("plain", 180 + 480)):
        PrefillAdder._update_prefill_budget(found, 0, 480, 7, retracted)
        req = SimpleNamespace(rid=rid, retracted_stain=retracted)
        _charge(None, found, req, Admission(0, 480, is_chunked=False), 0)
        assert found.rem_chunk_tokens == 512 - computed
        assert found.rem_input_tokens == 1000 - computed
        assert (found.log_input_tokens, found.log_hit_tokens) == (computed, 300)
        again = (found.reprocessed_log_input_tokens, found.reprocessed_log_hit_tokens)
        assert again == ((computed, 300) if retracted else (0, 0))
    assert found.log_replay_tokens == 0


@pytest.mark.parametrize(
    ("rid", "hit", "budget"), [("linked", 0, 64 + 300), ("linked", 112, 64 + 238), ("plain", 0, 64)]
)
def test_sglang_selects_with_a_budget_of_computed_tokens(rid: str, hit: int, budget: int) -> None:
    """The budget is as before when SGLang has selected, also if its code raises an error."""
    found, seen = adder(64), []
    req = SimpleNamespace(rid=rid, prefix_len=0, full_untruncated_fill_ids=[0] * 480)

    def original(adder: Any, _req: Any, **_kw: Any) -> Any:
        seen.append(adder.rem_chunk_tokens)
        raise LookupError

    with pytest.raises(LookupError):
        _select(original, found, req, host_hit_length=hit)
    assert (seen, found.rem_chunk_tokens) == ([budget], 64)


def test_a_spent_budget_admits_no_planned_request() -> None:
    """Credit for tokens that are not computed does not replace a budget that is spent."""
    admission = Admission(0, 480, is_chunked=False)
    assert select(adder(0), "linked", admission) is AddReqResult.OTHER
    assert select(adder(1), "linked", admission) is admission
    assert select(adder(0), "plain", admission) is admission
