"""The ``custom_params`` of a request that has not been checked."""

from __future__ import annotations

from typing import Any

STORED = "ext_stored"
"""Key of the stored context that a prompt follows."""


def custom_params(sampling_params: object) -> dict[str, Any]:
    """Returns the ``custom_params`` of a prompt's sampling parameters; an empty dict without any.

    Changes of the dict change the request.
    """
    found = sampling_params.get("custom_params") if isinstance(sampling_params, dict) else None
    return found if isinstance(found, dict) else {}
