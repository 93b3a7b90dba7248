"""Random schedules of one planner: requests that come and go while every source may fail.

A schedule is a sequence of events that its seed determines: requests arrive, are computed in parts,
interrupted and aborted, tiers answer late, wrongly or never, pages do not land, and other owners
take host memory. Nothing runs in another thread, and the clock advances only between events.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_ext.planning.compute_cost import ComputeCost
from sgl_ext.planning.costs import Costs
from sgl_ext.planning.load_cost import LoadCost
from sgl_ext.planning.plan import Load
from sgl_ext.planning.planner import Planner
from sgl_ext.planning.policies import Cake, Longest, Shortest
from sgl_ext.planning.want import Run, Want
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.host import HostPages

PAGE = 4
WAIT_S = 2.0
_TEXTS = 8
_LONGEST = 24
"""Maximum number of pages of a text."""
_FAR_S = (6.0, 70.0)
"""Jumps of the clock: beyond what blocks others, and beyond a want's lease."""
_DRAINING = 400
"""Steps within which every request has been computed, once no more arrive."""


@dataclass(eq=False)
class ScheduledTier:
    """Tier whose lookups and loads end when the schedule says so, and may fail.

    Attributes:
        memory: key whose page each place of host memory holds; None for anything else.
        stalls: whether loads and lookups do not end any more.
    """

    name: str
    has: set[Key]
    memory: list[Key | None]
    chance: random.Random
    lookups: list[tuple[Future[int], Sequence[Key]]] = field(default_factory=list)
    loads: list[tuple[Sequence[Key], Pages, Callable[[NDArray[np.bool_], float], None]]] = field(
        default_factory=list
    )
    stalls: bool = False

    @property
    def tier(self) -> Any:
        return SimpleNamespace(name=self.name)

    @property
    def throughput(self) -> Any:
        return SimpleNamespace(worthwhile=lambda *, faster: faster or self.chance.random() < 0.5)

    def lookup(self, keys: Sequence[Key]) -> Future[int]:
        found: Future[int] = Future()
        self.lookups.append((found, keys))
        return found

    def load_then(
        self, keys: Sequence[Key], pages: Pages, then: Callable[[NDArray[np.bool_], float], None]
    ) -> None:
        assert (pages >= 0).all(), (keys, pages)
        self.loads.append((keys, pages.copy(), then))

    def answer(self) -> None:
        """Ends a lookup: with a result, an error or its cancellation."""
        if self.stalls or not self.lookups:
            return
        found, keys = self.lookups.pop(self.chance.randrange(len(self.lookups)))
        if (how := self.chance.random()) < 0.05:
            found.set_exception(OSError("planted"))
        elif how < 0.1:
            found.cancel()
        else:
            has = [key in self.has for key in keys]
            found.set_result(has.index(False) if False in has else len(has))

    def land(self) -> None:
        """Ends the oldest load; its places are written whether or not its pages are good."""
        if self.stalls or not self.loads:
            return
        keys, pages, then = self.loads.pop(0)
        lost = self.chance.choice((0.0, 0.0, 0.2, 1.0))
        good = [key in self.has and self.chance.random() >= lost for key in keys]
        for key, place, landed in zip(keys, pages.tolist(), good, strict=True):
            self.memory[place] = key if landed else None
        then(np.array(good, bool), self.chance.random() / 100)


@dataclass
class Asked:
    """Request of a schedule."""

    name: str
    runs: tuple[Run, ...]
    tokens: int
    whole: bool
    linked: bool
    begin: int
    """Tokens that the device has, or that were computed."""


