"""Swap-out: the KV of a preempted request goes into the radix tree, and so to host memory.

SGLang drops the KV of a request that it preempts, and recomputes it later. With swapping, the slots
are also free at once; the next owner of a slot waits for the copies that still read it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.hooks import Original
from sgl_ext.engine.core.requests import arrival, retractable
from sgl_ext.engine.core.runtime import ExtRuntime
from sgl_ext.engine.core.sglang_types import PrefillAdder, RadixTree, Req, Scheduler
from sgl_ext.engine.kv.indices import on_host
from sgl_ext.engine.swap import spans
from sgl_ext.engine.workarounds import penalties
from sgl_ext.memory.tickets import COPY_DEADLINE_S, Priority
from sgl_ext.planning import choices
from sgl_ext.swap.manager import SwapManager
from sgl_ext.swap.victims import Running, choose_victims
from sgl_ext.tiers.arena import Key, Pages


def _preempted(original: Original, *, req: Req, **kw: object) -> object:
    # offload_kv=False: the KV must be recomputed, because weights may change during a pause.
    ext = runtime.current
    if ext is None or ext.swap is None or not kw.get("offload_kv", True):
        return original(req=req, **kw)
    ext.swap.preempted = req
    try:
        return original(req=req, **kw)
    finally:
        ext.swap.preempted = None


def _keep(original: Original, req: Req, tree: RadixTree, *, checkpoint: bool) -> object:
    """Keeps the KV of a preempted request; other requests are released as SGLang does it."""
    ext = runtime.current
    if checkpoint or ext is None or ext.swap is None or ext.swap.preempted is not req:
        return original(req, tree, checkpoint=checkpoint)
    with ext.swap.manager.clock.on():
        return _kept(original, req, tree, ext.swap.manager, ext)


def _kept(
    original: Original, req: Req, tree: RadixTree, swap: SwapManager, ext: ExtRuntime
) -> object:
    began = time.perf_counter()
    # The last token has no KV yet: the next step computes it, or is computing it now.
    tokens = len(req.origin_input_ids) + len(req.output_ids) - 1
    page = tree.page_size
    whole = req.to_finish is None and req.kv.holds_kv and req.kv.kv_committed_len >= tokens
    # Loaded KV is valid only when SGLang has processed the forward that needed it.
    whole = whole and req.rid not in tree.linker.private_load_indices
    keeps = not swap.experiment.recompute and whole and serves(req) and not ext.recomputes(req)
    if not keeps or not choices.keeps(ext.costs, tokens):
        swap.counts.recomputed += 1
        return original(req, tree, checkpoint=False)
    blocks = _blocks(req, tree, tokens)
    penalties.forget(req)
    if swap.experiment.wait:
        swap.stack.stores.priority = Priority.URGENT
    keys = _keys(req, tokens // page * page, page)
    swap.stack.used(keys, 1)  # its resident pages are not evicted for its missing ones
    swap.stack.make_room(len(keys) + 1)  # for all pages: resident unpinned ones count as room
    tail = swap.save_tail(int(blocks[-1])) if tokens % page else None
    result = original(req, tree, checkpoint=True)
    wrapper = tree.linker
    wrapper.cache_linker.flush()
    over = min(swap.stack.stores.presume(), len(wrapper.pending_offloads))
    wrapper.commit_completed_offloads(wrapper.take_completed_offloads(over))
    swap.stack.stores.store_lost(keys, blocks)
    swap.out(req.rid, tokens, keys, tail)
    spans.swapped_out(req, began, tokens)
    if swap.experiment.copy_again:
        swap.copy_again(keys, blocks)
    if swap.experiment.wait:
        swap.stack.in_flight.wait(blocks, COPY_DEADLINE_S)
        swap.stack.stores.priority = Priority.BULK
    return result


def ended(swap: SwapManager, tree: RadixTree, req: Req) -> None:
    """Copies the KV of a finished request again in an experiment with ``copy_again``."""
    if swap.experiment.copy_again and req.finished():
        tokens = req.kv.kv_committed_len
        whole = tokens // tree.page_size * tree.page_size
        swap.copy_again(_keys(req, whole, tree.page_size), _blocks(req, tree, tokens))


def _blocks(req: Req, tree: RadixTree, tokens: int) -> Pages:
    """Returns the blocks of the request's first ``tokens`` tokens."""
    row = tree.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
    return on_host(row[: tokens : tree.page_size]) // tree.page_size


