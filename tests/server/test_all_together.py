"""All powers in one server: answers under load are those of stock SGLang.

A master reads borrowed memory through layer buffers and restores prefixes by layers; its worker
serves the same model and restores prefixes by tokens. Both have every section of the configuration.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from conftest import ROOT, until
from faked_cuda_kit import DEADLINE_S, ask, post, same, small_llama
from trace_collector_kit import Collector, collector
from transformers import AutoTokenizer

from sgl_ext.serving.http import live
from sgl_ext.serving.server import BESIDE_OTHERS, Server, System, serve

DASHBOARD = ROOT / "examples/monitoring/grafana/dashboards/sgl_ext.json"
LAYERS = 4
TOKEN_BYTES = LAYERS * 2 * 2 * 64 * 4
"""KV bytes of a token, in float32."""
OWN, BORROWED, LENDER = 2560, 1024, 2048  # layer buffers take 1,024 tokens of OWN
"""Tokens that fit the master's own memory, the memory that it borrows, and the worker's."""
TOKENS = 12
"""New tokens of an answer."""
TURNS = 6
"""Maximum turns of the chats."""
CHANCE = random.Random(7)  # noqa: S311
COMMON = (
    "--page-size", "16", "--dtype", "float32", "--enable-metrics", "--enable-cache-report",
    *BESIDE_OTHERS,
)  # fmt: skip
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}


def words(count: int) -> list[int]:
    return [CHANCE.randrange(1000, 20_000) for _ in range(count)]


STORED = words(480)
TEXTS = [
    f"Report {at}: " + " ".join(f"{at}{word % 17} ran on{word}," for word in range(20))
    for at in range(3)
]
SHARES = {"follower": 1.0, "sparse": 0.2}
"""Share of the stored context's blocks, by the kind of a request that follows it."""
APPROXIMATE = {"blended", "sparse"}


@dataclass
class Asked:
    """Request of one kind: ``plain``, ``linked``, or one of :data:`SHARES` or `APPROXIMATE`.

    Attributes:
        ids: token ids of the equivalent prompt of stock SGLang.
        prompt: prompt of the request: token ids, or texts and contexts.
    """

    kind: str
    ids: list[int]
    prompt: list[Any]

    def longer(self, more: list[int]) -> Asked:
        return Asked(self.kind, [*self.ids, *more], [*self.prompt, *more])


class Side:
    """A server with all sections, a stored context, and contexts to link."""

    def __init__(self, server: Server, stock: Server, model: Path) -> None:
        self.server, self.stock = server, stock
        self.stored = post(server, "/ext/clusters", {"input_ids": STORED})["id"]
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self.contexts = {method: self._contexts(method) for method in ("full", "blend-20")}
        self.told: Counter[tuple[str, str]] = Counter()
        """Number of answers that a power has worked on, and of tokens that were restored from a
        tier, by power or tier and by kind."""

    def _contexts(self, method: str) -> list[dict[str, str]]:
        found = post(self.server, "/ext/chunks", {"chunks": TEXTS, "method": method})["contexts"]
        return [{"type": "ext_context", "id": each["id"]} for each in found]

    def plain(self, count: int) -> Asked:
        ids = words(count)
        return Asked("plain", ids, ids)

    def follower(self, count: int, kind: str = "follower") -> Asked:
        ids = words(count)
        return Asked(kind, [*STORED, *ids], ids)

    def linked(self, first: int, second: int, question: str, *, blend: bool = False) -> Asked:
        contexts = self.contexts["blend-20" if blend else "full"]
        texts = ["Read this. ", TEXTS[first], TEXTS[second], question]
        encode = self._tokenizer.encode
        ids = [token for text in texts for token in encode(text, add_special_tokens=False)]
        prompt = [texts[0], contexts[first], contexts[second], question]
        return Asked("blended" if blend else "linked", ids, prompt)

    def _answer(self, asked: Asked, tokens: int, priority: int) -> dict[str, Any]:
        share = SHARES.get(asked.kind)
        custom = {"ext_stored": {"id": self.stored, "sparsity": share}} if share else {}
        found = ask(self.server, asked.prompt, tokens, custom, priority=priority)
        for each in found["meta_info"].get("ext", ()):
            self.told[each["power"], asked.kind] += 1
            if each["power"] == "restore":
                for tier, loaded in each["loaded"].items():
                    self.told[tier, asked.kind] += loaded
        return found

    def same(
        self,
        *groups: Sequence[Asked],
        between: Callable[[], None] = lambda: None,
        tokens: int = TOKENS,
    ) -> None:
        """Asserts that all answers are those of stock SGLang; approximate ones are only requested.

        Args:
            groups: requests that are sent together, those of later groups with higher priorities.
            between: is called between two groups.
            tokens: number of new tokens.
        """
        every = [asked for group in groups for asked in group]
        with ThreadPoolExecutor(len(every)) as threads:
            right = [
                None if asked.kind in APPROXIMATE else ask(self.stock, asked.ids, tokens)
                for asked in every
            ]
            found = []
            for level, group in enumerate(groups):
                if level:
                    between()
                found += [threads.submit(self._answer, asked, tokens, level) for asked in group]
            for answer, expected in zip(found, right, strict=True):
                if expected is None:
                    answer.result()
                else:
                    same(answer.result(), expected)

    def decodes(self) -> bool:
        """Returns whether three requests decode."""
        url = f"{self.server.url}/v1/loads?include=core"
        (load,) = requests.get(url, timeout=DEADLINE_S).json()["loads"]
        return bool(load["num_running_reqs"] == 3)

    def state(self) -> dict[str, Any]:
        return live(self.server.url)


