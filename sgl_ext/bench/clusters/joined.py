"""Several stored contexts in one request, against the same text as one stored context.

Each text is stored as a whole, and cut into parts that are stored as contexts of their own. Tokens
of a later part have not seen the earlier parts. Both are compared with dense attention to the whole
text, by the divergence of the next token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial as partial_of

from sgl_ext.bench.clusters.answers import dense, diverged, divergences
from sgl_ext.bench.clusters.samples import Sample
from sgl_ext.bench.harness.partial import Partial
from sgl_ext.bench.harness.report import Report
from sgl_ext.chunks.divergence import Distribution
from sgl_ext.clusters.client import StoredContexts

_SHARES = (0.1, 1.0)
_PARTS = (1, 2, 4)
LAST = "the last part alone"


def report_joined(report: Report, url: str, samples: Sequence[Sample], partial: Partial) -> None:
    """Measures contexts that are followed together; adds the runs and figures."""
    found = [
        partial.find(f"joined, {each.name}", partial_of(_of_sample, url, each)) for each in samples
    ]
    for how in (*(f"{count}" for count in _PARTS), LAST):
        for share in _SHARES:
            pairs = [pair for each in found for pair in each[how][f"{share:g}"]]
            run = divergences(f"joined {how}, {share:.0%}", pairs)
            report.runs.append(run)
            if how != LAST:
                report.figures |= {
                    f"joined_{how}_kl_{100 * share:g}": run["kl"],
                    f"joined_{how}_top1_{100 * share:g}": run["top1"],
                }


def _of_sample(url: str, sample: Sample) -> dict[str, object]:
    right = dense(url, sample)
    found: dict[str, object] = {}
    ids: list[str] = []
    for count in _PARTS:
        size = -(-len(sample.context) // count)
        parts = [sample.context[at : at + size] for at in range(0, len(sample.context), size)]
        ids = [str(StoredContexts(url).store([*part])["id"]) for part in parts]
        found[f"{count}"] = _diverged(url, sample, ids, right)
    found[LAST] = _diverged(url, sample, ids[-1:], right)
    return found


def _diverged(
    url: str, sample: Sample, ids: Sequence[str], right: Sequence[Distribution]
) -> dict[str, list[tuple[float, bool]]]:
    return {f"{share:g}": diverged(url, sample, ids, share, right) for share in _SHARES}
