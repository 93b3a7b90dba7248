"""SGLang's CUDA paths and the extension's, on a faked device: see ``tests/faked_cuda``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from faked_cuda_kit import SIZE, START_S, journal, on_faked_cuda, small_llama

from sgl_ext.serving.server import Server, System, serve

PROMPTS = (
    "x",
    "The capital of France is",
    "Once upon a time there was an engine that " + "ran and ran, " * 20,
    "Once upon a time there was an engine that " + "ran and ran, " * 20 + "until",
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """A server on the CPU and one on the faked device, both with the extension."""
    folder = tmp_path_factory.mktemp("faked_cuda")
    systems = [
        System("on_cpu", (*SIZE, "--enable-ext")),
        on_faked_cuda("on_faked_cuda", folder, "--enable-ext"),
    ]
    with serve(systems, small_llama(folder / "model"), folder, deadline=START_S) as (cpu, cuda):
        yield cpu, cuda


def _answer(server: Server, prompt: str) -> dict[str, Any]:
    parameters = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    body = {"text": prompt, "sampling_params": parameters, "return_logprob": True}
    answer: dict[str, Any] = requests.post(f"{server.url}/generate", json=body, timeout=120).json()
    return answer


def test_tokens_on_the_faked_device_are_those_of_the_cpu(servers: tuple[Server, Server]) -> None:
    cpu, cuda = servers
    assert requests.get(f"{cuda.url}/server_info", timeout=30).json()["device"] == "cuda"
    for prompt in PROMPTS:
        expected, found = _answer(cpu, prompt), _answer(cuda, prompt)
        assert found["output_ids"] == expected["output_ids"]
        assert found["meta_info"]["cached_tokens"] == expected["meta_info"]["cached_tokens"]
        logprobs = [
            [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
            for answer in (found, expected)
        ]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)


def test_steps_wait_for_the_device_only_for_the_results_of_the_previous_step(
    servers: tuple[Server, Server],
) -> None:
    cuda = servers[1]
    since = time.monotonic()
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(pool.map(lambda prompt: _answer(cuda, prompt), PROMPTS))
    assert all(len(answer["output_ids"]) == 8 for answer in answers)
    waits = {
        (line["kind"], line["what"], line["places"][0].split(":")[0])
        for line in journal(cuda)
        if line["at"] >= since
    }
    results = "sglang/srt/managers/scheduler_components/batch_result_processor.py"
    assert waits == {("sync", "Event.synchronize", results)}
