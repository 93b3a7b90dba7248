"""Device memory that one process lends to another: the last pieces of a slab.

This is the counterpart of :mod:`.lent` for a :class:`~.device_slab.SharedDeviceSlab`. An extent
is a whole piece, because CUDA maps pieces only as a whole. A borrower receives the descriptors of
pieces from a :class:`~.descriptors.DescriptorServer` of the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from itertools import count

from sgl_ext.memory.cuda_mapping import CudaMapping, CudaMemory, CudaMemoryError
from sgl_ext.memory.descriptors import DEADLINE_S, received
from sgl_ext.memory.lent import Extent, LentMemoryError, unique_name
from sgl_ext.memory.streams import Streams


class DeviceLendable:
    """The last pieces of a process's own device memory, which other processes can map.

    The interface is that of :class:`~.lent.Lendable`. The name of an extent is unique, its ``fd``
    is the number of the piece.

    Args:
        mapping: mapping of the memory, in which all pieces that may be lent have the same size.
        start: bytes at the start of the memory that are never lent.
        end: end of the own memory in the mapping, in bytes; a piece that begins before it is lent
            as a whole.
        streams: streams whose work may use the memory.
        zero: fills ``size`` bytes at an offset of the mapping with zeros, on the current stream.
    """

    def __init__(
        self,
        mapping: CudaMapping,
        start: int,
        end: int,
        streams: Streams,
        zero: Callable[[int, int], None],
    ) -> None:
        self._mapping, self._streams, self._zero = mapping, streams, zero
        self._name, self._numbers = unique_name("sgl_ext-kv"), count()
        pieces = {at: piece for at, piece in mapping.pieces.items() if start <= at < end}
        if len(sizes := {piece.size for piece in pieces.values()}) > 1:
            raise ValueError(f"pieces that can be lent have one size, found {sorted(sizes)}")
        self._piece = max(sizes, default=0)
        self._end = max(pieces, default=end) + self._piece
        # Replaced at once, because the thread of a server reads it.
        self._pieces = self._numbered([pieces[at] for at in sorted(pieces)])
        self._retired: list[CudaMemory] = []

    def _numbered(self, pieces: Sequence[CudaMemory]) -> dict[Extent, CudaMemory]:
        return {
            Extent(f"{self._name}-{number}", number, 0, piece.size): piece
            for piece, number in zip(pieces, self._numbers, strict=False)
        }

    @property
    def extents(self) -> tuple[Extent, ...]:
        """The pieces that can be lent, ordered by address."""
        return tuple(self._pieces)

    @property
    def size(self) -> int:
        """Size of the memory that can be lent, in bytes."""
        return len(self._pieces) * self._piece

    @property
    def end(self) -> int:
        """End of the memory that can be lent, as an offset in the mapping in bytes."""
        return self._end

    def descriptor(self, extent: Extent) -> int:
        """Returns a new file descriptor of a piece, which the caller closes.

        Any thread may call this.

        Raises:
            LentMemoryError: the piece is not or no longer lent.
            CudaMemoryError: the driver cannot export the piece.
        """
        if (piece := self._pieces.get(extent)) is None:
            raise LentMemoryError(
                f"{extent.size:,} B of {extent.name} are not or no longer lent; ask for what the "
                "latest message of the owner offers"
            )
        return piece.descriptor()

    def replace(self, size: int) -> None:
        """Maps new, zeroed memory in place of the last ``size`` bytes, rounded up to whole pieces.

        Waits for the device. The old memory is kept until :meth:`discard`.

        Raises:
            LentMemoryError: the device has too little memory, and nothing has changed; or the
                driver cannot map the new memory, and the old memory is mapped again.
        """
        size = min(-(-size // self._piece) * self._piece, self.size) if self._piece else 0
        if size == 0:
            return
        fewer = len(self._pieces) - size // self._piece
        kept, old = list(self._pieces.items())[:fewer], list(self._pieces.values())[fewer:]
        places = range(self._end - size, self._end, self._piece)
        device, library = self._mapping.device, self._mapping.library
        try:
            new = [CudaMemory.create(device, self._piece, library=library) for _ in old]
            self._streams.synchronize()
            self._put(places, new, old)
        except CudaMemoryError as error:
            raise LentMemoryError(f"lent memory cannot be replaced: {error}") from None
        self._zero(places.start, size)
        self._streams.synchronize()  # other streams may use the memory next
        self._retired += old
        self._pieces = dict(kept) | self._numbered(new)

    def _put(
        self, places: Sequence[int], new: Sequence[CudaMemory], old: Sequence[CudaMemory]
    ) -> None:
        try:
            for at, piece in zip(places, new, strict=True):
                self._mapping.put(at, piece)
        except CudaMemoryError:
            for at, piece in zip(places, old, strict=True):
                with suppress(CudaMemoryError):
                    self._mapping.put(at, piece)
            raise

    @property
    def retired(self) -> int:
        """Bytes of replaced memory, which only other processes may still have mapped."""
        return sum(piece.size for piece in self._retired)

    def discard(self) -> None:
        """Gives up the replaced memory; it is freed when no other process has it mapped."""
        self._retired.clear()


def map_device_memory(
    mapping: CudaMapping,
    offset: int,
    address: str,
    extents: Sequence[Extent],
    *,
    deadline: float = DEADLINE_S,
) -> None:
    """Maps pieces of another process of this user at ``offset``, one after the other.

    No memory may be mapped there.

    Args:
        address: address of the owner's :class:`~.descriptors.DescriptorServer`.
        deadline: seconds for each wait for the owner.

    Raises:
        LentMemoryError: the memory is not what ``extents`` describe, cannot be mapped, or is not
            received in time. Nothing is mapped then.
    """
    if any(extent.offset for extent in extents):
        raise LentMemoryError(
            f"asked for a part of a piece at the socket {address!r}, but device memory is mapped "
            "in whole pieces; use the same size of pieces on both sides"
        )
    at = offset
    try:
        with closing(received(address, extents, deadline=deadline)) as pieces:
            for extent, descriptor in pieces:
                piece = CudaMemory.of(
                    descriptor, mapping.device, extent.size, library=mapping.library
                )
                mapping.put(at, piece)
                at += extent.size
    except (LentMemoryError, CudaMemoryError, ValueError) as error:
        if at > offset:
            with suppress(CudaMemoryError):
                mapping.drop(offset, at - offset)
        raise LentMemoryError(f"lent device memory cannot be mapped: {error}") from None
