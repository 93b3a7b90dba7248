"""One demonstration for each power: yields what it shows, column by column."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from sgl_ext.client import ContextCache, part
from sgl_ext.clusters.client import StoredContexts
from sgl_ext.demo.side import (
    QUESTION,
    Side,
    documents,
    first_line,
    of_reply,
    scratch,
    serving,
    system,
)
from sgl_ext.errors import ExtError
from sgl_ext.verify.compare import Reply
from sgl_ext.verify.target import Target
from sgl_ext.verify.texts import Texts

_ANSWER = 12
_TURNS, _TURN, _LONG = 6, 8, 24
_SLOW = 30_000_000
"""Bytes per second of the slowed SSD: about as many as a core computes KV of SmolLM2."""
_LENDING_S = 60.0


def tiers() -> Iterator[Side]:
    """Shows a prompt that comes again when the device has evicted its KV."""
    with scratch() as ssd:
        ssds = {"directories": [str(ssd)], "capacity": "512MiB", "keep_after": 1}
        config = {"tiers": {"host": {"capacity": "768MiB"}, "ssd": ssds}}
        with serving([system("tiers", config, 4096)]) as (target,):
            prompt = "".join(documents(40)) + QUESTION
            yield of_reply("computed", target.answer(prompt, _ANSWER, stop=True))
            target.settle()
            Texts(target).fill_pool(target.info())
            yield of_reply("evicted: from host memory", target.answer(prompt, _ANSWER, stop=True))
            target.settle()
            target.flush()
            yield of_reply("flushed: from the SSD", target.answer(prompt, _ANSWER, stop=True))


def restore() -> Iterator[Side]:
    """Shows a prefix on an SSD that is as slow as computing: loaded, and computed meanwhile."""
    with scratch() as folder:
        directories = [folder / name for name in ("loads", "restores")]
        systems = []
        for each in directories:
            each.mkdir()
            ssd = {
                "directories": [str(each)], "capacity": "512MiB", "keep_after": 1,
                "emulate": {"bytes_per_second": _SLOW},
            }  # fmt: skip
            config: dict[str, Any] = {"tiers": {"ssd": ssd}}
            if each.name == "restores":
                config["restore"] = {}
            systems.append(system(each.name, config, 8192))
        with serving(systems) as (loads, restores):
            prompt = "".join(documents(60)) + QUESTION

            def again(target: Target) -> Reply:
                target.settle()
                target.flush()
                return target.answer(prompt, _ANSWER, stop=True)

            yield of_reply("computed", loads.answer(prompt, _ANSWER, stop=True))
            restores.answer(prompt, _ANSWER, stop=True)  # while the other server stores
            yield of_reply("loaded from a slow SSD", again(loads))
            again(restores)  # teaches the server what loading costs
            yield of_reply("loaded and computed at once", again(restores))


def chunks() -> Iterator[Side]:
    """Shows documents that are computed once and linked in another order."""
    with serving([system("chunks", {"chunks": {"link": "always"}}, 16384)]) as (target,):
        texts = documents(60)
        made = ContextCache(target.url).create(texts)
        prompt = [*({"type": "text", "text": text} for text in texts[::-1]), _question()]
        yield of_reply("computed", target.answer(prompt, _ANSWER, stop=True))
        linked = [*map(part, (made[1], made[0], made[2])), _question()]
        reply = target.answer(linked, _ANSWER, stop=True)
        yield of_reply("linked in another order (approximate)", reply)


def swap() -> Iterator[Side]:
    """Shows requests that take turns because the device holds few: recomputed, or swapped."""
    turns = {"policy": "round-robin", "quantum": _TURN}
    # Without room in host memory, as in SGLang, a request whose turn ends is recomputed.
    sizes = {"recomputed": "2MiB", "swapped out and resumed": "512MiB"}
    configs = {
        title: {"tiers": {"host": {"capacity": size}}, "swap": {"capacity": size, **turns}}
        for title, size in sizes.items()
    }
    systems = [system(name.partition(" ")[0], each, 1536) for name, each in configs.items()]
    with serving(systems) as targets:
        text = "".join(documents(6)) + QUESTION
        prompts = [f"Text {number} of {_TURNS}. {text}" for number in range(1, _TURNS + 1)]
        for title, target in zip(configs, targets, strict=True):
            began = time.monotonic()
            with ThreadPoolExecutor(len(prompts)) as pool:
                replies = [*pool.map(lambda each, of=target: of.answer(each, _LONG), prompts)]
            seconds = time.monotonic() - began
            counts = target.info()["internal_states"][0]["sgl_ext"]["swap"]
            rows = {
                f"{_TURNS} requests in turns": f"{seconds:.2f} s",
                "tokens/s": f"{sum(len(each.tokens) for each in replies) / seconds:,.0f}",
                "first token, p50": f"{median(each.seconds for each in replies):.2f} s",
                "swapped in": f"{counts['swapped_in']}",
                "recomputed": f"{counts['recomputed']}",
                "tokens computed again": f"{counts['recomputed_tokens']:,}",
                "first answer": first_line(replies[0]),
            }  # fmt: skip
            yield Side(title, rows, seconds)


def peer() -> Iterator[Side]:
    """Shows a prompt that is longer than the engine's own KV memory."""
    with scratch() as folder:
        both = {"directory": f"{folder}/peers"}
        master = system("master", {"peer": {"role": "master", "capacity": "512MiB", **both}}, 2048)
        worker = system("worker", {"peer": {"role": "worker", **both}}, 16384)
        with serving([master]) as (target,):
            prompt = "".join(documents(70)) + QUESTION
            own = "own memory: 2,048 tokens"
            try:
                yield of_reply(own, target.answer(prompt, _ANSWER, stop=True))
            except ExtError as error:
                yield Side(own, {"answer": f"refused: {str(error)[-160:]}"})
            with serving([worker]):  # not before: it would lend at once
                _wait_until_lent(target)
                yield of_reply("with borrowed memory", target.answer(prompt, _ANSWER, stop=True))


def clusters() -> Iterator[Side]:
    """Shows questions about a text that is stored on an SSD, of which a tenth is read."""
    with scratch() as folder:
        config = {"clusters": {"directories": [str(folder)]}}
        with serving([system("clusters", config, 8192)]) as (target,):
            text = "".join(documents(60))
            id_ = StoredContexts(target.url).store(text)["id"]
            yield of_reply("computed", target.answer(text + QUESTION, _ANSWER, stop=True))
            for title in ("stored, opened for the question", "stored, a tenth read (approximate)"):
                follow = {"ext_stored": {"id": id_}}
                reply = target.answer(QUESTION, _ANSWER, stop=True, fields=follow)
                yield of_reply(title, reply)


DEMOS: dict[str, Callable[[], Iterator[Side]]] = {
    each.__name__: each for each in (tiers, chunks, restore, swap, peer, clusters)
}
"""Demonstrations by the name of their power."""


def _question() -> dict[str, str]:
    return {"type": "text", "text": QUESTION}


def _wait_until_lent(target: Target) -> None:
    give_up = time.monotonic() + _LENDING_S
    while time.monotonic() < give_up:
        states = [each["sgl_ext"]["peer"] for each in target.info()["internal_states"]]
        if all(
            worker["blocks"] for each in states for worker in each["workers"] or [{"blocks": 0}]
        ):
            return
        time.sleep(0.2)
    raise ExtError(
        f"the worker has lent no memory in {_LENDING_S:g} s; end other programs, and try again"
    )
