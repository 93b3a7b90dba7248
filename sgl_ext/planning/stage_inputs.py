"""Boundary activations of waiting requests, in the host memory of a pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sgl_ext.planning.planner import Planner
from sgl_ext.planning.prefixes import Prefixes
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.stack import TierStack

_SHARE = 2
"""Divisor of host memory. The quotient is the most that is pinned for waiting requests."""
_NO_PAGES: Pages = np.empty(0, np.int64)


class StageInputs:
    """Implements :class:`~sgl_ext.planning.staged_restorations.Inputs` over tiers of its own.

    Args:
        stack: tiers whose pages are activations, under the keys of the pages of their tokens.
    """

    def __init__(self, stack: TierStack, planner: Planner) -> None:
        self._prefixes = Prefixes(stack, planner)
        self._holds = stack.holds
        self._room = stack.host.capacity // _SHARE
        self._held: dict[str, Pages] = {}

    def begin(self, rid: str, keys: Sequence[Key], begin: int) -> None:
        self._prefixes.lookup(rid, keys, begin)

    def find(self, rid: str, keys: Sequence[Key], begin: int) -> tuple[int, bool]:
        here = self._prefixes.lookup(rid, keys, begin)
        if not self._prefixes.ready(rid):
            return 0, False
        self._let_go(rid)
        pages = self._held[rid] = self._holds.hold(keys[: min(here, self._room)])
        self._room -= len(pages)
        return len(pages), True

    def places(self, rid: str) -> Pages:
        return self._held.get(rid, _NO_PAGES)

    def forget(self, rid: str) -> None:
        self._let_go(rid)
        self._prefixes.forget(rid)

    def clear(self) -> None:
        for rid in [*self._held]:
            self.forget(rid)

    def _let_go(self, rid: str) -> None:
        if (pages := self._held.pop(rid, None)) is not None:
            self._room += len(pages)
            self._holds.let_go(pages)
