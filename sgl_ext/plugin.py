"""Entry points that SGLang's plugin loader calls in every process it starts."""

from __future__ import annotations


def register() -> None:
    """``sglang.srt.plugins``: makes the flags known; nothing is active before they are given."""
    import sys

    from sgl_ext.engine.core import activation, hooks
    from sgl_ext.engine.launch import server_args

    try:
        server_args.register()
    except hooks.ActivationError as error:
        # SGLang logs what a plugin raises and goes on: right for who did not ask for us.
        if "--enable-ext" in sys.argv:
            activation.commanded = True
            activation.refuse(error)
        raise


def activate_cpu_platform() -> str | None:
    """``sglang.srt.platforms``: the CPU platform's class path, or None to stay out."""
    from sgl_ext.engine.cpu import platform

    if platform.reason_inactive() is not None:
        return None
    return f"{platform.__name__}:NativeCpuPlatform"
