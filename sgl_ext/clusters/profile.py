"""Profile of a layer: entries that are activated together, and codes of their keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sgl_ext._native import _clusters
from sgl_ext.clusters.activations import Activations, attention_mass, log_sum
from sgl_ext.clusters.codes import Codes
from sgl_ext.clusters.geometry import as_float32
from sgl_ext.clusters.recorded import RecordedLayer
from sgl_ext.clusters.stored import Layer
from sgl_ext.errors import ExtError

_QUERIES = 64
"""Queries of the profile that are processed at a time; each has a logit for every entry."""
_WINDOW = 8192
"""Entries among which the members of a block are searched."""


@dataclass(frozen=True)
class Options:
    """Options for storing a context.

    Attributes:
        sinks: Number of first tokens that stay in memory.
        window: Number of last tokens that stay in memory. :meth:`fitted` extends it by less than a
            block, so that all blocks are full.
        subspaces: Bytes of the code of a key, for each KV head.
        activated: Share of the entries that count as activated by a query.
        threads: Layers that are processed in parallel.
        order: Order in which new entries are stored. ``activated``: those that are activated
            together share a block; ``text``: blocks of consecutive tokens, for comparison only.
        block: Entries of a block of a context that continues no other; 0 for as many as 4 KiB hold.
    """

    sinks: int = 4
    window: int = 256
    subspaces: int = 8
    activated: float = 0.1
    threads: int = 1
    order: Literal["activated", "text"] = "activated"
    block: int = 0

    def fitted(self, tokens: int, block: int) -> Options:
        """Returns the options with the window extended for a context of ``tokens`` tokens.

        Args:
            block: Entries of a block.

        Raises:
            ExtError: The context is too short to be stored.
        """
        middle = (tokens - self.sinks - self.window) // block * block
        if middle < 1:
            raise ExtError(
                f"the context has {tokens} tokens, of which {self.sinks + self.window} stay in "
                "memory, so that no block is left to store; store a longer context"
            )
        return replace(self, window=tokens - self.sinks - middle)


@dataclass(frozen=True)
class Profile:
    """Profile of a layer's entries between the sinks and the window.

    Attributes:
        activations: Activations of the new entries, in the order of the text.
        order: All entries in the order of storage, int32 ``[entries]``; entries that are activated
            together are adjacent, unless :attr:`Options.order` is ``text``.
        codes: Codes of the keys, in the order of storage.
    """

    activations: Activations
    order: NDArray[np.int32]
    codes: Codes

    @classmethod
    def of(
        cls,
        layer: RecordedLayer,
        options: Options,
        block: int,
        base: Layer | None = None,
        *,
        fit: bool = True,
    ) -> Profile:
        """Computes the profile of a layer.

        Args:
            options: Options that are fitted to the context.
            block: Entries of a block.
            base: The same layer of a stored context that this one begins with, and that has fewer
                entries. Its order is kept, and the new entries share blocks with each other (cf.
                Eq. 9, by which they would join clusters).
            fit: False to keep the codes of ``base``, and encode new keys with its centroids.

        Raises:
            ExtError: The layer has keys, values or queries that are not finite.
        """
        keys, queries = layer.keys, layer.queries
        if not (_finite(layer) and np.isfinite(queries).all()):
            raise ExtError(
                f"layer {layer.number} of the context has keys, values or queries that are not "
                "finite; serve the model with another --dtype"
            )
        middle = keys[options.sinks : len(keys) - options.window]
        known = 0 if base is None else len(base.order)
        masses = (mass[:, known:] for mass in _masses(layer, options))
        activations = Activations.of(masses, options.activated)
        if options.order == "text":
            order = np.arange(known, known + len(activations.bits), dtype=np.int32)
        else:
            order = known + _clusters.blocks(activations.bits, block, max(_WINDOW, block))
        if base is None:
            codes = Codes.of(middle[order], queries, options.subspaces, seed=layer.number)
        else:
            new, order = order, np.concatenate([base.order, order])
            codes = (
                base.codes.fitted_to(middle[order], seed=layer.number)
                if fit
                else base.codes.with_more(middle[new])
            )
        return cls(activations, order, codes)

    def often(self, block: int) -> NDArray[np.int64]:
        """Returns how many queries activate any entry of each new block, int64 ``[blocks]``."""
        new = len(self.activations.bits)
        order = self.order[-new:] - (len(self.order) - new)
        of_blocks = self.activations.bits[order].reshape(-1, block, self.activations.words)
        bits = np.bitwise_or.reduce(of_blocks, axis=1)
        return Activations(bits, self.activations.queries).frequency


def _finite(layer: RecordedLayer) -> bool:
    """Returns whether all keys and values are finite; converts some of them at a time."""
    return all(
        np.isfinite(as_float32(layer.kv[at : at + _WINDOW], layer.geometry.dtype)).all()
        for at in range(0, len(layer.kv), _WINDOW)
    )


def _masses(layer: RecordedLayer, options: Options) -> Iterator[NDArray[np.float32]]:
    """Yields the attention of the profile's queries to the entries between sinks and window.

    Each array has some queries, ``[queries, entries]``. Entries in the local window of a query at
    its own position are not counted, because the window is always in memory.
    """
    keys, scale = layer.keys, layer.geometry.scale
    sinks, end = options.sinks, len(keys) - options.window
    resident = np.concatenate([keys[:sinks], keys[end:]])
    for start in range(0, len(layer.seen), _QUERIES):
        queries = layer.queries[start : start + _QUERIES]
        seen = layer.seen[start : start + _QUERIES]
        # A query sees the part of the context's window that comes before it.
        near = np.minimum(seen, sinks) + np.maximum(seen - end, 0)
        beside = log_sum(queries, resident, scale, near)
        yield attention_mass(
            queries, keys[sinks:end], scale, beside,
            seen=np.clip(seen - sinks, 0, end - sinks),
            counted=np.clip(seen - options.window - sinks, 0, end - sinks),
        )  # fmt: skip
