"""Powers together on a faked CUDA device: answers as on the CPU, and copies in order.

Both servers prefill in chunks and overlap their steps, so that the KV of a prompt is stored while a
forward runs. The device's race checker compares copies with the reads and writes of all forwards.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from faked_cuda_kit import (
    SIZE,
    START_S,
    ask,
    entry,
    faults,
    journal,
    on_faked_cuda,
    post,
    same,
    small_llama,
    streamed,
    waits,
)

from sgl_ext.serving.server import Server, System, serve

SERVED = [f"Report {number}: " + f"engine {number} ran on, " * 40 for number in range(6)]
BEAR = "The bear lives in a cave above the river. It sleeps from November to March. " * 7
FOX = "The fox lives under the old oak. It hunts at night, mostly for mice. " * 7
CONFIG = {
    "tiers": {"host": {"capacity": "64MiB"}},
    "restore": {"chunk": 128, "host": "tokens"},
    "swap": {"capacity": "8MiB", "swap_in": "wait"},
    "chunks": {"method": "lego-16", "link": "always"},
}
ARGUMENTS = (
    *SIZE, "--max-total-tokens", "1024", "--chunked-prefill-size", "128", "--page-size", "16",
    "--enable-priority-scheduling", "--enable-ext", "--ext-config", json.dumps(CONFIG),
)  # fmt: skip


@dataclass
class Pair:
    """A server on the CPU and one on the faked device."""

    cpu: Server
    cuda: Server

    def answers(self, prompt: object, tokens: int = 4, **more: Any) -> dict[str, Any]:
        """Returns the device's answer, whose tokens are those of the CPU."""
        expected, found = (ask(server, prompt, tokens, **more) for server in (self.cpu, self.cuda))
        same(found, expected)
        return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("powers_on_faked_cuda")
    systems = [System("on_cpu", ARGUMENTS), on_faked_cuda("on_faked_cuda", folder, *ARGUMENTS)]
    with serve(systems, small_llama(folder / "model", layers=3), folder, deadline=START_S) as (
        cpu,
        cuda,
    ):
        yield Pair(cpu, cuda)
        assert not faults(cuda)


def test_only_steps_that_move_kv_wait_for_the_device(pair: Pair) -> None:
    ask(pair.cuda, "Warm", 1)
    since = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda n: ask(pair.cuda, f"Short prompt {n}", 6), range(3)))
    found = {
        (line["kind"], line["what"], line["places"][0].split(":")[0])
        for line in journal(pair.cuda)
        if line["at"] >= since
    }
    results = "sglang/srt/managers/scheduler_components/batch_result_processor.py"
    assert found == {("sync", "Event.synchronize", results)}


def test_evicted_prefixes_are_computed_and_loaded_at_once(pair: Pair) -> None:
    for prompt in SERVED:
        pair.answers(prompt)
    answers = [pair.answers(prompt) for prompt in SERVED[:3]]
    assert all(entry(answer, "restore") for answer in answers)
    assert any(answer["meta_info"]["cached_tokens_details"]["host"] for answer in answers)


def test_a_preempted_request_goes_on_with_its_kv(pair: Pair) -> None:
    """Tries again if the cost model, on a busy machine, has chosen to compute a request again."""

    loaded = 0
    for number in range(4):
        story = f"Long story {number}: " + "it went on and on. " * 90
        answers = streamed(pair.cuda, story, 24, priority=0)
        next(answers)  # the request decodes from here on, so the urgent one preempts a decode
        ask(pair.cuda, "An urgent question: " + "what now? " * 150, 2, priority=100)
        *_, found = answers
        same(found, ask(pair.cpu, story, 24))
        told = [one for one in found["meta_info"].get("ext") or () if one["power"] == "swap"]
        if loaded := sum(one["loaded"] for one in told):
            break
    assert loaded > 0


def _contexts(server: Server, *texts: str, method: str) -> list[dict[str, str]]:
    found = post(server, "/ext/chunks", {"chunks": texts, "method": method})["contexts"]
    return [{"type": "ext_context", "id": each["id"]} for each in found]


def _linked(server: Server) -> Iterator[dict[str, Any]]:
    """Yields answers to prompts whose chunks are on the device, then in host memory, and others."""
    bear, fox = _contexts(server, BEAR, FOX, method="lego-16")
    yield ask(server, ["Read. ", bear, fox, " What?"])
    yield ask(server, ["Now read again, please. ", fox, bear, " Who?"])
    for number in range(3):
        ask(server, f"{number} " + f"word{number} of many " * 90, 1)  # evicts the chunks
    yield ask(server, ["A third time: ", fox, bear, " Who?"])
    (blended,) = _contexts(server, BEAR + "Or not.", method="blend-20")
    yield ask(server, ["Blend. ", blended, " Who?"])
    (queried,) = _contexts(server, BEAR + "Or so.", method="query-20")
    yield ask(server, ["Query. ", queried, " Who?"])
    primed = _contexts(server, BEAR + "One.", "Two. " + FOX, method="primed+offline-16")
    yield ask(server, ["Primed: ", *reversed(primed), " Who?"])


def test_only_selections_of_linked_tokens_wait_for_the_device(pair: Pair) -> None:
    since = time.monotonic()
    for expected, found in zip(_linked(pair.cpu), _linked(pair.cuda), strict=True):
        same(found, expected)
        report = entry(found, "chunks")
        assert report == entry(expected, "chunks")
        assert report["linked"] > 0
        assert report["missing"] == 0
    selections = {"ChangedValues.select", "blending.<locals>.run", "with_selected"}
    assert waits(pair.cuda, since, "sgl_ext/engine/chunks/") == selections
