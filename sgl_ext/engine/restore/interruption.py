"""A prompt that is being restored gives way, between two parts, to one that comes first by now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_ext.engine.core import hooks, runtime


def _plan(original: Callable[..., Any], scheduler: Any, running: Any) -> Any:
    interrupted = _interrupted(scheduler, running)
    if interrupted is not None:
        running.batch_is_full = False
    result = original(scheduler, running)
    if interrupted is not None:
        # Not sooner: the result of its last part may still come, and is ignored while it is out.
        scheduler._add_request_to_queue(interrupted, is_retracted=True)
        interrupted.retraction_count -= 1  # it keeps what it has
    return result


def _interrupted(scheduler: Any, running: Any) -> Any | None:
    """SGLang's request whose prompt was being computed, if it gives way.

    What was computed of it stays in the radix tree.
    """
    from sglang.srt.mem_cache.common import release_kv_cache

    ext, req = runtime.current, scheduler.chunked_req
    if ext is None or ext.restorer is None or req is None or not ext.restorer.computes(req.rid):
        return None
    if not _keeps(req) or (rid := ext.restorer.preferred()) is None:
        return None
    first = next((one for one in scheduler.waiting_queue if one.rid == rid), None)
    if first is None or not _room(scheduler, running, req, first):
        return None
    ext.restorer.interrupt()
    scheduler.chunked_req, ext.interrupted = None, req.rid
    try:
        release_kv_cache(req, scheduler.tree_cache, checkpoint=False)
    finally:
        ext.interrupted = None
    req.reset_for_retract()
    return req


def _keeps(req: Any) -> bool:
    """Whether what was computed of a prompt is found again."""
    logprobs = req.return_logprob and 0 <= req.logprob_start_len < req.prefix_len
    return not logprobs and not req.skip_radix_cache_insert


def _room(scheduler: Any, running: Any, going: Any, coming: Any) -> bool:
    """Whether SGLang would have memory for a request in place of another one, beside those that
    run."""
    from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

    def answer(req: Any) -> int:
        left = req.sampling_params.max_new_tokens - len(req.output_ids)
        return min(left, CLIP_MAX_NEW_TOKENS)

    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    room = allocator.available_size() + tree.evictable_size() + going.kv.kv_allocated_len
    ratio = scheduler.new_token_ratio_tracker.current
    room -= ratio * sum(map(answer, running.reqs))
    needed = len(coming.origin_input_ids) + answer(coming)
    return bool(needed + (1 + len(running.reqs)) * allocator.page_size <= room)


HOOKS = (
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill",
        "around",
        _plan,
        "SGLang computes a prompt that it has begun to its end",
    ),
)
