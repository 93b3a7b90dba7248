"""Penalties of requests that come back count what was generated before.

SGLang's penalizers are fed each token when the next step is prepared. With its overlap scheduler
they lag behind by one: the last token is not known yet, and the prompt's last one is fed before the
first. A request that comes back has to have been fed the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_ext.engine import hooks

_LAGS = "_sgl_ext_lags"
"""Attribute of a request whose next token to be fed is the one before the last."""


def counts(req: Any) -> bool:
    """Whether the request's answer depends on how often it has generated which token."""
    params = req.sampling_params
    return bool(
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.min_new_tokens
    )


def recall(batch: Any) -> None:
    """Feeds the tokens that the only request of SGLang's ``ScheduleBatch`` has generated, but for
    the one that preparing its next step feeds."""
    import torch

    (req,) = batch.reqs
    fed = [*req.output_ids]
    if batch.enable_overlap:
        fed = [req.origin_input_ids[-1], *fed[:-1]]
        setattr(req, _LAGS, True)
    orchestrator = batch.sampling_info.penalizer_orchestrator
    for token in fed[:-1]:
        orchestrator.cumulate_output_tokens(torch.tensor([token], device=batch.device))


def forget(req: Any) -> None:
    """The request gives way again."""
    req.__dict__.pop(_LAGS, None)


def _feed(original: Callable[..., None], batch: Any) -> None:
    """In the first step after a request has come back its last token is known already."""
    lagging = [req for req in batch.reqs if getattr(req, _LAGS, False)]
    hidden = [req.output_ids.pop() for req in lagging]
    try:
        original(batch)
    finally:
        for req, token in zip(lagging, hidden, strict=True):
            req.output_ids.append(token)
            delattr(req, _LAGS)


HOOKS = (
    hooks.Hook(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens",
        "around",
        _feed,
        "SGLang feeds penalizers what it knows, which is one token more after a request has come "
        "back than at any other time",
    ),
)
