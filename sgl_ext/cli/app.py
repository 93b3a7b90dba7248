"""The application of the command line, and the options that its commands share."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn, Optional, Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sgl_ext import SUPPORTED_SGLANG, __version__
from sgl_ext.config import ExtConfig, load
from sgl_ext.config.source import ConfigError
from sgl_ext.errors import ExtError
from sgl_ext.progress import say

DEFAULT_URL = "http://127.0.0.1:30000"
_LINES_S = 10.0
"""Time between two lines about the same work, in seconds."""

app = typer.Typer(
    no_args_is_help=True,
    help="Tools for sgl_ext. The server itself is started with SGLang's own command.",
)

ConfigOption = Annotated[
    Optional[str],  # noqa: UP045  (typer reads it)
    typer.Option(
        "--config",
        "--ext-config",
        metavar="FILE|JSON",
        help="Configuration, in the format of the server's --ext-config.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
URL_VARIABLE = "SGLEXT_URL"
UrlOption = Annotated[str, typer.Option(help="URL of the server.", envvar=URL_VARIABLE)]
KeyOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="API key of the server, if it has one.", envvar="SGLEXT_API_KEY"),
]
AdminKeyOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="Admin API key of the server, if it has one.", envvar="SGLEXT_ADMIN_API_KEY"),
]
SaltOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="Salt of the tenant that the contexts belong to."),
]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"sgl_ext {__version__} for SGLang {' and '.join(SUPPORTED_SGLANG)}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True,
            help="Print the versions of sgl_ext and of the SGLang releases that it supports.",
        ),
    ] = False,
) -> None:  # fmt: skip
    """Accepts the options that stand before a command."""
    warnings.showwarning = lambda message, *_: typer.echo(f"sgl_ext: {message}", err=True)


@contextmanager
def failing(*errors: type[Exception]) -> Iterator[None]:
    """Ends the program with status 1 and the message of an ExtError or one of ``errors``."""
    caught: tuple[type[Exception], ...] = (ExtError, *errors)
    try:
        yield
    except caught as error:
        fail(str(error))


def text_of(file: Path) -> str:
    """Returns the text of a file.

    Raises:
        ExtError: the file cannot be read, is not UTF-8, or is empty.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ExtError(f"{file} cannot be read: {why}; give a UTF-8 text file") from None
    if not text.strip():
        raise ExtError(f"{file} is empty; give a file that contains text")
    return text


def delete_each(delete: Callable[[str], None], ids: Iterable[str], *, as_json: bool) -> None:
    """Deletes contexts one by one, and prints the id of each, also if a later one fails."""
    deleted = []
    with failing():
        try:
            for id_ in ids:
                delete(id_)
                deleted.append(id_)
                if not as_json:
                    print(f"deleted {id_}")
        finally:
            if as_json:
                print_json({"deleted": deleted})


def fail(message: str, code: int = 1) -> NoReturn:
    """Prints an error and ends the program."""
    typer.echo(f"sgl_ext: {message}", err=True)
    raise typer.Exit(code)


def configuration(source: str | None) -> ExtConfig:
    """Returns the configuration of ``--config``; an invalid one ends the program with status 2."""
    try:
        return load(source)
    except ConfigError as error:
        fail(str(error), 2)


def print_json(value: Any) -> None:
    """Prints a value as the output of ``--json``."""
    print(json.dumps(value, indent=1))


class Tell(Protocol):
    """Function that sets the text, the count and the total of a progress bar."""

    def __call__(self, text: str, done: int | None = None, of: int | None = None, /) -> None: ...


@contextmanager
def progress(what: str) -> Iterator[Tell]:
    """Shows a bar on standard error, or lines if that is no terminal.

    Yields:
        A function that sets what is shown.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True,
    ) as shown:  # fmt: skip
        bar = shown.add_task(what, total=None, count="")

        def tell(text: str, done: int | None = None, of: int | None = None, /) -> None:
            count = "" if of is None else f"{done:,} of {of:,}"
            shown.update(bar, description=text, completed=done, total=of, count=count)

        yield tell


def _lines() -> Tell:
    """Returns a function that prints a line for each new text, and at times how far it is."""
    said, when = "", 0.0

    def tell(text: str, done: int | None = None, of: int | None = None, /) -> None:
        nonlocal said, when
        now = time.monotonic()
        if text == said and (of is None or now - when < _LINES_S):
            return
        count = f", {done:,} of {of:,}" if of is not None and text == said else ""
        said, when = text, now
        say(f"{text}{count}")

    return tell
