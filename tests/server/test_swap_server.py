"""Tests of priorities on a server: urgent requests preempt others, which keep their answers."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from http_fuzz_kit import bombard

from sgl_ext.bench.data.conversations import conversations
from sgl_ext.serving.server import Server, System, serve

DEADLINE_S = 240.0
_TOKENS = 48


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = {
        "swap": {"capacity": "256MiB", "policy": "static"},
        "tiers": {"host": {"capacity": "256MiB"}},
        "chunks": {"method": "lego-16", "link": "always"},
    }
    arguments = (
        "--max-total-tokens", "1312", "--page-size", "16", "--dtype", "float32",
        "--enable-metrics", "--chunked-prefill-size", "512",
    )  # fmt: skip
    system = System("swap", (*arguments, "--enable-ext", "--ext-config", json.dumps(config)))
    with serve([system], model, tmp_path_factory.mktemp("logs")) as (running,):
        yield running


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    """Returns prompts of which no two fit the KV pool together."""
    return [each.prompts[0] for each in conversations(model, 4, turns=1, tokens=(700, 900))]


class Asked:
    """Concurrent requests to a server, and the order in which they end."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._threads = ThreadPoolExecutor(8)
        self._lock = threading.Lock()
        self.begun = threading.Event()
        """Event that is set when a request has returned its first token."""
        self.ended: list[str] = []

    def ask(self, name: str, prompt: list[int], **more: Any) -> Future[dict[str, Any]]:
        return self._threads.submit(self._ask, name, prompt, more)

    def _ask(self, name: str, prompt: list[int], more: dict[str, Any]) -> dict[str, Any]:
        body = {
            "rid": name,
            "stream": True,
            "input_ids": prompt,
            "sampling_params": {
                "temperature": 0, "max_new_tokens": _TOKENS, "ignore_eos": True,
            },
            **more,
        }  # fmt: skip
        found: dict[str, Any] = {}
        url = f"{self._server.url}/generate"
        with requests.post(url, json=body, stream=True, timeout=DEADLINE_S) as answer:
            for line in answer.iter_lines():
                if line.startswith(b"data: {"):
                    found = json.loads(line.removeprefix(b"data: "))
                    self.begun.set()
        with self._lock:
            self.ended.append(name)
        return found


