"""Tests of the bounds that the fidelity of linked chunks must meet."""

from __future__ import annotations

import logging
import math

import pytest

from sgl_ext.engine.chunks.fidelity import Fidelity, require
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
