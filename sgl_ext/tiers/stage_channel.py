"""Messages between the schedulers of pipeline stages on one machine (ZeroMQ)."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import zmq

from sgl_ext.errors import ExtError
from sgl_ext.planning.agreement import Answer, Ended, Report, Stored

_DEADLINE_S = 60.0
"""Deadline of a connection, and of an answer of the first stage, in seconds. The first stage plans
its steps without waiting."""
_HELLO = b""
_up: msgspec.msgpack.Decoder[Report | Ended] = msgspec.msgpack.Decoder(Report | Ended)
_down: msgspec.msgpack.Decoder[Answer | Stored] = msgspec.msgpack.Decoder(Answer | Stored)


class Address(NamedTuple):
    """Address of the first stage."""

    endpoint: str
    token: str
    """Secret that the names of the other stages begin with; messages of others are ignored."""

    def name(self, stage: int) -> bytes:
        return f"{self.token}/{stage}".encode()


class FirstStageChannel:
    """Channel of the first stage to the others; used by one thread.

    Args:
        stages: number of the other stages.
    """

    def __init__(self, stages: int) -> None:
        self.stages = stages
        # A name in the abstract namespace leaves no file behind.
        self.address = Address(f"ipc://@sgl_ext-{secrets.token_hex(8)}", secrets.token_hex(16))
        self._numbers = {self.address.name(stage): stage for stage in range(1, stages + 1)}
        self._context = zmq.Context()
        self._socket = _unlimited(self._context.socket(zmq.ROUTER))
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(self.address.endpoint)

    def connect(self, deadline: float = _DEADLINE_S) -> None:
        """Waits for all other stages.

        Raises:
            ExtError: one of them has not connected within ``deadline`` seconds.
        """
        missing = {*self._numbers.values()}
        while missing:
            if not self._socket.poll(1e3 * deadline):
                raise ExtError(
                    f"pipeline stage {min(missing)} has not connected within {deadline:g} s; its "
                    "log says why"
                )
            name, data = self._socket.recv_multipart()
            if data == _HELLO:
                missing.discard(self._numbers.get(name, 0))

    def send(self, message: Answer | Stored) -> None:
        data = msgspec.msgpack.encode(message)
        for name, stage in self._numbers.items():
            try:
                self._socket.send_multipart([name, data], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise ExtError(
                    f"pipeline stage {stage} is gone ({error}); its log says why"
                ) from error

    def received(self) -> Iterator[tuple[int, Report | Ended]]:
        while self._socket.poll(0):
            name, data = self._socket.recv_multipart()
            if (stage := self._numbers.get(name)) is not None:
                yield stage, _up.decode(data)

    def close(self) -> None:
        self._context.destroy(linger=0)


class FurtherStageChannel:
    """Channel of a further stage to the first one; used by one thread.

    Args:
        stage: number of the stage, from 1 on.
        deadline: deadline of each answer, in seconds.
    """

    def __init__(self, address: Address, stage: int, deadline: float = _DEADLINE_S) -> None:
        self._deadline = deadline
        self._context = zmq.Context()
        self._socket = _unlimited(self._context.socket(zmq.DEALER))
        self._socket.setsockopt(zmq.IDENTITY, address.name(stage))
        self._socket.connect(address.endpoint)
        self._socket.send(_HELLO)

    def send(self, message: Report | Ended) -> None:
        self._socket.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)

    def receive(self) -> Answer | Stored:
        if not self._socket.poll(1e3 * self._deadline):
            raise ExtError(
                f"the first pipeline stage has not answered within {self._deadline:g} s; its log "
                "says why"
            )
        return _down.decode(self._socket.recv())

    def close(self) -> None:
        self._context.destroy(linger=0)


def _unlimited(socket: Any) -> Any:
    """Lets messages wait in memory, so that no send blocks; they are few and small."""
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    return socket
