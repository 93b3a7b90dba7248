"""Tokens of a chunk whose values depend most on what precedes it."""

from __future__ import annotations

import torch

from sgl_ext.chunks.composition import Selection
from sgl_ext.engine.chunks.search import ChunkSearch, Wanted
from sgl_ext.engine.core.sglang_types import KVPool, Req
from sgl_ext.engine.kv.indices import on_host
from sgl_ext.memory.streams import Streams


class ChangedValues:
    """Comparison of the values of two preparations of a chunk, on behalf of one scheduler.

    Args:
        search: finds the KV of chunks.
        pool: SGLang's KV pool.
        layers: number of its layers.
        streams: streams of the device that has the pool.
    """

    def __init__(self, search: ChunkSearch, pool: KVPool, layers: int, streams: Streams) -> None:
        self._search = search
        self._pool = pool
        self._layers = layers
        self._streams = streams

    def select(self, req: Req, selection: Selection) -> list[int] | None:
        """Returns the offsets of the chunk's tokens whose values differ most, ascending.

        The values are those of the two preparations that ``selection`` names. Returns None if KV of
        either is no longer on the device.
        """
        start = len(selection.preparation)
        tokens = req.origin_input_ids[start : start + selection.length]
        ways = []
        for before in (selection.preparation, selection.other):
            wanted = Wanted(selection.namespace, req.cache_salt, before, tokens)
            found = self._search.find(wanted)
            self._search.let_go(found)  # nothing is evicted before this method returns
            if len(found.slots) < len(tokens):
                return None
            ways.append(found.slots)
        one, other = ways
        self._streams.synchronize()  # a forward in flight may write KV that the tree has already
        changed = torch.zeros(len(tokens), device=one.device)
        for layer in range(self._layers):
            values = self._pool.get_value_buffer(layer)
            here, there = values[one].float(), values[other].float()
            changed += (here - there).square().sum((1, 2)) / there.square().sum((1, 2))
        most = min(selection.count, len(tokens))
        chosen: list[int] = on_host(changed.topk(most).indices.sort().values).tolist()
        return chosen
