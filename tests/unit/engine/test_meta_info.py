"""Reports of the powers in ``meta_info``, of which a stream sends each entry with its next part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sgl_ext.engine.core.meta_info import HOOKS, tell, told, unsent

(SEND,) = (hook.function for hook in HOOKS)


def request(*, stream: bool) -> Any:
    req = SimpleNamespace(customized_info=None, stream=stream, over=False)
    req.finished = lambda: req.over
    return req


def sent(*reqs: Any) -> list[list[int]] | None:
    """Returns the numbers of the entries that are sent for each request after a step."""
    # SGLang has already added the entries as if there were one for each token.
    outputs = SimpleNamespace(output_reqs=[*reqs], customized_info={"ext": [[None]] * len(reqs)})
    SEND(outputs, dp_rank=0, is_idle_batch=False)
    found = outputs.customized_info.get("ext")
    return None if found is None else [[entry["n"] for entry in each] for each in found]


def test_a_stream_shows_what_was_told_after_its_first_token() -> None:
    streamed, whole, silent = (request(stream=stream) for stream in (True, False, True))
    tell(streamed, {"power": "restore", "n": 1})
    tell(whole, {"power": "restore", "n": 2})
    assert sent(silent, streamed, whole) == [[], [1], []]
    assert sent(streamed, whole) is None
    tell(streamed, {"power": "swap", "n": 3})
    tell(whole, {"power": "swap", "n": 4})
    whole.over = True
    assert sent(streamed, silent, whole) == [[3], [], [2, 4]]


def test_an_entry_that_was_sent_does_not_change() -> None:
    streamed = request(stream=True)
    tell(streamed, {"power": "swap", "n": 1})
    tell(streamed, {"power": "tiers", "n": 2})
    assert [entry["n"] for entry in unsent(streamed, "swap")] == [1]
    assert sent(streamed) == [[1, 2]]
    assert unsent(streamed, "swap") == []
    assert len(told(streamed, "swap")) == 1
    assert unsent(request(stream=True), "swap") == []


def test_a_request_that_no_power_served_has_no_report() -> None:
    assert sent(request(stream=True)) is None
