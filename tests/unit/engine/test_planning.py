"""Observations of the cost model in a scheduler, and what is shown of it."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from sgl_ext.cli.tables import Scheduler, tables
from sgl_ext.config import ExtConfig
from sgl_ext.engine.core import planning, runtime
from sgl_ext.engine.core.metrics import Metrics
from sgl_ext.engine.core.planning_metrics import PlanningMetrics
from sgl_ext.memory.slab import Layout
from sgl_ext.packages import cache_dir
from sgl_ext.planning.compute_cost import ComputeCost
from sgl_ext.planning.costs import COMPUTE, DECODE, HOST
from sgl_ext.planning.load_cost import LoadCost
from sgl_ext.planning.plan import Compute, Load, PrefillPlan, Span
from sgl_ext.planning.profile import PROFILES, Profile, save

LAYOUT = Layout(16, 2, 1, 8, "float32", "a model")


@pytest.fixture
def ext() -> runtime.ExtRuntime:
    ext = runtime.ExtRuntime(ExtConfig())
    traffic = SimpleNamespace(seconds=0.0)
    ext.tiers = SimpleNamespace(stack=SimpleNamespace(loads=SimpleNamespace(traffic=traffic)))  # type: ignore[assignment]
    return ext


def extend(*parts: tuple[int, int]) -> Any:
    return SimpleNamespace(
        reqs=[SimpleNamespace(rid=f"{at}") for at in range(len(parts))],
        prefix_lens=[begin for begin, _ in parts],
        extend_lens=[end - begin for begin, end in parts],
        forward_mode=SimpleNamespace(is_extend=lambda: True),
    )


def decode(requests: int) -> Any:
    return SimpleNamespace(
        reqs=[SimpleNamespace()] * requests, forward_mode=SimpleNamespace(is_extend=lambda: False)
    )


def test_forwards_and_decode_steps_are_recorded(ext: runtime.ExtRuntime) -> None:
    planning.observing(ext, extend((48, 112)))(0.5)
    planning.observing(ext, extend((0, 64), (100, 200)))(0.7)
    planning.observing(ext, decode(0))(0.1)  # idle
    planning.observing(ext, decode(3))(0.1)
    assert [*ext.costs.forwards] == [(48, 112, 0.5)]
    assert ext.prefill_seconds == 1.2
    assert ext.costs.known(COMPUTE)
    assert ext.costs.decode.seconds(3) == pytest.approx(0.1)
    errors = {kind: found.error for kind, found in ext.costs.decisions.kinds()}
    assert [*errors] == ["forward"]  # the first of each has no prediction


def test_a_batch_may_change_before_its_duration_is_known(ext: runtime.ExtRuntime) -> None:
    """On a GPU the scheduler plans the next step while a forward runs, and plans end with it."""
    batch = extend((48, 112))
    ext.plans["0"] = PrefillPlan([Span(0, 112, Compute())])
    late, batch_of_two = planning.observing(ext, batch), decode(2)
    also_late = planning.observing(ext, batch_of_two)
    ext.plans.clear()
    batch.reqs.clear()
    batch_of_two.reqs.clear()
    late(0.5)
    also_late(0.1)
    assert [*ext.costs.forwards] == [(48, 112, 0.5)]
    assert ext.costs.known(DECODE)


def test_forwards_that_load_say_nothing_about_computing(ext: runtime.ExtRuntime) -> None:
    ext.plans["0"] = PrefillPlan(
        [Span(0, 60, Compute()), Span(60, 64, Load()), Span(64, 112, Compute())]
    )
    planning.observing(ext, extend((48, 112)))(0.5)
    ext.plans.clear()
    assert ext.tiers is not None
    traffic = ext.tiers.stack.loads.traffic
    measured = planning.observing(ext, extend((48, 112)))
    traffic.seconds += 0.1
    measured(0.5)
    assert not ext.costs.known(COMPUTE)
    measured = planning.observing(ext, extend((48, 112)))
    traffic.seconds += 0.01
    measured(0.5)
    assert ext.costs.known(COMPUTE)


@pytest.mark.parametrize(("begins", "lengths"), [(None, None), ([0], None), ([0, 0], [8, 8])])
def test_a_batch_that_does_not_tell_its_parts_is_only_timed(
    ext: runtime.ExtRuntime, begins: list[int] | None, lengths: list[int] | None
) -> None:
    batch = extend((0, 8))
    batch.prefix_lens, batch.extend_lens = begins, lengths
    planning.observing(ext, batch)(0.5)
    assert ext.prefill_seconds == 0.5
    assert not ext.costs.known(COMPUTE)


def test_costs_are_seeded_by_the_profile_of_the_model(
    ext: runtime.ExtRuntime, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(planning, "cache_dir", lambda: tmp_path)
    planning.seed(ext, LAYOUT, {"ssd": "a disk"})
    assert not ext.costs.measured
    loads = {"ssd": LoadCost(0.0, 1e-4), HOST: LoadCost(1e-3, 1e-6)}
    subject = planning.subject_of(LAYOUT)
    save(Profile(subject, ComputeCost(1e-3, 2e-4), loads, {"ssd": "a disk"}), tmp_path / PROFILES)
    planning.seed(ext, LAYOUT, {"ssd": "a disk"})
    assert ext.costs.measured == {COMPUTE, "ssd", HOST}
    assert ext.costs.loads == loads
    assert cache_dir() != tmp_path


@pytest.fixture
def metrics() -> Iterator[PlanningMetrics]:
    before = {*REGISTRY._collector_to_names}
    yield PlanningMetrics(Metrics({"model_name": "m", "tp_rank": 0, "kind": "x", "priority": ""}))
    for collector in {*REGISTRY._collector_to_names} - before:
        REGISTRY.unregister(collector)


def test_decisions_and_errors_are_shown(ext: runtime.ExtRuntime, metrics: PlanningMetrics) -> None:
    ext.slab = SimpleNamespace(layout=LAYOUT)  # type: ignore[assignment]
    costs = ext.costs
    costs.loaded("ssd", 100, 1.0)
    costs.computed(0, 100, 4.0)
    costs.loaded("ssd", 100, 2.0)
    for begin in (0, 100, 200):
        assert costs.worth_loading("ssd", 100, begin)
    metrics.update(costs.decisions)
    costs.worth_loading("ssd", 100, 0)
    metrics.update(costs.decisions)
    process = {"model_name": "m", "tp_rank": "0"}
    labels = {**process, "kind": "wait_for_tier", "choice": "wait"}
    assert REGISTRY.get_sample_value("sglang_ext:planning_decisions_total", labels) == 4
    labels = {**process, "kind": "ssd"}
    assert REGISTRY.get_sample_value("sglang_ext:planning_error", labels) == 0.5

    found: Any = planning.describe(ext)
    assert found["decisions"]["wait_for_tier"]["choices"]["wait"]["count"] == 4
    assert found["costs"]["known"] == [COMPUTE, "ssd"]
    rate = found["costs"]["bytes_per_second"]["ssd"]
    assert rate == pytest.approx(LAYOUT.token_bytes / costs.loads["ssd"].per_token)

    from rich.console import Console

    console = Console(width=200, record=True, file=StringIO())
    console.print(tables([Scheduler("host:1", {"planning": found}, {}, 1.0)]))
    rows = [line.split() for line in console.export_text().splitlines()]
    assert ["host:1", "ssd", "50%"] in rows
    (row,) = (row for row in rows if "wait_for_tier" in row)
    assert row[:4] == ["host:1", "wait_for_tier", "wait", "4"]
