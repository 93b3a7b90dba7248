"""Functions that the stand-in names but does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def missing(name: str, purpose: str) -> Callable[..., NoReturn]:
    """Returns a function that raises; SGLang imports it, and calls it for ``purpose`` only."""

    def function(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} is needed for {purpose}, and this stand-in in plain torch does not "
            "have it; install sglang-kernel, or serve a dense model without quantization"
        )

    function.__name__ = function.__qualname__ = name
    return function
