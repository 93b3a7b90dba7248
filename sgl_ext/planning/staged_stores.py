"""Stores of a pipeline stage, which end for SGLang when they have ended in all stages."""

from __future__ import annotations

from collections import deque

from sgl_ext.planning.agreement import Agreement
from sgl_ext.tiers.stores import Stores


class StagedStores:
    """Results of the stores of all stages.

    SGLang locks the KV of a store on the device until its result is popped. Stages that unlocked
    it in different steps would evict and admit differently.
    """

    def __init__(self, stores: Stores, agreement: Agreement) -> None:
        self._stores = stores
        self._agreement = agreement
        self._waiting = 0
        """Number of stores that were announced, and have not ended in all stages."""
        self._ended: deque[bool] = deque()

    def announce(self) -> None:
        """Records that every stage begins a store in this step, or as soon as it can."""
        self._waiting += 1

    def completed(self) -> int:
        """Returns the number of results that can be popped; called once in each step."""
        if self._waiting:
            own = [self._stores.pop() for _ in range(self._stores.completed())]
            ended = self._agreement.stored(own)
            self._waiting -= len(ended)
            self._ended += ended
        return len(self._ended)

    def pop(self) -> bool:
        """Removes the result of the oldest store: whether it was successful in all stages."""
        return self._ended.popleft()

    def clear(self) -> None:
        """Forgets all stores."""
        self._waiting = 0
        self._ended.clear()
