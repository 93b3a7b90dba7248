"""Forward of consecutive tokens of one prompt through the layers of this process."""

from __future__ import annotations

from typing import Any

import torch

from sgl_ext.engine.core.releases import forward_context
from sgl_ext.engine.core.sglang_types import ForwardBatch, ModelRunner


def extend_batch(ids: torch.Tensor, row: int, begin: int, slots: torch.Tensor) -> ForwardBatch:
    """Returns SGLang's ``ForwardBatch`` of tokens of one prompt.

    Args:
        ids: token ids, int64 ``[tokens]``.
        row: row of the prompt in SGLang's table of requests, whose slots of all earlier tokens are
            set.
        begin: position of the first token.
        slots: slots of the tokens, int64 ``[tokens]``.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    count, end = len(ids), begin + len(ids)
    ints = torch.int32
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=ids,
        req_pool_indices=torch.tensor([row]),
        seq_lens=torch.tensor([end]),
        seq_lens_cpu=torch.tensor([end]),
        seq_lens_sum=end,
        out_cache_loc=slots,
        positions=torch.arange(begin, end),
        extend_num_tokens=count,
        extend_seq_lens=torch.tensor([count], dtype=ints),
        extend_prefix_lens=torch.tensor([begin], dtype=ints),
        extend_start_loc=torch.tensor([0], dtype=ints),
        extend_seq_lens_cpu=[count],
        extend_prefix_lens_cpu=[begin],
    )


@torch.no_grad()
def compute(runner: ModelRunner, batch: ForwardBatch, inputs: torch.Tensor | None) -> None:
    """Computes the KV of a batch in the layers of a pipeline stage.

    Args:
        runner: SGLang's ``ModelRunner`` of the stage.
        inputs: inputs of the stage's first layer, ``[tokens, hidden]``; None in the first stage,
            which computes them from the token ids.
    """
    from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
    from sglang.srt.model_executor.forward_context import ForwardContext

    proxies: Any = None
    if inputs is not None:
        # SGLang sends the residual apart from the output of the layer before, and adds both first.
        proxies = PPProxyTensors({"hidden_states": inputs, "residual": torch.zeros_like(inputs)})
    backend = runner.attn_backend
    backend.init_forward_metadata(batch)
    with forward_context(ForwardContext(attn_backend=backend), batch):
        runner.model.model(batch.input_ids, batch.positions, batch, pp_proxy_tensors=proxies)
