"""Tests of SSD devices that fail, fill up or vanish: the tier loses pages and nothing else."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tier_kit import (
    LARGE,
    arena,
    directories,
    folder,
    get,
    in_volume,
    key,
    keys,
    put,
    two_volumes,
)

from sgl_ext.memory.transfer import File, FileLane, TransferEngine
from sgl_ext.tiers import batches, scan, slots
from sgl_ext.tiers.arena import Arena
from sgl_ext.tiers.ssd import SsdTier
from sgl_ext.tiers.volume import Volume


@pytest.fixture
def host(engine: TransferEngine) -> Arena:
    return arena(engine, 40, LARGE)


@pytest.fixture
def tier(engine: TransferEngine, host: Arena, tmp_path: Path, backend: str) -> Iterator[SsdTier]:
    """Yields a tier whose two volumes hold pages 0 to 39: one the even pages, one the odd ones."""
    with two_volumes(host, engine, tmp_path, backend) as tier:
        yield tier


def break_device(volume: Volume) -> None:
    """Makes I/O on a volume fail with EIO."""
    volume.file.close()
    volume.file = unmapped(volume)


def unmapped(volume: Volume) -> File:
    """Returns a file on which I/O fails with EIO: the memory of this process, in which these
    offsets are not mapped."""
    lane = volume.lane
    assert isinstance(lane, FileLane)
    fd = os.open("/proc/self/mem", os.O_RDWR)
    try:
        return lane.adopt(fd, 2 << 20)
    finally:
        os.close(fd)


def damage(volume: Volume, slot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes I/O on one slot fail with EIO, and all other I/O that is submitted with it."""
    whole, submit = volume.file, volume.submit
    broken = unmapped(volume)

    def faulty(slots: NDArray[np.int64], *args: Any, **keywords: Any) -> Any:
        volume.file = broken if slot in slots else whole
        return submit(slots, *args, **keywords)

    monkeypatch.setattr(volume, "submit", faulty)


# Errors


