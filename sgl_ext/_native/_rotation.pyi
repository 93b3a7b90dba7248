"""Copies of KV whose keys are rotated on the way."""

class Rotation:
    """One layout of a token's KV: for each layer its keys, then its values, contiguous."""

    def __init__(
        self,
        dtype: str,
        layers: int,
        heads: int,
        head_dim: int,
        rotary_dim: int,
        interleaved: bool = False,
    ) -> None:
        """Takes the layout of a token.

        Args:
            dtype: ``bfloat16`` or ``float32``.
            heads: KV heads.
            rotary_dim: leading elements of each key that are rotated; even.
            interleaved: the elements of a pair are neighbours, not ``rotary_dim / 2`` apart.

        Raises:
            ValueError: for anything else.
        """

    def __call__(self, table: int, count: int, cosines: int, sines: int, threads: int) -> None:
        """Copies runs of tokens; without the GIL.

        Args:
            table: address of int64 ``[count, 5]``: from, to, tokens, and the bytes from one token
                to the next on either side.
            cosines: address of float32 ``[rotary_dim / 2]``; as ``sines`` of the angles by which
                each pair is rotated.

        Raises:
            ValueError: a pitch is smaller than a token; nothing was copied.
        """

    @property
    def token_bytes(self) -> int:
        """Of all layers."""
