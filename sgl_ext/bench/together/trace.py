"""Trace of chats, questions about documents, batch jobs and urgent calls, as plain data.

Times are in units of the time that stock SGLang takes to compute a reference prompt, so that the
trace loads every machine alike. Nothing here contacts a server.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

REFERENCE = 2048
"""Tokens of the reference prompt."""

Kind = Literal["chat", "documents", "batch", "urgent"]
KINDS: tuple[Kind, ...] = ("chat", "documents", "batch", "urgent")
PRIORITIES: dict[Kind, int] = {"batch": 0, "chat": 20, "documents": 20, "urgent": 40}
"""Priorities; they differ by more than SGLang's threshold of preemption, which is 10."""

Prompt = TypeVar("Prompt")


@dataclass(frozen=True)
class Step(Generic[Prompt]):
    """One request of a client.

    Attributes:
        said: token ids that follow the earlier steps and their answers; empty with ``prompt``.
        prompt: whole prompt over documents, in place of ``said``.
        answer: number of new tokens.
        pause: units between the answer before and this request.
    """

    said: tuple[int, ...]
    answer: int
    pause: float = 0.0
    prompt: Prompt | None = None


@dataclass(frozen=True)
class Client(Generic[Prompt]):
    """Requests that follow one another; the first is sent ``at`` units after the start."""

    name: str
    kind: Kind
    at: float
    steps: tuple[Step[Prompt], ...]

    @property
    def priority(self) -> int:
        return PRIORITIES[self.kind]


@dataclass(frozen=True)
class Material(Generic[Prompt]):
    """Prompts that a trace is made of.

    Attributes:
        chats: token ids that the user says in each turn of each chat.
        documents: prompts over each set of documents, each with the documents in another order.
        batch: token ids of the prompts of batch jobs.
        urgent: token ids of the prompts of urgent calls.
    """

    chats: Sequence[Sequence[Sequence[int]]] = ()
    documents: Sequence[Sequence[Prompt]] = ()
    batch: Sequence[Sequence[int]] = ()
    urgent: Sequence[Sequence[int]] = ()


@dataclass(frozen=True)
class Mix:
    """Times and lengths of a trace.

    Attributes:
        load: prompt tokens per unit, relative to those of the reference prompt. At 1.0, stock
            SGLang is busy with prompts alone if it finds nothing in its cache.
        pause: mean units between the turns of a chat.
        burst: number of urgent calls that arrive at the same time.
        answers: new tokens of each kind.
    """

    load: float = 1.0
    pause: float = 4.0
    burst: int = 2
    answers: dict[Kind, int] = field(
        default_factory=lambda: {"chat": 24, "documents": 8, "batch": 128, "urgent": 8}
    )


MIX = Mix()


def tokens_of(material: Material[Prompt], lengths: Sequence[int]) -> int:
    """Returns the tokens of all prompts, with every chat's earlier turns in each of its turns.

    Args:
        lengths: tokens of the prompts of each set of documents.
    """
    chats = sum(
        len(turn) * (len(turns) - at) for turns in material.chats for at, turn in enumerate(turns)
    )
    documents = sum(
        length * len(orders) for length, orders in zip(lengths, material.documents, strict=True)
    )
    others = sum(len(prompt) for prompt in (*material.batch, *material.urgent))
    return chats + documents + others


def trace(
    material: Material[Prompt], lengths: Sequence[int], seed: int, mix: Mix = MIX
) -> tuple[Client[Prompt], ...]:
    """Returns the clients of a trace in order of arrival.

    Arrivals are uniform over the time that ``mix.load`` gives, as those of a Poisson process are if
    their number is known. Urgent calls arrive in bursts.

    Args:
        lengths: tokens of the prompts of each set of documents.
        seed: seed of all times.
    """
    chance = random.Random(f"trace/{seed}")  # noqa: S311
    length = tokens_of(material, lengths) / REFERENCE / mix.load
    found: list[Client[Prompt]] = []

    def add(kind: Kind, at: float, steps: Sequence[Step[Prompt]]) -> None:
        name = f"{seed}/{kind}/{sum(each.kind == kind for each in found)}"
        found.append(Client(name, kind, at, tuple(steps)))

    for turns in material.chats:
        said = [
            Step[Prompt](
                tuple(turn), mix.answers["chat"], chance.expovariate(1 / mix.pause) if at else 0.0
            )
            for at, turn in enumerate(turns)
        ]
        add("chat", chance.uniform(0, length), said)
    for orders in material.documents:
        for prompt in orders:
            step = Step((), mix.answers["documents"], prompt=prompt)
            add("documents", chance.uniform(0, length), [step])
    for job in material.batch:
        # Early, so that jobs run when others come.
        add("batch", chance.uniform(0, length / 2), [Step(tuple(job), mix.answers["batch"])])
    for begin in range(0, len(material.urgent), mix.burst):
        at = chance.uniform(length / 4, length)
        for call in material.urgent[begin : begin + mix.burst]:
            add("urgent", at, [Step(tuple(call), mix.answers["urgent"])])
    return tuple(sorted(found, key=lambda each: each.at))
