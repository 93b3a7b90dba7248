"""Tests of the checks of embeddings that requests give instead of tokens, or in their places."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.managers.embed_types import PositionalEmbeds
from torch import nn

from sgl_ext.engine.core import runtime
from sgl_ext.engine.core.activation import CARRIED
from sgl_ext.engine.workarounds import embeddings, validation

WIDTH = 4
ROW = [0.5] * WIDTH


def model(dtype: torch.dtype = torch.bfloat16) -> Any:
    return SimpleNamespace(hidden_size=WIDTH, dtype=dtype)


def made(rows: Any = None, overrides: Any = None) -> Any:
    """Returns a tokenized request of two tokens, or of as many embeddings as ``rows`` has."""
    ids = (5, 6) if rows is None else None
    return SimpleNamespace(input_ids=ids, input_embeds=rows, positional_embed_overrides=overrides)


def overrides(*positions: int, width: int = WIDTH, value: float = 0.5) -> PositionalEmbeds:
    return PositionalEmbeds(torch.full((len(positions), width), value), [*positions])


@pytest.mark.parametrize(
    "request_",
    [made(), made([ROW, ROW]), made(overrides=overrides(0, 1)), made([ROW], overrides(0))],
)
def test_embeddings_of_the_models_width_pass(request_: Any) -> None:
    embeddings.check(request_, model())


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (made([ROW, ROW[1:]]), "input_embeds have an embedding of 3 numbers; expected 4"),
        (made([[float("nan")] * WIDTH]), "not finite, or whose magnitude is more than 10000"),
        (made([[1e300] * WIDTH]), "not finite"),
        (made(overrides=[1, [0]]), "which only a program can make"),
        (made(overrides=PositionalEmbeds(1, [0])), "which only a program can make"),
        (made(overrides=PositionalEmbeds(torch.ones(1, 2, 2), [0])), "of one tensor"),
        (made(overrides=PositionalEmbeds(torch.ones(1, WIDTH).int(), [0])), "floating-point"),
        (made(overrides=overrides(0, width=2)), "embed overrides have an embedding of 2 numbers"),
        (made(overrides=overrides(0, 2)), "positions in the prompt, from 0 to below its 2 tokens"),
        (made(overrides=overrides(-1)), "positions in the prompt"),
        (made([ROW], overrides(1)), "positions in the prompt, from 0 to below its 1 tokens"),
        (made(overrides=overrides(0, value=float("inf"))), "embed overrides have a number that is"),
    ],
)
def test_embeddings_that_would_end_a_scheduler_are_refused(request_: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        embeddings.check(request_, model())


def test_a_number_of_overrides_that_was_changed_is_refused() -> None:
    changed = overrides(0)
    changed.positions.append(1)
    with pytest.raises(ValueError, match="1 embed overrides were given for 2 positions"):
        embeddings.check(made(overrides=changed), model())


def test_only_models_in_bfloat16_take_input_embeds() -> None:
    embeddings.check(made(overrides=overrides(0)), model(torch.float32))
    with pytest.raises(ValueError, match=r"in bfloat16, found torch\.float32; give token ids, or"):
        embeddings.check(made([ROW]), model(torch.float32))


def test_overrides_that_cannot_be_stacked_are_refused_before_they_are() -> None:
    manager = SimpleNamespace(
        model_config=model(), server_args=SimpleNamespace(**{CARRIED: SimpleNamespace(config=1)})
    )
    right, wrong = torch.ones(WIDTH), torch.ones(2)
    embeddings._score(
        manager, query_embed_overrides=[right], item_embed_overrides=[None, [right[None]]]
    )
    for given in (
        {"query_embed_overrides": [right, wrong]},
        {"item_embed_overrides": [None, [wrong]]},
    ):
        with pytest.raises(ValueError, match="_embed_overrides have an embedding of 2 numbers"):
            embeddings._score(manager, **given)


class Full(nn.Module):
    """Model that can be given embeddings."""

    def forward(self, input_ids: Any, input_embeds: Any = None) -> None: ...

    def get_input_embeddings(self) -> None: ...


class NoLookup(nn.Module):
    """Model whose embeddings cannot be looked up."""

    def forward(self, input_ids: Any, input_embeds: Any = None) -> None: ...


class TokensOnly(nn.Module):
    """Model that computes from tokens only."""

    def forward(self, input_ids: Any) -> None: ...


@pytest.mark.parametrize(
    ("class_", "stages", "request_", "accepted"),
    [
        (TokensOnly, 1, made(), True),
        (TokensOnly, 1, made([ROW]), False),
        (NoLookup, 1, made([ROW]), True),
        (NoLookup, 1, made(overrides=overrides(0)), False),
        (Full, 1, made(overrides=overrides(0)), True),
        (Full, 2, made(overrides=overrides(0)), False),
        (Full, 2, made([ROW]), True),
    ],
)
def test_a_model_that_takes_no_embeddings_refuses_them(
    monkeypatch: pytest.MonkeyPatch, class_: type, stages: int, request_: Any, accepted: bool
) -> None:
    monkeypatch.setattr(runtime, "current", SimpleNamespace())
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(pp_size=stages))
    done: list[str] = []
    scheduler = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=class_())),
        send_abort_output=lambda abort, _request: done.append(abort.finished_reason["message"]),
    )
    request_.rid = "one"
    validation._handle(lambda *_: done.append("accepted"), scheduler, request_)
    (result,) = done
    assert (result == "accepted") is accepted
    assert accepted or "give token ids" in result


def test_batches_are_computed_from_tokens_or_from_embeddings() -> None:
    tokens, rows = made(), made([ROW])
    for batch, added, waits in (
        ([], rows, False),
        ([tokens], tokens, False),
        ([rows], rows, False),
        ([tokens], rows, True),
        ([rows, rows], tokens, True),
    ):
        assert embeddings.apart(SimpleNamespace(can_run_list=batch), added) is waits