def arguments(
    folder: Path, tokens: int, host: str, collected: Collector, **peer: Any
) -> tuple[str, ...]:
    """Returns the arguments of a traced server with every section, whose files are in a folder."""
    devices = [folder / f"clusters{at}" for at in range(2)]
    for each in (*devices, folder / "ssd"):
        each.mkdir(parents=True)
    config = {
        "tiers": {
            "host": {"capacity": f"{6144 * TOKEN_BYTES}B"},
            "ssd": {"directories": [str(folder / "ssd")], "capacity": "256MiB", "keep_after": 1},
        },
        "chunks": {"largest_divergence": 100, "link": "always"},
        "restore": {"chunk": 128, "host": host},
        "swap": {"capacity": f"{2048 * TOKEN_BYTES}B", "policy": "static"},
        "clusters": {
            "directories": [*map(str, devices)], "largest": 1.0, "hot": "256KiB", "prefetch": 1.0,
        },
        "peer": peer,
    }  # fmt: skip
    return (
        *COMMON, "--max-total-tokens", str(tokens), "--chunked-prefill-size", "1024",
        "--enable-trace", "--otlp-traces-endpoint", collected.endpoint,
        "--enable-ext", "--ext-config", json.dumps(config),
    )  # fmt: skip


@pytest.fixture(scope="module")
def collected() -> Iterator[Collector]:
    with collector() as found:
        yield found


@pytest.fixture(scope="module")
def sides(
    tmp_path_factory: pytest.TempPathFactory, collected: Collector
) -> Iterator[dict[str, Side]]:
    folder = tmp_path_factory.mktemp("all")
    model = small_llama(folder / "model", layers=LAYERS)
    with tempfile.TemporaryDirectory(prefix="sgl_ext-peers-") as sockets:
        terms = {"directory": sockets, "deadline": "20s", "lease": "20s"}
        borrows = {"capacity": f"{BORROWED * TOKEN_BYTES}B", "stream": "layers", **terms}
        master = arguments(folder / "master", OWN, "layers", collected, role="master", **borrows)
        lends = {"window": "1s", **terms}
        worker = arguments(folder / "worker", LENDER, "tokens", collected, role="worker", **lends)
        systems = [
            System("stock", (*COMMON, "--max-total-tokens", "16384")),
            System("master", master, STRICT),
            System("worker", worker, STRICT),
        ]
        with serve(systems, model, folder) as (stock, *others), ThreadPoolExecutor() as threads:
            made = threads.map(lambda each: Side(each, stock, model), others)
            yield dict(zip(("master", "worker"), made, strict=True))


@pytest.fixture(params=["master", "worker"])
def side(sides: dict[str, Side], request: pytest.FixtureRequest) -> Side:
    found = sides[request.param]
    if request.param == "master":
        until(lambda: found.state()["peer"]["borrowed_bytes"] > 0, within=60)
    return found


def test_answers_of_all_kinds_are_those_of_stock(side: Side) -> None:
    """Prompts, whose prefixes lower tiers have from the second turn on, are computed together."""
    chats = [side.plain(count) for count in (180, 60, 130)]
    chats += [side.follower(count) for count in (150, 20, 110)]
    old = [side.plain(140), side.follower(90)]  # are in host memory no longer in the last turn
    wanted = [(power, "follower") for power in ("host", "ssd", "clusters")]
    wanted += [("chunks", "linked"), ("chunks", "blended")]
    for turn in range(TURNS):
        text = turn % 3
        links = [side.linked(text, at, f" What of {at}?") for at in range(3) if at != text]
        others = [side.linked(at, text, " Why?", blend=True) for at in range(3) if at != text]
        others.append(side.follower(40, "sparse"))
        blocker = side.plain(700)  # the others arrive while it is computed
        together = [*chats, *links, *others, *(old if turn != 1 else ())]
        side.same([blocker], together, between=lambda: time.sleep(0.05))
        side.same([side.plain(1300), side.plain(1300)])  # evicts them
        chats = [asked.longer(words(30)) for asked in chats]
        old = [asked.longer(words(30)) for asked in old]
        # On a slow machine all of a prefix may be computed before the first page is loaded.
        if turn >= 2 and all(side.told[each] for each in wanted):
            break
    assert all(side.told[each] for each in wanted), side.told
    state = side.state()
    assert state["clusters"]["open"][side.stored]["prefetched"]
    assert state["peer"].get("stream_bytes", 1)


