"""TTFT and time per token over a long context: dense attention, and a stored context.

The part ``long`` has contexts beyond those that the model is trained for, whose times count and
whose answers do not.

Requests of a batch share the context and have prompts of their own. With dense attention, the KV of
the context is in the device pool, or comes from host memory for the first token; a stored context
is on devices, and the device pool holds only what is behind it.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from sgl_ext.bench.clusters.answers import follows, store
from sgl_ext.bench.clusters.samples import Sample, stored_system
from sgl_ext.bench.clusters.serving import BLOCKS
from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import ratio, rotated
from sgl_ext.errors import ExtError
from sgl_ext.serving import server
from sgl_ext.serving.http import live, send, wait_until_stored

DENSE, HOST, STORED = "dense, KV in the device pool", "dense, KV from host memory", "stored"
_DEVICES = 4
_PROMPT, _ANSWER = 24, 32
_SHARES = (0.05, 0.1, 0.25)
_LONG_SHARES = (0.05, 0.1)
_STORED_POOL = 2048
"""Device pool of the server that follows the stored context, in tokens."""
_FIRST = 1000
"""Token id below the first tokens of prompts, which differ."""
_SMALL = 64
"""Tokens of a pool beside one context and its batch; a second context does not fit."""

Ask = Callable[[Sequence[int], int], None]
"""Sends a prompt of own tokens behind the context, and the number of tokens of its answer."""


@dataclass
class _Measured:
    """Measurements of one system and batch size, in seconds."""

    ttft: list[float] = field(default_factory=list)
    """Time until each request of a batch has its first token."""
    token: list[float] = field(default_factory=list)
    """Time per token of a batch."""


def report_against(
    report: Report, model: Path, sample: Sample, batches: Sequence[int], rounds: int, out: Path
) -> None:
    """Measures the systems with batches of several sizes; adds their figures.

    Args:
        sample: context, and text of which prompts are made.
        batches: numbers of requests that are sent at once.
        rounds: number of measured batches of each size.
    """
    found, blocks = _compare(model, sample, batches, rounds, out, _SHARES, host=True)
    _add(report, "against", sample, found)
    report.runs.append({"what": "against, blocks", **blocks})
    for batch, share in product(batches, _SHARES):
        ours, name = found[_name(share), batch], f"{100 * share:g}_batch_{batch}"
        report.figures[f"tokens_per_s_to_dense_{name}"] = ratio(
            found[DENSE, batch].token, ours.token
        )
        report.figures[f"ttft_to_host_{name}"] = ratio(ours.ttft, found[HOST, batch].ttft)


def report_long(
    report: Report, model: Path, sample: Sample, batches: Sequence[int], rounds: int, out: Path
) -> None:
    """Measures a context that may be longer than those that the model is trained for.

    KV from host memory is not measured: between its batches, a context as long would be computed.
    For the arguments see :func:`report_against`.
    """
    length = len(sample.context)
    positions = json.dumps({"max_position_embeddings": length + 1024})
    more = ("--json-model-override-args", positions)
    found, _ = _compare(model, sample, batches, rounds, out, _LONG_SHARES, *more, host=False)
    _add(report, "long", sample, found)
    for batch, share in product(batches, _LONG_SHARES):
        report.figures[f"long_tokens_per_s_to_dense_{100 * share:g}_batch_{batch}_{length}"] = (
            ratio(found[DENSE, batch].token, found[_name(share), batch].token)
        )


def _compare(
    model: Path,
    sample: Sample,
    batches: Sequence[int],
    rounds: int,
    out: Path,
    shares: Sequence[float],
    *more: str,
    host: bool,
) -> tuple[dict[tuple[str, int], _Measured], dict[str, int]]:
    """Measures the systems with batches of several sizes.

    Args:
        shares: values of ``sparsity`` of requests that follow the stored context.
        more: further arguments of all servers.
        host: whether dense attention with KV from host memory is measured.

    Returns:
        Measurements by system and batch size, and the numbers of blocks by their source.
    """
    context = sample.context
    room = max(batches) * (_PROMPT + _ANSWER + 2) + _SMALL
    tiers = server.extension({"tiers": {"host": {"capacity": "1GiB"}}})
    dense = ("--max-total-tokens", str(len(context) + room), *server.BESIDE_OTHERS, *more)
    with tempfile.TemporaryDirectory(dir=out, prefix="clusters-") as scratch:
        section = {"hot": "8MiB", "largest": max(shares)}
        systems = [
            stored_system(STORED, Path(scratch), _DEVICES, _STORED_POOL, section, *more),
            server.System(DENSE, dense),
            *([server.System(HOST, (*dense, *tiers))] if host else []),
        ]
        with server.serve(systems, model, out / "logs") as (stored, *others):
            id_ = store(stored.url, context)
            asks: dict[str, Ask] = {
                **{each.system.name: _dense(each.url, context) for each in others},
                **{_name(share): following(stored.url, id_, share) for share in shares},
            }
            found = {key: _Measured() for key in product(asks, batches)}
            prompts = Prompts(sample.unseen)
            for at in range(rounds + 1):
                for batch in batches:
                    for name in rotated(asks, at):
                        if name == HOST:
                            _displace(others[-1].url, context)
                        # The first round opens the context and warms the servers up.
                        into = found[name, batch] if at else _Measured()
                        _measure(asks[name], prompts.take(batch), into)
            blocks = live(stored.url)["clusters"]["open"][id_]
    return found, {name: blocks[name] for name in BLOCKS}


def _add(
    report: Report, what: str, sample: Sample, found: Mapping[tuple[str, int], _Measured]
) -> None:
    """Adds a run of each system and batch size to the report."""
    for (system, batch), one in found.items():
        report.runs.append(
            {"what": what, "system": system, "batch": batch, "tokens": len(sample.context),
             "samples": len(one.token), "tokens_per_s": batch / statistics.median(one.token)}
            | summary(one.ttft, "ttft_ms", 1e3)
            | summary(one.token, "token_ms", 1e3)
        )  # fmt: skip


class Prompts:
    """Prompts of text, none of which begins as an earlier one.

    Args:
        text: token ids that prompts are made of.
    """

    def __init__(self, text: Sequence[int]) -> None:
        self._text, self._taken = text, 0

    def take(self, count: int) -> list[list[int]]:
        """Returns the next prompts, ``[count][tokens]``."""
        found = []
        for _ in range(count):
            self._taken += 1
            at = self._taken * 7 % (len(self._text) - _PROMPT)
            found.append([_FIRST + self._taken, *self._text[at : at + _PROMPT - 1]])
        return found


def _name(share: float) -> str:
    return f"{STORED}, {share:.0%}"


def _dense(url: str, context: Sequence[int]) -> Ask:
    def ask(prompt: Sequence[int], tokens: int) -> None:
        send(url, [*context, *prompt], _params(tokens))

    return ask


def following(url: str, context: str, share: float) -> Ask:
    """Returns a function that sends prompts behind a stored context of a server.

    Args:
        context: id of the context.
        share: ``sparsity`` of the requests.
    """

    def ask(prompt: Sequence[int], tokens: int) -> None:
        send(url, prompt, {**_params(tokens), "custom_params": follows(context, share)})

    return ask


def _params(tokens: int) -> dict[str, object]:
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}


def _displace(url: str, context: Sequence[int]) -> None:
    """Evicts the context from the device pool, so that its KV is in host memory only."""
    wait_until_stored(url)
    send(url, [*reversed(context)], _params(1))
    wait_until_stored(url)


def _measure(ask: Ask, prompts: Sequence[Sequence[int]], measured: _Measured) -> None:
    """Measures a batch: its first tokens, and its further ones behind cached prompts."""
    first = seconds(ask, prompts, 1)
    short = seconds(ask, prompts, 1)
    long = seconds(ask, prompts, 1 + _ANSWER)
    if long <= short:
        raise ExtError("the answer of one token took longer than the long one; repeat the run")
    measured.ttft.append(first)
    measured.token.append((long - short) / _ANSWER)


def seconds(ask: Ask, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Returns the seconds until all of the prompts, sent at once, have answers of ``tokens``."""
    with ThreadPoolExecutor(len(prompts)) as threads:
        begin = time.perf_counter()
        for each in [threads.submit(ask, prompt, tokens) for prompt in prompts]:
            each.result()
        return time.perf_counter() - begin
