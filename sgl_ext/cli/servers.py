"""Commands for measurements: verify, bench, report."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sgl_ext.cli.app import (
    DEFAULT_URL,
    URL_VARIABLE,
    AdminKeyOption,
    JsonOption,
    KeyOption,
    app,
    fail,
    failing,
    print_json,
    progress,
)
from sgl_ext.errors import ExtError
from sgl_ext.verify.steps import Line, Verification
from sgl_ext.verify.target import Target

_COLOURS = {"same": "green", "note": "yellow", "differs": "red"}


@app.command()
def verify(
    url: Annotated[
        str, typer.Argument(help="URL of the server, which must be idle.", envvar=URL_VARIABLE)
    ] = DEFAULT_URL,
    against: Annotated[
        Optional[str],  # noqa: UP045  (typer reads it)
        typer.Option(
            help="URL of a server of the same model whose answers are the reference, such as stock "
            "SGLang's."
        ),
    ] = None,
    passages: Annotated[int, typer.Option(min=1, max=64, help="Number of texts.")] = 4,
    length: Annotated[int, typer.Option(min=64, help="Tokens of a text, at most.")] = 1024,
    flush: Annotated[
        bool,
        typer.Option(
            help="Whether to flush the server's caches and to fill its device pool; without, lower "
            "tiers are not verified."
        ),
    ] = True,
    api_key: KeyOption = None,
    admin_api_key: AdminKeyOption = None,
    against_api_key: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="API key of the other server, if it has one."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Checks that answers do not depend on where KV comes from.

    Exits with 1 if one does, and with 2 if the verification ended early.

    A few texts are sent when no cache has them, and again with their KV from the device pool, from
    lower tiers, all at once, and with their requests preempted. Answers may differ by what rounding
    explains, in nats: differences of log-probabilities. A note says what was not verified.

    It takes as long as the server needs to compute its device pool, with swap twice (65,536 tokens
    of SmolLM2: one to four minutes on 2 cores). Caches in device and host memory are emptied, and
    the texts may be written to SSDs and the store.
    """
    other = None if against is None else Target(against, against_api_key)
    lines: list[Line] = []
    broken = None
    with progress("asking the server") as tell:
        try:
            verification = Verification(
                Target(url, api_key, admin_api_key), passages=passages, length=length,
                against=other, flush=flush,
            )  # fmt: skip
            for line in verification.run(tell):
                lines.append(line)
        except ExtError as error:
            broken = str(error)
    same = all(line.verdict != "differs" for line in lines)
    if as_json:
        print_json({"same": same, "error": broken, "lines": [asdict(line) for line in lines]})
    else:
        _print(lines)
    if broken is not None:
        fail(f"the verification ended early: {broken}", 1 if not same else 2)
    if not same:
        fail("answers depend on where KV comes from; see the lines that differ")
    if not as_json:
        print("No wrong answer was found.")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(context: typer.Context) -> None:
    """Runs a benchmark: NAME [--quick] [--part PART] [--out DIR].

    It is the same as python -m sgl_ext.bench, whose --help lists the benchmarks.
    """
    from sgl_ext.bench.__main__ import main as run

    run(context.args)


@app.command()
def report(
    records: Annotated[list[Path], typer.Argument(help="Records that bench has written.")],
    out: Annotated[Path, typer.Option(help="Page to write.")] = Path("report.html"),
) -> None:
    """Writes records of benchmarks as one HTML page, with tables and plots."""
    from sgl_ext.bench.html import page, read

    with failing(OSError):
        out.write_text(page([read(each) for each in records]))
    print(f"wrote {out}")


def _print(lines: list[Line]) -> None:
    cold = next((line.seconds for line in lines if line.step == "cold"), None)
    table = Table("step", "", "first token", "KV from", "found", box=None, pad_edge=False)
    for line in lines:
        first = ""
        if line.seconds is not None:
            first = f"{1e3 * line.seconds:,.0f} ms"
            if cold and line.step in _FASTER:
                first += f" ({cold / line.seconds:.1f}\N{MULTIPLICATION SIGN})"
        tokens = sum(line.sources.values())
        sources = ", ".join(
            f"{name} {count / tokens:.0%}" for name, count in line.sources.items() if count
        )
        verdict = f"[{_COLOURS[line.verdict]}]{line.verdict}[/]"
        table.add_row(line.step, verdict, first, escape(sources), escape(line.found))
    Console().print(table)


_FASTER = ("warm", "evicted", "flushed")
"""Steps whose time to the first token is compared with the cold one."""
