"""Tests of a master whose requests run in the memory of two workers that serve another model.

The master returns the answers of a large server, also when a worker reclaims memory or is killed.
``SGLEXT_STREAMS=direct,layer,layers`` runs all tests with each way of reading borrowed memory,
which takes ten minutes each.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from sgl_ext.bench.data.conversations import conversations
from sgl_ext.bench.peer.servers import COMMON, peer, worker_tokens
from sgl_ext.models import untrained
from sgl_ext.serving.http import live
from sgl_ext.serving.server import Server, System, serve

DEADLINE_S = 480.0
LOCAL, BORROWED, OTHER = 512, 2048, 1024
"""Tokens of the master that fit its own memory and the memory that each worker lends."""
ALL = BORROWED + OTHER
TOKEN_BYTES = 6 * 2 * 3 * 64 * 4
"""KV bytes of a token of the master's model, in float32."""


@dataclass
class Pair:
    """A master, its workers, and a large server of the master's model without any."""

    large: Server
    master: Server
    worker: Server
    other: Server
    """Second worker, whose KV has another dtype."""

    def answers(self, server: Server, prompts: list[list[int]], tokens: int = 8) -> list[Any]:
        """Returns the output ids and logprobs of each prompt; all prompts are sent at once."""

        def ask(prompt: list[int]) -> Any:
            body = {
                "input_ids": prompt,
                "return_logprob": True,
                "sampling_params": {
                    "temperature": 0, "max_new_tokens": tokens, "ignore_eos": True,
                },
            }  # fmt: skip
            found = requests.post(f"{server.url}/generate", json=body, timeout=DEADLINE_S)
            assert found.ok, found.text
            answer = found.json()
            logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
            return answer["output_ids"], logprobs

        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(ask, prompts))

    def same(self, prompts: list[list[int]]) -> None:
        """Asserts that the large server and the master return equal answers to all prompts."""
        expected = self.answers(self.large, prompts)
        found = self.answers(self.master, prompts)
        for (ids, logprobs), (our_ids, our_logprobs) in zip(expected, found, strict=True):
            assert our_ids == ids
            assert our_logprobs == pytest.approx(logprobs, abs=1e-3)


def borrowed(master: Server) -> int:
    """Returns the tokens that fit the memory that the master has borrowed."""
    return int(live(master.url)["peer"]["borrowed_bytes"]) // TOKEN_BYTES


def kill(server: Server) -> None:
    for process in [*server.process.children(recursive=True), server.process]:
        process.send_signal(signal.SIGKILL)


def until(what: str, condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.1)


@pytest.fixture(scope="module")
def worker_systems(tmp_path_factory: pytest.TempPathFactory) -> list[System]:
    directory = tmp_path_factory.mktemp("peers")
    directory.chmod(0o700)

    def worker(name: str, lent: int, *more: str, times: int = 1) -> System:
        tokens = times * worker_tokens(lent + 512, 0, TOKEN_BYTES)
        capacity = f"{lent * TOKEN_BYTES}B"
        ours = peer("worker", directory, window="1s", deadline="20s", capacity=capacity)
        arguments = ("--model-path", str(untrained()), "--max-total-tokens", str(tokens), *COMMON)
        return System(name, (*arguments, *more, "--enable-metrics", *ours))

    return [
        worker("worker", BORROWED),
        worker("other worker", OTHER, "--dtype", "bfloat16", times=2),  # half as many bytes
    ]


