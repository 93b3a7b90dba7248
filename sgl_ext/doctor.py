"""Would a given configuration run here? Facts of the machine, and a verdict per section."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal

import psutil

from sgl_ext import SUPPORTED_SGLANG
from sgl_ext.config import SECTIONS, Clusters, ExtConfig, Restore, Swap, Tiers
from sgl_ext.engine.cpu import platform as cpu
from sgl_ext.engine.hooks import installed_sglang
from sgl_ext.errors import ExtError
from sgl_ext.memory import mapping
from sgl_ext.memory.limits import available_memory
from sgl_ext.packages import cache_dir
from sgl_ext.restore.profile import PROFILES, known

Verdict = Literal["ok", "note", "fail"]

_PROBE_DEADLINE_S = 180
_LEAST_SHARED_MEMORY = 64 << 20
_IO_URING_SETUP = 425  # the same number on every architecture


@dataclass(frozen=True)
class Check:
    """One line of the report. ``fail`` means that the configuration would not run."""

    name: str
    verdict: Verdict
    found: str
    todo: str = ""


def examine(config: ExtConfig) -> list[Check]:
    """Every check, the machine's first, then one verdict per section."""
    return [
        _python(),
        _torch(),
        _sglang(),
        _plugin(),
        _accelerator(),
        _hooks(),
        _memory(),
        _huge_pages(),
        _native(),
        _io_uring(),
        _shared_memory(),
        *_sections(config),
    ]


def would_run(checks: list[Check]) -> bool:
    """Whether no check failed."""
    return all(check.verdict != "fail" for check in checks)


def as_json(checks: list[Check], config: ExtConfig) -> dict[str, Any]:
    """The report in plain JSON types."""
    return {
        "would_run": would_run(checks),
        "config": config.resolved(),
        "checks": [asdict(check) for check in checks],
    }


def _python() -> Check:
    found = platform.python_version()
    if not found.startswith("3.11."):
        return Check("Python", "note", found, "the pinned packages and tests are for 3.11")
    return Check("Python", "ok", found)


def _torch() -> Check:
    try:
        import torch
    except ImportError as error:
        return Check("torch", "fail", f"not importable: {error}", "run scripts/setup.sh")
    return Check("torch", "ok", str(torch.__version__))


def _sglang() -> Check:
    found = installed_sglang()
    if found != SUPPORTED_SGLANG:
        return Check("SGLang", "fail", found, f"install sglang=={SUPPORTED_SGLANG}")
    return Check("SGLang", "ok", found)


def _plugin() -> Check:
    """SGLang restricts plugins, and platforms with them, by two environment variables."""
    names = {ep.name for ep in entry_points(group="sglang.srt.plugins")}
    if "sgl_ext" not in names:
        return Check(
            "plugin", "fail", "SGLang does not see this package",
            "install it (pip install -e .) into the environment that runs SGLang",
        )  # fmt: skip
    needed = {"sgl_ext"} | ({cpu.PLATFORM_NAME} if _cpu_platform_serves() else set())
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    missing = sorted(needed - {name.strip() for name in allowed.split(",")})
    if allowed and missing:
        return Check(
            "plugin", "fail", f"SGLANG_PLUGINS={allowed} leaves out {', '.join(missing)}",
            "add it, or unset the variable",
        )  # fmt: skip
    selected = os.environ.get("SGLANG_PLATFORM")
    if selected and selected != cpu.PLATFORM_NAME:
        return Check(
            "plugin", "fail", f"SGLANG_PLATFORM={selected} shuts out this package's plugin",
            f"unset it, or set it to {cpu.PLATFORM_NAME}",
        )  # fmt: skip
    return Check("plugin", "ok", "registered with SGLang")


def _cpu_platform_serves() -> bool:
    try:
        return cpu.reason_inactive() is None
    except ImportError:  # no torch, which its own check reports
        return False


def _accelerator() -> Check:
    try:
        inactive = cpu.reason_inactive()
    except ImportError as error:
        return Check("accelerator", "fail", str(error), "run scripts/setup.sh")
    if inactive is None:
        return Check("accelerator", "ok", "none; the CPU platform serves")
    return Check("accelerator", "ok", f"the CPU platform stays out: {inactive}")


