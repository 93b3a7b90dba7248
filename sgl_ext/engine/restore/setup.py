"""Checks of restoration."""

from __future__ import annotations

from sgl_ext.config import Restore
from sgl_ext.engine.core import hooks


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
