"""Tests of the front end's checks, which refuse requests that would end a scheduler."""

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
from sgl_ext.engine.workarounds import validation
from sgl_ext.engine.workarounds.checks import (
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
    """Returns a tokenized request as SGLang would send it to the scheduler."""
    fields: dict[str, Any] = {
        "rid": "one", "input_text": "text", "input_ids": array("q", ids), "input_embeds": None,
        "mm_inputs": None, "token_type_ids": None,
        "sampling_params": SamplingParams(**sampling or {}),
        "return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 0,
        "token_ids_logprob": None, "stream": False,
    }  # fmt: skip
    fields.update(more)
    return TokenizedGenerateReqInput(**fields)


def test_valid_requests_pass() -> None:
    check_request(made(), VOCABULARY, CONTEXT)
    custom = {"ext_composition": {"chunks": [{"at": 1}]}}
    sampling = {"stop_token_ids": [0, 99], "logit_bias": {"5": -100.0}, "custom_params": custom}
    check_request(made((0, 99), sampling, top_logprobs_num=20), VOCABULARY, CONTEXT)
    schema = '{"pattern": "\\"' + "[" * 100 + '", "items": {}}'
    check_request(made(sampling={"json_schema": schema}), VOCABULARY, CONTEXT)
    session = SessionParams(id="a")
    check_request(made((), session_params=session, return_logprob=False), VOCABULARY, CONTEXT)
    # The prompt of a session begins with its earlier turns.
    check_request(made(session_params=session, logprob_start_len=130), VOCABULARY, CONTEXT)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (made(()), "the prompt has no tokens"),
        (made((5, 100)), "input_ids contain the token id 100; expected ids from 0 to 99"),
        (made((-1,)), "token id -1"),
        (made(sampling={"stop_token_ids": [100]}), "stop_token_ids contain the token id 100"),
        (made(sampling={"logit_bias": {"5": float("nan")}}), "logit_bias of token 5 is nan"),
        (made(sampling={"logit_bias": {"5": 1e308}}), "logit_bias of token 5 is 1e\\+308"),
        (made(sampling={"top_k": 1 << 40}), "top_k is 1099511627776"),
        (made(sampling={"min_new_tokens": 1 << 40}), "min_new_tokens is"),
        (made(sampling={"repetition_penalty": 1e-320}), "repetition_penalty is 1e-320"),
        (made(sampling={"temperature": True}), "sampling_params"),
        (made(sampling={"json_schema": '{"items":' * 65 + "{}" + "}" * 65}), "nested 66 levels"),
        (made(sampling={"structural_tag": "[" * 100}), "structural_tag is nested 100 levels deep"),
        (made(logprob_start_len=-2), "logprob_start_len is -2; expected 0"),
        (made(logprob_start_len=3), "expected 0 to 2, the tokens of the prompt"),
        (made(top_logprobs_num=101), "top_logprobs_num is 101; expected 0 to 100"),
        (made(top_logprobs_num=-1), "top_logprobs_num is -1"),
        (made(token_ids_logprob=[5] * 100_000), "12800000|more than 8388608"),
        (made(token_indices_to_pool=[2]), "positions in the prompt, from 0 to below its 2"),
        (made(multi_item_delimiter_indices=[-1]), "positions in the prompt, from 0 to below its 2"),
        (made(positional_embed_overrides="a"), "positional_embed_overrides"),
        (made(priority="high"), r"priority"),
        (made(session_id=5), "session_id"),
    ],
)
def test_requests_that_would_end_a_scheduler_are_refused(
    request_: TokenizedGenerateReqInput, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_request(request_, VOCABULARY, CONTEXT)


@pytest.mark.parametrize(
    ("params", "prompts", "message"),
    [
        ({"n": 0}, 1, "n must be an integer from 1 to 1024, found 0"),
        ({"n": 1 << 40}, 1, "n must be an integer"),
        ({"n": True}, 1, "n must be an integer"),
        ({"n": None}, 1, "n must be an integer"),
        ({"n": 100}, 1000, "1000 prompts with n=100 request 100000 answers"),
        ([{}], 2, "one object, or a list of 2"),
        ([], 1, "found a list of 0"),
        ([5], 1, "must be an object, found 5"),
    ],
)
def test_invalid_numbers_of_answers_are_refused(params: Any, prompts: int, message: str) -> None:
    check_size({"n": 3}, 2)
    check_size(None, 2)
    with pytest.raises(ValueError, match=message):
        check_size(params, prompts)


def test_sampling_parameters_of_a_wrong_type_are_refused() -> None:
    fields = sampling_fields(SamplingParams)
    check_types({"temperature": 1, "stop": "a", "stop_token_ids": ["5"], "own": object()}, fields)
    for name, value in (("max_new_tokens", "b"), ("temperature", []), ("regex", 5), ("n", 1.5)):
        with pytest.raises(ValueError, match=rf"sampling_params\.{name}: Expected"):
            check_types({name: value}, fields)


def test_labels_that_the_metrics_lack_are_refused() -> None:
    check_labels({"user": "a"}, ["user", "team"])
    check_labels(None, None)
    with pytest.raises(ValueError, match="has 'id'; the server allows user, team"):
        check_labels({"user": "a", "id": "x"}, ["user", "team"])
    with pytest.raises(ValueError, match="allows none"):
        check_labels({"id": "x"}, None)


_ERRORS = (TypeError("a"), KeyError("a"), IndexError(), RecursionError(), re.error("a"))


@pytest.mark.parametrize("error", _ERRORS)
def test_errors_of_sglang_become_a_value_error(error: Exception) -> None:
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
        ({"text": "a", "sampling_params": {"n": 1 << 40}}, "n must be an integer"),
        ({"text": ["a"], "return_logprob": [], "watermark": []}, "watermark"),
    ],
)
def test_a_request_is_refused_before_it_is_expanded(fields: dict[str, Any], message: str) -> None:
    manager = SimpleNamespace(
        server_args=SimpleNamespace(enable_metrics=False, **{CARRIED: SimpleNamespace(config=1)})
    )
    request = GenerateReqInput(**fields)
    with pytest.raises(ValueError, match=message):
        validation.check_count(manager, request)
        validation.check_shape(manager, request)
    # With these values SGLang has nothing to abort.
    assert (request.is_single, request.rid) == (False, [])


def test_a_session_request_without_tokens_counts_as_one_prompt() -> None:
    request = GenerateReqInput(input_ids=[], session_params={"id": "a"})
    assert prompts_of(request) == 1
    assert prompts_of(GenerateReqInput(input_ids=[[1], [2]])) == 2
    assert prompts_of(GenerateReqInput(text="a")) == 1


def test_a_request_that_the_scheduler_cannot_accept_is_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_an_empty_prompt_of_a_session_is_aborted() -> None:
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
