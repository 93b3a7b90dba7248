"""Swap-out: the KV of a preempted request goes into the radix tree, and so to host memory.

SGLang drops the KV of a request that it preempts, and computes it again. Here its slots are free at
once, and the next owner of a slot waits for the copies that still read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.hooks import Original
from sgl_ext.engine.core.requests import retractable
from sgl_ext.engine.core.sglang_types import PrefillAdder, RadixTree, Req, Scheduler
from sgl_ext.engine.step import penalties
from sgl_ext.memory.tickets import COPY_DEADLINE_S, Priority
from sgl_ext.swap.manager import SwapManager
from sgl_ext.tiers.arena import Key, Pages


def _preempted(original: Original, *, req: Req, **kw: object) -> Any:
    # offload_kv=False: its KV must be computed again, for the weights may change in a pause.
    ext = runtime.current
    if ext is None or ext.swap is None or not kw.get("offload_kv", True):
        return original(req=req, **kw)
    ext.swap.preempted = req
    try:
        return original(req=req, **kw)
    finally:
        ext.swap.preempted = None


def _keep(original: Original, req: Req, tree: RadixTree, *, checkpoint: bool) -> Any:
    """Keeps the KV of a request that is preempted; SGLang releases that of others here, too."""
    ext = runtime.current
    if checkpoint or ext is None or ext.swap is None or ext.swap.preempted is not req:
        return original(req, tree, checkpoint=checkpoint)
    with ext.swap.manager.clock.on():
        return _kept(original, req, tree, ext.swap.manager)


def _kept(original: Original, req: Req, tree: RadixTree, swap: SwapManager) -> Any:
    # All but the last token, whose KV the next step computes, or is just computing.
    tokens = len(req.origin_input_ids) + len(req.output_ids) - 1
    page = tree.page_size
    whole = req.to_finish is None and req.kv.holds_kv and req.kv.kv_committed_len >= tokens
    # What a load has brought counts when SGLang has processed the forward that needed it.
    whole = whole and req.rid not in tree.linker.private_load_indices
    if swap.baseline.recompute or not (whole and serves(req)):
        swap.counts.recomputed += 1
        return original(req, tree, checkpoint=False)
    blocks = _blocks(req, tree, tokens)
    penalties.forget(req)
    if swap.baseline.wait:
        swap.stack.stores = Priority.URGENT
    keys = _keys(req, tokens // page * page, page)
    swap.stack.used(keys, 1)  # what it has there is not given up for what it lacks
    swap.stack.make_room(len(keys) + 1)  # those that are there might have to go for the others
    tail = swap.save_tail(int(blocks[-1])) if tokens % page else None
    result = original(req, tree, checkpoint=True)
    wrapper = tree.linker
    over = min(swap.stack.presume(), len(wrapper.pending_offloads))
    wrapper.commit_completed_offloads(wrapper.take_completed_offloads(over))
    swap.stack.store_lost(keys, blocks)
    swap.out(req.rid, tokens, keys, tail)
    if swap.baseline.copy_again:
        swap.copy_again(keys, blocks)
    if swap.baseline.wait:
        swap.stack.in_flight.wait(blocks, COPY_DEADLINE_S)
        swap.stack.stores = Priority.BULK
    return result


def ended(swap: SwapManager, tree: RadixTree, req: Req) -> None:
    """Copies the KV of a request that ends as well: a baseline to measure against."""
    if swap.baseline.copy_again and req.finished():
        tokens = req.kv.kv_committed_len
        whole = tokens // tree.page_size * tree.page_size
        swap.copy_again(_keys(req, whole, tree.page_size), _blocks(req, tree, tokens))


def _blocks(req: Req, tree: RadixTree, tokens: int) -> Pages:
    """Of the request's first ``tokens``."""
    row = tree.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
    return np.ascontiguousarray(row[: tokens : tree.page_size].long().numpy() // tree.page_size)


def serves(req: Req) -> bool:
    """Whether a request can be swapped; SGLang recomputes the others."""
    from sglang.srt.runtime_context import get_serving

    return (
        not get_serving().strip_thinking_cache  # whose trees do not take answers
        and req.session is None
        and req.beam_group is None
        and req.multimodal_inputs is None
        and req.input_embeds is None
        and req.positional_embed_overrides is None
        and not req.skip_radix_cache_insert
        and not (req.return_logprob and _wants_prompt(req))
        and bool(req.output_ids or not (req.return_logprob or penalties.counts(req)))
        and not req.return_hidden_states
        and not req.return_routed_experts
        and not req.return_indexer_topk
        and not req.is_prefill_only
    )


def _wants_prompt(req: Req) -> bool:
    """Whether the logprobs of its prompt are asked for, which SGLang takes from a prefill."""
    return 0 <= req.logprob_start_len < len(req.origin_input_ids)


def _keys(req: Req, tokens: int, page: int) -> Sequence[Key]:
    """Of the whole pages of a request's first ``tokens``, as SGLang's tree names them."""
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    if not tokens:
        return []
    ids = (req.origin_input_ids + req.output_ids)[:tokens]
    key = RadixKey(ids, req.extra_key, cache_salt=req.cache_salt)
    return [bytes.fromhex(each) for each in get_storage_hash_str(key, None, page_size=page)]


def displace(adder: PrefillAdder, req: Req, lacking: float) -> bool:
    """Has less urgent requests give way to one that there is no room for; whether there is then.

    As ``PrefillAdder.preempt_to_schedule``, which takes it that a request that gives way leaves
    only what it would have generated: not its KV, which it holds now.

    Args:
        lacking: tokens.
    """
    from sglang.srt.runtime_context import get_schedule

    sign = -1 if get_schedule().schedule_low_priority_values_first else 1
    batch = adder.running_batch
    running = [one for one in batch.reqs if retractable(one) and one not in adder.preempt_list]
    running.sort(key=lambda one: (sign * one.priority, -_arrival(one)))
    victims = []
    for one in running:
        if sign * (req.priority - one.priority) <= adder.priority_scheduling_preemption_threshold:
            break
        victims.append(one)
        lacking -= one.kv.kv_allocated_len + adder._get_running_request_total_token_offset(one)
        if lacking < 0:
            break
    if not victims or lacking >= 0:
        return False
    kept = []
    for at, one in enumerate(batch.reqs):
        if one in victims:
            offset = adder._get_running_request_total_token_offset(one)
            adder.memory_budget.total_offset -= offset
            batch.release_req(at, len(batch.reqs) - len(victims))
        else:
            kept.append(at)
    batch.filter_batch(keep_indices=kept)
    adder.preempt_list.extend(victims)
    return True


def keep_place(scheduler: Scheduler, req: Req, arrived: float) -> None:
    """Puts a retracted request, the last one of the waiting queue, where it was when it came."""
    from sglang.srt.environ import envs

    queue = scheduler.waiting_queue
    if queue and queue[-1] is req:
        queue.pop()
        later = (at for at, one in enumerate(queue) if _arrival(one) > arrived)
        queue.insert(next(later, len(queue)), req)
        if envs.SGLANG_REQ_WAITING_TIMEOUT.get() > 0:
            return  # which is told by the same time
        stats = req.time_stats
        # SGLang orders by this time, and adds what follows on it to the time in the queue.
        stats.queue_duration_s -= stats.wait_queue_entry_time - arrived
        stats.wait_queue_entry_time = arrived


def _arrival(req: Req) -> float:
    arrived: float = req.time_stats.wait_queue_entry_time
    return arrived


def _held(tokens: int, _observer: Any) -> int:
    ext = runtime.current
    return tokens if ext is None or ext.swap is None else tokens + ext.swap.ahead.tokens


HOOKS = (
    hooks.Hook(
        "sglang.srt.managers.scheduler_components.pool_stats_observer."
        "SchedulerPoolStatsObserver.session_held_tokens",
        "after",
        _held,
        "SGLang's accounting of slots knows those of requests, sessions and its tree",
    ),
    hooks.Hook(
        "sglang.srt.managers.schedule_batch.release_kv_cache",
        "around",
        _keep,
        "SGLang drops the KV of requests that give way",
    ),
    hooks.Hook(
        "sglang.srt.managers.schedule_batch.release_req",
        "around",
        _preempted,
        "SGLang releases KV of requests that give way as it does that of others",
    ),
)
