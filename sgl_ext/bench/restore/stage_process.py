"""A process that holds one stage of a model, its tier, and what came into it."""

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
from sgl_ext.restore.boundaries import BoundaryStore, boundary_layout
from sgl_ext.restore.costs import ComputeCost, Costs, LoadCost
from sgl_ext.restore.policies import Shortest
from sgl_ext.restore.restorer import Restorer
from sgl_ext.restore.stage import Arrivals, restore
from sgl_ext.tiers.arena import Arena, Key, Pages
from sgl_ext.tiers.host import HostPages
from sgl_ext.tiers.lower import LowerTier
from sgl_ext.tiers.ssd import SsdTier

CHUNK = 512
_FIRST = 8
"""Pages of the first read of boundaries: computing begins when it is there. Each further read is of
twice as many, up to a chunk."""
_COMPUTED = 5 / 8
"""Of a prompt: as much as is computed at most, and boundaries are read of. They come before any KV
of the same device: computing waits for them, and nothing for the KV that they keep back."""
_UNIT = 8
"""Pages of one load."""
_CAPACITY = 4 << 30
DEADLINE_S = 300.0
KEPT, AS_IT_COMES, IN_SEQUENCE = "boundaries", "as it comes", "in sequence"
"""Where a stage's input comes from while it restores: its store; the stage before, part by part as
that computes; the stage before, when that has restored its own layers."""


class Place(NamedTuple):
    """Of a stage, in its pipeline and on its machine."""

    before: Connection | None
    """From which the stage before sends; None to the first stage."""
    after: Connection | None
    """To the stage behind; None to the last."""
    folder: Path
    """Of its part of the model."""
    scratch: Path
    """For what it keeps."""
    tokens: int
    """Of the longest prompt."""
    core: int
    """That it runs on."""


class Filled(NamedTuple):
    """Of one stage."""

    seconds: float
    """Of computing the prompt."""
    token_bytes: int
    """Of a token's KV."""
    row_bytes: int
    """Of what goes into the stage for a token."""


class Restoration(NamedTuple):
    """Of one stage."""

    ended: float
    """On the machine's monotonic clock."""
    computed: int
    """Tokens."""
    difference: float
    """Largest, of any element of the KV, to what was computed at first."""


class _Behind(SsdTier):
    """A tier whose loads begin when what lies before them on the same device has been read."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.begins = threading.Event()
        self.begins.set()

    def load(self, keys: Sequence[Key], pages: Pages) -> NDArray[np.bool_]:
        if not self.begins.wait(DEADLINE_S):
            raise RuntimeError(f"boundaries have not been read in {DEADLINE_S:g} s")
        return super().load(keys, pages)


class Stage:
    """One stage of several; commands come through its connection."""

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
        """By mode; what was learnt goes on from one restoration to the next."""
        self._open(None)

    def fill(self, ids: Sequence[int]) -> Filled:
        """Computes a prompt, as a pipeline does, and keeps KV and inputs."""
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
                    raise RuntimeError("the store of boundaries does not keep what it is given")
            if self._after is not None:
                self._after.send(out)
            places = np.arange(len(some))
            pages = self._model.kv(begin, end)
            self._arena.memory[places, : self._model.layout.block_bytes] = pages
            if not self._tier.tier.store(some, places).all():
                raise RuntimeError("the tier does not keep what it is given")
        self._expected = self._model.kv(0, len(ids))
        rows = 0 if self._before is None else self._boundaries.row_bytes
        return Filled(seconds, self._model.layout.token_bytes, rows)

    def slow_down(self, bytes_per_second: float) -> None:
        """From now on its device moves so much; what it holds stays."""
        self._open(bytes_per_second)

    def restore(self, ids: Sequence[int], mode: str) -> Restoration:
        """Restores the prompt that was filled."""
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
            mode, Costs(ComputeCost(), {self._tier.tier.name: LoadCost()}, CHUNK)
        )
        host = HostPages(self._arena.pages)
        restorer = Restorer(
            host, [self._tier], Shortest(0.2), known, page=PAGE, unit=_UNIT, wait=DEADLINE_S,
            hits=Counter(),
        )  # fmt: skip
        reader = threading.Thread(target=read, daemon=True)
        if self._before is None:
            inputs.come(len(ids))
        else:
            if mode == KEPT:
                self._kv.begins.clear()
            reader.start()
        try:
            restore(restorer, keys, inputs, compute, adopt, DEADLINE_S)
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
                raise RuntimeError(f"the input of a stage has not ended in {DEADLINE_S:g} s")
        difference = np.abs(
            self._model.kv(0, len(ids)).view(np.float32) - self._expected.view(np.float32)
        )
        return Restoration(ended, sum(map(len, passed)), float(difference.max()))

    def close(self) -> None:
        self._undo.close()

    def _receive(self) -> Any:
        """What the stage before sends next."""
        if self._before is None or not self._before.poll(DEADLINE_S):
            raise RuntimeError(f"the stage before has sent nothing in {DEADLINE_S:g} s")
        return self._before.recv()

    def _open(self, rate: float | None) -> None:
        """The rate is that of one device, of which boundaries and KV are never read at once."""
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
        self._tier = LowerTier(self._kv, keep_after=1, wake=lambda: None)
        self._undo.callback(self._tier.close)
        rows = boundary_layout(self._model.hidden, PAGE, layout.dtype, layout.fingerprint)
        arena = Arena(rows, CHUNK // PAGE)
        kept = tier("boundaries", arena)
        self._undo.callback(kept.close)
        self._boundaries = BoundaryStore(kept, arena)


def serve(commands: Connection, place: Place) -> None:
    """The process: ``(method, arguments)`` in, results out, until None comes."""
    stage = Stage(place)
    try:
        commands.send(None)
        while (command := commands.recv()) is not None:
            name, arguments = command
            commands.send(getattr(stage, name)(*arguments))
    finally:
        stage.close()


def _keys(ids: Sequence[int]) -> list[Key]:
    """Of the prompt's whole pages."""
    digest, keys = hashlib.sha256(), []
    for begin in range(0, len(ids) // PAGE * PAGE, PAGE):
        digest.update(np.array(ids[begin : begin + PAGE], np.int64).tobytes())
        keys.append(digest.digest())
    return keys
