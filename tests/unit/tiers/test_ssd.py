"""SSD tier: stores pages, spreads and evicts them, and finds them after a restart."""

from __future__ import annotations

import gc
import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest
from tier_kit import (
    LARGE,
    arena,
    directories,
    fill,
    folder,
    get,
    holds,
    keys,
    places,
    put,
    wipe,
)

from sgl_ext.memory.transfer import TransferEngine
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.ssd import SsdTier


def test_pages_are_found_after_a_restart(
    engine: TransferEngine, tmp_path: Path, backend: str
) -> None:
    host, paths = arena(engine, 64, LARGE), directories(tmp_path, 3)
    tier = SsdTier(host, engine, paths, 40 * host.stride, backend=backend)
    assert tier.lookup(keys(0)) == 0
    assert all(put(tier, host, *range(60)))
    assert tier.lookup(keys(*range(60), 99, 0)) == 60
    assert all(get(tier, host, *range(60)))
    assert get(tier, host, 5, 99, 7) == [True, False, True]
    assert [volume.pages for volume in tier.volumes] == [20, 20, 20]
    tier.close()
    tier = SsdTier(host, engine, paths[::-1], 40 * host.stride, backend=backend)
    assert tier.statistics().pages == 60
    assert all(get(tier, host, *range(60)))
    assert tier.statistics().failures == {}
    for path in paths:
        assert (folder(path) / "pages").stat().st_mode & 0o777 == 0o600
        assert folder(path).stat().st_mode & 0o777 == 0o700
    tier.close()


def test_pages_may_be_in_any_slots_of_the_arena(
    engine: TransferEngine, tmp_path: Path, backend: str
) -> None:
    """Stores and loads with shuffled slots; loads pages in order, in reverse and scattered."""
    host = arena(engine, 64, LARGE)
    tier = SsdTier(host, engine, directories(tmp_path, 1), 64 * host.stride, backend=backend)
    rng = random.Random(3)  # noqa: S311
    order = rng.sample(range(64), 40)
    fill(host, keys(*range(40)), places(*order))
    assert tier.store(keys(*range(40)), places(*order)).all()
    for chosen in (range(40), range(39, -1, -1), rng.sample(range(40), 17)):
        wipe(host)
        where = places(*rng.sample(range(64), len(chosen)))
        assert tier.load(keys(*chosen), where).all()
        assert holds(host, keys(*chosen), where).all()
        others = np.setdiff1d(np.arange(64), where)
        assert (host.memory[others] == 0xEE).all()
    tier.close()


def test_empty_calls_do_nothing(engine: TransferEngine, tmp_path: Path) -> None:
    host = arena(engine, 2)
    tier = SsdTier(host, engine, directories(tmp_path, 1), 1 << 20)
    assert len(tier.load([], places())) == len(tier.store([], places())) == tier.lookup([]) == 0
    tier.close()


def test_stored_pages_are_not_written_again(engine: TransferEngine, tmp_path: Path) -> None:
    host = arena(engine, 8)
    tier = SsdTier(host, engine, directories(tmp_path, 1), 8 * host.stride)
    assert put(tier, host, 1, 2, 1) == [True] * 3
    assert put(tier, host, 1, 2) == [True] * 2
    assert tier.statistics().pages == 2
    assert tier.volumes[0].bytes_written == 3 * host.stride
    assert put(tier, host, 3, 4, 5, 6, 7, 8) == [True] * 6  # the slot of the duplicate is free
    assert tier.volumes[0].evictions == 0
    tier.close()


def test_tails_are_evicted_before_prefixes_after_a_restart(
    engine: TransferEngine, tmp_path: Path
) -> None:
    host, paths = arena(engine, 8), directories(tmp_path, 1)
    tier = SsdTier(host, engine, paths, 8 * host.stride)
    put(tier, host, 0, 1, 2, 3)
    put(tier, host, 10, 11, 12, 13)
    tier.close()
    tier = SsdTier(host, engine, paths, 8 * host.stride)
    put(tier, host, 20, 21)  # takes the slots of pages 3 and 2
    assert tier.lookup(keys(0, 1, 2, 3)) == 2
    get(tier, host, 0, 1)
    put(tier, host, 30, 31)
    assert tier.lookup(keys(0, 1)) == 2
    assert tier.lookup(keys(10, 11, 12, 13)) == 2
    assert tier.volumes[0].evictions == 4
    tier.close()


