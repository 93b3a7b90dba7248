"""Checks of the machine that need no model, for ``sgl-ext doctor`` and for every start."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Literal

from sgl_ext.config import SECTIONS, Chunks, Clusters, ExtConfig, Peer, Swap, Tiers
from sgl_ext.engine.cpu import platform as cpu
from sgl_ext.errors import ExtError
from sgl_ext.memory.direct_io import takes_direct_io
from sgl_ext.memory.limits import available_memory
from sgl_ext.packages import cache_dir
from sgl_ext.peer.directory import DirectoryError, address, lock, socket_path
from sgl_ext.planning.profile import PROFILES, known

Verdict = Literal["ok", "note", "fail"]

_LEAST_SHARED_MEMORY = 64 << 20
_CLIENT_S = 60.0
"""Time in which Mooncake's client must load, in seconds."""
_DATABASE_BYTES = 1 << 16
"""Bytes that a new database takes."""


@dataclass(frozen=True)
class Check:
    """Line of the report; the verdict ``fail`` means that the configuration would not run."""

    name: str
    verdict: Verdict
    found: str
    todo: str = ""


def examine(config: ExtConfig) -> list[Check]:
    """Returns the checks of this module: those of the machine, then those of each section."""
    return [_plugin(), _native(), _shared_memory(), *_sections(config)]


def require(config: ExtConfig) -> None:
    """Raises ExtError if a start could not succeed, before anything is loaded.

    Too little shared memory does not prevent a start, and neither do native parts that cannot be
    imported and that no section needs.

    Raises:
        ExtError: Checks failed. The message names all of them, in one line.
    """
    checks = [_plugin(), *_sections(config)]
    if config.tiers or config.clusters:
        checks.append(_native())
    failed = [check for check in checks if check.verdict == "fail"]
    if failed:
        raise ExtError("; ".join(f"{each.name}: {each.found}: {each.todo}" for each in failed))


def _plugin() -> Check:
    """Checks that SGLang loads this package; two environment variables can exclude it."""
    names = {ep.name for ep in entry_points(group="sglang.srt.plugins")}
    if "sgl_ext" not in names:
        return Check(
            "plugin", "fail", "SGLang does not find the plugin of this package",
            "install it (pip install -e .) into the environment that runs SGLang",
        )  # fmt: skip
    needed = {"sgl_ext"} | ({cpu.PLATFORM_NAME} if _cpu_platform_serves() else set())
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    missing = sorted(needed - {name.strip() for name in allowed.split(",")})
    if allowed and missing:
        return Check(
            "plugin", "fail", f"SGLANG_PLUGINS={allowed} excludes {', '.join(missing)}",
            "add it, or unset the variable",
        )  # fmt: skip
    selected = os.environ.get("SGLANG_PLATFORM")
    if selected and selected != cpu.PLATFORM_NAME:
        return Check(
            "plugin", "fail",
            f"SGLANG_PLATFORM={selected} excludes the platform plugin of this package",
            f"unset it, or set it to {cpu.PLATFORM_NAME}",
        )  # fmt: skip
    return Check("plugin", "ok", "registered with SGLang")


def _cpu_platform_serves() -> bool:
    try:
        return cpu.reason_inactive() is None
    except ImportError:  # torch is missing, which another check reports
        return False


def _native() -> Check:
    try:
        from sgl_ext._native import _attention, _transfer
    except ImportError as error:
        return Check("native parts", "fail", str(error), "reinstall with scripts/setup.sh")
    isas = ", ".join(_attention.isas())
    rings = "with" if _transfer.io_uring_built() else "without"
    return Check("native parts", "ok", f"attention for {isas}; transfer engine {rings} io_uring")


def _shared_memory() -> Check:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Check("shared memory", "note", f"/dev/shm: {error.strerror}", "mount a tmpfs there")
    found = f"{size_text(usage.free)} free of {size_text(usage.total)}"
    if usage.free < _LEAST_SHARED_MEMORY:
        return Check("shared memory", "fail", found, "free some, or mount a larger /dev/shm")
    return Check("shared memory", "ok", found)


_NEEDS = {
    "tiers": "host memory, SSD directories, or a Mooncake master",
    "chunks": "a model with rotary positions",
    "restore": "a tier to restore from",
    "swap": "host memory",
    "peer": "a second engine on this host",
    "clusters": "SSD directories, one per device",
}


def _profiles() -> Check:
    subjects = sorted(
        f"page size {each.subject.page}, {each.subject.dtype}, {each.subject.device}"
        for each in known(cache_dir() / PROFILES)
    )
    if not subjects:
        return Check(
            "cost profile", "note", "none; servers measure costs while they run",
            "run sgl-ext calibrate --model-path … with this configuration, and with the server's "
            "--page-size",
        )  # fmt: skip
    return Check("cost profile", "ok", f"measured with {'; '.join(dict.fromkeys(subjects))}")


def _sections(config: ExtConfig) -> Iterator[Check]:
    present = config.sections()
    for name in SECTIONS:
        if name not in present:
            yield Check(name, "ok", f"off (needs {_NEEDS[name]})")
            continue
        section = present[name]
        probed = "; add --model-path to check the model" if name == "chunks" else ""
        yield Check(name, "ok", f"on{probed}")
        if isinstance(section, Tiers):
            yield _profiles()
            yield from _tiers(section, config.swap)
        if isinstance(section, Clusters):
            for directory in section.directories:
                yield _ssd_directory(name, directory, 0)
        if isinstance(section, Chunks) and section.directory is not None:
            yield _database_directory(name, section.directory)
        if isinstance(section, Peer):
            yield _peer_directory(section)


