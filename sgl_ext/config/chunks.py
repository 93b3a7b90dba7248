"""The ``chunks`` section: position-independent chunk caching."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from sgl_ext.chunks.methods import link_method
from sgl_ext.config.values import Directory, Section
from sgl_ext.errors import ExtError


class Chunks(Section):
    """Position-independent chunk caching (approximate; EPIC)."""

    method: str = "primed+offline-16"
    """Link method of contexts that name none."""
    limit: Annotated[int, Field(ge=16, le=10_000_000, strict=True)] = 100_000
    """Maximum number of contexts; the least recently used are forgotten first. The probe at start
    creates some."""
    largest_divergence: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.5
    """Largest divergence of linked chunks on the probe at start, in nats; beyond it, the server
    ends."""
    link: Literal["auto", "always"] = "auto"
    """``auto`` computes chunks where the cost model expects that to take less time; with ``always``
    answers do not depend on measured times."""
    directory: Directory | None = None
    """Directory of a database that keeps contexts across restarts; None if they end with the
    server."""
    automatic: bool = False
    """True to link a text part of a prompt that equals a context's text without being named."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        try:
            link_method(self.method)
        except ExtError as error:
            raise ValueError(str(error)) from None
        return self
