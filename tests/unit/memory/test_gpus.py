"""GPUs by their UUIDs, and access between them, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sgl_ext.memory.gpus import unreachable, uuid_of

UUIDS = ("11aa", "22bb", "33cc")
PATHS = {(0, 1), (1, 0)}


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three GPUs, of which the first two can access each other's memory."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(UUIDS))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUIDS[device])
    )
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda device, other: (device, other) in PATHS
    )


def test_a_device_has_a_uuid() -> None:
    assert uuid_of(1) == "22bb"


@pytest.mark.parametrize(
    ("device", "uuid", "reason"),
    [
        (0, "11aa", ""),
        (0, "22bb", ""),
        (0, "33cc", "the GPU 11aa cannot access the memory of the GPU 33cc, because no NVLink"),
        (2, "22bb", "the GPU 33cc cannot access the memory of the GPU 22bb"),
        (0, "44dd", "this process sees no GPU 44dd; add it to CUDA_VISIBLE_DEVICES"),
    ],
)
def test_access_needs_a_visible_gpu_and_a_path(device: int, uuid: str, reason: str) -> None:
    found = unreachable(device, uuid)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)
