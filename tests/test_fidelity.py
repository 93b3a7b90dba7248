"""What a server makes of what it has found of itself."""

from __future__ import annotations

import logging
import math

import pytest

from sgl_ext.engine.chunks.fidelity import Fidelity, require
from sgl_ext.errors import ExtError


def test_near_enough(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        require(Fidelity(exact=1e-6, divergence=0.08), "lego-16", 0.5)
    assert "lego-16 diverges by 0.080 nats" in caplog.text


@pytest.mark.parametrize("exact", [0.03, math.nan])
def test_a_link_that_ought_to_be_exact(exact: float) -> None:
    with pytest.raises(ExtError, match="this model cannot be served with chunks"):
        require(Fidelity(exact, divergence=0.0), "lego-16", 0.5)


@pytest.mark.parametrize("divergence", [0.6, math.nan])
def test_too_far(divergence: float) -> None:
    with pytest.raises(ExtError, match=r"more than chunks.largest_divergence = 0\.5"):
        require(Fidelity(0.0, divergence), "lego-16", 0.5)
