"""CPU attention that reads K and V in place from a KV pool.

Tensors are passed as addresses and strides (in elements): validating a tensor object on every call
would cost more than the rest of the call. The caller has validated the tensors and keeps them
alive.
"""

def isas() -> list[str]:
    """Returns the instruction sets that this machine supports, best first, ``portable`` last."""

def openmp_library() -> str:
    """Returns the path of the OpenMP runtime whose threads run the kernels.

    The path is empty if no such runtime is loaded; the calling thread then runs alone.
    """

class Batch:
    """Rows of one forward.

    The queries of row ``i`` are the last ``queries[i]`` tokens of its context, whose KV slots are
    ``table[requests[i], :contexts[i]]``. Several rows may reference the same request. The table
    must outlive the batch. Threads may share a batch.
    """

    def __init__(
        self,
        table: int,
        height: int,
        width: int,
        pitch: int,
        requests: list[int],
        contexts: list[int],
        queries: list[int],
        extents: list[int] = ...,
        ends: list[int] = ...,
    ) -> None:
        """Validates the rows of a batch against a table of slots.

        Args:
            table: address of the table, int32 ``[height, width]``.
            pitch: elements from one row of the table to the next.
            extents: number of queries of the whole sequence that each row is a part of. It
                determines how the keys are partitioned; without it, each row is a whole sequence.
            ends: contexts of the whole sequences.

        Raises:
            ValueError: the lists differ in length; or a row is outside the table, has more queries
                than context, has a negative slot, or is not a part of its whole sequence.
        """

    @property
    def tokens(self) -> int:
        """Number of queries of all rows."""

    @property
    def last_slot(self) -> int:
        """Largest slot of all rows; -1 if no row has a slot."""

class Attention:
    """Causal attention with grouped KV heads; K, V, queries and output have the same dtype.

    Sums are accumulated in fp32. The result of a row is bit for bit independent of the other rows
    of the batch, of the number of threads and of the strides.
    """

    def __init__(
        self,
        dtype: str,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        window: int | None = None,
        isa: str = "",
    ) -> None:
        """Creates the operator of all layers that have these parameters.

        Args:
            dtype: ``bfloat16`` or ``float32``.
            heads: number of query heads, a multiple of ``kv_heads``.
            head_dim: head dimension of keys and values, a multiple of 16 up to 1024.
            scale: factor of the logits, finite and above 0.
            window: number of keys before its own that a query attends to; None for all of them.
            isa: one of :func:`isas`; empty selects the best.

        Raises:
            ValueError: an argument is invalid.
        """

    def __call__(
        self,
        batch: Batch,
        query: int,
        query_stride: int,
        keys: int,
        key_stride: int,
        values: int,
        value_stride: int,
        slots: int,
        out: int,
        tokens: int,
        threads: int,
        far_slots: int = ...,
        far_keys: int = ...,
        far_values: int = ...,
        far_stride: int = ...,
        log_sums: int = ...,
    ) -> None:
        """Writes the attention of a batch to ``out``, contiguous ``[tokens, heads, head_dim]``.

        ``query`` is ``[tokens, heads, head_dim]``, keys and values are
        ``[slots, kv_heads, head_dim]``; all are contiguous except for the stride of their first
        dimension. If ``far_keys`` and ``far_values`` are given, they hold the keys and values of
        the slots from ``far_slots`` on, with a stride of ``far_stride``. If ``log_sums`` is given,
        the natural log-sum-exp of each query's scaled logits is written there, contiguous float32
        ``[tokens, heads]``. Runs without the GIL.

        Raises:
            ValueError: the batch has more queries than ``tokens`` or a slot that is not below
                ``slots``, or ``far_slots`` is not in the range 0 to ``slots``.
        """

    @property
    def isa(self) -> str:
        """Instruction set of the kernels."""

def read_for_benchmark(
    batch: Batch,
    keys: int,
    key_stride: int,
    values: int,
    value_stride: int,
    slots: int,
    row_bytes: int,
    threads: int,
) -> int:
    """Reads ``row_bytes`` of K and of V of each slot of the batch's contexts, once, in order.

    This is the least that any attention over the batch must read. The strides are in bytes here.
    Runs without the GIL.

    Returns:
        A checksum of the bytes.

    Raises:
        ValueError: the batch has a slot that is not below ``slots``.
    """
