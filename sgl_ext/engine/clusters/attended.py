"""Interface between a forward and a context whose KV is not in the KV pool."""

from __future__ import annotations

from typing import Protocol

import torch

from sgl_ext.engine.clusters.own import Own
from sgl_ext.engine.cpu.native_attention import NativeAttention


class Attended(Protocol):
    """Context that requests follow: one that is stored, or as much as is recorded of one.

    Attributes:
        failed: reason why the context cannot be followed until it is opened again; empty if it can.
    """

    failed: str

    @property
    def tokens(self) -> int:
        """Number of tokens of the context."""

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
        """Computes the attention of rows, of one query each, to the context and their own tokens.

        Args:
            query: ``[rows, heads, head_dim]``, the rows of each request one after the other.
            keys: K of the pool in this layer, ``[slots, kv_heads, head_dim]``.
            values: V of the pool in this layer, shaped as ``keys``.
            own: own tokens of the rows.
            share: share of the context's blocks that each row is given.
            sums: tensor for the log-sum-exp of the logits that the output is computed from,
                float32 ``[rows, heads]``; None if it is not wanted.

        Returns:
            The output, ``[rows, heads, head_dim]``.

        Raises:
            DeviceError: a device fails or is late.
            OwnTokensError: the attention to own tokens without slots is not finite.
            ExtError: the context cannot be followed.
        """

    def prefetch(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        own: Own,
        share: float,
        times: float,
    ) -> None:
        """Starts to read what rows will probably need.

        Args:
            query: predicted queries, shaped as for :meth:`attend`.
            times: number of blocks to read for each row, as a multiple of those that it is given.
        """

    def close(self) -> None:
        """Releases memory and files, or leaves them to be released when no device uses them."""
