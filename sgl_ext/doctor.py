"""Checks of the machine and of each configuration section (``sgl-ext doctor``)."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from sgl_ext import SUPPORTED_SGLANG, preflight
from sgl_ext.config import ExtConfig
from sgl_ext.engine.core import served
from sgl_ext.engine.core.hooks import installed_sglang
from sgl_ext.engine.cpu import platform as cpu
from sgl_ext.errors import ExtError
from sgl_ext.memory import mapping
from sgl_ext.memory.limits import available_memory
from sgl_ext.preflight import Check, size_text

_PROBE_DEADLINE_S = 180
_IO_URING_SETUP = 425  # number of the system call on x86-64 and arm64


def examine(config: ExtConfig) -> list[Check]:
    """Returns all checks: those of the machine, then those of each section."""
    return [
        _python(),
        _torch(),
        _sglang(),
        _accelerator(config),
        _hooks(),
        _memory(),
        _huge_pages(),
        _io_uring(),
        *preflight.examine(config),
    ]


def would_run(checks: list[Check]) -> bool:
    """Returns True if no check failed."""
    return all(check.verdict != "fail" for check in checks)


def as_json(checks: list[Check], config: ExtConfig) -> dict[str, Any]:
    """Returns the report in plain JSON types."""
    return {
        "would_run": would_run(checks),
        "config": config.resolved(),
        "checks": [asdict(check) for check in checks],
    }


def _python() -> Check:
    found = platform.python_version()
    if not found.startswith("3.11."):
        return Check(
            "Python", "note", found, "use 3.11, which the packages are pinned and tested for"
        )
    return Check("Python", "ok", found)


def _torch() -> Check:
    try:
        import torch
    except ImportError as error:
        return Check("torch", "fail", f"not importable: {error}", "run scripts/setup.sh")
    return Check("torch", "ok", str(torch.__version__))


def _sglang() -> Check:
    found = installed_sglang()
    if found not in SUPPORTED_SGLANG:
        return Check("SGLang", "fail", found, f"install sglang=={SUPPORTED_SGLANG[-1]}")
    return Check("SGLang", "ok", found)


def _accelerator(config: ExtConfig) -> Check:
    try:
        inactive, found = cpu.reason_inactive(), cpu.accelerator_name()
    except ImportError as error:
        return Check("accelerator", "fail", str(error), "run scripts/setup.sh")
    if inactive is None:
        return Check("accelerator", "ok", "none; the CPU platform is active")
    unready = {
        name: why for name in config.sections() if found and (why := served.unready(found, name))
    }
    if unready:
        return Check(
            "accelerator", "fail", f"{found}; not served on it: {', '.join(unready)}",
            "; ".join(unready.values()),
        )  # fmt: skip
    return Check("accelerator", "ok", f"the CPU platform is inactive: {inactive}")


def _hooks() -> Check:
    """Checks the hooks in a separate process, because importing SGLang would change this one."""
    try:
        result = subprocess.run(
            [sys.executable, "-m", "sgl_ext.engine.core.probe"],
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
    present = "all hooked SGLang functions and required extension points are present"
    return Check("hooks", "ok", f"{present}; {found}")


def _memory() -> Check:
    available, total = size_text(available_memory()), size_text(psutil.virtual_memory().total)
    return Check("memory", "ok", f"{available} available of {total}")


def _huge_pages() -> Check:
    """Checks huge pages by asking the kernel for one in shared memory, as the slab does.

    The kernel's settings alone do not determine whether it is granted.
    """
    try:
        descriptor = mapping.create("sgl_ext-doctor", mapping.HUGE_PAGE)
        try:
            shared = mapping.Mapping(descriptor, mapping.HUGE_PAGE, writable=True)
        finally:
            os.close(descriptor)
        if not shared.collapse(0, mapping.HUGE_PAGE):
            return Check("huge pages", "ok", "available for shared memory on request")
    except (OSError, ExtError) as error:
        return Check("huge pages", "note", str(error), "free some memory")
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return Check(
        "huge pages", "note", "not available for shared memory; decode over the KV slab is slower",
        f"use Linux 6.1 or later, or echo advise > {setting}",
    )  # fmt: skip


def _io_uring() -> Check:
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(120)  # struct io_uring_params
    descriptor = libc.syscall(_IO_URING_SETUP, 1, parameters)
    if descriptor >= 0:
        os.close(descriptor)
        return Check("io_uring", "ok", "permitted")
    reason = os.strerror(ctypes.get_errno())
    return Check("io_uring", "note", f"refused: {reason}", "SSD reads fall back to threads")
