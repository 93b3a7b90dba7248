"""Parameters of a request about a stored context, in the ``custom_params`` that schedulers get."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from sgl_ext.engine.core.sglang_types import Req
from sgl_ext.engine.front.custom_params import STORED

RECORDED = "ext_recorded"
"""Key of :class:`IsRecorded`; :data:`STORED` is the key of :class:`FollowsStored`."""

MOST_JOINED = 16
"""Maximum number of contexts that one request uses."""

Name = Annotated[str, msgspec.Meta(pattern=r"^stx-[A-Za-z0-9_-]{1,64}\Z")]


class FollowsStored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameter of a prompt that follows a stored context and does not contain its tokens."""

    id: Name | Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=MOST_JOINED)]
    """Id of the context, or those of several that come one behind the other."""
    sparsity: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    """Share of the blocks of each context that each query is given; if None, the server's
    default."""

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the contexts, in the order of their positions."""
        return (self.id,) if isinstance(self.id, str) else self.id


class IsRecorded(msgspec.Struct, frozen=True):
    """Parameter of a prompt that is recorded: tokens of a context, and tokens that follow it.

    The prompt does not contain the first tokens of the context if those are recorded or stored
    already.
    """

    id: Name
    part: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9-]{1,32}\Z")]
    """Name of the part of the record that the request writes."""
    start: Annotated[int, msgspec.Meta(ge=0)]
    """Number of the context's tokens before the prompt."""
    tokens: Annotated[int, msgspec.Meta(ge=1)]
    """Number of tokens of the context."""
    kv: bool
    """True to record the KV of the prompt."""
    queries: Annotated[int, msgspec.Meta(ge=0)]
    """Number of the context's last tokens whose queries are recorded if the prompt has them, as
    those of all tokens behind the context are."""
    keep: bool
    """True if the KV of the prompt is cached for the requests that come next."""
    salt: str | None = None
    """``cache_salt`` of the tenant that owns the context."""
    base: Name | None = None
    """Id of the stored context whose tokens come first; None if all tokens are recorded."""


Said = TypeVar("Said", FollowsStored, IsRecorded)


def read_stored(req: Req) -> FollowsStored | IsRecorded | None:
    """Returns the parameter of a request about a stored context; None if it has none.

    Raises:
        ValueError: the parameter is invalid.
    """
    params = req.sampling_params.custom_params
    if not isinstance(params, dict):
        return None
    if (value := params.get(STORED)) is not None:
        return said(value, FollowsStored)
    if (value := params.get(RECORDED)) is not None:
        return said(value, IsRecorded)
    return None


def said(value: object, kind: type[Said]) -> Said:
    """Parses the value of one of the keys.

    Raises:
        ValueError: the value is invalid.
    """
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ValueError(f"invalid parameter of a stored context: {error}") from None
