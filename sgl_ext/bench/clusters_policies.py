"""Balance, copies, what is kept in memory, and other tasks: on recorded activations."""

from __future__ import annotations

import statistics
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sgl_ext.bench.clusters_mass import relative_mass
from sgl_ext.bench.clusters_samples import Layer, Observed
from sgl_ext.bench.clusters_selectors import Clustered, ours
from sgl_ext.bench.report import Report
from sgl_ext.clusters.activations import attention_mass
from sgl_ext.clusters.adaptation import HotBlocks
from sgl_ext.clusters.clustering import Clusters, cluster
from sgl_ext.clusters.placement import stripe
from sgl_ext.clusters.profile import Options, Profile
from sgl_ext.clusters.recorded import Recorded
from sgl_ext.clusters.retrieval import Replicated
from sgl_ext.clusters.selection import best_blocks

_SHARE = 0.1
_DEVICES = 8
_KEPT = (0.05, 0.1)
"""Of the blocks, in memory."""


@dataclass(frozen=True)
class PolicySizes:
    """How much is looked at."""

    every: int
    """Every so manieth layer and query."""
    caps: Sequence[int]
    """Members of a cluster."""
    devices: Sequence[int]


def report_policies(report: Report, observed: Sequence[Observed], sizes: PolicySizes) -> None:
    """Adds runs and figures."""
    layers = range(0, observed[0].profile.geometry.layers, sizes.every)
    every = [layer for each in observed for layer in each.layers(layers)]
    _report_clusters(report, every, sizes)
    _report_memory(report, every)
    _report_shift(report, observed, layers)


def _report_clusters(report: Report, layers: Sequence[Layer], sizes: PolicySizes) -> None:
    """Swarm's clusters with bounds: copies, volume without doubles, balance."""
    worst, copies, volume = 0.0, [], []
    for cap in sizes.caps:
        loads: dict[tuple[int, bool], list[float]] = defaultdict(list)
        for layer in layers:
            few = layer.only(slice(None, None, sizes.every))
            clusters = cluster(few.profile.activations, most=cap)
            entries = len(few.keys)
            copies.append(len(clusters.members) / entries)
            medoids = few.keys[clusters.medoids]
            scores = attention_mass(few.queries, medoids, few.scale, few.beside)
            chosen = Clustered(scores, clusters, entries, 0).chosen(round(_SHARE * entries))
            volume += [len(of) / clusters.sizes[which].sum() for which, of in chosen]
            for count in sizes.devices:
                for balance, mean in _balance(clusters, entries, count, [of for _, of in chosen]):
                    loads[count, balance].append(mean)
        for (count, balance), found in loads.items():
            mean = statistics.mean(found)
            worst = max(worst, mean if balance else 0.0)
            report.runs.append(
                {
                    "what": f"balance of clusters of {cap}",
                    "system": "least-loaded replica" if balance else "first replica",
                    "devices": count,
                    "max_over_mean": mean,
                }
            )
    report.figures["balance_max_over_mean"] = worst
    report.figures["dedup_volume_ratio"] = statistics.mean(volume)
    report.figures["copies_per_entry"] = max(copies)


def _balance(
    clusters: Clusters, entries: int, count: int, wanted: Iterable[NDArray[np.int64]]
) -> list[tuple[bool, float]]:
    """With and without balancing: the mean of the fullest device's load over the mean load."""
    replicated = Replicated(clusters, stripe(clusters, count), entries, count)
    found: dict[bool, list[float]] = {True: [], False: []}
    for each in wanted:
        for balance, loads in found.items():
            sizes = [len(rows) for rows in replicated.schedule(each, balance=balance)]
            loads.append(max(sizes) / statistics.mean(sizes))
    return [(balance, statistics.mean(loads)) for balance, loads in found.items()]


