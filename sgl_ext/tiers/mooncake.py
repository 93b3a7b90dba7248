"""Client of a Mooncake store whose calls return within a deadline.

The library's own calls return late when the store fails: after some seconds if the master is
unreachable, after 60 s if a peer is frozen. They therefore run on worker threads, and the caller
waits for the answer until a deadline. The first call that finds the store unavailable opens a
circuit breaker: all other calls fail at once until a background probe is answered.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_ext.errors import ExtError

WORKERS = 4
"""Number of concurrent calls. An overdue call occupies its worker until it ends."""
RETRY = 2.0
"""Seconds between attempts to reach a store that is unavailable."""

Codes = NDArray[np.int64]
"""The library's return code for each page, ``[pages]``; a negative code is a failure."""
TIMEOUT, UNREACHABLE, RAISED = -1_000_000, -1_000_001, -1_000_002
"""Codes of the client itself: no answer by the deadline; not called because the breaker is open or
the client closed; the library raised an exception."""
_NAMES = {
    TIMEOUT: "timeout",
    UNREACHABLE: "unreachable",
    RAISED: "client",
    -200: "full",
    -704: "missing",
    -800: "peer",
    -900: "master",
    -901: "master",
}
_METADATA, _PROTOCOL = "P2PHANDSHAKE", "tcp"
"""Peers ask each other for metadata; the transport protocol."""
_BREAKING = [TIMEOUT, RAISED, -900, -901]

_ENVIRONMENT = {
    # Less severe messages repeat the return codes or are of no use.
    "MC_LOG_LEVEL": "ERROR",
    "MC_YLT_LOG_LEVEL": "critical",
    "MC_STORE_CLIENT_METRIC": "0",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    # The defaults are about 30 s each, during which an overdue call would occupy its worker.
    "MC_RPC_TIMEOUT_MS": "3000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "3000",
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "3",
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",
}
"""Environment variables that the library reads when it is loaded; values of the user have
precedence."""

_log = logging.getLogger(__name__)


def reason(code: int) -> str:
    """Returns the name of a negative code, or its number if it has no name."""
    return _NAMES.get(code, str(code))


