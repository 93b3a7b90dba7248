"""Tests of codes of keys, from which the attention to the keys is estimated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_ext._native import _clusters
from sgl_ext.clusters.activations import attention_mass
from sgl_ext.clusters.codes import CENTROIDS, Codes, bfloat16


@settings(deadline=None, max_examples=80)
@given(
    st.integers(1, 70), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 3, 4, 8]),
    st.integers(1, 3), st.integers(1, 3), st.sampled_from([0.1, 1.0, 8.0]), st.booleans(),
    st.integers(0, 99),
)  # fmt: skip
def test_mass_is_the_softmax_over_the_centroids(
    entries: int, kv_heads: int, group: int, subspaces: int, width: int, queries: int,
    spread: float, alone: bool, seed: int,
) -> None:  # fmt: skip
    chance = np.random.default_rng(seed)
    heads, head_dim = kv_heads * group, subspaces * width
    codes = chance.integers(0, CENTROIDS, (kv_heads, entries, subspaces)).astype(np.uint8)
    bits, wide = bfloat16(chance.normal(size=(kv_heads, head_dim, CENTROIDS)))
    projection = chance.normal(size=(kv_heads, head_dim, head_dim)).astype(np.float32)
    mean = chance.normal(size=(kv_heads, head_dim)).astype(np.float32)
    asked = chance.normal(0, spread, (queries, heads, head_dim)).astype(np.float32)
    beside = chance.normal(0, spread, (queries, heads)).astype(np.float32)
    if alone:
        beside[:] = -np.inf
    expected = np.zeros((queries, entries))
    for head in range(heads):
        kv = head // group
        query = 0.25 * asked[:, head].astype(np.float64)
        subspace = np.arange(head_dim) // width
        keys = wide[kv][np.arange(head_dim), codes[kv][:, subspace]].astype(np.float64)
        logits = query @ projection[kv] @ keys.T + (query @ mean[kv])[:, None]
        highest = np.maximum(logits.max(axis=1), beside[:, head])[:, None]
        weights = np.exp(logits - highest)
        expected += (
            weights / (weights.sum(axis=1) + np.exp(beside[:, head] - highest[:, 0]))[:, None]
        )
    coded = _clusters.Codes(codes, bits, projection, mean)
    found = _clusters.mass(coded, asked, 0.25, beside, 2)
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-6)


@settings(deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.booleans(),
    st.integers(0, 99),
)  # fmt: skip
def test_the_nearest_centroid_is_the_first_of_the_nearest(
    subspaces: int, count: int, size: int, width: int, whole: bool, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    points = chance.normal(size=(subspaces, count, width)).astype(np.float32)
    centroids = chance.normal(size=(subspaces, size, width)).astype(np.float32)
    if whole:  # many are equally near
        points, centroids = np.round(points), np.round(centroids)
    found = _clusters.nearest(points, centroids)
    far = np.square(points[:, :, None].astype(np.float64) - centroids[:, None]).sum(axis=3)
    assert found.shape == (subspaces, count)
    chosen = np.take_along_axis(far, found[:, :, None], axis=2)[:, :, 0]
    np.testing.assert_allclose(chosen, far.min(axis=2), atol=1e-5)
    if whole:
        assert (found == far.argmin(axis=2)).all()
    for wrong in (centroids[:, :0], centroids[1:], np.repeat(centroids, 2, axis=2)):
        with pytest.raises(ValueError, match="do not match"):
            _clusters.nearest(points, np.ascontiguousarray(wrong))


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=20))
def test_bfloat16_rounds_to_nearest(values: list[float]) -> None:
    given_ = torch.tensor(values)
    bits, wide = bfloat16(given_.numpy())
    assert torch.equal(torch.from_numpy(wide), given_.bfloat16().float())
    assert (bits.astype(np.uint32) << 16 == wide.view(np.uint32)).all()


def sample(entries: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys and queries, some of whose directions matter more than others."""
    chance = np.random.default_rng(seed)
    mix = chance.normal(size=(2, 16, 16)) * np.geomspace(1, 0.02, 16)
    keys = np.einsum("nkd,kde->nke", chance.normal(size=(entries, 2, 16)), mix)
    asked = chance.normal(size=(300, 6, 16)) * np.geomspace(0.05, 2, 16)
    return keys.astype(np.float32), asked.astype(np.float32)


def test_codes_of_as_many_keys_as_centroids_are_nearly_exact() -> None:
    keys, queries = sample(CENTROIDS)
    codes = Codes.of(keys, queries, subspaces=4)
    beside = np.zeros(queries.shape[:2], np.float32)
    exact = attention_mass(queries, keys, 0.25, beside)
    # Centroids are rounded to 16 bits.
    np.testing.assert_allclose(codes.mass(queries, 0.25, beside), exact, rtol=0.05, atol=1e-3)


