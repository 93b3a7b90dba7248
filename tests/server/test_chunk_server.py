"""Tests of a server that links contexts into prompts: computed tokens, answers and refusals."""

from __future__ import annotations

import contextlib
import json
import random
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import sglang as sgl
from conftest import until
from fuzz_kit import rounds
from metrics_kit import value
from msgspec import to_builtins

from sgl_ext.bench.data.texts import sharegpt_prompts
from sgl_ext.bench.harness.metrics import samples
from sgl_ext.chunks.compose import NAMESPACE
from sgl_ext.chunks.composition import Composition
from sgl_ext.client import ContextCache
from sgl_ext.config import load
from sgl_ext.doctor_model import linking
from sgl_ext.engine.chunks.parameters import COMPOSITION, SELECTION
from sgl_ext.errors import UnknownContextError
from sgl_ext.lang import chunk
from sgl_ext.serving.server import Server, System, serve

DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = (
        "--max-total-tokens", "4096", "--page-size", "16", "--dtype", "float32",
        "--enable-metrics", "--enable-cache-report",
    )  # fmt: skip
    config = json.dumps({"chunks": {"method": "lego-16", "link": "always"}})
    environment = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    system = System("chunks", (*arguments, "--enable-ext", "--ext-config", config), environment)
    with serve([system], model, tmp_path_factory.mktemp("logs")) as (server,):
        yield server


def post(server: Server, path: str, **body: object) -> requests.Response:
    return requests.post(f"{server.url}{path}", json=body, timeout=DEADLINE_S)


def create(server: Server, *chunks: object, **more: object) -> list[str]:
    answer = post(server, "/ext/chunks", chunks=chunks, **more)
    assert answer.status_code == 200, answer.text
    return [context["id"] for context in answer.json()["contexts"]]


HELLO = [{"role": "user", "content": "Hello"}]


def part(value: str) -> dict[str, str]:
    if value.startswith("ctx-"):
        return {"type": "ext_context", "id": value}
    return {"type": "text", "text": value}


def generate(server: Server, *parts: str, **more: object) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    text = list(map(part, parts))
    answer = post(server, "/generate", text=text, sampling_params=sampling, **more)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def told(answer: dict[str, Any]) -> dict[str, Any]:
    (entry,) = answer["meta_info"]["ext"]
    assert (entry["power"], entry["exact"], entry["missing"]) == ("chunks", False, 0)
    found: dict[str, Any] = entry
    return found


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [text[:1200] for text in sharegpt_prompts(4, characters=(1300, 4000))]


def test_fidelity_probe_of_the_server_is_within_bounds(server: Server) -> None:
    found = requests.get(f"{server.url}/ext/chunks/fidelity", timeout=DEADLINE_S).json()
    assert found["method"] == "lego-16"
    assert 0 <= found["nats"]["exact"] < 1e-4
    assert 1e-3 < found["nats"]["divergence"] < 0.5


def test_contexts_are_linked_in_any_order(server: Server, texts: list[str]) -> None:
    ids = create(server, *texts)
    for order in ((0, 1, 2), (2, 0), (3, 1, 0, 2)):
        answer = generate(server, "Read this. ", *(ids[at] for at in order), "What is it about?")
        entry = told(answer)
        assert entry["method"] == "lego-16"
        assert entry["recomputed"] == 16 * len(order)
        assert entry["linked"] > 100 * len(order)
        tokens = answer["meta_info"]["prompt_tokens"]
        assert entry["linked"] + entry["recomputed"] < tokens
        again = generate(server, "Read this. ", *(ids[at] for at in order), "What is it about?")
        assert again["output_ids"] == answer["output_ids"]
        assert again["meta_info"]["cached_tokens"] >= (tokens - 1) // 16 * 16


def test_prefix_before_all_chunks_is_a_hit(server: Server, texts: list[str]) -> None:
    prefix = texts[3][:400]
    ids = create(server, *texts[:2], prefix=prefix)
    for order in ((0, 1), (1, 0)):
        entry = told(generate(server, prefix, *(ids[at] for at in order), "Well?"))
        assert entry["prefix"] >= 64
        assert entry["prefix"] % 16 == 0


