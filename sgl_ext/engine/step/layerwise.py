"""Forward of a model that continues with other rows of the batch between two layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from sgl_ext.engine.core.sglang_types import ForwardBatch
from sgl_ext.engine.step.rows import Row

if TYPE_CHECKING:
    import torch

    from sgl_ext.engine.step.forward import PlannedForward


class Layers(NamedTuple):
    """Layers of a model that has ``forward_split_prefill``, for one batch."""

    model: Any
    batch: ForwardBatch
    input_embeds: torch.Tensor | None = None

    def run(self, begin: int, end: int) -> object:
        """Computes layers ``begin .. end - 1``; returns the model's output after its last layer."""
        batch = self.batch
        return self.model.forward_split_prefill(
            batch.input_ids, batch.positions, batch, (begin, end), self.input_embeds
        )


@contextmanager
def layer_by_layer(planned: PlannedForward, run: Callable[[Layers], object]) -> Iterator[None]:
    """Has ``run``, which returns the model's output, run in place of the model's next forward."""

    def forward(
        _ids: object,
        _positions: object,
        batch: ForwardBatch,
        input_embeds: torch.Tensor | None = None,
        **_kw: object,
    ) -> object:
        return run(Layers(planned.runner.model, batch, input_embeds))

    with planned.replaced(forward):
        yield


def first_rows(
    planned: PlannedForward, requests: Collection[int], parts: Sequence[Row]
) -> list[Row]:
    """Returns the rows of the first layers: some requests as a whole, the others in ``parts``.

    Args:
        requests: places in the batch of the requests that are computed as a whole.
    """
    rows = [part for part in parts if part.request not in requests]
    for at in requests:
        begin = planned.batch.extend_prefix_lens_cpu[at]
        rows.append(Row(at, begin, begin + planned.batch.extend_seq_lens_cpu[at]))
    return sorted(rows)