def test_precision_goes_to_the_directions_that_queries_use() -> None:
    keys, queries = sample(2000)
    beside = np.full(queries.shape[:2], -np.inf, np.float32)
    exact = attention_mass(queries, keys, 1.0, beside)

    def recovered(codes: Codes) -> float:
        estimated = codes.mass(queries, 1.0, beside)
        top = np.argpartition(estimated, -100, axis=1)[:, -100:]
        best = np.sort(exact, axis=1)[:, -100:].sum()
        return float(np.take_along_axis(exact, top, axis=1).sum() / best)

    # Isotropic queries reduce the metric to that of the keys.
    alike = np.random.default_rng(1).normal(size=queries.shape).astype(np.float32)
    ours, plain = recovered(Codes.of(keys, queries, 4)), recovered(Codes.of(keys, alike, 4))
    assert ours > 0.93
    assert ours > plain + 0.02


def test_codes_take_less_than_six_percent_of_the_kv() -> None:
    chance = np.random.default_rng(2)
    keys = chance.normal(size=(8192, 3, 64)).astype(np.float32)
    codes = Codes.of(keys[:300], chance.normal(size=(64, 9, 64)).astype(np.float32))
    assert codes.codes.shape == (3, 300, 8)
    of_all = 8192 * 3 * 8 + codes.centroids.nbytes + codes.projection.nbytes
    assert of_all < 0.06 * (2 * keys.astype(np.float16).nbytes)


