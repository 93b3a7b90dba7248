"""The ``clusters`` section: decoding over stored contexts on SSDs."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import ByteSize, Field, model_validator

from sgl_ext.clusters.files import MOST_COPIES
from sgl_ext.config.values import Bytes, Directories, EmulatedDevice, Seconds, Section, Share


class Clusters(Section):
    """Decoding over stored contexts on SSDs by co-activation (approximate; Swarm)."""

    directories: Directories
    """Directories of the contexts, one for each device. Contexts are found again only under the
    same directories in the same order."""
    copies: Annotated[int, Field(ge=1, le=MOST_COPIES, strict=True)] = 1
    """Copies of each block of new contexts, on different devices; with two, answers go on if one
    device is lost."""
    sparsity: Share = 0.1
    """Share of a context's blocks that each query reads, unless its request says otherwise."""
    largest: Share = 0.25
    """Largest share that a request may ask for; each open context has memory for it."""
    hot: Bytes = ByteSize(64 << 20)
    """Memory of an open context for its most wanted blocks, in bytes."""
    open: Annotated[int, Field(ge=1, le=10_000, strict=True)] = 4
    """Maximum number of contexts that are open at once; requests for others wait."""
    prefetch: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 0.0
    """Blocks that are read ahead for the next layer, relative to the blocks that a query reads."""
    deadline: Seconds = 10.0
    """Deadline for the devices to deliver the blocks of a layer, in seconds."""
    wait: Seconds = 60.0
    """Longest time that a request waits until its context is open, in seconds."""
    emulate: EmulatedDevice | None = None
    """Speed that each directory is slowed down to; None if it is not."""

    @model_validator(mode="after")
    def _within(self) -> Self:
        if self.copies > len(self.directories):
            count = len(self.directories)
            raise ValueError(
                f"copies is {self.copies}, but the number of directories is {count}; add "
                "directories, or lower copies"
            )
        if self.sparsity > self.largest:
            raise ValueError(
                f"sparsity {self.sparsity} exceeds largest {self.largest}; raise largest, or lower "
                "sparsity"
            )
        return self
