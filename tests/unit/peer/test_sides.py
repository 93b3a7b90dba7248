"""Tests of lending on schedulers without a model: waiting, retraction, eviction and closing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from peer_kit import LightMaster
from scheduler_kit import Batch, Req, Scheduler
from trace_kit import RecordedTrace, time_stats

from sgl_ext.config import Peer
from sgl_ext.engine.peer import master as peer_master
from sgl_ext.engine.peer import side as peer_side
from sgl_ext.engine.peer import vacate
from sgl_ext.engine.peer.master import MasterSide
from sgl_ext.engine.peer.power import open_side
from sgl_ext.engine.peer.side import PeerSide
from sgl_ext.engine.peer.worker import WorkerSide
from sgl_ext.errors import ExtError
from sgl_ext.peer import vacating

PATIENT = {"deadline": "60s", "lease": "60s"}


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Yields a function that opens a side on a new scheduler."""
    sides: list[PeerSide] = []

    def open_(role: str, page: int, blocks: int, beyond: int = 0, **options: object) -> Any:
        scheduler = Scheduler(page, blocks, beyond)
        if role == "master":
            options["capacity"] = f"{beyond * scheduler.slab.layout.block_bytes}B"
        config = Peer.model_validate(
            {"role": role, "directory": str(tmp_path / "peers"), **PATIENT, **options}
        )
        sides.append(open_side(config, scheduler, scheduler.slab))
        return sides[-1], scheduler

    yield open_
    for side in sides:
        side._link.close()


def worker_of(opened: Callable[..., Any], page: int, blocks: int) -> tuple[WorkerSide, Scheduler]:
    side, scheduler = opened("worker", page, blocks, window="10ms", granularity="block")
    return side, scheduler


def talk(side: WorkerSide, scheduler: Scheduler, master: LightMaster, times: int = 4) -> None:
    """Runs steps of a worker and its master, whose messages arrive at once."""
    for _ in range(times):
        time.sleep(0.011)  # longer than the window and the interval of lending
        step(side, scheduler)
        now = time.monotonic()
        master.master.receive(side._worker.message, now)
        master.master.step(now)
        for keep in master.master.messages():
            side._worker.receive(keep, now)
        side.check_integrity()
        master.check_integrity()


def step(side: PeerSide, scheduler: Scheduler) -> list[Req]:
    """Runs a step; returns the requests that could be admitted in it."""
    side.step(scheduler.running_batch)
    found = list(scheduler.waiting_queue)
    side.planned()
    return found


