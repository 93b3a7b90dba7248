"""Random programs for the simulated device, and what a graph of all their calls says about them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from simulated_device import Bytes, SimulatedDevice, checksum, pattern

SIZE = 256  # bytes of memory
STREAMS, EVENTS = 4, 6
Rows = tuple[int, int, int, int]  # offset, bytes of a row, rows, pitch


@dataclass(frozen=True)
class Access:
    rows: Rows
    write: bool

    @property
    def mask(self) -> int:
        """The bytes, as bits of a number."""
        first, width, height, pitch = self.rows
        mask = 0
        for row in range(height):
            mask |= ((1 << width) - 1) << (first + row * pitch)
        return mask

    def conflicts(self, other: Access) -> bool:
        return (self.write or other.write) and bool(self.mask & other.mask)


@dataclass(frozen=True)
class Op:
    """One call: kernel, copy, record, wait, host_access, or the wait of the host."""

    kind: str
    stream: int = 0
    event: int = 0
    accesses: tuple[Access, ...] = ()
    fill: int = 0


@dataclass
class Graph:
    """All calls of a program, and for each the calls that are complete before it starts."""

    before: list[int] = field(default_factory=list)  # sets of calls, as bits
    jobs: list[tuple[int, Op]] = field(default_factory=list)
    races: int = 0
    _host: list[int] = field(default_factory=list)
    _last: dict[int, int] = field(default_factory=dict)
    _records: dict[int, int] = field(default_factory=dict)

    def unordered(self, op: Op) -> list[Op]:
        """Returns the earlier jobs with which ``op`` would race, once per pair of accesses."""
        known = self._closure(self._predecessors(op))
        return [
            job
            for number, job in self.jobs
            if not known >> number & 1
            for mine in op.accesses
            for other in job.accesses
            if mine.conflicts(other)
        ]

    def add(self, op: Op) -> None:
        self.races += len(self.unordered(op))
        number = len(self.before)
        self.before.append(self._closure(self._predecessors(op)))
        if op.kind in ("kernel", "copy", "record", "wait"):
            self._last[op.stream] = number
        else:
            self._host = [number]
        if op.kind == "record":
            self._records[op.event] = number
        if op.kind in ("kernel", "copy"):
            self.jobs.append((number, op))

    def _predecessors(self, op: Op) -> list[int]:
        found = list(self._host)
        if op.kind in ("kernel", "copy", "record", "wait", "synchronize_stream"):
            found += [self._last[op.stream]] if op.stream in self._last else []
        if op.kind in ("wait", "synchronize_event", "query_event"):
            found += [self._records[op.event]] if op.event in self._records else []
        if op.kind == "synchronize":
            found += self._last.values()
        return found

    def _closure(self, numbers: list[int]) -> int:
        bits = 0
        for number in numbers:
            bits |= self.before[number] | 1 << number
        return bits


def graph(program: list[Op]) -> Graph:
    found = Graph()
    for op in program:
        found.add(op)
    return found


def any_program(rng: random.Random, length: int) -> list[Op]:
    kinds = ["kernel"] * 6 + ["copy"] * 4 + ["record"] * 5 + ["wait"] * 5
    kinds += ["synchronize_stream", "synchronize_event", "query_event", "host_access"]
    program = []
    for number in range(length):
        kind = rng.choice([*kinds, "synchronize"] if number % 16 == 0 else kinds)
        op = Op(kind, rng.randrange(STREAMS), rng.randrange(EVENTS))
        if kind in ("kernel", "copy", "host_access"):
            op = _job(rng, kind, number)
        program.append(op)
    return program


def correct_program(rng: random.Random, jobs: int) -> list[Op]:
    """Returns a program whose conflicting jobs are ordered, each by one of several means."""
    program: list[Op] = []
    known = Graph()

    def add(op: Op) -> None:
        known.add(op)
        program.append(op)

    for number in range(jobs):
        job = _job(rng, rng.choice(["kernel", "copy", "copy", "kernel", "host_access"]), number)
        while unordered := known.unordered(job):
            event, stream = rng.randrange(EVENTS), rng.choice(unordered).stream
            means = rng.randrange(8)
            if means == 0:
                add(Op("synchronize_stream", stream))
                continue
            add(Op("record", stream, event))
            if means == 1 or job.kind == "host_access":
                add(Op(rng.choice(["synchronize_event", "query_event"]), event=event))
                continue
            if means == 2:  # by way of another stream
                other = rng.randrange(STREAMS)
                add(Op("wait", other, event))
                event = rng.randrange(EVENTS)
                add(Op("record", other, event))
            add(Op("wait", job.stream, event))
        add(job)
    return program


def _job(rng: random.Random, kind: str, number: int) -> Op:
    stream = rng.randrange(STREAMS)
    if kind == "host_access":
        first = rng.randrange(SIZE - 16)
        access = Access((first, rng.randint(1, 16), 1, 16), rng.random() < 0.5)
        return Op(kind, accesses=(access,))
    if kind == "kernel":
        accesses = tuple(Access(_rows(rng), rng.random() < 0.5) for _ in range(rng.randint(1, 3)))
        return Op(kind, stream, accesses=accesses, fill=number * 0x9E3779B97F4A7C15 % 2**64)
    while True:
        first, width, height, pitch = _rows(rng, apart=True)
        space = SIZE - (height - 1) * pitch - width
        src, dst = (Access((rng.randint(0, space), width, height, pitch), w) for w in (False, True))
        if not src.mask & dst.mask:
            return Op(kind, stream, accesses=(src, dst))


def _rows(rng: random.Random, *, apart: bool = False) -> Rows:
    width, height = rng.randint(1, 12), rng.choice([1, 1, 2, 3, 5])
    pitch = rng.randint(width if apart else 1, 24)
    return rng.randint(0, SIZE - width - (height - 1) * pitch), width, height, pitch


class Runner:
    """Executes programs on a device, with the same streams each time.

    Args:
        memory: ``SIZE`` bytes on the device.
        also_at: another address of this memory, which half of the streams use.
    """

    def __init__(self, device: SimulatedDevice, memory: Bytes, also_at: int | None = None) -> None:
        self.device, self.memory = device, memory
        self._bases = [memory.ctypes.data, also_at or memory.ctypes.data]
        self.streams = [device.stream(priority=-(i == 3)) for i in range(STREAMS)]

    def run(self, program: list[Op], seed: int = 0) -> tuple[int, list[int]]:
        """Returns the number of races, and what each kernel read. Resets the device."""
        device, kernels = self.device, []
        device.seed(seed)
        self.memory[:] = 0
        events = [device.event() for _ in range(EVENTS)]  # that were never recorded
        for op in program:
            if kernel := self._call(op, events[op.event]):
                kernels.append(kernel)
        device.synchronize()
        found = device.race_count, [device.result(kernel) for kernel in kernels]
        device.reset()
        for event in events:
            device.destroy_event(event)
        return found

    def _call(self, op: Op, event: int) -> int | None:
        device, stream = self.device, self.streams[op.stream]
        base = self._bases[op.stream % 2]
        ranges = [(base + a.rows[0], *a.rows[1:]) for a in op.accesses]
        if op.kind == "kernel":
            reads = [r for r, a in zip(ranges, op.accesses, strict=True) if not a.write]
            writes = [r for r, a in zip(ranges, op.accesses, strict=True) if a.write]
            return device.kernel(stream, reads, writes, fill=op.fill)
        if op.kind == "copy":
            (src, width, rows, src_pitch), (dst, *_, dst_pitch) = ranges
            device.copy_rows(stream, dst, dst_pitch, src, src_pitch, width, rows)
        elif op.kind == "record":
            device.record(stream, event)
        elif op.kind == "wait":
            device.wait(stream, event)
        elif op.kind == "synchronize":
            device.synchronize()
        elif op.kind == "synchronize_stream":
            device.synchronize(stream=stream)
        elif op.kind == "synchronize_event":
            device.synchronize(event=event)
        elif op.kind == "query_event":
            while not device.query(event=event):
                pass
        else:
            (address, size, *_), (access,) = ranges[0], op.accesses
            (device.host_writes if access.write else device.host_reads)(address, size)
        return None


def in_order(program: list[Op]) -> tuple[Bytes, list[int]]:
    """Returns the memory, and what each kernel reads, if jobs run in the order of their calls."""
    memory, results = np.zeros(SIZE, np.uint8), []

    def rows(access: Access) -> list[slice]:
        first, width, height, pitch = access.rows
        return [slice(at, at + width) for at in range(first, first + height * pitch, pitch)]

    for op in program:
        if op.kind == "kernel":
            reads = [memory[row] for a in op.accesses if not a.write for row in rows(a)]
            results.append(checksum(*reads))
            for access in op.accesses:
                for row in rows(access) if access.write else ():
                    memory[row] = pattern(op.fill, access.rows[1])
        elif op.kind == "copy":
            src, dst = op.accesses
            for of, to in zip(rows(src), rows(dst), strict=True):
                memory[to] = memory[of]
    return memory, results
