"""Gives a slab its physical memory ahead of use, in huge pages, on a thread of its own.

The kernel gives shared memory 4 KiB pages as they are first written: a fault each on the way of a
prefill, and a TLB entry each on the way of every later decode, which reads one token of one layer
here and the next one a whole token away.
"""

from __future__ import annotations

import errno
import logging
import os
import threading

from sgl_ext.memory.slab import Slab

AHEAD = 256 << 20
"""Bytes that are backed beyond the highest block in use."""
STEP = 64 << 20
"""Bytes backed by one call: 0.11 ms a huge page, where calls for single ones take 5 ms each."""
_IN_USE = errno.EAGAIN, errno.EBUSY
_PAUSE_S = 0.05
_ATTEMPTS = 200
"""To back a step of which a page is in use at each moment (or pinned for good)."""

logger = logging.getLogger(__name__)


class Backing:
    """Backs ``slab`` up to :data:`AHEAD` bytes beyond what :meth:`need` has named.

    At most :data:`STEP` more than that is taken. If the kernel refuses huge pages, a warning says
    so, and what it refused is backed as it is written; a kernel that refuses the first ones is not
    asked again. Pages that are pinned for I/O cannot be backed any more: pin what is backed.
    """

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self._wanted = self._renewals = 0
        self._changed = threading.Condition()
        self._closed = False
        self.backed = 0
        """Blocks from the first one on that have huge pages, or were refused them."""
        self.refused = False
        """Whether the kernel refused some."""
        self._thread = threading.Thread(target=self._run, name="sgl_ext-backing", daemon=True)
        self._thread.start()
        self.need(1)

    def need(self, end: int) -> None:
        """Blocks below ``end`` are about to be used. Returns at once.

        To be called by the thread that puts memory into the slab's mapping: what lies there now has
        no huge pages yet.
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
        """Stops; returns whether the thread has ended within ``timeout`` seconds."""
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
                if self._renewals == renewals:  # nothing has been put there meanwhile
                    self.backed = end

    def _back(self, start: int, end: int) -> int:
        """As ``Slab.back_with_huge_pages``; waits for pages in use."""
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
