"""Journal of calls that would synchronize host and device, with the places that made them.

The file is ``$SGLEXT_FAKED_CUDA_JOURNAL/<pid>.jsonl``; without the variable nothing is written. A
line has the keys ``at`` (seconds of the monotonic clock), ``thread``, ``kind``, ``what`` and
``places``, the innermost callers outside of torch and of this package, innermost first.

Kinds: ``sync`` (a wait that the caller asked for), ``read`` (a value or copy of a device tensor is
needed on the host now), ``upload`` (a blocking copy to the device), ``refused`` (a call that raises
on a device), ``race`` (accesses to the KV pool that are not ordered).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

_PLACES = 24
_HERE = str(Path(__file__).parent)
_lock = threading.Lock()
_file: TextIO | None = None
_pid = 0


def _open() -> TextIO | None:
    global _file, _pid
    folder = os.environ.get("SGLEXT_FAKED_CUDA_JOURNAL")
    if folder and _pid != os.getpid():
        _pid = os.getpid()
        Path(folder).mkdir(parents=True, exist_ok=True)
        _file = (Path(folder) / f"{_pid}.jsonl").open("a", buffering=1)
    return _file if folder else None


def places() -> list[str]:
    """Returns the innermost callers outside of torch and of this package as ``file:line name``."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < _PLACES:
        name = frame.f_code.co_filename
        if not name.startswith(_HERE) and "/site-packages/torch/" not in name and name[0] != "<":
            short = name.split("/site-packages/")[-1]
            found.append(f"{short}:{frame.f_lineno} {frame.f_code.co_qualname}")
        frame = frame.f_back  # type: ignore[assignment]
    return found


def write(kind: str, what: str) -> None:
    """Adds a line for the call that is in progress."""
    with _lock:
        file = _open()
        if file is None:
            return
        line = {
            "at": time.monotonic(),
            "thread": threading.current_thread().name,
            "kind": kind,
            "what": what,
            "places": places(),
        }
        file.write(json.dumps(line) + "\n")


def synchronized(what: str) -> None:
    write("sync", what)
