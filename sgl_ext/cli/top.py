"""Live view of running servers: top."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, Optional

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape

from sgl_ext.cli.app import DEFAULT_URL, URL_VARIABLE, JsonOption, KeyOption, app, fail, print_json
from sgl_ext.cli.tables import Scheduler, State, tables
from sgl_ext.errors import ExtError
from sgl_ext.verify.target import Target

_INTERVAL_S = 1.0
_ANSWER_S = 10.0
"""Seconds in which a server must report: its scheduler answers between two forwards."""
_STALE_S = 3.0
"""Age from which a report is marked."""


@app.command()
def top(
    urls: Annotated[
        Optional[list[str]],  # noqa: UP045  (typer reads it)
        typer.Argument(
            help=f"URLs of the servers; {DEFAULT_URL} if none is given.", envvar=URL_VARIABLE
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the tables once and exit.")] = False,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Shows what the powers of running servers do: hits, links, swaps, lent memory, decisions.

    For a server with several ranks, shows the first rank only; /metrics has all ranks. Exits with 1
    if a server did not answer.
    """
    watches = [_Watch(Target(url, api_key)) for url in dict.fromkeys(urls or [DEFAULT_URL])]
    if not (once or as_json or Console().is_terminal):
        fail("top needs a terminal; add --once for one table, or --json", 2)
    try:
        _together(watches)
        if not any(each.found for each in watches):
            fail("\n".join(each.error for each in watches))
        if not (once or as_json):
            _show(watches)
    except KeyboardInterrupt:
        raise typer.Exit from None
    if as_json:
        print_json({each.url: each.found.state for each in watches if each.found})
    else:
        Console().print(tables([each.row() for each in watches if each.found]))
    if errors := [each.error for each in watches if each.error]:
        fail("\n".join(errors))


class _Report(NamedTuple):
    """State that a server has reported, and the time at which it did."""

    state: State
    at: float


class _Watch:
    """Latest reports of one server; its error is empty unless the last request failed."""

    def __init__(self, target: Target) -> None:
        self.url = target.url
        self.name = target.url.partition("://")[2].removeprefix("127.0.0.1")
        self.found: _Report | None = None
        self.error = ""
        self._before: _Report | None = None
        self._target = target

    def ask(self) -> None:
        """Asks the server for its state."""
        try:
            info = self._target.info(_ANSWER_S)
            if not info.get("sgl_ext"):
                raise ExtError(
                    f"the server at {self._target.url} runs without sgl_ext; start it with "
                    "--enable-ext"
                )
        except ExtError as error:
            self.error = str(error)
            return
        state: dict[str, Any] = info["internal_states"][0].get("sgl_ext", {})
        report = _Report(state, time.monotonic())
        self._before, self.found, self.error = self.found or report, report, ""

    def follow(self) -> None:
        """Asks the server once a second, without end."""
        while True:
            time.sleep(_INTERVAL_S)
            self.ask()

    def row(self) -> Scheduler:
        """Returns the last state that was reported."""
        if (found := self.found) is None:
            raise ValueError(f"{self.name} has not reported")
        before = self._before or found
        age = time.monotonic() - found.at
        name = f"{self.name} ({age:.0f} s ago)" if age > _STALE_S else self.name
        return Scheduler(name, found.state, before.state, max(found.at - before.at, _INTERVAL_S))


def _together(watches: Sequence[_Watch]) -> None:
    """Asks all servers at once."""
    threads = [threading.Thread(target=each.ask, daemon=True) for each in watches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _show(watches: Sequence[_Watch]) -> None:
    """Shows servers that fail, and below them the tables, until the program is interrupted."""
    for each in watches:
        # A thread of its own: a server that hangs must not stop the view of the others.
        threading.Thread(target=each.follow, daemon=True).start()
    with Live(refresh_per_second=4) as live:
        while True:
            rows = [each.row() for each in watches if each.found]
            errors = [escape(each.error) for each in watches if each.error]
            live.update(Group(*errors, tables(rows)))  # what a terminal is too low for is cut off
            time.sleep(_INTERVAL_S)
