"""How clusters hold while a text grows: new entries join them as they leave the local window."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_ext._native import _clusters
from sgl_ext.bench.clusters_samples import record
from sgl_ext.bench.needles import essays
from sgl_ext.bench.report import Report
from sgl_ext.clusters.activations import Activations, attention_mass, log_sum
from sgl_ext.clusters.adaptation import joined
from sgl_ext.clusters.clustering import Clusters, cluster
from sgl_ext.clusters.placement import Blocks
from sgl_ext.clusters.profile import Options, Profile
from sgl_ext.clusters.recorded import Recorded

_STEP = 512
"""Tokens whose queries a server writes down."""
_WINDOW = 256
_ACTIVE = 0.1
_COPIES = 4


class _Grown(NamedTuple):
    """Distances of entries to the medoids of their clusters.

    Attributes:
        joined: of new ones.
        smallest: of new ones, had each joined the smallest cluster.
        alone: new ones that are near to no cluster.
    """

    old: NDArray[np.float64]
    joined: list[float]
    smallest: list[float]
    alone: int


class Growing:
    """A text, of which a server reads more and more.

    Args:
        begin: tokens that are clustered at first.
        grown: further ones.
    """

    def __init__(self, url: str, model: Path, begin: int, grown: int) -> None:
        from transformers import AutoTokenizer

        encode = AutoTokenizer.from_pretrained(model).encode
        text = essays()[: 8 * (begin + grown)]
        tokens = encode(text, add_special_tokens=False)[: begin + grown]
        self._begin = begin
        self._profile = record(url, tokens[:begin])
        ends = range(begin + _STEP, begin + grown + 1, _STEP)
        self._read = [record(url, tokens[:end]) for end in ends]

    def report(self, report: Report, layers: Sequence[int]) -> None:
        """Adds a run and the figure."""
        found = [self._layer(layer) for layer in layers]
        growth, other = [], []
        for each in found:
            first = each.old.mean()
            growth.append(np.concatenate([each.old, each.joined]).mean() / first)
            other.append(np.concatenate([each.old, each.smallest]).mean() / first)
        new = sum(len(each.joined) for each in found)
        report.runs.append(
            {
                "what": f"drift after {len(self._read) * _STEP} tokens",
                "growth": statistics.mean(growth),
                "worst_layer": max(growth),
                "growth_if_smallest": statistics.mean(other),
                "joined": new,
                "alone": sum(each.alone for each in found),
            }
        )
        report.figures["medoid_distance_growth"] = statistics.mean(growth)

    def _layer(self, layer: int) -> _Grown:
        last = self._read[-1]
        keys, scale = last.keys(layer), last.geometry.scale
        block = Blocks.fitting(last.geometry.entry_bytes)
        options = Options().fitted(self._begin, block)
        profile = Profile.of(self._profile, layer, options, block)
        clusters = cluster(profile.activations)
        sinks, end = options.sinks, self._begin - options.window
        queries = np.concatenate([_own(each, layer) for each in self._read])
        first = np.arange(self._begin, self._begin + len(queries))
        found = _Grown(_distances(profile.activations, clusters), [], [], 0)
        alone = 0
        sizes = clusters.sizes.copy()
        for start in range(0, len(queries) - _WINDOW + 1, _WINDOW):
            steps = slice(start, start + _WINDOW)
            # What was the local window while these steps were made, and leaves it then.
            new = np.arange(end + start, end + start + _WINDOW)
            beside = log_sum(queries[steps], keys[:sinks], scale)
            mass = attention_mass(
                queries[steps], keys[sinks:], scale, beside, seen=first[steps] + 1 - sinks
            )
            active = _active(mass)
            medoids = active[:, clusters.medoids]
            mine = active[:, new - sinks]
            for entry, of in enumerate(joined(mine, medoids, clusters.radius)):
                alone += not len(of)
                for one in of[:_COPIES]:
                    found.joined.append(_distance(mine[:, entry], medoids[:, one]))
                    sizes[one] += 1
                if len(of):
                    small = int(sizes.argmin())
                    found.smallest.append(_distance(mine[:, entry], medoids[:, small]))
        return found._replace(alone=alone)


def _own(recorded: Recorded, layer: int) -> NDArray[np.float32]:
    """Queries of a context's last tokens."""
    own: NDArray[np.float32] = recorded.queries[layer, :_STEP]
    return own


def _active(mass: NDArray[np.float32]) -> NDArray[np.bool_]:
    count = max(round(_ACTIVE * mass.shape[1]), 1)
    limit = -np.partition(-mass, count - 1, axis=1)[:, count - 1]
    found: NDArray[np.bool_] = (mass >= limit[:, None]) & (mass > 0)
    return found


def _distances(activations: Activations, clusters: Clusters) -> NDArray[np.float64]:
    """Of all members of clusters to their medoids, themselves left out."""
    found = []
    for one, medoid in enumerate(clusters.medoids):
        members = clusters.members[clusters.starts[one] + 1 : clusters.starts[one + 1]]
        if len(members):
            found.append(_clusters.distances(activations.bits, int(medoid))[members])
    return np.concatenate(found).astype(np.float64)


def _distance(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
    either = int((one | other).sum())
    return 1 - int((one & other).sum()) / either if either else 1.0
