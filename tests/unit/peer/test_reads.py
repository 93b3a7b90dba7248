"""Spans of prompts that read workers' memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from scheduler_kit import Req, Scheduler
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from trace_kit import RecordedTrace, time_stats

from sgl_ext.engine.peer.reads import LentReads
from sgl_ext.engine.peer.stream import LayerStream

PAGE = 16


def prompt(scheduler: Scheduler, rid: str, *, traced: bool = True) -> Req:
    req = Req(rid, 100)
    req.time_stats = time_stats(RecordedTrace(enabled=traced))
    scheduler.extend(req, 100)
    return req


def spans(req: Req) -> list[tuple[str, object, float]]:
    """Returns name, attributes and seconds of each span."""
    return [
        (each.slice_name, each.attrs, (each.end_time_ns - each.start_time_ns) / 1e9)
        for each in req.time_stats.trace_ctx.slices
    ]


def run(reads: LentReads, stream: Any, waits: float, mode: ForwardMode, *reqs: Req) -> None:
    reads.begin()
    if stream is not None:
        stream.waited_seconds += waits
    reads.end(cast(Any, SimpleNamespace(forward_mode=mode, reqs=list(reqs))))


def test_prompts_that_read_lent_memory_get_spans() -> None:
    scheduler = Scheduler(PAGE, 32)
    near, across, untraced = (
        prompt(scheduler, rid, traced=rid != "untraced") for rid in ("near", "across", "untraced")
    )
    row = scheduler.req_to_token_pool.req_to_token[across.kv.req_pool_idx]
    first = int(row[40])
    stream = cast(LayerStream, SimpleNamespace(waited_seconds=7.0))
    reads = LentReads(cast(Any, scheduler), first, stream)
    run(reads, stream, 0.25, ForwardMode.DECODE, near, across, untraced)
    assert spans(across) == []
    run(reads, stream, 0.5, ForwardMode.EXTEND, near, across, untraced)
    assert spans(near) == spans(untraced) == []
    ((name, found, seconds),) = spans(across)
    assert (name, found) == ("ext_peer_read", {"lent_tokens": 60})
    assert seconds == pytest.approx(0.5, abs=1e-5)


def test_memory_that_is_read_in_place_is_counted() -> None:
    scheduler = Scheduler(PAGE, 32)
    req = prompt(scheduler, "r")
    first = int(scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, 80])
    run(LentReads(cast(Any, scheduler), first, None), None, 0, ForwardMode.EXTEND, req)
    ((_, found, seconds),) = spans(req)
    assert (found, seconds) == ({"lent_tokens": 20}, 0.0)
    scheduler.release(req)
    req.kv.holds_kv = False  # of a request that ended in this forward
    run(LentReads(cast(Any, scheduler), first, None), None, 0, ForwardMode.EXTEND, req)
    assert len(spans(req)) == 1
