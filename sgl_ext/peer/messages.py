"""Messages between a worker and its master; each one carries the full state of its sender.

Messages may therefore be lost, duplicated or reordered. A message is sent when something changes
and again at every beat, which also shows that its sender is alive.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from sgl_ext.memory.lent import Extent
from sgl_ext.memory.mapping import PAGE

PROTOCOL = 2
"""Version of these messages and of their meaning"""
_LONGEST_REASON = 1000
"""Number of characters of the other side's refusal that are reported"""

_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Name = Annotated[bytes, msgspec.Meta(max_length=64)]
_Gpu = Annotated[str, msgspec.Meta(max_length=64)]
_Pid = Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]


class Lend(msgspec.Struct, frozen=True, tag="lend"):
    """Message of a worker: the memory that its master may use, counted from the end."""

    worker: _Name
    """Unique name of the worker's process"""
    session: _Count
    """Number of the worker's session; a new session ends all earlier ones"""
    master: _Name
    """Name of the master of this session; empty before a master has answered"""
    number: _Count
    """Number of the latest grant; grants of a session are numbered from 1"""
    size: _Count
    """Size of the latest grant, in bytes"""
    pid: _Pid
    """Pid of the worker"""
    memory: tuple[Extent, ...]
    """All memory that may be lent, ordered by address; a grant is the last bytes of it"""
    busy: bool = False
    """True if the worker has requests of its own, whose traffic has priority"""
    gpu: _Gpu = ""
    """UUID of the GPU whose memory is lent; empty for host memory"""
    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        for offset, size in ((extent.offset, extent.size) for extent in self.memory):
            if offset < 0 or size <= 0 or offset % PAGE or size % PAGE:
                raise ValueError(
                    f"a worker lends {size:,} B from {offset:,} on; expected whole pages of "
                    f"{PAGE:,} B"
                )
        there = sum(extent.size for extent in self.memory)
        if self.size > there or self.size % PAGE:
            raise ValueError(
                f"a worker lends {self.size:,} B of {there:,} B; expected at most that, in whole "
                f"pages of {PAGE:,} B"
            )


class Keep(msgspec.Struct, frozen=True, tag="keep"):
    """Message of a master, which uses no more than the grants from ``number`` on allow."""

    worker: _Name
    """Name of the worker that the message is for"""
    session: _Count
    """Number of the worker's session"""
    master: _Name
    """Unique name of the master's process"""
    number: _Count
    """Number of the grant that the master keeps to; 0 before the first"""
    pid: _Pid
    """Pid of the master"""
    block: Annotated[int, msgspec.Meta(gt=0, lt=1 << 62)]
    """Bytes per block of the master"""
    most: _Count
    """Bytes that the master has addresses for and can use"""
    used: _Count = 0
    """Bytes that the master uses, for display only"""
    refused: str = ""
    """Reason why the master borrows nothing from this worker; empty if there is none"""
    protocol: int = PROTOCOL


class Refusal(msgspec.Struct, frozen=True, tag="refuse"):
    """Message of a master to a worker whose messages it cannot decode."""

    reason: str
    """Reason why the worker's message cannot be decoded"""
    protocol: int = PROTOCOL


class Envelope(msgspec.Struct, frozen=True):
    """Fields that the messages of all protocol versions share."""

    protocol: int = 0
    """Version of the protocol; 0 if the message has none"""
    reason: str = ""
    """Reason of a :class:`Refusal`; empty for other messages"""


Message = Lend | Keep

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)
_envelope = msgspec.msgpack.Decoder(Envelope)


class ProtocolError(ValueError):
    """Error raised when received data is no message of this protocol version."""


class RefusedError(ProtocolError):
    """Error raised when the other side reports that it cannot decode the messages of this one."""


def encode(message: Message | Refusal) -> bytes:
    """Returns the message in its wire format."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Returns the message that ``data`` holds in wire format.

    Raises:
        RefusedError: the data is a refusal, of any protocol version.
        ProtocolError: the data is a message of another protocol version, or no message.
    """
    try:
        envelope = _envelope.decode(data)
        if envelope.reason:
            reason = envelope.reason[:_LONGEST_REASON]
            raise RefusedError(
                f"the peer does not understand the messages of this engine: {reason}"
            )
        if envelope.protocol != PROTOCOL:
            raise ProtocolError(
                f"a peer uses protocol {envelope.protocol}, but this engine uses protocol "
                f"{PROTOCOL}; run the same version of sgl_ext on both sides"
            )
        message: Message = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a peer sent an invalid message: {error}") from None
    return message
