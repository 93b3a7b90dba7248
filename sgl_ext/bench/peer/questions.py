"""What servers are asked that may end meanwhile, and how such calls end."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import requests

from sgl_ext.bench.harness.server import Server
from sgl_ext.errors import ExtError

ALIKE = 1e-3
"""Logprobs that differ by no more are the same."""
_TOKENS = 12
_LEARN_DEADLINE_S = 600.0

Answer = tuple[Sequence[int], Sequence[float]]
"""Token ids and their logprobs."""


class Ending(Enum):
    """Of a call, as its client sees it."""

    RIGHT = "right"
    WRONG = "wrong"
    REFUSED = "refused"
    """503, and why."""
    CUT = "cut"
    """The connection ended, or there was none."""
    LATE = "late"


@dataclass(frozen=True)
class Question:
    """A greedy request.

    Attributes:
        tokens: that the answer may have, for which there has to be room.
        end: the token id after which it ends, if it comes.
    """

    prompt: tuple[int, ...]
    tokens: int = _TOKENS
    end: int | None = None

    @property
    def body(self) -> dict[str, Any]:
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": self.tokens}
        if self.end is None:
            sampling["ignore_eos"] = True
        else:
            sampling["stop_token_ids"] = [self.end]
        return {
            "input_ids": list(self.prompt), "sampling_params": sampling, "return_logprob": True,
        }  # fmt: skip


@dataclass(frozen=True)
class Call:
    """How a call ended; ``said`` is what came in place of the right answer."""

    ending: Ending
    seconds: float
    said: str = ""


@dataclass
class Tally:
    """Of a round's calls."""

    right: int = 0
    wrong: int = 0
    errors: int = 0
    """That the round explains."""
    hangs: int = 0
    faults: list[str] = field(default_factory=list)
    """What should not have been."""

    def add(self, who: str, calls: Sequence[Call], explained: frozenset[Ending]) -> None:
        for call in calls:
            if call.ending is Ending.RIGHT:
                self.right += 1
            elif call.ending in explained:
                self.errors += 1
            else:
                late = call.ending is Ending.LATE
                self.hangs += late
                self.wrong += not late
                self.faults.append(
                    f"{who}: {call.ending.value} after {call.seconds:.1f} s {call.said}".strip()
                )


def judge(status: int, text: str, expected: Answer) -> tuple[Ending, str]:
    """What a server's answer is, and what it says in place of the right one."""
    if status == requests.codes.unavailable and "Retry later" in text:
        return Ending.REFUSED, text
    if status != requests.codes.ok:
        return Ending.WRONG, f"{status} {text[:300]}"
    ids, logprobs = _answer(text)
    alike = len(logprobs) == len(expected[1]) and all(
        abs(ours - right) <= ALIKE for ours, right in zip(logprobs, expected[1], strict=True)
    )
    if list(ids) != list(expected[0]) or not alike:
        return Ending.WRONG, f"{list(ids)} {list(logprobs)}, not {expected}"
    return Ending.RIGHT, ""


def _answer(text: str) -> Answer:
    found = json.loads(text)
    entries = found["meta_info"].get("output_token_logprobs") or []
    return found["output_ids"], [entry[0] for entry in entries]


def ask(server: Server, question: Question, expected: Answer, deadline: float) -> Call:
    """Asks a server that may end meanwhile; returns after ``deadline`` seconds at the latest."""
    began = time.monotonic()
    try:
        found = requests.post(f"{server.url}/generate", json=question.body, timeout=deadline)
        ending, said = judge(found.status_code, found.text, expected)
    except requests.Timeout:
        ending, said = Ending.LATE, ""
    except requests.RequestException as error:
        ending, said = Ending.CUT, str(error)
    return Call(ending, time.monotonic() - began, said)


def learn(server: Server, question: Question) -> Answer:
    """What a server that nothing happens to says.

    Raises:
        ExtError: no answer.
    """
    url = f"{server.url}/generate"
    found = requests.post(url, json=question.body, timeout=_LEARN_DEADLINE_S)
    if not found.ok:
        raise ExtError(f"{server.url} answered {found.status_code}: {found.text}")
    return _answer(found.text)
