"""Samples of a server's metrics."""

from __future__ import annotations

import requests
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from sgl_ext.errors import ExtError

_DEADLINE_S = 600.0


def samples(url: str, *names: str) -> list[Sample]:
    """Returns the samples of some metrics, such as a counter's with ``_total``.

    Raises:
        ExtError: the server does not report its metrics.
    """
    try:
        text = requests.get(f"{url}/metrics", timeout=_DEADLINE_S).text
    except requests.RequestException as error:
        raise ExtError(f"{url} does not report its metrics: {error}") from None
    return [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name in names
    ]
