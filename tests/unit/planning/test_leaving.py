"""After how many uses a lower tier stores pages."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_ext.planning.compute_cost import ComputeCost
from sgl_ext.planning.costs import COMPUTE, Costs
from sgl_ext.planning.leaving import Reuse, store_after
from sgl_ext.planning.load_cost import LoadCost


def observed(*reached: int) -> Reuse:
    """Returns pages of which ``reached[n]`` were used more than ``n`` times."""
    reuse = Reuse()
    uses = np.array([sum(page < each for each in reached) for page in range(reached[0])], np.uint32)
    reuse.used(np.zeros_like(uses), uses)
    return reuse


def costs(load: float) -> Costs:
    """Returns the costs of a tier that loads a token in ``load`` times the time of computing it."""
    known = frozenset({COMPUTE, "ssd"})
    return Costs(
        ComputeCost(0.0, 1e-3), {"ssd": LoadCost(0.0, load * 1e-3)}, chunk=512, measured=known
    )


@pytest.mark.parametrize(
    ("load", "reached", "expected"),
    [
        (0.1, (1000, 500), 1),  # half of the pages are used again: saves 0.45, costs 0.1
        (0.1, (1000, 50, 40), 2),  # few are, but most of these once more
        (0.1, (1000, 50, 3, 2), 3),
        (0.5, (1000, 400, 100, 20), 4),
        (1.0, (1000, 1000, 1000), 4),  # loading saves nothing
        (3.0, (1000, 1000, 1000), 4),
        (0.1, (0,), 1),  # nothing is observed yet
    ],
)
def test_pages_are_stored_when_their_reuse_pays(
    load: float, reached: tuple[int, ...], expected: int
) -> None:
    found = costs(load)
    assert store_after(found, observed(*reached), "ssd") == expected
    ((kind, decided),) = found.decisions.kinds()
    assert (kind, [*decided.choices]) == ("store_after", [str(expected)])


def test_pages_are_stored_after_two_uses_while_costs_are_unknown() -> None:
    unknown = Costs(loads={"ssd": LoadCost()})
    assert store_after(unknown, observed(1000, 900), "ssd") == 2
    assert not unknown.decisions.kinds()


def test_the_same_decision_is_counted_once() -> None:
    found, reuse = costs(0.1), observed(1000, 500)
    for _ in range(3):
        store_after(found, reuse, "ssd")
    for _ in range(3):
        store_after(found, observed(1000, 10, 9), "ssd")
    ((_, decided),) = found.decisions.kinds()
    assert {name: choice.count for name, choice in decided.choices.items()} == {"1": 1, "2": 1}


def test_uses_are_counted_wherever_pages_were_between() -> None:
    reuse = Reuse()
    none, one, four = (np.full(8, uses, np.uint32) for uses in (0, 1, 4))
    reuse.used(none, one)
    assert reuse.again(1) == 1 / 10
    reuse.used(one[:4], four[:4])  # hits on the device, which are told later
    assert [reuse.again(uses) for uses in (1, 2, 3)] == [5 / 10, 5 / 6, 5 / 6]
    reuse.used(four, four + 1)  # uses beyond the observed numbers
    assert reuse.again(3) == 5 / 6


def test_old_observations_fade() -> None:
    reuse = Reuse()
    none, one, two = (np.full(1 << 15, uses, np.uint32) for uses in (0, 1, 2))
    for _ in range(2):
        reuse.used(none, two)
    assert reuse.again(1) > 0.99
    for _ in range(20):
        reuse.used(none, one)
    assert reuse.again(1) < 0.01
