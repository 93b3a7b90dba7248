"""Plain parts of the benchmark of all powers together: trace, replay, figures, systems."""

from __future__ import annotations

import asyncio
import json
import time
from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from sgl_ext.bench.chunks.prompts import Prompt
from sgl_ext.bench.harness.report import Report
from sgl_ext.bench.together import bench, replay
from sgl_ext.bench.together.costs import errors, weighted_median
from sgl_ext.bench.together.mixed import figures
from sgl_ext.bench.together.systems import (
    ALL,
    HICACHE,
    INDEPENDENT,
    PLANNING,
    SINGLE,
    STOCK,
    Memory,
    Scratch,
    everything,
    scratch,
)
from sgl_ext.bench.together.trace import (
    PRIORITIES,
    REFERENCE,
    Client,
    Material,
    Mix,
    Step,
    tokens_of,
    trace,
)
from sgl_ext.config import load, sets
from sgl_ext.errors import ExtError
from sgl_ext.planning.decisions import Decisions
from sgl_ext.serving.server import free_port

MATERIAL = Material(
    chats=[[range(100), range(10), range(20)], [range(50), range(5)]],
    documents=[["ab", "ba", "ba again"], ["cd", "dc"]],
    batch=[range(60), range(70)],
    urgent=[range(30), range(40), range(50)],
)
LENGTHS = (200, 300)


def test_the_tokens_of_all_prompts_include_earlier_turns() -> None:
    chats = 100 + 110 + 130 + 50 + 55
    assert tokens_of(MATERIAL, LENGTHS) == chats + 3 * 200 + 2 * 300 + 130 + 120


def test_the_seed_determines_a_trace() -> None:
    first, again, other = (trace(MATERIAL, LENGTHS, seed) for seed in (1, 1, 2))
    assert first == again
    assert [each.at for each in first] != [each.at for each in other]
    assert [each.at for each in first] == sorted(each.at for each in first)
    names = [each.name for each in (*first, *other)]
    assert len(set(names)) == len(names)


def test_a_trace_has_all_material_once() -> None:
    clients = trace(MATERIAL, LENGTHS, 0)
    kinds = Counter(each.kind for each in clients)
    assert kinds == {"chat": 2, "documents": 5, "batch": 2, "urgent": 3}
    said = sorted(tuple(step.said for step in each.steps) for each in clients if each.steps[0].said)
    expected = [tuple(map(tuple, turns)) for turns in MATERIAL.chats]
    expected += [(tuple(each),) for each in (*MATERIAL.batch, *MATERIAL.urgent)]
    assert said == sorted(expected)
    asked = {each.steps[0].prompt for each in clients if each.kind == "documents"}
    assert asked == {"ab", "ba", "ba again", "cd", "dc"}
    assert {each.kind: each.priority for each in clients} == PRIORITIES


def test_the_load_sets_the_length_of_a_trace() -> None:
    whole = tokens_of(MATERIAL, LENGTHS) / REFERENCE
    for load_ in (0.5, 2.0):
        mix = Mix(load=load_, burst=2)
        clients = [each for seed in range(40) for each in trace(MATERIAL, LENGTHS, seed, mix)]
        latest = max(each.at for each in clients)
        assert 0.9 * whole / load_ < latest <= whole / load_


def test_urgent_calls_come_in_bursts_and_chats_pause_between_turns() -> None:
    clients = trace(MATERIAL, LENGTHS, 0, Mix(burst=2))
    times = Counter(each.at for each in clients if each.kind == "urgent")
    assert sorted(times.values()) == [1, 2]
    pauses = [step.pause for each in clients if each.kind == "chat" for step in each.steps[1:]]
    assert all(pauses)
    assert not any(each.steps[0].pause for each in clients)


