"""Tests of the admission of waiting requests: conditions, preemption, and rows of beam groups."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from delayed_copies import DelayedEngine
from sglang.srt import runtime_context
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from stack_kit import Machine
from tier_kit import keys

from sgl_ext.config import ExtConfig, SwapExperiment, load
from sgl_ext.engine.chunks.power import ChunksPower
from sgl_ext.engine.chunks.report import COUNTED
from sgl_ext.engine.core import runtime
from sgl_ext.engine.core.meta_info import told
from sgl_ext.engine.core.power import Power
from sgl_ext.engine.core.requests import retractable
from sgl_ext.engine.step import admission, budget
from sgl_ext.engine.swap import out
from sgl_ext.engine.swap.ahead import SwapAhead
from sgl_ext.engine.swap.power import SwapPower
from sgl_ext.engine.workarounds import beams
from sgl_ext.planning.costs import Costs
from sgl_ext.swap.manager import SwapManager

ROWS, PAGE = 4, 4


class Stub(Power[Any]):
    """Power that records its calls, and returns what the test has set."""

    def __init__(self, name: str) -> None:
        super().__init__(ExtConfig(), None)
        self.name = name  # type: ignore[misc]
        self.calls: list[Any] = []
        self.here = self.plans = True
        self.result: Any = None
        self.held = 0

    def ready(self, adder: Any, req: Any, continuing: bool) -> bool:
        self.calls.append("ready")
        return self.here

    def plan(self, adder: Any, req: Any) -> bool:
        self.calls.append("plan")
        return self.plans

    def resume(self, adder: Any, req: Any) -> Any:
        return self.result

    def acquire(self, req: Any) -> None:
        self.held = 3

    def concede(self, req: Any) -> bool:
        self.calls.append("concede")
        conceded, self.held = bool(self.held), 0
        return conceded

    def make_room(self, adder: Any, req: Any) -> bool:
        self.calls.append("make_room")
        return False

    def considered(self, adder: Any, req: Any, admitted: bool) -> None:
        self.calls.append(("considered", admitted))

    def deferred(self, req: Any) -> None:
        self.calls.append("deferred")


@pytest.fixture
def ext(monkeypatch: pytest.MonkeyPatch) -> runtime.ExtRuntime:
    ext = runtime.ExtRuntime(ExtConfig())
    ext.inside_out = [Stub("inner"), Stub("outer")]
    monkeypatch.setattr(runtime, "current", ext)
    return ext


@pytest.fixture
def inner(ext: Any) -> Stub:
    stub: Stub = ext.inside_out[0]
    return stub


@pytest.fixture
def adder() -> Any:
    wrapper = SimpleNamespace(private_load_indices={})
    rows = SimpleNamespace(available_size=lambda: ROWS)
    cache = SimpleNamespace(linker=wrapper, tree_core=None, req_to_token_pool=rows, page_size=PAGE)
    running = SimpleNamespace(reqs=[], is_empty=lambda: True)
    return SimpleNamespace(
        tree_cache=cache, can_run_list=[], running_batch=running, preempt_list=[],
        max_running_requests=None, page_size=PAGE, new_chunked_req=None,
        memory_budget=SimpleNamespace(total_offset=0, ceil_paged_tokens=int),
        _lock_node=lambda _node: nullcontext(),
    )  # fmt: skip


def request() -> Any:
    return SimpleNamespace(
        rid="r", customized_info=None, last_node=0, output_ids=[], session=None, beam_group=None,
        prefix_len=16, extend_end=16, full_untruncated_fill_ids=[0] * 16,
        to_finish=None, return_logprob=False, input_embeds=None,
        sampling_params=SimpleNamespace(custom_params=None),
        kv=SimpleNamespace(cache_protected_len=16, holds_kv=True), cached_tokens=16,
        time_stats=SimpleNamespace(trace_ctx=SimpleNamespace(tracing_enable=False)),
    )  # fmt: skip


def refuses(*_: Any) -> Any:
    raise AssertionError("SGLang was asked")


def admits(adder: Any, req: Any, *_args: Any) -> AddReqResult:
    adder.can_run_list.append(req)
    return AddReqResult.CONTINUE


def test_admission_waits_for_every_power(ext: Any, adder: Any) -> None:
    """Every power is asked, because the call starts its loads; none plans until all are ready."""
    req = request()
    for late in ext.inside_out:
        late.here = False
        assert admission._preempt(refuses, adder, req) is False
        assert admission._admit(refuses, adder, req, False, None) == AddReqResult.CONTINUE
        for power in ext.inside_out:
            assert power.calls.count("ready") == 2
            assert "plan" not in power.calls
            power.calls.clear()
        late.here = True
    assert admission._preempt(lambda *_: True, adder, req) is True
    assert admission._admit(admits, adder, req) == AddReqResult.CONTINUE
    targets = [hook.target for hook in admission.HOOKS]
    for method in (PrefillAdder.preempt_to_schedule, PrefillAdder.add_one_req):
        assert f"{method.__module__}.{method.__qualname__}" in targets


def test_a_request_without_a_plan_is_deferred(ext: Any, inner: Stub, adder: Any) -> None:
    inner.plans = False
    assert admission._admit(refuses, adder, request()) == AddReqResult.CONTINUE
    assert admission._preempt(refuses, adder, request()) is False


@pytest.mark.parametrize("admitted", [True, False])
def test_powers_learn_whether_a_request_was_admitted(
    ext: Any, inner: Stub, adder: Any, admitted: bool
) -> None:
    def original(adder: Any, req: Any) -> AddReqResult:
        assert inner.held  # the cost of the request follows from its plan
        return admits(adder, req) if admitted else AddReqResult.CONTINUE

    assert admission._admit(original, adder, request()) == AddReqResult.CONTINUE
    for power in ext.inside_out:
        assert power.calls[-1] == ("considered", admitted)
        assert "make_room" not in power.calls


def test_only_resumed_requests_join_while_a_chunked_prompt_waits(
    ext: Any, inner: Stub, adder: Any
) -> None:
    """SGLang would count the waiting prompt as part of a batch of other prompts."""
    setattr(adder, budget.PARKED, True)
    assert admission._admit(refuses, adder, request()) == AddReqResult.CONTINUE
    assert admission._preempt(refuses, adder, request()) is False
    assert inner.calls.count("ready") == 1  # its loads begin
    inner.result = AddReqResult.NO_TOKEN
    assert admission._admit(refuses, adder, request()) == AddReqResult.NO_TOKEN


def test_the_rest_of_a_prompt_that_is_cut_is_reserved(ext: Any, adder: Any) -> None:
    """Swapped requests that are resumed in the same step do not get its memory."""
    req = request()
    req.full_untruncated_fill_ids, req.extend_end, req.output_ids = [0] * 480, 64, []
    req.sampling_params.max_new_tokens = 9

    def cut(adder: Any, req: Any, *_args: Any) -> AddReqResult:
        adder.new_chunked_req = req
        return admits(adder, req)

    assert admission._admit(cut, adder, req) == AddReqResult.CONTINUE
    assert adder.memory_budget.total_offset == 480 - 64 + 9


def test_a_deferred_request_drops_its_plan(ext: Any, inner: Stub, adder: Any) -> None:
    inner.result = AddReqResult.NO_TOKEN
    assert admission._admit(refuses, adder, request()) is AddReqResult.NO_TOKEN
    assert inner.calls[-2:] == ["deferred", "make_room"]
    assert not inner.held
    assert not admission._preempt(lambda *_: False, adder, request())
    assert inner.calls[-1] == "deferred"


@pytest.mark.parametrize("alone", [True, False])
def test_powers_concede_kept_kv_if_no_other_request_holds_memory(
    ext: Any, inner: Stub, adder: Any, alone: bool
) -> None:
    """Otherwise the request would never fit, because no other request ends and frees memory."""
    adder.running_batch.is_empty = lambda: alone
    held = []

    def original(adder: Any, req: Any) -> AddReqResult:
        held.append(inner.held)
        return AddReqResult.NO_TOKEN if inner.held else admits(adder, req)

    last = AddReqResult.CONTINUE if alone else AddReqResult.NO_TOKEN
    assert admission._admit(original, adder, request()) == last
    assert held == [3, 0] if alone else [3]
    assert [call for call in inner.calls if "considered" in call] == [("considered", alone)]


@pytest.mark.parametrize("resumed", [True, False])
def test_a_request_is_admitted_in_the_step_that_makes_room(
    ext: Any, inner: Stub, adder: Any, resumed: bool
) -> None:
    """Making room may evict what the look-up of the request found, so it is looked up again."""
    room, looked_up = [], []

    def make_room(_adder: Any, _req: Any) -> bool:
        room.append(1)
        inner.result = AddReqResult.CONTINUE if resumed else None
        return True

    def original(adder: Any, req: Any) -> AddReqResult:
        assert looked_up == ([] if not room else [adder.tree_cache])
        return admits(adder, req) if room else AddReqResult.NO_TOKEN

    inner.make_room = make_room  # type: ignore[method-assign]
    inner.result = AddReqResult.NO_TOKEN if resumed else None
    req = request()
    req.init_next_round_input = looked_up.append
    assert admission._admit(original, adder, req) == AddReqResult.CONTINUE
    assert (len(room), len(looked_up)) == (1, 1)
    assert len(adder.can_run_list) == (not resumed)
    if not resumed:
        admitted = [call[1] for call in inner.calls if call[0] == "considered"]
        assert admitted == [False, True]


def test_no_request_is_preempted_for_an_admitted_request(ext: Any, inner: Stub, adder: Any) -> None:
    """SGLang's result says whether there is room for the next request."""

    def original(adder: Any, req: Any) -> AddReqResult:
        admits(adder, req)
        return AddReqResult.NO_TOKEN

    assert admission._admit(original, adder, request()) == AddReqResult.NO_TOKEN
    assert len(adder.can_run_list) == 1
    assert "make_room" not in inner.calls


