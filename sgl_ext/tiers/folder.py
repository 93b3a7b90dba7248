"""Folder of the pages of one layout in a directory: its lock and its description."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from sgl_ext.errors import ExtError
from sgl_ext.memory.slab import Layout
from sgl_ext.own_files import flush, make_own_folder, open_own
from sgl_ext.tiers.arena import VERSION, layout_digest, stride_of

_PREFIX = "sgl_ext-v"
_LARGEST_LAYOUT = 1 << 16
"""Most bytes of a layout description that are read."""
_PROBED_S = 0.5
"""Longest time for which :func:`_in_use` of other processes may hold a lock, in seconds."""
_LAYOUT, _LOCK, PAGES = "layout.json", "LOCK", "pages"

logger = logging.getLogger(__name__)


class Folder:
    """Folder ``<directory>/sgl_ext-v<version>-<layout>``, locked by this process until closed.

    It holds ``layout.json`` (readable, and checked when opened), ``LOCK`` (the owner's pid) and
    ``pages``. Folders of other models, page sizes or versions in the same directory are reported
    and not changed.
    """

    def __init__(self, directory: Path, layout: Layout) -> None:
        """Creates the folder if it is missing, locks it and checks its layout.

        If ``layout.json`` is missing, unreadable or different, the pages are deleted.

        Raises:
            ExtError: ``directory`` is not a directory, the folder cannot be written to, or another
                server uses it.
        """
        if not directory.is_dir():
            found = "a file" if directory.exists() else "nothing"
            raise ExtError(f"{directory} must be a directory of an SSD, found {found}; create it")
        self.directory = directory
        self.path = directory / f"{_PREFIX}{VERSION}-{layout_digest(layout).hex()}"
        self._lock = -1
        try:
            make_own_folder(self.path)
            self._lock = open_own(self.path / _LOCK)
            self._acquire()
            self._check(layout)
        except OSError as error:
            self.close()
            raise ExtError(
                f"cannot store KV in {self.path}: {error.strerror} ({error.filename or _LOCK}); "
                "give the user of this server free space and write permission there, or choose "
                "another directory"
            ) from None
        except BaseException:
            self.close()
            raise
        _report_others(directory, self.path.name, layout)

    @property
    def pages(self) -> Path:
        """File that holds the slots."""
        return self.path / PAGES

    def close(self) -> None:
        """Releases the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _acquire(self) -> None:
        if not self._locked():
            pid = os.pread(self._lock, 32, 0).decode(errors="replace").strip() or "unknown"
            raise ExtError(
                f"{self.path} is in use by process {pid}; stop that server, or give this one "
                "another directory"
            )
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _locked(self) -> bool:
        """Takes the lock; another process that opens a folder may hold it for a moment."""
        end = time.monotonic() + _PROBED_S
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    return False
                time.sleep(0.01)
            else:
                return True

    def _check(self, layout: Layout) -> None:
        file = self.path / _LAYOUT
        expected = _description(layout)
        found = _read(file)
        if found == expected:
            return
        if file.exists() or self.pages.exists():
            wrong = "unreadable" if found is None else f"wrong ({_difference(expected, found)})"
            logger.warning(
                "%s is %s: the pages in its folder are deleted, and the tier starts empty",
                file,
                wrong if file.exists() else "missing",
            )
            self.pages.unlink(missing_ok=True)
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
        draft = file.with_suffix(".draft")
        with os.fdopen(open_own(draft), "w") as sink:
            sink.truncate()
            json.dump(expected, sink, indent=2)
        flush(draft)
        draft.replace(file)
        flush(self.path)  # without the description, all pages are deleted


def _description(layout: Layout) -> dict[str, object]:
    fields = msgspec.to_builtins(layout)
    return {"version": VERSION, **fields, "stride": stride_of(layout)}


def _read(file: Path) -> dict[str, object] | None:
    try:
        opened = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            found = json.loads(os.read(opened, _LARGEST_LAYOUT))
        finally:
            os.close(opened)
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _difference(ours: dict[str, object], theirs: dict[str, object]) -> str:
    return ", ".join(
        f"{field}: expected {ours.get(field)}, found {theirs.get(field)}"
        for field in dict.fromkeys([*ours, *theirs])
        if ours.get(field) != theirs.get(field)
    )


def _in_use(folder: Path) -> bool:
    """Returns whether a process, such as another rank of the same server, has a folder open."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def _report_others(directory: Path, own: str, layout: Layout) -> None:
    others = []
    for path in sorted(directory.glob(f"{_PREFIX}*")):
        if path.name == own or _in_use(path):
            continue
        found = _read(path / _LAYOUT)
        differs = _difference(_description(layout), found) if found else "unreadable layout"
        size = 0
        with suppress(OSError):
            size = (path / PAGES).stat().st_blocks * 512
        others.append(f"{path.name} ({size:,} B; {differs})")
    if others:
        logger.warning(
            "%s also holds KV of other models, or of other ranks that may start later: %s; delete "
            "what no server needs",
            directory,
            "; ".join(others),
        )
