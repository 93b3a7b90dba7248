"""Tests of a server with the extension: its log, its reports, its examples, and greedy output."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from conftest import POOL, ROOT

from sgl_ext.bench.data.texts import sharegpt_prompts
from sgl_ext.engine.core.hooks import installed_sglang
from sgl_ext.engine.cpu.platform import computes_bfloat16
from sgl_ext.serving.server import Server, System, serve


def test_the_curl_command_of_the_log_returns_an_answer(extension: Server) -> None:
    command = re.search(r"^curl .*$", extension.log.read_text(), re.MULTILINE)
    assert command is not None
    answer = subprocess.run(
        shlex.split(command[0]), capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert "Paris" in answer


def test_the_log_has_one_activation_line(extension: Server) -> None:
    lines = re.findall(r"sgl_ext 0\.1\.0 active on .*", extension.log.read_text())
    assert lines == [
        f"sgl_ext 0.1.0 active on SGLang {installed_sglang()}, platform NativeCpuPlatform: "
        "block-major KV, 16385 blocks of 1 token; "
        "sections on: none; off: tiers, chunks, restore, swap, peer, clusters"
    ]


def test_server_info_shows_version_and_configuration(extension: Server) -> None:
    info = requests.get(f"{extension.url}/server_info", timeout=30).json()
    assert info["sgl_ext"]["version"] == "0.1.0"
    assert info["sgl_ext"]["config"] == {
        "start_deadline": "1800s",
        "memory": {"layout": "auto", "first_group": 1000},
    }
    memory = info["sgl_ext"]["memory"]
    assert memory.pop("fingerprint")
    halves = computes_bfloat16()
    assert memory == {
        "layout": "block_major",
        "blocks": 16385,
        "page": 1,
        "block_bytes": 30 * 2 * 3 * 64 * (2 if halves else 4),
        "on_device": False,
        "layers": 30,
        "kv_heads": 3,
        "head_dim": 64,
        "dtype": "bfloat16" if halves else "float32",
    }


_ASKED: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a"},
    "/v1/completions": {"model": "m", "prompt": "a"},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "a"}]},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", _ASKED)
def test_parameters_of_a_disabled_section_get_404_on_every_route(
    extension: Server, route: str, stream: bool
) -> None:
    params = {"custom_params": {"ext_stored": {"id": "stx-a"}}}
    more = {"sampling_params": params} if route == "/generate" else params
    body = {**_ASKED[route], **more, "stream": stream}
    answer = requests.post(extension.url + route, json=body, timeout=60)
    assert "requires the section clusters" in answer.text
    # /generate sends the status of a stream before it reads the request.
    assert answer.status_code == (200 if (route, stream) == ("/generate", True) else 404)


def test_an_abort_spares_requests_whose_ids_begin_with_the_id(extension: Server) -> None:
    body = {"text": "a", "sampling_params": {"max_new_tokens": 60, "ignore_eos": True}}
    ended: dict[str, Any] = {}
    lines: dict[str, Iterator[bytes]] = {}
    for rid in ("job-1", "job-10"):
        answer = requests.post(
            f"{extension.url}/generate",
            json={**body, "rid": rid, "stream": True},
            timeout=60,
            stream=True,
        )
        lines[rid] = answer.iter_lines()
        next(lines[rid])
    requests.post(f"{extension.url}/abort_request", json={"rid": "job-1"}, timeout=60)
    for rid, each in lines.items():
        *_, last = (line for line in each if line.startswith(b"data: {"))
        ended[rid] = json.loads(last.removeprefix(b"data: "))["meta_info"]["finish_reason"]["type"]
    assert ended == {"job-1": "abort", "job-10": "length"}


def test_only_health_checks_have_their_ids(extension: Server) -> None:
    body = {**_ASKED["/generate"], "rid": "HEALTH_CHECK_a"}
    answer = requests.post(f"{extension.url}/generate", json=body, timeout=60)
    assert answer.status_code == 400
    assert "is reserved for health checks" in answer.text
    assert requests.get(f"{extension.url}/health_generate", timeout=60).ok


def _greedy(server: Server, prompts: list[str]) -> list[dict[str, Any]]:
    # KV that another test left in the cache would change which tokens are computed together.
    requests.post(f"{server.url}/flush_cache", timeout=30).raise_for_status()
    answers = []
    for prompt in prompts:  # one at a time, because batching changes the rounding of sums
        body = {
            "text": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
            "return_logprob": True,
        }
        answer = requests.post(f"{server.url}/generate", json=body, timeout=120).json()
        logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        answers.append({"ids": answer["output_ids"], "logprobs": logprobs})
    return answers


def test_greedy_output_equals_stock(stock: Server, model: Path, logs: Path) -> None:
    prompts = sharegpt_prompts(50, characters=(40, 2000))
    assert len(prompts) == 50
    with serve([System("extended", (*POOL, "--enable-ext"))], model, logs) as (extended,):
        ours, theirs = _greedy(extended, prompts), _greedy(stock, prompts)
    assert sum(len(answer["ids"]) for answer in ours) == 50 * 8
    assert ours == theirs


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        ("chat.py", ["Paris", "Rome"]),
        ("stream.py", ["red"]),
        ("frontend.py", ["country: ", "river: ", "France"]),
    ],
)
def test_examples_print_the_expected_words(
    extension: Server, example: str, expected: list[str]
) -> None:
    output = _run_example(example, "--url", extension.url)
    for word in expected:
        assert word.lower() in output.lower()


def test_the_offline_example_prints_an_answer_and_the_version() -> None:
    output = _run_example("offline.py")  # a real program: no process of it is forked
    assert "The capital of France is Paris" in output
    assert "active: 0.1.0" in output


def _run_example(name: str, *arguments: str) -> str:
    path: Path = ROOT / "examples" / name
    result = subprocess.run(
        [sys.executable, str(path), *arguments],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout
