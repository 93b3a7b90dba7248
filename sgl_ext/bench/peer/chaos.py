"""Real servers of which one is killed, paused or pressed for its memory at a random moment.

A large server of the master's model says what is right. Every call has to end in time, with that or
with an error that the round explains, and nothing of the dead may be left.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import requests

from sgl_ext.bench.data.conversations import conversations
from sgl_ext.bench.harness.report import Report
from sgl_ext.bench.harness.server import Server, System, live, serve
from sgl_ext.bench.peer.questions import Answer, Call, Ending, Question, Tally, ask, learn
from sgl_ext.bench.peer.servers import COMMON, Lent, pair, wait_until_lent
from sgl_ext.bench.peer.victims import Victims, start_later
from sgl_ext.errors import ExtError
from sgl_ext.models import SMOLLM2, prepare

EVENTS = ("kill worker", "kill master", "pause worker", "pause master", "storm")
"""What happens, in turn."""
STREAMS = ("direct", "layers")
"""Of a master; each has its share of the rounds."""
LOCAL, BORROWED, OWN = 768, 3072, 1024
"""Tokens of the master, and the worker's own; what it lends is some 10,000 of its tokens."""
TERM_S = 4.0
"""Deadline and lease, of both."""
PAUSES_S = (1.3 * TERM_S, 5 * TERM_S)
"""Beyond deadline or lease, and some for longer than requests wait for memory."""
SLACK_S = 60.0
"""Beside deadline, lease and pause, for what is computed on cores that all share. A worker's own
requests are answered within the deadline and this."""
STORM_S, STORM_EVERY_S = 4.0, 0.1
_TERMS = {"deadline": f"{TERM_S:g}s", "lease": f"{TERM_S:g}s", "window": "200ms"}
_WORKER_TOKENS = 8
_LARGEST = 8000
"""Tokens of a worker's request; its model has 8,192 positions."""
_SHARING = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Three servers on the same cores: threads that spin would take them from each other."""
_COUNTS = {"master": ("retracted",), "worker": ("reclaimed", "replaced")}
"""In ``/server_info``, by role."""


class _Texts:
    """Prompts of the master, some asked again and again, and of the worker."""

    def __init__(self, model: Path) -> None:
        def some(count: int, tokens: tuple[int, int]) -> list[tuple[int, ...]]:
            found = conversations(model, count, turns=1, tokens=tokens)
            return [tuple(each.prompts[0]) for each in found]

        self._short, self._long = some(3, (200, 400)), some(3, (1000, 1400))
        chance = random.Random(0)  # noqa: S311
        self.worker = [
            Question(tuple(chance.randrange(1000, 40_000) for _ in range(length)), _WORKER_TOKENS)
            for length in (100, 400, OWN + 500)
        ]
        """The last one does not fit the worker's own memory."""

    def master(self, chance: random.Random) -> list[Question]:
        """Two that fit the master's own memory and two that do not; one of each may be cached."""
        first = chance.randrange(1000, 40_000)
        return [
            Question((*front, *chance.choice(texts)))
            for texts in (self._short, self._long)
            for front in ((), (first,))
        ]


def _ask_later(
    server: Server, question: Question, expected: Answer, deadline: float, delay: float
) -> Call:
    time.sleep(delay)
    return ask(server, question, expected, deadline)


