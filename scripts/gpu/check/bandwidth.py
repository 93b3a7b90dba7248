"""Bandwidth of the Triton kernels against torch's operations for the same bytes."""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from gpu.check.kernels import GEOMETRIES
from gpu.check.outcome import Outcome

GROUPS = (1, 4, 20, 64)
"""Numbers of blocks in a group."""
TILES = (4096, 8192, 16384, 32768, 65536)
WARPS = (4, 8, 16)
CALLS = 8
"""Number of calls that are timed together, so that the host can run ahead of the device."""


def run(options: argparse.Namespace, outcome: Outcome) -> None:
    """Measures all kernels, in GB/s."""
    import checks
    import sgl_ext_kernels as kernels
    import sgl_ext_kernels.rotate
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    for name, rate in measure(options, torch, checks, kernels, device).items():
        outcome.figure(name, rate)


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
