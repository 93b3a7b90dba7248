"""Fidelity of linked chunks on the served model: a probe, and the bounds that it must meet.

A chunk that is linked behind the prefix that it was computed with must be exact up to rounding.
A moved chunk may diverge up to a bound. A server runs the probe over its own HTTP API before it is
ready, an engine when its contexts are first used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations
from statistics import mean
from typing import Protocol

import requests

from sgl_ext.chunks.divergence import Distribution, mean_divergence
from sgl_ext.client import ContextCache, ContextInfo
from sgl_ext.distributions import distributions
from sgl_ext.errors import ExtError
from sgl_ext.marks import mark

SALT = "ext:fidelity"
"""``cache_salt`` of the probe's requests."""
_EXACT = 0.02
"""Maximum divergence of a chunk in its own place, in nats. Matrix products of other shapes in
bfloat16 cause far less."""
TOP = 256
"""Number of the most likely tokens at each position whose logprobs are compared."""
_DEADLINE_S = 300.0
_LEAD = "Read these notes on four villages, then answer.\n\n"
_NOTES = (
    "Village: Ardlow\nArdlow lies on a hill above the lake. Its people keep goats and sell a hard "
    "white cheese at the harbour every Friday. The school has two teachers and a brass bell.\n\n",
    "Village: Benning\nBenning is known for its mill, which a flood carried away in 1911 and which "
    "was built again of red brick. Most families grow apples; the inn serves cider and trout.\n\n",
    "Village: Corrow\nCorrow has a railway station but no shop. A bus brings bread and papers in "
    "the morning. On the first Sunday of May there is a race around the chapel.\n\n",
    "Village: Dunmere\nDunmere stands among firs near the border. Carpenters there make boats, "
    "clocks and fiddles, and the oldest house belongs to a family of bell founders.\n\n",
)
_QUESTION = "Question: What do the people of Ardlow sell at the harbour, and when?\nAnswer:"
_ANSWER = " They sell a hard white cheese every Friday."

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fidelity:
    """Result of a probe of the model, in nats."""

    exact: float
    """Divergence of a chunk that is linked behind the prefix that it was computed with; expected to
    be due to rounding only."""
    divergence: float
    """Mean divergence of moved chunks with the default method, over the tokens of an answer."""


class Contexts(Protocol):
    """Interface of the context cache that the probe needs."""

    def create(
        self,
        chunks: Sequence[str],
        method: str | None = None,
        prefix: str | None = None,
    ) -> Sequence[ContextInfo]: ...

    def delete(self, id_: str) -> None: ...


Ask = Callable[[str | list[int], int, int], Sequence[Distribution]]
"""Function that returns the next-token distributions of the last tokens of a prompt. Its arguments
are the prompt, the number of these tokens, and the position of the first of them."""


class Probe:
    """Probe of a model.

    Args:
        encode: returns the token ids of a text; its second argument is True if the text begins
            the prompt.
        contexts: context cache of the model's server or engine.
        ask: requests next-token distributions from the model.
    """

    def __init__(
        self, encode: Callable[[str, bool], list[int]], contexts: Contexts, ask: Ask
    ) -> None:
        self._encode = encode
        self._contexts = contexts
        self._ask = ask

    def measure(self) -> Fidelity:
        """Measures the fidelity of linked chunks. It takes some seconds.

        Raises:
            ExtError: a context cannot be created, or the answers lack the distributions.
        """
        try:
            return self._measure()
        except ExtError as error:
            raise ExtError(
                f"cannot measure the fidelity of linked chunks: {error}; if this persists, remove "
                "the chunks section"
            ) from None

    def _measure(self) -> Fidelity:
        ids: list[str] = []
        try:
            for notes, options in (
                (_NOTES[:2], {"method": "primed", "prefix": _LEAD}),
                (_NOTES, {"prefix": _LEAD}),
                (_NOTES[:1], {"method": "full"}),
            ):
                ids += [context.id for context in self._contexts.create(notes, **options)]
            return self._differences(ids)
        finally:  # else they would prime the notes of another probe
            for id_ in ids:
                self._contexts.delete(id_)

    def _differences(self, ids: Sequence[str]) -> Fidelity:
        # The second note was computed behind the lead and the first note, as it is linked here.
        there = _LEAD + mark(ids[-1]) + mark(ids[1]) + _QUESTION
        exact = self._differ(_NOTES[:2], there)
        moved = [
            self._differ(
                [_NOTES[at] for at in order],
                _LEAD + "".join(mark(ids[2 + at]) for at in order) + _QUESTION,
            )
            for order in list(permutations(range(4)))[5::8]
        ]
        return Fidelity(exact, mean(moved))

    def _differ(self, notes: Sequence[str], linked: str) -> float:
        tokens = self._encode(_LEAD, True)
        for text in (*notes, _QUESTION):
            tokens += self._encode(text, False)
        begin, question = len(tokens), len(self._encode(_QUESTION, False))
        # Composition tokenizes the text behind the notes, question and answer, as one text.
        end = self._encode(_QUESTION + _ANSWER, False)
        right = self._ask(tokens[: begin - question] + end, len(end) - question, begin)
        asked = self._ask(linked + _ANSWER, len(end) - question, begin)
        return mean_divergence(right, asked)


def probe_over_http(
    url: str,
    api_key: str | None,
    encode: Callable[[str, bool], list[int]],
    *,
    verify: bool | str,
) -> Probe:
    """Returns a probe of the server at ``url``, and waits until the server listens.

    Raises:
        ExtError: the server does not listen within the deadline.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    _wait_until_listening(url, headers, verify)

    def ask(prompt: str | list[int], last: int, begin: int) -> Sequence[Distribution]:
        return distributions(
            url, prompt, last, begin, top=TOP, deadline=_DEADLINE_S, salt=SALT, headers=headers,
            verify=verify,
        ).distributions  # fmt: skip

    return Probe(encode, ContextCache(url, api_key, SALT, _DEADLINE_S, verify=verify), ask)


def _wait_until_listening(url: str, headers: Mapping[str, str], verify: bool | str) -> None:
    give_up = time.monotonic() + _DEADLINE_S
    while time.monotonic() < give_up:
        with suppress(requests.RequestException):
            if requests.get(f"{url}/model_info", headers=headers, verify=verify, timeout=5).ok:
                return
        time.sleep(0.1)
    raise ExtError(
        f"the server at {url} did not answer within {_DEADLINE_S:.0f} s; read the server's log"
    )


def require(found: Fidelity, method: str, largest: float) -> None:
    """Logs the fidelity, and raises ExtError if the model must not be served with chunks.

    Args:
        method: name of the link method that was probed.
        largest: maximum divergence of moved chunks, in nats.
    """
    logger.info(
        "linked chunks: %s diverges by %.3f nats from full computation; a chunk at its original "
        "position by %.4f",
        method, found.divergence, found.exact,
    )  # fmt: skip
    if not found.exact <= _EXACT:
        raise ExtError(
            f"a chunk that is linked at its original position diverges by {found.exact:.3f} nats "
            f"(rounding is below {_EXACT}), so this model cannot be served with chunks; remove "
            "the chunks section"
        )
    if not found.divergence <= largest:
        raise ExtError(
            f"chunks linked by {method} diverge by {found.divergence:.3f} nats on the probe, more "
            f"than chunks.largest_divergence = {largest}; choose another chunks.method, raise the "
            "limit, or remove the chunks section"
        )
