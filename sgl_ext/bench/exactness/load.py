"""Load of an exactness run: sends the requests of its script and counts faults."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from sgl_ext.bench.exactness.answers import Answer, Difference, Ending, Found, compare
from sgl_ext.bench.exactness.clients import Stock, ask, greedy, session
from sgl_ext.bench.exactness.material import Prompt, Texts
from sgl_ext.bench.exactness.script import Ask, Event, Material, events, script
from sgl_ext.bench.exactness.servers import Victim

FAULTS = ("different", "hung", "dead", "leaked", "refused")
"""Names of the counts that must be zero."""
_PROGRESS_S = 10.0
_QUIET_S = 60.0
"""Time in which a server without requests must release all resources, in seconds."""
_TOLD_S = 60.0
_LONGER = 10
"""Longest extension of a run until it covers the required counts, as a multiple of its time."""
_AFTERWARDS_S = 45.0
"""Time after the restart of a killed server in which requests may end with 503, in seconds."""


@dataclass
class Tally:
    """Counts of a run. Those in :data:`FAULTS` must be zero."""

    different: int = 0
    hung: int = 0
    dead: int = 0
    leaked: int = 0
    refused: int = 0
    """Requests that ended with an error or a broken connection and that no event explains."""
    requests: int = 0
    answers: int = 0
    """Compared answers; a request has ``n`` of them."""
    tokens: int = 0
    """Tokens of these answers."""
    several: int = 0
    """Requests with n > 1."""
    streams: int = 0
    logprobs: int = 0
    linked: int = 0
    followers: int = 0
    aborted: int = 0
    """Requests aborted by their id."""
    left: int = 0
    explained: int = 0
    """Requests that ended because of a kill."""
    flushes: int = 0
    kills: int = 0
    server: Counter[str] = field(default_factory=Counter)
    """Counters of the servers under test."""

    def add(self, asked: Ask, found: Found) -> None:
        self.requests += 1
        self.answers += len(found.answers)
        self.tokens += sum(len(answer.tokens) for answer in found.answers.values())
        self.several += asked.n > 1
        self.streams += asked.stream
        self.logprobs += asked.logprobs
        self.linked += asked.kind == "linked"
        self.followers += asked.kind == "follower"
        self.aborted += found.ending is Ending.ABORTED
        self.left += found.ending is Ending.LEFT

    def lacking(self, covers: Sequence[str], server: Mapping[str, int]) -> list[str]:
        """Returns the names in ``covers`` whose counts are zero.

        Args:
            server: counters of the servers so far.
        """
        return [name for name in covers if not getattr(self, name, server.get(name, 0))]

    @property
    def failed(self) -> str:
        """Description of the faults that are not zero; empty if all are."""
        return ", ".join(f"{getattr(self, name)} {name}" for name in FAULTS if getattr(self, name))


class Load:
    """Clients that send the requests of their scripts to one or two servers.

    Args:
        victims: the server under test, and its peer if it has one.
        clients: number of clients of each server.
        stock: URL of stock SGLang.
        texts: prompts of the requests.
        deadline: deadline of a request, in seconds.
        failures: file for the details of each fault, with a JSON object per line.
    """

    def __init__(
        self,
        victims: Sequence[Victim],
        clients: Sequence[int],
        stock: str,
        texts: Texts,
        seed: int,
        deadline: float,
        failures: Path,
    ) -> None:
        self.tally = Tally()
        self._victims, self._clients = victims, clients
        self._stock_url, self._texts, self._seed = stock, texts, seed
        self._deadline, self._failures = deadline, failures
        self._open = asyncio.Event()
        self._under_way = 0
        self._ended = False
        self._paused = 0.0
        self._counts: dict[tuple[str, int, str], float] = {}
        self._killed_at = float("-inf")

    async def run(self, seconds: float, covers: Sequence[str] = ()) -> Tally:
        """Runs the load for ``seconds``, and longer until each count of ``covers`` is above zero.

        Raises:
            ExtError: stock SGLang does not answer, or a killed server does not start.
        """
        async with session() as http:
            self._http = http
            self._stock = Stock(http, self._stock_url)
            await asyncio.to_thread(self._texts.create, self._victims[0].url)
            try:
                await self._drive(seconds, covers)
            except ExceptionGroup as group:
                raise group.exceptions[0] from None
            if not self.tally.dead:
                await self._look()
            self.tally.server = self._counted()
        return self.tally

    async def _drive(self, seconds: float, covers: Sequence[str]) -> None:
        self._open.set()
        async with asyncio.TaskGroup() as group:
            telling = group.create_task(self._tell())
            clients = [
                group.create_task(self._client(100 * at + number, victim))
                for at, (victim, count) in enumerate(zip(self._victims, self._clients, strict=True))
                for number in range(count)
            ]
            await self._events(seconds)
            await self._cover(_LONGER * seconds, covers)
            self._ended = True
            self._open.set()
            await asyncio.wait(clients)
            telling.cancel()

    # Events

    async def _events(self, seconds: float) -> None:
        began = time.monotonic()
        for at, event in [*events(seconds), (seconds, None)]:
            while time.monotonic() - began - self._paused < at:
                self._check_alive()
                if self.tally.dead:
                    return
                await asyncio.sleep(0.2)
            if event is Event.BUSY_FLUSH:
                for victim in self._victims:
                    await self._flush(victim.url)
            elif event is Event.FLUSH:
                self._open.clear()
                while self._under_way:
                    await asyncio.sleep(0.05)
                await self._look()
                self._open.set()
            elif event is Event.KILL:
                since = time.monotonic()
                await self._kill(self._victims[self.tally.kills % len(self._victims)])
                self._paused += time.monotonic() - since

    async def _cover(self, seconds: float, covers: Sequence[str]) -> None:
        """Waits until each count of ``covers`` is above zero. A slow machine needs more time."""
        give_up = time.monotonic() + seconds
        while self.tally.lacking(covers, self._counted()) and time.monotonic() < give_up:
            self._check_alive()
            if self.tally.dead:
                return
            await asyncio.sleep(1)

    async def _kill(self, victim: Victim) -> None:
        self._open.clear()
        await self._count(victim)
        self.tally.kills += 1
        await asyncio.to_thread(victim.kill)
        while self._under_way and victim is self._victims[0]:
            await asyncio.sleep(0.05)
        await asyncio.to_thread(victim.start)
        self._killed_at = time.monotonic()
        if victim is self._victims[0]:
            await asyncio.to_thread(self._texts.create, victim.url)
        self._open.set()

    def _check_alive(self) -> None:
        dead = [said for victim in self._victims if (said := victim.died())]
        if dead and not self.tally.dead:
            self.tally.dead = len(dead)
            for said in dead:
                self._note("dead", said=said)

    async def _dying(self) -> None:
        """Waits until a dying server has ended, because its connections end before its process."""
        for _ in range(50):
            self._check_alive()
            if self.tally.dead:
                return
            await asyncio.sleep(0.1)

    async def _flush(self, url: str) -> bool:
        try:
            async with asyncio.timeout(_TOLD_S), self._http.post(f"{url}/flush_cache") as answer:
                await answer.read()
                return answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def _look(self) -> None:
        """Checks that servers without requests hold no resources, and flushes their caches."""
        for victim in self._victims:
            held: Any = "no answer"
            give_up = time.monotonic() + _QUIET_S
            while held and time.monotonic() < give_up:
                self._check_alive()
                if self.tally.dead:
                    return
                await asyncio.sleep(0.2)
                held = _held(state) if (state := await self._state(victim)) else "no answer"
            await self._count(victim)
            flushed = await self._flush(victim.url)
            while not flushed and time.monotonic() < give_up:
                await asyncio.sleep(0.2)
                flushed = await self._flush(victim.url)
            self.tally.flushes += flushed
            self._check_alive()
            if (held or not flushed) and not self.tally.dead:
                self.tally.leaked += 1
                self._note("leaked", server=victim.name, held=held, flushed=flushed)

    # Clients

    async def _client(self, number: int, victim: Victim) -> None:
        material = self._texts.material
        if victim is not self._victims[0]:
            material = Material(material.talks)
        for count, asked in enumerate(script(self._seed, number, material)):
            await asyncio.sleep(asked.pause)
            while not self._open.is_set():  # it may have been cleared again meanwhile
                await self._open.wait()
            if self._ended:
                return
            self._under_way += 1
            try:
                await self._one(f"{self._seed}/{number}/{count}", victim, asked)
            finally:
                self._under_way -= 1

    async def _one(self, rid: str, victim: Victim, asked: Ask) -> None:
        prompt = await self._texts.prompt(asked, self._stock)
        body = greedy(prompt.body, prompt.answer, n=asked.n)
        body |= {"rid": rid, "stream": asked.stream, "priority": asked.priority}
        body |= {"return_logprob": asked.logprobs}
        deaths = victim.deaths
        found, expected = await asyncio.gather(
            ask(self._http, victim.url, body, asked.leave, self._deadline),
            self._stock.answer(prompt.ids, prompt.answer),
        )
        self.tally.add(asked, found)
        difference = compare(expected, found, asked.n, logprobs=asked.logprobs)
        killed = victim.down or victim.deaths != deaths
        what = ""
        if difference is not None:
            what = "different"
            self.tally.different += 1
        elif found.ending is Ending.HUNG:
            what = "hung"
            self.tally.hung += 1
        elif found.ending in (Ending.CUT, Ending.REFUSED):
            lately = time.monotonic() - self._killed_at < _AFTERWARDS_S
            if killed or (lately and "503" in found.said):
                self.tally.explained += 1
            else:
                await self._dying()
                if not self.tally.dead:
                    what = "refused"
                    self.tally.refused += 1
        if what:
            self._note_request(what, rid, asked, prompt, expected, found, difference)

    # Reports

    async def _tell(self) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(_PROGRESS_S)
            for victim in self._victims:
                await self._count(victim)
            tally = self.tally
            print(
                f"{time.monotonic() - began:5.0f} s: {tally.answers} answers of {tally.requests} "
                f"requests ({self._under_way} in progress), {tally.different} different, "
                f"{tally.hung} hung, {tally.leaked} leaked, {tally.refused} refused; "
                + ", ".join(f"{name} {count}" for name, count in sorted(self._counted().items())),
                flush=True,
            )

    async def _state(self, victim: Victim) -> dict[str, Any]:
        """Returns the internal state and load of a server's scheduler; empty without an answer."""
        if victim.down:
            return {}
        try:
            url = f"{victim.url}/server_info"
            async with asyncio.timeout(_TOLD_S), self._http.get(url) as answer:
                found: dict[str, Any] = (await answer.json())["internal_states"][0]
            url = f"{victim.url}/v1/loads?include=core"
            async with asyncio.timeout(_TOLD_S), self._http.get(url) as answer:
                return {**found, "load": (await answer.json())["loads"][0]}
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, LookupError):
            return {}

    async def _count(self, victim: Victim) -> None:
        state = await self._state(victim)
        for name, count in counts_of(state.get("sgl_ext", {})).items():
            self._counts[victim.name, victim.deaths, name] = count

    def _counted(self) -> Counter[str]:
        """Returns the sums of the counters over all servers, killed ones included."""
        counts = Counter[str]()
        for (_, _, name), count in self._counts.items():
            counts[name] += int(count)
        return counts

    def _note_request(
        self,
        what: str,
        rid: str,
        asked: Ask,
        prompt: Prompt,
        expected: Answer,
        found: Found,
        difference: Difference | None,
    ) -> None:
        self._note(
            what,
            rid=rid,
            difference=difference and asdict(difference),
            ending=found.ending.value,
            seconds=found.seconds,
            said=found.said,
            ask=asdict(asked),
            body=prompt.body,
            prompt=prompt.ids,
            expected=list(expected.tokens),
            found={number: list(answer.tokens) for number, answer in found.answers.items()},
        )

    def _note(self, what: str, **more: Any) -> None:
        with self._failures.open("a") as sink:
            sink.write(json.dumps({"what": what, "at": time.strftime("%H:%M:%S"), **more}) + "\n")


def counts_of(state: Mapping[str, Any]) -> dict[str, float]:
    """Returns the counters that show which powers a server used."""
    found: dict[str, float] = {}
    if swap := state.get("swap"):
        names = ("swapped_out", "swapped_in", "recomputed")
        found |= {name: swap[name] for name in names}
    for name, tier in state.get("tiers", {}).items():
        found[f"{name}_hit_tokens"] = tier["hit_tokens"]
    if peer := state.get("peer"):
        names = ("retracted", "reclaimed", "replaced")
        found |= {f"peer_{name}": peer[name] for name in names if name in peer}
    return found


def _held(state: Mapping[str, Any]) -> str:
    """Returns a description of the resources that a server holds; empty if there are none."""
    ours = state.get("sgl_ext", {})
    found = {
        "running": state["load"].get("num_running_reqs", 0),
        "waiting": state["load"].get("num_waiting_reqs", 0),
        "swapped": ours.get("swap", {}).get("swapped", 0),
        "followed": ours.get("clusters", {}).get("followed", 0),
        **{f"{name}_queue": tier["queue_depth"] for name, tier in ours.get("tiers", {}).items()},
    }
    return ", ".join(f"{count} {name}" for name, count in found.items() if count)
