"""Benchmark of the transfer engine against plain ``memcpy`` and fio, and of the cost of submitting.

Rates are compared as ratios of interleaved samples on the same machine, so that other load slows
both sides. Copies read from a slab and walk through more memory than the last-level cache holds.
Reads from files write to a slab and bypass the page cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sgl_ext._native import _transfer
from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import interleaved, ratio_of_medians
from sgl_ext.errors import ExtError
from sgl_ext.memory.mapping import HUGE_PAGE
from sgl_ext.memory.slab import HostSlab, Layout
from sgl_ext.memory.transfer import File, FileLane, HostLane, Priority, TransferEngine

MIB = 1 << 20
_WARM_UP = 100
"""Number of copies until the kernel has spread the lane's threads over the cores."""
_DEADLINE_S = 60.0
_FIO_DEADLINE_S = 300
_THREADS = 2
_DEPTH = 32
_QUEUED = 4
"""Number of batches of reads in flight; each has its own destination."""
_RAMP_S = 0.25
"""Time at the start that is not counted, in seconds. Rate limiters of disks let the first requests
after a pause through faster."""
_FILE_SIZE = 512 * MIB
_READ_SIZES = (4096, 64 << 10, MIB)
_COPIES = 10_000


_GROUP = 20
"""Number of blocks in FastSwitch's mean block group (§3.1)."""

SMOLLM2 = Layout(
    page=16, layers=30, kv_heads=3, head_dim=64, dtype="bfloat16", fingerprint="SmolLM2-135M"
)
LLAMA3 = Layout(
    page=16, layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", fingerprint="Llama-3-8B"
)


def require_fio() -> None:
    """Checks that fio is installed. Call it before anything is measured.

    Raises:
        ExtError: fio is not installed.
    """
    if shutil.which("fio") is None:
        raise ExtError(
            "bench memory compares SSD reads with fio, which is not installed; on Debian and "
            "Ubuntu, as root: apt-get update && apt-get install fio"
        )


def measure(report: Report, *, quick: bool, out: Path) -> None:
    """Adds ``copy_fraction_of_memcpy``, ``ssd_read_fraction_of_fio``, ``dispatch_us_per_copy``."""
    with TransferEngine() as engine:
        size = (256 if quick else 1024) * MIB
        slabs = [_slab(engine, layout, size) for layout in (SMOLLM2, LLAMA3)]
        target = _private_memory(engine, max(slab.size for slab in slabs))
        lane = engine.host_lane(_THREADS)
        rounds = 40 if quick else 200
        report.figures["copy_fraction_of_memcpy"] = min(
            _copy(report, engine, lane, slab, target, rounds) for slab in slabs
        )
        report.figures["dispatch_us_per_copy"] = _dispatch(
            report, engine, lane, slabs[0], target, rounds
        )
    seconds, rounds = (0.8, 5) if quick else (2.0, 11)
    with _file(out) as path, TransferEngine() as engine:
        disk = engine.file_lane(path.parent, depth=_DEPTH, bytes_in_flight=_DEPTH * MIB)
        file, slab = disk.open(path, _FILE_SIZE), _slab(engine, SMOLLM2, 32 * MIB)
        report.figures["ssd_read_fraction_of_fio"] = min(
            _read(report, engine, disk, (file, slab), path, size, seconds, rounds)
            for size in _READ_SIZES
        )


