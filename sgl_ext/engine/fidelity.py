"""Whether linking serves the model at hand: exact where it must be, near enough where it is not.

The server asks itself, over its own API, before it is ready.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations
from statistics import mean
from typing import Any

import requests

from sgl_ext.chunks.compose import mark
from sgl_ext.chunks.divergence import divergence
from sgl_ext.client import ContextCache
from sgl_ext.engine.context_service import ContextService
from sgl_ext.errors import ExtError

_SALT = "ext:fidelity"
_EXACT = 0.02
"""Nats. What other shapes of matrix products change in bfloat16 is far below."""
_TOP = 256
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


class Probe:
    """Asks a running server.

    Args:
        headers: what its routes want, such as an API key.
    """

    def __init__(
        self, service: ContextService, url: str, api_key: str | None, *, verify: bool | str
    ) -> None:
        self._service = service
        self._url = url
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._verify = verify
        self._cache = ContextCache(url, api_key, _SALT, _DEADLINE_S, verify=verify)

    def measure(self) -> Fidelity:
        """Waits until the server listens, and takes some seconds.

        Raises:
            ExtError: the server does not answer as it should.
        """
        self._wait()
        created = [
            *self._cache.create(_NOTES[:2], method="primed", prefix=_LEAD),
            *self._cache.create(_NOTES, prefix=_LEAD),
            *self._cache.create(_NOTES[:1], method="full"),
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
            self._cache.delete(id_)
        return Fidelity(exact, mean(moved))

    def _wait(self) -> None:
        give_up = time.monotonic() + _DEADLINE_S
        while time.monotonic() < give_up:
            with suppress(requests.RequestException):
                url = f"{self._url}/model_info"
                if requests.get(url, headers=self._headers, verify=self._verify, timeout=5).ok:
                    return
            time.sleep(0.1)
        raise ExtError(f"the server at {self._url} did not listen within {_DEADLINE_S} s")

    def _differ(self, notes: Sequence[str], linked: str) -> float:
        encode = self._service.encode
        answer = encode(_ANSWER, False)
        plain = encode(_LEAD, True)
        for text in (*notes, _QUESTION):
            plain += encode(text, False)
        begin = len(plain) - 1
        right = self._distributions({"input_ids": plain + answer}, begin, len(answer))
        other = self._distributions({"text": linked + _ANSWER}, begin, len(answer))
        return mean(divergence(*pair) for pair in zip(right, other, strict=True))

    def _distributions(
        self, prompt: Mapping[str, Any], begin: int, count: int
    ) -> list[dict[int, float]]:
        body = {
            **prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": begin,
            "top_logprobs_num": _TOP,
            "cache_salt": _SALT,
        }
        try:
            answer = requests.post(
                f"{self._url}/generate",
                json=body,
                headers=self._headers,
                verify=self._verify,
                timeout=_DEADLINE_S,
            )
            answer.raise_for_status()
        except requests.RequestException as error:
            raise ExtError(f"the probe of linked chunks was not answered: {error}") from None
        tops = answer.json()["meta_info"]["input_top_logprobs"][-count:]
        return [{token: logprob for logprob, token, _ in top} for top in tops]


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