def _tiers(tiers: Tiers, swap: Swap | None) -> Iterator[Check]:
    if tiers.ssd is not None:
        for directory in tiers.ssd.directories:
            yield _ssd_directory("tiers", directory, tiers.ssd.capacity)
    if tiers.remote is not None:
        yield _remote_client()
    key, asked = "tiers.staging", tiers.staging
    if tiers.host is not None:
        # Without a host tier, swap adds one of its own capacity.
        swaps = swap is not None and swap.capacity == tiers.host.capacity
        key = "swap.capacity and tiers.host.capacity" if swaps else "tiers.host.capacity"
        asked = tiers.host.capacity
    if asked > (available := available_memory()):
        yield Check(
            "host memory", "fail",
            f"{size_text(asked)} requested, {size_text(available)} available",
            f"lower {key}",
        )  # fmt: skip
    yield _page_hash()


def _page_hash() -> Check:
    from sgl_ext.engine.tiers import page_hash

    try:
        page_hash.prepare()
    except (ExtError, ImportError) as error:
        return Check("page hash", "fail", *_found_and_todo(str(error)))
    return Check("page hash", "ok", "SGLang's hash of pages is compiled")


def _remote_client() -> Check:
    """Loads Mooncake's client in a separate process, because it starts threads and writes a log."""
    program = "from sgl_ext.tiers.mooncake import library; library()"
    try:
        result = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=False,
            timeout=_CLIENT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Check(
            "remote tier", "fail", f"Mooncake's client did not load within {_CLIENT_S:g} s",
            "install it again, or remove tiers.remote",
        )  # fmt: skip
    if result.returncode:
        found = result.stderr.strip().rpartition("\n")[2].partition("remote tier: ")[2]
        return Check("remote tier", "fail", *_found_and_todo(found or result.stderr[-500:]))
    return Check("remote tier", "ok", "Mooncake's client can be loaded")


def _peer_directory(peer: Peer) -> Check:
    """Checks a peer directory; the start creates a missing one."""
    name = f"peer directory {peer.directory}"
    try:
        socket_path(peer.directory)
        # Unlike those of Path, these functions are also False where a parent may not be entered.
        if not os.path.exists(peer.directory):  # noqa: PTH110
            above = next(each for each in peer.directory.parents if os.path.exists(each))  # noqa: PTH110
            if os.path.isdir(above) and os.access(above, os.W_OK | os.X_OK):  # noqa: PTH112
                return Check(name, "ok", "will be created")
            return Check(
                name, "fail", f"cannot be created in {above}", "create it, or choose another"
            )
        address(peer.directory)
        if peer.role == "master":
            lock(peer.directory).close()
    except DirectoryError as error:
        return Check(name, "fail", *_found_and_todo(str(error)))
    return Check(name, "ok", f"can be used by a {peer.role}")


def _directory(section: str, directory: Path) -> Check:
    name = f"{section} directory {directory}"
    if not os.path.isdir(directory):  # noqa: PTH112  # also False for an invalid name
        if os.path.exists(directory):  # noqa: PTH110
            return Check(name, "fail", "is not a directory", "choose a directory")
        return Check(name, "fail", "does not exist", "create it")
    if not os.access(directory, os.W_OK | os.X_OK):
        return Check(name, "fail", "not writable", "change its owner or mode")
    return Check(name, "ok", "can be written")


def _database_directory(section: str, directory: Path) -> Check:
    """Checks that there is room for a database. Its directory, unlike one of SSD tiers, must not
    be full."""
    found = _directory(section, directory)
    if found.verdict != "ok":
        return found
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, _DATABASE_BYTES)
    except OSError as error:
        return Check(
            found.name,
            "fail",
            f"cannot be written: {error.strerror}",
            "free some space, or choose another",
        )
    return found


def _ssd_directory(section: str, directory: Path, capacity: int) -> Check:
    found = _directory(section, directory)
    if found.verdict != "ok":
        return found
    name = found.name
    usage = shutil.disk_usage(directory)
    if capacity > usage.total:
        return Check(
            name,
            "fail",
            f"capacity {size_text(capacity)} on a disk of {size_text(usage.total)}",
            "lower the capacity",
        )
    free = f"{size_text(usage.free)} free"
    try:
        direct = takes_direct_io(directory)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return Check(name, "note", "full", "existing KV is served, and overwritten")
        return Check(
            name, "fail", f"cannot be written: {error.strerror}", "choose another directory"
        )
    if not direct:
        return Check(name, "note", f"{free}, no O_DIRECT", "reads go through the page cache")
    return Check(name, "ok", f"{free}, O_DIRECT")


def _found_and_todo(message: str) -> tuple[str, str]:
    found, _, todo = message.rpartition("; ")
    return found or message, todo if found else ""


def size_text(size: int) -> str:
    """Returns ``size`` bytes as text, in GiB, or in MiB if it is less than one."""
    return f"{size / (1 << 20):.0f} MiB" if size < 1 << 30 else f"{size / (1 << 30):.1f} GiB"
