"""The turn of a request: what has to be there first, and what follows from its admission."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_ext.engine.clusters import power as stored_hooks
from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.meta_info import tell, told
from sgl_ext.engine.kv import ownership
from sgl_ext.engine.restore import turn as restore_hooks
from sgl_ext.engine.step import beams
from sgl_ext.engine.step import forward as plan_hooks
from sgl_ext.engine.swap import out as swap_hooks
from sgl_ext.engine.swap import penalties
from sgl_ext.engine.swap import resume as swap_in
from sgl_ext.engine.tiers import power as tier_hooks


def _admit(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kw: Any) -> Any:
    ext = runtime.current
    if ext is None:
        return original(adder, req, *args, **kw)
    from sglang.srt.managers.schedule_policy import AddReqResult

    swap_in.expect(adder)
    continuing = kw.get("has_chunked_req", False)
    if _held_back(adder, req, continuing) or not restore_hooks.planned(adder, req):
        return AddReqResult.CONTINUE
    back = swap_in.take_back(adder, req)
    if back is AddReqResult.NO_TOKEN:
        # It is looked up anew before it gets the room: what it found may have had to go.
        swap_hooks.makes_room(adder, req)
    if back is None and not swap_in.has_seat(adder, req):
        back = AddReqResult.OTHER
    if back is None and penalties.apart(adder, req):
        back = AddReqResult.OTHER
    if back is not None:
        restore_hooks.considered(req, admitted=False)
        return back
    # What a plan links has to stay from now on, and SGLang asks the plan for the request's cost.
    linked = None if ext.links is None else ext.links.acquire(req)
    result = original(adder, req, *args, **kw)
    # SGLang's result is about the next request: this one may have been admitted.
    full = result is AddReqResult.NO_TOKEN and not _admitted(adder, req)
    full = full and not swap_hooks.makes_room(adder, req) and _alone(adder)
    if linked is not None and full and ext.links is not None:
        # The chunks that it keeps leave no room for it, and nobody who ends would make any.
        linked = ext.links.acquire(req, computing=True)
        result = original(adder, req, *args, **kw)
    admitted = _admitted(adder, req)
    if admitted:
        ownership.check_admitted(adder, req)
    if ext.swap is not None and admitted and req.retraction_count:
        # All but the token that comes next.
        ext.swap.counts.recomputed_tokens += len(req.full_untruncated_fill_ids) - req.prefix_len - 1
    tier_hooks.considered(adder, req, admitted)
    restore_hooks.considered(req, admitted)
    if linked is not None and admitted and not told(req, "chunks"):  # not after a retraction
        tell(req, linked)
        if ext.link_metrics is not None:
            ext.link_metrics.count(linked)
    if linked is not None and not admitted and ext.links is not None:
        ext.links.release(req.rid)
    return result


def _admitted(adder: Any, req: Any) -> bool:
    return bool(adder.can_run_list) and adder.can_run_list[-1] is req


def _alone(adder: Any) -> bool:
    """Whether no other request holds memory."""
    running = adder.running_batch is not None and not adder.running_batch.is_empty()
    return not running and not adder.can_run_list


def _preempt(original: Callable[..., Any], adder: Any, req: Any) -> Any:
    """Nobody gives way to a request that could not run yet."""
    ext = runtime.current
    continuing = getattr(adder, plan_hooks.CONTINUING, False)
    if _held_back(adder, req, continuing) or not restore_hooks.planned(adder, req):
        return False
    try:
        if ext is None:
            return original(adder, req)
        if ext.swap is None:
            return beams.sparing(original, adder, req)
        swap_in.expect(adder)
        with ext.swap.clock.on():
            found = swap_in.look_up(adder.tree_cache, req)
            apart = req.rid not in ext.swap and penalties.apart(adder, req)
            if found.readable is None or apart:
                return False
            return swap_hooks.displace(adder, req, swap_in.lacking(adder, req, found.tokens))
    finally:
        # Its plan is made anew when it is admitted: one that is kept may outlive what it is of.
        restore_hooks.considered(req, admitted=False)


def _held_back(adder: Any, req: Any, continuing: bool) -> bool:
    """A request whose KV is still on its way is passed over; its turn comes again."""
    ext = runtime.current
    if ext is None:
        return False
    coming = tier_hooks.held_back(adder, req)
    coming = restore_hooks.held_back(adder, req, continuing) or coming
    coming = not stored_hooks.ready(req) or coming
    if ext.links is None or (ext.swap is not None and req.rid in ext.swap):
        return coming  # what was swapped out holds the KV of its chunks
    return coming or not ext.links.ready(req)


_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
HOOKS = (
    hooks.Hook(
        f"{_ADDER}.add_one_req",
        "around",
        _admit,
        "SGLang holds requests back for its own storage backends only; an external cache that "
        "answers late would be too late",
    ),
    hooks.Hook(
        f"{_ADDER}.preempt_to_schedule",
        "around",
        _preempt,
        "SGLang would preempt others for it again and again while it is passed over",
    ),
)
