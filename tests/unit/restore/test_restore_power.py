"""Calls of the scheduler to the ``restore`` power, without a scheduler."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt import runtime_context

from sgl_ext.config import load
from sgl_ext.engine.core import runtime
from sgl_ext.engine.core.hooks import ActivationError
from sgl_ext.engine.restore import setup
from sgl_ext.engine.restore.power import RestorePower
from sgl_ext.engine.restore.prompt import prompt_of
from sgl_ext.engine.tiers.linker import TierLinker
from sgl_ext.memory.slab import Layout
from sgl_ext.planning.compute_cost import ComputeCost
from sgl_ext.planning.costs import HOST, Costs
from sgl_ext.planning.plan import Compute, PrefillPlan, Span
from sgl_ext.planning.strategy import Strategy, choose_strategy

PLAN = PrefillPlan([Span(0, 100, Compute())], stop=32)


class Planner:
    """Stand-in for a planner that answers as the test sets it."""

    page = 16

    def __init__(self) -> None:
        self.asked_for: list[Any] = []
        self.next: PrefillPlan | None = PLAN
        self.going_on = False
        self.begins: list[int] = []
        self.others: list[int] = []
        self.wants = {"r"}
        self.costs = Costs()

    def restore(self, want: Any) -> None:
        self.asked_for.append(want)

    def restores(self, rid: str) -> bool:
        return rid == "r"

    def computes(self, _rid: str) -> bool:
        return self.going_on

    def turn(self, rid: str, _continuing: bool) -> bool:
        return rid != "later"

    def gives_way(self, _rid: str, _begin: int, others: int) -> bool:
        self.others.append(others)
        return others > 1

    def part(self, _rid: str, begin: int) -> object:
        self.begins.append(begin)
        return self.next

    def linked(self, _rid: str) -> bool:
        return False

    def prefix_plan(self, _rid: str, _part: object, _end: int) -> PrefillPlan | None:
        return self.next


CONFIG = load({"tiers": {"ssd": {"directories": ["/ssd"], "capacity": "1GiB"}}, "restore": {}})


@pytest.fixture
def power(monkeypatch: pytest.MonkeyPatch) -> Any:
    assert CONFIG.restore is not None
    ext = runtime.ExtRuntime(CONFIG)
    power: Any = RestorePower(CONFIG, CONFIG.restore)
    power._ext, power.planner, power.prefixes = ext, Planner(), {}
    power._scheduler = SimpleNamespace(waiting_queue=[])
    ext.add(power)
    monkeypatch.setattr(runtime, "current", ext)
    scheduled(monkeypatch)
    return power


def scheduled(
    monkeypatch: pytest.MonkeyPatch, *, by_priority: bool = False, low: bool = False
) -> None:
    schedule = SimpleNamespace(
        enable_priority_scheduling=by_priority, schedule_low_priority_values_first=low
    )
    monkeypatch.setattr(runtime_context, "get_schedule", lambda: schedule)


def request(rid: str = "r", **more: Any) -> Any:
    fields = {
        "prefix_len": 16, "host_hit_length": 32, "full_untruncated_fill_ids": [0] * 100,
        "origin_input_ids": [0] * 90, "output_ids": [0] * 10, "positional_embed_overrides": None,
        "session": None, "multimodal_inputs": None, "_compute_max_prefix_len": lambda end: end - 1,
    }  # fmt: skip
    return SimpleNamespace(rid=rid, **{**fields, **more})


def test_the_first_part_begins_after_the_host_memory_hit(power: Any) -> None:
    assert power.plan(SimpleNamespace(), request())
    power.planner.going_on = True
    assert power.plan(SimpleNamespace(), request())
    assert power.planner.begins == [48, 16]
    assert power._ext.plans == {"r": PLAN}


def test_a_request_that_waits_for_its_first_part_defers_no_other(power: Any) -> None:
    power.planner.next = None
    adder = SimpleNamespace()
    assert not power.plan(adder, request())
    assert power.ready(adder, request("plain"), False)
    assert not power.ready(adder, request("later"), False)


def test_a_prompt_gives_way_only_while_others_are_admitted(
    power: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Does not count itself, prompts that load something, and less urgent ones."""
    scheduled(monkeypatch, by_priority=True)
    queue = power._scheduler.waiting_queue
    req = request(priority=5)
    queue += [
        req, request("x", priority=5), request("y", priority=9), request("low", priority=4),
        request("loads", priority=5),
    ]  # fmt: skip
    power.planner.wants.add("loads")
    step = SimpleNamespace()
    for admitted in ([queue[1]], []):
        adder = SimpleNamespace(can_run_list=[])
        assert not power.plan(adder, req)
        adder.can_run_list += admitted
        power.after_step(step)
    assert power.plan(SimpleNamespace(can_run_list=[]), req)  # the others found no room
    power.after_step(step)
    assert not power.plan(SimpleNamespace(can_run_list=[]), req)
    assert power.planner.others == [2, 2, 0, 2]
    power._alone = False
    power._ext.independent = True
    assert power.plan(SimpleNamespace(can_run_list=[]), req)


def test_a_deferred_request_loses_its_plan_unless_partly_computed(power: Any) -> None:
    """Defers a request of which a part is computed, then one of which none is.

    The first continues with its plan. The second may not be restored any more when it is admitted.
    """
    assert power.plan(SimpleNamespace(), request())
    power.planner.going_on = True
    power.deferred(request())
    assert power._ext.plans == {"r": PLAN}
    power.planner.going_on = False
    power.deferred(request())
    assert power._ext.plans == {}


