"""Resizing of a scheduler's blocks: refusals change nothing, and every count is updated."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sgl_ext.engine.kv.allocator import BlockGroupAllocator
from sgl_ext.engine.kv.resize import KVResizer
from sgl_ext.errors import ExtError

PAGE, BLOCKS = 4, 20
HOLDERS = ("invariant_checker", "pool_stats_observer", "load_inquirer", "kv_events_publisher")


def scheduler_of(beyond: int = 0) -> SimpleNamespace:
    size = BLOCKS * PAGE
    allocator = BlockGroupAllocator(
        size, PAGE, torch.bfloat16, "cpu", None, False, expected_tokens=PAGE, beyond=beyond
    )
    holders = {name: SimpleNamespace(max_total_num_tokens=size) for name in HOLDERS}
    return SimpleNamespace(
        token_to_kv_pool_allocator=allocator, max_total_num_tokens=size, max_req_len=60,
        max_req_input_len=55, model_config=SimpleNamespace(context_len=61), **holders,
    )  # fmt: skip


@pytest.fixture
def scheduler() -> SimpleNamespace:
    return scheduler_of()


def counts(scheduler: SimpleNamespace) -> set[int]:
    """Returns every value of the pool size that SGLang holds, in tokens."""
    allocator = scheduler.token_to_kv_pool_allocator
    copies = {getattr(scheduler, name).max_total_num_tokens for name in HOLDERS}
    return copies | {
        scheduler.max_total_num_tokens,
        allocator.size,
        allocator.num_pages * PAGE,
        allocator.available_size(),
    }


def test_every_count_is_updated(scheduler: SimpleNamespace) -> None:
    resizer = KVResizer(scheduler)
    assert resizer.shrink(8)
    assert counts(scheduler) == {12 * PAGE}
    assert (scheduler.max_req_len, scheduler.max_req_input_len) == (47, 42)
    resizer.grow(8)
    assert counts(scheduler) == {BLOCKS * PAGE}
    assert (scheduler.max_req_len, scheduler.max_req_input_len) == (60, 55)


def test_blocks_in_use_are_not_removed(scheduler: SimpleNamespace) -> None:
    resizer = KVResizer(scheduler)
    slots = scheduler.token_to_kv_pool_allocator.alloc(3 * PAGE)
    assert resizer.tail_free == BLOCKS - 3
    assert not resizer.shrink(BLOCKS - 2)
    assert not resizer.shrink(BLOCKS)
    assert scheduler.max_total_num_tokens == BLOCKS * PAGE
    scheduler.token_to_kv_pool_allocator.free(slots)
    assert not resizer.shrink(BLOCKS)
    assert not resizer.shrink(BLOCKS - 1)  # no input would fit
    assert resizer.shrink(BLOCKS - 2)


def test_promised_blocks_raise_the_limits_of_requests(scheduler: SimpleNamespace) -> None:
    resizer = KVResizer(scheduler)
    resizer.promise(BLOCKS)
    assert resizer.shrink(15)
    assert counts(scheduler) == {5 * PAGE}
    assert (scheduler.max_req_len, scheduler.max_req_input_len) == (60, 55)
    clip = scheduler.token_to_kv_pool_allocator.max_new_tokens_for_memory
    options = {"token_capacity": 5 * PAGE, "sliding_window_size": None, "chunk_size": None}
    assert clip(30, 99, **options) == BLOCKS * PAGE - 32 - PAGE - 1
    resizer.promise(0)
    assert scheduler.max_req_len == 19
    assert clip(30, 99, **options) is None
    assert clip(4 * PAGE, 99, **options) is None  # SGLang would never admit it
    assert clip(4 * PAGE - 1, 99, **options) == 0


def test_blocks_are_not_removed_during_a_copy(scheduler: SimpleNamespace) -> None:
    resizer = KVResizer(scheduler)
    in_flight = SimpleNamespace(pending=1)
    scheduler.token_to_kv_pool_allocator.in_flight = in_flight
    assert not resizer.shrink(2)
    in_flight.pending = 0
    assert resizer.shrink(2)


def test_blocks_beyond_the_pool_are_added_and_withdrawn() -> None:
    scheduler = scheduler_of(beyond=30)
    resizer = KVResizer(scheduler)
    assert counts(scheduler) == {BLOCKS * PAGE}
    resizer.restore(30, 40)
    assert counts(scheduler) == {(BLOCKS + 10) * PAGE}
    assert scheduler.max_req_len == 60  # the model's limit
    allocator = scheduler.token_to_kv_pool_allocator
    own, theirs = allocator.alloc(BLOCKS * PAGE), allocator.alloc(PAGE)
    assert own.max() < 21 * PAGE
    assert theirs.tolist() == list(range(30 * PAGE, 31 * PAGE))
    assert resizer.withdraw(30, 35) == 1
    allocator.free(theirs)
    assert resizer.withdraw(30, 35) == 0
    allocator.free(own)
    assert counts(scheduler) == {(BLOCKS + 5) * PAGE}
    allocator.clear()
    assert counts(scheduler) == {(BLOCKS + 5) * PAGE}


def test_invalid_counts_change_nothing(scheduler: SimpleNamespace) -> None:
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


def test_schedulers_that_cannot_be_resized_are_refused(scheduler: SimpleNamespace) -> None:
    del scheduler.load_inquirer
    with pytest.raises(ExtError, match="no max_total_num_tokens in load_inquirer"):
        KVResizer(scheduler)
    scheduler.token_to_kv_pool_allocator = object()
    with pytest.raises(ExtError, match="the allocator object, which cannot be resized"):
        KVResizer(scheduler)