PAGES = keys(*range(6))
"""Pages of request ``r``, the first four of which are on the device."""


class Links:
    """Stub of the chunks of requests; those of request ``r`` are still being loaded."""

    def __init__(self) -> None:
        self.coming = {"r"}
        self.asked: list[Any] = []
        self.uses = 0

    def ask(self, req: Any) -> None:
        self.asked.append(req)

    def ready(self, req: Any) -> bool:
        return req.rid not in self.coming

    def acquire(self, _req: Any, *, computing: bool = False) -> dict[str, Any]:
        self.acquired: dict[str, Any] = {
            "power": "chunks", "method": "lego-16", "prefix": 2, **dict.fromkeys(COUNTED, 0),
        }  # fmt: skip
        self.acquired["linked"] = 0 if computing else 3
        return self.acquired

    def report(self, _req: Any) -> dict[str, Any]:
        return self.acquired

    def plan(self, _rid: str) -> None:
        pass

    def reached(self, _req: Any) -> None:
        pass

    def admitted(self, rid: str) -> None:
        self.uses += 1

    def release(self, _rid: str) -> None:
        pass


def chunks(ext: Any) -> ChunksPower:
    config = load({"chunks": {}})
    assert config.chunks is not None
    power = ChunksPower(config, config.chunks)
    power._ext, power.links = ext, Links()  # type: ignore[assignment]
    return power


