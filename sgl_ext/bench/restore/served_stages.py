"""Servers of pipeline stages that restore a prefix at the same time, or one after the other.

Every server has a copy of the same contexts on an SSD, which is slowed down until a stage loads a
context of 4,096 tokens in the time in which the stages compute it. Schedulers of pipeline stages do
not sleep while they are idle. Therefore all servers but the one that is measured are stopped by a
signal.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import paired_ratio
from sgl_ext.bench.restore.contexts import Context, of_lengths
from sgl_ext.bench.restore.servers import LOAD, PAGE, RECOMPUTE, base
from sgl_ext.config.restore import EXPERIMENT, IN_SEQUENCE
from sgl_ext.errors import ExtError
from sgl_ext.models import untied
from sgl_ext.progress import steps
from sgl_ext.serving import server
from sgl_ext.serving.http import forget, live, wait_until_stored

AT_ONCE, ONE_BY_ONE = "stages at once", "one stage after the other"
_REFERENCE = 4096
"""Tokens of the context that takes as long to load as to compute."""
_POOL = 8192
_CHUNK = 512
_SETTLED_S = 3.0
"""Seconds after which all stages have stored what the first one has."""
_TOLERANCE = 1e-3
"""Limit of the difference of log-probabilities in float32: forwards of other sizes round
differently."""
Times = Mapping[str, Mapping[int, list[float]]]
"""TTFT in seconds by system and length of the context, in the order of the requests."""


def report_served_stages(
    report: Report,
    model: Path,
    out: Path,
    stages: int,
    lengths: Sequence[int],
    each: int,
    rounds: int,
) -> None:
    """Adds the runs and figures of servers of this number of stages.

    Args:
        lengths: lengths of the contexts, in tokens.
        each: number of contexts of each length.
        rounds: rounds in which each context is requested of each server.
    """
    parted, logs = untied(model), out / "logs" / "served-stages"
    reference, *contexts = of_lengths(parted, [_REFERENCE, *[*lengths] * each])
    with tempfile.TemporaryDirectory(dir=out, prefix="stages-") as scratch:
        filled = Path(scratch) / "filled"
        seconds, token_bytes = _fill(filled, stages, reference, contexts, parted, logs)
        rate = round(_REFERENCE * token_bytes / seconds)
        systems = [
            _system(RECOMPUTE, stages, None, None),
            _system(LOAD, stages, _copy(filled, LOAD), rate),
            _system(
                ONE_BY_ONE, stages, _copy(filled, "sequence"), rate, restores=True,
                in_sequence=True,
            ),
            _system(AT_ONCE, stages, _copy(filled, "once"), rate, restores=True),
        ]  # fmt: skip
        with ExitStack() as stack:
            servers = []
            for system in systems:
                (one,) = stack.enter_context(server.serve([system], parted, logs))
                stack.callback(_signal, one, resume=True)  # it could not end otherwise
                _signal(one, resume=False)
                servers.append(one)
            ttft, computed = _measure(servers, contexts, rounds)
    _report(report, stages, ttft, computed, rate)


def _fill(
    directory: Path,
    stages: int,
    reference: Context,
    contexts: Sequence[Context],
    model: Path,
    logs: Path,
) -> tuple[float, float]:
    """Stores the KV and activations of all contexts in ``directory``.

    Returns:
        The seconds of computing ``reference``, and the bytes of a token's KV in a stage.
    """
    directory.mkdir()
    filling = _system("fill", stages, directory, None, restores=True)
    with server.serve([filling], model, logs) as (one,):
        _ask(one, reference.heard[:_CHUNK])  # the first request of a process is slow
        began = time.monotonic()
        for context in (reference, *contexts):
            _ask(one, context.heard)
            if context is reference:
                seconds = time.monotonic() - began
            wait_until_stored(one.url)
            time.sleep(_SETTLED_S)
        tiers = live(one.url)["tiers"]["host"]
        tokens = sum(context.length // PAGE * PAGE for context in (reference, *contexts))
    return seconds, tiers["stored_bytes"] / tokens


def _copy(filled: Path, name: str) -> Path:
    return Path(shutil.copytree(filled, filled.with_name(f"ssd-{name}")))


def _system(
    name: str,
    stages: int,
    directory: Path | None,
    rate: int | None,
    *,
    restores: bool = False,
    in_sequence: bool = False,
) -> server.System:
    """Returns a server of this number of stages.

    Args:
        directory: directory of its SSD tier; None for stock SGLang.
        rate: bytes per second of the SSD of each stage; None if it is not slowed down.
        restores: whether it has the restore section.
        in_sequence: whether a stage begins to restore when the one before it has computed the step.
    """
    arguments = (
        *base(_POOL), "--pp-size", str(stages), "--chunked-prefill-size", str(_CHUNK),
        "--dtype", "float32",
    )  # fmt: skip
    if directory is None:
        return server.System(name, (*arguments, "--disable-radix-cache"))
    ssd: dict[str, Any] = {"directories": [str(directory)], "capacity": "4GiB", "keep_after": 1}
    if rate is not None:
        ssd["emulate"] = {"bytes_per_second": rate}
    config: dict[str, Any] = {"tiers": {"ssd": ssd, "staging": "512MiB", "wait": 600}}
    if restores:
        config["restore"] = {"chunk": _CHUNK}
    environment = {EXPERIMENT: IN_SEQUENCE} if in_sequence else {}
    arguments += server.extension(config)
    return server.System(name, arguments, environment)


def _measure(
    servers: Sequence[server.Server], contexts: Sequence[Context], rounds: int
) -> tuple[Times, Mapping[str, list[int]]]:
    """Returns the times of all servers, and the tokens that the first stage computed of prefixes.

    Raises:
        ExtError: a server gives another answer than the one that recomputes.
    """
    ttft: dict[str, dict[int, list[float]]] = {one.system.name: {} for one in servers}
    computed: dict[str, list[int]] = {one.system.name: [] for one in servers}
    longest = max(contexts, key=lambda each: each.length)
    # The first request of a process is slow, and restorations learn the costs.
    for turn, context in enumerate(steps([longest, *[*contexts] * rounds], "prompts in stages")):
        expected: tuple[int, float] | None = None
        for at in range(len(servers)):
            one = servers[at if not turn else (turn + at) % len(servers)]
            with _running(one):
                forget(one.url)
                seconds, answer, entries = _ask(one, context.tokens)
                expected = expected or answer
                if answer[0] != expected[0] or abs(answer[1] - expected[1]) > _TOLERANCE:
                    raise ExtError(
                        f"{one.system.name} answers {answer} to {context.name}, and another "
                        f"server {expected}"
                    )
            if turn:
                ttft[one.system.name].setdefault(context.length, []).append(seconds)
                restored = [each for each in entries if each["power"] == "restore"]
                computed[one.system.name] += [each["computed"] for each in restored]
    return ttft, computed


def _ask(
    one: server.Server, tokens: Sequence[int]
) -> tuple[float, tuple[int, float], list[dict[str, Any]]]:
    """Returns the seconds of one greedy token, the token and its log-probability, and reports."""
    import requests

    body = {
        "input_ids": [*tokens],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
    }
    began = time.monotonic()
    found = requests.post(f"{one.url}/generate", json=body, timeout=600)
    seconds = time.monotonic() - began
    if not found.ok:
        raise ExtError(f"{one.system.name}: {found.text:.500}")
    meta = found.json()["meta_info"]
    logprob, token, *_ = meta["output_token_logprobs"][0]
    return seconds, (token, logprob), meta.get("ext") or []


@contextmanager
def _running(one: server.Server) -> Iterator[None]:
    """Lets a stopped server run inside the block."""
    _signal(one, resume=True)
    try:
        yield
    finally:
        _signal(one, resume=False)


def _signal(one: server.Server, *, resume: bool) -> None:
    """Stops or continues all processes of a server."""
    for process in (one.process, *one.process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            if resume:
                process.resume()
            else:
                process.suspend()


def _report(
    report: Report, stages: int, ttft: Times, computed: Mapping[str, Sequence[int]], rate: int
) -> None:
    of = "served_stages" if stages == 2 else f"served_{stages}_stages"
    for name, of_length in ttft.items():
        for length, times in of_length.items():
            report.runs.append(
                {
                    "what": f"a server of {stages} stages",
                    "system": name,
                    "tokens": length,
                    "samples": len(times),
                    "bytes_per_second": rate,
                    "computed": statistics.median(computed[name]) if computed[name] else None,
                }
                | summary(times, "ttft_ms", 1e3)
            )
    for name, figure in ((ONE_BY_ONE, "one_by_one"), (LOAD, "load"), (RECOMPUTE, "recompute")):
        for length, times in ttft[AT_ONCE].items():
            found = paired_ratio(ttft[name][length], times)
            report.figures[f"{of}_vs_{figure}_{length}"] = found.median
            report.figures[f"{of}_vs_{figure}_{length}_low"] = found.low
