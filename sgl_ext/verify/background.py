"""Requests that wait in threads of their own, for which nothing waits when a program ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")
_POLLED_S = 0.2


class Background(Generic[Result]):
    """Call of a function in a daemon thread."""

    def __init__(self, call: Callable[[], Result]) -> None:
        self._call = call
        self._found: list[Result] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._found.append(self._call())
        except BaseException as error:  # raised by result()
            self._error = error

    def result(self) -> Result:
        """Waits until the call has ended, and returns what it has.

        Raises:
            Exception: the error of the call.
        """
        while self._thread.is_alive():
            self._thread.join(_POLLED_S)  # Ctrl-C ends a wait with a time limit only
        if self._error is not None:
            raise self._error
        return self._found[0]