@pytest.mark.parametrize("field", ["session", "multimodal_inputs"])
def test_sessions_and_multimodal_prompts_are_not_restored(power: Any, field: str) -> None:
    assert prompt_of(request(), 16, 16) == (1, 5, 100, 0)
    assert prompt_of(request(**{field: object()}), 16, 16) is None


def test_a_prompt_is_restored_that_a_schedule_policy_looks_up_before_admission(power: Any) -> None:
    """SGLang has not listed the request's tokens by then; its policy looks all of them up."""
    assert prompt_of(request(full_untruncated_fill_ids=[]), 16, 16) == (1, 5, 100, 0)


def test_precedence_follows_the_priorities_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    for by_priority, low, expected in ((False, False, 0), (True, False, -7), (True, True, 7)):
        scheduled(monkeypatch, by_priority=by_priority, low=low)
        prompt = prompt_of(request(priority=7), 16, 16)
        assert prompt is not None
        assert prompt.precedence == expected


@pytest.mark.parametrize("enabled", [True, False])
def test_disabled_tiers_are_not_restored_from(power: Any, enabled: bool) -> None:
    """Looks up tiers that are disabled because their pages were computed with other weights."""
    linker = TierLinker.__new__(TierLinker)
    linker.stack = power.stack = SimpleNamespace(
        enabled=enabled, host=SimpleNamespace(lookup=lambda _keys: 0)
    )
    linker.prefixes = SimpleNamespace(lookup=lambda _rid, _keys, _begin: 0)  # type: ignore[assignment]
    linker.restoring, linker._ranks = power, None
    linker.begin = linker._page = 16
    linker.end = 32
    power.prefixes = SimpleNamespace(release=lambda _rid: None)
    power.matching(request(), 16)
    assert linker.lookup("r", [SimpleNamespace(keys=["00" * 32])]) == [0]
    assert bool(power.planner.asked_for) is enabled


@pytest.mark.parametrize("owned", [True, False])
def test_a_request_that_another_power_owns_is_not_restored(power: Any, owned: bool) -> None:
    power._ext.inside_out.append(SimpleNamespace(owns=lambda _req: owned))
    power.prefixes = SimpleNamespace(release=lambda _rid: None)
    power.stack, power._layered = SimpleNamespace(host=SimpleNamespace(lookup=len)), True
    power.matching(request(), 16)
    assert power.lookup("r", [b""] * 5) == (None if owned else 5)


@pytest.mark.parametrize(
    ("how", "pages", "loading", "chosen"),
    [
        ("auto", 400, 0.02, Strategy.TOKENS),  # tokens at the end attend to many before them
        ("auto", 10, 0.02, Strategy.LAYERS),  # by tokens, one more forward would have its overhead
        ("auto", 10, 1e-5, None),  # loaded before a layer would be computed
        ("auto", 10, None, None),  # the cost of loading is not measured yet
        ("auto", 0, 1.0, None),
        ("tokens", 10, 1e-5, Strategy.TOKENS),
        ("layers", 40, None, Strategy.LAYERS),
        ("never", 40, 1.0, None),
    ],
)
def test_host_memory_strategy_follows_the_option_and_the_costs(
    how: str, pages: int, loading: float | None, chosen: Strategy | None
) -> None:
    costs = Costs(ComputeCost(0.05, 1e-3, 1e-6))
    if loading is not None:
        costs.loaded(HOST, 1600, 100 * loading)
    some: dict[str, Any] = {"first": 0, "pages": pages, "page": 16, "layers": 30, "rid": "r"}
    by = choose_strategy(how, costs, layered=True, **some)
    assert by is chosen
    by_tokens_only = choose_strategy(how, costs, layered=False, **some)
    assert by_tokens_only is (Strategy.TOKENS if chosen is Strategy.LAYERS else chosen)
    decided = how == "auto" and loading is not None and pages > 0
    assert ("load_or_compute" in costs.decisions.describe()) is decided


@pytest.mark.parametrize(
    ("size", "chunk", "message"),
    [
        (None, 512, "--chunked-prefill-size is None; set it to 16 or more"),
        (8, 512, "--chunked-prefill-size is 8; set it to 16 or more"),
        (
            512,
            100,
            "restore.chunk is 100 tokens, which is not a multiple of the page size 16; "
            "set it to 112",
        ),
        (512, 128, None),
    ],
)
def test_restore_requires_parts_of_whole_pages(
    size: int | None, chunk: int, message: str | None
) -> None:
    config = load({**CONFIG.resolved(), "restore": {"chunk": chunk}})
    assert config.restore is not None and config.tiers is not None
    layout = Layout(16, 2, 1, 8, "float32", "a model")
    costs = Costs()
    if message is None:
        setup.prepare(config.restore, layout.page, size, costs)
        assert (costs.chunk, costs.unit) == (chunk, 128)
    else:
        with pytest.raises(ActivationError, match=re.escape(message)):
            setup.prepare(config.restore, layout.page, size, costs)


def test_restore_is_refused_where_sglang_aligns_chunks() -> None:
    """A prompt whose parts are shorter than the alignment would wait forever."""
    setup.require_unaligned(None)
    with pytest.raises(ActivationError, match="SGLang aligns chunks to 4096 tokens"):
        setup.require_unaligned(4096)
