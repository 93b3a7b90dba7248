"""Slab that one process lends to another through the CUDA driver."""

from __future__ import annotations

import math
import os
import socket
from typing import Any


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
    torch.cuda.init()  # type: ignore[no-untyped-call]
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
