"""What a request says of a stored context, in the ``custom_params`` that schedulers are handed."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from sgl_ext.engine.core.sglang_types import Req

STORED, RECORDED = "ext_stored", "ext_recorded"
"""Keys: the context that the prompt follows; the context that it is, which is being stored."""

Name = Annotated[str, msgspec.Meta(pattern=r"^stx-[A-Za-z0-9_-]{1,64}\Z")]


class FollowsStored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The prompt follows a stored context, whose tokens it does not hold."""

    id: Name
    sparsity: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    """Share of the context's blocks that each query is given."""


class IsRecorded(msgspec.Struct, frozen=True):
    """The prompt begins with a context whose KV and queries are written down."""

    id: Name
    tokens: Annotated[int, msgspec.Meta(ge=1)]
    """Of the context: the prompt's first ones."""
    queries: Annotated[int, msgspec.Meta(ge=0)]
    """Last ones of the context that profile it; all that follow it do."""
    last: bool
    """Whether this is the last prompt, and all is to be written."""
    salt: str | None = None
    """``cache_salt`` of the tenant whose context it is."""


Said = TypeVar("Said", FollowsStored, IsRecorded)


def read_stored(req: Req) -> FollowsStored | IsRecorded | None:
    """What a request that arrives says, once.

    Raises:
        ValueError: it cannot be.
    """
    params = req.sampling_params.custom_params
    if not isinstance(params, dict):
        return None
    if (value := params.get(STORED)) is not None:
        return said(value, FollowsStored)
    if (value := params.get(RECORDED)) is not None:
        return said(value, IsRecorded)
    return None


def said(value: Any, kind: type[Said]) -> Said:
    """Parses a value under one of the keys.

    Raises:
        ValueError: it cannot be.
    """
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ValueError(f"what is said of a stored context: {error}") from None
