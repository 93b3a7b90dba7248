"""``sgl-ext calibrate``: measures what computing and loading cost, for restoring prefixes."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import requests

from sgl_ext.bench import server
from sgl_ext.bench.linked import generate
from sgl_ext.bench.restore_servers import forget, tiers, wait_until_stored
from sgl_ext.config import ExtConfig, Restore
from sgl_ext.errors import ExtError
from sgl_ext.packages import cache_dir
from sgl_ext.restore.costs import LoadCost
from sgl_ext.restore.profile import PROFILES, Curve, Profile, Subject, fit, save

_LENGTHS = (96, 160, 256, 512, 1024, 2048, 4096, 1024, 512, 256, 160, 96)
"""Of prompts, from which forwards of these and of a chunk's tokens come."""
_DEADLINE_S = 600.0
_HOST_LENGTHS = (128, 256, 512, 1024)
"""Of prefixes that host memory gives back."""
_HOST_POOL = 2048
"""Tokens of the device, which soon forgets what it has computed."""
_TOKEN_IDS = (1000, 9000)
"""That every vocabulary has and no template gives a meaning."""
_WAYS = ("tokens", "layers")


def calibrate(model: Path, config: ExtConfig, arguments: Sequence[str]) -> tuple[Profile, Path]:
    """Starts a server on ``model``, measures it, and keeps the profile in the user's cache.

    Args:
        config: with a section ``restore``; its tiers are the ones that are measured.
        arguments: of the server, as it will be started later.

    Raises:
        ExtError: there is nothing to calibrate, or the server does not start or answer.
    """
    if config.restore is None:
        raise ExtError("there is nothing to calibrate: give a configuration with a restore section")
    wanted = config.tiers
    if wanted is None:
        raise ExtError("there is nothing to calibrate: give a configuration with a tiers section")
    with tempfile.TemporaryDirectory(prefix="sgl_ext-calibrate-") as logs:
        systems = [_system("calibrate", config, arguments)]
        deadline = config.start_deadline
        with server.serve(systems, model, Path(logs), deadline=deadline) as (running,):
            _ask(running.url)
            found = tiers(running.url)["restore"]
        subject = msgspec.convert(found["subject"], Subject)
        compute = fit([(begin, end, seconds) for begin, end, seconds in found["forwards"]])
        loads = {name: _load_cost(samples) for name, samples in found["loaded"].items() if samples}
        if not loads and (wanted.ssd or wanted.remote):
            raise ExtError("no tier has given anything back; look at /metrics of a server for why")
        profile = Profile(subject, compute, loads)
        if wanted.host is not None:
            curves = _host_curves(model, config, config.restore, arguments, Path(logs))
            crossover = crossover_of(curves["tokens"], curves["layers"])
            profile = msgspec.structs.replace(profile, host=curves, crossover=crossover)
    return profile, save(profile, cache_dir() / PROFILES)


def crossover_of(tokens: Curve, layers: Curve) -> int:
    """L_delta: the length from which on restoring by ``tokens`` is never slower than by ``layers``.

    Args:
        tokens, layers: seconds by length, of the same lengths.
    """
    slower = [length for length, seconds in tokens.items() if seconds > layers[length]]
    return max(slower, default=0) + 1


def _system(name: str, config: ExtConfig, arguments: Sequence[str]) -> server.System:
    resolved = config.resolved()
    sections = {name: resolved[name] for name in ("memory", "tiers", "restore")}
    command = (*arguments, "--enable-ext", "--ext-config", json.dumps(sections))
    return server.System(name, command)


def _host_curves(
    model: Path, config: ExtConfig, restore: Restore, arguments: Sequence[str], logs: Path
) -> dict[str, Curve]:
    """Seconds until a prefix of each length that host memory has is restored, in either way."""
    small = (*arguments, "--max-total-tokens", str(_HOST_POOL))
    systems = []
    for way in _WAYS:
        forced = {"restore": restore.model_copy(update={"host": way})}
        systems.append(_system(way, config.model_copy(update=forced), small))
    with server.serve(systems, model, logs, deadline=config.start_deadline) as servers:
        found: dict[str, Curve] = {way: {} for way in _WAYS}
        for length in _HOST_LENGTHS:
            for one, seconds in zip(servers, _restored(servers, length), strict=True):
                found[one.system.name][length] = seconds
    return found


def _restored(servers: Sequence[server.Server], length: int) -> list[float]:
    """Of each server: what prompts take when the device has forgotten them."""
    choose = random.SystemRandom()
    prompts = [
        [choose.randrange(*_TOKEN_IDS) for _ in range(length)]
        for _ in range(_HOST_POOL // length + 2)
    ]
    seconds: list[list[float]] = [[] for _ in servers]
    for again in (False, True):
        for prompt in prompts:
            for one, lately in zip(servers, seconds, strict=True):
                begin = time.monotonic()
                generate(one.url, [*prompt, choose.randrange(*_TOKEN_IDS)], 1)
                if again:
                    lately.append(time.monotonic() - begin)
    return [statistics.median(each) for each in seconds]


def _load_cost(samples: Sequence[tuple[int, float]]) -> LoadCost:
    """Of loads of so many tokens that took so many seconds."""
    return LoadCost(0.0, statistics.median(seconds / tokens for tokens, seconds in samples))


def _ask(url: str) -> None:
    """Prompts that no cache knows; then, when only lower tiers have them, the long ones again."""
    context = requests.get(f"{url}/get_model_info", timeout=_DEADLINE_S).json()
    choose = random.SystemRandom()
    most = int(context.get("max_context_length") or max(_LENGTHS)) - 8
    prompts = [
        [choose.randrange(*_TOKEN_IDS) for _ in range(min(length, most))] for length in _LENGTHS
    ]
    for prompt in prompts:
        generate(url, prompt, 1)
    wait_until_stored(url)
    for prompt in prompts:
        if len(prompt) >= 1024:
            forget(url)
            generate(url, prompt, 1)
