"""Layer-major pages: copies, checksums of parts, and SSDs that read parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tier_kit import DEADLINE_S, arena, directories, fill, folder, keys, put, wipe
from tier_kit import LAYOUT as SMALL

from sgl_ext.errors import ExtError
from sgl_ext.memory.slab import HostSlab, Layout
from sgl_ext.memory.transfer import TransferEngine
from sgl_ext.tiers.arena import Arena, Pages
from sgl_ext.tiers.copies import DeviceCopies
from sgl_ext.tiers.layer_major import layer_major, parts_of
from sgl_ext.tiers.ssd import SsdTier

PAGE, LAYERS, BLOCKS = 16, 5, 12
LAYOUT = Layout(PAGE, LAYERS, kv_heads=1, head_dim=128, dtype="float16", fingerprint="t")
"""Layout with layers of 8 KiB, two of which are a part."""
MAJOR = layer_major(LAYOUT)


class Pool:
    """Slab with random KV, and an arena of layer-major pages."""

    def __init__(self, engine: TransferEngine, *, by_layer: bool = False) -> None:
        self.slab = HostSlab.create(LAYOUT, BLOCKS)
        engine.register(self.slab.address, self.slab.size, owner=self.slab)
        self.arena = arena(engine, BLOCKS, MAJOR)
        self.blocks = np.asarray(self.slab.mapping)[: self.slab.size].reshape(
            BLOCKS, PAGE, LAYERS, -1
        )
        self.blocks[:] = np.random.default_rng(7).integers(0, 256, self.blocks.shape, np.uint8)
        self.copies = DeviceCopies(
            engine, engine.host_lane(), self.slab, self.arena, by_layer=by_layer
        )

    @property
    def pages(self) -> np.ndarray:
        return self.arena.memory[:, : LAYOUT.block_bytes].reshape(BLOCKS, LAYERS, PAGE, -1)

    def stored(self) -> tuple[np.ndarray, Pages, Pages]:
        """Stores some blocks; returns the slab before, the blocks and their pages."""
        before = self.blocks.copy()
        blocks, pages = np.array([3, 4, 9, 0]), np.array([7, 8, 2, 1])
        self.copies.store(blocks, pages).wait(DEADLINE_S)
        return before, blocks, pages


@pytest.mark.parametrize("by_layer", [False, True])
def test_a_page_has_the_layers_of_a_block_one_after_another(
    engine: TransferEngine, by_layer: bool
) -> None:
    pool = Pool(engine, by_layer=by_layer)
    before, blocks, pages = pool.stored()
    np.testing.assert_array_equal(pool.pages[pages], before[blocks].transpose(0, 2, 1, 3))
    others = np.array([5, 6, 10, 11])
    pool.copies.fill(pages, others).wait(DEADLINE_S)
    before[others] = before[blocks]
    np.testing.assert_array_equal(pool.blocks, before)


def test_groups_of_layers_and_tokens_are_loaded(engine: TransferEngine) -> None:
    pool = Pool(engine)
    before, blocks, pages = pool.stored()
    others = np.array([5, 6, 10, 11])
    for layers in ((1, 3), (4, 5)):
        pool.copies.load_layers(pages, others, layers).wait(DEADLINE_S)
        before[others, :, slice(*layers)] = before[blocks, :, slice(*layers)]
        np.testing.assert_array_equal(pool.blocks, before)
    tokens = np.array([7, 8, 20, 21, 22, 40])  # of the four pages, one after another
    slots = np.array([80, 81, 90, 91, 95, 101])
    pool.copies.fill_tokens(pages[tokens // PAGE] * PAGE + tokens % PAGE, slots).wait(DEADLINE_S)
    every = before.reshape(BLOCKS * PAGE, LAYERS, -1)
    every[slots] = every[blocks[tokens // PAGE] * PAGE + tokens % PAGE]
    np.testing.assert_array_equal(pool.blocks, before)


def test_a_copy_of_some_layers_counts_as_fewer_tokens(engine: TransferEngine) -> None:
    pool, counted = Pool(engine), list[int]()
    times: Any = pool.copies._into_device
    times.begin = lambda tokens, _tickets: counted.append(tokens)
    pages = np.arange(4)
    pool.copies.load_layers(pages, pages, (1, 3)).wait(DEADLINE_S)
    for ticket in (*pool.copies.load(pages, pages), *pool.copies.load_from_the_top(pages, pages)):
        ticket.wait(DEADLINE_S)
    assert counted == [4 * PAGE * 2 // LAYERS, 4 * PAGE, 4 * PAGE]


def test_each_part_is_verified_alone(engine: TransferEngine) -> None:
    host = arena(engine, 4, MAJOR)
    assert host.parts == ((0, 2), (2, 4), (4, 5))
    assert [host.extent(part) for part in range(3)] == [
        (0, 16 << 10), (16 << 10, 16 << 10), (32 << 10, host.stride - (32 << 10)),
    ]  # fmt: skip
    names, where = keys(1, 2), np.array([0, 3])
    fill(host, names, where)
    host.seal(names, where, 5)
    assert host.verify(names, where).all()
    host.memory[3, 20_000] ^= 1
    assert host.verify(names, where).tolist() == [True, False]
    assert [host.verify(names, where, part).tolist() for part in range(3)] == [
        [True, True], [True, False], [True, True],
    ]  # fmt: skip
    host.sums[0, 0] ^= 1  # no longer what the trailer covers
    assert not any(host.verify(names, where, part)[0] for part in range(3))
    host.seal(names, where, 9)
    assert host.verify(names, where).all()


def test_parts_are_read_from_ssds(engine: TransferEngine, tmp_path: Path, backend: str) -> None:
    host, paths = arena(engine, 32, MAJOR), directories(tmp_path, 2)
    tier = SsdTier(host, engine, paths, 16 * host.stride, backend=backend)
    assert all(put(tier, host, *range(20)))
    tier.close()
    tier = SsdTier(host, engine, paths, 16 * host.stride, backend=backend)  # finds them again
    some, where = keys(3, 4, 5, 11), np.array([9, 10, 11, 2])
    expected = arena(engine, 32, MAJOR)
    fill(expected, some, where)
    wipe(host)
    for part in (2, 1, 0):
        assert tier.load_part(some, where, part).all()
        size = host.parts[part][0] * LAYOUT.block_bytes // LAYERS
        np.testing.assert_array_equal(
            host.memory[where, size : LAYOUT.block_bytes],
            expected.memory[where, size : LAYOUT.block_bytes],
        )
        assert (host.memory[where, :size] == 0xEE).all()
    assert host.verify(some, where).all()
    assert tier.load_part(keys(3, 99), where[:2], 2).tolist() == [True, False]
    wipe(host)
    assert tier.load(some, where).all()
    tier.close()


def test_a_damaged_part_fails_alone_and_its_page_is_removed(
    engine: TransferEngine, tmp_path: Path
) -> None:
    host, (path,) = arena(engine, 4, MAJOR), directories(tmp_path, 1)
    tier = SsdTier(host, engine, [path], 4 * host.stride)
    assert all(put(tier, host, 0, 1))
    with (folder(path) / "pages").open("r+b") as file:
        file.seek(host.stride + 20_000)  # part 1 of the second slot
        file.write(b"damage")
    wipe(host)
    every = np.arange(2)
    assert tier.load_part(keys(0, 1), every, 2).all()
    assert tier.load_part(keys(0, 1), every, 1).tolist().count(False) == 1
    assert tier.statistics().failures == {"checksum": 1}
    assert tier.statistics().pages == 1
    tier.close()


def test_a_slot_that_gets_another_page_between_two_parts_is_a_miss(
    engine: TransferEngine, tmp_path: Path
) -> None:
    host = arena(engine, 8, MAJOR)
    tier = SsdTier(host, engine, directories(tmp_path, 1), 2 * host.stride)
    assert all(put(tier, host, 0, 1))
    where = np.array([5, 6])
    assert tier.load_part(keys(0, 1), where, 2).all()
    index = tier._volumes[0].slots.index
    slots = [index[key] for key in keys(0, 1)]
    assert all(put(tier, host, 2, 3))  # evicts both
    index.clear()
    index.update(zip(keys(0, 1), slots, strict=True))  # as if looked up before
    assert not tier.load_part(keys(0, 1), where, 1).any()
    tier.close()


def test_pages_of_another_order_are_not_found(engine: TransferEngine, tmp_path: Path) -> None:
    paths = directories(tmp_path, 1)
    plain, major = Arena(LAYOUT, 4), arena(engine, 4, MAJOR)
    engine.register(plain.address, plain.size, owner=plain)
    tier = SsdTier(plain, engine, paths, 4 * plain.stride)
    assert all(put(tier, plain, 0, 1))
    tier.close()
    tier = SsdTier(major, engine, paths, 4 * major.stride)
    assert tier.lookup(keys(0, 1)) == 0
    tier.close()


def test_small_pages_have_no_parts() -> None:
    assert parts_of(SMALL) == ()
    with pytest.raises(ExtError, match="raise --page-size"):
        layer_major(SMALL)
    odd = Layout(3, 8, kv_heads=3, head_dim=320, dtype="float16", fingerprint="t")
    with pytest.raises(ExtError, match="multiple of 4096 B"):
        layer_major(odd)