def test_prompts_may_end_with_a_context(server: Server, texts: list[str]) -> None:
    (context,) = create(server, texts[0])
    entry = told(generate(server, "Go on: ", context))
    assert entry["recomputed"] == 17


def test_full_method_returns_the_logprobs_of_stock_sglang(
    server: Server, texts: list[str], model: Path
) -> None:
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(model).encode
    ids = create(server, *texts[:2], method="full", cache_salt="full")
    more = {"cache_salt": "full", "return_logprob": True}
    linked = generate(server, "So: ", ids[1], ids[0], "Well?", **more)
    assert told(linked)["linked"] == 0
    parts = ["So: ", texts[1], texts[0], "Well?"]
    whole = [token for text in parts for token in encode(text, add_special_tokens=False)]
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    more = {"sampling_params": sampling, "return_logprob": True}
    stock = post(server, "/generate", input_ids=whole, **more).json()
    for name in ("completion_tokens", "output_token_logprobs"):
        assert linked["meta_info"][name] == stock["meta_info"][name]


def test_prompt_logprobs_of_linked_tokens_are_refused(server: Server, texts: list[str]) -> None:
    (context,) = create(server, texts[0], method="naive", cache_salt="logprobs")
    parts = [part("So: "), part(context), part("Well, what is it about?")]
    body = {
        "text": parts, "cache_salt": "logprobs", "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
    }  # fmt: skip
    refused = post(server, "/generate", **body, logprob_start_len=0)
    assert refused.status_code == 400
    least = int(re.search(r"set logprob_start_len to (\d+) or more", refused.text)[1])  # type: ignore[index]
    for start in (least, least + 1):
        answer = post(server, "/generate", **body, logprob_start_len=start)
        assert answer.status_code == 200, answer.text
    assert post(server, "/generate", **body, logprob_start_len=least - 1).status_code == 400


def test_reserved_custom_params_of_users_are_ignored(server: Server) -> None:
    """Checks that users cannot end the scheduler, or link chunks that were never created."""
    ids = [5] * 40
    nothing = Composition("x", NAMESPACE, ((),), ())
    selection = {"namespace": "x", "length": 16, "preparation": [5] * 16, "other": [], "count": -1}
    custom = {COMPOSITION: to_builtins(nothing), SELECTION: selection}
    for params in (custom, {COMPOSITION: "?"}):
        sampling = {"max_new_tokens": 1, "custom_params": params}
        body = {"input_ids": ids, "extra_key": nothing.extra_key, "sampling_params": sampling}
        answer = post(server, "/generate", **body)
        assert answer.status_code == 200, answer.text
        assert "ext" not in answer.json()["meta_info"]


def test_contexts_that_exceed_the_kv_pool_are_refused(server: Server) -> None:
    answer = post(server, "/ext/chunks", chunks=[[9] * 4069], method="naive")
    assert answer.status_code == 400
    assert "fewer than 4096 tokens in total: split" in answer.text
    # Long contexts of a tenant do not keep others from being primed.
    more = {"cache_salt": "long"}
    create(server, [9] * 1500, method="naive", **more)
    (context,) = create(server, "A short one.", method="primed", **more)
    assert told(generate(server, "See: ", context, "Well?", **more))["method"] == "primed"


def test_repeated_blended_prompt_is_a_prefix_hit(server: Server, texts: list[str]) -> None:
    """Checks that the second prompt is a prefix hit, so that none of its tokens are linked."""
    ids = create(server, *texts[:2], method="blend-15", cache_salt="blend")
    for linked in (True, False):
        entry = told(generate(server, "See: ", *ids, "Well?", cache_salt="blend"))
        assert (entry["linked"] > 100) == linked
        assert min(entry[name] for name in ("linked", "recomputed", "missing")) >= 0


@pytest.mark.parametrize("method", ["query-15", "primed+query-15"])
def test_each_question_selects_its_own_tokens(
    server: Server, texts: list[str], method: str
) -> None:
    """Checks that only the same question finds the KV that it has selected."""
    ids = create(server, *texts[:3], method=method, cache_salt="query")
    for question, linked in (("Well?", True), ("Well?", False), ("Which?", True)):
        answer = generate(server, "See: ", *ids[1:], question, cache_salt="query")
        entry = told(answer)
        if linked:
            chunks = entry["linked"] + entry["recomputed"]
            assert chunks > 200
            assert entry["recomputed"] == 15 * chunks // 100
        else:
            assert entry["linked"] < 100
        assert (entry["method"], entry["missing"]) == (method, 0)


