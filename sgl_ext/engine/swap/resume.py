"""How requests that were swapped out come back: into new slots, and into the batch that decodes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from sgl_ext.engine.core import runtime
from sgl_ext.engine.core.meta_info import tell, told
from sgl_ext.engine.kv import ownership
from sgl_ext.engine.step import beams
from sgl_ext.engine.swap import penalties
from sgl_ext.engine.swap.ahead import SwapAhead
from sgl_ext.memory.tickets import (
    COPY_DEADLINE_S,
    Ticket,
    TransferCancelledError,
    TransferError,
)
from sgl_ext.swap.manager import SwapManager, Swapped
from sgl_ext.tiers.arena import Pages

logger = logging.getLogger(__name__)

_EXPECTING = "_sgl_ext_expecting"
"""Attribute of an adder that knows of swap-ins under way."""


class Found(NamedTuple):
    """Where the KV of a request is that waits."""

    tokens: int
    """Whole pages that the radix tree has on the device, in tokens."""
    node: Any
    """Node of the tree that they end with."""
    readable: bool | None
    """Whether host memory has the rest of what was swapped out; None if some is still on its way,
    False if some is lost."""


def take_back(adder: Any, req: Any) -> Any:
    """Takes a request back, if there is room for it.

    Returns:
        SGLang's ``AddReqResult``; None if it was not swapped, or if host memory has lost something
        of it and it has to be computed again as SGLang does.
    """
    ext = runtime.current
    if ext is None or ext.swap is None or (swapped := ext.swap.get(req.rid)) is None:
        return None
    with ext.swap.clock.on():
        return _take_back(adder, req, ext, ext.swap, swapped)


def _take_back(
    adder: Any, req: Any, ext: runtime.ExtRuntime, swap: SwapManager, swapped: Swapped
) -> Any:
    from sglang.srt.managers.schedule_policy import AddReqResult

    page, tree = adder.page_size, adder.tree_cache
    found = look_up(tree, req)
    if found.readable is None:
        return AddReqResult.CONTINUE
    if not found.readable:
        lost(swap, req.rid, req)
        return AddReqResult.CONTINUE if ext.links and not ext.links.ready(req) else None
    if not has_seat(adder, req):
        return AddReqResult.OTHER
    needed = tokens_needed(adder, req, found.tokens)
    with adder._lock_node(found.node):
        fits = needed < adder.rem_total_tokens
    if not fits:
        return AddReqResult.NO_TOKEN
    tree.linker.hit_markers.pop(req.rid, None)
    here = found.tokens // page
    missing = swapped.keys[here:]
    if missing and ext.ahead is not None and _goes_ahead(ext.ahead, adder, len(missing)):
        growth = needed - len(missing) * page  # its slots are taken at once
        if not ext.ahead.begin(tree, req, found.node, found.tokens, missing, growth):
            return AddReqResult.NO_TOKEN
        adder.memory_budget.total_offset += growth
        return AddReqResult.CONTINUE
    adder.memory_budget.total_offset += needed
    swap.hold(swapped, here)
    _adopt(tree, req, found)
    req.extend_end = swapped.tokens
    ext.resuming.append(req)
    return AddReqResult.CONTINUE


def look_up(tree: Any, req: Any) -> Found:
    """Looks for the KV of a request. Changes neither the request nor its hit marker."""
    ext, tokens, node = runtime.current, req.prefix_len, req.last_node
    if ext is None or ext.swap is None or (swapped := ext.swap.get(req.rid)) is None:
        return Found(tokens, node, True)
    if ext.ahead is not None and req.rid in ext.ahead:
        return Found(tokens, node, None)
    if req.return_logprob:
        # SGLang's own look-up ends with the prompt, so that it computes the logprobs behind it.
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(
            req.origin_input_ids + req.output_ids,
            req.extra_key,
            limit=swapped.tokens,
            cache_salt=req.cache_salt,
        )
        match = tree.match_prefix(MatchPrefixParams(key=key))
        tokens, node = match.device_prefix_len, match.last_device_node
    return Found(tokens, node, ext.swap.readable(swapped, tokens // tree.page_size))


def lost(swap: SwapManager, rid: str, req: Any) -> None:
    """A swapped request, which waits as ``req``, if at all, has to be computed again."""
    swap.counts.recomputed += 1
    swap.drop(rid)
    ext = runtime.current
    if ext is not None and ext.links is not None and req is not None:
        ext.links.ask(req)  # its KV held its chunks until now


def _adopt(tree: Any, req: Any, found: Found) -> None:
    """Makes what the tree has on the device the request's prefix: length, node, the part that the
    tree owns and the lock on it change together, or two owners free the same blocks."""
    req.prefix_len = req.kv.cache_protected_len = found.tokens
    req.last_node = found.node
    req.lock = tree.lock(found.node)


def has_seat(adder: Any, req: Any) -> bool:
    """Whether the request can still be admitted in this step, as far as rows and
    ``--max-running-requests`` go.

    SGLang counts neither those that come back nor, in the step of their admission, the rows that
    the members of a beam group will take after its prefill. It asserts that there are some.
    """
    ext = runtime.current
    back = 0 if ext is None else len(ext.resuming)
    if ext is not None and ext.ahead is not None:
        back += len(ext.ahead)
    running, new = adder.running_batch.reqs, adder.can_run_list
    rowless = sum(not one.kv.holds_kv for one in new)
    # Groups in the running batch have their rows since their prefill was launched.
    promised = sum(beams.promised_rows(one) for one in (*new, req))
    free = adder.tree_cache.req_to_token_pool.available_size() - back - rowless - promised
    most = adder.max_running_requests
    return free > 0 and (most is None or len(running) + len(new) + back < most)


def expect(adder: Any) -> None:
    """Has SGLang keep room for those whose KV is on its way; once in a step, at its first
    request."""
    ext = runtime.current
    if ext is None or ext.ahead is None or getattr(adder, _EXPECTING, False):
        return
    setattr(adder, _EXPECTING, True)
    adder.memory_budget.total_offset += ext.ahead.growth


def tokens_needed(adder: Any, req: Any, cached: int) -> int:
    """Tokens that SGLang wants to have free before it admits a request with ``cached`` ones."""
    uncached = len(req.full_untruncated_fill_ids) - cached
    return int(uncached + reserved(req) + adder.per_req_token_overhead)


def reserved(req: Any) -> int:
    """Tokens that SGLang keeps for the rest of a request's answer when it admits it."""
    from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

    left = max((req.sampling_params.max_new_tokens or 0) - len(req.output_ids), 0)
    return min(left, int(CLIP_MAX_NEW_TOKENS))


