"""Followers of stored contexts on a faked CUDA device: answers are those of the CPU.

The device is waited for only by forwards with followers, and where a context's KV is recorded.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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
    waits,
)

from sgl_ext.serving.server import Server, System, serve

CLUSTERS = "sgl_ext/engine/clusters/"
CHANCE = random.Random(5)  # noqa: S311
CONTEXT = [CHANCE.randrange(97, 123) for _ in range(500)]
QUESTIONS = [[CHANCE.randrange(97, 123) for _ in range(count)] for count in (9, 40, 150)]


class Pair:
    """A server on the CPU and one on the faked device, and the contexts that they have stored.

    Attributes:
        shared: Context that the first has stored and both answer from. Two servers do not choose
            the same tokens of contexts that each has stored: their KV differs by rounding, and the
            centroids and blocks that are computed from it differ by more.
        own: The same text, stored by the second.
        joined: The first, and another context that both answer from.
    """

    def __init__(self, cpu: Server, cuda: Server, joined: list[str]) -> None:
        self.cpu, self.cuda, self.joined, self.own = cpu, cuda, joined, store(cuda, CONTEXT)
        self.shared = joined[0]

    def ask(
        self,
        server: Server,
        prompt: list[int],
        share: float | None = None,
        context: str | list[str] = "",
    ) -> dict[str, Any]:
        """Returns a server's answer to a prompt, which follows contexts with a share if any."""
        follows = {"ext_stored": {"id": context or self.shared, "sparsity": share}}
        return ask(server, prompt, custom_params={} if share is None else follows)


def store(server: Server, context: list[int]) -> str:
    return str(post(server, "/ext/clusters", {"input_ids": context})["id"])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("faked_cuda")
    model = _brief(small_llama(folder / "model", layers=3))
    on_cpu = System("on_cpu", (*SIZE, *_arguments(folder / "cpu")))
    with serve([on_cpu], model, folder) as (cpu,):
        joined = [store(cpu, context) for context in (CONTEXT, CONTEXT[::-1])]
        on_cuda = on_faked_cuda("on_faked_cuda", folder, *_arguments(folder / "cuda"))
        shutil.copytree(folder / "cpu", folder / "cuda", dirs_exist_ok=True)
        with serve([on_cuda], model, folder, deadline=START_S) as (cuda,):
            yield Pair(cpu, cuda, joined)
            assert not faults(cuda)


def _brief(model: Path) -> Path:
    """Lets every token end an answer, unless the request says otherwise.

    To store a context, a server answers six questions, and a decode step takes long in Triton's
    interpreter.
    """
    config = json.loads((model / "config.json").read_text())
    config["eos_token_id"] = [*range(config["vocab_size"])]
    (model / "config.json").write_text(json.dumps(config))
    return model


def _arguments(folder: Path) -> tuple[str, ...]:
    directories = [folder / str(at) for at in range(2)]
    for each in directories:
        each.mkdir(parents=True)
    section = {"directories": [*map(str, directories)], "largest": 1.0, "prefetch": 2.0}
    config = {
        "clusters": section,
        "tiers": {"host": {"capacity": "64MiB"}},
        "swap": {"capacity": "8MiB"},
        "chunks": {"method": "blend-20", "largest_divergence": 100, "link": "always"},
    }
    return (
        "--enable-ext", "--ext-config", json.dumps(config), "--page-size", "16",
        "--chunked-prefill-size", "256",
    )  # fmt: skip


@pytest.mark.parametrize("share", [1.0, 0.1])
def test_answers_are_those_of_the_cpu(pair: Pair, share: float) -> None:
    for question in QUESTIONS:
        found, expected = (pair.ask(server, question, share) for server in (pair.cuda, pair.cpu))
        same(found, expected)
        assert entry(found, "clusters")["exact"] == (share == 1)


def test_a_share_of_one_is_the_prompt_behind_the_context(pair: Pair) -> None:
    for question in QUESTIONS:
        found = pair.ask(pair.cuda, question, 1.0, pair.own)
        same(found, pair.ask(pair.cuda, [*CONTEXT, *question]))


