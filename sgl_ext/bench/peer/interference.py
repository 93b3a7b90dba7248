"""Slowdown of a worker by traffic over the memory that it has lent (SwiftCache §5.2).

Worker and master run on one core each. The worker answers equal requests in three situations: the
master decodes a long request in the worker's memory, another server on the master's core decodes
it in its own memory, or no other server computes. The figures compare the first two situations,
because the paper's master computes on its own device, whereas here a busy neighbour slows the
worker down whatever memory it reads. The figures ``…_vs_idle`` compare the first with the third.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import requests

from sgl_ext.bench.harness.report import Report
from sgl_ext.bench.peer.servers import COMMON, Lent, pair
from sgl_ext.bench.swap.load import Talk, Turn, run
from sgl_ext.errors import ExtError
from sgl_ext.progress import steps
from sgl_ext.serving.http import forget
from sgl_ext.serving.server import Server, System

_MASTER_CORE, _WORKER_CORE = 0, 1
_PROMPT, _ANSWER, _REQUESTS = 512, 32, 6
_LONG, _MANY = 3000, 2000
"""Tokens of the master's prompt, and of its answer, which is aborted."""
_DEADLINE_S = 600.0
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def report_interference(report: Report, setup: Lent, rounds: int, logs: Path) -> None:
    """Adds the worker's TTFT and TPOT in each situation and their ratios to the report."""
    own = System(
        "own",
        (*COMMON, "--max-total-tokens", str(setup.local + setup.borrowed), "--enable-ext"),
        _ONE_THREAD,
    )
    environments = {"master": _ONE_THREAD, "worker": _ONE_THREAD}
    with pair(setup, logs, own=8192, beside=(own,), environments=environments) as servers:
        master, worker, local = servers
        for server, core in ((master, _MASTER_CORE), (local, _MASTER_CORE), (worker, _WORKER_CORE)):
            _pin(server, core)
        situations = {"lent": master, "own": local, "idle": None}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in situations}
        for round_ in steps(range(rounds + 1), "rounds of interference"):
            for name in list(situations)[round_ % 3 :] + list(situations)[: round_ % 3]:
                forget(worker.url)
                with _busy(situations[name], round_):
                    times = _ask(worker, f"{round_}/{name}")
                if round_:  # the first round is a warm-up
                    found[name] += times
    for name, times in found.items():
        report.runs.append(
            {
                "what": "interference",
                "master": name,
                "samples": len(times),
                "ttft_ms_p50": 1e3 * statistics.median(ttft for ttft, _ in times),
                "tpot_ms_p50": 1e3 * statistics.median(tpot for _, tpot in times),
            }
        )
    for at, figure in enumerate(("worker_ttft_slowdown", "worker_tpot_slowdown")):
        median = {name: statistics.median(each[at] for each in found[name]) for name in found}
        report.figures[figure] = median["lent"] / median["own"]
        report.figures[f"{figure}_vs_idle"] = median["lent"] / median["idle"]


def _ask(worker: Server, seed: str) -> Sequence[tuple[float, float]]:
    """Returns TTFT and TPOT of each request, in seconds.

    Raises:
        ExtError: a part of a new prompt was cached.
    """
    chance = random.Random(seed)  # noqa: S311
    found = []
    for at in range(_REQUESTS):
        prompt = tuple(chance.randrange(1000, 40_000) for _ in range(_PROMPT))
        # Times of tokens, not of text: an untrained model may give incomplete characters for long.
        (heard,) = run(worker.url, [Talk(f"{seed}/{at}", 0.0, (Turn(prompt, _ANSWER),))])
        if heard.cached:
            raise ExtError(f"{worker.url} found {heard.cached} tokens of a new prompt in its cache")
        each = (heard.times[-1] - heard.times[0]) / (_ANSWER - 1)
        found.append((heard.ttft, each))
    return found


@contextmanager
def _busy(server: Server | None, seed: int) -> Iterator[None]:
    """Has a server decode a long request within the context; without a server, does nothing.

    Raises:
        ExtError: the request does not begin, or ends before the context does.
    """
    if server is None:
        yield
        return
    chance = random.Random(seed)  # noqa: S311
    begun, over = threading.Event(), threading.Event()
    prompt = [chance.randrange(1000, 40_000) for _ in range(_LONG)]

    def decode() -> None:
        body = {
            "input_ids": prompt,
            "stream": True,
            "sampling_params": {"max_new_tokens": _MANY, "ignore_eos": True, "temperature": 0},
        }
        with requests.post(
            f"{server.url}/generate", json=body, stream=True, timeout=_DEADLINE_S
        ) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith(b'data: {"text"'):
                    begun.set()
                if over.is_set():
                    return

    thread = threading.Thread(target=decode)
    thread.start()
    try:
        end = time.monotonic() + _DEADLINE_S
        while not begun.wait(1.0):
            if not thread.is_alive() or time.monotonic() > end:
                raise ExtError(f"{server.url} did not begin to answer")
        yield
        if not thread.is_alive():
            raise ExtError(f"{server.url} ended its answer before the worker was measured")
    finally:
        over.set()
        thread.join()
        requests.post(f"{server.url}/abort_request", json={"abort_all": True}, timeout=_DEADLINE_S)


def _pin(server: Server, core: int) -> None:
    process = psutil.Process(server.process.pid)
    for each in (process, *process.children(recursive=True)):
        for thread in each.threads():
            psutil.Process(thread.id).cpu_affinity([core])
