"""Tests of restoration in pipeline stages, from stored or from arriving boundary activations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from restore_kit import PAGE, Machine
from tier_kit import arena, directories, keys

from sgl_ext.bench.data.texts import sharegpt_prompts
from sgl_ext.bench.restore.stage_process import AS_IT_COMES, IN_SEQUENCE, KEPT, Filled, Restoration
from sgl_ext.bench.restore.stages import stages
from sgl_ext.errors import ExtError
from sgl_ext.memory.transfer import TransferEngine
from sgl_ext.planning.want import Run, Want
from sgl_ext.restore.boundaries import BoundaryStore, boundary_layout
from sgl_ext.restore.stage import Arrivals, restore
from sgl_ext.tiers.arena import Key, Pages
from sgl_ext.tiers.ssd import SsdTier


def test_stored_boundary_activations_are_loaded_again(
    engine: TransferEngine, tmp_path: Path
) -> None:
    layout = boundary_layout(24, PAGE, "bfloat16", "a boundary")
    places = arena(engine, 3, layout)
    tier = SsdTier(places, engine, directories(tmp_path, 1), 1 << 20)
    store = BoundaryStore(tier, places)
    rows = np.random.default_rng(0).integers(0, 256, (7 * PAGE, 24 * 2), np.uint8)
    assert store.keep(keys(*range(7)), rows) == 7
    assert np.array_equal(store.load(keys(*range(2, 7))), rows[2 * PAGE : 5 * PAGE])
    assert np.array_equal(store.load(keys(6, 99, 0)), rows[6 * PAGE :])
    assert len(store.load(keys(99))) == 0
    tier.close()
    with pytest.raises(ValueError, match="must have an even number of elements"):
        boundary_layout(25, PAGE, "float32", "a boundary")


class Stage:
    """Fake stage that records whether it computed or loaded each token."""

    def __init__(self, tokens: int) -> None:
        self.inputs = Arrivals()
        self.did = [""] * tokens
        self.computed_beyond_input = False
        self.began: Callable[[], None] = lambda: None

    def compute(self, begin: int, end: int) -> None:
        self.computed_beyond_input |= end > self.inputs.end
        self.began()
        self._note(begin, end, "computed")

    def adopt(self, begin: int, end: int, places: Pages) -> None:
        assert len(places) == (end - begin) // PAGE
        self._note(begin, end, "loaded")

    def _note(self, begin: int, end: int, what: str) -> None:
        assert self.did[begin:end] == [""] * (end - begin)
        self.did[begin:end] = [what] * (end - begin)


def want_of(names: Sequence[Key]) -> Want:
    return Want("prompt", (Run(names, 0),), len(names) * PAGE + 1)


def test_a_stage_computes_arrived_tokens_and_loads_the_rest() -> None:
    machine, names = Machine(), keys(*range(16))
    machine.keep(names)
    machine.shelf.open.clear()  # loads wait until the stage computes
    stage = Stage(16 * PAGE)
    stage.began = machine.shelf.open.set
    come = threading.Timer(0.02, stage.inputs.come, (5 * PAGE,))
    come.start()
    restored = restore(
        machine.planner, want_of(names), stage.inputs, stage.compute, stage.adopt, deadline=30
    )
    assert restored is not None
    assert all(stage.did)
    assert not stage.computed_beyond_input
    assert restored["computed"] + restored["loaded"]["shelf"] == 16 * PAGE
    assert stage.did[0] == "computed"
    assert "computed" not in stage.did[5 * PAGE :]
    assert machine.host.room == machine.host.capacity


def test_a_stage_without_tiers_computes_all_and_without_input_fails() -> None:
    machine, names = Machine(), keys(*range(4))
    stage = Stage(4 * PAGE)
    stage.inputs.come(4 * PAGE)
    assert (
        restore(machine.planner, want_of(names), stage.inputs, stage.compute, stage.adopt, 30)
        is None
    )
    assert stage.did == ["computed"] * (4 * PAGE)

    stage = Stage(4 * PAGE)
    stage.inputs.come(PAGE)
    stage.inputs.close()
    with pytest.raises(ExtError, match=f"a stage received no inputs after token {PAGE}"):
        restore(machine.planner, want_of(names), stage.inputs, stage.compute, stage.adopt, 30)


def test_two_processes_restore_half_of_the_layers_each(trained_model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    text = "\n".join(sharegpt_prompts(8, characters=(400, 2000)))
    ids = AutoTokenizer.from_pretrained(trained_model)(text)["input_ids"][:768]
    with stages(trained_model, tmp_path, len(ids)) as running:
        filled: list[Filled] = running.ask("fill", ids)
        rate = 2 * len(ids) * filled[0].token_bytes / sum(each.seconds for each in filled)
        assert filled[0].row_bytes == 0
        assert 0 < filled[1].row_bytes < filled[1].token_bytes / 5
        for mode in (KEPT, AS_IT_COMES, IN_SEQUENCE, KEPT):
            running.ask("slow_down", rate)
            restored: list[Restoration] = running.ask("restore", ids, mode)
            for each in restored:
                assert each.difference < 1e-3
        assert all(0 < each.computed < len(ids) for each in restored)
        with pytest.raises(ExtError, match=r"stage [01] has ended"):
            running.ask("restore", ids, "no such mode", "and an argument too many")
