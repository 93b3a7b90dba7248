"""Slot indices and other small tensors between host and device, without waiting for kernels.

SGLang keeps slots in tensors on the KV pool's device, the block groups keep them on the host. A
plain ``.cpu()`` or ``.to(device)`` of pageable memory waits for all earlier work on the current
stream, with overlap scheduling for a whole forward.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

Slots = NDArray[np.int64]


def upload(values: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """Returns a host tensor on ``device``; the copy is ordered on the current stream."""
    if torch.device(device).type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


class Download:
    """Copy of a tensor to the host, which is ordered on the current stream.

    The tensor may be overwritten on this stream at once. One in host memory is not copied.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._landed: torch.cuda.Event | None = None
        self._values = values
        if not values.is_cpu:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._landed = torch.cuda.Event()
            self._landed.record()

    def __len__(self) -> int:
        return len(self._values)

    def landed(self) -> bool:
        """Returns whether :meth:`numpy` would not wait."""
        if self._landed is not None and self._landed.query():
            self._landed = None
        return self._landed is None

    def tensor(self) -> torch.Tensor:
        """Returns the copy, in pinned memory; waits until it has landed. Any thread may call it.

        A tensor of the host is returned itself.
        """
        if self._landed is not None:
            self._landed.synchronize()
            self._landed = None
        return self._values

    def numpy(self) -> Slots:
        """Returns the copy of a tensor of indices, int64; waits until they have landed."""
        slots: Slots = self.tensor().long().numpy()
        return slots


def on_host(values: torch.Tensor) -> Slots:
    """Returns indices of a tensor on any device, int64; waits for the current stream.

    Only for steps in which a power moves KV.
    """
    return Download(values).numpy()
