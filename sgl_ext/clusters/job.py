"""Storage of a recorded context, as a process of a server or by ``sgl-ext cluster``."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from sgl_ext.clusters.build import build
from sgl_ext.clusters.files import own_folders, storing
from sgl_ext.clusters.profile import Options
from sgl_ext.clusters.recorded import Recorded
from sgl_ext.clusters.stored import Stored, about
from sgl_ext.clusters.stored_kv import StoredKV
from sgl_ext.errors import ExtError, reason_of
from sgl_ext.memory.limits import available_memory

_TIMES_KV = 8
"""Memory for the work on a layer relative to its KV: keys in float32, copies in other orders."""

_PR_SET_PDEATHSIG = 1
"""Option of Linux's ``prctl`` that asks for a signal when the parent ends."""


def store(
    record: Path,
    id_: str,
    directories: Sequence[Path],
    progress: Callable[[int, int], None],
    copies: int = 1,
    base: str | None = None,
) -> None:
    """Stores a context from the record that a server has written.

    Args:
        record: File of the record.
        id_: Id of the stored context.
        directories: One directory for each device.
        progress: Called with the number of finished layers and the number of all layers.
        copies: Copies of each block, on different devices.
        base: Id of the stored context that the recorded one continues, if any.

    Raises:
        ExtError: The context cannot be stored.
        OSError: The lock of the first folder cannot be opened.
    """
    folders = own_folders(directories)
    with storing(folders[0]):
        known = None
        if base is not None:
            known = Stored.open(base, folders, about(base, folders).geometry)
        recorded = Recorded.load(record, None if known is None else StoredKV(known))
        options = Options(threads=_layers_at_once(recorded))
        build(recorded, id_, folders, options, progress, copies, known)


def _layers_at_once(recorded: Recorded) -> int:
    """Returns the number of layers that the cores can process, and that fit into memory."""
    layer = len(recorded.tokens) * recorded.geometry.entry_bytes
    fit = available_memory() // (_TIMES_KV * layer)
    return max(min(len(os.sched_getaffinity(0)), fit), 1)


def _end_with(server: int) -> None:
    """Has the kernel kill this process when the server's process ends, even if that is killed.

    Another process may then go on with the record.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # it ended before
        sys.exit("sgl_ext: the server has ended; send the request again")


def main() -> None:
    """Stores a context as a server's process; prints a line per layer, or an error in one line."""
    parser = argparse.ArgumentParser(prog="python -m sgl_ext.clusters.job", description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("id")
    parser.add_argument("directories", type=Path, nargs="+")
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--base")
    parser.add_argument("--server", type=int, help="process that starts this one, and ends it")
    options = parser.parse_args()
    if options.server is not None:
        _end_with(options.server)
    os.nice(10)  # the server has priority
    with suppress(OSError):  # if memory runs out, this process is to end and not the server
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        store(
            options.record, options.id, options.directories,
            lambda done, of: print(f"{done}/{of}", flush=True), options.copies, options.base,
        )  # fmt: skip
    except ExtError as error:
        sys.exit(f"sgl_ext: {error}")
    except OSError as error:
        sys.exit(f"sgl_ext: cannot store the context: {reason_of(error)}")


if __name__ == "__main__":
    main()
