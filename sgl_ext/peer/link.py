"""Background thread that carries messages between a master and its workers.

A message is sent at once and again at every beat, so no single message has to arrive. A received
message that was not fetched is replaced by a later one from the same side.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import zmq

from sgl_ext.errors import ExtError
from sgl_ext.peer.messages import (
    Keep,
    Lend,
    Message,
    ProtocolError,
    Refusal,
    RefusedError,
    decode,
    encode,
)

logger = logging.getLogger(__name__)

BEAT_S = 0.25
_LINGER_MS = 200
_FILE = "ipc://"
_NAME = b"w"  # prefix of identities: ZeroMQ reserves those that begin with a zero byte
_QUEUE = 16
"""Number of messages queued for a side that does not read; later messages are lost"""


_LARGEST = 1 << 20
"""Largest size of a received message, in bytes"""
_SIDES = 256
"""Number of sides whose messages are kept; beyond that, those with the latest messages are kept"""
_ERROR_S = 10.0
"""Seconds for which an error is reported that is not repeated; messages are, at every beat"""


class _Error(NamedTuple):
    """Received data that could not be decoded."""

    sender: list[bytes]
    """ZeroMQ identity of the sender; empty on a worker, which has one master"""
    text: str
    time: float
    """Time on the monotonic clock, in seconds"""


_NO_ERROR = _Error([], "", -math.inf)


class LinkError(ExtError):
    """Error raised when an address cannot be used."""


class Link:
    """One side of the connection between a master and its workers.

    Args:
        role: side of this process; a master listens, a worker connects.
        address: ZeroMQ address of the master.
        beat: interval after which the current messages are sent again, in seconds.

    Raises:
        LinkError: the address cannot be used.
    """

    def __init__(
        self, role: Literal["master", "worker"], address: str, *, beat: float = BEAT_S
    ) -> None:
        self._master = role == "master"
        self._beat = beat
        self._lock = threading.Lock()
        self._outgoing: dict[bytes, Message] = {}
        self._incoming: dict[bytes, Message] = {}
        self._closed = False
        self._error = _NO_ERROR
        self.refused = ""
        """Reason why the master cannot decode the messages of this worker; empty if it can"""
        self._latest: dict[bytes, Message] = {}
        self._repeated: dict[bytes, tuple[bytes, Message]] = {}
        """Latest data of each sender and its message, because most messages are repetitions."""
        self._address = address
        with ExitStack() as undo:
            try:
                self._open(undo)
            except (zmq.ZMQError, OSError) as error:
                raise LinkError(
                    f"cannot open the socket {address}: {zmq.strerror(error.errno or 0)}"
                ) from None
            undo.pop_all()
        self._thread = threading.Thread(target=self._carry, name="sgl_ext-peer", daemon=True)
        self._thread.start()

    def _open(self, undo: ExitStack) -> None:
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        undo.callback(os.close, self._wake)
        self.news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """File descriptor that is readable when a side has sent a new message"""
        undo.callback(os.close, self.news)
        self._context = zmq.Context()
        undo.callback(self._context.term)
        self._socket = self._context.socket(zmq.ROUTER if self._master else zmq.DEALER)
        undo.callback(self._socket.close)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.MAXMSGSIZE, _LARGEST)
        self._socket.set(zmq.SNDHWM, _QUEUE)
        self._socket.set(zmq.RCVHWM, _QUEUE)
        if self._master:
            self._socket.set(zmq.ROUTER_HANDOVER, 1)
            self._socket.bind(self._address)
        else:
            self._socket.set(zmq.RECONNECT_IVL, 100)
            self._socket.set(zmq.RECONNECT_IVL_MAX, 1000)

    @property
    def protocol_error(self) -> str:
        """Why messages of a peer cannot be decoded; empty if all peers send valid messages."""
        return self._error.text if time.monotonic() - self._error.time < _ERROR_S else ""

    def publish(self, messages: Iterable[Message]) -> None:
        """Sets the messages to send from now on, one per receiver. Returns at once."""
        outgoing = {message.worker: message for message in messages}
        with self._lock:
            if outgoing == self._outgoing or self._closed:
                return
            self._outgoing = outgoing
            os.eventfd_write(self._wake, 1)

    def received(self) -> list[Any]:
        """Returns the latest message of each side since the last call, without waiting.

        A master receives :class:`Lend` messages, a worker receives :class:`Keep` messages.
        """
        if not self._incoming or self._closed:
            return []
        with self._lock:
            received, self._incoming = self._incoming, {}
            with suppress(BlockingIOError):
                os.eventfd_read(self.news)
        return list(received.values())

    def close(self, timeout: float = 5.0) -> bool:
        """Sends the current messages once more and ends the thread.

        Returns:
            Whether the thread has ended within ``timeout`` seconds.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                os.eventfd_write(self._wake, 1)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _carry(self) -> None:
        try:
            self._run()
        except Exception:  # each side then treats the other as lost
            logger.exception("the connection to peers has failed: restart to lend memory again")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        calling = self._master
        beat = time.monotonic()
        while not self._closed:
            pause = max(beat - time.monotonic(), 0.0)
            events = dict(poller.poll(math.ceil(pause * 1000)))
            if self._socket in events:
                self._receive()
            changed = self._wake in events
            if changed:
                os.eventfd_read(self._wake)
            if not calling and self._outgoing:
                # The master tells workers apart by their ZeroMQ identity.
                self._socket.set(zmq.IDENTITY, _NAME + next(iter(self._outgoing)))
                self._socket.connect(self._address)
                calling = True
            if calling and (changed or time.monotonic() >= beat):
                self._send()
            if time.monotonic() >= beat:
                beat = time.monotonic() + self._beat
        if calling:
            self._send()
        self._socket.close(linger=_LINGER_MS)
        self._context.term()
        if self._master and self._address.startswith(_FILE):
            Path(self._address.removeprefix(_FILE)).unlink(missing_ok=True)  # ZeroMQ leaves it
        os.close(self._wake)
        os.close(self.news)

    def _receive(self) -> None:
        for _ in range(_QUEUE):
            try:
                *sender, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decoded(b"".join(sender), data)
            except ProtocolError as error:
                self._reject(sender, error)
                continue
            if self._master and sender != [_NAME + message.worker]:
                self._reject(sender, ProtocolError("a peer sent messages under two identities"))
            elif isinstance(message, Lend if self._master else Keep):
                self.refused = ""
                if sender == self._error.sender:
                    self._error = _NO_ERROR
                self._accept(message)

    def _decoded(self, sender: bytes, data: bytes) -> Message:
        before, message = self._repeated.pop(sender, (b"", None))
        if message is None or data != before:
            message = decode(data)
        self._repeated[sender] = data, message
        if len(self._repeated) > _SIDES:
            del self._repeated[next(iter(self._repeated))]
        return message

    def _accept(self, message: Message) -> None:
        with self._lock:
            if self._closed:
                return
            _remember(self._incoming, message)
            before = self._latest.get(message.worker)
            _remember(self._latest, message)
            if before != message:
                os.eventfd_write(self.news, 1)

    def _reject(self, sender: list[bytes], error: ProtocolError) -> None:
        refused = isinstance(error, RefusedError) and not self._master
        if str(error) != (self.refused if refused else self.protocol_error):
            logger.warning("%s", error)
        if refused:
            self.refused = str(error)
            return
        self._error = _Error(sender, str(error), time.monotonic())
        if self._master and not isinstance(error, RefusedError):
            with suppress(zmq.ZMQError):  # the worker sends its message again
                self._socket.send_multipart([*sender, encode(Refusal(str(error)))], zmq.NOBLOCK)

    def _send(self) -> None:
        with self._lock:
            messages = list(self._outgoing.values())
        for message in messages:
            frames = [encode(message)]
            if self._master:
                frames.insert(0, _NAME + message.worker)
            with suppress(zmq.ZMQError):  # no receiver or a full queue: sent again
                self._socket.send_multipart(frames, zmq.NOBLOCK)


def _remember(messages: dict[bytes, Message], message: Message) -> None:
    """Replaces the message of a side; over :data:`_SIDES`, forgets the oldest message."""
    messages.pop(message.worker, None)
    messages[message.worker] = message
    if len(messages) > _SIDES:
        del messages[next(iter(messages))]
