"""Slabs in the memory of a CUDA device.

Their addresses never change, so CUDA graphs that were captured over a slab stay valid, also when a
piece at its end is replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sgl_ext.memory.cuda_mapping import CudaMapping, CudaMemory, CudaMemoryError
from sgl_ext.memory.gpus import uuid_of
from sgl_ext.memory.slab import Layout, Slab, SlabError, check

if TYPE_CHECKING:
    import torch

DRIVER = "libcuda.so.1"
PIECE = 32 << 20
"""Bytes of a piece of a slab that is lent, or that borrows. CUDA maps pieces only as a whole: large
ones need few descriptors and messages, small ones waste little where lent memory ends. A multiple
of the granularity of devices, which is 2 MiB."""


class DeviceSlab(Slab):
    """Slab in device memory."""

    @property
    def gpu(self) -> str:
        return "" if self.device is None else uuid_of(self.device)

    def zero(self, offset: int, size: int) -> None:
        """Fills ``size`` bytes with zeros, on the current stream."""
        self._bytes()[offset : offset + size].zero_()


@dataclass(frozen=True)
class OwnDeviceSlab(DeviceSlab):
    """Slab of torch's allocator, which only this process uses."""

    memory: torch.Tensor
    """The own blocks, uint8 ``[bytes]``"""

    @classmethod
    def create(cls, layout: Layout, own: int, device: int) -> OwnDeviceSlab:
        """Allocates a zeroed slab.

        Args:
            own: number of blocks to allocate.
            device: number of the CUDA device.

        Raises:
            SlabError: a dimension or the fingerprint is invalid, the dtype is unknown, or the
                device has too little memory.
        """
        import torch

        check(layout, own, 0)
        try:
            size = own * layout.block_bytes
            memory = torch.zeros(size, dtype=torch.uint8, device=torch.device("cuda", device))
        except torch.OutOfMemoryError as error:
            raise _too_large(layout, own, device, error) from None
        return cls(layout, own, own, device, memory)

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    def _bytes(self) -> torch.Tensor:
        return self.memory


@dataclass(frozen=True)
class SharedDeviceSlab(DeviceSlab):
    """Slab of pieces that other processes can map, or behind which theirs are mapped (SwiftCache
    §3.4)."""

    mapping: CudaMapping
    """Addresses of all blocks, and the memory of the own ones"""
    piece: int
    """Bytes of each piece of the own memory"""

    @classmethod
    def create(
        cls,
        layout: Layout,
        own: int,
        device: int,
        *,
        beyond: int = 0,
        piece_bytes: int = PIECE,
        library: str = DRIVER,
    ) -> SharedDeviceSlab:
        """Allocates a zeroed slab.

        Args:
            own: number of blocks to allocate, in whole pieces.
            device: number of the CUDA device.
            beyond: number of blocks after these that get addresses but no memory yet.
            piece_bytes: size of a piece, rounded up to the device's granularity.
            library: path of the CUDA driver.

        Raises:
            SlabError: a dimension or the fingerprint is invalid, the dtype is unknown, the device
                has too little memory, or its driver has no virtual memory management.
        """
        check(layout, own, beyond)
        size, reach = own * layout.block_bytes, (own + beyond) * layout.block_bytes
        try:
            # The last piece may end behind the own blocks, where other memory must fit, too.
            mapping = CudaMapping(device, reach + piece_bytes, library=library)
            at = 0
            while at < size:
                piece = CudaMemory.create(device, piece_bytes, library=library)
                mapping.put(at, piece)
                at += piece.size
        except CudaMemoryError as error:
            raise _too_large(layout, own, device, error) from None
        slab = cls(layout, own, own + beyond, device, mapping, piece.size)
        slab.zero(0, size)
        return slab

    @property
    def address(self) -> int:
        return self.mapping.address

    @property
    def memory_page(self) -> int:
        """Bytes of a unit of memory, which other processes can map only as a whole."""
        return self.piece

    def _bytes(self) -> torch.Tensor:
        import torch

        return torch.as_tensor(self.mapping, device=torch.device("cuda", self.mapping.device))


def _too_large(layout: Layout, own: int, device: int, error: Exception) -> SlabError:
    return SlabError(
        f"cannot allocate a slab of {own} blocks of {layout.block_bytes:,} B on CUDA device "
        f"{device}: {error}; lower --max-total-tokens or --mem-fraction-static"
    )
