"""Balance, copies, what is kept in memory, and other tasks: on recorded activations."""

from __future__ import annotations

import statistics
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sgl_ext.bench.clusters.mass import relative_mass
from sgl_ext.bench.clusters.samples import Layer, Observed
from sgl_ext.bench.clusters.selectors import clustered, ours
from sgl_ext.bench.harness.report import Report
from sgl_ext.clusters.activations import log_sum
from sgl_ext.clusters.adaptation import HotBlocks
from sgl_ext.clusters.clustering import Clusters
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
            selector = clustered("capped", cap)(few)
            clusters, entries = selector.clusters, len(few.keys)
            copies.append(len(clusters.members) / entries)
            chosen = selector.chosen(round(_SHARE * entries))
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
            chosen = [*best_blocks(scores, _SHARE, block=layer.block, devices=_DEVICES)]
            of_blocks = layer.profile.often(layer.block)
            of_scores = scores.reshape(len(scores), -1, layer.block).sum(axis=2)
            capacity = max(round(kept * len(of_blocks)), 1)
            wanted += sum(map(len, chosen))
            hits["most that there is room for"] += sum(min(len(each), capacity) for each in chosen)
            misses = _ours_misses(chosen, of_blocks, capacity)
            hits["ours"] += sum(map(len, chosen)) - sum(map(len, misses))
            fixed = np.argsort(-of_blocks, kind="stable")[:capacity]
            hits["LRU"] += _lru_hits(chosen, fixed[::-1])
            # Of what a step has used at once, the best counts as used last.
            ranked = [each[np.argsort(of_scores[step, each])] for step, each in enumerate(chosen)]
            hits["LRU, best last"] += _lru_hits(ranked, fixed[::-1])
            hits["static"] += sum(int(np.isin(each, fixed).sum()) for each in chosen)
            loads = [np.bincount(each % _DEVICES, minlength=_DEVICES) for each in misses]
            uneven += [float(load.max() / load.mean()) for load in loads if load.any()]
        for name, count in hits.items():
            report.runs.append(
                {"what": f"memory for {kept:.0%} of blocks", "system": name, "hits": count / wanted}
            )
        for name, other in (("lru", "LRU"), ("ranked_lru", "LRU, best last"), ("static", "static")):
            ratio = hits["ours"] / hits[other]
            report.figures[f"cache_hit_ratio_vs_{name}_{kept:.0%}".rstrip("%")] = ratio
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


def _lru_hits(used: Sequence[NDArray[np.int64]], first: NDArray[np.int64]) -> int:
    """Of a memory that has ``first`` at first; the last one of a step counts as used last."""
    kept: OrderedDict[int, None] = OrderedDict.fromkeys(first.tolist())
    hits = 0
    for each in used:
        numbers = each.tolist()
        hits += sum(one in kept for one in numbers)
        for one in numbers:
            kept[one] = None
            kept.move_to_end(one)
        while len(kept) > len(first):
            kept.popitem(last=False)
    return hits


def _report_shift(report: Report, observed: Sequence[Observed], layers: Iterable[int]) -> None:
    """Contexts that are stored by one task's queries, and asked those of another.

    With the queries of the context's own end, as ours always has them, and by the task's alone.
    """
    found: dict[tuple[str, str, bool], list[float]] = defaultdict(list)
    for each in observed:
        if each.sample.task != "questions":
            continue
        options = Options().fitted(len(each.sample.context), each.block)
        tasks, (stored, asked) = _tasks(each), (slice(0, None, 2), slice(1, None, 2))
        for number in layers:
            (layer,) = each.layers([number])
            tests = {
                name: _asked(layer, task[number, asked], each, number)
                for name, task in tasks.items()
            }
            for by, task in tasks.items():
                for end in (True, False):
                    record = _record(each, task, stored, end=end)
                    profile = Profile.of(record, number, options, each.block)
                    for name, test in tests.items():
                        budget = round(_SHARE * len(test.keys))
                        chosen = ours(replace(test, profile=profile)).select(budget)
                        mass = relative_mass(test, chosen).mean()
                        found[by, name, end].append(float(mass))
    for (by, name, end), masses in found.items():
        report.runs.append(
            {
                "what": "shift of tasks",
                "stored_by": by + (" and the context's end" if end else ""),
                "asked": name,
                "mass": statistics.mean(masses),
                "samples": len(masses),
            }
        )
    for end, figure in ((True, "shift_lost"), (False, "shift_lost_without_end")):
        lost = [
            1 - statistics.mean(found[other, name, end]) / statistics.mean(found[name, name, end])
            for name, other in (("questions", "summaries"), ("summaries", "questions"))
        ]
        report.figures[figure] = max(lost)


def _tasks(observed: Observed) -> dict[str, NDArray[np.float32]]:
    """Queries behind the context, which see all of it: ``[layers, queries, heads, head_dim]``.

    What any text is asked (its summary, its main point, …), and questions of its facts.
    """
    return {
        "summaries": observed.profile.queries[:, _own(observed) :],
        "questions": observed.asked.queries[:, observed.unseen],
    }


def _own(observed: Observed) -> int:
    """The context's own queries, which come first."""
    return int(observed.profile.seen.searchsorted(len(observed.sample.context))) + 1


def _record(observed: Observed, task: NDArray[np.float32], some: slice, *, end: bool) -> Recorded:
    """The context as if it had been stored by some queries of a task."""
    profile, own = observed.profile, _own(observed) if end else 0
    queries = np.concatenate([profile.queries[:, :own], task[:, some]], axis=1)
    count = queries.shape[1] - own
    seen = np.concatenate([profile.seen[:own], np.full(count, len(observed.sample.context))])
    return replace(profile, queries=queries, seen=seen)


def _asked(layer: Layer, queries: NDArray[np.float32], observed: Observed, number: int) -> Layer:
    """The layer with other queries; what they see beside it is the context's own."""
    keys, options = observed.profile.keys(number), Options()
    options = options.fitted(len(keys), observed.block)
    resident = np.concatenate([keys[: options.sinks], keys[len(keys) - options.window :]])
    return replace(layer, queries=queries, beside=log_sum(queries, resident, layer.scale))
