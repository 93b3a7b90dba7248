"""The ``peer`` section: KV memory that engines lend each other."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from sgl_ext.config.values import Bytes, Directory, EmulatedDevice, Seconds, Section


class Peer(Section):
    """KV memory that engines of one host lend each other (exact; SwiftCache)."""

    role: Literal["master", "worker"]
    """Role of this engine: a master borrows, a worker lends. Their models may differ."""
    directory: Directory
    """Socket directory, private to the user. Engines that name the same directory find each other.
    It has one master."""
    capacity: Bytes | None = None
    """Most bytes that a master borrows from all workers together (required), or that a worker
    lends (None: all but a few blocks and ``keep``)."""
    granularity: Literal["auto", "unit", "block"] = "auto"
    """Unit in which a worker lends. ``unit``: whole blocks of both models (the minimum elastic
    unit); ``block``: any number of memory pages; ``auto``: whichever suits the sizes."""
    keep: Annotated[int, Field(ge=0, le=1 << 40, strict=True)] = 0
    """Tokens that a worker never lends."""
    window: Seconds = 60.0
    """Sliding window in seconds: the worker keeps the peak total KV need of its requests within
    it."""
    deadline: Seconds = 10.0
    """Time in which a master must return memory that a worker reclaims, in seconds. After it, the
    worker puts other memory in its place."""
    lease: Annotated[Seconds, Field(ge=1.0)] = 10.0
    """Silence after which a peer counts as lost, in seconds; 1 at least, because peers send a
    message every 0.25 s."""

    stream: Literal["direct", "layer", "layers"] = "direct"
    """Way in which a master's attention reads borrowed memory. ``direct``: in place; ``layer``,
    ``layers``: through buffers for one or two layers (SwiftCache's layer stream cache), which are a
    part of the engine's own KV memory: ``capacity`` divided by the number of layers, for each."""
    busy_rate: Bytes | None = None
    """Maximum bytes per second between buffers and workers' memory while a worker whose memory is
    used has requests of its own; None for no limit."""
    emulate: EmulatedDevice | None = None
    """Speed that copies between buffers and workers' memory are slowed down to; None if they are
    not."""

    @model_validator(mode="after")
    def _of_the_role(self) -> Self:
        if self.role == "master" and self.capacity is None:
            raise ValueError(
                "role master requires capacity; give the maximum number of bytes that it borrows"
            )
        if self.role == "worker" and (self.stream != "direct" or self.emulate or self.busy_rate):
            raise ValueError("stream, busy_rate and emulate require role master; remove them")
        lends = self.keep != 0 or self.window != 60.0 or self.granularity != "auto"
        if self.role == "master" and lends:
            raise ValueError("keep, window and granularity require role worker; remove them")
        if (self.emulate or self.busy_rate) and self.stream == "direct":
            raise ValueError(
                "busy_rate and emulate limit copies through layer buffers only; set stream to "
                "layer or layers"
            )
        return self
