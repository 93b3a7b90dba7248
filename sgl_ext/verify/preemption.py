"""Preemption that a client provokes: urgent prompts that fill the device pool at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from threading import Event
from typing import Any

from sgl_ext.verify.background import background
from sgl_ext.verify.compare import Reply
from sgl_ext.verify.target import Target
from sgl_ext.verify.texts import Texts

ANSWER = 64
"""Tokens of the answers that are interrupted; more than a turn of the round-robin policy."""
_HELD = 8
"""Tokens of the urgent answers. SGLang computes waiting prompts before it decodes, so that all of
these requests run, and hold their KV, when the pool is full."""
_LONGEST, _SHORTEST, _MOST = 4096, 64, 128
"""Longest and shortest urgent prompt, and the most of them."""
_URGENT = 1_000_000
_BEGIN_S = 60.0
FILL_S = 300.0
"""Longest expected time to fill the pool. Requests that wait get no byte of their answer before."""


class Preemption:
    """Preemption of requests of a server.

    Args:
        info: the server's ``/server_info``.
        prompts: token ids of the prompts whose requests are preempted.
        per_token: seconds that the server takes to compute a token.
    """

    def __init__(
        self,
        target: Target,
        info: Mapping[str, Any],
        prompts: Sequence[Sequence[int]],
        per_token: float,
    ) -> None:
        self._target, self._prompts = target, prompts
        self._policy = info["sgl_ext"]["config"]["swap"]["policy"]
        pool, longest = int(info["max_total_num_tokens"]), int(info["max_req_input_len"])
        low_first = info.get("schedule_low_priority_values_first", False)
        self._urgent = -_URGENT if low_first else _URGENT
        # Room for one is made only if preempting all others suffices.
        length = min(_LONGEST, sum(map(len, prompts)) // 2, longest - _HELD - 2)
        self._length = max(length, _SHORTEST)
        self._count = pool // self._length + 2
        self.why_not = self._why_not(info, pool * per_token)
        """Reason why no preemption can be provoked; empty if it can."""

    def _why_not(self, info: Mapping[str, Any], seconds: float) -> str:
        by_priority = info.get("enable_priority_scheduling", False)
        preempts = by_priority and not info.get("disable_priority_preemption", False)
        if self._policy == "fcfs" or (self._policy == "sglang" and not preempts):
            return "requests are preempted only if memory runs out, which is not provoked"
        if self._count > _MOST or seconds > FILL_S:
            return (
                f"filling the device pool at once takes {self._count} prompts and about "
                f"{seconds:,.0f} s; a smaller --max-total-tokens lets it be verified"
            )
        queued = info.get("max_queued_requests")
        if queued is not None and queued < self._count + len(self._prompts):
            return f"{self._count} prompts at once exceed --max-queued-requests {queued}"
        return ""

    def answers(self, texts: Texts) -> list[Reply]:
        """Returns the answers to the prompts, whose requests are preempted if that is possible.

        Args:
            texts: draws the urgent prompts.

        Raises:
            ExtError: a prompt was not answered.
        """
        begun = [Event() for _ in self._prompts]

        def ask(ids: Sequence[int], begins: Event) -> Reply:
            try:
                return self._target.answer(
                    ids, ANSWER, likeliest=True, priority=-self._urgent, on_first=begins.set
                )
            finally:
                begins.set()

        def displace(at: int, ids: Sequence[int]) -> Reply:
            # Of another client each, to which a policy owes its share.
            return self._target.answer(ids, _HELD, priority=self._urgent, salt=f"sgl-ext-{at}")

        urgent = [*texts.draw(self._count, self._length)]
        asked = [background(partial(ask, *each)) for each in zip(self._prompts, begun, strict=True)]
        for begins in begun:
            begins.wait(_BEGIN_S)
        others = [background(partial(displace, at, ids)) for at, ids in enumerate(urgent)]
        for each in others:
            each.result()
        return [each.result() for each in asked]
