"""Commands for the caches of a running server: cache clear, warm, stat."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sgl_ext.cli.app import (
    DEFAULT_URL,
    AdminKeyOption,
    JsonOption,
    KeyOption,
    SaltOption,
    UrlOption,
    app,
    failing,
    print_json,
    progress,
    text_of,
)
from sgl_ext.cli.top import top
from sgl_ext.verify.target import Target

_cache = typer.Typer(no_args_is_help=True, help="Caches of a running server.")
app.add_typer(_cache, name="cache")


@_cache.command()
def clear(
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    admin_api_key: AdminKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Empties the caches in device and host memory; KV on SSDs and in the store stays."""
    with failing():
        Target(url, api_key, admin_api_key).flush()
    if as_json:
        print_json({"cleared": True})
    else:
        print("cleared")


@_cache.command()
def warm(
    files: Annotated[
        list[Path],
        typer.Argument(help="Prompts, or their beginnings, in UTF-8; no chat template is applied."),
    ],
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    cache_salt: SaltOption = None,
    as_json: JsonOption = False,
) -> None:
    """Precomputes the KV of prompts so that later requests hit the cache."""
    target, done = Target(url, api_key), []
    with failing(), progress("computing") as tell:
        for number, file in enumerate(files):
            tell("computing", number, len(files))
            reply = target.answer(text_of(file), 1, salt=cache_salt)
            cached = sum(reply.sources.values())
            done.append({"file": str(file), "tokens": reply.prompt, "cached": cached})
    if as_json:
        print_json(done)
        return
    for each in done:
        print(f"{each['file']}: {each['tokens']:,} tokens, of which {each['cached']:,} were cached")


@_cache.command()
def stat(
    url: UrlOption = DEFAULT_URL, api_key: KeyOption = None, as_json: JsonOption = False
) -> None:
    """Prints the state of the powers once, as sgl-ext top does."""
    top([url], once=True, api_key=api_key, as_json=as_json)
