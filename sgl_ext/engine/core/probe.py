"""Check, in a separate process, that every hook and seam fits the installed SGLang.

``python -m sgl_ext.engine.core.probe`` prints one line and exits with 0 only if all of them fit.
"""

from __future__ import annotations

import sys

from sgl_ext.engine.core import hooks
from sgl_ext.engine.cpu import platform


def main() -> None:
    try:
        hooks.require_supported_sglang()
        from sglang.srt.platforms import current_platform

        name = type(current_platform).__name__
        if platform.reason_inactive() is None and name != "NativeCpuPlatform":
            raise hooks.ActivationError(
                f"SGLang chose the platform {name}, expected the platform of sgl_ext"
            )
        # On the CPU platform, this imports and patches the modules of SGLang that it changes.
        current_platform.init_backend()
        from sgl_ext.engine.core import scheduler
        from sgl_ext.engine.launch import launcher, server_args
        from sgl_ext.engine.step import forward

        hooks.apply(
            [*server_args.HOOKS, *launcher.HOOKS, *scheduler.HOOKS],
            [*launcher.SEAMS, *forward.SEAMS],
        )
    except hooks.ActivationError as error:
        sys.exit(str(error))
    except (ImportError, AttributeError) as error:
        sys.exit(f"SGLang cannot be imported: {error}")
    print(f"platform {name}")


if __name__ == "__main__":
    main()
