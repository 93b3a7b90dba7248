"""Penalties of requests that begin anew count what was generated before.

SGLang's penalizers are fed each token when the next step is prepared. With its overlap scheduler
they lag behind by one: the last token is not known yet, and the prompt's last one is fed before the
first. A request that comes back, or is computed again, has to have been fed the same; SGLang makes
new penalizers, which know nothing.
"""

from __future__ import annotations

from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.hooks import Original
from sgl_ext.engine.core.sglang_types import PrefillAdder, Req, ScheduleBatch

_LAGS = "_sgl_ext_lags"
"""Attribute of a request whose next token to be fed is the one before the last."""


def counts(req: Req) -> bool:
    """Whether the request's answer depends on how often it has generated which token."""
    params = req.sampling_params
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.min_new_tokens
    )


def alone(req: Req) -> bool:
    """Whether the request has to be prepared in a batch of its own: penalizers are fed a token of
    each request at a time, and it has generated some already."""
    return bool(req.output_ids) and counts(req)


def apart(adder: PrefillAdder, req: Req) -> bool:
    """Whether the request has to wait until those have been prepared that were admitted before."""
    before = adder.can_run_list[-1:]
    return bool(before) and (alone(req) or alone(before[0]))


def forget(req: Req) -> None:
    """The request gives way again."""
    req.__dict__.pop(_LAGS, None)


def _recall(_result: None, batch: ScheduleBatch) -> None:
    """Feeds what the batch's only request had been fed when its next token was, or would have been,
    sampled; but for the one that preparing a decode step feeds, if that is next."""
    import torch

    if runtime.current is None or len(batch.reqs) != 1 or not alone(batch.reqs[0]):
        return
    (req,) = batch.reqs
    forget(req)
    prompt, answered = req.origin_input_ids, req.output_ids
    fed = [prompt[-1], *answered] if batch.enable_overlap else answered
    last = req.extend_end - len(prompt)  # of those whose KV is computed, or comes back
    if 0 <= last < len(answered) and batch.enable_overlap:
        setattr(req, _LAGS, True)
    orchestrator = batch.sampling_info.penalizer_orchestrator
    for token in fed[: max(last, 0)]:
        orchestrator.cumulate_output_tokens(torch.tensor([token], device=batch.device))


def _feed(original: Original, batch: ScheduleBatch) -> None:
    """In the first step after a request has come back its last token is known already."""
    lagging = [req for req in batch.reqs if getattr(req, _LAGS, False)]
    hidden = [req.output_ids.pop() for req in lagging]
    try:
        original(batch)
    finally:
        for req, token in zip(lagging, hidden, strict=True):
            req.output_ids.append(token)
            delattr(req, _LAGS)


_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
HOOKS = (
    hooks.Hook(
        f"{_BATCH}.prepare_for_extend",
        "after",
        _recall,
        "SGLang makes new penalizers for a request that gave way, which have counted nothing",
    ),
    hooks.Hook(
        f"{_BATCH}.cumulate_penalty_output_tokens",
        "around",
        _feed,
        "SGLang feeds penalizers what it knows, which is one token more after a request has come "
        "back than at any other time",
    ),
)
