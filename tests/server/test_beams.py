"""Tests of beam groups beside preempted requests, in few rows and little memory, and of a pause."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from sgl_ext.bench.data.conversations import conversations
from sgl_ext.serving.server import Server, System, serve

DEADLINE_S = 240.0
_CONFIG = {
    "swap": {"capacity": "64MiB", "policy": "static"}, "tiers": {"host": {"capacity": "64MiB"}},
}  # fmt: skip


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # SGLang's beam search requires pages of one token. Six rows are few for groups of three beams.
    arguments = (
        "--max-total-tokens", "1024", "--page-size", "1", "--dtype", "float32",
        "--max-running-requests", "6", "--chunked-prefill-size", "256",
        "--enable-ext", "--ext-config", json.dumps(_CONFIG),
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("logs")
    with serve([System("beams", arguments)], model, folder) as (running,):
        yield running


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    return [each.prompts[0] for each in conversations(model, 6, turns=1, tokens=(100, 300))]


def ask(server: Server, prompt: list[int], beams: int, priority: int, tokens: int = 32) -> Any:
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    if beams:
        params |= {"beam_width": beams, "n": 2}
    body = {"input_ids": prompt, "sampling_params": params, "priority": priority}
    return requests.post(f"{server.url}/generate", json=body, timeout=DEADLINE_S)


def told(answer: requests.Response) -> list[list[int]]:
    assert answer.ok, answer.text
    found = answer.json()
    return [each["output_ids"] for each in (found if isinstance(found, list) else [found])]


def state(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = requests.get(f"{server.url}/server_info", timeout=DEADLINE_S).json()
    return found["internal_states"][0]["sgl_ext"]["swap"]  # type: ignore[no-any-return]


def nothing_is_held(server: Server) -> bool:
    url = f"{server.url}/flush_cache"
    return requests.post(url, timeout=DEADLINE_S).ok


def test_beam_groups_and_preempted_requests_keep_their_answers(
    server: Server, prompts: list[list[int]]
) -> None:
    asked = [(prompt, beams) for prompt in prompts for beams in (0, 3)]
    alone = [told(ask(server, prompt, beams, 0)) for prompt, beams in asked]
    before = state(server)["swapped_out"]
    for _ in range(10):  # on a slow machine, requests may arrive too late to preempt each other
        with ThreadPoolExecutor(10) as threads:
            answers = threads.map(
                lambda at: told(ask(server, *asked[at], priority=at % 4)), range(len(asked))
            )
            assert list(answers) == alone
        if state(server)["swapped_out"] > before:
            break
    assert state(server)["swapped_out"] > before
    assert nothing_is_held(server)


def test_a_pause_aborts_beam_groups_and_retracts_other_requests(
    server: Server, prompts: list[list[int]]
) -> None:
    alone = told(ask(server, prompts[0], 0, 0, tokens=200))
    group_alone = told(ask(server, prompts[1], 3, 1))
    with ThreadPoolExecutor(2) as threads:
        plain = threads.submit(ask, server, prompts[0], 0, 1, 200)
        group = threads.submit(ask, server, prompts[1], 3, 1, 200)
        url = f"{server.url}/v1/loads?include=core"
        deadline = time.monotonic() + DEADLINE_S
        while requests.get(url, timeout=60).json()["loads"][0]["num_running_reqs"] < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for route, body in (("pause", {"mode": "retract"}), ("continue", {})):
            assert requests.post(f"{server.url}/{route}_generation", json=body, timeout=60).ok
        assert told(plain.result()) == alone
        ended = group.result()
    assert ended.status_code == 503, ended.text
    assert "Beam groups cannot be retracted" in ended.text
    assert told(ask(server, prompts[1], 3, 1)) == group_alone
    assert nothing_is_held(server)
