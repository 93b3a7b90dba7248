"""Compilation of SGLang's hash of pages, which names them in all tiers, before it is needed."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
from pathlib import Path

from sgl_ext.errors import ExtError

logger = logging.getLogger(__name__)

_UNWRITABLE = (errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS)


def prepare() -> None:
    """Compiles the hash if this machine has not done so yet, and loads it.

    SGLang would do both at the first request that looks up an external cache, in the scheduler's
    thread: all requests would wait for the compiler, and a failure would end the scheduler.

    Raises:
        ExtError: it cannot be compiled or loaded.
    """
    from sglang.srt.mem_cache.utils import get_hash_str

    if shutil.which("ninja") is None:  # of a virtual environment that is not activated
        folder = str(Path(sys.executable).parent)
        os.environ["PATH"] = os.pathsep.join((folder, os.environ.get("PATH", os.defpath)))
    logger.info("loading SGLang's page-hash extension (first start: compiles for about a minute)")
    try:
        get_hash_str([0])
    except RuntimeError as error:
        if isinstance(cause := error.__cause__, OSError) and cause.errno in _UNWRITABLE:
            raise ExtError(
                f"SGLang's hash of pages cannot be compiled or locked: {cause}; make room, make "
                "the folder writable, or set TORCH_EXTENSIONS_DIR to one that is"
            ) from None
        lines = str(error.__cause__ or error).strip().splitlines()
        wrong = next((line for line in lines if "error:" in line), lines[-1])
        raise ExtError(
            f"SGLang cannot compile its hash of pages: {wrong.strip()}; install a C++17 compiler, "
            "ninja and OpenSSL's headers (on Debian and Ubuntu: apt-get install g++ ninja-build "
            "libssl-dev)"
        ) from None


if __name__ == "__main__":
    prepare()
