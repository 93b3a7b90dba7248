"""Command that shows what a power does: demo."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sgl_ext.cli.app import JsonOption, app, fail, failing, print_json, progress
from sgl_ext.config import SECTIONS


@app.command()
def demo(
    power: Annotated[str, typer.Argument(metavar="|".join(SECTIONS), help="Power that is shown.")],
    as_json: JsonOption = False,
) -> None:
    """Shows what a power does: starts servers on a small model, and compares before and after.

    Takes 1 to 1.5 minutes on 2 cores, mostly server start-up; the first run also downloads the
    model.
    """
    from sgl_ext.demo.powers import DEMOS

    if power not in DEMOS:
        fail(f"unknown power {power!r}; choose one of {', '.join(DEMOS)}", 2)
    began = time.monotonic()
    sides = []
    with failing(OSError), progress("starting servers") as tell:
        for side in DEMOS[power]():
            sides.append(side)
            tell(f"shown: {side.title}")
    if as_json:
        print_json([{"title": side.title, "seconds": side.seconds, **side.rows} for side in sides])
        return
    table = Table("", *(side.title for side in sides), pad_edge=False, show_lines=True)
    for name in dict.fromkeys(name for side in sides for name in side.rows):
        table.add_row(name, *(escape(side.rows.get(name, "")) for side in sides))
    first = sides[0].seconds
    if first is not None:
        times = [
            f"{first / side.seconds:.1f} times as fast" if side.seconds else "" for side in sides
        ]
        table.add_row("", "", *times[1:])
    Console().print(table)
    print(f"took {time.monotonic() - began:.0f} s; SmolLM2-135M-Instruct on this machine's CPU")
