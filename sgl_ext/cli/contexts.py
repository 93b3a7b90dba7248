"""Commands for the context cache of ``chunks``: contexts list, create, delete, pin, unpin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Optional

import msgspec
import typer
from rich.console import Console
from rich.table import Column, Table

from sgl_ext.cli.app import (
    DEFAULT_URL,
    JsonOption,
    KeyOption,
    SaltOption,
    UrlOption,
    app,
    delete_each,
    failing,
    print_json,
    progress,
    text_of,
)
from sgl_ext.client import ContextCache, ContextInfo

_contexts = typer.Typer(
    no_args_is_help=True, help="Contexts that prompts name, in the cache of the chunks section."
)
app.add_typer(_contexts, name="contexts")


@_contexts.command("list")
def list_(
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    cache_salt: SaltOption = None,
    as_json: JsonOption = False,
) -> None:
    """Lists the contexts of a tenant, the least recently used first."""
    with failing():
        _print(ContextCache(url, api_key, cache_salt).list(), as_json=as_json)


@_contexts.command()
def create(
    files: Annotated[list[Path], typer.Argument(help="Texts in UTF-8, one context each.")],
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    cache_salt: SaltOption = None,
    method: Annotated[
        Optional[str],  # noqa: UP045  (typer reads it)
        typer.Option(help="Link method, such as lego-16; the server's default if none is given."),
    ] = None,
    prefix: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Text that the prompts begin with, such as the system prompt."),
    ] = None,
    ttl: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Seconds until the contexts expire; never if none are given."),
    ] = None,
    split: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Largest number of tokens; longer texts are split at paragraphs."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Computes the KV of texts, so that prompts can link them, and prints their contexts."""
    cache = ContextCache(url, api_key, cache_salt)
    parts = None if split is None else {"by": "paragraph", "tokens": split}
    with failing(), progress("waiting") as shown:
        texts = [text_of(file) for file in files]

        def tell(what: str) -> None:
            done, _, of = what.partition("/")
            shown("computing", int(done), int(of))

        made = cache.create(texts, method, prefix, ttl, parts, tell)
    _print(made, as_json=as_json)


@_contexts.command()
def delete(
    ids: Annotated[list[str], typer.Argument(help="Ids of the contexts.")],
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    cache_salt: SaltOption = None,
    as_json: JsonOption = False,
) -> None:
    """Deletes contexts; requests that already link them continue."""
    delete_each(ContextCache(url, api_key, cache_salt).delete, ids, as_json=as_json)


@_contexts.command()
def pin(
    ids: Annotated[list[str], typer.Argument(help="Ids of the contexts.")],
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    cache_salt: SaltOption = None,
    as_json: JsonOption = False,
) -> None:
    """Pins contexts: they stay when the server has more contexts than chunks.limit."""
    _change("pinned", ContextCache(url, api_key, cache_salt).pin, ids, as_json=as_json)


@_contexts.command()
def unpin(
    ids: Annotated[list[str], typer.Argument(help="Ids of the contexts.")],
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    cache_salt: SaltOption = None,
    as_json: JsonOption = False,
) -> None:
    """Unpins contexts, which the server may then drop again."""
    _change("unpinned", ContextCache(url, api_key, cache_salt).unpin, ids, as_json=as_json)


def _change(
    what: str, change: Callable[[str], ContextInfo], ids: list[str], *, as_json: bool
) -> None:
    """Changes contexts one by one, and prints the id of each, also if a later one fails."""
    changed = []
    with failing():
        try:
            for id_ in ids:
                changed.append(change(id_))
                if not as_json:
                    print(f"{what} {id_}")
        finally:
            if as_json:
                _print(tuple(changed), as_json=True)


def _print(contexts: tuple[ContextInfo, ...], *, as_json: bool) -> None:
    if as_json:
        print_json({"contexts": msgspec.to_builtins(contexts)})
        return
    table = Table(
        Column("id", no_wrap=True),
        "tokens",
        "MiB",
        "method",
        "expires in",
        "pinned",
        box=None,
        pad_edge=False,
    )
    for each in contexts:
        left = "never" if each.expires_in is None else f"{each.expires_in:,.0f} s"
        size = f"{each.bytes / 2**20:,.1f}"
        pinned = "yes" if each.pinned else ""
        table.add_row(each.id, f"{each.tokens:,}", size, each.method, left, pinned)
    Console().print(table)
