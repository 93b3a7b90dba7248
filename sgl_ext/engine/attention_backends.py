"""The attention backends that run in a scheduler, and what each is known to serve.

Powers that change what attention reads ask here, when the model is there and before the server is
ready: the backend that runs decides, not the one that could run on this machine.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sgl_ext.errors import ExtError
from sgl_ext.memory.slab import Layout

_SGLANG = "sglang.srt.layers.attention"
OWN = "sgl_ext.engine.cpu.attention.CpuAttnBackend"
_STORE_FIRST = {
    OWN,
    f"{_SGLANG}.torch_native_backend.TorchNativeAttnBackend",
    f"{_SGLANG}.triton_backend.TritonAttnBackend",
    f"{_SGLANG}.flashattention_backend.FlashAttentionBackend",
    f"{_SGLANG}.trtllm_mha_backend.TRTLLMHAAttnBackend",
}
"""Classes whose extend writes a layer's new K and V to the pool before it attends.

FlashInfer is none of them: its ragged prefill attends first. Subclasses do not count, for they may
have another order, as TRT-LLM's has another than FlashInfer's.
"""


class Running(NamedTuple):
    """SGLang's ``AttentionBackend`` objects that a model's forwards call."""

    prefill: Any
    decode: Any


def running(runner: Any) -> Running:
    """The backends of a ``ModelRunner`` that is ready to run."""
    whole = runner.attn_backend
    if _name(whole) == f"{_SGLANG}.hybrid_attn_backend.HybridAttnBackend":
        return Running(whole.prefill_backend, whole.decode_backend)
    return Running(whole, getattr(runner, "decode_attn_backend", None) or whole)


def require_store_first(runner: Any, power: str) -> None:
    """Makes sure that prefill stores a layer's K and V before it attends.

    Raises:
        ExtError: the backend that runs is not known to.
    """
    found = running(runner).prefill
    if _name(found) not in _STORE_FIRST:
        raise ExtError(
            f"{power} computes parts of a prompt in one forward, for which prefill must store K "
            f"and V before it attends, and {type(found).__name__} is not known to; use "
            "--prefill-attention-backend torch_native, triton, fa3 or trtllm_mha, or leave out "
            f"{power}"
        )


def require_own(runner: Any, layout: Layout, scale: float, power: str) -> None:
    """Makes sure that the compiled CPU attention runs, in prefill and in decode.

    Args:
        layout: of the slab, from which K and V are read.
        scale: factor of the logits.

    Raises:
        ExtError: another backend runs in one of them, or the kernels do not serve the model.
    """
    for phase, found in running(runner)._asdict().items():
        if _name(found) != OWN:
            raise ExtError(
                f"the compiled CPU attention is needed, and {phase} runs "
                f"{type(found).__name__}; use --attention-backend torch_native for both phases, or "
                f"leave out {power}"
            )
        query = torch.empty(1, layout.kv_heads, layout.head_dim, dtype=runner.dtype)
        keys = query.to(getattr(torch, layout.dtype))
        if not found.is_native(query, keys, keys, scale):
            asked = str(runner.dtype).removeprefix("torch.")
            raise ExtError(
                "the compiled CPU attention is needed, and it is switched off or does not serve "
                f"queries of {asked} over KV of {layout.dtype} with heads of "
                f"{layout.head_dim} here; sgl-ext doctor says what is compiled. Or leave out "
                f"{power}"
            )


def _name(backend: Any) -> str:
    kind = type(backend)
    return f"{kind.__module__}.{kind.__qualname__}"
