"""Next-token distributions of a server over a stored context, against dense attention."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial as partial_of
from typing import Any

import numpy as np
import requests

from sgl_ext.bench.clusters.samples import Sample
from sgl_ext.bench.data.scores import mean_interval
from sgl_ext.bench.harness.partial import Partial
from sgl_ext.bench.harness.report import Report
from sgl_ext.chunks.divergence import Distribution, divergence
from sgl_ext.clusters.client import StoredContexts
from sgl_ext.distributions import distributions, read, request
from sgl_ext.errors import ExtError

_TOP = 512
_DEADLINE_S = 900.0


def report_answers(
    report: Report, url: str, samples: Sequence[Sample], shares: Sequence[float], partial: Partial
) -> None:
    """Adds the KL divergence from dense attention and the share of equal top tokens to the report.

    Args:
        shares: values of ``sparsity``, the share of the context that a token reads.
    """
    found = [
        partial.find(f"answers, {each.name}", partial_of(_of_sample, url, each, shares))
        for each in samples
    ]
    for share in shares:
        tokens = [pair for each in found for pair in each[f"{share:g}"]]
        run = divergences(f"answers with {share:.0%}", tokens)
        report.runs.append(run | {"kl_p95": float(np.percentile([kl for kl, _ in tokens], 95))})
        for each, sample in zip(found, samples, strict=True):
            kl_here, same_here = zip(*each[f"{share:g}"], strict=True)
            report.runs.append(
                {
                    "what": f"answers with {share:.0%}, {sample.name}",
                    "samples": len(kl_here),
                    "kl": statistics.mean(kl_here),
                    "kl_p95": float(np.percentile(kl_here, 95)),
                    "top1": statistics.mean(same_here),
                }
            )
        name = f"{100 * share:g}"
        report.figures[f"kl_{name}"] = run["kl"]
        asked = [
            pair[0]
            for each, sample in zip(found, samples, strict=True)
            if sample.task == "questions"
            for pair in each[f"{share:g}"]
        ]
        report.figures[f"kl_of_questions_p95_{name}"] = float(np.percentile(asked, 95))
        report.figures[f"top1_{name}"] = run["top1"]


def divergences(what: str, tokens: Sequence[tuple[float, bool]]) -> dict[str, Any]:
    """Returns a run: the mean divergence of tokens, its interval, and the share of equal ones.

    Args:
        tokens: see :func:`diverged`.
    """
    kl, same = zip(*tokens, strict=True)
    mean = mean_interval(kl)
    return {
        "what": what, "samples": len(kl), "kl": mean.mean, "kl_low": mean.low,
        "kl_high": mean.high, "top1": statistics.mean(same),
    }  # fmt: skip


def store(url: str, tokens: Sequence[int]) -> str:
    """Stores a context on a server and returns its id.

    Raises:
        ExtError: the server did not store the context.
    """
    return str(StoredContexts(url).store(tokens)["id"])


@contextmanager
def stored(url: str, tokens: Sequence[int]) -> Iterator[str]:
    """Stores a context on a server (:func:`store`), yields its id, and deletes it at the end."""
    id_ = store(url, tokens)
    try:
        yield id_
    finally:
        StoredContexts(url).delete(id_)


def follow(
    url: str, body: dict[str, Any], context: str | Sequence[str], share: float
) -> dict[str, Any]:
    """Returns a server's answer to a request that follows a stored context.

    Args:
        body: body of ``/generate``, with ``sampling_params``.
        context: id of the context, or those of several.
        share: ``sparsity`` of the request.

    Raises:
        ExtError: the server did not answer.
    """
    params = {**body["sampling_params"], "custom_params": follows(context, share)}
    answer = requests.post(
        f"{url}/generate", json={**body, "sampling_params": params}, timeout=_DEADLINE_S
    )
    if not answer.ok:
        raise ExtError(f"{url} did not answer a request over a stored context: {answer.text[:300]}")
    found: dict[str, Any] = answer.json()
    return found


def follows(context: str | Sequence[str], share: float) -> dict[str, Any]:
    """Returns the ``custom_params`` of a request that follows a stored context, or several."""
    return {"ext_stored": {"id": context, "sparsity": share}}


def _of_sample(
    url: str, sample: Sample, shares: Sequence[float]
) -> dict[str, list[tuple[float, bool]]]:
    """Returns the KL divergence in nats, and whether top tokens agree, of each token by share."""
    right = dense(url, sample)
    with stored(url, sample.context) as id_:
        return {f"{share:g}": diverged(url, sample, id_, share, right) for share in shares}


def dense(url: str, sample: Sample) -> Sequence[Distribution]:
    """Returns the distribution of each unseen token but the first with dense attention."""
    last = len(sample.unseen) - 1  # in a request that follows, no token precedes the first one
    whole = [*sample.context, *sample.unseen]
    return distributions(
        url, whole, last, len(sample.context) + 1, top=_TOP, deadline=_DEADLINE_S
    ).distributions


def diverged(
    url: str,
    sample: Sample,
    context: str | Sequence[str],
    share: float,
    right: Sequence[Distribution],
) -> list[tuple[float, bool]]:
    """Returns the KL divergence in nats, and whether top tokens agree, of each unseen token.

    Args:
        context: id of the sample's stored context, or those of several.
        right: result of :func:`dense`.
    """
    return [
        (divergence(one, other), _best(one) == _best(other))
        for one, other in zip(right, _following(url, sample, context, share), strict=True)
    ]


def _following(
    url: str, sample: Sample, context: str | Sequence[str], share: float
) -> list[Distribution]:
    body = request(sample.unseen, 1, top=_TOP)
    return read(follow(url, body, context, share)["meta_info"], len(sample.unseen) - 1)


def _best(distribution: Distribution) -> int:
    return max(distribution, key=distribution.__getitem__)