def _hooks() -> Check:
    """In a process of its own: importing SGLang here would change this one."""
    try:
        result = subprocess.run(
            [sys.executable, "-m", "sgl_ext.engine.probe"],
            capture_output=True, text=True, timeout=_PROBE_DEADLINE_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Check(
            "hooks", "fail", f"importing SGLang took over {_PROBE_DEADLINE_S} s", "try again"
        )
    last = (result.stdout if result.returncode == 0 else result.stderr).strip().splitlines()
    found = last[-1] if last else f"exit code {result.returncode}"
    if result.returncode != 0:
        return Check("hooks", "fail", found, "reinstall with scripts/setup.sh")
    return Check("hooks", "ok", f"every hook and seam fits; {found}")


def _memory() -> Check:
    available, total = _gib(available_memory()), _gib(psutil.virtual_memory().total)
    return Check("memory", "ok", f"{available} available of {total}")


def _huge_pages() -> Check:
    """Asks for one, as the slab will: what the kernel's settings say does not decide it."""
    try:
        descriptor = mapping.create("sgl_ext-doctor", mapping.HUGE_PAGE)
        try:
            shared = mapping.Mapping(descriptor, mapping.HUGE_PAGE, writable=True)
        finally:
            os.close(descriptor)
        if not shared.collapse(0, mapping.HUGE_PAGE):
            return Check("huge pages", "ok", "shared memory gets them when asked")
    except (OSError, ExtError) as error:
        return Check("huge pages", "note", str(error), "free some memory")
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return Check(
        "huge pages", "note", "refused for shared memory; decode over the slab is slower",
        f"use Linux 6.1 or later, or echo advise > {setting}",
    )  # fmt: skip


def _native() -> Check:
    try:
        from sgl_ext._native import _attention, _transfer
    except ImportError as error:
        return Check("native parts", "fail", str(error), "reinstall with scripts/setup.sh")
    isas = ", ".join(_attention.isas())
    rings = "with" if _transfer.io_uring_built() else "without"
    return Check("native parts", "ok", f"attention for {isas}; transfer engine {rings} io_uring")


def _io_uring() -> Check:
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(120)  # struct io_uring_params
    descriptor = libc.syscall(_IO_URING_SETUP, 1, parameters)
    if descriptor >= 0:
        os.close(descriptor)
        return Check("io_uring", "ok", "permitted")
    reason = os.strerror(ctypes.get_errno())
    return Check("io_uring", "note", f"refused: {reason}", "SSD reads fall back to threads")


def _shared_memory() -> Check:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Check("shared memory", "note", f"/dev/shm: {error.strerror}", "mount a tmpfs there")
    found = f"{_gib(usage.free)} free of {_gib(usage.total)}"
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


def _sections(config: ExtConfig) -> Iterator[Check]:
    present = config.sections()
    for name in SECTIONS:
        if name not in present:
            yield Check(name, "ok", f"off (needs {_NEEDS[name]})")
            continue
        section = present[name]
        probed = "; --model-path looks at the model, too" if name == "chunks" else ""
        yield Check(name, "ok", f"on{probed}")
        if isinstance(section, Restore) and not any(known(cache_dir() / PROFILES)):
            yield Check(
                "restore profile", "note", "none: servers learn what computing and loading cost",
                "sgl-ext calibrate --model-path … with this configuration",
            )  # fmt: skip
        if isinstance(section, Tiers) and section.ssd is not None:
            for directory in section.ssd.directories:
                yield _ssd_directory(name, directory, section.ssd.capacity)
        if isinstance(section, Clusters):
            for directory in section.directories:
                yield _ssd_directory(name, directory, 0)
        host = _host_memory(section) if isinstance(section, Tiers) else 0
        host += section.capacity if isinstance(section, Swap) else 0
        if host > (available := available_memory()):
            yield Check(
                f"{name} host memory", "fail", f"{_gib(host)} asked, {_gib(available)} available",
                "lower its capacity",
            )  # fmt: skip


def _host_memory(tiers: Tiers) -> int:
    return tiers.host.capacity if tiers.host else tiers.staging


def _ssd_directory(section: str, directory: Path, capacity: int) -> Check:
    name = f"{section} directory {directory}"
    if not directory.is_dir():
        return Check(name, "fail", "does not exist", "create it")
    if not os.access(directory, os.W_OK | os.X_OK):
        return Check(name, "fail", "not writable", "change its owner or mode")
    usage = shutil.disk_usage(directory)
    if capacity > usage.total:
        return Check(
            name, "fail", f"capacity {_gib(capacity)} on a disk of {_gib(usage.total)}", "lower it"
        )
    found = f"{_gib(usage.free)} free"
    try:
        direct = _takes_direct_io(directory)
    except OSError as error:
        return Check(name, "fail", f"cannot be written: {error.strerror}", "free or change it")
    if not direct:
        return Check(name, "note", f"{found}, no O_DIRECT", "reads go through the page cache")
    return Check(name, "ok", f"{found}, O_DIRECT")


def _takes_direct_io(directory: Path) -> bool:
    """Writes one aligned block with O_DIRECT; some file systems refuse only the write."""
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".sgl_ext-doctor-") as file:
        try:
            descriptor = os.open(file.name, os.O_RDWR | os.O_DIRECT)
            try:
                with mmap.mmap(-1, mmap.PAGESIZE) as block:
                    os.write(descriptor, block)
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
    return True


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
