"""Where swapping meets SGLang's scheduler: what gives way, and how it comes back.

SGLang drops the KV of a request that it preempts, and computes it again. Here the KV goes into the
radix tree instead, and so to host memory; its slots are free at once, and whoever is given them
waits for what still reads them. A request comes back without a forward: its KV is copied into new
slots, and it joins the batch that decodes where it left it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from sgl_ext import runtime
from sgl_ext.config import ExtConfig
from sgl_ext.engine import hooks, penalties
from sgl_ext.engine.meta_info import tell, told
from sgl_ext.engine.unserved import Unserved, require_served
from sgl_ext.tiers.arena import Key

_DEADLINE_S = 60.0
"""Of a copy within this machine's memory."""


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
    from sglang.srt.arg_groups.overrides import declare_resolution

    declare_resolution(
        server_args,
        "sgl_ext",
        enable_priority_scheduling=True,
        priority_scheduling_preemption_threshold=0,
    )


def _keep(original: Callable[..., Any], req: Any, tree: Any, *, checkpoint: bool) -> Any:
    """SGLang releases the KV of a request that gives way."""
    ext = runtime.current
    if checkpoint or ext is None or ext.swap is None or req.to_finish is not None:
        return original(req, tree, checkpoint=checkpoint)
    # All but the last token, whose KV the next step computes, or is just computing.
    tokens = len(req.origin_input_ids) + len(req.output_ids) - 1
    if not serves(req) or not req.kv.holds_kv or req.kv.kv_committed_len < tokens:
        ext.swap.counts.recomputed += 1
        return original(req, tree, checkpoint=checkpoint)
    swap, page = ext.swap, tree.page_size
    row = tree.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
    tail = None
    if tokens % page:
        tail = swap.save_tail(int(row[tokens // page * page]) // page)
    result = original(req, tree, checkpoint=True)
    wrapper = tree.linker
    over = min(swap.stack.presume(), len(wrapper.pending_offloads))
    wrapper.commit_completed_offloads(wrapper.take_completed_offloads(over))
    swap.out(req.rid, tokens, _keys(req, tokens // page * page, page), tail)
    return result


def serves(req: Any) -> bool:
    """Whether a request can be swapped; SGLang recomputes the others."""
    return (
        req.session is None
        and req.beam_group is None
        and req.multimodal_inputs is None
        and req.input_embeds is None
        and req.positional_embed_overrides is None
        and not req.skip_radix_cache_insert
        and not (req.return_logprob and _wants_prompt(req))
        and bool(req.output_ids or not (req.return_logprob or penalties.counts(req)))
        and not req.return_hidden_states
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


def take_back(adder: Any, req: Any) -> Any:
    """Takes a request back, if there is room for it.

    Returns:
        SGLang's ``AddReqResult``; None if it was not swapped, or if host memory has lost something
        of it and it has to be computed again as SGLang does.
    """
    ext = runtime.current
    if ext is None or ext.swap is None or (swapped := ext.swap.get(req.rid)) is None:
        return None
    from sglang.srt.managers.schedule_policy import AddReqResult

    swap, page, tree = ext.swap, adder.page_size, adder.tree_cache
    whole = len(swapped.keys)
    here = min(req.prefix_len // page, whole)
    there = swap.stack.here(swapped.keys[here:])
    lacks_tail = swapped.tokens % page and swapped.tail is None
    if here + there < whole or lacks_tail:
        if not lacks_tail and swap.stack.stores_under_way:
            return AddReqResult.CONTINUE  # it is about to be known
        swap.counts.recomputed += 1
        swap.counts.recomputed_tokens += swapped.tokens - (here + there) * page
        swap.drop(req.rid)
        return None
    pool = tree.req_to_token_pool
    rows = pool.available_size() - len(ext.resuming) - len(adder.can_run_list)
    if rows <= 0:
        return AddReqResult.OTHER
    needed = -(-swapped.tokens // page) * page - here * page
    growing = adder._get_running_request_total_token_offset(req) + page
    with adder._lock_node(req.last_node):
        room = adder.rem_total_tokens
    if needed + growing > room:
        return AddReqResult.NO_TOKEN
    tree.linker.hit_markers.pop(req.rid, None)
    req.prefix_len = req.kv.cache_protected_len = here * page
    req.lock = tree.lock(req.last_node)
    req.extend_end = swapped.tokens
    adder.memory_budget.total_offset += needed + growing
    ext.resuming.append(req)
    return AddReqResult.CONTINUE


def makes_room(adder: Any, req: Any) -> bool:
    """Whether others have given way to a request that there was no memory for; SGLang preempts only
    where there are too many requests."""
    if (ext := runtime.current) is None or ext.swap is None:
        return False
    from sglang.srt.runtime_context import get_schedule

    schedule = get_schedule()
    if not schedule.enable_priority_scheduling:
        return False
    return not schedule.disable_priority_preemption and adder.preempt_to_schedule(req)


def _resume(original: Callable[..., Any], scheduler: Any, running: Any) -> Any:
    """Requests that were taken back in this step join the batch that decodes."""
    ext = runtime.current
    if ext is None or ext.swap is None:
        return original(scheduler, running)
    ext.swap.advance()
    if ext.priorities is not None:
        chunked = () if scheduler.chunked_req is None else (scheduler.chunked_req,)
        ext.priorities.step(scheduler.waiting_queue, (*running.reqs, *chunked))
    plan = original(scheduler, running)
    if ext.resuming:
        reqs, ext.resuming = ext.resuming, []
        for batch in _batches(scheduler, reqs):
            if plan.running_batch.is_empty():
                plan.running_batch = batch
            else:
                plan.running_batch.merge_batch(batch)
        gone = set(reqs)
        scheduler.waiting_queue = [req for req in scheduler.waiting_queue if req not in gone]
    return plan


def _batches(scheduler: Any, reqs: Sequence[Any]) -> Iterator[Any]:
    """One of the requests that depend on nothing before their last token, one of each other."""
    simple = [req for req in reqs if not penalties.counts(req)]
    if simple:
        yield _batch(scheduler, simple)
    for req in reqs:
        if penalties.counts(req):
            batch = _batch(scheduler, [req])
            penalties.recall(batch)
            yield batch


def _batch(scheduler: Any, reqs: Sequence[Any]) -> Any:
    """``reqs`` as they are after a prefill: their KV in place, their last token about to be fed."""
    import torch
    from sglang.srt.managers.overlap_utils import RelayPayload
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    batch = ScheduleBatch.init_new(
        list(reqs),
        scheduler.req_to_token_pool,
        scheduler.token_to_kv_pool_allocator,
        scheduler.tree_cache,
        scheduler.model_config,
        scheduler.enable_overlap,
        scheduler.spec_algorithm,
    )
    batch.prepare_for_extend()
    _fill(scheduler, reqs)
    last = torch.tensor([(req.output_ids or req.origin_input_ids)[-1] for req in reqs])
    payload = RelayPayload(bonus_tokens=last.to(scheduler.device))
    scheduler.future_map.stash(batch.req_pool_indices, payload)
    batch.input_ids = batch.prefill_input_ids_cpu = None
    return batch


def _fill(scheduler: Any, reqs: Sequence[Any]) -> None:
    from sglang.srt.observability.req_time_stats import set_time_batch

    ext = runtime.current
    if ext is None or ext.swap is None:
        return
    set_time_batch(reqs, "set_forward_entry_time")
    page, table = scheduler.page_size, scheduler.req_to_token_pool.req_to_token
    tickets = []
    for req in reqs:
        if (swapped := ext.swap.get(req.rid)) is None:
            raise RuntimeError(f"{req.rid} came back without having been swapped")
        slots = table[req.kv.req_pool_idx, req.prefix_len : swapped.tokens : page]
        blocks = np.ascontiguousarray(slots.long().numpy() // page)
        tickets += ext.swap.load(swapped, req.prefix_len // page, blocks)
        _tell(req, swapped.tokens - req.prefix_len)
    for ticket in tickets:
        ticket.wait(_DEADLINE_S)
    for req in reqs:
        ext.swap.drop(req.rid)
        ext.swap.counts.swapped_in += 1


def _tell(req: Any, loaded: int) -> None:
    entry: dict[str, Any]
    if not (before := told(req, "swap")):
        entry = {"power": "swap", "exact": True, "times": 1, "loaded": loaded}
        tell(req, entry)
        return
    (entry,) = before  # type: ignore[assignment]
    entry["times"] += 1
    entry["loaded"] += loaded


def _keep_place(original: Callable[..., Any], scheduler: Any, req: Any, **kw: Any) -> Any:
    """Who gives way waits where it did when it came."""
    ext = runtime.current
    if ext is None or ext.swap is None or not req.retraction_count:
        return original(scheduler, req, **kw)
    arrived = req.time_stats.wait_queue_entry_time
    result = original(scheduler, req, **kw)
    queue = scheduler.waiting_queue
    if queue and queue[-1] is req:
        stats = req.time_stats
        # SGLang orders by this time, and adds what follows on it to the time in the queue.
        stats.queue_duration_s -= stats.wait_queue_entry_time - arrived
        stats.wait_queue_entry_time = arrived
        queue.pop()
        later = (at for at, one in enumerate(queue) if _arrival(one) > arrived)
        queue.insert(next(later, len(queue)), req)
    return result


def _arrival(req: Any) -> float:
    arrived: float = req.time_stats.wait_queue_entry_time
    return arrived


HOOKS = (
    *penalties.HOOKS,
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
        "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill",
        "around",
        _resume,
        "a request that comes back is computed again; only a decode server of a disaggregated pair "
        "takes KV from elsewhere",
    ),
)
