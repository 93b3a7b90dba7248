"""Scheduler without a model, for tests.

It has SGLang's own radix tree over the block group allocator, and requests that hold blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from simulated_engine import PIECE, SimulatedSlab
from trace_kit import RecordedTrace, time_stats

from sgl_ext.engine.kv.allocator import BlockGroupAllocator
from sgl_ext.memory.slab import HostSlab, Layout, Slab

HOLDERS = ("invariant_checker", "pool_stats_observer", "load_inquirer", "kv_events_publisher")
ROWS, LONGEST = 8, 20_000


class Req(SimpleNamespace):
    """Request with the fields of SGLang's ``Req`` that the tested code reads."""

    def __init__(self, rid: str, prompt: int, answer: int = 16) -> None:
        super().__init__(
            rid=rid, origin_input_ids=[1] * prompt, output_ids=[], beam_group=None, session=None,
            full_untruncated_fill_ids=[1] * prompt,
            sampling_params=SimpleNamespace(max_new_tokens=answer, min_new_tokens=0),
            kv=SimpleNamespace(holds_kv=False, req_pool_idx=None, kv_allocated_len=0),
            time_stats=time_stats(RecordedTrace(enabled=False)),
        )  # fmt: skip

    def finished(self) -> bool:
        return False


class Batch:
    """Batch of the requests that decode."""

    def __init__(self, scheduler: Scheduler, *reqs: Req) -> None:
        self.scheduler, self.reqs = scheduler, list(reqs)
        self.batch_is_full = False

    def release_req(self, at: int, _remaining: int) -> None:
        self.scheduler.release(self.reqs[at])

    def filter_batch(self, keep_indices: Sequence[int]) -> None:
        self.reqs = [self.reqs[at] for at in keep_indices]


class Scheduler(SimpleNamespace):
    """Scheduler with ``blocks`` blocks of KV, and addresses for ``beyond`` further blocks.

    Args:
        library: library of the simulated device that has the KV; None if the host has it.
    """

    def __init__(self, page: int, blocks: int, beyond: int = 0, library: str | None = None) -> None:
        from sgl_ext.bench.harness.prefix_tree import prefix_tree

        size = blocks * page
        allocator = BlockGroupAllocator(
            size, page, torch.float32, "cpu", None, False, expected_tokens=page, beyond=beyond
        )
        tree = prefix_tree(allocator, tree_core_backend="python")  # not bound to one thread
        table = torch.zeros(ROWS, LONGEST, dtype=torch.int64)
        super().__init__(
            token_to_kv_pool_allocator=allocator, tree_cache=tree,
            req_to_token_pool=SimpleNamespace(req_to_token=table), max_total_num_tokens=size,
            max_req_len=size - 1, max_req_input_len=size - 6, chunked_req=None,
            chunked_prefill_size=512, waiting_queue=[],
            model_config=SimpleNamespace(context_len=LONGEST),
            **{name: SimpleNamespace(max_total_num_tokens=size) for name in HOLDERS},
        )  # fmt: skip
        self.running_batch = Batch(self)
        layout = Layout(page, 1, kv_heads=1, head_dim=512, dtype="float32", fingerprint="none")
        self.slab: Slab
        if library is None:
            self.slab = HostSlab.create(layout, 1 + blocks, beyond=beyond)
        else:
            self.slab = SimulatedSlab.create(
                layout, 1 + blocks, 0, beyond=beyond, piece_bytes=PIECE, library=library
            )

    def extend(self, req: Req, tokens: int) -> None:
        """Allocates slots for the next ``tokens`` tokens of a request.

        Raises AssertionError if no slots are free. SGLang's ``alloc_for_extend`` ends the scheduler
        in that case.
        """
        allocator = self.token_to_kv_pool_allocator
        if not req.kv.holds_kv:
            rows = {other.kv.req_pool_idx for other in self.holders}
            req.kv.req_pool_idx = min(set(range(ROWS)) - rows)
            req.kv.holds_kv = True
            self.holders.append(req)
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        there = req.kv.kv_allocated_len
        before, after = torch.tensor([there]), torch.tensor([there + tokens])
        last = row[there - 1 : there] if there else torch.tensor([-1])
        slots = allocator.alloc_extend(before, before, after, after, last, tokens)
        assert slots is not None, f"Prefill out of memory: {req.rid} needs {tokens}"
        row[there : there + tokens] = slots
        req.kv.kv_allocated_len += tokens

    def release(self, req: Req) -> None:
        """Frees the blocks of a preempted request."""
        page = self.token_to_kv_pool_allocator.page_size
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        self.token_to_kv_pool_allocator.free(row[: req.kv.kv_allocated_len : page])
        self.holders.remove(req)
        req.kv.holds_kv, req.kv.kv_allocated_len = False, 0

    @property
    def holders(self) -> list[Req]:
        return self.__dict__.setdefault("_holders", [])

    def cache(self, first: int, blocks: int) -> None:
        """Inserts ``blocks`` blocks of token ids from ``first`` on into the tree, unlocked."""
        from sgl_ext.bench.harness.prefix_tree import insert

        page = self.token_to_kv_pool_allocator.page_size
        slots = self.token_to_kv_pool_allocator.alloc(blocks * page)
        insert(self.tree_cache, range(first, first + blocks * page), slots)

    @property
    def cached(self) -> int:
        """Number of tokens in the tree."""
        return int(self.tree_cache.total_size()[0])

    def _add_request_to_queue(self, req: Any, is_retracted: bool = False) -> None:
        self.waiting_queue.append(req)
