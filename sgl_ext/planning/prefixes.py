"""Prefixes of waiting requests that SGLang loads from host memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from sgl_ext.planning.planner import Planner
from sgl_ext.planning.want import Name, Run, Want
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.stack import TierStack


class Prefixes:
    """Loads of prefixes: from lower tiers into host memory as a whole, and from there by SGLang.

    Not thread-safe: only the scheduler's thread calls it. No method waits for a device.
    """

    def __init__(self, stack: TierStack, planner: Planner) -> None:
        self._stack = stack
        self._planner = planner
        self._missing: dict[str, int] = {}
        """Pages that the last look-up of each request did not find."""

    def early(self) -> AbstractContextManager[None]:
        """Surrounds a look-up at the arrival of a request, whose result is not used."""
        return nullcontext()

    def matching(self, rid: str) -> None:
        """Is called before SGLang matches a request, which may look it up or not."""
        self._missing.pop(rid, None)

    def lookup(self, rid: str, keys: Sequence[Key], begin: int = 0) -> int:
        """Returns the number of leading ``keys`` that can be loaded from host memory now.

        Starts to load the pages that follow from lower tiers, unless computing them is expected to
        be faster; :meth:`ready` tells when they have landed.

        Args:
            begin: position in the prompt of the first token of ``keys``.
        """
        here = self._stack.host.lookup(keys)
        self._missing[rid] = len(keys) - here
        if self._stack.enabled:
            name, page = _name(rid), self._planner.page
            run = self._planner.run(name)
            if run is not None and run.start + run.here * page > begin + here * page:
                # Pages before those that were asked for have been evicted from the device since.
                self._planner.release(name)
            self._planner.load(Want(name, (Run(keys, begin, here),)))
        return here

    def lacks(self, rid: str, pages: int) -> None:
        """Sets the number of pages of a request that a look-up by another power did not find."""
        self._missing[rid] = pages

    def missed(self, rid: str) -> int:
        """Returns the number of pages that the last look-up of a request did not find.

        They are counted once: until the next look-up there are none.
        """
        return self._missing.pop(rid, 0)

    def ready(self, rid: str) -> bool:
        """Returns whether a request need not be held back for its prefix; see
        :meth:`Planner.ready`."""
        return self._planner.ready(_name(rid))

    def load(self, rid: str, keys: Sequence[Key], blocks: Pages) -> bool:
        """Queues a load of ``keys`` into ``blocks`` of the device.

        Returns:
            False, with nothing queued, if a page is not in host memory or the tiers are disabled.
        """
        stack = self._stack
        if not stack.enabled or stack.host.lookup(keys) < len(keys):
            return False
        landed: dict[str, int] = {}
        seconds = 0.0
        if (request := self._planner.take(_name(rid))) is not None:
            landed, seconds = request.landed, request.seconds
        stack.load(rid, keys, blocks, landed, seconds)
        return True

    def cancel(self, rid: str) -> bool:
        """Forgets a request and cancels its queued load; returns whether a load was queued.

        A load that has started is not cancelled.
        """
        self._planner.take(_name(rid))
        return self._stack.loads.cancel(rid)

    def forget(self, rid: str) -> None:
        """Forgets that a request waits; loads from lower tiers that have begun still land."""
        self._missing.pop(rid, None)
        self._planner.take(_name(rid))
        self._stack.loads.forget(rid)

    def clear(self) -> None:
        """Forgets all requests; the planner is cleared by itself."""
        self._missing.clear()


def _name(rid: str) -> Name:
    return "prefix", rid
