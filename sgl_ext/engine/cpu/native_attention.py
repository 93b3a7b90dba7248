"""Attention in place over the KV pool: the compiled kernels behind torch tensors.

The kernels serve bfloat16 and float32 with heads of a multiple of 16 dimensions. :mod:`.sdpa`
serves other tensors, with a gather of the context that the kernels avoid.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from sgl_ext.errors import ExtError

if TYPE_CHECKING:
    from sgl_ext._native import _attention

ATTENTION = "SGLEXT_ATTENTION"
"""Environment variable that selects the kernels.

The values are ``native`` (default), an instruction set of the native kernels, and ``torch``, which
gathers the context and calls torch's attention.
"""

logger = logging.getLogger(__name__)

_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
_HEAD_DIM_UNIT, _HEAD_DIM_LIMIT = 16, 1024


@functools.cache
def _imported() -> ModuleType | None:
    try:
        from sgl_ext._native import _attention
    except ImportError as error:
        logger.warning(
            "the compiled CPU attention cannot be imported (%s); torch's attention is used "
            "instead, which is several times slower at decode: reinstall sgl-ext to build it",
            error,
        )
        return None
    return _attention


def native_attention(kernels: str | None = None) -> NativeAttention | None:
    """Returns the compiled kernels; None if they are not selected or (with a warning) missing.

    Args:
        kernels: a value of :data:`ATTENTION`; None takes the environment's.

    Raises:
        ExtError: this machine has no such kernels.
    """
    kernels = kernels or os.environ.get(ATTENTION) or "native"
    if kernels == "torch" or (module := _imported()) is None:
        return None
    isas = module.isas()
    if kernels not in ("native", *isas):
        raise ExtError(
            f"{ATTENTION}={kernels} is not supported on this machine; set it to native, torch or "
            f"one of {', '.join(isas)}, or unset it"
        )
    return NativeAttention("" if kernels == "native" else kernels)


def batch_of(
    table: torch.Tensor,
    requests: Sequence[int],
    contexts: Sequence[int],
    queries: Sequence[int],
    wholes: Sequence[tuple[int, int]] = (),
) -> _attention.Batch:
    """Returns the batch of rows over ``table``, ``[requests, width]``.

    The table must not change while the batch is used.

    Args:
        wholes: queries and context of the request that each row is a part of. The parts give bit
            for bit the results of the whole.

    Raises:
        ValueError: the table is not one of int32 slots, or a row does not fit it.
    """
    from sgl_ext._native import _attention

    if table.dtype != torch.int32 or table.dim() != 2 or table.stride(1) != 1:
        raise ValueError(
            f"the slot table is {table.dtype} of shape {tuple(table.shape)} and strides "
            f"{table.stride()}; expected contiguous rows of int32"
        )
    height, width = table.shape
    return _attention.Batch(
        table.data_ptr(), height, width, table.stride(0),
        list(requests), list(contexts), list(queries),
        [queries for queries, _ in wholes], [context for _, context in wholes],
    )  # fmt: skip


def _far(elsewhere: torch.Tensor | None, slots: int) -> tuple[int, int, int, int]:
    """Returns the first slot that lies elsewhere, its K and V addresses, and the slot stride.

    The stride is in elements. All numbers are 0 if no slot lies elsewhere.
    """
    if elsewhere is None:
        return 0, 0, 0, 0
    keys, values = elsewhere[:, 0], elsewhere[:, 1]
    return slots - len(elsewhere), keys.data_ptr(), values.data_ptr(), elsewhere.stride(0)


class NativeAttention:
    """Compiled operators, one for each shape that a model's layers have.

    Args:
        isa: instruction set; empty selects the machine's best.
    """

    def __init__(self, isa: str = "") -> None:
        self._isa = isa
        self._operators: dict[tuple[object, ...], _attention.Attention] = {}

    @staticmethod
    def serves(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> bool:
        """Returns whether the kernels serve these tensors, shaped as in :meth:`attend`."""
        head_dim = query.shape[2]
        inner = (head_dim, 1)
        return (
            query.dtype in _DTYPES
            and query.dtype == keys.dtype == values.dtype
            and head_dim % _HEAD_DIM_UNIT == 0
            and head_dim <= _HEAD_DIM_LIMIT
            and keys.shape == values.shape
            and keys.stride()[1:] == inner
            and values.stride()[1:] == inner
            and scale > 0
        )

    def attend(
        self,
        batch: _attention.Batch,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        elsewhere: torch.Tensor | None = None,
        beyond: bool = False,
        sums: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the attention of a batch's rows, whose K and V are in the pool.

        Args:
            query: queries of the rows one after the other, ``[tokens, heads, head_dim]``.
            keys: pool of one layer, ``[slots, kv_heads, head_dim]``, with any slot stride.
            values: like ``keys``.
            window: number of preceding tokens whose keys are not masked; None masks no preceding
                key.
            elsewhere: K and V of the pool's last slots if they are not in the pool,
                ``[slots, 2, kv_heads, head_dim]``.
            beyond: whether these slots come behind the pool's last slot instead.
            sums: tensor for the natural log-sum-exp of each query's logits, contiguous float32
                ``[tokens, heads]``; None if it is not wanted.

        Returns:
            ``[tokens, heads, head_dim]``; tokens behind the last row's are uninitialised.

        Raises:
            ValueError: the batch has more queries than ``tokens``, or a slot past the pool.
        """
        tokens, heads, head_dim = query.shape
        key_stride, value_stride = keys.stride(0), values.stride(0)
        if query.stride()[1:] != (head_dim, 1):
            query = query.contiguous()
        slots, kv_heads, _ = keys.shape
        if beyond and elsewhere is not None:
            slots += len(elsewhere)
        shape = (query.dtype, heads, kv_heads, head_dim, scale, window)
        operator = self._operators.get(shape)
        if operator is None:
            operator = self._operators[shape] = self._operator(*shape)
        out = torch.empty(tokens, heads, head_dim, dtype=query.dtype)
        operator(
            batch, query.data_ptr(), query.stride(0), keys.data_ptr(), key_stride,
            values.data_ptr(), value_stride, slots, out.data_ptr(), tokens,
            torch.get_num_threads(), *_far(elsewhere, slots),
            0 if sums is None else sums.data_ptr(),
        )  # fmt: skip
        return out

    def _operator(
        self,
        dtype: torch.dtype,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None,
    ) -> _attention.Attention:
        from sgl_ext._native import _attention

        operator = _attention.Attention(
            _DTYPES[dtype], heads, kv_heads, head_dim, scale, window, self._isa
        )
        logger.info(
            "CPU attention: %d heads of %d over %d KV heads, %s, window %s: %s kernels on %s",
            heads, head_dim, kv_heads, _DTYPES[dtype], window, operator.isa,
            _attention.openmp_library() or "the calling thread only",
        )  # fmt: skip
        return operator