def _report_memory(report: Report, layers: Sequence[Layer]) -> None:
    """Which blocks are in memory when they are wanted, and how even the reads of the others are."""
    for kept in _KEPT:
        hits: Counter[str] = Counter()
        wanted = 0
        uneven: list[float] = []
        for layer in layers:
            scores = ours(layer).scores
            chosen = [
                best_blocks(row, _SHARE, block=layer.block, devices=_DEVICES) for row in scores
            ]
            often = layer.profile.activations.frequency[layer.profile.order]
            of_blocks = often.reshape(-1, layer.block).max(axis=1)
            capacity = max(round(kept * len(of_blocks)), 1)
            wanted += sum(map(len, chosen))
            misses = _ours_misses(chosen, of_blocks, capacity)
            hits["ours"] += sum(map(len, chosen)) - sum(map(len, misses))
            hits["LRU"] += _lru_hits(chosen, capacity)
            fixed = np.argsort(-of_blocks, kind="stable")[:capacity]
            hits["static"] += sum(int(np.isin(each, fixed).sum()) for each in chosen)
            loads = [np.bincount(each % _DEVICES, minlength=_DEVICES) for each in misses]
            uneven += [float(load.max() / load.mean()) for load in loads if load.any()]
        for name, count in hits.items():
            report.runs.append(
                {"what": f"memory for {kept:.0%} of blocks", "system": name, "hits": count / wanted}
            )
        report.figures[f"cache_hit_ratio_vs_lru_{kept:.0%}".rstrip("%")] = (
            hits["ours"] / hits["LRU"]
        )
        report.figures[f"balance_beside_memory_{kept:.0%}".rstrip("%")] = statistics.mean(uneven)
    report.figures["cache_hit_ratio_vs_lru"] = report.figures["cache_hit_ratio_vs_lru_5"]


def _ours_misses(
    chosen: Sequence[NDArray[np.int64]], often: NDArray[np.int64], capacity: int
) -> list[NDArray[np.int64]]:
    hot = HotBlocks(often, capacity)
    found = []
    for each in chosen:
        found.append(each[hot.place[each] < 0])
        hot.step(each)
    return found


def _lru_hits(chosen: Sequence[NDArray[np.int64]], capacity: int) -> int:
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for each in chosen:
        numbers = each.tolist()
        hits += sum(one in kept for one in numbers)
        for one in numbers:
            kept[one] = None
            kept.move_to_end(one)
        while len(kept) > capacity:
            kept.popitem(last=False)
    return hits


def _report_shift(report: Report, observed: Sequence[Observed], layers: Iterable[int]) -> None:
    """Contexts that are stored by one task's queries, and asked those of another."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    lost: list[float] = []
    for each in observed:
        if each.sample.task != "questions":
            continue
        options = Options().fitted(len(each.sample.context), each.block)
        general = each.profile
        questions, tested = _questions(each)
        for number in layers:
            (layer,) = each.layers([number])
            test = layer.only(tested)
            mass = {}
            for name, record in (("general", general), ("questions", questions)):
                profile = Profile.of(record, number, options, each.block)
                chosen = ours(replace(test, profile=profile)).select(round(_SHARE * len(test.keys)))
                mass[name] = float(relative_mass(test.mass, chosen).mean())
                found[name, "questions"].append(mass[name])
            lost.append(1 - mass["general"] / mass["questions"])
    for (stored, asked), masses in found.items():
        report.runs.append(
            {
                "what": "shift of tasks",
                "stored_by": stored,
                "asked": asked,
                "mass": statistics.mean(masses),
                "samples": len(masses),
            }
        )
    report.figures["shift_lost"] = statistics.mean(lost)


def _questions(observed: Observed) -> tuple[Recorded, slice]:
    """The context as if it had been stored by half of its questions; and where the others are."""
    profile, asked = observed.profile, observed.asked
    tokens, unseen = len(observed.sample.context), len(observed.sample.unseen)
    own = profile.seen.searchsorted(tokens, side="left") + 1  # the context's own queries
    first = int(np.argmax(asked.seen > tokens))
    some = slice(first, first + unseen // 2)
    queries = np.concatenate([profile.queries[:, :own], asked.queries[:, some]], axis=1)
    seen = np.concatenate([profile.seen[:own], np.full(unseen // 2, tokens)])
    return replace(profile, queries=queries, seen=seen), slice(unseen // 2, None)
