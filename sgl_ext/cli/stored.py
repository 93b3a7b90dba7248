"""Commands for contexts on the devices of ``clusters``: store, cluster, stored."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from sgl_ext.cli.app import (
    DEFAULT_URL,
    AdminKeyOption,
    JsonOption,
    KeyOption,
    SaltOption,
    UrlOption,
    app,
    delete_each,
    fail,
    failing,
    print_json,
    progress,
    text_of,
)
from sgl_ext.clusters.client import StoredContexts

_stored = typer.Typer(
    no_args_is_help=True,
    help="Stored contexts on SSDs, for requests to attend to (clusters section).",
)
app.add_typer(_stored, name="stored")


@app.command(hidden=True)
@_stored.command("store")
def store(
    file: Annotated[Path, typer.Argument(help="Text of the context, in UTF-8.")],
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    admin_api_key: AdminKeyOption = None,
    cache_salt: SaltOption = None,
    base: Annotated[
        Optional[str],  # noqa: UP045  (typer reads it)
        typer.Option(help="Id of the stored context that the text continues."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Has a running server store a text on its devices, and prints the id of the context."""
    server = StoredContexts(url, admin_api_key or api_key, cache_salt)
    with failing(), progress("waiting") as shown:
        text, began = text_of(file), time.monotonic()

        def tell(what: str) -> None:
            stage, _, layers = what.partition(" ")
            done, _, of = layers.partition("/")
            shown(stage, int(done) if of else None, int(of) if of else None)

        found = server.store(text, base=base, tell=tell)
    seconds, tokens = time.monotonic() - began, found["tokens"]
    if as_json:
        print_json({**found, "seconds": seconds})
        return
    per_token = "" if base else f", {1e3 * seconds / tokens:.1f} s per 1,000 tokens"
    typer.echo(f"{tokens} tokens in {seconds:.1f} s{per_token}", err=True)
    print(found["id"])


@_stored.command("list")
def list_(
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    cache_salt: SaltOption = None,
    as_json: JsonOption = False,
) -> None:
    """Lists the stored contexts, and those that are being stored."""
    with failing():
        found = StoredContexts(url, api_key, cache_salt).list()
    if as_json:
        print_json(found)
        return
    table = Table(Column("id", no_wrap=True), "tokens", "MiB", "state", box=None, pad_edge=False)
    for each in found["contexts"]:
        size = each["bytes"] / 2**20
        table.add_row(each["id"], f"{each['tokens']:,}", f"{size:,.1f}", "stored")
    for id_, state in found["storing"].items():
        table.add_row(id_, "", "", state)
    for id_, reason in found["unreadable"].items():
        table.add_row(id_, "", "", f"[red]{escape(reason)}[/]")
    Console().print(table)
    if found["damaged"]:
        damaged = f"{found['damaged']} indexes cannot be read; the server's log names their files"
        typer.echo(f"sgl_ext: {damaged}", err=True)


@_stored.command()
def delete(
    ids: Annotated[list[str], typer.Argument(help="Ids of the contexts.")],
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    admin_api_key: AdminKeyOption = None,
    cache_salt: SaltOption = None,
    as_json: JsonOption = False,
) -> None:
    """Deletes stored contexts; requests that use them run to their end."""
    delete = StoredContexts(url, admin_api_key or api_key, cache_salt).delete
    delete_each(delete, ids, as_json=as_json)


@app.command()
def cluster(
    record: Annotated[Path, typer.Argument(help="Record of a context that a server has written.")],
    directories: Annotated[
        list[Path], typer.Argument(help="Directories, one per device, as in clusters.directories.")
    ],
    name: Annotated[
        str,
        typer.Option(
            help="Start of the context's id, after stx-; up to 40 letters, digits, - and _."
        ),
    ] = "",
    copies: Annotated[
        int, typer.Option(min=1, max=2, help="Copies of each block, on different devices.")
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Stores a recorded context on devices, so that requests can use it."""
    from sgl_ext.clusters.job import store as write
    from sgl_ext.clusters.paths import new_id

    if not re.fullmatch("[A-Za-z0-9_-]{0,40}", name):
        fail(f"--name {name!r} is invalid; use up to 40 characters of A-Z a-z 0-9 _ -")
    if copies > len(directories):
        fail(f"--copies {copies} needs as many directories; {len(directories)} given: give more")
    id_ = new_id(name)
    with failing(OSError), progress("layers") as shown:
        write(record, id_, directories, lambda done, of: shown("layers", done, of), copies)
    if as_json:
        print_json({"id": id_, "directories": [str(each) for each in directories]})
    else:
        print(id_)
