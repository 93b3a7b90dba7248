"""Choice of the requests that are preempted for a more urgent one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_ext.swap.victims import Running, choose_victims

RUNNING = [Running(1, 0.0, 100), Running(0, 1.0, 100), Running(0, 2.0, 100), Running(3, 3.0, 100)]


@pytest.mark.parametrize(
    ("urgency", "lacking", "margin", "victims"),
    [
        (2, 50, 0, [2]),  # the newest of the least urgent
        (2, 100, 0, [2, 1]),  # as much as is lacking is not enough
        (2, 250, 0, [2, 1, 0]),
        (2, 300, 0, []),  # the one of urgency 3 stays
        (2, 250, 1, []),  # the one of urgency 1 is within the margin
        (0, 50, 0, []),
        (2, -1, 0, [2]),  # memory suffices; a place in the batch is needed
    ],
)
def test_victims(urgency: int, lacking: float, margin: int, victims: list[int]) -> None:
    assert choose_victims(RUNNING, urgency, lacking, margin) == victims


running = st.builds(Running, st.integers(0, 3), st.floats(0, 9), st.integers(1, 100))


@given(st.lists(running, max_size=8), st.integers(0, 4), st.integers(-10, 400), st.integers(0, 2))
def test_victims_suffice_and_are_less_urgent(
    able: list[Running], urgency: int, lacking: int, margin: int
) -> None:
    victims = choose_victims(able, urgency, lacking, margin)
    assert len({*victims}) == len(victims)
    assert all(urgency - able[at].urgency > margin for at in victims)
    if victims:
        assert sum(able[at].tokens for at in victims) > lacking
        # Without the last victim there would not be enough.
        assert len(victims) == 1 or sum(able[at].tokens for at in victims[:-1]) <= lacking
    else:
        able = [one for one in able if urgency - one.urgency > margin]
        assert not able or sum(one.tokens for one in able) <= lacking
