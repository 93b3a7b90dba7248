"""Recorder of contexts: a record that cannot be made ends no request and no server."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from test_stored import GEOMETRY
from transfer_kit import wait_until

from sgl_ext.clusters.paths import RESERVED, failed_file, part_file, record_folder, reserve_file
from sgl_ext.clusters.recorded import Part, Recorded
from sgl_ext.engine.clusters import recorder
from sgl_ext.engine.clusters.parameters import IsRecorded
from sgl_ext.engine.clusters.recorder import Recorder
from sgl_ext.errors import ExtError
from sgl_ext.memory.slab import HostSlab, Layout
from sgl_ext.memory.streams import Streams

TOKENS = 6
ASKED = IsRecorded("stx-one", "kv-0", 0, TOKENS, kv=True, queries=2, keep=True)


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[Recorder]:
    layout = Layout(
        1, GEOMETRY.layers, GEOMETRY.kv_heads, GEOMETRY.head_dim, GEOMETRY.dtype, "model"
    )
    record_folder(tmp_path, ASKED.id).mkdir()
    made = Recorder(HostSlab.create(layout, 16), GEOMETRY, tmp_path, Streams())
    yield made
    made._threads.shutdown()


def written(tmp_path: Path, asked: IsRecorded = ASKED) -> Path:
    """Returns the record, when it has the part of a request."""
    folder = record_folder(tmp_path, asked.id)
    assert wait_until(part_file(folder, asked.part).exists, 10)
    return folder


def compute(recording: Recorder) -> bool:
    """Computes the prompt of a context; returns whether its part of the record is written."""
    recording.ask("a", ASKED)
    recording.begin(["a"], [TOKENS], [TOKENS])
    for layer in range(GEOMETRY.layers):
        recording.take(layer, torch.randn(TOKENS, GEOMETRY.heads, GEOMETRY.head_dim))
    return recording.ended("a", range(TOKENS), torch.arange(3, 3 + TOKENS))


def test_a_record_has_the_queries_and_the_kv(recording: Recorder, tmp_path: Path) -> None:
    assert compute(recording)
    found = Recorded.load(written(tmp_path))
    assert found.queries.shape[:2] == (GEOMETRY.layers, 2)
    assert np.array_equal(found.tokens, np.arange(TOKENS))


def test_a_part_is_not_replaced(recording: Recorder, tmp_path: Path) -> None:
    """A request that was cancelled too late has written it, and the next one reads it."""
    assert compute(recording)
    folder = written(tmp_path)
    before = part_file(folder, ASKED.part).read_bytes()
    assert compute(recording)
    recording._threads.submit(int).result()
    assert part_file(folder, ASKED.part).read_bytes() == before
    assert [each.name for each in folder.iterdir()] == ["kv-0.part"]


def test_queries_are_recorded_when_a_forward_goes_on_with_other_rows(
    recording: Recorder, tmp_path: Path
) -> None:
    """Of two requests in the forward, the other one goes on with one of its four tokens."""
    recording.ask("a", ASKED)
    recording.begin(["b", "a"], [4, TOKENS], [4, TOKENS])
    queries = torch.randn(GEOMETRY.layers, 4 + TOKENS, GEOMETRY.heads, GEOMETRY.head_dim)
    recording.take(0, queries[0])
    recording.go_on(["b", "a"], [4, TOKENS], [1, TOKENS])
    for layer in range(1, GEOMETRY.layers):
        recording.take(layer, queries[layer, 3:])
    assert recording.ended("a", range(TOKENS), torch.arange(3, 3 + TOKENS))
    found = Recorded.load(written(tmp_path))
    assert np.array_equal(found.queries, queries[:, -ASKED.queries :].numpy())


def test_a_context_is_recorded_in_parts(recording: Recorder, tmp_path: Path) -> None:
    """Two prompts with the context's tokens, and one with a question behind the second.

    The KV of the question's first token is cached, because another one begins with it.
    """
    first = replace(ASKED, part="kv-0", tokens=10, queries=5, keep=False)
    second = replace(first, part="kv-6", start=6, keep=True)
    asked = replace(second, part="asked", kv=False, queries=0)
    pool = recording._slab.tensor().flatten(0, 1)
    pool.normal_()
    queries = torch.randn(GEOMETRY.layers, 6 + 4 + 3, GEOMETRY.heads, GEOMETRY.head_dim)
    passed = 0
    for rid, part, cached, new in (("a", first, 0, 6), ("b", second, 0, 4), ("c", asked, 5, 3)):
        recording.ask(rid, part)
        assert recording.passing(rid, ended=True) == (rid == "a")
        assert recording.passing(rid, ended=False)
        recording.begin([rid], [cached + new], [new])
        for layer in range(GEOMETRY.layers):
            recording.take(layer, queries[layer, passed : passed + new])
        passed += new
        slots = torch.arange(1, 1 + cached + new) + (6 if part.start else 0)
        assert recording.ended(rid, [*range(part.start, part.start + cached + new)], slots)
        written(tmp_path, part)
    found = Recorded.load(record_folder(tmp_path, ASKED.id))
    assert np.array_equal(found.tokens, np.arange(10))
    assert found.seen.tolist() == [6, 7, 8, 9, 10, 10, 10, 10]
    assert np.array_equal(found.queries, queries[:, 5:].numpy())
    for layer in range(GEOMETRY.layers):
        expected = pool[1:11, layer].reshape(10, -1).view(torch.uint8).numpy()
        assert np.array_equal(found.kv[layer], expected)
    part_file(record_folder(tmp_path, ASKED.id), "kv-0").unlink()
    with pytest.raises(ExtError, match="lacks a part of the context"):
        Recorded.load(record_folder(tmp_path, ASKED.id))


def test_an_interrupted_request_is_recorded_from_its_start(
    recording: Recorder, tmp_path: Path
) -> None:
    recording.ask("a", ASKED)
    recording.begin(["a"], [TOKENS], [TOKENS])
    recording.take(0, torch.randn(TOKENS, GEOMETRY.heads, GEOMETRY.head_dim))
    recording.interrupted("a")
    assert not recording.taking
    assert compute(recording)
    assert len(Recorded.load(written(tmp_path)).seen) == ASKED.queries
    # Of a request that goes on without its prompt, not all queries are recorded.
    recording.ask("a", ASKED)
    recording.begin(["a"], [TOKENS], [TOKENS])
    recording.interrupted("a")
    recording.begin(["a"], [TOKENS + 1], [1])
    for layer in range(GEOMETRY.layers):
        recording.take(layer, torch.randn(1, GEOMETRY.heads, GEOMETRY.head_dim))
    assert not recording.ended("a", range(TOKENS), torch.arange(3, 3 + TOKENS))


def test_the_reason_is_written_where_the_device_has_no_room(
    recording: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_part: Part, path: Path) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Part, "save", full)
    folder = record_folder(tmp_path, ASKED.id)
    reserve_file(folder).write_bytes(bytes(RESERVED))
    assert compute(recording)
    failed = failed_file(part_file(folder, ASKED.part))
    assert wait_until(failed.exists, 10)
    said = failed.read_text()
    assert said.startswith("No space left on device: the record is written to device 0 first")
    assert said.endswith("larger first directory")
    assert [*folder.iterdir()] == [failed]


@pytest.mark.parametrize("fails", ["queries", "KV"])
def test_too_little_memory_ends_the_record_only(
    fails: str, recording: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        if fails == "queries":
            patch.setattr(recorder, "Download", out_of_memory)
        else:
            patch.setattr(recording, "_kv", out_of_memory)
        assert not compute(recording)
    recording.begin([], [], [])
    assert not recording.taking
    assert not recording.any
    assert compute(recording)  # a new context
