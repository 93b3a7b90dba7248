"""CPU attention in place over a KV pool.

Tensors come as addresses and strides (in elements): checking a tensor object on every call would
cost more than the rest of the call. Whoever calls has checked them and keeps them alive.
"""

def isas() -> list[str]:
    """Instruction sets that this machine runs, best first; ends with ``portable``."""

def openmp_library() -> str:
    """Path of the OpenMP runtime whose threads are used; empty where only the caller's is."""

class Batch:
    """The rows of one forward.

    Row ``i`` attends with its last ``queries[i]`` tokens over the KV slots
    ``table[requests[i], :contexts[i]]``. Rows may name the same request. The table must outlive
    the batch. Threads may share a batch.
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
        """Takes the address of an int32 table ``[height, width]``, ``pitch`` elements a row.

        Args:
            extents: queries of the whole that each row is a part of, which decide how its keys
                are divided; without them each row is a whole.
            ends: contexts of these wholes.

        Raises:
            ValueError: a row lies outside the table, has more queries than context, or has a
                negative slot; or it is no part of its whole.
        """

    @property
    def tokens(self) -> int:
        """Queries of all rows."""

    @property
    def last_slot(self) -> int:
        """Largest slot of all rows; -1 without any."""

class Attention:
    """Causal attention with grouped KV heads; K, V, queries and output have one dtype.

    Sums are in fp32. A row's result depends neither on the batch's other rows nor on the threads
    nor on strides, bit for bit.
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
        """Takes what layers have in common.

        Args:
            dtype: ``bfloat16`` or ``float32``.
            head_dim: of keys and values; a multiple of 16.
            scale: factor of the logits, above 0.
            window: keys further back than this are not seen; None sees all.
            isa: one of :func:`isas`; empty is the best.

        Raises:
            ValueError: for anything else.
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
    ) -> None:
        """Writes ``out [tokens, heads, head_dim]``, contiguous.

        ``query`` is ``[tokens, heads, head_dim]``, keys and values are
        ``[slots, kv_heads, head_dim]``; all are contiguous but for the stride of their first
        dimension. Keys and values of slots from ``far_slots`` on are at ``far_keys`` and
        ``far_values`` instead, ``far_stride`` apart, if these are given. Without the GIL.

        Raises:
            ValueError: the batch has more queries than ``tokens`` or a slot past ``slots``, or
                there is no slot ``far_slots``.
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

    What any attention over the batch must do at least. Strides are in bytes here; returns a
    checksum.
    """
