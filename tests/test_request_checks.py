"""Requests that would end a scheduler are refused by the front, whatever route they come from."""

from __future__ import annotations

import re
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import (
    GenerateReqInput,
    SessionParams,
    TokenizedGenerateReqInput,
)
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_ext.engine.core import runtime
from sgl_ext.engine.core.activation import CARRIED
from sgl_ext.engine.front import validation
from sgl_ext.engine.front.checks import (
    check_labels,
    check_request,
    check_size,
    check_types,
    malformed_is_refused,
    prompts_of,
    sampling_fields,
)

VOCABULARY, CONTEXT = 100, 1000


def made(ids: Any = (5, 6), sampling: Any = None, **more: Any) -> TokenizedGenerateReqInput:
    """What SGLang is about to send."""
    fields: dict[str, Any] = {
        "rid": "one", "input_text": "text", "input_ids": array("q", ids), "input_embeds": None,
        "mm_inputs": None, "token_type_ids": None,
        "sampling_params": SamplingParams(**sampling or {}),
        "return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 0,
        "token_ids_logprob": None, "stream": False,
    }  # fmt: skip
    fields.update(more)
    return TokenizedGenerateReqInput(**fields)


def test_what_can_be_served_passes() -> None:
    check_request(made(), VOCABULARY, CONTEXT)
    custom = {"ext_composition": {"chunks": [{"at": 1}]}}
    sampling = {"stop_token_ids": [0, 99], "logit_bias": {"5": -100.0}, "custom_params": custom}
    check_request(made((0, 99), sampling, top_logprobs_num=20), VOCABULARY, CONTEXT)
    schema = '{"pattern": "\\"' + "[" * 100 + '", "items": {}}'
    check_request(made(sampling={"json_schema": schema}), VOCABULARY, CONTEXT)
    check_request(
        made((), session_params=SessionParams(id="a"), return_logprob=False), VOCABULARY, CONTEXT
    )


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (made(()), "the prompt has no tokens"),
        (made((5, 100)), "input_ids have the token id 100; the vocabulary has 0 to 99"),
        (made((-1,)), "token id -1"),
        (made(sampling={"stop_token_ids": [100]}), "stop_token_ids have the token id 100"),
        (made(sampling={"logit_bias": {"5": float("nan")}}), "logit_bias of token 5 is nan"),
        (made(sampling={"logit_bias": {"5": 1e308}}), "logit_bias of token 5 is 1e\\+308"),
        (made(sampling={"top_k": 1 << 40}), "top_k is 1099511627776"),
        (made(sampling={"min_new_tokens": 1 << 40}), "min_new_tokens is"),
        (made(sampling={"repetition_penalty": 1e-320}), "repetition_penalty is 1e-320"),
        (made(sampling={"temperature": True}), "sampling_params"),
        (made(sampling={"json_schema": '{"items":' * 65 + "{}" + "}" * 65}), "has 66 levels"),
        (made(sampling={"structural_tag": "[" * 100}), "structural_tag has 100 levels; give one"),
        (made(logprob_start_len=-2), "logprob_start_len is -2; give one from 0"),
        (made(logprob_start_len=3), "the prompt's 2 tokens"),
        (made(top_logprobs_num=101), "top_logprobs_num is 101; give one from 0 to 100"),
        (made(top_logprobs_num=-1), "top_logprobs_num is -1"),
        (made(token_ids_logprob=[5] * 100_000), "12800000|more than 8388608"),
        (made(token_indices_to_pool=[2]), "positions in a prompt of 2 tokens"),
        (made(multi_item_delimiter_indices=[-1]), "positions in a prompt of 2 tokens"),
        (made(positional_embed_overrides="a"), "positional_embed_overrides"),
        (made(priority="high"), r"priority"),
        (made(session_id=5), "session_id"),
    ],
)
def test_what_would_end_a_scheduler_is_refused(
    request_: TokenizedGenerateReqInput, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_request(request_, VOCABULARY, CONTEXT)


@pytest.mark.parametrize(
    ("params", "prompts", "message"),
    [
        ({"n": 0}, 1, "n is a whole number from 1 to 1024, not 0"),
        ({"n": 1 << 40}, 1, "n is a whole number"),
        ({"n": True}, 1, "n is a whole number"),
        ({"n": None}, 1, "n is a whole number"),
        ({"n": 100}, 1000, "1000 prompts with n=100 are 100000 answers"),
        ([{}], 2, "one object or 2"),
        ([], 1, "found 0"),
        ([5], 1, "are an object, not 5"),
    ],
)
def test_the_number_of_answers(params: Any, prompts: int, message: str) -> None:
    check_size({"n": 3}, 2)
    check_size(None, 2)
    with pytest.raises(ValueError, match=message):
        check_size(params, prompts)


def test_types_of_sampling_parameters() -> None:
    fields = sampling_fields(SamplingParams)
    check_types({"temperature": 1, "stop": "a", "stop_token_ids": ["5"], "own": object()}, fields)
    for name, value in (("max_new_tokens", "b"), ("temperature", []), ("regex", 5), ("n", 1.5)):
        with pytest.raises(ValueError, match=rf"sampling_params\.{name}: Expected"):
            check_types({name: value}, fields)


def test_labels_that_the_metrics_lack() -> None:
    check_labels({"user": "a"}, ["user", "team"])
    check_labels(None, None)
    with pytest.raises(ValueError, match="has 'id'; the server's metrics have user, team"):
        check_labels({"user": "a", "id": "x"}, ["user", "team"])
    with pytest.raises(ValueError, match="have none"):
        check_labels({"id": "x"}, None)


_ERRORS = (TypeError("a"), KeyError("a"), IndexError(), RecursionError(), re.error("a"))


@pytest.mark.parametrize("error", _ERRORS)
def test_what_sglang_raises_becomes_a_refusal(error: Exception) -> None:
    with (
        pytest.raises(ValueError, match=f"the request cannot be read \\({type(error).__name__}"),
        malformed_is_refused("the request"),
    ):
        raise error


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_ids": []}, "no tokens"),
        ({"text": []}, "no tokens"),
        ({"text": "a", "rid": []}, "rid is empty"),
        ({"text": "a", "rid": ""}, "rid is empty"),
        ({"text": ["a", "b"], "rid": ["one"]}, "mismatch"),
        ({"text": "a", "sampling_params": {"n": 1 << 40}}, "n is a whole number"),
        ({"text": ["a"], "return_logprob": [], "watermark": []}, "watermark"),
    ],
)
def test_a_request_is_refused_before_it_is_expanded(fields: dict[str, Any], message: str) -> None:
    manager = SimpleNamespace(
        server_args=SimpleNamespace(enable_metrics=False, **{CARRIED: SimpleNamespace(config=1)})
    )
    request = GenerateReqInput(**fields)
    with pytest.raises(ValueError, match=message):
        validation.check_shape(manager, request)
    # SGLang then aborts nothing.
    assert (request.is_single, request.rid) == (False, [])


