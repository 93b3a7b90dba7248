"""What a layer's profile says: which entries are activated together, and codes of their keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sgl_ext._native import _clusters
from sgl_ext.clusters.activations import Activations, attention_mass, log_sum
from sgl_ext.clusters.codes import Codes
from sgl_ext.clusters.recorded import Recorded, as_float32
from sgl_ext.errors import ExtError

_QUERIES = 64
"""Of the profile at a time: each has a logit of every entry."""
_WINDOW = 8192
"""Entries that a block's members are looked for among."""


@dataclass(frozen=True)
class Options:
    """How a context is stored.

    Attributes:
        sinks: first tokens that stay in memory.
        window: last tokens that do, and up to a block more, so that all blocks are full.
        subspaces: bytes that are kept of a key, of each KV head.
        activated: share of the entries that count as activated by a query.
        threads: layers that are worked on at once.
    """

    sinks: int = 4
    window: int = 256
    subspaces: int = 8
    activated: float = 0.1
    threads: int = 1

    def fitted(self, tokens: int, block: int) -> Options:
        """With the window of a context of so many tokens.

        Args:
            block: entries of a block.

        Raises:
            ExtError: the context is too short to be stored.
        """
        middle = (tokens - self.sinks - self.window) // block * block
        if middle < 1:
            raise ExtError(
                f"the context has {tokens} tokens, of which {self.sinks + self.window} stay in "
                "memory: store a longer one"
            )
        return replace(self, window=tokens - self.sinks - middle)


@dataclass(frozen=True)
class Profile:
    """Of a layer.

    Attributes:
        activations: of the entries of the middle, in the order of the text.
        received: ``[entries]``: the attention that the queries have paid to each.
        order: ``[entries]`` int32: those that are activated together follow each other.
        codes: of their keys, in that order.
    """

    activations: Activations
    received: NDArray[np.float32]
    order: NDArray[np.int32]
    codes: Codes

    @classmethod
    def of(cls, recorded: Recorded, layer: int, options: Options, block: int) -> Profile:
        """What a context's record says.

        Args:
            options: fitted to the context.
            block: entries that are stored together.

        Raises:
            ExtError: it has keys, values or queries that are no numbers.
        """
        keys, queries = recorded.keys(layer), recorded.queries[layer]
        kv = as_float32(recorded.kv[layer], recorded.geometry.dtype)
        if not (np.isfinite(kv).all() and np.isfinite(queries).all()):
            raise ExtError(
                f"layer {layer} of the context has keys, values or queries that are no numbers"
            )
        middle = keys[options.sinks : len(keys) - options.window]
        received = np.zeros(len(middle), np.float32)

        def masses() -> Iterator[NDArray[np.float32]]:
            for mass in _masses(recorded, layer, options, keys):
                np.add(received, mass.sum(axis=0), out=received)
                yield mass

        activations = Activations.of(masses(), options.activated)
        order = _clusters.blocks(activations.bits, block, max(_WINDOW, block))
        codes = Codes.of(middle[order], queries, options.subspaces, seed=layer)
        return cls(activations, received, order, codes)

    def often(self, block: int) -> NDArray[np.int64]:
        """``[blocks]``: how many queries have activated any of a block's entries."""
        of_blocks = self.activations.bits[self.order].reshape(-1, block, self.activations.words)
        bits = np.bitwise_or.reduce(of_blocks, axis=1)
        return Activations(bits, self.activations.queries).frequency


def _masses(
    recorded: Recorded, layer: int, options: Options, keys: NDArray[np.float32]
) -> Iterator[NDArray[np.float32]]:
    """Attention of the profile's queries to the middle, a few queries at a time.

    What is in a query's own window when it is asked is not counted: that is always in memory.
    """
    sinks, end = options.sinks, len(keys) - options.window
    scale, resident = recorded.geometry.scale, np.concatenate([keys[:sinks], keys[end:]])
    for start in range(0, len(recorded.seen), _QUERIES):
        queries = recorded.queries[layer, start : start + _QUERIES]
        seen = recorded.seen[start : start + _QUERIES]
        # Of the context's own window a query sees what comes before it.
        near = np.minimum(seen, sinks) + np.maximum(seen - end, 0)
        beside = log_sum(queries, resident, scale, near)
        yield attention_mass(
            queries, keys[sinks:end], scale, beside,
            seen=np.clip(seen - sinks, 0, end - sinks),
            counted=np.clip(seen - options.window - sinks, 0, end - sinks),
        )  # fmt: skip
