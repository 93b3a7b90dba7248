"""Attention that is covered by a selection for all KV heads, and by one for each KV head.

A block of the server has the entries of all KV heads, and one selection serves them. A block of one
head has more entries in as many bytes, and each head has blocks, codes and a selection of its own.
Both read the same number of bytes, calculated from records.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial as partial_of

import numpy as np
from numpy.typing import NDArray

from sgl_ext.bench.clusters.samples import Layer, Observed
from sgl_ext.bench.clusters.selectors import ours
from sgl_ext.bench.data.scores import mean_interval
from sgl_ext.bench.harness.partial import Partial
from sgl_ext.bench.harness.report import Report

_SHARES = (0.05, 0.1, 0.2)
_ALL, _EACH = "all KV heads", "each KV head"


def report_heads(report: Report, observed: Sequence[Observed], partial: Partial) -> None:
    """Adds the share of each query's attention that both selections cover to the report."""
    found = [
        partial.find(f"heads, {each.sample.name}", partial_of(_of_sample, each))
        for each in observed
    ]
    for share in _SHARES:
        covered = {}
        for name in (_ALL, _EACH):
            pairs = [each[name][f"{share:g}"] for each in found]
            queries = [value for pair in pairs for value in pair["covered"]]
            mean = covered[name] = mean_interval(queries)
            report.runs.append(
                {
                    "what": f"selection of {share:.0%}", "system": name, "samples": len(queries),
                    "read": float(np.mean([pair["read"] for pair in pairs])),
                    "covered": mean.mean, "covered_low": mean.low, "covered_high": mean.high,
                }
            )  # fmt: skip
        lost = [1 - covered[name].mean for name in (_EACH, _ALL)]
        report.figures[f"lost_each_head_over_all_{100 * share:g}"] = lost[0] / lost[1]


def _of_sample(observed: Observed) -> dict[str, dict[str, dict[str, object]]]:
    """Returns, by selection and share, the attention covered of each query and the share read."""
    geometry = observed.profile.geometry
    covered: dict[tuple[str, float], list[NDArray[np.float64]]] = {}
    read: dict[tuple[str, float], list[float]] = {}

    def add(name: str, share: float, losses: Sequence[NDArray[np.float64]], shares: float) -> None:
        covered.setdefault((name, share), []).append(1 - np.sum(losses, axis=0) / geometry.heads)
        read.setdefault((name, share), []).append(shares)

    for number in range(geometry.layers):
        heads = [observed.layer(number, head) for head in range(geometry.kv_heads)]
        whole = observed.layer(number)
        for share in _SHARES:
            each = [_selected(head, share) for head in heads]
            shares = float(np.mean([of_head for _, of_head in each]))
            add(_EACH, share, [lost for lost, _ in each], shares)
            lost, of_all = _selected(whole, shares)
            add(_ALL, share, [lost], of_all)
    found: dict[str, dict[str, dict[str, object]]] = {_ALL: {}, _EACH: {}}
    for (name, share), layers in covered.items():
        mean = np.stack(layers).mean(axis=0).round(6).tolist()
        found[name][f"{share:g}"] = {"covered": mean, "read": float(np.mean(read[name, share]))}
    return found


def _selected(layer: Layer, share: float) -> tuple[NDArray[np.float64], float]:
    """Returns the attention that each query loses, summed over heads, and the share it reads."""
    chosen = ours(layer).select(round(share * len(layer.keys)))
    lost = np.where(chosen, 0, layer.mass).sum(axis=1, dtype=np.float64)
    return lost, float(chosen.mean())
