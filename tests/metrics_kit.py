"""Samples of a server's metrics."""

from __future__ import annotations

from collections.abc import Mapping

import requests
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_DEADLINE_S = 60.0


def samples(url: str, name: str) -> list[Sample]:
    """Returns the samples of a metric, such as a counter's with ``_total``."""
    text = requests.get(f"{url}/metrics", timeout=_DEADLINE_S).text
    return [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    ]


def value(url: str, name: str, labels: Mapping[str, str]) -> float:
    """Returns the value of the only sample with these labels, beside others; 0 if there is none."""
    found = [each for each in samples(url, name) if labels.items() <= each.labels.items()]
    assert len(found) <= 1, found
    return found[0].value if found else 0.0