class Schedule:
    """One planner, two tiers, and the requests of a scheduler that computes one prompt at a time.

    Attributes:
        counts: events that have occurred.
    """

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)  # noqa: S311
        self.now = 1000.0
        places = chance.choice((6, 24, 64))
        self.memory: list[Key | None] = [None] * places
        self.host = HostPages(places)
        texts = [
            [f"{text}/{page}".encode() for page in range(chance.randint(1, _LONGEST))]
            for text in range(_TEXTS)
        ]
        system = [b"system/0", b"system/1"]
        self.texts = [system + text if chance.random() < 0.5 else text for text in texts]
        every = [key for text in self.texts for key in text]
        self.tiers = [
            ScheduledTier(name, {key for key in every if chance.random() < share}, self.memory,
                          chance)
            for name, share in (("near", chance.choice((0.3, 0.95))), ("far", 0.97))
        ]  # fmt: skip
        self.costs = Costs(
            ComputeCost(1e-3, chance.choice((1e-4, 1e-3))),
            {tier.name: LoadCost(1e-3, chance.choice((1e-5, 1e-3))) for tier in self.tiers},
            chunk=chance.choice((8, 32)),
        )
        policy = chance.choice((Shortest(chance.choice((0.0, 0.5))), Longest(), Cake()))
        self.hits: Counter[str] = Counter()
        self.planner = Planner(
            self.host, self.tiers, policy, self.costs,  # type: ignore[arg-type]  # as lower tiers
            page=PAGE, unit=chance.choice((1, 4)), wait=WAIT_S, hits=self.hits,
            clock=lambda: self.now, lock=threading.Lock(), spare=chance.choice((0, 4)),
        )  # fmt: skip
        self.waiting: dict[str, Asked] = {}
        self.current: Asked | None = None
        self.arrived = 0
        self.counts: Counter[str] = Counter()

    def run(self, events: int) -> Counter[str]:
        """Runs a number of events, then serves what waits; returns the events that occurred.

        Raises:
            AssertionError: the planner contradicts itself, serves wrong KV, leaks places of host
                memory, or leaves a request waiting.
        """
        actions: dict[Callable[[], object], float] = {
            self.arrive: 3, self.step: 10, self.end_lookup: 5, self.end_load: 6, self.abort: 1,
            self.ask_again: 1, self.press: 2, self.stall: 0.3, self.give_up: 0.5, self.wait: 3,
            self.forget_pages: 0.3, self.clear: 0.1,
        }  # fmt: skip
        for action in self.chance.choices([*actions], [*actions.values()], k=events):
            action()
            self.check()
        self.drain()
        return self.counts

    def drain(self) -> None:
        """Serves every request while tiers may hang, then ends all loads and checks for leaks."""
        for _ in range(_DRAINING):
            if not self.waiting and self.current is None:
                break
            self.now += 0.2
            self.end_lookup()
            self.end_load()
            self.step()
            self.check()
        else:
            raise AssertionError(f"{[*self.waiting]} and {self.current} were never computed")
        for tier in self.tiers:
            tier.stalls = False
            while tier.lookups:
                tier.answer()
            while tier.loads:
                tier.land()
        self.planner.advance()
        self.check()
        assert not self.planner.pending()
        assert not self.planner.wants.leaving
        assert not self.planner.wants.requests
        assert self.host.free + len(self.host) == self.host.capacity
        assert self.host.room == self.host.capacity  # nothing is pinned

    def check(self) -> None:
        self.planner.check_integrity()
        for key, place in self.host._index.items():
            assert self.memory[place] == key, (key, place, self.memory[place])

    # --- events -----------------------------------------------------------------------------------

    def arrive(self) -> None:
        if len(self.waiting) >= 12:
            return
        self.arrived += 1
        name = f"request {self.arrived}"
        linked = self.chance.random() < 0.3
        runs, tokens, begin = self.chunks() if linked else self.prefix()
        whole = self.chance.random() < 0.3
        asked = self.waiting[name] = Asked(name, runs, tokens, whole, linked, begin)
        self.ask(asked, self.chance.choice((0, 0, -1)))

    def prefix(self) -> tuple[tuple[Run, ...], int, int]:
        text = self.chance.choice(self.texts)
        first = self.chance.randrange(len(text)) if self.chance.random() < 0.3 else 0
        keys = text[first:]
        run = Run(keys, first * PAGE, self.host.lookup(keys))
        return (run,), len(text) * PAGE + self.chance.randint(1, 9), first * PAGE

    def chunks(self) -> tuple[tuple[Run, ...], int, int]:
        """Returns chunks that begin anywhere, also within a page, and the tokens between them."""
        runs, at = [], 0
        for number in range(self.chance.randint(1, 3)):
            keys = self.chance.choice(self.texts)
            at += self.chance.randint(0, 2 * PAGE)
            start = at - self.chance.randrange(PAGE)
            runs.append(Run(keys, start, self.host.lookup(keys), at, number))
            at = start + len(keys) * PAGE - self.chance.randrange(PAGE)
        return tuple(runs), at + PAGE + self.chance.randint(1, 9), 0

    def ask(self, asked: Asked, precedence: int) -> None:
        want = Want(asked.name, asked.runs, asked.tokens, precedence, asked.linked)
        (self.planner.load if asked.whole else self.planner.restore)(want)

    def ask_again(self) -> None:
        if self.waiting:
            asked = self.chance.choice([*self.waiting.values()])
            here = tuple(run._replace(here=self.host.lookup(run.keys)) for run in asked.runs)
            asked.runs = here
            self.ask(asked, self.chance.choice((0, -1, 1)))

    def step(self) -> None:
        """Step of the scheduler: computes a part of a prompt, or admits a request."""
        self.planner.advance()
        if self.current is not None:
            if self.planner.preferred() is not None and self.chance.random() < 0.5:
                self.counts["interrupted"] += 1
                self.planner.interrupt()
                self.waiting[self.current.name] = self.current
                self.current = None
                return
            self.forward(self.current)
            return
        for asked in [*self.waiting.values()]:
            if asked.whole:
                if not self.planner.ready(asked.name):
                    continue
                self.taken(asked)
                self.finish(asked)
                return
            if not self.planner.turn(asked.name, continuing=False):
                continue
            if self.forward(asked):
                return

    def taken(self, asked: Asked) -> None:
        """Takes a whole want, whose loaded pages are in host memory until then."""
        request = self.planner.wants.requests.get(asked.name)
        if request is not None and request.landed:
            self.counts["whole"] += 1
            pinned = {self.memory[place] for place in request.pinned.tolist()}
            assert pinned <= {key for run in asked.runs for key in run.keys}
            assert len(pinned) >= sum(request.landed.values()) - len(asked.runs) * _LONGEST
        self.planner.take(asked.name)

    def forward(self, asked: Asked) -> bool:
        """Computes a part of a prompt; returns whether it did not wait for loads."""
        name = asked.name
        if not self.planner.restores(name):
            self.counts["computed"] += 1
            self.finish(asked)
            return True
        if (part := self.planner.part(name, asked.begin)) is None:
            self.counts["waited"] += 1
            return False
        if asked.linked:
            latest, landed = self.planner.planned(name)
            assert latest == part
            for each in landed:
                for number, place in zip(each.numbers, each.places, strict=True):
                    assert self.memory[place] == each.run.keys[number]
                self.counts["linked"] += len(each.numbers)
            end = asked.tokens if part.stop is None else part.stop
        else:
            plan = self.planner.prefix_plan(name, part, asked.tokens)
            end = min(plan.reach(asked.begin, self.chance.choice((8, 32, 999))), asked.tokens)
            self.right(asked, plan.between(asked.begin, end))
        if end < asked.tokens:
            end = max(end // PAGE * PAGE, asked.begin)
        self.planner.computing(name, end)
        asked.begin = end
        self.waiting.pop(name, None)
        self.current = asked
        if end >= asked.tokens:
            self.counts["restored"] += 1
            report = self.planner.report(name)
            assert report is not None
            assert report["computed"] >= 0
            self.finish(asked)
        return True

    def right(self, asked: Asked, spans: Any) -> None:
        """Checks that the planner's places hold what the spans of a part load."""
        (run,) = asked.runs
        for span in spans:
            if isinstance(span.source, Load):
                first, last = span.start // PAGE, -(-span.end // PAGE)
                places = self.planner.places(asked.name, first * PAGE, last * PAGE)
                offset = run.start // PAGE
                assert [self.memory[place] for place in places] == [
                    *run.keys[first - offset : last - offset]
                ]
                self.counts["loaded"] += len(places)

    def finish(self, asked: Asked) -> None:
        self.planner.release(asked.name)
        self.waiting.pop(asked.name, None)
        if self.current is asked:
            self.current = None

    def abort(self) -> None:
        every = [*self.waiting.values(), *filter(None, [self.current])]
        if every:
            self.counts["aborted"] += 1
            asked = self.chance.choice(every)
            (self.planner.take if asked.whole else self.planner.release)(asked.name)
            self.finish(asked)

    def end_lookup(self) -> None:
        self.chance.choice(self.tiers).answer()

    def end_load(self) -> None:
        self.chance.choice(self.tiers).land()

    def press(self) -> None:
        """Stores pages of other owners, which evicts pages that nobody has pinned."""
        count = self.chance.randint(1, 6)
        if (places := self.host.reserve(min(count, self.host.capacity))) is None:
            self.counts["no room"] += 1
            return
        keys = self.chance.choice(self.texts)[: len(places)]
        self.host.release(places[len(keys) :])
        for key, place in zip(keys, places[: len(keys)].tolist(), strict=True):
            self.memory[place] = key
        self.host.publish(keys, places[: len(keys)])

    def stall(self) -> None:
        tier = self.chance.choice(self.tiers)
        tier.stalls = not tier.stalls
        self.counts["stalls"] += tier.stalls

    def give_up(self) -> None:
        self.counts["given up"] += self.planner.give_up_one()

    def wait(self) -> None:
        far = self.chance.random() < 0.05
        self.now += self.chance.choice(_FAR_S) if far else self.chance.random() / 10

    def forget_pages(self) -> None:
        """Has a tier evict pages that it has told about."""
        tier = self.chance.choice(self.tiers)
        tier.has -= {*self.chance.sample(sorted(tier.has), len(tier.has) // 4)}

    def clear(self) -> None:
        """Gives up all wants, as after a change of weights; their requests are computed."""
        self.counts["cleared"] += len(self.planner.clear())
