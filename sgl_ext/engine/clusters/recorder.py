"""Writes down the KV and the queries of contexts that are to be stored."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection, Sequence
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
from sgl_ext.errors import ExtError
from sgl_ext.memory.slab import Slab

logger = logging.getLogger(__name__)


@dataclass
class _Queries:
    """What is known of a context so far."""

    seen: list[int] = field(default_factory=list)
    """Of each query, how many of the context's tokens it sees."""
    layers: list[list[torch.Tensor]] = field(default_factory=list)


class Recorder:
    """Of one scheduler process; its thread calls.

    Args:
        directory: where records are written.
    """

    def __init__(self, slab: Slab, geometry: Geometry, directory: Path) -> None:
        self._slab, self._geometry, self._directory = slab, geometry, directory
        self.stale = ""
        """Why nothing is recorded any more."""
        self._asked: dict[str, IsRecorded] = {}
        self._spoilt: set[str] = set()
        self._queries: dict[str, _Queries] = {}
        self._taking: list[tuple[_Queries, int, int]] = []
        self._threads = ThreadPoolExecutor(1, "sgl_ext-recorder")

    def ask(self, rid: str, asked: IsRecorded) -> None:
        """A request's prompt begins with a context that is recorded.

        Raises:
            ExtError: nothing is recorded any more.
        """
        if self.stale:
            raise ExtError(self.stale)
        if asked.id not in self._queries and asked.queries:
            # One is stored at a time: of all others nothing will come.
            self._queries, self._spoilt = {}, set()
        self._asked[rid] = asked

    @property
    def any(self) -> bool:
        """Whether any request is recorded."""
        return bool(self._asked)

    def begin(self, rids: Sequence[str], contexts: Sequence[int], lengths: Sequence[int]) -> None:
        """A forward is about to run.

        Args:
            rids: of the rows.
            contexts: tokens of each row, the new ones included.
            lengths: new tokens of each row.
        """
        self._taking = []
        if not self._asked:
            return
        start = 0
        # Rows of beams come last, and have no id.
        for rid, end, new in zip(rids, contexts, lengths, strict=False):
            if (asked := self._asked.get(rid)) is not None:
                # Its last tokens, and all behind it.
                first = max(end - new, asked.tokens - asked.queries)
                if first < end:
                    queries = self._queries.setdefault(asked.id, _Queries())
                    queries.seen += [min(at + 1, asked.tokens) for at in range(first, end)]
                    begin = start + first - (end - new)
                    self._taking.append((queries, begin, start + new))
            start += new

    def take(self, layer: int, query: torch.Tensor) -> None:
        """A layer of the forward has its queries: ``[tokens, heads, head_dim]``."""
        for queries, start, end in self._taking:
            while len(queries.layers) <= layer:
                queries.layers.append([])
            queries.layers[layer].append(query[start:end].float())

    def ended(self, rid: str, tokens: Sequence[int], slots: torch.Tensor | None) -> int:
        """A request has ended.

        Args:
            tokens: of its prompt.
            slots: of these; None if they have not been computed to the end.

        Returns:
            Queries of the context that is written down now; 0 if none is.
        """
        if (asked := self._asked.pop(rid, None)) is None:
            return 0
        if slots is None:
            self._queries.pop(asked.id, None)  # some would be missing, or come twice
            self._spoilt.add(asked.id)
        elif asked.id in self._spoilt:
            self._queries.pop(asked.id, None)
        elif asked.last and (queries := self._queries.pop(asked.id, None)) is not None:
            # The slots are given away when this returns; all else has time.
            kv = self._kv(slots[: asked.tokens])
            context = np.array(tokens[: asked.tokens], np.int32)
            self._threads.submit(self._write, asked, context, kv, queries)
            return len(queries.seen)
        return 0

    def keep(self, rids: Collection[str]) -> None:
        """All other requests have ended."""
        for rid in self._asked.keys() - set(rids):
            self.ended(rid, (), None)

    def _kv(self, slots: torch.Tensor) -> NDArray[np.uint8]:
        """``[layers, tokens, entry_bytes]``."""
        tokens = self._slab.tensor().flatten(0, 1)
        shape = (tokens.shape[1], len(slots), *tokens.shape[2:])
        found = torch.empty(shape, dtype=tokens.dtype)
        for layer, kv in enumerate(found):
            torch.index_select(tokens[:, layer], 0, slots, out=kv)
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
            layers = torch.stack([torch.cat(each) for each in queries.layers]).numpy()
            seen = np.array(queries.seen, np.int64)
            Recorded(self._geometry, tokens, kv, layers, seen, asked.salt).save(scratch)
            scratch.rename(path)
        except Exception as error:  # nobody looks at what this thread raises
            logger.exception("a context cannot be written down")
            scratch.unlink(missing_ok=True)
            with suppress(OSError):
                failed_file(self._directory, asked.id).write_text(self._why(error, kv.nbytes))

    def _why(self, error: Exception, needed: int) -> str:
        if not isinstance(error, OSError):
            return f"{type(error).__name__}; the server's log says more"
        free = shutil.disk_usage(self._directory).free
        return (
            f"{error.strerror or error}; it is first written as a whole onto device 0, "
            f"where it needs more than {needed:,} B and {free:,} B are free"
        )