class Client:
    """Client of one store, with a deadline for each call and a circuit breaker.

    Thread-safe. It starts without a reachable master, and serves as soon as the master answers.
    """

    def __init__(
        self,
        memory: NDArray[np.uint8],
        *,
        master: str,
        segment: int,
        deadline: float,
        host: str | None,
    ) -> None:
        """Joins the store in the background, and waits up to ``deadline`` for it.

        Args:
            memory: The only memory that pages may be sent from and fetched to.
            master: ``HOST:PORT`` of the master.
            segment: Bytes of memory to add to the store.
            deadline: Seconds that a call may take.
            host: Address at which peers reach this machine; by default, the local address of the
                route to the master.

        Raises:
            ExtError: The library is missing, or an argument is invalid.
        """
        if segment < 0 or deadline <= 0:
            raise ExtError(
                f"remote tier: segment of {segment} B and deadline of {deadline} s; expected a "
                "segment of 0 or more, and a deadline above 0"
            )
        self._master = _address(master)
        self._library = library()
        self._memory = memory
        self._segment, self._host = segment, host
        self._deadline = deadline
        self._store: Any = None
        self._workers = ThreadPoolExecutor(WORKERS, "sgl_ext-remote")
        self._lock = threading.Lock()
        self._up = threading.Event()
        self._closing = threading.Event()
        self._finisher: threading.Thread | None = None
        self._connector = self._connect_in_background(0.0)
        if not self._up.wait(deadline):
            _log.warning(
                "remote tier: no answer from a master at %s; serving without it and retrying "
                "every %.0f s",
                master,
                RETRY,
            )

    @property
    def available(self) -> bool:
        """True if the breaker is closed, so that calls are made."""
        return self._up.is_set()

    def call(self, pages: int, method: str, *arguments: Any) -> Codes:
        """Calls ``method`` of the library and returns a code for each of ``pages`` pages."""
        return self.result(self.submit(method, *arguments), pages)

    def submit(self, method: str, *arguments: Any) -> Future[list[int]]:
        """Starts a call of ``method``.

        Returns:
            A future of the library's codes; a cancelled one while the breaker is open and after
            :meth:`close`.
        """
        if self._up.is_set():
            try:
                return self._workers.submit(getattr(self._store, method), *arguments)
            except RuntimeError:
                pass  # Closed meanwhile.
        refused: Future[list[int]] = Future()
        refused.cancel()
        return refused

    def result(self, call: Future[list[int]], pages: int) -> Codes:
        """Waits for a started call and returns a code for each of ``pages`` pages.

        Waits for the deadline at most: an overdue call fails with TIMEOUT but may go on. A failure
        of the store or the library opens the breaker.
        """
        codes = self._wait(call, pages)
        broken = np.isin(codes, _BREAKING)
        if broken.any():
            self._break(reason(int(codes[broken][0])))
        return codes

    def close(self) -> None:
        """Leaves the store and removes this process's segment from it.

        Overdue calls are waited for in the background. They end within about a minute, and the
        process does not exit before. Nothing accesses ``memory`` after that.
        """
        with self._lock:
            if self._finisher is None:
                self._closing.set()
                self._up.clear()
                # Not a daemon: a thread inside the library must not outlive the interpreter.
                self._finisher = threading.Thread(target=self._finish, name="sgl_ext-remote-close")
                self._finisher.start()
        # Without a master, the library takes about 5 s to leave.
        self._finisher.join(10.0)

    def _finish(self) -> None:
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._connector.join()
        if self._store is not None:
            self._store.unregister_buffer(self._memory.ctypes.data)
            self._store.close()
            self._store = None

    def _wait(self, call: Future[list[int]], pages: int) -> Codes:
        try:
            return np.array(call.result(self._deadline), np.int64)
        except CancelledError:
            return np.full(pages, UNREACHABLE)
        except TimeoutError:
            call.cancel()
            return np.full(pages, TIMEOUT)
        except Exception:
            _log.exception("remote tier: the client library failed")
            return np.full(pages, RAISED)

    def _break(self, why: str) -> None:
        with self._lock:
            if not self._up.is_set():
                return
            self._up.clear()
            self._connector = self._connect_in_background(RETRY)
        _log.warning(
            "remote tier: %s:%d is unavailable (%s); retrying every %.0f s",
            *self._master,
            why,
            RETRY,
        )

    def _connect_in_background(self, delay: float) -> threading.Thread:
        # A daemon: a scheduler that exits without closing must not wait for the master to return.
        thread = threading.Thread(
            target=self._connect, args=(delay,), name="sgl_ext-remote-connect", daemon=True
        )
        thread.start()
        return thread

    def _connect(self, delay: float) -> None:
        """Tries every :data:`RETRY` seconds to reach the store, until it answers.

        The library itself adds the segment again to a master that was restarted.
        """
        while not self._closing.wait(delay):
            delay = RETRY
            if self._answers():
                with self._lock:
                    if not self._closing.is_set():
                        self._up.set()
                        _log.info("remote tier: %s:%d is available", *self._master)
                return

    def _answers(self) -> bool:
        try:
            if self._store is None:
                self._store = self._join()
            if self._store is None:
                return False
            probe = self._workers.submit(self._store.batch_is_exist, ["sgl_ext-probe"])
        except (OSError, RuntimeError) as error:  # No route to the master; closed meanwhile.
            _log.debug("remote tier: %s", error)
            return False
        return bool((self._wait(probe, 1) >= 0).all())

    def _join(self) -> Any:
        store = self._library.MooncakeDistributedStore()
        host = self._host or _local_address(self._master)
        master = "{}:{}".format(*self._master)
        code = store.setup(host, _METADATA, self._segment, 0, _PROTOCOL, "", master)
        code = code or store.register_buffer(self._memory.ctypes.data, self._memory.nbytes)
        if code:
            store.close()
            _log.debug("remote tier: the client library cannot connect to %s (%d)", master, code)
            return None
        return store


def _address(master: str) -> tuple[str, int]:
    host, _, port = master.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ExtError(
            f"remote tier: master {master!r} is not HOST:PORT; give the address that "
            "mooncake_master listens on, such as 10.0.0.1:50051"
        )
    return host, int(port)


def _local_address(master: tuple[str, int]) -> str:
    """Returns the local address of the route to the master; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(master)
        return str(probe.getsockname()[0])


def library() -> Any:
    """Imports and returns the module of Mooncake's client.

    Raises:
        ExtError: The client is not installed, or a library that it needs is missing.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise ExtError(
            "remote tier: Mooncake's client is not installed; install the package "
            "mooncake-transfer-engine-non-cuda (mooncake-transfer-engine on machines with CUDA)"
        ) from error
    except ImportError as error:
        raise ExtError(
            f"remote tier: Mooncake's client cannot be loaded ({error}); on Debian and Ubuntu, "
            "as root: apt-get update && apt-get install libibverbs1 libnuma1 libcurl4"
        ) from error
