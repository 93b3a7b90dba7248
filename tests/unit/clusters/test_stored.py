"""Tests of stored contexts on devices: they read back as written, and damaged ones are refused."""

from __future__ import annotations

import dataclasses
import errno
import mmap
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray
from safetensors.numpy import load_file

from sgl_ext.clusters import arrays, job
from sgl_ext.clusters.activations import attention_mass, log_sum
from sgl_ext.clusters.arrays import UnreadableError
from sgl_ext.clusters.build import build
from sgl_ext.clusters.files import names, remove, storing, sweep
from sgl_ext.clusters.geometry import Geometry, as_float32
from sgl_ext.clusters.paths import block_file, index_file, part_file, record_folder
from sgl_ext.clusters.profile import Options
from sgl_ext.clusters.reader import Device, DeviceError, Reader
from sgl_ext.clusters.recorded import Part, Recorded
from sgl_ext.clusters.records import KEPT_S, claimed, expire, remove_record
from sgl_ext.clusters.stored import Stored
from sgl_ext.errors import ExtError
from sgl_ext.memory.transfer import Priority, TransferEngine

GEOMETRY = Geometry(
    layers=3, heads=4, kv_heads=2, head_dim=32, dtype="float32", scale=0.2, fingerprint="a model"
)
TOKENS, OPTIONS = 700, Options(sinks=4, window=64, subspaces=4, threads=2)