def test_page_stored_again_is_most_recent_after_a_restart(
    engine: TransferEngine, tmp_path: Path
) -> None:
    host, paths = arena(engine, 8), directories(tmp_path, 1)
    tier = SsdTier(host, engine, paths, 4 * host.stride)
    put(tier, host, 0)
    assert all(get(tier, host, 0))  # arena slot 0 holds its first trailer
    again = places(0)
    fill(host, keys(*range(1, 5)), places(1, 2, 3, 4))
    assert tier.store(keys(*range(1, 5)), places(1, 2, 3, 4)).all()  # evicts page 0
    assert tier.lookup(keys(0)) == 0
    assert tier.store(keys(0), again).all()  # stored again; evicts page 4
    tier.close()
    tier = SsdTier(host, engine, paths, 4 * host.stride)
    put(tier, host, 7)
    assert tier.lookup(keys(0)) == 1
    tier.close()


def test_pages_of_one_call_beyond_the_capacity_are_refused(
    engine: TransferEngine, tmp_path: Path
) -> None:
    host = arena(engine, 12)
    tier = SsdTier(host, engine, directories(tmp_path, 2), 4 * host.stride)
    assert put(tier, host, *range(12)) == [True] * 8 + [False] * 4
    assert tier.statistics().failures == {"no_room": 4}
    assert get(tier, host, *range(12)) == [True] * 8 + [False] * 4
    tier.close()


def test_one_of_two_copies_counts_after_a_restart(engine: TransferEngine, tmp_path: Path) -> None:
    """Makes copies of one page in two directories, as a stalled device can leave them."""
    host, paths = arena(engine, 4), directories(tmp_path, 2)
    for path, number in ((paths[0], 1), (paths[1], 2)):
        tier = SsdTier(host, engine, [path], 4 * host.stride)
        put(tier, host, *range(10 * number, 10 * number + number - 1), 7)
        tier.close()
    tier = SsdTier(host, engine, paths, 4 * host.stride)
    assert tier.statistics().pages == 2  # page 20 and one copy of page 7
    assert [volume.pages for volume in tier.volumes] in ([1, 1], [0, 2])
    assert all(get(tier, host, 7, 20))
    tier.close()


def test_smaller_capacity_truncates_the_file(engine: TransferEngine, tmp_path: Path) -> None:
    host, paths = arena(engine, 8), directories(tmp_path, 1)
    tier = SsdTier(host, engine, paths, 8 * host.stride)
    put(tier, host, *range(8))
    tier.close()
    tier = SsdTier(host, engine, paths, 3 * host.stride + 100)
    assert (folder(paths[0]) / "pages").stat().st_size == 3 * host.stride
    assert tier.statistics().pages == tier.statistics().capacity == 3
    assert sum(get(tier, host, *range(8))) == 3
    tier.close()
    tier = SsdTier(host, engine, paths, 8 * host.stride)
    assert tier.statistics().pages == 3
    assert all(put(tier, host, *range(8)))
    assert tier.volumes[0].evictions == 0
    tier.close()


