"""Swap-ins that go on while others decode (FastSwitch §3.2).

Pages are copied into slots that nobody else knows. When they have landed the radix tree gets them,
and their request finds them there as it would find any prefix; if it is gone by then, others may.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sgl_ext.engine.core.sglang_types import RadixTree, Req
from sgl_ext.memory.tickets import State, Ticket, outlast
from sgl_ext.swap.adaptive import Adaptive
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.stack import TierStack


class _Flight(NamedTuple):
    key: Any
    """SGLang's ``RadixKey`` of all tokens up to the last of these pages."""
    first: int
    """Token that they begin with."""
    slots: torch.Tensor
    lock: Any
    """On what the device has of the tokens before."""
    ticket: Ticket
    pages: Pages
    """In host memory, pinned."""
    growth: int
    """Tokens that its request needs beside them."""


class SwapAhead:
    """Only the scheduler's thread calls, and none of it waits.

    Attributes:
        adaptive: takes note of what swap-ins cost.
    """

    def __init__(self, stack: TierStack, adaptive: Adaptive) -> None:
        self.adaptive = adaptive
        self._stack = stack
        self._flights: dict[str, _Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, rid: str) -> bool:
        return rid in self._flights

    @property
    def tokens(self) -> int:
        """Slots that belong to no request and are not in the tree."""
        return sum(len(flight.slots) for flight in self._flights.values())

    @property
    def growth(self) -> int:
        """Tokens that their requests need beside what comes."""
        return sum(flight.growth for flight in self._flights.values())

    def begin(
        self, tree: RadixTree, req: Req, node: Any, first: int, keys: Sequence[Key], growth: int
    ) -> bool:
        """Begins to copy pages that follow on what the device has of the request's tokens.

        Args:
            node: of the tree, that the device's ``first`` tokens of the request end with.
            keys: of these pages, which host memory has.
            growth: tokens that the request needs beside them.

        Returns:
            False if there are no slots for them.
        """
        from sglang.srt.mem_cache.common import evict_from_tree_cache
        from sglang.srt.mem_cache.radix_cache import RadixKey

        page, allocator = tree.page_size, tree.token_to_kv_pool_allocator
        count = len(keys) * page
        lock = tree.lock(node)
        evict_from_tree_cache(tree, count)
        if (slots := allocator.alloc(count)) is None:
            tree.unlock(lock)
            return False
        ids = (req.origin_input_ids + req.output_ids)[: first + count]
        pages = self._stack.host.use(keys)
        self._stack.host.pin(pages)
        blocks = np.ascontiguousarray(slots[::page].numpy() // page)
        ticket = self._stack.begin_fill(pages, blocks)
        self._stack.in_flight.begin(blocks, ticket)
        key = RadixKey(ids, req.extra_key, cache_salt=req.cache_salt)
        self._flights[req.rid] = _Flight(key, first, slots, lock, ticket, pages, growth)
        return True

    def land(self, tree: RadixTree) -> Iterator[tuple[str, int]]:
        """Gives the tree what has landed; once in each of the scheduler's steps.

        Yields:
            Requests, and how many pages have come; 0 if it failed.
        """
        for rid, flight in list(self._flights.items()):
            if flight.ticket.poll():
                del self._flights[rid]
                yield rid, len(flight.pages) if self._landed(tree, flight) else 0

    def cancel(self, rid: str) -> None:
        """The request is gone: what has not begun to come does not; its slots are free when the
        rest has landed."""
        if (flight := self._flights.get(rid)) is not None:
            flight.ticket.cancel()

    def clear(self) -> None:
        """SGLang forgets tree and slots; nothing writes into them any more when this returns."""
        for flight in self._flights.values():
            flight.ticket.cancel()
            outlast(flight.ticket)
            self._stack.let_go(flight.pages)
        self._flights.clear()

    def _landed(self, tree: RadixTree, flight: _Flight) -> bool:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        if came := flight.ticket.state == State.DONE:
            self.adaptive.swapped(flight.ticket.bytes_total, flight.ticket.seconds)
            before = tree.path_device_indices(flight.lock.node)[: flight.first]
            if len(before) != flight.first:
                raise RuntimeError(
                    f"the tree has {len(before)} tokens of a locked prefix of {flight.first}"
                )
            tree.insert(
                InsertParams(
                    key=flight.key,
                    value=torch.cat([before, flight.slots]),
                    prev_prefix_len=flight.first,
                    inserted_len=len(flight.key),
                )
            )
        else:
            tree.token_to_kv_pool_allocator.free(flight.slots)
        tree.unlock(flight.lock)
        self._stack.let_go(flight.pages)
        return came
