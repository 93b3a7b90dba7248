"""Registry of the chunks that users have created, by id."""

from __future__ import annotations

import heapq
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from sgl_ext.errors import ExtError, UnknownContextError

logger = logging.getLogger(__name__)

_ID_BYTES = 16
_SLACK = 64
"""Entries of the expiry heap, beyond twice the number of contexts, above which the heap is rebuilt
without the entries of removed contexts."""
_UNPINNED = 8
"""Contexts of the limit that cannot be pinned."""
_PROBES = 8
"""Contexts that are not given to a keeper and do not count towards the limit. The probe at start
has 7 at once, and would otherwise remove kept contexts when the registry is full."""


@dataclass(frozen=True)
class Context:
    """Chunk that prompts can name by its id."""

    id: str
    text: str | None
    """Text that it was created from; None if it was created from token ids."""
    tokens: tuple[int, ...]
    """Token ids of the chunk, tokenized on its own."""
    method: str
    """Name of the link method that the chunk is prepared for."""
    before: tuple[int, ...]
    """Token ids of the prefix that its KV is computed with."""
    recompute: tuple[int, ...]
    """Offsets of its tokens that are recomputed wherever it is linked, ascending."""
    blend: int
    """Percentage of its tokens that CacheBlend selects for recomputation where it is linked."""
    salt: str | None
    """``cache_salt`` of the tenant; other tenants have no access to the context. SGLang takes an
    empty salt for none."""
    expires: float | None
    """Expiry on the registry's clock, in seconds; None if it does not expire."""
    query: int = 0
    """Percentage of its tokens that the end of the prompt selects for recomputation."""
    pinned: bool = False
    """True if it is not removed when there are more contexts than the limit."""


class Keeper(Protocol):
    """Store of contexts that outlives the registry; see
    :class:`~sgl_ext.chunks.kept.KeptContexts`."""

    def all(self) -> Iterable[tuple[Context, float | None]]: ...
    def add(self, context: Context, ttl: float | None) -> None: ...
    def update(self, context: Context, ttl: float | None) -> None: ...
    def remove(self, id_: str) -> None: ...


