"""Where swapping meets SGLang's scheduler: what gives way, and how it comes back.

SGLang drops the KV of a request that it preempts, and computes it again. Here the KV goes into the
radix tree instead, and so to host memory; its slots are free at once, and whoever is given them
waits for what still reads them. A request comes back without a forward: its KV is copied into new
slots, and it joins the batch that decodes where it left it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sgl_ext.config import ExtConfig
from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.retraction import retractable
from sgl_ext.engine.core.unserved import Unserved, require_served
from sgl_ext.engine.swap import penalties
from sgl_ext.engine.swap import resume as swap_in
from sgl_ext.memory.tickets import COPY_DEADLINE_S, Priority
from sgl_ext.swap.manager import SwapManager
from sgl_ext.tiers.arena import Key, Pages

_UNSERVED: Unserved = (
    ("tp_size", lambda size: size > 1, "tensor parallelism"),
    ("disaggregation_mode", lambda mode: mode != "null", "prefill-decode disaggregation"),
)


def declare(server_args: Any, config: ExtConfig) -> None:
    """Has SGLang schedule by priorities, if a policy decides them.

    Raises:
        ActivationError: the arguments ask for something that swapping does not serve.
    """
    if config.swap is None:
        return
    require_served(server_args, "swap", _UNSERVED)
    if config.swap.policy == "sglang":
        return
    if server_args.schedule_low_priority_values_first or server_args.disable_priority_preemption:
        raise hooks.ActivationError(
            f"swap.policy {config.swap.policy} decides priorities, and does not work with "
            "--schedule-low-priority-values-first and --disable-priority-preemption; leave them "
            "out, or set swap.policy to sglang"
        )
    if server_args.radix_eviction_policy == "priority":
        raise hooks.ActivationError(
            f"swap.policy {config.swap.policy} gives requests levels in place of priorities, by "
            "which --radix-eviction-policy priority would order the cache; choose another one, or "
            "set swap.policy to sglang"
        )
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(
        server_args,
        "sgl_ext",
        enable_priority_scheduling=True,
        priority_scheduling_preemption_threshold=0,
        retraction_policy="priority",
    )


def _gives_way(original: Callable[..., Any], *, req: Any, **kw: Any) -> Any:
    # offload_kv=False: its KV must be computed again, for the weights may change in a pause.
    if (ext := runtime.current) is None or not kw.get("offload_kv", True):
        return original(req=req, **kw)
    ext.giving_way = req
    try:
        return original(req=req, **kw)
    finally:
        ext.giving_way = None


def _keep(original: Callable[..., Any], req: Any, tree: Any, *, checkpoint: bool) -> Any:
    """SGLang releases the KV of a request: of one that gives way, but of others, too."""
    ext = runtime.current
    if checkpoint or ext is None or ext.swap is None or ext.giving_way is not req:
        return original(req, tree, checkpoint=checkpoint)
    with ext.swap.clock.on():
        return _kept(original, req, tree, ext.swap)


def _kept(original: Callable[..., Any], req: Any, tree: Any, swap: SwapManager) -> Any:
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


def _ended(tree: Any, req: Any, *_args: Any, **_kw: Any) -> None:
    """To measure against: what a turn has had of KV is copied when it ends, too."""
    ext = runtime.current
    if ext is None or ext.swap is None or not ext.swap.baseline.copy_again or not req.finished():
        return
    tokens = req.kv.kv_committed_len
    whole = tokens // tree.page_size * tree.page_size
    ext.swap.copy_again(_keys(req, whole, tree.page_size), _blocks(req, tree, tokens))


def _blocks(req: Any, tree: Any, tokens: int) -> Pages:
    """Of the request's first ``tokens``."""
    row = tree.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
    return np.ascontiguousarray(row[: tokens : tree.page_size].long().numpy() // tree.page_size)


def serves(req: Any) -> bool:
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


def _wants_prompt(req: Any) -> bool:
    """Whether the logprobs of its prompt are asked for, which SGLang takes from a prefill."""
    return 0 <= req.logprob_start_len < len(req.origin_input_ids)


def _keys(req: Any, tokens: int, page: int) -> Sequence[Key]:
    """Of the whole pages of a request's first ``tokens``, as SGLang's tree names them."""
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    if not tokens:
        return []
    ids = (req.origin_input_ids + req.output_ids)[:tokens]
    key = RadixKey(ids, req.extra_key, cache_salt=req.cache_salt)
    return [bytes.fromhex(each) for each in get_storage_hash_str(key, None, page_size=page)]


def makes_room(adder: Any, req: Any) -> bool:
    """Whether others have given way to a request that there was no memory for; SGLang preempts only
    where there are too many requests."""
    if (ext := runtime.current) is None or ext.swap is None:
        return False
    from sglang.srt.runtime_context import get_schedule

    schedule = get_schedule()
    if not schedule.enable_priority_scheduling or schedule.disable_priority_preemption:
        return False
    with ext.swap.clock.on():
        found = swap_in.look_up(adder.tree_cache, req)
        with adder._lock_node(found.node):
            lacking = swap_in.lacking(adder, req, found.tokens)
        return displace(adder, req, lacking)


def displace(adder: Any, req: Any, lacking: float) -> bool:
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


def _resume(original: Callable[..., Any], scheduler: Any, running: Any) -> Any:
    """Requests that were taken back in this step join the batch that decodes."""
    ext = runtime.current
    if ext is None or ext.swap is None:
        return original(scheduler, running)
    with ext.swap.clock.on():
        news = ext.swap.advance()
        if ext.ahead is not None:
            for rid, pages in ext.ahead.land(scheduler.tree_cache):
                news = True
                ext.swap.counts.loaded_pages += pages
                if not pages and rid in ext.swap:
                    its = (req for req in scheduler.waiting_queue if req.rid == rid)
                    swap_in.lost(ext.swap, rid, next(its, None))
        if news:
            # SGLang found no room for somebody while these were passed over, and looks at nobody
            # before one of those that run has ended.
            running.batch_is_full = False
        if ext.priorities is not None:
            chunked = () if scheduler.chunked_req is None else (scheduler.chunked_req,)
            holding = (*running.reqs, *chunked)
            aside = () if ext.peer is None else (*ext.peer.aside, *ext.peer.out)
            waiting = (*scheduler.waiting_queue, *aside)
            ext.priorities.step(waiting, holding, scheduler.forward_ct)
    plan = original(scheduler, running)
    with ext.swap.clock.on():
        if reqs := swap_in.back(scheduler):
            gone: set[Any] = set()
            for batch in swap_in.batches(scheduler, reqs):
                gone.update(batch.reqs)
                if plan.running_batch.is_empty():
                    plan.running_batch = batch
                else:
                    plan.running_batch.merge_batch(batch)
            scheduler.waiting_queue = [req for req in scheduler.waiting_queue if req not in gone]
    return plan


def _keep_place(original: Callable[..., Any], scheduler: Any, req: Any, **kw: Any) -> Any:
    """Who gives way waits where it did when it came."""
    ext = runtime.current
    if ext is None or not req.retraction_count:
        return original(scheduler, req, **kw)
    from sglang.srt.environ import envs

    arrived = req.time_stats.wait_queue_entry_time
    # Who was accepted stays so, however many have come since.
    most, scheduler.max_queued_requests = scheduler.max_queued_requests, None
    try:
        result = original(scheduler, req, **kw)
    finally:
        scheduler.max_queued_requests = most
    if ext.swap is None:
        return result
    queue = scheduler.waiting_queue
    if queue and queue[-1] is req:
        queue.pop()
        later = (at for at, one in enumerate(queue) if _arrival(one) > arrived)
        queue.insert(next(later, len(queue)), req)
        if envs.SGLANG_REQ_WAITING_TIMEOUT.get() > 0:
            return result  # which is told by the same time
        stats = req.time_stats
        # SGLang orders by this time, and adds what follows on it to the time in the queue.
        stats.queue_duration_s -= stats.wait_queue_entry_time - arrived
        stats.wait_queue_entry_time = arrived
    return result


def _arrival(req: Any) -> float:
    arrived: float = req.time_stats.wait_queue_entry_time
    return arrived


def _held(tokens: int, _observer: Any) -> int:
    ext = runtime.current
    return tokens if ext is None or ext.ahead is None else tokens + ext.ahead.tokens


HOOKS = (
    hooks.Hook(
        "sglang.srt.managers.scheduler_components.pool_stats_observer."
        "SchedulerPoolStatsObserver.session_held_tokens",
        "after",
        _held,
        "SGLang's accounting of slots knows those of requests, sessions and its tree",
    ),
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue",
        "around",
        _keep_place,
        "SGLang puts who gives way behind all that wait",
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
        _gives_way,
        "SGLang releases KV of requests that give way as it does that of others",
    ),
    hooks.Hook(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.on_release",
        "before",
        _ended,
        "SGLang tells its tree only which requests end",
    ),
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill",
        "around",
        _resume,
        "a request that comes back is computed again; only a decode server of a disaggregated pair "
        "takes KV from elsewhere",
    ),
)
