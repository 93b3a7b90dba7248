"""The ``tiers`` section: KV beyond the device."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import ByteSize, Field, model_validator

from sgl_ext.config.values import Bytes, Directories, EmulatedDevice, Seconds, Section


class HostTier(Section):
    """Host memory below the device pool."""

    capacity: Bytes
    emulate: EmulatedDevice | None = None
    """Of loads from it."""
    link: EmulatedDevice | None = None
    """Between it and the device, both ways."""


KeepAfter = Annotated[int, Field(ge=1, le=1000, strict=True)]
"""A page is given to the tier when it was seen that often."""


class SsdTier(Section):
    """Striped SSDs: one directory per device."""

    directories: Directories
    capacity: Bytes
    """Of each directory, on disk."""
    keep_after: KeepAfter = 2
    fsync: bool = False
    """Whether a page counts as stored only when the device says that it will survive a power
    failure. Without it a page survives the end of this process, and one that a power failure has
    torn is found out and computed again."""
    emulate: EmulatedDevice | None = None
    """Of each directory."""


class RemoteTier(Section):
    """A Mooncake store."""

    master: Annotated[str, Field(pattern=r"^\S+:\d{1,5}$")]
    """``host:port`` of its master."""
    segment: Bytes = ByteSize(1 << 30)
    """Memory of this machine that the store may use, taken as it fills."""
    host: str | None = None
    """Address at which other machines reach this one; without it, the one that leads to the
    master."""
    keep_after: KeepAfter = 1


class Tiers(Section):
    """KV beyond the device (exact)."""

    host: HostTier | None = None
    ssd: SsdTier | None = None
    remote: RemoteTier | None = None
    staging: Bytes = ByteSize(256 << 20)
    """Host memory for pages on their way, where there is no host tier."""
    wait: Seconds = 10.0
    """How long a request is held back, at most, while its pages come from lower tiers; then what
    is missing is computed."""

    @model_validator(mode="after")
    def _not_none(self) -> Self:
        if not (self.host or self.ssd or self.remote):
            raise ValueError("no tier is given; name one of host, ssd, remote")
        return self
