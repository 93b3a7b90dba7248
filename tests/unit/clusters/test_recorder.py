"""Recorder of contexts: a record that cannot be made ends no request and no server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from test_stored import GEOMETRY
from transfer_kit import wait_until

from sgl_ext.clusters.files import recorded_file
from sgl_ext.clusters.recorded import Recorded
from sgl_ext.engine.clusters import recorder
from sgl_ext.engine.clusters.parameters import IsRecorded
from sgl_ext.engine.clusters.recorder import Recorder
from sgl_ext.memory.slab import HostSlab, Layout
from sgl_ext.memory.streams import Streams

TOKENS = 6
ASKED = IsRecorded(id="stx-one", tokens=TOKENS, queries=2, last=True)


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[Recorder]:
    layout = Layout(
        1, GEOMETRY.layers, GEOMETRY.kv_heads, GEOMETRY.head_dim, GEOMETRY.dtype, "model"
    )
    made = Recorder(HostSlab.create(layout, 16), GEOMETRY, tmp_path, Streams())
    yield made
    made._threads.shutdown()


def compute(recording: Recorder) -> int:
    """Computes the prompt of a context; returns the number of queries that are recorded."""
    recording.ask("a", ASKED)
    recording.begin(["a"], [TOKENS], [TOKENS])
    for layer in range(GEOMETRY.layers):
        recording.take(layer, torch.randn(TOKENS, GEOMETRY.heads, GEOMETRY.head_dim))
    return recording.ended("a", range(TOKENS), torch.arange(3, 3 + TOKENS))


def test_a_record_has_the_queries_and_the_kv(recording: Recorder, tmp_path: Path) -> None:
    assert compute(recording) == 2
    path = recorded_file(tmp_path, ASKED.id)
    assert wait_until(path.exists, 10)
    found = Recorded.load(path)
    assert found.queries.shape[:2] == (GEOMETRY.layers, 2)
    assert np.array_equal(found.tokens, np.arange(TOKENS))


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
    assert recording.ended("a", range(TOKENS), torch.arange(3, 3 + TOKENS)) == ASKED.queries
    path = recorded_file(tmp_path, ASKED.id)
    assert wait_until(path.exists, 10)
    assert np.array_equal(Recorded.load(path).queries, queries[:, -ASKED.queries :].numpy())


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
        assert compute(recording) == 0
    recording.begin([], [], [])
    assert not recording.taking
    assert not recording.any
    assert compute(recording) == 2  # a new context
