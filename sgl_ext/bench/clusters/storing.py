"""Time of storing a context, beside its prefill, in servers that do and do not hold it in memory.

The KV pool of the second server holds a tenth of the context, which it therefore computes in parts.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import requests

from sgl_ext.bench.clusters.answers import follow
from sgl_ext.bench.clusters.samples import Sample, stored_system
from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import ratio
from sgl_ext.clusters.client import StoredContexts
from sgl_ext.errors import ExtError
from sgl_ext.serving import server
from sgl_ext.serving.http import forget

WHOLE, TENTH = "pool of the whole context", "pool of a tenth"
_DEVICES = 2
_PROMPT, _ANSWER, _PROMPTS = 24, 16, 4
_DEADLINE_S = 900.0


@dataclass
class _Measured:
    """Times of one server in seconds, one for each time that the context was stored.

    Attributes:
        stored: from the request to the stored context.
        computed: of that, the computation of the context's KV.
        asked: of that, the questions that profile it, and the start of the storing process.
        growth: time of the last quarter of the computation, relative to the first quarter.
    """

    stored: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)
    asked: list[float] = field(default_factory=list)
    growth: list[float] = field(default_factory=list)


def report_storing(report: Report, model: Path, sample: Sample, rounds: int, out: Path) -> None:
    """Measures how long it takes to store a context; adds the figures.

    Args:
        rounds: number of times that each server stores it.
    """
    tokens = len(sample.context)
    pools = {WHOLE: 2 * tokens + 1024, TENTH: tokens // 10}
    with tempfile.TemporaryDirectory(dir=out, prefix="clusters-") as scratch:
        systems = [
            stored_system(name, Path(scratch) / str(at), _DEVICES, pool, {"largest": 1.0})
            for at, (name, pool) in enumerate(pools.items())
        ]
        with server.serve(systems, model, out / "logs") as servers:
            measured = {each.system.name: _Measured() for each in servers}
            prefills = []
            for _ in range(rounds):
                prefills.append(_prefill(servers[0].url, sample.context))
                contexts = [
                    _store(each.url, sample.context, measured[each.system.name]) for each in servers
                ]
            equal = _equal([each.url for each in servers], contexts, sample.unseen)
    for name, one in measured.items():
        report.runs.append(
            {"what": "storing", "system": name, "tokens": tokens, "pool": pools[name],
             "samples": rounds, "growth": statistics.median(one.growth)}
            | summary(one.stored, "stored_s")
            | summary(one.computed, "computed_s")
            | summary(one.asked, "asked_s")
        )  # fmt: skip
    report.runs.append(
        {"what": "storing", "system": "prefill", "tokens": tokens, "samples": rounds}
        | summary(prefills, "computed_s")
    )
    whole, tenth = measured[WHOLE], measured[TENTH]
    report.figures |= {
        "store_s_per_1000_tokens": 1e3 * statistics.median(whole.stored) / tokens,
        "store_over_prefill": ratio(whole.stored, prefills),
        "ten_pools_store_over_one": ratio(tenth.stored, whole.stored),
        "ten_pools_compute_over_prefill": ratio(tenth.computed, prefills),
        "ten_pools_equal": equal,
    }


def _prefill(url: str, tokens: Sequence[int]) -> float:
    """Returns the seconds of a prompt of which no KV is cached."""
    forget(url)
    body = {"input_ids": [*tokens], "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    begin = time.perf_counter()
    answer = requests.post(f"{url}/generate", json=body, timeout=_DEADLINE_S)
    if not answer.ok:
        raise ExtError(f"{url} did not compute a prompt: {answer.text[:300]}")
    return time.perf_counter() - begin


def _store(url: str, tokens: Sequence[int], measured: _Measured) -> str:
    """Has a server store a context; returns its id."""
    at: dict[str, float] = {}

    def tell(said: str) -> None:
        at[said] = time.perf_counter()

    began = time.perf_counter()
    found = StoredContexts(url).store(tokens, tell=tell)
    measured.stored.append(time.perf_counter() - began)
    parts = {said: when for said, when in at.items() if said.startswith("computing ")}
    ends = {int(said.split()[1].partition("/")[0]): when for said, when in parts.items()}
    measured.computed.append(ends[len(tokens)] - ends[0])
    first_layer = next(when for said, when in at.items() if said.startswith("layer "))
    measured.asked.append(first_layer - ends[len(tokens)])
    times = [after - before for before, after in pairwise(ends.values())]
    quarter = max(len(times) // 4, 1)
    measured.growth.append(sum(times[-quarter:]) / sum(times[:quarter]))
    return str(found["id"])


def _equal(urls: Sequence[str], contexts: Sequence[str], unseen: Sequence[int]) -> float:
    """Returns the share of prompts to which the servers give the same tokens over all blocks."""
    same = 0
    for at in range(_PROMPTS):
        body = {
            "input_ids": [*unseen[at * _PROMPT :][:_PROMPT]],
            "sampling_params": {"temperature": 0, "max_new_tokens": _ANSWER, "ignore_eos": True},
        }
        one, other = (
            follow(url, body, context, 1.0)["output_ids"]
            for url, context in zip(urls, contexts, strict=True)
        )
        same += one == other
    return same / _PROMPTS
