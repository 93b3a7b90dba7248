"""Servers of a part: started side by side, asked, and checked for leaks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from gpu.check.models import PAGE
from gpu.check.outcome import Outcome
from gpu.check.setup import Setup

from sgl_ext.engine.launch import run_directory
from sgl_ext.serving.server import BESIDE_OTHERS, Server, System, serve

_START_S, _DRY_START_S = 130, 400
"""Deadline of a start; a dry run may take place on few cores."""
_REQUEST_S = 60.0
_QUIET_S = 20.0
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
"""Makes SGLang check its accounting of memory after every step."""
EAGER = ("--disable-cuda-graph",)
NO_OVERLAP = ("--disable-overlap-schedule",)
Ids = Sequence[int]


def extension(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the arguments that switch the extension on with these sections."""
    return ("--enable-ext", "--ext-config", json.dumps(config))


def arguments(setup: Setup, tokens: int, dtype: str = "float32") -> tuple[str, ...]:
    """Returns the arguments of all servers of the check.

    Args:
        tokens: size of the device pool.
    """
    common: tuple[str, ...] = (
        "--max-total-tokens", str(tokens), "--page-size", str(PAGE), "--dtype", dtype,
        "--grammar-backend", "none", "--random-seed", "1", *BESIDE_OTHERS,
    )  # fmt: skip
    if not setup.cuda:
        return common
    backend = setup.options.attention_backend
    cuda: tuple[str, ...] = ("--attention-backend", backend, "--cuda-graph-max-bs-decode", "16")
    if setup.stand_in:
        cuda += ("--sampling-backend", "pytorch", "--disable-prefill-cuda-graph")
    if os.environ.get("SGLEXT_FAKED_CUDA") == "1":  # see tests/faked_cuda
        cuda += ("--triton-attention-num-kv-splits", "1", *EAGER)
    return (*common, *cuda)


@contextmanager
def started(
    setup: Setup, outcome: Outcome, systems: Sequence[System], model: Path
) -> Iterator[dict[str, Server]]:
    """Starts systems side by side and yields those that serve, by name; stops them at the end.

    A system that does not start is recorded as refused if the extension says why, else as a
    failure.
    """
    logs, deadline = setup.folder("logs"), setup.scale(_START_S, _DRY_START_S)
    run_directory.subdirectory()  # makes the folder of this process, which threads must not
    with ExitStack() as stack:
        # The threads outlive the servers, which would end with the thread that started them.
        pool = stack.enter_context(ThreadPoolExecutor(max(1, len(systems))))

        def start(system: System) -> tuple[Any, Server] | None:
            serving = serve([system], model, logs, deadline=deadline)
            try:
                (server,) = serving.__enter__()
            except Exception as error:
                _tell(outcome, system, logs, error)
                return None
            return serving, server

        with outcome.step(f"start of {len(systems)} servers"):
            found = [one for one in pool.map(start, systems) if one is not None]
        try:
            yield {server.system.name: server for _, server in found}
        finally:
            list(pool.map(lambda one: one[0].__exit__(None, None, None), found))


def _tell(outcome: Outcome, system: System, logs: Path, error: Exception) -> None:
    log = logs / f"{system.name}.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    # A refusal is one line of the launcher, or of a scheduler.
    ours = [line for line in lines if line.startswith("sgl_ext: ")]
    if ours:
        outcome.refuse(system.name, ours[-1].removeprefix("sgl_ext: ")[:1000])
        return
    errors = [line for line in lines if "Error" in line]
    outcome.fail(f"{system.name} did not start: {str(error)[-1500:]} {' | '.join(errors[-3:])}")


def ask(server: Server, prompt: Ids | str, new: int, **more: Any) -> dict[str, Any]:
    """Returns the greedy answer to a prompt, with the logprobs of the two best tokens."""
    import requests

    body: dict[str, Any] = {
        "text" if isinstance(prompt, str) else "input_ids": prompt,
        "return_logprob": True, "top_logprobs_num": 2,
        "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True, **more},
    }  # fmt: skip
    answer = requests.post(f"{server.url}/generate", json=body, timeout=_REQUEST_S)
    if not answer.ok:
        said = f"{answer.status_code}: {answer.text[:500]}"
        raise RuntimeError(f"{server.system.name} answered {said}")
    found: dict[str, Any] = answer.json()
    return found


def ask_all(server: Server, prompts: Sequence[Ids], new: int) -> list[dict[str, Any]]:
    """Returns the answers to prompts that are sent at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: ask(server, prompt, new), prompts))


def timed(server: Server, prompt: Ids | str, new: int = 1) -> tuple[float, float, dict[str, Any]]:
    """Returns seconds to the first token, seconds per further token, and the ``meta_info``."""
    import requests

    body = {
        "text" if isinstance(prompt, str) else "input_ids": prompt, "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
    }  # fmt: skip
    begin = time.perf_counter()
    first, last = 0.0, b""
    with requests.post(
        f"{server.url}/generate", json=body, stream=True, timeout=_REQUEST_S
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith(b"data: {"):
                first, last = first or time.perf_counter(), line
    end = time.perf_counter()
    meta: dict[str, Any] = json.loads(last[6:] or b"{}").get("meta_info", {})
    if not meta.get("completion_tokens"):
        raise RuntimeError(f"{server.system.name} did not answer: {last[:500]!r}")
    return first - begin, (end - first) / max(1, new - 1), meta


def state(server: Server) -> dict[str, Any]:
    """Returns ``/server_info`` with the load of the scheduler."""
    import requests

    found: dict[str, Any] = requests.get(f"{server.url}/server_info", timeout=_REQUEST_S).json()
    loads = requests.get(f"{server.url}/v1/loads?include=core", timeout=_REQUEST_S).json()
    return found | {"load": loads["loads"][0]}


def leak(server: Server) -> str:
    """Returns what a server without requests still holds after a flush; empty if nothing."""
    from sgl_ext.serving.http import live

    held: dict[str, Any] = {"server": "no answer"}
    end = time.monotonic() + _QUIET_S
    while held and time.monotonic() < end:
        time.sleep(0.1)
        ours = live(server.url)
        held = {
            "swapped": ours.get("swap", {}).get("swapped", 0),
            "followed": ours.get("clusters", {}).get("followed", 0),
            **{name: tier["queue_depth"] for name, tier in ours.get("tiers", {}).items()},
            **_used(server),
        }
        held = {name: count for name, count in held.items() if count}
    log = server.log.read_text(errors="replace").lower()
    if "memory leak" in log or "mem leak" in log:
        held["log"] = "reports a leak"
    return ", ".join(f"{name}: {count}" for name, count in held.items())


def _used(server: Server) -> dict[str, Any]:
    """Flushes a server's caches and returns what its scheduler still counts as used."""
    import requests

    flushed = requests.post(f"{server.url}/flush_cache", timeout=_REQUEST_S).ok
    load = state(server)["load"]
    names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
    return {name: load.get(name, 0) for name in names} | {"flush failed": int(not flushed)}
