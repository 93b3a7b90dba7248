"""What codes of keys tell of the attention to them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_ext._native import _clusters
from sgl_ext.clusters.activations import attention_mass
from sgl_ext.clusters.codes import CENTROIDS, Codes


@settings(deadline=None, max_examples=80)
@given(
    st.integers(1, 70), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 3, 4, 8]),
    st.integers(1, 3), st.sampled_from([0.1, 3.0, 60.0]), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_mass_is_the_softmax_of_the_tables(
    entries: int, kv_heads: int, group: int, subspaces: int, queries: int, spread: float,
    alone: bool, seed: int,
) -> None:  # fmt: skip
    chance = np.random.default_rng(seed)
    heads = kv_heads * group
    codes = chance.integers(0, CENTROIDS, (kv_heads, entries, subspaces)).astype(np.uint8)
    tables = chance.normal(0, spread, (queries, heads, subspaces, CENTROIDS)).astype(np.float32)
    beside = chance.normal(0, spread, (queries, heads)).astype(np.float32)
    if alone:
        beside[:] = -np.inf
    logits = np.zeros((queries, heads, entries))
    for head in range(heads):
        for at in range(subspaces):
            logits[:, head] += tables[:, head, at, codes[head // group, :, at]]
    highest = np.maximum(logits.max(axis=2), beside)[:, :, None]
    weights = np.exp(logits - highest)
    weights /= weights.sum(axis=2, keepdims=True) + np.exp(beside[:, :, None] - highest)
    found = _clusters.mass(codes, tables, beside, 2)
    np.testing.assert_allclose(found, weights.sum(axis=1), rtol=2e-4, atol=1e-7)


def sample(entries: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Keys and queries, some of whose directions matter more than others."""
    chance = np.random.default_rng(seed)
    mix = chance.normal(size=(2, 16, 16)) * np.geomspace(1, 0.02, 16)
    keys = np.einsum("nkd,kde->nke", chance.normal(size=(entries, 2, 16)), mix)
    asked = chance.normal(size=(300, 6, 16)) * np.geomspace(0.05, 2, 16)
    return keys.astype(np.float32), asked.astype(np.float32)


def test_few_keys_are_known_exactly() -> None:
    keys, queries = sample(CENTROIDS)
    codes = Codes.of(keys, queries, subspaces=4)
    beside = np.zeros(queries.shape[:2], np.float32)
    exact = attention_mass(queries, keys, 0.25, beside)
    # Centroids are in half precision.
    np.testing.assert_allclose(codes.mass(queries, 0.25, beside), exact, rtol=0.05, atol=1e-3)


def test_what_queries_do_not_look_at_costs_no_precision() -> None:
    keys, queries = sample(2000)
    beside = np.full(queries.shape[:2], -np.inf, np.float32)
    exact = attention_mass(queries, keys, 1.0, beside)

    def recovered(codes: Codes) -> float:
        estimated = codes.mass(queries, 1.0, beside)
        top = np.argpartition(estimated, -100, axis=1)[:, -100:]
        best = np.sort(exact, axis=1)[:, -100:].sum()
        return float(np.take_along_axis(exact, top, axis=1).sum() / best)

    # Queries that look everywhere alike make the metric that of the keys.
    alike = np.random.default_rng(1).normal(size=queries.shape).astype(np.float32)
    ours, plain = recovered(Codes.of(keys, queries, 4)), recovered(Codes.of(keys, alike, 4))
    assert ours > 0.93
    assert ours > plain + 0.02


def test_codes_are_a_small_part_of_the_keys() -> None:
    chance = np.random.default_rng(2)
    keys = chance.normal(size=(8192, 3, 64)).astype(np.float32)
    codes = Codes.of(keys[:300], chance.normal(size=(64, 9, 64)).astype(np.float32))
    assert codes.codes.shape == (3, 300, 8)
    of_all = 8192 * 3 * 8 + codes.centroids.nbytes + codes.projection.nbytes
    assert of_all < 0.06 * (2 * keys.astype(np.float16).nbytes)


def test_shapes_that_do_not_fit_are_refused() -> None:
    codes = np.zeros((2, 5, 4), np.uint8)
    good = {
        "tables": np.zeros((1, 4, 4, 256), np.float32),
        "beside": np.zeros((1, 4), np.float32),
    }
    assert _clusters.mass(codes, threads=1, **good).shape == (1, 5)
    for name, shape in (
        ("tables", (1, 3, 4, 256)), ("tables", (1, 4, 5, 256)), ("tables", (1, 4, 4, 16)),
        ("tables", (2, 4, 4, 256)), ("beside", (1, 3)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="different shapes"):
            _clusters.mass(codes, threads=1, **{**good, name: np.zeros(shape, np.float32)})


def test_large_keys_and_queries_that_look_nowhere() -> None:
    keys, queries = sample(600)
    keys += 300 * np.eye(16, dtype=np.float32)[3]  # as of models with a bias
    asked = queries + 300 * np.eye(16, dtype=np.float32)[3]
    beside = np.full(queries.shape[:2], 90_000.0 * 0.25, np.float32)
    exact = attention_mass(asked, keys, 0.25, beside)
    estimated = Codes.of(keys, asked, 4).mass(asked, 0.25, beside)
    assert np.isfinite(estimated).all()
    top = np.argpartition(estimated, -60, axis=1)[:, -60:]
    best = np.sort(exact, axis=1)[:, -60:].sum()
    assert np.take_along_axis(exact, top, axis=1).sum() > 0.8 * best
    nothing = Codes.of(keys, np.zeros_like(queries), 4).mass(queries, 0.25, beside * 0)
    assert np.isfinite(nothing).all()
    alike = Codes.of(np.ones((9, 2, 16), np.float32), queries, 4)
    np.testing.assert_allclose(
        alike.mass(queries, 0.25, beside * 0),
        attention_mass(queries, np.ones((9, 2, 16), np.float32), 0.25, beside * 0), rtol=1e-3,
    )  # fmt: skip


def test_threads_change_nothing() -> None:
    keys, queries = sample(900)
    codes, beside = Codes.of(keys, queries, 4), np.zeros((3, 6), np.float32)
    one = codes.mass(queries[:3], 0.25, beside, threads=1)
    assert (codes.mass(queries[:3], 0.25, beside, threads=2) == one).all()
    alone = [codes.mass(queries[at : at + 1], 0.25, beside[:1], threads=2) for at in range(3)]
    np.testing.assert_allclose(np.concatenate(alone), one, rtol=1e-5)


def test_subspaces_have_as_much_to_tell() -> None:
    from sgl_ext.clusters.codes import _balanced

    variance = np.array([0.9, 0.8, 0.7, 0.6, 0.05, 0.04, 0.03, 0.02], np.float32)
    for scale in (1.0, 100.0):
        parts = _balanced(scale * variance, 4).reshape(4, 2)
        assert sorted(map(sorted, parts.tolist())) == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert sorted(_balanced(np.zeros(8, np.float32), 4).tolist()) == list(range(8))
