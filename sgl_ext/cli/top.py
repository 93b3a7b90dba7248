"""Live view of running servers: top."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Optional
from urllib.parse import urlsplit

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape

from sgl_ext.cli.app import DEFAULT_URL, JsonOption, KeyOption, app, failing, print_json
from sgl_ext.cli.tables import Scheduler, tables
from sgl_ext.errors import ExtError
from sgl_ext.verify.target import Target

_INTERVAL_S = 1.0


@app.command()
def top(
    urls: Annotated[
        Optional[list[str]],  # noqa: UP045  (typer reads it)
        typer.Argument(help=f"URLs of the servers; {DEFAULT_URL} if none is given."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the tables once and exit.")] = False,
    api_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Shows what the powers of running servers do: hits, links, swaps, lent memory, decisions."""
    targets = [Target(url, api_key) for url in urls or [DEFAULT_URL]]
    with failing():
        first = schedulers(targets)
        if as_json:
            print_json({each.name: each.state for each in first})
        elif once:
            Console().print(tables(first, first, _INTERVAL_S))
        else:
            try:
                _watch(targets, first)
            except KeyboardInterrupt:
                raise typer.Exit from None


def schedulers(targets: Sequence[Target]) -> list[Scheduler]:
    """Returns the schedulers of servers, and their state.

    Raises:
        ExtError: A server does not answer, or runs without sgl_ext.
    """
    return [each for target in targets for each in _of(target)]


def _of(target: Target) -> list[Scheduler]:
    info = target.info()
    if not info.get("sgl_ext"):
        raise ExtError(
            f"the server at {target.url} runs without sgl_ext; start it with --enable-ext"
        )
    states: list[dict[str, Any]] = [each.get("sgl_ext", {}) for each in info["internal_states"]]
    name = urlsplit(target.url).netloc.removeprefix("127.0.0.1")
    if len(states) == 1:
        return [Scheduler(name, states[0])]
    return [Scheduler(f"{name} {number}", state) for number, state in enumerate(states)]


def _watch(targets: Sequence[Target], before: list[Scheduler]) -> None:
    """Shows tables until the program is interrupted; an error is shown below the last ones."""
    then = time.monotonic()
    with Live(tables(before, before, _INTERVAL_S), refresh_per_second=4) as live:
        while True:
            time.sleep(_INTERVAL_S)
            try:
                now, at = schedulers(targets), time.monotonic()
            except ExtError as error:  # the server may come back
                live.update(Group(tables(before, before, _INTERVAL_S), escape(str(error))))
                continue
            live.update(tables(now, before, at - then))
            before, then = now, at
