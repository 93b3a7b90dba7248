"""Compared servers, and the ratios of their times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sgl_ext.bench.chunks import linked
from sgl_ext.bench.together.systems import ENVIRONMENT, HICACHE, STOCK
from sgl_ext.serving.server import BESIDE_OTHERS, System

OTHERS = (STOCK, HICACHE)
TIERS, RESTORE = "tiers", "restore"

_LINKING_POOL = 40_000
"""Device pool of the server that links chunks, in tokens. It holds the contexts of a few prompts by
each method; only answers of this server are compared, not times."""


def linking() -> System:
    """Returns the system that links chunks."""
    _, chunks = linked.systems(_LINKING_POOL, *BESIDE_OTHERS)
    return replace(chunks, environment=ENVIRONMENT)


def ratios(name: str, values: Mapping[str, float]) -> dict[str, float]:
    """Returns the ratios of our systems' values to those of :data:`OTHERS`, as figures.

    Args:
        name: begin of the figures' names.
        values: value of each system.
    """
    return {
        f"{name}_ratio_{ours}_vs_{other}": value / values[other]
        for ours, value in values.items()
        if ours not in OTHERS
        for other in OTHERS
    }
