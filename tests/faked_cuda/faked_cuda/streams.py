"""Streams and events of the faked device, over handles that native code can use."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import torch

from faked_cuda import journal
from faked_cuda.cudart import runtime

_DISABLE_TIMING, _BLOCKING_SYNC, _INTERPROCESS = 2, 1, 4
_current = threading.local()
_streams: weakref.WeakSet[Stream] = weakref.WeakSet()
_default: Stream | None = None
_default_lock = threading.Lock()


class Stream:
    """Stand-in of :class:`torch.cuda.Stream`; what the host does on it, it does at once."""

    def __init__(self, device: Any = None, priority: int = 0, **_kwargs: object) -> None:
        self.priority = priority
        self.device = torch.device("cuda", 0)
        self.device_index = 0
        self.device_type = 1
        self.cuda_stream = runtime().create_stream(max(min(priority, 0), -5))
        self.stream_id = self.cuda_stream
        weakref.finalize(self, runtime().destroy_stream, self.cuda_stream).atexit = False
        _streams.add(self)

    @property
    def _as_parameter_(self) -> int:
        return self.cuda_stream

    def synchronize(self) -> None:
        journal.synchronized("Stream.synchronize")
        runtime().synchronize_stream(self.cuda_stream)

    def query(self) -> bool:
        return runtime().query_stream(self.cuda_stream)

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event.recorded:
            runtime().wait_event(self.cuda_stream, event.cuda_event)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def __enter__(self) -> Stream:
        _stack().append(current_stream())
        _current.stream = self
        return self

    def __exit__(self, *_exception: object) -> None:
        _current.stream = _stack().pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.cuda_stream == self.cuda_stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)

    def __repr__(self) -> str:
        return f"<faked torch.cuda.Stream cuda_stream={self.cuda_stream:#x}>"


class ExternalStream(Stream):
    """Stream whose handle others have created."""

    def __init__(self, stream_ptr: int, device: Any = None, **_kwargs: object) -> None:
        self.priority, self.device, self.device_index, self.device_type = (
            0,
            torch.device("cuda", 0),
            0,
            1,
        )
        self.cuda_stream = self.stream_id = stream_ptr


class Event:
    """Stand-in of :class:`torch.cuda.Event`, over an event of the runtime library."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
        **_kwargs: object,
    ) -> None:
        flags = (not enable_timing) * _DISABLE_TIMING + blocking * _BLOCKING_SYNC
        self.cuda_event = runtime().create_event(flags + interprocess * _INTERPROCESS)
        self.device = torch.device("cuda", 0)
        self.recorded = False
        self._at = 0.0
        weakref.finalize(self, runtime().destroy_event, self.cuda_event).atexit = False

    @property
    def _as_parameter_(self) -> int:
        return self.cuda_event

    def record(self, stream: Stream | None = None) -> None:
        stream = current_stream() if stream is None else stream
        runtime().record(self.cuda_event, stream.cuda_stream)
        self.recorded, self._at = True, time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (current_stream() if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        return not self.recorded or runtime().query_event(self.cuda_event)

    def synchronize(self) -> None:
        journal.synchronized("Event.synchronize")
        if self.recorded:
            runtime().synchronize_event(self.cuda_event)

    def elapsed_time(self, end_event: Event) -> float:
        measured = runtime().milliseconds(self.cuda_event, end_event.cuda_event)
        return (end_event._at - self._at) * 1e3 if measured is None else measured

    def __repr__(self) -> str:
        return f"<faked torch.cuda.Event cuda_event={self.cuda_event:#x}>"


class StreamContext:
    """Context in which a stream is the current one; None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *exception: object) -> None:
        if self.stream is not None:
            self.stream.__exit__(*exception)


def _stack() -> list[Stream]:
    if not hasattr(_current, "stack"):
        _current.stack = []
    return _current.stack  # type: ignore[no-any-return]


def default_stream(device: Any = None) -> Stream:
    """Returns the stream that is current where none was set.

    Its handle is not 0, as a device's would be: the runtime library takes handles that it made.
    """
    global _default
    with _default_lock:
        if _default is None:
            _default = Stream()
        return _default


def current_stream(device: Any = None) -> Stream:
    """Returns this thread's current stream."""
    stream: Stream | None = getattr(_current, "stream", None)
    return default_stream() if stream is None else stream


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        _current.stream = stream


def drain() -> None:
    """Waits until the current stream has nothing to do, before the host computes "on" it.

    Native code may have made the stream wait for copies. To the program this is no synchronization.
    """
    runtime().drain(current_stream().cuda_stream)


def synchronize(device: Any = None) -> None:
    """Waits for all streams."""
    journal.synchronized("torch.cuda.synchronize")
    for stream in list(_streams):
        runtime().synchronize_stream(stream.cuda_stream)
