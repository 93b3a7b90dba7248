"""Finds the KV of chunks: in SGLang's tree, and behind what the tree has in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from sgl_ext.chunks.composition import path_of
from sgl_ext.engine.core.sglang_types import RadixTree
from sgl_ext.memory.slab import Slab

if TYPE_CHECKING:
    from sgl_ext.tiers.arena import Key, Pages
    from sgl_ext.tiers.stack import TierStack


@dataclass(frozen=True)
class Wanted:
    """A text whose KV is wanted, and what it was computed behind."""

    namespace: str | None
    salt: str | None
    before: Sequence[int]
    tokens: Sequence[int]

    def key(self, page: int) -> RadixKey:
        """What its KV lies under in the tree."""
        path = path_of(self.before, self.tokens, page)
        return RadixKey(path, self.namespace, cache_salt=self.salt)


@dataclass(frozen=True)
class Found:
    """Where KV of a text lies; it stays there until it is let go."""

    addresses: NDArray[np.int64]
    """Of the text's tokens, from the first one on; maybe not of all."""
    slots: NDArray[np.int64]
    """Of those of them that are on the device: the first ones."""
    origin: int
    """Position that the first token was computed at."""
    lock: Any
    pages: Pages
    """Pinned places in host memory."""


class ChunkSearch:
    """Looks for chunks on behalf of one scheduler; its thread calls.

    Args:
        tree: SGLang's radix cache.
        tiers: what lies beyond the device; None if nothing does.
    """

    def __init__(self, tree: RadixTree, slab: Slab, tiers: TierStack | None) -> None:
        self._tree = tree
        self._slab = slab
        self._tiers = tiers

    @property
    def waits(self) -> bool:
        """Whether there are tiers that KV has to come from first."""
        return self._tiers is not None and bool(self._tiers.lower)

    def longest(self, texts: Iterable[Wanted]) -> Wanted | None:
        """That of which the device has the most tokens; of equals the first."""

        def on_device(wanted: Wanted) -> int:
            key = wanted.key(self._tree.page_size)
            found: int = self._tree.match_prefix(MatchPrefixParams(key=key)).device_prefix_len
            return found

        return max(texts, key=on_device, default=None)

    def ask(self, name: str, wanted: Wanted) -> None:
        """What lies in lower tiers begins to come; :meth:`ready` says when it has."""
        if self._tiers is not None:
            _, _, keys = self._match(wanted)
            if keys:
                self._tiers.lookup(name, keys)

    def ready(self, name: str) -> bool:
        """Whether no more of it will come, or not in time."""
        return self._tiers is None or self._agreed(self._tiers.ready(name)) > 0

    def find(self, name: str, wanted: Wanted) -> Found:
        """Where it lies, as far as it is on the device or in host memory."""
        match, begin, keys = self._match(wanted)
        node, root = match.last_device_node, self._tree.root_node_handle(wanted.namespace)
        slots = self._tree.tree_core.collect_full_device_indices(node, root).numpy()
        lock = self._tree.lock(node)
        start, end = len(wanted.before), len(wanted.before) + len(wanted.tokens)
        slots = slots[start:end]
        size = self._slab.layout.token_bytes
        addresses = self._slab.address + slots * size
        pages = np.empty(0, np.int64)
        if self._tiers is not None:
            pages = self._tiers.hold(name, keys)
            shared = self._agreed(len(pages))
            self._tiers.let_go(pages[shared:])  # other ranks do not have them
            pages = pages[:shared]
            places = self._tiers.addresses(pages)[:, None] + np.arange(self._tree.page_size) * size
            behind = places.ravel()[max(start - begin, 0) : end - begin]
            addresses = np.concatenate([addresses, behind])
        return Found(addresses, slots, start, lock, pages)

    def let_go(self, found: Found) -> None:
        self._tree.unlock(found.lock)
        if self._tiers is not None:
            self._tiers.let_go(found.pages)

    def forget(self, name: str) -> None:
        """It is not wanted any more."""
        if self._tiers is not None:
            self._tiers.forget(name)

    def _match(self, wanted: Wanted) -> tuple[Any, int, Sequence[Key]]:
        """SGLang's match; the keys of the text's pages behind it, and where these begin."""
        page = self._tree.page_size
        key = wanted.key(page)
        match = self._tree.match_prefix(MatchPrefixParams(key=key))
        if self._tiers is None or match.device_prefix_len >= len(key):
            return match, len(key), ()
        # What the text was computed behind need not be there any more.
        first = max(match.device_prefix_len, len(wanted.before)) // page
        names = get_storage_hash_str(key, None, page)[first:]
        return match, first * page, [*map(bytes.fromhex, names)]

    def _agreed(self, value: int) -> int:
        return int(self._tree.linker.cache_linker.agreed(int(value)))
