"""Channels between pipeline stages: order, strangers, stages that are late or gone."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import pytest
import zmq

from sgl_ext.errors import ExtError
from sgl_ext.planning.agreement import Answer, Ended, Found, Report
from sgl_ext.tiers.stage_channel import Address, FirstStageChannel, FurtherStageChannel

ANSWER = Answer("r", 1, Found(3, ready=True))
REPORT = Report("r", 1, Found(4, ready=True))


def test_messages_arrive_in_order() -> None:
    with ExitStack() as undo:
        first = FirstStageChannel(2)
        undo.callback(first.close)
        others = [FurtherStageChannel(first.address, stage) for stage in (1, 2)]
        for each in others:
            undo.callback(each.close)
        first.connect(10)
        for stage, each in enumerate(others, 1):
            each.send(REPORT)
            each.send(Ended(stage, [True, False]))
        received: list[tuple[int, object]] = []
        until = time.monotonic() + 10
        while len(received) < 4 and time.monotonic() < until:
            received += first.received()
        for stage in (1, 2):
            of_stage = [message for number, message in received if number == stage]
            assert of_stage == [REPORT, Ended(stage, [True, False])]
        for number in range(2000):  # more than wait in a socket by default, and nobody receives
            first.send(Answer("r", number, Found(0, ready=False)))
        for each in others:
            for number in range(2000):
                assert each.receive() == Answer("r", number, Found(0, ready=False))


def test_a_stage_that_does_not_connect_is_named() -> None:
    first = FirstStageChannel(2)
    other = FurtherStageChannel(first.address, 1)
    with pytest.raises(ExtError, match="pipeline stage 2 has not connected within"):
        first.connect(0.2)
    other.close()
    first.close()


def test_a_late_answer_and_a_stage_that_is_gone_are_errors() -> None:
    first = FirstStageChannel(1)
    other = FurtherStageChannel(first.address, 1, deadline=0.1)
    first.connect(10)
    with pytest.raises(ExtError, match="the first pipeline stage has not answered within"):
        other.receive()
    other.close()
    with pytest.raises(ExtError, match="pipeline stage 1 is gone"):
        until = time.monotonic() + 10
        while time.monotonic() < until:  # the socket notices it soon
            first.send(ANSWER)
            time.sleep(0.01)
    first.close()


def test_strangers_are_ignored() -> None:
    first = FirstStageChannel(1)
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.IDENTITY, Address(first.address.endpoint, "guessed").name(1))
    stranger.connect(first.address.endpoint)
    for data in (b"", b"no message"):
        stranger.send(data)
    other = FurtherStageChannel(first.address, 1)
    waiter = threading.Thread(target=first.connect, args=(10,))
    waiter.start()
    waiter.join()
    other.send(REPORT)
    until = time.monotonic() + 10
    received: list[tuple[int, object]] = []
    while not received and time.monotonic() < until:
        received += first.received()
    assert received == [(1, REPORT)]
    other.close()
    context.destroy(linger=0)
    first.close()
