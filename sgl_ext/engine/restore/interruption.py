"""Interruption of a prompt that is being restored, between two parts, by a preferred request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sgl_ext.engine.core.requests import reserved, streams
from sgl_ext.engine.core.sglang_types import Req, ScheduleBatch, Scheduler

if TYPE_CHECKING:
    from sgl_ext.engine.restore.power import RestorePower


def interrupt(power: RestorePower, scheduler: Scheduler, running: ScheduleBatch) -> Req | None:
    """Releases the request whose prompt is being computed, if a preferred one fits in its place.

    Also releases it if running requests have no memory for their next tokens, or the only one that
    is left has none: SGLang would abort the last one that it cannot retract. The KV that was
    computed stays in the radix tree.

    Returns:
        SGLang's request, to be queued again when the step has been planned; None if no prompt is
        interrupted.
    """
    from sglang.srt.mem_cache.common import release_kv_cache

    req = scheduler.chunked_req
    if req is None or streams(req) or not _keeps(req) or power.bound(req):
        return None
    restores = power.planner.computes(req.rid)
    if not (_starves(scheduler, running) and (restores or len(running.reqs) == 1)):
        if not restores or (rid := power.planner.preferred()) is None:
            return None
        first = next((one for one in scheduler.waiting_queue if one.rid == rid), None)
        if first is None or not _room(scheduler, running, req, first):
            return None
    if restores:
        power.planner.interrupt()
    scheduler.chunked_req, power.interrupted = None, req.rid
    try:
        release_kv_cache(req, scheduler.tree_cache, checkpoint=False)
    finally:
        power.interrupted = None
    req.reset_for_retract()
    return req


def _starves(scheduler: Scheduler, running: ScheduleBatch) -> bool:
    """Returns whether the running requests may lack memory for a decode step."""
    return _free(scheduler) < len(running.reqs) * scheduler.page_size


def _free(scheduler: Scheduler) -> int:
    """Returns the number of tokens that are free, or cached and not in use."""
    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    return int(allocator.available_size() + tree.evictable_size())


def _keeps(req: Req) -> bool:
    """Returns whether a released request keeps what was computed of its prompt.

    It does not if logprobs of the prompt were computed, or if its KV is kept out of the radix tree.
    """
    logprobs = req.return_logprob and 0 <= req.logprob_start_len < req.prefix_len
    return not logprobs and not req.skip_radix_cache_insert


def _room(scheduler: Scheduler, running: ScheduleBatch, going: Req, coming: Req) -> bool:
    """Returns whether SGLang would have memory for a request in place of another one.

    Args:
        running: the batch that decodes, whose requests keep their memory.
        going: request that is released.
        coming: request that is admitted.
    """
    room = _free(scheduler) + going.kv.kv_allocated_len
    ratio = scheduler.new_token_ratio_tracker.current
    room -= ratio * sum(map(reserved, running.reqs))
    needed = len(coming.origin_input_ids) + reserved(coming)
    return bool(needed + (1 + len(running.reqs)) * scheduler.page_size <= room)