def test_a_session_has_the_prompt() -> None:
    request = GenerateReqInput(input_ids=[], session_params={"id": "a"})
    assert prompts_of(request) == 1
    assert prompts_of(GenerateReqInput(input_ids=[[1], [2]])) == 2
    assert prompts_of(GenerateReqInput(text="a")) == 1


def test_a_request_that_cannot_be_taken_in_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "current", SimpleNamespace())
    sent: list[Any] = []
    scheduler = SimpleNamespace(send_abort_output=lambda abort, _request: sent.append(abort))

    def original(_scheduler: object, request: Any) -> None:
        if request.rid == "wrong":
            raise AttributeError("nothing of the kind")

    for rid in ("right", "wrong"):
        validation._handle(original, scheduler, SimpleNamespace(rid=rid))
    (abort,) = sent
    assert abort.rid == "wrong"
    assert abort.finished_reason["status_code"] == 400
    assert "nothing of the kind" in abort.finished_reason["message"]


def test_an_empty_prompt_of_a_session_ends_alone() -> None:
    ended: list[str] = []
    for ids in ([], [5]):
        req = SimpleNamespace(
            to_finish=None, origin_input_ids=ids, set_finish_with_abort=ended.append
        )
        validation.check_prompt(req)
    assert ended == ["the prompt has no tokens; give a text, or token ids, of at least one token"]


@pytest.mark.parametrize(("embeds", "prompts"), [([[0.5, 1.0]], 1), ([[[0.5, 1.0]]] * 3, 3)])
def test_prompts_of_embeddings_are_counted(embeds: list[Any], prompts: int) -> None:
    request = SimpleNamespace(rid=None, text=None, input_ids=None, input_embeds=embeds)
    assert prompts_of(request) == prompts
