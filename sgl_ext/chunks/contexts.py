"""The chunks that users have created: by id, for as long as they are kept."""

from __future__ import annotations

import heapq
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sgl_ext.errors import ExtError

_ID_BYTES = 16
_SLACK = 64
"""Contexts that are gone, whose expiry is still waited for."""


class UnknownContextError(ExtError):
    """No such id: it never was, has expired, or is another tenant's. Which, is not told."""

    status = 404


@dataclass(frozen=True)
class Context:
    """A chunk that can be named in prompts."""

    id: str
    text: str | None
    """What it was created from, unless that was token ids."""
    tokens: tuple[int, ...]
    """Its token ids, tokenised by itself."""
    method: str
    """Name of the link method that it is prepared for."""
    before: tuple[int, ...]
    """Token ids that its KV is computed behind."""
    recompute: tuple[int, ...]
    """Tokens of it, ascending, that are computed anew wherever it is linked."""
    blend: int
    """Per cent of its tokens that are chosen where it is linked, to be computed anew."""
    salt: str | None
    """Of the tenant; nobody else sees it."""
    expires: float | None
    """On the registry's clock; None if never."""


@dataclass
class Contexts:
    """Chunks by id and by text.

    Args:
        limit: chunks that are kept; the least recently used go first.
        clock: seconds.
    """

    limit: int
    clock: Callable[[], float]
    _contexts: OrderedDict[str, Context] = field(default_factory=OrderedDict)
    _by_text: dict[tuple[str | None, str], list[str]] = field(default_factory=dict)
    _expiry: list[tuple[float, str]] = field(default_factory=list)
    _before: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    """What contexts were computed behind, once each: most share it, and it is long."""
    _sharing: Counter[tuple[int, ...]] = field(default_factory=Counter)

    def __len__(self) -> int:
        self._expire()
        return len(self._contexts)

    def __contains__(self, id_: str) -> bool:
        """Whether any tenant has it."""
        self._expire()
        return id_ in self._contexts

    def create(
        self,
        tokens: Sequence[int],
        *,
        method: str,
        text: str | None = None,
        before: Sequence[int] = (),
        recompute: Sequence[int] = (),
        blend: int = 0,
        salt: str | None = None,
        ttl: float | None = None,
    ) -> Context:
        """A context of these tokens.

        Args:
            ttl: seconds until it expires; None if never.
        """
        self._expire()
        expires = None if ttl is None else self.clock() + ttl
        id_ = f"ctx-{secrets.token_urlsafe(_ID_BYTES)}"
        behind = tuple(before)
        behind = self._before.setdefault(behind, behind)
        self._sharing[behind] += 1
        context = Context(
            id_, text, tuple(tokens), method, behind, tuple(recompute), blend, salt, expires
        )
        self._contexts[id_] = context
        if text is not None:
            self._by_text.setdefault((salt, text), []).append(id_)
        if expires is not None:
            heapq.heappush(self._expiry, (expires, id_))
        while len(self._contexts) > self.limit:
            self._remove(next(iter(self._contexts)))
        return context

    def get(self, id_: str, salt: str | None = None) -> Context:
        """The tenant's context of that id, which counts as used.

        Raises:
            UnknownContextError: the tenant has none.
        """
        self._expire()
        context = self._contexts.get(id_)
        if context is None or context.salt != salt:
            raise UnknownContextError(
                f"no context {id_!r}: it does not exist, or not any more; create it again"
            )
        self._contexts.move_to_end(id_)
        return context

    def find(self, text: str, salt: str | None = None) -> Context | None:
        """The tenant's latest context of exactly this text."""
        self._expire()
        ids = self._by_text.get((salt, text))
        return None if ids is None else self.get(ids[-1], salt)

    def all(self, salt: str | None = None) -> list[Context]:
        """The tenant's contexts, the least recently used first."""
        self._expire()
        return [context for context in self._contexts.values() if context.salt == salt]

    def delete(self, id_: str, salt: str | None = None) -> None:
        """Forgets it. A request that links it already goes on.

        Raises:
            UnknownContextError: the tenant has none.
        """
        self._remove(self.get(id_, salt).id)

    def _expire(self) -> None:
        now = self.clock()
        while self._expiry and self._expiry[0][0] <= now:
            _, id_ = heapq.heappop(self._expiry)
            if id_ in self._contexts:
                self._remove(id_)

    def _remove(self, id_: str) -> None:
        context = self._contexts.pop(id_)
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
