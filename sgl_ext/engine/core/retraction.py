"""Which requests can be retracted, and the release of one that is in no batch."""

from __future__ import annotations

from typing import Any


def retractable(req: Any) -> bool:
    """Whether a running request can be retracted. A beam group cannot: SGLang's release of its
    leader leaves the rows of its members behind."""
    return not req.finished() and req.beam_group is None


def release(scheduler: Any, req: Any, *, offload_kv: bool = True) -> None:
    """Frees the row and the slots of a request outside of a batch.

    Args:
        offload_kv: see SGLang's ``release_req``; False if its KV must be computed again.
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
