"""Logprobs of prompts, where one of the batch has gone meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sgl_ext.config import ExtConfig
from sgl_ext.engine.core import runtime
from sgl_ext.engine.step import logprobs as skipped_logprobs

COUNTS = (3, 2, 4)
"""Of each prompt's logprobs: of all its tokens but the first one."""


@pytest.fixture(autouse=True)
def _active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "current", runtime.ExtRuntime(ExtConfig()))


def request(*, retracted: bool = False, finished: bool = False, chunks: int = 0) -> Any:
    return SimpleNamespace(
        is_retracted=retracted, finished=lambda: finished, inflight_middle_chunks=chunks
    )


def left(*reqs: Any, returned: bool = True) -> list[float]:
    """What SGLang is given to hand out: of request ``n`` the logprobs ``n.0``, ``n.1`` and so
    on."""
    row = [number + at / 10 for number, count in enumerate(COUNTS) for at in range(count)]
    output = LogitsProcessorOutput(
        next_token_logits=None, input_token_logprobs=torch.tensor(row, dtype=torch.float64)
    )
    counter = SimpleNamespace(
        calculate_num_input_logprobs=lambda _req, length, start: length - start
    )
    processor = SimpleNamespace(is_generation=True, logprob_result_processor=counter)
    result = SimpleNamespace(
        logits_output=output,
        copy_done=None,
        extend_input_len_per_req=[count + 1 for count in COUNTS],
        extend_logprob_start_len_per_req=[1] * len(COUNTS),
    )
    skipped_logprobs._cut(processor, SimpleNamespace(reqs=reqs, return_logprob=returned), result)
    assert output.input_token_logprobs is not None
    return [round(each, 1) for each in output.input_token_logprobs.tolist()]


FIRST, SECOND, THIRD = [0.0, 0.1, 0.2], [1.0, 1.1], [2.0, 2.1, 2.2, 2.3]


@pytest.mark.parametrize(
    ("gone", "expected"),
    [
        (request(retracted=True), FIRST + THIRD),
        (request(finished=True), FIRST + THIRD),
        (request(finished=True, chunks=1), FIRST + SECOND + THIRD),  # which SGLang does count
        (request(), FIRST + SECOND + THIRD),
    ],
)
def test_each_is_given_its_own(gone: Any, expected: list[float]) -> None:
    assert left(request(), gone, request()) == expected


def test_without_logprobs_nothing_is_touched() -> None:
    found = left(request(), request(retracted=True), request(), returned=False)
    assert found == FIRST + SECOND + THIRD
