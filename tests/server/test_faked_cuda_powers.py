"""Powers on a faked CUDA device: answers as on the CPU, and copies in order with the forwards.

Both servers prefill in chunks and overlap their steps, so that the KV of a prompt is stored while a
forward runs. The device's race checker compares copies with the reads and writes of all forwards.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from faked_cuda_kit import SIZE, journal, on_faked_cuda, small_llama

from sgl_ext.serving.server import Server, System, serve

DEADLINE_S = 240.0
CONFIG = {
    "tiers": {"host": {"capacity": "32MiB"}},
    "restore": {"chunk": 128, "host": "tokens"},
    "swap": {"capacity": "8MiB", "swap_in": "wait"},
    "chunks": {},
}
ARGUMENTS = (
    *SIZE, "--max-total-tokens", "1024", "--chunked-prefill-size", "128", "--page-size", "16",
    "--enable-priority-scheduling", "--enable-ext", "--ext-config", json.dumps(CONFIG),
)  # fmt: skip
SERVED = [f"Report {number}: " + f"engine {number} ran on, " * 40 for number in range(6)]


class Pair:
    """A server on the CPU and one on the faked device."""

    def __init__(self, cpu: Server, cuda: Server) -> None:
        self.cpu, self.cuda = cpu, cuda

    def answers(self, text: object, tokens: int = 4, **more: Any) -> dict[str, Any]:
        """Returns the device's answer, whose tokens are those of the CPU."""
        expected, found = (_answer(server, text, tokens, **more) for server in self)
        assert found["output_ids"] == expected["output_ids"]
        return found

    def __iter__(self) -> Iterator[Server]:
        return iter((self.cpu, self.cuda))


def _answer(server: Server, text: object, tokens: int, **more: Any) -> dict[str, Any]:
    parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"text": text, "sampling_params": parameters, **more}
    answer = requests.post(f"{server.url}/generate", json=body, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def _entries(answer: dict[str, Any]) -> dict[str, Any]:
    return {entry["power"]: entry for entry in answer["meta_info"].get("ext") or ()}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("faked_cuda_powers")
    systems = [System("on_cpu", ARGUMENTS), on_faked_cuda("on_faked_cuda", folder, *ARGUMENTS)]
    with serve(systems, small_llama(folder / "model"), folder) as (cpu, cuda):
        yield Pair(cpu, cuda)
        faults = [line["what"] for line in journal(cuda) if line["kind"] in ("race", "refused")]
        assert not faults


def test_evicted_prefixes_are_computed_and_loaded_at_once(pair: Pair) -> None:
    for prompt in SERVED:
        pair.answers(prompt)
    answers = [pair.answers(prompt) for prompt in SERVED[:3]]
    assert all("restore" in _entries(answer) for answer in answers)
    assert any(answer["meta_info"]["cached_tokens_details"]["host"] for answer in answers)


def test_a_preempted_request_goes_on_with_its_kv(pair: Pair) -> None:
    story = "A long story: " + "it went on and on. " * 90

    def preempted(pool: ThreadPoolExecutor) -> dict[str, Any]:
        running = pool.submit(_answer, pair.cuda, story, 48, priority=0)
        for _ in range(4):
            if running.done():
                break
            time.sleep(1)
            _answer(pair.cuda, "An urgent question: " + "what now? " * 150, 2, priority=100)
        return running.result()

    with ThreadPoolExecutor(1) as pool:
        found = preempted(pool)
    assert found["output_ids"] == _answer(pair.cpu, story, 48)["output_ids"]
    assert _entries(found)["swap"]["loaded"] > 0


def test_only_steps_that_move_kv_wait_for_the_device(pair: Pair) -> None:
    _answer(pair.cuda, "Warm", 1)
    since = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda n: _answer(pair.cuda, f"Short prompt {n}", 6), range(3)))
    waits = {
        (line["kind"], line["what"], line["places"][0].split(":")[0])
        for line in journal(pair.cuda)
        if line["at"] >= since
    }
    results = "sglang/srt/managers/scheduler_components/batch_result_processor.py"
    assert waits == {("sync", "Event.synchronize", results)}
