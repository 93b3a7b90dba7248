"""Prefixes of waiting requests that all pipeline stages load from their host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from sgl_ext.errors import ExtError
from sgl_ext.planning.agreement import Agreement, Found
from sgl_ext.planning.planner import Planner
from sgl_ext.planning.prefixes import Prefixes
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.stack import TierStack

_SHARE = 2
"""Divisor of host memory. The quotient is the most that is pinned for waiting requests."""


@dataclass
class Kept:
    """Pages of a request that this stage has reported, pinned until the stages have decided."""

    version: int
    begin: int
    """Position in the prompt of the first token of the pages."""
    pages: Pages = field(default_factory=lambda: np.empty(0, np.int64))
    """Their slots in host memory."""


class StagedPrefixes(Prefixes):
    """Prefixes as in the base class, as far as all stages have them.

    What a stage has reported for a request stays in its host memory until the request is admitted,
    is gone, or is looked up from another position. If more than half of host memory is pinned in
    this way, further requests load less and compute more.
    """

    def __init__(self, stack: TierStack, planner: Planner, agreement: Agreement) -> None:
        super().__init__(stack, planner)
        self._holds = stack.holds
        self._room = stack.host.capacity // _SHARE
        self._agreement = agreement
        self._kept: dict[str, Kept] = {}
        self._ready: dict[str, bool] = {}
        """Whether the pages of each request have landed in all stages, by its last look-up."""
        self._versions = 0
        self._early = False

    @contextmanager
    def early(self) -> Iterator[None]:
        with super().early():
            self._early = True
            try:
                yield
            finally:
                self._early = False

    def matching(self, rid: str) -> None:
        super().matching(rid)
        self._ready.pop(rid, None)

    def lookup(self, rid: str, keys: Sequence[Key], begin: int = 0) -> int:
        if self._early:  # outside of the steps that stages have in common
            self._begin(rid, keys, begin)
            return 0
        kept = self._kept.get(rid)
        if kept is None or kept.begin != begin:
            if kept is not None:  # else pages may have been loaded since the request's arrival
                self._let_go(rid)
            self._versions += 1
            kept = self._kept[rid] = Kept(self._versions, begin)
        found = self._find(rid, keys, kept)
        self.lacks(rid, len(keys) - found.pages)
        agreed = self._agreement.prefix(
            rid, kept.version, found, awaited=partial(self._awaited, rid)
        )
        # The first stage may have used an earlier report, whose pages are still kept.
        if agreed.pages > (most := max(found.pages, len(kept.pages))):
            raise ExtError(
                f"pipeline stages agreed on {agreed.pages} pages of {rid}, but this stage has "
                f"{most}; restart the server, and report the configuration"
            )
        self._ready[rid] = agreed.ready
        if agreed.pages:
            self._decided(rid, kept, agreed.pages)
        return agreed.pages if agreed.ready else 0

    def _decided(self, rid: str, kept: Kept, pages: int) -> None:
        """Is called when the stages have agreed on the first ``pages`` of a request's pages."""

    def _begin(self, rid: str, keys: Sequence[Key], begin: int) -> None:
        """Begins to load pages of a request that has arrived."""
        super().lookup(rid, keys, begin)

    def _find(self, rid: str, keys: Sequence[Key], kept: Kept) -> Found:
        """Returns what this stage has, and keeps it."""
        here = super().lookup(rid, keys, kept.begin)
        ready = super().ready(rid)
        if ready:
            self._keep(kept, keys[:here])
        return Found(len(kept.pages), ready)

    def _awaited(self, rid: str, loading: float, computing: float) -> bool:  # noqa: ARG002
        """Returns whether pages are awaited that no load has taken.

        Args:
            loading: seconds of loading them, in the stage where it takes longest.
            computing: seconds of computing them, likewise.
        """
        return False

    def ready(self, rid: str) -> bool:
        return self._ready.get(rid, True)

    def load(self, rid: str, keys: Sequence[Key], blocks: Pages) -> bool:
        if not super().load(rid, keys, blocks):
            raise ExtError(
                f"a pipeline stage lacks pages of {rid} that it has promised to load; restart the "
                "server, and report the configuration"
            )
        return True

    def cancel(self, rid: str) -> bool:
        self._end(rid)
        return super().cancel(rid)

    def forget(self, rid: str) -> None:
        self._end(rid)
        super().forget(rid)

    def clear(self) -> None:
        super().clear()
        for rid in [*self._kept]:
            self._end(rid)

    @property
    def pinned(self) -> list[Pages]:
        """Pages that are pinned for each request."""
        return [kept.pages for kept in self._kept.values()]

    def _keep(self, kept: Kept, keys: Sequence[Key]) -> None:
        """Pins ``keys``, which begin with the pages that are pinned already, as far as allowed."""
        most = self._room + len(kept.pages)
        if len(keys) <= len(kept.pages) or most == len(kept.pages):
            return
        pages = self._holds.hold(keys[:most])
        self._room -= len(pages) - len(kept.pages)
        self._holds.let_go(kept.pages)
        kept.pages = pages

    def _let_go(self, rid: str) -> None:
        if (kept := self._kept.pop(rid, None)) is not None:
            self._room += len(kept.pages)
            self._holds.let_go(kept.pages)

    def _end(self, rid: str) -> None:
        self._let_go(rid)
        self._ready.pop(rid, None)
        self._agreement.forget(rid)
