"""Values of a server's metrics."""

from __future__ import annotations

from collections.abc import Mapping

from sgl_ext.bench.harness.metrics import samples


def value(url: str, name: str, labels: Mapping[str, str]) -> float:
    """Returns the value of the only sample with these labels, beside others; 0 if there is none."""
    found = [each for each in samples(url, name) if labels.items() <= each.labels.items()]
    assert len(found) <= 1, found
    return found[0].value if found else 0.0
