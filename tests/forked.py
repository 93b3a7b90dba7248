"""Starts SGLang processes by forking a process that has already imported SGLang.

The import dominates the start of a server with a small model, and each of its three processes
repeats it. Here a *template* process imports SGLang once per test session and forks the launcher of
every server, or the interpreter of a program that starts engines. The launcher first forks *spare*
children; ``multiprocessing`` turns a spare into the process that it would otherwise spawn. The
process tree is the same as in a real start: schedulers are children of the launcher, and the
launcher is a child of the caller.

A process whose environment differs in variables that are read at import time is started without the
template: see :func:`forkable`.
"""

from __future__ import annotations

import ctypes
import gc
import io
import os
import pickle
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import context, popen_fork, reduction, resource_tracker, spawn, util
from multiprocessing.context import set_spawning_popen
from pathlib import Path
from typing import Any

import psutil
import setproctitle
import shortcuts

_IMPORTED = (
    "sglang.srt.entrypoints.engine",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
    "sgl_ext.engine.core.scheduler",
    "sgl_ext.engine.launch.launcher",
    "torch.utils.cpp_extension",
)
_LATE = {
    "SGLANG_CHECK_KV_PAGE_INVARIANTS",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR",
    "SGLANG_TEST_RETRACT",
    "SGLANG_TEST_RETRACT_INTERVAL",
}  # fmt: skip
"""Names of variables that SGLang reads after its imports, or that :func:`_apply` reads again."""
_EARLY = ("LD_", "KMP_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON", "SGLANG_", "TORCH", "TRITON_")
"""Prefixes of environment variables that are read at import time, or earlier."""
_SPARES = 4
_SABOTAGE = Path(__file__).parent / "sabotage.py"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def forkable(environment: Mapping[str, str], **imported: str) -> bool:
    """Returns whether a process with this environment can be forked from a template.

    Args:
        imported: variables that the template has besides those of this process.
    """
    own = {**os.environ, **imported}

    def early(name: str) -> bool:
        return name.startswith(_EARLY) and name not in _LATE

    names = filter(early, {*environment, *own})
    return all(environment.get(name) == own.get(name) for name in names)


class Forked(psutil.Process):
    """A forked child process, with the part of ``psutil.Popen`` that tests use."""

    returncode: int | None = None

    def __init__(self, pid: int, environment: Mapping[str, str]) -> None:
        super().__init__(pid)
        self._environment = dict(environment)

    def environ(self) -> dict[str, str]:
        return self._environment

    def wait(self, timeout: float | None = None) -> int | None:
        if self.returncode is None:
            self.returncode = super().wait(timeout)
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except psutil.TimeoutExpired:
            return None


