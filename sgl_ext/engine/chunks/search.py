"""Search for the KV of chunks in SGLang's radix tree and, behind its match, in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from sgl_ext.chunks.composition import path_of
from sgl_ext.engine.core.sglang_types import MatchResult, RadixTree, TreeLock
from sgl_ext.planning.parts import Part
from sgl_ext.planning.want import Name, Run, Want
from sgl_ext.tiers.tier import leading

if TYPE_CHECKING:
    import torch

    from sgl_ext.planning.planner import Landed, Planner
    from sgl_ext.tiers.arena import Key, Pages
    from sgl_ext.tiers.stack import TierStack


@dataclass(frozen=True)
class Wanted:
    """Text whose KV is searched, and the prefix that the KV was computed with."""

    namespace: str | None
    salt: str | None
    before: Sequence[int]
    tokens: Sequence[int]

    def key(self, page: int) -> RadixKey:
        """Returns the key of the KV in the radix tree."""
        path = path_of(self.before, self.tokens, page)
        return RadixKey(path, self.namespace, cache_salt=self.salt)


@dataclass(frozen=True)
class Found:
    """Location of a text's KV, which is kept there until :meth:`ChunkSearch.let_go`."""

    slots: torch.Tensor
    """Slots of the leading tokens, whose KV is on the device, int64 ``[tokens]`` there."""
    places: NDArray[np.int64]
    """Places in host memory of all tokens behind them, int64 ``[tokens]``: the page times the
    tokens of a page, plus the offset in the page; -1 for tokens whose KV is not there."""
    origin: int
    """Position at which the first token was computed."""
    node: object
    """Last node of the radix tree whose KV on the device belongs to the text."""
    lock: TreeLock
    locked: torch.Tensor
    """Slots of all KV that the lock keeps: up to :attr:`node`, also of the text's prefix."""
    keys: Sequence[Key]
    """Pages that are pinned in host memory."""
    pages: Pages
    """Their slots."""
    held: int
    """Number of the leading :attr:`places` that lie in them; further ones belong to the planner."""

    @property
    def leading(self) -> int:
        """Number of leading tokens whose KV is available."""
        return len(self.slots) + leading(self.places >= 0)

    @property
    def available(self) -> list[range]:
        """Offsets of the tokens whose KV is available, as ascending ranges."""
        there = np.concatenate((np.ones(len(self.slots), bool), self.places >= 0))
        edges = np.flatnonzero(np.diff(there, prepend=False, append=False)).tolist()
        return [range(*pair) for pair in zip(edges[::2], edges[1::2], strict=True)]


class ChunkSearch:
    """Search for chunks on behalf of one scheduler. Only the scheduler's thread calls it.

    Args:
        tree: SGLang's radix cache.
        tiers: tiers beyond the device; None if there are none.
        planner: planner of the loads from lower tiers; None if there are no tiers.
    """

    def __init__(self, tree: RadixTree, tiers: TierStack | None, planner: Planner | None) -> None:
        self._tree = tree
        self._tiers = tiers
        self._planner = planner

    @property
    def waits(self) -> bool:
        """True if there are lower tiers, from which KV must be loaded first."""
        return self._tiers is not None and bool(self._tiers.lower)

    def longest(self, texts: Iterable[Wanted]) -> Wanted | None:
        """Returns the text of which the device has the most tokens, the first among equals.

        Returns None if there are no texts.
        """

        def on_device(wanted: Wanted) -> int:
            key = wanted.key(self._tree.page_size)
            found: int = self._tree.match_prefix(MatchPrefixParams(key=key)).device_prefix_len
            return found

        return max(texts, key=on_device, default=None)

    def run(self, wanted: Wanted, at: int, number: int) -> Run | None:
        """Returns the pages of a text that are not on the device; None if there are none.

        Args:
            at: position in the prompt of the first token of the text.
            number: number of the text in the prompt.
        """
        if self._tiers is None:
            return None
        _, begin, keys = self._match(wanted)
        if not keys:
            return None
        start = at + begin - len(wanted.before)
        return Run(keys, start, self._tiers.host.lookup(keys), max(start, at), number)

    def load(self, want: Want, *, whole: bool) -> None:
        """Starts to load texts from lower tiers.

        Args:
            whole: whether they are loaded before the request is admitted, which :meth:`ready`
                tells. Else the power that restores prefixes decides.
        """
        if self._tiers is not None and self._planner is not None and self._tiers.enabled:
            if whole:
                self._planner.load(want)
            else:
                self._planner.restore(want)

    def planned(self, name: Name) -> tuple[Part, list[Landed]]:
        """Returns what is known of the loads of a want; see :meth:`Planner.planned`."""
        return (Part((), None), []) if self._planner is None else self._planner.planned(name)

    def spared(self, name: Name) -> list[range]:
        """Returns the positions that are computed instead of loaded; see :meth:`Planner.spared`."""
        return [] if self._planner is None else self._planner.spared(name)

    def ready(self, name: Name) -> bool:
        """Returns whether texts need not be awaited any longer, on every rank.

        All ranks must call it together.
        """
        return self._planner is None or self._agreed(self._planner.ready(name)) > 0

    def find(self, wanted: Wanted) -> Found:
        """Returns the KV of a text that is on the device or in host memory, and keeps it there.

        All ranks must call it together.
        """
        match, begin, keys = self._match(wanted)
        node, root = match.last_device_node, self._tree.root_node_handle(wanted.namespace)
        locked = self._tree.tree_core.collect_full_device_indices(node, root)
        lock = self._tree.lock(node)
        start, end = len(wanted.before), len(wanted.before) + len(wanted.tokens)
        slots, pages = locked[start:end], np.empty(0, np.int64)
        places, held = np.full(len(wanted.tokens) - len(slots), -1, np.int64), 0
        if self._tiers is not None:
            pages = self._tiers.holds.hold(keys)
            shared = self._agreed(len(pages))
            self._tiers.holds.let_go(pages[shared:])  # not in the host memory of every rank
            pages = pages[:shared]
            page = self._tree.page_size
            every = (pages[:, None] * page + np.arange(page)).ravel()
            here = every[max(start - begin, 0) : end - begin]
            places[: (held := len(here))] = here
        return Found(slots, places, start, node, lock, locked, keys[: len(pages)], pages, held)

    def used(self, found: Found) -> None:
        """Counts a use of the pages on the device and in host memory."""
        if self._tiers is not None:
            self._tiers.holds.used(found.keys)
            self._tree.linker.cache_linker.used_in_device(self._tree.tree_core, found.node)

    def let_go(self, found: Found) -> None:
        self._tree.unlock(found.lock)
        if self._tiers is not None:
            self._tiers.holds.let_go(found.pages)

    def forget(self, name: Name) -> None:
        """Stops to load texts."""
        if self._planner is not None:
            self._planner.take(name)

    def _match(self, wanted: Wanted) -> tuple[MatchResult, int, Sequence[Key]]:
        """Returns SGLang's match, the position behind it at which the text's other pages begin, and
        the keys of these pages."""
        page = self._tree.page_size
        key = wanted.key(page)
        match = self._tree.match_prefix(MatchPrefixParams(key=key))
        if self._tiers is None or match.device_prefix_len >= len(key):
            return match, len(key), ()
        # KV of the prefix that the text was computed with may have been evicted.
        first = max(match.device_prefix_len, len(wanted.before)) // page
        names = get_storage_hash_str(key, None, page)[first:]
        return match, first * page, [*map(bytes.fromhex, names)]

    def _agreed(self, value: int) -> int:
        return int(self._tree.linker.cache_linker.agreed(int(value)))