def load(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = requests.get(f"{server.url}/server_info", timeout=DEADLINE_S).json()
    return found["internal_states"][0]  # type: ignore[no-any-return]


def metrics(server: Server) -> dict[str, float]:
    """Returns the metrics of swapping by their names without the common prefix."""
    found = requests.get(f"{server.url}/metrics", timeout=DEADLINE_S).text
    pattern = r"^sglang_ext:swap_(\w+){[^}]*} (\S+)$"
    return {name: float(value) for name, value in re.findall(pattern, found, re.MULTILINE)}


def give(server: Server, rid: object, priority: object) -> requests.Response:
    body = {"rid": rid, "priority": priority}
    return requests.post(f"{server.url}/ext/swap/priority", json=body, timeout=DEADLINE_S)


def test_preempted_requests_keep_their_answers(server: Server, prompts: list[list[int]]) -> None:
    alone = Asked(server).ask("alone", prompts[0]).result()["output_ids"]
    requests.post(f"{server.url}/flush_cache", timeout=DEADLINE_S)
    asked = Asked(server)
    low = asked.ask("low", prompts[0])
    assert asked.begun.wait(DEADLINE_S)
    high = asked.ask("high", prompts[1], priority=5)
    answers = low.result(), high.result()
    assert asked.ended == ["high", "low"]
    assert answers[0]["output_ids"] == alone
    swap = load(server)["sgl_ext"]["swap"]
    assert swap["swapped_in"] >= 1
    assert swap["recomputed"] == swap["recomputed_tokens"] == 0
    deadline = time.monotonic() + DEADLINE_S
    while (found := metrics(server)).get("swapped_in_total") != swap["swapped_in"]:
        assert time.monotonic() < deadline, found
        time.sleep(0.1)
    assert found["waiting"] == 0
    assert found["busy_seconds_total"] > 0
    assert found["recomputed_total"] == 0


def test_changed_priority_of_a_waiting_request_reorders_requests(
    server: Server, prompts: list[list[int]]
) -> None:
    asked = Asked(server)
    first = asked.ask("first", prompts[0], priority=1)
    assert asked.begun.wait(DEADLINE_S)
    waiting = [asked.ask(f"waiting {at}", prompts[at]) for at in (1, 2)]
    deadline = time.monotonic() + DEADLINE_S
    while not give(server, "waiting 2", 9).ok:  # the scheduler may not have received the request
        assert time.monotonic() < deadline
    for each in (first, *waiting):
        each.result()
    assert asked.ended == ["waiting 2", "first", "waiting 1"]
    found = requests.get(f"{server.url}/metrics", timeout=DEADLINE_S).text
    series = re.findall(r'^sglang:num_running_reqs{.*?priority="([^"]*)"', found, re.MULTILINE)
    # The labels are given priorities, not levels of the policy.
    assert {"", "0"} < set(series) <= {"", "0", "1", "5", "9"}


def test_requests_retracted_by_a_pause_are_not_swapped_out(
    server: Server, prompts: list[list[int]]
) -> None:
    """Checks that a pause leaves no KV to resume from, because the weights may change during it."""
    alone = Asked(server).ask("alone", prompts[0]).result()["output_ids"]
    before = load(server)["sgl_ext"]["swap"]
    asked = Asked(server)
    paused = asked.ask("paused", prompts[0])
    assert asked.begun.wait(DEADLINE_S)
    for route, body in (("pause", {"mode": "retract"}), ("continue", {})):
        url = f"{server.url}/{route}_generation"
        assert requests.post(url, json=body, timeout=DEADLINE_S).ok
    found = paused.result()
    assert found["output_ids"] == alone
    assert found["meta_info"]["num_retractions"] == 1
    after = load(server)["sgl_ext"]["swap"]
    assert after["swapped_out"] == before["swapped_out"]


def test_requests_aborted_during_prefill_do_not_count_as_preempted(
    server: Server, prompts: list[list[int]]
) -> None:
    before = load(server)["sgl_ext"]["swap"]
    prompt = (prompts[2] + prompts[3])[:1025]  # two chunks of the prefill, and one token
    for number, delay in enumerate((0.1, 0.5, 1.5)):
        requests.post(f"{server.url}/flush_cache", timeout=DEADLINE_S)
        asked = Asked(server).ask(f"aborted {number}", prompt)
        time.sleep(delay)
        body = {"rid": f"aborted {number}"}
        requests.post(f"{server.url}/abort_request", json=body, timeout=DEADLINE_S)
        asked.result()
    after = load(server)["sgl_ext"]["swap"]
    assert after["swapped"] == 0
    assert [after[name] - before[name] for name in ("swapped_out", "recomputed")] == [0, 0]


@pytest.mark.parametrize(
    ("rid", "priority", "code"),
    [("nobody", 1, 404), ("x", 1 << 31, 422), ("x", "high", 422), ("", 1, 422), ("x", 1.5, 422)],
)
def test_invalid_priorities_and_unknown_requests_are_refused(
    server: Server, rid: object, priority: object, code: int
) -> None:
    answer = give(server, rid, priority)
    assert answer.status_code == code
    assert "Traceback" not in answer.text


def test_prompts_that_can_never_be_admitted_are_refused(server: Server) -> None:
    """SGLang keeps back one page, and would let all other requests wait behind such a prompt."""
    for tokens, served in ((1295, True), (1296, False), (1306, False)):
        body = {"input_ids": [5] * tokens, "sampling_params": {"max_new_tokens": 4}}
        answer = requests.post(f"{server.url}/generate", json=body, timeout=DEADLINE_S)
        assert answer.ok == served, answer.text
        assert served or "exceeds the KV memory budget" in answer.text


def test_malformed_requests_do_not_affect_server_or_other_clients(server: Server) -> None:
    assert bombard(server, "swap")[400] > 0