class Template:
    """A process that has imported SGLang and forks others; it starts at the first fork.

    Args:
        imported: environment variables of the process besides those of this one.
    """

    def __init__(self, **imported: str) -> None:
        self._imported = imported
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(
        self,
        program: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdout: int,
        stderr: int,
    ) -> Forked:
        """Forks a process in a new session, which gets SIGTERM when the caller ends.

        Args:
            program: ``-m MODULE`` or a file, and its arguments.
            environment: an environment that :func:`forkable` accepts.
            stdout, stderr: file descriptors.
        """
        if self._socket is None:
            shortcuts.prepare_models()
            self._socket, theirs = socket.socketpair()
            folder, handle = str(Path(__file__).parent), theirs.fileno()
            code = f"import sys; sys.path[0] = {folder!r}; import forked; forked.main({handle})"
            command = [sys.executable, "-c", code]
            # Tests that run at the same time share the cores: a thread that waits must not spin.
            self._process = subprocess.Popen(
                command, pass_fds=[handle], stdin=subprocess.DEVNULL,
                env={**os.environ, **self._imported, "OMP_WAIT_POLICY": "passive"},
            )  # fmt: skip
            theirs.close()
        # The forked process is orphaned at once, and becomes a child of the nearest subreaper.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        try:
            request = pickle.dumps((list(program), dict(environment), str(Path.cwd())))
            sent = struct.pack("=I", len(request))
            socket.send_fds(self._socket, [sent], [stdout, stderr])
            self._socket.sendall(request)
            answer = self._socket.recv(4)
        finally:
            _prctl(_PR_SET_CHILD_SUBREAPER, 0)
        if len(answer) < 4:
            raise RuntimeError("the process that imports SGLang for others has ended")
        (pid,) = struct.unpack("=I", answer)
        if not pid:
            raise RuntimeError("the process that imports SGLang for others could not fork")
        return Forked(pid, environment)

    def run(
        self, program: Sequence[str], environment: Mapping[str, str], *, timeout: float,
        folder: Path,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Runs a program as ``subprocess.run`` does, and captures its output in ``folder``."""
        if program[0] == "-c" or not forkable(environment, **self._imported):
            return subprocess.run(
                [sys.executable, *program],
                env=dict(environment), capture_output=True, text=True, timeout=timeout, check=False,
            )  # fmt: skip
        told, complained = folder / "stdout", folder / "stderr"
        with told.open("wb") as out, complained.open("wb") as err:
            process = self.start(program, environment, stdout=out.fileno(), stderr=err.fileno())
        try:
            code = process.wait(timeout)
        finally:
            if process.poll() is None:
                for each in (*process.children(recursive=True), process):
                    each.kill()
        assert code is not None
        return subprocess.CompletedProcess(
            program, code, told.read_text(), complained.read_text(errors="replace")
        )

    def close(self) -> None:
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait(30)
            self._socket = None


template = Template()


def _prctl(what: int, value: int) -> None:
    if _libc.prctl(what, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _received(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        if not (more := connection.recv(size - len(found))):
            raise EOFError
        found += more
    return found


def _requests(connection: socket.socket) -> tuple[list[str], dict[str, str], str] | None:
    """Forks a process for every request.

    Returns:
        The program, environment and working directory of the request, in the forked process; None
        in the template, after the other end has closed the connection.
    """
    while True:
        size, handles, *_ = socket.recv_fds(connection, 4, 2)
        if not size:
            return None
        request = _received(connection, *struct.unpack("=I", size))
        reader, writer = os.pipe()
        between = os.fork()
        if not between:
            if own := os.fork():
                os.write(writer, struct.pack("=I", own))
                os._exit(0)
            connection.close()
            os.close(reader)
            os.close(writer)
            for place, handle in enumerate(handles, 1):
                os.dup2(handle, place)
                os.close(handle)
            found: tuple[list[str], dict[str, str], str] = pickle.loads(request)  # noqa: S301
            return found
        os.close(writer)
        os.waitpid(between, 0)
        # Nothing is written if the second fork failed: then the requester fails, too.
        connection.sendall(os.read(reader, 4) or struct.pack("=I", 0))
        for handle in (reader, *handles):
            os.close(handle)


def _apply(environment: Mapping[str, str], *, child: bool = False) -> None:
    """Sets the environment, and what SGLang derives from it at import time.

    Args:
        child: True in a child of the forked process, such as a scheduler.
    """
    import numpy as np
    from sglang.srt.environ import envs, redirect_third_party_caches
    from sglang.srt.managers import scheduler

    tempfile.tempdir = None  # SGLang's imports have set it from the old environment
    os.environ.clear()
    os.environ.update(environment)
    redirect_third_party_caches()
    scheduler.TEST_RETRACT = envs.SGLANG_TEST_RETRACT.get()
    scheduler.TEST_RETRACT_INTERVAL = envs.SGLANG_TEST_RETRACT_INTERVAL.get()
    np.random.seed()
    if "SABOTAGE" in environment:
        runpy.run_path(str(_SABOTAGE), {"CHILD": child})


_spares: list[tuple[int, socket.socket]] = []
_handles: list[int] = []


class _DupFd:
    def __init__(self, place: int) -> None:
        self._place = place

    def detach(self) -> int:
        return _handles[self._place]


class _Popen(popen_fork.Popen):
    """Starts a ``multiprocessing`` process in a spare."""

    method = "spawn"
    DupFd = _DupFd

    def __init__(self, process_obj: Any) -> None:
        self._handles: list[int] = []
        super().__init__(process_obj)

    def duplicate_for_child(self, fd: int) -> int:
        self._handles.append(fd)
        return len(self._handles) - 1

    def _launch(self, process_obj: Any) -> None:
        prepared: Any = spawn.get_preparation_data(process_obj._name)
        prepared["environment"] = dict(os.environ)
        message = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(prepared, message)
            reduction.dump(process_obj, message)
        finally:
            set_spawning_popen(None)
        self.sentinel, theirs = os.pipe()
        reader, writer = os.pipe()
        self.pid, connection = _spares.pop()
        handles = [resource_tracker.getfd(), reader, theirs, *self._handles]
        socket.send_fds(connection, [b"!"], handles)
        connection.close()
        os.close(theirs)
        os.close(reader)
        self.finalizer = util.Finalize(self, util.close_fds, (self.sentinel, writer))
        with open(writer, "wb", closefd=False) as stream:
            stream.write(message.getbuffer())


def _start_spares() -> None:
    for _ in range(_SPARES):
        ours, theirs = socket.socketpair()
        if pid := os.fork():
            theirs.close()
            _spares.append((pid, ours))
            continue
        ours.close()
        for _, connection in _spares:
            connection.close()
        _spares.clear()
        try:
            said, handles, *_ = socket.recv_fds(theirs, 1, 250)
        except KeyboardInterrupt:
            os._exit(1)
        if not said:
            os._exit(0)
        theirs.close()
        resource_tracker._resource_tracker._fd, reader, _ = handles[:3]  # type: ignore[attr-defined]
        _handles[:] = handles[3:]
        shortcuts.end(spawn._main(reader, os.dup(reader)))  # type: ignore[attr-defined]


def _popen(process_obj: Any, spawned: Any = context.SpawnProcess._Popen) -> Any:  # type: ignore[attr-defined]
    # An engine that was shut down has killed all children, spares among them.
    _spares[:] = [spare for spare in _spares if _lives(spare[0])]
    return _Popen(process_obj) if _spares else spawned(process_obj)


def _lives(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG) == (0, 0)
    except ChildProcessError:
        return False


def _prepare(data: dict[str, Any], original: Any = spawn.prepare) -> None:
    _apply(data.pop("environment", os.environ.copy()), child=True)
    original(data)


def main(handle: int) -> None:
    """Runs the template, or the requested program in a forked process, to its end."""
    connection = socket.socket(fileno=handle)
    for name in _IMPORTED:
        __import__(name)
    shortcuts.install()
    # A collection in a forked process would copy the pages of all imported objects.
    gc.collect()
    gc.freeze()
    setproctitle.getproctitle()  # locates argv, which requires the original environment
    spawn.prepare = _prepare
    context.SpawnProcess._Popen = staticmethod(_popen)  # type: ignore[attr-defined]
    parent = os.getppid()
    request = _requests(connection)
    if request is None:
        return
    program, environment, folder = request
    os.setsid()
    os.chdir(folder)
    _apply(environment)
    _start_spares()
    deadline = time.monotonic() + 10
    while os.getppid() != parent and time.monotonic() < deadline:
        time.sleep(0.001)  # the end of the intermediate parent must not send the signal
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    sys.path[0] = ""
    try:
        if program[0] == "-m":
            sys.argv = program[1:]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(program)
            sys.path[0] = str(Path(program[0]).parent)
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as exit_:
        shortcuts.end(exit_.code)
    shortcuts.end(0)
