"""Tests of slow and stalled devices, and of directories that another server uses."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tier_kit import (
    LARGE,
    arena,
    directories,
    fill,
    get,
    holds,
    in_volume,
    key,
    keys,
    put,
    two_volumes,
    wipe,
)
from transfer_kit import wait_until

from sgl_ext.errors import ExtError
from sgl_ext.memory.transfer import FileLane, Lane, TransferEngine
from sgl_ext.tiers.arena import Arena
from sgl_ext.tiers.progress import Progress
from sgl_ext.tiers.ssd import SsdTier
from sgl_ext.tiers.volume import Volume


@pytest.fixture
def host(engine: TransferEngine) -> Arena:
    return arena(engine, 40, LARGE)


@pytest.fixture
def tier(engine: TransferEngine, host: Arena, tmp_path: Path, backend: str) -> Iterator[SsdTier]:
    """Yields a tier with pages 0 to 39; one volume holds the even ones, the other the odd ones."""
    with two_volumes(host, engine, tmp_path, backend) as tier:
        yield tier


def slowed(volume: Volume, engine: TransferEngine, bytes_per_second: float) -> Lane:
    """Throttles the lane of a volume, and returns the new lane.

    The file belongs to the lane below.
    """
    volume.progress = Progress(0.5)
    volume.lane = engine.throttled_lane(
        volume.lane, bytes_per_second=bytes_per_second, piece_bytes=4096
    )
    return volume.lane


def test_a_slow_device_is_not_stalled(
    engine: TransferEngine, host: Arena, tmp_path: Path, backend: str
) -> None:
    """The transfer takes longer than the deadline, but makes progress all the time."""
    assert 40 * host.stride > 1.4e6
    tier = SsdTier(
        host,
        engine,
        [tmp_path],
        40 * host.stride,
        backend=backend,
        deadline=1.0,
        wrap=lambda lane: engine.throttled_lane(lane, bytes_per_second=1e6, piece_bytes=4096),
    )
    assert all(put(tier, host, *range(40)))
    assert all(get(tier, host, *range(40)))
    assert tier.statistics().failures == {}
    tier.close()


def test_a_volume_that_waits_for_another_on_its_device_is_not_stalled(
    engine: TransferEngine, host: Arena, tmp_path: Path, backend: str
) -> None:
    """One volume's I/O takes longer than the deadline, and the other's begins only after it."""
    assert 20 * host.stride > 0.7e6
    lanes: list[Lane] = []

    def shared(lane: FileLane) -> Lane:
        if not lanes:
            lanes.append(engine.throttled_lane(lane, bytes_per_second=1e6, piece_bytes=4096))
        return lanes[0]

    tier = SsdTier(
        host,
        engine,
        directories(tmp_path, 2),
        40 * host.stride,
        backend=backend,
        deadline=0.4,
        wrap=shared,
    )
    assert all(put(tier, host, *range(40)))
    assert all(get(tier, host, *range(40)))
    assert tier.statistics().failures == {}
    tier.close()


def test_directories_on_one_device_share_its_progress(
    engine: TransferEngine, host: Arena, tmp_path: Path, backend: str
) -> None:
    tier = SsdTier(host, engine, directories(tmp_path, 2), 1 << 20, backend=backend)
    first, second = tier._volumes
    assert first.progress is second.progress
    tier.close()


def test_a_stalled_device_is_not_used_until_it_makes_progress(
    engine: TransferEngine, tier: SsdTier, host: Arena
) -> None:
    stuck, healthy = tier._volumes
    good = in_volume(healthy)
    quick = stuck.lane
    slowed(stuck, engine, 2048)  # a piece every two seconds
    wipe(host)
    loaded: list[list[bool]] = []

    def load() -> None:
        loaded.append(tier.load(keys(*range(20)), np.arange(20)).tolist())

    thread = threading.Thread(target=load)
    thread.start()
    assert wait_until(lambda: tier.volumes[0].state == "stalled")
    # Meanwhile it is not used, and the other device serves.
    assert tier.available
    assert tier.lookup(keys(*range(40))) == (1 if good[0] else 0)
    fill(host, keys(*range(100, 108)), np.arange(32, 40))
    assert tier.store(keys(*range(100, 108)), np.arange(32, 40)).all()
    assert tier.load(keys(*range(100, 108)), np.arange(24, 32)).all()
    assert holds(host, keys(*range(100, 108)), np.arange(24, 32)).all()
    assert all(key(number) in healthy.slots.index for number in range(100, 108))
    assert not loaded  # the device may still write to its slots
    thread.join(60)
    assert loaded[0] == good[:20]
    landed = host.memory.copy()
    assert tier.statistics().failures == {"stalled": good[:20].count(False)}
    # After progress it is in use again with all its pages, and there was no late write.
    assert [volume.state for volume in tier.volumes] == ["ok", "ok"]
    assert np.array_equal(landed, host.memory)
    stuck.lane = quick
    assert all(get(tier, host, *range(40)))


def test_a_stalled_store_frees_its_slots(
    engine: TransferEngine, tier: SsdTier, host: Arena
) -> None:
    stuck = tier._volumes[0]
    quick = stuck.lane
    slowed(stuck, engine, 2048)
    room = stuck.slots.room(0.0)
    stored = put(tier, host, *range(100, 110))
    count = stored.count(False)
    assert 4 <= count <= 6
    assert tier.statistics().failures == {"stalled": count}
    assert stuck.slots.room(0.0) == room
    stuck.lane = quick
    assert get(tier, host, *range(100, 110)) == stored


def test_a_device_that_does_not_answer_at_start_is_refused(
    engine: TransferEngine, tier: SsdTier, host: Arena, tmp_path: Path
) -> None:
    tier.close()
    with pytest.raises(ExtError, match=r"disk0 has not responded for 0\.1 s; check the device"):
        SsdTier(
            host,
            engine,
            directories(tmp_path, 2),
            30 * host.stride,
            deadline=0.1,
            wrap=lambda lane: engine.throttled_lane(lane, bytes_per_second=1000),
        )
    SsdTier(host, engine, directories(tmp_path, 2), 30 * host.stride).close()  # nothing is locked


# Directories in use

OWNER = """
import sys
from pathlib import Path
from tier_kit import LARGE, arena, put
from sgl_ext.memory.transfer import TransferEngine
from sgl_ext.tiers.ssd import SsdTier

engine = TransferEngine()
host = arena(engine, 4, LARGE)
tier = SsdTier(host, engine, [Path(sys.argv[1])], 1 << 20)
assert all(put(tier, host, 1, 2))
print("open", flush=True)
sys.stdin.read()
"""


def test_a_second_server_is_refused_while_the_first_runs(
    engine: TransferEngine, host: Arena, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "open\n"
        with pytest.raises(ExtError, match=f"in use by process {owner.pid}; stop that server"):
            SsdTier(host, engine, [tmp_path], 1 << 20)
        owner.kill()
    tier = SsdTier(host, engine, [tmp_path], 1 << 20)
    assert get(tier, host, 1, 2) == [True, True]
    with pytest.raises(ExtError, match=f"in use by process {os.getpid()}"):
        SsdTier(host, engine, [tmp_path], 1 << 20)
    assert get(tier, host, 1, 2) == [True, True]
    tier.close()
