"""Start checks that the launcher makes before a scheduler loads its model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from safetensors import SafetensorError, safe_open

from sgl_ext import preflight
from sgl_ext.config import ExtConfig
from sgl_ext.config.values import written_size
from sgl_ext.engine.core import hooks
from sgl_ext.engine.core.attention_backends import force_paged_prefill, require_configured
from sgl_ext.engine.core.power import Power
from sgl_ext.engine.core.powers import powers_of
from sgl_ext.engine.core.sglang_types import ModelConfig, ServerArgs
from sgl_ext.engine.kv.obstacles import obstacle_in_arguments, obstacle_in_model
from sgl_ext.errors import ExtError
from sgl_ext.memory.slab import DTYPES, Layout
from sgl_ext.tiers.arena import stride_of

_INDEX = "model.safetensors.index.json"
_HUB_ANSWER_S = 10.0


def require_startable(server_args: ServerArgs, config: ExtConfig) -> None:
    """Checks, before SGLang resolves its arguments, that the model and the needed resources exist.

    Raises:
        ActivationError: the model is missing or incomplete, or the machine lacks a resource.
    """
    _require_model(server_args)
    try:
        preflight.require(config)
    except ExtError as error:
        raise hooks.ActivationError(str(error)) from None


def require_resolved(server_args: ServerArgs, config: ExtConfig) -> None:
    """Checks that the sections serve the resolved arguments, the page size and the model.

    Raises:
        ActivationError: one of them is not served.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import resolving_view

    view = resolving_view(server_args)
    if view.model_path.lower() in ("none", "dummy"):
        return
    powers, model = powers_of(config), model_config_of(server_args)
    _require_attention(view, powers)
    _require_layout(view, model, config, powers)
    for power in powers:
        power.require_resolved(view, model)
    if config.tiers is not None:
        if view.disable_radix_cache:
            raise hooks.ActivationError(
                "tiers require the radix cache, which SGLang has disabled for this model; remove "
                "the tiers section"
            )
        _require_room_for_a_page(config, _layout(view, model))
    _require_a_driver(view)


def _require_model(server_args: ServerArgs) -> None:
    """Checks that a local model exists and has complete weights.

    A path that is not plainly local may be the name of a model on a hub.
    """
    path = Path(server_args.model_path)
    is_local = path.is_absolute() or server_args.model_path.startswith((".", "~"))
    if not path.exists():
        if is_local:
            raise hooks.ActivationError(
                f"--model-path {path} does not exist; give the path of a model folder"
            )
        _require_hub(server_args)
    for weights in path.glob("*.safetensors"):
        try:
            with safe_open(weights, framework="pt"):
                pass  # opening reads the header, and compares it with the file's size
        except (SafetensorError, OSError) as error:
            raise hooks.ActivationError(
                f"{weights} is incomplete or damaged ({error}); copy or convert the model again"
            ) from None
    if (path / "config.json").exists() and server_args.load_format == "auto":
        for lacking in _lacking(path):
            raise hooks.ActivationError(
                f"--model-path {path} lacks {lacking}; copy or convert the model again"
            )


def _lacking(path: Path) -> Iterator[str]:
    """Yields the weight files that SGLang would look for in a model folder and not find."""
    if not any(next(path.glob(kind), None) for kind in ("*.safetensors", "*.bin", "*.pt")):
        yield "weights (*.safetensors, *.bin, *.pt)"
    with suppress(OSError, ValueError, KeyError, AttributeError):
        shards = json.loads((path / _INDEX).read_text())["weight_map"].values()
        yield from (name for name in sorted(set(shards)) if not (path / name).exists())


