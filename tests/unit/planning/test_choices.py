"""Decisions by the cost model, with costs that are known exactly."""

from __future__ import annotations

import pytest

from sgl_ext.planning import choices
from sgl_ext.planning.compute_cost import ComputeCost, DecodeCost
from sgl_ext.planning.costs import COMPUTE, DECODE, HOST, MOVE, Costs
from sgl_ext.planning.load_cost import LoadCost


def costs(*, load: float = 1e-5, compute: float = 1e-3, decode: float = 0.06) -> Costs:
    found = Costs()
    channels = {name: LoadCost(0.0, load) for name in (HOST, MOVE, "ssd")}
    found.seed(ComputeCost(0.0, compute), channels, DecodeCost(decode, 1e-9))
    return found


def counted(costs: Costs, kind: str) -> dict[str, int]:
    found = dict(costs.decisions.kinds())
    costs.decisions.check_integrity()
    return {name: each.count for name, each in found[kind].choices.items()}


def test_the_scheduler_waits_for_short_swap_ins_or_if_few_requests_run() -> None:
    """FastSwitch §3.2: the iterations lost by all running requests against those of one."""
    assert choices.waits_for_swap_in(Costs(), 1 << 30, 100, "r")  # nothing is measured yet
    known = costs()
    assert choices.waits_for_swap_in(known, 1000, 0, "a")
    assert choices.waits_for_swap_in(known, 1000, 6, "b")
    assert not choices.waits_for_swap_in(known, 1000, 7, "c")
    assert not choices.waits_for_swap_in(known, 20_000, 2, "d")
    assert choices.waits_for_swap_in(known, 20_000, 1, "e")
    assert counted(known, "wait_or_overlap") == {"wait": 2, "overlap": 2}


def test_a_swapped_request_is_recomputed_only_if_that_costs_less() -> None:
    slow = costs(load=2e-3)
    assert not choices.recomputes(Costs(), 0, 1000, 3, "auto", "r")  # nothing is measured yet
    assert not choices.recomputes(slow, 1000, 1000, 3, "auto", "r")  # nothing to load
    assert choices.recomputes(slow, 0, 1000, 0, "auto", "a")
    assert choices.recomputes(slow, 0, 1000, 3, "wait", "b")
    # Beside decode steps only this request waits; computing would stop three others.
    assert not choices.recomputes(slow, 0, 1000, 3, "auto", "c")
    assert not choices.recomputes(slow, 0, 1000, 3, "overlap", "d")
    assert not choices.recomputes(costs(), 0, 1000, 0, "auto", "e")
    assert counted(slow, "swap_in_or_recompute") == {"recompute": 2, "swap_in": 2}


def test_a_request_that_is_recomputed_again_is_counted_again() -> None:
    slow = costs(load=2e-3)
    for _ in range(3):
        assert choices.recomputes(slow, 0, 1000, 0, "auto", "r")
    assert counted(slow, "swap_in_or_recompute") == {"recompute": 3}


def test_a_preempted_request_drops_its_kv_only_if_computing_is_clearly_faster() -> None:
    assert choices.keeps(Costs(), 1000)
    assert choices.keeps(costs(load=1.5e-3), 1000)
    assert not choices.keeps(costs(load=3e-3), 1000)


def test_chunks_are_linked_unless_moving_them_is_slower() -> None:
    known = costs()
    assert choices.links(known, 100, 0, "a")
    choices.linked(known, 100, "a", 2e-3)
    assert choices.links(known, 0, 0, "b")
    assert not choices.links(costs(load=2e-3), 100, 0, "c")
    found = dict(known.decisions.kinds())["link_or_compute"].choices["link"]
    assert (found.count, found.ended, found.measured_seconds) == (1, 1, 2e-3)


@pytest.mark.parametrize(("later", "links"), [(1e-3, True), (5.0, False)])
def test_the_first_move_does_not_decide_alone(later: float, links: bool) -> None:
    found = Costs()
    found.computed(0, 512, 0.5)
    found.loaded(MOVE, 100, 5.0)  # as if libraries were loaded
    for number in range(2):
        assert choices.links(found, 100, 0, f"{number}")
        found.loaded(MOVE, 100, later)
    assert choices.links(found, 100, 0, "then") == links


def test_slower_moves_are_tried_within_a_share_of_the_time() -> None:
    """The host link becomes fast again; only trials can show it."""
    slow = costs(load=4e-3)
    tried = [
        number for number in range(1000)
        if not choices.recomputes(slow, 0, 1000, 0, "auto", f"{number}")
    ]  # fmt: skip
    assert 10 <= len(tried) <= 1000 / 16 / 4 + 1
    for number in tried[:8]:
        slow.loaded(HOST, 1000, 1e-3)
        assert number >= 0
    assert not choices.recomputes(slow, 0, 1000, 0, "auto", "later")


@pytest.mark.parametrize("name", ["ssd", COMPUTE])
def test_a_tier_is_waited_for_while_a_cost_is_unknown(name: str) -> None:
    known = costs(load=1.0)
    assert not known.worth_loading("ssd", 1000, 0)
    known.measured -= {name}
    assert known.worth_loading("ssd", 1000, 0)
    assert counted(known, "wait_for_tier") == {"compute": 1}


def test_a_tier_is_compared_with_computing_at_the_position_of_its_tokens() -> None:
    known = Costs(ComputeCost(0.0, 1e-4, 1e-7), {"ssd": LoadCost(0.1, 2e-4)}, chunk=512)
    known.measured = frozenset({COMPUTE, "ssd"})
    assert not known.worth_loading("ssd", 1000, 0)  # 0.3 s; computing takes 0.15 s
    assert known.worth_loading("ssd", 1000, 4000)  # computing takes 0.55 s
    assert not known.worth_loading("ssd", 100, 4000)  # latency
    assert counted(known, "wait_for_tier") == {"compute": 2, "wait": 1}


def test_observations_make_costs_known_and_record_errors() -> None:
    found = Costs()
    names = (COMPUTE, DECODE, HOST)
    assert not any(map(found.known, names))
    epoch = found.epoch
    for _ in range(20):
        found.forwarded([(0, 100), (50, 350)], 0.4)
        found.decoded(4, 0.08)
        found.loaded(HOST, 160, 0.01)
        found.loaded("peer", 16, 0.0)  # too fast for the clock
        found.check_integrity()
    assert all(map(found.known, names))
    assert not found.known("peer")
    assert found.epoch == epoch + 3
    assert not found.forwards  # of one prompt
    assert found.decode.seconds(8) == pytest.approx(0.08, rel=1e-3)
    errors = {kind: each.error for kind, each in found.decisions.kinds()}
    assert errors == pytest.approx({"forward": 0.0, "decode": 0.0, HOST: 0.0}, abs=1e-6)
