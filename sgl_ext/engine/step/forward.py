"""Carries out prefill plans: what is linked is copied in place, what is computed becomes rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from math import lcm
from typing import Any

from sgl_ext.engine.chunks import blend
from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.activation import refuse
from sgl_ext.engine.core.attention_backends import PLANNING, require_store_first
from sgl_ext.engine.core.meta_info import tell
from sgl_ext.engine.restore import turn as restore_hooks
from sgl_ext.engine.restore import within as host_restore
from sgl_ext.engine.step import cached_tokens, rows
from sgl_ext.errors import ExtError
from sgl_ext.plan import PrefillPlan

CONTINUING = "_sgl_ext_continuing"
"""Attribute of a ``PrefillAdder`` that goes on with a prompt."""


def _require_rows(scheduler: Any) -> None:
    """Refuses a start whose prefill cannot run rows that alias one request."""
    if (ext := runtime.current) is None:
        return
    for section in PLANNING:
        if getattr(ext.config, section) is not None:
            try:
                require_store_first(scheduler.tp_worker.model_runner, section)
            except ExtError as error:
                refuse(hooks.ActivationError(str(error)))


def _forward(original: Callable[..., Any], runner: Any, batch: Any, *args: Any, **kw: Any) -> Any:
    ext = runtime.current
    if ext is None or not ext.plans or not batch.forward_mode.is_extend_without_speculative():
        return original(runner, batch, *args, **kw)
    plans = [ext.plans.get(rid) for rid in batch.rids]
    if not any(plan is not None for plan in plans):
        return original(runner, batch, *args, **kw)
    prefixes, ends = batch.extend_prefix_lens_cpu, batch.seq_lens_cpu.tolist()
    table = runner.req_to_token_pool.req_to_token
    coming = {}
    for at, plan in enumerate(plans):
        if plan is not None:
            slots = table[batch.req_pool_indices[at], prefixes[at] : ends[at]].long().numpy()
            restore_hooks.fill(ext, batch.rids[at], prefixes[at], ends[at], slots)
            if each := restore_hooks.coming(ext, batch.rids[at], prefixes[at], ends[at], slots):
                coming[at] = each
            if ext.links is not None:
                ext.links.fill(batch.rids[at], prefixes[at], ends[at], slots)
    parts = rows.rows_of(plans, prefixes, ends)
    within = {batch.rids[at]: each for at, each in coming.items()}
    before = cached_tokens.computed_within(ext, within)
    with ExitStack() as shorter:
        if candidates := _candidates(ext, batch.rids, plans, prefixes, ends):
            restore_hooks.fill_all(ext, coming)  # one forward goes on with fewer tokens only once
            parts = shorter.enter_context(blend.blending(ext, runner, batch, parts, candidates))
        elif coming:
            forward = partial(original, runner)
            restoring = host_restore.restoring(ext, runner, batch, parts, coming, forward)
            parts = shorter.enter_context(restoring)
        try:
            ext.split = rows.split_of(batch, parts)
            output = original(runner, rows.split(batch, parts), *args, **kw)
        finally:
            ext.split = None
    cached_tokens.count_within(ext, within, before)
    for rid, plan, end in zip(batch.rids, plans, ends, strict=True):
        if plan is not None and end >= len(plan):
            _release(rid)
    return output


def _candidates(
    ext: runtime.ExtRuntime,
    rids: Sequence[str],
    plans: Sequence[PrefillPlan | None],
    prefixes: Sequence[int],
    ends: Sequence[int],
) -> dict[int, blend.Candidates]:
    """What may be computed anew of each request, by its place in the batch."""
    found = {}
    for at, plan in enumerate(plans):
        if plan is not None and ext.links is not None:
            each = ext.links.blended(rids[at], prefixes[at], ends[at])
            if each is not None:
                found[at] = each
    return found


def _logits(metadata: Any, _class: Any, batch: Any) -> Any:
    # Not by an attribute of the batch: SGLang's runners copy it, field by field.
    ext = runtime.current
    if ext is not None and ext.split is not None:
        ext.split.put_in(metadata, batch.return_logprob)
    return metadata


def _charge(original: Callable[..., int], adder: Any, req: Any, prefix: int) -> int:
    """SGLang adds this to the tokens that a prefill computes: what is linked is taken off."""
    charge = original(adder, req, prefix)
    plan = _plan_of(req)
    end = len(req.full_untruncated_fill_ids)
    return charge if plan is None else charge - (end - prefix - plan.computed(prefix, end))


def _log(
    _result: None, adder: Any, _prefix: int, _length: int, _answer: int, retracted: bool, **kw: Any
) -> None:
    """Logs the tokens that :func:`_charge` took off as cached; they are no replay of SGLang's."""
    if (credit := -kw.get("replay_len", 0)) > 0:
        adder.log_replay_tokens += credit
        _log_cached(adder, credit, retracted)


def _log_cached(adder: Any, tokens: int, retracted: bool) -> None:
    """Moves tokens that no forward computes from those that SGLang logs as new to the cached."""
    adder.log_input_tokens -= tokens
    adder.log_hit_tokens += tokens
    if retracted:
        adder.reprocessed_log_input_tokens -= tokens
        adder.reprocessed_log_hit_tokens += tokens


