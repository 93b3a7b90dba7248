"""Functions of the simulated CUDA device's library; ``fake_cuda.h`` describes its controls."""

from __future__ import annotations

import ctypes
from pathlib import Path

Handle = ctypes.c_void_p
Size = ctypes.c_size_t
DEFAULT_KIND = 4  # cudaMemcpyDefault
NOT_READY = 600


class Access(ctypes.Structure):
    """The library's ``fake_access``."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("width", Size),
        ("height", Size),
        ("pitch", Size),
        ("write", ctypes.c_int),
    )


class CudaError(Exception):
    """Error that a function of the simulated device returns, with its number in ``code``."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} returned {code}")
        self.code = code


_FUNCTIONS: dict[str, list[object]] = {
    "cudaStreamCreateWithPriority": [Handle, ctypes.c_uint, ctypes.c_int],
    "cudaStreamDestroy": [Handle],
    "cudaStreamSynchronize": [Handle],
    "cudaStreamQuery": [Handle],
    "cudaStreamWaitEvent": [Handle, Handle, ctypes.c_uint],
    "cudaDeviceSynchronize": [],
    "cudaEventCreateWithFlags": [Handle, ctypes.c_uint],
    "cudaEventDestroy": [Handle],
    "cudaEventRecord": [Handle, Handle],
    "cudaEventSynchronize": [Handle],
    "cudaEventQuery": [Handle],
    "cudaEventElapsedTime": [Handle, Handle, Handle],
    "cudaMemcpyAsync": [Handle, Handle, Size, ctypes.c_int, Handle],
    "cudaMemcpy2DAsync": [Handle, Size, Handle, Size, Size, Size, ctypes.c_int, Handle],
    "cudaMemcpyBatchAsync": [Handle, Handle, Handle, Size, Handle, Handle, Size, Handle],
    "cudaHostRegister": [Handle, Size, ctypes.c_uint],
    "cudaHostUnregister": [Handle],
    "fake_kernel": [Handle, ctypes.POINTER(Access), Size, ctypes.c_uint64],
    "fake_result": [ctypes.c_int64],
    "fake_tag": [ctypes.c_char_p],
    "fake_seed": [ctypes.c_uint64],
    "fake_hold": [ctypes.c_int],
    "fake_race": [ctypes.c_int],
    "fake_host_access": [Handle, Size, ctypes.c_int],
    "fake_free": [Handle, Size],
    "fake_device_memory": [Handle, Size],
    "fake_name": [Handle, Size, ctypes.c_char_p],
}
_RESULTS = {
    "fake_kernel": ctypes.c_int64,
    "fake_result": ctypes.c_uint32,
    "fake_race": ctypes.c_char_p,
    "fake_registered_bytes": Size,
    "fake_executed": ctypes.c_void_p,
}


def load(library: Path) -> ctypes.CDLL:
    """Returns the library with the types of its functions."""
    found = ctypes.CDLL(str(library))
    for name, arguments in _FUNCTIONS.items():
        getattr(found, name).argtypes = arguments
    for name, result in _RESULTS.items():
        getattr(found, name).restype = result
    return found
