"""Metrics of linked chunks: their labels have few values."""

from __future__ import annotations

import pytest

from sgl_ext.engine.chunks.metrics import _kind


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("lego-16", "lego"), ("lego-9999", "lego"), ("primed", "primed"),
        ("primed+offline-77", "primed+offline"), ("lego-16/primed", "several"),
    ],
)  # fmt: skip
def test_methods_are_counted_by_kind(method: str, kind: str) -> None:
    assert _kind(method) == kind
