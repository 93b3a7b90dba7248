"""Benefit of boundary activations for a model in two processes, each with half of the layers.

Two processes of this package run the model's layers, each on one core, without a scheduler, so that
sources of a stage's input can be compared that a server does not have
(:mod:`~sgl_ext.bench.restore.served_stages` measures servers).
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from sgl_ext.bench.harness.report import Report, summary
from sgl_ext.bench.harness.sampling import rotated
from sgl_ext.bench.restore import stage_process
from sgl_ext.bench.restore.contexts import of_lengths
from sgl_ext.bench.restore.stage_process import (
    AS_IT_COMES,
    IN_SEQUENCE,
    KEPT,
    Filled,
    Place,
    Restoration,
)
from sgl_ext.engine.restore.stage_model import PAGE, write_part
from sgl_ext.errors import ExtError
from sgl_ext.progress import steps

STAGES = 2
_MODES = (KEPT, AS_IT_COMES, IN_SEQUENCE)
_DEADLINE_S = 600.0
_TOLERANCE = 1e-3
"""Limit of the difference of KV elements: forwards of other sizes round differently in float32."""


class Stages:
    """Processes of a pipeline, one for each stage."""

    def __init__(self, commands: Sequence[Connection]) -> None:
        self._commands = commands

    def ask(self, name: str, *arguments: object) -> list[Any]:
        """Calls a method of all stages at once, and returns the answer of each stage.

        Args:
            name: name of the method of :class:`~sgl_ext.bench.restore.stage_process.Stage`.

        Raises:
            ExtError: a stage has ended, or it does not answer.
        """
        for stage, each in enumerate(self._commands):
            try:
                each.send((name, arguments))
            except OSError:
                raise _EndedError(stage) from None
        return self.answers()

    def answers(self) -> list[Any]:
        """Returns the next answer of each stage."""
        found: dict[int, Any] = {}
        give_up = time.monotonic() + _DEADLINE_S
        while len(found) < len(self._commands):
            waiting = [at for at in range(len(self._commands)) if at not in found]
            ready = wait([self._commands[at] for at in waiting], give_up - time.monotonic())
            if not ready:
                raise ExtError(f"stages {waiting} have not answered in {_DEADLINE_S:g} s")
            for at in waiting:
                if self._commands[at] in ready:
                    try:
                        found[at] = self._commands[at].recv()
                    except EOFError:
                        raise _EndedError(at) from None
        return [found[at] for at in range(len(self._commands))]


class _EndedError(ExtError):
    def __init__(self, stage: int) -> None:
        super().__init__(f"the process of stage {stage} has ended; see its error above")


@contextmanager
def stages(model: Path, scratch: Path, tokens: int) -> Iterator[Stages]:
    """Starts the processes of the stages, and kills all of them at the end.

    Args:
        model: directory of the model.
        scratch: directory for the parts of the model and for the files of the tiers.
        tokens: tokens of the longest prompt.
    """
    from transformers import AutoConfig

    layers = AutoConfig.from_pretrained(model).num_hidden_layers
    bounds = [layers * stage // STAGES for stage in range(STAGES + 1)]
    cores = sorted(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    between = [context.Pipe(duplex=False) for _ in range(STAGES - 1)]
    processes, commands = [], []
    try:
        for stage in range(STAGES):
            folder, kept = scratch / f"stage-{stage}", scratch / f"kept-{stage}"
            write_part(model, bounds[stage], bounds[stage + 1], folder)
            kept.mkdir()
            ours, theirs = context.Pipe()
            before = between[stage - 1][0] if stage else None
            after = between[stage][1] if stage < STAGES - 1 else None
            core = cores[stage % len(cores)]
            process = context.Process(
                target=stage_process.serve,
                args=(theirs, Place(before, after, folder, kept, tokens, core)),
                daemon=True,
            )
            process.start()
            theirs.close()
            processes.append(process)
            commands.append(ours)
        for ends in between:  # only the stages hold them now: if one stage ends, the other notices
            for each in ends:
                each.close()
        running = Stages(commands)
        running.answers()
        yield running
    finally:
        for process in processes:
            process.kill()
            process.join()


def report_stages(report: Report, model: Path, lengths: Sequence[int], rounds: int) -> None:
    """Adds the runs and figures of stages that restore; loading is as slow as computing."""
    contexts = of_lengths(model, lengths)
    for context in contexts:
        ids = context.tokens[: context.length // PAGE * PAGE]
        with (
            tempfile.TemporaryDirectory(prefix="sgl_ext-stages-") as scratch,
            stages(model, Path(scratch), len(ids)) as running,
        ):
            running.ask("fill", ids)
            filled: list[Filled] = running.ask("fill", ids)  # the first forwards are slow
            computing = statistics.mean(each.seconds for each in filled)
            rate = len(ids) * statistics.mean(each.token_bytes for each in filled) / computing
            took: dict[str, list[float]] = {mode: [] for mode in _MODES}
            computed: dict[str, list[int]] = {}
            for turn in steps(range(rounds + 1), "rounds of stages"):
                for mode in rotated(_MODES, turn):
                    running.ask("slow_down", rate)
                    began = time.monotonic()
                    restored: list[Restoration] = running.ask("restore", ids, mode)
                    _check(restored, len(ids))
                    computed[mode] = [one.computed for one in restored]
                    if turn:  # the first restorations learn the costs
                        took[mode].append(max(each.ended for each in restored) - began)
        for mode, each in took.items():
            report.runs.append(
                {
                    "what": f"{STAGES} stages, their input: {mode}",
                    "system": "shortest",
                    "tokens": len(ids),
                    "samples": len(each),
                    "computed": computed[mode],
                    "computing_alone_ms": [1e3 * one.seconds for one in filled],
                    "loading_alone_ms": [1e3 * len(ids) * one.token_bytes / rate for one in filled],
                }
                | summary(each, "restored_ms", 1e3)
            )
        for mode, name in ((IN_SEQUENCE, "stages2_speedup"), (AS_IT_COMES, "stages2_vs_pipeline")):
            speedup = statistics.median(took[mode]) / statistics.median(took[KEPT])
            report.figures[name] = min(report.figures.get(name, speedup), speedup)


def _check(restored: Sequence[Restoration], tokens: int) -> None:
    for stage, each in enumerate(restored):
        if not each.difference < _TOLERANCE or not 0 < each.computed < tokens:
            raise ExtError(
                f"stage {stage} computed {each.computed} of {tokens} tokens, and its KV differs by "
                f"{each.difference:g} from the KV computed before"
            )
