"""Keys of a server: where SGLang prints or reports its arguments, they are masked."""

from __future__ import annotations

import re
from typing import Any

from sgl_ext.engine.core.sglang_types import ServerArgs

MASK = "<redacted>"
"""The mask that SGLang prints for its watermark keys."""
_FIELDS = ("api_key", "admin_api_key", "ssl_keyfile_password")
_COMMAND = "_launch_command"
"""Attribute of ``ServerArgs``: the command line, or the call of ``Engine``."""


def masked(arguments: dict[str, Any]) -> dict[str, Any]:
    """``ServerArgs`` as plain fields, without its secrets."""
    return arguments | {name: MASK for name in _FIELDS if arguments.get(name)}


def mask_command(server_args: ServerArgs) -> None:
    """Takes the secrets out of the command that the record says it was made by."""
    command = getattr(server_args, _COMMAND, None)
    if not command:
        return
    for name in _FIELDS:
        if secret := getattr(server_args, name):
            # A whole argument, behind a space, an equals sign or a quote.
            pattern = rf"(?<![^\s='\"]){re.escape(secret)}(?![^\s'\",)])"
            command = re.sub(pattern, MASK, command)
    setattr(server_args, _COMMAND, command)
