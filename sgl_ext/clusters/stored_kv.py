"""KV of a stored context in the order of the text, for a context that continues it."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from sgl_ext._native import _clusters
from sgl_ext.clusters.stored import Layer, Stored
from sgl_ext.errors import ExtError
from sgl_ext.own_files import open_own

_READ = 4096
"""Blocks that are read at a time."""


class StoredKV:
    """KV of a stored context. Each layer is read when it is used."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored

    def read(self, layer: int, into: NDArray[np.uint8]) -> None:
        """Reads the KV of a layer, uint8 ``[tokens, entry_bytes]``.

        Raises:
            ExtError: A file cannot be read, or blocks are damaged, and there are no copies of them.
        """
        about, of = self.stored.about, self.stored.layers[layer]
        blocks = about.blocks
        into[: about.sinks] = of.resident[: about.sinks]
        into[about.sinks + blocks.entries :] = of.resident[about.sinks :]
        middle = into[about.sinks : about.sinks + blocks.entries]
        used = blocks.block * blocks.entry_bytes
        for start in range(0, blocks.blocks, _READ):
            numbers = np.arange(start, min(start + _READ, blocks.blocks))
            entries = of.order.reshape(-1, blocks.block)[numbers].reshape(-1)
            read = self._blocks(layer, of, numbers)[:, :used]
            middle[entries] = read.reshape(len(entries), -1)

    def _blocks(self, layer: int, of: Layer, numbers: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Returns verified blocks of a layer, uint8 ``[blocks, block_bytes]``."""
        blocks = self.stored.about.blocks
        found = np.zeros((len(numbers), blocks.block_bytes), np.uint8)
        wrong, failed = np.ones(len(numbers), bool), ""
        for copy in range(blocks.copies):
            file, offset = blocks.place(layer, numbers[wrong], copy)
            places = np.flatnonzero(wrong)
            for each in np.unique(file):
                mine = file == each
                try:
                    found[places[mine]] = self._read(int(each), offset[mine])
                except OSError as error:  # the checksums differ then
                    failed = error.strerror or str(error)
            wrong = _clusters.checksums(found) != of.sums[numbers]
            if not wrong.any():
                return found
        what = f"cannot be read: {failed}" if failed else "are damaged"
        raise ExtError(
            f"context {self.stored.name}: {wrong.sum()} blocks of layer {layer} {what}; store it "
            "again"
        )

    def _read(self, file: int, offsets: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Reads blocks of a file, from the first to the last of ``offsets`` at once."""
        size = self.stored.about.blocks.block_bytes
        first = int(offsets.min())
        found = np.zeros(((int(offsets.max()) - first) // size + 1, size), np.uint8)
        left, at = found.reshape(-1), first
        fd = open_own(self.stored.files[file], os.O_RDONLY)
        try:
            while len(left) and (count := os.preadv(fd, [left.data], at)):
                left, at = left[count:], at + count
        finally:
            os.close(fd)
        wanted: NDArray[np.uint8] = found[(offsets - first) // size]
        return wanted
