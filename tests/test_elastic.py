"""Elastic units, Algorithm 1 of SwiftCache, and a worker's accounting of what it lends."""

from __future__ import annotations

import math
import random
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_ext.memory.block_groups import BlockGroups
from sgl_ext.memory.elastic import (
    ElasticPool,
    ElasticUnits,
    LengthWindow,
    blocks_in,
    minimum_elastic_units,
    scale_down,
    scale_up,
)
from sgl_ext.memory.slab import DTYPES, Layout


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

small = st.integers(1, 12)
geometries = st.builds(
    model,
    layers=small,
    kv_heads=small,
    head_dim=small,
    page=st.sampled_from([1, 2, 16]),
    dtype=st.sampled_from(sorted(DTYPES)),
)


@pytest.mark.parametrize(
    ("model", "megabytes"), [(LWM, 0.5), (QWEN3_8B, 0.141), (QWEN3_14B, 0.156), (QWEN3_32B, 0.25)]
)
def test_bytes_of_a_token_are_those_of_table_2(model: Layout, megabytes: float) -> None:
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
def test_units_of_known_models(worker: Layout, master: Layout, units: ElasticUnits) -> None:
    assert minimum_elastic_units(worker=worker, master=master) == units


def test_the_unit_of_smollm2_beside_lwm_is_360_mib() -> None:
    units = minimum_elastic_units(worker=LWM, master=SMOLLM2)
    assert units.worker * LWM.block_bytes == 360 * 2**20


def test_the_papers_element_counts_give_the_same_units_for_one_dtype() -> None:
    def elements(model: Layout) -> int:  # Eq. 6-7
        return model.layers * model.page * model.kv_heads * model.head_dim

    for master in (LWM, SMOLLM2, QWEN3_8B):
        for worker in (QWEN3_32B, QWEN3_14B, LWM):
            common = math.lcm(elements(master), elements(worker))
            assert minimum_elastic_units(worker=worker, master=master) == (
                common // elements(worker),
                common // elements(master),
            )


def test_units_count_bytes_not_elements() -> None:
    half = model(layers=4, kv_heads=1, head_dim=8, dtype="bfloat16")
    full = model(layers=4, kv_heads=1, head_dim=8, dtype="float32")
    assert minimum_elastic_units(worker=half, master=full) == (2, 1)


@given(geometries, geometries)
def test_units_have_equal_bytes_and_are_minimal(worker: Layout, master: Layout) -> None:
    units = minimum_elastic_units(worker=worker, master=master)
    assert units.worker * worker.block_bytes == units.master * master.block_bytes
    assert not any(
        blocks * worker.block_bytes % master.block_bytes == 0 for blocks in range(1, units.worker)
    )
    assert minimum_elastic_units(worker=master, master=worker) == units[::-1]


@given(st.integers(0, 10**6), geometries, geometries)
def test_bytes_lent_waste_less_than_one_block(blocks: int, worker: Layout, master: Layout) -> None:
    size = blocks * worker.block_bytes
    assert 0 <= size - blocks_in(size, master) * master.block_bytes < master.block_bytes


UNITS = ElasticUnits(worker=4, master=3)


@pytest.mark.parametrize(
    ("blocks", "length", "step"),
    [
        (10, 0, (0, 0)),
        (10, 160, (0, 0)),  # exactly full
        (10, 161, (4, 3)),  # one block short: a whole unit
        (10, 224, (4, 3)),  # exactly one unit short
        (10, 225, (8, 6)),
        (0, 1, (4, 3)),
    ],
)
def test_scale_up_is_algorithm_1(blocks: int, length: int, step: tuple[int, int]) -> None:
    assert scale_up(blocks, 16, UNITS, length) == step


@pytest.mark.parametrize(
    ("blocks", "longest", "step"),
    [
        (10, 160, (0, 0)),
        (10, 500, (0, 0)),
        (10, 97, (0, 0)),  # three to spare: no whole unit
        (10, 96, (4, 3)),
        (10, 33, (4, 3)),
        (10, 32, (8, 6)),
        (10, 0, (8, 6)),
    ],
)
def test_scale_down_is_algorithm_1(blocks: int, longest: int, step: tuple[int, int]) -> None:
    assert scale_down(blocks, 16, UNITS, longest) == step


