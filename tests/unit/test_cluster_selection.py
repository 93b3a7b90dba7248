"""Placement and selection of entries, choice of replicas, and blocks that stay in memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sgl_ext.clusters.activations import Activations
from sgl_ext.clusters.adaptation import HotBlocks, joined
from sgl_ext.clusters.clustering import Clusters, cluster
from sgl_ext.clusters.placement import SECTOR, Blocks, cost_effectiveness, stripe
from sgl_ext.clusters.retrieval import Replicated
from sgl_ext.clusters.selection import best_blocks, best_clusters, best_entries

seeds = st.integers(0, 1 << 16)


def some_clusters(entries: int, most: int, seed: int) -> Clusters:
    chance = np.random.default_rng(seed)
    mass = chance.gamma(0.3, size=(64, entries)).astype(np.float32)
    return cluster(Activations.of([mass], 0.1), most=most)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 9), st.floats(0.001, 1.0), seeds)
def test_best_blocks_are_selected_on_every_device(
    entries: int, block: int, devices: int, share: float, seed: int
) -> None:
    both = np.random.default_rng(seed).random((2, entries), np.float32)
    other, found = best_blocks(both, share, block=block, devices=devices)
    assert np.array_equal(other, best_blocks(both[:1], share, block=block, devices=devices)[0])
    scores = both[1]
    blocks = math.ceil(entries / block)
    sums = [scores[b * block : (b + 1) * block].sum(dtype=np.float32) for b in range(blocks)]
    each = max(math.ceil(share * blocks / devices), 1)
    assert found.tolist() == sorted(set(found.tolist()))
    for device in range(devices):
        own = list(range(device, blocks, devices))
        mine = [b for b in found if b % devices == device]
        assert len(mine) == min(each, len(own))
        left = [sums[b] for b in own if b not in mine]
        assert min((sums[b] for b in mine), default=1.0) >= max(left, default=0.0) - 1e-5


def test_full_share_selects_all_and_ties_select_the_lowest_blocks() -> None:
    scores = np.random.default_rng(0).random(43, np.float32)
    assert best_blocks(scores[None], 1.0, block=5, devices=4).tolist() == [[*range(9)]]
    equal = np.zeros((1, 40), np.float32)
    assert best_blocks(equal, 0.4, block=5, devices=2).tolist() == [[0, 1, 2, 3]]
    assert best_entries(scores, 43).tolist() == list(range(43))
    assert best_entries(scores, 3).tolist() == sorted(np.argsort(scores)[-3:].tolist())


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 120), st.integers(1, 9), st.integers(1, 130), seeds)
def test_best_clusters_fill_the_budget(entries: int, most: int, budget: int, seed: int) -> None:
    clusters = some_clusters(entries, most, seed)
    scores = np.random.default_rng(seed).random(len(clusters), np.float32)
    chosen, found = best_clusters(scores, clusters, budget)
    expected: set[int] = set()
    for at, one in enumerate(np.argsort(-scores, kind="stable")):
        if len(expected) >= min(budget, entries):
            assert len(chosen) == at
            break
        expected |= set(clusters.members[clusters.starts[one] : clusters.starts[one + 1]].tolist())
    assert found.tolist() == sorted(expected)


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 3000), st.sampled_from([96, 768, 1536, 4096, 5000]), st.integers(1, 9),
    st.integers(1, 5),
)  # fmt: skip
def test_blocks_do_not_overlap_and_are_balanced_over_devices(
    entries: int, entry_bytes: int, devices: int, layers: int
) -> None:
    blocks = Blocks(entries, entry_bytes, devices, layers)
    assert blocks.block_bytes % SECTOR == 0
    assert blocks.block * entry_bytes <= blocks.block_bytes
    assert blocks.blocks * blocks.block >= entries > (blocks.blocks - 1) * blocks.block
    taken: set[tuple[int, int]] = set()
    for layer in range(layers):
        numbers = np.arange(blocks.blocks)
        device, offset = blocks.place(layer, numbers)
        assert device[0] == blocks.first(layer)
        assert (device == (blocks.first(layer) + numbers) % devices).all()
        assert offset.max() + blocks.block_bytes <= blocks.file_bytes
        taken |= set(zip(device.tolist(), offset.tolist(), strict=True))
    assert len(taken) == layers * blocks.blocks
    held = np.bincount([device for device, _ in taken], minlength=devices)
    assert held.max() - held.min() <= 1


@pytest.mark.parametrize("devices", range(1, 9))
@pytest.mark.parametrize("most", [4, 8, 16, 24, 32])
def test_replica_reads_are_balanced_over_devices(devices: int, most: int) -> None:
    clusters = some_clusters(1500, most, most)
    replicas = stripe(clusters, devices)
    stored = np.bincount(replicas.device, minlength=devices)
    assert stored.max() <= 1.02 * stored.mean()
    source = Replicated(clusters, replicas, 1500, devices)
    where = {
        place: int(entry)
        for place, entry in zip(
            zip(replicas.device.tolist(), replicas.row.tolist(), strict=True),
            clusters.members,
            strict=True,
        )
    }
    assert len(where) == len(clusters.members)
    chance = np.random.default_rng(devices)
    loads: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(5):
        _, wanted = best_clusters(chance.random(len(clusters), np.float32), clusters, 400)
        for balance, ratios in loads.items():
            reads = source.schedule(wanted, balance=balance)
            found = [where[device, int(row)] for device, rows in enumerate(reads) for row in rows]
            assert sorted(found) == wanted.tolist()
            sizes = [len(rows) for rows in reads]
            ratios.append(max(sizes) / (sum(sizes) / devices))
    assert np.mean(loads[True]) <= 1.02
    assert np.mean(loads[True]) <= np.mean(loads[False])


def test_cost_effectiveness_favors_small_and_frequent_clusters() -> None:
    frequency, sizes = np.array([10.0, 10.0, 1.0]), np.array([1, 16, 1])
    found = cost_effectiveness(frequency, sizes, latency=8e-5, per_entry=1e-6)
    assert found[0] > found[1] > 0
    assert found[2] == pytest.approx(found[0] / 10)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 20), st.integers(1, 12), st.integers(1, 9), st.floats(0.1, 1.0), seeds)
def test_new_entries_join_all_clusters_within_the_radius(
    steps: int, new: int, old: int, radius: float, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    active, medoids = chance.random((steps, new)) < 0.4, chance.random((steps, old)) < 0.4

    def distance(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
        either = int((one | other).sum())
        return float(np.float32(1) - np.float32((one & other).sum()) / np.float32(max(either, 1)))

    for entry, found in enumerate(joined(active, medoids, radius)):
        far = [distance(active[:, entry], medoids[:, one]) for one in range(old)]
        assert sorted(found.tolist()) == [one for one in range(old) if far[one] < radius]
        assert [far[one] for one in found] == sorted(far[one] for one in found)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 30), st.integers(0, 12), st.integers(1, 25), seeds)
def test_most_frequently_activated_blocks_stay_in_memory(
    blocks: int, capacity: int, steps: int, seed: int
) -> None:
    chance = np.random.default_rng(seed)
    frequency = chance.integers(0, 9, blocks)
    hot = HotBlocks(frequency, capacity)
    counts = frequency / max(frequency.max(), 1)
    held = set(hot.held.tolist())
    assert len(held) == min(capacity, blocks)
    assert min((counts[b] for b in held), default=0) >= max(
        (counts[b] for b in range(blocks) if b not in held and held), default=0
    )
    for _ in range(steps):
        activated = chance.permutation(blocks)[: chance.integers(1, blocks + 1)]
        coming = set(hot.step(activated).tolist())
        if not capacity:
            assert not coming
            continue
        counts = 0.8 * counts + np.isin(np.arange(blocks), activated)
        assert coming <= set(activated.tolist()) - held
        gone = held - set(hot.held.tolist())
        held = (held - gone) | coming
        assert len(gone) == len(coming)
        assert held == set(hot.held.tolist())
        for block in coming:
            assert counts[block] > min(counts[other] for other in gone)
        # No activated block outside memory has a higher frequency than any block in memory.
        outside = [counts[b] for b in activated.tolist() if b not in held]
        assert max(outside, default=-99) <= min(counts[b] for b in held)
        assert all(hot.held[hot.place[block]] == block for block in held)
        assert (hot.place >= 0).sum() == len(held)
