"""Protection of the rows of beam groups, which SGLang can neither retract nor move.

A beam group is one request, its leader, and rows of ``req_to_token`` for its other beams, its
members. SGLang's release of a leader leaves the members' rows allocated, and its scheduler asserts
that there are rows for them after the leader's prefill.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.hooks import Original
from sgl_ext.engine.core.releases import send_abort
from sgl_ext.engine.core.requests import release
from sgl_ext.engine.core.sglang_types import PrefillAdder, Req, Scheduler


def promised_rows(req: Req) -> int:
    """Returns the number of rows that members take when their leader's prefill is launched."""
    group = req.beam_group
    if group is None or group.member_rows is not None or group.retired or req.finished():
        return 0
    return int(group.beam_width) - 1


def sparing(original: Original, adder: PrefillAdder, req: Req) -> object:
    """Preempts requests for a request as SGLang does, but no beam group.

    Args:
        original: ``PrefillAdder.preempt_to_schedule``, which skips requests in ``preempt_list``.
    """
    beams = [one for one in adder.running_batch.reqs if one.beam_group is not None]
    adder.preempt_list.extend(beams)
    try:
        return original(adder, req)
    finally:
        adder.preempt_list[:] = [one for one in adder.preempt_list if one not in beams]


def _pause(scheduler: Scheduler, request: Any) -> None:
    """Aborts the groups that a pause would retract, as SGLang does when memory runs out."""
    if runtime.current is None or request.mode != "retract":
        return
    running, last = scheduler.running_batch, scheduler.last_batch
    for req in {*running.reqs, *(() if last is None else last.reqs)}:
        group = req.beam_group
        if group is not None and group.num_generated and not req.finished():
            _end(scheduler, req)
    # SGLang removes the requests from the batch, but not the members' rows behind them.
    kept = [at for at, req in enumerate(running.reqs) if not (req.beam_group and req.finished())]
    running.filter_batch(keep_indices=kept)


def _end(scheduler: Scheduler, req: Req) -> None:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT
    from sglang.srt.managers.scheduler import _make_abort_req

    reason = FINISH_ABORT(
        "The server pauses and retracts its requests. Beam groups cannot be retracted; send the "
        "request again.",
        status_code=HTTPStatus.SERVICE_UNAVAILABLE,
    )
    # The members' rows are freed first, because they are found through the leader's KV record.
    scheduler.beam_coordinator._free_member_rows(req.beam_group)
    release(scheduler, req, offload_kv=False)
    scheduler.beam_coordinator.retire_group(req)
    req.to_finish, req.finished_reason = None, reason
    send_abort(scheduler, _make_abort_req(req, finished_reason=reason.to_json()), req)


HOOKS = (
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler.pause_generation",
        "before",
        _pause,
        "SGLang retracts beam groups in a pause, but does not free the rows of their members",
    ),
)
