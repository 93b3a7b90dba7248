"""All powers in one server: answers under load are those of stock SGLang.

A master reads borrowed memory through layer buffers and restores prefixes by layers; its worker
serves the same model and restores prefixes by tokens. Both have every section of the configuration.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from conftest import until
from faked_cuda_kit import DEADLINE_S, ask, entry, post, same, small_llama
from transformers import AutoTokenizer

from sgl_ext.serving.http import live
from sgl_ext.serving.server import BESIDE_OTHERS, Server, System, serve

LAYERS = 4
TOKEN_BYTES = LAYERS * 2 * 2 * 64 * 4
"""KV bytes of a token, in float32."""
OWN, BORROWED = 1536, 1024
"""Tokens that fit the master's own memory and the memory that it borrows."""
CONTEXT = 480
TOKENS = 16
"""New tokens of each answer."""
CHANCE = random.Random(7)  # noqa: S311


def words(count: int) -> list[int]:
    return [CHANCE.randrange(1000, 20_000) for _ in range(count)]


STORED = words(CONTEXT)
TEXTS = [f"Report {at}: " + " ".join(f"{at}{n % 17} ran on{n}," for n in range(40)) for at in range(3)]


@dataclass
class Asked:
    """Request of one kind.

    Attributes:
        kind: ``plain``, ``follower``, ``linked`` or ``blended``.
        ids: token ids of the equivalent prompt of stock SGLang.
        prompt: prompt of the request: token ids, or texts and contexts.
        priority: priority of the request.
    """

    kind: str
    ids: list[int]
    prompt: list[Any]
    priority: int


class Side:
    """A server with all sections, with a stored context and contexts to link."""

    def __init__(self, server: Server, stock: Server, model: Path) -> None:
        self.server, self.stock = server, stock
        self._stored = post(server, "/ext/clusters", {"input_ids": STORED})["id"]
        tokenizer = AutoTokenizer.from_pretrained(model)
        self._encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
        self._exact = self._contexts("full")
        self._blended = self._contexts("blend-20")
        self.told: Counter[str] = Counter()
        """Number of answers that a power has worked on, by power, and by power and kind."""

    def _contexts(self, method: str) -> list[dict[str, str]]:
        found = post(self.server, "/ext/chunks", {"chunks": TEXTS, "method": method})["contexts"]
        return [{"type": "ext_context", "id": each["id"]} for each in found]

    def plain(self, ids: list[int], priority: int = 0) -> Asked:
        return Asked("plain", ids, ids, priority)

    def follower(self, ids: list[int], priority: int = 0) -> Asked:
        return Asked("follower", [*STORED, *ids], ids, priority)

    def linked(self, first: int, second: int, question: str, *, blend: bool = False) -> Asked:
        contexts = self._blended if blend else self._exact
        texts = ["Read this. ", TEXTS[first], TEXTS[second], question]
        ids = [token for text in texts for token in self._encode(text)]
        prompt = [texts[0], contexts[first], contexts[second], question]
        return Asked("blended" if blend else "linked", ids, prompt, 0)

    def answer(self, asked: Asked) -> dict[str, Any]:
        follows = {"ext_stored": {"id": self._stored, "sparsity": 1.0}}
        custom = follows if asked.kind == "follower" else {}
        found = ask(self.server, asked.prompt, TOKENS, custom, priority=asked.priority)
        for each in found["meta_info"].get("ext", ()):
            self.told[each["power"]] += 1
            self.told[f"{each['power']} {asked.kind}"] += 1
        return found

    def same(self, groups: Sequence[Sequence[Asked]]) -> list[dict[str, Any]]:
        """Asserts that all answers are those of stock SGLang; returns them.

        Approximate ones are only requested. The groups are sent shortly after each other, so that
        requests of later ones preempt others.
        """
        every = [asked for group in groups for asked in group]
        with ThreadPoolExecutor(2 * len(every)) as threads:
            expected = [threads.submit(ask, self.stock, asked.ids, TOKENS) for asked in every]
            for one in expected:
                one.result()
            found = []
            for group in groups:
                found += [threads.submit(self.answer, asked) for asked in group]
                time.sleep(0.3)
            for asked, ours, right in zip(every, found, expected, strict=True):
                answer = ours.result()
                if asked.kind != "blended":
                    same(answer, right.result())
        return [ours.result() for ours in found]

    def state(self) -> dict[str, Any]:
        return live(self.server.url)


