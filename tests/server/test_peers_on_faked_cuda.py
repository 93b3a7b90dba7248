"""A master and a worker on a faked CUDA device, whose memory both processes map.

Prompts that exceed the master's own memory have the tokens of the model itself, also when the
worker reclaims its memory meanwhile or is killed.
"""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from conftest import until
from faked_cuda_kit import ARGUMENTS, START_S, environment, journal, small_llama

from sgl_ext.memory.device_slab import PIECE
from sgl_ext.serving.http import live
from sgl_ext.serving.server import BESIDE_OTHERS, Server, System, serve

DEADLINE_S = 120.0
TOKEN_BYTES = 2 * 2 * 2 * 64 * 4
"""KV of a token of the model in float32"""
OWN = 512
"""Tokens of the master's own memory"""
PIECES = 3
"""Pieces of the worker, of which the first one is never lent"""
LONGEST = 32_768
PROMPT = [1000 + 7 * at for at in range(OWN + 100)]


@dataclass
class Pair:
    master: Server
    worker: Server
    model: Path

    def borrowed(self) -> int:
        return int(live(self.master.url)["peer"]["borrowed_bytes"])

    def lent(self) -> None:
        """Waits until the master may use all memory that the worker lends."""
        until(lambda: self.borrowed() == (PIECES - 1) * PIECE)

    def expected(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """Returns the greedy answer of the model, computed by ``transformers``."""
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        ids = torch.tensor([[*prompt]])
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens,
            min_new_tokens=tokens, eos_token_id=None,
        )  # fmt: skip
        answer: list[int] = found[0, len(prompt) :].tolist()
        return answer


def ask(server: Server, prompt: Sequence[int], tokens: int, **parameters: Any) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **parameters}
    body = {"input_ids": [*prompt], "sampling_params": sampling}
    answer = requests.post(f"{server.url}/generate", json=body, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["output_ids"]
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("peers_on_faked_cuda")

    def system(name: str, tokens: int, **section: object) -> System:
        config = {"peer": {"role": name, "directory": directory, **section}}
        ours = (
            "--max-total-tokens", str(tokens), "--page-size", "16", "--chunked-prefill-size", "256",
            "--enable-ext", "--ext-config", json.dumps(config), *BESIDE_OTHERS,
        )  # fmt: skip
        # SGLang reserves so many tokens for an answer, which a worker reclaims memory for.
        reserves = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "40000"}
        return System(name, (*ARGUMENTS, *ours), environment(folder, folder / name) | reserves)

    with tempfile.TemporaryDirectory(prefix="sgl_ext-") as directory:
        systems = [
            system("master", OWN, capacity=(PIECES - 1) * PIECE, deadline="300s", lease="60s"),
            system("worker", PIECES * PIECE // TOKEN_BYTES - 16, window="1s", deadline="300s"),
        ]
        model = small_llama(folder / "model", longest=LONGEST)
        with serve(systems, model, folder, deadline=START_S) as (master, worker):
            pair = Pair(master, worker, model)
            pair.lent()
            yield pair
            faults = [
                line["what"]
                for server in (master, worker)
                for line in journal(server)
                if line["kind"] in ("race", "refused")
            ]
            assert not faults


def test_a_prompt_that_exceeds_the_own_memory_is_served_in_lent_memory(pair: Pair) -> None:
    assert ask(pair.master, PROMPT, 6) == pair.expected(PROMPT, 6)


def test_steps_that_move_no_memory_wait_only_for_results(pair: Pair) -> None:
    since = time.monotonic()
    for server in (pair.master, pair.worker):
        ask(server, PROMPT[:20], 4)
    waits = {
        (line["kind"], line["what"], line["places"][0].split(":")[0])
        for server in (pair.master, pair.worker)
        for line in journal(server)
        if line["at"] >= since
    }
    results = "sglang/srt/managers/scheduler_components/batch_result_processor.py"
    assert waits == {("sync", "Event.synchronize", results)}


def test_memory_is_reclaimed_while_the_master_uses_it(pair: Pair) -> None:
    needs_more = 20_000
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, pair.master, PROMPT[1:], 24)
        any_token = {"stop_token_ids": [*range(49_152)], "ignore_eos": False}
        assert len(ask(pair.worker, PROMPT[:20], needs_more, **any_token)) == 1
        assert running.result() == pair.expected(PROMPT[1:], 24)
    found = live(pair.worker.url)["peer"]
    assert found["reclaimed"] >= PIECE
    assert found["replaced"] == 0
    assert ask(pair.worker, PROMPT[:20], 6) == pair.expected(PROMPT[:20], 6)
    pair.lent()


def test_a_killed_worker_ends_no_request(pair: Pair) -> None:
    tree = psutil.Process(pair.worker.process.pid)
    for process in [*tree.children(recursive=True), tree]:
        process.send_signal(signal.SIGKILL)
    until(lambda: pair.borrowed() == 0)
    assert ask(pair.master, PROMPT[:200], 6) == pair.expected(PROMPT[:200], 6)
