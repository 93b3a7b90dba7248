"""Kit for tests of the transfer engine: memory, expected results of copies, and programs."""

from __future__ import annotations

import mmap
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from conftest import ROOT
from numpy.typing import NDArray

from sgl_ext.memory.transfer import TransferEngine

DEADLINE_S = 60.0
KIB = 1 << 10
MIB = 1 << 20
PAGE = 4096
Bytes = NDArray[np.uint8]
Op = tuple[int, int, int, int, int, int]


def memory(engine: TransferEngine, size: int, seed: int | None = None) -> Bytes:
    """Returns registered bytes, random if a seed is given and zero otherwise."""
    if seed is None:
        array = np.zeros(size, np.uint8)
    else:
        array = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    engine.register(array.ctypes.data, size, owner=array)
    return array


def one(src: int, dst: int, size: int) -> list[Op]:
    return [(src, dst, size, 1, 0, 0)]


def pages(engine: TransferEngine, size: int, *, pinned: bool = False) -> Bytes:
    """Returns registered memory that begins at a page boundary."""
    mapping = mmap.mmap(-1, size)
    array = np.frombuffer(mapping, np.uint8)
    engine.register(array.ctypes.data, size, owner=mapping, pinned=pinned)
    return array


def expected(ops: list[Op], src: Bytes, dst: Bytes) -> Bytes:
    result = dst.copy()
    for s, d, width, height, src_pitch, dst_pitch in ops:
        for row in range(height):
            to, of = d + row * dst_pitch, s + row * src_pitch
            result[to : to + width] = src[of : of + width]
    return result


def wait_until(condition: Callable[[], object], seconds: float = DEADLINE_S) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.001)
    return False


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result


def fake_cuda(directory: Path) -> Path:
    """Builds the simulated CUDA device, both runtime and driver, and returns the library's path.

    Libraries of different directories are different devices.
    """
    library = directory / "libfake_cuda.so"
    library.write_bytes(_compiled_fake_cuda())
    return library


@cache
def _compiled_fake_cuda() -> bytes:
    sources = sorted((ROOT / "kernels" / "native" / "tests" / "fake_cuda").glob("*.cpp"))
    together = "".join(f'#include "{source}"\n' for source in sources)  # compiles in half the time
    options = ["-std=c++17", "-shared", "-fPIC", "-O1", "-pthread", "-x", "c++", "-"]
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / "library.so"
        subprocess.run(["c++", *options, "-o", library], input=together, text=True, check=True)
        return library.read_bytes()
