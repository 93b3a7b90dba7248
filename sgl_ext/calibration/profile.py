"""Measurement of the costs of computing, decoding and loading (``sgl-ext calibrate``)."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from sgl_ext.config import ExtConfig, Tiers
from sgl_ext.config.values import Section
from sgl_ext.errors import ExtError
from sgl_ext.packages import cache_dir
from sgl_ext.planning.compute_cost import DecodeCost, fit
from sgl_ext.planning.costs import DECODE, HOST
from sgl_ext.planning.load_cost import LoadCost
from sgl_ext.planning.profile import PROFILES, Profile, Subject, devices, save
from sgl_ext.serving import server
from sgl_ext.serving.http import forget, generate, live, model_info, wait_until_stored

_LENGTHS = (96, 160, 256, 512, 1024, 2048, 4096, 1024, 512, 256, 160, 96)
"""Lengths of the measured prompts, in tokens; they give forwards of these and of the chunk size."""
_POOL = 8192
"""Device pool of the server that loads from host memory, in tokens: the prompts exceed it."""
_TOKEN_IDS = (1000, 9000)
"""Range of token ids that every vocabulary has and that no template gives a meaning."""
_TOGETHER = (1, 2, 4, 8)
"""Numbers of requests that decode together."""
_DECODED = 16
"""Tokens that each of them generates."""
_OWN = ("--api-key", "--admin-api-key", "--ssl-certfile", "--ssl-keyfile")
"""Arguments that calibrate does not accept: its servers are local."""


def calibrate(
    model: Path,
    config: ExtConfig,
    arguments: Sequence[str],
    tell: Callable[[str, int, int], None] = lambda _tier, _done, _of: None,
) -> tuple[Profile, Path]:
    """Measures servers on ``model`` and saves the profile in the user's cache.

    Each tier is measured alone. The SSD tier uses temporary folders, which are removed
    afterwards. A remote store keeps some pages of random tokens until it evicts them.

    Args:
        config: Configuration with a ``tiers`` section, whose tiers are measured.
        arguments: Further arguments of the server, the same that it will be started with later.
        tell: Called with the name of each tier before it is measured, its number and that of all.

    Returns:
        The profile, and the path that it was saved to.

    Raises:
        ExtError: The configuration has nothing to calibrate, an argument is not allowed for a
            measured server, a server does not start or answer, or a tier has loaded nothing.
        OSError: the profile cannot be written.
        ValueError: the forwards do not determine the costs.
    """
    if config.tiers is None:
        raise ExtError("nothing to calibrate: the configuration has no tiers section; add one")
    found: dict[str, dict[str, Any]] = {}
    loads: dict[str, LoadCost] = {}
    deadline = config.start_deadline
    if own := sorted({*_OWN} & {each.partition("=")[0] for each in arguments}):
        raise ExtError(
            f"calibrate starts its own local servers and does not accept {', '.join(own)}; remove "
            "these arguments"
        )
    with server.logs("sgl_ext-calibrate-") as folder:
        tiers = [*_one_by_one(config.tiers)]
        for number, (name, alone) in enumerate(tiers):
            tell(name, number, len(tiers))
            with alone as section:
                only = config.model_copy(update={"tiers": section})
                more = ("--max-total-tokens", str(_POOL)) if name == HOST else ()
                systems = [_system(name, only, (*arguments, *more))]
                with server.serve(systems, model, folder, deadline=deadline) as (running,):
                    _ask(running.url, flushed=name != HOST)
                    _decode(running.url)
                    found[name] = live(running.url)["planning"]["costs"]
            if name != HOST:
                loads[name] = _load_cost(name, found[name]["loaded"].get(name, ()))
        forwards = [tuple(each) for one in found.values() for each in one["forwards"]]
        subject = msgspec.convert(next(iter(found.values()))["subject"], Subject)
        decode = None
        for one in found.values():
            if HOST in one["known"]:
                loads[HOST] = LoadCost(**one["loads"][HOST])
            if DECODE in one["known"]:
                decode = DecodeCost(**one["decode"])
        profile = Profile(subject, fit(forwards), loads, devices(config.tiers), decode=decode)
    return profile, save(profile, cache_dir() / PROFILES)


def _system(name: str, config: ExtConfig, arguments: Sequence[str]) -> server.System:
    """Returns a server with the parts of ``config`` that are measured or needed to start."""
    resolved = config.resolved()
    measured = ("memory", "tiers", "restore", "start_deadline")
    sections = {name: resolved[name] for name in measured if name in resolved}
    command = (*arguments, *server.extension(sections))
    return server.System(name, command)


def _one_by_one(wanted: Tiers) -> Iterator[tuple[str, AbstractContextManager[Tiers]]]:
    """Yields the name and the section of each tier alone, host memory last.

    A lower tier stores pages after their first use.
    """
    if wanted.ssd is not None:
        yield "ssd", _in_scratch(wanted)
    if wanted.remote is not None:
        remote = wanted.remote.model_copy(update={"keep_after": 1})
        yield "remote", nullcontext(_only(wanted, remote=remote))
    if wanted.host is not None:
        yield HOST, nullcontext(_only(wanted, host=wanted.host))


def _only(wanted: Tiers, **tier: Section) -> Tiers:
    """Returns a section with ``tier`` as the only tier, and the other settings of ``wanted``."""
    return wanted.model_copy(update={"host": None, "ssd": None, "remote": None, **tier})


@contextmanager
def _in_scratch(wanted: Tiers) -> Iterator[Tiers]:
    """Yields a section with the SSD tier alone, in temporary folders within its directories."""
    if (ssd := wanted.ssd) is None:
        raise ValueError("there is no SSD tier")
    with ExitStack() as folders:
        try:
            scratch = [
                folders.enter_context(tempfile.TemporaryDirectory(dir=each, prefix="calibrate-"))
                for each in ssd.directories
            ]
        except OSError as error:
            raise ExtError(
                f"cannot create a temporary folder in {error.filename or ssd.directories} "
                f"({error.strerror}); create the directory, or give this user write permission"
            ) from None
        there = ssd.model_copy(update={"directories": tuple(map(Path, scratch)), "keep_after": 1})
        yield _only(wanted, ssd=there)


def _load_cost(tier: str, samples: Sequence[tuple[int, float]]) -> LoadCost:
    """Returns the cost of loads: the median of the seconds per token, without a latency.

    Args:
        samples: Tokens and seconds of each load.

    Raises:
        ExtError: There are no samples.
    """
    if not samples:
        raise ExtError(
            f"calibration loaded no page from the {tier} tier; start a server with this "
            "configuration and check the failures of the tier in its /metrics"
        )
    return LoadCost(0.0, statistics.median(seconds / tokens for tokens, seconds in samples))


def _random_tokens(count: int) -> list[int]:
    """Returns random token ids: a prompt that no cache holds."""
    choose = random.SystemRandom()
    return [choose.randrange(*_TOKEN_IDS) for _ in range(count)]


def _ask(url: str, *, flushed: bool) -> None:
    """Sends prompts that no cache holds, and then the long ones again.

    Args:
        flushed: True to flush device and host memory before each repetition, so that only lower
            tiers have the KV. Otherwise host memory has what the device has evicted.
    """
    context = model_info(url)
    most = int(context.get("max_context_length") or max(_LENGTHS)) - 8
    prompts = [_random_tokens(min(length, most)) for length in _LENGTHS]
    for prompt in prompts:
        generate(url, prompt, 1)
    wait_until_stored(url)
    for prompt in prompts:
        if len(prompt) >= 1024:
            if flushed:
                forget(url)
            generate(url, prompt, 1)


def _decode(url: str) -> None:
    """Decodes prompts, in batches of all sizes of :data:`_TOGETHER`."""
    with ThreadPoolExecutor(max(_TOGETHER)) as pool:
        for together in _TOGETHER:
            prompts = [_random_tokens(min(_LENGTHS)) for _ in range(together)]
            for answer in [pool.submit(generate, url, prompt, _DECODED) for prompt in prompts]:
                answer.result()
