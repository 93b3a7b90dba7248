"""Requests that wait in threads of their own, for which nothing waits when a program ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def background(call: Callable[[], Result]) -> Future[Result]:
    """Calls a function in a daemon thread, which a pool of threads does not have."""
    found: Future[Result] = Future()

    def run() -> None:
        try:
            found.set_result(call())
        except BaseException as error:  # raised by result()
            found.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return found
