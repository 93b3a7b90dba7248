"""Resizing under a scheduler: refusals change nothing, and every count follows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sgl_ext.engine.kv_allocator import BlockGroupAllocator
from sgl_ext.engine.kv_resize import KVResizer
from sgl_ext.errors import ExtError

PAGE, BLOCKS = 4, 20
HOLDERS = ("invariant_checker", "pool_stats_observer", "load_inquirer", "kv_events_publisher")


def request(prompt: int, new: int, finished: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        origin_input_ids=[0] * prompt,
        sampling_params=SimpleNamespace(max_new_tokens=new),
        finished=lambda: finished,
    )


@pytest.fixture
def scheduler() -> SimpleNamespace:
    size = BLOCKS * PAGE
    allocator = BlockGroupAllocator(
        size, PAGE, torch.bfloat16, "cpu", None, False, expected_tokens=PAGE
    )
    holders = {name: SimpleNamespace(max_total_num_tokens=size) for name in HOLDERS}
    return SimpleNamespace(
        token_to_kv_pool_allocator=allocator, max_total_num_tokens=size, max_req_len=60,
        max_req_input_len=55, waiting_queue=[], chunked_req=None, last_batch=None,
        running_batch=SimpleNamespace(reqs=[]), **holders,
    )  # fmt: skip


def counts(scheduler: SimpleNamespace) -> set[int]:
    """All that SGLang believes the size to be."""
    allocator = scheduler.token_to_kv_pool_allocator
    copies = {getattr(scheduler, name).max_total_num_tokens for name in HOLDERS}
    return copies | {
        scheduler.max_total_num_tokens,
        allocator.size,
        allocator.num_pages * PAGE,
        allocator.available_size(),
    }


def test_every_count_follows(scheduler: SimpleNamespace) -> None:
    resizer = KVResizer(scheduler)
    epochs: list[None] = []
    scheduler.token_to_kv_pool_allocator.on_epoch = lambda: epochs.append(None)
    assert resizer.shrink(8)
    assert counts(scheduler) == {12 * PAGE}
    assert (scheduler.max_req_len, scheduler.max_req_input_len) == (47, 42)
    resizer.grow(8)
    assert counts(scheduler) == {BLOCKS * PAGE}
    assert (scheduler.max_req_len, scheduler.max_req_input_len) == (60, 55)
    assert len(epochs) == 2


def test_blocks_in_use_stay(scheduler: SimpleNamespace) -> None:
    resizer = KVResizer(scheduler)
    slots = scheduler.token_to_kv_pool_allocator.alloc(3 * PAGE)
    assert resizer.tail_free == BLOCKS - 3
    assert not resizer.shrink(BLOCKS - 2)
    assert not resizer.shrink(BLOCKS)
    assert scheduler.max_total_num_tokens == BLOCKS * PAGE
    scheduler.token_to_kv_pool_allocator.free(slots)
    assert not resizer.shrink(BLOCKS)
    assert not resizer.shrink(BLOCKS - 1)  # no input would be short enough
    assert resizer.shrink(BLOCKS - 2)
    with pytest.raises(ExtError, match="resized already"):
        KVResizer(scheduler)


@pytest.mark.parametrize("where", ["waiting", "chunked", "running", "last"])
def test_accepted_requests_keep_their_room(scheduler: SimpleNamespace, where: str) -> None:
    long, done = request(30, 9), request(60, 9, finished=True)
    match where:
        case "waiting":
            scheduler.waiting_queue = [done, long]
        case "chunked":
            scheduler.chunked_req = long
        case "running":
            scheduler.running_batch.reqs = [long, done]
        case "last":
            scheduler.last_batch = SimpleNamespace(reqs=[long])
    resizer = KVResizer(scheduler)
    assert not resizer.shrink(11)
    assert counts(scheduler) == {BLOCKS * PAGE}
    assert resizer.shrink(10)


def test_bad_counts_change_nothing(scheduler: SimpleNamespace) -> None:
    resizer = KVResizer(scheduler)
    with pytest.raises(ValueError, match="cannot shrink by -1"):
        resizer.shrink(-1)
    for blocks in (1.5, float("nan")):
        with pytest.raises(TypeError):
            resizer.shrink(blocks)
    for blocks in (-1, 1):
        with pytest.raises(ValueError, match="cannot grow by"):
            resizer.grow(blocks)
    assert counts(scheduler) == {BLOCKS * PAGE}


def test_what_cannot_follow_is_refused_before_anything(scheduler: SimpleNamespace) -> None:
    del scheduler.load_inquirer
    with pytest.raises(ExtError, match="no size in load_inquirer"):
        KVResizer(scheduler)
    scheduler.token_to_kv_pool_allocator = object()
    with pytest.raises(ExtError, match="runs on object, which cannot change its size"):
        KVResizer(scheduler)
