"""Layer stream cache: loads workers' memory one layer at a time (SwiftCache §3.2-3.3).

A master reads borrowed memory like its own, or, if access to it is slow, through a buffer for the
active layer. The layer's rows are loaded before its attention. The rows of new tokens are
stored after it, while the rest of the layer and the next layer are computed. With one buffer, loads
overlap with what follows the attention; with two buffers, with a whole layer.

The buffers are a part of the master's own KV memory (Eq. 4, 5). One has room for a layer of all the
memory that may be borrowed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_ext.config.values import EmulatedDevice
from sgl_ext.engine.core.sglang_types import KVPool
from sgl_ext.memory.runs import copy_rows, run_starts
from sgl_ext.memory.slab import Slab
from sgl_ext.memory.tickets import Priority, Ticket, outlast
from sgl_ext.memory.transfer import Lane, TransferEngine
from sgl_ext.tiers.build import emulated

_PIECE = 2 << 20
"""Bytes of a piece on an emulated link; a layer has a few pieces."""


class _Rows(NamedTuple):
    """Runs of slots, numbered from the first slot in workers' memory."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    total: int

    @classmethod
    def of(cls, slots: NDArray[np.int64]) -> _Rows:
        first = run_starts(slots)
        return cls(slots[first], np.diff(first, append=len(slots)), len(slots))


def _slots(slab: Slab) -> int:
    """Returns the number of slots in workers' memory that have addresses."""
    return (slab.blocks - slab.own) * slab.layout.page


