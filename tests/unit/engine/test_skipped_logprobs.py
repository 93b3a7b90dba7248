"""Prompt logprobs of a batch from which a request was retracted or has ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sgl_ext.config import ExtConfig
from sgl_ext.engine.core import runtime
from sgl_ext.engine.workarounds import logprobs as skipped_logprobs

COUNTS = (3, 2, 4)
"""Number of logprobs of each prompt, whose first token has none."""


@pytest.fixture(autouse=True)
def _active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "current", runtime.ExtRuntime(ExtConfig()))


def request(*, retracted: bool = False, finished: bool = False, chunks: int = 0) -> Any:
    return SimpleNamespace(
        is_retracted=retracted, finished=lambda: finished, inflight_middle_chunks=chunks
    )


def left(*reqs: Any, returned: bool = True) -> list[float]:
    """Returns the logprobs that SGLang assigns; request ``n`` has ``n.0``, ``n.1`` and so on."""
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
        (request(finished=True, chunks=1), FIRST + SECOND + THIRD),  # SGLang counts this one
        (request(), FIRST + SECOND + THIRD),
    ],
)
def test_each_request_gets_its_own_logprobs(gone: Any, expected: list[float]) -> None:
    assert left(request(), gone, request()) == expected


def test_a_batch_without_logprobs_is_not_changed() -> None:
    found = left(request(), request(retracted=True), request(), returned=False)
    assert found == FIRST + SECOND + THIRD
