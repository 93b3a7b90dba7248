"""A server that is killed at a random moment leaves an SSD tier that the next server can use.

The tests are skipped unless SGLEXT_ROUNDS sets a number of rounds. Ten rounds take about eight
minutes. ``test_ssd_crash.py`` checks the files themselves after a kill.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import requests
from test_tier_server import ask, config, settled, tiers

from sgl_ext.bench.data.conversations import conversations
from sgl_ext.serving.server import Server, System, serve

ROUNDS = int(os.environ.get("SGLEXT_ROUNDS", "0"))


@pytest.mark.skipif(not ROUNDS, reason="takes minutes; set SGLEXT_ROUNDS")
def test_answers_stay_correct_after_a_server_is_killed_under_load(
    model: Path, tmp_path: Path
) -> None:
    choose = random.Random(5)  # noqa: S311
    directories = [tmp_path / f"ssd{number}" for number in range(4)]
    for directory in directories:
        directory.mkdir()
    held = conversations(model, 4, turns=2, tokens=(250, 500))
    prompts = [prompt for each in held for prompt in each.prompts]
    arguments = config(*directories)
    expected: list[list[int]] = []
    for round_ in range(ROUNDS + 1):
        with serve([System(f"round-{round_}", arguments)], model, tmp_path / "logs") as (server,):
            if not expected:
                expected = [ask(server, prompt)[0] for prompt in prompts]
                settled(server)
                assert tiers(server)["ssd"]["pages"] > sum(map(len, prompts)) // 16 // 2
            else:
                answers = [ask(server, prompt) for prompt in prompts]
                assert [ids for ids, _ in answers] == expected
                hits = sum(details.get("ssd", 0) for _, details in answers)
                assert hits > 0.3 * sum(map(len, prompts))
                assert tiers(server)["ssd"]["failures"].keys() <= {"checksum"}
            if round_ < ROUNDS:
                _load_and_kill(server, choose.uniform(0.2, 4.0), choose.randrange(1000))


def _load_and_kill(server: Server, seconds: float, seed: int) -> None:
    """Sends requests for ``seconds``, then kills all processes of the server.

    The prompts are random, so the server stores their pages.
    """
    stop = threading.Event()

    def load(number: int) -> None:
        at = random.Random(seed + number)  # noqa: S311
        while not stop.is_set():
            prompt = [at.randrange(100, 40_000) for _ in range(200)]
            try:
                ask(server, prompt)
            except (requests.RequestException, ValueError, KeyError):
                return

    threads = [threading.Thread(target=load, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    # The scheduler, which writes to the SSD, is killed before its parent.
    for process in [*reversed(server.process.children(recursive=True)), server.process]:
        process.send_signal(signal.SIGKILL)
    stop.set()
    for thread in threads:
        thread.join(60)
