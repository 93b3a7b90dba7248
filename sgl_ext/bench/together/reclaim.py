"""Prompt tokens that a worker recomputes when it has lent its memory and reclaims it.

A worker answers the first turns of conversations, is then idle, and lends its memory to a master
that starts. Its cached KV leaves the lent blocks. The next turns reclaim the memory. Their prompts
begin with what the worker had cached; what of it is not found again is recomputed. Host memory
holds a part of the worker's KV only, and pages used once are not on the SSD (``keep_after`` of 2),
so that tiers alone do not have all of it when the memory is lent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import requests

from sgl_ext.bench.data.conversations import Conversation, conversations
from sgl_ext.bench.harness.report import Report
from sgl_ext.bench.peer.servers import COMMON, PAGE, WORKER_TOKEN_BYTES, peer
from sgl_ext.bench.together.systems import ENVIRONMENT, extended
from sgl_ext.errors import ExtError
from sgl_ext.models import SMOLLM2, shortened, untrained
from sgl_ext.serving.http import live, wait_until_stored
from sgl_ext.serving.server import Server, System, serve

WITH, WITHOUT = "with tiers", "without tiers"
_LAYERS = 6
_OWN, _KEPT = 512, 128
"""Tokens of the master's own memory; tokens that the worker never lends."""
_TOKENS = (600, 1400)
"""Tokens of the prompts."""
_HOST_SHARE = 0.25
"""Host memory of the worker, relative to its device pool."""
_LEND_DEADLINE_S = 60.0
_DEADLINE_S = 300.0


def report_reclaim(report: Report, out: Path, *, quick: bool) -> None:
    """Adds the recomputed tokens of both workers and their ratio."""
    held = conversations(untrained(), 4 if quick else 12, turns=2, tokens=_TOKENS)
    recomputed: dict[str, int] = {}
    for name in (WITH, WITHOUT):
        model, logs = shortened(SMOLLM2, _LAYERS), out / "logs" / "reclaim" / name.replace(" ", "-")
        with (
            _systems(name, held, out) as (lender, borrower),
            serve([lender], model, logs) as served,
        ):
            (worker,) = served
            for conversation in held:
                _ask(worker, conversation.prompts[0])
            cached = sum(_known(conversation) for conversation in held)
            if name == WITH:
                wait_until_stored(worker.url)
            with serve([borrower], model, logs) as (master,):
                lent = _wait_until_lent(master, worker)
                found = [_ask(worker, conversation.prompts[1]) for conversation in held]
                state = live(worker.url)["peer"]
        recomputed[name] = sum(
            max(_known(conversation) - tokens, 0)
            for conversation, tokens in zip(held, found, strict=True)
        )
        report.runs.append(
            {
                "what": "reclaim",
                "system": name,
                "conversations": len(held),
                "cached_before": cached,
                "lent_bytes": lent,
                "reclaimed_bytes": state["reclaimed"],
                "recomputed_tokens": recomputed[name],
            }
        )
    if not recomputed[WITHOUT]:
        raise ExtError("the worker without tiers recomputed nothing, so no cached KV was lent")
    report.figures["reclaim_tokens_recomputed_ratio"] = recomputed[WITH] / recomputed[WITHOUT]


def _known(conversation: Conversation) -> int:
    """Returns the tokens of whole pages that the second prompt shares with the first."""
    first, second = conversation.prompts
    same = next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first)
    )
    return same // PAGE * PAGE


@contextmanager
def _systems(name: str, held: Sequence[Conversation], out: Path) -> Iterator[tuple[System, System]]:
    """Yields a worker, whose pool holds the first turns of all conversations, and a master."""
    pool = sum(len(each.prompts[0]) + 2 * PAGE for each in held) // PAGE * PAGE + 1024
    with (
        TemporaryDirectory(prefix="sgl_ext-p-") as sockets,
        TemporaryDirectory(dir=out, prefix="reclaim-") as ssd,
    ):
        patient = {"deadline": "60s", "lease": "60s"}
        lendable = f"{pool * WORKER_TOKEN_BYTES}B"
        worker: dict[str, Any] = {
            "peer": {
                "role": "worker", "directory": sockets, "window": "1s", "keep": _KEPT, **patient,
            }
        }  # fmt: skip
        if name == WITH:
            host = f"{int(_HOST_SHARE * pool * WORKER_TOKEN_BYTES)}B"
            worker["tiers"] = {
                "host": {"capacity": host},
                "ssd": {"directories": [ssd], "capacity": "2GiB"},
            }
        yield (
            extended(
                "worker",
                (*COMMON, "--model-path", str(untrained()), "--max-total-tokens", str(pool)),
                worker,
            ),
            System(
                "master",
                (
                    *COMMON, "--max-total-tokens", str(_OWN),
                    *peer("master", Path(sockets), capacity=lendable, **patient),
                ),
                ENVIRONMENT,
            ),
        )  # fmt: skip


def _wait_until_lent(master: Server, worker: Server) -> int:
    """Waits until the worker has lent nearly all of its memory; returns the lent bytes.

    Raises:
        ExtError: it has not within a minute.
    """
    give_up = time.monotonic() + _LEND_DEADLINE_S
    while time.monotonic() < give_up:
        state: Mapping[str, Any] = live(worker.url)["peer"]
        borrowed = live(master.url)["peer"]["borrowed_bytes"]
        if state["lent_bytes"] and borrowed >= 0.9 * state["lent_bytes"] >= (
            0.7 * state["lendable_bytes"]
        ):
            return int(state["lent_bytes"])
        time.sleep(0.1)
    raise ExtError(f"the worker has lent {state}, and the master has {borrowed} B of it")


def _ask(worker: Server, prompt: Sequence[int]) -> int:
    """Sends a prompt to the worker; returns the tokens of it that were not computed.

    Raises:
        ExtError: the worker refused it.
    """
    body = {"input_ids": [*prompt], "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    answer = requests.post(f"{worker.url}/generate", json=body, timeout=_DEADLINE_S)
    if not answer.ok:
        raise ExtError(f"{worker.url} answered {answer.status_code}: {answer.text[:300]}")
    return int(answer.json()["meta_info"]["cached_tokens"])
