"""Attention over a context that is stored on devices; fetches what each query needs (Swarm §6).

A row sees the context's sinks and window, the blocks that are selected for it, and its own tokens.
The KV of the context is in separate memory, which the native attention reads as slots behind those
of the pool. If the pool is on a device, so is the attention to own tokens
(:mod:`~sgl_ext.engine.clusters.device`); only the log-sum-exp of their logits is known here, which
the selection of blocks depends on.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_ext._native import _clusters
from sgl_ext.clusters.selection import blocks_of, each_of
from sgl_ext.clusters.stored import Stored
from sgl_ext.engine.clusters.memory import StoredMemory
from sgl_ext.engine.clusters.own import Own, OwnTokensError
from sgl_ext.engine.cpu.native_attention import NativeAttention, batch_of
from sgl_ext.errors import ExtError

_ROWS = 32
"""Maximum number of rows that blocks are selected for at a time."""
_SCORES = 1 << 26
"""Maximum number of float32 scores of these rows: a row has one for every entry and KV head, and
their sums."""


class StoredAttention:
    """Attention over one context that is open for decoding.

    Args:
        stored: the context.
        memory: the part of the context that is in memory.
    """

    def __init__(self, stored: Stored, memory: StoredMemory) -> None:
        self._about, self._stored = stored.about, stored
        self._blocks = stored.about.blocks
        self.memory = memory
        self.seconds = {"select": 0.0, "fetch": 0.0, "assemble": 0.0, "prefetch": 0.0}
        """Seconds that the thread of forwards has spent on the context, by activity."""
        scores = self._blocks.entries * (stored.about.geometry.kv_heads + 1)
        self._rows = min(max(_SCORES // max(scores, 1), 1), _ROWS)
        """Number of rows that blocks are selected for at a time."""
        self._skipped = 0
        """Number of the first tokens that no row sees."""
        self.failed = ""
        """Reason why the context cannot be used until it is opened again; empty if it can."""

    @property
    def tokens(self) -> int:
        """Number of tokens of the context."""
        return self._about.tokens

    def attend(
        self,
        native: NativeAttention,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        own: Own,
        share: float,
        sums: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See :meth:`Attended.attend <sgl_ext.engine.clusters.attended.Attended.attend>`.

        Own tokens without slots count in the selection of blocks only.

        Raises:
            DeviceError: a block cannot be read, is late, or is damaged.
            OwnTokensError: the attention to own tokens without slots is not finite, or the numbers
                of those with slots.
            ExtError: the share is too large, the output is not finite, or the context has failed
                before.
        """
        if self.failed:
            raise ExtError(self.failed)
        if own.sums is not None and not np.isfinite(own.sums).all():
            raise OwnTokensError(
                f"the attention of layer {layer} to the request's own tokens is not finite"
            )
        blocks, memory = self._blocks, self.memory
        if (each := blocks_of(share, blocks.blocks, blocks.devices)) > memory.most:
            raise ExtError(
                f"the requested share selects {each} blocks of the context per query, but at most "
                f"{memory.most} fit into memory at once; lower sparsity"
            )
        parts: list[torch.Tensor] = []
        wanted_by_all: list[NDArray[np.int64]] = []
        for some, chosen, wanted in self._groups(layer, query, keys, own, share):
            with self._timed("fetch"):
                slots = memory.bring(layer, wanted)
            with self._timed("assemble"):
                rows = slots[None] if len(chosen) == 1 else slots[np.searchsorted(wanted, chosen)]
                table, contexts = self._table(layer, rows, own.only(some), len(keys), share)
                batch = batch_of(table, range(len(table)), contexts, [1] * len(table))
            parts.append(
                native.attend(
                    batch, query[some], keys, values, scale=self._about.geometry.scale,
                    elsewhere=memory.slots, beyond=True, sums=None if sums is None else sums[some],
                )
            )  # fmt: skip
            wanted_by_all.append(wanted)
        with self._timed("assemble"):
            # One step, even with several groups: only the last group's blocks are still in memory.
            memory.keep(layer, _union(wanted_by_all), wanted_by_all[-1], slots)
        found = parts[0] if len(parts) == 1 else torch.cat(parts)
        if not torch.isfinite(found).all():  # sampling from it would terminate the process
            mine = torch.from_numpy(own.slots)
            if not all(torch.isfinite(each).all() for each in (query, keys[mine], values[mine])):
                raise OwnTokensError(
                    f"the keys, values or queries of layer {layer} of the request's own tokens are "
                    "not finite"
                )
            raise ExtError(
                f"the attention of layer {layer} to the context is not finite; store the context "
                "again"
            )
        return found

    def prefetch(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        own: Own,
        share: float,
        times: float,
    ) -> None:
        """See :meth:`Attended.prefetch <sgl_ext.engine.clusters.attended.Attended.prefetch>`.

        Does nothing for more rows than blocks are selected for at a time, for a share of 1, or if
        the context has failed.
        """
        if share >= 1 or len(query) > self._rows or self.failed:
            return
        # The best blocks, as many as fit into memory.
        room = self.memory.most / (len(query) * self._blocks.blocks)
        share = max(min(share * times, room, 1.0), 1 / self._blocks.blocks)
        known = own._replace(lengths=own.before)  # the layer has not computed K of the new tokens
        with self._timed("prefetch"):
            self.memory.prefetch(layer, _union([*self._select(layer, query, keys, known, share)]))

    def behind(self) -> StoredAttention:
        """Returns the same context as it is attended to behind other contexts.

        Its first token is left out, because it attracts attention as the first of a text (Xiao et
        al., Efficient Streaming Language Models with Attention Sinks, §3.1; EPIC §4).
        """
        found = copy.copy(self)
        found._skipped = min(1, self._about.sinks)
        return found

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        """Adds the time of a block of code to an activity in :attr:`seconds`."""
        began = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - began

    def close(self) -> None:
        """See :meth:`StoredMemory.close`."""
        self.memory.close()

    def describe(self) -> dict[str, object]:
        """Returns the cost of following the context, for ``/server_info``."""
        return {**self.memory.describe(), "seconds": self.seconds}

    def _groups(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, own: Own, share: float
    ) -> Iterator[tuple[slice, NDArray[np.int64], NDArray[np.int64]]]:
        """Yields groups of rows whose blocks fit into memory together.

        Yields:
            The rows, the blocks of each, ``[rows, blocks]``, and the union of these blocks.
        """
        for start in range(0, len(query), self._rows):
            some = slice(start, start + self._rows)
            with self._timed("select"):
                chosen = self._select(layer, query[some], keys, own.only(some), share)
            for first, end, wanted in _fitting(chosen, self.memory.most):
                yield slice(start + first, start + end), chosen[first:end], wanted

    def _select(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, own: Own, share: float
    ) -> NDArray[np.int64]:
        """Returns the selected blocks of each row, int64 ``[rows, blocks]``, each row sorted."""
        blocks = self._blocks
        if share >= 1:
            return np.broadcast_to(np.arange(blocks.blocks), (len(query), blocks.blocks))
        codes, slots = self._stored.layers[layer].codes, self.memory.slots
        visible = _clusters.Visible(
            near=slots[self.memory.first(layer) + self._skipped :].data_ptr(),
            near_stride=slots.stride(0),
            count=self.memory.near - self._skipped,
            own=keys.data_ptr(),
            own_stride=keys.stride(0),
            bfloat16=keys.dtype == torch.bfloat16,
            slots=own.slots,
            starts=own.starts,
            lengths=own.lengths,
            sums=own.sums,
        )
        each = each_of(share, blocks.blocks, blocks.devices)
        return _clusters.choose(
            codes.native,
            query.float().contiguous().numpy(),
            self._about.geometry.scale,
            visible,
            _clusters.Deal(blocks.block, blocks.devices, each),
            torch.get_num_threads(),
        )

    def _table(
        self, layer: int, first: NDArray[np.int64], own: Own, pool: int, share: float
    ) -> tuple[torch.Tensor, list[int]]:
        """Returns the slots that each row sees, and their numbers.

        If the rows see the whole context, the slots are in the order of the text, so that the
        output equals that of dense attention bit by bit. Attention to a part of the context has no
        such reference.

        Args:
            first: first slot of each block, ``[rows, blocks]``.
            pool: number of slots of the pool.
        """
        about, block, skipped = self._about, self._blocks.block, self._skipped
        text = np.argsort(self._stored.layers[layer].order) if share >= 1 else None
        table = _clusters.table(
            first=first, block=block, pool=pool, near=pool + self.memory.first(layer) + skipped,
            sinks=about.sinks - skipped, window=about.window, text=text,
            slots=own.slots, starts=own.starts, lengths=own.lengths,
        )  # fmt: skip
        behind = self.memory.near - skipped + first.shape[1] * block
        return torch.from_numpy(table), (own.lengths + behind).tolist()


def _union(chosen: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Returns the union of sorted sets of blocks, sorted."""
    return chosen[0] if len(chosen) == 1 else np.unique(np.concatenate(chosen))


def _fitting(chosen: NDArray[np.int64], most: int) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """Yields groups of rows with at most ``most`` blocks in all: first, end, and the blocks."""
    first, wanted = 0, chosen[0]
    for row in range(1, len(chosen)):
        more = np.union1d(wanted, chosen[row])
        if len(more) > most:
            yield first, row, wanted
            first, more = row, chosen[row]
        wanted = more
    yield first, len(chosen), wanted
