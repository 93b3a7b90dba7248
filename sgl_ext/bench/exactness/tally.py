"""Counts of an exactness run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sgl_ext.bench.exactness.answers import Ending, Found
from sgl_ext.bench.exactness.script import Ask

FAULTS = ("different", "hung", "dead", "leaked", "refused")
"""Names of the counts that must be zero."""


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