class _Rounds:
    """Rounds with one pair, whose large server and worker say first what is right.

    Raises:
        ExtError: the master answers otherwise before anything has happened.
    """

    def __init__(self, pair: Victims, texts: _Texts) -> None:
        self._pair, self._texts = pair, texts
        worker = pair.servers["worker"]
        self._worker: list[tuple[Question, Answer]] = []
        for question in texts.worker:
            ids, _ = learn(worker, question)
            known = replace(question, end=ids[-1])
            self._worker.append((known, learn(worker, known)))
        self._span = self._undisturbed()

    def _undisturbed(self) -> float:
        """Seconds in which the master answers when nothing happens."""
        questions = self._texts.master(random.Random("undisturbed"))  # noqa: S311
        expected = [learn(self._pair.large, each) for each in questions]
        master = self._pair.servers["master"]
        wait_until_lent(master, BORROWED)
        with ThreadPoolExecutor(len(questions)) as threads:
            deadlines = [SLACK_S] * len(questions)
            calls = list(threads.map(partial(ask, master), questions, expected, deadlines))
        for call in calls:
            if call.ending is not Ending.RIGHT:
                raise ExtError(f"the master answers wrong before anything happens: {call.said}")
        return max(call.seconds for call in calls)

    def run(self, number: int, event: str) -> tuple[Tally, dict[str, Any]]:
        """What came of a round, and further columns of its row."""
        chance = random.Random(f"round {number}")  # noqa: S311
        questions = self._texts.master(chance)
        known = [(each, learn(self._pair.large, each)) for each in questions]
        self._lends()
        moment, pause = chance.uniform(0, self._span), chance.uniform(*PAUSES_S)
        deadline = 2 * TERM_S + pause + SLACK_S
        # Who comes later than a lease after the memory has gone is not admitted any more.
        delays = [chance.uniform(0, moment + TERM_S) for _ in known]
        began = time.monotonic()
        before = self._counts()
        tally = Tally()
        with ThreadPoolExecutor(64) as threads:
            asked = [
                threads.submit(_ask_later, self._pair.servers["master"], *each, deadline, delay)
                for each, delay in zip(known, delays, strict=True)
            ]
            time.sleep(moment)
            workers = self._happen(event, pause, chance, threads)
            calls = [each.result() for each in asked]
            heard = [each.result() for each in workers]
        explained = Ending.CUT if event == "kill master" else Ending.REFUSED
        tally.add("master", calls, frozenset({explained}))
        heard.append(self._afterwards(tally, known))
        tally.add("worker", heard, frozenset())
        leaks = self._pair.leaks()
        tally.faults += leaks
        return tally, {
            "at_s": moment,
            "pause_s": pause if event.startswith("pause") else None,
            **{key[1]: count - before.get(key, 0) for key, count in self._counts().items()},
            "leaks": len(leaks),
            "worker_answers": len(heard),
            "worker_slowest_s": max(call.seconds for call in heard),
            "master_slowest_s": max(call.seconds for call in calls),
            "seconds": time.monotonic() - began,
        }

    def _afterwards(self, tally: Tally, known: Sequence[tuple[Question, Answer]]) -> Call:
        """The pair lends again and is right; returns what the worker says that needs the memory."""
        master = self._pair.servers["master"]
        if self._lends():
            with ThreadPoolExecutor(len(known)) as threads:
                again = [threads.submit(ask, master, *each, SLACK_S) for each in known]
            tally.add("master, afterwards", [each.result() for each in again], frozenset())
        else:
            tally.hangs += 1
            tally.faults.append("the worker does not lend again")
        return self._ask_worker(self._worker[-1])

    def _lends(self) -> bool:
        try:
            wait_until_lent(self._pair.servers["master"], BORROWED)
        except (ExtError, requests.RequestException):
            return False
        return True

    def _counts(self) -> dict[tuple[int, str], int]:
        """What loans have cost so far, by process; nothing of one that does not answer."""
        found: dict[tuple[int, str], int] = {}
        for role, names in _COUNTS.items():
            server = self._pair.servers[role]
            with suppress(requests.RequestException):
                counts = live(server.url)["peer"]
                found |= {(server.process.pid, name): counts[name] for name in names}
        return found

    def _happen(
        self, event: str, pause: float, chance: random.Random, threads: ThreadPoolExecutor
    ) -> list[Future[Call]]:
        """Returns when it is over, with what the worker was asked meanwhile."""
        pair = self._pair

        def of_worker() -> list[Future[Call]]:
            return [threads.submit(self._ask_worker, each) for each in self._worker]

        if event == "storm":
            return self._storm(chance, threads)
        what, role = event.split()
        if what == "pause":
            with pair.paused(role):
                before = chance.uniform(0, pause / 2)
                time.sleep(before)
                found = of_worker() if role == "master" else []
                time.sleep(pause - before)
            return found
        pair.kill(role)
        found = of_worker() if role == "master" else []
        pair.start(role)
        start_later()
        return found

    def _storm(self, chance: random.Random, threads: ThreadPoolExecutor) -> list[Future[Call]]:
        """The worker has to have room for other requests all the time; their answers are short."""
        found = []
        for _ in range(round(STORM_S / STORM_EVERY_S)):
            question, right = chance.choice(self._worker)
            room = chance.randrange(OWN, _LARGEST) - len(question.prompt)
            pressing = replace(question, tokens=max(room, _WORKER_TOKENS))
            found.append(threads.submit(self._ask_worker, (pressing, right)))
            time.sleep(STORM_EVERY_S)
        return found

    def _ask_worker(self, known: tuple[Question, Answer]) -> Call:
        return ask(self._pair.servers["worker"], *known, TERM_S + SLACK_S)


def report_chaos(report: Report, rounds: int, logs: Path) -> None:
    """Adds a row for each round and figures of all: how many answers were wrong, calls that did
    not end in time or pairs that do not lend again, things left, and errors that say why.

    Raises:
        ExtError: a server does not start, or the pair does not answer right when nothing happens.
    """
    model = prepare(SMOLLM2)
    texts = _Texts(model)
    sums = dict.fromkeys(("wrong_answers", "hangs", "leaks", "errors"), 0)
    large = System("large", (*COMMON, "--max-total-tokens", "8192"), _SHARING)
    with serve([large], model, logs) as (right,):
        for stream, numbers in shares(rounds):
            setup = Lent(LOCAL, BORROWED, stream)
            sharing = {"master": _SHARING, "worker": _SHARING}
            with (
                pair(setup, logs / stream, own=OWN, terms=_TERMS, environments=sharing) as servers,
                ExitStack() as stack,
            ):
                master, worker = servers
                series = _Rounds(Victims(right, master, worker, stack, logs / stream), texts)
                for number in numbers:
                    event = EVENTS[number % len(EVENTS)]
                    tally, row = series.run(number, event)
                    report.runs.append(
                        {
                            "what": "chaos",
                            "round": number,
                            "stream": stream,
                            "event": event,
                            "right": tally.right,
                            "wrong": tally.wrong,
                            "errors": tally.errors,
                            "hangs": tally.hangs,
                            **row,
                            "faults": "; ".join(tally.faults),
                        }
                    )
                    for name in sums:
                        key = name.removesuffix("_answers")
                        sums[name] += report.runs[-1][key]
    report.figures["chaos_rounds"] = rounds
    report.figures |= {f"chaos_{name}": count for name, count in sums.items()}


def shares(rounds: int) -> Iterator[tuple[str, range]]:
    """The rounds of each stream, by number; if they are few, all with the first one."""
    each = max(-(-rounds // len(STREAMS)), len(EVENTS))
    for at, stream in enumerate(STREAMS):
        if numbers := range(at * each, min((at + 1) * each, rounds)):
            yield stream, numbers
