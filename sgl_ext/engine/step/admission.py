"""Admission of a waiting request: its conditions, the power that decides, and the consequences."""

from __future__ import annotations

from itertools import islice
from typing import Any

from sgl_ext.engine.core import deferral, hooks, runtime
from sgl_ext.engine.core.hooks import Original
from sgl_ext.engine.core.runtime import ExtRuntime
from sgl_ext.engine.core.sglang_types import PrefillAdder, Req
from sgl_ext.engine.kv import ownership
from sgl_ext.engine.step import budget
from sgl_ext.engine.workarounds import beams, embeddings, penalties


def _admit(original: Original, adder: PrefillAdder, req: Req, *args: object, **kw: Any) -> object:
    if (ext := runtime.current) is None:
        return original(adder, req, *args, **kw)
    result = _tried(ext, original, adder, req, *args, **kw)
    if _lacks_memory(result, adder, req) and _made_room(ext, adder, req):
        # Pages that the request's look-up found may have been evicted meanwhile.
        req.init_next_round_input(adder.tree_cache)
        result = _tried(ext, original, adder, req, *args, **kw)
    return result


def _tried(
    ext: ExtRuntime, original: Original, adder: PrefillAdder, req: Req, *args: object, **kw: Any
) -> object:
    """Admits or resumes a request if there is room for it, and returns SGLang's result."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    if not planned(ext, adder, req, kw.get("has_chunked_req", False)):
        return AddReqResult.CONTINUE
    decided = _decided(ext, adder, req)  # a resumed request joins no batch of prompts
    if decided is None and getattr(adder, budget.PARKED, False):
        decided = AddReqResult.CONTINUE
    if decided is not None:
        for power in ext.inside_out:
            power.deferred(req)
        return decided
    for power in ext.inside_out:
        power.acquire(req)
    result = original(adder, req, *args, **kw)
    # The KV that powers keep for the request leaves no room for the request itself, and no other
    # request will end and free memory.
    alone = _lacks_memory(result, adder, req) and _alone(adder)
    if alone and any(power.concede(req) for power in ext.inside_out):
        result = original(adder, req, *args, **kw)
    if admitted := _admitted(adder, req):
        ownership.check_admitted(adder, req)
        deferral.ended(req)
        if adder.new_chunked_req is req:
            budget.reserve_rest(adder, req)
    for power in ext.inside_out:
        power.considered(adder, req, admitted)
    return result


def _preempt(original: Original, adder: PrefillAdder, req: Req) -> object:
    """Preempts other requests only for a request that could be admitted already."""
    if (ext := runtime.current) is None:
        return original(adder, req)
    if getattr(adder, budget.PARKED, False):
        return False
    try:
        if not planned(ext, adder, req, getattr(adder, budget.CONTINUING, False)):
            return False
        for power in ext.inside_out:
            if (decided := power.preempt(original, adder, req)) is not None:
                return decided
        return beams.sparing(original, adder, req)
    finally:
        # The request's plan is made again at admission, because this one may be outdated by then.
        for power in ext.inside_out:
            power.deferred(req)


def planned(ext: ExtRuntime, adder: PrefillAdder, req: Req, continuing: bool) -> bool:
    """Returns whether admission may be tried; if so, the request has a new plan."""
    # All powers are asked, because this call starts to load what the request needs.
    late = [power for power in ext.inside_out if not power.ready(adder, req, continuing)]
    if not late:
        refused = (power for power in ext.inside_out if not power.plan(adder, req))
        late = [*islice(refused, 1)]
    if late:
        deferral.deferred(req, (power.name for power in late))
    return not late


def _decided(ext: ExtRuntime, adder: PrefillAdder, req: Req) -> object | None:
    """Returns SGLang's ``AddReqResult`` if a request is not admitted as SGLang does it."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    for power in ext.inside_out:
        if (result := power.resume(adder, req)) is not None:
            return result
    if not has_row(ext, adder, req) or penalties.apart(adder, req) or embeddings.apart(adder, req):
        return AddReqResult.OTHER
    return None


def has_row(ext: ExtRuntime, adder: PrefillAdder, req: Req) -> bool:
    """Returns whether free rows and ``--max-running-requests`` allow one more admission.

    SGLang counts neither requests that are resumed nor, in the step of their admission, the rows
    that the members of a beam group take after its prefill. It asserts that such rows exist.
    """
    resumed = sum(power.joining() for power in ext.inside_out)
    running, new = adder.running_batch.reqs, adder.can_run_list
    rowless = sum(not one.kv.holds_kv for one in new)
    # Groups in the running batch have had their rows since their prefill was launched.
    promised = sum(beams.promised_rows(one) for one in (*new, req))
    free = adder.tree_cache.req_to_token_pool.available_size() - resumed - rowless - promised
    most = adder.max_running_requests
    return free > 0 and (most is None or len(running) + len(new) + resumed < most)


def _made_room(ext: ExtRuntime, adder: PrefillAdder, req: Req) -> bool:
    return any(power.make_room(adder, req) for power in ext.inside_out)


def _lacks_memory(result: object, adder: PrefillAdder, req: Req) -> bool:
    """Returns whether a request was refused for lack of memory.

    SGLang's result says whether to try the next request: this one may have been admitted.
    """
    from sglang.srt.managers.schedule_policy import AddReqResult

    return result is AddReqResult.NO_TOKEN and not _admitted(adder, req)


def _admitted(adder: PrefillAdder, req: Req) -> bool:
    return bool(adder.can_run_list) and adder.can_run_list[-1] is req


def _alone(adder: PrefillAdder) -> bool:
    """Returns whether no other request holds memory."""
    running = adder.running_batch is not None and not adder.running_batch.is_empty()
    return not running and not adder.can_run_list


_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
HOOKS = (
    hooks.Hook(
        f"{_ADDER}.add_one_req",
        "around",
        _admit,
        "SGLang defers admission only for its own storage backends, and does not wait for an "
        "external cache",
    ),
    hooks.Hook(
        f"{_ADDER}.preempt_to_schedule",
        "around",
        _preempt,
        "SGLang would preempt other requests repeatedly for a request that is deferred",
    ),
)
