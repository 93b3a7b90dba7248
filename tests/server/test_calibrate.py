"""Calibration on a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_ext.calibration import profile as calibration
from sgl_ext.config import load
from sgl_ext.planning.costs import HOST
from sgl_ext.planning.profile import find


def test_tiers_alone_are_calibrated(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "cache_dir", lambda: tmp_path)
    told: list[tuple[str, int, int]] = []
    config = load('{"tiers": {"host": {"capacity": "256MiB"}}}')
    found, path = calibration.calibrate(
        model, config, ["--page-size", "16"], lambda *step: told.append(step)
    )
    assert told == [(HOST, 0, 1)]
    assert found.compute.per_token > 0 and found.decode is not None
    assert found.loads[HOST].per_token > 0
    assert find(found.subject, path.parent) == found
