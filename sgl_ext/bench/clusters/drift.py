"""How clusters hold while a text grows: new entries join them as they leave the local window."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_ext._native import _clusters
from sgl_ext.bench.clusters.samples import record
from sgl_ext.bench.data.needles import essays
from sgl_ext.bench.harness.report import Report
from sgl_ext.clusters.activations import Activations, attention_mass, log_sum
from sgl_ext.clusters.adaptation import distances, joined
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
    """Distances of entries to the medoids of the clusters that they are in.

    Attributes:
        old: of those that were clustered at first, by the profile.
        joined: of new ones that are in clusters by co-activation (Eq. 9).
        alone: of new ones that are near to no cluster, to the nearest.
        smallest: of new ones, each in the cluster that has fewest entries then (Min-Size).
        alike: of new ones, each in the cluster whose medoid's key is most like theirs (Min-Diff).
    """

    old: list[float]
    joined: list[float]
    alone: list[float]
    smallest: list[float]
    alike: list[float]

    def growth(self, *new: list[float]) -> float:
        """Of the mean distance, with some new ones."""
        everything = np.concatenate([self.old, *new])
        return float(everything.mean() / np.mean(self.old))


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
        growth = [each.growth(each.joined) for each in found]
        with_alone = [each.growth(each.joined, each.alone) for each in found]
        alone = sum(len(each.alone) for each in found)
        report.runs.append(
            {
                "what": f"drift after {len(self._read) * _STEP} tokens",
                "growth": statistics.mean(growth),
                "worst_layer": max(growth),
                "with_lone_ones": statistics.mean(with_alone),
                "smallest": _mean(each.growth(each.smallest) for each in found),
                "alike": _mean(each.growth(each.alike) for each in found),
                "alone": alone / sum(len(each.alike) for each in found),
            }
        )
        report.figures["medoid_distance_growth"] = statistics.mean(growth)
        report.figures["medoid_distance_growth_with_lone_ones"] = statistics.mean(with_alone)

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
        found = _Grown(_distances(profile.activations, clusters), [], [], [], [])
        flat = keys[sinks:].reshape(len(keys) - sinks, -1)
        likeness = flat @ flat[clusters.medoids].T
        sizes = clusters.sizes
        for start in range(0, len(queries) - _WINDOW + 1, _WINDOW):
            steps = slice(start, start + _WINDOW)
            # What was the local window while these steps were made, and leaves it then.
            new = np.arange(end + start, end + start + _WINDOW) - sinks
            beside = log_sum(queries[steps], keys[:sinks], scale)
            seen = first[steps] + 1 - sinks
            mass = attention_mass(queries[steps], keys[sinks:], scale, beside, seen=seen)
            active = _active(mass, seen)
            medoids, mine = active[:, clusters.medoids], active[:, new]
            far = distances(mine, medoids)
            for entry, of in enumerate(joined(mine, medoids, clusters.radius)):
                found.joined.extend(far[entry, of[:_COPIES]])
                if not len(of):
                    found.alone.append(far[entry].min())
                small = int(sizes.argmin())
                sizes[small] += 1
                found.smallest.append(far[entry, small])
                found.alike.append(far[entry, likeness[new[entry]].argmax()])
        return found


def _own(recorded: Recorded, layer: int) -> NDArray[np.float32]:
    """Queries of a context's last tokens."""
    own: NDArray[np.float32] = recorded.queries[layer, :_STEP]
    return own


def _active(mass: NDArray[np.float32], seen: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Of what each query sees, the part that has most of its attention."""
    active = np.zeros(mass.shape, bool)
    for row, count in enumerate(seen):
        most = max(round(_ACTIVE * count), 1)
        active[row, np.argpartition(mass[row, :count], count - most)[count - most :]] = True
    return active & (mass > 0)


def _distances(activations: Activations, clusters: Clusters) -> list[float]:
    """Of all members of clusters to their medoids, themselves left out."""
    found: list[float] = []
    for one, medoid in enumerate(clusters.medoids):
        members = clusters.members[clusters.starts[one] + 1 : clusters.starts[one + 1]]
        if len(members):
            found += _clusters.distances(activations.bits, int(medoid))[members].tolist()
    return found


def _mean(values: Iterable[float]) -> float:
    return statistics.mean(values)
