"""The script of an exactness run: what each client asks, and what happens to the server meanwhile.

Plain data drawn from a seed; nothing here asks a server.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

Kind = Literal["plain", "linked", "follower"]


class Event(Enum):
    """Faults and commands that the server gets beside its clients' requests."""

    BUSY_FLUSH = "flush while busy"
    """``/flush_cache`` under load, which SGLang refuses."""
    FLUSH = "flush"
    """``/flush_cache`` when every request has ended, and a look at what is still held."""
    KILL = "kill -9"
    """Every process of the server, under load; then it starts again."""


@dataclass(frozen=True)
class Leave:
    """A client gives a request up.

    Attributes:
        by: ``id``: ``/abort_request``; ``disconnect``: the connection is closed.
        share: of the answer's tokens, of a stream, that come before.
        seconds: after which, where no tokens come one by one.
    """

    by: Literal["id", "disconnect"]
    share: float
    seconds: float


@dataclass(frozen=True)
class Ask:
    """One greedy request.

    Attributes:
        talk: number of the conversation, of the context, or of the prompt of contexts.
        turn: of a conversation; its prompt is all that was said and answered before.
        n: answers of one request; all of them are the same.
        pause: seconds before it.
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
    """Shares of what is asked, and how often events come.

    Attributes:
        n: how often 1, 2 and 3 answers are asked, relatively.
        leave: requests that are given up.
        linked: visits to prompts of contexts, where there are chunks; of conversations the rest.
        followers: visits to followers of stored contexts, where there are clusters.
        again: visits to one of the conversations that were had lately.
        flush: seconds between flushes of an idle server, and between those of a busy one.
        kill: seconds between kills.
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
    """Sizes of the material: turns of each conversation, prompts of contexts, followers."""

    talks: Sequence[int]
    linked: int = 0
    followers: int = 0


def script(seed: int, client: int, material: Material, mix: Mix = MIX) -> Iterator[Ask]:
    """The requests of a client, one after the other, without end."""
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
        stream = True  # the ids of several answers are known from their tokens only
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


def events(seconds: float, mix: Mix = MIX) -> list[tuple[float, Event]]:
    """Returns the events of ``seconds`` of load in order of time; none at the very end."""
    found = [
        *((at, Event.FLUSH) for at in _every(mix.flush, seconds)),
        *((at - 0.6 * mix.flush, Event.BUSY_FLUSH) for at in _every(mix.flush, seconds)),
        *((at, Event.KILL) for at in _every(mix.kill, seconds)),
    ]
    return sorted((each for each in found if each[0] < seconds), key=lambda each: each[0])


def _every(period: float, seconds: float) -> list[float]:
    return [period * at for at in range(1, int(seconds / period) + 1)]
