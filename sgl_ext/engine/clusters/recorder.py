"""Recorder of the KV and the queries of contexts that are to be stored.

Each recorded request writes a part of its context's record when it ends. From a device, queries are
copied to pinned memory without waiting, each layer's when it is computed. The KV is copied to
pageable memory when the request has ended, which blocks the scheduler's thread: the slots are freed
afterwards.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_ext.clusters.geometry import Geometry
from sgl_ext.clusters.paths import (
    RESERVED,
    failed_file,
    part_file,
    record_folder,
    reserve_file,
    scratch_of,
)
from sgl_ext.clusters.recorded import Part
from sgl_ext.engine.clusters.parameters import IsRecorded
from sgl_ext.engine.kv.indices import Download
from sgl_ext.errors import ExtError
from sgl_ext.memory.slab import Slab
from sgl_ext.memory.streams import Streams

logger = logging.getLogger(__name__)

_TOKENS = 4096
"""Maximum number of tokens of a layer whose KV is gathered on a device at a time."""


@dataclass
class _Recording:
    """Request that is recorded, and the queries that are recorded so far."""

    asked: IsRecorded
    seen: list[int] = field(default_factory=list)
    """Number of the context's tokens that each query sees."""
    layers: list[list[Download]] = field(default_factory=list)
    spoilt: bool = False
    """True if some queries could not be recorded."""


