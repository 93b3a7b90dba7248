"""Private directory of a launcher: its mode, the length of its path, and its removal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys, tempfile
from sgl_ext.engine.launch import run_directory
run_directory.remember_instance("abc123")
with run_directory.as_temporary_directory():
    print(tempfile.mkdtemp(), flush=True)
sys.stdin.read()
"""


def start(tmp_path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip


def directory_of(process: subprocess.Popen[str]) -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip()).parent


def test_directory_is_private_and_removed_with_its_process(tmp_path: Path) -> None:
    process = start(tmp_path)
    directory = directory_of(process)
    assert directory.parent == tmp_path
    assert directory.stat().st_mode & 0o777 == 0o700
    process.communicate("")
    assert not directory.exists()


def test_threads_share_one_directory(tmp_path: Path) -> None:
    program = """
import time
from concurrent.futures import ThreadPoolExecutor
from sgl_ext.engine.launch import run_directory
run_directory._remove_stale = lambda _: time.sleep(0.05)  # so that the threads meet there
with ThreadPoolExecutor(8) as threads:
    found = list(threads.map(lambda _: run_directory.subdirectory().parent, range(64)))
assert len(set(found)) == 1, set(found)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)
    assert not [*tmp_path.iterdir()]


def test_next_launcher_removes_only_what_a_killed_one_left(
    tmp_path: Path,
) -> None:
    killed, living = start(tmp_path), start(tmp_path)
    left, kept = directory_of(killed), directory_of(living)
    segment = Path("/dev/shm/sglang_loads_abc123_test.shm")
    segment.touch()
    digits = Path("/dev/shm/sglang_loads_987654321098_test.shm")  # no process id
    digits.touch()
    (left / "shm-sglang_loads_987654321098_*").touch()
    (left / "shm-sgl_shm_*_1_*").touch()  # the pid of a worker that another process has now
    taken = Path("/dev/shm/sgl_shm_test_1_abc123")
    taken.touch()
    other = tmp_path / "sgl_ext-another"  # not a launcher's: it has no lock
    other.mkdir()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    young = start(tmp_path)
    directory_of(young)
    assert left.exists()  # it is young: its launcher may be about to lock it
    for directory in (left, kept, other):
        os.utime(directory, (0, 0))
    directory_of(start(tmp_path))
    assert not left.exists()
    assert not segment.exists()
    assert not digits.exists()
    assert taken.exists()
    taken.unlink()
    assert kept.exists()
    assert other.exists()
    for process in (living, young):
        process.communicate("")


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    _, errors = start(deep).communicate("")
    assert "is too long for the path of a socket" in errors
    assert "set TMPDIR to a shorter one" in errors
    assert list(deep.iterdir()) == []


def test_a_forked_child_does_not_remove_the_directory(tmp_path: Path) -> None:
    program = PROGRAM.replace("sys.stdin.read()", "os.fork() or sys.exit()\nos.wait()\n") + (
        "from pathlib import Path\nprint(len(list(Path(tempfile.gettempdir()).iterdir())))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert result.stdout.splitlines()[-1] == "1"
    assert list(tmp_path.iterdir()) == []
