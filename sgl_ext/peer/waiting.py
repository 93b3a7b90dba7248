"""Time that requests wait for memory that was lent or reclaimed."""

from __future__ import annotations

from collections.abc import Collection


class Waiting:
    """Requests that wait for memory, up to ``patience`` seconds."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.ended: dict[str, float] = {}
        """Seconds that each request has waited, by id, for those whose waiting ended at the last
        :meth:`expired`."""
        self._since: dict[str, float] = {}

    def expired(self, unfit: Collection[str], now: float) -> list[str]:
        """Returns the requests whose time to wait has ended, which is counted anew afterwards.

        Args:
            unfit: ids of all requests that do not fit now; others no longer wait.
            now: seconds of any monotonic clock.
        """
        self.ended = {rid: now - since for rid, since in self._since.items() if rid not in unfit}
        self._since = {rid: self._since.get(rid, now) for rid in unfit}
        expired = [rid for rid, since in self._since.items() if now - since > self.patience]
        for rid in expired:
            self.ended[rid] = now - self._since.pop(rid)
        return expired
