"""Operations of SGLang's scheduler on single requests: reserve, retract, release, refuse."""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus

from sgl_ext.engine.core.releases import send_abort
from sgl_ext.engine.core.sglang_types import Req, ScheduleBatch, Scheduler


def reserved(req: Req) -> int:
    """Returns the number of tokens that SGLang reserves for the rest of a request's answer.

    SGLang reserves them when it admits the request.
    """
    from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

    left = max((req.sampling_params.max_new_tokens or 0) - len(req.output_ids), 0)
    return min(left, int(CLIP_MAX_NEW_TOKENS))


def arrival(req: Req) -> float:
    """Returns the time at which a request was put into the waiting queue, on SGLang's clock."""
    arrived: float = req.time_stats.wait_queue_entry_time
    return arrived


def present(scheduler: Scheduler, running: ScheduleBatch) -> Iterator[Req]:
    """Yields the requests of a scheduler that wait, run or are being prefilled, some twice.

    Args:
        running: the batch that decodes.
    """
    yield from scheduler.waiting_queue
    yield from scheduler.collect_inflight_reqs()
    yield from scheduler.grammar_manager.grammar_queue
    yield from running.reqs
    if scheduler.chunked_req is not None:
        yield scheduler.chunked_req


def tokens_of(req: Req) -> int:
    """Returns the number of tokens of a request's prompt and of its answer so far.

    SGLang has them in ``full_untruncated_fill_ids`` only from when it tries to admit the request.
    """
    return len(req.origin_input_ids) + len(req.output_ids)


def reusable(req: Req) -> int:
    """Returns how many of a request's first tokens SGLang may take from a cache.

    Its cache-aware schedule policies (``--schedule-policy lpm``) look up all tokens nevertheless.
    """
    if req.positional_embed_overrides is not None:
        return 0
    return req._compute_max_prefix_len(tokens_of(req))


ONCE = "ext:once:"
"""Beginning of SGLang's ``extra_key`` of requests after which nobody looks their KV up."""


def streams(req: Req) -> bool:
    """Returns whether a request is a turn of a streaming session.

    When SGLang releases it, its KV stays with the session, which takes the turn for finished.
    """
    return bool(getattr(req.session, "streaming", False))


def retractable(req: Req) -> bool:
    """Returns whether a running request can be retracted.

    A beam group cannot: SGLang's release of its leader leaves the rows of its members allocated.
    """
    return not req.finished() and req.beam_group is None and not streams(req)


def release(scheduler: Scheduler, req: Req, *, offload_kv: bool = True) -> None:
    """Frees the row and the slots of a request outside of a batch.

    Args:
        offload_kv: see SGLang's ``release_req``; False if the request's KV must be computed again.
    """
    from sglang.srt.managers import schedule_batch

    schedule_batch.release_req(
        req=req,
        remaing_req_count=0,
        req_to_token_pool=scheduler.req_to_token_pool,
        token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
        tree_cache=scheduler.tree_cache,
        hisparse_coordinator=None,
        offload_kv=offload_kv,
    )


def refuse_waiting(scheduler: Scheduler, req: Req, message: str) -> None:
    """Removes a request from the waiting queue and answers it with 503 and ``message``."""
    from sglang.srt.managers.io_struct import AbortReq

    scheduler.waiting_queue.remove(req)
    scheduler._release_aborted_request(req)
    scheduler.beam_coordinator.retire_group(req)
    reason = {
        "type": "abort",
        "status_code": HTTPStatus.SERVICE_UNAVAILABLE,
        "message": message,
    }
    send_abort(scheduler, AbortReq(rid=req.rid, abort_message=message, finished_reason=reason), req)


def precedence(req: Req) -> int:
    """Returns the precedence of a request over policies: a smaller one goes first.

    It follows from SGLang's priority if SGLang schedules by priority, else it is 0.
    """
    from sglang.srt.runtime_context import get_schedule

    schedule = get_schedule()
    if not schedule.enable_priority_scheduling or req.priority is None:
        return 0
    priority: int = req.priority
    return priority if schedule.schedule_low_priority_values_first else -priority
