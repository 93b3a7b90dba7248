"""Tests of the swap benchmark: its metrics, its systems and its workload."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sgl_ext.bench.swap.load import Heard, at_rate, gaps_in_service, token_efficiency
from sgl_ext.bench.swap.runs import Workload, mean_answer, mean_pages
from sgl_ext.bench.swap.sweeps import highest_load
from sgl_ext.bench.swap.systems import (
    BESIDE_TIER,
    HICACHE,
    OURS,
    OURS_AGAIN,
    PER_PAGE,
    STOCK,
    WITHOUT,
    WITHOUT_ASYNC,
    Link,
    systems,
)
from sgl_ext.config import ExtConfig, SwapExperiment
from sgl_ext.config.swap import EXPERIMENT


def test_gaps_while_preempted_are_not_gaps_in_service() -> None:
    ticks = [at * 0.05 for at in range(100)]
    steady = Heard("steady", 0.0, 10, ticks)
    away = Heard("away", 0.0, 10, ticks[:20] + [t + 0.001 for t in ticks[60:]])
    gaps = gaps_in_service([steady, away])
    assert len(gaps) == 99 + 58
    assert max(gaps) < 0.06
    # A pause of all requests for one second counts as a gap in service.
    late = [t + (t > 2.0) for t in ticks]
    assert max(gaps_in_service([Heard("one", 0, 1, late), Heard("two", 0, 1, late)])) > 1


def test_token_efficiency_is_taken_over_five_iterations() -> None:
    # Two requests get a token every 50 ms; a swap stops both for a second after the 20th.
    ticks = [at * 0.05 + (at >= 20) for at in range(41)]
    found = token_efficiency([Heard("a", 0, 1, ticks), Heard("b", 0, 1, [t + 1e-4 for t in ticks])])
    assert len(found) == 7
    assert sorted(found)[1:] == pytest.approx([40] * 6)
    assert min(found) == pytest.approx(10 / 1.25)


def test_link_is_as_slow_relative_to_an_iteration_as_in_the_paper() -> None:
    config = Link(0.05, 20, 1_000_000, layers=30).config()
    assert 20 * 60 / config["operations_per_second"] == pytest.approx(1.16 * 0.05)
    assert 20 * 1e6 / config["bytes_per_second"] == pytest.approx(0.15 * 0.05, rel=1e-3)
    slower = Link(0.05, 20, 1_000_000, layers=30, times=3).config()
    for name, value in config.items():
        assert 3 * slower[name] == pytest.approx(value, rel=1e-3)


def test_every_system_can_be_configured() -> None:
    from sglang.srt.server_args import prepare_server_args

    names = (STOCK, HICACHE, "recompute", BESIDE_TIER, PER_PAGE, OURS, OURS_AGAIN, WITHOUT_ASYNC)
    names += WITHOUT
    policy = {"trace": "random", "quantum": 25}
    made = systems(names, 2048, "1GiB", policy, Link(0.05, 20, 1_000_000, 30))
    assert [each.name for each in made] == list(names)
    for each in made[2:]:
        config = ExtConfig.model_validate(json.loads(each.arguments[-1]))
        assert config.swap is not None
        assert config.swap.quantum == 25
        experiment = SwapExperiment.model_validate_json(each.environment[EXPERIMENT])
        assert experiment.trace == "random"
        assert experiment.wait is (each.name in (PER_PAGE, WITHOUT_ASYNC, "ours, swap-out waits"))
    for each in made[:2]:
        assert "--enable-ext" not in each.arguments
        args = prepare_server_args(["--model-path", "none", *each.arguments])
        assert args.enable_priority_scheduling


def test_conversations_are_the_same_at_any_rate(model: Path) -> None:
    workload = Workload(model, 5, 512, pause=2.0)
    one = workload.talks(3)
    faster = at_rate(one, 4.0)
    assert [talk.at for talk in faster] == pytest.approx([talk.at / 4 for talk in one])
    assert [talk.turns for talk in faster] == [talk.turns for talk in one]
    for talk in one:
        assert len(talk.turns) >= 2
        assert sum(len(turn.said) + turn.answer for turn in talk.turns) <= 512
    assert 0 < mean_answer(one) < 512
    assert 0 < mean_pages(one, 16) < 32


@pytest.mark.parametrize(
    ("objective", "load"), [(0.5, 0.7), (1.0, 0.7), (2.0, 0.85), (3.0, 1.0), (9.0, 1.3)]
)
def test_the_highest_load_of_an_objective_is_interpolated(objective: float, load: float) -> None:
    measured = [(0.7, 1.0), (1.0, 3.0), (1.3, 5.0)]
    assert highest_load(measured, objective) == pytest.approx(load)