def _slab(engine: TransferEngine, layout: Layout, size: int) -> HostSlab:
    """Returns a slab of ``size`` bytes or slightly more, in huge pages.

    In huge pages, a request to the disk is one piece.
    """
    slab = HostSlab.create(layout, -(-size // layout.block_bytes))
    slab.back_with_huge_pages(0, slab.blocks)
    ctypes.memset(slab.address, 1, slab.size)  # allocates every page before anything is timed
    engine.register(slab.address, slab.size, owner=slab, pinned=True)
    return slab


def _private_memory(engine: TransferEngine, size: int) -> NDArray[np.uint8]:
    """Returns private memory in huge pages, the destination of block groups."""
    mapping = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(mapping, np.uint8)
    begin = -array.ctypes.data % HUGE_PAGE
    array = array[begin : begin + size]
    array[:] = 1
    engine.register(array.ctypes.data, size, owner=mapping, pinned=True)
    return array


def _copy(
    report: Report,
    engine: TransferEngine,
    lane: HostLane,
    slab: HostSlab,
    target: NDArray[np.uint8],
    rounds: int,
) -> float:
    """Measures the copy of one block group; returns its rate as a fraction of that of memcpy.

    A block group is a single 1-D copy for all layers. Each copy takes the next place in the slab.
    """
    size = _GROUP * slab.layout.block_bytes
    places = cycle(range(0, slab.size - size, size))

    def ours(_round: int) -> float:
        at = next(places)
        copies = np.array([(slab.address + at, target.ctypes.data + at, size, 1, 0, 0)])
        start = time.perf_counter()
        engine.submit(copies, lane).wait(_DEADLINE_S)
        return time.perf_counter() - start

    def plain(_round: int) -> float:
        at = next(places)
        start = time.perf_counter()
        _transfer.plain_memcpy(target.ctypes.data + at, slab.address + at, size, lane.threads)
        return time.perf_counter() - start

    interleaved([ours, plain], _WARM_UP)
    times = interleaved([ours, plain], rounds)
    fraction = ratio_of_medians(times[1], times[0])
    for system, samples in zip(("engine", "memcpy"), times, strict=True):
        report.runs.append(
            {
                "what": f"copy {_GROUP} blocks {slab.layout.fingerprint}",
                "bytes": size,
                "system": system,
            }
            | {"threads": lane.threads, "GB/s": size / statistics.median(samples) / 1e9}
            | ({"fraction": fraction} if system == "engine" else {})
            | summary(samples, "ms", 1e3)
        )
    return fraction


def _dispatch(
    report: Report,
    engine: TransferEngine,
    lane: HostLane,
    slab: HostSlab,
    target: NDArray[np.uint8],
    rounds: int,
) -> float:
    """Measures the submission of a batch of copies; returns the median microseconds per copy.

    Each copy is one layer of one block, as in a swap without block groups.
    """
    layout = slab.layout
    token, row = layout.token_bytes, layout.token_bytes // layout.layers
    block, layer = np.divmod(np.arange(_COPIES), layout.layers)
    offsets = block * layout.block_bytes + layer * row
    copies = np.empty((_COPIES, 6), np.int64)
    copies[:, 0] = slab.address + offsets
    copies[:, 1] = target.ctypes.data + offsets
    copies[:, 2:] = (row, layout.page, token, token)
    samples = []
    for _ in range(rounds):
        start = time.perf_counter()
        ticket = engine.submit(copies, lane, Priority.BULK)
        samples.append((time.perf_counter() - start) / _COPIES)
        ticket.wait(_DEADLINE_S)
    report.runs.append(
        {"what": f"submit {_COPIES} 2-D copies", "system": "engine"} | summary(samples, "us", 1e6)
    )
    return statistics.median(samples) * 1e6


@contextlib.contextmanager
def _file(directory: Path) -> Iterator[Path]:
    """Creates a file that both systems read. fio writes it, so that it is on the disk."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"memory-transfer-{os.getpid()}.bin"
    try:
        _fio(path, "write", MIB, ("--end_fsync=1",))
        yield path
    finally:
        path.unlink(missing_ok=True)


def _fio(path: Path, how: str, size: int, more: Sequence[str]) -> float:
    """Runs one fio job with io_uring, O_DIRECT and huge pages; returns its bytes per second.

    Raises:
        ExtError: fio failed.
    """
    command = ["fio", "--name=job", f"--filename={path}", f"--size={_FILE_SIZE}", f"--rw={how}"]
    command += [f"--bs={size}", f"--iodepth={_DEPTH}", "--ioengine=io_uring", "--direct=1"]
    command += [f"--iomem_align={HUGE_PAGE}", "--output-format=json", *more]
    huge = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    result = subprocess.run(
        command, env=huge, capture_output=True, text=True, timeout=_FIO_DEADLINE_S, check=False
    )
    if result.returncode != 0:
        problem = (result.stderr or result.stdout).strip().splitlines()[:1]
        raise ExtError(f"fio could not run on {path}: {problem}")
    job = json.loads(result.stdout[result.stdout.index("{") :])["jobs"][0]
    return float(job["write" if how == "write" else "read"]["bw_bytes"])


def _read(
    report: Report,
    engine: TransferEngine,
    disk: FileLane,
    sides: tuple[File, HostSlab],
    path: Path,
    size: int,
    seconds: float,
    rounds: int,
) -> float:
    batches = cycle(_random_reads(*sides, size))
    timed = (
        "--time_based",
        f"--runtime={seconds * 1e3:.0f}ms",
        f"--ramp_time={_RAMP_S * 1e3:.0f}ms",
    )
    systems: list[Callable[[int], float]] = [
        lambda _round: _engine_rate(engine, disk, batches, seconds),
        lambda _round: _fio(path, "randread", size, timed),
    ]
    rates = interleaved(systems, rounds)
    fraction = ratio_of_medians(*rates)
    for system, samples in zip(("engine", "fio"), rates, strict=True):
        row = {"what": f"random reads of {size >> 10} KiB", "bytes": size, "system": system}
        row |= {"depth": _DEPTH, "GB/s": statistics.median(samples) / 1e9}
        row |= {"GB/s_min": min(samples) / 1e9, "GB/s_max": max(samples) / 1e9}
        if system == "engine":
            row |= {"fraction": fraction, "backend": disk.backend, "direct": disk.direct}
            row |= {"registered": disk.registered_bytes}
        report.runs.append(row)
    return fraction


def _engine_rate(
    engine: TransferEngine, disk: FileLane, batches: Iterator[NDArray[np.int64]], seconds: float
) -> float:
    """Returns the engine's bytes per second after the ramp.

    Several batches are queued, so that the lane always has work.
    """
    begin = time.perf_counter()
    counted_from, counted = begin, 0
    tickets = [engine.submit(next(batches), disk) for _ in range(_QUEUED - 1)]
    while tickets:
        if time.perf_counter() - begin < _RAMP_S + seconds:
            tickets.append(engine.submit(next(batches), disk))
        ticket = tickets.pop(0)
        ticket.wait(_DEADLINE_S)
        now = time.perf_counter()
        if counted_from > begin:
            counted += ticket.bytes_total
        elif now - begin >= _RAMP_S:
            counted_from = now
    return counted / (time.perf_counter() - counted_from)


def _random_reads(file: File, slab: HostSlab, size: int) -> list[NDArray[np.int64]]:
    """Returns batches that read into four places in turn.

    They fill about as little memory as fio does. This matters for the disk of a virtual machine,
    whose bytes come through the caches of the host.
    """
    random = np.random.default_rng(0)
    count = max(_DEPTH // _QUEUED, MIB // size)
    batches = []
    for number in range(16):
        copies = np.zeros((count, 6), np.int64)
        copies[:, 0] = file.base + random.integers(0, file.length // size, count) * size
        copies[:, 1] = slab.address + (number % _QUEUED * count + np.arange(count)) * size
        copies[:, 2:4] = (size, 1)
        batches.append(copies)
    return batches
