"""Accounts of decisions: counts, predictions, measurements and errors."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_ext.planning.decisions import Decisions


def test_choices_are_counted_with_their_durations() -> None:
    decisions = Decisions()
    for key, load in (("a", 1.0), ("b", 3.0), ("c", 5.0)):
        chosen = decisions.least("kind", {"load": load, "compute": 4.0}, key)
        assert chosen == ("load" if load < 4 else "compute")
    decisions.ended("kind", "a", 2.0)
    decisions.ended("kind", "b", None)
    decisions.ended("kind", "unknown", 7.0)
    decisions.check_integrity()
    assert decisions.describe()["kind"] == {
        "choices": {
            "load": {
                "count": 2, "predicted_seconds": 4.0, "ended": 1, "measured_seconds": 2.0,
            },
            "compute": {
                "count": 1, "predicted_seconds": 4.0, "ended": 0, "measured_seconds": 0.0,
            },
        },
        "last": {"load": 5.0, "compute": 4.0},
        "error": 0.5,
        "compared": 1,
    }  # fmt: skip


def test_a_pending_decision_is_counted_once_until_it_changes() -> None:
    decisions = Decisions()
    for seconds in (1.0, 2.0, 9.0, 9.0, 1.0):
        decisions.least("kind", {"load": seconds, "compute": 5.0}, "request")
    assert decisions.count("kind") == 3
    decisions.ended("kind", "request", 1.0)
    decisions.least("kind", {"load": 1.0, "compute": 5.0}, "request")
    assert decisions.count("kind") == 4
    assert decisions.count("another") == 0


def test_the_error_is_the_median_of_recent_relative_errors() -> None:
    decisions = Decisions()
    for _ in range(1000):
        decisions.observed("forward", 3.0, 1.0)
    for predicted in (1.1, 0.5, 1.2) * 100:
        decisions.observed("forward", predicted, 1.0)
    decisions.observed("forward", 1.0, 0.0)  # the clock did not see it
    assert decisions.describe()["forward"]["error"] == pytest.approx(0.2)
    assert decisions.describe()["forward"]["choices"] == {}
    assert decisions.describe()["forward"]["compared"] == 1300


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b"]),
            st.sampled_from(["1", "2", "3", None]),
            st.sampled_from(["begin", "end", "drop"]),
            st.floats(0, 10),
        ),
        max_size=60,
    )
)
def test_accounts_add_up_after_any_calls(calls: list[tuple[str, str | None, str, float]]) -> None:
    decisions = Decisions()
    for kind, key, what, seconds in calls:
        if what == "begin":
            decisions.least(kind, {"load": seconds, "compute": 5.0}, key)
        elif key is not None:
            decisions.ended(kind, key, seconds if what == "end" else None)
        decisions.check_integrity()


def test_memory_is_bounded() -> None:
    decisions = Decisions()
    for number in range(5000):
        decisions.least("kind", {"load": 1.0}, f"{number}")
        decisions.observed("kind", 1.0, 2.0)
    decisions.check_integrity()
    assert len(decisions._pending) == 1024
    assert len(decisions._kinds["kind"].recent) == 256
    assert decisions.count("kind") == 5000
