"""Policy of lending: units, Algorithm 1 in bytes, the window of recent needs, and regions."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_ext.memory.lent import Extent, blocks_for
from sgl_ext.memory.slab import DTYPES, Layout
from sgl_ext.peer.lending import (
    Granularity,
    Lending,
    Unit,
    choose_unit,
)
from sgl_ext.peer.master import _last
from sgl_ext.peer.messages import Lend
from sgl_ext.peer.need import NeedWindow
from sgl_ext.peer.regions import Region, Regions


def model(
    layers: int, kv_heads: int, head_dim: int, page: int = 16, dtype: str = "float16"
) -> Layout:
    return Layout(page, layers, kv_heads, head_dim, dtype, fingerprint="a model")


# SwiftCache, Table 2 (float16), with 16-token blocks.
LWM = model(layers=32, kv_heads=32, head_dim=128)
QWEN3_8B = model(layers=36, kv_heads=8, head_dim=128)
QWEN3_14B = model(layers=40, kv_heads=8, head_dim=128)
QWEN3_32B = model(layers=64, kv_heads=8, head_dim=128)
SMOLLM2 = model(layers=30, kv_heads=3, head_dim=64)

PAGE = 4096
small = st.integers(1, 12)
geometries = st.builds(
    model,
    layers=small,
    kv_heads=small,
    head_dim=small,
    page=st.sampled_from([1, 2, 16]),
    dtype=st.sampled_from(sorted(DTYPES)),
)


class ElasticUnits(NamedTuple):
    """Blocks of both sides in a minimum elastic unit."""

    worker: int
    master: int


def units_of(worker: Layout, master: Layout) -> ElasticUnits:
    sizes = worker.block_bytes, master.block_bytes
    whole = choose_unit(*sizes, lendable=0, page=1, granularity="unit")
    return ElasticUnits(*(whole.size // size for size in sizes))


@pytest.mark.parametrize(
    ("model", "megabytes"), [(LWM, 0.5), (QWEN3_8B, 0.141), (QWEN3_14B, 0.156), (QWEN3_32B, 0.25)]
)
def test_bytes_per_token_match_table_2(model: Layout, megabytes: float) -> None:
    assert round(model.block_bytes / model.page / 2**20, 3) == megabytes


@pytest.mark.parametrize(
    ("worker", "master", "units"),
    [
        (QWEN3_8B, LWM, ElasticUnits(worker=32, master=9)),
        (QWEN3_14B, LWM, ElasticUnits(worker=16, master=5)),
        (QWEN3_32B, LWM, ElasticUnits(worker=2, master=1)),
        (QWEN3_14B, QWEN3_8B, ElasticUnits(worker=9, master=10)),
        (LWM, LWM, ElasticUnits(worker=1, master=1)),
        (LWM, SMOLLM2, ElasticUnits(worker=45, master=1024)),
    ],
)
def test_elastic_units_of_known_models(worker: Layout, master: Layout, units: ElasticUnits) -> None:
    assert units_of(worker, master) == units


def test_element_counts_give_the_same_units_for_one_dtype() -> None:
    def elements(model: Layout) -> int:  # Eq. 6-7
        return model.layers * model.page * model.kv_heads * model.head_dim

    for master in (LWM, SMOLLM2, QWEN3_8B):
        for worker in (QWEN3_32B, QWEN3_14B, LWM):
            common = math.lcm(elements(master), elements(worker))
            expected = (common // elements(worker), common // elements(master))
            assert units_of(worker, master) == expected


@given(geometries, geometries)
def test_units_have_equal_bytes_and_are_minimal(worker: Layout, master: Layout) -> None:
    units = units_of(worker, master)
    assert units.worker * worker.block_bytes == units.master * master.block_bytes
    assert not any(
        blocks * worker.block_bytes % master.block_bytes == 0 for blocks in range(1, units.worker)
    )
    assert units_of(master, worker) == units[::-1]


def test_auto_lends_pages_if_whole_units_are_too_large() -> None:
    lwm, smollm2 = LWM.block_bytes, SMOLLM2.block_bytes
    assert choose_unit(lwm, smollm2, 360 << 24, PAGE, "auto") == Unit(360 << 20, True, 0)
    assert choose_unit(lwm, smollm2, 360 << 23, PAGE, "auto") == Unit(PAGE, False, smollm2)
    assert choose_unit(lwm, smollm2, 1, PAGE, "unit") == Unit(360 << 20, True, 0)
    assert choose_unit(lwm, smollm2, 360 << 30, PAGE, "block") == Unit(PAGE, False, smollm2)
    # A whole unit is a multiple of both blocks and of a page.
    assert choose_unit(6, 10, 1 << 30, PAGE, "auto").size == 15 * PAGE


def lending(unit: int, *, size: int = 90, blocks: int = 100, block: int = 10) -> Lending:
    """Returns a policy for blocks of ``block`` bytes and 16 tokens, one of them before the pool."""
    return Lending(size * block, blocks * block, block, 16, 1, Unit(unit, False, 0))


@pytest.mark.parametrize(
    ("lent", "need", "left"),
    [
        (900, 9 * 16, 900),  # nine blocks stay: exactly full
        (900, 9 * 16 + 1, 880),  # one block is missing: a whole unit of two returns
        (900, 11 * 16, 880),
        (900, 11 * 16 + 1, 860),
        (900, 10**6, 0),
        (100, 10**6, 0),
        (0, 10**6, 0),
        (860, 9 * 16, 860),  # scale_up never lends more
    ],
)
def test_scale_up_follows_algorithm_1(lent: int, need: int, left: int) -> None:
    assert lending(20).scale_up(lent, need) == left


@pytest.mark.parametrize(
    ("lent", "need", "used", "more"),
    [
        (0, 99 * 16, 0, 0),
        (0, 10**6, 0, 0),
        (0, 98 * 16, 0, 0),  # one block to spare: less than a unit
        (0, 97 * 16, 0, 20),
        (0, 50 * 16, 0, 480),
        (0, 0, 0, 900),  # limited to the lendable memory
        (0, 0, 50, 480),  # 50 blocks are in use
        (600, 50 * 16, 0, 600),  # scale_down never reclaims
    ],
)
def test_scale_down_follows_algorithm_1(lent: int, need: int, used: int, more: int) -> None:
    assert lending(20).scale_down(lent, need, used) == more


@given(
    unit=st.integers(1, 300),
    block=st.integers(1, 40),
    need=st.integers(0, 3000),
    lent=st.integers(0, 100),
    used=st.integers(0, 120),
)
def test_scaling_suffices_and_is_minimal(
    unit: int, block: int, need: int, lent: int, used: int
) -> None:
    policy = lending(unit, block=block)
    lent = min(lent * unit, policy.size // unit * unit)
    up = policy.scale_up(lent, need)
    assert up % unit == 0
    assert up == 0 or policy.local(up) * 16 >= need
    assert up == lent or policy.local(up + unit) * 16 < need or up + unit > lent
    down = policy.scale_down(lent, need, used)
    assert down % unit == 0
    assert down == lent or (policy.local(down) * 16 >= need and policy.local(down) >= used)
    fits = policy.local(down + unit) * 16 >= need and policy.local(down + unit) >= used
    assert not fits or down + unit > policy.size


odd = st.integers(1, 400_000).map(lambda half: 2 * half + 1)
blocks = st.one_of(odd, st.builds(lambda base, power: base << power, odd, st.integers(1, 12)))


@given(
    pieces=st.integers(1, 16),
    worker=blocks,
    master=blocks,
    own=st.integers(2, 2000),
    granularity=st.sampled_from(["auto", "unit", "block"]),
    data=st.data(),
)
@settings(derandomize=True, deadline=None)
def test_a_memory_page_can_be_a_piece_of_device_memory(
    pieces: int, worker: int, master: int, own: int, granularity: Granularity, data: st.DataObject
) -> None:
    piece = pieces * (2 << 20)
    # The worker: block 0 is padding, and the memory ends with a whole piece.
    end = -(-own * worker // piece) * piece
    start = -(-data.draw(st.integers(1, own)) * worker // piece) * piece
    extents = tuple(Extent(f"{at}", at, 0, piece) for at in range(start, end, piece))
    size = len(extents) * piece
    # The master: it offers what its addresses and its capacity allow.
    first, capacity = data.draw(st.integers(1, 50)), data.draw(st.integers(0, 2 * size + piece))
    beyond = blocks_for(capacity, master, piece)
    regions = Regions(first, first + beyond, master, piece)
    assert regions.largest >= capacity // piece * piece
    most = min(min(regions.largest, capacity) // piece * piece, size)
    unit = choose_unit(worker, master, most, piece, granularity)
    assert unit.size % piece == 0
    if unit.whole:
        assert unit.size % worker == unit.size % master == 0
    policy = Lending(most, end, worker, 16, 1, unit)
    need, used = data.draw(st.integers(0, own * 16)), data.draw(st.integers(0, own - 1))
    lent = policy.scale_down(0, need, used)
    kept = policy.scale_up(lent, data.draw(st.integers(0, own * 16)))
    for granted in (lent, kept):
        assert granted % piece == 0
        assert 0 <= granted <= most
        Lend(b"w", 1, b"m", 1, granted, 1, extents)
        if granted:  # some blocks of the pool are removed, and the others are not lent
            assert policy.local(granted) < own - 1
            assert (1 + policy.local(granted)) * worker <= end - granted
    if not lent:
        return
    # The master maps whole pieces, behind its own memory, which may end with a part of a piece.
    mapped = _last(extents, most)
    assert tuple(mapped) == extents[len(extents) - most // piece :]
    region = regions.allocate(most)
    assert region is not None
    regions.check_integrity([region])
    assert region.offset >= -(-first * master // piece) * piece
    assert region.offset % piece == 0
    assert region.offset + region.size == region.end * master <= (first + beyond) * master
    assert region.blocks(lent, master) * master >= region.offset + region.size - lent


@given(
    pieces=st.integers(1, 16),
    master=blocks,
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=16),
    first=st.integers(1, 50),
)
@settings(derandomize=True, deadline=None)
def test_reserved_addresses_hold_the_pieces_of_sixteen_workers(
    pieces: int, master: int, sizes: list[int], first: int
) -> None:
    piece = pieces * (2 << 20)
    beyond = blocks_for(sum(sizes) * piece, master, piece)
    regions = Regions(first, first + beyond, master, piece)
    taken = []
    for size in sizes:
        region = regions.allocate(size * piece)
        assert region is not None
        taken.append(region)
    regions.check_integrity(taken)


def test_need_window_drops_old_needs() -> None:
    window = NeedWindow(60)
    assert window.largest(0) == 0
    window.add(500, 0)
    window.add(100, 30)
    window.add(200, 40)
    assert window.largest(60) == 500  # sixty seconds old: still in the window
    assert window.largest(60.5) == 200  # the larger, later need has replaced the 100
    assert window.largest(100.5) == 0


def test_need_window_refuses_invalid_times_and_needs() -> None:
    window = NeedWindow(60)
    window.add(5, 10)
    with pytest.raises(ValueError, match="time went from 10 to 9"):
        window.add(7, 9)
    with pytest.raises(ValueError, match="time went from 10 to nan"):
        window.largest(math.nan)
    with pytest.raises(ValueError, match="expected 0 or more tokens"):
        window.add(-1, 11)
    assert window.largest(10) == 5
    with pytest.raises(ValueError, match="must be positive"):
        NeedWindow(0)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 50), st.booleans())), st.integers(1, 60)
)
def test_need_window_returns_the_maximum_of_recent_needs(
    steps: list[tuple[int, int, bool]], seconds: int
) -> None:
    window, seen, now = NeedWindow(seconds), [], 0
    for pause, tokens, is_request in steps:
        now += pause
        if is_request:
            window.add(tokens, now)
            seen.append((now, tokens))
        recent = [tokens for time, tokens in seen if time >= now - seconds]
        assert window.largest(now) == max(recent, default=0)


def test_regions_end_where_a_block_and_a_page_end() -> None:
    regions = Regions(10, 1000, 6144, PAGE)  # two blocks are three pages
    first = regions.allocate(7 * PAGE)
    assert first == Region(12, 16, 16 * 6144 - 7 * PAGE, 7 * PAGE)
    assert first.blocks(7 * PAGE, 6144) == 12
    assert first.blocks(2 * 6144 - 1, 6144) == 15
    assert first.blocks(0, 6144) == 16
    second = regions.allocate(3 * PAGE)
    assert second is not None
    assert second.offset >= first.offset + first.size
    assert second.end % 2 == 0
    assert regions.allocate(10**9) is None
    regions.free(first)
    assert regions.allocate(3 * PAGE) == Region(12, 14, 14 * 6144 - 3 * PAGE, 3 * PAGE)


@given(
    block=st.sampled_from([1, 100, 4096, 6144, 46080, 737280]),
    first=st.integers(0, 50),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, derandomize=True, deadline=None)
def test_regions_are_separated_by_at_least_a_block(block: int, first: int, seed: int) -> None:
    choose = random.Random(seed)  # noqa: S311
    end = first + 40 * PAGE
    regions = Regions(first, end, block, PAGE)
    taken: list[Region] = []
    for _ in range(30):
        largest = regions.largest
        if taken and choose.random() < 0.4:
            regions.free(taken.pop(choose.randrange(len(taken))))
            continue
        if largest and choose.random() < 0.2:
            size = largest
        else:
            size = PAGE * choose.randrange(1, 40 * block)
        region = regions.allocate(size)
        assert (region is not None) == (size <= largest)
        if region is not None:
            taken.append(region)
            regions.check_integrity(taken)
            assert region.size == size
            assert region.end * block % PAGE == region.offset % PAGE == 0
            assert region.end <= end
            assert region.end - region.first == size // block
        low = (first + 1) * block
        for each in sorted(taken):
            assert each.offset >= low
            low = (each.end + 1) * block