def recorded_context(geometry: Geometry = GEOMETRY, tokens: int = TOKENS) -> Recorded:
    chance = np.random.default_rng(7)
    values = chance.normal(size=(geometry.layers, tokens, geometry.entry_bytes // 4))
    shape = (geometry.layers, 90, geometry.heads, geometry.head_dim)
    return Recorded(
        geometry,
        chance.integers(0, 1000, tokens).astype(np.int32),
        values.astype("<f4").view(np.uint8),
        chance.normal(size=shape).astype(np.float32),
        np.concatenate([np.arange(tokens - 60, tokens), np.full(30, tokens)]),
    )


def saved(recorded: Recorded, folder: Path) -> Path:
    """Writes a record of one part into a new folder; returns the file."""
    folder.mkdir()
    part = Part(recorded.geometry, 0, recorded.tokens, [*recorded.kv], recorded.queries,
                recorded.seen, recorded.salt)  # fmt: skip
    part.save(path := part_file(folder, "a"))
    return path


@pytest.fixture
def directories(tmp_path: Path) -> list[Path]:
    found = [tmp_path / f"device{at}" for at in range(3)]
    for each in found:
        each.mkdir()
    return found


def test_every_entry_is_stored_at_its_place(directories: list[Path]) -> None:
    recorded, heard = recorded_context(), []
    build(recorded, "a", directories, OPTIONS, lambda done, of: heard.append((done, of)))
    assert heard == [(1, 3), (2, 3), (3, 3)]
    assert list(names(directories)) == ["a"]
    stored = Stored.open("a", directories, GEOMETRY)
    assert (stored.tokens == recorded.tokens).all()
    blocks = stored.about.blocks
    window = stored.about.window
    assert 64 <= window < 64 + blocks.block
    assert blocks.entries == TOKENS - 4 - window == blocks.blocks * blocks.block
    contents = [file.read_bytes() for file in stored.files]
    assert tuple(map(len, contents)) == blocks.file_bytes
    for at, layer in enumerate(stored.layers):
        assert sorted(layer.order) == list(range(blocks.entries))
        expected = np.concatenate([recorded.kv[at, :4], recorded.kv[at, -window:]])
        assert (layer.resident == expected).all()
        device, offset = blocks.place(at, np.arange(blocks.blocks))
        for number in range(blocks.blocks):
            begin = int(offset[number])
            raw = np.frombuffer(contents[device[number]], np.uint8)[begin:]
            first = number * blocks.block
            for place, entry in enumerate(layer.order[first : first + blocks.block]):
                here = raw[place * GEOMETRY.entry_bytes :][: GEOMETRY.entry_bytes]
                assert (here == recorded.kv[at, 4 + entry]).all()
        assert 0 < layer.often.max() <= 90


def test_codes_of_the_index_find_the_most_attended_entries(directories: list[Path]) -> None:
    recorded = recorded_context()
    build(recorded, "a", directories, OPTIONS)
    stored = Stored.open("a", directories, GEOMETRY)
    queries = recorded.queries[1, -30:]
    keys, end = recorded.layer(1).keys, TOKENS - stored.about.window
    beside = log_sum(queries, np.concatenate([keys[:4], keys[end:]]), GEOMETRY.scale)
    exact = attention_mass(queries, keys[4:end], GEOMETRY.scale, beside)
    layer = stored.layers[1]
    found = np.empty_like(exact)
    found[:, layer.order] = layer.codes.mass(queries, GEOMETRY.scale, beside)
    top = np.argpartition(found, -60, axis=1)[:, -60:]
    best = np.sort(exact, axis=1)[:, -60:].sum()
    assert np.take_along_axis(exact, top, axis=1).sum() > 0.75 * best


def test_profile_counts_only_entries_that_queries_see(directories: list[Path]) -> None:
    recorded = recorded_context()
    recorded.seen[:] = 4 + 100  # no query sees more tokens
    build(recorded, "a", directories, OPTIONS)
    stored = Stored.open("a", directories, GEOMETRY)
    for layer in stored.layers:
        blocks = stored.about.blocks
        seen = (layer.order < 100).reshape(-1, blocks.block)
        often = layer.often[~seen.any(axis=1)]
        assert (often == 0).all()


def test_a_recorded_context_is_read_back(tmp_path: Path) -> None:
    recorded = recorded_context()
    part = saved(recorded, tmp_path / "recorded")
    found = Recorded.load(part.parent)
    assert found.geometry == GEOMETRY
    for name in ("tokens", "queries", "seen"):
        assert (getattr(found, name) == getattr(recorded, name)).all()
    assert np.array_equal(found.kv[:], recorded.kv)
    part.write_bytes(b"nothing of the kind" * 9)
    with pytest.raises(ExtError, match=r"a.part is not a context file of sgl_ext"):
        Recorded.load(part.parent)
    with pytest.raises(ExtError, match="missing is not a folder with the record of a context"):
        Recorded.load(tmp_path / "missing")


def test_a_record_is_removed_while_a_part_is_written(tmp_path: Path) -> None:
    part = saved(recorded_context(), folder := tmp_path / "stx-a.recorded")
    with (folder / "b.part.tmp").open("wb") as written:
        remove_record(folder)
        written.write(b"x")
    with pytest.raises(FileNotFoundError):
        part.write_bytes(b"x")
    assert not [*tmp_path.iterdir()]
    remove_record(folder)


def test_as_float32_converts_bytes_of_each_dtype() -> None:
    import torch

    numbers = torch.randn(5, 8)
    for name in ("bfloat16", "float16", "float32"):
        typed = numbers.to(getattr(torch, name))
        raw = typed.view(torch.uint8).numpy()
        assert (as_float32(raw, name) == typed.float().numpy()).all()


def test_changed_or_missing_contexts_are_refused(directories: list[Path]) -> None:
    build(recorded_context(), "a", directories, OPTIONS)

    def refused(match: str, geometry: Geometry = GEOMETRY, name: str = "a") -> None:
        with pytest.raises(ExtError, match=match):
            Stored.open(name, directories, geometry)

    refused("stored context 'b' not found", name="b")
    refused(
        "not stored for this model .fingerprint: expected another, found a model",
        replace(GEOMETRY, fingerprint="another"),
    )
    with pytest.raises(ExtError, match="is stored on 3 devices, but 2 directories"):
        Stored.open("a", directories[:2], GEOMETRY)
    swapped = [directories[0], directories[2], directories[1]]
    with pytest.raises(ExtError, match=r"No such file.*store it again"):
        Stored.open("a", swapped, GEOMETRY)
    file = block_file(directories[1], "a", 1)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    refused(r"has [\d,]+ B, expected [\d,]+ B; store it again")
    file.write_bytes(whole)
    index = index_file(directories[0], "a")
    contents = index.read_bytes()
    index.write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))
    refused(r"is damaged .*; store the context again")
    index.write_bytes(contents)
    file.unlink()
    refused("No such file or directory")
    remove("a", directories)
    assert not list(names(directories))
    assert not [path for each in directories for path in each.iterdir()]


