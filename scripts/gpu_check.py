"""Checks the Triton kernels on a GPU against their references and measures their bandwidth.

Exit status: 0 all checks passed, 1 a check failed, 2 wrong arguments or missing packages, 3 no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "kernels" / "triton"), str(ROOT)]

GEOMETRIES = {"SmolLM2-135M": (16, 30, 2, 3, 64), "Llama-3-8B": (16, 32, 2, 8, 128)}
"""Shape of a block by model, ``[page, layers, 2, kv_heads, head_dim]``, bfloat16."""
GROUPS = (1, 4, 20, 64)
"""Numbers of blocks in a group."""
TILES = (4096, 8192, 16384, 32768, 65536)
WARPS = (4, 8, 16)
CALLS = 8
"""Number of calls that are timed together, so that the host can run ahead of the device."""

Check = tuple[str, Callable[[], None]]


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--cases", type=int, default=40, help="number of random slabs to check (default 40)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random slabs (default 0)")
    parser.add_argument("--no-bandwidth", action="store_true", help="only run the checks")
    parser.add_argument(
        "--mib", type=int, default=1024, help="MiB moved by each measured call (default 1024)"
    )
    parser.add_argument("--rounds", type=int, default=11, help="samples of each call (default 11)")
    parser.add_argument(
        "--sweep", action="store_true", help="also measure tile sizes and numbers of warps"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument(
        "--interpret",
        action="store_true",
        help="run the checks on the CPU under Triton's interpreter; measures nothing",
    )
    options = parser.parse_args()
    for name in ("cases", "mib", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: expected 1 or more")
    return options


def main() -> int:
    """Runs the checks, then the measurements; prints a summary."""
    options = arguments()
    # The kernels read it when they are imported.
    os.environ["TRITON_INTERPRET"] = "1" if options.interpret else "0"
    try:
        import checks
        import sgl_ext_kernels as kernels
        import sgl_ext_kernels.rotate
        import torch
        import triton
    except ImportError as error:
        print(f"gpu_check: {error}: needs a Python with torch and Triton; set PYTHON to it")
        return 2
    if options.interpret:
        device = torch.device("cpu")
        name = "CPU, Triton's interpreter"
    elif torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        name = torch.cuda.get_device_name(device)
    else:
        print("gpu_check: no GPU that torch can use; nothing was checked")
        return 3
    print(f"{name}; torch {torch.__version__}, Triton {triton.__version__}", flush=True)

    tile, failed = kernels.copy_rows.TILE_BYTES, []
    to_do = list(listed_checks(options, torch, checks, kernels, device))
    for what, check in to_do:
        begin = time.perf_counter()
        try:
            check()
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            outcome = "passed"
        except Exception as error:
            traceback.print_exc()
            outcome = f"FAILED: {error}"
            failed.append(what)
        finally:
            kernels.copy_rows.TILE_BYTES = tile
        print(f"{what}: {outcome} ({time.perf_counter() - begin:.1f} s)", flush=True)

    figures: dict[str, float] = {}
    if device.type == "cuda" and not options.no_bandwidth and not failed:
        figures = measure(options, torch, checks, kernels, device)
    if options.json:
        machine = {"device": name, "torch": torch.__version__, "triton": triton.__version__}
        record = {
            "schema": 1,
            "name": "gpu_check",
            "machine": machine,
            "config": {"cases": options.cases, "seed": options.seed, "mib": options.mib},
            "failed": failed,
            "figures": figures,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"gpu_check: {len(to_do) - len(failed)} of {len(to_do)} checks passed")
    return 1 if failed else 0


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
    listed += [
        (f"NaN and infinity, {dtype}", partial(checks.check_no_numbers, kernels, dtype, device))
        for dtype in checks.ROTATED
    ]
    listed += [(name, lambda shape=shape: real(shape)) for name, shape in GEOMETRIES.items()]
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


def check_lent(torch: Any, device: Any) -> None:
    """Checks that another process can use the end of a slab, and keeps it when it is replaced.

    Raises:
        AssertionError: a process does not see the memory that it should.
    """
    from sgl_ext.memory.cuda_mapping import CudaMapping, CudaMemory

    shape = (64, 16, 30, 2, 3, 64)  # blocks of SmolLM2-135M
    block = 2 * 16 * 30 * 2 * 3 * 64
    own, lent = (CudaMemory.create(device.index, 64 * block) for _ in range(2))
    mapping = CudaMapping(device.index, own.size + lent.size)
    mapping.put(0, own)
    mapping.put(own.size, lent)
    flat = torch.as_tensor(mapping, device=device)
    if flat.data_ptr() != mapping.address:
        raise AssertionError("torch copied the mapping")
    slab = flat[own.size :][: 64 * block].view(torch.bfloat16).view(shape)
    slab.view(torch.int16).random_()
    before = slab.clone()
    here, there = socket.socketpair()
    here.settimeout(120)
    process = torch.multiprocessing.get_context("spawn").Process(
        target=borrow, args=(there, device.index, lent.size, shape)
    )
    process.start()
    try:
        torch.cuda.synchronize()
        descriptor = lent.descriptor()
        socket.send_fds(here, [b"lent"], [descriptor])
        os.close(descriptor)
        if here.recv(7) != b"written":
            raise AssertionError("the borrower did not write to the lent memory")
        if not torch.equal(slab.view(torch.int16), before.flip(0).view(torch.int16)):
            raise AssertionError("the owner does not see what the borrower wrote")
        mapping.put(own.size, CudaMemory.create(device.index, lent.size))
        flat[own.size :].zero_()
        torch.cuda.synchronize()
        here.sendall(b"replaced")
        if here.recv(4) != b"kept":
            raise AssertionError("the borrower lost the memory that it had mapped")
    finally:
        here.close()
        process.join(60)


def borrow(channel: socket.socket, device: int, size: int, shape: tuple[int, ...]) -> None:
    """Reverses the order of lent blocks, in the other process of :func:`check_lent`."""
    import sgl_ext_kernels as kernels
    import torch

    from sgl_ext.memory.cuda_mapping import CudaMapping, CudaMemory

    torch.cuda.set_device(device)
    torch.cuda.init()
    _, (descriptor,), _, _ = socket.recv_fds(channel, 4, 1)
    mapping = CudaMapping(device, size)
    mapping.put(0, CudaMemory.of(descriptor, device, size))
    os.close(descriptor)
    flat = torch.as_tensor(mapping, device=torch.device("cuda", device))
    slab = flat[: math.prod(shape) * 2].view(torch.bfloat16).view(shape)
    turned = slab.flip(0)
    every = kernels.check_blocks(slab, torch.arange(shape[0]), distinct=True)
    for layer in range(shape[2]):
        kernels.scatter_layer(turned[:, :, layer].contiguous(), slab, every, layer)
    torch.cuda.synchronize()
    channel.sendall(b"written")
    channel.recv(8)
    same = torch.equal(slab.view(torch.int16), turned.view(torch.int16))
    channel.sendall(b"kept" if same else b"lost")


def measure(
    options: argparse.Namespace, torch: Any, checks: Any, kernels: Any, device: Any
) -> dict[str, float]:
    """Prints the bandwidth tables and returns their figures, in GB/s."""
    figures: dict[str, float] = {}
    free = torch.cuda.mem_get_info(device)[0]
    moved = min(options.mib << 20, free // 12)
    print(
        f"\nGB/s of payload (each byte read once and written once), median of {options.rounds} "
        f"interleaved\nsamples of {CALLS} calls. 'numbers' checks and uploads the runs in each "
        "call; 'checked' is\ngiven checked rows. The last column is relative to one "
        "device-to-device copy of the bytes (in a\nsweep: to the best)."
    )
    for name, item in GEOMETRIES.items():
        block = 2 * item[0] * item[1] * item[2] * item[3] * item[4]
        for group in GROUPS:
            groups = max(1, moved // (group * block))
            # Groups lie apart and in random order, as in an allocator in use.
            slab = torch.empty(groups * (2 * group), *item, dtype=torch.bfloat16, device=device)
            slab.view(torch.int64).random_()
            order = torch.randperm(groups, generator=torch.Generator().manual_seed(options.seed))
            runs = kernels.Runs(order * (2 * group), torch.full((groups,), group))
            figures |= measure_groups(options, torch, kernels, f"{name}/{group}", slab, runs)
            if group == GROUPS[-1]:
                figures |= measure_parts(options, torch, kernels, name, slab, runs)
                figures |= measure_rotation(options, torch, checks, kernels, name, slab, runs)
            if options.sweep and group == 20:
                figures |= sweep_gather(options, torch, kernels, name, slab, runs)
            del slab
            torch.cuda.empty_cache()
    return figures


def measure_groups(
    options: argparse.Namespace, torch: Any, kernels: Any, name: str, slab: Any, runs: Any
) -> dict[str, float]:
    """Measures gathers and scatters of whole groups against torch's operations for the same."""
    checked = kernels.check_runs(slab, runs, distinct=True)
    blocks = checked.numbers
    out = torch.zeros(len(blocks), *slab.shape[1:], dtype=slab.dtype, device=slab.device)
    torch.index_select(slab, 0, blocks, out=out)
    gathered = torch.empty_like(out)
    kernels.gather_groups(slab, checked, gathered)
    if not torch.equal(gathered.view(torch.int64), out.view(torch.int64)):
        raise AssertionError(f"{name}: gather_groups and torch.index_select differ")
    group = int(runs.blocks[0])
    starts = runs.start.tolist()

    def copies() -> None:
        for place, start in enumerate(starts):
            out[place * group : (place + 1) * group].copy_(slab[start : start + group])

    return compare(
        options,
        torch,
        f"{name} blocks",
        out.numel() * out.element_size(),
        {
            "gather checked": lambda: kernels.gather_groups(slab, checked, out),
            "gather numbers": lambda: kernels.gather_groups(slab, runs, out),
            "scatter checked": lambda: kernels.scatter_groups(out, slab, checked),
            "scatter numbers": lambda: kernels.scatter_groups(out, slab, runs),
            "index_select": lambda: torch.index_select(slab, 0, blocks, out=out),
            "index_copy_": lambda: slab.index_copy_(0, blocks, out),
            "a copy per group": copies,
            "one memcpy": lambda: out.copy_(gathered),
        },
    )