def test_a_context_stored_by_the_device_is_followed_with_some_of_its_tokens(pair: Pair) -> None:
    found = pair.ask(pair.cuda, QUESTIONS[0], 0.5, pair.own)
    assert len(found["output_ids"]) == 4
    assert not entry(found, "clusters")["exact"]


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_two_contexts_are_followed_as_on_the_cpu(pair: Pair, share: float) -> None:
    found, expected = (
        pair.ask(server, QUESTIONS[0], share, pair.joined) for server in (pair.cuda, pair.cpu)
    )
    same(found, expected)
    assert entry(found, "clusters")["tokens"] == 2 * len(CONTEXT)


def test_followers_and_plain_requests_share_forwards(pair: Pair) -> None:
    """Prompts of several followers and of plain requests are computed and decoded together."""
    kinds = [(QUESTIONS[1], None), (QUESTIONS[0], 0.1), (QUESTIONS[2], 1.0), (QUESTIONS[1], 0.1)]
    expected = [pair.ask(pair.cpu, *kind) for kind in kinds]
    with ThreadPoolExecutor(len(kinds)) as threads:
        futures = [threads.submit(pair.ask, pair.cuda, *kind) for kind in kinds]
        for future, other in zip(futures, expected, strict=True):
            same(future.result(), other)


def test_followers_go_on_with_the_rows_of_a_prompt_that_selects_tokens(pair: Pair) -> None:
    """Blended prompts recompute some linked tokens from the third layer on, with their forward."""
    text = "The bear lives in a cave above the river. It sleeps from November to March. "
    marks = {}
    for server in (pair.cpu, pair.cuda):
        (made,) = post(server, "/ext/chunks", {"chunks": [text]})["contexts"]
        marks[server.url] = {"type": "ext_context", "id": made["id"]}

    def blended(server: Server, number: int) -> dict[str, Any]:
        found = ask(server, [f"Read it {number} times. ", marks[server.url], " Who?"])
        assert entry(found, "chunks")["linked"] > 0
        return found

    kinds = [(QUESTIONS[0], 0.1), (QUESTIONS[0], 1.0)]
    expected = [pair.ask(pair.cpu, *kind) for kind in kinds]
    for found, other in zip([pair.ask(pair.cuda, *kind) for kind in kinds], expected, strict=True):
        same(found, other)
    since = time.monotonic()
    for number in range(6):
        right = blended(pair.cpu, number)
        with ThreadPoolExecutor(4) as threads:
            blocker = threads.submit(pair.ask, pair.cuda, [CHANCE.randrange(97, 123)] * 200)
            time.sleep(0.2)  # the others arrive while it is computed
            also = threads.submit(blended, pair.cuda, number)
            futures = [threads.submit(pair.ask, pair.cuda, *kind) for kind in kinds]
            for future, other in zip(futures, expected, strict=True):
                same(future.result(), other)
            same(also.result(), right)
            blocker.result()
        if _together(pair.cuda, since):
            return
    raise AssertionError("no forward had both followers and a prompt that selects tokens")


def _together(server: Server, since: float) -> bool:
    """Returns whether followers were attended to in layers that go on with other rows."""
    return any(
        line["at"] >= since
        and all(
            any(of in place for place in line["places"]) for of in ("chunks/blend.py", CLUSTERS)
        )
        for line in journal(server)
        if line["kind"] in ("sync", "read", "upload")
    )


def test_only_forwards_with_followers_wait_for_the_device(pair: Pair) -> None:
    since = time.monotonic()
    pair.ask(pair.cuda, [*QUESTIONS[0], 100])
    assert not waits(pair.cuda, since, CLUSTERS)
    since = time.monotonic()
    pair.ask(pair.cuda, [*QUESTIONS[0], 101], 0.1)
    assert waits(pair.cuda, since, CLUSTERS) == {"DeviceForward._merge", "DeviceForward.prefetch"}
