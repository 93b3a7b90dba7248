"""C++ tests of the transfer engine under ThreadSanitizer and AddressSanitizer."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT

from sgl_ext.packages import cache_dir, directory_lock

SOURCES = ROOT / "kernels" / "native"
BUILD_DEADLINE_S = 300
TEST_DEADLINE_S = 120

OPTIONS = {
    # The history is long enough to report both sides of a race in tests with many threads.
    "thread": {"TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1:history_size=4"},
    "address": {"ASAN_OPTIONS": "detect_leaks=1:detect_stack_use_after_return=1"},
}


@pytest.mark.parametrize("sanitizer", sorted(OPTIONS))
def test_transfer_engine_passes_its_cpp_tests_under_sanitizers(sanitizer: str) -> None:
    environment = {
        **os.environ,
        **OPTIONS[sanitizer],
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }

    def run(*command: str, timeout: int) -> str:
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
        output = result.stdout + result.stderr
        assert result.returncode == 0, output[-8000:]
        return output

    # The user's cache keeps a build until a source, the compiler or the interpreter changes.
    build = cache_dir() / "sanitizers" / f"{sanitizer}-{digest(run)}"
    complete = build / "complete"
    with directory_lock(build):
        if not complete.exists():
            configure = ["-S", str(SOURCES), "-B", str(build), "-G", "Ninja"]
            configure += ["-DSGLEXT_TESTS=ON", f"-DSGLEXT_SANITIZE={sanitizer}"]
            configure += ["-DCMAKE_CXX_FLAGS_RELEASE=-O1", f"-DPython_EXECUTABLE={sys.executable}"]
            run("cmake", *configure, timeout=BUILD_DEADLINE_S)
            target = ["--build", str(build), "--target", "transfer_tests"]
            run("cmake", *target, timeout=BUILD_DEADLINE_S)
            complete.touch()
    tests = ["ctest", "--test-dir", str(build), "-R", "^transfer_", "--output-on-failure"]
    tests += ["--no-tests=error"]
    # Newer kernels randomize addresses, which then collide with the shadow memory of older
    # sanitizers. A container may not permit setarch to disable the randomization.
    fixed_addresses = ["setarch", os.uname().machine, "-R"]
    if shutil.which("setarch") and not subprocess.run([*fixed_addresses, "true"]).returncode:
        tests = [*fixed_addresses, *tests]
    assert "100% tests passed" in run(*tests, timeout=TEST_DEADLINE_S)


def digest(run: Callable[..., str]) -> str:
    """Returns a digest of the sources, the paths and the tool versions that determine a build."""
    found = hashlib.sha256(f"{ROOT} {sys.executable}".encode())
    for file in sorted(SOURCES.rglob("*")):
        if file.is_file():
            found.update(f"{file.relative_to(SOURCES)}\0".encode() + file.read_bytes())
    for command in ("cmake", os.environ.get("CXX", "c++")):
        found.update(run(command, "--version", timeout=60).encode())
    return found.hexdigest()[:16]
