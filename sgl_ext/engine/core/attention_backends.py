"""Attention backends that are configured or run in a scheduler, and the requirements of powers.

Requirements are checked on the resolved arguments before a model is loaded, and on the running
backends before the server is ready, because models may wrap or replace the configured ones.
:mod:`~sgl_ext.engine.core.served` has the facts about each backend.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sgl_ext.engine.core import served
from sgl_ext.engine.core.served import Phases, Property
from sgl_ext.engine.core.sglang_types import ModelRunner, ServerArgs
from sgl_ext.errors import ExtError
from sgl_ext.memory.slab import Layout

if TYPE_CHECKING:
    from sgl_ext.engine.core.power import Power

_HYBRID = "sglang.srt.layers.attention.hybrid_attn_backend.HybridAttnBackend"

logger = logging.getLogger(__name__)


class Running(NamedTuple):
    """SGLang's ``AttentionBackend`` objects that a model's forwards call."""

    prefill: Any
    decode: Any


def running(runner: ModelRunner) -> Running:
    """Returns the backends of a ``ModelRunner`` that is ready to run."""
    whole = runner.attn_backend
    if f"{type(whole).__module__}.{type(whole).__qualname__}" == _HYBRID:
        return Running(whole.prefill_backend, whole.decode_backend)
    return Running(whole, getattr(runner, "decode_attn_backend", None) or whole)


def configured(view: ServerArgs) -> Phases:
    """Returns what is known of the backends that arguments select."""
    device, both = served.device_type(view.device), view.attention_backend
    names = (view.prefill_attention_backend or both, view.decode_attention_backend or both)
    return Phases(*(None if name is None else served.configured(device, name) for name in names))


def require_configured(view: ServerArgs, powers: Iterable[Power[Any]]) -> None:
    """Checks that the device and the attention backends of resolved arguments serve the powers.

    Raises:
        ExtError: they do not serve one of them.
    """
    device, found = served.device_type(view.device), configured(view)
    for power in powers:
        if reason := served.refusal(device, found, power.name, power.attention()):
            raise ExtError(reason)


def force_paged_prefill(view: ServerArgs, powers: Iterable[Power[Any]]) -> None:
    """Makes FlashInfer's prefill paged if a power requires a backend that stores first.

    Sets SGLang's environment variable, which the schedulers of this launcher and of later ones in
    this process inherit.

    Raises:
        ExtError: the variable is set to another value.
    """
    from sglang.srt.environ import envs

    name = view.prefill_attention_backend or view.attention_backend
    by = next((power.name for power in powers if Property.STORES_FIRST in power.attention()), None)
    device = served.device_type(view.device)
    backend = next((each for each in served.BACKENDS.get(device, ()) if each.name == name), None)
    if by is None or backend is None or not backend.paged_only:
        return
    variable = envs.SGLANG_FLASHINFER_USE_PAGED
    if variable.get():
        return
    if variable.is_set():
        raise ExtError(
            f"{by} requires the paged prefill of {name}, but {variable.name} disables it; unset "
            f"the variable, or remove {by}"
        )
    variable.set(True)
    logger.info("%s=1 is set, because %s requires the paged prefill of %s", variable.name, by, name)


def require_running(runner: ModelRunner, required: Mapping[Property, str]) -> None:
    """Checks the attention backends that run.

    Args:
        required: properties that they must have, each with the power or option that requires it.

    Raises:
        ExtError: one of them is not known to have a property.
    """
    device = served.device_type(str(runner.device))
    found = Phases(*(served.running(device, each) for each in running(runner)))
    if reason := served.unsuited(device, found, required):
        raise ExtError(reason)


def require_own(runner: ModelRunner, layout: Layout, scale: float, power: str) -> None:
    """Checks that the compiled CPU attention runs in prefill and in decode.

    Args:
        layout: layout of the slab from which K and V are read.
        scale: factor of the logits.

    Raises:
        ExtError: another backend runs in one of them, or the kernels do not serve the model.
    """
    require_running(runner, {Property.OWN: power})
    for found in running(runner):
        require_kernels(found.is_native, runner, layout, scale, power)


def require_kernels(
    serves: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], bool],
    runner: ModelRunner,
    layout: Layout,
    scale: float,
    power: str,
) -> None:
    """Checks that the compiled CPU kernels serve a model.

    Args:
        serves: function that returns whether they serve queries, keys and values with a scale.
        layout: see :func:`require_own`.
        scale: see :func:`require_own`.

    Raises:
        ExtError: they do not serve it.
    """
    query = torch.empty(1, layout.kv_heads, layout.head_dim, dtype=runner.dtype)
    keys = query.to(getattr(torch, layout.dtype))
    if not serves(query, keys, keys, scale):
        asked = str(runner.dtype).removeprefix("torch.")
        raise ExtError(
            f"{power} requires the compiled CPU attention, but it is disabled or does not "
            f"support queries of {asked} over KV of {layout.dtype} with head_dim "
            f"{layout.head_dim} here; run sgl-ext doctor to see what is compiled, or remove "
            f"{power}"
        )


def attention_layers(model: torch.nn.Module) -> list[Any]:
    """Returns SGLang's ``RadixAttention`` modules of a model."""
    from sglang.srt.layers.radix_attention import RadixAttention

    return [each for each in model.modules() if isinstance(each, RadixAttention)]
