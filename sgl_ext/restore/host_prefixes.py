"""Prefixes in host memory that are restored within one forward (CacheFlow §3.1)."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sgl_ext.plan import Compute, LoadOrCompute, PrefillPlan, Span
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.host import HostPages


class Strategy(Enum):
    """What is computed while the rest loads."""

    TOKENS = "tokens"
    """The first tokens, of all layers."""
    LAYERS = "layers"
    """The lower layers, of all tokens."""


@dataclass
class Held:
    """Consecutive pages of a prompt in host memory."""

    first: int
    """Number of the first of them in the prompt."""
    pages: Pages
    by: Strategy
    since: float
    computed: int = 0
    """Tokens that forwards have computed instead of taking them; by layers, as many tokens as the
    layers are worth."""
    request: Any = None
    """The scheduler's, once the first of the forwards that take some of them is about to run."""
    told: dict[str, Any] | None = None
    """What the request's answer will say of it, once the last of the forwards has begun."""


class HostPrefixes:
    """Keeps pages where they are until the forwards that take them have ended.

    Args:
        page: tokens.
    """

    def __init__(self, host: HostPages, page: int) -> None:
        self._host = host
        self._page = page
        self._held: dict[str, Held] = {}

    def __contains__(self, rid: str) -> bool:
        return rid in self._held

    def __getitem__(self, rid: str) -> Held:
        return self._held[rid]

    def hold(self, rid: str, keys: Sequence[Key], first: int, by: Strategy) -> None:
        """The request's next ``keys`` are in host memory, and stay.

        Args:
            first: number of the first of them in the prompt.
        """
        self.release(rid)
        pages = self._host.use(keys)
        self._host.pin(pages)
        self._held[rid] = Held(first, pages, by, time.monotonic())

    def computed(self, rid: str, tokens: int) -> None:
        """A forward has computed so many of them."""
        self._held[rid].computed += tokens

    def plan(self, rid: str, end: int) -> PrefillPlan:
        """Of the request's prompt of ``end`` tokens."""
        held = self._held[rid]
        begin, loaded = held.first * self._page, (held.first + len(held.pages)) * self._page
        spans = [Span(begin, loaded, LoadOrCompute()), Span(loaded, end, Compute())]
        return PrefillPlan([Span(0, begin, Compute()), *spans] if begin else spans)

    def release(self, rid: str) -> None:
        """The request's prefill has ended, or it does not come to it."""
        if (held := self._held.pop(rid, None)) is not None:
            self._host.unpin(held.pages)

    def expire(self, since: float, kept: Container[str]) -> None:
        """Lets go of what was held before ``since``, but for the requests ``kept``: they are held
        anew when they are looked up again."""
        for rid in [rid for rid, held in self._held.items() if held.since < since]:
            if rid not in kept:
                self.release(rid)

    def give_up_one(self, kept: Container[str]) -> bool:
        """Lets go of what is held for the newest request that is none of ``kept``; it is held anew
        when the request is looked up again. False if there is none."""
        rid = next((rid for rid in reversed(self._held) if rid not in kept), None)
        if rid is not None:
            self.release(rid)
        return rid is not None

    def clear(self) -> list[str]:
        """Gives everything up; the requests whose pages were kept."""
        rids = list(self._held)
        for rid in rids:
            self.release(rid)
        return rids
