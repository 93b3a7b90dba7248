"""Share of the attention to a context that each selector covers, calculated from records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial as partial_of

import numpy as np
from numpy.typing import NDArray

from sgl_ext.bench.clusters.samples import Layer, Observed
from sgl_ext.bench.clusters.selectors import (
    FAITHFUL,
    OURS,
    SELECTORS,
    Mask,
)
from sgl_ext.bench.harness.partial import Partial
from sgl_ext.bench.harness.report import Report

_BUDGETS = (0.1, 0.2)
"""Budgets of a selector, as shares of the entries between sinks and window."""


@dataclass(frozen=True)
class _Found:
    """Result of one selector over all layers of one context.

    Attributes:
        mass: attention relative to exact top-k with the same number of entries,
            ``[budgets, layers, queries]``.
        index: bytes of the index relative to those of the KV between sinks and window.
    """

    mass: NDArray[np.float64]
    index: float


def relative_mass(layer: Layer, chosen: Mask) -> NDArray[np.float64]:
    """Returns the attention mass of each selection relative to the best one of the same size.

    Args:
        chosen: entries that each query is given, bool ``[queries, entries]``.

    Returns:
        Relative mass, float64 ``[queries]``.
    """
    limit = layer.best[np.arange(len(chosen)), chosen.sum(axis=1) - 1]
    mass = np.where(chosen, layer.mass, 0).sum(axis=1, dtype=np.float64)
    found: NDArray[np.float64] = mass / limit
    return found


def report_mass(report: Report, observed: Sequence[Observed], partial: Partial) -> None:
    """Adds the relative mass of all selectors at equal budgets to the report."""
    by_context = [
        partial.find(f"mass, {each.sample.name}", partial_of(_all_layers, each))
        for each in observed
    ]
    found = {name: [_read(each[name]) for each in by_context] for name in SELECTORS}
    mass = {name: _together([each.mass for each in all_]) for name, all_ in found.items()}
    for name, each in mass.items():
        for at, budget in enumerate(_BUDGETS):
            queries = np.concatenate([of[at].mean(axis=0) for of in _masses(found[name])])
            report.runs.append(
                {
                    "what": f"mass of {budget:.0%}",
                    "system": name,
                    "index": float(np.mean([of.index for of in found[name]])),
                    "mass": float(each[at].mean()),
                    "worst_layer": float(each[at].mean(axis=1).min()),
                    "query_p10": float(np.percentile(queries, 10)),
                    "p10": float(np.percentile(each[at], 10)),
                    "samples": len(queries),
                }
            )
    _figures(report, mass, found)


def _figures(
    report: Report, mass: Mapping[str, NDArray[np.float64]], found: Mapping[str, list[_Found]]
) -> None:
    at_10 = {name: float(each[0].mean()) for name, each in mass.items()}
    queries = np.concatenate([of[0].mean(axis=0) for of in _masses(found[OURS])])
    figures = report.figures
    figures["relative_mass_10"] = at_10[OURS]
    figures["relative_mass_10_worst_layer"] = float(mass[OURS][0].mean(axis=1).min())
    figures["relative_mass_10_query_p10"] = float(np.percentile(queries, 10))
    figures["index_share"] = max(each.index for each in found[OURS])
    figures["relative_mass_10_faithful"] = at_10[FAITHFUL]


def _masses(found: Sequence[_Found]) -> list[NDArray[np.float64]]:
    return [each.mass for each in found]


def _together(masses: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Concatenates the masses of all contexts to ``[budgets, layers, queries]``."""
    return np.concatenate(masses, axis=2)


def _all_layers(observed: Observed) -> dict[str, dict[str, object]]:
    """Returns the mass and the index size of each selector, in JSON types."""
    layers = range(observed.profile.geometry.layers)
    mass: dict[str, list[NDArray[np.float64]]] = {name: [] for name in SELECTORS}
    index = dict.fromkeys(SELECTORS, 0.0)
    entry = observed.profile.geometry.entry_bytes
    for layer in map(observed.layer, layers):
        for name, one in _of_layer(layer).items():
            mass[name].append(one.mass)
            index[name] += one.index / (entry * len(layer.keys) * len(layers))
    return {
        name: {"mass": np.stack(mass[name], axis=1).round(5).tolist(), "index": index[name]}
        for name in SELECTORS
    }


def _of_layer(layer: Layer) -> dict[str, _Found]:
    """Returns the mass ``[budgets, queries]`` and the bytes of the index of each selector."""
    found = {}
    mine = SELECTORS[OURS](layer)
    asked = [round(share * len(layer.keys)) for share in _BUDGETS]
    # Our selector rounds up to whole blocks of every device. The others get the same number.
    budgets = [int(mine.select(budget).sum(axis=1).max()) for budget in asked]
    for name, make in SELECTORS.items():
        selector = mine if name == OURS else make(layer)
        each = asked if name == OURS else budgets
        mass = [relative_mass(layer, selector.select(budget)) for budget in each]
        found[name] = _Found(np.stack(mass), selector.index_bytes)
    return found


def _read(found: Mapping[str, object]) -> _Found:
    return _Found(np.array(found["mass"]), float(found["index"]))  # type: ignore[arg-type]
