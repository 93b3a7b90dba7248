"""Output of some layers, handed over to a forward of fewer rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.layer_boundary.residual.add_norm import PLAIN_ADD
from sglang.srt.layers.layer_boundary.residual.batch import to_pp
from sglang.srt.layers.layer_boundary.residual.stream import ResidualStream

from sgl_ext.engine.step import rows
from sgl_ext.engine.step.rows import Row

BATCH: Any = SimpleNamespace(extend_prefix_lens_cpu=[2, 0], extend_seq_lens_cpu=[4, 3])
BEFORE = [Row(0, 2, 6), Row(1, 0, 3)]
AFTER = [Row(0, 4, 6), Row(1, 1, 2)]
KEPT = [2, 3, 5]
"""Places of the tokens of ``AFTER`` among those of ``BEFORE``."""


@pytest.fixture(autouse=True)
def _split(monkeypatch: pytest.MonkeyPatch) -> None:
    def split(_batch: object, part: list[Row]) -> Any:
        return SimpleNamespace(rows=part, residual_stream=None)

    monkeypatch.setattr(rows, "split", split)


def first(stream: ResidualStream, output: torch.Tensor) -> Any:
    """Returns the batch of ``BEFORE`` after some layers."""
    return SimpleNamespace(input_ids=torch.arange(7), hidden_states=output, residual_stream=stream)


def test_tokens_keep_their_output_and_their_residual() -> None:
    output, residual = torch.rand(7, 4), torch.rand(7, 4)
    stream = ResidualStream(residual)
    stream.record(output, PLAIN_ADD)
    batch = first(stream, output)
    second: Any = rows.handed_over(BATCH, BEFORE, AFTER, batch)
    assert second.rows == AFTER
    assert batch.residual_stream is None
    passed = to_pp(second.hidden_states, second).tensors
    assert torch.equal(passed["hidden_states"], output[KEPT])
    assert torch.equal(passed["residual"], residual[KEPT])


def test_an_output_that_has_its_residual_stays_so() -> None:
    output = torch.rand(7, 4)
    batch = first(ResidualStream(output), output)
    second: Any = rows.handed_over(BATCH, BEFORE, AFTER, batch)
    passed = to_pp(second.hidden_states, second).tensors
    assert {*passed} == {"hidden_states"}
    assert torch.equal(passed["hidden_states"], output[KEPT])
