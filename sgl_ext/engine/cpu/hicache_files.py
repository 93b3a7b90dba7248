"""Emulation of a slow device under HiCache's file storage, for benchmarks.

SGLang loads the class through its storage backend ``dynamic``.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.hicache_storage import HiCacheFile

if TYPE_CHECKING:
    import torch


class SlowFiles(HiCacheFile):
    """Files that are read and written at a limited rate; reads and writes share it.

    Args:
        storage_config: HiCache's, with ``bytes_per_second`` in its extra configuration.
    """

    def __init__(self, storage_config: Any, _arguments: object = None) -> None:
        super().__init__(storage_config)
        self._rate = float(storage_config.extra_config["bytes_per_second"])
        self._lock = threading.Lock()
        self._free = 0.0

    def get(
        self, key: str, target_location: torch.Tensor, target_sizes: object = None
    ) -> torch.Tensor | None:
        found: torch.Tensor | None = super().get(key, target_location, target_sizes)
        if found is not None:
            self._wait(found.nbytes)
        return found

    def set(
        self,
        key: str,
        value: Any = None,
        target_location: object = None,
        target_sizes: object = None,
    ) -> bool:
        new = not self.exists(key)
        done: bool = super().set(key, value, target_location, target_sizes)
        if new and done:
            self._wait(value.nbytes)
        return done

    def _wait(self, bytes_: int) -> None:
        """Waits until the device would have moved the bytes, after those of earlier calls."""
        with self._lock:
            self._free = max(self._free, time.monotonic()) + bytes_ / self._rate
            until = self._free
        time.sleep(max(until - time.monotonic(), 0.0))