def serves(req: Req) -> bool:
    """Returns whether a request can be swapped; SGLang recomputes other requests."""
    from sglang.srt.runtime_context import get_serving

    return (
        not get_serving().strip_thinking_cache  # the tree then takes no output tokens
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
    """Returns whether the request needs logprobs of its prompt, which SGLang takes from prefill."""
    return 0 <= req.logprob_start_len < len(req.origin_input_ids)


def _keys(req: Req, tokens: int, page: int) -> Sequence[Key]:
    """Returns the keys of the pages of a request's first ``tokens`` tokens, as in SGLang's tree.

    Args:
        tokens: tokens of whole pages.
        page: tokens of a page.
    """
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    if not tokens:
        return []
    ids = (req.origin_input_ids + req.output_ids)[:tokens]
    key = RadixKey(ids, req.extra_key, cache_salt=req.cache_salt)
    return [bytes.fromhex(each) for each in get_storage_hash_str(key, None, page_size=page)]


def displace(adder: PrefillAdder, req: Req, lacking: float) -> bool:
    """Preempts less urgent requests for one that does not fit.

    Unlike ``PrefillAdder.preempt_to_schedule``, it counts the KV that a preempted request holds,
    not only the tokens that the request would still have generated.

    Args:
        lacking: tokens that are missing; below 0 if the request fits.

    Returns:
        Whether the request fits now. If it would not, no request is preempted, as far as the KV of
        the others is theirs alone.
    """
    from sglang.srt.runtime_context import get_schedule

    sign = -1 if get_schedule().schedule_low_priority_values_first else 1
    batch = adder.running_batch
    # The memory of an aborted request is free at the end of the step.
    able = [
        one
        for one in batch.reqs
        if retractable(one) and one.to_finish is None and one not in adder.preempt_list
    ]
    reserved = adder._get_running_request_total_token_offset
    running = [
        Running(sign * one.priority, arrival(one), one.kv.kv_allocated_len + reserved(one))
        for one in able
    ]
    margin = adder.priority_scheduling_preemption_threshold
    victims = [able[at] for at in choose_victims(running, sign * req.priority, lacking, margin)]
    if not victims:
        return False
    kept = []
    for at, one in enumerate(batch.reqs):
        if one in victims:
            adder.memory_budget.total_offset -= reserved(one)
            batch.release_req(at, len(batch.reqs) - len(victims))
        else:
            kept.append(at)
    batch.filter_batch(keep_indices=kept)
    adder.preempt_list.extend(victims)
    return True


def keep_place(scheduler: Scheduler, req: Req, arrived: float) -> None:
    """Moves a retracted request from the end of the waiting queue to its place by arrival.

    Args:
        arrived: time at which it was first queued, on SGLang's clock.
    """
    from sglang.srt.environ import envs

    queue = scheduler.waiting_queue
    if queue and queue[-1] is req:
        queue.pop()
        later = (at for at, one in enumerate(queue) if arrival(one) > arrived)
        queue.insert(next(later, len(queue)), req)
        if envs.SGLANG_REQ_WAITING_TIMEOUT.get() > 0:
            return  # the timeout counts from the same time
        stats = req.time_stats
        # SGLang orders by this time, and adds the time since then to the time in the queue.
        stats.queue_duration_s -= stats.wait_queue_entry_time - arrived
        stats.wait_queue_entry_time = arrived


def _held(tokens: int, _observer: object) -> int:
    ext = runtime.current
    return tokens if ext is None or ext.swap is None else tokens + ext.swap.ahead.tokens


HOOKS = (
    hooks.Hook(
        "sglang.srt.managers.scheduler_components.pool_stats_observer."
        "SchedulerPoolStatsObserver.session_held_tokens",
        "after",
        _held,
        "SGLang accounts only for the slots of requests, sessions and its radix tree",
    ),
    hooks.Hook(
        "sglang.srt.managers.schedule_batch.release_kv_cache",
        "around",
        _keep,
        "SGLang drops the KV of preempted requests",
    ),
    hooks.Hook(
        "sglang.srt.managers.schedule_batch.release_req",
        "around",
        _preempted,
        "SGLang releases the KV of preempted requests like that of other requests",
    ),
)
