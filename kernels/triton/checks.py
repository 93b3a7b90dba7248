"""Differential checks that compare every kernel with its torch reference.

Copies and rotations are compared bit for bit, sums up to rounding. The kernel and the reference of
a copy run on equal memory. A check then compares all of this memory,
including guard bytes around the slab and the staging tensor, and thus also finds writes outside the
destination. The tests run the checks in Triton's interpreter, ``scripts/gpu_check.sh`` on a GPU.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from types import ModuleType
from typing import Any

import torch

GUARD = 64
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8)
ROTATED = DTYPES[:3]


@dataclass(frozen=True)
class Case:
    """Parameters of a check: a slab, its alignment in memory, and the tile of the kernel."""

    shape: tuple[int, ...]
    """Shape of the slab, ``[blocks, page, layers, 2, kv_heads, head_dim]``."""
    dtype: torch.dtype
    skew: int
    """Offset of the slab from an aligned address, in elements; it is doubled for the staging."""
    tile_bytes: int
    seed: int
    """Seed of the random bytes in memory."""

    @staticmethod
    def random(random: Random) -> Case:
        """Returns a case with a small slab, whose sizes are often odd."""
        shape = (
            random.randint(1, 9),
            random.choice([1, 2, 3, 4, 16]),
            random.randint(1, 4),
            2,
            random.choice([1, 2, 3]),
            random.choice([1, 3, 6, 8, 64]),
        )
        return Case(
            shape,
            random.choice(DTYPES),
            random.choice([0, 0, 1, 2, 4, 8]),
            random.choice([64, 1024, 16384]),
            random.randrange(2**32),
        )

    @staticmethod
    def random_rotation(random: Random) -> Case:
        """Returns a case like that of :meth:`random`, with keys that can be rotated."""
        case = Case.random(random)
        head_dim = random.choice([2, 5, 16, 48, 64, 80, 128])
        dtype = random.choice(ROTATED)
        return replace(case, shape=(*case.shape[:5], head_dim), dtype=dtype)


@dataclass(frozen=True)
class Operation:
    """Gather with its inverse, the scatter, and generators of their arguments."""

    name: str
    numbers: Callable[[Random, tuple[int, ...], bool], tuple[torch.Tensor, ...]]
    """Function that returns valid indices for a slab of a shape, on the CPU; distinct if asked."""
    item: Callable[[tuple[int, ...]], tuple[int, ...]]
    """Function that returns the shape of an item of the staging tensor for the slab's shape."""
    has_layer: bool = False


def _runs(random: Random, shape: tuple[int, ...], distinct: bool) -> tuple[torch.Tensor, ...]:
    blocks = shape[0]
    if not distinct:
        start = [random.randrange(blocks) for _ in range(random.randint(0, 4))]
        length = [random.randint(1, blocks - first) for first in start]
    else:
        edges = sorted(random.sample(range(blocks + 1), random.randint(0, min(4, blocks + 1))))
        runs = list(itertools.pairwise(edges))
        random.shuffle(runs)
        start, length = [a for a, _ in runs], [b - a for a, b in runs]
    return _int64(start), _int64(length)


def _blocks(random: Random, shape: tuple[int, ...], distinct: bool) -> tuple[torch.Tensor, ...]:
    return (_choice(random, shape[0], distinct),)


def _slots(random: Random, shape: tuple[int, ...], distinct: bool) -> tuple[torch.Tensor, ...]:
    return (_choice(random, shape[0] * shape[1], distinct),)


def _choice(random: Random, limit: int, distinct: bool) -> torch.Tensor:
    count = random.randint(0, min(limit, 12))
    if distinct:
        return _int64(random.sample(range(limit), count))
    return _int64([random.randrange(limit) for _ in range(count)])


