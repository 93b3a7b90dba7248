"""Time for which powers have deferred requests, in SGLang's traces."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from trace_kit import RecordedTrace, time_stats

from sgl_ext.engine.core import deferral


def request(recorded: RecordedTrace) -> Any:
    return SimpleNamespace(time_stats=time_stats(recorded))


def test_the_span_begins_with_the_first_deferral_and_names_all_powers() -> None:
    recorded = RecordedTrace()
    req = request(recorded)
    deferral.deferred(req, ["tiers"])
    time.sleep(0.05)
    deferral.deferred(req, ["peer", "clusters"])
    deferral.ended(req)
    (span,) = recorded.slices
    assert span.slice_name == "ext_wait"
    assert span.attrs == {"powers": "clusters, peer, tiers"}
    assert (span.end_time_ns or 0) - span.start_time_ns >= 50_000_000


@pytest.mark.parametrize("again", [False, True])
def test_a_request_that_was_not_deferred_since_its_last_admission_gets_no_span(again: bool) -> None:
    recorded = RecordedTrace()
    req = request(recorded)
    if again:
        deferral.deferred(req, ["tiers"])
        deferral.ended(req)
        recorded.slices.clear()
    deferral.ended(req)
    assert not recorded.slices
