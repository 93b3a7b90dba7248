"""Tests of the exactness benchmark: its script, its comparison, and its load on all sections."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
from argparse import ArgumentParser
from collections import Counter
from contextlib import suppress
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from sgl_ext.bench.exactness import bench as exactness
from sgl_ext.bench.exactness.answers import Answer, Ending, Found, compare
from sgl_ext.bench.exactness.clients import ask, greedy
from sgl_ext.bench.exactness.script import Event, Leave, Material, Mix, events, script
from sgl_ext.bench.exactness.sections import find
from sgl_ext.bench.exactness.servers import complaints, end, setup
from sgl_ext.bench.exactness.states import held
from sgl_ext.bench.exactness.tally import FAULTS
from sgl_ext.bench.harness.session import session
from sgl_ext.config import load
from sgl_ext.config.sets import PEERS, Sections, maximal, written
from sgl_ext.errors import ExtError
from sgl_ext.serving.server import Server, System, free_port

MATERIAL = Material([2, 3, 4], linked=3, followers=2)


def test_the_seed_determines_the_requests_of_each_client() -> None:
    first, again, other = (
        list(islice(script(*of, MATERIAL), 300)) for of in ((1, 0), (1, 0), (1, 1))
    )
    assert first == again != other
    assert {each.kind for each in first} == {"plain", "linked", "follower"}
    assert {each.n for each in first} == {1, 2, 3}
    assert {each.priority for each in first} == {0, 1, 2, 3}
    assert {each.stream for each in first} == {each.logprobs for each in first} == {True, False}
    gave_up = Counter(each.leave.by for each in first if each.leave)
    assert min(gave_up["id"], gave_up["disconnect"]) > 5


def test_turns_of_a_conversation_are_requested_in_order() -> None:
    asked = [each for each in islice(script(0, 0, MATERIAL), 300) if each.kind == "plain"]
    talks = itertools.pairwise(asked)
    for one, next_ in itertools.islice(talks, 200):
        goes_on = one.turn + 1 < MATERIAL.talks[one.talk]
        assert next_.turn == (one.turn + 1 if goes_on else 0)
        assert next_.talk == one.talk or not goes_on


def test_only_kinds_with_material_are_requested() -> None:
    assert {each.kind for each in islice(script(0, 0, Material([1])), 50)} == {"plain"}


def test_requests_for_several_answers_are_streamed_if_aborted_by_id() -> None:
    everybody_leaves = Mix(leave=1.0, stream=0.0)
    for each in islice(script(0, 0, MATERIAL, everybody_leaves), 100):
        assert each.leave is not None
        assert each.stream == (each.n > 1 and each.leave.by == "id")


def test_events_are_sorted_by_time() -> None:
    mix = Mix(flush=10, kill=25)
    found = list(takewhile(lambda each: each[0] < 60, events(mix)))
    assert found == sorted(found, key=lambda each: each[0])
    assert Counter(event for _, event in found) == {
        Event.FLUSH: 5, Event.BUSY_FLUSH: 6, Event.KILL: 2,
    }  # fmt: skip
    never = islice(events(Mix(flush=10, kill=float("inf"))), 100)
    assert Event.KILL not in {event for _, event in never}


RIGHT = Answer([5, 6, 7], [-0.1, -0.2, -0.3], [1.0, 0.5, 2.0])


def found(ending: Ending = Ending.DONE, **answers: Answer) -> Found:
    of = {int(name[1:]): answer for name, answer in answers.items()}
    return Found(ending, of, set(of) if ending is Ending.DONE else set())


def test_answers_with_close_logprobs_are_equal() -> None:
    near = Answer(RIGHT.tokens, [each + 1e-4 for each in RIGHT.logprobs])
    assert compare(RIGHT, found(_0=RIGHT, _1=near), 2, logprobs=True) is None
    assert compare(RIGHT, found(_0=Answer([5, 6, 7], [])), 1, logprobs=False) is None


@pytest.mark.parametrize(
    ("answer", "at", "what"),
    [
        (Answer([5, 9, 7], RIGHT.logprobs), 1, "token 9, not 6"),
        (Answer([5, 6], RIGHT.logprobs[:2]), 2, "2 tokens, not 3"),
        (Answer([5, 6, 7, 8], [*RIGHT.logprobs, -1.0]), 4, "4 tokens, not 3"),
        (Answer([5, 6, 7], [-0.1, -0.2, -0.31]), 2, "logprob -0.310000, not -0.300000"),
        (Answer([5, 6, 7], [-0.1, float("nan"), -0.3]), 1, "logprob nan, not -0.200000"),
        (Answer([5, 6, 7], []), 0, "0 logprobs of 3 tokens"),
    ],
)
def test_the_first_difference_is_reported(answer: Answer, at: int, what: str) -> None:
    difference = compare(RIGHT, found(_0=RIGHT, _1=answer), 2, logprobs=True)
    assert difference is not None
    assert (difference.number, difference.at, difference.what) == (1, at, what)


def test_incomplete_answers_are_compared_as_far_as_received() -> None:
    begun = Answer([5, 6], RIGHT.logprobs[:2])
    for ending in (Ending.LEFT, Ending.ABORTED, Ending.CUT, Ending.HUNG):
        assert compare(RIGHT, found(ending, _0=begun), 3, logprobs=True) is None
        assert compare(RIGHT, found(ending, _1=Answer([6], [-0.1])), 3, logprobs=True)


def test_a_missing_answer_is_a_difference() -> None:
    difference = compare(RIGHT, found(_0=RIGHT), 2, logprobs=False)
    assert difference is not None
    assert difference.what == "1 answers, not 2"


class _Scripted:
    """Server that generates a token every 10 ms; a request's id makes it refuse, cut or hang."""

    def __init__(self) -> None:
        self.aborted: list[str] = []
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        self.runner = web.AppRunner(app)

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        count, rid = body["sampling_params"]["max_new_tokens"], body["rid"]
        if rid == "refused":
            return web.Response(status=503, text="Retry later")
        if rid == "cut":
            assert request.transport is not None
            request.transport.close()
        if rid in ("cut", "hung"):
            await asyncio.sleep(1)
        tokens: list[int] = []
        answer = web.StreamResponse()
        if body["stream"]:
            await answer.prepare(request)
        while len(tokens) < count and rid not in self.aborted:
            await asyncio.sleep(0.01)
            tokens.append(7)
            if body["stream"]:
                await answer.write(self._chunk(rid, tokens, None))
        reason = {"type": "abort" if rid in self.aborted else "length"}
        if not body["stream"]:
            return web.json_response(json.loads(self._chunk(rid, tokens, reason)[6:]))
        await answer.write(self._chunk(rid, tokens, reason))
        return answer

    def _chunk(self, rid: str, tokens: list[int], reason: object) -> bytes:
        meta = {"id": rid, "finish_reason": reason, "output_token_logprobs": None}
        return b"data: " + json.dumps({"output_ids": tokens, "meta_info": meta}).encode() + b"\n\n"