def test_chunks_whose_prefixes_exceed_the_pool_are_computed(
    server: Server, texts: list[str]
) -> None:
    """Links a prompt of half of the pool to chunks whose prefixes need more than the other half."""
    words = " ".join(texts).split()
    long = [" ".join(words[number:] * 9)[:3800] for number in range(3)]
    more = {"cache_salt": "room"}
    ids = create(server, *long, method="primed", **more)
    answer = generate(server, "Read: ", *ids[1:], "Well?", **more)
    (entry,) = answer["meta_info"]["ext"]
    assert entry["linked"] == 0
    assert entry["missing"] > 1500


def test_offline_method_recomputes_selected_tokens_of_each_chunk(
    server: Server, texts: list[str]
) -> None:
    ids = create(server, *texts[:3], method="primed+offline-16", cache_salt="primed")
    answer = generate(server, "Read this. ", ids[2], ids[0], "Well?", cache_salt="primed")
    entry = told(answer)
    assert entry["method"] == "primed+offline-16"
    assert entry["recomputed"] == 32
    assert entry["linked"] > 200


def test_completions_link_contexts(server: Server, texts: list[str]) -> None:
    (context,) = create(server, texts[0])
    prompt = [part("Look here: "), part(context), part(" Is it a text?")]
    greedy = {"temperature": 0, "max_new_tokens": 8}
    expected = post(server, "/generate", text=prompt, sampling_params=greedy).json()
    body = {"model": "", "prompt": prompt, "temperature": 0, "max_tokens": 8}
    found = post(server, "/v1/completions", **body).json()
    assert found["choices"][0]["text"] == expected["text"]
    assert found["usage"]["prompt_tokens"] == expected["meta_info"]["prompt_tokens"]
    lines = post(
        server, "/v1/completions", **body, stream=True, stream_options={"include_usage": True}
    ).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(c["text"] for each in chunks for c in each["choices"]) == expected["text"]
    # What the first request has linked is found on the device.
    for usage in (found["usage"], chunks[-1]["usage"]):
        assert usage["prompt_tokens_details"]["cached_tokens"] > 200


