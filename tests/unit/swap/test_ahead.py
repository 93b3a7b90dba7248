"""Tests of swap-ins that overlap with decode steps: delayed, cancelled and cleared."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from delayed_copies import DelayedEngine
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from stack_kit import BLOCKS, Machine
from tier_kit import keys
from trace_kit import RecordedTrace, time_stats

from sgl_ext.engine.kv.known import KnownSlots
from sgl_ext.engine.swap.ahead import SwapAhead
from sgl_ext.memory.block_groups import BlockGroups
from sgl_ext.memory.runs import runs_of
from sgl_ext.planning.costs import Costs

PAGE = 4
TOKENS = tuple(range(5 * PAGE))


class Allocator:
    def __init__(self) -> None:
        self.groups = BlockGroups(BLOCKS, page=1, first=0)
        self.known = KnownSlots()

    def alloc(self, tokens: int) -> torch.Tensor | None:
        if (runs := self.groups.allocate([(None, tokens // PAGE)])) is None:
            return None
        slots = [slot for at, many in runs[0] for slot in range(at * PAGE, (at + many) * PAGE)]
        return torch.tensor(slots)

    def free(self, slots: torch.Tensor) -> None:
        self.groups.release(runs_of(slots[::PAGE].numpy() // PAGE))


@dataclass
class Tree:
    """Fake of SGLang's radix tree that counts locks and records insertions."""

    page_size: int = PAGE
    token_to_kv_pool_allocator: Allocator = field(default_factory=Allocator)
    locks: int = 0
    inserted: list[InsertParams] = field(default_factory=list)

    def lock(self, node: int) -> Any:
        self.locks += 1
        return SimpleNamespace(node=node)

    def unlock(self, _lock: Any) -> None:
        self.locks -= 1

    def path_device_indices(self, _node: int) -> torch.Tensor:
        return torch.arange(PAGE) + 1000

    def insert(self, asked: InsertParams) -> None:
        self.inserted.append(asked)


@pytest.fixture
def delayed() -> DelayedEngine:
    return DelayedEngine(random.Random(0))  # noqa: S311


@pytest.fixture
def machine(delayed: DelayedEngine) -> Machine:
    machine = Machine(PAGE, 16, delayed=delayed)
    machine.compute(keys(1, 2, 3, 4), np.arange(4))
    machine.stack.stores.store(keys(1, 2, 3, 4), np.arange(4))
    delayed.let_happen(1)
    machine.stack.poll()
    assert machine.stack.stores.completed()
    machine.stack.stores.pop()
    return machine


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> Tree:
    from sglang.srt.mem_cache import common

    monkeypatch.setattr(common, "evict_from_tree_cache", lambda _tree, _tokens: None)
    return Tree()


@pytest.fixture
def traced() -> RecordedTrace:
    return RecordedTrace()


@pytest.fixture
def ahead(machine: Machine, tree: Tree, traced: RecordedTrace) -> SwapAhead:
    """Returns swap-ins with one in progress: pages 1 to 4 of five; page 0 is on the device."""
    ahead = SwapAhead(machine.stack, Costs())
    req = SimpleNamespace(
        rid="r", origin_input_ids=list(TOKENS), output_ids=[9], extra_key=None, cache_salt=None,
        time_stats=time_stats(traced),
    )  # fmt: skip
    assert ahead.begin(tree, req, 7, PAGE, keys(1, 2, 3, 4), growth=40)
    return ahead


def test_landed_pages_are_inserted_into_the_tree(
    ahead: SwapAhead, tree: Tree, machine: Machine, delayed: DelayedEngine, traced: RecordedTrace
) -> None:
    assert (len(ahead), ahead.tokens, ahead.growth, tree.locks) == (1, 4 * PAGE, 40, 1)
    assert not list(ahead.land(tree))
    delayed.let_happen(1)
    assert list(ahead.land(tree)) == [("r", 4)]
    (asked,) = tree.inserted
    assert list(asked.key.token_ids) == list(TOKENS)
    assert (asked.prev_prefix_len, asked.inserted_len) == (PAGE, len(TOKENS))
    assert asked.value[:PAGE].tolist() == [1000, 1001, 1002, 1003]
    blocks = asked.value[PAGE::PAGE].numpy() // PAGE
    assert machine.right(keys(1, 2, 3, 4), blocks)
    assert (len(ahead), tree.locks, machine.stack.host._pinned) == (0, 0, 0)
    (span,) = traced.slices
    assert (span.slice_name, span.attrs) == ("ext_swap_in", {"loaded": 4 * PAGE})


@pytest.mark.parametrize("times", [1, 20])
def test_a_cancelled_swap_in_leaves_no_locks_or_pins(
    ahead: SwapAhead, tree: Tree, machine: Machine, delayed: DelayedEngine, times: int
) -> None:
    """Cancels once, when the copy may have begun and then lands, or 20 times.

    In both cases all locks and pinned places are released. The slots are free or in the tree.
    """
    for _ in range(times):
        ahead.cancel("r")
        ahead.cancel("somebody else")
    delayed.let_happen(1)
    ((rid, pages),) = ahead.land(tree)
    assert (rid, bool(pages)) == ("r", bool(tree.inserted))
    if times > 1:
        assert not pages
        assert tree.token_to_kv_pool_allocator.groups.available == BLOCKS
    assert (len(ahead), ahead.tokens, tree.locks, machine.stack.host._pinned) == (0, 0, 0, 0)


def test_clear_returns_when_no_copy_is_pending(
    ahead: SwapAhead, machine: Machine, delayed: DelayedEngine
) -> None:
    ahead.clear()
    assert not delayed.pending
    assert (len(ahead), machine.stack.host._pinned) == (0, 0)


def test_no_swap_in_begins_without_free_slots(machine: Machine, tree: Tree) -> None:
    held = tree.token_to_kv_pool_allocator.alloc((BLOCKS - 1) * PAGE)
    assert held is not None
    ahead = SwapAhead(machine.stack, Costs())
    req = SimpleNamespace(rid="r")
    assert not ahead.begin(tree, req, 7, 0, keys(1, 2), growth=0)
    assert (len(ahead), tree.locks, machine.stack.host._pinned) == (0, 0, 0)
    assert machine.stack.host.lookup(keys(1, 2)) == 2
