"""Hooks on the places of SGLang's scheduler that several powers share.

Each place is hooked once and calls the powers. Methods that come in pairs, before and after a call
of SGLang, are called from the outside in before it and from the inside out after it. Single calls,
such as ``poll``, ``forget``, ``ready`` and ``plan``, go from the inside out. The exceptions are
``positioned``, ``matching``, ``released``, ``weights_changed``
(:mod:`~sgl_ext.engine.core.weight_updates`), ``reset`` and ``close``, which go from the outside in.
"""

from __future__ import annotations

from typing import Any

from sgl_ext.engine.core import hooks, planning, runtime, served, weight_updates
from sgl_ext.engine.core.activation import REPORT_KEY, refuse, report
from sgl_ext.engine.core.attention_backends import require_running
from sgl_ext.engine.core.hooks import Original
from sgl_ext.engine.core.powers import powers_of
from sgl_ext.engine.core.served import Property
from sgl_ext.engine.core.sglang_types import (
    ForwardBatch,
    MatchResult,
    ModelRunner,
    RadixTree,
    Req,
    ScheduleBatch,
    Scheduler,
)
from sgl_ext.engine.kv import ownership
from sgl_ext.engine.step import forward
from sgl_ext.engine.step.timing import ForwardTimer
from sgl_ext.engine.workarounds import validation
from sgl_ext.errors import ExtError


def _ready(original: Original, scheduler: Scheduler) -> object:
    """Opens the powers and adds their report; an error ends the scheduler with its reason."""
    from sglang.srt.runtime_context import get_parallel

    if (ext := runtime.current) is None:
        return original(scheduler)
    if not ext.inside_out:
        ext.timer = ForwardTimer(_stream_of_forwards(scheduler))
        if ext.slab is not None:
            strided = {Property.STRIDED: "the block-major KV layout"}
            try:
                require_running(scheduler.tp_worker.model_runner, strided)
            except ExtError as error:
                refuse(hooks.ActivationError(str(error)))
        planning.prepare(ext, scheduler)
        stages = 1 if ext.config.restore is None else get_parallel().pp_size
        for power in powers_of(ext.config, stages=stages):
            try:
                power.open(ext, scheduler)
            except hooks.ActivationError as error:
                refuse(error)
            except (ExtError, OSError) as error:
                refuse(hooks.ActivationError(f"{power.name}: {error}"))
            ext.add(power)
    result = original(scheduler)
    result[REPORT_KEY] = {**report(ext.config), "memory": ext.describe_memory()}
    return result


def _stream_of_forwards(scheduler: Scheduler) -> Any:
    if served.device_type(scheduler.tp_worker.model_runner.device) != "cuda":
        return None
    from sglang.srt.runtime_context import get_parallel

    # Else forwards run on the stream of the scheduler, which is not the current one until its event
    # loop begins.
    own = scheduler.enable_overlap or get_parallel().pp_size > 1
    return scheduler.forward_stream if own else scheduler.schedule_stream


def _queue(
    original: Original, scheduler: Scheduler, req: Req, *args: object, **kw: object
) -> object:
    if (ext := runtime.current) is None:
        return original(scheduler, req, *args, **kw)
    for power in ext.outside_in:
        power.arrive(req)
    validation.check_prompt(req)
    if not req.retraction_count:
        return original(scheduler, req, *args, **kw)
    arrived = req.time_stats.wait_queue_entry_time
    # A request that was accepted before is not rejected because the queue has become full since.
    most, scheduler.max_queued_requests = scheduler.max_queued_requests, None
    try:
        result = original(scheduler, req, *args, **kw)
    finally:
        scheduler.max_queued_requests = most
    for power in ext.inside_out:
        power.requeued(scheduler, req, arrived)
    return result


def _poll(_scheduler: Scheduler, *_args: object, **_kw: object) -> None:
    if (ext := runtime.current) is not None:
        ext.timer.poll()
        for power in ext.inside_out:
            power.poll()
        if ext.planning_metrics is not None and ext.planning_metrics.due:
            ext.planning_metrics.update(ext.costs.decisions)


def _step(original: Original, scheduler: Scheduler, running: ScheduleBatch) -> object:
    if (ext := runtime.current) is None:
        return original(scheduler, running)
    for power in ext.outside_in:
        power.before_step(running)
    plan = original(scheduler, running)
    for power in ext.inside_out:
        power.after_step(plan)
    return plan


