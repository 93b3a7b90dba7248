"""Masking of a server's keys where SGLang prints or reports its arguments."""

from __future__ import annotations

import re

from sgl_ext.engine.core.sglang_types import ServerArgs

MASK = "<redacted>"
"""Mask that SGLang prints for its watermark keys."""
_FIELDS = ("api_key", "admin_api_key", "ssl_keyfile_password")
_COMMAND = "_launch_command"
"""Attribute of ``ServerArgs`` that holds the command line, or the call of ``Engine``."""


def masked(arguments: dict[str, object]) -> dict[str, object]:
    """Returns the fields of ``ServerArgs`` with their secrets masked."""
    return arguments | {name: MASK for name in _FIELDS if arguments.get(name)}


def mask_command(server_args: ServerArgs) -> None:
    """Masks the secrets in the command line that the record holds."""
    command = getattr(server_args, _COMMAND, None)
    if not command:
        return
    for name in _FIELDS:
        if secret := getattr(server_args, name):
            # A secret is masked only as a whole argument, after a space, an equals sign or a quote.
            pattern = rf"(?<![^\s='\"]){re.escape(secret)}(?![^\s'\",)])"
            command = re.sub(pattern, MASK, command)
    setattr(server_args, _COMMAND, command)
