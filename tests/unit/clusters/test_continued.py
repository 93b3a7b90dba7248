"""Tests of contexts that continue stored ones: they share files, and lose nothing of either."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray
from test_stored import GEOMETRY, OPTIONS, recorded_context

from sgl_ext._native import _clusters
from sgl_ext.clusters.about import MOST_EXTENTS
from sgl_ext.clusters.activations import attention_mass, log_sum
from sgl_ext.clusters.build import build
from sgl_ext.clusters.files import names, own_folders, remove, sweep
from sgl_ext.clusters.job import store
from sgl_ext.clusters.paths import block_file, part_file
from sgl_ext.clusters.recorded import Part, Recorded, RecordedKV
from sgl_ext.clusters.stored import Stored
from sgl_ext.clusters.stored_kv import StoredKV
from sgl_ext.errors import ExtError

WHOLE = recorded_context(tokens=1100)
LAYERS = range(GEOMETRY.layers)


@pytest.fixture
def directories(tmp_path: Path) -> list[Path]:
    found = [tmp_path / f"device{at}" for at in range(3)]
    for each in found:
        each.mkdir()
    return found


def first(tokens: int) -> Recorded:
    """Returns the record of the first tokens of a context, profiled by queries of its last ones."""
    seen = np.concatenate([np.arange(tokens - 60, tokens), np.full(30, tokens)])
    kv = WHOLE.kv[:, :tokens]  # type: ignore[call-overload]
    return Recorded(GEOMETRY, WHOLE.tokens[:tokens], kv, WHOLE.queries, seen)


def continued(name: str, base: str, tokens: int, folders: list[Path], copies: int = 1) -> Stored:
    known = Stored.open(base, folders, GEOMETRY)
    build(first(tokens), name, folders, OPTIONS, base=known, copies=copies)
    return Stored.open(name, folders, GEOMETRY)


def kv_of(stored: Stored, layer: int) -> NDArray[np.uint8]:
    found = np.zeros((stored.about.tokens, GEOMETRY.entry_bytes), np.uint8)
    StoredKV(stored).read(layer, found)
    return found


def check(stored: Stored, tokens: int) -> None:
    """Asserts that all KV and token ids of a context are there."""
    assert (stored.tokens == WHOLE.tokens[:tokens]).all()
    for layer in LAYERS:
        assert (kv_of(stored, layer) == WHOLE.kv[layer][:tokens]).all()


def test_contexts_share_the_files_of_the_one_they_continue(directories: list[Path]) -> None:
    build(first(500), "base", directories, OPTIONS)
    base = Stored.open("base", directories, GEOMETRY)
    check(base, 500)
    left, right = (
        continued(name, "base", size, directories) for name, size in (("l", 700), ("r", 503))
    )
    check(left, 700)
    check(right, 503)
    assert left.about.blocks.extents == 2
    assert right.about.blocks.extents == 1  # its new tokens are in the window
    for at, file in enumerate(base.files):
        assert left.files[at].samefile(file)
        assert right.files[at].samefile(file)
    again = continued("again", "l", 900, directories)
    check(again, 900)
    assert again.files[3].samefile(left.files[3])
    for layer in LAYERS:
        count = base.about.blocks.entries
        assert (again.layers[layer].order[:count] == base.layers[layer].order).all()
        assert (np.sort(again.layers[layer].order) == np.arange(again.about.blocks.entries)).all()
    remove("base", directories)
    remove("l", directories)
    check(Stored.open("again", directories, GEOMETRY), 900)
    check(Stored.open("r", directories, GEOMETRY), 503)
    for name in ("again", "r"):
        remove(name, directories)
    assert not [path for each in directories for path in each.iterdir()]


def test_extents_are_merged_if_there_are_too_many(directories: list[Path]) -> None:
    build(first(300), "0", directories, OPTIONS)
    extents = []
    for at in range(1, MOST_EXTENTS + 2):
        found = continued(f"{at}", f"{at - 1}", 300 + 80 * at, directories)
        check(found, 300 + 80 * at)
        extents.append(found.about.blocks.extents)
    assert extents == [*range(2, MOST_EXTENTS + 1), 2, 3]
    check(Stored.open(f"{MOST_EXTENTS - 1}", directories, GEOMETRY), 300 + 80 * (MOST_EXTENTS - 1))


@pytest.mark.parametrize(("known", "fitted"), [(500, True), (880, False)])
def test_codes_of_new_entries_find_the_most_attended_ones(
    directories: list[Path], known: int, fitted: bool
) -> None:
    build(first(known), "base", directories, OPTIONS)
    stored = continued("more", "base", 1000, directories)
    assert (stored.about.fitted == stored.about.blocks.entries) == fitted
    queries = WHOLE.queries[1, -30:]
    keys, end = first(1000).layer(1).keys, 1000 - stored.about.window
    beside = log_sum(queries, np.concatenate([keys[:4], keys[end:]]), GEOMETRY.scale)
    exact = attention_mass(queries, keys[4:end], GEOMETRY.scale, beside)
    layer = stored.layers[1]
    found = np.empty_like(exact)
    found[:, layer.order] = layer.codes.mass(queries, GEOMETRY.scale, beside)
    new = slice(Stored.open("base", directories, GEOMETRY).about.blocks.entries, None)
    count = found[:, new].shape[1] // 8
    top = np.argpartition(found[:, new], -count, axis=1)[:, -count:]
    best = np.sort(exact[:, new], axis=1)[:, -count:].sum()
    assert np.take_along_axis(exact[:, new], top, axis=1).sum() > 0.7 * best
    assert layer.often[-1:].size == 1
    assert len(layer.often) == stored.about.blocks.blocks


@pytest.mark.parametrize("harm", ["missing", "damaged", "short"])
def test_copies_are_read_if_a_device_has_lost_its_file(directories: list[Path], harm: str) -> None:
    build(first(500), "base", directories, OPTIONS, copies=2)
    stored = continued("more", "base", 700, directories)
    assert stored.about.copies == 2
    for extent in range(2):
        file = block_file(directories[1], "more", 1, extent)
        raw = bytearray(file.read_bytes())
        file.unlink()  # the base keeps its link
        if harm == "damaged":
            raw[::4096] = bytes(each ^ 1 for each in raw[::4096])
            file.write_bytes(raw)
        elif harm == "short":
            file.write_bytes(raw[:4096])
    check(stored, 700)
    check(Stored.open("base", directories, GEOMETRY), 500)
    if harm == "damaged":
        return
    with pytest.raises(ExtError, match="context more cannot be continued: device 1 has lost its"):
        continued("most", "more", 900, directories)
    assert names(directories) == ["base", "more"]


def test_damaged_blocks_are_not_continued(directories: list[Path]) -> None:
    build(first(500), "base", directories, OPTIONS)
    stored = Stored.open("base", directories, GEOMETRY)
    file = block_file(directories[1], "base", 1)
    raw = bytearray(file.read_bytes())
    raw[5] ^= 1
    file.write_bytes(raw)
    with pytest.raises(ExtError, match="base: 1 blocks of layer 0 are damaged; store it again"):
        kv_of(stored, 0)
    remove("base", directories)
    with pytest.raises(ExtError, match=r"base: .* layer 0 cannot be read: No such file or dir"):
        kv_of(stored, 0)


def test_a_record_behind_a_context_is_stored_by_the_job(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in "ab"]
    for each in directories:
        each.mkdir()
    folders = own_folders(directories)
    build(first(500), "stx-base", folders, OPTIONS)
    base = StoredKV(Stored.open("stx-base", folders, GEOMETRY))
    (record := tmp_path / "record").mkdir()
    empty = RecordedKV(record, 500, base)
    assert empty.tokens == 500
    assert (empty[1] == WHOLE.kv[1][:500]).all()
    with pytest.raises(ExtError, match="record lacks a part of the context"):
        Recorded.load(record, base)
    for start, end in ((500, 800), (800, 1000)):
        kv = [WHOLE.kv[layer][start:end] for layer in LAYERS]
        seen = np.arange(end - 90, end)
        Part(GEOMETRY, start, WHOLE.tokens[start:end], kv, WHOLE.queries, seen).save(
            part_file(record, f"{start}")
        )
    assert RecordedKV(record, 800, base).tokens == 800
    said: list[tuple[int, int]] = []
    store(record, "stx-more", directories, lambda *done: said.append(done), base="stx-base")
    assert said[-1] == (3, 3)
    check(Stored.open("stx-more", folders, GEOMETRY), 1000)
    other = Stored.open("stx-base", folders, GEOMETRY)
    salted = replace(other.about, salt="a tenant")
    other = Stored(other.name, salted, other.tokens, other.layers, other.files)
    with pytest.raises(ExtError, match="record lacks a part of the context"):
        RecordedKV(record, 800, StoredKV(other))  # of another tenant


def test_the_job_ends_with_its_server() -> None:
    job = (
        "import sys, time\nfrom sgl_ext.clusters.job import _end_with\n"
        "_end_with(int(sys.argv[1]))\nprint('it runs', flush=True)\ntime.sleep(600)"
    )
    server = (
        "import os, subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', sys.argv[1], str(os.getpid())])"
    )
    with subprocess.Popen([sys.executable, "-c", server, job], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"it runs\n"
        process.kill()
        assert process.communicate(timeout=60) == (b"", None)  # the job has its output, too
    late = subprocess.run(
        [sys.executable, "-c", job, str(process.pid)], capture_output=True, text=True, check=False
    )
    assert late.returncode == 1
    assert "the server has ended" in late.stderr


def test_sweep_removes_an_interrupted_context_and_keeps_its_base(directories: list[Path]) -> None:
    build(first(500), "stx-base", directories, OPTIONS)
    continued("stx-more", "stx-base", 700, directories)
    for each in directories:
        for index in each.glob("stx-more*.index"):
            index.unlink()  # as if the process had been killed before
    assert sweep(directories) == ["stx-more"]
    assert not [path for each in directories for path in each.glob("stx-more*")]
    check(Stored.open("stx-base", directories, GEOMETRY), 500)


def test_checksums_of_some_rows_are_those_of_all() -> None:
    rows = np.random.default_rng(3).integers(0, 256, (9, 64)).astype(np.uint8)
    every = _clusters.checksums(rows)
    only = np.array([8, 0, 3, 3])
    assert (_clusters.checksums(rows, only) == every[only]).all()
    for wrong in (9, -1):
        with pytest.raises(ValueError, match=f"there is no row {wrong}"):
            _clusters.checksums(rows, np.array([0, wrong]))
