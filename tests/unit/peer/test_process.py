"""Liveness of a peer's process, which decides whether lent memory is reused or replaced."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from sgl_ext.peer.process import Process, identity


def test_identities_have_different_sockets() -> None:
    one, other = identity(), identity()
    assert one.socket != other.socket
    assert len(one.socket) < 108  # the longest address of a Unix socket


def test_a_process_is_alive_until_it_ends() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watched = Process(child.pid)
    assert watched.alive()
    child.communicate(b"\n", timeout=60)
    assert not watched.alive()
    assert not Process(child.pid).alive()


def test_a_process_without_a_descriptor_counts_as_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prevents a worker from reusing memory that its master still writes."""

    def none_left(_pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", none_left)
    assert Process(os.getpid()).alive()
