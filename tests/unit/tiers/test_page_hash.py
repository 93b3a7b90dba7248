"""SGLang's hash of pages: compiled before a server is ready, and refused if it cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sgl_ext.config import load
from sgl_ext.engine.tiers import page_hash
from sgl_ext.errors import ExtError
from sgl_ext.preflight import examine

COMPILER = """#!/bin/sh
case $* in
    *hash_binding*) echo 'hash.cpp:5: fatal error: openssl/sha.h: missing' >&2; exit 1 ;;
    *) exec c++ "$@" ;;
esac
"""
PROGRAM = "from sgl_ext.engine.tiers import page_hash; page_hash.prepare()"


def test_the_ninja_of_the_environment_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment that is not activated is not in ``PATH``."""
    before = os.environ["PATH"]
    monkeypatch.setenv("PATH", before)
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    page_hash.prepare()
    folder = Path(sys.executable).parent
    assert os.environ["PATH"] == f"{folder}{os.pathsep}{before}"
    assert (folder / "ninja").exists()


def test_a_failed_compilation_says_what_is_needed(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "CXX": str(compiler), "TORCH_EXTENSIONS_DIR": str(tmp_path / "cache")},
    )  # fmt: skip
    assert found.returncode == 1
    (line,) = (line for line in found.stderr.splitlines() if "sgl_ext.errors.ExtError" in line)
    assert "fatal error: openssl/sha.h" in line
    assert "apt-get install g++ ninja-build libssl-dev" in line


def test_doctor_and_launcher_check_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ExtError("SGLang cannot compile its hash of pages: no compiler; install one")

    config = load({"tiers": {"host": {"capacity": "1MiB"}}})
    assert "SGLang's hash of pages is compiled" in {each.found for each in examine(config)}
    monkeypatch.setattr(page_hash, "prepare", fail)
    (check,) = (each for each in examine(config) if each.verdict == "fail")
    assert check.todo == "install one"
    assert "fail" not in {each.verdict for each in examine(load({}))}
