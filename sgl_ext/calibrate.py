"""``sgl-ext calibrate``: measures what computing and loading cost, for restoring prefixes."""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import requests

from sgl_ext.bench import server
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
        _Prompts(running.url).send()
        found = _state(running.url)["restore"]
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


class _Prompts:
    """Prompts that no cache knows, asked for twice."""

    def __init__(self, url: str) -> None:
        self._url = url
        context = requests.get(f"{url}/get_model_info", timeout=_DEADLINE_S).json()
        choose = random.SystemRandom()
        most = int(context.get("max_context_length") or max(_LENGTHS)) - 8
        self._prompts = [
            [choose.randrange(*_TOKEN_IDS) for _ in range(min(length, most))] for length in _LENGTHS
        ]

    def send(self) -> None:
        """Computes all of them; then, when only lower tiers have them, restores the long ones."""
        for prompt in self._prompts:
            self._ask(prompt)
        give_up = time.monotonic() + _DEADLINE_S
        while any(tier["queue_depth"] for tier in _state(self._url)["tiers"].values()):
            if time.monotonic() > give_up:
                raise ExtError(f"the tiers still store after {_DEADLINE_S} s")
            time.sleep(0.2)
        for prompt in self._prompts:
            if len(prompt) >= 1024:
                requests.post(f"{self._url}/flush_cache", timeout=_DEADLINE_S).raise_for_status()
                self._ask(prompt)

    def _ask(self, prompt: Sequence[int]) -> None:
        body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
        try:
            answer = requests.post(f"{self._url}/generate", json=body, timeout=_DEADLINE_S)
            answer.raise_for_status()
        except requests.RequestException as error:
            raise ExtError(f"the server did not answer: {error}") from None


def _state(url: str) -> dict[str, Any]:
    info = requests.get(f"{url}/server_info", timeout=_DEADLINE_S).json()
    state: dict[str, Any] = info["internal_states"][0]["sgl_ext"]
    return state
