"""Start of an SSD tier: what it refuses, what it reports and what it does not change."""

from __future__ import annotations

import fcntl
import gc
import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tier_kit import (
    LAYOUT,
    arena,
    directories,
    folder,
    get,
    keys,
    occupy,
    put,
)

from sgl_ext.errors import ExtError
from sgl_ext.memory.slab import Layout
from sgl_ext.memory.transfer import TransferEngine
from sgl_ext.tiers.ssd import SsdTier


@pytest.mark.parametrize(
    ("prepare", "capacity", "message"),
    [
        (lambda _: None, 1 << 20, "found nothing; create it"),
        (lambda path: path.write_text(""), 1 << 20, "found a file"),
        (lambda path: path.symlink_to("/proc"), 1 << 20, "cannot store KV in .*: .*permission"),
        (lambda path: path.mkdir(), 1 << 60, "exceeds the disk, .* lower the capacity"),
        (lambda path: path.mkdir(), 4095, "less than one page of 4,096 B; raise the capacity"),
    ],
)
@pytest.mark.usefixtures("no_garbage")
def test_an_unusable_directory_or_capacity_is_refused(
    engine: TransferEngine,
    tmp_path: Path,
    prepare: Callable[[Path], object],
    capacity: int,
    message: str,
) -> None:
    prepare(tmp_path / "disk")
    host = arena(engine, 2)
    gc.collect()  # closes files that earlier tests have left open
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    with pytest.raises(ExtError, match=message):
        SsdTier(host, engine, [tmp_path / "disk"], capacity)
    gc.collect()
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


def test_no_directories_or_duplicate_ones_are_refused(
    engine: TransferEngine, tmp_path: Path
) -> None:
    host = arena(engine, 2)
    with pytest.raises(ExtError, match="needs a directory"):
        SsdTier(host, engine, [], 1 << 20)
    with pytest.raises(ExtError, match="the same directory is given twice"):
        SsdTier(host, engine, [tmp_path, tmp_path / ".." / tmp_path.name], 1 << 20)


def planted_link(path: Path) -> None:
    path.with_name("foreign").write_bytes(bytes(800_000))
    path.symlink_to("foreign")


@pytest.mark.parametrize("name", ["pages", "LOCK", "layout.json", "layout.draft"])
@pytest.mark.parametrize(
    "plant", [planted_link, os.mkfifo, Path.mkdir], ids=["link", "fifo", "folder"]
)
def test_planted_files_are_not_written_to(
    engine: TransferEngine, tmp_path: Path, name: str, plant: Callable[[Path], object]
) -> None:
    host = arena(engine, 4)
    SsdTier(host, engine, [tmp_path], 1 << 20).close()
    mine = folder(tmp_path)
    if name == "layout.draft":
        (mine / "layout.json").unlink()
    (mine / name).unlink(missing_ok=True)
    plant(mine / name)
    try:
        tier = SsdTier(host, engine, [tmp_path], 8 * host.stride)
    except ExtError as error:
        assert str(tmp_path) in str(error)
    else:
        assert all(put(tier, host, 1))
        tier.close()
        assert name.startswith("layout")
    if (foreign := mine / "foreign").exists():
        assert foreign.read_bytes() == bytes(800_000)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_a_folder_of_another_user_is_refused(engine: TransferEngine, tmp_path: Path) -> None:
    host = arena(engine, 4)
    SsdTier(host, engine, [tmp_path], 1 << 20).close()
    for path in (folder(tmp_path) / "pages", folder(tmp_path)):
        os.chown(path, 1000, 1000)
        with pytest.raises(ExtError, match="that this user owns"):
            SsdTier(host, engine, [tmp_path], 1 << 20)


def test_access_of_other_users_is_removed(engine: TransferEngine, tmp_path: Path) -> None:
    host = arena(engine, 4)
    SsdTier(host, engine, [tmp_path], 1 << 20).close()
    mine = folder(tmp_path)
    mine.chmod(0o777)
    (mine / "pages").chmod(0o666)
    SsdTier(host, engine, [tmp_path], 1 << 20).close()
    assert mine.stat().st_mode & 0o777 == 0o700
    assert (mine / "pages").stat().st_mode & 0o777 == 0o600


