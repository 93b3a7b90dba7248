"""Slab in the memory of a CUDA device, in pieces that other processes can map (SwiftCache §3.4).

The addresses never change, so CUDA graphs that were captured over the slab stay valid when a piece
at its end is replaced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sgl_ext.memory.cuda_mapping import CudaMapping, CudaMemory, CudaMemoryError
from sgl_ext.memory.slab import Layout, Slab, SlabError, check

if TYPE_CHECKING:
    import torch

DRIVER = "libcuda.so.1"
PIECE = 32 << 20
"""Bytes of a piece of a slab that is lent, or that borrows. CUDA maps pieces only as a whole: large
ones need few descriptors and messages, small ones waste little where lent memory ends. A multiple
of the granularity of devices, which is 2 MiB."""


@dataclass(frozen=True)
class DeviceSlab(Slab):
    """A slab in device memory."""

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
        piece_bytes: int | None = None,
        library: str = DRIVER,
    ) -> DeviceSlab:
        """Allocates a zeroed slab.

        Args:
            own: number of blocks to allocate.
            device: number of the CUDA device.
            beyond: number of blocks after these that get addresses but no memory yet.
            piece_bytes: size of a piece that can be lent, rounded up to the device's granularity;
                the own blocks are in whole pieces then. None if nothing is lent.
            library: path of the CUDA driver.

        Raises:
            SlabError: a dimension or the fingerprint is invalid, the dtype is unknown, the device
                has too little memory, or its driver has no virtual memory management.
        """
        check(layout, own, beyond)
        size, reach = own * layout.block_bytes, (own + beyond) * layout.block_bytes
        step = piece_bytes or size
        try:
            # The last piece may end behind the own blocks, where other memory must fit, too.
            mapping = CudaMapping(device, reach + step, library=library)
            at = 0
            while at < size:
                piece = CudaMemory.create(device, step, library=library)
                mapping.put(at, piece)
                at += piece.size
        except CudaMemoryError as error:
            raise SlabError(
                f"cannot allocate a slab of {own} blocks of {layout.block_bytes:,} B on CUDA "
                f"device {device}: {error}; lower --max-total-tokens or --mem-fraction-static"
            ) from None
        slab = cls(layout, own, own + beyond, device, mapping, piece.size)
        slab.zero(0, size)
        return slab

    @property
    def address(self) -> int:
        """Address of block 0, which is the same for all kernels of this process."""
        return self.mapping.address

    @property
    def memory_page(self) -> int:
        return self.piece

    @property
    def gpu(self) -> str:
        import torch

        return str(torch.cuda.get_device_properties(self.device).uuid)

    def zero(self, offset: int, size: int) -> None:
        """Fills ``size`` bytes with zeros, on the current stream."""
        self._bytes()[offset : offset + size].zero_()

    def _bytes(self) -> torch.Tensor:
        import torch

        return torch.as_tensor(self.mapping, device=torch.device("cuda", self.mapping.device))