@pytest.fixture
def copies() -> DelayedEngine:
    return DelayedEngine(random.Random(0))  # noqa: S311


@pytest.fixture
def swap(ext: Any, copies: DelayedEngine) -> Iterator[SwapPower]:
    """Power that has swapped out request ``r``; no page of it is in host memory."""
    config = load({"swap": {"capacity": "1MiB"}})
    assert config.swap is not None
    stack = Machine(PAGE, 16, delayed=copies).stack
    power = SwapPower(config, config.swap)
    power.ext, power.resuming = ext, []
    power.ahead = SwapAhead(stack, Costs())
    power.manager = SwapManager(stack, 16, SwapExperiment())
    power.manager.out("r", len(PAGES) * PAGE, PAGES, None)
    yield power
    copies.let_happen(len(copies.pending))
    stack.close()


def test_a_batch_of_tokens_admits_no_request_of_embeddings(ext: Any, adder: Any) -> None:
    adder.can_run_list = [request()]
    assert admission._admit(admits, adder, request()) is AddReqResult.CONTINUE
    (req := request()).input_embeds = [[0.5]]
    assert admission._admit(refuses, adder, req) is AddReqResult.OTHER


def test_linked_chunks_are_reported_once(ext: Any, adder: Any) -> None:
    """A request may be retracted, and is then admitted a second time."""
    ext.inside_out = [power := chunks(ext)]
    power.links.coming.clear()  # type: ignore[attr-defined]
    req = request()
    for _ in range(2):
        admission._admit(admits, adder, req)
    assert [entry["linked"] for entry in told(req, "chunks")] == [3]
    assert req.cached_tokens == 16 + 3 + 2
    assert power.describe() == dict.fromkeys(COUNTED, 0) | {"requests": 1, "linked": 3}
    assert power.links.uses == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(("readable", "tries"), [(True, True), (None, False), (False, True)])
