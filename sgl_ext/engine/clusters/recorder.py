"""Recorder of the KV and the queries of contexts that are to be stored.

From a device, queries are copied to pinned memory without waiting, each layer's when it is
computed. The KV is copied to pageable memory when the last prompt of the context has ended, which
blocks the scheduler's thread: the slots are freed afterwards.
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

from sgl_ext.clusters.files import failed_file, recorded_file, scratch_of
from sgl_ext.clusters.recorded import Geometry, Recorded
from sgl_ext.engine.clusters.parameters import IsRecorded
from sgl_ext.engine.kv.indices import Download
from sgl_ext.errors import ExtError
from sgl_ext.memory.slab import Slab
from sgl_ext.memory.streams import Streams

logger = logging.getLogger(__name__)

_TOKENS = 4096
"""Maximum number of tokens of a layer whose KV is gathered on a device at a time."""


@dataclass
class _Queries:
    """Queries of a context that are recorded so far."""

    seen: list[int] = field(default_factory=list)
    """Number of the context's tokens that each query sees."""
    layers: list[list[Download]] = field(default_factory=list)


class Recorder:
    """Recorder of one scheduler process. Only the scheduler's thread calls it.

    Args:
        slab: memory that holds the KV.
        geometry: geometry of the model.
        directory: folder that records are written to.
        streams: streams of the device that has the slab.
    """

    def __init__(self, slab: Slab, geometry: Geometry, directory: Path, streams: Streams) -> None:
        self._slab, self._geometry, self._directory = slab, geometry, directory
        self._streams = streams
        self.stale = ""
        """Reason why nothing can be recorded any more; empty if contexts can be recorded."""
        self._asked: dict[str, IsRecorded] = {}
        self._spoilt: set[str] = set()
        self._queries: dict[str, _Queries] = {}
        self._taking: list[tuple[str, _Queries, int, int]] = []
        self._threads = ThreadPoolExecutor(1, "sgl_ext-recorder")

    def ask(self, rid: str, asked: IsRecorded) -> None:
        """Registers a request whose prompt begins with a context that is recorded.

        Raises:
            ExtError: nothing can be recorded any more.
        """
        if self.stale:
            raise ExtError(self.stale)
        if asked.id not in self._queries and asked.queries:
            # Contexts are stored one at a time, so all others will not be completed.
            self._queries, self._spoilt = {}, set()
        self._asked[rid] = asked

    def __contains__(self, rid: str) -> bool:
        """Returns whether a request is recorded."""
        return rid in self._asked

    @property
    def any(self) -> bool:
        """True if any request is recorded."""
        return bool(self._asked)

    @property
    def taking(self) -> bool:
        """True if queries of the current forward are recorded."""
        return bool(self._taking)

    def begin(self, rids: Sequence[str], contexts: Sequence[int], lengths: Sequence[int]) -> None:
        """Determines which queries of the next forward are recorded.

        Args:
            rids: request ids of the rows.
            contexts: number of tokens of each row's request, the new ones included.
            lengths: number of new tokens of each row.
        """
        self._taking = []
        for asked, first, end, at in self._recorded(rids, contexts, lengths):
            queries = self._queries.setdefault(asked.id, _Queries())
            queries.seen += [min(token + 1, asked.tokens) for token in range(first, end)]
            self._taking.append((asked.id, queries, at, at + end - first))

    def go_on(self, rids: Sequence[str], contexts: Sequence[int], lengths: Sequence[int]) -> None:
        """Determines which queries of the forward are recorded from its next layer on.

        The rows of recorded requests are those of the first layers, but the rows of others differ.

        Args:
            rids: see :meth:`begin`.
            contexts: see :meth:`begin`.
            lengths: see :meth:`begin`.
        """
        taking = {id_ for id_, *_ in self._taking}
        self._taking = [
            (asked.id, self._queries[asked.id], at, at + end - first)
            for asked, first, end, at in self._recorded(rids, contexts, lengths)
            if asked.id in taking  # else a layer's queries could not be recorded
        ]

    def _recorded(
        self, rids: Sequence[str], contexts: Sequence[int], lengths: Sequence[int]
    ) -> Iterator[tuple[IsRecorded, int, int, int]]:
        """Yields the recorded tokens of each row: their request, the first one and the end in its
        prompt, and the index of the first one in the forward."""
        if not self._asked:
            return
        start = 0
        # Rows of beams come last, and have no id.
        for rid, end, new in zip(rids, contexts, lengths, strict=False):
            if (asked := self._asked.get(rid)) is not None:
                # The last tokens of the context, and all tokens behind it.
                first = max(end - new, asked.tokens - asked.queries)
                if first < end:
                    yield asked, first, end, start + first - (end - new)
            start += new

    def take(self, layer: int, query: torch.Tensor) -> None:
        """Records queries of a layer of the forward.

        Args:
            query: queries of all rows, ``[tokens, heads, head_dim]``.
        """
        try:
            for _, queries, start, end in self._taking:
                while len(queries.layers) <= layer:
                    queries.layers.append([])
                queries.layers[layer].append(Download(query[start:end].float()))
        except RuntimeError:  # for example, too little memory
            logger.exception("the queries of a context cannot be recorded")
            self._spoilt.update(id_ for id_, *_ in self._taking)
            self._taking = []

    def ended(self, rid: str, tokens: Sequence[int], slots: torch.Tensor | None) -> int:
        """Forgets a request that has ended, and writes the record after the context's last prompt.

        The record is written in a thread, and only if all prompts of the context were computed.

        Args:
            tokens: token ids of the prompt.
            slots: slots of these tokens; None if the request was not computed to its end.

        Returns:
            The number of queries in the record that is written; 0 if none is, also because there
            is too little memory for a copy of the KV.
        """
        if (asked := self._asked.pop(rid, None)) is None:
            return 0
        if slots is None:
            self._queries.pop(asked.id, None)  # some queries would be missing or recorded twice
            self._spoilt.add(asked.id)
        elif asked.id in self._spoilt:
            self._queries.pop(asked.id, None)
        elif asked.last and (queries := self._queries.pop(asked.id, None)) is not None:
            # The slots are freed when this method returns; only the KV must be copied before.
            try:
                kv = self._kv(slots[: asked.tokens])
            except RuntimeError:
                logger.exception("the KV of a context cannot be recorded")
                return 0
            context = np.array(tokens[: asked.tokens], np.int32)
            self._threads.submit(self._write, asked, context, kv, queries)
            return len(queries.seen)
        return 0

    def keep(self, rids: Collection[str]) -> None:
        """Forgets all requests but ``rids``, because they have ended."""
        for rid in self._asked.keys() - set(rids):
            self.ended(rid, (), None)

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

    def _write(
        self,
        asked: IsRecorded,
        tokens: NDArray[np.int32],
        kv: NDArray[np.uint8],
        queries: _Queries,
    ) -> None:
        path = recorded_file(self._directory, asked.id)
        scratch = scratch_of(path)
        try:
            layers = torch.stack(
                [torch.cat([one.tensor() for one in each]) for each in queries.layers]
            ).numpy()
            seen = np.array(queries.seen, np.int64)
            Recorded(self._geometry, tokens, kv, layers, seen, asked.salt).save(scratch)
            scratch.rename(path)
        except Exception as error:  # an exception in this thread would be lost
            logger.exception("cannot write the record of a context")
            scratch.unlink(missing_ok=True)
            with suppress(OSError):
                failed_file(self._directory, asked.id).write_text(self._why(error, kv.nbytes))

    def _why(self, error: Exception, needed: int) -> str:
        if not isinstance(error, OSError):
            return f"{type(error).__name__}; see the server's log"
        free = shutil.disk_usage(self._directory).free
        return (
            f"{error.strerror or error}: the record is written to device 0 first and needs more "
            f"than {needed:,} B, but {free:,} B are free; delete contexts, or configure a larger "
            "first directory"
        )
