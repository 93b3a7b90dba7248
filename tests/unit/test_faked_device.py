"""The faked CUDA device itself: where tensors are, what synchronizes, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from faked_cuda_kit import environment, lines

PROGRAM = """
import ctypes
import os
import threading
import numpy as np
import torch

def raises(kind, function, *arguments):
    try:
        function(*arguments)
    except kind as error:
        return str(error)
    raise AssertionError(f"{function} raised nothing")

cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
host, device = torch.arange(6.0), torch.arange(6.0, device="cuda")
assert (host.device, device.device, device.is_cuda, host.is_cuda) == (cpu, cuda, True, False)

# Results, views, gradients of modules and new tensors are where their inputs are.
for each in (device + 1, device[2:], device.view(2, 3).t(), device.new_zeros(2), device.clone(),
             torch.empty_like(device), torch.cat([device, device]), device.long(), device > 2,
             torch.nn.functional.softmax(device, -1), device.split(3)[1], device.max(0).values):
    assert each.device == cuda, each
with torch.device("cuda"):
    linear = torch.nn.Linear(6, 2)
    torch.nn.init.uniform_(linear.weight)
    assert linear.weight.device == torch.ones(2).device == linear(device).device == cuda
assert torch.nn.Linear(2, 2).to("cuda").weight.device == torch.ones(1).cuda().device == cuda
assert torch.ones(2).device == cpu
assert torch.zeros(2, device=device.device).device == torch.Tensor([1]).to(device).device == cuda
found = []
thread = threading.Thread(target=lambda: found.append((device * 2).device))
thread.start()
thread.join()
assert found == [cuda]

# Copies share no memory with their sources.
copy, back = host.to("cuda"), device.cpu()
host[0], device[0] = 7, 8
assert copy.tolist()[0] == 0 and back.tolist()[0] == 0 and back.device == cpu
assert device.to("cuda") is device and host.to("cpu") is host
assert torch.empty(3, pin_memory=True).is_pinned() and torch.ones(3).pin_memory().is_pinned()

# Calls that a device would refuse.
assert "numpy" in raises(TypeError, device.numpy)
assert "numpy" in raises(TypeError, np.asarray, device)
assert "same device" in raises(RuntimeError, lambda: device + host)
assert "same device" in raises(RuntimeError, torch.cat, [device, host])
assert "indices" in raises(RuntimeError, lambda: host[device.long()])
assert (device + torch.tensor(1.0)).device == cuda  # a scalar of the host may join
assert "no CUDA graphs" in raises(RuntimeError, torch.cuda.CUDAGraph)

# Memory of the driver, as a tensor.
from sgl_ext.memory.cuda_mapping import CudaMapping, CudaMemory
mapping = CudaMapping(0, 1 << 21)
mapping.put(0, CudaMemory.create(0, 1 << 21))
memory = torch.as_tensor(mapping, device=cuda)
assert memory.device == cuda and memory.data_ptr() == mapping.address
memory[5] = 6
assert torch.as_tensor(mapping, device=cuda)[5] == 6

# Streams and events.
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    assert torch.cuda.current_stream() == stream != torch.cuda.default_stream()
    event = torch.cuda.Event()
    assert event.query()
    event.record()
torch.cuda.current_stream().wait_stream(stream)
assert torch.cuda.current_stream() == torch.cuda.default_stream() and stream.cuda_stream
assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

# What torch computes waits for what native code has put on the stream.
library, address = ctypes.CDLL(os.environ["SGLEXT_FAKED_CUDART"]), ctypes.c_void_p
current = address(torch.cuda.current_stream().cuda_stream)
before, after = torch.zeros(6, device="cuda"), torch.full((6,), 42.0)
library.fake_hold(1)
library.cudaMemcpyAsync(
    address(before.data_ptr()), address(after.data_ptr()), ctypes.c_size_t(24), 4,
    address(stream.cuda_stream))
event.record(stream)
library.cudaStreamWaitEvent(current, address(event.cuda_event), 0)
threading.Timer(0.3, library.fake_hold, [0]).start()
assert (before + 1).tolist() == [43] * 6
"""

READS = {
    "device[0].item()": "item",
    "device.tolist()": "tolist",
    "bool(device.any())": "__bool__",
    "int(device[0])": "__int__",
    "[1, 2, 3][device[1].long()]": "__index__",
    "device.cpu()": "to(cpu)",
    "device.to('cpu')": "to(cpu)",
    "host.copy_(device)": "copy_ to the host",
    "host.copy_(device, non_blocking=True)": "copy_ to pageable memory, which blocks",
    "device[device > 2]": "__getitem__ with a mask",
    "device[: device[1].long()]": "__getitem__ with a slice of the device",
    "device.nonzero()": "nonzero",
    "torch.where(device > 2)": "where of a condition alone",
    "torch.unique(device)": "unique",
    "torch.equal(device, device)": "equal",
    "device.repeat_interleave(device.long())": "repeat_interleave without output_size",
}
UPLOADS = {
    "host.cuda()": "to(cuda)",
    "torch.tensor([1], device='cuda')": "tensor(device=cuda)",
    "device.copy_(host)": "copy_ from the host",
    "device[[0, 1]]": "__getitem__ with an index of the host",
    "device[torch.tensor([0])]": "__getitem__ with an index of the host",
    "device[:] = host": "__setitem__ of a value of the host",
}
SILENT = (
    "device + 1",
    "device.to('cpu', non_blocking=True)",
    "torch.empty(6, pin_memory=True).copy_(device, non_blocking=True)",
    "host.to('cuda', non_blocking=True)",
    "device[2:4]",
    "device[device.long()]",
    "torch.where(device > 2, device, 0)",
    "device.repeat_interleave(device.long(), output_size=15)",
    "torch.full((2,), 3, device='cuda')",
    "host.tolist(), bool(host.any())",
    "torch.cuda.current_stream().record_event()",
    "device[device > 2] = 0",
)


def _run(folder: Path, program: str) -> list[dict[str, Any]]:
    """Runs a program in a process with the faked device, and returns its journal."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment(folder, folder / "journal")},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return list(lines(folder / "journal"))


def test_tensors_of_the_device_and_of_the_host_are_kept_apart(tmp_path: Path) -> None:
    _run(tmp_path, PROGRAM)


@pytest.mark.parametrize("kind", ["read", "upload", "silent"])
def test_the_journal_names_each_call_that_synchronizes(tmp_path: Path, kind: str) -> None:
    expected = {"read": READS, "upload": UPLOADS, "silent": dict.fromkeys(SILENT, "")}[kind]
    made = ["import torch", "host, device = torch.arange(6.0), torch.arange(6.0, device='cuda')"]
    found = _run(tmp_path, "\n".join([*made, *expected]))
    told = [(line["kind"], line["what"]) for line in found]
    assert told == ([] if kind == "silent" else [(kind, what) for what in expected.values()])