def lacking(adder: Any, req: Any, cached: int) -> float:
    """Tokens that SGLang lacks to admit a request with ``cached`` ones."""
    return float(tokens_needed(adder, req, cached) - adder.rem_total_tokens)


def pending() -> bool:
    """Whether a request's KV is on its way."""
    ext = runtime.current
    return ext is not None and ext.ahead is not None and len(ext.ahead) > 0


def _goes_ahead(ahead: SwapAhead, adder: Any, pages: int) -> bool:
    """Whether others decode while so many pages come."""
    ext = runtime.current
    if ext is None or ext.config.swap is None or ext.tiers is None:
        return False
    if (how := ext.config.swap.swap_in) != "auto":
        return how == "overlap"
    running = len(adder.running_batch.reqs) + len(ext.resuming)
    return not ahead.adaptive.waits(pages * ext.tiers.layout.block_bytes, running)


def back(scheduler: Any) -> list[Any]:
    """Those that were taken back in this step and for which there is memory; the others wait on.

    The budget that they were taken back by is an estimate, and others have been given memory since.
    """
    from sglang.srt.mem_cache.common import evict_from_tree_cache

    ext = runtime.current
    if ext is None or ext.swap is None:
        return []
    reqs, ext.resuming = ext.resuming, []
    page, tree = scheduler.page_size, scheduler.tree_cache
    sizes = [-(-req.extend_end // page) * page - req.prefix_len for req in reqs]
    evict_from_tree_cache(tree, sum(sizes))
    while sum(sizes) > scheduler.token_to_kv_pool_allocator.available_size():
        req = reqs.pop()
        sizes.pop()
        tree.unlock(req.lock)
        req.lock = None
        ext.swap.let_go(ext.swap.get(req.rid))
    return reqs


def batches(scheduler: Any, reqs: Sequence[Any]) -> Iterator[Any]:
    """One of the requests that depend on nothing before their last token, one of each other."""
    simple = [req for req in reqs if not penalties.alone(req)]
    if simple:
        yield from _batch(scheduler, simple)
    for req in reqs:
        if penalties.alone(req):
            yield from _batch(scheduler, [req])


def _batch(scheduler: Any, reqs: Sequence[Any]) -> Iterator[Any]:
    """``reqs`` as they are after a prefill: their KV in place, their last token about to be fed.

    Nothing if the KV of none of them could be brought back.
    """
    import torch
    from sglang.srt.managers.overlap_utils import RelayPayload
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    ext = runtime.current
    if ext is None or ext.swap is None:
        return
    with ext.swap.clock.off():  # SGLang does this for all that it admits
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
    if failed := _fill(scheduler, reqs, ext.swap):
        reqs = [req for req in reqs if req not in failed]
        batch.filter_batch(keep_indices=[batch.reqs.index(req) for req in reqs])
        if not reqs:
            return
    last = torch.tensor([(req.output_ids or req.origin_input_ids)[-1] for req in reqs])
    payload = RelayPayload(bonus_tokens=last.to(scheduler.device))
    scheduler.future_map.stash(batch.req_pool_indices, payload)
    batch.input_ids = batch.prefill_input_ids_cpu = None
    yield batch


def _fill(scheduler: Any, reqs: Sequence[Any], swap: SwapManager) -> list[Any]:
    """Copies the KV of all of them into their slots; those that it failed for, which have none
    any more."""
    from sglang.srt.observability.req_time_stats import set_time_batch

    set_time_batch(reqs, "set_forward_entry_time")
    page, table = scheduler.page_size, scheduler.req_to_token_pool.req_to_token
    loads: list[tuple[Any, Swapped, Pages, list[Ticket]]] = []
    for req in reqs:
        if (swapped := swap.get(req.rid)) is None:
            raise RuntimeError(f"{req.rid} came back without having been swapped")
        ownership.check_resumed(req)
        slots = table[req.kv.req_pool_idx, req.prefix_len : swapped.tokens : page]
        blocks = np.ascontiguousarray(slots.long().numpy() // page)
        loads.append((req, swapped, blocks, swap.load(swapped, blocks)))
    began = time.perf_counter()
    failed = []
    with swap.clock.off():
        for req, _, blocks, tickets in loads:
            if not _landed(tickets, began + COPY_DEADLINE_S):
                failed.append(req)
                # Who is given these blocks next waits until nothing writes into them any more.
                for ticket in tickets:
                    swap.stack.in_flight.begin(blocks, ticket)
    swap.counts.loading_seconds += time.perf_counter() - began
    done = [ticket for req, *_, tickets in loads if req not in failed for ticket in tickets]
    ext = runtime.current
    if done and ext is not None and ext.ahead is not None:
        size = sum(ticket.bytes_total for ticket in done)
        ext.ahead.adaptive.swapped(size, max(ticket.seconds for ticket in done))
    for req, swapped, *_ in loads:
        if req in failed:
            _release(scheduler, req)
            lost(swap, req.rid, req)
        else:
            _tell(req, swapped.tokens - req.prefix_len)
            swap.counts.swapped_in += 1
            swap.drop(req.rid)
    return failed


def _landed(tickets: Sequence[Ticket], deadline: float) -> bool:
    try:
        for ticket in tickets:
            ticket.wait(max(deadline - time.perf_counter(), 0.0))
    except (TimeoutError, TransferError, TransferCancelledError) as error:
        logger.error("a request's KV could not be brought back, it is computed again: %s", error)
        return False
    return True


def _release(scheduler: Any, req: Any) -> None:
    """Gives back slots that hold no KV; the request waits as it did."""
    from sglang.srt.managers import schedule_batch

    schedule_batch.release_kv_cache(req, scheduler.tree_cache, checkpoint=False)
    req.reset_for_retract()


def _tell(req: Any, loaded: int) -> None:
    entry: dict[str, Any]
    if not (before := told(req, "swap")):
        entry = {"power": "swap", "exact": True, "times": 1, "loaded": loaded}
        tell(req, entry)
        return
    (entry,) = before  # type: ignore[assignment]
    entry["times"] += 1
    entry["loaded"] += loaded
