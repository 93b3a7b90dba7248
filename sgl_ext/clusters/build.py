"""Construction of a stored context: profiles layers, orders entries, writes blocks and index.

It takes seconds to minutes of computation, so it runs in a process separate from the server.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from sgl_ext._native import _clusters
from sgl_ext.clusters.about import About
from sgl_ext.clusters.arrays import Arrays, save
from sgl_ext.clusters.codes import Codes
from sgl_ext.clusters.files import FULL, no_room
from sgl_ext.clusters.geometry import Geometry
from sgl_ext.clusters.paths import index_file, scratch_of
from sgl_ext.clusters.placement import Blocks
from sgl_ext.clusters.profile import Options, Profile
from sgl_ext.clusters.recorded import Recorded, RecordedLayer
from sgl_ext.clusters.stored import Layer, Stored, files_of, out_of_range, require_no_loss
from sgl_ext.errors import ExtError, reason_of
from sgl_ext.own_files import flush

_WRITTEN = 4096
"""Blocks that are written at a time."""


def build(
    recorded: Recorded,
    name: str,
    directories: Sequence[Path],
    options: Options | None = None,
    progress: Callable[[int, int], None] = lambda _done, _of: None,
    copies: int = 1,
    base: Stored | None = None,
) -> None:
    """Writes blocks into all directories, and last the index into the first ones.

    Args:
        name: Name of the context, which is part of the file names.
        directories: One directory for each device.
        copies: Copies of each block, on different devices; those of ``base`` if there is one.
        progress: Called with the number of finished layers and the number of all layers.
        base: Stored context that the recorded one begins with. Its files of blocks are shared; only
            the new entries are profiled and written. Both can be removed independently.

    Raises:
        ExtError: The context is too short to be stored, has numbers that are not finite, a device
            of ``base`` is lost, or a file cannot be written, for example for lack of room. No file
            of the context is left.
    """
    geometry, tokens = recorded.geometry, len(recorded.tokens)
    options = options or Options()
    if base is None:
        about = new_about(
            geometry, tokens, options, len(directories), salt=recorded.salt, copies=copies
        )
        shared: tuple[Path, ...] = ()
    else:
        about = base.about.continued(tokens, options.window)
        shared = base.files[: _shared(base.about, about) * about.devices]
        require_no_loss(base.name, base.lost)
    options = replace(options, sinks=about.sinks, window=about.window)
    blocks = about.blocks
    indexes = [index_file(directory, name) for directory in directories[: about.copies]]
    new: list[Path] = []
    try:
        with ExitStack() as opened:
            files: list[BinaryIO] = []
            for at, path in enumerate(files_of(name, blocks, directories)):
                if at < len(shared):
                    path.hardlink_to(shared[at])
                    new.append(path)
                    continue
                files.append(opened.enter_context(path.open("xb", buffering=0)))
                new.append(path)
                path.chmod(0o600)  # the text of a context is private
                _allocate(files[-1], at % blocks.devices, path.parent, blocks.file_bytes[at])
            fit = about.fitted == blocks.entries
            layers = _layers(_Storing(recorded, options, blocks, base, fit, files), progress)
            for file in files:
                os.fsync(file.fileno())
        arrays = {key: np.stack([each[key] for each in layers]) for key in layers[0]}
        arrays["tokens"] = recorded.tokens
        if wrong := out_of_range(arrays, geometry.dtype):  # such a context could not be opened
            raise ExtError(
                f"cannot store the context: its index has {wrong}; serve the model with another "
                "--dtype"
            )
        for device, index in enumerate(indexes):
            with scratch_of(index).open("xb"):
                new.append(scratch_of(index))
            try:
                save(arrays, scratch_of(index), about)
                flush(scratch_of(index))
            except OSError as error:
                if error.errno in FULL:
                    raise no_room(device, index.parent, about.index_bytes, error) from None
                raise
        for directory in directories:
            flush(directory)
        for index in reversed(indexes):
            new.append(index)
            scratch_of(index).rename(index)  # the context is stored from here on
            flush(index.parent)
    except BaseException as error:
        for path in reversed(new):
            with suppress(OSError):  # the next start of a server removes it
                path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ExtError(
                f"cannot store the context: {reason_of(error)}; check the devices"
            ) from None
        raise


def new_about(
    geometry: Geometry,
    tokens: int,
    options: Options,
    devices: int,
    *,
    salt: str | None,
    copies: int,
) -> About:
    """Returns the description of a context that continues no other one.

    Raises:
        ExtError: The context is too short to be stored.
    """
    fitted = options.fitted(tokens, options.block or Blocks.fitting(geometry.entry_bytes))
    return About(
        geometry, tokens, fitted.sinks, fitted.window, devices, fitted.subspaces,
        tokens - fitted.sinks - fitted.window, salt, copies, block=fitted.block,
    )  # fmt: skip


def _allocate(file: BinaryIO, device: int, directory: Path, size: int) -> None:
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        raise no_room(device, directory, size, error) from None


def _shared(base: About, about: About) -> int:
    """Returns the number of extents of a context that are those of the one that it begins with."""
    return about.blocks.extents - (about.blocks.entries > base.blocks.entries)


@dataclass(frozen=True)
class _Storing:
    """Context that is stored.

    Attributes:
        options: Options that are fitted to the context.
        base: Stored context that it begins with, if any.
        fit: Whether the codes are fitted to all of its keys.
        files: Files of its last extent, one for each device; none if all extents are shared.
    """

    recorded: Recorded
    options: Options
    blocks: Blocks
    base: Stored | None
    fit: bool
    files: Sequence[BinaryIO]


def _layers(storing: _Storing, progress: Callable[[int, int], None]) -> list[Arrays]:
    """Writes the blocks of all layers; returns the arrays of each layer that stay in memory."""
    found: dict[int, Arrays] = {}
    count = storing.blocks.layers
    with ThreadPoolExecutor(storing.options.threads) as threads:
        work = {threads.submit(_layer, storing, layer): layer for layer in range(count)}
        try:
            for future in as_completed(work):
                found[work[future]] = future.result()
                progress(len(found), count)
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)  # running layers are waited for
            raise
    return [found[layer] for layer in range(count)]


def _layer(storing: _Storing, layer: int) -> Arrays:
    of, options = storing.recorded.layer(layer), storing.options
    base = None if storing.base is None else storing.base.layers[layer]
    sinks, end = options.sinks, len(of.kv) - options.window
    codes, order, often, sums = _middle(storing, of, base)
    kv = of.kv
    return {
        "order": order,
        "often": often,
        "sums": sums,
        "codes": codes.codes,
        "centroids": codes.centroids,
        "projection": codes.projection,
        "mean": codes.mean,
        "resident": np.concatenate([kv[:sinks], kv[end:]]),
    }


def _middle(
    storing: _Storing, of: RecordedLayer, base: Layer | None
) -> tuple[Codes, NDArray[np.int32], NDArray[np.int32], NDArray[np.uint64]]:
    """Writes the new blocks of a layer; returns codes, order, frequencies and checksums of all."""
    blocks, options = storing.blocks, storing.options
    if base is not None and not storing.files:
        return base.codes, base.order, base.often, base.sums
    profile = Profile.of(of, options, blocks.block, base, fit=storing.fit)
    often = profile.often(blocks.block).astype(np.int32)
    first = blocks.later[-1] if blocks.later else 0
    sums = _write(of, options.sinks + profile.order[first:], blocks, storing.files)
    if base is not None:
        often = np.concatenate([base.often, often])
        sums = np.concatenate([base.sums[: first // blocks.block], sums])
    return profile.codes, profile.order, often, sums


def _write(
    layer: RecordedLayer,
    tokens: NDArray[np.int32],
    blocks: Blocks,
    files: Sequence[BinaryIO],
) -> NDArray[np.uint64]:
    """Writes the last blocks of a layer; returns their checksums, uint64 ``[blocks]``."""
    count = len(tokens) // blocks.block
    padded = np.zeros((count, blocks.block_bytes), np.uint8)
    entries = layer.kv[tokens].reshape(count, -1)
    padded[:, : entries.shape[1]] = entries
    numbers = np.arange(blocks.blocks - count, blocks.blocks)
    for copy in range(blocks.copies):
        place_of, offset = blocks.place(layer.number, numbers, copy)
        for device, file in enumerate(files):
            mine = np.flatnonzero(place_of % blocks.devices == device)
            if not len(mine):
                continue
            place = int(offset[mine[0]])  # blocks of a layer are consecutive
            for start in range(0, len(mine), _WRITTEN):
                left = padded[mine[start : start + _WRITTEN]].reshape(-1)
                while len(left):
                    written = os.pwrite(file.fileno(), left.data, place)
                    left, place = left[written:], place + written
    return _clusters.checksums(padded)
