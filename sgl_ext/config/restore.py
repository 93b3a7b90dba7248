"""The ``restore`` section: computing and loading a prefix at once."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sgl_ext.config.values import Section

EXPERIMENT = "SGLEXT_RESTORE_EXPERIMENT"
"""Environment variable for measurements, which is not part of the configuration."""
IN_SEQUENCE = "in_sequence"
"""Value of :data:`EXPERIMENT` with which a pipeline stage begins to restore its layers only when
the stage before has computed the step."""


class Restore(Section):
    """Computing the front of a cached prefix while its back loads (exact; CacheFlow)."""

    policy: Literal["shortest", "longest", "cake"] = "shortest"
    """Order of the requests that are restored. ``shortest``: the least remaining time is computed
    and loaded first; ``longest``: the largest recomputation is loaded first (CacheFlow); ``cake``:
    first come, first served (Cake)."""
    chunk: Annotated[int, Field(ge=1, le=1 << 20, strict=True)] = 512
    """Maximum tokens that are computed at a time while others load."""
    ageing: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] = 0.5
    """Ageing rate: each second of waiting lowers a request's estimated remaining time by this many
    seconds (``shortest``)."""
    host: Literal["auto", "tokens", "layers", "never"] = "auto"
    """Part of a prefix in host memory that is computed while the rest loads. ``tokens``: the first
    tokens; ``layers``: the lower layers; ``never``: none; ``auto``: whichever is faster for the
    length of the prefix, or none."""
    ssd: Literal["auto", "tokens", "layers"] = "auto"
    """The same for a prefix in an SSD tier with ``tiers.layout`` ``layer_major``, if nothing else
    is being restored; otherwise the first tokens are computed."""
