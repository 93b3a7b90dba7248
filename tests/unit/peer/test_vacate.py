"""Tests of vacating ranges of KV blocks: eviction from SGLang's radix tree, and retraction."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_ext.engine.core import runtime
from sgl_ext.engine.kv.allocator import BlockGroupAllocator
from sgl_ext.engine.peer import vacate

PAGE, BLOCKS = 4, 100


class Tree:
    """SGLang's radix tree over a :class:`BlockGroupAllocator`."""

    def __init__(self, backend: str) -> None:
        from sgl_ext.bench.harness.prefix_tree import prefix_tree

        self.allocator = BlockGroupAllocator(
            BLOCKS * PAGE, PAGE, torch.float32, "cpu", None, False, expected_tokens=PAGE
        )
        self.cache = prefix_tree(self.allocator, tree_core_backend=backend)

    def insert(self, *blocks: int) -> None:
        """Inserts a sequence of blocks, given by one id for all tokens of each block.

        A prefix that is cached already keeps its slots.
        """
        from sgl_ext.bench.harness.prefix_tree import insert

        slots = self.allocator.alloc(len(blocks) * PAGE)
        insert(self.cache, self._tokens(blocks), slots)

    def match(self, *blocks: int) -> Any:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        from sgl_ext.bench.harness.prefix_tree import key_of

        return self.cache.match_prefix(MatchPrefixParams(key=key_of(self._tokens(blocks))))

    def kept(self, *blocks: int) -> list[int]:
        """Returns the KV blocks that hold the longest cached prefix of ``blocks``."""
        core = self.cache.tree_core
        node = self.match(*blocks).last_device_node
        slots = core.collect_full_device_indices(node, self.cache.root_node_handle(None))
        return (slots[::PAGE] // PAGE).tolist()

    def evict(self, start: int, end: int) -> None:
        vacate.evict(self.cache, start * PAGE, end * PAGE)

    @staticmethod
    def _tokens(blocks: tuple[int, ...]) -> list[int]:
        return [block for block in blocks for _ in range(PAGE)]


@pytest.fixture(params=["rust", "python"])
def tree(request: pytest.FixtureRequest) -> Tree:
    tree = Tree(request.param)
    tree.insert(1, 2, 3, 4)  # in KV blocks 1 to 4
    tree.insert(1, 2, 5, 6)  # in KV blocks 1, 2, 7 and 8
    tree.insert(7, 8)
    assert tree.kept(1, 2, 3, 4) == [1, 2, 3, 4]
    assert tree.kept(1, 2, 5, 6) == [1, 2, 7, 8]
    return tree


def test_only_nodes_in_the_range_are_evicted(tree: Tree) -> None:
    where = tree.kept(7, 8)
    tree.evict(7, 9)
    left = [] if set(where) & {7, 8} else where
    assert tree.kept(1, 2, 3, 4) == [1, 2, 3, 4]
    assert tree.kept(1, 2, 5, 6) == [1, 2]
    assert tree.kept(7, 8) == left


def test_descendants_are_evicted_with_their_node(tree: Tree) -> None:
    before = tree.kept(7, 8)
    tree.evict(2, 3)
    assert tree.kept(1, 2, 3, 4) == []
    assert tree.kept(1, 2, 5, 6) == []
    assert tree.kept(7, 8) == before
    assert tree.allocator.groups.withdraw(1, 5) == 0


def test_all_nodes_can_be_evicted(tree: Tree) -> None:
    tree.evict(1, 1 + BLOCKS)
    assert tree.cache.total_size()[0] == 0
    assert tree.allocator.groups.withdraw(1, 1 + BLOCKS) == 0


def test_locked_nodes_are_kept(tree: Tree) -> None:
    lock = tree.cache.lock(tree.match(1, 2, 3, 4).last_device_node)
    tree.evict(1, 1 + BLOCKS)
    assert tree.kept(1, 2, 3, 4) == [1, 2, 3, 4]
    assert tree.kept(7, 8) == []
    assert tree.allocator.groups.withdraw(1, 5) == 4
    tree.cache.unlock(lock)
    tree.evict(1, 2)
    assert tree.allocator.groups.withdraw(1, 5) == 0


class Batch:
    def __init__(self, reqs: list[SimpleNamespace]) -> None:
        self.reqs = reqs
        self.released: list[SimpleNamespace] = []
        self.batch_is_full = True

    def release_req(self, at: int, _remaining: int) -> None:
        self.released.append(self.reqs[at])

    def filter_batch(self, keep_indices: list[int]) -> None:
        self.reqs = [self.reqs[at] for at in keep_indices]


def test_a_prompt_is_retracted_for_which_a_block_is_locked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prompt that is computed in parts keeps the chunks that its next parts link."""
    chunked = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=0, kv_allocated_len=2))
    scheduler = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=torch.tensor([[8, 9]], dtype=torch.int32)),
        chunked_req=chunked,
    )
    released: list[object] = []
    monkeypatch.setattr(vacate, "release", lambda _scheduler, req: released.append(req))
    kept = {id(chunked): [torch.tensor([12, 13]), torch.tensor([41])]}
    power = SimpleNamespace(locked=lambda req: kept[id(req)])
    monkeypatch.setattr(runtime, "current", SimpleNamespace(inside_out=[power]))
    batch = Batch([])
    assert vacate.retract(scheduler, batch, 44, 48) == []
    assert vacate.retract(scheduler, batch, 40, 44) == released == [chunked]
    assert scheduler.chunked_req is None


def test_requests_that_hold_a_block_are_retracted() -> None:
    table = torch.tensor([[8, 9, 40, 41], [12, 13, 0, 44], [40, 41, 42, 0], [40, 0, 0, 0]])
    lengths = [4, 2, 3, 1]  # later slots of a row do not belong to its request
    reqs = [
        SimpleNamespace(
            name=row,
            finished=lambda row=row: row == 3,
            beam_group=None,
            session=None,
            kv=SimpleNamespace(req_pool_idx=None if row == 3 else row, kv_allocated_len=length),
        )
        for row, length in enumerate(lengths)
    ]
    scheduler = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=table), chunked_req=None
    )
    batch = Batch(list(reqs))
    out = vacate.retract(scheduler, batch, 40, 48)
    assert [req.name for req in batch.released] == [req.name for req in out] == [0, 2]
    assert [req.name for req in batch.reqs] == [1, 3]
    assert not batch.batch_is_full
    assert vacate.retract(scheduler, batch, 40, 48) == []
