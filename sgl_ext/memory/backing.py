"""Background thread that backs a slab with huge pages before its blocks are used.

By default the kernel backs shared memory with 4 KiB pages at the first write. Each page then costs
a fault during prefill and a TLB entry during every later decode: decode reads one layer of a token,
and the same layer of the next token lies one whole token further.
"""

from __future__ import annotations

import errno
import logging
import os
import threading

from sgl_ext.memory.slab import HostSlab

AHEAD = 256 << 20
"""Bytes that are backed beyond the highest block in use"""
STEP = 8 << 20
"""Bytes that one call backs. A huge page takes 0.1 ms, or 5 ms in a virtual machine whose host
backs memory at the first access; forwards on the same cores wait for a call."""
_IN_USE = errno.EAGAIN, errno.EBUSY
_PAUSE_S = 0.05
_ATTEMPTS = 200
"""Attempts to back a step in which a page is in use at every attempt, or pinned permanently"""

logger = logging.getLogger(__name__)


class Backing:
    """Backing of ``slab`` with huge pages up to :data:`AHEAD` bytes beyond the blocks in use.

    :meth:`need` names the blocks in use. At most :data:`STEP` bytes more than that are backed. If
    the kernel refuses huge pages, a warning is logged and the refused range gets its pages when it
    is written. The thread ends if the kernel refuses the first step. Pages that are pinned for I/O
    can no longer be backed, so a caller pins memory only after it is backed.
    """

    def __init__(self, slab: HostSlab) -> None:
        self._slab = slab
        self._wanted = self._renewals = 0
        self._changed = threading.Condition()
        self._closed = False
        self.backed = 0
        """Number of leading blocks that have huge pages or were refused them"""
        self.refused = False
        """True once the kernel has refused huge pages"""
        self._thread = threading.Thread(target=self._run, name="sgl_ext-backing", daemon=True)
        self._thread.start()
        self.need(1)

    def need(self, end: int) -> None:
        """Requests backing for the blocks below ``end``, which are about to be used.

        Returns at once. Must be called from the thread that puts memory into the slab's mapping:
        that memory has no huge pages yet, so the blocks from there on are backed again.
        """
        with self._changed:
            mapping = self._slab.mapping
            if mapping.renewed < mapping.size:
                self.backed = min(self.backed, mapping.renewed // self._slab.layout.block_bytes)
                self._renewals += 1
                mapping.renewed = mapping.size
            self._wanted = max(self._wanted, end + AHEAD // self._slab.layout.block_bytes)
            self._changed.notify()

    def close(self, timeout: float = 5.0) -> bool:
        """Stops the thread; returns whether it has ended within ``timeout`` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        step = -(-STEP // self._slab.layout.block_bytes)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self.backed < self._target())
                if self._closed:
                    return
                start, renewals = self.backed, self._renewals
            end = min(start + step, self._slab.own)
            if code := self._back(start, end):
                if not self.refused:
                    logger.warning(
                        "the KV slab gets no huge pages from block %d on (%s); decode is slower",
                        start, os.strerror(code),
                    )  # fmt: skip
                self.refused = True
                if not start and code not in _IN_USE:
                    return
            with self._changed:
                if self._renewals == renewals:  # no memory was replaced meanwhile
                    self.backed = end

    def _back(self, start: int, end: int) -> int:
        """Calls :meth:`HostSlab.back_with_huge_pages` again while one of the pages is in use.

        Returns:
            The kernel's errno; 0 on success, or if this object was closed meanwhile.
        """
        for _ in range(_ATTEMPTS):
            code = self._slab.back_with_huge_pages(start, end)
            if code not in _IN_USE:
                return code
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, _PAUSE_S):
                    return 0
        return code

    def _target(self) -> int:
        return min(self._wanted, self._slab.own)