class Recorder:
    """Recorder of one scheduler process. Only the scheduler's thread calls it.

    Args:
        slab: memory that holds the KV.
        geometry: geometry of the model.
        directory: folder of the records.
        streams: streams of the device that has the slab.
    """

    def __init__(self, slab: Slab, geometry: Geometry, directory: Path, streams: Streams) -> None:
        self._slab, self._geometry, self._directory = slab, geometry, directory
        self._streams = streams
        self.stale = ""
        """Reason why nothing can be recorded any more; empty if contexts can be recorded."""
        self._requests: dict[str, _Recording] = {}
        self._taking: list[tuple[_Recording, int, int]] = []
        self._threads = ThreadPoolExecutor(1, "sgl_ext-recorder")

    def ask(self, rid: str, asked: IsRecorded) -> None:
        """Registers a request that is recorded, or begins again with one that was interrupted.

        Raises:
            ExtError: nothing can be recorded any more.
        """
        if self.stale:
            raise ExtError(self.stale)
        self._requests[rid] = _Recording(asked)

    def __contains__(self, rid: str) -> bool:
        """Returns whether a request is recorded."""
        return rid in self._requests

    @property
    def any(self) -> bool:
        """True if any request is recorded."""
        return bool(self._requests)

    @property
    def taking(self) -> bool:
        """True if queries of the current forward are recorded."""
        return bool(self._taking)

    def passing(self, rid: str, *, ended: bool) -> bool:
        """Returns whether the KV of a request is recorded and not to be cached now.

        Args:
            ended: whether the request has ended.
        """
        found = self._requests.get(rid)
        return found is not None and not (found.asked.keep and ended)

    def begin(self, rids: Sequence[str], contexts: Sequence[int], lengths: Sequence[int]) -> None:
        """Determines which queries of the next forward are recorded.

        Args:
            rids: request ids of the rows.
            contexts: number of tokens of each row's request, the new ones included.
            lengths: number of new tokens of each row.
        """
        self._taking = []
        for one, first, end, at in self._recorded(rids, contexts, lengths):
            one.seen += [min(token + 1, one.asked.tokens) for token in range(first, end)]
            self._taking.append((one, at, at + end - first))

    def go_on(self, rids: Sequence[str], contexts: Sequence[int], lengths: Sequence[int]) -> None:
        """Determines which queries of the forward are recorded from its next layer on.

        The rows of recorded requests are those of the first layers, but the rows of others differ.

        Args:
            rids: see :meth:`begin`.
            contexts: see :meth:`begin`.
            lengths: see :meth:`begin`.
        """
        taking = [one for one, *_ in self._taking]
        self._taking = [
            (one, at, at + end - first)
            for one, first, end, at in self._recorded(rids, contexts, lengths)
            if any(one is each for each in taking)  # else a layer's queries could not be recorded
        ]

    def _recorded(
        self, rids: Sequence[str], contexts: Sequence[int], lengths: Sequence[int]
    ) -> Iterator[tuple[_Recording, int, int, int]]:
        """Yields the recorded tokens of each row: their request, the first one and the end in the
        context and what follows it, and the index of the first one in the forward."""
        if not self._requests:
            return
        start = 0
        # Rows of beams come last, and have no id.
        for rid, length, new in zip(rids, contexts, lengths, strict=False):
            if (one := self._requests.get(rid)) is not None:
                asked, end = one.asked, one.asked.start + length
                # The last tokens of the context, and all tokens behind it.
                first = max(end - new, asked.tokens - asked.queries)
                if first < end:
                    yield one, first, end, start + first - (end - new)
            start += new

    def take(self, layer: int, query: torch.Tensor) -> None:
        """Records queries of a layer of the forward.

        Args:
            query: queries of all rows, ``[tokens, heads, head_dim]``.
        """
        try:
            for one, start, end in self._taking:
                while len(one.layers) <= layer:
                    one.layers.append([])
                # A view would keep the queries of all rows until the part is written.
                rows = query[start:end].to(torch.float32, copy=query.is_cpu)
                one.layers[layer].append(Download(rows))
        except RuntimeError:  # for example, too little memory
            logger.exception("the queries of a context cannot be recorded")
            for one, *_ in self._taking:
                one.spoilt = True
            self._taking = []

    def ended(self, rid: str, tokens: Sequence[int], slots: torch.Tensor) -> bool:
        """Forgets a request that was computed to its end, and writes its part of the record.

        The part is written in a thread.

        Args:
            tokens: token ids of the prompt.
            slots: slots of these tokens.

        Returns:
            Whether the part is written; False also if there is too little memory for a copy of the
            KV.
        """
        if (one := self._requests.pop(rid, None)) is None or one.spoilt:
            return False
        asked = one.asked
        end = min(asked.start + len(tokens), asked.tokens)
        if len(one.seen) < end - max(asked.start, asked.tokens - asked.queries):
            return False  # queries of the context were lost when the request was preempted
        context = np.array(tokens if asked.kv else (), np.int32)
        # The slots are freed when this method returns; only the KV must be copied before.
        try:
            kv = self._kv(slots[: len(context)])
        except RuntimeError:
            logger.exception("the KV of a context cannot be recorded")
            return False
        self._threads.submit(self._write, one, context, kv)
        return True

    def interrupted(self, rid: str) -> None:
        """Forgets the queries of a request whose KV is freed before its end."""
        if (one := self._requests.get(rid)) is not None:
            self._requests[rid] = _Recording(one.asked)
            self._taking = [each for each in self._taking if each[0] is not one]

    def keep(self, rids: Collection[str]) -> None:
        """Forgets all requests but ``rids``, because they have ended."""
        self._requests = {rid: one for rid, one in self._requests.items() if rid in rids}

    def _kv(self, slots: torch.Tensor) -> NDArray[np.uint8]:
        """Returns a copy of the KV in ``slots``, uint8 ``[layers, tokens, entry_bytes]``."""
        tokens = self._slab.tensor().flatten(0, 1)
        shape = (tokens.shape[1], len(slots), *tokens.shape[2:])
        found = torch.empty(shape, dtype=tokens.dtype)
        self._streams.follow()  # an overlapped forward may be the one that has written the KV
        for layer, kv in enumerate(found):
            if slots.is_cpu:
                torch.index_select(tokens[:, layer], 0, slots, out=kv)
                continue
            for into, some in zip(kv.split(_TOKENS), slots.split(_TOKENS), strict=True):
                into.copy_(tokens[:, layer].index_select(0, some))
        bytes_: NDArray[np.uint8] = found.flatten(2).view(torch.uint8).numpy()
        return bytes_

    def _write(self, one: _Recording, tokens: NDArray[np.int32], kv: NDArray[np.uint8]) -> None:
        asked, geometry = one.asked, self._geometry
        folder = record_folder(self._directory, asked.id)
        path = part_file(folder, asked.part)
        scratch = scratch_of(path)
        needed = kv.nbytes
        try:
            if path.exists():  # of a request that was cancelled too late; it may be read already
                return
            queries = np.empty((geometry.layers, 0, geometry.heads, geometry.head_dim), np.float32)
            if one.layers:
                queries = torch.stack(
                    [torch.cat([each.tensor() for each in layer]) for layer in one.layers]
                ).numpy()
            needed += queries.nbytes
            part = Part(
                geometry, asked.start, tokens, [*kv], queries, np.array(one.seen, np.int64),
                asked.salt,
            )  # fmt: skip
            part.save(scratch)
            scratch.rename(path)
        except Exception as error:  # an exception in this thread would be lost
            if not folder.exists():
                return  # nobody waits for the record any more
            with suppress(OSError):
                scratch.unlink(missing_ok=True)
            why = self._why(error, needed)
            logger.error(
                "cannot write the record of a context: %s", why,
                exc_info=not isinstance(error, OSError),
            )  # fmt: skip
            self._tell(path, why)

    def _tell(self, part: Path, why: str) -> None:
        """Says why a part is missing, in the space that was reserved for it."""
        reserve = reserve_file(part.parent)
        try:
            with suppress(FileNotFoundError):  # another part has used it
                text = why.encode()[:RESERVED]
                with reserve.open("r+b") as file:
                    file.write(text)
                    file.truncate(len(text))
                reserve.rename(failed_file(part))
        except OSError as error:
            logger.error("cannot say why a part of a record is missing: %s", error.strerror)

    def _why(self, error: Exception, needed: int) -> str:
        if not isinstance(error, OSError):
            return f"{type(error).__name__}; see the server's log"
        try:
            free = f"{shutil.disk_usage(self._directory).free:,} B are"
        except OSError:
            free = "it is not known how much is"
        return (
            f"{error.strerror or error}: the record is written to device 0 first and this part "
            f"needs {needed:,} B more, but {free} free; delete contexts, or configure a larger "
            "first directory"
        )