@given(
    st.integers(0, 500),
    st.integers(1, 32),
    st.builds(ElasticUnits, st.integers(1, 40), st.integers(1, 40)),
    st.integers(0, 20_000),
)
def test_steps_suffice_and_are_minimal(
    blocks: int, page: int, units: ElasticUnits, length: int
) -> None:
    gained, lost = scale_up(blocks, page, units, length)
    assert (blocks + gained) * page >= length
    assert gained == 0 or (blocks + gained - units.worker) * page < length
    given_away, got = scale_down(blocks, page, units, length)
    assert given_away == 0 or (blocks - given_away) * page >= length
    assert blocks * page <= length or (blocks - given_away - units.worker) * page < length
    assert (gained == 0) or (given_away == 0)
    for here, there in ((gained, lost), (given_away, got)):
        assert here * units.master == there * units.worker
        assert here % units.worker == 0


def test_the_window_forgets() -> None:
    window = LengthWindow(60)
    assert window.longest(0) == 0
    window.add(500, 0)
    window.add(100, 30)
    window.add(200, 40)
    assert window.longest(60) == 500  # sixty seconds old: still in the window
    assert window.longest(60.5) == 200  # the 100 before it was hidden by it
    assert window.longest(100.5) == 0


def test_time_does_not_go_back() -> None:
    window = LengthWindow(60)
    window.add(5, 10)
    with pytest.raises(ValueError, match="time went from 10 to 9"):
        window.add(7, 9)
    with pytest.raises(ValueError, match="time went from 10 to nan"):
        window.longest(math.nan)
    assert window.longest(10) == 5
    with pytest.raises(ValueError, match="must be positive"):
        LengthWindow(0)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 50), st.booleans())), st.integers(1, 60)
)
def test_the_window_is_the_maximum_over_it(
    steps: list[tuple[int, int, bool]], seconds: int
) -> None:
    window, seen, now = LengthWindow(seconds), [], 0
    for pause, length, is_request in steps:
        now += pause
        if is_request:
            window.add(length, now)
            seen.append((now, length))
        recent = [length for time, length in seen if time >= now - seconds]
        assert window.longest(now) == max(recent, default=0)


def pool_of(blocks: int = 100, **options: object) -> tuple[ElasticPool, BlockGroups]:
    # Units: 2 blocks of the worker are 1 of the master.
    groups = BlockGroups(blocks)
    return ElasticPool(groups, QWEN3_32B, LWM, **options), groups  # type: ignore[arg-type]


def test_an_idle_worker_lends_all_but_its_minimum() -> None:
    pool, groups = pool_of(minimum=11)
    assert pool.scale_down(now=0) == 88  # whole units
    assert pool.lend(88)
    assert (pool.local, pool.lent, pool.master_blocks) == (12, 88, 44)
    assert groups.available == 12
    assert not pool.lend(2)
    assert pool.scale_down(now=1) == 0


def test_a_worker_keeps_what_recent_requests_needed() -> None:
    pool, _ = pool_of()
    pool.observe(30 * 16, now=0)
    pool.observe(7, now=50)
    assert pool.scale_down(now=60) == 70
    assert pool.scale_down(now=61) == 98  # one block for 7 tokens, whole units
    assert pool.scale_down(now=111) == 98  # one block stays


def test_blocks_in_use_are_not_lent() -> None:
    pool, groups = pool_of()
    (runs,) = groups.allocate([(None, 51)]) or []
    assert pool.scale_down(now=0) == 48
    assert not pool.lend(50)
    assert (pool.local, pool.lent) == (100, 0)
    assert pool.lend(48)
    groups.release(runs)
    assert pool.scale_down(now=0) == 50


def test_a_request_reclaims_what_it_needs() -> None:
    pool, groups = pool_of()
    assert pool.lend(90)
    assert pool.scale_up(10 * 16) == 0
    assert pool.scale_up(10 * 16 + 1) == 2
    assert pool.scale_up(10**6) == 90  # Algorithm 1 asks for more than there is
    assert pool.local == 10  # the master still has them
    pool.reclaimed(2)
    assert (pool.local, pool.lent, pool.master_blocks, groups.available) == (12, 88, 44, 12)


