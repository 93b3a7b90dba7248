"""Simulated CUDA device on random programs: it finds the races that a graph of all calls has."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from device_programs import SIZE, Runner, any_program, correct_program, graph, in_order
from simulated_device import SimulatedDevice
from transfer_kit import MIB, fake_cuda

from sgl_ext.memory.cuda_mapping import CudaMapping, CudaMemory

ORDERING = ("wait", "record", "synchronize_stream", "synchronize_event", "query_event")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_cuda(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="module")
def runner(library: Path) -> Iterator[Runner]:
    device = SimulatedDevice(library)
    yield Runner(device, device.memory(SIZE))
    device.close()


@pytest.mark.parametrize("part", range(5))
def test_races_are_those_of_the_graph(runner: Runner, part: int) -> None:
    free = racing = 0
    for seed in range(500):
        rng = random.Random(part * 1000 + seed)  # noqa: S311
        program = any_program(rng, rng.randint(2, 80))
        expected = graph(program).races
        assert runner.run(program)[0] == expected, (part, seed)
        free += expected == 0
        racing += expected > 0
    assert free > 10
    assert racing > 10


@pytest.mark.parametrize("part", range(5))
def test_correct_programs_have_no_race_until_a_call_is_left_out(runner: Runner, part: int) -> None:
    needed = 0
    for seed in range(500):
        rng = random.Random(10_000 + part * 1000 + seed)  # noqa: S311
        program = correct_program(rng, rng.randint(2, 40))
        assert graph(program).races == 0
        assert runner.run(program)[0] == 0, (part, seed)
        places = [i for i, op in enumerate(program) if op.kind in ORDERING]
        if not places:
            continue
        del program[rng.choice(places)]
        expected = graph(program).races
        assert runner.run(program)[0] == expected, (part, seed)
        needed += expected > 0
    assert needed > 50


def test_correct_programs_compute_the_same_in_every_schedule(runner: Runner) -> None:
    for seed in range(1, 101):
        rng = random.Random(20_000 + seed)  # noqa: S311
        program = correct_program(rng, 30)
        memory, results = in_order(program)
        assert runner.run(program, seed) == (0, results)
        assert np.array_equal(runner.memory, memory)


def test_some_schedule_shows_a_race(runner: Runner) -> None:
    shown = 0
    for seed in range(1, 101):
        rng = random.Random(30_000 + seed)  # noqa: S311
        program = any_program(rng, 40)
        memory, results = in_order(program)
        races, found = runner.run(program, seed)
        differs = found != results or not np.array_equal(runner.memory, memory)
        assert races > 0 or not differs
        shown += differs
    assert shown > 30


def test_programs_on_memory_that_is_mapped_twice_and_crosses_pieces(library: Path) -> None:
    step, name = 2 * MIB, str(library)
    mappings = [CudaMapping(0, 2 * step, library=name) for _ in range(2)]
    for offset in (0, step):
        piece = CudaMemory.create(0, step, library=name)
        for mapping in mappings:
            mapping.put(offset, piece)
    at, also_at = (mapping.address + step - SIZE // 2 for mapping in mappings)
    memory = np.frombuffer((ctypes.c_uint8 * SIZE).from_address(at), np.uint8)
    with SimulatedDevice(library) as device:
        runner = Runner(device, memory, also_at)
        for seed in range(300):
            rng = random.Random(40_000 + seed)  # noqa: S311
            program = any_program(rng, rng.randint(2, 80))
            assert runner.run(program)[0] == graph(program).races, seed
        for seed in range(1, 21):
            program = correct_program(random.Random(50_000 + seed), 30)  # noqa: S311
            values, results = in_order(program)
            assert runner.run(program, seed) == (0, results)
            assert np.array_equal(memory, values)
