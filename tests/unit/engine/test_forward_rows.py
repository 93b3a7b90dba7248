"""Rows of a forward as powers see them: those that run, once for each launch and each cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_ext.config import ExtConfig
from sgl_ext.engine.core import runtime
from sgl_ext.engine.core.runtime import ExtRuntime
from sgl_ext.engine.peer.power import PeerPower
from sgl_ext.engine.step import forward, rows
from sgl_ext.engine.step.forward import PlannedForward
from sgl_ext.engine.step.layerwise import Layers, layer_by_layer
from sgl_ext.engine.step.rows import Row
from sgl_ext.planning.plan import Compute, PrefillPlan, Span

BEGIN = [Row(0, 0, 6), Row(1, 0, 3)]
AFTER = [Row(0, 4, 6), Row(1, 0, 3)]
PART = [Row(0, 0, 2)]


class Model:
    """Model of two layers, which notes when each is computed."""

    def __init__(self, noted: list[object]) -> None:
        self._noted = noted

    def forward(self, _ids: object, _positions: object, batch: Any) -> str:
        self._noted.append((batch, (0, 2)))
        return "output"

    def forward_split_prefill(
        self, _ids: object, _positions: object, batch: Any, layers: tuple[int, int], _: object
    ) -> str:
        self._noted.append((batch.rows, layers))
        return "output"


class Notes:
    """Power that notes what it is told about rows."""

    def __init__(self, ext: ExtRuntime, noted: list[object]) -> None:
        self._ext, self._noted = ext, noted

    def prefilled(self, _rid: str) -> None: ...

    def within(self, _planned: object, parts: list[Row]) -> Any:
        return nullcontext(parts)

    def launching(self, batch: Any, whole: bool) -> None:
        self._noted.append(("launching", batch if isinstance(batch, str) else batch.rows, whole))

    def cut_over(self, batch: Any) -> None:
        assert self._ext.split == AFTER
        self._noted.append(("cut over", batch.rows))


class Cuts(Notes):
    """Power that computes a part of a prompt, and cuts the forward over after its first layer."""

    @contextmanager
    def within(self, planned: PlannedForward, _parts: list[Row]) -> Iterator[list[Row]]:
        planned.run(rows.split(planned.batch, PART))

        def run(first: Layers) -> object:
            first.run(0, 1)
            with planned.cutting_over(BEGIN, AFTER, first.batch) as second:
                return Layers(first.model, second).run(1, 2)

        with layer_by_layer(planned, run):
            yield BEGIN

    def launching(self, batch: Any, whole: bool) -> None: ...

    def cut_over(self, batch: Any) -> None: ...


@pytest.fixture
def ext(monkeypatch: pytest.MonkeyPatch) -> ExtRuntime:
    ext = ExtRuntime(ExtConfig())
    monkeypatch.setattr(runtime, "current", ext)
    return ext


def test_powers_see_the_rows_that_run(ext: ExtRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_executor import forward_context

    def of(_batch: object, part: list[Row], *_: object) -> Any:
        return SimpleNamespace(rows=part, input_ids=None, positions=None)

    monkeypatch.setattr(rows, "split", of)
    monkeypatch.setattr(rows, "handed_over", lambda batch, _before, part, _first: of(batch, part))
    monkeypatch.setattr(rows, "split_of", lambda _batch, part: part)
    monkeypatch.setattr(rows, "any_number", lambda *_: nullcontext())
    monkeypatch.setattr(forward_context, "get_forward_context", lambda: None)
    monkeypatch.setattr(forward_context, "forward_context", lambda *_, **__: nullcontext())
    noted: list[object] = []

    def original(runner: Any, batch: Any) -> object:
        noted.append(("metadata", batch if isinstance(batch, str) else batch.rows))
        return runner.model.forward(None, None, batch)

    def metadata(batch: Any) -> None:
        noted.append(("metadata", batch.rows))

    known = SimpleNamespace(extended=lambda _row: None)
    runner: Any = SimpleNamespace(
        model=Model(noted), attn_backend=SimpleNamespace(init_forward_metadata=metadata),
        token_to_kv_pool_allocator=SimpleNamespace(known=known),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(2, 8, dtype=torch.int32)),
    )  # fmt: skip
    batch: Any = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend_without_speculative=lambda: True), rids=["a", "b"],
        extend_prefix_lens_cpu=[0, 0], extend_seq_lens_cpu=[6, 3], req_pool_indices_cpu=[0, 1],
        seq_lens_cpu=torch.tensor([6, 3]),
    )  # fmt: skip
    ext.inside_out = [Cuts(ext, noted), Notes(ext, noted)]  # type: ignore[list-item]
    ext.plans = {"a": PrefillPlan([Span(0, 8, Compute())])}
    assert forward.forward(ext, original, runner, batch) == "output"
    part = noted.pop(2)
    assert part[0].rows == PART  # type: ignore[index]
    assert noted == [
        ("launching", PART, True), ("metadata", PART),
        ("launching", BEGIN, False), ("metadata", BEGIN), (BEGIN, (0, 1)),
        ("cut over", AFTER), ("metadata", AFTER), (AFTER, (1, 2)),
    ]  # fmt: skip
    noted.clear()
    ext.plans = {}
    assert forward.forward(ext, original, runner, "decode") == "output"  # type: ignore[arg-type]
    assert noted == [("launching", "decode", True), ("metadata", "decode"), ("decode", (0, 2))]


@pytest.mark.parametrize(
    ("whole", "following", "streams"),
    [(True, None, True), (False, None, False), (True, "rows", False), (False, "rows", False)],
)
def test_layer_buffers_are_used_if_no_row_changes_or_follows_a_context(
    ext: ExtRuntime, whole: bool, following: object, streams: bool
) -> None:
    used: list[object] = []
    stream = SimpleNamespace(
        begin=lambda *given: used.append(given), read_in_place=lambda: used.append("in place")
    )
    power: Any = PeerPower(ExtConfig(), SimpleNamespace())  # type: ignore[arg-type]
    power._ext, power.side = ext, SimpleNamespace(stream=stream)
    table = torch.zeros(4, 8, dtype=torch.int32)
    power._runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=table))
    batch: Any = SimpleNamespace(
        req_pool_indices=torch.tensor([3, 1]), seq_lens=torch.tensor([5, 8]), out_cache_loc="new"
    )
    for clusters in (SimpleNamespace(following=following), None):
        ext.clusters = clusters  # type: ignore[assignment]
        power.launching(batch, whole)
    begun = (table, [3, 1], [5, 8], "new")
    assert used == [begun if streams else "in place", begun if whole else "in place"]


def test_a_worker_has_no_layer_buffers(ext: ExtRuntime) -> None:
    power: Any = PeerPower(ExtConfig(), SimpleNamespace())  # type: ignore[arg-type]
    power._ext, power.side = ext, SimpleNamespace(stream=None)
    power.launching(None, whole=True)
