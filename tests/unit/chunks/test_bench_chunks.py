"""Tests of the benchmark of linked chunks: computed share, and continued runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sgl_ext.bench.chunks.linked import computed_share
from sgl_ext.bench.harness.partial import Partial


def meta(**more: object) -> dict[str, Any]:
    entry = {"power": "chunks", "method": "lego-16", "linked": 60, "prefix": 20}
    return {"ext": [{"power": "tiers"}, entry | more]}


def test_computed_share_excludes_linked_and_prefix_tokens() -> None:
    assert computed_share(meta(), 100, layers=30) == pytest.approx(0.2)
    # CacheBlend also computes two of 30 layers of the linked tokens.
    share = computed_share(meta(method="blend-15"), 100, layers=30)
    assert share == pytest.approx(0.2 + 0.6 * 2 / 30)


def test_results_survive_an_interrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def partial(**config: int) -> Partial:
        return Partial(tmp_path, "chunks", config, quick=False)

    path = tmp_path / "chunks.partial.jsonl"
    first = partial(questions=2)
    assert first.find("a", lambda: [1.0]) == [1.0]
    path.write_text(path.read_text() + '["b", [0.')  # killed during a write
    again = partial(questions=2)
    assert "b" not in again
    assert again.find("a", lambda: pytest.fail("found already")) == [1.0]
    assert again.find("b", lambda: [0.5]) == [0.5]
    assert partial(questions=2).find("b", lambda: pytest.fail("found")) == [0.5]
    assert "a" not in partial(questions=3)
    assert json.loads(path.read_text())[0] == {"questions": 3}
    partial(questions=3).find("a", lambda: [2.0])
    monkeypatch.setattr("sgl_ext.bench.harness.partial._code", lambda: "other code")
    assert "a" not in partial(questions=3)
    again.forget()
    assert not path.exists()
