"""A forward some of whose rows follow stored contexts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from sgl_ext.clusters.reader import DeviceError
from sgl_ext.engine.clusters.attention import Own, StoredAttention
from sgl_ext.engine.clusters.contexts import Follower, StoredContexts, end_request
from sgl_ext.engine.cpu.native_attention import NativeAttention
from sgl_ext.errors import ExtError

logger = logging.getLogger(__name__)


class _Part(NamedTuple):
    """Rows that follow one context, each query given the same share of it."""

    context: StoredAttention
    followers: list[Follower]
    own: Own
    tokens: torch.Tensor


class StoredForward:
    """Rows of a forward that follow contexts.

    Args:
        followers: of each row, what it follows.
        table: ``[requests, width]`` slots.
        requests: the line of ``table`` of each row.
        contexts: tokens of each row, the new ones included.
        lengths: new tokens of each row.
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
        """Rows that follow none."""
        plain: list[torch.Tensor] = []
        tokens: list[torch.Tensor] = []
        for row, (follower, new) in enumerate(zip(followers, lengths, strict=True)):
            tokens.append(torch.arange(start, start := start + new))
            if follower is None:
                plain.append(tokens[-1])
            else:
                followed.setdefault((follower.id, follower.share), []).append(row)
        self.plain_tokens = torch.cat(plain) if plain else torch.empty(0, dtype=torch.int64)
        """Where their queries are among the forward's."""
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
        """Where the queries of rows that follow contexts are among the forward's."""
        return torch.cat([part.tokens for part in self._parts.values()])

    def expect(self, layer: int, query: torch.Tensor, keys: torch.Tensor, times: float) -> None:
        """Begins to read what a layer will probably need.

        Args:
            query: ``[followed, heads, head_dim]``, predicted.
            keys: as for :meth:`attend`, as ``times`` is for :meth:`StoredAttention.expect`.
        """
        start = 0
        for key, part in self._parts.items():
            asked = query[start : (start := start + len(part.tokens))]
            if key not in self._failed:
                try:
                    part.context.expect(layer, asked, keys, part.own, key[1], times)
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
        """Attention of the rows that follow contexts; see :meth:`StoredAttention.attend`.

        Args:
            query: ``[tokens, heads, head_dim]`` of all rows.
            out: as ``query``, where theirs is written.
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
        """Ends the requests of a part; whatever it is, the others of the batch go on.

        They end when SGLang looks at what came out, which is nothing, and none of it is kept.
        """
        message = str(error)
        if not isinstance(error, DeviceError):
            # What is in memory of the context may be half of this and half of that.
            message = part.context.failed or f"context {key[0]} is given up: {error}"
            part.context.failed = message
        logger.error("%s", message, exc_info=not isinstance(error, ExtError))
        self._failed.add(key)
        for follower in part.followers:
            self._stored.given_up.add(follower.req.rid)
            end_request(follower.req, message)
