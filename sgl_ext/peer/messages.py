"""What a worker and its master say to each other: one message each, with all that its sender knows.

So messages may be lost, doubled and overtake each other; each is sent when something changes, and
again and again, which also shows that its sender lives.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from sgl_ext.memory.lent import Extent
from sgl_ext.memory.mapping import PAGE

PROTOCOL = 1
"""Of these messages and of what they mean."""
_LONGEST_REASON = 1000
"""Characters of another side's refusal that are passed on."""

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Name = Annotated[bytes, msgspec.Meta(max_length=64)]
_Pid = Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]


class Lend(msgspec.Struct, frozen=True, tag="lend"):
    """From a worker: what its master may use, counted from the end of the worker's memory."""

    worker: _Name
    """Names the process; another one of the same name has never been."""
    session: _Count
    """Of this worker. A new one has nothing to do with those before, which are over."""
    master: _Name
    """Whom this session is with; empty before a master has answered."""
    number: _Count
    """Grants of a session are numbered from 1."""
    size: _Count
    """Bytes."""
    pid: _Pid
    memory: tuple[Extent, ...]
    """What may be lent at most, by address; a grant is the last bytes of it."""
    busy: bool = False
    """Whether the worker has requests of its own, whose traffic goes first."""
    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        for offset, size in ((extent.offset, extent.size) for extent in self.memory):
            if offset < 0 or size <= 0 or offset % PAGE or size % PAGE:
                raise ValueError(
                    f"a worker lends {size:,} B from {offset:,} on, not pages of {PAGE:,} B"
                )
        there = sum(extent.size for extent in self.memory)
        if self.size > there or self.size % PAGE:
            raise ValueError(
                f"a worker lends {self.size:,} B of {there:,} B, by pages of {PAGE:,} B"
            )


class Keep(msgspec.Struct, frozen=True, tag="keep"):
    """From a master: it uses no more than the grants from this number on allow."""

    worker: _Name
    session: _Count
    master: _Name
    number: _Count
    pid: _Pid
    block: Annotated[int, msgspec.Meta(gt=0, lt=1 << 62)]
    """Bytes of a block of the master."""
    most: _Count
    """Bytes that the master has addresses for, and can use."""
    used: _Count = 0
    """Bytes; to be shown."""
    refused: str = ""
    """Why it takes nothing from this worker."""
    protocol: int = PROTOCOL


class Refusal(msgspec.Struct, frozen=True, tag="refuse"):
    """From a master, to a worker that it does not understand."""

    reason: str
    protocol: int = PROTOCOL


class Stranger(msgspec.Struct, frozen=True):
    """Any message: what all protocols have in common."""

    protocol: int = 0
    reason: str = ""
    """Of a :class:`Refusal`."""


Message = Lend | Keep

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)
_stranger = msgspec.msgpack.Decoder(Stranger)


class MisunderstoodError(ValueError):
    """What came is no message of this protocol."""


class RefusedError(MisunderstoodError):
    """What came says that the other side does not understand this one."""


def encode(message: Message | Refusal) -> bytes:
    """The message on the wire."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """The message on the wire, understood.

    Raises:
        RefusedError: it is a refusal, of whatever protocol.
        MisunderstoodError: it is of another protocol, or none.
    """
    try:
        stranger = _stranger.decode(data)
        if stranger.reason:
            reason = stranger.reason[:_LONGEST_REASON]
            raise RefusedError(f"the other side does not understand this one: {reason}")
        if stranger.protocol != PROTOCOL:
            raise MisunderstoodError(
                f"a peer speaks protocol {stranger.protocol}, this is protocol {PROTOCOL}; "
                "run the same sgl_ext on both sides"
            )
        message: Message = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MisunderstoodError(f"a peer sent what is no message: {error}") from None
    return message
