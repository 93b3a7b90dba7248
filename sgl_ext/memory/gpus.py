"""GPUs of this host by their UUIDs, and whether one can access the memory of another."""

from __future__ import annotations


def uuid_of(device: int) -> str:
    """Returns the UUID of a CUDA device."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def unreachable(device: int, uuid: str) -> str:
    """Returns why a device cannot access the memory of a GPU; an empty string if it can.

    Args:
        device: number of the CUDA device in this process.
        uuid: UUID of the GPU, which is this device or another one.
    """
    import torch

    count = torch.cuda.device_count()
    other = next((number for number in range(count) if uuid_of(number) == uuid), None)
    if other is None:
        return f"this process sees no GPU {uuid}; add it to CUDA_VISIBLE_DEVICES"
    if other != device and not torch.cuda.can_device_access_peer(device, other):
        return (
            f"the GPU {uuid_of(device)} cannot access the memory of the GPU {uuid}, because no "
            "NVLink or PCIe path between them allows it; run both engines on one GPU, or on GPUs "
            "that can (see nvidia-smi topo -p2p r)"
        )
    return ""