async def _ask(rid: str, stream: bool, leave: Leave | None, deadline: float = 10) -> Found:
    server = _Scripted()
    await server.runner.setup()
    port = free_port()
    await web.TCPSite(server.runner, "127.0.0.1", port).start()
    try:
        async with session() as http:
            body = {**greedy({"input_ids": [1]}, 50), "rid": rid, "stream": stream}
            return await ask(http, f"http://127.0.0.1:{port}", body, leave, deadline)
    finally:
        await server.runner.cleanup()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("rid", "leave", "ending"),
    [
        ("done", None, Ending.DONE),
        ("refused", None, Ending.REFUSED),
        ("cut", None, Ending.CUT),
        ("hung", None, Ending.HUNG),
        ("abort", Leave("id", 0.2, 0.1), Ending.ABORTED),
        ("leave", Leave("disconnect", 0.2, 0.1), Ending.LEFT),
    ],
)
def test_endings_of_requests_are_classified(
    rid: str, stream: bool, leave: Leave | None, ending: Ending
) -> None:
    found = asyncio.run(_ask(rid, stream, leave, 0.3 if rid == "hung" else 10))
    assert found.ending is ending
    assert found.whole == ({0} if ending is Ending.DONE else set())
    come = len(found.answers[0].tokens) if found.answers else 0
    if ending is Ending.DONE:
        assert come == 50
    elif ending is Ending.ABORTED or (ending is Ending.LEFT and stream):
        assert 0 < come < 50
    else:
        assert come == 0


def test_directories_of_a_configuration_are_replaced_by_new_ones(tmp_path: Path) -> None:
    sockets = tmp_path / "p"
    made = setup(find("tiers+swap+master+clusters")[1], tmp_path / "stored", sockets)
    assert made.config["tiers"]["ssd"]["directories"] == [
        str(tmp_path / "stored" / f"ssd{at}") for at in range(2)
    ]
    assert made.config["clusters"]["directories"][1] == str(tmp_path / "stored" / "clusters1")
    assert made.config["peer"]["directory"] == str(sockets)
    assert made.beside is not None
    assert made.beside["peer"]["role"] == "worker"
    load(made.beside)
    assert [each.name for each in made.systems()] == ["stock", "server", "peer"]
    assert setup(find("tiers+swap")[1], tmp_path / "alone", sockets).beside is None