@dataclass
class Contexts:
    """Registry of chunks, by id and by text.

    Args:
        limit: maximum number of chunks; beyond it, the least recently used ones that are not pinned
            are removed.
        clock: returns the time in seconds.
        keeper: store of the contexts, from which the registry is filled; None if there is none.

    Raises:
        ExtError: more contexts of the keeper are pinned than the limit allows.
    """

    limit: int
    clock: Callable[[], float]
    keeper: Keeper | None = None
    _contexts: OrderedDict[str, Context] = field(default_factory=OrderedDict)
    """All contexts, the least recently used first."""
    _unpinned: OrderedDict[str, None] = field(default_factory=OrderedDict)
    """Ids of the contexts that are not pinned, in the same order."""
    _by_text: dict[tuple[str | None, str], list[str]] = field(default_factory=dict)
    _expiry: list[tuple[float, str]] = field(default_factory=list)
    _before: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    """Interned prefixes of contexts. Prefixes are long and most contexts share one."""
    _sharing: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """Number of contexts with each prefix."""
    _unkept: set[str] = field(default_factory=set)
    """Ids of the contexts that are not given to a keeper."""
    _changed: dict[str, Context | None] = field(default_factory=dict)
    """Contexts of the keeper that were changed or removed since :meth:`take_changes`, as they were
    before; None for new ones, also for those that it does not have."""
    tokens: int = field(default=0, init=False)
    """Number of tokens of all contexts, prefixes not included."""

    def __post_init__(self) -> None:
        for context, left in self.keeper.all() if self.keeper is not None else ():
            expires = None if left is None else self.clock() + left
            self._insert(replace(context, expires=expires))
        if (pinned := self.pinned) > self.most_pinned:
            raise ExtError(
                f"{pinned} contexts are pinned, but with chunks.limit = {self.limit} at most "
                f"{self.most_pinned} can be; set chunks.limit to {pinned + _UNPINNED} or more"
            )
        self._evict()

    def __len__(self) -> int:
        self._expire()
        return len(self._contexts)

    def __contains__(self, id_: str) -> bool:
        """Returns whether any tenant has a context with this id."""
        self._expire()
        return id_ in self._contexts

    @property
    def pinned(self) -> int:
        """Number of pinned contexts."""
        self._expire()
        return len(self._contexts) - len(self._unpinned)

    @property
    def most_pinned(self) -> int:
        """Maximum number of pinned contexts; others can be created beside them."""
        return max(self.limit - _UNPINNED, 0)

    def create(
        self,
        tokens: Sequence[int],
        *,
        method: str,
        text: str | None = None,
        before: Sequence[int] = (),
        recompute: Sequence[int] = (),
        blend: int = 0,
        query: int = 0,
        salt: str | None = None,
        ttl: float | None = None,
        keep: bool = True,
    ) -> Context:
        """Creates a context of these tokens and removes contexts beyond the limit.

        Args:
            ttl: seconds until the context expires; None if it does not.
            keep: whether the context is given to the keeper. The first :data:`_PROBES` that are not
                do not count towards the limit.

        Raises:
            ExtError: the keeper cannot store the context, which is then not created.
        """
        self._expire()
        expires = None if ttl is None else self.clock() + ttl
        id_ = f"ctx-{secrets.token_urlsafe(_ID_BYTES)}"
        context = Context(
            id_, text, tuple(tokens), method, tuple(before), tuple(recompute), blend, salt or None,
            expires, query,
        )  # fmt: skip
        if not keep:
            self._unkept.add(id_)
        elif self.keeper is not None:
            self.keeper.add(context, ttl)
        if self.keeper is not None:
            self._changed[id_] = None
        context = self._insert(context)
        self._evict()
        return context

    def _insert(self, context: Context) -> Context:
        """Adds a context, and returns it with an interned prefix."""
        behind = self._before.setdefault(context.before, context.before)
        self._sharing[behind] += 1
        self.tokens += len(context.tokens)
        context = replace(context, before=behind)
        self._contexts[context.id] = context
        if not context.pinned:
            self._unpinned[context.id] = None
        if context.text is not None:
            self._by_text.setdefault((context.salt, context.text), []).append(context.id)
        if context.expires is not None:
            heapq.heappush(self._expiry, (context.expires, context.id))
        return context

    def get(self, id_: str, salt: str | None = None) -> Context:
        """Returns the tenant's context with this id and marks it as used.

        Raises:
            UnknownContextError: the tenant has no such context.
        """
        self._expire()
        context = self._contexts.get(id_)
        if context is None or context.salt != (salt or None):
            raise UnknownContextError(
                f"context {id_!r} not found: it does not exist or no longer exists; create it again"
            )
        self._contexts.move_to_end(id_)
        if not context.pinned:
            self._unpinned.move_to_end(id_)
        return context

    def find(self, text: str, salt: str | None = None) -> Context | None:
        """Returns the tenant's latest context of exactly this text and marks it as used.

        Returns None if there is none.
        """
        self._expire()
        ids = self._by_text.get((salt or None, text))
        return None if ids is None else self.get(ids[-1], salt)

    def all(self, salt: str | None = None) -> list[Context]:
        """Returns the tenant's contexts, the least recently used first."""
        self._expire()
        return [context for context in self._contexts.values() if context.salt == (salt or None)]

    def pin(self, id_: str, salt: str | None = None, *, pinned: bool) -> Context:
        """Pins or unpins a context, returns it and marks it as used.

        A pinned context is not removed beyond the limit. It can be deleted, and it expires.

        Raises:
            UnknownContextError: the tenant has no such context.
            ExtError: the maximum number of contexts is pinned, or the keeper cannot store the
                change; the context is then as it was.
        """
        context = self.get(id_, salt)
        if context.pinned == pinned:
            return context
        if pinned and self.pinned >= self.most_pinned:
            raise ExtError(
                f"context {id_!r} cannot be pinned: the maximum of {self.most_pinned} pinned "
                f"contexts (chunks.limit = {self.limit}) is reached; unpin one, or raise "
                "chunks.limit"
            )
        if self.keeper is not None:
            left = None if context.expires is None else context.expires - self.clock()
            self.keeper.update(replace(context, pinned=pinned), left)
        self._note(id_, context)
        return self._mark(id_, pinned=pinned)

    def _mark(self, id_: str, *, pinned: bool) -> Context:
        """Pins or unpins a context in the registry only, and marks it as used."""
        context = self._contexts[id_] = replace(self._contexts[id_], pinned=pinned)
        self._contexts.move_to_end(id_)
        self._unpinned.pop(id_, None)
        if not pinned:
            self._unpinned[id_] = None
        return context

    def delete(self, id_: str, salt: str | None = None) -> None:
        """Deletes a context, also a pinned one. Requests that already link it are not affected.

        Raises:
            UnknownContextError: the tenant has no such context.
            ExtError: the keeper cannot remove the context, which still exists.
        """
        context = self.get(id_, salt)
        if self.keeper is not None:
            self.keeper.remove(id_)
        self._note(id_, context)
        self._forget(id_)

    def take_changes(self) -> dict[str, Context | None]:
        """Returns the changes of kept contexts since the last call, for :meth:`undo`."""
        changed, self._changed = self._changed, {}
        return changed

    def undo(self, changes: Mapping[str, Context | None]) -> None:
        """Undoes changes in the registry, because the keeper has undone them.

        Contexts that were removed are the least recently used ones again.
        """
        for id_, before in reversed([*changes.items()]):
            if id_ in self._contexts and before is not None:
                self._mark(id_, pinned=before.pinned)
            elif id_ in self._contexts:
                self._forget(id_)
            elif before is not None:
                self._insert(before)
                self._contexts.move_to_end(id_, last=False)
                if not before.pinned:
                    self._unpinned.move_to_end(id_, last=False)
                if before.text is not None:  # find() returns the last one
                    same = self._by_text[before.salt, before.text]
                    same.insert(0, same.pop())

    def _note(self, id_: str, before: Context | None) -> None:
        """Notes what a kept context was before a change."""
        if self.keeper is not None and id_ not in self._unkept:
            self._changed.setdefault(id_, before)

    def _expire(self) -> None:
        now = self.clock()
        while self._expiry and self._expiry[0][0] <= now:
            _, id_ = heapq.heappop(self._expiry)
            if id_ in self._contexts:
                self._drop(id_)

    def _evict(self) -> None:
        while len(self._contexts) - min(len(self._unkept), _PROBES) > self.limit:
            self._drop(next(iter(self._unpinned)))

    def _drop(self, id_: str) -> None:
        """Removes a context that has expired or is beyond the limit."""
        self._note(id_, self._contexts[id_])
        self._forget(id_)
        if self.keeper is not None:
            try:
                self.keeper.remove(id_)
            except ExtError as error:
                logger.warning("context %s is not used any more: %s", id_, error)

    def _forget(self, id_: str) -> None:
        """Removes a context from the registry only."""
        context = self._contexts.pop(id_)
        self._unkept.discard(id_)
        self._unpinned.pop(id_, None)
        self.tokens -= len(context.tokens)
        self._sharing[context.before] -= 1
        if not self._sharing[context.before]:
            del self._sharing[context.before], self._before[context.before]
        if len(self._expiry) > 2 * len(self._contexts) + _SLACK:
            self._expiry = [each for each in self._expiry if each[1] in self._contexts]
            heapq.heapify(self._expiry)
        if context.text is not None:
            same = self._by_text[context.salt, context.text]
            same.remove(id_)
            if not same:
                del self._by_text[context.salt, context.text]