def test_preempted_requests_resume(side: Side) -> None:
    chats = [side.follower(500), side.follower(450), side.follower(300)]
    urgent = [side.plain(1300), side.follower(700)]
    side.same(chats, urgent, between=lambda: until(side.decodes, within=60), tokens=96)
    assert side.told["swap", "follower"], side.state()["swap"]


def _not_computed(entries: list[dict[str, Any]]) -> int:
    """Returns the tokens of the prompt that powers have loaded or linked."""
    found = 0
    for entry in entries:
        match entry:
            case {"power": "tiers", "sources": sources}:
                found += sum(each["tokens"] for each in sources.values())
            case {"power": "restore", "loaded": loaded}:
                found += sum(loaded.values())
            case {"power": "chunks", "linked": linked}:
                found += linked
    return found


@pytest.mark.parametrize("kind", ["plain", "follower", "linked"])
def test_completions_report_the_cached_tokens_of_all_powers(side: Side, kind: str) -> None:
    """Prompts are computed, evicted, and sent again: as a whole, and as a stream."""
    asked = side.linked(0, 1, " And?") if kind == "linked" else getattr(side, kind)(300)
    side.same([asked])
    side.same([side.plain(1300), side.plain(1300)])  # evicts it
    body = {"model": "", "prompt": asked.prompt, "temperature": 0, "max_tokens": TOKENS}
    if share := SHARES.get(kind):
        body["ext_stored"] = {"id": side.stored, "sparsity": share}
    found = post(side.server, "/v1/completions", body)
    usage = found["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 < _not_computed(found["sglext"]["ext"]) <= cached < usage["prompt_tokens"]
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    answer = requests.post(f"{side.server.url}/v1/completions", json=streamed, timeout=DEADLINE_S)
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    last = json.loads(lines[-1])["usage"]
    assert last["prompt_tokens"] == usage["prompt_tokens"]
    # All whole pages are on the device by now; the last token is always computed.
    pages = (last["prompt_tokens"] - 1) // 16
    assert 16 * pages - 16 <= last["prompt_tokens_details"]["cached_tokens"] <= 16 * pages


def test_a_prompt_that_follows_a_context_and_links_others_is_refused(side: Side) -> None:
    follows = {"ext_stored": {"id": side.stored}}
    for text, status in (([side.contexts["full"][0], " Why?"], 400), ("Why?", 200)):
        params = {"max_new_tokens": 2, "custom_params": follows}
        body = {"text": text, "sampling_params": params}
        answer = requests.post(f"{side.server.url}/generate", json=body, timeout=DEADLINE_S)
        assert answer.status_code == status, answer.text
        assert ("cannot use a stored context" in answer.text) == (status == 400)


def test_the_metrics_of_the_dashboard_exist(sides: dict[str, Side]) -> None:
    """Runs behind the tests that use every power."""
    wanted = set(re.findall(r"sglang(?:_ext)?:\w+", DASHBOARD.read_text()))
    missing = set(wanted)
    for side in sides.values():
        text = requests.get(f"{side.server.url}/metrics", timeout=DEADLINE_S).text
        missing -= set(re.findall(r"^(sglang(?:_ext)?:\w+)", text, re.MULTILINE))
    # No linked chunk was measured: the model is not a trained one.
    rare = {"chunks_divergence_nats"}
    assert missing <= {f"sglang_ext:{name}" for name in rare}
    assert len(wanted) > 30


def test_traces_have_the_spans_of_all_powers(sides: dict[str, Side], collected: Collector) -> None:
    """Runs behind the tests that use every power. SGLang's own spans contain ours."""
    del sides
    stages = (
        "tiers_lookup", "tiers_load", "restore", "chunks_link", "clusters_open", "clusters_read",
        "swap_out", "swap_in", "swapped", "peer_read", "wait",
    )  # fmt: skip
    wanted = {f"ext_{stage}" for stage in stages}

    def complete() -> bool:
        spans = [*collected.spans]  # a span is exported before the one that contains it
        ours = [span for span in spans if span.name in wanted]
        ids = {span.span_id for span in spans if not span.name.startswith("ext_")}
        return (
            wanted == {span.name for span in ours} and {span.parent_span_id for span in ours} <= ids
        )

    until(complete, within=60)
    assert all(each["lent_tokens"] > 0 for each in collected.attributes("ext_peer_read"))
    assert any(each.get("ssd", 0) > 0 for each in collected.attributes("ext_restore"))
    assert any(
        0 < each["loads"] <= each["pages"] for each in collected.attributes("ext_tiers_lookup")
    )
    assert any(each["fetched"] > 0 for each in collected.attributes("ext_clusters_read"))
    assert any("clusters" in str(each["powers"]) for each in collected.attributes("ext_wait"))
    lasting = ("chunks_link", "swap_out", "swapped", "wait")
    for span in collected.spans:
        if span.name.removeprefix("ext_") in lasting:
            assert span.end_time_unix_nano > span.start_time_unix_nano, span.name
