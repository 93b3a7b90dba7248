"""Resuming of swapped requests: loads KV into new slots, joins them to the batch that decodes."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sgl_ext.engine.core import deferral
from sgl_ext.engine.core.meta_info import tell, unsent
from sgl_ext.engine.core.requests import reserved
from sgl_ext.engine.core.sglang_types import (
    Node,
    PrefillAdder,
    RadixTree,
    Req,
    ScheduleBatch,
    Scheduler,
)
from sgl_ext.engine.kv import ownership
from sgl_ext.engine.kv.indices import on_host, upload
from sgl_ext.engine.step.admission import has_row, planned
from sgl_ext.engine.swap import spans
from sgl_ext.engine.workarounds import penalties
from sgl_ext.memory.streams import Streams
from sgl_ext.memory.tickets import (
    COPY_DEADLINE_S,
    Ticket,
    TransferCancelledError,
    TransferError,
)
from sgl_ext.planning import choices
from sgl_ext.swap.manager import Swapped
from sgl_ext.tiers.arena import Pages

if TYPE_CHECKING:
    from sgl_ext.engine.swap.power import SwapPower

logger = logging.getLogger(__name__)


class Found(NamedTuple):
    """Result of a look-up of a waiting request's KV."""

    tokens: int
    """Tokens in whole pages that the radix tree has on the device."""
    node: Node
    """Node of the tree that these tokens end with."""
    readable: bool | None
    """True if host memory has the rest of the swapped KV, or nothing was swapped; None if some is
    being copied; False if some is lost."""


def try_resume(power: SwapPower, adder: PrefillAdder, req: Req, swapped: Swapped) -> object | None:
    """Resumes a swapped request if there is room for it.

    Returns:
        SGLang's ``AddReqResult``; None if some of its KV is lost, or recomputing it is expected to
        be faster, so that SGLang must admit the request for recomputation.
    """
    from sglang.srt.managers.schedule_policy import AddReqResult

    page, tree = adder.page_size, adder.tree_cache
    found = look_up(power, tree, req)
    if found.readable is None:
        return AddReqResult.CONTINUE
    if not found.readable:
        power.lost(req.rid, req)
        # Powers that left the request to this one may have to load KV for it now.
        return None if planned(power.ext, adder, req, False) else AddReqResult.CONTINUE
    if not has_row(power.ext, adder, req):
        return AddReqResult.OTHER
    needed = tokens_needed(adder, req, found.tokens)
    with adder._lock_node(found.node):
        fits = needed < adder.rem_total_tokens
    if not fits:
        return AddReqResult.NO_TOKEN
    tree.linker.hit_markers.pop(req.rid, None)
    here = found.tokens // page
    missing = swapped.keys[here:]
    # All of these wait for KV that is loaded before the forward.
    running = len(adder.running_batch.reqs) + len(adder.can_run_list) + len(power.resuming)
    if choices.recomputes(
        power.ext.costs, found.tokens, swapped.tokens, running, power.section.swap_in, req.rid
    ):
        power.lost(req.rid, req)
        req.host_hit_length = 0  # or SGLang would load what host memory still has
        return None if planned(power.ext, adder, req, False) else AddReqResult.CONTINUE
    if missing and _goes_ahead(power, len(missing) * page, running, req.rid):
        growth = needed - len(missing) * page  # the slots of the pages are taken at once
        if not power.ahead.begin(tree, req, found.node, found.tokens, missing, growth):
            return AddReqResult.NO_TOKEN
        adder.memory_budget.total_offset += growth
        return AddReqResult.CONTINUE
    adder.memory_budget.total_offset += needed
    power.manager.hold(swapped, here)
    _adopt(tree, req, found)
    req.extend_end = swapped.tokens
    power.resuming.append(req)
    return AddReqResult.CONTINUE