def test_requests_are_preempted_unless_kv_is_still_being_copied(
    ext: Any,
    swap: SwapPower,
    copies: DelayedEngine,
    monkeypatch: pytest.MonkeyPatch,
    readable: bool | None,
    tries: bool,
) -> None:
    """Lost KV is recomputed and needs room, but no room is made for KV that is still on its way."""
    ext.inside_out = [swap]
    if readable is not False:
        swap.manager.stack.stores.store(PAGES, np.arange(len(PAGES)))
    if readable:
        copies.let_happen(len(copies.pending))
        swap.manager.stack.poll()
    schedule = SimpleNamespace(schedule_low_priority_values_first=False)
    monkeypatch.setattr(runtime_context, "get_schedule", lambda: schedule)
    released: list[int] = []
    adder = preempting(
        [running(at, tokens) for at, tokens in enumerate((100, 1, 22))], released,
        tree_cache=SimpleNamespace(page_size=PAGE), rem_total_tokens=10, per_req_token_overhead=0,
        _get_running_request_total_token_offset=lambda _req: 0,
    )  # fmt: skip
    req = request()
    req.priority, req.full_untruncated_fill_ids = 5, [1] * (req.prefix_len + 24)
    req.sampling_params.max_new_tokens = 8
    assert (swapped := swap.manager.get("r")) is not None
    assert swap.manager.readable(swapped, 4) is readable
    assert admission._preempt(refuses, adder, req) is tries
    # 24 uncached and 8 reserved tokens are 22 more than the budget has: the newest request, which
    # holds 22, does not suffice.
    assert released == ([1, 2] if tries else [])


