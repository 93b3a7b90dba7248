"""The ``clusters`` section: decoding over contexts on SSDs."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import ByteSize, Field, model_validator

from sgl_ext.config.values import Bytes, Directories, EmulatedDevice, Seconds, Section, Share


class Clusters(Section):
    """Decode over contexts on SSDs by co-activation (approximate; Swarm)."""

    directories: Directories
    """One for each device. Contexts are found again under the same ones in the same order."""
    sparsity: Share = 0.1
    """Of a context's blocks, what each query is given, if its request does not say it."""
    largest: Share = 0.25
    """That a request may ask for; every open context has memory for so many blocks."""
    hot: Bytes = ByteSize(64 << 20)
    """Memory of an open context for the blocks that are wanted most often."""
    open: Annotated[int, Field(ge=1, le=10_000, strict=True)] = 4
    """Contexts that are open at once; requests for further ones wait."""
    prefetch: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] = 0.0
    """Of what a query is given, how much is read for the next layer while one computes."""
    deadline: Seconds = 10.0
    """In which a device has to give the blocks of a layer."""
    wait: Seconds = 60.0
    """How long a request waits, at most, until its context is open."""
    emulate: EmulatedDevice | None = None
    """Of each directory."""

    @model_validator(mode="after")
    def _within(self) -> Self:
        if self.sparsity > self.largest:
            raise ValueError("sparsity is larger than largest; raise largest")
        return self
