"""Carries messages between a master and its workers, on a thread of its own.

What is said is sent at once and then at every beat, so that nothing need arrive; what was not
fetched is replaced by what comes later from the same side.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import Any, Literal

import zmq

from sgl_ext.errors import ExtError
from sgl_ext.peer.messages import (
    Keep,
    Lend,
    Message,
    MisunderstoodError,
    Refusal,
    RefusedError,
    decode,
    encode,
)

logger = logging.getLogger(__name__)

BEAT_S = 0.25
_LINGER_MS = 200
_NAME = b"w"  # ZeroMQ's names do not begin with 0
_QUEUE = 16
"""Messages that wait for a side that does not read; later ones are lost."""


_LARGEST = 1 << 20
"""Bytes of a message; a larger one is none of ours."""
_SIDES = 256
"""Sides that are remembered; of more, the ones that were heard last."""


class LinkError(ExtError):
    """An address cannot be used."""


class Link:
    """One side of the conversation.

    Args:
        role: a master listens, a worker calls.
        address: of the master.
        beat: seconds after which all is said again.

    Raises:
        LinkError: the address cannot be used.
    """

    def __init__(
        self, role: Literal["master", "worker"], address: str, *, beat: float = BEAT_S
    ) -> None:
        self._master = role == "master"
        self._beat = beat
        self._lock = threading.Lock()
        self._said: dict[bytes, Message] = {}
        self._heard: dict[bytes, Message] = {}
        self._closed = False
        self.strange = ""
        """What came last that could not be understood."""
        self.refused = ""
        """Why the master does not understand this worker; empty if it does."""
        self._latest: dict[bytes, Message] = {}
        self._address = address
        with ExitStack() as undo:
            try:
                self._open(undo)
            except (zmq.ZMQError, OSError) as error:
                raise LinkError(
                    f"{address} cannot be used: {zmq.strerror(error.errno or 0)}"
                ) from None
            undo.pop_all()
        self._thread = threading.Thread(target=self._carry, name="sgl_ext-peer", daemon=True)
        self._thread.start()

    def _open(self, undo: ExitStack) -> None:
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        undo.callback(os.close, self._wake)
        self.news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """A descriptor that is readable when a side has said something new."""
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

    def say(self, messages: Iterable[Message]) -> None:
        """What is said from now on, to each worker or to the master. Returns at once."""
        said = {message.worker: message for message in messages}
        with self._lock:
            if said == self._said or self._closed:
                return
            self._said = said
            os.eventfd_write(self._wake, 1)

    def heard(self) -> list[Any]:
        """The latest of each side since the last call: a master hears ``Lend``, a worker ``Keep``.

        Returns at once.
        """
        if not self._heard or self._closed:
            return []
        with self._lock:
            heard, self._heard = self._heard, {}
            with suppress(BlockingIOError):
                os.eventfd_read(self.news)
        return list(heard.values())

    def close(self, timeout: float = 5.0) -> bool:
        """Ends; what was said last is sent. Returns whether the thread has ended in time."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.eventfd_write(self._wake, 1)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _carry(self) -> None:
        try:
            self._run()
        except Exception:  # its peers take it for lost, and it them
            logger.exception("no more messages are carried between peers: restart to lend again")

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
            if not calling and self._said:
                # The master tells workers apart by the name they call with.
                self._socket.set(zmq.IDENTITY, _NAME + next(iter(self._said)))
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
        os.close(self._wake)
        os.close(self.news)

    def _receive(self) -> None:
        for _ in range(_QUEUE):
            try:
                *sender, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = decode(data)
            except MisunderstoodError as error:
                self._misunderstood(sender, error)
                continue
            if self._master and sender != [_NAME + message.worker]:
                self._misunderstood(sender, MisunderstoodError("a peer calls by two names"))
            elif isinstance(message, Lend if self._master else Keep):
                self.refused = ""
                self._hear(message)

    def _hear(self, message: Message) -> None:
        with self._lock:
            if self._closed:
                return
            _remember(self._heard, message)
            before = self._latest.get(message.worker)
            _remember(self._latest, message)
            if before != message:
                os.eventfd_write(self.news, 1)

    def _misunderstood(self, sender: list[bytes], error: MisunderstoodError) -> None:
        refused = isinstance(error, RefusedError) and not self._master
        if str(error) != (self.refused if refused else self.strange):
            logger.warning("%s", error)
        if refused:
            self.refused = str(error)
            return
        self.strange = str(error)
        if self._master and not isinstance(error, RefusedError):
            with suppress(zmq.ZMQError):  # it asks again
                self._socket.send_multipart([*sender, encode(Refusal(str(error)))], zmq.NOBLOCK)

    def _send(self) -> None:
        with self._lock:
            messages = list(self._said.values())
        for message in messages:
            frames = [encode(message)]
            if self._master:
                frames.insert(0, _NAME + message.worker)
            with suppress(zmq.ZMQError):  # nobody there, or not reading: it is said again
                self._socket.send_multipart(frames, zmq.NOBLOCK)


def _remember(messages: dict[bytes, Message], message: Message) -> None:
    """Replaces the side's message, and forgets the side heard longest ago if they are too many."""
    messages.pop(message.worker, None)
    messages[message.worker] = message
    if len(messages) > _SIDES:
        del messages[next(iter(messages))]