class LayerStream:
    """Layer buffers of a scheduler process, and the copies to and from them.

    The buffers are in the last :meth:`blocks` own blocks of the slab, which nothing else may use.

    Args:
        slab: slab of a master, with addresses for workers' memory.
        pool: SGLang's KV pool, whose layers may still be loading from tiers.
        buffers: number of layers that have a buffer, 1 or 2.
        busy_rate: maximum bytes per second while a worker has requests; None for no limit.
        link: speed that the link to workers' memory is slowed down to; None if it is not.
    """

    def __init__(
        self,
        slab: Slab,
        pool: KVPool,
        buffers: int,
        busy_rate: int | None = None,
        link: EmulatedDevice | None = None,
    ) -> None:
        layout = slab.layout
        self._slab, self._pool = slab, pool
        self._first = slab.own * layout.page
        self._row = layout.token_bytes // layout.layers
        first = slab.own - self.blocks(slab, buffers)
        shape = (buffers, _slots(slab), 2, layout.kv_heads, layout.head_dim)
        own = slab.tensor()[first : slab.own].flatten()
        self._buffers: torch.Tensor = own[: math.prod(shape)].view(shape)
        self._buffers_at = slab.address + first * layout.block_bytes
        self._engine = TransferEngine()
        self._engine.register(slab.address, slab.reach, owner=slab)
        lane: Lane = self._engine.host_lane()
        slow = emulated(self._engine, link, piece_bytes=_PIECE)
        self._full = self._lane = slow(lane) if slow else lane
        self._reduced = self._full
        if busy_rate is not None:
            self._reduced = self._engine.throttled_lane(self._full, bytes_per_second=busy_rate)
        self.active = False
        """True if the current forward reads or writes workers' memory through the buffers."""
        self.waited_seconds = 0.0
        """Seconds that forwards have waited for loads and stores."""
        self.forward_bytes = 0
        """Bytes that were loaded and stored so far."""
        self._loads: dict[int, Ticket] = {}
        self._stores: dict[int, Ticket] = {}
        self.enabled = False
        """True if anything is borrowed."""
        self.worker_busy = False
        """True if a worker has requests of its own, so that copies are limited to the busy rate."""
        self._old = self._new = _Rows.of(np.empty(0, np.int64))
        self._new_at: torch.Tensor | None = None

    @property
    def buffer_bytes(self) -> int:
        """Bytes of own memory that the buffers take."""
        return self._buffers.nbytes

    @staticmethod
    def blocks(slab: Slab, buffers: int) -> int:
        """Returns the number of own blocks that buffers for all of workers' addresses take."""
        layout = slab.layout
        size = buffers * _slots(slab) * layout.token_bytes // layout.layers
        return -(-size // layout.block_bytes)

    def begin(
        self,
        table: torch.Tensor,
        requests: Sequence[int],
        contexts: Sequence[int],
        written: torch.Tensor,
    ) -> None:
        """Prepares a forward of all layers: finds its rows in workers' memory, and starts to load
        the first layers.

        Args:
            table: slots, ``[requests, width]``.
            requests: the line of ``table`` of each row.
            contexts: tokens of each row.
            written: slots of the tokens that are computed, ``[tokens]``.
        """
        self.read_in_place()
        if not self.enabled:
            return
        needed = torch.zeros(self._buffers.shape[1], dtype=torch.bool)
        for request, context in dict(sorted(zip(requests, contexts, strict=True))).items():
            slots = table[request, :context].long()
            needed[slots[slots >= self._first] - self._first] = True
        far = written >= self._first
        new = written[far].long() - self._first
        needed[new] = False
        self._old = _Rows.of(needed.nonzero().flatten().numpy())
        self._new = _Rows.of(torch.sort(new).values.numpy())
        self._new_at = far if len(new) else None
        self.active = bool(self._old.total or self._new.total)
        if self.active:
            self._lane = self._reduced if self.worker_busy else self._full
            for layer in range(min(len(self._buffers), self._slab.layout.layers)):
                self._load(layer)

    def read_in_place(self) -> None:
        """Prepares a forward that reads and writes workers' memory in place, without buffers."""
        self.settle()  # copies of a forward that has failed
        self.active = False

    def save(
        self, layer: int, written: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Writes K and V of new tokens whose slots are in workers' memory to the layer's buffer.

        Args:
            layer: number of the layer, from 0 on.
            written: slots of the new tokens, ``[tokens]``.
            keys: K of the new tokens, ``[tokens, kv_heads, head_dim]``.
            values: V of the new tokens, in the same shape.

        Returns:
            Slots, K and V of the other new tokens.
        """
        if (far := self._new_at) is None:
            return written, keys, values
        place = layer % len(self._buffers)
        if (store := self._stores.pop(layer - len(self._buffers), None)) is not None:
            self._wait(store)  # it reads the memory that is written now
        where = written[far].long() - self._first
        shape = (-1, *self._buffers.shape[3:])
        self._buffers[place, where, 0] = keys.view(len(written), *shape[1:])[far]
        self._buffers[place, where, 1] = values.view(len(written), *shape[1:])[far]
        near = ~far
        return written[near], keys[near], values[near]

    def layer(self, layer: int) -> torch.Tensor:
        """Returns K and V of the slots in workers' memory, ``[slots, 2, kv_heads, head_dim]``.

        Waits until the layer is loaded.
        """
        if (ticket := self._loads.pop(layer, None)) is not None:
            self._wait(ticket)
        return self._buffers[layer % len(self._buffers)]

    def done(self, layer: int) -> None:
        """Starts to store the layer's new rows and to load another layer into its buffer.

        Called after the layer's attention. After the last layer, waits for all stores.
        """
        if self._new.total:
            self._stores[layer] = self._submit(layer, self._new, stored=True)
        last = self._slab.layout.layers - 1
        if layer + len(self._buffers) <= last:
            self._load(layer + len(self._buffers))
        elif layer == last:
            self.settle()
            self.active = False

    def _load(self, layer: int) -> None:
        if self._old.total:
            self._pool.get_key_buffer(layer)  # waits until tiers have loaded the layer
            self._loads[layer] = self._submit(layer, self._old, stored=False)

    def _submit(self, layer: int, slots: _Rows, *, stored: bool) -> Ticket:
        token, row = self._slab.layout.token_bytes, self._row
        home = self._slab.address + (self._first + slots.starts) * token + layer * row
        place = layer % len(self._buffers) * self._buffers.shape[1] * row
        buffer = self._buffers_at + place + slots.starts * row
        ends = (buffer, home) if stored else (home, buffer)
        pitches = (row, token) if stored else (token, row)
        rows = copy_rows(*ends, row, slots.lengths, *pitches)
        self.forward_bytes += slots.total * row
        return self._engine.submit(rows, self._lane, Priority.URGENT)

    def settle(self) -> None:
        """Waits until all loads and stores have ended; raises the error of one that has failed."""
        for tickets in (self._loads, self._stores):
            while tickets:
                self._wait(tickets.popitem()[1])

    def _wait(self, ticket: Ticket) -> None:
        began = time.perf_counter()
        outlast(ticket)  # without a deadline: the lane may be slowed down
        self.waited_seconds += time.perf_counter() - began
        ticket.wait(0)  # raises the error of a failed copy
