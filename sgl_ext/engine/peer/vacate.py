"""Vacating of a range of KV slots: eviction of its cached KV and retraction of its requests.

SGLang evicts KV by its eviction policy, wherever the KV lies, and retracts requests when memory
runs out. Here certain slots must become free, and no others need to;
:mod:`~sgl_ext.peer.vacating` has the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch

from sgl_ext.engine.core import runtime
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
from sgl_ext.engine.kv.indices import on_host
from sgl_ext.peer import vacating


def evict(tree: RadixTree, start: int, end: int, *, at_once: bool = True) -> None:
    """Evicts all nodes of the radix tree that need slots ``[start, end)`` and are not locked.

    A node is evicted together with the nodes behind it. If there are tiers, they receive its KV.

    Args:
        at_once: evicts all of them, and KV that host memory has no room for is lost. Otherwise
            nodes whose KV no tier has yet are kept, and another call may evict them.
    """
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    core, ext = tree.tree_core, runtime.current
    tiers = None if ext is None or ext.independent else ext.tiers
    staying: set[Node] = set()
    within: dict[Node, bool] = {}

    def look(nodes: Sequence[Node]) -> None:
        values = [core.get_component_device_value(node, ComponentType.FULL) for node in nodes]
        have = {node: slots for node, slots in zip(nodes, values, strict=True) if slots is not None}
        found = zip(have, any_within([*have.values()], start, end), strict=True)
        within.update(dict.fromkeys(nodes, False) | dict(found))

    while True:
        # A node becomes a leaf when its last leaf is evicted. Only another walk finds it.
        leaves = _leaves(core)
        paths = {
            leaf: [node.node_id for node in path]
            for leaf, path in zip(leaves, core.collect_path_info(leaves), strict=True)
        }
        look([node for node in dict.fromkeys(chain(*paths.values())) if node not in within])
        chosen = vacating.leaves_to_evict(paths, within.__getitem__)
        if not (chosen := [leaf for leaf in chosen if leaf not in staying]):
            break
        tracker = dict.fromkeys(tree.tree_components, 0)
        for leaf in chosen:
            if tiers is None or tiers.linker.leave(core, leaf, at_once=at_once):
                tree._evict_device_leaf(leaf, tracker)
            else:
                staying.add(leaf)
    if tiers is not None and not at_once and not staying:
        tiers.linker.departures.end()


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
    """Retracts the requests that hold one of slots ``[start, end)``, or keep it from eviction.

    Like SGLang's ``retract_decode``, it runs between two steps, when the results of the last step
    are in ``running``.

    Returns:
        The requests, to be queued again when the next step has been planned. The last step's result
        may still come, and is ignored as long as they are not queued.
    """
    # A batch may still have requests that have finished, whose rows are freed.
    reqs = [*filter(retractable, running.reqs), *filter(None, [scheduler.chunked_req])]
    held = any_within([_kept_by(scheduler, req) for req in reqs], start, end)
    holders = {id(req) for req, holds in zip(reqs, held, strict=True) if holds}
    return _retract(scheduler, running, lambda req: id(req) in holders)


def retract_what_does_not_fit(scheduler: Scheduler, running: ScheduleBatch) -> list[Req]:
    """Retracts requests that SGLang has begun with memory that is gone now.

    SGLang counts on the room that it found when it began a prompt: a later chunk that finds none
    ends the scheduler, and the last request that decodes is aborted. Call this before each chunk,
    because the chunk that finds no room may come long after the memory has gone. Returns as
    :func:`retract`.
    """
    allocator = scheduler.token_to_kv_pool_allocator

    def lacks_memory(req: Req) -> bool:
        if not fits(req, allocator):
            return True
        if req is not scheduler.chunked_req:
            return False
        rest = len(req.full_untruncated_fill_ids) - req.kv.kv_allocated_len
        available = allocator.available_size() + scheduler.tree_cache.evictable_size()
        chunk = scheduler.chunked_prefill_size
        return not vacating.chunk_fits(rest, chunk, available, allocator.page_size)

    return _retract(scheduler, running, lacks_memory)


def fits(req: Req, allocator: Allocator) -> bool:
    """Returns whether SGLang would admit the request if it were alone."""
    longest = len(req.origin_input_ids) + len(req.output_ids) + reserved(req)
    return vacating.fits(longest, allocator.size, allocator.page_size)


def clip(req: Req, allocator: Allocator) -> None:
    """Clips a request's answer to the present memory, as SGLang does when a request arrives.

    Memory that it was clipped to then may have gone. The request still generates a token.
    """
    from sglang.srt.mem_cache.allocator.base import BaseTokenToKVPoolAllocator

    if req.beam_group is not None:
        return  # SGLang has computed the group's own limit from it
    params = req.sampling_params
    # The method of our class counts on promised memory.
    most = BaseTokenToKVPoolAllocator.max_new_tokens_for_memory(
        allocator, len(req.origin_input_ids), params.max_new_tokens, token_capacity=allocator.size,
        sliding_window_size=None, chunk_size=None,
    )  # fmt: skip
    params.max_new_tokens = min(max(most, len(req.output_ids) + 1), params.max_new_tokens)
    params.min_new_tokens = min(params.min_new_tokens, params.max_new_tokens)


def _retract(
    scheduler: Scheduler, running: ScheduleBatch, chosen: Callable[[Req], bool]
) -> list[Req]:
    """Retracts the chosen requests of the batch, and then the chunked prompt if it is chosen."""
    indices = [at for at, req in enumerate(running.reqs) if retractable(req) and chosen(req)]
    reqs = [running.reqs[at] for at in indices]
    for at in indices:
        running.release_req(at, 0)
    if indices:
        kept = [at for at in range(len(running.reqs)) if at not in set(indices)]
        running.filter_batch(keep_indices=kept)
        running.batch_is_full = False
    if (chunked := scheduler.chunked_req) is not None and chosen(chunked):
        scheduler.chunked_req = None
        release(scheduler, chunked)
        reqs.append(chunked)
    return reqs


def slots_of(scheduler: Scheduler, req: Req) -> torch.Tensor:
    """Returns the slots of a request that has a row, on the device."""
    table = scheduler.req_to_token_pool.req_to_token
    return table[req.kv.req_pool_idx, : req.kv.kv_allocated_len]


def _kept_by(scheduler: Scheduler, req: Req) -> torch.Tensor:
    """Returns the slots of a request that has a row, and those that powers have locked for it."""
    own, ext = slots_of(scheduler, req), runtime.current
    locked = [slots for power in ext.inside_out for slots in power.locked(req)] if ext else []
    return torch.cat([own, *locked]) if locked else own


def any_within(parts: Sequence[torch.Tensor], start: int, end: int) -> list[bool]:
    """Returns of each tensor whether it has one of slots ``[start, end)``; waits once for all."""
    if not parts:
        return []
    slots = torch.cat([*parts])
    within = np.cumsum(on_host((slots >= start) & (slots < end)))
    ends = np.cumsum([len(part) for part in parts])
    counts = np.diff(np.concatenate([[0], within])[ends], prepend=0)
    return [bool(count) for count in counts]
