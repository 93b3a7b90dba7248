"""What the scheduler asks of restoring, without a scheduler."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt import runtime_context

from sgl_ext.config import load
from sgl_ext.engine.core import runtime
from sgl_ext.engine.core.hooks import ActivationError
from sgl_ext.engine.restore import power as restore_setup
from sgl_ext.engine.restore import turn as restore_hooks
from sgl_ext.engine.tiers.linker import TierLinker
from sgl_ext.memory.slab import Layout
from sgl_ext.plan import Compute, PrefillPlan, Span
from sgl_ext.restore.costs import ComputeCost, Costs
from sgl_ext.restore.host_prefixes import Strategy

PLAN = PrefillPlan([Span(0, 100, Compute())], stop=32)


class Restorer:
    """Says what the test wants."""

    page = 16

    def __init__(self) -> None:
        self.asked_for: list[Any] = []
        self.next: PrefillPlan | None = PLAN
        self.going_on = False
        self.begins: list[int] = []
        self.costs = SimpleNamespace(computed=lambda *one: self.asked_for.append(one))

    def ask(self, *one: Any) -> None:
        self.asked_for.append(one)

    def asked(self, _rid: str) -> bool:
        return True

    def restores(self, rid: str) -> bool:
        return rid == "r"

    def computes(self, _rid: str) -> bool:
        return self.going_on

    def turn(self, rid: str, _continuing: bool) -> bool:
        return rid != "later"

    def plan(self, _rid: str, begin: int, _end: int) -> PrefillPlan | None:
        self.begins.append(begin)
        return self.next


@pytest.fixture
def ext(monkeypatch: pytest.MonkeyPatch) -> runtime.ExtRuntime:
    tiers = {"ssd": {"directories": ["/ssd"], "capacity": "1GiB"}}
    ext = runtime.ExtRuntime(load({"tiers": tiers, "restore": {}}))
    ext.restorer, ext.prefixes = Restorer(), {}  # type: ignore[assignment]
    monkeypatch.setattr(runtime, "current", ext)
    scheduled(monkeypatch)
    return ext


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
        "session": None, "multimodal_inputs": None, "_compute_max_prefix_len": lambda end: end - 1,
    }  # fmt: skip
    return SimpleNamespace(rid=rid, **{**fields, **more})


def test_the_first_part_begins_behind_what_host_memory_has(ext: runtime.ExtRuntime) -> None:
    assert restore_hooks.planned(SimpleNamespace(), request())
    ext.restorer.going_on = True  # type: ignore[union-attr]
    assert restore_hooks.planned(SimpleNamespace(), request())
    assert ext.restorer.begins == [48, 16]  # type: ignore[union-attr]
    assert ext.plans == {"r": PLAN}


def test_while_a_part_waits_nobody_is_admitted(ext: runtime.ExtRuntime) -> None:
    """SGLang would count it among the parts of a batch that it is not in."""
    ext.restorer.next, ext.restorer.going_on = None, True  # type: ignore[union-attr]
    adder = SimpleNamespace()
    assert not restore_hooks.held_back(adder, request("plain"), continuing=False)
    assert not restore_hooks.planned(adder, request())
    assert restore_hooks.held_back(adder, request("plain"), continuing=True)
    assert not restore_hooks.held_back(SimpleNamespace(), request("plain"), continuing=True)


def test_one_that_has_to_wait_for_its_first_part_holds_nobody_up(ext: runtime.ExtRuntime) -> None:
    ext.restorer.next = None  # type: ignore[union-attr]
    adder = SimpleNamespace()
    assert not restore_hooks.planned(adder, request())
    assert not restore_hooks.held_back(adder, request("plain"), continuing=False)
    assert restore_hooks.held_back(adder, request("later"), continuing=False)


@pytest.mark.parametrize("field", ["session", "multimodal_inputs"])
def test_prompts_that_are_not_restored(ext: runtime.ExtRuntime, field: str) -> None:
    assert restore_hooks.prompt_of(request(), 16) == (1, 5, 100, 0)
    assert restore_hooks.prompt_of(request(**{field: object()}), 16) is None


def test_priorities_are_those_of_the_scheduler(
    ext: runtime.ExtRuntime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for by_priority, low, expected in ((False, False, 0), (True, False, -7), (True, True, 7)):
        scheduled(monkeypatch, by_priority=by_priority, low=low)
        prompt = restore_hooks.prompt_of(request(priority=7), 16)
        assert prompt is not None
        assert prompt.precedence == expected


@pytest.mark.parametrize("enabled", [True, False])
def test_tiers_that_are_off_are_not_asked(ext: runtime.ExtRuntime, enabled: bool) -> None:
    """Their pages are of other weights."""
    linker = TierLinker.__new__(TierLinker)
    linker.stack = SimpleNamespace(
        enabled=enabled, here=lambda _keys: 0, lookup=lambda _rid, _keys: 0
    )
    linker.restorer, linker.prefixes, linker._ranks = ext.restorer, ext.prefixes, None
    linker.asking = restore_hooks.prompt_of(request(), 16)
    assert linker.lookup("r", [SimpleNamespace(keys=["00" * 32])]) == [0]
    assert bool(ext.restorer.asked_for) is enabled  # type: ignore[union-attr]


def test_only_forwards_that_compute_one_prompt_say_what_that_costs(
    ext: runtime.ExtRuntime,
) -> None:
    batch = SimpleNamespace(
        reqs=[request()], prefix_lens=[48], extend_num_tokens=64, hicache_consumer_index=0
    )
    assert restore_hooks.computes_from(batch, 64) is None  # it waits for host memory, too
    batch.hicache_consumer_index = -1
    assert restore_hooks.computes_from(batch, 64) == 48
    assert restore_hooks.computes_from(batch, 60) is None  # some were loaded
    batch.reqs = [request(), request("other")]
    assert restore_hooks.computes_from(batch, 64) is None
    ext.prefixes = {"r": object()}  # type: ignore[assignment]
    batch.reqs = [request()]
    assert restore_hooks.computes_from(batch, 64) is None
    restore_hooks.computed(48, 64, 0.5)
    assert ext.restorer.asked_for == [(48, 112, 0.5)]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("how", "pages", "loading", "chosen"),
    [
        ("auto", 40, 1.0, Strategy.TOKENS),  # 640 tokens, beyond L_delta
        ("auto", 10, 1.0, Strategy.LAYERS),
        ("auto", 10, 1e-5, None),  # it is there before a layer would be computed
        ("auto", 10, None, None),  # nobody knows yet
        ("auto", 0, 1.0, None),
        ("tokens", 10, 1e-5, Strategy.TOKENS),
        ("layers", 40, None, Strategy.LAYERS),
        ("never", 40, 1.0, None),
    ],
)
def test_how_host_memory_is_restored(
    how: str,
    pages: int,
    loading: float | None,
    chosen: Strategy | None,
    ext: runtime.ExtRuntime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load({**ext.config.resolved(), "restore": {"host": how}})
    monkeypatch.setattr(ext, "config", config)
    costs = Costs(ComputeCost(0.0, 1e-3), {}, chunk=512)
    monkeypatch.setattr(ext.restorer, "costs", costs)
    seconds = 0.0 if loading is None else 100 * loading
    stack: Any = SimpleNamespace(
        loaded=SimpleNamespace(pages=100, seconds=seconds), layout=SimpleNamespace(layers=30)
    )
    prompt = restore_hooks.Prompt(0, pages, 1000, 0)
    assert restore_hooks.strategy(stack, prompt, pages) is chosen


@pytest.mark.parametrize(
    ("size", "chunk", "message"),
    [
        (None, 512, "--chunked-prefill-size is None; give one of 16 or more"),
        (8, 512, "--chunked-prefill-size is 8; give one of 16 or more"),
        (512, 100, "restore.chunk is 100 tokens, no multiple of the page of 16; 112 is one"),
        (512, 128, None),
    ],
)
def test_chunk_page_and_prefill_go_together(
    size: int | None,
    chunk: int,
    message: str | None,
    ext: runtime.ExtRuntime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule = SimpleNamespace(chunked_prefill_size=size)
    monkeypatch.setattr(runtime_context, "get_schedule", lambda: schedule)
    config = load({**ext.config.resolved(), "restore": {"chunk": chunk}})
    monkeypatch.setattr(ext, "config", config)
    layout = Layout(16, 2, 1, 8, "float32", "a model")
    stack: Any = SimpleNamespace(layout=layout, lower=[], host=None, hits=Counter(), keepers=[])
    if message is None:
        restore_setup.open_restoring(ext, stack)
        assert ext.restorer is not None
        assert ext.restorer.costs.chunk == chunk
    else:
        with pytest.raises(ActivationError, match=re.escape(message)):
            restore_setup.open_restoring(ext, stack)
