"""Estimates of durations under noise, outliers and drift."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from statistics import median

import pytest

from sgl_ext.planning.learner import Features, Learner

TRUE = 5e-3, 2e-4, 2e-8


def seconds_of(costs: Features, features: Features) -> float:
    return sum(cost * each for cost, each in zip(costs, features, strict=True))


def forwards(chance: random.Random, count: int) -> Iterator[Features]:
    """Yields forwards of 1 to 2,048 tokens behind prefixes of up to 6,000."""
    for _ in range(count):
        tokens = int(min(2048, max(1, chance.lognormvariate(5, 1.5))))
        begin = chance.randrange(6000)
        yield 1.0, tokens, tokens * (begin + tokens / 2)


def errors(
    learner: Learner, true: Features, chance: random.Random, count: int, *, noise: float
) -> list[float]:
    """Returns the relative errors of the predictions for the next forwards, by true costs.

    A twentieth of the forwards takes up to ten times as long.
    """
    found = []
    costs: Features | None = None
    for features in forwards(chance, count):
        expected = seconds_of(true, features)
        if costs is not None:
            found.append(abs(seconds_of(costs, features) - expected) / expected)
        late = chance.uniform(2, 10) if chance.random() < 0.05 else 1.0
        costs = learner.observe(features, expected * math.exp(noise * chance.gauss(0, 1)) * late)
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.05, 0.25])
def test_noise_and_outliers_average_out(noise: float, seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311
    learner = Learner()
    errors(learner, TRUE, chance, 64, noise=noise)
    assert median(errors(learner, TRUE, chance, 200, noise=noise)) < 0.7 * noise


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
@pytest.mark.parametrize("believed", [None, TRUE])
def test_a_change_of_speed_is_followed_within_a_few_operations(
    factor: float, believed: Features | None
) -> None:
    chance = random.Random(1)  # noqa: S311
    learner = Learner(believed)
    errors(learner, TRUE, chance, 150, noise=0.1)
    changed: Features = tuple(factor * each for each in TRUE)
    assert errors(learner, changed, chance, 2, noise=0.0)[-1] > 0.5
    found = errors(learner, changed, chance, 100, noise=0.1)
    assert median(found[5:15]) < 0.12
    assert median(found[5:]) < 0.1


def test_one_delayed_operation_changes_little() -> None:
    learner = Learner()
    for size in range(1, 40):
        before = learner.observe((1.0, size), 0.01 + 0.001 * size)
    after = learner.observe((1.0, 10.0), 1e3)
    assert after == pytest.approx(before, rel=1e-6)


def test_a_profile_outweighs_the_first_outliers() -> None:
    learner = Learner((0.0, 1.0))
    for _ in range(2):
        assert learner.observe((1.0, 10.0), 1e3) == pytest.approx((0.0, 1.0))
    for _ in range(4):
        costs = learner.observe((1.0, 10.0), 30.0)
    assert seconds_of(costs, (1.0, 10.0)) == pytest.approx(30.0)


def test_operations_of_one_size_are_attributed_to_the_main_feature() -> None:
    for main, expected in ((0, (0.5, 0.0)), (1, (0.0, 0.05))):
        learner = Learner(main=main)
        for _ in range(20):
            costs = learner.observe((1.0, 10.0), 0.5)
        assert costs == pytest.approx(expected, abs=1e-6)