def test_chats_link_contexts_of_their_own_tenant(server: Server, texts: list[str]) -> None:
    ids = create(server, *texts[:2], cache_salt="chat")
    parts = [part("Read this. "), part(ids[1]), part(ids[0]), part("What is it about?")]
    message = {"role": "user", "content": parts}
    body = {"model": "", "messages": [message], "temperature": 0, "max_tokens": 8}
    body |= {"cache_salt": "chat", "return_meta_info": True}
    first, again = (post(server, "/v1/chat/completions", **body) for _ in range(2))
    assert first.status_code == 200, first.text
    one, other = (answer.json()["choices"][0] for answer in (first, again))
    (entry,) = first.json()["sglext"]["ext"]
    assert one["meta_info"]["ext"] == [entry]
    assert entry["method"] == "lego-16"
    assert (entry["recomputed"], entry["missing"]) == (32, 0)
    assert entry["linked"] > 200
    details = first.json()["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == one["meta_info"]["cached_tokens"] >= entry["linked"]
    # The second request hits the KV that the first one has linked.
    assert other["message"] == one["message"]
    assert other["meta_info"]["cached_tokens"] > 250
    other_tenant = post(server, "/v1/chat/completions", **{**body, "cache_salt": None})
    assert other_tenant.status_code == 404
    assert "does not exist" in other_tenant.text
    assert (
        "sglext" not in post(server, "/v1/chat/completions", **{**body, "messages": HELLO}).json()
    )
    body |= {"return_meta_info": False, "stream": True}
    lines = post(server, "/v1/chat/completions", **body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    said = [chunk["choices"] for chunk in chunks]
    (last,) = [chunk for chunk in chunks if "sglext" in chunk]
    assert last["sglext"]["ext"][0]["power"] == "chunks"
    assert last["choices"][0]["finish_reason"] == "length"
    text = "".join(choices[0]["delta"].get("content") or "" for choices in said if choices)
    assert text == one["message"]["content"]


def test_doctor_fails_above_the_largest_divergence(model: Path) -> None:
    check = linking(model, load({"chunks": {"largest_divergence": 1e-6}}))
    assert check.verdict == "fail"
    assert "more than chunks.largest_divergence = 1e-06" in check.found


def test_doctor_reports_the_divergence_of_a_server(
    server: Server, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def serve(systems: list[System], *_args: object, **_kw: object) -> Iterator[list[Server]]:
        assert systems[0].arguments[-1].startswith('{"memory"')
        yield [server]

    monkeypatch.setattr("sgl_ext.serving.server.serve", serve)
    check = linking(model, load({"chunks": {"method": "lego-16", "link": "always"}}))
    assert check.verdict == "ok"
    assert re.match(r"lego-16 diverges by 0\.\d+ nats \(limit 0.5\)", check.found)
    assert linking(model, load(None)).verdict == "note"


def test_metrics_count_linked_recomputed_and_missing_tokens(
    server: Server, texts: list[str]
) -> None:
    def metric(name: str, **labels: str) -> float:
        return value(server.url, f"sglang_ext:chunks_{name}", labels)

    (context,) = create(server, texts[0], method="lego-3", cache_salt="metrics")
    names = (
        "requests_total", "linked_tokens_total", "recomputed_tokens_total", "missing_tokens_total",
    )  # fmt: skip
    labels = {"method": "lego", "tp_rank": "0"}  # the kind of the method
    before = {name: metric(name, **labels) for name in names}
    answer = generate(server, "See: ", context, "Well?", cache_salt="metrics")
    entry, meta = told(answer), answer["meta_info"]
    cached = entry["linked"] + entry["prefix"]
    assert meta["cached_tokens_details"]["chunks"] == cached > 0
    assert meta["cached_tokens_details"]["device"] == meta["cached_tokens"] - cached
    (model,) = {
        each.labels["model_name"] for each in samples(server.url, "sglang:num_running_reqs")
    }
    labels["model_name"] = model
    found = [metric(name, **labels) - before[name] for name in names]
    assert found == [1, entry["linked"], 3, 0]
    probed = {"model_name": model, "method": "lego-16"}
    assert 0 < metric("divergence_nats", **probed) < 0.5
    assert metric("exactness_nats", **probed) < 1e-4


def test_unknown_deleted_and_foreign_contexts_return_404(server: Server, texts: list[str]) -> None:
    (context,) = create(server, texts[0])
    (other,) = create(server, texts[0], cache_salt="other")
    requests.delete(f"{server.url}/ext/chunks/{context}", timeout=DEADLINE_S)
    for id_ in (context, other, "ctx-nothing"):
        answer = post(server, "/generate", text=[part(id_), part("?")])
        assert answer.status_code == 404, answer.text
        assert "does not exist" in answer.text


def test_deleting_a_linked_context_keeps_the_running_answer(
    server: Server, texts: list[str]
) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 50, "ignore_eos": True}
    said = []
    for salt in ("stays", "goes"):
        ids = create(server, *texts[:2], cache_salt=salt)
        body = {
            "text": [part(ids[1]), part(ids[0]), part("Well?")], "cache_salt": salt,
            "sampling_params": sampling, "stream": True,
        }  # fmt: skip
        url = f"{server.url}/generate"
        with requests.post(url, json=body, stream=True, timeout=DEADLINE_S) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith(b"data: {"))
            next(lines)
            if salt == "goes":
                for id_ in ids:
                    url = f"{server.url}/ext/chunks/{id_}?cache_salt={salt}"
                    assert requests.delete(url, timeout=DEADLINE_S).status_code == 200
            *_, last = lines
        found = json.loads(last[6:])
        assert found["meta_info"]["completion_tokens"] == 50
        said.append(found["text"])
    assert said[0] == said[1]


def test_frontend_programs_select_after_a_chunk(server: Server, texts: list[str]) -> None:
    @sgl.function  # type: ignore[untyped-decorator]
    def judge(s: Any) -> None:
        s += "Read this. " + chunk(texts[0]) + " Is it a text? Answer:"
        s += sgl.select("answer", choices=[" yes", " no"])

    state = judge.run(backend=sgl.RuntimeEndpoint(server.url))
    assert state["answer"] in (" yes", " no")


def test_refused_prompts_do_not_affect_concurrent_requests(
    server: Server, texts: list[str]
) -> None:
    ids = create(server, *texts[:2], cache_salt="beside")
    good = {
        "text": [part(ids[0]), part(ids[1]), part("Well?")], "cache_salt": "beside",
        "sampling_params": {"temperature": 0, "max_new_tokens": 8},
    }  # fmt: skip
    alone = post(server, "/generate", **good).json()["output_ids"]
    bad = [
        {**good, "text": [part("ctx-none"), part("Well?")]},
        {**good, "return_logprob": True, "logprob_start_len": 0},
        {**good, "text": [*good["text"], 5]},
    ]
    with ThreadPoolExecutor(8) as threads:
        asked = [good, bad[0], good, bad[1], good, bad[2], good]
        answers = [*threads.map(lambda body: post(server, "/generate", **body), asked)]
    assert [answer.status_code for answer in answers] == [200, 404, 200, 400, 200, 400, 200]
    assert all(answer.json()["output_ids"] == alone for answer in answers[::2])


def test_evicted_contexts_are_renewed_after_a_miss(server: Server, texts: list[str]) -> None:
    more = {"cache_salt": "renewed"}
    ids = create(server, *texts[:2], method="lego-5", **more)
    post(server, "/generate", input_ids=[7] * 3704, sampling_params={"max_new_tokens": 1})

    def missing(number: int) -> int:
        lead = f"Read this for the {number}th time. "  # so that the prompt is not a prefix hit
        answer = generate(server, lead, ids[1], ids[0], "Well?", **more)
        (entry,) = answer["meta_info"]["ext"]
        return int(entry["missing"])

    assert missing(0) > 200
    # Renewal runs after the answer, so the next prompt may still miss.
    assert any(missing(number) == 0 for number in range(1, 6))


METHODS = "naive", "lego-4", "primed+offline-8", "blend-15", "query-15", "primed+query-9", "full"


class User:
    """Client that runs random operations in sequence; several clients share a server."""

    def __init__(self, server: Server, texts: list[str], seed: int) -> None:
        self.server = server
        self.texts = texts
        self.chance = random.Random(seed)  # noqa: S311
        self.expiry: dict[str, tuple[float, float]] = {}
        """Earliest and latest time at which each context expires."""
        self.salt = f"user-{seed % 2}"

    def run(self, steps: int) -> None:
        steps_of = (self.create, self.link, self.link, self.link, self.give_up, self.delete)
        for _ in range(steps):
            self.chance.choice(steps_of)()

    def create(self) -> None:
        method = self.chance.choice(METHODS)
        texts = [self.passage() for _ in range(self.chance.randint(2, 3))]
        ttl = self.chance.choice([0.5, 600])
        begin = time.monotonic()
        ids = create(self.server, *texts, method=method, ttl=ttl, cache_salt=self.salt)
        self.expiry |= dict.fromkeys(ids, (begin + ttl, time.monotonic() + ttl))

    def passage(self) -> str:
        text = self.chance.choice(self.texts)
        begin = self.chance.randrange(len(text) // 2)
        return text[begin : begin + self.chance.randint(30, 600)]

    def named(self) -> list[str]:
        return self.chance.sample([*self.expiry], min(len(self.expiry), self.chance.randint(1, 4)))

    def body(self, ids: list[str]) -> dict[str, Any]:
        parts = [part(each) for id_ in ids for each in (self.passage()[:80], id_)]
        sampling = {"temperature": 0, "max_new_tokens": self.chance.randint(1, 6)}
        text = [*parts, part("And then?")]
        return {"text": text, "sampling_params": sampling, "cache_salt": self.salt}

    def link(self) -> None:
        ids = self.named()
        body, begin = self.body(ids), time.monotonic()
        answer = post(self.server, "/generate", **body)
        assert answer.status_code in self.expected(ids, begin), answer.text
        if answer.status_code == 200 and ids:
            assert answer.json()["meta_info"]["ext"][0]["power"] == "chunks"

    def expected(self, ids: list[str], begin: float) -> set[int]:
        """Returns the statuses that a request for contexts may have, sent at ``begin``.

        It is one status, unless a context may have expired before the answer, which came just now.
        """
        end = time.monotonic()
        if any(self.expiry[id_][1] <= begin for id_ in ids):
            return {404}
        return {200, 404} if any(self.expiry[id_][0] <= end for id_ in ids) else {200}

    def give_up(self) -> None:
        """Sends a prompt and disconnects after a short time; SGLang then aborts the request."""
        with contextlib.suppress(requests.Timeout):
            url, wait = f"{self.server.url}/generate", self.chance.uniform(0.01, 0.4)
            requests.post(url, json=self.body(self.named()), timeout=wait)

    def delete(self) -> None:
        if self.expiry:
            id_ = self.chance.choice([*self.expiry])
            url = f"{self.server.url}/ext/chunks/{id_}?cache_salt={self.salt}"
            begin = time.monotonic()
            status = requests.delete(url, timeout=DEADLINE_S).status_code
            assert status in self.expected([id_], begin)
            del self.expiry[id_]


def test_random_operations_of_concurrent_clients_leak_no_kv(
    server: Server, texts: list[str]
) -> None:
    """Runs SGLEXT_ROUNDS operations while SGLang checks its memory in every step."""
    users = [User(server, texts, seed) for seed in range(3)]
    with ThreadPoolExecutor(len(users)) as threads:
        for running in [threads.submit(user.run, rounds(36) // len(users)) for user in users]:
            running.result()
    # A prompt that needs most of the pool is still admitted: no lock keeps its pages.
    prompt = {"input_ids": [5] * 3804, "sampling_params": {"max_new_tokens": 1}}
    answer = post(server, "/generate", **prompt)
    assert answer.status_code == 200, answer.text
    assert answer.json()["meta_info"]["prompt_tokens"] == 3804


def test_contexts_outlive_a_server_that_is_killed(
    model: Path, texts: list[str], tmp_path: Path
) -> None:
    section = {"method": "lego-16", "link": "always", "directory": str(tmp_path)}
    arguments = ("--max-total-tokens", "2048", "--page-size", "16", "--dtype", "float32")
    config = json.dumps({"chunks": section})
    system = System("kept", (*arguments, "--enable-ext", "--ext-config", config))
    progress: list[str] = []
    with serve([system], model, tmp_path / "logs") as (server,):
        cache = ContextCache(server.url)
        made = cache.create(texts[:2], tell=progress.append)
        ids = [each.id for each in made]
        before = generate(server, "Read this. ", *ids, "What is it about?")
        assert cache.pin(ids[1]).pinned
        short = cache.create(["A text that expires soon."], ttl=1e-3)
        for process in [*reversed(server.process.children(recursive=True)), server.process]:
            process.send_signal(signal.SIGKILL)
    assert progress == ["1/2", "2/2"]
    with serve([system], model, tmp_path / "logs") as (server,):
        cache = ContextCache(server.url)
        assert [(each.id, each.tokens, each.pinned) for each in cache.list()] == [
            (each.id, each.tokens, each.id == ids[1]) for each in made
        ]
        with pytest.raises(UnknownContextError):
            cache.get(short[0].id)
        answer = generate(server, "Read this. ", *ids, "What is it about?")
        (entry,) = answer["meta_info"]["ext"]
        assert entry["missing"] > 0  # computed, and renewed in the background

        def linked() -> bool:
            again = generate(server, "Read that. ", *ids, "What is it about?")
            return bool(again["meta_info"]["ext"][0]["missing"] == 0)

        until(linked, within=120)
        post(server, "/flush_cache")
        until(linked, within=120)  # from here on as in the first server
        answer = generate(server, "Read this. ", *ids, "What is it about?")
        assert told(answer)["linked"] > 100
        assert answer["output_ids"] == before["output_ids"]
