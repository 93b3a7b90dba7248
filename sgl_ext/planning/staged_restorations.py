"""Prefixes that all pipeline stages restore at once, each in its own layers (CacheFlow §3.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sgl_ext.planning.agreement import Agreement, Found
from sgl_ext.planning.planner import Planner
from sgl_ext.planning.staged_prefixes import Kept, StagedPrefixes
from sgl_ext.planning.want import Name, Run, Want
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.stack import TierStack


class Inputs(Protocol):
    """Boundary activations of waiting requests: inputs of the first layer of a stage."""

    def begin(self, rid: str, keys: Sequence[Key], begin: int) -> None:
        """Begins to load the activations of pages."""

    def find(self, rid: str, keys: Sequence[Key], begin: int) -> tuple[int, bool]:
        """Returns of how many leading pages activations are in host memory, where they are kept
        until :meth:`forget`, and whether no more are awaited.

        Args:
            begin: position in the prompt of the first token of ``keys``.
        """

    def overwritten(self, blocks: Pages) -> None:
        """Is called when KV is loaded into ``blocks`` of the device without activations."""

    def places(self, rid: str) -> Pages:
        """Returns the slots in host memory of the activations pinned for a request."""

    def forget(self, rid: str) -> None: ...


@dataclass(frozen=True)
class Admitted:
    """Admitted request whose prefix this stage has to restore before its next forward."""

    rid: str
    want: Want
    """Pages that are computed or loaded; the ``here`` pages of its run are in host memory."""
    here: Pages
    """Places in host memory of the ``here`` pages."""
    blocks: Pages
    """Blocks on the device for all pages of the run."""
    inputs: Pages | None
    """Places of the activations of the other pages; None in the first stage."""


@dataclass
class _Found:
    """Restorable pages that were reported; constant until the request is looked up elsewhere."""

    pages: int
    here: int
    """Number of leading pages that host memory had already."""


class StagedRestorations(StagedPrefixes):
    """Prefixes of which a part may be in tiers below host memory.

    The last pages of a prefix are loaded from its arrival on. Unless all of them have landed
    before, the first ones are computed when the request is admitted, in every stage at the same
    time: in the first one from tokens, in the others from boundary activations. No other request
    is computed meanwhile. Running requests therefore make a request wait for its pages, as far as
    loading costs less than they would lose (:meth:`_awaited`).

    Args:
        inputs: activations of this stage; None in the first one.
        running: returns the number of requests that decode.
    """

    def __init__(
        self,
        stack: TierStack,
        planner: Planner,
        agreement: Agreement,
        inputs: Inputs | None,
        running: Callable[[], int],
    ) -> None:
        super().__init__(stack, planner, agreement)
        self._host = stack.host
        self._inputs = inputs
        self._running = running
        self._restorable: dict[str, _Found] = {}
        self._excluded: set[str] = set()
        self._admitted: dict[str, Admitted] = {}

    def exclude(self, rid: str) -> None:
        """Has a request's prefix loaded, and none of it computed, until the request is forgotten.

        Stages compute a prefix from its token ids alone.
        """
        self._excluded.add(rid)

    def admitted(self) -> list[Admitted]:
        """Returns the requests of the next forward whose prefixes are to be restored."""
        return [*self._admitted.values()]

    def restored(self, rid: str) -> None:
        """Ends a request of :meth:`admitted`."""
        del self._admitted[rid]
        self._end(rid)

    def load(self, rid: str, keys: Sequence[Key], blocks: Pages) -> bool:
        found, kept = self._restorable.get(rid), self._kept[rid]
        if found is None or len(keys) <= len(kept.pages):
            if self._inputs is not None:
                self._inputs.overwritten(blocks)
            return super().load(rid, keys, blocks)
        here = min(found.here, len(keys))
        self._admitted[rid] = Admitted(
            rid,
            self._want(rid, keys, kept.begin, here),
            kept.pages[:here],
            blocks,
            None if self._inputs is None else self._inputs.places(rid),
        )
        return True

    def cancel(self, rid: str) -> bool:
        queued = self._admitted.pop(rid, None) is not None
        return super().cancel(rid) or queued

    def clear(self) -> None:
        self._admitted.clear()
        super().clear()

    def forget(self, rid: str) -> None:
        super().forget(rid)
        self._excluded.discard(rid)

    def _begin(self, rid: str, keys: Sequence[Key], begin: int) -> None:
        if rid in self._excluded:
            super()._begin(rid, keys, begin)
            return
        if not self._stack.enabled:
            return
        here = self._host.lookup(keys)
        self._planner.restore(self._want(rid, keys, begin, here))
        if self._inputs is not None:
            self._inputs.begin(rid, keys[here:], begin + here * self._planner.page)

    def _find(self, rid: str, keys: Sequence[Key], kept: Kept) -> Found:
        if rid in self._excluded:
            return super()._find(rid, keys, kept)
        if not self._stack.enabled:
            return Found(0, ready=True)
        name = _name(rid)
        run = self._planner.run(name)
        if run is not None and run.start != kept.begin:  # from its arrival, when it began elsewhere
            self._planner.release(name)
        here = self._host.lookup(keys)
        if (found := self._restorable.get(rid)) is not None:
            self._planner.restore(self._want(rid, keys, kept.begin, found.here))
            return self._found(name, found.pages)
        self._planner.restore(self._want(rid, keys, kept.begin, here))
        self._keep(kept, keys[:here])
        if self._planner.undecided(name):
            return Found(0, ready=False)
        run, here = self._planner.run(name), len(kept.pages)
        if run is None or run.here > here:
            return Found(here, ready=True)
        pages = run.here + self._planner.found(name)
        if pages <= here:
            return Found(here, ready=True)
        if self._inputs is not None:
            begin = kept.begin + run.here * self._planner.page
            known, ready = self._inputs.find(rid, keys[run.here : pages], begin)
            if not ready:
                return Found(0, ready=False)
            pages = run.here + known
            if pages <= here:
                return Found(here, ready=True)
        self._restorable[rid] = _Found(pages, run.here)
        return self._found(name, pages)

    def _found(self, name: Name, pages: int) -> Found:
        """Returns restorable pages, with what is left of them; undecided if they were given up for
        others and asked for again."""
        costs = self._planner.costs
        left = self._planner.spared(name) if self._planner.loads(name) else []
        return Found(
            pages,
            ready=not self._planner.undecided(name),
            loading=self._slowest * sum(map(len, left)),
            computing=sum(costs.computing(each.start, each.stop) for each in left),
        )

    def _decided(self, rid: str, kept: Kept, pages: int) -> None:
        """Loads only pages that will be restored: they are loaded from the last one on."""
        found = self._restorable.get(rid)
        if found is not None and pages < found.pages:
            self._planner.limit(_name(rid), kept.begin + pages * self._planner.page)

    def _awaited(self, rid: str, loading: float, computing: float) -> bool:
        """Returns whether waiting for the pages costs less than the running requests would lose.

        Waiting costs this request the seconds of loading, computing costs each running request its
        own seconds. A tier that hangs is not waited for longer than the time allowed.
        """
        return loading < self._running() * computing and self._planner.patient(_name(rid))

    @property
    def _slowest(self) -> float:
        """Seconds per token of the slowest tier."""
        costs = self._planner.costs
        return max(costs.per_loaded(tier.tier.name) for tier in self._stack.lower)

    def _want(self, rid: str, keys: Sequence[Key], begin: int, here: int) -> Want:
        tokens = begin + len(keys) * self._planner.page + 1
        return Want(_name(rid), (Run(keys, begin, here),), tokens)

    def _let_go(self, rid: str) -> None:
        super()._let_go(rid)
        self._restorable.pop(rid, None)
        self._planner.take(_name(rid))
        if self._inputs is not None:
            self._inputs.forget(rid)

    def _end(self, rid: str) -> None:
        if rid not in self._admitted:  # what is kept for it is used before its next forward
            super()._end(rid)


def _name(rid: str) -> Name:
    return "stage", rid
