"""Swap-ins that overlap with the decode steps of other requests (FastSwitch §3.2).

Pages are copied into slots that belong to no request and are not in the radix tree. When they have
landed, they are inserted into the tree, and the request finds them as it finds any prefix. If the
request is gone by then, other requests may use them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from sgl_ext.engine.core.sglang_types import Node, RadixTree, Req, TreeLock
from sgl_ext.engine.swap import spans
from sgl_ext.memory.tickets import State, Ticket, outlast
from sgl_ext.planning import choices
from sgl_ext.planning.costs import Costs
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.stack import TierStack

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import RadixKey


class _Flight(NamedTuple):
    req: Req
    key: RadixKey
    """SGLang's ``RadixKey`` of all tokens up to the last of these pages."""
    first: int
    """First token of the pages in the request."""
    slots: torch.Tensor
    lock: TreeLock
    """Lock on the node of the tree with which the tokens before the pages end."""
    ticket: Ticket
    pages: Pages
    """Pinned pages in host memory."""
    growth: int
    """Tokens that the request needs in addition to the pages."""


class SwapAhead:
    """Swap-ins in progress of a scheduler, whose thread is the only caller.

    Only :meth:`clear` waits for swap-ins. :meth:`begin` may wait for earlier copies that still use
    the slots which it allocates.

    Args:
        costs: cost model, whose decisions learn how long swap-ins took.
    """

    def __init__(self, stack: TierStack, costs: Costs) -> None:
        self._costs = costs
        self._stack = stack
        self._flights: dict[str, _Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, rid: str) -> bool:
        return rid in self._flights

    @property
    def tokens(self) -> int:
        """Number of slots of the swap-ins, which belong to no request and are not in the tree."""
        return sum(len(flight.slots) for flight in self._flights.values())

    @property
    def growth(self) -> int:
        """Tokens that the requests need in addition to the pages that are being loaded."""
        return sum(flight.growth for flight in self._flights.values())

    def begin(
        self, tree: RadixTree, req: Req, node: Node, first: int, keys: Sequence[Key], growth: int
    ) -> bool:
        """Starts to copy the pages that follow the request's tokens on the device.

        Args:
            node: node of the tree that the tokens on the device end with.
            first: number of tokens on the device.
            keys: keys of the pages, all of which are in host memory.
            growth: tokens that the request needs in addition to the pages.

        Returns:
            False, with nothing begun, if there are no slots for the pages.
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
        blocks = allocator.known.on_host(slots)[::page] // page
        ticket = self._stack.holds.begin_fill(pages, blocks)
        self._stack.in_flight.begin(blocks, ticket)
        key = RadixKey(ids, req.extra_key, cache_salt=req.cache_salt)
        self._flights[req.rid] = _Flight(req, key, first, slots, lock, ticket, pages, growth)
        return True

    def land(self, tree: RadixTree) -> Iterator[tuple[str, int]]:
        """Inserts pages that have landed into the tree; called once per scheduler step.

        Yields:
            The id of each request whose copy has ended, and the number of its pages; 0 if the copy
            has failed or was cancelled.
        """
        for rid, flight in list(self._flights.items()):
            if flight.ticket.poll():
                del self._flights[rid]
                yield rid, len(flight.pages) if self._landed(tree, rid, flight) else 0

    def cancel(self, rid: str) -> None:
        """Cancels the swap-in of a request that is gone, if there is one.

        Copies that have started still land. :meth:`land` then frees the slots, or gives them to the
        tree if all pages have landed.
        """
        if (flight := self._flights.get(rid)) is not None:
            flight.ticket.cancel()

    def clear(self) -> None:
        """Cancels all swap-ins, and waits until no copy writes to a slot.

        The slots are not freed: SGLang resets its tree and its slots afterwards.
        """
        for flight in self._flights.values():
            flight.ticket.cancel()
            outlast(flight.ticket)
            self._stack.holds.let_go(flight.pages)
        self._flights.clear()

    def _landed(self, tree: RadixTree, rid: str, flight: _Flight) -> bool:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        if came := flight.ticket.state == State.DONE:
            choices.swapped_in(self._costs, rid, flight.ticket.seconds)
            spans.swapped_in(flight.req, flight.ticket.seconds, len(flight.slots))
            before = tree.path_device_indices(flight.lock.node)[: flight.first]
            if len(before) != flight.first:
                raise RuntimeError(
                    f"the radix tree has {len(before)} of the {flight.first} tokens of a locked "
                    "prefix"
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
        self._stack.holds.let_go(flight.pages)
        return came
