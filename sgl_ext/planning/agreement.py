"""Agreement of pipeline stages on what their tiers have.

Each stage has its own scheduler and its own tiers, which hold the KV of its layers. All schedulers
have to plan the same steps. The first stage plans a step up to a round of micro-batches before the
last one does, and needs the results of the others in between, so that stages cannot wait for each
other while they plan. The first stage therefore decides what depends on time: the others report
what they have and keep it, and the first stage answers every question of a step with what all of
them have reported by then. The others ask the same questions in the same order, and take its
answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from sgl_ext.errors import ExtError


class Found(NamedTuple):
    """Pages that follow the KV of a request on the device."""

    pages: int
    """Number of leading pages that can be restored."""
    ready: bool
    """Whether it is known that further pages need not be awaited."""
    loading: float = 0.0
    """Estimated seconds of loading those of these pages that no load has taken."""
    computing: float = 0.0
    """Estimated seconds of computing them instead."""


class Report(msgspec.Struct, frozen=True, tag="report"):
    """Pages of a request that a stage has pinned, until its version changes or the request ends."""

    rid: str
    version: int
    """Number of the question; changes when other pages are asked for."""
    found: Found


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """Further stores of a stage that have ended, in their order."""

    epoch: int
    """Number of resets before."""
    results: list[bool]
    """Whether each store was successful."""


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """Pages of a request that all stages have pinned."""

    rid: str
    version: int
    found: Found


class Stored(msgspec.Struct, frozen=True, tag="stored"):
    """Further stores that have ended in all stages, in their order."""

    results: list[bool]


class ToFirst(Protocol):
    """Channel of a further stage to the first one."""

    def send(self, message: Report | Ended) -> None: ...

    def receive(self) -> Answer | Stored:
        """Waits for the next message.

        Raises:
            ExtError: none has come before the deadline.
        """


class ToOthers(Protocol):
    """Channel of the first stage to the others."""

    stages: int
    """Number of the other stages."""

    def send(self, message: Answer | Stored) -> None:
        """Sends a message to all of them.

        Raises:
            ExtError: one of them is gone.
        """

    def received(self) -> Iterable[tuple[int, Report | Ended]]:
        """Returns the messages that have come, each with the number of its stage, from 1 on."""


Awaited = Callable[[float, float], bool]
"""Function of the seconds of loading and of computing pages; returns whether they are awaited."""


def _nothing(_loading: float, _computing: float) -> bool:
    return False


class Agreement(ABC):
    """Consensus of pipeline stages; every stage makes the same calls in the same order."""

    @abstractmethod
    def prefix(self, rid: str, version: int, found: Found, *, awaited: Awaited = _nothing) -> Found:
        """Returns what all stages have for a request; ready when the request can be admitted.

        Before it is ready, its pages are 0 until all stages have reported theirs.

        Args:
            version: number of the question, the same in all stages.
            found: what this stage has.
            awaited: is called with the seconds of the stage that needs most; otherwise the request
                is admitted, and all stages restore it at once. Only the first stage's counts.
        """

    @abstractmethod
    def stored(self, results: Sequence[bool]) -> Sequence[bool]:
        """Returns the results of further stores that have ended in all stages, in their order.

        A store was successful if it was so in all stages.

        Args:
            results: results of stores of this stage that have ended since the last call.
        """

    @abstractmethod
    def forget(self, rid: str) -> None:
        """Forgets a request that does not wait any more."""

    @abstractmethod
    def reset(self) -> None:
        """Forgets all requests and stores."""


class FirstStage(Agreement):
    """Decides, from what this stage has and what the others have reported."""

    def __init__(self, others: ToOthers) -> None:
        self._others = others
        self._asked: dict[str, tuple[int, dict[int, Found]]] = {}
        """Version of the question and the reports of the other stages, for each waiting request."""
        self._ended: list[deque[bool]] = [deque() for _ in range(others.stages + 1)]
        """Results of the stores of each stage that have not ended in all of them."""
        self._epoch = 0

    def prefix(self, rid: str, version: int, found: Found, *, awaited: Awaited = _nothing) -> Found:
        if rid not in self._asked or self._asked[rid][0] != version:
            self._asked[rid] = version, {}
        self._receive()
        reports = self._asked[rid][1]
        every = [found, *reports.values()]
        if not found.pages:  # nothing is loaded, whatever the others have
            agreed = found
        elif len(reports) == self._others.stages and all(each.ready for each in every):
            loading = max(each.loading for each in every)
            computing = max(each.computing for each in every)
            agreed = Found(min(each.pages for each in every), not awaited(loading, computing))
        else:
            agreed = Found(0, ready=False)
        self._others.send(Answer(rid, version, agreed))
        return agreed

    def stored(self, results: Sequence[bool]) -> Sequence[bool]:
        self._ended[0] += results
        self._receive()
        count = min(map(len, self._ended))
        each = [[ended.popleft() for ended in self._ended] for _ in range(count)]
        agreed = [all(of_stages) for of_stages in each]
        self._others.send(Stored(agreed))
        return agreed

    def forget(self, rid: str) -> None:
        self._asked.pop(rid, None)

    def reset(self) -> None:
        self._asked.clear()
        for ended in self._ended:
            ended.clear()
        self._epoch += 1

    def _receive(self) -> None:
        for stage, message in self._others.received():
            if isinstance(message, Ended):
                if message.epoch == self._epoch:
                    self._ended[stage] += message.results
            elif (asked := self._asked.get(message.rid)) and asked[0] == message.version:
                asked[1][stage] = message.found


class FurtherStage(Agreement):
    """Reports to the first stage, and takes its answers."""

    def __init__(self, first: ToFirst) -> None:
        self._first = first
        self._reported: dict[str, tuple[int, Found]] = {}
        """Last report on each waiting request."""
        self._epoch = 0

    def prefix(
        self,
        rid: str,
        version: int,
        found: Found,
        *,
        awaited: Awaited = _nothing,  # noqa: ARG002
    ) -> Found:
        if self._reported.get(rid) != (version, found):
            self._reported[rid] = version, found
            self._first.send(Report(rid, version, found))
        answer = self._first.receive()
        if not isinstance(answer, Answer) or (answer.rid, answer.version) != (rid, version):
            raise _diverged(f"look-up {version} of {rid}", answer)
        return answer.found

    def stored(self, results: Sequence[bool]) -> Sequence[bool]:
        if results:
            self._first.send(Ended(self._epoch, [*results]))
        answer = self._first.receive()
        if not isinstance(answer, Stored):
            raise _diverged("stores that have ended", answer)
        return answer.results

    def forget(self, rid: str) -> None:
        self._reported.pop(rid, None)

    def reset(self) -> None:
        self._reported.clear()
        self._epoch += 1


def _diverged(asked: str, answer: object) -> ExtError:
    return ExtError(
        f"pipeline stages plan different steps: this stage asked for {asked}, and the first stage "
        f"answered {answer}; restart the server, and report the configuration"
    )
