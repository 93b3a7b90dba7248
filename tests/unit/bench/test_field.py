"""Plain parts of the benchmark ``field``: tasks, schedules, prompts, figures, and its client."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from sgl_ext.bench.chunks.prompts import Template
from sgl_ext.bench.field import bench
from sgl_ext.bench.field.dataset import report_dataset
from sgl_ext.bench.field.hit_rate import continued, prompts
from sgl_ext.bench.field.multiturn import MultiturnSizes, replay, texts_of
from sgl_ext.bench.field.rounds import Drawn, Rounds
from sgl_ext.bench.field.ruler import prompt_of
from sgl_ext.bench.field.ruler_tasks import KINDS, chunks_of, hidden, score, task
from sgl_ext.bench.field.sglang_client import Served, benchmark
from sgl_ext.bench.field.shared_prefix import SharedPrefixSizes
from sgl_ext.bench.field.systems import ratios
from sgl_ext.bench.harness.load_generator import RequestError
from sgl_ext.bench.harness.report import Report
from sgl_ext.bench.harness.sampling import rotated
from sgl_ext.errors import ExtError
from sgl_ext.serving.server import Server, System


@pytest.mark.parametrize("kind", KINDS)
def test_the_answers_of_a_task_are_in_its_facts_only(kind: Any) -> None:
    for number in range(20):
        made = task(kind, number)
        assert made == task(kind, number)
        assert made.facts != task(kind, number + 1).facts
        facts = " ".join(made.facts)
        assert all(each in facts for each in made.answers)
        assert len({*made.answers}) == len(made.answers)
        assert not any(each in made.question + made.begin for each in made.answers)


def test_a_key_is_asked_for_among_others() -> None:
    places = set()
    for number in range(20):
        made = task("multi-key", number)
        (answer,) = made.answers
        (place,) = (at for at, fact in enumerate(made.facts) if answer in fact)
        key = made.facts[place].removeprefix("One of the special magic numbers for ")
        assert key.partition(" is:")[0] in made.question
        assert len(made.facts) == 4
        places.add(place)
    assert places == {0, 1, 2, 3}
    assert len(task("single", 0).facts) == len(task("single", 0).answers) == 1


def test_all_values_of_a_key_are_asked_for() -> None:
    made = task("multi-value", 0)
    assert len(made.answers) == len(made.facts) == 4
    assert len({fact.partition(" is:")[0] for fact in made.facts}) == 1


def test_all_variables_have_the_value_by_assignments_in_order() -> None:
    made = task("variables", 3)
    values: dict[str, str] = {}
    for fact in made.facts:
        name, _, of = fact.removeprefix("VAR ").removesuffix(".").partition(" = ")
        values[name] = values[of.removeprefix("VAR ")] if of.startswith("VAR ") else of
    (value,) = {*values.values()}
    assert [*values] == [*made.answers]
    assert value in made.question


def test_the_score_is_the_share_of_answers_that_are_named() -> None:
    assert score("12 and abc", ["12", "ABC", "34", "56"]) == 0.5
    assert score("", ["12"]) == 0
    assert score("it is 12.", ["12"]) == 1


def test_facts_keep_their_order_within_and_between_chunks() -> None:
    seen: set[tuple[int, ...]] = set()
    for seed in range(50):
        chance = random.Random(seed)  # noqa: S311
        found = chunks_of(3, 4, chance)
        assert found == sorted(found)
        seen.add(tuple(found))
        sentences = [[number] * 4 for number in range(100)]
        ids = hidden(sentences, [[1000], [1001], [1002]], 23, chance)
        assert [each for each in ids if each >= 1000] == [1000, 1001, 1002]
        assert [each for each in ids if each < 1000] == [n for n in range(5) for _ in range(4)]
        # Facts are between sentences, never within one.
        groups = [len([*group]) for each, group in itertools.groupby(ids) if each < 1000]
        assert groups == [4] * 5
    assert {0, 1, 2, 3} == {each for places in seen for each in places}
    assert hidden([[1] * 9], [[7]], 9, random.Random(0)) == [7]  # noqa: S311
    with pytest.raises(ExtError, match="a chunk of 2 tokens is too small"):
        hidden([], [[1, 2, 3]], 2, random.Random(0))  # noqa: S311


@pytest.fixture(scope="module")
def template(model: Path) -> Template:
    return Template.of_model(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_has_the_facts_of_its_task_once(kind: Any, template: Template) -> None:
    sentences = [f"Sentence {number} says nothing else." for number in range(4000)]
    for number in range(3):
        made = task(kind, number)
        prompt = prompt_of(template, sentences, made, length=1500, tokens=400)
        assert 1400 < len(prompt.tokens) <= 1500
        assert all(len(chunk) <= 400 for chunk in prompt.chunks)
        text = template.tokenizer.decode(prompt.tokens)
        at = [text.index(fact) for fact in made.facts]
        assert at == sorted(at)
        assert all(text.count(fact) == 1 for fact in made.facts)
        assert text.endswith(made.begin)
        assert made.question in prompt.question
        linked = [token for chunk in prompt.chunks for token in chunk]
        assert [*prompt.tokens] == [
            *template.encode(prompt.prefix), *linked, *template.encode(prompt.question)
        ]  # fmt: skip
    with pytest.raises(ExtError, match="the text has 1 chunks of 400 tokens, not 4"):
        prompt_of(template, sentences[:300], task(kind, 0), length=1500, tokens=400)


def drawn_in_order(rounds: Rounds, chance: random.Random) -> list[Drawn]:
    """Returns all requests, of which random ones are answered as soon as none can be drawn."""
    found: list[Drawn] = []
    unanswered: list[int] = []
    while rounds.left:
        if (drawn := rounds.draw()) is None:
            rounds.answered(unanswered.pop(chance.randrange(len(unanswered))))
            continue
        found.append(drawn)
        unanswered.append(drawn.client)
        assert len(unanswered) <= 3
        assert len({*unanswered}) == len(unanswered)
    return found


def test_every_client_sends_its_rounds_in_order() -> None:
    found = drawn_in_order(Rounds(5, 4, 3, seed=0), random.Random(0))  # noqa: S311
    for client in range(5):
        assert [each.round for each in found if each.client == client] == [0, 1, 2, 3]
    assert len(found) == 20
    again = drawn_in_order(Rounds(5, 4, 3, seed=0), random.Random(0))  # noqa: S311
    other = drawn_in_order(Rounds(5, 4, 3, seed=1), random.Random(0))  # noqa: S311
    assert found == again
    assert found != other


def test_a_client_is_ready_only_after_its_answer() -> None:
    rounds = Rounds(1, 2, 3, seed=0)
    assert rounds.draw() == (0, 0)
    assert rounds.draw() is None
    rounds.answered(0)
    assert rounds.draw() == (0, 1)
    rounds.answered(0)
    assert rounds.draw() is None
    assert rounds.left == 0
    with pytest.raises(KeyError):
        rounds.answered(0)


@pytest.mark.parametrize("percentage", [0, 25, 50, 75, 100])
def test_a_continued_prompt_repeats_exactly_a_percentage(percentage: int) -> None:
    before = prompts(6, 64)
    assert len({tuple(each[:8]) for each in before}) == 6
    for prompt in before:
        after = continued(prompt, percentage)
        assert after == continued(prompt, percentage)
        assert len(after) == len(prompt) == 64
        same = [a == b for a, b in zip(prompt, after, strict=True)]
        assert len([*itertools.takewhile(bool, same)]) == 64 * percentage // 100
    rests = {tuple(continued(each, percentage)[-8:]) for each in before}
    assert len(rests) == 6


def test_ratios_compare_our_systems_with_stock_and_hicache() -> None:
    found = ratios("ttft", {"stock": 4.0, "hicache": 2.0, "tiers": 1.0, "restore": 3.0})
    assert found == {
        "ttft_ratio_tiers_vs_stock": 0.25,
        "ttft_ratio_tiers_vs_hicache": 0.5,
        "ttft_ratio_restore_vs_stock": 0.75,
        "ttft_ratio_restore_vs_hicache": 1.5,
    }
    assert [rotated(["a", "b", "c"], number)[0] for number in range(4)] == ["a", "b", "c", "a"]
    assert rotated(["a", "b", "c"], 1) == ["b", "c", "a"]


def test_linked_chunks_alone_need_two_servers() -> None:
    whole = bench.minutes(Namespace(part=[], quick=False))
    parts = [bench.minutes(Namespace(part=[each], quick=False)) for each in bench.PARTS]
    assert max(parts) < whole < min(15, sum(parts))  # the parts share their servers
    assert bench.minutes(Namespace(part=[], quick=True)) < 4
    assert [*bench._systems(bench._WHOLE, ["ruler"])] == ["stock"]
    assert [*bench._systems(bench._WHOLE, ["ruler", "hit-rate"])] == [
        "stock", "hicache", "tiers", "restore",
    ]  # fmt: skip


class _Stub(BaseHTTPRequestHandler):
    """Server that answers each prompt with its number of requests, and knows 3 tokens of each."""

    bodies: list[dict[str, Any]]
    refuse = False

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "stub"}], "internal_states": []}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if self.refuse:
            self._send("no", 400)
            return
        count = body["sampling_params"]["max_new_tokens"]
        length = len(body.get("text") or body["input_ids"])
        chunks = []
        for number in range(1, count + 1):
            meta = {"prompt_tokens": length, "cached_tokens": 3, "completion_tokens": number}
            chunks.append({"text": "a" * number, "meta_info": meta})
        self._send("".join(f"data: {json.dumps(each)}\n\n" for each in chunks))

    def _send(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def stub(*, refuse: bool = False) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yields the URL of a stub, and the bodies of its requests."""
    bodies: list[dict[str, Any]] = []
    handler = type("Stub", (_Stub,), {"bodies": bodies, "refuse": refuse})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", bodies
        finally:
            server.shutdown()
            thread.join()


