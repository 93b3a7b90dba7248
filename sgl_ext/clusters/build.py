"""Stores a context on devices: profiles its layers, orders their entries, writes blocks and index.

Takes seconds to minutes of computing, so it runs beside the server, in a process of its own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from sgl_ext._native import _clusters
from sgl_ext.clusters.activations import Activations, attention_mass, log_sum
from sgl_ext.clusters.arrays import Arrays, save
from sgl_ext.clusters.codes import Codes
from sgl_ext.clusters.placement import Blocks
from sgl_ext.clusters.recorded import Recorded
from sgl_ext.clusters.stored import About, block_file, digest, index_file
from sgl_ext.errors import ExtError


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


def build(
    recorded: Recorded,
    name: str,
    directories: Sequence[Path],
    options: Options | None = None,
    progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> None:
    """Writes blocks into all directories, and last the index into the first one.

    Args:
        name: of the context, as part of file names.
        directories: one for each device.
        progress: is told how many layers of how many are done.

    Raises:
        ExtError: the context is too short to be stored, or there is no room for it; nothing is
            left of it.
    """
    options = options or Options()
    geometry, tokens = recorded.geometry, len(recorded.tokens)
    block = Blocks.fitting(geometry.entry_bytes)
    middle = (tokens - options.sinks - options.window) // block * block
    if middle < 1:
        raise ExtError(
            f"the context has {tokens} tokens, of which {options.sinks + options.window} stay in "
            "memory: store a longer one"
        )
    options = replace(options, window=tokens - options.sinks - middle)
    blocks = Blocks(middle, geometry.entry_bytes, len(directories), geometry.layers)
    index = index_file(directories[0], name)
    scratch = index.with_suffix(".tmp")
    paths: list[Path] = []  # that are new
    try:
        with ExitStack() as opened:
            files: list[BinaryIO] = []
            for device, directory in enumerate(directories):
                path = block_file(directory, name, device)
                files.append(opened.enter_context(path.open("xb")))
                paths.append(path)
                _allocate(files[-1], path, blocks.file_bytes)
            layers: dict[int, Arrays] = {}
            with ThreadPoolExecutor(options.threads) as threads:
                work = {
                    threads.submit(_layer, recorded, layer, options, blocks, files): layer
                    for layer in range(geometry.layers)
                }
                for future in as_completed(work):
                    layers[work[future]] = future.result()
                    progress(len(layers), geometry.layers)
            for file in files:
                os.fsync(file.fileno())
        arrays = {key: np.stack([layers[at][key] for at in sorted(layers)]) for key in layers[0]}
        arrays["tokens"] = recorded.tokens
        digests = tuple(digest(path) for path in paths)
        save(arrays, scratch, About(geometry, tokens, options.sinks, options.window, digests))
        with scratch.open("rb") as file:
            os.fsync(file.fileno())
        scratch.rename(index)  # from here on it is stored
    except BaseException as error:
        for path in (scratch, *paths):
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ExtError(f"cannot store the context: {error}") from None
        raise


def _allocate(file: BinaryIO, path: Path, size: int) -> None:
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        free = shutil.disk_usage(path.parent).free
        raise ExtError(
            f"{path.parent} has no room for {size:,} B of the context, {free:,} B are free "
            f"({error.strerror}); delete contexts, or name larger or more directories"
        ) from None


def _layer(
    recorded: Recorded, layer: int, options: Options, blocks: Blocks, files: Sequence[BinaryIO]
) -> Arrays:
    """Writes the layer's blocks; returns what stays in memory of it."""
    keys = recorded.keys(layer)
    sinks, end = options.sinks, len(keys) - options.window
    queries, scale = recorded.queries[layer], recorded.geometry.scale
    resident = np.concatenate([keys[:sinks], keys[end:]])
    # A query sees the sinks, and of the window what comes before it.
    near = np.minimum(recorded.seen, sinks) + np.maximum(recorded.seen - end, 0)
    beside = log_sum(queries, resident, scale, near)
    middle = keys[sinks:end]
    seen = np.clip(recorded.seen - sinks, 0, len(middle))
    activations = Activations.of(
        attention_mass(queries, middle, scale, beside, seen), options.activated
    )
    order = _clusters.blocks(activations.bits, blocks.block)
    codes = Codes.of(middle[order], queries, options.subspaces, seed=layer)
    _write(recorded, layer, sinks + order, blocks, files)
    often = activations.frequency[order].reshape(-1, blocks.block)
    kv = recorded.kv[layer]
    return {
        "order": order,
        "often": often.sum(axis=1, dtype=np.int32),
        "codes": codes.codes,
        "centroids": codes.centroids,
        "projection": codes.projection,
        "resident": np.concatenate([kv[:sinks], kv[end:]]),
    }


def _write(
    recorded: Recorded,
    layer: int,
    tokens: NDArray[np.int32],
    blocks: Blocks,
    files: Sequence[BinaryIO],
) -> None:
    padded = np.zeros((blocks.blocks, blocks.block_bytes), np.uint8)
    entries = recorded.kv[layer, tokens].reshape(blocks.blocks, -1)
    padded[:, : entries.shape[1]] = entries
    device, offset = blocks.place(layer, np.arange(blocks.blocks))
    for at, file in enumerate(files):
        mine = np.flatnonzero(device == at)
        if len(mine):  # of one layer they follow each other
            os.pwrite(file.fileno(), padded[mine].data, int(offset[mine[0]]))