def measure_parts(
    options: argparse.Namespace, torch: Any, kernels: Any, name: str, slab: Any, runs: Any
) -> dict[str, float]:
    """Measures one layer of every block, and single tokens, against torch's indexing."""
    blocks = kernels.check_runs(slab, runs, distinct=True)
    page, layers = slab.shape[1:3]
    # Each call takes the next layer and buffer: one layer alone would stay in the L2 cache.
    layered = slab.new_empty(layers, len(blocks.numbers), page, *slab.shape[3:])
    turn = itertools.cycle(range(layers))

    def select() -> None:
        layer = next(turn)
        torch.index_select(slab[:, :, layer], 0, blocks.numbers, out=layered[layer])

    figures = compare(
        options,
        torch,
        f"{name} one layer",
        layered[0].numel() * layered.element_size(),
        {
            "gather checked": lambda: kernels.gather_layer(
                slab, blocks, layer := next(turn), layered[layer]
            ),
            "scatter checked": lambda: kernels.scatter_layer(
                layered[layer := next(turn)], slab, blocks, layer
            ),
            "index_select": select,
            "one memcpy": lambda: layered[next(turn)].copy_(layered[next(turn)]),
        },
    )
    tokens = slab.flatten(0, 1)
    numbers = torch.arange(page) + blocks.numbers.cpu().unsqueeze(1) * page
    shuffled = numbers.flatten()[torch.randperm(numbers.numel())]
    slots = kernels.check_slots(slab, shuffled, distinct=True)
    out = slab.new_empty(len(slots.numbers), *slab.shape[2:])
    other = torch.empty_like(out)
    return figures | compare(
        options,
        torch,
        f"{name} tokens",
        out.numel() * out.element_size(),
        {
            "gather checked": lambda: kernels.gather_tokens(slab, slots, out),
            "scatter checked": lambda: kernels.scatter_tokens(out, slab, slots),
            "index_select": lambda: torch.index_select(tokens, 0, slots.numbers, out=out),
            "one memcpy": lambda: out.copy_(other),
        },
    )


