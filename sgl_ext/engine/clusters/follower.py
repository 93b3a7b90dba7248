"""Requests that follow stored contexts."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

from sgl_ext.engine.clusters.parameters import IsRecorded
from sgl_ext.engine.core.sglang_types import Req


@dataclass
class Follower:
    """Request that follows a context, or several.

    Attributes:
        ids: ids of the contexts, in the order of their positions.
        share: share of the blocks of each context that each query of the request is given.
        req: SGLang's request.
        since: arrival of the request on the monotonic clock, in seconds.
        tried: time at which it could have run but for its context, on the same clock; 0 before.
        tokens: number of tokens of the contexts; 0 until the request may run.
        recorded: parameter of a request that follows the tokens of a context that are recorded so
            far; None if the request follows a stored context.
    """

    ids: tuple[str, ...]
    share: float
    req: Req
    since: float
    tried: float = 0.0
    tokens: int = 0
    recorded: IsRecorded | None = None

    @property
    def exact(self) -> bool:
        """True if the answer is that of one prompt with the tokens of the context."""
        return self.share >= 1 and len(self.ids) == 1

    @property
    def name(self) -> str:
        """Name of the context, or of several that are followed together."""
        return "+".join(self.ids)


def end_request(req: Req, message: str) -> None:
    """Ends a running request with an error, and keeps its KV out of the radix tree."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    req.skip_radix_cache_insert = True
    req.to_finish = FINISH_ABORT(message, HTTPStatus.SERVICE_UNAVAILABLE, "ServiceUnavailable")
