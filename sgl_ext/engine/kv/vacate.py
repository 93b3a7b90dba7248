"""Vacating of a range of KV blocks: eviction of its cached KV and retraction of its requests.

SGLang evicts KV by its eviction policy, wherever the KV lies, and retracts requests when memory
runs out. Here certain blocks must become free, and no others need to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_ext.engine.core.requests import release, reserved, retractable
from sgl_ext.engine.core.sglang_types import (
    Allocator,
    Node,
    RadixTree,
    Req,
    ScheduleBatch,
    Scheduler,
    TreeCore,
)


def evict(tree: RadixTree, start: int, end: int) -> None:
    """Evicts all nodes of the radix tree that need slots ``[start, end)`` and are not locked.

    A node is evicted together with the nodes behind it.
    """
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    core = tree.tree_core
    doomed: dict[Node, bool] = {}

    def lies_there(node: Node) -> bool:
        if node not in doomed:
            slots = core.get_component_device_value(node, ComponentType.FULL)
            doomed[node] = slots is not None and _any_within(slots, start, end)
        return doomed[node]

    while True:
        # A node becomes a leaf when its last leaf is evicted. Only another walk finds it.
        leaves = _leaves(core)
        paths = core.collect_path_info(leaves)
        going = [
            leaf
            for leaf, path in zip(leaves, paths, strict=True)
            if any(lies_there(node.node_id) for node in path)
        ]
        if not going:
            return
        tracker = dict.fromkeys(tree.tree_components, 0)
        for leaf in going:
            tree._evict_device_leaf(leaf, tracker)


def _leaves(core: TreeCore) -> list[Node]:
    """Returns the nodes with which SGLang's own eviction could begin."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    full = ComponentType.FULL
    tracker = {full: 0}
    leaves: list[Node] = []
    core.evict_device_start(full, core.full_evictable_size())
    try:
        while (node := core.evict_device_next_node(full, tracker).node_id) is not None:
            leaves.append(node)
    finally:
        core.evict_device_end(full)
    return leaves


def retract(scheduler: Scheduler, running: ScheduleBatch, start: int, end: int) -> list[Req]:
    """Retracts the requests that hold one of slots ``[start, end)``.

    Like SGLang's ``retract_decode``, it runs between two steps, when the results of the last step
    are in ``running``.

    Returns:
        The requests, to be queued again when the next step has been planned. The last step's result
        may still come, and is ignored as long as they are not queued.
    """
    going = [
        at
        for at, req in enumerate(running.reqs)
        if retractable(req) and _holds(scheduler, req, start, end)
    ]
    reqs = _out(running, going)
    chunked = scheduler.chunked_req
    if chunked is not None and _holds(scheduler, chunked, start, end):
        reqs.append(_retract_chunked(scheduler, chunked))
    return reqs


def retract_what_does_not_fit(scheduler: Scheduler, running: ScheduleBatch) -> list[Req]:
    """Retracts requests that SGLang has begun with memory that is gone now.

    SGLang counts on the room that it found when it began a prompt: a later chunk that finds none
    ends the scheduler, and the last request that decodes is aborted. Call this before each chunk,
    because the chunk that finds no room may come long after the memory has gone. Returns as
    :func:`retract`.
    """
    allocator = scheduler.token_to_kv_pool_allocator
    going = [
        at for at, req in enumerate(running.reqs) if retractable(req) and not fits(req, allocator)
    ]
    reqs = _out(running, going)
    if (req := scheduler.chunked_req) is not None:
        rest = len(req.full_untruncated_fill_ids) - req.kv.kv_allocated_len
        chunk = min(rest, scheduler.chunked_prefill_size or rest) + allocator.page_size
        room = allocator.available_size() + scheduler.tree_cache.evictable_size()
        if chunk > room or not fits(req, allocator):
            reqs.append(_retract_chunked(scheduler, req))
    return reqs


def fits(req: Req, allocator: Allocator) -> bool:
    """Returns whether SGLang would admit the request if it were alone."""
    longest = len(req.origin_input_ids) + len(req.output_ids) + reserved(req)
    # SGLang charges one extra page per request, for a last page that is not full.
    return bool(longest + allocator.page_size < allocator.size)


def _out(running: ScheduleBatch, going: Sequence[int]) -> list[Req]:
    """Retracts the requests at these places of the batch, and returns them."""
    reqs = [running.reqs[at] for at in going]
    for at in going:
        running.release_req(at, 0)
    if going:
        kept = [at for at in range(len(running.reqs)) if at not in set(going)]
        running.filter_batch(keep_indices=kept)
        running.batch_is_full = False
    return reqs


def _retract_chunked(scheduler: Scheduler, req: Req) -> Req:
    scheduler.chunked_req = None
    release(scheduler, req)
    return req


def _holds(scheduler: Scheduler, req: Req, start: int, end: int) -> bool:
    table = scheduler.req_to_token_pool.req_to_token
    return _any_within(table[req.kv.req_pool_idx, : req.kv.kv_allocated_len], start, end)


def _any_within(slots: torch.Tensor, start: int, end: int) -> bool:
    return bool(((slots >= start) & (slots < end)).any())