def test_the_figures_compare_with_the_best_single_power_at_each_percentile() -> None:
    ttft = {
        STOCK: [8.0] * 20,
        HICACHE: [4.0] * 20,
        "tiers": [2.0] * 18 + [10.0] * 2,
        "chunks": [3.0] * 20,
        ALL: [1.0] * 20,
        INDEPENDENT: [1.25] * 20,
    }
    found = figures(ttft, ("tiers", "chunks"))
    assert found["mixed_trace_ttft_p50_ratio_vs_best_single"] == 0.5
    assert found["mixed_trace_ttft_p95_ratio_vs_best_single"] == pytest.approx(1 / 3)
    assert found["mixed_trace_ttft_p95_ratio_vs_all_independent"] == 0.8
    assert found["mixed_trace_ttft_p50_ratio_vs_stock"] == 0.125
    assert found["mixed_trace_ttft_p50_ratio_vs_hicache"] == 0.25


def test_errors_of_predictions_are_found_by_kind() -> None:
    decisions = Decisions()
    decisions.least("leave", {"host": 1.0, "drop": 2.0})
    for predicted in (1.1, 1.3, 1.2):
        decisions.observed("forward", predicted, 1.0)
    found = errors({"costs": {}, "decisions": decisions.describe()})
    assert found == {"forward": (pytest.approx(0.2), 3)}


def test_kinds_with_more_predictions_weigh_more() -> None:
    assert weighted_median([(0.5, 10), (0.1, 100), (0.3, 10)]) == 0.1
    assert weighted_median([(0.5, 10), (0.1, 10), (0.3, 10)]) == 0.3
    assert weighted_median([(0.5, 10), (0.1, 10)]) == 0.1


@pytest.fixture
def places(tmp_path: Path) -> Scratch:
    return Scratch(tmp_path / "disk", tmp_path / "sockets")


@pytest.mark.parametrize("name", [*SINGLE, ALL, INDEPENDENT])
def test_systems_have_valid_configurations_and_equal_memory(name: str, places: Scratch) -> None:
    places.disk.mkdir()
    memory = Memory(pool=4096, host=12_288)
    system = memory.system(name, places)
    stock = memory.system(STOCK, places)
    assert tuple(system.arguments)[: len(stock.arguments)] == tuple(stock.arguments)
    config = load(json.loads(system.arguments[-1]))
    wanted = SINGLE.get(name, everything())
    names = {"peer" if each in sets.PEERS else each for each in wanted}
    assert {*config.sections()} == names
    assert (PLANNING in system.environment) == (name == INDEPENDENT)


def test_systems_do_not_share_directories(places: Scratch) -> None:
    places.disk.mkdir()
    memory = Memory(pool=4096, host=12_288)
    configs = [load(json.loads(memory.system(ALL, places).arguments[-1])) for _ in range(2)]
    tiers = [config.tiers for config in configs]
    used = [each.ssd.directories for each in tiers if each and each.ssd]
    assert len(set(used)) == 2


def test_hicache_gets_the_slow_device_too(
    places: Scratch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    places.disk.mkdir()
    system = Memory(pool=4096, host=8192, rate=1_000_000).system(HICACHE, places)
    arguments = [*system.arguments]
    extra = json.loads(arguments[arguments.index("--hicache-storage-backend-extra-config") + 1])
    backend = arguments[arguments.index("--hicache-storage-backend") + 1]
    for name, value in system.environment.items():
        monkeypatch.setenv(name, value)
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=False,
        model_name="model", extra_config=extra,
    )  # fmt: skip
    files = StorageBackendFactory.create_backend(backend, config, None)
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    page = torch.arange(1000, dtype=torch.uint8)
    assert files.set("key", page)
    assert files.set("key", page)  # it is there already
    assert torch.equal(files.get("key", torch.zeros_like(page)), page)
    assert files.get("another", torch.zeros_like(page)) is None
    assert len(slept) == 2
    assert slept[1] > slept[0] > 0  # nothing slept, so the second waits for both


def test_everything_is_a_maximal_set_with_the_role() -> None:
    assert everything("master") in sets.maximal()
    assert "master" in everything("master")
    with pytest.raises(ExtError, match="no set of sections with a peer as tape"):
        everything("tape")