def test_unknown_and_invalid_configurations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExtError, match=r"names the section 'everything'.*give the path of a file"):
        find("everything")
    with pytest.raises(ExtError, match="restore requires a tiers section"):
        find("restore")
    (tmp_path / "c.yaml").write_text("tiers: {tape: 3}")
    with pytest.raises(ExtError, match=r"unknown key 'tiers\.tape'"):
        find(str(tmp_path / "c.yaml"))
    (tmp_path / "d.yaml").write_text("chunks: {}")
    assert find(str(tmp_path / "d.yaml")) == ("d", {"chunks": {}})


@pytest.mark.parametrize("sections", maximal(), ids=written)
def test_every_maximal_set_has_a_configuration(sections: Sections) -> None:
    name, config = find(written(sections))
    assert name == written(sections)
    peers = {"peer" if each in PEERS else each for each in sections}
    assert {*load(config).sections()} == peers
    kinds = {"worker": ("worker", None), "master": ("master", None), "layers": ("master", "layers")}
    for kind in sections & PEERS.keys():
        assert (config["peer"]["role"], config["peer"].get("stream")) == kinds[kind]


@pytest.mark.parametrize(
    ("state", "flushed", "what"),
    [
        ({"load": {"num_used_tokens": 32}}, False, ""),
        ({"load": {"num_used_tokens": 32}}, True, "32 used tokens"),
        ({"load": {"num_running_reqs": 1}, "sgl_ext": {"swap": {"swapped": 2}}}, False,
         "1 running, 2 swapped"),
        ({"load": {}, "sgl_ext": {"tiers": {"ssd": {"queue_depth": 3}}}}, False, "3 ssd_queue"),
    ],
)  # fmt: skip
def test_held_resources_are_described(state: dict[str, Any], flushed: bool, what: str) -> None:
    assert held(state, flushed=flushed) == what


def test_processes_and_shared_memory_that_outlive_a_server_are_reported(tmp_path: Path) -> None:
    """A child goes on, and a segment stays in shared memory, when the process is terminated."""
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    program = f"""
import mmap, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}])
with open("/dev/shm/{tmp_path.name}-left", "wb+") as file:
    file.truncate(4096)
    kept = mmap.mmap(file.fileno(), 4096)
print("ready", flush=True)
time.sleep(600)
"""
    process = psutil.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    left = Path("/dev/shm") / f"{tmp_path.name}-left"
    try:
        assert process.stdout.readline() == b"ready\n"
        (child_process,) = process.children()
        server = Server(System("left"), "", tmp_path / "log", process)
        found = end([server], deadline=1.0)
        assert found == [f"process {child_process.pid} goes on", str(left)]
        child_process.kill()
        psutil.wait_procs([child_process], timeout=30)
        left.unlink()
        assert end([server]) == []
    finally:
        for each in (process, child_process):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        left.unlink(missing_ok=True)


def test_complaints_are_found_in_logs(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("ready\nFull Pool Mem Leak Detected! [full]\nTraceback of a client's leaving\n")
    found = complaints([log])
    assert found == ["server.log: Full Pool Mem Leak Detected! [full]"]
    assert exactness._LEAK.search(found[0])
    assert exactness._LEAK.search("req_to_token_pool memory leak detected!")


@pytest.mark.timeout(1200)
def test_sixty_requests_to_the_largest_set_equal_stock_sglang(tmp_path: Path) -> None:
    """Compares a server with as many sections as one accepts, and little memory, with stock SGLang.

    The load has several answers of a request, streams, logprobs, priorities, aborts, prompts with
    contexts, followers where they are served, and preempted requests. If 60 requests do not cover
    every counter of ``covers``, as on a fast machine, there are more.
    """
    parser = ArgumentParser()
    exactness.add_arguments(parser)
    name = written(maximal()[0])
    covers = ["swapped_out", "ssd_hit_tokens", "several", "streams", "logprobs", "flushes"]
    covers += [count for power, count in (("chunks", "linked"), ("clusters", "followers"))
               if power in name.split("+")]  # fmt: skip
    wanted = [argument for count in covers for argument in ("--cover", count)]
    options = parser.parse_args(
        ["--config", name, "--requests", "60", "--deadline", "900", *wanted]
    )
    report = exactness.run(quick=False, out=tmp_path, options=options)
    failures = tmp_path / f"exactness-{name}" / "failures.jsonl"
    said = failures.read_text()[:3000] if failures.exists() else ""
    assert not report.failed, f"{report.failed}\n{said}"
    assert not any(report.figures[each] for each in FAULTS), said
    assert {each for each in covers if not report.figures[each]} == set()
    assert report.figures["requests"] >= 60
    assert json.loads(report.write(tmp_path).read_text())["figures"] == report.figures