def _run(
    original: Original,
    scheduler: Scheduler,
    batch: ScheduleBatch,
    *args: object,
    **kw: object,
) -> object:
    if (ext := runtime.current) is None:
        return original(scheduler, batch, *args, **kw)
    ownership.check_step(scheduler, batch)
    for power in ext.outside_in:
        power.forwarding(batch)
    with ext.timer.measure(planning.observing(ext, batch)):
        result = original(scheduler, batch, *args, **kw)
    for power in ext.inside_out:
        power.forwarded(batch)
    return result


def _forward(
    original: Original,
    runner: ModelRunner,
    batch: ForwardBatch,
    *args: object,
    **kw: object,
) -> object:
    if (ext := runtime.current) is None:
        return original(runner, batch, *args, **kw)
    for power in ext.outside_in:
        batch = power.positioned(batch)
    return forward.forward(ext, original, runner, batch, *args, **kw)


def _release(tree: RadixTree, req: Req, *, checkpointed: bool) -> None:
    if (ext := runtime.current) is not None:
        for power in ext.outside_in:
            power.released(tree, req, checkpointed)
        ext.prefilled(req.rid)


def _match(_wrapper: object, _key: object, req: Req, result: MatchResult) -> None:
    if (ext := runtime.current) is not None:
        for power in ext.outside_in:
            power.matching(req, result.device_prefix_len)


def _forget(_wrapper: object, rid: str) -> None:
    if (ext := runtime.current) is not None:
        for power in ext.inside_out:
            power.forget(rid)


def _report_live(result: Any, _scheduler: Scheduler, _request: object) -> object:
    if (ext := runtime.current) is not None:
        parts = {power.name: power.describe() for power in ext.inside_out}
        result.internal_state["sgl_ext"] = {
            "prefill_seconds": ext.prefill_seconds,
            "planning": planning.describe(ext),
            **{name: part for name, part in parts.items() if part is not None},
        }
    return result


def _leave(original: Original, scheduler: Scheduler) -> object:
    """Closes the powers before SGLang closes the radix cache, which closes the tiers, and the
    transfer engine afterwards."""
    if (ext := runtime.current) is None:
        return original(scheduler)
    try:
        for power in ext.outside_in:
            power.close()
        return original(scheduler)
    finally:
        ext.close()


_LINKER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = (
    hooks.Hook(
        f"{_SCHEDULER}.get_init_info",
        "around",
        _ready,
        "SGLang calls nothing between the creation of all parts of a scheduler and its ready "
        "message, which has a fixed set of keys and is all that the launcher receives from it",
    ),
    hooks.Hook(
        f"{_SCHEDULER}._add_request_to_queue",
        "around",
        _queue,
        "SGLang checks only the parameters that it knows, and queues retracted requests behind "
        "all waiting requests",
    ),
    hooks.Hook(
        f"{_SCHEDULER}._process_hicache_events",
        "before",
        _poll,
        "only SGLang's own storage backends are polled in each iteration of the loop",
    ),
    hooks.Hook(
        f"{_SCHEDULER}.get_new_batch_prefill",
        "around",
        _step,
        "a pool can be resized, and a request can leave or join without a prefill, only between "
        "two steps",
    ),
    hooks.Hook(
        f"{_SCHEDULER}.run_batch",
        "around",
        _run,
        "SGLang counts slots only when it is idle, after the answers of a step were sent, and "
        "measures prefills only for its log",
    ),
    hooks.Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner.forward",
        "around",
        _forward,
        "SGLang computes one span per request and forward, at positions that are counted from the "
        "start of the prompt",
    ),
    hooks.Hook(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.on_release",
        "before",
        _release,
        "a request that ends or is retracted during its prefill notifies only its radix tree",
    ),
    hooks.Hook(
        f"{_LINKER}.match",
        "before",
        _match,
        "an external cache receives the hashes of a prompt, and not the request and its length on "
        "the device",
    ),
    hooks.Hook(
        f"{_LINKER}.release_request",
        "before",
        _forget,
        "an external cache is notified of aborted requests only if their load is queued",
    ),
    *weight_updates.HOOKS,
    hooks.Hook(
        f"{_SCHEDULER}.get_internal_state",
        "after",
        _report_live,
        "the live part of /server_info has a fixed set of contributors",
    ),
    hooks.Hook(
        f"{_SCHEDULER}.release_host_resources",
        "around",
        _leave,
        "plugins are not notified when a scheduler shuts down",
    ),
)