def _select(original: Callable[..., Any], adder: Any, req: Any, **kw: Any) -> Any:
    """A part of a prompt ends where the budget of computed tokens does."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    plan = _plan_of(req)
    continuing = kw.get("has_chunked_req", False)
    if adder.new_chunked_req is not None or (continuing and plan is not None):
        # SGLang takes it that a prompt that was cut has used up the budget: it has reserved no
        # memory for the rest of it, and goes on with one such prompt only.
        return AddReqResult.OTHER
    admission = original(adder, req, **kw)
    if isinstance(admission, AddReqResult):
        return admission
    end = admission.prefix_len + admission.extend_len
    if not admission.is_chunked and (plan is None or plan.stop is None or plan.stop >= end):
        return admission
    if continuing:
        return AddReqResult.OTHER
    if plan is None:
        return admission
    prefix = admission.prefix_len
    whole = lcm(adder.page_size, kw.get("truncation_align_size") or 1)
    length = _part(plan, prefix, admission.extend_len, adder.rem_chunk_tokens, whole)
    if length <= 0:
        return AddReqResult.OTHER
    replay = plan.computed(prefix, prefix + length) - length
    return dataclasses.replace(
        admission, extend_len=length, replay_len=replay, is_chunked=True, max_new_tokens=0
    )


def _continue(original: Callable[..., Any], adder: Any, req: Any) -> Any:
    setattr(adder, CONTINUING, True)
    if not restore_hooks.planned(adder, req):
        _reserve(adder, req, req.prefix_len)
        return req  # which SGLang takes for a part that has to wait
    plan = _plan_of(req)
    if plan is None or adder.rem_chunk_tokens is None:
        return original(adder, req)
    prefix = req.prefix_len
    left = len(req.full_untruncated_fill_ids) - prefix
    budget = min(adder.rem_chunk_tokens, adder.chunked_req_limit or adder.rem_chunk_tokens)
    # At least a page, be the budget smaller: a part of none would never end.
    length = min(max(_part(plan, prefix, left, budget, adder.page_size), adder.page_size), left)
    room = int(adder.memory_budget.remaining_total) // adder.page_size * adder.page_size
    length = min(length, max(room, adder.page_size))
    if adder.chunked_req_limit is not None or plan.stop is not None:
        adder.chunked_req_limit = length
    credit = length - plan.computed(prefix, prefix + length)
    adder.rem_chunk_tokens += credit
    adder.rem_input_tokens += credit
    result = original(adder, req)
    if adder.can_run_list and adder.can_run_list[-1] is req:
        restore_hooks.considered(req, admitted=True)
        filled = req.extend_len - plan.computed(prefix, prefix + req.extend_len)
        credit -= filled
        _log_cached(adder, filled, req.retracted_stain)
        if result is req:
            _reserve(adder, req, req.extend_end)
    adder.rem_chunk_tokens -= credit  # what was not needed
    adder.rem_input_tokens -= credit
    return result


def _reserve(adder: Any, req: Any, end: int) -> None:
    """Keeps memory for a prompt from token ``end`` on: a part that has not used the budget up lets
    others be admitted beside it, as none of SGLang's own parts does."""
    from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

    answer = min(req.sampling_params.max_new_tokens, CLIP_MAX_NEW_TOKENS)
    left = len(req.full_untruncated_fill_ids) - end + answer
    adder.memory_budget.total_offset += adder.memory_budget.ceil_paged_tokens(left)


def _part(plan: PrefillPlan, prefix: int, most: int, budget: int, whole: int) -> int:
    """Tokens of the next part of a prompt: ``most``, or as many as make it end with a multiple of
    ``whole``."""
    end = plan.reach(prefix, max(budget, 1))
    return most if end >= prefix + most else end // whole * whole - prefix


def _plan_of(req: Any) -> PrefillPlan | None:
    ext = runtime.current
    return None if ext is None else ext.plans.get(req.rid)


def _release(rid: str) -> None:
    if (ext := runtime.current) is None:
        return
    if ext.links is not None:
        ext.links.release(rid)
    restore_hooks.release(ext, rid)


def _on_release(_tree: Any, req: Any, *_args: Any, **_kw: Any) -> None:
    _release(req.rid)
    ext = runtime.current
    if ext is None or ext.links is None:
        return
    from sgl_ext.engine.chunks.parameters import selection_of

    if (selection := selection_of(req)) is not None and req.finished():
        tell(req, {"power": "chunks", "selected": ext.links.select(req, selection)})


_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
HOOKS = (
    hooks.Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_init_info",
        "before",
        _require_rows,
        "nothing is called between the making of all parts of a scheduler and its ready message",
    ),
    hooks.Hook(
        "sglang.srt.model_executor.model_runner.ModelRunner.forward",
        "around",
        _forward,
        "SGLang computes one span a request and forward; it has no notion of several",
    ),
    hooks.Hook(
        "sglang.srt.layers.logits_processor.LogitsMetadata.from_forward_batch",
        "after",
        _logits,
        "SGLang takes the logits of each row of a batch",
    ),
    hooks.Hook(
        f"{_ADDER}._replay_len",
        "around",
        _charge,
        "SGLang charges its budget of computed tokens for every token behind the prefix",
    ),
    hooks.Hook(
        f"{_ADDER}._update_prefill_budget",
        "after",
        _log,
        "SGLang logs what a budget is charged beside the extend as tokens that it computes again",
    ),
    hooks.Hook(
        f"{_ADDER}._select_prefill_admission",
        "around",
        _select,
        "the same budget decides where a prompt is cut",
    ),
    hooks.Hook(
        f"{_ADDER}.add_chunked_req",
        "around",
        _continue,
        "the same budget decides where the rest of a prompt is cut",
    ),
    hooks.Hook(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.on_release",
        "before",
        _on_release,
        "a request that ends or is retracted in the middle of its prefill tells its tree only",
    ),
)
