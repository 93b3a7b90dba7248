"""The order of the streams of a scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_ext.memory.streams import CudaStreams, Streams

SCHEDULE, FORWARD = 1, 2


@pytest.mark.parametrize(("forward", "waited"), [(FORWARD, [FORWARD]), (SCHEDULE, []), (None, [])])
def test_the_current_stream_follows_that_of_the_forwards(
    forward: int | None, waited: list[int]
) -> None:
    streams, waits = CudaStreams(0, forward), list[int]()
    current = SimpleNamespace(
        cuda_stream=SCHEDULE, wait_stream=lambda other: waits.append(other.cuda_stream)
    )
    cuda: Any = SimpleNamespace(
        current_stream=lambda _device: current,
        ExternalStream=lambda handle, _device: SimpleNamespace(cuda_stream=handle),
    )
    streams._cuda = cuda
    streams.follow()
    assert waits == waited
    Streams().follow()
