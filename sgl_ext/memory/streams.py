"""Streams on which a scheduler's work uses the KV pool, and the order of copies with that work.

Copies between the pool and other memory run beside the forwards (:mod:`~sgl_ext.memory.transfer`).
A copy that is submitted ``after`` :meth:`Streams.busy` begins when all earlier work has ended: the
forward that wrote what it reads, and the forward that may still use what it overwrites. A
``fence`` of its ticket on :meth:`Streams.current` makes later work wait for the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Streams:
    """Streams of a device whose work has ended when its call returns, such as the CPU: none."""

    def busy(self) -> Sequence[int]:
        """Returns the handles of all streams whose work may use the pool."""
        return ()

    def current(self) -> int | None:
        """Returns the handle of the calling thread's stream; None on a device without streams."""
        return None

    def follow(self) -> None:
        """Makes later work on the current stream wait for the work that is on the others now."""

    def synchronize(self) -> None:
        """Waits on the host until all work that was submitted to the device has ended."""

    def pace(self) -> None:
        """Keeps the host one launch ahead of the device, if it is called after every launch.

        Waits until the work has ended that was on the current stream at the last call. Decisions
        between launches, such as what to compute next, then follow what the device has done.
        """


class CudaStreams(Streams):
    """Streams of a scheduler on a CUDA device: the current one and those that are named.

    Args:
        device: number of the device, which is the current one of the scheduler's thread.
        forward: handle of the stream of the forwards; None if they run on the current one.
    """

    def __init__(self, device: int, forward: int | None) -> None:
        import torch

        self._cuda = torch.cuda
        self._device, self._forward = device, forward
        self._last: torch.cuda.Event | None = None

    def busy(self) -> Sequence[int]:
        current = self.current()
        return (current,) if self._forward in (None, current) else (current, self._forward)

    def current(self) -> int:
        handle: int = self._cuda.current_stream(self._device).cuda_stream
        return handle

    def follow(self) -> None:
        current = self._cuda.current_stream(self._device)
        if self._forward not in (None, current.cuda_stream):
            forward = self._cuda.ExternalStream(self._forward, self._device)  # type: ignore[no-untyped-call]
            current.wait_stream(forward)

    def synchronize(self) -> None:
        self._cuda.synchronize(self._device)

    def pace(self) -> None:
        last, self._last = self._last, self._cuda.Event()  # type: ignore[no-untyped-call]
        self._last.record()
        if last is not None:
            last.synchronize()


def streams_of(device: int | None, forward: object) -> Streams:
    """Returns the streams of a scheduler.

    Args:
        device: number of the CUDA device of the KV pool; None if the pool is in host memory.
        forward: SGLang's stream of forwards (``torch.cuda.Stream``), or None.
    """
    if device is None:
        return Streams()
    return CudaStreams(device, getattr(forward, "cuda_stream", None))