def test_moves_that_cannot_be_are_refused() -> None:
    pool, _ = pool_of()
    pool.lend(10)
    with pytest.raises(ValueError, match="cannot move 3 blocks; ask for a multiple of 2"):
        pool.lend(3)
    with pytest.raises(ValueError, match="cannot move -2 blocks"):
        pool.reclaimed(-2)
    with pytest.raises(ValueError, match="cannot take back 12 blocks: 10 are lent"):
        pool.reclaimed(12)
    assert (pool.local, pool.lent) == (90, 10)
    for minimum in (0, 101):
        with pytest.raises(ValueError, match=f"cannot keep at least {minimum} of 100 blocks"):
            pool_of(minimum=minimum)
    with pytest.raises(ValueError, match="granularity is 'unit' or 'block', not 'half'"):
        pool_of(granularity="half")
    with pytest.raises(ValueError, match="a request has 0 tokens or more, not -1"):
        pool.observe(-1, now=0)


def test_single_blocks_can_be_lent() -> None:
    groups = BlockGroups(100)
    pool = ElasticPool(groups, LWM, SMOLLM2, granularity="block")
    assert pool.unit == 1
    assert ElasticPool(BlockGroups(100), LWM, SMOLLM2).unit == 45
    pool.observe(16, now=0)
    assert pool.scale_down(now=0) == 99
    assert pool.lend(3)
    assert pool.master_blocks == 68  # 3 * 8 MiB in blocks of 360 KiB
    assert pool.scale_up(98 * 16) == 1


LIVES, OPERATIONS = 100, 1000


@given(
    seed=st.integers(0, 2**32),
    models=st.sampled_from([(QWEN3_32B, LWM), (QWEN3_14B, LWM), (LWM, LWM), (QWEN3_14B, QWEN3_8B)]),
    granularity=st.sampled_from(["unit", "block"]),
    minimum=st.integers(1, 20),
    more=st.integers(0, 50),
)
@settings(max_examples=LIVES, derandomize=True, deadline=None)
def test_random_lives_keep_the_account(
    seed: int,
    models: tuple[Layout, Layout],
    granularity: Literal["unit", "block"],
    minimum: int,
    more: int,
) -> None:
    """100,000 operations in all, against the set of blocks in use and the number of lent ones."""
    choose = random.Random(seed)  # noqa: S311
    worker, master = models
    capacity = minimum + more
    groups = BlockGroups(capacity)
    pool = ElasticPool(groups, worker, master, minimum=minimum, granularity=granularity)
    in_use: set[int] = set()
    lent = 0
    for now in range(OPERATIONS):
        action = choose.randrange(8)
        tail = capacity - lent - max(in_use, default=0)
        if action == 0:
            pool.observe(choose.randrange(400), now)
        elif action <= 2:
            owner = choose.choice([None, 0, 1, 2])
            (runs,) = groups.allocate([(owner, choose.randrange(1, 8))]) or [[]]
            in_use |= {block for start, length in runs for block in range(start, start + length)}
        elif action == 3:
            freed = choose.sample(sorted(in_use), min(len(in_use), choose.randrange(10)))
            groups.release([(block, 1) for block in freed])
            in_use.difference_update(freed)
        elif action == 4:
            groups.close(choose.randrange(3))
        elif action == 5:
            blocks = pool.scale_down(now)
            assert pool.lend(blocks)  # what it proposes is possible
            lent += blocks
        elif action == 6:
            blocks = choose.randrange(4) * pool.unit
            possible = blocks <= min(tail, capacity - lent - minimum)
            assert pool.lend(blocks) == possible
            lent += blocks * possible
        elif choose.random() < 0.5:
            tokens = choose.randrange(1000)
            blocks = pool.scale_up(tokens)
            pool.reclaimed(blocks)
            lent -= blocks
            assert pool.local * 16 >= tokens or lent == 0
        else:
            blocks = choose.randrange(4) * pool.unit
            if blocks <= lent:
                pool.reclaimed(blocks)
                lent -= blocks
            else:
                with pytest.raises(ValueError, match="cannot take back"):
                    pool.reclaimed(blocks)
        groups.check_integrity()
        assert (pool.local, pool.lent, groups.used) == (capacity - lent, lent, len(in_use))
        assert pool.local >= max(minimum, *in_use, 0)
        assert pool.lent % pool.unit == 0
        assert pool.master_blocks == lent * worker.block_bytes // master.block_bytes
