"""Construction of a stored context: profiles layers, orders entries, writes blocks and index.

It takes seconds to minutes of computation, so it runs in a process separate from the server.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from sgl_ext._native import _clusters
from sgl_ext.clusters.arrays import Arrays, save
from sgl_ext.clusters.files import block_file, index_file, scratch_of
from sgl_ext.clusters.placement import Blocks
from sgl_ext.clusters.profile import Options, Profile
from sgl_ext.clusters.recorded import Recorded, RecordedLayer
from sgl_ext.clusters.stored import About, out_of_range
from sgl_ext.errors import ExtError, reason_of

_WRITTEN = 4096
"""Blocks that are written at a time."""


def build(
    recorded: Recorded,
    name: str,
    directories: Sequence[Path],
    options: Options | None = None,
    progress: Callable[[int, int], None] = lambda _done, _of: None,
    copies: int = 1,
) -> None:
    """Writes blocks into all directories, and last the index into the first ones.

    Args:
        name: Name of the context, which is part of the file names.
        directories: One directory for each device.
        copies: Copies of each block, on different devices.
        progress: Called with the number of finished layers and the number of all layers.

    Raises:
        ExtError: The context is too short to be stored, has numbers that are not finite, or a file
            cannot be written, for example for lack of room. No file of the context is left.
    """
    geometry, tokens = recorded.geometry, len(recorded.tokens)
    options = (options or Options()).fitted(tokens, Blocks.fitting(geometry.entry_bytes))
    middle = tokens - options.sinks - options.window
    blocks = Blocks(middle, geometry.entry_bytes, len(directories), geometry.layers, copies)
    indexes = [index_file(directory, name) for directory in directories[:copies]]
    new: list[Path] = []
    try:
        with ExitStack() as opened:
            files: list[BinaryIO] = []
            for device, directory in enumerate(directories):
                path = block_file(directory, name, device)
                files.append(opened.enter_context(path.open("xb", buffering=0)))
                new.append(path)
                path.chmod(0o600)  # the text of a context is private
                _allocate(files[-1], device, path.parent, blocks.file_bytes)
            layers = _layers(recorded, options, blocks, files, progress)
            for file in files:
                os.fsync(file.fileno())
        arrays = {key: np.stack([each[key] for each in layers]) for key in layers[0]}
        arrays["tokens"] = recorded.tokens
        if wrong := out_of_range(arrays, geometry.dtype):  # such a context could not be opened
            raise ExtError(
                f"cannot store the context: its index has {wrong}; serve the model with another "
                "--dtype"
            )
        about = About(
            geometry, tokens, options.sinks, options.window, len(directories), options.subspaces,
            recorded.salt, copies,
        )  # fmt: skip
        for index in indexes:
            with scratch_of(index).open("xb"):
                new.append(scratch_of(index))
            save(arrays, scratch_of(index), about)
            _sync(scratch_of(index))
        for directory in directories:
            _sync(directory)
        for index in reversed(indexes):
            new.append(index)
            scratch_of(index).rename(index)  # the context is stored from here on
            _sync(index.parent)
    except BaseException as error:
        for path in reversed(new):
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ExtError(
                f"cannot store the context: {reason_of(error)}; check the devices"
            ) from None
        raise


def _sync(path: Path) -> None:
    """Flushes a file or a directory to its device, so that it survives a power failure."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _allocate(file: BinaryIO, device: int, directory: Path, size: int) -> None:
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        free = shutil.disk_usage(directory).free
        raise ExtError(
            f"device {device} has not enough free space: the context needs {size:,} B, {free:,} B "
            f"are free ({error.strerror}); delete contexts, or configure larger or more "
            "directories"
        ) from None


def _layers(
    recorded: Recorded,
    options: Options,
    blocks: Blocks,
    files: Sequence[BinaryIO],
    progress: Callable[[int, int], None],
) -> list[Arrays]:
    """Writes the blocks of all layers; returns the arrays of each layer that stay in memory."""
    found: dict[int, Arrays] = {}
    with ThreadPoolExecutor(options.threads) as threads:
        work = {
            threads.submit(_layer, recorded, layer, options, blocks, files): layer
            for layer in range(blocks.layers)
        }
        try:
            for future in as_completed(work):
                found[work[future]] = future.result()
                progress(len(found), blocks.layers)
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)  # running layers are waited for
            raise
    return [found[layer] for layer in range(blocks.layers)]


def _layer(
    recorded: Recorded, layer: int, options: Options, blocks: Blocks, files: Sequence[BinaryIO]
) -> Arrays:
    of = recorded.layer(layer)
    profile = Profile.of(of, options, blocks.block)
    sinks, end = options.sinks, len(of.kv) - options.window
    codes, kv = profile.codes, of.kv
    sums = _write(of, sinks + profile.order, blocks, files)
    return {
        "order": profile.order,
        "often": profile.often(blocks.block).astype(np.int32),
        "sums": sums,
        "codes": codes.codes,
        "centroids": codes.centroids,
        "projection": codes.projection,
        "mean": codes.mean,
        "resident": np.concatenate([kv[:sinks], kv[end:]]),
    }


def _write(
    layer: RecordedLayer,
    tokens: NDArray[np.int32],
    blocks: Blocks,
    files: Sequence[BinaryIO],
) -> NDArray[np.uint64]:
    """Writes the blocks of a layer; returns their checksums, uint64 ``[blocks]``."""
    padded = np.zeros((blocks.blocks, blocks.block_bytes), np.uint8)
    entries = layer.kv[tokens].reshape(blocks.blocks, -1)
    padded[:, : entries.shape[1]] = entries
    for copy in range(blocks.copies):
        device, offset = blocks.place(layer.number, np.arange(blocks.blocks), copy)
        for at, file in enumerate(files):
            mine = np.flatnonzero(device == at)
            if not len(mine):
                continue
            place = int(offset[mine[0]])  # blocks of a layer are consecutive
            for start in range(0, len(mine), _WRITTEN):
                left = padded[mine[start : start + _WRITTEN]].reshape(-1)
                while len(left):
                    written = os.pwrite(file.fileno(), left.data, place)
                    left, place = left[written:], place + written
    return _clusters.checksums(padded)