def test_scratch_directories_are_removed(tmp_path: Path) -> None:
    with scratch(tmp_path) as found:
        assert found.disk.is_dir()
        assert found.sockets.is_dir()
    assert not found.disk.exists()
    assert not found.sockets.exists()


def test_estimates_are_those_of_the_chosen_parts() -> None:
    whole = bench.minutes(Namespace(part=[], quick=True))
    parts = [bench.minutes(Namespace(part=[part], quick=True)) for part in bench.PARTS]
    assert whole == pytest.approx(sum(parts))
    assert all(
        bench.minutes(Namespace(part=[part], quick=False)) > quick
        for part, quick in zip(bench.PARTS, parts, strict=True)
    )


def test_parts_run_in_order_and_keep_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(report: Report, out: Path, *, quick: bool) -> None:
        assert (out, quick) == (tmp_path, True)
        report.figures[f"figure_{len(report.figures)}"] = 1.0

    def fail(*_: object, **__: object) -> None:
        raise ExtError("it failed")

    made = {"one": measure, "two": measure, "three": fail}
    parts = {name: bench.Part(each, 1, 2) for name, each in made.items()}
    monkeypatch.setattr(bench, "_PARTS", parts)
    with pytest.raises(ExtError, match="it failed"):
        bench.run(quick=True, out=tmp_path, parts=[*parts])
    kept = json.loads((tmp_path / "partial" / "together.json").read_text())
    assert kept["figures"] == {"figure_0": 1.0, "figure_1": 1.0}


class _Server:
    """Server that answers with the number of the prompt's tokens, one token after another."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        answer = web.StreamResponse()
        await answer.prepare(request)
        count = len(body["input_ids"]) if "input_ids" in body else 0
        for number in range(1, body["sampling_params"]["max_new_tokens"] + 1):
            chunk = {"output_ids": [count] * number, "meta_info": {"cached_tokens": 3}}
            await answer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        return answer


def _replay(clients: list[Client[Prompt]], contexts: Any) -> tuple[list[replay.Timed], _Server]:
    server = _Server()

    async def run() -> list[replay.Timed]:
        app = web.Application()
        app.router.add_post("/generate", server.generate)
        runner = web.AppRunner(app)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            return await replay._replay(f"http://127.0.0.1:{port}", clients, 0.01, contexts)
        finally:
            await runner.cleanup()

    return asyncio.run(run()), server


def test_turns_begin_with_earlier_turns_and_the_servers_own_answers() -> None:
    chat = Client[Prompt]("c", "chat", 0.0, (Step((7, 8), 2), Step((9,), 1, 0.5)))
    found, server = _replay([chat], None)
    assert [body["input_ids"] for body in server.bodies] == [[7, 8], [7, 8, 2, 2, 9]]
    assert [body["rid"] for body in server.bodies] == ["c/0", "c/1"]
    assert {body["priority"] for body in server.bodies} == {PRIORITIES["chat"]}
    assert [(one.turn, one.prompt, one.cached) for one in found] == [(0, 2, 3), (1, 5, 3)]
    assert all(one.ttft > 0 for one in found)


@pytest.mark.parametrize("linked", [False, True])
def test_documents_are_sent_as_tokens_or_as_contexts(linked: bool) -> None:
    prompt = Prompt("q", "read ", ((1, 2), (3, 4)), "why?", (), (0, 3, 4, 1, 2, 5))
    client = Client("d", "documents", 0.0, (Step((), 1, prompt=prompt),))
    ids = {"q": {(1, 2): "ctx-a", (3, 4): "ctx-b"}}
    (found,), server = _replay([client], ids if linked else None)
    (body,) = server.bodies
    assert found.prompt == 6
    if linked:
        assert body["text"].startswith("read ")
        assert body["text"].index("ctx-a") < body["text"].index("ctx-b") < body["text"].index("why")
    else:
        assert body["input_ids"] == [*prompt.tokens]
