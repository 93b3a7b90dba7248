"""Comparison of the answers of exact powers with those of stock SGLang, token by token.

With ``--config``, a configuration serves a mixed load for ``--minutes``, or of ``--requests``:
conversations of several turns, several answers of one request, streams, logprobs, priorities,
requests that are given up, prompts with contexts, followers of stored contexts, flushes, and kills.
The following counts must be zero: answers that differ, requests that hang or are refused, servers
that die, and resources that are held after all requests or the server have ended.

Without ``--config``, tiers are compared one by one. Conversations take turns on a device pool that
holds few of them, so that the KV that a turn hits was evicted before. Every answer is compared with
that of a server without the extension: greedy tokens and their logprobs, in float32.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import requests

from sgl_ext.bench.data.conversations import Conversation, conversations
from sgl_ext.bench.exactness.answers import ALIKE
from sgl_ext.bench.exactness.load import Load
from sgl_ext.bench.exactness.material import Texts
from sgl_ext.bench.exactness.sections import find
from sgl_ext.bench.exactness.servers import Victim, complaints, end, setup
from sgl_ext.bench.exactness.tally import FAULTS, Tally
from sgl_ext.bench.harness.report import Report
from sgl_ext.errors import ExtError
from sgl_ext.models import SMOLLM2, prepare, shortened
from sgl_ext.progress import steps
from sgl_ext.serving import server

_OUTPUT_TOKENS = 8
_DEADLINE_S = 300.0
_PEERS_CLIENTS = 2
_PER_MINUTE = 60
"""Estimated requests per minute on two cores."""

_LEAK = re.compile("mem(ory)? leak", re.IGNORECASE)
"""Messages of SGLang's checks of its pools."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of this benchmark."""
    parser.add_argument(
        "--config", metavar="FILE",
        help="an --ext-config, or sections such as tiers+swap+master (or worker, layers for a "
        "peer); new directories replace its own",
    )  # fmt: skip
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="length of the load (default: 10)"
    )
    parser.add_argument(
        "--requests", type=int, metavar="COUNT",
        help="end after this number of requests instead of --minutes, without kills",
    )  # fmt: skip
    parser.add_argument(
        "--cover", action="append", default=[], metavar="COUNTER",
        help="continue until this count of the report is above zero, for up to ten times --minutes "
        "or --requests; may be repeated",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of all requests (default: 0)")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument(
        "--layers", type=int, default=6, help="layers of SmolLM2 that are used (default: 6, of 30)"
    )
    parser.add_argument(
        "--deadline", type=float, default=180.0, metavar="SECONDS",
        help="time after which a request counts as hung (default: 180)",
    )  # fmt: skip
    parser.add_argument(
        "--server-args", default="", metavar="ARGUMENTS",
        help="further SGLang arguments; preset are pages of 16, a pool of 3,072 tokens, chunks of "
        "512, and float32",
    )  # fmt: skip


def minutes(options: argparse.Namespace) -> float | None:
    """Returns the estimated minutes of a run with its servers' starts and ends; None if unknown."""
    if options.config is None:
        return None
    if options.requests is not None:
        return float(options.requests) / _PER_MINUTE + 2
    return float(options.minutes) + 3


def run(*, quick: bool, out: Path, options: argparse.Namespace) -> Report:
    if options.config is not None:
        return drive(options, out)
    return _tiers_one_by_one(quick, out)


def drive(options: argparse.Namespace, out: Path) -> Report:
    """Runs a configuration under load, with the options of :func:`add_arguments`.

    Logs and failed requests are kept in ``out/exactness-NAME``.

    Raises:
        ExtError: there is no such configuration, a server does not start, or stock SGLang does not
            answer.
    """
    name, config = find(options.config)
    place = out / f"exactness-{name}"
    place.mkdir(parents=True, exist_ok=True)
    failures = place / "failures.jsonl"
    failures.unlink(missing_ok=True)
    model = shortened(SMOLLM2, options.layers)
    with ExitStack() as stack:
        made = tempfile.TemporaryDirectory(dir=place, prefix="stored-")
        sockets = tempfile.TemporaryDirectory(prefix="sgl_ext-peers-")
        arranged = setup(
            config, Path(stack.enter_context(made)), Path(stack.enter_context(sockets))
        )
        texts = Texts(
            model, options.seed, chunks=arranged.has("chunks"), clusters=arranged.has("clusters")
        )
        systems = arranged.systems(options.server_args)
        stock, *tested = stack.enter_context(server.serve(systems, model, place))
        victims = [Victim(each, model, place, stack) for each in tested]
        load = Load(
            victims, (options.clients, _PEERS_CLIENTS)[: len(victims)], stock.url, texts,
            options.seed, options.deadline, failures,
        )  # fmt: skip
        tally = asyncio.run(load.run(60 * options.minutes, options.cover, options.requests))
        left = [] if tally.dead else end([victim.server for victim in victims])
        said = complaints([log for victim in victims for log in victim.logs])
    return _told(name, options, tally, [*said, *left], place, left=len(left))