def test_an_index_that_cannot_be_read_is_read_from_its_copy(
    directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    build(recorded_context(), "a", directories, OPTIONS, copies=2)
    open_own = arrays.open_own

    def fail(path: Path, flags: int) -> int:
        if path.parent == directories[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return open_own(path, flags)

    monkeypatch.setattr(arrays, "open_own", fail)
    assert Stored.open("a", directories, GEOMETRY).about.tokens == TOKENS
    copy = index_file(directories[1], "a")
    copy.write_bytes(copy.read_bytes()[:-1])
    with pytest.raises(UnreadableError, match="cannot be read: Input/output error; check the dev"):
        Stored.open("a", directories, GEOMETRY)


def test_sweep_removes_incomplete_contexts(directories: list[Path]) -> None:
    build(recorded_context(), "stx-a", directories, OPTIONS)

    def files() -> set[str]:
        return {path.name for each in directories for path in each.iterdir()} - {"stx-lock"}

    before = files()
    left = ["stx-b.0.blocks", "stx-c.recorded", "stx-d.index.tmp", "stx-a.recorded.tmp"]
    for name in [*left, "something.else"]:
        (directories[0] / name).write_text("x")
    (directories[2] / "stx-b.2.blocks").write_text("x")
    saved(recorded_context(), record_folder(directories[0], "stx-e"))
    with storing(directories[0]):
        assert sweep(directories) == []
    assert sweep(directories) == ["stx-b", "stx-c", "stx-d", "stx-e"]
    assert files() - before == {"something.else"}
    remove("stx-a", directories)
    assert files() == {"something.else"}


def test_an_interrupted_record_goes_on(directories: list[Path]) -> None:
    first = directories[0]
    with claimed(first, "a key") as (id_, folder):
        (folder / "a.part").write_text("x")
        with claimed(first, "a key") as (other, beside):  # the first one is in use
            assert other != id_
        expire(first, 0)
        assert folder.exists()
    (first / f"{id_}.0.blocks").write_text("x")
    (directories[1] / f"{id_}.1.blocks").write_text("x")
    assert sweep(directories) == []
    assert not [path for each in directories for path in each.glob("*.blocks")]
    remove_record(beside)
    with claimed(first, "another key") as (other, _):
        assert other != id_
    with claimed(first, "a key") as found:
        assert found == (id_, folder)
    os.utime(folder, (0, 0))
    expire(first, KEPT_S)
    assert not folder.exists()


@pytest.mark.parametrize("named", ["first is empty", "another order"])
def test_sweep_keeps_contexts_if_the_directories_are_wrong(
    named: str, directories: list[Path], tmp_path: Path
) -> None:
    build(recorded_context(), "stx-a", directories, OPTIONS)
    before = [{path.name for path in each.iterdir()} for each in directories]
    mount_point = tmp_path / "not mounted"
    mount_point.mkdir()
    first, second, third = directories
    wrong = [second, first, third] if named == "another order" else [mount_point, second, third]
    assert sweep(wrong) == []
    assert before == [{path.name for path in each.iterdir()} - {"stx-lock"} for each in directories]


def test_files_are_private_to_the_user(directories: list[Path]) -> None:
    build(recorded_context(), "stx-a", directories, OPTIONS)
    files = [path for each in directories for path in each.iterdir()]
    assert len(files) == 4
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_an_error_in_one_layer_cancels_the_remaining_layers(
    directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = replace_layers(recorded_context(), 40)
    recorded.kv[0, 5] = 255  # NaN
    done: list[int] = []
    one = dataclasses.replace(OPTIONS, threads=1)
    with pytest.raises(
        ExtError, match="layer 0 of the context has keys, values or queries that are no"
    ):
        build(recorded, "a", directories, one, lambda number, _of: done.append(number))
    assert len(done) < 3
    assert not [path for each in directories for path in each.iterdir()]


def replace_layers(recorded: Recorded, layers: int) -> Recorded:
    """Returns the context with its first layer repeated ``layers`` times."""
    return Recorded(
        replace(recorded.geometry, layers=layers), recorded.tokens,
        recorded.kv[:1].repeat(layers, axis=0), recorded.queries[:1].repeat(layers, axis=0),
        recorded.seen,
    )  # fmt: skip


def test_short_writes_are_continued(
    directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite
    monkeypatch.setattr("os.pwrite", lambda fd, data, at: write(fd, data[:1000], at))
    build(recorded_context(), "a", directories, OPTIONS)
    found = [block_file(each, "a", at).read_bytes() for at, each in enumerate(directories)]
    monkeypatch.undo()
    build(recorded_context(), "b", directories, OPTIONS)
    for at, each in enumerate(directories):
        assert block_file(each, "b", at).read_bytes() == found[at]


def test_a_device_without_room_for_the_index_is_named(
    directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sgl_ext.clusters.build.save", full)
    with pytest.raises(ExtError, match=r"^device 0 has not enough free space: the context needs"):
        build(recorded_context(), "a", directories, OPTIONS)
    assert not [path for each in directories for path in each.iterdir()]


def test_the_size_of_an_index_is_known_before_it_is_written(directories: list[Path]) -> None:
    """It is a safetensors file, and nothing else is written beside it."""
    build(recorded_context(), "a", directories, OPTIONS)
    path = index_file(directories[0], "a")
    arrays = load_file(path)
    about = Stored.open("a", directories, GEOMETRY).about
    assert sum(each.nbytes for each in arrays.values()) == about.index_bytes
    assert {name: (each.dtype, each.shape) for name, each in arrays.items()} == about.shapes()
    assert 0 < path.stat().st_size - about.index_bytes < 4096
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("at", ["open_own", "os.write"])
def test_a_record_that_cannot_be_made_leaves_nothing(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(at if at == "os.write" else f"sgl_ext.clusters.records.{at}", full)
    with pytest.raises(OSError, match="No space"), claimed(tmp_path, "a key"):
        pass
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("at", ["allocate", "write", "index"])
def test_a_failed_build_leaves_no_files(
    at: str, directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    name = {"allocate": "os.posix_fallocate", "write": "os.pwrite", "index": "os.fsync"}[at]
    monkeypatch.setattr(name, full)
    match = "has not enough free space" if at == "allocate" else "No space left on device"
    with pytest.raises(ExtError, match=match):
        build(recorded_context(), "a", directories, OPTIONS)
    assert not [path for each in directories for path in each.iterdir()]


def test_short_or_existing_contexts_are_refused(directories: list[Path]) -> None:
    with pytest.raises(ExtError, match="has 68 tokens, of which 68 stay in memory"):
        build(recorded_context(tokens=68), "a", directories, OPTIONS)
    build(recorded_context(tokens=200), "a", directories, OPTIONS)
    before = index_file(directories[0], "a").read_bytes()
    with pytest.raises(ExtError, match="File exists"):  # the existing context is unchanged
        build(recorded_context(), "a", directories, OPTIONS)
    assert index_file(directories[0], "a").read_bytes() == before
    Stored.open("a", directories, GEOMETRY)


@pytest.fixture
def engine() -> Iterator[TransferEngine]:
    with TransferEngine() as found:
        yield found


def memory(engine: TransferEngine, size: int) -> NDArray[np.uint8]:
    area = mmap.mmap(-1, size)
    found = np.frombuffer(area, np.uint8)
    engine.register(found.ctypes.data, size, owner=area)
    return found


def devices_of(
    engine: TransferEngine, directories: list[Path], rate: float | None = None
) -> list[Device]:
    found = []
    for each in directories:
        lane = engine.file_lane(each)
        slow = lane if rate is None else engine.throttled_lane(lane, bytes_per_second=rate)
        found.append(Device(len(found), each, lane, slow))
    return found


def test_blocks_are_read_from_all_devices(engine: TransferEngine, directories: list[Path]) -> None:
    recorded = recorded_context()
    build(recorded, "a", directories, OPTIONS)
    stored = Stored.open("a", directories, GEOMETRY)
    reader = Reader(engine, devices_of(engine, directories), stored)
    blocks = stored.about.blocks
    area = memory(engine, blocks.blocks * blocks.block_bytes)
    chance = np.random.default_rng(0)
    for layer in range(3):
        for count in (1, 5, blocks.blocks):
            numbers = np.sort(chance.permutation(blocks.blocks)[:count])
            area[:] = 255
            reading = reader.reading(layer, numbers, area.ctypes.data)
            reading.begin(Priority.URGENT)
            reading.wait(30)
            assert reading.finished
            assert sorted(reading.numbers) == numbers.tolist()
            assert reading.requests <= (len(directories) if count == blocks.blocks else count)
            order = stored.layers[layer].order
            for place, number in enumerate(reading.numbers):
                entries = order[number * blocks.block : (number + 1) * blocks.block]
                raw = area[place * blocks.block_bytes :][: len(entries) * GEOMETRY.entry_bytes]
                expected = recorded.kv[layer, 4 + entries].reshape(-1)
                assert (raw == expected).all()
    reader.close()


def test_read_errors_name_the_device(engine: TransferEngine, directories: list[Path]) -> None:
    build(recorded_context(), "a", directories, OPTIONS)
    stored = Stored.open("a", directories, GEOMETRY)
    numbers = np.arange(stored.about.blocks.blocks)
    area = memory(engine, len(numbers) * stored.about.blocks.block_bytes)
    slow = Reader(engine, devices_of(engine, directories, 1 << 16), stored)
    reading = slow.reading(0, numbers, area.ctypes.data)
    reading.begin(Priority.NORMAL)
    with pytest.raises(
        DeviceError, match=r"device 0 returned [\d,]+ of [\d,]+ B of a context before"
    ):
        reading.wait(0.01)
    engine.wait_any([*reading._tickets], 30)
    reader = Reader(engine, devices_of(engine, directories), stored)
    os.truncate(stored.files[1], 0)
    reading = reader.reading(1, numbers, area.ctypes.data)
    reading.begin(Priority.NORMAL)
    with pytest.raises(DeviceError, match="device 1 cannot be read"):
        reading.wait(30)
    stored.files[2].unlink()
    with pytest.raises(ExtError, match="context a cannot be read"):
        Reader(engine, devices_of(engine, directories), stored)


def test_no_two_threads_decode_a_type_at_once(
    directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """msgspec crashes if two threads use a type for the first time at once."""
    build(recorded_context(), "a", directories, OPTIONS)
    real, decoding = msgspec.json.decode, threading.Lock()

    def decode(*arguments: Any, **options: Any) -> Any:
        assert decoding.acquire(blocking=False), "two threads decode at once"
        time.sleep(0.002)
        try:
            return real(*arguments, **options)
        finally:
            decoding.release()

    monkeypatch.setattr(msgspec.json, "decode", decode)
    with ThreadPoolExecutor(2) as threads:
        opened = [threads.submit(Stored.open, "a", directories, GEOMETRY) for _ in range(2)]
        assert all((each.result().tokens == opened[0].result().tokens).all() for each in opened)


def test_layers_that_are_stored_at_once_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = recorded_context()
    layer = len(recorded.tokens) * recorded.geometry.entry_bytes
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(64))
    for memory, layers in ((8 * 5 * layer, 5), (0, 1), (8 * 1000 * layer, 64)):
        monkeypatch.setattr(job, "available_memory", lambda memory=memory: memory)
        assert job._layers_at_once(recorded) == layers
