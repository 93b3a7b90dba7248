"""Contexts that grow: a context is stored in turns, and once as a whole.

The first half of each text is stored, and the second half continues it in turns. The divergence of
the next token from dense attention is that of the context with all turns, and, for comparison, of
the whole text when it is stored at once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial as partial_of

from sgl_ext.bench.clusters.answers import dense, diverged, divergences
from sgl_ext.bench.clusters.samples import Sample
from sgl_ext.bench.harness.partial import Partial
from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.clusters.client import StoredContexts

_TURN = 256
_SHARES = (0.1, 1.0)
_GROWN, _AT_ONCE = "in turns", "at once"


def report_continuing(
    report: Report, url: str, samples: Sequence[Sample], partial: Partial
) -> None:
    """Measures contexts that are stored in turns; adds the runs and figures."""
    found = [
        partial.find(f"continuing, {each.name}", partial_of(_of_sample, url, each))
        for each in samples
    ]
    kl = {}
    for how in (_GROWN, _AT_ONCE):
        for share in _SHARES:
            pairs = [pair for each in found for pair in each[how][f"{share:g}"]]
            run = divergences(f"stored {how}, {share:.0%}", pairs)
            kl[how, share] = run["kl"]
            report.runs.append(run)
    turns = [seconds for each in found for seconds in each["turns"]]
    whole = [each["whole"] for each in found]
    report.runs.append(
        {"what": f"turn of {_TURN} tokens", "samples": len(turns)} | summary(turns, "stored_s")
    )
    report.runs.append({"what": "whole", "samples": len(whole)} | summary(whole, "stored_s"))
    report.figures |= {
        "continued_kl_10": kl[_GROWN, 0.1],
        "at_once_kl_10": kl[_AT_ONCE, 0.1],
        "continued_top1_100": statistics.mean(
            same for each in found for _, same in each[_GROWN]["1"]
        ),
        "continue_s_per_turn": statistics.median(turns),
        "continue_over_store": statistics.median(
            statistics.median(each["turns"]) / each["whole"] for each in found
        ),
    }


def _of_sample(url: str, sample: Sample) -> dict[str, object]:
    right = dense(url, sample)
    tokens, half = sample.context, len(sample.context) // 2
    began = time.perf_counter()
    whole = str(StoredContexts(url).store(tokens)["id"])
    seconds = time.perf_counter() - began
    grown = str(StoredContexts(url).store(tokens[:half])["id"])
    turns = []
    for start in range(half, len(tokens), _TURN):
        began = time.perf_counter()
        grown = str(StoredContexts(url).store(tokens[start : start + _TURN], base=grown)["id"])
        turns.append(time.perf_counter() - began)
    return {
        "whole": seconds,
        "turns": turns,
        **{
            how: {f"{share:g}": diverged(url, sample, id_, share, right) for share in _SHARES}
            for how, id_ in ((_GROWN, grown), (_AT_ONCE, whole))
        },
    }
