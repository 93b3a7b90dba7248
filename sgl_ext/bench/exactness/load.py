"""Load of an exactness run: sends the requests of its script and counts faults."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import aiohttp

from sgl_ext.bench.exactness.answers import Answer, Difference, Ending, Found, compare
from sgl_ext.bench.exactness.clients import Stock, ask, greedy
from sgl_ext.bench.exactness.material import Prompt, Texts
from sgl_ext.bench.exactness.script import MIX, Ask, Event, Material, events, script
from sgl_ext.bench.exactness.servers import Victim
from sgl_ext.bench.exactness.states import counts_of, descriptors, held, state_of
from sgl_ext.bench.exactness.tally import Tally
from sgl_ext.bench.harness.session import session

_PROGRESS_S = 10.0
_QUIET_S = 60.0
"""Time in which a server without requests must release all resources, in seconds."""
_TOLD_S = 60.0
_LONGER = 10
"""Longest extension of a run until it covers the required counts, as a multiple of its length."""
_AFTERWARDS_S = 45.0
"""Time after the restart of a killed server in which requests may end with 503, in seconds."""
_OPENED = 32
"""File descriptors that a server may open for good while it serves; more count as leaked."""


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
        self._begun, self._most = 0, float("inf")
        self._covers: Sequence[str] = ()
        self._descriptors: dict[tuple[str, int], int] = {}

    async def run(
        self, seconds: float, covers: Sequence[str] = (), requests: int | None = None
    ) -> Tally:
        """Runs the load for ``seconds``, and longer until each count of ``covers`` is above zero.

        Args:
            requests: number of requests of all clients together that ends the run in place of
                ``seconds``; no server is killed. None: ``seconds`` decide.

        Raises:
            ExtError: stock SGLang does not answer, or a killed server does not start.
        """
        async with session() as http:
            self._http = http
            self._stock = Stock(http, self._stock_url)
            await asyncio.to_thread(self._texts.create, self._victims[0].url)
            for victim in self._victims:
                self._open_now(victim)
            if requests is not None:
                self._most, seconds, self._covers = requests, float("inf"), covers
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
            if not self._enough():
                await self._cover(_LONGER * seconds, covers)
            self._ended = True
            self._open.set()
            await asyncio.wait(clients)
            telling.cancel()

    # Events

    async def _events(self, seconds: float) -> None:
        began = time.monotonic()
        mix = MIX if self._most == float("inf") else replace(MIX, kill=float("inf"))
        due = takewhile(lambda each: each[0] < seconds, events(mix))
        for at, event in chain(due, [(seconds, None)]):
            while time.monotonic() - began - self._paused < at:
                self._check_alive()
                if self.tally.dead or self._enough():
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
        self._open_now(victim)
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
            give_up = time.monotonic() + _QUIET_S
            what, flushed = "no answer", False
            while what and time.monotonic() < give_up:
                self._check_alive()
                if self.tally.dead:
                    return
                await asyncio.sleep(0.2)
                state = await state_of(self._http, victim)
                what = held(state) if state else "no answer"
                if not what:
                    flushed = await self._flush(victim.url)
                    state = await state_of(self._http, victim)
                    what = held(state, flushed=flushed) if state else "no answer"
            await self._count(victim)
            self.tally.flushes += flushed
            self._check_alive()
            if (more := descriptors(victim) - self._open_now(victim)) > _OPENED:
                what = f"{what}, {more} file descriptors".removeprefix(", ")
            if what and not self.tally.dead:
                self.tally.leaked += 1
                self._note("leaked", server=victim.name, held=what)

    def _enough(self) -> bool:
        """Returns whether as many requests have begun as the run is to have."""
        lacking = self.tally.lacking(self._covers, self._counted()) if self._covers else ()
        return self._begun >= self._most * (_LONGER if lacking else 1)

    def _open_now(self, victim: Victim) -> int:
        """Returns the file descriptors that the server had at its first call, before its load."""
        return self._descriptors.setdefault((victim.name, victim.deaths), descriptors(victim))

    # Clients

    async def _client(self, number: int, victim: Victim) -> None:
        material = self._texts.material
        if victim is not self._victims[0]:
            material = Material(material.talks)
        for count, asked in enumerate(script(self._seed, number, material)):
            await asyncio.sleep(asked.pause)
            while not self._open.is_set():  # it may have been cleared again meanwhile
                await self._open.wait()
            if self._ended or self._enough():
                return
            self._begun += 1
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

    async def _count(self, victim: Victim) -> None:
        state = await state_of(self._http, victim)
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