def _told(
    name: str,
    options: argparse.Namespace,
    tally: Tally,
    said: Sequence[str],
    place: Path,
    *,
    left: int,
) -> Report:
    tally.leaked += left
    tally.leaked += not tally.dead and any(_LEAK.search(line) for line in said)
    told = {**asdict(tally), **tally.server}
    del told["server"]
    config = {key: value for key, value in vars(options).items() if key not in ("name", "out")}
    report = Report(f"exactness-{name}", {**config, "alike": ALIKE})
    for key in FAULTS:
        report.runs.append({"what": "faults", "of": key, "count": told[key]})
    for key, count in told.items():
        if key not in FAULTS:
            report.runs.append({"what": "load", "of": key, "count": count})
    report.figures = {key: float(count) for key, count in told.items()}
    lacking = tally.lacking(options.cover, tally.server)
    missed = f"does not cover {', '.join(lacking)}" if lacking else ""
    if found := tally.failed or ("errors in the logs" if said else missed):
        report.failed = f"{name}: {found}; see {place}"
        for line in said[:5]:
            report.failed += f"\n{line}"
    return report


def _tiers_one_by_one(quick: bool, out: Path) -> Report:
    model = prepare(SMOLLM2)
    held = conversations(model, 8 if quick else 200, turns=2, tokens=(250, 500 if quick else 900))
    report = Report("exactness", {"quick": quick, "conversations": len(held), "dtype": "float32"})
    out.mkdir(parents=True, exist_ok=True)
    for page in (16,) if quick else (1, 16):
        with tempfile.TemporaryDirectory(dir=out, prefix="exactness-") as scratch:
            systems = _systems(page, Path(scratch))
            with server.serve(systems, model, out / "logs") as servers:
                _compare(report, page, servers, held)
    return report


def _systems(page: int, scratch: Path) -> list[server.System]:
    pool = ("--max-total-tokens", "2048", "--page-size", str(page), "--dtype", "float32")
    ssd = {"directories": [str(scratch)], "capacity": "16GiB", "keep_after": 1}
    configs: dict[str, dict[str, object]] = {
        "host": {"tiers": {"host": {"capacity": "1GiB"}}},
        "ssd": {"tiers": {"ssd": ssd, "staging": "128MiB"}},
    }
    strict = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    return [
        server.System(f"stock-{page}", pool),
        *(
            server.System(
                f"{name}-{page}",
                (*pool, *server.extension(config)),
                strict,
            )
            for name, config in configs.items()
        ),
    ]


def _compare(
    report: Report, page: int, servers: Sequence[server.Server], held: Sequence[Conversation]
) -> None:
    differing = {each.system.name: 0 for each in servers[1:]}
    largest = dict.fromkeys(differing, 0.0)
    hits = dict.fromkeys(differing, 0)
    for turn in steps(range(len(held[0].prompts)), "turns"):
        # The order alternates: a small tier is first asked for the KV that it still holds.
        for conversation in held[:: -1 if turn % 2 else 1]:
            expected, *found = (_answer(each, conversation.prompts[turn]) for each in servers)
            for name, answer in zip(differing, found, strict=True):
                differing[name] += answer["output_ids"] != expected["output_ids"]
                largest[name] = max(largest[name], _difference(answer, expected))
                details = answer["meta_info"].get("cached_tokens_details") or {}
                hits[name] += sum(count for tier, count in details.items() if tier != "device")
    for name in differing:
        report.runs.append(
            {
                "system": name,
                "answers": len(held) * len(held[0].prompts),
                "that differ": differing[name],
                "largest logprob difference": largest[name],
                "prompt tokens from tiers": hits[name],
            }
        )
    report.figures[f"differing_answers_page_{page}"] = sum(differing.values())
    report.figures[f"largest_logprob_difference_page_{page}"] = max(largest.values())
    report.figures[f"tokens_from_tiers_page_{page}"] = min(hits.values())


def _answer(running: server.Server, prompt: Sequence[int]) -> dict[str, Any]:
    body = {
        "input_ids": prompt,
        "sampling_params": {
            "temperature": 0, "max_new_tokens": _OUTPUT_TOKENS, "ignore_eos": True,
        },
        "return_logprob": True,
    }  # fmt: skip
    response = requests.post(f"{running.url}/generate", json=body, timeout=_DEADLINE_S)
    if not response.ok:
        raise ExtError(f"{running.system.name} answered {response.status_code}: {response.text}")
    answer: dict[str, Any] = response.json()
    return answer


def _difference(answer: dict[str, Any], expected: dict[str, Any]) -> float:
    pairs = zip(
        answer["meta_info"]["output_token_logprobs"],
        expected["meta_info"]["output_token_logprobs"],
        strict=True,
    )
    return max(abs(float(ours[0]) - float(theirs[0])) for ours, theirs in pairs)
