"""Checks of restoration."""

from __future__ import annotations

import inspect
from typing import Any

from sgl_ext.config import Restore
from sgl_ext.engine.core import hooks
from sgl_ext.planning.channels import load_unit
from sgl_ext.planning.costs import Costs


def require_parts(config: Restore, page: int, size: int | None) -> None:
    """Checks that prompts are computed in parts of whole pages.

    Args:
        page: tokens of a page.
        size: resolved ``--chunked-prefill-size``, in tokens; None if SGLang does not chunk prompts.

    Raises:
        ActivationError: prompts are not chunked, or ``restore.chunk`` is no multiple of the page.
    """
    if size is None or size < page:
        raise hooks.ActivationError(
            f"restore requires chunked prefill, but --chunked-prefill-size is {size}; set it to "
            f"{page} or more"
        )
    if config.chunk % page:
        raise hooks.ActivationError(
            f"restore.chunk is {config.chunk} tokens, which is not a multiple of the page size "
            f"{page}; set it to {-(-config.chunk // page) * page}, for example"
        )


def require_unaligned(alignment: int | None) -> None:
    """Checks that a part of a prompt may end at any page.

    Args:
        alignment: SGLang's ``truncation_align_size``, in tokens; None if there is none.

    Raises:
        ActivationError: SGLang has an alignment, with which parts of ``restore.chunk`` tokens might
            never begin, and results would depend on where they end.
    """
    if alignment is not None:
        raise hooks.ActivationError(
            f"restore computes prompts in parts that end at any page, but SGLang aligns chunks to "
            f"{alignment} tokens, as it does for --enable-deterministic-inference with flashinfer; "
            "use --prefill-attention-backend triton, or remove the restore section"
        )


def require_stages(model: Any) -> None:
    """Checks that a part of a prompt can be computed in the layers of one pipeline stage.

    Args:
        model: SGLang's model.

    Raises:
        ActivationError: its layers do not take the output of the stage before.
    """
    layers = getattr(model, "model", None)
    if layers is None or "pp_proxy_tensors" not in inspect.signature(layers.forward).parameters:
        raise hooks.ActivationError(
            f"restore does not support {type(model).__name__} in pipeline stages: its layers "
            "cannot be computed from stored activations; remove the restore section"
        )


def prepare(config: Restore, page: int, size: int | None, costs: Costs) -> None:
    """Makes the forwards and loads of the cost model those of restorations.

    Args:
        page: tokens of a page.
        size: resolved ``--chunked-prefill-size``, in tokens; None if SGLang does not chunk prompts.

    Raises:
        ActivationError: see :func:`require_parts`.
    """
    require_parts(config, page, size)
    costs.chunk = config.chunk if size is None else min(config.chunk, size // page * page)
    costs.unit = load_unit(page) * page
