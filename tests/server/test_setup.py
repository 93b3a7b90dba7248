"""Tests of the set-up script: refusals in one sentence, and no work for a current environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

SETUP = ROOT / "scripts" / "setup.sh"


def run(venv: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SETUP], env={**os.environ, "SGLEXT_VENV": str(venv), **environment},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def refused(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode != 0
    (line,) = result.stderr.splitlines()
    assert line.startswith("sgl_ext: ")
    return line


def refused_at_last(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode != 0
    return result.stderr.splitlines()[-1]


def test_other_python_versions_are_refused(tmp_path: Path) -> None:
    old = program(tmp_path / "python3.9", "echo 3.9")
    message = refused(run(tmp_path / "venv", SGLEXT_PYTHON=old))
    assert f"Python 3.11 is needed (the pinned packages are built for it), {old} is 3.9" in message
    assert not (tmp_path / "venv").exists()


def test_a_python_that_does_not_run_is_refused(tmp_path: Path) -> None:
    assert "does not run" in refused(run(tmp_path / "venv", SGLEXT_PYTHON="/bin/false"))


def test_a_python_without_headers_is_refused(tmp_path: Path) -> None:
    said = 'case "$2" in *sysconfig*) echo /nowhere ;; *) echo 3.11 ;; esac'
    bare = program(tmp_path / "python3.11", said)
    message = refused(run(tmp_path / "venv", SGLEXT_PYTHON=bare))
    assert "/nowhere/Python.h was not found" in message and "python3.11-dev" in message
    assert not (tmp_path / "venv").exists()


def test_folder_that_is_not_a_virtual_environment_is_kept(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("keep")
    message = refused_at_last(run(precious, SGLEXT_PYTHON=sys.executable))
    assert "is not a virtual environment" in message
    assert (precious / "data").read_text() == "keep"


def test_missing_system_libraries_are_named_with_the_command(tmp_path: Path) -> None:
    program(tmp_path / "ldconfig", "echo 'libcurl.so.4 (libc6,x86-64) => /lib/libcurl.so.4'")
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "data").touch()  # not a virtual environment, so that the set-up ends
    path = f"{tmp_path}:{os.environ['PATH']}"
    result = run(tmp_path / "venv", PATH=path, SGLEXT_PYTHON=sys.executable, CI="")
    said = result.stderr.splitlines()[0]
    assert "on Debian and Ubuntu, as root: apt-get update && apt-get install -y" in said
    assert said.endswith(" libibverbs1 libnuma1")
    if os.geteuid() == 0:  # CI runs as root
        program(tmp_path / "apt-get", f"echo $@ >> {tmp_path}/called")
        run(tmp_path / "venv", PATH=path, SGLEXT_PYTHON=sys.executable, CI="1")
        update, install = (tmp_path / "called").read_text().splitlines()
        assert update == "update"
        assert install.endswith("--no-install-recommends libibverbs1 libnuma1")


def test_a_full_disk_is_refused(tmp_path: Path) -> None:
    program(tmp_path / "df", "printf 'head\\nfs 100 90 10 90%% /\\n'")
    path = f"{tmp_path}:{os.environ['PATH']}"
    result = run(tmp_path / "venv", PATH=path, SGLEXT_PYTHON=sys.executable)
    assert "needs 5000 MiB" in refused(result)
    assert "has 10 MiB free" in result.stderr


def test_an_unwritable_location_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run(tmp_path / "file" / "venv", SGLEXT_PYTHON=sys.executable)
    assert result.returncode != 0
    assert "set SGLEXT_VENV to a writable place" in result.stderr


def test_a_failed_install_names_its_command_and_leaves_no_stamp(tmp_path: Path) -> None:
    """Runs pip without an index, as on a machine without a network."""
    environment = {
        "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull,
        "SGLEXT_PYTHON": sys.executable,
    }  # fmt: skip
    venv = tmp_path / "venv"
    result = run(venv, **environment)
    assert result.returncode != 0
    assert "set-up stopped at: pip install" in result.stderr
    assert "Run this script again to continue." in result.stderr
    assert not (venv / ".sgl_ext_setup").exists()


@pytest.mark.skipif(
    not (ROOT / ".venv" / ".sgl_ext_setup").exists(), reason="not run from scripts/test.sh's .venv"
)
def test_a_current_environment_is_left_unchanged() -> None:
    result = run(ROOT / ".venv")
    assert (result.returncode, result.stderr) == (0, "")
