"""Two servers share KV through one Mooncake store, and compute it when the store is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import ROOT
from test_tier_server import POOL, ask, flush, settled, tiers, until

from sgl_ext.bench.data.conversations import conversations
from sgl_ext.serving.server import System, free_port, serve

pytest.importorskip(
    "mooncake.store", reason="Mooncake's client cannot be imported", exc_type=ImportError
)


@contextmanager
def master(port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [str(ROOT / "scripts" / "mooncake.sh"), f"--rpc_port={port}"]
    command += [f"--metrics_port={free_port()}"]
    environment = {**os.environ, "SGLEXT_VENV": str(Path(sys.prefix))}
    with log.open("ab") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)


def test_servers_share_kv_and_compute_it_when_the_store_is_lost(
    model: Path, tmp_path: Path
) -> None:
    held = conversations(model, 3, turns=1, tokens=(300, 500))
    prompts = [conversation.prompts[0] for conversation in held]
    asked = sum(map(len, prompts))
    port = free_port()
    remote = {"master": f"127.0.0.1:{port}", "segment": "256MiB"}
    # A prompt that the store lacks must not wait until then.
    config = json.dumps({"tiers": {"remote": remote, "staging": "96MiB", "wait": "10min"}})
    arguments = (*POOL, "--enable-ext", "--ext-config", config)
    systems = [System(name, arguments) for name in ("first", "second")]
    with serve(systems, model, tmp_path / "logs") as (first, second):
        # The master of the store has not started: all KV is computed.
        expected = [ask(first, prompt)[0] for prompt in prompts]
        assert not tiers(first)["remote"]["available"]
        with master(port, tmp_path / "master.log") as process:
            until(lambda: tiers(first)["remote"]["available"])
            until(lambda: tiers(second)["remote"]["available"])
            flush(first)
            assert [ask(first, prompt)[0] for prompt in prompts] == expected
            settled(first)
            answers = [ask(second, prompt) for prompt in prompts]
            assert [ids for ids, _ in answers] == expected
            assert sum(details.get("remote", 0) for _, details in answers) > 0.8 * asked
            process.send_signal(signal.SIGKILL)
            process.wait(30)
        flush(second)
        assert [ask(second, prompt)[0] for prompt in prompts] == expected
        assert sum(tiers(second)["remote"]["failures"].values()) > 0
        with master(port, tmp_path / "master.log"):
            until(lambda: tiers(first)["remote"]["available"])
            until(lambda: tiers(second)["remote"]["available"])
            hits, deadline = 0, time.monotonic() + 120
            while hits < 0.8 * asked and time.monotonic() < deadline:
                flush(first)
                assert [ask(first, prompt)[0] for prompt in prompts] == expected
                settled(first)
                flush(second)
                answers = [ask(second, prompt) for prompt in prompts]
                assert [ids for ids, _ in answers] == expected
                hits = sum(details.get("remote", 0) for _, details in answers)
            assert hits > 0.8 * asked
            # The second server computes the pages that the killed server held.
            for child in [*first.process.children(recursive=True), first.process]:
                child.kill()
            flush(second)
            assert [ask(second, prompt)[0] for prompt in prompts] == expected
