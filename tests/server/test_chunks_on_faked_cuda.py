"""Linked chunks on a faked CUDA device: answers are those of the CPU, and steps do not wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from faked_cuda_kit import SIZE, journal, on_faked_cuda, small_llama

from sgl_ext.serving.server import Server, System, serve

ARGUMENTS = (
    "--enable-ext", "--page-size", "16", "--max-total-tokens", "1280",
    "--ext-config", '{"chunks": {"method": "lego-16"}, "tiers": {"host": {"capacity": "64MiB"}}}',
)  # fmt: skip
BEAR = "The bear lives in a cave above the river. It sleeps from November to March. " * 7
FOX = "The fox lives under the old oak. It hunts at night, mostly for mice. " * 7


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """A server on the CPU and one on the faked device."""
    folder = tmp_path_factory.mktemp("faked_cuda")
    systems = [
        System("on_cpu", (*SIZE, *ARGUMENTS)),
        on_faked_cuda("on_faked_cuda", folder, *ARGUMENTS),
    ]
    with serve(systems, small_llama(folder / "model", layers=3), folder) as (cpu, cuda):
        yield cpu, cuda


def _post(server: Server, route: str, body: dict[str, Any]) -> dict[str, Any]:
    response = requests.post(f"{server.url}{route}", json=body, timeout=300)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def _contexts(server: Server, *texts: str, method: str) -> list[dict[str, str]]:
    found = _post(server, "/ext/chunks", {"chunks": texts, "method": method})["contexts"]
    return [{"type": "ext_context", "id": each["id"]} for each in found]


def _ask(server: Server, text: object, tokens: int = 4) -> dict[str, Any]:
    parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"text": text, "sampling_params": parameters, "return_logprob": True}
    return _post(server, "/generate", body)


def _answers(server: Server) -> Iterator[dict[str, Any]]:
    """Yields answers to prompts whose chunks are on the device, then in host memory, and others."""
    bear, fox = _contexts(server, BEAR, FOX, method="lego-16")
    yield _ask(server, ["Read. ", bear, fox, " What?"])
    yield _ask(server, ["Now read again, please. ", fox, bear, " Who?"])
    for number in range(3):
        _ask(server, f"{number} " + f"word{number} of many " * 90, tokens=1)  # evicts the chunks
    yield _ask(server, ["A third time: ", fox, bear, " Who?"])
    (blended,) = _contexts(server, BEAR + "Or not.", method="blend-20")
    yield _ask(server, ["Blend. ", blended, " Who?"])
    primed = _contexts(server, BEAR + "One.", "Two. " + FOX, method="primed+offline-16")
    yield _ask(server, ["Primed: ", *reversed(primed), " Who?"])


def test_answers_are_those_of_the_cpu_and_only_selections_wait_for_the_device(
    servers: tuple[Server, Server],
) -> None:
    cpu, cuda = servers
    since = time.monotonic()
    for expected, found in zip(_answers(cpu), _answers(cuda), strict=True):
        assert found["output_ids"] == expected["output_ids"]
        (report,) = found["meta_info"]["ext"]
        assert report == expected["meta_info"]["ext"][0]
        assert report["linked"] > 0
        assert report["missing"] == 0
        logprobs = [
            [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
            for answer in (found, expected)
        ]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
    lines = [line for line in journal(cuda) if line["at"] >= since]
    assert not [line for line in lines if line["kind"] == "race"]
    waits = {
        place.split(":")[1].split()[1]
        for line in lines
        for place in line["places"]
        if "sgl_ext/engine/chunks/" in place and "power.py" not in place
    }
    assert waits == {"ChunkLinks.select", "blending.<locals>.run"}
