"""Removal of the prompt logprobs of requests that have left their batch.

The logprobs of all prompts of a batch come in one row. SGLang assigns them from the left. If a
request was preempted or has ended since the batch began, SGLang assigns its part to the next
request.
"""

from __future__ import annotations

from typing import Any

import torch

from sgl_ext.engine.core import hooks, runtime
from sgl_ext.engine.core.sglang_types import ScheduleBatch


def _cut(processor: Any, batch: ScheduleBatch, result: Any) -> None:
    """Removes the parts of the requests that SGLang skips."""
    if runtime.current is None or not batch.return_logprob or not processor.is_generation:
        return
    gone = [
        req.is_retracted or (req.finished() and req.inflight_middle_chunks <= 0)
        for req in batch.reqs
    ]
    if not any(gone) or (output := result.logits_output) is None:
        return
    if result.copy_done is not None:
        result.copy_done.synchronize()
    output.finalize_input_logprobs()
    if output.input_token_logprobs is None:
        return
    count = processor.logprob_result_processor.calculate_num_input_logprobs
    ends = zip(
        result.extend_input_len_per_req, result.extend_logprob_start_len_per_req, strict=True
    )
    counts = [count(req, *end) for req, end in zip(batch.reqs, ends, strict=True)]
    kept = torch.repeat_interleave(~torch.tensor(gone), torch.tensor(counts))
    if len(kept) == len(output.input_token_logprobs):  # differs in batches that are only scored
        output.input_token_logprobs = output.input_token_logprobs[kept]


HOOKS = (
    hooks.Hook(
        "sglang.srt.managers.scheduler_components.batch_result_processor."
        "SchedulerBatchResultProcessor.process_batch_result_prefill",
        "before",
        _cut,
        "SGLang does not count the logprobs of prompts that it skips",
    ),
)
