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
from conftest import until
from faked_cuda_kit import ask, post, same, small_llama
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
TEXTS = [
    f"Report {at}: " + " ".join(f"{at}{n % 17} ran on{n}," for n in range(20)) for at in range(3)
]


@dataclass
class Asked:
    """Request of one kind.

    Attributes:
        kind: ``plain``, ``follower``, ``linked`` or ``blended``.
        ids: token ids of the equivalent prompt of stock SGLang.
        prompt: prompt of the request: token ids, or texts and contexts.
    """

    kind: str
    ids: list[int]
    prompt: list[Any]


class Side:
    """A server with all sections, with a stored context and contexts to link."""

    def __init__(self, server: Server, stock: Server, model: Path) -> None:
        self.server, self.stock = server, stock
        self._stored = post(server, "/ext/clusters", {"input_ids": STORED})["id"]
        tokenizer = AutoTokenizer.from_pretrained(model)
        self._encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
        self._exact = self._contexts("full")
        self._blended = self._contexts("blend-20")
        self.told: Counter[tuple[str, str]] = Counter()
        """Number of answers that a power has worked on, by power and kind."""

    def _contexts(self, method: str) -> list[dict[str, str]]:
        found = post(self.server, "/ext/chunks", {"chunks": TEXTS, "method": method})["contexts"]
        return [{"type": "ext_context", "id": each["id"]} for each in found]

    def plain(self, ids: list[int]) -> Asked:
        return Asked("plain", ids, ids)

    def follower(self, ids: list[int]) -> Asked:
        return Asked("follower", [*STORED, *ids], ids)

    def linked(self, first: int, second: int, question: str, *, blend: bool = False) -> Asked:
        contexts = self._blended if blend else self._exact
        texts = ["Read this. ", TEXTS[first], TEXTS[second], question]
        ids = [token for text in texts for token in self._encode(text)]
        prompt = [texts[0], contexts[first], contexts[second], question]
        return Asked("blended" if blend else "linked", ids, prompt)

    def answer(self, asked: Asked, tokens: int, priority: int) -> dict[str, Any]:
        follows = {"ext_stored": {"id": self._stored, "sparsity": 1.0}}
        custom = follows if asked.kind == "follower" else {}
        found = ask(self.server, asked.prompt, tokens, custom, priority=priority)
        for each in found["meta_info"].get("ext", ()):
            self.told[each["power"], asked.kind] += 1
            for tier, loaded in (
                each.get("loaded", {}).items() if each["power"] == "restore" else ()
            ):
                self.told[tier, asked.kind] += loaded
                self.told["computed", asked.kind] += each["computed"]
        return found

    def same(self, *groups: Sequence[Asked], pause: float, tokens: int = TOKENS) -> None:
        """Asserts that all answers are those of stock SGLang; approximate ones are only requested.

        Args:
            groups: requests that are sent together, those of later groups with higher priorities.
            pause: seconds between groups.
            tokens: number of new tokens.
        """
        every = [(asked, level) for level, group in enumerate(groups) for asked in group]
        with ThreadPoolExecutor(len(every)) as threads:
            right = [
                None if asked.kind == "blended" else ask(self.stock, asked.ids, tokens)
                for asked, _ in every
            ]
            found = []
            for level, group in enumerate(groups):
                found += [threads.submit(self.answer, asked, tokens, level) for asked in group]
                time.sleep(pause)
            for (asked, _), answer, expected in zip(every, found, right, strict=True):
                if expected is None:
                    answer.result()
                else:
                    same(answer.result(), expected)

    def state(self) -> dict[str, Any]:
        return live(self.server.url)


def arguments(folder: Path, tokens: int, host: str, **peer: Any) -> tuple[str, ...]:
    """Returns the arguments of a server with every section, whose files are in a folder."""
    devices = [folder / f"clusters{at}" for at in range(2)]
    for each in (*devices, folder / "ssd"):
        each.mkdir(parents=True)
    config = {
        "tiers": {
            "host": {"capacity": f"{6144 * TOKEN_BYTES}B"},
            "ssd": {"directories": [str(folder / "ssd")], "capacity": "256MiB", "keep_after": 1},
        },
        "chunks": {"largest_divergence": 100},
        "restore": {"chunk": 128, "host": host},
        "swap": {"capacity": f"{2048 * TOKEN_BYTES}B", "policy": "static"},
        "clusters": {
            "directories": [*map(str, devices)], "largest": 1.0, "hot": "256KiB", "prefetch": 1.0,
        },
        "peer": peer,
    }  # fmt: skip
    return (
        *COMMON, "--max-total-tokens", str(tokens), "--chunked-prefill-size", "1024",
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


@pytest.fixture(params=["master", "worker"])
def side(sides: list[Side], request: pytest.FixtureRequest) -> Side:
    side = sides[request.param == "worker"]
    if request.param == "master":
        until(lambda: side.state()["peer"]["borrowed_bytes"] > 0, within=60)
    return side


def test_answers_of_all_kinds_are_those_of_stock(side: Side) -> None:
    """Prompts, whose prefixes lower tiers have from the second turn on, are computed together."""
    chats = [side.plain(words(count)) for count in (180, 60, 130)]
    chats += [side.follower(words(count)) for count in (150, 20, 110)]
    old = [side.plain(words(140)), side.follower(words(90))]
    for turn in range(3):
        links = [side.linked(turn, at, f" What of {at}?") for at in range(3) if at != turn]
        blends = [side.linked(at, turn, " Why?", blend=True) for at in range(3) if at != turn]
        blocker = side.plain(words(700))  # the others arrive while it is computed
        side.same([blocker], [*chats, *links, *blends, *(old if turn != 1 else ())], pause=0.05)
        side.same([side.plain(words(1300)), side.plain(words(1300))], pause=0)  # evicts them
        for asked in (*chats, *old):
            more = words(30)
            asked.ids, asked.prompt = [*asked.ids, *more], [*asked.prompt, *more]
    print(side.server.log, side.told)


def test_preempted_requests_resume(side: Side) -> None:
    chats = [side.plain(words(500)), side.follower(words(450)), side.follower(words(300))]
    urgent = [side.plain(words(1300)), side.follower(words(700))]
    side.same(chats, urgent, pause=0.4, tokens=64)
    state = side.state()
    print(side.server.log, side.told, state["swap"], state["peer"], state["clusters"])