@pytest.fixture(scope="module", params=os.environ.get("SGLEXT_STREAMS", "direct").split(","))
def pair(
    request: pytest.FixtureRequest,
    worker_systems: list[System],
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    directory = json.loads(worker_systems[0].arguments[-1])["peer"]["directory"]
    capacity = f"{ALL * TOKEN_BYTES}B"
    # The restart of a worker takes minutes on a busy machine.
    patient = {"deadline": "300s", "lease": "60s"}
    ours = peer("master", directory, capacity=capacity, stream=request.param, **patient)
    ours += ("--enable-metrics",)
    systems = [
        System("large", ("--max-total-tokens", "4096", *COMMON)),
        System("master", ("--max-total-tokens", str(LOCAL), *COMMON, *ours)),
        *worker_systems,
    ]
    with serve(systems, model, tmp_path_factory.mktemp("logs")) as servers:
        pair = Pair(*servers)
        until("the workers do not lend", lambda: borrowed(pair.master) >= 0.9 * ALL)
        yield pair


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    """Returns a prompt that fits the master's own memory, and others that do not."""
    short, *long = [each.prompts[0] for each in conversations(model, 4, turns=1, tokens=(700, 900))]
    return [short[:400], *long]


def test_master_returns_the_answers_of_a_large_server(pair: Pair, prompts: list[list[int]]) -> None:
    for prompt in prompts[:2]:
        pair.same([prompt])
    pair.same(prompts)
    longer = [prompt + [1] * 40 for prompt in prompts]
    pair.same(longer)  # the master has cached the prompts that these extend
    workers = live(pair.master.url)["peer"]["workers"]
    assert len(workers) == 2
    assert all(each["used_bytes"] for each in workers)


def metric(server: Server, name: str) -> float:
    text = requests.get(f"{server.url}/metrics", timeout=DEADLINE_S).text
    (line,) = (one for one in text.splitlines() if one.startswith(f"sglang_ext:peer_{name}{{"))
    return float(line.rsplit(" ", 1)[1])


def test_metrics_report_lent_and_borrowed_bytes(pair: Pair) -> None:
    lent, other = (live(each.url)["peer"]["used_bytes"] for each in (pair.worker, pair.other))
    until("the worker's metrics", lambda: metric(pair.worker, "used_bytes") == lent)
    until("the master's metrics", lambda: metric(pair.master, "borrowed_bytes") == lent + other)
    assert metric(pair.worker, "granted_bytes_total") >= lent


def test_worker_reclaims_memory_under_load_and_lends_it_again(
    pair: Pair, prompts: list[list[int]]
) -> None:
    chance = random.Random(0)  # noqa: S311
    stop = threading.Event()

    def storm() -> None:
        while not stop.is_set():
            tokens = [chance.randrange(40_000) for _ in range(chance.randrange(50, 800))]
            sampling = {"max_new_tokens": 40, "ignore_eos": True}
            body = {"input_ids": tokens, "sampling_params": sampling}
            found = requests.post(f"{pair.worker.url}/generate", json=body, timeout=DEADLINE_S)
            assert found.ok, found.text
            assert found.json()["meta_info"]["completion_tokens"] == 40
            time.sleep(chance.random())

    with ThreadPoolExecutor(2) as threads:
        storms = [threads.submit(storm) for _ in range(2)]
        try:
            for round_ in range(2):
                pair.same([[round_, *prompt] for prompt in prompts[:2]])
        finally:
            stop.set()
        for each in storms:
            each.result()
    found = live(pair.worker.url)["peer"]
    assert found["reclaimed"] > 0
    until("nothing is lent again", lambda: borrowed(pair.master) >= 0.9 * ALL)


def test_requests_of_the_master_go_on_in_the_memory_of_the_other_worker(
    pair: Pair, prompts: list[list[int]]
) -> None:
    tokens = 120  # so many that the worker is killed before the end
    expected = pair.answers(pair.large, prompts, tokens)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(pair.answers, pair.master, prompts, tokens)
        time.sleep(0.5)
        kill(pair.other)
        for (ids, _), (our_ids, _) in zip(expected, asked.result(), strict=True):
            assert our_ids == ids
    until("the dead worker's memory is used", lambda: borrowed(pair.master) <= BORROWED)
    pair.same(prompts)


def test_requests_of_the_master_survive_a_killed_worker(
    pair: Pair, worker_systems: list[System], prompts: list[list[int]], tmp_path: Path
) -> None:
    tokens = 120  # so many that the worker is killed before the end
    expected = pair.answers(pair.large, prompts, tokens)
    with ThreadPoolExecutor(1) as threads, ExitStack() as stack:
        asked = threads.submit(pair.answers, pair.master, prompts, tokens)
        time.sleep(0.5)
        kill(pair.worker)
        until("the dead worker's memory is used", lambda: borrowed(pair.master) == 0)
        pair.same(prompts[:1])  # needs no borrowed memory
        # The other requests wait until a worker lends memory, and then restart.
        (pair.worker,) = stack.enter_context(serve(worker_systems[:1], untrained(), tmp_path))
        for (ids, _), (our_ids, _) in zip(expected, asked.result(), strict=True):
            assert our_ids == ids
        until("nothing is lent again", lambda: borrowed(pair.master) >= 0.9 * BORROWED)
        pair.same(prompts)


def test_memory_of_a_killed_worker_is_unmapped(pair: Pair) -> None:
    master = psutil.Process(pair.master.process.pid)
    schedulers = [p for p in master.children(recursive=True) if "scheduler" in p.name()]
    (scheduler,) = schedulers
    maps = Path(f"/proc/{scheduler.pid}/maps").read_text()
    assert maps.count("memfd:sgl_ext-kv") <= 2  # the master's own and, at most, one worker's
