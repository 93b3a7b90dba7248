"""The CUDA runtime library under faked streams and events, through ctypes."""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any

NON_BLOCKING = 1
_NOT_READY = 600


class CudaRuntime:
    """Streams and events of a CUDA runtime library; functions that it lacks have substitutes."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._library = ctypes.CDLL(path)
        self._library.cudaGetErrorString.restype = ctypes.c_char_p
        self._library.fake_race.restype = ctypes.c_char_p

    def _call(self, name: str, *arguments: object, ready: tuple[int, ...] = (0,)) -> int:
        code = int(getattr(self._library, name)(*arguments))
        if code not in ready:
            reason = self._library.cudaGetErrorString(code).decode()
            raise RuntimeError(f"{name} of {self.path} failed with {code}: {reason}")
        return code

    def has(self, name: str) -> bool:
        """Returns whether the library has a function of this name."""
        return hasattr(self._library, name)

    def create_stream(self, priority: int) -> int:
        """Returns the handle of a new stream."""
        stream = c_void_p()
        self._call(
            "cudaStreamCreateWithPriority", byref(stream), c_uint(NON_BLOCKING), c_int(priority)
        )
        return stream.value or 0

    def destroy_stream(self, stream: int) -> None:
        self._call("cudaStreamDestroy", c_void_p(stream))

    def synchronize_stream(self, stream: int) -> None:
        self._call("cudaStreamSynchronize", c_void_p(stream))

    def drain(self, stream: int) -> None:
        """Waits for a stream; the race checker need not know, if the library can hide it."""
        if self.has("fake_drain"):
            self._library.fake_drain(c_void_p(stream))
        else:
            self.synchronize_stream(stream)

    def query_stream(self, stream: int) -> bool:
        if not self.has("cudaStreamQuery"):
            self.synchronize_stream(stream)
            return True
        return self._call("cudaStreamQuery", c_void_p(stream), ready=(0, _NOT_READY)) == 0

    def wait_event(self, stream: int, event: int) -> None:
        """Orders what ``stream`` gets from now on behind the event, and waits for the event.

        The wait is the host's, because what torch does "on a stream" the host does at once.
        """
        if self.has("cudaStreamWaitEvent"):
            self._call("cudaStreamWaitEvent", c_void_p(stream), c_void_p(event), c_uint(0))
            self.drain(stream)
        else:
            self.synchronize_event(event)

    def create_event(self, flags: int) -> int:
        """Returns the handle of a new event."""
        event = c_void_p()
        self._call("cudaEventCreateWithFlags", byref(event), c_uint(flags))
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        self._call("cudaEventDestroy", c_void_p(event))

    def record(self, event: int, stream: int) -> None:
        self._call("cudaEventRecord", c_void_p(event), c_void_p(stream))

    def synchronize_event(self, event: int) -> None:
        self._call("cudaEventSynchronize", c_void_p(event))

    def query_event(self, event: int) -> bool:
        if not self.has("cudaEventQuery"):
            self.synchronize_event(event)
            return True
        return self._call("cudaEventQuery", c_void_p(event), ready=(0, _NOT_READY)) == 0

    def kernel(self, stream: int, accesses: Any) -> None:
        """Declares a kernel on a stream that accesses memory; an array of ``fake_access``."""
        self._library.fake_kernel(c_void_p(stream), accesses, c_size_t(len(accesses)), c_uint64(0))

    def races(self) -> int:
        """Returns the number of accesses that are not ordered so far."""
        return int(self._library.fake_races())

    def race(self, number: int) -> str:
        found: bytes = self._library.fake_race(number) or b"one of too many races"
        return found.decode()

    def milliseconds(self, start: int, end: int) -> float | None:
        """Returns the time between two events; None if the library does not measure it."""
        if not self.has("cudaEventElapsedTime"):
            return None
        elapsed = c_float()
        self._call("cudaEventElapsedTime", byref(elapsed), c_void_p(start), c_void_p(end))
        return elapsed.value


@cache
def runtime() -> CudaRuntime:
    """Returns the library that ``SGLEXT_FAKED_CUDART`` names."""
    path = os.environ.get("SGLEXT_FAKED_CUDART")
    if not path:
        raise RuntimeError(
            "CUDA is faked, but SGLEXT_FAKED_CUDART names no CUDA runtime library; set it to the "
            "library that is built from kernels/native/tests/fake_cuda"
        )
    return CudaRuntime(path)
