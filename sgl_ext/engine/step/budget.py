"""Charges to SGLang's budget of prefilled tokens for the tokens that a plan computes."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from math import lcm
from typing import Any

from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.hooks import Original
from sgl_ext.engine.core.requests import reserved
from sgl_ext.engine.core.sglang_types import PrefillAdder, Req
from sgl_ext.planning.plan import PrefillPlan

CONTINUING = "_sgl_ext_continuing"
"""Attribute of a ``PrefillAdder`` that is true if the step continues a chunked prompt."""
PARKED = "_sgl_ext_parked"
"""Attribute of a ``PrefillAdder`` that is true if the chunked prompt waits in this step. SGLang
would count it as part of a batch of other prompts, so that none may be admitted."""


def _charge(
    _result: None, adder: PrefillAdder, req: Req, admission: Any, *_reserve: object
) -> None:
    """Returns the tokens of an admitted part that no forward computes to the budgets."""
    if (plan := _plan_of(req)) is None:
        return
    prefix = admission.prefix_len
    credit = _credit(plan, prefix, prefix + admission.extend_len)
    if adder.rem_chunk_tokens is not None:
        adder.rem_chunk_tokens += credit
    adder.rem_input_tokens += credit
    _log(adder, credit, req.retracted_stain)


def _credit(plan: PrefillPlan, start: int, end: int) -> int:
    """Returns the number of the tokens ``start .. end - 1`` that no forward computes."""
    return end - start - plan.computed(start, end)


@contextmanager
def _more(adder: PrefillAdder, credit: int) -> Iterator[None]:
    """Raises the budget of computed tokens by ``credit`` while SGLang selects an admission."""
    budget = adder.rem_chunk_tokens
    if budget is not None:
        adder.rem_chunk_tokens = budget + credit
    try:
        yield
    finally:
        adder.rem_chunk_tokens = budget


def _log(adder: PrefillAdder, tokens: int, retracted: bool) -> None:
    """Moves tokens that no forward computes from SGLang's logged new tokens to the cached ones."""
    adder.log_input_tokens -= tokens
    adder.log_hit_tokens += tokens
    if retracted:
        adder.reprocessed_log_input_tokens -= tokens
        adder.reprocessed_log_hit_tokens += tokens


