"""The ``chunks`` section: position-independent chunk caching."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from sgl_ext.chunks.methods import link_method
from sgl_ext.config.values import Section
from sgl_ext.errors import ExtError


class Chunks(Section):
    """Position-independent chunk caching (approximate; EPIC)."""

    method: str = "primed+offline-16"
    """How contexts are linked that do not say it themselves."""
    limit: Annotated[int, Field(ge=16, le=10_000_000, strict=True)] = 100_000
    """Contexts that are kept; the least recently used go first. The server's look at itself takes
    some."""
    largest_divergence: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.5
    """Nats: a server whose chunks are further off, on the probe that it starts with, ends."""
    automatic: bool = False
    """Whether a part of a prompt whose text is a context's is linked without naming it."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        try:
            link_method(self.method)
        except ExtError as error:
            raise ValueError(str(error)) from None
        return self
