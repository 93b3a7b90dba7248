"""Own tokens of requests that follow a context: those whose KV is in the pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgl_ext.errors import ExtError


class OwnTokensError(ExtError):
    """Error raised when a row's own tokens have numbers or attention that are not finite.

    The context is not at fault.
    """


class Own(NamedTuple):
    """Requests' own tokens, which follow the context and whose KV is in the pool.

    A row's tokens are given by their slots in a pool in host memory, or by ``sums``.

    Attributes:
        slots: slots of the tokens of all requests, int64 ``[tokens]``; rows of a request share
            them.
        starts: index in ``slots`` of the first token of each row's request, int64 ``[rows]``.
        lengths: number of tokens that each row sees, the last of which is the row's token, int64
            ``[rows]``.
        before: number of tokens before the forward of each row's request, int64 ``[rows]``.
        sums: log-sum-exp of the logits of further tokens that each row sees, float32
            ``[rows, heads]``; None if there are none.
    """

    slots: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    before: NDArray[np.int64]
    sums: NDArray[np.float32] | None = None

    @classmethod
    def of(cls, slots: Sequence[NDArray[np.int64]], new: Sequence[int]) -> Own:
        """Returns the own tokens that the rows of some requests see.

        Args:
            slots: slots of each request's own tokens.
            new: number of rows of each request; they are its last tokens.
        """
        ends = np.array([len(each) for each in slots], np.int64)
        rows = np.array(new, np.int64)
        before = np.repeat(ends - rows, rows)
        at = np.arange(len(before)) - np.repeat(np.cumsum(rows) - rows, rows)
        return cls(
            np.concatenate(slots), np.repeat(np.cumsum(ends) - ends, rows), before + at + 1, before
        )

    @classmethod
    def elsewhere(cls, rows: int) -> Own:
        """Returns the own tokens of rows that see none in host memory."""
        none = np.zeros(rows, np.int64)
        return cls(none[:0], none, none, none)

    def lines(self, before: Sequence[int] = ()) -> tuple[NDArray[np.int32], list[int], list[int]]:
        """Returns the slots that the last row of each request sees, and those of its other rows.

        Args:
            before: slots that all rows see before their own tokens.

        Returns:
            The slots, ``[requests, width]``; the number of them, and of rows, of each request.
        """
        # The rows of a request have the same first token.
        last = np.flatnonzero(np.diff(self.starts, append=-1))
        lengths, first = self.lengths[last], len(before)
        lines = np.zeros((len(last), first + int(lengths.max())), np.int32)
        lines[:, :first] = before
        for line, start, length in zip(lines, self.starts[last], lengths, strict=True):
            line[first : first + length] = self.slots[start : start + length]
        return lines, (first + lengths).tolist(), np.diff(last, prepend=-1).tolist()

    def only(self, some: slice) -> Own:
        """Returns the own tokens of some of the rows."""
        sums = None if self.sums is None else self.sums[some]
        return Own(self.slots, self.starts[some], self.lengths[some], self.before[some], sums)
