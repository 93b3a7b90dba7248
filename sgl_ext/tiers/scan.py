"""Recovery of an SSD tier's index from its files: reads 4 KiB of each slot, not the pages."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from sgl_ext.errors import ExtError
from sgl_ext.memory.transfer import Priority, Ticket, TransferEngine, TransferError
from sgl_ext.tiers.arena import TRAILER, Arena, Key, valid
from sgl_ext.tiers.layer_major import ALIGNMENT
from sgl_ext.tiers.volume import Volume

_SLOTS = 1024
"""Slots that are read at once; bounds the memory of a scan."""

_DIVIDED = 256
"""Batches of one volume that are divided after an error; finds a few damaged slots, 10 batches for
each. A device on which everything fails is not asked for each slot."""

logger = logging.getLogger(__name__)


def restore(
    volumes: Sequence[Volume], arena: Arena, engine: TransferEngine, deadline: float
) -> int:
    """Fills the indexes of ``volumes`` in the order of the sequence numbers, lowest first.

    If a key is in several slots, the slot with the highest sequence number counts.

    Returns:
        The next sequence number.

    Raises:
        ExtError: A device has made no progress for ``deadline`` seconds.
    """
    keys: list[Key] = []
    owners, slots, sequences = [], [], []
    for number, volume in enumerate(volumes):
        for where, trailers in _scan(volume, arena, engine, deadline):
            owners.append(np.full(len(where), number, np.int16))
            slots.append(where)
            keys += trailers["key"].tolist()
            sequences.append(trailers["sequence"])
    if not keys:
        return 1
    owner, slot, sequence = (np.concatenate(parts) for parts in (owners, slots, sequences))
    seen: set[Key] = set()
    found: list[list[tuple[Key, int]]] = [[] for _ in volumes]
    latest_first = np.argsort(sequence, kind="stable")[::-1]
    for row in latest_first.tolist():
        if keys[row] not in seen:
            seen.add(keys[row])
            found[owner[row]].append((keys[row], int(slot[row])))
    for volume, pages in zip(volumes, found, strict=True):
        volume.slots.restore(reversed(pages), volume.present)
    return int(sequence[latest_first[0]]) + 1


def _scan(
    volume: Volume, arena: Arena, engine: TransferEngine, deadline: float
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.void]]]:
    """Yields the slots with a valid trailer, and these trailers, batch by batch.

    A batch that cannot be read is divided, until the slots that cannot be read are found or
    :data:`_DIVIDED` batches have been divided. What is left unread is logged and skipped.
    """
    mapping = mmap.mmap(-1, _SLOTS * ALIGNMENT)
    trailers = np.ndarray((_SLOTS,), TRAILER, mapping, ALIGNMENT - TRAILER.itemsize, (ALIGNMENT,))
    address = np.frombuffer(mapping, np.uint8).ctypes.data
    region = engine.register(address, len(mapping), owner=mapping)
    count, divided = volume.present, 0
    batches = [(first, min(_SLOTS, count - first)) for first in range(0, count, _SLOTS)]
    batches.reverse()
    try:
        while batches:
            first, rows = batches.pop()
            sectors = volume.file.base + (first + 1) * arena.stride - ALIGNMENT
            copies = [(sectors, address, ALIGNMENT, rows, arena.stride, ALIGNMENT)]
            ticket = engine.submit(copies, volume.lane, Priority.NORMAL)
            try:
                _wait(ticket, volume, deadline)
            except TransferError as error:
                if rows > 1 and divided < _DIVIDED:
                    divided += 1
                    half = rows // 2
                    batches += [(first + half, rows - half), (first, half)]
                    continue
                logger.warning("%s: %d pages are lost: %s", volume.directory, rows, error)
                continue
            found = trailers[:rows]
            good = np.flatnonzero(valid(found, arena.layout, arena.digest))
            yield first + good, found[good]
    finally:
        with suppress(ExtError):  # I/O that hangs may still write there; the engine then keeps it
            region.unregister()


def _wait(ticket: Ticket, volume: Volume, deadline: float) -> None:
    before = -1
    while ticket.bytes_done > before:
        before = ticket.bytes_done
        with suppress(TimeoutError):
            ticket.wait(deadline)
            return
    ticket.cancel()
    raise ExtError(
        f"{volume.directory} has not responded for {deadline:g} s; check the device, or remove "
        "the directory from tiers.ssd.directories"
    )
