"""Penalties of requests that are resumed or computed again, including the tokens generated before.

SGLang's penalizers are fed each token when the next step is prepared. With its overlap scheduler
they are one token behind: the last token is not known yet, and the last token of the prompt is fed
before the first generated one. A request that is resumed, or is computed again, must have been fed
the same tokens. SGLang makes new penalizers, which have counted nothing.
"""

from __future__ import annotations

from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.hooks import Original
from sgl_ext.engine.core.sglang_types import PrefillAdder, Req, ScheduleBatch
from sgl_ext.engine.kv.indices import upload

_LAGS = "_sgl_ext_lags"
"""Attribute of a request whose next token to be fed is the one before the last."""


def counts(req: Req) -> bool:
    """Returns whether the request's answer depends on the tokens that penalizers have counted."""
    params = req.sampling_params
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.min_new_tokens
    )


def alone(req: Req) -> bool:
    """Returns whether the request must be prepared in a batch of its own.

    Penalizers are fed one token of each request at a time, and the request has generated some
    already.
    """
    return bool(req.output_ids) and counts(req)


def apart(adder: PrefillAdder, req: Req) -> bool:
    """Returns whether the request must wait until earlier admitted requests are prepared."""
    before = adder.can_run_list[-1:]
    return bool(before) and (alone(req) or alone(before[0]))


def forget(req: Req) -> None:
    """Clears the mark of a request that is preempted, or whose penalizers are fed again."""
    req.__dict__.pop(_LAGS, None)


def _recall(_result: None, batch: ScheduleBatch) -> None:
    """Feeds penalizers the tokens that they had been fed before the request's next token.

    The next token was sampled already, or would have been. The batch has one request only. If a
    decode step is next, its preparation feeds one more token, which is left out here.
    """
    import torch

    if runtime.current is None or len(batch.reqs) != 1 or not alone(batch.reqs[0]):
        return
    (req,) = batch.reqs
    forget(req)
    prompt, answered = req.origin_input_ids, req.output_ids
    fed = [prompt[-1], *answered] if batch.enable_overlap else answered
    last = req.extend_end - len(prompt)  # of the tokens whose KV is computed or loaded
    if 0 <= last < len(answered) and batch.enable_overlap:
        setattr(req, _LAGS, True)
    orchestrator = batch.sampling_info.penalizer_orchestrator
    for token in fed[: max(last, 0)]:
        orchestrator.cumulate_output_tokens(upload(torch.tensor([token]), batch.device))


def _feed(original: Original, batch: ScheduleBatch) -> None:
    """Hides the last token of a resumed request, which SGLang knows already in its first step."""
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
        "SGLang creates new penalizers for a preempted request, which have counted no tokens",
    ),
    hooks.Hook(
        f"{_BATCH}.cumulate_penalty_output_tokens",
        "around",
        _feed,
        "SGLang feeds penalizers the tokens that it knows, which after a resumption is one token "
        "more than at any other time",
    ),
)
