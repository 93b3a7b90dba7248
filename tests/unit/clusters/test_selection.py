"""Placement and selection of blocks, and the blocks that stay in memory."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sgl_ext._native import _clusters
from sgl_ext.clusters.adaptation import HotBlocks
from sgl_ext.clusters.coverage import Coverage
from sgl_ext.clusters.placement import SECTOR, Blocks
from sgl_ext.clusters.selection import blocks_of, each_of

seeds = st.integers(0, 1 << 16)


def best_blocks(
    scores: NDArray[np.float32], share: float, *, block: int, devices: int
) -> NDArray[np.int64]:
    """Returns the blocks with the highest scores, as many as a query of ``share`` is given."""
    blocks = math.ceil(scores.shape[1] / block)
    deal = _clusters.Deal(block, devices, each_of(share, blocks, devices))
    found = _clusters.best_blocks(scores, deal)
    assert found.shape == (len(scores), blocks_of(share, blocks, devices))
    return found


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
        assert (device == (layer * blocks.blocks + numbers) % devices).all()
        assert (offset + blocks.block_bytes <= np.array(blocks.file_bytes)[device]).all()
        taken |= set(zip(device.tolist(), offset.tolist(), strict=True))
    assert len(taken) == layers * blocks.blocks
    held = np.bincount([device for device, _ in taken], minlength=devices)
    assert held.max() - held.min() <= 1


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(1, 5), st.integers(1, 4),
    st.integers(1, 2),
)  # fmt: skip
def test_extents_keep_their_blocks_when_another_one_is_added(
    counts: list[int], devices: int, layers: int, copies: int
) -> None:
    copies = min(copies, devices)
    block = Blocks.fitting(768)
    ends = np.cumsum(counts)
    before = None
    for at in range(len(counts)):
        later = tuple(int(end) * block for end in ends[:at])
        blocks = Blocks(int(ends[at]) * block, 768, devices, layers, copies, later)
        assert blocks.extents == at + 1
        sizes = np.array(blocks.file_bytes)
        assert len(sizes) == devices * (at + 1)
        taken = set()
        for layer in range(layers):
            numbers = np.arange(blocks.blocks)
            for copy in range(copies):
                file, offset = blocks.place(layer, numbers, copy)
                extent = np.searchsorted(ends[:at], numbers, side="right")
                assert (file // devices == extent).all()
                assert (offset + blocks.block_bytes <= sizes[file]).all()
                taken |= set(zip(file.tolist(), offset.tolist(), strict=True))
                # Any blocks that are consecutive are on different devices.
                assert ((np.diff(file % devices) % devices) == 1 % devices).all()
                if before is not None:
                    known = before.place(layer, numbers[: before.blocks], copy)
                    assert all(
                        (a[: before.blocks] == b).all()
                        for a, b in zip((file, offset), known, strict=True)
                    )
        assert len(taken) == layers * blocks.blocks * copies
        used = np.bincount([file for file, _ in taken], minlength=len(sizes))
        assert (np.maximum(used, 1) * blocks.block_bytes == sizes).all()  # no byte is unused
        before = blocks


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


def test_a_poorly_covered_layer_is_skipped_and_tried_again() -> None:
    coverage = Coverage()
    assert coverage.step()
    steps = 0
    while coverage.step():
        coverage.observe(0.0)
        steps += 1
    assert steps == 7  # 0.9 ** 7 < 0.5 <= 0.9 ** 6
    skipped = 1
    while not coverage.step():
        skipped += 1
    assert skipped == 22  # from 0.478 to 0.5, by 0.001 in each step
    coverage.observe(1.0)
    assert coverage.step()
