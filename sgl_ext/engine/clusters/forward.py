"""Forward in which some rows follow stored contexts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from sgl_ext.clusters.reader import DeviceError
from sgl_ext.engine.clusters.attention import Own, StoredAttention
from sgl_ext.engine.clusters.contexts import StoredContexts
from sgl_ext.engine.clusters.follower import Follower, end_request
from sgl_ext.engine.cpu.native_attention import NativeAttention
from sgl_ext.errors import ExtError

logger = logging.getLogger(__name__)


class _Part(NamedTuple):
    """Rows that follow the same context with the same share of its blocks."""

    context: StoredAttention
    followers: list[Follower]
    own: Own
    tokens: torch.Tensor


class StoredForward:
    """Rows of a forward that follow contexts.

    Args:
        stored: registry of the contexts.
        followers: follower of each row; None for a row that follows no context.
        table: KV slots, ``[requests, width]``.
        requests: line of ``table`` of each row.
        contexts: number of own tokens of each row's request, the new ones included.
        lengths: number of new tokens of each row.
    """

    def __init__(
        self,
        stored: StoredContexts,
        followers: Sequence[Follower | None],
        table: torch.Tensor,
        requests: Sequence[int],
        contexts: Sequence[int],
        lengths: Sequence[int],
    ) -> None:
        self._stored = stored
        followed: dict[tuple[str, float], list[int]] = {}
        start = 0
        self.plain = [row for row, follower in enumerate(followers) if follower is None]
        """Rows that follow no context."""
        plain: list[torch.Tensor] = []
        tokens: list[torch.Tensor] = []
        for row, (follower, new) in enumerate(zip(followers, lengths, strict=True)):
            tokens.append(torch.arange(start, start := start + new))
            if follower is None:
                plain.append(tokens[-1])
            else:
                followed.setdefault((follower.id, follower.share), []).append(row)
        self.plain_tokens = torch.cat(plain) if plain else torch.empty(0, dtype=torch.int64)
        """Indices of the queries of :attr:`plain` rows in the forward, int64 ``[tokens]``."""
        self._parts: dict[tuple[str, float], _Part] = {}
        for key, some in followed.items():
            mine = [one for row in some if (one := followers[row]) is not None]
            slots = [table[requests[row], : contexts[row]].long().numpy() for row in some]
            own = Own.of(slots, [lengths[row] for row in some])
            where = torch.cat([tokens[row] for row in some])
            self._parts[key] = _Part(stored.context(mine[0]), mine, own, where)
        self._failed: set[tuple[str, float]] = set()

    @property
    def followed(self) -> torch.Tensor:
        """Indices of the queries of followers' rows in the forward, int64 ``[followed]``."""
        return torch.cat([part.tokens for part in self._parts.values()])

    def prefetch(self, layer: int, query: torch.Tensor, keys: torch.Tensor, times: float) -> None:
        """Starts to read the blocks that a layer will probably need.

        Args:
            query: predicted queries, ``[followed, heads, head_dim]``, in the order of
                :attr:`followed`.
            keys: see :meth:`attend`.
            times: see :meth:`StoredAttention.prefetch`.
        """
        start = 0
        for key, part in self._parts.items():
            asked = query[start : (start := start + len(part.tokens))]
            if key not in self._failed:
                try:
                    part.context.prefetch(layer, asked, keys, part.own, key[1], times)
                except Exception as error:
                    self._fail(key, part, error)

    def attend(
        self,
        native: NativeAttention,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Computes the attention of the rows that follow contexts.

        See :meth:`StoredAttention.attend` for the other arguments. The output of failed rows is 0.

        Args:
            query: queries of all rows, ``[tokens, heads, head_dim]``.
            out: output of all rows, shaped as ``query``; only these rows are written.
        """
        for key, part in self._parts.items():
            if key not in self._failed:
                try:
                    out[part.tokens] = part.context.attend(
                        native, layer, query[part.tokens], keys, values, part.own, key[1]
                    )
                    continue
                except Exception as error:
                    self._fail(key, part, error)
            out[part.tokens] = 0

    def _fail(self, key: tuple[str, float], part: _Part, error: Exception) -> None:
        """Ends the requests of a part with an error. Other requests of the batch continue.

        The requests end when SGLang processes the output of the forward, which is not kept.
        """
        message = str(error)
        if not isinstance(error, DeviceError):
            # The memory of the context may be inconsistent.
            message = part.context.failed or f"context {key[0]} is disabled after an error: {error}"
            part.context.failed = message
        logger.error("%s", message, exc_info=not isinstance(error, ExtError))
        self._failed.add(key)
        for follower in part.followers:
            self._stored.given_up.add(follower.req.rid)
            end_request(follower.req, message)
