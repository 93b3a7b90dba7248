"""Life cycle of SGLang servers that a program starts side by side."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil
import requests

from sgl_ext.engine.launch import run_directory
from sgl_ext.errors import ExtError
from sgl_ext.progress import say
from sgl_ext.serving import quick_start
from sgl_ext.serving.mapped import mapped_segments, segments

START_DEADLINE_S = 300.0
BESIDE_OTHERS = ("--mem-fraction-static", "0.95")
"""Arguments of servers that start side by side: SGLang counts memory that other servers load
meanwhile as its own weights."""
_STOP_DEADLINE_S = 30.0
_PORTS = range(10_000, 22_000)
"""Ports of servers. They are below those that SGLang gives to its own sockets while it starts, and
below those that the kernel gives to connections."""
_PORTS_TRIED = 100
_held: list[socket.socket] = []


def extension(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the arguments that enable the extension with a configuration."""
    return ("--enable-ext", "--ext-config", json.dumps(config))


@dataclass(frozen=True)
class System:
    """Configuration of a server that is compared with others."""

    name: str
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Server:
    """Running server of a system."""

    system: System
    url: str
    log: Path
    process: psutil.Popen


@contextmanager
def logs(prefix: str) -> Iterator[Path]:
    """Yields a folder for logs of servers, which is removed unless the block raises an ExtError.

    The error then names the folder.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    except ExtError as error:
        if str(folder) in str(error):
            raise
        raise ExtError(f"{error}; logs of the servers: {folder}") from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def serve(
    systems: Sequence[System],
    model: Path,
    logs: Path,
    *,
    deadline: float = START_DEADLINE_S,
    drain: bool = True,
) -> Iterator[list[Server]]:
    """Starts all ``systems`` side by side; at the end stops them and removes what they leave.

    Their address is chosen here, whatever the arguments say. Idle schedulers sleep, so that the
    server that is measured has the machine to itself.

    Args:
        logs: directory of the ``NAME.log`` files, one per system.
        deadline: seconds until the last server must be ready.
        drain: whether servers end their requests and close what they have open, which takes
            seconds; else they are killed, and what they leave is removed.

    Raises:
        ExtError: a server ended or was not ready in time; the message has the last lines of its
            log.
    """
    logs.mkdir(parents=True, exist_ok=True)
    give_up = time.monotonic() + deadline
    say(f"starting {', '.join(system.name for system in systems)}; logs in {logs}")
    with ExitStack() as stack:
        servers = [
            stack.enter_context(_process(system, model, logs, drain=drain)) for system in systems
        ]
        for server in servers:
            _wait_until_ready(server, give_up)
        try:
            yield servers
        finally:
            for server in servers:  # signals all first, because each takes seconds to end
                if drain:
                    with suppress(psutil.NoSuchProcess):
                        server.process.terminate()


@contextmanager
def _process(system: System, model: Path, logs: Path, *, drain: bool) -> Iterator[Server]:
    port = free_port()
    log = logs / f"{system.name}.log"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    # Last, because the last of several equal flags is in force.
    command += [*system.arguments, "--host", "127.0.0.1", "--port", str(port), "--sleep-on-idle"]
    if setpriv := shutil.which("setpriv"):
        # The servers end when this program is killed.
        command = [setpriv, "--pdeathsig", "TERM", *command]
    scratch = run_directory.subdirectory()
    environment = {
        **quick_start.environment_for(model),
        **os.environ,
        **system.environment,
        "TMPDIR": str(scratch),
    }
    with log.open("wb") as sink:
        process = _start(command, environment, sink)
        try:
            yield Server(system, f"http://127.0.0.1:{port}", log, process)
        finally:
            _stop(process, drain=drain)
            shutil.rmtree(scratch, ignore_errors=True)


def _start(command: Sequence[str], environment: Mapping[str, str], sink: IO[bytes]) -> psutil.Popen:
    """Starts a process in a new session, with its output in a file. Tests replace this function."""
    return psutil.Popen(
        command,
        stdout=sink,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,
    )


def free_port() -> int:
    """Returns a free TCP port of the loopback interface; no other call returns it again.

    A server binds the port seconds later. Until then no other server may choose it, because its
    answers would be taken for those of this server. The port is reserved while this process lives.

    Raises:
        ExtError: no free port was found.
    """
    for _ in range(_PORTS_TRIED):
        port = secrets.choice(_PORTS)
        held = socket.socket()
        try:
            held.bind(("127.0.0.1", port))
        except OSError:
            held.close()
            continue
        # A server can bind a port that is bound but not listened on; this function cannot.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _held.append(held)
        return port
    raise ExtError(
        f"{_PORTS_TRIED} ports from {_PORTS.start} to {_PORTS.stop - 1} were in use; end some"
    )


def _wait_until_ready(server: Server, give_up: float) -> None:
    while time.monotonic() < give_up:
        if server.process.poll() is not None:
            raise ExtError(
                f"the server {server.system.name!r} ended with code {server.process.returncode}; "
                f"its log {server.log} ends with:\n{_last_lines(server.log)}"
            )
        with suppress(requests.RequestException):
            if requests.get(f"{server.url}/health", timeout=5).ok:
                return
        time.sleep(0.2)
    raise ExtError(
        f"the server {server.system.name!r} was not ready in time; "
        f"its log {server.log} ends with:\n{_last_lines(server.log)}"
    )


def _last_lines(log: Path, count: int = 8) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(line[:300] for line in lines[-count:])


def _stop(process: psutil.Popen, *, drain: bool) -> None:
    tree = _tree(process)
    shared_memory = _shared_memory_of(tree)
    if process.poll() is None and drain:
        process.terminate()
        try:
            process.wait(_STOP_DEADLINE_S)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(_STOP_DEADLINE_S)
    for left in tree:
        with suppress(psutil.NoSuchProcess):
            left.kill()
    psutil.wait_procs(tree, timeout=_STOP_DEADLINE_S)
    for segment in shared_memory:
        segment.unlink(missing_ok=True)


def _tree(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [*process.children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        return []


def _shared_memory_of(tree: list[psutil.Process]) -> list[Path]:
    """Returns the POSIX shared memory that processes have mapped.

    Stock SGLang leaves it behind when it is stopped.
    """
    return segments(mapped_segments([process.pid for process in tree]))
