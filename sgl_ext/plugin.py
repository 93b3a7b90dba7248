"""Entry points that SGLang's plugin loader calls in every process that it starts."""

from __future__ import annotations


def register() -> None:
    """Registers the command line flags of this package; entry point for ``sglang.srt.plugins``.

    Nothing is active until the flags are given.
    """
    import sys

    from sgl_ext.engine.core import activation, hooks
    from sgl_ext.engine.launch import server_args

    try:
        server_args.register()
    except hooks.ActivationError as error:
        # SGLang logs the error and continues, which is right unless this package was requested.
        if "--enable-ext" in sys.argv:
            activation.commanded = True
            activation.refuse(error)
        raise


def activate_cpu_platform() -> str | None:
    """Returns the class path of the CPU platform, or None if SGLang should not use it.

    Entry point for ``sglang.srt.platforms``.
    """
    from sgl_ext.engine.cpu import platform

    if platform.reason_inactive() is not None:
        return None
    return f"{platform.__name__}:NativeCpuPlatform"