def test_a_second_server_is_refused_without_the_lock_file(
    engine: TransferEngine, tmp_path: Path
) -> None:
    host = arena(engine, 4)
    tier = SsdTier(host, engine, [tmp_path], 1 << 20)
    (folder(tmp_path) / "LOCK").unlink()
    with pytest.raises(ExtError, match="in use by another server"):
        SsdTier(host, engine, [tmp_path], 1 << 20)
    assert all(put(tier, host, 1))
    tier.close()


def test_a_lock_that_another_start_probes_is_awaited(
    engine: TransferEngine, tmp_path: Path
) -> None:
    host = arena(engine, 4)
    SsdTier(host, engine, [tmp_path], 1 << 20).close()
    probe = os.open(folder(tmp_path) / "LOCK", os.O_RDONLY)
    fcntl.flock(probe, fcntl.LOCK_SH)
    released = threading.Timer(0.1, os.close, [probe])
    released.start()
    SsdTier(host, engine, [tmp_path], 1 << 20).close()
    released.join()


def test_a_full_disk_at_the_first_start_is_refused(
    engine: TransferEngine, small_disk: Path
) -> None:
    occupy(small_disk / "ballast")
    with pytest.raises(ExtError, match=f"cannot store KV in {small_disk}.*No space left"):
        SsdTier(arena(engine, 4), engine, [small_disk], 1 << 20)


@pytest.mark.parametrize("damage", ["{", "", "[]", "[" * 60_000, "missing", "version", "stride"])
def test_a_damaged_layout_file_discards_the_pages(
    engine: TransferEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    host = arena(engine, 4)
    tier = SsdTier(host, engine, [tmp_path], 1 << 20)
    put(tier, host, 1)
    tier.close()
    file = folder(tmp_path) / "layout.json"
    good = json.loads(file.read_text())
    assert good["fingerprint"] == "test"
    assert good["stride"] == host.stride
    if damage == "missing":
        file.unlink()
    else:
        file.write_text(json.dumps(good | {damage: 9}) if damage in good else damage)
    tier = SsdTier(host, engine, [tmp_path], 1 << 20)
    assert "the tier starts empty" in caplog.text
    assert tier.lookup(keys(1)) == 0
    assert all(put(tier, host, 1))
    tier.close()
    caplog.clear()
    tier = SsdTier(host, engine, [tmp_path], 1 << 20)
    assert tier.lookup(keys(1)) == 1
    assert caplog.text == ""
    assert json.loads(file.read_text()) == good
    tier.close()


def test_pages_of_other_models_are_reported_and_kept(
    engine: TransferEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host, other = arena(engine, 4), arena(engine, 4, replace_layout(fingerprint="else", page=8))
    tier = SsdTier(other, engine, [tmp_path], 1 << 20)
    assert all(put(tier, other, 1, 2))
    with caplog.at_level(logging.WARNING):
        # While the other is open, its folder is in use, such as by another rank of the server.
        SsdTier(host, engine, [tmp_path], 1 << 20).close()
        assert not caplog.records
        tier.close()
        mine = SsdTier(host, engine, [tmp_path], 1 << 20)
        tier = SsdTier(other, engine, [tmp_path / "."], 1 << 20)
    (record,) = caplog.records
    for part in ("page: expected 4, found 8", "fingerprint: expected test, found else", "16,384 B"):
        assert part in record.getMessage()
    assert mine.lookup(keys(1)) == 0
    assert all(get(tier, other, 1, 2))
    mine.close()
    tier.close()


def replace_layout(**changes: object) -> Layout:
    return Layout(**{name: getattr(LAYOUT, name) for name in LAYOUT.__struct_fields__} | changes)  # type: ignore[arg-type]


def test_pages_of_another_model_are_misses(engine: TransferEngine, tmp_path: Path) -> None:
    """Replaces our file by that of another model, whose trailers name the other layout."""
    host, other = arena(engine, 4), arena(engine, 4, replace_layout(fingerprint="else"))
    (here, there) = directories(tmp_path, 2)
    for path, one in ((here, host), (there, other)):
        tier = SsdTier(one, engine, [path], 1 << 20)
        put(tier, one, 1)
        tier.close()
    (folder(there) / "pages").replace(folder(here) / "pages")
    tier = SsdTier(host, engine, [here], 1 << 20)
    assert tier.lookup(keys(1)) == 0
    tier.close()
