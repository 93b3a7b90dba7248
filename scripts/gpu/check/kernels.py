"""Triton kernels against their references: random slabs, shapes of real models, far offsets."""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from gpu.check.lent_slab import check_lent
from gpu.check.outcome import Outcome

GEOMETRIES = {"SmolLM2-135M": (16, 30, 2, 3, 64), "Llama-3-8B": (16, 32, 2, 8, 128)}
"""Shape of a block by model, ``[page, layers, 2, kv_heads, head_dim]``, bfloat16."""

Check = tuple[str, Callable[[], None]]


def run(options: argparse.Namespace, outcome: Outcome) -> None:
    """Runs all checks of the kernels; measures nothing."""
    if not options.interpret:
        os.environ["TRITON_INTERPRET"] = "0"  # the kernels read it when they are imported
    import checks
    import sgl_ext_kernels as kernels
    import sgl_ext_kernels.log_sums
    import sgl_ext_kernels.rotate
    import torch

    device = device_of(options, torch)
    tile = kernels.copy_rows.TILE_BYTES
    for what, check in listed_checks(options, torch, checks, kernels, device):
        begin = time.perf_counter()
        failure = ""
        try:
            check()
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        except Exception as error:
            traceback.print_exc()
            failure = f"FAILED: {error}"
        finally:
            kernels.copy_rows.TILE_BYTES = tile
        seconds = time.perf_counter() - begin
        print(f"{what}: {failure or 'passed'} ({seconds:.1f} s)", flush=True)
        outcome.row(check=what, seconds=seconds, failure=failure)
        if failure:
            outcome.fail(f"{what}: {failure}")


def device_of(options: argparse.Namespace, torch: Any) -> Any:
    """Returns the device of the kernels: the CPU in Triton's interpreter, or the current GPU."""
    if options.interpret:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def listed_checks(
    options: argparse.Namespace, torch: Any, checks: Any, kernels: Any, device: Any
) -> list[Check]:
    """Returns the checks for this device, with their names."""

    def random_cases(on: Any, count: int) -> None:
        for number in range(count):
            chance = random.Random(options.seed + number)  # noqa: S311
            case = checks.Case.random(chance)
            checks.check(kernels, case, chance, on)
            checks.check_rotation(kernels, checks.Case.random_rotation(chance), chance, on)
            checks.check_log_sums(kernels, chance, on)

    def real(shape: tuple[int, ...]) -> None:
        case = checks.Case((9, *shape), torch.bfloat16, 0, kernels.copy_rows.TILE_BYTES, 0)
        for number in range(3):
            chance = random.Random(options.seed + number)  # noqa: S311
            checks.check(kernels, case, chance, device)
            for _ in range(4):  # random pairings and angles
                checks.check_rotation(kernels, case, chance, device)

    def far(word: int) -> None:
        size = checks.far_bytes(word)
        if device.type == "cuda":
            checks.check_far(kernels, torch.empty(size, dtype=torch.uint8, device=device), word)
            return
        # A sparse file: only the pages that are touched exist.
        with tempfile.NamedTemporaryFile() as file:
            memory = torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
            checks.check_far(kernels, memory, word)

    listed: list[Check] = [
        (f"{options.cases} random slabs", lambda: random_cases(device, options.cases)),
        ("offsets beyond 2**31 1-byte words", lambda: far(1)),
    ]
    if device.type == "cpu":
        return [*listed, ("offsets beyond 2**31 8-byte words", lambda: far(8))]
    listed.append(
        (
            "staging beyond 2**31 1-byte words",
            lambda: checks.check_far_staging(
                kernels, torch.empty(checks.far_bytes(1), dtype=torch.uint8, device=device)
            ),
        )
    )
    free = torch.cuda.mem_get_info(device)[0]
    if free > checks.far_bytes(8) + 2**30:
        listed.append(("offsets beyond 2**31 8-byte words", lambda: far(8)))
    else:
        print(f"not checked: offsets beyond 2**31 8-byte words; {free >> 30} GiB of memory free")
    listed.append(
        (
            "rotation beyond 2**31 elements",
            lambda: checks.check_far_rotation(
                kernels, torch.empty(checks.far_bytes(2), dtype=torch.uint8, device=device)
            ),
        )
    )
    listed.append(
        (
            "keys beyond 2**31 elements",
            lambda: checks.check_far_log_sums(
                kernels, torch.empty(checks.far_bytes(2), dtype=torch.uint8, device=device)
            ),
        )
    )
    listed += [
        (f"NaN and infinity, {dtype}", partial(checks.check_no_numbers, kernels, dtype, device))
        for dtype in checks.ROTATED
    ]
    listed += [(name, partial(real, shape)) for name, shape in GEOMETRIES.items()]
    listed.append(("CUDA graph", lambda: check_graph(torch, kernels, device)))
    listed.append(("a slab lent to another process", lambda: check_lent(torch, device)))
    if torch.cuda.device_count() > 1:
        other = (device.index + 1) % torch.cuda.device_count()
        second = torch.device("cuda", other)
        listed.append(("a GPU that is not the current one", lambda: random_cases(second, 5)))
    return listed


def check_graph(torch: Any, kernels: Any, device: Any) -> None:
    """Checks that operations on checked rows can be captured: they neither wait nor allocate.

    Raises:
        AssertionError: a replayed operation is wrong.
    """
    slab = torch.randint(256, (8, 4, 3, 2, 2, 16), dtype=torch.uint8, device=device)
    blocks = kernels.check_blocks(slab, torch.tensor([5, 1, 7]), distinct=True)
    out = torch.zeros(3, 4, 2, 2, 16, dtype=torch.uint8, device=device)
    kv = torch.randn(8, 4, 3, 2, 2, 16, device=device)
    moves = kernels.rotate.check_moves(kv, torch.tensor([20, 3]), torch.tensor([0, 31]))
    upright = torch.ones(1, 4, device=device), torch.zeros(1, 4, device=device)
    kernels.gather_layer(slab, blocks, 1, out)  # compiles
    kernels.rotate.rotate_tokens(kv, moves, *upright)
    out.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.gather_layer(slab, blocks, 1, out)
        kernels.rotate.rotate_tokens(kv, moves, *upright)
    slab += 1
    kv += 1
    graph.replay()
    torch.cuda.synchronize()
    if not torch.equal(out, slab[[5, 1, 7], :, 1]):
        raise AssertionError("the captured gather gave bytes that differ from the slab's")
    tokens = kv.flatten(0, 1)
    if not torch.equal(tokens[[0, 31]], tokens[[20, 3]]):
        raise AssertionError("the captured rotation by 0 gave tokens that differ from its sources")
