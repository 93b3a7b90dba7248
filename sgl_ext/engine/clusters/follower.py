"""Requests that follow a stored context."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

from sgl_ext.engine.clusters.parameters import IsRecorded
from sgl_ext.engine.core.sglang_types import Req


@dataclass
class Follower:
    """Request that follows a context.

    Attributes:
        id: id of the context.
        share: share of the context's blocks that each query of the request is given.
        req: SGLang's request.
        since: arrival of the request on the monotonic clock, in seconds.
        tokens: number of tokens of the context; 0 until the request may run.
        recorded: parameter of a request that follows the tokens of a context that are recorded so
            far; None if the request follows a stored context.
    """

    id: str
    share: float
    req: Req
    since: float
    tokens: int = 0
    recorded: IsRecorded | None = None


def end_request(req: Req, message: str) -> None:
    """Ends a running request with an error, and keeps its KV out of the radix tree."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    req.skip_radix_cache_insert = True
    req.to_finish = FINISH_ABORT(message, HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailable")
