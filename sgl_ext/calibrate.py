"""``sgl-ext calibrate``: measures what computing and loading cost, for restoring prefixes."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import requests

from sgl_ext.bench import server
from sgl_ext.bench.linked import generate
from sgl_ext.bench.restore_servers import forget, tiers, wait_until_stored
from sgl_ext.config import ExtConfig
from sgl_ext.errors import ExtError
from sgl_ext.packages import cache_dir
from sgl_ext.restore.costs import LoadCost
from sgl_ext.restore.profile import PROFILES, Profile, Subject, fit, save

_LENGTHS = (96, 160, 256, 512, 1024, 2048, 4096, 1024, 512, 256, 160, 96)
"""Of prompts, from which forwards of these and of a chunk's tokens come."""
_DEADLINE_S = 600.0
_TOKEN_IDS = (1000, 9000)
"""That every vocabulary has and no template gives a meaning."""


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
    resolved = config.resolved()
    sections = {name: resolved[name] for name in ("memory", "tiers", "restore")}
    command = (*arguments, "--enable-ext", "--ext-config", json.dumps(sections))
    with (
        tempfile.TemporaryDirectory(prefix="sgl_ext-calibrate-") as logs,
        server.serve(
            [server.System("calibrate", command)],
            model,
            Path(logs),
            deadline=config.start_deadline,
        ) as (running,),
    ):
        _ask(running.url)
        found = tiers(running.url)["restore"]
        subject = msgspec.convert(found["subject"], Subject)
        compute = fit([(begin, end, seconds) for begin, end, seconds in found["forwards"]])
        crossover = int(found["crossover"])
        loads = {name: _load_cost(samples) for name, samples in found["loaded"].items() if samples}
    if not loads:
        raise ExtError("no tier has given anything back; look at /metrics of a server for why")
    profile = Profile(subject, compute, loads, crossover)
    return profile, save(profile, cache_dir() / PROFILES)


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
