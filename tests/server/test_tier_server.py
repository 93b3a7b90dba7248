"""Tests of the answers of a server with tiers whose disk is failing, full, corrupt or slow."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from conftest import Launch, refusal
from metrics_kit import value
from tier_kit import occupy
from typer.testing import CliRunner

from sgl_ext.bench.data.conversations import conversations
from sgl_ext.cli import app
from sgl_ext.serving.server import Server, System, serve

DEADLINE_S = 240.0
POOL = ("--max-total-tokens", "2048", "--page-size", "16", "--dtype", "float32")


def generate(server: Server, prompt: list[int], **more: object) -> dict[str, Any]:
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
        **more,
    }
    answer: dict[str, Any] = requests.post(
        f"{server.url}/generate", json=body, timeout=DEADLINE_S
    ).json()
    return answer


def ask(server: Server, prompt: list[int], **more: object) -> tuple[list[int], dict[str, int]]:
    """Returns the output ids of an answer, and the cached tokens of the prompt by tier."""
    answer = generate(server, prompt, **more)
    return answer["output_ids"], answer["meta_info"].get("cached_tokens_details") or {}


def tiers(server: Server) -> dict[str, dict[str, Any]]:
    info = requests.get(f"{server.url}/server_info", timeout=DEADLINE_S).json()
    report: dict[str, dict[str, Any]] = info["internal_states"][0]["sgl_ext"]["tiers"]
    return report


def failures(server: Server) -> dict[str, int]:
    found: dict[str, int] = tiers(server)["ssd"]["failures"]
    return found


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def flush(server: Server) -> None:
    """Flushes the KV caches in device and host memory; retries until the server accepts it."""
    until(lambda: requests.post(f"{server.url}/flush_cache", timeout=DEADLINE_S).ok)


def settled(server: Server) -> None:
    """Waits until no tier has queued copies, so that all computed KV has been written."""
    until(lambda: not any(tier["queue_depth"] for tier in tiers(server).values()))


@pytest.fixture
def prompts(model: Path) -> list[list[int]]:
    held = conversations(model, 3, turns=1, tokens=(300, 500))
    return [conversation.prompts[0] for conversation in held]


def config(
    *directories: Path, keep_after: int = 1, slow: str | None = None, **more: object
) -> tuple[str, ...]:
    """Returns the arguments of a server with an SSD tier.

    Args:
        keep_after: number of uses after which a page is stored.
        slow: bytes per second of an emulated slow SSD, such as ``10MB``; None: no emulation.
        more: further settings of the tiers.
    """
    ssd = {
        "directories": list(map(str, directories)),
        "capacity": "60MiB",
        "keep_after": keep_after,
        "emulate": slow and {"bytes_per_second": slow},
    }
    tiers = {"ssd": ssd, "staging": "48MiB", **more}
    return (*POOL, "--enable-ext", "--ext-config", json.dumps({"tiers": tiers}))


def tells_what_was_reused(server: Server, prompt: list[int], filler: list[int]) -> None:
    for stream in (False, True):
        flush(server)
        ask(server, filler)
        if stream:
            body = {"input_ids": prompt, "stream": True, "sampling_params": {"max_new_tokens": 6}}
            url = f"{server.url}/generate"
            with requests.post(url, json=body, stream=True, timeout=DEADLINE_S) as answer:
                lines = [line[6:] for line in answer.iter_lines() if line.startswith(b"data: {")]
            meta = json.loads(lines[-1])["meta_info"]
        else:
            meta = generate(server, prompt)["meta_info"]
        (entry,) = meta["ext"]
        assert (entry["power"], entry["exact"]) == ("tiers", True)
        loaded = {name: source["tokens"] for name, source in entry["sources"].items()}
        assert (
            sum(loaded.values()) + meta["cached_tokens_details"]["device"] == meta["cached_tokens"]
        )
        assert loaded["ssd"] == meta["cached_tokens_details"]["ssd"] > 0.8 * len(prompt)
        assert entry["sources"]["ssd"]["bytes"] % loaded["ssd"] == 0
        assert all(source["seconds"] > 0 for source in entry["sources"].values())
    assert "ext" not in generate(server, prompt)["meta_info"]  # resident on the device


def keeps_tenants_apart(server: Server, prompt: list[int]) -> None:
    expected, _ = ask(server, prompt)
    for name in ("extra_key", "cache_salt"):
        for tenant, known in (("a", False), ("a", True), ("b", False)):
            flush(server)
            ids, details = ask(server, prompt, **{name: f"{name} {tenant}"})
            settled(server)
            assert ids == expected
            assert bool(details.get("ssd")) is known


def test_disk_failures_do_not_change_answers(
    model: Path, prompts: list[list[int]], small_disk: Path, tmp_path: Path
) -> None:
    filler = [token % 40_000 + 1000 for token in range(0, 7 * 1000, 7)]
    directories = [small_disk, tmp_path / "other"]
    directories[1].mkdir()
    systems = [System("faults", (*config(*directories), "--enable-metrics"))]
    with serve(systems, model, tmp_path / "logs") as (server,):
        files = [next(directory.glob("sgl_ext-*/pages")) for directory in directories]

        def answers() -> list[tuple[list[int], dict[str, int]]]:
            flush(server)
            # The filler overwrites the pages of the prompts, which are still in host memory.
            ask(server, filler)
            found = [ask(server, prompt) for prompt in prompts]
            settled(server)
            return found

        expected = [ids for ids, _ in answers()]
        warm = answers()
        assert [ids for ids, _ in warm] == expected
        assert sum(details.get("ssd", 0) for _, details in warm) > 0.8 * sum(map(len, prompts))
        assert failures(server) == {}
        tells_what_was_reused(server, prompts[0], filler)
        keeps_tenants_apart(server, prompts[0][:65])

        # One byte in every sector of one disk is corrupted.
        with files[0].open("r+b") as pages:
            for at in range(100, files[0].stat().st_size, 4096):
                pages.seek(at)
                byte = pages.read(1)
                pages.seek(at)
                pages.write(bytes([byte[0] ^ 1]))
        assert [ids for ids, _ in answers()] == expected
        lost = failures(server)["checksum"]
        assert lost > 0
        shown = CliRunner().invoke(app, ["top", server.url, "--once"], env={"COLUMNS": "200"})
        assert f"checksum {lost}" in shown.output
        failed = {"pp_rank": "0", "tp_rank": "0", "tier": "ssd", "reason": "checksum"}
        until(lambda: value(server.url, "sglang_ext:tiers_failures_total", failed) == lost)

        # Both files are truncated in the middle of a page.
        for file in files:
            with file.open("r+b") as pages:
                pages.truncate(file.stat().st_size // 2 + 777)
        assert [ids for ids, _ in answers()] == expected
        assert failures(server).get("ENODATA", 0) > 0

        # One file system is full: each page goes to the other one, or overwrites existing data.
        occupy(small_disk / "ballast")
        with files[0].open("r+b") as pages:
            pages.truncate(0)
        occupy(small_disk / "more")
        assert [ids for ids, _ in answers()] == expected
        assert [ids for ids, _ in answers()] == expected
        assert failures(server).get("ENOSPC", 0) > 0

        # All contents of the directories are deleted.
        for directory in directories:
            for child in directory.iterdir():
                shutil.rmtree(child) if child.is_dir() else child.unlink()
        assert [ids for ids, _ in answers()] == expected
        assert requests.get(f"{server.url}/health", timeout=DEADLINE_S).ok


def gone_while_it_waits(server: Server, prompt: list[int]) -> None:
    flush(server)
    with ThreadPoolExecutor() as pool:
        for _ in range(5):
            answer = pool.submit(generate, server, prompt, rid="gone")
            until(lambda: answer.done() or tiers(server)["ssd"]["queue_depth"])  # noqa: B023
            requests.post(f"{server.url}/abort_request", json={"rid": "gone"}, timeout=DEADLINE_S)
            answer.result(DEADLINE_S)
    settled(server)


def new_weights_switch_the_tiers_off(
    server: Server, model: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    body = {"model_path": str(model)}
    url = f"{server.url}/update_weights_from_disk"
    assert requests.post(url, json=body, timeout=DEADLINE_S).json()["success"]
    assert not any(tier["available"] for tier in tiers(server).values())
    found = [ask(server, prompt) for prompt in prompts]
    assert [ids for ids, _ in found] == expected
    assert not any(details.get("host") or details.get("ssd") for _, details in found)


def test_pages_that_do_not_load_within_the_wait_are_recomputed(
    model: Path, prompts: list[list[int]], launch: Launch, tmp_path: Path
) -> None:
    (tmp_path / "ssd").mkdir()
    arguments = config(tmp_path / "ssd", keep_after=2, slow="10MB", wait="200ms")
    with serve([System("slow", arguments)], model, tmp_path / "logs") as (server,):
        expected = [ask(server, prompt)[0] for prompt in prompts]
        settled(server)
        assert tiers(server)["ssd"]["pages"] <= 1  # the first page, which all prompts share
        seen_again = [ask(server, prompt) for prompt in prompts]
        assert [ids for ids, _ in seen_again] == expected
        assert all(details["device"] for _, details in seen_again)
        settled(server)
        assert tiers(server)["ssd"]["pages"] * 16 > 0.8 * sum(map(len, prompts))
        flush(server)
        again = [ask(server, prompt) for prompt in prompts]
        assert [ids for ids, _ in again] == expected
        assert all(not details.get("ssd") for _, details in again)  # loads would have taken seconds
        until(lambda: tiers(server)["ssd"]["loaded_bytes"] > 0)  # but they still complete

        gone_while_it_waits(server, prompts[0])
        new_weights_switch_the_tiers_off(server, model, prompts, expected)

        message = refusal(launch(*arguments))
        assert "is in use by process" in message
        assert "give this one another directory" in message
