"""Copies of KV that rotate the keys."""

class Rotation:
    """Rotating copy for one layout of KV.

    The KV of a token is contiguous: for each layer its keys, then its values.
    """

    def __init__(
        self,
        dtype: str,
        layers: int,
        heads: int,
        head_dim: int,
        rotary_dim: int,
        interleaved: bool = False,
    ) -> None:
        """Sets the layout of a token's KV.

        Args:
            dtype: ``bfloat16`` or ``float32``.
            heads: number of KV heads.
            rotary_dim: number of leading elements of each key that are rotated, even.
            interleaved: whether the elements of a pair are adjacent instead of ``rotary_dim / 2``
                apart.

        Raises:
            ValueError: an argument is invalid.
        """

    def __call__(self, table: int, count: int, cosines: int, sines: int, threads: int) -> None:
        """Copies runs of tokens and rotates their keys; runs without the GIL.

        Args:
            table: address of int64 ``[count, 5]``, one row per run: source address, destination
                address, number of tokens, source pitch, destination pitch. A pitch is the number
                of bytes from one token to the next.
            cosines: address of float32 ``[rotary_dim / 2]``: cosines of the angles by which the
                pairs are rotated.
            sines: address of float32 ``[rotary_dim / 2]``: sines of these angles.

        Raises:
            ValueError: a run has a negative number of tokens, or has several tokens and a pitch
                smaller than a token; nothing was copied.
        """

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's KV in all layers."""
