"""Handover of file descriptors of lent memory between processes of one user.

Device memory cannot be opened through ``/proc``: its descriptors are passed over a Unix socket
(``SCM_RIGHTS``). The socket is abstract, so that it ends with its process and leaves no file. Every
user can connect to it, or take its name first; both sides therefore check the user of the other.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, suppress
from typing import Annotated

import msgspec

from sgl_ext.errors import ExtError
from sgl_ext.memory.lent import Extent, LentMemoryError

DEADLINE_S = 1.0
"""Default deadline in seconds for a request, and for its answer"""
_BATCH = 64
"""Descriptors per message; a message has at most 253, and each is open until it is imported"""
_LARGEST = 1 << 16
"""Largest message, in bytes"""
_WAITING = 64
"""Connections that wait for the server"""
_RETRY_S = 0.1
_CREDENTIALS = struct.Struct("3i")


class _Reply(msgspec.Struct, frozen=True):
    """Answer to a request, which has one descriptor for each extent unless there is an error."""

    error: str = ""


_requests = msgspec.msgpack.Decoder(Annotated[tuple[Extent, ...], msgspec.Meta(max_length=_BATCH)])
_replies = msgspec.msgpack.Decoder(_Reply)
_encoder = msgspec.msgpack.Encoder()
_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class DescriptorServer:
    """Thread that hands over descriptors of this process's memory, to one client after another.

    Args:
        address: name of the abstract socket, which no other process has.
        descriptor: returns a new descriptor of an extent, which the server closes; raises ExtError
            if the extent is not lent. Called by the server's thread.
        deadline: seconds after which a connection without a request is closed.

    Raises:
        LentMemoryError: another socket has this address.
    """

    def __init__(
        self, address: str, descriptor: Callable[[Extent], int], *, deadline: float = DEADLINE_S
    ) -> None:
        self._descriptor, self._deadline = descriptor, deadline
        self._closed = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind("\0" + address)
            self._listener.listen(_WAITING)
        except OSError as error:
            self._listener.close()
            raise LentMemoryError(
                f"device memory cannot be lent at the socket {address!r}: {error.strerror or error}"
            ) from None
        self._thread = threading.Thread(target=self._run, name="sgl_ext-descriptors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, after the request that it serves."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed, or no descriptor is left
                self._closed.wait(_RETRY_S)
                continue
            with client, suppress(OSError, *_UNDECODABLE):
                if _user_of(client) == os.getuid():
                    self._serve(client)

    def _serve(self, client: socket.socket) -> None:
        """Answers the requests of a client until it closes the connection."""
        client.settimeout(self._deadline)
        while not self._closed.is_set() and (request := client.recv(_LARGEST)):
            with ExitStack() as opened:
                descriptors: list[int] = []
                reply = _Reply()
                try:
                    for extent in _requests.decode(request):
                        descriptors.append(self._descriptor(extent))
                        opened.callback(os.close, descriptors[-1])
                except ExtError as error:
                    reply = _Reply(str(error))
                socket.send_fds(client, [_encoder.encode(reply)], descriptors)


def received(
    address: str, extents: Sequence[Extent], *, deadline: float = DEADLINE_S
) -> Generator[tuple[Extent, int], None, None]:
    """Yields each extent and its descriptor, which is closed when the generator goes on.

    Args:
        address: name of the owner's socket; see :class:`DescriptorServer`.
        deadline: seconds for each wait for the owner.

    Raises:
        LentMemoryError: the owner does not answer in time, does not lend an extent, or is not a
            process of this user.
    """
    asked = f"asked the socket {address!r} for {len(extents)} pieces of device memory"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        channel.settimeout(deadline)
        try:
            channel.connect("\0" + address)
            if (user := _user_of(channel)) != os.getuid():
                raise LentMemoryError(
                    f"{asked}: it belongs to user {user}, not to user {os.getuid()}; run both "
                    "engines as the same user"
                )
            for first in range(0, len(extents), _BATCH):
                batch = extents[first : first + _BATCH]
                with ExitStack() as opened:
                    yield from zip(batch, _ask(channel, batch, opened), strict=True)
        except TimeoutError:
            raise LentMemoryError(
                f"{asked}: no answer within {deadline:g} s; check whether its process is stopped"
            ) from None
        except OSError as error:
            raise LentMemoryError(
                f"{asked}: {error.strerror or error}; check whether its process has ended"
            ) from None
        except _Refused as refused:
            raise LentMemoryError(f"{asked}: {refused}") from None


class _Refused(Exception):  # noqa: N818
    """Raised for an answer without the descriptors that were asked for."""


def _ask(channel: socket.socket, batch: Sequence[Extent], opened: ExitStack) -> list[int]:
    """Returns a descriptor of each extent; ``opened`` closes them."""
    channel.send(_encoder.encode(batch))
    data, descriptors, *_ = socket.recv_fds(channel, _LARGEST, _BATCH, socket.MSG_CMSG_CLOEXEC)
    for descriptor in descriptors:
        opened.callback(os.close, descriptor)
    if not data:
        raise _Refused("the owner closed the connection; check whether its process has ended")
    try:
        reply = _replies.decode(data)
    except _UNDECODABLE as error:
        raise _Refused(
            f"the owner sent an invalid answer ({error}); run the same version of sgl_ext on both "
            "sides"
        ) from None
    if reply.error:
        raise _Refused(reply.error)
    if len(descriptors) != len(batch):
        raise _Refused(
            f"found {len(descriptors)} descriptors, expected {len(batch)}; check the limit of open "
            "files (ulimit -n)"
        )
    return descriptors


def _user_of(channel: socket.socket) -> int:
    """Returns the number of the user of the process at the other end."""
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(credentials)[1]
    return user
