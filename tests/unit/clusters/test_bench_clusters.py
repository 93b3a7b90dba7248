"""Selectors of ``bench clusters`` on a recorded context of random numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stored import recorded_context

from sgl_ext.bench.clusters.clustering import best_clusters, cluster
from sgl_ext.bench.clusters.mass import relative_mass
from sgl_ext.bench.clusters.samples import Layer
from sgl_ext.bench.clusters.selectors import (
    EXACT,
    OURS,
    POSITION,
    SELECTORS,
    swarm,
)
from sgl_ext.clusters.activations import Activations, log_sum
from sgl_ext.clusters.profile import Options, Profile

BLOCK = 4


@pytest.fixture(scope="module")
def layer() -> Layer:
    """Returns a layer of a recorded context, which is the input of the selectors."""
    recorded = recorded_context()
    options = Options(subspaces=4, window=40).fitted(len(recorded.tokens), BLOCK)
    keys, queries = recorded.layer(1).keys, recorded.queries[1, -30:]
    sinks, end = options.sinks, len(keys) - options.window
    near = np.concatenate([keys[:sinks], keys[end:]])
    scale = recorded.geometry.scale
    return Layer(
        1, BLOCK, keys[sinks:end], queries, log_sum(queries, near, scale), scale,
        Profile.of(recorded.layer(1), options, BLOCK),
    )  # fmt: skip


@pytest.mark.parametrize("name", SELECTORS)
def test_selectors_fill_the_budget_and_mass_grows_with_it(name: str, layer: Layer) -> None:
    selector = SELECTORS[name](layer)
    assert selector.index_bytes > 0
    before = np.zeros(len(layer.queries))
    for budget in (16, 64, len(layer.keys)):
        chosen = selector.select(budget)
        assert chosen.shape == layer.mass.shape
        counts = chosen.sum(axis=1)
        # The budget is rounded to whole blocks of every device.
        assert (counts >= min(budget, len(layer.keys)) - 16).all()
        assert (counts <= budget + 8 * BLOCK).all()
        found = relative_mass(layer, chosen)
        assert (found <= 1 + 1e-6).all()
        mass = np.where(chosen, layer.mass, 0).sum(axis=1)
        assert (mass >= before - 1e-6).all()
        before = mass
    np.testing.assert_allclose(relative_mass(layer, chosen), 1, rtol=1e-5)


def test_exact_selector_is_optimal_and_ours_beats_position(layer: Layer) -> None:
    mass = {
        name: relative_mass(layer, SELECTORS[name](layer).select(40)).mean() for name in SELECTORS
    }
    assert mass[EXACT] == pytest.approx(1, abs=1e-6)
    assert mass[OURS] > mass[POSITION]
    assert max(mass.values()) <= 1 + 1e-6


def test_swarm_cuts_its_last_cluster_at_the_budget(layer: Layer) -> None:
    selector = swarm(layer)
    for budget in (3, 10, 50):
        assert (selector.select(budget).sum(axis=1) == budget).all()
        for row, (which, entries) in enumerate(selector.chosen(budget)):
            chosen = np.flatnonzero(selector.select(budget)[row])
            assert set(chosen) <= set(entries.tolist())
            clusters = selector.clusters
            last = clusters.members[clusters.starts[which[-1]] : clusters.starts[which[-1] + 1]]
            others = set(entries.tolist()) - set(last.tolist())
            assert others <= set(chosen.tolist())


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 120), st.integers(1, 9), st.integers(1, 130), st.integers(0, 1 << 16))
def test_best_clusters_fill_the_budget(
    entries: int, neighbours: int, budget: int, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    mass = chance.gamma(0.3, size=(64, entries)).astype(np.float32)
    clusters = cluster(Activations.of([mass], 0.1), neighbours=neighbours)
    scores = chance.random(len(clusters), np.float32)
    chosen, found = best_clusters(scores, clusters, budget)
    expected: set[int] = set()
    for at, one in enumerate(np.argsort(-scores, kind="stable")):
        if len(expected) >= min(budget, entries):
            assert len(chosen) == at
            break
        expected |= set(clusters.members[clusters.starts[one] : clusters.starts[one + 1]].tolist())
    assert found.tolist() == sorted(expected)
