"""The ``tiers`` section: KV beyond the device."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import ByteSize, Field, field_validator, model_validator

from sgl_ext.config.values import Bytes, Directories, EmulatedDevice, Seconds, Section


class HostTier(Section):
    """Tier in host memory, below the device pool."""

    capacity: Bytes
    emulate: EmulatedDevice | None = None
    """Speed that loads from host memory are slowed down to; None if they are not."""
    link: EmulatedDevice | None = None
    """Speed that copies between host memory and the device are slowed down to, both ways; None if
    they are not."""


KeepAfter = Literal["auto"] | Annotated[int, Field(ge=1, le=1000, strict=True)]
"""Uses of a page after which it is given to the tier; ``auto``: as many as the cost model decides.
"""


class SsdTier(Section):
    """Tier on SSDs, striped over one directory per device."""

    directories: Directories
    capacity: Bytes
    """Bytes in each directory, for each tensor-parallel rank."""
    keep_after: KeepAfter = "auto"
    fsync: bool = False
    """True if a page counts as stored only when the device reports that it would survive a power
    failure. Otherwise a page survives the end of this process, and a page that a power failure has
    torn is detected and recomputed."""
    emulate: EmulatedDevice | None = None
    """Speed that each directory is slowed down to; None if it is not."""


class RemoteTier(Section):
    """Tier in a Mooncake store."""

    master: Annotated[str, Field(pattern=r"^\S+:\d{1,5}$")]
    """``host:port`` of the store's master."""
    segment: Bytes = ByteSize(1 << 30)
    """Bytes of this machine's memory that the store may use, taken as it fills."""
    host: str | None = None
    """Address at which other machines reach this one; None for the address of the route to the
    master."""
    keep_after: KeepAfter = 1


class Tiers(Section):
    """KV beyond the device (exact)."""

    host: HostTier | None = None
    ssd: SsdTier | None = None
    remote: RemoteTier | None = None
    layout: Literal["token_major", "layer_major"] = "token_major"
    """Order within a page beyond the device. With ``layer_major``, layers of a page can be loaded
    from SSD separately, which speeds up ``restore`` for short prefixes but makes copies smaller and
    more numerous."""
    staging: Bytes = ByteSize(256 << 20)
    """Bytes of host memory for pages in transit, if there is no host tier."""
    wait: Seconds = 10.0
    """Longest time that admission of a request is deferred for pages from lower tiers, in seconds;
    then the missing pages are computed."""

    @field_validator("host", "ssd", "remote", mode="before")
    @classmethod
    def _not_empty(cls, tier: object) -> object:
        if tier is None:  # a key without a value in YAML
            raise ValueError("the tier has no values; write its keys below it, or remove it")
        return tier

    @model_validator(mode="after")
    def _not_none(self) -> Self:
        if not (self.host or self.ssd or self.remote):
            raise ValueError("no tier is given; add host, ssd or remote")
        return self
