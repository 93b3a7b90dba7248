"""Time limit on stop patterns: one that takes too long to match ends only its own request."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import distributed, runtime_context
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISHED_MATCHED_REGEX, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_ext.engine.core import runtime
from sgl_ext.engine.workarounds import stop_patterns
from sgl_ext.engine.workarounds.stop_patterns import Allowance, _check, require_served


class Letters:
    """Tokenizer with one token per letter."""

    eos_token_id = None
    additional_stop_token_ids = None

    def encode(self, text: str, **_kw: Any) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def answered(text: str, pattern: str) -> Any:
    """Returns a request whose answer so far is ``text``."""
    params = SamplingParams(stop_regex=pattern, max_new_tokens=1000)
    params.normalize(Letters())
    request = Req("one", "a", [1], params)
    request.tokenizer = Letters()
    request.output_ids.extend(map(ord, text))
    return request


def finished(request: Any) -> bool:
    return _check(Req._check_str_based_finish, request, 1)


@pytest.fixture(autouse=True)
def active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "current", SimpleNamespace())
    monkeypatch.setattr(stop_patterns, "_allowance", Allowance())
    monkeypatch.setattr(
        runtime_context, "get_parallel", lambda: SimpleNamespace(tp_size=1, pp_size=1)
    )


def test_a_pattern_that_matches_too_long_aborts_its_request() -> None:
    request = answered("the quick brown fox jumps over the lazy dog " * 4, "([a-z ]+)+Z")
    handler = signal.getsignal(signal.SIGALRM)
    assert finished(request)
    assert isinstance(request.finished_reason, FINISH_ABORT)
    assert request.finished_reason.status_code == 400
    assert "takes too long; use a pattern" in request.finished_reason.message
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize(("pattern", "ends"), [("dog$", True), ("cat", False), (r"\d+", False)])
def test_other_patterns_match_as_in_sglang(pattern: str, ends: bool) -> None:
    request = answered("the lazy dog", pattern)
    assert finished(request) is ends
    assert isinstance(request.finished_reason, FINISHED_MATCHED_REGEX) is ends
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("late", [True, False])
def test_all_ranks_abort_a_request_if_one_rank_is_late(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    monkeypatch.setattr(
        runtime_context, "get_parallel", lambda: SimpleNamespace(tp_size=2, pp_size=1)
    )
    group = SimpleNamespace(cpu_group="the ranks")
    monkeypatch.setattr(distributed, "get_tp_group", lambda: group)

    def all_reduce(found: torch.Tensor, how: object, ranks: object) -> None:
        assert (how, ranks) == (torch.distributed.ReduceOp.MAX, "the ranks")
        found |= late  # on the other rank

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    request = answered("the lazy dog", "cat|dog$")
    assert finished(request)
    assert isinstance(request.finished_reason, FINISH_ABORT) is late
    assert (request.finished_len is None) is late


def test_patterns_are_refused_with_pipeline_stages() -> None:
    with_pattern = answered("a", "a+").sampling_params
    stages = SimpleNamespace(pp_size=2)
    require_served(with_pattern, SimpleNamespace(pp_size=1))
    plain = SamplingParams(stop="a")
    plain.normalize(Letters())
    require_served(plain, stages)
    with pytest.raises(ValueError, match=r"--pp-size above 1, .*; use stop strings"):
        require_served(with_pattern, stages)


def test_the_allowance_is_shared_and_refills_with_time() -> None:
    allowance = Allowance()
    assert allowance.given(100.0) == 0.25
    allowance.took(0.2)
    assert allowance.given(100.0) == pytest.approx(0.05)
    allowance.took(0.3)
    assert allowance.given(100.0) == 0.01  # the minimum of a match
    assert allowance.given(101.0) == pytest.approx(0.1)
    assert allowance.given(1000.0) == 0.25


def test_time_off_the_cpu_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    request = answered("the lazy dog", "cat")
    asked = request.tokenizer.decode

    def decode(ids: list[int]) -> str:
        time.sleep(2 * Allowance.MOST)
        return str(asked(ids))

    monkeypatch.setattr(request.tokenizer, "decode", decode)
    assert not finished(request)
