"""A plan covers every token once, and its parts add up."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sgl_ext.planning.plan import Compute, Link, PrefillPlan, Source, Span

CHUNKS = (0, 1)


def planned(*parts: tuple[int, float | None]) -> PrefillPlan:
    """Returns a plan of ``parts``: tokens, and the work of each if linked; None if computed."""
    spans, at = [], 0
    for length, work in parts:
        source = Compute() if work is None else Link(0, 0, work)
        spans.append(Span(at, at + length, source))
        at += length
    return PrefillPlan(spans)


@st.composite
def plans(draw: st.DrawFn) -> PrefillPlan:
    spans, at = [], 0
    for length in draw(st.lists(st.integers(1, 9), max_size=8)):
        chunk = draw(st.sampled_from([None, *CHUNKS]))
        work = draw(st.sampled_from([0.0, 0.0, 0.15, 0.5]))
        source = Compute() if chunk is None else Link(chunk, draw(st.integers(0, at)), work)
        spans.append(Span(at, at + length, source))
        at += length
    return PrefillPlan([*spans, Span(at, at + draw(st.integers(1, 9)), Compute())])


def sources(plan: PrefillPlan, start: int, end: int) -> list[Source]:
    return [span.source for span in plan.between(start, end) for _ in range(span.start, span.end)]


@given(plans(), st.integers(0, 60), st.integers(0, 60))
def test_between_and_computed_agree_with_the_whole_plan(
    plan: PrefillPlan, start: int, length: int
) -> None:
    end = start + length
    whole = sources(plan, 0, 130)
    assert len(whole) == 130
    assert sources(plan, start, end) == whole[start:end]
    work = sum(source.work for source in whole[start:end])
    assert work - 1e-5 < plan.computed(start, end) < work + 1
    assert whole[len(plan) - 1 :] == [Compute()] * (131 - len(plan))


@given(plans(), st.integers(0, 60), st.integers(1, 60))
@example(planned((9, 0.15), (9, 0.15), (9, 0.15), (9, 0.15), (4, 0.15), (1, 0.0), (1, None)), 0, 6)
@example(planned((1, 0.15), (1, 0.0), (1, None)), 0, 1)
@example(planned((4, 0.5), (3, 0.0), (2, None)), 0, 2)
def test_reach_spends_the_budget_and_goes_as_far_as_possible(
    plan: PrefillPlan, start: int, budget: int
) -> None:
    end = plan.reach(start, budget)
    assert plan.computed(start, end) == budget
    further = sources(plan, end, end + 100)
    assert sources(plan, start, end)[-1].work > 0  # the last token is computed in any case
    idle = next(at for at, source in enumerate(further) if source.work)
    assert plan.computed(start, end + idle + 1) > budget


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [Span(1, 2, Compute())],
        [Span(0, 2, Link(0, 0)), Span(3, 4, Compute())],
        [Span(0, 2, Link(0, 0)), Span(1, 4, Compute())],
        [Span(0, 0, Compute())],
        [Span(0, 2, Compute()), Span(2, 4, Link(0, 2))],
    ],
)
def test_invalid_spans_are_refused(spans: list[Span]) -> None:
    with pytest.raises(ValueError, match="plan"):
        PrefillPlan(spans)
