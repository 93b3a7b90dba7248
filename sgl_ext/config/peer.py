"""The ``peer`` section: KV memory that engines lend each other."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from sgl_ext.config.values import Bytes, Directory, EmulatedDevice, Seconds, Section


class Peer(Section):
    """Engines of one host lend each other KV memory (exact; SwiftCache)."""

    role: Literal["master", "worker"]
    """A master borrows, its workers lend; their models may differ."""
    directory: Directory
    """Private to the user; engines that name the same one find each other. It has one master."""
    capacity: Bytes | None = None
    """Most that a master borrows of all, which it must say, or that a worker lends."""
    granularity: Literal["auto", "unit", "block"] = "auto"
    """What a worker lends at a time: whole blocks of both models (the minimum elastic unit), any
    number of its own, or what suits the sizes."""
    keep: Annotated[int, Field(ge=0, le=1 << 40, strict=True)] = 0
    """Tokens that a worker does not lend, whatever it needs."""
    window: Seconds = 60.0
    """What a worker's requests have needed together is not lent for so long."""
    deadline: Seconds = 10.0
    """In which a master leaves what a worker asks back; then other memory takes its place."""
    lease: Seconds = 10.0
    """Who is not heard of for so long is taken for lost."""

    stream: Literal["direct", "layer", "layers"] = "direct"
    """How a master's attention reads workers' memory: where it is, or through buffers for one
    layer, or for two (SwiftCache's layer stream cache)."""
    busy_rate: Bytes | None = None
    """Bytes per second, at most, between buffers and the memory of workers while these have
    requests of their own; as fast as it goes if not given."""
    emulate: EmulatedDevice | None = None
    """Of the way to workers' memory, through buffers."""

    @model_validator(mode="after")
    def _of_the_role(self) -> Self:
        if self.role == "master" and self.capacity is None:
            raise ValueError("a master says how much it borrows at most: give capacity")
        if self.role == "worker" and (self.stream != "direct" or self.emulate or self.busy_rate):
            raise ValueError("stream, busy_rate and emulate are a master's; leave them out")
        if (self.emulate or self.busy_rate) and self.stream == "direct":
            raise ValueError("only what goes through buffers can be slowed down: give stream")
        return self
