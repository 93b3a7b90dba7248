"""Process of one pipeline stage, with the stage's tier and its stored inputs."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_ext.engine.restore.stage_model import PAGE, Inputs, StageModel
from sgl_ext.memory.transfer import FileLane, Lane, TransferEngine
from sgl_ext.planning.costs import Costs
from sgl_ext.planning.load_cost import LoadCost
from sgl_ext.planning.planner import Planner
from sgl_ext.planning.policies import Shortest
from sgl_ext.planning.want import Run, Want
from sgl_ext.restore.boundaries import BoundaryStore, boundary_layout
from sgl_ext.restore.stage import Arrivals, restore
from sgl_ext.tiers.arena import Arena, Key, Pages
from sgl_ext.tiers.host import HostPages
from sgl_ext.tiers.ssd import SsdTier
from sgl_ext.tiers.threaded import ThreadedTier

CHUNK = 512
_FIRST = 8
"""Pages of the first read of boundary activations, with which computing begins.

Each further read has twice as many pages, up to a chunk.
"""
_COMPUTED = 5 / 8
"""Share of a prompt up to which boundary activations are read; this limits computing.

They are read before any KV on the same device: computing waits for them, and nothing waits for the
KV that they delay.
"""
_UNIT = 8
"""Pages of one load."""
_CAPACITY = 4 << 30
DEADLINE_S = 300.0
KEPT, AS_IT_COMES, IN_SEQUENCE = "boundaries", "as it comes", "in sequence"
"""Sources of a stage's input while it restores.

The input comes from the stage's own store; from the previous stage, part by part as it computes; or
from the previous stage when it has restored its own layers.
"""


class Place(NamedTuple):
    """Place of a stage in its pipeline and on its machine."""

    before: Connection | None
    """Connection to receive from the previous stage; None for the first stage."""
    after: Connection | None
    """Connection to send to the next stage; None for the last stage."""
    folder: Path
    """Folder of the stage's part of the model."""
    scratch: Path
    """Folder for the files of the stage's tiers."""
    tokens: int
    """Tokens of the longest prompt."""
    core: int
    """CPU core that the process runs on."""


class Filled(NamedTuple):
    """Result of filling one stage."""

    seconds: float
    """Time of computing the prompt, in seconds."""
    token_bytes: int
    """Bytes of a token's KV in the stage."""
    row_bytes: int
    """Bytes of a token's boundary activations; 0 for the first stage."""


class Restoration(NamedTuple):
    """Result of a restoration in one stage."""

    ended: float
    """End of the restoration on the machine's monotonic clock, in seconds."""
    computed: int
    """Number of tokens that were computed."""
    difference: float
    """Largest absolute difference of a KV element from the value computed when filling."""


