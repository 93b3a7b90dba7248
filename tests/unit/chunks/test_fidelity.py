"""Tests of the bounds that the fidelity of linked chunks must meet."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ext.engine.chunks.fidelity import Fidelity, Probe, require
from sgl_ext.errors import ExtError


def test_fidelity_within_the_bounds_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        require(Fidelity(exact=1e-6, divergence=0.08), "lego-16", 0.5)
    assert "lego-16 diverges by 0.080 nats" in caplog.text


@pytest.mark.parametrize("exact", [0.03, math.nan])
def test_an_inexact_chunk_in_its_own_place_is_refused(exact: float) -> None:
    with pytest.raises(ExtError, match="this model cannot be served with chunks"):
        require(Fidelity(exact, divergence=0.0), "lego-16", 0.5)


@pytest.mark.parametrize("divergence", [0.6, math.nan])
def test_divergence_above_the_configured_bound_is_refused(divergence: float) -> None:
    with pytest.raises(ExtError, match=r"more than chunks.largest_divergence = 0\.5"):
        require(Fidelity(0.0, divergence), "lego-16", 0.5)


@pytest.mark.parametrize("fails", ["create", "ask"])
def test_an_interrupted_probe_leaves_no_contexts(fails: str) -> None:
    """They would prime the contexts of another probe."""
    left: list[str] = []

    def create(texts: list[str], method: str | None = None, **_more: Any) -> list[Any]:
        if method == "full" and fails == "create":
            raise KeyboardInterrupt
        ids = [f"ctx-{len(left) + number}" for number, _ in enumerate(texts)]
        left.extend(ids)
        return [SimpleNamespace(id=id_) for id_ in ids]

    def ask(*_asked: Any) -> Any:
        raise KeyboardInterrupt

    contexts: Any = SimpleNamespace(create=create, delete=left.remove)
    with pytest.raises(KeyboardInterrupt):
        Probe(lambda text, _first: [*map(ord, text)], contexts, ask).measure()
    assert left == []
