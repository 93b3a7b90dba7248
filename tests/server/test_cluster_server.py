"""Tests of stored contexts, and of requests that follow them, on a real server."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from conftest import until
from http_fuzz_kit import bombard
from planted_kit import content_of, planted
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from typer.testing import CliRunner

from sgl_ext.bench.data.questions import questions
from sgl_ext.cli import app
from sgl_ext.clusters.files import own_folders
from sgl_ext.clusters.paths import index_file
from sgl_ext.clusters.records import remove_record
from sgl_ext.engine.clusters.metrics import BLOCKS
from sgl_ext.serving.http import live
from sgl_ext.serving.server import Server, System, serve

DEADLINE_S = 300.0
_CONTEXT, _DEVICES = 1500, 3


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [tmp_path_factory.mktemp(f"device{at}") for at in range(_DEVICES)]


@pytest.fixture(scope="module")
def folders(directories: list[Path]) -> tuple[Path, ...]:
    """Folders of stored contexts in the directories."""
    return own_folders(directories)


@pytest.fixture(scope="module")
def server(
    model: Path, directories: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    section = {
        "directories": [*map(str, directories)], "largest": 1.0, "hot": "1600KiB", "prefetch": 2.0,
    }  # fmt: skip
    arguments = (
        "--max-total-tokens", "12000", "--page-size", "16", "--dtype", "float32",
        "--enable-metrics", "--enable-ext", "--ext-config", json.dumps({"clusters": section}),
    )  # fmt: skip
    system = System("clusters", arguments)
    with serve([system], model, tmp_path_factory.mktemp("logs")) as (running,):
        yield running


@pytest.fixture(scope="module")
def asked(model: Path) -> tuple[list[int], list[list[int]]]:
    """Token ids of a context, and of prompts that follow it."""
    tokenizer = AutoTokenizer.from_pretrained(model)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    all_of_them = questions("hotpotqa")[:12]
    documents = [str(each) for one in all_of_them for each in one.documents if each.gold]
    context = encode("".join(documents))[:_CONTEXT]
    return context, [encode(f"\n\nQuestion: {one.question}\nAnswer:") for one in all_of_them[:4]]


@pytest.fixture(scope="module")
def stored(server: Server, asked: tuple[list[int], list[list[int]]]) -> dict[str, Any]:
    body = {"input_ids": asked[0]}
    answer = requests.post(f"{server.url}/ext/clusters", json=body, timeout=DEADLINE_S)
    assert answer.ok, answer.text
    found: dict[str, Any] = answer.json()
    return found


def generate(
    server: Server,
    prompt: list[int],
    context: str | list[str] | None = None,
    *,
    told: dict[str, Any] | None = None,
    tokens: int = 6,
    **more: Any,
) -> requests.Response:
    """Requests a greedy answer to a prompt, which follows a stored context if one is given.

    Args:
        context: id of the stored context, or those of several.
        told: fields of the request, by default those that return logprobs.
        tokens: number of new tokens.
        more: further parameters of the stored context.
    """
    follows = {} if context is None else {"ext_stored": {"id": context, **more}}
    body = {
        "input_ids": prompt,
        **(told or {"return_logprob": True}),
        "sampling_params": {
            "temperature": 0, "max_new_tokens": tokens, "ignore_eos": True,
            "custom_params": follows,
        },
    }  # fmt: skip
    return requests.post(f"{server.url}/generate", json=body, timeout=DEADLINE_S)


def logprobs(answer: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def test_a_created_context_is_stored_and_listed(
    server: Server, stored: dict[str, Any], folders: tuple[Path, ...]
) -> None:
    assert stored["tokens"] == _CONTEXT
    assert stored["index_bytes"] < stored["bytes"]
    sizes = [sum(file.stat().st_size for file in each.glob("*.blocks")) for each in folders]
    assert stored["bytes"] <= sum(sizes) <= 1.01 * stored["bytes"]
    listed = requests.get(f"{server.url}/ext/clusters/list", timeout=60).json()
    assert listed == {"contexts": [stored], "unreadable": {}, "damaged": 0, "storing": {}}
    one = requests.get(f"{server.url}/ext/clusters/{stored['id']}", timeout=60)
    assert one.json() == stored


def test_reading_all_blocks_equals_dense_attention(
    server: Server, stored: dict[str, Any], asked: tuple[list[int], list[list[int]]]
) -> None:
    context, prompts = asked
    for prompt in prompts[:2]:
        # More new tokens than a page holds.
        dense = generate(server, [*context, *prompt], tokens=20).json()
        found = generate(server, prompt, stored["id"], sparsity=1.0, tokens=20).json()
        assert found["output_ids"] == dense["output_ids"]
        assert logprobs(found) == pytest.approx(logprobs(dense), abs=2e-4)
        assert found["meta_info"]["ext"] == [
            {
                "power": "clusters", "exact": True, "context": stored["id"],
                "tokens": _CONTEXT, "sparsity": 1.0,
            }
        ]  # fmt: skip


def test_requests_of_every_route_follow_a_context(
    server: Server, stored: dict[str, Any], asked: tuple[list[int], list[list[int]]]
) -> None:
    prompt, follow = asked[1][0], {"ext_stored": {"id": stored["id"], "sparsity": 1.0}}
    expected = generate(server, prompt, stored["id"], sparsity=1.0).json()

    def post(path: str, **body: Any) -> dict[str, Any]:
        answer = requests.post(f"{server.url}{path}", json={**body, **follow}, timeout=DEADLINE_S)
        assert answer.ok, answer.text
        found: dict[str, Any] = answer.json()
        return found

    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    found = post("/generate", input_ids=prompt, sampling_params=sampling)
    assert found["output_ids"] == expected["output_ids"]
    more = {"model": "", "temperature": 0, "max_tokens": 6, "ignore_eos": True}
    found = post("/v1/completions", prompt=prompt, **more)
    assert found["choices"][0]["text"] == expected["text"]
    messages = [{"role": "user", "content": "Who is it about?"}]
    chat = post("/v1/chat/completions", messages=messages, **more)
    for each in (found, chat):
        (entry,) = each["sglext"]["ext"]
        assert (entry["power"], entry["context"]) == ("clusters", stored["id"])


def test_a_context_larger_than_the_kv_pool_is_stored(
    server: Server, asked: tuple[list[int], list[list[int]]], model: Path, tmp_path: Path
) -> None:
    """The pool holds 768 tokens, so that the context is computed in four parts.

    A request that is interrupted after two of them goes on with the third. Of two devices, each of
    which has a copy of the blocks, one is lost.
    """
    context, prompts = asked
    devices = [tmp_path / "device0", tmp_path / "device1"]
    for each in devices:
        each.mkdir()
    section = {"directories": [*map(str, devices)], "largest": 1.0, "copies": 2, "hot": "64KiB"}
    arguments = (
        "--max-total-tokens", "768", "--page-size", "16", "--dtype", "float32",
        "--enable-ext", "--ext-config", json.dumps({"clusters": section}),
    )  # fmt: skip
    with serve([System("small", arguments)], model, tmp_path / "logs") as (small,):
        url = f"{small.url}/ext/clusters"

        def stored(tokens: list[int]) -> Generator[dict[str, Any]]:
            body = {"input_ids": tokens, "stream": True}
            with requests.post(url, json=body, stream=True, timeout=DEADLINE_S) as answer:
                for line in answer.iter_lines():
                    if line:
                        yield json.loads(line.removeprefix(b"data: "))

        def interrupted(tokens: list[int]) -> None:
            """Closes the connection when two parts are recorded."""
            events, said = stored(tokens), list[str]()
            while len(said) < 4:
                said.append(next(events)["progress"])
            each = len(tokens) // 4
            assert said == [
                "waiting", *(f"computing {done}/{len(tokens)}" for done in (0, each, 2 * each))
            ]  # fmt: skip
            events.close()
            until(lambda: not requests.get(f"{url}/list", timeout=60).json()["storing"], within=60)

        interrupted(context)
        events, said = stored(context), list[str]()
        while not said or not said[-1].startswith("computing"):
            said.append(next(events)["progress"])
        assert said[-1] in ("computing 750/1500", "computing 1125/1500")
        # The last part is preempted, and computed again.
        while said[-1] == "computing 750/1500":
            said.append(next(events)["progress"])
        requests.post(f"{small.url}/pause_generation", json={"mode": "retract"}, timeout=60)
        requests.post(f"{small.url}/continue_generation", json={}, timeout=60)
        *_, last = events
        assert last["tokens"] == 1500, last

        # A part is damaged: the error is the last event, and nothing is left.
        interrupted(context[:1400])
        (record,) = tmp_path.rglob("*.recorded")
        part = min(record.glob("*.part"))
        with part.open("r+b") as opened:  # In place: the scheduler may still read the file.
            opened.seek(-1, os.SEEK_END)
            (byte,) = opened.read(1)
            opened.seek(-1, os.SEEK_END)
            opened.write(bytes([byte ^ 1]))
        *_, refused = stored(context[:1400])
        assert "is damaged" in refused["error"]["message"]
        assert not [*tmp_path.rglob("*.recorded*")]
        for number, prompt in enumerate(prompts[:3]):
            dense = generate(server, [*context, *prompt], tokens=10).json()
            found = generate(small, prompt, last["id"], sparsity=1.0, tokens=10).json()
            assert found["output_ids"] == dense["output_ids"]
            assert logprobs(found) == pytest.approx(logprobs(dense), abs=2e-4)
            if not number:
                assert live(small.url)["clusters"]["open"][last["id"]]["lost"] == []
                for file in own_folders(devices)[0].glob(f"{last['id']}*"):
                    os.truncate(file, 0)
        assert live(small.url)["clusters"]["open"][last["id"]]["lost"] == [0]
        assert requests.get(f"{url}/{last['id']}", timeout=60).json()["tokens"] == 1500
        # Room for a request of the whole pool: no KV of the parts is held.
        assert generate(small, context[:700], tokens=10).ok
        assert not [*tmp_path.rglob("*.recorded*")]


def blocks_given(server: Server) -> float:
    """Returns the sum of the block counters in ``/metrics``."""
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    name = "sglang_ext:clusters_blocks_total{"
    return sum(float(line.rsplit(" ")[-1]) for line in text.splitlines() if line.startswith(name))


def test_reading_more_blocks_reduces_the_error_of_logprobs(
    server: Server, stored: dict[str, Any], asked: tuple[list[int], list[list[int]]]
) -> None:
    """Logprobs of a prompt approach dense attention as queries read a larger share of blocks."""
    context, prompts = asked
    off: dict[float, list[float]] = {0.01: [], 0.1: [], 0.4: []}
    for prompt in prompts:
        told = {"return_logprob": True, "logprob_start_len": len(context)}
        dense = generate(server, [*context, *prompt], told=told).json()
        expected = [entry[0] for entry in dense["meta_info"]["input_token_logprobs"]][1:]
        for share, found in off.items():
            told = {"return_logprob": True, "logprob_start_len": 0}
            answer = generate(server, prompt, stored["id"], told=told, sparsity=share).json()
            (entry,) = answer["meta_info"]["ext"]
            assert not entry["exact"]
            given = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]][1:]
            assert len(given) == len(expected) == len(prompt) - 1
            found += [abs(one - other) for one, other in zip(given, expected, strict=True)]
    mean = {share: statistics.mean(found) for share, found in off.items()}
    assert mean[0.4] < mean[0.1] < mean[0.01]
    assert mean[0.1] < 0.3
    state = live(server.url)["clusters"]["open"][stored["id"]]
    assert min(state["requests"], state["fetched"], state["prefetched"]) > 0
    until(lambda: blocks_given(server) == sum(state[name] for name in BLOCKS), within=60)


def test_concurrent_dense_and_sparse_requests_keep_their_answers(
    server: Server, stored: dict[str, Any], asked: tuple[list[int], list[list[int]]]
) -> None:
    """Each request answers as it does alone; a later turn hits the KV of its earlier turn."""
    context, prompts = asked
    kinds: list[tuple[list[int], dict[str, Any]]] = [
        ([*context[:200], *prompts[0]], {}),
        (prompts[1], {"context": stored["id"], "sparsity": 0.2}),
        (prompts[2], {"context": stored["id"], "sparsity": 0.2}),
        (prompts[3], {"context": stored["id"], "sparsity": 1.0}),
    ]
    alone = [generate(server, prompt, **how).json() for prompt, how in kinds]
    requests.post(f"{server.url}/flush_cache", timeout=60)
    with ThreadPoolExecutor(len(kinds)) as threads:
        together = [
            future.result().json()
            for future in [threads.submit(generate, server, p, **how) for p, how in kinds]
        ]
    for one, other in zip(alone, together, strict=True):
        assert other["output_ids"][:4] == one["output_ids"][:4]
        assert logprobs(other)[:4] == pytest.approx(logprobs(one)[:4], abs=1e-2)
    longer = [*prompts[2], *together[2]["output_ids"], *prompts[3]]
    turn = generate(server, longer, stored["id"], sparsity=0.2).json()
    assert turn["meta_info"]["cached_tokens"] >= len(prompts[2]) // 16 * 16
    # KV that was computed with another sparsity is not reused.
    turn = generate(server, longer, stored["id"], sparsity=0.25).json()
    assert turn["meta_info"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("follows", "status", "message"),
    [
        ({"id": "stx-nothing"}, 404, "stored context 'stx-nothing' not found"),
        ({"id": "../x"}, 400, "invalid parameter of a stored context"),
        ({"id": ["stx-nothing", "stx-a"]}, 404, "stored context 'stx-nothing' not found"),
        ({"id": []}, 400, "invalid parameter of a stored context"),
        ({"id": ["stx-a"] * 17}, 400, "invalid parameter of a stored context"),
        ({"id": ["stx-a", 5]}, 400, "invalid parameter of a stored context"),
        ({"id": "stx-a\n"}, 400, "invalid parameter of a stored context"),
        ({"id": "stx-" + 64 * "\U00010400"}, 400, "invalid parameter of a stored context"),
        ({"sparsity": 2}, 400, "invalid parameter of a stored context"),
        ({"sparsity": "much"}, 400, "invalid parameter of a stored context"),
        ({"share": 0.5}, 400, "invalid parameter of a stored context"),
        (
            {"sparsity": json.loads("[" * 80 + "]" * 80)},
            400,
            "invalid parameter of a stored context",
        ),
    ],
)
def test_unknown_contexts_and_invalid_parameters_are_refused(
    server: Server, stored: dict[str, Any], follows: dict[str, Any], status: int, message: str
) -> None:
    more = {"id": stored["id"], **follows}
    answer = generate(server, [5, 6, 7], more.pop("id"), **more)
    assert answer.status_code == status, answer.text
    assert message in answer.text


def test_the_cluster_command_stores_a_record_while_the_server_runs(
    server: Server, asked: tuple[list[int], list[list[int]]], directories: list[Path]
) -> None:
    context, prompts = asked
    body = {"input_ids": context[:800], "record_only": True}
    answer = requests.post(f"{server.url}/ext/clusters", json=body, timeout=DEADLINE_S)
    record = answer.json()["record"]
    command = ["cluster", record, *map(str, directories), "--name"]
    result = CliRunner().invoke(app, [*command, "by-hand"])
    assert result.exit_code == 0, result.output
    id_ = result.output.split()[-1]
    assert id_.startswith("stx-by-hand-")
    found = generate(server, prompts[0], id_, sparsity=1.0).json()
    dense = generate(server, [*context[:800], *prompts[0]]).json()
    assert found["output_ids"] == dense["output_ids"]
    outside = CliRunner().invoke(app, [*command, "../by-hand"])
    assert outside.exit_code == 1
    assert "A-Z" in outside.output
    remove_record(Path(record))
    assert id_ in live(server.url)["clusters"]["open"]
    opened = live(server.url)["clusters"]["open"].values()
    given = sum(one[name] for one in opened for name in BLOCKS)
    until(lambda: blocks_given(server) == given, within=60)
    assert requests.delete(f"{server.url}/ext/clusters/{id_}", timeout=60).ok
    # The files of a deleted context occupy space until it is closed.
    until(lambda: id_ not in live(server.url)["clusters"]["open"], within=60)
    time.sleep(2)
    assert blocks_given(server) == given


def test_the_store_command_shows_progress_and_prints_the_id(
    server: Server, asked: tuple[list[int], list[list[int]]], model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "context.txt"
    file.write_text(AutoTokenizer.from_pretrained(model).decode(asked[0]))
    command = ["store", str(file), "--url", server.url]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.stderr
    id_ = done.stdout.strip()
    found = requests.get(f"{server.url}/ext/clusters/{id_}", timeout=60).json()
    assert f"{found['tokens']} tokens in " in done.stderr
    requests.delete(f"{server.url}/ext/clusters/{id_}", timeout=60)

    with requests.post(
        f"{server.url}/ext/clusters", json={"input_ids": asked[0], "stream": True}, stream=True,
        timeout=DEADLINE_S,
    ) as answer:  # fmt: skip
        lines = [line.removeprefix(b"data: ") for line in answer.iter_lines() if line]
    *progress, last = map(json.loads, lines)
    said = [one["progress"] for one in progress]
    assert said[:2] == ["waiting", f"computing 0/{_CONTEXT}"]
    assert said[-1].startswith("layer ")
    requests.delete(f"{server.url}/ext/clusters/{last['id']}", timeout=60)

    file.write_text("Too short.")
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert "sgl_ext: the context has " in done.stderr
    listed = requests.get(f"{server.url}/ext/clusters/list", timeout=60).json()
    assert listed["storing"] == {}


def test_forged_cache_keys_are_refused_and_forged_parameters_ignored(
    server: Server, stored: dict[str, Any], asked: tuple[list[int], list[list[int]]]
) -> None:
    for forged in (f"ext:stored:{stored['id']}:0.1", "ext:recorded:stx-a"):
        body = {"input_ids": asked[1][0], "extra_key": forged}
        answer = requests.post(f"{server.url}/generate", json=body, timeout=DEADLINE_S)
        assert answer.status_code == 400, answer.text
        assert "is reserved for the server" in answer.text
    own = {
        "ext_recorded": {
            "id": "stx-a", "part": "kv-0", "start": 0, "tokens": 3, "kv": True, "queries": 1,
            "keep": False,
        }
    }  # fmt: skip
    sampling = {"max_new_tokens": 1, "custom_params": own}
    request = {"input_ids": [5, 6, 7, 8], "sampling_params": sampling}
    answer = requests.post(f"{server.url}/generate", json=request, timeout=DEADLINE_S)
    assert "ext" not in answer.json()["meta_info"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 422),
        ({"text": ""}, 422),
        ({"text": "a", "input_ids": [1]}, 422),
        ({"input_ids": [1] * 900, "base": "stx-a", "record_only": True}, 422),
        ({"input_ids": [1] * 900, "base": "../stx-a"}, 404),
        ({"input_ids": [1] * 50}, 400),
        ({"input_ids": [-1] * 900}, 400),
        ({"input_ids": [1] * 20_000}, 400),
    ],
)
def test_invalid_contexts_are_refused_and_leave_no_files(
    server: Server, body: dict[str, Any], status: int, folders: tuple[Path, ...]
) -> None:
    before = sorted(path.name for each in folders for path in each.iterdir())
    answer = requests.post(f"{server.url}/ext/clusters", json=body, timeout=DEADLINE_S)
    assert answer.status_code == status, answer.text
    assert sorted(path.name for each in folders for path in each.iterdir()) == before


def test_a_device_failure_fails_only_requests_that_read_from_it(
    server: Server,
    asked: tuple[list[int], list[list[int]]],
    folders: tuple[Path, ...],
) -> None:
    context, prompts = asked
    body = {"input_ids": context[:900], "cache_salt": "a tenant"}
    created = requests.post(f"{server.url}/ext/clusters", json=body, timeout=DEADLINE_S)
    id_ = created.json()["id"]
    salted = {"return_logprob": True, "cache_salt": "a tenant"}

    def follow(prompt: list[int], share: float) -> requests.Response:
        return generate(server, prompt, id_, told=salted, sparsity=share)

    assert generate(server, prompts[0], id_).status_code == 404  # owned by another tenant
    good = follow(prompts[0], 0.3).json()
    (file,) = folders[1].glob(f"{id_}.*")
    contents = file.read_bytes()
    os.truncate(file, 0)
    answer = follow(prompts[1], 0.9)
    assert answer.status_code == 503, answer.text
    assert "cannot be read" in answer.text
    assert str(folders[1].parent) not in answer.text
    url = f"{server.url}/ext/clusters/{id_}?cache_salt=a%20tenant"
    answer = requests.get(url, timeout=60)
    assert answer.status_code == 400
    assert f"{id_}.1.blocks has 0 B, expected " in answer.text
    assert str(folders[1].parent) not in answer.text
    assert generate(server, prompts[1]).ok
    file.write_bytes(contents)
    again = follow(prompts[1], 0.9)
    assert again.ok
    assert again.json()["meta_info"]["cached_tokens"] == 0  # no KV of the failed request is reused
    assert follow(prompts[0], 0.3).json()["output_ids"] == good["output_ids"]
    url = f"{server.url}/ext/clusters/{id_}"
    assert requests.delete(url, timeout=60).status_code == 404
    deleted = requests.delete(url, params={"cache_salt": "a tenant"}, timeout=60)
    assert deleted.ok
    assert not [path for each in folders for path in each.glob(f"{id_}*")]
    assert follow(prompts[0], 0.3).status_code == 404
    gone = requests.delete(url, params={"cache_salt": "a tenant"}, timeout=60)
    assert gone.status_code == 404


def test_damaged_and_planted_contexts_fail_only_their_own_requests(
    server: Server, asked: tuple[list[int], list[list[int]]], folders: tuple[Path, ...]
) -> None:
    context, prompts = asked
    url = f"{server.url}/ext/clusters"
    created = requests.post(url, json={"input_ids": context[:900]}, timeout=DEADLINE_S)
    id_ = created.json()["id"]
    index = index_file(folders[0], id_)
    said, arrays = content_of(index)
    arrays["often"] = arrays["often"][:, :3]
    planted(index, json.dumps(said).encode(), arrays)
    answer = generate(server, prompts[0], id_)
    assert answer.status_code == 400, answer.text
    assert "often" in answer.text
    contents = bytearray(index.read_bytes())
    contents[100] ^= 1
    index.write_bytes(contents)
    listed = requests.get(f"{url}/list", timeout=60).json()
    assert id_ not in {each["id"] for each in listed["contexts"]}
    assert listed["damaged"] == 1
    assert requests.get(f"{url}/{id_}", timeout=60).status_code == 400
    for path in ("%00", "stx-%00", "a" * 5000, "..%2F..%2Fx"):
        assert requests.get(f"{url}/{path}", timeout=60).status_code == 404
    assert generate(server, prompts[0], id_).status_code == 400
    assert requests.delete(f"{url}/{id_}", timeout=60).ok
    assert generate(server, prompts[0]).ok


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_context_gets_404_on_openais_routes(server: Server, stream: bool) -> None:
    params = {"custom_params": {"ext_stored": {"id": "stx-unknown"}}, "stream": stream}
    for route, prompt in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        body = {"model": "m", **prompt, **params}
        answer = requests.post(server.url + route, json=body, timeout=60)
        assert answer.status_code == 404, answer.text
        assert answer.json()["code"] == 404


def test_malformed_requests_do_not_disturb_valid_requests(server: Server) -> None:
    assert bombard(server, "clusters")[400] > 0


def test_a_context_is_continued_and_equals_one_prompt(
    server: Server, asked: tuple[list[int], list[list[int]]], folders: tuple[Path, ...]
) -> None:
    """A conversation grows over a stored context, in two branches; the context is not needed."""
    (context, prompts), url = asked, f"{server.url}/ext/clusters"

    def stored(tokens: list[int], **more: Any) -> requests.Response:
        body = {"input_ids": tokens, "cache_salt": "a reader", **more}
        return requests.post(url, json=body, timeout=DEADLINE_S)

    def follow(id_: str, prompt: list[int], share: float, tokens: int = 10) -> dict[str, Any]:
        salted = {"return_logprob": True, "cache_salt": "a reader"}
        answer = generate(server, prompt, id_, told=salted, tokens=tokens, sparsity=share)
        assert answer.ok, answer.text
        found: dict[str, Any] = answer.json()
        return found

    base = stored(context[:900]).json()
    turn = [*prompts[0], *follow(base["id"], prompts[0], 1.0, 40)["output_ids"]]
    told = {
        "one": (stored(turn, base=base["id"]).json(), turn),
        "other": (stored(context[900:1300], base=base["id"]).json(), context[900:1300]),
    }
    more = stored(context[1300:1320], base=told["other"][0]["id"]).json()
    told["more"] = more, context[900:1320]
    names = [each.name for each in folders[0].glob(f"{more['id']}*.blocks")]
    assert len(names) == 3  # of the base, of its continuation, and new ones
    for one in (base, told["other"][0]):
        deleted = requests.delete(
            f"{url}/{one['id']}", params={"cache_salt": "a reader"}, timeout=60
        )
        assert deleted.ok
    assert stored(turn, base=base["id"]).status_code == 404
    assert stored(turn, base=more["id"], cache_salt="a stranger").status_code == 404
    assert stored([1] * 20_000, base=more["id"]).status_code == 400
    for found, behind in (told["one"], told["more"]):
        assert found["tokens"] == 900 + len(behind)
        for prompt in prompts[1:3]:
            dense = generate(server, [*context[:900], *behind, *prompt], tokens=10).json()
            answer = follow(found["id"], prompt, 1.0)
            assert answer["output_ids"] == dense["output_ids"]
            assert logprobs(answer) == pytest.approx(logprobs(dense), abs=2e-4)
            assert follow(found["id"], prompt, 0.3)["output_ids"]
        deleted = requests.delete(
            f"{url}/{found['id']}", params={"cache_salt": "a reader"}, timeout=60
        )
        assert deleted.ok
    until(lambda: not [path for each in folders for path in each.glob(f"{more['id']}*")], within=60)


def logprobs_behind(model: Any, contexts: Sequence[list[int]], prompt: list[int]) -> list[float]:
    """Returns the logprobs of a prompt's tokens but the first, behind contexts by themselves.

    The KV of each context is computed without the others, at its positions behind them, and its
    first token is seen by the context itself only.

    Args:
        model: causal language model of the library transformers.
    """
    cache, seen, before = DynamicCache(config=model.config), 0, 0
    with torch.inference_mode():
        for context in contexts:
            positions = torch.arange(before, before + len(context))[None]
            alone = model(torch.tensor([context]), position_ids=positions).past_key_values
            first = int(before > 0)
            for number, layer in enumerate(alone.layers):
                cache.update(layer.keys[:, :, first:], layer.values[:, :, first:], number)
            before += len(context)
            seen += len(context) - first
        logits = model(
            torch.tensor([prompt]), past_key_values=cache,
            position_ids=torch.arange(before, before + len(prompt))[None],
            cache_position=torch.arange(seen, seen + len(prompt)),
        ).logits[0]  # fmt: skip
    chosen = torch.tensor(prompt[1:])[:, None]
    found: list[float] = logits[:-1].log_softmax(-1).gather(1, chosen)[:, 0].tolist()
    return found


def test_several_contexts_are_followed_one_behind_the_other(
    server: Server, model: Path, asked: tuple[list[int], list[list[int]]]
) -> None:
    (context, prompts), url = asked, f"{server.url}/ext/clusters"
    halves = [context[:750], context[750:]]
    ids = [
        requests.post(url, json={"input_ids": half}, timeout=DEADLINE_S).json()["id"]
        for half in halves
    ]
    told = {"return_logprob": True, "logprob_start_len": 0}
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for prompt in prompts:
        for order in ([0, 1], [1, 0], [1]):
            follows = [ids[at] for at in order]
            answer = generate(server, prompt, follows, told=told, sparsity=1.0).json()["meta_info"]
            (entry,) = answer["ext"]
            assert entry["exact"] == (len(order) == 1)
            assert entry["tokens"] == 750 * len(order)
            assert entry["context"] == "+".join(follows)
            given = [entry[0] for entry in answer["input_token_logprobs"]][1:]
            right = logprobs_behind(reference, [halves[at] for at in order], prompt)
            assert given == pytest.approx(right, abs=1e-3)

    kinds: list[tuple[list[int], Any]] = [
        (prompts[0], ids), (prompts[1], ids), (prompts[2], ids[::-1]), (prompts[3], ids[0]),
    ]  # fmt: skip
    share: dict[str, Any] = {"sparsity": 0.2}
    alone = [generate(server, prompt, follows, **share).json() for prompt, follows in kinds]
    requests.post(f"{server.url}/flush_cache", timeout=60)
    with ThreadPoolExecutor(len(kinds)) as threads:
        futures = [threads.submit(generate, server, p, ids_, **share) for p, ids_ in kinds]
        for one, future in zip(alone, futures, strict=True):
            other = future.result().json()
            assert other["output_ids"][:4] == one["output_ids"][:4]
            assert logprobs(other)[:4] == pytest.approx(logprobs(one)[:4], abs=1e-2)
    twice = generate(server, prompts[0], [ids[0], ids[0]])
    assert twice.status_code == 400
    assert "has one of them twice" in twice.text
    # KV that was computed behind other contexts is not reused.
    longer = [*prompts[0], *alone[0]["output_ids"]]
    for follows, cached in ((ids, True), (ids[::-1], False), (ids[:1], False)):
        turn = generate(server, longer, follows, **share).json()
        assert (turn["meta_info"]["cached_tokens"] >= len(prompts[0]) // 16 * 16) == cached
    for id_ in ids:
        assert requests.delete(f"{url}/{id_}", timeout=60).ok
