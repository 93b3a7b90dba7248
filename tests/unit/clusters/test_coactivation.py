"""Clusters of entries, compared with the algorithm of the paper over all pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from sgl_ext._native import _clusters
from sgl_ext.bench.clusters.clustering import Clusters, cluster, radius_of
from sgl_ext.clusters.activations import Activations, attention_mass


def activations_of(active: NDArray[np.bool_]) -> Activations:
    """Returns the activations of a matrix ``[queries, entries]``."""
    queries, entries = active.shape
    padded = np.zeros((entries, -(-queries // 64) * 64), bool)
    padded[:, :queries] = active.T
    return Activations(np.packbits(padded, axis=1, bitorder="little").view("<u8"), queries)


def all_distances(active: NDArray[np.bool_]) -> NDArray[np.float32]:
    shared = active.T.astype(np.int32) @ active.astype(np.int32)
    count = active.sum(axis=0)
    either = count[:, None] + count[None, :] - shared
    ratio = shared.astype(np.float32) / np.maximum(either, 1).astype(np.float32)
    return np.where(either > 0, np.float32(1) - ratio, np.float32(1)).astype(np.float32)


def reference(active: NDArray[np.bool_], radius: float) -> list[list[int]]:
    """Returns the clusters of Algorithm 1, from a matrix of all distances."""
    distance = all_distances(active)
    limit = np.float32(radius)
    entries = active.shape[1]
    near = (distance < limit).sum(axis=1) - (distance.diagonal() < limit)
    often = active.sum(axis=0)
    found: list[list[int]] = []
    held: set[int] = set()
    for medoid in sorted(range(entries), key=lambda e: (-near[e], -often[e], e)):
        if medoid in held or not often[medoid]:
            continue
        members = [medoid]
        for candidate in sorted(range(entries), key=lambda e: (distance[medoid, e], e)):
            if candidate == medoid or distance[medoid, candidate] >= limit:
                continue
            total = np.float32(0)
            for member in members:
                total += distance[candidate, member]
            if total / np.float32(len(members)) < limit:
                members.append(candidate)
        held |= {*members}
        found.append(members)
    return found + [[entry] for entry in range(entries) if not often[entry]]


def as_lists(clusters: Clusters) -> list[list[int]]:
    return [
        clusters.members[start:end].tolist()
        for start, end in zip(clusters.starts, clusters.starts[1:], strict=False)
    ]


shapes = st.tuples(st.integers(1, 130), st.integers(1, 24))


@settings(deadline=None, max_examples=150)
@given(arrays(bool, shapes), st.floats(0.05, 1.0))
def test_clusters_equal_those_of_the_reference(active: NDArray[np.bool_], radius: float) -> None:
    found = cluster(activations_of(active), radius=radius)
    expected = reference(active, found.radius)
    assert as_lists(found) == expected
    assert np.bincount(found.members, minlength=active.shape[1]).min() >= 1
    assert found.medoids.tolist() == [members[0] for members in expected]


def reference_blocks(active: NDArray[np.bool_], block: int) -> list[int]:
    distance, often = all_distances(active), active.sum(axis=0)
    left = sorted(range(active.shape[1]), key=lambda e: (-often[e], e))
    order: list[int] = []
    while left:
        begun = order[len(order) // block * block :] or order[-1:]
        near = [np.float32(0)] * len(left)
        for member in begun:
            near = [so_far + distance[member, e] for so_far, e in zip(near, left, strict=True)]
        best = min(range(len(left)), key=near.__getitem__)
        order.append(left.pop(best if near[best] < len(begun) else 0))
    return order


@settings(deadline=None, max_examples=150)
@given(arrays(bool, shapes), st.integers(1, 6))
def test_blocks_equal_those_of_the_reference(active: NDArray[np.bool_], block: int) -> None:
    found = _clusters.blocks(activations_of(active).bits, block, 999)
    assert found.tolist() == reference_blocks(active, block)


def test_blocks_with_a_small_window_hold_mostly_coactivated_entries() -> None:
    chance = np.random.default_rng(8)
    group = chance.permutation(np.repeat(np.arange(60), 10))
    wanted = chance.random((256, 60)) < chance.uniform(0.05, 0.3, 60)
    activations = activations_of(wanted[:, group])
    order = _clusters.blocks(activations.bits, 5, 100)
    assert sorted(order.tolist()) == list(range(600))
    same = [len(set(group[block])) for block in order.reshape(-1, 5)]
    assert same.count(1) > 0.9 * len(same)


def test_checksums_depend_on_every_bit() -> None:
    chance = np.random.default_rng(9)
    rows = chance.integers(0, 256, (3, 77), np.uint8)
    rows[2] = rows[0]
    sums = _clusters.checksums(rows)
    assert sums[0] == sums[2] != sums[1]
    for at in range(77):
        for bit in range(8):
            changed = rows[:1].copy()
            changed[0, at] ^= 1 << bit
            assert _clusters.checksums(changed)[0] != sums[0]
    zeros = np.zeros((2, 4096), np.uint8)
    zeros[1, 4095] = 1
    assert len(set(_clusters.checksums(zeros).tolist())) == 2


def test_blocks_hold_entries_that_are_activated_together() -> None:
    chance = np.random.default_rng(6)
    group = chance.permutation(np.repeat(np.arange(25), 10))
    wanted = chance.random((256, 25)) < 0.1
    order = _clusters.blocks(activations_of(wanted[:, group]).bits, 5, 250)
    assert sorted(order.tolist()) == list(range(250))
    for block in order.reshape(-1, 5):
        assert len(set(group[block])) == 1


def test_radius_contains_the_given_number_of_neighbours() -> None:
    chance = np.random.default_rng(1)
    topics = chance.random((40, 12)) < 0.2  # activations of 12 topics by 40 queries
    active = topics[:, chance.integers(0, 12, 200)] ^ (chance.random((40, 200)) < 0.05)
    activations = activations_of(active)
    for neighbours in (4, 8, 16):
        radius = radius_of(activations, neighbours)
        near, nearer = (
            np.median(_clusters.density(activations.bits, limit, 2)[activations.frequency > 0])
            for limit in (radius, radius - 1e-4)
        )
        assert nearer <= neighbours <= near  # many entries are at the same distance


def test_clusters_hold_entries_that_are_activated_together() -> None:
    chance = np.random.default_rng(2)
    group = chance.permutation(np.repeat(np.arange(30), 10))
    wanted = chance.random((256, 30)) < 0.1
    found = cluster(activations_of(wanted[:, group]))
    for members in as_lists(found):
        assert len({group[member] for member in members}) == 1
    assert len(found) == 30


def test_queries_activate_the_entries_with_most_attention() -> None:
    chance = np.random.default_rng(3)
    mass = chance.random((70, 50), np.float32)
    activations = Activations.of([mass[:3], mass[3:66], mass[66:]], 0.1)
    assert activations.bits.shape == (50, 2)
    bits = np.unpackbits(activations.bits.view(np.uint8), axis=1, bitorder="little")[:, :70]
    for query in range(70):
        assert set(np.flatnonzero(bits[:, query])) == set(np.argsort(mass[query])[-5:])
    assert activations.frequency.sum() == 70 * 5
    assert Activations.of([mass[:, :1]], 0.1).frequency.tolist() == [70]
    mass[:, 2:] = 0  # entries without attention are not activated, even if too few others are
    assert Activations.of([mass], 0.1).frequency.tolist() == [70, 70] + [0] * 48


def test_attention_mass_equals_the_softmax_summed_over_heads() -> None:
    chance = np.random.default_rng(4)
    queries = chance.normal(size=(5, 6, 8)).astype(np.float32)
    keys = chance.normal(size=(40, 2, 8)).astype(np.float32) * 3
    logits = 0.5 * np.einsum("qhd,ehd->qhe", queries, np.repeat(keys, 3, axis=1))
    whole = np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)
    beside = np.log(np.exp(logits[:, :, :10]).sum(axis=2)).astype(np.float32)
    mass = attention_mass(queries, keys[10:], 0.5, beside)
    np.testing.assert_allclose(mass, whole[:, :, 10:].sum(axis=1), rtol=1e-4)
    seen, counted = np.array([1, 7, 30, 12, 5]), np.array([0, 3, 30, 1, 5])
    part = attention_mass(queries, keys[10:], 0.5, beside, seen=seen, counted=counted)
    for query in range(5):
        logits_here = logits[query, :, : 10 + seen[query]]
        each = np.exp(logits_here) / np.exp(logits_here).sum(axis=1, keepdims=True)
        expected = np.zeros(30)
        expected[: counted[query]] = each[:, 10 : 10 + counted[query]].sum(axis=0)
        np.testing.assert_allclose(part[query], expected, rtol=1e-4)
    nothing = np.full((5, 6), -np.inf, np.float32)
    np.testing.assert_allclose(attention_mass(queries, keys, 0.5, nothing).sum(1), 6.0, rtol=1e-5)


def test_invalid_input_is_rejected() -> None:
    bits = np.zeros((3, 1), np.uint64)
    order = np.array([3], np.int32)
    with pytest.raises(ValueError, match="entry 3 is not one of 3"):
        _clusters.distances(bits, 3)
    with pytest.raises(ValueError, match="entry 3 is not one of 3"):
        _clusters.cluster(bits, order, 0.5)
    with pytest.raises(ValueError, match="block must be at least 1"):
        _clusters.blocks(bits, 0, 8)
    with pytest.raises(ValueError, match="window at least block"):
        _clusters.blocks(bits, 4, 3)


def test_clusters_of_many_entries_do_not_depend_on_threads() -> None:
    chance = np.random.default_rng(5)
    activations = activations_of(chance.random((640, 4096)) < 0.08)
    one, two = (cluster(activations, threads=threads) for threads in (1, 2))
    assert as_lists(one) == as_lists(two)
