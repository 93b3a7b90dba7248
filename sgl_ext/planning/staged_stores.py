"""Stores of a pipeline stage, which end for SGLang when they have ended in all stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from sgl_ext.planning.agreement import Agreement
from sgl_ext.tiers.arena import Key, Pages


class Storing(Protocol):
    """Stores of a stage, as in :class:`~sgl_ext.tiers.stores.Stores`."""

    def store(self, keys: Sequence[Key], blocks: Pages, before: Sequence[Key] = ()) -> None: ...

    def completed(self) -> int: ...

    def pop(self) -> bool: ...


class PairedStores:
    """Stores of KV pages and of activations under the same keys; each pair completes as one.

    A pair is as successful as the store of the KV.
    """

    def __init__(self, kv: Storing, beside: Storing) -> None:
        self._kv = kv
        self._beside = beside

    def store(self, keys: Sequence[Key], blocks: Pages, before: Sequence[Key] = ()) -> None:
        self._kv.store(keys, blocks, before)
        self._beside.store(keys, blocks, before)

    def completed(self) -> int:
        return min(self._kv.completed(), self._beside.completed())

    def pop(self) -> bool:
        self._beside.pop()
        return self._kv.pop()


class StagedStores:
    """Results of the stores of all stages.

    SGLang locks the KV of a store on the device until its result is popped. Stages that unlocked
    it in different steps would evict and admit differently.
    """

    def __init__(self, stores: Storing, agreement: Agreement) -> None:
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
