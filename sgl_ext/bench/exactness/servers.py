"""Servers of an exactness run: the server under test, stock SGLang, and a peer's other side."""

from __future__ import annotations

import copy
import os
import shlex
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from sgl_ext.serving.mapped import mapped_segments, segments
from sgl_ext.serving.server import BESIDE_OTHERS, Server, System, extension, serve

ARGUMENTS = (
    "--page-size", "16", "--max-total-tokens", "3072", "--chunked-prefill-size", "512",
    "--dtype", "float32", "--enable-priority-scheduling", *BESIDE_OTHERS,
)  # fmt: skip
_STOCK = (*ARGUMENTS, "--max-total-tokens", "49152")
_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
_STRICT = {**_ENVIRONMENT, "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
_COMPLAINTS = ("leak detected", "hit an exception", "exception in asgi")
UNDER_TEST, BESIDE = "server", "peer"


@dataclass(frozen=True)
class Setup:
    """Configurations of a run, with new directories.

    Attributes:
        config: configuration of the server under test.
        beside: configuration of its peer; None without a peer.
    """

    config: Mapping[str, Any]
    beside: Mapping[str, Any] | None

    def has(self, section: str) -> bool:
        return section in self.config

    def systems(self, arguments: str = "") -> list[System]:
        """Returns stock SGLang, the server under test, and its peer.

        Args:
            arguments: further SGLang arguments, which override :data:`ARGUMENTS`.
        """
        more = shlex.split(arguments)
        found = [System("stock", _STOCK, _ENVIRONMENT)]
        for name, config in ((UNDER_TEST, self.config), (BESIDE, self.beside)):
            if config is not None:
                on = extension(config)
                found.append(System(name, (*ARGUMENTS, *more, *on), _STRICT))
        return found


def setup(config: Mapping[str, Any], scratch: Path, sockets: Path) -> Setup:
    """Returns a valid configuration with every directory that it names replaced by a new one.

    A run therefore begins with nothing stored, and does not touch the files of a server in use.

    Args:
        scratch: folder for the directories of tiers and clusters.
        sockets: directory of peers; its path must be short, because it has sockets.
    """
    config = copy.deepcopy(dict(config))

    def new(name: str) -> str:
        path = scratch / name
        path.mkdir(mode=0o700, parents=True)
        return str(path)

    stores = {"ssd": config.get("tiers", {}).get("ssd"), "clusters": config.get("clusters")}
    for name, section in stores.items():
        if section:
            count = len(section["directories"])
            section["directories"] = [new(f"{name}{at}") for at in range(count)]
    if "peer" not in config:
        return Setup(config, None)
    peer = config["peer"]
    peer["directory"] = str(sockets)
    terms = {name: peer[name] for name in ("deadline", "lease", "capacity") if name in peer}
    other = {"directory": peer["directory"], **terms}
    if peer["role"] == "master":
        beside = {**other, "role": "worker", "window": "1s"}
    else:
        beside = {"capacity": "16MiB", **other, "role": "master"}
    return Setup(config, {"peer": beside})


class Victim:
    """Server that can be killed and started again with the same arguments.

    Args:
        place: folder of the logs.
        stack: stack that ends the servers that were started again.
    """

    def __init__(self, server: Server, model: Path, place: Path, stack: ExitStack) -> None:
        self.server = server
        self.down = False
        """True from a kill until the server is ready again."""
        self.deaths = 0
        """Number of kills."""
        self.logs = [server.log]
        self._model, self._place, self._stack = model, place, stack

    @property
    def name(self) -> str:
        return self.server.system.name.partition("-")[0]

    @property
    def url(self) -> str:
        return self.server.url

    def died(self) -> str:
        """Returns why the server has ended; empty if it is alive or this run killed it."""
        if self.down or (code := self.server.process.poll()) is None:
            return ""
        return f"{self.name} ended with code {code}; its log is {self.server.log}"

    def kill(self) -> None:
        self.down = True
        self.deaths += 1
        with suppress(ProcessLookupError):
            os.killpg(self.server.process.pid, signal.SIGKILL)
        self.server.process.wait()

    def start(self) -> None:
        """Starts the server again.

        Raises:
            ExtError: it does not start.
        """
        system = replace(self.server.system, name=f"{self.name}-{self.deaths}")
        (self.server,) = self._stack.enter_context(serve([system], self._model, self._place))
        self.logs.append(self.server.log)
        self.down = False


def complaints(logs: Sequence[Path]) -> list[str]:
    """Returns the lines of logs that report an error of a server.

    SGLang's traceback of a request whose client has disconnected is not an error.
    """
    found = []
    for log in logs:
        for line in log.read_text(errors="replace").splitlines():
            if any(sign in line.lower() for sign in _COMPLAINTS):
                found.append(f"{log.name}: {line.strip()[:300]}")
    return found


def end(servers: Sequence[Server], deadline: float = 60.0) -> list[str]:
    """Ends servers as an operator does, and returns what is left of them.

    Left are processes that go on after the deadline, and shared memory that they had mapped.

    Args:
        deadline: seconds in which all processes must end.
    """
    trees = [_tree(server) for server in servers]
    mapped = [mapped_segments([each.pid for each in tree]) for tree in trees]
    for server in servers:
        with suppress(psutil.NoSuchProcess):
            server.process.terminate()
    _, alive = psutil.wait_procs([each for tree in trees for each in tree], timeout=deadline)
    left = [f"process {each.pid} goes on" for each in alive]
    return left + [str(path) for path in segments(frozenset().union(*mapped))]


def _tree(server: Server) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return [server.process, *server.process.children(recursive=True)]
    return []
