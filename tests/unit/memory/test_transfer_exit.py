"""Exit of the interpreter, which completes whatever its threads and copies are doing."""

from __future__ import annotations

from pathlib import Path

import pytest
from transfer_kit import fake_cuda, run

CALLS = {
    "submit": "engine.submit(copies, lane)",
    "cancel": "ticket.cancel()",
    "unregister": "core.unregister(12345)",
    "register": "core.register(1 << 40, 4096, True, True, False)",
    "wait": "engine.submit(copies, slow).wait(60)",
    "close": "core.close(0.001)",
}


@pytest.mark.parametrize("call", sorted(CALLS))
def test_interpreter_exits_while_threads_are_in_engine_calls(call: str) -> None:
    program = """
import contextlib, threading, time, numpy as np
from sgl_ext.memory.transfer import TransferEngine
engine = TransferEngine()
core = engine._core
a = np.zeros(1 << 16, np.uint8)
engine.register(a.ctypes.data, a.size, owner=a)
lane = engine.host_lane(1)
slow = engine.throttled_lane(lane, bytes_per_second=1e5)
copies = [(a.ctypes.data + 2 * i, a.ctypes.data + 2 * i + 1, 1, 1, 0, 0) for i in range(200)]
ticket = engine.submit(copies, lane)
def work():
    while True:
        with contextlib.suppress(Exception):
            CALL
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.05)
"""
    run(program.replace("CALL", CALLS[call]))


STUCK = """
import ctypes, sys, numpy as np
from sgl_ext.memory import transfer
fake = ctypes.CDLL(sys.argv[1])
fake.fake_hold(1)
class Owner:
    def __del__(self):
        print("freed", flush=True)
def stuck():
    engine = transfer.TransferEngine()
    memory = np.zeros(8192, np.uint8)
    owner = Owner()
    owner.memory = memory
    engine.register(memory.ctypes.data, 8192, owner=owner)
    lane = engine.cuda_lane(library=sys.argv[1])
    copies = [(memory.ctypes.data, memory.ctypes.data + 4096, 4096, 1, 0, 0)]
    before = fake.fake_outstanding()
    ticket = engine.submit(copies, lane)
    while fake.fake_outstanding() == before:
        pass
    return engine, ticket
"""


@pytest.fixture(scope="module")
def cudart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_cuda(tmp_path_factory.mktemp("cuda"))


def test_stuck_copies_share_one_exit_deadline_and_keep_their_memory(cudart: Path) -> None:
    """Exits with eight engines, each of which has a stuck copy."""
    program = """
transfer._EXIT_DEADLINE_S = 0.1
engines = [stuck() for _ in range(8)]
"""
    assert run(STUCK + program, str(cudart)).stdout == ""


def test_interpreter_exit_ends_a_wait_for_a_stuck_copy(cudart: Path) -> None:
    program = """
import threading, time
from sgl_ext._native import _transfer
transfer._EXIT_DEADLINE_S = 0.1
engine, ticket = stuck()
def wait():
    try:
        ticket.wait(600)
    except Exception:
        pass
threading.Thread(target=wait, daemon=True).start()
while _transfer.no_waits():
    time.sleep(0.001)
"""
    run(STUCK + program, str(cudart))


def test_keyboard_interrupt_ends_close(cudart: Path) -> None:
    program = """
import os, signal, threading
engine, ticket = stuck()
# A shell that starts the tests in the background has them ignore the interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    engine.close(600)
except KeyboardInterrupt:
    print("interrupted", ticket.poll())
fake.fake_hold(0)
engine.close(60)
print(ticket.state.name, flush=True)
"""
    assert run(STUCK + program, str(cudart)).stdout == "interrupted False\nfreed\nDONE\n"


def test_forked_child_does_not_inherit_waits() -> None:
    program = """
import os, threading, time, numpy as np
from sgl_ext._native import _transfer
from sgl_ext.memory.transfer import TransferEngine
engine = TransferEngine()
lane = engine.throttled_lane(engine.host_lane(1), bytes_per_second=1)
a = np.zeros(8192, np.uint8)
engine.register(a.ctypes.data, a.size, owner=a)
ticket = engine.submit([(a.ctypes.data, a.ctypes.data + 4096, 4096, 1, 0, 0)], lane)
def wait():
    try:
        ticket.wait(600)
    except Exception:
        pass
threading.Thread(target=wait, daemon=True).start()
while _transfer.no_waits():
    time.sleep(0.001)
child = os.fork()
if child == 0:
    print(_transfer.no_waits(), flush=True)
else:
    assert os.waitpid(child, 0)[1] == 0
"""
    assert run(program).stdout == "True\n"


def test_engine_calls_that_wait_for_the_kernel_release_the_gil(cudart: Path) -> None:
    """Sets a long switch interval: another thread runs only if a call releases the GIL itself."""
    program = """
import mmap, sys, threading, time, numpy as np
from sgl_ext.memory.transfer import TransferEngine
ticks = 0
def tick():
    global ticks
    while True:
        ticks += 1
        time.sleep(0)
MIB = 1 << 20
mapping = mmap.mmap(-1, 64 * MIB)
address = np.frombuffer(mapping, np.uint8).ctypes.data
calls = {
    "host_lane": lambda core, host: core.host_lane(16, MIB),
    "file_lane": lambda core, host: core.file_lane("threads", 16, MIB, MIB),
    "throttled_lane": lambda core, host: core.throttled_lane(host, 1e9, 1e9, 0.0, 4, MIB),
    "cuda_lane": lambda core, host: core.cuda_lane(sys.argv[1], 0, 4, MIB),
    "register": lambda core, host: core.register(address, 64 * MIB, False, True, True),
}
with TransferEngine() as engine:
    ring = engine._core.file_lane("auto", 4, MIB, MIB)[0]
    engine.register(address, 64 * MIB, pinned=True)
    if ring.registered_bytes == 0:
        del calls["register"]  # nothing that takes time
sys.setswitchinterval(1000)
threading.Thread(target=tick, daemon=True).start()
time.sleep(0.05)
for name, call in calls.items():
    for attempt in range(300):
        with TransferEngine() as engine:
            host = engine._core.host_lane(1, MIB)
            if name == "register":
                engine._core.file_lane("auto", 4, MIB, MIB)
                mapping.madvise(mmap.MADV_REMOVE)  # to be found again takes a while
            before = ticks
            call(engine._core, host)
            after = ticks
        if after > before:
            break
    else:
        print("held by", name)
"""
    assert run(program, str(cudart)).stdout == ""