def test_a_chunked_prompt_is_retracted_before_a_chunk_finds_no_room(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 3,200 tokens left, each request would fit alone, and so does the next chunk of 512."""
    from sglang.srt.managers import schedule_batch

    side, scheduler = opened("master", 16, 200, beyond=400)
    allocator = scheduler.token_to_kv_pool_allocator
    side._resizer.restore(301, 401)
    one, other = Req("one", 430, 100), Req("other", 3000)
    scheduler.extend(one, 430)
    scheduler.extend(other, 1536)
    scheduler.running_batch = Batch(scheduler, one)
    scheduler.chunked_req = other
    monkeypatch.setattr(schedule_batch, "release_req", lambda req, **_: scheduler.release(req))
    monkeypatch.setattr(
        side._master, "step", lambda _now: side._resizer.withdraw(301, 401), raising=True
    )
    chunks = 0
    while scheduler.chunked_req is not None:
        side.step(scheduler.running_batch)
        if scheduler.chunked_req is not None:
            budget = allocator.create_prefill_budget(scheduler.tree_cache)
            budget.total_offset += one.sampling_params.max_new_tokens
            rest = 3000 - other.kv.kv_allocated_len
            scheduler.extend(other, min(rest, budget.available_chunk_tokens(512)))
            chunks += 1
            if other.kv.kv_allocated_len == 3000:
                scheduler.chunked_req = None
        side.planned()
    assert allocator.size == 3200
    assert chunks == 2
    assert scheduler.waiting_queue == [other]
    assert scheduler.running_batch.reqs == [one]
    assert side.retracted == 1


@pytest.mark.parametrize(("page", "left"), [(1, 7), (2, 4), (4, 2), (16, 1)])
def test_an_idle_worker_keeps_only_the_blocks_that_a_request_needs(
    opened: Callable[..., Any], page: int, left: int
) -> None:
    side, scheduler = worker_of(opened, page, 64)
    talk(side, scheduler, LightMaster(20, 2000, lease=60))
    assert side.blocks == left
    assert side.describe()["lent_bytes"] == side._memory.size
    assert scheduler.max_req_input_len > 0


def test_nothing_is_evicted_if_nothing_can_be_lent(opened: Callable[..., Any]) -> None:
    side, scheduler = worker_of(opened, 16, 64)
    scheduler.cache(0, 60)
    # First a copy is in flight, and then a request holds the last blocks.
    allocator = scheduler.token_to_kv_pool_allocator
    allocator.in_flight = SimpleNamespace(pending=1, wait=lambda *_: None)
    master = LightMaster(20, 2000, lease=60)
    talk(side, scheduler, master)
    assert (side._worker.lent, scheduler.cached) == (0, 960)
    allocator.in_flight = None
    req = Req("last", 64, 0)
    scheduler.extend(req, 64)
    scheduler.running_batch = Batch(scheduler, req)
    talk(side, scheduler, master)
    assert (side._worker.lent, scheduler.cached) == (0, 960)
    scheduler.release(req)
    scheduler.running_batch = Batch(scheduler)
    talk(side, scheduler, master, times=12)
    assert side._worker.lent == side._memory.size
    assert scheduler.cached == 0


def test_a_worker_lends_nothing_while_a_prompt_is_computed_in_parts(
    opened: Callable[..., Any],
) -> None:
    """The KV that its later parts are linked from is not its own, and may have to stay."""
    side, scheduler = worker_of(opened, 16, 64)
    req = Req("linked", 640, 0)
    scheduler.extend(req, 160)
    scheduler.chunked_req = req
    master = LightMaster(20, 2000, lease=60)
    talk(side, scheduler, master)
    assert (side.blocks, side._worker.lent) == (64, 0)
    scheduler.chunked_req = None
    scheduler.release(req)
    talk(side, scheduler, master, times=12)
    assert side._worker.lent == side._memory.size


def test_every_beam_of_a_group_needs_memory(opened: Callable[..., Any]) -> None:
    side, scheduler = worker_of(opened, 16, 64)
    req = Req("beams", 160, 32)
    scheduler.waiting_queue = [req]
    one = side._need(scheduler.running_batch)
    req.beam_group = SimpleNamespace(beam_width=8)
    assert side._need(scheduler.running_batch) == one + 7 * 32


def test_a_long_answer_needs_what_sglang_reserves_of_it(opened: Callable[..., Any]) -> None:
    side, scheduler = worker_of(opened, 16, 64)
    req = Req("chat", 160, 10_000)
    scheduler.waiting_queue = [req]
    reserve, pages = 4096, 2 * 16
    assert side._need(scheduler.running_batch) == 160 + reserve + pages
    req.output_ids = [1] * 320
    assert side._need(scheduler.running_batch) == 160 + 320 + reserve + pages
    req.output_ids = [1] * 9920
    assert side._need(scheduler.running_batch) == 160 + 10_000 + pages


@pytest.mark.parametrize("generated", [0, 320])
def test_answers_are_clipped_if_memory_does_not_come_back(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, generated: int
) -> None:
    """Clips to memory with the loan when requests arrive, and to own memory when it is over."""
    refused: list[tuple[Req, str]] = []

    def refuse(scheduler: Scheduler, req: Req, message: str) -> None:
        scheduler.waiting_queue.remove(req)
        refused.append((req, message))

    monkeypatch.setattr(peer_side, "refuse_waiting", refuse)
    side, scheduler = opened("master", 16, 200, beyond=400)
    allocator = scheduler.token_to_kv_pool_allocator
    side._resizer.restore(301, 401)
    step(side, scheduler)
    prompt = 500

    def clipped() -> int:
        found = allocator.max_new_tokens_for_memory(
            prompt, 1 << 30, token_capacity=allocator.size, sliding_window_size=None,
            chunk_size=None,
        )  # fmt: skip
        assert found is not None
        return found

    chat, whole = Req("chat", prompt, answer := clipped()), Req("whole", 3190)
    chat.sampling_params.min_new_tokens = answer
    chat.output_ids = [1] * generated
    scheduler.waiting_queue = [chat, whole]
    assert step(side, scheduler) == [chat, whole]
    side._resizer.withdraw(301, 401)
    assert step(side, scheduler) == []
    assert scheduler.waiting_queue == [chat, whole]
    side._awake += 121  # longer than the deadline and the lease
    assert step(side, scheduler) == [chat]
    assert chat.sampling_params.max_new_tokens == chat.sampling_params.min_new_tokens < answer
    ((req, message),) = refused
    assert req is whole
    assert "more KV memory than the 3200 tokens" in message
    side._awake += 121
    step(side, scheduler)  # nothing is promised any more: a stock server's limit
    assert chat.sampling_params.max_new_tokens == clipped()


def test_an_answer_is_not_clipped_below_what_is_generated(opened: Callable[..., Any]) -> None:
    _, scheduler = opened("master", 16, 200, beyond=400)
    allocator = scheduler.token_to_kv_pool_allocator
    req = Req("late", 3000, 1000)
    req.output_ids = [1] * 170
    vacate.clip(req, allocator)
    assert req.sampling_params.max_new_tokens == 175  # SGLang's rule
    req.output_ids = [1] * 190
    vacate.clip(req, allocator)
    assert req.sampling_params.max_new_tokens == 175
    req.sampling_params.max_new_tokens = 1000
    vacate.clip(req, allocator)
    assert req.sampling_params.max_new_tokens == 191
    assert not vacate.fits(req, allocator)
    scored = Req("scored", 3000, 0)
    vacate.clip(scored, allocator)
    assert scored.sampling_params.max_new_tokens == 0
    beams = Req("beams", 3000, 1000)
    beams.beam_group = SimpleNamespace(beam_width=2)
    vacate.clip(beams, allocator)
    assert beams.sampling_params.max_new_tokens == 1000


def test_a_request_that_waits_for_memory_keeps_its_place(opened: Callable[..., Any]) -> None:
    side, scheduler = worker_of(opened, 16, 64)
    master = LightMaster(20, 2000, lease=60)
    talk(side, scheduler, master)
    master.slow = True
    while master.begin(20):
        pass
    side._worker._pool.grow(4)
    early, large, late = Req("early", 30), Req("large", 800), Req("late", 30)
    for at, req in enumerate((early, large, late)):
        req.time_stats.wait_queue_entry_time = at
    scheduler.waiting_queue = [early, large, late]
    assert step(side, scheduler) == [early, late]
    assert scheduler.waiting_queue == [early, large, late]


def test_a_request_that_waits_for_memory_does_not_block_smaller_ones(
    opened: Callable[..., Any],
) -> None:
    side, scheduler = worker_of(opened, 16, 64)
    master = LightMaster(20, 2000, lease=60)
    talk(side, scheduler, master)
    assert side.blocks == 1
    large, small = Req("large", 800), Req("small", 40)
    scheduler.waiting_queue = [large]
    step(side, scheduler)
    master.slow = True
    while master.begin(20):
        pass
    scheduler.waiting_queue = [large, small]
    assert step(side, scheduler) == []  # there is one block
    assert side.aside == ()
    side._worker._pool.grow(4)  # the master has returned a few blocks
    scheduler.running_batch.batch_is_full = True
    assert step(side, scheduler) == [small]
    assert scheduler.waiting_queue == [large, small]
    large.time_stats = time_stats(recorded := RecordedTrace())
    master.slow = False
    talk(side, scheduler, master)
    assert side.blocks >= 52
    assert step(side, scheduler) == [large, small]
    ((name, waited),) = [
        (each.slice_name, each.end_time_ns - each.start_time_ns) for each in recorded.slices
    ]
    assert name == "ext_peer_wait"
    assert waited > 0


def test_time_in_which_a_worker_is_stopped_does_not_count_as_waiting(
    opened: Callable[..., Any],
) -> None:
    side, scheduler = worker_of(opened, 16, 64)
    master = LightMaster(20, 2000, lease=60)
    talk(side, scheduler, master)
    large = Req("large", 800)
    scheduler.waiting_queue = [large]
    step(side, scheduler)
    master.slow = True
    while master.begin(20):
        pass
    assert step(side, scheduler) == []
    side._now -= 1000  # seconds in which the process was stopped
    assert step(side, scheduler) == []
    assert scheduler.waiting_queue == [large]  # it was not refused


def test_sglang_retries_admission_when_the_pool_has_grown(opened: Callable[..., Any]) -> None:
    side, scheduler = worker_of(opened, 16, 64)
    master = LightMaster(20, 2000, lease=60)
    talk(side, scheduler, master)
    scheduler.waiting_queue = [Req("large", 800)]
    scheduler.running_batch.batch_is_full = True
    step(side, scheduler)
    assert scheduler.running_batch.batch_is_full
    talk(side, scheduler, master)
    assert not scheduler.running_batch.batch_is_full


def test_vacating_is_retried_when_the_holders_have_changed(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    side, scheduler = opened("master", 16, 20, beyond=400)
    looks = []
    monkeypatch.setattr(vacate, "retract", lambda *_: looks.append("req") or [])
    monkeypatch.setattr(vacate, "evict", lambda *_, **__: looks.append("tree"))
    monkeypatch.setattr(vacating, "RETRY_S", 1e9)
    side._resizer.restore(21, 60)
    one, other = Req("one", 300), Req("other", 160)
    scheduler.extend(one, 300)
    scheduler.extend(other, 160)
    scheduler.running_batch = Batch(scheduler, one, other)

    def leave(_now: float) -> None:
        side.vacate(21, 40)

    monkeypatch.setattr(side._master, "step", leave)
    for _ in range(5):
        step(side, scheduler)
    assert looks == ["req", "tree"]
    scheduler.running_batch.reqs.remove(one)
    for _ in range(5):
        step(side, scheduler)
    assert len(looks) == 4
    scheduler.cache(0, 1)  # the size of the evictable KV changes
    for _ in range(5):
        step(side, scheduler)
    assert len(looks) == 6
    monkeypatch.setattr(vacating, "RETRY_S", 0.0)
    step(side, scheduler)
    assert len(looks) == 8


def together(
    sides: list[tuple[PeerSide, Scheduler]], condition: Callable[[], bool], what: str
) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, what
        for side, scheduler in sides:
            step(side, scheduler)
            side.check_integrity()
        time.sleep(0.01)


def pair(opened: Callable[..., Any]) -> list[tuple[Any, Scheduler]]:
    """Returns a worker that has lent all of its memory, and its master, with their schedulers."""
    sides = [opened("worker", 16, 64), opened("master", 16, 20, beyond=400)]
    (worker, _), (master, _) = sides
    together(
        sides,
        lambda: 0 < worker._worker.used == worker._memory.size == master._master.borrowed,
        "nothing is lent",
    )
    return sides


def test_a_closing_master_returns_all_memory(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (peer_side, peer_master):
        monkeypatch.setattr(module, "CLOSE_DEADLINE_S", 30.0)
    (worker, scheduler), (master, owner) = pair(opened)
    owner.cache(0, 60)
    with ThreadPoolExecutor(1) as threads:
        closing = threads.submit(master.close)
        together([(worker, scheduler)], lambda: worker.blocks == 64, "the worker still waits")
        closing.result()
    assert owner.cached <= 20 * 16
    assert worker._worker.counts.replaced == 0
    assert not master._link._thread.is_alive()


def test_a_master_returns_the_memory_of_a_closed_worker(opened: Callable[..., Any]) -> None:
    (worker, _), (master, scheduler) = pair(opened)
    assert isinstance(master, MasterSide)
    worker.close()
    together([(master, scheduler)], lambda: not master._master.borrowed, "it is still used")
    assert not worker._link._thread.is_alive()


def test_time_in_which_a_master_is_stopped_does_not_count_as_waiting(
    opened: Callable[..., Any],
) -> None:
    """Requests that need reclaimed memory are accepted for as long as they would wait for it."""
    side, scheduler = opened("master", 16, 200, beyond=400)
    allocator = scheduler.token_to_kv_pool_allocator
    side._resizer.restore(301, 401)
    step(side, scheduler)
    promised = allocator.promised
    side._resizer.withdraw(301, 401)
    side._now -= 1000  # seconds in which the process was stopped
    step(side, scheduler)
    assert allocator.promised == promised
    side._awake += 121  # longer than the deadline and the lease
    step(side, scheduler)
    assert allocator.promised == promised - 100 * 16


@pytest.fixture
def unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a scheduler without a model have layer buffers."""
    monkeypatch.setattr(peer_master, "require_own", lambda *_: None)
    runner = SimpleNamespace(model_runner=None)
    monkeypatch.setattr(Scheduler, "tp_worker", runner, raising=False)


@pytest.mark.usefixtures("unbound")
def test_layer_buffers_are_own_blocks_that_sglang_does_not_have(
    opened: Callable[..., Any],
) -> None:
    side, scheduler = opened("master", 16, 200, beyond=100, stream="layer")
    allocator, stream = scheduler.token_to_kv_pool_allocator, side.stream
    # The model has one layer, so that its buffer is as large as what may be borrowed.
    assert stream.blocks(scheduler.slab, 1) == 100
    assert allocator.size == scheduler.max_total_num_tokens == 100 * 16
    slots = allocator.alloc(100 * 16)
    assert allocator.alloc(16) is None
    scheduler.slab.tensor().flatten(0, 1)[slots] = 3.0
    stream._buffers[:] = 5.0
    assert (scheduler.slab.tensor().flatten(0, 1)[slots] == 3.0).all()
    allocator.clear()
    assert allocator.available_size() == 100 * 16
    side._resizer.restore(201, 220)
    assert allocator.size == 119 * 16


@pytest.mark.usefixtures("unbound")
def test_layer_buffers_that_leave_no_own_memory_are_refused(opened: Callable[..., Any]) -> None:
    with pytest.raises(
        ExtError, match=r"layer buffers of .* but this engine has .* lower peer.cap"
    ):
        opened("master", 16, 200, beyond=100, stream="layers")