def test_mismatched_shapes_are_refused() -> None:
    good: dict[str, tuple[type, tuple[int, ...]]] = {
        "codes": (np.uint8, (2, 5, 4)), "centroids": (np.uint16, (2, 8, 256)),
        "projection": (np.float32, (2, 8, 8)), "mean": (np.float32, (2, 8)),
        "queries": (np.float32, (1, 4, 8)), "beside": (np.float32, (1, 4)),
    }  # fmt: skip

    def mass(**other: tuple[int, ...]) -> np.ndarray:
        arrays = {name: np.zeros(other.get(name, shape), of) for name, (of, shape) in good.items()}
        queries, beside = arrays.pop("queries"), arrays.pop("beside")
        return _clusters.mass(_clusters.Codes(**arrays), queries, 1.0, beside, threads=1)

    assert mass().shape == (1, 5)
    for name, shape in (
        ("codes", (2, 5, 3)), ("codes", (3, 5, 4)), ("codes", (2, 0, 4)),
        ("centroids", (2, 8, 16)), ("centroids", (2, 4, 256)), ("projection", (2, 8, 4)),
        ("projection", (1, 8, 8)), ("mean", (2, 4)), ("queries", (1, 3, 8)),
        ("queries", (1, 4, 4)), ("beside", (1, 3)), ("beside", (2, 4)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"shapes of .* do not match"):
            mass(**{name: shape})


def test_estimates_are_finite_for_large_or_equal_keys_and_zero_queries() -> None:
    keys, queries = sample(600)
    keys += 300 * np.eye(16, dtype=np.float32)[3]  # as in models with a bias
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


def test_mass_does_not_depend_on_the_number_of_threads() -> None:
    keys, queries = sample(900)
    codes, beside = Codes.of(keys, queries, 4), np.zeros((3, 6), np.float32)
    one = codes.mass(queries[:3], 0.25, beside, threads=1)
    assert (codes.mass(queries[:3], 0.25, beside, threads=2) == one).all()
    alone = [codes.mass(queries[at : at + 1], 0.25, beside[:1], threads=2) for at in range(3)]
    np.testing.assert_allclose(np.concatenate(alone), one, rtol=1e-5)


def test_variance_is_balanced_over_subspaces() -> None:
    from sgl_ext.clusters.codes import _balanced

    variance = np.array([0.9, 0.8, 0.7, 0.6, 0.05, 0.04, 0.03, 0.02], np.float32)
    for scale in (1.0, 100.0):
        parts = _balanced(scale * variance, 4).reshape(4, 2)
        assert sorted(map(sorted, parts.tolist())) == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert sorted(_balanced(np.zeros(8, np.float32), 4).tolist()) == list(range(8))


@settings(deadline=None, max_examples=80)
@given(
    st.integers(1, 3), st.integers(1, 3), st.sampled_from([16, 48, 64]), st.integers(0, 20),
    st.integers(1, 4), st.booleans(), st.sampled_from([0.1, 1.0, 10.0]), st.booleans(),
    st.integers(0, 99),
)  # fmt: skip
def test_chosen_blocks_account_for_tokens_that_are_seen_anyway(
    kv_heads: int, group: int, head_dim: int, near: int, rows: int, narrow: bool, spread: float,
    summed: bool, seed: int,
) -> None:  # fmt: skip
    """A head's attention to near tokens reduces its weight in the choice, so it must be exact.

    Own tokens are given by their keys, or by the log-sum-exp of their logits.
    """
    chance = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if narrow else torch.float32
    queries = spread * torch.randn(rows, kv_heads * group, head_dim, generator=chance)
    pool = torch.randn(40, 2, kv_heads, head_dim, generator=chance).to(dtype)[:, 1]
    slots = torch.randperm(40, generator=chance)[:9]
    lengths = torch.randint(0, 10, (rows,), generator=chance)
    starts = torch.tensor([int(torch.randint(0, 10 - int(each), (1,))) for each in lengths])
    keys = torch.randn(near + 1, kv_heads, head_dim, generator=chance).to(dtype)
    coded = torch.randn(60, kv_heads, head_dim, generator=chance).numpy()
    codes = Codes.of(coded, queries.numpy(), 4)
    beside, own = np.empty((2, rows, kv_heads * group), np.float32)
    for row in range(rows):
        mine = slots[starts[row] : starts[row] + lengths[row]]
        seen = torch.cat([keys[:near], pool[mine]]).double().repeat_interleave(group, dim=1)
        logits = 0.3 * torch.einsum("hd,nhd->hn", queries[row].double(), seen)
        beside[row] = logits.logsumexp(1).numpy()
        own[row] = logits[:, near:].logsumexp(1).numpy()
    visible = _clusters.Visible(
        keys.data_ptr(), keys.stride(0), near, pool.data_ptr(), pool.stride(0), narrow,
        slots.numpy(), starts.numpy(), lengths.numpy() * (not summed), own if summed else None,
    )  # fmt: skip
    deal = _clusters.Deal(block=3, devices=2, each=2)
    found = _clusters.choose(codes.native, queries.numpy(), 0.3, visible, deal, threads=2)
    scores = codes.mass(queries.numpy(), 0.3, beside)
    sums = scores.reshape(rows, 20, 3).sum(axis=2)
    best = _clusters.best_blocks(scores, deal)
    assert found.shape == best.shape == (rows, 4)
    assert (np.diff(found) > 0).all()
    # Of blocks with equal scores, any may be chosen.
    np.testing.assert_allclose(
        np.take_along_axis(sums, found, 1).sum(1), np.take_along_axis(sums, best, 1).sum(1),
        rtol=1e-3, atol=1e-6,
    )  # fmt: skip


def test_choose_refuses_invalid_shapes_slots_and_blocks() -> None:
    chance = np.random.default_rng(0)
    codes = Codes.of(
        chance.normal(size=(30, 2, 16)).astype(np.float32),
        chance.normal(size=(9, 4, 16)).astype(np.float32), 4,
    )  # fmt: skip
    queries, slots = np.zeros((2, 4, 16), np.float32), np.zeros(3, np.int64)
    starts = lengths = np.zeros(2, np.int64)

    def choose(
        queries: np.ndarray = queries, starts: np.ndarray = starts, lengths: np.ndarray = lengths,
        block: int = 3, sums: np.ndarray | None = None,
    ) -> np.ndarray:  # fmt: skip
        visible = _clusters.Visible(0, 0, 0, 0, 0, False, slots, starts, lengths, sums)
        deal = _clusters.Deal(block, devices=2, each=2)
        return _clusters.choose(codes.native, queries, 1.0, visible, deal, threads=1)

    assert choose().shape == (2, 4)
    with pytest.raises(ValueError, match=r"shapes of .* do not match"):
        choose(queries[:, :3].copy())
    with pytest.raises(ValueError, match="one start and one length per row"):
        choose(queries[:1].copy())
    with pytest.raises(ValueError, match="slots that do not exist"):
        choose(lengths=lengths + 4)
    with pytest.raises(ValueError, match="slots that do not exist"):
        choose(starts=starts + 2, lengths=lengths + 2)
    with pytest.raises(ValueError, match="slots that do not exist"):
        choose(starts=starts - 1)
    with pytest.raises(ValueError, match="one log-sum-exp per row and head"):
        choose(sums=np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match="must be at least 1"):
        choose(block=0)


def test_table_lists_the_slots_of_each_row() -> None:
    first = np.array([[10, 20], [30, 10]])
    slots, starts, lengths = np.array([5, 6, 7]), np.array([0, 1]), np.array([1, 2])

    def table(text: np.ndarray | None) -> list[list[int]]:
        rows = _clusters.table(first, 2, 100, 900, 1, 2, text, slots, starts, lengths)
        return rows.tolist()

    assert table(None) == [
        [900, 110, 111, 120, 121, 901, 902, 5, 0],
        [900, 130, 131, 110, 111, 901, 902, 6, 7],
    ]
    assert table(np.array([3, 0, 1, 2]))[0] == [900, 121, 110, 111, 120, 901, 902, 5, 0]
    for text in ([0, 1, 2], [0, 1, 2, 4], [0, 1, 2, -1]):
        with pytest.raises(ValueError, match="text must have one valid index"):
            table(np.array(text))
