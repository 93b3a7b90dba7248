"""Ids of requests (``rid``), which clients may choose.

SGLang's scheduler aborts every request whose id begins with the one that is to be aborted, so that
a client that sends the id ``a`` and disconnects would end others' requests. SGLang's front end only
aborts ids that it knows: it numbers the prompts of a batch, and each of them is aborted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.hooks import Original
from sgl_ext.engine.core.sglang_types import GenerateReqInput, Req, Scheduler

_HEALTH_ROUTES = ("/health", "/health_generate")


def check(request: GenerateReqInput, http: Any) -> None:
    """Refuses an id that SGLang would take for its own health check, and might never answer.

    Args:
        http: request of SGLang's HTTP server, or None.

    Raises:
        ValueError: the id of a request from another route begins with the reserved prefix.
    """
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX

    if getattr(getattr(http, "url", None), "path", "").endswith(_HEALTH_ROUTES):
        return
    for rid in request.rid if isinstance(request.rid, list) else [request.rid]:
        if isinstance(rid, str) and rid.startswith(HEALTH_CHECK_RID_PREFIX):
            raise ValueError(
                f"rid {rid[:100]!r} begins with {HEALTH_CHECK_RID_PREFIX}, which is reserved for "
                "health checks; choose another rid"
            )


def _abort(original: Original, scheduler: Scheduler, request: Any) -> None:
    """Aborts the one request of an id. Queues of prefill-decode disaggregation are not covered."""
    if runtime.current is None or request.abort_all:
        return original(scheduler, request)
    others = {
        id(req): (req, req.rid)
        for req in _requests(scheduler)
        if req.rid != request.rid and req.rid.startswith(request.rid)
    }
    for req, _ in others.values():
        req.rid = ""  # begins with no id
    try:
        return original(scheduler, request)
    finally:
        for req, rid in others.values():
            req.rid = rid


def _requests(scheduler: Scheduler) -> Iterator[Req]:
    yield from scheduler.waiting_queue
    yield from scheduler.grammar_manager.grammar_queue
    yield from scheduler.collect_inflight_reqs()
    if scheduler.chunked_req is not None:
        yield scheduler.chunked_req


HOOKS = (
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler.abort_request",
        "around",
        _abort,
        "SGLang aborts all requests whose ids begin with the id",
    ),
)
