"""What the scheduler asks of restoring, without a scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ext import runtime
from sgl_ext.config import load
from sgl_ext.engine import restore_hooks
from sgl_ext.engine.tier_linker import TierLinker
from sgl_ext.plan import Compute, PrefillPlan, Span

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
    return ext


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
    assert restore_hooks.prompt_of(request(), 16) == (1, 5, 100)
    assert restore_hooks.prompt_of(request(**{field: object()}), 16) is None


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
    batch = SimpleNamespace(reqs=[request()], prefix_lens=[48], extend_num_tokens=64)
    assert restore_hooks.computes_from(batch, 64) == 48
    assert restore_hooks.computes_from(batch, 60) is None  # some were loaded
    batch.reqs = [request(), request("other")]
    assert restore_hooks.computes_from(batch, 64) is None
    ext.prefixes = {"r": object()}  # type: ignore[assignment]
    batch.reqs = [request()]
    assert restore_hooks.computes_from(batch, 64) is None
    restore_hooks.computed(48, 64, 0.5)
    assert ext.restorer.asked_for == [(48, 112, 0.5)]  # type: ignore[union-attr]
