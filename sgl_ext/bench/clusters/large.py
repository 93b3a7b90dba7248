"""Contexts longer than the model reads: what it has read of one piece after another."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial as partial_of
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from sgl_ext.bench.clusters.mass import relative_mass
from sgl_ext.bench.clusters.samples import Layer, record
from sgl_ext.bench.clusters.selectors import (
    DEVICES,
    INFLLM,
    MEAN_KEYS,
    OURS,
    PQCACHE,
    QUEST,
    SELECTORS,
    STATIC,
    ours,
)
from sgl_ext.bench.data.needles import essays
from sgl_ext.bench.harness.partial import Partial
from sgl_ext.bench.harness.report import Report
from sgl_ext.clusters.activations import log_sum
from sgl_ext.clusters.placement import Blocks
from sgl_ext.clusters.profile import Options, Profile
from sgl_ext.clusters.recorded import Recorded
from sgl_ext.clusters.selection import best_blocks
from sgl_ext.errors import ExtError

_BUDGET = 0.1
_QUERIES = 1024
"""Of all pieces together, that a layer is profiled by."""
_CHOICES = 9
_NAMES = (OURS, QUEST, INFLLM, MEAN_KEYS, PQCACHE, STATIC)


@dataclass(frozen=True)
class LargeSizes:
    """How much is read.

    Attributes:
        entries: of the contexts, multiples of ``piece``, rising.
        piece: tokens that the model reads at a time.
        unseen: tokens that follow the last piece of each context.
        every: every so manieth layer is looked at.
    """

    entries: Sequence[int]
    piece: int
    unseen: int
    every: int


@dataclass(frozen=True)
class _Piece:
    """Of a text, as the model has read it.

    Attributes:
        recorded: some layers of it and of what follows, and the queries that may profile it.
        unseen: ``[layers, queries, heads, head_dim]`` of what follows.
    """

    recorded: Recorded
    unseen: NDArray[np.float32]

    @property
    def tokens(self) -> int:
        """Without what follows."""
        return len(self.recorded.tokens) - len(self.unseen[0])


def report_large(
    report: Report, url: str, model: Path, layers: Sequence[int], sizes: LargeSizes,
    partial: Partial,
) -> None:  # fmt: skip
    """Adds runs and figures: relative mass, and what profiling and choosing take.

    The ends of all pieces but the last count as middle: only the last one's window is near.

    Args:
        layers: those that are looked at.
    """
    pieces: list[_Piece] = []
    for entries in sizes.entries:
        found = partial.find(
            f"{entries} entries", partial_of(_measured, url, model, layers, sizes, entries, pieces)
        )
        for name in _NAMES:
            mass = np.array(found[name])
            run = {
                "what": f"{entries:,} entries, mass of {_BUDGET:.0%}",
                "system": name,
                "mass": float(mass.mean()),
                "worst_layer": float(mass.mean(axis=1).min()),
                "samples": mass.size,
            }
            took = {key: statistics.mean(found[key]) for key in ("profiled_s", "chosen_ms")}
            report.runs.append(run | (took if name == OURS else {}))
        at = f"{entries >> 10}k"
        report.figures[f"relative_mass_10_{at}"] = float(np.mean(found[OURS]))
        report.figures[f"layer_profiled_s_{at}"] = statistics.mean(found["profiled_s"])


def _measured(
    url: str,
    model: Path,
    layers: Sequence[int],
    sizes: LargeSizes,
    entries: int,
    pieces: list[_Piece],
) -> dict[str, list[object]]:
    """By selector the mass, ``[layers][queries]``, and what each layer took.

    Args:
        pieces: what was read so far; more are added.
    """
    count = entries // sizes.piece
    pieces += _read(url, model, layers, sizes, range(len(pieces), count))
    found: dict[str, list[object]] = {name: [] for name in (*_NAMES, "profiled_s", "chosen_ms")}
    for at, number in enumerate(layers):
        layer, seconds = _layer(pieces[:count], at, number)
        found["profiled_s"].append(seconds)
        mine = ours(layer)
        found["chosen_ms"].append(_choosing(layer))
        budget = round(_BUDGET * len(layer.keys))
        even = int(mine.select(budget).sum(axis=1).max())
        for name in _NAMES:
            selector = mine if name == OURS else SELECTORS[name](layer)
            chosen = selector.select(budget if name == OURS else even)
            found[name].append(relative_mass(layer, chosen).round(5).tolist())
    return found


def _read(
    url: str, model: Path, layers: Sequence[int], sizes: LargeSizes, numbers: Sequence[int]
) -> list[_Piece]:
    """Pieces of essays, and the first words behind each."""
    from transformers import AutoTokenizer

    if not numbers:
        return []
    text = essays()[: 8 * sizes.piece * (numbers[-1] + 2)]
    ids = AutoTokenizer.from_pretrained(model).encode(text, add_special_tokens=False)
    if len(ids) < (numbers[-1] + 1) * sizes.piece + sizes.unseen:
        raise ExtError(f"the essays have {len(ids):,} tokens: too few for so large a context")
    found = []
    for number in numbers:
        begin = number * sizes.piece
        whole = record(url, ids[begin : begin + sizes.piece + sizes.unseen])
        first = int(np.argmax(whole.seen > sizes.piece))
        behind = slice(first, first + sizes.unseen)
        others = np.r_[0:first, behind.stop : len(whole.seen)]
        some = [*layers]
        recorded = Recorded(
            whole.geometry, whole.tokens, whole.kv[some], whole.queries[some][:, others],
            whole.seen[others],
        )  # fmt: skip
        found.append(_Piece(recorded, whole.queries[some, behind]))
    return found


def _layer(pieces: Sequence[_Piece], at: int, number: int) -> tuple[Layer, float]:
    """All pieces' entries of a layer as one context, asked by what follows the last piece.

    And the seconds that it took to profile it.

    Args:
        at: the layer's place among those that were read.
    """
    last, each_sinks = pieces[-1], Options().sinks
    # Every piece has sinks of its own, which are no middle to be found: they come first.
    parts = [slice(each_sinks), slice(each_sinks, last.tokens)]
    tokens = np.concatenate([each.recorded.tokens[part] for part in parts for each in pieces])
    kv = np.concatenate([each.recorded.kv[at, part] for part in parts for each in pieces])[None]
    # Those of the last piece that come behind it have seen what is asked.
    blind = last.recorded.seen <= last.tokens
    queries = np.concatenate(
        [
            *(each.recorded.queries[at] for each in pieces[:-1]),
            last.recorded.queries[at, blind],
        ]
    )
    count = min(_QUERIES, len(queries))
    queries = queries[np.linspace(0, len(queries) - 1, count).astype(np.int64)]
    geometry = msgspec.structs.replace(last.recorded.geometry, layers=1)
    seen = np.full(len(queries), len(tokens))
    recorded = Recorded(geometry, tokens, kv, queries[None], seen)
    block = Blocks.fitting(geometry.entry_bytes)
    options = Options(sinks=each_sinks * len(pieces)).fitted(len(tokens), block)
    begin = time.perf_counter()
    profile = Profile.of(recorded, 0, options, block)
    seconds = time.perf_counter() - begin
    keys, sinks, end = recorded.keys(0), options.sinks, len(tokens) - options.window
    own = last.recorded.keys(at)[last.tokens :]
    resident, asked = np.concatenate([keys[:sinks], keys[end:], own]), last.unseen[at]
    before = np.arange(len(resident) - len(own), len(resident)) + 1
    beside = log_sum(asked, resident, geometry.scale, before)
    layer = Layer(number, block, keys[sinks:end], asked, beside, geometry.scale, profile)
    return layer, seconds


def _choosing(layer: Layer) -> float:
    """Milliseconds for one query, whose attention to what is near is known."""
    threads, took = len(os.sched_getaffinity(0)), []
    codes, query, beside = layer.profile.codes, layer.queries[:1], layer.beside[:1]
    for _ in range(_CHOICES):
        begin = time.perf_counter()
        scores = codes.mass(query, layer.scale, beside, threads)
        best_blocks(scores, _BUDGET, block=layer.block, devices=DEVICES)
        took.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(took)
