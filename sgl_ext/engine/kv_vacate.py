"""Frees a range of KV blocks: what is cached there goes, who runs there begins anew.

SGLang evicts what was used least, wherever it lies, and lets requests give way where memory runs
out. Here certain blocks have to be left, and nothing else need be.
"""

from __future__ import annotations

from typing import Any

import torch


def evict(tree: Any, start: int, end: int) -> None:
    """Evicts all of the radix tree that needs slots ``[start, end)`` and that nobody has locked.

    A node that is evicted takes those behind it along.
    """
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    core = tree.tree_core
    doomed: dict[int, bool] = {}

    def lies_there(node: int) -> bool:
        if node not in doomed:
            slots = core.get_component_device_value(node, ComponentType.FULL)
            doomed[node] = slots is not None and _any_within(slots, start, end)
        return doomed[node]

    while True:
        # With its last leaf a node becomes one itself, which only another walk finds.
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


def _leaves(core: Any) -> list[int]:
    """Nodes that SGLang's own eviction could begin with."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    full = ComponentType.FULL
    tracker = {full: 0}
    leaves: list[int] = []
    core.evict_device_start(full, core.full_evictable_size())
    try:
        while (node := core.evict_device_next_node(full, tracker).node_id) is not None:
            leaves.append(node)
    finally:
        core.evict_device_end(full)
    return leaves


def retract(scheduler: Any, running: Any, start: int, end: int) -> int:
    """Has the running requests that hold one of slots ``[start, end)`` give way.

    As SGLang's ``retract_decode``, and at the same place of its loop: between two steps, when what
    the last one has brought is in ``running``.

    Returns:
        How many they are.
    """
    table = scheduler.req_to_token_pool.req_to_token
    going = [
        at
        for at, req in enumerate(running.reqs)
        if not req.finished()
        and req.beam_group is None
        and _any_within(table[req.kv.req_pool_idx, : req.kv.kv_allocated_len], start, end)
    ]
    if not going:
        return 0
    reqs = [running.reqs[at] for at in going]
    for at in going:
        running.release_req(at, 0)
    gone = set(going)
    running.filter_batch(keep_indices=[at for at in range(len(running.reqs)) if at not in gone])
    running.batch_is_full = False
    for req in reqs:
        scheduler._add_request_to_queue(req, is_retracted=True)
    return len(reqs)


def _any_within(slots: torch.Tensor, start: int, end: int) -> bool:
    return bool(((slots >= start) & (slots < end)).any())
