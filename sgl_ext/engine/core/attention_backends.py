"""Attention backends that run in a scheduler, and the requirements of powers on them.

Powers that change what attention reads check the backends after the model is loaded and before the
server is ready. Only a backend that runs decides, not one that could run on this machine.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sgl_ext.engine.core.sglang_types import ModelRunner, ServerArgs
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

FlashInfer is not among them: its ragged prefill attends first. Subclasses do not count, because
their order may differ, as that of TRT-LLM's backend differs from that of its base class,
FlashInfer's backend.
"""


_STORE_FIRST_NAMES = ("torch_native", "triton", "fa3", "trtllm_mha")
"""Values of SGLang's ``--attention-backend`` that select one of these classes."""
_OWN_NAME = "torch_native"
"""Value of ``--attention-backend`` that selects the compiled CPU attention on a CPU."""


class Running(NamedTuple):
    """SGLang's ``AttentionBackend`` objects that a model's forwards call."""

    prefill: object
    decode: object


def running(runner: ModelRunner) -> Running:
    """Returns the backends of a ``ModelRunner`` that is ready to run."""
    whole = runner.attn_backend
    if _name(whole) == f"{_SGLANG}.hybrid_attn_backend.HybridAttnBackend":
        return Running(whole.prefill_backend, whole.decode_backend)
    return Running(whole, getattr(runner, "decode_attn_backend", None) or whole)


def require_names(view: ServerArgs, store_first: str | None, own: str | None) -> None:
    """Checks both requirements before a model is loaded, as far as the arguments tell.

    Args:
        view: SGLang's arguments.
        store_first: name of the power that needs :func:`require_store_first`; None if none does.
        own: name of the power that needs :func:`require_own`; None if none does.

    Raises:
        ExtError: an argument names a backend that does not serve the power.
    """
    both = view.attention_backend
    prefill, decode = view.prefill_attention_backend or both, view.decode_attention_backend or both
    if store_first and prefill and prefill not in _STORE_FIRST_NAMES:
        raise ExtError(_not_store_first(store_first, prefill))
    for phase, name in (("prefill", prefill), ("decode", decode)):
        if own and name and name != _OWN_NAME:
            raise ExtError(_not_own(own, phase, name))


def _not_store_first(power: str, found: str) -> str:
    return (
        f"{power} computes parts of a prompt in one forward, which requires a prefill backend "
        f"that stores K and V before attention, and {found} is not known to do so; use "
        f"--prefill-attention-backend {', '.join(_STORE_FIRST_NAMES[:-1])} or "
        f"{_STORE_FIRST_NAMES[-1]}, or remove {power}"
    )


def _not_own(power: str, phase: str, found: str) -> str:
    return (
        f"{power} requires the compiled CPU attention, but {phase} runs {found}; use "
        f"--attention-backend {_OWN_NAME} for both phases, or remove {power}"
    )


def require_store_first(runner: ModelRunner, power: str) -> None:
    """Checks that the prefill backend stores a layer's K and V before it attends.

    Raises:
        ExtError: the backend that runs is not known to do so.
    """
    found = running(runner).prefill
    if _name(found) not in _STORE_FIRST:
        raise ExtError(_not_store_first(power, type(found).__name__))


def require_own(runner: ModelRunner, layout: Layout, scale: float, power: str) -> None:
    """Checks that the compiled CPU attention runs in prefill and in decode.

    Args:
        layout: layout of the slab from which K and V are read.
        scale: factor of the logits.

    Raises:
        ExtError: another backend runs in one of them, or the kernels do not serve the model.
    """
    for phase, found in running(runner)._asdict().items():
        if _name(found) != OWN:
            raise ExtError(_not_own(power, phase, type(found).__name__))
        query = torch.empty(1, layout.kv_heads, layout.head_dim, dtype=runner.dtype)
        keys = query.to(getattr(torch, layout.dtype))
        if not found.is_native(query, keys, keys, scale):
            asked = str(runner.dtype).removeprefix("torch.")
            raise ExtError(
                f"{power} requires the compiled CPU attention, but it is disabled or does not "
                f"support queries of {asked} over KV of {layout.dtype} with head_dim "
                f"{layout.head_dim} here; run sgl-ext doctor to see what is compiled, or remove "
                f"{power}"
            )


def _name(backend: object) -> str:
    kind = type(backend)
    return f"{kind.__module__}.{kind.__qualname__}"
