"""Devices and attention backends that powers are served on, and the reasons for refusals.

The tables state facts about SGLang and about this package. Which combinations of device, attention
backend and power are served follows from these facts and from the requirements of the power
(:meth:`~sgl_ext.engine.core.power.Power.attention`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

READY: Mapping[str, frozenset[str]] = {
    "cpu": frozenset({"tiers", "restore", "swap", "chunks", "peer", "clusters"}),
    "cuda": frozenset({"tiers", "restore", "swap", "chunks", "peer", "clusters"}),
}
"""Powers that are implemented for each type of device; other types of devices have none."""
TRIED: Mapping[str, frozenset[str]] = {"cpu": READY["cpu"], "cuda": frozenset()}
"""Powers that have been run on a real device of each type; the others need :data:`UNTRIED`."""
UNTRIED = "SGLEXT_UNTRIED"
"""Environment variable that, set to 1, starts powers that were only run on a simulated device."""
SLAB_DEVICES = frozenset({"cpu", "cuda"})
"""Types of devices in whose memory the slab can lie."""


class Property(Enum):
    """Property of an attention backend that a power may require."""

    STRIDED = auto()
    """Reads K and V ``[slots, kv_heads, head_dim]`` with any stride between slots."""
    STORES_FIRST = auto()
    """Extend stores a layer's K and V in the pool before it attends, and reads earlier tokens from
    there, so that rows that alias one request see each other."""
    EAGER_DECODE = auto()
    """SGLang does not capture its decode in CUDA graphs, whose replay calls no Python."""
    OWN = auto()
    """Is the compiled CPU attention, which also reads K and V outside of the pool."""
    FOLLOWERS = auto()
    """Serves rows that also attend to K and V in host memory outside of the pool: it reads them
    itself, or its output is a plain softmax over the row's tokens in the pool, which is merged with
    theirs in a forward without CUDA graphs."""


_BOTH = frozenset({Property.STRIDED, Property.OWN, Property.FOLLOWERS})
_PREFILL = _BOTH | {Property.STORES_FIRST}
_DECODE = _BOTH | {Property.EAGER_DECODE}
_STRIDED, _EAGER = frozenset({Property.STRIDED}), frozenset({Property.EAGER_DECODE})
_ROWS = frozenset({Property.STRIDED, Property.STORES_FIRST})
_FOLLOWED = _ROWS | {Property.FOLLOWERS}


class Backend(NamedTuple):
    """Facts about an attention backend of SGLang on one type of device."""

    name: str
    """Value of ``--attention-backend`` that selects it."""
    kind: str
    """Dotted name of the class of its objects. Subclasses do not count, because their order may
    differ, as that of TRT-LLM's backend differs from that of its base class, FlashInfer's."""
    has: frozenset[Property]
    lacks: Mapping[Property, str] = {}
    """Reasons why it lacks other properties, as far as they are known."""
    paged_only: bool = False
    """Whether it stores first only while its prefill is paged (:data:`PAGED`)."""
    version: int | None = None
    """``fa_impl_ver`` of its objects, which tells backends of one class apart; None for others."""


PAGED = ("use_paged", "enable_deterministic", "is_multimodal", "enable_mis")
"""Attributes of FlashInfer's backend, each of which makes its prefill paged."""
PAGED_VARIABLE = "SGLANG_FLASHINFER_USE_PAGED"
"""Environment variable from which FlashInfer's backend takes ``use_paged``."""

_SGLANG = "sglang.srt.layers.attention"
OWN_KIND = "sgl_ext.engine.cpu.attention.CpuAttnBackend"
_TORCH_NATIVE = f"{_SGLANG}.torch_native_backend.TorchNativeAttnBackend"
_FLEX = f"{_SGLANG}.torch_flex_backend.TorchFlexAttnBackend"
_AMX = f"{_SGLANG}.intel_amx_backend.IntelAMXAttnBackend"
_TRITON = f"{_SGLANG}.triton_backend.TritonAttnBackend"
_FLASH_ATTENTION = f"{_SGLANG}.flashattention_backend.FlashAttentionBackend"
_FLASHINFER = f"{_SGLANG}.flashinfer_backend.FlashInferAttnBackend"
_TRTLLM = f"{_SGLANG}.trtllm_mha_backend.TRTLLMHAAttnBackend"

BACKENDS: Mapping[str, tuple[Backend, ...]] = {
    "cpu": (
        Backend("torch_native", OWN_KIND, frozenset(Property)),
        Backend("torch_native", _TORCH_NATIVE, _ROWS | _EAGER),
        Backend("triton", _TRITON, _ROWS),
        Backend("flex_attention", _FLEX, _STRIDED | _EAGER),
        Backend("intel_amx", _AMX, _STRIDED),
    ),
    "cuda": (
        Backend("triton", _TRITON, _FOLLOWED),
        Backend("fa3", _FLASH_ATTENTION, _FOLLOWED, version=3),
        Backend(
            "fa4", _FLASH_ATTENTION, frozenset({Property.STORES_FIRST}), version=4,
            lacks={Property.STRIDED: "its kernels of head_dim 256 take K and V for contiguous"},
        ),
        Backend("flashinfer", _FLASHINFER, _FOLLOWED, paged_only=True),
        Backend("trtllm_mha", _TRTLLM, _FOLLOWED),
        Backend("torch_native", _TORCH_NATIVE, _FOLLOWED | _EAGER),
    ),
}  # fmt: skip
"""Backends whose properties are known, by type of device; others count as having none of them.

Of several backends of one name, the name selects the first one unless the environment says
otherwise.
"""