_SHARED = SharedPrefixSizes(
    groups=3, prompts=2, system=20, question=5, answer=4, parallel=2, runs=1
).arguments(7)


def test_sglangs_benchmark_sends_groups_of_shared_prefixes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # SGLang keeps the prompts in it
    with stub() as (url, bodies):
        found = benchmark(url, model, tmp_path / "log", _SHARED)
        sent = sorted(body["input_ids"] for body in bodies)
        bodies.clear()
        benchmark(url, model, tmp_path / "log", _SHARED)
        assert sorted(body["input_ids"] for body in bodies) == sent
    assert [len(each) for each in sent] == [25] * 6
    assert sorted(Counter(tuple(each[:20]) for each in sent).values()) == [2, 2, 2]
    assert len(found.ttft) == 6
    assert all(each > 0 for each in found.ttft)
    assert (found.prompts, found.cached) == (150, 18)
    assert found.tokens_per_s > 0
    assert "Serving Benchmark Result" in (tmp_path / "log").read_text()
    assert "Serving Benchmark Result" not in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")  # SGLang's means of nothing
def test_a_refused_request_is_an_error(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    sizes = MultiturnSizes(clients=2, rounds=2, length=1, answer=2, parallel=2, runs=1)
    with stub(refuse=True) as (url, _):
        with pytest.raises(RequestError, match=r"benchmark failed against http.*; its output .*"):
            benchmark(url, model, tmp_path / "log", _SHARED)
        with pytest.raises(RequestError, match="Bad Request: no"):
            asyncio.run(replay(url, ["a"] * 4, sizes, 1000.0, 0))


def test_a_round_follows_the_clients_earlier_rounds_and_answers() -> None:
    sizes = MultiturnSizes(clients=3, rounds=2, length=1, answer=2, parallel=2, runs=1)
    texts = ["zero, ", "zero again", "one, ", "one again", "two, ", "two again"]
    with stub() as (url, bodies):
        found = asyncio.run(replay(url, texts, sizes, 1000.0, 0))
    assert sorted(body["text"] for body in bodies) == sorted(
        text for name in ("zero", "one", "two")
        for text in (f"{name}, ", f"{name}, aa\n\n{name} again")
    )  # fmt: skip
    assert sorted(one.round for one in found) == [0, 0, 0, 1, 1, 1]
    assert {one.answer.text for one in found} == {"aa"}
    assert {one.answer.cached_tokens for one in found} == {3}
    assert all(one.answer.ttft > 0 for one in found)


def test_the_mean_prompt_includes_earlier_rounds() -> None:
    sizes = MultiturnSizes(clients=1, rounds=3, length=100, answer=10, parallel=1, runs=1)
    assert sizes.mean_prompt == (100 + 210 + 320) // 3


def test_texts_of_rounds_differ_and_have_a_length(model: Path, template: Template) -> None:
    texts = texts_of(model, 12, 300)
    assert len({*texts}) == 12
    assert all(290 <= len(template.encode(text)) <= 310 for text in texts)


def test_requests_of_a_data_set_that_were_refused_are_no_answers() -> None:
    record = {
        "dataset_name": "custom", "duration": 2.0,
        "ttfts": [0.5, 0.0, 0.25, 0.0], "itls": [[0.1, 0.2], [], [0.3], []],
        "input_lens": [100, 9000, 50, 7], "output_lens": [3, 8, 2, 8],
        "cached_tokens": [64, 0, 0, 0], "errors": ["", "Bad Request: too long\n", "", ""],
    }  # fmt: skip
    assert Served.of(record) == Served(
        dataset="custom", ttft=[0.5, 0.25], between=[0.1, 0.2, 0.3], prompts=150, cached=64,
        tokens_per_s=77.5, refused=2, error="Bad Request: too long",
    )  # fmt: skip


def test_a_data_set_is_sent_by_sglangs_own_benchmark(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    trace = [
        {"timestamp": 0, "input_length": 1, "output_length": 2, "hash_ids": [number]}
        for number in range(2)
    ]
    (tmp_path / "trace").write_text("".join(json.dumps(each) + "\n" for each in trace))
    words = ["--dataset-name", "mooncake", "--dataset-path", str(tmp_path / "trace")]
    report = Report("field-dataset", {})
    with stub() as (url, bodies):
        server = Server(System("stock", ()), url, tmp_path / "log", psutil.Popen(["true"]))
        report_dataset(report, [server], model, tmp_path, [*words, "--num-prompts", "2"])
        texts = {body["text"] for body in bodies if "Tell me a story" in str(body.get("text"))}
    assert len(texts) == 2
    (run,) = report.runs
    assert (run["system"], run["samples"], run["refused"]) == ("stock", 2, 0)
    assert run["cached_share"] > 0
    assert run["ttft_ms_p50"] > 0


def test_an_open_quotation_in_the_arguments_of_a_data_set_is_refused() -> None:
    with pytest.raises(ExtError, match="cannot read --dataset"):
        bench._words("--dataset-path 'a")
