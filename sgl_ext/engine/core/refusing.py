"""Ends a request that waits, and no other: SGLang's aborts take all ids that begin alike."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any


def refuse_waiting(scheduler: Any, req: Any, message: str) -> None:
    """The request, which is in the waiting queue, is answered with 503 and ``message``."""
    from sglang.srt.managers.io_struct import AbortReq

    scheduler.waiting_queue.remove(req)
    scheduler._release_aborted_request(req)
    scheduler.beam_coordinator.retire_group(req)
    reason = {
        "type": "abort",
        "status_code": HTTPStatus.SERVICE_UNAVAILABLE,
        "message": message,
    }
    scheduler.send_abort_output(
        AbortReq(rid=req.rid, abort_message=message, finished_reason=reason), req
    )
