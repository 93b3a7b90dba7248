"""Entry points that SGLang's plugin loader calls in every process it starts."""

from __future__ import annotations


def register() -> None:
    """``sglang.srt.plugins``: makes the flags known; nothing is active before they are given."""
    from sgl_ext.engine import server_args

    server_args.register()


def activate_cpu_platform() -> str | None:
    """``sglang.srt.platforms``: the CPU platform's class path, or None to stay out."""
    from sgl_ext.engine.cpu import platform

    if platform.reason_inactive() is not None:
        return None
    return f"{platform.__name__}:NativeCpuPlatform"