def _select(original: Original, adder: PrefillAdder, req: Req, **kw: Any) -> object:
    """Ends a part of a prompt where the budget of computed tokens ends."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    plan = _plan_of(req)
    continuing = kw.get("has_chunked_req", False)
    if adder.new_chunked_req is not None or (continuing and plan is not None):
        # SGLang assumes that a prompt that was cut has used up the budget: it has reserved no
        # memory for the rest of the prompt, and continues one such prompt only.
        return AddReqResult.OTHER
    if plan is None:
        admission = original(adder, req, **kw)
    elif adder.rem_chunk_tokens is not None and adder.rem_chunk_tokens <= 0:
        return AddReqResult.OTHER  # SGLang 0.5.22 asks even if the budget is spent
    else:
        prefix = req.prefix_len + kw["host_hit_length"]
        with _more(adder, _credit(plan, prefix, len(req.full_untruncated_fill_ids))):
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
    later, most = bool(adder.can_run_list), admission.extend_len
    length = _part(plan, prefix, most, adder.rem_chunk_tokens, whole, later=later)
    if length <= 0:
        return AddReqResult.OTHER
    return dataclasses.replace(admission, extend_len=length, is_chunked=True, max_new_tokens=0)


def _continue(original: Original, adder: PrefillAdder, req: Req) -> object:
    ext = runtime.current
    setattr(adder, CONTINUING, True)
    # With mixed chunks, SGLang takes the running requests off the budget, of which those that were
    # resumed have cost nothing.
    spent = adder.rem_chunk_tokens is not None and adder.rem_chunk_tokens <= 0
    if ext is not None and (
        not all(power.plan(adder, req) for power in ext.inside_out) or spent or _full(adder)
    ):
        _reserve(adder, req, req.prefix_len)
        setattr(adder, PARKED, True)
        return req  # SGLang takes this for a part that has to wait
    plan = _plan_of(req)
    if adder.rem_chunk_tokens is not None:
        # Without a budget SGLang would compute a whole chunk, for which there may be no memory.
        limit = adder.chunked_req_limit or adder.rem_chunk_tokens
        adder.chunked_req_limit = min(limit, max(_free(adder), adder.page_size))
    if plan is None or adder.rem_chunk_tokens is None:
        result = original(adder, req)
        if result is req:
            reserve_rest(adder, req)
        return result
    prefix = req.prefix_len
    left = len(req.full_untruncated_fill_ids) - prefix
    budget = min(adder.rem_chunk_tokens, adder.chunked_req_limit or adder.rem_chunk_tokens)
    # At least a page, even if the budget is smaller: with empty parts a prompt would never end.
    length = _part(plan, prefix, left, budget, adder.page_size, later=False)
    length = min(max(length, adder.page_size), left)
    room = int(adder.memory_budget.remaining_total) // adder.page_size * adder.page_size
    length = min(length, max(room, adder.page_size))
    adder.chunked_req_limit = length
    credit = length - plan.computed(prefix, prefix + length)
    adder.rem_chunk_tokens += credit
    adder.rem_input_tokens += credit
    result = original(adder, req)
    if adder.can_run_list and adder.can_run_list[-1] is req:
        for power in () if ext is None else ext.inside_out:
            power.continued(req)
        filled = req.extend_len - plan.computed(prefix, prefix + req.extend_len)
        credit -= filled
        _log(adder, filled, req.retracted_stain)
        if result is req:
            reserve_rest(adder, req)
    adder.rem_chunk_tokens -= credit  # the unused part of the credit
    adder.rem_input_tokens -= credit
    return result


def reserve_rest(adder: PrefillAdder, req: Req) -> None:
    """Reserves memory for the rest of a prompt of which a part was admitted.

    SGLang reserves none, because a part of its own uses up the budget of computed tokens, so that
    it admits no other request. Swapped requests that are resumed need none of that budget.
    """
    _reserve(adder, req, req.extend_end)


def _reserve(adder: PrefillAdder, req: Req, end: int) -> None:
    """Reserves memory for a prompt from token ``end`` on."""
    left = len(req.full_untruncated_fill_ids) - end + reserved(req)
    adder.memory_budget.total_offset += adder.memory_budget.ceil_paged_tokens(left)


def _full(adder: PrefillAdder) -> bool:
    """Returns whether a part must wait until running requests end or are retracted.

    Reservations for their answers are estimates. SGLang would try to compute the part, and end.
    """
    running = adder.running_batch
    return running is not None and not running.is_empty() and not _free(adder)


def _free(adder: PrefillAdder) -> int:
    """Returns the tokens in whole pages that are free, or reserved for answers."""
    tokens = int(adder.memory_budget.remaining_total + adder.memory_budget.total_offset)
    return tokens // adder.page_size * adder.page_size


def _part(
    plan: PrefillPlan, prefix: int, most: int, budget: int, whole: int, *, later: bool
) -> int:
    """Returns the number of tokens of the next part of a prompt; 0 if it has to wait.

    It is ``most`` if the part then has the rest of the plan, or the number with which it ends at a
    multiple of ``whole``: whole pages are copied in place.

    Args:
        later: whether a later step will have more budget, because this one has other prompts.
    """
    end = min(plan.reach(prefix, max(budget, 1)), prefix + most)
    if end == prefix + most >= len(plan):
        return most
    if plan.undivided is not None and end > plan.undivided:
        if plan.undivided // whole * whole > prefix:
            end = plan.undivided
        elif later:
            return 0
        elif plan.stop is None:
            last = -(-_last_part(plan, prefix, budget) // whole) * whole
            end = min(end, max(last, prefix + whole))
    return end // whole * whole - prefix


def _last_part(plan: PrefillPlan, prefix: int, budget: int) -> int:
    """Returns the first token of the longest part that ends with the plan and fits the budget."""
    every = range(prefix, len(plan))
    return prefix + bisect_left(every, -budget, key=lambda at: -plan.computed(at, len(plan)))


def _plan_of(req: Req) -> PrefillPlan | None:
    ext = runtime.current
    return None if ext is None else ext.plans.get(req.rid)


_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
HOOKS = (
    hooks.Hook(
        f"{_ADDER}._commit_prefill_admission",
        "after",
        _charge,
        "SGLang charges its budget of computed tokens for every token after the prefix",
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
)
