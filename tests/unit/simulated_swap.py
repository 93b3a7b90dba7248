"""Preemption and resumption of a simulated scheduler's requests, as ``engine.swap`` does them."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from simulated_engine import PAGE, SimulatedEngine, key
from simulated_requests import Request, Rows

from sgl_ext.engine.swap import resume
from sgl_ext.memory.tickets import COPY_DEADLINE_S, State, Ticket, outlast
from sgl_ext.tiers.arena import Pages


@dataclass
class _Ahead:
    """Swap-in beside the forwards, of the pages after the first ``here``."""

    request: Request
    pages: list[int]
    here: int
    blocks: Pages
    ticket: Ticket
    held: Pages


class Swaps:
    """Swapped requests, and swap-ins beside the forwards."""

    def __init__(
        self, engine: SimulatedEngine, rows: Rows, chance: random.Random, counts: Counter[str]
    ) -> None:
        self.rows, self.tree, self.chance, self.counts = rows, rows.tree, chance, counts
        self.stack, self.manager, self.streams = engine.stack, engine.manager, engine.streams
        self.allocator = engine.allocator
        self.ahead: dict[str, _Ahead] = {}

    def out(self, request: Request) -> None:
        """Preempts a request; a forward that computes its next token may still run."""
        stack, swap, tokens = self.stack, self.manager, request.tokens - 1
        blocks = request.blocks[: -(-tokens // PAGE)]
        keys = [key(page) for page in request.pages(tokens // PAGE)]
        stack.used(keys, 1)
        stack.make_room(len(keys) + 1)
        tail = swap.save_tail(int(blocks[-1])) if tokens % PAGE else None
        self.rows.release(request, tokens)
        self.tree.commit(stack.stores.presume())
        stack.stores.store_lost(keys, blocks)
        swap.out(request.rid, tokens, keys, tail)
        self.counts["swapped out"] += 1

    def resume(self, waiting: Sequence[Request]) -> list[Request]:
        """Begins to resume some requests, and returns those that run from the next forward on."""
        loads = []
        for request in waiting:
            swapped = self.manager.get(request.rid)
            if swapped is None or request.rid in self.ahead or self.chance.random() < 0.4:
                continue
            pages = request.pages(swapped.tokens // PAGE)
            here = self.tree.match(pages)
            readable = self.manager.readable(swapped, len(here))
            if readable is None:
                continue
            if not readable:
                self.manager.drop(request.rid)
                self.counts["recomputed"] += 1
                continue
            if len(here) < len(pages) and self.chance.random() < 0.4:
                self._go_ahead(request, pages, len(here))
                continue
            self.rows.begin(request, here)
            if not self.rows.take(request, swapped.tokens):
                self.rows.give_back(request)
                continue
            self.manager.hold(swapped, len(here))
            blocks = request.blocks[len(here) :]
            loads.append((request, swapped, blocks, self.manager.load(swapped, blocks)))
        for request, swapped, _blocks, tickets in loads:
            assert resume._landing(tickets, self.streams, time.perf_counter() + COPY_DEADLINE_S)
            request.done = swapped.tokens
            self.manager.drop(request.rid)
            self.counts["resumed"] += 1
        return [request for request, *_ in loads]

    def _go_ahead(self, request: Request, pages: list[int], here: int) -> None:
        """Begins a swap-in beside the forwards, as ``SwapAhead`` does."""
        missing = pages[here:]
        self.tree.lock(pages[:here])
        self.tree.evict(len(missing))
        slots = self.allocator.alloc(len(missing) * PAGE)
        if slots is None:
            self.tree.unlock(pages[:here])
            return
        held = self.stack.host.use([key(page) for page in missing])
        self.stack.host.pin(held)
        blocks = np.ascontiguousarray(slots.numpy()[::PAGE] // PAGE)
        ticket = self.stack.holds.begin_fill(held, blocks)
        self.stack.in_flight.begin(blocks, ticket)
        self.ahead[request.rid] = _Ahead(request, pages, here, blocks, ticket, held)

    def land(self) -> None:
        """Puts the pages of swap-ins that have ended into the tree."""
        for rid, ahead in [*self.ahead.items()]:
            if self.chance.random() < 0.05:
                ahead.ticket.cancel()
            if not ahead.ticket.poll():
                continue
            del self.ahead[rid]
            if ahead.ticket.state == State.DONE:
                before = self.tree.places(ahead.pages[: ahead.here])
                self.tree.insert(ahead.pages, np.concatenate([before, ahead.blocks]))
                self.counts["landed ahead"] += 1
            else:
                self.tree.free(ahead.blocks)
            self.tree.unlock(ahead.pages[: ahead.here])
            self.stack.holds.let_go(ahead.held)

    def forget(self, request: Request) -> None:
        """Forgets a request that is gone."""
        self.manager.drop(request.rid)
        if (ahead := self.ahead.get(request.rid)) is not None:
            ahead.ticket.cancel()

    def clear(self) -> None:
        self.manager.clear()
        for ahead in self.ahead.values():
            ahead.ticket.cancel()
            outlast(ahead.ticket)
            self.stack.holds.let_go(ahead.held)
        self.ahead.clear()
