"""Departures: pages that leave the device for good, whose blocks stay until a tier has them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from sgl_ext.clock import Clock
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.stack import TierStack

PATIENCE_S = 5.0
"""Seconds without any progress after which pages leave although no tier has them."""
_SHARE = 2
"""Divisor of the free and evictable slots of host memory for the pages that arrive at a time."""


class Departures:
    """Copies pages through host memory to the lowest tiers, as fast as these take them.

    More pages may leave than host memory has slots. Every call of :meth:`leave` takes the next
    step; its caller repeats it for the pages that have to stay. Only the scheduler's thread calls
    it, and no method waits for a device.

    Args:
        clock: clock of the progress, in seconds.
    """

    def __init__(self, stack: TierStack, clock: Clock) -> None:
        self._stack = stack
        self._clock = clock
        self._kept: set[Key] = set()
        """Pages that a tier has, or is about to store, among those that have to stay."""
        self._coming: set[Key] = set()
        """Pages that host memory receives, or has and will pass on."""
        self._progress = 0.0
        """Time of the last progress, on the clock; 0 if nothing stays."""
        self._called = 0.0
        """Time of the last call, on the clock."""

    def leave(self, keys: Sequence[Key], blocks: Pages) -> bool:
        """Returns whether the blocks of some pages can be given away, and begins copies otherwise.

        Args:
            keys: keys of the pages.
            blocks: their blocks on the device, ``[len(keys)]``, which do not change until then.

        Returns:
            True if a tier has each page, if the tiers are disabled, or if no page has reached one
            for :data:`PATIENCE_S`.
        """
        stack, now = self._stack, self._clock()
        if not stack.enabled:
            return True
        if now > self._called + PATIENCE_S:  # an earlier attempt was given up by the caller
            self.end()
        self._called = now
        self._progress = self._progress or now
        here = stack.host.present(key for key in keys if key not in self._kept)
        if any(tier.tier.available for tier in stack.lower):
            stack.keep(here)
            copied = stack.host.copied(stack.host.places(here)).tolist()
            here = [key for key, there in zip(here, copied, strict=True) if there]
        if here:
            self._kept.update(here)
            self._coming.difference_update(here)
            self._progress = now
        lacking = {key: at for at, key in enumerate(keys) if key not in self._kept}
        if not lacking or now > self._progress + PATIENCE_S:
            return True
        # More would evict pages that came before, and that no lower tier has yet.
        room = max(stack.host.room // _SHARE - len(self._coming), 0)
        self._coming.update(islice((key for key in lacking if key not in self._coming), room))
        coming = [key for key in lacking if key in self._coming]
        stack.stores.store_lost(coming, blocks[[lacking[key] for key in coming]])
        return False

    def end(self) -> None:
        """Forgets what has left; called when nothing stays any more."""
        self._kept.clear()
        self._coming.clear()
        self._progress = 0.0