def arguments(folder: Path, tokens: int, host: str, **peer: Any) -> tuple[str, ...]:
    """Returns the arguments of a server with every section, whose files are in a folder."""
    devices = [folder / f"clusters{at}" for at in range(2)]
    for each in (*devices, folder / "ssd"):
        each.mkdir(parents=True)
    config = {
        "tiers": {
            "host": {"capacity": f"{1024 * TOKEN_BYTES}B"},
            "ssd": {"directories": [str(folder / "ssd")], "capacity": "256MiB", "keep_after": 1},
        },
        "chunks": {"largest_divergence": 100},
        "restore": {"chunk": 128, "host": host},
        "swap": {"capacity": f"{512 * TOKEN_BYTES}B", "policy": "static"},
        "clusters": {
            "directories": [*map(str, devices)], "largest": 1.0, "hot": "1MiB", "prefetch": 1.0,
        },
        "peer": peer,
    }  # fmt: skip
    return (
        *COMMON, "--max-total-tokens", str(tokens), "--chunked-prefill-size", "512",
        "--enable-ext", "--ext-config", json.dumps(config),
    )  # fmt: skip


COMMON = ("--page-size", "16", "--dtype", "float32", *BESIDE_OTHERS)
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Side]]:
    folder = tmp_path_factory.mktemp("all")
    with tempfile.TemporaryDirectory(prefix="sgl_ext-peers-") as sockets:
        terms = {"directory": sockets, "deadline": "20s", "lease": "20s"}
        capacity = f"{BORROWED * TOKEN_BYTES}B"
        systems = [
            System("stock", (*COMMON, "--max-total-tokens", "16384")),
            System(
                "master",
                arguments(
                    folder / "m", OWN, "layers", role="master", capacity=capacity,
                    stream="layers", **terms,
                ),
                STRICT,
            ),
            System(
                "worker",
                arguments(folder / "w", 2048, "tokens", role="worker", window="1s", **terms),
                STRICT,
            ),
        ]  # fmt: skip
        model = small_llama(folder / "model", layers=LAYERS)
        with serve(systems, model, folder) as (stock, *others):
            with ThreadPoolExecutor() as threads:
                yield [*threads.map(lambda each: Side(each, stock, model), others)]


@pytest.mark.parametrize("number", [0, 1], ids=["master", "worker"])
def test_answers_of_all_kinds_are_those_of_stock(sides: list[Side], number: int) -> None:
    side = sides[number]
    if number == 0:
        until(lambda: side.state()["peer"]["borrowed_bytes"] > 0, within=60)
    talks = [side.plain(words(count)) for count in (420, 260, 330, 180, 390)]
    followers = [side.follower(words(count)) for count in (300, 40, 220)]
    for turn in range(3):
        links = [side.linked(turn, at, f" What of {at}?") for at in range(3) if at != turn]
        blends = [side.linked(at, turn, " Why?", blend=True) for at in range(3) if at != turn]
        first = [*talks[:3], *followers[:1], *links, *blends]
        later = [*talks[3:], *followers[1:]]
        for asked in later:
            asked.priority = 1
        side.same([first, later])
        for asked in (*talks, *followers):
            more = words(30)
            asked.ids = [*asked.ids, *more]
            asked.prompt = [*asked.prompt, *more]
            asked.priority = 0
    print(side.told, json.dumps(side.state(), indent=1))
