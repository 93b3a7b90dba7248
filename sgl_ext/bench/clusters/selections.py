"""Speed, reads and answers over one context whose entries are grouped into blocks in several ways.

One server follows the same record, stored once for each arrangement. The codes, the number of
selected entries and the memory for blocks are the same; only the entries that share a block differ.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial as partial_of
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

from sgl_ext.bench.clusters.against import Prompts, following, seconds
from sgl_ext.bench.clusters.answers import dense, diverged, divergences
from sgl_ext.bench.clusters.samples import Sample, device_directories, record, stored_system
from sgl_ext.bench.harness.partial import Partial
from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import ratio, rotated
from sgl_ext.clusters.build import build
from sgl_ext.clusters.client import StoredContexts
from sgl_ext.clusters.files import own_folders, storing
from sgl_ext.clusters.paths import new_id
from sgl_ext.clusters.placement import Blocks
from sgl_ext.clusters.profile import Options
from sgl_ext.clusters.recorded import Recorded
from sgl_ext.clusters.selection import blocks_of
from sgl_ext.clusters.stored import about
from sgl_ext.errors import ExtError
from sgl_ext.progress import say
from sgl_ext.serving import server
from sgl_ext.serving.http import live

POSITION, PAGES, ENTRY, OURS = "position", "pages", "entry", "ours"
ARRANGEMENTS: Mapping[str, Options] = {
    PAGES: Options(order="text", block=16),  # Quest; InfLLM's blocks are larger
    POSITION: Options(order="text"),
    ENTRY: Options(block=1),  # PQCache
    OURS: Options(),
}
"""Options with which the context is stored, by arrangement."""
SHARES = (0.05, 0.1, 0.25)
_DEVICES = 4
_ANSWER = 24
_HOT = "8MiB"


class Arranged(NamedTuple):
    """Stored context in one arrangement."""

    id: str
    blocks: Blocks


class Counts(NamedTuple):
    """Blocks that a server has used of an open context, since it was opened."""

    fetched: int
    """Blocks that were read from devices."""
    in_memory: int


@dataclass
class Measured:
    """Measurements of one arrangement, share and batch size; one of each for each round.

    Attributes:
        ttft: Time until each request of a batch has its first token, in seconds.
        token: Time per token of a batch, in seconds.
        read: Blocks that were read for each generated token.
        in_memory: Share of the wanted blocks that were in memory.
    """

    ttft: list[float] = field(default_factory=list)
    token: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    in_memory: list[float] = field(default_factory=list)

    def add(self, before: Counts, after: Counts, tokens: int) -> None:
        """Adds the blocks that the server has used for ``tokens`` generated tokens."""
        fetched = after.fetched - before.fetched
        held = after.in_memory - before.in_memory
        self.read.append(fetched / tokens)
        self.in_memory.append(held / max(held + fetched, 1))


Setting = tuple[float, str, int]
"""Share of the context that is read, arrangement, and batch size."""


def report_selections(
    report: Report,
    model: Path,
    sample: Sample,
    batches: Sequence[int],
    pool: int,
    rounds: int,
    out: Path,
) -> None:
    """Measures each arrangement with several shares and batch sizes; adds their figures.

    Args:
        sample: context, and text of which prompts are made and whose divergence is measured.
        batches: numbers of requests that are sent at once.
        pool: tokens that the KV pool of the server holds, more than those of the sample.
        rounds: number of measured batches of each setting.
    """
    with served(model, pool, out) as (url, directories):
        contexts = arranged_all(record(url, sample.context), directories)
        answers = _answers(url, sample, contexts)
        found = measure_all(url, contexts, sample, batches, rounds)
    add_answers(report, answers)
    add_speeds(report, found, {name: one.blocks for name, one in contexts.items()})


def report_texts(
    report: Report, model: Path, read: Sequence[Sample], pool: int, out: Path, partial: Partial
) -> None:
    """Measures the divergence of each arrangement over several texts.

    Args:
        pool: tokens that the KV pool of the server holds, more than those of a sample.
    """
    with served(model, pool, out) as (url, directories):
        found = [
            partial.find(f"texts/{each.name}", partial_of(_text, url, each, directories))
            for each in read
        ]
    for share, name in product(SHARES, ARRANGEMENTS):
        of_texts = [each[f"{share:g}/{name}"] for each in found]
        for sample, tokens in zip(read, of_texts, strict=True):
            run = divergences(f"selections, {sample.name}", tokens)
            report.runs.append({"system": name, "sparsity": share, **run})
        run = divergences("selections, all texts", [*chain.from_iterable(of_texts)])
        report.runs.append({"system": name, "sparsity": share, **run})
        report.figures[f"kl_of_texts_{name}_{100 * share:g}"] = run["kl"]


@contextmanager
def served(
    model: Path, pool: int, out: Path, hot: int | str = _HOT
) -> Iterator[tuple[str, list[Path]]]:
    """Yields the URL of a server, and the directories of its devices.

    Args:
        hot: memory for blocks of an open context.
    """
    with tempfile.TemporaryDirectory(dir=out, prefix="clusters-") as scratch:
        section = {"hot": hot, "largest": max(SHARES)}
        system = stored_system("selections", Path(scratch), _DEVICES, pool, section)
        with server.serve([system], model, out / "logs") as (running,):
            yield running.url, device_directories(Path(scratch), _DEVICES)


def _text(
    url: str, sample: Sample, directories: Sequence[Path]
) -> dict[str, list[tuple[float, bool]]]:
    """Returns the divergence of each unseen token of a text, by share and arrangement."""
    contexts = arranged_all(record(url, sample.context), directories)
    try:
        answers = _answers(url, sample, contexts)
    finally:
        for one in contexts.values():
            StoredContexts(url).delete(one.id)
    return {f"{share:g}/{name}": [*tokens] for (share, name), tokens in answers.items()}


def arranged_all(
    recorded: Recorded, directories: Sequence[Path], names: Sequence[str] = (*ARRANGEMENTS,)
) -> dict[str, Arranged]:
    """Stores a recorded context in several arrangements."""
    return {name: arranged(recorded, name, ARRANGEMENTS[name], directories) for name in names}


def _answers(
    url: str, sample: Sample, contexts: Mapping[str, Arranged]
) -> dict[tuple[float, str], Sequence[tuple[float, bool]]]:
    """Returns the divergence of each unseen token, by share and arrangement."""
    right = dense(url, sample)
    return {
        (share, name): diverged(url, sample, one.id, share, right)
        for share, (name, one) in product(SHARES, contexts.items())
    }


def arranged(
    recorded: Recorded, name: str, options: Options, directories: Sequence[Path]
) -> Arranged:
    """Stores a recorded context under the directories of a server.

    Args:
        name: beginning of its id.
    """
    say(f"storing the context, {name}")
    options = replace(options, threads=len(os.sched_getaffinity(0)))
    id_, folders = new_id(name), own_folders(directories)
    with storing(folders[0]):
        build(recorded, id_, folders, options)
    return Arranged(id_, about(id_, folders).blocks)


def measure_all(
    url: str,
    contexts: Mapping[str, Arranged],
    sample: Sample,
    batches: Sequence[int],
    rounds: int,
    shares: Sequence[float] = SHARES,
) -> dict[Setting, Measured]:
    """Measures each share, arrangement and batch size in several rounds.

    Arrangements with the same share are measured one after the other.
    """
    settings = [*product(shares, contexts)]
    found = {(*key, batch): Measured() for key, batch in product(settings, batches)}
    prompts = Prompts(sample.unseen)
    for one in contexts.values():  # the first batch is not measured
        seconds(following(url, one.id, shares[-1]), prompts.take(max(batches)), 2)
    for at in range(rounds):
        say(f"measuring round {at + 1} of {rounds}")
        for batch in batches:
            asked = prompts.take(batch)  # each context and share has its own cache
            for share, name in rotated(settings, at):
                measure(url, contexts[name].id, share, asked, found[share, name, batch])
    return found


def measure(
    url: str, id_: str, share: float, prompts: Sequence[Sequence[int]], measured: Measured
) -> None:
    """Measures a batch: its first tokens, and its further ones behind cached prompts."""
    ask = following(url, id_, share)
    first = seconds(ask, prompts, 1)
    short = seconds(ask, prompts, 1)
    before = _counts(url, id_)
    long = seconds(ask, prompts, 1 + _ANSWER)
    if long <= short:
        raise ExtError("the answer of one token took longer than the long one; repeat the run")
    measured.ttft.append(first)
    measured.token.append((long - short) / _ANSWER)
    measured.add(before, _counts(url, id_), len(prompts) * (1 + _ANSWER))


def _counts(url: str, id_: str) -> Counts:
    found = live(url)["clusters"]["open"][id_]
    return Counts(found["fetched"], found["in_memory"])


def add_answers(
    report: Report, answers: Mapping[tuple[float, str], Sequence[tuple[float, bool]]]
) -> None:
    """Adds the divergence from dense attention to the report.

    Args:
        answers: by share and arrangement, the KL divergence in nats of each unseen token, and
            whether the top tokens agree.
    """
    for (share, name), tokens in answers.items():
        run = divergences("selections, answers", tokens)
        report.runs.append({"system": name, "sparsity": share, **run})
        report.figures[f"kl_{name}_{100 * share:g}"] = run["kl"]
        report.figures[f"top1_{name}_{100 * share:g}"] = run["top1"]


def add_speeds(
    report: Report, found: Mapping[Setting, Measured], blocks: Mapping[str, Blocks]
) -> None:
    """Adds runs, figures, and the ratios of ours to the other arrangements, to the report.

    Args:
        blocks: blocks of each arrangement.
    """
    for (share, name, batch), one in found.items():
        of = blocks[name]
        selected = blocks_of(share, of.blocks, of.devices)
        speed = batch / statistics.median(one.token)
        read = of.block_bytes * statistics.median(one.read)
        run: dict[str, Any] = {
            "what": "selections", "system": name, "sparsity": share, "batch": batch,
            "block": of.block, "selected": selected / of.blocks, "samples": len(one.token),
            "tokens_per_s": speed, "read_bytes": read, "blocks_read": statistics.median(one.read),
            "in_memory": statistics.median(one.in_memory),
        }  # fmt: skip
        report.runs.append(
            run | summary(one.ttft, "ttft_ms", 1e3) | summary(one.token, "token_ms", 1e3)
        )
        key = f"{100 * share:g}_b{batch}"
        report.figures |= {
            f"tokens_per_second_{name}_{key}": speed,
            f"ttft_ms_{name}_{key}": 1e3 * statistics.median(one.ttft),
            f"read_bytes_{name}_{key}": read,
        }
        if name != OURS:
            ours = found[share, OURS, batch]
            report.figures |= {
                f"tokens_per_second_ours_to_{name}_{key}": ratio(one.token, ours.token),
                f"ttft_ours_to_{name}_{key}": ratio(ours.ttft, one.ttft),
            }
