"""Rates of the transfer engine's lanes between host and device, against ``cudaMemcpyAsync``.

Both copy the same registered host memory: whole, and in pages that lie apart. On the CPU both
copies are within host memory.
"""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from gpu.check.outcome import Outcome, spread
from gpu.check.setup import Setup

_WAIT_S = 30.0
_PAGES = {"whole": 0, "SmolLM2's pages": 16 * 30 * 2 * 3 * 64 * 2, "Llama-3-8B's pages": 2 << 20}
"""Bytes of a page of 16 tokens in bfloat16; 0 for one copy of everything."""
_LEAST = 0.9


def run(setup: Setup, outcome: Outcome) -> None:
    """Measures both directions, in interleaved rounds."""
    import torch

    from sgl_ext.memory.transfer import TransferEngine

    size = setup.scale(512, 8) << 20
    device = torch.device("cuda" if setup.cuda else "cpu")
    with TransferEngine() as engine:
        lane = _lane(setup, engine)
        outcome.row(lane=repr(lane))
        memory = mmap.mmap(-1, size)
        array = np.frombuffer(memory, np.uint8)
        engine.register(array.ctypes.data, size, owner=memory, pinned=setup.cuda)
        host = torch.from_numpy(array)
        host.random_(0, 256)
        there = torch.zeros(size, dtype=torch.uint8, device=device)
        engine.register(there.data_ptr(), size, owner=there, device=setup.cuda)
        for name, page in _PAGES.items():
            chosen = _pages(size, page)
            for way, (source, target) in {"h2d": (host, there), "d2h": (there, host)}.items():
                with outcome.step(f"{name} {way}"):
                    _compare(setup, outcome, f"{name} {way}", engine, lane, source, target, chosen)


def _lane(setup: Setup, engine: Any) -> Any:
    if not setup.cuda:
        return engine.host_lane()
    import torch

    # The runtime that the process has loaded, unless CUDA is faked (tests/faked_cuda).
    library = os.environ.get("SGLEXT_FAKED_CUDART")
    return engine.cuda_lane(torch.cuda.current_device(), library=library)


def _pages(size: int, page: int) -> list[tuple[int, int, int]]:
    """Returns ``(source, target, bytes)`` of pages in random order that fill half of the memory."""
    if not page:
        return [(0, 0, size)]
    chance = random.Random(0)  # noqa: S311
    sources, targets = (chance.sample(range(size // page), size // page // 2) for _ in range(2))
    return [(a * page, b * page, page) for a, b in zip(sources, targets, strict=True)]


def _compare(
    setup: Setup,
    outcome: Outcome,
    what: str,
    engine: Any,
    lane: Any,
    source: Any,
    target: Any,
    pages: list[tuple[int, int, int]],
) -> None:
    import torch

    from_, to = source.data_ptr(), target.data_ptr()
    copies = np.array([(from_ + a, to + b, n, 1, 0, 0) for a, b, n in pages], np.int64)

    def ours() -> None:
        engine.submit(copies, lane).wait(_WAIT_S)

    def theirs() -> None:
        for a, b, count in pages:
            target[b : b + count].copy_(source[a : a + count], non_blocking=True)
        if setup.cuda:
            torch.cuda.synchronize()

    calls: dict[str, Callable[[], None]] = {"lane": ours, "cudaMemcpyAsync": theirs}
    target.zero_()
    if setup.cuda:
        torch.cuda.synchronize()  # the lane's streams do not wait for torch's
    ours()
    for a, b, count in pages:
        if not torch.equal(target[b : b + count].cpu(), source[a : a + count].cpu()):
            raise AssertionError("the lane copied other bytes")
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(setup.scale(11, 2)):
        for name in sorted(calls, reverse=bool(number % 2)):
            begin = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - begin)
    size = sum(count for *_, count in pages)
    rates = {name: spread([size / 1e9 / each for each in taken]) for name, taken in seconds.items()}
    outcome.row(what=what, copies=len(pages), bytes=size, gb_per_second=rates)
    ratio = rates["lane"]["median"] / rates["cudaMemcpyAsync"]["median"]
    outcome.figure(f"lanes {what}", ratio, at_least=_LEAST)