def measure_rotation(
    options: argparse.Namespace,
    torch: Any,
    checks: Any,
    kernels: Any,
    name: str,
    slab: Any,
    runs: Any,
) -> dict[str, float]:
    """Measures the rotation of the tokens of ``runs`` into the other blocks.

    The tokens are moved in order, and in random order.
    """
    slab.normal_()
    rotate, page = kernels.rotate, slab.shape[1]
    used = kernels.check_runs(slab, runs).numbers.cpu()
    others = torch.ones(len(slab), dtype=torch.bool)
    others[used] = False
    sources, targets = (
        (blocks[:, None] * page + torch.arange(page)).flatten()
        for blocks in (used, others.nonzero()[:, 0])
    )
    deltas = list(range(-4000, 4000, 1000))
    segments = (torch.arange(len(sources)) * len(deltas) // len(sources)).int()
    angles = [table.to(slab.device) for table in checks.angles_of(deltas, slab.shape[5] // 2)]
    halves, tokens = slab.chunk(2), slab.flatten(0, 1)
    size = len(sources) * tokens[0].numel() * slab.element_size()
    figures: dict[str, float] = {}
    orders = {"blocks": torch.arange(len(sources)), "tokens": torch.randperm(len(sources))}
    for what, order in orders.items():
        moves = rotate.check_moves(slab, sources[order], targets, segments)
        ours = partial(rotate.rotate_tokens, slab, moves, *angles)
        theirs = partial(rotate.reference, slab, moves, *angles)
        first, second = moves.sources.numbers, moves.targets.numbers
        ours()
        found = tokens[second]
        theirs()
        checks.assert_same(f"{name} rotated {what}", found, tokens[second])
        del found

        def copy(first: Any = first, second: Any = second) -> None:
            tokens[second] = tokens[first]

        calls: dict[str, Callable[[], Any]] = {
            "NeoX": ours,
            "GPT-J": partial(ours, interleaved=True),
            "torch": theirs,
            "torch, not rotated": copy,
            "one memcpy": partial(halves[1].copy_, halves[0]),
        }
        title = f"{name} rotated {what}"
        figures |= compare(options, torch, title, size, calls)
        if options.sweep:
            figures |= sweep(options, torch, title, size, rotate, ours)
    return figures


def sweep_gather(
    options: argparse.Namespace, torch: Any, kernels: Any, name: str, slab: Any, runs: Any
) -> dict[str, float]:
    """Measures the gather of groups for tile sizes and numbers of warps."""
    checked = kernels.check_runs(slab, runs)
    out = slab.new_empty(len(checked.numbers), *slab.shape[1:])
    size = out.numel() * out.element_size()
    gather = partial(kernels.gather_groups, slab, checked, out)
    return sweep(options, torch, name, size, kernels.copy_rows, gather)


def sweep(
    options: argparse.Namespace,
    torch: Any,
    title: str,
    size: int,
    module: Any,
    operation: Callable[[], None],
) -> dict[str, float]:
    """Measures an operation for tile sizes and numbers of warps of the kernel of ``module``."""

    def sample(tile: int, warps: int) -> Callable[[], None]:
        def call() -> None:
            module.TILE_BYTES, module.WARPS = tile, warps
            operation()

        return call

    shipped = module.TILE_BYTES, module.WARPS
    try:
        return compare(
            options,
            torch,
            f"{title} sweep",
            size,
            {f"{tile} B, {warps} warps": sample(tile, warps) for tile in TILES for warps in WARPS},
        )
    finally:
        module.TILE_BYTES, module.WARPS = shipped


def compare(
    options: argparse.Namespace,
    torch: Any,
    title: str,
    size: int,
    calls: dict[str, Callable[[], Any]],
) -> dict[str, float]:
    """Times interleaved calls on the device's clock; prints and returns their GB/s."""
    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(options.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(CALLS):
                calls[name]()
            end.record()
            end.synchronize()
            seconds[name].append(begin.elapsed_time(end) / 1e3 / CALLS)
    rates = {name: size / statistics.median(taken) / 1e9 for name, taken in seconds.items()}
    best = rates.get("one memcpy", max(rates.values()))
    print(f"\n{title}, {size / 2**20:.0f} MiB")
    for name, rate in rates.items():
        print(f"  {name:<22} {rate:8.1f} GB/s  {rate / best:5.2f}", flush=True)
    return {f"{title}/{name}".replace(" ", "_"): rate for name, rate in rates.items()}


if __name__ == "__main__":
    sys.exit(main())