def test_tier_works_without_direct_io(
    engine: TransferEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers missing O_DIRECT, and a device that requires larger alignment than slots have."""
    for refused in (None, (16384, 16384)):
        monkeypatch.setattr("sgl_ext.memory.transfer.direct_alignment", lambda _, r=refused: r)
        host = arena(engine, 4)
        tier = SsdTier(host, engine, directories(tmp_path, 1), 1 << 20)
        assert not tier._volumes[0].direct
        assert all(put(tier, host, 1, 2))
        assert all(get(tier, host, 1, 2))
        tier.close()


def test_concurrent_loads_stores_and_evictions_are_correct(
    engine: TransferEngine, tmp_path: Path, backend: str
) -> None:
    """Overwrites slots while they are read; pages that are reported as loaded are correct."""
    host = arena(engine, 64, LARGE)
    tier = SsdTier(host, engine, directories(tmp_path, 2), 12 * host.stride, backend=backend)
    wrong: list[Key] = []
    served = [0]
    stop = threading.Event()

    def write(first: int, own: Pages) -> None:
        rng = random.Random(first)  # noqa: S311
        while not stop.is_set():
            chosen = keys(*rng.sample(range(40), len(own)))
            fill(host, chosen, own)
            tier.store(chosen, own)

    def read(own: Pages) -> None:
        rng = random.Random(7)  # noqa: S311
        for _ in range(300):
            chosen = keys(*rng.sample(range(40), len(own)))
            good = tier.load(chosen, own)
            landed = holds(host, chosen, own)
            served[0] += int(good.sum())
            wrong.extend(chosen[row] for row in np.flatnonzero(good & ~landed))

    writers = [
        threading.Thread(target=write, args=(i, np.arange(8) + 8 * i), daemon=True)
        for i in range(2)
    ]
    reader = threading.Thread(target=read, args=(np.arange(16, 32),), daemon=True)
    for thread in (*writers, reader):
        thread.start()
    reader.join(60)
    stop.set()
    for thread in writers:
        thread.join(60)
    assert wrong == []
    assert served[0] > 0
    assert set(tier.statistics().failures) <= {"evicted", "checksum", "no_room"}
    held = [n for n in range(40) if tier.lookup(keys(n))]
    assert len(held) == tier.statistics().pages
    assert all(get(tier, host, *held))
    tier.close()


@pytest.mark.usefixtures("no_garbage")
def test_close_leaves_no_files_or_threads(tmp_path: Path, backend: str) -> None:
    def use() -> None:
        with TransferEngine() as engine:
            host = arena(engine, 4)
            tier = SsdTier(host, engine, directories(tmp_path, 2), 1 << 20, backend=backend)
            assert all(put(tier, host, 1, 2))
            tier.close()
            tier.close()
            assert put(tier, host, 1, 3) == get(tier, host, 1, 3) == [False, False]
            assert not tier.available
            assert tier.lookup(keys(1)) in (0, 1)
            again = SsdTier(host, engine, directories(tmp_path, 2), 1 << 20, backend=backend)
            assert all(get(again, host, 1, 2))
            again.close()

    use()
    gc.collect()
    open_files = os.listdir("/proc/self/fd")  # noqa: PTH208
    tasks = len(os.listdir("/proc/self/task"))  # noqa: PTH208
    use()
    gc.collect()
    assert os.listdir("/proc/self/fd") == open_files  # noqa: PTH208
    assert len(os.listdir("/proc/self/task")) <= tasks  # noqa: PTH208


def test_close_ends_waiting_calls(engine: TransferEngine, tmp_path: Path) -> None:
    host = arena(engine, 32)
    tier = SsdTier(
        host,
        engine,
        [tmp_path],
        1 << 20,
        wrap=lambda lane: engine.throttled_lane(lane, bytes_per_second=40e3, piece_bytes=4096),
    )
    fill(host, keys(*range(32)), np.arange(32))
    stored: list[np.ndarray] = []
    thread = threading.Thread(
        target=lambda: stored.append(tier.store(keys(*range(32)), np.arange(32)))
    )
    thread.start()
    while not tier._volumes[0]._tickets:
        pass
    tier.close()
    thread.join()
    assert not stored[0].any()
    assert tier.statistics().failures == {"closed": 32}


def test_most_recently_stored_pages_survive_restarts(
    engine: TransferEngine, tmp_path: Path
) -> None:
    """Relies on sequence numbers that continue after those of the previous process."""
    host, paths = arena(engine, 8), directories(tmp_path, 2)
    for first in (0, 4, 8):
        tier = SsdTier(host, engine, paths, 4 * host.stride)
        assert all(put(tier, host, *range(first, first + 4)))
        tier.close()
    tier = SsdTier(host, engine, paths, 4 * host.stride)
    assert tier.lookup(keys(*range(4, 12))) == tier.statistics().pages == 8
    tier.close()