def test_a_swapped_request_does_not_wait_for_chunks(
    ext: Any, adder: Any, swap: SwapPower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its KV contains them. If that KV is lost, they are loaded and admission waits for them."""
    linking = chunks(ext)
    ext.inside_out = [swap, linking]
    asked = linking.links.asked  # type: ignore[attr-defined]
    req = request()
    linking.arrive(req)
    assert linking.plan(adder, req)
    assert not asked
    assert admission._admit(refuses, adder, req) == AddReqResult.CONTINUE
    assert asked == [req]
    assert "r" not in swap.manager
    monkeypatch.setattr("sgl_ext.engine.chunks.parameters.composition_of", lambda _req: object())
    assert not linking.plan(adder, req)


def running(at: int, tokens: int, group: object = None) -> Any:
    """Returns a running request that arrived at time ``at`` and holds ``tokens`` tokens of KV."""
    return SimpleNamespace(
        finished=lambda: False, priority=0, beam_group=group, session=None, to_finish=None,
        time_stats=SimpleNamespace(wait_queue_entry_time=at),
        kv=SimpleNamespace(kv_allocated_len=tokens),
    )  # fmt: skip


def preempting(reqs: list[Any], released: list[int], **more: Any) -> Any:
    """Returns an adder that may preempt ``reqs``, and adds released indices to ``released``."""
    batch = SimpleNamespace(
        reqs=reqs, release_req=lambda at, _left: released.append(at),
        filter_batch=lambda **_kept: None,
    )  # fmt: skip
    return SimpleNamespace(
        running_batch=batch, preempt_list=[], priority_scheduling_preemption_threshold=1,
        memory_budget=SimpleNamespace(total_offset=0), **more,
    )  # fmt: skip


def test_requests_whose_kv_stays_with_a_session_are_not_preempted() -> None:
    for streaming in (False, True):
        req = running(0, 16)
        req.session = SimpleNamespace(streaming=streaming)
        assert retractable(req) is not streaming


def test_aborted_requests_are_not_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is free at the end of the step; a preempted one would be computed again."""
    schedule = SimpleNamespace(schedule_low_priority_values_first=False)
    monkeypatch.setattr(runtime_context, "get_schedule", lambda: schedule)
    req = running(0, 100)
    req.to_finish = object()
    adder = preempting([req], [], _get_running_request_total_token_offset=lambda _req: 0)
    assert not out.displace(adder, running(5, 0), 50)


def test_beam_groups_are_never_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's release of a beam group's leader leaves the slots of its members allocated."""
    schedule = SimpleNamespace(schedule_low_priority_values_first=False)
    monkeypatch.setattr(runtime_context, "get_schedule", lambda: schedule)
    released: list[int] = []
    reqs = [running(0, 100, object()), running(1, 100)]
    adder = preempting(reqs, released, _get_running_request_total_token_offset=lambda _req: 0)
    urgent: Any = SimpleNamespace(priority=5)
    assert not out.displace(adder, urgent, 150.0)
    assert released == []
    assert out.displace(adder, urgent, 50.0)
    assert released == [1]


def test_preempt_to_schedule_skips_beam_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers import schedule_policy

    schedule = SimpleNamespace(schedule_low_priority_values_first=False)
    monkeypatch.setattr(schedule_policy, "get_schedule", lambda: schedule)
    released: list[int] = []

    class Running(SimpleNamespace):
        __hash__ = object.__hash__

    reqs = [
        Running(
            finished=lambda: False, priority=0, beam_group=group,
            time_stats=SimpleNamespace(wait_queue_entry_time=at),
        )
        for at, group in enumerate((None, object()))
    ]  # fmt: skip
    adder = preempting(
        reqs, released, rem_total_tokens=1000, _request_slot_reserve_for_req=lambda _req: 0,
        _get_running_request_total_token_offset=lambda _req: 10,
    )  # fmt: skip
    urgent: Any = SimpleNamespace(
        priority=5, full_untruncated_fill_ids=[1] * 8, prefix_len=0,
        sampling_params=SimpleNamespace(max_new_tokens=8),
    )  # fmt: skip
    original = schedule_policy.PrefillAdder.preempt_to_schedule
    assert beams.sparing(original, adder, urgent)
    assert released == [0]
    assert adder.preempt_list == [reqs[0]]


def leader(width: int) -> Any:
    group = SimpleNamespace(beam_width=width, member_rows=None, retired=False)
    return SimpleNamespace(
        beam_group=group, finished=lambda: False, kv=SimpleNamespace(holds_kv=False)
    )


def test_rows_of_beam_members_are_reserved_with_their_leader(ext: Any, adder: Any) -> None:
    """SGLang's scheduler ends if there are no rows for a group's members after the prefill."""
    has_row: Callable[[Any], bool] = lambda req: admission.has_row(ext, adder, req)  # noqa: E731
    plain = SimpleNamespace(beam_group=None, kv=SimpleNamespace(holds_kv=False))
    assert has_row(leader(ROWS))
    assert not has_row(leader(ROWS + 1))
    adder.can_run_list.append(leader(ROWS - 1))
    assert has_row(plain)
    assert not has_row(leader(2))
    adder.can_run_list.append(plain)
    assert not has_row(plain)
    adder.can_run_list.pop()
    ext.inside_out[0].joining = lambda: 1  # a request that is resumed in this step
    assert not has_row(plain)
