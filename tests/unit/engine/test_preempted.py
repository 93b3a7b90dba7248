"""Swap with other powers: whose KV is kept, and who is told that KV is lost."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stack_kit import Machine
from trace_kit import RecordedTrace, time_stats

from sgl_ext.config import ExtConfig, SwapExperiment, load
from sgl_ext.engine.clusters.power import ClustersPower
from sgl_ext.engine.core import runtime
from sgl_ext.engine.core.power import Power
from sgl_ext.engine.swap import out, spans
from sgl_ext.engine.swap.ahead import SwapAhead
from sgl_ext.engine.swap.power import SwapPower
from sgl_ext.planning.costs import Costs
from sgl_ext.swap.manager import SwapManager

PAGE, BLOCKS = 4, 6
"""Tokens of a page, and pages of a preempted request."""


class Told(Power[Any]):
    """Power that records whose KV is lost, and how many pages host memory has at that time."""

    name = "told"

    def __init__(self, swap: SwapPower) -> None:
        super().__init__(ExtConfig(), None)
        self.calls: list[tuple[str, int]] = []
        self.host = swap.manager.stack.host

    def needed(self, req: Any) -> None:
        self.calls.append((req.rid, len(self.host)))


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine(PAGE, 32)
    yield machine
    machine.stack.close()


@pytest.fixture
def swap(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> SwapPower:
    config = load({"swap": {"capacity": "1MiB"}})
    assert config.swap is not None
    stack = machine.stack
    power = SwapPower(config, config.swap)
    power.ext, power.resuming, power.priorities = runtime.ExtRuntime(config), [], None
    power.scheduler = SimpleNamespace(waiting_queue=[], tree_cache=None)  # type: ignore[assignment]
    power.ahead = SwapAhead(stack, Costs())
    power.manager = SwapManager(stack, 32, SwapExperiment())
    power.ext.add(power)
    monkeypatch.setattr(runtime, "current", power.ext)
    monkeypatch.setattr(out, "serves", lambda _req: True)
    return power


def request(rid: str) -> Any:
    """Returns a running request with a row of ``BLOCKS`` whole pages, and one token without KV."""
    tokens = PAGE * BLOCKS
    return SimpleNamespace(
        rid=rid, origin_input_ids=array("q", range(tokens)), output_ids=array("q", [7]),
        extra_key=rid, cache_salt=None, to_finish=None, time_stats=time_stats(RecordedTrace()),
        kv=SimpleNamespace(holds_kv=True, kv_committed_len=tokens, req_pool_idx=0),
    )  # fmt: skip


def preempt(swap: SwapPower, req: Any) -> bool:
    """Preempts a request; returns whether SGLang was asked to keep its KV."""
    cache = SimpleNamespace(flush=lambda: None)
    tree: Any = SimpleNamespace(
        page_size=PAGE,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.arange(PAGE * BLOCKS)[None]),
        linker=SimpleNamespace(
            private_load_indices={}, cache_linker=cache, pending_offloads=[],
            take_completed_offloads=lambda _count: [], commit_completed_offloads=lambda _ones: None,
        ),
    )  # fmt: skip
    kept: list[bool] = []

    def release(_req: Any, _tree: Any, *, checkpoint: bool) -> None:
        kept.append(checkpoint)

    swap.preempted = req
    out._keep(release, req, tree, checkpoint=False)
    swap.preempted = None
    (found,) = kept
    return found


def test_requests_that_are_recorded_are_computed_again(swap: SwapPower) -> None:
    """Their queries are known only while they are computed, so that kept KV would lack them."""
    clusters: Any = ClustersPower(swap.config, None)  # type: ignore[arg-type]
    clusters.recorder = {"recorded"}
    swap.ext.add(clusters)
    assert preempt(swap, request("other"))
    assert not preempt(swap, request("recorded"))
    assert "other" in swap.manager
    assert "recorded" not in swap.manager
    assert (swap.manager.counts.swapped_out, swap.manager.counts.recomputed) == (1, 1)


def test_requests_are_lost_when_all_kv_is_dropped(swap: SwapPower, machine: Machine) -> None:
    """Other powers are told of those that wait, when the tiers are empty, too."""
    swap.ext.add(told := Told(swap))
    waits, aborted, withheld, other = map(request, ("waits", "aborted", "withheld", "other"))
    for req in (waits, aborted, withheld):
        assert preempt(swap, req)
    traces = [req.time_stats.trace_ctx.slices for req in (waits, withheld)]
    told.withheld = lambda: [withheld]  # type: ignore[method-assign]
    swap.scheduler.waiting_queue = [waits, aborted, other]
    stack = swap.manager.stack
    machine.until(lambda: len(stack.host) == 3 * BLOCKS)
    for _ in range(2):  # flushed twice
        swap.reset()
        assert told.calls == []
        stack.clear()
    swap.scheduler.waiting_queue.remove(aborted)
    running: Any = SimpleNamespace(reqs=[])
    for _ in range(2):
        swap.before_step(running)
        assert told.calls == [("waits", 0), ("withheld", 0)]
        assert swap.manager.counts.recomputed == 2
    assert [[one.slice_name for one in trace] for trace in traces] == [
        ["ext_swap_out", "ext_swapped"]
    ] * 2
    assert not hasattr(waits, spans._SINCE)
