"""Kit for tests of the transfer engine: memory, expected results of copies, and programs."""

from __future__ import annotations

import mmap
import subprocess
import sys
import time
from collections.abc import Callable
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


def fake_cudart(directory: Path) -> Path:
    """Builds a fake CUDA runtime library, and returns its path."""
    return _fake(directory, "fake_cudart")


def fake_cuda_driver(directory: Path) -> Path:
    """Builds a fake CUDA driver library, which can lend memory, and returns its path."""
    return _fake(directory, "fake_cuda_driver")


def _fake(directory: Path, name: str) -> Path:
    library = directory / f"lib{name}.so"
    source = ROOT / "kernels" / "native" / "tests" / f"{name}.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-pthread", source, "-o", library], check=True)
    return library
