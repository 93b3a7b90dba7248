"""Checks of embeddings that a request gives instead of tokens, or in their places.

SGLang copies them into the input of the model as they are. An exception there ends the scheduler,
and what kernels sample from logits that are NaN may be no token of the vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch

from sgl_ext.engine.core import hooks
from sgl_ext.engine.core.activation import carried_by
from sgl_ext.engine.core.sglang_types import (
    ModelConfig,
    PrefillAdder,
    Req,
    Scheduler,
    TokenizedReqInput,
    TokenizerManager,
)
from sgl_ext.engine.workarounds.checks import check_positions

_LARGEST = 1e4
"""Maximum magnitude of a number in an embedding. Larger ones may overflow float16 activations."""


def check(made: TokenizedReqInput, model: ModelConfig) -> None:
    """Checks the embeddings of a request whose fields have the types that SGLang declares.

    Raises:
        ValueError: says what was found and what is possible.
    """
    from sglang.srt.managers.embed_types import PositionalEmbeds

    width, tokens = model.hidden_size, len(made.input_ids or ())
    rows: Any = getattr(made, "input_embeds", None)
    if rows is not None:
        if model.dtype != torch.bfloat16:  # SGLang gives them to the model as bfloat16
            raise ValueError(
                f"input_embeds require a model in bfloat16, found {model.dtype}; give token ids, "
                "or start the server with --dtype bfloat16"
            )
        for row in rows:
            _require_width("input_embeds", len(row), width)
        tokens = len(rows)
        _check_values("input_embeds", torch.tensor(rows, dtype=torch.float32))
    overrides: Any = made.positional_embed_overrides
    if overrides is None:
        return
    embeds = overrides.embeds if isinstance(overrides, PositionalEmbeds) else None
    if not isinstance(embeds, torch.Tensor) or not embeds.is_floating_point() or embeds.ndim != 2:
        raise ValueError(
            "positional_embed_overrides must be PositionalEmbeds of one tensor of floating-point "
            "numbers, which only a program can make; use the overrides of /v1/score or "
            "/v1/embeddings"
        )
    _require_width("embed overrides", embeds.shape[1], width)
    if len(embeds) != len(overrides.positions):
        raise ValueError(
            f"{len(embeds)} embed overrides were given for {len(overrides.positions)} positions; "
            "give one for each"
        )
    check_positions("positions of embed overrides", overrides.positions, tokens)
    _check_values("embed overrides", embeds)


def check_widths(name: str, embeddings: Iterable[Any] | None, width: int) -> None:
    """Checks the tensors of which SGLang makes one, and which it refuses if they are none.

    Args:
        width: hidden size of the model.

    Raises:
        ValueError: an embedding has another width.
    """
    for each in () if embeddings is None else embeddings:
        if isinstance(each, torch.Tensor):
            _require_width(name, each.shape[-1], width)


def _require_width(name: str, found: int, width: int) -> None:
    if found != width:
        raise ValueError(
            f"{name} have an embedding of {found} numbers; expected {width}, the hidden size of "
            "the model"
        )


def _check_values(name: str, embeddings: torch.Tensor) -> None:
    if not bool((embeddings.abs() <= _LARGEST).all()):
        raise ValueError(
            f"{name} have a number that is not finite, or whose magnitude is more than "
            f"{_LARGEST:g}; scale them as the model's own embeddings"
        )


def require_served(scheduler: Scheduler, request: TokenizedReqInput) -> None:
    """Raises ValueError if a request gives embeddings that this model cannot be given."""
    from sglang.srt.runtime_context import get_parallel

    overridden = getattr(request, "positional_embed_overrides", None) is not None
    if not overridden and getattr(request, "input_embeds", None) is None:
        return
    model = scheduler.tp_worker.model_runner.model
    if "input_embeds" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{type(model).__name__} takes no embeddings; give token ids")
    # SGLang looks the embeddings of the other tokens up itself, in all pipeline stages.
    if overridden and (get_parallel().pp_size > 1 or not hasattr(model, "get_input_embeddings")):
        raise ValueError(
            f"embed overrides are not served by {type(model).__name__} or with --pp-size above 1; "
            "give token ids, or input_embeds for all tokens"
        )


def apart(adder: PrefillAdder, req: Req) -> bool:
    """Returns whether a request must wait for a batch of its kind.

    SGLang computes a batch either from tokens or from ``input_embeds``.
    """
    return any(
        (one.input_embeds is None) != (req.input_embeds is None) for one in adder.can_run_list
    )


def _score(
    manager: TokenizerManager,
    *_args: object,
    query_embed_overrides: list[torch.Tensor] | None = None,
    item_embed_overrides: list[list[torch.Tensor] | None] | None = None,
    **_kw: object,
) -> None:
    """Refuses overrides of different widths, which SGLang answers with 500."""
    if carried_by(manager.server_args) is not None:
        width = manager.model_config.hidden_size
        check_widths("query_embed_overrides", query_embed_overrides, width)
        for each in item_embed_overrides or ():
            check_widths("item_embed_overrides", each, width)


LAUNCHER_HOOKS = (
    hooks.Hook(
        "sglang.srt.managers.tokenizer_manager_score_mixin.TokenizerManagerScoreMixin.score_request",
        "before",
        _score,
        "SGLang stacks embeddings of different widths, and answers with 500",
    ),
)
