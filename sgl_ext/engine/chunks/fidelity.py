"""Whether linking serves the model at hand: exact where it must be, near enough where it is not.

A server asks itself, over its own API, before it is ready; an engine when it first has contexts.
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

from sgl_ext.chunks.compose import mark
from sgl_ext.chunks.divergence import Distribution, mean_divergence
from sgl_ext.client import ContextCache, ContextInfo
from sgl_ext.distributions import distributions
from sgl_ext.errors import ExtError

SALT = "ext:fidelity"
"""Of the probe's requests."""
_EXACT = 0.02
"""Nats. What other shapes of matrix products change in bfloat16 is far below."""
TOP = 256
"""Tokens whose logprobs are compared."""
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
    """What a probe of the model has found; nats."""

    exact: float
    """Divergence of a chunk behind what it was computed behind: nothing but rounding."""
    divergence: float
    """Mean divergence of moved chunks by the default method, over the tokens of an answer."""


class Contexts(Protocol):
    """Of the server at hand."""

    def create(
        self,
        chunks: Sequence[str],
        method: str | None = None,
        prefix: str | None = None,
    ) -> Sequence[ContextInfo]: ...

    def delete(self, id_: str) -> None: ...


Ask = Callable[[str | list[int], int, int], Sequence[Distribution]]
"""Of a prompt, the distributions of its last tokens: how many, and the position of the first."""


class Probe:
    """Asks a model.

    Args:
        encode: token ids of a text, and whether it begins the prompt.
    """

    def __init__(
        self, encode: Callable[[str, bool], list[int]], contexts: Contexts, ask: Ask
    ) -> None:
        self._encode = encode
        self._contexts = contexts
        self._ask = ask

    def measure(self) -> Fidelity:
        """Takes some seconds.

        Raises:
            ExtError: there is no answer that it can be told from.
        """
        created = [
            *self._contexts.create(_NOTES[:2], method="primed", prefix=_LEAD),
            *self._contexts.create(_NOTES, prefix=_LEAD),
            *self._contexts.create(_NOTES[:1], method="full"),
        ]
        ids = [context.id for context in created]
        # The second note was primed with the first one, behind the same beginning.
        there = _LEAD + mark(ids[-1]) + mark(ids[1]) + _QUESTION
        exact = self._differ(_NOTES[:2], there)
        moved = [
            self._differ(
                [_NOTES[at] for at in order],
                _LEAD + "".join(mark(ids[2 + at]) for at in order) + _QUESTION,
            )
            for order in list(permutations(range(4)))[5::8]
        ]
        for id_ in ids:
            self._contexts.delete(id_)
        return Fidelity(exact, mean(moved))

    def _differ(self, notes: Sequence[str], linked: str) -> float:
        tokens = self._encode(_LEAD, True)
        for text in (*notes, _QUESTION):
            tokens += self._encode(text, False)
        begin, question = len(tokens), len(self._encode(_QUESTION, False))
        # With the answer the text behind the notes is tokenised as a whole.
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
    """A probe of the server at ``url``, which may be about to listen; waits until it does.

    Raises:
        ExtError: it does not in time.
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
    raise ExtError(f"the server at {url} did not listen within {_DEADLINE_S} s")


def require(found: Fidelity, method: str, largest: float) -> None:
    """Raises ExtError if chunks must not be served."""
    logger.info(
        "linked chunks: %s diverges by %.3f nats from computing everything; a chunk in its own "
        "place by %.4f",
        method, found.divergence, found.exact,
    )  # fmt: skip
    if not found.exact <= _EXACT:
        raise ExtError(
            f"a chunk that is linked where it was computed diverges by {found.exact:.3f} nats "
            f"(rounding is below {_EXACT}): this model cannot be served with chunks; leave the "
            "section out"
        )
    if not found.divergence <= largest:
        raise ExtError(
            f"chunks linked by {method} diverge by {found.divergence:.3f} nats on the probe, more "
            f"than chunks.largest_divergence = {largest}; choose another chunks.method, raise the "
            "bound, or leave the section out"
        )
