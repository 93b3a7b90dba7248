"""SGLang's streams on the simulated device, and a transfer engine that copies there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from simulated_device import SimulatedDevice
from transfer_kit import wait_until

from sgl_ext.memory.native_ticket import NativeTicket
from sgl_ext.memory.streams import Streams
from sgl_ext.memory.transfer import CudaLane, TransferEngine


class SimulatedStreams(Streams):
    """SGLang's schedule stream and forward stream, and jobs that are held until the host waits."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.schedule, self.forward = device.stream(), device.stream()
        self.borrower = device.stream()
        """Stream of another process, which borrows memory of the pool."""
        self._current = self.schedule
        self._last: int | None = None
        self.held = False
        self._fenced = False  # whether a stream waits for copies that are held
        self._free: set[int] = set()  # events before which no stream did

    def busy(self) -> Sequence[int]:
        current = self._current
        return (current,) if current == self.forward else (current, self.forward)

    def current(self) -> int:
        return self._current

    @contextmanager
    def forwarding(self) -> Iterator[None]:
        """Makes the forward stream the current one, after all work on the schedule stream."""
        self.join(self.forward, self.schedule)
        self._current = self.forward
        try:
            yield
        finally:
            self._current = self.schedule

    def join(self, stream: int, other: int) -> None:
        """Makes a stream wait for the work that another one has now."""
        event = self.device.record(other)
        self.device.wait(stream, event)
        self.device.destroy_event(event)

    def hold(self) -> None:
        """Holds back the jobs that have not started, until the host waits."""
        self.held = True
        self.device.hold(copies=True, kernels=True)

    def release(self) -> None:
        if self.held:
            self.held = False
            self.device.hold()
        self._fenced = False

    def fenced(self) -> None:
        """Notes that a stream waits for copies."""
        self._fenced = True

    def record(self) -> int:
        """Records an event on the current stream for :meth:`await_event`."""
        event = self.device.record(self._current)
        if not self._fenced:
            self._free.add(event)
        return event

    def await_event(self, event: int) -> None:
        """Waits for an event, and destroys it; copies that it does not depend on stay held."""
        if self.held and event in self._free:
            self.device.hold(copies=True)
            wait_until(lambda: self.device.query(event=event), 0.005)
        self._free.discard(event)
        if not self.device.query(event=event):
            self.release()
        self.device.synchronize(event=event)
        self.device.destroy_event(event)

    def synchronize(self) -> None:
        self.release()
        self.device.synchronize()

    def pace(self) -> None:
        last, self._last = self._last, self.record()
        if last is not None:
            self.await_event(last)

    def close(self) -> None:
        self.synchronize()
        if self._last is not None:
            self.device.destroy_event(self._last)
            self._last = None


class _Ticket(NativeTicket):
    """Ticket whose waits release the jobs that are held."""

    __slots__ = ("streams",)

    def wait(self, timeout: float) -> None:
        if not self.poll():
            self.streams.release()
        super().wait(timeout)

    def fence(self, stream: int | None, timeout: float) -> None:
        self.streams.fenced()
        super().fence(stream, timeout)


class SimulatedTransfers(TransferEngine):
    """Transfer engine whose CUDA lanes are those of the simulated device."""

    streams: SimulatedStreams

    def cuda_lane(self, device: int = 0, **_: Any) -> CudaLane:
        library = self.streams.device.fake._name
        return super().cuda_lane(device, library=library, dispatches=4, group_bytes=4096)

    def submit(self, *arguments: Any, **named: Any) -> _Ticket:
        native = super().submit(*arguments, **named)
        ticket = _Ticket(native._native, native._engine)
        ticket.streams = self.streams
        return ticket

    def close(self, timeout: float = 60.0) -> None:
        self.streams.release()
        super().close(timeout)
