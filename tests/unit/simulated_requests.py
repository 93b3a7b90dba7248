"""Requests of a simulated scheduler, and their memory."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from simulated_engine import PAGE, SimulatedEngine, Span
from simulated_tree import SimulatedTree

from sgl_ext.tiers.arena import Pages

NO_PAGES: Pages = np.empty(0, np.int64)


@dataclass(eq=False)
class Request:
    """Request whose answer is known beforehand."""

    rid: str
    prefix: list[int]
    """Pages that it shares with others"""
    prompt: int
    most: int
    """Tokens of its answer"""
    row: int = -1
    """Its row in SGLang's table; -1 while it has no memory"""
    slots: Pages = field(default_factory=lambda: NO_PAGES)
    done: int = 0
    """Tokens whose KV is there, or is being computed by a forward that was launched"""
    answer: int = 0
    """Tokens of the answer that the host has"""
    locked: list[int] = field(default_factory=list)
    """Leading pages that the tree owns and that are locked for this request"""
    loading: bool = False
    """Whether a load is private to the request, because its forward was not processed yet"""
    aborted: bool = False

    @property
    def tokens(self) -> int:
        return self.prompt + self.answer

    def pages(self, count: int) -> list[int]:
        own = [page_number(self.rid, at) for at in range(len(self.prefix), count)]
        return [*self.prefix[:count], *own]

    @property
    def blocks(self) -> Pages:
        return self.slots[::PAGE] // PAGE

    def span(self, start: int, end: int) -> Span:
        return Span(self.pages(-(-end // PAGE)), self.blocks, start, end)


def slots_of(blocks: Pages) -> Pages:
    """Returns the slots of whole blocks, in order."""
    slots: Pages = (blocks[:, None] * PAGE + np.arange(PAGE)).ravel()
    return slots


@lru_cache(10_000)
def page_number(name: str, at: int) -> int:
    """Returns the number of a page of KV that belongs to ``name``."""
    return random.Random(f"{name}/{at}").getrandbits(60)  # noqa: S311


class Rows:
    """Memory of requests: slots of the allocator and pages of the tree."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.allocator = engine.allocator
        self.tree = SimulatedTree(engine)
        self._count = 0

    def begin(self, request: Request, cached: list[int]) -> None:
        """Gives a request a row, whose first tokens are those of pages that the tree has."""
        self._count += 1
        request.row = self._count
        request.locked = cached
        self.tree.lock(cached)
        request.slots = slots_of(self.tree.places(cached))

    def take(self, request: Request, end: int) -> bool:
        """Allocates slots up to a token; returns False if there are too few."""
        have = len(request.slots)
        if end <= have:
            return True
        self.tree.evict(-(-end // PAGE) - -(-have // PAGE))
        before, after = torch.tensor([have]), torch.tensor([end])
        last = torch.tensor([int(request.slots[-1]) if have else -1])
        with self.allocator.serving(lambda: ([request.row], [end - have])):
            if end == have + 1 and have:
                new = self.allocator.alloc_decode(after, after, last)
            else:
                new = self.allocator.alloc_extend(before, before, after, after, last, end - have)
        if new is None:
            return False
        request.slots = np.concatenate([request.slots, new.numpy()])
        return True

    def give_back(self, request: Request, kept: int = 0) -> None:
        """Releases a request's memory, of which the tree has taken over ``kept`` pages."""
        kept = max(kept, len(request.locked))
        self.tree.free(request.blocks[kept:])
        self.tree.unlock(request.locked)
        self.allocator.close_rows([request.row])
        request.row, request.slots, request.locked, request.done = -1, NO_PAGES, [], 0

    def release(self, request: Request, tokens: int) -> None:
        """Releases a request, and keeps whole pages of its first tokens in the tree."""
        pages = request.pages(tokens // PAGE)
        self.tree.insert(pages, request.blocks[: len(pages)])
        self.give_back(request, len(pages))

    def keep(self, request: Request, tokens: int) -> None:
        """Puts whole pages of a request's first tokens into the tree, which it goes on using."""
        pages = request.pages(tokens // PAGE)
        self.tree.insert(pages, request.blocks[: len(pages)])
        self.tree.unlock(request.locked)
        request.locked = pages
        self.tree.lock(pages)
        request.slots[: len(pages) * PAGE] = slots_of(self.tree.places(pages))