def look_up(power: SwapPower, tree: RadixTree, req: Req) -> Found:
    """Looks up the KV of a waiting request; changes neither the request nor its hit marker."""
    tokens, node = req.prefix_len, req.last_node
    if (swapped := power.manager.get(req.rid)) is None:
        return Found(tokens, node, True)
    if req.rid in power.ahead:
        return Found(tokens, node, None)
    if req.return_logprob:
        # SGLang's own look-up ends with the prompt, because logprobs of later tokens would be
        # recomputed.
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
    return Found(tokens, node, power.manager.readable(swapped, tokens // tree.page_size))


def _adopt(tree: RadixTree, req: Req, found: Found) -> None:
    """Makes the KV that the tree has on the device the request's prefix.

    The length, the node, the length that the tree owns and the lock change together, because
    otherwise two owners would free the same blocks.
    """
    req.prefix_len = req.kv.cache_protected_len = found.tokens
    req.last_node = found.node
    req.lock = tree.lock(found.node)


def tokens_needed(adder: PrefillAdder, req: Req, cached: int) -> int:
    """Returns the free tokens that SGLang needs to admit a request with ``cached`` tokens."""
    uncached = len(req.full_untruncated_fill_ids) - cached
    return int(uncached + reserved(req) + adder.per_req_token_overhead)


def lacking(adder: PrefillAdder, req: Req, cached: int) -> float:
    """Returns the tokens that are missing to admit a request; below 0 if the request fits.

    Args:
        cached: tokens of the request that are on the device.
    """
    return float(tokens_needed(adder, req, cached) - adder.rem_total_tokens)


def _goes_ahead(power: SwapPower, tokens: int, running: int, rid: str) -> bool:
    """Returns whether other requests decode while ``tokens`` tokens are loaded."""
    if (how := power.section.swap_in) != "auto":
        return how == "overlap"
    return not choices.waits_for_swap_in(power.ext.costs, tokens, running, rid)


def fitting(power: SwapPower, scheduler: Scheduler) -> list[Req]:
    """Takes the requests of :attr:`SwapPower.resuming` and returns those that memory suffices for.

    The others stay in the queue. The budget by which they were resumed is an estimate, and other
    requests have been given memory since.
    """
    from sglang.srt.mem_cache.common import evict_from_tree_cache

    reqs, power.resuming = power.resuming, []
    page, tree = scheduler.page_size, scheduler.tree_cache
    sizes = [-(-req.extend_end // page) * page - req.prefix_len for req in reqs]
    evict_from_tree_cache(tree, sum(sizes))
    while sum(sizes) > scheduler.token_to_kv_pool_allocator.available_size():
        req = reqs.pop()
        sizes.pop()
        tree.unlock(req.lock)
        req.lock = None
        power.manager.let_go(power.manager.get(req.rid))
    return reqs


def batches(power: SwapPower, scheduler: Scheduler, reqs: Sequence[Req]) -> Iterator[ScheduleBatch]:
    """Yields the requests in SGLang's ``ScheduleBatch`` objects.

    Requests whose penalties depend on earlier tokens get a batch each; all others share one.
    """
    simple = [req for req in reqs if not penalties.alone(req)]
    if simple:
        yield from _batch(power, scheduler, simple)
    for req in reqs:
        if penalties.alone(req):
            yield from _batch(power, scheduler, [req])


def _batch(power: SwapPower, scheduler: Scheduler, reqs: Sequence[Req]) -> Iterator[ScheduleBatch]:
    """Yields a batch in the state after a prefill: KV is in place, the last tokens are fed next.

    Leaves out requests whose load has failed; yields nothing if all loads have.
    """
    import torch
    from sglang.srt.managers.overlap_utils import RelayPayload
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    with power.manager.clock.off():  # SGLang does this for every admitted request
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
    if failed := _fill(power, scheduler, reqs):
        reqs = [req for req in reqs if req not in failed]
        batch.filter_batch(keep_indices=[batch.reqs.index(req) for req in reqs])
        if not reqs:
            return
    last = torch.tensor([(req.output_ids or req.origin_input_ids)[-1] for req in reqs])
    payload = RelayPayload(bonus_tokens=upload(last, scheduler.device))
    # A forward in flight stores the next token of a request that had the same row before.
    power.manager.stack.streams.follow()
    scheduler.future_map.stash(batch.req_pool_indices, payload)
    batch.input_ids = batch.prefill_input_ids_cpu = None
    yield batch


def _fill(power: SwapPower, scheduler: Scheduler, reqs: Sequence[Req]) -> list[Req]:
    """Loads the KV of all requests into their slots, before the next forward.

    Returns:
        The requests whose load has failed; their slots are released.

    Raises:
        RuntimeError: a request was not swapped.
    """
    from sglang.srt.observability.req_time_stats import set_time_batch

    set_time_batch(reqs, "set_forward_entry_time")
    swap = power.manager
    page, table = scheduler.page_size, scheduler.req_to_token_pool.req_to_token
    loads: list[tuple[Req, Swapped, Pages, list[Ticket]]] = []
    for req in reqs:
        if (swapped := swap.get(req.rid)) is None:
            raise RuntimeError(f"{req.rid} is resumed, but was not swapped out")
        ownership.check_resumed(req)
        slots = table[req.kv.req_pool_idx, req.prefix_len : swapped.tokens : page]
        blocks = on_host(slots) // page
        loads.append((req, swapped, blocks, swap.load(swapped, blocks)))
    began = time.perf_counter()
    failed = []
    with swap.clock.off():
        for req, _, blocks, tickets in loads:
            if not _landing(tickets, swap.stack.streams, began + COPY_DEADLINE_S):
                failed.append(req)
                # The next owner of these blocks waits until no copy writes to them.
                for ticket in tickets:
                    swap.stack.in_flight.begin(blocks, ticket)
    swap.counts.loading_seconds += time.perf_counter() - began
    for req, swapped, _, tickets in loads:
        if req in failed:
            _release(scheduler, req)
            power.lost(req.rid, req)
        else:
            seconds = max((ticket.seconds for ticket in tickets), default=0.0)
            choices.swapped_in(power.ext.costs, req.rid, seconds)
            _tell(req, swapped.tokens - req.prefix_len)
            spans.swapped_in(req, seconds, swapped.tokens - req.prefix_len)
            spans.away(req, resumed=True)
            deferral.ended(req)
            swap.counts.swapped_in += 1
            swap.drop(req.rid)
            # It may have waited for lower tiers, which keep its pages until it is admitted.
            scheduler.tree_cache.linker.cache_linker.prefixes.forget(req.rid)
    return failed


def _landing(tickets: Sequence[Ticket], streams: Streams, deadline: float) -> bool:
    """Makes the device's next work wait for copies; returns False if one has failed."""
    try:
        for ticket in tickets:
            ticket.fence(streams.current(), max(deadline - time.perf_counter(), 0.0))
    except (TimeoutError, TransferError, TransferCancelledError) as error:
        logger.error(
            "the KV of a swapped-out request could not be loaded and is recomputed: %s", error
        )
        return False
    return True


def _release(scheduler: Scheduler, req: Req) -> None:
    """Releases the slots of a request, which hold no KV; the request still waits."""
    from sglang.srt.managers import schedule_batch

    schedule_batch.release_kv_cache(req, scheduler.tree_cache, checkpoint=False)
    req.reset_for_retract()


def _tell(req: Req, loaded: int) -> None:
    entry: dict[str, Any]
    if not (before := unsent(req, "swap")):
        entry = {"power": "swap", "exact": True, "times": 1, "loaded": loaded}
        tell(req, entry)
        return
    (entry,) = before  # type: ignore[assignment]
    entry["times"] += 1
    entry["loaded"] += loaded
