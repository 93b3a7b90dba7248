"""Tests of the interruption of a prompt between two parts, and of SGLang's view of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ext.config import load
from sgl_ext.engine.core import dispatch, runtime
from sgl_ext.engine.core.runtime import ExtRuntime
from sgl_ext.engine.restore.power import RestorePower


class _Planner:
    def __init__(self) -> None:
        self.first: str | None = "short"
        self.interrupted = 0

    def computes(self, rid: str) -> bool:
        return rid == "long"

    def preferred(self) -> str | None:
        return self.first

    def interrupt(self) -> None:
        self.interrupted += 1


def _request(rid: str, tokens: int, answer: int = 16, **more: Any) -> Any:
    req = SimpleNamespace(
        rid=rid, origin_input_ids=[0] * tokens, output_ids=[], retraction_count=0,
        sampling_params=SimpleNamespace(max_new_tokens=answer), return_logprob=False,
        logprob_start_len=-1, skip_radix_cache_insert=False, prefix_len=64,
        kv=SimpleNamespace(kv_allocated_len=64), session=None, **more,
    )  # fmt: skip

    def reset() -> None:
        req.retraction_count += 1

    req.reset_for_retract = reset
    return req


class Setup:
    """Scheduler that continues one prompt while another request waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.planner = _Planner()
        tiers = {"ssd": {"directories": ["/ssd"], "capacity": "1GiB"}}
        config = load({"tiers": tiers, "restore": {}})
        assert config.restore is not None
        self.power = RestorePower(config, config.restore)
        self.power.planner = self.planner  # type: ignore[assignment]
        ext = ExtRuntime(config)
        ext.add(self.power)
        monkeypatch.setattr(runtime, "current", ext)
        self.released: list[tuple[str, str | None]] = []
        monkeypatch.setattr(
            "sglang.srt.mem_cache.common.release_kv_cache",
            lambda req, *_a, **_k: self.released.append((req.rid, self.power.interrupted)),
        )
        self.long, self.short = _request("long", 500), _request("short", 100)
        self.running = SimpleNamespace(reqs=[], batch_is_full=True)
        self.counts: list[int] = []
        self.scheduler = SimpleNamespace(
            chunked_req=self.long, waiting_queue=[self.short], page_size=16,
            token_to_kv_pool_allocator=SimpleNamespace(available_size=lambda: 100, page_size=16),
            tree_cache=SimpleNamespace(evictable_size=lambda: 0),
            new_token_ratio_tracker=SimpleNamespace(current=0.5),
            _add_request_to_queue=self._queue,
        )  # fmt: skip
        self.power._scheduler, self.power._ext = self.scheduler, ext

    def _queue(self, req: Any, *, is_retracted: bool) -> None:
        assert is_retracted
        self.counts.append(req.retraction_count)
        self.scheduler.waiting_queue.append(req)

    def step(self) -> bool:
        """Runs a step; returns whether the prompt was interrupted."""

        def plan(scheduler: Any, _running: Any) -> str:
            assert self.long not in scheduler.waiting_queue
            return "planned"

        assert dispatch._step(plan, self.scheduler, self.running) == "planned"
        return self.scheduler.chunked_req is None


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Setup:
    return Setup(monkeypatch)


def test_an_interrupted_request_is_queued_like_a_retracted_one(setup: Setup) -> None:
    assert setup.step()
    assert setup.released == [("long", "long")]  # its restored KV is kept
    assert setup.power.interrupted is None
    assert setup.scheduler.waiting_queue == [setup.short, setup.long]
    assert setup.counts == [1]  # the limit of queued requests does not apply
    assert setup.long.retraction_count == 0
    assert setup.planner.interrupted == 1
    assert not setup.running.batch_is_full


@pytest.mark.parametrize(("running", "interrupted"), [(6, False), (7, True)])
def test_a_prompt_is_interrupted_before_running_requests_lack_memory(
    setup: Setup, running: int, interrupted: bool
) -> None:
    """100 tokens are free, whole pages of 16 for 6 requests. SGLang would abort the last one."""
    setup.planner.first = None
    setup.running.reqs = [_request(str(number), 100) for number in range(running)]
    assert setup.step() == interrupted
    assert setup.planner.interrupted == interrupted


@pytest.mark.parametrize(("running", "interrupted"), [(1, True), (2, False)])
def test_a_prompt_that_loads_nothing_is_interrupted_for_the_last_running_request(
    setup: Setup, running: int, interrupted: bool
) -> None:
    """SGLang retracts one of two requests, but aborts a single one."""
    setup.long.rid = "plain"
    setup.scheduler.token_to_kv_pool_allocator.available_size = lambda: 15
    setup.running.reqs = [_request(str(number), 100) for number in range(running)]
    assert setup.step() == interrupted
    assert setup.released == [("plain", "plain")] * interrupted
    assert setup.planner.interrupted == 0


def test_only_prompts_with_chunks_are_interrupted_though_a_power_provides_their_kv(
    setup: Setup,
) -> None:
    links, records = (SimpleNamespace(owns=lambda _req: True) for _ in range(2))
    ext = setup.power._ext = SimpleNamespace(owner=lambda _req: links, chunks=links)  # type: ignore[assignment]
    assert not setup.power.bound(setup.long) and setup.power.owned(setup.long)
    ext.owner = lambda _req: records
    assert setup.power.bound(setup.long)
    ext.owner = lambda _req: None
    assert not setup.power.bound(setup.long) and not setup.power.owned(setup.long)


@pytest.mark.parametrize(
    "why",
    [
        "nobody comes first",
        "it is not in the queue",
        "no room",
        "prompt logprobs",
        "not cached",
        "recorded",
        "streaming session",
    ],
)
def test_a_prompt_is_not_interrupted_without_benefit(
    setup: Setup, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    match why:
        case "nobody comes first":
            setup.planner.first = None
        case "it is not in the queue":
            setup.scheduler.waiting_queue = []
        case "no room":
            setup.running.reqs = [_request("running", 100, 40)]
        case "prompt logprobs":
            setup.long.return_logprob, setup.long.logprob_start_len = True, 10
        case "not cached":
            setup.long.skip_radix_cache_insert = True
        case "recorded":
            monkeypatch.setattr(setup.power, "bound", lambda _req: True)
        case "streaming session":
            setup.long.session = SimpleNamespace(streaming=True)
    before = [*setup.scheduler.waiting_queue]
    assert not setup.step()
    assert setup.scheduler.chunked_req is setup.long
    assert setup.scheduler.waiting_queue == before
    assert not setup.released
    assert setup.planner.interrupted == 0