def _require_hub(server_args: ServerArgs) -> None:
    """Tries once to reach the hub; SGLang tries an unreachable hub for most of a minute."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
    from sglang.srt.environ import envs

    name, revision = server_args.model_path, server_args.revision
    elsewhere = "://" in name or name.lower() in ("none", "dummy")
    if elsewhere or envs.SGLANG_USE_MODELSCOPE.get():
        return
    # SGLang itself reports the hub's error answers and invalid names.
    with suppress(HfHubHTTPError, HFValidationError, OfflineModeIsEnabled):
        if try_to_load_from_cache(name, "config.json", revision=revision) is not None:
            return
        url = hf_hub_url(name, "config.json", revision=revision)
        try:
            get_hf_file_metadata(url, timeout=_HUB_ANSWER_S)
        except httpx.TransportError as error:
            raise hooks.ActivationError(
                f"--model-path {name} is neither a local folder nor in the hub's cache, and "
                f"{httpx.URL(url).host} cannot be reached ({error}); give the path of a model "
                "folder, or connect this machine to the network"
            ) from None


def _require_layout(
    view: ServerArgs, model: ModelConfig, config: ExtConfig, powers: Sequence[Power[Any]]
) -> None:
    """Checks that no section needs the slab while the arguments leave KV to SGLang's own pool."""
    needing = [power.name for power in powers if power.needs_slab]
    if config.memory.layout == "block_major":
        needing.append("memory.layout block_major")
    reason = obstacle_in_arguments(view) or obstacle_in_model(view, model)
    if config.memory.layout == "layer_major":
        reason = "memory.layout layer_major"
    if needing and reason is not None:
        names, verb = ", ".join(needing), "requires" if len(needing) == 1 else "require"
        raise hooks.ActivationError(
            f"{names} {verb} the block-major KV layout, which does not support {reason}; remove "
            f"{names} from the configuration, or change that setting"
        )


def _require_a_driver(view: ServerArgs) -> None:
    """Checks that Triton can run: without a GPU, SGLang would end at the first request."""
    both = view.attention_backend
    named = (view.prefill_attention_backend or both, view.decode_attention_backend or both)
    if view.device == "cpu" and "triton" in named and os.environ.get("TRITON_INTERPRET") != "1":
        raise hooks.ActivationError(
            "--attention-backend triton needs a GPU, but the device is cpu; use torch_native, or "
            "set TRITON_INTERPRET=1 to run Triton's interpreter, which is very slow"
        )


def _require_attention(view: ServerArgs, powers: Sequence[Power[Any]]) -> None:
    """Checks that the device and the attention backends serve the powers.

    Makes a prefill paged that would attend first otherwise. Backends that a model wraps or replaces
    are checked when they run.
    """
    try:
        require_configured(view, powers)
        force_paged_prefill(view, powers)
    except ExtError as error:
        raise hooks.ActivationError(str(error)) from None


def _layout(view: ServerArgs, model: ModelConfig) -> Layout | None:
    """Returns the layout of the slab; None if the arguments alone do not determine it."""
    dtype = view.kv_cache_dtype
    dtype = str(model.dtype).removeprefix("torch.") if dtype == "auto" else dtype
    if dtype not in DTYPES or model.head_dim != model.v_head_dim:
        return None
    heads = model.get_num_kv_heads(view.tp_size)
    layers = model.num_hidden_layers
    return Layout(view.page_size, layers, heads, model.head_dim, dtype, "")


def _require_room_for_a_page(config: ExtConfig, layout: Layout | None) -> None:
    if layout is None or config.tiers is None:
        return
    tiers, least = config.tiers, stride_of(layout)
    sizes = {
        "tiers.host.capacity": tiers.host.capacity if tiers.host else None,
        "tiers.staging": None if tiers.host else tiers.staging,
        "tiers.ssd.capacity": tiers.ssd.capacity if tiers.ssd else None,
        "swap.capacity": config.swap.capacity if config.swap else None,
    }
    for key, size in sizes.items():
        if size is not None and size < least:
            raise hooks.ActivationError(
                f"{key} is {written_size(size)}, but one page of {layout.page} tokens takes "
                f"{least:,} B; raise it, or lower --page-size"
            )
