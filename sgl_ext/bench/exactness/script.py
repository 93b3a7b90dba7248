"""Script of an exactness run: the requests of each client, and the events of the servers.

The script is plain data that is drawn from a seed. Nothing here contacts a server.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

Kind = Literal["plain", "linked", "follower"]


class Event(Enum):
    """Fault or command that a server gets in addition to its clients' requests."""

    BUSY_FLUSH = "flush while busy"
    """``/flush_cache`` under load, which SGLang refuses."""
    FLUSH = "flush"
    """``/flush_cache`` after all requests have ended, and a check for leaked resources."""
    KILL = "kill -9"
    """SIGKILL of all processes of a server under load, and a restart."""


@dataclass(frozen=True)
class Leave:
    """Way in which a client gives a request up.

    Attributes:
        by: ``id``: by ``/abort_request``; ``disconnect``: the client closes the connection.
        share: share of the answer's tokens that a stream gives before.
        seconds: delay without a stream, in seconds.
    """

    by: Literal["id", "disconnect"]
    share: float
    seconds: float


@dataclass(frozen=True)
class Ask:
    """Greedy request.

    Attributes:
        talk: number of the conversation, of the prompt with contexts, or of the follower.
        turn: turn of a conversation; its prompt begins with all earlier turns and answers.
        n: number of answers; all of them are equal.
        leave: when and how the client gives the request up; None: never.
        pause: seconds before the request.
    """

    kind: Kind
    talk: int
    turn: int
    n: int
    stream: bool
    logprobs: bool
    priority: int
    leave: Leave | None
    pause: float


@dataclass(frozen=True)
class Mix:
    """Shares of the kinds of requests, and intervals of events.

    Attributes:
        n: relative frequencies of 1, 2 and 3 answers.
        stream: share of requests that are streamed.
        logprobs: share of requests with logprobs.
        leave: share of requests that are given up.
        linked: share of prompts with contexts, if ``chunks`` is on.
        followers: share of followers of stored contexts, if ``clusters`` is on. Conversations are
            the rest.
        again: share of the conversations that repeat a recent one.
        priorities: number of priorities.
        pause: mean pause before a turn after the first, in seconds.
        flush: seconds between flushes of an idle server, and between flushes of a busy one.
        kill: seconds between kills; infinite for none.
    """

    n: tuple[int, int, int] = (4, 3, 3)
    stream: float = 0.5
    logprobs: float = 0.7
    leave: float = 0.1
    linked: float = 0.25
    followers: float = 0.25
    again: float = 0.3
    priorities: int = 4
    pause: float = 0.2
    flush: float = 40.0
    kill: float = 150.0


MIX = Mix()
_LATELY = 6


@dataclass(frozen=True)
class Material:
    """Sizes of the material.

    Attributes:
        talks: number of turns of each conversation.
        linked: number of prompts with contexts.
        followers: number of followers of stored contexts.
    """

    talks: Sequence[int]
    linked: int = 0
    followers: int = 0


def script(seed: int, client: int, material: Material, mix: Mix = MIX) -> Iterator[Ask]:
    """Yields the requests of a client in order, without end."""
    chance = random.Random(f"{seed}/{client}")  # noqa: S311
    lately: list[int] = []
    while True:
        drawn = chance.random()
        if material.linked and drawn < mix.linked:
            yield _ask(chance, mix, "linked", chance.randrange(material.linked), 0)
        elif material.followers and drawn > 1 - mix.followers:
            yield _ask(chance, mix, "follower", chance.randrange(material.followers), 0)
        else:
            if lately and chance.random() < mix.again:
                talk = chance.choice(lately)
            else:
                talk = chance.randrange(len(material.talks))
                lately = [*lately, talk][-_LATELY:]
            for turn in range(material.talks[talk]):
                yield _ask(chance, mix, "plain", talk, turn)


def _ask(chance: random.Random, mix: Mix, kind: Kind, talk: int, turn: int) -> Ask:
    leave = None
    if chance.random() < mix.leave:
        by: Literal["id", "disconnect"] = chance.choice(("id", "disconnect"))
        leave = Leave(by, chance.uniform(0, 0.9), chance.uniform(0.02, 2.0))
    (n,) = chance.choices((1, 2, 3), mix.n)
    stream = chance.random() < mix.stream
    if leave and leave.by == "id" and n > 1:
        stream = True  # the ids of several answers are known only from their tokens
    return Ask(
        kind=kind,
        talk=talk,
        turn=turn,
        n=n,
        stream=stream,
        logprobs=chance.random() < mix.logprobs,
        priority=chance.randrange(mix.priorities),
        leave=leave,
        pause=chance.expovariate(1 / mix.pause) if turn else 0.0,
    )


def events(mix: Mix = MIX) -> Iterator[tuple[float, Event]]:
    """Yields the events of a run and their times in seconds, in order of time, without end."""
    return heapq.merge(
        _every(mix.flush, Event.FLUSH),
        _every(mix.flush, Event.BUSY_FLUSH, first=0.4 * mix.flush),
        _every(mix.kill, Event.KILL),
        key=lambda each: each[0],
    )


def _every(
    period: float, event: Event, first: float | None = None
) -> Iterator[tuple[float, Event]]:
    """Yields the times of an event, without end."""
    at = period if first is None else first
    while True:
        yield at, event
        at += period
