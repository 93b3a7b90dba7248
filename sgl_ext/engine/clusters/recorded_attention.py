"""Attention over the part of a context that is recorded so far and no longer in the KV pool.

A context that is larger than the pool is computed by several requests. Each one's own tokens are in
the pool; the KV of the tokens before them is read from the record, and from the stored context that
the recorded one continues, one layer at a time, while the previous layer is computed. Rows see all
of it, in the order of the text, as in one prompt.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_ext._native import _attention
from sgl_ext.clusters.recorded import RecordedKV
from sgl_ext.engine.clusters.own import Own
from sgl_ext.engine.cpu.native_attention import NativeAttention, batch_of
from sgl_ext.errors import ExtError


class RecordedAttention:
    """Attention over the first tokens of a context, whose KV is in its record.

    Its memory holds two layers of these tokens. Only the thread of forwards calls it.

    Args:
        kv: KV of these tokens.
        name: id of the context.
        deadline: deadline for reading a layer, in seconds.
    """

    def __init__(self, kv: RecordedKV, name: str, deadline: float) -> None:
        self._kv, self._name, self._deadline = kv, name, deadline
        self._geometry = geometry = kv.geometry
        row = (kv.tokens, 2, geometry.kv_heads, geometry.head_dim)
        self._layers = [torch.empty(*row, dtype=getattr(torch, geometry.dtype)) for _ in range(2)]
        self._reader = ThreadPoolExecutor(1, "sgl_ext-record")
        self._reading: tuple[int, Future[None]] | None = None
        """Layer that is read into the second of the two tensors, and the read."""
        self._batch: tuple[NDArray[np.int64], torch.Tensor, _attention.Batch] | None = None
        """Slots of the latest forward's own tokens, table of all slots, and batch over it."""
        self.failed = ""

    @property
    def tokens(self) -> int:
        """Number of tokens that are recorded."""
        return self._kv.tokens

    def attend(
        self,
        native: NativeAttention,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        own: Own,
        share: float,  # noqa: ARG002
        sums: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See :meth:`Attended.attend <sgl_ext.engine.clusters.attended.Attended.attend>`.

        Rows are given all tokens, whatever their share.

        Raises:
            ExtError: the layer cannot be read, is late or is damaged, the output is not finite, or
                the context has failed before.
        """
        if self.failed:
            raise ExtError(self.failed)
        kv = self._read(layer)
        found = native.attend(
            self._batch_of(own, len(keys)), query, keys, values, scale=self._geometry.scale,
            elsewhere=kv, beyond=True, sums=sums,
        )  # fmt: skip
        if not torch.isfinite(found).all():  # sampling from it would terminate the process
            raise ExtError(
                f"the attention of layer {layer} is not finite; serve the model with another "
                "--dtype"
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
        """Does nothing, because :meth:`attend` reads ahead."""

    def close(self) -> None:
        """Ends the reading thread when its current read has ended."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _read(self, layer: int) -> torch.Tensor:
        """Returns K and V of a layer, ``[tokens, 2, kv_heads, head_dim]``; begins the next read."""
        if self._reading is None or self._reading[0] != layer:
            self._begin(layer)  # behind the read in progress, whose thread is the same
        assert self._reading is not None  # noqa: S101
        try:
            self._reading[1].result(self._deadline)
        except TimeoutError:
            raise ExtError(
                f"layer {layer} of the record of context {self._name} was not read within "
                f"{self._deadline:g} s; check device 0, or raise clusters.deadline"
            ) from None
        self._layers.reverse()
        self._begin((layer + 1) % self._geometry.layers)
        return self._layers[0]

    def _begin(self, layer: int) -> None:
        into = self._layers[1].view(torch.uint8).numpy().reshape(self.tokens, -1)
        self._reading = layer, self._reader.submit(self._kv.read, layer, into)

    def _batch_of(self, own: Own, pool: int) -> _attention.Batch:
        """Returns the batch of rows whose own tokens come behind the recorded ones.

        Args:
            pool: number of slots of the pool, behind which those of the recorded tokens come.
        """
        if self._batch is None or self._batch[0] is not own.slots:
            lines, contexts, new = own.lines(range(pool, pool + self.tokens))
            table = torch.from_numpy(lines)
            self._batch = own.slots, table, batch_of(table, range(len(lines)), contexts, new)
        return self._batch[2]
