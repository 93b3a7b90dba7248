"""Forward in which some rows follow stored contexts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_ext.clusters.reader import DeviceError
from sgl_ext.engine.clusters.attended import Attended
from sgl_ext.engine.clusters.contexts import StoredContexts
from sgl_ext.engine.clusters.follower import Follower, end_request
from sgl_ext.engine.clusters.own import Own, OwnTokensError
from sgl_ext.engine.cpu.native_attention import NativeAttention
from sgl_ext.errors import ExtError

logger = logging.getLogger(__name__)


class _Key(NamedTuple):
    """Property of rows that are computed together."""

    name: str
    """Name of the context that they follow."""
    share: float
    """Share of its blocks that each query is given."""
    given_up: bool
    """True if an earlier layer or forward of their requests has failed."""


class _Part(NamedTuple):
    """Rows with the same key.

    ``queries`` are the places of their queries among those of all followers.
    """

    context: Attended
    followers: list[Follower]
    own: Own
    queries: slice


class StoredForward:
    """Rows of a forward, or of some of its layers, that follow contexts.

    The queries of all followers, ``[followed, heads, head_dim]``, are in the order of
    :attr:`followed` wherever they are an argument. The output of requests that were given up in
    earlier layers is 0, like that of rows that fail.

    Args:
        stored: registry of the contexts.
        followers: follower of each row; None for a row that follows no context.
        lengths: number of new tokens of each row.
        own: function that returns the own tokens of some rows.
    """

    def __init__(
        self,
        stored: StoredContexts,
        followers: Sequence[Follower | None],
        lengths: Sequence[int],
        own: Callable[[Sequence[int]], Own],
    ) -> None:
        self._stored = stored
        followed: dict[_Key, list[int]] = {}
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
                gone = follower.req.rid in stored.given_up
                followed.setdefault(_Key(follower.name, follower.share, gone), []).append(row)
        self.plain_tokens = torch.cat(plain) if plain else torch.empty(0, dtype=torch.int64)
        """Indices of the queries of :attr:`plain` rows in the forward, int64 ``[tokens]``."""
        self.rows = [row for some in followed.values() for row in some]
        """Rows that follow contexts, in the order of :attr:`followed`."""
        self.followed = torch.cat([tokens[row] for row in self.rows])
        """Indices of the queries of :attr:`rows` in the forward, int64 ``[followed]``."""
        self._parts: dict[_Key, _Part] = {}
        start = 0
        for key, some in followed.items():
            mine = [one for row in some if (one := followers[row]) is not None]
            queries = slice(start, start := start + sum(lengths[row] for row in some))
            self._parts[key] = _Part(stored.context(mine[0]), mine, own(some), queries)
        self._failed = {key for key in followed if key.given_up}

    def prefetch(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        times: float,
        beside: NDArray[np.float32] | None = None,
    ) -> None:
        """Starts to read the blocks that a layer will probably need.

        Args:
            query: predicted queries of all followers.
            keys: see :meth:`attend`.
            times: see :meth:`Attended.prefetch`.
            beside: see :meth:`attend`; of the tokens before the forward.
        """
        for key, part, own in self._running(beside):
            try:
                part.context.prefetch(layer, query[part.queries], keys, own, key.share, times)
            except Exception as error:
                self._fail(key, part, error)

    def attend(
        self,
        native: NativeAttention,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        beside: NDArray[np.float32] | None = None,
        sums: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the attention of followers, shaped as ``query``.

        See :meth:`Attended.attend` for the other arguments. The output of failed rows is 0,
        and their sum minus infinity.

        Args:
            query: queries of all followers.
            beside: log-sum-exp of the logits of own tokens that are not in host memory, float32
                ``[followed, heads]``; None if there are none.
            sums: tensor for those that the output is computed from, of the same shape, or None.
        """
        out = torch.zeros_like(query)
        if sums is not None:
            sums.fill_(-torch.inf)
        for key, part, own in self._running(beside):
            at = part.queries
            try:
                out[at] = part.context.attend(
                    native, layer, query[at], keys, values, own, key.share,
                    None if sums is None else sums[at],
                )  # fmt: skip
            except Exception as error:
                self._fail(key, part, error)
                if sums is not None:
                    sums[at] = -torch.inf
        return out

    def fail(self, error: Exception) -> None:
        """Ends the requests of all followers with an error, which is not one of their contexts."""
        for key, part, _ in self._running(None):
            self._end(key, part, f"the attention to context {key.name} has failed: {error}", error)

    def _running(self, beside: NDArray[np.float32] | None) -> Iterator[tuple[_Key, _Part, Own]]:
        """Yields the parts that have not failed, with their own tokens."""
        for key, part in self._parts.items():
            if key not in self._failed:
                sums = None if beside is None else beside[part.queries]
                yield key, part, part.own._replace(sums=sums)

    def _fail(self, key: _Key, part: _Part, error: Exception) -> None:
        """Ends the requests of a part with an error, and disables the context if it is at fault."""
        message = str(error)
        if not isinstance(error, DeviceError | OwnTokensError):
            # The memory of the context may be inconsistent.
            message = (
                part.context.failed or f"context {key.name} is disabled after an error: {error}"
            )
            part.context.failed = message
        self._end(key, part, message, error)

    def _end(self, key: _Key, part: _Part, message: str, error: Exception) -> None:
        """Ends the requests of a part. Other requests of the batch continue.

        The requests end when SGLang processes the output of the forward, which is not kept.
        """
        logger.error("%s", message, exc_info=not isinstance(error, ExtError))
        self._failed.add(key)
        for follower in part.followers:
            self._stored.given_up.add(follower.req.rid)
            end_request(follower.req, message)