class _Behind(SsdTier):
    """SSD tier whose loads wait until ``begins`` is set: boundary activations are read first."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.begins = threading.Event()
        self.begins.set()

    def load(self, keys: Sequence[Key], pages: Pages) -> NDArray[np.bool_]:
        if not self.begins.wait(DEADLINE_S):
            raise RuntimeError(f"boundary activations were not read in {DEADLINE_S:g} s")
        return super().load(keys, pages)


class Stage:
    """One of several pipeline stages. :func:`serve` calls its methods by name."""

    def __init__(self, place: Place) -> None:
        os.sched_setaffinity(0, {place.core})
        torch.set_num_threads(1)
        self._before = place.before
        self._after = place.after
        self._tokens = place.tokens
        self._model = StageModel(place.folder, place.tokens, place.folder.name)
        self._scratch = place.scratch
        self._undo = ExitStack()
        self._costs: dict[str, Costs] = {}
        """Estimated costs by mode, kept from one restoration to the next."""
        self._open(None)

    def fill(self, ids: Sequence[int]) -> Filled:
        """Computes a prompt, as a pipeline does, and stores the stage's KV and inputs."""
        seconds, keys = 0.0, _keys(ids)
        for begin in range(0, len(ids), CHUNK):
            end = min(begin + CHUNK, len(ids))
            came: Inputs = np.array(ids[begin:end]) if self._before is None else self._receive()
            start = time.monotonic()
            out = self._model.forward(came, begin)
            seconds += time.monotonic() - start
            some = keys[begin // PAGE : end // PAGE]
            if self._before is not None:
                kept = self._boundaries.keep(some, came.view(np.uint8))
                if kept < len(some):
                    raise RuntimeError("the store of boundary activations has not stored all pages")
            if self._after is not None:
                self._after.send(out)
            places = np.arange(len(some))
            pages = self._model.kv(begin, end)
            self._arena.memory[places, : self._model.layout.block_bytes] = pages
            if not self._tier.tier.store(some, places).all():
                raise RuntimeError("the tier has not stored all pages")
        self._expected = self._model.kv(0, len(ids))
        rows = 0 if self._before is None else self._boundaries.row_bytes
        return Filled(seconds, self._model.layout.token_bytes, rows)

    def slow_down(self, bytes_per_second: float) -> None:
        """Slows the stage's device down to this rate; what the device holds stays."""
        self._open(bytes_per_second)

    def restore(self, ids: Sequence[int], mode: str) -> Restoration:
        """Restores the prompt that was filled, with input from the source ``mode``."""
        self._model.forget()
        keys, inputs = _keys(ids), Arrivals()
        came: list[NDArray[np.float32]] = []
        passed: list[NDArray[np.float32]] = []
        over = threading.Event()
        first_keys = keys[: round(_COMPUTED * len(keys))]

        def read() -> None:
            try:
                if mode == KEPT:
                    pages = _FIRST
                    while (first := inputs.end // PAGE) < len(first_keys) and not over.is_set():
                        rows = self._boundaries.load(first_keys[first : first + pages])
                        if not len(rows):
                            break
                        came.append(rows.view(np.float32))
                        inputs.come(inputs.end + len(rows))
                        pages = min(2 * pages, CHUNK // PAGE)
                else:
                    while (rows := self._receive()) is not None:
                        came.append(rows)
                        inputs.come(inputs.end + len(rows))
            finally:
                inputs.close()
                self._kv.begins.set()

        def compute(begin: int, end: int) -> None:
            wanted: Inputs
            if self._before is None:
                wanted = np.array(ids[begin:end])
            else:
                wanted = np.concatenate(came)[begin:end]
            passed.append(self._model.forward(wanted, begin))
            if self._after is not None and mode == AS_IT_COMES:
                self._after.send(passed[-1])

        def adopt(begin: int, end: int, places: Pages) -> None:  # noqa: ARG001
            self._model.adopt(begin, self._arena.memory, places)

        known = self._costs.setdefault(
            mode, Costs(loads={self._tier.tier.name: LoadCost()}, chunk=CHUNK)
        )
        host = HostPages(self._arena.pages)
        restorer = Planner(
            host, [self._tier], Shortest(0.2), known, page=PAGE, unit=_UNIT, wait=DEADLINE_S,
            hits=Counter(), clock=time.monotonic, lock=threading.Lock(),
        )  # fmt: skip
        reader = threading.Thread(target=read, daemon=True)
        if self._before is None:
            inputs.come(len(ids))
        else:
            if mode == KEPT:
                self._kv.begins.clear()
            reader.start()
        try:
            want = Want("prompt", (Run(keys, 0),), len(ids) + 1)
            restore(restorer, want, inputs, compute, adopt, DEADLINE_S)
        finally:
            over.set()
            restorer.close()
        ended = time.monotonic()
        if self._after is not None and mode != KEPT:
            if mode == IN_SEQUENCE and passed:
                self._after.send(np.concatenate(passed))
            self._after.send(None)
        if self._before is not None:
            reader.join(DEADLINE_S)
            if reader.is_alive():
                raise RuntimeError(f"the input of a stage did not end in {DEADLINE_S:g} s")
        difference = np.abs(
            self._model.kv(0, len(ids)).view(np.float32) - self._expected.view(np.float32)
        )
        return Restoration(ended, sum(map(len, passed)), float(difference.max()))

    def close(self) -> None:
        self._undo.close()

    def _receive(self) -> Any:
        """Returns the next object that the previous stage sends."""
        if self._before is None or not self._before.poll(DEADLINE_S):
            raise RuntimeError(f"the previous stage has sent nothing in {DEADLINE_S:g} s")
        return self._before.recv()

    def _open(self, rate: float | None) -> None:
        """Opens the stage's tiers; closes earlier ones first.

        Args:
            rate: bytes per second of the device, which boundary activations and KV share because
                they are never read at once; None for a device as it is.
        """
        self._undo.close()
        engine = TransferEngine()
        self._undo.callback(engine.close)

        def tier(name: str, arena: Arena) -> _Behind:
            def wrap(lane: FileLane) -> Lane:
                if rate is None:
                    return lane
                return engine.throttled_lane(lane, bytes_per_second=rate)

            engine.register(arena.address, arena.size, owner=arena, pinned=True)
            directory = self._scratch / name
            directory.mkdir(exist_ok=True)
            return _Behind(arena, engine, [directory], _CAPACITY, wrap=wrap)

        layout = self._model.layout
        self._arena = Arena(layout, -(-self._tokens // PAGE))
        self._kv = tier("kv", self._arena)
        self._tier = ThreadedTier(self._kv, keep_after=1, wake=lambda: None)
        self._undo.callback(self._tier.close)
        rows = boundary_layout(self._model.hidden, PAGE, layout.dtype, layout.fingerprint)
        arena = Arena(rows, CHUNK // PAGE)
        kept = tier("boundaries", arena)
        self._undo.callback(kept.close)
        self._boundaries = BoundaryStore(kept, arena)


def serve(commands: Connection, place: Place) -> None:
    """Runs the process: receives ``(method, arguments)`` and sends results, until None arrives."""
    stage = Stage(place)
    try:
        commands.send(None)
        while (command := commands.recv()) is not None:
            name, arguments = command
            commands.send(getattr(stage, name)(*arguments))
    finally:
        stage.close()


def _keys(ids: Sequence[int]) -> list[Key]:
    """Returns the keys of the prompt's whole pages."""
    digest, keys = hashlib.sha256(), []
    for begin in range(0, len(ids) // PAGE * PAGE, PAGE):
        digest.update(np.array(ids[begin : begin + PAGE], np.int64).tobytes())
        keys.append(digest.digest())
    return keys