def _int64(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


OPERATIONS = (
    Operation("groups", _runs, lambda shape: shape[1:]),
    Operation("layer", _blocks, lambda shape: (shape[1], *shape[3:]), has_layer=True),
    Operation("tokens", _slots, lambda shape: shape[2:]),
)


def check(kernels: ModuleType, case: Case, random: Random, device: torch.device) -> None:
    """Runs every gather and scatter with random arguments on a slab as in ``case``.

    Raises:
        AssertionError: the memory differs from that of the reference.
    """
    kernels.copy_rows.TILE_BYTES = case.tile_bytes
    for operation in OPERATIONS:
        for scatter in (False, True):
            numbers = operation.numbers(random, case.shape, scatter)
            layer = random.randrange(case.shape[2])
            as_bytes, form = random.random() < 0.5, random.choice(["host", "device", "checked"])
            both = []
            for module in (kernels, kernels.reference):
                memory, slab, staging = _memory(case, operation, numbers, as_bytes, device)
                asked: Any = tuple(
                    part.to(device if form == "device" else "cpu") for part in numbers
                )
                asked = asked if operation.name == "groups" else asked[0]
                if module is kernels and form == "checked":
                    asked = _checker(kernels, operation)(slab, asked, distinct=scatter)
                perform(module, operation, scatter, slab, asked, layer, staging)
                both.append(memory)
            for name, ours, reference in zip(("slab", "staging"), *both, strict=True):
                assert_same(
                    f"{operation.name} scatter={scatter} {form} {case}: {name}", ours, reference
                )


def perform(
    module: ModuleType,
    operation: Operation,
    scatter: bool,
    slab: torch.Tensor,
    asked: Any,
    layer: int,
    staging: torch.Tensor,
) -> None:
    """Calls an operation of ``module``, which contains the kernels or the references."""
    where = (slab, asked, layer) if operation.has_layer else (slab, asked)
    if scatter:
        getattr(module, f"scatter_{operation.name}")(staging, *where)
    else:
        getattr(module, f"gather_{operation.name}")(*where, staging)


def check_rotation(kernels: ModuleType, case: Case, random: Random, device: torch.device) -> None:
    """Copies random tokens within a slab as in ``case`` and rotates their keys, some in place.

    Raises:
        AssertionError: the memory differs from that of the reference.
    """
    rotate = kernels.rotate
    limit = case.shape[0] * case.shape[1]
    slots = random.sample(range(limit), random.randint(0, min(limit, 24)))
    targets = slots[: random.randint(0, max(len(slots) - 1, 0))]
    in_place = random.choice([0.0, 0.5, 1.0])
    sources = [
        target if random.random() < in_place else random.choice(slots[len(targets) :])
        for target in targets
    ]
    pairs = random.choice([case.shape[5] // 2, random.randint(1, case.shape[5] // 2)])
    deltas = [random.choice([0, 1, random.randint(-100_000, 100_000)]) for _ in range(3)]
    segments = torch.tensor([random.randrange(3) for _ in targets], dtype=torch.int32)
    interleaved = random.random() < 0.5
    angles = [table.to(device) for table in angles_of(deltas, pairs)]
    both = []
    shipped, rotate.TILE_BYTES = rotate.TILE_BYTES, case.tile_bytes
    try:
        for operation in (rotate.rotate_tokens, rotate.reference):
            generator = torch.Generator().manual_seed(case.seed)
            memory, slab = _guarded(case.shape, case.dtype, case.skew, generator, device)
            slab.copy_(_finite(case, generator))
            moves = rotate.check_moves(slab, _int64(sources), _int64(targets), segments)
            operation(slab, moves, *angles, interleaved=interleaved)
            both.append(memory)
    finally:
        rotate.TILE_BYTES = shipped
    assert_same(f"{pairs} pairs rotated, interleaved={interleaved} {case}", *both)


def check_log_sums(kernels: ModuleType, random: Random, device: torch.device) -> None:
    """Compares log-sum-exps of queries over keys in a slab with those of the reference.

    The slab and the table end in memory that no row sees, where keys are not finite and slots are
    invalid. A CPU has no products of bfloat16 in Triton's interpreter.

    Raises:
        AssertionError: a sum differs by more than rounding.
    """
    kv_heads, group = random.choice([1, 2, 8]), random.choice([1, 3, 4, 8])
    head_dim = random.choice([16, 48, 64, 80, 128])
    dtype = random.choice([one for one in ROTATED if device.type != "cpu" or one.itemsize != 2])
    dtype = random.choice([dtype, torch.float16])
    generator = torch.Generator().manual_seed(random.randrange(2**32))
    width, slots = random.choice([1, 70, 200]), 256
    shape = (slots + 8, random.randint(1, 3), 2, kv_heads, head_dim)
    slab = torch.randn(shape, generator=generator).to(dtype).to(device)
    slab[slots:] = torch.nan
    keys = slab[:, -1, 0]
    table = torch.full((4, width + random.choice([0, 4])), slots, dtype=torch.int32)
    for line in table:
        line[:width] = torch.randperm(slots, generator=generator)[:width]
    table = table.to(device)
    rows = random.randint(0, 6)
    query = 3 * torch.randn(rows, kv_heads * group, head_dim, generator=generator)
    wide = torch.cat([query, query], 1).to(dtype).to(device)
    requests = _int64([random.randrange(4) for _ in range(rows)]).to(device)
    lengths = _int64([random.choice([0, 1, width, random.randint(0, width)]) for _ in range(rows)])
    given = wide[:, : kv_heads * group], keys, table, requests, lengths.to(device)
    scale = head_dim**-0.5
    found = kernels.log_sums.log_sums(*given, scale)
    expected = kernels.log_sums.reference(*given, scale)
    if not torch.allclose(found, expected, rtol=1e-5, atol=1e-5):
        raise AssertionError(f"log-sum-exps over {lengths.tolist()} keys: {found}, not {expected}")


def check_far_log_sums(kernels: ModuleType, memory: torch.Tensor) -> None:
    """Computes a log-sum-exp over keys of which one begins beyond ``2**31`` elements.

    Args:
        memory: uint8 ``[far_bytes(2)]``. Only the keys are written and read.
    """
    *block, head_bytes = _far_block(2)
    keys = memory.view(torch.float16).view(-1, *block, head_bytes // 2).flatten(0, 1)[:, -1, 0]
    generator = torch.Generator().manual_seed(3)
    places = torch.tensor([[len(keys) - 1, 0, len(keys) - 7]], dtype=torch.int32)
    own = torch.randn(3, *keys.shape[1:], generator=generator).half().to(memory.device)
    keys[places[0].long().to(memory.device)] = own
    query = torch.randn(1, 4, keys.shape[2], generator=generator).half().to(memory.device)
    where = (_int64([0]).to(memory.device), _int64([3]).to(memory.device))
    near = torch.arange(3, dtype=torch.int32, device=memory.device)[None]
    found = kernels.log_sums.log_sums(query, keys, places.to(memory.device), *where, 0.1)
    expected = kernels.log_sums.reference(query, own, near, *where, 0.1)
    if not torch.allclose(found, expected, rtol=1e-5, atol=1e-5):
        raise AssertionError(f"log-sum-exps beyond 2**31: {found}, not {expected}")


def check_far_rotation(kernels: ModuleType, memory: torch.Tensor) -> None:
    """Copies tokens to and from the last block of a slab of more than ``2**31`` elements.

    Args:
        memory: uint8 ``[far_bytes(2)]``. Only its first and last blocks are written and read.
    """
    *block, head_bytes = _far_block(2)
    slab = memory.view(torch.bfloat16).view(-1, *block, head_bytes // 2)
    ends = slab[:: len(slab) - 1]
    ends.copy_(torch.randn(ends.shape, generator=torch.Generator().manual_seed(0)))
    near, last = ends.clone(), slab.shape[0] * slab.shape[1] - 1
    angles = [table.to(slab.device) for table in angles_of([9], head_bytes // 4)]
    for operation, where, end in (
        (kernels.rotate.rotate_tokens, slab, last),
        (kernels.rotate.reference, near, 2 * slab.shape[1] - 1),
    ):
        moves = kernels.rotate.check_moves(where, _int64([0, end]), _int64([end - 1, 1]))
        operation(where, moves, *angles)
    assert_same("tokens rotated beyond 2**31", ends, near)


def check_no_numbers(kernels: ModuleType, dtype: torch.dtype, device: torch.device) -> None:
    """Checks the rotation of a NaN and an infinity.

    The bits of a GPU's NaN would overflow if they were rounded like those of a number.
    """
    slab = torch.ones(2, 1, 1, 2, 1, 64, dtype=dtype, device=device)
    keys = slab[:, 0, 0, 0, 0]
    keys[0, 5], keys[0, 6] = torch.nan, torch.inf
    moves = kernels.rotate.check_moves(slab, _int64([0]), _int64([1]))
    kernels.rotate.rotate_tokens(slab, moves, *(one.to(device) for one in angles_of([5], 32)))
    expected = torch.zeros(2, 64, dtype=torch.bool)
    expected[0, [5, 37]] = expected[1, [6, 38]] = True
    found = torch.stack((keys[1].isnan(), keys[1].isinf())).cpu()
    if not torch.equal(found, expected):
        raise AssertionError(f"NaN, then infinity at {found.nonzero().tolist()}, {dtype}")


def angles_of(deltas: list[int], pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the cosines and sines of a rotary embedding with base 10,000, ``[deltas, pairs]``."""
    frequencies = 10_000.0 ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
    angles = torch.tensor(deltas, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float(), angles.sin().float()


def check_far(kernels: ModuleType, memory: torch.Tensor, word: int) -> None:
    """Gathers and scatters the last block of a slab of more than ``2**31`` words.

    Args:
        memory: uint8 ``[far_bytes(word)]``. Only its last block is written and read.
        word: bytes per word that the kernel copies, 1 or 8.
    """
    slab = memory.view(-1, *_far_block(word))
    last = slab.shape[0] - 1
    generator = torch.Generator().manual_seed(word)
    page, layers = slab.shape[1:3]
    for operation in OPERATIONS:
        item = operation.item(tuple(slab.shape))
        # The last item of the slab has the highest address.
        number = last * page + page - 1 if operation.name == "tokens" else last
        asked: Any = _int64([number])
        asked = (asked, _int64([1])) if operation.name == "groups" else asked
        content = torch.randint(256, (1, *item), dtype=torch.uint8, generator=generator)
        content = content.to(slab.device)
        slab[last] = 7
        perform(kernels, operation, True, slab, asked, layers - 1, content)
        expected = torch.full_like(slab[last:], 7)
        # The reference runs on a slab of one block, where no offset is large.
        low = _int64([page - 1 if operation.name == "tokens" else 0])
        low_asked: Any = (low, _int64([1])) if operation.name == "groups" else low
        perform(kernels.reference, operation, True, expected, low_asked, layers - 1, content)
        assert_same(f"{operation.name} scattered beyond 2**31", slab[last:], expected)
        gathered = torch.zeros_like(content)
        perform(kernels, operation, False, slab, asked, layers - 1, gathered)
        assert_same(f"{operation.name} gathered beyond 2**31", gathered, content)


def check_far_staging(kernels: ModuleType, staging: torch.Tensor) -> None:
    """Gathers one block repeatedly, to offsets in ``staging`` beyond ``2**31`` 1-byte words.

    Args:
        staging: uint8 ``[far_bytes(1)]``, which is completely overwritten.
    """
    block = _far_block(1)
    slab = torch.arange(math.prod(block), device=staging.device).to(torch.uint8).view(1, *block)
    out = staging.view(-1, *block)
    repeated = torch.zeros(len(out), dtype=torch.int64)
    kernels.gather_groups(slab, (repeated, repeated + 1), out)
    for place in (0, len(out) // 2, len(out) - 1):
        assert_same(f"block {place} of a large staging tensor", out[place], slab[0])


def far_bytes(word: int) -> int:
    """Returns the bytes of the smallest slab whose last block begins beyond ``2**31`` words."""
    block = math.prod(_far_block(word))
    return (2**31 * word // block + 2) * block


def _far_block(word: int) -> tuple[int, ...]:
    # With an odd head dimension, the kernel cannot use words wider than a byte.
    return (16, 4, 2, 2, 1023 if word == 1 else 1024)


def assert_same(what: str, ours: torch.Tensor, reference: torch.Tensor) -> None:
    """Raises an AssertionError with the position of the first byte that differs, if any."""
    ours, reference = ours.reshape(-1).view(torch.uint8), reference.reshape(-1).view(torch.uint8)
    if not torch.equal(ours, reference):
        wrong = (ours != reference).nonzero().flatten()
        raise AssertionError(
            f"{what}: {len(wrong)} of {len(ours)} bytes differ from the reference, the first at "
            f"{int(wrong[0])}"
        )


def _memory(
    case: Case,
    operation: Operation,
    numbers: tuple[torch.Tensor, ...],
    as_bytes: bool,
    device: torch.device,
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Returns the two buffers, and the slab and the staging tensor in them.

    Equal arguments give equal bytes.
    """
    generator = torch.Generator().manual_seed(case.seed)
    items = int(numbers[1].sum()) if operation.name == "groups" else len(numbers[0])
    item = operation.item(case.shape)
    size = math.prod(item) * case.dtype.itemsize
    whole_slab, slab = _guarded(case.shape, case.dtype, case.skew, generator, device)
    whole, staging = _guarded((items, *item), case.dtype, 2 * case.skew, generator, device)
    return (
        [whole_slab, whole],
        slab,
        staging.view(torch.uint8).view(items, size) if as_bytes else staging,
    )


def _guarded(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    skew: int,
    generator: torch.Generator,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    before, size = GUARD + skew * dtype.itemsize, math.prod(shape) * dtype.itemsize
    whole = torch.randint(256, (before + size + GUARD,), dtype=torch.uint8, generator=generator)
    whole = whole.to(device)
    return whole, whole[before : before + size].view(dtype).view(shape)


def _finite(case: Case, generator: torch.Generator) -> torch.Tensor:
    """Returns numbers of all magnitudes that a rotation does not overflow.

    They include subnormal numbers and zeros.
    """
    smallest = -24 if case.dtype == torch.float16 else -140
    numbers = torch.randn(case.shape, generator=generator)
    numbers *= torch.rand(case.shape, generator=generator) > 0.02
    exponents = torch.rand(case.shape, generator=generator) * (10 - smallest) + smallest
    return (numbers * exponents.exp2()).to(case.dtype)


def _checker(kernels: ModuleType, operation: Operation) -> Callable[..., Any]:
    return {
        "groups": kernels.check_runs,
        "layer": kernels.check_blocks,
        "tokens": kernels.check_slots,
    }[operation.name]