class Found(NamedTuple):
    """Attention backend that is configured, or that runs."""

    shown: str
    """Its name in messages."""
    has: frozenset[Property] = frozenset()
    lacks: Mapping[Property, str] = {}


class Phases(NamedTuple):
    """Attention backends of both phases; None where the arguments do not determine one."""

    prefill: Found | None
    decode: Found | None


def device_type(device: str) -> str:
    """Returns the type of a device of ``--device``; torch calls AMD's devices cuda as well."""
    import torch

    kind = device.partition(":")[0]
    return "rocm" if kind == "cuda" and torch.version.hip else kind


def configured(device: str, name: str) -> Found:
    """Returns what is known of the backend that ``--attention-backend name`` selects.

    FlashInfer's prefill counts as paged, because a start of a power that requires it makes it so.
    """
    for backend in BACKENDS.get(device, ()):
        if backend.name == name:
            return Found(name, backend.has, backend.lacks)
    return Found(name)


def running(device: str, attention: object) -> Found:
    """Returns what is known of an ``AttentionBackend`` object of SGLang."""
    of = type(attention)
    for backend in BACKENDS.get(device, ()):
        if backend.kind != f"{of.__module__}.{of.__qualname__}":
            continue
        if backend.version not in (None, getattr(attention, "fa_impl_ver", None)):
            continue
        if backend.paged_only and not any(getattr(attention, each, False) for each in PAGED):
            ragged = f"its ragged prefill attends first; set {PAGED_VARIABLE}=1"
            rest = backend.has - {Property.STORES_FIRST}
            return Found(of.__name__, rest, {Property.STORES_FIRST: ragged})
        return Found(of.__name__, backend.has, backend.lacks)
    return Found(of.__name__)


def refusal(device: str, found: Phases, power: str, required: Mapping[Property, str]) -> str | None:
    """Returns why a power is refused on a type of device with these backends; None if it is served.

    Args:
        required: properties that the backends must have, each with the name of the power or option
            that requires it.
    """
    return unready(device, power) or unsuited(device, found, required)


def unready(device: str, power: str) -> str | None:
    """Returns that a power is not implemented for a type of device, or was never tried there.

    Returns None if it is served.
    """
    elsewhere = f"serve on the CPU (SGLANG_PLATFORM=sgl_ext_cpu), or remove {power}"
    if power not in READY.get(device, ()):
        return f"{power} is not implemented for the device {device}; {elsewhere}"
    if power not in TRIED.get(device, ()) and os.environ.get(UNTRIED) != "1":
        return (
            f"{power} on the device {device} has only been run on a simulated device, never on a "
            f"real one; set {UNTRIED}=1 to try it, {elsewhere}"
        )
    return None


def unsuited(device: str, found: Phases, required: Mapping[Property, str]) -> str | None:
    """Returns which required property a backend lacks, with the way out; None if none does."""
    for each, by in required.items():
        for phase, backend in found._asdict().items():
            relevant = each in (_PREFILL if phase == "prefill" else _DECODE)
            if relevant and backend is not None and each not in backend.has:
                return _message(device, each, by, phase, backend)
    return None


def _message(device: str, lacking: Property, by: str, phase: str, found: Found) -> str:
    because = f" ({found.lacks[lacking]})" if lacking in found.lacks else ""
    others = _with(device, _ROWS if lacking is Property.STORES_FIRST else {lacking})
    if lacking is Property.STORES_FIRST:
        return (
            f"{by} computes parts of a prompt in one forward, which requires a prefill backend "
            f"that stores K and V before attention, and {found.shown} is not known to do so"
            f"{because}; use --prefill-attention-backend {others}, or remove {by}"
        )
    if lacking is Property.STRIDED:
        return (
            f"{by} requires attention backends that read KV with any strides, and {found.shown} in "
            f"{phase} is not known to do so{because}; use --attention-backend {others}, or remove "
            f"{by}"
        )
    graphs = lacking is Property.EAGER_DECODE
    what = "a decode without CUDA graphs" if graphs else "the compiled CPU attention"
    todo = f"use --attention-backend {others} for both phases" if others else "serve on the CPU"
    return f"{by} requires {what}, but {phase} runs {found.shown}; {todo}, or remove {by}"


def _with(device: str, properties: frozenset[Property] | set[Property]) -> str:
    """Returns the names of a device's backends that have some properties, as a list in words."""
    known = BACKENDS.get(device, ())
    names = list(dict.fromkeys(each.name for each in known if properties <= each.has))
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