def test_eio_in_one_slot_loses_only_its_page(
    tier: SsdTier, host: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = tier._volumes[0]
    (lost,) = (number for number in range(40) if volume.slots.index.get(key(number)) == 7)
    damage(volume, 7, monkeypatch)
    for _ in range(4):
        assert get(tier, host, *range(40)) == [number != lost for number in range(40)]
    assert tier.statistics().failures == {"EIO": 1}
    assert tier.statistics().pages == 39
    assert tier.volumes[0].state == "ok"


def test_a_slot_that_cannot_be_written_fails_one_page(
    tier: SsdTier, host: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every slot is in use, so that pages are evicted for each batch."""
    assert all(put(tier, host, *range(40, 60)))
    assert tier.statistics().pages == tier.statistics().capacity == 60
    volume = tier._volumes[0]
    damage(volume, next(iter(volume.slots.index.values())), monkeypatch)
    stored = put(tier, host, *range(100, 110))
    assert stored.count(False) == 1
    assert get(tier, host, *range(100, 110)) == stored
    for first in range(200, 300, 10):
        assert all(put(tier, host, *range(first, first + 10)))
        assert all(get(tier, host, *range(first, first + 10)))
    assert tier.statistics().failures == {"EIO": 1}
    assert tier.statistics().pages == 59
    assert tier.volumes[0].state == "ok"


def test_slots_that_could_not_be_written_are_used_if_there_is_no_other(
    engine: TransferEngine, host: Arena, tmp_path: Path
) -> None:
    tier = SsdTier(host, engine, [tmp_path], 4 * host.stride)
    (volume,) = tier._volumes
    with pytest.MonkeyPatch.context() as failing:
        failing.setattr(volume, "file", unmapped(volume))
        assert not any(put(tier, host, *range(4)))
    assert all(put(tier, host, *range(4)))
    assert all(get(tier, host, *range(4)))
    tier.close()


def test_a_device_on_which_everything_fails_is_not_asked_for_each_page(
    tier: SsdTier, host: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, asked = tier._volumes[0], list[int]()
    good, submit = in_volume(tier._volumes[1]), volume.submit
    monkeypatch.setattr(batches, "MOST_DIVIDED", 3)
    break_device(volume)

    def counted(slots: NDArray[np.int64], *args: Any, **keywords: Any) -> Any:
        asked.append(len(slots))
        return submit(slots, *args, **keywords)

    monkeypatch.setattr(volume, "submit", counted)
    assert get(tier, host, *range(40)) == good
    assert asked == [20, 10, 10, 5, 5, 5, 5]
    assert tier.statistics().failures == {"EIO": 20}


def test_eio_loses_only_the_pages_of_its_device(
    tier: SsdTier, host: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    broken, healthy = tier._volumes
    good = in_volume(healthy)
    break_device(broken)
    assert get(tier, host, *range(40)) == good
    assert tier.statistics().failures == {"EIO": 20}
    assert tier.statistics().pages == 20
    assert tier.volumes[0].state == "ok"
    # Its slots are free again, but writes to them fail.
    stored = put(tier, host, *range(100, 110))
    assert sum(stored) == 10 - tier.statistics().failures["EIO"] + 20
    assert not caplog.records
    put(tier, host, *range(200, 210))
    (record,) = caplog.records
    for part in ("disk0 is disabled", "EIO", "check the device"):
        assert part in record.getMessage()
    # From here on only the healthy volume is used.
    assert [volume.state for volume in tier.volumes] == ["dead", "ok"]
    assert tier.available
    before = tier.statistics().failures
    assert all(put(tier, host, *range(300, 310)))
    assert all(get(tier, host, *range(300, 310)))
    assert tier.statistics().failures == before
    assert tier.statistics().capacity == 30


def test_a_tier_without_devices_is_unavailable(tier: SsdTier, host: Arena) -> None:
    for volume in tier._volumes:
        break_device(volume)
    for turn in range(3):
        assert tier.available
        assert not any(put(tier, host, *range(100 * turn + 100, 100 * turn + 110)))
    assert not tier.available
    assert tier.lookup(keys(0)) == 0
    assert not any(get(tier, host, *range(40)))
    assert not any(put(tier, host, 1))
    assert tier.statistics().pages == tier.statistics().capacity == 0


def test_a_success_resets_the_count_of_failures(tier: SsdTier, host: Arena) -> None:
    first = tier._volumes[0]
    error = OSError(errno.EIO, "once")
    with tier._lock:
        for _ in range(2):
            first.failed(error)
    assert any(get(tier, host, *range(40)))
    with tier._lock:
        for _ in range(2):
            first.failed(error)
            assert not first.dead
        first.failed(error)
    assert first.dead


def test_a_truncated_file_loses_pages_but_not_its_device(
    tier: SsdTier, host: Arena, tmp_path: Path
) -> None:
    good = in_volume(tier._volumes[1])
    os.truncate(folder(tmp_path / "disk0") / "pages", host.stride // 2)
    assert get(tier, host, *range(40)) == good
    assert tier.statistics().failures == {"ENODATA": 20}
    for _ in range(4):
        assert get(tier, host, *range(40)) == good
    assert [volume.state for volume in tier.volumes] == ["ok", "ok"]
    assert all(put(tier, host, *range(40)))
    assert all(get(tier, host, *range(40)))


def test_a_start_loses_only_the_pages_of_unreadable_slots(
    engine: TransferEngine,
    tier: SsdTier,
    host: Arena,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    volume = tier._volumes[0]
    held = dict(volume.slots.index)
    broken, submit = unmapped(volume), TransferEngine.submit

    def faulty(self: TransferEngine, copies: Any, *args: Any) -> Any:
        ((sector, address, width, rows, stride, pitch),) = copies
        first = (sector - volume.file.base) // stride
        if {7, 12} & {*range(first, first + rows)}:
            sector = broken.base
        return submit(self, [(sector, address, width, rows, stride, pitch)], *args)

    monkeypatch.setattr(TransferEngine, "submit", faulty)
    volume.slots.index.clear()
    scan.restore([volume], host, engine, 10.0)
    assert volume.slots.index == {key: slot for key, slot in held.items() if slot not in (7, 12)}
    assert [each.getMessage().partition(": ")[2][:18] for each in caplog.records] == [
        "1 pages are lost: "
    ] * 2


def test_pages_of_an_overwritten_file_fail_their_checksum(
    tier: SsdTier, host: Arena, tmp_path: Path
) -> None:
    file = folder(tmp_path / "disk0") / "pages"
    good = in_volume(tier._volumes[1])
    file.write_bytes(b"\x55" * file.stat().st_size)
    assert get(tier, host, *range(40)) == good
    assert tier.statistics().failures == {"checksum": 20}
    assert tier.lookup(keys(*range(40))) == (0 if not good[0] else 1)
    assert all(put(tier, host, *range(40)))
    assert all(get(tier, host, *range(40)))


@pytest.mark.parametrize("replaced", [False, True])
def test_a_volume_whose_directory_is_removed_is_given_up(
    tier: SsdTier,
    host: Arena,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    replaced: bool,
) -> None:
    left = in_volume(tier._volumes[1])
    removed = folder(tmp_path / "disk0")
    shutil.rmtree(tmp_path / "disk0")
    if replaced:  # by a file that this process has not opened
        removed.mkdir(parents=True)
        (removed / "pages").touch()
    assert get(tier, host, *range(40)) == left
    (record,) = caplog.records
    for part in ("disk0 is disabled", "removed while the server ran", "restart"):
        assert part in record.getMessage()
    assert tier.statistics().failures == {"removed": 20}
    assert [volume.state for volume in tier.volumes] == ["dead", "ok"]
    assert all(put(tier, host, *range(100, 110)))
    assert all(get(tier, host, *range(100, 110)))
    assert tier.available
    shutil.rmtree(tmp_path / "disk1")
    assert not any(put(tier, host, 5))
    assert not tier.available
    assert len(caplog.records) == 2
    tier.close()


def test_loads_and_stores_fail_after_the_engine_is_closed(
    engine: TransferEngine, tier: SsdTier, host: Arena
) -> None:
    engine.close()
    assert not any(get(tier, host, *range(40)))
    assert not any(put(tier, host, 100))
    assert tier.statistics().failures == {"closed": 41}
    assert tier.statistics().pages == 40


def test_pages_of_a_failed_sync_are_not_stored(
    engine: TransferEngine, host: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = SsdTier(host, engine, directories(tmp_path, 2), 30 * host.stride, fsync=True)
    synced: list[int] = []
    real = os.fdatasync

    def fdatasync(fd: int) -> None:
        synced.append(fd)
        if len(synced) == 3:
            raise OSError(errno.EIO, "lost")
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    assert all(put(tier, host, *range(10)))
    assert len(set(synced)) == len(synced) == 2
    stored = put(tier, host, *range(10, 20))
    assert sum(stored) == 5
    assert get(tier, host, *range(10, 20)) == stored
    assert tier.statistics().failures == {"EIO": 5}
    tier.close()


# Full file systems


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_full_file_system_evicts_until_it_has_room_again(
    engine: TransferEngine,
    host: Arena,
    small: Path,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (small / "others").write_bytes(bytes(512 << 10))
    tier = SsdTier(host, engine, [small], 1 << 20, backend=backend)
    stored = [all(put(tier, host, *range(n, n + 4))) for n in range(0, 40, 4)]
    assert stored[0]
    assert not all(stored)
    assert set(tier.statistics().failures) == {"ENOSPC"}
    assert tier.volumes[0].state == "full"
    assert tier.statistics().directories == {str(small): "full"}
    _evicts_within(tier, host)
    assert caplog.text.count("is full: the tier keeps") == 1
    # Another file is deleted, which makes room.
    (small / "others").unlink()
    monkeypatch.setattr(slots, "GROW_AGAIN_S", 0.0)
    tier._volumes[0].slots._full_until = 0.0
    held = tier.statistics().pages
    for number in range(200, 220):
        assert all(put(tier, host, number))
    assert held < tier.statistics().pages == tier.statistics().capacity == (1 << 20) // host.stride
    assert tier.available
    tier.close()


def test_a_file_size_limit_evicts_within_the_existing_slots(
    engine: TransferEngine, host: Arena, tmp_path: Path, backend: str
) -> None:
    tier = SsdTier(host, engine, [tmp_path], 40 * host.stride, backend=backend)
    assert all(put(tier, host, *range(8)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 * host.stride, hard))
    try:
        assert put(tier, host, 8, 9) == [False, False]
        assert tier.statistics().failures == {"EFBIG": 2}
        _evicts_within(tier, host)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    tier.close()


def _evicts_within(tier: SsdTier, host: Arena) -> None:
    held, failures = tier.statistics().pages, tier.statistics().failures
    assert held > 0
    for number in range(100, 120):
        assert put(tier, host, number) == [True]
        assert get(tier, host, number) == [True]
    assert tier.statistics().pages == held
    assert tier.statistics().failures == failures
    assert tier.available
