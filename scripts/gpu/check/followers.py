"""A follower of a stored context that reads all of its blocks, against the same prompt computed."""

from __future__ import annotations

import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpu.check import models
from gpu.check.equal import judge
from gpu.check.outcome import Outcome
from gpu.check.servers import STRICT, arguments, ask, extension, leak, started, state
from gpu.check.setup import Setup

from sgl_ext.serving.server import Server, System

_TIE = 1e-3
_DIRECTORIES = 2


def run(setup: Setup, outcome: Outcome) -> None:
    """Stores a context, follows it, and compares the answers."""
    for at in range(_DIRECTORIES):
        shutil.rmtree(setup.out / f"stored{at}", ignore_errors=True)
    directories = [str(setup.folder(f"stored{at}")) for at in range(_DIRECTORIES)]
    section = {"directories": directories, "largest": 1.0, "hot": "4MiB"}
    pool = setup.scale(16384, 4096)
    system = System(
        "clusters", (*arguments(setup, pool), *extension({"clusters": section})), STRICT
    )
    with started(setup, outcome, [system], models.small(setup)) as servers:
        if system.name not in servers:
            return
        with outcome.step("follow"):
            _follow(setup, outcome, servers[system.name])


def _follow(setup: Setup, outcome: Outcome, server: Server) -> None:
    import requests

    chance = random.Random(setup.options.seed)  # noqa: S311
    context = [chance.randrange(97, 123) for _ in range(setup.scale(6000, 700))]
    questions = [[chance.randrange(97, 123) for _ in range(30)] for _ in range(setup.scale(4, 1))]
    answer = requests.post(
        f"{server.url}/ext/clusters", json={"input_ids": context}, timeout=setup.scale(60, 300)
    )
    if not answer.ok:
        raise RuntimeError(f"/ext/clusters answered {answer.status_code}: {answer.text[:500]}")
    new, id_ = setup.scale(20, 4), answer.json()["id"]

    def follow(question: list[int], share: float) -> dict[str, Any]:
        custom = {"ext_stored": {"id": id_, "sparsity": share}}
        return ask(server, question, new, custom_params=custom)

    expected = [ask(server, [*context, *each], new) for each in questions]
    with ThreadPoolExecutor(2 * len(questions)) as pool:  # forwards of both kinds of rows
        beside = pool.map(lambda each: ask(server, [*context, *each], new), questions)
        found = list(pool.map(lambda each: follow(each, 1.0), questions))
        found += beside
    expected += expected
    sparse = follow(questions[0], 0.1)
    row = judge(expected, found, _TIE)
    told = [each for one in found for each in one["meta_info"].get("ext") or []]
    followed = sum(each["power"] == "clusters" for each in told)
    outcome.row(system="clusters", **row, acted=followed, state=_state(server))
    if row["different"]:
        outcome.fail(f"{row['different']} answers of followers differ, {row['first']}")
    if len(sparse["output_ids"]) != new:
        outcome.fail(f"a follower of a tenth answered {sparse}")
    if followed < len(questions):
        outcome.fail(f"{followed} of {len(questions)} requests followed the context")
    if held := leak(server):
        outcome.fail(f"clusters holds after all requests: {held}")


def _state(server: Server) -> object:
    return state(server)["internal_states"][0].get("sgl_ext", {}).get("clusters")
